"""SQuAD 2.0, as published -> sft.jsonl. [STR data]

    python -m data.squad --source DIR --out runs/str/data
    python -m data.squad --source train-v2.0.json --resplit --out runs/str/data --vocab-size 2048

--source has train-v2.0.json and dev-v2.0.json: articles with paragraphs, and questions about each paragraph. A question
becomes a row of sft.{train,validation}.jsonl:

    query      `Context: {context}\\nQuestion: {question}\\nAnswer:`
    response   a space and the first answer, or `unanswerable`
    meta       id, title, published split, is_impossible, and the distinct answers, [] if the question is impossible

The split is read from the file name (train, dev). Without such a name, or with --resplit, a seeded hash of the
article's title decides, so all questions about an article are in the same split.

A query that is too long loses whole sentences at the end of its context, but never an answer. Unusable questions, such
as the unlabelled ones of the test sets, are skipped, and the reasons printed. Malformed records are an error.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data import prepare
from nanorlhf.cli import PositiveInt, check_ranges, run_module
from nanorlhf.dataset import field, filled
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

BEFORE, BETWEEN, AFTER = "Context: ", "\nQuestion: ", "\nAnswer:"  # [STR data]
UNANSWERABLE = " unanswerable"  # [STR data]
PAPERS_TOKENIZER = "openai-community/gpt2"
SPLIT_WORDS = {"train": "train", "dev": "validation", "validation": "validation", "test": "test"}


@dataclass(frozen=True, kw_only=True)
class Args(prepare.SourceArgs, prepare.SplitArgs):
    out: Path = Path("runs/str/data")
    """directory for the JSON Lines and tokenizer.json; existing files are replaced"""
    tokenizer: str | None = None
    """directory, file or Hub id; the limits below count its tokens (None: openai-community/gpt2)"""
    vocab_size: int | None = None
    """train a byte-level BPE of this size on the train split instead"""
    max_query_length: PositiveInt = 512
    """tokens; longer contexts lose sentences at the end"""
    max_response_length: PositiveInt = 100
    """tokens including EOS; longer answers are skipped"""


@dataclass(frozen=True)
class Question:
    id: str
    title: str
    context: str
    text: str
    answers: list[tuple[int, str]]  # (start in the context, text); empty: the question is impossible
    published: str | None  # split

    @property
    def response(self) -> str:
        return f" {self.answers[0][1].strip()}" if self.answers else UNANSWERABLE


# ---------------------------------------------------------------------------------------------------------- 1. records
def objects(record: dict, name: str, where: str) -> Iterator[tuple[str, dict]]:
    """Yield (location, object) for each object in the list `record[name]`."""
    for i, value in enumerate(field(record, name, list[dict], where)):
        yield f"{where} {name}[{i}]", value


def read_question(record: dict, where: str, title: str, context: str, published: str | None) -> Question | None:
    """Parse a question about a paragraph; None if it has no label."""
    question_id, text = field(record, "id", str, where), " ".join(filled(record, "question", where).split())
    answers = []
    for location, answer in objects(record, "answers", where):
        start, answer_text = field(answer, "answer_start", int, location), field(answer, "text", str, location)
        if not answer_text.strip() or start < 0 or not context.startswith(answer_text, start):
            raise InputError(f"{location}: the context doesn't have {answer_text!r} at {start}.")
        answers.append((start, answer_text))
    if "is_impossible" not in record and not answers:
        return None
    if "is_impossible" in record and field(record, "is_impossible", bool, where) == bool(answers):
        raise InputError(f"{where}: 'is_impossible' and 'answers' contradict each other.")
    return Question(question_id, title, context, text, answers, published)


def read_questions(args: Args, skipped: Counter[str]) -> Iterator[Question]:
    for path, _ in prepare.source_files(args):
        words = re.findall("[a-z]+", path.name.lower())
        published = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)
        for where, record in prepare.read_records(path):
            for article_at, article in objects(record, "data", where):
                title = field(article, "title", str, article_at)
                for paragraph_at, paragraph in objects(article, "paragraphs", article_at):
                    context = field(paragraph, "context", str, paragraph_at)
                    for question_at, fields in objects(paragraph, "qas", paragraph_at):
                        question = read_question(fields, question_at, title, context, published)
                        if question is None:
                            skipped["no label: neither answers nor is_impossible"] += 1
                        else:
                            yield question


# -------------------------------------------------------------------------------------------------------------- 2. rows
def make_query(question: Question, tokenizer: Tokenizer, limit: int) -> tuple[str | None, int]:
    """Fill the template with the first sentences of the context that fit in `limit` tokens.

    Return the query and the length of the context kept, or (None, 0) if nothing fits. Each attempt tokenises the full
    query, because a token may span two of its parts.
    """

    def query(end: int) -> str:
        return BEFORE + question.context[:end] + BETWEEN + question.text + AFTER

    def fits(end: int) -> bool:
        return len(tokenizer.encode(query(end))) <= limit

    if fits(end := len(question.context)):
        return query(end), end
    end = prepare.longest_fit([match.end() for match in prepare.SENTENCE_END.finditer(question.context)], fits)
    return (None, 0) if end is None else (query(end), end)


def make_rows(
    splits: dict[str, list[Question]], tokenizer: Tokenizer, limit: int, skipped: Counter[str]
) -> Iterator[tuple[str, dict]]:
    """Yield (split, row) for each usable question; limit: maximum tokens of a query."""
    for split, questions in splits.items():
        for question in questions:
            query, end = make_query(question, tokenizer, limit)
            if query is None:
                skipped[f"a first sentence too long for --max-query-length {limit}"] += 1
            elif any(start + len(text) > end for start, text in question.answers):
                skipped[f"an answer after the cut at --max-query-length {limit}"] += 1
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
    check_ranges(args)
    prepare.check_vocab_size(args.vocab_size, args.tokenizer and "--tokenizer")
    tokenizer = None if args.vocab_size else load_tokenizer(args.tokenizer or PAPERS_TOKENIZER)
    skipped: Counter[str] = Counter()
    splits: dict[str, list[Question]] = defaultdict(list)
    for question in read_questions(args, skipped):
        split = prepare.choose_split(question.published, question.title, args)
        splits[split].append(question)
    if tokenizer is None:  # a context counts once, however many questions share it
        contexts = dict.fromkeys(BEFORE + question.context for question in splits["train"])
        questions = (f"{BETWEEN}{question.text}{AFTER}{question.response}" for question in splits["train"])
        tokenizer = prepare.train_bpe([*contexts, *questions], args.vocab_size, args.source)
    rows = make_rows(splits, tokenizer, args.max_query_length, skipped)
    with prepare.converted_files(args.out, args.source, tokenizer, skipped) as write:
        for split, row in rows:
            write(split, row, "--max-response-length", args.max_response_length)
    tokenizer.save(args.out)  # for models with random weights


if __name__ == "__main__":
    run_module(main, Args)
