"""train_sft.py on a miniature: the loss, the gradient at EOS, schedules, resuming, bad input."""

import json
from dataclasses import replace

import pytest
import torch

import train_sft
from nanorlhf.checkpoint import load_gpt
from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import optimizer
from tests.conftest import interrupt_at, read_metrics
from train_sft import demonstration_loss, num_labels

EOS, PAD = 1, 99


@pytest.fixture
def gradients(monkeypatch):
    """Collect the gradient of all weights at each optimizer step."""
    plain, seen = torch.optim.AdamW.step, []

    def step(self, *arguments):
        seen.append(torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]]))
        plain(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


ROWS = [Demonstration([5, 6, 7], [8, 9, EOS], {}), Demonstration([10], [11, EOS], {})]


@pytest.mark.parametrize(("loss_on", "counted"), [("all", [(1, 6), (1, 3)]), ("response", [(3, 6), (1, 3)])])
def test_loss_is_the_sum_over_the_tokens_that_count_row_by_row(tiny_gpt, loss_on, counted):
    total, expected = 0, 0.0
    for row, (first, end) in zip(ROWS, counted, strict=True):
        ids = row.query + row.response
        table = tiny_gpt.logits(tiny_gpt(torch.tensor([ids])))[0].double().log_softmax(-1)
        for position in range(first, end):
            expected -= table[position - 1, ids[position]].item()
            total += 1
    for pad_id in (PAD, 2):  # an id outside the vocabulary, and one that the model can emit
        assert demonstration_loss(tiny_gpt, ROWS, pad_id, loss_on).item() == pytest.approx(expected, abs=1e-4)
    assert num_labels(ROWS, loss_on) == total


def test_the_first_token_of_a_text_is_no_label(tiny_gpt):
    """No token precedes it, even if the query is empty."""
    rows = [Demonstration([], [11, 12, EOS], {}), ROWS[0]]
    total = demonstration_loss(tiny_gpt, rows, PAD, "response").item()
    alone = sum(demonstration_loss(tiny_gpt, [row], PAD, "response").item() for row in rows)
    after_a_query_of_one = Demonstration([11], [12, EOS], {}), ROWS[0]
    expected = sum(demonstration_loss(tiny_gpt, [row], PAD, "response").item() for row in after_a_query_of_one)
    assert total == pytest.approx(alone, abs=1e-4) and total == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("loss_on", "columns"), [("all", [6, 6]), ("response", [6, 5])])
def test_the_last_block_computes_no_column_before_the_labels(tiny_gpt, loss_on, columns):
    """With queries of 3 and 2 tokens and a loss on responses, the first label is column 2, predicted at column 1."""
    seen = []
    for block in tiny_gpt.transformer.blocks:
        block.mlp.register_forward_hook(lambda module, args, output: seen.append(args[0].size(1)))
    rows = [ROWS[0], Demonstration([10, 9], [11, EOS], {})]
    demonstration_loss(tiny_gpt, rows, PAD, loss_on)
    assert [seen[0], seen[-1]] == columns


def test_eos_has_a_gradient_and_padding_has_none(tiny_gpt):
    """If EOS labels were masked, the model would never learn to stop."""
    hidden = []
    tiny_gpt.transformer.register_forward_hook(lambda *a: hidden.append(a[2]) or a[2].retain_grad())
    demonstration_loss(tiny_gpt, ROWS, PAD, "response").backward()
    gradient = hidden[0].grad.abs().sum(-1)
    assert (gradient[0] > 0).tolist() == [False, False, True, True, True, False]  # positions 2 to 4 predict 8, 9, EOS
    assert (gradient[1] > 0).tolist() == [True, True, False, False, False, False]


def test_two_steps_raise_the_probability_of_eos(miniature, tmp_path):
    tokenizer = load_tokenizer(miniature.root / "data")
    rows = train_sft.load_demonstrations(miniature.root / "data/sft.validation.jsonl", tokenizer, None, None)

    def eos_logprob(model):
        """Return EOS's mean log-probability where a response ends and where it continues."""
        ends, elsewhere = [], []
        for row in rows:
            table = model.logits(model(torch.tensor([row.query + row.response])))[0].log_softmax(-1)
            ends.append(table[-2, tokenizer.eos_id].item())
            elsewhere.append(table[len(row.query) - 1 : -2, tokenizer.eos_id].mean().item())
        return sum(ends) / len(rows), sum(elsewhere) / len(rows)

    before, _ = eos_logprob(load_gpt(miniature.root / "sft"))
    args = replace(miniature.sft, model=str(miniature.root / "sft"), out=tmp_path / "sft", num_epochs=0.25)
    assert train_sft.main(args)["steps"] == 2
    after, _ = eos_logprob(load_gpt(args.out))
    assert after > before + 0.02
    train_sft.main(replace(args, num_epochs=12, overwrite=True))
    ends, elsewhere = eos_logprob(load_gpt(args.out))
    assert ends > after + 1 and ends > elsewhere + 0.2  # it learns when to stop, not just to stop


def test_the_loss_decreases(miniature):
    out = miniature.root / "sft_longer"
    summary = train_sft.main(replace(miniature.sft, out=out, num_epochs=8, overwrite=True))
    losses = [row["loss"] for row in read_metrics(out)]
    assert len(losses) == summary["steps"] == 64 and losses[-1] < losses[0] - 1
    assert summary["validation_loss"] < losses[0] - 1


def test_the_micro_batch_size_does_not_change_the_gradient(miniature, gradients):
    """Rows differ in length, so a mean of micro-batch means would change it. Equal up to rounding in the first step."""
    for size in (1, 2, 3, 8):
        out = miniature.root / f"sft_micro_{size}"
        train_sft.main(replace(miniature.sft, out=out, micro_batch_size=size, num_epochs=0.125, overwrite=True))
    assert len(gradients) == 4 and gradients[0].abs().max() > 1e-3
    for gradient in gradients[:-1]:
        assert torch.allclose(gradient, gradients[-1], atol=1e-6)


def test_the_seed_fixes_everything(miniature):
    metrics = []
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        out = miniature.root / f"sft_seed_{name}"
        train_sft.main(replace(miniature.sft, out=out, seed=seed, overwrite=True))
        metrics.append((read_metrics(out), (out / "samples.jsonl").read_text()))
    assert metrics[0] == metrics[1] and metrics[0] != metrics[2]


def test_resuming_equals_the_uninterrupted_run(miniature, monkeypatch):
    """Equal to the last bit."""
    args = replace(miniature.sft, save_every=2, eval_every=3, overwrite=True)
    whole, broken = replace(args, out=miniature.root / "sft_whole"), replace(args, out=miniature.root / "sft_broken")
    train_sft.main(whole)
    interrupt_at(6, monkeypatch, train_sft, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_sft.main(broken)
    with pytest.raises(InputError, match="--resume"):
        train_sft.main(replace(broken, overwrite=False))
    train_sft.main(replace(broken, overwrite=False, resume=True))
    for a, b in zip(load_gpt(whole.out).parameters(), load_gpt(broken.out).parameters(), strict=True):
        assert torch.equal(a, b)
    assert read_metrics(whole.out) == read_metrics(broken.out)


def test_a_run_writes_the_files_that_the_readme_lists(miniature):
    out = miniature.root / "sft"
    names = {path.name for path in out.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "args.json",
        "command.txt",
        "metrics.jsonl",
        "samples.jsonl",
    } <= names
    assert any(name.startswith("events.out.tfevents") for name in names) and (out / "state").is_dir()
    metrics = read_metrics(out)
    assert [row["step"] for row in metrics] == list(range(json.loads((out / "summary.json").read_text())["steps"]))
    assert {"loss", "lr", "episode"} <= set(metrics[0]) and "validation_loss" in metrics[-1]
    assert json.loads((out / "args.json").read_text())["batch_size"] == 8


def test_losses_that_stay_infinite_stop_the_run(miniature, tmp_path, monkeypatch):
    plain, calls = train_sft.demonstration_loss, []

    def explodes(*arguments):
        calls.append(1)
        return plain(*arguments) * (float("inf") if len(calls) > 3 else 1.0)

    monkeypatch.setattr(train_sft, "demonstration_loss", explodes)
    args = replace(miniature.sft, out=tmp_path / "sft", save_every=1)
    monkeypatch.setattr(optimizer, "MAX_SKIPPED_STEPS", 1)
    with pytest.raises(InputError, match=r"for 2 step\(s\) in a row \(the loss is inf\): lower --lr"):
        train_sft.main(args)
    assert [row["skipped_steps"] for row in read_metrics(args.out)] == [0, 0, 0, 1]
    assert all(p.isfinite().all() for p in load_gpt(args.out).parameters())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": 1000}, "--batch-size 1000 is more than the 64 rows"),
        ({"warmup_steps": 100}, r"--warmup-steps 100 must be less than the \d+ steps of the run"),
        ({"max_query_length": 10}, "--max-query-length"),
        ({"max_response_length": 2}, "--max-response-length"),
        ({"model": "/nowhere/at/all", "tokenizer": "{data}"}, "/nowhere/at/all"),
        ({"tokenizer": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"n_head": 3}, "--n-head"),
    ],
)
def test_bad_settings_are_rejected_before_anything_is_written(miniature, tmp_path, change, sentence):
    change = {k: v.format(data=miniature.root / "data") if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(InputError, match=sentence):
        train_sft.main(replace(miniature.sft, out=tmp_path / "sft", **change))
    assert not (tmp_path / "sft").exists()
