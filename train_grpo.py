"""Stage 3 without a value model: a response is compared with other responses to the same query.

Papers, a function of a few lines each: GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025), RLOO
(Ahmadian et al. 2024), REINFORCE++ (Hu et al. 2025). docs/algorithms.md compares them with PPO.
In: queries, the policy of stage 1, the reward model of stage 2 or a function. Out: a policy.

    python train_grpo.py                                     # the embedded default, recipe tiny
    python train_grpo.py --algorithm rloo --samples-per-query 4
    torchrun --nproc-per-node 8 train_grpo.py tldr --sft runs/tldr/sft --reward-model runs/tldr/rm
    python train_grpo.py --reward-model None --reward my_rule.py:score
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels import gae, k3
from nanorlhf import cli, distributed
from nanorlhf.dataset import batch_indices, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.logprobs import read_logprobs, response_logprobs
from nanorlhf.ppo import policy_loss, whiten
from nanorlhf.recipes import recipes
from nanorlhf.training import checks, models, statistics
from nanorlhf.training.memory_plan import rollout_plan
from nanorlhf.training.optimizer import adamw_steps, lr_factor
from nanorlhf.training.run import Run, begin, with_plan, write_checkpoint
from nanorlhf.training.sampler import Sampler
from nanorlhf.training.settings import RewardArgs
from nanorlhf.training.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Args(RewardArgs):
    data: Path = Path("runs/tldr/data")
    out: Path = Path("runs/tldr/grpo")
    sft: str = "runs/tldr/sft"

    algorithm: Literal["grpo", "dr_grpo", "rloo", "reinforce++"] = "grpo"
    """what a response is compared with, and what the loss is divided by: the functions below"""
    samples_per_query: cli.Count = 8
    """responses to each query of a rollout, k; at least 2 except for reinforce++"""
    batch_size: cli.Count = 512
    micro_batch_size: cli.PositiveInt = 16
    num_minibatches: cli.PositiveInt = 1
    """optimizer steps per epoch"""
    num_epochs: cli.PositiveInt = 4
    """passes over each rollout"""
    missing_eos_score: cli.FiniteFloat | None = -1.0
    """[N+ 23] replaces the score of a response without EOS; None keeps the reward model's"""
    kl_coef: cli.NonNegativeFloat = 0.05
    """beta, weight of the KL to the reference: in the loss (grpo, dr_grpo) or in the reward"""
    gamma: cli.Fraction = 1.0
    """discount per token, of reinforce++"""
    clip_range: cli.PositiveFloat = 0.2
    """PPO clip range of the ratio"""


RECIPES = recipes("grpo", Args)


# ------------------------------------------------------------ 1. the algorithms, as in their papers
# Advantages: scores (B,), kl and actions (B, T) -> (B, T); all four have the same arguments, and
# the k responses to a query are k rows in a row. kl is 0 after the end of a response.
def centred(values: Tensor, k: int) -> Tensor:
    """values (B,) minus the mean of the query's k, (B / k, k); exactly 0 where all k are equal."""
    groups = values.view(-1, k)
    differences = groups - groups[:, :1]
    return differences - differences.mean(1, keepdim=True)


def grpo(scores: Tensor, kl: Tensor, actions: Tensor, args: Args) -> Tensor:
    """A_i = (score_i - mean) / standard deviation, of the query's k scores. [GRPO section 4.1.2]

    Dividing by the standard deviation favours queries whose scores hardly differ.
    """
    groups = centred(scores, args.samples_per_query)  # (B / k, k)
    variance = groups.square().mean(1, keepdim=True)
    return (groups * torch.rsqrt(variance + 1e-8)).view(-1, 1).expand_as(kl)


def dr_grpo(scores: Tensor, kl: Tensor, actions: Tensor, args: Args) -> Tensor:
    """A_i = score_i - mean of the query's k scores. [Dr. GRPO section 3.2]"""
    return centred(scores, args.samples_per_query).view(-1, 1).expand_as(kl)


def rloo(scores: Tensor, kl: Tensor, actions: Tensor, args: Args) -> Tensor:
    """A_i = R_i - mean of the other R_j, R_i = score_i - beta * sum_t kl_it. [RLOO section 3]

    A response is one action. The mean of the others leaves R_i out, so the gradient has no bias.
    """
    k = args.samples_per_query
    response_rewards = scores - args.kl_coef * kl.sum(1)  # (B,)
    return (centred(response_rewards, k) * (k / (k - 1))).view(-1, 1).expand_as(kl)


def reinforce_plus_plus(scores: Tensor, kl: Tensor, actions: Tensor, args: Args) -> Tensor:
    """A_it = score_i - beta * sum of kl_is over s >= t, whitened over the batch. [REINFORCE++]

    The batch is the baseline. It is PPO with V = 0 and lambda = 1.
    """
    rewards = -args.kl_coef * kl
    rewards[torch.arange(len(scores)), actions.sum(1) - 1] += scores  # at the last token
    returns, _ = gae(rewards, torch.zeros_like(rewards), args.gamma, 1.0)
    return whiten(returns, actions)


# What a minibatch's token losses (b, t) are divided by: its numbers of responses and of tokens.
def mean_of_means(losses: Tensor, actions: Tensor, num_responses: Tensor, _: Tensor) -> Tensor:
    """The mean over responses of the mean over a response's own tokens: short ones weigh more."""
    lengths = actions.sum(1).clamp(min=1)  # (b,) a dropped response has no action left
    return (losses.sum(1) / lengths).sum() / num_responses


def mean_of_sums(losses: Tensor, actions: Tensor, num_responses: Tensor, _: Tensor) -> Tensor:
    """The mean over responses of the sum over their tokens."""
    return losses.sum() / num_responses


def mean_over_tokens(losses: Tensor, actions: Tensor, _: Tensor, num_actions: Tensor) -> Tensor:
    """The mean over all tokens."""
    return losses.sum() / num_actions


# name -> advantages, mean of the loss, whether the KL is in the loss (else in the advantages)
ALGORITHMS = {
    "grpo": (grpo, mean_of_means, True),
    "dr_grpo": (dr_grpo, mean_of_sums, True),
    "rloo": (rloo, mean_of_sums, False),
    "reinforce++": (reinforce_plus_plus, mean_over_tokens, False),
}


def check(args: Args) -> int:
    """Refuse settings that don't fit together; returns the number of updates."""
    k = args.samples_per_query
    if args.algorithm != "reinforce++" and k < 2:
        raise InputError(f"--algorithm {args.algorithm} needs more than one --samples-per-query.")
    if args.algorithm != "reinforce++" and args.gamma != 1:
        raise InputError(f"--gamma {args.gamma}: --algorithm {args.algorithm} does not discount.")
    checks.check_reward(args.reward_model, args.reward, args.ensemble)
    checks.check_sampler(args)
    return checks.number_of_updates(
        args.total_episodes, args.batch_size, args.num_minibatches, args.temperature, k
    )


@with_plan(lambda args: rollout_plan(args, has_value_model=False))
def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------- 2. data and models
    device = begin(args)
    num_updates = check(args)
    algorithm, mean_loss, has_kl_loss = ALGORITHMS[args.algorithm]
    B, T, k = args.batch_size, args.response_length, args.samples_per_query
    loading = models.loading_device(args.shard, device)
    tokenizer, policy = models.load_policy(args, loading)
    rows = load_demonstrations(args.data / "sft.train.jsonl", tokenizer, args.max_query_length)
    longest = checks.check_policy(tokenizer, policy.config, rows, args.sft, T)
    checks.check_reward_models(args, tokenizer, longest)
    reward, gold, frozen = models.load_reward(args, tokenizer, loading)
    ref_policy = models.prepare_policy(args, device, policy, None, frozen)
    sampler = Sampler(policy, tokenizer, args, "last_token")
    parameters = [*policy.parameters()]
    steps = adamw_steps(args, parameters)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)  # the same numbers on every rank
    run = Run(args, args.algorithm, lambda: write_checkpoint(policy, args.out, tokenizer, args.sft))
    run.track(policy=policy, steps=steps, generator=generator, **sampler.state())
    run.print(f"{args.algorithm}: {num_updates} updates of {B} responses; {len(rows):,} queries")
    trace = Trace(args, run, num_updates, policy, tokenizer, k)  # --trace: nothing without

    # -------------------------------------------------------------------------------- 3. the loop
    for update in run.steps(num_updates):
        # 3.1 k responses to each query, by temperature alone
        indices = batch_indices(len(rows), B // k, update, args.seed)
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)
        with autocast:
            batch = sampler.sample([rows[i] for i in indices for _ in range(k)], uniforms, update)
            # 3.2 each model reads the whole batch once: scores are (B,), all else (B, T)
            gold_scores = None if gold is None else gold.score(batch)
            scores = reward.score(batch)
            batch.logprobs, batch.ref_logprobs, exact_kl = read_logprobs(
                policy, ref_policy, batch, args.temperature, args.read_size
            )
        checks.check_scores(scores, reward.name, update, args.out)
        importance_weights, sampler_metrics = sampler.correct(batch)  # 1 for the policy itself

        # 3.3 [N+ 23] EOS trick (the same in train_ppo.py)
        if args.missing_eos_score is not None:  # the reward model never saw such an ending
            scores = torch.where(batch.has_eos, scores, args.missing_eos_score)

        # 3.4 advantages: by how much a response is better than the others
        kl = torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0)  # k1
        batch.advantages = algorithm(scores, kl, batch.actions, args) * importance_weights
        trace.rollout(update, batch, scores, args.kl_coef)

        # 3.5 epochs of clipped steps over the frozen rollout
        lr = args.lr * lr_factor(args.schedule, update, num_updates)
        steps.set_lr(lr)
        stats = statistics.UpdateStatistics(device)
        for _ in range(args.num_epochs):
            for minibatch in batch.shuffled(generator).split(args.num_minibatches):
                # counts over all ranks: neither ranks nor micro-batches change the gradient
                num_actions = minibatch.loss_actions.sum()
                num_responses = minibatch.loss_actions.any(1).sum()
                steps.zero_grad()
                for mb in minibatch.mine().micro_batches(args.micro_batch_size):
                    with autocast:
                        new_logprobs, entropy = response_logprobs(
                            policy, mb.query_response, mb.real, mb.actions, args.temperature
                        )
                    losses, is_clipped = policy_loss(
                        new_logprobs, mb.logprobs, mb.advantages, mb.loss_actions, args.clip_range
                    )
                    if has_kl_loss and args.kl_coef > 0:  # k3 = ref / new - 1 - log(ref / new)
                        kl_losses = args.kl_coef * k3(new_logprobs, mb.ref_logprobs)
                        losses = losses + torch.where(mb.loss_actions, kl_losses, 0.0)
                    loss = mean_loss(losses, mb.loss_actions, num_responses, num_actions)
                    loss.backward()
                    stats.add_loss("policy", loss, is_clipped, num_actions)
                    stats.add_tokens(mb, new_logprobs, entropy, num_actions)
                distributed.sum_gradients(policy)
                means = stats.minibatch()
                if steps.step(parameters, means["policy/loss"]):
                    stats.count(means)

        # 3.6 log; every mean is over what counts
        metrics = statistics.rollout_metrics(batch, scores, exact_kl, gold_scores, args.kl_coef)
        metrics |= stats.metrics() | sampler_metrics | reward.metrics()
        metrics |= {"skipped_steps": steps.skipped, "lr": lr, "episode": (update + 1) * B}
        trace.write(batch)
        statistics.log_update(run, update, batch, scores, metrics, tokenizer, k)
    return run.finish(run.metrics)  # of the last update


if __name__ == "__main__":
    cli.command_line(main, RECIPES)
