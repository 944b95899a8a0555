"""The TL;DR data of "Learning to summarize from human feedback", as published -> the JSON Lines that training reads.

    python -m data.tldr --source DIR --out runs/tldr/data --tokenizer EleutherAI/pythia-1b-deduped
    python -m data.tldr --source vwxyzjn/summarize_from_feedback_tldr_3_filtered --out runs/tldr/data
    python -m data.tldr --source openai/summarize_from_feedback --revision refs/convert/parquet --files 'comparisons/*'

--source is a file, a directory of files or a Hub dataset: JSON Lines (also .gz, also named .json), JSON or parquet.
What a file holds shows in its records, two of the published layouts are used:

    demonstrations   id, subreddit, title, post, summary                      -> sft.{train,validation,test}.jsonl
    comparisons      info, summaries[2], choice, worker, batch, split, extra  -> comparisons.{train,validation}.jsonl
                     with info.article instead of info.post (CNN/DM news)     -> comparisons.cnndm.jsonl

The splits are the published ones: the field `split` of a comparison (valid1 and valid2 are one file, meta keeps which),
the word train, valid, validation or test in the path of a file of demonstrations. Where there is none, or with
--resplit, a seeded coin a query decides, so a query is never on both sides, in neither kind of file.

Broken records stop the run. Well-formed ones that training can't use are left out and counted: a response that is too
long, two summaries that are the same, an empty summary in a comparison (policies do write them; in a demonstration it
is an error).
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.prepare import in_validation, jsonl_files, length_table, read_records, source_files
from nanorlhf.cli import run_module
from nanorlhf.dataset import field, response_ids
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

# [N+ 2] what stands before and behind the post; no blank behind the colon: the response begins with it
TLDR = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: ", "\n\nTL;DR:"
CNNDM = "Article:\n", "\n\nTL;DR:\n"
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("valid", "valid1", "valid2", "validation"), "validation")
SENTENCE_END = re.compile(r"""[.!?…]["'”’)\]]*(?=\s)""")
REACH = 128  # characters, the longest token of GPT-2's and of NeoX's vocabulary


@dataclass(frozen=True, kw_only=True)
class Args:
    source: str
    """file, directory or Hub dataset id"""
    out: Path = Path("runs/tldr/data")
    """directory of the JSON Lines and of tokenizer.json; files of the same name are replaced"""
    tokenizer: str = "EleutherAI/pythia-1b-deduped"
    """directory, file or Hub id; the limits below count its tokens"""
    files: str = "*"
    """which files of a directory or Hub dataset: a pattern for their path in it, such as 'comparisons/*'"""
    revision: str | None = None
    """branch or commit of a Hub dataset"""
    max_query_length: int = 512
    """[N+ 2] tokens; longer posts are cut"""
    max_cnndm_query_length: int = 1919
    """[N+ 2] the same for CNN/DM articles"""
    max_sft_response_length: int = 53
    """[N+ 4] tokens with EOS; longer demonstrations are left out (48 with GPT-2's tokenizer)"""
    max_preference_response_length: int = 169
    """[N+ 4] the same for both summaries of a comparison"""
    validation_share: float = 0.1
    """share of the queries, where the source has no splits"""
    resplit: bool = False
    """draw the splits by --validation-share, whatever the source says"""
    seed: int = 1
    """of those splits"""
    num_pairs: int = 10
    """policy pairs printed a split, most frequent first"""


# ------------------------------------------------------------------------------------------------------- 1. truncation
def longest_fit(ends: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The last of the ascending `ends` that fits, None if none does.

    Bisection, and then a look at what lies up to REACH characters on: a longer prefix may have fewer tokens, once a
    word is complete.
    """
    low, high = -1, len(ends)  # ends[low] fits, ends[high] doesn't
    while high - low > 1:
        middle = (low + high) // 2
        if fits(ends[middle]):
            low = middle
        else:
            high = middle
    if len(ends):
        beyond = bisect_right(ends, ends[max(low, 0)] + REACH)
        low = next((i for i in range(beyond - 1, low, -1) if fits(ends[i])), low)
    return ends[low] if low >= 0 else None


def truncate(text: str, fits: Callable[[int], bool]) -> tuple[str, str]:
    """The longest allowed prefix of a post such that fits(its length), and the rule that made it. [N+ 2]

    1. "paragraph": the post loses what follows its last newline, and that newline, until it fits: whole paragraphs go,
       and a paragraph that can be kept is never cut.
    2. "sentence": its first paragraph alone is too long. The reference would cut characters here. We cut behind the
       last sentence that fits; a sentence ends in . ! ? or … (quotes and brackets may follow) with white space behind.
    3. "character": not even its first sentence fits. Then as the reference does it, a character a round.

    Nothing blank is kept: ("", "nothing") if not one character fits.
    """
    if fits(len(text)):
        return text, "whole"
    first = len(text) - len(text.lstrip())  # blank lines before it are no paragraphs
    paragraphs = [i for i in range(first, len(text)) if text[i] == "\n"]
    first_paragraph = text[: paragraphs[0]] if paragraphs else text
    sentences = [match.end() for match in SENTENCE_END.finditer(first_paragraph)]
    characters = range(first + 1, len(first_paragraph))
    for rule, ends in (("paragraph", paragraphs), ("sentence", sentences), ("character", characters)):
        end = longest_fit(ends, fits)
        if end is not None:
            return text[:end], rule
    return "", "nothing"


# ---------------------------------------------------------------------------------------------------------- 2. records
def make_query(
    before: str, post: str, behind: str, tokenizer: Tokenizer, flag: str, limit: int, where: str
) -> tuple[str, str]:
    """The template around as much of the post as fits in `limit` tokens, and the rule that cut it."""
    if not post.strip():
        raise InputError(f"{where}: the post is empty: fill it or delete the record.")
    # the whole template is tokenised again for every cut: tokens may span its seams
    text, rule = truncate(post, lambda end: len(tokenizer.encode(before + post[:end] + behind)) <= limit)
    if rule == "nothing":
        raise InputError(
            f"{where}: no room for the post: the query has {len(tokenizer.encode(before + behind))} tokens without it, "
            f"{flag} is {limit}: raise it or delete the record."
        )
    return before + text + behind, rule


def kind_of(record: dict, where: str) -> str:
    """Which of the published layouts a record has."""
    if "summaries" in record:
        return "comparisons"
    if "info" in record and "summary" in record:
        return "evaluations"  # axis_evals: one summary with marks
    if "post" in record or "summary" in record:
        return "sft"
    raise InputError(
        f"{where}: not a TL;DR record, its fields are {', '.join(record) or 'none'}: need subreddit, title, post and "
        "summary, or info, summaries and choice."
    )


def demonstration(record: dict, where: str, tokenizer: Tokenizer, args: Args) -> tuple[dict, str]:
    """A row of an sft file, and the rule that cut its post."""
    names = ("subreddit", "title", "post", "summary")  # [N+ 1]
    subreddit, title, post, summary = (field(record, name, str, where) for name in names)
    if not summary.strip():
        raise InputError(f"{where}: the field 'summary' is empty: fill it or delete the record.")
    before, behind = TLDR
    before = before.format(subreddit=subreddit, title=title)
    query, rule = make_query(before, post, behind, tokenizer, "--max-query-length", args.max_query_length, where)
    return {"query": query, "response": summary, "meta": {"id": record.get("id")}}, rule


def comparison(record: dict, where: str, tokenizer: Tokenizer, args: Args) -> tuple[dict, str, bool]:
    """A row of a comparisons file, the rule that cut its post, and whether it is of CNN/DM."""
    info = field(record, "info", dict, where)  # [N+ 1]
    is_cnndm = info.get("article") is not None  # the Hub's copies have both fields, the unused one null
    if is_cnndm:
        article = field(info, "article", str, f"{where}: info")
        limit = "--max-cnndm-query-length", args.max_cnndm_query_length
        query, rule = make_query(CNNDM[0], article, CNNDM[1], tokenizer, *limit, where)
    else:
        subreddit, title, post = (field(info, n, str, f"{where}: info") for n in ("subreddit", "title", "post"))
        before = TLDR[0].format(subreddit=subreddit, title=title)
        limit = "--max-query-length", args.max_query_length
        query, rule = make_query(before, post, TLDR[1], tokenizer, *limit, where)

    summaries, choice = field(record, "summaries", list, where), field(record, "choice", int, where)
    if len(summaries) != 2 or not all(isinstance(summary, dict) for summary in summaries):
        raise InputError(f"{where}: the field 'summaries' must hold two objects: mend or delete the record.")
    if choice not in (0, 1):
        raise InputError(f"{where}: the field 'choice' is {choice}: it must be 0 or 1.")
    texts, policies = (
        [field(summary, name, str, f"{where}: summaries[{i}]") for i, summary in enumerate(summaries)]
        for name in ("text", "policy")
    )
    extra = {} if record.get("extra") is None else field(record, "extra", dict, where)
    confidence = extra.get("confidence")  # 1 to 9; train may lack it
    if confidence is not None and type(confidence) is not int:
        raise InputError(f"{where}: extra.confidence must be a whole number or null, not {confidence!r}.")
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


# -------------------------------------------------------------------------------------------------------- 3. the files
def main(args: Args) -> None:
    for flag in (
        "max_query_length", "max_cnndm_query_length", "max_sft_response_length", "max_preference_response_length"
    ):  # fmt: skip
        if getattr(args, flag) < 1:
            raise InputError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1.")
    if not 0 <= args.validation_share <= 1:
        raise InputError(f"--validation-share {args.validation_share}: must lie between 0 and 1.")
    tokenizer = load_tokenizer(args.tokenizer)
    lengths: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # (file, column) -> how often which length
    cuts: dict[str, Counter[str]] = defaultdict(Counter)  # file -> rule of `truncate`
    pairs: dict[str, Counter[str]] = defaultdict(Counter)  # file -> unordered pair of policies
    left_out: Counter[str] = Counter()

    def split_of(published: str | None, query: str) -> str:
        if published is not None and not args.resplit:
            return SPLITS[published]
        return "validation" if in_validation(query, args.validation_share, args.seed) else "train"

    with jsonl_files(args.out) as write:
        for path, inside in source_files(args.source, args.files, args.revision):
            kind_of_file = None
            for where, record in read_records(path):
                kind = kind_of(record, where)
                kind_of_file = kind_of_file or kind
                if kind != kind_of_file:
                    raise InputError(f"{where}: a record of {kind} in a file of {kind_of_file}: make two files of it.")

                if kind == "evaluations":
                    left_out["an evaluation of a single summary, no comparison"] += 1
                    continue
                if kind == "sft":
                    row, rule = demonstration(record, where, tokenizer, args)
                    row["meta"]["split"] = split_in_path(inside)
                    columns, limit_flag = ("response",), "--max-sft-response-length"
                    limit = args.max_sft_response_length
                    file_name = f"sft.{split_of(row['meta']['split'], row['query'])}"
                else:
                    row, rule, is_cnndm = comparison(record, where, tokenizer, args)
                    columns, limit_flag = ("chosen", "rejected"), "--max-preference-response-length"
                    limit = args.max_preference_response_length
                    published = row["meta"]["split"]
                    if published is not None and published not in SPLITS:
                        raise InputError(f"{where}: unknown split {published!r}: known are {', '.join(SPLITS)}.")
                    file_name = "comparisons." + ("cnndm" if is_cnndm else split_of(published, row["query"]))

                responses = [response_ids(row["query"], row[column], tokenizer) for column in columns]
                if not all(row[column].strip() for column in columns):
                    left_out[f"{kind}: an empty summary"] += 1
                    continue
                if kind == "comparisons" and responses[0] == responses[1]:
                    left_out["comparisons: two summaries that are the same"] += 1
                    continue
                if max(map(len, responses)) > limit:
                    left_out[f"{kind}: a response longer than {limit_flag} {limit}"] += 1
                    continue
                write(file_name, row)
                cuts[file_name][rule] += 1
                query_length = len(tokenizer.encode(row["query"]))
                lengths[file_name, "query"][query_length] += 1
                for column, response in zip(columns, responses, strict=True):
                    lengths[file_name, column][len(response)] += 1
                    lengths[file_name, f"query+{column}"][query_length + len(response)] += 1
                if kind == "comparisons":
                    pairs[file_name][" / ".join(sorted(row["meta"]["policies"]))] += 1  # [N+ 6]
        if not cuts:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in left_out.items())
            raise InputError(f"--source {args.source}: no record could be used ({reasons}): nothing was written.")
    tokenizer.save(args.out)  # so that a model with random weights finds it there

    print(length_table(lengths))
    print("\nposts that were cut, and where")
    for name, counter in sorted(cuts.items()):
        rules = ", ".join(f"{counter[rule]} at a {rule}" for rule in ("paragraph", "sentence", "character"))
        print(f"{name:<26} {rules}, {counter['whole']} left whole")
    for name, counter in sorted(pairs.items()):
        print(f"\n{name}: {len(counter)} unique pairs of policies in {counter.total()} comparisons [N+ 6]")
        for pair, count in counter.most_common(args.num_pairs):
            print(f"  {count:7}  {pair}")
        if len(counter) > args.num_pairs:
            print(f"           and {len(counter) - args.num_pairs} more (--num-pairs)")
    print("\nleft out")
    for reason, count in sorted(left_out.items()):
        print(f"  {count:7}  {reason}")
    if not left_out:
        print("        0  nothing")
    print(f"\nwritten: {args.out}: " + ", ".join(f"{name}.jsonl ({cuts[name].total()})" for name in sorted(cuts)))
    for kind in ("sft", "comparisons"):
        missing = [split for split in ("train", "validation") if f"{kind}.{split}" not in cuts]
        if len(missing) == 1:
            print(f"note: no {kind}.{missing[0]}.jsonl, the source has no such split: --resplit draws one.")


def split_in_path(inside: str) -> str | None:
    """The published split of a file: the last of the words train, valid, validation, test in its path in the source."""
    words = [word for word in re.split(r"[^a-z0-9]+", inside.lower()) if word in SPLITS]
    return words[-1] if words else None


if __name__ == "__main__":
    run_module(main, Args)
