"""Eight changes that people make to the scripts, each made right and made wrong in one place: see tools/doctor.py.

Six of them are in the product by now, which is the right one; the wrong one is a slip in it.
"""

from dataclasses import dataclass
from pathlib import Path

from course.bugs import NOBODY, Bug

REWARDS = Path(__file__).resolve().with_name("rewards_of_changes.py")
SHORT = ("--total-episodes", "768")


@dataclass(frozen=True, kw_only=True)
class Change:
    wrong: Bug
    """its name is the change's"""
    right: Bug | None = None
    """None: the product has it"""
    stage: str = ""
    """of the demo, trained with the change; empty: none shows it"""
    flags: tuple[str, ...] = ()
    """that the stage then needs"""


CHANGES: tuple[Change, ...] = (
    Change(
        stage="grpo",
        flags=("--algorithm", "gspo", "--clip-range", "0.03", "0.04"),
        wrong=Bug(
            name="gspo", level=2, where="train_grpo:main",
            old="ALGORITHMS[args.algorithm]", new="replace(ALGORITHMS[args.algorithm], has_response_ratio=False)",
            symptom="policy/ratio and policy/approx_kl are those of tokens: far larger than the ratios of responses, "
            "which are clipped.",
            cause="The loss clips a ratio per response, and the statistics still describe a ratio per token.",
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
            symptom="None that stands out: entropy falls a little faster than clip-higher should let it.",
            cause="The two halves of --clip-range are swapped, so what becomes likelier is clipped first.",
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
            old="scores[again] = more_scores[:n]", new="",
            symptom="groups/dropped is the share of groups that were alike at first, however often groups/refilled "
            "says that they were sampled again.",
            cause="Groups whose scores are equal get new responses and keep the scores of the old ones.",
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
            cause="A rollout is read in the order of lengths, and the rows of the data are not put in that order: a "
            "response is compared with the truth about another query.",
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
            symptom="None while --lam is near 1: each advantage contains nearly the same rewards.",
            cause="The reward of a token is added at the next one, so it counts as the consequence of that token.",
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
            symptom="None that stands out: results depend on --micro-batch-size.",
            cause="The reference point is estimated from the rows of a micro-batch, not from the batch.",
            who=NOBODY,
            guard=(),
        ),
    ),
    Change(
        wrong=Bug(
            name="gpt-j", level=3, where="kernels.attention:apply_rotary_",
            old="(qk[..., 0::2], qk[..., 1::2]) if interleaved else qk.chunk(2, dim=-1)", new="qk.chunk(2, dim=-1)",
            symptom="The pretrained model's loss is far above what it should be, and falls fast as it is fine-tuned.",
            cause="GPT-J rotates neighbouring channels in pairs; here channel i turns with channel i + r/2, as in "
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
            cause="The variances are taken over all columns, and so over padding.",
            who=NOBODY,
            guard=(),
        ),
    ),
)  # fmt: skip
