"""Check the files of finished or running runs.

Each run must have metrics.jsonl and args.json; summary.json, samples.jsonl, tokenizer.json, trace/ and state/ are read
if they exist. The run of PPO's reward model is searched at the path in args.json, among the runs that are examined, and
next to the run.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorlhf.checkpoint import load_gpt, load_scalar
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.files import read_object
from nanorlhf.peft import LORA_RANK, tune
from nanorlhf.pretrained.weight_files import load_pickle
from nanorlhf.rules.finding import Finding, nearest_first
from nanorlhf.rules.metric_rules import examine_metrics
from nanorlhf.rules.record import Record, mean
from nanorlhf.rules.score_rules import start_score
from nanorlhf.rules.thresholds import limit
from nanorlhf.rules.trace_rules import examine_traces, traced
from nanorlhf.tokenizer import Tokenizer, load_tokenizer
from nanorlhf.training.resume import states
from nanorlhf.training.run_directory import flat_settings, read_metrics, whole_rows
from nanorlhf.training.trace import read_trace

LARGEST_CHECKPOINT = 10**9  # bytes; larger checkpoints are not loaded


def examine(runs: Sequence[Path]) -> list[Finding]:
    """Return the findings of the runs, nearest to the input first. With several runs, each finding names its run.

    Raises InputError for a directory without a run, and for damaged files.
    """
    findings = []
    for run in runs:
        for finding in examine_run(run, runs):
            name = f"{run}: " if len(runs) > 1 else ""
            findings.append(replace(finding, seen=name + finding.seen))
    return nearest_first(findings)


def examine_run(run: Path, runs: Sequence[Path]) -> list[Finding]:
    """Return the findings of a run. The run of its reward model is also searched among `runs`."""
    record = read_record(run)
    if not record.rows:
        raise InputError(f"{run}/metrics.jsonl is empty: wait for the run's first step.")
    try:
        findings = examine_metrics(record)
    except InputError as error:
        raise InputError(f"{run}/{error}") from error
    reward_model = reward_model_run(record, run, runs)
    start_finding = None if reward_model is None else start_score(record, read_record(reward_model))
    findings += [] if start_finding is None else [start_finding]
    tokenizer = load_tokenizer(run) if (run / "tokenizer.json").exists() else None
    text_finding = None if tokenizer is None else long_samples(run, record, tokenizer)
    findings += [] if text_finding is None else [text_finding]
    findings += examine_states(run, record)
    known = {finding.name for finding in findings}
    return findings + [finding for finding in read_and_examine_traces(run, tokenizer) if finding.name not in known]


def unchecked(runs: Sequence[Path]) -> list[str]:
    """Return a sentence for each run whose traces could not be checked."""
    sentences = []
    for run in runs:
        paths = sorted((run / "trace").glob("update-*.safetensors"))
        if paths and any(read_trace(path)[0]["response"].numel() for path in paths):
            continue
        if not paths and not any("objective/kl" in row for row in read_metrics(run)):
            continue  # a stage without rollouts
        why = "the trace is empty" if paths else "there is no trace (train_ppo.py and train_grpo.py with --trace 4)"
        sentences.append(f"{run}: masks, rewards, returns and advantages of responses, because {why}")
    return sentences


def read_record(run: Path) -> Record:
    """Read a run's record. Raises InputError if args.json is missing or damaged, or a row of metrics is broken."""
    settings = flat_settings(read_object(run / "args.json"))
    summary = read_object(run / "summary.json") if (run / "summary.json").exists() else {}
    return Record(settings=settings, rows=read_metrics(run), summary=summary)


def reward_model_run(record: Record, run: Path, runs: Sequence[Path]) -> Path | None:
    """Find the run of the reward model: at the path in args.json, among `runs`, or next to this run."""
    path = record.settings.get("reward_model")
    if not isinstance(path, str) or record.settings.get("reward") is not None:  # an ensemble, or another kind of reward
        return None
    name = Path(path).name
    paths = [Path(path), *(other for other in runs if other.name == name), run.parent / name]
    return next((path for path in paths if path != run and (path / "args.json").is_file()), None)


def long_samples(run: Path, record: Record, tokenizer: Tokenizer) -> Finding | None:
    """Check that retokenized samples are about as long as the logged response lengths."""
    path = run / "samples.jsonl"
    rows = record.rows_with("response_length", "policy/loss")
    # a program's length is logged up to its error, but its sample is complete
    if not path.exists() or not rows or any("compile_rate" in row for row in rows):
        return None
    texts = [field(row, "response", str, str(path)) for row in whole_rows(path)]
    texts = [text for text in texts if "\ufffd" not in text]  # the replacement character of invalid UTF-8
    if len(texts) < 20:
        return None
    length = sum(1 + len(ids) for ids in tokenizer.encode_responses(texts)) / len(texts)  # with EOS
    counted = mean(rows, "response_length")
    if not length > limit("text_length") * counted + 1:
        return None
    return Finding(
        name="text-after-eos",
        seen=f"The {len(texts)} texts in samples.jsonl have {length:.3g} tokens on average, but response_length is "
        f"{counted:.3g}.",
        means="The sampler doesn't stop at EOS. Masks end there, but the reward model reads the tokens that follow.",
        where="generate in nanorlhf/generate.py, which must fill finished rows with [PAD]",
    )


def read_and_examine_traces(run: Path, tokenizer: Tokenizer | None) -> list[Finding]:
    traces = []
    queries: dict[int, dict[int, str]] = {}  # update -> number in the rollout -> query
    for path in sorted((run / "trace").glob("update-*.safetensors")):
        tensors, about = read_trace(path)
        record = Record(settings=flat_settings(about["settings"]), rows=[], summary={})
        traces.append(traced(tensors, about, record, tokenizer))
        queries[about["update"]] = dict(zip(tensors["index"].tolist(), about["queries"], strict=True))
    repeated = repeated_order(queries)
    try:
        return examine_traces(traces) + ([] if repeated is None else [repeated])
    except InputError as error:
        raise InputError(f"{run}/trace: about: settings: {error}") from error


def repeated_order(queries: dict[int, dict[int, str]]) -> Finding | None:
    """Check that no two updates have the same queries at the same positions, if there are many queries."""
    num_queries = len({query for asked in queries.values() for query in asked.values()})
    for first, second in itertools.combinations(queries, 2):
        shared = queries[first].keys() & queries[second].keys()
        asked = {queries[first][row] for row in shared}
        alike = all(queries[first][row] == queries[second][row] for row in shared)
        if alike and len(asked) >= 4 and num_queries >= 32:  # by chance, once in a million
            return Finding(
                name="order",
                seen=f"Updates {first} and {second} have the same queries at the same positions: {len(asked)} "
                f"different ones, of {num_queries} in the trace.",
                means="All epochs have the same order, or the same batch is repeated.",
                where="nanorlhf/dataset.py (batch_indices) and its call in the training script",
            )
    return None


# ------------------------------------------------------------------------------------------------------ saved states
def examine_states(run: Path, record: Record) -> list[Finding]:
    """Check optimizer, generator and checkpoint against the states in state/, which --resume loads."""
    saved = [load_pickle(path / "state.pt", mmap=True) for path in states(run) if (path / "state.pt").exists()]
    saved = [state for state in saved if isinstance(state, dict)]
    if not saved:
        return []
    findings = [adam_steps(record, saved[0]), unchanged_generator(saved), checkpoint_difference(run, record, saved[0])]
    return [finding for finding in findings if finding is not None]


def adam_steps(record: Record, state: dict[str, Any]) -> Finding | None:
    """Check that Adam's step count is the number of the run's steps."""
    steps: Any = state.get("steps")
    try:
        counts = [int(moments["step"]) for moments in steps["optimizer"]["state"].values()]
        taken, skipped = int(state["step"]), int(steps["skipped"])
    except (TypeError, KeyError, AttributeError):  # another optimizer
        return None
    is_rollout = any("objective/kl" in row for row in record.rows)
    if any(row.get("groups/dropped", 0.0) > 0 for row in record.rows):
        return None  # minibatches without responses are skipped
    expected = taken * (record.steps_per_update if is_rollout else 1) - skipped
    if not counts or max(counts) >= 0.9 * expected:
        return None
    return Finding(
        name="optimizer",
        seen=f"After {taken} {'updates' if is_rollout else 'steps'} Adam has counted {max(counts)} of {expected:g} "
        "optimizer steps.",
        means="The optimizer was recreated in the loop, or --resume did not restore it, so its moments and their bias "
        "correction started again.",
        where="the optimizer in the training script, and its `run.track`",
    )


def unchanged_generator(saved: Sequence[dict[str, Any]]) -> Finding | None:
    """Check that random numbers were drawn between two states."""
    generators = [(state["step"], state["generator"]) for state in saved if isinstance(state.get("generator"), Tensor)]
    for (later, new), (earlier, old) in itertools.pairwise(generators):
        if later != earlier and torch.equal(new, old):
            return Finding(
                name="random-numbers",
                seen=f"The sampling generator is in the same state after {earlier} and after {later} updates.",
                means="It is reseeded in every update, or the sampler uses another generator: rollouts are not new "
                "samples of the policy.",
                where="the generator and the uniform random numbers in the training script",
            )
    return None


@torch.no_grad()
def checkpoint_difference(run: Path, record: Record, state: dict[str, Any]) -> Finding | None:
    """Check that the checkpoint of a finished run computes the same outputs as the weights in its last state."""
    file = run / "model.safetensors"
    weights = state.get("policy", state.get("model"))
    is_small = file.exists() and file.stat().st_size < LARGEST_CHECKPOINT
    if not record.summary or not isinstance(weights, dict) or not is_small:
        return None
    is_scalar = "score.weight" in weights
    try:
        models: list[Any] = [(load_scalar if is_scalar else load_gpt)(str(run)) for _ in range(2)]
        saved, live = models
        if record.settings.get("tune") == "lora":
            tune(live, "lora", int(record.number("lora_rank", LORA_RANK)), tuple(record.settings["lora_targets"]))
        live.load_state_dict(weights)
    except (RuntimeError, KeyError):  # written by another program
        return None
    if saved.config.num_decoder_blocks:
        return None
    ids = torch.randint(saved.config.vocab_size, (1, min(16, saved.config.n_ctx)), generator=torch.Generator())
    x, y = live(ids), saved(ids)
    if is_scalar:  # normalisation changed the mean after the last state
        x, y = x - x.mean(), y - y.mean()
    else:
        x, y = x @ live.lm_head.weight.T, y @ saved.lm_head.weight.T
    gap = ((x - y).abs().max() / x.abs().max()).item()
    if gap < 1e-3:
        return None
    return Finding(
        name="checkpoint",
        seen=f"The outputs of the saved model are up to {gap:.2g} off the outputs of the weights in {run / 'state'}, "
        "relative to the largest.",
        means="Updates are merged with a wrong scale or twice, or trained weights are not saved.",
        where="nanorlhf/peft.py (merge) and nanorlhf/training/run.py (write_checkpoint)",
    )
