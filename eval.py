"""Stage 4, evaluation: what did each stage gain, and what did it cost?

Papers: The N+ Implementation Details of RLHF with PPO, section 5 (ROUGE, reward model accuracy, KL, win rate);
Reinforcement learning for question answering in programming domain (SO), whose policies answer each question ten times.
In: sft.validation.jsonl, comparisons.validation.jsonl, policies and reward models. Out: a table, eval.json,
samples.jsonl, and report.html with the curves of all stages and the samples side by side.

    python eval.py                                                             # the embedded default, recipe tiny
    python eval.py tldr --policies sft runs/tldr/sft ppo runs/tldr/ppo --reward-model runs/tldr/rm --dtype bfloat16
    python eval.py stackoverflow --encoder roberta-large --encoder-layer 17
"""

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data import site
from data.label import load_labels
from data.tiny import gold_score
from nanorlhf import answer_report, distributed
from nanorlhf.answers import sample_answers
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.dataset import Demonstration, load_comparisons, load_demonstrations, write_jsonl
from nanorlhf.encoder import bert_score, load_encoder
from nanorlhf.errors import InputError
from nanorlhf.logprobs import response_logprobs
from nanorlhf.metrics import (
    bootstrap_interval,
    compare,
    metric_at_k,
    mrr_at_k,
    rouge,
    rouge_scores,
    sentence_bleu,
    spearman_matrix,
    wilson_interval,
    win_rate,
)
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, micro_batches, right_pad
from nanorlhf.ppo import eos_masks
from nanorlhf.report import table, write_report
from nanorlhf.reward import end_scores, pair_scores, response_scores
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from nanorlhf.tracking import write_json


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path = Path("runs/tldr/data")
    """directory of sft.validation.jsonl and comparisons.validation.jsonl"""
    out: Path = Path("runs/tldr/eval")
    """directory of eval.json, samples.jsonl and report.html"""
    policies: tuple[str, ...] = ("sft", "runs/tldr/sft", "ppo", "runs/tldr/ppo")
    """pairs of a name and its checkpoint directory or Hub id; the first is the reference of the KL"""
    reward_model: str | None = "runs/tldr/rm"
    """checkpoint directory or Hub id; None leaves its scores out"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first policy's"""
    seed: int = 44413
    """fixes the samples"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward passes"""

    num_queries: int | None = None
    """validation queries that each policy answers, from the top of the file; None: all"""
    batch_size: int = 64
    """responses sampled and scored at once; changes memory, not the result"""
    max_query_length: int = 512
    """longest query in tokens"""
    response_length: int = 53
    """tokens sampled at most, EOS included"""
    max_response_length: int = 169
    """longest response of a comparison or reference in tokens, EOS included"""
    temperature: float = 0.01
    """of the responses that are judged; 0 is greedy"""
    kl_temperature: float = 0.7
    """of the responses on which the KL is estimated: that of PPO's rollouts"""
    gold: bool = False
    """score responses with the embedded world's labeller, and count wins against the references by it"""
    num_report_samples: int = 24
    """queries whose responses stand in report.html; samples.jsonl has all"""
    overwrite: bool = False
    """replace an evaluation that --out already holds"""


@dataclass(frozen=True, kw_only=True)
class AnswerArgs:
    data: Path = Path("runs/stackoverflow/data")
    """directory of sft.validation.jsonl, comparisons.validation.jsonl and scored.validation.jsonl"""
    out: Path = Path("runs/stackoverflow/eval")
    """directory of eval.json, samples.jsonl and report.html"""
    policies: tuple[str, ...] = ("sft", "runs/stackoverflow/sft", "ppo", "runs/stackoverflow/ppo")
    """pairs of a name and its checkpoint directory or Hub id; each is compared with the one before it"""
    regression_model: str | None = "runs/stackoverflow/rm_regression"
    """reward model: checkpoint directory or Hub id; None leaves its scores out"""
    contrastive_model: str | None = "runs/stackoverflow/rm_contrastive"
    """reward model: checkpoint directory or Hub id; None leaves its scores out"""
    encoder: str | None = None
    """of BERTScore: directory or Hub id; None leaves it out"""
    encoder_layer: int | None = None
    """whose token vectors BERTScore compares, such as 17 of roberta-large; None: the last"""
    labels: Path | None = None
    """answers marked useful or not by `python -m data.label`; None leaves MRR@k out"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first policy's"""
    seed: int = 1
    """fixes the samples and the resamples"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward passes"""

    num_queries: int | None = None
    """validation questions that each policy answers, from the top of the file; None: all"""
    num_samples: int = 10
    """answers to each question"""
    batch_size: int = 64
    """answers sampled and scored at once; changes memory, not the result"""
    max_query_length: int = 512
    """longest query in tokens"""
    response_length: int = 256
    """tokens sampled at most, EOS included"""
    max_response_length: int = 512
    """longest response of the data in tokens, EOS included"""
    temperature: float = 1.0
    """of the answers; 0 is greedy"""
    top_k: int = 50
    """only so many of the likeliest tokens are sampled; 0: all"""
    top_p: float = 0.9
    """only the likeliest tokens that reach this probability together are sampled; 1: all"""
    no_repeat_ngram_size: int = 2
    """no n-gram of question and answer comes twice; 0: off"""
    ranks: Literal["within", "pooled"] = "within"
    """of Spearman's correlation: within each question, or over all answers"""
    num_resamples: int = 2000
    """of the questions, for the 95% intervals"""
    gold: bool = False
    """score answers with the embedded site's own function"""
    num_report_samples: int = 24
    """questions whose first answers stand in report.html; samples.jsonl has all"""
    overwrite: bool = False
    """replace an evaluation that --out already holds"""


RECIPES = {
    "tiny": (
        "the embedded world, judged by the labeller that PPO never saw",
        Args(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/eval"),
            policies=("sft", "runs/tiny/sft", "ppo", "runs/tiny/ppo"),
            reward_model="runs/tiny/rm",
            seed=1,
            num_queries=512,
            max_query_length=80,
            response_length=24,
            max_response_length=24,
            gold=True,
        ),
    ),
    "tldr": ("N+ section 5: temperature 0.01, 53 tokens", Args()),
    "stackoverflow": ("SO: ten answers a question, top-k 50, top-p 0.9, no bigram twice", AnswerArgs()),
    "stackoverflow-tiny": (
        "the embedded Q&A site, judged by a function that training never saw",
        AnswerArgs(
            data=Path("runs/site/data"),
            out=Path("runs/site/eval"),
            policies=("base", "runs/site/base", "sft", "runs/site/sft", "ppo", "runs/site/ppo"),
            regression_model="runs/site/rm_regression",
            contrastive_model="runs/site/rm_contrastive",
            num_queries=256,
            batch_size=256,
            max_query_length=64,
            response_length=48,
            max_response_length=64,
            gold=True,
        ),
    ),
}


@torch.no_grad()
def kl_to(ref_policy: GPT, policy: GPT, query: Tensor, response: Tensor, tokenizer: Tokenizer, args: Args) -> Tensor:
    """Nats a response (B,): sum over its tokens of log policy - log reference, both tempered, on the policy's own
    samples. Its mean estimates KL(policy || reference) without bias (k1); a single one may be negative."""
    _, padding_mask, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)  # (B, T)
    kl = []
    pieces = (micro_batches(rows, args.batch_size) for rows in (query, response, padding_mask))
    for q, r, padding in zip(*pieces, strict=True):
        arguments = torch.cat((q, r), 1), torch.cat((q != tokenizer.pad_id, ~padding), 1), padding, args.kl_temperature
        logprobs, ref_logprobs = (response_logprobs(model, *arguments)[0] for model in (policy, ref_policy))
        kl.append((logprobs - ref_logprobs).sum(1))
    return torch.cat(kl)


@torch.no_grad()
def rm_scores(model: ScalarModel, query: Tensor, response: Tensor, pad_id: int, batch_size: int) -> list[float]:
    """The reward model at the last token of each response. Without the EOS trick: that is PPO's, not the model's."""
    query_response = torch.cat((query, response), dim=1)  # (B, Q + T)
    pieces = micro_batches(query_response, batch_size)
    return torch.cat([end_scores(model, piece, query.size(1), pad_id) for piece in pieces]).tolist()


@torch.no_grad()
def judge_reward_model(model: ScalarModel, args: Args, tokenizer: Tokenizer) -> dict[str, float | int | None]:
    """How often it ranks the validation pairs as the labeller did, and, where that is known, as the gold score does."""
    limits = tokenizer, args.max_query_length, args.max_response_length
    rows = load_comparisons(args.data / "comparisons.validation.jsonl", *limits)
    right, agrees = [], []
    for batch in tqdm(micro_batches(rows, args.batch_size), desc="reward model", leave=False):
        margins = torch.sub(*pair_scores(model, batch, tokenizer.pad_id)).tolist()
        right += [margin > 0 for margin in margins]  # a tie is wrong
        if args.gold:
            metas = [row.record["meta"] for row in batch]
            gold = [meta["gold_chosen"] - meta["gold_rejected"] for meta in metas]
            agrees += [(margin > 0) == (g > 0) for margin, g in zip(margins, gold, strict=True) if g != 0]
    return {
        "validation_accuracy": fmean(right),
        "validation_accuracy_ci": wilson_interval(fmean(right), len(right)),
        "num_pairs": len(right),
        "gold_agreement": fmean(agrees) if agrees else None,
    }


def named_policies(words: tuple[str, ...]) -> dict[str, str]:
    """("sft", DIR, "ppo", DIR) -> {"sft": DIR, "ppo": DIR}"""
    names, places = words[::2], words[1::2]
    if not words or len(names) != len(places):
        raise InputError(f"--policies {' '.join(words)}: write pairs of a name and a checkpoint, such as sft runs/sft.")
    if len(set(names)) != len(names) or "reference" in names:
        raise InputError(f"--policies {' '.join(words)}: names must differ, and `reference` is that of the data.")
    return dict(zip(names, places, strict=True))


def check_out(out: Path, overwrite: bool) -> None:
    if (out / "eval.json").exists() and not overwrite:
        raise InputError(f"--out {out} holds an evaluation: name another directory, or pass --overwrite.")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out} is a file: name a directory.")


def common_tokenizer(named: str | None, places: list[str]) -> Tokenizer:
    """The one that is named, or the first model's, which then has to be that of all."""
    tokenizer = load_tokenizer(named or places[0])
    for place in places:
        if named is None and load_tokenizer(place).backend.get_vocab() != tokenizer.backend.get_vocab():
            raise InputError(f"the tokenizer of {place} differs from that of {places[0]}: compare models of one.")
    return tokenizer


def load_policy(place: str, rows: list[Demonstration], response_length: int, tokenizer: Tokenizer, device) -> GPT:
    """A policy that can answer `rows`."""
    policy = load_gpt(place, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    check_vocabulary(tokenizer, policy.config.vocab_size, place)
    needed = max(len(row.query) for row in rows) + response_length
    if needed > policy.config.n_ctx:
        raise InputError(
            f"the longest query and --response-length make {needed} tokens, more than the {policy.config.n_ctx} "
            f"positions of {place}: lower --response-length."
        )
    return policy


def main(args: Args | AnswerArgs) -> dict:
    return judge_answers(args) if isinstance(args, AnswerArgs) else judge_summaries(args)


# ----------------------------------------------------------------------------------------------- one answer a query: N+
def judge_summaries(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    check_ranges(args)
    check_out(args.out, args.overwrite)
    device = distributed.setup(args.device)
    policies = named_policies(args.policies)
    first = next(iter(policies))
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values(), *filter(None, [args.reward_model])])
    limits = tokenizer, args.max_query_length, args.max_response_length
    rows = load_demonstrations(args.data / "sft.validation.jsonl", *limits)[: args.num_queries]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    to_answer = rows, args.response_length, tokenizer, device
    ref_policy = load_policy(policies[first], *to_answer)
    reward_model = load_scalar(args.reward_model, device) if args.reward_model else None

    # --------------------------------------------------------------------------------------------------- 2. references
    queries, references = ([row.record[name] for row in rows] for name in ("query", "response"))
    reference_golds = [gold_score(q, r) for q, r in zip(queries, references, strict=True)] if args.gold else None
    with autocast, torch.no_grad():
        reference_scores = [
            response_scores(reward_model, batch, tokenizer.pad_id, "left")
            for batch in micro_batches(rows if reward_model else [], args.batch_size)
        ]
    reference = {
        "gold_score": fmean(reference_golds) if args.gold else None,
        "rm_score": torch.cat(reference_scores).mean().item() if reward_model else None,
        "response_length": fmean(len(row.response) for row in rows),
    }

    # ----------------------------------------------------------------------------------------------------- 3. policies
    results, columns = {}, {}
    for name, place in tqdm(policies.items(), desc="policies"):
        policy = ref_policy if name == first else load_policy(place, *to_answer)
        with autocast:
            asked = [row.query for row in rows], tokenizer, 1, args.response_length, args.batch_size, args.seed
            query, response = sample_answers(policy, *asked, args.temperature)
            scores = reward_model and rm_scores(reward_model, query, response, tokenizer.pad_id, args.batch_size)
            kl = kl_to(ref_policy, policy, *sample_answers(policy, *asked, args.kl_temperature), tokenizer, args)
        texts = [tokenizer.decode(ids) for ids in response.tolist()]
        golds = [gold_score(q, text) for q, text in zip(queries, texts, strict=True)] if args.gold else None
        wins = win_rate(golds, reference_golds) if args.gold else None
        eos_index, _, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
        results[name] = {
            "gold_win_rate": wins,
            "gold_win_rate_ci": wilson_interval(wins, len(rows)) if args.gold else None,
            "gold_score": fmean(golds) if args.gold else None,
            "rm_score": fmean(scores) if scores else None,
            **rouge(references, texts),
            "eos_rate": (response == tokenizer.eos_id).any(1).float().mean().item(),
            "kl": kl.mean().item(),
            "kl_standard_error": kl.std().item() / len(rows) ** 0.5,
            "response_length": (eos_index + 1).float().mean().item(),
        }
        columns[name] = [
            {"response": text, "rm_score": scores and scores[i], "gold_score": golds and golds[i]}
            for i, text in enumerate(texts)
        ]

    # ------------------------------------------------------------------------------------- 4. the reward model, and out
    with autocast:
        judged = judge_reward_model(reward_model, args, tokenizer) if reward_model else None
    result = {
        "policies": results,
        "reference": reference,
        "reward_model": judged,
        "num_queries": len(rows),
        "args": json.loads(json.dumps(asdict(args), default=str)),
    }
    samples = [
        {
            "query": query,
            "reference": references[i],
            "reference_gold_score": reference_golds and reference_golds[i],
            "policies": {name: column[i] for name, column in columns.items()},
        }
        for i, query in enumerate(queries)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eval.json").unlink(missing_ok=True)  # of the evaluation that this one replaces
    write_jsonl(args.out / "samples.jsonl", samples)
    runs = [place for place in (*policies.values(), args.reward_model) if place]
    write_report(args.out / "report.html", result, runs, samples[: args.num_report_samples])
    write_json(args.out / "eval.json", result)  # last: where it is, the evaluation is whole
    print(table(result))
    print(f"\nwritten: {args.out / 'eval.json'}, samples.jsonl, and to look at: {args.out / 'report.html'}")
    return result


# ------------------------------------------------------------------------------------------ ten answers a question: SO
OVERLAP = ("bleu", "rouge1", "rouge2", "bertscore")  # metrics that compare an answer with the reference


def judge_answers(args: AnswerArgs) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    check_ranges(args)
    check_out(args.out, args.overwrite)
    device = distributed.setup(args.device)
    policies = named_policies(args.policies)
    judges = {"rm_regression": args.regression_model, "rm_contrastive": args.contrastive_model}
    judges = {name: place for name, place in judges.items() if place}
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values(), *judges.values()])
    limits = tokenizer, args.max_query_length, args.max_response_length
    rows = load_demonstrations(args.data / "sft.validation.jsonl", *limits)[: args.num_queries]
    queries, references = ([row.record[name] for row in rows] for name in ("query", "response"))
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    reward_models = {name: load_scalar(place, device) for name, place in judges.items()}
    encoder = load_encoder(args.encoder, args.encoder_layer, device) if args.encoder else None

    def measure(responses: Tensor, query: Tensor) -> tuple[list[str], dict[str, np.ndarray]]:
        """Texts and every metric (questions, n) of the answers, n to each question. [SO table 1]"""
        texts = [tokenizer.decode(ids) for ids in responses.tolist()]
        n = len(texts) // len(rows)
        truths = [reference for reference in references for _ in range(n)]
        rouges = rouge_scores(truths, texts)
        columns = {"bleu": sentence_bleu(truths, texts), "rouge1": rouges["rouge1"], "rouge2": rouges["rouge2"]}
        if encoder:
            columns["bertscore"] = bert_score(truths, texts, encoder)
        with autocast:
            for name, model in reward_models.items():
                columns[name] = rm_scores(model, query, responses, tokenizer.pad_id, args.batch_size)
        if args.gold:
            asked = [question for question in queries for _ in range(n)]
            columns["gold_score"] = [site.gold_score(q, text) for q, text in zip(asked, texts, strict=True)]
        return texts, {name: np.array(column).reshape(len(rows), n) for name, column in columns.items()}

    # -------------------------------------------------------------------------------------------------- 2. the answers
    measured, texts, results = {}, {}, {}  # by policy
    for name, place in tqdm(policies.items(), desc="policies"):
        policy = load_policy(place, rows, args.response_length, tokenizer, device)
        with autocast:
            query, response = sample_answers(
                policy, [row.query for row in rows], tokenizer, args.num_samples, args.response_length,
                args.batch_size, args.seed, args.temperature, args.top_k, args.top_p, args.no_repeat_ngram_size,
            )  # fmt: skip
        texts[name], measured[name] = measure(response, query)
        eos_index, _, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
        results[name] = {
            "eos_rate": (response == tokenizer.eos_id).any(1).float().mean().item(),
            "response_length": (eos_index + 1).float().mean().item(),
        }
    query = left_pad([row.query for row in rows], tokenizer.pad_id).to(device)
    response = right_pad([row.response for row in rows], tokenizer.pad_id).to(device)
    _, human = measure(response, query)

    samples = [
        {
            "query": question,
            "reference": references[i],
            "policies": {
                name: [
                    {"response": texts[name][i * args.num_samples + j]}
                    | {metric: float(scores[i, j]) for metric, scores in measured[name].items()}
                    for j in range(args.num_samples)
                ]
                for name in policies
            },
        }
        for i, question in enumerate(queries)
    ]
    labels = load_labels(args.labels, samples) if args.labels else None  # policy -> (questions, n), NaN: no label

    # ------------------------------------------------------------------------------------------------ 3. the statistics
    ks = range(1, args.num_samples + 1)
    for name, columns in measured.items():
        names, spearman = spearman_matrix(columns, within_questions=args.ranks == "within")  # [SO spearman]
        results[name] |= {
            "metrics": {
                metric: {
                    "mean": float(scores.mean()),
                    "std": float(scores.std()),
                    "mean_ci": bootstrap_interval(scores, args.seed, args.num_resamples),
                    # [SO metric@k] the best of k answers, expected
                    "at_k": [metric_at_k(scores, k) for k in ks],
                }
                for metric, scores in columns.items()
            },
            "spearman": {"metrics": names, "matrix": spearman.tolist()},
        }
        if labels is not None:
            labelled = ~np.isnan(labels[name]).any(axis=1)  # (questions,)
            results[name]["num_labelled"] = int(labelled.sum())
            if labelled.any():
                results[name]["mrr_at_k"] = {  # [SO mrr@k]
                    metric: [mrr_at_k(scores[labelled], labels[name][labelled], k) for k in ks]
                    for metric, scores in columns.items()
                }
    differences = [
        {"ours": ours, "theirs": theirs, "metric": metric}
        | compare(measured[ours][metric], measured[theirs][metric], args.seed, args.num_resamples)
        for theirs, ours in itertools.combinations(policies, 2)
        for metric in measured[ours]
    ]
    result = {
        "policies": results,
        "reference": {metric: float(human[metric].mean()) for metric in human if metric not in OVERLAP},
        "differences": differences,
        "num_questions": len(rows),
        "num_samples": args.num_samples,
        "encoder": args.encoder,
        "args": json.loads(json.dumps(asdict(args), default=str)),
    }

    # ------------------------------------------------------------------------------------------------------- 4. and out
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eval.json").unlink(missing_ok=True)  # of the evaluation that this one replaces
    write_jsonl(args.out / "samples.jsonl", samples)
    runs = [*policies.values(), *judges.values()]
    answer_report.write_report(args.out / "report.html", result, measured, runs, samples[: args.num_report_samples])
    write_json(args.out / "eval.json", result)  # last: where it is, the evaluation is whole
    print(answer_report.tables(result))
    print(f"\nwritten: {args.out / 'eval.json'}, samples.jsonl, and to look at: {args.out / 'report.html'}")
    return result


if __name__ == "__main__":
    command_line(main, RECIPES)
