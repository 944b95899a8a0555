"""The order of imports between packages (tools/import_order.py), read from the source with `ast`."""

import ast
import sys
from functools import cache

import pytest

from tests.conftest import ROOT
from tools import import_order

MODULES = import_order.modules(ROOT)


@cache
def imports(module: str) -> frozenset[str]:
    return frozenset(import_order.imports(ast.parse(MODULES[module].read_text()), MODULES))


def room(module: str) -> str:
    return import_order.room(module, MODULES)


def floor(module: str) -> int:
    return import_order.floor(module, MODULES)


def test_no_import_goes_upward() -> None:
    assert [*import_order.upward(ROOT)] == []


def test_an_upward_import_inside_a_function_is_found(tmp_path) -> None:
    for file, source in {
        "nanorlhf/ppo.py": "def f():\n    from nanorlhf.training import run\n",
        "nanorlhf/training/__init__.py": "",
        "nanorlhf/training/run.py": "import nanorlhf.ppo\nfrom nanorlhf import ppo\n",
        "kernels/gae.py": "import train_ppo\n",
        "train_ppo.py": "from nanorlhf.training.run import Run\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    upward = [*import_order.upward(tmp_path)]
    assert sorted(upward) == [("kernels.gae", "train_ppo"), ("nanorlhf.ppo", "nanorlhf.training.run")]


def test_no_import_is_relative() -> None:
    for module, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.ImportFrom) or node.level == 0, f"{module} imports relative to itself"


def test_packages_of_one_row_do_not_import_each_other() -> None:
    for module in MODULES:
        beside = {name for name in imports(module) if floor(name) == floor(module) and room(name) != room(module)}
        assert not beside, f"{module} imports {sorted(beside)}, a package of the same row"


def test_there_are_no_import_cycles() -> None:
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"an import cycle: {' -> '.join((*path[path.index(module) :], module))}"
        if module not in done:
            for name in imports(module):
                if name != module:
                    walk(name, (*path, module))
            done.add(module)

    for module in MODULES:
        walk(module, ())


def test_an_import_cycle_would_be_found(monkeypatch) -> None:
    graph = {"a": frozenset({"b"}), "b": frozenset({"a"})}
    monkeypatch.setattr("tests.tools.test_imports.MODULES", graph)
    monkeypatch.setattr("tests.tools.test_imports.imports", graph.__getitem__)
    with pytest.raises(AssertionError, match="an import cycle: a -> b -> a"):
        test_there_are_no_import_cycles()


def test_the_core_is_small_and_the_model_imports_little() -> None:
    core = [name for name in MODULES if room(name) == "nanorlhf" and name.count(".") == 1]
    core.remove("nanorlhf.pretrained")
    core.remove("nanorlhf.__main__")  # the command, which runs the others by name
    assert len(core) <= 27, sorted(core)
    model = {name for name in imports("nanorlhf.model") if name.split(".")[0] != "kernels"}
    parts = ("config", "layers", "masks", "cache", "packing", "reading", "shared_queries")
    assert model == {f"nanorlhf.{part}" for part in parts}


def test_no_script_imports_an_embedded_world() -> None:
    scripts = [module for module in MODULES if room(module) == "scripts"]
    assert {"nano", "train_ppo", "eval"} < set(scripts)
    for script in scripts:
        assert not {name for name in imports(script) if name.split(".")[0] == "data"}, script


def test_kernels_import_only_torch_and_triton() -> None:
    roots = set()
    for module in MODULES:
        if room(module) == "kernels":
            for node in ast.walk(ast.parse(MODULES[module].read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                roots |= {name.split(".")[0] for name in names}
                roots |= {str(node.module).split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    assert roots - sys.stdlib_module_names <= {"torch", "triton", "kernels"}
