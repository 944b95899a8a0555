"""Load the models of the training scripts and move them to their devices."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanorlhf import distributed
from nanorlhf.checkpoint import (
    cast_linear_weights,
    has_value_head,
    is_reward_model,
    load_gpt,
    load_scalar,
    scalar_from_gpt,
)
from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.peft import reference, tune
from nanorlhf.rewards.weighted_sum import Rewards, load_rewards
from nanorlhf.tokenizer import Tokenizer, load_tokenizer
from nanorlhf.training.settings import RewardArgs, RolloutArgs, TrainingArgs

if TYPE_CHECKING:
    from nanorlhf.rewards.gold import Gold

PER_TOKEN = ("ppo", "reinforce++")  # algorithms that can use a reward per token; the others compare responses


def loading_device(shard: str, device: torch.device) -> torch.device:
    """Return the device to load models on: this rank's, or `meta` when `prepare_models` will read each shard."""
    return device if shard == "none" else torch.device("meta")


def prepare_models(
    args: TrainingArgs,
    device: torch.device,
    trained: Sequence[GPT | ScalarModel],
    frozen: Sequence[GPT | ScalarModel] = (),
    offload: bool = False,
) -> None:
    """Set up compilation, activation checkpointing, sharding and the offloading of frozen models.

    The linear weights of frozen models are cast to the dtype of the computation, unless the model is sharded or shares
    its weights with a trained model, as LoRA's reference does.
    """
    if args.compile and args.shard != "none":
        raise InputError(f"--compile can't be combined with --shard {args.shard}.")
    for model in (*trained, *frozen):
        model.transformer.compile_blocks = args.compile
    is_bfloat16 = args.dtype == "bfloat16"
    ranks_per_copy = distributed.node_size() if args.shard == "hsdp" else None
    for model in trained:
        model.transformer.checkpoint_activations = args.checkpoint_activations
        if args.shard != "none":
            distributed.shard(model, device, is_bfloat16, ranks_per_copy=ranks_per_copy)
        else:
            model.to(device)
    parameters = {id(parameter) for model in trained for parameter in model.parameters()}
    for model in frozen:
        if args.shard != "none":
            distributed.shard(model, device, is_bfloat16, offload, ranks_per_copy)
        is_shared = any(id(parameter) in parameters for parameter in model.parameters())
        if not distributed.is_sharded(model) and not is_shared:
            cast_linear_weights(model, getattr(torch, args.dtype))
            if offload:
                distributed.offload(model, device)


# ------------------------------------------------------------------------------------------------ PPO, GRPO and RLCF
def load_policy(args: RolloutArgs, device: torch.device) -> tuple[Tokenizer, GPT]:
    """Load the tokenizer and the initial policy, which can't emit [PAD] or an id without a token."""
    tokenizer = load_tokenizer(args.sft)
    return tokenizer, load_gpt(args.sft, device).forbid(tokenizer.pad_id, tokenizer.vocab_size)


def queries_file(data: Path) -> Path:
    """Return the file whose queries a policy answers: of demonstrations or, if there are none, of programs."""
    demonstrations, programs = data / "sft.train.jsonl", data / "code.train.jsonl"
    return programs if programs.exists() and not demonstrations.exists() else demonstrations


def load_reward(
    args: RewardArgs, tokenizer: Tokenizer, device: torch.device, rows: Sequence[Demonstration], policy: GPT
) -> tuple[Rewards, "Gold | None", list[GPT | ScalarModel]]:
    """Load the reward and the gold score, and return them with the frozen models of both. [SO ppo] [STR ppo]"""
    algorithm = getattr(args, "algorithm", "ppo")
    whole_only = None if algorithm in PER_TOKEN else f"--algorithm {algorithm}"
    reward = load_rewards(
        args.reward, args.reward_model, args.reward_weights, tokenizer, device, args.read_size,
        temperature=args.temperature, workers=args.reward_workers, rows=rows, whole_only=whole_only, policy=policy,
    )  # fmt: skip
    if args.gold is None:
        return reward, None, reward.frozen
    from nanorlhf.rewards.gold import Gold  # optional: only runs with a known gold score need it

    gold = Gold(args.gold, tokenizer, device)
    return reward, gold, reward.frozen + ([] if gold.model is None else [gold.model])


def new_value_model(source: str | None, policy: GPT, device: torch.device) -> ScalarModel:
    """Load a trained value model, or make one with a head of zeros: random values would distort the first advantages.

    source: the path of a value or reward model to continue from, or of another policy to take the trunk from; None: a
    copy of `policy`'s trunk; shared: `policy`'s own frozen weights
    """
    if source is None or source == "shared":
        trunk = policy
    elif is_reward_model(source) or has_value_head(source):
        return load_scalar(source, device)
    else:
        trunk = load_gpt(source, device)
    value_model = scalar_from_gpt(trunk, share_trunk=source == "shared")
    nn.init.zeros_(value_model.score.weight)
    return value_model


def prepare_policy(
    args: RolloutArgs,
    device: torch.device,
    policy: GPT,
    value_model: ScalarModel | None = None,
    frozen: Sequence[GPT | ScalarModel] = (),
    is_reference_exact: bool = False,
) -> GPT:
    """Add LoRA's updates, freeze a reference policy, move all models to their devices, and return the reference.

    is_reference_exact: keep the reference's weights in float32 and on the device, because they are averaged or restored
    """
    trained: list[GPT | ScalarModel] = [policy]
    if value_model is not None:
        trained.append(value_model)
    for model in trained:
        tune(model, args.tune, args.lora_rank, args.lora_targets)
    ref_policy = reference(policy)
    if is_reference_exact:
        prepare_models(args, device, [*trained, ref_policy], frozen, args.offload)
    else:
        prepare_models(args, device, trained, [ref_policy, *frozen], args.offload)
    return ref_policy
