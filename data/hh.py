"""Anthropic's HH-RLHF, as published -> the JSON Lines that training reads.

    python -m data.hh --source harmless-base/test.jsonl.gz --out runs/hh/data --tokenizer EleutherAI/pythia-1b-deduped
    python -m data.hh --source Anthropic/hh-rlhf --files 'helpful-base/*' --out runs/hh/data

A record holds two transcripts, `chosen` and `rejected`, both `\\n\\nHuman: ...\\n\\nAssistant: ...` turn by turn. The
query is what they share, up to and including the last `\\n\\nAssistant:`; the replies are what follows it:

    comparisons.{train,validation}.jsonl   query, chosen reply, rejected reply
    sft.{train,validation}.jsonl           query, chosen reply: people preferred it, so it serves as a demonstration

A query that is too long loses whole turns, oldest first, up to the last thing that the human said. Pairs that can't be
used are left out and counted:
    - transcripts that part before the last turn: the label judges several turns of a dialogue, not one reply
    - an empty reply, or two that are the same
    - a reply longer than --max-response-length
    - a last turn that is longer than --max-query-length by itself

A seeded coin makes the splits, for the query's first human turn: pairs that open alike are on the same side, so a query
is never on both. The published splits stay in meta; to keep them, convert the train files with --validation-share 0 and
the test files with --validation-share 1 into the same directory.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

from data.prepare import in_validation, jsonl_files, length_table, read_records, source_files
from nanorlhf.cli import run_module
from nanorlhf.dataset import field, response_ids
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


@dataclass(frozen=True, kw_only=True)
class Args:
    source: str
    """file, directory or Hub dataset id"""
    out: Path = Path("runs/hh/data")
    """directory of the JSON Lines and of tokenizer.json; files of the same name are replaced"""
    tokenizer: str = "EleutherAI/pythia-1b-deduped"
    """directory, file or Hub id; the limits below count its tokens"""
    files: str = "*"
    """which files of a directory or Hub dataset: a pattern for their path in it, such as 'helpful-base/*'"""
    revision: str | None = None
    """branch or commit of a Hub dataset"""
    max_query_length: int = 512
    """tokens; longer dialogues lose their oldest turns"""
    max_response_length: int = 256
    """tokens with EOS; pairs with a longer reply are left out"""
    validation_share: float = 0.1
    """share of the openings"""
    seed: int = 1
    """of the splits"""


def split_pair(chosen: str, rejected: str) -> tuple[str, str, str] | None:
    """Two transcripts -> query, chosen reply, rejected reply; None if they part before the last turn.

    A reply that goes on into a turn of anyone's shows that they parted earlier.
    """
    shared = commonprefix((chosen, rejected))
    end = shared.rfind(ASSISTANT)
    if end < 0:
        return None
    query, replies = shared[: end + len(ASSISTANT)], (chosen[end + len(ASSISTANT) :], rejected[end + len(ASSISTANT) :])
    if any(mark in reply for reply in replies for mark in (HUMAN, ASSISTANT)):
        return None
    return query, *replies


def truncate(query: str, tokenizer: Tokenizer, limit: int) -> str | None:
    """The query without as many of its oldest turns as it takes to fit; None if the last one alone doesn't."""
    while len(tokenizer.encode(query)) > limit:
        next_turn = query.find(HUMAN, 1)
        if next_turn < 0:
            return None
        query = query[next_turn:]
    return query


def main(args: Args) -> None:
    for flag in ("max_query_length", "max_response_length"):
        if getattr(args, flag) < 1:
            raise InputError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1.")
    if not 0 <= args.validation_share <= 1:
        raise InputError(f"--validation-share {args.validation_share}: must lie between 0 and 1.")
    tokenizer = load_tokenizer(args.tokenizer)
    lengths: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # (file, column) -> how often which length
    written: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    num_cut = 0

    with jsonl_files(args.out) as write:
        for path, _ in source_files(args.source, args.files, args.revision):
            for where, record in read_records(path):
                transcripts = [field(record, name, str, where) for name in ("chosen", "rejected")]
                for name, transcript in zip(("chosen", "rejected"), transcripts, strict=True):
                    if not transcript.startswith(HUMAN):
                        raise InputError(f"{where}: {name!r} is no transcript: it must begin with {HUMAN!r}.")
                pair = split_pair(*transcripts)
                if pair is None:
                    left_out["transcripts that part before the last turn"] += 1
                    continue
                whole_query, chosen, rejected = pair
                if not chosen.strip() or not rejected.strip():
                    left_out["an empty reply"] += 1
                    continue
                query = truncate(whole_query, tokenizer, args.max_query_length)
                if query is None:
                    left_out[f"a last turn longer than --max-query-length {args.max_query_length}"] += 1
                    continue
                responses = [response_ids(query, reply, tokenizer) for reply in (chosen, rejected)]
                if responses[0] == responses[1]:
                    left_out["two replies that are the same"] += 1
                    continue
                if max(map(len, responses)) > args.max_response_length:
                    left_out[f"a reply longer than --max-response-length {args.max_response_length}"] += 1
                    continue

                num_cut += query != whole_query
                opening = query[: query.find(ASSISTANT)]
                split = "validation" if in_validation(opening, args.validation_share, args.seed) else "train"
                meta = {
                    "batch": path.absolute().parent.name,  # harmless-base, helpful-online, ...
                    "confidence": None,
                    "split": path.name.split(".")[0],
                    "policies": None,  # not published
                }
                comparison = {"query": query, "chosen": chosen, "rejected": rejected, "meta": meta}
                write(f"comparisons.{split}", comparison)
                write(f"sft.{split}", {"query": query, "response": chosen, "meta": meta})
                written[split] += 1
                query_length = len(tokenizer.encode(query))
                lengths[split, "query"][query_length] += 1
                for column, response in zip(("chosen", "rejected"), responses, strict=True):
                    lengths[split, column][len(response)] += 1
                    lengths[split, f"query+{column}"][query_length + len(response)] += 1
        if not written:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in left_out.items())
            raise InputError(f"--source {args.source}: no pair could be used ({reasons}): nothing was written.")
    tokenizer.save(args.out)  # so that a model with random weights finds it there

    print(length_table(lengths))
    print(f"\n{num_cut} queries of {written.total()} lost old turns")
    print("\nleft out")
    for reason, count in sorted(left_out.items()):
        print(f"  {count:7}  {reason}")
    if not left_out:
        print("        0  nothing")
    files = (f"{kind}.{split}.jsonl ({written[split]})" for kind in ("comparisons", "sft") for split in sorted(written))
    print(f"\nwritten: {args.out}: " + ", ".join(files))


if __name__ == "__main__":
    run_module(main, Args)
