"""What the compilers reject and where, isolation of programs from each other, and the life of their processes."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanorlhf.errors import InputError
from nanorlhf.rlcf import compilers
from nanorlhf.rlcf.compilers import (
    Diagnostic,
    Failure,
    JavaCompiler,
    PythonCompiler,
    Server,
    first_error,
    unused_variables,
)

needs_jdk = pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")


def method(body: str) -> str:
    return "import java.util.*;\nclass A { int f(int n, String s, List<String> l) throws Exception { " + body + " } }"


def errors(program: str, diagnostics: list[Diagnostic]) -> list[tuple[str, str]]:
    """Return the last part of each code, and the culprit's text."""
    return [(d.code.split(".", 2)[-1], program[d.start : d.end]) for d in diagnostics if d.kind == "error"]


# ------------------------------------------------------------------------------------------------------------- 1. javac
@needs_jdk
@pytest.mark.parametrize(
    ("body", "code", "culprit"),
    [
        ("return n + B;", "cant.resolve.location", "B"),
        ("return s.lenght();", "cant.resolve.location.args", "lenght"),
        ("return s . /* here */ lenght ( );", "cant.resolve.location.args", "lenght"),
        ("return s.<String> lenght();", "cant.resolve.location.args.params", "lenght"),
        ("return s.length;", "cant.resolve.location", "length"),
        ("return l.get(0).trim().size();", "cant.resolve.location.args", "size"),
        ("return 3 int", "expected", "int"),
        ("return n // a comment\n /* and one */ }", "expected", "}"),
        ("return Math.max(n, 3;", "expected", ";"),
        ("return Math.max(n, );", "illegal.start.of.expr", ")"),
        ("s.length; return 1;", "not.stmt", "length"),
        ("n = .5 + ; return n;", "illegal.start.of.expr", ";"),
        ("n = .trim(); return n;", "illegal.start.of.expr", "."),
        ('int x = "a" + n; return x;', "prob.found.req", "n"),
        ("n += l; return n;", "operator.cant.be.applied.1", "l"),
        ("int n = 4; return n;", "already.defined", "n"),
        ("return s;", "prob.found.req", "s"),
        ("return s.trim();", "prob.found.req", ")"),
        ("return l[0].length();", "array.req.but.found", "]"),
        ("if (n > 0) return 1;", "missing.ret.stmt", "}"),
        ("return 1; n = 2;", "unreachable.stmt", "n"),
        ("int x; return x;", "var.might.not.have.been.initialized", "x"),
        ("else { } return 1;", "else.without.if", "else"),
        ("Runnable r = () -> { Thread.sleep(n); }; return 1;", "unreported.exception.need.to.catch.or.throw", ")"),
        ("return 99999999999;", "int.number.too.large", "99999999999"),
        ("char c = ''; return c;", "empty.char.lit", "''"),
        ('s = "abc;\n return 1;', "unclosed.str.lit", '"abc;'),
        ("return 1 # 2;", "illegal.char", "#"),
        ("return 1\u00a0;", "illegal.char", "\u00a0"),
        ("List<int> x = null; return x.size();", "type.found.req", "int"),
        ("Map<String> x = null; return x.size();", "wrong.number.type.args", ">"),
    ],
)  # fmt: skip
def test_the_culprit_is_the_lexeme_that_a_reader_would_point_at(java_compiler, body, code, culprit):
    program = method(body)
    reported_code, lexeme = errors(program, java_compiler.check([program])[0])[0]
    assert reported_code.startswith(code) and lexeme == culprit  # later JDKs have "expected2" where 17 has "expected"


@needs_jdk
def test_offsets_count_characters_not_utf16_units_nor_columns(java_compiler):
    program = 'class A {\r\n\t\tString s = "😀𝒳é"; /* 😀 */\tint x = y; }'
    (diagnostic,) = java_compiler.check([program])[0]
    assert (diagnostic.start, diagnostic.end) == (program.index("y;"), program.index("y;") + 1)
    assert diagnostic.last == diagnostic.start and "variable y" in diagnostic.message


@needs_jdk
def test_errors_are_in_text_order_and_hide_no_other(java_compiler):
    # a flow error, a type error and, after both, a syntax error; javac by itself would only report the last
    program = method("int x; n = x; n = s; l = ; return n;")
    reported = errors(program, java_compiler.check([program])[0])
    assert reported == [
        ("var.might.not.have.been.initialized", "x"), ("prob.found.req", "s"), ("illegal.start.of.expr", ";")
    ]  # fmt: skip


@needs_jdk
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("int # = 3; return n;", [("illegal.char", "#")]),  # not "not a statement: int", which comes first
        ("n = s + 1 2; return n;", [("expected", "2")]),  # not the type of s + 1: it may be half of a value
        ("n = s; n = s n; return n;", [("prob.found.req", "s"), ("expected", "n"), ("not.stmt", "n")]),
    ],
)
def test_artefacts_of_error_recovery_are_left_out(java_compiler, body, expected):
    program = method(body)
    assert errors(program, java_compiler.check([program])[0]) == expected


def test_ctrl_c_in_a_terminal_does_not_reach_a_compiler(python_compiler):
    """The interrupted run still needs it to finish its step."""
    python_compiler.check(["x = 1"])
    assert os.getsid(python_compiler.server.process.pid) != os.getsid(0)


@needs_jdk
@pytest.mark.parametrize(
    "program", ["class A {", "class A { void f() { ", "class A { /* never closed } ", 'class A { String s = """\n }']
)
def test_an_error_that_only_the_end_shows_is_at_the_end(java_compiler, program):
    diagnostics = java_compiler.check([program])[0]
    assert diagnostics[-1].last == len(program) and diagnostics[0].end == len(program)
    response = program.index("{") + 1
    assert first_error(diagnostics, response, len(program)) in (None, *diagnostics)
    assert first_error(diagnostics, response, len(program)).last >= len(program) - 1


@needs_jdk
def test_all_errors_are_found_however_many(java_compiler):
    program = method("".join(f"n = a{i}; " for i in range(150)) + "return n;")
    assert [culprit for _, culprit in errors(program, java_compiler.check([program])[0])] == [
        f"a{i}" for i in range(150)
    ]


@needs_jdk
def test_a_file_has_the_name_of_its_public_class(java_compiler):
    programs = ["class A { } public class Any { } class B { }", "class A { }", "public class A { } public class B { }",
                "module m { }", "", "package p.q; public class C { }"]  # fmt: skip
    assert [bool(errors(p, d)) for p, d in zip(programs, java_compiler.check(programs), strict=True)] == [
        False, False, True, True, False, False
    ]  # fmt: skip


@needs_jdk
def test_a_program_sees_the_jdk_and_nothing_else_and_javac_ends_with_its_input(tmp_path, monkeypatch):
    (tmp_path / "Helper.java").write_text("public class Helper { }")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLASSPATH", str(tmp_path))
    with JavaCompiler(workers=1) as compiler:
        programs = [
            "class A { Helper h; }",
            "class A { Checker c; }",
            "class A { java.sql.Date d; javax.tools.Tool t; }",
        ]
        reported = [errors(p, d) for p, d in zip(programs, compiler.check(programs), strict=True)]
        process = compiler.server.process
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(60) == 0  # it ends with its input
    assert reported == [[("cant.resolve.location", "Helper")], [("cant.resolve.location", "Checker")], []]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Helper.java"]  # no class file is written


@needs_jdk
def test_any_string_is_a_program(java_compiler):
    programs = ["\0", "class A { \0 }", "\ud800", 'class A { String s = "\udc00"; int x = y; }', "\ufeff", "é" * 70_000]
    diagnostics = java_compiler.check(programs)
    assert all(errors(p, d) for p, d in zip(programs, diagnostics, strict=True))
    assert all(0 <= d.start <= d.end <= len(p) for p, ds in zip(programs, diagnostics, strict=True) for d in ds)


@needs_jdk
def test_ctrl_z_hides_no_text(java_compiler):
    program = "class A { }\x1a this is no Java"
    assert errors(program, java_compiler.check([program])[0]) == [("illegal.char", "\x1a")]
    assert java_compiler.check(["class A { }\x1a"]) == [[]]  # the language allows it at the end


@needs_jdk
def test_escapes_hide_neither_text_nor_variables(java_compiler):
    """javac translates escapes first, anywhere in the text."""
    cases = {
        "return n; }} \\u001a no Java": [("error", "\\u001a")],
        "return n; }} \\uuu001A no Java": [("error", "\\uuu001A")],
        "int a\\u0020= 1; return n; }}": [("unused", "a")],
        "int \\u0061 = 1; return n; }}": [("unused", "\\u0061")],
        "if (n > 1) \\u007b int a = 1; \\u007d return n; }}": [("unused", "a")],
        "// \\u000a int a = 1;\n return n; }}": [("unused", "a")],
        'int a = 1; String t = "\\ud83d\\ude00"; return t.length(); }}': [("unused", "a")],
        "int a = 1; return \\u0061; }}": [],
        "char c = '\\u0000'; return c; }}": [],
        'int a = 1; String t = "\\\\u0061"; return t.length(); }}': [("unused", "a")],  # no escape: two backslashes
    }
    programs = ["class A { int f(int n) { " + case for case in cases]
    for program, diagnostics in zip(programs, java_compiler.check(programs), strict=True):
        reported = [(d.kind, program[d.start : d.end]) for d in diagnostics]
        assert reported == cases[program.removeprefix("class A { int f(int n) { ")], program


def response_spans(cases):
    return [(len(before), len(before + response)) for before, response, _ in cases]


@needs_jdk
def test_a_java_response_hides_no_code_after_it(java_compiler):
    before = "class A { int f(int n) { "
    cases = {
        (before, "return n; }} //", " }}"): True,
        (before, "return n; }} /*", " }} /* */"): True,
        (before, "return n; }} \\u002f\\u002f", " }}"): True,
        (before, 'String s = """\n', '"""; return s.length(); }}'): True,
        (before, "return n; // the end", "\n}}"): False,
        (before, "return n; /* the end */", "}}"): False,
        (before + "// ", "n\n return n; ", "}}"): False,
        (before, 'return "//".length();', " }}"): False,
    }
    checked = java_compiler.check(["".join(case) for case in cases], response_spans(cases))
    for (case, hides), diagnostics in zip(cases.items(), checked, strict=True):
        assert [d.code for d in diagnostics] == ["hidden.code"] * hides, case
        assert all(d.last == len(case[0] + case[1]) - 1 for d in diagnostics)


def test_a_python_response_hides_no_code_after_it(python_compiler):
    before = "def f(n):\n"
    cases = {
        (before, "    return n  #", " + 1\n"): True,
        (before, "    return '" + "''", "n" + "''" + "'\n"): True,
        (before, "    return n  # the end", "\nx = 1\n"): False,
        (before, "    return ", "n  # the end\n"): False,
        (before, "    return '#'", "\n"): False,
    }
    checked = python_compiler.check(["".join(case) for case in cases], response_spans(cases))
    for (case, hides), diagnostics in zip(cases.items(), checked, strict=True):
        assert [d.code for d in diagnostics] == ["hidden.code"] * hides, case


@needs_jdk
def test_results_depend_neither_on_the_other_programs_nor_on_their_order(java_compiler):
    programs = [
        method(f"int x{i} = {'s' if i % 3 else 'n'}; return x{i} + {'y' if i % 5 == 0 else 1};") for i in range(40)
    ]
    alone = [java_compiler.check([program])[0] for program in programs]
    together = java_compiler.check(programs)
    assert together == alone and sum(map(bool, alone)) == 26 + 8 - 5
    assert java_compiler.check(programs[::-1]) == alone[::-1]
    assert java_compiler.check([]) == []


# ------------------------------------------------------------------------------------------------ 2. hangs and crashes
# nested lambdas: javac's inference doubles its work at every level
HANGS = (
    "import java.util.function.*; class A { static <T, R> R f(T t, Function<T, R> g) { return null; } Object o = "
    + "".join(f"f(1, x{i} -> {{ return " for i in range(16)) + "1" + "; })" * 16 + "; }"
)  # fmt: skip
# constant folding: each string is twice as long as the one before
BURSTS = (
    'class A { static final String s0 = "xxxxxxxxxxxxxxxx";'
    + "".join(f"static final String s{i + 1} = s{i} + s{i};" for i in range(28))
    + "}"
)
GOOD, BAD = "class A { }", "class A { int x = y; }"


@needs_jdk
def test_a_program_that_hangs_is_an_error_at_its_end_and_changes_no_other_result(java_compiler, monkeypatch):
    monkeypatch.setattr(java_compiler.server, "timeout", 3.0)
    good, hangs, bad, *rest = java_compiler.check([GOOD, HANGS, BAD] + [GOOD, BAD] * 4)
    assert good == [] and [len(d) for d in (bad, *rest)] == [1] + [0, 1] * 4
    assert [(d.kind, d.code, d.start, d.end) for d in hangs] == [("error", "timeout", len(HANGS), len(HANGS))]
    assert len(java_compiler.check([BAD])[0]) == 1


@needs_jdk
def test_a_stack_overflow_changes_no_other_result(java_compiler):
    # 64 MB of stack: more than enough for real programs
    deep, deeper = (f"class A {{ int x = {'(' * n}1{')' * n}; }}" for n in (5_000, 200_000))
    assert java_compiler.check([GOOD, deep])[1] == []
    process = java_compiler.server.process
    good, crash, bad = java_compiler.check([GOOD, deeper, BAD])
    assert good == [] and len(bad) == 1 and java_compiler.server.process is process
    assert [(d.kind, d.code, d.start) for d in crash] == [("error", "crash", len(deeper))]


@needs_jdk
@pytest.mark.slow
def test_a_program_that_exhausts_the_memory_is_found_among_the_others(java_compiler):
    diagnostics = java_compiler.check([GOOD, BAD, BURSTS, BAD, GOOD])
    assert [[d.code for d in ds] for ds in diagnostics] == [
        [], ["compiler.err.cant.resolve.location"], ["crash"], ["compiler.err.cant.resolve.location"], []
    ]  # fmt: skip


@needs_jdk
def test_a_killed_compiler_is_restarted(java_compiler):
    java_compiler.check([GOOD])
    java_compiler.server.process.kill()
    java_compiler.server.process.wait()
    assert len(java_compiler.check([BAD])[0]) == 1


# a process that speaks the protocol: "die" kills it, "unlucky" only the first time; "nap" and "hang" take long
FAKE = """
import struct, sys, time, pathlib
stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
def reply(index, content):
    stdout.write(struct.pack(">ii", index, len(content)) + content)
    stdout.flush()
reply(-1, b"")
held = []
while len(head := stdin.read(8)) == 8:
    index, size = struct.unpack(">ii", head)
    content = stdin.read(size)
    seen = pathlib.Path(sys.argv[1])
    if content == b"die" or content == b"unlucky" and not seen.exists():
        if content == b"unlucky":
            seen.touch()
        sys.exit(1)
    time.sleep({b"nap": 0.8, b"hang": 1000}.get(content, 0))
    held.append((index, content))
    if len(held) == int(sys.argv[2]):  # answered in reverse order
        for index, content in reversed(held):
            reply(index, content.upper())
        held = []
"""


def fake(tmp_path: Path, window: int = 1, hold: int = 1, timeout: float = 60) -> Server:
    return Server([sys.executable, "-c", FAKE, str(tmp_path / "seen"), str(hold)], window, timeout)


def test_replies_in_any_order_match_their_requests(tmp_path):
    server = fake(tmp_path, window=2, hold=2)
    assert server.ask([b"a", b"b", b"c" * 100_000, b"d"]) == [b"A", b"B", b"C" * 100_000, b"D"]
    server.stop()


@pytest.mark.parametrize("window", [1, 3])
def test_only_a_request_that_crashes_the_process_alone_is_a_crash(tmp_path, window):
    server = fake(tmp_path, window)
    replies = server.ask([b"a", b"unlucky", b"b", b"die", b"die", b"c"])
    assert [r.code if isinstance(r, Failure) else r for r in replies] == [
        b"A",
        b"UNLUCKY",
        b"B",
        "crash",
        "crash",
        b"C",
    ]
    server.stop()


def test_a_timeout_starts_when_the_request_is_sent(tmp_path):
    server = fake(tmp_path, timeout=1.0)
    replies = server.ask([b"a", b"hang", b"b", b"hang", b"c"])  # the last waits for two seconds, but isn't late
    assert [r.code if isinstance(r, Failure) else r for r in replies] == [b"A", "timeout", b"B", "timeout", b"C"]
    server.stop()


def test_a_request_in_flight_during_a_timeout_is_sent_again(tmp_path):
    server = fake(tmp_path, window=2, timeout=2)
    replies = server.ask([b"nap", b"hang", b"a"])  # `a` is sent when the nap is over, and has time left
    assert replies[::2] == [b"NAP", b"A"] and replies[1].code == "timeout"
    server.stop()


@pytest.mark.parametrize("window", [1, 2])
def test_a_process_is_replaced_before_it_gets_slow(tmp_path, monkeypatch, window):
    monkeypatch.setattr(compilers, "RENEW_AFTER", 3)
    server, start, starts = fake(tmp_path, window), Server.start, []
    monkeypatch.setattr(Server, "start", lambda self: (starts.append(self.num_sent), start(self)))
    assert server.ask([b"a", b"b", b"c", b"d", b"e"]) == [b"A", b"B", b"C", b"D", b"E"]
    assert server.ask([b"f", b"g"]) == [b"F", b"G"]
    assert starts == [0, 3, 3]
    server.stop()


def test_an_interrupted_request_leaves_no_reply_behind(tmp_path, monkeypatch):
    server = fake(tmp_path)
    server.ask([b"a"])

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(server, "send", interrupted)
        server.ask([b"b"])
    assert server.process is None and server.ask([b"c"]) == [b"C"]
    server.stop()


def test_the_process_ends_with_the_compiler_and_with_python():
    with PythonCompiler() as compiler:
        compiler.check(["x = 1"])
        process = compiler.server.process
        assert process.poll() is None
    assert process.returncode is not None
    script = (
        "import os; from nanorlhf.rlcf.compilers import PythonCompiler; c = PythonCompiler(); "
        "c.check(['x = 1']); print(c.server.process.pid, flush=True); os._exit(0)"
    )
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    end = time.monotonic() + 20
    while time.monotonic() < end and is_running(pid):
        time.sleep(0.1)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# ------------------------------------------------------------------------------------------------------ 3. bad settings
def test_a_missing_jdk_is_reported_at_once():
    with pytest.raises(InputError, match="java-of-nowhere not found: install a JDK 17"):
        JavaCompiler(java="java-of-nowhere")


def test_a_java_that_cannot_compile_is_reported_with_a_reason(tmp_path):
    launcher = tmp_path / "java"
    launcher.write_text("#!/bin/sh\necho 'error: Module jdk.compiler not found' >&2\nexit 1\n")
    launcher.chmod(0o755)
    with pytest.raises(InputError, match=r"Module jdk.compiler not found\).*JDK 17"):
        JavaCompiler(java=str(launcher)).check([GOOD])


@needs_jdk
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "at least 1 worker, got 0"),
        ({"timeout": 0.0}, "above 0 seconds, got 0.0"),
        ({"error_prone_jar": "none.jar"}, "none.jar is not a file"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        JavaCompiler(**settings)


# -------------------------------------------------------------------------------------------------------- 4. ErrorProne
# a fake ErrorProne: a javac plug-in of that name that uses javac's internals and reports variables named `wrong`
@pytest.fixture(scope="module")
def error_prone(plugin):
    with JavaCompiler(workers=1, error_prone_jar=plugin) as compiler:
        yield compiler


@needs_jdk
def test_error_prone_findings_are_errors_at_their_position(error_prone):
    program = method("int wrong = n; return wrong;")
    for count in (1, 2):  # the plug-in is loaded once and serves every program
        (diagnostic,), nothing = error_prone.check([program, GOOD])
        assert nothing == [] and diagnostic.message == f"[Wrong] {count}"
        assert (diagnostic.kind, program[diagnostic.start : diagnostic.end]) == ("error", "wrong")


@needs_jdk
def test_a_plug_in_that_fails_is_an_error_at_the_programs_end(error_prone):
    program = method("int fatal = n; return fatal;")
    (diagnostic,), nothing = error_prone.check([program, GOOD])
    assert nothing == [] and "dear me" in diagnostic.message
    assert (diagnostic.kind, diagnostic.code, diagnostic.last) == ("error", "crash", len(program))


@needs_jdk
def test_a_jar_without_the_plug_in_is_reported_before_any_program(tmp_path):
    with zipfile.ZipFile(tmp_path / "empty.jar", "w") as jar:
        jar.writestr("nothing.txt", "")
    with pytest.raises(InputError, match="ErrorProne"):
        JavaCompiler(workers=1, error_prone_jar=tmp_path / "empty.jar").check([GOOD])


@needs_jdk
def test_the_command_line_follows_error_prones_manual(tmp_path):
    jars = [tmp_path / "a.jar", tmp_path / "b.jar"]
    for jar in jars:
        jar.touch()
    path = os.pathsep.join(map(str, jars))
    command = compilers.java_command("java", 2, path)
    jvm, javac = command[: command.index("-cp")], command[command.index("-cp") + 4 :]
    for option in (
        "--add-exports=jdk.compiler/com.sun.tools.javac.tree",
        "--add-opens=jdk.compiler/com.sun.tools.javac.comp",
    ):
        assert f"{option}=ALL-UNNAMED" in jvm
    assert javac[javac.index("-processorpath") + 1] == path
    assert {"-proc:none", "-XDcompilePolicy=simple", "--should-stop=ifError=FLOW"} <= set(javac)
    assert not any("add-exports" in option or "plugin" in option for option in compilers.java_command("java", 2, None))


# -------------------------------------------------------------------------------------------------- 5. unused variables
@pytest.mark.parametrize(
    ("body", "unused"),
    [
        ("int a = 1; int b = a; return n;", ["b"]),
        ("int a; a = 1; return n;", ["a"]),
        ("int a = 1, b = 2; return b;", ["a"]),
        ("int a = 0; a++; ++a; a += n; return n;", ["a"]),
        ("int a = 0; a = a + n; a = (a * 2); return n;", ["a"]),
        ("int a = 0; a = Math.max(a, n); return n;", []),  # a call may do something
        ("int a = 0, b = 1; a = b; b = a; return n;", []),
        ("int a = 0; return a++;", []),
        ("int a = 0; n = a += 2; return n;", []),
        ("int a; n = a = 2; return n;", ["a"]),
        ("int[] a = new int[3]; a[0] = n; return n;", []),  # the array's name was read
        ("for (int i = 0; i < n; i++) { } return n;", []),
        ("for (int i = 0, j = 0; i < n; i++, j++) { } return n;", ["j"]),
        ("for (int i = 0; n < 3; i++) { } for (int i = 0; i < 3; i++) { } return n;", ["i"]),
        ("{ int a = 1; } { int a = 2; n = a; } return n;", ["a"]),  # the first of two with the same name
        ("int length = 3; return s.length();", ["length"]),
        ("int value = 3; return this.value;", ["value"]),
        ("String s2 = s; return s2.length();", []),
        ("int a = 1; a: while (true) { break a; } return n;", ["a"]),
        ("String trim = s; l.stream().map(String::trim); return n;", ["trim"]),
        ("String t = s; l.forEach(t::equals); return n;", []),
        ("int a = 1; Runnable r = () -> System.out.println(a); return n;", ["r"]),
        ("for (String t : l) n++; return n;", []),
        ("try (Scanner c = new Scanner(s)) { n++; } catch (Exception e) { n--; } return n;", []),
        ("Object o = s; if (o instanceof String t) n++; return n;", []),
        ("switch (n) { case 1: int a = 1; case 2: a = 2; n = a; } return n;", []),
        ("Object o = new Object() { int a = 1; int g(int b) { int c = 2; return 1; } }; return o.hashCode();", ["c"]),
        ("int größe = 1; String 𝒳 = s; return n;", ["größe", "𝒳"]),
        ("int a = 1; return n", []),  # it doesn't parse
    ],
)
def test_a_local_variable_is_unused_if_nothing_reads_it(body, unused):
    program = method(body)
    diagnostics = unused_variables(program)
    assert [program[d.start : d.end] for d in diagnostics] == unused
    assert {d.kind for d in diagnostics} <= {"unused"} and all(program[d.start - 1] in " ," for d in diagnostics)


def test_of_two_variables_with_one_name_the_unused_one_is_reported():
    program = method("{ int a = 1; } { int a = 2; n = a; } return n;")
    assert unused_variables(program)[0].start == program.index("a = 1")


def test_nesting_takes_linear_time():
    program = method("int a = 1; return n" + " + n" * 30_000 + ";")
    start = time.monotonic()
    assert len(unused_variables(program)) == 1
    assert time.monotonic() - start < 10  # a quadratic walk takes a minute


@needs_jdk
def test_unused_variables_and_errors_are_sorted_by_position(java_compiler):
    program = method("int a = 1; int b = y; int c = 2; return n;")
    assert [(d.kind, program[d.start : d.end]) for d in java_compiler.check([program])[0]] == [
        ("unused", "a"), ("unused", "b"), ("error", "y"), ("unused", "c")
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------------- 6. compared with javac
def mbjp(real_data: Path) -> dict[str, str]:
    """Problem -> its program with a model's completion; some don't compile."""
    folder = real_data / "mxeval_java" / "mbxp"
    problems = [json.loads(line) for line in (folder / "mbjp_release_v1.2.jsonl").read_text().splitlines()]
    samples = [json.loads(line) for line in (folder / "examples" / "mbjp_samples.jsonl").read_text().splitlines()]
    completion = {row["task_id"]: row["completion"] for row in samples}
    return {row["task_id"]: row["prompt"] + completion[row["task_id"]] + row["test"] for row in problems}


@needs_jdk
def test_solutions_of_the_benchmark_compile(java_compiler, real_data):
    rows = (real_data / "mxeval_java" / "mbxp" / "mbjp_release_v1.2.jsonl").read_text().splitlines()
    problems = [row for row in map(json.loads, rows) if row["canonical_solution"] is not None]
    programs = [row["prompt"] + row["canonical_solution"] + row["test"] for row in problems[::8]]
    assert not any(errors(p, d) for p, d in zip(programs, java_compiler.check(programs), strict=True))


@needs_jdk
@pytest.mark.slow
def test_results_and_lines_are_those_of_a_javac_process(java_compiler, real_data, tmp_path, monkeypatch):
    programs = list(mbjp(real_data).values())
    broken = [p for p, d in zip(programs, java_compiler.check(programs), strict=True) if errors(p, d)]
    assert len(broken) == 33
    rng = random.Random(0)
    drawn = rng.sample(broken, 3) + rng.sample(programs, 2) + [corrupt(p, rng) for p in rng.sample(programs, 5)]

    def javac(number: int) -> tuple[bool, list[int]]:
        """A fresh javac on one program: whether it compiles, and the lines of the errors."""
        public = re.search(r"public\s+class\s+(\w+)", drawn[number])
        directory = tmp_path / str(number)
        directory.mkdir()
        file = directory / f"{public.group(1) if public else 'Main'}.java"
        file.write_text(drawn[number])
        options = ["-J-XX:TieredStopAtLevel=1", "-proc:none", "-XDrawDiagnostics", "--should-stop=ifError=FLOW"]
        done = subprocess.run(["javac", *options, "-d", directory, file], capture_output=True, text=True)
        lines = re.findall(r"\.java:(\d+):\d+: compiler\.err", done.stderr)
        return done.returncode == 0, [int(line) for line in lines]

    with ThreadPoolExecutor(2) as pool:
        plain = list(pool.map(javac, range(len(drawn))))
    # javac's own positions, before the search for the culprit
    monkeypatch.setattr(compilers, "culprit", lambda program, start, position, end: (position, position))
    for program, diagnostics, (compiles, lines) in zip(drawn, java_compiler.check(drawn), plain, strict=True):
        ours = [d for d in diagnostics if d.kind == "error"]
        assert bool(ours) != compiles
        if ours:
            first = min(ours, key=lambda d: d.start).start
            # an error that only the end shows: ours is at the end, javac's at the last lexeme
            assert min(lines) == program[: min(first, len(program.rstrip()))].count("\n") + 1


def corrupt(program: str, rng: random.Random) -> str:
    """The program with one lexeme deleted or replaced."""
    lexemes = [m for m in compilers.LEXEME.finditer(program) if not m.group().isspace()]
    there = rng.choice(lexemes)
    return program[: there.start()] + rng.choice(["", " foo ", rng.choice(lexemes).group()]) + program[there.end() :]


# ------------------------------------------------------------------------------------------------------------ 7. Python
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("def f(a):\n    return a\n", []),
        ("x = = 2", [("error", "SyntaxError", "=", 4)]),
        ("print(1)\r\nx = = 2", [("error", "SyntaxError", "=", 14)]),
        ("a = 1\rb c", [("error", "SyntaxError", "c", 8)]),
        ("é = 'ü😀' ü", [("error", "SyntaxError", "ü", 9)]),
        ("é = '😀'; return", [("error", "SyntaxError", "return", 9)]),  # found after parsing: columns in bytes
        ("if 1:\npass", [("error", "IndentationError", "pass", 6)]),
        ("def f(a,\n a): pass", [("error", "SyntaxError", "a", 10)]),
        ("x = (1, 2\n", [("error", "SyntaxError", "(1, 2\n", 4)]),  # only the end shows that it is unclosed
        ("x = '''abc\n", [("error", "SyntaxError", "'''abc\n", 4)]),
        ("x = 1\0", [("error", "SyntaxError", "\0", 5)]),
        ("x = '\ud800'", [("error", "UnicodeEncodeError", "\ud800", 5)]),
        ("é = y + 1", [("error", "UndefinedName", "y", 4)]),
        ("def f():\n    é = 'ü'; y = é\n", [("unused", "UnusedVariable", "y", 22)]),
        ("def f():\n  x = 1\n  y", [("unused", "UnusedVariable", "x", 11), ("error", "UndefinedName", "y", 19)]),
        ("def f(g):\n    with g as h: pass\n    try: pass\n    except OSError as e: pass\n    for i in g: pass\n", []),
        ("import os\nx = 1\n", []),
        ("def f():\n  x = 0\n  x += 1\n  x = (x * 2)\n", [("unused", "UnusedVariable", "x", 11)]),
        ("def f():\n  x = 1\n  del x\n", [("unused", "UnusedVariable", "x", 11)]),
        ("def f():\n  x = 1\n  def g():\n    nonlocal x\n    x = 2\n", [("unused", "UnusedVariable", "x", 11)]),
        ("def f():\n  x = 1\n  locals()\n", [("unused", "UnusedVariable", "x", 11)]),
        ("def f(a):\n  x = a\n  x += [1]\n", []),  # it changes the list
        ("def f(g):\n  x = 0\n  while x := g(x): pass\n", []),
        ("def f():\n  x = 0\n  def g():\n    return x\n  x += 1\n  return g\n", []),
        ("def f():\n  class A:\n    x = 1\n  return A\n", []),
        ("from math import *\nsqrt(y)\n", [("error", "UndefinedName", "y", 24)]),
        ("from unknown import *\ny\n", []),
        ("try:\n  y\nexcept NameError: pass\n", [("error", "UndefinedName", "y", 7)]),
        ("try:\n  y\nexcept (OSError, NameError): pass\n", [("error", "UndefinedName", "y", 7)]),
        ("try:\n  y\nexcept: pass\n", [("error", "UndefinedName", "y", 7)]),
        ("try:\n  y\nexcept NameError:\n  y = str\n", []),
        ("'\\d' is 1", []),  # warnings are silent
        ("import sys; sys.exit(3)", []),  # nothing is run
    ],
)  # fmt: skip
def test_python_is_checked_without_being_run(python_compiler, program, expected):
    reported = [(d.kind, d.code, program[d.start : d.end], d.start) for d in python_compiler.check([program])[0]]
    assert reported == expected


def test_an_error_inside_an_f_string_is_on_its_line(python_compiler):
    program = "a = b = 1\nx = f'{a b}'\n"
    (diagnostic,) = python_compiler.check([program])[0]
    assert program.index("x") <= diagnostic.start <= program.index("a b")
    assert program.index("b}") <= diagnostic.last <= program.index("'\n")


@pytest.mark.parametrize("program", ["x = " + "-" * 100_000 + "1", "x = 1" + " + 1" * 20_000])
def test_nesting_too_deep_for_python_is_an_error_at_the_end(python_compiler, program):
    (diagnostic,) = python_compiler.check([program])[0]
    assert diagnostic.kind == "error" and diagnostic.last == len(program)


def test_nesting_that_python_accepts_is_not_an_error(python_compiler):
    assert python_compiler.check(["x = 1" + " + 1" * 800, "def f(a):\n    return a" + ".b" * 800]) == [[], []]


def test_a_program_that_crashes_python_is_an_error_and_changes_no_other_result(python_compiler):
    kills = "y = []\n[x " + "for x in y " * 50_000 + "]"  # overflows the stack of CPython 3.11
    good, killed, bad = python_compiler.check(["x = 1", kills, "x = ="])
    assert good == [] and bad[0].code == "SyntaxError"
    assert [(d.kind, d.last) for d in killed] in ([("error", len(kills))], [])  # other versions may survive it


def test_a_program_that_keeps_python_busy_is_a_timeout():
    with PythonCompiler(timeout=1.5) as compiler:
        busy, good = compiler.check(["x = [" + "{'a': (1, 'b')}, " * 1_000_000 + "]", "x = 1"])
    assert [(d.code, d.kind) for d in busy] == [("timeout", "error")] and good == []
