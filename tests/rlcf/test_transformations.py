"""Renaming local variables: other names, the same behaviour."""

import ast
import contextlib
import io
import json
import random
import shutil
import symtable
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import programs
from nanorlhf.rlcf.transformations import NAMES, rename_variables
from nanorlhf.sandbox.execution import Program, run_programs

needs_jdk = pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")


def renamed(program, language, seed=0):
    return rename_variables(program, language, random.Random(seed))


def words(text):
    return set("".join(c if c.isalnum() or c in "_$" else " " for c in text).split())


# ----------------------------------------------------------------------------------------------------------- 1. Python
def printed(program):
    """What the program prints, and the exception that ends it."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(program, "<program>", "exec", dont_inherit=True), {"__name__": "__main__"})
        except Exception as error:
            print(type(error).__name__)
    return out.getvalue()


# name of the trap -> program, the locals that keep their name, those that change it
PYTHON = {
    "parameter": ("def f(n, k=2):\n    m = n + k\n    return m\nprint(f(1), f(n=1, k=3))", "n k", "m"),
    "keyword": ("def f(n):\n    size = 2\n    return dict(size=size, n=n)\nprint(f(1), f(n=3))", "size n", ""),
    "parameter elsewhere": (
        "def f(m):\n    return m\ndef g():\n    m = 2\n    return f(m=m)\nprint(g())", "m", "",
    ),
    "global": ("top = 1\ndef f():\n    low = top\n    return low\nprint(f(), top)", "top", "low"),
    "global statement": (
        "def f():\n    global top\n    top = 3\n    low = 1\n    return low\nprint(f(), top)", "top", "low",
    ),
    "a global of the same name": ("m = 1\ndef f():\n    m = 2\n    return m\nprint(f(), m)", "m", ""),
    "builtin elsewhere": (
        "def f(v):\n    sum = 0\n    for q in v:\n        sum += q\n    return sum\n"
        "def g(v):\n    return sum(v)\nprint(f([1, 2]), g([1, 2]))", "sum v", "q",
    ),
    "builtin around a nested function": (
        "def f(v):\n    def g():\n        max = 3\n        return max\n    return g() + max(v)\nprint(f([1]))",
        "max", "",
    ),
    "star import": (
        "from math import *\ndef f():\n    e = 1\n    low = e\n    return low\nprint(f(), round(e, 3))", "e", "low",
    ),
    "import": (
        "def f():\n    import os.path, math as m\n    low = m.pi\n    return low, os.sep\nprint(f())", "os m", "low",
    ),
    "nonlocal": (
        "def f():\n    n = 0\n    low = 1\n    def g():\n        nonlocal n\n        n += low\n        return n\n"
        "    return g() + g()\nprint(f())", "n", "low",
    ),
    "closure and recursion": (
        "def f(k):\n    low = 5\n    def g(n):\n        part = n * low\n"
        "        return part if n < 2 else g(n - 1) + part\n    return g(k)\nprint(f(4))", "g n k", "low part",
    ),
    "a nested function that nobody calls": (
        "def f():\n    low = 1\n    def a(): pass\n    return low\nprint(f())", "a", "low",
    ),
    "an exception that nobody reads": (
        "def f():\n    low = 1\n    try:\n        {}[0]\n    except KeyError as a:\n        pass\n"
        "    return low\nprint(f())", "a", "low",
    ),
    "lambda": ("def f():\n    low = 2\n    g = lambda n: n + low\n    return g(1)\nprint(f())", "n", "low g"),
    "a lambda's argument is a local elsewhere": (
        "def f():\n    n = 2\n    g = lambda n: n * 3\n    return g(n)\nprint(f())", "n", "g",
    ),
    "comprehension": (
        "def f(v):\n    low = [(q, r) for q in v for r in range(q) if r != q]\n    return low, {q: q for q in v}\n"
        "print(f([2, 3]))", "v", "low q r",
    ),
    "comprehension of the module": ("print([q * 2 for q in [1, 2]], {r for r in [1]})", "", "q r"),
    "walrus in a comprehension": (
        "def f(v):\n    part = [low := q for q in v]\n    return low, part\nprint(f([2, 3]))", "v", "low q part",
    ),
    "class attribute": (
        "class A:\n    size = 1\n    def f(self):\n        size = 2\n        low = 3\n"
        "        return self.size + size + low\nprint(A().f(), A.size)", "size self", "low",
    ),
    "class in a function": (
        "def f():\n    low = part = 1\n    class A:\n        top = low\n        part = 5\n        def g(self):\n"
        "            return low + part\n    return A.top, A.part, A().g()\nprint(f())", "part top", "low",
    ),
    "attribute of the same name": (
        "class A: pass\ndef f():\n    low = A()\n    low.low = 1\n    return low.low\nprint(f())", "low", "low",
    ),
    "private name": (
        "class A:\n    def f(self):\n        __m = 1\n        low = __m\n        return low\nprint(A().f())",
        "__m", "low",
    ),
    "f-string": (
        "def f():\n    low, part = 1, 2\n    return f'{low=} {low!r:>{low}} é{low}', part\nprint(f())", "low", "part",
    ),
    "f-string over lines": (
        "def f():\n    low = 1\n    part = 2\n    return f'''é\n{low\n}''', part\nprint(f())", "low", "part",
    ),
    "locals()": ("def f():\n    low = 1\n    return locals()\nprint(f())", "low", ""),
    "eval": ("def f():\n    low = 1\n    return eval('low')\nprint(f())", "low", ""),
    "del": ("def f():\n    low = 1\n    del low\n    low = 2\n    return low\nprint(f())", "", "low"),
    "unpacking": (
        "def f(v):\n    (low, *rest), [part] = v, [3]\n    return low, rest, part\nprint(f([1, 2]))",
        "v", "low rest part",
    ),
    "with, for and else": (
        "import io\ndef f():\n    with io.StringIO() as out:\n        for q in range(2):\n"
        "            print(q, file=out)\n        else:\n            low = out.getvalue()\n    return low\nprint(f())",
        "file", "out q low",
    ),
    "match": (
        "def f(v):\n    match v:\n        case [low, *rest]:\n            part = low\n"
        "        case {'k': other, **more}:\n            part = other\n    return part\nprint(f([1, 2]), f({'k': 3}))",
        "low rest other more", "part",
    ),
    "annotation": ("def f():\n    low: int = 1\n    return low\nprint(f(), f.__annotations__)", "int", "low"),
    "decorator and default": (
        "def g(h):\n    low = h\n    return low\n@g\ndef f(n=len('ab')):\n    return n\nprint(f())", "n g h", "low",
    ),
    "generator": (
        "def f():\n    low = 0\n    while low < 3:\n        sent = yield low\n"
        "        low += 1 if sent is None else sent\nprint(list(f()))", "", "low sent",
    ),
    "unbound": (
        "def f():\n    if 0:\n        low = 1\n    return low\ntry:\n    f()\nexcept UnboundLocalError:\n"
        "    print('unbound')", "", "low",
    ),
    "names that aren't ASCII": (
        "def f():\n    größe = 1; ﬁn = 2  # 😀\n    return fin + größe\nprint(f(), '😀')", "", "größe ﬁn fin",
    ),
    "throw-away name": (
        "def f():\n    for _ in range(2):\n        low, _ = 1, 2\n    return low\nprint(f())", "_", "low",
    ),
    "carriage returns": ("def f():\r    low = 1\r    return low\rprint(f())", "", "low"),
    "carriage returns and newlines": ("def f():\r\n    low = 1 # é\r\n    return low\r\nprint(f())", "", "low"),
    "form feed and continuation": (
        "def f():\n    low = \\\n        1\n\f\n    return low \\\n        + 1\nprint(f())", "", "low",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", PYTHON)
def test_renaming_keeps_the_output_of_a_python_program(trap):
    program, stay, go = PYTHON[trap]
    before = printed(program)
    assert before and "Error" not in before
    for seed in range(5):
        text = renamed(program, "python", seed)
        assert printed(text) == before
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert not names & set(go.split()) and words(text) >= set(stay.split()), text
        assert len(text.splitlines()) == len(program.splitlines())


def scopes(program):
    tables = [symtable.symtable(program, "<program>", "exec")]
    for scope in tables:
        tables += scope.get_children()
    return tables


def alpha_equivalent(program, other):
    """The same tree up to a one-to-one change of names, where every name keeps its kind in every scope.

    Names of the module, globals and builtins must not change at all.
    """
    names = {}
    tree, its = ast.parse(program), ast.parse(other)
    for node, twin in zip(ast.walk(tree), ast.walk(its), strict=True):
        if isinstance(node, ast.Name):
            if names.setdefault(node.id, twin.id) != twin.id:
                return False
            twin.id = node.id
    if ast.dump(tree) != ast.dump(its) or len(set(names.values())) < len(names):
        return False

    def kinds(scope, table):
        return {
            table.get(s.get_name(), s.get_name()): (
                s.is_local(), s.is_free(), s.is_global(), s.is_parameter(), s.is_imported(), s.is_nonlocal(),
                s.is_assigned(), s.is_referenced(), s.is_namespace(),
            )
            for s in scope.get_symbols()
        }  # fmt: skip

    def outer(scope):
        return {s.get_name() for s in scope.get_symbols() if s.is_global() or scope.get_type() == "module"}

    return all(
        kinds(scope, names) == kinds(twin, {}) and outer(scope) == outer(twin)
        for scope, twin in zip(scopes(program), scopes(other), strict=True)
    )


# of the standard library: classes, closures, generators, exceptions, nested functions, `global`, keyword arguments
MODULES = "bisect heapq textwrap fnmatch string shlex calendar colorsys statistics fractions csv sched graphlib".split()


@pytest.mark.parametrize("module", MODULES)
def test_renaming_real_modules_changes_only_names(module):
    program = Path(__import__(module).__file__).read_text(encoding="utf-8")
    text = renamed(program, "python")
    assert alpha_equivalent(program, text)
    assert text != program


def test_alpha_equivalence_rejects_a_wrong_renaming():
    program = "def f(v):\n    low = sum(v)\n    return low\n"
    assert alpha_equivalent(program, program.replace("low", "k"))
    for wrong in (
        program.replace("return low", "return v"),
        program.replace("low", "v"),
        program.replace("low", "sum"),
        program.replace("sum", "k"),
        program.replace("return low", "return k"),
    ):
        assert not alpha_equivalent(program, wrong)


def test_embedded_solutions_pass_after_renaming():
    rng = random.Random(0)
    num_changed = 0
    for _ in range(60):
        problem = programs.draw_problem(rng)
        program = programs.solution(problem, programs.draw_style(problem, rng), "python")
        text = rename_variables(program, "python", rng)
        num_changed += text != program
        assert printed(text + programs.tests(problem, "python", rng)) == ""
        assert alpha_equivalent(program, text)
    assert num_changed == 60


# ------------------------------------------------------------------------------------------------------------- 2. Java
def java(members):
    return "import java.util.*;\nimport java.util.function.*;\nclass A {\n" + textwrap.dedent(members).strip() + "\n}\n"


# name of the trap -> members of a class, the names that stay, those that change
JAVA = {
    "locals, parameters and loops": (
        "static int f(int size, int... rest) { int low = 0; for (int i1 = 0; i1 < size; i1++) low += i1;\n"
        "for (int each : rest) { low += each; } return low; }", "rest", "size low i1 each",
    ),
    "a field of the same name": (
        "int size; int top; A(int size) { this.size = size; int low = top; top = low; } int f() { return size; }",
        "size top", "low",
    ),
    "a method of the same name": (
        "static int low() { return 1; } static int f() { int low = low(); int part = low; return part; }",
        "low", "part",
    ),
    "a field of another object": (
        "int size; static int f(A size) { return size.size; } static int g(int[] length) { return length.length; }",
        "size length", "",
    ),
    "an inherited field": (
        "static class P extends java.awt.Point { int f() { return x + y; } int g(int x) { int y = x; return y; } }\n"
        "int h() { int low = 1; return low; }", "x y", "low",
    ),
    "a static import": (
        "static double f() { return PI; } static int g() { int PI = 3; int low = PI; return low; }", "PI", "low",
    ),
    "an annotation's value": (
        '@SuppressWarnings(value = "x") static int f(int value) { int low = value; return low; }', "value", "low",
    ),
    "an annotation's package": (
        '@javax.annotation.processing.Generated("x") static int f(int javax) { int low = javax; return low; }',
        "javax", "low",
    ),
    "a record's components": (
        "record P(int size, int top, int shown) { int low() { int part = size; return part; } }\n"
        "static String f() { int size = 1; int other = new P(size, 2, 3).top();\n"
        "return new P(other, 5, 6).toString(); }", "size top shown", "part other",
    ),
    "lambdas": (
        "static int f() { int low = 1; Function<Integer, Integer> part = bare -> bare + low;\n"
        "BinaryOperator<Integer> two = (p1, p2) -> p1 + p2; IntUnaryOperator typed = (int p3) -> p3;\n"
        "return part.apply(1) + two.apply(1, 2) + typed.applyAsInt(1); }", "bare p1 p2", "low part two typed p3",
    ),
    "a lambda's argument is a local elsewhere": (
        "static int f() { { int low = 1; if (low > 2) return low; }\n"
        "IntUnaryOperator one = low -> low + 1; IntBinaryOperator two = (p1, low) -> p1 * low;\n"
        "return one.applyAsInt(1) + two.applyAsInt(2, 3); }\n"
        "static IntUnaryOperator g() { return part -> part; } static int h() { int part = 1; return part; }",
        "part p1", "low one two",
    ),
    "a lambda of one name": ("static Supplier<Integer> f() { int low = 1; return () -> low; }", "", "low"),
    "method references": (
        "static void f(List<String> list) { Comparator<String> low = String::compareTo; list.sort(low);\n"
        "Runnable part = list::clear; part.run(); }", "list", "low part",
    ),
    "labels": (
        "static int f() { int low = 0; low: for (;;) { low++; if (low > 3) break low; continue low; } return low; }",
        "low", "",
    ),
    "catch, resources and finally": (
        'static String f() throws Exception { try (Scanner in = new Scanner("a")) { return in.next(); }\n'
        "catch (RuntimeException error) { throw error; } finally { int low = 1; System.out.print(low); } }",
        "", "in error low",
    ),
    "System.out": (
        "static void f() { java.io.PrintStream out = System.out; out.print(1); int low = 2; out.print(low); }",
        "out", "low",
    ),
    "patterns": (
        "static int f(Object o1) { if (o1 instanceof String text) return text.length(); int low = 1; return low; }",
        "text", "o1 low",
    ),
    "a switch": (
        "enum E { LOW, TOP } static int f(E which) { final int size = 1; int low = 0;\n"
        "switch (which) { case LOW: low = 1; break; default: low = size; }\n"
        "switch (low) { case size: return 2; default: return low; } }", "LOW TOP", "which low size",
    ),
    "classes within": (
        "static int f(int size) { int low = 2; class B { int part; int g(int q1) { int r1 = q1 + low + part;\n"
        "return r1; } } return new B() { int h() { int s1 = g(size); return s1; } }.h(); }",
        "part g h", "low q1 r1 s1 size",
    ),
    "shadowing in turn": (
        "static int f() { for (int low = 0; low < 2; low++) { } for (int low = 3; low < 4; low++) return low;\n"
        "return 0; }", "", "low",
    ),
    "generics and arrays": (
        "static <T> T f(T[] many, List<? extends T> some) { T low[] = many; T part = some.get(0); low[0] = part;\n"
        "return low[0]; }", "", "many some low part",
    ),
    "names that aren't ASCII": (
        'static String f(int größe) { int é1 = größe; return "größe 😀" + é1; } /* größe */', "größe", "é1",
    ),
    "var and text blocks": ('static String f() { var low = """\n  top\n  """; return low; }', "top", "low"),
}  # fmt: skip


def get_codes(compiler, texts):
    return [[(d.kind, d.code) for d in diagnostics] for diagnostics in compiler.check(texts)]


@needs_jdk
def test_renaming_keeps_the_diagnostics_of_a_java_program(java_compiler):
    """None, for each of the traps."""
    texts = {trap: java(members) for trap, (members, _, _) in JAVA.items()}
    texts["a static import"] = "import static java.lang.Math.*;\n" + texts["a static import"]
    assert dict(zip(texts, get_codes(java_compiler, list(texts.values())), strict=True)) == {trap: [] for trap in texts}
    for seed in range(3):
        twins = {trap: renamed(text, "java", seed) for trap, text in texts.items()}
        assert dict(zip(twins, get_codes(java_compiler, list(twins.values())), strict=True)) == {
            trap: [] for trap in texts
        }


@pytest.mark.parametrize("trap", JAVA)
def test_java_names_with_another_meaning_are_kept_and_the_rest_renamed(trap):
    members, stay, go = JAVA[trap]
    text = renamed(java(members), "java")
    assert words(text) >= set(stay.split()) and not words(text) & set(go.split()), text


RUN = """
class Main {{
    public static void main(String[] args) throws Exception {{
        int x0 = {call};
        if (x0 != {expected}) {{
            throw new java.lang.Exception("Exception -- test case 0 did not pass. x0 = " + x0);
        }}
    }}
}}
"""


@needs_jdk
@pytest.mark.slow
def test_renaming_keeps_the_verdict_of_java_programs():
    """Correct or not."""
    rng = random.Random(3)
    cases = []
    for _ in range(2):
        problem = programs.draw_problem(rng)
        program = programs.solution(problem, programs.draw_style(problem, rng), "java")
        cases.append((program, programs.tests(problem, "java", rng), "passed"))
    calls = {
        "locals, parameters and loops": ("A.f(4, 10, 20)", 36),
        "classes within": ("A.f(5)", 7),
        "lambdas": ("A.f()", 6),
        "a switch": ("A.f(A.E.TOP)", 2),
        "labels": ("A.f()", 5),  # wrong: it is 4
    }
    for trap, (call, expected) in calls.items():
        reason = "wrong_answer" if trap == "labels" else "passed"
        cases.append((java(JAVA[trap][0]), RUN.format(call=call, expected=expected), reason))
    texts = [
        Program(text, "", "", tests) for program, tests, _ in cases for text in (program, renamed(program, "java"))
    ]
    reasons = [verdict.reason for verdict in run_programs(texts, "java", workers=2)]
    assert reasons == [reason for _, _, reason in cases for _ in range(2)]


@needs_jdk
def test_renaming_keeps_the_diagnostics_of_human_solutions(real_data, java_compiler):
    """Those that compile still do, with the same unused variables."""
    rows = [json.loads(line) for line in (real_data / "mxeval_java/mbxp/mbjp_release_v1.2.jsonl").open()]
    texts = [row["prompt"] + row["canonical_solution"] for row in rows if row["canonical_solution"]][::12]
    twins = [renamed(text, "java", seed) for seed, text in enumerate(texts)]
    assert len(texts) > 40 and sum(text != twin for text, twin in zip(texts, twins, strict=True)) == len(texts)
    assert get_codes(java_compiler, twins) == get_codes(java_compiler, texts)


# ------------------------------------------------------------------------------------------------------------- 3. both
BROKEN = {
    "java": ["", "class A { int f( { } }", "not java at all", "class A { int f() { int low = ; } }", "\0", "\ud83d"],
    "python": ["", "def f(:\n  pass", "\0", "def f():\n    x = 1\n  y = 2", "x = '\ud83d'", "(" * 500,
               "def f():\n    low = 1\n    global low"],
}  # fmt: skip


@pytest.mark.parametrize("language", BROKEN)
def test_a_program_that_does_not_parse_is_returned_unchanged(language):
    for text in BROKEN[language]:
        assert renamed(text, language) == text


@pytest.mark.parametrize("language", ["java", "python"])
def test_new_names_depend_only_on_the_seed(language):
    rng = random.Random(5)
    problem = programs.draw_problem(rng)
    program = programs.solution(problem, programs.draw_style(problem, rng), language)
    assert renamed(program, language, 3) == renamed(program, language, 3)
    assert len({renamed(program, language, seed) for seed in range(20)}) > 10
    # one draw per variable, whatever the hash seed of this process
    assert renamed("def f():\n    low, part = 1, 2\n    return low + part\n", "python", 0) == (
        "def f():\n    " + "{0}, {1} = 1, 2\n    return {0} + {1}\n".format(*first_two_draws(0))
    )


def first_two_draws(seed):
    rng = random.Random(seed)
    free = [name for name in NAMES if name != "f"]
    first = rng.choice(free)
    return first, rng.choice([name for name in free if name != first])


def test_two_variables_never_get_the_same_name_and_keep_theirs_if_none_is_free():
    many = [f"v{i}" for i in range(40)]
    program = "def f():\n" + "".join(f"    {name} = {i}\n" for i, name in enumerate(many))
    program += f"    return {', '.join(many)}\nprint(f())\n"
    text = renamed(program, "python")
    assert printed(text) == printed(program) and alpha_equivalent(program, text)
    assert sum(name in words(text) for name in many) == 40 - (len(NAMES) - 1)  # all but f are free


STATEMENTS = (
    "low = 1", "part = low", "for q in [low]: part = q", "del low", "global low", "def g(): return low", "low += part",
    "part = [q for q in [low] if q]", "import os as low", "part = lambda low: low", "with low as (part, q): pass",
    "def low(part, *q): nonlocal part", "class low: part = q", "class C: q = low", "return (low := part)",
    "f'{low}{q}'", "low: part = 1", "print(low=low)", "async def g(): return [q async for q in low]",
    "def g():\n        nonlocal low\n        low = q", "def g():\n        global part\n        part = [low for q in q]",
    "try: low\n    except part as q: pass",
)  # fmt: skip


@given(st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=6), st.booleans())
def test_renaming_mixed_scopes_changes_only_names(statements, is_method):
    program = "low = q = 0\ndef f(self, q=1):\n" + "".join(f"    {statement}\n" for statement in statements)
    if is_method:
        program = "class A:\n" + textwrap.indent(program, "    ")
    text = renamed(program, "python")
    try:
        scopes(program)
    except SyntaxError:  # two scopes for one name
        assert text == program
    else:
        assert alpha_equivalent(program, text)
