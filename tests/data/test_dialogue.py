import ast
import re
from dataclasses import replace

import pytest

from data import dialogue
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.data.rows import read

TOKENIZER = train_tokenizer(["Dialogue:\nhello there\nhow are you ?\nReply: fine , and you ?"] * 3, 320)


@pytest.fixture
def args(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer")
    (tmp_path / "corpus").mkdir()
    return dialogue.Args(source=tmp_path / "corpus", out=tmp_path / "out", tokenizer=str(tmp_path / "tokenizer"))


def write(args, name, content):
    path = args.source / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def cornell(args, lines, conversations):
    """Write both files of the corpus from tuples of fields, with CRLF as published."""
    for name, rows in (("movie_lines.txt", lines), ("movie_conversations.txt", conversations)):
        write(args, name, b"".join(b" +++$+++ ".join(map(as_bytes, row)) + b"\r\n" for row in rows))


def as_bytes(field):
    return field if isinstance(field, bytes) else str(field).encode()


def convert(args):
    dialogue.main(args)
    return read(args.out)


def texts(rows):
    return [(row["query"], row["response"]) for row in rows]


# ---------------------------------------------------------------------------------------------------------- DailyDialog
def test_every_turn_from_the_second_on_answers_the_three_before_it(args):
    write(args, "test/dialogues_test.txt", "Hi .  __eou__ A ’ b __eou__ C __eou__ D __eou__ E\t! __eou__\n")
    write(args, "test/dialogues_act_test.txt", "1 1 1 1 1 \n")
    rows = convert(args)
    assert list(rows) == ["sft.test"]
    assert texts(rows["sft.test"]) == [
        ("Dialogue:\nHi .\nReply:", " A ’ b"),
        ("Dialogue:\nHi .\nA ’ b\nReply:", " C"),
        ("Dialogue:\nHi .\nA ’ b\nC\nReply:", " D"),
        ("Dialogue:\nA ’ b\nC\nD\nReply:", " E !"),
    ]
    assert rows["sft.test"][3]["meta"] == {"id": "dialogues_test:1:4", "split": "test"}
    assert texts(convert(replace(args, history=1))["sft.test"])[3] == ("Dialogue:\nD\nReply:", " E !")


def test_the_split_is_read_from_file_and_directory_names(args):
    for name in ("dialogues_train.txt", "validation/dialogues_validation.txt", "test/dialogues_test.txt"):
        write(args, name, f"{name} __eou__ yes __eou__\n")
    rows = convert(args)
    assert {name: row["query"].split("\n")[1] for name, [row] in rows.items()} == {
        "sft.train": "dialogues_train.txt",
        "sft.validation": "validation/dialogues_validation.txt",
        "sft.test": "test/dialogues_test.txt",
    }
    alone = replace(args, source=args.source / "dialogues_train.txt", out=args.out.parent / "alone")
    assert list(convert(alone)) == ["sft.train"]
    resplit = replace(args, resplit=True, validation_share=1.0, out=args.out.parent / "resplit")
    assert len(convert(resplit)["sft.validation"]) == 3


def test_the_combined_file_is_not_read_in_addition_to_the_split_files(args, capsys):
    write(args, "train/dialogues_train.txt", "a __eou__ b __eou__\n")
    write(args, "dialogues_text.txt", "a __eou__ b __eou__\n")
    assert texts(convert(args)["sft.train"]) == [("Dialogue:\na\nReply:", " b")]
    assert re.search(r"^ +1  file dialogues_text.txt: the split files contain", capsys.readouterr().out, re.M)


def test_equal_dialogues_are_in_the_same_split(args):
    lines = [f"question {i % 50} ? __eou__ yes __eou__ no __eou__" for i in range(200)]
    write(args, "dialogues_text.txt", "\n".join(lines))  # no newline at the end
    rows = convert(replace(args, validation_share=0.3))
    openings = {name: {row["query"].split("\n")[1] for row in split_rows} for name, split_rows in rows.items()}
    assert not openings["sft.train"] & openings["sft.validation"] and len(set.union(*openings.values())) == 50
    assert 5 <= len(openings["sft.validation"]) <= 25  # 15 expected, standard deviation 3.2
    assert sum(map(len, rows.values())) == 400


# -------------------------------------------------------------------------------------------------------------- Cornell
LINES = [  # in descending order, as published
    ("L12", "u1", "m0", "BEN", "No <u>way</u>.  Really."),
    ("L11", "u0", "m0", "ANNA", b"It\x92s caf\xe9 time\x85"),  # Windows-1252
    ("L10", "u1", "m0", "BEN", "Tea ça va?"),  # UTF-8
    ("L9", "u0", "m0", "ANNA", ""),
]


def test_cornell_lines_are_ordered_by_their_conversation(args):
    cornell(args, LINES, [("u0", "u1", "m0", "['L10', 'L11', 'L12']")])
    assert convert(replace(args, validation_share=0.0)) == {
        "sft.train": [
            {
                "query": "Dialogue:\nTea ça va?\nReply:",
                "response": " It’s café time…",
                "meta": {"id": "m0:L10:1", "split": None},
            },
            {
                "query": "Dialogue:\nTea ça va?\nIt’s café time…\nReply:",
                "response": " No <u>way</u>. Really.",
                "meta": {"id": "m0:L10:2", "split": None},
            },
        ]
    }


def test_an_empty_turn_is_not_a_reply_and_cuts_later_histories_short(args, capsys):
    cornell(args, LINES, [("u0", "u1", "m0", "['L10', 'L9', 'L11', 'L12']")])
    [row] = convert(replace(args, validation_share=0.0))["sft.train"]
    assert row["query"] == "Dialogue:\nIt’s café time…\nReply:"
    printed = capsys.readouterr().out
    assert re.search("^ +1  an empty reply$", printed, re.M)
    assert re.search("^ +1  an empty turn right before the reply$", printed, re.M)


def test_an_empty_text_without_its_trailing_space_is_still_a_line(args):
    cornell(args, LINES[:3], [("u0", "u1", "m0", "['L10', 'L11']")])
    with (args.source / "movie_lines.txt").open("ab") as file:
        file.write(b"L9 +++$+++ u0 +++$+++ m0 +++$+++ ANNA +++$+++\r\n")
    assert len(convert(replace(args, validation_share=0.0))["sft.train"]) == 1


def test_conversations_with_missing_lines_are_counted(args, capsys):
    cornell(args, LINES, [("u0", "u1", "m0", "['L10', 'L11']"), ("u0", "u1", "m0", "['L12', 'L13']")])
    assert len(convert(replace(args, validation_share=0.0))["sft.train"]) == 1
    assert re.search(r"^ +1  a conversation with a line that is missing from", capsys.readouterr().out, re.M)


# -------------------------------------------------------------------------------------------------------------- lengths
def test_a_long_history_loses_only_as_many_old_turns_as_needed():
    history = ["one two three", "hello there", "you ?"]
    queries = [f"Dialogue:\n{text}\nReply:" for text in ("\n".join(history), "hello there\nyou ?", "you ?")]
    for query, shorter in zip(queries, [*queries[1:], None], strict=True):
        length = len(TOKENIZER.encode(query))
        assert dialogue.make_query(history, TOKENIZER, length) == query
        assert dialogue.make_query(history, TOKENIZER, length - 1) == shorter


def test_a_row_with_a_last_turn_that_is_too_long_is_skipped_and_counted(args, capsys):
    write(args, "dialogues_train.txt", "hello __eou__ quite a few words in this one __eou__ you __eou__\n")
    length = len(TOKENIZER.encode("Dialogue:\nhello\nReply:"))
    [row] = convert(replace(args, max_query_length=length))["sft.train"]
    assert row["query"] == "Dialogue:\nhello\nReply:"
    assert f"1  a last turn longer than --max-query-length {length}\n" in capsys.readouterr().out


def test_a_reply_that_is_too_long_with_eos_is_skipped_and_counted(args, capsys):
    write(args, "dialogues_train.txt", "hello __eou__ fine and you __eou__ you __eou__\n")
    length = len(TOKENIZER.encode(" fine and you"))
    assert len(convert(replace(args, max_response_length=length + 1))["sft.train"]) == 2
    assert len(convert(replace(args, max_response_length=length))["sft.train"]) == 1
    assert f"1  a response longer than --max-response-length {length}\n" in capsys.readouterr().out


def test_a_tokenizer_is_trained_on_the_train_split(args):
    write(args, "dialogues_train.txt", "wibble wobble __eou__ wibble __eou__\n" * 9)
    write(args, "dialogues_test.txt", "quux quux __eou__ quux __eou__\n" * 9)
    convert(replace(args, tokenizer=None, vocab_size=300))
    tokenizer = load_tokenizer(args.out)
    assert len(tokenizer.encode(" wibble")) == 1 < len(tokenizer.encode(" quux"))
    (args.source / "dialogues_train.txt").unlink()
    with pytest.raises(InputError, match="--vocab-size: .* has no train split to train a tokenizer on: pass --resplit"):
        dialogue.main(replace(args, tokenizer=None, vocab_size=300))


# ------------------------------------------------------------------------------------------------------------ bad input
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("a __eou__ b __eou__\na __eou__ b\n", "2: no __eou__ after the last turn"),
        ("a __eou__ b __eou__\nplain text\n", "2: no __eou__"),
        ("a __eou__ b __eou__\n\n", "2: the line is blank"),
        (b"a __eou__ caf\xe9 __eou__\n", r"1: not UTF-8 \(byte 13\)"),
    ],
)
def test_a_malformed_dialogue_names_file_and_line_and_nothing_is_written(args, content, reason):
    write(args, "dialogues_train.txt", content)
    with pytest.raises(InputError, match=f"dialogues_train.txt:{reason}"):
        dialogue.main(args)
    assert not args.out.exists()


@pytest.mark.parametrize(
    ("lines", "conversations", "reason"),
    [
        ([("L1", "u0", "m0", "hi")], [], "movie_lines.txt:1: expected 5 fields separated by .*, got 4"),
        (LINES + [LINES[1]], [], "movie_lines.txt:5: duplicate line id L11"),
        (LINES, [("u0", "u1", "['L10', 'L11']")], "conversations.txt:1: expected 4 fields separated by .*, got 3"),
        (LINES, [("u0", "u1", "m0", "['L10', 'L11'")], "movie_conversations.txt:1: the last field must be a list"),
        (LINES, [("u0", "u1", "m0", "[10, 11]")], "movie_conversations.txt:1: the last field must be a list"),
        (LINES, [("u0", "u1", "m0", "['L7', 'L8']")], r"no usable rows \(1 x a conversation with a line"),
    ],
)
def test_a_malformed_corpus_names_file_and_line_and_nothing_is_written(args, lines, conversations, reason):
    cornell(args, lines, conversations)
    with pytest.raises(InputError, match=reason):
        dialogue.main(args)
    assert not args.out.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": "nowhere"}, "does not exist"),
        ({"source": "."}, r"has neither dialogues_\*.txt nor movie_lines.txt"),
        ({"source": "movie_lines.txt"}, "pass its directory"),
        ({"source": "dialogues_act.txt"}, "contains labels, not dialogues"),
        ({"history": 0}, "--history 0"),
        ({"max_query_length": 0}, "--max-query-length 0"),
        ({"validation_share": 1.5}, "--validation-share 1.5"),
        ({"vocab_size": 500}, "--vocab-size trains a tokenizer and --tokenizer names one"),
        ({"vocab_size": 200, "tokenizer": None}, "--vocab-size 200"),
    ],
)
def test_impossible_settings_are_rejected(args, change, reason):
    if "source" in change:
        change = {"source": args.source / change["source"]}
        if change["source"].suffix == ".txt":
            write(args, change["source"].name, "x\n")
    with pytest.raises(InputError, match=reason):
        dialogue.main(replace(args, **change))
    assert not args.out.exists()


def test_the_cornell_corpus_needs_both_files(args):
    write(args, "movie_lines.txt", "x\n")
    with pytest.raises(InputError, match="has no movie_conversations.txt"):
        dialogue.main(args)


# --------------------------------------------------------------------------------------------------------- real slices
@pytest.mark.slow
def test_real_dailydialog_has_a_row_per_turn_but_the_first(real_data, args):
    args = replace(args, source=real_data / "dailydialog", tokenizer=str(real_data / "tokenizers" / "gpt2"))
    rows = convert(replace(args, max_response_length=10_000))
    for split, num_dialogues in (("validation", 1000), ("test", 500)):
        lines = (args.source / split / f"dialogues_{split}.txt").read_text(encoding="utf-8").split("\n")[:-1]
        pairs = [
            (before.split(), after.split())
            for line in lines
            for before, after in zip(line.split("__eou__")[:-2], line.split("__eou__")[1:-1], strict=True)
        ]
        assert len(lines) == num_dialogues
        assert [(q.split("\n")[-2].split(), r.split()) for q, r in texts(rows[f"sft.{split}"])] == pairs
    assert {name: len(split_rows) for name, split_rows in rows.items()} == {"sft.validation": 7069, "sft.test": 3532}
    tokenizer = load_tokenizer(args.out)
    row = load_demonstrations(args.out / "sft.test.jsonl", tokenizer, 512, None)[0]
    assert row.query + row.response[:-1] == tokenizer.encode(row.record["query"] + row.record["response"])


@pytest.mark.slow
def test_real_cornell_has_a_row_per_line_but_first_and_empty_ones(real_data, args, capsys):
    args = replace(args, source=real_data / "cornell_movie_dialogs", tokenizer=str(real_data / "tokenizers" / "gpt2"))
    rows = convert(replace(args, max_response_length=10_000))
    words_by_line = {}
    for line in (args.source / "movie_lines.txt").read_bytes().decode().split("\r\n")[:-1]:
        line_id, _, _, _, text = line.split(" +++$+++ ")
        words_by_line[line_id] = text.split()
    expected, num_empty = [], 0
    for line in (args.source / "movie_conversations.txt").read_bytes().decode().split("\r\n")[:-1]:
        line_ids = ast.literal_eval(line.split(" +++$+++ ")[3])
        for before, after in zip(line_ids, line_ids[1:], strict=False):
            if words_by_line[before] and words_by_line[after]:
                expected.append((words_by_line[before], words_by_line[after]))
            else:
                num_empty += 1
    got = [(q.split("\n")[-2].split(), r.split()) for name in rows for q, r in texts(rows[name])]
    assert sorted(got) == sorted(expected)
    assert (len(words_by_line), len(expected), num_empty) == (23_692, 17_037, 2)
    assert 0.08 < len(rows["sft.validation"]) / len(expected) < 0.12
