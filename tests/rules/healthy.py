"""Handwritten metrics of healthy runs. Tests of the doctor's rules change one number."""

import json
from pathlib import Path

PPO_SETTINGS = {
    "dtype": "float32",
    "batch_size": 128,
    "num_minibatches": 1,
    "num_ppo_epochs": 4,
    "response_length": 24,
    "kl_coef": 0.1,
    "kl_target": None,
    "clip_range": 0.2,
    "missing_eos_score": -1.0,
    "whiten_rewards": False,
    "reward_model": None,
    "sampler": {"url": None, "dtype": "same", "top_p": 1.0, "sync_every": 1, "correction": "none"},
}
RM_SETTINGS = {"dtype": "float32", "num_normalisation": 1024, "loss": "contrastive", "beta": None}


def ppo_rows() -> list[dict]:
    """Return twelve updates: the KL grows by 0.2 nats per update and the score by 0.1, values learn, responses grow."""
    rows = []
    for step in range(12):
        kl, length, entropy, score = 0.2 * step, 7 + 0.2 * step, 0.2 - 0.01 * step, 0.4 + 0.1 * step
        rows.append(
            {
                "step": step,
                "objective/kl": 1.02 * kl,
                "objective/kl_k3": 0.9 * kl,
                "objective/kl_exact": kl,
                "objective/entropy": entropy * length,
                "objective/score": score,
                "objective/score_std": 1.2,
                "objective/rlhf_reward": score - 0.102 * kl,
                "objective/kl_coef": 0.1,
                "eos_rate": 1.0,
                "response_length": length,
                "policy/loss": -0.005,
                "policy/clip_fraction": 0.01,
                "policy/approx_kl": 1e-3,
                "policy/entropy": entropy,
                "policy/ratio": 1.001,
                "policy/first_ratio_error": 2e-6,
                "policy/sampler_gap": 1e-7,
                "value/loss": 2 / (step + 1),
                "gold_score": 2.5 + 0.1 * step,
                "skipped_steps": 0,
                "lr": 3e-4,
            }
        )
    return rows


def supervised_rows() -> list[dict]:
    """Return forty steps with two validations; the loss falls from 2 to 0.8."""
    rows: list[dict] = [{"step": i, "loss": 2 - 0.03 * i, "lr": 1e-3, "skipped_steps": 0} for i in range(40)]
    rows[19]["validation_loss"], rows[39]["validation_loss"] = 1.4, 0.9
    return rows


def rm_rows() -> list[dict]:
    last = {"validation_accuracy": 0.8, "num_validation_pairs": 1000, "reward_std": 1.5, "padding_difference": 1e-7}
    return [*supervised_rows(), {"step": 40, "validation_loss": 0.9, **last}]


def dpo_rows() -> list[dict]:
    rows = supervised_rows()
    rows[0] |= {"margin": 0.0, "chosen_reward": 0.0}
    last = {"validation_accuracy": 0.8, "num_validation_pairs": 1000}
    return [*rows, {"step": 40, "validation_chosen_reward": -0.1, "validation_margin": 0.5, **last}]


def write_run(run: Path, settings: dict, rows: list[dict], summary: dict | None = None) -> Path:
    run.mkdir(parents=True)
    (run / "args.json").write_text(json.dumps(settings))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    return run
