"""eval.py tiny-rm with a judge: a server on loopback that judges the miniature's validation pairs."""

import re
from collections import defaultdict
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch

import eval as evaluation
from nanorlhf.checkpoint import load_scalar
from nanorlhf.errors import InputError
from nanorlhf.evals import reward_models
from nanorlhf.evals.judge import Pair, orders
from nanorlhf.evals.judged import judge_agreement
from nanorlhf.metrics import wilson_interval
from nanorlhf.report.page import text
from nanorlhf.report.reward_model_report import sections
from nanorlhf.tokenizer import load_tokenizer
from tests.evals.test_judge import fine, serve  # noqa: F401  (serve is a fixture)
from tests.evals.test_judged_summaries import by_length
from tests.helpers.jsonl import read_jsonl


@pytest.fixture
def args(miniature, tmp_path) -> reward_models.Args:
    return replace(
        evaluation.RECIPES["tiny-rm"][1],
        data=miniature.root / "data", out=tmp_path / "eval", device="cpu", max_query_length=160,
        max_response_length=64, reward_models=("rm", str(miniature.root / "rm")), judge_model="judge-1",
        judge_cache=tmp_path / "cache.jsonl", gold=None,
    )  # fmt: skip


def pairs_of(args) -> list[dict]:
    return read_jsonl(args.data / "comparisons.validation.jsonl", {"query": str, "chosen": str, "rejected": str})


def test_agreement_is_a_recount_of_the_verdicts_overall_and_by_confidence(args, serve) -> None:  # noqa: F811
    _, endpoint = serve(by_length)
    result = evaluation.main(replace(args, judge_url=endpoint.url))
    rows, verdicts = pairs_of(args), read_jsonl(args.out / "verdicts.jsonl", {"query": str})
    tokenizer, model = load_tokenizer(args.reward_models[1]), load_scalar(args.reward_models[1])

    def score(row: dict, side: str) -> float:
        ids = tokenizer.encode(row["query"]) + tokenizer.encode(row[side]) + [tokenizer.eos_id]
        return model(torch.tensor([ids]))[0, -1].item()

    labels, models = defaultdict(list), defaultdict(list)
    for row, verdict in zip(rows, verdicts, strict=True):
        pair = Pair(row["query"], row["chosen"], row["rejected"])
        assert (verdict["query"], verdict["ours"], verdict["theirs"]) == pair
        assert verdict["ours_first"] == orders(pair, args.seed, both=False)
        if verdict["preferred"] == "unparsed":
            continue
        chosen, rejected = len(pair.ours.strip()), len(pair.theirs.strip())
        prefers_chosen = chosen > rejected or (chosen == rejected and verdict["ours_first"][0])
        for group in ("", str(row["meta"]["confidence"])):
            labels[group].append(prefers_chosen)
            models[group].append((score(row, "chosen") > score(row, "rejected")) == prefers_chosen)
    assert 0 < len(labels[""]) < len(rows) and len({*labels}) > 2 and {*labels[""]} == {True, False}
    table = {
        row["value"]: row for row in result["judge"]["agreement"]["accuracy"] if row["by"] in ("all", "confidence")
    }
    assert table.keys() == labels.keys()
    for value, row in table.items():
        assert row["num_pairs"] == len(labels[value])
        assert row["models"]["labels"]["mean"] == pytest.approx(fmean(labels[value]))
        assert row["models"]["rm"]["mean"] == pytest.approx(fmean(models[value]))
    interval = result["judge"]["agreement"]["intervals"]["rm"]
    assert interval["ci"] == pytest.approx(wilson_interval(fmean(models[""]), len(models[""])))
    assert interval["gain"]["mean"] == pytest.approx(fmean(models[""]) - fmean(labels[""]))
    shown = text(sections(result))
    unparsed = len(rows) - len(labels[""])
    assert f"{len(labels[''])} verdicts on {len(rows)} pairs; {unparsed} unparsed, 0 unanswered" in shown
    assert "minus labels" in shown and "agreement with the judge" in (args.out / "report.html").read_text()


def test_a_judge_that_always_prefers_the_first_text_is_exposed_in_both_orders(args, serve) -> None:  # noqa: F811
    _, endpoint = serve(fine("A"))
    judged = evaluation.main(replace(args, judge_url=endpoint.url, judge_both_orders=True))["judge"]
    num_pairs = len(pairs_of(args))
    assert judged["agreement"] is None and judged["judge_ties"] == num_pairs and judged["first_rate"] == 1
    assert judged["num_calls"] == 2 * num_pairs
    assert f"{num_pairs} ties" in (args.out / "report.html").read_text()


def test_a_cap_leaves_a_random_sample_that_the_next_run_extends(args, serve) -> None:  # noqa: F811
    server, endpoint = serve(fine("A"))
    asked = replace(args, judge_url=endpoint.url, judge_max_calls=6)
    result = evaluation.main(asked)
    queries = [row["query"] for row in pairs_of(args)]
    first = [row["query"] for row in read_jsonl(args.out / "verdicts.jsonl", {"query": str})]
    assert len(server.seen) == len(first) == result["judge"]["judge_pairs"] == 6
    assert {*first} != {*queries[:6]} and first == [query for query in queries if query in first]
    evaluation.main(replace(asked, overwrite=True, judge_max_calls=3))
    second = [row["query"] for row in read_jsonl(args.out / "verdicts.jsonl", {"query": str})]
    assert len(server.seen) == len(second) == 9 and {*first} < {*second}


def test_a_dry_run_prints_every_pair_and_writes_nothing(args, serve, tmp_path, capsys) -> None:  # noqa: F811
    server, endpoint = serve(fine("A"))
    assert evaluation.main(replace(args, judge_url=endpoint.url, judge_dry_run=True)) == {}
    prompts = re.findall(r"### Summary A:\n(.*)\n\n### Summary B:\n(.*)\n", capsys.readouterr().out)
    texts = {frozenset((row["chosen"].strip(), row["rejected"].strip())) for row in pairs_of(args)}
    assert {frozenset(pair) for pair in prompts} == texts
    assert server.seen == [] and list(tmp_path.iterdir()) == []


def test_a_file_of_verdicts_replaces_the_endpoint(args, serve, tmp_path) -> None:  # noqa: F811
    server, endpoint = serve(by_length)
    asked = evaluation.main(replace(args, judge_url=endpoint.url))
    from_file = replace(args, judge_file=args.out / "verdicts.jsonl", out=tmp_path / "from_file")
    num_calls = len(server.seen)
    assert evaluation.main(from_file)["judge"]["agreement"] == asked["judge"]["agreement"]
    assert len(server.seen) == num_calls


def test_agreement_of_seeds_by_hand() -> None:
    words = ("ours", "theirs", "tie", "ours", "unparsed", "unanswered", "theirs")
    verdicts = [{"preferred": word} for word in words]
    margins = {"rm": np.array([[1.0, 2.0, 3.0, -4.0, 5.0, 6.0, -7.0], [-1.0, -2.0, -3.0, 0.0, 5.0, 6.0, -7.0]])}
    groups = {("all", ""): [*range(7)], ("confidence", "1"): [0, 1, 2], ("confidence", "9"): [2, 4]}
    agreement = judge_agreement(verdicts, groups, margins)
    overall, sure = agreement["accuracy"]  # no verdict with a winner at confidence 9
    assert (overall["num_pairs"], sure["num_pairs"], sure["value"]) == (4, 2, "1")
    assert overall["models"]["labels"] == {"mean": 0.5, "std": None}
    assert overall["models"]["rm"] == {"mean": 0.5, "std": 0.0}  # 1, 0, 0, 1 and 0, 1, 0 (a tie), 1
    assert sure["models"]["rm"]["mean"] == 0.5
    assert agreement["intervals"]["rm"]["mean"] == 0.5 and agreement["intervals"]["rm"]["gain"]["mean"] == 0
    assert judge_agreement(verdicts[2:3], {("all", ""): [0]}, {"rm": np.ones((1, 1))}) is None


def test_bad_flags_are_refused_before_a_model_is_loaded(args, monkeypatch) -> None:
    monkeypatch.setattr(reward_models, "load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(InputError, match="needs a model name"):
        evaluation.main(replace(args, judge_url="http://x/v1", judge_model=None))
    assert not args.out.exists()
