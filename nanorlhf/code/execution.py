"""Runs generated programs with their tests in a sandbox, and returns a verdict on each.

    run_programs([...], "java") -> [Verdict(compiled=True, executed=True, passed=False, reason="wrong_answer"), ...]

A program is one text, tests included: Java with a class Main, or a Python script. sandbox.py says what it may do;
`isolation()` describes how much of that this machine supports, for callers to print. [RLCF evaluation]

    reason          compiled executed passed
    passed             x        x       x    all tests ran, and the process exited with status 0
    wrong_answer       x        x            all tests ran, and at least one reported a wrong answer
    exception          x                     the program threw, or a test threw for another reason than a wrong answer
    exit               x                     the process exited before the tests ended, or with a status other than 0
    signal             x                     it crashed or was killed: a segmentation fault, a limit of the system
    timeout            x                     wall-clock or CPU time; also threads that run on after the tests
    memory             x                     Java's heap, Python's data, or all of its processes together
    output             x                     more than OUTPUT bytes on stdout and stderr
    disk               x                     more than DISK bytes of files (if the home is in memory: an exception)
    compile_error                            rejected by javac or Python's compile()
    compile_limit                            the compiler ran out of time or memory, or crashed

The proof that the tests ran to their end is a secret drawn for each run. It stays in a pipe until main has returned,
and is then copied to a second pipe with the verdict. So neither System.exit(0) nor any output can fake a pass. It is no
protection against a program that knows this file and reads the pipe: tests and program share a process.

A wrong answer: the tests of MBJP, MathQA and HumanEval all throw the same exception. It would skip the remaining tests
and hide a later crash, so from the last `class Main` on, that throw is replaced by a call that records the failure and
continues; `passed` is the same either way. In other Java tests a wrong answer is a java.lang.Exception or
AssertionError, not a subclass, created in class Main and ending main; in Python an AssertionError that ends the script.
Any other exception is a crash.
"""

import atexit
import functools
import glob
import json
import os
import re
import secrets
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

HERE = Path(__file__).resolve().parent
MIB = 2**20
OUTPUT, DISK = MIB, 64 * MIB
TAIL = 2000  # characters of output kept in a verdict
NUM_TASKS = 128  # processes and threads; a JVM has about 15
JVM_OVERHEAD = 512  # MiB of a JVM outside its heap
COMPILER_HEAP = 512  # MiB
COMPILE_SECONDS = 30.0
# throw new java.lang.Exception("Exception -- test case 0 did not pass. x0 = " + x0);
TEST_THROW = re.compile(r'throw new java\.lang\.Exception\((?="Exception -- test case \d+ did not pass)')
JVM = (
    "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-XX:-UsePerfData", "-XX:-CreateCoredumpOnCrash",
    "-XX:ActiveProcessorCount=2",  # on a large machine, one thread per core would exceed NUM_TASKS
)  # fmt: skip
# NanoRlhfTests of execution.java for a Python script; arguments: two descriptors and a path
PYTHON_TESTS = """
import os, sys
def run(read, write, getpid, secret, report, path):
    with open(path, "rb") as file:
        source = file.read()
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        write(report, b"compile_error\\n")
        raise
    write(report, b"compiled\\n")
    sys.argv = [path]
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__file__ = path
    pid, word, error = getpid(), b"passed", None
    try:
        exec(code, module.__dict__)
    except AssertionError as caught:
        word, error = b"wrong_answer", caught
    except MemoryError as caught:
        word, error = b"memory", caught
    except SystemExit as caught:
        word, error = b"exit", caught
    except BaseException as caught:
        word, error = b"exception", caught
    if getpid() == pid:  # not in a forked child
        write(report, read(secret, 64) + word)
    if error is not None:
        raise error
run(os.read, os.write, os.getpid, int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


@dataclass(frozen=True)
class Verdict:
    compiled: bool
    executed: bool  # compiled, and all tests ran without crash or timeout: exec@k
    passed: bool  # executed, and every answer was right: pass@k
    reason: str  # from the table above
    output: str  # the last characters printed by the program or its compiler
    seconds: float  # wall clock of the run, 0 if it did not compile


@dataclass
class Worker:
    """What one thread needs to run its programs."""

    number: int
    box: Path  # its own directory
    way: str  # of sandbox.py
    running: set[subprocess.Popen]  # shared by all workers
    stopped: threading.Event  # shared by all workers: start nothing more
    compiler: tuple[subprocess.Popen, int] | None = None  # Java's, and its status pipe


def program_of(row: dict, response: str) -> str:
    """A row of code.jsonl with this response as one program, tests included.

    Nothing may come between the parts: some prompts end in the middle of a line.
    """
    return row["prefix"] + response + row["suffix"] + row["tests"]


# --------------------------------------------------------------------------------------------------- 1. many programs
def run_programs(
    programs: Sequence[str],
    language: str,
    timeout: float = 10.0,
    workers: int = 1,
    memory_mib: int = 512,
    way: str | None = None,
) -> list[Verdict]:
    """A verdict on each program, in order; equal texts run once.

    timeout     seconds of wall clock per run, not counting the compiler
    workers     programs at a time
    memory_mib  Java's heap, or all memory of a Python program
    way         of sandbox.py: "namespaces" or "limits"; None is the best that works here

    Raises InputError if programs can't be sandboxed here, or nothing can run them. An interrupt kills all of them.
    """
    if language not in ("java", "python"):
        raise InputError(f"programs in {language!r} can't be run: java and python can.")
    way = way or best_way()[0]
    if language == "java":  # fill the caches before there are threads
        java_classes()
        check_java(way)
    else:
        python_interpreter(way)
    run_one = functools.partial(run_java if language == "java" else run_python, timeout, memory_mib)
    running: set[subprocess.Popen] = set()
    stopped = threading.Event()
    verdicts: dict[str, Verdict] = {}
    with temporary_directory() as box:
        crew = [Worker(number, box / str(number), way, running, stopped) for number in range(workers)]
        idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in crew:
            make_directory(worker.box)
            make_directory(worker.box / "classes")
            idle.put(worker)

        def task(program: str) -> Verdict:
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
                stop_compiler(worker)
    return [verdicts[program] for program in programs]


# ---------------------------------------------------------------------------------------------------- 2. one program
def run_java(timeout: float, memory_mib: int, worker: Worker, program: str) -> Verdict:
    uid = user_of(worker)
    with temporary_directory(worker.box) as box, temporary_directory(worker.box / "classes", uid) as classes:
        problem, messages = compile_java(worker, run_all_tests(program), classes)
        if problem:
            return Verdict(False, False, False, problem, messages, 0.0)
        launcher = java_classes()
        command = [
            f"{java_home()}/bin/java", *JVM, f"-Xmx{memory_mib}m", f"-XX:MaxDirectMemorySize={memory_mib}m",
            f"-Duser.home={box}/home", f"-Djava.io.tmpdir={box}/home", "-cp", f"{launcher}:{classes}", "NanoRlhfTests",
            "/proc/self/fd/{secret}", "/proc/self/fd/{report}",
        ]  # fmt: skip
        readonly: list[str | Path] = [*java_files(), launcher, classes]
        return run_tests(worker, box, command, timeout, memory_mib + JVM_OVERHEAD, readonly, compiled=True)


def run_python(timeout: float, memory_mib: int, worker: Worker, program: str) -> Verdict:
    with temporary_directory(worker.box) as box:
        script = box / "program.py"
        script.write_bytes(program.encode(errors="replace"))
        python = python_interpreter(worker.way)
        command = [python, "-I", "-B", "-X", "utf8", "-c", PYTHON_TESTS, "{secret}", "{report}", str(script)]
        return run_tests(worker, box, command, timeout, memory_mib, (sys.base_prefix, script), compiled=False)


def run_all_tests(program: str) -> str:
    """The program with each throw for a wrong answer, in its last class Main, replaced by a call that records it."""
    start = max(program.rfind("class Main"), 0)
    return program[:start] + TEST_THROW.sub("NanoRlhfTests.fail(", program[start:])


def run_tests(
    worker: Worker,
    box: Path,
    command: Sequence[str],
    timeout: float,
    memory_mib: int,
    readonly: Sequence[Path | str],
    compiled: bool,
) -> Verdict:
    """Run a test launcher; {secret} and {report} in its arguments become the descriptors of two pipes."""
    secret = secrets.token_hex(16)
    secret_fd, fd = os.pipe()
    os.write(fd, secret.encode())
    os.close(fd)
    report, report_fd = os.pipe()
    argv = [part.replace("{secret}", str(secret_fd)).replace("{report}", str(report_fd)) for part in command]
    began = time.monotonic()
    try:
        started = start(worker, box, argv, timeout, memory_mib, readonly, pipes=(secret_fd, report_fd))
    finally:
        os.close(secret_fd)
        os.close(report_fd)
    limit, status, output = finish(worker, *started)
    seconds = time.monotonic() - began
    lines = read_pipe(report).splitlines()
    check_setup(limit)
    if not compiled and lines[:1] != ["compiled"]:  # Python: its launcher writes this line before the program runs
        reason = "compile_error" if lines[:1] == ["compile_error"] else "compile_limit"
        return Verdict(False, False, False, reason, output, 0.0)
    reported = [line.removeprefix(secret) for line in lines if line.startswith(secret)]
    if limit:
        reason = limit
    elif reported and not (reported[0] == "passed" and status != 0):
        reason = reported[0]
    elif status == 128 + signal.SIGXCPU:
        reason = "timeout"
    else:
        reason = "signal" if status > 128 else "exit"
    return Verdict(True, reason in ("passed", "wrong_answer"), reason == "passed", reason, output, seconds)


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
) -> tuple[subprocess.Popen, int]:
    """Start a command in a sandbox with its home in `box`.

    Returns its supervisor, and the pipe on which the supervisor reports a broken limit. Stdin and stdout of the
    supervisor are the command's. On SIGTERM it kills the command and every process that it started.
    """
    for name in ("home", "root"):
        make_directory(box / name)
    status, status_fd = os.pipe()
    config = {
        "way": worker.way, "argv": argv, "home": f"{box}/home", "root": f"{box}/root", "uid": user_of(worker),
        "readonly": list(map(str, readonly)), "writable": list(map(str, writable)), "pipes": list(pipes),
        "status_fd": status_fd, "parent": os.getpid(), "seconds": seconds,
        "cpu_seconds": None if seconds is None else int(2 * seconds) + 1,  # per process: two threads may compute
        "memory_bytes": memory_mib * MIB, "disk_bytes": DISK, "num_tasks": NUM_TASKS,
        "environment": {"PATH": "/usr/bin:/bin", "HOME": f"{box}/home", "TMPDIR": f"{box}/home", "LANG": "C.UTF-8"},
    }  # fmt: skip
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "sandbox.py"), json.dumps(config)],
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
    """Wait for a command: the limit it broke or "", its exit status (or 128 + signal), the end of its output.

    If the sandbox could not be set up, the limit is "setup: " and the reason; the command has not run.
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
        elif process.poll() is not None:  # ended, but a process that it started holds the pipe open
            break
    code = process.wait()
    process.stdout.close()
    worker.running.discard(process)
    limit = read_pipe(status)
    limit = "output" if num_bytes > OUTPUT else limit
    return limit, code if code >= 0 else 128 - code, tail.decode(errors="replace")[-TAIL:]


def check_setup(limit: str) -> None:
    """Raise InputError if the sandbox could not be set up: that is no verdict on the program."""
    if limit.startswith("setup: "):
        problem = limit.removeprefix("setup: ")
        raise InputError(f"programs can't be sandboxed on this machine ({problem}): none runs without a sandbox.")


def read_pipe(fd: int) -> str:
    """Read what a pipe holds, at most its 64 KiB, and close it."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 2**16).decode(errors="replace")
    except BlockingIOError:
        return ""
    finally:
        os.close(fd)


def user_of(worker: Worker) -> int | None:
    """Root runs programs as a user without privileges, a different one per worker and process.

    From systemd's range for such users. Not 65534, nobody: the limits would count other programs' processes.
    """
    return 61184 + (os.getpid() * 128 + worker.number) % 4096 if os.getuid() == 0 else None


def make_directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o711)  # those users may enter it


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
def compile_java(worker: Worker, source: str, classes: Path) -> tuple[str, str]:
    """Write class files to `classes`, a directory below `worker.box / "classes"`: ("", ""), or (reason, messages).

    Each worker keeps one javac, in its own sandbox: a cold start takes ten times as long.
    """
    if worker.compiler is None:
        box = worker.box / "compiler"
        make_directory(box)
        command = [f"{java_home()}/bin/java", *JVM, f"-Xmx{COMPILER_HEAP}m", "-Xss8m"]
        worker.compiler = start(
            worker, box, [*command, "-cp", str(java_classes()), "NanoRlhfCompiler", str(java_classes())],
            seconds=None, memory_mib=COMPILER_HEAP + JVM_OVERHEAD, readonly=(*java_files(), java_classes()),
            writable=(worker.box / "classes",), stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    process = worker.compiler[0]
    assert process.stdin is not None
    texts = (str(classes).encode(), source.encode(errors="replace"))
    deadline = time.monotonic() + COMPILE_SECONDS
    try:
        process.stdin.write(b"".join(struct.pack(">i", len(text)) + text for text in texts))
        compiled, length = struct.unpack(">?i", read_exactly(process, 5, deadline))
        messages = read_exactly(process, length, deadline).decode(errors="replace")
    except TimeoutError:
        stop_compiler(worker)
        return "compile_limit", f"javac did not answer within {COMPILE_SECONDS:g} s"
    except (EOFError, BrokenPipeError):
        return "compile_limit", f"javac crashed {stop_compiler(worker)}"
    return ("" if compiled else "compile_error"), messages[:TAIL]


def read_exactly(process: subprocess.Popen, num_bytes: int, deadline: float) -> bytes:
    """Read from the process's stdout; TimeoutError at the deadline (time.monotonic), EOFError at its end."""
    assert process.stdout is not None
    data = b""
    while len(data) < num_bytes:
        if not select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise TimeoutError
        chunk = os.read(process.stdout.fileno(), num_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def stop_compiler(worker: Worker) -> str:
    """Stop the worker's javac; returns the limit that had already ended it, or ""."""
    if worker.compiler is None:
        return ""
    process, status = worker.compiler
    worker.compiler = None
    process.terminate()
    assert process.stdin is not None
    process.stdin.close()
    limit = finish(worker, process, status)[0]
    check_setup(limit)
    subprocess.run(["/bin/rm", "-rf", worker.box / "compiler"], check=True)
    return "" if limit == "stopped" else limit


@functools.cache
def java_home() -> str:
    """The directory of the JDK that `java` on the PATH belongs to."""
    java = shutil.which("java")
    if java is None:
        raise InputError("no java on the PATH: install a JDK, version 17 or later.")
    shown = subprocess.run([java, "-XshowSettings:properties", "-version"], capture_output=True, text=True)
    home = re.search(r"^ *java\.home = (.+)$", shown.stderr, re.MULTILINE)
    if home is None or not Path(home[1], "bin", "javac").exists():
        raise InputError(f"{java} comes without javac: install a JDK, version 17 or later, not a JRE.")
    return home[1]


def java_files() -> tuple[str, ...]:
    return java_home(), *glob.glob("/etc/java*")  # Debian keeps the JDK's settings there


def check_java(way: str) -> None:
    """Raise InputError if a JVM can't start in a sandbox: every program would seem to fail."""
    problem = try_way(way, (f"{java_home()}/bin/java", *JVM, "-Xmx64m", "-version"), java_files())[1]
    if problem:
        raise InputError(f"programs can't run {java_home()}/bin/java ({problem}): install a JDK below /usr.")


@functools.cache
def java_classes() -> Path:
    """A directory with the compiled execution.java, removed at exit."""
    directory = Path(tempfile.mkdtemp(prefix="nanorlhf-java-"))
    atexit.register(shutil.rmtree, directory)
    directory.chmod(0o755)
    subprocess.run([f"{java_home()}/bin/javac", "-d", directory, HERE / "execution.java"], check=True)
    return directory


@functools.cache
def python_interpreter(way: str) -> str:
    """This Python, outside its virtual environment; the system's if programs can't reach this one (in /root)."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        if not try_way(way, (python, "-I", "-c", ""), (sys.base_prefix,))[1]:
            return python
    raise InputError(f"programs can't run {sys.executable}, nor the system's python3: install one below /usr.")


# ------------------------------------------------------------------------------------------ 5. what a system supports
def isolation() -> list[str]:
    """What programs can and can't do on this machine: lines to print before any of them runs."""
    way, parts = best_way()
    if way == "namespaces":
        return [
            "processes: one PID namespace per program, killed with every process in it",
            "network: none",
            "files: the system's, read-only, and an empty home in memory",
            "system calls: " + ("filtered" if parts["seccomp"] else "NOT FILTERED, this system has no seccomp"),
        ]
    user = "users without privileges" if os.getuid() == 0 else "the current user"
    lines = [
        f"namespaces: not available ({try_way('namespaces')[1]})",
        f"processes: run as {user}, see all others, and are killed with every process they start",
        "network: none, and no signals to other processes",
        "files: the system's, and an empty home",
    ]
    if not parts["seccomp"]:
        lines[2] = "network: OPEN, and they CAN SIGNAL other processes of that user, this system has no seccomp"
    if not parts["landlock"]:
        lines[3] = "files: EVERYTHING THAT USER MAY READ AND WRITE, this system has no Landlock"
    return lines


@functools.cache
def best_way() -> tuple[str, dict[str, bool]]:
    """The first of sandbox.py's two ways that works here, and which of its parts do."""
    if not sys.platform.startswith("linux"):
        raise InputError("running generated programs needs Linux: the sandbox works on no other system.")
    for way in ("namespaces", "limits"):
        parts, problem = try_way(way)
        if not problem:
            return way, parts
    raise InputError(f"programs can't be sandboxed on this machine ({problem}): none runs without a sandbox.")


@functools.cache
def try_way(
    way: str, argv: tuple[str, ...] | None = None, readonly: tuple[str, ...] = ()
) -> tuple[dict[str, bool], str]:
    """Try a sandbox, with a command or without: which of its parts work ({} with a command), and "" or the problem."""
    with temporary_directory() as box:
        worker = Worker(0, box, way, set(), threading.Event())
        started = start(worker, box, argv, seconds=30.0, memory_mib=1024, readonly=readonly)
        limit, code, output = finish(worker, *started)
    if limit or code:
        return {}, limit.removeprefix("setup: ") or f"status {code}: {output}"
    return ({} if argv else json.loads(output)), ""
