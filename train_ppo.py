"""Stage 3, PPO: the policy writes, a reward scheme scores, the policy changes a little, and again.

Papers: The N+ Implementation Details of RLHF with PPO (N+), details 20 to 25; Reinforcement learning for question
answering in programming domain (SO), whose KL coefficient adapts; Coarse-Tuning Models of Code (RLCF), whose compiler
cuts a program at its first error; Is Crowdsourcing Breaking Your Bank? (STR), whose policy ranked the comparisons. The
same loop does RLOO, GRPO and REINFORCE++, which have no value model: docs/algorithms.md.
In: queries, the policy of stage 1, the reward model of stage 2. Out: a policy, value_model/, for RLCF discriminator/.

    python train_ppo.py                                                        # the embedded default, recipe tiny
    torchrun --nproc-per-node 8 train_ppo.py tldr --sft runs/tldr/sft --reward-model runs/tldr/rm --dtype bfloat16
    python train_ppo.py stackoverflow --reward-model runs/stackoverflow/rm_regression
    python train_ppo.py rlcf --discriminator runs/rlcf/discriminator
    python train_ppo.py --reward my_rule.py:score                              # any function of two lists of texts
    python train_ppo.py --advantages rloo --samples-per-query 4
"""

import copy
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from kernels import gae, k2, k3, penalised_gae
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, scalar_from_gpt
from nanorlhf.cli import Beta, Count, FiniteFloat, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, command_line
from nanorlhf.dataset import batch_indices, load_demonstrations, load_programs
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import micro_batches, needed_columns
from nanorlhf.peft import reference, tune
from nanorlhf.ppo import (
    AdaptiveKL,
    FixedKL,
    grpo,
    kl_loss,
    policy_loss,
    reinforce_plus_plus,
    rloo,
    value_loss,
    whiten,
)
from nanorlhf.recipes import recipes
from nanorlhf.reward import Gold, RewardModel, Rule, places
from nanorlhf.rlcf.discriminator import save_discriminator
from nanorlhf.rlcf.reward import Compiler
from nanorlhf.rollout import Rollout, response_values, rollout
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.checks import check_models, check_ppo, check_scores
from nanorlhf.training.engine import sampler_of
from nanorlhf.training.memory_plan import ppo_plan
from nanorlhf.training.optimizer import FiniteSteps, parameter_groups
from nanorlhf.training.run import Run, begin, home, place_models, with_plan, write_checkpoint
from nanorlhf.training.schedule import lr_factor
from nanorlhf.training.settings import LoRAArgs, RolloutArgs, SamplerArgs


@dataclass(frozen=True, kw_only=True)
class Args(RolloutArgs, SamplerArgs, LoRAArgs):
    data: Path = Path("runs/tldr/data")
    out: Path = Path("runs/tldr/ppo")
    sft: str = "runs/tldr/sft"
    reward_model: str | tuple[str, ...] | None = "runs/tldr/rm"
    """scores the responses, and the value model starts as its copy (of several, the first's); None: something else"""
    ensemble: Literal["mean", "min", "uncertainty"] = "mean"
    """score of several reward models: mean, lowest, or mean - uncertainty coef * variance (Coste et al. 2023)"""
    uncertainty_coef: NonNegativeFloat = 0.1
    """lambda of --ensemble uncertainty, per score unit"""
    reward: str | None = None
    """FILE.py:FUNCTION, a rule that scores instead: function(queries, responses), two lists of texts -> numbers"""
    compiler: bool = False
    """[RLCF alg 1] static checks of the programs: -1 for one that fails"""
    discriminator: str | None = None
    """scores the programs that pass, checkpoint directory; None with --compiler: they get 1"""
    freeze_discriminator: bool = False
    """don't train the discriminator against the policy"""
    discriminator_lr: NonNegativeFloat = 5e-7
    """peak learning rate of the discriminator's AdamW, one step per rollout"""
    value_model: str | None = None
    """policy, which may be smaller, whose copy with a new head is the value model; None: a copy of the reward model"""
    share_trunk: bool = False
    """with --tune lora, the value model is a new head and updates of its own on the policy's frozen weights"""

    advantages: Literal["gae", "rloo", "grpo", "reinforce++"] = "gae"
    """gae: PPO with a value model; the others compare responses with each other and have none (docs/algorithms.md)"""
    samples_per_query: Count = 1
    """responses to each query of a rollout; rloo and grpo need 2 or more"""
    grpo_scale: Literal["std", "none"] = "std"
    """std: GRPO divides by the scores' standard deviation and by lengths; none: Dr. GRPO does neither"""

    batch_size: Count = 512
    micro_batch_size: PositiveInt = 16
    num_minibatches: PositiveInt = 1
    """optimizer steps per epoch"""
    num_ppo_epochs: PositiveInt = 4
    """passes over each rollout"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """of AdamW"""
    missing_eos_score: FiniteFloat | None = -1.0
    """[N+ 23] replaces the score of a response without EOS; None keeps the reward model's"""
    kl_coef: NonNegativeFloat = 0.05
    """beta, weight of the per-token KL in the reward (score units per nat)"""
    kl_target: PositiveFloat | None = None
    """nats per response that an adaptive beta aims at; None keeps beta fixed"""
    score_at: Literal["after_eos", "last_token"] = "after_eos"
    """where the score is added: at the state after EOS, or at the last token"""
    gamma: Fraction = 1.0
    """discount per token"""
    lam: Fraction = 0.95
    """lambda of GAE; it, the value and whitening flags are of --advantages gae"""
    clip_range: PositiveFloat = 0.2
    """PPO clip range of the ratio"""
    value_clip_range: PositiveFloat | None = 0.2
    """clip range of the value around the rollout's (score units); None does not clip"""
    value_coef: NonNegativeFloat = 0.1
    """weight of the value loss"""
    whiten_rewards: bool = False
    """[N+ 24] divide rewards by their standard deviation: lowered win rates in the paper"""
    whiten_advantages: bool = True
    """[N+ 25] advantages to mean 0 and standard deviation 1"""
    gold: str | None = None
    """true score to log, never trained on: FILE.py:FUNCTION(query, response), or a larger reward model"""
    save_every: PositiveInt = 100


RECIPES = recipes("ppo", Args)
UPDATE_MEANS = ("policy/loss", "value/loss", "policy/clip_fraction", "value/clip_fraction")
UPDATE_MEANS += ("policy/approx_kl", "policy/entropy", "policy/ratio")


# ------------------------------------------------------------------------------------------------------ 1. advantages
def with_values(args: Args, batch: Rollout, scores: Tensor, kl: Tensor, kl_coef: float) -> tuple[Tensor, ...]:
    """PPO: KL penalty at each token, the score once, GAE. Returns advantages and returns, (B, T), no weights (B, 1)."""
    values, padding_mask, state_mask = batch.values, batch.padding_mask, batch.state_mask  # (B, T) each
    rewards, _, advantages, returns, statistics = penalised_gae(
        batch.logprobs, batch.ref_logprobs, values, scores, batch.eos_index,
        kl_coef, args.gamma, args.lam, args.score_at,
    )  # fmt: skip
    # whitening is over the whole rollout, once, and global: the world size changes nothing
    if args.whiten_rewards:  # [N+ 24] before GAE
        rewards = whiten(rewards, state_mask, shift_mean=False)
        advantages, returns = gae(rewards, values, args.gamma, args.lam, state_mask)
        statistics = None
    if args.whiten_advantages:  # [N+ 25]
        advantages = whiten(advantages, padding_mask, statistics=statistics)
    return advantages, returns, torch.zeros_like(scores)[:, None]


def without_values(args: Args, batch: Rollout, scores: Tensor, kl: Tensor, kl_coef: float) -> tuple[Tensor, ...]:
    """Other responses are the baseline. As above, but GRPO has its KL in the loss, where these weights scale it."""
    k, padding_mask, kl_weights = args.samples_per_query, batch.padding_mask, torch.zeros_like(scores)[:, None]
    if args.advantages == "rloo":
        advantages = rloo(scores, kl, padding_mask, kl_coef, k)
    elif args.advantages == "grpo":
        advantages, kl_weights = grpo(scores, padding_mask, kl_coef, k, args.grpo_scale)
    else:
        advantages = reinforce_plus_plus(scores, kl, padding_mask, kl_coef, args.gamma)
    return advantages, torch.zeros_like(kl), kl_weights


@with_plan(ppo_plan)
def main(args: Args) -> dict[str, float]:
    # ----------------------------------------------------------------------------------------------- 2. data and models
    device = begin(args)
    num_updates = check_ppo(args)
    B, T, k = args.batch_size, args.response_length, args.samples_per_query
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    pad_id, eos_id = tokenizer.pad_id, tokenizer.eos_id
    load = load_programs if args.rows == "code" else load_demonstrations
    demonstrations = load(args.data / f"{args.rows}.train.jsonl", tokenizer, args.max_query_length, None)

    place = home(args, device)
    policy = load_gpt(args.sft, place).forbid(pad_id, tokenizer.vocab_size)
    check_models(args, tokenizer, policy.config, demonstrations)
    if args.compiler or args.discriminator is not None:
        reward: RewardModel = Compiler(args, tokenizer, demonstrations[0].record, device)
    elif args.reward is not None:
        reward = Rule(args.reward, tokenizer)
    else:  # [SO ppo] [STR ppo]
        reward = RewardModel(places(args.reward_model), tokenizer, place, args.ensemble, args.uncertainty_coef)
    gold = Gold(args.gold, tokenizer, place) if args.gold is not None else None
    value_model: ScalarModel | None = None  # where other responses are the baseline
    if args.advantages == "gae" and args.value_model is None and reward.models and not args.share_trunk:
        value_model = copy.deepcopy(reward.models[0]).requires_grad_(True)  # [N+ 22]
    elif args.advantages == "gae":
        # [RLCF alg 1] a critic of its own, whose head begins at 0: random values would be the first advantages
        start = load_gpt(args.value_model, place) if args.value_model is not None else policy
        value_model = scalar_from_gpt(start, args.share_trunk)
        nn.init.zeros_(value_model.score.weight)
    trained: dict[str, GPT | ScalarModel] = {"policy": policy}
    trained |= {"value_model": value_model} if value_model is not None else {}
    for model in trained.values():
        tune(model, args.tune, args.lora_rank, args.lora_alpha, args.lora_targets)
    ref_policy = reference(policy)
    place_models(args, device, list(trained.values()), (ref_policy, *reward.models, gold and gold.model))
    sampler = sampler_of(args, policy, tokenizer)

    weights = [weight for model in trained.values() for weight in model.parameters()]
    groups = parameter_groups(weights, args.weight_decay, decay_vectors=True)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)  # [N+ 20]
    steps = FiniteSteps(optimizer, args, f"lower --lr ({args.lr}) or raise --kl-coef ({args.kl_coef})")
    kl_control = FixedKL(args.kl_coef) if args.kl_target is None else AdaptiveKL(args.kl_coef, args.kl_target)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)  # of samples and minibatches, the same on every rank
    parts = {**trained, **sampler.parts, **reward.parts, "steps": steps, "generator": generator}
    parts["kl_control"] = vars(kl_control)
    estimate = partial(with_values if args.advantages == "gae" else without_values, args)

    def write() -> None:
        write_checkpoint(policy, args.out, tokenizer, args.sft)
        write_checkpoint(value_model, args.out / "value_model", tokenizer)
        if run.main and "discriminator" in parts:
            save_discriminator(parts["discriminator"], args.out / "discriminator")

    run = Run(args, "PPO" if args.advantages == "gae" else args.advantages.upper(), parts, write)
    run.print(
        f"{run.name}: {num_updates} updates, {args.num_ppo_epochs} epochs of {args.num_minibatches} minibatch(es) over "
        f"{B} responses each, on {distributed.world_size()} process(es); {len(demonstrations):,} queries"
    )

    # ---------------------------------------------------------------------------------------------------- 3. the loop
    for update in run.steps(num_updates):
        start = time.perf_counter()
        # 3.1 rollout and scores up to EOS; a compiler may cut a response
        indices = batch_indices(len(demonstrations), B // k, update, args.seed)  # [N+ 21]
        rows = [demonstrations[i] for i in indices for _ in range(k)]  # B, the responses to a query in a row
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)  # a row's own, on whichever rank
        sampler.sync(update)
        with autocast:
            batch = rollout(
                policy, ref_policy, value_model, reward.score, rows, uniforms, eos_id, pad_id,
                args.temperature, args.score_at, args.rollout_batch_size, gold, sampler,
            )  # fmt: skip
        sampler_weights, sampler_metrics = sampler.weights(batch)
        if args.rollout_logprobs == "sampler":  # which knows nothing of cuts
            batch = replace(batch, logprobs=torch.where(batch.padding_mask, 0.0, batch.sampled_logprobs))
        response, scores, values = batch.response, batch.scores, batch.values  # (B, T), (B,), (B, T)
        padding_mask, state_mask = batch.padding_mask, batch.state_mask  # (B, T) True = no action, no state
        logprobs, ref_logprobs = batch.logprobs, batch.ref_logprobs  # (B, T)
        check_scores(scores, reward.name, update, args.out)

        # 3.2 [N+ 23] EOS trick: the reward model never saw a text that does not end, so its score there means nothing
        has_eos = (response == eos_id).any(1)  # (B,)
        if args.missing_eos_score is not None:
            scores = torch.where(has_eos, scores, args.missing_eos_score)

        # 3.3 what was each token worth? (B, T) each; the weights (B, 1) are those of a KL in the loss
        kl = torch.where(padding_mask, 0.0, logprobs - ref_logprobs)  # k1
        advantages, returns, kl_weights = estimate(batch, scores, kl, kl_control.coefficient)
        advantages = advantages * sampler_weights  # 1, unless --importance-correction

        # 3.4 K epochs of minibatches over the frozen rollout
        progress = lr_factor(args.schedule, update, num_updates)
        steps.set_lr(args.lr * progress)
        totals, first_ratio_error, is_first = torch.zeros(7, device=device), torch.zeros((), device=device), True
        num_steps = 0  # that were taken
        for _ in range(args.num_ppo_epochs):
            for minibatch in torch.randperm(B, generator=generator).split(B // args.num_minibatches):
                # counts over all ranks: how a minibatch is cut up does not change the gradient
                num_actions, num_states = (~padding_mask[minibatch]).sum(), (~state_mask[minibatch]).sum()
                stats = torch.zeros(7, device=device)
                optimizer.zero_grad()
                mine = minibatch[distributed.rank_slice(len(minibatch))]
                mine = mine[batch.mask[mine].sum(1).argsort().cpu()]  # similar lengths together: less padding
                for index in micro_batches(mine, args.micro_batch_size):  # (b,)
                    first, t = needed_columns(batch.query_mask[index], state_mask[index])
                    columns = slice(first, batch.query.size(1) + t)
                    ids, mask = batch.query_response[index, columns], batch.mask[index, columns]  # (b, q + t) trimmed
                    no_action, no_state = padding_mask[index, :t], state_mask[index, :t]  # (b, t) trimmed
                    old_logprobs, old_values = logprobs[index, :t], values[index, :t]  # (b, t)
                    with autocast:
                        new_logprobs, entropy = response_logprobs(policy, ids, mask, no_action, args.temperature)
                        new_values = response_values(value_model, ids, mask, no_state)
                    pg_loss, pg_clipped = policy_loss(
                        new_logprobs, old_logprobs, advantages[index, :t], no_action, args.clip_range, num_actions
                    )
                    ref_kl = kl_loss(new_logprobs, ref_logprobs[index, :t], kl_weights[index], no_action, num_actions)
                    pg_loss = pg_loss + ref_kl  # which is 0 where the KL is in the reward
                    vf_loss, vf_clipped = value_loss(
                        new_values, old_values, returns[index, :t], no_state, args.value_clip_range, num_states
                    )
                    (pg_loss + args.value_coef * vf_loss).backward()
                    with torch.no_grad():
                        ratio = torch.where(no_action, 0.0, new_logprobs - old_logprobs).exp()
                        approx_kl = k2(new_logprobs, old_logprobs).masked_fill(no_action, 0.0)  # (b, t)
                        sums = approx_kl.sum(), entropy.sum(), ratio[~no_action].sum()  # over tokens
                        means = pg_loss, vf_loss, pg_clipped, vf_clipped, *(total / num_actions for total in sums)
                        stats += torch.stack([mean.detach() for mean in means])  # in the order of UPDATE_MEANS
                        if is_first:
                            first_ratio_error = torch.maximum(first_ratio_error, (ratio - 1).abs().max())
                distributed.sum_gradients(*trained.values())
                stats = distributed.all_sum(stats)
                loss = (stats[0] + args.value_coef * stats[1]).item()
                if steps.step(weights, loss):
                    totals, num_steps = totals + stats, num_steps + 1
                is_first = False

        # 3.5 the scheme's own turn: [RLCF section 4] a discriminator learns to tell the policy's programs
        learned = reward.learn(progress)

        # 3.6 log; every mean is over what is not masked
        kl_per_response = kl.sum(1)  # (B,) k1, the sum over tokens: its mean may be slightly negative
        kl_k3 = torch.where(padding_mask, 0.0, k3(logprobs, ref_logprobs)).sum(1)  # (B,)
        means_of_steps = zip(UPDATE_MEANS, (totals / max(1, num_steps)).tolist(), strict=True)
        mean_kl, mean_score = kl_per_response.mean().item(), scores.mean().item()
        metrics = {
            "objective/kl": mean_kl,
            "objective/kl_k3": kl_k3.mean().item(),
            "objective/kl_exact": batch.exact_kl.sum(1).mean().item(),
            "objective/entropy": -logprobs.sum(1).mean().item(),
            "objective/non_score_reward": -kl_control.coefficient * mean_kl,
            "objective/score": mean_score,
            "objective/score_std": scores.std().item(),
            "objective/rlhf_reward": mean_score - kl_control.coefficient * mean_kl,
            "objective/kl_coef": kl_control.coefficient,
            **{name: mean for name, mean in means_of_steps if value_model is not None or "value/" not in name},
            "policy/first_ratio_error": distributed.largest(first_ratio_error.item()),
            **sampler_metrics,
            "eos_rate": has_eos.float().mean().item(),
            "response_length": (batch.eos_index + 1).float().mean().item(),
            "skipped_steps": steps.skipped,
            "lr": args.lr * progress,
            "episode": (update + 1) * B,
            "episodes_per_second": B / (time.perf_counter() - start),
            **learned,
        }
        if batch.gold_scores:
            metrics["gold_score"] = sum(batch.gold_scores) / B
        kl_control.update(mean_kl, B)
        if update + 1 == num_updates or update % args.sample_every == 0:
            samples = [
                {"query": rows[i].record["query"], "response": tokenizer.decode(response[i].tolist())}
                | {"score": scores[i].item(), "kl": kl_per_response[i].item()}
                for i in range(0, B, k)[:4]
            ]
            run.log_samples(update, samples)
        run.log(update, metrics, score=f"{mean_score:.2f}", kl=f"{mean_kl:.1f}", eos=f"{metrics['eos_rate']:.2f}")
        if mean_kl < -3 * kl_per_response.std().item() / math.sqrt(B) - 1e-3:  # beyond rounding
            run.warn(f"update {update}: the KL is {mean_kl:.2f}, below 0 by more than chance: policy or mask is off")

    summary = {name: value for name, value in run.metrics.items() if name != "episodes_per_second"}
    run.finish(summary)
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
