"""The `nanorlhf` command: run a script, or a module of nanorlhf/, data/ or kernels/, by name.

    nanorlhf                                      list all programs
    nanorlhf train_ppo tldr --sft runs/tldr/sft   python train_ppo.py tldr --sft runs/tldr/sft
    nanorlhf data.tiny --out runs/tiny/data       python -m data.tiny --out runs/tiny/data
    nanorlhf doctor run runs/tiny/ppo             python -m nanorlhf.doctor run runs/tiny/ppo
    torchrun --nproc-per-node 8 -m nanorlhf train_ppo tldr

In a clone, the scripts, data/ and kernels/ are next to nanorlhf/; setup.py installs them inside it.
"""

import ast
import re
import runpy
import signal
import sys
from pathlib import Path

from nanorlhf import __version__

PACKAGE = Path(__file__).resolve().parent
TREE = PACKAGE if (PACKAGE / "kernels").is_dir() else PACKAGE.parent
# old names of programs that have moved; the studies are only in a clone
ALIASES = {
    "report.compare": "experiments.compare.report",
    "report.lab": "experiments.lab.report",
    "report.learning_curve": "experiments.learning_curve.report",
    "report.lecture": "experiments.lecture.report",
    "report.mismatch": "experiments.mismatch.report",
    "report.scaling": "experiments.scaling.report",
    "report.sums": "experiments.sums.report",
    "report.worlds": "experiments.worlds.report",
}
# a module with any other such block isn't a program
READS_FLAGS = re.compile(
    r'^if __name__ == "__main__":\n    ((cli\.)?(command_line|run_module)\(main|main\(sys.argv)',
    re.M,
)


def programs() -> dict[str, str]:
    """Map the name of each program to the first line of its docstring, scripts first."""
    descriptions: dict[str, str] = {}
    patterns = (TREE, "train_*.py"), (TREE, "eval.py"), (TREE, "data/*.py"), (PACKAGE, "**/*.py")
    for root, pattern in patterns:
        for path in sorted(root.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            if READS_FLAGS.search(text):
                docstring = ast.get_docstring(ast.parse(text)) or ""
                descriptions.setdefault(
                    name.removesuffix(".__main__"), docstring.partition("\n")[0]
                )
    return descriptions


def find_module(name: str) -> str | None:
    """Return the import name of a program's module, or None if there is no such program."""
    if name in ALIASES:
        return ALIASES[name] if TREE != PACKAGE else None
    path = name.removesuffix(".py").replace(".", "/")
    for root in (TREE, PACKAGE):
        for file in (root / f"{path}.py", root / path / "__main__.py"):
            if file.is_file() and "\nif __name__ ==" in file.read_text(encoding="utf-8"):
                return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    return None


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name == "--version":
        print(__version__)
        return
    if name in ("-h", "--help"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly in `nanorlhf | head -1`
        print("usage: nanorlhf PROGRAM [flags]        for its flags: nanorlhf PROGRAM --help\n")
        for program, line in programs().items():
            print(f"{program:28} {line}")
        return
    is_name = re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name, re.ASCII) and len(name) < 100
    module = find_module(name) if is_name else None
    if module is None and name in ALIASES:
        moved = f"moved to {ALIASES[name]}, which needs a clone of the repository"
        print(f"error: nanorlhf {name}: {moved}.", file=sys.stderr)
        sys.exit(2)
    if module is None or module == "nanorlhf.__main__":
        shown = name if name.isprintable() and len(name) < 100 else f"{name!r:.100}"
        print(f"error: nanorlhf {shown}: unknown program; list them: `nanorlhf`.", file=sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    if TREE != PACKAGE:  # as `python train_ppo.py` does
        sys.path.insert(0, str(TREE))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
