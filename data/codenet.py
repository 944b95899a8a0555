"""CodeNet's programs, grouped by problem (github.com/IBM/Project_CodeNet) -> code.jsonl. [RLCF data]

    python -m data.codenet --source Project_CodeNet_Java250 --tokenizer gpt2 --out runs/rlcf/data
    python -m data.codenet --source DIR --language python --vocab-size 1024 --out runs/rlcf/data

--source is a directory tree of programs. A program's problem is the CodeNet id (p00001) in its path, or else its
directory, or else, directly in --source, its file name. The problem's text is problem_descriptions/p00001.html, in
--source or a directory above it, without the sections on constraints and samples, which would fill a prompt. If
metadata/p00001.csv exists, only submissions with status Accepted are used. Java250 lacks both directories of the full
CodeNet: put them into it or next to it. If tests/p00001.txt exists, it is code that tests a program for the problem, as
nanorlhf.sandbox.execution defines it; the rows get it as `tests`, for --reward tests. CodeNet has none.

A random method of each program is drawn, then a statement in any of its blocks, and the program is cut there:

    prefix     class A { int f(int n) { while (n > 9) {        everything before the statement
    response   n /= 2; } return n; }                           the rest of the method, with the closing braces
    suffix     int g() { return 2; } }                         everything after the method
    query      the problem's text as a comment, the prefix, and /*<your_code_here>*/

so prefix + response + suffix is the file. Statements in loops, branches and lambdas are as likely as those directly in
the body; nested methods and constructors count as methods. Python functions are cut at a statement that starts its line
and is neither a docstring nor decorated, and the marker is # <your_code_here>.

The cut depends only on --seed and the file's path. All programs for a problem are in the same split. Programs that
don't compile, or with an unused variable in the response, are skipped: the paper trains on programs that pass its
static checks.
"""

import ast
import csv
import io
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Literal

from tree_sitter import Node, Parser

from data import prepare
from data.markup import to_text
from data.prepare import Skipped
from nanorlhf.cli import PositiveInt, Range, Seed, check_ranges, run_module
from nanorlhf.dataset import MAX_PROGRAM
from nanorlhf.errors import InputError
from nanorlhf.files import check_out, read_bytes, read_text
from nanorlhf.progress import Progress
from nanorlhf.rlcf.compilers import JAVA, JavaCompiler, PythonCompiler, first_error
from nanorlhf.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

ENDING = {"java": ".java", "python": ".py"}
PROBLEM = re.compile(r"p\d{5}")
ELIF = re.compile(r"elif\b")
HEADING = re.compile(r"<h([2-6])\b[^>]*>(.*?)</h\1\s*>", re.IGNORECASE | re.DOTALL)  # <h1> is the problem's title
NOT_FOR_THE_PROMPT = re.compile(
    r"\W*(constraints?|limits?|limitations?|samples?|examples?)\b|.*\bfor (the )?(sample|example)"
    r"|.*(制約|入力例|出力例|入出力例|サンプル)",
    re.IGNORECASE | re.DOTALL,
)
METHODS = ("method_declaration", "constructor_declaration", "compact_constructor_declaration")
BLOCKS = ("block", "constructor_body", "switch_block_statement_group")  # the last: after `case 1:`
Share = Annotated[float, Range("at least 0 and below 1", lambda x: 0 <= x < 1)]  # below 1: some are for training
BATCH = 256  # programs per call of the compiler


@dataclass(frozen=True, kw_only=True)
class Args:
    source: Path
    """directory of programs, grouped by problem"""
    out: Path = Path("runs/rlcf/data")
    """directory for code.train.jsonl, code.validation.jsonl and tokenizer.json; existing files are replaced"""
    language: Literal["java", "python"] = "java"
    """language of the files to read: .java or .py"""
    cuts: PositiveInt = 1
    """maximum number of rows per program, each cut at a different statement"""
    nested: bool = True
    """cut at statements in all blocks; False: only directly in the method's body, so that a response closes no block"""
    error_prone_jar: str | None = None
    """class path of ErrorProne's jars, if training uses them: its errors count like javac's"""
    validation_share: Share = 0.05
    """share of problems in code.validation.jsonl"""
    tokenizer: str | None = None
    """directory, file or Hub id; the limits count its tokens (None: no limits)"""
    vocab_size: int | None = None
    """train a byte-level BPE of this size on the train split instead"""
    max_query_length: PositiveInt = 500
    """tokens; rows with a longer query are skipped"""
    max_response_length: PositiveInt = 384
    """tokens including EOS; rows with a longer response are skipped"""
    seed: Seed = 1
    """seed of the cuts and the splits"""


@dataclass(frozen=True)
class Cut:
    """A possible response: the end of a method, as character offsets."""

    method: str
    start: int
    end: int


# ------------------------------------------------------------------------------------------------- 1. where to cut
def java_methods(program: str, nested: bool = True) -> list[list[Cut]] | None:
    """Return the cuts of each method, one per statement, by position; None if the program doesn't parse."""
    root = Parser(JAVA).parse(program.encode()).root_node
    if root.has_error:
        return None
    if program.isascii():
        characters = range(len(program) + 1)
    else:  # the parser counts bytes
        characters = [i for i, character in enumerate(program) for _ in character.encode()] + [len(program)]
    methods, nodes = [], [root]
    while nodes:
        node = nodes.pop()
        nodes.extend(reversed(node.named_children))
        if node.type in METHODS and (body := node.child_by_field_name("body")) is not None:  # abstract ones have none
            name = node.child_by_field_name("name").text.decode()
            end = characters[body.end_byte]
            methods.append([Cut(name, characters[start], end) for start in java_statements(body, nested)])
    return [cuts for cuts in methods if cuts]


def java_statements(body: Node, nested: bool) -> list[int]:
    """Return the sorted byte offsets of the statements in a method's blocks. [RLCF figure 14]"""
    starts, nodes = [], [body]
    while nodes:
        node = nodes.pop()
        if node.type in METHODS:  # in a class within the method
            continue
        children = node.named_children
        nodes += children if nested else []
        if node.type in BLOCKS:  # extra: comments
            starts += [child.start_byte for child in children if child.type != "switch_label" and not child.is_extra]
    return sorted(starts)


def python_methods(program: str, nested: bool = True) -> list[list[Cut]] | None:
    """Do the same for Python. A cut is at the start of a line, so the response starts with the indentation."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences
            tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a NUL byte; last two: deep nesting
        return None
    breaks = [match.span() for match in re.finditer(r"\r\n|\r|\n", program)]
    starts = [0, *(end for _, end in breaks)]
    ends = [*(start for start, _ in breaks), len(program)]
    functions = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        cuts = []
        for statement in python_statements(node, nested):
            start = starts[statement.lineno - 1]
            # col_offset counts bytes; in a blank prefix these are characters, and with any other prefix the test fails
            starts_line = not program[start : start + statement.col_offset].strip()
            continues = statement.lineno > 1 and program.endswith("\\", 0, ends[statement.lineno - 2])
            # `elif` is an `if` in the tree; lineno of a decorated statement isn't its decorator's
            is_branch = ELIF.match(program, start + statement.col_offset)
            if starts_line and not continues and not is_branch and not getattr(statement, "decorator_list", None):
                cuts.append(Cut(node.name, start, ends[node.end_lineno - 1]))
        functions.append(cuts)
    return [cuts for cuts in functions if cuts]


def python_statements(function: ast.FunctionDef | ast.AsyncFunctionDef, nested: bool) -> Iterator[ast.stmt]:
    """Yield the statements in a function's blocks, without its docstring and the insides of functions and classes."""
    body = function.body if ast.get_docstring(function, clean=False) is None else function.body[1:]
    nodes: list[ast.AST] = body[::-1]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.stmt):
            yield node
        if nested and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            nodes.extend(reversed([*ast.iter_child_nodes(node)]))


def draw(methods: list[list[Cut]], num_cuts: int, rng: random.Random) -> list[Cut]:
    """Draw `num_cuts` distinct cuts: for each, a random method, then a random statement in its blocks."""
    remaining = [list(cuts) for cuts in methods]
    drawn = []
    while remaining and len(drawn) < num_cuts:
        method = rng.randrange(len(remaining))
        drawn.append(remaining[method].pop(rng.randrange(len(remaining[method]))))
        if not remaining[method]:
            del remaining[method]
    return drawn


def make_row(program: str, cut: Cut, problem: str, text: str, file: str, language: str, tests: str = "") -> dict:
    """Return a row of code.jsonl; text: the problem's description; tests: code that runs after the program."""
    response = program[cut.start : cut.end]  # [RLCF figure 12]
    prefix, suffix = program[: cut.start], program[cut.end :]
    lines = text.splitlines()
    if language == "java":
        comment = "".join(f" * {line}".rstrip() + "\n" for line in lines).replace("*/", "* /")
        comment = f"/**\n{comment} */\n" if lines else ""
        marker = "/*<your_code_here>*/"
    else:
        comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
        # the response starts with its indentation, so it continues both the prefix and the query
        marker = re.match(r"[ \t\f]*", response)[0] + "# <your_code_here>\n"
    return {
        "query": comment + prefix + marker,
        "response": response,
        "language": language,
        "prefix": prefix,
        "suffix": suffix,
        "tests": tests,
        "meta": {"problem": problem, "file": file, "method": cut.method},
    }


# ------------------------------------------------------------------------------------------- 2. programs of problems
def find_programs(source: Path, language: str) -> list[tuple[str, str, Path]]:
    """Return (problem, path relative to the source, path) of each program, sorted by problem."""
    if not source.exists():
        raise InputError(f"--source {source} does not exist.")
    if not source.is_dir():
        raise InputError(f"--source must be a directory; {source} is a file.")
    root = source.resolve()
    programs = []
    for path in root.rglob("*" + ENDING[language]):
        if path.is_file():
            inside = path.relative_to(root).as_posix().encode(errors="replace").decode()
            ids = [folder for folder in path.parts[:-1] if PROBLEM.fullmatch(folder)]
            folder, _, _ = inside.rpartition("/")
            programs.append((ids[-1] if ids else folder or path.stem, inside, path))
    if not programs:
        raise InputError(f"--source {source} has no {ENDING[language]} files; check --language.")
    return sorted(programs)


def find_above(source: Path, name: str) -> Path | None:
    """Return the file `name` in `source` or the nearest directory above it that has one; None if none does."""
    return next((top / name for top in (source.resolve(), *source.resolve().parents) if (top / name).is_file()), None)


def description(path: Path) -> str:
    """Return a problem's text without the sections on constraints and samples, in whatever order they come."""
    html = read_text(path, "utf-8-sig")
    # put each heading on its own line, even if the HTML has no line breaks
    html = re.sub(r"(?i)(?<!\n)(?=<h[1-6]\b)", "\n", html)
    html = re.sub(r"(?i)(</h[1-6]\s*>)(?!\s*\n)", r"\1\n", html)
    headings = [*HEADING.finditer(html)]
    starts = [*(heading.start() for heading in headings), len(html)]
    kept = html[: starts[0]]
    for heading, end in zip(headings, starts[1:], strict=True):
        if not NOT_FOR_THE_PROMPT.match(to_text(heading[2])):
            kept += html[heading.start() : end]
    return to_text(kept)


def accepted_submissions(path: Path) -> set[str]:
    """Return the ids of the Accepted submissions in CodeNet's table for a problem."""
    try:
        reader = csv.DictReader(io.StringIO(read_text(path, "utf-8-sig"), newline=""), strict=True)
        if not {"submission_id", "status"} <= set(reader.fieldnames or ()):
            raise InputError(f"{path}: expected columns submission_id and status.")
        return {row["submission_id"] for row in reader if row["status"] == "Accepted"}
    except csv.Error as error:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({error}).") from error


def read_program(path: Path) -> str:
    if path.stat().st_size > MAX_PROGRAM:
        raise Skipped(f"more than {MAX_PROGRAM:,} bytes")
    try:
        return read_bytes(path).decode("utf-8-sig")  # from bytes, to keep newlines as they are
    except UnicodeDecodeError as error:
        raise Skipped("not UTF-8") from error


def cut_programs(
    programs: list[tuple[str, str, Path]], args: Args, counts: Counter[str], skipped: dict[str, list[str]]
) -> Iterator[tuple[str, list[dict]]]:
    """Yield (program, rows) for each program that can be cut, lazily; updates `counts` and `skipped`."""
    find_methods = java_methods if args.language == "java" else python_methods
    progress = Progress(programs, unit=" programs", leave=False)
    for problem, group in groupby(progress, key=lambda program: program[0]):
        html = find_above(args.source, f"problem_descriptions/{problem}.html")
        text = description(html) if html else ""
        table = find_above(args.source, f"metadata/{problem}.csv")
        accepted = accepted_submissions(table) if table else None
        tests_file = find_above(args.source, f"tests/{problem}.txt")
        tests = read_text(tests_file) if tests_file else ""
        counts["described"] += bool(text)
        counts["with a table"] += accepted is not None
        counts["with tests"] += bool(tests)
        seen: set[int] = set()
        for _, inside, path in group:
            try:
                if accepted is not None and path.stem not in accepted:
                    raise Skipped("not Accepted in the problem's table")
                counts["accepted"] += 1
                program = read_program(path)
                counts["unicode"] += 1
                digest = hash("".join(program.split()))
                if digest in seen:
                    raise Skipped("same as another program for its problem except for whitespace")
                seen.add(digest)
                counts["distinct"] += 1
                methods = find_methods(program, args.nested)
                if methods is None:
                    raise Skipped("doesn't parse")
                counts["parsed"] += 1
                if not methods:
                    raise Skipped("no method with a statement to cut at")
                counts["with a method"] += 1
            except Skipped as reason:
                skipped[f"program: {reason}"].append(inside)
                continue
            # seeded by path, so that other programs don't change the draw
            cuts = draw(methods, args.cuts, random.Random(f"{args.seed}\n{inside}"))
            counts["rows"] += len(cuts)
            yield program, [make_row(program, cut, problem, text, inside, args.language, tests) for cut in cuts]


# ------------------------------------------------------------------------------------------------------------ 3. files
def keep_fitting(
    rows: list[dict], tokenizer: Tokenizer | None, limits: dict[str, int], skipped: dict[str, list[str]]
) -> list[tuple[dict, dict[str, int]]]:
    """Return the rows within the limits, each with its lengths by column; without a tokenizer, all rows, no lengths."""
    if tokenizer is None:
        return [(row, {}) for row in rows]
    fitting = []
    for row in rows:
        lengths, too_long = prepare.program_lengths(row, tokenizer, limits)
        if too_long:
            skipped[f"row: {too_long[0]}"].append(row["meta"]["file"])
        else:
            fitting.append((row, lengths))
    return fitting


def output_file(row: dict, args: Args) -> str:
    validation = prepare.in_validation(row["meta"]["problem"], args.validation_share, args.seed)
    return "code.validation" if validation else "code.train"


def main(args: Args) -> None:
    check_ranges(args)
    prepare.check_vocab_size(args.vocab_size, args.tokenizer and "--tokenizer")
    if args.error_prone_jar is not None and args.language != "java":
        raise InputError(f"--error-prone-jar {args.error_prone_jar}: ErrorProne is for Java.")
    check_out(args.out)
    programs = find_programs(args.source, args.language)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    num_problems = len({problem for problem, _, _ in programs})
    counts: Counter[str] = Counter(programs=len(programs), problems=num_problems)
    skipped: dict[str, list[str]] = defaultdict(list)  # reason -> files
    written: dict[str, Counter[str]] = defaultdict(Counter)  # file -> problem -> rows
    limits = {"query": args.max_query_length, "response": args.max_response_length}
    length_table = prepare.LengthTable()
    compiler = JavaCompiler(error_prone_jar=args.error_prone_jar) if args.language == "java" else PythonCompiler()
    no_row = f"none of the {num_problems} problems has a row in it"
    may_lack = dict.fromkeys(("code.train", "code.validation"), no_row)
    with compiler, prepare.jsonl_files(args.out, may_lack) as write:
        if args.vocab_size is not None:  # read the programs twice instead of keeping them in memory
            cut = cut_programs(programs, args, Counter(), defaultdict(list))
            texts = (
                row["query"] + row["response"]
                for _, rows in cut
                for row in rows
                if output_file(row, args) == "code.train"
            )
            tokenizer = train_tokenizer(texts, args.vocab_size)
        stream = cut_programs(programs, args, counts, skipped)
        while batch := list(islice(stream, BATCH)):
            # lengths first, because the compiler is slower than the tokenizer
            fitting = [(program, keep_fitting(rows, tokenizer, limits, skipped)) for program, rows in batch]
            fitting = [(program, rows) for program, rows in fitting if rows]
            checked = compiler.check([program for program, _ in fitting])
            for (_, rows), diagnostics in zip(fitting, checked, strict=True):
                for row, lengths in rows:
                    counts["fitting"] += 1
                    start = len(row["prefix"])
                    error = first_error(diagnostics, start, start + len(row["response"]))
                    if error is not None:
                        reason = "has an unused variable" if error.kind == "unused" else "doesn't compile"
                        skipped[f"row: its response {reason}"].append(row["meta"]["file"])
                        continue
                    if args.error_prone_jar is not None:
                        row["meta"]["error_prone"] = True
                    name = output_file(row, args)
                    write(name, row)
                    counts["passing"] += 1
                    written[name][row["meta"]["problem"]] += 1
                    if lengths:
                        length_table.add(name, **lengths)
        if not written:
            reason, files = max(skipped.items(), key=lambda item: len(item[1]))
            raise InputError(
                f"--source {args.source}: no usable rows from {len(programs)} programs; nothing was written. Most "
                f"frequent reason: {reason!r} ({len(files)} times, first in {files[0]})."
            )
    if tokenizer is not None:
        tokenizer.save(args.out)  # for models with random weights

    within = f"within --max-query-length {args.max_query_length}, --max-response-length {args.max_response_length}"
    for key, label in {
        "problems": "problems",
        "described": "with a description",
        "with a table": "with a table of submissions",
        "with tests": "with tests",
        "programs": f"programs in {ENDING[args.language]}",
        "accepted": "Accepted, or without a table",
        "unicode": "in UTF-8",
        "distinct": "distinct within their problem",
        "parsed": "that parse",
        "with a method": "with a method to cut",
        "rows": f"rows, with --cuts {args.cuts} per program",
        "fitting": "of any length (no --tokenizer)" if tokenizer is None else within,
        "passing": "with a response that passes the static checks",
    }.items():
        print(f"{counts[key]:10,}  {label}")
    firsts = {reason: files[0] for reason, files in skipped.items()}
    prepare.print_skipped({reason: len(files) for reason, files in skipped.items()}, firsts)
    if tokenizer is not None:
        print(f"\n{length_table}")
    if counts["described"] < counts["problems"]:
        print(
            f"note: {counts['problems'] - counts['described']} of {counts['problems']} problems have no description: "
            "their queries are only code. Put CodeNet's problem_descriptions into --source or next to it."
        )
    print(f"\nwritten: {args.out}")
    for name, rows in sorted(written.items()):
        print(f"{rows.total():10,}  {name}.jsonl, from {len(rows):,} problems")


if __name__ == "__main__":
    run_module(main, Args)
