"""DailyDialog and the Cornell Movie-Dialogs Corpus, as published -> the JSON Lines that training reads.

    python -m data.dialogue --source ijcnlp_dailydialog --out runs/str/data
    python -m data.dialogue --source 'cornell movie-dialogs corpus' --out runs/str/data
    python -m data.dialogue --source dialogues_text.txt --out runs/str/data --vocab-size 2048

--source is a directory, unpacked, or a single file of dialogues:

    DailyDialog   dialogues_{train,validation,test}.txt, in folders or not, or dialogues_text.txt, which holds them all:
                  a dialogue a line, `__eou__` behind each turn
    Cornell       movie_conversations.txt and movie_lines.txt: fields with ` +++$+++ ` between; UTF-8 or Windows-1252

Every turn from the second on is the reply of a row of sft.{train,validation,test}.jsonl:

    query      `Dialogue:\\n{history}\\nReply:`; history is the --history turns before the reply, one a line
    response   the reply, behind a blank

Texts stay as published (DailyDialog has blanks before its commas, Cornell a few HTML tags), but white space becomes one
blank. The splits are those that a file or its folder is named after; Cornell and dialogues_text.txt have none. There,
and everywhere with --resplit, a seeded coin decides for a conversation's text: equal ones are on the same side.

Malformed lines stop the run. Rows that can't be used are left out and counted:
    - an empty reply; empty turns before it end its history, and there is no row without any
    - a last turn longer than --max-query-length; a longer history loses its oldest turns first
    - a reply longer than --max-response-length
So are conversations that name a line which movie_lines.txt doesn't have.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.prepare import in_validation, jsonl_files, length_table
from data.tldr import SPLITS, split_in_path
from nanorlhf.cli import run_module
from nanorlhf.dataset import response_ids
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

BEFORE, BEHIND = "Dialogue:\n", "\nReply:"  # [STR data] no blank behind the colon: the reply begins with it
PAPERS_TOKENIZER = "openai-community/gpt2"
END_OF_TURN, SEPARATOR = "__eou__", " +++$+++"  # its blank behind: an editor may have stripped it off an empty text
LABELS = ("dialogues_act", "dialogues_emotion", "dialogues_topic")  # DailyDialog's files of numbers
LINES, CONVERSATIONS = "movie_lines.txt", "movie_conversations.txt"


@dataclass(frozen=True, kw_only=True)
class Args:
    source: Path
    """directory of DailyDialog or of the Cornell corpus, or one file of dialogues"""
    out: Path = Path("runs/str/data")
    """directory of the JSON Lines and of tokenizer.json; files of the same name are replaced"""
    history: int = 3
    """[STR data] turns before the reply, at most"""
    tokenizer: str | None = None
    """directory, file or Hub id; the limits below count its tokens (None: GPT-2's, openai-community/gpt2)"""
    vocab_size: int | None = None
    """train a byte-level BPE of so many tokens on the train split instead"""
    max_query_length: int = 512
    """tokens; longer histories lose their oldest turns"""
    max_response_length: int = 100
    """tokens with EOS; longer replies are left out"""
    validation_share: float = 0.1
    """share of the conversations, where the source has no splits"""
    resplit: bool = False
    """draw train and validation by --validation-share, whatever the source says"""
    seed: int = 1
    """of those splits"""


@dataclass(frozen=True)
class Conversation:
    id: str
    turns: list[str]
    published: str | None  # split


# ----------------------------------------------------------------------------------------- 1. conversations as they lie
def read_lines(path: Path, encodings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The lines of a file, each with its place, in the first of the encodings that it makes sense in."""
    with path.open("rb") as file:  # bytes: a line ends in LF or CRLF, and not at a lone carriage return or U+0085
        lines = tqdm(file, desc=path.name, unit=" lines", disable=None, leave=False)
        for number, line in enumerate(lines, start=1):
            for encoding in encodings:
                try:
                    text = line.decode(encoding).removeprefix("\ufeff" if number == 1 else "").rstrip("\r\n")
                    break
                except UnicodeDecodeError as error:
                    mistake = error
            else:
                raise InputError(f"{path}:{number}: not UTF-8 (byte {mistake.start}): convert the file to UTF-8.")
            if not text.strip():
                raise InputError(f"{path}:{number}: the line is blank: delete it.")
            yield f"{path}:{number}", text


def one_blank(text: str) -> str:
    return " ".join(text.split())


def read_dailydialog(path: Path, inside: str) -> Iterator[Conversation]:
    """The dialogues of a file; `inside` is its path in the source, which may name the split."""
    for where, line in read_lines(path, ("utf-8",)):
        *turns, rest = line.split(END_OF_TURN)
        if rest.strip():
            raise InputError(f"{where}: no {END_OF_TURN} behind the last turn: complete or delete the line.")
        name = f"{path.stem}:{where.rpartition(':')[2]}"
        yield Conversation(name, [one_blank(turn) for turn in turns], split_in_path(inside))


def fields_of(line: str, num_fields: int, where: str) -> list[str]:
    fields = [text.removeprefix(" ") for text in line.split(SEPARATOR)]
    if len(fields) != num_fields:
        raise InputError(
            f"{where}: {len(fields)} fields, not {num_fields}, with {SEPARATOR.strip()!r} between: mend the line."
        )
    return fields


def read_cornell(directory: Path, left_out: Counter[str]) -> Iterator[Conversation]:
    """The corpus's conversations, in the order of time that movie_conversations.txt gives their lines."""
    for name in (LINES, CONVERSATIONS):
        if not (directory / name).is_file():
            raise InputError(f"--source {directory} holds no {name}: the conversations need both files of the corpus.")
    # Windows-1252 leaves five bytes undefined, which are control characters in ISO-8859-1
    encodings = ("utf-8", "cp1252", "latin-1")
    texts: dict[str, str] = {}
    for where, line in read_lines(directory / LINES, encodings):
        line_id, *_, text = fields_of(line, 5, where)
        if line_id in texts:
            raise InputError(f"{where}: {line_id} stands above already: delete one of the two lines.")
        texts[line_id] = one_blank(text)
    for where, line in read_lines(directory / CONVERSATIONS, encodings):
        *_, movie, listed = fields_of(line, 4, where)
        try:
            line_ids = ast.literal_eval(listed)
        except (ValueError, SyntaxError):
            line_ids = None
        if not (isinstance(line_ids, list) and line_ids and all(isinstance(line_id, str) for line_id in line_ids)):
            raise InputError(f"{where}: the last field must be a list such as ['L194', 'L195']: mend the line.")
        if all(line_id in texts for line_id in line_ids):
            yield Conversation(f"{movie}:{line_ids[0]}", [texts[line_id] for line_id in line_ids], None)
        else:
            left_out[f"a conversation that names a line which {LINES} doesn't have"] += 1


def read_conversations(source: Path, left_out: Counter[str]) -> list[Conversation]:
    """All conversations of --source, whichever of the two corpora it is."""
    if not source.exists():
        raise InputError(f"--source {source}: no such file or directory: name the unpacked corpus.")
    if source.is_file():
        if source.name in (LINES, CONVERSATIONS):
            raise InputError(f"--source {source}: name its directory: {LINES} and {CONVERSATIONS} belong together.")
        if source.name.startswith(LABELS):
            raise InputError(f"--source {source} holds labels, not dialogues: name a file such as dialogues_train.txt.")
        return list(read_dailydialog(source, source.name))
    if any((source / name).is_file() for name in (LINES, CONVERSATIONS)):
        return list(read_cornell(source, left_out))
    files = {
        path: path.relative_to(source).as_posix()
        for path in sorted(source.rglob("dialogues_*.txt"))
        if not path.name.startswith(LABELS)
    }
    if not files:
        raise InputError(f"--source {source} holds neither dialogues_*.txt nor {LINES}: name the unpacked corpus.")
    if any(split_in_path(inside) for inside in files.values()):  # dialogues_text.txt holds the same once more
        for path in [path for path, inside in files.items() if split_in_path(inside) is None]:
            left_out[f"file {files.pop(path)}: the files of the splits hold its dialogues"] += 1
    return [conversation for path, inside in files.items() for conversation in read_dailydialog(path, inside)]


# -------------------------------------------------------------------------------------------------------------- 2. rows
def make_query(history: list[str], tokenizer: Tokenizer, limit: int) -> str | None:
    """The template around as many of the last turns as fit in `limit` tokens; None if not even one does."""
    for start in range(len(history)):
        query = BEFORE + "\n".join(history[start:]) + BEHIND
        if len(tokenizer.encode(query)) <= limit:
            return query
    return None


def make_rows(
    splits: dict[str, list[Conversation]], tokenizer: Tokenizer, args: Args, left_out: Counter[str]
) -> Iterator[tuple[str, dict]]:
    """Split and row of each reply."""
    for split, conversations in splits.items():
        for conversation in conversations:
            turns = conversation.turns
            for turn in range(1, len(turns)):
                history = turns[max(0, turn - args.history) : turn]  # [STR data]
                while "" in history:
                    history = history[history.index("") + 1 :]
                if not turns[turn]:
                    left_out["an empty reply"] += 1
                elif not history:
                    left_out["an empty turn before the reply"] += 1
                elif (query := make_query(history, tokenizer, args.max_query_length)) is None:
                    left_out[f"a last turn longer than --max-query-length {args.max_query_length}"] += 1
                else:
                    meta = {"id": f"{conversation.id}:{turn}", "split": conversation.published}
                    yield split, {"query": query, "response": " " + turns[turn], "meta": meta}


# --------------------------------------------------------------------------------------- 3. the files; data.squad's too
def check(args: Any) -> None:
    """What can't be, before a long file is read. `args` has the settings that both modules have."""
    for flag in ("max_query_length", "max_response_length"):
        if getattr(args, flag) < 1:
            raise InputError(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1.")
    if args.vocab_size is not None and args.vocab_size < 300:
        raise InputError(f"--vocab-size {args.vocab_size}: must be at least 300, 256 of which are the bytes.")
    if args.vocab_size is not None and args.tokenizer:
        raise InputError("--vocab-size trains a tokenizer, --tokenizer brings one: leave one of the two out.")
    if not 0 <= args.validation_share <= 1:
        raise InputError(f"--validation-share {args.validation_share}: must lie between 0 and 1.")


def split_of(published: str | None, key: str, args: Any) -> str:
    if published is not None and not args.resplit:
        return SPLITS[published]
    return "validation" if in_validation(key, args.validation_share, args.seed) else "train"


def train_bpe(texts: list[str], args: Any) -> Tokenizer:
    if not texts:
        raise InputError(f"--vocab-size: {args.source} has no train split to train on: --resplit draws one.")
    return train_tokenizer(texts, args.vocab_size)


def write_demonstrations(
    rows: Iterable[tuple[str, dict]], tokenizer: Tokenizer, args: Any, left_out: Counter[str]
) -> None:
    """Write the rows whose response isn't too long to the files of their splits, and print lengths and counts."""
    lengths: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)  # (file, column) -> how often which length
    written: Counter[str] = Counter()
    with jsonl_files(args.out) as write:
        for split, row in rows:
            query_length = len(tokenizer.encode(row["query"]))
            response_length = len(response_ids(row["query"], row["response"], tokenizer))
            if response_length > args.max_response_length:
                left_out[f"a response longer than --max-response-length {args.max_response_length}"] += 1
                continue
            name = f"sft.{split}"
            write(name, row)
            written[name] += 1
            lengths[name, "query"][query_length] += 1
            lengths[name, "response"][response_length] += 1
            lengths[name, "query+response"][query_length + response_length] += 1
        if not written:
            reasons = "; ".join(f"{count} x {reason}" for reason, count in left_out.items()) or "it holds none"
            raise InputError(f"--source {args.source}: no row could be made ({reasons}): nothing was written.")
    tokenizer.save(args.out)  # so that a model with random weights finds it there

    print(length_table(lengths))
    print("\nleft out")
    for reason, count in sorted(left_out.items()):
        print(f"  {count:7}  {reason}")
    if not left_out:
        print("        0  nothing")
    print(f"\nwritten: {args.out}: " + ", ".join(f"{name}.jsonl ({written[name]})" for name in sorted(written)))
    for name in ("sft.train", "sft.validation"):
        if name not in written:
            print(f"note: no {name}.jsonl, the source has no such split: --resplit draws one.")


def main(args: Args) -> None:
    check(args)
    if args.history < 1:
        raise InputError(f"--history {args.history}: must be at least 1.")
    # a tokenizer that is missing is found out before the long read
    tokenizer = None if args.vocab_size else load_tokenizer(args.tokenizer or PAPERS_TOKENIZER)
    left_out: Counter[str] = Counter()
    splits: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in read_conversations(args.source, left_out):
        splits[split_of(conversation.published, "\n".join(conversation.turns), args)].append(conversation)
    if tokenizer is None:
        turns = (conversation.turns for conversation in splits["train"])
        tokenizer = train_bpe([BEFORE + "\n".join(t) + BEHIND + " " + t[-1] for t in turns], args)
    write_demonstrations(make_rows(splits, tokenizer, args, left_out), tokenizer, args, left_out)


if __name__ == "__main__":
    run_module(main, Args)
