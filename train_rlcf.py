"""Stage 3 of RLCF: PPO with a compiler as reward, and a discriminator trained against the policy.

Paper: Coarse-Tuning Models of Code with Reinforcement Learning Feedback (RLCF), Algorithm 1. The
compiler cuts a program at its first error; the discriminator scores the programs that pass.
In: code.jsonl, the policy of stage 1, a discriminator. Out: policy, value_model/, discriminator/.

    python train_rlcf.py rlcf-tiny                               # the embedded programs
    torchrun --nproc-per-node 8 train_rlcf.py rlcf --discriminator runs/rlcf/discriminator
    python train_rlcf.py rlcf-tiny --discriminator None          # the compiler only
"""

import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from kernels import gae
from nanorlhf import cli, distributed
from nanorlhf.batch import Batch, ScoreAt, sample
from nanorlhf.dataset import batch_indices, load_programs
from nanorlhf.errors import InputError
from nanorlhf.generate import for_sampling, generate
from nanorlhf.logprobs import read_logprobs, read_values, response_logprobs, response_values
from nanorlhf.ppo import KLCoefficient, masked_mean, policy_loss, value_loss, whiten
from nanorlhf.recipes import recipes
from nanorlhf.rlcf.adversarial import adversarial_step, compare_with_written
from nanorlhf.rlcf.discriminator import grounding, load_discriminator, save_discriminator
from nanorlhf.rlcf.error_profile import profile_metrics
from nanorlhf.rlcf.feedback import check_responses, training_compiler
from nanorlhf.rlcf.localisation import truncate_at_error
from nanorlhf.tokenizer import token_bytes
from nanorlhf.training import checks, loading, update_metrics
from nanorlhf.training.optimizer import FiniteSteps, adamw_steps, lr_factor
from nanorlhf.training.run import Run, begin, write_checkpoint
from nanorlhf.training.settings import AdamSettings, RolloutArgs


@dataclass(frozen=True, kw_only=True)
class Args(RolloutArgs):
    data: Path = Path("runs/rlcf/data")
    out: Path = Path("runs/rlcf/ppo")
    sft: str = "runs/rlcf/sft"
    compiler: bool = True  # [RLCF alg 1] a program that fails gets -1
    localise: bool = True  # [RLCF alg 1] cut a failing program after the token to blame
    error_prone_jar: str | None = None  # class path of ErrorProne: its errors count like javac's
    discriminator: str | None = "runs/rlcf/discriminator"  # scores what compiles
    pass_score: cli.FiniteFloat = 1.0  # of a program that compiles, without a discriminator
    freeze_discriminator: bool = False  # don't train it against the policy
    discriminator_lr: cli.NonNegativeFloat = 5e-7  # peak of its AdamW, one step per rollout
    value_model: str | None = None  # as in PPO; None: a copy of the stage 1 policy with a new head

    total_episodes: cli.PositiveInt = 150_000
    batch_size: cli.Count = 8
    micro_batch_size: cli.PositiveInt = 8
    lr: cli.NonNegativeFloat = 1e-6
    adam: AdamSettings = AdamSettings(betas=(0.9, 0.99), eps=1e-8)
    max_query_length: cli.PositiveInt = 500
    response_length: cli.PositiveInt = 384
    temperature: cli.TemperatureOrGreedy = 1.0
    num_minibatches: cli.PositiveInt = 1  # optimizer steps per epoch
    num_ppo_epochs: cli.PositiveInt = 4  # passes over each rollout
    kl_coef: cli.NonNegativeFloat = 0.1  # beta: score units per nat of a token's KL
    kl_target: cli.PositiveFloat | None = 6.0  # nats per response, for an adaptive beta
    gamma: cli.Fraction = 0.99  # discount per token
    lam: cli.Fraction = 0.95  # lambda of GAE
    clip_range: cli.PositiveFloat = 0.2  # PPO clip range of the ratio
    value_clip_range: cli.PositiveFloat | None = None  # clip range of the value; None: no clipping
    value_coef: cli.NonNegativeFloat = 1.0  # weight of the value loss


RECIPES = recipes("rlcf", Args)


def check(args: Args) -> int:
    """Check that the settings fit together and return the number of updates."""
    if not args.compiler and args.discriminator is None:
        raise InputError("--no-compiler --discriminator None: nothing is left to score with.")
    if args.freeze_discriminator and args.discriminator is None:
        raise InputError("--freeze-discriminator needs a --discriminator.")
    if args.discriminator is not None and args.pass_score != 1.0:
        raise InputError(f"--pass-score {args.pass_score:g} needs --discriminator None.")
    if not (args.localise or args.compiler):
        raise InputError("--no-localise needs the compiler: drop --no-compiler.")
    checks.check_value_model(args.value_model, args.tune, args.shard)
    return checks.number_of_updates(
        args.total_episodes, args.batch_size, args.num_minibatches, args.temperature
    )


def main(args: Args) -> dict[str, float]:
    # ------------------------------------------------------------------------- 1. data and models
    device = begin(args)
    num_updates = check(args)
    B, T, size = args.batch_size, args.response_length, args.read_size
    load_device = loading.loading_device(args.shard, device)
    tokenizer, policy = loading.load_policy(args, load_device)
    eos_id, pad_id = tokenizer.eos_id, tokenizer.pad_id
    ends: tuple[int, int, ScoreAt] = eos_id, pad_id, "last_token"
    rows = load_programs(args.data / "code.train.jsonl", tokenizer, args.max_query_length)
    checks.check_policy(tokenizer, policy.config, rows, args.sft, T, args.value_model)
    # [RLCF alg 1] a separate critic, with its head initialised to 0
    value_model = loading.new_value_model(args.value_model, policy, load_device)
    ref_policy = loading.prepare_policy(args, device, policy, value_model)
    compiler = training_compiler(rows, args.error_prone_jar)
    pieces = token_bytes(tokenizer)
    discriminator = None

    parameters = [*policy.parameters(), *value_model.parameters()]
    steps = adamw_steps(args, parameters)
    beta = KLCoefficient(args.kl_coef, args.kl_target)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)  # the same numbers on every rank

    def write(directory: Path) -> None:
        write_checkpoint(policy, directory, tokenizer, args.sft)
        write_checkpoint(value_model, directory / "value_model", tokenizer)
        if discriminator is not None and run.main:
            save_discriminator(discriminator, directory / "discriminator")

    run = Run(args, "RLCF", write, [rows.path])
    weakref.finalize(run, compiler.close)  # its process ends with the run
    run.track(policy=policy, value_model=value_model)
    run.track(steps=steps, generator=generator, beta=vars(beta))
    if args.discriminator is not None:
        discriminator = load_discriminator(args.discriminator, device)
        d_lr = args.discriminator_lr
        adamw = torch.optim.AdamW(discriminator.parameters(), lr=d_lr, fused=True)
        d_steps = FiniteSteps(adamw, args.out, f"lower --discriminator-lr ({d_lr})")
        run.track(discriminator=discriminator, discriminator_steps=d_steps)
    run.print(f"RLCF: {num_updates} updates of {B} responses; {len(rows):,} queries")

    # -------------------------------------------------------------------------------- 2. the loop
    rank_rows = distributed.rank_slice(B)  # rows that this rank compiles
    for update in run.steps(num_updates):
        # 2.1 sample a program for each prompt, with temperature only
        indices = batch_indices(len(rows), B, update, args.seed)
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)
        model = for_sampling(distributed.unshard(policy), "same")
        write_program = partial(generate, model, stop_ids=tokenizer.stop_ids)
        with autocast, run.generating():
            prompts = [rows[i] for i in indices]
            batch = sample(write_program, prompts, uniforms, device, args.temperature, size, *ends)

        # 2.2 compile prefix + program + suffix
        records, response = batch.records[rank_rows], batch.response[rank_rows]
        checked = check_responses(records, response, compiler, pieces, eos_id)
        passes = checked.passes if args.compiler else torch.ones_like(checked.passes)

        # 2.3 a program that fails scores -1; D compares one that passes with the human-written one
        comparison = args.pass_score * passes
        if discriminator is not None:
            pairs = [(records[i], checked.texts[i]) for i in passes.nonzero().flatten().tolist()]
            with autocast:
                comparison[passes] = compare_with_written(discriminator, pairs, size)
        scores = grounding(passes, torch.ones_like(passes), comparison)  # human code passes
        scores = distributed.all_gather_rows(scores)
        checks.check_scores(scores, f"--discriminator {args.discriminator}", update, args.out)

        # 2.4 cut a failing program after the token to blame: the -1 goes there
        if args.compiler and args.localise:
            response = truncate_at_error(response, checked.error_index, pad_id)
        response = distributed.all_gather_rows(response)
        batch = Batch.of(batch.records, batch.query, response, batch.sampled_logprobs, *ends)

        # 2.5 policy, reference and value model read the cut programs
        with autocast:
            batch.logprobs, batch.ref_logprobs, exact_kl = read_logprobs(
                policy, ref_policy, batch, args.temperature, size
            )
            batch.values = read_values(value_model, batch, size)

        # 2.6 the KL penalty at each token, and the score once (the same in train_ppo.py)
        kl = torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0)  # k1
        rewards = -beta.value * kl
        rewards[torch.arange(B), batch.score_index] += scores

        # delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  R = A + V
        advantages, batch.returns = gae(rewards, batch.values, args.gamma, args.lam, batch.states)
        batch.advantages = whiten(advantages, batch.actions)

        # 2.7 K epochs of clipped steps over the frozen rollout (the same in train_ppo.py)
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

        # 2.8 [RLCF section 4] the discriminator learns to recognise the policy's programs
        metrics = profile_metrics([checked])
        if discriminator is not None:
            d_steps.set_lr(args.discriminator_lr * lr_factor(args.schedule, update, num_updates))
            # D(x, y, y) is 0: nothing to learn
            pairs = [(record, text) for record, text in pairs if text != record["response"]]
            frozen = args.freeze_discriminator
            metrics |= adversarial_step(
                discriminator, d_steps, pairs, args.micro_batch_size, autocast, frozen
            )

        # 2.9 log; every mean is over what counts
        metrics |= update_metrics.rollout_metrics(batch, scores, exact_kl, None, beta.value)
        gap = masked_mean((batch.sampled_logprobs - batch.logprobs).abs(), batch.actions)
        metrics |= stats.metrics() | {"policy/sampler_gap": gap.item()}
        metrics |= {"skipped_steps": steps.skipped, "lr": lr, "episode": (update + 1) * B}
        metrics |= update_metrics.utilisation(run, batch, args.num_ppo_epochs, policy, value_model)
        update_metrics.log_update(run, update, batch, scores, metrics, tokenizer)
        beta.update(metrics["objective/kl"], B)
    return run.finish(run.metrics)


if __name__ == "__main__":
    cli.command_line(main, RECIPES)
