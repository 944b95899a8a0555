"""Python programs whose verdict depends on types, identity and the tests' own functions, in plain and guarded runs."""

import sys

import pytest

from nanorlhf.sandbox.execution import Program
from tests.sandbox.test_verdicts import assert_all_pass, verdicts_on

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="programs run on Linux only")
F = "def f(n):\n"
NODE = "class Node:\n    def __init__(self, val, next=None):\n        self.val = val\n        self.next = next\n"
ACCOUNT = """class Account:
    RATE = 2
    def __init__(self, n=0):
        self.n = n
        self.log = []
    def get(self):
        return self.n
    def deposit(self, k):
        '''Add k.'''
"""


def program(prefix, response, tests, suffix="\n"):
    return Program(prefix, response, suffix, tests)


RIGHT = {
    "a forgotten module with a function of its name": program(
        F, "    return [n]\n", "assert copy.deepcopy(f(2)) == [2] and sqrt(4) == 2"
    ),
    "matrix in place": program(
        "def f(m):\n",
        "    for r in m: r.reverse()\n",
        "m=[[1,2],[3,4]]\nr=m[0]\nf(m)\nassert m==[[2,1],[4,3]] and r is m[0] and r==[2,1]",
    ),
    "shared rows on purpose": program(
        F,
        "    row=[0]*n\n    return [row]*n\n",
        "a=f(2)\na[0][0]=1\nassert a==[[1,0],[1,0]]",
    ),
    "cyclic list": program(F, "    a=[n]; a.append(a); return a\n", "a=f(3)\nassert a[1] is a and a[0]==3"),
    "cyclic nodes": program(
        NODE + 'def f(n):\n',
        "    a=Node(1); b=Node(2,a); a.next=b; return a\n",
        "a=f(2)\nassert a.next.next is a and a.next.val==2",
    ),
    "long list of nodes": program(
        NODE + 'def f(n):\n',
        "    a=None\n    for i in range(n): a=Node(i,a)\n    return a\n",
        "a=f(20000)\nk=0\nwhile a: a=a.next; k+=1\nassert k==20000",
    ),
    "deep nested lists": program(
        F,
        "    a=[]\n    for i in range(n): a=[a]\n    return a\n",
        "a=f(5000)\nk=0\nwhile a: a=a[0]; k+=1\nassert k==5000",
    ),
    "dict of sets in place": program(
        "def f(d):\n",
        "    d['x'].add(3); d.setdefault('y', set()).add(1)\n",
        "d={'x':{1}}\nf(d)\nassert d=={'x':{1,3},'y':{1}}",
    ),
    "iterate while calling": program(
        "def f(d):\n",
        "    return len(d)\n",
        "d={1:2,3:4}\nfor k in d:\n    assert f(d)==2",
    ),
    "sort by key of the tests": program(
        "def f(xs, key):\n",
        "    return sorted(xs, key=key)\n",
        "assert f([3,-1,2], lambda x: -x)==[3,2,-1]\nassert f(['bb','a'], len)==['a','bb']",
    ),
    "filter with a type": program(
        "def f(xs, t):\n",
        "    return [x for x in xs if isinstance(x, t)]\n",
        "assert f([1,'a'], int)==[1] and f([1,'a'], str)==['a']",
    ),
    "callback that raises": program(
        "def f(g):\n",
        "    try: return g(0)\n    except ZeroDivisionError: return 'zero'\n",
        "assert f(lambda x: 1/x)=='zero'",
    ),
    "callback closure collects": program(
        "def f(xs, visit):\n",
        "    for x in xs: visit(x)\n",
        "out=[]\nf([1,2], out.append)\nassert out==[1,2]",
    ),
    "compose": program(
        "def f(a,b):\n",
        "    return lambda x: a(b(x))\n",
        "h=f(lambda x: x+1, lambda x: x*2)\nassert h(3)==7",
    ),
    "decorator": program(
        "def f(g):\n",
        "    def inner(*a, **k):\n        inner.calls += 1\n        return g(*a, **k)\n    inner.calls = 0\n"
        "    return inner\n",
        "@f\ndef g(x, y=1): return x+y\nassert g(1)==2 and g(1,y=5)==6",
    ),
    "generator in argument": program("def f(xs):\n", "    return sum(xs)\n", "assert f(x for x in [1,2])==3"),
    "iterator of the tests: map": program(
        "def f(xs):\n",
        "    return list(xs)\n",
        "assert f(map(str,[1,2]))==['1','2'] and f(iter([1]))==[1]",
    ),
    "account": program(
        ACCOUNT,
        "        self.n += k * self.RATE\n        self.log.append(k)\n",
        "a=Account(1)\na.deposit(2)\nassert a.get()==5 and a.log==[2] and a.n==5",
    ),
    "account with a helper method": program(
        ACCOUNT,
        "        self._add(k)\n    def _add(self, k):\n        self.n += k\n",
        "a=Account()\na.deposit(2)\na.deposit(k=3)\nassert a.get()==5",
    ),
    "subclass in tests": program(
        ACCOUNT,
        "        self.n += k\n",
        "class Sub(Account):\n    def get(self): return -self.n\na=Account(); a.deposit(3)\nassert a.get()==3",
    ),
    "class, methods by the response": program(
        "class Stack:\n    '''push and pop.'''\n",
        "    def __init__(self):\n        self.items = []\n    def push(self, x):\n"
        "        self.items.append(x)\n    def pop(self):\n        return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n",
        "s=Stack()\ns.push(1); s.push(2)\nassert s.pop()==2 and len(s)==1",
    ),
    "class with given init, methods by the response": program(
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n",
        "    def push(self, x):\n        self.items.append(x)\n    def pop(self):\n        return self.items.pop()\n",
        "s=Stack()\ns.push(1); s.push(2)\nassert s.pop()==2 and s.items==[1]",
    ),
    "property under test": program(
        "class C:\n    def __init__(self, r):\n        self.r = r\n    @property\n    def area(self):\n",
        "        return self.r ** 2\n",
        "assert C(3).area==9",
    ),
    "setter under test": program(
        "class C:\n    def __init__(self):\n        self._t = 0\n    @property\n    def t(self):\n"
        "        return self._t\n    @t.setter\n    def t(self, v):\n",
        "        self._t = max(v, 0)\n",
        "c=C()\nc.t=5\nassert c.t==5\nc.t=-1\nassert c.t==0",
    ),
    "init under test": program(
        "class C:\n    def __init__(self, a, b=2, *rest, k=1, **more):\n",
        "        self.s = a + b + sum(rest) + k + sum(more.values())\n",
        "assert C(1).s==4 and C(1,1,1,k=0,z=5).s==8",
    ),
    "frozen dataclass of the prompt": program(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int\n    y: int = 0\ndef f(p):\n",
        "    return P(p.y, p.x)\n",
        "assert f(P(1,2))==P(2,1) and {f(P(1,2))}=={P(2,1)}",
    ),
    "slots dataclass": program(
        "from dataclasses import dataclass\n@dataclass(slots=True)\nclass P:\n    x: int\n    y: int = 0\ndef f(p):\n",
        "    p.x += 1\n    return p\n",
        "p=P(1)\nassert f(p) is p and p==P(2)",
    ),
    "node.next default in class": program(
        "class Node:\n    next = None\n    def __init__(self, v):\n        self.v = v\ndef f(a, b):\n",
        "    a.next = b\n    return a\n",
        "a=f(Node(1),Node(2))\nassert a.next.v==2",
    ),
    "datetime": program(
        "import datetime\ndef f(n):\n",
        "    return datetime.datetime(2020,1,1) + datetime.timedelta(days=n)\n",
        "import datetime\n"
        "assert f(1)==datetime.datetime(2020,1,2) and f(1)-datetime.datetime(2020,1,1)==datetime.timedelta(1)",
    ),
    "ordered dict moved": program(
        "from collections import OrderedDict\ndef f(d):\n",
        "    d.move_to_end('a')\n    return d\n",
        "from collections import OrderedDict\nd=OrderedDict([('a',1),('b',2)])\n"
        "assert f(d) is d and list(d)==['b','a']",
    ),
    "deque maxlen": program(
        "from collections import deque\ndef f(n):\n",
        "    return deque(range(10), maxlen=n)\n",
        "q=f(3)\nq.append(1)\nassert list(q)==[8,9,1]",
    ),
    "defaultdict of lists": program(
        F,
        "    import collections\n    d=collections.defaultdict(lambda: [n])\n    d[1]\n    return d\n",
        "d=f(2)\nassert d[5]==[2] and d[1]==[2]",
    ),
    "lru cache info": program(F, "    return n*n\n", "assert [f(i) for i in range(3)]==[0,1,4]"),
    "exception with cause": program(
        F,
        "    raise KeyError('k') from ValueError('v')\n",
        "try:\n    f(1)\nexcept KeyError as e:\n    assert e.args==('k',)\nelse:\n    assert False",
    ),
    "decimal context": program(
        F,
        "    from decimal import Decimal\n    return Decimal(1)/Decimal(n)\n",
        "from decimal import Decimal\nassert f(4)==Decimal('0.25')",
    ),
    "regex": program(
        "import re\ndef f(s):\n",
        "    return re.search(r'(\\d+)-(?P<b>\\d+)', s)\n",
        "m=f('x 12-34')\nassert m.group(1)=='12' and m['b']=='34' and m.span()==(2,7)",
    ),
    "compiled pattern": program(
        "import re\ndef f(s):\n",
        "    return re.compile(s, re.I)\n",
        "assert f('ab').match('ABc')",
    ),
    "whole program, two functions": program(
        "",
        "def enc(s): return s[::-1]\ndef dec(s): return s[::-1]\n",
        "assert dec(enc('abc'))=='abc' and enc('ab')=='ba'",
        "",
    ),
    "whole program is_prime": program(
        "",
        "def is_prime(n): return n>1 and all(n%i for i in range(2,n))\n",
        "assert is_prime(7) and not is_prime(8)",
        "",
    ),
    "check(candidate)": program(
        F,
        "    return n+1\n",
        "def check(candidate):\n    assert candidate(1)==2\n    assert candidate(2)==3\ncheck(f)",
    ),
    "cut in a string": program("def f(n):\n    return 'a", "b' * n\n", "assert f(2)=='abab'"),
    "cut in a comment": program("def f(n):\n    # double", "\n    return 2*n\n", "assert f(2)==4"),
    "complete prompt, nothing added": program("def f(n):\n    return n+1\n", "", "assert f(1)==2"),
    "complete prompt, a comment": program("def f(n):\n    return n+1\n", "# done\n", "assert f(1)==2"),
    "cut after a helper": program("def h(n):\n    return n+1", "\n\ndef f(n):\n    return h(n)*2\n", "assert f(1)==4"),
    "an elif": program(
        "def f(n):\n    if n == 1:\n        return 5\n",
        "    elif n == 2:\n        return 6\n    return 7\n",
        "assert [f(1),f(2),f(3)]==[5,6,7]",
    ),
    "an except": program(
        "def f(n):\n    try:\n        return 1/n\n",
        "    except ZeroDivisionError:\n        return 0\n",
        "assert f(0)==0 and f(2)==.5",
    ),
    "writes and reads a file": program(
        F,
        "    open('a','x').write(str(n))\n    return int(open('a').read())\n",
        "assert f(3)==3",
    ),
    "random with seed": program(
        "import random\ndef f(seed):\n",
        "    random.seed(seed)\n    return random.random()\n",
        "import random\nrandom.seed(3)\nx=random.random()\nassert f(3)==x",
    ),
    "global counter": program(
        "count = 0\ndef f(n):\n",
        "    global count\n    count += n\n    return count\n",
        "assert f(1)==1 and f(2)==3",
    ),
    "main with input": program(F, "    return n\nif __name__=='__main__':\n    print(f(3))\n", "assert f(1)==1"),
    "numbers as keys, None, bools": program(
        F,
        "    return {True:None, 2.5:(1,), None:b'x', (1,2):frozenset({1})}\n",
        "assert f(1)=={True:None, 2.5:(1,), None:b'x', (1,2):frozenset({1})}",
    ),
    "enumerate/zip/range/reversed": program(F, "    return reversed(range(n))\n", "assert list(f(3))==[2,1,0]"),
    "enum of response returned as value": program(
        "import enum\nclass C(enum.Flag):\n    A=1\n    B=2\ndef f(n):\n",
        "    return C.A | C.B\n",
        "assert f(1)==C.A|C.B",
    ),
    "class counts its objects": program(
        "class C:\n    total = 0\n    def __init__(self):\n",
        "        C.total += 1\n        self.i = C.total\n",
        "a,b=C(),C()\nassert b.i==2",
    ),
    "static nested def test helper": program(
        "def f(xs):\n",
        "    return max(xs)\n",
        "def ok(a,b): return a==b\nassert ok(f([1,3]),3)",
    ),
    "yield method": program(
        "class T:\n    def __init__(self, xs):\n        self.xs = xs\n    def __iter__(self):\n",
        "        for x in self.xs:\n            yield x\n",
        "assert list(T([1,2]))==[1,2] and sum(T([1,2]))==3",
    ),
    "comparison methods": program(
        "from functools import total_ordering\n@total_ordering\nclass V:\n    def __init__(self, x):\n"
        "        self.x = x\n    def __eq__(self, o):\n        return self.x == o.x\n    def __lt__(self, o):\n",
        "        return self.x < o.x\n",
        "assert V(1)<V(2) and V(2)>=V(2) and max(V(1),V(3)).x==3",
    ),
    "context manager": program(
        "class T:\n    def __init__(self):\n        self.log = []\n    def __enter__(self):\n"
        "        self.log.append('in')\n        return self\n    def __exit__(self, *a):\n",
        "        self.log.append('out')\n        return False\n",
        "with T() as t: pass\nassert t.log==['in','out']",
    ),
    "linked list class": program(
        "class Node:\n    def __init__(self, v):\n        self.v = v\n        self.next = None\nclass L:\n"
        "    def __init__(self):\n        self.head = None\n    def push(self, v):\n        node = Node(v)\n"
        "        node.next = self.head\n        self.head = node\n    def reverse(self):\n",
        "        prev = None\n        while self.head:\n"
        "            self.head.next, prev, self.head = prev, self.head, self.head.next\n"
        "        self.head = prev\n",
        "l=L()\nfor i in range(3): l.push(i)\nl.reverse()\nassert [l.head.v,l.head.next.v,l.head.next.next.v]==[0,1,2]",
    ),
}  # fmt: skip
WRONG = {
    "never asked, expected constant": program(
        "def f(n):\n    return n+1\n",
        "    raise SystemExit\n",
        "assert f(1)==3",
    ),
    "cached answer": program(
        F,
        "    CACHE.append(n)\n    return CACHE\nCACHE=[]\n",
        "a=f(1)\nb=f(2)\nassert a==[1] and b==[1,2]",
    ),
    "returns the argument": program("def f(xs):\n", "    return xs\n", "a=[1]\nb=f(a)\nb.append(2)\nassert a==[1]"),
    "shared rows": program(F, "    return [[0]*n]*n\n", "a=f(2)\na[0][0]=1\nassert a==[[1,0],[0,0]]"),
    "shallow copy": program("def f(m):\n", "    return list(m)\n", "m=[[1]]\nc=f(m)\nc[0].append(2)\nassert m==[[1]]"),
    "plain forged, wrong": program(
        F,
        "    import sys\n    fr=sys._getframe()\n    while fr:\n        for k,v in list(fr.f_locals.items()):\n"
        "            if k in('namespace','tests_code'): pass\n        fr=fr.f_back\n    return 4\n",
        "assert f(2)==5",
    ),
    "plain passes by exit": program(
        F,
        "    import __main__, os\n    if hasattr(__main__, 'T'): os._exit(0)\n    return n\n",
        "T=1\nassert f(2)==5",
    ),
    "asserts compiled away": program(
        F,
        "    import builtins\n    builtins.AssertionError=type('A',(Exception,),{})\n    return n\n",
        "assert f(2)==5",
    ),
    "reads tests in the plain run": program(
        F,
        "    import sys, re\n    fr=sys._getframe()\n    while fr:\n        c=fr.f_code\n"
        "        if c.co_filename=='<tests>':\n"
        "            return [k for k in c.co_consts if type(k) is int and k!=n][0]\n        fr=fr.f_back\n"
        "    return n\n",
        "assert f(2)==5",
    ),
    "leaves answers for the guarded run": program(
        F,
        "    import os, glob\n"
        "    for p in glob.glob(os.path.dirname(os.getcwd())+'/*/x'): return int(open(p).read())\n"
        "    open('x','w').write('5')\n    return n\n",
        "assert f(2)==5",
    ),
    "another process waits for the tests' text": program(
        F,
        "    import os\n    if os.fork()==0:\n        import select\n        for fd in range(3,40):\n"
        "            try:\n                if select.select([fd],[],[],0)[0]: os.read(fd,1)\n"
        "            except (OSError,ValueError): pass\n        os._exit(0)\n    return n\n",
        "assert f(2)==5",
    ),
    "callback as the answer": program("def f(g, n):\n", "    return g\n", "assert f(lambda x: x+3, 2)==5"),
    "callback as the judge": program("def f(check):\n", "    return check\n", "assert f(lambda x: True) is True"),
    "hides a constant": program(
        ACCOUNT,
        "        self.RATE = 5\n",
        "a=Account()\na.deposit(1)\nassert a.RATE==5 and a.get()==0",
    ),
    "hides get": program(ACCOUNT, "        self.get = lambda: k\n", "a=Account()\na.deposit(5)\nassert a.get()==5"),
    "class replaced": program(
        ACCOUNT,
        "        pass\nclass Account:\n    def __init__(self, n=0): pass\n    def get(self): return 5\n"
        "    def deposit(self, k): pass\n",
        "a=Account()\na.deposit(5)\nassert a.get()==5",
    ),
    "metaclass state": program(
        "",
        "class P:\n    def __eq__(s,o): return True\n    __hash__=None\n    def __init__(s,x): pass\n"
        "def f(n): return P(0)\n",
        "assert f(2)==2",
        "",
    ),
    "own equality, whole program": program(
        "",
        "class V:\n    def __init__(s,x): s.x=1\n    def __eq__(s,o): return True\ndef f(n): return 1\n",
        "assert f(2)==V(3)",
        "",
    ),
    "judge by difference": program(
        "",
        "def f(n): return 4\ndef distance(a,b): return 0\n",
        "assert distance(f(2),5)<1e-6",
        "",
    ),
    "judge by variable": program("", "def f(n): return 4\ndef ok(a): return True\n", "x=f(2)\nassert ok(x)", ""),
    "judge in a class": program(
        "",
        "def f(n): return 4\nclass Check:\n    @staticmethod\n    def same(a,b): return True\n",
        "assert Check.same(f(2),5)",
        "",
    ),
    "namedtuple with false fields": program(
        F,
        "    import collections\n    class T(collections.namedtuple('T','x y')):\n"
        "        __eq__=lambda s,o: True\n        __hash__=None\n    return T(1,2)\n",
        "assert f(2)==(5,5)",
    ),
    "fake fields": program(
        F,
        "    class T(tuple):\n        _fields=('x','count')\n        def count(s,x): return 5\n    return T((1,2))\n",
        "assert f(2).count(1)==5",
    ),
    "false match": program(
        "import re\ndef f(s):\n",
        "    class M:\n        def group(self,*a): return '5'\n        def __bool__(self): return True\n"
        "    return M()\n",
        "assert f('5').group()=='5' and f('5')",
    ),
    "type by name": program(
        F,
        "    return type('int',(),{'__eq__':lambda s,o:True,'__hash__':lambda s:0})\n",
        "assert f(2) is int",
    ),
    "datetime subclass": program(
        "import datetime\ndef f(n):\n",
        "    class D(datetime.date):\n        def __eq__(s,o): return True\n        __hash__=None\n"
        "        def isoformat(s): return '2020-01-05'\n    return D(2020,1,1)\n",
        "import datetime\nassert f(2)==datetime.date(2020,1,5)",
    ),
    "tz lies": program(
        "import datetime\ndef f(n):\n",
        "    class Z(datetime.tzinfo):\n        def utcoffset(s,d): return datetime.timedelta(hours=5)\n"
        "        def dst(s,d): return None\n        def tzname(s,d): return 'x'\n"
        "    return datetime.datetime(2020,1,1,tzinfo=Z())\n",
        "import datetime\nassert f(2).hour==0 and f(2)!=0 and f(2).tzinfo.utcoffset(None)==datetime.timedelta(hours=4)",
    ),
    "defaultdict factory answers": program(
        F,
        "    import collections\n    class T(collections.defaultdict):\n"
        "        def __missing__(s,k): return 5\n    return T()\n",
        "assert f(2)['a']==5 and f(2)=={1:1}",
    ),
    "exception pretends": program(
        F,
        "    class KeyError(Exception): pass\n    raise KeyError(n)\n",
        "import builtins\ntry:\n    f(2)\nexcept builtins.KeyError:\n    pass",
    ),
    "exception pretends module": program(
        F,
        "    class KeyError(Exception): pass\n    KeyError.__module__='builtins'\n    raise KeyError(n)\n",
        "try:\n    f(2)\nexcept KeyError:\n    pass",
    ),
    "mutates the argument wrongly": program(
        "def f(xs):\n",
        "    xs.append(9)\n    return sum(xs)-9\n",
        "a=[1,2]\nassert f(a)==3 and a==[1,2]",
    ),
    "mutates a nested argument by kw": program(
        "def f(d):\n",
        "    d['a'][0].clear()\n    return 1\n",
        "x=[1]\nassert f(d={'a':[x]})==1 and x==[1]",
    ),
    "generator instead of list": program(F, "    yield from range(n)\n", "assert f(2)==[0,1]"),
    "half-written pipe": program(
        F,
        "    import os\n    for fd in range(3,40):\n        try: os.write(fd,b'\\0\\0')\n"
        "        except OSError: pass\n    return n\n",
        "assert f(2)==5",
    ),
    "redefines by atexit": program(
        F,
        "    return n\nimport atexit\nimport sys\natexit.register(lambda: sys.stdout.write('passed'))\n",
        "assert f(2)==5",
    ),
    "gc rewrites tests' constants": program(
        F,
        "    import gc\n    for o in gc.get_objects():\n        if isinstance(o,dict) and 'T' in o: o['T']=n\n"
        "    return n\n",
        "T=5\nassert f(2)==T",
    ),
    "cut line, response comments it out": program(
        "def f(n):\n    return n + 3",
        "  # three\nf = lambda n: 4\n",
        "assert f(2)==5",
    ),
    "complete prompt and exit": program("def f(n):\n    return n+3\n", "import os\nos._exit(0)\n", "assert f(2)==5"),
    "a skipped unittest": program(
        "import unittest\n" + F, "    raise unittest.SkipTest\n",
        "class Case(unittest.TestCase):\n    def test(self):\n        self.assertEqual(f(2), 4)\n"
        "result = unittest.TestResult()\nCase('test').run(result)\nassert result.wasSuccessful()",
    ),
    "eval as an argument": program(
        "def f(g):\n", "    return g('__import__(\"__main__\").Session.__eq__')\n", "assert f(eval) == 4"
    ),
    "a factory that ends the tests": program(
        F, "    import collections\n    return collections.defaultdict(exit)\n", "assert f(2)[0] == 4"
    ),
    "the name of a builtin function": program(
        F, "    t = type('print', (), {})\n    return t\n", "print(1)\nassert f(2) is print"
    ),
}  # fmt: skip


def test_right_programs_pass_whatever_they_return():
    assert_all_pass(RIGHT, "python")


def test_wrong_programs_fail_in_the_guarded_or_the_plain_run():
    assert {name for name, verdict in verdicts_on(WRONG, "python").items() if verdict.passed} == set()
