"""Stage 3, PPO: the policy answers, a reward model scores, the policy changes a little, repeat.

Paper: The N+ Implementation Details of RLHF with PPO (N+), details 20 to 25. Question answering by
votes (SO) and self-ranking (STR) are the same PPO with another reward model; SO adapts the KL
coefficient.
In: queries, the policy of stage 1, the reward model of stage 2. Out: a policy, value_model/.

    python train_ppo.py                                     # the embedded default, recipe tiny
    torchrun --nproc-per-node 8 train_ppo.py tldr --sft runs/tldr/sft --reward-model runs/tldr/rm
    python train_ppo.py stackoverflow --reward-model runs/stackoverflow/rm_regression
    python train_ppo.py --reward my_rule.py:score           # a function: docs/rewards.md
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kernels import gae
from nanorlhf import cli, distributed
from nanorlhf.dataset import batch_indices, load_demonstrations
from nanorlhf.logprobs import read_logprobs, read_values, response_logprobs, response_values
from nanorlhf.ppo import KLCoefficient, policy_loss, value_loss, whiten
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
    out: Path = Path("runs/tldr/ppo")
    sft: str = "runs/tldr/sft"
    value_model: str | None = None
    """path of a value model, or of a (possibly smaller) policy, which gets a new head; None: a
    copy of the reward model, or of the policy if a rule scores; shared: with --tune lora, a
    head and low-rank updates on the policy's weights"""

    batch_size: cli.Count = 512
    micro_batch_size: cli.PositiveInt = 16
    num_minibatches: cli.PositiveInt = 1
    """optimizer steps per epoch"""
    num_ppo_epochs: cli.PositiveInt = 4
    """passes over each rollout"""
    missing_eos_score: cli.FiniteFloat | None = -1.0
    """[N+ 23] replaces the score of a response without EOS; None keeps the reward model's"""
    kl_coef: cli.NonNegativeFloat = 0.05
    """beta, weight of the per-token KL in the reward (score units per nat)"""
    kl_target: cli.PositiveFloat | None = None
    """nats per response that an adaptive beta aims at; None keeps beta fixed"""
    score_at: Literal["after_eos", "last_token"] = "after_eos"
    """where the score becomes a reward: at the state after EOS, or at the last token"""
    gamma: cli.Fraction = 1.0
    """discount per token"""
    lam: cli.Fraction = 0.95
    """lambda of GAE"""
    clip_range: cli.PositiveFloat = 0.2
    """PPO clip range of the ratio"""
    value_clip_range: cli.PositiveFloat | None = 0.2
    """clip range of the value around the rollout's (score units); None does not clip"""
    value_coef: cli.NonNegativeFloat = 0.1
    """weight of the value loss"""
    whiten_rewards: bool = False
    """[N+ 24] divide rewards by their standard deviation: lowered win rates in the paper"""
    whiten_advantages: bool = True
    """[N+ 25] advantages to mean 0 and standard deviation 1"""


RECIPES = recipes("ppo", Args)


def check(args: Args) -> int:
    """Check that the settings fit together and return the number of updates."""
    checks.check_reward(args.reward_model, args.reward, args.reward_weights)
    checks.check_value_model(args.value_model, args.tune, args.shard)
    checks.check_sampler(args)
    checks.check_moving(args)
    return checks.number_of_updates(
        args.total_episodes, args.batch_size, args.num_minibatches, args.temperature
    )


def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------- 1. data and models
    device = begin(args)
    num_updates = check(args)
    B, T = args.batch_size, args.response_length
    load_device = loading.loading_device(args.shard, device)
    tokenizer, policy = loading.load_policy(args, load_device)
    sft = loading.queries_file(args.data)  # its queries
    rows = load_demonstrations(sft, tokenizer, args.max_query_length, needs_response=False)
    longest = checks.check_policy(tokenizer, policy.config, rows, args.sft, T, args.value_model)
    checks.check_reward_models(args, tokenizer, longest)
    reward, gold, frozen = loading.load_reward(args, tokenizer, load_device, rows, policy)
    if reward.models and args.value_model is None:
        value_model = copy.deepcopy(reward.models[0]).requires_grad_(True)  # [N+ 22]
    else:
        value_model = loading.new_value_model(args.value_model, policy, load_device)
    moves = args.reference.rate > 0 or args.elastic_reset.every is not None
    ref_policy = loading.prepare_policy(args, device, policy, value_model, frozen, moves)
    average = copy.deepcopy(ref_policy) if args.elastic_reset.every is not None else None
    sampler = Sampler(policy, tokenizer, args, args.score_at)

    parameters = [*policy.parameters(), *value_model.parameters()]
    steps = adamw_steps(args, parameters)  # [N+ 20]
    beta = KLCoefficient(args.kl_coef, args.kl_target)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)  # the same numbers on every rank

    def write(directory: Path) -> None:
        write_checkpoint(policy, directory, tokenizer, args.sft)
        write_checkpoint(value_model, directory / "value_model", tokenizer)

    run = Run(args, "PPO", write, [rows.path])
    run.track(policy=policy, value_model=value_model, **sampler.state())
    run.track(steps=steps, generator=generator, beta=vars(beta))
    if args.reference.rate > 0:
        run.track(reference=ref_policy)
    if average is not None:
        run.track(average=average)
    run.print(f"PPO: {num_updates} updates of {B} responses; {len(rows):,} queries")
    if args.trace:  # the tensors of some responses, for the microscope
        from nanorlhf.training.trace import Trace

        trace = Trace(args, run, num_updates, policy, tokenizer)

    # -------------------------------------------------------------------------------- 2. the loop
    for update in run.steps(num_updates):
        # 2.0 [TR-DPO] the reference follows the policy (the same in train_grpo.py)
        if args.reference.is_due(update):
            move(ref_policy, policy, args.reference.rate)
        if average is not None and update > 0:  # [Elastic Reset] back to an average since the last
            move(average, policy, 1 - args.elastic_reset.decay)
            if args.elastic_reset.is_due(update):
                move(policy, average, 1.0)
                move(average, ref_policy, 1.0)  # the initial policy

        # 2.1 sample with temperature only; a row's random numbers don't depend on its rank
        indices = batch_indices(len(rows), B, update, args.seed)  # [N+ 21]
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)
        with autocast:
            with run.generating():
                batch = sampler.sample([rows[i] for i in indices], uniforms, update)
            # 2.2 each model reads the whole batch once: scores are (B,), all else (B, T)
            gold_scores = None if gold is None else gold.score(batch)
            batch.logprobs, batch.ref_logprobs, exact_kl = read_logprobs(
                policy, ref_policy, batch, args.temperature, args.read_size
            )
            scores, batch.token_rewards = reward.score(batch)
            batch.values = read_values(value_model, batch, args.read_size)
        checks.check_scores(scores, reward.name, update, args.out)
        importance_weights, sampler_metrics = sampler.correct(batch)  # 1 if the policy sampled

        # 2.3 [N+ 23] EOS trick (the same in train_grpo.py)
        if args.missing_eos_score is not None:  # the reward model never saw such an ending
            scores = torch.where(batch.has_eos, scores, args.missing_eos_score)

        # 2.4 the KL penalty at each token, and the score once (the same in train_rlcf.py)
        kl = torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0)  # k1
        rewards = -beta.value * kl
        rewards[torch.arange(B), batch.score_index] += scores

        rewards += batch.token_rewards  # from a process reward or a teacher; otherwise 0
        if args.whiten_rewards:  # [N+ 24] over the whole rollout; their mean stays
            rewards = whiten(rewards, batch.states, shift_mean=False)

        # 2.5 delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R = A + V
        advantages, batch.returns = gae(rewards, batch.values, args.gamma, args.lam, batch.states)
        if args.trace:
            trace.rollout(update, batch, scores, beta.value, rewards, advantages)
        if args.whiten_advantages:  # [N+ 25] over the whole rollout
            advantages = whiten(advantages, batch.actions)
        batch.advantages = advantages * importance_weights

        # 2.6 K epochs of clipped steps over the frozen rollout (the same in train_rlcf.py)
        lr = args.lr * lr_factor(args.schedule, update, num_updates)
        steps.set_lr(lr)
        stats = update_metrics.UpdateStatistics(device)
        for _ in range(args.num_ppo_epochs):
            for minibatch in batch.shuffled(generator).split(args.num_minibatches):
                # counts over all ranks: neither ranks nor micro-batches change the gradient
                num_actions = minibatch.loss_actions.sum()
                num_states = minibatch.loss_states.sum()
                steps.zero_grad()
                for mb in minibatch.shard().micro_batches(args.micro_batch_size):
                    with autocast:
                        new_logprobs, entropy = response_logprobs(
                            policy, mb.query_response, mb.real, mb.actions, args.temperature
                        )
                        new_values = response_values(
                            value_model, mb.query_response, mb.real, mb.states
                        )
                    pg_losses, pg_clipped = policy_loss(
                        new_logprobs, mb.ratio_to, mb.advantages, mb.loss_actions, args.clip_range
                    )
                    vf_losses, vf_clipped = value_loss(
                        new_values, mb.values, mb.returns, mb.loss_states, args.value_clip_range
                    )
                    pg_loss = pg_losses.sum() / num_actions
                    vf_loss = vf_losses.sum() / num_states
                    (pg_loss + args.value_coef * vf_loss).backward()
                    stats.add_loss("policy", pg_loss, pg_clipped, num_actions)
                    stats.add_loss("value", vf_loss, vf_clipped, num_states)
                    stats.add_tokens(mb, new_logprobs, entropy, num_actions, new_values)
                distributed.sum_gradients(policy, value_model)
                means = stats.minibatch()
                loss = means["policy/loss"] + args.value_coef * means["value/loss"]
                if steps.step(parameters, loss):
                    stats.count(means)

        # 2.7 log; every mean is over what counts
        metrics = update_metrics.rollout_metrics(batch, scores, exact_kl, gold_scores, beta.value)
        metrics |= stats.metrics() | sampler_metrics | reward.metrics()
        metrics |= {"skipped_steps": steps.skipped, "lr": lr, "episode": (update + 1) * B}
        if args.trace:
            trace.write(batch)
        metrics |= update_metrics.utilisation(
            run, batch, args.num_ppo_epochs, policy, value_model, reward.models
        )
        update_metrics.log_update(run, update, batch, scores, metrics, tokenizer)
        beta.update(metrics["objective/kl"], B)
    return run.finish(run.metrics)  # metrics of the last update


if __name__ == "__main__":
    cli.command_line(main, RECIPES)
