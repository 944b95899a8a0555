"""Anthropic's HH-RLHF, as published (Hub: Anthropic/hh-rlhf) -> comparisons.jsonl and sft.jsonl.

    python -m data.hh --source harmless-base/test.jsonl.gz --out runs/hh/data --tokenizer EleutherAI/pythia-1b-deduped
    python -m data.hh --source Anthropic/hh-rlhf --files 'helpful-base/*' --out runs/hh/data

A record has two transcripts, `chosen` and `rejected`, each a sequence of `\\n\\nHuman: ...\\n\\nAssistant: ...`. The
query is their shared prefix, up to and including the last `\\n\\nAssistant:`; the rest are the replies:

    comparisons.{train,validation}.jsonl   query, chosen reply, rejected reply
    sft.{train,validation}.jsonl           query, chosen reply: people preferred it, so it serves as a demonstration

A query that is too long loses its oldest turns, but keeps the last human turn. Unusable pairs are skipped, and the
reasons printed. For example, if the transcripts differ before the last turn, the label compares more than one reply.

Splits are drawn by a seeded hash of the first human turn, so pairs with the same opening are in the same split. meta
keeps the published splits; to use them, convert the train files with --validation-share 0 and the test files with
--validation-share 1 into one directory.
"""

import re
from collections import Counter
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

from data.prepare import SourceArgs, converted_files, first_fit, in_validation, read_records, source_files
from nanorlhf.cli import Fraction, PositiveInt, Seed, check_ranges, run_module
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True, kw_only=True)
class Args(SourceArgs):
    out: Path = Path("runs/hh/data")
    """directory for the JSON Lines and tokenizer.json; existing files are replaced"""
    tokenizer: str = "EleutherAI/pythia-1b-deduped"
    """directory, file or Hub id; the limits below count its tokens"""
    max_query_length: PositiveInt = 512
    """tokens; longer dialogues lose their oldest turns"""
    max_response_length: PositiveInt = 256
    """tokens including EOS; pairs with a longer reply are skipped"""
    validation_share: Fraction = 0.1
    """share of the first human turns that go to validation"""
    seed: Seed = 1
    """seed of the splits"""


def split_pair(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """Return query, chosen reply and rejected reply; None if the transcripts differ before the last turn."""
    shared = commonprefix((chosen, rejected))
    end = shared.rfind(ASSISTANT)
    if end < 0:
        return None
    end += len(ASSISTANT)
    replies = chosen[end:], rejected[end:]
    if any(mark in reply for reply in replies for mark in (HUMAN, ASSISTANT)):  # more turns: they differ earlier
        return None
    return shared[:end], *replies


def truncate(query: str, tokenizer: Tokenizer, limit: int) -> str | None:
    """Drop as few of the oldest turns as possible to make a query fit; None if even the last turn is too long."""
    turns = [match.start() for match in re.finditer(HUMAN, query)]
    start = first_fit(turns, lambda start: len(tokenizer.encode(query[start:])) <= limit)
    return None if start is None else query[start:]


def main(args: Args) -> None:
    check_ranges(args)
    tokenizer = load_tokenizer(args.tokenizer)
    skipped: Counter[str] = Counter()
    num_pairs = num_cut = 0
    limit = "--max-response-length", args.max_response_length
    files = converted_files(args.out, args.source, tokenizer, skipped, missing="--validation-share drew no row for it")
    with files as write:
        for path, _ in source_files(args):
            for where, record in read_records(path):
                transcripts = {name: field(record, name, str, where) for name in ("chosen", "rejected")}
                for name, transcript in transcripts.items():
                    if not transcript.startswith(HUMAN):
                        raise InputError(f"{where}: {name!r} is not a transcript: it must start with {HUMAN!r}.")
                pair = split_pair(**transcripts)
                if pair is None:
                    skipped["transcripts that differ before the last turn"] += 1
                    continue
                full_query, chosen, rejected = pair
                if not chosen.strip() or not rejected.strip():
                    skipped["an empty reply"] += 1
                    continue
                query = truncate(full_query, tokenizer, args.max_query_length)
                if query is None:
                    skipped[f"a last turn longer than --max-query-length {args.max_query_length}"] += 1
                    continue
                opening = query[: query.find(ASSISTANT)]
                split = "validation" if in_validation(opening, args.validation_share, args.seed) else "train"
                meta = {
                    "batch": path.absolute().parent.name,  # harmless-base, helpful-online, ...
                    "confidence": None,
                    "split": path.name.split(".")[0],
                    "policies": None,  # not published
                }
                row = {"query": query, "chosen": chosen, "rejected": rejected, "meta": meta}
                if write(split, row, *limit, sft_too=True):
                    num_pairs += 1
                    num_cut += query != full_query
    tokenizer.save(args.out)  # for models with random weights
    print(f"{num_cut} of {num_pairs} queries lost their oldest turns")


if __name__ == "__main__":
    run_module(main, Args)
