"""Measure the code: readability of the scripts, size of each package, and counts over the whole repository.

Prints three tables:

    python -m tools.house               # this repository
    python -m tools.house ../other      # another checkout, to compare with
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

from tools import import_order

ROOT = Path(__file__).resolve().parent.parent
OURS = ("nanorlhf", "kernels", "data")
OUTSIDE = ("tests", "tools", "bench", "pipelines", "course", "experiments", "docs", "nanorlhf/sandbox")
"""directories that aren't part of the library"""
WIDTH = 100
"""maximum columns per line in scripts, core and kernels"""


def scripts(root: Path) -> list[Path]:
    return [*sorted(root.glob("train_*.py")), root / "eval.py"]


def narrow_files(root: Path) -> list[Path]:
    """Return the files limited to `WIDTH` columns: the scripts, the core and the kernels."""
    return [
        *root.glob("nano.py"),
        *scripts(root),
        *sorted((root / "nanorlhf").glob("*.py")),
        *sorted((root / "kernels").glob("*.py")),
    ]


def long_lines(file: Path) -> list[int]:
    return [number for number, line in enumerate(file.read_text().splitlines(), 1) if len(line) > WIDTH]


def main_function(tree: ast.Module) -> ast.FunctionDef:
    [main] = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    return main


def local_names(function: ast.FunctionDef) -> set[str]:
    """Return the parameters and every name that the function or a nested function assigns."""
    nodes = list(ast.walk(function))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def imported(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the modules of this project that a file imports from, and every name that it imports."""
    modules, names = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
            if str(node.module).split(".")[0] in OURS:
                modules.add(node.module)
    return modules, names


def comments(source: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def flags(root: Path, script: Path) -> int:
    """Count the settings of a script's Args, with inherited ones and each setting of a group."""
    classes = {}
    for file in [script, *(root / "nanorlhf").rglob("*.py")]:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)

    def settings(name: str) -> set[str]:
        if name not in classes:
            return set()
        fields: set[str] = set()
        for node in classes[name].body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                group = settings(ast.unparse(node.annotation))
                fields |= {f"{node.target.id}.{inner}" for inner in group} or {node.target.id}
        bases = [ast.unparse(base).rpartition(".")[2] for base in classes[name].bases]
        return fields.union(*(settings(base) for base in bases))

    return len(settings("Args"))


def folder_name(file: str) -> str:
    """Return the folder that a file belongs to; nanorlhf's subfolders count separately."""
    parts = Path(file).parts
    if len(parts) == 1:
        return "scripts"
    return "/".join(parts[:2]) if parts[0] == "nanorlhf" and len(parts) > 2 else parts[0]


def lines_per_folder(root: Path) -> dict[str, int]:
    """Count the lines of Python, Java, shell and make files under version control, per folder."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
    lines: dict[str, int] = {}
    for file in listed.splitlines():
        if file.endswith((".py", ".java", ".sh")) or file == "Makefile":
            lines[folder_name(file)] = lines.get(folder_name(file), 0) + len((root / file).read_text().splitlines())
    return dict(sorted(lines.items()))


def loaded(root: Path, script: str) -> tuple[int, int]:
    """Count the modules of a tree that `import script` loads, and their lines."""
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); import {script}\n"
        "print(*(m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)), sep='\\n')"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    files = {Path(line) for line in ran.stdout.splitlines()}
    ours = [f for f in files if f.is_relative_to(root) and ".venv" not in f.parts]
    return len(ours), sum(len(file.read_text().splitlines()) for file in ours)


def hidden_signatures(tree: ast.Module) -> int:
    """Count calls that unpack a tuple written out in the same function, as in `ids = a, b` and `f(x, *ids)`.

    The reader has to count arguments there. Results of calls, parameters, and words of a command don't count.
    """
    hidden = set()  # a set, because an outer function's nodes include those of inner functions
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            nodes = [*ast.walk(function)]
            assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)]
            stored = {name.id for node in assigned for name in node.targets if isinstance(name, ast.Name)}
            stars = (a for node in nodes if isinstance(node, ast.Call) for a in node.args if isinstance(a, ast.Starred))
            hidden |= {star for star in stars if isinstance(star.value, ast.Name) and star.value.id in stored}
    return len(hidden)


def long_functions(tree: ast.Module, limit: int = 60) -> int:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return sum(function.end_lineno - function.lineno + 1 > limit for function in functions)


def totals(root: Path) -> dict[str, str]:
    """Count over the whole tree: what scripts load; and, without tests, long files, long functions, hidden tuples."""
    files = [file for name, file in import_order.modules(root).items() if name.partition(".")[0] != "tests"]
    trees = [ast.parse(file.read_text()) for file in files]
    counted = {}
    for script in ("train_ppo", "eval"):
        number, lines = loaded(root, script)
        counted[f"import {script}"] = f"{number} modules, {lines:,} lines"
    long_files = sum(len(file.read_text().splitlines()) > 450 for file in files)
    return counted | {
        "files over 450 lines": str(long_files),
        "functions over 60 lines": str(sum(map(long_functions, trees))),
        "tuples that hide a signature": str(sum(map(hidden_signatures, trees))),
        "imports against the order": str(len([*import_order.upward(root)])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    root = parser.parse_args().root.resolve()

    print(
        "| script | lines | main | local names | lines over 100 | flags | local modules | imported names | comments |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for file in scripts(root):
        source = file.read_text()
        tree = ast.parse(source)
        function = main_function(tree)
        length = function.end_lineno - function.lineno + 1
        modules, names = imported(tree)
        row = (
            file.name, len(source.splitlines()), length, len(local_names(function)), len(long_lines(file)),
            flags(root, file), len(modules), len(names), comments(source),
        )  # fmt: skip
        print("|", " | ".join(map(str, row)), "|")

    core = [file for file in (root / "nanorlhf").glob("*.py") if file.name != "__init__.py"]
    too_long = sum(len(long_lines(file)) for file in narrow_files(root))
    print(f"\nthe core: {len(core)} modules; lines over 100 columns in scripts, core and kernels: {too_long}\n")
    lines = lines_per_folder(root)
    for name, number in lines.items():
        print(f"{name:24} {number:7,}")
    library = sum(number for name, number in lines.items() if name not in OUTSIDE)
    print(f"{'library':24} {library:7,}  without {', '.join(OUTSIDE)}\n")
    for name, count in totals(root).items():
        print(f"{name:28} {count}")


if __name__ == "__main__":
    main()
