"""What must hold for the update of any policy-gradient method: ratios, clips, counts, and the gradient itself."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanorlhf.checkpoint import save
from nanorlhf.doctor.cases import B, CannotCheckError, Cases, far, rereading, unpadded
from nanorlhf.doctor.rollout_checks import PPO, usual
from nanorlhf.doctor.watch import Slopes, Watched, replaced
from nanorlhf.doctor.world import small_config
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.rules.finding import Finding
from nanorlhf.rules.formulas import IS_CLIPPED, Numbers, evaluate

NO_KL, ONE_STEP = {"kl_coef": 0.0}, {"num_epochs": 1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{"grpo": {}, "dr_grpo": {}, "rloo": {}, "reinforce++": {}},
    **{"gspo": {}, "dapo": NO_KL, "cispo": NO_KL, "online_dpo": ONE_STEP},
}
"""of train_grpo.py, and the settings that they need"""
UNBIASED = ("dr_grpo", "rloo", "reinforce++", "cispo")
"""whose gradient is that of the expected score, up to a factor, where all responses are to one query"""
RATIOS = (1.0, 3.0, 0.3, 200.0)
DR_GRPO: dict[str, Any] = {"algorithm": "dr_grpo", "reward_model": None, "num_epochs": 1}


def first_ratio(cases: Cases) -> Iterator[Finding]:
    """Before the first step, policy and rollout agree on every token."""
    runs = {"train_ppo.py": usual(cases), "train_grpo.py": cases.run("train_grpo", algorithm="grpo")}
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
                seen=f"Before the first step {name} finds log-probabilities up to {gap:.2g} nats off those of the "
                "rollout.",
                means="Rollout and update read the policy differently: temperature, dropout, padding or masks. Every "
                "ratio is wrong.",
                where=f"{name}, the two calls that read the policy",
            )
        logged = run.metrics[0].get("policy/first_ratio_error", 0.0)
        if gap < 1e-3 < logged:
            yield Finding(
                name="first-ratio",
                seen=f"{name} logs a first ratio error of {logged:.2g} where the ratios are 1.",
                means="The statistic reads other tokens than the loss.",
                where="nanorlhf/training/update_metrics.py",
            )
    one_epoch = cases.run("train_ppo", **PPO, reward=cases.world.rule("score"), kl_coef=0.0).metrics[0]
    for name, expected in (("policy/ratio", 1.0), ("policy/approx_kl", 0.0)):
        if name in one_epoch and abs(one_epoch[name] - expected) > 1e-3:
            yield Finding(
                name="statistics",
                seen=f"{name} is logged as {one_epoch[name]:.4g} over one epoch of one step, in which every ratio "
                "is 1.",
                means="The sum runs over padding, or is divided by another count.",
                where="nanorlhf/training/update_metrics.py",
            )


def slopes_of_rows(run: Watched, pad_id: int) -> list[tuple[int, Tensor, Tensor]]:
    """Row, advantages and slopes (t,) of each response of the first epoch whose text no other row has."""
    tensors, _ = run.traces()[0]
    texts = [tuple(query + response) for query, response in unpadded(tensors, pad_id)]
    num_rows = num_micro_batches = 0
    for micro_batch in run.micro_batches:
        if num_rows < len(texts):
            num_rows, num_micro_batches = num_rows + len(micro_batch.ids), num_micro_batches + 1
    found = run.token_slopes(num_micro_batches)
    rows = []
    for row, ids in enumerate(texts):
        if texts.count(ids) == 1:
            advantages = tensors["advantages"][row][tensors["actions"][row]]
            rows.append((row, advantages, found.get(ids, torch.zeros_like(advantages))))
    return rows


def slopes(cases: Cases) -> Iterator[Finding]:
    """The first step follows the advantages, and padding has no slope."""
    runs = {"train_ppo.py": usual(cases)}
    for algorithm, settings in ALGORITHMS.items():
        runs[f"train_grpo.py --algorithm {algorithm}"] = cases.run("train_grpo", algorithm=algorithm, **settings)
    for name, run in runs.items():
        first, *_ = run.micro_batches
        if first.slopes is None:
            raise CannotCheckError(f"no gradient reaches the log-probabilities that {name} asks for")
        if first.slopes[~first.actions].abs().max() > 0 or not first.slopes.isfinite().all():
            yield Finding(
                name="slopes",
                seen=f"With {name} the loss has a slope in log-probabilities after the end of a response.",
                means="Tokens after EOS must not be trained on: the mask of the loss is wrong.",
                where=f"{name.partition(' ')[0]}, the losses",
            )
            continue
        rows = slopes_of_rows(run, cases.world.tokenizer.pad_id)
        weights = [-slope[a.abs() > 1e-4] / a[a.abs() > 1e-4] for _, a, slope in rows]
        together = torch.cat(weights)
        if not (together > 0).all():
            share = (together <= 0).double().mean().item()
            yield Finding(
                name="slopes",
                seen=f"Before the first step of {name}, {share:.0%} of the tokens with an advantage have no gradient, "
                "or one of the wrong sign.",
                means="A token that was better than expected must become likelier. EOS may be masked, or the loss has "
                "a wrong sign.",
                where=f"{name.partition(' ')[0]}, the losses, and nanorlhf/ppo.py (eos_masks)",
            )
        elif any(far(w, w[:1].expand_as(w)) for w in weights if len(w)):
            yield Finding(
                name="slopes",
                seen=f"Before the first step of {name}, tokens of one response are weighed differently for the same "
                "advantage.",
                means="Every token of a response has the same weight: its loss is a mean or a sum.",
                where=f"{name.partition(' ')[0]}, the losses",
            )


def gradients(cases: Cases) -> Iterator[Finding]:
    """The gradient of the parameters is that of the loss's slopes, through texts that are read alone.

    So whatever the loss is, it reaches all of the policy and all of the value model. Of the first two steps: the
    gradient of one is no part of the other.
    """
    runs = {
        "train_ppo.py": (usual(cases), cases.reward_model()),
        "train_grpo.py": (cases.run("train_grpo", algorithm="grpo"), None),
        "train_rlcf.py": (cases.run("train_rlcf"), None),  # its value model is new
    }
    for name, (run, value_model) in runs.items():
        policy, temperature = cases.policy(), cases.settings(name.removesuffix(".py")).temperature
        models: list[tuple[str, Any, list[Slopes], float]] = [("policy", policy, run.micro_batches, temperature)]
        models += [] if value_model is None else [("value model", value_model, run.value_micro_batches, 1.0)]
        for step in range(2):
            part = slice(run.read_before[step - 1] if step else 0, run.read_before[step])
            theirs, before = run.gradients[step], run.parameters[step]
            for what, model, read, heat in models:
                if not all(x.slopes is not None and x.is_all for x in read[part]) or not read[part]:
                    raise CannotCheckError(
                        f"the loss of {name} reads the {what} otherwise than by nanorlhf/logprobs.py"
                    )
                parameters = [*model.parameters()]
                found, theirs = theirs[: len(parameters)], theirs[len(parameters) :]
                values, before = before[: len(parameters)], before[len(parameters) :]
                if [x.shape for x in values] != [x.shape for x in parameters]:
                    raise CannotCheckError(f"the optimizer of {name} has other parameters than the {what}'s")
                with torch.no_grad():
                    for parameter, value in zip(parameters, values, strict=True):
                        parameter.copy_(value)
                expected = gradient_of(model, read[part], run.micro_batches[part], heat)
                if any(far(x, y, 1e-2) for x, y in paired(found, expected)):
                    yield Finding(
                        name="gradients",
                        seen=f"The gradient of the {what} in step {step} of {name} is not that of its outputs, each by "
                        "as much as the loss asks for.",
                        means="A part of the model is detached, such as all but its head; the gradient of the step "
                        "before is still in it; it is scaled, or clipped before all micro-batches are in; or a "
                        "backward pass is wrong.",
                        where=f"{name}, from `zero_grad` to the step, nanorlhf/logprobs.py and kernels/",
                    )
                    return


def gradient_of(
    model: GPT | ScalarModel, read: list[Slopes], of_policy: list[Slopes], temperature: float = 1.0
) -> list[Tensor | None]:
    """The sum of slopes times what the model says of each text alone, as a gradient of each parameter.

    of_policy: the same micro-batches as the policy reads them, which know how long a response is.
    """
    total = torch.zeros(())
    for some, others in zip(read, of_policy, strict=True):
        assert some.slopes is not None
        for ids, mask, slopes, actions in zip(some.ids, some.actions, some.slopes, others.actions, strict=True):
            first, t = len(ids) - int(actions.sum()) - 1, int(mask.sum())
            outputs = model(torch.tensor([ids]))[0, first : first + t]  # from the position before the response on
            if isinstance(model, GPT):
                logprobs = (model.logits(outputs) / temperature).log_softmax(-1)
                outputs = logprobs[torch.arange(t), torch.tensor(ids[-t:])]
            total = total + (slopes[:t] * outputs).sum()
    return list(torch.autograd.grad(total, [*model.parameters()], allow_unused=True))


def micro_batches(cases: Cases) -> Iterator[Finding]:
    """The size of a micro-batch changes no gradient."""
    scripts: dict[str, tuple[str, dict[str, Any]]] = {
        "train_sft.py": ("train_sft", {}),
        "train_sft.py --max-grad-norm 0.1": ("train_sft", {"max_grad_norm": 0.1}),
        "train_rm.py": ("train_rm", {}),
        "train_dpo.py": ("train_dpo", {}),
        "train_dpo.py --loss orpo": ("train_dpo", {"loss": "orpo"}),
        "train_ppo.py": ("train_ppo", {"num_ppo_epochs": 1}),
    }
    for algorithm, settings in ALGORITHMS.items():
        changed = {"algorithm": algorithm, "num_epochs": 1} | settings
        scripts[f"train_grpo.py --algorithm {algorithm}"] = ("train_grpo", changed)
    for name, (module, changes) in scripts.items():
        whole, parts = (cases.run(module, micro_batch_size=size, **changes) for size in (B, 3))
        if not whole.gradients or not parts.gradients:
            raise CannotCheckError(f"{name} took no step of an optimizer")
        # the second one too: before the first step DPO's margins are all 0, and so is any mean of them
        steps = zip(whole.gradients[:2], parts.gradients[:2], strict=True)
        if any(far(a, b, 1e-2) for x, y in steps for a, b in paired(x, y)):
            yield Finding(
                name="micro-batches",
                seen=f"The gradient of {name} changes with --micro-batch-size.",
                means="A micro-batch is divided by its own number of tokens, or looks at its own rows for a "
                "statistic: divide by the count of the whole minibatch, and take statistics before the split.",
                where=f"{name.partition(' ')[0]}, what each loss is divided by",
            )


def paired(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients of the same parameters, divided by the largest of all: a gradient that is rounding alone is 0."""
    numbers = [x.abs().max().item() for x in (*a, *b) if x is not None]
    largest = max(numbers, default=1.0) or 1.0
    for x, y in zip(a, b, strict=True):
        if x is not None or y is not None:
            zero = torch.zeros_like(x if x is not None else y)  # type: ignore[arg-type]
            floor = torch.ones(1)  # so that `far` compares with the largest
            first, second = (torch.cat(((zero if z is None else z).flatten() / largest, floor)) for z in (x, y))
            yield first, second


def two_models(cases: Cases) -> Iterator[Finding]:
    """The policy gets no value gradient, and the value model no policy gradient."""
    with_values, without = (
        cases.run("train_ppo", num_ppo_epochs=1, value_coef=coefficient) for coefficient in (0.1, 0.0)
    )
    num_policy = len([*cases.policy().parameters()])
    a, b = with_values.gradients[0], without.gradients[0]
    shapes = [p.shape for p in cases.policy().parameters()]
    if [p.shape for p in with_values.parameters[0][:num_policy]] != shapes:
        raise CannotCheckError("the optimizer's first parameters are not the policy's")
    if any(far(x, y) for x, y in paired(a[:num_policy], b[:num_policy])):
        yield Finding(
            name="two-models",
            seen="The policy's gradient changes with --value-coef.",
            means="The value loss reaches the policy, or the policy's loss is scaled by it.",
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
    """The rollout as an older policy would have written it: the ratios of row i begin at RATIOS[i % 4]."""
    ratios = torch.tensor(RATIOS).repeat(len(batch) // len(RATIOS))
    return torch.where(batch.actions, logprobs - ratios.log()[:, None], logprobs), ref_logprobs


def clipping(cases: Cases) -> Iterator[Finding]:
    """A token that has gone far in the direction of its advantage has no gradient, and any other token has one."""
    settings: dict[str, tuple[dict[str, Any], float, float]] = {
        "train_ppo": (PPO | {"clip_range": 0.2}, 0.2, 0.2),
        "train_grpo": (DR_GRPO | {"clip_range": (0.5, 4.0)}, 0.5, 4.0),
    }  # and how far a ratio counts below 1 and above
    for name, (changes, below, above) in settings.items():
        changes = changes | {"reward": cases.world.rule("score"), "kl_coef": 0.0}
        run = cases.run(name, patches=rereading(name, older_policy), **changes)
        wrong: dict[str, int] = {}
        for row, advantages, found in slopes_of_rows(run, cases.world.tokenizer.pad_id):
            ratio = RATIOS[row % len(RATIOS)]
            with_advantage = advantages.abs() > 1e-3
            numbers: Numbers = {"advantages": advantages, "ratio": ratio, "below": below, "above": above}
            gone_far = evaluate(IS_CLIPPED, numbers)
            others = with_advantage & ~gone_far & (ratio < 100)  # a dual clip may stop those
            silent = found.abs() < 1e-9
            for what, mask in (
                ("have gone far and still have a gradient", with_advantage & gone_far & ~silent),
                ("are inside the clip range, or move back to it, and have no gradient", others & silent),
                ("have a gradient of the wrong sign", others & (found.sign() == advantages.sign()) & ~silent),
            ):
                wrong[what] = wrong.get(what, 0) + int(mask.sum())
        for what, count in wrong.items():
            if count:
                yield Finding(
                    name="clipping",
                    seen=f"With ratios of 1, 3, 0.3 and 200 in the first step of {name}.py, and --clip-range "
                    f"{changes['clip_range']}, {count} tokens {what}.",
                    means="The clipped loss is the larger of two, max(-A * ratio, -A * clip(ratio)), of the ratio to "
                    "the rollout's own log-probabilities, and no token is left out for being far. Of two numbers of "
                    "the clip range the first is how far the ratio may fall below 1.",
                    where=f"nanorlhf/ppo.py (policy_loss, ratio_bounds) and the call of it in {name}.py",
                )
                break


def back_and_forth(batch: Any, logprobs: Tensor, ref_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The rollout as an older policy would have written it: ratios of 2 and 2/3 take turns in each response."""
    return torch.where(batch.actions, logprobs - turns(logprobs.size(1)), logprobs), ref_logprobs


def turns(T: int) -> Tensor:
    """(T,) log 2, log 2/3, log 2, ..., whose mean is above log 1.1."""
    return torch.where(torch.arange(T) % 2 == 0, math.log(2), math.log(2 / 3))


def ratio_statistics(cases: Cases) -> Iterator[Finding]:
    """What is logged of ratios and clips describes those that the loss clips: of tokens, or of whole responses."""
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "train_ppo.py": ("train_ppo", PPO),
        "train_grpo.py --algorithm dr_grpo": ("train_grpo", DR_GRPO),
        "train_grpo.py --algorithm gspo": ("train_grpo", DR_GRPO | {"algorithm": "gspo"}),
    }
    for name, (module, changes) in settings.items():
        changes = changes | {"reward": cases.world.rule("score"), "kl_coef": 0.0, "clip_range": 0.1}
        run = cases.run(module, patches=rereading(module, back_and_forth), **changes)
        tensors, _ = run.traces()[0]
        slopes_of = run.token_slopes()
        log_ratios, clipped = [], []  # of each response, (t,)
        for row, (query, response) in enumerate(unpadded(tensors, cases.world.tokenizer.pad_id)):
            if tuple(query + response) not in slopes_of:
                raise CannotCheckError(f"{name} leaves a response out of its loss")
            actions = tensors["actions"][row]
            advantages, found = tensors["advantages"][row][actions], slopes_of[tuple(query + response)]
            log_ratios.append(turns(len(actions))[actions])
            clipped.append((found.abs() < 1e-9) & (advantages.abs() > 1e-3))
        if not torch.cat(clipped).any():
            continue  # a script may do without a clip
        if any(x.any() != x.all() for x in clipped):
            what, ratio, share = "tokens", torch.cat(log_ratios).exp().mean(), torch.cat(clipped).double().mean()
        else:
            what, ratio = "responses", torch.stack([x.mean() for x in log_ratios]).exp().mean()
            share = torch.stack([x.any() for x in clipped]).double().mean()
        for metric, expected in (("policy/ratio", ratio.item()), ("policy/clip_fraction", share.item())):
            logged = run.metrics[0].get(metric)
            if logged is not None and abs(logged - expected) > 1e-3:
                yield Finding(
                    name="statistics",
                    seen=f"The loss of {name} clips the ratios of {what}, and {metric} is logged as {logged:.3g} where "
                    f"it is {expected:.3g} of {what}.",
                    means="The statistic describes other ratios than those that the loss clips.",
                    where=f"{name.partition(' ')[0]} and nanorlhf/training/update_metrics.py (UpdateStatistics)",
                )
                break


def baselines(cases: Cases) -> Iterator[Finding]:
    """Among responses of equal scores nothing is to be learned; twice the scores give the same advantages, or twice."""
    for algorithm in ALGORITHMS:
        if algorithm in ("reinforce++", "dapo"):
            continue  # the batch is the baseline; the length counts too
        settings: dict[str, Any] = {
            "algorithm": algorithm, "reward_model": None, "num_epochs": 1, "missing_eos_score": None,
            "kl_coef": 0.1 if algorithm == "online_dpo" else 0.0,
        }  # fmt: skip
        constant = cases.run("train_grpo", reward=cases.world.rule("constant"), **settings)
        steps = constant.gradients[:1]  # none where groups without a difference are dropped
        largest = max((g.abs().max().item() for step in steps for g in step if g is not None), default=0.0)
        if largest > 1e-6:
            yield Finding(
                name="baseline",
                seen=f"With --algorithm {algorithm} and the same score for every response the gradient is up to "
                f"{largest:.2g}, and not 0.",
                means="The baseline is not that of the response's own query, or something else than the score is "
                "rewarded.",
                where="nanorlhf/grpo.py (1, advantages)",
            )
        once, twice = (
            cases.run("train_grpo", reward=cases.world.rule(rule), **settings).traces()[0][0]
            for rule in ("score", "double")
        )
        a, b = (x["advantages"][x["actions"]] for x in (once, twice))
        if a.abs().max() == 0:
            raise CannotCheckError(f"all advantages of {algorithm} are 0")
        if far(b, a) and far(b, 2 * a):
            yield Finding(
                name="baseline",
                seen=f"With --algorithm {algorithm} twice the scores give advantages that are neither the same nor "
                "twice as large.",
                means="An advantage is linear in the scores, or divided by their standard deviation.",
                where="nanorlhf/grpo.py (1, advantages)",
            )


# ----------------------------------------------------------------------------------------- the world of seven responses
def letters(cases: Cases) -> tuple[int, int, int]:
    """The three tokens that the policy of seven responses knows: EOS and two letters."""
    (a,), (b,) = (cases.world.tokenizer.encode(letter) for letter in "xy")
    return cases.world.tokenizer.eos_id, a, b


def seven_policy(cases: Cases) -> GPT:
    """A policy that ends with probability 1/2 and says x or y with 1/4 each, whatever came before."""
    config = replace(small_config(cases.world.tokenizer.vocab_size), n_layer=1)
    torch.manual_seed(0)
    policy = GPT(config)
    with torch.no_grad():
        policy.get_parameter("transformer.norm.weight").zero_()  # a constant hidden state, (1, 0, ..., 0)
        policy.get_parameter("transformer.norm.bias").copy_(torch.eye(config.d_model)[0])
        policy.lm_head.weight.zero_()
        policy.lm_head.weight[:, 0] = -80.0
        for token, probability in zip(letters(cases), (1 / 2, 1 / 4, 1 / 4), strict=True):
            policy.lm_head.weight[token, 0] = math.log(probability)
    return policy


SCORES = {"": 0.3, "x": 1.0, "y": -0.5, "xx": 0.2, "xy": 1.7, "yx": -1.1, "yy": 0.6}
"""of the seven responses"""
RULE_OF_SEVEN = f"""def score(queries, responses):
    return [{SCORES}.get(text.strip(), 0.0) for text in responses]
"""


def each_in_proportion(rand: Callable) -> Callable:
    """Random numbers for 16 rows of two tokens that give each response as often as its probability says."""
    table = torch.tensor([[first, second] for first in (0.1, 0.3, 0.6, 0.9) for second in (0.1, 0.3, 0.6, 0.9)])

    def in_proportion(*size: Any, **named: Any) -> Tensor:
        shape = tuple(size[0]) if size and isinstance(size[0], tuple | list | torch.Size) else size
        return table.to(named.get("dtype", torch.float32)) if shape == (B, 2) else rand(*size, **named)

    return in_proportion


def seven_responses(cases: Cases) -> Iterator[Finding]:
    """In a world of seven responses the gradient is that of the expected score, by enumeration."""
    root = cases.world.root / "seven"
    if not root.exists():
        root.mkdir()
        save(seven_policy(cases), root / "sft", cases.world.tokenizer)
        (root / "rule.py").write_text(RULE_OF_SEVEN)
    eos, x, y = letters(cases)
    head = torch.tensor([math.log(1 / 2), math.log(1 / 4), math.log(1 / 4)], dtype=torch.float64, requires_grad=True)
    logprobs = dict(zip((eos, x, y), head.log_softmax(0), strict=True))
    expected_score = torch.zeros((), dtype=torch.float64)
    for text, score in SCORES.items():
        tokens = [x if letter == "x" else y for letter in text]
        tokens += [eos] * (len(tokens) < 2)
        expected_score = expected_score + sum(logprobs[token] for token in tokens).exp() * score  # type: ignore[union-attr]
    (exact,) = torch.autograd.grad(-expected_score, head)

    common: dict[str, Any] = {
        "sft": str(root / "sft"), "reward_model": None, "reward": f"{root / 'rule.py'}:score", "response_length": 2,
        "temperature": 1.0, "missing_eos_score": None, "kl_coef": 0.0,
    }  # fmt: skip
    runs = {
        "train_ppo.py": ("train_ppo", common | {"lam": 1.0, "gamma": 1.0, "num_ppo_epochs": 1}),
    } | {
        f"train_grpo.py --algorithm {name}": (
            "train_grpo", common | {"algorithm": name, "samples_per_query": 16, "num_epochs": 1}
        )
        for name in UNBIASED  # GRPO's and GSPO's mean over the tokens of a response favours short ones
    }  # fmt: skip
    for name, (module, settings) in runs.items():
        patches = partial(replaced, torch, "rand", each_in_proportion)
        run = cases.run(module, patches=patches, **settings)
        texts = sorted(len(row) for _, row in unpadded(run.traces()[0][0], cases.world.tokenizer.pad_id))
        if texts != [1] * 8 + [2] * 8:
            raise CannotCheckError(f"{name} does not sample by the numbers of torch.rand((B, T))")
        gradient = head_gradient(run, cases.world.tokenizer.vocab_size)
        estimate = gradient[torch.tensor([eos, x, y]), 0].double()
        cosine = torch.nn.functional.cosine_similarity(estimate, exact, dim=0).item()
        if not cosine > 0.999:
            yield Finding(
                name="exact-gradient",
                seen=f"In a world of seven responses, each sampled in proportion to its probability, the gradient of "
                f"{name} has the cosine {cosine:.3f} with that of the expected score.",
                means="The estimate is biased: a token, a score or a baseline is counted wrongly.",
                where=f"{name.partition(' ')[0]}, from the scores to the loss",
            )


def head_gradient(run: Watched, vocab_size: int) -> Tensor:
    """The gradient (V, C) of the policy's head in the first step."""
    found = [g for g in run.gradients[0] if g is not None and g.ndim == 2 and len(g) == vocab_size]
    if not found:
        raise CannotCheckError("no parameter of the optimizer is the policy's head")
    # the head and the embedding have one shape: the head's gradient lies in the first channel
    return max(found, key=lambda g: g[:, 0].abs().sum().item())


CHECKS = (
    *(first_ratio, slopes, gradients, micro_batches, two_models, clipping, ratio_statistics),
    *(baselines, seven_responses),
)
