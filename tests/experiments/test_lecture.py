"""The lecture's numbers by hand, and its pictures: they show what is in the runs, and a missing run is named."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_ppo
from experiments.lecture import report as lecture
from experiments.lecture.report import Args, main, masks_figure, three_responses, token_columns
from kernels import k1
from kernels.gae import gae_loop
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.metrics.pair_accuracy import calibration
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import read_metrics

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "lecture.md").read_text(encoding="utf-8")


def two_token_policy(probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logit of the first token and log pi of both, (2,), in float64."""
    logit = torch.tensor(math.log(probability / (1 - probability)), dtype=torch.float64, requires_grad=True)
    return logit, torch.stack([logit, torch.zeros_like(logit)]).log_softmax(0)


def exact_gradient(probability: float, rewards: torch.Tensor) -> float:
    """Differentiate the expected reward with autograd."""
    logit, logprobs = two_token_policy(probability)
    return torch.autograd.grad((logprobs.exp() * rewards).sum(), logit)[0].item()


def estimates(probability: float, rewards: torch.Tensor, baseline: float) -> tuple[list[float], float, float]:
    """Return (r - b) * grad log pi of both tokens, with its mean and variance over the policy's samples."""
    logit, logprobs = two_token_policy(probability)
    slopes = torch.stack([torch.autograd.grad(logprob, logit, retain_graph=True)[0] for logprob in logprobs])
    each, p = (rewards - baseline) * slopes, logprobs.detach().exp()
    mean = (p * each).sum()
    return each.tolist(), mean.item(), (p * (each - mean) ** 2).sum().item()


def last_number(cell: str) -> float:
    return float(re.findall(r"-?\d+\.?\d*", cell)[-1])


def test_the_policy_gradient_by_hand_equals_autograd() -> None:
    rewards = torch.tensor([2.0, 4.0], dtype=torch.float64)
    match = re.search(r"p \* \(1 - p\) = ([\d.]+), so the exact gradient is \1 \* \(2 - 4\) = (-[\d.]+)\.", PAGE)
    assert match and float(match[1]) == pytest.approx(0.8 * 0.2)
    printed = match[2]
    assert exact_gradient(0.8, rewards) == pytest.approx(float(printed), abs=1e-12)
    two = re.search(r"squared difference: ([\d.]+) \* ([\d.]+)\^2 and \1 \* ([\d.]+)\^2", PAGE)
    assert two and two[1] == match[1]
    rows = re.findall(r"^\| `(\(?r[^`]*) \* grad log pi` \| (.+) \|$", PAGE, re.M)
    assert [name for name, _ in rows] == ["r", "(r - 2.4)"]
    for (_, cells), baseline in zip(rows, (0.0, 2.4), strict=True):
        *each, mean, variance = map(last_number, cells.split(" | "))
        for cell in cells.split(" | ")[:2]:
            product = re.fullmatch(r"(\S+) \* (\S+) = (\S+)", cell)
            assert product and float(product[1]) * float(product[2]) == pytest.approx(float(product[3]))
        computed = estimates(0.8, rewards, baseline)
        assert computed[0] == pytest.approx(each, abs=1e-12)
        assert computed[1:] == pytest.approx((mean, variance), abs=1e-12) and mean == float(printed)
        difference = float(two[2] if baseline == 0 else two[3])
        assert abs(each[0] - each[1]) == pytest.approx(difference)
        assert float(two[1]) * difference**2 == pytest.approx(variance, abs=1e-12)


def test_the_best_and_a_harmful_baseline_by_hand_equal_autograd() -> None:
    match = re.search(r"b = ([\d.]+), where .*, makes both estimates (-[\d.]+), with variance 0", PAGE)
    assert match
    each, _, variance = estimates(0.8, torch.tensor([2.0, 4.0], dtype=torch.float64), float(match[1]))
    assert each == pytest.approx([float(match[2])] * 2) and variance == pytest.approx(0, abs=1e-12)
    match = re.search(r"were 4 and 0, the expected reward, ([\d.]+), .* from ([\d.]+) to ([\d.]+)\.\n", PAGE)
    assert match
    for baseline, number in ((0.0, match[2]), (float(match[1]), match[3])):
        _, _, variance = estimates(0.8, torch.tensor([4.0, 0.0], dtype=torch.float64), baseline)
        assert variance == pytest.approx(float(number), abs=1e-12)


def test_the_kl_by_hand_is_the_mean_of_k1() -> None:
    printed = [float(number) for number in re.findall(r"log\(0\.\d / 0\.5\) = (-?[\d.]+) for", PAGE)]
    match = re.search(r"0\.8 \* ([\d.]+) - 0\.2 \* ([\d.]+) = ([\d.]+), is the KL", PAGE)
    assert match and printed == [float(match[1]), -float(match[2])]
    logprobs = two_token_policy(0.8)[1].detach()
    samples = k1(logprobs, torch.full_like(logprobs, 0.5).log())
    assert samples.tolist() == pytest.approx(printed, abs=5e-4)
    assert (logprobs.exp() * samples).sum().item() == pytest.approx(float(match[3]), abs=5e-4)


def test_the_pages_derivation_of_dpos_score_starts_from_an_identity() -> None:
    generator, beta = torch.Generator().manual_seed(0), 0.3
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    score, (policy, reference) = logits[0], logits[1:].softmax(-1)
    unnormalised = reference * (score / beta).exp()
    best, log_z = unnormalised / unnormalised.sum(), unnormalised.sum().log()

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum()

    objective = (policy * score).sum() - beta * kl(policy, reference)
    torch.testing.assert_close(objective, beta * log_z - beta * kl(policy, best), rtol=1e-12, atol=0)
    torch.testing.assert_close(beta * (best / reference).log() + beta * log_z, score, rtol=1e-12, atol=1e-12)
    for line in ("= beta * log Z - beta * KL(policy, best)", "score = beta * log(best / reference) + beta * log Z"):
        assert line in PAGE


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
