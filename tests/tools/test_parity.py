"""Every family except T5 has the logits and gradients of transformers in both directions; docs/data.md lists them."""

import re
from pathlib import Path

import pytest
import torch

from tests.test_checkpoint import CASES, FAMILIES
from tools.parity import compare, table, write_models


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_and_gradients_equal_transformers_in_float64(family, changes, tmp_path) -> None:
    result = compare(write_models(family, changes, tmp_path), torch.float64)
    assert result.logits < 1e-12 * result.largest_logit and result.gradient < 1e-12 * result.largest_gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers_in_float32(family, tmp_path) -> None:
    result = compare(write_models(family, {}, tmp_path), torch.float32)
    assert result.logits < 2e-5 and result.gradient < 1e-5


def test_the_page_and_the_table_list_every_family(monkeypatch) -> None:
    monkeypatch.setattr("tools.parity.write_models", lambda *_: None)
    monkeypatch.setattr("tools.parity.compare", lambda *_: (1e-6, 1e-7, 0.0, 0.0))
    header, _, *rows = table().splitlines()
    assert rows == [f"| `{family}` | 1e-06 | 1e-07 | 1e-06 | 1e-07 |" for family in FAMILIES]
    assert header.count("|") == rows[0].count("|")
    page = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text()
    families = page.partition("## Model families")[2].partition("\n\nUnsupported")[0]
    assert set(re.findall(r"`(\w+)`", families)) >= set(FAMILIES)
