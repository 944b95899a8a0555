"""The tables of docs/stackoverflow.md repeat docs/stackoverflow.csv."""

import csv
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "stackoverflow.md").read_text()
SEEDS = ("1", "2", "3")
POLICIES = ("base", "sft", "ppo", "ppo_contrastive", "dpo", "kto")
DIGITS = {"gold_score": 2, "rm_regression": 3, "rm_contrastive": 2, "bleu": 3, "rouge1": 3, "rouge2": 3, "bertscore": 3}
HEADINGS = {
    "SacreBLEU": "bleu", "ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "BERTScore": "bertscore",
    "regression RM": "rm_regression", "contrastive RM": "rm_contrastive", "gold score": "gold_score",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str, str], dict[str, float]]:
    """Return the numbers by seed, policy and metric."""
    with (DOCS / "stackoverflow.csv").open(newline="") as file:
        return {
            (row.pop("seed"), row.pop("policy"), row.pop("metric")): {k: float(v) for k, v in row.items() if v}
            for row in csv.DictReader(file)
        }


def table(corner: str) -> dict[str, list[str]]:
    """Return the cells of the page's table with this first heading, by their first cell, without bold."""
    [lines] = re.findall(rf"^\| {re.escape(corner)} \|.*\n(?:\|.*\n)+", PAGE, re.M)
    heading, _, *body = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines.splitlines()]
    return {name: cells for name, *cells in (heading, *body)}


def with_interval(row: dict[str, float], key: str, digits: int) -> str:
    value, low, high = (f"{row[name]:+.{digits}f}" for name in (key, f"{key}_low", f"{key}_high"))
    return f"{value} [{low}, {high}]"


def test_the_csv_has_every_metric_of_every_policy_at_three_seeds(rows):
    assert set(rows) == {(seed, policy, metric) for seed in SEEDS for policy in POLICIES for metric in DIGITS}


def test_the_first_table_is_the_report_of_seed_1(rows):
    for policy in POLICIES:
        [line] = re.findall(rf"^    {policy} .*±.*$", PAGE, re.M)
        columns = [rows["1", policy, metric] for metric in DIGITS]
        expected = [
            f"{row['mean']:.{d}f} ± {row['std']:.{d}f}" for row, d in zip(columns, DIGITS.values(), strict=True)
        ]
        assert re.findall(r"\S+ ± \S+", line) == expected


def test_the_gold_scores_match_the_csv(rows):
    cells = table("gold score")
    assert cells["gold score"] == list(POLICIES)
    for seed in SEEDS:
        assert cells[f"seed {seed}"] == [f"{rows[seed, policy, 'gold_score']['mean']:.2f}" for policy in POLICIES]


def test_the_best_of_ten_answers_match_the_csv(rows):
    headings, *_ = cells = [*table("best of ten, PPO - SFT").items()]
    metrics = [HEADINGS[heading] for heading in headings[1]]
    for seed, (name, line) in zip(SEEDS, cells[1:], strict=True):
        assert name == f"seed {seed}"
        assert line == [
            with_interval(rows[seed, "ppo", metric], "best_of_10_minus_sft", DIGITS[metric]) for metric in metrics
        ]


def test_correlations_and_reciprocal_ranks_match_the_csv(rows):
    cells = table("SFT's answers")
    del cells["SFT's answers"]
    assert [HEADINGS[name] for name in cells] == [metric for metric in HEADINGS.values() if metric != "gold_score"]
    for name, (spearman, *gains) in cells.items():
        by_seed = [rows[seed, "sft", HEADINGS[name]] for seed in SEEDS]
        assert spearman == ", ".join(f"{row['spearman_gold']:.2f}" for row in by_seed)
        assert gains == [with_interval(row, "mrr_over_chance", 2) for row in by_seed]
