"""Generalised advantage estimation (Schulman et al. 2016): the loop that specifies it, then two parallel scans.

    delta_t = r_t + gamma * V_{t+1} - V_t with V_T = 0;   A_t = delta_t + gamma * lam * A_{t+1};   returns = A + V

A is a first-order recurrence from the right, so pairs (c, x) that mean `A -> c * A + x` compose associatively:
(c2, x2) after (c1, x1) is (c1 * c2, x2 + c2 * x1). T sequential steps become log2(T) rounds over all positions.

`gae` is plain GAE; `penalised_gae` fuses all steps of PPO between scores and advantages: KL penalty, score, GAE, and
the mean and variance for whitening.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # PyTorch's CPU wheels come without; nothing below the rule is called there
    triton = None


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """rewards, values (B, T) -> advantages, returns (B, T).

    mask (B, T), True = no state: reward and value there count as 0, whatever they hold, so nothing after the end of a
    response reaches its advantages.
    """
    if mask is not None:
        rewards, values = torch.where(mask, 0.0, rewards), torch.where(mask, 0.0, values)
    if rewards.is_cuda:
        return gae_triton(rewards, values, gamma, lam)
    return gae_doubling(rewards, values, gamma, lam)


def penalised_gae(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    values: Tensor,
    scores: Tensor,
    eos_index: Tensor,
    kl_coef: float,
    gamma: float,
    lam: float,
    score_at: str = "after_eos",
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """`kl_penalised_rewards`, then `gae` over the states; one kernel launch on a GPU.

    logprobs, ref_logprobs, values (B, T), scores, eos_index (B,) -> rewards, kl, advantages, returns, (B, T) each, 0
    where there is no action or no state, and (mean, variance) of the advantages over the actions, t <= eos_index.
    """
    if logprobs.is_cuda:
        return penalised_gae_triton(
            logprobs, ref_logprobs, values, scores, eos_index, kl_coef, gamma, lam, score_at == "after_eos"
        )
    index = torch.arange(logprobs.size(1), device=logprobs.device)  # (T,)
    last_state = eos_index + (score_at == "after_eos")
    rewards, kl = kl_penalised_rewards(logprobs, ref_logprobs, scores, eos_index, kl_coef, score_at)
    advantages, returns = gae(rewards, values, gamma, lam, index > last_state[:, None])
    of_actions = advantages[index <= eos_index[:, None]]  # (N,)
    return rewards, kl, advantages, returns, (of_actions.mean(), of_actions.var(correction=0))


def kl_penalised_rewards(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    scores: Tensor,
    eos_index: Tensor,
    kl_coef: float,
    score_at: str = "after_eos",
) -> tuple[Tensor, Tensor]:
    """The reward per token: -kl_coef * (logprob - ref_logprob) up to the end, and the score once.

    logprobs, ref_logprobs (B, T), scores (B,), eos_index (B,) -> rewards (B, T), kl (B, T), both 0 after the end.

    score_at says which slot gets the score (kl_t = logprob - ref_logprob, the estimator k1):
        after_eos    a  b  E  x     rewards -kl -kl -kl score    the state that contains EOS: slot e + 1 (N+)
        last_token   a  b  E  x     rewards -kl -kl -kl+score 0  the token that ends the response: slot e
    If e + 1 = T there is no such slot and slot e gets the score. A row's rewards sum to score - kl_coef * sum(kl).
    """
    T = logprobs.size(1)
    index = torch.arange(T, device=logprobs.device)  # (T,)
    kl = torch.where(index > eos_index[:, None], 0.0, logprobs - ref_logprobs)  # (B, T)
    score_index = eos_index if score_at == "last_token" else (eos_index + 1).clamp(max=T - 1)  # (B,)
    rewards = -kl_coef * kl + torch.where(index == score_index[:, None], scores[:, None], 0.0)
    return rewards, kl


def gae_loop(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """The specification: T steps, last to first."""
    advantages = torch.zeros_like(rewards)
    running = next_value = rewards.new_zeros(rewards.size(0))  # (B,)
    for t in reversed(range(rewards.size(1))):
        running = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * running
        advantages[:, t], next_value = running, values[:, t]
    return advantages, advantages + values


def gae_doubling(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """For a CPU: after round k, position t holds the discounted sum of the 2^k deltas from t on."""
    next_values = torch.cat((values[:, 1:], torch.zeros_like(values[:, :1])), dim=1)  # (B, T) V_{t+1}
    advantages = rewards + gamma * next_values - values  # (B, T) delta
    step, decay = 1, gamma * lam
    while step < rewards.size(1) and decay > 0:
        ahead = torch.zeros_like(advantages)
        ahead[:, :-step] = advantages[:, step:]
        advantages = advantages + decay * ahead
        step, decay = 2 * step, decay**2
    return advantages, advantages + values


# --------------------------------------------------------------------------------------------------------------- Triton
BLOCK = 1024  # positions per scan; a longer row is scanned block by block, from the right, with a carry

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
            # 1. deltas; positions beyond T are (c, x) = (1, 0): they pass the carry on
            reward = tl.load(rewards + row + t, mask=t < T, other=0.0)
            value = tl.load(values + row + t, mask=t < T, other=0.0)
            next_value = tl.load(values + row + t + 1, mask=t + 1 < T, other=0.0)
            x = tl.where(t < T, reward + gamma * next_value - value, 0.0)
            c = tl.where(t < T, decay, 1.0)
            # 2. the scan from the right, plus the carry from the blocks to the right
            c, x = tl.associative_scan((c, x), 0, join, reverse=True)
            advantage = x + c * carry
            # 3. out
            tl.store(advantages + row + t, advantage, mask=t < T)
            tl.store(returns + row + t, advantage + value, mask=t < T)
            carry = tl.sum(tl.where(t % BLOCK == 0, advantage, 0.0))


def gae_triton(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """For a GPU: one launch, one program per row, in float32."""
    B, T = rewards.shape
    rewards, values = rewards.contiguous().float(), values.contiguous().float()
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    if B * T:
        block = min(BLOCK, triton.next_power_of_2(T))
        gae_kernel[(B,)](rewards, values, advantages, returns, T, gamma, gamma * lam, BLOCK=block)
    return advantages, returns


# ----------------------------------------------------------------------------------------------- Triton: the fused form
if triton is not None:

    @triton.jit
    def penalised_gae_kernel(
        logprobs,  # (B, T)
        ref_logprobs,  # (B, T)
        values,  # (B, T)
        scores,  # (B,)
        eos_indices,  # (B,)
        rewards,  # (B, T) out
        kls,  # (B, T) out
        advantages,  # (B, T) out
        returns,  # (B, T) out
        means,  # (B,) out: of the advantages over the row's actions
        squares,  # (B,) out: sum of their squared deviations from it
        T,
        kl_coef,
        gamma,
        decay,  # gamma * lam
        AFTER_EOS: tl.constexpr,  # the slot after EOS gets the score, else that of EOS itself
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * T
        score, eos = tl.load(scores + tl.program_id(0)), tl.load(eos_indices + tl.program_id(0))
        last_state = eos + 1 if AFTER_EOS else eos
        score_index = tl.minimum(last_state, T - 1)
        carry = 0.0  # A at the first position of the block to the right
        count, mean, square = 0.0, 0.0, 0.0
        for block in range(tl.cdiv(T, BLOCK)):
            t = (tl.cdiv(T, BLOCK) - 1 - block) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
            is_action, is_state = t <= eos, (t <= last_state) & (t < T)
            # 1. rewards: KL penalty at each action, the score once
            logprob = tl.load(logprobs + row + t, mask=is_action, other=0.0)
            kl = logprob - tl.load(ref_logprobs + row + t, mask=is_action, other=0.0)
            reward = -kl_coef * kl + tl.where(t == score_index, score, 0.0)
            tl.store(kls + row + t, kl, mask=t < T)
            tl.store(rewards + row + t, reward, mask=t < T)
            # 2. deltas; positions without a state are (c, x) = (1, 0): they pass the carry on
            value = tl.load(values + row + t, mask=is_state, other=0.0)
            next_value = tl.load(values + row + t + 1, mask=(t + 1 <= last_state) & (t + 1 < T), other=0.0)
            x = tl.where(is_state, reward + gamma * next_value - value, 0.0)
            c = tl.where(is_state, decay, 1.0)
            # 3. the scan from the right, plus the carry from the blocks to the right
            c, x = tl.associative_scan((c, x), 0, join, reverse=True)
            advantage = tl.where(is_state, x + c * carry, 0.0)
            carry = tl.sum(tl.where(t % BLOCK == 0, x + c * carry, 0.0))
            tl.store(advantages + row + t, advantage, mask=t < T)
            tl.store(returns + row + t, advantage + value, mask=t < T)
            # 4. mean and squared deviations of this block's actions, merged with those so far (Chan et al. 1979)
            here = tl.sum(tl.where(is_action, 1.0, 0.0))
            mean_here = tl.sum(tl.where(is_action, advantage, 0.0)) / tl.maximum(here, 1.0)
            distance = tl.where(is_action, advantage - mean_here, 0.0)
            total = tl.maximum(count + here, 1.0)
            square += tl.sum(distance * distance) + (mean_here - mean) * (mean_here - mean) * count * here / total
            mean += (mean_here - mean) * here / total
            count += here
        tl.store(means + tl.program_id(0), mean)
        tl.store(squares + tl.program_id(0), square)


def penalised_gae_triton(
    logprobs: Tensor, ref_logprobs: Tensor, values: Tensor, scores: Tensor, eos_index: Tensor,
    kl_coef: float, gamma: float, lam: float, after_eos: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """For a GPU: as `penalised_gae`, one launch, one program per row, in float32."""
    B, T = logprobs.shape
    logprobs, ref_logprobs, values = (x.contiguous().float() for x in (logprobs, ref_logprobs, values))
    rewards, kl, advantages, returns = (torch.empty_like(logprobs) for _ in range(4))
    means, squares = torch.empty((2, B), device=logprobs.device)
    if B * T:
        block = min(BLOCK, triton.next_power_of_2(T))
        penalised_gae_kernel[(B,)](
            logprobs, ref_logprobs, values, scores.contiguous().float(), eos_index.contiguous(), rewards, kl,
            advantages, returns, means, squares, T, kl_coef, gamma, gamma * lam, AFTER_EOS=after_eos, BLOCK=block,
        )  # fmt: skip
    counts = (eos_index + 1).float()  # (B,)
    mean = (means * counts).sum() / counts.sum()
    variance = (squares + counts * (means - mean) ** 2).sum() / counts.sum()
    return rewards, kl, advantages, returns, (mean, variance)
