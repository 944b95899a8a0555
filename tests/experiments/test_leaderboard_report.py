"""Ranks with ties, the comparison of two sets, and the CSV, from rows written by hand."""

import numpy as np
import pytest
from scipy import stats

from experiments.leaderboard import report
from experiments.leaderboard.report import (
    COLUMNS,
    MARKS,
    Args,
    Row,
    agreement,
    agreement_section,
    is_better,
    joined,
    leaderboard_table,
    main,
    picture,
    ranks,
    rates,
    read_results,
    refused_section,
    reproduction_section,
    results_text,
    study_rows,
    worst,
)
from experiments.worlds import report as study
from nanorlhf.errors import InputError

RATES = {  # world by world
    "high": [0.95, 0.93, 0.96, 0.94],
    "also high": [0.94, 0.95, 0.93, 0.95],
    "unsteady": [0.99, 0.98, 0.99, 0.60],
    "low": [0.80, 0.78, 0.82, 0.79],
    "lowest": [0.60, 0.59, 0.63, 0.58],
}


def row(entry: str, number: int, rate: float, budget: int = 1024, name: str = "public", **columns: str) -> Row:
    known = {
        "set": name, "number": str(number), "entry": entry, "budget": str(budget), "digest": "0a1b", "refused": "",
        "gold_win_rate": str(rate), "gold_score": "3", "num_scored": str(budget), "seconds": "9",
    }  # fmt: skip
    return dict.fromkeys(COLUMNS, "") | known | columns


@pytest.fixture
def rows() -> list[Row]:
    """The five entries in worlds 1 to 4 of the public set, and of a secret one where the first two swap."""
    secret = RATES | {"high": RATES["low"], "low": RATES["high"]}
    return [
        row(entry, number, rate, name=name)
        for name, table in (("public", RATES), ("secret-0a", secret))
        for entry, values in table.items()
        for number, rate in enumerate(values, start=1)
    ]


def by_entry(table: dict[str, list[float]]) -> report.Rates:
    return {
        entry: {str(number): rate for number, rate in enumerate(values, start=1)} for entry, values in table.items()
    }


# ------------------------------------------------------------------------------------------------------------ the ranks
def test_an_entry_is_better_if_the_paired_interval_is_above_zero() -> None:
    table = by_entry(RATES)
    for ours in RATES:
        for theirs in RATES:
            if ours != theirs:
                test = stats.ttest_rel(RATES[ours], RATES[theirs])
                assert is_better(table[ours], table[theirs]) == (test.pvalue < 0.05 and test.statistic > 0)
    assert not is_better({"1": 0.9}, {"1": 0.1}) and not is_better({"1": 0.9, "2": 0.9}, {"3": 0.1, "4": 0.1})


def test_only_common_worlds_count() -> None:
    ours, theirs = {"1": 0.9, "2": 0.8, "5": 0.0}, {"1": 0.8, "2": 0.78, "6": 1.0}
    assert not is_better(ours, theirs)  # two differences, 0.1 and 0.02, whose interval reaches below 0
    assert is_better(ours | {"3": 0.9, "4": 0.9}, theirs | {"3": 0.8, "4": 0.8})


def test_entries_without_a_clear_difference_share_a_rank() -> None:
    ranked = ranks(by_entry(RATES))
    # the unsteady one's interval against `low` includes 0, because of one world
    assert {name: by_mean for name, (by_mean, _) in ranked.items()} == {
        "high": 1, "also high": 1, "unsteady": 1, "low": 3, "lowest": 5
    }  # fmt: skip
    assert ranks(by_entry({"a": [0.9, 0.8], "b": [0.9, 0.8]})) == {"a": (1, 1), "b": (1, 1)}


def test_the_worst_world_ranks_by_its_interval_over_queries() -> None:
    lowest, (low, high) = worst({"1": 0.9, "2": 0.75})
    assert lowest == 0.75 and (low, high) == pytest.approx(
        stats.binomtest(192, 256).proportion_ci(method="wilson"), abs=1e-4
    )
    by_worst = {name: rank for name, (_, rank) in ranks(by_entry(RATES)).items()}
    # 0.93 and 0.93 tie, 0.78 is below both; 0.60 and 0.58 tie below those three
    assert by_worst == {"high": 1, "also high": 1, "low": 3, "unsteady": 4, "lowest": 4}


def test_the_table_is_sorted_by_rank_and_then_by_mean() -> None:
    head, *lines = leaderboard_table(by_entry(RATES))
    assert [line[1] for line in lines] == ["`high`", "`also high`", "`unsteady`", "`low`", "`lowest`"]
    low, high = stats.t.interval(0.95, 3, np.mean(RATES["low"]), stats.sem(RATES["low"]))
    assert lines[3] == ["3", "`low`", f"0.797 [{low:.3f}, {high:.3f}]", "4", "3", lines[3][-1]]
    assert lines[3][-1].startswith("0.780 [0.7") and len(head) == len(lines[0])


def test_the_interval_of_a_mean_win_rate_is_cut_off_at_0_and_1() -> None:
    assert report.mean_interval({"1": 0.9, "2": 0.6}) == (0.0, 1.0)
    low, high = stats.t.interval(0.95, 2, 0.95, stats.sem([0.9, 0.95, 1.0]))
    assert report.mean_interval({"1": 0.9, "2": 0.95, "3": 1.0}) == (pytest.approx(low), 1.0) and high > 1
    assert report.mean_interval({"1": 0.9}) is None


def test_an_entry_without_all_worlds_is_listed_without_a_rank() -> None:
    table = by_entry(RATES) | {"partial": {"1": 0.99, "3": 0.99}}
    assert {*report.complete(table)} == {*RATES}
    lines = {line[1]: line for line in leaderboard_table(table)}
    assert lines["`partial`"][0] == lines["`partial`"][4] == "-" and lines["`partial`"][3] == "2"
    assert leaderboard_table(table)[-1][1] == "`partial`" and leaderboard_table(table)[:-1] == leaderboard_table(
        by_entry(RATES)
    )


# ------------------------------------------------------------------------------------------------------------- the sets
def test_an_entry_without_responses_counts_at_every_budget_and_a_refused_one_at_none() -> None:
    rows = [row("dpo", 1, 0.9, budget=0), row("ppo", 1, 0.8, budget=256), row("ppo", 1, 0.95)]
    rows += [row("cheat", 1, 0.99), row("cheat", 2, 0.0, refused="budget: it asked for more", gold_win_rate="")]
    assert rates(rows, "public", 1024) == {"dpo": {"1": 0.9}, "ppo": {"1": 0.95}}
    assert rates(rows, "public", 256) == {"dpo": {"1": 0.9}, "ppo": {"1": 0.8}}
    [heading, text] = refused_section(rows)
    assert heading == "### Refused" and "| `cheat` | public | 2 | 1024 | budget: it asked for more |" in text
    assert refused_section(rows[:3]) == []


def test_tuning_worlds_are_not_in_the_public_set() -> None:
    rows = [row("a", number, 0.9) for number in (1, 101)]
    assert rates(rows, "public", 1024) == {"a": {"1": 0.9}}
    assert rates([line | {"set": "secret-0a"} for line in rows], "secret-0a", 1024)["a"] == {"1": 0.9, "101": 0.9}


def test_two_sets_are_compared_pair_by_pair(rows) -> None:
    public, secret = (rates(rows, name, 1024) for name in ("public", "secret-0a"))
    result = agreement(public, secret)
    assert result is not None and result.entries == 5
    means = {name: (np.mean([*public[name].values()]), np.mean([*secret[name].values()])) for name in RATES}
    concordant = discordant = 0
    pairs: set[tuple[str, str]] = set()
    for a in RATES:
        for b in RATES:
            if means[a][0] > means[b][0]:
                concordant, discordant = (
                    concordant + (means[a][1] > means[b][1]),
                    discordant + (means[a][1] < means[b][1]),
                )
                if stats.ttest_rel([*public[a].values()], [*public[b].values()]).pvalue < 0.05:
                    pairs.add((a, b))
    assert result.tau == pytest.approx((concordant - discordant) / 10)
    same, swapped = (
        sum(
            stats.ttest_rel([*secret[a].values()], [*secret[b].values()], alternative=side).pvalue < 0.025
            for a, b in pairs
        )
        for side in ("greater", "less")
    )
    assert (result.pairs, result.same, result.reversed) == (len(pairs), same, swapped) == (6, 4, 1)
    [heading, text] = agreement_section(rows)
    assert heading == "### Public and secret set" and "| `0a` | 1,024 | 5 | 4 | 0.00 |" in text
    assert agreement(public, {"high": {"1": 0.9}}) is None


def test_later_entries_are_compared_with_the_first_in_common_worlds() -> None:
    rows = [row("dpo", number, rate, budget=0) for number, rate in ((1, 0.8), (2, 0.7), (3, 0.9))]
    rows += [row("rloo", 1, 0.9, budget=256), row("mine", 1, 0.85, budget=256), row("mine", 2, 0.85, budget=256)]
    rows += [row("best-of-16", 1, 0.8, budget=0), row("free", 3, 0.95, budget=0, name="secret-0a")]
    heading, text = report.later_section(rows)
    interval = stats.t.interval(0.95, 1, 0.1, 0.05)
    assert heading == "### Later entries against the first"
    assert f"| `mine` | public | 256 | 1, 2 | +0.100 [{interval[0]:+.3f}, {interval[1]:+.3f}] | -0.050 |" in text
    assert [line.split(" | ")[:3] for line in text.splitlines()[3:]] == [
        ["| `free`", "0a", budget] for budget in ("256", "1,024", "4,096")
    ]
    assert report.later_section(rows[:4]) == []


def test_ppo_and_its_other_value_model_are_compared_with_the_same_entries() -> None:
    rates = {"ppo": (0.7, 0.8), "reinforce_plus_plus": (0.9, 0.8), "best-of-16": (0.8, 0.8), "ppo_other": (0.8, 0.85)}
    first, second, third, varied = (
        [row(entry, number, rate, name="secret-0a") for number, rate in enumerate(values, start=1)]
        for entry, values in rates.items()
    )
    rows = [*first, *second, *(line | {"budget": "0"} for line in third)]
    heading, text = report.value_model_section(rows, varied)
    assert heading == "### PPO's value model, 1,024 responses"
    _, _, ppo, other = text.splitlines()
    assert ppo.startswith("| `ppo` | 0a | 0.750 [") and "| 2 | - | -0.100 [" in ppo and "| -0.050 [" in ppo
    low, high = stats.t.interval(0.95, 1, 0.075, 0.025)
    assert f"| 2 | +0.075 [{low:+.3f}, {high:+.3f}] | -0.025 [" in other and "| +0.025 [" in other
    assert report.value_model_section(rows, []) == []
    only = report.value_model_section([], varied)[1]
    assert "| `ppo` | 0a | - | 0 | - | - | - |" in only and only.endswith("| 2 | - | - | - |")


def test_the_first_rows_are_the_studys_final_runs_in_its_20_worlds() -> None:
    known = {"phase": "final", "world": "3", "algorithm": "reinforce++", "budget": "256", "gold_win_rate": "0.8"}
    full = dict.fromkeys(study.COLUMNS, "") | known
    excluded = ({"phase": "tune"}, {"variant": "lambda 1"}, {"world": "21"})
    [one] = study_rows([full, *(full | other for other in excluded)])
    assert one["entry"] == "reinforce_plus_plus" and one["digest"] == "" and one["num_scored"] == "256"
    assert (one["set"], one["number"], one["budget"], one["gold_win_rate"]) == ("public", "3", "256", "0.8")
    again = row("reinforce_plus_plus", 3, 0.7, budget=256)
    assert joined([one], [again, row("mine", 3, 0.7)]) == [one, row("mine", 3, 0.7)]
    [heading, text] = reproduction_section([again, row("mine", 3, 0.7)], [one])
    assert heading.startswith("### Entries") and "| `reinforce_plus_plus` | 256 | 3 | -0.100 |" in text


# -------------------------------------------------------------------------------------------------------------- the CSV
def test_a_csv_is_sorted_and_a_later_row_replaces_an_earlier_one(tmp_path, rows) -> None:
    path = tmp_path / "leaderboard.csv"
    again = row("high", 2, 0.5, digest="ffff")
    path.write_text(results_text([*rows[::-1], again]))
    read = read_results(path)
    assert len(read) == len(rows) and read.count(again) == 1
    numbers = [(line["set"], int(line["number"])) for line in read]
    assert numbers == sorted(numbers) and read_results(tmp_path / "missing.csv") == []


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("set,number", "set,world", ":1: the columns must be set,number,entry"),
        ("public,1,high,1024", "public,1,high", ":2: expected 16 cells, got 15"),
        ("public,1,high,1024", "public,one,high,1024", ":2: number must be a number, got 'one'"),
        (",0.95,3,", ",nan,3,", ":2: gold_win_rate must be a number, got 'nan'"),
        (",0.95,3,", ",,3,", ":2: gold_win_rate is empty, but the entry was not refused"),
    ],
)
def test_a_broken_csv_is_refused(tmp_path, old, new, sentence) -> None:
    path = tmp_path / "leaderboard.csv"
    text = results_text([row("high", 1, 0.95)])
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError) as error:
        read_results(path)
    assert f"{path}{sentence}" in str(error.value)


def test_the_report_writes_tables_and_picture(tmp_path, rows) -> None:
    results, page = tmp_path / "leaderboard.csv", tmp_path / "page.md"
    results.write_text(results_text(rows))
    page.write_text("\n".join(("# Page", *MARKS)))
    none = tmp_path / "none.csv"
    args = Args(csv=results, worlds=none, value_model=none, page=page, out=tmp_path)
    main(args)
    text = page.read_text()
    assert "### Public set, 1,024 responses" in text and "### Secret set `0a`, 1,024 responses" in text
    assert (tmp_path / "leaderboard.png").exists() and "](leaderboard.png)" in text
    main(args)
    assert page.read_text() == text
    results.write_text(results_text([]))
    main(args)
    assert "No rows yet." in page.read_text()


def test_the_picture_has_a_panel_per_set_and_a_row_per_entry(rows) -> None:
    figure = picture(rows)
    assert figure is not None and len(figure.axes) == 2
    labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert labels[::-1] == ["high", "also high", "unsteady", "low", "lowest"]
    dots = [line.get_xdata().tolist() for line in figure.axes[0].lines if line.get_marker() == "."]
    assert sorted(map(sorted, dots)) == sorted(map(sorted, RATES.values()))
    assert picture([]) is None


def test_the_page_shows_the_committed_csv(tmp_path) -> None:
    """The page's tables are up to date."""
    page = tmp_path / "page.md"
    page.write_text(Args.page.read_text())
    main(Args(page=page, out=tmp_path))
    assert page.read_text() == Args.page.read_text()


def test_the_page_quotes_ppos_value_models() -> None:
    """Means and intervals in the text, computed without the report."""
    rows = [line for path in (Args.csv, Args.value_model) for line in read_results(path)]
    rates = {
        name: {
            line["number"]: float(line["gold_win_rate"])
            for line in rows
            if line["set"] == "secret-69f02b77" and line["entry"] == name and line["budget"] in ("0", "1024")
        }
        for name in ("ppo", "ppo_same_rm", "reinforce_plus_plus", "best-of-16")
    }
    assert {tuple(sorted(by_world)) for by_world in rates.values()} == {tuple("12345678")}

    def difference(ours: str, theirs: str) -> str:
        values = np.array([rate - rates[theirs][world] for world, rate in rates[ours].items()])
        low, high = stats.t.interval(0.95, 7, values.mean(), stats.sem(values))
        return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"

    page = " ".join(Args.page.read_text().split())
    assert f"below REINFORCE++ by {difference('reinforce_plus_plus', 'ppo')}" in page
    assert f"below best-of-16 by {difference('best-of-16', 'ppo')}" in page
    new, old = (np.mean([*rates[name].values()]) for name in ("ppo_same_rm", "ppo"))
    assert f"has {new:.3f} instead of {old:.3f}, a difference of {difference('ppo_same_rm', 'ppo')}," in page
    assert not any(
        is_better(rates[name], rates["ppo_same_rm"]) for name in ("reinforce_plus_plus", "best-of-16")
    )  # "neither reversal is significant"
