"""Invariants of any language model in RL: padding, other rows and caches don't change its outputs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanorlhf import dataset, ppo
from nanorlhf import generate as generating
from nanorlhf import logprobs as readings
from nanorlhf.batch import Batch
from nanorlhf.doctor.cases import Cases, differ, unbatched_distributions, unbatched_logprobs
from nanorlhf.doctor.world import Architecture, T, small_config, small_policy
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, right_pad
from nanorlhf.rules.finding import Finding

TEMPERATURE = 0.6
STEP = 1e-2
"""step size of finite differences in parameters"""
ARCHITECTURES: tuple[Architecture, ...] = ("gpt2", "gpt_neox")


def small_models(cases: Cases) -> Iterator[tuple[str, GPT]]:
    tokenizer = cases.world.tokenizer
    for name in ARCHITECTURES:
        config = small_config(tokenizer.vocab_size + 2, name)
        yield name, small_policy(config, tokenizer.eos_id).forbid(tokenizer.pad_id, tokenizer.vocab_size)


def texts(cases: Cases) -> tuple[list[list[int]], list[list[int]]]:
    """Return queries and responses of different lengths; the last response has no EOS."""
    tokenizer = cases.world.tokenizer
    queries = [tokenizer.encode(text) for text in ("sun:", "so rain and wind:", "hail and snow and mist:", "dew")]
    responses = [tokenizer.encode(text) + [tokenizer.eos_id] for text in (" wind", " sun rain", " ", " hail mist")]
    return queries, [*responses[:3], tokenizer.encode(" thaw heat dew sun")[:T]]


def padding(cases: Cases) -> Iterator[Finding]:
    """Check that a row's log-probabilities don't depend on padding and other rows."""
    pad_id = cases.world.tokenizer.pad_id
    queries, responses = texts(cases)
    for name, policy in small_models(cases):
        query, response = left_pad(queries, pad_id), right_pad(responses, pad_id)
        actions = response != pad_id
        ids = torch.cat((query, response), dim=1)
        with torch.no_grad():
            batched, _ = readings.response_logprobs(policy, ids, ids != pad_id, actions, TEMPERATURE)
        for row, (q, r) in enumerate(zip(queries, responses, strict=True)):
            unbatched = unbatched_logprobs(policy, q, r, TEMPERATURE)
            if differ(batched[row][actions[row]].double(), unbatched):
                gap = (batched[row][actions[row]].double() - unbatched).abs().max().item()
                yield Finding(
                    name="padding",
                    seen=f"With a {name} model, a response's log-probabilities in a padded batch and by itself differ "
                    f"by up to {gap:.2g} nats.",
                    means="Positions count the padding, tokens attend to it, or labels are shifted by one.",
                    where="nanorlhf/masks.py (position_ids, attention_mask) and nanorlhf/logprobs.py (response_hidden)",
                )
                break


def model_slopes(cases: Cases) -> Iterator[Finding]:
    """Check the gradient of log-probabilities and values in each parameter by finite differences."""
    pad_id = cases.world.tokenizer.pad_id
    queries, responses = texts(cases)
    query, response = left_pad(queries, pad_id), right_pad(responses, pad_id)
    actions, ids = response != pad_id, torch.cat((query, response), dim=1)
    weights = torch.randn(actions.shape, generator=torch.Generator().manual_seed(0))

    def logprobs(policy: GPT) -> Tensor:
        return (weights * readings.response_logprobs(policy, ids, ids != pad_id, actions, TEMPERATURE)[0]).sum()

    def values(model: ScalarModel) -> Tensor:
        return (weights * readings.response_values(model, ids, ids != pad_id, actions)).sum()

    models: list[tuple[str, Any, Callable]] = [(f"{name} policy", p, logprobs) for name, p in small_models(cases)]
    models.append(("scalar model", cases.reward_model(), values))
    for name, model, output in models:
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(output(model), [*parameters.values()], allow_unused=True)
        generator, wrong = torch.Generator().manual_seed(1), []
        for (path, parameter), gradient in zip(parameters.items(), gradients, strict=True):
            direction = torch.randn(parameter.shape, generator=generator)
            direction *= STEP / direction.norm()
            outputs = []
            with torch.no_grad():
                for step in (direction, -2 * direction, direction):  # forward, backward, and back to the original
                    parameter.add_(step)
                    outputs.append(output(model).item())
            difference = (outputs[0] - outputs[1]) / 2
            slope = 0.0 if gradient is None else (gradient * direction).sum().item()
            wrong += [path] * (abs(difference - slope) > 0.05 * abs(difference) + 1e-3 * STEP * weights.numel())
        if wrong:
            yield Finding(
                name="model-gradient",
                seen=f"The gradient of a {name}'s outputs in {wrong[0]} disagrees with finite differences, as for "
                f"{len(wrong)} of {len(parameters)} parameters.",
                means="Something between this parameter and the output is detached, or a backward pass is wrong.",
                where="nanorlhf/model.py, nanorlhf/logprobs.py and kernels/",
            )


def determinism(cases: Cases) -> Iterator[Finding]:
    """Check that the model is the same function in training and evaluation mode."""
    queries, responses = texts(cases)
    for name, policy in small_models(cases):
        ids = torch.tensor([queries[1] + responses[1]])
        policy.train()
        with torch.no_grad():
            first, second = policy(ids), policy(ids)
        policy.eval()
        with torch.no_grad():
            third = policy(ids)
        if not (torch.equal(first, second) and torch.equal(first, third)):
            yield Finding(
                name="dropout",
                seen=f"Two forward passes of a {name} model over the same text differ.",
                means="Dropout is on: the policy that sampled and the policy that is updated are different functions.",
                where="nanorlhf/model.py",
            )
            return


def sampling(cases: Cases) -> Iterator[Finding]:
    """Check that cached decoding samples from the distribution that the update computes, and stops at EOS."""
    tokenizer = cases.world.tokenizer
    queries, _ = texts(cases)
    queries = [query for query in queries for _ in range(8)]
    query = left_pad(queries, tokenizer.pad_id)
    uniforms = torch.rand((len(queries), T), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, policy in small_models(cases):
        response, logprobs = generating.generate(
            policy, query, query != tokenizer.pad_id, T, TEMPERATURE, eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id, uniforms=uniforms,
        )  # fmt: skip
        gap, num_strange = 0.0, 0
        for row, ids in enumerate(response.tolist()):
            end = ids.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in ids else T
            if set(ids[end:]) - {tokenizer.pad_id}:
                yield Finding(
                    name="text-after-eos",
                    seen=f"A {name} model continued after EOS.",
                    means="The sampler doesn't stop at EOS; the tokens that follow are scored or cost time.",
                    where="nanorlhf/generate.py (generate)",
                )
                return
            unbatched = unbatched_logprobs(policy, queries[row], ids[:end], TEMPERATURE)
            gap = max(gap, (logprobs[row, :end].double() - unbatched).abs().max().item())
            all_logprobs = unbatched_distributions(policy, queries[row] + ids[: end - 1], TEMPERATURE)
            upper = all_logprobs[len(queries[row]) - 1 :].exp().cumsum(-1)
            for t, token in enumerate(ids[:end]):
                low = upper[t, token - 1].item() if token else 0.0
                num_strange += not low - 1e-4 <= uniforms[row, t].item() <= upper[t, token].item() + 1e-4
        if not gap < 1e-3:
            yield Finding(
                name="sampler-logprobs",
                seen=f"With a {name} model, the sampler's log-probabilities are {gap:.2g} nats off a full forward pass "
                "at the same temperature.",
                means="The KV cache, a position or the temperature differs between sampling and training, or logits "
                "are rounded.",
                where="nanorlhf/generate.py (generate) and nanorlhf/cache.py (KVCache)",
            )
            return
        if num_strange:
            yield Finding(
                name="sampler-distribution",
                seen=f"With a {name} model, {num_strange} sampled tokens don't follow from its distribution and the "
                "random numbers.",
                means="Something filters or reshapes the distribution, so ratios refer to another distribution.",
                where="nanorlhf/generate.py (draw, generate)",
            )
            return


def pad_token(cases: Cases) -> Iterator[Finding]:
    """Check that [PAD], which may be an id of the head, and the head's unused ids are never sampled."""
    tokenizer = cases.world.tokenizer
    queries, _ = texts(cases)
    pad_id = tokenizer.encode("#")[0]  # as in Pythia, whose [PAD] is one of the ids
    query = left_pad(queries * 8, pad_id)
    policy = small_policy(small_config(tokenizer.vocab_size + 2), tokenizer.eos_id)
    policy.forbid(pad_id, tokenizer.vocab_size)
    forbidden = torch.tensor([pad_id, tokenizer.vocab_size, tokenizer.vocab_size + 1])
    with torch.no_grad():  # if allowed, they would be more likely than EOS
        policy.lm_head.weight[forbidden] = 2 * policy.lm_head.weight[tokenizer.eos_id]
    response, _ = generating.generate(
        policy, query, query != pad_id, T, eos_id=tokenizer.eos_id, pad_id=pad_id,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    ended = (response == tokenizer.eos_id).cumsum(1) > 0
    if (torch.isin(response, forbidden) & ~ended).any():
        yield Finding(
            name="pad-sampled",
            seen="[PAD], or an id without a token, was sampled within a response.",
            means="These ids of the head are not forbidden, and a response ends at the first [PAD].",
            where="nanorlhf/model.py (GPT.forbid)",
        )


def masks(cases: Cases) -> Iterator[Finding]:
    """Check that actions end with EOS or before [PAD], and states one later, with the finished response."""
    eos, pad = cases.world.tokenizer.eos_id, cases.world.tokenizer.pad_id
    response = torch.tensor([[5, 6, eos, pad, pad], [5, 6, 7, 8, 9], [eos, pad, pad, pad, pad], [5, 6, 7, pad, pad],
                             [5, 6, 7, 8, eos]])  # fmt: skip
    lengths = torch.tensor([3, 5, 1, 3, 5])  # the fourth was truncated, without EOS
    batch = Batch.of(
        [{}] * 5, torch.tensor([[pad, 4]] * 5), response, torch.zeros(5, 5), eos, pad, "after_eos"
    )  # fmt: skip
    t = torch.arange(5)
    problems = []
    if not torch.equal(batch.actions, t < lengths[:, None]):
        problems.append("the actions do not end with EOS, or with the last token of a response without one")
    if not torch.equal(batch.states, t <= lengths[:, None]):
        problems.append("the states are not the actions and one more position")
    if not torch.equal(batch.score_index, lengths.clamp(max=4)):
        problems.append("the score is not in the state after the last token")
    for problem in problems:
        yield Finding(
            name="masks",
            seen=f"In five handwritten responses {problem}.",
            means="An index is off by one: EOS gets no gradient, or padding gets one.",
            where="nanorlhf/ppo.py (eos_masks) and nanorlhf/batch.py (Batch.of)",
        )


def nan_after_the_end(cases: Cases) -> Iterator[Finding]:
    """Check that masked positions don't affect the losses, even if they are NaN."""
    actions = torch.tensor([[True, True, False]])
    numbers = torch.tensor([[0.1, -0.2, torch.nan]])
    new = torch.tensor([[0.1, -0.2, 0.3]], requires_grad=True)
    values = torch.tensor([[0.5, 0.2, 0.1]], requires_grad=True)
    losses, _ = ppo.policy_loss(new, numbers, numbers, actions, 0.2)
    value_losses, _ = ppo.value_loss(values, numbers, numbers, actions, 0.2)
    (losses.sum() + value_losses.sum()).backward()
    assert new.grad is not None and values.grad is not None
    if not (losses.isfinite().all() and new.grad.isfinite().all() and values.grad.isfinite().all()):
        yield Finding(
            name="nan-after-the-end",
            seen="A NaN after the end of a response reaches the loss.",
            means="Masked positions are multiplied by 0, and NaN * 0 is NaN: use torch.where.",
            where="nanorlhf/ppo.py (policy_loss, value_loss)",
        )


def seam(cases: Cases) -> Iterator[Finding]:
    """Check that query and response, tokenised separately, have the ids of the concatenated text."""
    tokenizer = cases.world.tokenizer
    for query, response in (("sun and rain:", "wind"), ("TL;DR:", "snow hail")):
        ids = tokenizer.encode(query) + dataset.response_ids(query, response, tokenizer)
        if ids != [*tokenizer.encode(f"{query} {response}"), tokenizer.eos_id]:
            yield Finding(
                name="seam",
                seen=f"The ids of {query + ' ' + response!r} differ from its query's ids, its response's ids and EOS.",
                means="The space between query and response is missing, or a token spans both.",
                where="nanorlhf/dataset.py (with_leading_space, response_ids)",
            )
            return


CHECKS = (padding, model_slopes, determinism, sampling, pad_token, masks, nan_after_the_end, seam)
