"""The N+ Implementation Details of RLHF with PPO: the paper's settings (`tldr`) and the embedded twin (`tiny`).

The scripts' defaults are the paper's Tables 3, 4, 6 and 7, so the tables of `tldr` are short.
"""

from pathlib import Path

RECIPES: dict = {
    "tiny": {
        "help": "the embedded TL;DR world, on a CPU in minutes",
        "sft": dict(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/sft"),
            model=None,
            seed=1,
            n_layer=2,  # enough to find a fact in the post and copy it
            batch_size=16,
            lr=3e-3,
            warmup_steps=30,
            loss_on="response",
            max_query_length=80,
            max_response_length=24,
            eval_every=200,
        ),
        "rm": dict(
            data=Path("runs/tiny/data"),
            sft="runs/tiny/sft",
            seed=1,
            batch_size=16,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=80,
            max_response_length=24,
            num_normalisation=1024,
        ),
        "dpo": dict(
            data=Path("runs/tiny/data"),
            sft="runs/tiny/sft",
            seed=1,
            batch_size=16,
            lr=1e-3,
            warmup_steps=20,
            max_query_length=80,
            max_response_length=24,
        ),
        "ppo": dict(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/ppo"),
            sft="runs/tiny/sft",
            reward_model="runs/tiny/rm",
            seed=1,
            total_episodes=1280,
            batch_size=64,
            micro_batch_size=32,
            lr=3e-4,
            kl_coef=0.1,  # at 0.05 PPO exploits what this reward model doesn't check; at 0.2 it omits facts
            max_query_length=80,
            response_length=24,
            gold="data/tiny.py:gold_score",
        ),
        "grpo": dict(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/grpo"),
            sft="runs/tiny/sft",
            reward_model="runs/tiny/rm",
            seed=1,
            total_episodes=1280,
            batch_size=64,
            micro_batch_size=32,
            lr=3e-4,
            max_query_length=80,
            response_length=24,
            gold="data/tiny.py:gold_score",
        ),
        "summaries": dict(  # gold: the labeller, which training never sees
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/eval"),
            policies=("sft", "runs/tiny/sft", "ppo", "runs/tiny/ppo"),
            reward_model="runs/tiny/rm",
            num_queries=512,
            max_query_length=80,
            response_length=24,
            max_response_length=24,
            gold="data/tiny.py:gold_score",
        ),
    },
    "tiny-rm": {
        "help": "reward models of the embedded world side by side",
        "reward_models": dict(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/eval_rm"),
            reward_models=("rm", "runs/tiny/rm", "dpo", "runs/tiny/dpo"),
            ref_policy="runs/tiny/sft",
            max_query_length=80,
            max_response_length=24,
            gold="data/tiny.py:gold_score",
        ),
    },
    "tldr": {
        "help": "N+: TL;DR summarization",
        "sft": dict(  # N+ Table 3
            dtype="bfloat16",  # N+ detail 8, in every stage
            data=Path("runs/tldr/data"),
            out=Path("runs/tldr/sft"),
            batch_size=128,
            max_response_length=53,
        ),
        "rm": dict(  # N+ Table 4
            dtype="bfloat16",
            data=Path("runs/tldr/data"),
            batch_size=64,
        ),
        "dpo": dict(dtype="bfloat16", data=Path("runs/tldr/data"), batch_size=64),  # N+ Table 6
        "ppo": dict(dtype="bfloat16"),  # N+ Table 7
        "grpo": dict(dtype="bfloat16"),
        "summaries": dict(  # N+ section 5
            dtype="bfloat16",
            data=Path("runs/tldr/data"),
            out=Path("runs/tldr/eval"),
            policies=("sft", "runs/tldr/sft", "ppo", "runs/tldr/ppo"),
            reward_model="runs/tldr/rm",
            seed=44413,
            response_length=53,
            max_response_length=169,
        ),
    },
    "tldr-rm": {
        "help": "N+ Table 5 and Figure 7: reward models and DPO side by side",
        "reward_models": dict(  # a repeated name is another seed
            dtype="bfloat16",
            data=Path("runs/tldr/data"),
            out=Path("runs/tldr/eval_rm"),
            reward_models=("rm", "runs/tldr/rm", "dpo", "runs/tldr/dpo"),
            ref_policy="runs/tldr/sft",
            max_response_length=169,
        ),
    },
}
