"""Models, phases and memory of each training script."""

from pathlib import Path

from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.plan.memory import Flags, Model, Phase, Rows, Work, memory_plan, read_shape, sized_model
from nanorlhf.rewards.weighted_sum import is_function, scoring_models
from nanorlhf.training.settings import READ_FACTOR, RewardArgs, RolloutArgs, SupervisedArgs


def sft_plan(args: SupervisedArgs, model: str | None, num_samples: int) -> str:
    if model is None:
        raise InputError("--model None: expected a checkpoint directory or a Hub id, which give the model's shape.")
    rows = Rows(args.max_query_length, args.max_response_length, args.dtype)
    policy = sized_model(GPT, read_shape("--model", model, rows.tokens), rows, args)
    sampling = Phase("sampling", "sample", ("policy",), num_samples)
    return supervised_plan(args, rows, {"policy": policy}, 1, sampling)


def rm_plan(args: SupervisedArgs, sft: str, loss: str) -> str:
    num_responses = 1 if loss == "regression" else 2
    rows = Rows(args.max_query_length, args.max_response_length, args.dtype, num_responses)
    config = read_shape("--sft", sft, args.max_query_length + args.max_response_length)
    return supervised_plan(args, rows, {"reward": sized_model(ScalarModel, config, rows, args)}, READ_FACTOR)


def dpo_plan(args: SupervisedArgs, sft: str, has_reference: bool = True, moves: bool = False) -> str:
    """Return the plan of DPO. moves: the reference follows the policy."""
    rows = Rows(args.max_query_length, args.max_response_length, args.dtype, num_responses=2)
    config = read_shape("--sft", sft, args.max_query_length + args.max_response_length)
    models = {"policy": sized_model(GPT, config, rows, args)}
    if has_reference:
        models["reference"] = sized_model(GPT, config, rows, shares_policy=args.tune == "lora", moves=moves)
    return supervised_plan(args, rows, models, READ_FACTOR)


def supervised_plan(args: SupervisedArgs, rows: Rows, models: dict[str, Model], times: int, *extra: Phase) -> str:
    """Return the plan of a script that updates, and validates with `times` as many rows per pass."""
    limit = "micro_batch_size"
    names = tuple(models)
    updating = Phase("updating", "update", names, args.batch_size, limit)
    validating = Phase("validating", "validate", names, times * args.batch_size, limit, times)
    flags = Flags({limit: args.micro_batch_size}, args.checkpoint_activations, args.shard)
    return memory_plan(Work(models, (updating, validating, *extra), flags, rows))


def rollout_plan(args: RolloutArgs, value_model: str | None = None, has_value_model: bool = True) -> str:
    """Return the plan of PPO, RLCF or GRPO, which has no value model. RLCF's discriminator is not counted."""
    rows = Rows(args.max_query_length, args.response_length, args.dtype)
    config = value_config = read_shape("--sft", args.sft, rows.tokens)
    limit = "micro_batch_size"
    resets = moves = False
    if isinstance(args, RewardArgs):
        resets = args.elastic_reset.every is not None
        moves = resets or args.reference.rate > 0
    models = {
        "policy": sized_model(GPT, config, rows, args),
        "reference": sized_model(GPT, config, rows, shares_policy=args.tune == "lora", moves=moves),
    }
    if resets:
        models["average"] = models["reference"]
    phases = [
        Phase("sampling", "sample", ("policy",), args.batch_size, limit, READ_FACTOR),
        Phase("comparing", "read", ("policy", "reference"), args.batch_size, limit, READ_FACTOR),
    ]
    notes = []
    scoring: dict[str, tuple[str, str, type[GPT | ScalarModel]]] = {}  # name -> flag, path, kind
    if isinstance(args, RewardArgs):
        models_by_flag = scoring_models(args.reward, args.reward_model)
        numbered = enumerate(sorted(models_by_flag, key=lambda model: model[2] is GPT), start=1)  # scalar models first
        scoring |= {f"reward {number}": model for number, model in numbered}
        if args.gold is not None and not is_function(args.gold):
            scoring["gold"] = "--gold", args.gold, ScalarModel
    for name, (flag, path, kind) in scoring.items():
        exists = Path(path).is_dir()
        models[name] = sized_model(kind, read_shape(flag, path, rows.tokens) if exists else config, rows)
        phases += [Phase("scoring", "read", (name,), args.batch_size, limit, READ_FACTOR)]
        if not exists:
            notes.append(f"({flag} {path} not found: assumed to be as large as the policy)")
    is_shared = value_model == "shared"
    if value_model is None and "reward 1" in models and scoring["reward 1"][2] is ScalarModel:
        value_config = models["reward 1"].config
    elif value_model is not None and not is_shared:
        value_config = read_shape("--value-model", value_model, rows.tokens)
    if has_value_model:
        models["value"] = sized_model(ScalarModel, value_config, rows, args, is_shared)
        phases += [Phase("valuing", "read", ("value",), args.batch_size, limit, READ_FACTOR)]
    updated = tuple(name for name, model in models.items() if model.trained)
    phases += [Phase("updating", "update", updated, args.batch_size, limit)]
    flags = Flags({limit: args.micro_batch_size}, args.checkpoint_activations, args.shard, args.offload)
    return memory_plan(Work(models, tuple(phases), flags, rows, tuple(notes), can_shard=not is_shared))
