"""The order of the packages, lower ones never importing higher ones, and the imports of a tree, read with `ast`."""

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("tests", "bench", "tools", "course", "experiments", "nanorlhf", "data", "kernels")
# a package imports only from its own row and the rows below
FLOORS = (
    {"tools"},
    {"course"},
    {"experiments"},
    {"nanorlhf.doctor", "nanorlhf.plan"},
    {"scripts"},
    {"data"},
    {"nanorlhf.stackoverflow", "nanorlhf.rlcf", "nanorlhf.selfrank"},
    {"nanorlhf.evals"},
    {"nanorlhf.report"},
    {"nanorlhf.metrics"},
    {"nanorlhf.recipes"},
    {"nanorlhf.training"},
    {"nanorlhf.rules"},
    {"nanorlhf.rewards"},
    {"nanorlhf.sandbox"},
    {"nanorlhf"},
    {"kernels"},
)


def modules(root: Path) -> dict[str, Path]:
    """Map each module of a tree to its file."""
    files = [*root.glob("*.py")]
    for folder in FOLDERS:
        files += (root / folder).rglob("*.py")
    return {module_name(file, root): file for file in files}


def module_name(file: Path, root: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """Return the known modules that a file imports, including imports inside functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full_names = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            names |= {full if full in known else str(node.module) for full in full_names.values()}
    return names & known.keys()


def room(module: str, known: dict[str, Path]) -> str:
    """Return the package of a module.

    nanorlhf.pretrained counts as part of the core, because each imports the other. Tools, tests and the benchmark
    count as one: tests run tools, and tools use the tests' miniature runs.
    """
    parts = module.split(".")
    if parts[0] in ("bench", "tests"):
        return "tools"
    if parts[0] not in FOLDERS:
        return "scripts"
    if parts[0] != "nanorlhf" or len(parts) == 1 or parts[1] == "pretrained":
        return parts[0]
    return ".".join(parts[:2]) if known[module].parent.name != "nanorlhf" else "nanorlhf"


def floor(module: str, known: dict[str, Path]) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(module, known) in rooms)


def upward(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the imports that violate the order as (importer, imported)."""
    known = modules(root)
    for module, file in known.items():
        for name in sorted(imports(ast.parse(file.read_text()), known)):
            if floor(name, known) < floor(module, known):
                yield module, name
