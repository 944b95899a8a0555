"""What all tests share: the real data slices, a small model, the pipeline in miniature, two processes."""

import gc
import json
import os
import runpy
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import hypothesis
import pytest
from matplotlib.figure import Figure

# before torch is imported, and for processes that tests start: tiny tensors lose by a second thread, on a busy machine
# tenfold
os.environ["OMP_NUM_THREADS"] = "1"
# measures nothing, and the digits of a test depend on no measurement
os.environ["NANORLHF_KERNELS"] = "default"
# hides a GPU, from started programs as well: `--device auto` would find it, its digits and peaks differ, and a process
# that is forked once CUDA was initialised can't use PyTorch. `make gpu` runs the tests that are marked gpu
os.environ.update({} if os.environ.get("NANORLHF_TEST_DEVICE") == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})

# what `make test` hands to a make that it starts: a make started by a test would print more, and another job limit
os.environ.pop("MAKEFLAGS", None)
os.environ.pop("MAKELEVEL", None)

import torch

# before a kernel is imported: without a GPU the Triton sources run on the CPU
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import train_dpo
import train_ppo
import train_rm
import train_sft
from data import tiny
from nanorlhf.config import GPTConfig
from nanorlhf.model import GPT
from tests.browser import AXE, Browser
from tests.made_once import made_once
from tests.miniature_rlcf import one_update, plugin, rlcf, usual_update  # noqa: F401  fixtures

# the same examples each time, so that a failure is the change's; `pytest --hypothesis-profile explore` draws new
# ones. HYPOTHESIS_PROFILE=unshrunk stops at the first failure: the search for the smallest one takes 60 times as long.
# No deadline: how long an example takes on a busy machine says nothing
patient = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("fixed", derandomize=True, **patient)
hypothesis.settings.register_profile("explore", max_examples=500, **patient)
hypothesis.settings.register_profile(
    "unshrunk", derandomize=True, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], **patient
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parent.parent
REAL = Path(os.environ.get("NANORLHF_REAL_DATA", ROOT.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def real_data() -> Path:
    if not REAL.is_dir():
        pytest.skip(f"no real data slices at {REAL} (set NANORLHF_REAL_DATA)")
    return REAL


TINY = GPTConfig(
    vocab_size=37, n_ctx=64, d_model=32, n_layer=2, n_head=4, d_mlp=64, rotary_dim=4, positions="rotary_half"
)


@pytest.fixture
def tiny_gpt() -> GPT:
    torch.manual_seed(0)
    model = GPT(TINY)
    with torch.no_grad():  # far from uniform: a wrong mask or position shows
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


TEST_DEVICE = os.environ.get("NANORLHF_TEST_DEVICE")
"""cuda: the tests marked gpu run, as in `make gpu`; cpu: all commands of test_on_a_device.py run on the CPU"""
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="`make gpu` runs it, on a CUDA device")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])
"""a parameter `device` of tests whose body a CPU runs too"""

UNCLIPPED = {"clip_range": 1e6, "value_clip_range": None}
"""PPO without a kink. At the boundary of a clip the gradient jumps: where one run has moved a value by 0.2 and another
by 0.2000003, only one of them clips it, and runs that differ by rounding alone part ways. Tests that compare such runs
after an optimizer step leave clipping out; those that keep it compare the first step, where every ratio is 1."""


@dataclass(frozen=True)
class Miniature:
    """Settings of the whole pipeline on a world of a few posts; tests change them with `replace`."""

    root: Path
    sft: train_sft.Args
    rm: train_rm.Args
    dpo: train_dpo.Args
    ppo: train_ppo.Args


@pytest.fixture(scope="session")
def miniature(tmp_path_factory) -> Miniature:
    return make_miniature(made_once(tmp_path_factory, "miniature", make_miniature), train=False)


def make_miniature(root: Path, train: bool = True) -> Miniature:
    """Train SFT and the reward model for a few steps; DPO and PPO are left to the test."""
    lengths = {"max_query_length": 160, "max_response_length": 64}
    common = {"data": root / "data", "device": "cpu", "warmup_steps": 0}
    sft = replace(
        train_sft.RECIPES["tiny"][1],
        **common, **lengths, out=root / "sft", n_layer=1, d_model=16, n_head=2, batch_size=8, num_epochs=1.5,
        num_samples=4,
    )  # fmt: skip
    rm = replace(
        train_rm.RECIPES["tiny"][1],
        **common, **lengths, out=root / "rm", sft=str(root / "sft"), batch_size=8, num_normalisation=None,
    )  # fmt: skip
    dpo = replace(
        train_dpo.RECIPES["tiny"][1],
        **common, **lengths, out=root / "dpo", sft=str(root / "sft"), batch_size=8,
    )  # fmt: skip
    ppo = replace(
        train_ppo.RECIPES["tiny"][1],
        data=root / "data", device="cpu", out=root / "ppo", sft=str(root / "sft"), reward_model=str(root / "rm"),
        max_query_length=160, response_length=12, total_episodes=24, batch_size=8, micro_batch_size=4,
        num_ppo_epochs=2, kl_coef=0.05,
    )  # fmt: skip
    if train:
        tiny.main(
            tiny.Args(out=root / "data", num_demonstrations=64, num_comparisons=64, num_validation=16, vocab_size=320)
        )
        train_sft.main(sft)
        train_rm.main(rm)
    return Miniature(root, sft, rm, dpo, ppo)


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Browser]:
    if shutil.which("chromium") is None:
        pytest.skip("no chromium on PATH")
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="session")
def unreadable(browser) -> Callable[[Path], list[str]]:
    """What keeps someone from reading a page."""
    if not AXE.exists():
        pytest.skip("no axe-core: make axe")
    return browser.unreadable


@pytest.fixture(scope="module")
def undrawn():
    """Reports without pictures, which take most of an evaluation's time: tests/tools/test_docs.py draws each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, file, **settings: file.write(b"<svg/>"))
        yield


def run_program(program: str, *arguments: str) -> None:
    """`python train_x.py` or `python -m data.x`, in this process, which has imported PyTorch already.

    The file is run from its first line, as __main__ is; raises SystemExit where the program ends with a code.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # a test has imported it
        patch.setattr(sys, "argv", [program, *arguments])
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All of them, as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def interrupt_at(call: int, patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[None]:
    """Make the given call of module.name raise Ctrl-C; returns a list that grows by one entry per call."""
    plain, calls = getattr(module, name), []

    def interrupted(*arguments, **settings):
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return plain(*arguments, **settings)

    patch.setattr(module, name, interrupted)
    return calls


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that several workers finish together."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: no collection of garbage looks through its millions of objects, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Collect everything at exit again: what is still frozen then, Triton's bindings report as leaked."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Keep the seconds of each file without its slow tests, by which `make check` chooses."""
    partly_run = {argument.split("::")[0] for argument in getattr(config, "args", ()) if "::" in argument}
    seconds = {
        file: spent
        for file, spent in seconds_by(terminalreporter, lambda nodeid: nodeid.split("::")[0]).items()
        if file not in partly_run
    }
    if hasattr(config, "cache"):  # not with -p no:cacheprovider
        config.cache.set("seconds", config.cache.get("seconds", {}) | seconds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the seconds of each test function, with all its parameters, by which `make check` chooses within a file."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and hasattr(session.config, "cache"):  # no worker of several
        seconds = seconds_by(reporter, lambda nodeid: nodeid.split("[")[0])
        session.config.cache.set("seconds_of_tests", session.config.cache.get("seconds_of_tests", {}) | seconds)


def seconds_by(reporter: pytest.TerminalReporter, key: Callable[[str], str]) -> dict[str, float]:
    """The seconds of all tests but the slow ones, summed over those with the same key(nodeid)."""
    seconds: dict[str, float] = {}
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
                seconds[key(report.nodeid)] = seconds.get(key(report.nodeid), 0.0) + report.duration
    return seconds


def read_metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
