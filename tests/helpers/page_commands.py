"""Check the commands in README.md and docs/: parse them with the scripts' own parsers, and track their paths.

Pages declare in their code blocks where inputs come from that none of their commands writes:

    # downloads: NAME, NAME         files, directories or Hub ids to download
    # from PAGE.md: PATH, PATH      written by the commands of another page
    # yours: PATH, PATH             provided by the reader

A Python or TOML block that starts with `# my_rule.py` or `# judge.toml` is the content of that file.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from data.pretrained import HUB_ID
from experiments.__main__ import commands
from experiments.leaderboard.runs import Leaderboard
from experiments.mismatch.staleness import Staleness
from experiments.programs.runs import Discriminators, Programs
from experiments.runs import Args
from experiments.scaling.runs import Scaling
from experiments.tldr.runs import Tldr
from experiments.worlds.runs import Worlds
from nanorlhf import launch
from nanorlhf.__main__ import find_module
from nanorlhf.cli import command_line, run_module
from nanorlhf.evals.settings import ALONG, best_of
from nanorlhf.rewards.weighted_sum import items, parse
from tools.repository import GITHUB, repository

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "course" / "README.md",
    ROOT / "course" / "module.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").rglob("README.md")),
]
PROGRAMS = ("python", "torchrun", "nanorlhf", "make", "bash", "pip", "pytest")
INLINE = re.compile(
    r"(?<!`)`((?:[A-Z_]+=\S+ )*(?:python|nanorlhf|make|bash|pip|pytest|torchrun \S.*?\.py) (?:(?! \[)[^`])+)`(?!`)"
)

# ----------------------------------------------------------------------------------------- settings that contain paths
READ = {
    "directories",
    *("sft", "model", "reward_model", "discriminator", "value_model", "tokenizer", "encoder", "source", "generated_by"),
    *("policy", "samples", "self_rank", "labels", "judge_file", "ref_policy", "regression_model", "contrastive_model"),
    *("template", "rankings", "curves", "evals", "error_prone_jar", "solutions", "best", "run", "doctor"),
    *("csv", "page", "worlds", "reruns"),
}
READ_PAIRS = {"policies", "reward_models", "runs"}  # name path name path
READ_FUNCTIONS = {"reward", "rewards", "gold", "simulate"}  # FILE.py:FUNCTION, a directory, or another form of --reward
WRITTEN = {"out", "json", "measure", "table"}
DATA = {"data"}  # a directory; each stage reads different files in it
NO_PATHS = {
    "device",
    *("files", "revision", "tag", "drop_markup", "split_date", "annotator", "implicit_rewards", "shift_base"),
    *("hub_id", "summarisers", "against", "by", "file", "bucket", "flavor", "only"),
    *("judge_url", "judge_model", "judge_key_variable", "judge_against", "judge_cache"),
    *("exercises", "names", "student"),  # of the course
    "directory",  # of the course: some commands write it and others read it
    "since",  # of the check: a commit
    *("scripts", "flags"),  # of the doctor: a source tree changed by a reader, and flags of its scripts
    *(
        "algorithms",
        "variants",
        "share",
        "cases",
        "labellers",
        "remedies",
        "lrs",
        "kl_coefs",
        "sizes",
        "base",
    ),  # of the experiments
    *("bugs", "demo", "healthy"),  # of the doctor's judge: names, and run directories
}
OF_COMMANDS = ("course", "nanorlhf.doctor")  # programs with several commands, each with its own settings
BOTH = ("train", "validation")
JSONL = {  # the files that the modules of data/ write for training
    "data.tiny": {"sft": BOTH, "comparisons": BOTH},
    "data.tldr": {"sft": BOTH, "comparisons": BOTH},
    "data.hh": {"sft": BOTH, "comparisons": BOTH},
    "data.chat": {"sft": BOTH, "comparisons": BOTH},
    "data.rewardbench": {"comparisons": ("validation",)},
    "data.stackoverflow": {"sft": BOTH, "comparisons": BOTH, "scored": BOTH, "unpaired": BOTH},
    "data.codenet": {"code": BOTH},
    "data.mxeval": {"code": ("train", "validation", "test")},
    "data.dialogue": {"sft": (*BOTH, "test")},
    "data.squad": {"sft": BOTH},
    "data.gsm8k": {"sft": BOTH},
    "data.subset": {"sft": BOTH, "comparisons": BOTH},
    "data.best_of": {"sft": BOTH},
    "data.self_rank": {"comparisons": BOTH, "self_rank": BOTH},
}


def page_name(path: Path) -> str:
    """Return the name of a page: `tldr.md` if it is in docs/, otherwise its path, such as `course/README.md`."""
    return path.name if path.parent.name == "docs" else str(path.relative_to(ROOT))


class Wrong(Exception):
    """The reason why a command is wrong."""


# ------------------------------------------------------------------------------------------------- 1. finding commands
@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.environment), shlex.join(self.words)])

    @property
    def program(self) -> str:
        """Return the program: `train_ppo.py`, `data.tldr`, `make`, `pip`, `pytest`."""
        words = list(self.words)
        if words[0] == "torchrun":
            return next(word for word in words if word.endswith(".py"))
        if words[0] != "python":
            return words[0]
        return words[2] if words[1:2] == ["-m"] else words[1]

    @property
    def arguments(self) -> list[str]:
        return list(self.words[self.words.index(self.program) + 1 :])


@dataclass
class Page:
    """The commands and declarations of a page, in order."""

    name: str
    items: list[Command | tuple[str, str]] = field(default_factory=list)  # a tuple: declaration, path

    @property
    def commands(self) -> list[Command]:
        return [item for item in self.items if isinstance(item, Command)]


def read_command(text: str) -> Command:
    words = shlex.split(text.removeprefix("$ "), comments=True)
    environment = []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        environment.append((name, value))
    if not words or words[0] not in PROGRAMS or len(words) < 2:
        raise Wrong(f"{text!r} isn't a command: expected one of {', '.join(PROGRAMS)} with arguments")
    if words[0] == "nanorlhf" and words[1] != "--version":  # replace it by the program that it runs
        if (module := find_module(words[1])) is None:
            raise Wrong(f"nanorlhf has no program {words[1]}")
        name = module.removesuffix(".__main__")
        words[:2] = ["python", "-m", name] if "." in name else ["python", f"{name}.py"]
    return Command(tuple(words), tuple(environment))


def read_page(name: str, text: str) -> Page:
    """Read the commands of a page: lines of blocks fenced as sh or console, and lines of indented blocks and inline
    code that start with the name of a program."""
    page, fence, lines = Page(name), None, iter(text.splitlines())
    for line in lines:
        if mark := re.match(r"```(\w*)", line):
            fence = None if fence is not None else mark[1]
            if fence in ("python", "toml") and (file := re.fullmatch(r"# (\S+\.(?:py|toml))", next(lines))):
                page.items.append(("yours", file[1]))
            continue
        shell = fence in ("sh", "console")
        if fence is None and not line.startswith("    "):
            page.items += [read_command(inline) for inline in INLINE.findall(line)]
            continue
        line = line.strip()
        if declared := re.fullmatch(r"# (downloads|yours|from \S+\.md): (.+)", line):
            page.items += [(declared[1], path.strip()) for path in declared[2].split(",")]
        elif (shell and line and not line.startswith("#")) or (fence is None and line.split(" ")[0] in PROGRAMS):
            while line.endswith("\\"):
                line = line[:-1] + next(lines).strip()
            page.items.append(read_command(line))
    return page


# ---------------------------------------------------------------------------------------------- 2. what a command means
@functools.cache
def parse_settings(command: Command) -> Any:
    """Return the settings as parsed by the script's own parser; None for a program without settings."""
    name = command.program
    if name == "nanorlhf.plan":  # takes the flags of a script, but reads only shapes
        if command.arguments:
            script, *arguments = command.arguments
            parse_settings(Command(("python", f"{script}.py", *arguments)))
        return None
    if name.endswith(".py"):
        if not (ROOT / name).is_file():
            raise Wrong(f"{name} doesn't exist")
        name = name.removesuffix(".py")
    elif importlib.util.find_spec(name.partition(".")[0]) is None or importlib.util.find_spec(name) is None:
        raise Wrong(f"module {name} doesn't exist")
    has_main = (ROOT / name.replace(".", "/") / "__main__.py").is_file()
    module = importlib.import_module(f"{name}.__main__" if has_main else name)
    if not hasattr(module, "RECIPES") and not hasattr(module, "Args"):
        check_by_argparse(module, command)
        return None
    parsed: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as stderr:
        patch.setattr(sys, "argv", [command.program, *command.arguments])
        patch.setattr(launch, "run", lambda main, device, processes: main())  # don't fork just to parse flags
        try:
            if hasattr(module, "RECIPES"):
                command_line(parsed.append, module.RECIPES)
            else:
                run_module(lambda args: parsed.append(args), module.Args)
        except SystemExit:
            raise Wrong(stderr.getvalue().strip()) from None
    return parsed[0].command if name in OF_COMMANDS else parsed[0]


def check_by_argparse(module: ModuleType, command: Command) -> None:
    """Check the flags of a program without Args by running `main` up to its argparse parser; raise Wrong."""
    parse, parsed = argparse.ArgumentParser.parse_args, []

    def stop(parser: argparse.ArgumentParser) -> None:
        parsed.append(parse(parser))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as stderr:
        patch.setattr(sys, "argv", [command.program, *command.arguments])
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        try:
            if command.arguments:
                module.main()
        except SystemExit:
            raise Wrong(stderr.getvalue().strip()) from None
        except KeyboardInterrupt:
            pass
    if command.arguments and not parsed:
        raise Wrong(f"{command.program} takes no arguments")


def path_fields(settings: type) -> Iterator[str]:
    """Yield the fields that contain text or paths and aren't a choice among words."""
    for name, hint in get_type_hints(settings).items():
        parts = {part for kind in (hint, *get_args(hint)) for part in (kind, *get_args(kind))}
        if parts & {str, Path} and not any(get_origin(kind) is Literal for kind in (hint, *get_args(hint))):
            yield name


def files_read(program: str, args: Any) -> list[str]:
    """Return the files in --data that this stage reads."""
    if program == "data.tokenizer":
        return [str(path) for path in args.data]
    if program in ("train_rm.py", "train_dpo.py"):
        rows = {"regression": "scored", "kto_unpaired": "unpaired"}.get(args.loss, "comparisons")
        files = [f"{rows}.train", f"{rows}.validation"]
        if args.loss == "contrastive" and args.num_normalisation != 0:
            files.append("sft.train")
    elif program == "eval.py":
        if hasattr(args, "ks"):
            files = ["code.test"]
        elif hasattr(args, "reward_models"):
            files = ["comparisons.validation"]
        else:
            files = [f"sft.{getattr(args, 'split', 'validation')}"]
    else:
        is_code = program == "train_rlcf.py" or program.startswith("nanorlhf.rlcf.")
        is_code |= any(parse(item)[0] == "tests" for item in items(getattr(args, "reward", None)))
        rows = getattr(args, "rows", "code" if is_code else "sft")
        samples = program in ("train_ppo.py", "train_grpo.py", "train_rlcf.py") or "baselines" in program
        files = [f"{rows}.train"] if samples else [f"{rows}.train", f"{rows}.validation"]
    return [f"{args.data}/{file}.jsonl" for file in files]


def paths_read(program: str, args: Any) -> list[str]:
    if program == "course":
        made = type(args).__name__ in ("Start", "Plant", "Handout", "Nbgrader", "Slides", "Verify")
        return [] if made or args.directory == Path(".") else [str(args.directory)]
    names = {item.name for item in fields(args)}
    paths = files_read(program, args) if "data" in names else []
    for name in sorted(names & (READ | READ_PAIRS)):
        value = getattr(args, name)
        if name == "reward_model" and getattr(args, "reward", None) is not None:  # --reward replaces it
            continue
        if is_dataclass(value):  # a group of settings; elsewhere the same name is a path
            continue
        values = value if isinstance(value, tuple) else (value,)
        paths += [best_of(path)[1].removeprefix(ALONG) for path in values[1::2]] if name in READ_PAIRS else values
    for name in sorted(names & READ_FUNCTIONS):
        paths += [parse(item)[1].partition(":")[0] for item in items(getattr(args, name))]
    if getattr(args, "resume", False):
        paths.append(args.out)
    return [str(path) for path in paths if path not in (None, "None", "shared", "")]  # shared: a value model


def paths_written(program: str, args: Any) -> list[str]:
    out = getattr(args, "out", None)
    if program == "course" and type(args).__name__ in ("Start", "Plant"):
        return [str(args.directory)]
    if program in ("train_rm.py", "train_dpo.py") and out is None:
        out = args.data.parent / program.removeprefix("train_").removesuffix(".py")
    splits = JSONL.get(program, {})
    if program == "data.mxeval":
        splits = {
            "code": ("test",) + ("train",) * (args.test_share < 1) + ("validation",) * (args.validation_share > 0)
        }
    if program == "data.self_rank" and out != args.data:
        splits = splits | {"sft": BOTH}  # copied
    files = [f"{out}/{rows}.{split}.jsonl" for rows, parts in splits.items() for split in parts]
    if program == "data.sums":
        files = [
            f"{out}/{rows}.{split}.jsonl" for rows in ("short/sft", "long/sft", "long/comparisons") for split in BOTH
        ]
    return [str(path) for path in (out, getattr(args, "json", None), *files) if path is not None]


# ---------------------------------------------------------------------------------------- 3. make targets and pipelines
STUB = """#!/bin/sh
case "$1 $2" in -c*) exec "$REAL_PYTHON" "$@";; "-m data.pretrained") echo "$HUB_ID"; exit;; esac
line=$(printf '%s\\t' "$@")
printf '%s\\n' "$line" >> "$RECORDED" # a single write: several processes may append
"""


@functools.cache
def recorded_commands(target: str, variables: tuple[tuple[str, str], ...] = ()) -> tuple[Command, ...]:
    """Return the commands that `make target`, or `bash target` for a script, runs, using a Python that records them."""
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, here)
        shutil.copytree(ROOT / "pipelines", here / "pipelines")
        (here / ".venv" / "bin").mkdir(parents=True)
        stub = here / ".venv" / "bin" / "python"
        stub.write_text(STUB)
        stub.chmod(0o755)
        for name in ("complete", "test", "str", "real", "reason", "docs"):  # installed
            (here / ".venv" / name).touch()
        (here / "recorded").touch()  # for targets that don't run Python, such as .venv
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))},
            **dict(variables), "REAL_PYTHON": sys.executable, "HUB_ID": HUB_ID,
            "RECORDED": str(here / "recorded"),
        }  # fmt: skip
        program = "bash" if target.endswith(".sh") else "make"
        done = subprocess.run([program, target], cwd=here, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise Wrong(f"{program} {target}: {done.stderr.strip()}")
        recorded = (here / "recorded").read_text().splitlines()
    return tuple(Command(("python", *line.split("\t")[:-1])) for line in recorded)


def experiment_runs(args: Any) -> list[Command]:
    """Return the runs of an experiment. We skip worlds, leaderboard, programs and staleness, whose runs depend on
    what has finished; scaling and tldr, which repeat other experiments or `make demo` with other numbers;
    and discriminators, whose report needs a policy that can program."""
    skipped = Worlds | Leaderboard | Programs | Staleness | Scaling | Discriminators | Tldr
    if not isinstance(args, Args) or isinstance(args, skipped):
        return []
    return [Command(("python", *words)) for words in commands(args)]


# --------------------------------------------------------------------------------------------------- 4. checking a page
@dataclass
class Checked:
    problems: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    runnable: list[Command] = field(default_factory=list)
    """commands that need neither a download nor the reader's files, with the steps of pipelines and experiments listed
    one by one, unless these have variables or flags: then the steps are listed elsewhere or have another seed"""


def check_page(page: Page, other_pages: dict[str, Page] | None = None) -> Checked:
    """Track the paths through a page's commands. other_pages: the pages that `# from` may name."""
    checked = Checked()
    local: set[str] = set()  # written by this page's commands, from inputs that are local too
    declared: dict[str, bool] = {}  # path -> whether a command reads it

    def find_source(path: str) -> str | None:
        """Return `here`, `declared`, or None if nothing provides the path."""
        if Path(path).is_absolute() or (ROOT / path).is_file():
            return "here" if (ROOT / path).exists() else None
        parents = [str(parent) for parent in PurePosixPath(path).parents][:-1]
        for ancestor in (path, *parents):
            if ancestor in declared:
                declared[ancestor] = True
                return "declared"
            if ancestor in checked.written and (ancestor == path or not is_jsonl(path) or ancestor not in converted):
                return "here" if ancestor in local else "declared"
        return None

    def is_jsonl(path: str) -> bool:
        return bool(re.search(r"/(sft|comparisons|scored|unpaired|code|self_rank)\.\w+\.jsonl$", path))

    converted: set[str] = set()  # directories whose JSON Lines are known by name
    makers: dict[str, str] = {}  # JSON Lines -> the module that wrote them

    def check(command: Command, where: str, execute: bool = True) -> None:
        try:
            if command.program in ("make", "bash"):
                targets = [word for word in command.arguments if not word.startswith("-")]
                for target in targets:
                    for step in recorded_commands(target, command.environment):
                        check(step, f"{where}: {command}", execute=not command.environment)
                return
            if command.program in ("nanorlhf", "pip", "pytest", "ruff", "mypy", "mkdocs", "build", "venv"):
                check_tool(command)
                return
            args = parse_settings(command)
        except Wrong as wrong:
            checked.problems.append(f"{where}: {command}: {wrong}")
            return
        if runs := experiment_runs(args):
            for run in runs:
                check(run, f"{where}: {command}", execute=execute and len(command.arguments) == 1)
            return
        sources = {path: find_source(path) for path in paths_read(command.program, args)} if args is not None else {}
        for path, source in sources.items():
            if source is None:
                checked.problems.append(f"{where}: {command}: it reads {path}, which no earlier command writes")
        asks = getattr(args, "judge_url", None) is not None and not args.judge_dry_run
        asks |= any(parse(item)[0] == "judge" for item in items(getattr(args, "reward", None)))
        written = paths_written(command.program, args) if args is not None else []
        checked.written.update(written)
        if command.program in JSONL:
            converted.add(str(args.out))
            for path in filter(is_jsonl, written):
                if makers.setdefault(path, command.program) != command.program:
                    checked.problems.append(f"{where}: {command}: it replaces {path}, which {makers[path]} wrote")
        if all(source == "here" for source in sources.values()) and not asks and command.words[0] == "python":
            local.update(written)
            if execute and command not in checked.runnable:
                checked.runnable.append(command)

    for item in page.items:
        if isinstance(item, Command):
            check(item, page.name)
            continue
        kind, path = item
        if kind.startswith("from "):
            other = (other_pages or {}).get(kind.removeprefix("from "))
            if other is None or path not in check_page(other, other_pages).written:
                checked.problems.append(f"{page.name}: {kind.removeprefix('from ')} does not write {path}")
            checked.written.add(path)
        else:
            declared[path] = False
            if kind == "yours":
                local_file = path.endswith((".py", ".toml"))  # a block of the page, which the test writes
                if local_file:
                    del declared[path]
                    checked.written.add(path)
                    local.add(path)
    checked.problems += [f"{page.name}: nothing reads {path}" for path, used in declared.items() if not used]
    return checked


def check_tool(command: Command) -> None:
    """Check that pip's extra, pytest's test and mkdocs' configuration (the last argument) exist."""
    text = str(command)
    if command.program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        ours = rf"git\+{GITHUB}{repository()}|-e '?\.\[(\w+)\]'?"
        match = re.fullmatch(rf"pip (?:install (?:{ours})|uninstall nanorlhf)", text)
        if match is None or match[1] not in (None, *extras):
            raise Wrong(f"pyproject.toml has the extras {', '.join(extras)}")
    elif command.program == "pytest" and "-k" in command.words:
        word = command.words[command.words.index("-k") + 1]
        if not any(re.search(rf"def test_\w*{word}", path.read_text()) for path in (ROOT / "tests").rglob("*.py")):
            raise Wrong(f"no test name contains {word}")
    elif command.program == "mkdocs" and not (ROOT / command.words[-1]).is_file():
        raise Wrong(f"{command.words[-1]} doesn't exist")
