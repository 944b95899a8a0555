"""Stage 4, evaluation: what did each stage gain, and what did it cost?

Papers: The N+ Implementation Details of RLHF with PPO, section 5 (ROUGE, reward model accuracy, KL, win rate), and
details 16, 18 and 19 (Table 5, calibration, implicit rewards);
Reinforcement learning for question answering in programming domain (SO), whose policies answer each question ten times;
Coarse-Tuning Models of Code with Reinforcement Learning Feedback (RLCF), whose programs are compiled and executed;
Is Crowdsourcing Breaking Your Bank? (STR), whose rewards come of a ranking without people, so that people judge it.
In: sft.validation.jsonl, comparisons.validation.jsonl or code.test.jsonl, policies and reward models. Out: a table,
eval.json, samples.jsonl, and report.html with the curves of all stages and the samples side by side.

    python eval.py                                                             # the embedded default, recipe tiny
    python eval.py tldr --policies sft runs/tldr/sft ppo runs/tldr/ppo --reward-model runs/tldr/rm --dtype bfloat16
    python eval.py tldr-rm --reward-models rm runs/tldr/rm rm runs/tldr/rm_seed2 dpo runs/tldr/dpo     # Table 5
    python eval.py stackoverflow --encoder roberta-large --encoder-layer 17
    python eval.py rlcf --policies base runs/rlcf/base_bench rlcf runs/rlcf/ppo_bench --workers 16
    python eval.py str --rankings ana.jsonl ben.jsonl --self-rank runs/str/data/self_rank.validation.jsonl \\
        --encoder google-bert/bert-base-uncased
"""

import itertools
import json
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data import self_rank, site
from data.label import load_labels, printable
from data.tiny import gold_score
from nanorlhf import distributed
from nanorlhf.answers import sample_answers
from nanorlhf.checkpoint import holds_reward_model, load_gpt, load_scalar, read_config
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.code.compilers import JavaCompiler, PythonCompiler, first_error
from nanorlhf.code.error_profile import error_category, error_profile
from nanorlhf.code.execution import isolation, program_of, run_programs
from nanorlhf.dataset import (
    Comparison,
    Demonstration,
    field,
    iter_jsonl,
    load_comparisons,
    load_demonstrations,
    load_programs,
    response_ids,
    write_jsonl,
)
from nanorlhf.dpo import implicit_pair_rewards, implicit_rewards
from nanorlhf.encoder import bert_score, load_encoder
from nanorlhf.errors import InputError
from nanorlhf.evals.judge import (
    WIN,
    Endpoint,
    Pair,
    ask_all,
    completions_url,
    judge_pairs,
    key_from,
    load_verdicts,
    parse,
)
from nanorlhf.logprobs import response_logprobs
from nanorlhf.metrics import (
    bootstrap_interval,
    compare,
    metric_at_k,
    mrr_at_k,
    pass_at_k,
    rouge,
    rouge_scores,
    sentence_bleu,
    spearman_matrix,
    wilson_interval,
    win_rate,
)
from nanorlhf.metrics.agreement import (
    RankedQuestion,
    annotator_kappas,
    consensus,
    kendall_tau,
    load_rankings,
    order_probability,
    pairwise_agreement,
)
from nanorlhf.metrics.replies import bleu4, google_bleu, meteor, meteor_matching, squad_scores
from nanorlhf.metrics.reward_accuracy import accuracy_table, calibration, pair_groups, score_statistics
from nanorlhf.metrics.token_rewards import token_rewards
from nanorlhf.metrics.token_shift import shift_shares, text_pieces, to_terminal, token_ranks
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, micro_batches, right_pad
from nanorlhf.ppo import eos_masks
from nanorlhf.report import answer_report, program_report, reply_report, reward_report, token_report
from nanorlhf.report.cluster_figure import cluster_figure
from nanorlhf.report.length_figures import length_figures
from nanorlhf.report.page import length_section, table, write_report
from nanorlhf.reward import end_scores, load_function, pair_scores, response_scores
from nanorlhf.selfrank.text_rank import rank_order
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, token_bytes
from nanorlhf.training.run import write_json


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
    implicit_rewards: tuple[str, ...] = ()
    """[N+ 19] names of --policies, trained by DPO from the first one, that rank pairs beside the reward model"""
    dpo_beta: float = 0.05
    """of their reward, in score units a nat: that of their training"""
    shift_base: str | None = None
    """name of the policy whose ranks colour the responses, of the model before alignment; None: the first"""
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
    judge_url: str | None = None
    """OpenAI-compatible endpoint whose model judges the responses, such as http://localhost:8000/v1; None: no judge"""
    judge_model: str | None = None
    """name of that model, as the endpoint knows it"""
    judge_key_variable: str | None = None
    """environment variable that holds the endpoint's key, such as OPENAI_API_KEY; None sends no key"""
    judge_file: Path | None = None
    """verdicts given before, such as verdicts.jsonl of another evaluation, in place of an endpoint"""
    judge_against: str = "reference"
    """what responses are judged against: `reference`, or the name of a policy"""
    judge_both_orders: bool = False
    """ask about each pair in both orders; where the verdicts differ it is a tie"""
    judge_max_calls: int = 1000
    """requests sent at most, tries included; what is judged by then stays, and the next run goes on behind it"""
    judge_cache: Path = Path("runs/judge.jsonl")
    """the endpoint's answers, so that none is paid for twice; only appended to"""
    judge_workers: int = 8
    """requests at a time"""
    judge_timeout: float = 60.0
    """seconds a request"""
    judge_temperature: float | None = 0.0
    """of the judge; None leaves it to the endpoint, as some models demand"""
    judge_max_tokens: int | None = 512
    """tokens of an answer at most; None leaves it to the endpoint, as some models demand"""
    judge_dry_run: bool = False
    """print the prompts and how many there are; ask nobody, write nothing"""
    num_report_samples: int = 24
    """queries whose responses stand in report.html; samples.jsonl has all"""
    overwrite: bool = False
    """replace an evaluation that --out already holds"""


@dataclass(frozen=True, kw_only=True)
class RewardArgs:
    data: Path = Path("runs/tldr/data")
    """directory of comparisons.validation.jsonl, sft.validation.jsonl and perhaps comparisons.cnndm.jsonl"""
    out: Path = Path("runs/tldr/eval_rm")
    """directory of eval.json and report.html"""
    reward_models: tuple[str, ...] = ("rm", "runs/tldr/rm", "dpo", "runs/tldr/dpo")
    """pairs of a name and a checkpoint directory or Hub id; a name that comes again is another seed of the same model,
    a policy stands for its implicit reward"""
    ref_policy: str = "runs/tldr/sft"
    """[N+ 19] what the policies were trained from by DPO: checkpoint directory or Hub id"""
    dpo_beta: float = 0.05
    """of their reward, in score units a nat: that of their training"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first reward model's"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward passes"""

    batch_size: int = 64
    """pairs scored at once; changes memory, not the result"""
    max_query_length: int = 512
    """longest query in tokens"""
    max_cnndm_query_length: int = 1919
    """the same of comparisons.cnndm.jsonl"""
    max_response_length: int = 169
    """longest response in tokens, EOS included"""
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


@dataclass(frozen=True, kw_only=True)
class ProgramArgs:
    data: Path = Path("runs/rlcf/data")
    """directory of code.test.jsonl, problems with tests"""
    out: Path = Path("runs/rlcf/eval")
    """directory of eval.json, samples.jsonl and report.html"""
    policies: tuple[str, ...] = (
        *("base", "runs/rlcf/base_bench", "sft", "runs/rlcf/sft_bench"),
        *("mono", "runs/rlcf/mono_bench", "rlcf", "runs/rlcf/ppo_bench"),
    )
    """pairs of a name and its checkpoint directory or Hub id"""
    curves: tuple[str, ...] = ("runs/rlcf/ppo",)
    """run directories whose training curves the report shows beside those of the policies, for an ablation several"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first policy's"""
    seed: int = 1
    """fixes the samples and the resamples"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward passes"""

    num_queries: int | None = None
    """problems that each policy is given, from the top of the file; None: all"""
    num_samples: int = 100
    """responses to each problem at each temperature"""
    ks: tuple[int, ...] = (1, 10, 100)
    """of pass@k, exec@k and comp@k, ascending; the last is --num-samples at most"""
    temperatures: tuple[float, ...] = (0.2, 0.6, 0.8)
    """of the responses, ascending; the best one is shown; 0 is greedy"""
    top_p: float = 0.95
    """only the likeliest tokens that reach this probability together are sampled; 1: all"""
    batch_size: int = 64
    """responses sampled and checked at once; changes memory, not the result"""
    max_query_length: int = 500
    """longest query in tokens"""
    response_length: int = 256
    """tokens sampled at most, EOS included"""
    timeout: float = 10.0
    """seconds of wall clock that a program may run"""
    workers: int = 8
    """programs compiled and run at a time"""
    num_resamples: int = 2000
    """of the problems, for the 95% intervals"""
    num_report_samples: int = 24
    """problems whose first responses stand in report.html; samples.jsonl has all"""
    overwrite: bool = False
    """replace an evaluation that --out already holds"""


@dataclass(frozen=True, kw_only=True)
class ReplyArgs:
    data: Path = Path("runs/str/data")
    """directory of sft.{split}.jsonl and, to judge the reward model, comparisons.validation.jsonl"""
    split: Literal["validation", "test"] = "validation"
    """whose questions are answered"""
    out: Path = Path("runs/str/eval")
    """directory of eval.json, samples.jsonl and report.html"""
    policies: tuple[str, ...] = (
        *("original", "openai-community/gpt2", "full", "runs/str/sft", "adapter", "runs/str/adapter"),
        *("bitfit", "runs/str/bitfit", "lora", "runs/str/lora", "str", "runs/str/ppo"),
    )
    """pairs of a name and its checkpoint directory or Hub id; the last is compared with each of those before it"""
    reward_model: str | None = "runs/str/rm"
    """checkpoint directory or Hub id; None leaves its scores out"""
    rankings: tuple[Path, ...] = ()
    """answers ranked by people, files of `python -m data.rank`; none leaves the human study out"""
    self_rank: Path | None = None
    """answers ranked by `python -m data.self_rank`, such as runs/str/data/self_rank.validation.jsonl; of one of its
    questions Figure 2 is drawn"""
    encoder: str | None = None
    """of Figure 2, directory or Hub id; in the paper one that had no part in the ranking; None leaves it out"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the first policy's"""
    seed: int = 1
    """fixes the samples and the resamples"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward passes"""

    num_queries: int | None = None
    """questions that each policy answers, from the top of the file, 500 of SQuAD in the paper; None: all"""
    batch_size: int = 64
    """replies sampled and scored at once; changes memory, not the result"""
    max_query_length: int = 512
    """longest query in tokens"""
    response_length: int = 100
    """tokens sampled at most, EOS included"""
    max_response_length: int = 100
    """longest response of the data in tokens, EOS included"""
    temperature: float = 0.8
    """of the replies, that of the paper's sampling; 0 is greedy"""
    top_p: float = 0.95
    """only the likeliest tokens that reach this probability together are sampled; 1: all"""
    num_resamples: int = 2000
    """of the questions, for the 95% intervals"""
    gold: str | None = None
    """FILE.py:FUNCTION, the truth where it is known: function(query, reply) -> 0 to 1, 1 where the reply is right"""
    num_report_samples: int = 24
    """questions whose replies stand in report.html; samples.jsonl has all"""
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
    "tldr-rm": ("N+ Table 5 and Figure 7: reward models and DPO, seeds beside each other", RewardArgs()),
    "tiny-rm": (
        "the same in the embedded world",
        RewardArgs(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/eval_rm"),
            reward_models=("rm", "runs/tiny/rm", "dpo", "runs/tiny/dpo"),
            ref_policy="runs/tiny/sft",
            max_query_length=80,
            max_response_length=24,
        ),
    ),
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
    "rlcf": ("RLCF: 100 programs a problem at three temperatures, compiled and executed", ProgramArgs()),
    "rlcf-tiny": (
        "the embedded world of programs",
        ProgramArgs(
            data=Path("runs/programs/bench"),
            out=Path("runs/programs/eval"),
            policies=("sft", "runs/programs/sft_bench", "rlcf", "runs/programs/ppo_bench"),
            curves=("runs/programs/ppo",),
            num_samples=4,
            ks=(1, 4),
            batch_size=256,
            max_query_length=160,
            response_length=128,
            timeout=3.0,
            workers=2,
        ),
    ),
    "str": ("STR: a reply a question at temperature 0.8 and top-p 0.95, and who agrees with the ranking", ReplyArgs()),
    "str-tiny": (
        "the embedded town, whose right replies are known",
        ReplyArgs(
            data=Path("runs/town/data"),
            out=Path("runs/town/eval"),
            policies=("full", "runs/town/full", "str", "runs/town/ppo"),
            reward_model="runs/town/rm",
            self_rank=Path("runs/town/data/self_rank.validation.jsonl"),
            batch_size=256,
            max_query_length=96,
            response_length=32,
            max_response_length=32,
            gold="data/town.py:gold_score",
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


def judge_reward_model(margins: np.ndarray, rows: list[Comparison], gold: bool) -> dict[str, float | int | None]:
    """How often it ranks the validation pairs as the labeller did, and, where that is known, as the gold score does.

    margins (pairs,), score of the chosen response less that of the rejected one.
    """
    metas = [row.record["meta"] for row in rows] if gold else []
    golds = [meta["gold_chosen"] - meta["gold_rejected"] for meta in metas]
    agrees = [(margin > 0) == (g > 0) for margin, g in zip(margins, golds, strict=gold) if g != 0]
    accuracy = fmean(margins > 0)  # a tie is wrong
    return {
        "validation_accuracy": accuracy,
        "validation_accuracy_ci": wilson_interval(accuracy, len(margins)),
        "num_pairs": len(margins),
        "gold_agreement": fmean(agrees) if agrees else None,
    }


def load_judge(args: Args, policies: dict[str, str]) -> Callable[[list[Pair]], tuple[list[dict], dict]] | None:
    """A function from pairs to verdicts, a row each, and an account; None without --judge flags. All of the flags are
    checked here, before anything slow."""
    if not (args.judge_url or args.judge_file):
        if args.judge_dry_run:
            raise InputError("--judge-dry-run: there is nobody to ask: name an endpoint with --judge-url.")
        return None
    if args.judge_url and args.judge_file:
        raise InputError("--judge-url and --judge-file: pass only one, verdicts of two judges make no rate.")
    if args.judge_against not in ("reference", *policies) or {args.judge_against} == policies.keys():
        raise InputError(f"--judge-against {args.judge_against}: write `reference`, or one policy of several.")
    if args.judge_file:
        known = load_verdicts(args.judge_file)

        def look_up(pairs: list[Pair]) -> tuple[list[dict], dict]:
            found = [known.get(Pair(*map(str.strip, pair)), "unanswered") for pair in pairs]
            rows = [{**pair._asdict(), "preferred": preferred} for pair, preferred in zip(pairs, found, strict=True)]
            return rows, {"name": str(args.judge_file)}

        return look_up
    if not args.judge_model:
        raise InputError(f"--judge-url {args.judge_url}: name the model that judges with --judge-model.")
    if args.judge_cache.is_dir():
        raise InputError(f"--judge-cache {args.judge_cache} is a directory: name a file.")
    endpoint = Endpoint(
        url=completions_url("--judge-url", args.judge_url),
        model=args.judge_model,
        key=key_from("--judge-key-variable", args.judge_key_variable) if args.judge_key_variable else None,
        temperature=args.judge_temperature,
        max_tokens=args.judge_max_tokens,
        max_calls=args.judge_max_calls,
        workers=args.judge_workers,
        timeout=args.judge_timeout,
    )
    account = {"name": f"{args.judge_model} at {args.judge_url}"}

    def ask(prompts: list[str]) -> dict[str, str]:
        if args.judge_dry_run:
            print("\n\n".join(f"{'-' * 80}\n{printable(prompt)}" for prompt in prompts))
            print(f"{'-' * 80}\n{len(prompts)} prompts for {account['name']}; nobody was asked, nothing is written")
            return {}
        answers, found = ask_all(prompts, endpoint, args.judge_cache)
        account.update(found)
        return answers

    return lambda pairs: (judge_pairs(pairs, args.seed, args.judge_both_orders, ask), account)


def agrees_with_judge(margins: list[float], rows: list[dict]) -> list[bool]:
    """Of each pair of which the judge prefers one: has r(ours) - r(theirs) the sign of its choice? 0 has neither."""
    sign = {"ours": 1, "theirs": -1}
    pairs = [(margin, row["preferred"]) for margin, row in zip(margins, rows, strict=True)]
    return [bool(np.sign(margin) == sign[choice]) for margin, choice in pairs if choice in sign]  # [N+ 17]


def verdict_counts(rows: list[dict], margins: list[float] | None) -> dict[str, float | int | tuple | None]:
    """How many pairs have a verdict, and whether the reward model's margins agree with those that are no tie."""
    counts = Counter(row["preferred"] for row in rows)
    agrees = agrees_with_judge(margins, rows) if margins else []
    return {
        "judge_pairs": sum(counts[name] for name in WIN),
        "judge_unparsed": counts["unparsed"],
        "judge_unanswered": counts["unanswered"],
        "rm_agreement": fmean(agrees) if agrees else None,
        "rm_agreement_ci": wilson_interval(fmean(agrees), len(agrees)) if agrees else None,
        "rm_agreement_pairs": len(agrees),
    }


def judge_policies(
    judge: Callable[[list[Pair]], tuple[list[dict], dict]],
    queries: list[str],
    answers: dict[str, list[str]],
    rm_columns: dict[str, list[float] | None],
    against: str,
) -> tuple[dict[str, list[dict]], dict[str, dict], dict]:
    """Verdicts a query of each policy that is not `against` itself, their numbers by policy, and those of them all."""
    names = [name for name in answers if name not in ("reference", against)]
    # by query, so that a cap leaves the policies judged on the same ones
    pairs = [(name, i) for i in range(len(queries)) for name in names]
    rows, account = judge([Pair(queries[i], answers[name][i], answers[against][i]) for name, i in pairs])
    theirs = rm_columns[against]
    margins = [rm_columns[name][i] - theirs[i] for name, i in pairs] if theirs else None
    verdicts, numbers = {}, {}
    for number, name in enumerate(names):
        mine = slice(number, None, len(names))
        verdicts[name] = rows[mine]
        wins = [WIN[row["preferred"]] for row in rows[mine] if row["preferred"] in WIN]
        numbers[name] = {
            "judge_win_rate": fmean(wins) if wins else None,
            "judge_win_rate_ci": wilson_interval(fmean(wins), len(wins)) if wins else None,
            **verdict_counts(rows[mine], margins and margins[mine]),
        }
    said = [parse(answer) for row in rows for answer in row.get("answers", ()) if answer]
    place = {"first_rate": fmean(letter == "A" for letter in said if letter) if any(said) else None}
    return verdicts, numbers, account | {"against": against} | verdict_counts(rows, margins) | place


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


def main(args: Args | RewardArgs | AnswerArgs | ProgramArgs | ReplyArgs) -> dict:
    if isinstance(args, RewardArgs):
        return judge_rewards(args)
    if isinstance(args, ReplyArgs):
        return judge_replies(args)
    if isinstance(args, ProgramArgs):
        return judge_programs(args)
    return judge_answers(args) if isinstance(args, AnswerArgs) else judge_summaries(args)


# ----------------------------------------------------------------------------------------------- one answer a query: N+
def judge_summaries(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    check_ranges(args)
    if not args.judge_dry_run:
        check_out(args.out, args.overwrite)
    device = distributed.setup(args.device)
    policies = named_policies(args.policies)
    judge = load_judge(args, policies)
    first = next(iter(policies))
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values(), *filter(None, [args.reward_model])])
    limits = tokenizer, args.max_query_length, args.max_response_length
    rows = load_demonstrations(args.data / "sft.validation.jsonl", *limits)[: args.num_queries]
    if args.shift_base not in (None, *policies):
        raise InputError(f"--shift-base {args.shift_base}: it must be a name of --policies.")
    unknown = set(args.implicit_rewards) - set(list(policies)[1:])
    if unknown:
        raise InputError(f"--implicit-rewards {min(unknown)}: name --policies behind the first, their reference.")
    judges = {"reward model": [args.reward_model]} if args.reward_model else {}
    judges |= {name: [policies[name]] for name in args.implicit_rewards}
    pairs = load_comparisons(args.data / "comparisons.validation.jsonl", *limits) if judges else []
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
    rm_columns = {"reference": reward_model and torch.cat(reference_scores).tolist()}
    reference = {
        "gold_score": fmean(reference_golds) if args.gold else None,
        "rm_score": torch.cat(reference_scores).mean().item() if reward_model else None,
        "response_length": fmean(len(row.response) for row in rows),
    }

    # ----------------------------------------------------------------------------------------------------- 3. policies
    results, columns, responses, tokens = {}, {}, {}, {}
    answers = {"reference": references}
    lengths = {"reference": [len(row.response) - 1 for row in rows]}  # tokens, without EOS
    for name, place in tqdm(policies.items(), desc="policies"):
        policy = ref_policy if name == first else load_policy(place, *to_answer)
        with autocast:
            asked = [row.query for row in rows], tokenizer, 1, args.response_length, args.batch_size, args.seed
            query, response = sample_answers(policy, *asked, args.temperature)
            scores = reward_model and rm_scores(reward_model, query, response, tokenizer.pad_id, args.batch_size)
            kl = kl_to(ref_policy, policy, *sample_answers(policy, *asked, args.kl_temperature), tokenizer, args)
            one = query[:1], response[:1], tokenizer, args.kl_temperature
            tokens[name] = token_rewards(place, policy, ref_policy, reward_model, *one)
        responses[name] = response
        texts = answers[name] = [tokenizer.decode(ids) for ids in response.tolist()]
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
        rm_columns[name] = scores
        lengths[name] = ((response != tokenizer.eos_id) & (response != tokenizer.pad_id)).sum(1).tolist()
        columns[name] = [
            {"response": text, "rm_score": scores and scores[i], "gold_score": golds and golds[i]}
            for i, text in enumerate(texts)
        ]

    # -------------------------------------------------------------------------------- 4. the judge; do longer ones win?
    figures, account = [], None
    if args.gold:
        golds = {name: [row["gold_score"] for row in column] for name, column in columns.items()}
        wins = {name: ((np.sign(np.subtract(g, reference_golds)) + 1) / 2).tolist() for name, g in golds.items()}
        figures += length_figures(lengths, wins, "reference", "the gold score")
    if judge:
        verdicts, numbers, account = judge_policies(judge, queries, answers, rm_columns, args.judge_against)
        if args.judge_dry_run:
            return {}
        results = {name: row | numbers.get(name, {}) for name, row in results.items()}
        wins = {name: [WIN.get(row["preferred"]) for row in column] for name, column in verdicts.items()}
        figures += length_figures(lengths, wins, args.judge_against, "the judge")

    # ------------------------------------------------------- 5. what changed token by token, the reward models, and out
    base_name = args.shift_base or first
    base = ref_policy if base_name == first else load_policy(policies[base_name], *to_answer)
    responses["reference"] = right_pad([row.response for row in rows], tokenizer.pad_id).to(device)
    spellings, shares = token_bytes(tokenizer), {}
    shifts: list[dict] = [{} for _ in rows]  # of each query: name -> pieces of the response with their ranks
    for name, response in responses.items():
        pieces = (micro_batches(x, args.batch_size) for x in (query, response))
        with autocast:
            ranks = torch.cat([token_ranks(base, q, r, tokenizer.pad_id) for q, r in zip(*pieces, strict=True)])
        shares[name] = shift_shares(ranks)
        for shift, ids, of_row in zip(shifts, response.tolist(), ranks.tolist(), strict=True):
            n = sum(rank > 0 for rank in of_row)
            shift[name] = text_pieces(ids[:n], of_row[:n], spellings)
    rewards = None
    if judges:
        measured = judges, ref_policy, first, {"validation": pairs}, rows, tokenizer, device, args
        rewards, margins = measure_rewards(*measured)
    result = {
        "policies": results,
        "reference": reference,
        "reward_model": judge_reward_model(margins["validation"]["reward model"][0], pairs, args.gold)
        if reward_model
        else None,
        "rewards": rewards,
        "judge": account,
        "token_shift": {"base": base_name, "shares": shares},
        "num_queries": len(rows),
        "args": json.loads(json.dumps(asdict(args), default=str)),
    }
    samples = [
        {
            "query": query,
            "reference": references[i],
            "reference_gold_score": reference_golds and reference_golds[i],
            "reference_rm_score": rm_columns["reference"] and rm_columns["reference"][i],
            "policies": {name: column[i] for name, column in columns.items()},
        }
        for i, query in enumerate(queries)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eval.json").unlink(missing_ok=True)  # of the evaluation that this one replaces
    write_jsonl(args.out / "samples.jsonl", samples)
    if judge:
        named = ({"policy": name, "against": args.judge_against} | row for name in verdicts for row in verdicts[name])
        write_jsonl(args.out / "verdicts.jsonl", named)
    runs = [place for place in (*policies.values(), args.reward_model) if place]
    shown = slice(args.num_report_samples)
    sections = [length_section(figures)] if figures else []
    if rewards:
        sections.append(reward_report.section(rewards))
    sections.append(token_report.section(queries[0], tokens))
    write_report(args.out / "report.html", result, runs, samples[shown], shifts[shown], sections)
    write_json(args.out / "eval.json", result)  # last: where it is, the evaluation is whole
    print(table(result))
    print(f"\nof the first query, tokens that {base_name} ranks second or third, and beyond:")
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = max(map(len, shifts[0]))
    for name, pieces in shifts[0].items():
        print(f"{name:<{width}} {to_terminal(pieces, color)}")
    print(f"\nwritten: {args.out / 'eval.json'}, samples.jsonl, and to look at: {args.out / 'report.html'}")
    return result


# ------------------------------------------------------------------------------ reward models beside each other: N+ 5
Margins = dict[str, dict[str, np.ndarray]]  # set of pairs -> model -> (seeds, pairs)


@torch.no_grad()
def measure_rewards(
    judges: dict[str, list[str]],
    ref_policy: GPT | None,
    reference: str,
    sets: dict[str, list[Comparison]],
    references: list[Demonstration],
    tokenizer: Tokenizer,
    device: torch.device,
    args: Args | RewardArgs,
) -> tuple[dict, Margins]:
    """[N+ 16, 18] Table 5, calibration and the scores of the references, and the margins that the first two are of.

    judges: name -> checkpoints, one a seed. A policy among them ranks by beta * log(policy / ref_policy) [N+ 19];
    `reference` is that one's name.
    """
    pad_id, beta = tokenizer.pad_id, args.dpo_beta
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    groups = {name: pair_groups(rows, f"{args.data}/comparisons.{name}.jsonl") for name, rows in sets.items()}
    margins: Margins = {name: {} for name in sets}
    scores, implicit = {}, []  # scores: model -> (seeds, references)
    for name, places in judges.items():
        of_pairs, of_references = defaultdict(list), []  # a row a seed
        for place in tqdm(places, desc=name, leave=False):
            if holds_reward_model(place):
                model = load_scalar(place, device)
                rank = partial(pair_scores, model, pad_id=pad_id)
                score = partial(response_scores, model, pad_id=pad_id, side="left")
            else:
                policy = load_gpt(place, device).forbid(pad_id, tokenizer.vocab_size)
                rank = partial(implicit_pair_rewards, policy, ref_policy, pad_id=pad_id, beta=beta)
                score = partial(implicit_rewards, policy, ref_policy, pad_id=pad_id, beta=beta)
                implicit += [name] if name not in implicit else []
            with autocast:
                for set_name, rows in sets.items():
                    batches = [torch.sub(*rank(batch)) for batch in micro_batches(rows, args.batch_size)]
                    of_pairs[set_name].append(torch.cat(batches).double().cpu().numpy())
                batches = [score(batch) for batch in micro_batches(references, args.batch_size)]
                of_references.append(torch.cat(batches).double().cpu().numpy())
        for set_name, column in of_pairs.items():
            margins[set_name][name] = np.stack(column)
        scores[name] = np.stack(of_references)
    return {
        "sets": {
            set_name: {
                "accuracy": accuracy_table(groups[set_name], columns),
                "calibration": {name: calibration(column) for name, column in columns.items()},
            }
            for set_name, columns in margins.items()
        },
        "references": {name: score_statistics(column) for name, column in scores.items()},
        "num_references": len(references),
        "num_seeds": {name: len(places) for name, places in judges.items()},
        "implicit": implicit,
        "reference": reference,
        "dpo_beta": beta,
    }, margins


def judge_rewards(args: RewardArgs) -> dict:
    check_ranges(args)
    check_out(args.out, args.overwrite)
    device = distributed.setup(args.device)
    words = args.reward_models
    if not words or len(words) % 2:
        raise InputError(f"--reward-models {' '.join(words)}: write pairs of a name and a checkpoint: rm runs/rm.")
    judges: dict[str, list[str]] = defaultdict(list)
    for name, place in zip(words[::2], words[1::2], strict=True):
        judges[name].append(place)
    has_policy = any(not holds_reward_model(place) for place in words[1::2])
    tokenizer = common_tokenizer(args.tokenizer, [*words[1::2], *([args.ref_policy] if has_policy else [])])
    limits = tokenizer, args.max_query_length, args.max_response_length
    sets = {"validation": load_comparisons(args.data / "comparisons.validation.jsonl", *limits)}
    if (args.data / "comparisons.cnndm.jsonl").exists():
        limits_of_news = tokenizer, args.max_cnndm_query_length, args.max_response_length
        sets["cnndm"] = load_comparisons(args.data / "comparisons.cnndm.jsonl", *limits_of_news)
    references = load_demonstrations(args.data / "sft.validation.jsonl", *limits)
    longest = max(len(row.query) + max(len(row.chosen), len(row.rejected)) for rows in sets.values() for row in rows)
    for place in words[1::2]:
        config = read_config(place)
        check_vocabulary(tokenizer, config.vocab_size, place)
        if longest > config.n_ctx:
            raise InputError(
                f"a comparison in {args.data} has {longest} tokens, more than the {config.n_ctx} positions of {place}: "
                "lower --max-query-length where the data is made."
            )
    ref_policy = None
    if has_policy:
        ref_policy = load_gpt(args.ref_policy, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
    reference = Path(args.ref_policy).name
    result, _ = measure_rewards(judges, ref_policy, reference, sets, references, tokenizer, device, args)
    result["args"] = json.loads(json.dumps(asdict(args), default=str))

    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eval.json").unlink(missing_ok=True)  # of the evaluation that this one replaces
    reward_report.write_report(args.out / "report.html", result, list(words[1::2]))
    write_json(args.out / "eval.json", result)  # last: where it is, the evaluation is whole
    print(reward_report.tables(result))
    print(f"\nwritten: {args.out / 'eval.json'}, and to look at: {args.out / 'report.html'}")
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


# ------------------------------------------------------------------------------- programs, compiled and executed: RLCF
SUCCESSES = {"pass": "passed", "exec": "executed", "comp": "compiled"}  # what counts as success -> field of a verdict


def check_list(flag: str, values: tuple[float, ...]) -> None:
    if not values or list(values) != sorted(set(values)):
        raise InputError(f"--{flag} {' '.join(map(str, values))}: name at least one, each once, in ascending order.")


def judge_programs(args: ProgramArgs) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    check_ranges(args)
    check_list("ks", args.ks)
    check_list("temperatures", args.temperatures)
    n = args.num_samples
    if args.ks[-1] > n:
        raise InputError(f"--ks {args.ks[-1]}: more than the {n} samples of a problem: raise --num-samples to it.")
    check_out(args.out, args.overwrite)
    device = distributed.setup(args.device)
    policies = named_policies(args.policies)
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values()])
    path = args.data / "code.test.jsonl"
    rows = load_programs(path, tokenizer, args.max_query_length, None, needs_response=False)[: args.num_queries]
    records, language = [row.record for row in rows], rows[0].record["language"]
    for number, record in enumerate(records, start=1):
        if not record["tests"].strip():
            raise InputError(f"{path}:{number}: the field 'tests' is empty: fill it or delete the line.")
    print("programs run shut off from this machine\n" + "\n".join(f"  {sentence}" for sentence in isolation()))
    run_programs([], language)  # refuses here what can't run any, not after hours of sampling
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    # ------------------------------------------------------------------------------------------------ 2. the responses
    texts: dict[tuple[str, float], list[str]] = {}  # (policy, temperature) -> n of each problem, behind each other
    results = {name: {"at_k": [], "temperatures": []} for name in policies}
    for name, place in tqdm(policies.items(), desc="policies"):
        policy = load_policy(place, rows, args.response_length, tokenizer, device)
        for temperature in args.temperatures:
            with autocast:
                _, response = sample_answers(
                    policy, [row.query for row in rows], tokenizer, n, args.response_length, args.batch_size, args.seed,
                    temperature, top_p=args.top_p,
                )  # fmt: skip
            texts[name, temperature] = [tokenizer.decode(ids) for ids in response.tolist()]
            eos_index, _, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
            results[name]["temperatures"].append(
                {
                    "temperature": temperature,
                    "eos_rate": (response == tokenizer.eos_id).any(1).float().mean().item(),
                    "response_length": (eos_index + 1).float().mean().item(),
                }
            )

    # ---------------------------------------------------------------------------------- 3. static checks, and execution
    # what differs: (problem, response). All are run, also those that don't compile here: that takes the compiler 13 ms,
    # and a program that isn't whole without its tests may be with them
    distinct = [*dict.fromkeys((i // n, text) for column in texts.values() for i, text in enumerate(column))]
    checked = []
    with JavaCompiler(args.workers) if language == "java" else PythonCompiler() as compiler:
        batches = micro_batches(distinct, args.batch_size)
        for batch in tqdm(batches, desc="static checks", unit=" batches", leave=False):
            checked += compiler.check([records[i]["prefix"] + text + records[i]["suffix"] for i, text in batch])
    programs = [program_of(records[i], text) for i, text in distinct]
    ended = run_programs(programs, language, args.timeout, args.workers)
    diagnostics, verdicts = (dict(zip(distinct, found, strict=True)) for found in (checked, ended))

    tasks = [str(record.get("meta", {}).get("task_id", number)) for number, record in enumerate(records, start=1)]

    def span(problem: int, text: str) -> tuple[int, int]:
        """Where a response is in its program."""
        start = len(records[problem]["prefix"])
        return start, start + len(text)

    def sample(name: str, temperature: float, index: int) -> dict:
        """A row of samples.jsonl. What is blamed is in characters of the response: its end, where it's none of them."""
        problem, text = key = index // n, texts[name, temperature][index]
        verdict, (start, end) = verdicts[key], span(*key)
        error = first_error(diagnostics[key], start, end)
        if error is not None:
            inside = start <= error.last < end
            error = {
                "category": error_category(error),
                "message": error.message,
                "start": max(error.start - start, 0) if inside else len(text),
                "end": error.end - start if inside else len(text),
            }
        said = verdict.output.strip().splitlines() or [""]
        return {
            "task": tasks[problem],
            "policy": name,
            "temperature": temperature,
            "response": text,
            **{field: getattr(verdict, field) for field in ("compiled", "executed", "passed", "reason")},
            "output": said[0] if language == "java" else said[-1],  # where each of them says what it threw
            "error": error,
        }

    # ------------------------------------------------------------------------------------------------ 4. the statistics
    for name, row in results.items():
        values = []  # of each temperature: success -> pass@k and its like of each problem, (problems, K)
        for at in row["temperatures"]:
            keys = [(i // n, text) for i, text in enumerate(texts[name, at["temperature"]])]
            found, spans = [diagnostics[key] for key in keys], [span(*key) for key in keys]
            values.append({})
            for success, attribute in SUCCESSES.items():
                counts = np.array([getattr(verdicts[key], attribute) for key in keys]).reshape(len(rows), n).sum(1)
                values[-1][success] = np.array([[pass_at_k(n, int(c), k) for k in args.ks] for c in counts])
                at[f"{success}_at_k"] = values[-1][success].mean(0).tolist()
            at["reasons"] = dict(Counter(verdicts[key].reason for key in keys))
            at["errors"] = error_profile(found, spans)
            at["compile_rate"] = fmean(first_error(d, *s) is None for d, s in zip(found, spans, strict=True))
        for j, k in enumerate(args.ks):
            # [RLCF evaluation] the temperature of the best pass@k, for each k, and exec and comp at the same; the lower
            # one of equals, which are so to 9 digits, since the 17th depends on the order of a sum
            passes = [round(float(of["pass"][:, j].mean()), 9) for of in values]
            best = passes.index(max(passes))
            row["at_k"].append({"k": k, "temperature": args.temperatures[best]})
            for success, of_problems in values[best].items():
                row["at_k"][j][success] = float(of_problems[:, j].mean())
                interval = bootstrap_interval(of_problems[:, [j]], args.seed, args.num_resamples)
                row["at_k"][j][f"{success}_ci"] = interval
    result = {
        "policies": results,
        "num_problems": len(rows),
        "language": language,
        "num_programs": len(distinct),
        "isolation": isolation(),
        "args": json.loads(json.dumps(asdict(args), default=str)),
    }

    # ------------------------------------------------------------------------------------------------------- 5. and out
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eval.json").unlink(missing_ok=True)  # of the evaluation that this one replaces
    every = (sample(*key, index) for key, column in texts.items() for index in range(len(column)))
    write_jsonl(args.out / "samples.jsonl", every)
    cards = [
        {
            "task": tasks[problem],
            "query": record["query"],
            "policies": {
                name: sample(name, row["at_k"][0]["temperature"], problem * n) for name, row in results.items()
            },
        }
        for problem, record in enumerate(records[: args.num_report_samples])
    ]
    runs = {place: name for name, place in policies.items()}
    for place in args.curves:
        runs.setdefault(place, place)
    program_report.write_report(args.out / "report.html", result, runs, cards)
    write_json(args.out / "eval.json", result)  # last: where it is, the evaluation is whole
    print(program_report.tables(result))
    print(f"\nwritten: {args.out / 'eval.json'}, samples.jsonl, and to look at: {args.out / 'report.html'}")
    return result


# ------------------------------------------------------------------- one reply a question, and who ranked answers: STR
def meta_of(row: Demonstration | Comparison, where: str) -> dict:
    return field(row.record, "meta", dict, where) if "meta" in row.record else {}


def references_of(rows: list[Demonstration], path: Path) -> tuple[list[list[str]], bool]:
    """What each reply is measured against, and whether that is SQuAD's answers: all that `meta` lists, or else the
    response, which of a question without an answer says so."""
    answers = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}:{number}"
        meta = meta_of(row, where)
        answers.append(field(meta, "answers", list, where) if "answers" in meta else None)
        if not all(isinstance(answer, str) and answer.strip() for answer in answers[-1] or []):
            raise InputError(f"{where}: 'answers' in the field 'meta' must hold texts only, none of them empty.")
        if (answers[-1] is None) != (answers[0] is None):
            raise InputError(f"{where}: 'answers' in the field 'meta' are in some rows only: part SQuAD and dialogues.")
    references = [found or [row.record["response"]] for found, row in zip(answers, rows, strict=True)]
    return references, answers[0] is not None


def load_self_rank(path: Path) -> list[self_rank.Ranked]:
    questions = []
    for where, row in iter_jsonl(path):
        query = field(row, "query", str, where)
        answers, weights, clusters, representatives = (
            field(row, name, list, where) for name in ("answers", "weights", "clusters", "representatives")
        )
        indices = [index for index in representatives if type(index) is int and 0 <= index < len(answers)]
        if not (
            len(answers) == len(weights) == len(clusters) > 0
            and all(isinstance(answer, str) for answer in answers)
            and all(type(weight) in (int, float) and math.isfinite(weight) for weight in weights)
            and all(type(cluster) is int for cluster in clusters)
            and len(indices) == len(representatives)
            and sorted(clusters[index] for index in indices) == sorted(set(clusters))
        ):
            raise InputError(
                f"{where}: needs a text, a weight and a cluster of each answer, and of each cluster the index of one "
                "representative: make the file with data.self_rank."
            )
        questions.append(self_rank.Ranked(query, answers, weights, clusters, representatives))
    return questions


def share(hits: list[bool | None], queries: list[str], args: ReplyArgs) -> tuple[float, tuple[float, float]] | None:
    """The share of True and its 95% interval; None is neither here nor there.

    A resample draws whole questions: pairs of one question share their answers, so they are no independent draws.
    """
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])  # query -> True, all
    for hit, query in zip(hits, queries, strict=True):
        if hit is not None:
            counts[query][0] += hit
            counts[query][1] += 1
    if not counts:
        return None
    of_questions = np.array([*counts.values()])  # (questions, 2)
    n, generator = len(of_questions), np.random.default_rng(args.seed)
    sums = [of_questions[generator.integers(n, size=n)].sum(0) for _ in range(args.num_resamples)]
    low, high = np.quantile([right / total for right, total in sums], (0.025, 0.975))
    right, total = of_questions.sum(0)
    return float(right / total), (float(low), float(high))


@torch.no_grad()
def judge_self_ranking(
    rows: list[Comparison], reward_model: ScalarModel | None, pad_id: int, path: Path, args: ReplyArgs
) -> list[dict]:
    """Of all pairs, of those with each kind of noise and of those so many ranks apart: does the reward model rank them
    as self-ranking did, and, where the truth is known, was that right?"""
    columns: dict[str, list[bool | None]] = {}
    if reward_model:
        margins = []
        for batch in tqdm(micro_batches(rows, args.batch_size), desc="reward model", leave=False):
            margins += torch.sub(*pair_scores(reward_model, batch, pad_id)).tolist()
        columns["rm_accuracy"] = [margin > 0 for margin in margins]  # a tie is wrong
    if args.gold:
        gold_score, records = load_function("--gold", args.gold), [row.record for row in rows]
        gains = [gold_score(r["query"], r["chosen"]) - gold_score(r["query"], r["rejected"]) for r in records]
        columns["chosen_better"] = [gain > 0 for gain in gains]
        columns["chosen_as_good"] = [gain >= 0 for gain in gains]  # or better
        columns["gold_agreement"] = [gain > 0 if gain else None for gain in gains]  # an equal pair has no right order
        if reward_model:
            columns["rm_gold_agreement"] = [
                (margin > 0) == (gain > 0) if gain else None for margin, gain in zip(margins, gains, strict=True)
            ]

    by_noise, by_distance = defaultdict(list), defaultdict(list)  # -> numbers of rows
    for number, row in enumerate(rows):
        where = f"{path}:{number + 1}"
        meta = meta_of(row, where)
        if "noise" in meta:
            by_noise["none" if meta["noise"] is None else field(meta, "noise", str, where)].append(number)
        if "rank_chosen" in meta:
            chosen, rejected = (field(meta, f"rank_{name}", int, where) for name in ("chosen", "rejected"))
            by_distance[rejected - chosen].append(number)
    groups = [{"rows": [*range(len(rows))]}]
    groups += [{"noise": kind, "rows": by_noise[kind]} for kind in sorted(by_noise, key=lambda k: (k != "none", k))]
    groups += [{"distance": distance, "rows": by_distance[distance]} for distance in sorted(by_distance)]
    for group in groups:
        numbers = group.pop("rows")
        group["num_pairs"] = len(numbers)
        for name, hits in columns.items():
            found = share([hits[i] for i in numbers], [rows[i].record["query"] for i in numbers], args)
            group[name], group[f"{name}_ci"] = found or (None, None)
    return groups


def judge_first_answers(questions: list[self_rank.Ranked], args: ReplyArgs) -> dict:
    """Is the answer that TextRank puts first right, more often than one drawn at random?"""
    gold_score = load_function("--gold", args.gold)
    values = defaultdict(list)  # which answer -> of each question [gold score, is it right]
    for question in questions:
        golds = [gold_score(question.query, answer) for answer in question.answers]
        scores = np.array([[gold, gold >= 1] for gold in golds], dtype=float)[rank_order(question.weights)]  # (m, 2)
        values["first"].append(scores[0])
        values["random"].append(scores.mean(0))
        values["last"].append(scores[-1])
        values["any"].append(scores.max(0))
        values["first_minus_random"].append(scores[0] - scores.mean(0))
    result = {}
    for name, column in values.items():
        golds, right = np.array(column).T  # (questions,)
        interval = bootstrap_interval(right[:, None], args.seed, args.num_resamples)
        result[name] = {"right": right.mean().item(), "right_ci": interval, "gold_score": golds.mean().item()}
    return result | {"num_questions": len(questions)}


@torch.no_grad()
def judge_order(
    questions: list[RankedQuestion], rows: list[Demonstration], reward_model: ScalarModel, pad_id: int, args: ReplyArgs
) -> dict:
    """Does the reward model order answers as people do, and do they as each other? `rows` are all answers, as ids."""
    batches = micro_batches(rows, args.batch_size)
    scores = torch.cat([response_scores(reward_model, batch, pad_id, "right") for batch in batches]).float()
    ours = [rank_order(row).tolist() for row in scores.view(len(questions), -1).tolist()]
    theirs = [consensus(question.rankings.values()) for question in questions]
    pairs = [([one], [other]) for one, other in zip(ours, theirs, strict=True)]
    result = order_probability(ours, theirs) | {"num_answers": len(ours[0])}
    for measure in (pairwise_agreement, kendall_tau):
        of_questions = np.array([[measure(*pair)] for pair in pairs])
        result[measure.__name__] = measure(ours, theirs)
        result[f"{measure.__name__}_ci"] = bootstrap_interval(of_questions, args.seed, args.num_resamples)
    several = any(len(question.rankings) > 1 for question in questions)
    return result | {"annotators": annotator_kappas(questions) if several else None}


def judge_replies(args: ReplyArgs) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    check_ranges(args)
    if args.rankings and not args.reward_model:
        raise InputError("--rankings: they are compared with those of a reward model: name it with --reward-model.")
    if args.encoder and not args.self_rank:
        raise InputError(f"--encoder {args.encoder}: it draws answers of --self-rank: name that file too.")
    if args.gold:
        load_function("--gold", args.gold)  # before anything slow
    check_out(args.out, args.overwrite)
    device = distributed.setup(args.device)
    policies = named_policies(args.policies)
    tokenizer = common_tokenizer(args.tokenizer, [*policies.values(), *filter(None, [args.reward_model])])
    limits = tokenizer, args.max_query_length, args.max_response_length
    path, pairs_path = args.data / f"sft.{args.split}.jsonl", args.data / "comparisons.validation.jsonl"
    rows = load_demonstrations(path, *limits)[: args.num_queries]
    references, is_squad = references_of(rows, path)
    queries = [row.record["query"] for row in rows]
    judged = pairs_path.exists() and (args.reward_model or args.gold)
    comparisons = load_comparisons(pairs_path, *limits) if judged else []
    self_ranked = load_self_rank(args.self_rank) if args.self_rank else []
    by_people = load_rankings(args.rankings)
    ranked_rows = [
        Demonstration(tokenizer.encode(q.query), response_ids(q.query, answer, tokenizer), {"query": q.query})
        for q in by_people
        for answer in q.answers
    ]
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    reward_model = load_scalar(args.reward_model, device) if args.reward_model else None
    if reward_model:
        check_vocabulary(tokenizer, reward_model.config.vocab_size, args.reward_model)
        longest = {
            path: max(len(row.query) + max(len(row.response), args.response_length) for row in rows),
            pairs_path: max((len(r.query) + max(len(r.chosen), len(r.rejected)) for r in comparisons), default=0),
            "--rankings": max((len(row.query) + len(row.response) for row in ranked_rows), default=0),
        }
        for where, length in longest.items():
            if length > reward_model.config.n_ctx:
                raise InputError(
                    f"{where}: the longest query and response have {length} tokens, more than the "
                    f"{reward_model.config.n_ctx} positions of {args.reward_model}: shorten them, or lower "
                    "--response-length."
                )
    figure = drawn = None
    if args.encoder:
        one = max(self_ranked, key=lambda question: len(question.representatives))  # the first of those with the most
        vectors = self_rank.embed(set(one.answers), load_encoder(args.encoder, device=device))
        vectors = np.stack([vectors[answer] for answer in one.answers])
        title = f"{len(one.answers)} answers to one question"
        figure = cluster_figure(title, vectors, one.weights, one.clusters, one.representatives)
        in_order = [
            {"text": one.answers[i], "weight": one.weights[i], "cluster": one.clusters[i]}
            | {"representative": i in one.representatives}
            for i in rank_order(one.weights).tolist()
        ]
        drawn = {"query": one.query, "encoder": args.encoder, "answers": in_order}

    # --------------------------------------------------------------------------------------------------- 2. the replies
    measured: dict[str, dict[str, np.ndarray]] = {}  # policy -> metric -> (questions, 1)
    texts, results = {}, {}  # by policy
    for name, place in tqdm(policies.items(), desc="policies"):
        policy = load_policy(place, rows, args.response_length, tokenizer, device)
        with autocast:
            query, response = sample_answers(
                policy, [row.query for row in rows], tokenizer, 1, args.response_length, args.batch_size, args.seed,
                args.temperature, top_p=args.top_p,
            )  # fmt: skip
            scores = reward_model and rm_scores(reward_model, query, response, tokenizer.pad_id, args.batch_size)
        replies = texts[name] = [tokenizer.decode(ids) for ids in response.tolist()]
        columns = {metric.__name__: metric(references, replies) for metric in (bleu4, google_bleu, meteor)}
        if is_squad:
            columns |= squad_scores(references, replies)
        if args.gold:
            columns["gold_score"] = [*map(load_function("--gold", args.gold), queries, replies)]
        if reward_model:
            columns["rm_score"] = scores
        measured[name] = {metric: np.array(column)[:, None] for metric, column in columns.items()}
        eos_index, _, _ = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
        results[name] = {
            "metrics": {  # [STR tables]
                metric: {
                    "mean": float(scores.mean()),
                    "mean_ci": bootstrap_interval(scores, args.seed, args.num_resamples),
                }
                for metric, scores in measured[name].items()
            },
            "eos_rate": (response == tokenizer.eos_id).any(1).float().mean().item(),
            "response_length": (eos_index + 1).float().mean().item(),
        }
    differences = [
        {"ours": ours, "theirs": theirs, "metric": metric}
        | compare(measured[ours][metric], measured[theirs][metric], args.seed, args.num_resamples)
        for theirs, ours in itertools.combinations(policies, 2)
        for metric in measured[ours]
    ]

    # ------------------------------------------------------------------- 3. the references, and what ranked the answers
    reference = {"response_length": fmean(len(row.response) for row in rows)}
    if args.gold:
        truths = [row.record["response"] for row in rows]
        reference["gold_score"] = fmean(map(load_function("--gold", args.gold), queries, truths))
    with autocast, torch.no_grad():
        if reward_model:
            batches = micro_batches(rows, args.batch_size)
            scores = [response_scores(reward_model, batch, tokenizer.pad_id, "left") for batch in batches]
            reference["rm_score"] = torch.cat(scores).mean().item()
        ranking = (
            judge_self_ranking(comparisons, reward_model, tokenizer.pad_id, pairs_path, args) if comparisons else None
        )
        people = judge_order(by_people, ranked_rows, reward_model, tokenizer.pad_id, args) if by_people else None
    result = {
        "policies": results,
        "reference": reference,
        "differences": differences,
        "self_ranking": ranking,
        "first_answers": judge_first_answers(self_ranked, args) if self_ranked and args.gold else None,
        "human_study": people,
        "figure": drawn,
        "meteor_matching": meteor_matching(),
        "num_questions": len(rows),
        "args": json.loads(json.dumps(asdict(args), default=str)),
    }
    samples = [
        {
            "query": question,
            "references": references[i],
            "policies": {
                name: {"response": texts[name][i]} | {metric: scores[i].item() for metric, scores in columns.items()}
                for name, columns in measured.items()
            },
        }
        for i, question in enumerate(queries)
    ]

    # ------------------------------------------------------------------------------------------------------- 4. and out
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "eval.json").unlink(missing_ok=True)  # of the evaluation that this one replaces
    write_jsonl(args.out / "samples.jsonl", samples)
    runs = [place for place in (*policies.values(), args.reward_model) if place]
    reply_report.write_report(args.out / "report.html", result, runs, samples[: args.num_report_samples], figure)
    write_json(args.out / "eval.json", result)  # last: where it is, the evaluation is whole
    print(reply_report.tables(result))
    print(f"\nwritten: {args.out / 'eval.json'}, samples.jsonl, and to look at: {args.out / 'report.html'}")
    return result


if __name__ == "__main__":
    command_line(main, RECIPES)
