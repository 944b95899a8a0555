"""The four scripts on slices of the real datasets, with the real tokenizers and a small random model."""

import json
import math
from dataclasses import replace
from statistics import fmean

import pytest

import eval as evaluation
import train_ppo
import train_rm
import train_sft
from data import hh, stackoverflow, tldr
from tests.conftest import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]


@pytest.mark.parametrize(
    ("source", "tokenizer"),
    [("tldr", "gpt2"), ("hh", "gpt_neox_20b/20B_tokenizer.json")],
)
def test_all_stages_run_on_real_posts_and_comparisons(real_data, tmp_path, source, tokenizer) -> None:
    lengths = {"max_query_length": 128, "max_response_length": 169}
    conversion = {"out": tmp_path / "data", "tokenizer": str(real_data / "tokenizers" / tokenizer)}
    if source == "tldr":
        tldr.main(
            tldr.Args(source=str(real_data / "tldr" / "reencoded"), resplit=True, max_query_length=128, **conversion)
        )
    else:
        file = real_data / "hh_rlhf" / "harmless-base" / "test.jsonl.gz"
        hh.main(hh.Args(source=str(file), max_query_length=128, max_response_length=169, **conversion))
    for kind in ("sft", "comparisons"):  # 96 rows are enough for the loss to fall, and 12 to measure it
        for split, count in (("train", 96), ("validation", 12)):
            path = tmp_path / "data" / f"{kind}.{split}.jsonl"
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))

    common = {"data": tmp_path / "data", "device": "cpu", "dtype": "float32", "lr": 3e-3}
    train_sft.main(
        replace(
            train_sft.RECIPES["tldr"][1], **common, **lengths, model=None, n_layer=1, n_head=2, d_model=16,
            out=tmp_path / "sft", batch_size=8, num_epochs=2, loss_on="response", num_samples=2,
        )
    )  # fmt: skip
    train_rm.main(
        replace(
            train_rm.RECIPES["tldr"][1], **common, **lengths, sft=str(tmp_path / "sft"), out=tmp_path / "rm",
            batch_size=8, num_epochs=4,
        )
    )  # fmt: skip
    train_ppo.main(
        replace(
            train_ppo.RECIPES["tldr"][1], **common, sft=str(tmp_path / "sft"), reward_model=str(tmp_path / "rm"),
            out=tmp_path / "ppo", max_query_length=128, response_length=20, total_episodes=16, batch_size=8,
        )
    )  # fmt: skip
    result = evaluation.main(
        replace(
            evaluation.RECIPES["tldr"][1], data=tmp_path / "data", device="cpu", dtype="float32",
            out=tmp_path / "eval", **lengths,
            policies=("sft", str(tmp_path / "sft"), "ppo", str(tmp_path / "ppo")), reward_model=str(tmp_path / "rm"),
            response_length=20, num_queries=6,
        )
    )  # fmt: skip

    for stage in ("sft", "rm"):
        losses = [row["loss"] for row in read_metrics(tmp_path / stage) if "loss" in row]
        assert fmean(losses[-6:]) < fmean(losses[:6]), stage
    first, last = read_metrics(tmp_path / "ppo")
    assert first["policy/first_ratio_error"] < 1e-5 and last["policy/first_ratio_error"] < 1e-5
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4) and math.isfinite(last["objective/kl"])
    assert math.isfinite(result["policies"]["ppo"]["kl"]) and 0 <= result["policies"]["ppo"]["rougeL"] <= 1
    assert json.loads((tmp_path / "eval" / "eval.json").read_text())["policies"]["ppo"]["gold_win_rate"] is None


def test_all_stages_run_on_real_questions_and_votes(real_data, tmp_path) -> None:
    convert = stackoverflow.Args(
        source=real_data / "stackexchange" / "ai.stackexchange.com" / "Posts.xml", out=tmp_path / "data", tag=None,
        question_filter="all", drop_markup=("img",), split_date="2016-10-15", max_length=288, max_response_length=200,
        tokenizer=str(real_data / "tokenizers" / "gpt2"), device="cpu",
    )  # fmt: skip
    stackoverflow.main(convert)
    common = {"data": tmp_path / "data", "device": "cpu"}
    lengths = {"max_query_length": 288, "max_response_length": 200}
    train_sft.main(
        replace(
            train_sft.RECIPES["stackoverflow"][1], **common, **lengths, model=None, n_layer=1, n_head=2, d_model=16,
            out=tmp_path / "sft", num_epochs=1, num_samples=2, lr=3e-3, warmup_steps=0,
        )
    )  # fmt: skip
    stackoverflow.main(replace(convert, generated_by=str(tmp_path / "sft")))
    rm = replace(
        train_rm.RECIPES["stackoverflow"][1], **common, **lengths, sft=str(tmp_path / "sft"), out=tmp_path / "rm",
        num_epochs=1, lr=3e-3, warmup_steps=0,
    )  # fmt: skip
    train_rm.main(rm)
    train_rm.main(replace(rm, loss="regression", out=tmp_path / "rm_regression"))
    train_ppo.main(
        replace(
            train_ppo.RECIPES["stackoverflow"][1], **common, sft=str(tmp_path / "sft"),
            reward_model=str(tmp_path / "rm_regression"), out=tmp_path / "ppo", response_length=16, total_episodes=32,
            batch_size=16,
        )
    )  # fmt: skip
    result = evaluation.main(
        replace(
            evaluation.RECIPES["stackoverflow"][1], **common, **lengths, out=tmp_path / "eval",
            policies=("sft", str(tmp_path / "sft"), "ppo", str(tmp_path / "ppo")),
            regression_model=str(tmp_path / "rm_regression"), contrastive_model=str(tmp_path / "rm"),
            response_length=16, num_queries=4, num_samples=3, num_resamples=20,
        )
    )  # fmt: skip

    losses = [row["loss"] for row in read_metrics(tmp_path / "sft") if "loss" in row]
    assert fmean(losses[-4:]) < fmean(losses[:4])
    first, last = read_metrics(tmp_path / "ppo")
    assert first["policy/first_ratio_error"] < 1e-5 and last["policy/first_ratio_error"] < 1e-5
    assert first["objective/kl"] == pytest.approx(0, abs=1e-4) and last["objective/kl_coef"] != 0.2
    for row in result["policies"].values():
        assert all(math.isfinite(numbers["mean"]) for numbers in row["metrics"].values())
        assert row["metrics"]["rouge1"]["at_k"] == sorted(row["metrics"]["rouge1"]["at_k"])
