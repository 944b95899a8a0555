"""The TL;DR data of "Learning to summarize from human feedback", as published -> sft.jsonl and comparisons.jsonl.

    python -m data.tldr --source DIR --out runs/tldr/data --tokenizer EleutherAI/pythia-1b-deduped
    python -m data.tldr --source vwxyzjn/summarize_from_feedback_tldr_3_filtered --out runs/tldr/data
    python -m data.tldr --source openai/summarize_from_feedback --revision refs/convert/parquet --files 'comparisons/*'

--source is a file, a directory or a Hub dataset: JSON Lines (also .gz or named .json), JSON or parquet. Two of the
published layouts are used, recognised by their fields:

    demonstrations   id, subreddit, title, post, summary                      -> sft.{train,validation,test}.jsonl
    comparisons      info, summaries[2], choice, worker, batch, split, extra  -> comparisons.{train,validation}.jsonl
                     with info.article instead of info.post (CNN/DM news)     -> comparisons.cnndm.jsonl

The splits are the published ones: for comparisons the field `split` (valid1 and valid2 go to one file; meta keeps the
name), for demonstrations the word train, valid, validation or test in the file's path. Without a published split, or
with --resplit, a seeded hash of the query decides, so a query is in the same split in both kinds of file.

The printed length table is also drawn, as the histograms lengths.sft.png and lengths.comparisons.png [N+ 4].
policy_pairs.csv counts all pairs of policies, not only the --num-pairs per split that are printed [N+ 6].

Malformed records are an error. Valid records that training can't use are skipped and counted, such as an empty summary
in a comparison: policies do write those. In a demonstration it is an error.
"""

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from data import prepare
from nanorlhf.cli import NonNegativeInt, PositiveInt, check_ranges, run_module
from nanorlhf.dataset import field, filled
from nanorlhf.errors import InputError
from nanorlhf.files import write_text
from nanorlhf.report.page import STYLES, label_axes, write_pictures
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

# [N+ 2] the query before and after the post; no space after the colon, because the response starts with it
TLDR = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: ", "\n\nTL;DR:"
CNNDM = "Article:\n", "\n\nTL;DR:\n"
NUM_BINS = 60  # per histogram, at most


@dataclass(frozen=True, kw_only=True)
class Args(prepare.SourceArgs, prepare.SplitArgs):
    out: Path = Path("runs/tldr/data")
    """directory for the JSON Lines and tokenizer.json; existing files are replaced"""
    tokenizer: str = "EleutherAI/pythia-1b-deduped"
    """directory, file or Hub id; the limits below count its tokens"""
    max_query_length: PositiveInt = 512
    """[N+ 2] tokens; longer posts are truncated"""
    max_cnndm_query_length: PositiveInt = 1919
    """[N+ 2] the same for CNN/DM articles"""
    max_sft_response_length: PositiveInt = 53
    """tokens including EOS; longer demonstrations are skipped (48 with GPT-2's tokenizer)"""
    max_preference_response_length: PositiveInt = 169
    """the same for both summaries of a comparison"""
    num_pairs: NonNegativeInt = 10
    """policy pairs to print per split, most frequent first"""


# ------------------------------------------------------------------------------------------------------- 1. truncation
def truncate(text: str, fits: Callable[[int], bool]) -> tuple[str, str]:
    """Return the longest prefix of a post for which fits(its length), and the rule that truncated it. [N+ 2]

    1. "paragraph": cut at the last newline, repeatedly, until the post fits, so paragraphs are kept or dropped as a
       unit.
    2. "sentence": the first paragraph is too long. The reference drops characters here; we cut after the last sentence
       that fits. A sentence ends in . ! ? or …, optional quotes or brackets, and whitespace.
    3. "character": not even the first sentence fits. Drop characters one by one, as in the reference.

    The rule is "whole" for a post that fits. A prefix is never blank: the result is ("", "nothing") if not even one
    character fits. Blank lines before the first paragraph belong to it.
    """
    if fits(len(text)):
        return text, "whole"
    first = len(text) - len(text.lstrip())
    paragraphs = [i for i in range(first, len(text)) if text[i] == "\n"]
    first_paragraph = text[: paragraphs[0]] if paragraphs else text
    sentences = [match.end() for match in prepare.SENTENCE_END.finditer(first_paragraph)]
    characters = range(first + 1, len(first_paragraph))
    for rule, ends in (("paragraph", paragraphs), ("sentence", sentences), ("character", characters)):
        end = prepare.longest_fit(ends, fits)
        if end is not None:
            return text[:end], rule
    return "", "nothing"


# ---------------------------------------------------------------------------------------------------------- 2. records
def make_query(fields: dict, is_cnndm: bool, where: str, tokenizer: Tokenizer, args: Args) -> tuple[str, str]:
    """Fill the template with as much of the post or article as fits; also return the rule that cut it. [N+ 1]"""
    if is_cnndm:
        before, after = CNNDM
        post = filled(fields, "article", where)
        flag, limit = "--max-cnndm-query-length", args.max_cnndm_query_length
    else:
        before, after = TLDR
        subreddit, title = (field(fields, name, str, where) for name in ("subreddit", "title"))
        post = filled(fields, "post", where)
        before = before.format(subreddit=subreddit, title=title)
        flag, limit = "--max-query-length", args.max_query_length
    # tokenise the full query, because a token may span post and template
    text, rule = truncate(post, lambda end: len(tokenizer.encode(before + post[:end] + after)) <= limit)
    if rule == "nothing":
        raise InputError(
            f"{where}: no room for the post: without it, the query has {len(tokenizer.encode(before + after))} tokens; "
            f"{flag} is {limit}."
        )
    return before + text + after, rule


def record_kind(record: dict, where: str) -> str:
    """Return the kind of a record, recognised by its fields."""
    if "summaries" in record:
        return "comparisons"
    if "info" in record and "summary" in record:
        return "evaluations"  # axis_evals: one summary with ratings
    if "post" in record or "summary" in record:
        return "sft"
    raise InputError(
        f"{where}: not a TL;DR record: expected subreddit, title, post and summary, or info, summaries and choice; got "
        f"{', '.join(record) or 'no fields'}."
    )


def demonstration(record: dict, where: str, tokenizer: Tokenizer, args: Args) -> tuple[dict, str]:
    """Return a row of sft.jsonl and the rule that cut its post."""
    summary = filled(record, "summary", where)
    query, rule = make_query(record, False, where, tokenizer, args)
    return {"query": query, "response": summary, "meta": {"id": record.get("id")}}, rule


def comparison(record: dict, where: str, tokenizer: Tokenizer, args: Args) -> tuple[dict, str, bool]:
    """Return a row of comparisons.jsonl, the rule that cut its post, and whether it is from CNN/DM."""
    info = field(record, "info", dict, where)  # [N+ 1]
    is_cnndm = info.get("article") is not None  # copies on the Hub have both fields, one of them null
    query, rule = make_query(info, is_cnndm, f"{where}: info", tokenizer, args)
    summaries, choice = field(record, "summaries", list[dict], where), field(record, "choice", int, where)
    if len(summaries) != 2:
        raise InputError(f"{where}: the field 'summaries' must have two objects.")
    if choice not in (0, 1):
        raise InputError(f"{where}: the field 'choice' must be 0 or 1, not {choice}.")
    texts, policies = (
        [field(summary, name, str, f"{where}: summaries[{i}]") for i, summary in enumerate(summaries)]
        for name in ("text", "policy")
    )
    extra = {} if record.get("extra") is None else field(record, "extra", dict, where)
    confidence = extra.get("confidence")  # 1 to 9; may be missing in train
    if confidence is not None:
        field(extra, "confidence", int, f"{where}: extra")
    return (
        {
            "query": query,
            "chosen": texts[choice],
            "rejected": texts[1 - choice],
            "meta": {
                "id": info.get("id"),
                "batch": record.get("batch"),
                "confidence": confidence,
                "split": record.get("split"),
                "policies": [policies[choice], policies[1 - choice]],
                "worker": record.get("worker"),
            },
        },
        rule,
        is_cnndm,
    )


# ------------------------------------------------------------------------------------------------------- 3. histograms
def draw_lengths(lengths: prepare.LengthTable, kind: str) -> Figure:
    """Draw the lengths in the files of a kind, sft or comparisons: a panel per column, a line per split. [N+ 4]"""
    columns: dict[str, dict[str, Counter[int]]] = defaultdict(dict)  # column -> split -> length -> rows
    for (name, column), counter in sorted(lengths.counts.items(), key=lambda item: item[0][0]):
        if name.startswith(f"{kind}.") and not column.startswith("query+"):
            columns[column][name.removeprefix(f"{kind}.")] = counter

    figure = Figure(figsize=(4.4 * len(columns), 3.4), layout="constrained")
    for axes, (column, splits) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        shortest, longest = min(map(min, splits.values())), max(map(max, splits.values()))
        width = -(-(longest - shortest + 1) // NUM_BINS)  # tokens, the same number in each bin
        edges = np.arange(shortest, longest + width + 1, width)
        for (split, counter), (color, _, line) in zip(splits.items(), STYLES, strict=False):
            rows, _ = np.histogram(list(counter), edges, weights=list(counter.values()))
            axes.stairs(100 * rows / counter.total(), edges, color=color, linestyle=line, linewidth=1.5, label=split)
        label_axes(axes, column, "tokens", f"% of rows (bin width {width})")
        axes.legend(frameon=False)
    return figure


# ------------------------------------------------------------------------------------------------------------ 4. files
def main(args: Args) -> None:
    check_ranges(args)
    tokenizer = load_tokenizer(args.tokenizer)
    cuts: dict[str, Counter[str]] = defaultdict(Counter)  # file -> rule of `truncate` -> rows
    pairs: dict[str, Counter[tuple[str, ...]]] = defaultdict(Counter)  # file -> unordered pair of policies -> rows
    lengths = prepare.LengthTable()
    skipped: Counter[str] = Counter()

    with prepare.converted_files(args.out, args.source, tokenizer, skipped, lengths=lengths) as write:
        for path, relative_path in prepare.source_files(args):
            file_kind = None
            for where, record in prepare.read_records(path):
                kind = record_kind(record, where)
                file_kind = file_kind or kind
                if kind != file_kind:
                    raise InputError(f"{where}: a record of {kind} in a file of {file_kind}.")

                is_cnndm = False
                if kind == "evaluations":
                    skipped["an evaluation of a single summary, not a comparison"] += 1
                    continue
                if kind == "sft":
                    row, rule = demonstration(record, where, tokenizer, args)
                    published = row["meta"]["split"] = prepare.split_in_path(relative_path)
                    limit = "--max-sft-response-length", args.max_sft_response_length
                else:
                    row, rule, is_cnndm = comparison(record, where, tokenizer, args)
                    published = row["meta"]["split"]
                    if published is not None and not (isinstance(published, str) and published in prepare.SPLITS):
                        known = ", ".join(prepare.SPLITS)
                        raise InputError(f"{where}: unknown split {published!r:.80}; expected one of {known}.")
                    if not row["chosen"].strip() or not row["rejected"].strip():
                        skipped["an empty summary"] += 1
                        continue
                    limit = "--max-preference-response-length", args.max_preference_response_length
                split = "cnndm" if is_cnndm else prepare.choose_split(published, row["query"], args)
                if write(split, row, *limit):  # [N+ 4]
                    cuts[f"{kind}.{split}"][rule] += 1
                    if kind == "comparisons":
                        pairs[f"{kind}.{split}"][tuple(sorted(row["meta"]["policies"]))] += 1  # [N+ 6]
    tokenizer.save(args.out)  # for models with random weights

    print("\ntruncated posts, by cut point")
    for name, counter in sorted(cuts.items()):
        rules = ", ".join(f"{counter[rule]} at a {rule}" for rule in ("paragraph", "sentence", "character"))
        print(f"{name:<26} {rules}, {counter['whole']} not cut")
    for name, counter in sorted(pairs.items()):
        print(f"\n{name}: {len(counter)} unique pairs of policies in {counter.total()} comparisons [N+ 6]")
        for pair, count in counter.most_common(args.num_pairs):
            print(f"  {count:7}  {' / '.join(pair)}")
        if len(counter) > args.num_pairs:
            print(f"           and {len(counter) - args.num_pairs} more (--num-pairs)")

    # a kind without rows keeps its files, because the two kinds may come from two sources
    kinds = sorted({name.split(".")[0] for name in cuts})
    write_pictures(args.out, {f"lengths.{kind}.png": draw_lengths(lengths, kind) for kind in kinds})
    if pairs:
        table = io.StringIO()
        lines = csv.writer(table, lineterminator="\n")
        lines.writerow(("split", "policy", "other_policy", "comparisons"))
        for name, counter in sorted(pairs.items()):
            lines.writerows((name.removeprefix("comparisons."), *pair, n) for pair, n in counter.most_common())
        write_text(args.out / "policy_pairs.csv", table.getvalue())


if __name__ == "__main__":
    run_module(main, Args)
