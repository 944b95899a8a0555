"""`make gpu` on a CPU: parts that pass, fail, hang and write incomplete output."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanorlhf.errors import InputError
from tests.conftest import ROOT, TEST_DEVICE
from tools import gpu
from tools.gpu import Args, Part, main, outcomes

ROW = {"what": "gae", "size": "B=2", "way": "ours", "seconds": 0.5, "ratio": 1.0, "peak_bytes": 10**6, "mfu": 0.4}
# like pytest's output: a test's name before it runs, its outcome after
HANGING_TESTS = """
import os, signal, sys, time
print("tests/test_a.py::test_one[a b] PASSED    [ 50%]")
print("tests/test_a.py::test_two ", end="", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    open(sys.argv[1], "w").write(f"{os.getpid()} {child}")
time.sleep(600)
"""
VARIABLE = "NANORLHF_TEST_DEVICE"
BENCH = f"import json, sys; json.dump({{'rows': [{ROW!r}]}}, open(sys.argv[1], 'w'))"


def python(name, limit, code, *arguments) -> Part:
    return Part(name, (sys.executable, "-c", code, *map(str, arguments)), limit)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_each_part_runs_even_if_the_previous_one_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    parts = (
        python("passes", 60, BENCH, "{json}"),
        python("fails", 60, "print('tests/test_b.py::test_x FAILED [100%]'); raise SystemExit(5)"),
        python("hangs", 3, HANGING_TESTS, tmp_path / "pids"),
        python("comes after", 60, "print('tests/test_c.py::test_y SKIPPED (no CUDA device) [100%]')"),
    )
    assert main(Args(out=tmp_path / "out"), parts) == 1
    report = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert [part["status"] for part in report["parts"]] == ["passed", "failed with code 5", "timed out (3 s)", "passed"]
    assert report["parts"][0]["bench"] == {"rows": [ROW]}
    assert report["parts"][2]["tests"] == {
        "tests/test_a.py::test_one[a b]": "passed", "tests/test_a.py::test_two": "unfinished",
    }  # fmt: skip
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())  # its children are gone too
    written = (tmp_path / "out" / "gpu.md").read_text()
    for line in (
        "| hangs | timed out (3 s) |", "| 1 passed, 1 unfinished |", "- tests/test_b.py::test_x: failed\n",
        "| gae | B=2 | ours | 500.00 | 1.00 | 1.0 |  | MFU 40% |",
    ):  # fmt: skip
        assert line in written
    assert written in capsys.readouterr().out
    assert main(Args(out=tmp_path / "out"), parts[:1]) == 0


def test_it_ends_in_time_and_reports_parts_that_did_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    start = time.monotonic()
    sleeping = [python(str(number), 60, "import time; time.sleep(600)") for number in range(3)]
    assert main(Args(out=tmp_path, seconds=4.5), tuple(sleeping)) == 1
    assert time.monotonic() - start < 4.5
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["status"] for part in parts] == ["timed out (3 s)", "not started", "not started"]


def test_sigterm_keeps_the_results_and_leaves_no_process(tmp_path):
    code = (
        "import signal, sys; from pathlib import Path; from tests.tools import test_gpu\n"
        "from tools import gpu; gpu.GRACE = 0.2\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); here = Path(sys.argv[1])\n"
        "gpu.main(gpu.Args(out=here), (test_gpu.python('first', 60, test_gpu.BENCH, '{json}'),\n"
        "    test_gpu.python('second', 600, test_gpu.HANGING_TESTS, here / 'pids')))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "pids").exists() or len((tmp_path / "pids").read_text().split()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["status"] for part in parts] == ["passed", "interrupted"]
    assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.parametrize("workers", [("-p", "no:xdist"), ("-n", "2")], ids=["in one process", "by workers"])
def test_outcomes_of_pytest_itself(tmp_path, workers):
    """Parses the -vv output of the installed pytest."""
    file = tmp_path / "tests" / "test_z.py"
    file.parent.mkdir()
    file.write_text(
        "import pytest\ndef test_a(): pass\n@pytest.mark.parametrize('x', ['p q'])\ndef test_b(x): assert 0\n"
        "@pytest.mark.skip(reason='no (device)')\ndef test_c(): pass\n"
    )
    command = [*gpu.tests("", 0).command[1:3], "-vv", "-p", "no:cacheprovider", *workers, str(file)]
    result = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert outcomes(result.stdout) == {
        "tests/test_z.py::test_a": "passed", "tests/test_z.py::test_b[p q]": "failed",
        "tests/test_z.py::test_c": "skipped",
    }  # fmt: skip


def test_a_worker_s_test_without_an_outcome_is_unfinished():
    text = (
        "tests/test_a.py::test_one[a b] \ntests/test_a.py::test_two \n[gw1] [ 50%] PASSED tests/test_a.py::test_two \n"
    )
    assert outcomes(text) == {"tests/test_a.py::test_one[a b]": "unfinished", "tests/test_a.py::test_two": "passed"}


def test_without_a_device_it_prints_one_line_and_exits_with_3(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stopped:
        gpu.command(Args(out=tmp_path / "out"))
    assert stopped.value.code == gpu.NO_DEVICE == 3 and not (tmp_path / "out").exists()
    assert capsys.readouterr().err == "make gpu: this PyTorch finds no CUDA device; nothing was run.\n"


def test_the_parts_name_existing_files_and_fit_into_the_time():
    files = [word for part in gpu.PARTS for word in part.command if word.startswith("tests/")]
    assert files and all((ROOT / file).exists() for file in files)
    assert sum(part.limit for part in gpu.PARTS[:5]) < Args().seconds <= 8 * 60  # the others share the rest


def test_only_the_named_parts_run(capsys):
    gpu.command(Args(dry_run=True, only="PPO iteration"))
    printed = capsys.readouterr().out
    assert re.findall("bench: a PPO iteration, (.+?),", printed) == ["124m", "1b"] and "tests:" not in printed
    with pytest.raises(InputError, match="--only nonsense: no part has this word in its name: tests: kernels, "):
        gpu.command(Args(only="nonsense"))


def test_the_benchmark_measures_each_stage_at_1b():
    measured = {
        tuple(
            word
            for word in part.command[part.command.index("--parts") + 1 :]
            if word in ("generate", "decode", "micro_batch", "ppo")
        )
        for part in gpu.PARTS
        if "1b" in part.command
    }
    assert {("generate", "decode"), ("micro_batch",), ("ppo",)} <= measured


def test_the_parts_include_every_file_with_gpu_tests():
    takes_one = re.compile(r"^from tests.conftest import .*\bGPU\b", re.MULTILINE)
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if takes_one.search(path.read_text())}
    named = {ROOT / word for part in gpu.PARTS for word in part.command if word.startswith("tests/")}
    assert len(marked) > 5 and marked <= named


@pytest.mark.slow
def test_cpu_tests_skip_gpu_tests_and_print_nothing_after_the_result():
    """Triton's bindings used to report objects frozen by pytest as leaked."""
    command = [sys.executable, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "tests/kernels/test_gae.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", VARIABLE)}
    done = subprocess.run(
        [*command, "-k", "real_sizes"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    name = "tests/kernels/test_gae.py::test_a_device_equals_the_loop_at_real_sizes"
    assert outcomes(done.stdout) == {f"{name}[cpu]": "passed", f"{name}[cuda]": "skipped"}
    assert "`make gpu` runs it" in done.stdout.splitlines()[-2] and done.stderr == ""


def test_a_part_sees_the_device_that_cpu_tests_hide(tmp_path):
    if TEST_DEVICE is None:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()
    shown = python("shown", 60, f"import os; assert os.environ['{VARIABLE}'] == 'cuda'")
    assert main(Args(out=tmp_path), (shown,)) == 0


def test_a_dry_run_prints_the_parts_and_runs_nothing(tmp_path, capsys):
    gpu.command(Args(out=tmp_path / "out", dry_run=True))
    printed = capsys.readouterr().out
    assert all(f"{part.name}, at most {part.limit:.0f} s\n" in printed for part in gpu.PARTS)
    assert "-m gpu tests/test_on_a_device.py\n" in printed and not (tmp_path / "out").exists()
