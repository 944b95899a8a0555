"""eval.py with a judge on miniature data: a server on loopback, or a file of verdicts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

import eval as evaluation
from nanorlhf.checkpoint import load_gpt, load_scalar, save
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.evals import summaries
from nanorlhf.evals.judge import WIN, Pair, judge_pairs, orders
from nanorlhf.evals.judged import agrees_with_judge, judge_policies, length_controlled
from nanorlhf.metrics import wilson_interval
from nanorlhf.metrics.length_control import length_controlled_win_rate
from nanorlhf.report.summary_report import overview
from nanorlhf.tokenizer import load_tokenizer
from tests.evals.test_judge import chat, reply, serve  # noqa: F401  (serve is a fixture)
from tests.helpers.jsonl import read_jsonl

SUMMARIES = re.compile(r"### Summary A:\n(.*)\n\n### Summary B:\n(.*)\n\n### Instructions", re.S)


@pytest.fixture(scope="module")
def args(miniature, tmp_path_factory) -> summaries.Args:
    """Two policies that answer differently: SFT, and the same with its head's weights rolled by one."""
    out = tmp_path_factory.mktemp("eval_judge")
    other = load_gpt(str(miniature.root / "sft"))
    other.lm_head.weight.data = other.lm_head.weight.data.roll(1, dims=1)
    (out / "other").mkdir()
    save(other, out / "other", load_tokenizer(str(miniature.root / "sft")))
    return replace(
        evaluation.RECIPES["tiny"][1],
        data=miniature.root / "data", out=out / "eval", device="cpu", num_queries=8, batch_size=8,
        policies=("sft", str(miniature.root / "sft"), "other", str(out / "other")),
        reward_model=str(miniature.root / "rm"),
        max_query_length=160, max_response_length=64, response_length=12, judge_cache=out / "cache.jsonl",
        judge_model="judge-1",
    )  # fmt: skip


def by_length(handler) -> None:
    """Prefer the longer summary, or the first one if equal; undecided if the prompt's length is a multiple of five."""
    a, b = SUMMARIES.search(handler.prompt).groups()
    letter = "A" if len(a) >= len(b) else "B"
    reply(body=chat("Hard to say." if len(handler.prompt) % 5 == 0 else f"Comparison: length.\nPreferred: {letter}"))(
        handler
    )


def read_verdicts(out: Path) -> list[dict]:
    return read_jsonl(out / "verdicts.jsonl", {"policy": str, "query": str, "ours": str, "theirs": str})


@pytest.fixture
def judged(args, serve, tmp_path):  # noqa: F811
    server, endpoint = serve(by_length)
    asked = replace(args, out=tmp_path / "eval", judge_url=endpoint.url, judge_cache=tmp_path / "cache.jsonl")
    return server, asked, evaluation.main(asked)


def test_the_win_rate_is_a_recount_of_the_verdicts_and_unparsed_ones_are_apart(judged) -> None:
    server, asked, result = judged
    samples = read_jsonl(asked.out / "samples.jsonl", {"query": str})
    rows = read_verdicts(asked.out)
    assert len(rows) == 16 and len(server.seen) == 16
    assert sum(row["preferred"] == "unparsed" for row in rows) > 0
    lines = overview(result).text().splitlines()
    for name in ("sft", "other"):
        wins = []
        for sample, row in zip(samples, [row for row in rows if row["policy"] == name], strict=True):
            pair = Pair(sample["query"], sample["policies"][name]["response"], sample["reference"])
            assert (row["query"], row["ours"], row["theirs"]) == pair and row["against"] == "reference"
            assert row["ours_first"] == orders(pair, asked.seed, both=False)  # randomised and logged
            ours, theirs = len(pair.ours.strip()), len(pair.theirs.strip())
            if "Hard" in row["answers"][0]:
                assert row["preferred"] == "unparsed"
            else:
                wins.append(ours > theirs or (ours == theirs and row["ours_first"][0]))
                assert row["preferred"] == ("ours" if wins[-1] else "theirs")
        numbers = result["policies"][name]
        assert numbers["judge_win_rate"] == fmean(wins) and numbers["judge_pairs"] == len(wins)
        assert numbers["judge_win_rate_ci"] == wilson_interval(fmean(wins), len(wins))
        assert numbers["judge_unparsed"] == 8 - len(wins) and numbers["judge_unanswered"] == 0
        assert f"{fmean(wins):.3f} [" in next(line for line in lines if line.startswith(name))
    line = lines[-1]
    assert line.startswith(f"judge judge-1 at {asked.judge_url}: {result['judge']['judge_pairs']} verdicts on pairs")
    assert f"{result['judge']['judge_unparsed']} unparsed, 0 unanswered; 16 calls" in line
    page = (asked.out / "report.html").read_text()
    assert "judge win rate" in page and line.split(":")[0] in page and page.count('alt="Wins by length"') == 2
    assert json.loads((asked.out / "eval.json").read_text())["judge"]["against"] == "reference"


def test_at_equal_length_little_is_left_of_a_win_rate_by_length(judged) -> None:
    _, asked, result = judged
    for name in ("sft", "other"):
        numbers = result["policies"][name]
        rows = [row for row in read_verdicts(asked.out) if row["policy"] == name and row["preferred"] in WIN]
        lengths = np.array([[len(row["ours"].strip()) - len(row["theirs"].strip())] for row in rows])
        wins = np.array([[[WIN[row["preferred"]]]] for row in rows])
        rate, interval = length_controlled_win_rate(wins, lengths, asked.seed)
        assert (numbers["judge_lc_win_rate"], numbers["judge_lc_win_rate_ci"]) == (rate, interval)
    assert "length-controlled" in overview(result).text() and "AlpacaEval" in (asked.out / "report.html").read_text()


@pytest.mark.parametrize(
    ("answer", "rate", "pairs", "failed"),
    [("I can't say.", None, 0, 2), (None, None, 0, 2), ("Preferred: A", 0.5, 3, 0)],
)
def test_a_judge_that_fails_has_no_win_rate_though_equal_texts_tie(answer, rate, pairs, failed) -> None:
    columns = {
        "ours": [{"response": text, "rm_score": None} for text in ("same", "one", "two")],
        "reference": [{"response": text, "rm_score": None} for text in ("same", "three", "four")],
    }

    def judge(asked: list[Pair]) -> tuple[list[dict], dict]:
        return judge_pairs(asked, 1, True, lambda prompts: dict.fromkeys(prompts, answer) if answer else {}), {}

    _, numbers, account = judge_policies(judge, ["a", "b", "c"], columns, "reference", 1)
    for counts in (numbers["ours"], account):
        assert counts["judge_pairs"] == pairs and counts["judge_unparsed"] + counts["judge_unanswered"] == failed
    assert numbers["ours"]["judge_win_rate"] == rate
    assert (numbers["ours"]["judge_lc_win_rate"] is None) == (rate is None)
    same = {name: [column[0]] for name, column in columns.items()}
    assert judge_policies(judge, ["a"], same, "reference", 1)[1]["ours"]["judge_win_rate"] == 0.5  # not judged


def test_without_a_verdict_there_is_no_rate_at_equal_length() -> None:
    rows = [{"ours": "a", "theirs": "bc", "preferred": word} for word in ("unparsed", "unanswered")]
    nothing = {"judge_lc_win_rate": None, "judge_lc_win_rate_ci": None}
    assert length_controlled(rows, seed=1) == nothing
    assert length_controlled([*rows, {"ours": "a", "theirs": "bc", "preferred": "ours"}], seed=1) == nothing


def test_a_judge_by_length_alone_has_a_plain_rate_and_none_at_equal_length() -> None:
    """Our texts are longer in four of five pairs, and preferred in exactly those."""
    rows = [
        {"ours": "x" * ours, "theirs": "y" * 50, "preferred": "ours" if ours > 50 else "theirs"}
        for ours in [*range(30, 50), *range(51, 131)]
    ]
    result = length_controlled(rows, seed=1)
    low, high = result["judge_lc_win_rate_ci"]
    assert low < 0.5 < high < 0.8 and abs(result["judge_lc_win_rate"] - 0.5) < 0.1


def test_the_reward_model_agrees_where_its_sign_is_that_of_the_verdict(judged) -> None:
    _, asked, result = judged
    samples = read_jsonl(asked.out / "samples.jsonl", {"query": str})
    tokenizer, model = load_tokenizer(asked.reward_model), load_scalar(asked.reward_model)
    hits = []
    for row in read_verdicts(asked.out):
        sample = next(s for s in samples if s["query"] == row["query"])
        ids = tokenizer.encode(row["query"]) + tokenizer.encode(row["theirs"]) + [tokenizer.eos_id]
        theirs = model(torch.tensor([ids]))[0, -1].item()
        ours = sample["policies"][row["policy"]]["rm_score"]
        if row["preferred"] in ("ours", "theirs"):
            hits.append((ours > theirs) == (row["preferred"] == "ours"))
    assert result["judge"]["rm_agreement"] == fmean(hits) and result["judge"]["rm_agreement_pairs"] == len(hits)
    assert 0 < len(hits) < 16


def test_agreement_by_hand() -> None:
    rows = [{"preferred": word} for word in ("ours", "ours", "theirs", "theirs", "tie", "unparsed", "ours", "theirs")]
    margins = [0.1, -0.1, -2.0, 3.0, 1.0, 1.0, 0.0, 0.0]
    assert agrees_with_judge(margins, rows) == [True, False, True, False, False, False]


@pytest.mark.slow
def test_the_next_run_takes_its_answers_from_the_cache_and_a_verdict_file_needs_no_endpoint(judged, tmp_path) -> None:
    server, asked, result = judged
    num_calls = len(server.seen)
    again = evaluation.main(replace(asked, out=tmp_path / "again", judge_max_calls=0))
    assert len(server.seen) == num_calls and again["policies"] == result["policies"]
    told = replace(asked, out=tmp_path / "told", judge_url=None, judge_file=asked.out / "verdicts.jsonl")
    by_file = evaluation.main(told)
    assert len(server.seen) == num_calls and by_file["policies"] == result["policies"]
    assert by_file["judge"]["name"].endswith("verdicts.jsonl")
    rows = read_verdicts(asked.out)
    write_jsonl(tmp_path / "some.jsonl", rows[:10])
    partial = evaluation.main(replace(told, out=tmp_path / "some", judge_file=tmp_path / "some.jsonl"))
    texts = [{(row["query"], row["ours"], row["theirs"]) for row in part} for part in (rows[:10], rows)]
    assert partial["judge"]["judge_unanswered"] == len(texts[1] - texts[0]) > 0


def test_a_cap_leaves_every_policy_judged_on_the_same_queries(args, serve, tmp_path) -> None:  # noqa: F811
    server, endpoint = serve(by_length)
    result = evaluation.main(
        replace(args, out=tmp_path / "eval", judge_url=endpoint.url, judge_cache=tmp_path / "c", judge_max_calls=6)
    )
    assert len(server.seen) == 6 and result["judge"]["judge_unanswered"] == 10
    assert [result["policies"][name]["judge_unanswered"] for name in ("sft", "other")] == [5, 5]
    assert "stopped asking: the cap of 6 calls is reached" in overview(result).text()


def test_an_endpoint_that_rejects_requests_leaves_only_the_judge_columns_empty(args, serve, tmp_path) -> None:  # noqa: F811
    _, endpoint = serve(reply(401, b"no such key"))
    result = evaluation.main(
        replace(args, out=tmp_path / "eval", judge_url=endpoint.url, judge_cache=tmp_path / "c", gold=None)
    )
    assert result["policies"]["sft"]["judge_win_rate"] is None and "judge win rate" not in overview(result).text()
    assert "stopped asking: the endpoint refuses: HTTP 401 no such key" in overview(result).text()
    assert "Wins and length" not in (tmp_path / "eval" / "report.html").read_text()


def test_policies_are_judged_against_each_other(args, serve, tmp_path) -> None:  # noqa: F811
    _, endpoint = serve(by_length)
    asked = replace(args, out=tmp_path / "eval", judge_url=endpoint.url, judge_cache=tmp_path / "c")
    result = evaluation.main(replace(asked, judge_against="sft", judge_both_orders=True))
    samples = read_jsonl(asked.out / "samples.jsonl", {"query": str})
    rows = read_verdicts(asked.out)
    assert [row["theirs"] for row in rows] == [sample["policies"]["sft"]["response"] for sample in samples]
    assert {row["policy"] for row in rows} == {"other"} and "judge_win_rate" not in result["policies"]["sft"]
    assert {len(row["ours_first"]) for row in rows if row["ours"] != row["theirs"]} == {2}


def test_a_dry_run_prints_the_prompts_and_sends_and_writes_nothing(args, serve, tmp_path, capsys) -> None:  # noqa: F811
    server, endpoint = serve(by_length)
    dry = replace(args, out=tmp_path / "eval", judge_url=endpoint.url, judge_cache=tmp_path / "c", judge_dry_run=True)
    evaluation.main(dry)
    out = capsys.readouterr().out
    assert server.seen == [] and list(tmp_path.iterdir()) == []
    assert out.count("### Summary A:\n") == 16 and "16 prompts for judge-1 at " in out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"judge_url": "localhost:8000"}, "--judge-url localhost:8000: write a URL"),
        ({"judge_url": "http://x/v1", "judge_model": None}, "needs a model name"),
        ({"judge_url": "http://x/v1", "judge_key_variable": "NO_SUCH_KEY_HERE"}, "NO_SUCH_KEY_HERE: this environment"),
        ({"judge_url": "http://x/v1", "judge_file": Path("x")}, "can't be combined"),
        ({"judge_url": "http://x/v1", "judge_against": "nobody"}, "--judge-against nobody: expected `reference`"),
        ({"judge_url": "http://x/v1", "judge_cache": Path(".")}, ". is a directory, not a file"),
        ({"judge_url": "http://x/v1", "judge_cache": Path("/dev/null/c")}, "--judge-cache /dev/null is a file, not a"),
        (
            {"judge_url": "http://x/v1", "judge_cache": Path("/proc/x/c")},
            "--judge-cache /proc/x: /proc is not a writable",
        ),
        ({"out": Path("/proc/x")}, "--out /proc/x: /proc is not a writable directory (No such file or directory)"),
        ({"judge_url": "http://x/v1", "judge_workers": 0}, "--judge-workers 0: must be from 1"),
        ({"judge_url": "http://x/v1", "judge_max_calls": -1}, "--judge-max-calls -1: must be at least 0"),
        ({"judge_url": "http://x/v1", "judge_timeout": 0.0}, "--judge-timeout 0.0: must be above 0"),
        ({"judge_file": Path("no/verdicts.jsonl")}, "no/verdicts.jsonl does not exist"),
        ({"judge_dry_run": True}, "--judge-dry-run needs an endpoint"),
    ],
)
def test_bad_flags_are_refused_before_anything_slow(args, tmp_path, monkeypatch, changes, sentence) -> None:
    monkeypatch.setattr(summaries, "load_policy", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match=re.escape(sentence)):
        evaluation.main(replace(args, **{"out": tmp_path / "refused"} | changes))
    assert not (tmp_path / "refused").exists()


def test_a_single_policy_can_not_be_judged_against_itself(args, tmp_path) -> None:
    alone = replace(args, policies=args.policies[:2], judge_url="http://x/v1", judge_against="sft", out=tmp_path / "o")
    with pytest.raises(InputError, match="one policy of several"):
        evaluation.main(alone)


def test_a_missing_library_raises_input_error_with_the_install_command(args, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("nanorlhf.evals.judged.find_spec", lambda name: None)
    with pytest.raises(InputError, match="--judge-url http://x/v1 .*`pip install openai`"):
        evaluation.main(replace(args, judge_url="http://x/v1", out=tmp_path / "o"))
