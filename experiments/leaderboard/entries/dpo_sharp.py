"""DPO, then a lower temperature: the head's weights times SHARPNESS. Scores no response.

The evaluation samples at a temperature of 0.7, but a response of DPO's policy still has an entropy of almost a nat, and
its most probable tokens are better than its samples. DPO has the settings of dpo.py. SHARPNESS was tried with one value
in tuning world 101, for DPO and for RLOO.
"""

from dataclasses import replace

import torch

import train_dpo

SHARPNESS = 4.0  # the evaluation then samples at 0.7 / 4 relative to DPO's policy


def train(world):
    out = world.directory / "dpo"
    args = replace(
        train_dpo.RECIPES["tiny"][1], data=world.data, sft=str(world.sft), out=out, seed=world.seed,
        lr=4.23e-4, beta=0.136, num_epochs=1.0,
    )  # fmt: skip
    train_dpo.main(args)
    policy = world.load(out)
    with torch.no_grad():
        policy.lm_head.weight.mul_(SHARPNESS)
    return policy
