"""Scores of RewardBench, RewardBench 2 and RM-Bench against loops over their definitions, and worked by hand."""

import math
from statistics import fmean

import numpy as np
import pytest

from nanorlhf.metrics import wilson_interval
from nanorlhf.metrics.benchmark_scores import (
    SECTIONS,
    SUBSETS_2,
    Row,
    benchmark_tables,
    groups,
    style_accuracies,
    style_matrices,
    summary,
    ties_values,
)


def make_rows(counts: dict[str, tuple[int, int, int]]) -> list[Row]:
    """Return rows; counts: subset -> rows, chosen and rejected responses of each."""
    rows, next_index = [], 0
    for subset, (num_rows, num_chosen, num_rejected) in counts.items():
        for number in range(num_rows):
            indices = list(range(next_index, next_index + num_chosen + num_rejected))
            rows.append(Row(subset, str(number), indices[:num_chosen], indices[num_chosen:]))
            next_index += num_chosen + num_rejected
    return rows


def random_scores(rows: list[Row], num_seeds: int = 1) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(num_seeds, 1 + max(max(row.rejected) for row in rows)))


def lines_by_name(table: dict) -> dict[str, dict]:
    return {line["name"]: line for line in table["lines"]}


def test_rewardbenchs_sections_are_weighted_as_published() -> None:
    rows = make_rows({subset: (3 + i % 4, 1, 1) for section in SECTIONS.values() for i, subset in enumerate(section)})
    scores = random_scores(rows)
    [table] = benchmark_tables("RewardBench", rows, {"rm": scores}, seed=1)
    means = {name: line["models"]["rm"]["mean"] for name, line in lines_by_name(table).items()}
    section_means = []
    for section, weights in SECTIONS.items():
        accuracies = {}
        for subset in weights:
            pairs = [(row.chosen[0], row.rejected[0]) for row in rows if row.subset == subset]
            accuracies[subset] = fmean(scores[0, c] > scores[0, r] for c, r in pairs)
            assert means[subset] == pytest.approx(accuracies[subset])
        total = sum(accuracies[subset] * weight for subset, weight in weights.items())
        section_means.append(total / sum(weights.values()))
        assert means[section] == pytest.approx(section_means[-1])
    assert means["overall"] == pytest.approx(fmean(section_means))
    assert lines_by_name(table)["overall"]["num_rows"] == len(rows)
    assert list(means)[:5] == ["Chat", "Chat Hard", "Safety", "Reasoning", "overall"]


def test_the_published_sizes_are_those_of_the_benchmark() -> None:
    """RewardBench has 2,985 rows. math-prm has 447, but is weighted like six times 164 programs."""
    sizes = {subset: size for section in SECTIONS.values() for subset, size in section.items()}
    assert len(sizes) == 23 and sum(sizes.values()) - sizes["math-prm"] + 447 == 2985
    assert sizes["math-prm"] == sum(size for subset, size in sizes.items() if subset.startswith("hep-"))


def test_nothing_is_overall_from_which_a_section_is_missing() -> None:
    assert list(groups("RewardBench", {"math-prm": 4, "hep-go": 2})) == ["Reasoning"]
    assert "overall" not in groups("RewardBench 2", {"Math": 4, "Focus": 2})
    assert list(groups("RM-Bench", {"chat": 4, "safety-refuse": 2})) == ["safety"]
    assert groups(None, {"a": 3, "b": 1}) == {"overall": {"a": 0.75, "b": 0.25}}


def test_in_rewardbench_2_the_right_answer_beats_all_three() -> None:
    rows = [Row("Math", "0", [0], [1, 2, 3]), Row("Math", "1", [4], [5, 6, 7]), Row("Focus", "2", [8], [9, 10, 11])]
    scores = np.array([[3.0, 1, 2, 0, 3, 1, 2, 3.5, 5, 5, 1, 1]])  # right, wrong, and a tie, which is wrong
    [table] = benchmark_tables("RewardBench 2", rows, {"rm": scores}, seed=1)
    of_math, of_focus = (lines_by_name(table)[subset]["models"]["rm"] for subset in ("Math", "Focus"))
    assert of_math == {"mean": 0.5, "std": None, "interval": wilson_interval(0.5, 2)}
    assert of_focus["mean"] == 0 and "overall" not in lines_by_name(table)


def test_rewardbench_2_is_the_mean_of_six_subsets() -> None:
    rows = make_rows({subset: (4 + i, 1, 3) for i, subset in enumerate(SUBSETS_2[:-1])})
    last = max(rows[-1].rejected) + 1
    rows += [Row("Ties", "ref:7", [last], [last + 1]), Row("Ties", "tied:7", [last + 2, last + 3], [last + 4])]
    scores = random_scores(rows)
    table, parts = benchmark_tables("RewardBench 2", rows, {"rm": scores}, seed=1)
    means = {name: line["models"]["rm"]["mean"] for name, line in lines_by_name(table).items()}
    assert means["overall"] == pytest.approx(fmean(means[subset] for subset in SUBSETS_2))
    assert lines_by_name(table)["Ties"]["num_rows"] == 1  # a question
    assert list(lines_by_name(parts)) == ["one right", "several right", "clear", "clear in both"]


def test_ties_by_hand() -> None:
    """Three questions: all clear; clear except for a small gap of the one right answer; a wrong answer ranked first."""
    ref = [([9.0], [2.0]), ([3.0], [2.5]), ([1.0], [4.0])]
    tied = [([8.0, 7.0], [1.0]), ([6.0, 5.0], [2.0]), ([9.0, 3.0], [4.0])]
    rows, scores = [], []
    for kind, groups_of_scores in (("ref", ref), ("tied", tied)):
        for number, (right, wrong) in enumerate(groups_of_scores):
            first = len(scores)
            scores += right + wrong
            indices = list(range(first, len(scores)))
            rows.append(Row("Ties", f"{kind}:{number}", indices[: len(right)], indices[len(right) :]))
    rows.append(Row("Ties", "tied:99", [0], [1]))  # unpaired
    results = {name: values[0].tolist() for name, values in ties_values(rows, np.array([scores])).items()}
    assert results["one right"] == [1, 1, 0] and results["several right"] == [1, 1, 0]
    assert results["clear"] == [1, 1, 0] and results["clear in both"] == [1, 0, 0]
    # smaller gaps 6, 0.5 and -3 over spreads 1, 1 and 6
    margins = [math.tanh(6 - 1), math.tanh(0.5 - 1), math.tanh(-0.5 - 1)]
    values = [1 + 0.01 * margins[0], 0.8 + 0.01 * margins[1], 0.01 * margins[2]]
    assert results["Ties"] == pytest.approx(values)


def test_right_answers_that_score_the_same_have_the_limit_of_the_margin() -> None:
    rows = [
        Row("Ties", "ref:0", [0], [1]), Row("Ties", "tied:0", [2, 2], [1]),
        Row("Ties", "ref:1", [1], [1]), Row("Ties", "tied:1", [2, 2], [1]),
    ]  # fmt: skip
    values = ties_values(rows, np.array([[5.0, 1, 3]]))["Ties"][0]
    assert values == pytest.approx([1.01, 0.3 + 0.2])  # tanh of infinity; of 0 / 0: 0


def test_rm_benchs_accuracies_are_those_of_the_matrix() -> None:
    rows = make_rows({"chat": (20, 3, 3), "code": (5, 3, 3), "math": (6, 3, 3), "safety-refuse": (4, 3, 3),
                    "safety-response": (9, 3, 3)})  # fmt: skip
    scores = random_scores(rows, num_seeds=2)
    tables = benchmark_tables("RM-Bench", rows, {"rm": scores}, seed=1)
    assert [table["name"] for table in tables] == ["average", "easy", "normal", "hard"]
    lines = {table["name"]: lines_by_name(table) for table in tables}
    wanted: dict[str, list[list[float]]] = {"easy": [], "normal": [], "hard": []}
    for seed in range(2):
        counts: dict[str, list[float]] = {"easy": [], "normal": [], "hard": []}
        for row in rows[:20]:
            for i, chosen in enumerate(row.chosen):
                for j, rejected in enumerate(row.rejected):
                    kind = "hard" if i < j else "easy" if i > j else "normal"
                    counts[kind].append(float(scores[seed, chosen] > scores[seed, rejected]))
        for kind, values in counts.items():
            wanted[kind].append(fmean(values))
    for kind, per_seed in wanted.items():
        of_chat = lines[kind]["chat"]["models"]["rm"]
        assert of_chat["mean"] == pytest.approx(fmean(per_seed))
        assert of_chat["std"] == pytest.approx(abs(per_seed[0] - per_seed[1]) / 2**0.5)
        low, high = of_chat["interval"]
        assert low < of_chat["mean"] < high
    three = [lines[kind]["chat"]["models"]["rm"]["mean"] for kind in wanted]
    means = {name: line["models"]["rm"]["mean"] for name, line in lines["average"].items()}
    assert means["chat"] == pytest.approx(fmean(three))
    pooled = (4 * means["safety-refuse"] + 9 * means["safety-response"]) / 13
    assert means["safety"] == pytest.approx(pooled) and lines["hard"]["safety"]["num_rows"] == 13
    assert means["overall"] == pytest.approx(fmean([means["chat"], means["code"], means["math"], pooled]))


def test_a_model_of_style_alone_is_right_where_style_helps() -> None:
    rows = [Row("chat", "0", [0, 1, 2], [3, 4, 5])]
    scores = np.array([[1.0, 2, 3, 1, 2, 3]])
    accuracies = style_accuracies(style_matrices(rows, scores))
    assert {name: values.item() for name, values in accuracies.items()} == {
        "average": pytest.approx(1 / 3), "easy": 1, "normal": 0, "hard": 0,
    }  # fmt: skip


def test_the_interval_of_a_weighted_mean_covers_it_in_95_of_100_samples() -> None:
    generator = np.random.default_rng(7)
    covered = 0
    for number in range(200):
        parts = [(3.0, generator.random((1, 60)) < 0.8), (1.0, generator.random((1, 40)) < 0.3)]
        low, high = summary([(w, values.astype(float)) for w, values in parts], seed=number)["interval"]
        covered += low <= 0.75 * 0.8 + 0.25 * 0.3 <= high
    assert 0.90 <= covered / 200 <= 0.99
