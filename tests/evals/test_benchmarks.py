"""eval.py rewards on miniature benchmarks: scores against texts scored one by one, the baseline rule, the page."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

import eval as evaluation
from data import rewardbench
from nanorlhf.checkpoint import load_gpt, load_scalar, save
from nanorlhf.dataset import iter_jsonl, load_comparisons, write_jsonl
from nanorlhf.dpo import summed_logprobs
from nanorlhf.errors import InputError
from nanorlhf.evals import benchmarks
from nanorlhf.metrics import wilson_interval
from nanorlhf.metrics.benchmark_scores import SECTIONS, SUBSETS_2
from nanorlhf.plan.evaluation import eval_plan
from nanorlhf.tokenizer import load_tokenizer
from tests.test_eval import Page


@pytest.fixture(scope="module")
def texts(miniature) -> list[dict]:
    return [row for _, row in iter_jsonl(miniature.root / "data/comparisons.validation.jsonl")]


@pytest.fixture(scope="module")
def args(miniature, tmp_path_factory) -> benchmarks.Args:
    """Two seeds of a reward model with different weights, and a policy with different weights than its reference."""
    out = tmp_path_factory.mktemp("rewards")
    tokenizer = load_tokenizer(str(miniature.root / "sft"))
    policy = load_gpt(str(miniature.root / "sft"))
    policy.lm_head.weight.data = policy.lm_head.weight.data.roll(1, dims=1)
    scalar = load_scalar(str(miniature.root / "rm"))
    scalar.score.weight.data = scalar.score.weight.data.roll(3, dims=1)
    for name, model in (("dpo", policy), ("rm2", scalar)):
        (out / name).mkdir()
        save(model, out / name, tokenizer)
    models = ("rm", str(miniature.root / "rm"), "rm", str(out / "rm2"), "dpo", str(out / "dpo"))
    return replace(
        evaluation.RECIPES["rewards"][1], data=out / "data", out=out / "eval", reward_models=models,
        ref_policy=str(miniature.root / "sft"), device="cpu", batch_size=7, dpo_beta=0.3,
    )  # fmt: skip


def converted(args, records: list[dict], name: str) -> Path:
    """Write a benchmark with these records as data."""
    source, out = args.out.parent / f"{name}.json", args.out.parent / name
    source.write_text(json.dumps(records))
    rewardbench.main(rewardbench.Args(source=str(source), out=out, tokenizer=args.ref_policy))
    return out


def score(args, path: str, query: list[int], response: list[int]) -> float:
    """Score one text without a batch."""
    if "dpo" not in Path(path).name:
        return load_scalar(path)(torch.tensor([query + response]))[0, -1].item()
    tokenizer = load_tokenizer(path)
    models = [load_gpt(p).forbid(tokenizer.pad_id, tokenizer.vocab_size) for p in (path, args.ref_policy)]
    ours, ref = (summed_logprobs(m, [query], [response], tokenizer.pad_id).item() for m in models)
    return args.dpo_beta * (ours - ref)


def cell(result: dict, table: str, line: str, model: str) -> dict:
    [selected] = [each for each in result["tables"] if each["name"] == table]
    [row] = [each for each in selected["lines"] if each["name"] == line]
    return row["models"][model]


@pytest.fixture(scope="module")
def rewardbench_result(args, texts) -> tuple[benchmarks.Args, dict]:
    """Return one or more records for each subset of RewardBench."""
    subsets = [subset for section in SECTIONS.values() for subset in section] + ["math-prm"] * 6
    records = [
        {"prompt": row["query"], "chosen": row["chosen"], "rejected": row["rejected"], "subset": subset, "id": i}
        for i, (row, subset) in enumerate(zip([*texts, *texts], subsets, strict=False))
    ]
    assert len(records) == len(subsets)
    ours = replace(args, data=converted(args, records, "rewardbench"))
    return ours, evaluation.main(ours)


def test_accuracies_are_those_of_single_texts(rewardbench_result):
    args, result = rewardbench_result
    tokenizer = load_tokenizer(args.ref_policy)
    pairs = load_comparisons(args.data / "comparisons.validation.jsonl", tokenizer, None, None)
    of_prm = [pair for pair in pairs if pair.record["meta"]["subset"] == "math-prm"]
    assert len(of_prm) == 7 and result["benchmark"] == "RewardBench" and result["num_rows"] == len(pairs) == 29
    per_seed = {"rm": [], "dpo": []}
    for name, path in zip(args.reward_models[::2], args.reward_models[1::2], strict=True):
        right = [score(args, path, p.query, p.chosen) > score(args, path, p.query, p.rejected) for p in of_prm]
        per_seed[name].append(fmean(right))
    for name, accuracies in per_seed.items():
        accuracy = cell(result, "accuracy", "math-prm", name)
        assert accuracy["mean"] == pytest.approx(fmean(accuracies))
    assert cell(result, "accuracy", "math-prm", "dpo")["std"] is None
    assert cell(result, "accuracy", "math-prm", "rm")["std"] == pytest.approx(
        abs(per_seed["rm"][0] - per_seed["rm"][1]) / 2**0.5
    )
    longer = fmean(len(pair.chosen) > len(pair.rejected) for pair in of_prm)
    accuracy = cell(result, "accuracy", "math-prm", "the longer one")
    assert accuracy["mean"] == longer and accuracy["interval"] == pytest.approx(wilson_interval(longer, 7))
    assert result["num_seeds"] == {"rm": 2, "dpo": 1} and result["implicit"] == ["dpo"]


def test_accuracy_at_equal_length(rewardbench_result):
    args, result = rewardbench_result
    rule = result["length"]["the longer one"]
    assert rule["margin_weight"] is rule["controlled"] is None and rule["length_weight"]["interval"]
    tokenizer = load_tokenizer(args.ref_policy)
    pairs = load_comparisons(args.data / "comparisons.validation.jsonl", tokenizer, None, None)
    longer = [(np.sign(len(pair.chosen) - len(pair.rejected)) + 1) / 2 for pair in pairs]  # a tie counts half
    assert rule["accuracy"]["mean"] == pytest.approx(fmean(longer))
    near = [
        is_longer for pair, is_longer in zip(pairs, longer, strict=True)
        if abs(len(pair.chosen) - len(pair.rejected)) <= 0.1 * (max(len(pair.chosen), len(pair.rejected)) - 1)
    ]  # fmt: skip
    assert rule["near"]["num_pairs"] == len(near) > 0 and rule["near"]["mean"] == pytest.approx(fmean(near))
    for name in ("rm", "dpo"):
        low, high = result["length"][name]["margin_weight"]["interval"]
        assert low <= high and 0 <= result["length"][name]["controlled"]["mean"] <= 1


def test_all_can_read_the_report(rewardbench_result, unreadable):
    args, _ = rewardbench_result
    assert not unreadable(args.out / "report.html")


def test_eval_json_and_the_page_have_the_tables(rewardbench_result, capsys):
    args, result = rewardbench_result
    assert json.loads((args.out / "eval.json").read_text()) == json.loads(json.dumps(result))
    html = (args.out / "report.html").read_text()
    happened = re.findall(r'<p class="happened.*?</p>', html, re.S)
    assert [words in p for words, p in zip(("rm scores 0.", "dpo scores 0."), happened, strict=True)] == [True, True]
    assert html.index("happened") < html.index("<table") and all("(overall); the rule" in p for p in happened)
    rows = Page(html).rows
    assert ["accuracy", "rows", "rm", "dpo", "the longer one"] in rows
    assert [row[0] for row in rows if row[0] in ("Chat", "Chat Hard", "Safety", "Reasoning", "overall")] == [
        "Chat", "Chat Hard", "Safety", "Reasoning", "overall",
    ]  # fmt: skip
    assert re.search(r"0\.\d{3} ± 0\.\d{3} \[0\.\d{3}, \d\.\d{3}\]", html) and "margin weight" in html
    titles = [attributes["alt"] for tag, attributes in Page(html).tags if tag == "img"]
    assert sum("calibration error" in title for title in titles) == 2
    evaluation.main(replace(args, out=args.out.parent / "again"))
    assert "Mean ± standard deviation over seeds; number of seeds: rm 2, dpo 1." in capsys.readouterr().out


@pytest.fixture(scope="module")
def answers(texts) -> list[str]:
    """All different."""
    return list(dict.fromkeys(row[side].strip() for row in texts for side in ("chosen", "rejected")))


@pytest.mark.slow
def test_rewardbench_2_and_its_ties(args, texts, answers):
    def record(i: int, subset: str, identity: str, num_chosen: int, num_rejected: int) -> dict:
        rotated = answers[i:] + answers[:i]
        chosen, rejected = rotated[:num_chosen], rotated[num_chosen : num_chosen + num_rejected]
        return {"prompt": texts[i]["query"], "chosen": chosen, "rejected": rejected, "subset": subset, "id": identity}

    records = [record(i, subset, str(i), 1, 3) for i, subset in enumerate(SUBSETS_2[:-1] * 2)]
    records += [record(11, "Ties", "ref:0", 1, 3), record(11, "Ties", "tied:0", 3, 4)]
    ours = replace(args, data=converted(args, records, "rewardbench2"), out=args.out.parent / "eval2")
    result = evaluation.main(ours)
    assert result["benchmark"] == "RewardBench 2" and result["num_pairs"] == 10 * 3 + 3 + 12
    tokenizer = load_tokenizer(args.ref_policy)
    pairs = load_comparisons(ours.data / "comparisons.validation.jsonl", tokenizer, None, None)
    path, wins = args.reward_models[-1], {}
    for pair in pairs:
        meta, better = pair.record["meta"], score(args, path, pair.query, pair.chosen)
        is_better = better > score(args, path, pair.query, pair.rejected)
        wins.setdefault((meta["subset"], meta["id"]), []).append(is_better)
    means = {}
    for subset in SUBSETS_2[:-1]:
        means[subset] = fmean(all(row_wins) for (name, _), row_wins in wins.items() if name == subset)
        assert cell(result, "accuracy", subset, "dpo")["mean"] == means[subset]
    for part, identity in (("one right", "ref:0"), ("several right", "tied:0")):
        assert cell(result, "Ties, by part", part, "dpo")["mean"] == all(wins["Ties", identity])
    ties = cell(result, "accuracy", "Ties", "dpo")["mean"]
    overall = (sum(means.values()) + ties) / 6
    assert cell(result, "accuracy", "overall", "dpo")["mean"] == pytest.approx(overall)


@pytest.fixture(scope="module")
def rm_bench(args, texts, answers) -> Path:
    domains = ("chat", "code", "math", "safety-refuse", "safety-response")
    records = [
        {"id": f"{domain}/0", "prompt": texts[i]["query"], "domain": domain, "chosen": answers[i : i + 3],
         "rejected": answers[i + 3 : i + 6]}
        for i, domain in enumerate(domains)
    ]  # fmt: skip
    return converted(args, records, "rm_bench")


def test_rm_bench_has_easy_normal_and_hard_pairs(args, answers, rm_bench):
    ours = replace(args, data=rm_bench, out=args.out.parent / "eval3")
    result = evaluation.main(ours)
    assert result["benchmark"] == "RM-Bench" and result["num_pairs"] == 5 * 9
    tokenizer = load_tokenizer(args.ref_policy)
    lengths = [len(tokenizer.encode(" " + answer)) for answer in answers]
    hard = fmean(lengths[i] > lengths[3 + j] for i in range(3) for j in range(3) if i < j)
    assert cell(result, "hard", "chat", "the longer one")["mean"] == pytest.approx(hard)
    assert cell(result, "easy", "safety", "dpo")["std"] is None
    assert "hard" in (ours.out / "report.html").read_text()


def test_any_comparisons_are_measured_by_subset(args, texts, tmp_path):
    """Without a benchmark each row is a pair; without subsets all pairs are in one."""
    half = [row | {"meta": {"subset": "first" if i < 5 else "second"}} for i, row in enumerate(texts)]
    write_jsonl(tmp_path / "comparisons.validation.jsonl", half)
    result = evaluation.main(replace(args, data=tmp_path, out=tmp_path / "eval"))
    lines = {line["name"]: line["num_rows"] for line in result["tables"][0]["lines"]}
    assert lines == {"overall": len(texts), "first": 5, "second": len(texts) - 5} and result["benchmark"] is None
    by_first, by_second, overall = (cell(result, "accuracy", name, "dpo")["mean"] for name in
                                    ("first", "second", "overall"))  # fmt: skip
    assert overall == pytest.approx((5 * by_first + (len(texts) - 5) * by_second) / len(texts))
    assert "Reward models by subset" in (tmp_path / "eval/report.html").read_text()


def test_a_policy_that_is_its_own_reference_prefers_nothing(args, rm_bench, tmp_path):
    """All its rewards are 0. Ties are wrong in the benchmark's tables, and half right in the table by length."""
    result = evaluation.main(
        replace(args, data=rm_bench, out=tmp_path / "eval", reward_models=("same", args.ref_policy))
    )
    assert cell(result, "average", "overall", "same") == {"mean": 0, "std": None, "interval": (0, 0)}
    same = result["length"]["same"]
    assert same["accuracy"]["mean"] == 0.5 and same["controlled"]["mean"] == pytest.approx(0.5)
    assert same["margin_weight"] == {"mean": 0, "interval": (0, 0)}


def test_the_batch_size_changes_nothing(rewardbench_result):
    args, result = rewardbench_result
    again = evaluation.main(replace(args, out=args.out.parent / "other_batch", batch_size=100))
    assert again["tables"] == result["tables"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward_models": ("the longer one", "rm")}, "--reward-models 'the longer one': this name is reserved"),
        ({"reward_models": ("rm", "no/such/model/here")}, "no/such/model/here"),
        ({"ref_policy": "no/such/policy/here"}, "no/such/policy/here"),
        ({"max_query_length": 5}, "--max-query-length"),
        ({"data": Path("no/data")}, "no/data"),
    ],
)
def test_bad_settings_raise_input_error_and_write_nothing(rewardbench_result, changes, sentence):
    args, _ = rewardbench_result
    out = args.out.parent / "refused"
    with pytest.raises(InputError, match=sentence):
        evaluation.main(replace(args, out=out, **changes))
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda rows: rows[:-1],
            "the pairs of record 4 aren't the ones of RM-Bench; convert the benchmark again with data.rewardbench",
        ),
        (lambda rows: [rows[0] | {"meta": {}}, *rows[1:]], "'benchmark' in the field 'meta' must be the"),
        (lambda rows: [row | {"meta": row["meta"] | {"benchmark": "Mine"}} for row in rows], "in all rows: RewardB"),
        (lambda rows: [row for row in rows if row["meta"]["chosen"] < 2], "the pairs of record 0 aren't the ones of"),
        (lambda rows: [rows[0] | {"meta": 3}, *rows[1:]], "jsonl:1: the field 'meta' must be dict, not int"),
        (lambda rows: [*rows, rows[0]], "jsonl:46: record 0 repeats a pair, or differs in subset or id"),
        (
            lambda rows: [row | {"meta": row["meta"] | {"record": row["meta"]["record"] // 2}} for row in rows],
            "jsonl:10: record 0 repeats a pair, or differs in subset or id from the lines before it",
        ),
        (lambda rows: [row | {"meta": {"benchmark": "RM-Bench"}} for row in rows], "jsonl:1: the field 'record' is m"),
    ],
)
def test_a_malformed_benchmark_raises_input_error(args, rm_bench, tmp_path, change, sentence):
    rows = [row for _, row in iter_jsonl(rm_bench / "comparisons.validation.jsonl")]
    write_jsonl(tmp_path / "comparisons.validation.jsonl", change(rows))
    with pytest.raises(InputError, match=re.escape(sentence)):
        evaluation.main(replace(args, data=tmp_path, out=tmp_path / "eval"))
    assert not (tmp_path / "eval").exists()


def rows_of_ties(*identities: str) -> list[dict]:
    """Return one pair for each id."""
    of_all = {"benchmark": "RewardBench 2", "subset": "Ties", "chosen": 0, "rejected": 0}
    return [
        {"query": "q", "chosen": " a", "rejected": " b", "meta": of_all | {"id": identity, "record": number}}
        for number, identity in enumerate(identities)
    ]


def test_ties_without_their_other_row_are_counted_and_refused_where_none_has_it(args, tmp_path, capsys):
    ours = replace(args, data=tmp_path, out=tmp_path / "eval", reward_models=args.reward_models[:2])
    path = tmp_path / "comparisons.validation.jsonl"
    for identities, sentence in (
        (("tied:0", "tied:1", "ref:2"), "no question of Ties has both its records, ref:N and tied:N"),
        (("tied:0", "ref:0", "ref:0"), "several records of Ties have the id 'ref:0'"),
    ):
        write_jsonl(path, rows_of_ties(*identities))
        with pytest.raises(InputError, match=sentence):
            evaluation.main(ours)
        assert not ours.out.exists()
    write_jsonl(path, rows_of_ties("ref:0", "tied:0", "tied:1"))
    assert evaluation.main(ours)["num_unpaired_ties"] == 1
    assert "1 rows of Ties are excluded because their question has no second row." in capsys.readouterr().out


def test_a_plan_has_the_models_and_the_reference(rewardbench_result):
    args, _ = rewardbench_result
    plan = eval_plan(replace(args, max_query_length=160, max_response_length=60))
    assert "model" in plan and "reference" in plan
