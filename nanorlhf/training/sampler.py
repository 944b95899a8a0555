"""What samples the responses of PPO and GRPO, and how far it is from the policy (docs/mismatch.md)."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernels import processor
from kernels.processor import CLEAR
from nanorlhf import distributed
from nanorlhf.batch import Batch, ScoreAt, sample
from nanorlhf.dataset import Demonstration
from nanorlhf.errors import InputError
from nanorlhf.generate import for_sampling, generate
from nanorlhf.model import GPT
from nanorlhf.ppo import importance_weights, masked_mean
from nanorlhf.tokenizer import Tokenizer
from nanorlhf.training.run import write_checkpoint
from nanorlhf.training.settings import RewardArgs

if TYPE_CHECKING:
    from nanorlhf.training.engine import Engine

TIS_CLIP = 2.0  # largest importance weight of --sampler.correction tis: Yao et al. 2025
MAX_GAP = 0.2  # nats per token between an engine and the policy, right after it got the policy's weights


class Sampler:
    """The policy itself, exactly, unless a setting says otherwise: rounded, filtered, stale, or an engine by URL."""

    engine: "Engine | None"

    def __init__(self, policy: GPT, tokenizer: Tokenizer, args: RewardArgs, score_at: ScoreAt):
        self.policy = policy
        self.tokenizer = tokenizer
        self.args = args
        self.settings = args.sampler
        self.score_at: ScoreAt = score_at
        self.source = policy  # whose parameters are sampled from
        self.engine = None
        self.engine_path = args.out / "rollout_weights"  # where an engine reads the parameters
        self.synced_at: int | None = None  # the last update at which the engine got parameters from this process
        self.is_fresh = False  # it has the policy's parameters of this update
        if self.settings.url is not None:
            from nanorlhf.training.engine import Engine  # optional: most runs sample here

            self.engine = Engine(self.settings.url)
        elif self.settings.sync_every > 1:
            self.source = copy.deepcopy(policy).requires_grad_(False)
        size = processor.size_class(policy.config.d_model * policy.config.d_mlp)
        slower = processor.chosen.rollouts.get(f"{self.settings.dtype} {size}", 1.0)
        if slower * CLEAR > 1 and policy.lm_head.weight.is_cpu and distributed.rank() == 0:
            print(
                f"--sampler.dtype {self.settings.dtype}: on this processor a decode step's products take {slower:.1f} "
                "times float32's time, as measured"
            )

    def state(self) -> dict[str, nn.Module]:
        """What a run tracks: a stale copy of the policy."""
        return {} if self.source is self.policy else {"sampler": self.source}

    def sample(self, rows: list[Demonstration], uniforms: Tensor, update: int) -> Batch:
        """A response to each row's query; uniforms (B, T), a row's own random numbers."""
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

        To an engine also at the first update of a resumed run, as what it holds is not known; once per update.
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
        """Autocast as the rounded parameters need it; for `same`, whatever it is."""
        dtype = self.settings.dtype
        if dtype == "same":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")

    def writer(self) -> Any:
        """`generate` with the parameters of now: a sharded policy is gathered once per rollout, not per token."""
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
        """Account for a sampler that differs from the policy, once the batch has both log-probabilities.

        --sampler.correction tis: returns the weights (B, T) of the advantages; else 1
        --sampler.correction sampler_logprobs: the batch's ratio is taken to the sampler
        The metrics report how far apart the two are. Raises InputError for an engine that has other parameters.
        """
        settings = self.settings
        gap = masked_mean((batch.sampled_logprobs - batch.logprobs).abs(), batch.actions).item()
        weights, truncated = importance_weights(batch.logprobs, batch.sampled_logprobs, batch.actions, TIS_CLIP)
        metrics = {
            "policy/sampler_gap": gap,
            "policy/tis_weight": masked_mean(weights, batch.actions).item(),
            "policy/tis_clipped": truncated.item(),
        }
        if self.engine is not None and self.is_fresh and not gap <= MAX_GAP:
            raise InputError(
                f"--sampler.url {self.engine.url}: its logprobs are {gap:.2f} nats per token off the policy's: "
                f"check that it has loaded {self.engine_path}, and divides by the temperature (vLLM: --logprobs-mode "
                "processed_logprobs)."
            )
        if settings.correction == "sampler_logprobs":
            batch.ratio_to_sampler = True
        return weights if settings.correction == "tis" else 1.0, metrics
