"""Metrics of an update of PPO, GRPO or RLCF; docs/metrics.md explains each one."""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from kernels import k2, k3
from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import has_updates
from nanorlhf.ppo import response_mean
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.flops import decode_bytes, iteration_flops, matmul_rate, published
from nanorlhf.training.run import Run
from nanorlhf.training.run_directory import flat_settings
from nanorlhf.training.settings import RewardArgs

Metrics = dict[str, float]
NUM_SAMPLED_UPDATES = 50
"""about how many updates of a run write responses to samples.jsonl: evenly spaced, plus the last one"""


class UpdateStatistics:
    """Means over the tokens of each minibatch, then over the optimizer steps that were taken.

    has_response_ratio: there is one ratio per response, exp(mean over its tokens of the log ratio), so that statistics
    of the ratio and its clipping are means over responses. [GSPO equation 7]
    """

    def __init__(self, device: torch.device, has_response_ratio: bool = False):
        self.has_response_ratio = has_response_ratio
        self.sums: dict[str, Tensor] = {}  # of the current minibatch, on this rank
        self.totals: Metrics = {}
        self.num_steps = 0
        self.first_ratio_error = torch.zeros((), device=device)  # largest |ratio - 1| before the first step
        self.is_first = True

    def add_loss(self, name: str, loss: Tensor, is_clipped: Tensor, count: Tensor) -> None:
        """Add a micro-batch's share of a mean loss and of the clipped fraction of `count` ratios; is_clipped (b, T)."""
        self.add(f"{name}/loss", loss)
        if self.has_response_ratio:
            is_clipped = is_clipped[:, :1]  # the same at each token
        self.add(f"{name}/clip_fraction", is_clipped.sum() / count)

    @torch.no_grad()
    def add_tokens(
        self,
        mb: Batch,
        new_logprobs: Tensor,
        entropy: Tensor,
        count: Tensor,
        new_values: Tensor | None = None,
        num_ratios: Tensor | None = None,
    ) -> None:
        """Add how far the tokens in a micro-batch's loss have moved since the rollout; tensors (b, T), counts ().

        num_ratios: number of ratios in the minibatch, if it isn't the number of tokens, `count`. If the update is
        traced, keep the model outputs.
        """
        if mb.trace is not None:
            mb.trace[-1].append((mb.index, new_logprobs.detach(), None if new_values is None else new_values.detach()))
        counted = mb.loss_actions
        self.add("policy/entropy", entropy[counted].sum() / count)
        new, old = new_logprobs, mb.ratio_to
        if self.has_response_ratio:
            new, old = (response_mean(x, counted)[:, :1] for x in (new, old))  # (b, 1)
            counted = counted[:, :1]
        if num_ratios is not None:
            count = num_ratios
        ratio = torch.where(counted, new - old, 0.0).exp()
        self.add("policy/approx_kl", k2(new, old)[counted].sum() / count)
        self.add("policy/ratio", ratio[counted].sum() / count)
        if self.is_first:
            self.first_ratio_error = torch.maximum(self.first_ratio_error, (ratio - 1).abs().max())

    def add(self, name: str, share: Tensor) -> None:
        """Add a micro-batch's share of a mean."""
        self.sums[name] = self.sums.get(name, 0.0) + share.detach()

    def minibatch(self) -> Metrics:
        """Return the minibatch's means over all ranks, and start the next minibatch."""
        names = list(self.sums)
        means = distributed.all_sum(torch.stack([self.sums[name] for name in names])).tolist()
        self.sums = {}
        self.is_first = False
        return dict(zip(names, means, strict=True))

    def count(self, means: Metrics) -> None:
        """Count a minibatch whose optimizer step was taken."""
        self.num_steps += 1
        self.totals = {name: self.totals.get(name, 0.0) + mean for name, mean in means.items()}

    def metrics(self) -> Metrics:
        means = {name: total / self.num_steps for name, total in self.totals.items()}
        return means | {"policy/first_ratio_error": distributed.largest(self.first_ratio_error.item())}


def rollout_metrics(
    batch: Batch,
    scores: Tensor,
    exact_kl: Tensor,
    gold_scores: Tensor | None,
    kl_coef: float,
    samples_per_query: int = 1,
) -> Metrics:
    """Return the metrics of the responses (B, T) and their scores (B,); exact_kl (B, T) is summed over the vocabulary.

    A response's score includes its token rewards.
    """
    scores = scores + batch.token_rewards.sum(1)
    kl = response_kl(batch).mean().item()
    kl_k3 = torch.where(batch.actions, k3(batch.logprobs, batch.ref_logprobs), 0.0).sum(1)  # (B,)
    score = scores.mean().item()
    gold = {} if gold_scores is None else {"gold_score": gold_scores.mean().item()}
    if samples_per_query > 1:
        from nanorlhf.grpo import all_alike

        gold["groups/alike"] = all_alike(scores, samples_per_query).float().mean().item()
    return gold | {
        "objective/kl": kl,
        "objective/kl_k3": kl_k3.mean().item(),
        "objective/kl_exact": exact_kl.sum(1).mean().item(),
        "objective/entropy": -batch.logprobs.sum(1).mean().item(),
        "objective/non_score_reward": -kl_coef * kl,
        "objective/score": score,
        "objective/score_std": deviation(scores),
        "objective/rlhf_reward": score - kl_coef * kl,
        "objective/kl_coef": kl_coef,
        "eos_rate": batch.has_eos.float().mean().item(),
        "response_length": (batch.eos_index + 1).float().mean().item(),
    }


def deviation(values: Tensor) -> float:
    """Return the standard deviation of a sample (n,); NaN, written as null, for a single value."""
    return values.std().item() if len(values) > 1 else math.nan


def response_kl(batch: Batch) -> Tensor:
    """Return the KL estimate k1 summed over each response's tokens, (B,) nats; the mean may be slightly negative."""
    return torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0).sum(1)


def utilisation(
    run: Run,
    batch: Batch,
    num_epochs: int,
    policy: GPT,
    value_model: ScalarModel | None,
    reward_models: Sequence[ScalarModel] = (),
    samples_per_query: int = 1,
) -> Metrics:
    """Return an update's shares of the card's matmul rates and, while sampling, of its bandwidth; {} if not known.

    Rates are per rank. The time of sampling includes reading the queries. LoRA and T5 have no metrics.
    """
    card, args = published(batch.query.device), run.args
    if card is None or args.dtype != "bfloat16" or has_updates(policy) or policy.config.num_decoder_blocks:
        return {}
    queries, responses = batch.real[:, : batch.query.size(1)].sum(1).tolist(), (batch.eos_index + 1).tolist()
    flops = iteration_flops(
        policy.config,
        None if value_model is None else value_model.config,
        [model.config for model in reward_models],
        queries,
        responses,
        samples_per_query,
        num_epochs,
    )
    rate = flops / (time.perf_counter() - run.step_start) / distributed.world_size()
    measured = matmul_rate(batch.query.device, torch.bfloat16)
    metrics = {"time/mfu": rate / card.rate, "time/matmul_share": rate / measured}
    if not (isinstance(args, RewardArgs) and args.sampler.url):  # an engine samples elsewhere
        rows = list(zip(queries, responses, strict=True))[distributed.rank_slice(len(batch))]
        num_bytes = decode_bytes(policy.config, rows, args.read_size, itemsize=2)
        metrics["time/decode_bandwidth"] = num_bytes / run.generating_seconds / card.bandwidth
    return metrics


def log_update(
    run: Run,
    update: int,
    batch: Batch,
    scores: Tensor,
    metrics: Metrics,
    tokenizer: Tokenizer,
    samples_per_query: int = 1,
) -> None:
    """Log an update's metrics and, at some updates, a few of its responses."""
    kl = response_kl(batch)
    if update + 1 == run.num_steps or update % max(1, run.num_steps // NUM_SAMPLED_UPDATES) == 0:
        run.log_samples(update, rollout_samples(batch, scores, kl, tokenizer, samples_per_query))
    score, mean_kl, eos_rate = metrics["objective/score"], metrics["objective/kl"], metrics["eos_rate"]
    seconds = time.perf_counter() - run.step_start
    metrics["episodes_per_second"] = len(batch) / seconds
    metrics["time/generating_share"] = run.generating_seconds / seconds
    run.log(update, metrics, score=f"{score:.2f}", kl=f"{mean_kl:.1f}", eos=f"{eos_rate:.2f}")
    warn_of_negative_kl(run, update, metrics)


def warn_of_negative_kl(run: Run, update: int, metrics: Metrics) -> None:
    """Warn if the update's KL is too far below 0 to be chance."""
    from nanorlhf.rules.kl_rules import is_below_zero  # the doctor's, which training itself doesn't need
    from nanorlhf.rules.record import Record

    record = Record(settings=flat_settings(asdict(run.args)), rows=[metrics], summary={})
    if is_below_zero(record, record.rows):
        kl = metrics["objective/kl"]
        run.warn(f"update {update}: the KL is {kl:.2f}, too far below 0 to be chance: check policy and masks")


def rollout_samples(batch: Batch, scores: Tensor, kl: Tensor, tokenizer: Tokenizer, every: int) -> list[dict]:
    """Return rows of samples.jsonl: responses 0, every, 2 * every and 3 * every, each to another query."""
    return [
        {
            "query": batch.records[i]["query"],
            "response": tokenizer.decode(batch.response[i].tolist()),
            "score": (scores[i] + batch.token_rewards[i].sum()).item(),
            "kl": kl[i].item(),
        }
        for i in range(0, len(batch), every)[:4]
    ]
