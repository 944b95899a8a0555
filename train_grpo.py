"""Stage 3 without a value model: a response is compared with other responses to the same query.

Papers, each a function of a few lines in nanorlhf/grpo.py: GRPO (Shao et al. 2024), Dr.
GRPO (Liu et al. 2025), MaxRL (Tajwar et al. 2026), RLOO (Ahmadian et al. 2024), REINFORCE++ (Hu et
al. 2025), GSPO (Zheng et al. 2025), DAPO (Yu et al. 2025), CISPO (MiniMax 2025), online DPO (Guo et
al. 2024). docs/algorithms.md compares them with PPO.
In: queries, the policy of stage 1, the reward model of stage 2 or a function. Out: a policy.

    python train_grpo.py                                     # the embedded default, recipe tiny
    python train_grpo.py --algorithm rloo --samples-per-query 4
    torchrun --nproc-per-node 8 train_grpo.py tldr --sft runs/tldr/sft --reward-model runs/tldr/rm
    python train_grpo.py --reward-model None --reward my_rule.py:score
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kernels import k3
from nanorlhf import cli, distributed
from nanorlhf.batch import Batch
from nanorlhf.dataset import Demonstration, batch_indices, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.grpo import ALGORITHMS, Inputs, refill
from nanorlhf.logprobs import read_logprobs, response_logprobs
from nanorlhf.recipes import recipes
from nanorlhf.training import checks, loading, update_metrics
from nanorlhf.training.moving import move
from nanorlhf.training.optimizer import adamw_steps, lr_factor
from nanorlhf.training.run import Run, begin, write_checkpoint
from nanorlhf.training.sampler import Sampler
from nanorlhf.training.settings import RewardArgs


@dataclass(frozen=True, kw_only=True)
class Args(RewardArgs):
    data: Path = Path("runs/tldr/data")
    out: Path = Path("runs/tldr/grpo")
    sft: str = "runs/tldr/sft"

    algorithm: Literal[
        "grpo", "dr_grpo", "maxrl", "rloo", "reinforce++", "gspo", "dapo", "cispo", "online_dpo"
    ] = "grpo"
    """chooses the baseline, the ratio that is clipped, and what the loss is averaged over"""
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
    """beta, weight of the KL to the reference: in the loss (grpo, dr_grpo, gspo) or in the reward
    (rloo, reinforce++); DPO's beta for online_dpo; maxrl, dapo and cispo have no KL"""
    gamma: cli.Fraction = 1.0
    """discount per token (reinforce++ only)"""
    max_grad_norm: cli.PositiveFloat | None = None
    """maximum gradient norm; None: no clipping"""
    clip_range: cli.ClipRange | None = None
    """clip range of the ratio, or of cispo's weight: one number, or two, below and above 1; None:
    the value in the algorithm's paper"""


RECIPES = recipes("grpo", Args)


def check(args: Args) -> int:
    """Check that the settings fit together and return the number of updates."""
    name, k = args.algorithm, args.samples_per_query
    if name != "reinforce++" and k < 2:
        raise InputError(f"--algorithm {name} needs --samples-per-query of at least 2.")
    if name != "reinforce++" and args.gamma != 1:
        raise InputError(f"--gamma must be 1 with --algorithm {name}; got {args.gamma}.")
    if ALGORITHMS[name].is_without_kl and args.kl_coef > 0:
        raise InputError(f"--kl-coef must be 0 with --algorithm {name}; got {args.kl_coef}.")
    if name == "maxrl" and (args.missing_eos_score or 0.0) < 0:
        raise InputError(
            f"--missing-eos-score must be at least 0 with --algorithm {name}; got "
            f"{args.missing_eos_score}."
        )
    if name == "online_dpo" and (args.num_epochs, args.num_minibatches) != (1, 1):
        raise InputError(
            f"--algorithm {name} needs --num-epochs 1 --num-minibatches 1: one step per rollout."
        )
    if name == "online_dpo" and args.kl_coef == 0:
        raise InputError("--kl-coef must be above 0 with --algorithm online_dpo: it is DPO's beta.")
    checks.check_reward(args.reward_model, args.reward, args.reward_weights)
    checks.check_sampler(args)
    checks.check_moving(args)
    return checks.number_of_updates(
        args.total_episodes, args.batch_size, args.num_minibatches, args.temperature, k
    )


def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------- 1. data and models
    algorithm = ALGORITHMS[args.algorithm]
    clip_range = args.clip_range or algorithm.clip_range
    args = replace(args, clip_range=clip_range)  # for args.json
    device = begin(args)
    num_updates = check(args)
    loss_kl_coef = args.kl_coef if algorithm.has_kl_loss else 0.0
    B, T, k = args.batch_size, args.response_length, args.samples_per_query
    load_device = loading.loading_device(args.shard, device)
    tokenizer, policy = loading.load_policy(args, load_device)
    sft = loading.queries_file(args.data)  # its queries
    rows = load_demonstrations(sft, tokenizer, args.max_query_length, needs_response=False)
    longest = checks.check_policy(tokenizer, policy.config, rows, args.sft, T)
    checks.check_reward_models(args, tokenizer, longest)
    reward, gold, frozen = loading.load_reward(args, tokenizer, load_device, rows, policy)
    moves = args.reference.rate > 0 or args.elastic_reset.every is not None
    ref_policy = loading.prepare_policy(args, device, policy, None, frozen, moves)
    average = copy.deepcopy(ref_policy) if args.elastic_reset.every is not None else None
    sampler = Sampler(policy, tokenizer, args, "last_token")
    parameters = [*policy.parameters()]
    steps = adamw_steps(args, parameters)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)  # the same numbers on every rank

    def write(directory: Path) -> None:
        write_checkpoint(policy, directory, tokenizer, args.sft)

    run = Run(args, args.algorithm, write, [rows.path])
    run.track(policy=policy, steps=steps, generator=generator, **sampler.state())
    if args.reference.rate > 0:
        run.track(reference=ref_policy)
    if average is not None:
        run.track(average=average)
    run.print(f"{args.algorithm}: {num_updates} updates of {B} responses; {len(rows):,} queries")
    if args.trace:  # the tensors of some responses, for the microscope
        from nanorlhf.training.trace import Trace

        trace = Trace(args, run, num_updates, policy, tokenizer, k)

    def rollout(
        examples: list[Demonstration], uniforms: Tensor, update: int
    ) -> tuple[Batch, Tensor, Tensor]:
        """Sample with temperature only; each model reads the whole batch once."""
        with autocast:
            with run.generating():
                batch = sampler.sample(examples, uniforms, update)
            batch.shares_queries = k > 1
            batch.logprobs, batch.ref_logprobs, exact_kl = read_logprobs(
                policy, ref_policy, batch, args.temperature, args.read_size
            )  # (B, T)
            scores, batch.token_rewards = reward.score(batch)  # (B,) and (B, T)
        checks.check_scores(scores, reward.name, update, args.out)

        # [N+ 23] EOS trick (the same in train_ppo.py)
        if args.missing_eos_score is not None:  # the reward model never saw such an ending
            scores = torch.where(batch.has_eos, scores, args.missing_eos_score)

        return batch, scores, exact_kl

    # -------------------------------------------------------------------------------- 2. the loop
    for update in run.steps(num_updates):
        # 2.0 [TR-DPO] the reference follows the policy (the same in train_ppo.py)
        if args.reference.is_due(update):
            move(ref_policy, policy, args.reference.rate)
        if average is not None and update > 0:  # [Elastic Reset] back to an average since the last
            move(average, policy, 1 - args.elastic_reset.decay)
            if args.elastic_reset.is_due(update):
                move(policy, average, 1.0)
                move(average, ref_policy, 1.0)  # the initial policy

        # 2.1 k responses to each query, and their scores
        indices = batch_indices(len(rows), B // k, update, args.seed)
        examples = [rows[i] for i in indices for _ in range(k)]
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)
        batch, scores, exact_kl = rollout(examples, uniforms, update)
        gold_scores = None if gold is None else gold.score(batch)
        metrics = update_metrics.rollout_metrics(
            batch, scores, exact_kl, gold_scores, args.kl_coef, samples_per_query=k
        )
        metrics |= reward.metrics()

        # 2.2 [DAPO section 3.2] resample queries with k equal scores, then drop them; else no-op
        metrics |= refill(
            batch, scores, examples, k, algorithm.num_refills, rollout, update, generator
        )

        # 2.3 advantages: how much better a response is than the others
        importance_weights, sampler_metrics = sampler.correct(batch)  # 1 if the policy sampled
        kl = torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0)  # k1
        inputs = Inputs(scores, kl, batch.token_rewards, batch.actions, k, args.kl_coef, args.gamma)
        batch.advantages = algorithm.advantages(inputs) * importance_weights
        if args.trace:
            trace.rollout(update, batch, scores, args.kl_coef)

        # 2.4 epochs of clipped steps over the frozen rollout
        lr = args.lr * lr_factor(args.schedule, update, num_updates)
        steps.set_lr(lr)
        stats = update_metrics.UpdateStatistics(device, algorithm.has_response_ratio)
        for _ in range(args.num_epochs):
            for minibatch in batch.shuffled(generator).split(args.num_minibatches):
                # counts over all ranks: neither ranks nor micro-batches change the gradient
                num_actions = minibatch.loss_actions.sum()
                num_responses = minibatch.loss_actions.any(1).sum()
                num_ratios = num_responses if algorithm.has_response_ratio else num_actions
                steps.zero_grad()
                for mb in minibatch.shard().micro_batches(args.micro_batch_size):
                    with autocast:
                        new_logprobs, entropy = response_logprobs(
                            policy,
                            mb.query_response,
                            mb.real,
                            mb.actions,
                            args.temperature,
                            mb.groups,
                        )
                    losses, is_clipped = algorithm.policy_loss(
                        new_logprobs, mb.ratio_to, mb.advantages, mb.loss_actions, clip_range
                    )
                    if loss_kl_coef > 0:  # k3 = ref / new - 1 - log(ref / new)
                        log_ref = torch.where(mb.loss_actions, mb.ref_logprobs, 0.0)
                        log_new = torch.where(mb.loss_actions, new_logprobs, 0.0)
                        losses = losses + loss_kl_coef * k3(log_new, log_ref)
                    loss = algorithm.mean_loss(losses, mb.loss_actions, num_responses, num_actions)
                    loss.backward()
                    stats.add_loss("policy", loss, is_clipped, num_ratios)
                    stats.add_tokens(mb, new_logprobs, entropy, num_actions, num_ratios=num_ratios)
                distributed.sum_gradients(policy)
                means = stats.minibatch()
                if steps.step(parameters, means["policy/loss"], args.max_grad_norm):
                    stats.count(means)

        # 2.5 log; every mean is over what counts
        metrics |= stats.metrics() | sampler_metrics
        metrics |= {"skipped_steps": steps.skipped, "lr": lr, "episode": (update + 1) * B}
        if args.trace:
            trace.write(batch)
        metrics |= update_metrics.utilisation(
            run, batch, args.num_epochs, policy, None, reward.models, k
        )
        update_metrics.log_update(run, update, batch, scores, metrics, tokenizer, k)
    return run.finish(run.metrics)  # metrics of the last update


if __name__ == "__main__":
    cli.command_line(main, RECIPES)
