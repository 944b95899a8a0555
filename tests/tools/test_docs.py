"""Every command printed in README.md, docs/ and course/ works.

Commands that need no download are executed as printed, in a temporary directory, with extra flags that make them small;
the commands of a make target run one by one. For all commands, the script's own parser parses the flags, and every path
that a command reads must be written by an earlier command of the same page or be declared by the page.
"""

import contextlib
import csv
import io
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import IO

import pytest
from matplotlib.figure import Figure

from kernels.processor import has_int8_matmul
from tests.conftest import run_program
from tests.helpers.page_commands import (
    DATA,
    NO_PATHS,
    PAGES,
    READ,
    READ_FUNCTIONS,
    READ_PAIRS,
    ROOT,
    WRITTEN,
    Command,
    Wrong,
    check_page,
    page_name,
    parse_settings,
    path_fields,
    paths_read,
    paths_written,
    read_command,
    read_page,
    recorded_commands,
)

ALL = {name: read_page(name, path.read_text()) for name, path in zip(map(page_name, PAGES), PAGES, strict=True)}


# ------------------------------------------------------------------------------------------------------- 1. the pages
@pytest.mark.parametrize("name", ALL)
def test_every_command_of_a_page_parses_and_its_inputs_exist(name) -> None:
    assert not check_page(ALL[name], ALL).problems


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else path.parent / file
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings], link


def test_the_front_page_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120 and len(text.encode()) <= 10 * 1024


def test_each_cell_of_the_comparison_has_a_source_and_lines_are_the_sum_of_the_counted_files() -> None:
    with (ROOT / "docs" / "how-we-compare.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert all(row["as of"] and row["source"] for row in rows)
    sources = {(row["project"], column): row["source"] for row in rows for column in row["column"].split(", ")}
    text = (ROOT / "docs" / "how-we-compare.md").read_text().partition("## Choosing")[0]
    cells = {}
    for line in text.splitlines():
        if line.startswith("| | "):
            header = line[4:-2].split(" | ")
        elif line.startswith("| **"):
            name, *row = line[2:-2].split(" | ")
            cells |= {(name.strip("*"), column): cell for column, cell in zip(header, row, strict=True)}
    assert set(cells) == set(sources) and len(cells) == 12 * 9 == sum(row["column"].count(",") + 1 for row in rows)
    for (project, column), cell in cells.items():
        if column == "lines of the loop":
            counted = {path: int(lines) for path, lines in re.findall(r"([\w/]+\.py) (\d+)", sources[project, column])}
            assert cell.startswith(f"{sum(counted.values()):,}: "), project
            if project == "this one":
                assert len(counted) == 3
                assert counted == {path: len((ROOT / path).read_text().splitlines()) for path in counted}


def test_every_setting_that_is_text_or_a_path_is_known_to_the_checker() -> None:
    known = READ | READ_PAIRS | READ_FUNCTIONS | WRITTEN | DATA | NO_PATHS
    for page in ALL.values():
        for command in page.commands:
            if command.program.endswith(".py") or "." in command.program or command.program in ("course", "bench"):
                args = parse_settings(command)
                names = set(path_fields(type(args))) if args is not None else set()
                assert command.program in ("tools.soak", "tools.fuzz") or names <= known, (
                    f"{command.program}: {names - known}"
                )


def test_a_page_names_every_pipeline_and_so_its_commands_are_checked() -> None:
    named = {word for page in ALL.values() for command in page.commands for word in command.arguments}
    pipelines = {path.stem for path in (ROOT / "pipelines").glob("*.sh")} - {"common"}
    assert pipelines <= named and len(pipelines) >= 12


def test_adapters_biases_and_lora_train_at_a_higher_rate_than_all_weights() -> None:
    """At full fine-tuning's rate they learn little, and STR's comparison would favour its own method."""
    printed = [command for page in ALL.values() for command in page.commands]
    scripts = [path.stem for path in (ROOT / "pipelines").glob("*.sh") if path.stem != "common"]
    tuned = set()
    for command in (*printed, *(step for script in scripts for step in recorded_commands(script))):
        args = parse_settings(command) if command.program.startswith("train_") else None
        if getattr(args, "tune", "full") != "full":
            recipe = recipe_name(command)
            full = import_module(command.program.removesuffix(".py")).RECIPES[recipe][1]
            if full.tune == "full":  # a recipe for LoRA has LoRA's rate
                assert args.lr == pytest.approx(10 * full.lr), command
                tuned.add((recipe, args.tune))
    assert tuned == {(recipe, tune) for recipe in ("str", "str-tiny") for tune in ("adapter", "bitfit", "lora")}


# --------------------------------------------------------------------------------------------------- 2. the execution
# flags that make a program small; an entry "SCRIPT RECIPE" takes precedence over its script
SMALL = {
    "data.tiny": "--num-demonstrations 64 --num-comparisons 64 --num-validation 16",
    "data.site": "--num-questions 150 --validation-share 0.3",
    "data.programs": "--num-problems 24 --num-solutions 2 --num-bench 8 2 2",
    "data.town": "--num-train 60 --num-validation 8",
    "data.codenet": "--max-query-length 400 --max-response-length 300 --validation-share 0.2",
    "data.stackoverflow": "--max-length 200 --max-response-length 80",
    "data.self_rank": "--num-queries 6 --num-samples 8 --interval 1 --response-length 32",
    "data.sums": "--num-demonstrations 64 --num-queries 32 --num-comparisons 64 --num-validation 16",
    "data.best_of": "--num-queries 64 --num-validation-queries 64 --num-samples 32 --response-length 64",
    "data.rank": "--num-questions 2",
    "train_sft.py": "--num-epochs 0.25 --warmup-steps 0 --num-samples 2 --batch-size 8 --n-layer 1 --d-model 16",
    "train_rm.py": "--num-epochs 0.25 --warmup-steps 0 --batch-size 8 --num-normalisation 8",
    "train_dpo.py": "--num-epochs 0.25 --warmup-steps 0 --batch-size 8",
    "train_ppo.py": "--total-episodes 8 --batch-size 8 --num-minibatches 1 --num-ppo-epochs 1 --response-length 12 "
    "--keep-every 1",
    "train_grpo.py": "--total-episodes 16 --batch-size 16 --num-epochs 1 --response-length 12",
    "train_rlcf.py": "--total-episodes 8 --batch-size 8 --num-minibatches 1 --num-ppo-epochs 1 --response-length 12",
    "nanorlhf.rlcf.train_discriminator": "--num-triplet-epochs 0.25 --triplet-batch-size 4 --num-pair-epochs 0 "
    "--batch-size 4 --n-layer 1 --d-model 16 --response-length 12 --warmup-steps 0",
    "nanorlhf.rlcf.train_baselines": "--total-episodes 8 --batch-size 8 --response-length 12",
    "train_sft.py rlcf-tiny-bench": "--num-epochs 1 --warmup-steps 0 --num-samples 2 --batch-size 8",
    "train_sft.py str-tiny": "--num-epochs 8 --warmup-steps 0 --num-samples 2 --batch-size 8 --n-layer 1 --d-model 32 "
    "--lr 1e-2",  # answers that end
    "eval.py": "--num-queries 4 --response-length 12 --num-report-samples 1",
    "eval.py stackoverflow-tiny": "--num-queries 4 --response-length 12 --num-report-samples 1 --num-resamples 20",
    "eval.py rlcf-tiny": "--num-queries 2 --response-length 12 --num-report-samples 1 --num-resamples 20 "
    "--temperatures 0.2 0.8 --num-samples 2 --ks 1 2",
    "eval.py str-tiny": "--num-queries 4 --response-length 12 --num-report-samples 1 --num-resamples 20",
    "eval.py tiny-rm": "",
    "train_grpo.py sums": "--total-episodes 32 --batch-size 32 --num-minibatches 1 --num-epochs 1 --response-length 12",
    "eval.py sums": "--num-queries 4 --num-samples 4 --response-length 12 --num-report-samples 1",
    "tools.blind_spots": "--num-posts 8",
}
LENGTHS = {"tiny": (160, 64), "tiny-rm": (160, 64), "stackoverflow-tiny": (200, 80), "rlcf-tiny": (400, 300)}
LENGTHS |= {"rlcf-tiny-bench": (400, 300), "str-tiny": (120, 48)}
# slow at any size, so a separate test executes them
ELSEWHERE = {
    "course": "tests/course/test_commands.py",
    "data.pretrained": "tests/data/test_pretrained.py",
    "data.reason": "tests/data/test_reason.py",
    "nanorlhf.pretrained.gguf": "tests/pretrained/test_gguf.py",
    "nanorlhf.doctor": "tests/doctor/test_diagnosis.py",
    "nano.py": "tests/test_nano.py",
    "course.nano_page": "tests/course/test_nano_page.py",
    "tools.check": "tests/tools/test_check.py",
    "tools.compile_kernels": "tests/tools/test_compile.py",
    "tools.doctor": "tests/doctor/test_judging.py",
    "tools.prose": "tests/tools/test_prose.py",
    "tools.sick_runs": "tests/doctor/test_judging.py",
    "tools.fuzz": "tests/test_bad_input.py",
    "tools.gpu": "tests/tools/test_gpu.py",
    "tools.mutants": "tests/tools/mutants/test_sweep.py",
    "tools.soak": "tests/tools/test_soak.py",
    "tools.repository": "tests/tools/test_repository.py",
    "tools.symptoms": "tests/tools/test_symptoms.py",
    "tools.hf_job": "tests/tools/test_renting.py",
    "experiments": "tests/experiments/test_worlds_runs.py",
    "experiments.worlds.report": "tests/experiments/test_worlds_report.py",
    "experiments.leaderboard.report": "tests/experiments/test_leaderboard_report.py",
    "experiments.scaling.report": "tests/experiments/test_scaling.py",
    "experiments.tldr.report": "tests/experiments/test_tldr.py",
    "experiments.learning_curve.report": "tests/experiments/test_learning_curve.py",
    "nanorlhf.training.train_linear": "tests/training/test_train_linear.py",
    "tools.parity": "tests/tools/test_parity.py",
    "bench": "tests/tools/test_bench.py",
    "nanorlhf.plan": "tests/plan/test_memory.py",
}
WORLDS = {
    "demo": "runs/tiny", "stackoverflow": "runs/site", "rlcf": "runs/programs", "str": "runs/town", "lab": "runs/lab",
    "mismatch": "runs/mismatch", "compare": "runs/compare", "sums": "runs/sums",
}  # fmt: skip
TABLES = ("lab", "mismatch")  # worlds whose runs differ in the values of flags
SEEDS = ("compare", "sums")  # worlds whose runs repeat those of the first seed


def recipe_name(command: Command) -> str:
    first = command.arguments[:1]
    return first[0] if first and not first[0].startswith("-") else "tiny"


def small_flags(command: Command) -> list[str]:
    """Return the flags to append, if the settings have these fields."""
    program, recipe = command.program, recipe_name(command)
    flags = shlex.split(SMALL.get(f"{program} {recipe}", SMALL.get(program, "")))
    if recipe in LENGTHS and not program.startswith("data."):
        longest = zip(("--max-query-length", "--max-response-length"), map(str, LENGTHS[recipe]), strict=True)
        flags += [
            word for pair in longest for word in pair if hasattr(parse_settings(command), pair[0][2:].replace("-", "_"))
        ]
    return flags


def runnable() -> dict[str, list[Command]]:
    """Group the commands to execute by world, each once, in the order of the pages.

    In TABLES, commands differ only in the values of flags: run one per set of flags. In SEEDS, run only the first seed.
    Skip commands that read the outputs of skipped ones.
    """
    groups: dict[str, list[Command]] = {**{world: [] for world in WORLDS}, "none": []}
    seen: set[Command | tuple[str, ...] | str] = set()
    left_out: set[str] = set()  # outputs of skipped commands
    for page in ALL.values():
        for command in check_page(page, ALL).runnable:
            if ELSEWHERE.get(command.program) is None:
                args = parse_settings(command)
                reads, writes = paths_read(command.program, args), paths_written(command.program, args)
                paths = " ".join(reads + writes)
                world = next((world for world, directory in WORLDS.items() if directory in paths), "none")
                kind = (world, *program_and_flags(command)) if world in TABLES else command
                if world in SEEDS:
                    kind = without_seed(command)
                if "int8" in command.words and not has_int8_matmul():
                    left_out.update(writes)
                    continue
                if kind not in seen and left_out.isdisjoint(reads):
                    groups[world].append(command)
                    seen.add(kind)
                elif world in (*TABLES, *SEEDS) and command not in groups[world]:
                    left_out.update(writes)
    return groups


def program_and_flags(command: Command) -> tuple[str, ...]:
    """Return a command's program and flags without their values."""
    return (command.program, *sorted({word for word in command.words if word.startswith("--")}))


def without_seed(command: Command) -> str:
    """Return a command of SEEDS with its seed removed."""
    return re.sub(r"(runs/compare/|runs/sums_study/|--seed )\d+", r"\1", str(command))


def execute(command: Command) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run_program(command.program, *command.arguments, *small_flags(command))
        except SystemExit as stop:
            assert not stop.code, f"{command}: {stop.code}: {said.getvalue()[-2000:]}"


@pytest.fixture
def drawn_once(monkeypatch):
    """Draw only the first of the figures with equal titles: drawing takes most of an evaluation's time."""
    savefig, drawn = Figure.savefig, set()

    def save(figure: Figure, file: IO[bytes], **settings) -> None:
        titles = tuple(axes.get_title("left") for axes in figure.axes)
        if titles in drawn:
            file.write(b"<svg/>")
        else:
            savefig(figure, file, **settings)
        drawn.add(titles)

    monkeypatch.setattr(Figure, "savefig", save)


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_once")
@pytest.mark.parametrize("world", WORLDS)
def test_every_command_that_needs_no_download_runs(world, tmp_path, monkeypatch) -> None:
    for name in ("data", "docs", "nanorlhf", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for page in PAGES:
        for name, code in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", page.read_text(), re.S):
            (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    commands = runnable()
    assert commands[world] and not commands["none"]
    for command in commands[world]:
        execute(command)


def test_commands_listed_as_executed_elsewhere_are() -> None:
    for program, test in ELSEWHERE.items():
        name = program.partition(" ")[0].removesuffix(".py").removeprefix("tests.")
        assert re.search(rf"\b{name}\b", (ROOT / test).read_text())
    skipped = {ELSEWHERE.get(command.program) for page in ALL.values() for command in page.commands} - {None}
    assert skipped == set(ELSEWHERE.values())


# ----------------------------------------------------------------------------------------------------- 3. the checker
GOOD = """
```sh
# downloads: Posts.xml, EleutherAI/gpt-neo-125m
python -m data.stackoverflow --source Posts.xml --out runs/so/data   # a comment
python train_sft.py stackoverflow --data runs/so/data \\
    --out runs/so/sft
python train_rm.py stackoverflow --loss regression --data runs/so/data --sft runs/so/sft
torchrun --nproc-per-node 8 train_ppo.py stackoverflow --data runs/so/data --sft runs/so/sft --reward-model runs/so/rm
```
"""


def find_problems(text: str) -> list[str]:
    return check_page(read_page("typed.md", text)).problems


def test_a_good_page_has_no_problems_and_nothing_that_runs_without_a_download() -> None:
    page = read_page("typed.md", GOOD)
    assert len(page.commands) == 4 and page.commands[1].arguments[-2:] == ["--out", "runs/so/sft"]
    checked = check_page(page)
    assert not checked.problems and not checked.runnable and "runs/so/rm" in checked.written


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("--loss regression", "--los regression", "unknown flag|unrecognized|--los"),
        ("--loss regression", "--loss regresion", "--loss"),
        ("train_sft.py stackoverflow", "train_sft.py stackoverflo", "unknown recipe"),
        ("train_sft.py", "train_stf.py", "train_stf.py doesn.t exist"),
        ("data.stackoverflow", "data.stackoverflo", "module data.stackoverflo doesn.t exist"),
        ("--sft runs/so/sft --reward", "--sft runs/so/stf --reward", "it reads runs/so/stf, which no earlier"),
        ("--source Posts.xml", "--source Post.xml", "it reads Post.xml, which no earlier"),
        ("# downloads: Posts.xml, ", "# downloads: Posts.xml, Tags.xml, ", "nothing reads Tags.xml"),
        (" --loss regression", "", None),
        ("-m data.stackoverflow", "-m data.squad", "it reads runs/so/data/scored.train.jsonl, which no earlier"),
        ("# downloads: Posts.xml, ", "# downloads: Posts.xml\n# from other.md: ", "other.md does not write"),
    ],
)
def test_a_mistake_in_a_page_is_reported(old, new, sentence) -> None:
    assert old in GOOD
    problems = find_problems(GOOD.replace(old, new, 1))
    assert not problems if sentence is None else any(re.search(sentence, problem) for problem in problems)


def test_a_module_that_overwrites_another_ones_rows_is_reported() -> None:
    page = "```sh\n# downloads: Java250, mbjp.jsonl\npython -m data.codenet --source Java250\n" \
        "python -m data.mxeval --source mbjp.jsonl --test-share 0.2 --out runs/rlcf/data\n```\n"  # fmt: skip
    [problem] = find_problems(page)
    assert "it replaces runs/rlcf/data/code.train.jsonl, which data.codenet wrote" in problem
    assert not find_problems(page.replace(" --out runs/rlcf/data", ""))


def test_the_stages_of_rlcf_find_each_other_without_flags() -> None:
    """Each default path is written by a command of the page, and the data fits the limits of its readers."""
    text = (ROOT / "docs" / "rlcf.md").read_text()
    stages = ("train_sft.py rlcf-bench", "train_rlcf.py rlcf", "eval.py rlcf")
    assert not find_problems(text + "".join(f"`python {stage} --dtype bfloat16`\n" for stage in stages))
    limits = {}  # directory -> lengths of the commands that write or read it
    for command in read_page("rlcf.md", text).commands:
        if command.program not in ("make", "bench", "nanorlhf.plan", "nanorlhf.rlcf.join_evaluations"):
            args = parse_settings(command)
            directory = args.out if command.program.startswith("data.") else args.data
            lengths = args.max_query_length, getattr(args, "max_response_length", None)
            limits.setdefault(str(directory), []).append((command.program, *lengths))
    for directory in ("runs/rlcf/data", "runs/rlcf/bench", "runs/rlcf/mathqa", "runs/gpt2_xl/data"):
        (_, query, response), *readers = limits[directory]
        assert readers and all(longest >= query for _, longest, _ in readers)
        assert all(longest is None or longest >= response for _, _, longest in readers)


def test_commands_are_checked_in_the_order_of_the_page() -> None:
    eval_first = "`python eval.py stackoverflow --policies sft runs/so/sft --regression-model None " \
        "--contrastive-model None --data runs/so/data`\n"  # fmt: skip
    assert not find_problems(GOOD + eval_first) and find_problems(eval_first + GOOD)


@pytest.mark.parametrize("text", ["```sh\npyhton train_sft.py\n```", "```sh\ncurl localhost\n```"])
def test_an_unknown_command_in_a_shell_block_is_an_error(text) -> None:
    with pytest.raises(Wrong, match="isn't a command: expected one of python"):
        read_page("typed.md", text)


def test_a_make_target_is_followed_through_its_pipeline() -> None:
    checked = check_page(read_page("typed.md", "    make rlcf      # a comment\n"))
    assert not checked.problems and {command.program for command in checked.runnable} >= {"data.programs", "eval.py"}
    assert sum("_bench" in str(command) and command.program == "train_sft.py" for command in checked.runnable) == 3
    assert check_page(read_page("typed.md", "`bash pipelines/rlcf.sh`")).runnable == checked.runnable
    assert find_problems("`make demos`") and find_problems("`RUNS=elsewhere make demo` `python eval.py tiny-rm`")


def test_declared_files_can_be_read_and_their_commands_are_not_executed(tmp_path) -> None:
    text = "```sh\n# yours: mine/sft.train.jsonl, mine/sft.validation.jsonl\n# downloads: gpt2\n" \
        "python train_sft.py tldr --model gpt2 --data mine\n```\n"  # fmt: skip
    checked = check_page(read_page("typed.md", text))
    assert not checked.problems and not checked.runnable
    assert find_problems(text.replace("mine/sft.validation.jsonl", "mine/sft.test.jsonl"))


def test_pip_and_pytest_are_checked_by_name() -> None:
    assert not find_problems("`pip install -e '.[hub]'` and `pytest -k long_dump`")
    assert (
        len(find_problems("`pip install -e '.[hubs]'` and `pip install nanorlhf` and `pytest -k nothing_of_the_kind`"))
        == 3
    )


def test_the_words_of_a_command() -> None:
    command = read_command("SEED=2 torchrun --nproc-per-node 8 train_sft.py tldr --lr 1  # fast")
    assert command.program == "train_sft.py" and command.arguments == ["tldr", "--lr", "1"]
    assert command.environment == (("SEED", "2"),) and Path(command.program).name in str(command)
