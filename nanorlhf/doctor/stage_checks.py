"""Invariants of the other stages: SFT, reward model, DPO, RLCF and the evaluation."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanorlhf import dpo
from nanorlhf.checkpoint import load_gpt, load_scalar, scalar_from_gpt
from nanorlhf.dataset import load_comparisons, load_demonstrations
from nanorlhf.doctor.cases import B, CannotCheckError, Cases, differ, unbatched_outputs
from nanorlhf.doctor.rollout_checks import usual_run
from nanorlhf.doctor.supervised_losses import imitation_loss, preference_loss, score_loss
from nanorlhf.doctor.update_checks import scaled_pairs
from nanorlhf.doctor.watch import Watched, replaced, script, silent
from nanorlhf.rules.finding import Finding


def supervised_gradients(cases: Cases) -> Iterator[Finding]:
    """Check the gradient of each loss against its formula, with each text processed by itself.

    This checks the second step, because all margins of DPO are 0 before the first.
    """
    pairs = ("sigmoid", "ipo", "robust", "hinge", "kto", "orpo", "simpo")
    runs: list[tuple[str, dict[str, Any]]] = [
        *(("train_sft", {"loss_on": loss_on}) for loss_on in ("response", "all")),
        *(("train_rm", {"loss": loss}) for loss in ("contrastive", "regression")),
        *(("train_dpo", {"loss": loss}) for loss in pairs),
    ]
    for name, settings in runs:
        changes: dict[str, Any] = {"max_grad_norm": None, "decay_vectors": True} | settings
        if name == "train_dpo":
            if not hasattr(dpo, "Labels"):
                raise CannotCheckError("nanorlhf/dpo.py has no `Labels`")
            changes |= {"beta": 0.5, "labels": dpo.Labels(smoothing=0.2 if settings["loss"] == "robust" else 0.0)}
        run = cases.run(name, stop_at=2, **changes)
        what = f"{name}.py --{next(iter(settings)).replace('_', '-')} {next(iter(settings.values()))}"
        if len(run.batches) < 2 or len(run.parameters) < 2:
            raise CannotCheckError(f"{name}.py doesn't use `backward`")
        model: Any = load_gpt(str(cases.world.root / "sft"))
        reference = load_gpt(str(cases.world.root / "sft"))
        if name == "train_rm":
            model = scalar_from_gpt(model)
        elif name == "train_dpo":
            for policy in (model, reference):
                policy.forbid(cases.world.tokenizer.pad_id, cases.world.tokenizer.vocab_size)
        parameters = [*model.parameters()]
        if [p.shape for p in parameters] != [p.shape for p in run.parameters[1]]:
            raise CannotCheckError(f"the optimizer of {name}.py has other parameters than the model")
        with torch.no_grad():
            for parameter, value in zip(parameters, run.parameters[1], strict=True):
                parameter.copy_(value)
        if name == "train_dpo":
            loss = preference_loss(model, reference, run.batches[1], cases.settings(name, **changes))
        elif name == "train_rm":
            loss = score_loss(model, run.batches[1], settings["loss"])
        else:
            loss = imitation_loss(model, run.batches[1], settings["loss_on"])
        expected = list(torch.autograd.grad(loss, parameters, allow_unused=True))
        if any(differ(a, b, 1e-2) for a, b in scaled_pairs(run.gradients[1], expected)):
            yield Finding(
                name="supervised-gradient",
                seen=f"In the second step of {what}, the gradient differs from the formula's on the same examples, "
                "processed one by one.",
                means="A term of the loss is detached, missing or counted twice, or has a wrong sign or scale, or the "
                "reference is not the initial policy.",
                where=f"{name}.py, the loss",
            )


def reward_model(cases: Cases) -> Iterator[Finding]:
    """Check that demonstrations score 0 on average, and that ties don't count as correct."""
    tokenizer = cases.world.tokenizer
    run = cases.run("train_rm")
    model = load_scalar(str(run.out))
    rows = load_demonstrations(cases.world.data / "sft.train.jsonl", tokenizer, None, None)
    mean = sum(unbatched_outputs(model, row.query + row.response)[-1].item() for row in rows) / len(rows)
    if not abs(mean) < 1e-3:
        yield Finding(
            name="normalisation",
            seen=f"After normalisation the demonstrations score {mean:.3g} on average instead of 0.",
            means="The bias is not saved, not subtracted, or computed from other responses or positions.",
            where="train_rm.py (normalise)",
        )
    with torch.no_grad():
        model.score.weight.zero_()
        pairs = load_comparisons(cases.world.data / "comparisons.validation.jsonl", tokenizer, None, None)
        _, right, *_ = script("train_rm").contrastive_loss(model, list(pairs), tokenizer.pad_id)
    if right.item():
        yield Finding(
            name="ties",
            seen=f"A reward model that gives every response the same score ranks {right.item() / len(pairs):.0%} of "
            "the pairs correctly.",
            means="Ties count as correct.",
            where="train_rm.py (contrastive_loss)",
        )


def reference_point(cases: Cases) -> Iterator[Finding]:
    """Check that KTO has one reference point for the whole batch, whatever the size of a micro-batch.

    The reference point is 0 before the first step, and whenever the policy makes unrelated responses less likely; an
    error doesn't show then. With weight 0 on undesirable responses, all responses in this world become more likely,
    and it is above 0 from the second step on.
    """
    if not hasattr(dpo, "Labels"):
        raise CannotCheckError("nanorlhf/dpo.py has no `Labels` with KTO's weights")
    labels = dpo.Labels(undesirable_weight=0.0)
    single, split = (
        cases.run("train_dpo", loss="kto", labels=labels, beta=1.0, lr=1e-2, micro_batch_size=size) for size in (B, 3)
    )
    if not any(row.get("reference_point", 1.0) > 0 for row in single.metrics):
        raise CannotCheckError("KTO's reference point is 0 in every step")
    steps = zip(single.gradients, split.gradients, strict=True)
    if any(differ(a, b, 1e-2) for x, y in steps for a, b in scaled_pairs(x, y)):
        yield Finding(
            name="reference-point",
            seen="With --loss kto the gradient changes with --micro-batch-size.",
            means="The reference point is estimated from a micro-batch or a rank: estimate it from the whole batch, "
            "before splitting.",
            where="train_dpo.py (reference_point, and the loop)",
        )


def cut_programs(cases: Cases) -> Iterator[Finding]:
    """Check that RLCF doesn't train on tokens after the compiler's error token."""
    module = script("train_rlcf")
    if not hasattr(module, "check_responses"):
        raise CannotCheckError("train_rlcf.py doesn't use `check_responses`")
    calls: list[tuple[Tensor, Any]] = []  # responses (B, T), and their results

    def listened(function: Callable) -> Callable:
        def check(records: list[dict], response: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append((response, function(records, response, *args, **kwargs)))
            return calls[-1][1]

        return check

    run = cases.run("train_rlcf", patches=partial(replaced, module, "check_responses", listened))
    response, checked = calls[0]
    lengths = (response != cases.world.tokenizer.pad_id).sum(1)  # (B,)
    expected = torch.where(checked.passes, lengths, torch.minimum(checked.error_index + 1, lengths)).sort().values
    trained = run.micro_batches[0].actions.sum(1).sort().values
    if not (lengths.sort().values > expected).any():
        raise CannotCheckError("no program has tokens after its first error")
    if not torch.equal(trained, expected):
        yield Finding(
            name="cut-programs",
            seen=f"According to the compiler, the programs of a rollout end after {expected.tolist()} tokens, but "
            f"{trained.tolist()} tokens are trained on.",
            means="The truncated response is discarded and the full one is used.",
            where="train_rlcf.py (2.4)",
        )


def held_out(cases: Cases) -> Iterator[Finding]:
    """Check that training uses no validation examples, and evaluation no training examples."""
    root = cases.world.root
    queries = {
        split: {row.record["query"] for row in load_demonstrations(
            cases.world.data / f"sft.{split}.jsonl", cases.world.tokenizer, None, None)}
        for split in ("train", "validation")
    }  # fmt: skip
    trained = {query for _, about in usual_run(cases).traces() for query in about["queries"]}
    if trained - queries["train"]:
        yield Finding(
            name="held-out",
            seen="PPO sampled responses to a query that is not in the training file.",
            means="It trains on examples that are reserved for evaluation.",
            where="train_ppo.py (1)",
        )
    module, out = script("eval"), root / "runs" / "eval"
    settings = replace(
        next(iter(module.RECIPES.values()))[1], data=cases.world.data, policies=("sft", str(root / "sft")),
        reward_model=str(root / "rm"), out=out, num_queries=4, max_query_length=40, response_length=8,
        max_response_length=16, gold=None, device="cpu", seed=1,
    )  # fmt: skip
    with silent():
        module.main(settings)
    read = {row["query"] for row in Watched(out).samples}
    if not read:
        raise CannotCheckError("the evaluation wrote no samples")
    if read - queries["validation"]:
        yield Finding(
            name="held-out",
            seen=f"{len(read - queries['validation'])} of {len(read)} queries of the evaluation are not in the "
            "validation file.",
            means="The evaluation measures memorisation.",
            where="nanorlhf/evals/summaries.py",
        )


CHECKS = (supervised_gradients, reward_model, reference_point, cut_programs, held_out)
