"""Evaluate policies on one response per query against the data's references: N+ section 5 and details 16 to 19.

In: sft.validation.jsonl and, for reward models, comparisons.validation.jsonl. Out: ROUGE, win rates by the gold score
and by an LLM judge, reward model score and accuracy, KL, length, and the tokens that alignment changed.
"""

import itertools
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.checkpoint import load_scalar
from nanorlhf.cli import CountOrNone, PositiveFloat, PositiveInt, Temperature, TemperatureOrGreedy
from nanorlhf.dataset import Comparison, Demonstration, load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.evals.judge import WIN
from nanorlhf.evals.judged import Judge, JudgeArgs, judge_policies, load_judge
from nanorlhf.evals.model_loading import (
    check_model,
    check_reward_model,
    common_tokenizer,
    load_gold,
    load_model,
    load_policy,
    longest_pair,
    longest_text,
)
from nanorlhf.evals.reward_models import measure_rewards
from nanorlhf.evals.scores import endings, gold_margins, rm_scores, row_scores, sample
from nanorlhf.evals.settings import PolicyArgs, begin, best_of, named_policies
from nanorlhf.evals.token_shifts import Pieces, shift_lines, token_shifts
from nanorlhf.evals.writing import json_settings, write_evaluation
from nanorlhf.logprobs import response_logprobs
from nanorlhf.metrics import bootstrap_interval, rouge, wilson_interval, win_rate
from nanorlhf.metrics.best_of import best_of_n_bound, best_of_n_kl
from nanorlhf.metrics.token_rewards import token_rewards
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import micro_batches, right_pad
from nanorlhf.ppo import eos_masks
from nanorlhf.progress import Progress
from nanorlhf.report import reward_model_report, summary_report, token_report
from nanorlhf.report.along_run import earlier_checkpoints
from nanorlhf.report.length_figures import length_figures
from nanorlhf.report.token_report import Tokens
from nanorlhf.rewards.gold import Gold
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.run_directory import run_of
from nanorlhf.training.supervised import autocast
from nanorlhf.training.update_metrics import deviation


@dataclass(frozen=True, kw_only=True)
class Args(JudgeArgs, PolicyArgs):
    """The KL is measured to the first policy; best-of-N:DIR takes the highest-scoring of N responses."""

    reward_model: str | None
    """checkpoint directory or Hub id; None: no reward model scores"""
    implicit_rewards: tuple[str, ...] = ()
    """[N+ 19] names of --policies, trained by DPO from the first one, that also rank the pairs"""
    dpo_beta: PositiveFloat = 0.05
    """DPO's beta of the implicit rewards, in score units per nat, as in their training"""
    shift_base: str | None = None
    """name of the policy before alignment, whose token ranks colour the responses; None: the first"""
    max_response_length: PositiveInt
    """longest response of a comparison or reference in tokens, EOS included"""
    temperature: TemperatureOrGreedy = 0.01
    """sampling temperature of the evaluated responses; 0: greedy"""
    kl_temperature: Temperature = 0.7
    """sampling temperature of the responses on which the KL is estimated, as in PPO's rollouts"""
    num_distinct_samples: CountOrNone = 0
    """responses to sample per query at --kl-temperature to count how many differ; 0: don't count"""
    judge_against: str = "reference"
    """baseline that the judge compares responses with: `reference`, or the name of a policy"""
    gold: str | None = None
    """FILE.py:FUNCTION or a larger reward model: the gold score for win rates against the references; None: no gold"""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Data and models shared by all phases of the evaluation."""

    args: Args
    device: torch.device
    checkpoints: dict[str, str]  # policy -> checkpoint
    num_samples: dict[str, int]  # policy -> N of best-of-N, else 1
    judge: Judge | None
    tokenizer: Tokenizer
    rows: list[Demonstration]
    pairs: list[Comparison]
    gold: Gold | None
    ref_policy: GPT
    reward_model: ScalarModel | None

    @property
    def first(self) -> str:
        """The name of the first policy, the reference of the KL."""
        return next(iter(self.checkpoints))

    @property
    def queries(self) -> list[str]:
        return [row.record["query"] for row in self.rows]

    @property
    def references(self) -> list[str]:
        return [row.record["response"] for row in self.rows]

    def policy(self, name: str) -> GPT:
        if self.checkpoints[name] == self.checkpoints[self.first]:
            return self.ref_policy
        return load_policy(self.checkpoints[name], self.rows, self.tokenizer, self.args, self.device)

    def sample(self, policy: GPT, num_samples: int, temperature: float) -> tuple[Tensor, Tensor]:
        """Return query (B * n, Q) and response (B * n, T), the n of a query consecutive."""
        return sample(policy, self.rows, self.tokenizer, self.args, num_samples, temperature=temperature)

    def rm_scores(self, query: Tensor, response: Tensor) -> list[float] | None:
        if self.reward_model is None:
            return None
        return rm_scores(self.reward_model, query, response, self.tokenizer.pad_id, self.args.batch_size)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of a policy's responses, or of the references."""

    numbers: dict  # statistics, as in eval.json
    column: list[dict]  # a row per query: the response and its scores
    response: Tensor  # (B, T)
    lengths: list[int]  # tokens, without EOS


def main(args: Args) -> dict:
    inputs = load(args)
    reference = measure_references(inputs)
    measured, tokens = {}, {}  # by policy; tokens of the response to the first query
    for name in Progress(inputs.checkpoints, desc="policies"):
        measured[name], tokens[name] = measure_policy(name, inputs, reference)
    columns = {name: policy.column for name, policy in measured.items()}
    account = None
    verdicts: dict[str, list[dict]] = {}
    if inputs.judge:
        everyone = {"reference": reference.column} | columns
        judged = judge_policies(inputs.judge, inputs.queries, everyone, args.judge_against, args.seed)
        verdicts, numbers, account = judged
        if args.judge_dry_run:
            return {}
        for name, policy in measured.items():
            policy.numbers.update(numbers.get(name, {}))
    base_name = args.shift_base or inputs.first
    responses = {name: one.response for name, one in (measured | {"reference": reference}).items()}
    base = inputs.policy(base_name)
    with autocast(args.dtype, inputs.device), distributed.on_device(base):
        shifts, shares = token_shifts(base, inputs.rows, responses, inputs.tokenizer, args.batch_size)
    rewards, accuracy = measure_reward_models(inputs, columns)
    result = {
        "policies": {name: policy.numbers for name, policy in measured.items()},
        "reference": reference.numbers,
        "reward_model": accuracy,
        "rewards": rewards,
        "judge": account,
        "differences": paired_differences(columns, args.seed),
        "token_shift": {"base": base_name, "shares": shares},
        "num_queries": len(inputs.rows),
        "args": json_settings(args),
    }
    write(inputs, result, measured, reference, verdicts, shifts, tokens)
    print("\n".join(shift_lines(base_name, shifts[0])))
    return result


# ----------------------------------------------------------------------------------------------------------- 1. inputs
def parse_policies(args: Args) -> tuple[dict[str, str], dict[str, int]]:
    """Return policy -> checkpoint and policy -> N of best-of-N, else 1. Checks all flags that name policies."""
    parsed = {name: best_of(checkpoint) for name, checkpoint in named_policies(args.policies).items()}
    checkpoints = {name: checkpoint for name, (_, checkpoint) in parsed.items()}
    num_samples = {name: number for name, (number, _) in parsed.items()}
    first, *rest = checkpoints
    if num_samples[first] > 1 or max(num_samples.values()) > 1 and not args.reward_model:
        raise InputError("--policies: best-of-N:DIR needs a --reward-model and can't be the first policy.")
    if args.shift_base not in (None, *checkpoints):
        raise InputError(f"--shift-base {args.shift_base}: expected a name from --policies.")
    if args.judge_against not in ("reference", *checkpoints) or {args.judge_against} == checkpoints.keys():
        raise InputError(f"--judge-against {args.judge_against}: expected `reference` or one policy of several.")
    unknown = set(args.implicit_rewards) - set(rest)
    if unknown:
        raise InputError(f"--implicit-rewards {min(unknown)}: expected names from --policies, except the first.")
    return checkpoints, num_samples


def load(args: Args) -> Inputs:
    device = begin(args, writes=not args.judge_dry_run)
    checkpoints, num_samples = parse_policies(args)
    judge = load_judge(args, args.seed)
    check_reward_model(args.reward_model)
    tokenizer = common_tokenizer(args.tokenizer, [*checkpoints.values(), args.reward_model], args.gold)
    Q, T = args.max_query_length, args.max_response_length
    answered, compared = args.data / "sft.validation.jsonl", args.data / "comparisons.validation.jsonl"
    rows = list(load_demonstrations(answered, tokenizer, Q, T)[: args.num_queries])
    has_pairs = args.reward_model or args.implicit_rewards
    pairs = list(load_comparisons(compared, tokenizer, Q, T)) if has_pairs else []
    longest = {
        str(answered): longest_text(rows, args.response_length),
        str(compared): longest_pair(pairs),
    }
    for flag, checkpoint in (("--reward-model", args.reward_model), ("--gold", args.gold)):
        check_model(flag, checkpoint, tokenizer, longest)
    return Inputs(
        args=args,
        device=device,
        checkpoints=checkpoints,
        num_samples=num_samples,
        judge=judge,
        tokenizer=tokenizer,
        rows=rows,
        pairs=pairs,
        gold=load_gold(args.gold, args, tokenizer, device),
        ref_policy=load_policy(next(iter(checkpoints.values())), rows, tokenizer, args, device),
        reward_model=load_model(load_scalar, args.reward_model, args, device) if args.reward_model else None,
    )


# ------------------------------------------------------------------------------------------- 2. responses and scores
def measure_references(inputs: Inputs) -> Measured:
    rows, pad_id = inputs.rows, inputs.tokenizer.pad_id
    golds = rm = rm_mean = None
    with autocast(inputs.args.dtype, inputs.device):
        if inputs.gold:
            golds = inputs.gold.score_rows(rows)
        if inputs.reward_model:
            scores = row_scores(inputs.reward_model, rows, pad_id, inputs.args.batch_size, "left")
            rm, rm_mean = scores.tolist(), scores.mean().item()
    lengths = [len(row.response) for row in rows]
    return Measured(
        numbers={"gold_score": fmean(golds) if golds else None, "rm_score": rm_mean, "response_length": fmean(lengths)},
        column=scored(inputs.references, rm, golds),
        response=right_pad([row.response for row in rows], pad_id).to(inputs.device),
        lengths=[length - 1 for length in lengths],
    )


def measure_policy(name: str, inputs: Inputs, reference: Measured) -> tuple[Measured, Tokens]:
    """Measure one policy, and free it before the next one is loaded."""
    args, tokenizer, n = inputs.args, inputs.tokenizer, inputs.num_samples[name]
    policy = inputs.policy(name)
    with autocast(args.dtype, inputs.device):
        (query, response), (drawn_query, drawn) = sample_responses(policy, inputs, n)
        kls, estimates, entropies = kl_to(inputs.ref_policy, policy, drawn_query, drawn, n, tokenizer, args)
        distinct = num_distinct(policy, inputs) if n == 1 else None  # best-of-n would need n times as many samples
        tokens = token_rewards(
            inputs.checkpoints[name], policy, inputs.ref_policy, inputs.reward_model, query[:1], response[:1],
            tokenizer, args.kl_temperature,
        )  # fmt: skip
        rm = inputs.rm_scores(query, response)
        golds = inputs.gold.score_ids(inputs.queries, query, response) if inputs.gold else None
    texts = [tokenizer.decode(ids) for ids in response.tolist()]
    wins = win_rate(golds, [row["gold_score"] for row in reference.column]) if golds else None
    numbers = {
        "gold_win_rate": wins,
        "gold_win_rate_ci": None if wins is None else wilson_interval(wins, len(texts)),
        "gold_score": fmean(golds) if golds else None,
        "rm_score": fmean(rm) if rm else None,
        **rouge(inputs.references, texts),
        **endings(response, tokenizer),
        "kl": kls.mean().item(),
        "kl_standard_error": deviation(kls) / len(texts) ** 0.5,
        "kl_estimate": estimates.mean().item() if n > 1 else None,
        "entropy": entropies.mean().item(),
        "distinct": distinct,
    }
    lengths = ((response != tokenizer.eos_id) & (response != tokenizer.pad_id)).sum(1).tolist()
    return Measured(numbers=numbers, column=scored(texts, rm, golds), response=response, lengths=lengths), tokens


def sample_responses(policy: GPT, inputs: Inputs, n: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return query (B, Q) and response (B, T) twice: to evaluate, and to estimate the KL on.

    For best-of-n both are the best of n samples at the KL's temperature.
    """
    query, response = drawn = inputs.sample(policy, n, inputs.args.kl_temperature)
    if n == 1:
        return inputs.sample(policy, 1, inputs.args.temperature), drawn
    scores = torch.tensor(inputs.rm_scores(query, response)).view(-1, n)  # (B, n)
    rows = (scores.argmax(1) + n * torch.arange(len(scores))).to(query.device)  # (B,)
    best = query[rows], response[rows]
    return best, best


def num_distinct(policy: GPT, inputs: Inputs) -> float | None:
    """Count the distinct ones among --num-distinct-samples responses to a query; mean over queries."""
    k = inputs.args.num_distinct_samples
    if k == 0:
        return None
    _, drawn = inputs.sample(policy, k, inputs.args.kl_temperature)  # (B * k, T)
    return fmean(len(set(map(tuple, group))) for group in micro_batches(drawn.tolist(), k))


def scored(texts: list[str], rm: list[float] | None, golds: list[float] | None) -> list[dict]:
    """Return a row for each response, with None for scores that weren't measured."""
    return [
        {"response": text, "rm_score": rm and rm[i], "gold_score": golds and golds[i]} for i, text in enumerate(texts)
    ]


@torch.no_grad()
def kl_to(
    ref_policy: GPT, policy: GPT, query: Tensor, response: Tensor, n: int, tokenizer: Tokenizer, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the KL's upper bound, its estimate and the entropy on the policy's samples, in nats per response, (B,).

    The KL is the sum over tokens of log policy - log reference, both at --kl-temperature. Its mean is an unbiased
    estimate of KL(policy || reference) (k1); a single value may be negative. Best-of-n adds the KL to the policy that
    the n samples come from: its upper bound or its estimate, see `metrics.best_of`. The entropy is minus the
    log-probability, corrected by that estimate for best-of-n.
    """
    _, actions, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)  # (B, T)
    ids, mask = torch.cat((query, response), 1), torch.cat((query != tokenizer.pad_id, actions), 1)  # (B, Q + T)
    logprobs = []  # (B, T) per model
    for model in (policy, ref_policy):
        pieces = zip(*(micro_batches(rows, args.batch_size) for rows in (ids, mask, actions)), strict=True)
        with distributed.on_device(model):
            model_logprobs = [response_logprobs(model, i, m, p, args.kl_temperature)[0] for i, m, p in pieces]
        logprobs.append(torch.cat(model_logprobs))
    kl, logprob = (logprobs[0] - logprobs[1]).sum(1), logprobs[0].sum(1)
    best_of_n_term = best_of_n_kl(logprob, n)  # (B,)
    return kl + best_of_n_bound(n), kl + best_of_n_term, -logprob - best_of_n_term


# -------------------------------------------------------------------------------------------------------- 3. compare
def do_longer_responses_win(
    inputs: Inputs,
    measured: dict[str, Measured],
    reference: Measured,
    verdicts: dict[str, list[dict]],
    skipped: set[str],
) -> list[Figure]:
    """Draw win rates against response length, by the gold score and by the judge, except for the skipped policies."""
    lengths = {"reference": reference.lengths} | {name: policy.lengths for name, policy in measured.items()}
    figures: list[Figure] = []
    if inputs.gold:
        golds = [row["gold_score"] for row in reference.column]
        by_gold = {name: gold_wins(policy.column, golds) for name, policy in measured.items() if name not in skipped}
        figures += length_figures(lengths, by_gold, "reference", "the gold score")
    if inputs.judge:
        kept = {name: column for name, column in verdicts.items() if name not in skipped}
        by_judge = {name: [WIN.get(row["preferred"]) for row in column] for name, column in kept.items()}
        figures += length_figures(lengths, by_judge, inputs.args.judge_against, "the judge")
    return figures


def measure_reward_models(inputs: Inputs, columns: dict[str, list[dict]]) -> tuple[dict | None, dict | None]:
    """Measure --reward-model and --implicit-rewards on the pairs, and the accuracy of the reward model."""
    args, name = inputs.args, "reward model"
    models = {name: [args.reward_model]} if args.reward_model else {}
    models |= {policy: [inputs.checkpoints[policy]] for policy in args.implicit_rewards}
    if not models:
        return None, None
    rewards, margins = measure_rewards(
        models, inputs.ref_policy, inputs.first, args.dpo_beta, {"validation": inputs.pairs}, inputs.rows,
        inputs.tokenizer, inputs.device, args,
        loaded={args.reward_model: inputs.reward_model} if args.reward_model and inputs.reward_model else {},
    )  # fmt: skip
    if not inputs.reward_model:
        return rewards, None
    with autocast(args.dtype, inputs.device):
        accuracy = evaluate_reward_model(margins["validation"][name][0], inputs.pairs, inputs.gold)
    if inputs.gold:
        accuracy |= agreement_on_samples(columns)
    return rewards, accuracy


def paired_differences(columns: dict[str, list[dict]], seed: int) -> dict[str, dict[str, dict]]:
    """Return each policy's gain over the first, paired by query: name -> score -> mean and 95% interval."""
    (_, base), *rest = columns.items()
    gains: dict[str, dict[str, dict]] = {}
    for name, column in rest:
        gains[name] = {}
        for score in ("gold_score", "rm_score"):
            if column[0][score] is not None:
                gain = np.subtract([row[score] for row in column], [row[score] for row in base])  # (queries,)
                gains[name][score] = {"mean": gain.mean().item(), "ci": bootstrap_interval(gain[:, None], seed)}
    return gains


def gold_wins(column: list[dict], reference_golds: list[float]) -> list[float | None]:
    """Return, per query, 1 if the response has a higher gold score than the reference, 0.5 for a tie, else 0."""
    golds = [row["gold_score"] for row in column]
    return ((np.sign(np.subtract(golds, reference_golds)) + 1) / 2).tolist()


def evaluate_reward_model(margins: np.ndarray, rows: list[Comparison], gold: Gold | None) -> dict:
    """Measure how often the reward model agrees with the labeller, and with the gold score, on the validation pairs.

    margins (pairs,): the chosen response's score minus the rejected one's.
    """
    golds = zip(margins, gold_margins(gold, rows), strict=True) if gold else ()
    agrees = [(margin > 0) == (g > 0) for margin, g in golds if g != 0]
    accuracy = fmean(margins > 0)  # a tie is wrong
    return {
        "validation_accuracy": accuracy,
        "validation_accuracy_ci": wilson_interval(accuracy, len(margins)),
        "num_pairs": len(margins),
        "gold_agreement": fmean(agrees) if agrees else None,
    }


def agreement_on_samples(columns: dict[str, list[dict]]) -> dict:
    """Measure how often the reward model and the gold score agree on two policies' responses to a query.

    The reward model's ties count as wrong; gold ties are excluded. Training against the reward model moves a policy to
    such responses, which its comparisons may not cover.
    """
    agrees = []
    for ours, theirs in itertools.combinations(columns.values(), 2):
        for a, b in zip(ours, theirs, strict=True):
            if a["gold_score"] != b["gold_score"]:
                agrees.append((a["rm_score"] - b["rm_score"]) * (a["gold_score"] - b["gold_score"]) > 0)
    return {"samples_gold_agreement": fmean(agrees) if agrees else None, "num_sample_pairs": len(agrees)}


# ---------------------------------------------------------------------------------------------------------- 4. write
def write(
    inputs: Inputs,
    result: dict,
    measured: dict[str, Measured],
    reference: Measured,
    verdicts: dict[str, list[dict]],
    shifts: list[dict[str, Pieces]],
    tokens: dict[str, Tokens],
) -> None:
    args = inputs.args
    samples = [
        {
            "query": query,
            "reference": row["response"],
            "reference_gold_score": row["gold_score"],
            "reference_rm_score": row["rm_score"],
            "policies": {name: policy.column[i] for name, policy in measured.items()},
        }
        for i, (query, row) in enumerate(zip(inputs.queries, reference.column, strict=True))
    ]
    files = {"samples.jsonl": samples}
    if inputs.judge:
        files["verdicts.jsonl"] = [
            {"policy": name, "against": args.judge_against} | row for name, column in verdicts.items() for row in column
        ]
    earlier = earlier_checkpoints(inputs.checkpoints)
    figures = do_longer_responses_win(inputs, measured, reference, verdicts, earlier)
    sections = [
        summary_report.along_section(result).html(),
        summary_report.length_section(figures).html(),
        *(section.html() for section in (reward_model_report.sections(result["rewards"]) if result["rewards"] else ())),
        token_report.section(inputs.queries[0], {name: tokens[name] for name in tokens if name not in earlier}),
    ]
    checkpoints = [*inputs.checkpoints.values(), *filter(None, [args.reward_model])]
    runs = list(dict.fromkeys(map(run_of, checkpoints)))
    shown = slice(args.num_report_samples)
    page = summary_report.page(result, runs, samples[shown], shifts[shown], sections)
    write_evaluation(args, result, page, files)
