"""The table of compiled kernels: few spills, tensor cores, few bytes; its rows match the library's launches."""

import csv
import json
import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.conftest import GPU, ROOT

TABLE, MEASURED = (list(csv.DictReader((ROOT / "kernels" / f"{name}.csv").open())) for name in ("compiled", "measured"))
KEY = ("kernel", "dtype", "setting", "architecture")
TENSOR_CORES = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA"}

# the largest tile of each matmul, which needs the most registers; compiled in a separate process, because the other
# tests use Triton's interpreter, which replaces the compiler for the whole process
COMPILE_A_SAMPLE = """
import json
from tools import compile_kernels
launches = compile_kernels.launches()
sample = {}
for launch in launches:
    for architecture in compile_kernels.CARDS:
        if (launch.kernel.__name__, str(launch.dtype), architecture) in {
            ("gae_kernel", "torch.float32", 90),
            ("kl_kernel", "torch.bfloat16", 100),
            ("linear_forward_kernel", "torch.bfloat16", 80),
            ("linear_forward_kernel", "torch.bfloat16", 90),
            ("linear_backward_kernel", "torch.bfloat16", 80),
            ("linear_backward_kernel", "torch.bfloat16", 100),
        }:
            sample[launch.kernel.__name__, launch.dtype, architecture] = launch
print(json.dumps({
    "keys": [compile_kernels.row_key(launch, card) for launch in launches for card in compile_kernels.CARDS],
    "rows": [compile_kernels.make_row(launch, key[-1]) for key, launch in sample.items()],
}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    for tool in (triton.knobs.nvidia.ptxas, triton.knobs.nvidia.ptxas_blackwell, triton.knobs.nvidia.cuobjdump):
        if not Path(tool.path).is_file():
            pytest.skip(f"{tool.path} is missing: this Triton comes without NVIDIA's compilers")
    cache = tmp_path_factory.mktemp("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE_A_SAMPLE], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(rows: list[dict]) -> None:
    """Check what must be true for every version of Triton."""
    for row in rows:
        name = " ".join(row[column] for column in KEY)
        # on an H200 the largest tiles are the fastest although they spill; the autotuner decides
        assert int(row["spilled_bytes"]) == 0 or "linear" in row["kernel"] and "V=256" in row["setting"], name
        assert float(row["occupancy"]) > 0, f"{name} does not fit"
        assert float(row["ratio"]) <= 1.3, name
        is_product = row["kernel"].startswith("linear") and row["dtype"] == "bfloat16"
        assert row["tensor_cores"] == (TENSOR_CORES[row["architecture"]] if is_product else "none"), name


def test_only_the_largest_tiles_spill_and_every_matmul_uses_tensor_cores():
    assert len(TABLE) > 60
    check(TABLE)


def test_the_page_shows_the_table_s_summary():
    pytest.importorskip("triton", reason="triton is not installed")
    from tools.compile_kernels import summary

    assert summary(TABLE, MEASURED) in (ROOT / "kernels" / "README.md").read_text()


def test_each_setting_was_measured_on_a_hopper():
    unmeasured = ("decode", "combine", "add_norm", "rotary", "activated", "gated")  # newer than the last measurement
    hopper = [row for row in TABLE if row["architecture"] == "sm_90" and not row["kernel"].startswith(unmeasured)]
    compiled = [tuple(row[column] for column in KEY) for row in hopper]
    assert [tuple(row[column] for column in KEY) for row in MEASURED] == compiled
    predicted = {tuple(row[column] for column in KEY): float(row["predicted_us"]) for row in TABLE}
    for row in MEASURED:  # an H200 has 1.43 times the bandwidth of the H100 in the prediction
        assert float(row["measured_us"]) > predicted[tuple(row[column] for column in KEY)] / 1.5


@pytest.mark.parametrize("device", [GPU])
def test_a_launch_is_timed_on_this_machines_device(device):
    from tools import compile_kernels

    row = compile_kernels.measured_row(compile_kernels.launches()[0])
    assert row["kernel"] == "gae_kernel" and 0.5 < float(row["measured_us"]) < 1e4


def test_a_decode_step_is_timed_with_a_full_cache():
    """Columns are int64, like labels."""
    pytest.importorskip("triton", reason="triton is not installed")
    from tools import compile_kernels

    launches = [each for name in ("decode", "rotary, store") for each in compile_kernels.record_launches(calls()[name])]
    assert len(launches) > 2
    for launch in launches:
        arguments = dict(zip(launch.kernel.arg_names, compile_kernels.random_arguments(launch, "cpu"), strict=False))
        for ours, theirs in zip(arguments.values(), launch.arguments, strict=True):
            assert getattr(ours, "shape", ours) == getattr(theirs, "shape", theirs)
        if launch.kernel.__name__ == "decode_kernel":
            assert arguments["first"].tolist() == [0, 0, 0] and arguments["last"].tolist() == [49]
            assert arguments["first"].dtype == arguments["last"].dtype == torch.int64
        if launch.kernel.__name__ == "rotary_store_kernel":
            assert arguments["at"].tolist() == [49] and arguments["at"].dtype == torch.int64


def test_nothing_is_measured_without_a_device(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    from tools import compile_kernels

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--measure needs a CUDA device"):
        compile_kernels.main(compile_kernels.Args(measure=tmp_path / "measured.csv"))
    assert not (tmp_path / "measured.csv").exists()


@pytest.mark.slow
def test_the_table_has_every_configuration_and_a_sample_compiles_to_its_rows(compiled):
    assert [tuple(key.values()) for key in compiled["keys"]] == [tuple(row[column] for column in KEY) for row in TABLE]
    check(compiled["rows"])
    assert len(compiled["rows"]) == 6
    by_key = {tuple(row[column] for column in KEY): row for row in TABLE}
    for row in compiled["rows"]:
        stored = by_key[tuple(row[column] for column in KEY)]
        if stored["triton"] == row["triton"]:  # another version may need other registers
            assert {column: str(value) for column, value in row.items()} == stored


@pytest.fixture
def count(monkeypatch):
    """Return a function that runs a call and returns the bytes that interpreted kernels load and store in it."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("the kernels are compiled here")
    from triton.runtime.interpreter import InterpreterBuilder

    counted = [0]

    def counting(method):
        def access(self, pointers, *rest):
            mask = rest[1 if method is store else 0]
            counted[0] += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return method(self, pointers, *rest)

        return access

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting(load))
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counting(store))

    def run(call) -> int:
        counted[0] = 0
        call()
        return counted[0]

    return run


def calls() -> dict:
    """Return launches at sizes that aren't multiples of a block, with groups of two blocks of rows.

    The rows and ids of the matmuls are multiples: beyond the last one, the kernels read the last again, from the cache.
    """
    names = ("activation", "decode", "gae", "kl", "logprobs", "norm", "rotary")
    activation, decode, gae, kl, logprobs, norm, rotary = (import_module(f"kernels.{name}") for name in names)
    torch.manual_seed(0)
    q, cache = torch.randn(3, 4, 1, 24), torch.randn(3, 2, 50, 24)
    columns = decode.Columns(torch.tensor([0, 7, 30]), torch.tensor([41]), None)
    rewards, values, logits = torch.randn(3, 21), torch.randn(3, 21), torch.randn(2, 5, 150)
    hidden, weight, bias, rows = torch.randn(80, 24), torch.randn(128, 24), torch.randn(128), torch.randn(80)
    inputs = hidden, weight, torch.randint(128, (80,)), bias, 0.7, None
    short = (hidden.bfloat16(), weight.bfloat16(), inputs[2], None, 1.0, 5.0)
    block = slice(32, 96)
    x, layer, half = torch.randn(5, 24), (rows[:24], rows[:24], 1e-5, "layer"), (torch.float32, torch.bfloat16)
    qkv, table, up = torch.randn(2, 3, 7, 12), torch.randn(2, 3, 1, 5), torch.randn(70, 300).bfloat16()
    token = torch.randn(2, 1, 7, 24)
    return {
        "decode": lambda: decode.decode_attention(q, cache, cache, columns, 0.2),
        "gae": lambda: gae.gae_triton(rewards, values, 1.0, 0.95),
        "kl": lambda: kl.kl_triton(*logits),
        "kl, bfloat16": lambda: kl.kl_triton(*logits.bfloat16()),
        "forward": lambda: logprobs.linear_forward_triton(*inputs, None),
        "forward, bfloat16": lambda: logprobs.linear_forward_triton(*short, None),
        "backward": lambda: logprobs.linear_backward_triton(*inputs, rows, rows, (rows, rows), block, None),
        "backward, bfloat16": lambda: logprobs.linear_backward_triton(*short, rows, rows, (rows, rows), block, None),
        "norm": lambda: norm.add_norm_triton(x, x.bfloat16(), *layer, torch.float32),
        "norm, backward": lambda: norm.add_norm_backward_triton(x, rows[:24], x, x, *layer[2:], half, (True, True)),
        "norm without a residual": lambda: norm.add_norm_triton(x, None, *layer, torch.bfloat16),
        "norm without a residual, backward": lambda: norm.add_norm_backward_triton(
            x, rows[:24], None, x.bfloat16(), *layer[2:], half[:1] * 2, (True, True)
        ),
        "norm, frozen": lambda: norm.add_norm_backward_triton(
            x, rows[:24], x, x, 1e-5, "rms", half[:1] * 2, (False, False)
        ),
        "rotary": lambda: rotary.rotary_triton_(qkv, table, table, 3, True),
        "rotary, store": lambda: rotary.rotary_store_triton(
            token, table[:, :1], table[:, :1], 3, True, cache[:2], cache[:2], columns.last
        ),
        "rotary, store bfloat16": lambda: rotary.rotary_store_triton(
            token.bfloat16(), table[:, :1], table[:, :1], 3, False, cache[:2], cache[:2], columns.last
        ),
        "activation": lambda: activation.activated_triton(up, torch.randn(300), "gelu"),
        "activation, backward": lambda: activation.activated_backward_triton(up, torch.randn(300), up, "gelu", True),
        "gate": lambda: activation.gated_triton(up, up, "silu"),
        "gate, backward": lambda: activation.gated_backward_triton(up, up, up, "silu"),
    }


def test_the_modelled_bytes_equal_the_interpreted_kernels_loads_and_stores(count, monkeypatch):
    from kernels import logprobs
    from tools import compile_kernels

    monkeypatch.setattr(logprobs, "SPLIT", 64)
    monkeypatch.setattr(logprobs, "GROUP", 32 * 24 * 4)
    monkeypatch.setattr("kernels.norm.PROGRAMS", 2)
    monkeypatch.setattr("kernels.rotary.PAIRS", 16)
    monkeypatch.setattr("kernels.rotary.CHANNELS", 64)
    for name, call in calls().items():
        modelled = sum(map(compile_kernels.requested_bytes, compile_kernels.record_launches(call)))
        assert modelled == count(call) > 0, name


def test_the_kernel_and_the_model_finish_a_group_of_rows_before_the_next(count, monkeypatch):
    """Five blocks of 16 rows in groups of two, two splits of the ids; a program loads its rows' labels first."""
    from triton.runtime.interpreter import InterpreterBuilder

    from kernels import logprobs
    from tools import compile_kernels

    first, load = {}, InterpreterBuilder.create_masked_load

    def recording(self, pointers, *rest):
        x, y, _ = self.grid_idx
        first.setdefault((y, x), int(pointers.data.flat[0]))  # programs start by x, then by y
        return load(self, pointers, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recording)
    monkeypatch.setattr(logprobs, "SPLIT", 64)
    monkeypatch.setattr(logprobs, "GROUP", 32 * 24 * 4)
    call = calls()["forward"]
    (launch,) = compile_kernels.record_launches(call)
    call()
    expected = [0, 1, 0, 1, 2, 3, 2, 3, 4, 4]
    assert [(first[program] - min(first.values())) // (16 * 8) for program in sorted(first)] == expected
    modelled = [[data[1] for data, _ in steps[0] if data[0] == "labels"] for steps in compile_kernels.programs(launch)]
    assert modelled == [[block] for block in expected]


def test_the_cache_of_the_model_keeps_what_fits(count, monkeypatch):
    """Counts for 80 rows of 24 float32 in blocks of 16, and 128 ids, 64 per program, in tiles of 32."""
    from kernels import logprobs
    from tools import compile_kernels

    monkeypatch.setattr(logprobs, "SPLIT", 64)
    (launch,) = compile_kernels.record_launches(calls()["forward"])
    hidden, weight, once = 80 * 24 * 4, 128 * 24 * 4, 128 * 4 + 80 * 8 + 3 * 2 * 80 * 4
    assert compile_kernels.minimum_bytes(launch) == hidden + weight + once
    for at_a_time in (1, 7, 100):
        assert compile_kernels.moved_bytes(launch, at_a_time, 10**9) == hidden + weight + once
    # without a cache, the requested bytes: a single program reads nothing twice in a row
    assert compile_kernels.moved_bytes(launch, 1, 0) == compile_kernels.requested_bytes(launch)
    # five blocks of rows in groups of two: each reads all weights, biases and labels, and fits along with three tiles
    monkeypatch.setattr(logprobs, "GROUP", 32 * 24 * 4)
    (launch,) = compile_kernels.record_launches(calls()["forward"])
    moved = compile_kernels.moved_bytes(launch, 2, 2 * 16 * 96 + 3 * 32 * 96 + 1000)
    assert 0 <= moved - (hidden + 3 * weight + once) <= 2 * (128 * 4 + 80 * 8)


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "tensor_columns", "expected"),
    [
        (4, 32, 0, 0, 16),  # 64 warps
        (1, 16, 0, 0, 32),  # 32 programs
        (8, 255, 0, 0, 1),  # 256 registers for each of 256 threads: all 65,536
        (8, 128, 0, 0, 2),
        (4, 255, 100 * 1024, 0, 1),  # two would take 202 KB of 164
        (4, 64, 40 * 1024, 0, 4),  # four take 164 KB
        (4, 64, 163 * 1024, 0, 1),
        (4, 64, 164 * 1024, 0, 0),
        (4, 32, 0, 128, 4),  # 512 columns of tensor memory
    ],
)
def test_the_tightest_limit_sets_the_number_of_resident_programs(warps, registers, shared, tensor_columns, expected):
    from tools.compile_kernels import CARDS, resident_programs

    assert resident_programs(CARDS[80], warps, registers, shared, tensor_columns) == expected


def test_a_prediction_is_the_longer_of_memory_and_matmul_time():
    from tools import compile_kernels

    (launch,) = compile_kernels.record_launches(calls()["forward, bfloat16"])
    card = compile_kernels.CARDS[90]
    seconds = 2 * 80 * 128 * 24 / 989e12
    assert math.isclose(compile_kernels.predicted_seconds(launch, card, 1), seconds)
    assert math.isclose(compile_kernels.predicted_seconds(launch, card, 3350), 1e-9)
    (launch,) = compile_kernels.record_launches(calls()["gae"])
    assert math.isclose(compile_kernels.predicted_seconds(launch, card, 1), 1 / 3.35e12)
