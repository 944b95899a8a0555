"""Run generated programs in a sandbox and their tests in another, and return a verdict on each program.

    run_programs([...], "java") -> [Verdict(compiled=True, executed=True, passed=False, reason="wrong_answer"), ...]

Java tests are a class Main, Python tests a script. supervisor.py limits what programs may do; `isolation()` describes
which limits this machine supports, for callers to print. [RLCF evaluation]

    reason          compiled executed passed
    passed             x        x       x    all tests ran, and the process exited with status 0
    wrong_answer       x        x            all tests ran, and at least one reported a wrong answer
    exception          x                     the program threw, or a test threw for a reason other than a wrong answer
    exit               x                     the process exited before the tests ended, or with a status other than 0
    signal             x                     it crashed or was killed: a segmentation fault, a limit of the system
    timeout            x                     wall-clock or CPU time; also threads still running after the tests
    memory             x                     Java's heap, Python's data, or all of its processes together
    output             x                     more than OUTPUT bytes on stdout and stderr, or VALUE in an answer; also an
                                             answer without a call
    disk               x                     more than DISK bytes of files (an exception if the home is in memory)
    compile_error                            rejected by javac or Python's compile()
    compile_limit                            the compiler ran out of time or memory, or crashed

A program passes only if it passes two runs.

Guarded run: the program runs in one process and the tests in another, each in its own sandbox, and this process passes
calls between them. A function's name and arguments go to the program, a value comes back, and the tests compare values
that they built themselves. The program never sees the tests' source or expected answers, and whatever it writes to its
pipe is treated as an answer. It is compiled separately, so it can't enclose, comment out or redefine a test.

Plain run: afterwards the program is loaded again and its tests run in its own interpreter, as the benchmark means them.
There, answers are not translated, so a wrong program fails even if its error is in a type, an object's identity, a
comparator or an overload. The program could fake this run, because it shares the process with the tests; that only
helps a program whose answers are equal to the right ones as values.

In the guarded run the tests use the prompt's definitions, not the program's: we parse the helpers, constants, classes
and imports of the prefix and suffix, and run them in the tests' process. From the program we request only what the
response completes, a function or a method. If the response isn't part of a definition in the prompt, it defines the
names itself, but not helpers that judge its answers. If the prompt is already complete, its last definition is
requested; tests that never call the program don't pass. The tests don't see a program's changes to the prompt's
globals, class attributes and static fields. Names defined by Python or the JDK are never taken from a program.

Answers are values: numbers, strings, arrays, collections and dates of the standard library, and objects of classes that
the prompt defines. No other object is accepted, whatever it claims to be equal to or to contain, except functions,
which may be called, and in Python iterators and objects of a class under test, which are equal if their attributes are.
The program may call functions that the tests pass. Tests can't subclass the program's classes, nor use a coroutine or
an object of any other class of the response: there a correct program fails.

What remains: a program that knows the tests from elsewhere can answer without solving the problem, and tests may accept
too much, such as a search through an infinite iterator, or a returned function that always returns True. NaN is within
every tolerance that is written `if abs(x - y) > eps`, here as in plain Python and Java. A program that ends its process
before the tests end fails even if its answers are right: System.exit(0) looks the same as a faked success.

Wrong answers: the tests of MBJP, MathQA and HumanEval all throw the same exception. It would skip the remaining tests
and hide a later crash, so in Java we replace that throw by a call that records the failure and continues; `passed` is
the same either way. In other Java tests a wrong answer is a java.lang.Exception or AssertionError, not a subclass,
created in class Main and ending main. In Python it is an AssertionError raised by the tests; the next assertion runs in
any case, except in try blocks and classes. Any other exception is a crash.
"""

import atexit
import functools
import glob
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from nanorlhf.errors import InputError
from nanorlhf.sandbox.java import java_environment, java_home
from nanorlhf.sandbox.python_harness import read_exactly, send

HERE = Path(__file__).resolve().parent
MIB = 2**20
OUTPUT, DISK = MIB, 64 * MIB
TAIL = 2000  # characters of output kept in a verdict
NUM_TASKS = 128  # processes and threads; a JVM has about 15
JVM_OVERHEAD = 512  # MiB of a JVM outside its heap
HARNESS_MIB = 512  # heap of the process that compiles and tests
COMPILE_SECONDS = 30.0
TEST_SECONDS = 10.0  # for the tests after the program's time limit
VALUE = 16 * MIB  # largest answer of a program, in bytes
REASONS = ("passed", "wrong_answer", "exception", "memory", "exit")
# throw new java.lang.Exception("Exception -- test case 0 did not pass. x0 = " + x0);
TEST_THROW = re.compile(r'throw new java\.lang\.Exception\((?="Exception -- test case \d+ did not pass)')
JVM = (
    "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-XX:-UsePerfData", "-XX:-CreateCoredumpOnCrash",
    "-XX:ActiveProcessorCount=2",  # on a large machine, one thread per core would exceed NUM_TASKS
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """A program and its tests. Only the response is generated."""

    prefix: str
    response: str
    suffix: str
    tests: str

    @property
    def code(self) -> str:
        """Join the parts without separators: some prompts end in the middle of a line."""
        return self.prefix + self.response + self.suffix


@dataclass(frozen=True)
class Verdict:
    compiled: bool
    executed: bool  # compiled, and all tests ran without a crash or timeout: exec@k
    passed: bool  # executed, and every answer was correct: pass@k
    reason: str  # from the table above
    share: float  # of the tests that passed: assertions in Python, throws in Java; 1 only if `passed`
    output: str  # the last characters printed by the program or its compiler
    seconds: float  # wall-clock time of the run, 0 if it did not compile


@dataclass
class Worker:
    """The state of a thread that runs programs."""

    number: int
    box: Path  # the worker's directory
    way: str  # of supervisor.py
    running: set[subprocess.Popen]  # shared by all workers
    stopped: threading.Event  # shared by all workers: start no more programs
    watcher: ThreadPoolExecutor  # its only thread reads the running program's output
    harness: tuple[subprocess.Popen, int] | None = None  # compiles and tests programs one by one; and its status pipe


def make_program(row: dict, response: str) -> Program:
    """Return the program of a row of code.jsonl and a response."""
    return Program(row["prefix"], response, row["suffix"], row["tests"])


# --------------------------------------------------------------------------------------------------- 1. many programs
def run_programs(
    programs: Sequence[Program],
    language: str,
    timeout: float = 10.0,
    workers: int = 1,
    memory_mib: int = 512,
    way: str | None = None,
    weak_isolation: bool = False,
) -> list[Verdict]:
    """Return a verdict on each program, in order; equal programs run once.

    timeout     seconds of wall-clock time per run, not counting the compiler
    workers     programs to run at a time
    memory_mib  Java's heap, or all memory of a Python program
    way         of supervisor.py: "namespaces" or "limits"; None: the better one that works on this machine
    weak_isolation  run programs even if the system can't restrict their files or network

    Raises InputError if programs can't be sandboxed or run on this machine. An interrupt kills all of them.
    """
    if language not in ("java", "python"):
        raise InputError(f"unsupported language {language!r}: expected java or python.")
    if way is None:
        way, supported = best_way()
        if way == "limits" and not all(supported.values()) and not weak_isolation:
            missing = " nor ".join(name for name, works in supported.items() if not works)
            raise InputError(
                f"this system has neither namespaces nor {missing}, so programs could read this user's files or open "
                "connections: use another system, or pass --weak-isolation to run them anyway."
            )
    if language == "java":  # fill the caches before starting threads
        java_classes()
        command = f"{java_home()}/bin/java", *JVM, "-Xmx64m", "-version"
        if problem := try_way(way, command, java_files())[1]:  # otherwise every program would seem to fail
            raise InputError(f"programs can't run {command[0]} ({problem}): install a JDK below /usr.")
    else:
        python_interpreter(way)
    run_one = functools.partial(run_java if language == "java" else run_python, timeout, memory_mib)
    running: set[subprocess.Popen] = set()
    stopped = threading.Event()
    verdicts: dict[Program, Verdict] = {}
    with temporary_directory() as box:
        crew = [
            Worker(number, box / str(number), way, running, stopped, ThreadPoolExecutor(1)) for number in range(workers)
        ]
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in crew:
            make_directory(worker.box)
            make_directory(worker.box / "classes")
            idle.put(worker)

        def task(program: Program) -> Verdict:
            worker = idle.get()
            try:
                return run_one(worker, program)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(workers)
        try:
            futures = {pool.submit(task, program): program for program in dict.fromkeys(programs)}
            ended = as_completed(futures)
            for future in tqdm(ended, desc=f"{language} programs", total=len(futures), disable=None, leave=False):
                verdicts[futures[future]] = future.result()
        finally:
            stopped.set()
            for process in list(running):
                process.terminate()
            pool.shutdown(cancel_futures=True)
            for worker in crew:
                stop_harness(worker)
                worker.watcher.shutdown()
    return [verdicts[program] for program in programs]


# ---------------------------------------------------------------------------------------------------- 2. one program
def run_java(timeout: float, memory_mib: int, worker: Worker, program: Program) -> Verdict:
    uid = user_id(worker, harness=True)
    with temporary_directory(worker.box) as box, temporary_directory(worker.box / "classes", uid) as classes:
        tests = run_all_tests(program.tests)
        if rejected := prepare(worker, "java", str(classes), program, tests):
            return rejected
        launcher = java_classes()
        command = [
            f"{java_home()}/bin/java", *JVM, f"-Xmx{memory_mib}m", f"-XX:MaxDirectMemorySize={memory_mib}m",
            f"-Duser.home={box}/home", f"-Djava.io.tmpdir={box}/home", "-cp", class_path(box, launcher, classes),
            "NanoRlhfProgram", "/proc/self/fd/{calls}", "/proc/self/fd/{replies}",
        ]  # fmt: skip
        readonly: list[str | Path] = [*java_files(), launcher, classes]
        return run_tests(worker, box, command, timeout, memory_mib + JVM_OVERHEAD, readonly, None)


def class_path(box: Path, *directories: Path) -> str:
    """Return a class path relative to the sandbox's home: absolute paths may contain a colon."""
    return ":".join(os.path.relpath(directory, box / "home") for directory in directories)


def run_python(timeout: float, memory_mib: int, worker: Worker, program: Program) -> Verdict:
    if rejected := prepare(worker, "python", "", program, program.tests):
        return rejected
    with temporary_directory(worker.box) as box:
        script = box / "program.py"
        script.write_bytes(program.code.encode(errors="replace"))
        command = [*python_command(worker), "program", "{calls}", "{replies}", str(script)]
        readonly = (sys.base_prefix, script)
        return run_tests(worker, box, command, timeout, memory_mib, readonly, program.tests)


def run_all_tests(tests: str) -> str:
    """Replace each throw for a wrong answer by a call that records it."""
    return TEST_THROW.sub("NanoRlhfTests.fail(", tests)


def run_tests(
    worker: Worker,
    box: Path,
    command: Sequence[str],
    timeout: float,
    memory_mib: int,
    readonly: Sequence[Path | str],
    source: str | None,
) -> Verdict:
    """Start a program and run its tests guarded, in the worker's harness, then plainly, in the program's sandbox.

    {calls} and {replies} in the command become the descriptors of two pipes. source: the tests of a Python program,
    which itself reports that it compiles, and then that its top level has run. For Java (None) the harness compiles the
    program, and the tests for both runs.
    """
    calls_fd, calls = os.pipe()
    replies, replies_fd = os.pipe()
    argv = [part.replace("{calls}", str(calls_fd)).replace("{replies}", str(replies_fd)) for part in command]
    began = time.monotonic()
    try:
        started = start(worker, box, argv, 2 * timeout, memory_mib, readonly, pipes=(calls_fd, replies_fd))
    except BaseException:
        os.close(calls)
        os.close(replies)
        raise
    finally:
        os.close(calls_fd)
        os.close(replies_fd)
    assert worker.harness is not None
    harness = worker.harness[0]
    ending = worker.watcher.submit(finish, worker, *started)
    loads = source is not None
    outcome, share, printed, compiled, loaded, is_plain = "", 0.0, "", not loads, not loads, False
    try:
        try:
            if loads:
                outcome = receive(replies, began + timeout).decode(errors="replace")
                compiled = outcome == "compiled"
                outcome = receive(replies, began + timeout).decode(errors="replace") if compiled else outcome
                loaded = outcome == "loaded"
            if loaded:
                outcome, share, printed, classes = converse(worker, calls, replies, began + timeout)
                if is_plain := outcome == "passed":
                    tests = classes if source is None else source.encode(errors="replace")
                    outcome = run_plainly(calls, replies, tests, timeout)
        except TimeoutError:
            outcome = "timeout"
        except (BrokenPipeError, EOFError, ValueError):  # it ended, or wrote an invalid message
            outcome = "ended"
        finally:
            if loads and not loaded:
                try:
                    tell(harness, b"none")  # there is no program to test
                except BrokenPipeError:
                    stop_harness(worker)
            os.close(calls)  # makes the program end
            if outcome in ("timeout", "output"):
                started[0].terminate()
        limit, status, output = ending.result()
        if outcome == "passed" and select.select([replies], [], [], 0)[0] and os.read(replies, 1):
            outcome = "output"  # an extra answer: it may have replaced another one
    finally:
        os.close(replies)
    seconds = time.monotonic() - began
    check_setup(limit)
    output = (output + printed)[-TAIL:]
    if not compiled:
        reason = "compile_error" if outcome == "compile_error" else "compile_limit"
        return Verdict(False, False, False, reason, 0.0, output, 0.0)
    if outcome in ("timeout", "output"):
        reason = outcome
    elif limit:
        reason = limit
    elif outcome in REASONS and not (outcome == "passed" and status != 0):
        reason = outcome
    elif status == 128 + signal.SIGXCPU:
        reason = "timeout"
    else:
        reason = "signal" if status > 128 else "exit"
    passed = reason == "passed"
    share = float(passed) if is_plain else share
    return Verdict(True, passed or reason == "wrong_answer", passed, reason, share, output, seconds)


def run_plainly(calls: int, replies: int, tests: bytes, timeout: float) -> str:
    """Run the tests in the program's sandbox, in its interpreter, where answers keep their types and identity; return
    the program's own report.
    """
    if select.select([replies], [], [], 0)[0]:
        return "output"  # an extra answer: it may have replaced another one
    send(calls, tests, kind=struct.pack(">i", 0))  # after an empty message: the guarded run has ended
    word = receive(replies, time.monotonic() + timeout).decode(errors="replace")
    return word if word in REASONS else "output"


def converse(worker: Worker, calls: int, replies: int, deadline: float) -> tuple[str, float, str, bytes]:
    """Pass calls and replies between harness and program; return the verdict, the share of tests that passed, what they
    printed, and for Java their classes for the plain run.
    """
    assert worker.harness is not None
    harness, outcome, classes = worker.harness[0], "", b""
    try:
        tell(harness, b"")
        while True:
            kind, content = hear(harness, deadline + TEST_SECONDS)
            if kind == b"p":
                classes = content
                continue
            if kind == b"v":
                words, _, printed = content.decode(errors="replace").partition("\n")
                verdict, share = words.split()
                break
            reply = b""
            try:
                if not outcome:
                    send(calls, content)
                    reply = receive(replies, deadline)
            except TimeoutError:
                outcome = "timeout"
            except (BrokenPipeError, EOFError):
                outcome = "ended"
            except ValueError:
                outcome = "output"
            tell(harness, reply)
    except TimeoutError:
        stop_harness(worker)
        return "timeout", 0.0, "the tests did not end", b""
    except (EOFError, BrokenPipeError):  # the tests ended their process
        return {"memory": "memory"}.get(stop_harness(worker), "ended"), 0.0, "", b""
    if verdict == "died":
        stop_harness(worker)
    return outcome or verdict, float(share), printed, classes


# --------------------------------------------------------------------------------------------------- 3. the sandbox
def start(
    worker: Worker,
    box: Path,
    argv: Sequence[str] | None,
    seconds: float | None,
    memory_mib: int,
    readonly: Sequence[Path | str] = (),
    writable: Sequence[Path] = (),
    pipes: Sequence[int] = (),
    stdin: int = subprocess.DEVNULL,
    stderr: int = subprocess.STDOUT,
    uid: int | None = None,
) -> tuple[subprocess.Popen, int]:
    """Start a command in a sandbox with its home in `box`.

    Returns the supervisor, and the pipe on which it reports an exceeded limit. The command inherits the supervisor's
    stdin and stdout. On SIGTERM the supervisor kills the command and every process that it started.
    """
    for name in ("home", "root"):
        make_directory(box / name)
    status, status_fd = os.pipe()
    config = {
        "way": worker.way, "argv": argv, "home": f"{box}/home", "root": f"{box}/root", "uid": uid or user_id(worker),
        "readonly": list(map(str, readonly)), "writable": list(map(str, writable)), "pipes": list(pipes),
        "status_fd": status_fd, "parent": os.getpid(), "seconds": seconds,
        "cpu_seconds": None if seconds is None else int(2 * seconds) + 1,  # per process: enough for two busy threads
        "memory_bytes": memory_mib * MIB, "disk_bytes": DISK, "num_tasks": NUM_TASKS,
        "environment": {"PATH": "/usr/bin:/bin", "HOME": f"{box}/home", "TMPDIR": f"{box}/home", "LANG": "C.UTF-8"},
    }  # fmt: skip
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "supervisor.py"), json.dumps(config)],
            stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, pass_fds=(status_fd, *pipes),
            start_new_session=True, bufsize=0, env={},
        )  # fmt: skip
    finally:
        os.close(status_fd)
    worker.running.add(process)
    if worker.stopped.is_set():
        process.terminate()
    return process, status


def finish(worker: Worker, process: subprocess.Popen, status: int) -> tuple[str, int, str]:
    """Wait for a command; return the limit it exceeded or "", its exit status (or 128 + signal), its last output.

    If the sandbox could not be set up, the limit is "setup: " and the reason, and the command has not run.
    """
    assert process.stdout is not None
    stdout, num_bytes, tail = process.stdout.fileno(), 0, b""
    while True:
        if select.select([stdout], [], [], 1.0)[0]:
            chunk = os.read(stdout, 65536)
            if not chunk:
                break
            num_bytes, tail = num_bytes + len(chunk), (tail + chunk)[-4 * TAIL :]
            if num_bytes > OUTPUT:
                process.terminate()
        elif process.poll() is not None:  # ended, but a process that it started keeps the pipe open
            break
    code = process.wait()
    process.stdout.close()
    worker.running.discard(process)
    os.set_blocking(status, False)
    with os.fdopen(status, "rb", buffering=0) as pipe:
        limit = (pipe.read(2**16) or b"").decode(errors="replace")
    limit = "output" if num_bytes > OUTPUT else limit
    return limit, code if code >= 0 else 128 - code, tail.decode(errors="replace")[-TAIL:]


def check_setup(limit: str) -> None:
    """Raise InputError if the sandbox could not be set up, which says nothing about the program."""
    if limit.startswith("setup: "):
        problem = limit.removeprefix("setup: ")
        raise InputError(f"programs can't be sandboxed on this machine ({problem}), so none was run.")


def user_id(worker: Worker, harness: bool = False) -> int | None:
    """Return an unprivileged user for root to run programs as: a different one per worker and process, or harness.

    The ids are from systemd's range for such users. We don't use nobody (65534), because the limits would count other
    programs' processes.
    """
    number = worker.number + 64 * harness
    return 61184 + (os.getpid() * 128 + number) % 4096 if os.getuid() == 0 else None


def make_directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o711)  # the unprivileged users may enter it


@contextmanager
def temporary_directory(parent: Path | None = None, uid: int | None = None) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="nanorlhf-", dir=parent))
    path.chmod(0o711)
    if uid is not None:
        os.chown(path, uid, uid)
    try:
        yield path
    finally:
        # a program may leave directories too deep for shutil.rmtree, or without read permission
        if subprocess.run(["/bin/rm", "-rf", path], stderr=subprocess.DEVNULL).returncode:
            subprocess.run(["/bin/chmod", "-R", "u+rwX", path], stderr=subprocess.DEVNULL)
            subprocess.run(["/bin/rm", "-rf", path], check=True)


# ---------------------------------------------------------------------------------------- 4. compilers, interpreters
def prepare(worker: Worker, language: str, directory: str, program: Program, tests: str) -> Verdict | None:
    """Compile the tests in the harness, and a Java program to a directory; return a verdict if they don't compile.

    Each worker keeps one harness in a separate sandbox, because a cold start of javac takes ten times as long.
    """
    if worker.harness is None:
        start_harness(worker, language)
    assert worker.harness is not None
    process = worker.harness[0]
    reason = "compile_limit"
    try:
        deadline = time.monotonic() + COMPILE_SECONDS
        tell(process, os.fsencode(directory))
        for text in (program.prefix, program.response, program.suffix, tests):
            tell(process, text.encode(errors="replace"))
        messages = hear(process, deadline)[1].decode(errors="replace")
        reason = "compile_error"
    except TimeoutError:
        stop_harness(worker)
        messages = f"the compiler did not answer within {COMPILE_SECONDS:g} s"
    except (EOFError, BrokenPipeError):
        messages = f"the compiler crashed {stop_harness(worker)}"
    return Verdict(False, False, False, reason, 0.0, messages[:TAIL], 0.0) if messages else None


def start_harness(worker: Worker, language: str) -> None:
    box = worker.box / "harness"
    make_directory(box)
    if language == "java":
        command = [f"{java_home()}/bin/java", *JVM, f"-Xmx{HARNESS_MIB}m", "-Xss8m", "-cp"]
        command.append(class_path(box, java_classes()))
        command += ["NanoRlhfHarness", str(java_classes())]
        readonly: tuple[Path | str, ...] = (*java_files(), java_classes())
    else:
        command, readonly = [*python_command(worker), "harness"], (sys.base_prefix,)
    worker.harness = start(
        worker, box, command, seconds=None, memory_mib=HARNESS_MIB + JVM_OVERHEAD, readonly=readonly,
        writable=(worker.box / "classes",), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        uid=user_id(worker, harness=True),
    )  # fmt: skip


def python_command(worker: Worker) -> list[str]:
    """Return the command with the harness's source inline: a program may not read this package's directory."""
    source = (Path(__file__).parent / "python_harness.py").read_text(encoding="utf-8")
    return [python_interpreter(worker.way), "-I", "-B", "-X", "utf8", "-c", source]


def tell(process: subprocess.Popen, content: bytes) -> None:
    assert process.stdin is not None
    send(process.stdin.fileno(), content)


def hear(process: subprocess.Popen, deadline: float) -> tuple[bytes, bytes]:
    """Read a message of the harness; return its kind and content."""
    assert process.stdout is not None
    stdout = process.stdout.fileno()
    kind, length = struct.unpack(">ci", read_exactly(stdout, 5, deadline))
    return kind, read_exactly(stdout, length, deadline)


def receive(fd: int, deadline: float) -> bytes:
    """Read a message of the program. Raises EOFError if it ended, TimeoutError at the deadline, and ValueError if the
    message is too long.
    """
    (size,) = struct.unpack(">i", read_exactly(fd, 4, deadline))
    if not 0 <= size <= VALUE:
        raise ValueError(f"a value of {size} bytes")
    return read_exactly(fd, size, deadline)


def stop_harness(worker: Worker) -> str:
    """Stop the worker's harness; return the limit that had already ended it, or ""."""
    if worker.harness is None:
        return ""
    process, status = worker.harness
    worker.harness = None
    process.terminate()
    assert process.stdin is not None
    process.stdin.close()
    limit = finish(worker, process, status)[0]
    check_setup(limit)
    subprocess.run(["/bin/rm", "-rf", worker.box / "harness"], check=True)
    return "" if limit == "stopped" else limit


def java_files() -> tuple[str, ...]:
    return java_home(), *glob.glob("/etc/java*")  # Debian's path for the JDK's settings


@functools.cache
def java_classes() -> Path:
    """Compile the two processes to a directory, which is removed at exit."""
    directory = Path(tempfile.mkdtemp(prefix="nanorlhf-java-"))
    atexit.register(shutil.rmtree, directory)
    directory.chmod(0o755)
    # javac warns of sun.reflect otherwise; and concatenation by a method handle takes 20 ms to start
    options = ("-XDignore.symbol.file", "-XDstringConcat=inline", "-d", directory)
    sources = (HERE / "harness.java", HERE / "values.java", HERE / "NanoRlhfTests.java")
    subprocess.run([f"{java_home()}/bin/javac", *options, *sources], check=True, env=java_environment())
    return directory


@functools.cache
def python_interpreter(way: str) -> str:
    """Return this Python, outside its virtual environment, or the system's if programs can't read it (in /root)."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        if not try_way(way, (python, "-I", "-c", ""), (sys.base_prefix,))[1]:
            return python
    raise InputError(f"programs can't run {sys.executable}, nor the system's python3: install one below /usr.")


# ------------------------------------------------------------------------------------------ 5. what a system supports
def isolation() -> list[str]:
    """Describe what programs can and can't do on this machine, in lines to print before running any."""
    way, supported = best_way()
    if way == "namespaces":
        return [
            "processes: one PID namespace per program, killed with every process in it",
            "network: none",
            "files: the system's, read-only, and an empty home in memory",
            "system calls: " + ("filtered" if supported["seccomp"] else "NOT FILTERED, this system has no seccomp"),
        ]
    user = "users without privileges" if os.getuid() == 0 else "the current user"
    lines = [
        f"namespaces: not available ({try_way('namespaces')[1]})",
        f"processes: run as {user}, see all others, and are killed along with every process they start",
        "network: none, and no signals to other processes",
        "files: the system's, and an empty home",
    ]
    if not supported["seccomp"]:
        lines[2] = "network: OPEN, and they CAN SIGNAL other processes of that user, this system has no seccomp"
    if not supported["landlock"]:
        lines[3] = "files: EVERYTHING THAT USER MAY READ AND WRITE, this system has no Landlock"
    return lines


@functools.cache
def best_way() -> tuple[str, dict[str, bool]]:
    """Return the first of supervisor.py's two ways that works on this machine, and which of its parts work."""
    if not sys.platform.startswith("linux"):
        raise InputError("running generated programs needs Linux: the sandbox doesn't work on other systems.")
    for way in ("namespaces", "limits"):
        supported, problem = try_way(way)
        if not problem:
            return way, supported
    raise InputError(f"programs can't be sandboxed on this machine ({problem}), so none was run.")


@functools.cache
def try_way(
    way: str, argv: tuple[str, ...] | None = None, readonly: tuple[str, ...] = ()
) -> tuple[dict[str, bool], str]:
    """Try a sandbox, with or without a command; return which parts work ({} with a command), and the problem or ""."""
    with temporary_directory() as box:
        worker = Worker(0, box, way, set(), threading.Event(), ThreadPoolExecutor(1))
        started = start(worker, box, argv, seconds=30.0, memory_mib=1024, readonly=readonly)
        limit, code, output = finish(worker, *started)
    if limit or code:
        return {}, limit.removeprefix("setup: ") or f"status {code}: {output}"
    return ({} if argv else json.loads(output)), ""
