"""The hours and dollars of docs/renting.md follow from the measured update; the Hub's library accepts the job."""

import inspect
import re
from pathlib import Path

import pytest
from huggingface_hub import JobHardware, Volume, run_job

import train_ppo
import train_rm
import train_sft
from nanorlhf.training.checks import number_of_updates
from tests.helpers.page_commands import recorded_commands
from tools.hf_job import Args, main, request

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "renting.md").read_text()
H200, H100 = (ROOT / "docs" / "speed.md").read_text().split("One NVIDIA H100 80GB")
PPO = r"PPO iteration, 1B, 64 x \(512 \+ 53\), 4 epochs \| ([\d.]+) s"
DOLLARS = 3


def measured(pattern: str, text: str) -> float:
    [number] = re.findall(pattern, text)
    return float(number.replace(",", ""))


def test_the_table_follows_from_the_measured_update() -> None:
    iteration, h200 = measured(PPO, H100), measured(PPO, H200)
    share = measured(r"generation, 1B, 64 x \(512 \+ 53\) \| (\d+) ms", H200) / 1000 / h200
    sampling = share * iteration / 64
    # per row: 4 epochs of 3 (forward and backward) for two models, and 4 forward passes, in training passes of 3
    training_pass = (1 - share) * iteration / 64 / ((4 * 3 * 2 + 4) / 3)
    ppo = train_ppo.RECIPES["tldr"][1]
    updates = number_of_updates(ppo.total_episodes, ppo.batch_size, ppo.num_minibatches, ppo.temperature)
    assert (ppo.num_ppo_epochs, ppo.response_length, ppo.batch_size, updates) == (4, 53, 512, 1953)
    assert train_sft.RECIPES["tldr"][1].num_epochs == train_rm.RECIPES["tldr"][1].num_epochs == 1
    seconds = {
        "SFT": 116_722 * training_pass,
        "reward model": 2 * 92_858 * training_pass,
        "PPO": updates * ppo.batch_size / 64 * iteration,
        "evaluation": 2 * 6_447 * (sampling + 4 / 3 * training_pass),
    }
    seconds["sum"] = sum(seconds.values())
    rows = re.findall(r"^\| ([\w ]+) \| [^|]* \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
    assert [(name, hours, dollars) for name, hours, dollars in rows] == [
        (name, f"{s / 3600:.2f}", f"{DOLLARS * s / 3600:.2f}") for name, s in seconds.items()
    ]
    assert f"{1e3 * training_pass:.1f} ms per row" in PAGE
    assert f"a response for each post, {1e3 * sampling:.1f} ms" in PAGE
    assert f"On an H200 ({h200} s) PPO takes {seconds['PPO'] / iteration * h200 / 3600:.2f} hours" in PAGE
    assert f"at {DOLLARS} dollars per hour" in PAGE and "neither this page from start to end nor a whole run" in PAGE


def test_the_pipeline_trains_the_recipes_stages_in_bfloat16() -> None:
    commands = [str(command) for command in recorded_commands("tldr")]
    programs = ["data.tldr", "data.tldr", "train_sft.py tldr", "train_rm.py tldr", "train_ppo.py tldr", "eval.py tldr"]
    assert all(program in command for program, command in zip(programs, commands, strict=True))
    assert all("--dtype bfloat16" in command for command in commands[2:])


@pytest.mark.parametrize("target", ["gpu", "tldr"])
def test_a_job_is_a_request_that_the_library_accepts(target, capsys) -> None:
    args = Args(bucket="someone/runs", target=target, hours=1.5)
    arguments = request(args)
    bound = inspect.signature(run_job).bind(**arguments).arguments
    assert bound["flavor"] in {hardware.value for hardware in JobHardware} and bound["timeout"] == "90m"
    [volume] = bound["volumes"]
    assert isinstance(volume, Volume)
    assert (volume.type, volume.source, volume.mount_path) == ("bucket", args.bucket, "/runs")
    shell, flag, script = bound["command"]
    assert (shell, flag) == ("bash", "-c") and f"make {target}" in script and "/runs" in script
    main(Args(bucket="someone/runs", target=target, dry_run=True))
    assert '"flavor": "h200"' in capsys.readouterr().out


def test_a_job_is_sent_to_the_hub(monkeypatch, capsys) -> None:
    sent = []

    class Job:
        url = "an address"

    monkeypatch.setattr("tools.hf_job.run_job", lambda **arguments: sent.append(arguments) or Job)
    main(Args(bucket="someone/runs"))
    assert sent == [request(Args(bucket="someone/runs"))] and capsys.readouterr().out == "an address\n"
