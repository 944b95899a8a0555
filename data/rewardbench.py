"""Benchmarks of reward models, as published -> comparisons.validation.jsonl, for `eval.py rewards`.

    python -m data.rewardbench --source allenai/reward-bench --files 'data/filtered-*' --out runs/rewardbench/data
    python -m data.rewardbench --source allenai/reward-bench-2 --out runs/rewardbench2/data
    python -m data.rewardbench --source THU-KEG/RM-Bench --files total_dataset.json --out runs/rm_bench/data

    RewardBench     {"prompt", "chosen", "rejected", "subset", "id"}      one text each
    RewardBench 2   {"prompt", "chosen", "rejected", "subset", "id"}      lists: one right answer and three wrong ones;
                                                                          in the subset Ties any number of both
    RM-Bench        {"prompt", "chosen", "rejected", "domain", "id"}      three right and three wrong answers: concise,
                                                                          detailed, detailed with Markdown

Each pair of a chosen and a rejected response is a row; meta identifies its record in the benchmark. Use the reward
models' tokenizer: its chat template, or --template, formats prompt and response as in `data.chat`. Without a template,
the query is just the prompt.

Records are skipped as a whole and the reasons printed, because a score on fewer records can't be compared with the
published one. RewardBench's own code truncates texts to 2,048 tokens instead.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from data.chat import Writer
from data.prepare import Skipped, SourceArgs, converted_files, read_records, source_files
from nanorlhf.cli import PositiveInt, check_ranges, run_module
from nanorlhf.dataset import field, response_ids
from nanorlhf.errors import InputError
from nanorlhf.metrics.benchmark_scores import SIZES, TIES
from nanorlhf.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Args(SourceArgs):
    out: Path = Path("runs/rewardbench/data")
    """directory for the JSON Lines and the tokenizer; existing files are replaced"""
    tokenizer: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
    """directory or Hub id of the reward models' tokenizer; the limits below count its tokens"""
    template: Path | None = None
    """file with a chat template in Jinja that replaces the tokenizer's own"""
    max_query_length: PositiveInt = 2048
    """tokens; records with a longer prompt are skipped"""
    max_response_length: PositiveInt = 2048
    """tokens including EOS; records with a longer response are skipped"""


@dataclass(frozen=True)
class Record:
    """A record of a benchmark."""

    benchmark: str
    subset: str
    id: str
    prompt: str
    chosen: list[str]
    rejected: list[str]


def parse(record: dict, where: str) -> Record:
    """Parse a record of one of the three benchmarks. Raises InputError if it is malformed or from another one."""
    if "subset" not in record and "domain" not in record:
        raise InputError(f"{where}: unknown benchmark: the record has neither the field 'subset' nor 'domain'.")
    subset = field(record, "subset" if "subset" in record else "domain", str, where)
    benchmark = "RM-Bench" if "subset" not in record else "RewardBench"
    if benchmark == "RewardBench" and isinstance(record.get("chosen"), str):
        chosen, rejected = ([field(record, name, str, where)] for name in ("chosen", "rejected"))
    else:
        benchmark += " 2" if benchmark == "RewardBench" else ""
        chosen, rejected = (field(record, name, list[str], where) for name in ("chosen", "rejected"))
    counts = len(chosen), len(rejected)
    is_ties = benchmark == "RewardBench 2" and subset == TIES
    if counts != SIZES[benchmark] and not (is_ties and all(counts)):
        sizes = "at least 1 and 1" if is_ties else "{} and {}".format(*SIZES[benchmark])
        raise InputError(
            f"{where}: 'chosen' and 'rejected' have {counts[0]} and {counts[1]} responses; expected {sizes}."
        )
    number = record.get("id")
    identity = str(number) if isinstance(number, int) else field(record, "id", str, where)
    if is_ties and not re.fullmatch(r"(ref|tied):\d+", identity):
        raise InputError(f"{where}: the field 'id' is {identity!r:.80}; Ties has ref:N and tied:N.")
    return Record(benchmark, subset, identity, field(record, "prompt", str, where), chosen, rejected)


def format_record(record: Record, writer: Writer | None, tokenizer: Tokenizer, args: Args) -> tuple[str, list[str]]:
    """Return the query and the responses, chosen ones first. Raises Skipped if any of them can't be used."""
    responses = record.chosen + record.rejected
    if not all(text.strip() for text in (record.prompt, *responses)):
        raise Skipped("an empty prompt or response")
    query = record.prompt
    if writer is not None:
        replies = [{"role": "assistant", "content": text} for text in responses]
        frame, responses = writer.write([{"role": "user", "content": record.prompt}], replies)
        query = frame.query
    elif len(tokenizer.encode(query)) > args.max_query_length:
        raise Skipped(f"a prompt longer than --max-query-length {args.max_query_length}")
    ids = [response_ids(query, text, tokenizer, writer is not None) for text in responses]
    if max(map(len, ids)) > args.max_response_length:
        raise Skipped(f"a response longer than --max-response-length {args.max_response_length}")
    keys = [(text.strip(), tuple(token_ids)) for text, token_ids in zip(responses, ids, strict=True)]
    pairs = product(keys[: len(record.chosen)], keys[len(record.chosen) :])
    if any(right[0] == wrong[0] or right[1] == wrong[1] for right, wrong in pairs):
        raise Skipped("a response that is both chosen and rejected")
    return query, responses


def main(args: Args) -> None:
    check_ranges(args)
    tokenizer = load_tokenizer(args.tokenizer)
    writer = None
    if args.template is not None or tokenizer.chat_template is not None:
        writer = Writer(args.tokenizer, args.template, args.max_query_length)
    skipped: Counter[str] = Counter()
    counts: Counter[str] = Counter()  # records by subset
    benchmark = None
    ties: set[str] = set()  # ids
    limit = "--max-response-length", args.max_response_length
    files = converted_files(args.out, args.source, tokenizer, skipped, missing="benchmarks have no training split")
    with files as write:
        for path, _ in source_files(args):
            for where, fields in read_records(path):
                record = parse(fields, where)
                if benchmark not in (None, record.benchmark):
                    raise InputError(
                        f"{where}: a record of {record.benchmark} after one of {benchmark}; select one with --files."
                    )
                benchmark = record.benchmark
                if record.subset == TIES and benchmark == "RewardBench 2":
                    if record.id in ties:
                        raise InputError(f"{where}: duplicate record of {TIES} with the id {record.id!r}.")
                    ties.add(record.id)
                try:
                    query, responses = format_record(record, writer, tokenizer, args)
                except Skipped as reason:
                    skipped[str(reason)] += 1
                    continue
                origin = {"benchmark": benchmark, "subset": record.subset, "id": record.id, "record": counts.total()}
                counts[record.subset] += 1
                num_chosen = len(record.chosen)
                for i, j in product(range(num_chosen), range(len(record.rejected))):
                    texts = {"chosen": responses[i], "rejected": responses[num_chosen + j]}
                    meta = origin | {"chosen": i, "rejected": j}
                    row = {"query": query} | ({"chat": True} if writer else {}) | texts | {"meta": meta}
                    write("validation", row, *limit)
    (writer.tokenizer if writer else tokenizer).save(args.out)
    print(f"{benchmark}: {counts.total()} records")
    for subset, count in counts.items():
        print(f"{count:10,}  {subset}")


if __name__ == "__main__":
    run_module(main, Args)
