"""A world of seven responses, small enough to enumerate: the policy gradient without sampling.

At each of two positions the policy emits EOS, x or y, always with the same probabilities; EOS ends the response:

    E  xE  yE  xx  xy  yx  yy
"""

import torch
from torch import Tensor

RESPONSES = (
    *(torch.tensor([0]), torch.tensor([1, 0]), torch.tensor([2, 0])),
    *(torch.tensor([first, second]) for first in (1, 2) for second in (1, 2)),
)
"""indices of the tokens, EOS first: (1,) or (2,) each"""
TEXTS = ("", "x", "y", "xx", "xy", "yx", "yy")
SCORES = torch.tensor([0.3, 1.0, -0.5, 0.2, 1.7, -1.1, 0.6], dtype=torch.float64)


def probabilities(logits: Tensor) -> Tensor:
    """Return the probability of each of RESPONSES, (7,); they sum to 1.

    logits: (3,) float64, of EOS, x and y at every position. A response's probability is the product over its tokens.
    """
    logprobs = logits.log_softmax(0)
    return torch.stack([logprobs[tokens].sum().exp() for tokens in RESPONSES])


def reinforce(logits: Tensor, baseline: float = 0.0) -> Tensor:
    """Return REINFORCE's estimate of the policy gradient from each of RESPONSES, if it were sampled, (7, 3).

    The estimate is (score - baseline) * d log p / d logits (3,), where p is the response's probability. Each token i
    adds 1 - p_i to the derivative with respect to its own logit, and -p_j to that with respect to each other logit j.
    """
    token_probabilities = logits.softmax(0)
    slopes = [(torch.eye(3)[tokens] - token_probabilities).sum(0) for tokens in RESPONSES]
    return (SCORES - baseline)[:, None] * torch.stack(slopes)
