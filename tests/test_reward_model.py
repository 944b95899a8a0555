from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import train_ppo
from nanorlhf import reward_model as reward_module
from nanorlhf.checkpoint import load_scalar, save
from nanorlhf.errors import InputError
from nanorlhf.model import ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.reward_model import end_index, end_scores, ensemble_scores
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from nanorlhf.training import update_metrics
from tests.conftest import TINY, read_metrics, weights
from tests.helpers.miniature_rlcf import Spy

PAD = 99
ids = st.lists(st.integers(0, 36), min_size=1, max_size=6)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=5), st.integers(0, 3))
def test_reward_is_read_at_the_last_token_with_any_padding(rows, extra):
    """Left-padded queries begin with [PAD], full rows have none; the search must handle both. [N+ 12]"""
    queries, responses = [q for q, _ in rows], [r for _, r in rows]
    left = torch.cat((left_pad(queries, PAD), right_pad(responses, PAD)), dim=1)
    Q = max(map(len, queries))
    assert end_index(left, Q, PAD).tolist() == [Q + len(r) - 1 for r in responses]
    texts = [q + r for q, r in rows]
    right = F.pad(right_pad(texts, PAD), (0, extra), value=PAD)
    lengths = torch.tensor([len(q) for q in queries])
    assert end_index(right, lengths, PAD).tolist() == [len(text) - 1 for text in texts]


def test_end_index_of_the_docstrings_example():
    assert end_index(torch.tensor([[PAD, PAD, 5, 6, 7, 8, 3, PAD]]), 4, PAD).tolist() == [6]


def reward_model():
    torch.manual_seed(0)
    model = ScalarModel(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def test_a_score_depends_neither_on_padding_nor_on_the_batch():
    model = reward_model()
    queries, responses = [[5, 6, 7], [8, 9, 10, 11, 12]], [[4, 4, 3], [7, 3]]
    left = torch.cat((left_pad(queries, PAD), F.pad(right_pad(responses, PAD), (0, 3), value=PAD)), dim=1)
    together = end_scores(model, left, 5, PAD)
    for b in range(2):
        alone = model(torch.tensor([queries[b] + responses[b]]))[0, -1]
        assert together[b].item() == pytest.approx(alone.item(), abs=1e-5)


def test_a_score_has_the_gradient_of_its_text():
    model = reward_model()
    padded, text = torch.tensor([[PAD, 5, 6, 4, 3, PAD]]), torch.tensor([[5, 6, 4, 3]])
    gradients = [
        torch.autograd.grad(x, list(model.transformer.parameters()))
        for x in (end_scores(model, padded, 3, PAD)[0], model(text)[0, -1])
    ]
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*gradients, strict=True))


@torch.no_grad()
def test_an_empty_response_has_the_score_of_its_query():
    """Tested with left padding, and with right padding where responses begin at different positions."""
    model, queries, responses = reward_model(), [[5, 6, 7], [8, 9, 10, 11, 12], [7]], [[], [7, 3], [4, 4, 4]]
    alone = [
        model(torch.tensor([query + response]))[0, -1].item()
        for query, response in zip(queries, responses, strict=True)
    ]
    left = torch.cat((left_pad(queries, PAD), right_pad(responses, PAD)), dim=1)
    assert end_scores(model, left, 5, PAD).tolist() == pytest.approx(alone, abs=1e-5)
    right = right_pad([query + response for query, response in zip(queries, responses, strict=True)], PAD)
    lengths = torch.tensor([len(query) for query in queries])
    assert end_scores(model, right, lengths, PAD).tolist() == pytest.approx(alone, abs=1e-5)
    assert end_scores(model, right[2:, :1], 1, PAD).item() == pytest.approx(model(right[2:, :1]).item(), abs=1e-5)


def test_the_gradient_of_a_score_is_zero_at_padding_and_the_loss_comes_from_one_number():
    model = reward_model()
    embedded = []
    model.transformer.embedding.register_forward_hook(lambda *a: embedded.append(a[2]) or a[2].retain_grad())
    query_response = torch.tensor([[5, 6, 7, 8, 3, PAD, PAD]])
    end_scores(model, query_response, 2, PAD).sum().backward()
    gradient = embedded[0].grad[0].abs().sum(-1)
    assert (gradient[:5] > 0).all() and (gradient[5:] == 0).all()


# ----------------------------------------------------------------------------------------------------- the ensemble
def test_an_ensembles_score_is_the_mean_the_worst_case_or_the_mean_less_the_variance():
    """A worked example of Coste et al. 2023: members score 1, 2, 6 and 0, 0, 0."""
    scores = torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, 0.0]])
    assert ensemble_scores(scores, "mean").tolist() == [3.0, 0.0]
    assert ensemble_scores(scores, "min").tolist() == [1.0, 0.0]
    variance = ((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 3
    assert ensemble_scores(scores, "uncertainty").tolist() == [pytest.approx(3 - 0.1 * variance), 0.0]


@pytest.fixture
def members(miniature, tmp_path) -> tuple[str, ...]:
    """Return the reward model, and two others that differ from it."""
    tokenizer, paths = load_tokenizer(miniature.root / "rm"), [str(miniature.root / "rm")]
    for seed in (1, 2):
        model, generator = load_scalar(miniature.root / "rm"), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.score.weight.add_(torch.randn(model.score.weight.shape, generator=generator))
        save(model, tmp_path / f"rm{seed}", tokenizer)
        paths.append(str(tmp_path / f"rm{seed}"))
    return tuple(paths)


@pytest.mark.parametrize("ensemble", ["mean", "min", "uncertainty"])
def test_a_run_is_rewarded_by_its_ensemble_and_logs_how_far_the_members_disagree(
    miniature, members, tmp_path, monkeypatch, ensemble
):
    spy = Spy(monkeypatch, "rollout_metrics", update_metrics)
    monkeypatch.setattr(reward_module, "UNCERTAINTY_COEF", 2.0)
    args = replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=8, num_ppo_epochs=1)
    args = replace(args, reward_model=members, reward_weights=ensemble, micro_batch_size=1, lr=0.0)
    args = replace(args, missing_eos_score=None)
    train_ppo.main(args)
    ((batch, scores_of_batch, *_), _), models = spy.calls[0], [load_scalar(path) for path in members]
    deviations = []
    for b in range(8):
        row = batch.query_response[b][batch.real[b]]
        scores = np.array([model(row[None])[0, -1].item() for model in models])
        expected = {"mean": scores.mean(), "min": scores.min(), "uncertainty": scores.mean() - 2 * scores.var()}
        assert scores_of_batch[b].item() == pytest.approx(expected[ensemble], abs=1e-4)
        deviations.append(scores.std())
    (metrics,) = read_metrics(args.out)
    assert metrics["reward/disagreement"] == pytest.approx(np.mean(deviations), abs=1e-5) and np.mean(deviations) > 0.1
    assert torch.equal(weights(load_scalar(args.out / "value_model")), weights(models[0]))  # it starts as the first


def test_members_of_another_vocabulary_and_an_ensemble_of_one_are_refused(miniature, members, tmp_path):
    tokenizer = train_tokenizer(["another vocabulary"], 300)
    save(ScalarModel(replace(TINY, vocab_size=tokenizer.vocab_size)), tmp_path / "foreign", tokenizer)
    args = replace(miniature.ppo, out=tmp_path / "ppo")
    with pytest.raises(InputError, match="--reward-model .*foreign: its tokenizer differs from"):
        train_ppo.main(replace(args, reward_model=(members[0], str(tmp_path / "foreign"))))
    with pytest.raises(InputError, match="--reward-weights min needs several models in --reward-model"):
        train_ppo.main(replace(args, reward_weights="min"))
    assert not args.out.exists()
