"""MBJP, MathQA and HumanEval, in Java or Python, as published by mxeval (amazon-science/mxeval) -> code.jsonl.

    python -m data.mxeval --source DIR
    python -m data.mxeval --source mbjp_release_v1.2.jsonl --tokenizer gpt2 --test-share 0.2 --check
    python -m data.mxeval --source mathqa-test-java_v1.jsonl --solutions java_samples.jsonl --test-share 0.5

[RLCF evaluation] Each problem becomes a row of code.test.jsonl: `query` and `prefix` are its prompt, `response` is the
canonical solution, and `suffix` is empty, because a completion closes the method and the class itself. The program is
prefix + response + suffix + tests; in Python, the tests end by calling check(FUNCTION). MathQA, HumanEval and some
problems of MBJP have no published solution: their response is "".

With --test-share below 1, a seeded hash moves problems to code.train.jsonl, for fine-tuning before the test (the paper
tests on 0.2 of MBJP and 0.5 of MathQA), and with --validation-share some of those to code.validation.jsonl. In these
two files, a missing solution is replaced by a completion in --solutions FILE that passes the problem's tests. Problems
without a solution, or above the two length limits, are skipped and counted. The test file keeps all of its problems.

--check runs the canonical solutions; --samples FILE runs the completions in a file of mxeval samples (task_id,
completion). Both print the shares that compile, execute and pass, and programs per second; --check also lists each
failure.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data import prepare
from nanorlhf.cli import Fraction, PositiveInt, Seconds, Seed, Workers, check_ranges, run_module
from nanorlhf.dataset import field, iter_jsonl
from nanorlhf.errors import InputError
from nanorlhf.files import check_out
from nanorlhf.sandbox.execution import Verdict, isolation, make_program, run_programs
from nanorlhf.tokenizer import load_tokenizer

# by prefix of the task_id: MBJP/2, MathQA/0, HumanEval_java/0; MBPP/2 and HumanEval/0 are in Python
DATASETS = {
    "MBJP": "mbjp", "MBPP": "mbpp", "MathQA": "mathqa", "HumanEval_java": "humaneval", "HumanEval": "humaneval",
}  # fmt: skip
TESTS = {"java": "class Main", "python": "def check"}  # what the field 'test' defines


@dataclass(frozen=True, kw_only=True)
class Args(prepare.SourceArgs):
    out: Path = Path("runs/rlcf/bench")
    """directory for the JSON Lines; existing files are replaced"""
    test_share: Fraction = 1.0
    """share of problems in code.test.jsonl; the others go to code.train.jsonl"""
    validation_share: Fraction = 0.0
    """share of those other problems that goes to code.validation.jsonl instead"""
    seed: Seed = 1
    """seed of the splits"""
    solutions: tuple[Path, ...] = ()
    """files of samples: completions that pass replace the missing solutions of training problems"""
    tokenizer: str | None = None
    """directory, file or Hub id; the limits count its tokens (None: no limits)"""
    max_query_length: PositiveInt = 500
    """tokens; training problems with a longer query are skipped"""
    max_response_length: PositiveInt = 256
    """tokens including EOS; training problems with a longer response are skipped"""
    check: bool = False
    """run the canonical solutions"""
    samples: Path | None = None
    """run the completions in this file (JSON Lines with task_id and completion)"""
    timeout: Seconds = 10.0
    """maximum wall-clock seconds per program"""
    workers: Workers = 1
    """programs run in parallel"""
    weak_isolation: bool = False
    """run programs even if the system can't restrict their files or network"""


def main(args: Args) -> None:
    check_ranges(args)
    check_out(args.out)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    skipped: Counter[str] = Counter()
    rows = read_problems(args, skipped)
    files = {task_id: output_file(task_id, args) for task_id in rows}
    samples = read_samples(args.samples, rows) if args.samples else []
    solutions = [(row, row["response"]) for row in rows.values() if row["response"]] if args.check else []
    if args.check and not solutions:
        raise InputError(f"--check: no problem in --source {args.source} has a canonical solution.")
    if args.check or samples or args.solutions:
        print("isolation of the programs")
        for sentence in isolation():
            print(f"  {sentence}")

    sampled = fill_in(rows, files, args) if args.solutions else set()
    limits = {"query": args.max_query_length, "response": args.max_response_length}
    written: dict[tuple[str, str], list[str]] = defaultdict(list)  # (file, dataset) -> task ids
    length_table = prepare.LengthTable()
    long_tests: list[int] = []  # lengths of the test queries above the limit
    with prepare.jsonl_files(args.out) as write:
        for task_id, row in rows.items():
            name, dataset, lengths = files[task_id], row["meta"]["dataset"], {}
            if name != "code.test" and not row["response"]:
                skipped[f"{dataset}: a training problem without a solution"] += 1
                continue
            if tokenizer is not None:
                lengths, too_long = prepare.program_lengths(row, tokenizer, limits)
                if name != "code.test" and too_long:
                    skipped[f"{dataset}: a training problem with a {too_long[0]}"] += 1
                    continue
                if lengths["query"] > args.max_query_length:
                    long_tests.append(lengths["query"])
                length_table.add(name, **lengths)
            write(name, row)
            written[name, dataset].append(task_id)
        if not written:
            raise InputError(
                f"--source {args.source}: none of the {len(rows)} problems can be used; nothing was written."
            )
    if tokenizer is not None:
        tokenizer.save(args.out)  # for models with random weights
        print(f"\n{length_table}")

    print()
    for (name, dataset), task_ids in sorted(written.items()):
        num_solved, num_sampled = sum(bool(rows[i]["response"]) for i in task_ids), len(sampled.intersection(task_ids))
        taken = f", {num_sampled} of them sampled" if args.solutions else ""
        print(f"{name + '.jsonl':<22} {dataset:<10} {len(task_ids):6} problems, {num_solved} with a solution{taken}")
    prepare.print_skipped(skipped)
    if long_tests:
        print(
            f"note: {len(long_tests)} queries of code.test.jsonl are longer than --max-query-length "
            f"{args.max_query_length} but kept: run eval.py with --max-query-length {max(long_tests)}."
        )
    for name in ("code.train", "code.validation", "code.test"):
        if (args.out / f"{name}.jsonl").exists() and not any(file == name for file, _ in written):
            print(f"note: {args.out / name}.jsonl is from an earlier run and may contain problems of this test.")
    print(f"\nwritten: {args.out}")
    if args.check:
        verdicts = check("canonical solutions", solutions, args)
        for (row, _), verdict in zip(solutions, verdicts, strict=True):
            if not verdict.passed:
                lines = verdict.output.strip().splitlines() or [""]
                line = lines[-1] if verdict.compiled else lines[0]  # the exception, or the first compiler error
                print(f"  {row['meta']['task_id']}: {verdict.reason}: {line}")
    if samples:
        check(str(args.samples), samples, args)


def read_problems(args: Args, skipped: Counter[str]) -> dict[str, dict]:
    """Read the problems of --source as rows, by task_id; updates `skipped`."""
    rows: dict[str, dict] = {}
    locations: dict[str, str] = {}
    for path, _ in prepare.source_files(args):
        for where, record in prepare.read_records(path):
            if "completion" in record:
                skipped["a sample, not a problem: pass it to --samples or --solutions"] += 1
                continue
            row = make_row(record, where)
            first = next(iter(rows.values()), row)
            if row["language"] != first["language"]:
                raise InputError(
                    f"{where}: the field 'language' is {row['language']!r}, unlike {first['meta']['task_id']}: pass "
                    "one language at a time."
                )
            task_id = row["meta"]["task_id"]
            if task_id in rows:
                raise InputError(f"{where}: duplicate {task_id}, first at {locations[task_id]}.")
            rows[task_id] = row
            locations[task_id] = where
    return rows


def output_file(task_id: str, args: Args) -> str:
    if prepare.in_validation(task_id, args.test_share, args.seed):
        return "code.test"
    validation = prepare.in_validation(f"{task_id} of the others", args.validation_share, args.seed)
    return "code.validation" if validation else "code.train"


def fill_in(rows: dict[str, dict], files: dict[str, str], args: Args) -> set[str]:
    """Fill missing solutions of training problems with the first passing completion; return the ids of the problems."""
    completions = [
        (row, completion)
        for path in args.solutions
        for row, completion in read_samples(path, rows)
        if files[row["meta"]["task_id"]] != "code.test" and not row["response"]
    ]
    if not completions:
        raise InputError(
            f"--solutions: with --test-share {args.test_share}, these files have no completion for a training problem "
            "without a solution."
        )
    filled = set()
    verdicts = check("samples for the training problems", completions, args)
    for (row, completion), verdict in zip(completions, verdicts, strict=True):
        if verdict.passed and not row["response"]:
            row["response"] = completion
            filled.add(row["meta"]["task_id"])
    return filled


def make_row(record: dict, where: str) -> dict:
    """Convert a problem of mxeval to a row of code.jsonl."""
    task_id, language, prompt, tests, entry_point = (
        field(record, name, str, where) for name in ("task_id", "language", "prompt", "test", "entry_point")
    )
    if language not in TESTS:
        raise InputError(f"{where}: the field 'language' is {language!r}, not java or python.")
    dataset = DATASETS.get(task_id.partition("/")[0])
    if dataset is None:
        known = ", ".join(DATASETS)
        raise InputError(f"{where}: the field 'task_id' is {task_id!r}; it must start with one of {known}.")
    if TESTS[language] not in tests:
        raise InputError(f"{where}: the field 'test' has no {TESTS[language]}.")
    if language == "python":
        tests += f"\n\ncheck({entry_point})\n"
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
    """Read the (problem, completion) pairs in a file of samples."""
    samples = []
    for where, record in iter_jsonl(path):
        task_id, completion = (field(record, name, str, where) for name in ("task_id", "completion"))
        if task_id not in rows:
            raise InputError(f"{where}: --source has no problem {task_id}.")
        samples.append((rows[task_id], completion))
    return samples


def check(title: str, pairs: Sequence[tuple[dict, str]], args: Args) -> list[Verdict]:
    """Run the programs of (problem, completion) pairs, print a table by dataset, return the verdicts."""
    began = time.monotonic()
    programs, language = [make_program(*pair) for pair in pairs], pairs[0][0]["language"]
    verdicts = run_programs(programs, language, args.timeout, args.workers, weak_isolation=args.weak_isolation)
    seconds = time.monotonic() - began
    by_dataset: dict[str, list[Verdict]] = defaultdict(list)
    for (row, _), verdict in zip(pairs, verdicts, strict=True):
        by_dataset[row["meta"]["dataset"]].append(verdict)
    print(f"\n{title}\n{'':<12} {'programs':>8} {'compiled':>9} {'executed':>9} {'passed':>9}   why not passed")
    for dataset, dataset_verdicts in sorted(by_dataset.items()):
        shares = [
            sum(getattr(v, name) for v in dataset_verdicts) / len(dataset_verdicts)
            for name in ("compiled", "executed", "passed")
        ]
        reasons = Counter(v.reason for v in dataset_verdicts if not v.passed)
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common()) or "-"
        print(f"{dataset:<12} {len(dataset_verdicts):8} " + " ".join(f"{share:9.2%}" for share in shares) + f"   {why}")
    rate = len(verdicts) / seconds
    print(f"{len(verdicts)} programs in {seconds:.1f} s: {rate:.1f} per second, {args.workers} in parallel")
    return verdicts


if __name__ == "__main__":
    run_module(main, Args)
