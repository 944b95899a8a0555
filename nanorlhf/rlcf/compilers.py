"""Static checks of programs: errors of javac or Python, and unused local variables, with their positions.

    with JavaCompiler() as compiler:
        for program, diagnostics in zip(programs, compiler.check(programs)):
            error = first_error(diagnostics, start_of_response, end_of_response)

A compiler is one process, started by the first check and stopped by `close`. It compiles in memory and never runs a
program. A program that makes it hang or crash gets an error at its end; a new process checks the others.

RLCF says only "the first error". javac's position of an error isn't always where a reader would point: `culprit` holds
the rules that choose.
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
START_SECONDS = 120  # a compiler's start, on a busy machine
STARTED = -1  # id of the reply that says it has started
RENEW_AFTER = 5_000  # programs per process: javac keeps every name it has seen, and is 3 times slower after 13,000

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
    "-Xmaxerrs", "0",  # unlimited: they aren't reported in the order of the text
    "--should-stop=ifError=FLOW",  # else a syntax error hides all others, and a type error an uninitialised variable
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
    """The diagnostic that the response at [start, end) of its program fails with, or None if it passes. [RLCF alg 1]

    The first error or unused variable whose culprit ends inside the response; if there is none, the first error outside
    it. The code around the response was correct, so the response broke it (an extra brace, `try` without `catch`), but
    no single token of it is to blame. Unused variables outside the response don't count.
    """
    for diagnostic in diagnostics:
        if diagnostic.kind in ("error", "unused") and start <= diagnostic.last < end:
            return diagnostic
    return next((diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"), None)


class Compiler:
    """The static checks of a language, by a process that lives from the first check to `close`; for one thread.

    encoding     of the programs that the process is sent
    findings     from a program and the reply to it
    tokens       [start, end) of each comment and string of a program without errors
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
        """The diagnostics of each program, sorted by position. Raises InputError if the process doesn't start.

        spans   where the response is in each program, [start, end). It gets an error at its end if its last comment or
                string hides the code after it, `return 1; } } //` before `}}`: a compiler may not object.
        """
        replies = self.server.ask([program.encode(self.encoding, "surrogatepass") for program in programs])
        checked = list(map(self.findings, programs, replies))
        for program, found, (first, end) in zip(programs, checked, spans or [], strict=spans is not None):
            if not any(d.kind == "error" for d in found) and any(
                first <= start < end < stop and program[end:stop].strip() for start, stop in self.tokens(program)
            ):
                message = "a comment or string runs on over the code after it"
                found.append(Diagnostic("error", "hidden.code", end - 1, end, message))
        return [sorted(found, key=lambda d: (d.start, d.end)) for found in checked]


# ------------------------------------------------------------------------------------------------------------- 1. Java
class JavaCompiler(Compiler):
    """javac, and the search for unused variables.

    workers     compiling threads; None is one per processor
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
    """The command that runs Checker.java; the launcher compiles it in memory in 0.2 s: no class file, no cache."""
    found = shutil.which(java)
    if found is None:
        raise InputError(f"{java} not found: install a JDK 17 or later (apt install openjdk-17-jdk-headless).")
    # C1 alone: C2 takes longer to compile javac than it saves in the first thousands of programs. An OutOfMemoryError
    # may hit another thread than the one that caused it: no result could be trusted, so the process exits.
    jvm = ["-XX:TieredStopAtLevel=1", f"-Xmx{512 + 128 * workers}m", "-XX:+ExitOnOutOfMemoryError"]
    javac = JAVAC
    if error_prone_jar is not None:
        for jar in str(error_prone_jar).split(os.pathsep):
            if not Path(jar).is_file():
                raise InputError(f"ErrorProne: there is no file {jar}: download it, or leave the option out.")
        jvm = jvm + ERROR_PRONE_JVM
        # warnings off; ErrorProne's manual requires the other settings
        plugin = ["-processorpath", str(error_prone_jar), "-Xplugin:ErrorProne -XepDisableAllWarnings"]
        javac = javac + ["-XDcompilePolicy=simple", *plugin]
    checker = Path(__file__).with_name("Checker.java")
    return [found, *jvm, "-cp", str(checker.parent), str(checker), str(workers), *javac]


def java_findings(program: str, reply: "bytes | Failure") -> list[Diagnostic]:
    """The diagnostics in a reply of Checker.java, offsets in characters, and the unused variables."""
    diagnostics = unused_variables(program)
    if isinstance(reply, Failure):
        return [reply.diagnostic(program), *diagnostics]
    fields = reply.decode("utf-8").split("\0") if reply else []
    # javac counts UTF-16 units; a character above U+FFFF is two
    characters = [i for i, c in enumerate(program) for _ in range(1 + (ord(c) > 0xFFFF))] if fields else []
    characters.append(len(program))

    syntax_error: int | None = None  # where the parser first failed
    statement = 0  # where that statement begins
    text, origin = translated(program)
    ctrl_z = text.find("\x1a", 0, -1)
    if ctrl_z >= 0:  # the end of the file for javac: a response could hide the text after it
        message, span = "illegal character: \\u001a", (origin[ctrl_z], origin[ctrl_z + 1])
        diagnostics.append(Diagnostic("error", "compiler.err.illegal.char", *span, message))
    for i in range(0, len(fields), 6):
        phase, code, *offsets, message = fields[i : i + 6]
        # -1: it has no position, or no start
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
    """A Java program with its Unicode escapes translated, and where each character (and the end) comes from. [JLS 3.3]

    They may stand anywhere: \\u007b is a brace, \\u000a ends a line comment.
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
    """[start, end) of each comment, string and character."""
    text, origin = translated(program)
    for match in TEXT_TOKEN.finditer(text):
        yield origin[match.start()], origin[match.end()]


def culprit(program: str, start: int | None, position: int, end: int | None) -> tuple[int, int]:
    """The lexeme to blame for a javac error at `position`, in a tree that spans [start, end).

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
    """The lexeme at or after `position`, None at the end of the program."""
    blank = BLANK.match(program, position)
    assert blank is not None  # it matches the empty string
    return LEXEME.match(program, blank.end())


def unused_variables(program: str) -> list[Diagnostic]:
    """Local variables that are never read in their scope, each at its name. [RLCF]

    A variable that is only written is unused, also if by the statements `x++;` and `x += 1;`. Exempt is what the syntax
    requires: parameters, fields, the variables of catch, try-with-resources, for-each and patterns. A name that a
    nested class redeclares counts as read. A program that doesn't parse has none: what it reads isn't known.
    """
    text, origin = translated(program)  # javac does this first, tree-sitter doesn't
    source = text.encode("utf-8", "surrogatepass")
    root = Parser(JAVA).parse(source).root_node
    if root.has_error:
        return []
    declared: list[tuple[bytes, Node, int]] = []  # name, its node, end of its scope
    reads: dict[bytes, list[int]] = defaultdict(list)  # name -> where it is read, ascending
    for node, field, ancestors in identifiers(root):
        name = source[node.start_byte : node.end_byte]
        (parent, parent_field), (grandparent, _) = ancestors[-1], ancestors[-2]
        if parent.type == "variable_declarator" and field == "name":
            if grandparent.type == "local_variable_declaration":
                scope, _ = ancestors[-3]
                if scope.type == "switch_block_statement_group":  # later cases see it too
                    scope, _ = ancestors[-4]
                declared.append((name, node, scope.end_byte))
        elif is_read(node, field, parent, parent_field, grandparent):
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
    """Each identifier in text order, its field in its parent, and its ancestors with their fields, root first.

    By a cursor: Node.parent searches from the root each time, quadratic in deeply nested programs.
    """
    cursor = root.walk()
    ancestors: list[tuple[Node, str | None]] = []
    while True:
        node = cursor.node
        assert node is not None  # a cursor made from a node stands on one
        if node.type == "identifier":
            yield node, cursor.field_name, ancestors
        here = node, cursor.field_name
        if cursor.goto_first_child():
            ancestors.append(here)
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            ancestors.pop()


def is_read(name: Node, field: str | None, parent: Node, parent_field: str | None, grandparent: Node) -> bool:
    """Whether an identifier may be a variable being read: not a method, a field, a label or the target of `=`."""
    # the value of its parent is not used
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
    """The same for Python, without a JDK: undefined names, unused local variables, and syntax errors, which hide both.

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
    """[start, end) of each comment and string of a program without errors."""
    lines = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", program))]
    for token in tokenize.generate_tokens(io.StringIO(program, newline=None).readline):
        if token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]:  # also the parts of f-strings
            yield lines[token.start[0] - 1] + token.start[1], lines[token.end[0] - 1] + token.end[1]


# ------------------------------------------------------------------------------------------- 3. the compiler's process
@dataclass(frozen=True)
class Failure:
    """What `Server.ask` returns instead of a reply; code is "timeout" or "crash"."""

    code: str
    message: str

    def diagnostic(self, program: str) -> Diagnostic:
        return Diagnostic("error", self.code, len(program), len(program), self.message)


class Server:
    """A process that answers requests over pipes, restarted if it hangs or crashes.

    Requests and replies: int id, int size, then that many bytes. At most `window` requests are in flight, as many as
    the process works on at once, so that a request's timeout starts with the work on it.
    """

    def __init__(self, command: list[str], window: int, timeout: float) -> None:
        if window < 1:
            raise InputError(f"{window} workers for a compiler: it needs at least 1.")
        if timeout <= 0:
            raise InputError(f"a timeout of {timeout} seconds for a program: it must be above 0.")
        self.command, self.window, self.timeout = command, window, timeout
        self.process: subprocess.Popen | None = None
        self.num_sent = 0  # to this process
        self.replies: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()

    def ask(self, requests: list[bytes]) -> list[bytes | Failure]:
        """The reply to each request, in order. Raises InputError if the process doesn't start."""
        replies: list[bytes | Failure] = [b""] * len(requests)
        waiting = deque(range(len(requests)))
        deadlines: dict[int, float] = {}  # of the requests in flight
        suspects: set[int] = set()  # were in flight when a process hung or crashed; retried one by one
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
                else:  # which of them it was, or whether it was the process's own fault, shows alone
                    suspects |= deadlines.keys()
                    waiting.extendleft(sorted(deadlines, reverse=True))
                deadlines.clear()
                self.stop()  # a thread can't be killed alone
        finally:
            if deadlines:  # interrupted: drop the replies still to come
                self.stop()
        return replies

    def send(self, index: int, request: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        self.num_sent += 1
        try:
            self.process.stdin.write(struct.pack(">ii", index, len(request)) + request)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it crashed: the end of its replies says so, after those already sent

    def start(self) -> None:
        self.stop()
        self.num_sent = 0
        self.replies = queue.SimpleQueue()
        with tempfile.TemporaryFile() as log:
            # own session: Ctrl-C must not reach it, as the run still needs it to finish its step
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
                    f"{self.command[0]} doesn't start as a compiler ({reason}): for Java, install a JDK 17 or later."
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
            pass  # unsent bytes were left in its buffer
        self.process = None


def read_replies(stdout: BinaryIO, replies: queue.SimpleQueue) -> None:
    """Body of the reading thread; None marks the end of the replies."""
    with stdout:
        while len(head := stdout.read(8)) == 8:
            index, size = struct.unpack(">ii", head)
            reply = stdout.read(size)
            if len(reply) < size:
                break
            replies.put((index, reply))
    replies.put(None)
