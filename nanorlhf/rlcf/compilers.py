"""Static checks of programs: javac or Python errors and unused local variables, with their positions.

    with JavaCompiler() as compiler:
        for program, diagnostics in zip(programs, compiler.check(programs)):
            error = first_error(diagnostics, start_of_response, end_of_response)

A compiler is one process, started by the first check and stopped by `close`. It compiles in memory and never runs a
program. A program that makes it hang or crash gets an error at its end; a new process checks the others.

RLCF only specifies "the first error". javac's position of an error isn't always where a reader would point: `culprit`
has the rules that choose the lexeme to blame.
"""

import io
import json
import os
import queue
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import tree_sitter_java
from tree_sitter import Language, Node, Parser

from nanorlhf.errors import InputError
from nanorlhf.sandbox.java import java_environment

JAVA = Language(tree_sitter_java.language())
START_SECONDS = 120  # startup timeout, for a busy machine
STARTED = -1  # id of the reply that a compiler sends once it is ready
RENEW_AFTER = 5_000  # programs per process: javac keeps every name it has seen and is 3 times slower after 13,000

# ErrorProne uses javac's internals, which JDK 16 and later open only on request
ERROR_PRONE_JVM = [
    *(f"--add-exports=jdk.compiler/com.sun.tools.javac.{package}=ALL-UNNAMED"
      for package in ("api", "file", "main", "model", "parser", "processing", "tree", "util")),
    *(f"--add-opens=jdk.compiler/com.sun.tools.javac.{package}=ALL-UNNAMED" for package in ("code", "comp")),
]  # fmt: skip
JAVAC = [
    "-proc:none",  # an annotation processor would run inside the compiler
    "-implicit:none",
    "-g:none",
    "-Xlint:none",
    "-Xmaxerrs", "0",  # unlimited: errors aren't reported in source order
    "--should-stop=ifError=FLOW",  # else a syntax error hides all others, a type error hides uninitialised variables
]  # fmt: skip

BLANK = re.compile(r"(?:[ \t\f\r\n]+|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
LEXEME = re.compile(
    r"""
      \"{3}[ \t\f]*[\r\n](?:\\.|[^\\])*?(?:\"{3}|\Z)      # text block; to the end of the program if unclosed
    | "(?:\\[^\r\n]|[^"\\\r\n])*"?                     # string; to the end of the line if unclosed
    | '(?:\\[^\r\n]|[^'\\\r\n])*'?
    | 0[xX](?:[pP][+-]|[\w.])* | \.?\d(?:[eE][+-]|[\w.])*
    | [\w$]+
    | /\*.*                                            # an unclosed comment
    | >>>= | <<= | >>= | \.\.\. | -> | :: | \+\+ | -- | && | \|\| | << | [-+*/%&|^=!<>]= | .
    """,
    re.VERBOSE | re.DOTALL,
)
ESCAPE = re.compile(r"\\(?:\\|u+([0-9a-fA-F]{4}))")  # an even number of backslashes before it
TEXT_TOKEN = re.compile(
    r"""//[^\r\n]*|/\*.*?(?:\*/|\Z)|\"{3}(?:\\.|[^\\])*?(?:\"{3}|\Z)|"(?:\\[^\r\n]|[^"\\\r\n])*"?|'(?:\\[^\r\n]|[^'\\\r\n])*'?""",
    re.DOTALL,
)


@dataclass(frozen=True)
class Diagnostic:
    """One finding of a static check; [start, end) are character offsets in the Python string."""

    kind: str
    """"error", "unused" (an unused local variable) or "warning\""""
    code: str
    """its name in javac (compiler.err.cant.resolve.location), Python (SyntaxError) or pyflakes (UndefinedName);
    unused.variable, timeout and crash are ours"""
    start: int
    end: int
    """one past the culprit's last character; start and end are the program's length if only its end is to blame"""
    message: str

    @property
    def last(self) -> int:
        """The offset to blame: the culprit's last character, or the end of the program."""
        return max(self.start, self.end - 1)


def first_error(diagnostics: list[Diagnostic], start: int, end: int) -> Diagnostic | None:
    """Return the diagnostic that fails the response at [start, end) of its program, or None if it passes. [RLCF alg 1]

    This is the first error or unused variable whose culprit ends inside the response; without one, the first error
    outside it. The code around the response was correct, so the response broke it (an extra brace, `try` without
    `catch`), but none of its tokens is to blame. Unused variables outside the response don't count.
    """
    for diagnostic in diagnostics:
        if diagnostic.kind in ("error", "unused") and start <= diagnostic.last < end:
            return diagnostic
    return next((diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"), None)


class Compiler:
    """Static checks for one language, run by a process that lives from the first check to `close`. Not thread-safe.

    encoding     how programs are encoded for the process
    findings     function of a program and the process's reply, which returns diagnostics
    tokens       function that returns [start, end) of each comment and string in a program without errors
    """

    def __init__(
        self,
        server: "Server",
        encoding: str,
        findings: "Callable[[str, bytes | Failure], list[Diagnostic]]",
        tokens: Callable[[str], Iterator[tuple[int, int]]],
    ) -> None:
        self.server, self.encoding, self.findings, self.tokens = server, encoding, findings, tokens

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.server.stop()

    def check(self, programs: list[str], spans: list[tuple[int, int]] | None = None) -> list[list[Diagnostic]]:
        """Return the diagnostics of each program, sorted by position. Raises InputError if the process doesn't start.

        spans   [start, end) of the response in each program. A response gets an error at its end if its last comment or
                string hides the code after it, such as `return 1; } } //` before `}}`: a compiler may accept that.
        """
        replies = self.server.ask([program.encode(self.encoding, "surrogatepass") for program in programs])
        checked = list(map(self.findings, programs, replies))
        for program, diagnostics, (first, end) in zip(programs, checked, spans or [], strict=spans is not None):
            if not any(d.kind == "error" for d in diagnostics) and any(
                first <= start < end < stop and program[end:stop].strip() for start, stop in self.tokens(program)
            ):
                message = "a comment or string runs on over the code after it"
                diagnostics.append(Diagnostic("error", "hidden.code", end - 1, end, message))
        return [sorted(diagnostics, key=lambda d: (d.start, d.end)) for diagnostics in checked]


# ------------------------------------------------------------------------------------------------------------- 1. Java
class JavaCompiler(Compiler):
    """javac plus a check for unused variables.

    workers     compiler threads; None: one per processor
    timeout     seconds per program; a slower one gets an error with the code "timeout" at its end
    error_prone_jar     adds ErrorProne's ERROR-level checks: error_prone_core-*-with-dependencies.jar and the jars it
                needs, separated as in a class path
    java        name or path of the JDK's launcher

    Raises InputError if the launcher or a jar is missing, or a number is out of range.
    """

    def __init__(
        self,
        workers: int | None = None,
        timeout: float = 10.0,
        error_prone_jar: str | Path | None = None,
        java: str = "java",
    ) -> None:
        workers = os.cpu_count() or 1 if workers is None else workers
        server = Server(java_command(java, workers, error_prone_jar), workers, timeout)
        super().__init__(server, "utf-16-be", java_findings, java_tokens)


def java_command(java: str, workers: int, error_prone_jar: str | Path | None) -> list[str]:
    """Return the command that runs Checker.java. The launcher compiles it in memory in 0.2 s, without a class file."""
    launcher = shutil.which(java)
    if launcher is None:
        raise InputError(f"{java} not found: install a JDK 17 or later (apt install openjdk-17-jdk-headless).")
    # C1 only: C2 takes longer to compile javac than it saves in the first few thousand programs. An OutOfMemoryError
    # may hit a thread other than the one that caused it. No result could be trusted, so the process exits.
    jvm = ["-XX:TieredStopAtLevel=1", f"-Xmx{512 + 128 * workers}m", "-XX:+ExitOnOutOfMemoryError"]
    javac = JAVAC
    if error_prone_jar is not None:
        for jar in str(error_prone_jar).split(os.pathsep):
            if not Path(jar).is_file():
                raise InputError(f"ErrorProne: {jar} is not a file: download it, or drop the option.")
        jvm = jvm + ERROR_PRONE_JVM
        # no warnings; ErrorProne's manual requires the other settings
        plugin = ["-processorpath", str(error_prone_jar), "-Xplugin:ErrorProne -XepDisableAllWarnings"]
        javac = javac + ["-XDcompilePolicy=simple", *plugin]
    checker = Path(__file__).with_name("Checker.java")
    return [launcher, *jvm, "-cp", str(checker.parent), str(checker), str(workers), *javac]


def java_findings(program: str, reply: "bytes | Failure") -> list[Diagnostic]:
    """Return the diagnostics in a reply of Checker.java, with offsets in characters, plus the unused variables."""
    diagnostics = unused_variables(program)
    if isinstance(reply, Failure):
        return [reply.diagnostic(program), *diagnostics]
    fields = reply.decode("utf-8").split("\0") if reply else []
    # javac counts UTF-16 code units: a character above U+FFFF takes two
    characters = [i for i, c in enumerate(program) for _ in range(1 + (ord(c) > 0xFFFF))] if fields else []
    characters.append(len(program))

    syntax_error: int | None = None  # where the parser first failed
    statement = 0  # where that statement starts
    text, origin = translated(program)
    ctrl_z = text.find("\x1a", 0, -1)
    if ctrl_z >= 0:  # javac takes it for the end of the file, so a response could hide the code after it
        message, span = "illegal character: \\u001a", (origin[ctrl_z], origin[ctrl_z + 1])
        diagnostics.append(Diagnostic("error", "compiler.err.illegal.char", *span, message))
    for i in range(0, len(fields), 6):
        phase, code, *offsets, message = fields[i : i + 6]
        # -1: no position, or no start
        start, position, end = (characters[min(int(o), len(characters) - 1)] if int(o) >= 0 else None for o in offsets)
        span = (len(program), len(program)) if position is None else culprit(program, start, position, end)
        if phase == "syntax" and syntax_error is None:
            syntax_error = span[0]
            statement = 1 + max(program.rfind(mark, 0, syntax_error) for mark in ";{}")
        # skip artefacts of error recovery: `int # = 3` is "not a statement", `f(a b)` calls f with one argument
        if syntax_error is not None and (0 if phase == "syntax" else statement) <= span[0] < syntax_error:
            continue
        diagnostics.append(Diagnostic("warning" if phase == "warning" else "error", code, *span, message))
    return diagnostics


def translated(program: str) -> tuple[str, Sequence[int]]:
    """Translate a Java program's Unicode escapes. Returns the text and the origin of each character and of the end.
    [JLS 3.3]

    Escapes may appear anywhere: \\u007b is a brace, \\u000a ends a line comment.
    """
    matches = [match for match in ESCAPE.finditer(program) if match[1]]
    if not matches:
        return program, range(len(program) + 1)
    characters: list[str] = []
    origin: list[int] = []
    at = 0
    for match in matches:
        characters += program[at : match.start()]
        origin += range(at, match.start())
        at, character = match.end(), chr(int(match[1], 16))
        if "\udc00" <= character <= "\udfff" and characters and "\ud800" <= characters[-1] <= "\udbff":
            pair = (characters[-1] + character).encode("utf-16-be", "surrogatepass")
            characters[-1] = pair.decode("utf-16-be")
        else:
            characters.append(character)
            origin.append(match.start())
    characters += program[at:]
    origin += range(at, len(program) + 1)
    return "".join(characters), origin


def java_tokens(program: str) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each comment, string literal and character literal."""
    text, origin = translated(program)
    for match in TEXT_TOKEN.finditer(text):
        yield origin[match.start()], origin[match.end()]


def culprit(program: str, start: int | None, position: int, end: int | None) -> tuple[int, int]:
    """Return the lexeme to blame for a javac error at `position`, in a tree that spans [start, end).

    program            javac's position                                                    culprit
    int x = 3 int y    "';' expected" is reported after the 3: blame the next lexeme       int
    s.lenght()         the dot, in the tree `s.lenght`                                     lenght
    int x = "a" + n    the operator; the whole value has the wrong type: its last lexeme   n
    int n = 4          the name, in a declaration of several lexemes                       n
    class A {          "reached end of file" after the brace: there is no next lexeme      the end
    """
    lexeme = next_lexeme(program, position)
    if lexeme is None:
        return len(program), len(program)
    is_word = lexeme.group()[0].isalnum() or lexeme.group()[0] in "_$\"'"
    if start is not None and start < position and not is_word:
        if lexeme.group() == ".":  # "not a statement" has no end: at least the name after the dot
            end = max(end or 0, lexeme.end() + 1)
        while lexeme.end() < (end or 0):
            following = next_lexeme(program, lexeme.end())
            if following is None:
                break
            lexeme = following
    return lexeme.span()


def next_lexeme(program: str, position: int) -> re.Match[str] | None:
    """Return the lexeme at or after `position`, or None at the end of the program."""
    space = BLANK.match(program, position)
    assert space is not None  # it matches the empty string
    return LEXEME.match(program, space.end())


def unused_variables(program: str) -> list[Diagnostic]:
    """Return a diagnostic at the name of each local variable that is never read in its scope. [RLCF]

    A variable that is only written, including by the statements `x++;`, `x += 1;` and `x = x + 1;`, is unused. Names
    that the syntax requires are exempt: parameters, fields, and the variables of catch, try-with-resources, for-each
    and patterns. A name that a nested class redeclares counts as read. A program that doesn't parse has none, as its
    reads are unknown.
    """
    text, origin = translated(program)  # javac does this first, tree-sitter doesn't
    source = text.encode("utf-8", "surrogatepass")
    root = Parser(JAVA).parse(source).root_node
    if root.has_error:
        return []
    declared: list[tuple[bytes, Node, int]] = []  # name, its node, end of its scope
    reads: dict[bytes, list[int]] = defaultdict(list)  # name -> positions where it is read, ascending
    own_end: dict[bytes, int] = {}  # name -> end of the last statement `name = ...;` without a call
    for node, field, ancestors in identifiers(root):
        name = source[node.start_byte : node.end_byte]
        (parent, parent_field), (grandparent, _) = ancestors[-1], ancestors[-2]
        if parent.type == "variable_declarator" and field == "name":
            if grandparent.type == "local_variable_declaration":
                scope, _ = ancestors[-3]
                if scope.type == "switch_block_statement_group":  # later cases see it too
                    scope, _ = ancestors[-4]
                declared.append((name, node, scope.end_byte))
            continue
        if field == "left" and parent.type == "assignment_expression" and grandparent.type == "expression_statement":
            value = parent.child_by_field_name("right")
            if value is not None and not has_call(value):
                own_end[name] = value.end_byte
        if is_read(node, field, parent, parent_field, grandparent) and node.start_byte >= own_end.get(name, 0):
            reads[name].append(node.start_byte)

    unused = []
    for name, node, end_of_scope in declared:
        positions = reads[name]
        index = bisect_left(positions, node.end_byte)
        if index == len(positions) or positions[index] >= end_of_scope:
            start, end = (len(source[:b].decode("utf-8", "surrogatepass")) for b in (node.start_byte, node.end_byte))
            message = f"local variable {text[start:end]} is never read"
            unused.append(Diagnostic("unused", "unused.variable", origin[start], origin[end], message))
    return unused


def identifiers(root: Node) -> Iterator[tuple[Node, str | None, list[tuple[Node, str | None]]]]:
    """Yield each identifier in text order, its field in its parent, and its ancestors with their fields, root first.

    Uses a cursor: Node.parent searches from the root each time, which is quadratic in deeply nested programs.
    """
    cursor = root.walk()
    ancestors: list[tuple[Node, str | None]] = []
    while True:
        node = cursor.node
        assert node is not None  # a cursor created from a node always points to one
        if node.type == "identifier":
            yield node, cursor.field_name, ancestors
        entry = node, cursor.field_name
        if cursor.goto_first_child():
            ancestors.append(entry)
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            ancestors.pop()


def has_call(node: Node) -> bool:
    todo = [node]
    while todo:
        part = todo.pop()
        if part.type in ("method_invocation", "object_creation_expression", "lambda_expression"):
            return True
        todo += part.children
    return False


def is_read(name: Node, field: str | None, parent: Node, parent_field: str | None, grandparent: Node) -> bool:
    """Return True if the identifier may be a variable read: not a method, a field, a label or the target of `=`."""
    # the parent's value is not used
    is_statement = grandparent.type == "expression_statement" or (
        grandparent.type == "for_statement" and parent_field in ("init", "update")
    )
    if parent.type == "method_invocation":
        return field != "name"
    if parent.type == "field_access":
        return field != "field"
    if parent.type == "method_reference":
        return name.start_byte == parent.start_byte
    if parent.type in ("labeled_statement", "break_statement", "continue_statement"):
        return False
    if parent.type == "assignment_expression" and field == "left":
        operator = parent.child_by_field_name("operator")
        return operator is not None and operator.type != "=" and not is_statement
    return parent.type != "update_expression" or not is_statement


# ----------------------------------------------------------------------------------------------------------- 2. Python
class PythonCompiler(Compiler):
    """Static checks for Python: undefined names, unused local variables, and syntax errors, which hide both. No JDK.

    One program at a time in a separate process: deep nesting can overflow the stack of CPython's compiler and crash it.
    """

    def __init__(self, timeout: float = 10.0) -> None:
        checker = Path(__file__).with_name("python_checker.py")
        server = Server([sys.executable, "-P", "-W", "ignore", str(checker)], 1, timeout)
        super().__init__(server, "utf-8", python_findings, python_tokens)


def python_findings(program: str, reply: "bytes | Failure") -> list[Diagnostic]:
    if isinstance(reply, Failure):
        return [reply.diagnostic(program)]
    return [Diagnostic(*fields) for fields in json.loads(reply)]


def python_tokens(program: str) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of each comment and string in a program without errors."""
    lines = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", program))]
    for token in tokenize.generate_tokens(io.StringIO(program, newline=None).readline):
        if token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]:  # also the parts of f-strings
            yield lines[token.start[0] - 1] + token.start[1], lines[token.end[0] - 1] + token.end[1]


# ------------------------------------------------------------------------------------------- 3. the compiler's process
@dataclass(frozen=True)
class Failure:
    """Returned by `Server.ask` instead of a reply; code is "timeout" or "crash"."""

    code: str
    message: str

    def diagnostic(self, program: str) -> Diagnostic:
        return Diagnostic("error", self.code, len(program), len(program), self.message)


class Server:
    """A process that answers requests over pipes, restarted if it hangs or crashes.

    Requests and replies: int id, int size, then `size` bytes. At most `window` requests are in flight, the number that
    the process handles in parallel, so a request's timeout starts when the process starts on it.
    """

    def __init__(self, command: list[str], window: int, timeout: float) -> None:
        if window < 1:
            raise InputError(f"a compiler needs at least 1 worker, got {window}.")
        if timeout <= 0:
            raise InputError(f"a compiler's timeout must be above 0 seconds, got {timeout}.")
        self.command, self.window, self.timeout = command, window, timeout
        self.process: subprocess.Popen | None = None
        self.num_sent = 0  # requests to the current process
        self.replies: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()

    def ask(self, requests: list[bytes]) -> list[bytes | Failure]:
        """Return the reply to each request, in order. Raises InputError if the process doesn't start."""
        replies: list[bytes | Failure] = [b""] * len(requests)
        waiting = deque(range(len(requests)))
        deadlines: dict[int, float] = {}  # of requests in flight
        suspects: set[int] = set()  # in flight when a process hung or crashed; retried one by one
        try:
            while waiting or deadlines:
                if self.process is None or self.num_sent >= RENEW_AFTER and not deadlines:
                    self.start()
                window = 1 if suspects else self.window
                while waiting and len(deadlines) < window and self.num_sent < RENEW_AFTER:
                    index = waiting.popleft()
                    deadlines[index] = time.monotonic() + self.timeout
                    self.send(index, requests[index])
                try:
                    reply = self.replies.get(timeout=max(0.0, min(deadlines.values()) - time.monotonic()))
                    failure = Failure("crash", "this program crashed the compiler")
                except queue.Empty:
                    reply, failure = None, Failure("timeout", f"the compiler took longer than {self.timeout:g} seconds")
                if reply is not None:
                    index, replies[index] = reply
                    del deadlines[index]
                    suspects.discard(index)
                    continue
                if len(deadlines) == 1 and (failure.code == "timeout" or deadlines.keys() <= suspects):
                    (index,) = deadlines
                    replies[index] = failure
                    suspects.discard(index)
                else:  # retry one by one to find the culprit, which may be none of them
                    suspects |= deadlines.keys()
                    waiting.extendleft(sorted(deadlines, reverse=True))
                deadlines.clear()
                self.stop()  # a single thread can't be killed
        finally:
            if deadlines:  # interrupted: drop the outstanding replies
                self.stop()
        return replies

    def send(self, index: int, request: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.num_sent += 1
        try:
            self.process.stdin.write(struct.pack(">ii", index, len(request)) + request)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the process crashed: `ask` notices at the end of the replies, after those already sent

    def start(self) -> None:
        self.stop()
        self.num_sent = 0
        self.replies = queue.SimpleQueue()
        with tempfile.TemporaryFile() as log:
            # in its own session, so that Ctrl-C doesn't reach it: the run still needs it to finish its step
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env=java_environment(),
            )  # fmt: skip
            reader = threading.Thread(target=read_replies, args=(self.process.stdout, self.replies), daemon=True)
            reader.start()
            try:
                started = self.replies.get(timeout=START_SECONDS)
            except queue.Empty:
                started = None
            if started is None or started[0] != STARTED:
                self.stop()
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else f"no reply within {START_SECONDS} seconds"
                raise InputError(
                    f"{self.command[0]}: the compiler doesn't start ({reason}): for Java, install JDK 17 or later."
                )

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # its buffer still had unsent bytes
        self.process = None


def read_replies(stdout: BinaryIO, replies: queue.SimpleQueue) -> None:
    """Put replies into the queue until stdout ends, then None. Runs in its own thread."""
    with stdout:
        while len(head := stdout.read(8)) == 8:
            index, size = struct.unpack(">ii", head)
            reply = stdout.read(size)
            if len(reply) < size:
                break
            replies.put((index, reply))
    replies.put(None)
