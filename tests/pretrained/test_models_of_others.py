"""Models saved by other programs: transformers' classifiers, TRL's value heads, peft's adapters, other layouts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from nanorlhf.checkpoint import has_value_head, is_reward_model, load_gpt, load_scalar, read_config, save
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.errors import InputError
from nanorlhf.reward_model import before_skipped, pair_scores, response_scores
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from nanorlhf.training.loading import new_value_model
from tests.test_checkpoint import FAMILIES, VOCAB, change_config, change_tensors, transformers_model

CPU = torch.device("cpu")
PAD, EOS = VOCAB, 7  # our [PAD] is outside the embedding
CLASSIFIERS = sorted(FAMILIES.keys() - {"codegen"})  # transformers has no classifier for CodeGen
TEXTS = [Demonstration([1, 2, 3], [4, 5, 6, EOS], {}), Demonstration([8, 9], [10, 11, EOS], {}),
         Demonstration([12], [EOS], {}), Demonstration([13, 14, 15, 16], [17] * 7 + [EOS], {})]  # fmt: skip


def perturbed(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def classifier(family: str, kind: str = "Sequence", **changes) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = FAMILIES[family](**{"num_labels": 1, "pad_token_id": 0} | changes)
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    return perturbed(auto.from_config(config, attn_implementation="eager"))


@torch.no_grad()
def their_scores(theirs: transformers.PreTrainedModel, rows: list[Demonstration], pad_id: int) -> torch.Tensor:
    """Score right-padded texts; transformers chooses the token whose score counts."""
    texts = [row.query + row.response for row in rows]
    ids = torch.tensor([text + [pad_id] * (12 - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (12 - len(text)) for text in texts])
    return theirs(ids, attention_mask=mask).logits.squeeze(-1)


# ----------------------------------------------------------------------------------------- transformers' classifiers
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", CLASSIFIERS)
@torch.no_grad()
def test_a_classifier_of_one_label_scores_as_in_transformers(family, side, tmp_path) -> None:
    theirs = classifier(family)
    theirs.save_pretrained(tmp_path)
    assert is_reward_model(tmp_path)
    ours = response_scores(load_scalar(tmp_path), TEXTS, PAD, side)
    assert (ours - their_scores(theirs, TEXTS, 0)).abs().max() < 1e-5


@pytest.mark.parametrize("side", ["left", "right", "pair"])
@torch.no_grad()
def test_a_model_trained_with_eos_as_padding_scores_the_token_before_eos(side, tmp_path) -> None:
    theirs = classifier("llama", pad_token_id=EOS)
    theirs.save_pretrained(tmp_path)
    ours = load_scalar(tmp_path)
    assert ours.skipped_id == EOS
    if side == "pair":
        rows = [Comparison([1, 2, 3], [4, EOS], [5, 6, EOS], {}), Comparison([8], [9, 9, EOS], [EOS], {})]
        scores = torch.cat(pair_scores(ours, rows, PAD))
        rows = [Demonstration(row.query, row.chosen, {}) for row in rows] + [
            Demonstration(row.query, row.rejected, {}) for row in rows
        ]
    else:
        rows, scores = TEXTS, response_scores(ours, TEXTS, PAD, side)
    assert (scores - their_scores(theirs, rows, EOS)).abs().max() < 1e-5


def test_skipped_ids_in_the_middle_and_after_the_end_do_not_count() -> None:
    ids = torch.tensor([[7, 1, 7, 2, 7, 7, 3], [7, 7, 7, 7, 7, 7, 7]])
    assert before_skipped(ids, torch.tensor([5, 5]), 7).tolist() == [3, 0]


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
@torch.no_grad()
def test_a_token_classifier_of_one_label_has_its_value_at_each_token(family, tmp_path) -> None:
    """Other programs save value models this way. The head has a bias, and is called score or classifier."""
    theirs = classifier(family, "Token")
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    ours = load_scalar(tmp_path)
    assert ours.skipped_id is None and ours.score.bias.item() != 0
    assert (ours(ids) - theirs(ids).logits.squeeze(-1)).abs().max() < 1e-5


@pytest.mark.parametrize(("labels", "kind"), [(2, "Sequence"), (3, "Sequence"), (5, "Token")])
def test_several_labels_are_refused_by_their_number(labels, kind, tmp_path) -> None:
    classifier("llama", kind, num_labels=labels).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"Llama.*Classification with {labels} labels; a reward model must have 1"):
        load_scalar(tmp_path)


def test_classifiers_and_policies_are_not_confused(tmp_path) -> None:
    classifier("gpt2").save_pretrained(tmp_path / "rm")
    transformers_model("llama", {}).save_pretrained(tmp_path / "policy")
    with pytest.raises(InputError, match="is a reward or value model, not a language model"):
        load_gpt(tmp_path / "rm")
    with pytest.raises(InputError, match="is a language model, not a reward model"):
        load_scalar(tmp_path / "policy")
    change_config(tmp_path / "policy", architectures=["LlamaForRewardModelWithGating"])
    with pytest.raises(InputError, match="unsupported head for LlamaForRewardModelWithGating; supported heads: score"):
        load_scalar(tmp_path / "policy")


def test_a_value_model_starts_from_a_classifier_and_is_saved_as_ours(tmp_path) -> None:
    classifier("qwen2").save_pretrained(tmp_path / "rm")
    transformers_model("qwen2", {}).save_pretrained(tmp_path / "policy")
    policy, reward_model = load_gpt(tmp_path / "policy"), load_scalar(tmp_path / "rm")
    value_model = new_value_model(str(tmp_path / "rm"), policy, CPU)
    assert torch.equal(value_model.score.weight, reward_model.score.weight)
    save(value_model, tmp_path / "saved")
    ids = torch.arange(9)[None]
    assert torch.equal(load_scalar(tmp_path / "saved")(ids), reward_model(ids))


# ------------------------------------------------------------------------------------------ value heads and wrappers
def test_trls_value_head_is_a_value_model_and_its_policy_a_policy(tmp_path, capsys) -> None:
    transformers_model("llama", {}).save_pretrained(tmp_path)
    capsys.readouterr()
    plain = load_gpt(tmp_path)
    assert not has_value_head(tmp_path) and capsys.readouterr().err == ""
    head = {"v_head.summary.weight": torch.randn(1, 24), "v_head.summary.bias": torch.tensor([0.3])}
    change_tensors(tmp_path, lambda tensors: tensors.update(head))
    ids = torch.arange(9)[None]
    expected = plain(ids) @ head["v_head.summary.weight"][0] + 0.3
    for value_model in (load_scalar(tmp_path), new_value_model(str(tmp_path), plain, CPU)):
        assert (value_model(ids) - expected).abs().max() < 1e-5
    assert torch.equal(load_gpt(tmp_path)(ids), plain(ids))
    assert "ignoring the policy's value head v_head.summary" in capsys.readouterr().err


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "base_model.model.", "inner"])
def test_the_names_of_wrappers_are_removed(prefix, tmp_path) -> None:
    theirs = transformers_model("llama", {})
    theirs.save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "wrapped")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    names = {
        name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp._orig_mod.")
        if prefix == "inner"
        else prefix + name
        for name in tensors
    }
    wrapped = {names[name]: tensor for name, tensor in tensors.items()}
    save_file(wrapped, tmp_path / "wrapped" / "model.safetensors", metadata={"format": "pt"})
    plain = load_gpt(tmp_path / "plain").state_dict()
    assert all(torch.equal(plain[name], tensor) for name, tensor in load_gpt(tmp_path / "wrapped").state_dict().items())
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(wrapped | copies, tmp_path / "wrapped" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="under two names"):
        load_gpt(tmp_path / "wrapped")


def test_a_trained_copy_of_the_head_replaces_the_original(tmp_path) -> None:
    classifier("llama").save_pretrained(tmp_path)
    expected = load_scalar(tmp_path).score.weight

    def wrap(tensors: dict) -> None:
        tensors["score.modules_to_save.default.weight"] = tensors.pop("score.weight")
        tensors["score.original_module.weight"] = torch.zeros(1, 24)

    change_tensors(tmp_path, wrap)
    assert torch.equal(load_scalar(tmp_path).score.weight, expected)


# ---------------------------------------------------------------------------------------------------- peft's adapters
ALL = {"gpt2": ["c_attn", "c_proj", "c_fc"], "gpt_neox": ["query_key_value", "dense_4h_to_h"],
       "phi3": ["qkv_proj", "gate_up_proj"], "llama": ["q_proj", "o_proj", "down_proj"]}  # fmt: skip


def adapter(family: str, root: Path, theirs: transformers.PreTrainedModel | None = None, **settings) -> torch.nn.Module:
    """Save a model in root/base and a random LoRA of it in root/adapter; return peft's model."""
    theirs = transformers_model(family, {}) if theirs is None else theirs
    theirs.save_pretrained(root / "base")
    config = LoraConfig(r=3, lora_alpha=7, target_modules=ALL[family], **settings)
    theirs.name_or_path = str(root / "base")
    model = get_peft_model(theirs, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(root / "adapter")
    return model.eval()


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        *((family, {"task_type": "CAUSAL_LM"}) for family in ALL),
        ("llama", {"use_rslora": True}),
        ("llama", {"rank_pattern": {"o_proj": 5}, "alpha_pattern": {r".*layers\.1\..*q_proj": 3, "down_proj": 11}}),
        ("gpt_neox", {"bias": "all"}),
    ],
)
@torch.no_grad()
def test_an_adapter_is_merged_as_peft_does(family, settings, tmp_path, capsys) -> None:
    theirs = adapter(family, tmp_path, **settings)
    ids = torch.arange(9)[None]
    ours = load_gpt(tmp_path / "adapter")
    assert (ours.logits(ours(ids)) - theirs(input_ids=ids).logits).abs().max() < 1e-4
    assert f"is a PEFT adapter: merging it into its base model {tmp_path / 'base'}" in capsys.readouterr().err
    assert read_config(tmp_path / "adapter") == read_config(tmp_path / "base")


@torch.no_grad()
def test_an_adapter_of_a_classifier_on_a_policy_is_a_reward_model(tmp_path) -> None:
    """TRL trains the head in full and saves it with the updates; its base on disk is a language model."""
    policy, scorer = transformers_model("llama", {}), classifier("llama")
    scorer.model.load_state_dict(policy.model.state_dict())
    theirs = adapter("llama", tmp_path, scorer, task_type="SEQ_CLS", modules_to_save=["score"])
    policy.save_pretrained(tmp_path / "base")
    assert is_reward_model(tmp_path / "adapter")
    with pytest.raises(InputError, match="is a reward or value model"):
        load_gpt(tmp_path / "adapter")
    ours = response_scores(load_scalar(tmp_path / "adapter"), TEXTS, PAD, "right")
    assert (ours - their_scores(theirs, TEXTS, 0)).abs().max() < 1e-4


def test_updates_beside_the_weights_are_refused(tmp_path) -> None:
    """A state dict of peft's model, saved as if it were the plain model's."""
    theirs = adapter("llama", tmp_path)
    tensors = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(tensors, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="has updates that are not merged, .*lora_A.* and 17 more: merge it with"):
        load_gpt(tmp_path / "base")


def test_an_adapter_has_the_tokenizer_of_its_base(tmp_path) -> None:
    adapter("llama", tmp_path)
    tokenizer = train_tokenizer(["the cat sat"], 300)
    tokenizer.save(tmp_path / "base")
    assert load_tokenizer(tmp_path / "adapter").fingerprint == tokenizer.fingerprint


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"base_model_name_or_path": "/nowhere/base"}, "base model /nowhere/base can't be read .*: correct base_model"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path must name the adapter's base model, got None"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' isn't implemented, only LoRA: merge it with peft's merge_and_unload"),
        ({"use_dora": True}, "DoRA isn't implemented"),
        ({"lora_alpha": "7"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(": 2}}, "the keys of alpha_pattern must be regular expressions"),
    ],
)
def test_an_adapter_that_cannot_be_merged_is_one_sentence(changes, sentence, tmp_path) -> None:
    adapter("llama", tmp_path)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=sentence) as error:
        load_gpt(tmp_path / "adapter")
    assert str(tmp_path / "adapter") in str(error.value) and "\n" not in str(error.value)


def test_an_update_of_another_shape_or_layer_is_refused(tmp_path) -> None:
    adapter("llama", tmp_path)
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    save_file(tensors | {name: torch.zeros(5, 3)}, file)
    with pytest.raises(InputError, match=r"layers.1.self_attn.q_proj.weight: expected .*, got \(5, 3\) x \(3, 24\)"):
        load_gpt(tmp_path / "adapter")
    save_file({key.replace("layers.1", "layers.8"): tensor for key, tensor in tensors.items()}, file)
    with pytest.raises(InputError, match="layers.8.* doesn't match a layer of the base model"):
        load_gpt(tmp_path / "adapter")
    file.unlink()
    with pytest.raises(InputError, match="has no adapter_model.safetensors or adapter_model.bin"):
        load_gpt(tmp_path / "adapter")


# ------------------------------------------------------------------------------------------------- other directories
@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("checkpoint-500/config.json", "it contains 1 checkpoints: pass one of them, such as .*checkpoint-500"),
        ("model.gguf", "it contains GGUF files: convert one with `python -m nanorlhf.pretrained.gguf FILE --out DIR`"),
        ("model-00001-of-00002.safetensors", "shards without their index: download model.safetensors.index.json"),
        ("zero_to_fp32.py", "a DeepSpeed checkpoint: convert it with its zero_to_fp32.py"),
        ("global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt", "a DeepSpeed checkpoint"),
        (
            "pytorch_model_fsdp_0/__0_0.distcp",
            "an FSDP checkpoint in shards: convert it with `accelerate merge-weights`",
        ),
        ("onnx/model.onnx", "an export for inference"),
        ("weights.npz", "MLX weights"),
        ("consolidated.00.pth", "weights in the authors' layout"),
        ("tf_model.h5", "TensorFlow or Flax weights"),
        ("last.ckpt", "a training program's own checkpoint"),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_a_directory_in_another_layout_is_named(file, sentence, has_config, tmp_path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    if has_config:
        transformers_model("llama", {}).config.save_pretrained(tmp_path)
    loaders = (load_gpt, load_scalar, load_tokenizer)
    for load in loaders:
        with pytest.raises(InputError, match=sentence) as error:
            load(tmp_path)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_of_several_checkpoints_the_last_is_suggested(tmp_path) -> None:
    for step in (500, 1000, 90):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").touch()
    with pytest.raises(InputError, match="it contains 3 checkpoints: pass one of them, such as .*checkpoint-1000"):
        load_gpt(tmp_path)


@pytest.mark.parametrize(
    "quantised",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization": {"group_size": 64, "bits": 4}},
    ],
)
def test_quantised_weights_are_refused_with_their_kind(quantised, tmp_path) -> None:
    transformers_model("llama", {}).save_pretrained(tmp_path)
    change_config(tmp_path, **quantised)
    [name] = quantised
    with pytest.raises(InputError, match=f"the weights are quantised \\({name} .*: pass the checkpoint"):
        load_gpt(tmp_path)
