"""Invariants of the update of any policy-gradient method: ratios, clipping, denominators, and gradients."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanorlhf.checkpoint import save
from nanorlhf.doctor import seven
from nanorlhf.doctor.cases import B, CannotCheckError, Cases, differ, replaced_logprobs, unpadded
from nanorlhf.doctor.rollout_checks import PPO, usual_run
from nanorlhf.doctor.watch import Slopes, Watched, replaced
from nanorlhf.doctor.world import small_config
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.rules.finding import Finding
from nanorlhf.rules.formulas import IS_CLIPPED, Numbers, evaluate
from nanorlhf.training.settings import SamplerSettings

UNBIASED = ("dr_grpo", "maxrl", "rloo", "reinforce++", "cispo")
"""algorithms with the gradient of the expected score, up to a factor, if all responses are to one query"""
RATIOS = (1.0, 3.0, 0.3, 200.0)
DR_GRPO: dict[str, Any] = {"algorithm": "dr_grpo", "reward_model": None, "num_epochs": 1}


def algorithms(cases: Cases) -> dict[str, dict[str, Any]]:
    """Return the algorithms of train_grpo.py with the settings that they require."""
    no_kl: dict[str, Any] = {"kl_coef": 0.0}
    positive: dict[str, Any] = {
        "reward_model": None, "reward": cases.world.rule("higher"), "missing_eos_score": None
    }  # fmt: skip
    return {
        **{"grpo": {}, "dr_grpo": {}, "maxrl": no_kl | positive, "rloo": {}, "reinforce++": {}},
        **{"gspo": {}, "dapo": no_kl, "cispo": no_kl, "online_dpo": {"num_epochs": 1}},
    }


def first_ratio(cases: Cases) -> Iterator[Finding]:
    """Check that policy and rollout agree on every token before the first step."""
    filtered: dict[str, Any] = {"sampler": SamplerSettings(top_p=0.8), "micro_batch_size": 2}  # reads of few responses
    runs = {
        "train_ppo.py": usual_run(cases),
        "train_grpo.py": cases.run("train_grpo", algorithm="grpo"),
        "train_grpo.py --sampler.top-p 0.8": cases.run("train_grpo", **filtered),
    }
    for name, run in runs.items():
        tensors, _ = run.traces()[0]
        old = {
            tuple(query + response): tensors["logprobs"][row, : len(response)]
            for row, (query, response) in enumerate(unpadded(tensors, cases.world.tokenizer.pad_id))
        }
        first, *_ = run.micro_batches
        gap = 0.0
        for ids, mask, new in zip(first.ids, first.actions, first.logprobs, strict=True):
            gap = max(gap, (new[mask].double() - old[ids]).abs().max().item())
        if not gap < 1e-3:
            yield Finding(
                name="first-ratio",
                seen=f"Before the first step, log-probabilities in {name} are up to {gap:.2g} nats off the rollout's.",
                means="Rollout and update evaluate the policy differently: temperature, dropout, padding or masks. "
                "Every ratio is wrong.",
                where=f"{name.partition(' ')[0]}, the two calls that evaluate the policy",
            )
        logged = run.metrics[0].get("policy/first_ratio_error", 0.0)
        if gap < 1e-3 < logged:
            yield Finding(
                name="first-ratio",
                seen=f"{name} logs a first ratio error of {logged:.2g}, but the ratios are 1.",
                means="The metric covers other tokens than the loss, or the ratio is taken to the sampler, which has "
                "renormalised its filtered probabilities.",
                where="nanorlhf/training/update_metrics.py, and Sampler.correct in nanorlhf/training/sampler.py",
            )
    one_epoch = cases.run("train_ppo", **PPO, reward=cases.world.rule("score"), kl_coef=0.0).metrics[0]
    for name, expected in (("policy/ratio", 1.0), ("policy/approx_kl", 0.0)):
        if name in one_epoch and abs(one_epoch[name] - expected) > 1e-3:
            yield Finding(
                name="statistics",
                seen=f"{name} is logged as {one_epoch[name]:.4g} over one epoch of one step, but every ratio is 1.",
                means="The sum includes padding, or has the wrong denominator.",
                where="nanorlhf/training/update_metrics.py",
            )


def slopes_by_row(run: Watched, pad_id: int) -> list[tuple[int, Tensor, Tensor]]:
    """Return row, advantages (t,) and slopes (t,) of each response in the first epoch, except for duplicates."""
    tensors, _ = run.traces()[0]
    texts = [tuple(query + response) for query, response in unpadded(tensors, pad_id)]
    num_rows = num_micro_batches = 0
    for micro_batch in run.micro_batches:
        if num_rows < len(texts):
            num_rows, num_micro_batches = num_rows + len(micro_batch.ids), num_micro_batches + 1
    slopes = run.token_slopes(num_micro_batches)
    rows = []
    for row, ids in enumerate(texts):
        if texts.count(ids) == 1:
            advantages = tensors["advantages"][row][tensors["actions"][row]]
            rows.append((row, advantages, slopes.get(ids, torch.zeros_like(advantages))))
    return rows


def slopes(cases: Cases) -> Iterator[Finding]:
    """Check that the first step's slopes have the sign of the advantages, and that padding has none."""
    runs = {"train_ppo.py": usual_run(cases)}
    for algorithm, settings in algorithms(cases).items():
        runs[f"train_grpo.py --algorithm {algorithm}"] = cases.run("train_grpo", algorithm=algorithm, **settings)
    for name, run in runs.items():
        first, *_ = run.micro_batches
        if first.slopes is None:
            raise CannotCheckError(f"no gradient reaches the log-probabilities in {name}")
        if first.slopes[~first.actions].abs().max() > 0 or not first.slopes.isfinite().all():
            yield Finding(
                name="slopes",
                seen=f"With {name} the loss depends on log-probabilities after the end of a response.",
                means="The mask of the loss is wrong: tokens after EOS must not be trained on.",
                where=f"{name.partition(' ')[0]}, the losses",
            )
            continue
        rows = slopes_by_row(run, cases.world.tokenizer.pad_id)
        weights = [-slope[a.abs() > 1e-4] / a[a.abs() > 1e-4] for _, a, slope in rows]
        all_weights = torch.cat(weights)
        if not (all_weights > 0).all():
            share = (all_weights <= 0).double().mean().item()
            yield Finding(
                name="slopes",
                seen=f"Before the first step of {name}, {share:.0%} of the tokens with an advantage have no gradient "
                "or a gradient with the wrong sign.",
                means="A token that was better than expected must become more likely. EOS may be masked, or the loss "
                "has a wrong sign.",
                where=f"{name.partition(' ')[0]}, the losses, and nanorlhf/ppo.py (eos_masks)",
            )
        elif any(differ(w, w[:1].expand_as(w)) for w in weights if len(w)):
            yield Finding(
                name="slopes",
                seen=f"Before the first step of {name}, the tokens of a response have different weights at the same "
                "advantage.",
                means="All tokens of a response must have the same weight, because its loss is a mean or a sum.",
                where=f"{name.partition(' ')[0]}, the losses",
            )


def gradients(cases: Cases) -> Iterator[Finding]:
    """Check the parameters' gradients against the loss's slopes, backpropagated through one text at a time.

    So any loss must reach the whole policy and the whole value model. This checks the first two steps, since the
    gradient of the first must not be part of the second.
    """
    runs = {
        "train_ppo.py": (usual_run(cases), cases.reward_model()),
        "train_grpo.py": (cases.run("train_grpo", algorithm="grpo"), None),
        "train_rlcf.py": (cases.run("train_rlcf"), None),  # its value model has new weights
    }
    for name, (run, value_model) in runs.items():
        policy, temperature = cases.policy(), cases.settings(name.removesuffix(".py")).temperature
        models: list[tuple[str, Any, list[Slopes], float]] = [("policy", policy, run.micro_batches, temperature)]
        models += [] if value_model is None else [("value model", value_model, run.value_micro_batches, 1.0)]
        for step in range(2):
            part = slice(run.read_before[step - 1] if step else 0, run.read_before[step])
            remaining, before = run.gradients[step], run.parameters[step]
            for kind, model, read, scale in models:
                if not all(x.slopes is not None and x.is_all for x in read[part]) or not read[part]:
                    raise CannotCheckError(f"the loss of {name} doesn't evaluate the {kind} with nanorlhf/logprobs.py")
                parameters = [*model.parameters()]
                actual, remaining = remaining[: len(parameters)], remaining[len(parameters) :]
                values, before = before[: len(parameters)], before[len(parameters) :]
                if [x.shape for x in values] != [x.shape for x in parameters]:
                    raise CannotCheckError(f"the optimizer of {name} has other parameters than the {kind}'s")
                with torch.no_grad():
                    for parameter, value in zip(parameters, values, strict=True):
                        parameter.copy_(value)
                expected = slopes_gradient(model, read[part], run.micro_batches[part], scale)
                if any(differ(x, y, 1e-2) for x, y in scaled_pairs(actual, expected)):
                    yield Finding(
                        name="gradients",
                        seen=f"The gradient of the {kind} in step {step} of {name} is not the loss's slopes "
                        "backpropagated through its outputs.",
                        means="A part of the model is detached, such as all but its head; the gradient of the previous "
                        "step was not cleared; it is scaled, or clipped before all micro-batches are added; or a "
                        "backward pass is wrong.",
                        where=f"{name}, from `zero_grad` to the step, nanorlhf/logprobs.py and kernels/",
                    )
                    return


def slopes_gradient(
    model: GPT | ScalarModel, micro_batches: list[Slopes], policy_batches: list[Slopes], temperature: float = 1.0
) -> list[Tensor | None]:
    """Return each parameter's gradient of the sum of slopes times outputs, processing one text at a time.

    policy_batches: the policy's records of the same micro-batches, which contain the response lengths.
    """
    total = torch.zeros(())
    for micro_batch, policy_batch in zip(micro_batches, policy_batches, strict=True):
        assert micro_batch.slopes is not None
        for ids, mask, slopes, actions in zip(
            micro_batch.ids, micro_batch.actions, micro_batch.slopes, policy_batch.actions, strict=True
        ):
            first, t = len(ids) - int(actions.sum()) - 1, int(mask.sum())
            outputs = model(torch.tensor([ids]))[0, first : first + t]  # starting at the position before the response
            if isinstance(model, GPT):
                logprobs = (model.logits(outputs) / temperature).log_softmax(-1)
                outputs = logprobs[torch.arange(t), torch.tensor(ids[-t:])]
            total = total + (slopes[:t] * outputs).sum()
    return list(torch.autograd.grad(total, [*model.parameters()], allow_unused=True))


def micro_batches(cases: Cases) -> Iterator[Finding]:
    """Check that gradients don't depend on the size of a micro-batch."""
    scripts: dict[str, tuple[str, dict[str, Any]]] = {
        "train_sft.py": ("train_sft", {}),
        "train_sft.py --max-grad-norm 0.1": ("train_sft", {"max_grad_norm": 0.1}),
        "train_rm.py": ("train_rm", {}),
        "train_dpo.py": ("train_dpo", {}),
        "train_dpo.py --loss orpo": ("train_dpo", {"loss": "orpo"}),
        "train_ppo.py": ("train_ppo", {"num_ppo_epochs": 1}),
    }
    for algorithm, settings in algorithms(cases).items():
        changed = {"algorithm": algorithm, "num_epochs": 1} | settings
        scripts[f"train_grpo.py --algorithm {algorithm}"] = ("train_grpo", changed)
    for name, (module, changes) in scripts.items():
        single, split = (cases.run(module, micro_batch_size=size, **changes) for size in (B, 3))
        if not single.gradients or not split.gradients:
            raise CannotCheckError(f"{name} took no optimizer step")
        # also the second step: before the first, all of DPO's margins are 0, and so is any mean of them
        steps = zip(single.gradients[:2], split.gradients[:2], strict=True)
        if any(differ(a, b, 1e-2) for x, y in steps for a, b in scaled_pairs(x, y)):
            yield Finding(
                name="micro-batches",
                seen=f"The gradient of {name} changes with --micro-batch-size.",
                means="A micro-batch is divided by its own number of tokens, or uses statistics of its rows: "
                "divide by the count of the whole minibatch, and compute statistics before splitting.",
                where=f"{name.partition(' ')[0]}, the denominator of each loss",
            )


def scaled_pairs(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair gradients of the same parameters, divided by the largest of all, so that pure rounding error is about 0."""
    numbers = [x.abs().max().item() for x in (*a, *b) if x is not None]
    largest = max(numbers, default=1.0) or 1.0
    for x, y in zip(a, b, strict=True):
        if x is not None or y is not None:
            zero = torch.zeros_like(x if x is not None else y)  # type: ignore[arg-type]
            floor = torch.ones(1)  # so that `differ` compares with the largest
            first, second = (torch.cat(((zero if z is None else z).flatten() / largest, floor)) for z in (x, y))
            yield first, second


def two_models(cases: Cases) -> Iterator[Finding]:
    """Check that the value loss doesn't reach the policy, nor the policy loss the value model."""
    with_values, without = (
        cases.run("train_ppo", num_ppo_epochs=1, value_coef=coefficient) for coefficient in (0.1, 0.0)
    )
    num_policy = len([*cases.policy().parameters()])
    a, b = with_values.gradients[0], without.gradients[0]
    shapes = [p.shape for p in cases.policy().parameters()]
    if [p.shape for p in with_values.parameters[0][:num_policy]] != shapes:
        raise CannotCheckError("the optimizer's first parameters are not the policy's")
    if any(differ(x, y) for x, y in scaled_pairs(a[:num_policy], b[:num_policy])):
        yield Finding(
            name="two-models",
            seen="The policy's gradient changes with --value-coef.",
            means="The value loss reaches the policy, or --value-coef scales the policy loss.",
            where="train_ppo.py (2.6)",
        )
    if any(gradient is not None and gradient.abs().max() > 0 for gradient in b[num_policy:]):
        yield Finding(
            name="two-models",
            seen="With --value-coef 0 the value model still has a gradient.",
            means="The policy loss reaches the value model: the advantages are not detached.",
            where="train_ppo.py (2.5 and 2.6)",
        )
    moved = any(gradient is not None and gradient.abs().max() > 0 for gradient in a[num_policy:])
    if not moved:
        yield Finding(
            name="two-models",
            seen="The value model has no gradient.",
            means="Its parameters are not in the optimizer, or its loss is detached.",
            where="train_ppo.py (2.6)",
        )


def older_policy(batch: Any, logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Change the rollout's log-probabilities to an older policy's: the initial ratios of row i are RATIOS[i % 4]."""
    ratios = torch.tensor(RATIOS).repeat(len(batch) // len(RATIOS))
    return torch.where(batch.actions, logprobs - ratios.log()[:, None], logprobs), ref_logprobs


def clipping(cases: Cases) -> Iterator[Finding]:
    """Check that tokens that moved far in the direction of their advantage have no gradient, and others have one."""
    settings: dict[str, tuple[dict[str, Any], float, float]] = {
        "train_ppo": (PPO | {"clip_range": 0.2}, 0.2, 0.2),
        "train_grpo": (DR_GRPO | {"clip_range": (0.5, 4.0)}, 0.5, 4.0),
    }  # with the clip range below and above 1
    for name, (changes, below, above) in settings.items():
        changes = changes | {"reward": cases.world.rule("score"), "kl_coef": 0.0}
        run = cases.run(name, patches=replaced_logprobs(name, older_policy), **changes)
        wrong: dict[str, int] = {}
        for row, advantages, slopes in slopes_by_row(run, cases.world.tokenizer.pad_id):
            ratio = RATIOS[row % len(RATIOS)]
            with_advantage = advantages.abs() > 1e-3
            numbers: Numbers = {"advantages": advantages, "ratio": ratio, "below": below, "above": above}
            clipped = evaluate(IS_CLIPPED, numbers)
            unclipped = with_advantage & ~clipped & (ratio < 100)  # a dual clip may stop those
            silent = slopes.abs() < 1e-9
            for problem, mask in (
                ("are clipped but have a gradient", with_advantage & clipped & ~silent),
                ("are within the clip range, or move back to it, but have no gradient", unclipped & silent),
                ("have a gradient with the wrong sign", unclipped & (slopes.sign() == advantages.sign()) & ~silent),
            ):
                wrong[problem] = wrong.get(problem, 0) + int(mask.sum())
        for problem, count in wrong.items():
            if count:
                yield Finding(
                    name="clipping",
                    seen=f"With ratios of 1, 3, 0.3 and 200 in the first step of {name}.py, and --clip-range "
                    f"{changes['clip_range']}, {count} tokens {problem}.",
                    means="The loss is max(-A * ratio, -A * clip(ratio)), the ratio is to the rollout's "
                    "log-probabilities, and no token is dropped for a large ratio. If the clip range has two numbers, "
                    "the first is the range below 1.",
                    where=f"nanorlhf/ppo.py (policy_loss, ratio_bounds) and its call in {name}.py",
                )
                break


def alternating_policy(batch: Any, logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Change the rollout's log-probabilities to an older policy's: ratios alternate between 2 and 2/3."""
    return torch.where(batch.actions, logprobs - alternating_log_ratios(logprobs.size(1)), logprobs), ref_logprobs


def alternating_log_ratios(T: int) -> Tensor:
    """Return log 2, log 2/3, log 2, ... (T,), with a mean above log 1.1."""
    return torch.where(torch.arange(T) % 2 == 0, math.log(2), math.log(2 / 3))


def ratio_statistics(cases: Cases) -> Iterator[Finding]:
    """Check that logged ratio and clip fraction refer to what the loss clips: tokens or whole responses."""
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "train_ppo.py": ("train_ppo", PPO),
        "train_grpo.py --algorithm dr_grpo": ("train_grpo", DR_GRPO),
        "train_grpo.py --algorithm gspo": ("train_grpo", DR_GRPO | {"algorithm": "gspo"}),
    }
    for name, (module, changes) in settings.items():
        changes = changes | {"reward": cases.world.rule("score"), "kl_coef": 0.0, "clip_range": 0.1}
        run = cases.run(module, patches=replaced_logprobs(module, alternating_policy), **changes)
        tensors, _ = run.traces()[0]
        token_slopes = run.token_slopes()
        log_ratios, clipped = [], []  # (t,) for each response
        for row, (query, response) in enumerate(unpadded(tensors, cases.world.tokenizer.pad_id)):
            if tuple(query + response) not in token_slopes:
                raise CannotCheckError(f"{name} excludes a response from its loss")
            actions = tensors["actions"][row]
            advantages, slopes = tensors["advantages"][row][actions], token_slopes[tuple(query + response)]
            log_ratios.append(alternating_log_ratios(len(actions))[actions])
            clipped.append((slopes.abs() < 1e-9) & (advantages.abs() > 1e-3))
        if not torch.cat(clipped).any():
            continue  # the script doesn't clip
        if any(x.any() != x.all() for x in clipped):
            unit, ratio, share = "tokens", torch.cat(log_ratios).exp().mean(), torch.cat(clipped).double().mean()
        else:
            unit, ratio = "responses", torch.stack([x.mean() for x in log_ratios]).exp().mean()
            share = torch.stack([x.any() for x in clipped]).double().mean()
        for metric, expected in (("policy/ratio", ratio.item()), ("policy/clip_fraction", share.item())):
            logged = run.metrics[0].get(metric)
            if logged is not None and abs(logged - expected) > 1e-3:
                yield Finding(
                    name="statistics",
                    seen=f"The loss of {name} clips the ratios of {unit}, but {metric} is logged as {logged:.3g} "
                    f"instead of {expected:.3g}, its value over {unit}.",
                    means="The metric doesn't describe the ratios that the loss clips.",
                    where=f"{name.partition(' ')[0]} and nanorlhf/training/update_metrics.py (UpdateStatistics)",
                )
                break


def baselines(cases: Cases) -> Iterator[Finding]:
    """Check that equal scores give a gradient of 0, and that doubled scores give equal or doubled advantages."""
    for algorithm in algorithms(cases):
        if algorithm in ("reinforce++", "dapo"):
            continue  # the baseline is the batch's; rewards depend on length
        settings: dict[str, Any] = {
            "algorithm": algorithm, "reward_model": None, "num_epochs": 1, "missing_eos_score": None,
            "kl_coef": 0.1 if algorithm == "online_dpo" else 0.0,
        }  # fmt: skip
        constant = cases.run("train_grpo", reward=cases.world.rule("constant"), **settings)
        steps = constant.gradients[:1]  # none if groups with equal scores are dropped
        largest = max((g.abs().max().item() for step in steps for g in step if g is not None), default=0.0)
        if largest > 1e-6:
            yield Finding(
                name="baseline",
                seen=f"With --algorithm {algorithm} and the same score for every response the gradient is up to "
                f"{largest:.2g} instead of 0.",
                means="The baseline is not from the response's query, or something other than the score is rewarded.",
                where="nanorlhf/grpo.py (1, advantages)",
            )
        once, twice = (
            cases.run("train_grpo", reward=cases.world.rule(rule), **settings).traces()[0][0]
            for rule in ("higher", "double")
        )
        a, b = (x["advantages"][x["actions"]] for x in (once, twice))
        if a.abs().max() == 0:
            raise CannotCheckError(f"all advantages of {algorithm} are 0")
        if differ(b, a) and differ(b, 2 * a):
            yield Finding(
                name="baseline",
                seen=f"With --algorithm {algorithm} doubling the scores neither preserves nor doubles the advantages.",
                means="Advantages must be linear in the scores, possibly divided by their mean or standard deviation.",
                where="nanorlhf/grpo.py (1, advantages)",
            )


# ----------------------------------------------------------------------------------------- the world of seven responses
def seven_tokens(cases: Cases) -> tuple[int, int, int]:
    """Return the three tokens of the policy with seven responses: EOS and two letters."""
    (a,), (b,) = (cases.world.tokenizer.encode(letter) for letter in "xy")
    return cases.world.tokenizer.eos_id, a, b


def seven_policy(cases: Cases) -> GPT:
    """Return a policy with probabilities 1/2 of EOS and 1/4 each of x and y at every position."""
    config = replace(small_config(cases.world.tokenizer.vocab_size), n_layer=1)
    torch.manual_seed(0)
    policy = GPT(config)
    with torch.no_grad():
        policy.get_parameter("transformer.norm.weight").zero_()  # a constant hidden state, (1, 0, ..., 0)
        policy.get_parameter("transformer.norm.bias").copy_(torch.eye(config.d_model)[0])
        policy.lm_head.weight.zero_()
        policy.lm_head.weight[:, 0] = -80.0
        for token, probability in zip(seven_tokens(cases), (1 / 2, 1 / 4, 1 / 4), strict=True):
            policy.lm_head.weight[token, 0] = math.log(probability)
    return policy


RULE_OF_SEVEN = f"""def score(queries, responses):
    return [{dict(zip(seven.TEXTS, seven.SCORES.tolist(), strict=True))}.get(text.strip(), 0.0) for text in responses]


def higher(queries, responses):  # at least 0; the expected score has the same gradient
    return [number + 2.0 for number in score(queries, responses)]
"""


def proportional_rand(rand: Callable) -> Callable:
    """Return a torch.rand that for 16 rows of two tokens samples each response in proportion to its probability."""
    table = torch.tensor([[first, second] for first in (0.1, 0.3, 0.6, 0.9) for second in (0.1, 0.3, 0.6, 0.9)])

    def in_proportion(*size: Any, **kwargs: Any) -> Tensor:
        shape = tuple(size[0]) if size and isinstance(size[0], tuple | list | torch.Size) else size
        return table.to(kwargs.get("dtype", torch.float32)) if shape == (B, 2) else rand(*size, **kwargs)

    return in_proportion


def seven_responses(cases: Cases) -> Iterator[Finding]:
    """Check the gradient in a world of seven responses against the expected score's, computed by enumeration."""
    root = cases.world.root / "seven"
    if not root.exists():
        root.mkdir()
        save(seven_policy(cases), root / "sft", cases.world.tokenizer)
        (root / "rule.py").write_text(RULE_OF_SEVEN)
    eos, x, y = seven_tokens(cases)
    logits = torch.tensor([1 / 2, 1 / 4, 1 / 4], dtype=torch.float64).log()
    exact = -(seven.probabilities(logits) @ seven.reinforce(logits))  # of minus the expected score

    common: dict[str, Any] = {
        "sft": str(root / "sft"), "reward_model": None, "response_length": 2, "temperature": 1.0,
        "missing_eos_score": None, "kl_coef": 0.0,
    }  # fmt: skip
    runs = {
        "train_ppo.py": ("train_ppo", common | {"lam": 1.0, "gamma": 1.0, "num_ppo_epochs": 1}),
    } | {
        f"train_grpo.py --algorithm {name}": (
            "train_grpo", common | {"algorithm": name, "samples_per_query": 16, "num_epochs": 1}
        )
        for name in UNBIASED  # GRPO's and GSPO's mean over a response's tokens favours short responses
    }  # fmt: skip
    for name, (module, settings) in runs.items():
        patches = partial(replaced, torch, "rand", proportional_rand)
        rule = f"{root / 'rule.py'}:{'higher' if settings.get('algorithm') == 'maxrl' else 'score'}"
        run = cases.run(module, patches=patches, reward=rule, **settings)
        texts = sorted(len(row) for _, row in unpadded(run.traces()[0][0], cases.world.tokenizer.pad_id))
        if texts != [1] * 8 + [2] * 8:
            raise CannotCheckError(f"{name} doesn't sample with torch.rand((B, T))")
        gradient = head_gradient(run, cases.world.tokenizer.vocab_size)
        estimate = gradient[torch.tensor([eos, x, y]), 0].double()
        cosine = torch.nn.functional.cosine_similarity(estimate, exact, dim=0).item()
        if not cosine > 0.999:
            yield Finding(
                name="exact-gradient",
                seen=f"In a world of seven responses, each sampled in proportion to its probability, the gradient of "
                f"{name} has cosine similarity {cosine:.3f} with the gradient of the expected score.",
                means="The estimate is biased: a token, a score or a baseline is counted incorrectly.",
                where=f"{name.partition(' ')[0]}, from the scores to the loss",
            )


def head_gradient(run: Watched, vocab_size: int) -> Tensor:
    """Return the gradient (V, C) of the policy's head in the first step."""
    gradients = [g for g in run.gradients[0] if g is not None and g.ndim == 2 and len(g) == vocab_size]
    if not gradients:
        raise CannotCheckError("no parameter of the optimizer is the policy's head")
    # head and embedding have the same shape, but only the head's gradient is in the first channel
    return max(gradients, key=lambda g: g[:, 0].abs().sum().item())


CHECKS = (
    *(first_ratio, slopes, gradients, micro_batches, two_models, clipping, ratio_statistics),
    *(baselines, seven_responses),
)
