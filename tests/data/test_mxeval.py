import json
import re
from dataclasses import replace

import pytest

import train_sft
from data import mxeval
from nanorlhf.dataset import load_programs
from nanorlhf.errors import InputError
from nanorlhf.recipes import recipes
from nanorlhf.rlcf import evaluate_programs
from nanorlhf.sandbox.execution import make_program, run_programs
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.data.rows import read

TEST = """

class Main {
    public static void main(String[] args) throws Exception {
        int x0 = Square.square(3);
        if (!(x0 == 9)) {
            throw new java.lang.Exception("Exception -- test case 0 did not pass. x0 = " + x0);
        }
    }
}
"""
PROBLEM = {
    "task_id": "MBJP/2",
    "language": "java",
    "prompt": "class Square {\n    /**\n     * The square.\n     */\n    public static int square(int n) {\n",
    "entry_point": "square",
    "test": TEST,
    "description": "The square.",
    "canonical_solution": "        return n * n;\n    }\n}",
}
PYTHON = {  # a problem of HumanEval in Python
    "task_id": "HumanEval/0",
    "language": "python",
    "prompt": '\n\ndef square(n: int) -> int:\n    """ The square. """\n',
    "entry_point": "square",
    "test": "\n\nMETADATA = {}\n\ndef check(candidate):\n    assert candidate(3) == 9\n    assert candidate(2) == 4",
    "canonical_solution": None,
}
UNSOLVED = PROBLEM | {"task_id": "MathQA/0", "canonical_solution": None}
SAMPLE = {"task_id": "MBJP/2", "completion": " return 9; } }", "language": "java"}


@pytest.fixture
def args(tmp_path):
    return mxeval.Args(source=str(tmp_path / "source"), out=tmp_path / "out")


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def convert(args, *records):
    """Convert `records` and return the rows by file."""
    write(args.out.parent / "source" / "problems.jsonl", *records)
    mxeval.main(args)
    return read(args.out)


# ---------------------------------------------------------------------------------------------------------------- rows
def test_a_problem_becomes_a_row_of_the_data_contract(args):
    assert convert(args, PROBLEM, UNSOLVED) == {
        "code.test": [
            {
                "query": PROBLEM["prompt"],
                "response": PROBLEM["canonical_solution"],
                "language": "java",
                "prefix": PROBLEM["prompt"],
                "suffix": "",
                "tests": TEST,
                "meta": {"task_id": "MBJP/2", "dataset": "mbjp", "entry_point": "square"},
            },
            {
                "query": PROBLEM["prompt"],
                "response": "",
                "language": "java",
                "prefix": PROBLEM["prompt"],
                "suffix": "",
                "tests": TEST,
                "meta": {"task_id": "MathQA/0", "dataset": "mathqa", "entry_point": "square"},
            },
        ]
    }


def test_a_program_is_exactly_prompt_completion_and_tests(args):
    [row] = convert(args, PROBLEM)["code.test"]
    program = make_program(row, "return 0;}}")
    assert program.code + program.tests == PROBLEM["prompt"] + "return 0;}}" + TEST


def test_a_program_in_python_ends_by_checking_its_function(args):
    [row] = convert(args, PYTHON)["code.test"]
    assert row["meta"] == {"task_id": "HumanEval/0", "dataset": "humaneval", "entry_point": "square"}
    completions = {"    return n * n\n": True, "    return 9\n": False, "    pass\n": False}
    verdicts = run_programs([make_program(row, completion) for completion in completions], "python")
    assert [verdict.passed for verdict in verdicts] == [*completions.values()]
    assert [verdict.share for verdict in verdicts] == [1, 0.5, 0]  # so `check` is called


def test_samples_in_the_source_are_skipped_and_counted(args, capsys):
    write(args.out.parent / "source" / "examples" / "samples.jsonl", SAMPLE, SAMPLE)
    assert len(convert(args, PROBLEM)["code.test"]) == 1
    assert re.search(r"^ +2  a sample, not a problem: pass it to --samples", capsys.readouterr().out, re.MULTILINE)


def test_the_test_set_is_a_seeded_random_share(args, capsys):
    problems = [PROBLEM | {"task_id": f"MBJP/{i}"} for i in range(100)]
    problems += [UNSOLVED | {"task_id": f"MathQA/{i}"} for i in range(100)]
    args = replace(args, test_share=0.3)
    rows = convert(args, *problems)
    tested = {row["meta"]["task_id"] for row in rows["code.test"]}
    trained = {row["meta"]["task_id"] for row in rows["code.train"]}
    assert 40 <= len(tested) <= 80 and not tested & trained  # 60 expected, standard deviation 6.5
    assert all(row["response"] for row in rows["code.train"])
    skipped = 200 - len(tested) - len(trained)
    expected = rf"^ +{skipped}  mathqa: a training problem without a solution$"
    assert skipped > 0 and re.search(expected, capsys.readouterr().out, re.MULTILINE)
    assert convert(args, *reversed(problems))["code.test"][::-1] == rows["code.test"]
    assert convert(replace(args, seed=2), *problems) != rows


def test_the_validation_set_is_a_random_share_of_the_rest(args):
    problems = [PROBLEM | {"task_id": f"MBJP/{i}"} for i in range(100)]
    before = convert(replace(args, test_share=0.3), *problems)
    rows = convert(replace(args, test_share=0.3, validation_share=0.5), *problems)
    assert rows["code.test"] == before["code.test"]
    drawn = [row["meta"]["task_id"] for name in ("code.train", "code.validation") for row in rows[name]]
    assert sorted(drawn) == sorted(row["meta"]["task_id"] for row in before["code.train"])
    assert 20 <= len(rows["code.validation"]) <= 50  # 35 expected


def test_training_rows_above_the_limits_are_skipped_but_test_rows_never_are(args, capsys, tmp_path):
    tokenizer = train_tokenizer([PROBLEM["prompt"]], 300)
    tokenizer.save(tmp_path / "tokenizer")
    long = {"prompt": PROBLEM["prompt"].replace("The square.", "The square. " * 9)}
    wordy = {"canonical_solution": PROBLEM["canonical_solution"] * 9}
    kinds = [{}, long, wordy, long | UNSOLVED]  # the last one can't be trained on
    problems = [PROBLEM | kinds[i % 4] | {"task_id": f"MBJP/{i}"} for i in range(60)]
    longest = len(tokenizer.encode(PROBLEM["prompt"])), len(tokenizer.encode(PROBLEM["canonical_solution"])) + 1
    args = replace(args, test_share=0.5, validation_share=0.3)
    every = convert(args, *problems)
    capsys.readouterr()
    limits = {"max_query_length": longest[0], "max_response_length": longest[1]}
    rows = convert(replace(args, tokenizer=str(tmp_path / "tokenizer"), **limits), *problems)
    printed = capsys.readouterr().out
    assert rows["code.test"] == every["code.test"]
    for name in ("code.train", "code.validation"):
        assert rows[name] == [
            row for row in every[name]
            if (row["query"], row["response"]) == (PROBLEM["prompt"], PROBLEM["canonical_solution"])
        ]  # fmt: skip
        load_programs(args.out / f"{name}.jsonl", load_tokenizer(args.out), *longest)
    trained = every["code.train"] + every["code.validation"]
    num_long, num_wordy = (
        sum(len(row[column]) > len(PROBLEM[name]) for row in trained)
        for column, name in (("query", "prompt"), ("response", "canonical_solution"))
    )
    assert num_long and num_wordy
    for count, column, limit in ((num_long, "query", longest[0]), (num_wordy, "response", longest[1])):
        reason = f"mbjp: a training problem with a {column} longer than --max-{column}-length {limit}"
        assert re.search(rf"^ +{count}  {reason}$", printed, re.M)
    tests = [len(tokenizer.encode(row["query"])) for row in rows["code.test"]]
    count = sum(length > longest[0] for length in tests)
    assert f"note: {count} queries of code.test.jsonl are longer than --max-query-length {longest[0]} but" in printed
    assert f"run eval.py with --max-query-length {max(tests)}." in printed


@pytest.mark.slow
def test_passing_samples_become_solutions_of_training_problems(args, tmp_path, capsys):
    problems = [UNSOLVED | {"task_id": f"MathQA/{i}"} for i in range(6)] + [PROBLEM]
    args = replace(args, test_share=0.5, seed=3)
    trained = [i for i in range(6) if mxeval.output_file(f"MathQA/{i}", args) == "code.train"]
    [test, *_] = [i for i in range(6) if i not in trained]
    first, second, *_ = trained
    right, wrong = "return n * n; } }", "return n; } }"
    completions = [(test, right), (first, wrong), (first, right), (first, "return n * n * 1; } }"), (second, wrong)]
    samples = write(
        tmp_path / "samples.jsonl",
        *[SAMPLE | {"task_id": f"MathQA/{i}", "completion": text} for i, text in completions],
        SAMPLE | {"completion": right},
    )
    rows = convert(replace(args, solutions=(samples,)), *problems)
    solved = {row["meta"]["task_id"]: row["response"] for row in rows["code.train"]}
    published = {"MBJP/2": PROBLEM["canonical_solution"]} if "MBJP/2" in solved else {}
    assert solved == {f"MathQA/{first}": right} | published  # not for the test, not wrong, not a second one
    assert all(row["response"] == "" for row in rows["code.test"] if row["meta"]["dataset"] == "mathqa")
    printed = capsys.readouterr().out
    assert re.search(r"for the training problems\n.*\nmathqa +4 +100.00% +100.00% +50.00%   2 wrong_a", printed)
    assert re.search(r"^code.train.jsonl +mathqa +1 problems, 1 with a solution, 1 of them sampled", printed, re.M)
    with pytest.raises(
        InputError, match="--solutions: with --test-share 1.0, these files have no completion for a training problem"
    ):
        convert(replace(args, solutions=(samples,), test_share=1.0), *problems)


def test_files_from_an_earlier_split_are_reported(args, capsys):
    problems = [PROBLEM | {"task_id": f"MBJP/{i}"} for i in range(9)]
    convert(replace(args, test_share=0.5), *problems)
    assert "was there before" not in capsys.readouterr().out
    convert(args, *problems)
    assert re.search(r"note: \S+code.train.jsonl is from an earlier run", capsys.readouterr().out)


# --------------------------------------------------------------------------------------------------- broken, refused
@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("{", "malformed JSON"),
        (PROBLEM, "duplicate MBJP/2, first at .*problems.jsonl:1"),
        (PROBLEM | {"language": "kotlin"}, "'language' is 'kotlin', not java or python"),
        (PYTHON, "'language' is 'python', unlike MBJP/2: pass one language at a time"),
        (PROBLEM | {"language": "python"}, "'test' has no def check"),
        (PROBLEM | {"task_id": "CodeNet/3"}, "'task_id' is 'CodeNet/3'; it must start with one of MBJP, MBPP"),
        (PROBLEM | {"test": "check();"}, "'test' has no class Main"),
        (PROBLEM | {"prompt": None}, "'prompt' must be str, not NoneType"),
        (PROBLEM | {"canonical_solution": 3}, "'canonical_solution' must be str, not int"),
        ({key: value for key, value in PROBLEM.items() if key != "test"}, "'test' is missing"),
        ({key: value for key, value in PROBLEM.items() if key != "canonical_solution"}, "'canonical_solution' is miss"),
    ],
)
def test_a_malformed_record_is_reported_with_file_and_line_and_nothing_is_written(args, record, reason):
    with pytest.raises(InputError, match=rf"problems.jsonl:2: .*{reason}|problems.jsonl:2: {reason}") as error:
        convert(args, PROBLEM, record)
    assert "\n" not in str(error.value)
    assert not args.out.exists()


def test_unusable_flags_and_samples_are_rejected(args, tmp_path):
    for changes, reason in (
        ({"test_share": 1.5}, "--test-share 1.5"),
        ({"validation_share": -0.1}, "--validation-share -0.1"),
        ({"timeout": 0.0}, "--timeout 0.0"),
        ({"timeout": float("nan")}, "--timeout nan"),
        ({"workers": 0}, "--workers 0"),
        ({"samples": tmp_path / "none.jsonl"}, "none.jsonl does not exist"),
        ({"samples": write(tmp_path / "a.jsonl", SAMPLE | {"task_id": "MBJP/9"})}, "a.jsonl:1: .*no problem MBJP/9"),
        ({"samples": write(tmp_path / "b.jsonl", {"task_id": "MBJP/2"})}, "b.jsonl:1: .*'completion' is missing"),
    ):
        with pytest.raises(InputError, match=reason):
            convert(replace(args, **changes), PROBLEM)
        assert not args.out.exists()
    with pytest.raises(InputError, match="--check: no problem .* has a canonical solution"):
        convert(replace(args, check=True), UNSOLVED)
    with pytest.raises(InputError, match="none of the 1 problems can be used"):
        convert(replace(args, test_share=0.0), UNSOLVED)
    assert not args.out.exists()


# ------------------------------------------------------------------------------------------------------------ programs
@pytest.mark.slow
def test_check_and_samples_print_shares_and_name_failures(args, tmp_path, capsys):
    wrong = PROBLEM | {"task_id": "MBJP/3", "canonical_solution": "return 1; } }"}
    completions = "return n * n; } }", "return n; } }", "return n / 0; } }", "return m; } }"
    samples = write(tmp_path / "samples.jsonl", *[SAMPLE | {"completion": completion} for completion in completions])
    convert(replace(args, check=True, samples=samples, workers=2), PROBLEM, wrong, UNSOLVED)
    printed = capsys.readouterr().out
    assert re.search(r"canonical solutions\n.*\nmbjp +2 +100.00% +100.00% +50.00%   1 wrong_answer\n", printed)
    assert "  MBJP/3: wrong_answer: Exception -- test case 0 did not pass. x0 = 1\n" in printed
    assert re.search(
        r"samples.jsonl\n.*\nmbjp +4 +75.00% +50.00% +25.00%   1 wrong_answer, 1 exception, 1 compile_error\n"
        r"4 programs in [\d.]+ s: [\d.]+ per second, 2 in parallel\n", printed,
    )  # fmt: skip
    assert "network: none" in printed


# ------------------------------------------------------------------------------------------------------ the real slices
def test_every_real_problem_is_a_row(real_data, args, capsys):
    mxeval.main(replace(args, source=str(real_data / "mxeval_java")))
    rows = read(args.out)["code.test"]
    assert len(rows) == 580 + 97 + 1130
    assert sum(bool(row["response"]) for row in rows) == 524
    assert re.search(r"^ +1,710  a sample", capsys.readouterr().out, re.MULTILINE)


def test_real_mbjp_fits_the_limits_of_training_and_evaluation(real_data, args):
    """No test prompt exceeds eval.py's limit, and no training row exceeds train_sft.py's."""
    source = real_data / "mxeval_java" / "mbxp" / "mbjp_release_v1.2.jsonl"
    tokenizer = real_data / "tokenizers" / "gpt_neox_20b" / "20B_tokenizer.json"
    mxeval.main(replace(args, source=str(source), tokenizer=str(tokenizer), test_share=0.2, validation_share=0.05))
    assert {name: len(rows) for name, rows in read(args.out).items()} == {
        "code.test": 113, "code.train": 399, "code.validation": 21
    }  # fmt: skip
    limit = recipes("programs", evaluate_programs.Args)["rlcf"][1].max_query_length
    load_programs(args.out / "code.test.jsonl", load_tokenizer(args.out), limit, None, needs_response=False)
    sft = recipes("sft", train_sft.Args)["rlcf-bench"][1]
    for name in ("train", "validation"):
        limits = sft.max_query_length, sft.max_response_length
        load_programs(args.out / f"code.{name}.jsonl", load_tokenizer(args.out), *limits)


@pytest.mark.slow
def test_real_canonical_solutions_pass(real_data, args, capsys):
    lines = (real_data / "mxeval_java" / "mbxp" / "mbjp_release_v1.2.jsonl").read_text().splitlines()
    convert(replace(args, check=True), *lines[:20])
    assert re.search(r"mbjp +18 +100.00% +100.00% +100.00%   -\n", capsys.readouterr().out)
