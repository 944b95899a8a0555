"""eval.py rewards on miniature data: its table against an independent count, and its page."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

import eval as evaluation
import train_dpo
import train_rm
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import iter_jsonl, load_comparisons, load_demonstrations, write_jsonl
from nanorlhf.dpo import summed_logprobs
from nanorlhf.errors import InputError
from nanorlhf.evals import reward_models
from nanorlhf.metrics import wilson_interval
from nanorlhf.report.page import text
from nanorlhf.report.reward_model_report import accuracy_lines, sections
from nanorlhf.tokenizer import load_tokenizer
from tests.test_eval import Page


@pytest.fixture(scope="module")
def args(miniature, tmp_path_factory) -> reward_models.Args:
    """Two seeds of a reward model, a DPO policy, and some of the pairs again as CNN/DM."""
    out = tmp_path_factory.mktemp("rewards")
    train_rm.main(replace(miniature.rm, out=out / "rm2", seed=2))
    train_dpo.main(replace(miniature.dpo, out=out / "dpo", lr=3e-3))
    data = out / "data"
    data.mkdir()
    for name in ("comparisons.validation", "sft.validation"):
        (data / f"{name}.jsonl").write_bytes((miniature.root / "data" / f"{name}.jsonl").read_bytes())
    rows = [row for _, row in iter_jsonl(data / "comparisons.validation.jsonl")][:5]
    write_jsonl(data / "comparisons.cnndm.jsonl", [row | {"meta": {"batch": "cnndm0"}} for row in rows])
    models = ("rm", str(miniature.root / "rm"), "rm", str(out / "rm2"), "dpo", str(out / "dpo"))
    return replace(
        evaluation.RECIPES["tldr-rm"][1],
        data=data, out=out / "eval", reward_models=models, ref_policy=str(miniature.root / "sft"), device="cpu",
        dtype="float32",
        batch_size=7, dpo_beta=0.3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(args) -> dict:
    return evaluation.main(args)


def last_scores(args, path: str, texts: list[tuple[list[int], list[int]]]) -> list[float]:
    """Each text alone."""
    tokenizer = load_tokenizer(path)
    if "dpo" not in Path(path).name:
        model = load_scalar(path)
        return [model(torch.tensor([query + response]))[0, -1].item() for query, response in texts]
    models = [load_gpt(p).forbid(tokenizer.pad_id, tokenizer.vocab_size) for p in (path, args.ref_policy)]
    sums = [[summed_logprobs(m, [q], [r], tokenizer.pad_id).item() for q, r in texts] for m in models]
    return [args.dpo_beta * (ours - ref) for ours, ref in zip(*sums, strict=True)]


@pytest.mark.slow
def test_accuracies_and_scores_are_those_of_single_texts(args, result):
    tokenizer = load_tokenizer(args.ref_policy)
    pairs = load_comparisons(args.data / "comparisons.validation.jsonl", tokenizer, None, None)
    references = load_demonstrations(args.data / "sft.validation.jsonl", tokenizer, None, None)
    accuracies, maxima = {"rm": [], "dpo": []}, {"rm": [], "dpo": []}
    for name, path in zip(args.reward_models[::2], args.reward_models[1::2], strict=True):
        chosen = last_scores(args, path, [(row.query, row.chosen) for row in pairs])
        rejected = last_scores(args, path, [(row.query, row.rejected) for row in pairs])
        accuracies[name].append(sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(pairs))
        maxima[name].append(max(last_scores(args, path, [(row.query, row.response) for row in references])))
    overall = result["sets"]["validation"]["accuracy"][0]
    assert overall["by"] == "all" and overall["num_pairs"] == len(pairs)
    for name, column in accuracies.items():
        assert overall["models"][name]["mean"] == pytest.approx(sum(column) / len(column))
        maximum = result["references"][name]["max"]["mean"]
        assert maximum == pytest.approx(sum(maxima[name]) / len(column), abs=1e-4)
        interval = result["sets"]["validation"]["intervals"][name]
        assert interval["mean"] == pytest.approx(sum(column) / len(column))
        assert interval["ci"] == wilson_interval(interval["mean"], len(pairs))
    gain = result["sets"]["validation"]["intervals"]["dpo"]["gain"]
    assert gain["mean"] == pytest.approx(accuracies["dpo"][0] - fmean(accuracies["rm"]))
    assert (
        gain["ci"][0] < gain["mean"] < gain["ci"][1] and result["sets"]["validation"]["intervals"]["rm"]["gain"] is None
    )
    rm = result["references"]["rm"]["mean"]
    assert overall["models"]["rm"]["std"] == pytest.approx(abs(accuracies["rm"][0] - accuracies["rm"][1]) / 2**0.5)
    assert abs(rm["mean"]) < 1 and overall["models"]["dpo"]["std"] is None  # normalised on different references


def test_news_is_a_set_of_its_own_and_eval_json_has_everything(args, result):
    assert json.loads((args.out / "eval.json").read_text()) == json.loads(json.dumps(result))
    assert list(result["sets"]) == ["validation", "cnndm"] and result["implicit"] == ["dpo"]
    news = result["sets"]["cnndm"]["accuracy"]
    assert [(row["by"], row["value"], row["num_pairs"]) for row in news] == [("all", "", 5), ("batch", "cnndm0", 5)]
    assert result["num_seeds"] == {"rm": 2, "dpo": 1}


def test_the_page_has_the_tables_and_a_calibration_figure_of_each_model_and_set(args, result):
    page = Page((args.out / "report.html").read_text())
    table = result["sets"]["validation"]["accuracy"]
    for by in ("all", "batch", "confidence", "split", "policies"):
        for line in accuracy_lines(table, by)[1:]:
            assert line in page.rows
    html = (args.out / "report.html").read_text()
    assert html.count('class="happened') == 2 and html.index("dpo ranks") < html.index("<h2")
    titles = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert sum("calibration error" in title for title in titles) == 4
    assert "±" in accuracy_lines(table, "all")[1][2] and "±" not in accuracy_lines(table, "all")[1][3]


def test_all_can_read_the_report(args, result, unreadable):
    assert not unreadable(args.out / "report.html")


def test_labels_models_and_truth_are_compared_pair_by_pair(args, result):
    """Without --gold the table has only length, with it also gold; kappa needs agreement.jsonl in the data."""
    assert result["sets"]["validation"]["deciders"]["truth"] is None and result["agreement"] is None
    data = args.out.parent / "data_of_several"
    shutil.copytree(args.data, data)
    write_jsonl(data / "agreement.jsonl", [
        {"query": "q", "responses": ["a", "b"], "preferred": {"ana": 0, "ben": 0}},
        {"query": "q", "responses": ["a", "c"], "preferred": {"ana": 1, "ben": 1}},
    ])  # fmt: skip
    out = args.out.parent / "known"
    known = evaluation.main(replace(args, data=data, out=out, gold="data/tiny.py:gold_score"))
    assert known["agreement"]["fleiss_kappa"] == 1

    tokenizer = load_tokenizer(args.ref_policy)
    rows = load_comparisons(data / "comparisons.validation.jsonl", tokenizer, None, None)
    metas = [row.record["meta"] for row in rows]
    truth = [meta["gold_chosen"] - meta["gold_rejected"] for meta in metas]
    longer = [len(row.chosen) - len(row.rejected) for row in rows]
    scores = [last_scores(args, args.reward_models[-1], [(row.query, (row.chosen, row.rejected)[i]) for row in rows])
              for i in (0, 1)]  # fmt: skip
    dpo = [c - r for c, r in zip(*scores, strict=True)]
    measured = known["sets"]["validation"]
    for name, margins in (("labels", [1] * len(rows)), ("truth", truth), ("dpo", dpo)):
        decider = (measured["deciders"] | measured["deciders"]["models"])[name]
        for by, signs in (("truth", truth), ("longer", longer)):
            agrees = [m * sign > 0 for m, sign in zip(margins, signs, strict=True) if sign]
            assert decider[by]["mean"] == pytest.approx(fmean(agrees)), (name, by)
    assert measured["first_shown"] == fmean(meta["choice"] == 0 for meta in metas)
    page = Page((out / "report.html").read_text())
    assert ["preference by", "agrees with gold", "prefers longer"] in page.rows
    shown = text(sections(known))
    assert "2 annotators, 2 pairs: Fleiss' kappa 1.000; share of circular triads - of 0" in shown
    assert "Accuracy is the share of pairs that a model ranks as people did" in shown


def test_the_batch_size_changes_nothing(args, result):
    again = evaluation.main(replace(args, out=args.out.parent / "again", batch_size=100))
    assert again["sets"]["validation"]["accuracy"] == result["sets"]["validation"]["accuracy"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"reward_models": ("rm",)}, "--reward-models rm"),
        ({"reward_models": ()}, "--reward-models"),
        ({"reward_models": ("rm", "no/such/model/here")}, "no/such/model/here"),
        ({"ref_policy": "no/such/policy/here"}, "no/such/policy/here"),
        ({"max_query_length": 5}, "--max-query-length"),
        ({"dpo_beta": -1.0}, "--dpo-beta -1.0"),
        ({"data": Path("no/data")}, "no/data"),
    ],
)
def test_bad_input_raises_input_error_and_writes_nothing(args, changes, named):
    out = args.out.parent / "refused"
    with pytest.raises(InputError, match=named):
        evaluation.main(replace(args, out=out, **changes))
    assert not out.exists()
