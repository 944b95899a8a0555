"""Rename a program's variables, to get the positive of a triplet if a problem has only one solution."""

import ast
import re
import symtable
import warnings
from random import Random

from tree_sitter import Parser

from nanorlhf.rlcf.compilers import JAVA, identifiers

NAMES = tuple("abcdefghijklmnopqrstuvwxyz") + ("left", "right", "item", "value", "result", "count", "index", "total")
MEMBERS = ("method_declaration", "constructor_declaration", "compact_constructor_declaration", "field_declaration",
           "static_initializer", "block")  # fmt: skip


def rename_variables(program: str, language: str, rng: Random) -> str:
    """[RLCF discriminator] Rename every local variable consistently, without changing what the program does.

    Java: local variables, parameters, variables of for-each, catch and resources. Python: names that a function assigns
    to. A name that is also used for something else (a field, method, global, builtin or argument) is kept. A program
    that doesn't parse is returned unchanged.
    """
    occurrences = java_variables(program) if language == "java" else python_variables(program)
    used = set(re.findall(r"\w+", program))  # comments included, which only costs a few free names
    names = {}
    for name in sorted(occurrences):
        free = [candidate for candidate in NAMES if candidate not in used]
        if free:
            names[name] = rng.choice(free)
            used.add(names[name])
    source = program.encode("utf-8", "surrogatepass")
    spans = sorted((start, end, names[name]) for name in names for start, end in occurrences[name])
    for start, end, new_name in reversed(spans):
        source = source[:start] + new_name.encode() + source[end:]
    return source.decode("utf-8", "surrogatepass")


def java_variables(program: str) -> dict[str, list[tuple[int, int]]]:
    """Return name -> occurrences, [start, end) in bytes of UTF-8."""
    source = program.encode("utf-8", "surrogatepass")
    root = Parser(JAVA).parse(source).root_node
    if root.has_error:
        return {}
    occurrences: dict[str, list[tuple[int, int]]] = {}
    declared, excluded = set(), set()
    members: dict[str, tuple[set[int], set[int]]] = {}  # name -> members that use it, members that declare it
    for name, field, ancestors in identifiers(root):
        (parent, _), (grandparent, _) = ancestors[-1], ancestors[-2]
        text = source[name.start_byte : name.end_byte].decode()
        member = next((node for node, _ in ancestors if node.type in MEMBERS), root).start_byte
        seen, declaring = members.setdefault(text, (set(), set()))
        seen.add(member)
        is_local = grandparent.type == "local_variable_declaration" and parent.type == "variable_declarator"
        is_parameter = parent.type == "formal_parameter" and ancestors[-3][0].type != "record_declaration"
        if field == "name" and (
            is_local or is_parameter or parent.type in ("enhanced_for_statement", "catch_formal_parameter", "resource")
        ):
            declared.add(text)
            declaring.add(member)
        elif (
            field in ("name", "key")  # of a field, method, class or call; of an annotation
            or (field == "field" and parent.type == "field_access")
            or parent.type in ("labeled_statement", "break_statement", "continue_statement")
            or parent.type in ("method_reference", "scoped_identifier")
        ):
            excluded.add(text)
        occurrences.setdefault(text, []).append((name.start_byte, name.end_byte))
    # a member that uses a name without declaring it gets it from a superclass or an import
    excluded |= {text for text, (seen, declaring) in members.items() if seen - declaring}
    return {text: spans for text, spans in occurrences.items() if text in declared - excluded}


def python_variables(program: str) -> dict[str, list[tuple[int, int]]]:
    """Return name -> occurrences, [start, end) in bytes of UTF-8."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            tree, scopes = ast.parse(program), [symtable.symtable(program, "<program>", "exec")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    assigned: set[str] = set()
    excluded: set[str] = set()
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if scope.get_type() == "function" and symbol.is_local() and not symbol.is_imported():
                assigned.add(symbol.get_name())
            elif not symbol.is_free():  # a free name is a local of an outer function; the rest aren't locals
                excluded.add(symbol.get_name())

    source = program.encode("utf-8", "surrogatepass")
    line_starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", source))]
    occurrences: dict[str, list[tuple[int, int]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.end_lineno is not None and node.end_col_offset is not None  # set by ast.parse
            start, end = line_starts[node.lineno - 1] + node.col_offset, line_starts[node.end_lineno - 1]
            occurrences.setdefault(node.id, []).append((start, end + node.end_col_offset))
        elif isinstance(node, ast.JoinedStr):
            # before Python 3.12, offsets inside an f-string aren't relative to the file's start
            excluded.update(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        elif not isinstance(node, ast.Attribute | ast.Constant):
            # names that the tree stores as strings: arguments, functions, exceptions, patterns, `global`
            for _, value in ast.iter_fields(node):
                excluded.update(
                    text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)
                )
    if {"locals", "eval", "exec", "vars", "dir"} & occurrences.keys():  # these can see variable names
        return {}
    # keep `_`: it may be unused, which would be an error under another name
    return {text: spans for text, spans in occurrences.items() if text in assigned - excluded - {"_"}}
