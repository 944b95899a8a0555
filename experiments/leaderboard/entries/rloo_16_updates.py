"""RLOO in sixteen updates, whatever the budget: rollouts of 16, 64 or 256 responses instead of 64.

With 256 responses, RLOO's four updates are too few to learn from them. The other settings are the ones that the worlds
study chose at 1,024 responses, where this entry is rloo.py. Rollouts of 16, 32 and 64 were compared in tuning world 101
at 256 responses.
"""

from dataclasses import replace

import train_grpo


def train(world):
    out, batch_size = world.directory / "rloo", world.budget // 16
    args = replace(
        train_grpo.RECIPES["tiny"][1], data=world.data, sft=str(world.sft), out=out, seed=world.seed,
        reward_model=None, reward=world.reward, gold=None, total_episodes=world.budget,
        batch_size=batch_size, micro_batch_size=min(32, batch_size),
        algorithm="rloo", samples_per_query=4, lr=5.89e-4, kl_coef=0.0554, num_epochs=4,
    )  # fmt: skip
    train_grpo.main(args)
    return world.load(out)
