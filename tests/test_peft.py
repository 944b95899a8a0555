"""Parameter-efficient fine-tuning: it trains the right parameters, changes nothing else, and saves checkpoints."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import train_dpo
import train_ppo
import train_rm
import train_sft
from nanorlhf.checkpoint import load_gpt, load_scalar, save, scalar_from_gpt
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.model import GPT
from nanorlhf.peft import LoRALinear, merge, reference, tune
from nanorlhf.pretrained.adapters import save_updates
from tests.conftest import interrupt_at, read_metrics

WAYS = ("full", "adapter", "bitfit", "lora")
SHAPE = {"vocab_size": 41, "n_ctx": 24, "d_model": 24, "n_layer": 2, "n_head": 4, "d_mlp": 40}
LEARNED = {"positions": "learned", "parallel_residual": False, "activation": "gelu_new", "tied_head": True}
FAMILIES = {
    "gpt2": GPTConfig(**SHAPE, **LEARNED, architecture="gpt2"),
    "gpt_neo": GPTConfig(
        **SHAPE, **LEARNED, scale_attention=False, qkv_bias=False, attention_windows=(3, None), architecture="gpt_neo"
    ),
    "gpt_neox": GPTConfig(**SHAPE, rotary_dim=4),
    "codegen": GPTConfig(
        **SHAPE, positions="rotary_interleaved", rotary_dim=4, shared_norm=True, head_bias=True, qkv_bias=False,
        attention_out_bias=False, activation="gelu_new", architecture="codegen",
    ),
    "qwen2": GPTConfig(
        **SHAPE, n_kv_head=2, rotary_dim=6, parallel_residual=False, norm="rms", gated_mlp=True, activation="silu",
        attention_out_bias=False, mlp_bias=False, architecture="qwen2",
    ),
    "gemma2": GPTConfig(
        **SHAPE, n_kv_head=2, rotary_dim=6, parallel_residual=False, norm="rms_offset", post_norm=True, gated_mlp=True,
        activation="gelu_new", attention_out_bias=True, mlp_bias=False, embedding_scale=24**0.5, attention_divisor=9,
        attention_cap=2.0, logit_cap=3.0, attention_windows=(5, None), tied_head=True, architecture="gemma2",
    ),
}  # fmt: skip
PHI3 = GPTConfig(  # q, k and v are one tensor in the files, gate and up another; no biases
    **SHAPE, n_kv_head=2, rotary_dim=6, parallel_residual=False, norm="rms", gated_mlp=True, activation="silu",
    qkv_bias=False, attention_out_bias=False, mlp_bias=False, architecture="phi3",
)  # fmt: skip
FOR_PEFT = FAMILIES | {
    "phi3": PHI3,
    "gptj": replace(FAMILIES["codegen"], architecture="gptj"),
    "olmo2": replace(
        PHI3, pre_norm=False, post_norm=True, qk_norm=True, qk_norm_joint=True, architecture="olmo2"
    ),
    "gemma3_text": replace(
        FAMILIES["gemma2"], attention_cap=None, qk_norm=True, local_rotary_base=50.0, architecture="gemma3_text"
    ),
}  # fmt: skip
GPT2_124M = GPTConfig(
    vocab_size=50257, n_ctx=1024, d_model=768, n_layer=12, n_head=12, d_mlp=3072, **LEARNED, architecture="gpt2"
)
IDS = torch.randint(41, (3, 13), generator=torch.Generator().manual_seed(1))
MASK = torch.arange(13) >= 4 * torch.arange(3)[:, None]  # left-padded by 0, 4 and 8

every_family = pytest.mark.parametrize("family", FAMILIES)
every_way = pytest.mark.parametrize("how", WAYS)


def perturb(model: GPT, only_trained: bool = False) -> GPT:
    """Perturb the initial weights, so that a wrong order or a missing term changes the output."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad or not only_trained:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def random_gpt(config: GPTConfig) -> GPT:
    torch.manual_seed(0)
    return perturb(GPT(config))


def tuned_gpt(config: GPTConfig, how: str) -> GPT:
    """Make a tuned model with perturbed added weights."""
    model = random_gpt(config)
    tune(model, how)
    return perturb(model, only_trained=True)


def logits(model: GPT) -> torch.Tensor:
    return model.logits(model(IDS, MASK))[MASK]


def loss(model: GPT) -> torch.Tensor:
    return F.cross_entropy(logits(model), IDS.flip(1)[MASK])


def trained_names(model: GPT) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


# ------------------------------------------------------------------------------------------------ trainable parameters
@pytest.mark.parametrize(
    ("how", "num_trained"),
    [
        ("full", 124_439_808),
        ("bitfit", 12 * (2304 + 768 + 3072 + 768 + 2 * 768) + 768),  # qkv, out, up, down, two norms; the last norm
        ("lora", 12 * 2 * 2 * 8 * 768),  # layers, q and v, down and up
        ("adapter", 12 * 2 * (2 * 84 * 768 + 84 + 768)),  # layers, attention and MLP, matrices and biases
    ],
)
def test_gpt2_trains_as_many_parameters_as_counted_by_hand(how, num_trained):
    with torch.device("meta"):
        model = GPT(GPT2_124M)
    tune(model, how)
    assert sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) == num_trained
    if how == "adapter":
        assert 0.02 < num_trained / 124_439_808 < 0.03  # the paper's fraction


@every_family
@every_way
def test_only_trained_parameters_get_a_gradient(family, how):
    model = tuned_gpt(FAMILIES[family], how)
    loss(model).backward()
    nonzero = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    block = r"transformer\.blocks\.[01]\."
    pattern = {
        "full": ".*",
        "adapter": block + r"(attention\.out|mlp\.down)\.adapter_(down|up)(_bias)?",
        "bitfit": rf"({block}(norm1|norm2|attention\.qkv|attention\.out|mlp\.up|mlp\.down)|transformer\.norm)\.bias",
        "lora": block + r"attention\.qkv\.(downs|ups)\.[01]",
    }[how]
    expected = {name for name, _ in model.named_parameters() if re.fullmatch(pattern, name)}
    assert expected and nonzero == expected == trained_names(model)


@every_family
def test_bitfits_gradient_equals_that_of_full_fine_tuning(family):
    full, bitfit = random_gpt(FAMILIES[family]), random_gpt(FAMILIES[family])
    tune(bitfit, "bitfit")
    for model in (full, bitfit):
        loss(model).backward()
    for (name, parameter), other in zip(full.named_parameters(), bitfit.parameters(), strict=True):
        if other.requires_grad:
            assert torch.allclose(parameter.grad, other.grad, atol=1e-7), name


@every_family
def test_loras_gradient_is_the_chain_rule_on_the_merged_weight(family):
    """W = W_0 + 2 up down, so dL/d up = 2 dL/dW down^T and dL/d down = 2 up^T dL/dW."""
    model = tuned_gpt(FAMILIES[family], "lora")
    plain = merge(model)
    plain.requires_grad_(True)
    for each in (model, plain):
        loss(each).backward()
    for layer, merged in zip(model.transformer.blocks, plain.transformer.blocks, strict=True):
        lora = layer.attention.qkv
        q, _, v = merged.attention.qkv.weight.grad.split(FAMILIES[family].qkv_rows)
        for up, down, grad in zip(lora.ups, lora.downs, (q, v), strict=True):
            assert torch.allclose(up.grad, 2 * grad @ down.T, atol=1e-5)
            assert torch.allclose(down.grad, 2 * up.T @ grad, atol=1e-5)


@every_way
def test_checkpointed_activations_give_the_same_gradients(how):
    gradients = []
    for checkpoint_activations in (False, True):
        model = tuned_gpt(FAMILIES["gpt_neox"], how)
        model.transformer.checkpoint_activations = checkpoint_activations
        loss(model).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(*gradients) and gradients[0].abs().max() > 1e-3


@every_way
def test_steps_change_no_bit_of_frozen_parameters(how):
    model = random_gpt(FAMILIES["gpt2"])
    tune(model, how)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(loss(model))
        losses[-1].backward()
        optimizer.step()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == trained_names(model) and losses[-1] < losses[0]


# -------------------------------------------------------------------------------------------------------------- outputs
@every_family
@every_way
def test_tuning_an_untrained_model_does_not_change_its_outputs(family, how):
    base, model = random_gpt(FAMILIES[family]), random_gpt(FAMILIES[family])
    tune(model, how)
    # with gradients enabled, a frozen layer may use a matmul that rounds differently
    assert (logits(base) - logits(model)).abs().max() < 1e-6
    with torch.no_grad():
        assert torch.equal(logits(base), logits(model))


def test_no_random_number_is_drawn_for_full_and_bitfit():
    """--tune full then gives the same digits as a script without the flag."""
    model = random_gpt(FAMILIES["gpt2"])
    state = torch.get_rng_state()
    for how in ("full", "bitfit"):
        tune(model, how)
        assert torch.equal(torch.get_rng_state(), state)


@every_family
def test_lora_changes_q_and_v_and_leaves_k(family):
    config = FAMILIES[family]
    base, model = random_gpt(config), tuned_gpt(config, "lora")
    q_rows, kv_rows = (heads * config.head_width for heads in (config.n_head, config.kv_heads))
    q, k, v = slice(0, q_rows), slice(q_rows, q_rows + kv_rows), slice(q_rows + kv_rows, None)
    for layer, tuned in zip(base.transformer.blocks, model.transformer.blocks, strict=True):
        weight, lora = layer.attention.qkv.weight.double(), tuned.attention.qkv
        assert torch.equal(lora.weight, layer.attention.qkv.weight)
        merged = lora.merged().weight
        assert torch.equal(merged[k], layer.attention.qkv.weight[k])
        for rows, up, down in zip((q, v), lora.ups, lora.downs, strict=True):
            expected = weight[rows] + 16 / 8 * up.double() @ down.double()
            assert (merged[rows] - expected).abs().max() < 1e-6 and (merged[rows] - weight[rows]).abs().max() > 0.1


@every_family
def test_a_merged_model_computes_the_same_and_the_tuned_one_is_unchanged(family):
    model = tuned_gpt(FAMILIES[family], "lora")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = merge(model)
    assert (logits(model) - logits(plain)).abs().max() < 1e-5
    assert plain.state_dict().keys() == random_gpt(FAMILIES[family]).state_dict().keys()
    assert isinstance(model.transformer.blocks[0].attention.qkv, LoRALinear)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert plain.transformer.embedding.weight is model.transformer.embedding.weight  # shared, not copied
    assert (plain.lm_head.weight is plain.transformer.embedding.weight) == FAMILIES[family].tied_head


@every_family
def test_every_linear_layer_can_be_updated(family):
    config = FAMILIES[family]
    targets = ("q", "k", "v", "out", "up", "down") + (("gate",) if config.gated_mlp else ())
    base, model = random_gpt(config), random_gpt(config)
    tune(model, "lora", rank=3, targets=targets)
    assert (logits(base) - logits(model)).abs().max() < 1e-6
    perturb(model, only_trained=True)
    plain = merge(model)
    assert (logits(model) - logits(plain)).abs().max() < 2e-5
    weights = dict(base.named_parameters())
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, weights[name]) == (re.search(r"(qkv|out|up|down|gate)\.weight$", name) is None), name
    change = plain.transformer.blocks[1].mlp.down.weight - weights["transformer.blocks.1.mlp.down.weight"]
    assert torch.linalg.matrix_rank(change, rtol=1e-4) == 3


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (("gate",), "--lora-targets gate: a gpt2 model has no such layer"),
        (("down",), "the checkpoint has adapters there"),
    ],
)
def test_updates_of_missing_layers_are_rejected(targets, sentence):
    model = tuned_gpt(FAMILIES["gpt2"], "adapter" if targets == ("down",) else "full")
    with pytest.raises(InputError, match=sentence):
        tune(model, "lora", targets=targets)


@every_family
def test_the_reference_is_the_policy_without_its_updates_on_the_same_weights(family):
    base, policy = random_gpt(FAMILIES[family]), random_gpt(FAMILIES[family])
    tune(policy, "lora")
    ref_policy = reference(policy.forbid(40, 41))
    perturb(policy, only_trained=True)
    assert torch.equal(ref_policy.forbidden, policy.forbidden)
    with torch.no_grad():
        ref_policy.forbidden = None
        assert torch.equal(logits(ref_policy), logits(base)) and not torch.allclose(logits(policy), logits(base))
    policy_weights = {weight.data_ptr() for weight in policy.parameters()}
    assert all(weight.data_ptr() in policy_weights and not weight.requires_grad for weight in ref_policy.parameters())


def test_the_reference_of_a_fully_trained_policy_is_a_frozen_copy():
    policy = random_gpt(FAMILIES["gpt2"])
    ref_policy = reference(policy)
    for weight, other in zip(policy.parameters(), ref_policy.parameters(), strict=True):
        assert torch.equal(weight, other) and weight.data_ptr() != other.data_ptr() and not other.requires_grad


def test_policy_and_value_model_share_a_trunk_and_train_separately():
    policy = random_gpt(FAMILIES["qwen2"])
    value_model = scalar_from_gpt(policy, share_trunk=True)
    for model in (policy, value_model):
        tune(model, "lora")
    values, before = value_model(IDS, MASK), logits(policy)
    perturb(policy, only_trained=True)
    assert torch.equal(value_model(IDS, MASK), values)  # the policy's update doesn't change the value model
    now = logits(policy)
    perturb(value_model, only_trained=True)
    assert torch.equal(logits(policy), now) and not torch.equal(now, before)
    policy_weights = {weight.data_ptr() for weight in policy.parameters()}
    apart = {name for name, weight in value_model.named_parameters() if weight.data_ptr() not in policy_weights}
    assert apart == trained_names(value_model) >= {"score.weight", "score.bias"}


def test_lora_multiplies_no_frozen_weight_in_the_backward_pass(monkeypatch):
    """A layer needs only two of its three matmuls, y = W x, dL/dx and dL/dW: the last is skipped."""
    monkeypatch.setattr("kernels.linear.onednn_matmul", lambda: None)  # the counter doesn't see oneDNN's matmuls
    flops = {}
    for how in ("full", "lora"):
        model = random_gpt(replace(FAMILIES["qwen2"], d_model=96, d_mlp=256, rotary_dim=24))
        tune(model, how)
        hidden = model(IDS, MASK).sum()
        with FlopCounterMode(display=False) as counter:
            hidden.backward()
        flops[how] = counter.get_total_flops()
    assert flops["lora"] < 0.7 * flops["full"]


def test_an_adapter_is_a_residual_bottleneck():
    layer = tuned_gpt(FAMILIES["gpt_neox"], "adapter").transformer.blocks[1].mlp.down.double()
    x = torch.randn(5, 40, dtype=torch.float64)
    y = x @ layer.weight.T + layer.bias
    h = y @ layer.adapter_down.T + layer.adapter_down_bias
    h = h * 0.5 * (1 + torch.erf(h / 2**0.5))
    assert torch.allclose(layer(x), y + h @ layer.adapter_up.T + layer.adapter_up_bias)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "gpt_neox"])
def test_adapters_come_after_each_branch_and_before_the_sum(family):
    """An adapter that only adds a constant equals a bias on its branch, in sequential and in parallel blocks."""
    base, model = random_gpt(FAMILIES[family]), random_gpt(FAMILIES[family])
    tune(model, "adapter")
    with torch.no_grad():
        for layer, adapted in zip(base.transformer.blocks, model.transformer.blocks, strict=True):
            for ours, its in ((layer.attention.out, adapted.attention.out), (layer.mlp.down, adapted.mlp.down)):
                constant = torch.randn(24)
                ours.bias += constant
                its.adapter_up_bias += constant
    assert (logits(base) - logits(model)).abs().max() < 1e-5


@every_family
@pytest.mark.parametrize("how", ["adapter", "lora"])
def test_cached_decoding_equals_the_full_forward_pass(family, how):
    model = tuned_gpt(FAMILIES[family], how)
    response, logprobs = generate(model, IDS, MASK, 8, temperature=0.0, eos_id=None, pad_id=99)
    ids, mask = IDS, MASK
    for t in range(8):
        with torch.no_grad():
            table = model.logits(model(ids, mask)[:, -1]).log_softmax(-1)
        assert torch.equal(table.argmax(-1), response[:, t])
        assert torch.allclose(table.max(-1).values, logprobs[:, t], atol=1e-5)
        ids = torch.cat((ids, response[:, t : t + 1]), dim=1)
        mask = F.pad(mask, (0, 1), value=True)


# ---------------------------------------------------------------------------------------------------- saved checkpoints
@every_family
@pytest.mark.parametrize("how", ["bitfit", "lora"])
def test_transformers_reads_a_checkpoint_of_bitfit_and_lora(family, how, tmp_path):
    model = tuned_gpt(FAMILIES[family], how)
    save(merge(model), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        positions = (MASK.long().cumsum(1) - 1).clamp(min=0)
        expected = theirs(IDS, attention_mask=MASK.long(), position_ids=positions).logits[MASK]
    assert (expected - logits(model)).abs().max() < 1e-4
    assert (logits(load_gpt(tmp_path)) - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, targets) for family in FOR_PEFT for targets in (("q", "v"), ("k", "out", "up", "down"))),
        *(("phi3", targets) for targets in (("q", "up"), ("gate", "down"), ("up", "gate", "k"))),
    ],
)
def test_the_library_peft_reads_the_updates(family, targets, tmp_path):
    model = random_gpt(FOR_PEFT[family])
    save(model, tmp_path / "base")
    tune(model, "lora", rank=3, targets=targets)
    save_updates(perturb(model, only_trained=True), tmp_path / "adapter", str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        positions = (MASK.long().cumsum(1) - 1).clamp(min=0)
        expected = theirs(input_ids=IDS, attention_mask=MASK.long(), position_ids=positions).logits[MASK]
    assert (expected - logits(model)).abs().max() < 1e-4
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        tmp_path / "base"
    )


@pytest.mark.parametrize("family", ["gpt_neo", "qwen2", "gemma2"])
def test_gradients_of_updates_equal_the_peft_librarys(family, tmp_path):
    """Tested on families that store q and v separately, where each of our updates is one of peft's."""
    model = random_gpt(FAMILIES[family])
    save(model, tmp_path / "base")
    tune(model, "lora", rank=3)
    save_updates(perturb(model, only_trained=True), tmp_path / "adapter", str(tmp_path / "base"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    theirs = PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True).eval()
    F.cross_entropy(theirs(input_ids=IDS).logits.flatten(0, 1), IDS.flip(1).flatten()).backward()
    F.cross_entropy(model.logits(model(IDS)).flatten(0, 1), IDS.flip(1).flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for i, block in enumerate(model.transformer.blocks):
        lora = block.attention.qkv
        for module, down, up in zip(("q_proj", "v_proj"), lora.downs, lora.ups, strict=True):
            for letter, ours in (("A", down), ("B", up)):
                [name] = [name for name in gradients if f".{i}." in name and f"{module}.lora_{letter}." in name]
                gradient = gradients.pop(name)
                assert (gradient - ours.grad).abs().max() < 1e-4 * gradient.abs().max(), name
    assert not gradients


@every_family
def test_a_checkpoint_keeps_its_adapters_and_transformers_refuses_it(family, tmp_path):
    model = tuned_gpt(FAMILIES[family], "adapter")
    save(merge(model), tmp_path)
    again = load_gpt(tmp_path)
    assert again.config == model.config != FAMILIES[family] and again.config.adapter_size > 0
    for (name, tensor), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    with torch.no_grad():
        assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match=f"`{family}_adapter`"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    reward_model = scalar_from_gpt(again)
    save(reward_model, tmp_path / "rm")
    assert torch.equal(load_scalar(tmp_path / "rm")(IDS, MASK), reward_model(IDS, MASK))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"adapter_size": None}, "adapter_size must be an integer"),
        ({"adapter_size": 7}, r"adapter_down has shape \(\d+, 24\), but .* requires \(7, 24\)"),
        ({"model_type": "gpt2"}, "has unexpected tensors .*: transformer.h.0.attn.c_proj.adapter_down and 15 more"),
        ({"model_type": "mixtral_adapter"}, "model_type 'mixtral_adapter' isn't one of"),
    ],
)
def test_a_config_that_does_not_match_its_adapters_is_one_sentence(tmp_path, change, sentence):
    save(tuned_gpt(FAMILIES["gpt2"], "adapter"), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=sentence):
        load_gpt(tmp_path)


def test_adapters_of_a_checkpoint_are_trained_further_without_adding_more(tmp_path):
    save(tuned_gpt(FAMILIES["gpt2"], "adapter"), tmp_path)
    model = load_gpt(tmp_path)
    before = logits(model)
    tune(model, "adapter")
    assert torch.equal(logits(model), before) and len(trained_names(model)) == 2 * 2 * 4
    tune(model, "lora")  # another method keeps them, frozen
    assert torch.equal(logits(model), before) and len(trained_names(model)) == 2 * 4


def test_an_unknown_method_is_refused():
    with pytest.raises(InputError, match="--tune prefix: must be full, adapter, bitfit or lora"):
        tune(random_gpt(FAMILIES["gpt2"]), "prefix")


# ----------------------------------------------------------------------------------------------------------- the script
@every_way
def test_the_loss_goes_down_and_the_checkpoint_loads(miniature, tmp_path, capsys, how):
    args = replace(
        miniature.sft, model=str(miniature.root / "sft"), out=tmp_path / "sft", tune=how, num_epochs=4, lr=1e-2
    )
    summary = train_sft.main(args)
    base, model = load_gpt(args.model), load_gpt(args.out)
    assert loss_on(miniature, "train", model) < loss_on(miniature, "train", base) - 0.04  # embeddings aren't trained
    assert loss_on(miniature, "validation", model) == pytest.approx(summary["validation_loss"], abs=1e-4)
    changed = {
        name for name, parameter in base.named_parameters() if not torch.equal(parameter, model.get_parameter(name))
    }
    everything = {name for name, _ in base.named_parameters()}
    assert (
        changed
        == {
            "full": everything,
            "adapter": set(),
            "bitfit": {name for name in everything if name.endswith(".bias")},
            "lora": {"transformer.blocks.0.attention.qkv.weight"},
        }[how]
    )
    names = [load_file(directory / "model.safetensors").keys() for directory in (miniature.root / "sft", args.out)]
    assert (names[0] == names[1]) == (how != "adapter")
    printed = re.search(r"SFT: ([\d,]+) parameters, ([\d,]+) of them trained", capsys.readouterr().out)
    assert (printed[1] == printed[2]) == (how == "full")


def loss_on(miniature, split, model):
    """Return the loss in nats per token."""
    tokenizer = train_sft.load_tokenizer(miniature.root / "data")
    rows = train_sft.load_demonstrations(miniature.root / "data" / f"sft.{split}.jsonl", tokenizer, None, None)
    model.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    with torch.no_grad():
        total = train_sft.demonstration_loss(model, rows, tokenizer.pad_id, "response")
    return total.item() / train_sft.num_labels(rows, "response")


@pytest.mark.parametrize("how", ["adapter", "lora"])
@pytest.mark.slow
def test_resuming_equals_the_uninterrupted_run(miniature, tmp_path, monkeypatch, how):
    args = replace(miniature.sft, model=str(miniature.root / "sft"), tune=how, save_every=2, lr=1e-2)
    uninterrupted, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    train_sft.main(uninterrupted)
    interrupt_at(6, monkeypatch, train_sft, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_sft.main(broken)
    with pytest.raises(InputError, match="was started with --tune"):
        train_sft.main(replace(broken, resume=True, tune="full"))
    train_sft.main(replace(broken, resume=True))
    for a, b in zip(load_gpt(uninterrupted.out).parameters(), load_gpt(broken.out).parameters(), strict=True):
        assert torch.equal(a, b)
    assert read_metrics(uninterrupted.out) == read_metrics(broken.out)


# ------------------------------------------------------------------------------ LoRA in reward models, DPO and PPO
def test_lora_trains_a_reward_models_updates_and_head(miniature, tmp_path):
    args = replace(miniature.rm, out=tmp_path / "rm", tune="lora", num_epochs=2, lr=1e-2)
    summary = train_rm.main(args)
    base, model, best = load_gpt(args.sft), load_scalar(args.out), load_scalar(args.out / "best")
    for name, weight in base.transformer.named_parameters():
        assert torch.equal(weight, model.transformer.get_parameter(name)) == (not name.endswith("qkv.weight")), name
    losses = [row["loss"] for row in read_metrics(args.out) if "loss" in row]
    assert losses[-1] < losses[0] - 0.01 and summary["validation_loss"] < losses[0]
    assert model.reward_bias != 0 and best.reward_bias != 0 and not (args.out / "adapter").exists()


def test_dpo_with_lora_uses_the_policy_without_updates_as_reference(miniature, tmp_path):
    args = replace(miniature.dpo, out=tmp_path / "dpo", tune="lora", beta=1.0, num_epochs=2, lr=1e-2)
    train_dpo.main(args)
    rows = [row for row in read_metrics(args.out) if "loss" in row]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[0]["chosen_reward"] == 0
    assert min(row["loss"] for row in rows) < rows[0]["loss"] - 0.05
    assert (args.out / "adapter" / "adapter_model.safetensors").exists()
    train_dpo.main(replace(args, tune="full", num_epochs=0.2, overwrite=True))
    assert not (args.out / "adapter").exists()


@pytest.mark.parametrize("value_start", [None, "shared"])
def test_ppo_with_lora_starts_at_the_reference_and_changes_only_updates(miniature, tmp_path, value_start):
    args = replace(miniature.ppo, out=tmp_path / "ppo", tune="lora", value_model=value_start, lr=1e-2)
    train_ppo.main(args)
    rows = read_metrics(args.out)
    assert rows[0]["policy/first_ratio_error"] < 1e-5 and abs(rows[0]["objective/kl_exact"]) < 1e-6
    assert rows[-1]["objective/kl_exact"] > 1e-3  # the reference didn't change with the policy
    base, policy, value_model = load_gpt(args.sft), load_gpt(args.out), load_scalar(args.out / "value_model")
    initial_value_model = base if value_start else load_scalar(args.reward_model)
    for before, after in ((base, policy), (initial_value_model, value_model)):
        for name, weight in before.transformer.named_parameters():
            assert torch.equal(weight, after.transformer.get_parameter(name)) == (not name.endswith("qkv.weight")), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(args.sft)
    theirs = PeftModel.from_pretrained(theirs, args.out / "adapter").merge_and_unload()
    for (name, weight), ours in zip(
        theirs.state_dict().items(),
        transformers.AutoModelForCausalLM.from_pretrained(args.out).state_dict().values(),
        strict=True,
    ):
        assert torch.allclose(weight, ours, atol=1e-6), name


def test_resuming_ppo_with_lora_on_a_shared_trunk_equals_the_uninterrupted_run(miniature, tmp_path, monkeypatch):
    args = replace(miniature.ppo, tune="lora", value_model="shared", save_every=1, lr=1e-2)
    uninterrupted, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    train_ppo.main(uninterrupted)
    interrupt_at(2, monkeypatch, train_ppo, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(broken)
    train_ppo.main(replace(broken, resume=True))
    for directory, load in (("", load_gpt), ("value_model", load_scalar)):
        ours, theirs = (load(out / directory).state_dict() for out in (uninterrupted.out, broken.out))
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("change", [{}, {"tune": "lora", "shard": "fsdp"}])
def test_a_trunk_that_cannot_be_shared_is_rejected(miniature, tmp_path, change):
    with pytest.raises(InputError, match="--value-model shared uses the policy's frozen weights"):
        train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", value_model="shared", **change))
    assert not (tmp_path / "ppo").exists()
