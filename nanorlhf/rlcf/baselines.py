"""BipolarRamp and CodeRL, as tensors: two other choices of A in PPO's loss. [RLCF section 6.3]"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.model import ScalarModel


def bipolar_ramp_advantages(logprobs: Tensor, error_index: Tensor, floor: float = -10.0) -> Tensor:
    """(B, T): -1 at the token that the compiler blames, 0 elsewhere. [RLCF eq 3]

    The loss is log p(that token) - sum of log p(the written program's tokens). As printed, with -1 for the first
    weight, minimising it would make errors likelier. It has no lower bound: tokens below `floor` nats are left alone.
    logprobs (B, T), error_index (B,), T where there is no error.
    """
    index = torch.arange(logprobs.size(1), device=logprobs.device)  # (T,)
    return -((index == error_index[:, None]) & (logprobs > floor)).float()


def coderl_critic(model: ScalarModel, query_response: Tensor, real: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Does the program compile? Logits (B,) of the whole and (B, T) of each token's hidden state. [RLCF eq 4]

    The whole is the largest of each channel over the response's tokens; the same linear layer reads both.
    """
    T = actions.size(1)
    hidden = model.transformer(query_response, real, last=T, query_length=query_response.size(1) - T)
    hidden = hidden.float()  # (B, T, C) token t included
    pooled = hidden.masked_fill(~actions[:, :, None], -torch.inf).amax(1)  # (B, C)
    return model.score(pooled).squeeze(-1), model.score(hidden).squeeze(-1)


def coderl_critic_loss(logits: Tensor, passes: Tensor) -> Tensor:
    """Sum over the rows of the cross-entropy; logits and passes (B,)."""
    return F.binary_cross_entropy_with_logits(logits, passes.float(), reduction="sum")


def coderl_advantages(token_logits: Tensor, passes: Tensor, baseline_passes: Tensor, actions: Tensor) -> Tensor:
    """(B, T): (r(y') - r(y_b)) * v(y_t), r = 1 for what compiles and -1 else, y_b the greedy response. [RLCF eq 4]

    v is the critic's probability, at this token, of how the program turned out: sigmoid where it compiles, one minus
    that where not.
    """
    rewards, baseline = 2.0 * passes.float() - 1.0, 2.0 * baseline_passes.float() - 1.0  # (B,)
    probability = torch.where(passes[:, None], token_logits.sigmoid(), (-token_logits).sigmoid())
    return ((rewards - baseline)[:, None] * probability).masked_fill(~actions, 0.0)
