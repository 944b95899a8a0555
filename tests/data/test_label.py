"""Labelling in the terminal: keys, saving and resuming, and the arrays that evaluation reads."""

import json
from dataclasses import replace

import numpy as np
import pytest

from data import label
from data.label import Args
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.stackoverflow.labels import load_labels
from tests.helpers.jsonl import read_jsonl


def rows(num_questions=3, n=2):
    return [
        {
            "query": f"question {i}",
            "policies": {name: [{"response": f"{name} {i} {j}"} for j in range(n)] for name in ("sft", "ppo")},
        }
        for i in range(num_questions)
    ]


@pytest.fixture
def args(tmp_path) -> Args:
    write_jsonl(tmp_path / "samples.jsonl", rows())
    return Args(samples=tmp_path / "samples.jsonl", out=tmp_path / "labels.jsonl")


def press(monkeypatch, keys: str) -> list[str]:
    """Type each key as a line, then end the input; return the prompts."""
    pending, prompts = list(keys), []

    def read(prompt):
        prompts.append(prompt)
        if not pending:
            raise EOFError
        return pending.pop(0)

    monkeypatch.setattr("builtins.input", read)
    return prompts


def test_every_answer_is_labelled_once_in_the_order_shown(args, monkeypatch, capsys):
    press(monkeypatch, "yn" * 6)
    label.main(args)
    labels = read_jsonl(args.out, {"query": str, "policy": str, "index": int, "useful": bool})
    assert len({(row["query"], row["policy"], row["index"]) for row in labels}) == len(labels) == 12
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("sft ", "ppo "))]
    assert [row["response"] for row in labels] == shown and [row["useful"] for row in labels] == [True, False] * 6
    for i in range(0, 12, 4):  # a question's answers are consecutive, its policies mixed
        assert len({row["query"] for row in labels[i : i + 4]}) == 1
    assert "policy" not in "".join(shown)


def test_quitting_loses_nothing_and_the_same_command_resumes(args, monkeypatch):
    press(monkeypatch, "yyyq")
    label.main(args)
    first = read_jsonl(args.out, {})
    assert len(first) == 3
    press(monkeypatch, "n" * 9)
    label.main(args)
    labels = read_jsonl(args.out, {})
    assert labels[:3] == first and len(labels) == 12 and not any(row["useful"] for row in labels[3:])


def test_back_changes_a_label_skip_removes_it_and_other_keys_do_nothing(args, monkeypatch, capsys):
    press(monkeypatch, "yx" + "bn" + "y" + "bs")
    label.main(args)
    labels = read_jsonl(args.out, {})
    assert [row["useful"] for row in labels] == [False]
    assert "unknown key 'x'" in capsys.readouterr().out


def test_more_questions_include_the_questions_of_a_smaller_number(args, monkeypatch):
    press(monkeypatch, "y" * 4)
    label.main(replace(args, num_questions=1))
    [query] = {row["query"] for row in read_jsonl(args.out, {})}
    press(monkeypatch, "n" * 8)
    label.main(replace(args, num_questions=3))
    labels = read_jsonl(args.out, {})
    assert len(labels) == 12 and all(row["useful"] == (row["query"] == query) for row in labels)


def test_labels_become_arrays_with_nan_for_missing_labels(args, monkeypatch):
    press(monkeypatch, "ynynyn")
    label.main(args)
    table = load_labels(args.out, rows())
    assert set(table) == {"sft", "ppo"} and table["sft"].shape == (3, 2)
    assert sum(np.isnan(column).sum() for column in table.values()) == 6
    for row in read_jsonl(args.out, {}):
        assert table[row["policy"]][int(row["query"].split()[1]), row["index"]] == row["useful"]


def test_control_characters_in_a_sample_do_not_reach_the_terminal(tmp_path, monkeypatch, capsys):
    samples = rows(1, 1)
    samples[0]["policies"]["sft"][0]["response"] = "\x1b[2Jwiped \x07"
    write_jsonl(tmp_path / "samples.jsonl", samples)
    press(monkeypatch, "yy")
    label.main(Args(samples=tmp_path / "samples.jsonl", out=tmp_path / "labels.jsonl"))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "wiped" in out


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"query": "question 0", "policy": "sft", "index": 0, "response": "another", "useful": True}, "this answer"),
        ({"query": "question 0", "policy": "sft", "index": 0, "response": "sft 0 0", "useful": 1}, "'useful' must be"),
        ({"query": "question 0", "policy": "sft"}, "'index' is missing"),
    ],
)
def test_labels_of_other_samples_are_rejected(args, line, sentence):
    args.out.write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match=f"labels.jsonl:1: .*{sentence}"):
        label.main(args)


def test_a_duplicate_label_is_rejected(args, monkeypatch):
    press(monkeypatch, "y")
    label.main(args)
    args.out.write_text(args.out.read_text() * 2)
    with pytest.raises(InputError, match="labels.jsonl:2: this answer already has a label"):
        load_labels(args.out, rows())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"num_questions": 0}, "--num-questions 0"), ({"seed": -1}, "--seed -1")],
)
def test_impossible_settings_are_rejected(args, change, sentence):
    with pytest.raises(InputError, match=sentence):
        label.main(replace(args, **change))


def test_samples_with_differing_policies_are_rejected(args):
    broken = rows()
    del broken[2]["policies"]["ppo"]
    write_jsonl(args.samples, broken)
    with pytest.raises(InputError, match="samples.jsonl:3: expected the same number of answers per policy"):
        label.main(args)
