"""DPO on the comparisons, with the settings that the worlds study chose in its tuning worlds; scores no response."""

from dataclasses import replace

import train_dpo


def train(world):
    out = world.directory / "dpo"
    args = replace(
        train_dpo.RECIPES["tiny"][1], data=world.data, sft=str(world.sft), out=out, seed=world.seed,
        lr=4.23e-4, beta=0.136, num_epochs=1.0,
    )  # fmt: skip
    train_dpo.main(args)
    return world.load(out)
