"""The laboratory's pictures and table, from evaluations written by hand, and its base, which is data.tiny's default."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from data.tiny import Args as World
from experiments.lab import report as lab
from experiments.lab.report import Args, dial_figure, main, make_table, read_settings
from experiments.lab.runs import BASE, Lab, labels
from nanorlhf.errors import InputError
from nanorlhf.metrics.pair_accuracy import accuracy_table, calibration, deciders
from tests.helpers.page_commands import Command, experiment_runs, parse_settings

ROOT = Path(__file__).resolve().parents[2]


def reward_evaluation(accuracy: float, kappa: float | None = 0.5, num_pairs: int = 40) -> dict:
    """As eval.py tiny-rm writes it: a share of the pairs is ranked as labelled, 3/4 of the labels are right."""
    right = np.arange(num_pairs) < accuracy * num_pairs
    margins = {"rm": np.where(right, 1.0, -0.6)[None]}
    golds = np.where(np.arange(num_pairs) < 0.75 * num_pairs, 1.0, -1.0)
    lengths = np.array([[5, 3]] * (num_pairs // 2) + [[3, 5]] * (num_pairs // 2))
    return {
        "sets": {
            "validation": {
                "accuracy": accuracy_table({("all", ""): list(range(num_pairs))}, margins),
                "calibration": {"rm": calibration(margins["rm"])},
                "deciders": deciders(margins, lengths, golds),
            }
        },
        "agreement": None if kappa is None else {"fleiss_kappa": kappa, "circular_share": 0.125},
    }


def write(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def train(directory: Path, lengths: list[float], win_rate: float) -> None:
    rows = [
        {
            "step": i,
            "gold_score": 2 - 0.1 * i,
            "objective/score": 0.5 * i,
            "objective/kl": float(i),
            "response_length": x,
        }
        for i, x in enumerate(lengths)
    ]
    (directory / "ppo").mkdir(parents=True)
    (directory / "ppo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sft = {"gold_win_rate": 0.4, "gold_score": 2.0, "response_length": 6.0, "kl": 0.0}
    ppo = {"gold_win_rate": win_rate, "gold_score": 1.5, "response_length": lengths[-1], "kl": 3.0}
    reward_model = {"samples_gold_agreement": 0.6, "num_sample_pairs": 9}
    write(directory / "eval" / "eval.json", {"policies": {"sft": sft, "ppo": ppo}, "reward_model": reward_model})


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """flip-rate at three settings, one a link to the base; length-bonus with PPO; a stray directory."""
    runs = tmp_path / "lab"
    write(runs / "base" / "eval_rm" / "eval.json", reward_evaluation(0.9))
    train(runs / "base", [7.0, 8.0, 9.0], 0.8)
    for value, accuracy in (("0.25", 0.7), ("0.1", 0.8)):
        write(runs / "flip-rate" / value / "eval_rm" / "eval.json", reward_evaluation(accuracy, kappa=None))
    write(runs / "length-bonus" / "0.6" / "eval_rm" / "eval.json", reward_evaluation(0.6))
    train(runs / "length-bonus" / "0.6", [7.0, 14.0, 21.0], 0.3)
    for point in ("flip-rate/0", "length-bonus/0"):
        (runs / point).symlink_to("../base")
    (runs / "sft" / "best").mkdir(parents=True)
    return runs


def panels(figure: Figure) -> dict:
    return {axes.get_title("left"): axes for axes in figure.axes}


def test_settings_are_read_in_order_of_value_links_followed(runs: Path) -> None:
    dials = read_settings(runs)
    assert {dial: [setting.value for setting in settings] for dial, settings in dials.items()} == {
        "flip-rate": ["0", "0.1", "0.25"],
        "length-bonus": ["0", "0.6"],
    }
    straight, flipped, _ = dials["flip-rate"]
    assert straight.numbers["rm_labels"] == 0.9 and flipped.numbers["rm_labels"] == 0.8
    assert flipped.numbers["rm_truth"] == pytest.approx(0.95)  # of 40 pairs it follows 2 wrong labels
    assert straight.numbers["labels_truth"] == 0.75 and straight.numbers["labels_longer"] == 0.5
    assert straight.numbers["truth_longer"] == 0.75 and straight.numbers["kappa"] == 0.5
    assert flipped.numbers["kappa"] is None and flipped.updates == []
    biased = dials["length-bonus"][1]
    assert biased.numbers["gold_win_rate"] == 0.3 and biased.numbers["rm_samples"] == 0.6  # the last policy's


def test_a_dial_of_labels_has_a_line_per_measure_over_its_values(runs: Path) -> None:
    figure = dial_figure(read_settings(runs)["flip-rate"])
    axes_by_title = panels(figure)
    assert list(axes_by_title) == [
        "Accuracy of the reward model", "The longer response is preferred", "Calibration", "Calibration of margins",
    ]  # fmt: skip
    axes = axes_by_title["Accuracy of the reward model"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "0.1", "0.25"]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}
    assert lines["against the labels"] == ([0, 1, 2], [0.9, 0.8, 0.7])
    assert lines["the labels against the truth"] == ([0, 1, 2], [0.75] * 3)
    *_, sigmoid = axes_by_title["Calibration of margins"].lines
    assert sigmoid.get_ydata() == pytest.approx(1 / (1 + np.exp(-sigmoid.get_xdata())))


def test_a_dial_with_policies_also_has_a_curve_per_value(runs: Path) -> None:
    axes_by_title = panels(dial_figure(read_settings(runs)["length-bonus"]))
    assert {"Annotators", "After PPO", *(title for title, _ in lab.BY_UPDATE.values())} < set(axes_by_title)
    curves = axes_by_title["PPO: response length"].lines
    assert [line.get_label() for line in curves] == ["length-bonus 0", "length-bonus 0.6"]
    assert curves[1].get_ydata()[1] == pytest.approx(14)  # the mean of three updates


def test_remedies_of_one_reward_model_share_the_panels_of_policies(runs: Path) -> None:
    train(runs / "remedy" / "kl-coef,0.2", [7.0, 9.0, 10.0], 0.5)
    train(runs / "remedy" / "reward-weights,uncertainty", [7.0, 12.0, 20.0], 0.4)
    (runs / "remedy" / "none").symlink_to("../length-bonus/0.6")
    axes_by_title = panels(dial_figure(read_settings(runs)["remedy"]))
    assert set(axes_by_title) == {"After PPO", *(title for title, _ in lab.BY_UPDATE.values())}
    words = [text.get_text() for text in axes_by_title["After PPO"].get_xticklabels()]
    assert words == ["kl-coef\n0.2", "none", "reward-weights\nuncertainty"]


def test_a_single_setting_is_in_the_table_and_has_no_picture(runs: Path) -> None:
    write(runs / "ensemble" / "min" / "eval_rm" / "eval.json", reward_evaluation(0.85))
    dials = read_settings(runs)
    assert dial_figure(dials["ensemble"]) is None
    heading, *lines = make_table(dials)
    assert [line[:2] for line in lines] == [
        ["ensemble", "min"], ["flip-rate", "0"], ["flip-rate", "0.1"], ["flip-rate", "0.25"],
        ["length-bonus", "0"], ["length-bonus", "0.6"],
    ]  # fmt: skip
    row = dict(zip(heading, lines[2], strict=True))
    assert row["RM as labelled"] == "0.800" and row["kappa"] == row["length"] == "-"
    assert dict(zip(heading, lines[5], strict=True))["length"] == "21.0"


@pytest.mark.parametrize(
    ("intervals", "kind", "said"),
    [
        (
            ((0.7, 0.9), (0.2, 0.4)),
            "good",
            "length-bonus: the policy wins most at 0, 0.800 [0.700, 0.900], and least at 0.6, 0.300 [0.200, 0.400].",
        ),
        (((0.3, 0.9), (0.2, 0.4)), "warn", "[0.200, 0.400]; the intervals overlap, so no difference is significant."),
    ],
)
def test_the_page_begins_with_the_best_and_the_worst_of_a_dial(
    runs: Path, tmp_path: Path, intervals, kind, said
) -> None:
    for value, interval in zip(("0", "0.6"), intervals, strict=True):
        path = runs / "length-bonus" / value / "eval" / "eval.json"
        result = json.loads(path.read_text())
        result["policies"]["ppo"]["gold_win_rate_ci"] = list(interval)
        write(path, result)
    main(Args(runs=runs, out=tmp_path / "report"))
    [(css_class, text)] = re.findall(r'<p class="happened (\w+)">(.*?)</p>', (tmp_path / "report/lab.html").read_text())
    assert css_class == kind and text.endswith(said)
    assert "0.300 [0.200, 0.400]" in " ".join(make_table(read_settings(runs))[-1])


def test_a_column_that_no_setting_has_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "temperature" / "1" / "eval_rm" / "eval.json", reward_evaluation(0.9, kappa=None))
    [heading, _] = make_table(read_settings(tmp_path))
    assert "RM right" in heading and not {"kappa", "length", "KL"} & set(heading)


def test_the_page_has_the_table_and_a_picture_per_dial(runs: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "report"
    assert main(Args(runs=runs, out=out)) == ["flip-rate.png", "length-bonus.png"]
    assert {path.name for path in out.iterdir()} == {"flip-rate.png", "length-bonus.png", "lab.html"}
    assert (out / "flip-rate.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "lab.html").read_text()
    assert page.count("<img") == 2 and "RM as labelled" in page
    assert re.search(r"flip-rate +0\.25", capsys.readouterr().out)


def test_all_can_read_the_page(runs: Path, tmp_path: Path, unreadable) -> None:
    main(Args(runs=runs, out=tmp_path / "out"))
    assert not unreadable(tmp_path / "out" / "lab.html")


def drop(*keys: str):
    def change(result: dict) -> None:
        for key in keys[:-1]:
            result = result[key]
        del result[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (drop("sets"), "eval.json: sets.validation is missing: evaluate this setting again"),
        (drop("sets", "validation", "deciders"), "eval.json: deciders.labels is missing"),
        (drop("sets", "validation", "deciders", "models", "rm"), "deciders.models.rm is missing"),
        (lambda result: result["sets"]["validation"]["calibration"].update(dpo={}), "expected one reward model, got 2"),
        (lambda result: result["agreement"].update(fleiss_kappa="high"), "'fleiss_kappa' must be float"),
    ],
)
def test_an_evaluation_that_lacks_something_is_named_and_nothing_is_written(runs, tmp_path, change, sentence) -> None:
    result = reward_evaluation(0.9)
    change(result)
    write(runs / "flip-rate" / "0.4" / "eval_rm" / "eval.json", result)
    with pytest.raises(InputError, match=sentence):
        main(Args(runs=runs, out=tmp_path / "report"))
    assert not (tmp_path / "report").exists()


def test_a_directory_without_evaluations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has an evaluation: run `python -m experiments lab` first"):
        main(Args(runs=tmp_path / "none", out=tmp_path / "out"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="has an evaluation"):
        main(Args(runs=tmp_path, out=tmp_path / "out"))
    with pytest.raises(InputError, match="is a file"):
        main(Args(runs=tmp_path, out=tmp_path / "file"))


def test_the_experiments_base_is_the_default_of_each_dial() -> None:
    """DIAL/VALUE links to the base; were the default another, a picture would show the base at a wrong value."""
    [data, *_] = labels(Lab(), "base")
    world = parse_settings(Command(("python", *data.words)))
    for point in BASE:
        dial, value = point.split("/")
        default = getattr(world, dial.replace("-", "_"))
        assert default == (World().summarisers if value == "all" else float(value)), point


def test_the_laboratory_trains_an_ensemble_of_three_reward_models_with_different_seeds() -> None:
    commands = experiment_runs(Lab())
    [ppo] = [command for command in commands if "--reward-weights" in command.words]
    members = parse_settings(ppo).reward_model
    assert len(set(members)) == 3 and parse_settings(ppo).reward_weights == "uncertainty"
    trained = [parse_settings(command) for command in commands if command.program == "train_rm.py"]
    of_members = [args for args in trained if str(args.out) in members]
    assert len({args.seed for args in of_members}) == 3 and len({(args.data, args.sft) for args in of_members}) == 1
