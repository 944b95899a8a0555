"""DailyDialog and the Cornell Movie-Dialogs Corpus, as published -> sft.jsonl. [STR data]

    python -m data.dialogue --source ijcnlp_dailydialog --out runs/str/data
    python -m data.dialogue --source 'cornell movie-dialogs corpus' --out runs/str/data
    python -m data.dialogue --source dialogues_text.txt --out runs/str/data --vocab-size 2048

--source is an unpacked directory or a single file of dialogues:

    DailyDialog   dialogues_{train,validation,test}.txt, possibly in subdirectories, or dialogues_text.txt, which
                  contains all of them: one dialogue per line, `__eou__` after each turn
    Cornell       movie_conversations.txt and movie_lines.txt: fields separated by ` +++$+++ `; UTF-8 or Windows-1252

Each turn except the first becomes the response of a row of sft.{train,validation,test}.jsonl:

    query      `Dialogue:\\n{history}\\nReply:`; the history is the last --history turns before the reply, one per line
    response   a space and the reply

Texts stay as published (DailyDialog has spaces before its commas, Cornell a few HTML tags), except that runs of
whitespace become one space. The split is read from the name of a file or its directory. Cornell and dialogues_text.txt
have no splits: for these, and with --resplit, a seeded hash of the conversation's text decides, so equal conversations
are in the same split.

A history that is too long loses its oldest turns; a history with an empty turn loses all turns up to it. Unusable
replies are skipped, and the reasons printed. Malformed lines are an error.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data import prepare
from nanorlhf.cli import PositiveInt, check_ranges, run_module
from nanorlhf.errors import InputError
from nanorlhf.files import read_lines
from nanorlhf.progress import Progress
from nanorlhf.tokenizer import Tokenizer, load_tokenizer

BEFORE, AFTER = "Dialogue:\n", "\nReply:"  # [STR data] no space after the colon: the response starts with it
PAPERS_TOKENIZER = "openai-community/gpt2"
END_OF_TURN = "__eou__"
LINE_ID = re.compile("'[^'\"\\s]+'|\"[^'\"\\s]+\"")
SEPARATOR = " +++$+++"  # without the space after it, which editors strip if the last field is empty
LABELS = ("dialogues_act", "dialogues_emotion", "dialogues_topic")  # DailyDialog's annotations
LINES, CONVERSATIONS = "movie_lines.txt", "movie_conversations.txt"


@dataclass(frozen=True, kw_only=True)
class Args(prepare.SplitArgs):
    source: Path
    """directory of DailyDialog or the Cornell corpus, or a single file of dialogues"""
    out: Path = Path("runs/str/data")
    """directory for the JSON Lines and tokenizer.json; existing files are replaced"""
    history: PositiveInt = 3
    """[STR data] maximum turns before the reply"""
    tokenizer: str | None = None
    """directory, file or Hub id; the limits below count its tokens (None: openai-community/gpt2)"""
    vocab_size: int | None = None
    """train a byte-level BPE of this size on the train split instead"""
    max_query_length: PositiveInt = 512
    """tokens; longer histories lose their oldest turns"""
    max_response_length: PositiveInt = 100
    """tokens including EOS; longer replies are skipped"""


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: list[str]
    published: str | None  # split


# ---------------------------------------------------------------------------------------------------- 1. conversations
def decoded_lines(path: Path, encodings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (location, line), decoding each line with the first encoding that works."""
    # lines end in LF or CRLF, not at a lone carriage return or U+0085
    for number, line in Progress(read_lines(path), desc=path.name, unit=" lines", leave=False):
        for encoding in encodings:
            try:
                text = line.decode(encoding).removeprefix("\ufeff" if number == 1 else "").rstrip("\r\n")
                break
            except UnicodeDecodeError as error:
                failure = error
        else:
            raise InputError(f"{path}:{number}: not UTF-8 (byte {failure.start}).")
        if not text.strip():
            raise InputError(f"{path}:{number}: the line is blank.")
        yield f"{path}:{number}", text


def collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def read_dailydialog(path: Path, relative_path: str) -> Iterator[Conversation]:
    """Yield the dialogues of a file; its relative path may name the split."""
    for where, line in decoded_lines(path, ("utf-8",)):
        *turns, rest = line.split(END_OF_TURN)
        if rest.strip():
            raise InputError(f"{where}: no {END_OF_TURN} after the last turn.")
        name = f"{path.stem}:{where.rpartition(':')[2]}"
        yield Conversation(name, [collapse_whitespace(turn) for turn in turns], prepare.split_in_path(relative_path))


def split_fields(line: str, num_fields: int, where: str) -> list[str]:
    fields = [text.removeprefix(" ") for text in line.split(SEPARATOR)]
    if len(fields) != num_fields:
        raise InputError(
            f"{where}: expected {num_fields} fields separated by {SEPARATOR.strip()!r}, got {len(fields)}."
        )
    return fields


def read_cornell(directory: Path, skipped: Counter[str]) -> Iterator[Conversation]:
    """Yield the conversations of the corpus; movie_conversations.txt lists the lines of each."""
    for name in (LINES, CONVERSATIONS):
        if not (directory / name).is_file():
            raise InputError(f"--source {directory} has no {name}; both files of the corpus are needed.")
    # five bytes are undefined in Windows-1252 but control characters in ISO-8859-1
    encodings = ("utf-8", "cp1252", "latin-1")
    texts: dict[str, str] = {}
    for where, line in decoded_lines(directory / LINES, encodings):
        line_id, *_, text = split_fields(line, 5, where)
        if line_id in texts:
            raise InputError(f"{where}: duplicate line id {line_id}.")
        texts[line_id] = collapse_whitespace(text)
    for where, line in decoded_lines(directory / CONVERSATIONS, encodings):
        *_, movie, listed = split_fields(line, 4, where)
        line_ids = LINE_ID.findall(listed)
        if not line_ids or "".join(listed.split()) != f"[{','.join(line_ids)}]":
            raise InputError(f"{where}: the last field must be a list such as ['L194', 'L195'].")
        line_ids = [line_id.strip("\"'") for line_id in line_ids]
        if all(line_id in texts for line_id in line_ids):
            yield Conversation(f"{movie}:{line_ids[0]}", [texts[line_id] for line_id in line_ids], None)
        else:
            skipped[f"a conversation with a line that is missing from {LINES}"] += 1


def read_conversations(source: Path, skipped: Counter[str]) -> list[Conversation]:
    """Return all conversations of --source, which is one of the two corpora."""
    if not source.exists():
        raise InputError(f"--source {source} does not exist.")
    if source.is_file():
        if source.name in (LINES, CONVERSATIONS):
            raise InputError(f"--source {source}: pass its directory; {LINES} and {CONVERSATIONS} are both needed.")
        if source.name.startswith(LABELS):
            raise InputError(f"--source {source} contains labels, not dialogues.")
        return list(read_dailydialog(source, source.name))
    if any((source / name).is_file() for name in (LINES, CONVERSATIONS)):
        return list(read_cornell(source, skipped))
    files = {
        path: path.relative_to(source).as_posix()
        for path in sorted(source.rglob("dialogues_*.txt"))
        if not path.name.startswith(LABELS)
    }
    if not files:
        raise InputError(f"--source {source} has neither dialogues_*.txt nor {LINES}.")
    if any(prepare.split_in_path(relative_path) for relative_path in files.values()):
        for path in [path for path, relative_path in files.items() if prepare.split_in_path(relative_path) is None]:
            skipped[f"file {files.pop(path)}: the split files contain the same dialogues"] += 1
    return [conversation for path, name in files.items() for conversation in read_dailydialog(path, name)]


# -------------------------------------------------------------------------------------------------------------- 2. rows
def make_query(history: list[str], tokenizer: Tokenizer, limit: int) -> str | None:
    """Fill the template with as many of the last turns as fit in `limit` tokens; None if not even one fits."""

    def query(start: int) -> str:
        return BEFORE + "\n".join(history[start:]) + AFTER

    start = prepare.first_fit(range(len(history)), lambda start: len(tokenizer.encode(query(start))) <= limit)
    return None if start is None else query(start)


def make_rows(
    splits: dict[str, list[Conversation]], tokenizer: Tokenizer, num_turns: int, limit: int, skipped: Counter[str]
) -> Iterator[tuple[str, dict]]:
    """Yield (split, row) for each reply, with a history of at most `num_turns` turns and `limit` tokens."""
    for split, conversations in splits.items():
        for conversation in conversations:
            turns = conversation.turns
            for turn in range(1, len(turns)):
                history = turns[max(0, turn - num_turns) : turn]  # [STR data]
                while "" in history:
                    history = history[history.index("") + 1 :]
                if not turns[turn]:
                    skipped["an empty reply"] += 1
                elif not history:
                    skipped["an empty turn right before the reply"] += 1
                elif (query := make_query(history, tokenizer, limit)) is None:
                    skipped[f"a last turn longer than --max-query-length {limit}"] += 1
                else:
                    meta = {"id": f"{conversation.id}:{turn}", "split": conversation.published}
                    yield split, {"query": query, "response": " " + turns[turn], "meta": meta}


# ------------------------------------------------------------------------------------------------------------ 3. files
def main(args: Args) -> None:
    check_ranges(args)
    prepare.check_vocab_size(args.vocab_size, args.tokenizer and "--tokenizer")
    # loaded first to report a missing tokenizer before reading the corpus
    tokenizer = None if args.vocab_size else load_tokenizer(args.tokenizer or PAPERS_TOKENIZER)
    skipped: Counter[str] = Counter()
    splits: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in read_conversations(args.source, skipped):
        text = "\n".join(conversation.turns)
        split = prepare.choose_split(conversation.published, text, args)
        splits[split].append(conversation)
    if tokenizer is None:
        turns = (conversation.turns for conversation in splits["train"])
        texts = [BEFORE + "\n".join(t) + AFTER + " " + t[-1] for t in turns]
        tokenizer = prepare.train_bpe(texts, args.vocab_size, args.source)
    rows = make_rows(splits, tokenizer, args.history, args.max_query_length, skipped)
    with prepare.converted_files(args.out, args.source, tokenizer, skipped) as write:
        for split, row in rows:
            write(split, row, "--max-response-length", args.max_response_length)
    tokenizer.save(args.out)  # for models with random weights


if __name__ == "__main__":
    run_module(main, Args)
