import ast
import json
import random
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import codenet
from nanorlhf.dataset import load_programs, response_ids
from nanorlhf.errors import InputError
from nanorlhf.rlcf import compilers
from nanorlhf.rlcf.compilers import JavaCompiler, PythonCompiler, first_error
from nanorlhf.tokenizer import load_tokenizer, train_tokenizer
from tests.data.rows import read

needs_jdk = pytest.mark.skipif(shutil.which("java") is None, reason="no JDK on this machine")

JAVA = """class Sum {
\tString é = "ü\U0001f600"; // {
\tint of(int n) {\r
\t\tint a = 1; /* größer */ int b = n;\r
\t\tif (n > 0) { a++; }\r
\t\treturn a + b;\r
\t} // behind }
\tSum() { this(3); }
\tSum(int n) { /* nothing */ }
}
"""
PYTHON = '''é = "ü\U0001f600"
def f(n):
    """Doc."""\r
    a = 1; b = n  # größer\r
    if n:\r
    \ta = 2\r
    return a + b;  # behind\r
\r
print(f(3))
def g(): return 1
'''
SHORT = "def f(n):\n    n = n + {number}\n    return n\n\nprint(f(1))\n"  # two statements to cut at


def write(path, *texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(texts).encode())
    return path


@pytest.fixture
def args(tmp_path):
    return codenet.Args(source=tmp_path / "source", out=tmp_path / "out", language="python", validation_share=0.0)


def convert(args):
    """Convert the source and return the rows by file."""
    codenet.main(args)
    return read(args.out)


def parts(program, methods):
    """Return (method, response) of each cut."""
    return [[(cut.method, program[cut.start : cut.end]) for cut in cuts] for cuts in methods]


# -------------------------------------------------------------------------------------------------------- where to cut
def test_a_java_method_can_be_cut_at_the_statements_of_its_blocks_and_ends_with_its_brace():
    one = "int a = 1; /* größer */ int b = n;\r\n\t\tif (n > 0) { a++; }\r\n\t\treturn a + b;\r\n\t}"
    assert parts(JAVA, codenet.java_methods(JAVA)) == [
        [("of", one), ("of", one[24:]), ("of", one[38:]), ("of", one[51:]), ("of", one[61:])],
        [("Sum", "this(3); }")],
    ]
    assert one[51:].startswith("a++; }\r\n")  # blocks open at the cut are closed
    assert codenet.java_methods("interface A { int f(); default void g() { ; } }") == []
    assert codenet.java_methods("class A { int f() { return 1; }") is None


def test_a_nested_method_is_a_separate_method():
    inner = "int g() { if (x) { y(); } return 1; }"
    program = f"class A {{ int f() {{ new B() {{ {inner} {{ z(); }} }}; return 0; }} }}"
    assert [[(method, text.split(";")[0]) for method, text in cuts] for cuts in parts(
        program, codenet.java_methods(program)
    )] == [[("f", "new B() { int g() { if (x) { y()"), ("f", "z()"), ("f", "return 0")],
           [("g", "if (x) { y()"), ("g", "y()"), ("g", "return 1")]]  # fmt: skip
    program = "def f():\n  def g():\n    if x:\n      y()\n  class B:\n    z()\n  return g\n"
    assert [[(method, text.split("\n")[0].strip()) for method, text in cuts] for cuts in parts(
        program, codenet.python_methods(program)
    )] == [[("f", "def g():"), ("f", "class B:"), ("f", "return g")], [("g", "if x:"), ("g", "y()")]]  # fmt: skip


def test_a_python_function_can_be_cut_at_lines_that_start_with_a_statement():
    one = "    a = 1; b = n  # größer\r\n    if n:\r\n    \ta = 2\r\n    return a + b;  # behind"
    assert parts(PYTHON, codenet.python_methods(PYTHON)) == [
        [("f", one), ("f", one[28:]), ("f", one[39:]), ("f", one[51:])]
    ]
    for text in ("def f(:\n  pass\n", "x = '\0'\n", "def f():\n  return " + "-" * 100_000 + "1\n"):
        assert codenet.python_methods(text) is None


@pytest.mark.parametrize(
    ("program", "responses"),
    [
        ("def f():\n    '''Doc.\n    '''; x = 1\n    return x\n", ["    return x"]),
        ("def f(): \\\n    return 1\n", []),
        ("def f(a):\n    return a + \\\n    1", ["    return a + \\\n    1"]),
        ("def f():\n    @g\n    def h():\n        pass\n", ["        pass"]),
        ("def f():\r    x = 1\r    return x\rf()", ["    x = 1\r    return x", "    return x"]),
        ("class A:\n  async def f(self):\n\n    # é\n    return '''\n  ü'''  \n\n", ["    return '''\n  ü'''  "]),
        ("def f():\n    'é'; x = 'ü'\n    (1\n     + x)\n", ["    (1\n     + x)"]),
        ("f = lambda: 1\nclass A:\n    x = 1\n", []),
    ],
)
def test_python_is_cut_only_at_statements_that_start_a_line(program, responses):
    assert [program[cut.start : cut.end] for cuts in codenet.python_methods(program) for cut in cuts] == responses


# § marks the start of each statement in a block
JAVA_STATEMENTS = (
    "x = 1;", 'String s = "}é{";', "if (x > 0) { §x--; §return; }", "for (;;) { /* é */ §break; }", "{ §x++; }",
    "int y = '}', z;", "while (x < 3)\n\tx++;", "new Object() { int k; };", "class L { }", "f(y -> { §return y; });",
    "switch (x) { case 1: §x = 2; default: }", "label: do { §x--; } while (x > 0);", "try { §x = 2; } finally { }",
    "for (;;) {\n§if (x > 0) { §x--; } else { §{ §x = 1; } }\n// }\n§break; }", 'System.out.println("\U0001f600");',
    "switch (x) { case 1 -> { §x = 3; } default -> x = 4; }", "try { } catch (E e) { §throw e; }",
)  # fmt: skip
PYTHON_STATEMENTS = (
    "x = 1", "s = 'é\\n'", "if x:\n§I  x = 2\n§I  y = 'ü'", "for i in x:\n§I\ti()", "(1,\n 2)",
    "while x: x -= 1; y = 2", "class L:\nI pass", "try: x = 2\nIfinally:\n§I  pass", "pass;", "return '\U0001f600'",
    "with x as y:\n§I pass\nI # at the end", "if x:\n§I  pass\nIelif y:\n§I  elif_ = 1\nIelse:\n§I  if x: pass",
    "try:\n§I  pass\nIexcept E:\n§I  for i in x:\nI\t\\\nI\ti()", "match x:\nI case 1:\n§I  x = 2; y = 3",
    "x = '''\n  return\n'''",
)  # fmt: skip
GAPS = st.sampled_from(["\n", "\n\t", "\r\n  ", " ", " // } é\n", "/* } \U0001f600 { */", "\n\n   "])


def unmarked(statement, offset):
    """Remove the marks from a statement at an offset; return it and the starts of all statements in it."""
    pieces = statement.split("§")
    return "".join(pieces), [offset + len("".join(pieces[:i])) for i in range(1, len(pieces))]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_java_is_cut_exactly_at_the_generated_statements(data):
    text, expected = "/* é */ class A<T> {", []
    for i in range(data.draw(st.integers(0, 4))):
        head = data.draw(st.sampled_from([f"static <U> void é{i}(U[] u, int... n)", "A(int n)"]))
        text += data.draw(GAPS) + head + " {"
        starts = []
        for statement in data.draw(st.lists(st.sampled_from(JAVA_STATEMENTS), max_size=4)):
            text += data.draw(GAPS)
            statement, within = unmarked("§" + statement, len(text))
            starts += within
            text += statement
        text += data.draw(GAPS) + "}"
        if starts:
            expected.append([(start, len(text)) for start in starts])
        text += data.draw(GAPS) + "int field;"
    text += "}\n"
    methods = codenet.java_methods(text)
    assert [[(cut.start, cut.end) for cut in cuts] for cuts in methods] == expected
    assert_rows_are_the_file(text, methods, "java")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_python_is_cut_exactly_at_the_generated_statements(data):
    newline = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    text, expected = f"# é{newline}", []
    for i in range(data.draw(st.integers(0, 4))):
        text += f"def é{i}(x):{newline}"
        indentation = data.draw(st.sampled_from([" ", "    ", "\t", "  \t"]))
        starts = []
        for statement in data.draw(st.lists(st.sampled_from(PYTHON_STATEMENTS), min_size=1, max_size=4)):
            text += data.draw(st.sampled_from(["", newline, f"# }}ü{newline}", f"   {newline}"]))
            lines = "§" + indentation + re.sub("\n(§?)I", rf"\n\1{indentation}", statement)
            lines, within = unmarked(lines.replace("\n", newline), len(text))
            starts += within
            text += lines
            end = len(text) - (len(newline + indentation + " # at the end") if "at the end" in statement else 0)
            text += newline
        expected.append([(start, end) for start in starts])
        text += data.draw(st.sampled_from(["", "y = é = 3" + newline, newline * 2]))
    methods = codenet.python_methods(text)
    assert sorted([(cut.start, cut.end) for cut in cuts] for cuts in methods) == expected
    assert_rows_are_the_file(text, methods, "python")


def assert_rows_are_the_file(program, methods, language):
    for cut in codenet.draw(methods, 99, random.Random(0)):
        row = codenet.make_row(program, cut, "p00001", "Add *up*.", "p00001/s1", language)
        assert row["prefix"] + row["response"] + row["suffix"] == program
        assert row["prefix"] in row["query"]
        if language == "java":
            assert row["response"][-1] == "}" and not row["response"][0].isspace()
        else:
            assert row["response"][0].isspace()


# ---------------------------------------------------------------------------------------------------------------- draws
def test_a_draw_takes_a_random_method_then_a_random_statement_and_none_twice():
    methods = [[codenet.Cut("f", start, 9) for start in (1, 2, 3)], [codenet.Cut("g", 20, 29)]]
    first = Counter(codenet.draw(methods, 1, random.Random(seed))[0].start for seed in range(6000))
    for start, share in ((1, 1 / 6), (2, 1 / 6), (3, 1 / 6), (20, 1 / 2)):
        assert abs(first[start] / 6000 - share) < 0.02
    for seed in range(20):
        everything = codenet.draw(methods, 9, random.Random(seed))
        assert sorted(cut.start for cut in everything) == [1, 2, 3, 20]
        assert codenet.draw(methods, 2, random.Random(seed)) == everything[:2]


def test_a_java_row_shows_the_problem_the_code_up_to_the_cut_and_the_marker():
    cut = codenet.java_methods(JAVA)[0][-1]
    prefix, response = JAVA.split("return a + b;")[0], "return a + b;\r\n\t}"
    assert codenet.make_row(JAVA, cut, "p00001", "Add  up.\n\n1 */ 2 <= é", "p00001/s1.java", "java") == {
        "query": "/**\n * Add  up.\n *\n * 1 * / 2 <= é\n */\n" + prefix + "/*<your_code_here>*/",
        "response": response,
        "language": "java",
        "prefix": prefix,
        "suffix": JAVA[len(prefix + response) :],
        "tests": "",
        "meta": {"problem": "p00001", "file": "p00001/s1.java", "method": "of"},
    }
    assert codenet.make_row(JAVA, cut, "p", "", "s", "java")["query"] == prefix + "/*<your_code_here>*/"
    assert codenet.make_row(JAVA, cut, "p", "*" + "/", "s", "java")["query"].startswith("/**\n * * /\n */\nclass")


def test_a_python_response_starts_with_its_indentation():
    program = "def f(n):\n  \tn += 1\n  \treturn n\n"
    [[_, cut]] = codenet.python_methods(program)
    row = codenet.make_row(program, cut, "p1", 'Add "up".\rNow.', "p1/s.py", "python")
    assert row["query"] == '# Add "up".\n# Now.\ndef f(n):\n  \tn += 1\n  \t# <your_code_here>\n'
    assert (row["prefix"], row["response"], row["suffix"]) == ("def f(n):\n  \tn += 1\n", "  \treturn n", "\n")
    tokenizer = train_tokenizer([program], 300)
    assert tokenizer.decode(response_ids(row["query"], row["response"], tokenizer)) == row["response"]


# ------------------------------------------------------------------------------------------------------------- layouts
def test_the_problem_is_the_codenet_id_or_the_directory_or_the_file(args):
    for i, path in enumerate(["p00001/s1", "data/p00002/Python/s2", "p00003/a/b/s3", "a/b/s4", "a/s5", "s6", "p7/s7"]):
        write(args.source / f"{path}.py", SHORT.format(number=i))
    rows = convert(args)["code.train"]
    assert {row["meta"]["file"]: row["meta"]["problem"] for row in rows} == {
        "p00001/s1.py": "p00001", "data/p00002/Python/s2.py": "p00002", "p00003/a/b/s3.py": "p00003",
        "a/b/s4.py": "a/b", "a/s5.py": "a", "s6.py": "s6", "p7/s7.py": "p7",
    }  # fmt: skip
    [row] = convert(replace(args, source=args.source / "data" / "p00002" / "Python"))["code.train"]
    assert row["meta"]["problem"] == "p00002" and row["meta"]["file"] == "s2.py"


@pytest.mark.parametrize("inside", [".", "data", "data/p00001"])
def test_descriptions_and_submission_tables_are_found_above_the_programs(args, capsys, inside):
    for name in ("s1", "s2", "s3"):
        write(args.source / "data" / "p00001" / "Python" / f"{name}.py", SHORT.format(number=name[1]))
    table = "submission_id,status,é\ns1,Accepted,1\ns2,Wrong Answer,\ns4,Accepted,"
    write(args.source / "metadata" / "p00001.csv", table)
    html = "<H1>Sum</H1>\n<pre>x\n\n\ny</pre><p>1 &lt; n<br>n &le; <b>9</b></p><script>x()</script>"
    write(args.source / "problem_descriptions" / "p00001.html", html)
    [row] = convert(replace(args, source=args.source / inside))["code.train"]
    assert row["meta"]["file"].endswith("s1.py")
    assert row["query"].startswith("# Sum\n# x\n#\n# y1 < n\n# n ≤ 9\ndef f(n):\n")
    assert row["prefix"].startswith("def f(n):\n")
    printed = capsys.readouterr().out
    assert re.search(r"^ +1  with a description\n +1  with a table", printed, re.M)
    assert re.search(r"^ +2  program: not Accepted in .*; first: \S*s2.py$", printed, re.M)


ATCODER = """<span class="lang-en"><p>Score: <var>100</var> points</p>
<div class="part"><section><h3>Problem Statement</h3><p>Add the odd ones of <var>N</var> numbers.</p></section></div>
<div class="part"><section><h3>Constraints</h3><ul><li>1 &leq; N &leq; 77</li></ul></section></div>
<div class="part"><section><h3>Input</h3><p>First N, then the numbers.</p></section></div>
<hr /><div class="part"><section><h3>Sample Input 1</h3><pre>3 4 5 6</pre></section></div>
<div class="part"><section><h3>Sample Output 1</h3><pre>5</pre><p>Only 5 is odd.</p></section></div></span>"""
AIZU = """<H1>Sample Mean</H1><p>The mean of samples.</p><H2>Input</H2><p>Samples, for example 1 2.</p>
<H2>Constraints</H2><ul><li>n &lt; 77</li></ul><h2 class='x'> <b>Sample Input 2</b></h2><pre>3 4</pre>
<H2>Output for the Sample Input</H2><pre>5</pre><H2>Note</H2><p>Print a float.</p>"""


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (
            ATCODER,
            "Score: 100 points\n\nProblem Statement\nAdd the odd ones of N numbers.\n\n"
            "Input\nFirst N, then the numbers.",
        ),
        (AIZU, "Sample Mean\nThe mean of samples.\nInput\nSamples, for example 1 2.\nNote\nPrint a float."),
        ("<p>No heading: constraints</p>", "No heading: constraints"),
    ],
    ids=["atcoder", "aizu", "plain"],
)
def test_a_description_has_neither_constraints_nor_samples(tmp_path, html, text):
    assert codenet.description(write(tmp_path / "p.html", html)) == text


def test_problems_without_a_description_are_reported(args, capsys):
    for i in (1, 2):
        write(args.source / f"p0000{i}" / "s.py", SHORT.format(number=i))
    convert(args)
    assert "note: 2 of 2 problems have no description" in capsys.readouterr().out
    write(args.source.parent / "problem_descriptions" / "p00001.html", "<p>Add.</p>")  # next to Java250
    assert sum(row["query"].startswith("# Add.") for row in convert(args)["code.train"]) == 1
    assert "note: 1 of 2 problems have no description" in capsys.readouterr().out
    write(args.source.parent / "problem_descriptions" / "p00002.html", "<p>Add.</p>")
    convert(args)
    assert "no text" not in capsys.readouterr().out


@needs_jdk
@pytest.mark.slow
def test_a_row_that_error_prone_rejects_is_skipped(args, plugin, capsys):
    """Grounding assumes that every written program passes."""
    write(args.source / "p00001" / "s1.java", "class A { int f(int n) { int wrong = n; return wrong; } }")
    write(args.source / "p00002" / "s2.java", "class A { int f(int n) { int right = n; return right; } }")
    args = replace(args, language="java", cuts=9)
    assert len(convert(args)["code.train"]) == 4
    rows = convert(replace(args, error_prone_jar=str(plugin)))["code.train"]
    assert [row["meta"]["problem"] for row in rows] == ["p00002"] * 2
    assert re.search(r"^ +2  row: its response doesn't compile; first: p00001", capsys.readouterr().out, re.M)
    with pytest.raises(InputError, match="--error-prone-jar .*: ErrorProne is for Java"):
        convert(replace(args, language="python", error_prone_jar=str(plugin)))


@needs_jdk
@pytest.mark.slow
def test_a_directory_like_java250_becomes_rows_of_java(args, capsys):
    write(args.source / "p00001" / "s1.java", JAVA)
    write(args.source / "p00001" / "s2.py", SHORT)
    write(args.source / "p00002" / "s3.java", JAVA.replace("return a", "int unused = a; return a"))
    write(args.source / "p00003" / "s4.java", JAVA.replace("return a", "return c"))
    args = replace(args, language="java", cuts=9)
    rows = convert(args)["code.train"]
    assert [(row["meta"]["file"], row["language"]) for row in rows] == [("p00001/s1.java", "java")] * 6 + [
        ("p00002/s3.java", "java")
    ] * 2  # cuts after the unused variable: return, and the other constructor
    assert all("unused" in row["prefix"] + row["suffix"] for row in rows[6:])
    assert len({row["prefix"] for row in rows[:6]}) == 6
    printed = capsys.readouterr().out
    assert re.search(r"^ +5  row: its response doesn't compile; first: p00003/s4.java$", printed, re.M)
    assert re.search(r"^ +6  row: its response has an unused variable; first: p00002", printed, re.M)
    write(args.source / "p00001" / "s1.java", "\ufeff" + JAVA)  # a byte order mark isn't text
    args = replace(args, vocab_size=300)
    assert convert(args)["code.train"] == rows
    tokenizer = load_tokenizer(args.out)
    longest = max(len(row.response) for row in load_programs(args.out / "code.train.jsonl", tokenizer, None, None))
    assert convert(replace(args, max_response_length=longest))["code.train"] == rows
    assert len(convert(replace(args, max_response_length=longest - 1))["code.train"]) < len(rows)


# ----------------------------------------------------------------------------------------------------- skipped programs
def test_skipped_programs_are_counted_by_reason(args, capsys):
    write(args.source / "p00001" / "a.py", SHORT.format(number=1))
    write(args.source / "p00001" / "b.py", SHORT.format(number=1).replace("\n", "\r\n").replace("    ", "\t"))
    write(args.source / "p00002" / "b.py", SHORT.format(number=1))  # a program for another problem isn't a duplicate
    (args.source / "p00001" / "c.py").write_bytes(SHORT.format(number=2).encode() + b"# \xe9")
    write(args.source / "p00001" / "d.py", "print 'Hello'\n")
    write(args.source / "p00001" / "e.py", "print('Hello')\ndef f(): return 1\n")
    write(args.source / "p00001" / "f.py", "def f(n):\n    return m\n")
    write(args.source / "p00001" / "g.py", "def f(n):\n    m = n\n")
    write(args.source / "p00001" / "h.txt", "Hello")
    rows = convert(replace(args, cuts=2))["code.train"]
    assert Counter(row["meta"]["file"] for row in rows) == {"p00001/a.py": 2, "p00002/b.py": 2}
    printed = capsys.readouterr().out
    expected = [
        "2  problems", "8  programs in .py", "7  in UTF-8", "6  distinct", "5  that parse", "4  with a method to cut",
        "6  rows, with --cuts 2", "6  of any length", "4  with a response that passes",
        "4  code.train.jsonl, from 2 problems",
        "1  program: same as another program for its problem except for whitespace; first: p00001/b.py",
        "1  program: not UTF-8; first: p00001/c.py",
        "1  program: doesn't parse; first: p00001/d.py",
        "1  program: no method with a statement to cut at; first: p00001/e.py",
        "1  row: its response doesn't compile; first: p00001/f.py",
        "1  row: its response has an unused variable; first: p00001/g.py",
    ]  # fmt: skip
    for line in expected:
        assert re.search(rf"^ +{re.escape(line)}", printed, re.M), line
    assert "note: no code.validation.jsonl" in printed


def test_rows_above_the_limits_are_skipped_and_training_loads_the_others(args, capsys):
    for i in range(40):
        write(args.source / f"p{i:05}" / "s.py", "x = 1\n" * (i % 7), SHORT.format(number="n + " * (i % 5) + "1"))
    args = replace(args, cuts=2, vocab_size=300, validation_share=0.3)
    every = convert(args)
    tokenizer = load_tokenizer(args.out)
    limits = {"query": 31, "response": 17}

    def loaded(**lengths):
        return [
            row
            for name in ("train", "validation")
            for row in load_programs(args.out / f"code.{name}.jsonl", tokenizer, *lengths.values())
        ]

    lengths = [(len(row.query), len(row.response)) for row in loaded(query=500, response=384)]
    assert len(lengths) == 80 and any(query == 31 for query, _ in lengths) and any(r == 17 for _, r in lengths)
    capsys.readouterr()
    args = replace(args, max_query_length=limits["query"], max_response_length=limits["response"])
    rows = convert(args)
    printed = capsys.readouterr().out
    assert [(len(row.query), len(row.response)) for row in loaded(**limits)] == [
        (query, response) for query, response in lengths if query <= 31 and response <= 17
    ]
    too_long = {"query": sum(q > 31 for q, _ in lengths), "response": sum(q <= 31 and r > 17 for q, r in lengths)}
    assert min(too_long.values()) > 0
    for column, count in too_long.items():
        flag = f"--max-{column}-length {limits[column]}"
        assert re.search(rf"^ +{count}  row: {column} longer than {flag}; first: p", printed, re.M)
    assert re.search(r"^code.train +query\+response +\d+ ", printed, re.M)
    # the saved tokenizer is the trained one; without a tokenizer, every row is kept
    assert convert(replace(args, vocab_size=None, tokenizer=str(args.out))) == rows
    assert convert(replace(args, vocab_size=None)) == every


def test_all_programs_of_a_problem_are_in_the_same_split(args):
    for problem in range(30):
        for i in range(3):
            write(args.source / f"p{problem:05}" / f"s{i}.py", SHORT.format(number=i))
    rows = convert(replace(args, validation_share=0.3))
    train, validation = (Counter(row["meta"]["problem"] for row in rows[f"code.{s}"]) for s in ("train", "validation"))
    assert set(train.values()) == set(validation.values()) == {3} and not set(train) & set(validation)
    assert 3 <= len(validation) <= 15 and len(train) + len(validation) == 30
    assert set(convert(args)) == {"code.train"}  # the validation file from the earlier run is removed


def test_a_draw_depends_only_on_seed_and_path(args):
    body = "".join(f"    n = n + {i}\n" for i in range(30))
    for name in "abcdefgh":
        write(args.source / "p00001" / f"{name}.py", f"def {name}(n):\n{body}    return n\n")
    all_rows = convert(args)["code.train"]
    assert convert(args)["code.train"] == all_rows
    assert len({len(row["prefix"]) for row in all_rows}) > 3
    assert convert(replace(args, seed=2))["code.train"] != all_rows
    for name in "abdf":
        (args.source / "p00001" / f"{name}.py").unlink()
    write(args.source / "p00001" / "0.py", SHORT)
    kept = [row for row in convert(args)["code.train"] if row["meta"]["file"] != "p00001/0.py"]
    assert kept == [all_rows[i] for i in (2, 4, 6, 7)]


# ------------------------------------------------------------------------------------------------------------ bad input
def test_unusable_input_is_rejected_and_nothing_is_written(args, tmp_path, monkeypatch):
    write(args.source / "p00001" / "s.py", SHORT)
    table = write(tmp_path / "table" / "metadata" / "p00001.csv", "submission_id\ns\n").parent.parent
    write(table / "p00001" / "s.py", SHORT)
    latin = write(tmp_path / "latin" / "p00001" / "s.py", SHORT).parent.parent
    (latin / "problem_descriptions").mkdir()
    (latin / "problem_descriptions" / "p00001.html").write_bytes(b"<p>\xe9</p>")
    empty = write(tmp_path / "empty" / "s.py", "x = 1\n").parent
    for changes, reason in (
        ({"source": tmp_path / "none"}, "--source .*none does not exist"),
        ({"source": args.source / "p00001" / "s.py"}, "--source must be a directory; .*s.py is a file"),
        ({"language": "java"}, "has no .java file"),
        ({"source": empty}, "no usable rows from 1 programs; .*'program: no method with .*1 times, first in s.py"),
        ({"source": table}, "p00001.csv: expected columns submission_id and status"),
        ({"source": latin}, r"p00001.html: not UTF-8 \(byte 3\)"),
        ({"cuts": 0}, "--cuts 0: must be at least 1"),
        ({"validation_share": 1.0}, "--validation-share 1.0"),
        ({"validation_share": float("nan")}, "--validation-share nan"),
        ({"max_query_length": 0}, "--max-query-length 0"),
        ({"vocab_size": 299}, "--vocab-size 299"),
        ({"vocab_size": 300, "tokenizer": "gpt2"}, "pass only one of them"),
        ({"out": args.source / "p00001" / "s.py"}, "--out .* is a file"),
    ):
        with pytest.raises(InputError, match=reason) as error:
            codenet.main(replace(args, **changes))
        assert "\n" not in str(error.value)
        assert not args.out.exists()
    write(args.source / "A.java", JAVA)
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match="java not found: install a JDK"):
        codenet.main(replace(args, language="java"))
    assert not args.out.exists()


def test_an_interrupted_run_leaves_nothing(args, monkeypatch):
    for i in range(4):
        write(args.source / f"p{i:05}" / "s.py", SHORT.format(number=i))
    batches = []

    def interrupted(self, programs):
        batches.append(programs)
        if len(batches) == 2:
            raise KeyboardInterrupt
        return [[] for _ in programs]

    monkeypatch.setattr(codenet, "BATCH", 2)
    monkeypatch.setattr(PythonCompiler, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        codenet.main(args)
    assert [len(programs) for programs in batches] == [2, 2] and not args.out.exists()


# ------------------------------------------------------------------------------------------------------ the real slices
@pytest.mark.slow
@needs_jdk
def test_real_solutions_become_rows_that_compile_and_are_cut_before_a_statement(real_data, args):
    solutions = {}  # file -> program
    for line in (real_data / "mxeval_java" / "mbxp" / "mbjp_release_v1.2.jsonl").read_text().splitlines():
        problem = json.loads(line)
        if problem["canonical_solution"]:
            name = problem["task_id"].replace("/", "_") + ".java"
            solutions[name] = problem["prompt"] + problem["canonical_solution"]
    assert len(solutions) == 524
    solutions = dict(list(solutions.items())[::3])
    for name, program in solutions.items():
        write(args.source / name, program)
    rows = convert(replace(args, language="java"))["code.train"]
    assert 160 <= len(rows) <= 174  # javac rejects 1%, and about 2% have an unused variable after the cut
    for row in rows:
        assert row["prefix"] + row["response"] + row["suffix"] == solutions[row["meta"]["file"]]
    # an empty block is legal exactly where a statement can start
    marked = [row["prefix"] + "{}" + row["response"] + row["suffix"] for row in rows]
    with JavaCompiler() as compiler:
        for row, program, diagnostics in zip(rows, marked, compiler.check(marked), strict=True):
            assert first_error(diagnostics, len(row["prefix"]), len(program) - len(row["suffix"])) is None, row["meta"]
    # 46% of the statements are nested; the response after a nested cut closes more than the method's brace
    quoted = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
    closed = [Counter(quoted.sub("", row["response"])) for row in rows]
    assert all(count["}"] > count["{"] for count in closed)
    assert 0.35 < sum(count["}"] - count["{"] > 1 for count in closed) / len(rows) < 0.47


def test_a_response_is_the_rest_of_its_function():
    """Replace the response with `return here`; it must be the function's last statement. Tested on this file."""
    program = Path(__file__).read_text()
    for cut in codenet.draw(codenet.python_methods(program), 20, random.Random(0)):
        indentation = re.match(" *", program[cut.start :])[0]
        tree = ast.parse(program[: cut.start] + indentation + "return here" + program[cut.end :])
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        statements = [node for node in ast.walk(functions[cut.method]) if isinstance(node, ast.stmt)]
        assert ast.unparse(max(statements, key=lambda node: node.lineno)) == "return here"


def test_without_nested_cuts_a_response_starts_at_a_statement_of_the_body():
    java = "class A { int f(int n) { int m = n; while (m > 0) { m--; n += m; } return n; } }"
    python = "def f(n):\n    m = n\n    while m > 0:\n        m -= 1\n        n += m\n    return n\n"
    for find_methods, program in ((codenet.java_methods, java), (codenet.python_methods, python)):
        first_words = {
            nested: [program[cut.start :].split()[0] for cuts in find_methods(program, nested) for cut in cuts]
            for nested in (True, False)
        }
        nested = ["m--;", "n"] if program is java else ["m", "n"]
        begin, rest = (["int", "while"], ["return"]) if program is java else (["m", "while"], ["return"])
        assert first_words == {True: begin + nested + rest, False: begin + rest}
