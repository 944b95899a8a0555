"""Choice of kernels from a measurement, and the file that stores it."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import processor, tune
from kernels.linear import onednn_matmul
from kernels.processor import DEFAULT, Choice

CLASSES = {f"{kind} {rows} {size}" for kind in processor.MATMULS for rows in processor.ROWS for size in processor.SIZES}
TINY = {"small": (8, 4), "medium": (9, 5), "large": (12, 6)}  # weight shapes that replace tune.WEIGHTS
FOUND = replace(DEFAULT, name="tuned", onednn=("weight 512+ small",), rollouts={"int8 large": 1.5})


# --------------------------------------------------------------------------------------------------------- 1. measure
def test_every_class_of_matmuls_is_measured_and_all_candidates_agree(monkeypatch):
    monkeypatch.setattr(processor, "chosen", DEFAULT)
    monkeypatch.setattr(tune, "WEIGHTS", TINY)
    monkeypatch.setattr(tune, "HEAD", (4, 3, 20))
    cases = tune.matmul_cases()
    assert cases.keys() == CLASSES
    for case, ways in cases.items():
        exact = ways["mkl"]()
        assert ("onednn" in ways) == (onednn_matmul() is not None)
        for way in ways.values():
            for one, other in zip(way(), exact, strict=True):
                assert one.shape == other.shape and (one - other).abs().max() < 0.05 * other.abs().max(), case
    times = tune.alternate(cases | tune.logprob_cases(), 0.5)
    choice = tune.choose(times)
    assert choice.name == "tuned" and set(choice.onednn) <= CLASSES and processor.chosen == DEFAULT
    assert Choice.from_json(json.loads(json.dumps(choice.__dict__))) == choice


@pytest.fixture(params=[1, 2])
def clock(request, monkeypatch):
    """Fake clock in seconds that a test advances; one thread reads CPU time, two read wall time."""
    now = [0.0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "thread_time", lambda: now[0] / 2)
    return now


def takes(clock, seconds):
    def function():
        clock[0] += seconds

    return function


def test_candidates_alternate_until_the_time_is_up(clock):
    order = []
    ways = {name: lambda name=name: order.append(name) or takes(clock, 0.01)() for name in ("a", "b")}
    times = tune.alternate({"one": ways, "two": {"c": takes(clock, 0.02)}}, 0.085)
    assert order == ["a", "b", "a", "b", "a"]  # at 0, 0.01, 0.04, 0.05 and 0.08
    share = 1 / 2 if torch.get_num_threads() == 1 else 1  # another process used the other half
    for seconds_taken, expected in (
        (times["one"]["a"], [0.01, 0.01]), (times["one"]["b"], [0.01]), (times["two"]["c"], [0.02]),
    ):  # fmt: skip
        assert seconds_taken == pytest.approx([share * seconds for seconds in expected])


def test_fast_calls_are_repeated_for_a_millisecond(clock):
    calls = []
    clock_rate = 1 if torch.get_num_threads() == 2 else 2
    times = tune.alternate({"one": {"a": lambda: calls.append(1) or takes(clock, clock_rate * 1e-4)()}}, 1e9)
    assert len(calls) == pytest.approx(1 + 10 * tune.ROUNDS, abs=tune.ROUNDS)  # 1e-3 / 1e-4 may round to 11
    assert times["one"]["a"] == pytest.approx([1e-4] * tune.ROUNDS)


# ---------------------------------------------------------------------------------------------------------- 2. choose
def measured(**changed: list[float]) -> tune.Times:
    """Equal times for all cases, except those given by case and name, such as `forward 8-63 large packed`."""
    times = {case: {"mkl": [1.0] * 5, "onednn": [1.0] * 5} for case in sorted(CLASSES)}
    times["log-probabilities"] = {name: [1.0] * 5 for name in ("default", "half blocks", "all kept")}
    times["forward 8-63 large"] |= {name: [1.0] * 5 for name in ("packed", "bfloat16", "int8")}
    times["forward 8-63 small"] |= {name: [1.0] * 5 for name in ("bfloat16", "int8")}
    times["forward 512+ large"]["bfloat16"] = [1.0] * 5
    return {
        case: {name: changed.get(f"{case} {name}", taken) for name, taken in ways.items()}
        for case, ways in times.items()
    }


def test_without_a_clear_difference_the_default_stays():
    equal = tune.choose(measured())
    assert set(equal.onednn) == set(DEFAULT.onednn)
    assert replace(equal, name="default", onednn=DEFAULT.onednn, bfloat16=None, rollouts={}) == DEFAULT
    almost = measured(**{f"{case} onednn": [0.92] * 5 for case in CLASSES})
    assert set(tune.choose(almost).onednn) == set(DEFAULT.onednn)


def test_a_clearly_faster_candidate_is_chosen():
    times = measured(
        **{
            "weight 512+ small onednn": [0.8] * 5,
            "forward 64-511 large mkl": [0.8] * 5,
            "forward 8-63 large onednn": [0.5] * 5,
            "log-probabilities half blocks": [0.7] * 5,
            "log-probabilities all kept": [0.8] * 5,
            "forward 512+ large bfloat16": [0.4] * 5,
            "forward 8-63 small int8": [3.0] * 5,
            "forward 8-63 large bfloat16": [1.0] * 5,
        }
    )
    choice = tune.choose(times)
    assert set(choice.onednn) == {"weight 512+ small", "forward 8-63 large"}
    assert not choice.pack  # oneDNN with the plain weight is twice as fast
    assert (choice.block, choice.kept) == (DEFAULT.block // 2, tune.KEEP_ALL)
    assert choice.bfloat16 == 0.4
    assert choice.rollouts == {
        "bfloat16 small": 1.0, "int8 small": 3.0, "bfloat16 large": 2.0, "int8 large": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "taken",
    [
        [0.1] * 3,  # too few
        [0.1, 2.0, 2.0, 2.0, 0.1],  # faster at best, usually slower
        [0.95, 0.95, 0.95, 0.95, 0.95],  # a difference that isn't clear
    ],
)
def test_noise_does_not_change_the_choice(taken):
    assert "weight 512+ small" not in tune.choose(measured(**{"weight 512+ small onednn": taken})).onednn
    slowed = measured(**{"weight 512+ small mkl": [1.0, 9.0, 9.0, 9.0, 1.0]})  # by another process
    assert "weight 512+ small" not in tune.choose(slowed).onednn


def test_a_machine_too_busy_to_compare_keeps_the_default():
    few = {case: {name: taken[:2] for name, taken in ways.items()} for case, ways in measured().items()}
    choice = tune.choose(few)
    assert replace(choice, name="default", onednn=tuple(sorted(choice.onednn))) == replace(
        DEFAULT, onednn=tuple(sorted(DEFAULT.onednn))
    )


# ------------------------------------------------------------------------------------------------------------ 3. keep
@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nanorlhf"


@pytest.fixture
def measurements(cache, monkeypatch) -> list[list[str]]:
    """Record the measuring commands; each writes FOUND."""
    commands = []

    def measure(command, **settings):
        commands.append(command[1:])
        threads = int(command[command.index("--threads") + 1])
        tune.write(tune.cache_file(threads), threads, FOUND, {"case": {"mkl": [0.001]}})

    monkeypatch.setattr(subprocess, "run", measure)
    return commands


def test_a_machine_is_measured_once_with_a_message(cache, measurements, capsys):
    assert tune.tuned(2) == tune.tuned(2) == FOUND
    assert measurements == [["-m", "kernels.tune", "--threads", "2", "--seconds", "8.0"]]
    captured = capsys.readouterr()
    assert captured.err == f"measuring this machine's kernels once, 8 s: {tune.cache_file(2)}\n" and captured.out == ""
    assert {path.name for path in cache.iterdir()} == {"lock", tune.cache_file(2).name}
    assert json.loads(tune.cache_file(2).read_text())["milliseconds"] == {"case": {"mkl": 1.0}}


def test_each_thread_count_processor_version_and_isa_is_measured_separately(measurements, monkeypatch):
    files = {tune.cache_file(2), tune.cache_file(1)}
    with monkeypatch.context() as patch:
        patch.setattr(processor, "capabilities", lambda: {"cpu_name": "another", "avx2": True})
        files.add(tune.cache_file(2))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.0")
        files.add(tune.cache_file(2))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    files.add(tune.cache_file(2))
    assert len(files) == 5
    tune.tuned(1)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    before = tune.cache_file(2)
    assert tune.tuned(2) == FOUND and len(measurements) == 2 and before.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: text.replace('"pack": true', '"pack": 1'),
        lambda text: text.replace('"threads": 2', '"threads": 3'),  # copied from another machine
        lambda text: text.replace('"kept"', '"colour"'),
        lambda text: "\udcff",
    ],
)
def test_a_damaged_file_or_one_from_another_machine_is_measured_again(measurements, damage):
    tune.tuned(2)
    path = tune.cache_file(2)
    original = path.read_text()
    path.write_text(damage(original), errors="surrogateescape")
    assert tune.tuned(2) == FOUND and len(measurements) == 2 and path.read_text() == original


def test_a_busy_machine_is_measured_again_after_an_hour(measurements):
    path = tune.cache_file(2)
    for rounds, num_new in ((tune.FEWEST - 1, 1), (tune.FEWEST, 0)):
        tune.write(path, 2, FOUND, {"case": {"mkl": [0.001] * rounds}})
        before = len(measurements)
        assert tune.tuned(2) == FOUND and len(measurements) == before
        os.utime(path, (0, 0))
        assert tune.tuned(2) == FOUND and len(measurements) == before + num_new


def test_without_a_writable_cache_the_default_is_used_with_a_message(tmp_path, monkeypatch, measurements, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert tune.tuned(2) == DEFAULT and not measurements
    assert capsys.readouterr().err.startswith("using the default kernels, the measurement failed: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_cache_directory_gives_the_default(cache, measurements):
    cache.mkdir(parents=True)
    cache.chmod(0o500)
    assert tune.tuned(2) == DEFAULT and not measurements


def test_a_measurement_that_fails_leaves_no_file_and_the_default(cache, monkeypatch, capsys):
    def fail(command, **settings):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    assert tune.tuned(2) == DEFAULT and "exit status 1" in capsys.readouterr().err
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(cache, monkeypatch):
    path = tune.cache_file(2)
    tune.write(path, 2, FOUND, {})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        tune.write(path, 2, DEFAULT, {})
    assert tune.read(path, 2) == FOUND and list(cache.iterdir()) == [path]


@pytest.mark.parametrize(
    ("system", "xdg", "expected"),
    [
        ("linux", "", "home/.cache/nanorlhf"),
        ("linux", "relative", "home/.cache/nanorlhf"),  # the XDG specification ignores relative paths
        ("darwin", "", "home/Library/Caches/nanorlhf"),
        ("darwin", "/elsewhere", "/elsewhere/nanorlhf"),
    ],
)
def test_the_cache_is_the_users(tmp_path, monkeypatch, system, xdg, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert tune.cache_file(2).parent == tmp_path / expected


@pytest.mark.parametrize(
    ("arguments", "cache", "code", "sentence"),
    [
        (["--threads", "0"], "", 2, "error: --threads must be at least 1, got 0."),
        (["--threads", "1", "--seconds", "0.01"], "file", 1, "error: can't write .*json .Not a directory.."),
    ],
)
def test_the_command_fails_with_one_sentence(tmp_path, monkeypatch, capsys, arguments, cache, code, sentence):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
    monkeypatch.setattr(tune, "WEIGHTS", TINY)
    monkeypatch.setattr(tune, "HEAD", (4, 3, 20))
    monkeypatch.setattr(sys, "argv", ["tune", *arguments])
    with pytest.raises(SystemExit) as stopped:
        tune.main()
    assert stopped.value.code == code and re.search(sentence, capsys.readouterr().err)


def test_the_command_measures_writes_and_prints(cache, monkeypatch, capsys):
    monkeypatch.setattr(tune, "WEIGHTS", TINY)
    monkeypatch.setattr(tune, "HEAD", (4, 3, 20))
    monkeypatch.setattr(sys, "argv", ["tune", "--threads", "1", "--seconds", "0.5"])
    tune.main()
    printed = capsys.readouterr().out
    path = tune.cache_file(1)
    assert str(path) in printed and all(case in printed for case in CLASSES) and "'threads': 1" in printed
    choice = tune.read(path, 1)
    assert choice is not None and repr(choice) in printed
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("measured a second time"))
    assert tune.tuned(1) == choice
