"""eval.py end to end on the miniature, and its numbers against recounts."""

import json
import math
import re
import shutil
import weakref
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote

import pytest
import torch
import torch.nn.functional as F

import eval as evaluation
import train_dpo
import train_ppo
from data.tiny import gold_score
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.errors import InputError
from nanorlhf.evals import model_loading, summaries
from nanorlhf.evals.scores import rm_scores
from nanorlhf.evals.settings import with_kept_checkpoints
from nanorlhf.generate import sample_answers
from nanorlhf.metrics import win_rate
from nanorlhf.metrics.best_of import best_of_n_kl
from nanorlhf.metrics.token_shift import token_ranks
from nanorlhf.plan.evaluation import eval_plan, eval_work
from nanorlhf.plan.memory import phase_memory
from nanorlhf.report.page import series, smooth, write_page
from nanorlhf.report.reward_model_report import accuracy_lines
from nanorlhf.report.summary_report import cells, overview, shift_lines
from nanorlhf.report.summary_report import page as page_of
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.helpers.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("undrawn")
KEYS = {
    "gold_win_rate", "gold_win_rate_ci", "gold_score", "rm_score", "rouge1", "rouge2", "rougeL", "eos_rate", "kl",
    "response_length",
}  # fmt: skip


@pytest.fixture(scope="module")
def args(miniature, tmp_path_factory) -> summaries.Args:
    """A PPO policy with a noticeable KL to its initial policy, and settings to compare the two."""
    out = tmp_path_factory.mktemp("eval")
    train_ppo.main(replace(miniature.ppo, out=out / "ppo", lr=1e-2, keep_every=1))
    return replace(
        evaluation.RECIPES["tiny"][1],
        data=miniature.root / "data", out=out / "eval", device="cpu", num_queries=11, batch_size=4,
        policies=("sft", str(miniature.root / "sft"), "ppo", str(out / "ppo")),
        reward_model=str(miniature.root / "rm"),
        max_query_length=160, max_response_length=64, response_length=12,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(args) -> dict:
    return evaluation.main(args)


def test_eval_json_has_the_keys_that_other_tools_read(args, result) -> None:
    written = json.loads((args.out / "eval.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert list(written["policies"]) == ["sft", "ppo"]
    for row in written["policies"].values():
        assert row.keys() >= KEYS
        low, high = row["gold_win_rate_ci"]
        assert low <= row["gold_win_rate"] <= high
    assert 0 <= written["reward_model"]["validation_accuracy"] <= 1


def test_scores_and_wins_equal_a_recount_of_the_samples(args, result) -> None:
    samples = read_jsonl(args.out / "samples.jsonl", {"query": str, "reference": str, "policies": dict})
    assert len(samples) == 11
    references = [gold_score(sample["query"], sample["reference"]) for sample in samples]
    for name, row in result["policies"].items():
        golds = [gold_score(sample["query"], sample["policies"][name]["response"]) for sample in samples]
        assert golds == [sample["policies"][name]["gold_score"] for sample in samples]
        assert row["gold_score"] == pytest.approx(fmean(golds))
        assert row["gold_win_rate"] == win_rate(golds, references)
        assert row["rm_score"] == pytest.approx(fmean(s["policies"][name]["rm_score"] for s in samples), abs=1e-6)


def test_the_batch_size_changes_nothing(args, result) -> None:
    again = evaluation.main(replace(args, out=args.out.parent / "other_batch", batch_size=11))
    for name, row in result["policies"].items():
        for key, value in row.items():
            expected = None if value is None else pytest.approx(value, rel=1e-6, abs=1e-5)
            assert again["policies"][name][key] == expected, (name, key)
    assert again["reward_model"] == result["reward_model"]


@pytest.mark.slow
def test_rounded_weights_and_offloading_change_no_bit(args, monkeypatch) -> None:
    """Weights stored in bfloat16 equal autocast's casts of float32 weights."""
    args = replace(args, dtype="bfloat16", num_queries=5, implicit_rewards=("ppo",))
    results = []
    for offload, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)):
        monkeypatch.setattr(model_loading, "device_and_dtype", lambda args, device, dtype=dtype: (device, dtype))
        result = evaluation.main(replace(args, out=args.out.parent / f"{dtype}.{offload}", offload=offload))
        results.append({name: value for name, value in result.items() if name != "args"})
    assert results[0] == results[1] == results[2]


def test_a_policy_is_freed_before_the_next_is_loaded(args, monkeypatch) -> None:
    policies = (*args.policies, "again", args.policies[1], "more", args.policies[3])
    loaded, alive = [], []

    def load(*arguments):
        alive.append(sum(model() is not None for model in loaded))
        policy = load_gpt(*arguments)
        loaded.append(weakref.ref(policy))
        return policy

    monkeypatch.setattr(model_loading, "load_gpt", load)
    evaluation.main(replace(args, out=args.out.parent / "several", policies=policies, num_queries=2))
    assert alive == [0, 1, 1]  # the reference stays in memory and isn't loaded twice


@pytest.mark.parametrize("flag", ["reward_model", "gold"])
def test_a_reward_model_with_too_few_positions_is_rejected_before_weights_are_loaded(args, monkeypatch, flag) -> None:
    short = shutil.copytree(args.reward_model, args.out.parent / f"short.{flag}")
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 20}))
    monkeypatch.setattr(model_loading, "load_gpt", lambda *_: pytest.fail("a model was loaded"))
    sentence = f"tokens, more than the 20 positions of --{flag.replace('_', '-')} .*short.{flag}: shorten them"
    with pytest.raises(InputError, match=sentence):
        evaluation.main(replace(args, out=args.out.parent / "none", **{flag: str(short)}))


def test_the_plan_of_an_evaluation_counts_each_model_once_in_the_dtype_of_the_computation(args) -> None:
    args = replace(args, dtype="bfloat16", policies=("sft", args.policies[1]))  # no PPO, so no value model
    assert "1 x 80 GB with --batch-size 4: at most" in eval_plan(args)
    work = eval_work(args)
    rounded, scalar = (load(where, dtype=torch.bfloat16) for load, where in (
        (load_gpt, args.policies[1]), (load_scalar, args.reward_model)))  # fmt: skip
    policy, reward = (sum(p.nbytes for p in model.parameters()) for model in (rounded, scalar))
    assert policy < sum(4 * p.numel() for p in rounded.parameters())
    offloaded = replace(work.flags, offload=True)
    for phase, kept in zip(work.phases, (policy, policy, policy, reward), strict=True):
        assert phase_memory(work, phase, work.flags, 1).weights == 2 * policy + reward
        assert phase_memory(work, phase, offloaded, 1).weights == kept


def test_only_the_trained_policy_has_a_kl_to_the_reference(result) -> None:
    assert result["policies"]["sft"]["kl"] == 0
    assert result["policies"]["ppo"]["kl"] != 0


def test_kl_of_a_row_equals_its_sum_without_padding_or_batch(args) -> None:
    """Recompute each response unpadded in float64, from full logits."""
    policy, ref_policy = (load_gpt(path).double() for path in args.policies[1::2][::-1])
    tokenizer = load_tokenizer(args.policies[1])
    for model in (policy, ref_policy):
        model.forbid(tokenizer.pad_id, tokenizer.vocab_size)
    queries = [tokenizer.encode(text) for text in ("POST: a b c\n\nTL;DR:", "b c\n\nTL;DR:")]
    query, response = sample_answers(policy, queries, tokenizer, 1, args.response_length, 2, args.seed, 0.7)
    kl, estimate, entropy = summaries.kl_to(ref_policy, policy, query, response, 1, tokenizer, args)
    assert torch.allclose(kl, estimate, atol=1e-6)  # the best of one is the policy itself
    for row, (ids, answer) in enumerate(zip(queries, response.tolist(), strict=True)):
        end = answer.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in answer else len(answer)
        text = torch.tensor([ids + answer[:end]])
        logprob = ref_logprob = 0.0
        for t in range(end):
            position = len(ids) - 1 + t
            logprobs = [
                F.log_softmax(model.logits(model(text))[0, position] / args.kl_temperature, -1)[answer[t]].item()
                for model in (policy, ref_policy)
            ]
            logprob, ref_logprob = logprob + logprobs[0], ref_logprob + logprobs[1]
        assert kl[row].item() == pytest.approx(logprob - ref_logprob, rel=1e-6, abs=1e-5)
        assert entropy[row].item() == pytest.approx(-logprob, rel=1e-6, abs=1e-5)


def test_best_of_n_lowers_the_entropy_by_the_exact_amount(args) -> None:
    """Enumerate a policy with three responses: H(best) = E log 1 / P(best)."""
    p, score = torch.tensor([0.5, 0.3, 0.2]).double(), [0, 1, 2]
    chosen = torch.zeros(3).double()  # best of two
    for a in range(3):
        for b in range(3):
            chosen[max(a, b, key=lambda i: score[i])] += p[a] * p[b]
    entropy = -(chosen * chosen.log()).sum()
    estimate = (chosen * (-p.log() - best_of_n_kl(p.log(), 2).double())).sum()  # weighted results of `kl_to`
    assert estimate == pytest.approx(entropy.item(), abs=0.2) and estimate < -(chosen * p.log()).sum()


def test_distinct_responses_are_counted_query_by_query(args) -> None:
    few = replace(args, out=args.out.parent / "distinct", num_distinct_samples=3, num_queries=5)
    few = replace(few, policies=(*args.policies, "best", f"best-of-2:{args.policies[1]}"))
    result = evaluation.main(few)
    tokenizer = load_tokenizer(args.policies[1])
    for name, path in zip(args.policies[::2], args.policies[1::2], strict=True):
        policy = load_gpt(path).forbid(tokenizer.pad_id, tokenizer.vocab_size)
        rows = load_demonstrations(args.data / "sft.validation.jsonl", tokenizer, 160, 64)[:5]
        _, drawn = sample_answers(policy, [r.query for r in rows], tokenizer, 3, 12, 1, args.seed, args.kl_temperature)
        counts = [len({tuple(ids) for ids in drawn[3 * i : 3 * i + 3].tolist()}) for i in range(5)]
        assert result["policies"][name]["distinct"] == fmean(counts)
    assert result["policies"]["best"]["distinct"] is None


def test_the_reward_models_accuracy_equals_a_recount_of_the_pairs(args, result) -> None:
    tokenizer, model = load_tokenizer(args.reward_model), load_scalar(args.reward_model)
    pairs = load_comparisons(args.data / "comparisons.validation.jsonl", tokenizer, 160, 64)

    def last_score(ids: list[int]) -> float:
        return model(torch.tensor([ids]))[0, -1].item()

    right = [last_score(pair.query + pair.chosen) > last_score(pair.query + pair.rejected) for pair in pairs]
    assert result["reward_model"]["validation_accuracy"] == fmean(right)
    assert result["reward_model"]["num_pairs"] == len(pairs)


def test_the_reward_model_is_compared_with_the_gold_score_on_the_policies_own_responses(args, result) -> None:
    samples = read_jsonl(args.out / "samples.jsonl", {"policies": dict})
    signs = []
    for sample in samples:
        sft, ppo = (sample["policies"][name] for name in ("sft", "ppo"))
        signs.append([(ppo[key] > sft[key]) - (ppo[key] < sft[key]) for key in ("gold_score", "rm_score")])
    decided = [gold == rm for gold, rm in signs if gold]
    assert result["reward_model"]["num_sample_pairs"] == len(decided)
    assert result["reward_model"]["samples_gold_agreement"] == (fmean(decided) if decided else None)
    columns = {
        name: [{"gold_score": gold, "rm_score": rm} for gold, rm in zip(golds, rms, strict=True)]
        for name, golds, rms in (("a", (1, 1, 2), (0, 0, 0)), ("b", (2, 1, 0), (3, 5, 1)), ("c", (0, 4, 2), (1, 0, 2)))
    }  # expected: a and b right, tie, wrong; a and c wrong, wrong (the model ties), tie; b and c right, wrong, right
    assert summaries.agreement_on_samples(columns) == {"samples_gold_agreement": 3 / 7, "num_sample_pairs": 7}


def test_the_shares_of_shifted_tokens_equal_single_responses(args, result) -> None:
    """Recompute each response on its own; the first policy's greedy response has no shifted token."""
    tokenizer = load_tokenizer(args.policies[1])
    base = load_gpt(args.policies[1]).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    rows = load_demonstrations(args.data / "sft.validation.jsonl", tokenizer, None, None)[: args.num_queries]
    ranks = [
        rank
        for row in rows
        for rank in token_ranks(base, torch.tensor([row.query]), torch.tensor([row.response]), tokenizer.pad_id)[0]
    ]
    shares = result["token_shift"]["shares"]
    assert result["token_shift"]["base"] == "sft" and shares.keys() == {"sft", "ppo", "reference"}
    assert shares["reference"]["unshifted"] == pytest.approx(sum(rank == 1 for rank in ranks) / len(ranks))
    assert shares["reference"]["shifted"] == pytest.approx(sum(rank > 3 for rank in ranks) / len(ranks))
    assert shares["sft"]["unshifted"] > 0.99 and all(sum(row.values()) == pytest.approx(1) for row in shares.values())


def test_another_policy_may_be_the_base_of_the_colours(args, result) -> None:
    other = evaluation.main(replace(args, out=args.out.parent / "other_base", shift_base="ppo"))["token_shift"]
    assert other["base"] == "ppo" and other["shares"]["ppo"]["unshifted"] > 0.99
    assert other["shares"]["sft"] != result["token_shift"]["shares"]["sft"]


def test_a_dpo_policy_is_evaluated_like_any_other_and_ranks_pairs_next_to_the_reward_model(args, miniature) -> None:
    out = args.out.parent
    train_dpo.main(replace(miniature.dpo, out=out / "dpo", lr=3e-3, overwrite=True))
    policies = (*args.policies[:2], "dpo", str(out / "dpo"))
    result = evaluation.main(replace(args, out=out / "with_dpo", policies=policies, implicit_rewards=("dpo",)))
    assert result["policies"]["dpo"].keys() == result["policies"]["sft"].keys()
    models = result["rewards"]["sets"]["validation"]["accuracy"][0]["models"]
    summary = json.loads((out / "dpo" / "summary.json").read_text())
    assert models["dpo"]["mean"] == pytest.approx(summary["validation_accuracy"])
    assert models["reward model"]["mean"] == result["reward_model"]["validation_accuracy"]
    assert "dpo: DPO" in (out / "with_dpo" / "report.html").read_text()


def test_the_checkpoints_along_a_run_are_policies_and_the_last_one_is_the_run_itself(args, result, tmp_path) -> None:
    run = Path(args.policies[3])
    along_args = replace(args, policies=(*args.policies[:2], "ppo", f"along:{run}"), out=tmp_path / "along")
    along_result = evaluation.main(along_args)
    assert list(along_result["policies"]) == ["sft", "ppo@1", "ppo@2", "ppo@3"]
    assert along_result["policies"]["ppo@3"] == result["policies"]["ppo"]
    assert along_result["policies"]["ppo@1"]["kl"] != along_result["policies"]["ppo@2"]["kl"]
    assert along_result["args"]["policies"][4:6] == ["ppo@2", str(run / "checkpoints/step-00000002")]
    page = Page((along_args.out / "report.html").read_text())
    titles = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    along_titles = ["Win rate against KL", "Scores against KL", "ROUGE-L against KL"]
    assert [title for title in titles if title in along_titles] == along_titles
    assert titles.count("Rollout score") == 1  # the run's curves, once
    assert eval_work(along_args).models == eval_work(args).models  # of the plan
    html = (along_args.out / "report.html").read_text()
    assert html.count('class="happened') == 1 and "ppo@3 beats the references" in html


def test_a_run_without_kept_checkpoints_is_named_and_a_half_written_one_is_skipped(args, tmp_path) -> None:
    (tmp_path / "run/checkpoints/step-00000002/.partial").mkdir(parents=True)
    with pytest.raises(
        InputError, match=f"--policies ppo along:{tmp_path}/run: {tmp_path}/run has no kept checkpoints"
    ):
        evaluation.main(replace(args, policies=(*args.policies[:2], "ppo", f"along:{tmp_path / 'run'}")))
    (tmp_path / "run/checkpoints/step-00000010").mkdir()
    (tmp_path / "run/checkpoints/step-00000010/config.json").touch()
    words = with_kept_checkpoints(("sft", "runs/sft", "ppo", f"along:{tmp_path}/run"))
    assert words == ("sft", "runs/sft", "ppo@10", f"{tmp_path}/run/checkpoints/step-00000010")


def test_best_of_n_is_the_response_with_the_highest_reward(args, tmp_path) -> None:
    sft = args.policies[1]
    changed = replace(args, out=tmp_path / "eval", policies=("sft", sft, "best", f"best-of-4:{sft}"), batch_size=3)
    row = evaluation.main(changed)["policies"]["best"]
    tokenizer, model = load_tokenizer(sft), load_scalar(args.reward_model)
    policy = load_gpt(sft).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    rows = load_demonstrations(args.data / "sft.validation.jsonl", tokenizer, None, None)[: args.num_queries]
    arguments = [r.query for r in rows], tokenizer, 4, args.response_length, 100, args.seed, args.kl_temperature
    query, response = sample_answers(policy, *arguments)
    best = []
    for i in range(0, len(query), 4):  # one at a time
        scores = [
            rm_scores(model, query[j : j + 1], response[j : j + 1], tokenizer.pad_id, 1)[0] for j in range(i, i + 4)
        ]
        best.append((max(scores), tokenizer.decode(response[i + max(range(4), key=scores.__getitem__)].tolist())))
    written = [sample["policies"]["best"] for sample in read_jsonl(changed.out / "samples.jsonl", {})]
    assert [text for _, text in best] == [sample["response"] for sample in written]
    assert row["rm_score"] == pytest.approx(fmean(score for score, _ in best), abs=1e-4)
    assert row["kl"] == pytest.approx(math.log(4) - 3 / 4) and row["kl_standard_error"] == pytest.approx(0, abs=1e-6)
    assert 0 < row["kl_estimate"] <= row["kl"] + 1e-6  # these texts are long, so there are no duplicates
    assert "KL of best of n" in (changed.out / "report.html").read_text()


def test_differences_from_the_first_policy_are_paired_query_by_query(args, result) -> None:
    rows = [sample["policies"] for sample in read_jsonl(args.out / "samples.jsonl", {})]
    for score, gain in result["differences"]["ppo"].items():
        single = [row["ppo"][score] - row["sft"][score] for row in rows]
        assert gain["mean"] == pytest.approx(fmean(single)) and gain["ci"][0] <= gain["mean"] <= gain["ci"][1]
    assert result["differences"].keys() == {"ppo"} and result["differences"]["ppo"].keys() == {"gold_score", "rm_score"}


def test_without_gold_or_reward_model_their_numbers_are_null_and_their_columns_missing(args) -> None:
    out = args.out.parent / "bare"
    result = evaluation.main(replace(args, out=out, gold=None, reward_model=None, policies=args.policies[:2]))
    assert result["policies"]["sft"]["gold_win_rate"] is None and result["policies"]["sft"]["rm_score"] is None
    assert result["reward_model"] is None
    table = overview(result).text()
    assert "gold" not in table and "RM" not in table and "ROUGE-1" in table
    assert "gold" not in (out / "report.html").read_text().split("</table>")[1].split("<h2")[0]


def test_a_larger_reward_model_may_be_the_gold_score(args) -> None:
    result = evaluation.main(replace(args, out=args.out.parent / "gold_model", gold=args.reward_model))
    rows = [result["reference"], *result["policies"].values()]
    assert [row["gold_score"] for row in rows] == pytest.approx([row["rm_score"] for row in rows], abs=1e-5)
    assert result["reward_model"]["gold_agreement"] == 1  # compared with itself


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"policies": ("sft",)}, "--policies sft"),
        ({"policies": ()}, "--policies"),
        ({"policies": ("a", "x", "a", "y")}, "names must differ"),
        ({"policies": ("reference", "x")}, "`reference`"),
        (
            {"policies": ("best", "best-of-4:x")},
            "best-of-N:DIR needs a --reward-model and can't be the first policy",
        ),
        ({"policies": ("a", "x", "b", "best-of-4:x"), "reward_model": None}, "best-of-N:DIR needs a --reward-model"),
        ({"policies": ("a", "x", "b", "best-of-1:x")}, "best-of-1:x"),
        ({"implicit_rewards": ("sft",)}, "--implicit-rewards sft"),
        ({"implicit_rewards": ("dpo",)}, "--implicit-rewards dpo"),
        ({"shift_base": "base"}, "--shift-base base"),
        ({"dpo_beta": 0.0}, "--dpo-beta 0.0"),
        ({"policies": ("sft", "no/such/checkpoint/here")}, "no/such/checkpoint/here"),
        ({"reward_model": "no/such/checkpoint"}, "without one, pass --reward-model None"),
        ({"num_queries": 0}, "--num-queries 0"),
        ({"temperature": -1.0}, "--temperature -1.0"),
        ({"kl_temperature": 0.0}, "--kl-temperature 0.0"),
        ({"response_length": 10**6}, "--response-length"),
        ({"data": Path("no/data")}, "no/data"),
        ({"gold": "no/such/rule.py:score"}, "--gold no/such/rule.py:score"),
        ({"gold": "no/such/checkpoint/here"}, "no/such/checkpoint/here"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(args, changes, named) -> None:
    out = args.out.parent / "refused"
    with pytest.raises(InputError, match=re.escape(named)):
        evaluation.main(replace(args, out=out, **changes))
    assert not out.exists()


def test_a_finished_evaluation_is_not_overwritten_silently(args, result) -> None:
    before = (args.out / "eval.json").read_bytes()
    with pytest.raises(InputError, match="--overwrite"):
        evaluation.main(replace(args, seed=2))
    assert (args.out / "eval.json").read_bytes() == before


def test_models_with_different_vocabularies_are_not_compared(args, miniature, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (miniature.root / "sft").iterdir():
        if file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    train_tokenizer(["another language"], 300).save(other)
    with pytest.raises(InputError, match="have different tokenizers"):
        evaluation.main(replace(args, out=tmp_path / "out", policies=(*args.policies, "other", str(other))))


# ---------------------------------------------------------------------------------------------------------- the report
class Page(HTMLParser):
    """Collect every tag with its attributes, and the text of each table row."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data) -> None:
        if self.tags and self.tags[-1][0] in ("td", "th") and data.strip():
            self.rows[-1][-1] += data


def test_the_report_needs_no_network_and_has_the_curves_of_three_stages(args, result) -> None:
    page = Page((args.out / "report.html").read_text())
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object")
        assert attributes.get("src", "data:").startswith("data:")
        assert ":" not in attributes.get("href", "").removeprefix("data:")  # within the page, or a file next to it
    titles = [attributes["alt"] for tag, attributes in page.tags if tag == "img"]
    assert titles == [
        "Loss", "Loss", "Pairs ranked as the labeller did", "Rollout score", "KL to the reference",
        "Response length", "Responses ending in EOS", "Proxy and gold score against KL", "Wins by length",
        "Win rate and length",
        next(title for title in titles if title.startswith("reward model: calibration error")),
        "sft: reward logits", "ppo: reward logits", "ppo: rewards, values and KL",
    ]  # fmt: skip
    assert "url(" not in (args.out / "report.html").read_text()


def test_all_can_read_the_report(args, result, unreadable) -> None:
    assert not unreadable(args.out / "report.html")


def test_the_page_shows_the_command_and_links_to_existing_lines(args, result) -> None:
    text = (args.out / "report.html").read_text()
    page = Page(text)
    learning_rate = json.loads((Path(args.policies[3]) / "args.json").read_text())["lr"]
    assert ["lr", str(learning_rate)] in page.rows and ["num_queries", "11"] in page.rows
    anchors = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert len(links) > 40
    for link in links:
        file, _, fragment = link.partition("#")
        target = (args.out / unquote(file)).resolve()
        assert target.is_file() if file else fragment in anchors
        if file and fragment:
            assert re.search(r"\[N\+ [\d, ]+\]", target.read_text().splitlines()[int(fragment[1:]) - 1])


def test_the_page_includes_the_search_and_one_card_per_sample(args, result) -> None:
    page = Page((args.out / "report.html").read_text())
    assert sum(attributes.get("class") == "sample" for _, attributes in page.tags) == 11
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}]  # one inline script
    assert any(attributes.get("type") == "search" for _, attributes in page.tags)


def test_the_tables_show_the_numbers_of_eval_json(args, result) -> None:
    page = Page((args.out / "report.html").read_text())
    accuracies = result["rewards"]["sets"]["validation"]["accuracy"]
    for lines in (cells(result), shift_lines(result), accuracy_lines(accuracies, "all")):
        assert all(line in page.rows for line in lines[1:])
    for name, row in result["policies"].items():
        line = next(line for line in overview(result).text().splitlines() if line.startswith(name))
        assert f"{row['gold_win_rate']:.3f} [" in line and f"{row['kl']:.2f}" in line and f"{row['rougeL']:.3f}" in line


def test_texts_are_escaped(args, result, tmp_path) -> None:
    sample = {
        "query": "<script>alert(1)</script> & more",
        "reference": "<b>bold</b>",
        "reference_gold_score": None,
        "policies": {"sft": {"response": "</div><img src=x>", "rm_score": 0.5, "gold_score": None}},
    }
    write_page(tmp_path / "report.html", "", page_of(result, [], [sample]))
    text = (tmp_path / "report.html").read_text()
    assert "<script>alert" not in text and "<img src=x" not in text and "<b>bold" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text


def test_a_model_without_a_run_directory_shows_a_note_instead_of_a_curve(result, tmp_path) -> None:
    write_page(tmp_path / "report.html", "", page_of(result, ["owner/model"], []))
    assert "owner/model has no metrics.jsonl" in (tmp_path / "report.html").read_text()


def test_a_series_skips_rows_without_the_metric() -> None:
    steps, values = series([{"step": 0, "a": 1.0}, {"step": 1}, {"step": 2, "a": 3.0}], "a")
    assert steps.tolist() == [0, 2] and values.tolist() == [1, 3]


def test_smoothing_keeps_a_constant_and_averages_neighbours() -> None:
    assert smooth(torch.ones(7).numpy(), 3).tolist() == [1] * 7
    assert smooth(torch.tensor([0.0, 3.0, 6.0, 0.0]).numpy(), 3).tolist() == [1.5, 3, 3, 3]
