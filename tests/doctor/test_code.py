"""Tests of `doctor code`: no findings in our code, and a finding for each of the course's bugs."""

import importlib
import json
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

import train_ppo
from course.bugs import BUGS, Bug, bug_named
from course.copies import source_path
from course.edit import replaced
from nanorlhf.doctor import (
    code,
    family_checks,
    model_checks,
    rollout_checks,
    stage_checks,
    update_checks,
    whole_run_checks,
)
from nanorlhf.doctor.__main__ import Args, Code, main
from nanorlhf.doctor.cases import CannotCheckError, Cases, replaced_logprobs
from nanorlhf.doctor.world import World, make_world
from nanorlhf.errors import InputError
from nanorlhf.pretrained.families import neox
from nanorlhf.rules.finding import ORDER, Finding, nearest_first, report
from tests.doctor.planted import PLANTED, Planted
from tools.changes import CHANGES

ROOT = Path(__file__).resolve().parents[2]
MODULES = (model_checks, rollout_checks, update_checks, stage_checks, whole_run_checks, family_checks)
CHECKS = {check.__name__: check for module in MODULES for check in module.CHECKS}
# bug -> a check that finds it
FOUND_BY = {
    "positions-count-padding": "padding",
    "stale-position-in-decoding": "sampling",
    "stale-rotation-in-decoding": "sampling",
    "padding-is-attended-to": "padding",
    "dropout-on": "determinism",
    "sampler-forgets-the-temperature": "sampling",
    "filtered-rollouts": "readings",
    "ratio-to-the-filtered-sampler": "first_ratio",
    "copies-share-a-seed": "random_numbers",
    "pad-can-be-sampled": "pad_token",
    "eos-goes-unnoticed": "sampling",
    "eos-is-masked": "masks",
    "state-mask-off-by-one": "masks",
    "mask-from-eos-only": "masks",
    "pad-searched-in-the-query": "readings",
    "score-before-eos": "readings",
    "reward-of-all-tokens": "readings",
    "normalisation-is-lost": "reward_model",
    "tie-is-right": "reward_model",
    "rule-reads-the-query": "rule_inputs",
    "penalty-is-added": "score_placement",
    "trick-is-logged-only": "score_placement",
    "cut-is-ignored": "cut_programs",
    "kl-of-the-wrong-sign": "kl_penalty",
    "k3-of-the-wrong-direction": "statistics",
    "kl-is-averaged-over-padding": "statistics",
    "adaptive-kl-runs-away": "controller",
    "adaptive-kl-sees-another-kl": "controller",
    "reference-is-trained": "reference",
    "reference-keeps-the-updates": "reference",
    "reference-at-temperature-1": "readings",
    "score-one-too-late": "masks",
    "score-at-every-slot-from-the-end": "score_placement",
    "values-are-not-masked": "returns",
    "bootstrap-after-the-end": "returns",
    "discount-is-lambda-alone": "returns",
    "rewards-for-returns": "returns",
    "value-of-the-next-state": "readings",
    "whitening-over-padding": "whitening",
    "unmasked-mean-in-whitening": "whitening",
    "update-at-temperature-1": "first_ratio",
    "logprob-of-the-next-token": "padding",
    "clipped-the-wrong-way": "clipping",
    "nan-times-zero": "nan_after_the_end",
    "mean-of-means": "micro_batches",
    "mean-of-means-in-sft": "micro_batches",
    "large-ratios-are-dropped": "clipping",
    "old-logprobs-move": "clipping",
    "ratio-over-padding": "first_ratio",
    "clipped-share-of-all-tokens": "ratio_statistics",
    "widths-padded-on-the-left": "first_ratio",
    "eos-has-no-loss": "supervised_gradients",
    "no-leading-blank": "seam",
    "seed-is-ignored": "seeds",
    "ranks-overlap": "processes",
    "fresh-optimizer-on-resume": "resuming",
    "logits-in-bfloat16": "sampling",
    "dpo-by-mean": "supervised_gradients",
}
# bug -> why no check finds it
UNSEEN = {
    "judge-is-always-answered": "an LLM judge's answers are read after training, not by policy-gradient code",
    "timeout-does-not-compile": "a verdict on executed programs, which training doesn't use",
}
# change of tools/changes.py -> a check that finds its incorrect version
CHANGE_FOUND_BY = {
    "gspo": "ratio_statistics",
    "clip-higher": "clipping",
    "dropped-groups": "rule_inputs",
    "ground-truth": "rule_inputs",
    "dense-reward": "token_rewards",
    "kto": "reference_point",
    "gpt-j": "families",
    "explained-variance": "statistics",
}
FINDING = Finding(name="x", seen="A y.", means="B.", where="z")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("doctor") / "world")


@pytest.fixture(scope="module")
def healthy(world) -> Cases:
    """Return cases of our own code; each run is made once."""
    return Cases(world)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.slow
def test_our_code_has_no_findings(name, healthy):
    assert [*map(str, CHECKS[name](healthy))] == []


@pytest.fixture
def plant(monkeypatch) -> Iterator[Callable[[Bug | Planted], None]]:
    """Plant a bug in a function of this process, wherever it has been imported."""

    def put_in(bug: Bug | Planted) -> None:
        module_name, _, name = bug.where.partition(":")
        path = ROOT / source_path(module_name)
        source = replaced(path.read_text(encoding="utf-8"), name, bug.old, bug.new, bug.number)
        sick = types.ModuleType(module_name)
        sick.__file__ = str(path)
        monkeypatch.setitem(importlib.sys.modules, f"{module_name} of {bug.name}", sick)
        sick.__dict__["__name__"] = f"{module_name} of {bug.name}"
        exec(compile(source, str(path), "exec"), sick.__dict__)  # noqa: S102
        ours: object = importlib.import_module(module_name)
        theirs: object = sick
        for part in name.split("."):
            if isinstance(ours, types.FunctionType):  # nested function: replace the outer one
                break
            ours, theirs = getattr(ours, part), getattr(theirs, part)
            ours, theirs = (getattr(f, "__wrapped__", getattr(f, "__func__", f)) for f in (ours, theirs))
        assert isinstance(ours, types.FunctionType) and isinstance(theirs, types.FunctionType)
        monkeypatch.setattr(ours, "__code__", theirs.__code__)

    yield put_in


def test_each_course_bug_has_a_check_or_a_reason():
    assert {bug.name for bug in BUGS} == FOUND_BY.keys() | UNSEEN.keys()
    assert len(FOUND_BY) >= 50


IN_PROCESS = [bug for bug in BUGS if FOUND_BY.get(bug.name) not in (None, "processes")]


@pytest.mark.parametrize("bug", IN_PROCESS, ids=lambda bug: bug.name)
@pytest.mark.slow
def test_a_course_bug_is_found(bug, plant, world):
    plant(bug)
    assert [*CHECKS[FOUND_BY[bug.name]](Cases(world))]


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name)
def test_a_silent_bug_is_found(bug, plant, world, monkeypatch):
    script = bug.where.partition(":")[0]
    script = script if script in whole_run_checks.TWO_EPOCHS else "train_sft"  # other modules affect every script
    monkeypatch.setattr(whole_run_checks, "TWO_EPOCHS", {script: whole_run_checks.TWO_EPOCHS[script]})
    plant(bug)
    assert next(CHECKS[bug.check](Cases(world)))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.wrong.name)
def test_an_incorrect_change_is_found_and_a_correct_one_is_not(change, plant, world):
    check = CHECKS[CHANGE_FOUND_BY[change.wrong.name]]
    if change.right is not None:
        plant(change.right)
        assert [*map(str, check(Cases(world)))] == []
    plant(change.wrong)
    assert {finding.name for finding in check(Cases(world))}


def test_a_family_that_rotates_other_pairs_is_found(world, monkeypatch):
    fixed = neox.GPT_NEOX.fixed | {"positions": "rotary_interleaved"}
    monkeypatch.setitem(neox.FAMILIES, "gpt_neox", replace(neox.GPT_NEOX, fixed=fixed))
    (finding,) = family_checks.families(Cases(world))
    assert finding.seen.startswith("The logits of a gpt_neox model are up to ")


def test_families_are_compared_with_eager_attention(world, monkeypatch):
    """SDPA, which some versions of transformers use for Gemma 2, ignores the cap."""
    asked = []

    def from_config(config, **named):
        asked.append(named)
        raise InterruptedError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", from_config)
    with pytest.raises(InterruptedError):
        next(family_checks.families(Cases(world)))
    assert asked == [{"attn_implementation": "eager"}]


@pytest.mark.slow
def test_a_modified_tree_is_examined_in_separate_processes(tmp_path, monkeypatch):
    """Examine a bug that shows only with several processes, in a directory with only the modified module.

    This runs the module of checks that finds it and one other; the tests above run all checks in this process.
    """
    assert sorted(name for names in code.PROCESSES for name in names) == sorted(
        m.__name__.rpartition(".")[2] for m in MODULES
    )
    monkeypatch.setattr(code, "PROCESSES", (("whole_run_checks",), ("family_checks",)))
    bug = bug_named("ranks-overlap")
    module = tmp_path / "nanorlhf/distributed.py"
    module.parent.mkdir()
    source = (ROOT / "nanorlhf/distributed.py").read_text(encoding="utf-8")
    module.write_text(replaced(source, "rank_slice", bug.old, bug.new), encoding="utf-8")
    findings, unchecked = code.examine(tmp_path)
    assert {finding.name for finding in findings} == {"processes"} and not unchecked


@pytest.mark.slow
def test_code_that_does_not_run_is_one_finding_that_names_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(code, "PROCESSES", (("family_checks",),))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("gae = None\nraise KeyError('oh')\n")
    findings, _ = code.examine(tmp_path)
    assert len(findings) == 1
    assert findings[0].name == "crash" and "KeyError: 'oh'" in findings[0].seen
    assert findings[0].where.endswith('kernels/__init__.py", line 2, in <module>')


def test_a_crashing_check_names_the_line_of_the_modified_code(world, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train_ppo, "whiten", None)
    with pytest.raises(TypeError) as caught:
        Cases(world).run("train_ppo")
    finding = code.crash_finding("readings", caught.value)
    assert finding.seen == "The check 'readings' ended with TypeError: 'NoneType' object is not callable"
    lines = (ROOT / "train_ppo.py").read_text().splitlines()
    number = next(n for n, line in enumerate(lines, start=1) if "whiten(advantages" in line)
    assert finding.where == f"train_ppo.py:{number} (main)"


def test_a_check_of_a_missing_function_does_not_apply(monkeypatch):
    monkeypatch.delattr(train_ppo, "read_logprobs")
    with pytest.raises(CannotCheckError, match="train_ppo.py doesn't use `read_logprobs`"):
        replaced_logprobs("train_ppo", lambda batch, logprobs, ref_logprobs: (logprobs, ref_logprobs))


def test_findings_with_the_same_name_are_merged():
    other, again = replace(FINDING, seen="B."), replace(FINDING, name="w")
    merged = code.merge_by_name([FINDING, FINDING, again, other, replace(FINDING, seen="C.")])
    assert merged == [replace(FINDING, seen="A y. 2 more like this."), again]


def test_a_check_of_a_removed_setting_does_not_apply(world):
    with pytest.raises(CannotCheckError, match="train_grpo.py has no setting lower_clip"):
        Cases(world).run("train_grpo", lower_clip=0.2)


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_directory_without_scripts_is_refused(name, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=f"--scripts .*{name}"):
        code.examine(tmp_path / name)


@pytest.mark.parametrize("findings", [[], [FINDING]])
def test_the_exit_status_is_1_with_findings(findings, monkeypatch, capsys):
    monkeypatch.setattr(code, "examine", lambda scripts, flags: (findings, ["processes: --processes needs Linux"]))
    with pytest.raises(SystemExit) as stopped:
        main(Args(command=Code()))
    out = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == len(findings)
    expected = "x: A y. B. Look at z. See docs/troubleshooting.md." if findings else "no findings"
    assert out == f"not checked: processes: --processes needs Linux {expected}"


def test_the_finding_nearest_to_the_input_comes_first(capsys):
    far, near, between = (replace(FINDING, name=name) for name in ("score-flat", "padding", "returns"))
    ordered = nearest_first([far, near, between])
    assert ordered == [near, between, far]
    assert report(ordered) == 1
    words = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line]
    assert words == ["padding", "these may follow", "returns", "score-flat"]


def test_a_single_finding_has_no_heading_for_others(capsys):
    report([replace(FINDING, name="padding")])
    assert "follow" not in capsys.readouterr().out


def test_every_finding_has_a_position_in_the_order():
    sources = [path for package in ("doctor", "rules") for path in (ROOT / "nanorlhf" / package).glob("*.py")]
    named = {name for path in sources for name in re.findall(r'\bname="([a-z0-9-]+)"', path.read_text())}
    assert named == set(ORDER) and len(ORDER) == len(named)


# -------------------------------------------------------------------------------------------------------- user's flags
def test_scripts_get_the_flags_they_have_and_checks_override_them(world):
    cases = Cases(world, flags=("--kl-coef", "0.3", "--adam.eps=1e-6", "--loss", "ipo", "--whiten-rewards"))
    cases.check_flags()
    ppo = cases.settings("train_ppo")
    assert (ppo.kl_coef, ppo.adam.eps, ppo.whiten_rewards) == (0.3, 1e-6, True)
    assert cases.settings("train_ppo", kl_coef=0.5).kl_coef == 0.5
    assert cases.settings("train_dpo").loss == "ipo" and cases.settings("train_sft").adam.eps == 1e-6
    assert cases.accepted_words("train_rlcf") == ["--kl-coef", "0.3", "--adam.eps=1e-6"]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (("--reward-scale", "2"), "no training script has the flag --reward-scale."),
        (("2",), "expected a flag after --, got '2'."),
        (("--out", "runs"), "unsupported flag --out: the doctor sets it itself."),
        (("--kl-coef", "much"), "train_ppo.py: "),
        (("--kl-coef", "-1"), "--kl-coef -1.0: must be at least 0"),
        (("--kl-coef",), "train_ppo.py: "),
    ],
)
def test_an_unknown_flag_is_an_error(flags, sentence, world):
    with pytest.raises(InputError, match=re.escape(sentence)) as refused:
        Cases(world, flags=flags).check_flags()
    assert "\n" not in str(refused.value)


def test_a_branch_behind_a_users_flag_is_examined(world, monkeypatch):
    source = (ROOT / "train_ppo.py").read_text()
    for old, new in (
        ("    lam: cli.Fraction = 0.95\n", "    lam: cli.Fraction = 0.95\n    twice: bool = False\n"),
        ("rewards = -beta.value * kl\n", "rewards = -beta.value * kl * (2 if args.twice else 1)\n"),
    ):
        assert source.count(old) == 1
        source = source.replace(old, new)
    changed = types.ModuleType("train_ppo")
    changed.__file__ = str(ROOT / "train_ppo.py")
    monkeypatch.setitem(importlib.sys.modules, "train_ppo", changed)
    exec(compile(source, changed.__file__, "exec"), changed.__dict__)  # noqa: S102
    assert [*map(str, CHECKS["kl_penalty"](Cases(world)))] == []
    cases = Cases(world, flags=("--twice",))
    cases.check_flags()
    assert [finding.name for finding in CHECKS["kl_penalty"](cases)] == ["kl-penalty"]


def test_an_input_error_in_a_process_is_raised(monkeypatch):
    refused = json.dumps({"error": "no training script has the flag --nowhere."})
    process = types.SimpleNamespace(communicate=lambda: (f"{refused}\n", ""), returncode=0)
    monkeypatch.setattr(code, "start_checks", lambda tree, world, modules, flags: process)
    with pytest.raises(InputError, match="no training script has the flag --nowhere"):
        code.examine(ROOT, ("--nowhere",))
