"""RLCF's baselines: two other ways to learn from a compiler. [RLCF section 6.3]

In: code.train.jsonl and the policy of stage 1. Out: the policy, in the same format; CodeRL's critic in critic/.
Only an error fails a program here; only RLCF also fails unused variables. [RLCF section 8.6]
Both take one gradient step per rollout. PPO's ratio is then 1, and -A * ratio has the same gradient as -A * log p. So
each is a choice of A in PPO's loss plus a second loss. Neither has a reward model or a KL penalty.

    python -m nanorlhf.rlcf.train_baselines bipolar_ramp --sft runs/rlcf/sft
    python -m nanorlhf.rlcf.train_baselines coderl --sft runs/rlcf/sft
"""

import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.batch import Batch, sample
from nanorlhf.cli import Count, NonNegativeFloat, PositiveInt, command_line
from nanorlhf.dataset import Demonstration, batch_indices, load_programs
from nanorlhf.errors import InputError
from nanorlhf.generate import for_sampling, generate
from nanorlhf.logprobs import read_logprobs, response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.ppo import masked_mean, policy_loss
from nanorlhf.recipes import recipes
from nanorlhf.rlcf.baselines import bipolar_ramp_advantages, coderl_advantages, coderl_critic, coderl_critic_loss
from nanorlhf.rlcf.error_profile import profile_metrics
from nanorlhf.rlcf.feedback import check_responses, training_compiler
from nanorlhf.rlcf.localisation import truncate_at_error
from nanorlhf.tokenizer import check_vocabulary, token_bytes
from nanorlhf.training.checks import check_positions, number_of_updates
from nanorlhf.training.loading import load_policy, loading_device, new_value_model, prepare_policy
from nanorlhf.training.optimizer import adamw_steps, lr_factor
from nanorlhf.training.run import Run, begin, write_checkpoint
from nanorlhf.training.settings import AdamSettings, RolloutArgs
from nanorlhf.training.update_metrics import UpdateStatistics, log_update, rollout_metrics


@dataclass(frozen=True, kw_only=True)
class Args(RolloutArgs):
    objective: Literal["bipolar_ramp", "coderl"] = "bipolar_ramp"
    """bipolar_ramp: blamed token down, written program up; coderl: tokens weighted by a critic"""
    data: Path = Path("runs/rlcf/data")
    out: Path = Path("runs/rlcf/bipolar_ramp")
    sft: str = "runs/rlcf/sft"
    localise: bool = True
    """cut a failing program after the token to blame"""
    error_prone_jar: str | None = None
    """ErrorProne's jars as a class path: its errors count like javac's"""

    batch_size: Count = 8
    micro_batch_size: PositiveInt = 8
    adam: AdamSettings = AdamSettings(betas=(0.9, 0.99), eps=1e-8)
    second_coef: NonNegativeFloat = 1.0
    """weight of the second loss: the written programs' (bipolar_ramp) or the critic's (coderl)"""


RECIPES = recipes("baselines", Args)


def written_loss(policy: GPT, rows: list[Demonstration], pad_id: int, temperature: float) -> Tensor:
    """Return the negative log-likelihood of the written programs in nats, summed over rows and tokens."""
    query = left_pad([row.query for row in rows], pad_id)
    response = right_pad([row.response for row in rows], pad_id)
    ids = torch.cat((query, response), dim=1).to(policy.lm_head.weight.device)  # (b, Q + T)
    real = ids != pad_id
    return -response_logprobs(policy, ids, real, real[:, query.size(1) :], temperature)[0].sum()


def critic_tokens(critic: ScalarModel, mb: Batch) -> Tensor:
    """Return the critic's logit for each response token, (b, T)."""
    return coderl_critic(critic, mb.query_response, mb.real, mb.actions)[1]


def main(args: Args) -> dict[str, float]:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    is_coderl = args.objective == "coderl"
    if is_coderl and args.localise:
        raise InputError("--objective coderl rewards whole programs: pass --no-localise.")
    device = begin(args)
    B, T, size = args.batch_size, args.response_length, args.read_size
    num_updates = number_of_updates(args.total_episodes, B, 1, args.temperature)
    loading = loading_device(args.shard, device)
    tokenizer, policy = load_policy(args, loading)
    pad_id, eos_id = tokenizer.pad_id, tokenizer.eos_id
    rows = load_programs(args.data / "code.train.jsonl", tokenizer, args.max_query_length)
    check_vocabulary(tokenizer, policy.config.vocab_size, args.sft)
    check_positions(rows, T, policy.config, args.sft, written=not is_coderl)  # bipolar_ramp also reads written programs
    critic = new_value_model(None, policy, loading) if is_coderl else None
    ref_policy = prepare_policy(args, device, policy, critic)  # only measures the drift
    trained = [policy] if critic is None else [policy, critic]

    parameters = [parameter for model in trained for parameter in model.parameters()]
    steps = adamw_steps(args, parameters)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)
    compiler, pieces = training_compiler(rows, args.error_prone_jar), token_bytes(tokenizer)

    def write(directory: Path) -> None:
        write_checkpoint(policy, directory, tokenizer, args.sft)
        if critic is not None:
            write_checkpoint(critic, directory / "critic", tokenizer)

    run = Run(args, args.objective, write, [rows.path])
    weakref.finalize(run, compiler.close)  # stops its process with the run
    run.track(policy=policy, steps=steps, generator=generator)
    if critic is not None:
        run.track(critic=critic)
    run.print(f"{args.objective}: {num_updates} updates of {B} responses; {len(rows):,} queries")

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    local_rows = distributed.rank_slice(B)  # rows this rank compiles
    for update in run.steps(num_updates):
        # 2.1 sample a program for each prompt; score 1 if it compiles, else -1; cut it after the token to blame
        written = [rows[i] for i in batch_indices(len(rows), B, update, args.seed)]
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)
        full_policy = distributed.unshard(policy)
        with autocast, run.generating():
            write_program = partial(generate, for_sampling(full_policy, "same"), stop_ids=tokenizer.stop_ids)
            batch = sample(
                write_program, written, uniforms, device, args.temperature, size, eos_id, pad_id, "last_token"
            )
        records, response = batch.records[local_rows], batch.response[local_rows]
        checked = check_responses(records, response, compiler, pieces, eos_id, unused=False)
        if args.localise:
            response = distributed.all_gather_rows(truncate_at_error(response, checked.error_index, pad_id))
            batch = Batch.of(batch.records, batch.query, response, batch.sampled_logprobs, eos_id, pad_id, "last_token")
        passes = distributed.all_gather_rows(checked.passes)  # (B,)
        scores = 2.0 * passes.float() - 1.0
        with autocast:
            batch.logprobs, batch.ref_logprobs, exact_kl = read_logprobs(
                policy, ref_policy, batch, args.temperature, size
            )

        # 2.2 advantages: credit or blame per token
        if critic is None:  # [RLCF eq 3] blame the compiler's token
            error_index = distributed.all_gather_rows(checked.error_index)
            batch.advantages = bipolar_ramp_advantages(batch.logprobs, error_index)  # (B, T)
        else:  # [RLCF eq 4] compare with the greedy response, tokens weighted by the critic
            with autocast:
                query = batch.query[local_rows]
                with run.generating():
                    greedy, _ = generate(
                        full_policy, query, query != pad_id, T, 0.0, eos_id=eos_id, pad_id=pad_id,
                        stop_ids=tokenizer.stop_ids,
                    )  # fmt: skip
                token_logits = batch.read(partial(critic_tokens, critic), size)  # (B, T)
            baseline = check_responses(records, greedy, compiler, pieces, eos_id, unused=False)
            baseline_passes = distributed.all_gather_rows(baseline.passes)
            batch.advantages = coderl_advantages(token_logits, passes, baseline_passes, batch.actions)  # (B, T)

        # 2.3 one step; both losses are summed over tokens and averaged over responses
        lr = args.lr * lr_factor(args.schedule, update, num_updates)
        steps.set_lr(lr)
        steps.zero_grad()
        num_actions = batch.actions.sum()
        stats = UpdateStatistics(device)
        for mb in batch.shard().micro_batches(args.micro_batch_size):
            with autocast:
                new_logprobs, entropy = response_logprobs(
                    policy, mb.query_response, mb.real, mb.actions, args.temperature
                )
            # the ratio is 1: the clip never acts
            losses, is_clipped = policy_loss(new_logprobs, mb.logprobs, mb.advantages, mb.loss_actions, 0.2)
            pg_loss = losses.sum() / B
            with autocast:
                if critic is None:
                    mb_written = [written[i] for i in mb.index.tolist()]
                    second_loss = written_loss(policy, mb_written, pad_id, args.temperature) / B
                else:  # predict whether the program passes
                    logits = coderl_critic(critic, mb.query_response, mb.real, mb.actions)[0]
                    second_loss = coderl_critic_loss(logits, passes[mb.index]) / B
            (pg_loss + args.second_coef * second_loss).backward()
            stats.add_loss("policy", pg_loss, is_clipped, num_actions)
            stats.add("written/loss" if critic is None else "critic/loss", second_loss)
            stats.add_tokens(mb, new_logprobs, entropy, num_actions)
        distributed.sum_gradients(*trained)
        means = stats.minibatch()
        second_mean = means["written/loss" if critic is None else "critic/loss"]
        if steps.step(parameters, means["policy/loss"] + args.second_coef * second_mean):
            stats.count(means)

        # 2.4 log
        metrics = rollout_metrics(batch, scores, exact_kl, None, 0.0) | stats.metrics()
        gap = masked_mean((batch.sampled_logprobs - batch.logprobs).abs(), batch.actions)
        metrics |= {"policy/sampler_gap": gap.item(), "skipped_steps": steps.skipped, "lr": lr}
        metrics |= {"episode": (update + 1) * B}
        log_update(run, update, batch, scores, metrics | profile_metrics([checked]), tokenizer)
    return run.finish(run.metrics)


if __name__ == "__main__":
    command_line(main, RECIPES)
