"""Fixtures for RLCF tests: a policy that nearly solves a few problems, a discriminator, and one PPO update."""

import json
import subprocess
import zipfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

import train_rlcf
import train_sft
from data import codenet, programs
from nanorlhf.dataset import load_programs, write_jsonl
from nanorlhf.rlcf import train_baselines, train_discriminator
from nanorlhf.rlcf.compilers import PythonCompiler
from nanorlhf.rlcf.discriminator import load_discriminator, save_discriminator
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import update_metrics
from tests.helpers.shared_directories import made_once

T = 28


class Spy:
    """Wrap a function in all given modules that have it, and record each call's arguments and result."""

    def __init__(self, monkeypatch, name, *modules):
        self.calls, owners = [], [module for module in modules if hasattr(module, name)]
        self.function = getattr(owners[0], name)
        for module in owners:
            monkeypatch.setattr(module, name, self)

    def __call__(self, *args, **kwargs):
        result = self.function(*args, **kwargs)
        self.calls.append((args, result))
        return result


@dataclass(frozen=True)
class RLCF:
    root: Path
    discriminator: train_discriminator.Args
    ppo: train_rlcf.Args
    baseline: train_baselines.Args


@pytest.fixture(scope="session")
def rlcf(tmp_path_factory) -> RLCF:
    return make_rlcf(made_once(tmp_path_factory, "rlcf", make_rlcf), train=False)


def make_rlcf(root: Path, train: bool = True) -> RLCF:
    """A policy that has nearly learnt the programs for a few problems, so that some of its samples pass.

    In the data of the later stages, human programs end with a remark, and the policy's programs don't.
    """
    lengths = {"max_query_length": 84, "max_response_length": T}
    common = {"data": root / "data", "device": "cpu"}
    sft = replace(
        train_sft.RECIPES["tiny"][1],
        **common, **lengths, out=root / "sft", rows="code", n_layer=1, d_model=32, n_head=2, batch_size=12, lr=1e-2,
        warmup_steps=5, num_epochs=35.0, num_samples=1, eval_every=1000,
    )  # fmt: skip
    common = {"data": root / "remarked", "device": "cpu", "sft": str(root / "sft"), "max_query_length": 84}
    discriminator = replace(
        train_discriminator.RECIPES["rlcf"][1],
        **common, max_response_length=60, out=root / "discriminator", n_layer=1, d_model=16, n_head=2,
        triplet_batch_size=4, micro_batch_size=4, num_triplet_epochs=1.0, warmup_steps=2, batch_size=4,
        num_pair_epochs=2.0, rollout_batch_size=16, response_length=T, temperature=1.0, lr=1e-3, triplet_lr=5e-4,
    )  # fmt: skip
    ppo = replace(
        train_rlcf.RECIPES["rlcf"][1],
        **common, out=root / "ppo", discriminator=str(root / "opinionated"), response_length=T, total_episodes=16,
        batch_size=16, micro_batch_size=8, num_ppo_epochs=2, lr=3e-4,
    )  # fmt: skip
    baseline = replace(
        train_baselines.RECIPES["bipolar_ramp"][1],
        **common, out=root / "baseline", response_length=T, total_episodes=16, batch_size=16, micro_batch_size=8,
        lr=3e-4,
    )  # fmt: skip
    if train:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(programs, "MADE_UP_NAMES", 0.0)  # too hard for a policy this small
            programs.main(
                programs.Args(
                    out=root / "programs", language="python", num_problems=24, num_solutions=3, num_bench=(1, 1, 1),
                    seed=2,
                )
            )  # fmt: skip
        codenet.main(
            codenet.Args(
                source=root / "programs/sources", out=root / "data", language="python", cuts=2, validation_share=0.25,
                vocab_size=400, **lengths,
            )
        )  # fmt: skip
        train_sft.main(sft)
        (root / "remarked").mkdir()
        for split in ("train", "validation"):
            rows = read_rows(root / f"data/code.{split}.jsonl")
            rows = [row | {"response": row["response"] + "  # by hand"} for row in rows]
            write_jsonl(root / f"remarked/code.{split}.jsonl", rows)
        train_discriminator.main(discriminator)
        opinionated(root)
    return RLCF(root, discriminator, ppo, baseline)


def opinionated(root: Path) -> None:
    """Copy the discriminator, scaled so that D isn't close to 0 everywhere as after a few steps."""
    model = load_discriminator(root / "discriminator")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_discriminator(model, root / "opinionated")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.open()]


def whole_programs(records: list[dict], texts: list[str]) -> list[str]:
    return [record["prefix"] + text + record["suffix"] for record, text in zip(records, texts, strict=True)]


@dataclass
class Rollout:
    """Results of a run with one update, and the expected results."""

    rows: list[dict]
    sampled: torch.Tensor  # (B, T)
    response: torch.Tensor  # (B, T) in the update
    scores: list[float]
    rewards: torch.Tensor  # (B, T)
    values: torch.Tensor  # (B, T)
    metrics: dict
    texts: list[str]  # complete
    passes: list[bool]  # the compiler's result for the whole program
    ends: list[int]  # the token to blame if it fails, else the last token
    eos_id: int
    pad_id: int


@pytest.fixture(scope="session")
def usual_update(rlcf) -> Rollout:
    """Run one PPO update with unchanged settings, for tests that only read its results."""
    return update_once(rlcf)


@pytest.fixture
def one_update(rlcf):
    """Run one update with changed settings, and recompute its rollout independently."""
    return partial(update_once, rlcf)


def update_once(rlcf: RLCF, program=train_rlcf, **changes) -> Rollout:
    names = ("generate", "gae", "batch_indices", "rollout_metrics")
    is_rlcf = program is train_rlcf
    with pytest.MonkeyPatch.context() as patch:
        names = names if is_rlcf else [name for name in names if name != "gae"]
        spies = {name: Spy(patch, name, program, *([update_metrics] if is_rlcf else [])) for name in names}
        args = replace(rlcf.ppo if is_rlcf else rlcf.baseline, overwrite=True, **changes)
        program.main(args)
    tokenizer = load_tokenizer(args.sft)
    data = load_programs(args.data / "code.train.jsonl", tokenizer, None, None)
    (_, indices), *_ = spies["batch_indices"].calls
    rows = [data[i].record for i in indices]
    order = sorted(range(len(rows)), key=lambda i: len(data[indices[i]].query))  # the order of sampling
    # the first call per row; CodeRL's greedy responses come later
    sampled = torch.cat([call[1][0] for call in spies["generate"].calls])[: len(rows)]
    sampled = sampled[torch.tensor(order).argsort()]
    ids = [row[: row.index(tokenizer.eos_id)] if tokenizer.eos_id in row else row for row in sampled.tolist()]
    texts = [tokenizer.decode(row) for row in ids]
    with PythonCompiler() as compiler:
        results = compiler.check(whole_programs(rows, texts))
    passes, ends = [], []
    for record, row, text, diagnostics, sampled_ids in zip(rows, ids, texts, results, sampled.tolist(), strict=True):
        first, last = len(record["prefix"]), len(record["prefix"]) + len(text)
        counted = [d for d in diagnostics if d.kind == "error" or is_rlcf]  # RLCF's own check: unused variables
        errors_within = [d.last for d in counted if first <= d.last < last]
        all_errors = [d.last for d in diagnostics if d.kind == "error"]
        passes.append(not errors_within and not all_errors)
        lengths = [len(tokenizer.decode(row[: n + 1])) for n in range(len(row))]  # cumulative, in characters
        if errors_within:
            ends.append(next(n for n, length in enumerate(lengths) if length > errors_within[0] - first))
        elif all_errors:
            ends.append(max(len(row) - 1, 0))
        else:
            ends.append(sum(i != tokenizer.pad_id for i in sampled_ids) - 1)
    ((batch, scores, *_), _), *_ = spies["rollout_metrics"].calls
    rewards = values = None
    if is_rlcf:
        ((rewards, values, *_), _), *_ = spies["gae"].calls
    return Rollout(
        rows, sampled, batch.response, scores.tolist(), rewards, values,
        read_rows(args.out / "metrics.jsonl")[0], texts, passes, ends, tokenizer.eos_id, tokenizer.pad_id,
    )  # fmt: skip


# A fake ErrorProne: reports variables called `wrong` and crashes at those called `fatal`
PLUGIN = """
import com.sun.source.tree.*;
import com.sun.source.util.*;
import com.sun.tools.javac.api.BasicJavacTask;
import com.sun.tools.javac.util.Log;
import javax.tools.Diagnostic;

public class ErrorProne implements Plugin {
    static int count = 0;
    public String getName() { return "ErrorProne"; }
    public void init(JavacTask task, String... options) {
        if (!String.join(" ", options).equals("-XepDisableAllWarnings")) throw new IllegalArgumentException();
        Log.instance(((BasicJavacTask) task).getContext());
        task.addTaskListener(new TaskListener() {
            public void finished(TaskEvent event) {
                if (event.getKind() != TaskEvent.Kind.ANALYZE) return;
                new TreePathScanner<Void, Void>() {
                    @Override public Void visitVariable(VariableTree tree, Void nothing) {
                        if (tree.getName().contentEquals("wrong")) {
                            Trees.instance(task).printMessage(
                                Diagnostic.Kind.ERROR, "[Wrong] " + ++count, tree, event.getCompilationUnit());
                        }
                        if (tree.getName().contentEquals("fatal")) throw new NullPointerException("dear me");
                        return super.visitVariable(tree, nothing);
                    }
                }.scan(Trees.instance(task).getPath(event.getTypeElement()), null);
            }
        });
    }
}
"""


@pytest.fixture(scope="session")
def plugin(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("plugin")
    (directory / "ErrorProne.java").write_text(PLUGIN)
    exports = [f"--add-exports=jdk.compiler/com.sun.tools.javac.{p}=ALL-UNNAMED" for p in ("api", "util")]
    subprocess.run(["javac", *exports, "-d", directory, directory / "ErrorProne.java"], check=True)
    with zipfile.ZipFile(directory / "plugin.jar", "w") as jar:
        for path in directory.glob("*.class"):
            jar.write(path, path.name)
        jar.writestr("META-INF/services/com.sun.source.util.Plugin", "ErrorProne\n")
    return directory / "plugin.jar"
