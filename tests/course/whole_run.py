"""All stages in miniature, for `python -m course verify`, which runs this file by name in a tree with a bug."""

import json
from dataclasses import replace
from pathlib import Path

import train_ppo
from nanorlhf.training.run import TIME_METRICS
from tests.conftest import make_miniature, read_metrics
from tests.test_train_ppo import policy_that_stops

METRICS = "metrics.json"
COST = (*TIME_METRICS, "seconds", "peak_resident_bytes")


def test_every_stage_runs_to_its_end(tmp_path) -> None:
    """Also writes the metrics of all stages to the current directory."""
    miniature = make_miniature(tmp_path)
    args = replace(
        miniature.ppo, sft=str(policy_that_stops(tmp_path)), total_episodes=16, num_minibatches=2, micro_batch_size=2,
        kl_target=0.5, lr=3e-3,
    )  # fmt: skip
    train_ppo.main(args)
    recorded = {
        f"{stage} {row} {name}": value
        for stage in ("sft", "rm", "ppo")
        for row, metrics in enumerate(read_metrics(tmp_path / stage))
        for name, value in metrics.items()
        if name not in COST
    }
    for stage in ("sft", "rm"):
        summary = json.loads((tmp_path / stage / "summary.json").read_text())
        recorded |= {f"{stage} end {name}": value for name, value in summary.items() if name not in COST}
    Path(METRICS).write_text(json.dumps(recorded))
