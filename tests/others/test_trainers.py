"""One step of TRL's trainers on a tiny random model, compared with what we compute from the same rollout."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXForSequenceClassification, PreTrainedTokenizerFast

from kernels import gae
from nanorlhf import grpo
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import load_gpt, scalar_from_gpt
from nanorlhf.dataset import Comparison, Demonstration
from nanorlhf.dpo import Labels, implicit_pair_rewards, kto_loss, log_ratio_sum, mismatched
from nanorlhf.ppo import policy_loss, value_loss, whiten
from nanorlhf.reward_model import pair_scores
from tests.others.common import difference
from train_dpo import margin_loss
from train_rm import contrastive_loss
from train_sft import demonstration_loss, num_labels

trl = pytest.importorskip("trl", reason="trl is not installed: docs/how-we-compare.md shows how")
ppo = pytest.importorskip("trl.experimental.ppo")
Dataset = pytest.importorskip("datasets").Dataset

WORDS = ["E", "P", *"abcdefgh"]
EOS, PAD, T = 0, 1, 8
SHAPE = GPTNeoXConfig(
    vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=32, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=PAD, num_labels=1,
)  # fmt: skip
USUAL = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "bf16": False}
USUAL |= {"gradient_checkpointing": False}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="E", pad_token="P", padding_side="left")


def policy(seed: int) -> GPTNeoXForCausalLM:
    """Make a policy far from uniform, so no number is 0. It never samples [PAD], which would end TRL's response."""
    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.generation_config.suppress_tokens = [PAD]
    return model


# -------------------------------------------------------------------------------------------------------------- 1. PPO
def test_an_update_of_ppo_is_trls(tokenizer, tmp_path, monkeypatch):
    """Two epochs, because the ratios are 1 in the first; score_at after_eos, TRL's only choice."""
    events = []

    def record(name: str) -> None:
        function = getattr(ppo.ppo_trainer, name)

        def recorded(*args, **keywords):
            result = function(*args, **keywords)
            events.append((name, (*args, *keywords.values()), result))
            return result

        monkeypatch.setattr(ppo.ppo_trainer, name, recorded)

    for name in ("selective_log_softmax", "get_reward", "masked_whiten", "masked_mean", "forward"):
        record(name)
    monkeypatch.setattr(np.random, "permutation", np.arange)
    torch.manual_seed(0)
    value_model, reward_model = (GPTNeoXForSequenceClassification(SHAPE) for _ in range(2))
    for model in (value_model, reward_model):
        torch.nn.init.normal_(model.score.weight)
    args = ppo.PPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=16, num_mini_batches=1, num_ppo_epochs=2,
        total_episodes=16, response_length=T, stop_token="eos", temperature=1.0, kl_coef=0.3, gamma=0.9, lam=0.8,
        whiten_rewards=True, missing_eos_penalty=1.0, num_sample_generations=0, learning_rate=3e-2, cliprange=0.1,
        cliprange_value=0.1, **USUAL,
    )  # fmt: skip
    queries = Dataset.from_dict({"input_ids": [[2 + i % 8, 3, 4] for i in range(16)]})
    models = policy(1), policy(2), reward_model
    trainer = ppo.PPOTrainer(args, tokenizer, *models, queries, value_model, eval_dataset=queries)
    trainer.train()

    def calls(name: str) -> list:
        return [(arguments, result) for event, arguments, result in events if event == name]

    (_, logprobs), (_, ref_logprobs), *later_logprobs = calls("selective_log_softmax")
    (arguments, (values, _, _)), (_, (_, scores, _)) = calls("get_reward")
    (their_rewards, their_states, _), whitened_rewards = calls("masked_whiten")[0]
    (their_advantages, their_actions), whitened_advantages = calls("masked_whiten")[1]
    query, response = arguments[1][:, :3], arguments[1][:, 3:]
    values = values[:, 2:-1].squeeze(-1)

    batch = Batch.of([{}] * 16, query, response, logprobs, EOS, PAD, "after_eos")
    actions, states = batch.actions, batch.states
    assert torch.equal(actions, their_actions) and torch.equal(states, their_states)
    assert 0 < batch.has_eos.sum() < 16 and actions.sum() < actions.numel()  # some end, some don't
    rewards = -0.3 * torch.where(actions, logprobs - ref_logprobs, 0.0)
    scores = torch.where(batch.has_eos, scores, scores - 1)  # as TRL does; we would replace the score
    rewards[torch.arange(16), batch.score_index] += scores
    assert difference(rewards, their_rewards) < 1e-5

    n, mean = states.sum(), rewards[states].mean()
    whitened = (whiten(rewards, states, shift_mean=False) - mean) * ((n - 1) / n).sqrt() + mean
    assert difference(whitened[states], whitened_rewards[states]) < 1e-5
    advantages, returns = gae(whitened_rewards, values, 0.9, 0.8, states)
    assert difference(advantages[actions], their_advantages[actions]) < 1e-5
    n = actions.sum()
    whitened = whiten(advantages, actions) * ((n - 1) / n).sqrt()
    assert difference(whitened[actions], whitened_advantages[actions]) < 1e-5

    last = max(i for i, (name, _, _) in enumerate(events) if name == "masked_whiten")
    means = [arguments for name, arguments, _ in events[last + 1 :] if name == "masked_mean"]
    passes = [result[1] for name, _, result in events[last + 1 :] if name == "forward"]
    assert len(means) == 8 and len(passes) == len(later_logprobs) == 2
    for epoch, (new_values, (_, new)) in enumerate(zip(passes, later_logprobs, strict=True)):
        (their_values, counted), (values_clipped, _), (their_losses, chosen), (is_clipped, _) = means[4 * epoch :][:4]
        assert torch.equal(counted, states) and torch.equal(chosen, actions)
        losses, clipped = policy_loss(new, logprobs, whitened_advantages, actions, 0.1)
        assert difference(losses[actions], their_losses[actions]) < 1e-5
        assert torch.equal(clipped[actions], is_clipped[actions].bool()) and (epoch == 0 or clipped.any())
        losses, clipped = value_loss(new_values[:, 2:-1].squeeze(-1), values, returns, states, 0.1)
        assert difference(losses[states], 0.5 * their_values[states]) < 1e-5
        assert torch.equal(clipped[states], values_clipped[states].bool()) and (epoch == 0 or clipped.any())

    # TRL's mean is over all positions, with 0 after the end
    squares = [0.5 * (new - logprobs)[actions].square() for _, new in later_logprobs]
    approx_kl = torch.cat(squares).mean() * actions.float().mean()
    logged = next(log for log in trainer.state.log_history if "policy/approxkl_avg" in log)
    assert logged["policy/approxkl_avg"] == pytest.approx(approx_kl.item(), rel=1e-4)


# ----------------------------------------------------------------------------------------------------- 2. GRPO and RLOO
SCORES = [0.5, -1.0, 2.0, 0.3, 0.7, -0.1]


def trainer_batch(trainer_class, config, tokenizer, monkeypatch, ref_policy=None) -> dict[str, torch.Tensor]:
    """Return the trainer's rollout before shuffling: six completions of two queries, with scores SCORES."""
    seen = []
    rollout = trainer_class._generate_and_score_completions

    def recorded(self, inputs):
        seen.append(rollout(self, inputs))
        return seen[-1]

    monkeypatch.setattr(trainer_class, "_generate_and_score_completions", recorded)
    transformers.set_seed(0)
    policy(1).save_pretrained(config.output_dir)  # the trainer loads its reference from here
    model = GPTNeoXForCausalLM.from_pretrained(config.output_dir)
    queries = Dataset.from_dict({"prompt": ["a b", "c d"]})
    trainer = trainer_class(model, lambda completions, **_: SCORES, config, queries, processing_class=tokenizer)
    if ref_policy is not None:
        trainer.ref_model.load_state_dict(ref_policy.state_dict())
    trainer.train()
    return seen[0]


SIX = {"per_device_train_batch_size": 6, "num_generations": 3, "max_completion_length": T, "max_steps": 1} | USUAL
NONE = torch.zeros(6, 1)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_advantages_of_grpo_are_trls_but_for_the_standard_deviation(tokenizer, tmp_path, monkeypatch, scale):
    """TRL divides by the sample standard deviation + 1e-4; `none` is Dr. GRPO."""
    config = trl.GRPOConfig(output_dir=str(tmp_path), scale_rewards=scale, **SIX)
    theirs = trainer_batch(trl.GRPOTrainer, config, tokenizer, monkeypatch)["advantages"]
    kind = grpo.grpo if scale == "group" else grpo.dr_grpo
    ours = kind(torch.tensor(SCORES), NONE, NONE, NONE == 0, 3, 0.0, 1.0)[:, 0]
    if scale == "group":
        assert difference(ours, theirs) > 0.2
        ours = ours * (2 / 3) ** 0.5
    assert difference(ours, theirs) < (1e-3 if scale == "group" else 1e-5)


def test_the_advantages_of_rloo_are_trls(tokenizer, tmp_path, monkeypatch):
    """The reward includes the KL of a response, k1 summed over its tokens."""
    config = trl.RLOOConfig(output_dir=str(tmp_path), beta=0.3, **SIX)
    reference = policy(2)
    inputs = trainer_batch(trl.RLOOTrainer, config, tokenizer, monkeypatch, reference)
    ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
    mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
    with torch.no_grad():
        logps = reference(input_ids=ids, attention_mask=mask).logits[:, 1:-1].log_softmax(-1)
    actions = inputs["completion_mask"].bool()
    ref_logps = torch.where(actions, logps.gather(2, ids[:, 2:, None]).squeeze(2), 0.0).sum(1)
    kl = (inputs["old_logps"] - ref_logps)[:, None]  # of a response
    ours = grpo.rloo(grpo.Inputs(torch.tensor(SCORES), kl, NONE, NONE == 0, 3, 0.3, 1.0))[:, 0]
    assert kl.abs().max() > 0.5 and difference(ours, inputs["advantages"]) < 1e-5


@pytest.mark.parametrize("scores", [[0.5, -1.0, 0.3, 0.7], [0.5, -1.0, 0.5, 0.7]])
def test_the_gradient_of_online_dpo_is_trls_but_for_a_tie(tokenizer, tmp_path, monkeypatch, scores):
    """Two queries, with responses in rows 0 and 2, 1 and 3. In a tie TRL prefers the first response."""
    online_dpo = pytest.importorskip("trl.experimental.online_dpo")
    seen = []

    def record(name: str) -> None:
        method = getattr(online_dpo.OnlineDPOTrainer, name)

        def recorded(self, *args, **keywords):
            result = method(self, *args, **keywords)
            if name == "_forward" and result.requires_grad:
                result.retain_grad()
            seen.append(result)
            return result

        monkeypatch.setattr(online_dpo.OnlineDPOTrainer, name, recorded)

    record("_generate")
    record("_forward")
    config = online_dpo.OnlineDPOConfig(
        output_dir=str(tmp_path), beta=0.3, per_device_train_batch_size=2, max_new_tokens=T, max_steps=1, **USUAL
    )
    transformers.set_seed(0)
    online_dpo.OnlineDPOTrainer(
        policy(1), policy(2), reward_funcs=lambda completions, **_: scores, args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c d"]}), processing_class=tokenizer,
    ).train()  # fmt: skip
    (_, _, _, mask), logprobs, ref_logprobs = seen
    pairs = [0, 2, 1, 3]
    actions = mask.bool()[pairs]
    kl = torch.where(actions, (logprobs - ref_logprobs).detach()[pairs], 0.0)
    advantages = grpo.online_dpo(grpo.Inputs(torch.tensor(scores)[pairs], kl, None, actions, 2, 0.3, 1.0))
    new = logprobs.detach()[pairs].requires_grad_(True)
    losses, _ = policy_loss(new, new.detach(), advantages, actions, 0.2)
    (gradient,) = torch.autograd.grad(grpo.mean_of_sums(losses, actions, torch.tensor(4), None), new)
    expected = logprobs.grad[pairs]
    assert difference(gradient[2:], expected[2:]) < 1e-5 and expected[:2].abs().max() > 0.01
    if scores[0] == scores[2]:
        assert (gradient[:2] == 0).all()
    else:
        assert difference(gradient[:2], expected[:2]) < 1e-5


# ------------------------------------------------------------------------------- 3. SFT, the reward model, DPO and KTO
QUERIES = ["a b c", "d", "e f", "g h a b"]
CHOSEN, REJECTED = [" d e", " f", " g a b c d", " h"], [" a", " b c d", " h h", " e f g a"]


def ids(text: str, eos: bool = True) -> list[int]:
    return [WORDS.index(word) for word in text.split()] + [EOS] * eos


def trainer_loss(trainer_class, method, monkeypatch, *arguments, **keywords) -> torch.Tensor:
    """Train for one step and return the loss that the trainer's method computed."""
    seen = []
    compute_loss = getattr(trainer_class, method)

    def recorded(self, *args, **keywords):
        seen.append(compute_loss(self, *args, **keywords))
        return seen[-1]

    monkeypatch.setattr(trainer_class, method, recorded)
    trainer_class(*arguments, **keywords).train()
    [loss] = seen
    return loss.detach()


@pytest.fixture
def ours(tmp_path) -> list:
    """Load `policy(1)` and `policy(2)` as our models."""
    models = []
    for seed in (1, 2):
        policy(seed).save_pretrained(tmp_path / str(seed))
        models.append(load_gpt(str(tmp_path / str(seed))))
    return models


FOUR = {"per_device_train_batch_size": 4, "max_steps": 1} | USUAL


@pytest.mark.parametrize("loss_on", ["all", "response"])
@pytest.mark.parametrize("layout", ["padded", "padding_free", "packing"])
def test_the_loss_of_sft_is_trls_from_text_to_number(tokenizer, tmp_path, monkeypatch, ours, layout, loss_on):
    """TRL's three layouts have the same loss: a text doesn't see the one before, and its first token isn't a label."""
    layouts = {
        "padded": {}, "padding_free": {"padding_free": True, "max_length": None},
        "packing": {"packing": True, "max_length": 32},
    }  # fmt: skip
    config = trl.SFTConfig(
        output_dir=str(tmp_path / "sft"), completion_only_loss=loss_on == "response", **layouts[layout], **FOUR
    )
    texts = Dataset.from_dict({"prompt": QUERIES, "completion": CHOSEN})
    settings = {"args": config, "train_dataset": texts, "processing_class": tokenizer}
    expected = trainer_loss(trl.SFTTrainer, "compute_loss", monkeypatch, policy(1), **settings)
    rows = [Demonstration(ids(query, eos=False), ids(text), {}) for query, text in zip(QUERIES, CHOSEN, strict=True)]
    assert difference(demonstration_loss(ours[0], rows, PAD, loss_on) / num_labels(rows, loss_on), expected) < 1e-5


@pytest.mark.parametrize("center", [None, 0.5])
def test_the_loss_of_a_reward_model_is_trls_from_text_to_number(tokenizer, tmp_path, monkeypatch, ours, center):
    """TRL can add a squared penalty that keeps scores near 0, and subtract a margin per pair; we shift scores later."""
    theirs = GPTNeoXForSequenceClassification(SHAPE)
    theirs.gpt_neox.load_state_dict(policy(1).gpt_neox.state_dict())
    torch.nn.init.normal_(theirs.score.weight)
    model = scalar_from_gpt(ours[0])
    model.score.weight.data.copy_(theirs.score.weight)
    rows = [
        Comparison(ids(query, eos=False), ids(chosen), ids(rejected), {})
        for query, chosen, rejected in zip(QUERIES, CHOSEN, REJECTED, strict=True)
    ]
    loss = contrastive_loss(model, rows, PAD)[0] / len(rows)
    texts = Dataset.from_dict({"prompt": QUERIES, "chosen": CHOSEN, "rejected": REJECTED})
    config = trl.RewardConfig(output_dir=str(tmp_path / "rm"), center_rewards_coefficient=center, **FOUR)
    settings = {"args": config, "train_dataset": texts, "processing_class": tokenizer}
    expected = trainer_loss(trl.RewardTrainer, "compute_loss", monkeypatch, theirs, **settings)
    if center is not None:
        sums = torch.cat([sum(pair_scores(model, [row], PAD)) for row in rows])
        assert difference(loss, expected) > 0.01
        loss = loss + center * sums.square().mean()
    assert difference(loss, expected) < 1e-5


def test_the_loss_of_dpo_is_trls_from_text_to_number(tokenizer, tmp_path, monkeypatch, ours):
    """EOS counts and the query doesn't; TRL and we pad on different sides."""
    texts = {"prompt": QUERIES, "chosen": CHOSEN, "rejected": REJECTED}
    config = trl.DPOConfig(output_dir=str(tmp_path / "dpo"), beta=0.3, **FOUR)
    settings = {"args": config, "train_dataset": Dataset.from_dict(texts), "processing_class": tokenizer}
    expected = trainer_loss(trl.DPOTrainer, "_compute_loss", monkeypatch, policy(1), policy(2), **settings)
    rows = [
        Comparison(ids(query, eos=False), ids(chosen), ids(rejected), {})
        for query, chosen, rejected in zip(QUERIES, CHOSEN, REJECTED, strict=True)
    ]
    chosen, rejected = implicit_pair_rewards(*ours, rows, PAD, 0.3)
    loss = margin_loss(chosen - rejected, 0.3, "sigmoid", 0.0).mean()
    assert abs(loss - 0.69) > 0.1 and difference(loss, expected) < 1e-5


def test_the_loss_of_kto_is_trls_with_the_rows_in_the_opposite_order(tokenizer, tmp_path, monkeypatch, ours):
    """TRL pairs a query with the previous row's response, we with the next row's; everything else is the same."""
    desirable = [True, False, True, True]
    responses = [REJECTED[0], CHOSEN[1], REJECTED[2], CHOSEN[3]]
    texts = {"prompt": QUERIES, "completion": responses, "label": desirable}
    config = trl.KTOConfig(output_dir=str(tmp_path / "kto"), beta=0.3, **FOUR)
    settings = {"args": config, "train_dataset": Dataset.from_dict(texts), "processing_class": tokenizer}
    expected = trainer_loss(trl.KTOTrainer, "_compute_loss", monkeypatch, policy(1), policy(2), **settings)
    rows = []
    for query, response, label in zip(QUERIES, map(ids, responses), desirable, strict=True):
        rows.append(Comparison(ids(query, eos=False), *((response, []) if label else ([], response)), {}))
    kto_losses = []
    for order in (rows[::-1], rows):
        total, number = log_ratio_sum(ours[0], mismatched(order), ours[1], PAD)
        z0 = (total / number).clamp(min=0)
        assert z0 > 0
        rewards = torch.stack(implicit_pair_rewards(*ours, order, PAD, 0.3))
        present = torch.tensor([[bool(row.chosen), bool(row.rejected)] for row in order]).T
        losses, _ = kto_loss(rewards, present, 0.3 * z0, Labels())
        kto_losses.append(losses.mean())
    assert difference(kto_losses[0], expected) < 1e-5 and abs(kto_losses[1] - kto_losses[0]) > 0.01
