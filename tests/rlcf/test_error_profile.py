"""Every kind of error of javac and Python gets its category, and counts each time it occurs."""

import shutil

import pytest

from nanorlhf.rlcf.compilers import Diagnostic
from nanorlhf.rlcf.error_profile import CATEGORIES, error_category, error_profile

needs_jdk = pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")

JAVA = {  # the body of `int f(int n, String s, List<String> l)` -> the category of its one error
    "return n": "syntax",
    "return n + ;": "syntax",
    "n; return n;": "syntax",
    "else { } return n;": "syntax",
    'return "n;': "syntax",
    "return 99999999999;": "syntax",
    "return n # 2;": "syntax",
    "return m;": "cannot_find_symbol",
    "return s.lenght();": "cannot_find_symbol",
    "Lisst<String> m = null; return m == null ? 1 : 2;": "cannot_find_symbol",
    "return foo.bar.Baz.n;": "cannot_find_symbol",
    "return s;": "type",
    "return 1.5 * n;": "type",
    "return s - n;": "type",
    "return n.length();": "type",
    "return n[0];": "type",
    "return s.charAt(s);": "type",
    "List<int> m = null; return m == null ? 1 : 2;": "type",
    "int m; return m;": "uninitialised",
    "if (n > 0) { return n; }": "missing_return",
    "return n; n++;": "unreachable",
    "while (true) { } return n;": "unreachable",
    "Thread.sleep(n); return n;": "unreported_exception",
    "int n = 3; return n + n;": "already_defined",
    "if (n > 0) { break; } return n;": "other",
    "final int m = n; m = 3; return m;": "other",
    "int m = n; return 1;": "unused",
}
PYTHON = {  # the body of `def f(n, s):`
    "return n +": "syntax",
    "return n)": "syntax",
    "return '": "syntax",
    "  x = 1\n return n": "syntax",
    "return m": "cannot_find_symbol",
    "m = g(n)\n return m": "cannot_find_symbol",
    "m = n\n return 1": "unused",
    "g = n\n def h():\n  print(g)\n  g = 2\n return h": "uninitialised",
}


def java_program(body: str) -> str:
    return "import java.util.*;\nclass A { int f(int n, String s, List<String> l) {\n" + body + "\n} }"


def python_program(body: str) -> str:
    return "def f(n, s):\n " + body + "\n"


@needs_jdk
def test_each_of_javacs_errors_has_its_category(java_compiler):
    checked = java_compiler.check([java_program(body) for body in JAVA])
    categories = [{error_category(d) for d in diagnostics} for diagnostics in checked]
    assert dict(zip(JAVA, categories, strict=True)) == {body: {category} for body, category in JAVA.items()}


def test_each_of_pythons_errors_has_its_category(python_compiler):
    checked = python_compiler.check([python_program(body) for body in PYTHON])
    categories = {body: error_category(diagnostics[0]) for body, diagnostics in zip(PYTHON, checked, strict=True)}
    assert categories == PYTHON


def test_warnings_have_no_category_and_unknown_codes_are_other():
    def category(kind: str, code: str) -> str | None:
        return error_category(Diagnostic(kind, code, 0, 1, ""))

    assert category("warning", "compiler.warn.has.been.deprecated") is None
    assert category("error", "crash") == category("error", "compiler.err.error.prone") == "other"
    assert category("error", "timeout") == "timeout"


@needs_jdk
def test_the_error_profile_of_three_programs_matches_a_manual_count(java_compiler):
    programs = [
        java_program("m = m + n; return s;"),  # m twice, and a String instead of an int
        java_program(
            "int before = n; /* the response: */ int m = n; return 1;"
        ),  # two unused, one of them in the response
        java_program("return n;"),
    ]
    start = programs[1].index("/* the response")
    spans = [(0, len(programs[0])), (start, len(programs[1])), (0, len(programs[2]))]
    profile = error_profile(java_compiler.check(programs), spans)
    expected = dict.fromkeys(CATEGORIES, 0.0) | {"cannot_find_symbol": 2 / 3, "type": 1 / 3, "unused": 1 / 3}
    assert profile == pytest.approx(expected) and list(profile) == list(CATEGORIES)


def test_an_error_counts_outside_the_response_and_an_unused_variable_does_not():
    error = Diagnostic("error", "SyntaxError", 30, 31, "")  # in the suffix: the response broke it
    for lasts, num_inside in (((8, 9, 10), 1), ((19, 20, 25), 1)):
        unused = [Diagnostic("unused", "UnusedVariable", last - 1, last + 1, "") for last in lasts]
        profile = error_profile([[*unused, error]], [(10, 20)])
        assert (profile["syntax"], profile["unused"]) == (1, num_inside)


def test_every_program_needs_its_span():
    with pytest.raises(ValueError):
        error_profile([[], []], [(0, 1)])
