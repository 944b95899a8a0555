"""Best-of-n demonstrations: the winners against a recount one answer at a time, and answers that can't win."""

import json
from dataclasses import replace
from statistics import fmean

import pytest
import torch

import train_sft
from data import best_of
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.errors import InputError
from nanorlhf.generate import sample_answers
from nanorlhf.padding import micro_batches
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import interrupt_at
from tests.helpers.jsonl import read_jsonl
from tests.test_train_ppo import policy_that_stops

FIELDS = {"query": str, "response": str, "meta": dict}


@pytest.fixture(scope="module")
def args(miniature, tmp_path_factory) -> best_of.Args:
    return best_of.Args(
        policy=str(policy_that_stops(miniature.root)), reward_model=str(miniature.root / "rm"), device="cpu",
        data=miniature.root / "data", out=tmp_path_factory.mktemp("best_of") / "data", num_samples=4,
        response_length=12, num_queries=10,
    )  # fmt: skip


def read_rows(out, split: str) -> list[dict]:
    return read_jsonl(out / f"sft.{split}.jsonl", FIELDS)


@pytest.mark.slow
def test_the_winner_is_the_usable_answer_with_the_highest_score(args):
    best_of.main(args)
    tokenizer, model = load_tokenizer(args.policy), load_scalar(args.reward_model)
    policy = load_gpt(args.policy).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    kept = num_tokens = 0
    for number, split in enumerate(("train", "validation")):
        queries = [row["query"] for row in read_jsonl(args.data / f"sft.{split}.jsonl", {"query": str})]
        queries = list(dict.fromkeys(queries))[:10]
        seed = int(best_of.np.random.default_rng((args.seed, number, 0)).integers(2**63))
        _, responses = sample_answers(policy, [*map(tokenizer.encode, queries)], tokenizer, 4, 12, 3, seed, 0.7)
        expected = []
        for query, group in zip(queries, micro_batches(responses.tolist(), 4), strict=True):
            ids = [[i for i in response if i != tokenizer.pad_id] for response in group]
            num_tokens += sum(map(len, ids))
            scores = [model(torch.tensor([tokenizer.encode(query) + response]))[0, -1].item() for response in ids]
            usable = []
            for score, response in zip(scores, ids, strict=True):
                text = tokenizer.decode(response).strip()
                again = len(tokenizer.encode(" " + text)) + 1  # invalid UTF-8 gets longer
                if response[-1] == tokenizer.eos_id and text and again <= 12:
                    usable.append((score, text))
            if usable:
                expected.append((query, max(usable)[1], max(usable)[0], fmean(scores)))
        rows = read_rows(args.out, split)
        kept += len(rows)
        assert [(row["query"], row["response"]) for row in rows] == [row[:2] for row in expected]
        assert [row["meta"]["score"] for row in rows] == pytest.approx([row[2] for row in expected], abs=1e-4)
        assert [row["meta"]["mean_score"] for row in rows] == pytest.approx([row[3] for row in expected], abs=1e-4)
    assert 0 < kept < 20  # for some queries, no answer ends
    assert sorted(path.name for path in args.out.iterdir()) == [
        "best_of.json", "sft.train.jsonl", "sft.validation.jsonl",
    ]  # fmt: skip
    cost = json.loads((args.out / "best_of.json").read_text())
    assert cost["num_answers"] == 80 and cost["num_tokens"] == num_tokens
    assert 0 < cost["seconds"] < 600 and cost["peak_resident_bytes"] > 10**7


def test_the_validation_split_may_have_fewer_queries(args, tmp_path):
    best_of.main(replace(args, out=tmp_path / "out", num_queries=6, num_validation_queries=4))
    assert json.loads((tmp_path / "out" / "best_of.json").read_text())["num_answers"] == 4 * (6 + 4)
    queries = dict.fromkeys(row["query"] for row in read_jsonl(args.data / "sft.validation.jsonl", {"query": str}))
    answered = {row["query"] for row in read_rows(tmp_path / "out", "validation")}  # for some, no answer ends
    assert answered and answered <= set([*queries][:4])


@pytest.mark.slow
def test_the_batch_size_changes_nothing_and_the_winners_train_a_policy(args, miniature, tmp_path):
    best_of.main(replace(args, out=tmp_path / "one", batch_size=1))
    best_of.main(replace(args, out=tmp_path / "many", batch_size=7))
    for split in ("train", "validation"):
        one, many = (read_rows(tmp_path / name, split) for name in ("one", "many"))
        assert [(r["query"], r["response"]) for r in one] == [(r["query"], r["response"]) for r in many]
    train_sft.main(
        replace(
            miniature.sft, model=args.policy, data=tmp_path / "one", out=tmp_path / "sft", batch_size=2, num_samples=1
        )
    )
    assert (tmp_path / "sft" / "summary.json").exists()


def test_a_rule_can_score_answers(args, tmp_path):
    (tmp_path / "rule.py").write_text("def score(queries, responses): return [-len(r) for r in responses]\n")
    best_of.main(replace(args, out=tmp_path / "out", reward=f"{tmp_path / 'rule.py'}:score"))
    for row in read_rows(tmp_path / "out", "train"):
        assert row["meta"]["score"] == pytest.approx(-len(row["response"]), abs=2)  # without spaces at the ends


def test_a_resumed_run_writes_the_same_files(args, tmp_path, monkeypatch):
    monkeypatch.setattr(best_of, "QUERIES_AT_ONCE", 3)
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    best_of.main(whole)
    with monkeypatch.context() as patch:
        interrupt_at(6, patch, best_of, "sample_answers")
        with pytest.raises(KeyboardInterrupt):
            best_of.main(broken)
    with (broken.out / best_of.PARTIAL).open("a") as file:
        file.write('{"split": "train", "ro')  # killed while writing
    assert [path.name for path in broken.out.iterdir()] == [best_of.PARTIAL]
    with pytest.raises(InputError, match="has an interrupted run: pass --resume"):
        best_of.main(broken)
    with pytest.raises(InputError, match="was started with --temperature 0.7, not 0.9"):
        best_of.main(replace(broken, resume=True, temperature=0.9))
    calls = interrupt_at(-1, monkeypatch, best_of, "sample_answers")  # never
    best_of.main(replace(broken, resume=True))
    assert len(calls) == 3  # of eight
    for name in ("sft.train.jsonl", "sft.validation.jsonl"):
        assert (whole.out / name).read_bytes() == (broken.out / name).read_bytes()
    assert not (broken.out / best_of.PARTIAL).exists()
    costs = [json.loads((out / "best_of.json").read_text()) for out in (whole.out, broken.out)]
    assert costs[0]["num_tokens"] == costs[1]["num_tokens"]


def test_samples_are_kept_until_the_winners_are_written(args, tmp_path, monkeypatch):
    whole, broken = replace(args, out=tmp_path / "whole"), replace(args, out=tmp_path / "broken")
    best_of.main(whole)
    with monkeypatch.context() as patch:
        interrupt_at(1, patch, best_of, "converted_files")
        with pytest.raises(KeyboardInterrupt):
            best_of.main(broken)
    calls = interrupt_at(-1, monkeypatch, best_of, "sample_answers")  # never
    best_of.main(replace(broken, resume=True))
    assert not calls and read_rows(broken.out, "train") == read_rows(whole.out, "train")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_samples": 1}, "--num-samples 1"),
        ({"reward_model": None}, "leaves nothing to score with"),
        ({"reward_weights": "min"}, "--reward-weights min needs several models"),
        ({"reward": "teacher:runs/sft"}, "--reward teacher only works in training"),
        ({"response_length": 4000}, "positions of"),
        ({"resume": True}, "best_of.partial.jsonl does not exist"),
    ],
)
def test_bad_settings_are_rejected_and_nothing_is_written(args, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        best_of.main(replace(args, out=tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()


def test_out_must_not_overwrite_the_demonstrations(args):
    before = (args.data / "sft.train.jsonl").read_bytes()
    with pytest.raises(InputError, match="is --data"):
        best_of.main(replace(args, out=args.data))
    assert (args.data / "sft.train.jsonl").read_bytes() == before


def test_answers_without_eos_cannot_win_and_without_winners_nothing_is_written(args, miniature, tmp_path):
    never = replace(args, policy=str(miniature.root / "sft"), out=tmp_path / "out", response_length=2)
    with pytest.raises(InputError, match="no usable answer to any of the 10 train queries"):
        best_of.main(never)
    assert not list((tmp_path / "out").iterdir())
