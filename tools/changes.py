"""Eight changes that people make to the scripts, each done right and done wrong in one place: see tools/doctor.py.

Six of them are part of the library by now, so the right version is our code and the wrong one is a mistake in it.
"""

from dataclasses import dataclass
from pathlib import Path

from course.bugs import NOBODY, Bug

REWARDS = Path(__file__).resolve().with_name("rewards_of_changes.py")
SHORT = ("--total-episodes", "768")


@dataclass(frozen=True, kw_only=True)
class Change:
    wrong: Bug
    """the incorrect version; its name is also the change's name"""
    right: Bug | None = None
    """the correct version; None: already in the library"""
    stage: str = ""
    """stage of the demo to train with the change; empty: no stage shows it"""
    flags: tuple[str, ...] = ()
    """flags that the stage needs for the change"""


CHANGES: tuple[Change, ...] = (
    Change(
        stage="grpo",
        flags=("--algorithm", "gspo", "--clip-range", "0.03", "0.04"),
        wrong=Bug(
            name="gspo", level=2, where="train_grpo:main",
            old="ALGORITHMS[args.algorithm]", new="replace(ALGORITHMS[args.algorithm], has_response_ratio=False)",
            symptom="policy/ratio and policy/approx_kl describe tokens: they are far larger than the ratios of "
            "responses, which are clipped.",
            cause="The loss clips a ratio per response, but the statistics still describe a ratio per token.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        stage="grpo",
        flags=(*SHORT, "--algorithm", "dapo", "--kl-coef", "0"),
        wrong=Bug(
            name="clip-higher", level=3, where="nanorlhf.ppo:ratio_bounds",
            old="1 - lower, 1 + upper", new="1 - upper, 1 + lower",
            symptom="None that is conspicuous: entropy falls slightly faster than it should with clip-higher.",
            cause="The two numbers of --clip-range are swapped, so tokens that become more likely are clipped first.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        stage="grpo",
        flags=(
            *(*SHORT, "--algorithm", "dapo", "--kl-coef", "0", "--missing-eos-score", "None"),
            *("--reward", f"{REWARDS}:told"),
        ),
        wrong=Bug(
            name="dropped-groups", level=2, where="nanorlhf.grpo:refill",
            old="scores[indices] = new_scores[:n]", new="",
            symptom="groups/dropped stays at the initial share of groups with equal scores, although groups/refilled "
            "shows that they were sampled again.",
            cause="Groups with equal scores get new responses but keep the scores of the old ones.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        stage="ppo",
        flags=(*SHORT, "--reward", f"{REWARDS}:told"),
        wrong=Bug(
            name="ground-truth", level=2, where="nanorlhf.batch:Batch.__getitem__",
            old="[value[i] for i in numbers.tolist()]", new="value[: len(numbers)]",
            symptom="objective/score is low and hardly rises, as if the policy could not learn the task.",
            cause="The rollout is sorted by length but the data rows aren't, so a response is compared with the ground "
            "truth of another query.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        stage="ppo",
        flags=(*SHORT, "--reward", f"{REWARDS}:told", f"{REWARDS}:brief"),
        wrong=Bug(
            name="dense-reward", level=3, where="train_ppo:main",
            old="rewards += batch.token_rewards", new="rewards[:, 1:] += batch.token_rewards[:, :-1]",
            symptom="None as long as --lam is near 1, because each advantage contains nearly the same rewards.",
            cause="The reward of a token is added at the next token, so the next token gets the credit.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        stage="dpo",
        flags=("--loss", "kto", "--num-epochs", "0.2", "--lr", "2e-4"),
        wrong=Bug(
            name="kto", level=3, where="train_dpo:main",
            old="args.beta * z0", new="args.beta * reference_point(rows)",
            symptom="None that is conspicuous: results depend on --micro-batch-size.",
            cause="The reference point is estimated from a micro-batch instead of the whole batch.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        wrong=Bug(
            name="gpt-j", level=3, where="kernels.attention:apply_rotary_",
            old="(qk[..., 0::2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)", new="qk.chunk(2, dim=-1)",
            symptom="The pretrained model's loss is far too high, and falls quickly in fine-tuning.",
            cause="GPT-J rotates pairs of neighbouring channels; here channel i is paired with channel i + r/2, as in "
            "GPT-NeoX.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        stage="ppo",
        flags=SHORT,
        right=Bug(
            name="explained-variance", level=0, where="train_ppo:main",
            old="stats.metrics() | sampler_metrics | reward.metrics()",
            new='stats.metrics() | sampler_metrics | reward.metrics() | {"value/explained_variance": 1 - (('
            "batch.returns - batch.values)[batch.states].var() / batch.returns[batch.states].var()).item()}",
            symptom="", cause="", who="", guard=(),
        ),
        wrong=Bug(
            name="explained-variance", level=2, where="train_ppo:main",
            old="stats.metrics() | sampler_metrics | reward.metrics()",
            new='stats.metrics() | sampler_metrics | reward.metrics() | {"value/explained_variance": 1 - (('
            "batch.returns - batch.values).var() / batch.returns.var()).item()}",
            symptom="value/explained_variance depends on --response-length.",
            cause="The variances are computed over all columns, padding included.",
            who=NOBODY,
            guard=(),
        ),
    ),
)  # fmt: skip
