"""course/explore.ipynb runs from top to bottom on a finished run and prints what the models compute."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_ppo
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import load_demonstrations, response_ids
from nanorlhf.tokenizer import load_tokenizer

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).resolve().parents[2] / "course" / "explore.ipynb"


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(cells) == 6 and all(not cell.outputs and cell.execution_count is None for cell in cells)


@pytest.mark.slow
def test_the_notebook_prints_what_the_models_compute(miniature, tmp_path, monkeypatch) -> None:
    for name in ("data", "sft", "rm"):
        (tmp_path / name).symlink_to(miniature.root / name)
    train_ppo.main(replace(miniature.ppo, out=tmp_path / "ppo", total_episodes=8, lr=1e-2))
    monkeypatch.setenv("RUNS", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    where = {"metadata": {"path": NOTEBOOK.parent}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    printed = {
        cell.id: "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    }

    tokenizer = load_tokenizer(tmp_path / "ppo")
    row = load_demonstrations(tmp_path / "data" / "sft.validation.jsonl", tokenizer, None, None)[0]
    query, text = row.record["query"], " my boss wrecked the boat"
    assert query in printed["write"] and printed["write"].count("ppo:") == printed["write"].count("sft:") == 3
    ids = torch.tensor([row.query + response_ids(query, text, tokenizer)])
    with torch.no_grad():
        score = load_scalar(tmp_path / "rm")(ids)[0, -1].item()
        logits = {
            name: (model := load_gpt(tmp_path / name)).logits(model(ids[:, :-1]))[0, -1] for name in ("sft", "ppo")
        }
    [rm_logit] = re.findall(r"^\[EOS\] +(-?[\d.]+)", printed["score"], re.M)
    assert float(rm_logit) == pytest.approx(score, abs=0.006)
    assert any(
        "image/svg+xml" in output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert re.sub(r"\x1b\[\d+m", "", printed["ranks"]).strip() == text.strip() + "[EOS]"

    lines = [line.rsplit(maxsplit=2) for line in printed["probabilities"].splitlines()]
    assert lines[0] == ["next token", "sft", "ppo"] and len(lines) == 9
    for i, name in enumerate(("sft", "ppo"), start=1):
        logits[name][tokenizer.pad_id :] = -torch.inf  # [PAD] can't be sampled
        probabilities = logits[name].softmax(-1).tolist()
        assert max(float(line[i]) for line in lines[1:]) == pytest.approx(max(probabilities), abs=6e-4)
        named: dict[str, list[float]] = {}  # different halves of a character look the same when printed
        for token, probability in enumerate(probabilities):
            word = "[EOS]" if token == tokenizer.eos_id else repr(tokenizer.decode([token]))
            named.setdefault(word, []).append(probability)
        for line in lines[1:]:
            assert any(float(line[i]) == pytest.approx(p, abs=6e-4) for p in named[line[0].strip()])
