"""The benchmark runs on a tiny shape; no test asserts its timings."""

import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as program
from bench import compilers, fused, generation, kernel_times, limit, settings, stopwatch, updates
from kernels import attention, linear, norm
from kernels.linear import kept_casts
from kernels.processor import has_int8_matmul
from nanorlhf import cache, launch, layers, reading
from nanorlhf.batch import Batch
from nanorlhf.cache import KVCache
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT
from nanorlhf.training.flops import Card
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def moment(monkeypatch):
    monkeypatch.setitem(settings.SHAPES, "tiny", settings.Shape(1, 16, 2, 40, 8, 5, 4))
    monkeypatch.setattr(launch, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(limit, "matmul_rate", lambda device, dtype: 1e12)
    monkeypatch.setattr(limit, "read_rate", lambda device, num_bytes: 1e10)
    return settings.Args(device="cpu", rounds=1, parts=("generate", "logprobs", "gae"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_part_reports_rows_with_ours_first(moment, tmp_path, capsys, dtype):
    program.main(replace(moment, json=tmp_path / "speed.json", dtype=dtype))
    written = json.loads((tmp_path / "speed.json").read_text())
    rows, attention = written["rows"], written["attention"]
    assert len(attention) == 2 and set(attention) <= {"math", "flash_attention", "efficient_attention"}
    assert {row["what"].split(",")[0] for row in rows} == {"generate", "linear_logprobs", "gae"}
    names = [row["way"] for row in rows if row["what"] == "generate"]
    int8 = ["ours, rollouts in int8"] if has_int8_matmul() else []
    bfloat16 = ["ours, rollouts in bfloat16"] if dtype == "float32" else []
    assert names == ["ours", *bfloat16, *int8, "plain PyTorch"]
    assert all(("packing_seconds" in row) == ("rollouts" in row["way"]) for row in rows)
    assert rows[0]["way"] == "ours" and all(row["seconds"] > 0 and row["peak_bytes"] >= 0 for row in rows)
    printed = capsys.readouterr().out
    assert "plain PyTorch" in printed and f"attention: {attention[0]} on a GPU" in printed
    assert all(("limit_seconds" in row) == (row["what"] != "gae") for row in rows)
    assert re.search("ours +[0-9.]+ +1.00 +[0-9.]+ +[0-9]+%  [0-9,]+ tokens/s, [0-9]+% of the matmul rate\n", printed)


def test_a_decode_step_is_a_share_of_what_follows_the_prefill(moment, tmp_path, monkeypatch, capsys):
    """The prefill of 2 s and all 5 tokens in 10 s: each of 4 decode steps takes 2 s, and reads weights and cache."""
    seconds = itertools.cycle([(2.0, 100), (10.0, 300)])
    monkeypatch.setattr(generation, "NUM_ROWS", {"cpu": (1, 3)})
    monkeypatch.setattr(
        generation,
        "compare",
        lambda ways, rounds, device: {name: (way(), next(seconds))[1] for name, way in ways.items()},
    )
    monkeypatch.setattr(stopwatch, "published", lambda device: Card(1e9, 1e9))
    program.main(replace(moment, parts=("decode",), json=tmp_path / "speed.json", dtype="bfloat16"))
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [(row["what"], row["size"], row["seconds"], row["peak_bytes"]) for row in rows] == [
        (what, f"{num_rows} x (8 + 5) bfloat16", 2.0, peak)
        for num_rows in (1, 3)
        for what, peak in (("prefill", 100), ("decode step", 300))
    ]
    shape = settings.SHAPES["tiny"]
    for num_rows, prefill, step in ((1, *rows[:2]), (3, *rows[2:])):
        lengths = replace(shape, episodes=num_rows).query_lengths
        weights = 12 * 16**2 + 16 * 40  # one block and the head
        cached = [sum(length + t for length in lengths) * 2 * 16 for t in range(1, 5)]
        assert step["bytes_per_second"] == pytest.approx(2 * (weights + sum(cached) / 4) / 2.0)
        work = limit.generation(shape.config, lengths, 5, 2)
        assert prefill["mfu"] == pytest.approx(work.flops / 2.0 / 1e9)
        assert step["matmul_share"] == pytest.approx(step["mfu"] / 1e3)  # the measured rate is 1e12
        assert step["mfu"] == pytest.approx(sum(flops for flops, _ in work.steps) / 4 / 2.0 / 1e9)
        steps_only = limit.Work(steps=work.steps).seconds(torch.device("cpu"), torch.bfloat16)
        assert step["limit_seconds"] == pytest.approx(steps_only / 4)
    assert re.search("MFU [0-9]+%, [0-9]+% of the matmul rate, [0-9.]+ GB/s of 10.0\n", capsys.readouterr().out)


def test_a_gpu_runs_each_stage_before_and_after(moment, monkeypatch):
    """Prefills of 2 and 4 s, all 5 tokens in 10 and 24 s: decode steps of 2 and 5 s."""
    assert [*stopwatch.before_and_after(print, torch.device("cpu"))] == ["ours"]
    seconds = iter((2.0, 4.0, 10.0, 24.0))
    monkeypatch.setattr(generation, "NUM_ROWS", {"cpu": (3,)})
    monkeypatch.setattr(generation, "compare", lambda ways, *arguments: {name: (next(seconds), 100) for name in ways})
    both = lambda way, device: stopwatch.before_and_after(way, torch.device("cuda"))  # noqa: E731
    monkeypatch.setattr(generation, "before_and_after", both)
    rows = generation.bench_decode(moment, settings.SHAPES["tiny"], torch.device("cpu"))
    assert [(row["what"], row["way"], row["seconds"], row["ratio"]) for row in rows] == [
        ("prefill", "ours", 2.0, 1.0), ("prefill", stopwatch.BEFORE, 4.0, 2.0),
        ("decode step", "ours", 2.0, 1.0), ("decode step", stopwatch.BEFORE, 5.0, 2.5),
    ]  # fmt: skip
    assert rows[2]["bytes_per_second"] == 2.5 * rows[3]["bytes_per_second"]


def test_the_padded_and_unfused_way_is_the_plain_path(monkeypatch):
    """The switches also turn packing and fusing off on a CPU that pretends to be a GPU."""
    calls, model = [], GPT(settings.SHAPES["tiny"].config)
    record = lambda name, result: lambda *arguments: (calls.append(name), result)[1]  # noqa: E731
    monkeypatch.setattr(reading, "can_pack", record("packs", True))
    monkeypatch.setattr(layers, "fuses", record("fuses", False))
    monkeypatch.setattr(attention, "fuses", record("rotates", False))
    monkeypatch.setattr(cache, "can_decode", record("decodes", False))
    ids = torch.tensor([[1, 2, 3], [0, 4, 5]])

    def way() -> None:
        with torch.autocast("cpu", torch.bfloat16), kept_casts():
            generate(model, ids, ids > 0, 2)
            model(ids, ids > 0)

    way()
    assert {"packs", "fuses", "rotates", "decodes"} == set(calls)
    calls.clear()
    stopwatch.padded_and_unfused()(way)()
    assert not calls
    batch = Batch.of([{}] * 2, ids, ids, torch.zeros(2, 3), 7, 0, "last_token")
    for context, keeps in ((nullcontext(), True), (stopwatch.padded_and_unfused(), False)):
        with context:
            for _ in batch.micro_batches(1):
                assert (linear.casts is not None) == keeps


def test_a_micro_batch_is_timed_and_profiled(moment, tmp_path, monkeypatch):
    program.main(replace(moment, parts=("micro_batch",), json=tmp_path / "speed.json"))
    first, *profiles = json.loads((tmp_path / "speed.json").read_text())["rows"]
    shape = settings.SHAPES["tiny"]
    real = sum(shape.query_lengths) + 4 * 5
    assert first["size"] == f"4 x (8 + 5) float32, {real / (4 * 13):.0%} real"
    # all but the last token through the block; its outputs, and the head, at 5 positions of each row
    pairs = sum(sum(range(1, length + 5)) for length in shape.query_lengths)
    used = sum(sum(range(length, length + 5)) for length in shape.query_lengths)
    assert pairs > used
    flops = 3 * 2 * ((real - 4) * 2 * 16 * 16 + 20 * (2 * 16 * 16 + 8 * 16 * 16) + used * 2 * 16 + 20 * 16 * 40)
    assert first["limit_seconds"] * 1e12 == pytest.approx(flops)
    for what in ("profile of a micro-batch", "profile of generation"):
        whole, *kinds = (row for row in profiles if row["what"] == what)
        assert sum(row["seconds"] for row in kinds) == pytest.approx(whole["seconds"])
        assert {"matmuls", "attention", "norms"} <= {row["way"] for row in kinds}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", "matmuls"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_nn_align8>", "matmuls"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<256, 64, 64, 4>, true>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x256", "attention"),
        ("decode_kernel", "attention"),
        ("void at::native::elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>", "casts and copies"),
        ("Memcpy DtoD (Device -> Device)", "casts and copies"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float>", "norms"),
        ("add_norm_backward_kernel", "norms"),
        ("activated_backward_kernel", "activations and rotations"),
        ("linear_backward_kernel", "log-probabilities"),
        ("void at::native::elementwise_kernel<128, 2, at::native::CUDAFunctor_add<float>>", "other"),
    ],
)  # fmt: skip
def test_kernels_are_sorted_by_name(kernel, kind):
    assert kernel_times.kind_of(kernel) == kind


@pytest.mark.parametrize("runs_kernels", [False, True])
def test_operations_between_matmuls_are_measured_by_the_bytes_they_must_move(
    moment, tmp_path, monkeypatch, runs_kernels
):
    """Eight tokens of 16 channels and 64 in the MLP, in bfloat16; 2 of 8 channels of both heads rotate."""
    if runs_kernels:
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(fused, "NUM_TOKENS", {"cpu": 8})
    monkeypatch.setattr(fused, "fuses", lambda x: runs_kernels)
    calls = []
    kernels = ("add_norm", "activated", "gated", "rotary_triton_", "rotary_store_triton", "decode_attention")
    for name in kernels:
        kernel = getattr(fused, name)
        record = lambda *arguments, name=name, kernel=kernel: calls.append(name) or kernel(*arguments)  # noqa: E731
        monkeypatch.setattr(fused, name, record)
    program.main(replace(moment, parts=("fused",), json=tmp_path / "speed.json", dtype="bfloat16"))
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    stream, matmul, mlp = 8 * 16 * 4, 8 * 16 * 2, 8 * 64 * 2
    expected = {
        # x, s and their gradients, read or written; the residual, the norm and their gradients
        "residual sum and layer norm, forward + backward": 5 * stream + 4 * matmul,
        "residual sum and rms norm, forward + backward": 5 * stream + 4 * matmul,
        "layer norm, forward + backward": 3 * stream + 2 * matmul,
        "gelu and bias, forward + backward": 5 * mlp,
        "silu gate, forward + backward": 8 * mlp,
        "rotation": 2 * (8 * 4 * 2 * 2) + 2 * (8 * 1 * 4),
        # of 4 tokens: 2 channels of 2 queries, 8 of 2 keys and 2 values, all read and written
        "rotation of one token into the cache": 4 * (2 * 2 * 2 + 2 * 2 * 2 * 8) * 2 + 2 * (4 * 1 * 4),
        # keys and values of 16 channels at the real columns, and 4 queries and outputs
        "attention of one token": 2 * 16 * 2 * (sum(settings.SHAPES["tiny"].query_lengths) + 4 * 5) + 2 * 4 * 16 * 2,
    }
    assert {row["what"]: row["bytes_per_second"] * row["seconds"] for row in rows} == pytest.approx(expected)
    assert all(row["way"] == "ours" and row["limit_seconds"] * 1e10 == expected[row["what"]] for row in rows)
    assert set(calls) == (set(kernels) if runs_kernels else set())


def hangs(args: settings.Args, directory: Path) -> None:
    """A fake measurement that writes its process id and never ends."""
    Path(directory.parent, "worker").write_text(str(os.getpid()))
    time.sleep(600)


BENCH_THAT_HANGS = """
import torch
from bench import settings, updates
from tests.tools.test_bench import hangs
if __name__ == "__main__":
    settings.SHAPES["tiny"], updates.our_ppo = settings.Shape(1, 16, 2, 40, 8, 5, 4), hangs
    updates.bench_ppo(settings.Args(device="cpu", rounds=1), settings.SHAPES["tiny"], torch.device("cpu"))
"""


def test_no_process_outlives_a_benchmark_that_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(BENCH_THAT_HANGS)
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, tmp_path / "script.py"], env=environment, stderr=subprocess.DEVNULL)
    while not (tmp_path / "worker").exists() or not (worker := (tmp_path / "worker").read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    process.wait()
    for _ in range(100):  # init reaps it a moment later
        if not Path(f"/proc/{worker}").exists() or "State:\tZ" in Path(f"/proc/{worker}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(int(worker), signal.SIGKILL)
    raise AssertionError(f"process {worker} is still alive")


def test_both_ways_of_a_ppo_iteration_run_on_the_same_queries(moment, tmp_path):
    settings.make_run(settings.SHAPES["tiny"], tmp_path, torch.device("cpu"))
    rounded = functools.partial(updates.our_ppo, rollout_dtype="bfloat16")
    for way in (updates.our_ppo, updates.our_ppo_before, updates.plain_pytorch_ppo, rounded):
        seconds, peak = way(moment, tmp_path)
        assert seconds > 0 and peak > 0
    lengths = [len(query) for query in settings.random_queries(settings.SHAPES["tiny"])]
    assert max(lengths) == 8 and min(lengths) >= 4


def test_a_grpo_iteration_runs_with_shared_queries_and_with_a_row_per_response(moment, tmp_path, monkeypatch):
    settings.make_run(settings.SHAPES["tiny"], tmp_path, torch.device("cpu"))
    calls = []
    read = reading.read_queries_once
    monkeypatch.setattr(reading, "read_queries_once", lambda *arguments: calls.append(arguments) or read(*arguments))
    seconds, peak = updates.our_grpo(moment, tmp_path)
    assert seconds > 0 and peak > 0 and calls
    calls.clear()
    updates.our_grpo(moment, tmp_path, shares_queries=False)
    assert not calls
    monkeypatch.setattr(updates, "in_processes", lambda ways, *arguments: dict.fromkeys(ways, (2.0, 10)))
    rows = updates.bench_grpo(moment, settings.SHAPES["tiny"], torch.device("cpu"))
    assert [row["way"] for row in rows] == ["ours", "ours, a row per response"]
    assert rows[0]["size"] == "1 x (8 + 4 x 5) float32"
    assert rows[0]["limit_seconds"] == rows[1]["limit_seconds"] > 0


def test_the_limit_of_a_bfloat16_iteration_counts_bfloat16_bytes(moment, monkeypatch):
    monkeypatch.setattr(updates, "in_processes", lambda ways, *arguments: dict.fromkeys(ways, (2.0, 10)))
    monkeypatch.setattr(limit, "matmul_rate", lambda device, dtype: float("inf"))
    shape, seconds = settings.SHAPES["tiny"], {}
    for dtype in ("float32", "bfloat16"):
        rows = updates.bench_ppo(replace(moment, dtype=dtype), shape, torch.device("cpu"))
        seconds[dtype] = rows[0]["limit_seconds"]
    sampling = limit.generation(shape.config, shape.query_lengths, shape.response_length, 4)
    difference = sum(size for _, size in sampling.steps) / 2 / 1e10  # bytes per second; AdamW's are the same
    assert seconds["float32"] - seconds["bfloat16"] == pytest.approx(difference)


@pytest.mark.parametrize("name", ["PPO", "GRPO"])
@pytest.mark.parametrize(
    ("device", "dtype", "precision"),
    [("cuda", "bfloat16", "bf16"), ("cuda", "float32", "no"), ("cpu", "bfloat16", "no")],
)
def test_trl_uses_our_dtype_for_matmuls_on_a_gpu(moment, tmp_path, monkeypatch, name, device, dtype, precision):
    """TRL's trainers make an Accelerator without a precision, so it comes from the environment, as here."""
    import transformers

    class Trainer:
        def __init__(self, *arguments, callbacks, **rest):
            (settings,) = (each for each in arguments if isinstance(each, dict) and "bf16" in each)
            precisions.append("bf16" if settings["bf16"] else "no")
            self.accelerator = SimpleNamespace(mixed_precision=os.environ["ACCELERATE_MIXED_PRECISION"])
            (self.clock,) = callbacks

        def train(self):
            precisions.append(self.accelerator.mixed_precision)
            for seconds in range(8):
                monkeypatch.setattr(time, "perf_counter", lambda seconds=seconds: float(seconds))
                self.clock.on_step_end(None, None, None)

    precisions: list[str] = []
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(Dataset=SimpleNamespace(from_dict=dict)))
    trl = SimpleNamespace(**{f"{name}Config": dict, f"{name}Trainer": Trainer})
    for module in ("trl", "trl.experimental", "trl.experimental.ppo"):
        monkeypatch.setitem(sys.modules, module, trl)
    monkeypatch.setattr(transformers.GPTNeoXForSequenceClassification, "__init__", lambda model, config: None)
    settings.make_run(settings.SHAPES["tiny"], tmp_path, torch.device("cpu"))
    monkeypatch.setattr(updates, "peak_of_process", lambda device: 10)
    args = replace(moment, device=device, dtype=dtype)
    if name == "GRPO":
        assert updates.trl_grpo(args, tmp_path) == (4.0, 10)  # an iteration is 4 of its 8 steps
    else:
        updates.trl_updates(args, tmp_path, [], processes=1)
    assert precisions == [precision, precision]


@pytest.mark.parametrize("stage", ["sft", "rm", "dpo"])
def test_both_ways_of_a_supervised_step_run_on_the_same_rows(moment, tmp_path, stage):
    settings.make_run(settings.SHAPES["tiny"], tmp_path, torch.device("cpu"))
    for way in (updates.our_stage, updates.plain_pytorch_stage):
        seconds, peak = way(moment, tmp_path, stage)
        assert seconds > 0 and peak > 0


def test_supervised_steps_are_three_stages_with_their_limits(moment, monkeypatch):
    monkeypatch.setattr(updates, "in_processes", lambda ways, *arguments: dict.fromkeys(ways, (2.0, 10)))
    rows = updates.bench_supervised(moment, settings.SHAPES["tiny"], torch.device("cpu"))
    names = [(row["what"], row["way"]) for row in rows]
    assert names == [(f"{stage} step", way) for stage in ("SFT", "RM", "DPO") for way in ("ours", "plain PyTorch")]
    assert rows[0]["limit_seconds"] == rows[1]["limit_seconds"] < rows[4]["limit_seconds"]  # DPO has two models


@pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")
def test_persistent_compilers_are_compared_with_one_process_per_program(moment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compilers, "NUM_PROGRAMS", 3)
    monkeypatch.setattr(compilers, "NUM_PROCESSES", 1)
    program.main(replace(moment, parts=("compile",), json=tmp_path / "speed.json"))
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [(row["what"], row["way"].split(",")[0]) for row in rows] == [
        ("compile Java", "ours"), ("compile Java", "javac"), ("compile Python", "ours"), ("compile Python", "pyflakes"),
    ]  # fmt: skip
    for row in rows:
        assert row["programs_per_second"] * row["seconds"] == pytest.approx(1) and row["peak_bytes"] > 5_000_000
    assert len({compilers.java_program(number) for number in range(300)}) == 300
    assert re.search(r"javac, one process per program .* programs/s\n", capsys.readouterr().out)


def test_without_a_jdk_compile_is_skipped_unless_named(moment, monkeypatch, capsys):
    for name in ("generate", "logprobs", "gae", "supervised", "ppo", "grpo"):
        monkeypatch.setattr(program, f"bench_{name}", lambda *arguments: [])
    monkeypatch.setattr(program.shutil, "which", lambda name: None)
    program.main(replace(moment, parts=settings.Args().parts))
    assert "skipping compile: javac not found" in capsys.readouterr().out
    with pytest.raises(InputError, match="--parts compile needs javac"):
        program.main(replace(moment, parts=("compile",)))


def test_quick_measures_tiny_and_a_few_tokens_of_small_once(moment, monkeypatch):
    calls = []
    for name in ("generate", "logprobs", "gae", "supervised", "ppo", "grpo", "compile"):
        record = lambda args, shape, device, name=name: calls.append((name, args.rounds, shape)) or []  # noqa: E731
        monkeypatch.setattr(program, f"bench_{name}", record)
    program.main(settings.Args(device="cpu", quick=True))
    tiny, small = settings.SHAPES["tiny"], replace(settings.SHAPES["small"], response_length=16)
    parts = [(name, 1, tiny) for name in ("generate", "logprobs", "gae", "ppo")]
    assert calls == [*parts, ("generate", 1, small)]
    with pytest.raises(InputError, match="--quick can't be combined with --shape"):
        program.main(settings.Args(device="cpu", quick=True, rounds=3))


def test_the_peak_counts_only_memory_in_use_at_once():
    def two_at_once() -> None:
        for _ in range(3):  # 2 MB at a time, 6 MB in total
            first, second = torch.empty(250_000), torch.empty(250_000)
            del first, second

    assert stopwatch.peak_bytes(two_at_once, torch.device("cpu")) == 2_000_000


def test_a_cpu_process_reports_resident_memory_even_with_a_gpu_present(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
    assert stopwatch.peak_of_process("cuda") == 5 and stopwatch.peak_of_process("cpu") > 10**7


def test_a_growing_cache_gives_the_results_of_the_static_one(tiny_gpt, monkeypatch):
    ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(5) >= torch.tensor([[0], [2]])
    results = []
    for kind, whole in ((generation.GrowingCache, False), (generation.GrowingCache, True), (KVCache, False)):
        monkeypatch.setattr("nanorlhf.cache.replays", lambda device, whole=whole: whole)  # True, as on a GPU
        cache = kind(tiny_gpt.config, mask, 4, torch.float32)
        with torch.no_grad():
            tiny_gpt(ids[:, :5], mask, cache=cache)
            results.append(torch.cat([tiny_gpt(ids[:, i : i + 1], cache=cache) for i in range(5, 9)], dim=1))
    for result in results[:2]:
        assert torch.allclose(result, results[2], atol=1e-6)


def test_plain_pytorch_computes_padding_where_ours_packs(moment, monkeypatch):
    """A growing cache has no buffer to pack keys into."""
    packed, read, on_gpu = [], reading.read_packed, SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    monkeypatch.setattr(reading, "can_pack", lambda *arguments: True)
    monkeypatch.setattr(reading, "read_packed", lambda *arguments: packed.append(arguments) or read(*arguments))
    monkeypatch.setattr(norm, "triton", norm)
    rows = generation.bench_generate(moment, settings.SHAPES["tiny"], torch.device("cpu"))
    assert [rows[0]["way"], rows[-1]["way"]] == ["ours", "plain PyTorch"] and packed
    assert layers.fuses(on_gpu) and attention.fuses(on_gpu)
    with stopwatch.plain_pytorch():
        assert not layers.fuses(on_gpu) and not attention.fuses(on_gpu) and not reading.can_pack()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rounds": 0}, "--rounds must be at least 1, got 0"),
        ({"device": "cuda"}, "--device cuda:0: PyTorch found 0 CUDA devices"),
        ({"json": "missing/dir/speed.json"}, "does not exist"),
        ({"peers": True, "shape": "124m", "parts": ("grpo",)}, "--peers"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused_first(moment, change, words):
    if "json" in change:
        change = {"json": Path(change["json"])}
    if "device" in change and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InputError, match=words):
        program.main(replace(moment, **change))
