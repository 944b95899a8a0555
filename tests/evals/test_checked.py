"""The evaluation of checked answers: pass@k against enumeration, all kinds of rewards, rejected settings."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import eval as evaluation
from nanorlhf.checkpoint import load_gpt, save
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer

N = 4
RULES = """
def even(queries, responses, response_ids):
    return [float(ids[0] % 2 == 0) for ids in response_ids]

def length(queries, responses):
    return [float(len(text)) for text in responses]

def per_token(queries, responses, response_ids):
    return [[0.5] * len(ids) for ids in response_ids]

def nothing(queries, responses):
    return [None] * len(responses)
"""


@pytest.fixture
def args(miniature, tmp_path):
    """Settings for the tiny world's policy, whose responses are random: the rewards look at ids."""
    (tmp_path / "rules.py").write_text(RULES)
    rows = (miniature.root / "data/sft.validation.jsonl").read_text().splitlines()[:3]
    data = tmp_path / "data"
    data.mkdir()
    marked = [json.loads(row) | {"meta": {"level": i % 2}} for i, row in enumerate(rows)]
    (data / "sft.validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    sft = str(miniature.sft.out)
    return replace(
        evaluation.RECIPES["sums"][1], data=data, out=tmp_path / "eval", policies=("a", sft, "b", sft), device="cpu",
        rewards=rules(tmp_path, "even", "length", "per_token"), by="level", num_samples=N, num_queries=None,
        max_query_length=200, max_response_length=100, response_length=6,
    )  # fmt: skip


def rules(directory: Path, *names: str) -> tuple[str, ...]:
    return tuple(f"{directory / 'rules.py'}:{name}" for name in names)


def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_one_that_passes(args):
    result = evaluation.main(args)
    samples = [json.loads(line) for line in (args.out / "samples.jsonl").read_text().splitlines()]
    counts = [row["policies"]["a"]["num_passed"] for row in samples]
    assert any(0 < count < N for count in counts), "choose another seed: all responses got the same reward"
    measured = result["policies"]["a"]["pass_at_k"]
    assert list(measured) == ["1", "2", "4"]
    for k in (1, 2, 4):
        by_choice = [
            fmean(any(i < count for i in chosen) for chosen in itertools.combinations(range(N), k)) for count in counts
        ]
        assert measured[str(k)]["mean"] == pytest.approx(fmean(by_choice))
        low, high = measured[str(k)]["interval"]
        assert 0 <= low <= measured[str(k)]["mean"] <= high <= 1
    assert result["policies"]["a"] == result["policies"]["b"]  # the same policy, the same samples


def test_rewards_are_means_and_those_per_token_are_summed(args):
    of_policy = evaluation.main(args)["policies"]["a"]
    assert of_policy["rewards"]["even"]["mean"] == pytest.approx(of_policy["pass_at_k"]["1"]["mean"])
    assert of_policy["rewards"]["per_token"]["mean"] == pytest.approx(0.5 * of_policy["response_length"])


def test_pass_at_1_of_each_value_of_a_field(args):
    of_policy = evaluation.main(args)["policies"]["a"]
    rows = [json.loads(line) for line in (args.out / "samples.jsonl").read_text().splitlines()]
    shares = [row["policies"]["a"]["num_passed"] / N for row in rows]  # levels 0, 1, 0
    assert of_policy["by"] == {"0": pytest.approx((shares[0] + shares[2]) / 2), "1": pytest.approx(shares[1])}


def test_differences_are_paired_and_the_report_begins_with_them_in_words(args, tmp_path):
    policy = load_gpt(args.policies[1])
    policy.lm_head.weight.data = policy.lm_head.weight.data.roll(1, dims=1)  # another policy
    (tmp_path / "b").mkdir()
    save(policy, tmp_path / "b", load_tokenizer(args.policies[1]))
    result = evaluation.main(replace(args, policies=("a", args.policies[1], "b", str(tmp_path / "b"))))
    rows = [json.loads(line) for line in (args.out / "samples.jsonl").read_text().splitlines()]
    gains = [(row["policies"]["b"]["num_passed"] - row["policies"]["a"]["num_passed"]) / N for row in rows]
    difference = result["differences"]["b"]["pass@1"]
    assert list(result["differences"]) == ["b"] and any(gains)
    assert difference["mean"] == pytest.approx(fmean(gains))
    assert min(gains) <= difference["interval"][0] <= difference["mean"] <= difference["interval"][1] <= max(gains)
    page = (args.out / "report.html").read_text()
    first, *_ = re.findall(r"<p.*?</p>", page, re.S)
    assert (
        'class="happened' in first
        and "b solves" in first
        and f"its pass@1 did not change ({difference['mean']:+.3f}" in first
    )


def test_the_report_has_the_tables_and_the_samples(args, capsys):
    evaluation.main(args)
    said, page = capsys.readouterr().out, (args.out / "report.html").read_text()
    for words in ("pass@4", "pass@1 by level", "per_token", "4 samples per query, 3 queries"):
        assert words in said and words in page
    assert "passed of 4:" in page


def test_all_can_read_the_report(args, unreadable):
    evaluation.main(args)
    assert not unreadable(args.out / "report.html")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"by": "colour"}, "--by colour: a row of sft.validation.jsonl doesn't have this field"),
        ({"rewards": ("even", "even")}, "the functions' names must differ"),
        ({"rewards": ("nothing",)}, "returned None for a response"),
    ],
)
def test_invalid_settings_raise_input_error(args, tmp_path, change, sentence):
    if "rewards" in change:
        change = {"rewards": rules(tmp_path, *change["rewards"])}
    with pytest.raises(InputError, match=sentence):
        evaluation.main(replace(args, **change))
