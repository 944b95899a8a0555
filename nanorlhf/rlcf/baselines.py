"""Advantages of BipolarRamp and CodeRL, RLCF's two baselines, for PPO's loss. [RLCF section 6.3]"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.model import ScalarModel


def bipolar_ramp_advantages(logprobs: Tensor, error_index: Tensor, floor: float = -10.0) -> Tensor:
    """Return (B, T): -1 at the token that the compiler blames, 0 elsewhere. [RLCF eq 3]

    The loss is log p(that token) - sum of log p(the written program's tokens). As printed in the paper, with -1 as the
    first weight, minimising it would make errors more likely. It has no lower bound, so tokens below `floor` nats get
    no advantage. logprobs (B, T); error_index (B,), T for a program without errors.
    """
    index = torch.arange(logprobs.size(1), device=logprobs.device)  # (T,)
    return -((index == error_index[:, None]) & (logprobs > floor)).float()


def coderl_critic(model: ScalarModel, query_response: Tensor, real: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits that the program compiles: (B,) for the program, (B, T) for each token's hidden state. [RLCF eq 4]

    The program's logit comes from the maximum of each channel over the response's tokens. The same linear layer
    computes both.
    """
    T = actions.size(1)
    hidden = model.transformer(query_response, real, last=T, query_length=query_response.size(1) - T)
    hidden = hidden.float()  # (B, T, C) token t included
    pooled = hidden.masked_fill(~actions[:, :, None], -torch.inf).amax(1)  # (B, C)
    return model.score(pooled).squeeze(-1), model.score(hidden).squeeze(-1)


def coderl_critic_loss(logits: Tensor, passes: Tensor) -> Tensor:
    """Return the cross-entropy summed over the rows; logits and passes (B,)."""
    return F.binary_cross_entropy_with_logits(logits, passes.float(), reduction="sum")


def coderl_advantages(token_logits: Tensor, passes: Tensor, baseline_passes: Tensor, actions: Tensor) -> Tensor:
    """Return (r(y') - r(y_b)) * v(y_t), (B, T): r is 1 if a program compiles, else -1; y_b is the greedy response.
    [RLCF eq 4]

    v is the probability that the critic, at this token, gives to the actual outcome: the sigmoid of its logit if the
    program compiles, one minus that if not.
    """
    rewards, baseline = 2.0 * passes.float() - 1.0, 2.0 * baseline_passes.float() - 1.0  # (B,)
    probability = torch.where(passes[:, None], token_logits.sigmoid(), (-token_logits).sigmoid())
    return ((rewards - baseline)[:, None] * probability).masked_fill(~actions, 0.0)
