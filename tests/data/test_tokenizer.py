"""data.tokenizer: from a file of texts to a tokenizer, and the documented commands from there to a trained policy."""

import json
import random
import re
import shlex

import pytest

from data import tokenizer as module
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import ROOT, read_metrics, run_program


def write_rows(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def demonstrations(count, seed):
    rng, rows = random.Random(seed), []
    for _ in range(count):
        a, b = rng.randrange(10), rng.randrange(10)
        answer = str(a + b)
        rows.append({"query": f"What is {a} plus {b}?\nAnswer:", "response": answer, "meta": {"answer": answer}})
    return rows


def test_texts_round_trip_and_common_words_are_one_token(tmp_path, capsys):
    pairs = [{"query": "What is zwölf?", "chosen": "a dozen", "rejected": "a zebrafish"}] * 9
    files = write_rows(tmp_path / "a.jsonl", demonstrations(50, 1)), write_rows(tmp_path / "b.jsonl", pairs)
    module.main(module.Args(data=files, vocab_size=300, out=tmp_path / "out"))
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.vocab_size == 300 and tokenizer.eos_id == 0 and tokenizer.pad_id == 300
    for text in ("What is zwölf?", "never seen: \N{SNOWMAN} <|endoftext|> [PAD]"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.eos_id not in ids and tokenizer.pad_id not in ids
    assert len(tokenizer.encode(" plus")) == 1 and len(tokenizer.encode(" zebrafish")) < 10
    printed = capsys.readouterr().out
    assert "300 ids and [PAD], from 59 rows" in printed
    lengths = map(int, re.search(r"--max-query-length (\d+) --max-response-length (\d+)", printed).groups())
    rows = load_demonstrations(files[0], tokenizer, *lengths)  # a longer one would be rejected
    assert len(rows) == 50 and rows[0].response[-1] == tokenizer.eos_id


def test_all_texts_of_a_row_are_read(tmp_path):
    """A word that occurs in just one field is one token."""
    words = {"query": "aaaaaaaa", "response": "bbbbbbbb", "chosen": "cccccccc", "rejected": "dddddddd"}
    path = write_rows(tmp_path / "a.jsonl", [words] * 20)
    module.main(module.Args(data=(path,), vocab_size=300, out=tmp_path / "out"))
    tokenizer = load_tokenizer(tmp_path / "out")
    assert [len(tokenizer.encode(text)) for text in ("aaaaaaaa", " bbbbbbbb", " cccccccc", " dddddddd")] == [1] * 4


def test_too_few_texts_give_fewer_ids_and_a_note(tmp_path, capsys):
    path = write_rows(tmp_path / "a.jsonl", [{"query": "ab", "response": "cd"}])
    module.main(module.Args(data=(path,), vocab_size=5000, out=tmp_path / "out"))
    size = load_tokenizer(tmp_path / "out").vocab_size
    assert size < 300 and f"the texts have too few merges: {size} ids instead of 5,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "changes", "sentence"),
    [
        ([{"query": "a", "response": "b"}, {"query": "a", "text": "b"}], {}, "rows.jsonl:2: no response"),
        ([{"response": "b"}], {}, "rows.jsonl:1: the field 'query' is missing"),
        ([{"query": "a", "response": 3}], {}, "rows.jsonl:1: the field 'response' must be str"),
        ([], {}, "rows.jsonl is empty"),
        ([{"query": "a", "response": "b"}], {"vocab_size": 256}, "--vocab-size 256: must be at least 300"),
        ([{"query": "a", "response": "b"}], {"vocab_size": 10**12}, "must be at most 1,048,576"),
        ([{"query": "a", "response": "b"}], {"data": ()}, "--data needs JSON Lines files"),
    ],
)
def test_bad_input_is_an_input_error_and_nothing_is_written(tmp_path, rows, changes, sentence):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    args = {"data": (path,), "vocab_size": 300, "out": tmp_path / "out"} | changes
    with pytest.raises(InputError, match=sentence):
        module.main(module.Args(**args))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_documented_commands_lead_from_a_file_to_a_trained_policy(tmp_path, monkeypatch, capsys):
    """Run the commands of docs/data.md, "Without a model", on sums of two digits."""
    section = (ROOT / "docs" / "data.md").read_text().split("### Without a model")[1]
    [code], [commands] = (re.findall(rf"```{kind}\n(.*?)```", section, re.S)[:1] for kind in ("python", "sh"))
    write_rows(tmp_path / "mine" / "sft.train.jsonl", demonstrations(400, 1))
    write_rows(tmp_path / "mine" / "sft.validation.jsonl", demonstrations(16, 2))
    (tmp_path / "my_answer.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    lines = [shlex.split(line) for line in commands.splitlines() if not line.startswith("#")]
    assert [line[1] for line in lines] == ["-m", "train_sft.py", "train_ppo.py", "eval.py"]
    for _, program, *arguments in lines:
        words = arguments if program == "-m" else [program, *arguments]
        run_program(*words)
    rows = read_metrics(tmp_path / "runs" / "mine" / "ppo")
    assert rows[-1]["reward/score"] > rows[0]["reward/score"]
    assert (tmp_path / "runs" / "mine" / "eval" / "report.html").exists()
