"""The comparison's tables and pictures, from evaluations and runs written by hand, and its commands."""

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.compare.report import (
    Args,
    best_point,
    cell,
    difference_table,
    equal_cost_table,
    grid_table,
    happened,
    main,
    models_held,
    over_optimisation_figure,
    policy_table,
    read_policies,
    seed_lines,
    to_flags,
    token_figure,
    variant_table,
    with_costs,
)
from experiments.compare.runs import Compare
from experiments.tables import Line, by_policy_and_seed, csv_text
from nanorlhf.errors import InputError
from tests.helpers.page_commands import experiment_runs, parse_settings

BATCH = 8
ROOT = Path(__file__).resolve().parents[2]


def row(gold: float, proxy: float = 0.0, kl: float = 0.0, kl_estimate: float | None = None) -> dict:
    return {
        "gold_win_rate": gold / 10, "gold_score": gold, "rm_score": proxy, "kl": kl, "kl_estimate": kl_estimate,
        "entropy": 1.5, "distinct": None if kl_estimate is not None else 2.25, "eos_rate": 1.0, "response_length": 9.0,
    }  # fmt: skip


def write(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_run(directory: Path, rows: list[dict], settings: dict, seconds: float = 30.0) -> None:
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": i} | r) + "\n" for i, r in enumerate(rows)))
    write(directory / "args.json", settings)
    write(directory / "summary.json", {"seconds": seconds, "peak_resident_bytes": 500_000_000})


def updates(golds: list[float], length: float, seconds: float) -> list[dict]:
    """Rows of train_ppo.py: each update samples 8 responses of a given length and takes a given time."""
    return [
        {
            "episode": BATCH * (i + 1), "gold_score": gold, "objective/score": 2 * i, "objective/kl": 1.0,
            "objective/kl_exact": float(i * i), "response_length": length, "episodes_per_second": BATCH / seconds,
        }
        for i, gold in enumerate(golds)
    ]  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two seeds of ppo, rloo, dpo, rejection and best-of-4, and a grid of two points."""
    runs = tmp_path / "compare"
    for seed, golds in (("1", (3.0, 3.5)), ("2", (4.0, 4.1))):
        directory = runs / seed
        policies = {
            "sft": row(2.0, proxy=-1.0), "ppo": row(golds[0], 1.0, 4.0), "rloo": row(golds[1], 1.0, 1.0),
            "dpo": row(2.5, 0.5, 2.0), "rejection": row(2.6, 0.25, 0.5), "best-of-4": row(2.8, 0.0, 0.636, 0.5),
        }  # fmt: skip
        write(directory / "eval" / "eval.json", {"policies": policies})
        write_run(directory / "sft", [{"loss": 1.0}], {})
        ppo = {"value_coef": 0.1, "reward_model": "rm", "total_episodes": 64}
        write_run(directory / "ppo", updates([2.0, 2.5, 3.0, 4.0], length=10, seconds=3), ppo)
        rloo = updates([2.0, 3.0, 3.5, 3.7, 3.9], length=9, seconds=2)
        write_run(directory / "rloo", rloo, {"algorithm": "rloo", "reward_model": "rm", "total_episodes": 64})
        write_run(directory / "dpo", [{"loss": 0.5}], {"beta": 0.1, "data": str(directory / "data")}, seconds=12)
        write_run(directory / "rejection", [{"loss": 0.5}], {"data": str(directory / "winners")}, seconds=5)
        sampling = {"num_answers": 64, "num_tokens": 480, "seconds": 2.0, "peak_resident_bytes": 600_000_000}
        write(directory / "winners" / "best_of.json", sampling)
    points = {"sft": row(9.0), "lr/3e-4/kl-coef/0.02": row(3.0), "lr/1e-3/kl-coef/0.02": row(3.2)}
    write(runs / "grid" / "ppo" / "eval" / "eval.json", {"policies": points})
    return runs


def table_by_name(lines: list[list[str]]) -> dict[str, dict[str, str]]:
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[1:]}


def test_the_table_has_means_over_seeds_with_students_interval_and_what_each_cost(runs: Path) -> None:
    table = table_by_name(policy_table(read_policies(runs)))
    assert list(table) == ["sft", "ppo", "rloo", "dpo", "rejection", "best-of-4"]
    # 3 and 4: mean 3.5, standard error 0.5, and t of one degree of freedom is tan(0.475 pi) = 12.706
    assert math.tan(0.475 * math.pi) == pytest.approx(12.706, abs=1e-3)
    assert table["ppo"]["gold score"] == "3.50 ± 6.35" and table["ppo"]["seeds"] == "2"
    assert table["sft"]["gold score"] == "2.00 ± 0.00"
    assert table["ppo"]["tokens sampled"] == "320" and table["rloo"]["tokens sampled"] == "360"
    assert table["dpo"]["tokens sampled"] == "0" and table["rejection"]["tokens sampled"] == "480"
    assert [table[name]["seconds"] for name in ("ppo", "dpo", "rejection")] == ["30", "12", "7"]
    assert [table[name]["peak memory, MB"] for name in ("ppo", "rejection")] == ["500", "600"]
    models = {name: row["models held"] for name, row in table.items()}
    assert models == {"sft": "-", "ppo": "4", "rloo": "3", "dpo": "2", "rejection": "2", "best-of-4": "2"}
    assert {table["best-of-4"][key] for key in ("distinct responses", "tokens sampled", "seconds")} == {"-"}
    assert table["sft"]["tokens sampled"] == "-"  # what made the start is none of the comparison's costs


def test_models_are_counted_with_all_members_of_an_ensemble() -> None:
    assert models_held({"value_coef": 0.1, "reward_model": ["a", "b", "c"], "total_episodes": 64}) == 6
    assert models_held({"algorithm": "grpo", "reward_model": None, "total_episodes": 64}) == 2  # a rule scores


def test_differences_are_taken_seed_by_seed(runs: Path) -> None:
    (runs / "3" / "eval").mkdir(parents=True)
    write(
        runs / "3" / "eval" / "eval.json", {"policies": {"sft": row(2.0), "rloo": row(9.0)}}
    )  # no ppo to compare with
    table = table_by_name(difference_table(read_policies(runs), "ppo"))
    assert "ppo" not in table and table["rloo"]["seeds"] == "2"
    gaps = np.array([0.5, 0.1])
    low, high = stats.t.interval(0.95, 1, gaps.mean(), stats.sem(gaps))
    assert table["rloo"]["gold score"] == f"+0.30 [{low:+.2f}, {high:+.2f}]"
    assert table["rloo"]["proxy score"] == "+0.00 [+0.00, +0.00]"
    assert len(difference_table(read_policies(runs), "none")) == 1


def test_a_variant_is_compared_with_its_algorithm_seed_by_seed(runs: Path) -> None:
    for seed, gold in (("1", 3.4), ("2", 4.0)):
        path = runs / seed / "eval/eval.json"
        policies = json.loads(path.read_text())["policies"]
        write(path, {"policies": policies | {"ppo-soft": row(gold, kl=float(seed))}})
    text = csv_text(seed_lines(read_policies(runs)))
    lines = list(csv.DictReader(text.splitlines()))
    assert [(line["policy"], line["seed"]) for line in lines][2:4] == [("ppo", "1"), ("ppo", "2")]
    assert (lines[2]["tokens"], lines[2]["megabytes"], lines[2]["models"]) == ("320", "500", "4")
    assert lines[0]["tokens"] == "" and "seconds" not in lines[0]
    table = table_by_name(variant_table(by_policy_and_seed(lines)))
    assert list(table) == ["ppo", "ppo-soft"] and table["ppo"]["difference"] == "-"  # best-of-4 varies no policy
    gaps = np.array([0.04, 0.0])
    low, high = stats.t.interval(0.95, 1, gaps.mean(), stats.sem(gaps))
    assert table["ppo-soft"]["difference"] == f"+0.020 [{low:+.3f}, {high:+.3f}]"
    half = 12.7062 * np.std([3.4, 4.0], ddof=1) / math.sqrt(2)
    assert table["ppo-soft"]["gold score"] == f"3.70 ± {half:.2f}" and table["ppo-soft"]["KL, nats"] == "1.5 ± 6.4"
    assert len(variant_table(by_policy_and_seed(line for line in lines if line["policy"] != "ppo-soft"))) == 1


def test_at_the_same_cost_counts_only_the_updates_that_fit(runs: Path) -> None:
    """ppo: 4 updates of 80 tokens and 3 s; rloo: 5 of 72 and 2 s. The limits are 320 tokens and 10 s."""
    heading, *lines = equal_cost_table(read_policies(runs))
    assert heading == ["policy", "gold after 320 tokens", "updates", "gold after 10 seconds", "updates"]
    assert lines == [
        ["ppo", "3.17 ± 0.00", "4.0", "2.50 ± 0.00", "3.0"],  # 2.5 3 4, and 2 2.5 3
        ["rloo", "3.40 ± 0.00", "4.0", "3.70 ± 0.00", "5.0"],  # 3 3.5 3.7, and 3.5 3.7 3.9
    ]


def test_the_best_point_of_the_grid_is_that_of_the_highest_gold_score_and_never_the_initial_policy(runs) -> None:
    directory = runs / "grid" / "ppo" / "eval"
    assert best_point(directory / "eval.json") == "lr/1e-3/kl-coef/0.02"
    assert to_flags("lr/1e-3/kl-coef/0.02") == "--lr 1e-3 --kl-coef 0.02"
    assert grid_table(runs)[1:] == [
        ["ppo", "--lr 3e-4 --kl-coef 0.02", "3.00", "0.300", "0.00", ""],
        ["ppo", "--lr 1e-3 --kl-coef 0.02", "3.20", "0.320", "0.00", "yes"],
    ]


def test_gold_and_proxy_are_drawn_against_the_root_of_the_kl_with_best_of_n_in_each_panel(runs: Path) -> None:
    figure = over_optimisation_figure(read_policies(runs))
    assert [axes.get_title("left") for axes in figure.axes] == ["ppo", "rloo", "end of training"]
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"best of n, gold", "best of n, proxy", "gold", "proxy"}
    # sqrt(KL) is 0 1 2 3, gold gains 0 0.5 1 2: running means of three points, of two at the ends
    assert lines["gold"].get_xdata() == pytest.approx([0.5, 1, 2, 2.5])
    assert lines["gold"].get_ydata() == pytest.approx([0.25, 0.5, 3.5 / 3, 1.5])
    assert lines["proxy"].get_ydata() == pytest.approx([1, 2, 4, 5])
    assert lines["best of n, gold"].get_xdata() == pytest.approx([0, math.sqrt(0.636)])
    assert lines["best of n, gold"].get_ydata() == pytest.approx([0, 0.8])
    assert lines["best of n, proxy"].get_ydata() == pytest.approx([0, 1])
    dots = {line.get_label(): line for line in figure.axes[2].lines}
    assert dots["dpo, gold"].get_xdata() == pytest.approx([math.sqrt(2)] * 2)
    assert dots["dpo, proxy"].get_ydata() == pytest.approx([1.5] * 2) and "rejection, gold" in dots


def test_gold_is_drawn_against_the_tokens_sampled(runs: Path) -> None:
    lines = {line.get_label(): line for line in token_figure(read_policies(runs)).axes[0].lines}
    assert set(lines) == {"ppo", "rloo", "dpo, at its end", "rejection, at its end"}
    assert lines["ppo"].get_xdata() == pytest.approx([80, 160, 240, 320])
    assert lines["ppo"].get_ydata() == pytest.approx([2.25, 2.5, 9.5 / 3, 3.5])
    assert [float(xy[0]) for xy in lines["rejection, at its end"].get_data()] == pytest.approx([480, 2.6])


def test_each_of_many_algorithms_has_its_own_line(runs: Path) -> None:
    policies = read_policies(runs)
    many = {"sft": policies["sft"]} | {f"ppo {i}": policies["ppo"] for i in range(20)}
    lines = token_figure(many).axes[0].lines
    assert len(lines) == 20 == len({(line.get_color(), line.get_linestyle()) for line in lines})
    many_policies = {"sft": policies["sft"]} | {f"dpo {i}": policies["dpo"] for i in range(20)}
    assert len(over_optimisation_figure(many_policies).axes[0].lines) == 2 + 2 * 20


def test_dapos_resampled_tokens_count(runs: Path) -> None:
    rows = updates([2.0, 2.5, 3.0], length=10, seconds=3)
    rows[1]["groups/refilled_tokens"] = 30
    assert [row["tokens"] for row in with_costs(rows)] == [80, 190, 270]


def test_the_page_has_only_tables_and_pictures_with_data(runs: Path, tmp_path: Path, capsys) -> None:
    assert main(Args(runs=runs, out=tmp_path / "out")) == ["over_optimisation.png", "sampled_tokens.png"]
    assert (tmp_path / "out" / "sampled_tokens.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "seeds.csv").read_text() == csv_text(seed_lines(read_policies(runs)))
    page = (tmp_path / "out" / "compare.html").read_text()
    assert page.count("<img") == 2 and page.count("<table") == 4 and "3.50 ± 6.35" in page
    said = capsys.readouterr().out
    assert "At the same cost" in said and "written: " in said


def test_all_can_read_the_page(runs: Path, tmp_path: Path, unreadable) -> None:
    main(Args(runs=runs, out=tmp_path / "out"))
    assert not unreadable(tmp_path / "out" / "compare.html")


@pytest.mark.parametrize(
    ("golds", "kind", "said"),
    [
        ((3.3, 4.32), "good", "better than ppo: rloo (+0.31 [+0.18, +0.44])."),
        ((3.5, 4.1), "warn", "no difference shown: rloo (+0.30 [-2.24, +2.84])."),
        ((2.0, 3.1), "bad", "worse than ppo: rloo (-0.95 [-1.59, -0.31])."),
    ],
)
def test_the_page_begins_with_who_is_better(tmp_path: Path, golds, kind, said) -> None:
    for seed, ppo, rloo in (("1", 3.0, golds[0]), ("2", 4.0, golds[1])):
        policies = {"ppo": row(ppo), "rloo": row(rloo), **({"dpo": row(1.0)} if seed == "1" else {})}
        write(tmp_path / seed / "eval" / "eval.json", {"policies": policies})
    policies = read_policies(tmp_path)
    section = happened(policies, "ppo").html()
    assert (
        f'class="happened {kind}"' in section and f"By the gold score, seed by seed, {said[:-1]}; one seed" in section
    )
    assert "no interval: dpo." in section
    assert said.partition("(")[2][:-2] in " ".join(difference_table(policies, "ppo")[1])
    assert happened(policies, "grpo").html() == ""


def test_missing_inputs_omit_only_what_needs_them(tmp_path: Path) -> None:
    write(tmp_path / "1" / "eval" / "eval.json", {"policies": {"sft": row(2.0), "ppo": row(3.0)}})
    policies = read_policies(tmp_path)
    [heading, *lines] = policy_table(policies)
    assert not {"tokens sampled", "seconds", "models held"} & set(heading)
    assert lines[1][:4] == ["ppo", "1", "0.300", "3.00"]  # no interval for a single seed
    [axes] = over_optimisation_figure(policies).axes  # what was evaluated has an end and no curve
    assert axes.get_title("left") == "end of training" and token_figure(policies) is None
    assert len(equal_cost_table(policies)) == len(grid_table(tmp_path)) == 1
    assert main(Args(runs=tmp_path, out=tmp_path / "out")) == ["over_optimisation.png"]
    write_run(
        tmp_path / "1" / "ppo",
        updates([2.0, 3.0], 9, 2),
        {"value_coef": 0.1, "reward_model": "rm", "total_episodes": 64},
    )
    (tmp_path / "1" / "ppo" / "summary.json").unlink()  # still running
    assert table_by_name(policy_table(read_policies(tmp_path)))["ppo"]["tokens sampled"] == "144"


def test_a_mean_of_nothing_is_a_dash() -> None:
    assert cell([], 2, True) == "-" and cell([1.0], 2, True) == "1.00" and cell([12345.6], 0) == "12,346"


def test_bad_input_is_reported_in_one_sentence_and_writes_nothing(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match="has an evaluation: run `python -m experiments compare` first"):
        main(Args(runs=tmp_path / "none", out=out))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no SEED there has an evaluation"):
        main(Args(runs=tmp_path / "empty", out=out))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        main(Args(runs=runs, out=tmp_path / "file"))
    with pytest.raises(InputError, match="eval.json does not exist"):
        best_point(tmp_path / "empty" / "eval.json")
    write(runs / "grid" / "ppo" / "eval" / "eval.json", {"policies": {"sft": row(1.0)}})
    with pytest.raises(InputError, match="no point of the grid has a gold score"):
        best_point(runs / "grid" / "ppo" / "eval" / "eval.json")
    for change, sentence in (
        ({"policies": {}}, "eval.json has no policies"),
        ({"policies": {"sft": row(1.0) | {"kl": "far"}}}, "'kl' must be float"),
        ({"policies": {"sft": {"kl_estimate": None}}}, "gold_win_rate is missing"),
    ):
        write(runs / "2" / "eval" / "eval.json", change)
        with pytest.raises(InputError, match=sentence):
            main(Args(runs=runs, out=out))
    assert not out.exists()


@pytest.mark.parametrize(("loss", "number"), [("sigmoid", 2), ("kto", 2), ("orpo", 1), ("simpo", 1)])
def test_orpo_and_simpo_hold_only_the_policy(loss, number):
    assert models_held({"loss": loss, "beta": 0.1}) == number


# ------------------------------------------------------------------------------------------------ the page
def read_lines(name: str) -> list[Line]:
    with (ROOT / "experiments/compare" / name).open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_page_shows_the_tables_of_its_csvs() -> None:
    expected = []
    for row in read_lines("compare.csv"):
        rate, score = (f"{row[key]} ± {row[f'{key}_half']}" for key in ("gold_win_rate", "gold_score"))
        gap, low, high = (row[f"minus_ppo_gold_win_rate{end}"] for end in ("", "_low", "_high"))
        name = f"`{row['algorithm']}`"
        if row["seeds"] == "1 2 3 4" and (name != "`sft`" or row["processor"] == "Intel Xeon"):  # `sft` once
            expected.append([name, rate, f"{gap} [{low}, {high}]" if gap else "-", score])
    by_policy = by_policy_and_seed(read_lines("moving.csv"))
    assert {*map(len, by_policy.values())} == {8}
    heading, *lines = variant_table(by_policy)
    expected += [[f"`{name}`", *cells] for name, *cells in lines]
    page = (ROOT / "experiments/compare/README.md").read_text()
    tables = [line[2:-2].split(" | ") for line in page.splitlines() if line.startswith("| `") and " ± " in line]
    assert [[line[0].replace(" (initial)", ""), *line[1:]] for line in tables] == expected
    assert f"| {' | '.join(heading)} |" in page


def test_the_log_quotes_the_moving_references() -> None:
    _, *lines = variant_table(by_policy_and_seed(read_lines("moving.csv")))
    differences = {line[0]: line[2] for line in lines}
    moving = [differences[name] for name in ("ppo-soft", "ppo-hard", "dpo-soft", "dpo-hard")]
    quoted = [-float(text.split()[0]) for text in moving]
    assert min(quoted) > 0 and all(", +" in text for text in moving)  # every interval reaches above 0
    log = (ROOT / "docs/log.md").read_text()
    assert f"gold win rate {min(quoted):.3f} to {max(quoted):.3f} lower on average, no interval excludes 0" in log
    assert f"Elastic Reset in PPO: {differences['ppo-reset']} |" in log


# ------------------------------------------------------------------------------------ the runs of the study
def test_all_algorithms_share_grid_and_budget_and_the_grid_has_a_separate_seed() -> None:
    commands = experiment_runs(Compare())
    settings = [(str(command), parse_settings(command)) for command in commands if command.program.endswith(".py")]
    rollouts = [args for text, args in settings if "train_ppo.py" in text or "train_grpo.py" in text]
    epochs: dict[str, set[int]] = {}
    for args in rollouts:
        name = getattr(args, "algorithm", "ppo")
        epochs.setdefault(name, set()).add(args.num_ppo_epochs if name == "ppo" else args.num_epochs)
    assert {(args.total_episodes, args.batch_size) for args in rollouts} == {(1024, 64)}
    other_epochs = {name: epochs.pop(name) for name in ("online_dpo", "dapo", "cispo")}
    assert other_epochs == {"online_dpo": {1}, "dapo": {1, 2}, "cispo": {1, 2}} and set.union(*epochs.values()) == {2}
    points: dict[str, set[tuple[float, float]]] = {}
    for text, args in settings:
        if "/grid/" in str(args.out) and "eval.py" not in text:
            name = args.out.parts[3]
            leash = next(value for key in ("kl_coef", "beta", "num_epochs") if (value := getattr(args, key, 0)) > 0)
            points.setdefault(name, set()).add((args.lr, leash))
            assert args.seed == 5
    assert set(points) == {
        *("ppo", "rloo", "grpo", "dr-grpo", "reinforce++", "gspo", "dapo", "cispo", "online-dpo"),
        *("dpo", "kto", "orpo", "simpo"), "rejection",
    }  # fmt: skip
    separate_grids = [points.pop(name) for name in ("rejection", "orpo", "simpo", "dapo", "cispo")]
    [same] = {frozenset(of_one) for of_one in points.values()}
    for values in separate_grids:
        assert len(same) == len(values) == 4 and {lr for lr, _ in same} == {lr for lr, _ in values}
    [final] = {frozenset(args.seed for _, args in settings if str(args.out).endswith(f"/{name}")) for name in points}
    assert final == {1, 2, 3, 4}
    [sampled] = {
        parse_settings(c) for c in commands if c.program == "data.best_of" and "runs/compare/1/data" in c.words
    }
    assert (sampled.num_queries + sampled.num_validation_queries) * sampled.num_samples == 1024
