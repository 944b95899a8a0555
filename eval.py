"""Stage 4, evaluation: what did each stage gain, and what did it cost?

Paper: The N+ Implementation Details of RLHF with PPO, section 5 (ROUGE, reward model accuracy, KL, win rate).
In: sft.validation.jsonl, comparisons.validation.jsonl, policies and the reward model. Out: a table, eval.json,
samples.jsonl, and report.html with the curves of all stages and the samples side by side.

    python eval.py                                                             # the embedded default, recipe tiny
    python eval.py tldr --policies sft runs/tldr/sft ppo runs/tldr/ppo --reward-model runs/tldr/rm --dtype bfloat16
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from data.tiny import gold_score
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.dataset import load_comparisons, load_demonstrations, write_jsonl
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.logprobs import response_logprobs
from nanorlhf.metrics import rouge, wilson_interval, win_rate
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, micro_batches
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
}


@torch.no_grad()
def answer(
    policy: GPT, queries: list[list[int]], tokenizer: Tokenizer, args: Args, temperature: float
) -> tuple[Tensor, Tensor]:
    """A response to each query: query (B, Q) left-padded, response (B, T); the same whatever the batch size."""
    generator = torch.Generator().manual_seed(args.seed)
    uniforms = torch.rand((len(queries), args.response_length), generator=generator, dtype=torch.float64)
    query = left_pad(queries, tokenizer.pad_id).to(policy.lm_head.weight.device)  # (B, Q)
    pieces = zip(*(micro_batches(rows, args.batch_size) for rows in (query, uniforms)), strict=True)
    responses = [
        generate(
            policy, q, q != tokenizer.pad_id, args.response_length, temperature,
            eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, uniforms=u,
        )[0]
        for q, u in pieces
    ]  # fmt: skip
    return query, torch.cat(responses)


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


def main(args: Args) -> dict:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    check_ranges(args)
    if (args.out / "eval.json").exists() and not args.overwrite:
        raise InputError(f"--out {args.out} holds an evaluation: name another directory, or pass --overwrite.")
    if args.out.exists() and not args.out.is_dir():
        raise InputError(f"--out {args.out} is a file: name a directory.")
    device = distributed.setup(args.device)
    policies = named_policies(args.policies)
    first = next(iter(policies))
    tokenizer = load_tokenizer(args.tokenizer or policies[first])
    limits = tokenizer, args.max_query_length, args.max_response_length
    rows = load_demonstrations(args.data / "sft.validation.jsonl", *limits)[: args.num_queries]
    for place in (*policies.values(), *filter(None, [args.reward_model])):
        if args.tokenizer is None and load_tokenizer(place).backend.get_vocab() != tokenizer.backend.get_vocab():
            raise InputError(f"the tokenizer of {place} differs from that of {policies[first]}: compare models of one.")

    def load_policy(place: str) -> GPT:
        policy = load_gpt(place, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)
        check_vocabulary(tokenizer, policy.config.vocab_size, place)
        needed = max(len(row.query) for row in rows) + args.response_length
        if needed > policy.config.n_ctx:
            raise InputError(
                f"the longest query and --response-length make {needed} tokens, more than the {policy.config.n_ctx} "
                f"positions of {place}: lower --response-length."
            )
        return policy

    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    ref_policy = load_policy(policies[first])
    reward_model = load_scalar(args.reward_model, device) if args.reward_model else None

    # --------------------------------------------------------------------------------------------------- 2. references
    queries, references = ([row.record[name] for row in rows] for name in ("query", "response"))
    reference_golds = [gold_score(q, r) for q, r in zip(queries, references, strict=True)] if args.gold else None
    with autocast:
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
        policy = ref_policy if name == first else load_policy(place)
        with autocast:
            ids = [row.query for row in rows]
            query, response = answer(policy, ids, tokenizer, args, args.temperature)
            scores = reward_model and rm_scores(reward_model, query, response, tokenizer.pad_id, args.batch_size)
            kl = kl_to(ref_policy, policy, *answer(policy, ids, tokenizer, args, args.kl_temperature), tokenizer, args)
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


if __name__ == "__main__":
    command_line(main, RECIPES)
