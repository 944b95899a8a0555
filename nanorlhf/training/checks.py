"""Checks that settings, models and scores fit together. All of them raise InputError."""

from pathlib import Path

import torch
from torch import Tensor

from kernels.processor import has_int8_matmul
from nanorlhf import distributed
from nanorlhf.checkpoint import read_config
from nanorlhf.config import GPTConfig
from nanorlhf.dataset import Demonstration, Rows
from nanorlhf.errors import InputError
from nanorlhf.rewards.weighted_sum import Weights, is_function, items, scoring_models
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from nanorlhf.training.settings import RewardArgs


def check_sft(query_length: int, response_length: int, loss_on: str, model: str, config: GPTConfig) -> None:
    """Check SFT's lengths and loss against the model that it starts from."""
    longest = query_length + response_length
    if longest > config.n_ctx:
        raise InputError(
            f"--max-query-length plus --max-response-length is {longest}, more than the {config.n_ctx} positions "
            f"of {model}."
        )
    if config.num_decoder_blocks and loss_on == "all":
        raise InputError("--loss-on all: an encoder-decoder predicts no query tokens; pass --loss-on response.")


def number_of_updates(
    total_episodes: int, batch_size: int, num_minibatches: int, temperature: float, samples_per_query: int = 1
) -> int:
    """Return the number of rollouts in a run.

    Raises InputError if a batch can't be divided among minibatches and processes.
    """
    share = num_minibatches * distributed.world_size()
    if batch_size % share:
        raise InputError(
            f"--batch-size {batch_size} must be a multiple of {share}: --num-minibatches {num_minibatches} times "
            f"{distributed.world_size()} process(es)."
        )
    if batch_size % samples_per_query:
        raise InputError(
            f"--batch-size {batch_size} must be a multiple of --samples-per-query {samples_per_query}: all responses "
            "to a query belong to one batch."
        )
    if total_episodes < batch_size:
        raise InputError(f"--total-episodes {total_episodes} is less than one --batch-size {batch_size}.")
    if temperature <= 0:
        raise InputError(f"--temperature {temperature}: rollouts need a temperature above 0.")
    return total_episodes // batch_size


def check_reward(
    reward_model: str | tuple[str, ...] | None, reward: str | tuple[str, ...] | None, weights: Weights
) -> None:
    """Check that there is a reward, and that --reward-weights matches it."""
    reward_models, rewards = items(reward_model), items(reward)
    if not reward_models and not rewards:
        raise InputError("--reward-model None leaves nothing to score with: pass a reward model or --reward.")
    scorers = rewards or reward_models
    if isinstance(weights, str) and rewards:
        raise InputError(
            f"--reward-weights {weights} works with --reward-model only: with --reward, pass one weight for each."
        )
    if isinstance(weights, str) and len(scorers) < 2:
        raise InputError(f"--reward-weights {weights} needs several models in --reward-model.")
    if isinstance(weights, tuple) and len(weights) != len(scorers):
        flag = "--reward" if rewards else "--reward-model"
        words = " ".join(f"{weight:g}" for weight in weights)
        raise InputError(f"--reward-weights {words}: expected {len(scorers)}, one for each {flag}.")


def check_value_model(value_model: str | None, tune: str, shard: str) -> None:
    """Check that a shared value model comes with a policy trained with LoRA, whose base weights are frozen."""
    if value_model == "shared" and (tune != "lora" or shard != "none"):
        raise InputError("--value-model shared uses the policy's frozen weights: it needs --tune lora and no --shard.")


def check_sampler(args: RewardArgs) -> None:
    """Check the settings that make the sampler differ from the policy."""
    sampler = args.sampler
    on_gpu = args.device.startswith("cuda") or args.device == "auto" and torch.cuda.is_available()
    if sampler.dtype == "int8" and (on_gpu or not has_int8_matmul()):
        where = "on a GPU" if on_gpu else "on this processor, which has no VNNI"
        raise InputError(f"--sampler.dtype int8 is not supported {where}: pass bfloat16 or same.")
    if sampler.url is not None and (sampler.dtype != "same" or sampler.top_p != 1):
        raise InputError("--sampler.url can't be combined with --sampler.dtype or --sampler.top-p.")
    if sampler.top_p == 0:
        raise InputError("--sampler.top-p 0 would always sample the most probable token; use a value above 0.")
    if sampler.sync_every > 1 and args.shard != "none" and sampler.url is None:
        raise InputError(
            f"--sampler.sync-every {sampler.sync_every} can't be combined with --shard: it keeps a full copy of the "
            "policy."
        )


def check_moving(args: RewardArgs) -> None:
    """Check the settings of a moving reference and of Elastic Reset."""
    args.reference.check(args.tune, args.shard)
    args.elastic_reset.check(args.reference, args.tune, args.shard)


def check_positions(
    rows: Rows[Demonstration], response_length: int, config: GPTConfig, model: str, written: bool = False
) -> int:
    """Check that the longest query and response fit into the policy's positions, and return their length in tokens.

    written: also count the responses in the data, which may be longer than the sampled ones
    """
    longest = int(rows.lengths[:, 0].max()) + response_length
    if written:
        longest = max(longest, int(rows.lengths.sum(1).max()))
    if longest > config.n_ctx:
        raise InputError(
            f"the longest query and --response-length make {longest} tokens, more than the {config.n_ctx} positions of "
            f"{model}: lower --response-length, or prepare the data with a lower --max-query-length."
        )
    return longest


def check_policy(
    tokenizer: Tokenizer,
    config: GPTConfig,
    rows: Rows[Demonstration],
    policy: str,
    response_length: int,
    value_model: str | None = None,
) -> int:
    """Check policy, tokenizer, queries and value model; return the length of the longest query and response."""
    check_vocabulary(tokenizer, config.vocab_size, policy)
    longest = check_positions(rows, response_length, config, policy)
    if value_model != "shared":
        check_other_model("--value-model", value_model, tokenizer, longest, policy)
    return longest


def check_reward_models(args: RewardArgs, tokenizer: Tokenizer, longest: int) -> None:
    """Check that the scoring models fit the policy; a reward model that --reward replaces is not read."""
    for flag, path, _ in scoring_models(args.reward, args.reward_model):
        check_other_model(flag, path, tokenizer, longest, args.sft)
    check_other_model("--gold", args.gold, tokenizer, longest, args.sft)


def check_other_model(flag: str, path: str | None, tokenizer: Tokenizer, longest: int, policy: str) -> None:
    """Check that another model has the policy's tokenizer and enough positions, without reading its weights.

    path may also be None or FILE.py:FUNCTION, which need no check.
    """
    if path is None or is_function(path):
        return
    try:
        other = load_tokenizer(path)
    except InputError as error:
        if flag != "--reward-model" or Path(path).exists():
            raise
        sentence = str(error).rstrip(".")
        raise InputError(f"{flag} {sentence}: train one with train_rm.py, or pass --reward.") from error
    if other.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise InputError(f"{flag} {path}: its tokenizer differs from {policy}'s.")
    n_ctx = read_config(path).n_ctx
    if longest > n_ctx:
        raise InputError(
            f"the longest query and --response-length make {longest} tokens, more than the {n_ctx} positions of "
            f"{flag} {path}."
        )


def check_scores(scores: Tensor, name: str, update: int, out: Path) -> None:
    """Check that the scores (B,) of a rollout are finite, before an update writes NaN into the weights."""
    if not scores.isfinite().all():
        raise InputError(
            f"{name} gave a score that is not finite at update {update}; {out} keeps the last checkpoint before it."
        )
