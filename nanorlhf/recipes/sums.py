"""The embedded sums, whose answers a program checks; the settings don't come from a paper."""

from pathlib import Path

OF_ROLLOUTS: dict = dict(
    data=Path("runs/sums/long"),
    sft="runs/sums/sft",
    reward_model=None,
    reward="data/sums.py:outcome",
    seed=1,
    total_episodes=15_360,
    batch_size=256,
    micro_batch_size=128,
    num_minibatches=2,
    lr=6e-4,
    missing_eos_score=0.0,  # no answer, no reward
    max_query_length=16,
    response_length=32,
    temperature=1.0,
)

RECIPES: dict = {
    "sums": {
        "help": "embedded sums in several steps, whose answers a program checks",
        "sft": dict(
            data=Path("runs/sums/short"),
            out=Path("runs/sums/sft"),
            model=None,
            seed=1,
            n_head=2,  # 32 wide: enough rotary positions to copy from the line above
            d_model=64,
            num_epochs=3,
            batch_size=32,
            micro_batch_size=32,
            lr=4e-3,
            warmup_steps=30,
            loss_on="response",
            max_query_length=16,
            max_response_length=32,
            eval_every=500,
            temperature=1.0,
        ),
        "rm": dict(
            data=Path("runs/sums/long"),
            out=Path("runs/sums/rm"),
            sft="runs/sums/sft",
            seed=1,
            batch_size=32,
            micro_batch_size=32,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=16,
            max_response_length=40,  # a wrong answer may have more digits
        ),
        "ppo": OF_ROLLOUTS | dict(out=Path("runs/sums/ppo"), num_ppo_epochs=2, kl_coef=0.01, score_at="last_token"),
        "grpo": OF_ROLLOUTS | dict(out=Path("runs/sums/grpo"), num_epochs=2, samples_per_query=16, kl_coef=0.01),
        "checked": dict(
            data=Path("runs/sums/long"),
            out=Path("runs/sums/eval"),
            policies=("sft", "runs/sums/sft", "ppo", "runs/sums/ppo", "grpo", "runs/sums/grpo"),
            rewards=("data/sums.py:solved", "data/sums.py:outcome", "data/sums.py:process"),
            by="num_lines",
            num_queries=128,
            batch_size=1024,
            max_query_length=16,
            response_length=32,
            max_response_length=32,
        ),
    },
}
