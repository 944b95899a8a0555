"""Is Crowdsourcing Breaking Your Bank? (STR): the paper's settings and the embedded town."""

from pathlib import Path

from nanorlhf.training.settings import AdamSettings

RECIPES: dict = {
    "str": {
        "help": "STR: a policy that ranks its own samples",
        "sft": dict(  # GPT-2 124M on dialogues or SQuAD
            data=Path("runs/str/data"),
            out=Path("runs/str/sft"),
            model="openai-community/gpt2",  # or EleutherAI/gpt-neo-125m
            num_epochs=3,  # not in the paper, like all below
            batch_size=16,
            lr=5e-5,  # for --tune full; with adapter, bitfit and lora pass --lr 5e-4
            schedule="linear",
            adam=AdamSettings(eps=1e-8),
            max_grad_norm=1.0,
            max_response_length=100,
            temperature=0.8,
        ),
        "rm": dict(  # pairs of the policy's own answers, ranked by itself
            data=Path("runs/str/data"),
            sft="runs/str/sft",
            batch_size=16,  # not in the paper: batch size, learning rate and schedule as in its PPO
            lr=3e-5,
            schedule="linear",
            adam=AdamSettings(eps=1e-8),
            max_response_length=100,
        ),
        "dpo": dict(
            data=Path("runs/str/data"),
            sft="runs/str/sft",
            batch_size=16,
            lr=3e-5,
            schedule="linear",
            adam=AdamSettings(eps=1e-8),
            max_response_length=100,
        ),
        "ppo": dict(  # beta 0.5, lr 3e-5, batch 16; everything else as in N+
            data=Path("runs/str/data"),
            out=Path("runs/str/ppo"),
            sft="runs/str/sft",
            reward_model="runs/str/rm",
            total_episodes=16_000,  # not in the paper
            batch_size=16,
            lr=3e-5,
            response_length=100,
            temperature=0.8,
            kl_coef=0.5,  # [STR ppo]
        ),
        "replies": dict(  # one reply per question; 500 questions of SQuAD (--num-queries)
            data=Path("runs/str/data"),
            out=Path("runs/str/eval"),
            policies=(
                *("original", "openai-community/gpt2", "full", "runs/str/sft", "adapter", "runs/str/adapter"),
                *("bitfit", "runs/str/bitfit", "lora", "runs/str/lora", "str", "runs/str/ppo"),
            ),
            reward_model="runs/str/rm",
            response_length=100,
            max_response_length=100,
        ),
    },
    "str-tiny": {
        "help": "the embedded town, on a CPU in minutes",
        "sft": dict(
            data=Path("runs/town/data"),
            out=Path("runs/town/full"),
            model="runs/town/base",
            seed=1,
            num_epochs=2,
            batch_size=16,
            lr=1e-3,
            warmup_steps=30,
            max_query_length=96,
            max_response_length=32,
            temperature=0.8,
        ),
        "rm": dict(
            data=Path("runs/town/data"),
            out=Path("runs/town/rm"),
            sft="runs/town/full",
            seed=1,
            batch_size=16,
            micro_batch_size=16,
            num_epochs=3,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=96,
            max_response_length=32,
        ),
        "dpo": dict(
            data=Path("runs/town/data"),
            sft="runs/town/full",
            seed=1,
            batch_size=16,
            micro_batch_size=16,
            num_epochs=3,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=96,
            max_response_length=32,
        ),
        "ppo": dict(
            data=Path("runs/town/data"),
            out=Path("runs/town/ppo"),
            sft="runs/town/full",
            reward_model="runs/town/rm",
            seed=1,
            total_episodes=2560,
            batch_size=64,
            num_minibatches=4,
            lr=1e-4,
            max_query_length=96,
            response_length=32,
            temperature=0.8,
            kl_coef=0.5,  # [STR ppo]
            gold="data/town.py:gold_score",
        ),
        "replies": dict(  # gold: 1 for a right reply
            data=Path("runs/town/data"),
            out=Path("runs/town/eval"),
            policies=("full", "runs/town/full", "str", "runs/town/ppo"),
            reward_model="runs/town/rm",
            self_rank=Path("runs/town/data/self_rank.validation.jsonl"),
            batch_size=256,
            max_query_length=96,
            response_length=32,
            max_response_length=32,
            gold="data/town.py:gold_score",
        ),
    },
}
