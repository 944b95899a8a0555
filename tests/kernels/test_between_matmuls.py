"""Whole models with the Triton kernels between their matmuls; without a GPU, Triton runs in its interpreter."""

import copy

import pytest
import torch
from torch import Tensor

import kernels.activation
import kernels.attention
import kernels.norm
import kernels.rotary
import nanorlhf.layers
import nanorlhf.model
import nanorlhf.packing
import nanorlhf.reading
from nanorlhf.checkpoint import cast_linear_weights
from nanorlhf.config import GPTConfig
from nanorlhf.generate import generate
from nanorlhf.model import GPT
from nanorlhf.packing import read_packed
from nanorlhf.peft import add_adapters
from tests.helpers.pretend_gpu import PretendGPU
from tests.helpers.pretend_hopper import PretendHopper
from tests.test_model import CONFIGS, add_lora, make_model

pytest.importorskip("triton", reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD = 40
NAMES = ["gpt2", "gpt_neox", "codegen", "llama", "gemma3", "olmo2"]


@pytest.fixture
def fuse(monkeypatch):
    """Return a function that turns the kernels on or off."""

    def choose(on: bool) -> None:
        for module in (nanorlhf.layers, kernels.attention):
            monkeypatch.setattr(module, "fuses", lambda x: on)

    return choose


def hidden_and_gradient(model: GPT, mask: Tensor, last: int | None = None, autocast: bool = False) -> tuple:
    """Hidden states of real tokens, and a gradient of them: packed rows, on a GPU, have none at padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 37, mask.shape, generator=generator).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        hidden = model(ids, mask.to(DEVICE), last=last)
    hidden = hidden[mask[:, -hidden.size(1) :].to(DEVICE)]
    trained = [p for p in model.transformer.parameters() if p.requires_grad]
    gradient = torch.autograd.grad(hidden.float().square().mean(), trained)
    return hidden.detach(), torch.cat([g.flatten() for g in gradient])


def drawn(*rows: str) -> Tensor:
    return torch.tensor([[sign == "#" for sign in row] for row in rows])


LEFT = drawn("#######", "...####")


def assert_equal(fuse, model: GPT, tolerance: float, **settings) -> None:
    results = []
    for on in (False, True):
        fuse(on)
        results.append(hidden_and_gradient(model, LEFT, **settings))
    for plain, fused in zip(*results, strict=True):
        assert plain.dtype == fused.dtype and not torch.equal(plain, fused)
        assert torch.allclose(fused, plain, atol=tolerance * plain.abs().max().item())


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_gradients_equal_plain_pytorch(name, fuse) -> None:
    """The last block computes only some tokens."""
    assert_equal(fuse, make_model(CONFIGS[name]).to(DEVICE), 1e-5, last=3)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama"])
def test_under_autocast_they_are_as_close_to_float64(name, packs, fuse, monkeypatch) -> None:
    """Compared with float64, the kernels are at most twice as far off as plain PyTorch, also in packed rows."""

    def can_pack(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> bool:
        return packs and dtype == torch.bfloat16 and config.head_width % 8 == 0

    monkeypatch.setattr(nanorlhf.reading, "can_pack", can_pack)
    model = make_model(CONFIGS[name]).to(DEVICE)
    results = []
    for on in (False, True):
        fuse(on)
        results.append(hidden_and_gradient(model, LEFT, autocast=True))
    fuse(False)
    exact = hidden_and_gradient(model.double(), LEFT)
    for plain, fused, expected in zip(*results, exact, strict=True):
        assert plain.dtype == fused.dtype == torch.float32
        assert 0 < (fused - expected).norm() < 2 * (plain - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("change", ["recomputed blocks", "lora", "adapters"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_recomputation_lora_and_adapters_work_with_the_kernels(name, change, fuse) -> None:
    model = make_model(CONFIGS[name])
    if change == "recomputed blocks":
        model.transformer.checkpoint_activations = True
    elif change == "lora":
        add_lora(model)
    else:
        add_adapters(model)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if ".adapter_" in parameter_name:
                    parameter.add_(0.1)
    assert_equal(fuse, model.to(DEVICE), 1e-5)


@pytest.mark.parametrize("name", ["gpt_neox", "llama"])
def test_packed_rows_equal_padded_ones(name, fuse, monkeypatch) -> None:
    """Two rows of different length as one row, and their hidden states at real tokens."""
    model = make_model(CONFIGS[name]).to(DEVICE)
    fuse(False)
    expected, _ = hidden_and_gradient(model, LEFT)
    fuse(True)
    trunk = model.transformer
    monkeypatch.setattr(nanorlhf.packing, "attend_packed", nanorlhf.packing.attend_by_row)
    monkeypatch.setattr(nanorlhf.model, "attend_packed", nanorlhf.packing.attend_by_row)
    ids = torch.randint(2, 37, LEFT.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = LEFT.to(DEVICE)
    packed = trunk.norm(read_packed(trunk.run_blocks, model.config.windows, ids, mask, None, LEFT.size(1)))
    assert torch.allclose(packed[mask], expected, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "codegen", "llama"])
def test_sampling_with_the_kernels_gives_the_same_tokens(name, fuse) -> None:
    model = make_model(CONFIGS[name]).to(DEVICE)
    generator = torch.Generator().manual_seed(2)
    query = torch.where(LEFT, torch.randint(2, 37, LEFT.shape, generator=generator), PAD).to(DEVICE)
    uniforms = torch.rand((2, 4), generator=generator, dtype=torch.float64)
    results = []
    for on in (False, True):
        fuse(on)
        results.append(generate(model, query, query != PAD, 4, eos_id=1, pad_id=PAD, uniforms=uniforms))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "codegen", "llama", "gemma2"])
def test_replayed_steps_with_the_kernels_give_the_same_tokens(name) -> None:
    """On a simulated GPU: rotated keys, and values, are stored by the rotation, in graphs of one step too.

    Three of four rows end before the eighth token, so that they are dropped and the step is captured again.
    """
    model, T = make_model(CONFIGS[name]), 16
    generator = torch.Generator().manual_seed(2)
    mask = drawn("#######", "...####", "......#", "#######")
    query = torch.where(mask, torch.randint(2, 37, mask.shape, generator=generator), PAD)
    uniforms = torch.rand((4, T), generator=generator, dtype=torch.float64)
    settings = {"pad_id": PAD, "uniforms": uniforms}
    whole, _ = generate(model, query, mask, T, **settings)
    stop_ids = [next(i for i in ids[:8] if i not in whole[3]) for ids in whole[:3].tolist()]
    expected = generate(model, query, mask, T, stop_ids=stop_ids, **settings)
    with PretendHopper(fuses=True) as gpu:
        on_gpu = query.to(gpu.device), mask.to(gpu.device)
        got = generate(gpu.move(copy.deepcopy(model)), *on_gpu, T, stop_ids=stop_ids, **settings)
        got = [x.cpu() for x in got]
    assert torch.equal(got[0], expected[0]) and torch.allclose(got[1], expected[1], atol=1e-4)
    # a step that warms up and a captured one, twice
    assert [graph.num_replays for graph in gpu.graphs] == [6, 7]
    is_rotary = model.config.positions != "learned"
    assert gpu.launches.count("rotary_store_triton") == 4 * model.config.n_layer * is_rotary
    assert gpu.launches.count("rotary_triton_") == model.config.n_layer * is_rotary  # of the queries


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama"])
def test_frozen_models_and_passes_without_a_gradient_have_the_same_bits(name, fuse) -> None:
    """PPO's first ratio is 1, and the KL to a reference with bfloat16 weights starts at 0."""
    fuse(True)
    model = make_model(CONFIGS[name]).to(DEVICE)
    if DEVICE == "cpu":  # the interpreter rounds to bfloat16 towards 0
        with torch.no_grad():
            for bias in (p for p in model.parameters() if p.ndim == 1):
                bias.copy_(bias.bfloat16())
    trained, _ = hidden_and_gradient(model, LEFT, autocast=True)
    ids = torch.randint(2, 37, LEFT.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = LEFT.to(DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        assert torch.equal(model(ids, mask)[mask], trained)
        cast_linear_weights(model, torch.bfloat16)
        assert torch.equal(model(ids, mask)[mask], trained)


@torch.no_grad()
def test_launches_can_be_captured_in_a_cuda_graph(monkeypatch) -> None:
    """Around a launch, which this test skips, nothing waits for the GPU or copies from the host."""
    with PretendGPU() as gpu:
        x, residual, weight = (torch.ones(size, device=gpu.device) for size in ((2, 1, 12), (2, 1, 12), (12,)))
        qkv, table = torch.ones(2, 1, 5, 8, device=gpu.device), torch.ones(2, 1, 1, 3, device=gpu.device)
        cache, at = torch.ones(2, 1, 4, 8, device=gpu.device), torch.ones(1, dtype=torch.long, device=gpu.device)
        started: list[str] = []
        for module, name in (
            (kernels.norm, "add_norm"), (kernels.rotary, "rotary"), (kernels.rotary, "rotary_store"),
            (kernels.activation, "activated"), (kernels.activation, "gated"),
        ):  # fmt: skip
            kernel = getattr(module, f"{name}_kernel")
            monkeypatch.setattr(kernel, "run", lambda *arguments, name=name, **settings: started.append(name))
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            kernels.norm.add_norm(x, residual, weight, weight, 1e-5, "layer", torch.float32)
            kernels.rotary.rotary_triton_(qkv, table, table, 3, False)
            kernels.rotary.rotary_store_triton(qkv, table, table, 3, False, cache, cache, at)
            kernels.activation.activated(x, weight, "gelu")
            kernels.activation.gated(x, residual, "silu")
    assert started == ["add_norm", "rotary", "rotary_store", "activated", "gated"] and gpu.waits == []


def launched(model: GPT, monkeypatch) -> list[str]:
    """Run the model forward and backward and return the names of the functions that start kernels."""
    names: list[str] = []

    def recording(module, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments: names.append(name) or function(*arguments))

    for module, name in STARTERS:
        recording(module, name)
    hidden_and_gradient(model, LEFT)
    return names


STARTERS = [
    (kernels.norm, "add_norm_triton"), (kernels.norm, "add_norm_backward_triton"),
    (kernels.attention, "rotary_triton_"), (kernels.activation, "activated_triton"),
    (kernels.activation, "activated_backward_triton"), (kernels.activation, "gated_triton"),
    (kernels.activation, "gated_backward_triton"),
]  # fmt: skip
NORM = {"add_norm_triton": 6, "add_norm_backward_triton": 6}
EXPECTED = {  # in a model of three blocks
    "gpt2": NORM | {"activated_triton": 3, "activated_backward_triton": 3},
    # its blocks add attention and MLP at once: no norm follows an addition
    "gpt_neox": NORM | {"rotary_triton_": 6, "activated_triton": 3, "activated_backward_triton": 3},
    "llama": NORM | {"rotary_triton_": 6, "gated_triton": 3, "gated_backward_triton": 3},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_which_kernels_a_model_runs(name, fuse, monkeypatch) -> None:
    fuse(True)
    names = launched(make_model(CONFIGS[name]).to(DEVICE), monkeypatch)
    assert {each: names.count(each) for each in names} == EXPECTED[name]


def test_on_a_cpu_and_in_compiled_blocks_no_kernel_runs(monkeypatch) -> None:
    x = torch.zeros(1)
    assert not kernels.norm.fuses(x)

    class OnGPU:
        is_cuda, dtype = True, torch.bfloat16

    assert kernels.norm.fuses(OnGPU())
    monkeypatch.setattr(OnGPU, "dtype", torch.float64)
    assert not kernels.norm.fuses(OnGPU())
    monkeypatch.setattr(OnGPU, "dtype", torch.float32)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernels.norm.fuses(OnGPU())
