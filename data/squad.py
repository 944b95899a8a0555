"""SQuAD 2.0, as published -> the JSON Lines that training reads.

    python -m data.squad --source DIR --out runs/str/data
    python -m data.squad --source train-v2.0.json --resplit --out runs/str/data --vocab-size 2048

--source holds train-v2.0.json and dev-v2.0.json, articles of paragraphs of questions. Each question is a row of
sft.{train,validation}.jsonl:

    query      `Context: {context}\\nQuestion: {question}\\nAnswer:`
    response   behind a blank, the first of its answers, or `unanswerable`
    meta       id, title, the published split, is_impossible, answers: all different ones, [] if it is impossible

A file is of the split that its name says (train, dev); where it says none, and everywhere with --resplit, a seeded coin
decides for an article's title, so no article is on both sides.

A query that is too long loses whole sentences at the end of its context, never an answer. Broken records stop the run.
Questions that can't be used are left out and counted:
    - no label: neither answers nor is_impossible, as in the unlabelled test sets
    - a context that loses an answer when it is cut to --max-query-length, or whose first sentence is too long by itself
    - an answer longer than --max-response-length
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.dialogue import PAPERS_TOKENIZER, check, split_of, train_bpe, write_demonstrations
from data.prepare import read_records, source_files
from data.tldr import SENTENCE_END, longest_fit
from nanorlhf.cli import run_module
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

BEFORE, BETWEEN, BEHIND = "Context: ", "\nQuestion: ", "\nAnswer:"  # [STR data]
UNANSWERABLE = " unanswerable"  # [STR data]
SPLIT_WORDS = {"train": "train", "dev": "validation", "validation": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Args:
    source: str
    """file, directory or Hub dataset id"""
    out: Path = Path("runs/str/data")
    """directory of the JSON Lines and of tokenizer.json; files of the same name are replaced"""
    files: str = "*"
    """which files of a directory or Hub dataset: a pattern for their path in it, such as 'dev*'"""
    revision: str | None = None
    """branch or commit of a Hub dataset"""
    tokenizer: str | None = None
    """directory, file or Hub id; the limits below count its tokens (None: GPT-2's, openai-community/gpt2)"""
    vocab_size: int | None = None
    """train a byte-level BPE of so many tokens on the train split instead"""
    max_query_length: int = 512
    """tokens; longer contexts lose sentences at their end"""
    max_response_length: int = 100
    """tokens with EOS; longer answers are left out"""
    validation_share: float = 0.1
    """share of the articles, where a file's name says no split"""
    resplit: bool = False
    """draw train and validation by --validation-share, whatever the files' names say"""
    seed: int = 1
    """of those splits"""


@dataclass(frozen=True)
class Question:
    id: str
    title: str
    context: str
    text: str
    answers: list[tuple[int, str]]  # where each begins in the context; none: the question is impossible
    published: str | None  # split

    @property
    def response(self) -> str:
        return f" {self.answers[0][1].strip()}" if self.answers else UNANSWERABLE


# ----------------------------------------------------------------------------------------------- 1. records as they lie
def objects(record: dict, name: str, where: str) -> Iterator[tuple[str, dict]]:
    """The objects in the list `record[name]`, each with its place."""
    for i, value in enumerate(field(record, name, list, where)):
        if not isinstance(value, dict):
            raise InputError(f"{where}: {name}[{i}] must be an object, not {type(value).__name__}: mend the record.")
        yield f"{where} {name}[{i}]", value


def read_question(record: dict, where: str, title: str, context: str, published: str | None) -> Question | None:
    """A question of a paragraph; None if it has no label."""
    question_id, text = field(record, "id", str, where), " ".join(field(record, "question", str, where).split())
    if not text:
        raise InputError(f"{where}: the field 'question' is empty: fill it or delete the record.")
    answers = []
    for place, answer in objects(record, "answers", where):
        start, answer_text = field(answer, "answer_start", int, place), field(answer, "text", str, place)
        if not answer_text.strip() or start < 0 or not context.startswith(answer_text, start):
            raise InputError(f"{place}: {answer_text!r} doesn't stand at {start} of its context: mend the record.")
        answers.append((start, answer_text))
    if "is_impossible" not in record and not answers:
        return None
    if "is_impossible" in record and field(record, "is_impossible", bool, where) == bool(answers):
        raise InputError(f"{where}: 'is_impossible' and 'answers' contradict each other: mend the record.")
    return Question(question_id, title, context, text, answers, published)


def read_questions(args: Args, left_out: Counter[str]) -> Iterator[Question]:
    for path, _ in source_files(args.source, args.files, args.revision):
        words = re.findall("[a-z]+", path.name.lower())
        published = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
        for where, record in read_records(path):
            for article_place, article in objects(record, "data", where):
                title = field(article, "title", str, article_place)
                for place, paragraph in objects(article, "paragraphs", article_place):
                    context = field(paragraph, "context", str, place)
                    for question_place, found in objects(paragraph, "qas", place):
                        question = read_question(found, question_place, title, context, published)
                        if question is None:
                            left_out["no label: neither answers nor is_impossible"] += 1
                        else:
                            yield question


# -------------------------------------------------------------------------------------------------------------- 2. rows
def make_query(question: Question, tokenizer: Tokenizer, limit: int) -> tuple[str | None, int]:
    """The template around the whole sentences of the context that fit in `limit` tokens, and their end in it.

    None if not even the first one fits. The whole query is tokenised for each cut: tokens may span the seams.
    """

    def query(end: int) -> str:
        return BEFORE + question.context[:end] + BETWEEN + question.text + BEHIND

    def fits(end: int) -> bool:
        return len(tokenizer.encode(query(end))) <= limit

    if fits(end := len(question.context)):
        return query(end), end
    end = longest_fit([match.end() for match in SENTENCE_END.finditer(question.context)], fits)
    return (None, 0) if end is None else (query(end), end)


def make_rows(
    splits: dict[str, list[Question]], tokenizer: Tokenizer, args: Args, left_out: Counter[str]
) -> Iterator[tuple[str, dict]]:
    """Split and row of each question that stays."""
    for split, questions in splits.items():
        for question in questions:
            query, end = make_query(question, tokenizer, args.max_query_length)
            if query is None:
                left_out[f"a first sentence too long for --max-query-length {args.max_query_length}"] += 1
            elif any(start + len(text) > end for start, text in question.answers):
                left_out[f"an answer behind the cut at --max-query-length {args.max_query_length}"] += 1
            else:
                meta = {
                    "id": question.id,
                    "title": question.title,
                    "split": question.published,
                    "is_impossible": not question.answers,
                    "answers": list(dict.fromkeys(text for _, text in question.answers)),
                }
                yield split, {"query": query, "response": question.response, "meta": meta}


def main(args: Args) -> None:
    check(args)
    tokenizer = None if args.vocab_size else load_tokenizer(args.tokenizer or PAPERS_TOKENIZER)
    left_out: Counter[str] = Counter()
    splits: dict[str, list[Question]] = defaultdict(list)
    for question in read_questions(args, left_out):
        splits[split_of(question.published, question.title, args)].append(question)
    if tokenizer is None:  # each context once, though several questions share it
        contexts = dict.fromkeys(BEFORE + question.context for question in splits["train"])
        asked = (f"{BETWEEN}{question.text}{BEHIND}{question.response}" for question in splits["train"])
        tokenizer = train_bpe([*contexts, *asked], args)
    write_demonstrations(make_rows(splits, tokenizer, args, left_out), tokenizer, args, left_out)


if __name__ == "__main__":
    run_module(main, Args)
