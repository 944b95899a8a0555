"""The two Python processes of execution.py: the harness runs tests, the program, sandboxed apart, answers calls.

    python -c SOURCE harness                        requests on stdin, as in execution.java
    python -c SOURCE program CALLS REPLIES PATH     two descriptors, and the program's file

What passes between them are plain values, written by their type. Anything else is written as a number that stands for
the object. A subclass is written as the built-in class that it extends: the reader makes values of its own, and runs no
code of the writer's. Standard library only, and no import of this package: it runs as a script.
"""

import ast
import builtins
import collections
import decimal
import fractions
import importlib
import io
import json
import os
import select
import struct
import sys
import time
import traceback

ENDED = 77  # status of a process that has sent its verdict
TAIL = 8000  # characters of the tests' output
ITEMS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}


def read_exactly(fd, size, deadline=None):
    """EOFError at the end of the pipe, TimeoutError at the deadline (of time.monotonic)."""
    data = b""
    while len(data) < size:
        if deadline is not None and not select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise TimeoutError
        chunk = os.read(fd, min(size - len(data), 2**20))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def receive(fd):
    return read_exactly(fd, struct.unpack(">i", read_exactly(fd, 4))[0])


def send(fd, content, kind=b""):
    data = memoryview(kind + struct.pack(">i", len(content)) + content)
    while data:
        data = data[os.write(fd, data) :]


# -------------------------------------------------------------------------------------------------- 1. plain values
def encoded(value, number):
    """A value as JSON; number(object) stands for one that isn't plain. Methods of subclasses are not called."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return ["int", format(int.__index__(value), "x")]  # decimal digits have a limit
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, str):
        return ["str", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes" if isinstance(value, bytes) else "bytearray", bytes(memoryview(value)).hex()]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if type(value) is range:
        return ["range", *(encoded(part, number) for part in (value.start, value.stop, value.step))]
    if type(value) is decimal.Decimal:
        return ["Decimal", str(value)]
    if type(value) is fractions.Fraction:
        return ["Fraction", *(encoded(part, number) for part in (value.numerator, value.denominator))]
    if isinstance(value, dict):
        return ["dict", *([encoded(k, number), encoded(v, number)] for k, v in dict.items(value))]
    for name, kind in ITEMS.items():
        if isinstance(value, kind):
            return [name, *(encoded(item, number) for item in kind.__iter__(value))]
    return ["object", number(value)]


def decoded(data, known):
    """The value of `encoded`; known(number) gives what a number stands for."""
    if data is None or isinstance(data, bool):
        return data
    name, *parts = data
    if name == "int":
        return int(parts[0], 16)
    if name == "float":
        return float.fromhex(parts[0])
    if name == "str":
        return sys.intern(str(parts[0]))  # as the literals in the tests
    if name in ("bytes", "bytearray"):
        return getattr(builtins, name).fromhex(parts[0])
    if name == "complex":
        return complex(*map(float.fromhex, parts))
    if name == "range":
        return range(*(decoded(part, known) for part in parts))
    if name == "Decimal":
        return decimal.Decimal(parts[0])
    if name == "Fraction":
        return fractions.Fraction(*(decoded(part, known) for part in parts))
    if name == "dict":
        return {decoded(key, known): decoded(value, known) for key, value in parts}
    if name == "object":
        return known(parts[0])
    return ITEMS[name](decoded(part, known) for part in parts)


# --------------------------------------------------------------------------------------------------- 2. the program
class Missing(TypeError):
    """An object without the special method: list() asks for a length that it can do without."""


def program(calls, replies, path):
    """Run the file as a script, then answer: name of a global; or object, method and arguments."""
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    pid = os.getpid()
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        send(replies, b"compile_error")
        raise
    send(replies, b"compiled")
    sys.argv = [path]
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__file__ = path
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        if os.getpid() == pid:  # not in a forked child
            word = {MemoryError: b"memory", SystemExit: b"exit"}.get(type(error), b"exception")
            send(replies, word)
        raise
    if os.getpid() != pid:
        return
    send(replies, b"loaded")
    objects, numbers = [], {}

    def number(thing):
        if id(thing) not in numbers:
            numbers[id(thing)] = len(objects)
            objects.append(thing)
        return numbers[id(thing)]

    while True:
        try:
            call = json.loads(receive(calls))
        except EOFError:
            return
        try:
            if isinstance(call, str):
                value, after = module.__dict__[call], []
            else:
                thing, method, args, kwargs = (decoded(part, objects.__getitem__) for part in call)
                if not hasattr(type(thing), method):
                    raise Missing(f"{type(thing).__name__} has no {method}")
                value, after = getattr(type(thing), method)(thing, *args, **kwargs), args
            reply = [True, encoded(value, number), encoded(after, number)]
        except BaseException as error:
            if os.getpid() != pid:
                raise
            if isinstance(error, SystemExit):
                raise
            if isinstance(call, list) and not isinstance(error, (StopIteration, Missing)):
                traceback.print_exc()
            kind = next((k for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k), Exception)
            reply = [False, kind.__name__, [str(part) for part in error.args]]
        if os.getpid() != pid:
            return
        send(replies, json.dumps(reply).encode())


# --------------------------------------------------------------------------------------------------- 3. the harness
class Ended(BaseException):
    """The program has ended."""


class Remote:
    """An object of the program. It is equal to itself only: what is equal is not for the program to say."""

    def __init__(self, ask, number):
        self.__dict__["ask"], self.__dict__["number"] = ask, number

    def __bool__(self):
        return True

    def __getattr__(self, name):
        return self.ask(self, "__getattribute__", name)


def asks(method):
    """A method that has the program call its own of this name."""

    def ask(remote, *args, **kwargs):
        return remote.ask(remote, method, *args, **kwargs)

    return ask


for method in ("setattr", "call", "iter", "next", "len", "getitem", "setitem", "contains", "str", "repr"):
    setattr(Remote, f"__{method}__", asks(f"__{method}__"))


class Session:
    """The tests' side of the conversation with one program."""

    def __init__(self, stdin, stdout):
        self.stdin, self.stdout = stdin, stdout
        self.remotes = {}
        self.raised = None  # the program's last exception

    def remote(self, number):
        return self.remotes.setdefault(number, Remote(self.call, number))

    def number(self, value):
        if type(value) is Remote:
            return value.__dict__["number"]
        raise TypeError(f"the tests pass a {type(value).__name__}: only plain values can be sent")

    def get(self, name):
        """A global of the program; KeyError if it has none of this name."""
        return self.exchange(name)[0]

    def call(self, thing, method, *args, **kwargs):
        args = list(args)
        parts = [encoded(part, self.number) for part in (thing, method, args, kwargs)]
        value, after = self.exchange(parts)
        for mine, theirs in zip(args, after, strict=False):  # arguments that the program has changed in place
            if type(mine) is type(theirs) and mine is not theirs:
                if isinstance(mine, (list, bytearray)):
                    mine[:] = theirs
                elif isinstance(mine, (dict, set)):
                    mine.clear()
                    mine.update(theirs)
        return value

    def exchange(self, call):
        send(self.stdout, json.dumps(call).encode(), b"q")
        reply = receive(self.stdin)
        if not reply:
            raise Ended
        try:
            good, *parts = json.loads(reply)
            if good:
                value, after = (decoded(part, self.remote) for part in parts)
                return value, after if isinstance(after, list) else []
            name, args = parts
            kind = getattr(builtins, name) if isinstance(name, str) else None
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                kind = Exception
            try:
                error = kind(*args)
            except TypeError:  # UnicodeDecodeError and the like need other arguments
                error = Exception(*args)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError) as bad:
            error = RuntimeError(f"the program's reply is no value: {bad}")
        self.raised = error
        raise error


def tests(session, source, imports, callable_names):
    """Run tests; returns the verdict's word and the error."""
    namespace = {"__name__": "__main__", "__builtins__": builtins}
    try:
        tree = ast.parse(source)
        code = compile(tree, "<tests>", "exec", dont_inherit=True)
        for line in imports:
            try:
                exec(line, namespace)
            except ImportError:
                continue  # not installed here: the program has failed at the same line
        for name in sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}):
            if name not in callable_names:
                if hasattr(builtins, name) or name in namespace:
                    continue  # the tests' sum is Python's, and their math the library's
                if name in sys.stdlib_module_names:
                    namespace[name] = importlib.import_module(name)
                    continue
            try:
                namespace[name] = session.get(name)
            except KeyError:
                continue  # the tests' own, or a NameError
        session.raised = None
        exec(code, namespace)
    except Ended:
        return "ended", None
    except SystemExit as error:
        return "exit", error
    except MemoryError as error:
        return "memory", error
    except AssertionError as error:
        return ("exception" if error is session.raised else "wrong_answer"), error
    except BaseException as error:
        return "exception", error
    return "passed", None


def harness():
    """Each request's tests run in a forked process."""
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # for the tests' own use
        os.dup2(null, fd)
    while True:
        try:
            _, _, source, imports, names = (receive(stdin).decode("utf-8", "surrogatepass") for _ in range(5))
        except EOFError:
            return
        try:
            compile(source, "<tests>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            send(stdout, f"the tests: {error}".encode(errors="replace"), b"c")
            continue
        send(stdout, b"", b"c")
        if receive(stdin):  # the program has failed before
            continue
        child = os.fork()
        if child == 0:
            sys.stdout = sys.stderr = printed = io.StringIO()
            session = Session(stdin, stdout)
            word, failure = tests(session, source, imports.splitlines(), names.split())
            if failure is not None and failure is not session.raised:  # the program has printed its own
                trace = failure.__traceback__
                traceback.print_exception(type(failure), failure, trace and trace.tb_next)  # without this file's frame
            text = f"{word}\n{printed.getvalue()[-TAIL:]}"
            send(stdout, text.encode(errors="replace"), b"v")
            os._exit(ENDED)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != ENDED:  # the tests have ended their process
            send(stdout, b"died\n", b"v")


if __name__ == "__main__":
    if sys.argv[1] == "harness":
        harness()
    else:
        program(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
