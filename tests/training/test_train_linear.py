"""Linear reward models: their features, compared with one text at a time; the weights; the program."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import train_ppo
from data import tiny
from nanorlhf.checkpoint import load_scalar, save
from nanorlhf.dataset import Comparison, Demonstration, load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.logprobs import response_values
from nanorlhf.model import ScalarModel, mean_so_far
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.reward_model import end_scores, pair_scores, response_scores
from nanorlhf.t5 import T5Config
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import train_linear
from nanorlhf.training.run_directory import read_settings
from nanorlhf.training.train_linear import (
    Args,
    fit_weights,
    linear_reward_model,
    load_lower_blocks,
    main,
    pair_features,
    response_mean,
)
from tests.test_model import CONFIGS, make_model

PAD = 40
PAIRS = [
    Comparison([5, 6, 7, 8], [11, 12, 1], [13, 14, 15, 16, 1], {"query": "a"}),
    Comparison([20], [21, 22, 23, 1], [1], {"query": "b"}),
    Comparison([30, 31], [33, 1], [33, 1], {"query": "b"}),
]
T5 = T5Config(vocab_size=41, d_model=24, n_layer=2, n_head=4, d_mlp=40)


# ----------------------------------------------------------------------------------------------- the mean of a response
def test_the_example_of_the_mean_so_far():
    scores, in_response = torch.tensor([[5.0, 1.0, 3.0, 2.0]]), torch.tensor([[False, True, True, True]])
    assert mean_so_far(scores, in_response).tolist() == [[5.0, 1.0, 2.0, 2.0]]


@pytest.mark.parametrize("family", [*CONFIGS, "t5"])
@torch.no_grad()
def test_a_pooled_score_is_the_mean_over_the_tokens_of_the_response(family):
    config = T5 if family == "t5" else CONFIGS[family]
    plain = make_model(config, ScalarModel).eval()
    plain.reward_bias.fill_(0.3)
    pooled = ScalarModel(replace(config, mean_pooled=True)).eval()
    pooled.load_state_dict(plain.state_dict())
    rows = [Demonstration(pair.query, response, {}) for pair in PAIRS for response in (pair.chosen, pair.rejected)]
    expected = []
    for row in rows:
        ids = torch.tensor([row.query + row.response])
        expected.append(plain(ids, query_length=len(row.query))[0, len(row.query) :].mean())
    expected = torch.stack(expected)  # (6,)
    for side in ("left", "right"):
        torch.testing.assert_close(response_scores(pooled, rows, PAD, side), expected, atol=2e-5, rtol=0)
        assert not torch.allclose(response_scores(plain, rows, PAD, side), expected, atol=1e-3)
    chosen, rejected = pair_scores(pooled, PAIRS, PAD)
    torch.testing.assert_close(torch.stack((chosen, rejected), 1).flatten(), expected, atol=2e-5, rtol=0)


def test_numbers_outside_the_response_reach_no_mean():
    nan = torch.nan
    scores, in_response = torch.tensor([[nan, 1.0, nan, 3.0, nan]]), torch.tensor([[False, True] * 2 + [False]])
    assert mean_so_far(scores, in_response)[0, [1, 3]].tolist() == [1.0, 2.0]
    hidden, mask = torch.tensor([[[nan], [1.0], [nan], [3.0]]]), torch.tensor([[False, True] * 2])
    assert response_mean(hidden, mask).tolist() == [[2.0]]


@pytest.mark.parametrize("family", [*CONFIGS, "t5"])
@torch.no_grad()
def test_a_pooled_value_is_the_mean_over_the_tokens_of_the_response_so_far(family):
    """Value t comes before response token t: it is the mean over tokens 0 to t - 1; value 0 is the query's."""
    config = T5 if family == "t5" else CONFIGS[family]
    plain = make_model(config, ScalarModel).eval()
    pooled = ScalarModel(replace(config, mean_pooled=True)).eval()
    pooled.load_state_dict(plain.state_dict())
    queries, responses = [pair.query for pair in PAIRS], [pair.rejected for pair in PAIRS]
    query, response = left_pad(queries, PAD), right_pad(responses, PAD)  # (3, 4) (3, 5)
    ids = torch.cat((query, response), 1)
    real = ids != PAD
    ids[~real] = torch.arange(2, 2 + int((~real).sum()))  # poison
    states = torch.arange(5) <= torch.tensor([[len(response)] for response in responses])
    values = response_values(pooled, ids, real, states)
    for row, (own_query, own_response) in enumerate(zip(queries, responses, strict=True)):
        Q = len(own_query)
        alone = plain(torch.tensor([own_query + own_response]), query_length=Q)[0]
        for t in range(5):
            expected = alone[Q - 1] if t == 0 else alone[Q : Q + t].mean()
            expected = expected if t <= len(own_response) else 0.0
            assert values[row, t].item() == pytest.approx(float(expected), abs=2e-5)


@torch.no_grad()
def test_an_empty_response_has_the_score_of_its_query():
    pooled = make_model(replace(CONFIGS["llama"], mean_pooled=True), ScalarModel)
    query, response = left_pad([[5, 6, 7]], PAD), right_pad([[], [8, 9]], PAD)[:1]
    score = end_scores(pooled, torch.cat((query, response), 1), 3, PAD)
    expected = pooled(query, query_length=3)[:, -1]
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_without_a_query_the_whole_text_is_the_response():
    pooled = make_model(replace(CONFIGS["llama"], mean_pooled=True), ScalarModel)
    plain = ScalarModel(CONFIGS["llama"])
    plain.load_state_dict(pooled.state_dict())
    ids = torch.arange(7)[None]
    expected = plain(ids).cumsum(1) / torch.arange(1, 8)
    torch.testing.assert_close(pooled(ids), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "t5"])
@torch.no_grad()
def test_a_checkpoint_keeps_the_pooling_and_transformers_refuses_it(family, tmp_path):
    config = replace(T5 if family == "t5" else CONFIGS[family], mean_pooled=True)
    model = make_model(config, ScalarModel).eval()
    save(model, tmp_path)
    again = load_scalar(tmp_path).eval()
    assert again.config.mean_pooled
    ids = torch.arange(8)[None]
    torch.testing.assert_close(again(ids, query_length=3), model(ids, query_length=3), atol=0, rtol=0)
    with pytest.raises(ValueError, match="_mean_pooled"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["model_type"] = settings["model_type"].replace("_mean_pooled", "_max_pooled")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match="model_type '[a-z0-9_]+_max_pooled' isn't one of"):
        load_scalar(tmp_path)


# ----------------------------------------------------------------------------------------------------- reading, weights
@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_features_are_the_mean_of_a_response_after_some_blocks_and_the_final_norm(family, monkeypatch):
    gpt = make_model(CONFIGS[family]).eval()
    num_blocks = max(1, round(0.5 * len(gpt.transformer.blocks)))
    below = {}
    gpt.transformer.blocks[num_blocks - 1].register_forward_hook(lambda _module, _inputs, out: below.update(x=out))
    expected = []
    for pair in PAIRS:
        means = []
        for response in (pair.chosen, pair.rejected):
            gpt.transformer(torch.tensor([pair.query + response]))
            means.append(gpt.transformer.norm(below["x"])[0, len(pair.query) :].mean(0))
        expected.append(means[0] - means[1])
    monkeypatch.setattr(train_linear, "load_gpt", lambda _: gpt)
    monkeypatch.setattr(train_linear, "check_vocabulary", lambda *_: None)
    monkeypatch.setattr(train_linear, "check_length", lambda *_: None)
    lower = load_lower_blocks("some/model", None, None, (), 0.5)
    for size in (1, 3):
        features = pair_features(lower, PAIRS, PAD, size)
        np.testing.assert_allclose(features, torch.stack(expected).numpy(), atol=2e-5)
    weights = np.random.default_rng(0).normal(size=features.shape[1])
    chosen, rejected = pair_scores(linear_reward_model(lower, weights), PAIRS, PAD)
    np.testing.assert_allclose((chosen - rejected).numpy(), features @ weights, atol=2e-4)


def test_the_weights_are_those_that_made_the_preferences_and_none_where_there_are_none():
    draw = np.random.default_rng(0)
    true_weights = np.array([2.0, -1.0, 0.5, *np.zeros(17)])
    inputs = draw.normal(size=(4000, 20))
    chosen = np.where(draw.random(4000) < 1 / (1 + np.exp(-inputs @ true_weights)), 1, -1)  # Bradley and Terry
    weights, strength = fit_weights(inputs * chosen[:, None], np.arange(4000), seed=1)
    np.testing.assert_allclose(weights, true_weights, atol=0.15)
    again, _ = fit_weights(inputs * chosen[:, None] * [1e3, *[1] * 19], np.arange(4000), seed=1)
    assert again[0] == pytest.approx(weights[0] / 1e3, rel=1e-3)  # a channel's unit doesn't matter
    coins = draw.choice((-1, 1), size=(4000, 1))
    noise, weakest = fit_weights(inputs * coins, np.arange(4000), seed=1)
    assert np.abs(noise).max() < 0.1 and weakest < strength


def test_pairs_of_a_query_are_never_in_two_folds():
    """The three pairs of each query are equal: if folds leak, features that don't generalise look useful."""
    queries = np.repeat(np.arange(200), 3)
    inputs = np.eye(200)[queries] * np.random.default_rng(0).choice((-1.0, 1.0), size=200)[queries, None]
    assert fit_weights(inputs, queries, seed=1)[1] < fit_weights(inputs, np.arange(600), seed=1)[1]


# ---------------------------------------------------------------------------------------------------------- the program
def test_the_program_leaves_a_reward_model_that_ppo_trains_against(miniature, tmp_path, capsys):
    data, out = tmp_path / "data", tmp_path / "rm"
    tiny.main(tiny.Args(out=data, num_demonstrations=40, num_comparisons=300, num_validation=64, vocab_size=320))
    summary = main(Args(data=data, model=str(miniature.sft.out), depth=0.5))
    assert summary == json.loads((out / "summary.json").read_text())
    assert read_settings(out) | {"depth": 0.5, "model": str(miniature.sft.out), "out": str(out)} == read_settings(out)
    with pytest.raises(InputError, match=f"--out {out} contains a finished run"):
        main(Args(data=data, model=str(miniature.sft.out)))
    assert f"{out}: num_pairs {summary['num_pairs']}" in capsys.readouterr().out
    model, tokenizer = load_scalar(out), load_tokenizer(out)
    assert model.config.n_layer == 1 and model.config.mean_pooled
    pairs = load_comparisons(data / "comparisons.validation.jsonl", tokenizer, 512, 256)
    with torch.no_grad():
        chosen, rejected = pair_scores(model, list(pairs), tokenizer.pad_id)
        rows = list(load_demonstrations(data / "sft.train.jsonl", tokenizer, 512, 256))
        scores = response_scores(model, rows, tokenizer.pad_id, "left")
    assert (chosen > rejected).float().mean().item() == pytest.approx(summary["validation_accuracy"])
    assert scores.mean().item() == pytest.approx(0, abs=1e-4)
    assert scores.std(correction=0).item() == pytest.approx(summary["reward_std"], rel=1e-4)
    args = replace(miniature.ppo, reward_model=str(out), out=tmp_path / "ppo")
    assert np.isfinite(train_ppo.main(args)["objective/score"])


def test_what_cannot_be_learnt_from_is_refused(miniature, tmp_path, monkeypatch):
    args = Args(data=miniature.root / "data", model=str(miniature.sft.out), out=tmp_path / "out")
    with pytest.raises(InputError, match=rf"--data {args.data} has comparisons for [0-9]+ queries; at least 100 are"):
        main(args)
    with pytest.raises(InputError, match=r"--depth 1\.5"):
        main(replace(args, depth=1.5))
    monkeypatch.setattr(train_linear, "FEWEST", 1)
    monkeypatch.setattr(train_linear, "check_vocabulary", lambda *_: None)
    monkeypatch.setattr(train_linear, "load_gpt", lambda *_: make_model(T5))
    with pytest.raises(InputError, match="is an encoder-decoder"):
        main(args)
    monkeypatch.setattr(train_linear, "load_gpt", lambda *_: make_model(replace(CONFIGS["llama"], n_ctx=8)))
    with pytest.raises(InputError, match=f"comparisons in {args.data}"):
        main(args)
    assert not args.out.exists()


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(InputError, match="pip install scikit-learn"):
        fit_weights(np.zeros((10, 1)), np.arange(10), seed=1)
