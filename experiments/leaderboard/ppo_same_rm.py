"""entries/ppo.py, whose value model starts from a reward model with the seed of the world's own."""

import hashlib
from dataclasses import replace

import train_ppo
import train_rm


def train(world):
    rm, out = world.directory / "rm", world.directory / "ppo"
    data, sft = world.data, str(world.sft)
    digest = hashlib.sha256(f"training demonstration {world.seed}".encode()).digest()
    train_rm.main(
        replace(
            train_rm.RECIPES["tiny"][1], data=data, sft=sft, out=rm, seed=int.from_bytes(digest[:8], "big") >> 1,
            num_epochs=2.0, num_normalisation=512,
        )
    )  # fmt: skip
    args = replace(
        train_ppo.RECIPES["tiny"][1], data=data, sft=sft, out=out, seed=world.seed, value_model=str(rm),
        reward_model=None, reward=world.reward, gold=None, total_episodes=world.budget,
        lr=5.95e-4, kl_coef=0.171, lam=0.95, num_ppo_epochs=2,
    )  # fmt: skip
    train_ppo.main(args)
    return world.load(out)
