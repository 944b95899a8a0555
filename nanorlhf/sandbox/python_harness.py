"""The two Python processes of execution.py: the harness runs tests; the program, in a separate sandbox, answers calls.

    python -c SOURCE harness                        requests on stdin, as in harness.java
    python -c SOURCE program CALLS REPLIES PATH     two descriptors, and the program's file

The two exchange plain values, serialised by type. A subclass is serialised as the built-in class that it extends: the
reader builds new values and runs no code of the writer. An object of a class that the prompt defines is serialised by
its attributes, which never replace the class's methods; a member of an Enum by its name. A program may also answer with
a function, which the tests can call, or an iterator, which they can advance; if a class is under test, they can call
its methods. No other object is accepted, and it ends the tests.

The tests use the prompt's helpers, constants and imports, which we parse and run again in the harness. The program is
asked for only one name: the function or class that the response completes. If the response is the whole program, it is
asked for every name that the tests read and that neither they nor Python define, nor LIBRARY, for forgotten imports.

Only the program's process can read a value, so it encodes its answers itself. The program's code can't tamper with the
encoder: we rebuild it for each answer, and while the program's code runs, nothing that Python code can reach refers to
the parts it will be built from (see `program`). Some code escapes this: code of the program that runs at the same time,
from a thread, a signal handler, a trace function or a key's __eq__; memory written with ctypes; bytes written to the
pipe. Whatever a program sends that way counts as its answer, as if it had returned it. That doesn't help it: it still
doesn't know what the tests expect, and the values are compared in another process. A program that sends more replies
than requested doesn't pass.

Uses only the standard library and doesn't import this package, because it runs as a script.
"""

import builtins
import collections
import decimal
import enum
import fractions
import functools
import json
import os
import select
import sys
import time
from itertools import pairwise, repeat
from marshal import dumps, loads
from os import getpid, read, write
from struct import pack, unpack
from sys import intern
from types import BuiltinFunctionType, CodeType, FunctionType, GetSetDescriptorType, MethodType

if sys.argv[1:2] != ["program"]:  # programs start often and don't need these imports
    import ast
    import importlib
    import io
    import symtable
    import traceback

ENDED = 77  # exit status of a process that has sent its verdict
TAIL = 8000  # characters of the tests' output to keep
HOLE = "nanorlhf_response"  # placeholder of the response in the prompt's syntax tree
LIBRARY = "math", "collections", "decimal", "fractions", "copy"  # modules for names that tests forgot to import


def read_exactly(fd, size, deadline=None):
    """Read `size` bytes. Raises EOFError at the end of the pipe, TimeoutError at the deadline (by time.monotonic)."""
    data = b""
    while len(data) < size:
        if deadline is not None and not select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise TimeoutError
        chunk = read(fd, min(size - len(data), 2**20))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def receive(fd):
    return read_exactly(fd, unpack(">i", read_exactly(fd, 4))[0])


def send(fd, content, kind=b""):
    data = memoryview(kind + pack(">i", len(content)) + content)
    while data:
        data = data[write(fd, data) :]


# -------------------------------------------------------------------------------------------------- 1. plain values
Decimal, Fraction = decimal.Decimal, fractions.Fraction
EnumType = type(enum.Enum)
# bypass metaclasses, which may return other attributes
get_mro, get_type_name, get_flags, get_members = (
    type.__dict__[name].__get__ for name in ("__mro__", "__name__", "__flags__", "__dict__")
)
get_numerator, get_denominator = (vars(Fraction)[name].__get__ for name in ("_numerator", "_denominator"))
VIEWS: tuple = (  # a dictionary's views, rebuilt from another dictionary
    ("dict_keys", type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    ("dict_values", type({}.values()), lambda items: dict(enumerate(items)).values()),
    ("dict_items", type({}.items()), lambda items: dict(items).items()),
)
CONTAINERS = (
    ("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset), ("deque", collections.deque),
    *((name, kind) for name, kind, _ in VIEWS),
)  # fmt: skip
MAKE = dict(CONTAINERS) | {name: make for name, _, make in VIEWS}


def get_attributes(instance):
    """Return the instance's __dict__, whatever its class returns for it."""
    for kind in get_mro(type(instance)):
        attributes = get_members(kind).get("__dict__")
        if type(attributes) is GetSetDescriptorType:
            return attributes.__get__(instance)
    return {}


def encoded(value, classes, other):
    """Encode a value as JSON, without running code of its class.

    classes: the prompt's, by name; other(object) encodes everything except plain values and their tuples and enums
    """
    kind = type(value)  # isinstance would ask the value for its __class__
    if value is None or kind is bool:
        return value
    is_prompt_class = classes.get(get_type_name(kind)) is kind
    if is_prompt_class and type(kind) is EnumType:  # also IntEnum and StrEnum
        return ["member", get_type_name(kind), get_attributes(value)["_name_"]]
    if is_prompt_class and issubclass(kind, tuple):
        return ["named", get_type_name(kind), *[encoded(item, classes, other) for item in tuple.__iter__(value)]]
    if issubclass(kind, int):
        return ["int", format(int.__index__(value), "x")]  # hexadecimal: the number of decimal digits is limited
    if issubclass(kind, float):
        return ["float", float.hex(value)]
    if issubclass(kind, str):
        return ["str", str.__str__(value)]
    if issubclass(kind, bytes):
        return ["bytes", bytes.hex(value)]
    if issubclass(kind, bytearray):
        return ["bytearray", bytearray.hex(value)]
    if kind is complex:
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if kind is range:
        return ["range", *[encoded(part, classes, other) for part in (value.start, value.stop, value.step)]]
    if kind is Decimal:
        return ["Decimal", Decimal.__str__(value)]
    if kind is Fraction:
        return [
            "Fraction",
            encoded(get_numerator(value), classes, other),
            encoded(get_denominator(value), classes, other),
        ]
    if issubclass(kind, dict):
        return ["dict", *[[encoded(k, classes, other), encoded(v, classes, other)] for k, v in dict.items(value)]]
    for name, container in CONTAINERS:
        if issubclass(kind, container):
            return [name, *[encoded(item, classes, other) for item in container.__iter__(value)]]
    return other(value)


def decoded(data, classes, instances, get_object):
    """Decode what `encoded` returned.

    classes: the prompt's, by name; instances: their objects; get_object(number, ...) returns any other object
    """
    if data is None or data is True or data is False:
        return data
    name, *parts = data
    if name == "int":
        return int(parts[0], 16)
    if name == "float":
        return float.fromhex(parts[0])
    if name == "str":
        return intern(str(parts[0]))  # like the literals in the tests
    if name == "bytes":
        return bytes.fromhex(parts[0])
    if name == "bytearray":
        return bytearray.fromhex(parts[0])
    if name == "complex":
        return complex(*[float.fromhex(part) for part in parts])
    if name == "Decimal":
        return Decimal(parts[0])
    if name == "member":
        return classes[parts[0]][parts[1]]
    if name == "instance":
        return instances[parts[0]]
    if name == "object":
        return get_object(*parts)
    if name == "dict":
        return {
            decoded(key, classes, instances, get_object): decoded(value, classes, instances, get_object)
            for key, value in parts
        }
    if name == "named":
        return tuple.__new__(classes[parts[0]], [decoded(part, classes, instances, get_object) for part in parts[1:]])
    items = [decoded(part, classes, instances, get_object) for part in parts]
    if name == "range":
        return range(*items)
    if name == "Fraction":
        return Fraction(*items)
    return MAKE[name](items)


# --------------------------------------------------------------------------------------------------- 2. the program
class Missing(TypeError):
    """The object has no such special method. list() asks for a length, but works without one."""


FUNCTIONS = FunctionType, BuiltinFunctionType, MethodType, functools.partial, type(functools.cache(len))
EXCEPTIONS = tuple(kind for kind in vars(builtins).values() if type(kind) is type and issubclass(kind, BaseException))
IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: set for the interpreter's types, never for a program's
get_args = BaseException.__dict__["args"].__get__
to_json = vars(json.encoder)["c_make_encoder"](
    None, None, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, False
)


def program(calls, replies, path):
    """Run the file as a script, then answer calls."""
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    pid = getpid()
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        send(replies, b"compile_error")
        raise
    send(replies, b"compiled")
    sys.argv = [path]
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__file__ = path
    objects, numbers = [], {}  # objects that the tests refer to, and their numbers by id
    # The program's code can change this frame's variables, every global and every function. So we rebuild `perform` and
    # `reply` for each call, from code objects and C functions, which can't be changed. Python evaluates from left to
    # right: while the program's code runs, the parts they will be built from are on the interpreter's stack, out of
    # reach. No trace function may be active during `reply`.
    parts = FunctionType, dict, perform.__code__, reply.__code__, TOOLS, sys.settrace, sys.setprofile
    for make, names, perform_code, reply_code, tools, trace, profile in (
        repeat(parts),
        load(code, module.__dict__, replies, pid),
    )[0]:
        try:
            raised = make(
                reply_code,
                names(
                    tools,
                    replies=replies,
                    pid=pid,
                    objects=objects,
                    numbers=numbers,
                    outcome=make(perform_code, names(tools, calls=calls, objects=objects, module=module.__dict__))(),
                    untraced=(trace(None), profile(None)),
                ),
            )()
        except EOFError:  # there are no more calls
            return
        if os.getpid() != pid:
            return
        if raised is not None:
            sys.excepthook(type(raised), raised, raised.__traceback__)


def load(code, namespace, replies, pid):
    """Run a program's top level."""
    try:
        exec(code, namespace)
    except BaseException as error:
        if os.getpid() == pid:  # not in a forked child
            outcome = {MemoryError: b"memory", SystemExit: b"exit"}.get(type(error), b"exception")
            send(replies, outcome)
        raise
    if os.getpid() != pid:
        raise SystemExit
    send(replies, b"loaded")


def perform():
    """Receive and make a call; return if it succeeded, its value or exception, and the arguments for `reply`."""
    namespace = globals()
    for name, code, defaults in CODES:
        namespace[name] = FunctionType(code, namespace, name, defaults)
    module, objects = namespace["module"], namespace["objects"]
    call, names, table = loads(receive(namespace["calls"]))
    arguments, instances, classes = [], [], {name: module.get(name) for name in names}
    get_object = objects.__getitem__
    is_name = type(call) is str
    try:
        if is_name:
            value = module[call]
        else:
            instances += [object.__new__(classes[name]) for name, _ in table]
            for instance, (_, attributes) in zip(instances, table, strict=True):
                instance.__dict__.update(decoded(attributes, classes, instances, get_object))
            target, method, arguments, keywords = [decoded(part, classes, instances, get_object) for part in call]
            kind = type(target)
            if method == "__bool__":  # falls back to the length
                value = bool(target)
            elif hasattr(kind, method):
                value = getattr(kind, method)(target, *arguments, **keywords)
            else:
                raise Missing(f"{kind.__name__} has no {method}")
    except BaseException as error:
        return False, error, arguments, instances, classes, is_name
    return True, value, arguments, instances, classes, is_name


def reply():
    """Send the outcome of `perform` without running code of the program; return an exception to print, or None."""
    namespace = globals()
    for name, code, defaults in CODES:
        namespace[name] = FunctionType(code, namespace, name, defaults)
    objects, numbers = namespace["objects"], namespace["numbers"]
    returned, value, arguments, instances, classes, is_name = namespace["outcome"]
    if getpid() != namespace["pid"]:  # a forked child
        return None
    positions = {id(instance): position for position, instance in enumerate(instances)}

    def other(value):
        kind = type(value)
        if classes.get(get_type_name(kind)) is kind:
            if id(value) not in positions:
                positions[id(value)] = len(instances)
                instances.append(value)
            return ["instance", positions[id(value)]]
        number = dict.get(numbers, id(value))
        if number is None:
            number = list.__len__(objects)
            list.append(objects, value)
            dict.__setitem__(numbers, id(value), number)
        if issubclass(kind, type):
            return ["object", number, "class"]
        if True in [kind is function for function in FUNCTIONS]:
            return ["object", number, "function"]
        if get_flags(kind) & IMMUTABLE and get_members(kind).get("__next__"):
            return ["object", number, "iterator"]
        return ["object", number, dict.get(numbers, id(kind))]

    parts, error = [], None if returned else value
    try:
        if returned:
            parts = [True, encoded(value, classes, other), encoded(arguments, classes, other), []]
            for instance in instances:  # grows during the loop
                parts[3].append([get_type_name(type(instance)), encoded(get_attributes(instance), classes, other)])
        else:
            kinds = [*EXCEPTIONS, *dict.values(classes)]
            kind = [kind for kind in get_mro(type(error)) if True in [kind is each for each in kinds]][0]
            content = get_args(error), get_attributes(error)
            parts = [False, get_type_name(kind), *[encoded(part, classes, other) for part in content]]
        text = "".join(to_json(parts, 0))
    except Exception as problem:  # too deep, or too large
        error = error or problem
        text = "".join(to_json([False, get_type_name(type(problem)), ["tuple"], ["dict"]], 0))
    send(namespace["replies"], text.encode())
    if error is not None and issubclass(type(error), SystemExit):
        raise error
    is_expected = is_name or issubclass(type(error), (StopIteration, Missing))
    return None if is_expected else error


def names_in(code):
    return {*code.co_names, *[name for part in code.co_consts if type(part) is CodeType for name in names_in(part)]}


COPIED = read_exactly, receive, send, get_attributes, encoded, decoded
CODES = tuple((f.__name__, f.__code__, f.__defaults__) for f in COPIED)
TOOLS = tuple(
    (name, value)
    for name, value in (vars(builtins) | globals()).items()
    if any(name in names_in(code) for code in (perform.__code__, reply.__code__, *[code for _, code, _ in CODES]))
)


# --------------------------------------------------------------------------------------------------- 3. the prompt
def parse_prompt(prefix, suffix):
    """Return the prompt's top-level statements, and the definition that the response completes, or None."""
    *_, line = lines = prefix.split("\n")
    margins = [text[: len(text) - len(text.lstrip())] for text in lines if text.strip()] or [""]
    margins = sorted({*margins, margins[-1] + "    ", margins[-1] + "\t", ""}, key=len, reverse=True)
    fillers = [margin + HOLE + "\n" for margin in margins]  # the innermost block first
    if line.strip():
        fillers = [f" {HOLE}\n", *("\n" + filler for filler in fillers)]
    elif line:
        fillers = [f"{HOLE}\n"]
    for rest in (suffix, ""):
        for filler in fillers:
            tree = parsed(prefix + filler + rest)
            if tree is not None and is_reached(tree):
                statements = [statement for statement in tree.body if not has_hole(statement)]
                [hole] = [statement for statement in tree.body if has_hole(statement)]
                is_definition = isinstance(hole, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                return statements, hole if is_definition else None
    for i in range(len(lines) - 1, 0, -1):  # the prompt ends in the middle of a statement
        tree = parsed("\n".join(lines[:i])) if lines[i][:1].strip() else None
        if tree is not None:
            return tree.body, None
    return [], None


def parsed(text):
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def has_hole(tree):
    return any(isinstance(node, ast.Name) and node.id == HOLE for node in ast.walk(tree))


def is_reached(tree):
    """Return False if the response would come after a `return` or the like in the same block."""
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for before, after in pairwise(block) if isinstance(block, list) else ():
                is_end = isinstance(before, (ast.Return, ast.Raise, ast.Continue, ast.Break))
                if is_end and isinstance(after, ast.Expr) and has_hole(after):
                    return False
    return True


def is_open(definition):
    """Return True if the response must continue this definition: it is cut within a line, or has only a docstring.

    Otherwise it may be complete, so that the response starts after it.
    """
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    *_, inner = (node for node in ast.walk(definition) if isinstance(node, kinds) and has_hole(node))
    lines = [node.value for node in ast.walk(inner) if isinstance(node, ast.Expr)]
    is_cut = not any(isinstance(line, ast.Name) and line.id == HOLE for line in lines)
    rest = [statement for statement in inner.body if not has_hole(statement)]
    return is_cut or all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in rest)


def read_names(source):
    """Return the globals that a script reads but doesn't define."""
    read, defined, todo = set(), set(), [symtable.symtable(source, "<tests>", "exec")]
    while todo:
        table = todo.pop()
        todo += table.get_children()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            if is_module or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported():
                    defined.add(symbol.get_name())
    return read - defined


# --------------------------------------------------------------------------------------------------- 4. the harness
class Ended(BaseException):
    """The program has ended."""


class NoValue(BaseException):
    """The program has answered with an object of a class that isn't allowed."""


class Remote:
    """An answer of the program that isn't a value. The tests may call its `methods` (None: any).

    It equals only itself: the program must not decide what is equal.
    """

    def __init__(self, ask, number, methods):
        self.__dict__.update(ask=ask, number=number, methods=methods)

    def __getattr__(self, name):
        return self.ask(self, "__getattribute__", name)

    def __str__(self):
        return self.ask(self, "__str__") if self.methods is None or "__str__" in self.methods else repr(self)

    def __repr__(self):
        if self.methods is None or "__repr__" in self.methods:
            return self.ask(self, "__repr__")
        return f"<object {self.number} of the program>"

    def __bool__(self):
        if self.methods in (FUNCTION, ITERATOR):
            raise TypeError("the program's answer is no value")
        return self.ask(self, "__bool__") if self.methods is None or "__bool__" in self.methods else True


def asks(method):
    """Return a method that calls the program's method of this name."""

    def ask(remote, *args, **kwargs):
        return remote.ask(remote, method, *args, **kwargs)

    return ask


for method in (
    "setattr", "call", "iter", "next", "len", "getitem", "setitem", "delitem", "contains", "enter", "exit",
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs", "lt", "le", "gt", "ge", "int", "float",
):  # fmt: skip
    setattr(Remote, f"__{method}__", asks(f"__{method}__"))
FUNCTION, ITERATOR = frozenset({"__call__"}), frozenset({"__iter__", "__next__"})
ATTRIBUTES = frozenset({"__getattribute__", "__setattr__"})
CLASS = FUNCTION | ATTRIBUTES


class Session:
    """The tests' side of the conversation with one program."""

    def __init__(self, stdin, stdout):
        self.stdin, self.stdout = stdin, stdout
        self.remotes = {}
        self.methods = {}  # of the classes under test, by number
        self.classes = {}  # the prompt's classes, by name
        self.raised = None  # the program's last exception
        self.is_broken = False  # whether the program has answered with an invalid object

    def get(self, name, is_class, methods=None):
        """Return a global of the program; raise KeyError if it has none of this name."""

        def named(number, what):
            if is_class and what == "class":
                self.methods[number] = methods
                return self.remote(number, CLASS)
            return self.remote(number, FUNCTION)

        return self.exchange(name, [], [], named)[0]

    def remote(self, number, methods):
        return self.remotes.setdefault(number, Remote(self.call, number, methods))

    def call(self, remote, method, *args, **kwargs):
        allowed = remote.__dict__["methods"]
        if allowed is not None and method not in allowed:
            raise TypeError(f"the tests ask an answer of the program for {method}: only values answer it")
        args = list(args)
        instances = []

        def other(value):
            if type(value) is Remote:
                return ["object", value.__dict__["number"]]
            if type(value) not in self.classes.values():
                raise TypeError(f"the tests pass a {type(value).__name__}: only plain values can be sent")
            if not any(value is instance for instance in instances):
                instances.append(value)
            return ["instance", next(i for i, instance in enumerate(instances) if value is instance)]

        def known(number, what):
            if number in self.remotes:
                return self.remotes[number]
            if what == "iterator" or method == "__iter__":
                return self.remote(number, ITERATOR)
            if what == "function":
                return self.remote(number, FUNCTION)
            if what in self.methods:
                methods = self.methods[what]
                return self.remote(number, None if methods is None else methods | ATTRIBUTES)
            self.is_broken = True
            raise NoValue("the program's answer is no value but an object of its own")

        classes = self.classes
        parts = [encoded(part, classes, other) for part in (remote, method, args, kwargs)]
        table = [(type(instance).__name__, encoded(vars(instance), classes, other)) for instance in instances]
        try:
            value, after = self.exchange(parts, instances, table, known)
        except StopIteration as error:
            if method != "__next__":  # it would silently end a loop of the tests, such as map()
                raise RuntimeError("the program raised StopIteration") from error
            raise
        is_remote = type(value) is Remote and allowed is not None and method == "__getattribute__"
        if is_remote and args[0] not in allowed and allowed is not CLASS:
            raise AttributeError(f"the prompt has no method {args[0]}")
        for before, changed in zip(args, after, strict=False):  # arguments that the program may have changed in place
            if type(before) is type(changed) and before is not changed:
                if isinstance(before, (list, bytearray)):
                    before[:] = changed
                elif isinstance(before, (dict, set)):
                    before.clear()
                    before.update(changed)
        return value

    def exchange(self, call, instances, table, known):
        send(self.stdout, dumps((call, list(self.classes), table)), b"q")
        answer = receive(self.stdin)
        if not answer:
            raise Ended
        try:
            returned, *parts = json.loads(answer)
            if returned:
                content, after, table = parts
                instances += [object.__new__(self.classes[name]) for name, _ in table[len(instances) :]]
                for instance, (_, attributes) in zip(instances, table, strict=True):
                    attributes = decoded(attributes, self.classes, instances, known)
                    vars(instance).clear()
                    self.set_attributes(instance, attributes)
                value = decoded(content, self.classes, instances, known)
                after = decoded(after, self.classes, instances, known)
                return value, after if isinstance(after, list) else []
            name, *content = parts
            objects = collections.defaultdict(lambda: "an object")
            args, attributes = [decoded(part, self.classes, objects, lambda *what: "an object") for part in content]
            kind = self.classes.get(name) or getattr(builtins, name)
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                kind = Exception
            try:
                # the prompt's __init__ may have been called with other arguments than those in args
                error = kind.__new__(kind, *args) if name in self.classes else kind(*args)
            except TypeError:  # UnicodeDecodeError and the like need other arguments
                error = Exception(*args)
            self.set_attributes(error, attributes)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ArithmeticError) as bad:
            raise RuntimeError(f"the program's reply is no value: {bad}") from None
        self.raised = error
        raise error

    def set_attributes(self, instance, attributes):
        """Set the attributes, except those that would hide code of the class: methods and cached properties."""
        for name, value in attributes.items():
            if not any(hasattr(vars(kind).get(name), "__get__") for kind in type(instance).__mro__):
                vars(instance)[name] = value


def bind(session, namespace, source, prefix, suffix, library):
    """Define what the tests read: the prompt's own definitions, and the program's function or class under test."""
    statements, hole = parse_prompt(prefix, suffix)
    symbols = symtable.symtable(ast.unparse(ast.Module(statements, [])), "<prompt>", "exec").get_symbols()
    defined = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    missing = {name for name in read_names(source) - defined if not hasattr(builtins, name)}
    known = {name for name in missing if name in library or name in sys.stdlib_module_names}
    if hole is not None and not is_open(hole) and missing - known - {hole.name}:
        statements.append(hole)  # a helper; the response starts after it
        hole = None
    requested = {hole.name} if hole is not None else missing - known or known
    definitions = {node.name: node for node in (*statements, hole) if isinstance(node, ast.ClassDef)}
    for name in sorted(requested):
        is_class = name in definitions if hole is not None else name[:1].isupper()
        try:
            namespace[name] = session.get(name, is_class, method_names(definitions.get(name), definitions))
        except KeyError:
            continue  # the tests will raise NameError
    for name in sorted(known - requested):
        is_module = name in sys.stdlib_module_names
        namespace[name] = importlib.import_module(name) if is_module else library[name]
    tree = ast.Module([statement for statement in statements if not has_hole(statement)], [])
    exec(compile(tree, "<prompt>", "exec", dont_inherit=True), namespace)
    classes = [value for value in namespace.values() if isinstance(value, type) and value.__module__ == "__main__"]
    session.classes = {value.__name__: value for value in classes}


def method_names(definition, definitions):
    """Return the methods that the prompt defines for a class and its bases; None if it leaves them to the response."""
    if definition is None:
        return None
    names = {part.name for part in definition.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for base in definition.bases:
        if isinstance(base, ast.Name) and base.id in definitions:
            names |= method_names(definitions[base.id], definitions) or set()
    if "__len__" in names:
        names.add("__bool__")
    return frozenset(names) or None


def tests(session, source, prefix, suffix, library):
    """Run the tests; return the verdict and the error."""
    namespace = {"__name__": "__main__", "__builtins__": builtins}
    try:
        bind(session, namespace, source, prefix, suffix, library)
        session.raised = None
        exec(compile(source, "<tests>", "exec", dont_inherit=True), namespace)
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
    return ("exception" if session.is_broken else "passed"), None


def harness():
    """Serve requests, running the tests of each in a forked process."""
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the tests may use these
        os.dup2(null, fd)
    library = {}
    for module in LIBRARY:
        public = vars(importlib.import_module(module)).items()
        library |= {name: value for name, value in public if not name.startswith("_")}
    while True:
        try:
            _, prefix, _, suffix, source = (receive(stdin).decode("utf-8", "surrogatepass") for _ in range(5))
        except EOFError:
            return
        try:
            compile(source, "<tests>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            send(stdout, f"the tests: {error}".encode(errors="replace"), b"c")
            continue
        send(stdout, b"", b"c")
        if receive(stdin):  # the program has already failed
            continue
        child = os.fork()
        if child == 0:
            sys.stdout = sys.stderr = printed = io.StringIO()
            session = Session(stdin, stdout)
            verdict, failure = tests(session, source, prefix, suffix, library)
            if failure is not None and failure is not session.raised:  # the program prints its own exceptions
                trace = failure.__traceback__
                traceback.print_exception(type(failure), failure, trace and trace.tb_next)  # without this file's frame
            text = f"{verdict}\n{printed.getvalue()[-TAIL:]}"
            send(stdout, text.encode(errors="replace"), b"v")
            os._exit(ENDED)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != ENDED:  # the tests ended their process
            send(stdout, b"died\n", b"v")


if __name__ == "__main__":
    if sys.argv[1] == "harness":
        harness()
    else:
        program(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
