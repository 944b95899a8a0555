"""Ranking in the terminal: the answers shown, keys, saving and resuming."""

import json
import re
import sys
from dataclasses import replace

import pytest

from data import rank
from data.rank import Args, parse_order
from nanorlhf.cli import run_module
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.metrics.agreement import load_rankings
from tests.helpers.jsonl import read_jsonl


def row(number: int, num_answers: int = 7) -> dict:
    """Answers in an order other than the self-ranking's; the best is `rank 1`."""
    ranks = [(3 * i + number) % num_answers + 1 for i in range(num_answers)]
    return {
        "query": f"question {number}",
        "answers": [f"{number} rank {r}" for r in ranks],
        "weights": [1 + (num_answers - r) / 100 for r in ranks],
        "clusters": [0, 0, 1, 1, 2, 2, 3][:num_answers],
        "representatives": [0, 2, 4, 6],
    }


@pytest.fixture
def args(tmp_path) -> Args:
    write_jsonl(tmp_path / "self_rank.jsonl", [row(number) for number in range(3)])
    return Args(source=tmp_path / "self_rank.jsonl", out=tmp_path / "out" / "ana.jsonl", annotator="ana")


def answer(monkeypatch, *lines: str) -> list[str]:
    """Type each line, then end the input; return the prompts."""
    pending, prompts = list(lines), []

    def read(prompt):
        prompts.append(prompt)
        if not pending:
            raise EOFError
        return pending.pop(0)

    monkeypatch.setattr("builtins.input", read)
    return prompts


def shown(out: str) -> list[list[str]]:
    """Return the answers to each question in the order on screen."""
    return [re.findall(r"^\[\d\] (.*)$", screen, re.M) for screen in out.split("=" * 80)[1:]]


def saved(args: Args) -> list[dict]:
    return read_jsonl(args.out, {"query": str, "answers": list, "ranking": list, "annotator": str})


# -------------------------------------------------------------------------------------------------------- what is shown
def test_a_ranking_lists_the_answers_in_the_order_typed(args, monkeypatch, capsys) -> None:
    answer(monkeypatch, "2 1 4 3", "1,2,3,4", "4321")
    rank.main(args)
    orders = [[1, 0, 3, 2], [0, 1, 2, 3], [3, 2, 1, 0]]
    screens = shown(capsys.readouterr().out)
    rows = saved(args)
    for line, screen, order in zip(rows, screens, orders, strict=True):
        assert [line["answers"][index] for index in line["ranking"]] == [screen[i] for i in order]
        assert line["annotator"] == "ana"
    assert len({line["query"] for line in rows}) == 3
    assert [question.rankings["ana"] for question in load_rankings([args.out])] == [line["ranking"] for line in rows]


def test_the_answers_are_spread_over_the_self_ranking_and_stored_in_the_sources_order(args, monkeypatch) -> None:
    answer(monkeypatch, *["1234"] * 3)
    rank.main(args)
    for line in saved(args):
        number = int(line["query"].split()[1])
        assert sorted(line["answers"]) == [f"{number} rank {r}" for r in (1, 3, 5, 7)]
        assert line["answers"] == [text for text in row(number)["answers"] if text in line["answers"]]


def test_the_screen_hides_the_self_ranking_and_differs_between_annotators(args, monkeypatch, capsys) -> None:
    write_jsonl(args.source, [row(number) for number in range(200)])
    ranks = {}
    for annotator in ("ana", "ben"):
        answer(monkeypatch, *["1234"] * 200)
        rank.main(replace(args, num_questions=200, annotator=annotator, out=args.out.with_name(annotator)))
        ranks[annotator] = [[int(text.split()[-1]) for text in screen] for screen in shown(capsys.readouterr().out)]
    for screens in ranks.values():
        for position in range(4):  # the best answer is in each position about equally often
            assert 30 < sum(screen[position] == 1 for screen in screens) < 70
    assert sum(a == b for a, b in zip(*ranks.values(), strict=True)) < 30  # 1 in 24 by chance
    ours, theirs = (saved(replace(args, out=args.out.with_name(name))) for name in ranks)
    assert [(a["query"], a["answers"]) for a in ours] == [(b["query"], b["answers"]) for b in theirs]


def test_equal_answers_are_shown_once_and_questions_with_too_few_are_skipped(args, monkeypatch, capsys) -> None:
    few = {"query": "few", "answers": ["a", "b", "a ", "b", "c", "c"]}
    enough = {"query": "enough", "answers": ["a", "b", "a ", "", "c", "c"]}
    write_jsonl(args.source, [few, enough, enough])
    answer(monkeypatch, "1234")
    rank.main(args)
    out = capsys.readouterr().out
    assert "1 questions; 1 rows skipped with fewer than 4 different answers" in out and "(an empty answer)" in out
    assert [line["answers"] for line in saved(args)] == [["a", "b", "", "c"]]


def test_ranking_can_be_limited_to_representatives(args, monkeypatch) -> None:
    answer(monkeypatch, *["1234"] * 3)
    rank.main(replace(args, representatives=True))
    for line in saved(args):
        assert line["answers"] == row(int(line["query"].split()[1]))["answers"][::2]
        assert line["representatives"] is True


def test_control_characters_in_an_answer_do_not_reach_the_terminal(args, monkeypatch, capsys) -> None:
    write_jsonl(args.source, [{"query": "q\x07", "answers": ["\x1b[2Jwiped", "b", "c", "d"]}])
    answer(monkeypatch, "1234")
    rank.main(args)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and "wiped" in out


# ---------------------------------------------------------------------------------------------------------- the keys
def test_quitting_loses_nothing_and_the_same_command_resumes(args, monkeypatch) -> None:
    answer(monkeypatch, "1234", "q")
    rank.main(args)
    first = saved(args)
    answer(monkeypatch, "4321", "4321")
    rank.main(args)
    assert saved(args)[:1] == first and len(saved(args)) == 3
    prompts = answer(monkeypatch)
    rank.main(args)
    assert prompts == [] and len(saved(args)) == 3  # no questions left


def test_a_ranking_is_on_disk_before_the_next_question_is_asked(args, monkeypatch) -> None:
    counts = []

    def read(prompt):
        counts.append(len(saved(args)) if args.out.exists() else 0)
        if len(counts) == 3:
            raise KeyboardInterrupt
        return "1234"

    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(KeyboardInterrupt):
        rank.main(args)
    assert counts == [0, 1, 2] and len(saved(args)) == 2


def test_back_changes_a_ranking_and_skip_removes_it(args, monkeypatch) -> None:
    prompts = answer(monkeypatch, "b", "1234", "b", "2143", "3412", "b", "s")
    rank.main(args)
    assert prompts[3].startswith("order (now 1 2 3 4)?")
    assert len(saved(args)) == 1
    answer(monkeypatch, "b", "s")  # the next question without a ranking is the second
    rank.main(args)
    assert args.out.read_text() == ""
    answer(monkeypatch, "1234")
    rank.main(args)
    assert len(saved(args)) == 1


@pytest.mark.parametrize("typed", ["", "1 2 3", "1 1 2 3", "1 2 3 5", "0 1 2 3", "12345", "b a d c", "-1 2 3 4", "²13"])
def test_an_invalid_order_is_requested_again(args, monkeypatch, capsys, typed) -> None:
    answer(monkeypatch, typed, "4 3 2 1", "q")
    rank.main(args)
    assert "doesn't have each of 1 to 4 exactly once" in capsys.readouterr().out and len(saved(args)) == 1


def test_orders_can_be_written_in_three_ways() -> None:
    assert parse_order("2 1 4 3", 4) == parse_order("2,1, 4,3", 4) == parse_order("2143", 4) == [1, 0, 3, 2]


def test_more_questions_include_the_questions_of_a_smaller_number(args, monkeypatch) -> None:
    answer(monkeypatch, "1234")
    rank.main(replace(args, num_questions=1))
    first = saved(args)
    answer(monkeypatch, "4321", "4321")
    rank.main(replace(args, num_questions=3))
    assert saved(args)[:1] == first and len(saved(args)) == 3


# -------------------------------------------------------------------------------------------------------- bad input
def test_a_simulated_annotator_ranks_by_the_function_plus_individual_noise(args, tmp_path, capsys) -> None:
    (tmp_path / "truth.py").write_text("def score(query, answer):\n    return -int(answer.split()[-1])\n")
    simulated = replace(args, simulate=f"{tmp_path / 'truth.py'}:score", simulated_noise=0.0)
    rank.main(simulated)
    for row in saved(args):  # the answers are "0 rank 3": the best has the lowest number
        numbers = [int(row["answers"][index].split()[-1]) for index in row["ranking"]]
        assert numbers == sorted(numbers)
    rankings = {}
    for name in ("bea", "carl", "bea again"):
        noisy = replace(simulated, simulated_noise=5.0, annotator=name.split()[0], out=tmp_path / f"{name}.jsonl")
        rank.main(noisy)
        rankings[name] = [row["ranking"] for row in saved(noisy)]
    assert rankings["bea"] == rankings["bea again"] != rankings["carl"]
    assert len(load_rankings([tmp_path / "bea.jsonl", tmp_path / "carl.jsonl"])) == 3
    with pytest.raises(InputError, match="already has rankings"):
        rank.main(simulated)
    with pytest.raises(InputError, match="--simulate nothing.py:score: expected FILE.py:FUNCTION"):
        rank.main(replace(args, simulate="nothing.py:score", out=tmp_path / "new.jsonl"))
    for code, sentence in (
        ("def score(query): return 1", r"raises TypeError: score\(\) takes 1 positional argument"),
        ("def score(query, answer):\n    return {}['x']", ".*truth.py:2 raises KeyError: 'x'"),
        ("def score(query, answer): return 'good'", "must return a finite number, not 'good'"),
        ("def score(query, answer): return float('nan')", "must return a finite number, not nan"),
    ):
        (tmp_path / "truth.py").write_text(code)
        with pytest.raises(InputError, match=f"^--simulate .*truth.py:score.* {sentence}"):
            rank.main(replace(simulated, out=tmp_path / "new.jsonl"))
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"annotator": "ben"}, r"ana.jsonl:1: ranked by 'ana', not by 'ben'"),
        ({"num_answers": 3}, r"ana.jsonl:1: ranks other answers than these flags select"),
        ({"representatives": True}, r"ana.jsonl:1: ranks other answers than these flags select"),
    ],
)
def test_rankings_by_others_or_of_other_answers_are_rejected_and_kept(args, monkeypatch, change, sentence) -> None:
    answer(monkeypatch, "1234")
    rank.main(args)
    before = args.out.read_bytes()
    with pytest.raises(InputError, match=sentence):
        rank.main(replace(args, **change))
    assert args.out.read_bytes() == before


def test_duplicate_and_damaged_rankings_are_rejected(args, monkeypatch) -> None:
    answer(monkeypatch, "1234")
    rank.main(args)
    once = args.out.read_text()
    args.out.write_text(once * 2)
    with pytest.raises(InputError, match=r"ana.jsonl:2: duplicate ranking of this question"):
        rank.main(args)
    args.out.write_text(once[:40])
    with pytest.raises(InputError, match=r"ana.jsonl:1: malformed JSON"):
        rank.main(args)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"query": 1}, "'query' must be str"),
        ({"answers": ["a", 1, "b", "c"]}, r"'answers\[1\]' must be str"),
        ({"weights": [1.0]}, "'weights' must have a finite number for each"),
        ({"weights": [float("nan")] * 7}, r"'weights\[0\]' is nan"),
        ({"weights": ["1"] * 7}, r"'weights\[0\]' must be float"),
        ({"representatives": [7]}, "'representatives' must have indices"),
        ({"representatives": [[0]]}, r"'representatives\[0\]' must be int, not list"),
    ],
)
def test_a_malformed_line_of_the_source_is_located(args, change, sentence) -> None:
    args.source.write_text(json.dumps(row(0)) + "\n" + json.dumps(row(1) | change) + "\n")
    with pytest.raises(InputError, match=f"self_rank.jsonl:2: .*{sentence}"):
        rank.main(replace(args, representatives=True))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_answers": 1}, "--num-answers 1"),
        ({"num_answers": 10}, "--num-answers 10"),
        ({"num_answers": 8}, "no question has 8 different answers"),
        ({"num_questions": 0}, "--num-questions 0"),
        ({"simulated_noise": float("nan")}, "--simulated-noise nan"),
        ({"seed": -1}, "--seed -1"),
        ({"annotator": " "}, "--annotator is empty"),
    ],
)
def test_impossible_settings_are_rejected(args, change, sentence) -> None:
    with pytest.raises(InputError, match=sentence):
        rank.main(replace(args, **change))
    assert not args.out.exists()


def test_the_command_reports_a_missing_file(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["data.rank", "--source", "nowhere.jsonl", "--out", "x", "--annotator", "ana"])
    with pytest.raises(SystemExit) as stop:
        run_module(rank.main, Args)
    assert stop.value.code == 2 and "nowhere.jsonl does not exist" in capsys.readouterr().err
