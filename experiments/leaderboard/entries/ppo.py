"""PPO with the settings that the worlds study chose in its tuning worlds, 101 to 105.

Its value model starts from a reward model. The world keeps its own, so the entry trains one on the comparisons.
"""

from dataclasses import replace

import train_ppo
import train_rm


def train(world):
    rm, out = world.directory / "rm", world.directory / "ppo"
    data, sft = world.data, str(world.sft)
    train_rm.main(
        replace(
            train_rm.RECIPES["tiny"][1], data=data, sft=sft, out=rm, seed=world.seed, num_epochs=2.0,
            num_normalisation=512,
        )
    )  # fmt: skip
    args = replace(
        train_ppo.RECIPES["tiny"][1], data=data, sft=sft, out=out, seed=world.seed, value_model=str(rm),
        reward_model=None, reward=world.reward, gold=None, total_episodes=world.budget,
        lr=5.95e-4, kl_coef=0.171, lam=0.95, num_ppo_epochs=2,
    )  # fmt: skip
    train_ppo.main(args)
    return world.load(out)
