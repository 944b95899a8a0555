"""Settings, models and scores that don't fit together are refused here, in one sentence."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.processor import has_int8_products
from nanorlhf import distributed
from nanorlhf.checkpoint import read_config
from nanorlhf.dataset import Demonstration, Rows
from nanorlhf.errors import InputError
from nanorlhf.model import GPTConfig
from nanorlhf.reward import is_function, places
from nanorlhf.t5 import T5Config
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer


def check_sft(args: Any, config: GPTConfig) -> None:
    """Settings of SFT and the model that they start from."""
    longest = args.max_query_length + args.max_response_length
    if longest > config.n_ctx:
        raise InputError(
            f"--max-query-length plus --max-response-length is {longest}, more than the {config.n_ctx} positions "
            f"of {args.model}: lower one of them."
        )
    if isinstance(config, T5Config) and args.loss_on == "all":
        raise InputError("--loss-on all: an encoder-decoder predicts no token of the query: pass --loss-on response.")


def check_rollouts(args: Any) -> int:
    """Settings of a program that trains on rollouts; returns the number of updates."""
    B, world, num_minibatches = args.batch_size, distributed.world_size(), getattr(args, "num_minibatches", 1)
    if B % (num_minibatches * world):
        raise InputError(
            f"--batch-size {B} can't be cut into --num-minibatches {num_minibatches} for {world} process(es): make it "
            f"a multiple of {num_minibatches * world}."
        )
    if args.total_episodes < B:
        raise InputError(f"--total-episodes {args.total_episodes} is less than one --batch-size {B}: raise it.")
    if args.temperature <= 0:
        raise InputError(f"--temperature {args.temperature}: a rollout samples, so it must be above 0.")
    return args.total_episodes // B


def check_ppo(args: Any) -> int:
    """Settings of PPO, which needs exactly one reward scheme; returns the number of updates."""
    checks_code = args.compiler or args.discriminator is not None
    if args.reward_model is None and args.reward is None and not checks_code:
        raise InputError("--reward-model None leaves nothing to score with: name a reward model or a --reward.")
    if checks_code and (args.rows != "code" or args.reward is not None or args.reward_model is not None):
        raise InputError(
            "--compiler and --discriminator score programs by themselves: pass --rows code --reward-model None, and no "
            "--reward."
        )
    if args.freeze_discriminator and args.discriminator is None or not args.localise and not args.compiler:
        raise InputError("--freeze-discriminator needs a --discriminator, --no-localise a --compiler: leave them out.")
    if args.share_trunk and (args.tune != "lora" or args.value_model is not None or args.shard != "none"):
        raise InputError(
            "--share-trunk keeps the policy's frozen weights for the value model too: pass --tune lora, and neither "
            "--value-model nor --shard."
        )
    check_ensemble(args)
    check_advantages(args)
    check_sampler(args)
    return check_rollouts(args)


def check_ensemble(args: Any) -> None:
    if args.ensemble != "mean" and len(places(args.reward_model)) < 2:
        raise InputError(f"--ensemble {args.ensemble} needs several models in --reward-model: name them, or omit it.")


def check_sampler(args: Any) -> None:
    """The flags that make the sampler another model than the policy."""
    on_gpu = args.device.startswith("cuda") or args.device == "auto" and torch.cuda.is_available()
    if args.rollout_dtype == "int8" and (on_gpu or not has_int8_products()):
        here = "on a GPU" if on_gpu else "on this processor, which has no VNNI"
        raise InputError(f"--rollout-dtype int8 isn't there {here}: pass bfloat16 or same.")
    if args.rollout_url is not None and (args.rollout_dtype != "same" or args.top_p != 1):
        raise InputError("--rollout-url: dtype and filters are the server's: leave out --rollout-dtype and --top-p.")
    if args.top_p == 0:
        raise InputError("--top-p 0 would sample the most probable token alone: make it larger.")
    if args.sync_every > 1 and args.shard != "none" and args.rollout_url is None:
        raise InputError(f"--sync-every {args.sync_every} keeps a whole copy of the policy: leave out --shard.")
    if args.importance_correction == "tis" and args.rollout_logprobs == "sampler":
        raise InputError(
            "--importance-correction tis weighs what the ratio leaves out, and with --rollout-logprobs sampler that is "
            "nothing: pass one of them."
        )


def check_advantages(args: Any) -> None:
    """The flags that fit an estimator of advantages; only gae has a value model."""
    name, k, B = args.advantages, args.samples_per_query, args.batch_size
    if B % k:
        raise InputError(f"--batch-size {B} holds no whole groups of --samples-per-query {k}: make it a multiple.")
    if name != "grpo" and args.grpo_scale != "std":
        raise InputError(f"--grpo-scale {args.grpo_scale} is of --advantages grpo, not {name}: leave it out.")
    if name == "gae":
        return
    if args.value_model is not None or args.share_trunk or args.whiten_rewards or not args.whiten_advantages:
        raise InputError(
            f"--advantages {name} has no value model and a scale of its own: leave out --value-model, --share-trunk, "
            "--whiten-rewards and --no-whiten-advantages."
        )
    if name in ("rloo", "grpo") and k < 2:
        raise InputError(f"--advantages {name} compares a query's responses: pass --samples-per-query 2 or more.")
    if name in ("rloo", "grpo") and args.gamma != 1:
        raise InputError(f"--gamma {args.gamma}: --advantages {name} takes a response as a whole: pass --gamma 1.")


def check_positions(
    rows: Rows[Demonstration], response_length: int, config: GPTConfig, where: str, written: bool = False
) -> int:
    """The longest query and response must fit into the policy's positions; returns their length in tokens.

    written: the rows' own responses, which may be longer than the sampled ones, are read as well
    """
    longest = int(rows.lengths[:, 0].max()) + response_length
    if written:
        longest = max(longest, int(rows.lengths.sum(1).max()))
    if longest > config.n_ctx:
        raise InputError(
            f"the longest query and --response-length make {longest} tokens, more than the {config.n_ctx} positions of "
            f"{where}: lower --response-length, or --max-query-length where the data is made."
        )
    return longest


def check_models(args: Any, tokenizer: Tokenizer, config: GPTConfig, rows: Rows[Demonstration]) -> None:
    """Policy, tokenizer and queries of PPO, and the models beside the policy, must fit together."""
    check_vocabulary(tokenizer, config.vocab_size, args.sft)
    longest = check_positions(rows, args.response_length, config, args.sft)
    beside = [("--reward-model", place) for place in places(args.reward_model)]
    for flag, place in (*beside, ("--value-model", args.value_model), ("--gold", args.gold)):
        check_beside(flag, place, tokenizer, longest, args.sft)


def check_beside(flag: str, where: str | None, tokenizer: Tokenizer, longest: int, sft: str) -> None:
    """A model beside the policy must share its tokenizer and have enough positions; its weights are not read.

    where may also be None or a function, FILE.py:FUNCTION.
    """
    if where is None or is_function(where):
        return
    if load_tokenizer(where).backend.get_vocab() != tokenizer.backend.get_vocab():
        raise InputError(f"{flag} {where}: its tokenizer differs from that of {sft}: name a model with the same one.")
    n_ctx = read_config(where).n_ctx
    if longest > n_ctx:
        raise InputError(
            f"the longest query and --response-length make {longest} tokens, more than the {n_ctx} positions of "
            f"{flag} {where}: name another."
        )


def check_scores(scores: Tensor, name: str, update: int, out: Path) -> None:
    """The scores (B,) that a reward scheme gave to a rollout must be finite, or the update would spoil the weights."""
    if not scores.isfinite().all():
        raise InputError(
            f"{name} gave a score that is not finite at update {update}: fix it; {out} keeps the last checkpoint "
            "before it."
        )
