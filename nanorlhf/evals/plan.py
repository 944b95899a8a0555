"""Estimate GPU memory of an evaluation from shapes alone: `python eval.py tldr --plan`.

Policies are loaded one after the other; the reference, the reward models and a gold reward model stay, unless --offload
lets them wait in CPU memory. Of several policies, or reward models of one flag, the largest counts.
"""

from pathlib import Path
from typing import Any

from nanorlhf.checkpoint import holds_reward_model
from nanorlhf.cli import check_ranges
from nanorlhf.evals.common import best_of, named_policies
from nanorlhf.model import GPT, GPTConfig, ScalarModel
from nanorlhf.reward import is_function
from nanorlhf.training.memory_plan import Flags, Phase, Shape, Work, frozen, memory_plan, sample, score, shape_of

MACHINES = ((1, 80), (1, 141))  # an evaluation is one process
REWARD_FLAGS = ("reward_model", "regression_model", "contrastive_model", "gold")


def eval_plan(args: Any) -> str:
    """What `eval.py --plan` prints; args are the settings of any evaluation. InputError for a model without a shape."""
    return memory_plan(eval_work(args), MACHINES)


def eval_work(args: Any) -> Work:
    """The models of an evaluation and what they do."""
    check_ranges(args)
    query_length = args.max_query_length
    if (args.data / "comparisons.cnndm.jsonl").exists():
        query_length = max(query_length, getattr(args, "max_cnndm_query_length", 0))
    response_length = max(getattr(args, name, 0) for name in ("response_length", "max_response_length"))
    num_tokens = query_length + response_length
    models: dict[str, Shape] = {}
    on_call: tuple[str, ...] = ()

    def largest(flag: str, places: list[str]) -> GPTConfig:
        return max((shape_of(flag, place, num_tokens) for place in places), key=num_weights)

    if hasattr(args, "policies"):
        policies = [best_of(place)[1] for place in named_policies(args.policies).values()]
        models["policy"] = frozen(GPT, largest("--policies", policies))
        if hasattr(args, "kl_temperature"):
            models["reference"] = frozen(GPT, largest("--policies", policies[:1]))
            value_models = [f"{place}/value_model" for place in policies if Path(place, "value_model").is_dir()]
            if value_models and args.reward_model:
                models["value"] = frozen(ScalarModel, largest("--policies", value_models))
                on_call = ("value",)
    else:
        places = list(args.reward_models[1::2])
        config = largest("--reward-models", places)
        if all(map(holds_reward_model, places)):
            models["model"] = frozen(ScalarModel, config)
        else:  # a policy's implicit reward
            models["model"] = frozen(GPT, config)
            models["reference"] = frozen(GPT, largest("--ref-policy", [args.ref_policy]))
    for name in REWARD_FLAGS:
        place = getattr(args, name, None)
        if place is not None and not is_function(place):
            flag = f"--{name.replace('_', '-')}"
            models[name.removesuffix("_model")] = frozen(ScalarModel, largest(flag, [place]))
    of_pairs = ("model", "reference") if "model" in models else ("reward", "gold")
    single = tuple(role for role in models if role not in of_pairs or "policy" in models)
    phases = (
        Phase("sampling", sample, tuple(role for role in models if role == "policy"), "batch_size"),
        Phase("scoring", score, single, "batch_size"),
        Phase("ranking", score, tuple(role for role in models if role in of_pairs), "batch_size", responses=2),
    )
    encoder = getattr(args, "encoder", None)
    return Work(
        models=models,
        phases=tuple(phase for phase in phases if phase.roles),
        on_call=on_call,
        flags=Flags(batch_size=args.batch_size, offload=args.offload),
        dtype=args.dtype,
        query_length=query_length,
        response_length=response_length,
        notes=(f"(--encoder {encoder} is not counted)",) if encoder else (),
    )


def num_weights(config: GPTConfig) -> int:
    """Without biases and norms: to compare sizes."""
    return (
        config.n_layer * config.d_model * (4 * config.d_model + 2 * config.d_mlp) + config.vocab_size * config.d_model
    )
