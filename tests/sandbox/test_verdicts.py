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


def main(*conditions):
    checks = "\n".join(f"if (!({condition})) throw new java.lang.Exception();" for condition in conditions)
    return f"class Main {{ public static void main(String[] args) throws Exception {{\n{checks}\n}} }}\n"


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
    data.writeByte('r');
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
        'public CharSequence subSequence(int i, int j) { return this; } public String toString() { return "4"; } }; } }',
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
    "an exception that says what a test says": (problem(
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
    # what answers is in reach of the program
    "a reply more": (problem(REPLY_MORE, "Problem.problem(2) == 4"), "output"),
}  # fmt: skip


@needs_jdk
def test_right_java_programs_pass():
    assert_all_pass(RIGHT_JAVA, "java")


@needs_jdk
def test_no_wrong_java_program_passes():
    assert_none_passes(WRONG_JAVA, "java")
