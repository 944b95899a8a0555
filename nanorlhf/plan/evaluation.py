"""Models, phases and memory of an evaluation.

Policies are loaded one after the other, so the largest one counts. The reference and the reward models stay loaded,
unless --offload moves them to CPU memory. Not counted: an --encoder.
"""

from nanorlhf.checkpoint import is_reward_model
from nanorlhf.evals import reward_models, summaries
from nanorlhf.evals.settings import EvalArgs, PolicyArgs, best_of, named_policies, with_kept_checkpoints
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.plan.memory import Flags, Model, Phase, Rows, Work, memory_plan, read_shape, sized_model
from nanorlhf.rewards.weighted_sum import is_function

MACHINES = ((1, 80), (1, 141))  # an evaluation is one process
REWARD_FLAGS = ("reward_model", "regression_model", "contrastive_model", "gold")


def eval_plan(args: EvalArgs) -> str:
    """Return the plan of an evaluation. Raises InputError if a model's shape is unknown."""
    return memory_plan(eval_work(args), MACHINES)


def eval_work(args: EvalArgs) -> Work:
    """Return the models and phases of an evaluation."""
    query_length = args.max_query_length
    if isinstance(args, reward_models.Args) and (args.data / "comparisons.cnndm.jsonl").exists():
        query_length = max(query_length, args.max_cnndm_query_length)
    response_length = max(getattr(args, name, 0) for name in ("response_length", "max_response_length"))
    num_responses = 2 if isinstance(args, reward_models.Args) else 1  # a row is a pair
    rows = Rows(query_length, response_length, args.dtype, num_responses)
    models: dict[str, Model] = {}
    phases: list[Phase] = []

    def add(name: str, kind: type[GPT | ScalarModel], flag: str, *paths: str) -> None:
        """Add the largest of several models, and a phase for its forward passes."""
        shapes = [read_shape(flag, path, query_length + response_length) for path in paths]
        models[name] = max((sized_model(kind, shape, rows) for shape in shapes), key=lambda model: model.parameters)
        phases.append(Phase(name, "read", (name,), args.batch_size, "batch_size"))

    if isinstance(args, PolicyArgs):
        words = with_kept_checkpoints(args.policies)
        policies = [best_of(path)[1] for path in named_policies(words).values()]
        add("policy", GPT, "--policies", *policies)
        phases.append(Phase("sampling", "sample", ("policy",), args.batch_size, "batch_size"))
        if isinstance(args, summaries.Args):
            add("reference", GPT, "--policies", policies[0])
    if isinstance(args, reward_models.RewardModelArgs):
        paths = args.reward_models[1::2]
        has_policy = not all(map(is_reward_model, paths))  # evaluated by its implicit reward
        add("model", GPT if has_policy else ScalarModel, "--reward-models", *paths)
        if has_policy:
            add("reference", GPT, "--ref-policy", args.ref_policy)
    for name in REWARD_FLAGS:
        path = getattr(args, name, None)
        if path is not None and not is_function(path):
            add(name.removesuffix("_model"), ScalarModel, f"--{name.replace('_', '-')}", path)
    flags = Flags({"batch_size": args.batch_size}, offload=args.offload)
    return Work(models, tuple(phases), flags, rows)
