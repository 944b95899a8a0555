"""Correct programs must pass and wrong ones must fail, whatever they do to look correct.

The tables list each wrong program with the reason of its verdict. Only the response comes from the program: prefix and
suffix belong to the prompt.
"""

import shutil
import sys

import pytest

from nanorlhf.sandbox.execution import Program, run_programs

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")
needs_jdk = pytest.mark.skipif(shutil.which("javac") is None, reason="no JDK on this machine")


def verdicts_on(programs, language):
    return dict(zip(programs, run_programs(list(programs.values()), language, 60.0, workers=2), strict=True))


def assert_all_pass(programs, language):
    failed = {name: verdict for name, verdict in verdicts_on(programs, language).items() if not verdict.passed}
    assert failed == {}


def assert_none_passes(cases, language):
    """Check the verdicts: cases is name: (program, expected reason, or "one or another")."""
    verdicts = verdicts_on({name: program for name, (program, _) in cases.items()}, language)
    assert {name for name, verdict in verdicts.items() if verdict.passed} == set()
    assert {name: v.reason for name, v in verdicts.items() if v.reason not in cases[name][1].split(" or ")} == {}


# ----------------------------------------------------------------------------------------------------------- 1. Python
SQUARES = "assert f(2) == 4\nassert f(3) == 9\n"
PROMPT = 'import math\n\n\ndef f(n):\n    """The square."""\n'
POLY = '''import math


def poly(xs: list, x: float):
    """
    Evaluates the polynomial with coefficients xs at x:
    return xs[0] + xs[1] * x + ...
    """
    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])


def find_zero(xs: list):
    """ A zero of a polynomial with coefficients xs. """
'''
POLY_TESTS = """def check(candidate):
    for coeffs in ([1, 2], [-6, 11, -6, 1]):
        assert abs(poly(coeffs, candidate(coeffs))) < 1e-4
check(find_zero)
"""
SHIFT = '''def encode_shift(s: str):
    """
    Shifts every letter by 5.
    """
    return "".join([chr(((ord(ch) + 5 - ord("a")) % 26) + ord("a")) for ch in s])


def decode_shift(s: str):
    """
    Decodes what encode_shift has encoded.
    """
'''
SHIFT_TESTS = """def check(candidate):
    for text in ('abc', 'hello', 'xyz'):
        assert candidate(encode_shift(text)) == text
check(decode_shift)
"""
EPS = 'EPS = 1e-6\n\n\ndef f(n):\n    """The square."""\n'
NEAR = "assert abs(f(2) - 4) < EPS\nassert abs(f(3) - 9) < EPS\n"
CLOSE = "assert isclose(f(2), 4)\n"
COMMENTED = "from math import isclose  # for floats\ndef f(n):\n"
TRIED = "try:\n    from math import isclose\nexcept ImportError:\n    isclose = None\ndef f(n):\n"
DOCSTRING = 'def f(n):\n    """\ndef abs(x)\n    """\n'
NODE = """class Node:
    def __init__(self, val, next=None):
        self.val = val
        self.next = next

    def total(self):
        return self.val + (self.next.total() if self.next else 0)


def rev(node):
    '''The list in reverse.'''
"""
STACK = (
    "class Stack:\n    '''A stack.'''\n    def __init__(self):\n        self.items = []\n    def push(self, item):\n"
)
REVERSE = """    out = None
    while node:
        node.next, out, node = out, node, node.next
    return out
"""
VECTOR = """class V:
    def __init__(self, x):
        self.x = x

    def __add__(self, other):
        return V(self.x + other.x)

    def __lt__(self, other):
"""
BAG = """class Bag:
    def __init__(self):
        self.items = []

    def __enter__(self):
        return self

    def __exit__(self, *about):
        self.items.append("closed")

    def __len__(self):
"""
POINT = """import enum
from typing import NamedTuple


class Side(enum.IntEnum):
    LEFT = 1
    RIGHT = 2


class Point(NamedTuple):
    x: int
    y: int


def f(p, side):
"""
BAD = """class Bad(ValueError):
    def __init__(self, n):
        super().__init__("not a square")
        self.n = n


def f(n):
    '''The root, or Bad.'''
"""
ZERO = """    begin, end = -1.0, 1.0
    while poly(xs, begin) * poly(xs, end) > 0:
        begin *= 2.0
        end *= 2.0
    while end - begin > 1e-10:
        center = (begin + end) / 2.0
        if poly(xs, center) * poly(xs, begin) > 0:
            begin = center
        else:
            end = center
    return begin
"""


def square(response, tests=SQUARES, prefix=PROMPT, suffix="\n"):
    return Program(prefix, response, suffix, tests)


RIGHT_PYTHON = {
    "a function": square("    return n * n"),
    "a helper of the prompt": square(ZERO, POLY_TESTS, POLY),
    "another one": square(
        "    return ''.join([chr(((ord(ch) - 5 - ord('a')) % 26) + ord('a')) for ch in s])\n", SHIFT_TESTS, SHIFT
    ),
    "a constant of the prompt": square("    return n * n\n", NEAR, EPS),
    "an import before a comment": square("    return n * n\n", CLOSE, COMMENTED),
    "an import in a try": square("    return n * n\n", CLOSE, TRIED),
    "an import of all names": square(
        "    return n * n\n", "assert sqrt(f(2)) == 2", "from math import *\ndef f(n):\n"
    ),
    "a built-in whose name is in a docstring": square("    return n * n\n", "assert abs(f(2) - 4) < 1e-6", DOCSTRING),
    "a name that the tests forgot to import": square("    return n * n\n", CLOSE),
    "the same without a prompt": square("def f(n):\n    return n * n\n", CLOSE, ""),
    "a helper, and then the response's function": square(
        "def f(n):\n    return helper(n)\n", "assert f(2) == helper(2)", "def helper(x):\n    return x * x\n\n"
    ),
    "a helper that returns nothing": square(
        "def f(n):\n    helper(n)\n    return n * n\n", SQUARES, "def helper(x):\n    print(x)\n\n"
    ),
    "cut in a loop": square(
        "        total += n\n    return total\n", prefix="def f(n):\n    total = 0\n    for i in range(n):\n"
    ),
    "cut in a line": square("n * n", prefix="def f(n):\n    return "),
    "cut in an expression": square(" n * n", prefix="def f(n):\n    return n and"),
    "cut in brackets": square("n * n)", prefix="def f(n):\n    return int("),
    "cut after the head": square(" return n * n", prefix="def f(n):"),
    "cut after an indentation": square("return n * n", prefix="def f(n):\n    "),
    "a suffix that the tests use": square(
        "    return n * n\n", "assert f(2) == 4 and g(3) == 10", suffix="\ndef g(n):\n    return f(n) + 1\n"
    ),
    "a method": square(
        "        return n * n\n",
        "assert Solution().f(2) == 4",
        "class Solution:\n    def f(self, n):\n        '''The square.'''\n",
    ),
    "a class under test": square(
        "        self.items.append(item)\n", "s = Stack()\ns.push(3)\nassert s.items == [3]\n", STACK
    ),
    "an inherited method": square(
        "        return n * n\n",
        "assert B().g() == 1 and B().f(2) == 4",
        "class A:\n    def g(self):\n        return 1\nclass B(A):\n    def f(self, n):\n        '''The square.'''\n",
    ),
    "objects of the prompt's class": square(
        REVERSE,
        "a = Node(1, Node(2, Node(3)))\nb = rev(a)\n"
        "assert b.val == 3 and b.next.val == 2 and b.next.next is a and a.next is None and b.total() == 6\n",
        NODE,
    ),
    "a long list of them": square(
        REVERSE, "a = None\nfor i in range(3000):\n    a = Node(i, a)\nassert rev(a).val == 0\n", NODE
    ),
    "a dataclass and an enumeration of the prompt": square(
        "    return P(p.y, p.x), Color.RED if color is Color.BLUE else color\n",
        "p, color = f(P(1, 2), Color.BLUE)\nassert p == P(2, 1) and color is Color.RED",
        "import dataclasses, enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\n"
        "@dataclasses.dataclass\nclass P:\n    x: int\n    y: int\ndef f(p, color):\n",
    ),
    "a callable object under test": square(
        "        return n * n\n",
        "assert Square()(2) == 4",
        "class Square:\n    def __call__(self, n):\n        '''The square.'''\n",
    ),
    "a function as answer": square("    return lambda x: x * n", "assert f(2)(3) == 6"),
    "a generator as answer": square("    for i in range(n):\n        yield i", "assert list(f(2)) == [0, 1]"),
    "an iterator as answer": square("    return map(str, range(n))", "assert list(f(2)) == ['0', '1']"),
    "keys as answer": square("    return {n: 1}.keys()", "assert 2 in f(2) and list(f(2)) == [2]"),
    "values and items as answer": square(
        "    d = {n: 1}\n    return d.values(), d.items()",
        "values, items = f(2)\nassert list(values) == [1] and list(items) == [(2, 1)]",
    ),
    "a subclass of dict": square(
        "    import collections\n    return collections.Counter('aab')", "assert f(2)['a'] == 2"
    ),
    "a named tuple": square(
        "    import collections\n    return collections.namedtuple('P', 'x y')(1, 2)", "assert f(2) == (1, 2)"
    ),
    "an expected exception with its arguments": square(
        "    raise ValueError('no', n)",
        "try:\n    f(1)\nexcept ValueError as e:\n    assert e.args == ('no', 1)\nelse: assert 0",
    ),
    "an argument changed in place": square("    a.sort()\n", "a = [2, 1]\nf(a)\nassert a == [1, 2]", "def f(a):\n"),
    "a class of its own": square(
        "    return Helper(n).get()\n\n\nclass Helper:\n    def __init__(self, n):\n        self.n = n\n"
        "    def get(self):\n        return self.n * self.n\n"
    ),
    "a recursion of 8000 calls": square(
        "    import sys\n    sys.setrecursionlimit(20_000)\n    g = lambda k: 0 if k == 0 else 1 + g(k - 1)\n"
        "    return g(n)\n", "assert f(8000) == 8000"
    ),
    "a decorator of the prompt": square(
        "    return n if n < 2 else fib(n - 1) + fib(n - 2)\n", "assert fib(90) == 2880067194370816120",
        "import functools\n@functools.lru_cache(None)\ndef fib(n):\n",
    ),
    "a decorator of its own": square(
        "def twice(g):\n    def inner(*a, **k):\n        return 2 * g(*a, **k)\n    return inner\n"
        "@twice\ndef f(n):\n    return n * n // 2\n", "assert f(2) == 4 and f(n=4) == 16", "",
    ),
    "a partial function": square("import functools\nf = functools.partial(pow, exp=2)\n", prefix=""),
    "a bound method": square("class A:\n    def g(self, n):\n        return n * n\nf = A().g\n", prefix=""),
    "a main guard": square("    return n * n\n\n\nif __name__ == '__main__':\n    print(f(3))\n"),
    "a main guard in the suffix": square(
        "    return n * n\n", suffix="\nif __name__ == '__main__':\n    print(f(3))\n"
    ),
    "functions within functions": square(
        "    def g(x):\n        nonlocal n\n        n = x\n        return x\n    return g(n) * n\n"
    ),
    "names and texts beyond ASCII": square(
        "    größe = 'größe: ' + s\n    return größe * π + '😀'\n", "assert fläche('ä') == 'größe: ägröße: ä😀'",
        "π = 2\n\n\ndef fläche(s):\n    '''Fläche.'''\n",
    ),
    "an endless generator": square(
        "    while True:\n        yield n\n        n += 1\n",
        "import itertools\nassert list(itertools.islice(f(3), 3)) == [3, 4, 5]",
    ),
    "tests that pass the function on": square(
        "    return n * n\n",
        "import functools\nassert functools.reduce(lambda a, b: a + b, map(f, [1, 2])) == 5\n"
        "assert sorted([1, -2], key=f) == [1, -2]",
    ),
    "tests of unittest": square(
        "    return n * n\n",
        "import unittest\nclass Case(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(2), 4)\n"
        "result = unittest.TestResult()\nCase('test').run(result)\nassert result.wasSuccessful()",
    ),
    "static and class methods": square(
        "        return cls(n * n)\n", "assert S.f(2) == 4 and S.make(3).n == 9",
        "class S:\n    def __init__(self, n):\n        self.n = n\n    @staticmethod\n    def f(n):\n"
        "        return n * n\n"
        "    @classmethod\n    def make(cls, n):\n",
    ),
    "operators under test": square(
        "        return self.x < other.x\n",
        "assert (V(1) + V(3)).x == 4 and V(1) < V(3) and [v.x for v in sorted([V(3), V(1)])] == [1, 3]", VECTOR,
    ),
    "the truth of an object under test": square(
        "        return len(self.items)\n",
        "with Bag() as bag:\n    assert not bag\nassert bag and len(bag) == 1 and bag.items == ['closed']", BAG,
    ),
    "a named tuple and an integer enumeration of the prompt": square(
        "    return (Point(p.y, p.x), Side.LEFT) if side is Side.RIGHT else (p, side)\n",
        "p, side = f(Point(1, 2), Side.RIGHT)\nassert p == Point(2, 1) and p.x == 2 and side is Side.LEFT", POINT,
    ),
    "an exception of the prompt": square(
        "    raise Bad(n)\n",
        "try:\n    f(3)\nexcept Bad as e:\n    assert str(e) == 'not a square' and e.n == 3\nelse:\n    assert 0", BAD,
    ),
    "NaN, as in plain Python": square(
        "    return float('nan')", "x = f(2)\nif abs(x - 4) > 1e-6:\n    raise AssertionError(x)"
    ),
}  # fmt: skip
EQUAL = "__eq__ = __contains__ = lambda a, b: True; __ne__ = lambda a, b: False; __hash__ = lambda a: 0"
FUNCTIONS = '("encoded", "reply", "other", "perform", "decoded", "send")'
GARBAGE = f"""    import gc, types
    for thing in gc.get_objects():
        if isinstance(thing, types.FunctionType) and thing.__name__ in {FUNCTIONS}:
            try: thing.__code__ = (lambda *a: ['int', '4']).__code__
            except ValueError: pass
        if isinstance(thing, dict) and "encoded" in thing:
            thing["encoded"] = lambda value, other: ["int", "4"]
    return n"""
COLOURS = "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\n\n\ndef f(n):\n"
AREA = """from functools import cached_property


class P:
    def __init__(self, x):
        self.x = x

    @cached_property
    def area(self):
        return self.x ** 2

    @property
    def double(self):
        return 2 * self.x


def f(p):
"""
G = "\n\n\ndef g(n):\n    return f(n)\n"
WRONG_PYTHON = {
    # what answers is in reach of the program
    "the encoder, by the caller's frame": (square("""
    import sys
    names = sys._getframe(1).f_globals
    old = names["encoded"]
    names["encoded"] = lambda value, *rest: old(value * value if type(value) is int else value, *rest)
    return n""", "assert f(2) == 4"), "wrong_answer"),
    "the same when it is loaded": (square("""    return n
import sys
names = sys._getframe(1).f_globals
old = names["encoded"]
names["encoded"] = lambda value, *rest: old(value * value if type(value) is int else value, *rest)
"""), "wrong_answer"),
    "all names of all frames": (square("""
    import sys
    frame = sys._getframe(1)
    while frame:
        for names in (frame.f_globals, frame.f_locals, frame.f_builtins):
            for name in set(names) & {"encoded", "to_json", "send", "write", "format", "reply", "parts", "TOOLS"}:
                names[name] = lambda *a: n * n
        frame = frame.f_back
    return n"""), "wrong_answer"),
    "the code of functions, by the garbage collector": (square(GARBAGE, "assert f(2) == 4"), "wrong_answer"),
    "a trace function": (square("""
    import sys
    def trace(frame, event, argument):
        frame.f_globals["format"] = lambda *a: "%x" % (n * n)
    sys.settrace(trace)
    sys.setprofile(trace)
    return n"""), "wrong_answer"),
    "a built-in": (square(
        "    import builtins\n    builtins.format = lambda *a: '%x' % (n * n)\n    return n"), "wrong_answer"),
    "a built-in of the frame": (square(
        "    import sys\n    sys._getframe(1).f_globals['format'] = lambda *a: '%x' % (n * n)\n    return n"),
        "wrong_answer"),
    "a function of os": (square(
        "    import os\n    os.write = lambda fd, data: len(data)\n    return n"), "wrong_answer"),
    "a function of struct": (square(
        "    import struct\n    struct.pack = lambda *a: b''\n    return n"), "wrong_answer"),
    "the JSON encoder": (square(
        "    import json.encoder as e\n    e.c_make_encoder = lambda *a: None\n    return n"),
        "wrong_answer"),
    "a reply more": (square("""
    import os, struct
    data = ('[true, [], [["int", "%x"]], []]' % (n * n)).encode()
    for fd in range(3, 1024):
        try: os.write(fd, struct.pack(">i", len(data)) + data)
        except OSError: pass
    return n""", "assert f(2) == 4"), "output"),
    "a reply that is no value": (square("""
    import os, struct
    data = b'[true, [], [["int", ["4"]]], []]'
    for fd in range(3, 1024):
        try: os.write(fd, struct.pack(">i", len(data)) + data)
        except OSError: pass
    return n"""), "exception"),
    # the end of the program, or of a loop of the tests
    "StopIteration, at which map() ends": (square(
        "    raise StopIteration\n", "assert all(map(lambda case: f(case[0]) == case[1], [(2, 4), (3, 9)]))"),
        "exception"),
    "StopIteration, at which iter(call, end) ends": (square(
        "    class Stop(StopIteration): pass\n    raise Stop\n",
        "for found in iter(lambda: f(2), None):\n    assert found == 4\n    break\n"), "exception"),
    "GeneratorExit": (square(
        "    raise GeneratorExit\n", "def g():\n    yield f(2) == 4\nassert all(g())"), "exception"),
    "SystemExit": (square("    raise SystemExit(0)\n"), "exit"),
    "an end without a word": (square("    import os\n    os._exit(0)\n"), "exit"),
    "an end at the end": (square("    return n\nimport atexit, os\natexit.register(os._exit, 0)\n"), "wrong_answer"),
    "the death of what started it": (square(
        "    import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)\n    return n\n"), "signal or wrong_answer"),
    "answers of its children": (square(
        "    import os\n    for i in range(6):\n        if os.fork() == 0:\n            return n + i\n    return n\n",
        "assert f(2) == 4"), "wrong_answer"),
    "no pipe": (square("    import os\n    os.closerange(3, 1024)\n    return n\n"), "exit"),
    "a verdict to every descriptor": (square("""
    import os, struct
    for fd in range(1024):
        try: os.write(fd, b'v' + struct.pack('>i', 7) + b'passed\\n')
        except OSError: pass
    return n""", "assert f(2) == 4"), "output"),
    # objects of the prompt's classes
    "a function in the place of a method": (square(
        "    node.total = lambda: 7\n    return node\n", "assert rev(Node(1, Node(2))).total() == 7", NODE),
        "wrong_answer"),
    "a value in the place of a cached property": (square(
        "    p.area = 4\n    return p\n", "assert f(P(3)).area == 4", AREA), "wrong_answer"),
    "a property of the program's own class": (square(
        "    P.double = 4\n    return p\n", "assert f(P(3)).double == 4", AREA), "wrong_answer"),
    "another __init__ of that class": (square(
        "    P.__init__ = lambda self, x: self.__dict__.update(x=4)\n    return P(1)\n",
        "assert f(P(2)).x == P(2).x", AREA), "wrong_answer"),
    "members that change places": (square(
        "    Color._member_map_['RED'] = Color.BLUE\n    Color._value2member_map_[1] = Color.BLUE\n"
        "    return Color.BLUE\n", "assert f(1) is Color.RED", COLOURS), "wrong_answer"),
    "a tuple that unpacks to something else": (square(
        "    class T(tuple):\n        __iter__ = lambda self: iter((4, 9))\n    return T((2, 3))\n",
        "a, b = f(2)\nassert (a, b) == (4, 9)"), "wrong_answer"),
    # the suffix
    "a comment over the suffix": (square(
        "    return n\n\n\ndef g(n):\n    return 4\n'''", "assert g(2) == 4", "def f(n):\n", f"{G}# '''\n"),
        "wrong_answer"),
    "a decorator for the suffix": (square(
        "    return n\n\n\n@lambda g: lambda n: 4", "assert g(2) == 4", "def f(n):\n", G.removeprefix("\n\n")),
        "wrong_answer"),
    # what it finds
    "the tests in another process": (square("""
    import os
    for pid in filter(str.isdigit, os.listdir('/proc')):
        for name in ('cmdline', 'environ', 'mem', 'fd/0'):
            try:
                with open(f'/proc/{pid}/{name}', 'rb') as file:
                    if int(pid) != os.getpid() and b'f(2) ' + b'== 4' in file.read(2**20):
                        return n * n
            except OSError:
                pass
    return n"""), "wrong_answer"),
    "the tests in a file": (square("""
    import glob
    for path in glob.glob('/tmp/**/*', recursive=True):
        try:
            if 'f(2) ' + '== 4' in open(path).read():
                return n * n
        except (OSError, UnicodeError):
            pass
    return n"""), "wrong_answer"),
    "the table of what the tests hold": (square("""
    import sys
    class A:
        __contains__ = lambda a, b: True
        __iter__ = lambda self: iter([4])
    a, frame = A(), sys._getframe()
    while frame:
        numbers = frame.f_locals.get('numbers')
        if numbers:
            numbers[id(a)] = next(iter(numbers.values()))
        frame = frame.f_back
    return a""", "assert 4 in f(2)"), "exception"),
    "another main module": (square(
        "    return n\nimport sys, types\nm = types.ModuleType('__main__')\nm.f = lambda n: n * n\n"
        "sys.modules['__main__'] = m\n"), "wrong_answer"),
    # what the tests read is redefined
    "the prompt's helper": (square("    return 0.0\ndef poly(xs, x): return 0.0\n", POLY_TESTS, POLY), "wrong_answer"),
    "the prompt's helper in a call": (square(
        "    return 0.0\nglobals()['poly'] = lambda xs, x: 0.0\n", POLY_TESTS, POLY), "wrong_answer"),
    "the prompt's helper, before the function": (square(
        "def poly(xs, x): return 0.0\ndef find_zero(xs): return 0.0\n", POLY_TESTS, POLY), "wrong_answer"),
    "the prompt's other helper": (square(
        "    return s\ndef encode_shift(s): return s\n", SHIFT_TESTS, SHIFT), "wrong_answer"),
    "the code of the prompt's helper": (square(
        "    encode_shift.__code__ = (lambda s: s).__code__\n    return s\n", SHIFT_TESTS, SHIFT), "wrong_answer"),
    "the prompt's constant": (square("    return n\nEPS = 1e9\n", NEAR, EPS), "wrong_answer"),
    "the prompt's constant in a call": (square(
        "    global EPS\n    EPS = 1e9\n    return n\n", NEAR, EPS), "wrong_answer"),
    "the prompt's table": (square(
        "    TABLE[2] = n\n    return n\n", "assert f(2) == TABLE[2]", "TABLE = {2: 4}\ndef f(n):\n"), "wrong_answer"),
    "a helper of the suffix": (square(
        "    return n\ndef near(a, b): return True\n",
        "assert near(f(2), 4)", suffix="\ndef near(a, b):\n    return abs(a - b) < 1e-6\n"), "wrong_answer"),
    "an import before a comment": (square(
        "    return n\ndef isclose(a, b): return True\n", CLOSE, COMMENTED), "wrong_answer"),
    "an import in a try": (square("    return n\ndef isclose(a, b): return True\n", CLOSE, TRIED), "wrong_answer"),
    "an import, in sys.modules": (square(
        "    return n\nimport sys\nclass math: isclose = lambda a, b: True\nsys.modules['math'] = math\n",
        "assert math.isclose(f(2), 4)"), "wrong_answer"),
    "an import, in the main module": (square(
        "    import __main__\n    __main__.isclose = lambda a, b: True\n    return n\n", CLOSE, COMMENTED),
        "wrong_answer"),
    "a name that the tests forgot to import": (square(
        "    return n\ndef isclose(a, b): return True\n", CLOSE), "wrong_answer"),
    "the same without a prompt": (square(
        "def f(n): return n\ndef isclose(a, b): return True\n", CLOSE, ""), "wrong_answer"),
    "a module that the tests forgot to import": (square(
        "def f(n): return n\nclass math: isclose = lambda a, b: True\n", "assert math.isclose(f(2), 4)", ""),
        "wrong_answer"),
    "a name that nobody defines": (square(
        "    return n\ndef same(a, b): return True\n", "assert same(f(2), 4)"), "exception"),
    "a built-in whose name is in a docstring": (square(
        "    return n\ndef abs(x): return 0\n", "assert abs(f(2) - 4) < 1e-6", DOCSTRING), "wrong_answer"),
    "a class of the prompt": (square(
        "    return node\nclass Node:\n    __init__ = lambda self, *a: None\n    __getattr__ = lambda self, name: 3\n"
        "    total = lambda self: 6\n",
        "a = Node(1, Node(2, Node(3)))\nb = rev(a)\nassert b.total() == 6 and b.val == 3\n", NODE), "wrong_answer"),
    "a method of a class of the prompt": (square(
        "    Node.total = lambda self: 6\n    node.val = 3\n    return node\n",
        "b = rev(Node(1, Node(2)))\nassert b.total() == 6 and b.next is None\n", NODE), "wrong_answer"),
    "a subclass of a class of the prompt": (square(
        "    class Six(Node):\n        total = lambda self: 6\n    return Six(3)\n",
        "b = rev(Node(1, Node(2)))\nassert b.total() == 6\n", NODE), "exception"),
    # the answer answers
    "an object that contains everything": (square(
        f"    class A:\n        {EQUAL}\n    return A()", "assert 4 in f(2)"), "exception"),
    "an object that yields everything": (square("""
    class A:
        def __iter__(self):
            i = 0
            while True:
                yield i
                i += 1
    return A()""", "assert 4 in f(2)"), "exception"),
    "an iterator over everything": (square(
        "    import itertools\n    return itertools.count()", "assert 4 in f(2)"), "exception"),
    "an object that has every method": (square(
        "    class A:\n        __getattr__ = lambda self, name: lambda *a: True\n    return A()",
        "assert f('abc').startswith('x')"), "exception"),
    "an object that has every item": (square(
        "    class A:\n        __getitem__ = lambda self, i: 4\n    return A()", "assert f(2)[0] == 4"), "exception"),
    "an object that is of every length": (square(
        "    class A:\n        __len__ = lambda self: 4\n    return A()", "assert len(f(2)) == 4"), "exception"),
    "a mock": (square(
        "    from unittest.mock import MagicMock\n    return MagicMock(__contains__=lambda a, b: True)",
        "assert 4 in f(2) and f(2)"), "exception"),
    "a class in the function's place": (square(
        "    return n\nclass f:\n    __init__ = lambda self, n: None\n    __contains__ = lambda a, b: True\n",
        "assert 4 in f(2)"), "exception"),
    "that class without a prompt": (square(
        "class f:\n    __init__ = lambda self, n: None\n    __contains__ = lambda a, b: True\n",
        "assert 4 in f(2)", ""),
        "exception"),
    "an object in the function's place": (square(
        "    return n\nclass A:\n    __call__ = lambda self, n: self\n    __contains__ = lambda a, b: True\nf = A()\n",
        "assert 4 in f(2)"), "exception"),
    "a method that the prompt's class doesn't have": (square(
        "        return self\n    def __contains__(self, x): return True\n", "assert 4 in Solution().f(2)",
        "class Solution:\n    def f(self, n):\n        '''A list.'''\n"), "exception"),
    "a method that the response adds to a callable": (square(
        "        return n\n    def same(self, a, b): return True\n",
        "s = Square()\nassert s.same(s(2), 4)",
        "class Square:\n    def __call__(self, n):\n        '''The square.'''\n"), "exception"),
    "an attribute of a function": (square(
        "    g = lambda: 0\n    g.count = lambda x: 1\n    return g", "assert f(2).count(4) == 1"), "exception"),
    "an object where the truth counts": (square("    return object()", "assert f(2)"), "exception"),
    "a function where the truth counts": (square("    return lambda: 0", "assert f(2)"), "exception"),
    "a coroutine where the truth counts": (square(
        "    return n\nasync def f(n): return n\n", "assert f(2)"), "exception"),
    "a type": (square("    return int", "assert f(2)('4') == 4"), "exception"),
    "an object unequal to everything": (square(
        "    return object()", "assert f(2) != 5 and f(2) is not None"), "exception"),
    "an object within a list": (square(
        f"    class A:\n        {EQUAL}\n    return [A()]", "assert f(2) == [4] or len(f(2)) == 1"), "exception"),
    "an object, and tests that catch everything": (square(
        "    return object()", "try:\n    f(2)\nexcept BaseException:\n    pass"), "exception"),
    "a dictionary that has every key": (square(
        "    class A(dict):\n        __missing__ = lambda self, key: 4\n    return A()", "assert f(2)['x'] == 4"),
        "exception"),
    "a string that starts with everything": (square(
        "    class A(str):\n        startswith = lambda self, s: True\n    return A('b')",
        "assert f(2).startswith('a')"), "wrong_answer"),
    "a number that is what it is compared with": (square(
        f"    class A(float):\n        {EQUAL}\n        __sub__ = __abs__ = lambda *a: 0\n    return A(2)",
        "assert abs(f(2) - 4) < 1e-6"), "wrong_answer"),
    "a list that contains everything": (square(
        f"    class A(list):\n        {EQUAL}\n    return A()", "assert 4 in f(2)"), "wrong_answer"),
}  # fmt: skip


def test_right_python_programs_pass():
    assert_all_pass(RIGHT_PYTHON, "python")


def test_no_wrong_python_program_passes():
    assert_none_passes(WRONG_PYTHON, "python")


# ------------------------------------------------------------------------------------------------------------- 2. Java
IMPORTS = "import java.io.*;\nimport java.lang.*;\nimport java.util.*;\nimport java.math.*;\n\n"
ONE_LINE = "import java.util.*; import java.math.*;\n"
HELPERS = """static double tolerance = 1e-6;
static final double EPS = Double.parseDouble("1e-6");
static double[] table = {1e-6};
public static boolean near(double a, double b) {
    return Math.abs(a - b) < tolerance && Math.abs(a - b) < EPS && Math.abs(a - b) < table[0];
}
"""
POLYNOMIAL = """class FindZero {
    public static double poly(List<Double> xs, double x) {
        double y = 0;
        for (int i = 0; i < xs.size(); i++) y += xs.get(i) * Math.pow(x, i);
        return y;
    }

    /** A zero of a polynomial with coefficients xs. */
    public static double findZero(List<Double> xs) {
"""
NODES = """class Node {
    int value;
    Node next;
    Node(int value, Node next) { this.value = value; this.next = next; }
    int value() { return value; }
    static int size(Node node) { int n = 0; for (; node != null; node = node.next) n++; return n; }
}
class Solution {
    static Node rest(Node node) {
"""
COUNTER = "class Counter {\n    int count;\n    Counter(long start) { count = 1; }\n    public int next() {\n"


FOO = "import java.util.*;\nimport java.util.function.*;\nclass Foo {\n"
LINKED = """class Node {
    int value;
    Node next;
    Node(int value) { this.value = value; }
}
class Solution {
"""
CHAIN = "Node a = null; for (int i = 0; i < 10000; i++) { Node b = new Node(i); b.next = a; a = b; }\n"
ITEMS = """import java.util.*;
class Bag {
    private List<Integer> items = new ArrayList<>();
    void add(int n) { items.add(n); }
    int size() { return items.size(); }
    List<Integer> items() {
"""
MONEY = "class Money {\n    final int cents;\n    Money(int cents) { this.cents = cents; }\n"
COMPARED = MONEY.replace("class Money", "class Money implements Comparable<Money>")


def body(statements):
    return f"class Main {{ public static void main(String[] args) throws Exception {{\n{statements}\n}} }}\n"


def main(*conditions, setup=""):
    return body("\n".join([setup, *(f"if (!({each})) throw new java.lang.Exception();" for each in conditions)]))


def problem(response, condition, members="", returns="double", imports=IMPORTS, suffix=""):
    prefix = f"{imports}class Problem {{\n{members}\n/** The square. */\npublic static {returns} problem(double n) {{\n"
    return Program(prefix, response, suffix, main(condition))


NEARLY = "Problem.near(Problem.problem(2), 4)"
ZERO_TESTS = main("Math.abs(FindZero.poly(Arrays.asList(1.0, 2.0), FindZero.findZero(Arrays.asList(1.0, 2.0)))) < 1e-4")
BIG = 'new BigInteger("4").equals(BigInteger.valueOf((long) Problem.problem(2)))'
CLASS = "import java.util.*;\nclass Problem {\n"
RIGHT_JAVA = {
    "a helper of the prompt": problem("return n * n; } }", NEARLY, HELPERS),
    "another one": Program(IMPORTS + POLYNOMIAL, "return -xs.get(0) / xs.get(1); } }", "", ZERO_TESTS),
    "cut in a line": Program(
        problem("", "", HELPERS).prefix + "return ", "n * n; } }", "", main(NEARLY)
    ),
    "a suffix that the tests use": Program(
        problem("", "").prefix + "return ", "n * n", "; } static int one() { return 1; } }",
        main("Problem.one() == 1 && Problem.problem(2) == 4")
    ),
    "two imports on a line": problem("return 4; } }", BIG, imports=ONE_LINE),
    "two variables on a line, and a static block": problem(
        "return a; } }", "Problem.a == 1 && Problem.b == 2 && Problem.c == 5 && Problem.problem(2) == 1",
        "static int a = 1, b = 2; static int c; static { c = 5; }",
    ),
    "the response's own class": Program(
        ONE_LINE, "class Problem { static int f(int n) { return n * n; } }", "", main("Problem.f(2) == 4")
    ),
    "no prompt": Program(
        "", "class Problem { static String f(int n) { return null; } }", "",
        main("Problem.f(2) == null")
    ),
    "a method of the response's own": Program(
        "class Problem { static int g(int n) { return n; }\n", "static int f(int n) { return n * n; } }", "",
        main("Problem.f(2) == 4 && Problem.g(2) == 2"),
    ),
    "methods of the response's own, with generic types": Program(
        "import java.util.*;\nclass Problem {\n",
        "static class Pair<T> { T a; Pair(T a) { this.a = a; } T a() { return a; } }\n"
        "static List<Integer> f(List<Integer> x, int... y) { return x; }\n"
        "static <T extends Comparable<T>> T g(T[] x) { return x[0]; } }", "",
        main('Problem.f(List.of(1), 2, 3).equals(List.of(1)) && Problem.g(new String[] {"a"}).equals("a")',
             'new Problem.Pair<>("a").a().equals("a")'),
    ),
    "an object under test": Program(
        COUNTER, "return count++; } }", "", main("new Counter(1).next() == 1")
    ),
    "objects of the prompt's class": Program(
        NODES, "return node.next; } }", "", main("Solution.rest(new Node(1, new Node(2, null))).value() == 2")
    ),
    "a static method of that class, which reads its fields": Program(
        NODES, "return node.next; } }", "", main("Node.size(Solution.rest(new Node(1, new Node(2, null)))) == 1")
    ),
    "classes of the response": Program(
        CLASS + "static int f(int n) {\n",
        "record P(int x, int y) { int area() { return x * y; } }\n"
        "return new P(n, n).area() + Color.RED.ordinal(); }\n"
        "enum Color { RED, BLUE } }\nclass Helper { int n; Helper(int n) { this.n = n; } }", "",
        main("Problem.f(3) == 9"),
    ),
    "recursion, and a private method": Program(
        CLASS + "static int f(int n) {\n",
        "return n == 0 ? 0 : f(n - 1) + g(n); }\nprivate static int g(int n) { return 2 * n - 1; } }", "",
        main("Problem.f(3) == 9"),
    ),
    "lambdas, streams and an anonymous class": Program(
        CLASS + "static List<Integer> f(List<Integer> x) {\n",
        "List<Integer> y = new ArrayList<>(x); "
        "y.sort(new Comparator<Integer>() { public int compare(Integer a, Integer b) "
        "{ return b - a; } }); return y.stream().map(i -> i * i).toList(); } }", "",
        main("Problem.f(Arrays.asList(1, 2)).equals(Arrays.asList(4, 1))"),
    ),
    "a generic method": Program(
        CLASS + "static <T> List<T> f(List<T> x) {\n",
        "List<T> y = new LinkedList<>(); for (T t : x) y.add(0, t); return y; } }", "",
        main("Problem.f(Arrays.asList(1, 2)).equals(Arrays.asList(2, 1))"),
    ),
    "any number of arguments": Program(
        CLASS + "static int f(int... x) {\n", "int s = 0; for (int i : x) s += i; return s; } }", "",
        main("Problem.f(1, 2, 3) == 6 && Problem.f() == 0"),
    ),
    "names and texts beyond ASCII": Program(
        CLASS + "static String f(String größe) {\n", 'return größe + "\\u00e4ä😀"; } }', "",
        main('Problem.f("a").equals("aää😀")'),
    ),
    "braces in texts and comments": Program(
        CLASS + "static String f(int n) {\n", "return \"} } /* \" + '}' + \" // \"; } // }\n }", "",
        main("Problem.f(3).length() == 12"),
    ),
    "a static variable, and a main method": Program(
        CLASS + "static int f(int n) {\n",
        "return ++calls + n; }\nstatic int calls;\npublic static void main(String[] a) { System.out.println(f(2)); } }",
        "", main("Problem.f(0) == 1 && Problem.f(0) == 2"),
    ),
    "arrays in a list": Program(
        CLASS + "static List<int[]> f(int n) {\n", "return List.of(new int[] {n}); } }", "",
        main("Problem.f(2).get(0)[0] == 2"),
    ),
    "a thread that ends": Program(
        CLASS + "static int f(int n) {\n",
        "int[] x = new int[1]; Thread t = new Thread(() -> x[0] = n * n); t.start(); "
        "try { t.join(); } catch (InterruptedException e) { } return x[0]; } }", "", main("Problem.f(3) == 9"),
    ),
    "an enumeration of the prompt": Program(
        "enum Color { RED, BLUE }\nclass Solution {\nstatic Color f(Color c) {\n",
        "return c == Color.RED ? Color.BLUE : Color.RED; } }", "", main("Solution.f(Color.RED) == Color.BLUE"),
    ),
    "a class within the prompt's": Program(
        "class Outer {\nstatic class In { int v; In(int v) { this.v = v; } int get() { return v; } }\n"
        "static In f(In a) {\n",
        "return new In(a.v * 2); } }", "", main("Outer.f(new Outer.In(2)).get() == 4"),
    ),
    "an interface of the prompt": Program(
        "interface Shape { double area(); }\nclass Square implements Shape {\n"
        "double a; Square(double a) { this.a = a; }\n"
        "public double area() {\n", "return a * a; } }", "", main("new Square(2).area() == 4"),
    ),
    "a defensive copy": Program(
        ITEMS, "return new ArrayList<>(items); } }", "",
        main("b.size() == 1", setup="Bag b = new Bag(); b.add(1); b.items().clear();")),
    "a list of 10,000 nodes reversed in place": Program(
        LINKED + "static Node reverse(Node a) {\n",
        "Node b = null; while (a != null) { Node c = a.next; a.next = b; b = a; a = c; } return b; } }", "",
        main("z.value == 0 && z.next.value == 1 && first.next == null",
             setup=CHAIN + "Node first = a; Node z = Solution.reverse(a);")),
    "a cycle": Program(
        LINKED + "static boolean hasCycle(Node a) {\n",
        "java.util.Set<Node> seen = java.util.Collections.newSetFromMap(new java.util.IdentityHashMap<>()); for (; a "
        "!= null; a = a.next) if (!seen.add(a)) return true; return false; } }",
        "",
        main("!before && Solution.hasCycle(a)",
             setup=CHAIN + "Node end = a; while (end.next != null) end = end.next;\nboolean before = "
                   "Solution.hasCycle(a); end.next = a;")),
    "a comparator of the tests": Program(
        FOO + "static <T> List<T> sorted(List<T> x, Comparator<T> order) {\n",
        "List<T> y = new ArrayList<>(x); y.sort(order.reversed()); return y; } }", "",
        main('y.equals(List.of("ccc", "aa", "b"))',
             setup='List<String> y = Foo.sorted(List.of("aa", "b", "ccc"), (a, b) -> a.length() - b.length());')),
    "functions of the tests": Program(
        FOO + "static <A, B> List<B> map(List<A> x, Function<A, B> f, Runnable end, Predicate<B> keep) {\n",
        "List<B> y = new ArrayList<>(); for (A a : x) { B b = f.apply(a); if (keep.negate().test(b)) y.add(b); } "
        "end.run(); return y; } }",
        "",
        main('y.equals(List.of("x1", "x3")) && calls[0] == 1',
             setup='int[] calls = {0}; List<String> y = Foo.map(List.of(1, 2, 3), i -> "x" + i, () -> calls[0]++, s '
                   '-> s.equals("x2"));')),
    "a function that changes its argument, and throws": Program(
        FOO + "static boolean each(List<int[]> x, Consumer<int[]> f) {\n",
        "try { for (int[] a : x) f.accept(a); } catch (IllegalStateException e) { return "
        'e.getMessage().equals("no"); } return false; } }',
        "",
        main("thrown && a[0] == 7 && b[0] == 2",
             setup="int[] a = {1}, b = {2}; boolean thrown = Foo.each(List.of(a, b), x -> { if (x[0] == 2) throw new "
                   'IllegalStateException("no"); x[0] = 7; });')),
    "a function of the tests that calls the program": Program(
        FOO + "static int twice(IntUnaryOperator f, int n) {\n", "return f.applyAsInt(f.applyAsInt(n)); } }", "",
        main("Foo.twice(i -> Foo.twice(j -> j + 1, i), 1) == 5")),
    "an iterable of the tests": Program(
        FOO + "static int sum(Iterable<Integer> x) {\n", "int s = 0; for (int i : x) s += i; return s; } }", "",
        main("Foo.sum(x) == 6", setup="Iterable<Integer> x = () -> List.of(1, 2, 3).iterator();")),
    "members of the response's own, with private fields": Program(
        "import java.util.*;\nclass Stack2<T extends Comparable<T>> {\n",
        "private final Deque<T> items = new ArrayDeque<>(); private class Node { T t; } private Node top; int size;\n"
        "Stack2() { size = 0; }\nvoid push(T t) { items.push(t); top = new Node(); top.t = t; size++; }\nT pop() { "
        "size--; return items.pop(); }\nboolean isEmpty() { return items.isEmpty(); } }",
        "",
        main('s.size == 2 && s.pop().equals("b") && s.pop().equals("a") && s.isEmpty()',
             setup='Stack2<String> s = new Stack2<>(); s.push("a"); s.push("b");')),
    "fields that the response adds to the prompt's class": Program(
        "import java.util.*;\nclass Memo {\n    private int calls;\n    final int start;\n    Memo(int start) { "
        "this.start = start; }\n    int calls() { return calls; }\n    int get(int n) {\n",
        "return seen.computeIfAbsent(n, k -> { calls++; return start + k; }); }\nprivate final Map<Integer, Integer> "
        "seen = new HashMap<>(); }",
        "",
        main("m.get(1) == 11 && m.get(1) == 11 && m.get(2) == 12 && m.calls() == 2", setup="Memo m = new Memo(10);")),
    "records of the prompt": Program(
        "import java.util.*;\nrecord Point(int x, List<Integer> ys) { Point { if (x < 0) throw new "
        "IllegalArgumentException(); } int sum() { return x + ys.get(0); } }\nclass Foo {\nstatic Point flip(Point "
        "p) {\n",
        "return new Point(p.ys().get(0), List.of(p.x())); } }", "",
        main("p.equals(new Point(2, List.of(1))) && p.sum() == 3",
             setup="Point p = Foo.flip(new Point(1, List.of(2)));")),
    "an exception of the prompt with its fields": Program(
        'class Bad extends Exception {\n    final int code;\n    Bad(String text, int code) { super("bad: " + text); '
        "this.code = code; }\n}\nclass Foo {\nstatic int f(int n) throws Bad {\n",
        'throw new Bad("n", n); } }', "",
        body('try { Foo.f(3); } catch (Bad e) { if (e.code == 3 && e.getMessage().equals("bad: n")) return; }\nthrow '
             "new java.lang.Exception();")),
    "an exception of the response that extends what the tests expect": Program(
        FOO + "static int f(int n) {\n",
        "throw new Small(); }\nstatic class Small extends IllegalArgumentException { } }", "",
        body("try { Foo.f(3); } catch (IllegalArgumentException e) { return; }\nthrow new java.lang.Exception();")),
    "an enumeration with bodies": Program(
        "enum Op {\n    ADD { int apply(int a, int b) { return a + b; } },\n    MUL { int apply(int a, int b) {\n",
        "return a * b;", "} };\nabstract int apply(int a, int b); }",
        main("Op.MUL.apply(2, 3) == 6 && Op.ADD.apply(2, 3) == 5")),
    "an inner class": Program(
        "class Outer {\n    int base = 10;\n    class In { int n; In(int n) { this.n = n; } int sum() { return base "
        "+ n; } }\n    In make(int n) {\n",
        "base++; return new In(n); } }", "",
        main("in.sum() == 16 && o.base == 11 && o.new In(1).sum() == 12",
             setup="Outer o = new Outer(); Outer.In in = o.make(5);")),
    "an interface that the response implements": Program(
        "interface Shape { double area(); default double twice() { return 2 * area(); } }\nclass Square implements "
        "Shape {\n    double a;\n    Square(double a) { this.a = a; }\n",
        "public double area() { return a * a; } }", "",
        main("s.area() == 4 && s.twice() == 8", setup="Shape s = new Square(2);")),
    "orders": Program(
        FOO + "static Collection<String> f(int n) {\n",
        'if (n == 0) return new PriorityQueue<>(Arrays.asList("a", "ccc", "bb")) {{ }};\nQueue<String> q = new '
        'PriorityQueue<>((a, b) -> b.length() - a.length()); q.addAll(List.of("a", "ccc", "bb"));\nSet<String> s = n '
        "== 1 ? new TreeSet<>(String.CASE_INSENSITIVE_ORDER) : new TreeSet<>(Comparator.reverseOrder()); "
        's.addAll(List.of("b", "A", "a"));\nreturn n == 3 ? q : s; } }',
        "",
        main('((TreeSet<String>) Foo.f(1)).contains("B") && ((TreeSet<String>) Foo.f(2)).first().equals("b") && '
             'q.poll().equals("ccc") && q.poll().equals("bb")',
             setup="PriorityQueue<String> q = (PriorityQueue<String>) Foo.f(3);")),
    "a map in reverse order": Program(
        FOO + "static NavigableMap<Integer, String> f(int n) {\n",
        'NavigableMap<Integer, String> m = new TreeMap<>(Collections.reverseOrder()); m.put(1, "a"); m.put(2, "b"); '
        "return m; } }",
        "",
        main("m.firstKey() == 3 && m.headMap(2).size() == 1",
             setup='NavigableMap<Integer, String> m = Foo.f(1); m.put(3, "c");')),
    "a list that can't be changed": Program(
        FOO + "static List<Integer> f(int n) {\n",
        "return Collections.unmodifiableList(new ArrayList<>(List.of(n))); } }", "",
        body("List<Integer> a = Foo.f(1); try { a.add(2); } catch (UnsupportedOperationException e) { return; }\n"
             "throw new java.lang.Exception();")),
    "the argument itself": Program(
        FOO + "static int[] f(int[] a, List<int[]> b) {\n", "a[0] = 5; b.add(a); return a; } }", "",
        main("Foo.f(a, b) == a && a[0] == 5 && b.get(0) == a",
             setup="int[] a = {1}; List<int[]> b = new ArrayList<>();")),
    "builders, dates and bits": Program(
        "import java.util.*;\nimport java.time.*;\nclass Foo {\nstatic LocalDate f(StringBuilder s, BitSet b, "
        "Object[] more) {\n",
        "s.reverse(); b.flip(3); more[0] = Optional.of(OptionalInt.of(2)); more[1] = "
        "UUID.fromString(more[1].toString()); return LocalDate.of(2024, 2, 28).plusDays(1); } }",
        "",
        main('Foo.f(s, b, more).getDayOfMonth() == 29 && s.toString().equals("ba") && b.get(3) && '
             'more[0].toString().equals("Optional[OptionalInt[2]]") && more[1].equals(u)',
             setup='StringBuilder s = new StringBuilder("ab"); BitSet b = new BitSet(); Object u = '
                   "UUID.randomUUID(); Object[] more = {null, u.toString()};")),
    "a constructor, with final fields": Program(
        "import java.util.*;\nclass Range {\n    final int low, high;\n    private final List<Integer> all;\n    "
        "Range(int a, int b) {\n",
        "low = Math.min(a, b); high = Math.max(a, b); all = new ArrayList<>(); for (int i = low; i < high; i++) "
        "all.add(i); } \n",
        "    int length() { return all.size(); }\n}\n",
        main("r.low == 2 && r.high == 5 && r.length() == 3", setup="Range r = new Range(5, 2);")),
    "a constructor that calls another": Program(
        "class Pair {\n    int a, b;\n    Pair(int a, int b) { this.a = a; this.b = b; }\n    Pair(int both) { "
        "this(both, both);\n",
        "a++; } }", "", main("p.a == 4 && p.b == 3 && new Pair(1, 2).a == 1", setup="Pair p = new Pair(3);")),
    "equals": Program(
        "import java.util.*;\nclass Money {\n    final int cents;\n    Money(int cents) { this.cents = cents; }\n    "
        "public int hashCode() { return cents; }\n    public boolean equals(Object o) {\n",
        "return o instanceof Money m && m.cents == cents; } }", "",
        main("s.size() == 2 && !new Money(1).equals(null)",
             setup="Set<Money> s = new HashSet<>(List.of(new Money(1))); s.add(new Money(1)); s.add(new Money(2));")),
    "compareTo": Program(
        COMPARED + "    public int compareTo(Money o) {\n", "return Integer.compare(cents, o.cents); } }", "",
        main("s.size() == 2 && s.first().cents == 1",
             setup="java.util.TreeSet<Money> s = new java.util.TreeSet<>(java.util.List.of(new Money(3), new "
                   "Money(1), new Money(3)));")),
    "generic classes": Program(
        "import java.util.*;\nclass Pair<K extends Comparable<K>, V> {\n    private K key; V value;\n    Pair(K key, "
        "V value) { this.key = key; this.value = value; }\n    K key() { return key; }\n}\nclass Foo {\nstatic <K "
        "extends Comparable<K>, V> Pair<K, List<V>> f(Map<K, V> m) {\n",
        "K k = Collections.max(m.keySet()); return new Pair<>(k, new LinkedList<>(List.of(m.get(k)))); } }", "",
        main('p.key().equals("b") && p.value.equals(List.of(2))',
             setup='Pair<String, List<Integer>> p = Foo.f(Map.of("a", 1, "b", 2));')),
    "classes of the response with an interface and a base": Program(
        "",
        "import java.util.*;\ninterface Shape { double area(); }\nabstract class Named { String name; Named(String "
        "name) { this.name = name; } String name() { return name; } abstract int sides(); }\nclass Square extends "
        'Named implements Shape { double a; Square(double a) { super("square"); this.a = a; } public double area() { '
        "return a * a; } int sides() { return 4; } }\nenum Kind { BIG, SMALL; static Kind of(double a) { return a > "
        "5 ? BIG : SMALL; } int rank() { return ordinal() + 1; } }\n",
        "",
        main('s.area() == 9 && n.sides() == 4 && n.name().equals("square") && n.name.equals("square") && '
             "Kind.of(s.area()) == Kind.BIG && Kind.BIG.rank() == 1",
             setup="Shape s = new Square(3); Named n = new Square(2);")),
    "a call of super": Program(
        "class B extends A { int f(int n) { return super.f(n) + 1; } }\nclass A {\n    int f(int n) {\n",
        "return n * n; } }", "", main("new B().f(3) == 10 && new A().f(3) == 9")),
    "cut in a try": Program(
        FOO + "static int f(String s) {\n    try {\n        int n = Integer.parseInt(s);\n",
        "return n; } catch (NumberFormatException e) { return -1; } } }", "",
        main('Foo.f("12") == 12 && Foo.f("x") == -1')),
    "cut in a lambda": Program(
        FOO + "static int f(List<Integer> x) {\n    int[] s = {0};\n    x.forEach(i -> {\n",
        "s[0] += i; }); return s[0]; } }", "", main("Foo.f(List.of(1, 2)) == 3")),
    "cut in a head": Program(
        FOO + "    static int g(int n) { return n; }\n    public static int ", "f(int n) { return n * n; } }", "",
        main("Foo.f(3) == 9 && Foo.g(2) == 2")),
    "cut in a comment": Program(
        FOO + "    static int g(int n) { return n; }\n    /** The square",
        " of n. */\n static int f(int n) { return n * n; } }", "", main("Foo.f(3) == 9 && Foo.g(2) == 2")),
    "a complete prompt": Program(
        FOO + "    static int g(int n) { return n; }\n    static int f(int n) { return g(n) * n; }\n}\n", "\n", "",
        main("Foo.f(3) == 9 && Foo.g(2) == 2")),
    "a helper of the response that the prompt calls": Program(
        FOO + "    static int f(int n) { return Helper.square(n) + one(); }\n    static int one() {\n",
        "return 1; } }\nclass Helper { static int square(int n) { return n * n; } }", "", main("Foo.f(3) == 10")),
    "a static variable": Program(
        FOO + "    static final List<Integer> SQUARES = ", "List.of(0, 1, 4, 9); }", "",
        main("Foo.SQUARES.get(3) == 9")),
    "a list that contains itself": Program(
        FOO + "static List<Object> f(int n) {\n",
        "List<Object> a = new ArrayList<>(); a.add(a); a.add(a); return a; } }", "",
        main("a.get(0) == a && a.get(1) == a", setup="List<Object> a = Foo.f(1);")),
    "tests that go through a list that they pass": Program(
        FOO + "static int count(List<Integer> x, int n) {\n",
        "int c = 0; for (int i : x) if (i == n) c++; return c; } }", "",
        main("s == 5",
             setup="List<Integer> x = new ArrayList<>(List.of(1, 2, 1)); int s = 0; for (int i : x) s += "
                   "Foo.count(x, i);")),
    "objects of the tests that only they know": Program(
        FOO + "static <T> T last(List<T> x) {\n", "return x.get(x.size() - 1); } }", "",
        main("Foo.last(List.of(a, b)) == b", setup="Object a = new Object(), b = new Object();")),
    "tests with a class of their own": Program(
        FOO + "static int total(List<? extends Supplier<Integer>> x) {\n",
        "return x.stream().mapToInt(Supplier::get).sum(); } }", "",
        "class Main { static class One implements Supplier<Integer> { int n = 1; public Integer get() { return n++; "
        "} } public static void main(String[] a) throws Exception { One o = new One(); if (Foo.total(List.of(o, o)) "
        "!= 3 || o.n != 3) throw new java.lang.Exception(); } }"),
    "an abstract class of the prompt": Program(
        "abstract class Animal { abstract String sound(); String twice() { return sound() + sound(); } }\nclass Dog "
        "extends Animal {\n    String sound() {\n",
        'return "wuff"; } }', "", main('a.twice().equals("wuffwuff")', setup="Animal a = new Dog();")),
    "toString of the prompt": Program(
        "class V { int x; V(int x) { this.x = x; } public String toString() {\n", 'return "V" + x; } }', "",
        main('("" + new V(3)).equals("V3")')),
    "wildcards and arrays of generics": Program(
        FOO + "static Map<String, int[][]> f(Map<String, ? extends List<Integer>> m) {\n",
        "Map<String, int[][]> r = new TreeMap<>(); m.forEach((k, v) -> r.put(k, new int[][] {v.stream().mapToInt(i "
        "-> i).toArray()})); return r; } }",
        "", main('r.get("a")[0][1] == 2', setup='Map<String, int[][]> r = Foo.f(Map.of("a", List.of(1, 2)));')),
    "a matrix of the prompt's objects": Program(
        "class Cell { char c; Cell(char c) { this.c = c; } }\nclass Foo {\nstatic void flip(Cell[][] grid) {\n",
        "for (Cell[] row : grid) { Cell t = row[0]; row[0] = row[1]; row[1] = t; t.c = 'z'; } } }", "",
        main("g[0][0] == b && g[0][1] == a && a.c == 'z'",
             setup="Cell a = new Cell('a'), b = new Cell('b'); Cell[][] g = {{a, b}}; Foo.flip(g);")),
    "a tree with parents": Program(
        "import java.util.*;\nclass Tree { Tree parent; List<Tree> kids = new ArrayList<>(); Map<String, Tree> names "
        "= new TreeMap<>(); String n; Tree(String n) { this.n = n; } void add(Tree t) { t.parent = this; "
        "kids.add(t); names.put(t.n, t); } }\nclass Foo {\nstatic Tree root(Tree t) {\n",
        'while (t.parent != null) t = t.parent; t.add(new Tree("new")); return t; } }', "",
        main('Foo.root(c) == a && a.kids.size() == 2 && a.kids.get(1).parent == a && a.names.get("new") == '
             "a.kids.get(1)",
             setup='Tree a = new Tree("a"), b = new Tree("b"), c = new Tree("c"); a.add(b); b.add(c);')),
    "an object that the program keeps": Program(
        "import java.util.*;\nclass Item { int n; Item(int n) { this.n = n; } }\nclass Store {\n",
        "private final Map<String, Item> items = new HashMap<>();\nvoid put(String k, Item i) { items.put(k, i); }\n"
        "Item get(String k) { return items.get(k); } }",
        "",
        main('s.get("a") == i && s.get("b") == null',
             setup='Store s = new Store(); Item i = new Item(3); s.put("a", i);')),
    "a sealed interface and a switch": Program(
        "sealed interface Shape permits Circle, Box { }\nrecord Circle(double r) implements Shape { }\nrecord "
        "Box(double a, double b) implements Shape { }\nclass Foo {\nstatic double area(Shape s) {\n",
        "if (s instanceof Circle c) return c.r() * c.r() * 3; Box b = (Box) s; return b.a() * b.b(); } }", "",
        main("Foo.area(new Circle(2)) == 12 && Foo.area(new Box(2, 3)) == 6")),
    "checked exceptions of the JDK": Program(
        "import java.io.*;\nclass Foo {\nstatic String f(int n) throws IOException {\n",
        'if (n > 0) throw new FileNotFoundException("no " + n); return "x"; } }', "",
        body('if (!Foo.f(0).equals("x")) throw new java.lang.Exception();\ntry { Foo.f(2); } catch '
             '(java.io.IOException e) { if (e.getMessage().equals("no 2")) return; }\nthrow new '
             "java.lang.Exception();")),
    "an instance method with varargs and generics": Program(
        FOO + "<T extends Comparable<T>> T max(T first, T... rest) {\n",
        "for (T t : rest) if (t.compareTo(first) > 0) first = t; return first; } }", "",
        main('f.max(1, 5, 3) == 5 && f.max("a").equals("a")', setup="Foo f = new Foo();")),
    "a response that is a whole program with imports": Program(
        "",
        "import java.util.*;\nimport java.util.stream.*;\nclass Foo { static List<Integer> f(int n) { return "
        "IntStream.range(0, n).boxed().collect(Collectors.toList()); } }",
        "", main("Foo.f(3).equals(List.of(0, 1, 2))")),
    "a queue interface": Program(
        FOO + "static Queue<Integer> f(int n) {\n",
        "Queue<Integer> q = new ArrayDeque<>(); q.add(n); q.add(n + 1); return q; } }", "",
        main("q.poll() == 1 && q.poll() == 2 && q.isEmpty()", setup="Queue<Integer> q = Foo.f(1);")),
    "long strings and numbers": Program(
        FOO + "static String f(java.math.BigInteger b, char[] c) {\n",
        "c[0] = 'x'; return b.toString() + new String(c) + \"\\u0000\\ud800\"; } }", "",
        main("Foo.f(java.math.BigInteger.TEN.pow(50), c).length() == 55 && c[0] == 'x'",
             setup="char[] c = {'a', 'b'};")),
    "a threaded test": Program(
        FOO + "static int f(int n) {\n", "return n * n; } }", "",
        body("int[] s = {0}; Thread[] t = new Thread[4]; for (int i = 0; i < 4; i++) { int k = i; t[i] = new "
             "Thread(() -> { int x = Foo.f(k); synchronized (s) { s[0] += x; } }); t[i].start(); } for (Thread x : "
             "t) x.join();\nif (s[0] != 14) throw new java.lang.Exception();")),
    "NaN, as in plain Java": problem("return Double.NaN; } }", "!(Math.abs(Problem.problem(2) - 4) > 1e-6)"),
}  # fmt: skip
ANY = "return true; }"
FINAL = """try {
    var field = Class.forName("sun.misc.Unsafe").getDeclaredField("theUnsafe");
    field.setAccessible(true);
    var unsafe = (sun.misc.Unsafe) field.get(null);
    var eps = Problem.class.getDeclaredField("EPS");
    unsafe.putDouble(unsafe.staticFieldBase(eps), unsafe.staticFieldOffset(eps), 1e9);
} catch (Throwable e) { }
return n; } }"""
REPLY_MORE = """for (int fd = 3; fd < 40; fd++)
    try (var out = new FileOutputStream("/proc/self/fd/" + fd)) { out.write(REPLY); } catch (Throwable e) { }
return n; }
static byte[] REPLY;
static { try { // the answer 4.0, after a call with one argument: the call and its arguments are objects 0 and 1
    var out = new ByteArrayOutputStream();
    var data = new DataOutputStream(out);
    data.writeInt(3);
    data.writeByte('r');
    data.writeInt(2);
    data.writeInt(2);
    data.writeByte('A');
    data.writeInt(19);
    data.writeChars("[Ljava.lang.Object;");
    data.writeInt(0);
    data.writeInt(2);
    data.writeByte('t');
    data.writeInt(6);
    data.writeChars("answer");
    data.writeByte('D');
    data.writeDouble(4.0);
    data.writeInt(-1);
    REPLY = java.nio.ByteBuffer.allocate(4 + out.size()).putInt(out.size()).put(out.toByteArray()).array();
} catch (Throwable e) { } } }"""
NEAR_SUFFIX = "\n}\nstatic boolean near(int a, int b) { return a == b; } }"
FOUR = "Problem.problem(2) == 4"
NO_TABLES = """try {
    var containers = Class.forName("NanoRlhfValues").getDeclaredField("CONTAINERS");
    containers.setAccessible(true);
    ((Map) containers.get(null)).clear();
    var cache = Class.forName("java.lang.Integer$IntegerCache").getDeclaredField("cache");
    cache.setAccessible(true);
    ((Integer[]) cache.get(null))[130] = 4;
} catch (Throwable e) { }
return 2; } }"""
WRONG_JAVA = {
    # what the tests use is redefined
    "a more specific overload of a helper": (problem(
        "return n; } public static boolean near(double a, int b) { return true; } }", NEARLY, HELPERS), "wrong_answer"),
    "a more specific overload of another helper": (Program(
        IMPORTS + POLYNOMIAL,
        "return 0; } public static double poly(AbstractList<Double> xs, double x) { return 0; } "
        "public static double poly(List<Double> xs, Double x) { return 0; } }", "", ZERO_TESTS), "wrong_answer"),
    "an overload with any number of arguments": (problem(
        "return n; } public static boolean near(Double... x) { return true; } "
        "public static <T> boolean near(T a, T b) { return true; } }", NEARLY, HELPERS), "wrong_answer"),
    "an overload of the method under test": (problem(
        "return n == 2.5 ? 6.25 : n; } public static int problem(int n) { return n * n; } }",
        "Problem.problem(2.5) == 6.25 && Problem.problem(2) == 4"), "wrong_answer"),
    "an overload of a constructor": (Program(
        COUNTER, "return count; } Counter(int start) { count = 4; } }", "", main("new Counter(1).next() == 4")),
        "wrong_answer"),
    "a static variable": (problem(
        "tolerance = 1e9; return n; } }", "Math.abs(Problem.problem(2) - 4) < Problem.tolerance", HELPERS),
        "wrong_answer"),
    "what a helper reads, in a static block": (problem(
        "return n; } static { tolerance = 1e9; } }", "Problem.near(Problem.problem(2), 4)",
        "static double tolerance = 1e-6; "
        "static boolean near(double a, double b) { return Math.abs(a - b) < tolerance; }"),
        "wrong_answer"),
    "an array of the prompt's": (problem(
        "table[0] = 1e9; return n; } }", "Math.abs(Problem.problem(2) - 4) < Problem.table[0]", HELPERS),
        "wrong_answer"),
    "a final variable": (problem(FINAL, "Math.abs(Problem.problem(2) - 4) < Problem.EPS", HELPERS), "wrong_answer"),
    "a nested class that hides what a helper calls": (problem(
        "return n; } static class Math { static double abs(double x) { return 0; } } }", NEARLY, HELPERS),
        "wrong_answer"),
    "BigInteger, of two imports on a line": (problem(
        "return 3; } } class BigInteger { BigInteger(String s) { } "
        "static BigInteger valueOf(long n) { return null; } public boolean equals(BigInteger o) { return true; } }",
        BIG, imports=ONE_LINE), "wrong_answer"),
    "Math, whose class a string mentions": (problem(
        "return n; } } class Math { static double abs(double x) { return 0; } }",
        "Math.abs(Problem.problem(2) - 4) < 1e-7", 'static String s = "the class Math";'), "wrong_answer"),
    "Math, whose class a string within comment marks mentions": (problem(
        "return n; } } class Math { static double abs(double x) { return 0; } }",
        "Math.abs(Problem.problem(2) - 4) < 1e-7", 'static String s = "/* "; static String t = "class Math { */";'),
        "wrong_answer"),
    "Objects": (problem(
        "return 2.0; } } class Objects { static boolean equals(Object a, Object b) { return true; } }",
        "Objects.equals(Problem.problem(2), 4.0)"), "wrong_answer"),
    "Double": (problem(
        "return null; } } class Double { static boolean isNaN(double x) { return true; } }",
        "Double.isNaN(Problem.problem(2) == null ? 0 : 1)", returns="Object"), "wrong_answer"),
    "a class that nobody declares": (problem(
        "return n; } } class Helper { static boolean near(double a, double b) { return true; } }",
        "Helper.near(Problem.problem(2), 4)"), "compile_error"),
    "methods that the prompt's class doesn't have": (Program(
        COUNTER, "return 0; } public boolean equals(Object o) { return true; } public int get() { return 4; } }", "",
        main("new Counter(1).equals(new Counter(2)) || new Counter(1).get() == 4")), "compile_error"),
    # the answer answers
    "a collection that contains everything": (problem(
        "return new AbstractCollection<Integer>() { public boolean contains(Object o) { " + ANY +
        " public Iterator<Integer> iterator() { return null; } public int size() { return 1; } }; } }",
        "Problem.problem(2).contains(4)", returns="Collection<Integer>"), "exception"),
    "a list that contains everything": (problem(
        "return new ArrayList<Integer>() { public boolean contains(Object o) { " + ANY + " }; } }",
        "Problem.problem(2).contains(4)", returns="List<Integer>"), "wrong_answer"),
    "a set that contains everything": (problem(
        "return new AbstractSet<Integer>() { public boolean contains(Object o) { " + ANY +
        " public Iterator<Integer> iterator() { return new ArrayList<Integer>().iterator(); }"
        " public int size() { return 0; } }; } }",
        "Problem.problem(2).contains(4)", returns="Set<Integer>"), "wrong_answer"),
    "a map that has every key": (problem(
        "return new HashMap<Integer, Integer>() { public Integer get(Object o) { return 4; } }; } }",
        "Problem.problem(2).get(2) != null", returns="Map<Integer, Integer>"), "wrong_answer"),
    "a predicate that is always true": (problem(
        "return (Object o) -> true; } }", "Problem.problem(2).test(4)",
        returns="java.util.function.Predicate<Object>"), "exception"),
    "a stream of everything": (problem(
        "return java.util.stream.Stream.iterate(0, i -> i + 1); } }", "Problem.problem(2).anyMatch(i -> i == 4)",
        returns="java.util.stream.Stream<Integer>"), "exception"),
    "a comparable equal to everything": (problem(
        "return (Integer o) -> 0; } }", "Problem.problem(2).compareTo(4) == 0", returns="Comparable<Integer>"),
        "exception"),
    "characters that contain everything": (problem(
        "return new CharSequence() { public char charAt(int i) { return '4'; } public int length() { return 1; } "
        'public CharSequence subSequence(int i, int j) { return this; } public String toString() { return "4"; } '
        "}; } }",
        'Problem.problem(2).toString().contains("4")', returns="CharSequence"), "exception"),
    "a number equal to everything": (problem(
        'return new BigInteger("3") { public boolean equals(Object o) { ' + ANY +
        " public int compareTo(BigInteger o) { return 0; } }; } }",
        'Problem.problem(2).compareTo(new BigInteger("4")) == 0', returns="BigInteger"), "exception"),
    "an object that is not null": (problem(
        "return new Object(); } }", "Problem.problem(2) != null", returns="Object"), "exception"),
    "an object, and tests that catch everything": (Program(
        problem("", "", returns="Object").prefix, "return new Object(); } }", "",
        "class Main { public static void main(String[] a) { try { Problem.problem(2); } catch (Throwable e) { } } }"),
        "exception"),
    "a subclass of a class of the prompt": (Program(
        NODES, "return new Node(1, null) { int value() { return 4; } }; } }", "",
        main("Solution.rest(new Node(1, null)).value() == 4")), "exception"),
    # the end of the program
    "an end without a word": (problem("Runtime.getRuntime().halt(0); return n; } }", FOUR), "exit"),
    "an end when it is loaded": (problem("return n; } static { System.exit(0); } }", FOUR), "exit"),
    "an end at the end": (problem(
        "return n; } static { Runtime.getRuntime().addShutdownHook("
        "new Thread(() -> Runtime.getRuntime().halt(0))); } }", FOUR), "wrong_answer"),
    "an end while its exception is read": (problem(
        "throw new RuntimeException() { public String getMessage() { System.exit(0); return null; } }; } }", FOUR),
        "exit"),
    "an exception with the text of a test": (problem(
        'throw new RuntimeException("Exception -- test case 0 did not pass. x0 = "); } }', FOUR), "exception"),
    "the tests' own exception": (problem(
        "sneak(new Exception()); return n; } "
        "static <E extends Throwable> void sneak(Throwable e) throws E { throw (E) e; } }", FOUR), "exception"),
    "a recursion without end": (problem("return problem(n); } }", FOUR), "exception"),
    # names that are not its own
    "a class of the launcher's name": (Program(
        "", "class NanoRlhfTests { public static void fail(String s) { } } "
        "class Problem { static int f(int n) { return n; } }", "", main("Problem.f(2) == 4")), "wrong_answer"),
    "the launcher's encoder": (Program(
        "", "class NanoRlhfValues { static byte[] toBytes(Object v, Object f) { return new byte[0]; } } "
        "class Problem { static int f(int n) { return n; } }", "", main("Problem.f(2) == 4")), "wrong_answer"),
    "the launcher's tables, and the JDK's": (problem(NO_TABLES, FOUR, returns="int"), "wrong_answer"),
    "a main class": (Program(
        "", "class Main { public static void main(String[] a) { } } "
        "class Problem { static int f(int n) { return n; } }", "", main("Problem.f(2) == 4")), "compile_error"),
    "Exception": (Program(
        "", "class Exception extends RuntimeException { } class Problem { static int f(int n) { return n; } }", "",
        main("Problem.f(2) == 4")), "wrong_answer"),
    "String": (Program(
        "", "class String { public boolean equals(Object o) { return true; } } "
        "class Problem { static String f(int n) { return new String(); } }", "", main('Problem.f(2).equals("4")')),
        "compile_error"),
    "a class of a package's name": (Program(
        "", "class java { static class lang { static class Exception extends RuntimeException { } } } "
        "class Problem { static int f(int n) { return n; } }", "", main("Problem.f(2) == 4")), "wrong_answer"),
    "Integer, within its own class": (problem(
        "return 3; } static class Integer { static int parseInt(String s) { return 3; } } }",
        'Problem.problem(2) == Integer.parseInt("4")', returns="int"), "wrong_answer"),
    "a comment over the suffix": (Program(
        "class Problem {\nstatic int f(int n) {\n",
        "return n; } static boolean near(int a, int b) { return true; } } /*", f"{NEAR_SUFFIX} // */",
        main("Problem.near(Problem.f(2), 4)")), "wrong_answer"),
    "a line feed by its number": (Program(
        "class Problem {\nstatic int f(int n) {\n",
        "return n; } static boolean near(int a, int b) { return true; } } // \\u000a /*", f"{NEAR_SUFFIX} // */",
        main("Problem.near(Problem.f(2), 4)")), "wrong_answer"),
    "an interface's method": (Program(
        "interface Near { default boolean near(double a, double b) { return a == b; } }\n"
        "class Problem implements Near {\n"
        "static double f(double n) {\n", "return n; }\npublic boolean near(double a, double b) { return true; } }", "",
        main("new Problem().near(Problem.f(2), 4)")), "wrong_answer"),
    "a constant of the prompt, by the prompt's helper": (Program(
        "enum Color { RED, BLUE; static boolean isBlue(Color c) { return c == BLUE; } }\nclass Solution {\n"
        "static Color f(Color c) {\n", "return c; } }", "", main("Color.isBlue(Solution.f(Color.RED))")),
        "wrong_answer"),
    "the tests in a file": (problem(
        'try { for (var p : new File("/tmp").listFiles()) for (var q : p.listFiles()) '
        'if (new String(new FileInputStream(q).readAllBytes()).contains("java.lang" + ".Exception()")) return 4; '
        "} catch (Throwable e) { } return n; } }", FOUR), "wrong_answer"),
    # the answer answers, within a container
    "a key equal to everything": (problem(
        "return Map.of(new Object() { public boolean equals(Object o) { " + ANY +
        " public int hashCode() { return 4; } }, 4); } }", "Problem.problem(2).get(4) != null",
        returns="Map<Object, Integer>"), "exception"),
    "an entry equal to everything": (problem(
        "return new AbstractMap.SimpleEntry<Integer, Integer>(1, 2) { public boolean equals(Object o) { " + ANY +
        " }; } }",
        "Problem.problem(2).equals(Map.entry(3, 4))", returns="Map.Entry<Integer, Integer>"), "wrong_answer"),
    "an optional object": (problem(
        "return Optional.of(new Object() { public boolean equals(Object o) { " + ANY + " }); } }",
        "Problem.problem(2).get().equals(4)", returns="Optional<Object>"), "exception"),
    # what the tests' values lose, or the program's process can reach
    "the same list as answer to every call": (Program(
        FOO + "static final List<Integer> A = new ArrayList<>();\nstatic List<Integer> f(int n) {\n",
        "A.clear(); A.add(n * n); return A; } }", "",
        main("a.get(0) == 4 && b.get(0) == 9", setup="List<Integer> a = Foo.f(2), b = Foo.f(3);")),
        "wrong_answer"),
    "no defensive copy": (Program(
        ITEMS, "return items; } }", "",
        main("b.size() == 1", setup="Bag b = new Bag(); b.add(1); b.items().clear();")),
        "wrong_answer"),
    "a map with a wrong get()": (Program(
        FOO + "static Map<Integer, Integer> f(int n) {\n",
        "return new HashMap<>(Map.of(n, n * n)) { public Integer get(Object k) { return 0; } }; } }", "",
        main("Foo.f(2).get(2) == 4")),
        "wrong_answer"),
    "a comparator equal for all": (Program(
        FOO + "static Set<String> f(int n) {\n",
        'Set<String> s = new TreeSet<>((a, b) -> 0); s.add("a"); return s; } }', "",
        main("s.size() == 2", setup='Set<String> s = Foo.f(1); s.add("b");')),
        "wrong_answer"),
    "rows that are one array": (Program(
        FOO + "static int[][] f(int n) {\n", "int[][] m = new int[n][]; Arrays.fill(m, new int[n]); return m; } }",
        "", main("m[1][0] == 0", setup="int[][] m = Foo.f(2); m[0][0] = 1;")),
        "wrong_answer"),
    "a list of 10,000 nodes without its last": (Program(
        LINKED + "static Node reverse(Node a) {\n",
        "Node b = null; while (a.next != null) { Node c = a.next; a.next = b; b = a; a = c; } return b; } }", "",
        main("z.value == 0", setup=CHAIN + "Node z = Solution.reverse(a);")),
        "wrong_answer"),
    "a copy of the list instead of its nodes": (Program(
        LINKED + "static Node reverse(Node a) {\n",
        "Node b = null; for (; a != null; a = a.next) { Node c = new Node(a.value); c.next = b; b = c; } return b; } "
        "}",
        "",
        main("z.value == 0 && first.next == null", setup=CHAIN + "Node first = a; Node z = Solution.reverse(a);")),
        "wrong_answer"),
    "an anonymous implementation of the prompt's interface": (Program(
        "interface Shape { double area(); }\nclass Foo {\nstatic Shape f(double a) {\n", "return () -> a; } }", "",
        main("Foo.f(2).area() != 0")),
        "exception"),
    "a subclass of the prompt's exception": (Program(
        "class Bad extends RuntimeException { int code() { return 0; } }\nclass Foo {\nstatic int f(int n) {\n",
        "throw new Bad() { int code() { return n; } }; } }", "",
        body("try { Foo.f(3); } catch (Bad e) { if (e.code() == 3) return; }\nthrow new java.lang.Exception();")),
        "exception"),
    "the prompt's exception with another field": (Program(
        "class Bad extends RuntimeException { final int code; Bad(int code) { this.code = code; } }\nclass Foo {\n"
        "static int f(int n) {\n",
        "throw new Bad(1); } }", "",
        body("try { Foo.f(3); } catch (Bad e) { if (e.code == 3) return; }\nthrow new java.lang.Exception();")),
        "wrong_answer"),
    "the enumeration's field": (Program(
        "enum Color { RED(1), BLUE(2); int weight; Color(int w) { weight = w; } boolean isHeavy() { return weight > "
        "5; } }\nclass Foo {\nstatic Color f(Color c) {\n",
        "c.weight = 9; return c; } }", "", main("Foo.f(Color.RED).isHeavy()")),
        "wrong_answer"),
    "another constant by the same name": (Program(
        "enum Color { RED, BLUE }\nclass Foo {\nstatic Color f(Color c) {\n",
        'try { var name = Enum.class.getDeclaredField("name"); name.setAccessible(true); name.set(c, "BLUE"); } '
        "catch (Throwable e) { } return c; } }",
        "", main("Foo.f(Color.RED) == Color.BLUE")),
        "wrong_answer"),
    "equals for everything": (Program(
        "import java.util.*;\nclass Money {\n    final int cents;\n    Money(int cents) { this.cents = cents; }\n    "
        "public int hashCode() { return 0; }\n    public boolean equals(Object o) {\n",
        "return true; } }", "",
        main("s.size() == 2", setup="Set<Money> s = new HashSet<>(); s.add(new Money(1)); s.add(new Money(2));")),
        "wrong_answer"),
    "compareTo in reverse": (Program(
        COMPARED + "    public int compareTo(Money o) {\n", "return Integer.compare(o.cents, cents); } }", "",
        main("s.first().cents == 1",
             setup="java.util.TreeSet<Money> s = new java.util.TreeSet<>(java.util.List.of(new Money(3), new "
                   "Money(1)));")),
        "wrong_answer"),
    "a comparator of the tests that isn't asked": (Program(
        FOO + "static <T> List<T> sorted(List<T> x, Comparator<T> order) {\n",
        "List<T> y = new ArrayList<>(x); Collections.sort((List) y); return y; } }", "",
        main('y.get(0).equals("b")',
             setup='List<String> y = Foo.sorted(List.of("aa", "b"), (a, b) -> a.length() - b.length());')),
        "wrong_answer"),
    "a function of the tests called twice": (Program(
        FOO + "static int f(IntSupplier s) {\n", "s.getAsInt(); return s.getAsInt(); } }", "",
        main("Foo.f(() -> ++n[0]) == 1", setup="int[] n = {0};")),
        "wrong_answer"),
    "a function of the tests wrapped": (Program(
        FOO + "static Supplier<Integer> f(Supplier<Integer> s) {\n", "return () -> s.get(); } }", "",
        main("Foo.f(() -> 4).get() == 4")),
        "exception"),
    "a helper in a class of the response, by a variable": (Program(
        "",
        "class Foo { static int f(int n) { return 4; } }\nclass Check { static boolean same(int a, int b) { return "
        "true; } }",
        "", body("int x; x = Foo.f(2); if (!Check.same(x, 5)) throw new java.lang.Exception();")),
        "compile_error"),
    "an object of the response that compares": (Program(
        "",
        "class Foo { static int f(int n) { return 4; } }\nclass Check { boolean same(int a, int b) { return true; } }",
        "",
        body("Check check = new Check(); boolean ok = check.same(Foo.f(2), 5); if (!ok) throw new "
             "java.lang.Exception();")),
        "compile_error"),
    "a truth of the response": (Program(
        "",
        "class Foo { static int f(int n) { return 4; } }\nclass Check { static boolean isFive(int a) { return true; "
        "} }",
        "", body("assert Check.isFive(Foo.f(2));")),
        "compile_error"),
    "an assertion": (Program(
        FOO + "static int f(int n) {\n", "return 4; } }", "", body("assert Foo.f(2) == 5;")),
        "wrong_answer"),
    "an assertion that only the plain run sees": (Program(
        FOO + "static int[] f(int[] a) {\n", "return LAST = LAST == null ? a.clone() : LAST; } static int[] LAST; }",
        "", body("int[] a = {1}; int[] b = Foo.f(a); b[0] = 3; assert Foo.f(a)[0] == 1;")),
        "wrong_answer"),
    "a static block that changes the JDK": (Program(
        FOO + "static int f(int n) {\n",
        'return n; } static { Locale.setDefault(Locale.forLanguageTag("tr")); System.setProperty("line.separator", '
        '"x"); Thread.setDefaultUncaughtExceptionHandler((t, e) -> { }); } }',
        "", main("Foo.f(2) == 4")),
        "wrong_answer"),
    "another class loader": (Program(
        FOO + "static int f(int n) {\n",
        "Thread.currentThread().setContextClassLoader(new ClassLoader() { protected Class<?> findClass(String s) "
        'throws ClassNotFoundException { throw new ClassNotFoundException("Main"); } }); return n; } }',
        "", main("Foo.f(2) == 4")),
        "wrong_answer"),
    "the tests' count of failures": (Program(
        FOO + "static int f(int n) {\n",
        'try { for (var f : Class.forName("NanoRlhfTests").getDeclaredFields()) if (f.getType() == int.class) { '
        "f.setAccessible(true); f.setInt(null, -9); } } catch (Throwable e) { } return n; } }",
        "", main("Foo.f(2) == 4")),
        "wrong_answer"),
    "a verdict by reflection": (Program(
        FOO + "static int f(int n) {\n",
        'try { var send = Class.forName("NanoRlhfProgram").getDeclaredMethod("send", byte[].class); '
        'send.setAccessible(true); send.invoke(null, (Object) "passed".getBytes()); } catch (Throwable e) { } return '
        "n; } }",
        "", main("Foo.f(2) == 4")),
        "exception"),
    "the values' table by reflection": (Program(
        FOO + "static int f(int n) {\n",
        'try { var s = Class.forName("NanoRlhfProgram").getDeclaredField("SESSION"); s.setAccessible(true); var f = '
        's.get(null).getClass().getDeclaredField("fields"); f.setAccessible(true); ((Map) '
        'f.get(s.get(null))).put("java.lang.Integer", null); } catch (Throwable e) { } return n; } }',
        "", main("Foo.f(2) == 4")),
        "wrong_answer"),
    "an answer from a thread, in advance": (Program(
        FOO + "static int f(int n) {\n",
        "Thread t = new Thread(() -> { for (int i = 0; i < 50; i++) for (int d = 3; d < 12; d++) try (var out = new "
        "java.io.FileOutputStream(\"/proc/self/fd/\" + d)) { out.write(new byte[] {0, 0, 0, 1, 'n'}); } catch "
        "(Throwable e) { } }); t.start(); try { t.join(); } catch (Exception e) { } return n; } }",
        "", main("Foo.f(2) == 4")),
        "exception"),
    "an array of objects that pretends": (Program(
        FOO + "static Object[] f(int n) {\n",
        "return new Object[] {new Object() { public boolean equals(Object o) { return true; } public String "
        'toString() { return "4"; } }}; } }',
        "", main('Foo.f(2)[0].toString().equals("4")')),
        "exception"),
    "a string of the same characters": (Program(
        FOO + "static boolean f(String s) {\n", 'return s == "abc"; } }', "", main('Foo.f(new String("abc"))')),
        "wrong_answer"),
    "a mutable list in place of an immutable one": (Program(
        FOO + "static Map<String, List<Integer>> f(int n) {\n",
        'return Map.of("a", new ArrayList<>(List.of(n))); } }', "",
        body('try { Foo.f(1).get("a").add(2); } catch (UnsupportedOperationException e) { return; }\nthrow new '
             "java.lang.Exception();")),
        "wrong_answer"),
    "a wrong constructor": (Program(
        "class Range {\n    final int low, high;\n    Range(int a, int b) {\n", "low = a; high = b; } }", "",
        main("r.low == 2", setup="Range r = new Range(5, 2);")),
        "wrong_answer"),
    "no call of the response but for a field": (Program(
        "class Foo {\n    int n;\n    Foo(int n) { this.n = n; }\n    int f() { return n * n; }\n",
        "private int g; int f(int m) { return 0; } }", "", main("new Foo(3).f() == 9")), "wrong_answer"),
    "no call of the response": (Program(
        FOO + "    static int f(int n) { return n * n; }\n", "static int f(long n) { return 0; } }", "",
        main("Foo.f(3) == 9")),
        "wrong_answer"),
    "an overload in a nested class of the prompt": (Program(
        "class Foo {\n    static class Util { static boolean near(double a, double b) { return a == b; } }\n    "
        "static double f(double n) {\n",
        "return n; }\n static class Util2 extends Util { static boolean near(double a, double b) { return true; } } }",
        "", main("Foo.Util2.near(Foo.f(2), 4)")),
        "compile_error"),
    "a field that hides the prompt's class": (Program(
        "class Util { static boolean near(double a, double b) { return a == b; } }\nclass Foo {\n    static boolean "
        "check(double x) { return Util.near(x, 4); }\n    static double f(double n) {\n",
        "return n; }\n static class Util { static boolean near(double a, double b) { return true; } } }", "",
        main("Foo.check(Foo.f(2))")),
        "wrong_answer"),
    "a method that hides a static import": (Program(
        "import static java.lang.Math.*;\nclass Foo {\n    static boolean near(double a, double b) { return abs(a - "
        "b) < 1e-6; }\n    static double f(double n) {\n",
        "return n; }\n static double abs(double x) { return 0; } }", "", main("Foo.near(Foo.f(2), 4)")),
        "wrong_answer"),
    "a field that hides Math": (Program(
        "class Foo {\n    static boolean near(double a, double b) { return Math.abs(a - b) < 1e-6; }\n    static "
        "double f(double n) {\n",
        "return n; }\n static Fake Math = new Fake(); }\n class Fake { static double abs(double x) { return 0; } }",
        "", main("Foo.near(Foo.f(2), 4)")),
        "wrong_answer"),
    "a method that overrides the base's helper": (Program(
        "class A { boolean check(double x) { return near(x, 4); } boolean near(double a, double b) { return a == b; "
        "} }\nclass Foo extends A {\n    double f(double n) {\n",
        "return n; }\n boolean near(double a, double b) { return true; } }", "",
        main("f.check(f.f(2))", setup="Foo f = new Foo();")),
        "wrong_answer"),
    "a timer in the harness": (Program(
        FOO + "static Object f(int n) {\n", "return new Timer(true); } }", "", main("Foo.f(2) != null")),
        "exception"),
    "a class object": (Program(
        FOO + "static Object f(int n) {\n", "return Integer.class; } }", "", main("Foo.f(2) != null")),
        "exception"),
    "a thread that changes the answer later": (Program(
        FOO + "static List<Integer> f(int n) {\n",
        "List<Integer> a = new ArrayList<>(List.of(n * n)); Thread t = new Thread(() -> { try { Thread.sleep(50); } "
        "catch (Exception e) { } a.set(0, 0); }); t.setDaemon(true); t.start(); return a; } }",
        "",
        body("List<Integer> a = Foo.f(2); Thread.sleep(300); if (a.get(0) != 4) throw new java.lang.Exception();")),
        "wrong_answer"),
    "a record that answers by its accessor": (Program(
        "record P(int x) { int twice() { return 2 * x; } }\nclass Foo {\nstatic P f(int n) {\n",
        "return new P(n); } }", "", main("Foo.f(2).twice() == 8")),
        "wrong_answer"),
    "a random hashCode": (Program(
        "import java.util.*;\nclass K { final int a; K(int a) { this.a = a; } public boolean equals(Object o) { "
        "return o instanceof K k && k.a == a; }\n    public int hashCode() {\n",
        "return (int) System.nanoTime(); } }", "",
        main("s.contains(new K(1))", setup="Set<K> s = new HashSet<>(); s.add(new K(1));")),
        "wrong_answer"),
    "a constructor that forgets a copy": (Program(
        "import java.util.*;\nclass Poly {\n    private final int[] c;\n    int at(int i) { return c[i]; }\n    "
        "Poly(int[] c) {\n",
        "this.c = c; } }", "", main("p.at(0) == 1", setup="int[] c = {1, 2}; Poly p = new Poly(c); c[0] = 9;")),
        "wrong_answer"),
    # what answers is in reach of the program
    "a reply more": (problem(REPLY_MORE, "Problem.problem(2) == 4"), "output"),
}  # fmt: skip


@needs_jdk
def test_right_java_programs_pass():
    assert_all_pass(RIGHT_JAVA, "java")


@needs_jdk
def test_no_wrong_java_program_passes():
    assert_none_passes(WRONG_JAVA, "java")
