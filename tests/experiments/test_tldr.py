"""The tables of the study of N+ in the embedded world, from runs written by hand; its commands, probe and pooled RM."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_dpo
import train_ppo
import train_rm
from data import tiny
from experiments.__main__ import commands
from experiments.runs import execute
from experiments.tldr import pooled, probe
from experiments.tldr.constant import one
from experiments.tldr.report import (
    MARKS,
    Args,
    agreement_with_gold,
    combined_accuracy,
    main,
    page_text,
    probed,
    read_values,
)
from experiments.tldr.runs import EXPLANATIONS, Tldr, tldr
from nanorlhf.checkpoint import load_scalar
from nanorlhf.dataset import load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.reward_model import response_scores
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import ROOT
from tests.helpers.page_commands import Command, parse_settings

SIZES = ("32", "128")
WINS = {  # size -> seed -> gold win rates of SFT, PPO, DPO and PPO with whitened rewards
    "32": {1: (0.1, 0.2, 0.2, None), 2: (0.2, 0.3, 0.2, None)},
    "128": {1: (0.4, 0.9, 0.9, 0.8), 2: (0.4, 0.7, 0.9, 0.7), 3: (0.5, 0.8, 0.9, 0.7)},
}


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two sizes: two seeds, and three."""
    for size, by_seed in WINS.items():
        for seed, wins in by_seed.items():
            directory = tmp_path / str(seed) / size
            policies = {
                name: {
                    **dict.fromkeys(("gold_score", "rm_score", "rouge1", "rouge2", "rougeL", "kl"), win),
                    "gold_win_rate": win, "response_length": 10 + win,
                }
                for name, win in zip(("sft", "ppo", "dpo", "whitened"), wins, strict=True) if win is not None
            }  # fmt: skip
            models = {"reward model": {"mean": 0.8 + seed / 100}, "dpo": {"mean": 0.85}}
            accuracy = [{"by": "all", "value": "", "num_pairs": 40, "models": models}]
            for confidence, pairs, right in ((1, 10, 1.0), (4, 10, 0.5), (6, 30, 0.7), (9, 30, 0.8)):
                both = {name: {"mean": right} for name in models}
                accuracy.append({"by": "confidence", "value": str(confidence), "num_pairs": pairs, "models": both})
            write_json(directory / "eval/eval.json", {
                "policies": policies, "rewards": {"sets": {"validation": {"accuracy": accuracy}}},
                "reward_model": {"gold_agreement": 0.9},
            })  # fmt: skip
            sample = {"reference_gold_score": 2.0, "reference_rm_score": 0.0}
            better = {"rm_score": 1.0, "gold_score": 4.0}
            sample["policies"] = {"sft": better, "ppo": better | {"rm_score": -1.0}}
            (directory / "eval/samples.jsonl").write_text(json.dumps(sample) + "\n")
            rewards = {"validation_chosen_reward": -0.5, "validation_rejected_reward": -float(seed)}
            write_json(directory / "dpo/summary.json", rewards)
            write_json(directory / "rm-pooled/summary.json", {"validation_accuracy": 0.86 + seed / 100})
            write_json(directory / "probe.json", {
                "before": [-1.0, 1.0 - seed // 3 * 2, 2.0, 3.0], "end": [0.0], "compared": [[2.0, 3.0], [1.0, 4.0]],
                "bias": -1.5 + seed // 3,
                "pairs": {"rm": [1, -1, 1, -1], "policy": [2, 2, -1, -1], "sft": [1, 3, -2, 0.5]},
                "false": {"rm": [1, -1], "policy": [1, 1], "sft": [0.5, 0.5]}, "invented": [True, True, False, False],
            })  # fmt: skip
            for name, length in (("ppo", 10.0), ("whitened", 9.0), ("offset", 10.0), ("offset-whitened", 5.0)):
                write_json(directory / name / "summary.json", {})
                rows = [
                    {
                        "step": i, "objective/score": i * seed, "gold_score": 2 + i, "objective/kl": i,
                        "response_length": 99 if i == 0 else length + seed,
                    }
                    for i in range(6)
                ]  # fmt: skip
                (directory / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    probe_1 = json.loads((tmp_path / "1/32/probe.json").read_text())
    write_json(tmp_path / "9/128/probe-lr-0.003.json", probe_1)
    write_json(tmp_path / "9/128/probe-lr-1e-05.json", probe_1 | {"before": [-1.0, -1.0, 1.0, 9.0], "bias": 1.0})
    return tmp_path


# ----------------------------------------------------------------------------------------------------------- 1. tables
def test_the_page_has_means_over_seeds_and_differences_within_them(runs, tmp_path):
    args = Args(runs=runs, out=tmp_path / "out", sizes=SIZES)
    main(args)
    text = (args.out / "README.md").read_text()
    half = 12.706205 * math.sqrt(0.02) / math.sqrt(2)  # of 0.9 and 0.7, the seeds that both sizes have
    wins = f"| PPO: gold win rate | 0.250 [-0.385, 0.885] | 0.800 [{0.8 - half:.3f}, {0.8 + half:.3f}] | +0.550 ["
    assert wins in text
    assert "| reward model | 0.650 [0.650, 0.650] | 0.850 [0.850, 0.850] |" in text  # 1 and 4 from undecided
    assert "| DPO | 3 | 0.850 [0.850, 0.850] | +0.030 [+0.005, +0.055] |" in text
    assert (
        "| reward model, mean over the response's tokens | 3 | 0.880 [0.855, 0.905] | +0.060 [+0.060, +0.060] |" in text
    )
    assert "| chosen | -0.500 [-0.500, -0.500] | 3 of 3 |" in text
    assert "| learning rate | 1e-05 | 0.003 |" in text
    assert "| references' mean score before normalisation | 1.000 | -1.500 |" in text
    assert "| negative logits before EOS | 0.500 | 0.250 |" in text
    half = 4.302653 * 0.0577350 / math.sqrt(3)  # of -0.1, 0 and -0.1
    difference = f"-0.067 [{-0.2 / 3 - half:+.3f}, {-0.2 / 3 + half:+.3f}]"
    assert f"| gold win rate | 0.800 [0.552, 1.048] | 0.733 [0.590, 0.877] | {difference} |" in text
    assert "| the references' mean score, as in the paper | 0.333 [-0.025, 0.692] | 0.250 | 0.500 | +1.00 |" in text
    lengths = "12.00 [9.52, 14.48] | 7.00 [4.52, 9.48] | -5.00 [-5.00, -5.00]"
    assert f"| length, tokens | score / 10 + 1 | {lengths} |" in text
    for name in ("sizes.png", "curves.png"):
        assert (args.out / name).read_bytes().startswith(b"\x89PNG")
    with (args.out / "curves.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert rows[8] == {"seed": "2", "size": "32", "update": "2", "score": "4", "gold": "4", "kl": "2"}
    main(replace(args, runs=None))
    assert (args.out / "README.md").read_text() == text


def test_without_a_finished_run_the_error_names_the_command_for_one(tmp_path):
    with pytest.raises(InputError, match="python -m experiments tldr"):
        main(Args(runs=tmp_path, out=tmp_path / "out"))


def test_agreement_leaves_out_equal_gold_scores_and_counts_ties_of_the_reward_model_as_wrong():
    golds_and_scores = [(3.0, 1.0), (1.0, -1.0), (1.0, 1.0), (2.0, 5.0), (3.0, 0.0)]
    samples = [
        {"reference_gold_score": 2.0, "reference_rm_score": 0.0, "policies": {"ppo": {"gold_score": g, "rm_score": s}}}
        for g, s in golds_and_scores
    ]
    assert agreement_with_gold(samples, "ppo") == 2 / 4
    assert agreement_with_gold(samples[3:4], "ppo") is None


def test_the_share_of_negative_logits_depends_on_where_zero_is(runs):
    shares = dict(probed(json.loads((runs / "1/32/probe.json").read_text())))
    # -1, 1, 2 and 3, which were -2.5, -0.5, 0.5 and 1.5 before normalisation; the compared responses' mean is 2.5
    assert [shares[f"negative/{name}"] for name in ("normalised", "unnormalised", "compared")] == [0.25, 0.5, 0.75]
    assert (shares["pairs/rm"], shares["pairs/dpo"], shares["pairs/policy"], shares["pairs/sft"]) == (
        0.5, 0.5, 0.5, 0.75,
    )  # fmt: skip
    assert (shares["invented/dpo"], shares["not_invented/dpo"], shares["false_facts/rm"]) == (0.5, 0.5, 0.5)


def test_two_independent_rankers_together_rank_as_well_as_the_best_rule():
    """Two margins with the same Gaussian noise: the best rule is their sum, which is right with probability Phi."""
    noise = np.random.default_rng(1).standard_normal((20_000, 2))
    margins = (1 + noise) * [1, 100]  # in other units
    assert (margins[:, 0] > 0).mean() == pytest.approx(0.841, abs=0.01)
    best = 0.5 * (1 + math.erf(math.sqrt(2) / math.sqrt(2)))  # Phi(sqrt(2))
    assert combined_accuracy(margins) == pytest.approx(best, abs=0.01)


# ------------------------------------------------------------------------------------------------------------- 2. runs
@pytest.mark.parametrize(
    "settings",
    [
        {"seeds": (1, 5), "size_seeds": (1,)},
        {
            "recipe": "tldr", "sizes": ("EleutherAI/pythia-160m-deduped", "EleutherAI/pythia-1b-deduped"),
            "base": "EleutherAI/pythia-1b-deduped", "lrs": (3e-6,), "gold": "runs/tldr/gold",
        },
    ],
    ids=["tiny", "tldr"],
)  # fmt: skip
def test_every_command_is_one_that_its_program_takes(settings):
    words = list(commands(Tldr(**settings)))
    parsed = [parse_settings(Command(("python", *one))) for one in words]
    outs = [one.out for one in parsed]
    assert all(parsed) and len(set(outs)) == len(outs)


def test_only_the_seeds_of_the_sizes_test_explanations():
    outs = [Path(one[one.index("--out") + 1]) for one in commands(Tldr(seeds=(1, 2), size_seeds=(2,)))]
    assert {out.parts[-3] for out in outs if out.name in EXPLANATIONS} == {"2"}
    assert {out.parts[-3] for out in outs if out.name == "whitened"} == {"1", "2"}
    assert {out.parts[-3:] for out in outs if out.name == "ppo"} == {
        ("1", "128", "ppo"), ("2", "128", "ppo"), ("2", "64", "ppo"), ("2", "32", "ppo"),
    }  # fmt: skip


def test_reward_model_and_dpo_train_at_equal_settings():
    """The recipe's, which are equal for both, except in the runs that try others."""
    rm, dpo = train_rm.RECIPES["tiny"][1], train_dpo.RECIPES["tiny"][1]
    for name in ("lr", "num_epochs", "batch_size", "schedule", "warmup_steps", "adam"):
        assert getattr(rm, name) == getattr(dpo, name)
    for words in commands(Tldr(seeds=(1,), size_seeds=(1,), lrs=(0.5,))):
        if words[0] in ("train_rm.py", "train_dpo.py"):
            args = parse_settings(Command(("python", *words)))
            assert args.lr == (0.5 if args.out.parts[-3] == "9" else rm.lr)


def test_a_constant_score_and_its_whitening_differ_in_nothing_else():
    by_out = {
        Path(words[words.index("--out") + 1]).name: words for words in commands(Tldr(seeds=(1,), size_seeds=(1,)))
    }
    off, on = (parse_settings(Command(("python", *by_out[name]))) for name in ("offset", "offset-whitened"))
    assert replace(off, whiten_rewards=True, out=on.out) == on
    assert off.kl_coef == pytest.approx(0.1 * train_ppo.RECIPES["tiny"][1].kl_coef)
    assert off.reward_weights == (0.1, 1.0) and one(["a", "b"], ["", "c"], [{}, {}]) == [1, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base": "256"}, "--base 256: expected one of --sizes 32 64 128"),
        ({"grid_seed": 2}, "--grid-seed 2 is also in --seeds"),
        ({"size_seeds": (1, 11)}, "--size-seeds 11: expected some of --seeds"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        next(tldr(Tldr(**settings)))


@pytest.mark.slow
def test_the_study_in_miniature(tmp_path):
    args = Tldr(
        out=tmp_path / "runs", sizes=("16", "32"), base="16", seeds=(1,), size_seeds=(1,), lrs=(1e-3,), num_rows=1600
    )
    runs, _ = tldr(args)
    execute(runs, 2)
    main(Args(runs=args.out, out=tmp_path / "out", sizes=args.sizes, base="16"))
    values = read_values(tmp_path / "out/tldr.csv")
    assert {*values} == {"16", "32"} and "accuracy/rm-pooled" in values["16"]
    for size in values.values():
        assert size["pairs/rm"][1] == pytest.approx(size["accuracy/rm"][1], abs=2e-3)  # by eval.py and by the probe
        assert size["pairs/dpo"][1] == pytest.approx(size["accuracy/dpo"][1], abs=2e-3)


# ------------------------------------------------------------------------------------------ 3. the probe, the pooled RM
@pytest.fixture(scope="module")
def probe_json(miniature, tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("probe")
    train_dpo.main(replace(miniature.dpo, out=directory / "dpo"))
    out = directory / "probe.json"
    probe.main(probe.Args(
        data=miniature.rm.data, sft=str(miniature.sft.out), reward_model=str(miniature.rm.out),
        policy=str(directory / "dpo"), out=out, batch_size=5, device="cpu",
    ))  # fmt: skip
    return json.loads(out.read_text())


def test_the_logit_at_a_token_is_the_score_of_the_text_up_to_it(miniature, probe_json):
    tokenizer, model = load_tokenizer(miniature.rm.out), load_scalar(miniature.rm.out)
    rows = list(load_demonstrations(miniature.rm.data / "sft.validation.jsonl", tokenizer, 512, 169))
    before, end = [], []
    for row in rows:
        for t in range(1, len(row.response) + 1):
            with torch.no_grad():
                score = model(torch.tensor([row.query + row.response[:t]]))[0, -1].item()
            (end if t == len(row.response) else before).append(score)
    assert probe_json["before"] == pytest.approx(before, abs=1e-4)
    assert probe_json["end"] == pytest.approx(end, abs=1e-4)
    assert np.mean(probe_json["end"]) != pytest.approx(np.mean(before), abs=0.01)


def test_false_summaries_differ_in_one_fact_that_the_post_does_not_state(miniature):
    tokenizer = load_tokenizer(miniature.rm.out)
    rows = list(load_demonstrations(miniature.rm.data / "sft.validation.jsonl", tokenizer, 512, 169))
    pairs = probe.with_false_facts(rows, tokenizer)
    assert len(pairs) == 4 * len(rows)
    for pair in pairs:
        query, true, false = (tokenizer.decode(ids) for ids in (pair.query, pair.chosen, pair.rejected))
        assert tiny.gold_score(query, true) == 4.0 and tiny.gold_score(query, false) == 1.5
        assert pair.chosen[-1] == pair.rejected[-1] == tokenizer.eos_id


def test_inventions_are_counted_as_the_gold_score_counts_them(miniature, probe_json):
    lines = (miniature.rm.data / "comparisons.validation.jsonl").read_text().splitlines()
    invention = {name: -1.0 if name == "invention" else 0.0 for name in tiny.WEIGHTS}
    for line, invented in zip(lines, probe_json["invented"], strict=True):
        row = json.loads(line)
        chosen, rejected = (tiny.weighted_score(row["query"], row[side], invention) for side in ("chosen", "rejected"))
        assert invented == (rejected < chosen)


def test_a_reward_model_from_a_pooled_policy_scores_the_mean_over_the_response(miniature, tmp_path):
    pooled.main(pooled.Args(sft=str(miniature.sft.out), out=tmp_path / "pooled"))
    train_rm.main(replace(miniature.rm, sft=str(tmp_path / "pooled"), out=tmp_path / "rm"))
    tokenizer, model = load_tokenizer(miniature.rm.out), load_scalar(tmp_path / "rm")
    row = load_demonstrations(miniature.rm.data / "sft.validation.jsonl", tokenizer, 512, 169)[0]
    with torch.no_grad():
        [score] = response_scores(model, [row], tokenizer.pad_id, "left").tolist()
        hidden = model.transformer(torch.tensor([row.query + row.response]))[0, len(row.query) :]  # (T, C)
        expected = (model.score(hidden).squeeze(-1) - model.reward_bias).mean().item()
    assert score == pytest.approx(expected, abs=1e-5)


# -------------------------------------------------------------------------------------------------------------- 4. page
def test_the_page_shows_the_tables_of_its_csv():
    values = read_values(ROOT / "experiments/tldr/tldr.csv")
    assert {len(values[size]["gold_win_rate/ppo"]) for size in ("32", "64")} == {4}
    assert len(values["128"]["gold_win_rate/ppo"]) == len(values["128"]["gold_win_rate/whitened"]) == 8
    text = page_text(values, ("32", "64", "128"), "128")
    assert f"{MARKS[0]}\n\n{text}\n\n{MARKS[1]}" in (ROOT / "experiments/tldr/README.md").read_text()
