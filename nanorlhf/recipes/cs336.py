"""The settings of Stanford CS336's assignment 5 (2026) for GRPO on GSM8K; docs/cs336.md maps it to our functions.

200 steps on 32 questions with eight responses each, from the pretrained OLMo 2 1B. No run has this size yet.
"""

from pathlib import Path

from nanorlhf.training.settings import AdamSettings

RECIPES: dict = {
    "cs336": {
        "help": "OLMo 2 1B on GSM8K at the settings of Stanford CS336's assignment 5, on one H100; not yet run at size",
        "sft": dict(
            data=Path("runs/cs336/data"),
            out=Path("runs/cs336/sft"),
            model="allenai/OLMo-2-0425-1B",
            dtype="bfloat16",
            batch_size=64,
            micro_batch_size=8,
            lr=1e-5,
            loss_on="response",
            max_response_length=512,
        ),
        "grpo": dict(
            data=Path("runs/cs336/data"),
            out=Path("runs/cs336/grpo"),
            sft="allenai/OLMo-2-0425-1B",
            reward_model=None,
            reward=("data/gsm8k.py:solved", "data/gsm8k.py:tagged"),
            reward_weights=(1.0, 0.0),  # the format is logged but not rewarded
            dtype="bfloat16",
            total_episodes=51_200,
            batch_size=256,
            micro_batch_size=8,
            num_epochs=1,
            lr=1e-5,
            adam=AdamSettings(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
            max_grad_norm=1.0,
            schedule="constant",
            kl_coef=0.0,
            missing_eos_score=None,  # a base model seldom ends, but its first answer can be right
            temperature=1.0,
            response_length=512,
        ),
        "checked": dict(
            data=Path("runs/cs336/data"),
            out=Path("runs/cs336/eval"),
            policies=("before", "allenai/OLMo-2-0425-1B", "grpo", "runs/cs336/grpo"),
            rewards=("data/gsm8k.py:solved", "data/gsm8k.py:tagged"),
            num_samples=8,
            num_queries=1024,
            response_length=512,
            max_response_length=512,
        ),
    },
}
