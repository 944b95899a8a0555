"""One compiler per language for all tests of this directory: javac takes seconds to start."""

import shutil

import pytest

from nanorlhf.rlcf.compilers import JavaCompiler, PythonCompiler


@pytest.fixture(scope="session")
def java_compiler():
    if shutil.which("javac") is None:
        pytest.skip("no JDK on this machine")
    with JavaCompiler(workers=2) as compiler:
        yield compiler


@pytest.fixture(scope="session")
def python_compiler():
    with PythonCompiler() as compiler:
        yield compiler
