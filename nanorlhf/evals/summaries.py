"""One response per query, beside the data's reference: N+ section 5 and details 16 to 19.

In: sft.validation.jsonl and, for reward models, comparisons.validation.jsonl. Out: ROUGE, win rates by the gold score
and by an LLM judge, reward model score and accuracy, KL, length, and which tokens alignment changed.
"""

import itertools
import os
import sys
from collections.abc import Iterator
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
from nanorlhf.evals import common
from nanorlhf.evals.judge import WIN
from nanorlhf.evals.judged import JudgeArgs, judge_policies, load_judge
from nanorlhf.evals.reward_models import measure_rewards
from nanorlhf.logprobs import response_logprobs
from nanorlhf.metrics import bootstrap_interval, rouge, wilson_interval, win_rate
from nanorlhf.metrics.best_of import best_of_n_bound, best_of_n_kl
from nanorlhf.metrics.token_rewards import token_rewards
from nanorlhf.metrics.token_shift import shift_shares, text_pieces, to_terminal, token_ranks
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad, micro_batches, right_pad
from nanorlhf.ppo import eos_masks
from nanorlhf.progress import Progress
from nanorlhf.report import reward_report, summary_report, token_report
from nanorlhf.report.length_figures import length_figures
from nanorlhf.rewards.gold import Gold
from nanorlhf.tokenizer import Tokenizer, token_bytes
from nanorlhf.training.statistics import deviation
from nanorlhf.training.supervised import autocast


@dataclass(frozen=True, kw_only=True)
class Args(JudgeArgs, common.PolicyArgs):
    """The first policy is the reference of the KL; best-of-N:DIR takes the one of N responses that scores highest."""

    reward_model: str | None
    """checkpoint directory or Hub id; None leaves its scores out"""
    implicit_rewards: tuple[str, ...] = ()
    """[N+ 19] names of --policies, trained by DPO from the first one, that rank pairs beside the reward model"""
    dpo_beta: PositiveFloat = 0.05
    """of their reward, in score units per nat, as in their training"""
    shift_base: str | None = None
    """name of the policy whose ranks colour the responses, the model before alignment; None: the first"""
    max_response_length: PositiveInt
    """longest response of a comparison or reference in tokens, EOS included"""
    temperature: TemperatureOrGreedy = 0.01
    """of the responses that are evaluated; 0 is greedy"""
    kl_temperature: Temperature = 0.7
    """of the responses on which the KL is estimated, as in PPO's rollouts"""
    num_distinct_samples: CountOrNone = 0
    """responses to each query, at the KL's temperature, of which the distinct ones are counted; 0: don't"""
    gold: str | None = None
    """FILE.py:FUNCTION or a larger reward model, whose true score counts wins against the references; None: unknown"""


def main(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    device = common.begin(args, writes=not args.judge_dry_run)
    asked_for = {name: common.best_of(place) for name, place in common.named_policies(args.policies).items()}
    policies = {name: place for name, (_, place) in asked_for.items()}
    num_samples = {name: number for name, (number, _) in asked_for.items()}
    first = next(iter(policies))
    if num_samples[first] > 1 or max(num_samples.values()) > 1 and not args.reward_model:
        raise InputError("--policies: best-of-N:DIR needs a --reward-model and can't be the first policy.")
    judge = load_judge(args, policies, args.seed)
    if args.shift_base not in (None, *policies):
        raise InputError(f"--shift-base {args.shift_base}: it must be a name of --policies.")
    unknown = set(args.implicit_rewards) - set(list(policies)[1:])
    if unknown:
        raise InputError(f"--implicit-rewards {min(unknown)}: name --policies after the first, their reference.")
    common.check_reward_model(args.reward_model)
    tokenizer = common.common_tokenizer(args.tokenizer, [*policies.values(), args.reward_model], args.gold)
    limits = tokenizer, args.max_query_length, args.max_response_length
    rows = list(load_demonstrations(args.data / "sft.validation.jsonl", *limits)[: args.num_queries])
    models = {"reward model": [args.reward_model]} if args.reward_model else {}
    models |= {name: [policies[name]] for name in args.implicit_rewards}
    pairs = list(load_comparisons(args.data / "comparisons.validation.jsonl", *limits)) if models else []
    precision = autocast(args.dtype, device)
    to_answer = rows, tokenizer, args, device
    longest = {
        f"{args.data}/sft.validation.jsonl": common.longest_text(rows, args.response_length),
        f"{args.data}/comparisons.validation.jsonl": common.longest_pair(pairs),
    }
    for flag, place in (("--reward-model", args.reward_model), ("--gold", args.gold)):
        common.check_model(flag, place, tokenizer, longest)
    gold = common.load_gold(args.gold, args, tokenizer, device)
    ref_policy = common.load_policy(policies[first], *to_answer)
    reward_model = common.load_model(load_scalar, args.reward_model, args, device) if args.reward_model else None

    # --------------------------------------------------------------------------------------------------- 2. references
    queries, references = ([row.record[name] for row in rows] for name in ("query", "response"))
    reference: dict = {"gold_score": None, "rm_score": None}
    reference_golds = reference_rms = None
    with precision:
        if gold:
            reference_golds = gold.of_rows(rows)
            reference["gold_score"] = fmean(reference_golds)
        if reward_model:
            scores = common.row_scores(reward_model, rows, tokenizer.pad_id, args.batch_size, "left")
            reference_rms, reference["rm_score"] = scores.tolist(), scores.mean().item()
    reference["response_length"] = fmean(len(row.response) for row in rows)

    # ----------------------------------------------------------------------------------------------------- 3. policies
    results, columns, responses, tokens = {}, {}, {}, {}  # by policy
    columns["reference"] = scored(references, reference_rms, reference_golds)
    lengths = {"reference": [len(row.response) - 1 for row in rows]}  # tokens, without EOS

    def measure(name: str, place: str) -> None:  # a function, so that a policy is gone before the next one is loaded
        policy = ref_policy if place == policies[first] else common.load_policy(place, *to_answer)
        n, k, to_sample = num_samples[name], args.num_distinct_samples, (policy, rows, tokenizer, args)
        others = common.sample(*to_sample, n, temperature=args.kl_temperature)  # (B * n, ...)
        rm = distinct = None  # distinct: of the best of n it would take n times as many samples
        with precision:
            if n > 1:
                assert reward_model is not None
                scores = common.rm_scores(reward_model, *others, tokenizer.pad_id, args.batch_size)
                best = torch.tensor(scores).view(-1, n).argmax(1) + n * torch.arange(len(rows))  # (B,)
                query, response = (some[best.to(device)] for some in others)  # (B, Q), (B, T)
            else:
                query, response = common.sample(*to_sample, 1, temperature=args.temperature)
            own = others if n == 1 else (query, response)
            kls, estimates, entropies = kl_to(ref_policy, policy, *own, n, tokenizer, args)
            if k and n == 1:
                _, drawn = common.sample(*to_sample, k, temperature=args.kl_temperature)  # (B * k, T)
                distinct = fmean(len(set(map(tuple, group))) for group in micro_batches(drawn.tolist(), k))
            one = query[:1], response[:1], tokenizer, args.kl_temperature
            tokens[name] = token_rewards(place, policy, ref_policy, reward_model, *one)
            if reward_model:
                rm = common.rm_scores(reward_model, query, response, tokenizer.pad_id, args.batch_size)
            golds = gold.of_ids(queries, query, response) if gold else None
        texts = [tokenizer.decode(ids) for ids in response.tolist()]
        wins = win_rate(golds, reference_golds) if golds and reference_golds else None
        results[name] = {
            "gold_win_rate": wins,
            "gold_win_rate_ci": None if wins is None else wilson_interval(wins, len(rows)),
            "gold_score": fmean(golds) if golds else None,
            "rm_score": fmean(rm) if rm else None,
            **rouge(references, texts),
            **common.endings(response, tokenizer),
            "kl": kls.mean().item(),
            "kl_standard_error": deviation(kls) / len(rows) ** 0.5,
            "kl_estimate": estimates.mean().item() if n > 1 else None,
            "entropy": entropies.mean().item(),
            "distinct": distinct,
        }
        columns[name], responses[name] = scored(texts, rm, golds), response
        lengths[name] = ((response != tokenizer.eos_id) & (response != tokenizer.pad_id)).sum(1).tolist()

    for name, place in Progress(policies.items(), desc="policies"):
        measure(name, place)

    # --------------------------------------------------------------------------- 4. the judge; do longer responses win?
    figures: list[Figure] = []
    account = None
    verdicts: dict[str, list[dict]] = {}
    of_policies = {name: columns[name] for name in policies}
    if reference_golds:
        by_gold = {name: gold_wins(column, reference_golds) for name, column in of_policies.items()}
        figures += length_figures(lengths, by_gold, "reference", "the gold score")
    if judge:
        verdicts, numbers, account = judge_policies(judge, queries, columns, args.judge_against, args.seed)
        if args.judge_dry_run:
            return {}
        results = {name: row | numbers.get(name, {}) for name, row in results.items()}
        by_judge = {name: [WIN.get(row["preferred"]) for row in column] for name, column in verdicts.items()}
        figures += length_figures(lengths, by_judge, args.judge_against, "the judge")

    # ------------------------------------------------------------------ 5. what changed token by token; reward models
    base_name = args.shift_base or first
    base = ref_policy if base_name == first else common.load_policy(policies[base_name], *to_answer)
    responses["reference"] = right_pad([row.response for row in rows], tokenizer.pad_id).to(device)
    with precision, distributed.on_device(base):
        shifts, shares = token_shifts(base, rows, responses, tokenizer, args.batch_size)
    rewards = accuracy = None
    if models:
        measured = {"validation": pairs}, rows, tokenizer, device, args
        loaded = {args.reward_model: reward_model} if args.reward_model and reward_model else {}
        rewards, margins = measure_rewards(models, ref_policy, first, args.dpo_beta, *measured, loaded)
        if reward_model:
            with precision:
                accuracy = evaluate_reward_model(margins["validation"]["reward model"][0], pairs, gold)
            if gold:
                accuracy |= agreement_on_samples(of_policies)

    # --------------------------------------------------------------------------------------------------------- 6. write
    result = {
        "policies": results,
        "reference": reference,
        "reward_model": accuracy,
        "rewards": rewards,
        "judge": account,
        "differences": paired_differences(of_policies, args.seed),
        "token_shift": {"base": base_name, "shares": shares},
        "num_queries": len(rows),
        "args": common.settings_of(args),
    }
    samples = [
        {
            "query": query,
            "reference": references[i],
            "reference_gold_score": columns["reference"][i]["gold_score"],
            "reference_rm_score": columns["reference"][i]["rm_score"],
            "policies": {name: column[i] for name, column in of_policies.items()},
        }
        for i, query in enumerate(queries)
    ]
    files = {"samples.jsonl": samples}
    if judge:
        against = args.judge_against
        files["verdicts.jsonl"] = [
            {"policy": name, "against": against} | row for name, column in verdicts.items() for row in column
        ]
    runs = [place for place in (*policies.values(), args.reward_model) if place]
    shown = slice(args.num_report_samples)
    sections = [
        summary_report.length_section(figures).html(),
        *(section.html() for section in (reward_report.sections(rewards) if rewards else ())),
        token_report.section(queries[0], tokens),
    ]
    page = summary_report.page(result, runs, samples[shown], shifts[shown], sections)
    common.write_evaluation(args, result, page, files)
    print("\n".join(shift_lines(base_name, shifts[0])))
    return result


def scored(texts: list[str], rm: list[float] | None, golds: list[float] | None) -> list[dict]:
    """A row for each response, with the scores that there are."""
    return [
        {"response": text, "rm_score": rm and rm[i], "gold_score": golds and golds[i]} for i, text in enumerate(texts)
    ]


@torch.no_grad()
def kl_to(
    ref_policy: GPT, policy: GPT, query: Tensor, response: Tensor, n: int, tokenizer: Tokenizer, args: Args
) -> tuple[Tensor, Tensor, Tensor]:
    """Nats per response, (B,): KL at most, KL as estimated, entropy, all by the policy's own samples.

    The KL is the sum over tokens of log policy - log reference, both tempered: its mean estimates KL(policy ||
    reference) without bias (k1), and a single one may be negative. Of the best of n samples, the KL to the policy that
    gave them is added: at most, and estimated, `metrics.best_of`. The entropy is minus the log-probability, of the best
    of n by that estimate.
    """
    _, actions, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)  # (B, T)
    ids, mask = torch.cat((query, response), 1), torch.cat((query != tokenizer.pad_id, actions), 1)  # (B, Q + T)
    logprobs = []  # (B, T) of each model
    for model in (policy, ref_policy):
        pieces = zip(*(micro_batches(rows, args.batch_size) for rows in (ids, mask, actions)), strict=True)
        with distributed.on_device(model):
            found = [response_logprobs(model, i, m, p, args.kl_temperature)[0] for i, m, p in pieces]
        logprobs.append(torch.cat(found))
    kl, logprob = (logprobs[0] - logprobs[1]).sum(1), logprobs[0].sum(1)
    chosen = best_of_n_kl(logprob, n)  # (B,)
    return kl + best_of_n_bound(n), kl + chosen, -logprob - chosen


def paired_differences(columns: dict[str, list[dict]], seed: int) -> dict[str, dict[str, dict]]:
    """What each policy gains over the first: name -> score -> its mean and 95% interval, query by query."""
    (_, base), *others = columns.items()
    gains: dict[str, dict[str, dict]] = {}
    for name, column in others:
        gains[name] = {}
        for score in ("gold_score", "rm_score"):
            if column[0][score] is not None:
                gain = np.subtract([row[score] for row in column], [row[score] for row in base])  # (queries,)
                gains[name][score] = {"mean": gain.mean().item(), "ci": bootstrap_interval(gain[:, None], seed)}
    return gains


def gold_wins(column: list[dict], reference_golds: list[float]) -> list[float | None]:
    """Per query: 1 where the response has a higher gold score than the reference, 0.5 for a tie, else 0."""
    golds = [row["gold_score"] for row in column]
    return ((np.sign(np.subtract(golds, reference_golds)) + 1) / 2).tolist()


def evaluate_reward_model(margins: np.ndarray, rows: list[Comparison], gold: Gold | None) -> dict:
    """How often it ranks the validation pairs as the labeller did and, where that is known, as the gold score does.

    margins (pairs,): the chosen response's score minus the rejected one's.
    """
    golds = zip(margins, common.gold_margins(gold, rows), strict=True) if gold else ()
    agrees = [(margin > 0) == (g > 0) for margin, g in golds if g != 0]
    accuracy = fmean(margins > 0)  # a tie is wrong
    return {
        "validation_accuracy": accuracy,
        "validation_accuracy_ci": wilson_interval(accuracy, len(margins)),
        "num_pairs": len(margins),
        "gold_agreement": fmean(agrees) if agrees else None,
    }


def agreement_on_samples(columns: dict[str, list[dict]]) -> dict:
    """How often the reward model ranks two policies' responses to a query as the gold score does; its ties count as
    wrong, gold's are left out. This is where a policy goes that is trained against it, and no comparison may have been.
    """
    agrees = []
    for ours, theirs in itertools.combinations(columns.values(), 2):
        for a, b in zip(ours, theirs, strict=True):
            if a["gold_score"] != b["gold_score"]:
                agrees.append((a["rm_score"] - b["rm_score"]) * (a["gold_score"] - b["gold_score"]) > 0)
    return {"samples_gold_agreement": fmean(agrees) if agrees else None, "num_sample_pairs": len(agrees)}


Pieces = list[tuple[str, int]]  # text of a token, and its rank


def token_shifts(
    base: GPT, rows: list[Demonstration], responses: dict[str, Tensor], tokenizer: Tokenizer, batch_size: int
) -> tuple[list[dict[str, Pieces]], dict[str, dict[str, float]]]:
    """How `base` ranks the tokens of each response, name -> (B, T).

    Returns name -> pieces of the response for each query, and name -> shares of the kinds of tokens.
    """
    query = left_pad([row.query for row in rows], tokenizer.pad_id).to(base.lm_head.weight.device)  # (B, Q)
    spellings, shares = token_bytes(tokenizer), {}
    shifts: list[dict[str, Pieces]] = [{} for _ in rows]
    for name, response in responses.items():
        pieces = (micro_batches(ids, batch_size) for ids in (query, response))
        ranks = torch.cat([token_ranks(base, q, r, tokenizer.pad_id) for q, r in zip(*pieces, strict=True)])  # (B, T)
        shares[name] = shift_shares(ranks)
        for shift, ids, of_row in zip(shifts, response.tolist(), ranks.tolist(), strict=True):
            n = sum(rank > 0 for rank in of_row)
            shift[name] = text_pieces(ids[:n], of_row[:n], spellings)
    return shifts, shares


def shift_lines(base_name: str, shift: dict[str, Pieces]) -> Iterator[str]:
    """For the terminal: the responses to one query, tokens coloured by rank."""
    yield f"\nof the first query, tokens that {base_name} ranks second or third, and beyond:"
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = max(map(len, shift))
    for name, pieces in shift.items():
        yield f"{name:<{width}} {to_terminal(pieces, color)}"
