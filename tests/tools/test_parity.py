"""Every family except T5 has the logits and gradients of transformers in both directions, as in docs/data.md."""

import re
from pathlib import Path

import pytest
import torch

from tests.test_checkpoint import CASES, FAMILIES
from tools.parity import compare, table, write_models


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_and_gradients_equal_transformers_in_float64(family, changes, tmp_path) -> None:
    found = compare(write_models(family, changes, tmp_path), torch.float64)
    assert found.logits < 1e-12 * found.largest_logit and found.gradient < 1e-12 * found.largest_gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers_in_float32(family, tmp_path) -> None:
    found = compare(write_models(family, {}, tmp_path), torch.float32)
    assert found.logits < 2e-5 and found.gradient < 1e-5


def test_the_page_lists_every_family(monkeypatch) -> None:
    monkeypatch.setattr("tools.parity.write_models", lambda *_: None)
    monkeypatch.setattr("tools.parity.compare", lambda *_: (0.0, 0.0, 0.0, 0.0))
    page = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text()
    without_numbers = [re.sub(r"\de-\d+|0e\+00", "x", text).splitlines() for text in (table(), page)]
    assert set(without_numbers[0]) <= set(without_numbers[1])
