"""RLCF's discriminator: antisymmetric, independent of padding and batch, grounded in the compiler, saved and loaded."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors, trainers

import train_rlcf
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.model import Transformer
from nanorlhf.rlcf import train_discriminator
from nanorlhf.rlcf.discriminator import (
    Discriminator,
    discriminator_from_encoder,
    grounding,
    load_discriminator,
    save_discriminator,
    triplet_loss,
)
from nanorlhf.tokenizer import train_tokenizer
from tests.conftest import read_metrics, weights

TEXTS = ["def solve(prices, limit):\n", "    total = 0\n    return total\n", "    return sum(prices)\n", "größer 😀\n"]
QUERIES = ["# the sum of the prices\ndef solve(prices):\n", "# 😀\n", ""]
FIRST = ["    return sum(prices)\n", "    return 0\n", "    total = 0\n    return total * 3 + 1 if total else total\n"]
SECOND = ["    return prices\n", "    return sum(prices) * 2\n", "größer\n"]


def our_own(seed=0, **config):
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(TEXTS * 20, 300)
    shape = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_mlp": 32, "rotary_dim": 4, "causal": False} | config
    model = Discriminator(
        Transformer(GPTConfig(vocab_size=tokenizer.vocab_size, n_ctx=64, **shape)), tokenizer, max_length=64
    )
    with torch.no_grad():  # away from uniform attention, where a wrong mask would hardly show
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """A directory of a random RoBERTa of 32 tokens, as transformers writes it: the family of CodeBERT."""
    import transformers

    directory = tmp_path_factory.mktemp("roberta")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(TEXTS * 20, trainer)
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", cls_token="<s>", pad_token="<pad>", eos_token="</s>",
        sep_token="</s>", unk_token="<unk>", mask_token="<mask>", model_max_length=32,
    )  # fmt: skip
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=34, pad_token_id=1, bos_token_id=0, eos_token_id=2, type_vocab_size=1,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(directory)
    return directory


@pytest.fixture(params=["ours", "roberta"])
def model(request):
    if request.param == "ours":
        return our_own()
    torch.manual_seed(1)
    model = discriminator_from_encoder(request.getfixturevalue("roberta"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


# ------------------------------------------------------------------------------------------------------------ 1. D
@torch.no_grad()
def test_the_order_of_the_two_programs_only_changes_the_sign(model):
    there, back = model.compare(QUERIES, FIRST, SECOND), model.compare(QUERIES, SECOND, FIRST)
    # the position in the batch may change the rounding
    assert torch.allclose(there, -back, atol=1e-6) and there.abs().min() > 1e-3 and there.abs().max() < 1
    assert torch.allclose(model.compare(QUERIES, FIRST, FIRST), torch.zeros(3), atol=1e-6)


def test_with_the_same_m_the_order_changes_only_the_sign_bit_for_bit():
    model, numbers = our_own(), dict(zip(FIRST + SECOND, torch.randn(6).tolist(), strict=True))
    model.forward = lambda queries, responses: torch.tensor([numbers[response] for response in responses])
    there, back = model.compare(QUERIES, FIRST, SECOND), model.compare(QUERIES, SECOND, FIRST)
    assert torch.equal(there, -back) and there.all()
    assert torch.equal(model.compare(QUERIES, FIRST, FIRST), torch.zeros(3))


@torch.no_grad()
def test_d_is_tanh_of_the_difference_of_one_number_per_text(model):
    m = [model([q], [r]).item() for q, r in zip(QUERIES * 2, FIRST + SECOND, strict=True)]
    expected = [math.tanh(a - b) for a, b in zip(m[:3], m[3:], strict=True)]
    assert model.compare(QUERIES, FIRST, SECOND).tolist() == pytest.approx(expected, abs=1e-5)


def test_d_has_the_gradient_of_the_tanh_of_the_difference():
    model = our_own()
    scores = model(QUERIES * 2, FIRST + SECOND)
    gradients = [
        torch.autograd.grad(x.sum(), list(model.parameters()), allow_unused=True, materialize_grads=True)
        for x in (model.compare(QUERIES, FIRST, SECOND), torch.tanh(scores[:3] - scores[3:]))
    ]
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*gradients, strict=True))


@torch.no_grad()
def test_neither_the_batch_nor_padding_changes_a_number(model):
    together = model(QUERIES * 2, FIRST + SECOND)
    assert len({len(model.ids(q, r)) for q, r in zip(QUERIES * 2, FIRST + SECOND, strict=True)}) > 3  # there is padding
    for i, (query, response) in enumerate(zip(QUERIES * 2, FIRST + SECOND, strict=True)):
        assert model([query], [response]).item() == pytest.approx(together[i].item(), abs=1e-5)
        assert model(["", query], ["a" * 25, response])[1].item() == pytest.approx(together[i].item(), abs=1e-5)


@torch.no_grad()
def test_our_embedding_is_the_mean_over_tokens_and_a_pretrained_one_is_the_first_token(roberta):
    ours = our_own()
    hidden = ours.encoder(torch.tensor([ours.ids(QUERIES[0], FIRST[0])]))[0]  # (L, C)
    assert torch.allclose(ours.embed(QUERIES[:1], FIRST[:1])[0], hidden.mean(0), atol=1e-5)
    other = discriminator_from_encoder(roberta)
    row = torch.tensor([other.ids(QUERIES[0], FIRST[0])])
    assert torch.allclose(other.embed(QUERIES[:1], FIRST[:1])[0], other.encoder(row).last_hidden_state[0, 0], atol=1e-5)


@torch.no_grad()
def test_the_difference_of_two_numbers_is_not_rounded_to_bf16():
    """Under autocast m is a number like 3.14159: in bf16 it would be 3.140625 or 3.15625, and D a multiple of 1/64."""
    model = our_own()
    model.mlp[2].bias.fill_(100.0)  # cancels in the difference; in bf16 it would absorb it
    with torch.autocast("cpu", torch.bfloat16):
        scores, comparison = model(QUERIES, FIRST), model.compare(QUERIES, FIRST, SECOND)
    assert scores.dtype == torch.float32
    assert comparison.tolist() == pytest.approx(model.compare(QUERIES, FIRST, SECOND).tolist(), abs=0.05)


# ------------------------------------------------------------------------------------------------------- 2. its input
def test_a_long_row_loses_the_start_of_its_prompt():
    model = our_own()
    model.encode = lambda text: [ord(c) for c in text]
    e = model.tokenizer.eos_id
    model.max_length = 8  # six of them for the texts

    def ids(query, response):
        first, *row, last = model.ids(query, response)
        assert first == last == e
        return "".join(map(chr, row))

    assert ids("abc", "xyz") == "abcxyz"
    assert ids("abcd", "xyz") == "bcdxyz"
    assert ids("abcd", "vwxyz") == "dvwxyz"
    assert ids("abcd", "uvwxyz") == "uvwxyz"
    assert ids("abcd", "uvwxyz!") == "uvwxyz"  # a response that is too long loses its end
    assert ids("", "") == "" and ids("abcdefgh", "") == "cdefgh"


def test_special_tokens_are_those_of_the_pretrained_tokenizer(roberta):
    model = discriminator_from_encoder(roberta)
    assert model.max_length == 32 and model.pad_id == 1
    assert model.ids("", "return 0") == model.tokenizer("return 0")["input_ids"]
    long = "x = 1\n" * 40
    assert len(model.ids(long, "return 0")) == 32
    assert model.ids(long, "return 0")[-1 - len(model.encode("return 0")) : -1] == model.encode("return 0")


@torch.no_grad()
def test_earlier_tokens_attend_to_later_ones_unless_the_trunk_is_causal():
    ids = torch.tensor([our_own().ids(QUERIES[0], FIRST[0])])
    other = ids.clone()
    other[0, -2] += 1
    for causal in (False, True):
        encoder = our_own(causal=causal).encoder
        assert torch.equal(encoder(ids)[0, :5], encoder(other)[0, :5]) == causal


def test_gradients_reach_every_weight_of_trunk_and_head(model):
    model.compare(QUERIES, FIRST, SECOND).sum().backward()
    # the last bias cancels in a difference; RoBERTa's pooler after [CLS] is not used
    idle = {n for n, p in model.named_parameters() if (p.grad is None or not p.grad.any())}
    assert idle <= {"mlp.2.bias", "encoder.pooler.dense.weight", "encoder.pooler.dense.bias"} | {
        # a key's bias adds the same to all logits of a query: no softmax sees it
        name
        for name, _ in model.named_parameters()
        if name.endswith("key.bias")
    }


# --------------------------------------------------------------------------------------------------------- 3. grounding
def test_the_compiler_decides_where_the_programs_differ_and_the_discriminator_where_both_pass():
    first = torch.tensor([True, True, False, False])
    second = torch.tensor([True, False, True, False])
    comparison = torch.tensor([-0.25, 0.5, 0.5, 0.5])
    assert grounding(first, second, comparison).tolist() == [-0.25, 1.0, -1.0, 0.0]
    assert (grounding(second, first, -comparison) == -grounding(first, second, comparison)).all()


def test_the_discriminator_is_ignored_for_a_program_that_fails():
    passes = torch.tensor([True, False])
    comparison = torch.tensor([0.5, torch.nan], requires_grad=True)
    scores = grounding(passes, torch.ones_like(passes), comparison)
    assert scores.tolist() == [0.5, -1.0]
    scores.sum().backward()
    assert comparison.grad.tolist() == [1.0, 0.0]


# ---------------------------------------------------------------------------------------------------------- 4. triplets
def triplets_by_hand(anchors, positives, problems, margin):
    """A double loop in float64: the loss, and the number of rows ordered right."""
    programs = [*zip(anchors.double(), problems, strict=True), *zip(positives.double(), problems, strict=True)]
    total, num_right = 0 * (anchors.double().sum() + positives.double().sum()), 0
    for anchor, positive, problem in zip(anchors.double(), positives.double(), problems, strict=True):
        negatives = [((anchor - program) ** 2).sum() for program, other in programs if other != problem]
        if negatives:
            near, far = ((anchor - positive) ** 2).sum(), min(negatives)
            total = total + max(near - far + margin, near * 0)
            num_right += bool(near < far)
    return total, num_right


@pytest.mark.parametrize(
    ("problems", "margin"),
    [
        ([0, 1, 2, 3, 4], 0.5),
        ([0, 1, 1, 2, 0], 0.5),
        ([3, 3, 3, 3, 7], 2.0),
        ([3, 3, 3, 3, 3], 0.5),  # only one problem, so no negative
        ([0, 1, 2, 3, 4], 0.0),
    ],
)
def test_the_triplet_loss_is_that_of_a_double_loop_in_value_and_gradient(problems, margin):
    torch.manual_seed(0)
    anchors = torch.randn(5, 3, requires_grad=True)
    positives = (anchors.detach() + 0.8 * torch.randn(5, 3)).requires_grad_()
    loss, num_right = triplet_loss(anchors, positives, torch.tensor(problems), margin)
    expected, expected_right = triplets_by_hand(anchors, positives, problems, margin)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and num_right.item() == expected_right
    for leaf in (anchors, positives):
        ours, its = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (loss, expected))
        assert torch.allclose(ours, its, atol=1e-5)
    if len(set(problems)) == 1:
        assert loss.item() == 0 and expected_right == 0
    else:
        assert 0 < expected_right < 5 and loss.item() > 0


def test_distances_of_many_near_programs_far_from_zero_are_exact():
    """More than 25 rows, where cdist would multiply matrices: in float32, |a|^2 + |b|^2 - 2ab loses a distance of 1e-2
    with vectors of length 1e3."""
    torch.manual_seed(0)
    anchors = 1000 + 0.01 * torch.randn(30, 3)
    positives = anchors + 0.01 * torch.randn(30, 3)
    loss, num_right = triplet_loss(anchors, positives, torch.arange(30), 0.0)
    expected, expected_right = triplets_by_hand(anchors, positives, list(range(30)), 0.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3) and num_right.item() == expected_right


def test_a_tie_of_positive_and_negative_counts_as_wrong():
    anchors, positives = torch.tensor([[0.0], [-1.0]]), torch.tensor([[1.0], [-1.0]])
    loss, num_right = triplet_loss(anchors, positives, torch.tensor([0, 1]), 0.5)
    assert loss.item() == 0.5 and num_right.item() == 1  # row 0: 1 - 1 + 0.5; row 1: 0 - 1 + 0.5


def test_a_row_without_a_negative_adds_nothing():
    anchors, positives = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]])
    loss, num_right = triplet_loss(anchors, positives, torch.tensor([5]), 0.5)
    assert loss.item() == 0 and num_right.item() == 0


def test_the_nearest_negative_counts_and_one_beyond_the_margin_has_no_gradient():
    """On a line: anchors at 0 and 10, their positives at 1 and 10; the nearest to 0 of the other problem is 10."""
    anchors = torch.tensor([[0.0], [10.0]], requires_grad=True)
    positives = torch.tensor([[1.0], [10.0]], requires_grad=True)
    loss, num_right = triplet_loss(anchors, positives, torch.tensor([0, 1]), 0.5)
    assert loss.item() == 0 and num_right.item() == 2  # 1 - 100 + 0.5, 0 - 81 + 0.5
    loss, num_right = triplet_loss(anchors, positives, torch.tensor([0, 1]), 90.0)
    assert loss.item() == 9.0 and num_right.item() == 2  # row 1: 0 - 81 + 90, its negative is the positive of row 0
    loss.backward()
    assert positives.grad.tolist() == [[2 * (10 - 1)], [0.0]]  # |10 - p|^2 has to grow: p moves down from 1
    assert anchors.grad.tolist() == [[0.0], [-2 * (10 - 1)]]


def test_equal_programs_have_a_finite_gradient():
    anchors = torch.zeros(2, 3, requires_grad=True)
    loss, num_right = triplet_loss(anchors, torch.zeros(2, 3), torch.tensor([0, 1]), 0.5)
    loss.backward()
    assert loss.item() == 1.0 and num_right.item() == 0 and anchors.grad.isfinite().all()


# ------------------------------------------------------------------------------------------------- 5. save and load
@torch.no_grad()
def test_a_loaded_discriminator_gives_the_same_scores(model, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("somebody's\n")
    for _ in range(2):  # the second one replaces the first
        save_discriminator(model, tmp_path)
    loaded = load_discriminator(tmp_path)
    assert torch.equal(loaded(QUERIES, FIRST), model(QUERIES, FIRST))
    assert [loaded.ids(q, r) for q, r in zip(QUERIES, FIRST, strict=True)] == [
        model.ids(q, r) for q, r in zip(QUERIES, FIRST, strict=True)
    ]
    assert loaded.max_length == model.max_length
    assert not any(module.training for module in loaded.modules() if isinstance(module, torch.nn.Dropout))
    assert (tmp_path / "metrics.jsonl").read_text() == "somebody's\n" and not (tmp_path / ".partial").exists()


def test_a_failed_save_keeps_the_previous_discriminator(tmp_path, monkeypatch):
    model = our_own()
    save_discriminator(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nanorlhf.rlcf.discriminator.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_discriminator(our_own(seed=1), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["ours", "roberta"])
@pytest.mark.parametrize(
    "damage",
    ["discriminator.json", "no settings", "model.safetensors", "no weights", "fewer weights", "tokenizer.json",
     "no tokenizer", "config"],
)  # fmt: skip
def test_a_damaged_or_missing_file_is_reported_in_one_sentence(kind, damage, tmp_path, request):
    model = our_own() if kind == "ours" else discriminator_from_encoder(request.getfixturevalue("roberta"))
    save_discriminator(model, tmp_path)
    settings = json.loads((tmp_path / "discriminator.json").read_text())
    if damage == "no settings":
        (tmp_path / "discriminator.json").unlink()
    elif damage == "no weights":
        (tmp_path / "model.safetensors").unlink()
    elif damage == "no tokenizer":
        for path in tmp_path.glob("*token*"):
            path.unlink()
    elif damage == "fewer weights":
        model.mlp = model.mlp[:2]
        save_discriminator(model, tmp_path)
    elif damage == "config" and kind == "ours":
        (tmp_path / "discriminator.json").write_text(json.dumps(settings | {"config": {"d_model": 16, "width": 3}}))
    elif damage == "config":
        (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    else:
        path = tmp_path / damage
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError) as raised:
        load_discriminator(tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)
    assert str(raised.value).endswith((".", "!")) and len(str(raised.value)) < 400


def test_another_directory_is_reported_by_name(roberta, tmp_path):
    for where in (roberta, tmp_path, tmp_path / "nowhere", "/nowhere/at/all"):
        with pytest.raises(InputError, match="has no discriminator.json"):
            load_discriminator(where)


def test_only_a_complete_encoder_directory_is_accepted(tmp_path, roberta):
    with pytest.raises(InputError, match="has no config.json"):
        discriminator_from_encoder(tmp_path)
    shutil.copytree(roberta, tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="can't be read as an encoder"):
        discriminator_from_encoder(tmp_path / "cut")
    shutil.copytree(roberta, tmp_path / "mute", ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(InputError, match="mute has no tokenizer"):  # transformers would make an empty one
        discriminator_from_encoder(tmp_path / "mute")


def test_a_pretrained_encoder_becomes_a_discriminator_that_ppo_trains_further(rlcf, roberta, tmp_path):
    args = replace(rlcf.discriminator, encoder=str(roberta), out=tmp_path / "d", num_rows=24)
    train_discriminator.main(args)
    assert {"triplet", "discriminator"} == {k.split("/")[0] for row in read_metrics(args.out) for k in row if "/" in k}
    ppo = replace(rlcf.ppo, discriminator=str(args.out), discriminator_lr=1e-3, out=tmp_path / "ppo")
    train_rlcf.main(ppo)
    before, after = load_discriminator(args.out), load_discriminator(ppo.out / "discriminator")
    assert after.is_pretrained and not torch.equal(weights(before), weights(after))
    (metrics,) = read_metrics(ppo.out)
    assert -1 < metrics["discriminator/score"] < 1
