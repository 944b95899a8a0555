"""MBJP, MathQA and HumanEval in Java, as published by mxeval (github.com/amazon-science/mxeval) -> code.jsonl.

    python -m data.mxeval --source DIR --out runs/rlcf/data
    python -m data.mxeval --source mbjp_release_v1.2.jsonl --test-share 0.2 --check

[RLCF evaluation] Each problem of the JSON Lines is a row of code.test.jsonl: `query` and `prefix` are its prompt,
`suffix` is empty, since a completion closes method and class itself, and `response` is the canonical solution. The
program is prefix + response + suffix + tests. MathQA, HumanEval and some problems of MBJP have no published solution:
their response is "".

With --test-share below 1, a seeded coin moves problems to code.train.jsonl, for fine-tuning before the test (the paper
tests on 0.2 of MBJP and 0.5 of MathQA), and with --validation-share some of those to code.validation.jsonl. From these
two files, problems without a solution are left out and counted.

--check runs the canonical solutions, --samples FILE the completions in a file of mxeval samples (task_id, completion).
Both print the shares that compile, execute and pass, and programs per second; --check also names each failure.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.prepare import in_validation, jsonl_files, print_left_out, read_records, source_files
from nanorlhf.cli import Fraction, Seconds, Seed, Workers, check_ranges, run_module
from nanorlhf.code.execution import Verdict, isolation, program_of, run_programs
from nanorlhf.dataset import field, iter_jsonl
from nanorlhf.errors import InputError

# by the beginning of the task_id: MBJP/2, MathQA/0, HumanEval_java/0
DATASETS = {"MBJP": "mbjp", "MathQA": "mathqa", "HumanEval_java": "humaneval"}


@dataclass(frozen=True, kw_only=True)
class Args:
    source: str
    """file, directory or Hub dataset id; files of samples in it are left out"""
    out: Path = Path("runs/rlcf/data")
    """directory for the JSON Lines; existing files are replaced"""
    files: str = "*"
    """which files of a directory or Hub dataset: a pattern for their relative path, such as 'mbxp/*'"""
    revision: str | None = None
    """branch or commit of a Hub dataset"""
    test_share: Fraction = 1.0
    """share of problems in code.test.jsonl; the others go to code.train.jsonl"""
    validation_share: Fraction = 0.0
    """share of those others that goes to code.validation.jsonl instead"""
    seed: Seed = 1
    """seed of those splits"""
    check: bool = False
    """run the canonical solutions"""
    samples: Path | None = None
    """run the completions in this file (JSON Lines with task_id and completion)"""
    timeout: Seconds = 10.0
    """maximum wall-clock seconds per program"""
    workers: Workers = 1
    """programs run in parallel"""
    weak_isolation: bool = False
    """run programs also where the system can't restrict their files or their network"""


def main(args: Args) -> None:
    check_ranges(args)
    rows: dict[str, dict] = {}  # task_id -> row
    places: dict[str, str] = {}
    written: Counter[tuple[str, str]] = Counter()  # (file, dataset) -> rows
    solved: Counter[tuple[str, str]] = Counter()  # those with a canonical solution
    left_out: Counter[str] = Counter()
    with jsonl_files(args.out) as write:
        for path, _ in source_files(args.source, args.files, args.revision):
            for where, record in read_records(path):
                if "completion" in record:
                    left_out["a sample, not a problem: --samples runs a file of them"] += 1
                    continue
                row = row_of(record, where)
                task_id, dataset = row["meta"]["task_id"], row["meta"]["dataset"]
                if task_id in rows:
                    raise InputError(f"{where}: {task_id} is also at {places[task_id]}: delete one of them.")
                rows[task_id], places[task_id] = row, where
                name = "code.test" if in_validation(task_id, args.test_share, args.seed) else "code.train"
                if name == "code.train" and in_validation(f"{task_id} of the others", args.validation_share, args.seed):
                    name = "code.validation"
                if name != "code.test" and not row["response"]:
                    left_out[f"{dataset}: a problem to train on, without a canonical solution"] += 1
                    continue
                write(name, row)
                written[name, dataset] += 1
                solved[name, dataset] += bool(row["response"])
        if not written:
            raise InputError(
                f"--source {args.source}: none of {len(rows)} problems could be used: nothing was written."
            )
        samples = read_samples(args.samples, rows) if args.samples else []
        solutions = [(row, row["response"]) for row in rows.values() if row["response"]] if args.check else []
        if args.check and not solutions:
            raise InputError(f"--check: no problem in --source {args.source} has a canonical solution: leave it out.")

    for (name, dataset), count in sorted(written.items()):
        print(f"{name + '.jsonl':<18} {dataset:<10} {count:6} problems, {solved[name, dataset]} with a solution")
    print_left_out(left_out)
    print(f"\nwritten: {args.out}")
    if args.check or samples:
        print("\nprograms run isolated from this machine")
        for sentence in isolation():
            print(f"  {sentence}")
    if args.check:
        verdicts = check("canonical solutions", solutions, args)
        for (row, _), verdict in zip(solutions, verdicts, strict=True):
            if not verdict.passed:
                lines = verdict.output.strip().splitlines() or [""]
                line = lines[-1] if verdict.compiled else lines[0]  # the exception, or the first error
                print(f"  {row['meta']['task_id']}: {verdict.reason}: {line}")
    if samples:
        check(str(args.samples), samples, args)


def row_of(record: dict, where: str) -> dict:
    """A problem of mxeval as a row of code.jsonl."""
    task_id, language, prompt, tests, entry_point = (
        field(record, name, str, where) for name in ("task_id", "language", "prompt", "test", "entry_point")
    )
    if language != "java":
        raise InputError(f"{where}: the field 'language' is {language!r}: this module reads mxeval's Java datasets.")
    dataset = DATASETS.get(task_id.partition("/")[0])
    if dataset is None:
        raise InputError(
            f"{where}: the field 'task_id' is {task_id!r}: it must begin with one of {', '.join(DATASETS)}."
        )
    if "class Main" not in tests:
        raise InputError(f"{where}: the field 'test' has no class Main: fix or delete the record.")
    if "canonical_solution" in record and record["canonical_solution"] is None:
        response = ""
    else:
        response = field(record, "canonical_solution", str, where)
    return {
        "query": prompt,
        "response": response,
        "language": language,
        "prefix": prompt,
        "suffix": "",
        "tests": tests,
        "meta": {"task_id": task_id, "dataset": dataset, "entry_point": entry_point},
    }


def read_samples(path: Path, rows: dict[str, dict]) -> list[tuple[dict, str]]:
    """The (problem, completion) pairs of a file of samples."""
    samples = []
    for where, record in iter_jsonl(path):
        task_id, completion = (field(record, name, str, where) for name in ("task_id", "completion"))
        if task_id not in rows:
            raise InputError(f"{where}: --source has no problem {task_id}: name the dataset of these samples.")
        samples.append((rows[task_id], completion))
    return samples


def check(title: str, pairs: Sequence[tuple[dict, str]], args: Args) -> list[Verdict]:
    """Run the programs of (problem, completion) pairs, print a table by dataset, and return the verdicts."""
    began = time.monotonic()
    verdicts = run_programs(
        [program_of(*pair) for pair in pairs], "java", args.timeout, args.workers, weak_isolation=args.weak_isolation
    )
    seconds = time.monotonic() - began
    by_dataset: dict[str, list[Verdict]] = defaultdict(list)
    for (row, _), verdict in zip(pairs, verdicts, strict=True):
        by_dataset[row["meta"]["dataset"]].append(verdict)
    print(f"\n{title}\n{'':<12} {'programs':>8} {'compiled':>9} {'executed':>9} {'passed':>9}   why not passed")
    for dataset, found in sorted(by_dataset.items()):
        shares = [sum(getattr(v, name) for v in found) / len(found) for name in ("compiled", "executed", "passed")]
        reasons = Counter(v.reason for v in found if not v.passed)
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "-"
        print(f"{dataset:<12} {len(found):8} " + " ".join(f"{share:9.2%}" for share in shares) + f"   {why}")
    rate = len(verdicts) / seconds
    print(f"{len(verdicts)} programs in {seconds:.1f} s: {rate:.1f} per second, {args.workers} in parallel")
    return verdicts


if __name__ == "__main__":
    run_module(main, Args)
