"""LLM judge of policies' responses and of comparisons: flags, judge, and statistics of its verdicts. [N+ 17]"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import numpy as np

from nanorlhf.cli import NonNegativeFloat, NonNegativeInt, PositiveInt, Seconds, Workers, printable
from nanorlhf.dataset import Comparison
from nanorlhf.errors import InputError
from nanorlhf.evals.judge import WIN, Pair, judge_pairs, load_verdicts, parse
from nanorlhf.files import check_out, open_regular
from nanorlhf.metrics import wilson_interval
from nanorlhf.metrics.length_control import length_controlled_win_rate
from nanorlhf.metrics.pair_accuracy import accuracy_intervals, accuracy_table
from nanorlhf.rewards.endpoint import Endpoint, ask_all, completions_url, key_from

SIGN = {"ours": 1, "theirs": -1}  # of a verdict with a winner
Judge = Callable[[list[Pair]], tuple[list[dict], dict]]  # pairs -> a verdict row per pair, and statistics of the calls


@dataclass(frozen=True, kw_only=True)
class JudgeArgs:
    judge_url: str | None = None
    """OpenAI-compatible endpoint of the LLM judge, such as http://localhost:8000/v1; None: no judge"""
    judge_model: str | None = None
    """model name of the judge at the endpoint"""
    judge_key_variable: str | None = None
    """environment variable with the endpoint's API key, such as OPENAI_API_KEY; None: send no key"""
    judge_file: Path | None = None
    """earlier verdicts to use instead of an endpoint, such as verdicts.jsonl of another evaluation"""
    judge_both_orders: bool = False
    """judge each pair in both orders; a pair whose verdicts differ is a tie"""
    judge_max_calls: NonNegativeInt = 1000
    """maximum number of requests, retries included; a run that reaches it keeps its verdicts, and the next continues"""
    judge_cache: Path = Path("runs/judge.jsonl")
    """cache of the endpoint's answers, so that no request is paid for twice; append-only"""
    judge_workers: Workers = 8
    """concurrent requests"""
    judge_timeout: Seconds = 60.0
    """timeout of a request in seconds, for connecting and for each byte of the answer"""
    judge_temperature: NonNegativeFloat | None = 0.0
    """sampling temperature of the judge; None: the endpoint's default, which some models require"""
    judge_max_tokens: PositiveInt | None = 512
    """maximum length of an answer in tokens; None: the endpoint's default, which some models require"""
    judge_dry_run: bool = False
    """print the prompts and their number, without sending or writing anything"""


def load_judge(args: JudgeArgs, seed: int) -> Judge | None:
    """Return the judge, or None without --judge flags. Checks all of the flags, before anything slow."""
    if not (args.judge_url or args.judge_file):
        if args.judge_dry_run:
            raise InputError("--judge-dry-run needs an endpoint; pass --judge-url.")
        return None
    if args.judge_url and args.judge_file:
        raise InputError("--judge-url and --judge-file can't be combined: a win rate needs a single judge.")
    if args.judge_file:
        return file_judge(args.judge_file)
    return endpoint_judge(args, seed)


def file_judge(path: Path) -> Judge:
    """Return a judge that looks up verdicts in a file."""
    known = load_verdicts(path)

    def judge(pairs: list[Pair]) -> tuple[list[dict], dict]:
        verdicts = [known.get(Pair(*map(str.strip, pair)), "unanswered") for pair in pairs]
        rows = [{**pair._asdict(), "preferred": preferred} for pair, preferred in zip(pairs, verdicts, strict=True)]
        return rows, {"name": str(path)}

    return judge


def endpoint_judge(args: JudgeArgs, seed: int) -> Judge:
    """Return a judge that asks the model at --judge-url; the seed decides which text of a pair comes first."""
    assert args.judge_url is not None
    url = completions_url("--judge-url", args.judge_url)
    if not args.judge_model:
        raise InputError(f"--judge-url {args.judge_url} needs a model name; pass --judge-model.")
    if find_spec("openai") is None:  # the optional extra `judge`
        raise InputError(f"--judge-url {args.judge_url} needs the openai package; run `pip install openai`.")
    if args.judge_cache.exists():
        open_regular(args.judge_cache).close()
    check_out(args.judge_cache.parent, "--judge-cache")
    endpoint = Endpoint(
        url=url,
        model=args.judge_model,
        key=key_from("--judge-key-variable", args.judge_key_variable) if args.judge_key_variable else None,
        temperature=args.judge_temperature,
        max_tokens=args.judge_max_tokens,
        max_calls=args.judge_max_calls,
        workers=args.judge_workers,
        timeout=args.judge_timeout,
    )
    account: dict = {"name": f"{args.judge_model} at {args.judge_url}"}

    def ask(prompts: list[str]) -> dict[str, str]:
        if args.judge_dry_run:
            print("\n\n".join(f"{'-' * 80}\n{printable(prompt)}" for prompt in prompts))
            print(f"{'-' * 80}\n{len(prompts)} prompts for {account['name']}; nothing was sent or written")
            return {}
        answers, call_statistics = ask_all(prompts, endpoint, args.judge_cache)
        account.update(call_statistics)
        return answers

    return lambda pairs: (judge_pairs(pairs, seed, args.judge_both_orders, ask), account)


def judge_policies(
    judge: Judge, queries: list[str], columns: dict[str, list[dict]], against: str, seed: int
) -> tuple[dict[str, list[dict]], dict[str, dict], dict]:
    """Compare each policy's responses with the ones of `against`, a policy or the reference.

    columns: name -> response and rm_score (or None) of each query; the reference is among the names. seed: for the
    bootstrap. Returns name -> a verdict row per query, name -> its statistics, and the call statistics together with
    the statistics over all pairs.
    """
    names = [name for name in columns if name not in ("reference", against)]
    # query by query, so that --judge-max-calls cuts all policies off at the same query
    pairs = [(queries[i], columns[name][i], columns[against][i]) for i in range(len(queries)) for name in names]
    rows, account = judge([Pair(query, ours["response"], theirs["response"]) for query, ours, theirs in pairs])
    scores = [(ours["rm_score"], theirs["rm_score"]) for _, ours, theirs in pairs]
    margins = [ours - theirs for ours, theirs in scores if theirs is not None]  # none without a reward model
    verdicts, numbers = {}, {}
    for number, name in enumerate(names):
        policy_rows = slice(number, None, len(names))
        verdicts[name] = rows[policy_rows]
        wins = [WIN[row["preferred"]] for row in with_verdict(rows[policy_rows])]
        numbers[name] = {
            "judge_win_rate": fmean(wins) if wins else None,
            "judge_win_rate_ci": wilson_interval(fmean(wins), len(wins)) if wins else None,
            **length_controlled(rows[policy_rows], seed),
            **verdict_counts(rows[policy_rows], margins[policy_rows]),
        }
    account |= {"against": against, "first_rate": first_rate(rows)}
    return verdicts, numbers, account | verdict_counts(rows, margins)


def judge_comparisons(judge: Judge, pairs: list[Comparison], seed: int) -> tuple[list[dict], dict]:
    """Compare the chosen response of each pair, `ours`, with the rejected one; return verdict rows and statistics.

    The judge is asked in random order, so that --judge-max-calls leaves it with a random sample of the pairs.
    """
    order = np.random.default_rng(seed).permutation(len(pairs)).tolist()
    records = [pairs[i].record for i in order]
    rows, account = judge([Pair(record["query"], record["chosen"], record["rejected"]) for record in records])
    by_index = dict(zip(order, rows, strict=True))
    account |= {"first_rate": first_rate(rows)}
    return [by_index[i] for i in range(len(pairs))], account | verdict_counts(rows, [])


def judge_agreement(
    verdicts: list[dict], groups: dict[tuple[str, str], list[int]], margins: dict[str, np.ndarray]
) -> dict | None:
    """Measure how often the labels and each model prefer the response that the judge prefers. [N+ 17]

    groups, margins: as in `accuracy_table`. Returns `accuracy` and `intervals`, where the labels are one more model, on
    the pairs that have a winner; None if there are none.
    """
    signs = np.array([SIGN.get(row["preferred"], 0) for row in verdicts])  # (pairs,), 1: the judge prefers the chosen
    if not signs.any():
        return None
    agrees = {"labels": np.ones((1, len(signs)))} | margins
    agrees = {name: margin * signs for name, margin in agrees.items()}  # (seeds, pairs), above 0: both prefer the same
    decided = {group: [i for i in indices if signs[i]] for group, indices in groups.items()}
    return {
        "accuracy": accuracy_table({group: indices for group, indices in decided.items() if indices}, agrees),
        "intervals": accuracy_intervals({name: agree[:, signs != 0] for name, agree in agrees.items()}),
    }


def first_rate(rows: list[dict]) -> float | None:
    """Return how often the judge prefers the first text shown, as a share of its answers; None without answers."""
    letters = [parse(answer) for row in rows for answer in row.get("answers", ()) if answer]
    return fmean(letter == "A" for letter in letters if letter) if any(letters) else None


def with_verdict(rows: list[dict]) -> list[dict]:
    """Return the rows that have a verdict; none if the judge gave no verdict on any pair that it was asked about.

    Two equal texts are a tie without asking. If only such ties were left, a failing judge would report a win rate of
    0.5.
    """
    asked = [row["preferred"] in WIN for row in rows if row.get("ours_first") != []]
    return [row for row in rows if row["preferred"] in WIN] if any(asked) or not asked else []


def length_controlled(rows: list[dict], seed: int) -> dict[str, float | tuple | None]:
    """Return the win rate at equal length in characters; None if all length differences are the same."""
    judged = with_verdict(rows)
    differences = np.array([[len(row["ours"].strip()) - len(row["theirs"].strip())] for row in judged])  # (pairs, 1)
    wins = np.array([[[WIN[row["preferred"]]]] for row in judged])  # (pairs, 1, 1)
    result = length_controlled_win_rate(wins, differences, seed) if judged else None
    rate, interval = result or (None, None)
    return {"judge_lc_win_rate": rate, "judge_lc_win_rate_ci": interval}


def verdict_counts(rows: list[dict], margins: list[float]) -> dict[str, float | int | tuple | None]:
    """Count the pairs with a verdict, and how often the reward model's margins agree with the verdicts except ties."""
    counts = Counter(row["preferred"] for row in rows)
    agrees = agrees_with_judge(margins, rows) if margins else []
    return {
        "judge_pairs": len(with_verdict(rows)),
        "judge_unparsed": counts["unparsed"],
        "judge_unanswered": counts["unanswered"],
        "judge_ties": counts["tie"],
        "rm_agreement": fmean(agrees) if agrees else None,
        "rm_agreement_ci": wilson_interval(fmean(agrees), len(agrees)) if agrees else None,
        "rm_agreement_pairs": len(agrees),
    }


def agrees_with_judge(margins: list[float], rows: list[dict]) -> list[bool]:
    """Return, for each pair with a winner, if its margin has the sign of the verdict; a margin of 0 never does."""
    pairs = [(margin, row["preferred"]) for margin, row in zip(margins, rows, strict=True)]
    return [bool(np.sign(margin) == SIGN[choice]) for margin, choice in pairs if choice in SIGN]  # [N+ 17]
