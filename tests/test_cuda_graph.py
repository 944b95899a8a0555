"""Decode steps as CUDA graphs, on a real GPU and on a simulated one that rejects what a real GPU rejects."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels.linear
import nanorlhf.generate
from nanorlhf.cache import KVCache
from nanorlhf.generate import for_sampling, generate
from nanorlhf.model import GPT
from nanorlhf.padding import left_pad
from nanorlhf.peft import tune
from nanorlhf.t5 import T5Config
from tests.conftest import GPU, TINY
from tests.helpers.pretend_gpu import PretendGPU
from tests.test_generate import EOS, PAD, QUERIES, rows_that_end_early


class RealGPU:
    """A real GPU with the interface of `PretendGPU`."""

    device = torch.device("cuda")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def move(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.to(self.device)


@pytest.fixture(params=["pretended", GPU])
def gpu(request):
    return PretendGPU() if request.param == "pretended" else RealGPU()


# ------------------------------------------------------------------------------------------------ 1. the simulated GPU
def long(gpu: PretendGPU, size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.long, device=gpu.device)


REFUSED = {  # x is (3, 4)
    "item": lambda x, gpu: x.sum().item(),
    "bool": lambda x, gpu: bool((x > 0).any()),
    "int": lambda x, gpu: int(x.sum()),
    "if": lambda x, gpu: 1 if x.isnan().any() else 0,
    "a slice up to a number": lambda x, gpu: x[: (x[0] > 0).sum()],
    "a tensor filled with a number": lambda x, gpu: torch.full((3,), x.sum(), device=gpu.device),
    "tolist": lambda x, gpu: x.tolist(),
    "cpu": lambda x, gpu: x.cpu(),
    "to the host": lambda x, gpu: x.to("cpu", torch.float64),
    "equal": lambda x, gpu: torch.equal(x, x),
    "allclose": lambda x, gpu: torch.allclose(x, x),
    "multinomial": lambda x, gpu: x.softmax(1).multinomial(1),
    "one_hot": lambda x, gpu: torch.nn.functional.one_hot(x.long().abs()),
    "torch.tensor": lambda x, gpu: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=gpu.device),
    "a number as a tensor": lambda x, gpu: torch.where(x > 0, torch.tensor(1.0, device=gpu.device), x),
    "from_numpy": lambda x, gpu: x + torch.from_numpy(np.ones(4, np.float32)).to(gpu.device),
    "zeros of the host": lambda x, gpu: x + torch.zeros(4).to(gpu.device),
    "copy_": lambda x, gpu: x.copy_(torch.zeros(3, 4)),
    "a number at indices": lambda x, gpu: x.__setitem__((long(gpu, 1), long(gpu, 1)), 1.0),
    "a number at one place": lambda x, gpu: x.__setitem__((0, 0), 1.0),
    "indices in a list": lambda x, gpu: x[[0, 2]],
    "indices of the host": lambda x, gpu: x[torch.tensor([0, 2])],
    "rows by a mask": lambda x, gpu: x[x[:, 0] > 0],
    "numbers at a mask": lambda x, gpu: x.__setitem__(x > 0, x[0, 0]),
    "nonzero": lambda x, gpu: x.nonzero(),
    "where": lambda x, gpu: torch.where(x > 0),
    "masked_select": lambda x, gpu: x.masked_select(x > 0),
    "unique": lambda x, gpu: x.unique(),
    "bincount": lambda x, gpu: x[0].abs().long().bincount(),
    "repeat_interleave by a tensor": lambda x, gpu: x.repeat_interleave(long(gpu, 3) + 1, dim=0),
}
ALLOWED = {
    "zeros": lambda x, gpu: x + torch.zeros(4, device=gpu.device),
    "arange": lambda x, gpu: x + torch.arange(4, device=gpu.device),
    "full": lambda x, gpu: x + torch.full((4,), 2.0, device=gpu.device),
    "rand": lambda x, gpu: x + torch.rand(4, device=gpu.device),
    "where with a number": lambda x, gpu: torch.where(x > 0, x, 0.0),
    "a number of the host times": lambda x, gpu: x * torch.tensor(2.0),
    "masked_fill": lambda x, gpu: x.masked_fill(x > 0, -torch.inf),
    "a number at a mask": lambda x, gpu: x.__setitem__(x > 0, 0.0),
    "a number at a slice": lambda x, gpu: x.__setitem__((slice(None), 0), 1.0),
    "a tensor at indices": lambda x, gpu: x.__setitem__((long(gpu, 3), long(gpu, 3)), x[:, 1] + 1),
    "rows by indices": lambda x, gpu: x[long(gpu, 2)],
    "index_copy_": lambda x, gpu: x.index_copy_(0, long(gpu, 1), x[1:2] + 1),
    "scatter": lambda x, gpu: x.scatter(1, x.long().clamp(0, 3), x),
    "sort, topk, cumsum": lambda x, gpu: torch.searchsorted(x.sort().values.cumsum(1), x.topk(2).values),
    "repeat_interleave by a number": lambda x, gpu: x.repeat_interleave(2, dim=0),
    "another dtype": lambda x, gpu: x.to(gpu.device, torch.float64),
    "what the host knows": lambda x, gpu: x * float(torch.tensor([1.0, 2.0]).sum()) + len(x),
}


def captured(gpu, step, inference: bool) -> None:
    with gpu, torch.inference_mode(inference):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).to(gpu.device)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(x, gpu)


@pytest.mark.parametrize("inference", [True, False], ids=["inference mode", "else"])
@pytest.mark.parametrize("step", REFUSED.values(), ids=REFUSED)
def test_synchronisation_and_host_copies_cannot_be_captured(step, inference):
    with pytest.raises(RuntimeError, match="not permitted while a stream is captured"):
        captured(PretendGPU(), step, inference)


@pytest.mark.parametrize("step", ALLOWED.values(), ids=ALLOWED)
def test_operations_without_the_host_can_be_captured(step, gpu):
    captured(gpu, step, True)


def test_host_and_gpu_tensors_do_not_mix():
    with pytest.raises(RuntimeError, match="on the same device"), PretendGPU() as gpu:
        torch.zeros(4, device=gpu.device) + torch.zeros(4)


def test_a_replay_repeats_memory_operations_but_not_python():
    """A Python counter keeps its value from the capture, and host computations aren't repeated."""
    with PretendGPU() as gpu:
        total, count, of_host = torch.zeros(1, device=gpu.device), [1], torch.ones(())

        def step():
            total.add_(count[0])
            count[0] += 1
            of_host.add_(1)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        assert total.tolist() == [0] and count == [2] and of_host == 2
        graph.replay()
        graph.replay()
        assert total.tolist() == [2] and of_host == 2
        assert gpu.waits == ["a copy to the host"] * 2 and gpu.graphs == [graph]


# ------------------------------------------------------------------------------------------------------- 2. generation
LLAMA = {"norm": "rms", "gated_mlp": True, "activation": "silu", "n_kv_head": 2, "mlp_bias": False, "qkv_bias": False}
GEMMA = {**LLAMA, "norm": "rms_offset", "post_norm": True, "d_head": 6, "embedding_scale": 32**0.5, "tied_head": True}
SHAPES = {
    "gpt2": {"positions": "learned", "rotary_dim": 0, "tied_head": True, "parallel_residual": False},
    "codegen": {"positions": "rotary_interleaved", "shared_norm": True, "head_bias": True, "activation": "gelu_new"},
    "gpt-neo": {"attention_windows": (None, 3), "scale_attention": False},
    "mistral": {**LLAMA, "attention_windows": (4, 4)},
    "qwen3": {**LLAMA, "qk_norm": True},
    "olmo2": {**LLAMA, "qk_norm": True, "qk_norm_joint": True, "pre_norm": False, "post_norm": True},
    "gemma2": {
        **GEMMA, "attention_windows": (4, None), "attention_divisor": 7, "attention_cap": 2.0, "logit_cap": 3.0,
    },
    "gemma3": {**GEMMA, "attention_windows": (4, None), "local_rotary_base": 100.0, "qk_norm": True},
    "adapters": {"adapter_size": 3},
}  # fmt: skip
T5 = T5Config(
    vocab_size=37, d_model=32, n_layer=2, n_head=4, d_head=10, d_mlp=40, query_start_id=1, query_end_id=2,
    head_scale=32**-0.5, tied_head=True,
)  # fmt: skip
ALL_FILTERS = {"top_k": 20, "top_p": 0.8, "filtered_logprobs": True}
SETTINGS = {
    "temperature": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "top-p 0": {"top_p": 0.0},
    "greedy, top-p": {"temperature": 0.0, "top_p": 0.9, "filtered_logprobs": True},
    "filtered log-probabilities": {"top_p": 0.7, "filtered_logprobs": True},
    "all": ALL_FILTERS,
    "low temperature": {"temperature": 1e-6, **ALL_FILTERS},
}
NGRAMS = {"n-grams": {"no_repeat_ngram_size": 2}, "n-grams, all": {"no_repeat_ngram_size": 1, **ALL_FILTERS}}


def random_gpt(config) -> GPT:
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval().forbid(3, 36)


def sampled(gpu, model: GPT, dtype: str = "same", autocast: bool = False, **settings) -> tuple[Tensor, Tensor]:
    """Generate responses of 9 tokens on the GPU; None: on the CPU."""
    query = left_pad(QUERIES, PAD)
    uniforms = torch.rand(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    settings = {"temperature": 0.8, **settings}
    if gpu is None:
        return generate(model, query, query != PAD, 9, uniforms=uniforms, **settings)
    with gpu, torch.autocast(gpu.device.type, torch.bfloat16, enabled=autocast):
        sampler = for_sampling(gpu.move(copy.deepcopy(model)), dtype)
        query = query.to(gpu.device)
        response, logprobs = generate(sampler, query, query != PAD, 9, uniforms=uniforms, **settings)
        return response.cpu(), logprobs.cpu()


def check(gpu, model: GPT, num_captures: int = 1, **settings) -> None:
    """Check that replayed steps write the same as single steps on a CPU."""
    response, logprobs = sampled(gpu, model, **settings)
    expected, expected_logprobs = sampled(None, model, **settings)
    assert torch.equal(response, expected)
    assert torch.allclose(logprobs, expected_logprobs, rtol=1e-4, atol=1e-4)
    if isinstance(gpu, PretendGPU):
        assert [graph.num_replays for graph in gpu.graphs] == [7] * num_captures
        # queries, uniforms and stop ids; equal queries; whether they are left-padded or all real, and log-probabilities
        # finite; both results
        assert len(gpu.waits) <= 9


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_replayed_steps_sample_like_a_cpu(gpu, settings):
    check(gpu, random_gpt(TINY), **settings)


@pytest.mark.parametrize("settings", NGRAMS.values(), ids=NGRAMS)
def test_steps_with_an_ngram_ban_are_not_captured_and_sample_the_same(gpu, settings):
    check(gpu, random_gpt(TINY), num_captures=0, **settings)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_replayed_steps_of_each_family_sample_like_a_cpu(gpu, changes):
    check(gpu, random_gpt(replace(TINY, **changes)), **ALL_FILTERS)


def test_replayed_steps_of_an_encoder_decoder_sample_like_a_cpu(gpu):
    check(gpu, random_gpt(T5), **ALL_FILTERS)


def with_updates() -> GPT:
    model = random_gpt(TINY)
    tune(model, "lora", rank=2, targets=("q", "v", "down"))
    for name, parameter in model.named_parameters():
        if ".ups." in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_replayed_steps_with_low_rank_updates_sample_like_a_cpu(gpu):
    check(gpu, with_updates(), **ALL_FILTERS)


@pytest.mark.parametrize(
    ("make", "dtype"), [(with_updates, "same"), (with_updates, "bfloat16"), (lambda: random_gpt(T5), "same")]
)
def test_replayed_steps_under_autocast_equal_single_steps_to_the_last_bit(gpu, monkeypatch, make, dtype):
    """`bfloat16` merges LoRA's updates; `same` doesn't."""
    replayed = sampled(gpu, make(), dtype, autocast=True, **ALL_FILTERS)
    monkeypatch.setattr(nanorlhf.generate, "CAPTURE_PAYS", 9)
    again = type(gpu)()
    assert all(map(torch.equal, replayed, sampled(again, make(), dtype, autocast=True, **ALL_FILTERS)))
    if isinstance(gpu, PretendGPU):
        assert len(gpu.graphs) == 1 and not again.graphs


def test_ended_rows_are_dropped_and_the_step_is_captured_again(gpu, tiny_gpt):
    """Three in four rows have ended after 8 tokens; dropping them synchronises once, to find which.

    The other wait is for the queries' groups, before the first step.
    """
    rows, uniforms = rows_that_end_early(tiny_gpt)
    query = left_pad(rows, PAD)
    settings = {"temperature": 0.8, "eos_id": EOS, "pad_id": PAD, "uniforms": uniforms[:, :24]}
    expected = generate(tiny_gpt, query, query != PAD, 24, **settings)
    ended = (expected[0] == EOS).int().argmax(1)
    assert ((expected[0] == EOS).any(1) & (ended < 8)).sum() >= 18 and not (expected[0] == EOS).any(1).all()
    with gpu:
        query = query.to(gpu.device)
        response, logprobs = generate(gpu.move(copy.deepcopy(tiny_gpt)), query, query != PAD, 24, **settings)
        response, logprobs = response.cpu(), logprobs.cpu()
    assert torch.equal(response, expected[0]) and torch.allclose(logprobs, expected[1], atol=1e-4)
    if isinstance(gpu, PretendGPU):
        assert [graph.num_replays for graph in gpu.graphs] == [6, 15]
        waits = [wait for wait in gpu.waits if "shape" in wait]
        assert waits == ["aten::nonzero has a shape that depends on numbers"] * 2


@pytest.mark.parametrize(("T", "num_captures"), [(7, 0), (8, 1), (16, 1)])
def test_a_step_is_only_captured_if_enough_steps_remain(tiny_gpt, T, num_captures):
    """No row ends. The first of T tokens comes from the prefill, and the second warms up before a capture."""
    with PretendGPU() as gpu:
        query = torch.full((2, 3), 5, device=gpu.device)
        generate(gpu.move(tiny_gpt), query, query == 5, T)
    assert [graph.num_replays for graph in gpu.graphs] == num_captures * [T - 2]


# --------------------------------------------------------------------------------- 3. faults that a capture must detect
def top_p_that_writes_at_indices(logits: Tensor, p: float) -> Tensor:
    ordered, order = logits.sort(descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = (before >= p).scatter(1, order, before >= p)
    dropped[torch.arange(len(logits), device=logits.device), order[:, 0]] = False
    return logits.masked_fill(dropped, -torch.inf)


def top_k_that_waits(logits: Tensor, k: int) -> Tensor:
    threshold = logits.topk(k).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf) if (logits < threshold).any() else logits


def draw_by_a_table_of_the_host(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    uniforms = torch.minimum(uniforms, torch.tensor([1 - 2**-53], dtype=torch.float64, device=uniforms.device))
    return nanorlhf_draw(probabilities, uniforms)


def draw_by_a_mask(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    token = nanorlhf_draw(probabilities, uniforms)
    bad = ~(probabilities.gather(1, token) > 0).flatten()
    token[bad] = probabilities[bad].argmax(-1, keepdim=True)
    return token


def column_by_a_tensor_of_the_host(self) -> Tensor:
    self.bias.index_fill_(3, torch.tensor([self.length]), 0.0)
    return next_token(self)


nanorlhf_draw, next_token = nanorlhf.generate.draw, KVCache.next_token
FAULTS = {
    "keep_top_p": (nanorlhf.generate, top_p_that_writes_at_indices),
    "keep_top_k": (nanorlhf.generate, top_k_that_waits),
    "draw": (nanorlhf.generate, draw_by_a_table_of_the_host),
    "draw by a mask": (nanorlhf.generate, draw_by_a_mask),
    "next_token": (KVCache, column_by_a_tensor_of_the_host),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_step_that_a_gpu_could_not_capture_is_detected(monkeypatch, name):
    owner, fault = FAULTS[name]
    monkeypatch.setattr(owner, name.split()[0], fault)
    with pytest.raises(RuntimeError, match="not permitted while a stream is captured|on the same device"):
        sampled(PretendGPU(), random_gpt(TINY), **ALL_FILTERS)
    sampled(None, random_gpt(TINY), **ALL_FILTERS)  # a CPU accepts it


def test_a_step_that_reads_a_python_number_is_detected(monkeypatch):
    """It can be captured, but its replay is wrong."""

    def step_that_counts(self):
        self.at.fill_(self.length)
        return next_token(self)

    monkeypatch.setattr(KVCache, "next_token", step_that_counts)
    with pytest.raises(AssertionError):
        check(PretendGPU(), random_gpt(TINY))


def test_cpu_only_weights_are_not_made_for_a_gpu(monkeypatch):
    """A packed weight would stay on the host; a run on a GPU rejects int8 before it starts."""
    monkeypatch.setattr(kernels.linear, "MANY_WEIGHTS", 1)
    with PretendGPU() as gpu:
        model = gpu.move(random_gpt(TINY))
        assert for_sampling(model, "same") is model
