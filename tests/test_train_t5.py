"""An encoder-decoder runs through all stages like a GPT."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import eval as evaluation
import train_ppo
import train_rlcf
import train_rm
import train_sft
from kernels.processor import has_int8_matmul
from nanorlhf.checkpoint import load_gpt, load_scalar, save, scalar_from_gpt
from nanorlhf.dataset import Comparison, Demonstration, load_demonstrations, load_programs
from nanorlhf.dpo import summed_logprobs
from nanorlhf.errors import InputError
from nanorlhf.evals import summaries
from nanorlhf.generate import sample_answers
from nanorlhf.metrics.token_shift import token_ranks
from nanorlhf.model import GPT
from nanorlhf.padding import right_pad
from nanorlhf.peft import LoRALinear, merge, tune
from nanorlhf.pretrained.adapters import save_updates
from nanorlhf.reward_model import pair_scores, response_scores
from nanorlhf.rlcf import train_baselines, train_discriminator
from nanorlhf.t5 import DecoderBlock, EncoderDecoder, T5Config
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.settings import SamplerSettings
from tests.conftest import interrupt_at, read_metrics
from tests.test_t5 import CONFIGS, PAD, away_from_the_start, enclosed, largest_difference, rows, t5

transformers = pytest.importorskip("transformers")
ROWS = [Demonstration([5, 6, 7, 8], [9, 10, 1], {}), Demonstration([11, 12], [13, 14, 15, 16, 1], {})]


@pytest.fixture(scope="module")
def sft(miniature, tmp_path_factory) -> train_sft.Args:
    """Run SFT and return its settings."""
    out = tmp_path_factory.mktemp("t5") / "sft"
    args = replace(miniature.sft, architecture="t5", loss_on="response", out=out, n_layer=2)
    train_sft.main(args)
    return args


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory) -> transformers.T5ForConditionalGeneration:
    """Load test_t5's model in transformers."""
    where = tmp_path_factory.mktemp("t5") / "model"
    save(t5(), where)
    return transformers.T5ForConditionalGeneration.from_pretrained(where).eval()


# ------------------------------------------------------------------------------------------------------------ the parts
def expected_loss(hf_model: transformers.T5ForConditionalGeneration) -> float:
    """Sum over the responses of ROWS, one at a time; the first token follows the decoder's start token."""
    expected = 0.0
    for row in ROWS:
        labels = torch.tensor([row.response])
        query = torch.tensor([row.query])
        inputs = enclosed(query, query >= 0, hf_model.config)
        mean = hf_model(**inputs, labels=labels, decoder_input_ids=shifted(labels)).loss
        expected += mean.item() * len(row.response)
    return expected


@torch.no_grad()
def test_the_loss_is_that_of_transformers(hf_model) -> None:
    loss = train_sft.demonstration_loss(t5(), ROWS, PAD, "response")
    assert loss == pytest.approx(expected_loss(hf_model), rel=1e-5)


@torch.no_grad()
def test_summed_logprobs_equal_transformers(hf_model) -> None:
    logprobs = summed_logprobs(t5(), [row.query for row in ROWS], [row.response for row in ROWS], PAD)
    assert -logprobs.sum() == pytest.approx(expected_loss(hf_model), rel=1e-5)


def test_training_equals_transformers(hf_model) -> None:
    """Forty steps from the same weights on the same batches: the losses agree and fall."""
    ours, hf_model = copy.deepcopy(t5()), copy.deepcopy(hf_model)
    generator = torch.Generator().manual_seed(2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5) for model in (ours, hf_model)]
    losses = []
    for _ in range(40):
        query, query_mask, response, _ = rows()
        rest = torch.randint(3, 8, response.shape, generator=generator)  # few distinct tokens: easy to learn
        batch = [
            Demonstration(q[real].tolist(), [*r[:num].tolist(), 1], {})
            for q, real, r, num in zip(query, query_mask, rest, (11, 9, 4), strict=True)
        ]
        texts = [row.response for row in batch]
        labels = right_pad(texts, -100)
        inputs = enclosed(query, query_mask, hf_model.config)
        expected = hf_model(**inputs, labels=labels, decoder_input_ids=shifted(labels.clamp(min=0))).loss
        loss = train_sft.demonstration_loss(ours, batch, PAD, "response") / sum(map(len, texts))
        for objective, optimizer in zip((loss, expected), optimizers, strict=True):
            objective.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.item(), expected.item()))
    assert max(abs(one - other) for one, other in losses) < 1e-5
    assert losses[0][0] > losses[-1][0] + 0.8


def shifted(labels: torch.Tensor) -> torch.Tensor:
    return F.pad(labels, (1, 0), value=CONFIGS["first"].start_id)[:, :-1]


@torch.no_grad()
def test_scores_are_read_at_the_last_token_whichever_side_is_padded() -> None:
    model = scalar_from_gpt(t5())
    for side in ("left", "right"):
        scores = response_scores(model, ROWS, PAD, side)
        for row, score in zip(ROWS, scores, strict=True):
            text = torch.tensor([row.query + row.response])
            assert score == pytest.approx(model(text, last=len(row.response) + 1)[0, -1].item(), abs=1e-5)


@torch.no_grad()
def test_token_ranks_equal_the_whole_distributions(hf_model) -> None:
    query, response = (torch.tensor([getattr(ROWS[1], name)]) for name in ("query", "response"))
    logits = hf_model(**enclosed(query, query >= 0, hf_model.config), decoder_input_ids=shifted(response)).logits[0]
    ranks = [1 + int((row > row[i]).sum()) for row, i in zip(logits, response[0], strict=True)]
    assert token_ranks(t5(), query, response, PAD)[0].tolist() == ranks


@torch.no_grad()
def test_pairs_are_scored_in_one_pass() -> None:
    model, (first, second) = scalar_from_gpt(t5()), ROWS
    pairs = [Comparison(row.query, first.response, second.response, {}) for row in ROWS]
    scores = torch.stack(pair_scores(model, pairs, PAD), dim=1)  # (2, 2)
    for row, pair in zip(scores, pairs, strict=True):
        texts = [Demonstration(pair.query, text, {}) for text in (pair.chosen, pair.rejected)]
        assert torch.allclose(row, response_scores(model, texts, PAD, "left"), atol=1e-5)


# ---------------------------------------------------------------------------------------------------------- fine-tuning
def test_lora_of_q_and_v_includes_cross_attention(tmp_path) -> None:
    """Merging them changes nothing, and peft loads them on top of transformers' model."""
    torch.manual_seed(0)
    model = GPT(CONFIGS["deep decoder"])
    away_from_the_start(model)
    save(model, tmp_path / "base")
    tune(model, "lora", rank=3)
    layers = {name.split(".", 2)[2] for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    self_attention = {f"{i}.attention.qkv" for i in range(5)}
    assert layers == self_attention | {f"{i}.cross.{part}" for i in (2, 3, 4) for part in ("q", "kv")}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    merged = merge(model)
    query, query_mask, response, actions = rows()
    ids, mask = torch.cat((query, response), dim=1), torch.cat((query_mask, actions), dim=1)
    with torch.no_grad():
        assert torch.allclose(merged(ids, mask, last=12), model(ids, mask, last=12), atol=1e-5)
    save_updates(model, tmp_path / "adapter", str(tmp_path / "base"))
    hf_model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "base").eval()
    hf_model = pytest.importorskip("peft").PeftModel.from_pretrained(hf_model, tmp_path / "adapter")
    assert hf_model.peft_config["default"].task_type == "SEQ_2_SEQ_LM"
    assert largest_difference(merged, hf_model.merge_and_unload()) < 2e-5
    assert largest_difference(load_gpt(tmp_path / "base"), hf_model.merge_and_unload()) > 1e-2


def test_adapters_follow_every_branch_and_are_saved(tmp_path) -> None:
    torch.manual_seed(0)
    model = GPT(CONFIGS["first"])
    away_from_the_start(model)
    before = train_sft.demonstration_loss(model, ROWS, PAD, "response")
    tune(model, "adapter")
    assert torch.allclose(train_sft.demonstration_loss(model, ROWS, PAD, "response"), before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 4 * (2 * 2 + 2 * 3)  # two branches per encoder block, three per decoder block
    away_from_the_start(model)
    save(model, tmp_path)
    again = load_gpt(tmp_path)
    assert isinstance(again.config, T5Config) and again.config.adapter_size > 0
    loss = [train_sft.demonstration_loss(m, ROWS, PAD, "response") for m in (model, again)]
    assert torch.allclose(*loss) and (loss[0] - before).abs() > 1e-2


def test_bitfit_needs_a_model_with_biases() -> None:
    with pytest.raises(InputError, match="--tune bitfit: a t5 model has no biases"):
        tune(GPT(CONFIGS["first"]), "bitfit")


# ----------------------------------------------------------------------------------------------------------- the stages
def test_query_tokens_have_no_loss(miniature, tmp_path) -> None:
    with pytest.raises(InputError, match="--loss-on all: an encoder-decoder predicts no query tokens"):
        train_sft.main(replace(miniature.sft, architecture="t5", loss_on="all", out=tmp_path / "sft"))
    assert not (tmp_path / "sft").exists()


def test_sft_lowers_the_loss_and_answers_depend_on_the_query(miniature, sft) -> None:
    losses = [row["loss"] for row in read_metrics(sft.out)]
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.2
    model, tokenizer = load_gpt(sft.out), load_tokenizer(sft.out)
    assert isinstance(model.transformer, EncoderDecoder)
    assert (model.config.n_layer, model.config.num_decoder_blocks) == (1, 2)
    data = load_demonstrations(miniature.root / "data/sft.validation.jsonl", tokenizer, None, None)
    queries = [row.query for row in data[:4]]
    _, together = sample_answers(model, queries, tokenizer, 2, 6, batch_size=3, seed=0)
    _, whole = sample_answers(model, queries, tokenizer, 2, 6, batch_size=8, seed=0)
    assert torch.equal(together, whole)


@pytest.mark.slow
def test_reward_model_and_ppo_train_it_like_a_gpt(miniature, sft, tmp_path) -> None:
    train_rm.main(replace(miniature.rm, sft=str(sft.out), out=tmp_path / "rm"))
    ppo = replace(miniature.ppo, sft=str(sft.out), reward_model=str(tmp_path / "rm"), out=tmp_path / "ppo")
    train_ppo.main(ppo)
    first, *_, last = read_metrics(ppo.out)
    assert first["policy/first_ratio_error"] < 1e-5 and first["policy/sampler_gap"] < 1e-5
    assert abs(first["objective/kl_exact"]) < 1e-4 and last["objective/kl_exact"] > 0
    policy, value_model = load_gpt(ppo.out), load_scalar(ppo.out / "value_model")
    assert isinstance(value_model.transformer, EncoderDecoder)
    for before, after in ((load_gpt(sft.out), policy), (load_scalar(tmp_path / "rm"), value_model)):
        assert any((a != b).any() for a, b in zip(before.parameters(), after.parameters(), strict=True))
    hf_model = transformers.AutoModelForSeq2SeqLM.from_pretrained(ppo.out).eval()
    query, response = torch.arange(2, 32)[None], torch.arange(40, 52)[None]
    inputs = F.pad(response, (1, 0), value=policy.config.start_id)[:, :-1]
    with torch.no_grad():
        logits = policy.logits(policy(torch.cat((query, response), dim=1), last=13)[:, :-1])
        expected = hf_model(**enclosed(query, query >= 0, hf_model.config), decoder_input_ids=inputs).logits
        assert (logits - expected).abs().max() < 1e-5


@pytest.fixture
def ruled(miniature, sft, tmp_path) -> train_ppo.Args:
    """PPO from the SFT policy with a rule as its reward."""
    (tmp_path / "rule.py").write_text("def score(queries, responses):\n    return [len(r) / 10 for r in responses]\n")
    return replace(
        miniature.ppo, sft=str(sft.out), reward_model=None, reward=f"{tmp_path / 'rule.py'}:score", out=tmp_path / "ppo"
    )


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", pytest.param("int8", marks=pytest.mark.skipif(not has_int8_matmul(), reason="no VNNI here"))],
)
def test_rollouts_with_rounded_weights_keep_the_first_ratio_at_one(ruled, dtype) -> None:
    train_ppo.main(replace(ruled, sampler=SamplerSettings(dtype=dtype, correction="tis")))
    for row in read_metrics(ruled.out):
        assert row["policy/first_ratio_error"] < 1e-5
        assert 1e-5 < row["policy/sampler_gap"] < 0.1 and abs(row["policy/tis_weight"] - 1) < 0.05


def test_an_evaluation_runs_like_that_for_a_gpt(miniature, sft, tmp_path) -> None:
    """A policy's KL to the first policy equals a recount with transformers, response by response."""
    model, tokenizer = load_gpt(sft.out), load_tokenizer(sft.out)
    away_from_the_start(model)
    save(model, tmp_path / "other", tokenizer)
    args = replace(
        evaluation.RECIPES["tiny"][1], data=miniature.root / "data", out=tmp_path / "eval", device="cpu", num_queries=3,
        batch_size=2, policies=("sft", str(sft.out), "other", str(tmp_path / "other")), reward_model=None,
        max_query_length=160, max_response_length=64, response_length=8,
    )  # fmt: skip
    result = evaluation.main(args)["policies"]
    assert result["sft"]["kl"] == 0 and result["other"]["kl"] > 0
    queries = [row.query for row in load_demonstrations(args.data / "sft.validation.jsonl", tokenizer, None, None)[:3]]
    query, response = sample_answers(model, queries, tokenizer, 1, 8, 2, args.seed, 0.7)
    kl, _, _ = summaries.kl_to(load_gpt(sft.out), model, query, response, 1, tokenizer, args)
    hf_models = [transformers.AutoModelForSeq2SeqLM.from_pretrained(path).eval() for path in args.policies[1::2]]
    for ids, answer, actual in zip(queries, response, kl, strict=True):
        ended = (answer == tokenizer.eos_id).nonzero()
        text = answer[None, : int(ended[0]) + 1 if len(ended) else 8]
        inputs = F.pad(text, (1, 0), value=model.config.start_id)[:, :-1]
        query = torch.tensor([ids])
        sums = []
        for hf_model in hf_models:
            with torch.no_grad():
                logits = hf_model(
                    **enclosed(query, query >= 0, hf_model.config), decoder_input_ids=inputs
                ).logits.double()
            logprobs = (logits / args.kl_temperature).log_softmax(-1).gather(2, text[..., None])
            sums.append(logprobs.sum().item())
        assert actual == pytest.approx(sums[1] - sums[0], abs=1e-4)


@pytest.mark.slow
def test_resuming_ppo_of_updates_with_a_smaller_critic_equals_the_uninterrupted_run(
    ruled, sft, tmp_path, monkeypatch
) -> None:
    critic = replace(sft, out=tmp_path / "critic", n_layer=1, d_model=8, num_epochs=0.25)
    train_sft.main(critic)
    args = replace(ruled, tune="lora", lr=1e-2, value_model=str(critic.out), save_every=1)
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    train_ppo.main(whole)
    interrupt_at(2, monkeypatch, train_ppo, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(broken)
    train_ppo.main(replace(broken, resume=True))
    assert load_scalar(whole.out / "value_model").config.d_model == 8
    for directory, load in (("", load_gpt), ("value_model", load_scalar)):
        uninterrupted, resumed = (load(out / directory).state_dict() for out in (whole.out, broken.out))
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in uninterrupted.items())
    changed = [
        name
        for name, weight in load_gpt(sft.out).named_parameters()
        if not torch.equal(weight, load_gpt(whole.out).get_parameter(name))
    ]
    assert changed and all(name.endswith(("qkv.weight", "cross.q.weight", "cross.kv.weight")) for name in changed)


@pytest.mark.slow
def test_rlcf_samples_trains_and_compares_with_an_encoder_decoder(rlcf, tmp_path) -> None:
    """The discriminator's samples, PPO with the compiler and a separate critic, and CodeRL."""
    args = replace(
        train_sft.RECIPES["tiny"][1],
        data=rlcf.root / "data", device="cpu", out=tmp_path / "sft", rows="code", architecture="t5", n_layer=1,
        d_model=32, n_head=2, batch_size=12, lr=1e-2, warmup_steps=5, num_epochs=4.0, num_samples=1, eval_every=1000,
        loss_on="response", max_query_length=84, max_response_length=28,
    )  # fmt: skip
    train_sft.main(args)
    sft, tokenizer = str(args.out), load_tokenizer(args.out)
    programs = load_programs(rlcf.ppo.data / "code.train.jsonl", tokenizer, None, None)[:6]
    sampling = replace(rlcf.discriminator, sft=sft, out=tmp_path / "discriminator")
    samples = train_discriminator.sample_programs(sampling, programs, torch.device("cpu"))
    assert len(samples) == 6 and all(isinstance(text, str) for text, _ in samples)
    train_rlcf.main(replace(rlcf.ppo, sft=sft, out=tmp_path / "ppo"))
    [row] = read_metrics(tmp_path / "ppo")
    assert row["policy/first_ratio_error"] < 1e-5 and 0 <= row["compile_rate"] <= 1
    coderl = replace(rlcf.baseline, sft=sft, objective="coderl", localise=False, out=tmp_path / "coderl")
    train_baselines.main(coderl)
    assert read_metrics(coderl.out)[0]["policy/first_ratio_error"] < 1e-5
    critic = load_scalar(coderl.out / "critic")
    assert any(isinstance(block, DecoderBlock) for block in critic.transformer.blocks)
