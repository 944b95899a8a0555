"""Build a wheel with one top-level package: kernels/, data/ and the scripts move into nanorlhf/.

Other projects also have packages named `kernels` and `data`. In a wheel, all files are in nanorlhf/ and import each
other from there; an editable install uses the source tree unchanged. Everything else is in pyproject.toml.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGES = ["kernels", "data"]
FILES = ["nano.py", "train_*.py", "eval.py", *(f"{name}/*.py" for name in PACKAGES)]
IMPORT = re.compile(rf"^( *)from ({'|'.join(PACKAGES)})((?:\.\w+)*) import ", re.M)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # an editable install only adds these folders to the path
            self.distribution.packages += PACKAGES
            return
        package = Path(self.build_lib) / "nanorlhf"
        for pattern in FILES:
            for path in ROOT.glob(pattern):
                target = package / path.relative_to(ROOT)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
        for path in package.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            path.write_text(IMPORT.sub(r"\1from nanorlhf.\2\3 import ", text), encoding="utf-8")


setup(cmdclass={"build_py": BuildPy})
