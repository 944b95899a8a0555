"""The embedded world of programs: the answer matches the comment, and every solution computes it."""

import builtins
import itertools
import json
import keyword
import random
import re
import shutil
from dataclasses import replace

import pytest

from data import codenet, programs
from nanorlhf.errors import InputError
from nanorlhf.rlcf.compilers import JavaCompiler, PythonCompiler
from nanorlhf.sandbox.execution import Program, make_program, run_programs

pytestmark = pytest.mark.slow

needs_jdk = pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")
COMMENT = re.compile(
    r"the (sum|number|largest) of (?:(the squares) of |(\d) times )?the \w+?"
    r"(?: (above|below) the \w+)?(?:, plus (\d))?"
)


def read_comment(text, numbers, bound):
    """Compute the answer from just the comment."""
    fold, squares, k, relation, last = COMMENT.fullmatch(text).groups()
    values = []
    for n in numbers:
        if relation == "above" and n <= bound or relation == "below" and n >= bound:
            continue
        values.append(n**2 if squares else n * int(k or 1))
    if fold == "largest":
        result = sorted(values)[-1] if values else 0  # for an empty list
    else:
        result = len(values) if fold == "number" else sum(values)
    return result + int(last or 0)


def drawn(num_problems, seed=0):
    """Yield random (problem, style, rng); a hundred of them include all loops, folds, filters, terms and ends."""
    rng = random.Random(seed)
    for _ in range(num_problems):
        problem = programs.draw_problem(rng)
        yield problem, programs.draw_style(problem, rng), rng


# -------------------------------------------------------------------------------------------------------- 1. problems
def test_the_answer_matches_the_comment():
    kinds = set()
    for problem, _, rng in drawn(500):
        numbers = [rng.randint(1, 30) for _ in range(rng.randint(0, 7))]
        bound = rng.choice([*numbers, 15])
        assert problem.answer(numbers, bound) == read_comment(problem.text, numbers, bound), problem.text
        kinds.add((problem.filter, problem.fold))
        assert problem.needs_bound == bool(re.search(rf"the {problem.bound}\b", problem.text))
    assert len(kinds) == 3 * 3


def test_worked_examples():
    base = programs.Problem("prices", "limit", "above", "square", "sum", "plus", factor=4, last=2)
    assert base.text == "the sum of the squares of the prices above the limit, plus 2"
    assert base.answer([1, 5, 6], 4) == 25 + 36 + 2
    assert replace(base, filter="all", term="times", end="none").answer([3, 4, 6], 0) == 12 + 16 + 24
    assert replace(base, fold="largest", term="item").answer([1, 2], 4) == 0 + 2
    assert replace(base, fold="count", term="item", filter="below").answer([3, 5, 4], 4) == 1 + 2


def test_there_are_enough_problems_for_the_largest_world():
    rng = random.Random(0)
    texts = {problem.text for problem in itertools.islice(programs.problems(rng), 3000)}
    assert len(texts) == 3000
    num_filters = 1 + 2 * len(programs.BOUNDS)  # all, or above or below a bound
    num_folded = 2 * (2 + 4) + 1  # item, square and four multiples, for sum and largest; plus count
    assert 30_000 < len(programs.ITEMS) * num_filters * num_folded * 5 < 35_000


def test_no_name_in_a_program_means_two_things():
    items = {name for pair in programs.ITEMS.items() for name in pair}
    accumulators = {name for names in programs.ACCUMULATORS.values() for name in names}
    other_names = {"i", "j", "at", "part", "value", "answer", "solve"}
    assert len(items) == 2 * len(programs.ITEMS) and not items & accumulators
    assert not (items | accumulators) & other_names and not set(programs.BOUNDS) & (accumulators | other_names)
    assert not set(programs.BOUNDS) & set(programs.ITEMS)
    syllables = "|".join(programs.SYLLABLES)  # made-up names have no other meaning
    words = {*items, *accumulators, *other_names, *programs.BOUNDS, *keyword.kwlist, *dir(builtins)}
    assert not [word for word in words if re.fullmatch(f"({syllables}){{3}}", word)]
    num_own = 0
    for problem, style, _ in drawn(300):
        assert problem.bound != programs.ITEMS[problem.items]  # `mark` is a bound and an item
        names = [style.item, style.accumulator, style.index]
        assert len(set(names)) == 3
        num_own += all(re.fullmatch(f"({syllables}){{3}}", name) for name in names)
    assert 0.65 < num_own / 300 < 0.85


# ------------------------------------------------------------------------------------------------------- 2. solutions
def test_every_python_solution_passes_its_tests_without_a_diagnostic():
    texts = []
    for problem, style, rng in drawn(150):
        for accumulator in programs.ACCUMULATORS[problem.fold]:
            text = programs.solution(problem, replace(style, accumulator=accumulator), "python")
            names = {}
            exec(text + programs.tests(problem, "python", rng), names)
            for numbers in ([], [30], [1, 1]):
                arguments = (numbers, 7) if problem.needs_bound else (numbers,)
                assert names["solve"](*arguments) == read_comment(problem.text, numbers, 7), text
            texts.append(text)
    with PythonCompiler() as compiler:
        assert not any(compiler.check(texts))


def test_the_python_tests_fail_on_a_wrong_answer():
    for problem, style, rng in drawn(20, seed=1):
        wrong = programs.solution(problem, style, "python").replace("    return ", "    return 1 + ")
        with pytest.raises(AssertionError):
            exec(wrong + programs.tests(problem, "python", rng), {})


@needs_jdk
def test_no_java_solution_has_a_diagnostic():
    texts = [programs.solution(problem, style, "java") for problem, style, _ in drawn(150)]
    texts += [
        programs.solution(problem, style, "java") + programs.tests(problem, "java", rng)
        for problem, style, rng in drawn(10, seed=1)
    ]
    with JavaCompiler(workers=1) as compiler:
        assert not any(compiler.check(texts))


@needs_jdk
def test_java_solutions_pass_their_tests_and_wrong_ones_fail():
    texts = []
    for problem, style, rng in itertools.islice(drawn(20, seed=2), 6):
        text, tests = programs.solution(problem, style, "java"), programs.tests(problem, "java", rng)
        texts += [
            Program(text, "", "", tests),
            Program(text.replace("        return ", "        return 1 + "), "", "", tests),
        ]
    reasons = [verdict.reason for verdict in run_programs(texts[:7], "java", workers=2)]
    assert reasons == ["passed", "wrong_answer"] * 3 + ["passed"]


@pytest.mark.parametrize("language", ["java", "python"])
def test_styles_change_the_text_but_not_the_signature(language):
    for problem, _, rng in drawn(20):
        texts = {programs.solution(problem, programs.draw_style(problem, rng), language) for _ in range(30)}
        assert len(texts) >= 8
        assert all(text.startswith(programs.head(problem, language)) for text in texts)
        if language == "java":
            assert all(text.count("{") == text.count("}") for text in texts)


# ------------------------------------------------------------------------------------------------------- 3. the files
SMALL = programs.Args(num_problems=8, num_solutions=3, num_bench=(5, 2, 3), language="python")


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def bench(out):
    return {
        split: [json.loads(line) for line in (out / f"bench/code.{split}.jsonl").read_text().splitlines()]
        for split in ("train", "validation", "test")
    }


def extract_comment(row):
    return row["query"].split("\n")[row["language"] == "java"].strip("#* ")


@pytest.mark.parametrize("language", ["java", "python"])
def test_every_problem_occurs_once(tmp_path, language):
    programs.main(replace(SMALL, out=tmp_path, language=language))
    texts = [path.read_text() for path in (tmp_path / "sources/problem_descriptions").glob("*.html")]
    texts = [re.fullmatch(r"<p>(.*)</p>\n", text)[1] for text in texts]
    rows = bench(tmp_path)
    assert {split: len(rows[split]) for split in rows} == {"train": 5, "validation": 2, "test": 3} and len(texts) == 8
    comments = [extract_comment(row) for split in rows for row in rows[split]]
    assert len(set(texts + comments)) == 8 + 10
    assert all(COMMENT.fullmatch(text) for text in texts + comments)


@pytest.mark.parametrize("language", ["java", "python"])
def test_a_row_of_bench_is_a_passing_program_cut_after_the_signature(tmp_path, language):
    if language == "java" and shutil.which("javac") is None:
        pytest.skip("no JDK on this machine")
    programs.main(replace(SMALL, out=tmp_path, language=language, num_bench=(3, 1, 1)))
    rows = [row for split in bench(tmp_path).values() for row in split]
    texts = [make_program(row, row["response"]) for row in rows]
    assert [verdict.reason for verdict in run_programs(texts, language, workers=2)] == ["passed"] * 5
    for row in rows:
        comment = extract_comment(row)
        if language == "java":
            assert row["query"] == f"/**\n * {comment}\n */\n" + row["prefix"] + "/*<your_code_here>*/"
        else:
            assert row["query"] == f"# {comment}\n" + row["prefix"] + "    # <your_code_here>\n"
        assert COMMENT.fullmatch(comment) and row["language"] == language
        assert row["prefix"].count("\n") == (1 if language == "python" else 2)  # just the signature


@pytest.mark.parametrize("language", ["java", "python"])
def test_data_codenet_reads_the_sources(tmp_path, language, capsys):
    if language == "java" and shutil.which("javac") is None:
        pytest.skip("no JDK on this machine")
    programs.main(replace(SMALL, out=tmp_path, language=language))
    codenet.main(codenet.Args(source=tmp_path / "sources", out=tmp_path / "data", language=language, vocab_size=300))
    assert re.search(r"\n +8  with a description\n", capsys.readouterr().out)
    rows = [json.loads(line) for path in (tmp_path / "data").glob("*.jsonl") for line in path.open()]
    programs_of_sources = len(list((tmp_path / "sources/data").rglob("s*.*")))
    assert 8 < len(rows) <= programs_of_sources  # all pass the static checks; some differ only in whitespace
    assert all(COMMENT.fullmatch(extract_comment(row)) for row in rows)
    right = [make_program(row, row["response"]) for row in rows]  # cut at any statement
    assert all(verdict.passed for verdict in run_programs(right, language, workers=2))
    wrong = [make_program(row, row["response"].replace("return ", "return 1 + ")) for row in rows]
    assert not any(verdict.passed for verdict in run_programs(wrong, language, workers=2))


def test_the_seed_fixes_every_file_and_another_seed_replaces_them_all(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for out in (one, two):
        programs.main(replace(SMALL, out=out))
    assert contents(one) == contents(two)
    (two / "sources").joinpath("mine.txt").write_text("mine")  # must not be deleted
    programs.main(replace(SMALL, out=two, seed=2, num_problems=4))
    programs.main(replace(SMALL, out=tmp_path / "three", seed=2, num_problems=4))
    after = contents(two)
    assert after.pop("sources/mine.txt") == b"mine" and after == contents(tmp_path / "three") != contents(one)


def test_the_language_is_python_without_a_jdk(tmp_path, monkeypatch, capsys):
    for javac, ending in ((None, ".py"), ("/usr/bin/javac", ".java")):
        monkeypatch.setattr(shutil, "which", lambda name, javac=javac: javac)
        programs.main(replace(SMALL, out=tmp_path, language="auto"))
        assert {path.suffix for path in (tmp_path / "sources/data").rglob("s*.*")} == {ending}
    assert "java: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_problems": 0}, "--num-problems 0: must be from 1 to a million"),
        ({"num_solutions": 0}, "--num-solutions 0: must be from 1 to a million"),
        ({"num_bench": (1, 0, 1)}, "--num-bench 0: must be at least 1"),
        ({"num_problems": 19_991}, "--num-problems 19991 and --num-bench 10: "),
        ({"seed": -1}, "--seed -1"),
    ],
)
def test_impossible_settings_are_rejected_before_anything_is_written(tmp_path, change, sentence):
    with pytest.raises(InputError, match=sentence) as raised:
        programs.main(replace(SMALL, out=tmp_path / "out", **change))
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


def test_an_output_path_that_is_a_file_is_named(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(InputError, match="--out .*out is a file"):
        programs.main(replace(SMALL, out=tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"
