"""Mutation operators: change a function in one place, like a typo would.

An operator takes a node of the syntax tree and yields replacements. We don't mutate what no test could or should
detect: annotations, docstrings, `assert`, error messages, f-strings, and the arguments `device` (the tests run on a
CPU) and `strict` (of `zip`, a check that never fires).
"""

import ast
import builtins
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

from course.edit import Function, find_function, spliced

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
COMMUTATIVE_OPERATORS = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor)
# swapping the arguments changes nothing; for isinstance, it only crashes
COMMUTATIVE_CALLS = {"max", "min", "maximum", "minimum", "promote_types", "addcmul_", "isinstance"}
TWINS = [
    *(("min", "max"), ("minimum", "maximum"), ("amin", "amax"), ("argmin", "argmax"), ("any", "all"), ("sum", "mean")),
    *(("floor", "ceil"), ("zeros", "ones"), ("zeros_like", "ones_like"), ("new_zeros", "new_ones")),
    *(("zeros_", "ones_"), ("left_pad", "right_pad")),
]
TWIN = dict(TWINS) | {second: first for first, second in TWINS}
# calls that may be replaced by their argument, or by the object before the dot
OPTIONAL_CALLS = {
    *("abs", "neg", "exp", "exp_", "expm1", "log", "log2", "sqrt", "rsqrt", "square", "ceil", "floor", "sigmoid"),
    *("logsigmoid", "tanh", "relu", "softmax", "log_softmax", "cumsum", "clamp", "clip", "masked_fill", "detach"),
    *("float", "double", "long", "int", "bool", "to", "copy", "reversed", "sorted"),
}
NOT_MUTATED = {"device", "strict"}
# functions whose results a training step differentiates, and how many of them, from the first
DIFFERENTIATED = dict.fromkeys(
    (
        *("demonstration_loss", "end_scores", "contrastive_loss", "regression_loss", "response_hidden", "margin_loss"),
        *(
            "summed_logprobs",
            "k1",
            "k2",
            "k3",
            "stored_kl_divergence",
            "compared_logprobs",
            "policy_loss",
            "value_loss",
        ),
        *("response_values", "ppo_loss", "compare", "grounding", "triplet_loss"),
    ),
    1,
) | {"response_logprobs": 2, "stored_logprobs": 2}
ATOMS = (
    *(ast.stmt, ast.Slice, ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Dict, ast.Set),
    ast.Constant,
)  # nodes that need no parentheses


@dataclass(frozen=True)
class Mutant:
    operator: str
    line: int
    """line in the original file"""
    change: str
    """the mutated statement, or the head of a compound one; `pass  # original` for a deleted one"""
    number: int
    """index among the function's mutants with the same `change`"""
    source: str
    """the whole mutated file"""


@dataclass(frozen=True)
class Location:
    """A node, its position in its parent, and the statement that contains it."""

    node: ast.AST
    parent: ast.AST
    field: str
    index: int | None
    statement: ast.stmt

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def make_mutants(source: str, name: str) -> list[Mutant]:
    """Return all distinct mutants of a function in a file. Raises LookupError if the function doesn't exist."""
    function = find_function(source, name)
    known = module_names(ast.parse(source)) | set(dir(builtins))
    programs = {ast.dump(function)}
    alike: Counter[str] = Counter()
    mutants = []
    for location in list(locations(function)):
        for operator in OPERATORS:
            for new in operator(location, function):
                if unknown_name(new, known):
                    continue
                location.put(new)
                after = head(new if location.node is location.statement else location.statement)
                program = ast.dump(function)
                location.put(location.node)
                if program not in programs:
                    programs.add(program)
                    mutated = spliced(source, location.node, to_source(new))  # type: ignore[arg-type]
                    words = operator.__name__.rstrip("_").replace("_", " ")
                    line = location.node.lineno  # type: ignore[attr-defined]
                    if isinstance(new, ast.Pass):
                        after += f"  # {head(location.node)}"
                    mutants.append(Mutant(words, line, after, alike[after], mutated))
                    alike[after] += 1
    return mutants


def module_names(module: ast.Module) -> set[str]:
    """Return the names that a module imports or defines at the top level."""
    nodes = [node for node in module.body if not isinstance(node, ast.If | ast.Try)]
    nodes += [child for node in module.body if isinstance(node, ast.If | ast.Try) for child in node.body]
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {alias.asname or alias.name for alias in aliases} | set(functions)


def unknown_name(new: ast.AST, known: set[str]) -> bool:
    """Return whether the mutation calls a twin that the module doesn't import, which would only crash."""
    return isinstance(new, ast.Call) and isinstance(new.func, ast.Name) and new.func.id in set(TWIN) - known


def locations(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[Location]:
    """Yield every node below that may be mutated."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.JoinedStr):
                continue
            if isinstance(child, ast.keyword) and child.arg in NOT_MUTATED:
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):  # a docstring
                continue
            enclosing = child if isinstance(child, ast.stmt) else statement
            if isinstance(child, ast.expr | ast.stmt) and enclosing is not None:
                yield Location(child, node, field, index, enclosing)
            if not isinstance(child, ast.Raise):
                yield from locations(child, enclosing)


def head(statement: ast.AST) -> str:
    """Return a statement in one line; for a compound one, the part before its body."""
    bodies = {field: [] for field in ("body", "orelse", "finalbody", "handlers") if hasattr(statement, field)}
    emptied = changed(statement, **bodies) if isinstance(statement, ast.stmt) else statement
    return ast.unparse(emptied).splitlines()[0]


def to_source(node: ast.AST) -> str:
    text = ast.unparse(node)
    if isinstance(node, ATOMS) and not text.startswith("-"):
        return text
    return f"({text})"


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """Return a shallow copy with changed fields."""
    new = copy(node)
    for field, value in fields.items():
        setattr(new, field, value)
    return new


def with_item(items: list, index: int, item: object) -> list:
    return [*items[:index], item, *items[index + 1 :]]


def number(value: float) -> ast.expr:
    """Return the node of a number; a negative one is an operator and a number, as in Python's parser."""
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))


def shifted(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an index off by one, except for constants, which the operator `constant` handles."""
    a_number = isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)
    if not a_number and not isinstance(node, ast.Constant | ast.Slice | ast.Starred):
        yield ast.BinOp(node, ast.Add(), ast.Constant(1))
        yield ast.BinOp(node, ast.Sub(), ast.Constant(1))


# ------------------------------------------------------------------------------------------------------ the operators
def comparison(location: Location, _: Function) -> Iterator[ast.AST]:
    """a < b: a <= b, a >= b"""
    node = location.node
    if isinstance(node, ast.Compare):
        for i, operation in enumerate(node.ops):
            for other in COMPARISONS[type(operation)]:
                yield changed(node, ops=with_item(node.ops, i, other()))


def arithmetic(location: Location, _: Function) -> Iterator[ast.AST]:
    """a + b: a - b; a += b: a -= b, a = b"""
    node = location.node
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield changed(node, op=ARITHMETIC[type(node.op)]())
    if isinstance(node, ast.AugAssign):
        yield ast.Assign([node.target], node.value, lineno=node.lineno)


def swapped_operands(location: Location, _: Function) -> Iterator[ast.AST]:
    """a - b: b - a, unless it is squared"""
    node, parent = location.node, location.parent
    power = parent.right if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Pow) else None
    squared = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and getattr(power, "value", 0) == 2
    if isinstance(node, ast.BinOp) and not isinstance(node.op, COMMUTATIVE_OPERATORS) and not squared:
        yield changed(node, left=node.right, right=node.left)


def dropped_operand(location: Location, _: Function) -> Iterator[ast.AST]:
    """a + b: a, b; a and b: a, b; -a: a"""
    node = location.node
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield rest[0] if len(rest) == 1 else changed(node, values=rest)


def boolean(location: Location, _: Function) -> Iterator[ast.AST]:
    """a and b: a or b"""
    node = location.node
    if isinstance(node, ast.BoolOp):
        yield changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def negated_condition(location: Location, _: Function) -> Iterator[ast.AST]:
    """if a: if not a; other operators negate `a < b` and `not a`"""
    node, parent = location.node, location.parent
    condition = location.field == "ifs" or (
        isinstance(parent, ast.If | ast.While | ast.IfExp) and location.field == "test"
    )
    if condition and not (isinstance(node, ast.UnaryOp) or (isinstance(node, ast.Compare) and len(node.ops) == 1)):
        yield ast.UnaryOp(ast.Not(), node)  # type: ignore[arg-type]


def constant(location: Location, _: Function) -> Iterator[ast.AST]:
    """2: 3, 1; 0.5: 1.5, 0.0; True: False; "a": "a!" """
    node = location.node
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, int):
            yield from (number(node.value + 1), number(node.value - 1))
        elif isinstance(node.value, float):
            yield from (number(node.value + 1), number(0.0))
        elif isinstance(node.value, str):
            yield ast.Constant(node.value + "!")


def index(location: Location, _: Function) -> Iterator[ast.AST]:
    """x[i]: x[i + 1], x[i - 1]; x[i:]: also x[:], x[i:-1]; x[:i]: also x[:], x[1:i]; range(i): range(i + 1), ..."""
    node = location.node
    if isinstance(node, ast.Subscript):
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for i, part in enumerate(indices):
            for new in sliced(part) if isinstance(part, ast.Slice) else shifted(part):
                new_slice = changed(node.slice, elts=with_item(indices, i, new)) if node.slice is not part else new
                yield changed(node, slice=new_slice)
    elif isinstance(node, ast.Call) and called(node) in ("range", "arange"):
        for i, argument in enumerate(node.args):
            for new in shifted(argument):
                yield changed(node, args=with_item(node.args, i, new))


def sliced(part: ast.Slice) -> Iterator[ast.AST]:
    for bound in ("lower", "upper"):
        value, other_value = getattr(part, bound), getattr(part, "upper" if bound == "lower" else "lower")
        if value is not None:
            yield from (changed(part, **{bound: new}) for new in shifted(value))
            yield changed(part, **{bound: None})
        elif other_value is not None:
            yield changed(part, **{bound: number(1 if bound == "lower" else -1)})


def swapped_arguments(location: Location, _: Function) -> Iterator[ast.AST]:
    """f(a, b, c): f(b, a, c), f(a, c, b); return a, b: return b, a"""
    node = location.node
    if isinstance(node, ast.Call) and called(node) not in COMMUTATIVE_CALLS:
        items, field = node.args, "args"
    elif isinstance(node, ast.Tuple) and isinstance(location.parent, ast.Return):
        items, field = node.elts, "elts"
    else:
        return
    for i in range(len(items) - 1):
        if not isinstance(items[i], ast.Starred) and not isinstance(items[i + 1], ast.Starred):
            yield changed(node, **{field: [*items[:i], items[i + 1], items[i], *items[i + 2 :]]})


def dropped_argument(location: Location, _: Function) -> Iterator[ast.AST]:
    """f(a, dim=1): f(a)"""
    node = location.node
    if isinstance(node, ast.Call):
        for i, argument in enumerate(node.keywords):
            if argument.arg not in NOT_MUTATED:
                yield changed(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])


def another_function(location: Location, _: Function) -> Iterator[ast.AST]:
    """x.min(): x.max()"""
    node = location.node
    if isinstance(node, ast.Call) and called(node) in TWIN:
        twin = TWIN[called(node)]
        func = changed(node.func, attr=twin) if isinstance(node.func, ast.Attribute) else ast.Name(twin, ast.Load())
        yield changed(node, func=func)


def dropped_call(location: Location, _: Function) -> Iterator[ast.AST]:
    """x.exp(): x; torch.exp(x): x"""
    node = location.node
    if isinstance(node, ast.Call) and called(node) in OPTIONAL_CALLS and "device" not in ast.unparse(node):
        is_module_call = isinstance(node.func, ast.Name) or ast.unparse(node.func.value) in MODULES  # type: ignore[attr-defined]
        if not is_module_call:
            yield node.func.value  # type: ignore[attr-defined]
        elif len(node.args) == 1:
            yield node.args[0]


MODULES = ("torch", "math", "np", "F", "tl")


def removed_statement(location: Location, function: Function) -> Iterator[ast.AST]:
    """Delete a call, a reassignment, `continue`, `break`, `raise`, or an early `return`."""
    node = location.node
    if isinstance(node, ast.Assign):
        targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        arguments = function.args
        bound = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        bound |= {
            name.id
            for name in ast.walk(function)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.lineno < node.lineno
        }
        removable = all(not isinstance(target, ast.Name) or target.id in bound for target in targets)
    else:
        early = isinstance(node, ast.Return) and location.parent is not function
        removable = early or isinstance(node, ast.Expr | ast.AugAssign | ast.Continue | ast.Break | ast.Raise)
    if removable:
        yield ast.Pass()


def detached(location: Location, function: Function) -> Iterator[ast.AST]:
    """return a, b: return a.detach(), b; in functions whose results are differentiated"""
    node = location.node
    if isinstance(node, ast.Return) and node.value is not None and function.name in DIFFERENTIATED:
        parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for i, part in enumerate(parts[: DIFFERENTIATED[function.name]]):
            new = ast.Call(ast.Attribute(part, "detach", ast.Load()), [], [])
            value = changed(node.value, elts=with_item(parts, i, new)) if part is not node.value else new
            yield changed(node, value=value)


def called(node: ast.Call) -> str:
    """Return the last part of a called function's name; "" if it has no name."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


OPERATORS: tuple[Callable[[Location, Function], Iterator[ast.AST]], ...] = (
    *(comparison, arithmetic, swapped_operands, dropped_operand, boolean, negated_condition, constant, index),
    *(swapped_arguments, dropped_argument, another_function, dropped_call, removed_statement, detached),
)
