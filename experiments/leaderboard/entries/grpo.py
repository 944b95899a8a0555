"""GRPO with the settings that the worlds study chose in its tuning worlds, 101 to 105."""

from dataclasses import replace

import train_grpo


def train(world):
    out = world.directory / "grpo"
    args = replace(
        train_grpo.RECIPES["tiny"][1], data=world.data, sft=str(world.sft), out=out, seed=world.seed,
        reward_model=None, reward=world.reward, gold=None, total_episodes=world.budget,
        algorithm="grpo", samples_per_query=4, lr=1.97e-4, kl_coef=0.0426, num_epochs=4,
    )  # fmt: skip
    train_grpo.main(args)
    return world.load(out)
