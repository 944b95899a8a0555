"""The embedded world of programs: problems with known answers and several solutions -> CodeNet's layout and code.jsonl.

    python -m data.programs --out runs/programs --seed 1
    python -m data.codenet --source runs/programs/sources --out runs/programs/data --vocab-size 512

A problem asks for a number computed from a list ("the sum of the squares of the prices above the limit, plus 3"): a
filter, a term per item, a fold, and a final step. Its solutions differ in the loop, the variable names, and which
intermediate results get a variable. To write one, a model has to find filter, term and fold in the comment and use the
same names throughout: after a slip, the compiler reports "cannot find symbol". Most programs have made-up names, which
are harder to copy: an imitator uses them equally often, whether it can copy them or not.

    sources/    CodeNet's layout: data/p00001/Java/s1.java and problem_descriptions/p00001.html; and tests/p00001.txt
    bench/      code.{train,validation,test}.jsonl: other problems, to be completed after the method's signature

All problems have tests, in the style of MBJP.

The language is Java if there is a JDK, else Python.
"""

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.codenet import java_methods, make_row, python_methods
from data.prepare import jsonl_files
from nanorlhf.cli import Count, PositiveInt, Seed, check_ranges, run_module
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, delete
from nanorlhf.progress import Progress

# ---------------------------------------------------------------- 1. problems
ITEMS = {  # name of the list: name of an item
    "prices": "price", "weights": "weight", "ages": "age", "scores": "score", "marks": "mark", "costs": "cost",
    "sizes": "size", "points": "point", "steps": "step", "levels": "level", "hours": "hour", "votes": "vote",
    "depths": "depth", "speeds": "speed", "rates": "rate", "taxes": "tax", "fees": "fee", "lengths": "length",
    "ranks": "rank", "orders": "order", "loads": "load", "gains": "gain", "wages": "wage", "heights": "height",
}  # fmt: skip
BOUNDS = ("limit", "bound", "cap", "mean", "goal", "edge", "mark", "line", "base", "bar")
# parts of the comment; {b} is one of BOUNDS, {k} a number
FILTERS = {"all": "", "above": " above the {b}", "below": " below the {b}"}
TERMS = {"item": "", "square": "the squares of ", "times": "{k} times "}
FOLDS = {"sum": "sum of ", "count": "number of ", "largest": "largest of "}
ENDS = {"none": "", "plus": ", plus {k}"}
ACCUMULATORS = {
    "sum": ("sum", "total", "result"),
    "count": ("count", "number", "result"),
    "largest": ("best", "top", "result"),
}
# for made-up names
SYLLABLES = ("ba", "ce", "di", "fo", "gu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "zu")
MADE_UP_NAMES = 0.75  # share of programs with made-up names


@dataclass(frozen=True)
class Problem:
    items: str
    bound: str
    filter: str
    term: str
    fold: str
    end: str
    factor: int
    last: int

    @property
    def needs_bound(self) -> bool:
        return self.filter != "all"

    @property
    def text(self) -> str:
        """The comment."""
        term = TERMS[self.term].format(k=self.factor)
        which = FILTERS[self.filter].format(b=self.bound)
        return f"the {FOLDS[self.fold]}{term}the {self.items}{which}{ENDS[self.end].format(k=self.last)}"

    def answer(self, numbers: list[int], bound: int) -> int:
        """Return the value that a correct program returns."""
        kept = [n for n in numbers if {"all": True, "above": n > bound, "below": n < bound}[self.filter]]
        terms = [{"item": n, "square": n * n, "times": self.factor * n}[self.term] for n in kept]
        folded = {"sum": sum(terms), "count": len(terms), "largest": max(terms, default=0)}[self.fold]
        return folded + self.last if self.end == "plus" else folded


def draw_problem(rng: random.Random) -> Problem:
    items = rng.choice(sorted(ITEMS))
    fold = rng.choice(list(FOLDS))
    return Problem(
        items=items,
        bound=rng.choice([name for name in BOUNDS if name != ITEMS[items]]),
        filter=rng.choice(list(FILTERS)),
        term="item" if fold == "count" else rng.choice(list(TERMS)),
        fold=fold,
        end=rng.choice(list(ENDS)),
        factor=rng.randint(2, 5),
        last=rng.randint(2, 5),
    )


# ---------------------------------------------------------------- 2. solutions
@dataclass(frozen=True)
class Style:
    """One programmer's coding style."""

    loop: Literal["each", "index", "while"]
    accumulator: str
    item: str
    index: str
    named_term: str | None
    """variable for the term; None: no variable"""
    skips: bool
    """`continue` for items that fail the filter, instead of a block for those that pass"""
    named_result: bool


def made_up_names(num_names: int, rng: random.Random) -> list[str]:
    """Draw distinct made-up words."""
    names: dict[str, None] = {}
    while len(names) < num_names:
        names["".join(rng.choices(SYLLABLES, k=3))] = None
    return list(names)


def draw_style(problem: Problem, rng: random.Random) -> Style:
    loop = rng.choice(("each", "each", "index", "while"))
    accumulator, index = rng.choice(ACCUMULATORS[problem.fold]), rng.choice(("i", "j", "at"))
    item = ITEMS[problem.items]
    if rng.random() < MADE_UP_NAMES:
        accumulator, item, index = made_up_names(3, rng)
    return Style(
        loop=loop,
        accumulator=accumulator,
        item=item,
        index=index,
        named_term=rng.choice((None, None, "part", "value")) if problem.term != "item" else None,
        # in a while loop, `continue` would skip the increment of the index
        skips=loop != "while" and problem.filter != "all" and rng.random() < 0.3,
        named_result=problem.end != "none" and rng.random() < 0.3,
    )


def body(problem: Problem, style: Style, language: str) -> list[str]:
    """Return the lines of a method's body, without the body's indentation."""
    java = language == "java"
    items, item, acc = problem.items, style.item, style.accumulator
    end, colon, let = (";", " {", "int ") if java else ("", ":", "")

    def block(head: str, inner: list[str]) -> list[str]:
        return [head + colon, *("    " + line for line in inner), *(["}"] if java else [])]

    def when(condition: str) -> str:
        return f"if ({condition})" if java else f"if {condition}"

    term = {"item": item, "square": f"{item} * {item}", "times": f"{problem.factor} * {item}"}[problem.term]
    folding = []
    if style.named_term:
        folding.append(f"{let}{style.named_term} = {term}{end}")
        term = style.named_term
    if problem.fold in ("sum", "count"):
        folding.append(f"{acc} += {term if problem.fold == 'sum' else 1}{end}")
    else:
        folding += block(when(f"{term} > {acc}"), [f"{acc} = {term}{end}"])

    condition, opposite = {
        "all": ("", ""),
        "above": (f"{item} > {problem.bound}", f"{item} <= {problem.bound}"),
        "below": (f"{item} < {problem.bound}", f"{item} >= {problem.bound}"),
    }[problem.filter]
    if style.skips:
        inner = [*block(when(opposite), [f"continue{end}"]), *folding]
    else:
        inner = block(when(condition), folding) if condition else folding

    size = f"{items}.length" if java else f"len({items})"
    # counting all items doesn't use them
    is_unused = problem.fold == "count" and problem.filter == "all"
    pick = [] if is_unused else [f"{let}{item} = {items}[{style.index}]{end}"]
    lines = [f"{let}{acc} = 0{end}"]
    if style.loop == "each":
        lines += block(f"for (int {item} : {items})" if java else f"for {item} in {items}", inner)
    elif style.loop == "index":
        i = style.index
        head = f"for (int {i} = 0; {i} < {size}; {i}++)" if java else f"for {i} in range({size})"
        lines += block(head, [*pick, *inner])
    else:
        i = style.index
        head = f"while ({i} < {size})" if java else f"while {i} < {size}"
        lines += [f"{let}{i} = 0{end}", *block(head, [*pick, *inner, f"{i}++{end}" if java else f"{i} += 1"])]

    result = f"{acc} + {problem.last}" if problem.end == "plus" else acc
    if style.named_result:
        return [*lines, f"{let}answer = {result}{end}", f"return answer{end}"]
    return [*lines, f"return {result}{end}"]


def head(problem: Problem, language: str) -> str:
    """Return everything before the body."""
    if language == "java":
        bound = f", int {problem.bound}" if problem.needs_bound else ""
        return f"class Solution {{\n    static int solve(int[] {problem.items}{bound}) {{\n"
    return f"def solve({problem.items}{', ' + problem.bound if problem.needs_bound else ''}):\n"


def solution(problem: Problem, style: Style, language: str) -> str:
    indent = "        " if language == "java" else "    "
    text = head(problem, language) + "".join(f"{indent}{line}\n" for line in body(problem, style, language))
    return text + "    }\n}\n" if language == "java" else text


def tests(problem: Problem, language: str, rng: random.Random, num_tests: int = 5) -> str:
    """Write tests in the style of MBJP: a wrong answer raises an exception; Python uses assertions."""
    lines = []
    for i in range(num_tests):
        numbers = [rng.randint(1, 30) for _ in range(rng.randint(3, 7))]
        bound = rng.choice(numbers)
        expected = problem.answer(numbers, bound)
        listed = ", ".join(map(str, numbers))
        argument = f", {bound}" if problem.needs_bound else ""
        if language == "java":
            message = f'"Exception -- test case {i} did not pass. x{i} = " + x{i}'
            lines.append(
                f"        int x{i} = Solution.solve(new int[]{{{listed}}}{argument});\n"
                f"        if (x{i} != {expected}) {{\n"
                f"            throw new java.lang.Exception({message});\n"
                f"        }}\n"
            )
        else:
            lines.append(f"assert solve([{listed}]{argument}) == {expected}\n")
    if language == "java":
        opening = "\nclass Main {\n    public static void main(String[] args) throws Exception {\n"
        return opening + "".join(lines) + "    }\n}\n"
    return "\n\n" + "".join(lines)


# ---------------------------------------------------------------- 3. files
@dataclass(frozen=True, kw_only=True)
class Args:
    out: Path = Path("runs/programs")
    """directory for sources/ and bench/; existing files are replaced"""
    language: Literal["auto", "java", "python"] = "auto"
    """auto: Java if there is a JDK, else Python"""
    num_problems: Count = 600
    """problems in sources/"""
    num_solutions: Count = 4
    """maximum number of solutions per problem; duplicates are dropped"""
    num_bench: tuple[PositiveInt, PositiveInt, PositiveInt] = (96, 32, 64)
    """problems in bench/: train, validation, test"""
    seed: Seed = 1
    """seed of every problem and program"""


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield an endless stream of problems with distinct texts."""
    seen = set()
    while True:
        problem = draw_problem(rng)
        if problem.text not in seen:
            seen.add(problem.text)
            yield problem


def main(args: Args) -> None:
    check_ranges(args)
    if args.num_problems + sum(args.num_bench) > 10_000:
        raise InputError(
            f"--num-problems {args.num_problems} and --num-bench {sum(args.num_bench)}: at most 10,000 problems in "
            "total are supported."
        )
    check_out(args.out)
    language = args.language
    if language == "auto":
        language = "java" if shutil.which("javac") else "python"
    rng = random.Random(args.seed)
    stream = problems(rng)
    sources = args.out / "sources"
    if sources.is_symlink() or sources.is_file():
        raise InputError(f"--out {args.out}: {sources} exists and is not a directory.")
    for stale in ("data", "problem_descriptions", "tests"):
        delete(sources / stale)  # from an earlier run
    folder, suffix = ("Java", "java") if language == "java" else ("Python", "py")
    num_programs = 0
    (sources / "problem_descriptions").mkdir(parents=True)
    (sources / "tests").mkdir()
    for number in Progress(range(1, args.num_problems + 1), desc="programs", unit=" problems", leave=False):
        problem = next(stream)
        name = f"p{number:05}"
        (sources / "problem_descriptions" / f"{name}.html").write_text(f"<p>{problem.text}</p>\n", encoding="utf-8")
        tests_rng = random.Random(f"{args.seed} {name}")  # `rng` would change the next problems
        (sources / "tests" / f"{name}.txt").write_text(tests(problem, language, tests_rng), encoding="utf-8")
        directory = sources / "data" / name / folder
        directory.mkdir(parents=True)
        styles = {draw_style(problem, rng): None for _ in range(args.num_solutions)}  # an ordered set
        for i, style in enumerate(styles, start=1):
            (directory / f"s{i}.{suffix}").write_text(solution(problem, style, language), encoding="utf-8")
        num_programs += len(styles)

    with jsonl_files(args.out / "bench") as write:
        for split, count in zip(("train", "validation", "test"), args.num_bench, strict=True):
            for number in range(count):
                problem = next(stream)
                program = solution(problem, draw_style(problem, rng), language)
                methods = java_methods(program) if language == "java" else python_methods(program)
                full_body = methods[0][0]  # cut at the method's first statement
                row = make_row(
                    program, full_body, f"{split}{number}", problem.text, "", language, tests(problem, language, rng)
                )
                row["meta"] = {"task_id": f"{split}/{number}", "dataset": "embedded", "entry_point": "solve"}
                write(f"code.{split}", row)
    counts = ", ".join(f"{n} to {verb}" for n, verb in zip(args.num_bench, ("train", "validate", "test"), strict=True))
    print(f"{language}: {num_programs:,} programs for {args.num_problems:,} problems in {sources}")
    print(f"{sum(args.num_bench)} problems with tests in {args.out / 'bench'}: {counts}")


if __name__ == "__main__":
    run_module(main, Args)
