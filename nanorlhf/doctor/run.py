"""Read what runs have written, finished or not, and say what is wrong with them.

Of each run metrics.jsonl and args.json, and where they are summary.json, samples.jsonl, tokenizer.json and trace/. The
run of PPO's reward model is found at the path in args.json, among the given runs, or beside the run.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanorlhf.dataset import field
from nanorlhf.doctor.finding import Finding
from nanorlhf.doctor.metric_rules import examine_metrics
from nanorlhf.doctor.record import Record, mean
from nanorlhf.doctor.reward_rules import start_score
from nanorlhf.doctor.thresholds import limit
from nanorlhf.doctor.trace_rules import examine_traces, traced
from nanorlhf.errors import InputError
from nanorlhf.files import read_object
from nanorlhf.tokenizer import Tokenizer, load_tokenizer
from nanorlhf.training.run_directory import flat_settings, read_metrics, whole_rows
from nanorlhf.training.trace import read_trace


def examine(runs: Sequence[Path]) -> list[Finding]:
    """What is wrong with each run, whose name stands first where there are several.

    Raises InputError for a directory that holds no run, and for damaged files.
    """
    findings = []
    for run in runs:
        for finding in examine_run(run, runs):
            name = f"{run}: " if len(runs) > 1 else ""
            findings.append(replace(finding, seen=name + finding.seen))
    return findings


def examine_run(run: Path, runs: Sequence[Path]) -> list[Finding]:
    """`runs`: where the run of its reward model is looked for as well."""
    record = read_record(run)
    if not record.rows:
        raise InputError(f"{run}/metrics.jsonl holds no row yet: wait for the run's first step.")
    try:
        findings = examine_metrics(record)
    except InputError as error:
        raise InputError(f"{run}/{error}") from error
    reward_model = reward_model_run(record, run, runs)
    start = None if reward_model is None else start_score(record, read_record(reward_model))
    findings += [] if start is None else [start]
    tokenizer = load_tokenizer(run) if (run / "tokenizer.json").exists() else None
    text = None if tokenizer is None else long_samples(run, record, tokenizer)
    findings += [] if text is None else [text]
    known = {finding.name for finding in findings}
    return findings + [finding for finding in read_and_examine_traces(run, tokenizer) if finding.name not in known]


def read_record(run: Path) -> Record:
    """Raises InputError where args.json is missing or damaged, and for broken rows of metrics."""
    settings = flat_settings(read_object(run / "args.json"))
    summary = read_object(run / "summary.json") if (run / "summary.json").exists() else {}
    return Record(settings=settings, rows=read_metrics(run), summary=summary)


def reward_model_run(record: Record, run: Path, runs: Sequence[Path]) -> Path | None:
    """The run of train_rm.py that scored: at the path in args.json, among the given ones, or beside this one."""
    path = record.settings.get("reward_model")
    if not isinstance(path, str) or record.settings.get("reward") is not None:  # an ensemble, or something else scored
        return None
    name = Path(path).name
    places = [Path(path), *(other for other in runs if other.name == name), run.parent / name]
    return next((place for place in places if place != run and (place / "args.json").is_file()), None)


def long_samples(run: Path, record: Record, tokenizer: Tokenizer) -> Finding | None:
    """The samples' texts, tokenised again, are about as long as the responses that were counted."""
    path = run / "samples.jsonl"
    rows = record.having("response_length", "policy/loss")
    # a program is counted up to its error, and its sample is whole
    if not path.exists() or not rows or any("compile_rate" in row for row in rows):
        return None
    texts = [field(row, "response", str, str(path)) for row in whole_rows(path)]
    texts = [text for text in texts if "\ufffd" not in text]  # which stands for bytes that are no text
    if len(texts) < 20:
        return None
    length = sum(1 + len(ids) for ids in tokenizer.encode_responses(texts)) / len(texts)  # with EOS
    counted = mean(rows, "response_length")
    if not length > limit("text_length") * counted + 1:
        return None
    return Finding(
        name="text-after-eos",
        seen=f"The {len(texts)} texts of samples.jsonl have {length:.3g} tokens on average, and response_length is "
        f"{counted:.3g}.",
        means="Text goes on after EOS: masks cut there, but the reward model reads what follows.",
        where="generate in nanorlhf/generate.py: a row that has ended gets [PAD]",
        page="docs/details.md",
    )


def read_and_examine_traces(run: Path, tokenizer: Tokenizer | None) -> list[Finding]:
    traces = []
    for path in sorted((run / "trace").glob("update-*.safetensors")):
        tensors, about = read_trace(path)
        record = Record(settings=flat_settings(about["settings"]), rows=[], summary={})
        traces.append(traced(tensors, about, record, tokenizer))
    try:
        return examine_traces(traces)
    except InputError as error:
        raise InputError(f"{run}/trace: about: settings: {error}") from error
