"""Generalised advantage estimation (Schulman et al. 2016): a reference loop and two parallel scans.

    delta_t = r_t + gamma * V_{t+1} - V_t            V_T = 0
    A_t     = delta_t + gamma * lam * A_{t+1}        A_T = 0
    returns = A + V

A is a first-order recurrence from the right, so pairs (c, x) that represent `A -> c * A + x`
compose associatively: (c2, x2) after (c1, x1) is (c1 * c2, x2 + c2 * x1). T sequential steps become
log2(T) rounds over all positions.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels don't include Triton
    triton = None


def gae(
    rewards: Tensor, values: Tensor, gamma: float, lam: float, states: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns, (B, T) each, from rewards and values (B, T).

    states (B, T), True = counts; None: all count. Rewards and values elsewhere are treated as 0,
    so nothing after the end of a response affects its advantages.
    """
    if states is not None:
        rewards = torch.where(states, rewards, 0.0)
        values = torch.where(states, values, 0.0)
    if rewards.is_cuda:
        return gae_triton(rewards, values, gamma, lam)
    return gae_doubling(rewards, values, gamma, lam)


def gae_loop(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Reference implementation: T steps, last to first. All tensors are (B, T)."""
    advantages = torch.zeros_like(rewards)
    running = next_value = rewards.new_zeros(rewards.size(0))  # (B,)
    for t in reversed(range(rewards.size(1))):
        running = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * running
        advantages[:, t], next_value = running, values[:, t]
    return advantages, advantages + values


def gae_doubling(
    rewards: Tensor, values: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """CPU version: after round k, position t is the discounted sum of the 2^k deltas from t on."""
    next_values = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)  # V_{t+1}
    advantages = rewards + gamma * next_values - values  # (B, T) delta
    step, decay = 1, gamma * lam
    while step < rewards.size(1) and decay > 0:
        ahead = torch.zeros_like(advantages)
        ahead[:, :-step] = advantages[:, step:]
        advantages = advantages + decay * ahead
        step, decay = 2 * step, decay**2
    return advantages, advantages + values


# ------------------------------------------------------------------------------------------ Triton
# positions per scan; longer rows are scanned block by block from the right, with a carry
BLOCK = 1024

if triton is not None:

    @triton.jit
    def join(c1, x1, c2, x2):
        return c1 * c2, x2 + c2 * x1

    @triton.jit
    def gae_kernel(
        rewards,  # (B, T)
        values,  # (B, T)
        advantages,  # (B, T)
        returns,  # (B, T)
        T,
        gamma,
        decay,  # gamma * lam
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * T
        carry = 0.0  # A at the first position of the block to the right
        for block in range(tl.cdiv(T, BLOCK)):
            t = (tl.cdiv(T, BLOCK) - 1 - block) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
            # 1. deltas; positions beyond T are (c, x) = (1, 0), which passes the carry on
            reward = tl.load(rewards + row + t, mask=t < T, other=0.0)
            value = tl.load(values + row + t, mask=t < T, other=0.0)
            next_value = tl.load(values + row + t + 1, mask=t + 1 < T, other=0.0)
            x = tl.where(t < T, reward + gamma * next_value - value, 0.0)
            c = tl.where(t < T, decay, 1.0)
            # 2. the scan from the right, plus the carry from the blocks to the right
            c, x = tl.associative_scan((c, x), 0, join, reverse=True)
            advantage = x + c * carry
            # 3. store
            tl.store(advantages + row + t, advantage, mask=t < T)
            tl.store(returns + row + t, advantage + value, mask=t < T)
            carry = tl.sum(tl.where(t % BLOCK == 0, advantage, 0.0))


def gae_triton(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """GPU version: one launch, one program per row, in float32."""
    B, T = rewards.shape
    rewards, values = rewards.contiguous().float(), values.contiguous().float()
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    if B * T:
        block = min(BLOCK, triton.next_power_of_2(T))
        gae_kernel[(B,)](rewards, values, advantages, returns, T, gamma, gamma * lam, BLOCK=block)
    return advantages, returns
