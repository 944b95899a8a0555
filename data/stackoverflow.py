"""The Stack Exchange dump, as published (archive.org) -> rows for SFT, reward models, DPO and KTO. [SO data]

    python -m data.stackoverflow --source Posts.xml --out runs/stackoverflow/data
    python -m data.stackoverflow --source Posts.xml --out runs/stackoverflow/data --generated-by runs/stackoverflow/sft
    python -m data.stackoverflow --source runs/site/Posts.xml --out runs/site/data --vocab-size 1024

--source is a site's unpacked Posts.xml, or a CSV with its attributes as columns. It is streamed: from 100 GB, only the
questions that are kept and their answers are in memory. A question is kept if it has the tag, asks how to use an API
(see KINDS below), and has no picture, link or code; an answer is kept if its question is kept and it has no picture,
link or code:

    sft.{train,validation}.jsonl           a question and its best answer
    scored.{train,validation}.jsonl        every answer, with a score from -1 to 1 computed from its votes (Algorithm 1)
    comparisons.{train,validation}.jsonl   a question's best answer against each worse one (Algorithm 2)
    unpaired.{train,validation}.jsonl      every answer with another score than 0, labelled by its sign, for KTO
    scaling.json                           the bounds of Algorithm 1, from the train split, used for both

The query is `Question: {title}\\n{body}\\nAnswer:`. Long questions are truncated at the end so that query and answer
fit in --max-length; answers are never truncated. Questions asked after --split-date are validation.

--generated-by adds answers sampled from an SFT policy: one for each question with a single answer. A generated answer
always counts as worse than the human one.

A malformed file is an error. Unusable posts are skipped and counted, with the location of the first.
"""

import csv
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from data.markup import to_text
from data.prepare import Skipped, check_vocab_size, converted_files
from nanorlhf.cli import PositiveInt, Seed, TemperatureOrGreedy, check_ranges, run_module
from nanorlhf.dataset import response_ids
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, decode, open_regular, read_lines, to_json, write_text
from nanorlhf.progress import Progress
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

if TYPE_CHECKING:  # only --generated-by imports torch
    from nanorlhf.model import GPT

BEFORE, AFTER = "Question: ", "\nAnswer:"  # no space after the colon: the answer starts with it
PAPERS_TOKENIZER = "EleutherAI/gpt-neo-125m"
GENERATED_MEAN, GENERATED_DEVIATION = -0.5, 0.1  # scores of generated answers
NEEDED = ("Id", "PostTypeId", "ParentId", "CreationDate", "Score", "Body", "Title", "Tags")
OPTIONAL = ("AcceptedAnswerId", "OwnerUserId")
MAX_ID = 2**31 - 1  # Ids are 32-bit on the sites; a damaged Id must not allocate terabytes

# Kinds of questions, after the taxonomy of Beyer et al. ("What kind of questions do developers ask on Stack Overflow?",
# 2020). Its class API USAGE asks for concrete instructions: how to use an API, how to get something done. The paper
# doesn't publish its expressions; these are ours: (kind, expression, a title that matches). They ignore case and accept
# any apostrophe. A question is API USAGE if a "usage" expression matches its title or the first sentence of its body,
# and no expression of another kind matches its title: "How can I fix this TypeError?" isn't.
KINDS = (
    ("usage", r"\bhow (?:(?:best|else|exactly) )?to\b", "Python: how to sort a list of tuples"),
    ("usage", r"\bhow (?:do|can|could|should|would) (?:i|we|you|one|some(?:one|body))\b", "How do I sort a list?"),
    ("usage", r"\bhow (?:can|could|should)\b[^.?!]{1,80} be \w", "How can a dictionary be sorted by value?"),
    ("usage", r"\b(?:can|could) (?:i|we|you|one|some(?:one|body)) \w", "Can I sort a list in place?"),
    ("usage", r"\bways? (?:to|of|for)\b", "What is the most elegant way to sort a list?"),
    ("usage", r"\bpossib(?:le|ility) to\b", "Is it possible to sort a dictionary?"),
    ("usage", r"\bis there (?:an?|any|some) [^.?!]{0,40}\b(?:function|method|module|library|package|tool)\b",
     "Is there any built-in function that flattens a list?"),
    ("usage", r"\b(?:what|which) (?:\w+ ){0,2}(?:function|method|module|library|package|command|class)\b",
     "Which library should I use for HTTP?"),
    ("error", r"\bwhy\b", "Why can I not sort this list?"),
    ("error", r"(?:n't|\bnot|\bstopped) work", "How to sort when sorted() doesn't work"),
    ("error", r"\b(?:fix|solve|resolve|debug|get rid of)\b[^.?!]{0,60}(?:error|exception|problem|issue|bug)s?\b",
     "How can I fix this TypeError?"),
    ("conceptual", r"\bwhat(?:'s| is| are) (?:the )?(?:\w+ )?differences? between\b",
     "What's the difference between these ways to sort?"),
    ("conceptual", r"\bhow (?:do|does|is|are) (?!i |we |you |one )[^.?!]{1,60} (?:work|implemented)\b",
     "How does this way of sorting work?"),
    ("conceptual", r"\bwhat does\b[^.?!]{1,60} mean\b", "What does 'not possible to hash' mean?"),
    ("learning", r"\b(?:good|best|any) (?:\w+ )?(?:tutorial|book|course)s?\b", "Any good book on how to sort?"),
    ("learning", r"\bhow (?:to|do i|can i|should i) (?:start )?learn", "How should I learn Python?"),
    ("review", r"\b(?:review|critique|improve|optimi[sz]e|refactor) (?:my|this)\b", "How can I improve this function?"),
    ("change", r"\b(?:no longer|after (?:the |an )?(?:upgrade|update|upgrading|updating))\b",
     "How to sort by cmp, which is no longer there after upgrading"),
)  # fmt: skip
USAGE, OTHER_KINDS = (
    re.compile("|".join(expression for kind, expression, _ in KINDS if (kind == "usage") == wanted), re.IGNORECASE)
    for wanted in (True, False)
)


@dataclass(frozen=True, kw_only=True)
class Args:
    source: Path
    """a site's Posts.xml, or a .csv with the same columns"""
    out: Path = Path("runs/stackoverflow/data")
    """directory for the JSON Lines, scaling.json and tokenizer.json; existing files are replaced"""
    tag: str | None = "python"
    """keep questions with this tag (None: all)"""
    question_filter: Literal["api-usage", "all"] = "api-usage"
    """api-usage: keep questions that ask how to use an API, by the expressions in KINDS"""
    drop_markup: tuple[str, ...] = ("img", "a", "code", "pre")
    """HTML elements: posts with any of them are skipped; other elements are reduced to their text"""
    split_date: str = "2021-12-14"
    """questions asked after this day (UTC) are validation, the others train"""
    tokenizer: str | None = None
    """directory, file or Hub id; the limits count its tokens (None: the tokenizer of --generated-by, or else
    EleutherAI/gpt-neo-125m, the paper's)"""
    vocab_size: int | None = None
    """train a byte-level BPE of this size on the train split instead"""
    max_length: PositiveInt = 512
    """tokens of query and answer together, including EOS; questions are truncated to leave room for the answer"""
    max_query_length: PositiveInt | None = None
    """tokens of the query, as an additional limit (None: only --max-length)"""
    max_response_length: PositiveInt | None = None
    """tokens including EOS: longer answers are skipped, and sampling stops there (None: only --max-length limits
    answers, half of it limits samples)"""
    outliers: Literal["clip", "saturate"] = "clip"
    """Algorithm 1, scores outside the fences: clip to [-1, 1] as the paper does, or set to -1 and 1"""
    generated_by: str | None = None
    """SFT policy that answers the questions with a single answer: directory or Hub id"""
    temperature: TemperatureOrGreedy = 1.0
    """sampling temperature of the generated answers"""
    batch_size: PositiveInt = 32
    """questions answered at once"""
    device: str = "auto"
    """device of the policy: auto, cpu, cuda, cuda:N or mps"""
    seed: Seed = 1
    """seed of the generated answers and their scores"""


def is_api_usage(title: str, body: str) -> bool:
    """Return whether a question asks how to use an API, by KINDS."""
    first_sentence = re.split(r"(?<=[.?!])\s|\n", body, maxsplit=1)[0]
    title, first_sentence = (text.replace("’", "'") for text in (title, first_sentence))
    return bool(USAGE.search(title) or USAGE.search(first_sentence)) and not OTHER_KINDS.search(title)


# ----------------------------------------------------------------------------------------------- 1. scores from votes
@dataclass(frozen=True)
class Bounds:
    """Bounds of Algorithm 1 on s = votes / number of the question's answers, computed from the train split."""

    low: float  # fences: values outside are outliers
    high: float
    largest_positive: float  # of the inliers; 0 if none is positive
    largest_negative: float  # absolute value; 0 if none is negative


def _per_answer(votes: list[list[float]]) -> list[list[float]]:
    return [[vote / len(question) for vote in question] for question in votes]


def regression_bounds(votes: list[list[float]]) -> Bounds:
    """Return the fences and the largest inliers of `votes`, one list per question.

    s = votes / number of the question's answers; fences [Q1 - 1.5 IQR, Q3 + 1.5 IQR] over all s, linear quantiles.
    Raises InputError unless there are votes and all are finite.
    """
    shares = np.array([share for question in _per_answer(votes) for share in question], dtype=np.float64)
    if not (len(shares) and np.isfinite(shares).all()):
        raise InputError("the votes must be finite numbers, at least one, in one list per question.")
    first_quartile, third_quartile = np.quantile(shares, (0.25, 0.75))
    reach = 1.5 * (third_quartile - first_quartile)
    low, high = first_quartile - reach, third_quartile + reach
    inliers = shares[(low <= shares) & (shares <= high)]
    return Bounds(float(low), float(high), float(inliers.max(initial=0)), float(-inliers.min(initial=0)))


def regression_scores(
    votes: list[list[float]], outliers: str = "clip", bounds: Bounds | None = None
) -> list[list[float]]:
    """[SO alg 1] Return a score from -1 to 1 for each answer; votes and scores are one list per question.

        s = votes / number of the question's answers
        s outside the fences:  clip(s, -1, 1)
        s inside, positive:    s / the largest inlier              negative: s / |the most negative inlier|

    bounds: from the train split (None: from `votes`). With bounds from other votes, an inlier may exceed the largest
    one; it becomes 1 or -1. The paper's rule is not monotone: an outlier of .8 keeps .8 while an inlier of .7 may
    become 1. outliers="saturate" fixes that: 1 above the fences, -1 below. The fences themselves count as inside. If
    train has no inlier of a sign, s is kept. Raises InputError if `outliers` is unknown.
    """
    if outliers not in ("clip", "saturate"):
        raise InputError(f"outliers {outliers!r}: must be clip or saturate.")
    bounds = bounds or regression_bounds(votes)

    def score(share: float) -> float:
        if outliers == "saturate" and not bounds.low <= share <= bounds.high:
            return 1.0 if share > bounds.high else -1.0
        if bounds.low <= share <= bounds.high:
            largest = bounds.largest_positive if share > 0 else bounds.largest_negative
            share /= largest or 1.0  # if train has no inlier of this sign, it counts as an outlier
        return min(1.0, max(-1.0, share))

    return [[score(share) for share in question] for question in _per_answer(votes)]


def contrastive_scores(votes: list, accepted: list) -> list:
    """[SO alg 2] Return -1 for negative votes, else ceil(log2(1 + votes)), plus 1 if the asker accepted the answer.

    votes, accepted (bool): one item per answer to a question, or lists of such lists. The 1 is only added in the else
    branch: an accepted answer with negative votes stays at -1.

    >>> contrastive_scores([-2, 0, 3, 4], [True, False, True, False])
    [-1, 0, 3, 3]
    """
    scores = []
    for vote, is_accepted in zip(votes, accepted, strict=True):
        if isinstance(vote, list | tuple):
            scores.append(contrastive_scores(vote, is_accepted))
        else:
            scores.append(-1 if vote < 0 else math.ceil(math.log2(1 + vote)) + bool(is_accepted))
    return scores


# ------------------------------------------------------------------------------------------------ 2. rows of the dump
def read_posts(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (location, row) for each row of a dump; a row has only the attributes that are set."""
    read = _xml_rows if path.suffix.lower() == ".xml" else _csv_rows
    progress = Progress(total=path.stat().st_size, desc=path.name, unit="B", unit_scale=True, leave=False)
    with open_regular(path) as file, progress:
        yield from read(path, file, progress)


def location(where: str, row: Mapping[str, str]) -> str:
    return where + (f" (Id {row['Id']:.40})" if "Id" in row else "")


def _xml_rows(path: Path, file: BinaryIO, progress: Progress) -> Iterator[tuple[str, dict[str, str]]]:
    number = 0
    try:
        events = ElementTree.iterparse(file, events=("start", "end"))
        _, root = next(events)
        for event, element in events:
            if event == "end" and element.tag == "row":
                number += 1
                yield location(f"row {number}", element.attrib), element.attrib
                root.clear()  # otherwise the tree grows to the size of the file
                if number % 1000 == 0:
                    progress.update(file.tell() - progress.n)
    except ElementTree.ParseError as error:
        line, column = error.position
        reason = str(error).split(":")[0]
        raise InputError(f"{path}:{line}:{column + 1}: malformed XML ({reason}).") from error
    except (LookupError, ValueError) as error:  # an encoding that Python or expat doesn't know
        raise InputError(f"{path}:1: can't read this XML ({error}).") from error


def _csv_rows(path: Path, file: BinaryIO, progress: Progress) -> Iterator[tuple[str, dict[str, str]]]:
    def lines() -> Iterator[str]:
        for number, line in read_lines(path):
            progress.update(len(line))
            yield decode(line, f"{path}:{number}", "utf-8-sig" if number == 1 else "utf-8")

    reader = csv.DictReader(lines(), strict=True)
    try:
        missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
        if missing:
            raise InputError(f"{path}: the first line lacks the columns {', '.join(missing)}.")
        while True:
            line = reader.reader.line_num + 1
            row = next(reader, None)
            if row is None:
                return
            if None in row or None in row.values():
                raise InputError(f"{path}:{line}: expected {len(reader.fieldnames)} fields.")
            row = {name: value for name, value in row.items() if value}
            yield location(f"line {line}", row), row
    except csv.Error as error:
        raise InputError(f"{path}:{reader.reader.line_num}: malformed CSV ({error}).") from error


# -------------------------------------------------------------------------------------------- 3. questions and answers
@dataclass(slots=True)
class Answer:
    id: int | None  # None: generated
    text: str
    votes: int | None
    accepted: bool
    created: datetime | None
    length: int = 0  # tokens including EOS
    score: float = math.nan  # Algorithm 1
    contrastive: int | None = None  # Algorithm 2


@dataclass(slots=True)
class Question:
    id: int
    title: str
    body: str
    created: datetime
    accepted_id: int | None
    answers: list[Answer] = field(default_factory=list)  # best first, once they are scored
    generated: Answer | None = None

    @property
    def text(self) -> str:
        return f"{self.title}\n{self.body}"


def parse_int(text: str | None) -> int | None:
    """Parse an integer, also in the form that pandas writes for a column with gaps (17.0); None for anything else."""
    match = re.fullmatch(r"\s*(-?[0-9]{1,10})(?:\.0*)?\s*", text or "")
    return int(match[1]) if match else None


def parse_id(row: dict[str, str]) -> int:
    number = parse_int(row.get("Id"))
    if number is None or not 0 < number <= MAX_ID:
        raise Skipped("Id missing or not a number")
    return number


def parse_time(row: dict[str, str]) -> datetime:
    """Return when a post was created, in UTC; a time without a zone is in UTC."""
    try:
        parsed = datetime.fromisoformat(row.get("CreationDate", "").strip())
        return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise Skipped("CreationDate missing or unreadable") from error


def read_questions(
    path: Path, args: Args, skipped: Counter[str], firsts: dict[str, str]
) -> tuple[list[Question], Counter[str]]:
    """Read the dump in one pass; return the kept questions with their answers, and the posts left by each of `steps`.

    Counts unusable posts in `skipped` and records the location of the first with each reason in `firsts`.
    """
    questions: dict[int, Question] = {}
    taken: set[tuple[int, int]] = set()  # Ids of a question and of an answer to it
    seen = bytearray()  # one bit per question Id, kept or not: 80 million Ids take 10 MB
    newest = 0
    waiting: list[tuple[str, dict[str, str]]] = []  # answers that come before their question
    counts: Counter[str] = Counter()
    markup = re.compile(rf"<(?:{'|'.join(args.drop_markup)})(?=[\s/>])", re.IGNORECASE) if args.drop_markup else None
    tag = args.tag and args.tag.lower()

    def has_markup(row: dict[str, str]) -> bool:
        return markup is not None and markup.search(row.get("Body", "")) is not None

    def read_texts(row: dict[str, str]) -> tuple[str, str]:
        """Return the title and body as plain text."""
        title, body = row.get("Title", ""), row.get("Body", "")
        return " ".join(title.split()), to_text(body)

    def take_question(row: dict[str, str]) -> None:
        nonlocal newest
        counts["questions"] += 1
        number = parse_id(row)
        byte, bit = number // 8, 1 << number % 8
        seen.extend(bytes(max(0, byte + 1 - len(seen))))
        if seen[byte] & bit:
            raise Skipped("duplicate Id")
        seen[byte] |= bit
        newest = max(newest, number)
        counts["own id"] += 1
        if tag and tag not in re.findall(r"[^<>|]+", row.get("Tags", "").lower()):  # <a><b>, newer dumps: |a|b|
            return
        counts["tagged"] += 1
        if has_markup(row):
            return
        counts["plain"] += 1
        title, body = read_texts(row)
        if not (title and body):
            raise Skipped(f"an empty {'text' if title else 'title'}")
        created = parse_time(row)
        counts["complete"] += 1
        if args.question_filter == "api-usage" and not is_api_usage(title, body):
            return
        counts["of the kind"] += 1
        counts["questions by deleted users"] += "OwnerUserId" not in row
        questions[number] = Question(number, title, body, created, parse_int(row.get("AcceptedAnswerId")))

    def take_answer(row: dict[str, str], parent: int) -> None:
        if parent < 1 or parent // 8 >= len(seen) or not seen[parent // 8] & 1 << parent % 8:
            raise Skipped("ParentId is not a question in the file")
        counts["of the dump"] += 1
        if (question := questions.get(parent)) is None:
            return
        counts["of a question kept"] += 1
        if has_markup(row):
            return
        counts["plain answers"] += 1
        _, text = read_texts(row)
        number, votes = parse_id(row), parse_int(row.get("Score"))
        if votes is None:
            raise Skipped("Score missing or not a whole number")
        created = parse_time(row)
        if not text:
            raise Skipped("an empty text")
        if (parent, number) in taken:
            raise Skipped("duplicate Id")
        taken.add((parent, number))
        counts["complete answers"] += 1
        counts["answers by deleted users"] += "OwnerUserId" not in row
        question.answers.append(Answer(number, text, votes, number == question.accepted_id, created))

    def take(where: str, row: dict[str, str], waits: bool) -> None:
        """Take a post; if `waits`, put off an answer with a question that may come later."""
        kind = {"1": "question", "2": "answer"}.get(row.get("PostTypeId", ""))
        try:
            if kind == "question":
                take_question(row)
            elif kind == "answer":
                counts["answers"] += waits
                if (parent := parse_int(row.get("ParentId"))) is None:
                    raise Skipped("ParentId missing or not a number")
                if waits and parent > newest:
                    waiting.append((where, row))
                else:
                    take_answer(row, parent)
        except Skipped as reason:
            skipped[f"{kind}: {reason}"] += 1
            firsts.setdefault(f"{kind}: {reason}", where)

    for where, row in read_posts(path):
        counts["rows"] += 1
        take(where, row, waits=True)
    for where, row in waiting:
        take(where, row, waits=False)
    return [question for question in questions.values() if question.answers], counts


def steps(args: Args) -> dict[str, tuple[str, str]]:
    """Return the filter's steps in order: the label in the printed table, and advice if nothing is left after it."""
    no_markup = f"without --drop-markup {' '.join(args.drop_markup) or '(nothing)'}"
    return {
        "rows": ("rows", "--source must be the Posts.xml of a site"),
        "questions": ("questions", "--source must be the Posts.xml of a site"),
        "own id": ("with a unique Id", "the file is damaged"),
        "tagged": (f"with --tag {args.tag}", "--tag None keeps all tags"),
        "plain": (no_markup, "pass fewer elements"),
        "complete": ("with a title, a text and a date", "the file is damaged"),
        "of the kind": (f"with --question-filter {args.question_filter}", "--question-filter all keeps every kind"),
        "answers": ("answers", "the file must have answers too"),
        "of the dump": ("to a question in the file", "the file must have questions and their answers"),
        "of a question kept": ("to a question kept above", "relax --tag, --drop-markup or --question-filter"),
        "plain answers": (no_markup, "pass fewer elements"),
        "complete answers": ("with a unique Id, a score, a text and a date", "the file is damaged"),
        "fitting": (f"within --max-length {args.max_length}", "raise it, --max-query-length or --max-response-length"),
    }


def check_not_empty(counts: Counter[str], last: str, args: Args) -> None:
    """Raise InputError and name the step if nothing is left after one of the steps up to `last`."""
    before = "rows"
    for key, (label, advice) in steps(args).items():
        if not counts[key]:
            raise InputError(
                f"--source {args.source}: no questions left: {counts[before]} {steps(args)[before][0]!r}, but 0 "
                f"{label!r}: {advice}."
            )
        if key == last:
            return
        before = key


# ------------------------------------------------------------------------------------------------ 4. splits and lengths
def split_by_date(questions: list[Question], split_date: str) -> dict[str, list[Question]]:
    """Put questions asked on or before --split-date into train, later ones into validation."""
    day = date.fromisoformat(split_date)
    splits: dict[str, list[Question]] = {"train": [], "validation": []}
    for question in questions:
        splits["validation" if question.created.date() > day else "train"].append(question)
    for split, kept in splits.items():
        if not kept:
            days = sorted(question.created.date() for question in questions)
            raise InputError(
                f"--split-date {split_date} leaves no questions for {split}; the questions kept are from {days[0]} to "
                f"{days[-1]}."
            )
    return splits


def make_query(text: str, tokenizer: Tokenizer, limit: int) -> str | None:
    """Fill the template with a question, cut after a token to fit `limit` tokens; None if not even one token fits."""
    query = BEFORE + text + AFTER
    if len(tokenizer.encode(query)) <= limit:
        return query
    # max: with a negative room, the published code keeps text
    room = max(0, limit - len(tokenizer.encode(BEFORE + AFTER)))
    ends = [end for _, end in tokenizer.backend.encode(text, add_special_tokens=False).offsets]
    for end in reversed(ends[: room + 2]):  # tokens that span text and template may save one or two
        head = text[:end].rstrip()
        if head and len(tokenizer.encode(BEFORE + head + AFTER)) <= limit:
            return BEFORE + head + AFTER
    return None


def query_for(question: Question, answers: list[Answer], tokenizer: Tokenizer, args: Args) -> str | None:
    """Return the query that leaves room for the longest of `answers`; None if the question doesn't fit."""
    limit = args.max_length - max(answer.length for answer in answers)
    return make_query(question.text, tokenizer, min(limit, args.max_query_length or limit))


def check_fits(question: Question, answer: Answer, tokenizer: Tokenizer, args: Args) -> None:
    """Raise Skipped if an answer is too long, or leaves no room for its question."""
    if answer.length > (args.max_response_length or math.inf):
        raise Skipped(f"answer: longer than --max-response-length {args.max_response_length}")
    if query_for(question, [answer], tokenizer, args) is None:
        raise Skipped(f"answer: no room for the question in --max-length {args.max_length}")


def keep_fitting(questions: list[Question], tokenizer: Tokenizer, args: Args, skipped: Counter[str]) -> list[Question]:
    """Remove answers that are too long; return the questions that still have answers."""
    for question in questions:
        fitting = []
        for answer in question.answers:
            answer.length = len(response_ids(AFTER, answer.text, tokenizer))
            try:
                check_fits(question, answer, tokenizer, args)
                fitting.append(answer)
            except Skipped as reason:
                skipped[str(reason)] += 1
        question.answers = fitting
    return [question for question in questions if question.answers]


def give_scores(splits: dict[str, list[Question]], outliers: str) -> Bounds:
    """Score all answers by both algorithms and sort each question's, best first; return the bounds from train."""
    bounds = regression_bounds([[answer.votes for answer in question.answers] for question in splits["train"]])
    for questions in splits.values():
        votes, accepted = (
            [[getattr(answer, name) for answer in question.answers] for question in questions]
            for name in ("votes", "accepted")
        )
        scores = regression_scores(votes, outliers, bounds), contrastive_scores(votes, accepted)
        for question, regression, contrastive in zip(questions, *scores, strict=True):
            for answer, score, level in zip(question.answers, regression, contrastive, strict=True):
                answer.score = score
                answer.contrastive = level
            # ties: first the accepted answer, then more votes, then the earlier answer
            question.answers.sort(key=lambda a: (-a.contrastive, not a.accepted, -a.votes, a.created, a.id))
    return bounds


# ------------------------------------------------------------------------------------------------ 5. generated answers
def generate_answers(
    questions: list[Question], policy: "GPT", tokenizer: Tokenizer, args: Args, skipped: Counter[str]
) -> None:
    """[SO generated] Sample one answer to each question with a single answer; sets `question.generated`.

    A score from N(-0.5, 0.1^2) is drawn for each, even if it is skipped, so that the other scores don't depend on it.
    """
    from nanorlhf.generate import sample_answers

    single = [question for question in questions if len(question.answers) == 1]
    if not single:
        return
    queries = [tokenizer.encode(query_for(question, question.answers, tokenizer, args)) for question in single]
    max_tokens = args.max_response_length or max(1, args.max_length // 2)
    if (needed := max(map(len, queries)) + max_tokens) > policy.config.n_ctx:
        raise InputError(
            f"the longest query and a generated answer have {needed} tokens, more than the {policy.config.n_ctx} "
            f"positions of {args.generated_by}; lower --max-length or --max-response-length."
        )
    _, responses = sample_answers(
        policy, queries, tokenizer, 1, max_tokens, args.batch_size, args.seed, args.temperature
    )
    scores = np.random.default_rng(args.seed).normal(GENERATED_MEAN, GENERATED_DEVIATION, len(single))
    for question, ids, score in zip(single, responses.tolist(), scores.tolist(), strict=True):
        [human] = question.answers
        text = tokenizer.decode(ids).strip()
        text_ids = response_ids(AFTER, text, tokenizer)
        answer = Answer(None, text, None, False, None, len(text_ids), score)
        try:
            if not text:
                raise Skipped("answer: empty")
            if text_ids == response_ids(AFTER, human.text, tokenizer):
                raise Skipped("answer: identical to the human's")
            check_fits(question, answer, tokenizer, args)  # invalid UTF-8 gets longer when re-encoded
            question.generated = answer
        except Skipped as reason:
            skipped[f"generated {reason}"] += 1


# ------------------------------------------------------------------------------------------------------------ 6. files
def make_meta(question: Question, answers: dict[str, Answer]) -> dict:
    """Return metadata of a question and its answer; two answers are each under their column."""
    about = {
        column: {
            "answer_id": answer.id,
            "answer_date": answer.created and answer.created.isoformat(),
            "votes": answer.votes,
            "accepted": answer.accepted,
            "contrastive": answer.contrastive,
            "generated": answer.id is None,
        }
        for column, answer in answers.items()
    }
    return {
        "question_id": question.id,
        "question_date": question.created.isoformat(),
        "num_answers": len(question.answers),  # divisor in Algorithm 1: human answers after all filters
    } | about.get("response", about)


def check(args: Args) -> None:
    """Check the settings before the long read."""
    if args.source.suffix.lower() not in (".xml", ".csv"):
        raise InputError(f"--source {args.source}: unsupported file type; expected an unpacked .xml or .csv.")
    if not args.source.is_file():
        raise InputError(f"--source {args.source}: no such file.")
    check_ranges(args)
    check_vocab_size(args.vocab_size, (args.tokenizer and "--tokenizer") or (args.generated_by and "--generated-by"))
    for name in args.drop_markup:
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", name):
            raise InputError(f"--drop-markup {name!r}: write HTML elements without brackets, such as img a code.")
    try:
        date.fromisoformat(args.split_date)
    except ValueError as error:
        raise InputError(f"--split-date {args.split_date!r}: must be a date such as 2021-12-14.") from error
    check_out(args.out)


def main(args: Args) -> None:
    check(args)
    # loaded first to report a missing file before the long read
    tokenizer = policy = None
    if args.vocab_size is None:
        tokenizer = load_tokenizer(args.tokenizer or args.generated_by or PAPERS_TOKENIZER)
    if args.generated_by:
        from data.sampling import load_policy
        from nanorlhf import launch

        policy = load_policy(args.generated_by, tokenizer, launch.setup(args.device))

    skipped: Counter[str] = Counter()
    firsts: dict[str, str] = {}  # reason -> location
    questions, counts = read_questions(args.source, args, skipped, firsts)
    check_not_empty(counts, "complete answers", args)
    splits = split_by_date(questions, args.split_date)
    if tokenizer is None:
        texts = (f"{BEFORE}{q.text}{AFTER} {answer.text}" for q in splits["train"] for answer in q.answers)
        tokenizer = train_tokenizer(texts, args.vocab_size)
    splits = {name: keep_fitting(split_questions, tokenizer, args, skipped) for name, split_questions in splits.items()}
    kept = [question for split_questions in splits.values() for question in split_questions]
    counts["fitting"] = sum(len(question.answers) for question in kept)
    check_not_empty(counts, "fitting", args)
    splits = split_by_date(kept, args.split_date)
    bounds = give_scores(splits, args.outliers)
    if policy is not None:
        generate_answers(kept, policy, tokenizer, args, skipped)

    for key, (label, _) in steps(args).items():
        print(f"{counts[key]:10,}  {label}")
    deleted = (f"{counts[f'{posts} by deleted users']:,} {posts}" for posts in ("questions", "answers"))
    print(f"\nkept posts by deleted users: {', '.join(deleted)}\n")
    may_lack = {f"comparisons.{split}": "no question has two answers with different scores" for split in splits}
    may_lack |= {f"unpaired.{split}": "every score is 0" for split in splits}
    with converted_files(args.out, args.source, tokenizer, skipped, firsts, may_lack=may_lack) as write:

        def save(split: str, question: Question, answers: dict[str, Answer], **target: float) -> None:
            """Write a row: answers by column, a score or label, and the query that leaves room for the longest."""
            query = query_for(question, list(answers.values()), tokenizer, args)
            texts = {column: answer.text for column, answer in answers.items()}
            row = {"query": query} | texts | target | {"meta": make_meta(question, answers)}
            write(split, row, "--max-length", args.max_length)

        for split, split_questions in splits.items():
            for question in split_questions:
                best, *worse = question.answers
                generated = [question.generated] if question.generated else []
                save(split, question, {"response": best})
                for answer in (best, *worse, *generated):
                    save(split, question, {"response": answer}, score=answer.score)
                    if answer.score == 0:
                        skipped["label: a score of 0"] += 1
                    else:
                        save(split, question, {"response": answer}, label=answer.score > 0)
                for answer in (*worse, *generated):
                    if answer.contrastive == best.contrastive:
                        skipped["pair: two answers with the same score"] += 1
                    else:
                        save(split, question, {"chosen": best, "rejected": answer})
    scaling = asdict(bounds) | {"outliers": args.outliers}
    write_text(args.out / "scaling.json", to_json(scaling, indent=2) + "\n")
    tokenizer.save(args.out)  # for models with random weights
    print(
        f"[SO alg 1] votes per answer: fences {bounds.low:.3g} and {bounds.high:.3g}, outermost inliers "
        f"{-bounds.largest_negative:.3g} and {bounds.largest_positive:.3g}"
    )


if __name__ == "__main__":
    run_module(main, Args)
