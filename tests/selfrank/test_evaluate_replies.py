"""Evaluation of replies and of who ranked the answers: replies typed by hand, a reward model of random weights whose
order the tests find out text by text, people who agree with it as far as they are made to, and a truth in a table."""

import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import eval as evaluation
from nanorlhf.checkpoint import load_scalar, save
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import response_ids, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.report.page import text
from nanorlhf.report.verdict import outcomes_of
from nanorlhf.rewards import gold
from nanorlhf.selfrank import evaluate_replies as replies
from nanorlhf.selfrank import reply_report
from nanorlhf.selfrank.self_ranking import share
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from tests.helpers.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("undrawn")
DIALOGUES = [  # query, reference, reply of full, reply of str
    (
        "Dialogue:\nWhat did she do?\nReply:",
        " she sat near my old dog",
        " she sat near my new dog",
        " she sat near my old dog",
    ),
    ("Dialogue:\nMore tea?\nReply:", " yes please , thank you", " I was there", " I was there"),
]
QUESTIONS = [  # query, answers, reply of full, reply of str
    (
        "Context: Old.\nQuestion: Who ruled?\nAnswer:",
        ["dukes", "the Norman dukes"],
        " dukes of Normandy",
        " Norman dukes.",
    ),
    ("Context: Old.\nQuestion: Who lost?\nAnswer:", [], " Norman dukes", " unanswerable"),
]
# of the paraphrase: 1- to 4-grams match 5 of 6, 3 of 5, 2 of 4, 1 of 3; five words in two chunks
NEARLY = {"bleu4": (1 / 12) ** 0.25, "google_bleu": 11 / 18, "meteor": 5 / 6 * (1 - 0.5 * (2 / 5) ** 3)}
EXACTLY = {"bleu4": 1, "google_bleu": 1, "meteor": 1 - 0.5 / 6**3}
ASK = "Dialogue:\nWhat have you got?\nReply:"
TRUTH = {" she sat near my old dog": 1.0, " she sat near my new dog": 0.5, "dog": 1.0, "puppy": 0.5}  # text -> gold


def score_alone(model: ScalarModel, tokenizer: Tokenizer, query: str, response: str) -> float:
    ids = tokenizer.encode(query) + response_ids(query, response, tokenizer)
    return model(torch.tensor([ids]))[0, -1].item()


@dataclass(frozen=True)
class World:
    root: Path
    args: replies.Args
    tokenizer: Tokenizer
    reward_model: ScalarModel

    def best_first(self, query: str, answers: list[str]) -> list[str]:
        """The answers in the reward model's order."""
        scores = {answer: score_alone(self.reward_model, self.tokenizer, query, answer) for answer in answers}
        assert min(abs(a - b) for x, a in scores.items() for y, b in scores.items() if x != y) > 1e-4
        return sorted(answers, key=lambda answer: -scores[answer])


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    """Two policies and a reward model of random weights, dialogues, and questions in the manner of SQuAD."""
    root = tmp_path_factory.mktemp("replies")
    for name, rows in (("dialogues", DIALOGUES), ("squad", QUESTIONS)):
        (root / name).mkdir()
        answers = [row[1] for row in rows]
        responses = [a if isinstance(a, str) else " " + (a[0] if a else "unanswerable") for a in answers]
        metas = [{} if isinstance(a, str) else {"answers": a, "is_impossible": not a} for a in answers]
        records = [
            {"query": row[0], "response": response, "meta": meta}
            for row, response, meta in zip(rows, responses, metas, strict=True)
        ]
        write_jsonl(root / name / "sft.validation.jsonl", records)
    tokenizer = train_tokenizer([" ".join(map(str, row)) for row in DIALOGUES + QUESTIONS] * 2, 300)
    for seed, (name, kind) in enumerate((("full", GPT), ("str", GPT), ("rm", ScalarModel)), start=1):
        torch.manual_seed(seed)
        config = GPTConfig(
            vocab_size=300, n_ctx=128, d_model=16, n_layer=min(seed, 2), n_head=2, d_mlp=32, rotary_dim=4,
            positions="rotary_half",
        )  # fmt: skip
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        save(model, root / name, tokenizer)
    args = replace(
        evaluation.RECIPES["str"][1],
        data=root / "dialogues", out=root / "eval", policies=("full", str(root / "full"), "str", str(root / "str")),
        reward_model=str(root / "rm"), device="cpu", response_length=24, num_resamples=200, batch_size=3,
    )  # fmt: skip
    return World(root, args, load_tokenizer(root / "rm"), load_scalar(root / "rm"))


@pytest.fixture
def scripted(monkeypatch) -> list[tuple]:
    """Replaces sample_answers by typed replies, with policies identified by their layers. Returns its calls.

    The gold scores are the table's."""
    calls = []

    def sample_answers(policy, queries, tokenizer, num_samples, max_new_tokens, batch_size, seed, temperature, top_p):
        calls.append((policy.config.n_layer, num_samples, max_new_tokens, seed, temperature, top_p))
        typed = {tuple(tokenizer.encode(row[0])): row[1 + policy.config.n_layer] for row in DIALOGUES + QUESTIONS}
        rows = [tokenizer.encode(typed[tuple(query)]) + [tokenizer.eos_id] for query in queries]
        if policy.config.n_layer == 1:  # it doesn't always end
            rows[-1] = rows[-1][:-1]
        return left_pad(queries, tokenizer.pad_id), right_pad(rows, tokenizer.pad_id)

    monkeypatch.setattr("nanorlhf.evals.scores.sample_answers", sample_answers)
    monkeypatch.setattr(gold, "load_function", lambda flag, where: lambda query, text: TRUTH.get(text, 0.0))
    return calls


def evaluate(world: World, out: Path, **changes) -> tuple[dict, list[dict]]:
    args = replace(world.args, out=out, **changes)
    return evaluation.main(args), read_jsonl(out / "samples.jsonl", {})


def metric_means(result: dict, policy: str) -> dict[str, float]:
    return {metric: row["mean"] for metric, row in result["policies"][policy]["metrics"].items()}


# --------------------------------------------------------------------------------------------------- 1. the replies
def test_dialogues_are_measured_by_three_overlaps(world, scripted, tmp_path):
    result, _ = evaluate(world, tmp_path, reward_model=None)
    # the second reply of both shares no word with its reference
    assert metric_means(result, "full") == pytest.approx({name: value / 2 for name, value in NEARLY.items()})
    assert metric_means(result, "str") == pytest.approx({name: value / 2 for name, value in EXACTLY.items()})
    assert scripted == [(layers, 1, 24, 1, 0.8, 0.95) for layers in (1, 2)]


def test_squad_is_measured_against_all_answers_and_no_answer_is_one_too(world, scripted, tmp_path):
    result, samples = evaluate(world, tmp_path, data=world.root / "squad")
    # "dukes of Normandy": one of 3 words, all of "dukes"; then an answer to a question without one
    squad = ("exact_match", "precision", "recall", "f1")
    assert [metric_means(result, "full")[name] for name in squad] == pytest.approx([0, 1 / 6, 1 / 2, 1 / 4])
    assert [metric_means(result, "str")[name] for name in squad] == [1, 1, 1, 1]
    assert [row["references"] for row in samples] == [["dukes", "the Norman dukes"], [" unanswerable"]]
    assert samples[1]["policies"]["str"]["google_bleu"] == 1  # against the data's response
    table = text(reply_report.page(result, None, [], []))
    assert re.search(r"^str +100\.00 \[100\.00, 100\.00\] ", table, re.M)
    heads = [line.split() for line in table.splitlines() if line.startswith("× 100")]
    assert [head[2:4] for head in heads] == [["EM", "precision"], ["BLEU-4", "Google-BLEU"]]


def test_intervals_are_over_questions_and_differences_are_those_of_the_last_policy(world, scripted, tmp_path):
    result, _ = evaluate(world, tmp_path, data=world.root / "squad")
    f1 = result["policies"]["full"]["metrics"]["f1"]
    assert f1["mean_ci"] == pytest.approx((0, 0.5))  # two questions: a resample has either twice in 1 of 4
    [row] = (row for row in result["differences"] if row["metric"] == "f1")
    assert (row["ours"], row["theirs"]) == ("str", "full") and row["mean_difference"] == pytest.approx(0.75)
    assert row["mean_difference_ci"] == pytest.approx((0.5, 1))
    [(outcome, _)] = outcomes_of(result, reply_report.outcome)
    assert outcome.level == "The mean F1 × 100 of str is 100.00 (full: 25.00)."
    assert outcome.kind == "warn"
    assert outcome.change.startswith("The F1 rose (+75.00 [+50.00, +100.00]); the RM score fell (-")
    assert "The F1 rose" in (tmp_path / "report.html").read_text()
    pattern = r"^str - full +\+100\.00 \[\+100\.00, \+100\.00\] .* \+75\.00 \[\+50\.00, \+100\.00\]$"
    assert re.search(pattern, text(reply_report.page(result, None, [], [])), re.M)


def test_the_table_is_a_recount_of_the_samples(world, scripted, tmp_path):
    result, samples = evaluate(world, tmp_path, gold="truth.py:table")
    lines = text(reply_report.page(result, None, [], [])).splitlines()
    for name in ("full", "str"):
        rows = [sample["policies"][name] for sample in samples]
        overlap, judged = (line for line in lines if line.startswith(f"{name}  "))
        expected = [100 * fmean(row[metric] for row in rows) for metric in ("bleu4", "google_bleu", "meteor")]
        assert [float(x) for x in re.findall(r"([-\d.]+) \[", overlap)] == pytest.approx(expected, abs=0.006)
        expected = [100 * fmean(row["gold_score"] for row in rows), fmean(row["rm_score"] for row in rows)]
        assert [float(x) for x in re.findall(r"([-\d.]+) \[", judged)] == pytest.approx(expected, abs=0.006)
        texts = [row["response"] for row in rows]
        lengths = [len(world.tokenizer.encode(text)) + (name == "str" or i == 0) for i, text in enumerate(texts)]
        assert judged.split()[-2:] == ["1.000" if name == "str" else "0.500", f"{fmean(lengths):.1f}"]
    assert metric_means(result, "full")["gold_score"] == 0.25 and metric_means(result, "str")["gold_score"] == 0.5
    [reference] = (line.split() for line in lines if line.startswith("reference"))
    model = world.reward_model
    scores = [score_alone(model, world.tokenizer, *row[:2]) for row in DIALOGUES]
    assert reference[1:4] == ["50.00", f"{fmean(scores):.2f}", "-"]
    assert json.loads((tmp_path / "eval.json").read_text()) == json.loads(json.dumps(result))


def test_reward_model_scores_are_independent_of_the_batch(world, scripted, tmp_path):
    _, samples = evaluate(world, tmp_path)
    for sample in samples:
        row = sample["policies"]["str"]
        alone = score_alone(world.reward_model, world.tokenizer, sample["query"], row["response"])
        assert row["rm_score"] == pytest.approx(alone, abs=1e-5)


def test_replies_depend_on_the_seed_and_not_on_the_batch_size(world, tmp_path):
    def texts(name: str, **changes) -> list[str]:
        _, samples = evaluate(world, tmp_path / name, reward_model=None, **changes)
        return [row["response"] for sample in samples for row in sample["policies"].values()]

    ours = texts("ours", batch_size=1)
    assert texts("again", batch_size=64) == ours != texts("other_seed", seed=2)
    assert texts("greedy", temperature=0.0) == texts("greedy_too", temperature=0.0, seed=2)


def test_a_larger_reward_model_may_be_the_gold_score(world, scripted, ranked, tmp_path):
    write_jsonl(tmp_path / "ranked.jsonl", SELF_RANKED)
    result, samples = evaluate(
        world, tmp_path / "out", data=ranked, gold=str(world.root / "rm"), self_rank=tmp_path / "ranked.jsonl"
    )
    for sample in samples:
        for row in sample["policies"].values():
            assert row["gold_score"] == pytest.approx(row["rm_score"], abs=1e-5)
    assert result["reference"]["gold_score"] == pytest.approx(result["reference"]["rm_score"], abs=1e-5)
    assert result["self_ranking"][0]["rm_gold_agreement"] == 1  # with itself
    assert result["first_answers"] is None  # a model's score never means that an answer is right


# ------------------------------------------------------------------------------------------------ 2. the ranking
@pytest.fixture
def ranked(world, tmp_path) -> Path:
    """A directory of data with pairs, as self-ranking writes them, and with rankings by people."""
    data = tmp_path / "data"
    shutil.copytree(world.root / "dialogues", data)
    pairs = [  # the reward model's better one is chosen, and how good the two are in truth
        (("dog", "a"), True, None, 1), (("b", "c"), True, None, 2), (("dog", "d"), False, "negation", 1),
        (("dog", "e"), True, "ngram", 3),
    ]  # fmt: skip
    rows = []
    for number, (texts, as_the_model, noise, distance) in enumerate(pairs):
        query = ASK if number < 2 else ASK + " "
        better, worse = world.best_first(query, list(texts))
        chosen, rejected = (better, worse) if as_the_model else (worse, better)
        meta = {"noise": noise, "rank_chosen": 1, "rank_rejected": 1 + distance}
        rows.append({"query": query, "chosen": chosen, "rejected": rejected, "meta": meta})
    write_jsonl(data / "comparisons.validation.jsonl", rows)
    # answers are in the model's order, in the second question from worst to best
    queries = [f"Dialogue:\n{n}?\nReply:" for n in range(3)]
    listed = [world.best_first(query, ["a", "bb", "c d"])[:: -1 if n == 1 else 1] for n, query in enumerate(queries)]
    rankings = {"ana": ([0, 1, 2], [2, 0, 1], [1, 0, 2]), "ben": ([0, 1, 2], [2, 0, 1], [0, 1, 2])}
    for name, column in rankings.items():
        people = [
            {"query": query, "answers": answers, "ranking": ranking, "annotator": name}
            for query, answers, ranking in zip(queries, listed, column, strict=True)
        ]
        write_jsonl(data / f"rankings.{name}.jsonl", people)
    return data


def test_the_reward_model_is_judged_on_the_pairs_by_noise_and_by_distance(world, scripted, ranked, tmp_path):
    result, _ = evaluate(world, tmp_path / "out", data=ranked)
    accuracies = [
        (group.get("noise", group.get("distance")), group["num_pairs"], group["rm_accuracy"])
        for group in result["self_ranking"]
    ]
    of_noise = [("none", 2, 1), ("negation", 1, 0), ("ngram", 1, 1)]
    assert accuracies == [(None, 4, 3 / 4), *of_noise, (1, 2, 1 / 2), (2, 1, 1), (3, 1, 1)]
    assert result["self_ranking"][0]["rm_accuracy_ci"] == (0.5, 1)  # two questions, of 2/2 and of 1/2
    table = text(reply_report.page(result, None, [], []))
    assert re.search(r"^noise: negation +1 +0\.00 \[0\.00, 0\.00\]$", table, re.M)
    assert re.search(r"^1 rank apart +2 +50\.00 ", table, re.M) and "unequal" not in table


def test_self_ranking_is_compared_with_gold(world, scripted, ranked, tmp_path):
    rows = read_jsonl(ranked / "comparisons.validation.jsonl", {})
    gains = [TRUTH.get(row["chosen"], 0) - TRUTH.get(row["rejected"], 0) for row in rows]
    assert gains[1] == 0 and {abs(gain) for gain in gains} == {0, 1}
    result, _ = evaluate(world, tmp_path / "out", data=ranked, gold="truth.py:table")
    whole = result["self_ranking"][0]
    assert whole["chosen_better"] == sum(gain > 0 for gain in gains) / 4
    assert whole["chosen_as_good"] == sum(gain >= 0 for gain in gains) / 4
    assert whole["gold_agreement"] == pytest.approx(sum(gain > 0 for gain in gains) / 3)
    margins = [True, True, False, True]  # the model's, as the pairs were made
    assert whole["rm_gold_agreement"] == pytest.approx(sum(margins[i] == (gains[i] > 0) for i in (0, 2, 3)) / 3)
    distance_2 = result["self_ranking"][5]
    assert distance_2["distance"] == 2 and distance_2["rm_gold_agreement"] is None  # equally good: no right order
    assert re.search(r"^2 ranks apart .* - +-$", text(reply_report.page(result, None, [], [])), re.M)


def test_pairs_by_someone_else_are_one_group(world, scripted, ranked, tmp_path):
    rows = read_jsonl(ranked / "comparisons.validation.jsonl", {})
    write_jsonl(ranked / "comparisons.validation.jsonl", [row | {"meta": {"batch": "mine"}} for row in rows])
    result, _ = evaluate(world, tmp_path / "out", data=ranked)
    assert [group["num_pairs"] for group in result["self_ranking"]] == [4]


def test_pairs_of_one_question_are_resampled_together():
    resamples = {"seed": 1, "num_resamples": 200}
    hits, queries = [True] * 50 + [None] + [False] * 50, ["a"] * 50 + ["b"] * 51
    assert share(hits, queries, **resamples) == (0.5, (0, 1))
    value, (low, high) = share(hits, [str(i) for i in range(101)], **resamples)
    assert value == 0.5 and 0.39 < low < 0.43 and 0.57 < high < 0.61  # 0.5 -+ 1.96 sqrt(.25 / 100)
    assert share([None], ["a"], **resamples) is None


def test_agreement_with_people_is_as_constructed(world, scripted, ranked, tmp_path):
    files = tuple(sorted(ranked.glob("rankings.*")))
    result, _ = evaluate(world, tmp_path / "out", data=ranked, rankings=files)
    [study] = result["human_study"]
    # in the second question the last two are exchanged; in the third people tie, and answers are in the model's order
    assert (study["order_probability"], study["num_questions"], study["num_answers"]) == (2 / 3, 3, 3)
    assert study["chance"] == 1 / 6
    assert study["pairwise_agreement"] == pytest.approx(8 / 9) and study["kendall_tau"] == pytest.approx(7 / 9)
    assert study["kendall_tau_ci"] == pytest.approx([2 * end - 1 for end in study["pairwise_agreement_ci"]])
    # 7 of 9 answers have the same rank, by chance 3 of 9
    assert study["annotators"]["cohen_kappa"] == pytest.approx((7 / 9 - 1 / 3) / (2 / 3))
    assert study["annotators"]["fleiss_kappa"] == pytest.approx(2 / 3)
    table = text(reply_report.page(result, None, [], []))
    assert re.search(r"^same order of all 3 +66\.67 \[20\.77, 93\.85\] +16\.67 .* 3 questions$", table, re.M)  # Wilson
    assert re.search(r"^Cohen's kappa +66\.67 +0\.00 +people, 1 pair of them$", table, re.M)
    alone, _ = evaluate(world, tmp_path / "alone", data=ranked, rankings=files[:1])
    [study] = alone["human_study"]
    assert study["annotators"] is None and study["order_probability"] == 1 / 3
    assert "Kappa is omitted: no question was ranked by two people." in text(reply_report.page(alone, None, [], []))


def test_agreement_with_and_without_isodata_is_reported_separately(world, scripted, ranked, tmp_path):
    """The same question has other answers with ISODATA; there ana and ben agree, and with the model."""
    query = "Dialogue:\n2?\nReply:"
    answers = world.best_first(query, ["dog", "no", "puppy"])
    for name in ("ana", "ben"):
        row = {"query": query, "answers": answers, "ranking": [0, 1, 2], "annotator": name, "representatives": True}
        write_jsonl(tmp_path / f"isodata.{name}.jsonl", [row])
    files = (*sorted(tmp_path.glob("isodata.*")), *sorted(ranked.glob("rankings.*")))
    result, _ = evaluate(world, tmp_path / "out", data=ranked, rankings=files)
    without, with_isodata = result["human_study"]
    assert (without["representatives"], without["num_questions"]) == (False, 3)
    assert without["order_probability"] == 2 / 3 and without["annotators"]["cohen_kappa"] == pytest.approx(2 / 3)
    assert (with_isodata["representatives"], with_isodata["num_questions"]) == (True, 1)
    assert with_isodata["order_probability"] == 1 and with_isodata["annotators"]["cohen_kappa"] == 1
    table = text(reply_report.page(result, None, [], []))
    shown = re.findall(r"^(?:× 100, (.*) ISODATA|Cohen's kappa +([.\d]+)) ", table, re.M)
    assert [a or b for a, b in shown] == ["without", "66.67", "with", "100.00"]


def test_the_cost_of_each_run_is_in_the_table_and_models_without_a_run_are_not(world, scripted, tmp_path):
    for name, episodes, parameters in (("str", (16, 32), 1234), ("rm", (8, None), 5678901)):
        shutil.copytree(world.root / name, tmp_path / name)
        rows = [{"step": i, "loss": 2.0} | ({"episode": n} if n else {}) for i, n in enumerate(episodes)]
        write_jsonl(tmp_path / name / "metrics.jsonl", rows)
        cost = {"seconds": 61.7, "num_trained_parameters": parameters, "peak_resident_bytes": 1}
        (tmp_path / name / "summary.json").write_text(json.dumps(cost))
    policies = ("full", str(world.root / "full"), "str", str(tmp_path / "str"))
    result, _ = evaluate(world, tmp_path / "out", policies=policies, reward_model=str(tmp_path / "rm"))
    lines = text(reply_report.page(result, None, [], [])).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("training run"))
    assert [line.split() for line in lines[start + 1 : start + 3]] == [
        ["str", "1,234", "32", "62"], ["reward", "model", "5,678,901", "8", "62"],
    ]  # fmt: skip
    assert set(result["costs"]) == {"str", "reward model"}


def test_answers_to_chats_are_scored_after_their_marks(world, scripted, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    rows = read_jsonl(world.root / "dialogues/sft.validation.jsonl", {})
    write_jsonl(tmp_path / "data/sft.validation.jsonl", [row | {"chat": True} for row in rows])
    person = {"query": "what?<|endoftext|>", "answers": ["a", "b"], "ranking": [1, 0], "annotator": "ana"}
    write_jsonl(tmp_path / "ana.jsonl", [person])
    scored = []
    monkeypatch.setattr(replies, "evaluate_order", lambda questions, rows, *rest: scored.extend(rows))
    monkeypatch.setattr(reply_report, "page", lambda *_: [])
    evaluate(world, tmp_path / "out", data=tmp_path / "data", rankings=(tmp_path / "ana.jsonl",))
    eos, encode = world.tokenizer.eos_id, world.tokenizer.encode
    assert [(row.query, row.response) for row in scored] == [([*encode("what?"), eos], [*encode(x), eos]) for x in "ab"]


SELF_RANKED = [
    {"query": ASK, "answers": ["no", "cat", "dog", "dog"], "weights": [0.8, 0.9, 1.1, 1.2], "clusters": [0, 0, 1, 1],
     "representatives": [3, 1]},
    {"query": ASK + " now <b>", "answers": ["puppy", "cat", "dog", "no"], "weights": [1.3, 1.0, 0.5, 1.2],
     "clusters": [0, 1, 2, 1], "representatives": [0, 3, 2]},
]  # fmt: skip


def test_the_first_answer_is_right_more_often_than_one_at_random(world, scripted, tmp_path):
    write_jsonl(tmp_path / "ranked.jsonl", SELF_RANKED)
    result, _ = evaluate(world, tmp_path / "out", self_rank=tmp_path / "ranked.jsonl", gold="truth.py:table")
    first = result["first_answers"]
    # by weight: dog dog cat no; puppy no cat dog. A puppy is half right, which is not right
    right = {name: row["right"] for name, row in first.items() if name != "num_questions"}
    assert right == {"first": 1 / 2, "random": 3 / 8, "last": 1 / 2, "any": 1, "first_minus_random": 1 / 8}
    assert first["first"]["gold_score"] == 0.75 and first["random"]["gold_score"] == (2 / 4 + 1.5 / 4) / 2
    assert first["first_minus_random"]["right_ci"] == (-1 / 4, 1 / 2)
    table = text(reply_report.page(result, None, [], []))
    assert re.search(r"^first - random +\+12\.50 \[-25\.00, \+50\.00\] +\+31\.25$", table, re.M)
    without, _ = evaluate(world, tmp_path / "without", self_rank=tmp_path / "ranked.jsonl")
    assert without["first_answers"] is None and "TextRank" not in text(reply_report.page(without, None, [], []))


# ---------------------------------------------------------------------------------------------- 3. written files
@pytest.fixture
def letters(monkeypatch):
    """An encoder that counts letters: a text's vector has the count of each letter."""

    def encode(texts, **settings):
        counts = [[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
        return torch.nn.functional.normalize(torch.tensor(counts).float(), dim=1).numpy()

    monkeypatch.setattr(replies, "load_sentence_encoder", lambda where, device: SimpleNamespace(encode=encode))


def test_the_page_is_one_file_with_figure_2_of_the_question_with_the_most_kinds(
    world, scripted, ranked, letters, tmp_path
):
    write_jsonl(tmp_path / "ranked.jsonl", SELF_RANKED)
    shutil.copytree(world.root / "str", tmp_path / "str")
    write_jsonl(tmp_path / "str/metrics.jsonl", [{"step": i, "loss": 2.0, "validation_loss": 2.0} for i in range(3)])
    result, _ = evaluate(
        world, tmp_path / "out", data=ranked, self_rank=tmp_path / "ranked.jsonl", encoder="letters",
        gold="truth.py:table",
        rankings=tuple(sorted(ranked.glob("rankings.*"))), num_report_samples=1,
        policies=("full", str(world.root / "full"), "str", str(tmp_path / "str")),
    )  # fmt: skip
    assert result["figure"]["query"] == SELF_RANKED[1]["query"]
    assert [(row["text"], row["cluster"], row["representative"]) for row in result["figure"]["answers"]] == [
        ("puppy", 0, True), ("no", 1, True), ("cat", 1, False), ("dog", 2, True),
    ]  # fmt: skip
    page = (tmp_path / "out" / "report.html").read_text()
    assert set(re.findall(r'src="([^:]+):', page)) == {"data"} and not re.findall(r"<(script\s|link[^>]+sheet)", page)
    assert page.count("<img ") == 5 + 1 + 1  # a panel a metric, Figure 2, the loss
    assert re.findall(r"<li>(.*?) <small>", page) == ["<b>puppy</b>", "<b>no</b>", "cat", "<b>dog</b>"]
    assert "now &lt;b&gt;" in page and page.count('class="answers"') == 1
    for heading in ("Differences", "vs. self-ranking", "first answers", "Human study", "METEOR ("):
        assert heading in page
    assert "omitted" not in page and "omitted" not in text(reply_report.page(result, None, [], []))


def test_all_can_read_the_report(world, scripted, tmp_path, unreadable):
    evaluate(world, tmp_path, gold="truth.py:table")
    assert not unreadable(tmp_path / "report.html")


def test_a_run_whose_metrics_are_damaged_is_refused_and_nothing_is_written(world, scripted, tmp_path):
    shutil.copytree(world.root / "str", tmp_path / "str")
    (tmp_path / "str/metrics.jsonl").write_text("3\n")
    with pytest.raises(InputError, match="metrics.jsonl:1: expected a JSON object"):
        evaluate(world, tmp_path / "new/out", policies=("str", str(tmp_path / "str")))
    assert not (tmp_path / "new").exists()


def test_sections_without_reward_model_gold_or_rankings_are_omitted_with_a_note(world, scripted, tmp_path):
    result, _ = evaluate(
        world, tmp_path, reward_model=None, policies=("str", str(world.root / "str")), data=world.root / "dialogues"
    )
    assert set(metric_means(result, "str")) == {"bleu4", "google_bleu", "meteor"} and result["differences"] == []
    table = text(reply_report.page(result, None, [], []))
    assert not re.search(r"RM|gold|difference", table)
    assert table.count("omitted") == 3
    page = (tmp_path / "report.html").read_text()
    assert "Differences" not in page and "Human study" not in page


def test_the_bars_are_the_means_with_their_intervals():
    metrics = {"f1": {"mean": 0.2, "mean_ci": (0.1, 0.4)}, "rm_score": {"mean": -1.5, "mean_ci": (-2.0, -1.0)}}
    f1, rm_score = reply_report.interval_figures({"policies": {"full": {"metrics": metrics}}})
    for figure, mean, ends in ((f1, 20, [10, 40]), (rm_score, -1.5, [-2, -1])):
        [bars] = figure.axes[0].containers[1:]
        assert [bar.get_width() for bar in bars] == pytest.approx([mean])
        segment = figure.axes[0].containers[0].lines[2][0].get_segments()[0]
        assert [x for x, _ in segment] == pytest.approx(ends)


def test_the_test_split_has_its_own_file(world, scripted, tmp_path):
    shutil.copy(world.root / "squad" / "sft.validation.jsonl", tmp_path / "sft.test.jsonl")
    result, samples = evaluate(world, tmp_path / "out", data=tmp_path, split="test", num_queries=1)
    assert [row["query"] for row in samples] == [QUESTIONS[0][0]]
    assert "1 test questions" in text(reply_report.page(result, None, [], []))


# ------------------------------------------------------------------------------------------------------ 4. bad input
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"policies": ()}, "^--policies: expected pairs"),
        ({"policies": ("str",)}, "^--policies str: expected pairs"),
        ({"policies": ("str", "/nowhere/str")}, "/nowhere/str"),
        ({"reward_model": "/nowhere/rm"}, "/nowhere/rm"),
        ({"data": Path("/nowhere")}, "^/nowhere/sft.validation.jsonl does not exist"),
        ({"split": "test"}, "sft.test.jsonl does not exist"),
        ({"rankings": (Path("/nowhere/ana.jsonl"),)}, "^/nowhere/ana.jsonl does not exist"),
        ({"rankings": (Path("ana.jsonl"),), "reward_model": None}, "^--rankings needs --reward-model"),
        ({"self_rank": Path("/nowhere/ranked.jsonl")}, "^/nowhere/ranked.jsonl does not exist"),
        ({"encoder": "/nowhere/bert"}, "^--encoder /nowhere/bert needs --self-rank"),
        ({"encoder": "/nowhere/bert", "self_rank": "ranked"}, "^/nowhere/bert"),
        ({"temperature": -0.1}, "^--temperature -0.1"),
        ({"response_length": 5000}, "the longest query and response have 50.. tokens.*, or lower --response-length"),
        ({"response_length": 5000, "reward_model": None}, "lower --response-length"),
        ({"max_query_length": 3}, "sft.validation.jsonl:1: .*--max-query-length is 3"),
    ],
)
def test_bad_settings_are_reported_in_one_sentence_and_nothing_is_written(world, tmp_path, change, sentence):
    write_jsonl(tmp_path / "ranked.jsonl", SELF_RANKED)
    if change.get("self_rank") == "ranked":
        change = change | {"self_rank": tmp_path / "ranked.jsonl"}
    with pytest.raises(InputError, match=sentence) as error:
        evaluation.main(replace(world.args, out=tmp_path / "out", **change))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("meta", "sentence"),
    [
        ({}, "sft.validation.jsonl:2: only some rows have 'answers' in 'meta'"),
        ({"answers": "Norman"}, "sft.validation.jsonl:2: the field 'answers' must be list, not str"),
        ({"answers": [" "]}, "sft.validation.jsonl:2: 'answers' in the field 'meta' must be a list of non-empty texts"),
        ({"answers": [3]}, r"sft.validation.jsonl:2: the field 'answers\[0\]' must be str, not int"),
        ([], "sft.validation.jsonl:2: the field 'meta' must be dict, not list"),
    ],
)
def test_malformed_answers_are_reported_with_their_line(world, tmp_path, meta, sentence):
    first, second = read_jsonl(world.root / "squad" / "sft.validation.jsonl", {})
    write_jsonl(tmp_path / "sft.validation.jsonl", [first, second | {"meta": meta}])
    with pytest.raises(InputError, match=sentence):
        evaluation.main(replace(world.args, data=tmp_path, out=tmp_path / "out"))


@pytest.mark.parametrize(
    "change",
    [
        {"weights": [0.8, 0.9, 1.1]},
        {"weights": [1.0]},
        {"clusters": [0, 1]},
        {"weights": [0.8, 0.9, 1.1, "1.2"]},
        {"clusters": [0, 0, 2, 1]},  # the last is represented by none
        {"representatives": [4, 1]},
        {"representatives": [1]},
        {"representatives": [0, 3, 1]},
        {"representatives": [0, 1]},  # of one cluster both
        {"answers": [], "weights": [], "clusters": [], "representatives": []},
        {"answers": ["dog", "cat", None, "no"]},
    ],
)
def test_a_malformed_self_ranking_row_is_reported_with_its_line(world, tmp_path, change):
    write_jsonl(tmp_path / "ranked.jsonl", [SELF_RANKED[1], SELF_RANKED[0] | change])
    sentence = "expected a text, a weight and a cluster .* data.self_rank|the field '(weights|answers).*' must be"
    with pytest.raises(InputError, match=f"ranked.jsonl:2: ({sentence})"):
        evaluation.main(replace(world.args, self_rank=tmp_path / "ranked.jsonl", out=tmp_path / "out"))


def test_a_ranked_question_too_long_for_the_reward_model_is_reported_before_sampling(world, tmp_path):
    row = {"query": "Dialogue:\n" + "q " * 200 + "\nReply:", "answers": ["a", "b"], "ranking": [1, 0], "annotator": "a"}
    write_jsonl(tmp_path / "ana.jsonl", [row])
    with pytest.raises(InputError, match="^--rankings: the longest query and response have .* the 128 positions"):
        evaluation.main(replace(world.args, rankings=(tmp_path / "ana.jsonl",), out=tmp_path / "out"))


def test_the_recipe_has_the_papers_numbers():
    args = evaluation.RECIPES["str"][1]
    assert (args.temperature, args.top_p, args.response_length) == (0.8, 0.95, 100)
    assert args.policies[::2] == ("original", "full", "adapter", "bitfit", "lora", "str")
