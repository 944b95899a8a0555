"""Train a tokenizer on your own texts, for training a model from scratch.

    python -m data.tokenizer --data mine/sft.train.jsonl mine/comparisons.train.jsonl --vocab-size 4096 --out mine

It reads the fields query, response, chosen and rejected of JSON Lines files and writes tokenizer.json and
tokenizer_config.json: a byte-level BPE, which can encode any text. Its first id is EOS, `<|endoftext|>`, and its last
is [PAD]. Without --model, `train_sft.py --data DIR` initialises a model with random weights and uses the tokenizer in
DIR.

Pass only training files: the merges are learnt from these texts, and validation texts should be unseen.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.prepare import check_vocab_size
from nanorlhf.cli import PositiveInt, check_ranges, run_module
from nanorlhf.dataset import field, iter_jsonl, with_leading_space
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.tokenizer import train_tokenizer

RESPONSES = ("response", "chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class Args:
    data: tuple[Path, ...]
    """JSON Lines files, such as mine/sft.train.jsonl"""
    vocab_size: PositiveInt
    """size of the tokenizer without [PAD], and rows of a model's embedding; at least 300"""
    out: Path
    """directory for tokenizer.json and tokenizer_config.json; existing ones are replaced"""


def read_texts(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the query and responses of each row, with the leading space that responses get in training."""
    for where, row in iter_jsonl(path):
        query = field(row, "query", str, where)
        responses = [field(row, name, str, where) for name in RESPONSES if row.get(name) is not None]
        if not responses:
            raise InputError(f"{where}: no response; expected one of {', '.join(RESPONSES)}.")
        yield query, [with_leading_space(query, response, bool(row.get("chat"))) for response in responses]


def main(args: Args) -> None:
    check_ranges(args)
    check_vocab_size(args.vocab_size)
    if not args.data:
        raise InputError("--data needs JSON Lines files, such as mine/sft.train.jsonl.")
    check_out(args.out)
    rows = [row for path in args.data for row in read_texts(path)]
    queries, responses = [query for query, _ in rows], [text for _, texts in rows for text in texts]
    # query and response are joined, so that merges across the boundary are as rare as in training
    tokenizer = train_tokenizer((query + text for query, texts in rows for text in texts), args.vocab_size)
    tokenizer.save(args.out)

    lengths = [[len(ids) for ids in tokenizer.encode_batch(texts)] for texts in (queries, responses)]
    num_bytes = sum(len(text.encode()) for text in queries + responses)
    print(f"{args.out}/tokenizer.json: {tokenizer.vocab_size:,} ids and [PAD], from {len(rows):,} rows")
    if tokenizer.vocab_size < args.vocab_size:
        print(f"note: the texts have too few merges: {tokenizer.vocab_size:,} ids instead of {args.vocab_size:,}")
    print(f"{num_bytes / sum(map(sum, lengths)):.2f} bytes per token")
    longest_query, longest_response = max(lengths[0]), max(lengths[1]) + 1  # with EOS
    print(f"all rows fit --max-query-length {longest_query} --max-response-length {longest_response}")


if __name__ == "__main__":
    run_module(main, Args)
