"""Shared fixtures: the real data slices, a small model, the pipeline in miniature, a browser."""

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

# before torch is imported, and for processes started by tests: with tiny tensors a second thread is slower, up to ten
# times on a busy machine
os.environ["OMP_NUM_THREADS"] = "1"
# hide the GPU, also from started programs: `--device auto` would use it, its digits and peaks differ, and a process
# forked after CUDA was initialised can't use PyTorch. `make gpu` runs the tests marked gpu
os.environ.update({} if os.environ.get("NANORLHF_TEST_DEVICE") == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})

# set by `make test`; a make started by a test would print more and use another job limit
os.environ.pop("MAKEFLAGS", None)
os.environ.pop("MAKELEVEL", None)

import torch

# before a kernel is imported: without a GPU, run the Triton sources on the CPU
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

import train_dpo
import train_ppo
import train_rm
import train_sft
from data import tiny
from nanorlhf.config import GPTConfig
from nanorlhf.model import GPT
from tests.helpers.browser import AXE, Browser
from tests.helpers.miniature_rlcf import one_update, plugin, rlcf, usual_update  # noqa: F401  fixtures
from tests.helpers.shared_directories import made_once

# the same examples each time, so that a failure comes from the change; `pytest --hypothesis-profile explore` draws new
# ones. HYPOTHESIS_PROFILE=unshrunk stops at the first failure, because shrinking takes 60 times as long. No deadline:
# timings are meaningless on a busy machine
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
    with torch.no_grad():  # far from uniform, so that a wrong mask or position shows
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


TEST_DEVICE = os.environ.get("NANORLHF_TEST_DEVICE")
"""cuda: run the tests marked gpu, as in `make gpu`; cpu: run all commands of test_on_a_device.py on the CPU"""
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="`make gpu` runs it, on a CUDA device")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])
"""value of a parameter `device`, for tests that also run on a CPU"""

UNCLIPPED = {"clip_range": 1e6, "value_clip_range": None}
"""PPO without clipping. The gradient jumps at the boundary of the clip range: if one run has moved a value by 0.2 and
another by 0.2000003, only one of them clips it, so runs that differ only by rounding diverge. Tests that compare such
runs after an optimizer step turn clipping off, or compare only the first step, where every ratio is 1."""


@dataclass(frozen=True)
class Miniature:
    """Settings of the whole pipeline on a world with a few posts; tests change them with `replace`."""

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
    with Browser(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture(scope="session")
def unreadable(browser) -> Callable[[Path], list[str]]:
    """Return the function that lists a page's accessibility problems."""
    if not AXE.exists():
        pytest.skip("no axe-core: make axe")
    return browser.unreadable


@pytest.fixture(scope="module")
def undrawn():
    """Skip a report's figures, which take most of an evaluation's time; tests/tools/test_docs.py draws each of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, file, **settings: file.write(b"<svg/>"))
        yield


def run_program(program: str, *arguments: str) -> None:
    """Run `python train_x.py` or `python -m data.x` in this process, which has already imported PyTorch.

    The file runs from its first line, as __main__. Raises SystemExit if the program exits with a code.
    """
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # tests import the module too
        patch.setattr(sys, "argv", [program, *arguments])
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights as a vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def interrupt_at(call: int, patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[None]:
    """Make the call number `call` of module.name raise KeyboardInterrupt; return a list that grows with each call."""
    plain, calls = getattr(module, name), []

    def interrupted(*arguments, **settings):
        calls.append(None)
        if len(calls) == call:
            raise KeyboardInterrupt
        return plain(*arguments, **settings)

    patch.setattr(module, name, interrupted)
    return calls


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with the most slow tests first, so that parallel workers finish together."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Freeze what is imported, so that garbage collection never scans its millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Unfreeze at exit: Triton's bindings report objects that are still frozen as leaked."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Save the seconds of each file without its slow tests; `make check` uses them to choose files."""
    partly_run = {argument.split("::")[0] for argument in getattr(config, "args", ()) if "::" in argument}
    seconds = {
        file: spent
        for file, spent in seconds_by(terminalreporter, lambda nodeid: nodeid.split("::")[0]).items()
        if file not in partly_run
    }
    if hasattr(config, "cache"):  # not with -p no:cacheprovider
        config.cache.set("seconds", config.cache.get("seconds", {}) | seconds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Save the seconds of each test function with all its parameters; `make check` uses them to choose tests."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and hasattr(session.config, "cache"):  # not in a parallel worker
        seconds = seconds_by(reporter, lambda nodeid: nodeid.split("[")[0])
        session.config.cache.set("seconds_of_tests", session.config.cache.get("seconds_of_tests", {}) | seconds)


def seconds_by(reporter: pytest.TerminalReporter, key: Callable[[str], str]) -> dict[str, float]:
    """Return the seconds of all tests except the slow ones, summed by key(nodeid)."""
    seconds: dict[str, float] = {}
    for reports in reporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
                seconds[key(report.nodeid)] = seconds.get(key(report.nodeid), 0.0) + report.duration
    return seconds


def read_metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
