"""The sessions of the four weeks: what to read, run and hand in. module.md and the handouts follow this table."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Session:
    title: str
    read: str
    run: str
    """what to run during the lecture; Markdown"""
    exercises: tuple[str, ...]


SESSIONS: tuple[Session, ...] = (
    Session(
        title="The whole pipeline",
        read="README.md; its map; docs/lecture.md, The task and 1",
        run="`make demo`",
        exercises=("padding", "positions", "attention-mask", "rotary-positions", "sampling", "top-k-and-top-p"),
    ),
    Session(
        title="Demonstrations",
        read="train_sft.py; docs/data.md",
        run="`SEED=2 RUNS=runs/second make demo`",
        exercises=(
            *("leading-blank", "truncation", "batches", "learning-rate", "sft-loss", "ranks"),
            "micro-batches",
        ),
    ),
    Session(
        title="Reward models",
        read="train_rm.py; docs/lecture.md, 2; docs/tldr.md, the four stages",
        run="`python -m course plant hunt --seed 7 --level 1`",
        exercises=(
            *("scalar-head", "reward-at-eos", "pairwise-loss", "regression-loss", "normalisation"),
            "eos-masks",
        ),
    ),
    Session(
        title="Without a reward model",
        read="train_dpo.py; docs/algorithms.md",
        run="a reward of your own, from README.md",
        exercises=("response-logprobs", "dpo-loss", "dpo-logprobs", "kv-cache", "repeated-ngrams"),
    ),
    Session(
        title="PPO",
        read="train_ppo.py; docs/lecture.md, 3; docs/details.md; docs/microscope.md",
        run="`python -m course plant hunt --seed 7 --level 2`",
        exercises=(
            *("policy-gradient", "kl-estimators", "exact-kl", "whitening", "token-rewards", "gae-loop", "gae-terms"),
        ),
    ),
    Session(
        title="When it goes wrong",
        read="docs/lecture.md, 4 and 5; docs/tldr.md, over-optimisation",
        run="`make overoptimise`",
        exercises=(
            *("gae-scan", "policy-loss", "gradient-sign", "value-loss", "values", "adaptive-kl", "one-page"),
            "group-advantages",
        ),
    ),
    Session(
        title="Votes and compilers",
        read="docs/stackoverflow.md; docs/rlcf.md",
        run="`make stackoverflow`; `make rlcf`",
        exercises=(
            *("vote-regression", "vote-contrast", "metric-at-k", "pass-at-k", "localisation", "discriminator"),
            "triplet-loss",
        ),
    ),
    Session(
        title="The model itself, and speed",
        read="docs/str.md; docs/speed.md",
        run="`make str`; `python -m course plant hunt --seed 7 --level 3`",
        exercises=("text-rank", "isodata", "log-softmax", "gae-kernel"),
    ),
)
