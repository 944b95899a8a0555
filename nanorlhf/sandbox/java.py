"""Find this machine's JDK, and the environment to run it in."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from nanorlhf.errors import InputError


def java_environment() -> dict[str, str]:
    """Return the environment without Java options, which would change its behaviour, and with UTF-8 file names."""
    options = ("CLASSPATH", "JAVA_TOOL_OPTIONS", "JDK_JAVAC_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS")
    return {name: value for name, value in os.environ.items() if name not in options} | {"LC_ALL": "C.UTF-8"}


@functools.cache
def java_home() -> str:
    """Return the directory of the JDK that `java` on the PATH belongs to."""
    java = shutil.which("java")
    if java is None:
        raise InputError("no java on the PATH: install a JDK, version 17 or later.")
    command = [java, "-XshowSettings:properties", "-version"]
    shown = subprocess.run(command, capture_output=True, text=True, env=java_environment())
    home = re.search(r"^ *java\.home = (.+)$", shown.stderr, re.MULTILINE)
    if home is None or not Path(home[1], "bin", "javac").exists():
        raise InputError(f"{java} has no javac: install a JDK, version 17 or later, not a JRE.")
    return home[1]
