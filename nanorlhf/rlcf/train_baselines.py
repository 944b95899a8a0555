"""What RLCF is compared with: two other ways to learn from a compiler. [RLCF section 6.3]

In: code.train.jsonl and the policy of stage 1. Out: the policy, in the same format; CodeRL's critic in critic/.
A program fails by an error alone: that unused variables fail too is RLCF's own. [RLCF section 8.6]
Both take one gradient step per rollout, where PPO's ratio is 1 and the gradient of -A * ratio is that of -A * log p: so
each is a choice of A in PPO's loss, beside a second loss of its own. Neither has a reward model or a KL penalty.

    python -m nanorlhf.rlcf.train_baselines bipolar_ramp --sft runs/rlcf/sft
    python -m nanorlhf.rlcf.train_baselines coderl --sft runs/rlcf/sft
"""

import copy
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernels import k3
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, scalar_from_gpt
from nanorlhf.cli import Beta, Count, NonNegativeFloat, PositiveInt, command_line
from nanorlhf.dataset import Demonstration, batch_indices, load_programs
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, micro_batches, needed_columns, right_pad
from nanorlhf.ppo import masked_mean, policy_loss
from nanorlhf.recipes import recipes
from nanorlhf.rlcf.baselines import bipolar_ramp_advantages, coderl_advantages, coderl_critic, coderl_critic_loss
from nanorlhf.rlcf.error_profile import profile_metrics
from nanorlhf.rlcf.feedback import Checked, check_responses, training_compiler
from nanorlhf.rlcf.localisation import truncate_at_error
from nanorlhf.rollout import rollout, sampling_order
from nanorlhf.tokenizer import check_vocabulary, load_tokenizer, token_bytes
from nanorlhf.training.checks import check_positions, check_rollouts
from nanorlhf.training.optimizer import FiniteSteps, parameter_groups
from nanorlhf.training.run import Run, begin, home, place_models, write_checkpoint
from nanorlhf.training.schedule import lr_factor
from nanorlhf.training.settings import RolloutArgs


@dataclass(frozen=True, kw_only=True)
class Args(RolloutArgs):
    objective: Literal["bipolar_ramp", "coderl"] = "bipolar_ramp"
    """bipolar_ramp: the blamed token down, the written program up; coderl: tokens weighed by a critic"""
    data: Path = Path("runs/rlcf/data")
    rows: Literal["sft", "code"] = "code"
    out: Path = Path("runs/rlcf/bipolar_ramp")
    sft: str = "runs/rlcf/sft"

    batch_size: Count = 8
    micro_batch_size: PositiveInt = 8
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    adam_betas: tuple[Beta, Beta] = (0.9, 0.99)
    """of AdamW"""
    second_coef: NonNegativeFloat = 1.0
    """weight of the second loss: the written programs' (bipolar_ramp) or the critic's (coderl)"""
    save_every: PositiveInt = 100


RECIPES = recipes("baselines", Args)


def written_loss(policy: GPT, rows: list[Demonstration], pad_id: int, temperature: float) -> Tensor:
    """Negative log-likelihood of the written programs, nats, the sum over rows and tokens."""
    query, response = left_pad([row.query for row in rows], pad_id), right_pad([row.response for row in rows], pad_id)
    ids = torch.cat((query, response), dim=1).to(policy.lm_head.weight.device)  # (b, Q + T)
    return -response_logprobs(policy, ids, ids != pad_id, ids[:, query.size(1) :] == pad_id, temperature)[0].sum()


def main(args: Args) -> dict[str, float]:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    if args.plan:
        raise InputError("--plan: there is none for these; that of train_ppo.py rlcf is an upper bound.")
    if args.rows != "code":
        raise InputError(f"--rows {args.rows}: a compiler checks programs: pass --rows code.")
    is_coderl = args.objective == "coderl"
    if is_coderl and args.localise:
        raise InputError("--objective coderl rewards whole programs: pass --no-localise.")
    device = begin(args)
    B, T, num_updates = args.batch_size, args.response_length, check_rollouts(args)
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    pad_id, eos_id = tokenizer.pad_id, tokenizer.eos_id
    demonstrations = load_programs(args.data / "code.train.jsonl", tokenizer, args.max_query_length, None)

    policy = load_gpt(args.sft, home(args, device)).forbid(pad_id, tokenizer.vocab_size)
    check_vocabulary(tokenizer, policy.config.vocab_size, args.sft)
    check_positions(demonstrations, T, policy.config, args.sft, written=not is_coderl)  # bipolar_ramp reads those too
    ref_policy = copy.deepcopy(policy).requires_grad_(False)  # measures the drift only
    critic = scalar_from_gpt(policy) if is_coderl else None
    if critic is not None:
        nn.init.zeros_(critic.score.weight)
    trained = [policy] if critic is None else [policy, critic]
    place_models(args, device, trained, [ref_policy])

    parameters = [parameter for model in trained for parameter in model.parameters()]
    groups = parameter_groups(parameters, args.weight_decay, decay_vectors=True)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)
    steps = FiniteSteps(optimizer, args, f"lower --lr ({args.lr})")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)
    parts: dict[str, Any] = {"policy": policy, "steps": steps, "generator": generator}
    if critic is not None:
        parts["critic"] = critic
    compiler, pieces = training_compiler(demonstrations[0].record, args.error_prone_jar), token_bytes(tokenizer)
    findings: list[Checked] = []  # of this rank's rollout

    def score(rows: list[Demonstration], query: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
        """The response, cut after the token to blame where --localise, and 1 for a program that compiles, else -1."""
        checked = check_responses([row.record for row in rows], response, compiler, pieces, eos_id, unused=False)
        findings.append(checked)
        if args.localise:
            response = truncate_at_error(response, checked.error_index, pad_id)
        return response, 2.0 * checked.passes.float() - 1.0

    def write() -> None:
        write_checkpoint(policy, args.out, tokenizer)
        if critic is not None:
            write_checkpoint(critic, args.out / "critic", tokenizer)

    run = Run(args, args.objective, parts, write)
    weakref.finalize(run, compiler.close)  # its process ends with the run
    run.print(f"{args.objective}: {num_updates} updates of {B} responses; {len(demonstrations):,} queries")

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    mine = distributed.rank_slice(B)
    for update in run.steps(num_updates):
        start = time.perf_counter()
        # 2.1 rollout; the compiler's word on each response
        rows = [demonstrations[i] for i in batch_indices(len(demonstrations), B, update, args.seed)]
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)
        findings.clear()
        with autocast:
            batch = rollout(
                policy, ref_policy, None, score, rows, uniforms, eos_id, pad_id,
                args.temperature, "last_token", args.rollout_batch_size,
            )  # fmt: skip
        place = sampling_order(rows)[1]  # findings are in the order of sampling
        error_index = distributed.all_gather_rows(torch.cat([found.error_index for found in findings])[place])  # (B,)
        passes = error_index == T  # (B,)

        # 2.2 the advantages
        if critic is None:
            advantages = bipolar_ramp_advantages(batch.logprobs, error_index)  # (B, T) [RLCF eq 3]
        else:  # [RLCF eq 4] against the greedy response, token by token as the critic weighs them
            with autocast, torch.no_grad():
                query = batch.query[mine], batch.query_mask[mine]
                greedy, _ = generate(distributed.unshard(policy), *query, T, 0.0, eos_id=eos_id, pad_id=pad_id)
                arguments = batch.query_response[mine], batch.mask[mine], batch.padding_mask[mine]
                token_logits = coderl_critic(critic, *arguments)[1]
            records = [row.record for row in rows[mine]]
            baseline = check_responses(records, greedy, compiler, pieces, eos_id, unused=False)
            token_logits, baseline_passes = map(distributed.all_gather_rows, (token_logits, baseline.passes))
            advantages = coderl_advantages(token_logits, passes, baseline_passes, batch.padding_mask)  # (B, T)

        # 2.3 one step; both losses are sums over tokens and means over responses
        lr = args.lr * lr_factor(args.schedule, update, num_updates)
        steps.set_lr(lr)
        optimizer.zero_grad()
        num_responses = torch.tensor(B, device=device)
        stats, first_ratio_error = torch.zeros(2, device=device), torch.zeros((), device=device)
        share = torch.arange(B)[mine]
        share = share[batch.mask[share].sum(1).argsort().cpu()]  # similar lengths together: less padding
        for index in micro_batches(share, args.micro_batch_size):  # (b,)
            first, t = needed_columns(batch.query_mask[index], batch.state_mask[index])
            columns = slice(first, batch.query.size(1) + t)
            ids, mask = batch.query_response[index, columns], batch.mask[index, columns]  # (b, q + t) trimmed
            no_action, old_logprobs = batch.padding_mask[index, :t], batch.logprobs[index, :t]  # (b, t) trimmed
            with autocast:
                new_logprobs, _ = response_logprobs(policy, ids, mask, no_action, args.temperature)
            # the ratio is 1: the clip never acts
            pg_loss, _ = policy_loss(new_logprobs, old_logprobs, advantages[index, :t], no_action, 0.2, num_responses)
            with autocast:
                if critic is None:
                    second_loss = written_loss(policy, [rows[i] for i in index.tolist()], pad_id, args.temperature) / B
                else:  # does the program pass?
                    second_loss = coderl_critic_loss(coderl_critic(critic, ids, mask, no_action)[0], passes[index]) / B
            (pg_loss + args.second_coef * second_loss).backward()
            with torch.no_grad():
                ratio = torch.where(no_action, 0.0, new_logprobs - old_logprobs).exp()
                first_ratio_error = torch.maximum(first_ratio_error, (ratio - 1).abs().max())
                stats += torch.stack((pg_loss.detach(), second_loss.detach()))
        distributed.sum_gradients(*trained)
        pg_loss_mean, second_loss_mean = distributed.all_sum(stats).tolist()
        steps.step(parameters, pg_loss_mean + args.second_coef * second_loss_mean)

        # 2.4 log
        kl = torch.where(batch.padding_mask, 0.0, batch.logprobs - batch.ref_logprobs).sum(1)  # (B,) k1, nats
        kl_k3 = torch.where(batch.padding_mask, 0.0, k3(batch.logprobs, batch.ref_logprobs)).sum(1)
        sampler_gap = masked_mean((batch.sampled_logprobs - batch.logprobs).abs(), batch.padding_mask)
        metrics = {
            "objective/kl": kl.mean().item(),
            "objective/kl_k3": kl_k3.mean().item(),
            "objective/entropy": -batch.logprobs.sum(1).mean().item(),
            "objective/score": batch.scores.mean().item(),
            "policy/loss": pg_loss_mean,
            "policy/first_ratio_error": distributed.largest(first_ratio_error.item()),
            "policy/sampler_gap": sampler_gap.item(),
            "written/loss" if critic is None else "critic/loss": second_loss_mean,
            "eos_rate": (batch.response == eos_id).any(1).float().mean().item(),
            "response_length": (batch.eos_index + 1).float().mean().item(),
            "skipped_steps": steps.skipped,
            "lr": lr,
            "episode": (update + 1) * B,
            "episodes_per_second": B / (time.perf_counter() - start),
            **profile_metrics(findings),
        }
        if update + 1 == num_updates or update % args.sample_every == 0:
            shown = zip(rows[:4], batch.response[:4].tolist(), batch.scores[:4].tolist(), kl[:4].tolist(), strict=True)
            samples = [
                {"query": row.record["query"], "response": tokenizer.decode(ids), "score": value, "kl": nats}
                for row, ids, value, nats in shown
            ]
            run.log_samples(update, samples)
        run.log(update, metrics, score=f"{metrics['objective/score']:.2f}", kl=f"{metrics['objective/kl']:.1f}")

    summary = {name: value for name, value in run.metrics.items() if name != "episodes_per_second"}
    run.finish(summary)
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
