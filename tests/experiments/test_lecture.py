"""The lecture's pictures: what they show is in the runs, and a run that is missing is named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_ppo
from experiments.lecture import report as lecture
from experiments.lecture.report import Args, main, masks_figure, three_responses, token_columns
from kernels.gae import gae_loop
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.metrics.pair_accuracy import calibration
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import read_metrics


@pytest.fixture(scope="module")
def runs(miniature, tmp_path_factory) -> Path:
    """As `make demo` and `make overoptimise` leave them, from one run of PPO; two models on four pairs."""
    runs = tmp_path_factory.mktemp("lecture") / "tiny"
    runs.mkdir()
    for name in ("data", "sft", "rm"):
        (runs / name).symlink_to(miniature.root / name)
    train_ppo.main(replace(miniature.ppo, out=runs / "ppo", total_episodes=16, lr=1e-2))
    (runs / "ppo_fast_no_kl").symlink_to("ppo")
    models = {name: calibration(scale * np.array([[0.2, 0.9, -0.3, 1.4]])) for name, scale in (("rm", 1), ("dpo", 0.1))}
    (runs / "eval").mkdir()
    (runs / "eval" / "eval.json").write_text(json.dumps({"rewards": {"sets": {"validation": {"calibration": models}}}}))
    return runs


def texts_and_colors(figure) -> tuple[list[str], list[str]]:
    [axes] = figure.axes
    return [text.get_text() for text in axes.texts], [matplotlib_hex(patch.get_facecolor()) for patch in axes.patches]


def matplotlib_hex(color: tuple[float, ...]) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in color[:3])


def test_all_five_pictures_are_written_and_the_response_numbers_printed(runs, tmp_path, capsys) -> None:
    names = main(Args(runs=runs, out=tmp_path / "out"))
    assert names == ["masks.svg", "tokens.svg", "training.svg", "overoptimisation.svg", "calibration.svg"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    assert all(b"</svg>" in (tmp_path / "out" / name).read_bytes() for name in names)
    printed = capsys.readouterr().out
    assert "advantage" in printed and "TL;DR:" in printed


def test_the_masks_are_drawn_as_typed(runs) -> None:
    """Two queries of 2 and 6 tokens; one response ends, the other is cut. R = real or counts, # = masked."""
    tokenizer = load_tokenizer(runs / "ppo")
    pad, eos = tokenizer.pad_id, tokenizer.eos_id
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    query = torch.tensor([[pad] * 4 + [a, b], [a] * 6])
    response = torch.tensor([[a, eos, pad, pad], [a, b, a, b]])
    words, colors = texts_and_colors(masks_figure(query, response, tokenizer))
    first, second = words[2 : 2 + 20], words[22:]  # 10 tokens, two masks of 4 cells with their names
    assert words[:2] == ["query, Q = 6", "response, T = 4"]
    assert first[:10] == ["[PAD]"] * 3 + ["...", "a", "b", "a", "EOS", "[PAD]", "[PAD]"]
    assert first[10:] == ["", "", "", "", "actions", "", "", "score", "", "states"]
    assert second[10:] == ["", "", "", "", "actions", "", "", "", "score", "states"]
    drawn = "".join({lecture.REAL: "R", lecture.MASKED: "#", lecture.BLANK: "."}[color] for color in colors)
    assert drawn == "###RRRRR##" + "..##" + "...#" + "RRRRRRRRRR" + "...." + "...."


def test_the_three_responses_are_the_shortest_the_middle_and_the_longest(runs) -> None:
    tokenizer = load_tokenizer(runs / "ppo")
    rows = list(load_demonstrations(runs / "data" / "sft.validation.jsonl", tokenizer, None, None))
    query, response = three_responses(runs, rows, tokenizer)
    lengths = (response != tokenizer.pad_id).sum(1).tolist()
    assert lengths == sorted(lengths) and response.shape == (3, lecture.RESPONSE_LENGTH)
    known = {tuple(row.query) for row in rows}
    assert {tuple(i for i in ids if i != tokenizer.pad_id) for ids in query.tolist()} <= known


def test_the_advantages_are_those_of_the_loop_and_the_rewards_add_up(runs) -> None:
    tokenizer = load_tokenizer(runs / "ppo")
    row = load_demonstrations(runs / "data" / "sft.validation.jsonl", tokenizer, None, None)[0]
    tokens = token_columns(runs, row, tokenizer)
    rewards, values = (torch.tensor([tokens[name]], dtype=torch.float64) for name in ("reward", "value"))
    settings = json.loads((runs / "ppo" / "args.json").read_text())
    expected, _ = gae_loop(rewards, values, settings["gamma"], settings["lam"])
    assert tokens["advantage"] == pytest.approx(expected[0].tolist(), abs=1e-5)
    figure = lecture.tokens_figure(tokens)
    heights = [[bar.get_height() for bar in axes.patches] for axes in figure.axes]
    assert heights[2] == tokens["advantage"] and heights[1] == tokens["reward"]


def test_the_curves_are_those_of_the_metrics(runs) -> None:
    rows = read_metrics(runs / "ppo")
    figure, _ = lecture.draw_picture("training", runs)
    proxy, gold = (line.get_ydata().tolist() for line in figure.axes[0].lines)
    assert proxy == [row["objective/score"] for row in rows] and gold == [row["gold_score"] for row in rows]
    assert figure.axes[1].lines[0].get_ydata().tolist() == [row["objective/kl"] for row in rows]
    figure, _ = lecture.draw_picture("overoptimisation", runs)
    points = figure.axes[1].collections[1].get_offsets()
    assert points[-1].tolist() == pytest.approx(
        [max(0, rows[-1]["objective/kl"]) ** 0.5, rows[-1]["gold_score"] - rows[0]["gold_score"]]
    )
    titles = [axes.get_title("left") for axes in figure.axes]
    assert titles == ["ppo: lr 0.01, beta 0.05", "ppo_fast_no_kl: lr 0.01, beta 0.05"]


@pytest.mark.parametrize(
    ("missing", "picture", "sentence"),
    [
        ("ppo/summary.json", "masks", "no finished run ppo: run `make demo` first"),
        ("ppo_fast_no_kl", "overoptimisation", "no finished run ppo_fast_no_kl: run `make overoptimise` first"),
        ("eval/eval.json", "calibration", "no evaluation eval: run `make demo` first"),
        ("ppo/metrics.jsonl", "training", "a score or the KL is missing"),
        ("ppo/value_model", "tokens", "has no value model"),
    ],
)
def test_missing_runs_are_named_and_nothing_is_written(runs, tmp_path, missing, picture, sentence) -> None:
    for source in (path for path in runs.iterdir() if path.name != missing):
        if source.name == missing.partition("/")[0]:
            (tmp_path / source.name).mkdir()
            for part in (part for part in source.iterdir() if f"{source.name}/{part.name}" != missing):
                (tmp_path / source.name / part.name).symlink_to(part)
        else:
            (tmp_path / source.name).symlink_to(source)
    with pytest.raises(InputError, match=sentence):
        main(Args(runs=tmp_path, pictures=(picture,), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
