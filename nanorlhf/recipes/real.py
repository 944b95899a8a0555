"""A pretrained model on real preferences: SmolLM2-135M-Instruct on TL;DR, sized for two CPU cores (`make real`).

N+'s stages with low-rank updates, shorter posts and an independent reward model as gold: it is trained on the other
half of the posts and used only for evaluation. `harmless` does the same on HH-RLHF, whose comparisons teach more than
which reply is longer, with linear reward models and 64 updates of PPO or RLOO. `sentiment` has a known reward instead.
`rewards` compares reward models on published benchmarks, by default those of docs/data.md's chat.
"""

from pathlib import Path

LORA: dict = dict(tune="lora", lora_rank=16, lora_targets=("q", "k", "v", "out", "gate", "up", "down"))
REASONING: dict = dict(
    data=Path("runs/reason/data"),
    sft="HuggingFaceTB/SmolLM2-135M-Instruct",
    reward_model=None,
    reward=("data/reason.py:solved", "data/reason.py:says_a_number"),
    reward_weights=(1.0, 0.2),  # with only the first, most groups have equal scores: all wrong
    max_query_length=64,
    response_length=16,
    **LORA,
    seed=1,
    total_episodes=1536,
    batch_size=64,
    num_minibatches=2,
    lr=3e-4,
    kl_coef=0.02,
    missing_eos_score=0.0,  # no end, no answer
    save_every=8,
)
LENGTHS: dict = dict(max_query_length=128, max_response_length=64)
TURNS: dict = dict(max_query_length=96, max_response_length=96)
SFT: dict = dict(
    model="HuggingFaceTB/SmolLM2-135M-Instruct",
    **LORA,
    seed=1,
    batch_size=16,
    lr=2e-4,
    warmup_steps=5,
    loss_on="response",
    eval_every=35,
    save_every=35,
    num_samples=32,
)
HARMLESS_RL: dict = dict(
    data=Path("runs/harmless/first"),
    sft="runs/harmless/sft",
    reward_model="runs/harmless/rm",
    max_query_length=96,
    response_length=48,
    **LORA,
    seed=1,
    total_episodes=2048,  # 64 updates
    batch_size=32,
    num_minibatches=2,
    lr=2e-4,
    save_every=8,
)
SAMPLES: dict = dict(response_length=48, temperature=0.7, batch_size=32, num_report_samples=8)

RECIPES: dict = {
    "real": {
        "help": "SmolLM2-135M on real posts and preferences, on two CPU cores in hours",
        "sft": SFT | LENGTHS | dict(data=Path("runs/real/first"), out=Path("runs/real/sft")),
        # the gold model is trained on the other half
        "rm": dict(
            data=Path("runs/real/first"),
            sft="runs/real/sft",
            **LENGTHS,
            **LORA,
            seed=1,
            num_epochs=2,
            batch_size=8,
            lr=1e-4,
            warmup_steps=4,
            num_normalisation=64,
            eval_every=50,
            save_every=12,
        ),
        "dpo": dict(
            data=Path("runs/real/first"),
            sft="runs/real/sft",
            **LENGTHS,
            **LORA,
            seed=1,
            num_epochs=2,
            batch_size=8,
            lr=1e-4,
            warmup_steps=4,
            beta=0.1,
            eval_every=50,
            save_every=12,
        ),
        "ppo": dict(
            data=Path("runs/real/first"),
            out=Path("runs/real/ppo"),
            sft="runs/real/sft",
            reward_model="runs/real/rm",
            max_query_length=128,
            response_length=48,
            **LORA,
            seed=1,
            total_episodes=384,
            batch_size=32,
            micro_batch_size=8,
            num_minibatches=2,
            num_ppo_epochs=2,
            lr=5e-4,
            save_every=2,
        ),
        "summaries": SAMPLES
        | LENGTHS
        | dict(
            data=Path("runs/real/first"),
            out=Path("runs/real/eval"),
            policies=("sft", "runs/real/sft", "ppo", "runs/real/ppo", "dpo", "runs/real/dpo")
            + ("best_of_16", "best-of-16:runs/real/sft"),
            reward_model="runs/real/rm",
            gold="runs/real/gold",
            num_queries=48,
        ),
    },
    "harmless": {
        "help": "SmolLM2-135M on HH-RLHF's harmlessness, 64 updates; on two CPU cores in hours",
        "sft": SFT | TURNS | dict(data=Path("runs/harmless/first"), out=Path("runs/harmless/sft")),
        "ppo": HARMLESS_RL | dict(value_model="shared", num_ppo_epochs=1),
        "grpo": HARMLESS_RL | dict(algorithm="rloo", samples_per_query=4, num_epochs=1),
        "summaries": SAMPLES
        | TURNS
        | dict(
            data=Path("runs/harmless/first"),
            out=Path("runs/harmless/eval"),
            policies=("sft", "runs/harmless/sft", "ppo", "runs/harmless/ppo", "rloo", "runs/harmless/rloo")
            + ("best_of_16", "best-of-16:runs/harmless/sft"),
            reward_model="runs/harmless/rm",
            gold="runs/harmless/gold",
            num_queries=96,
        ),
    },
    "sentiment": {
        "help": "SmolLM2-135M continues film dialogues, rewarded for positive sentiment; on two CPU cores in minutes",
        "ppo": dict(
            data=Path("runs/sentiment/data"),
            out=Path("runs/sentiment/ppo"),
            sft="HuggingFaceTB/SmolLM2-135M-Instruct",
            reward_model=None,
            reward="data/sentiment.py:score",
            max_query_length=48,
            response_length=24,
            **LORA,
            seed=1,
            total_episodes=768,
            batch_size=32,
            num_minibatches=2,
            num_ppo_epochs=2,
            value_model="shared",
            lr=2e-4,
            temperature=1.0,
            kl_coef=0.02,
            missing_eos_score=None,
            score_at="last_token",
            save_every=8,
        ),
        "summaries": dict(
            data=Path("runs/sentiment/data"),
            out=Path("runs/sentiment/eval"),
            policies=("before", "HuggingFaceTB/SmolLM2-135M-Instruct", "ppo", "runs/sentiment/ppo"),
            reward_model=None,
            gold="data/sentiment.py:gold_score",
            max_query_length=48,
            max_response_length=24,
            response_length=24,
            temperature=1.0,
            kl_temperature=1.0,
            num_queries=128,
            num_report_samples=8,
        ),
    },
    "rewards": {
        "help": "reward models on RewardBench, RewardBench 2 or RM-Bench",
        "reward_benchmark": dict(
            data=Path("runs/rewardbench/data"),
            out=Path("runs/rewardbench/eval"),
            reward_models=("rm", "runs/chat/rm", "dpo", "runs/chat/dpo"),
            ref_policy="runs/chat/sft",
            batch_size=16,
            max_query_length=2048,
            max_response_length=2048,
        ),
    },
    "reason": {
        "help": "SmolLM2-135M on sums and products checked by reasoning-gym; on two CPU cores in an hour",
        "grpo": REASONING | dict(out=Path("runs/reason/grpo"), samples_per_query=4, num_epochs=1),
        "ppo": REASONING
        | dict(out=Path("runs/reason/ppo"), value_model="shared", num_ppo_epochs=1, score_at="last_token"),
        "checked": dict(
            data=Path("runs/reason/data"),
            out=Path("runs/reason/eval"),
            policies=("before", "HuggingFaceTB/SmolLM2-135M-Instruct")
            + ("grpo", "runs/reason/grpo", "ppo", "runs/reason/ppo"),
            rewards=("data/reason.py:solved", "data/reason.py:says_a_number"),
            by="task",
            num_samples=4,
            num_queries=150,
            max_query_length=64,
            response_length=16,
            max_response_length=16,
            temperature=0.7,
        ),
    },
}
