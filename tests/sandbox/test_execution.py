"""Verdicts on programs, and attempts to escape from the sandbox."""

import atexit
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from nanorlhf.errors import InputError
from nanorlhf.sandbox import execution, supervisor
from nanorlhf.sandbox.execution import (
    MIB,
    Program,
    Verdict,
    isolation,
    make_program,
    run_all_tests,
    run_programs,
    try_way,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")
ROOT = Path(__file__).resolve().parents[2]
SHORT, LONG = 3.0, 60.0  # seconds: for programs that run until they are stopped, and for all others


@pytest.fixture(scope="module", params=["namespaces", "limits"])
def way(request):
    problem = try_way(request.param)[1]
    if problem:
        pytest.skip(f"this system can't run programs in the way {request.param}: {problem}")
    return request.param


@pytest.fixture(scope="module", autouse=True)
def scratch():
    """Create a directory for all sandboxes of this module, which identifies its processes among other test runs'.

    We can't use tmp_path, because programs of other users must be able to enter the directory.
    """
    directory = Path(tempfile.mkdtemp(prefix="nanorlhf-tests-"))
    directory.chmod(0o711)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)  # runs after java_classes has removed its own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        yield directory


def sandboxed_processes(scratch):
    """Find supervisors, programs and what they started: by user, environment or command line."""
    pids, first = [], execution.user_id(execution.Worker(0, scratch, "limits", set(), None, None))  # None: not root
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            is_ours = first is not None and first <= os.stat(f"/proc/{pid}").st_uid < first + 128
            text = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if is_ours or bytes(scratch) in text:
            pids.append(int(pid))
    return pids


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture(autouse=True)
def nothing_is_left(scratch):
    """Check that no process and no file is left after each test."""
    before = set(sandboxed_processes(scratch)), set(scratch.glob("nanorlhf-*"))
    yield
    assert wait_for(lambda: not set(sandboxed_processes(scratch)) - before[0], 1.0), "processes are left"
    left = {path for path in set(scratch.glob("nanorlhf-*")) - before[1] if "java" not in path.name}
    assert not left, "files are left"


# ---------------------------------------------------------------------------------------------- verdicts on Java
def java(body, tests="", classes="", returns="Integer"):
    """Return a program in MBJP's form: class Problem with problem(), and class Main."""
    return Program(
        f"import java.util.*;\n{classes}\n"
        f"class Problem {{ public static {returns} problem(int n) throws Exception {{\n",
        f"{body}\n}} }}\n",
        "",
        f"class Main {{ public static void main(String[] args) throws Exception {{\n{tests}\n}} }}\n",
    )


def whole(code, tests):
    """Return a program that consists of the response only."""
    return Program("import java.util.*;\n", code, "", java("", tests).tests)


def python(code, tests=None):
    if tests is None:
        code, tests = f"{code}\ndef run(): pass\n", "run()"
    return Program("", code, "", tests)


def mbjp_test(case, argument, answer):
    return (
        f"int x{case} = Problem.problem({argument});\n"
        f"if (!(x{case} == {answer})) {{\n"
        f'    throw new java.lang.Exception("Exception -- test case {case} did not pass. x{case} = " + x{case});\n}}\n'
    )


TWO_TESTS = mbjp_test(0, 1, 1) + mbjp_test(1, 2, 4)
JAVA_VERDICTS = {  # name: (program, reason)
    "right": (java("return n * n;", TWO_TESTS), "passed"),
    "wrong": (java("return 1;", TWO_TESTS), "wrong_answer"),
    "all wrong": (java("return 7;", TWO_TESTS), "wrong_answer"),
    # the second test would not run if the first threw
    "wrong, then a crash": (java("if (n == 2) throw new RuntimeException(); return 3;", TWO_TESTS), "exception"),
    "wrong, then endless": (java("while (n == 2); return 3;", TWO_TESTS), "timeout"),
    "crash": (java("int[] a = {}; return a[n];", TWO_TESTS), "exception"),
    "the tests' own exception, thrown by the program": (
        java('throw new java.lang.Exception("Exception -- test case 0 did not pass.");', TWO_TESTS), "exception"),
    "null unboxed in Main": (java("return null;", TWO_TESTS), "exception"),
    "static initialiser": (java("return n * n; } static int a = 1 / (int) 0L; {", TWO_TESTS), "exception"),
    "stack overflow": (java("return problem(n) + 1;", TWO_TESTS), "exception"),
    "syntax error": (java("return n * ;", TWO_TESTS), "compile_error"),
    "type error": (java("return n * m;", TWO_TESTS), "compile_error"),
    "nothing": (Program("", "", "", ""), "exception"),
    "no Main": (Program("class Problem {}", "", "", ""), "exception"),
    "public class of another name": (Program("public class Problem {}", "", "", ""), "compile_error"),
    "an assertion of the tests": (
        java("return 2;", 'if (Problem.problem(1) != 1) throw new AssertionError("no");'), "wrong_answer"),
    "another exception of the tests": (
        java("return 2;", "if (Problem.problem(1) != 1) throw new IllegalStateException();"), "exception"),
    "its own NanoRlhfTests": (
        java("return 1;", TWO_TESTS, "class NanoRlhfTests { static void fail(String s) {} }"), "wrong_answer"),
    "a test's words in the program": (
        java('String s = "class Main { throw new java.lang.Exception("; return n * n;', TWO_TESTS), "passed"),
    "exit": (java("System.exit(0); return 1;", TWO_TESTS), "exit"),
    "halt": (java("Runtime.getRuntime().halt(0); return 1;", TWO_TESTS), "exit"),
    "exit that says it has passed": (
        java('System.out.println("passed"); System.err.println("passed"); System.exit(0); return 1;', TWO_TESTS),
        "exit"),
    "status 3 after the tests": (java(
        "Runtime.getRuntime().addShutdownHook(new Thread(() -> Runtime.getRuntime().halt(3))); return n * n;",
        TWO_TESTS), "exit"),
    "a thread that throws": (
        java("Thread t = new Thread(() -> { throw new RuntimeException(); }); t.start(); t.join(); return n * n;",
             TWO_TESTS), "passed"),
    "its own out and err": (
        java("System.setOut(null); System.setErr(null); return 1;", TWO_TESTS), "wrong_answer"),
    "strings compared by identity": (whole(
        "class Problem { static int problem(String s, int n) { return s == \"a\" ? n * n : 0; } }",
        "if (Problem.problem(\"a\", 3) != 9) throw new Exception();"), "passed"),
    "an exception of the JDK that the tests expect": (java(
        "throw new IllegalArgumentException();",
        "try { Problem.problem(1); } catch (IllegalArgumentException e) { return; } throw new Exception();"), "passed"),
    "values of every plain type": (whole("class Problem { static Object same(Object o) { return o; } }", """
Object[] values = {null, true, (byte) 1, (short) 2, 'c', 3, 4L, 1.5f, Double.NaN, "\\ud800é", new int[][] {{1}, null},
    new String[] {"a"}, new java.math.BigInteger("9".repeat(50)), new java.math.BigDecimal("1.10"), List.of(1),
    Arrays.asList(1, null), new ArrayList<>(List.of(1)), new LinkedList<>(List.of(1)), new Vector<>(List.of(1)),
    new Stack<>(), new HashSet<>(List.of(1)), new LinkedHashSet<>(List.of(1)), new TreeSet<>(List.of(2, 1)),
    new ArrayDeque<>(List.of(1)), new PriorityQueue<>(List.of(2, 1)), Map.of(1, 2), new HashMap<>(Map.of(1, 2)),
    new LinkedHashMap<>(Map.of(1, 2)), new TreeMap<>(Map.of(2, 1, 1, 2)), Optional.of(1), Optional.empty(),
    new AbstractMap.SimpleEntry<>(1, "a")};
for (Object value : values) {
    Object[] both = {value, Problem.same(value)};
    boolean isQueue = value instanceof ArrayDeque || value instanceof PriorityQueue;
    boolean equal = isQueue ? both[1].toString().equals(value.toString()) : Arrays.deepEquals(
        new Object[] {both[0]}, new Object[] {both[1]});
    boolean isFixed = value == null || value.getClass().getName().contains("Immutable");
    if (!equal || !isFixed && both[1].getClass() != value.getClass()) throw new Exception(value + " " + both[1]);
}"""), "passed"),
    "classes and arguments changed in place": (java("Arrays.sort(new int[n]); return n;", """
Pair<String> pair = new Pair<>("a", 1, 2);
if (!pair.first().equals("a") || pair.sum(1, 2) != 6 || Pair.twice(3).size() != Pair.SIZE) throw new Exception();
if (!pair.equals(new Pair<>("b", 1, 2)) || Problem.problem(2) != 2) throw new Exception("the prompt's equals");
if (Color.RED.code() != 7 || Color.valueOf("RED") != Color.RED) throw new Exception();
if (!new Pair.Inner().same("b").equals("b")) throw new Exception();
int[][] array = {{3, 1}, {2}};
List<Integer> list = Arrays.asList(2, 1);
Set<Integer> set = new HashSet<>();
Map<String, Integer> map = new HashMap<>();
Pair.fill(array, list, set, map);
if (array[0][0] != 9 || list.get(0) != 1 || !set.contains(4) || map.get("b") != 5) throw new Exception();
""", """
interface Measured { int SIDES = 2; int sum(int... others) throws java.io.IOException; }
enum Color { RED; int code() { return 7; } }
class Pair<T extends Comparable<T>> implements Measured {
    static final int SIZE = SIDES;
    private final T first;
    private final int[] rest;
    Pair(T first, int... rest) { this.first = first; this.rest = rest; }
    T first() { return first; }
    public int sum(int... others) { return Arrays.stream(rest).sum() + Arrays.stream(others).sum(); }
    static <U> List<U> twice(U item) { return new ArrayList<>(Arrays.asList(item, item)); }
    public boolean equals(Pair<T> other) { return true; }
    static void fill(int[][] array, List<Integer> list, Set<Integer> set, Map<String, Integer> map) {
        array[0][0] = 9; Collections.sort(list); set.add(4); map.put("b", 5);
    }
    static class Inner { <P> P same(P p) { return p; } }
}"""), "passed"),
    "UTF-8": (java('return "é".length() * n * n;', TWO_TESTS), "passed"),
}  # fmt: skip


@pytest.fixture(scope="module")
def java_verdicts():
    return verdicts_on(JAVA_VERDICTS, "java")


def verdicts_on(cases, language, **settings):
    """Return name -> verdict; programs that run until they are stopped get a short time limit."""
    verdicts = {}
    for timeout in (SHORT, LONG):
        chosen = {n: program for n, (program, reason) in cases.items() if ("timeout" in reason) == (timeout == SHORT)}
        workers = 1 if len(chosen) < 4 else 2  # each starts a javac
        results = run_programs(list(chosen.values()), language, timeout, workers, **settings)
        verdicts |= dict(zip(chosen, results, strict=True))
    return verdicts


@pytest.mark.parametrize("name", JAVA_VERDICTS)
def test_a_java_program_gets_its_verdict(java_verdicts, name):
    reason = JAVA_VERDICTS[name][1]
    verdict = java_verdicts[name]
    assert verdict.reason == reason, verdict
    assert verdict.compiled == (reason != "compile_error")
    assert verdict.executed == (reason in ("passed", "wrong_answer"))
    assert verdict.passed == (reason == "passed")
    assert (verdict.seconds > 0) == verdict.compiled


def test_a_verdict_keeps_the_end_of_the_output(java_verdicts):
    assert "Main.java:4: error: cannot find symbol" in java_verdicts["type error"].output
    for case in (0, 1):  # both tests ran
        assert f"test case {case} did not pass. x{case} = 7" in java_verdicts["all wrong"].output
    assert "ArrayIndexOutOfBoundsException" in java_verdicts["crash"].output


def test_a_program_is_prefix_response_and_suffix_with_nothing_between():
    program = make_program({"prefix": "a {", "suffix": "}", "tests": " b"}, "return")
    assert program.code == "a {return}" and program.tests == " b"


def test_only_the_throw_for_a_wrong_answer_is_rewritten():
    throw = 'throw new java.lang.Exception("Exception -- test case 0 did not pass. x0 = " + x0);'
    assert run_all_tests(throw) == throw.replace("throw new java.lang.Exception(", "NanoRlhfTests.fail(")
    assert run_all_tests("class Main { throw new java.lang.Exception(); }").count("throw") == 1


def test_a_compiler_that_breaks_a_limit_is_replaced(monkeypatch):
    doubled = "".join(f"static final String S{i} = S{i - 1} + S{i - 1};" for i in range(1, 31))
    # javac folds it: 2^30 characters
    bomb = Program(f'class Problem {{ static final String S0 = "a"; {doubled} }}', "", "", "class Main { }")
    right = JAVA_VERDICTS["right"][0]
    monkeypatch.setattr(execution, "HARNESS_MIB", 48)  # the sooner it is full
    verdicts = run_programs([bomb, right], "java", LONG)
    assert [verdict.reason for verdict in verdicts] == ["compile_limit", "passed"]
    assert not verdicts[0].compiled
    replies, read_exactly = [], execution.read_exactly

    def late_once(*arguments):
        replies.append(arguments)
        if len(replies) == 1:
            raise TimeoutError
        return read_exactly(*arguments)

    monkeypatch.setattr(execution, "read_exactly", late_once)
    again = replace(right, suffix=" ")
    verdicts = run_programs([right, JAVA_VERDICTS["type error"][0], again], "java", LONG)
    # the late answer, that it compiles, is not taken for the next program's
    assert [verdict.reason for verdict in verdicts] == ["compile_limit", "compile_error", "passed"]
    monkeypatch.setattr(execution, "read_exactly", read_exactly)
    monkeypatch.setattr(execution, "COMPILE_SECONDS", 0.01)
    assert run_programs([right], "java", LONG)[0].output == "the compiler did not answer within 0.01 s"


# -------------------------------------------------------------------------------------------- verdicts on Python
PYTHON_VERDICTS = {
    "right": (python("def f(n): return n * n\n", "assert f(2) == 4"), "passed"),
    "wrong": (python("def f(n): return n\n", "assert f(2) == 4"), "wrong_answer"),
    "crash": (python("def f(n): return n / 0\n", "assert f(2) == 4"), "exception"),
    "syntax error": (python("def f(n):\n", "assert f(2) == 4"), "compile_error"),
    "a null byte": (python("a = '\0'"), "compile_error"),
    "too deep": (python("(" * 10000), "compile_error"),
    "endless": (python("def f(n):\n    while n: pass\n", "assert f(2) is None"), "timeout"),
    "exit": (python("import sys\nsys.exit(0)", "assert False"), "exit"),
    "exit in a call": (python("import sys\ndef f(n): sys.exit(0)", "assert f(1)"), "exit"),
    "_exit": (python("import os\nos._exit(0)", "assert False"), "exit"),
    "exit that says it has passed": (python(
        "import os\nfor fd in range(1, 20):\n    try:\n        os.write(fd, b'passed')\n    except OSError: pass\n"
        "os._exit(0)"), "exit"),
    "status 3 after the tests": (python(
        "def f(n): return n\nimport atexit, os\natexit.register(lambda: os._exit(3))", "assert f(2) == 2"), "exit"),
    "status 3 after the plain run": (python(
        "def f(n): return n\nimport atexit, os, sys\n"
        "atexit.register(lambda: os._exit(3 * ('tests' in sys.modules['__main__'].__dict__)))",
        "tests = 1\nassert f(2) == 2"), "exit"),
    "segmentation fault": (python("import ctypes\nctypes.string_at(0)"), "signal"),
    "script": (python(
        "import sys\nassert __name__ == '__main__' and len(sys.argv) == 1\n"
        "import dataclasses\n@dataclasses.dataclass\nclass A:\n    a: 'int'\ndef f(n): return A(n).a",
        "assert f(2) == 2"), "passed"),
    "a child that ends well": (python("import os\nif os.fork():\n    os.wait()\n    1 / 0"), "exception"),
    "a child that does not": (python(
        "import os\nif not os.fork():\n    1 / 0\nos.wait()\ndef f(n): return n", "assert f(2) == 2"), "passed"),
    "tests that ask nothing": (python("def f(n): return n", "assert 2 == 2"), "wrong_answer"),
    "an assertion of the program": (python("def f(n): assert n < 1", "f(2)"), "exception"),
    "the tests' syntax": (python("def f(n): return n", "assert f(2) =="), "compile_error"),
    "the tests exit": (python("def f(n): return n", "import os\nos._exit(0)"), "exit"),
    "an expected exception": (python(
        "def f(n): raise ValueError(n)", "try:\n    f(1)\nexcept ValueError as e:\n    assert e.args\nelse: assert 0"),
        "passed"),
    "values of every plain type": (python("def f(n): return n", """
import collections, decimal, fractions
for v in (None, True, 10 ** 5000, -1, 1.5, float("inf"), 2j, "\\ud800é", b"\\xff", [1, (2, {3})], {(1,): [None]},
          frozenset("a"), range(3), decimal.Decimal("1.10"), fractions.Fraction(1, 3), collections.deque([1])):
    assert f(v) == v and type(f(v)) is type(v), v
"""), "passed"),
    "objects, generators and arguments changed in place": (python("""
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
def count(n):
    for i in range(n): yield i
def sort(a): a.sort()
""", """
s = Stack()
s.push(3)
assert len(s) == 1 and s.items == [3] and s == s and s != Stack()
assert list(count(3)) == [0, 1, 2]
a = [3, 1, 2]
sort(a)
assert a == [1, 2, 3]
"""), "passed"),
    "a function in an argument": (python("def f(g): return g(1)", "assert f(lambda x: x) == 1"), "passed"),
}  # fmt: skip


def test_a_python_program_gets_its_verdict():
    verdicts = verdicts_on(PYTHON_VERDICTS, "python")
    assert {name: v.reason for name, v in verdicts.items()} == {n: reason for n, (_, reason) in PYTHON_VERDICTS.items()}
    for verdict in verdicts.values():
        flags = verdict.compiled, verdict.executed, verdict.passed
        assert flags == (
            verdict.reason != "compile_error",
            verdict.reason in ("passed", "wrong_answer"),
            verdict.reason == "passed",
        )


def test_the_share_counts_the_tests_that_pass():
    """A test that isn't reached, after an exception in Java, hasn't passed."""
    tests = "assert f(1) == 1\nfor n in (2, 3):\n    assert f(n) == n * n\n"
    tests += "try:\n    assert f(0) == 5\nexcept AssertionError: pass\n"
    bodies = {"n * n": 1.0, "n": 1 / 3, "n if n < 3 else 1 / 0": 1 / 3, "4 / (n - 1)": 1 / 3, "[n].sort()": 0.0}
    programs = [python(f"def f(n): return {body}\n", tests) for body in bodies]
    assert [v.share for v in run_programs(programs, "python", LONG)] == pytest.approx(list(bodies.values()))


def test_the_share_counts_the_tests_of_java_that_pass():
    bodies = {
        "n * n": 1.0,
        "n": 1 / 3,
        "n < 3 ? n * n : 1 / (n - 3)": 2 / 3,
        "n == 1 ? 7 : n == 2 ? 4 : 1 / (n - 3)": 1 / 3,
    }
    programs = [java(f"return {body};", TWO_TESTS + mbjp_test(2, 3, 9)) for body in bodies]
    assert [v.share for v in run_programs(programs, "java", LONG)] == pytest.approx(list(bodies.values()))


def test_verdicts_come_in_order_and_equal_programs_run_once(monkeypatch):
    programs = [python(f"import time\nprint({i % 3}, time.time_ns())", f"assert {i % 3}") for i in range(7)]
    run_python, runs = execution.run_python, []
    monkeypatch.setattr(execution, "run_python", lambda *arguments: runs.append(arguments) or run_python(*arguments))
    verdicts = run_programs(programs, "python", LONG, workers=3)
    assert len(runs) == 3
    assert [int(verdict.output[0]) for verdict in verdicts] == [0, 1, 2, 0, 1, 2, 0]
    assert verdicts[0] == verdicts[3] == verdicts[6] and len(set(verdicts)) == 3
    assert run_programs([], "python") == []


def test_workers_and_processes_share_no_user(monkeypatch):
    """Otherwise they would share one limit on the number of processes."""
    monkeypatch.setattr(os, "getuid", lambda: 0)
    users = set()
    for pid in range(1000, 1032):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        users |= {execution.user_id(execution.Worker(n, Path(), "limits", set(), None, None)) for n in range(128)}
    assert len(users) == 32 * 128 and min(users) >= 61184 and max(users) < 65520


def test_a_program_sees_neither_its_tests_nor_their_answers(way):
    """They are not in its frames, objects, environment, arguments, files or descriptors, nor in other processes'."""
    program = """
import gc, glob, os, sys
def f(n):
    seen = []
    frame = sys._getframe()
    while frame:
        seen += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    seen += [os.environ, sys.argv, sys.orig_argv, gc.get_objects()]
    text = "".join(map(repr, seen))
    paths = [*glob.glob("/proc/[0-9]*/cmdline"), *glob.glob("/proc/[0-9]*/environ"), *glob.glob(os.getcwd() + "/../*")]
    for path in paths:
        try: text += open(path, errors="replace").read()
        except OSError: pass
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) not in (os.getpid(), os.getppid(), 1):  # its parent knows no more than itself
            try: open(f"/proc/{pid}/mem", "rb")
            except OSError: continue
            print("opened", pid)
    print("found" if "".join(["98765", "43210"]) in text else "not found", len(text) > 1000)
    return n
"""
    [verdict] = run_programs([python(program, "assert f(1) == 1, '9876543210'")], "python", LONG, way=way)
    assert verdict.output == "not found True\n" and verdict.passed, verdict


# --------------------------------------------------------------------------------------------------- hostile programs
LOOK = 'String seen; try { %s seen = "DONE"; } catch (Throwable e) { seen = "DENIED"; } System.out.println(seen);'
HOSTILE_JAVA = {  # name: (program, allowed reasons)
    "infinite loop, deaf to signals": (
        "Runtime.getRuntime().addShutdownHook(new Thread(() -> { while (true); })); while (true);", {"timeout"}),
    "infinite output": ('while (true) System.out.println("all work and no play");', {"output"}),
    "memory": ("List<long[]> a = new ArrayList<>(); while (true) a.add(new long[1 << 20]);", {"memory"}),
    "threads": ("while (true) new Thread(() -> { while (true); }).start();", {"timeout", "memory"}),
    "fork bomb": (
        'new ProcessBuilder("/bin/sh", "-c", "b() { b | b & }; b; sleep 1000").start().waitFor(); while (true);',
        {"timeout", "memory"}),
    "a thread that never ends": ("new Thread(() -> { while (true); }).start();", {"timeout"}),
    "a daemon thread": ("Thread t = new Thread(() -> { while (true); }); t.setDaemon(true); t.start();", {"passed"}),
    "grandchildren that leave": (
        'new ProcessBuilder("/bin/sh", "-c", "setsid sleep 1000 & setsid setsid sleep 1000 &").start().waitFor();',
        {"passed"}),
    "reads the home": (LOOK % 'new java.io.FileInputStream("{canary}/secret").read();', {"passed"}),
    "deletes files": (LOOK % 'if (!new java.io.File("{canary}/secret").delete()) throw new Exception();', {"passed"}),
    "socket": (LOOK % 'new java.net.Socket("127.0.0.1", {port}).close();', {"passed"}),
    "huge file": (
        'var f = new java.io.FileOutputStream("f"); while (true) f.write(new byte[1 << 20]);', {"exception", "disk"}),
    "closed stdout": ("System.out.close(); System.err.close();", {"passed"}),
    "invalid UTF-8": ("System.out.write(new byte[] {(byte) 0xff, (byte) 0xc3, 0x28}); System.out.flush();", {"passed"}),
    "stdin": ("if (System.in.read() != -1) throw new Exception();", {"passed"}),
}  # fmt: skip
HOSTILE_PYTHON = {
    "infinite loop, deaf to signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except: pass\n"
        "while True: pass", {"timeout"}),
    "infinite output": ("while True: print('all work and no play')", {"output"}),
    "memory": ("a = []\nwhile True: a.append(b'x' * 10**6)", {"memory"}),
    "shared memory": ("import mmap\na = mmap.mmap(-1, 2**31)\nwhile True: a.write(b'x' * 2**20)", {"memory"}),
    "memory of children": (
        "import os, time\nwhile True:\n    if not os.fork():\n        a = b'x' * 60000000\n        time.sleep(1000)\n"
        "    time.sleep(.01)", {"memory"}),
    "memory of the kernel": (
        "import os, socket, time\npairs = []\nwhile True:\n    try: pairs.append(socket.socketpair())\n"
        "    except OSError:\n        if os.fork() == 0: pairs.clear()\n        else: time.sleep(1000)\n"
        "        continue\n    for end in pairs[-1]:\n        end.setblocking(False)\n        try:\n"
        "            while end.send(bytes(65536)): pass\n        except OSError: pass", {"memory"}),
    "larger buffers in the kernel": (
        "import socket\nsocket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)", {"exception"}),
    "a few socket pairs": (
        "import asyncio, socket\npairs = [socket.socketpair() for _ in range(40)]\nasyncio.run(asyncio.sleep(0))",
        {"passed"}),
    "memory in no process": ("import os\nos.memfd_create('a')", {"exception"}),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout", "memory"}),
    "double fork": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        [os.close(fd) for fd in range(3)]\n        time.sleep(1000)\n    os._exit(0)\nos.wait()", {"passed"}),
    "zombies": ("import os\nfor i in range(20):\n    if not os.fork(): os._exit(0)", {"passed"}),
    "kills all it can": (
        "import os, signal\nfor pid in (os.getppid(), {pid}, 1, -1):\n    try: os.kill(pid, signal.SIGKILL)\n"
        "    except OSError as e: print(e)", {"passed", "signal"}),
    "reads the home": ("try: print(open('{canary}/secret').read())\nexcept OSError: print('DENIED')", {"passed"}),
    "lists the home": ("import os\ntry: print(os.listdir('{canary}'))\nexcept OSError: print('DENIED')", {"passed"}),
    "deletes files": (
        "import os, shutil\nshutil.rmtree('{canary}', ignore_errors=True)\ntry: os.remove('{canary}/secret')\n"
        "except OSError: print('DENIED')", {"passed"}),
    "socket": (
        "import socket\ntry: socket.create_connection(('127.0.0.1', {port}))\nexcept OSError: print('DENIED')",
        {"passed"}),
    "datagram": (
        "import socket\ntry: socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))\n"
        "except OSError: print('DENIED')", {"passed"}),
    "huge file": ("f = open('f', 'wb')\nwhile True: f.write(b'x' * 2**20)", {"exception", "disk"}),
    "many files": (
        "import time\nfor i in range(10): open(str(i), 'wb').write(b'x' * 2**20 * 4)\ntime.sleep(1000)",
        {"exception", "disk"}),
    "a deep directory": (
        "import os\nfor i in range(2000):\n    os.mkdir('d')\n    os.chdir('d')\n", {"passed"}),
    "a closed directory": ("import os\nos.mkdir('d')\nopen('d/f', 'w').close()\nos.chmod('d', 0)", {"passed"}),
    "closed stdout": ("import os, sys\nsys.stdout.close()\nos.close(2)", {"passed"}),
    "closed descriptors": ("import os\nos.closerange(3, 1024)", {"exit"}),
    "invalid UTF-8": ("import os\nos.write(1, b'\\xff\\xc3\\x28')", {"passed"}),
    "stdin": ("import sys\nassert sys.stdin.read() == ''", {"passed"}),
    "a namespace of its own": (
        "import ctypes, os, platform\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "assert libc.unshare(0x10000000) == -1\nclone = 56 if platform.machine() == 'x86_64' else 220\n"
        "assert libc.syscall(clone, 0x10000000 | 17, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1\n"
        "assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == 38", {"passed"}),
    "limits of others": (
        "import resource\ntry: resource.prlimit({pid}, resource.RLIMIT_CPU, (1, 1))\nexcept OSError: print('DENIED')",
        {"passed"}),
    "a clean room": (
        "import os\nassert os.listdir('.') == [] and os.getcwd() == os.environ['HOME']\n"
        "assert sorted(os.environ) == ['HOME', 'LANG', 'PATH', 'TMPDIR'], os.environ", {"passed"}),
    "limits": (
        "import json, resource as r\nprint(json.dumps([r.getrlimit(getattr(r, 'RLIMIT_' + n)) for n in "
        "('CPU', 'FSIZE', 'DATA', 'NOFILE', 'CORE', 'NPROC')]))", {"passed"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def canary():
    """Create a directory that everyone may read and write, owned by the user who runs the tests."""
    with tempfile.TemporaryDirectory(prefix="canary-") as directory:
        os.chmod(directory, 0o777)
        yield Path(directory)


def run_hostile(language, hostile, way, canary):
    secret = canary / "secret"
    secret.write_text("the secret")
    secret.chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        server.settimeout(0.0)
        patch.setattr(execution, "DISK", 16 * MIB)
        words = {"{canary}": str(canary), "{port}": str(server.getsockname()[1]), "{pid}": str(os.getpid())}
        programs = {}
        for name, (program, reasons) in hostile.items():
            for word, value in words.items():
                program = program.replace(word, value)
            if language == "java":
                attack = f"attack(); return 1; }} static void attack() throws Exception {{ {program}"
                programs[name] = java(attack, mbjp_test(0, 1, 1)), reasons
            else:
                programs[name] = python(program), reasons
        before = resource.getrlimit(resource.RLIMIT_CPU)
        verdicts = verdicts_on(programs, language, memory_mib=256, way=way)
        with pytest.raises(BlockingIOError):
            server.accept()  # no program connected
    assert secret.read_text() == "the secret"
    assert resource.getrlimit(resource.RLIMIT_CPU) == before
    assert not set(canary.iterdir()) - {secret}
    return verdicts


def assert_harmless(hostile, verdicts):
    assert {name: v for name, v in verdicts.items() if v.reason not in hostile[name][1]} == {}
    for name, verdict in verdicts.items():
        if "DENIED" in hostile[name][0]:
            assert "DENIED" in verdict.output and "DONE" not in verdict.output, name
        assert "the secret" not in verdict.output
        assert verdict.compiled
    assert "\ufffd\ufffd(" in verdicts["invalid UTF-8"].output
    assert "all work" in verdicts["infinite output"].output[-50:]
    assert len(verdicts["infinite output"].output) == execution.TAIL


@pytest.mark.slow
def test_hostile_java_programs_harm_nothing(way, canary):
    assert_harmless(HOSTILE_JAVA, run_hostile("java", HOSTILE_JAVA, way, canary))


@pytest.mark.slow
def test_hostile_python_programs_harm_nothing(way, canary):
    verdicts = run_hostile("python", HOSTILE_PYTHON, way, canary)
    assert_harmless(HOSTILE_PYTHON, verdicts)
    cpu, file_size, data, files, core, tasks = json.loads(verdicts["limits"].output)
    assert (cpu, file_size, data) == ([241, 242], [16 * MIB] * 2, [256 * MIB] * 2)
    assert (files, core) == ([256, 256], [0, 0]) and execution.NUM_TASKS <= tasks[1] < 10000


def test_root_has_no_privileges_in_the_sandbox(way):
    program = "import os\nprint(os.getuid(), os.geteuid(), os.getgroups(), open('/proc/self/status').read())"
    [verdict] = run_programs([python(program)], "python", LONG, way=way)
    assert re.search(r"CapEff:\t0{16}\n", verdict.output) and re.search(r"NoNewPrivs:\t1\n", verdict.output)
    if os.getuid() == 0:
        assert re.match(r"(6[1-5]\d\d\d) \1 \[\]", verdict.output)


def test_other_processes_are_invisible():
    if try_way("namespaces")[1]:
        pytest.skip("no namespaces here")
    program = "import os\nprint(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()), os.listdir('/'))"
    [verdict] = run_programs([python(program)], "python", LONG, way="namespaces")
    assert verdict.output.startswith("[1, 2, 3]") and "home" not in verdict.output


# ------------------------------------------------------------------------------------------------------ forged verdicts
THREE_TESTS = TWO_TESTS + mbjp_test(2, 3, 9)
OWN_MAIN = "}} class Main { public static void main(String[] args) {} }"
AS_OBJECTS = "if (!compare(Problem.problem(2), %s)) throw new java.lang.Exception();"
NEARLY = "double x = Problem.problem(2); if (!(Math.abs(x - 4.0) < 1e-7)) throw new java.lang.Exception();"
POWERS = "} static { try { %s } catch (Throwable e) { } "  # a static block of class Problem


def objects(body, answer):
    """Return tests in MBJP's form that compare objects."""
    compare = "} static boolean compare(Object a, Object b) { return a == null ? b == null : a.equals(b); } static {"
    return java(body, AS_OBJECTS % answer + compare, returns="Object")


FORGED_JAVA = {  # the square of n; all of them answer wrong
    "the end of the file": java("return 1; " + OWN_MAIN + "\x1a", THREE_TESTS),
    "the end of the file, escaped": java("return 1; " + OWN_MAIN + r"\u001a", THREE_TESTS),
    "the end of the file, with three u": java("return 1; " + OWN_MAIN + r"\uuu001A", THREE_TESTS),
    "the harness's failure count": java("""return 1; } static { Thread t = new Thread(() -> { while (true) try {
        for (var field : Class.forName("NanoRlhfTests").getDeclaredFields())
            if (field.getType() == int.class) { field.setAccessible(true); field.setInt(null, 0); }
        } catch (Throwable e) { } }); t.setDaemon(true); t.start(); """, THREE_TESTS),
    "Unsafe on boxed constants": java("return n; " + POWERS % """
        var field = Class.forName("sun.misc.Unsafe").getDeclaredField("theUnsafe");
        field.setAccessible(true);
        var unsafe = (sun.misc.Unsafe) field.get(null);
        for (int n = 2; n < 4; n++) unsafe.putInt(Integer.valueOf(n * n), 12L, n);""", THREE_TESTS),
    "a comment over the tests": java("return 1; " + OWN_MAIN + " /*", THREE_TESTS),
    "a line comment over the tests": java("return 1; " + OWN_MAIN + " //", THREE_TESTS),
    "a text block over the tests": java("return 1; } String s = \"\"\"\n", THREE_TESTS),
    "its own Main": java("return 1; " + OWN_MAIN + " class A {{", THREE_TESTS),
    "its own Math": java("return 1; }} class Math { static double abs(double x) { return 0; } } class A {{", NEARLY),
    "its own Integer": java(
        "return null; }} class Integer { public boolean equals(Object o) { return true; } } class A {{",
        "Object x = Problem.problem(2); if (!x.equals(4)) throw new java.lang.Exception();"),
    "its own java.lang": java(
        "return 1; }} class java { static class lang { static class Exception extends Throwable {} } } class A {{",
        THREE_TESTS),
    "an object equal to everything": objects(
        "return new Object() { public boolean equals(Object o) { return true; } };", "4"),
    "a list equal to everything": objects(
        "return new ArrayList<Integer>() { public boolean equals(Object o) { return true; } };", "List.of(4)"),
    "a named class equal to everything": objects(
        "return new Same(); } public static class Same { public boolean equals(Object o) { return true; }", "4"),
    "the tests' own exception, traced to Main": java(
        "Exception e = new Exception(); e.setStackTrace(new StackTraceElement[] {"
        'new StackTraceElement("Main", "main", "Main.java", 1)}); throw e;', THREE_TESTS),
    "a verdict in every descriptor": java("""return 1; } static {
        for (int fd = 1; fd < 64; fd++) try (var out = new java.io.FileOutputStream("/proc/self/fd/" + fd)) {
            out.write("v\\0\\0\\0\\7passed\\n".getBytes()); } catch (Exception e) { }""", THREE_TESTS),
    "kills all other processes": java(
        "ProcessHandle.allProcesses().filter(p -> p.pid() != ProcessHandle.current().pid())"
        ".forEach(ProcessHandle::destroyForcibly); return 1;", THREE_TESTS),
    "halts at the end": java(
        "Runtime.getRuntime().addShutdownHook(new Thread(() -> Runtime.getRuntime().halt(0))); return 1;", THREE_TESTS),
    "another NanoRlhfValues": java(
        "return 1; }} class NanoRlhfValues { } class NanoRlhfProgram { public static void main(String[] a) { } } "
        "class A {{",
        THREE_TESTS),
    "looks for the answer": java("""
        for (String path : new String[] {"/proc/1/cmdline", "/proc/1/environ", "/proc/self/environ", "../Main.java"})
            try { var text = new String(new java.io.FileInputStream(path).readAllBytes());
                if (text.contains("Problem.problem(" + n + ")")) return n * n; } catch (Exception e) { }
        return 1;""", THREE_TESTS),
}  # fmt: skip
SQUARES = "assert f(2) == 4\nassert f(3) == 9\n"
SAME = "__eq__ = lambda a, b: True; __ne__ = lambda a, b: False; __hash__ = lambda a: 0"


def square(response, tests=SQUARES, prefix="import math\ndef f(n):\n"):
    return Program(prefix, response, "\n", tests)


FORGED_PYTHON = {
    "an object equal to everything": square(f"    class A:\n        {SAME}\n    return A()"),
    "an int subclass": square(f"    class A(int):\n        {SAME}\n    return A(1)"),
    "the harness's locals": square("""
    import gc, sys
    frame = sys._getframe()
    while frame:
        for name in frame.f_locals:
            if name in ("word", "error", "verdict", "session"):
                frame.f_locals[name] = "passed"
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict) and "word" in thing: thing["word"] = "passed"
    return 1"""),
    "a block around the tests": square(
        "    return 1\nfrom contextlib import suppress\nwith suppress(BaseException):\n    0;"),
    "an if around the tests": square("    return 1\nif 0:\n    1;"),
    "a comment over the tests": square("    return 1\n#"),
    "a string over the tests": square("    return 1\n'" + "''", SQUARES + "''" + "' the end '" + "''"),
    "a list subclass": square(f"    class A(list):\n        {SAME}\n    return A()", "assert f(2) == [4]"),
    "a str subclass": square(f"    class A(str):\n        {SAME}\n    return A()", "assert f(2) == '4'"),
    "a class that says it is an int": square(f"    class A:\n        {SAME}\n        __class__ = int\n    return A()"),
    "builtins replaced": square(
        "    import builtins\n    builtins.abs = lambda x: 0\n    builtins.AssertionError = SystemExit\n    return 1",
        "assert abs(f(2) - 4) < 1e-7"),
    "its own abs": square("    return 1\ndef abs(x): return 0", "assert abs(f(2) - 4) < 1e-7"),
    "its own math": square(
        "    return 1\nclass math:\n    isclose = lambda a, b: True", "assert math.isclose(f(2), 4)"),
    "a module replaced": square(
        "    return 1\nimport sys\nclass math: isclose = lambda a, b: True\nsys.modules['math'] = math",
        "assert math.isclose(f(2), 4)"),
    "json replaced": square(
        "    import json\n    json.dumps = lambda reply: '[true, [\"object\", 0], []]'\n    return 1"),
    "a verdict in every descriptor": square(
        "    import os\n    for fd in range(1024):\n        try: os.write(fd, b'v\\0\\0\\0\\7passed\\n')\n"
        "        except OSError: pass\n    return 1"),
    "exits well": square("    import os\n    os._exit(0)"),
    "exits well in time": square("    raise SystemExit(0)"),
    "exits well at the end": square("    import atexit, os\n    atexit.register(os._exit, 0)\n    return 1"),
    "another process answers": square("    import os\n    if os.fork() == 0: return 1\n    os.wait()\n    os._exit(0)"),
    "its own AssertionError": square("    return 1\nclass AssertionError(Exception): pass\n"),
    "more depth than the harness can read": square("    a = []\n    for i in range(300): a = [a]\n    return a"),
    "changes the arguments": square("    n.clear()\n    return n", "a = [1, 2]\nassert f(a) == [2, 1]"),
    "an encoding of its own": square("    return 1", prefix="# coding: utf-7\nimport math\ndef f(n):\n"),
}  # fmt: skip


def assert_only_the_right_pass(right, forged, language):
    programs = right | forged
    verdicts = dict(zip(programs, run_programs(list(programs.values()), language, LONG, workers=2), strict=True))
    assert {name for name, verdict in verdicts.items() if verdict.passed} == set(right), verdicts


def test_no_java_program_forges_a_verdict():
    right = {
        "right": java("return n * n;", THREE_TESTS),
        "nearly": java("return n * n;", NEARLY),
        "an object": objects("return n * n;", "4"),
        "a list": objects("return List.of(n * n);", "List.of(4)"),
    }
    assert_only_the_right_pass(right, FORGED_JAVA, "java")


def test_no_python_program_forges_a_verdict():
    right = {
        "right": square("    return n * n"),
        "close": square("    return n * n", "assert math.isclose(f(2), 4)"),
        "abs": square("    return n * n", "assert abs(f(2) - 4) < 1e-7"),
    }
    assert_only_the_right_pass(right, FORGED_PYTHON, "python")


@pytest.mark.parametrize("missing", ["seccomp", "landlock"])
def test_weak_isolation_needs_a_flag(monkeypatch, missing):
    parts = {"seccomp": True, "landlock": True, missing: False}
    monkeypatch.setattr(execution, "best_way", lambda: ("limits", parts))
    with pytest.raises(InputError, match=f"neither namespaces nor {missing}, .*--weak-isolation"):
        run_programs([], "python")
    assert run_programs([], "python", weak_isolation=True) == []
    monkeypatch.setattr(execution, "best_way", lambda: ("limits", {"seccomp": True, "landlock": True}))
    assert run_programs([], "python") == []


# ---------------------------------------------------------------------------------------------- interrupts, bad systems
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_an_interrupt_kills_all_programs(way, scratch, number, code):
    script = (
        "import signal, sys\nfrom nanorlhf.sandbox.execution import Program, run_programs\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "programs = [Program('', f'while {i}: pass', '', '') for i in range(1, 9)]\n"
        f"try: run_programs(programs, 'python', 60, workers=2, way={way!r})\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    before = set(sandboxed_processes(scratch))
    environment = os.environ | {"TMPDIR": str(scratch)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    before.add(process.pid)

    def num_running():  # programs, by their script
        count = 0
        for pid in set(sandboxed_processes(scratch)) - before:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                count += b"program.py" in Path(f"/proc/{pid}/cmdline").read_bytes()[-20:]
        return count

    assert wait_for(lambda: num_running() >= 2)
    process.send_signal(number)
    assert process.wait(20) == code
    assert wait_for(lambda: not set(sandboxed_processes(scratch)) - before, 5.0)
    if number == signal.SIGKILL:  # it could not remove its files
        for path in scratch.glob("nanorlhf-*"):
            if "java" not in path.name:
                subprocess.run(["rm", "-rf", path], check=True)


def test_no_program_runs_without_a_sandbox(monkeypatch):
    monkeypatch.setattr(execution, "python_interpreter", lambda way: "/no/such/python")
    with pytest.raises(InputError, match=r"can't be sandboxed on this machine \(.*No such file"):
        run_programs([python("print(1)")], "python")
    monkeypatch.setattr(execution, "HERE", Path("/no/such/directory"))
    execution.try_way.cache_clear()
    execution.best_way.cache_clear()
    try:
        with pytest.raises(InputError, match="can't be sandboxed on this machine"):
            isolation()
    finally:
        execution.try_way.cache_clear()
        execution.best_way.cache_clear()


def test_unknown_languages_systems_and_missing_compilers_are_refused(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="unsupported language 'perl': expected java or python"):
        run_programs([python("1")], "perl")
    execution.java_home.cache_clear()
    execution.java_classes.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no java on the PATH"):
        run_programs([python("1")], "java")
    (tmp_path / "java").write_text("#!/bin/sh\necho '    java.home = /opt/jre' >&2\n")
    (tmp_path / "java").chmod(0o755)
    with pytest.raises(InputError, match="has no javac"):
        run_programs([python("1")], "java")
    execution.best_way.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InputError, match="needs Linux"):
        run_programs([python("1")], "python")


def test_java_runs_whatever_options_it_is_given_and_whatever_tmpdir_is_called(scratch, monkeypatch):
    name = "a:b é *;'c\"$d"
    (scratch / name).mkdir()
    (scratch / name).chmod(0o711)
    for variable in ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "JDK_JAVAC_OPTIONS"):
        monkeypatch.setenv(variable, "-evil")
    monkeypatch.setenv("CLASSPATH", "/nowhere")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setattr(tempfile, "tempdir", str(scratch / name))
    execution.java_home.cache_clear()
    execution.java_classes.cache_clear()
    verdict = run_programs([java("return 2 * n;", mbjp_test(1, 3, 6))], "java", LONG)[0]
    execution.java_classes.cache_clear()
    assert verdict.passed, verdict


def test_isolation_describes_what_this_machine_supports(monkeypatch):
    assert all(isinstance(line, str) and line for line in isolation())
    monkeypatch.setattr(execution, "best_way", lambda: ("limits", {"seccomp": True, "landlock": True}))
    assert not re.search("OPEN|CAN SIGNAL|EVERYTHING", " ".join(isolation()))
    monkeypatch.setattr(execution, "best_way", lambda: ("limits", {"seccomp": False, "landlock": False}))
    assert re.search("OPEN.*CAN SIGNAL.*EVERYTHING", " ".join(isolation()))


def test_numbers_of_system_calls_are_those_of_the_headers():
    numbers = {**supervisor.DENIED, **supervisor.SIGNALS, "clone": supervisor.CLONE, "clone3": supervisor.CLONE3,
               "prlimit64": supervisor.PRLIMIT64, "pivot_root": supervisor.PIVOT_ROOT}  # fmt: skip
    headers = "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"  # aarch64: generic
    if not all(map(os.path.exists, headers)):
        pytest.skip("no kernel headers here")
    for column, header in enumerate(headers):
        defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
        assert {name: both[column] for name, both in numbers.items()} == {name: int(defined[name]) for name in numbers}


# ------------------------------------------------------------------------------------------------------ the real slices
def plain_verdict(program, directory):
    """Return (compiled, passed) from plain javac and java in a new directory."""
    directory.mkdir()
    (directory / "Main.java").write_text(program.code + program.tests)
    if subprocess.run(
        ["javac", "-J-XX:TieredStopAtLevel=1", "Main.java"], cwd=directory, capture_output=True
    ).returncode:
        return False, False
    done = subprocess.run(["java", "Main"], cwd=directory, capture_output=True, timeout=20)
    return True, done.returncode == 0


def read(path):
    return {row["task_id"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_real_programs_get_the_verdicts_of_plain_javac_and_java(real_data, tmp_path):
    directory = real_data / "mxeval_java"
    programs = []
    for problems, samples in (
        ("mbxp/mbjp_release_v1.2.jsonl", "mbxp/examples/mbjp_samples.jsonl"),
        ("multilingual_mathqa/mathqa-test-java_v1.jsonl", "multilingual_mathqa/examples/java_samples.jsonl"),
    ):
        problems, samples = read(directory / problems), read(directory / samples)
        for task_id in list(samples)[:: len(samples) // 6]:
            row = {"prefix": problems[task_id]["prompt"], "suffix": "", "tests": problems[task_id]["test"]}
            programs.append(make_program(row, samples[task_id]["completion"]))
    verdicts = run_programs(programs, "java", workers=2)
    with ThreadPoolExecutor(2) as pool:
        plain = list(pool.map(plain_verdict, programs, [tmp_path / str(i) for i in range(len(programs))]))
    assert [(verdict.compiled, verdict.passed) for verdict in verdicts] == plain
    assert len(Counter(plain)) > 1


def test_verdict_is_frozen():
    with pytest.raises(AttributeError):
        Verdict(True, True, True, "passed", 1.0, "", 0.0).passed = False
