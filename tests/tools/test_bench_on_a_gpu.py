"""The benchmark's parts for a GPU with a small model on a simulated one: they run, whatever the times are."""

import pytest
import torch

from bench import __main__ as program
from bench import generation, limit, micro_batch, settings, updates
from bench.stopwatch import BEFORE
from tests.helpers.pretend_hopper import PretendHopper

pytestmark = pytest.mark.slow
SHAPES = {"124m": settings.Shape(2, 32, 2, 64, 12, 8, 2, gpt2=True), "1b": settings.Shape(2, 64, 2, 64, 12, 8, 4)}


def in_this_process(ways: dict, args: settings.Args, directory, what: str) -> dict:
    """Run our implementations; others use the device without an index, which the simulation doesn't know."""
    return {name: way(args, directory) for name, way in ways.items() if name.startswith("ours")}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("part", ["generate", "decode", "micro_batch", "ppo", "grpo"])
def test_a_part_runs_packed_and_padded(part, shape, monkeypatch, capsys) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setitem(settings.SHAPES, shape, SHAPES[shape])
    monkeypatch.setitem(generation.NUM_ROWS, "cuda", (1, 2))
    monkeypatch.setitem(limit.MOST_READ, "cuda", 2**12)
    monkeypatch.setattr(updates, "in_processes", in_this_process)
    monkeypatch.setattr(micro_batch, "kernel_times", lambda way, device: way() or {"matmuls": 1.0})
    monkeypatch.setattr(limit, "matmul_rate", lambda device, dtype: 8e14)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: 1)
    monkeypatch.setattr("nanorlhf.model.compiled_block", lambda block: block)
    with PretendHopper() as gpu:
        program.main(settings.Args(shape=shape, parts=(part,), device="cuda", dtype="bfloat16", rounds=1))
    printed = capsys.readouterr().out
    assert "attention: flash_attention over packed rows" in printed and "MFU" in printed
    assert (BEFORE in printed) == (part != "grpo")
    assert gpu.launches.count("varlen_attn") > 0 and (gpu.graphs or part == "micro_batch")
