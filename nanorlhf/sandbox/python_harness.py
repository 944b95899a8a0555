"""The two Python processes of execution.py: the harness runs tests; the program, in a separate sandbox, answers calls.

    python -c SOURCE harness                        requests on stdin, as in harness.java
    python -c SOURCE program CALLS REPLIES PATH     two descriptors, and the program's file

In the guarded run the two exchange values, serialised by type. The reader builds new values and runs no code of the
writer: an object of a subclass is serialised as the type of the standard library that it extends, an object of a class
that the prompt defines by its attributes, which never replace the class's code, and a member of an Enum by its name.
Objects that can change are entries of a table, one per message, so they keep their identity: what a program returns is
its argument or isn't, and what it changes in place, at any depth, changes in the tests. A program may also answer with
a function, which the tests can call, or an iterator, which they can advance, and call the tests' functions that it got
as arguments. No other object is accepted, and it ends the tests.

The tests use the prompt's helpers, constants, classes and imports, which we parse and run again in the harness. The
program is asked only for what the response completes: a function, or one method of a class, whose other methods run in
the harness. If the response is the whole program, it is asked for every name that the tests read and that neither they
nor Python define, nor LIBRARY, for forgotten imports; but not for a function that judges another one's answers. Objects
of its classes stay in the program, which answers their methods; two are equal if their attributes are.

Only the program's process can read a value, so it encodes its answers itself. The program's code can't tamper with the
encoder: we rebuild it for each answer, and while the program's code runs, nothing that Python code can reach refers to
the parts it will be built from (see `answer_calls`). Some code escapes this: code of the program that runs at the same
time, from a thread, a signal handler, a trace function or a key's __eq__; memory written with ctypes; bytes written to
the pipe. Whatever a program sends that way counts as its answer, as if it had returned it. That doesn't help it: it
still doesn't know what the tests expect, and the values are compared in another process. A program that sends more
replies than requested doesn't pass.

After the guarded run has passed, the program is loaded again, in a new process of its sandbox, and the tests run there
as a script would run them.

Uses only the standard library and doesn't import this package, because it runs as a script.
"""

import builtins
import collections.abc
import decimal
import enum
import fractions
import functools
import json
import os
import select
import sys
import time
from itertools import chain, pairwise, repeat
from marshal import dumps, loads
from os import getpid, read, write
from struct import pack, unpack
from sys import intern
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
)

if sys.argv[1:2] != ["program"]:  # programs start often and don't need these imports
    import ast
    import io
    import symtable
    import traceback

    FUNCTION_NODES = ast.FunctionDef, ast.AsyncFunctionDef

ENDED = 77  # exit status of a process that has sent its verdict
TAIL = 8000  # characters of the tests' output to keep
HOLE = "nanorlhf_response"  # placeholder of the response in the prompt's syntax tree
ASK = "nanorlhf_ask"  # in its place, the call of the program's method
PASSED, FAILED = "nanorlhf_passed", "nanorlhf_failed"  # what assertions call
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


# -------------------------------------------------------------------------------------------------------- 1. values
Decimal, Fraction, OrderedDict = decimal.Decimal, fractions.Fraction, collections.OrderedDict
defaultdict, deque = collections.defaultdict, collections.deque
EnumType = type(enum.Enum)
# bypass metaclasses, which may return other attributes
get_mro, get_type_name, get_flags, get_members, get_module = (
    type.__dict__[name].__get__ for name in ("__mro__", "__name__", "__flags__", "__dict__", "__module__")
)
IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: set for the interpreter's types, never for a program's
get_numerator, get_denominator = (vars(Fraction)[name].__get__ for name in ("_numerator", "_denominator"))
get_factory, get_maxlen = vars(defaultdict)["default_factory"].__get__, vars(deque)["maxlen"].__get__
VIEWS: tuple = (  # a dictionary's views, rebuilt from another dictionary
    ("dict_keys", type({}.keys()), lambda items: dict.fromkeys(items).keys()),
    ("dict_values", type({}.values()), lambda items: dict(enumerate(items)).values()),
    ("dict_items", type({}.items()), lambda items: dict(items).items()),
)
FIXED = ("tuple", tuple), ("frozenset", frozenset), *((name, kind) for name, kind, _ in VIEWS)
MAKE = dict(FIXED) | {name: make for name, _, make in VIEWS}
CHANGEABLE = (
    *(("list", list), ("set", set), ("deque", deque), ("bytearray", bytearray), ("Counter", collections.Counter)),
    *(("defaultdict", defaultdict), ("OrderedDict", OrderedDict), ("dict", dict)),
)  # fmt: skip
KINDS: dict = dict(CHANGEABLE)
CONSTANTS: tuple = ("Ellipsis", ...), ("NotImplemented", NotImplemented)
# types of C modules: what makes an equal value
PARTS = {
    **{("datetime", name): ("isoformat",) for name in ("date", "time", "datetime")},
    ("datetime", "timedelta"): ("days", "seconds", "microseconds"), ("array", "array"): ("typecode", "tobytes"),
    ("builtins", "memoryview"): ("tobytes",), ("re", "Pattern"): ("pattern", "flags"),
    ("re", "Match"): ("re", "string", "pos", "endpos", "span"),
}  # fmt: skip


def get_attributes(instance):
    """Return what is in the instance's __dict__ and slots, whatever its class returns for them."""
    attributes = {}
    for kind in get_mro(type(instance)):
        members = get_members(kind)
        attributes_slot = members.get("__dict__")
        if type(attributes_slot) is GetSetDescriptorType:
            attributes.update(attributes_slot.__get__(instance))
        if not get_flags(kind) & IMMUTABLE:
            for name in members:
                if type(members[name]) is MemberDescriptorType:
                    try:
                        attributes[name] = members[name].__get__(instance)
                    except AttributeError:  # an empty slot
                        continue
    return attributes


def set_attribute(instance, name, value):
    for kind in get_mro(type(instance)):
        member = get_members(kind).get(name)
        if type(member) is MemberDescriptorType:
            member.__set__(instance, value)
            return
    instance.__dict__[name] = value


def changeable(value, classes):
    """Return the type of an object that belongs in the table: a container's, or "instance" for one of the prompt's
    classes; None for other objects.
    """
    kind = type(value)  # isinstance would ask the value for its __class__
    for name, container in CHANGEABLE:
        if issubclass(kind, container):
            return name
    is_plain = issubclass(kind, (int, float, str, bytes, tuple, type)) or type(kind) is EnumType
    return "instance" if classes.get(get_type_name(kind)) is kind and not is_plain else None


def encoded(value, classes, objects, positions, other):
    """Encode a value as JSON, without running code of its class.

    classes: the prompt's, by name; objects, positions: the table's objects so far, and their positions by id;
    other(object) encodes everything else
    """
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return ["int", format(value, "x")]  # hexadecimal: the number of decimal digits is limited
    if changeable(value, classes):
        if id(value) not in positions:
            positions[id(value)] = len(objects)
            objects.append(value)
        return ["at", positions[id(value)]]
    is_prompt_class = classes.get(get_type_name(kind)) is kind
    if is_prompt_class and type(kind) is EnumType:  # also IntEnum and StrEnum
        attributes = get_attributes(value)
        number = attributes["_value_"] if type(attributes["_value_"]) is int else None
        return ["member", get_type_name(kind), attributes["_name_"], number]
    if issubclass(kind, type) and classes.get(get_type_name(value)) is value:
        return ["class", get_type_name(value)]
    if issubclass(kind, tuple):
        items = [encoded(item, classes, objects, positions, other) for item in tuple.__iter__(value)]
        if is_prompt_class:
            return ["named", get_type_name(kind), *items]
        fields = get_members(kind).get("_fields")
        if type(fields) is tuple and len(fields) == len(items) and {type(field) for field in fields} == {str}:
            return ["fields", get_type_name(kind), list(fields), *items]
        return ["tuple", *items]
    if issubclass(kind, int):
        return ["int", format(int.__index__(value), "x")]
    if issubclass(kind, float):
        return ["float", float.hex(value)]
    if issubclass(kind, str):
        return ["str", str.__str__(value)]
    if issubclass(kind, bytes):
        return ["bytes", bytes.hex(value)]
    if kind is complex:
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if kind is range:
        items = value.start, value.stop, value.step
        return ["range", *[encoded(part, classes, objects, positions, other) for part in items]]
    if kind is Decimal:
        return ["Decimal", Decimal.__str__(value)]
    if kind is Fraction:
        items = get_numerator(value), get_denominator(value)
        return ["Fraction", *[encoded(part, classes, objects, positions, other) for part in items]]
    for name, container in FIXED:
        if issubclass(kind, container):
            items = container.__iter__(value)
            return [name, *[encoded(item, classes, objects, positions, other) for item in items]]
    for name, constant in CONSTANTS:
        if value is constant:
            return ["constant", name]
    module = get_module(kind) if get_flags(kind) & IMMUTABLE else ""
    if (module, get_type_name(kind)) in PARTS:
        members = get_members(kind)
        zone = members["tzinfo"].__get__(value) if "tzinfo" in members else None
        if zone is None or get_flags(type(zone)) & IMMUTABLE:  # another one would run code of the program
            parts = [members[name].__get__(value) for name in PARTS[module, get_type_name(kind)]]
            parts = [part() if type(part) is BuiltinFunctionType else part for part in parts]
            items = [encoded(part, classes, objects, positions, other) for part in parts]
            return ["parts", module, get_type_name(kind), *items]
    return other(value)


def entry(value, classes, objects, positions, other):
    """Encode the contents of an object of the table: its type, a detail of it, and its items."""
    name, detail = changeable(value, classes), None
    if name == "bytearray":
        return [name, bytearray.hex(value)]
    if name in ("list", "set", "deque"):
        detail = get_maxlen(value) if name == "deque" else None
        items = KINDS[name].__iter__(value)
        return [name, detail, *[encoded(item, classes, objects, positions, other) for item in items]]
    if name == "instance":
        detail, pairs = get_type_name(type(value)), get_attributes(value).items()
    else:
        keys = OrderedDict.__iter__(value) if name == "OrderedDict" else dict.__iter__(value)
        pairs = [(key, dict.__getitem__(value, key)) for key in keys]
        factory = get_factory(value) if name == "defaultdict" else None
        is_type = issubclass(type(factory), type) and get_flags(factory) & IMMUTABLE
        detail = get_type_name(factory) if is_type else encoded(factory, classes, objects, positions, other)
    return [name, detail, *[[encoded(part, classes, objects, positions, other) for part in pair] for pair in pairs]]


def packed(values, classes, objects, positions, other):
    """Encode the values of a message, and its table: the contents of every object that can be reached from them."""
    parts = [encoded(value, classes, objects, positions, other) for value in values]
    return parts, [entry(value, classes, objects, positions, other) for value in objects]  # grows during the loop


def unpacked(parts, table, classes, objects, get_object, set_attributes):
    """Decode what `packed` returned; `objects` are those that the reader already has, at the start of the table.

    classes: the prompt's, by name; get_object(number, ...) returns any other object; set_attributes(instance, dict).
    An entry None is an object that hasn't changed.
    """
    for name, detail, *_ in table[len(objects) :]:
        if name == "instance":
            objects.append(object.__new__(classes[detail]))
        else:
            objects.append(deque((), detail) if name == "deque" else KINDS[name]())
    for value, content in zip(objects, table, strict=True):
        if content is None:
            continue
        name, detail, *items = content
        if name == "bytearray":
            value[:] = bytes.fromhex(detail)
            continue
        if name in ("list", "set", "deque"):
            items = [decoded(item, classes, objects, get_object) for item in items]
        else:
            items = [[decoded(part, classes, objects, get_object) for part in item] for item in items]
        if name == "instance":
            set_attributes(value, dict(items))
            continue
        value.clear()
        if name == "set":
            value.update(items)
        elif name in ("list", "deque"):
            value.extend(items)
        else:
            for key, item in items:
                value[key] = item
        if name == "defaultdict":
            is_type = type(detail) is str
            factory = builtin_type(detail) if is_type else decoded(detail, classes, objects, get_object)
            value.default_factory = factory
    return [decoded(part, classes, objects, get_object) for part in parts]


def builtin_type(name):
    """Return a type of Python by its name. Raises ValueError for other built-ins, such as exit."""
    kind = getattr(builtins, name)
    if not isinstance(kind, type):
        raise ValueError(name)
    return kind


def decoded(data, classes, objects, get_object):
    """Decode what `encoded` returned."""
    if data is None or data is True or data is False:
        return data
    name, *parts = data
    if name == "int":
        return int(parts[0], 16)
    if name == "at":
        return objects[parts[0]]
    if name == "float":
        return float.fromhex(parts[0])
    if name == "str":
        return intern(str(parts[0]))  # like the literals in the tests
    if name == "bytes":
        return bytes.fromhex(parts[0])
    if name == "complex":
        return complex(*[float.fromhex(part) for part in parts])
    if name == "Decimal":
        return Decimal(parts[0])
    if name == "member":
        kind, (name, number) = classes[parts[0]], parts[1:]
        return kind[name] if name in kind.__members__ else kind(number)  # a combination of flags has no name
    if name == "class":
        return classes[parts[0]]
    if name == "constant":
        return dict(CONSTANTS)[parts[0]]
    if name == "object":
        return get_object(*parts)
    if name == "fields":
        items = [decoded(part, classes, objects, get_object) for part in parts[2:]]
        return named_tuple(parts[0], tuple(parts[1]))(*items)
    if name == "named":
        items = [decoded(part, classes, objects, get_object) for part in parts[1:]]
        return tuple.__new__(classes[parts[0]], items)
    if name == "parts":
        return from_parts(parts[1], [decoded(part, classes, objects, get_object) for part in parts[2:]])
    items = [decoded(part, classes, objects, get_object) for part in parts]
    if name == "range":
        return range(*items)
    if name == "Fraction":
        return Fraction(*items)
    return MAKE[name](items)


def from_parts(name, parts):
    """Make a value of a type in PARTS."""
    if name == "array":
        return __import__("array").array(parts[0], parts[1])
    if name == "memoryview":
        return memoryview(*parts)
    if name == "Pattern":
        return __import__("re").compile(*parts)
    if name == "Match":
        pattern, text, start, end, span = parts
        matches = [pattern.match(text, span[0], end), pattern.search(text, start, end), pattern.fullmatch(text, *span)]
        return [match for match in matches if match and match.span() == span][0]
    kind = getattr(__import__("datetime"), name)
    return kind(*parts) if name == "timedelta" else kind.fromisoformat(*parts)


@functools.cache
def named_tuple(name, fields):
    return collections.namedtuple(name, fields)


# --------------------------------------------------------------------------------------------------- 2. the program
class Missing(TypeError):
    """The object has no such special method. list() asks for a length, but works without one."""


FUNCTIONS = FunctionType, BuiltinFunctionType, MethodType, functools.partial, type(functools.cache(len))
get_args = BaseException.__dict__["args"].__get__
to_json = vars(json.encoder)["c_make_encoder"](
    None, None, json.encoder.encode_basestring_ascii, None, ": ", ", ", False, False, False
)


def program(calls, replies, path):
    """Run the file in a forked process that answers calls, and then, if asked to, in another one that runs tests."""
    with open(path, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    try:
        code = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        send(replies, b"compile_error")
        raise
    send(replies, b"compiled")
    sys.argv = [path]
    home = os.getcwd()
    enter_home(f"{home}/guarded")
    child = os.fork()
    if child == 0:
        answer_calls(calls, replies, path, code)
        return
    wait(child)
    if not select.select([calls], [], [], 0)[0]:  # it has ended before the tests did
        return
    try:
        tests = receive(calls).decode("utf-8", "surrogatepass")
    except EOFError:
        return
    os.spawnv(os.P_WAIT, "/bin/rm", ["rm", "-rf", f"{home}/guarded"])
    enter_home(f"{home}/plain")
    child = os.fork()
    if child == 0:
        os.close(calls)
        run_plainly(replies, path, code, tests)
        return
    wait(child)


def enter_home(home):
    """Make an empty home for a run and enter it."""
    os.mkdir(home)
    os.chdir(home)
    os.environ["HOME"] = os.environ["TMPDIR"] = home


def wait(child):
    """Wait for a process; if it failed, end with its status."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        os._exit(status if status > 0 else 128 - status)


def new_main(path):
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__file__ = path
    return module.__dict__


def run_plainly(replies, path, code, tests):
    """Run the program's top level and then its tests in one namespace; send the verdict.

    What it prints on stdout is left out: the guarded run has printed it.
    """
    pid = getpid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    namespace = new_main(path)
    load(code, namespace, replies, pid)
    tests_code = compile(tests, "<tests>", "exec", dont_inherit=True)
    namespace.update(forgotten_imports(names_in(tests_code) - {*namespace, *vars(builtins)}))
    load(tests_code, namespace, replies, pid, b"passed")


def forgotten_imports(names):
    """Return name -> value of those names that are modules of the standard library or public names in LIBRARY."""
    values = {}
    for name in names:
        owners = [module for module in map(__import__, LIBRARY) if hasattr(module, name)]
        if name in sys.stdlib_module_names:
            values[name] = __import__(name)
        elif owners and not name.startswith("_"):
            values[name] = getattr(owners[-1], name)
    return values


def load(code, namespace, replies, pid, done=b""):
    """Run a module's code and send how it ended, if it hasn't ended well or there is a word for that."""
    try:
        exec(code, namespace)
    except BaseException as error:
        if os.getpid() == pid:  # not in a forked child
            words = {MemoryError: b"memory", SystemExit: b"exit"}
            if done == b"passed":
                words[AssertionError] = b"wrong_answer"
            send(replies, words.get(type(error), b"exception"))
        raise
    if os.getpid() != pid:
        raise SystemExit
    if done:
        send(replies, done)


def answer_calls(calls, replies, path, code):
    """Run the file as a script, then answer calls."""
    pid = getpid()
    namespace = new_main(path)
    objects, numbers = [], {}  # objects that the tests refer to, and their numbers by id
    # The program's code can change this frame's variables, every global and every function. So we rebuild `perform` and
    # `reply` for each call, from code objects and C functions, which can't be changed. Python evaluates from left to
    # right: while the program's code runs, the parts they will be built from are on the interpreter's stack, out of
    # reach. No trace function may be active during `reply`.
    parts = FunctionType, dict, perform.__code__, reply.__code__, TOOLS, sys.settrace, sys.setprofile
    for make, names, perform_code, reply_code, tools, trace, profile in (
        repeat(parts),
        load(code, namespace, replies, pid, b"loaded"),
    )[0]:
        try:
            raised = make(
                reply_code,
                names(
                    tools,
                    replies=replies,
                    pid=pid,
                    known=objects,
                    numbers=numbers,
                    outcome=make(
                        perform_code,
                        names(tools, calls=calls, replies=replies, known=objects, numbers=numbers, module=namespace),
                    )(),
                    untraced=(trace(None), profile(None)),
                ),
            )()
        except EOFError:  # there are no more calls
            return
        if os.getpid() != pid:
            return
        if raised is not None:
            sys.excepthook(type(raised), raised, raised.__traceback__)


def perform():
    """Receive and make a call; return if it succeeded, its value or exception, and the table for `reply`."""
    namespace = globals()
    for name, code, defaults in CODES:
        namespace[name] = FunctionType(code, namespace, name, defaults)
    module, known, numbers = namespace["module"], namespace["known"], namespace["numbers"]
    calls, replies = namespace["calls"], namespace["replies"]
    call, table, names = loads(receive(calls))
    objects, classes = [], {name: module.get(name) for name in names}
    callbacks = {}

    def set_attributes(instance, attributes):
        for name, value in attributes.items():
            set_attribute(instance, name, value)

    def get_object(number, what=None):
        if what == "type":
            return builtin_type(number)
        if what == "callback":
            return callbacks.setdefault(number, callback(number))
        if what == "iterator":
            return iterate(callback(number))
        return known[number]

    def iterate(function):
        while True:
            try:
                value = function()
            except StopIteration:
                return
            yield value

    def callback(number):
        """Return a function that calls one of the tests'."""

        def function(*args, **kwargs):
            arguments_sent = []
            content = packed([args, (*kwargs.items(),)], classes, arguments_sent, {}, keep)
            send(replies, "".join(to_json(["callback", number, *content], 0)).encode())
            done, parts, table = loads(receive(calls))
            [value] = unpacked(parts, table, classes, [], get_object, set_attributes)
            if done is not True:
                raise getattr(builtins, done, Exception)(*value)
            return value

        return function

    def keep(value):
        """Number an object of the program that an argument of a callback contains."""
        if id(value) not in numbers:
            numbers[id(value)] = len(known)
            known.append(value)
        return ["object", numbers[id(value)], "iterator" if hasattr(type(value), "__next__") else "function"]

    is_name = type(call) is str
    try:
        if is_name:
            value = module[call]
        else:
            parts = unpacked(call, table, classes, objects, get_object, set_attributes)
            target, method, arguments, keywords = parts
            kind = type(target)
            if method == "__state__":
                value = numbers.get(id(kind)), get_attributes(target)
            elif method == "__members__":
                members = [(*vars(base).items(),) for base in arguments[0].__mro__ if not get_flags(base) & IMMUTABLE]
                kinds = FunctionType, property, staticmethod, classmethod
                value = [(name, type(member).__name__) for name, member in chain(*members) if type(member) in kinds]
            elif "." in method:  # a function in the dictionary of a class
                owner, name, *path = method.split(".")
                value = [vars(base)[name] for base in module[owner].__mro__ if name in vars(base)][0]
                for name in path:
                    value = getattr(value, name)
                value = value(*arguments, **dict(keywords))
            elif method == "__bool__":  # falls back to the length
                value = bool(target)
            elif hasattr(kind, method):
                value = getattr(kind, method)(target, *arguments, **dict(keywords))
            else:
                raise Missing(f"{kind.__name__} has no {method}")
    except BaseException as error:
        return False, error, objects, table, classes, is_name
    return True, value, objects, table, classes, is_name


def reply():
    """Send the outcome of `perform` without running code of the program; return an exception to print, or None."""
    namespace = globals()
    for name, code, defaults in CODES:
        namespace[name] = FunctionType(code, namespace, name, defaults)
    known, numbers = namespace["known"], namespace["numbers"]
    returned, value, objects, table, classes, is_name = namespace["outcome"]
    if getpid() != namespace["pid"]:  # a forked child
        return None
    positions = {id(instance): position for position, instance in enumerate(objects)}

    def other(value):
        kind = type(value)
        number = dict.get(numbers, id(value))
        if number is None:
            number = list.__len__(known)
            list.append(known, value)
            dict.__setitem__(numbers, id(value), number)
        if issubclass(kind, type):
            is_builtin = get_flags(value) & IMMUTABLE and get_module(value) == "builtins"
            return ["object", get_type_name(value), "type"] if is_builtin else ["object", number, "class"]
        if True in [kind is function for function in FUNCTIONS]:
            return ["object", number, "function"]
        if get_flags(kind) & IMMUTABLE and get_members(kind).get("__next__"):
            return ["object", number, "iterator"]
        return ["object", number, dict.get(numbers, id(kind))]

    error = None if returned else value
    try:
        if returned:
            kinds, values = [], [value]
        else:
            kinds = [[get_module(kind), get_type_name(kind)] for kind in get_mro(type(error))]
            values = [get_args(error), (*get_attributes(error).items(),)]
        parts, after = packed(values, classes, objects, positions, other)
        changed = [new if new != old else None for new, old in zip(after, table, strict=False)]
        text = "".join(to_json([returned, kinds, parts, changed + after[len(changed) :]], 0))
    except Exception as problem:  # too deep, or too large
        error = error or problem
        kinds = [["builtins", get_type_name(type(problem))]]
        text = "".join(to_json([False, kinds, [["tuple"], ["tuple"]], [None for _ in table]], 0))
    send(namespace["replies"], text.encode())
    if error is not None and issubclass(type(error), SystemExit):
        raise error
    is_expected = is_name or issubclass(type(error), (StopIteration, Missing))
    return None if is_expected else error


def names_in(code):
    return {*code.co_names, *[name for part in code.co_consts if type(part) is CodeType for name in names_in(part)]}


COPIED = (
    *(read_exactly, receive, send, get_attributes, set_attribute, changeable),
    *(encoded, entry, packed, unpacked, builtin_type, decoded, from_parts),
)
CODES = tuple((f.__name__, f.__code__, f.__defaults__) for f in COPIED)
TOOLS = tuple(
    (name, value)
    for name, value in (vars(builtins) | globals()).items()
    if any(name in names_in(code) for code in (perform.__code__, reply.__code__, *[code for _, code, _ in CODES]))
)


# --------------------------------------------------------------------------------------------------- 3. the prompt
def parse_prompt(prefix, suffix):
    """Return the prompt's top-level statements, and the statement that the response completes, or None."""
    *_, line = lines = prefix.split("\n")
    margins = [text[: len(text) - len(text.lstrip())] for text in lines if text.strip()] or [""]
    margins = sorted({*margins, margins[-1] + "    ", margins[-1] + "\t", ""}, key=len, reverse=True)
    fillers = [margin + HOLE + "\n" for margin in margins]  # the innermost block first
    if line.strip():  # cut in a line; " + " if the line may end here
        fillers = [f" {HOLE}\n", f" + {HOLE}\n", *("\n" + filler for filler in fillers)]
    elif line:
        fillers = [f"{HOLE}\n"]
    for rest in (suffix, ""):
        for filler in fillers:
            tree = parsed(prefix + filler + rest)
            if tree is not None and has_hole(tree) and is_reached(tree):
                statements = [statement for statement in tree.body if not has_hole(statement)]
                [hole] = [statement for statement in tree.body if has_hole(statement)]
                is_response = isinstance(hole, ast.Expr) and isinstance(hole.value, ast.Name)
                return statements, None if is_response else hole
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


def defined_names(statements):
    """Return the names that these statements define."""
    symbols = symtable.symtable(ast.unparse(ast.Module(statements, [])), "<prompt>", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def is_open(definition):
    """Return True if the response must continue this statement: it is cut within a line, or has only a docstring.

    Otherwise it may be complete, so that the response starts after it.
    """
    kinds = (*FUNCTION_NODES, ast.ClassDef)
    holders = [node for node in ast.walk(definition) if isinstance(node, kinds) and has_hole(node)]
    if not holders:
        return True
    inner = holders[-1]
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

    The program doesn't decide what is equal: an object of a class under test equals one with the same attributes.
    """

    def __init__(self, session, number, methods):
        self.__dict__.update(session=session, number=number, methods=methods)

    def __getattr__(self, name):
        return self.session.ask(self, "__getattribute__", name)

    def __eq__(self, other):
        if self is other or type(other) is not Remote or self.methods is not None or other.methods is not None:
            return self is other
        state, other_state = self.session.ask(self, "__state__"), self.session.ask(other, "__state__")
        return state[0] is not None and state == other_state

    def __hash__(self):
        return hash(self.number)

    def __str__(self):
        return self.session.ask(self, "__str__") if self.methods is None or "__str__" in self.methods else repr(self)

    def __repr__(self):
        if self.methods is None or "__repr__" in self.methods:
            return self.session.ask(self, "__repr__")
        return f"<object {self.number} of the program>"

    def __bool__(self):
        if self.methods in (FUNCTION, ITERATOR):
            raise TypeError("the program's answer is no value")
        return self.session.ask(self, "__bool__") if self.methods is None or "__bool__" in self.methods else True


def asks(method):
    """Return a method that calls the program's method of this name."""

    def ask(remote, *args, **kwargs):
        return remote.session.ask(remote, method, *args, **kwargs)

    return ask


for method in (
    "setattr", "call", "iter", "next", "len", "getitem", "setitem", "delitem", "contains", "enter", "exit",
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs", "lt", "le", "gt", "ge", "int", "float",
):  # fmt: skip
    setattr(Remote, f"__{method}__", asks(f"__{method}__"))
POWERFUL = eval, exec, compile, open, __import__, getattr, setattr, delattr, globals, locals, vars, breakpoint, input
FUNCTION, ITERATOR = frozenset({"__call__"}), frozenset({"__iter__", "__next__"})
CLASS = FUNCTION | {"__getattribute__", "__setattr__"}


class Session:
    """The tests' side of the conversation with one program."""

    def __init__(self, stdin, stdout, names):
        self.stdin, self.stdout = stdin, stdout
        self.names = names  # that the tests read
        self.remotes = {}
        self.under_test = set()  # the program's classes whose objects the tests may ask for anything, by number
        self.classes = {}  # the prompt's classes, by name
        self.fields = {}  # the attributes that their code assigns to, by class
        self.functions = []  # of the tests, that the program may call
        self.raised = []  # the program's exceptions
        self.is_broken = False  # whether the program has answered with an invalid object
        self.calls = 0  # answered
        self.num_passed = 0  # assertions of the tests
        self.failures = []  # what the others raised

    def get(self, name, is_class):
        """Return a global of the program; raise KeyError if it has none of this name."""

        def named(number, what=None):
            if is_class and what == "class":
                self.under_test.add(number)
                return self.remote(number, CLASS)
            return self.remote(number, FUNCTION)

        return self.exchange(name, [], [], named)

    def remote(self, number, methods):
        return self.remotes.setdefault(number, Remote(self, number, methods))

    def ask(self, remote, method, *args, **kwargs):
        """Call a method of an object of the program, or for None a function in one of its classes: Class.name."""
        allowed = None if remote is None else remote.__dict__["methods"]
        if allowed is not None and method not in allowed:
            raise TypeError(f"the tests ask an answer of the program for {method}: only values answer it")

        def known(number, what=None):
            if what == "type" and number in self.names:  # a test that expects a type names it
                return builtin_type(number)
            if number in self.remotes:
                return self.remotes[number]
            if what == "iterator" or method == "__iter__":
                return self.remote(number, ITERATOR)
            if what == "function":
                return self.remote(number, FUNCTION)
            if what in self.under_test:
                return self.remote(number, None)
            self.is_broken = True
            raise NoValue("the program's answer is no value but an object of its own")

        objects = []
        call, table = packed((remote, method, args, (*kwargs.items(),)), self.classes, objects, {}, self.other)
        try:
            value = self.exchange(call, table, objects, known)
        except StopIteration as error:
            if method != "__next__":  # it would silently end a loop of the tests, such as map()
                raise RuntimeError("the program raised StopIteration") from error
            raise
        is_remote = type(value) is Remote and allowed is not None and method == "__getattribute__"
        if is_remote and args[0] not in allowed and allowed is not CLASS:
            raise AttributeError(f"the prompt has no method {args[0]}")
        return value

    def other(self, value):
        """Encode an object of the tests that isn't a value."""
        if type(value) is Remote:
            return ["object", value.__dict__["number"]]
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return ["object", value.__name__, "type"]
        is_iterator = isinstance(value, collections.abc.Iterator)
        if any(value is function for function in POWERFUL) or not (callable(value) or is_iterator):
            raise TypeError(f"the tests pass a {type(value).__name__}: only values and functions can be sent")
        if not any(value is function for function in self.functions):
            self.functions.append(value)
        number = next(i for i, function in enumerate(self.functions) if value is function)
        return ["object", number, "iterator" if is_iterator else "callback"]

    def exchange(self, call, table, objects, known):
        """Send a call and run the tests' functions that the program calls; return its answer or raise its exception."""
        message = call, table, list(self.classes)
        while True:
            send(self.stdout, dumps(message), b"q")
            answer = receive(self.stdin)
            if not answer:
                raise Ended
            try:
                returned, kinds, parts, table = json.loads(answer)
                known_objects = [] if returned == "callback" else objects
                values = unpacked(parts, table, self.classes, known_objects, known, self.set_attributes)
                self.calls += returned != "callback" and type(call) is not str
                if returned is True:
                    return values[0]
                if returned is False:
                    error = self.exception(kinds, *values)
                    break
                function, (args, kwargs) = self.functions[kinds], values
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError) as bad:
                raise RuntimeError(f"the program's reply is no value: {bad}") from None
            message = self.run(function, args, dict(kwargs))
        self.raised.append(error)
        raise error

    def run(self, function, args, kwargs):
        """Run a function of the tests for the program; return the message with its result."""
        try:
            is_iterator = isinstance(function, collections.abc.Iterator)
            value = next(function) if is_iterator else function(*args, **kwargs)
            return (True, *packed([value], self.classes, [], {}, self.other))
        except Exception as error:
            return (type(error).__name__, *packed([error.args], self.classes, [], {}, self.other))

    def exception(self, kinds, args, attributes):
        """Return the program's exception, as the first of its classes that Python or the prompt defines, or the tests
        name. For example, unittest.SkipTest would end a test without a failure.
        """
        for module, name in kinds:
            is_known = module == "builtins" or name in self.names
            kind = self.classes.get(name)
            if kind is None and is_known:
                kind = getattr(sys.modules.get(module), name, None)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                break
        else:
            kind = Exception
        try:
            # the prompt's __init__ may have been called with other arguments than those in args
            error = kind.__new__(kind, *args) if kind.__module__ != "builtins" else kind(*args)
            error.args = args
        except TypeError:  # UnicodeDecodeError and the like need other arguments
            error = Exception(*args)
        self.set_attributes(error, dict(attributes))
        return error

    def set_attributes(self, instance, attributes):
        """Set the attributes, except those that would hide code or constants of the prompt's class."""
        for name in [*getattr(instance, "__dict__", ())]:
            if name not in attributes:
                del instance.__dict__[name]
        for name, value in attributes.items():
            class_values = [vars(kind)[name] for kind in type(instance).__mro__ if name in vars(kind)]
            is_slot = class_values and type(class_values[0]) is MemberDescriptorType
            is_field = not class_values or is_slot or name in self.fields.get(type(instance).__name__, ())
            is_field |= class_values == [None] and not name.isupper() and type(value) is not Remote  # a default
            if is_field and (is_slot or not any(hasattr(each, "__get__") for each in class_values)):
                set_attribute(instance, name, value)


def bind(session, namespace, source, prefix, suffix):
    """Define what the tests read: the prompt's own definitions, and what the response completes."""
    statements, hole = parse_prompt(prefix, suffix)
    missing = {name for name in read_names(source) - defined_names(statements) if not hasattr(builtins, name)}
    imports = forgotten_imports(missing)
    known = {*imports}
    completed = set() if hole is None else defined_names([hole])
    if hole is not None and not is_open(hole) and missing - known - completed:
        statements.append(hole)  # a helper; the response starts after it
        hole = None
    is_cut = prefix[-1:] not in ("", "\n")
    if hole is not None:
        requested = completed | (missing - known if is_cut and not isinstance(hole, ast.ClassDef) else set())
    else:
        requested = missing - known - judges(source, missing - known) or known
    if not requested:  # the prompt is complete: what it defines last is under test
        for i, statement in reversed([*enumerate(statements)]):
            if requested := defined_names([statement]) & read_names(source):
                del statements[i]
                break
    under_test = None  # a class, if the response may also add methods
    if isinstance(hole, ast.ClassDef) and (members := [part for part in hole.body if isinstance(part, FUNCTION_NODES)]):
        under_test = None if is_open(hole) else hole.name
        namespace[ASK] = functools.partial(session.ask, None)
        for method in filter(has_hole, members):
            method.body = ask_program(hole.name, method)
        hole.body = [part for part in hole.body if not has_hole(part)]
        statements.append(hole)
        requested -= {hole.name}
    for name in sorted(requested):
        try:
            namespace[name] = session.get(name, isinstance(hole, ast.ClassDef) or name[:1].isupper())
        except KeyError:
            continue  # the tests will raise NameError
    namespace |= {name: imports[name] for name in known - requested}
    tree = ast.Module([statement for statement in statements if not has_hole(statement)], [])
    ast.fix_missing_locations(tree)
    exec(compile(tree, "<prompt>", "exec", dont_inherit=True), namespace)
    classes = [value for value in namespace.values() if isinstance(value, type) and value.__module__ == "__main__"]
    session.classes = {value.__name__: value for value in classes}
    if under_test:
        add_methods(session, namespace[under_test])
    for value in classes:
        session.fields[value.__name__] = {*vars(value).get("__annotations__", ()), *assigned_attributes(tree)}


def assigned_attributes(tree):
    """Return the attributes that the prompt's code assigns to some object, but for constants."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in nodes if not node.attr.isupper()}


# the function below a decorator
INNER = {
    "property": ".fget", "cached_property": ".func", "staticmethod": ".__func__", "classmethod": ".__func__",
    "setter": ".fset", "deleter": ".fdel", "getter": ".fget",
}  # fmt: skip


def add_methods(session, owner):
    """Add the methods that the program's class has and the prompt's doesn't."""
    for name, kind in session.ask(None, "__members__", owner):
        if not hasattr(owner, name) and name not in ("__getattr__", "__bool__"):
            method = asking(session, f"{owner.__name__}.{name}{INNER.get(kind, '')}")
            wrap = {"property": property, "staticmethod": staticmethod, "classmethod": classmethod}.get(kind)
            setattr(owner, name, wrap(method) if wrap else method)


def asking(session, path):
    def method(*args, **kwargs):
        return session.ask(None, path, *args, **kwargs)

    return method


def ask_program(owner, method):
    """Return a method's body: ask for the function below the decorators, in the dictionary of the program's class."""
    path = "".join(INNER.get(ast.unparse(each).split(".")[-1], "") for each in method.decorator_list)
    name = method.name
    if name.startswith("__") and not name.endswith("__"):
        name = f"_{owner.lstrip('_')}{name}"
    args = method.args
    arguments = [ast.Name(each.arg, ast.Load()) for each in (*args.posonlyargs, *args.args)]
    arguments += [ast.Starred(ast.Name(args.vararg.arg, ast.Load()), ast.Load())] if args.vararg else []
    keywords = [ast.keyword(each.arg, ast.Name(each.arg, ast.Load())) for each in args.kwonlyargs]
    keywords += [ast.keyword(None, ast.Name(args.kwarg.arg, ast.Load()))] if args.kwarg else []
    call = ast.Call(ast.Name(ASK, ast.Load()), [ast.Constant(f"{owner}.{name}{path}"), *arguments], keywords)
    return [ast.Return(call)]


def judges(source, names):
    """Return the names of a whole program that the tests use to judge the answers of its other names.

    Only the response defines such a helper, so the program would decide: assert close(f(2), 4).
    """
    nodes, judging = [*ast.walk(ast.parse(source))], set()
    answers = {*names}  # names of functions, and of variables with their answers

    def mentioned(roots):
        return {node.id for root in roots for node in ast.walk(root) if isinstance(node, ast.Name)} & answers

    conditions = []
    for node in nodes:
        if isinstance(node, ast.Assign) and mentioned([node.value]):
            answers |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        elif isinstance(node, (ast.Assert, ast.If, ast.While, ast.IfExp)):
            conditions.append(node.test)
        elif isinstance(node, ast.UnaryOp):
            conditions.append(node.operand)
        elif isinstance(node, ast.BoolOp):
            conditions += node.values
        elif isinstance(node, ast.Compare):
            if any(isinstance(each, ast.Constant) and type(each.value) is bool for each in node.comparators):
                conditions.append(node.left)
    for node in nodes:
        if isinstance(node, ast.Call):
            callee = mentioned([node.func]) & names
            arguments = [*node.args, *[keyword.value for keyword in node.keywords]]
            is_judge = len(arguments) > 1 or any(node is condition for condition in conditions)
            if len(callee) == 1 and is_judge and mentioned(arguments) - callee:
                judging |= callee
    return judging


def count_assertions(statements):
    """Make each assertion report how it ends, so that the next one runs in any case; return their number.

    Assertions in a try block, which may expect them to fail, and in classes, such as unittest's, stay as they are.
    """
    number = 0
    for i, statement in enumerate(statements):
        if isinstance(statement, ast.Assert):
            number += 1
            [block] = ast.parse(f"try: {PASSED}\nexcept Exception as {FAILED}_error: {FAILED}({FAILED}_error)").body
            block.body = [statement, *ast.parse(f"{PASSED}()").body]
            statements[i] = block
        elif isinstance(statement, (*FUNCTION_NODES, ast.For, ast.While, ast.If, ast.With)):
            number += count_assertions(statement.body) + count_assertions(getattr(statement, "orelse", []))
    return number


def tests(session, source, prefix, suffix):
    """Run the tests; return the verdict, the share of assertions that passed, and the error."""
    namespace = {"__name__": "__main__", "__builtins__": builtins, FAILED: session.failures.append}

    def passed():
        session.num_passed += 1

    namespace[PASSED] = passed
    tree = ast.parse(source)
    number = count_assertions(tree.body)
    verdict, error = "passed", None
    try:
        bind(session, namespace, source, prefix, suffix)
        exec(compile(ast.fix_missing_locations(tree), "<tests>", "exec", dont_inherit=True), namespace)
        if not session.calls and not session.is_broken:
            session.failures.append(AssertionError("the tests never called the program"))
    except Ended:
        verdict = "ended"
    except SystemExit as left:
        verdict, error = "exit", left
    except MemoryError as full:
        verdict, error = "memory", full
    except BaseException as crash:
        session.failures.append(crash)
    if session.failures and verdict == "passed":
        error = session.failures[0]
        is_wrong = all(isinstance(each, AssertionError) and each not in session.raised for each in session.failures)
        verdict = "wrong_answer" if is_wrong else "exception"
    if session.is_broken and verdict == "passed":
        verdict = "exception"
    number = max(number, session.num_passed + len(session.failures))
    return verdict, session.num_passed / number if number else float(verdict == "passed"), error


def harness():
    """Serve requests, running the tests of each in a forked process."""
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the tests may use these
        os.dup2(null, fd)
    for module in LIBRARY:  # before processes are forked
        __import__(module)
    while True:
        try:
            _, prefix, _, suffix, source = (receive(stdin).decode("utf-8", "surrogatepass") for _ in range(5))
        except EOFError:
            return
        try:
            names = names_in(compile(source, "<tests>", "exec", dont_inherit=True))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            send(stdout, f"the tests: {error}".encode(errors="replace"), b"c")
            continue
        send(stdout, b"", b"c")
        if receive(stdin):  # the program has already failed
            continue
        child = os.fork()
        if child == 0:
            sys.stdout = sys.stderr = printed = io.StringIO()
            session = Session(stdin, stdout, names)
            verdict, share, failure = tests(session, source, prefix, suffix)
            if failure is not None and failure not in session.raised:  # the program prints its own exceptions
                trace = failure.__traceback__
                traceback.print_exception(type(failure), failure, trace and trace.tb_next)  # without this file's frame
            text = f"{verdict} {share}\n{printed.getvalue()[-TAIL:]}"
            send(stdout, text.encode(errors="replace"), b"v")
            os._exit(ENDED)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != ENDED:  # the tests ended their process
            send(stdout, b"died 0\n", b"v")


if __name__ == "__main__":
    if sys.argv[1] == "harness":
        harness()
    else:
        program(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
