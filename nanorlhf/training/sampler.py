"""The sampler of PPO's and GRPO's responses, and its mismatch with the policy (docs/mismatch.md)."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nanorlhf import distributed
from nanorlhf.batch import Batch, ScoreAt, sample
from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.generate import for_sampling, generate
from nanorlhf.model import GPT
from nanorlhf.ppo import importance_weights, masked_mean, response_sum
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.run import write_checkpoint
from nanorlhf.training.settings import RewardArgs

if TYPE_CHECKING:
    from nanorlhf.training.engine_client import Engine

TIS_CLIP = 2.0  # largest importance weight of --sampler.correction tis: Yao et al. 2025
MASKED = {"icepop": (0.5, 5.0), "sequence_mis": (0.0, TIS_CLIP)}  # weights that are kept; IcePop: Ling Team 2025
MAX_GAP = 0.2  # nats per token between an engine and the policy whose weights it has just loaded


class Sampler:
    """The policy itself by default; with other settings rounded, filtered, stale, or an engine at a URL."""

    engine: "Engine | None"

    def __init__(self, policy: GPT, tokenizer: Tokenizer, args: RewardArgs, score_at: ScoreAt):
        self.policy = policy
        self.tokenizer = tokenizer
        self.args = args
        self.settings = args.sampler
        self.score_at: ScoreAt = score_at
        self.source = policy  # the model that is sampled from
        self.engine = None
        self.engine_path = args.out / "rollout_weights"  # where an engine reads the parameters
        self.synced_at: int | None = None  # the last update at which this process sent parameters to the engine
        self.is_fresh = False  # whether it has the policy's parameters of this update
        if self.settings.url is not None:
            from nanorlhf.training.engine_client import Engine  # optional: most runs sample here

            self.engine = Engine(self.settings.url)
        elif self.settings.sync_every > 1:
            self.source = copy.deepcopy(policy).requires_grad_(False)

    def state(self) -> dict[str, nn.Module]:
        """Return what a run must track: the stale copy of the policy, if there is one."""
        return {} if self.source is self.policy else {"sampler": self.source}

    def sample(self, rows: list[Demonstration], uniforms: Tensor, update: int) -> Batch:
        """Sample a response to each row's query; uniforms (B, T) are the random numbers of each row."""
        self.sync(update)
        args, tokenizer = self.args, self.tokenizer
        device = self.policy.lm_head.weight.device
        with self.precision(device):
            return sample(
                self.writer(),
                rows,
                uniforms,
                device,
                args.temperature,
                args.read_size,
                tokenizer.eos_id,
                tokenizer.pad_id,
                self.score_at,
            )

    def sync(self, update: int) -> None:
        """Copy the policy's parameters to the sampler every `sync_every` updates.

        An engine gets them at most once per update, and always at the first update of a resumed run, because its
        weights are unknown then.
        """
        self.is_fresh = self.synced_at in (None, update) or update % self.settings.sync_every == 0
        if self.engine is not None and self.is_fresh and self.synced_at != update:
            write_checkpoint(self.policy, self.engine_path, self.tokenizer)
            if distributed.rank() == 0:
                self.engine.reload(self.engine_path.absolute())
            distributed.barrier()
            self.synced_at = update
        elif self.source is not self.policy and update % self.settings.sync_every == 0:
            self.source.load_state_dict(self.policy.state_dict())

    def precision(self, device: torch.device) -> Any:
        """Return the autocast context for the rounded parameters; for `same`, leave autocast unchanged."""
        dtype = self.settings.dtype
        if dtype == "same":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")

    def writer(self) -> Any:
        """Return `generate` with the current parameters; gather a sharded policy once per rollout, not per token."""
        if self.engine is not None:
            forbidden = self.policy.forbidden
            ids = [] if forbidden is None else forbidden.nonzero().flatten().tolist()
            vocab_size = self.policy.config.vocab_size
            return partial(
                self.engine.write,
                vocab_size=vocab_size,
                forbidden=frozenset(ids),
                stop_ids=self.tokenizer.stop_ids,
            )
        model = for_sampling(distributed.unshard(self.source), self.settings.dtype)
        return partial(
            generate,
            model,
            top_p=self.settings.top_p,
            filtered_logprobs=True,
            stop_ids=self.tokenizer.stop_ids,
        )

    def correct(self, batch: Batch) -> tuple[Tensor | float, dict[str, float]]:
        """Correct for a sampler that differs from the policy, once the batch has both log-probabilities.

        --sampler.correction tis, icepop, sequence_...: return the weights (B, T) of the advantages; otherwise return 1
        --sampler.correction sampler_logprobs: take the batch's ratio to the sampler
        The metrics report the gap between the two. Raises InputError for an engine that has other parameters.
        """
        correction, actions = self.settings.correction, batch.actions
        gap = masked_mean((batch.sampled_logprobs - batch.logprobs).abs(), actions).item()
        weights, truncated = importance_weights(batch.logprobs, batch.sampled_logprobs, actions, TIS_CLIP)
        metrics = {
            "policy/sampler_gap": gap,
            "policy/tis_weight": masked_mean(weights, actions).item(),
            "policy/tis_clipped": truncated.item(),
        }
        if self.engine is not None and self.is_fresh and not gap <= MAX_GAP:
            raise InputError(
                f"--sampler.url {self.engine.url}: its logprobs are {gap:.2f} nats per token off the policy's: "
                f"check that it has loaded {self.engine_path} and divides by the temperature (vLLM: --logprobs-mode "
                "processed_logprobs)."
            )
        if correction == "sampler_logprobs":
            batch.ratio_to_sampler = True
        if correction in ("none", "sampler_logprobs"):
            return 1.0, metrics
        old, sampled = batch.logprobs, batch.sampled_logprobs
        if correction.startswith("sequence"):  # one weight per response
            old, sampled = response_sum(old, actions), response_sum(sampled, actions)
        least, most = MASKED.get(correction, (0.0, TIS_CLIP))
        weights, outside = importance_weights(old, sampled, actions, most, least, correction in MASKED)
        return weights, metrics | ({"policy/masked": outside.item()} if correction in MASKED else {})
