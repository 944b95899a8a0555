"""Flags: an invalid one gives one sentence on stderr and exit code 2, in every script."""

import errno
import math
import re
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest

import eval as evaluation
import train_dpo
import train_ppo
import train_rm
import train_sft
from course import __main__ as course
from data import programs, sums, tiny, town
from kernels import processor
from nanorlhf import __main__ as nanorlhf_command
from nanorlhf import launch
from nanorlhf.cli import check_ranges, command_line, run_module
from nanorlhf.errors import InputError
from nanorlhf.training import hub
from nanorlhf.training.settings import SamplerSettings
from tests.conftest import ROOT
from tools import compile_kernels
from tools.mutants import __main__ as mutants


@dataclass(frozen=True)
class NoFlags:
    pass


SCRIPTS = {
    "train_sft": train_sft, "train_rm": train_rm, "train_dpo": train_dpo, "train_ppo": train_ppo, "eval": evaluation,
}  # fmt: skip


def call(monkeypatch, capsys, script, *arguments, main=None):
    """Return exit code, stdout, stderr and the settings that `main` would get."""
    settings = []
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    try:
        command_line(main or settings.append, SCRIPTS[script].RECIPES)
        code = 0
    except SystemExit as exit:
        code = exit.code
    return code, *capsys.readouterr(), settings


def test_the_first_recipe_is_the_default_and_flags_change_it(monkeypatch, capsys):
    for script, module in SCRIPTS.items():
        code, _, _, (args,) = call(monkeypatch, capsys, script)
        assert code == 0 and args == module.RECIPES["tiny"][1]
        _, _, _, (args,) = call(monkeypatch, capsys, script, "tldr", "--batch-size", "5", "--seed", "9", "--overwrite")
        assert args == replace(module.RECIPES["tldr"][1], batch_size=5, seed=9, overwrite=True)


@pytest.mark.parametrize(("script", "recipe"), [("train_sft", "tldr"), ("train_ppo", "tiny"), ("eval", "tiny-rm")])
def test_dtype_auto_picks_the_faster_dtype_and_prints_it(monkeypatch, capsys, script, recipe):
    for dtype in ("bfloat16", "float32"):
        monkeypatch.setattr(processor, "faster_dtype", lambda device, dtype=dtype: (dtype, f"it is on {device}"))
        code, out, _, (args,) = call(monkeypatch, capsys, script, recipe, "--dtype", "auto", "--device", "cpu")
        assert code == 0 and args.dtype == dtype and out == f"--dtype auto: {dtype}, as it is on cpu\n"
    monkeypatch.setenv("RANK", "1")  # only one of several processes prints it
    assert call(monkeypatch, capsys, script, recipe, "--dtype", "auto")[1] == ""
    with pytest.raises(InputError, match="--dtype auto only works on the command line"):
        check_ranges(replace(args, dtype="auto"))


def test_none_as_a_value_means_none(monkeypatch, capsys):
    _, _, _, (args,) = call(monkeypatch, capsys, "train_sft", "tldr", "--model", "None")
    assert args.model is None
    flags = ("--reward-model", "None", "--missing-eos-score", "None", "--value-clip-range", "None")
    _, _, _, (args,) = call(monkeypatch, capsys, "train_ppo", "tldr", *flags)
    assert args.reward_model is None and args.missing_eos_score is None and args.value_clip_range is None


def test_model_none_trains_random_weights(miniature, tmp_path):
    """`train_sft.py tldr --model None` takes the shape from the flags and the tokenizer from the data."""
    sizes = {name: getattr(miniature.sft, name) for name in ("n_layer", "n_head", "d_model", "batch_size")}
    lengths = {name: getattr(miniature.sft, name) for name in ("max_query_length", "max_response_length")}
    args = replace(train_sft.RECIPES["tldr"][1], model=None, data=miniature.root / "data", out=tmp_path / "sft")
    summary = train_sft.main(replace(args, device="cpu", num_samples=2, **sizes, **lengths))
    assert math.isfinite(summary["validation_loss"]) and (tmp_path / "sft" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "sentence"),
    [
        ("train_sft", ["huge"], "unknown recipe 'huge': choose one of tiny, tldr"),
        ("train_rm", ["tldr", "--beam-size", "4"], "unknown flag '--beam-size': .*--help"),
        ("train_sft", ["tiny", "more"], "unexpected 'more'"),
        ("train_ppo", ["--sampler.ur=http://me:secret@host"], "unknown flag '--sampler.ur': "),
        ("train_sft", ["--lr", "1", "--learning-rate", "1"], "unknown flag '--learning-rate'"),
        ("train_sft", ["--out", ""], "train_sft.py tiny: --out is empty: pass a value or omit the flag"),
        ("train_sft", ["--out="], "train_sft.py tiny: --out is empty: pass a value or omit the flag"),
        ("train_ppo", ["tldr", "--lr", "1", "--sft", ""], "train_ppo.py tldr: --sft is empty"),
        ("train_sft", ["--lora-targets"], "train_sft.py tiny: --lora-targets needs a value"),
        ("train_sft", ["--lora_targets", "--seed", "1"], "--lora-targets needs a value"),
        ("eval", ["--policies"], "--policies needs a value"),
        ("train_ppo", ["--sampler.correction"], "--sampler.correction needs a value"),
        ("train_ppo", ["--sampler.evil", "1"], "unknown flag '--sampler.evil'"),
        ("train_ppo", ["--whiten-rewards", "-x"], "unknown flag '-x'"),
        ("train_ppo", ["--no-lr"], "unknown flag '--no-lr'"),
    ],
)
def test_an_unknown_recipe_or_flag_is_one_line_and_exit_code_2(monkeypatch, capsys, script, arguments, sentence):
    code, out, err, settings = call(monkeypatch, capsys, script, *arguments)
    assert code == 2 and settings == [] and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and re.search(sentence, err)


@pytest.mark.parametrize(
    ("module", "arguments", "sentence"),
    [
        (course, ["grade", "--evil", "x"], "unknown flag '--evil'"),
        (course, ["grade", "-x"], "unknown flag '-x'"),
        (course, ["grade", "--directory", "x"], "unknown flag '--directory'"),
        (course, ["grade", ".", "--evil=3"], "unknown flag '--evil'"),
        (course, ["grade", "--exercises"], "--exercises needs a value"),
        (course, ["grade", "--limit", "abc"], "--limit: could not convert string to float: 'abc'"),
        (course, ["grade", "a", "b"], "unexpected 'b'"),
        (course, ["grade", "--format", "xml"], "--format"),
        (mutants, ["--evil", "3"], "unknown flag '--evil'"),
        (course, ["verify", "--parts"], "--parts needs a value"),
        (course, ["evil"], "Expected one of {start, next"),
        (course, [], "Expected one of {start, next"),
        (course, ["plant"], "new directory"),
        (hub, ["--evil", "a", "b"], "unknown flag '--evil'"),
        (hub, ["a"], "OWNER/NAME"),
        (tiny, ["--out", "a", "b"], "unexpected 'b'"),
        (compile_kernels, ["--evil"], "unknown flag '--evil'"),
        (compile_kernels, ["--out", "--measure"], "--out needs a value"),
    ],
)
def test_invalid_arguments_give_one_sentence_in_every_module(monkeypatch, capsys, module, arguments, sentence):
    monkeypatch.setattr(sys, "argv", ["program.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        run_module(module.main, module.Args)
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1 and sentence in err


@pytest.mark.parametrize("arguments", [["--kl-coef", "-1"], ["--kl-coef", "-.5e3"], ["--kl-coef", "-inf"]])
def test_a_negative_number_is_a_value_not_a_flag(monkeypatch, capsys, arguments):
    code, _, err, _ = call(monkeypatch, capsys, "train_ppo", *arguments)
    assert code == 2 and "--kl-coef -" in err and "must be at least 0" in err


def test_every_ppo_recipe_samples_from_the_policy_only():
    """docs/mismatch.md shows the effects of --sampler.top-p, --sampler.sync-every and --sampler.dtype."""
    for _, args in train_ppo.RECIPES.values():
        assert args.sampler == SamplerSettings()
        assert (args.sampler.top_p, args.sampler.sync_every, args.sampler.dtype) == (1.0, 1, "same")


@pytest.mark.parametrize("flag", ["--top-k", "--no-repeat-ngram-size", "--min-length"])
def test_ppo_has_no_flags_that_filter_the_sampler(monkeypatch, capsys, flag):
    """Sampling from a filtered distribution, with log-probabilities of the full one, makes the KL negative."""
    code, _, err, settings = call(monkeypatch, capsys, "train_ppo", "tiny", flag, "1")
    assert code == 2 and settings == [] and f"unknown flag '{flag}'" in err


@pytest.mark.parametrize(
    "arguments", [["--batch-size", "x"], ["--lr"], ["--schedule", "steps"], ["--dtype", "float16"], ["--seed", "1.5"]]
)
def test_a_value_of_the_wrong_kind_names_its_flag_and_exits_with_code_2(monkeypatch, capsys, arguments):
    code, out, err, settings = call(monkeypatch, capsys, "train_sft", *arguments)
    assert code == 2 and settings == [] and arguments[0] in err and "--help" in err
    assert err.startswith("error: ") and err.count("\n") == 1 and "│" not in err


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_recipes_and_every_flag(monkeypatch, capsys, script):
    code, out, _, settings = call(monkeypatch, capsys, script, "--help")
    recipes = SCRIPTS[script].RECIPES
    assert code == 0 and settings == []
    assert re.findall(r"^    (\S+)  ", out.partition("\nflags of")[0], re.M) == list(recipes)
    for field in fields(recipes["tiny"][1]):
        assert f"--{field.name.replace('_', '-')}" in out


def flag_names(settings, prefix="") -> list[str]:
    names = []
    for item in fields(settings):
        name, value = f"{prefix}{item.name.replace('_', '-')}", getattr(settings, item.name)
        names += flag_names(value, f"{name}.") if is_dataclass(value) else [name]
    return names


def test_help_is_in_groups_with_data_and_models_first(monkeypatch, capsys):
    _, out, _, _ = call(monkeypatch, capsys, "train_ppo", "--help")
    _, *parts = re.split(r"^\W+ ([\w -]+) options \W+$", out, flags=re.M)
    boxes = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(boxes) == [
        "data and model", "train-ppo", "shared", "run", "adam", "sampler", "reference", "elastic-reset",
    ]  # fmt: skip
    flags = {label: re.findall(r"^\W --([a-z][a-z.-]*)", box, re.M) for label, box in boxes.items()}
    first = ["data", "sft", "reward-model", "reward", "gold", "value-model", "out"]
    assert flags["data and model"] == first and "kl-coef" in flags["train-ppo"]
    assert {"lr", "lora-rank"} <= set(flags["shared"]) and {"device", "resume"} <= set(flags["run"])
    assert flags["sampler"][0] == "sampler.url"
    listed = [flag for box in flags.values() for flag in box]
    assert sorted(listed) == sorted(flag_names(train_ppo.Args()))
    assert "(score units per nat) (default: 0.1)" in " ".join(
        re.findall(r"[^\s│|]+", boxes["train-ppo"])
    )  # of the recipe


def test_help_of_a_module_that_inherits_settings_is_in_groups(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["program.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        run_module(tiny.main, tiny.Args)
    out = capsys.readouterr().out
    assert out.index("data and model options") < out.index("--num-comparisons") < out.index("run options")


@pytest.mark.parametrize("columns", ["1", "9", "0", "-5", "many"])
def test_help_in_a_terminal_of_an_odd_width(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _, _ = call(monkeypatch, capsys, "train_sft", "--help")
    assert code == 0 and len(out.splitlines()) < 400 and "--warmup-steps" in out


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (InputError("rows.jsonl:3: malformed JSON: fix the line."), 2, "error: rows.jsonl:3: malformed JSON"),
        (OSError(errno.ENOSPC, "No space left on device", "a.bin"), 2, r"error: the disk is full .* at a.bin\."),
        (OSError(errno.ENOSPC, "No space left on device", b"a.bin"), 2, r"error: the disk is full .* at a.bin\."),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk is full .*the output directory"),
        (OSError(errno.EFBIG, "File too large", "a.bin"), 2, "error: the disk is full .*File too large.* at a.bin"),
        (PermissionError(errno.EACCES, "Permission denied", "a.bin"), 2, "error: a.bin: Permission denied"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            2,
            r"error: No usable temporary directory found in \['/tmp'\]: set TMPDIR",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_user_errors_are_one_line(monkeypatch, capsys, error, code, sentence):
    def main(_):
        raise error

    got, _, err, _ = call(monkeypatch, capsys, "train_sft", main=main)
    assert got == code and err.count("\n") == 1 and re.match(sentence, err)
    monkeypatch.setattr(sys, "argv", ["module"])
    with pytest.raises(SystemExit) as exit:
        run_module(main, NoFlags)
    assert exit.value.code == code and capsys.readouterr().err == err


def test_a_bug_keeps_its_traceback(monkeypatch, capsys):
    def main(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, capsys, "train_sft", main=main)


# ------------------------------------------------------------------------------------------------------------- numbers
ABSURD = {
    "train_sft": {"batch_size": (0, -8), "micro_batch_size": (0, -1), "lr": (-1e-3,), "num_epochs": (0, -1.0),
                  "warmup_steps": (-1,), "max_query_length": (0,), "max_response_length": (0,), "eval_every": (0,),
                  "save_every": (0,), "num_samples": (0,), "temperature": (-0.7,), "seed": (-1, 2**63),
                  "n_layer": (0,), "n_head": (0,), "d_model": (0,)},
    "train_rm": {"batch_size": (0,), "micro_batch_size": (0, -4), "lr": (-1.0,), "num_epochs": (0,),
                 "num_normalisation": (-1,), "seed": (-1,), "save_every": (0,), "max_response_length": (-1,)},
    "train_dpo": {"batch_size": (0,), "micro_batch_size": (0,), "lr": (-1.0,), "beta": (0.0, -0.1),
                  "num_validation": (0,), "seed": (-1,)},
    "train_ppo": {"batch_size": (0, -64), "num_minibatches": (0, -1), "micro_batch_size": (0, -1),
                  "num_ppo_epochs": (0,), "total_episodes": (0, -5), "lr": (-1.0,),
                  "temperature": (0.0, -1.0, 1e-300, 1e7), "kl_coef": (-0.1,), "kl_target": (0.0, -6.0),
                  "gamma": (-0.1, 1.1),
                  "lam": (-0.1, 1.01), "clip_range": (0.0, -0.2), "value_clip_range": (0.0, -0.2),
                  "value_coef": (-1.0,), "response_length": (0,), "max_query_length": (0,),
                  "save_every": (0,), "seed": (-1,), "lora_rank": (0, 10**12)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "name", "value"),
    [(script, name, value) for script, names in ABSURD.items() for name, values in names.items() for value in values],
)
def test_an_out_of_range_number_names_its_flag_and_nothing_is_written(miniature, tmp_path, script, name, value):
    args = getattr(miniature, script.removeprefix("train_"))
    with pytest.raises(InputError, match=rf"^--{name.replace('_', '-')} {re.escape(str(value))}: "):
        SCRIPTS[script].main(replace(args, out=tmp_path / "out", **{name: value}))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_script_as_the_shell_sees_it(miniature, tmp_path):
    """One process for all cases: the same sentence and exit code, nothing on stdout, nothing written."""
    command = [sys.executable, "train_ppo.py", "--data", str(miniature.root / "data"), "--sft", str(tmp_path / "no")]
    result = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'no'}")
    assert not (tmp_path / "out").exists()


ROWS_IN_MEMORY = [
    (train_ppo.RECIPES["tiny"][1], ("batch_size",)),
    (evaluation.RECIPES["rlcf-tiny"][1], ("num_samples", "num_resamples")),
    (evaluation.RECIPES["sums"][1], ("num_samples",)),
    (evaluation.RECIPES["tiny"][1], ("num_distinct_samples",)),
    (tiny.Args(), ("num_demonstrations", "num_comparisons", "num_validation", "num_triads")),
    (sums.Args(), ("num_demonstrations", "num_queries", "num_comparisons", "num_validation")),
    (town.Args(), ("num_train", "num_validation")),
    (programs.Args(), ("num_problems", "num_solutions")),
]


@pytest.mark.parametrize(("args", "name"), [(args, name) for args, names in ROWS_IN_MEMORY for name in names])
def test_too_many_rows_for_memory_are_rejected_at_once(args, name):
    sentence = rf"--{name.replace('_', '-')} 1000000000000: must be from [01] to a million"
    with pytest.raises(InputError, match=sentence):
        check_ranges(replace(args, **{name: 10**12}))


@pytest.mark.parametrize("recipe", ["tiny", "stackoverflow-tiny", "str-tiny", "sums"])
def test_a_temperature_that_overflows_the_logits_is_refused(recipe):
    args = evaluation.RECIPES[recipe][1]
    for name in ("temperature", "kl_temperature"):
        if hasattr(args, name):
            for value in (1e-300, 1e-7, 1e300):
                sentence = f"--{name.replace('_', '-')} {value}: must be "
                with pytest.raises(InputError, match=rf"^{re.escape(sentence)}(0 or )?from 10\^-6 to 10\^6"):
                    check_ranges(replace(args, **{name: value}))


def test_a_newline_in_a_path_does_not_split_the_error(monkeypatch, capsys):
    def refuse(args):
        raise InputError(f"{args.model} does not exist: correct the path.")

    code, _, err, _ = call(monkeypatch, capsys, "train_sft", "tiny", "--model", "no\nmodel", main=refuse)
    assert code == 2 and err == "error: no model does not exist: correct the path.\n"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set, but RANK is"),
        ({"RANK": "0", "WORLD_SIZE": "abc"}, "WORLD_SIZE=abc: must be a number from 1 to"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be a number from 1 to"),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK=abc: must be a number from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1: must be a number from 0 to 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: must be a number from 0 to 1"),
        ({"RANK": "\N{SUPERSCRIPT TWO}", "WORLD_SIZE": "3"}, "must be a number from 0 to 2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}, "MASTER_PORT=x: must be a number from 0 to 65535"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not set"),
    ],
)
def test_an_environment_not_set_by_torchrun_is_rejected(monkeypatch, variables, sentence):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=sentence):
        launch.setup("cpu")


@pytest.mark.parametrize(
    "name",
    ["", "../x", "a.b.c", "é", "a" * 5000, "x\ny", "nanorlhf", "__main__", "nanorlhf.__main__", "cli", "-x"],
)
def test_an_unknown_program_gives_one_sentence(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["nanorlhf", name])
    with pytest.raises(SystemExit) as stopped:
        nanorlhf_command.main()
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and err.startswith("error: nanorlhf ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "redirection", "code"),
    [("nanorlhf", "| head -c 1", 141), ("nanorlhf", ">&-", 0), ("data.tiny --help", "| head -c 1", 141)],
)
def test_help_into_a_closed_pipe_is_not_an_error(program, redirection, code):
    command = f"set -o pipefail; {sys.executable} -m {program} {redirection}"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert ended.stderr == "" and ended.returncode in (0, code)
