"""Worker processes of a reward function: order, crashes, time limits, interrupts, and cleanup."""

import math
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from nanorlhf.errors import InputError
from nanorlhf.progress import Progress
from nanorlhf.rewards import workers as workers_module
from nanorlhf.rewards.function import Responses, RewardFunction
from nanorlhf.rewards.function_reward import FunctionReward
from nanorlhf.rewards.workers import Workers, kill_all
from tests.conftest import ROOT
from tests.rewards.letters import RECORDS, Letters, make_batch


def responses(*texts):
    records = [{"query": "q", "response": "r", "meta": {"answer": i}} for i in range(len(texts))]
    return Responses(["q"] * len(texts), list(texts), [[i] for i in range(len(texts))], records)


@pytest.fixture
def workers(tmp_path):
    """Write a file and call its function `score` in processes that are killed after the test."""
    made = []

    def make(text, num=2):
        path = tmp_path / "rule.py"
        path.write_text(text)
        function = RewardFunction(f"{path}:score", responses("x").records)
        made.append(Workers(function, num, show=True))
        return made[-1]

    yield make
    for one in made:
        kill_all(one.workers)


def is_alive(pid: int) -> bool:
    """Return True if a process is running; zombies aren't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------------------ results
def test_results_are_in_the_order_of_the_responses_whichever_comes_first(workers):
    text = (
        "import os, time\n"
        "def score(queries, responses, answer, response_ids):\n"
        "    time.sleep(0.3 if 0 in answer else 0)\n"  # the first chunk finishes last
        "    return [None if r == 'none' else [float(a)] if r == 'list' else 10.0 * i[0] + len(r)\n"
        "            for r, a, i in zip(responses, answer, response_ids)]\n"
    )
    inputs = responses("a", "bb", "none", "list", "c", "", "ddd", "e", "f", "g")
    called = workers(text)
    assert called(inputs) == called.function(inputs) == [1.0, 12.0, None, [3.0], 41.0, 50.0, 63.0, 71.0, 81.0, 91.0]
    assert called(inputs) == called.function(inputs) and len(called.workers) == 2  # the same two processes again


def test_several_processes_share_the_work_and_none_imports_pytorch(workers):
    text = (
        "import os, sys, time\n"
        "def score(queries, responses):\n"
        "    time.sleep(0.2)\n"
        "    return [float(os.getpid()) if 'torch' not in sys.modules else None for _ in responses]\n"
    )
    called = workers(text, 3)
    called(responses(*"abc"))  # all have started
    process_ids = set(called(responses(*"abcdefghijkl")))
    assert process_ids <= {worker.process.pid for worker in called.workers} and len(process_ids) == 3
    assert os.getpid() not in process_ids


def test_a_rule_with_workers_is_the_rule_without(tmp_path):
    path = tmp_path / "rule.py"
    path.write_text("def score(q, r, answer, response_ids):\n    return [[float(i) for i in ids] if a else len(t)\n"
                    "            for t, a, ids in zip(r, answer, response_ids)]\n")  # fmt: skip
    plain, called = (FunctionReward(f"{path}:score", Letters(), 1, RECORDS, num) for num in (0, 2))
    for a, b in zip(plain.score(make_batch()), called.score(make_batch()), strict=True):
        assert a.tolist() == b.tolist()
    kill_all(called.workers.workers)


# -------------------------------------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize(("line", "how"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal 9")])
def test_a_worker_that_exits_raises_input_error(workers, line, how):
    text = f"import os\ndef score(q, r):\n    if 'c' in r: {line}\n    return [0] * len(q)\n"
    called = workers(text)
    with pytest.raises(InputError, match=rf"rule.py:score: a worker process ended \({how}\) while scoring"):
        called(responses(*"abcdefgh"))
    assert called.workers == []
    assert called(responses("a", "b")) == [0.0, 0.0]  # with new processes


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def score(q, r):\n    return [1 / 0]\n", r"rule.py:2 raises ZeroDivisionError"),
        ("import sys\ndef score(q, r):\n    sys.exit(4)\n", r"rule.py:3 raises SystemExit: 4"),
        ("def score(q, r):\n    return [0.0, 'x']\n", r"rule.py:1 returned"),
    ],
)
def test_what_the_function_does_wrong_is_the_same_sentence_as_without_workers(workers, text, sentence):
    called = workers(text)
    for call in (called.function, called):
        with pytest.raises(InputError, match=sentence):
            call(responses("a"))
    assert called.workers == []


def test_a_response_that_takes_too_long_gets_the_timeout_score_and_the_others_their_own(workers):
    """The limit is per response; importing the file takes longer, but doesn't count."""
    text = (
        "import time\n"
        "time.sleep(0.8)\n"
        "TIME_LIMIT, TIMEOUT_SCORE = 0.5, -7\n"
        "def score(queries, responses):\n"
        "    [text] = responses\n"
        "    time.sleep(60 if 'slow' in text else 0)\n"
        "    return [len(text)]\n"
    )
    called = workers(text)
    start = time.monotonic()
    assert called(responses("a", "slow", "bb", "too slow", "ccc")) == [1.0, -7, 2.0, -7, 3.0]
    assert called.num_timeouts == 2 and time.monotonic() - start < 30
    assert called(responses("a", "bb")) == [1.0, 2.0] and called.num_timeouts == 0


def test_timeouts_are_logged_and_none_means_that_the_reward_does_not_apply(tmp_path):
    path = tmp_path / "rule.py"
    path.write_text("import time\nTIME_LIMIT, TIMEOUT_SCORE = 0.3, None\n"
                    "def score(q, r):\n    time.sleep(30 * ('b' in r[0]))\n    return [5]\n")  # fmt: skip
    rule = FunctionReward(f"{path}:score", Letters(), 8)
    scores = rule.score(make_batch())
    assert scores.scores.tolist() == [0.0, 5.0] and scores.applies.tolist() == [False, True]
    assert rule.metrics() == {"reward/score_timeouts": 0.5}
    kill_all(rule.workers.workers)


# --------------------------------------------------------------------------------------------------- no process is left
STARTS_CHILD = (
    "import os, subprocess, time\n"
    "def score(queries, responses):\n"
    "    child = subprocess.Popen(['sleep', '300'])\n"
    "    with open(PIDS, 'a') as file:\n"
    "        file.write(f'{os.getpid()} {child.pid}\\n')\n"
    "    time.sleep(300 if 'slow' in responses else 0)\n"
    "    return [0.0] * len(responses)\n"
)


def pids_in(path):
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def test_an_interrupt_leaves_no_process_and_the_next_call_works(workers, tmp_path, monkeypatch):
    called, plain = workers(f"PIDS = {str(tmp_path / 'pids')!r}\n" + STARTS_CHILD, 1), workers_module.wait

    def interrupted(*arguments):
        wait_until(lambda: len(pids_in(tmp_path / "pids")) == 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        called(responses("slow"))
    wait_until(lambda: not any(map(is_alive, pids_in(tmp_path / "pids"))))
    monkeypatch.setattr(workers_module, "wait", plain)
    assert called(responses("a", "b")) == [0.0, 0.0]


PROGRAM = (
    "import sys\n"
    "from nanorlhf.rewards.function import Responses, RewardFunction\n"
    "from nanorlhf.rewards.workers import Workers\n"
    "workers = Workers(RewardFunction(sys.argv[1]), 2, show=False)\n"
    "texts = sys.argv[2:]\n"
    "n = len(texts)\n"
    "workers(Responses(texts, texts, [[1]] * n, [{}] * n))\n"
)


@pytest.mark.parametrize("end", ["exit", "kill", "terminate"])
def test_workers_and_what_they_started_end_with_the_training_process(tmp_path, end):
    path, pids = tmp_path / "rule.py", tmp_path / "pids"
    path.write_text(f"PIDS = {str(pids)!r}\n" + STARTS_CHILD)
    words = ("a", "b") if end == "exit" else ("slow", "slow")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, f"{path}:score", *words], cwd=ROOT)
    if end == "exit":
        assert process.wait(60) == 0
    else:
        wait_until(lambda: len(pids_in(pids)) == 4, 60)
        assert all(map(is_alive, pids_in(pids)))
        process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGTERM)
        process.wait(60)
    assert len(pids_in(pids)) == 4
    wait_until(lambda: not any(map(is_alive, pids_in(pids))))


def test_a_worker_of_a_killed_process_exits_silently(tmp_path):
    """Unread data in the killed process resets the connection instead of closing it."""
    (tmp_path / "rule.py").write_text("def score(queries, responses):\n    return [0.0] * len(responses)\n")
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "nanorlhf.rewards.workers", str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True)
    theirs.close()
    ours.send((f"{tmp_path / 'rule.py'}:score", set()))
    wait_until(lambda: ours.poll(0))  # the message that it is ready
    ours.close()
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")


def test_a_slow_call_shows_its_progress(workers, monkeypatch, capsys):
    text = "import time\ndef score(q, r):\n    time.sleep(0.3)\n    return [0.0] * len(q)\n"
    called = workers(text, 1)
    monkeypatch.setattr(workers_module, "SLOW", 600.0)  # a busy machine takes seconds for this call
    called(responses(*"abcd"))
    assert "rule.py:score" not in capsys.readouterr().err
    monkeypatch.setattr(workers_module, "SLOW", 0.0)
    monkeypatch.setattr(Progress, "last_line", -math.inf)  # in a log, a line every ten seconds
    called(responses(*"abcd"))
    assert "rule.py:score" in capsys.readouterr().err
