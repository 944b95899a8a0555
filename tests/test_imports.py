"""The house: which room may import which, drawn from the source by `ast`."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("nano", "train_sft", "train_rm", "train_dpo", "train_ppo", "train_grpo", "train_rlcf", "eval")
# a room imports from its own row and from those below it
FLOORS = (
    {"tools"},
    {"course"},
    {"nanorlhf.doctor"},
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
    {"nanorlhf"},
    {"kernels"},
)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of ours, with its file."""
    files = [ROOT / f"{name}.py" for name in (*SCRIPTS, "bench")]
    files += [
        file
        for room in ("tests", "tools", "course", "nanorlhf", "data", "kernels")
        for file in (ROOT / room).rglob("*.py")
    ]
    return {module_of(file): file for file in files}


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of ours that a module imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relative to itself"
            found |= {
                name if (name := f"{node.module}.{alias.name}") in modules() else str(node.module)
                for alias in node.names
            }
    return frozenset(name for name in found if name in modules())


def room(module: str) -> str:
    """The folder of a module.

    What reads other people's files is part of the core, which it needs and which needs it. Tools, tests and the
    benchmark are one room: tests run tools, and tools break the library on the tests' miniatures.
    """
    parts = module.split(".")
    if parts[0] in ("bench", "tests"):
        return "tools"
    if module in SCRIPTS:
        return "scripts"
    if parts[0] != "nanorlhf":
        return parts[0]
    if parts[1:2] == ["pretrained"]:
        return "nanorlhf"
    return ".".join(parts[:2]) if (ROOT / "nanorlhf" / Path(*parts[1:2])).is_dir() and len(parts) > 1 else "nanorlhf"


def floor(module: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(module) in rooms)


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down_the_house(module) -> None:
    upwards = {name for name in imports(module) if floor(name) < floor(module)}
    assert not upwards, f"{module} ({room(module)}) imports from a room above it: {sorted(upwards)}"


def test_rooms_on_one_floor_do_not_know_each_other() -> None:
    for module in modules():
        beside = {name for name in imports(module) if floor(name) == floor(module) and room(name) != room(module)}
        assert not beside, f"{module} imports {sorted(beside)}, a room on the same floor"


def test_no_imports_go_in_a_circle() -> None:
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a circle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for name in imports(module):
                if name != module:
                    walk(name, (*path, module))
            done.add(module)

    for module in modules():
        walk(module, ())


def test_a_circle_would_be_found(monkeypatch) -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"a"})}
    monkeypatch.setattr("tests.test_imports.modules", lambda: graph)
    monkeypatch.setattr("tests.test_imports.imports", graph.__getitem__)
    with pytest.raises(AssertionError, match="a circle: a -> b -> a"):
        test_no_imports_go_in_a_circle()


def test_the_core_is_small_and_its_model_stands_alone() -> None:
    core = [name for name in modules() if room(name) == "nanorlhf" and name.count(".") == 1]
    core.remove("nanorlhf.pretrained")
    core.remove("nanorlhf.__main__")  # the command, which starts the others by name
    assert len(core) <= 19, sorted(core)
    assert {name.split(".")[0] for name in imports("nanorlhf.model")} == {"kernels"}


def test_no_script_imports_an_embedded_world() -> None:
    for script in SCRIPTS:
        assert not {name for name in imports(script) if name.split(".")[0] == "data"}, script


def test_kernels_need_torch_and_triton_only() -> None:
    roots = set()
    for module in modules():
        if room(module) == "kernels":
            for node in ast.walk(ast.parse(modules()[module].read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                roots |= {name.split(".")[0] for name in names}
                roots |= {str(node.module).split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    assert roots - sys.stdlib_module_names <= {"torch", "triton", "kernels"}
