"""Settings shared by the training programs; each program's `Args` adds its own and overrides defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanorlhf.cli import (
    Beta,
    Count,
    Epochs,
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    NumWorkers,
    PositiveFloat,
    PositiveInt,
    Seed,
    TemperatureOrGreedy,
    Workers,
)
from nanorlhf.peft import LORA_RANK, QUERY_AND_VALUE, Target
from nanorlhf.training.moving import ElasticResetSettings, ReferenceSettings

READ_FACTOR = 4
"""rows per forward pass without a gradient, per row of a micro-batch: it keeps no activations"""


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Settings of AdamW other than its learning rate."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """decay rates of the two moments"""
    eps: PositiveFloat = 1e-5
    """added to the root of the second moment; PyTorch's default is 1e-8"""
    weight_decay: NonNegativeFloat = 0.01
    """per step, times the learning rate"""


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Settings shared by all training runs."""

    data: Path
    """directory with the JSON Lines files"""
    out: Path
    """run directory: checkpoint, metrics, samples, state"""
    seed: Seed = 44413
    """random seed of new weights, data order and samples"""
    device: str = "auto"
    """auto, cpu, cuda (under torchrun one GPU per process) or, for a single process, cuda:N or mps"""
    processes: Workers = 1
    """on a CPU, the number of single-threaded processes that share every batch: faster than threads for small models"""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """bfloat16: forward passes under autocast; weights and optimizer stay float32; auto: bfloat16 on a
    GPU that supports it or a processor with AMX, else float32"""

    batch_size: Count
    """rows per optimizer step (in PPO: responses per rollout), over all ranks"""
    micro_batch_size: PositiveInt
    """rows per forward and backward pass on each rank; passes without a gradient read four times as many. Changes
    memory use, not the result"""
    lr: NonNegativeFloat = 3e-6
    """peak learning rate of AdamW"""
    adam: AdamSettings = AdamSettings()
    max_query_length: PositiveInt = 512
    """longest query in tokens"""

    track: Literal["tensorboard", "wandb", "trackio", "none"] = "tensorboard"
    """where the metrics go besides metrics.jsonl (docs/long_runs.md)"""
    save_every: PositiveInt = 500
    """steps (in PPO: updates) between checkpoints"""
    keep_every: PositiveInt | None = None
    """steps (in PPO: updates) between checkpoints that stay in OUT/checkpoints; None: keep only the last one"""
    resume: bool = False
    """continue from the last state in --out"""
    overwrite: bool = False
    """replace an existing run in --out"""

    @property
    def read_size(self) -> int:
        """Rows per forward pass without a gradient."""
        return READ_FACTOR * self.micro_batch_size


@dataclass(frozen=True, kw_only=True)
class TrainingArgs(RunArgs):
    """Settings of the stages that train a language model or a scalar model: SFT, reward model, PPO."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate decays"""
    checkpoint_activations: bool = False
    """recompute each block in the backward pass: less memory, a third more time"""
    compile: bool = False
    """compile the models' blocks with torch.compile: fewer, larger kernels on a GPU, after a start of about a minute.
    Sampling and passes that share queries (comparisons, groups) are not compiled; can't be combined with --shard"""
    shard: Literal["none", "fsdp", "hsdp"] = "none"
    """fsdp: shard weights, gradients and optimizer state across all ranks; hsdp: shard across the ranks of a node and
    replicate across nodes; none: replicate on each rank (DDP)"""


@dataclass(frozen=True, kw_only=True)
class LoRAArgs:
    """Settings of the stages that can train low-rank updates instead of all weights."""

    tune: Literal["full", "lora"] = "full"
    """full: train all weights; lora: train low-rank updates of some layers, and a scalar model's head. It needs a
    higher --lr than full, often ten times as high"""
    lora_rank: Count = LORA_RANK
    """rank of LoRA's updates, which are scaled by 2 (alpha is twice the rank)"""
    lora_targets: tuple[Target, ...] = QUERY_AND_VALUE
    """layers that LoRA updates in each block: q, k, v and out in attention; gate, up and down in the MLP"""


@dataclass(frozen=True, kw_only=True)
class SupervisedArgs(LoRAArgs, TrainingArgs):
    """Settings of the two supervised stages: SFT and reward model."""

    num_epochs: Epochs = 1.0
    """passes over the training rows"""
    warmup_steps: NonNegativeInt = 0
    """optimizer steps of linear warm-up"""
    decay_vectors: bool = True
    """apply weight decay to biases and layer norms too, as PyTorch does by default"""
    max_grad_norm: PositiveFloat | None = None
    """maximum gradient norm; None: no clipping"""
    max_response_length: PositiveInt
    """longest response in tokens, EOS included"""
    eval_every: PositiveInt = 100
    """steps between validations"""


@dataclass(frozen=True, kw_only=True)
class RolloutArgs(LoRAArgs, TrainingArgs):
    """Settings of the programs that train a policy on its own samples: PPO, GRPO, RLCF and its baselines."""

    sft: str
    """initial policy, and reference policy of the KL: checkpoint directory or Hub id"""

    total_episodes: PositiveInt = 1_000_000
    """responses sampled over the whole run"""
    schedule: Literal["cosine", "linear", "constant"] = "linear"
    save_every: PositiveInt = 100
    offload: bool = False
    """keep frozen models in CPU memory and copy each to the device once per rollout"""
    response_length: PositiveInt = 53
    """maximum number of sampled tokens, EOS included"""
    temperature: TemperatureOrGreedy = 0.7
    """divides the logits in the rollout, the reference and the update"""


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Settings of the sampler and of the correction for its mismatch with the policy (docs/mismatch.md)."""

    url: str | None = None
    """http://HOST:PORT of a vLLM or SGLang server that samples the responses and reads new weights from --out"""
    dtype: Literal["same", "bfloat16", "int8"] = "same"
    """dtype of the sampler's weights, rounded once per rollout; int8 needs a CPU with VNNI"""
    top_p: Fraction = 1.0
    """sample from the most probable tokens whose total probability reaches this; the update uses the full
    distribution"""
    sync_every: PositiveInt = 1
    """updates between copies of the policy to the sampler, which is stale in between"""
    correction: Literal["none", "tis", "icepop", "sequence_tis", "sequence_mis", "sampler_logprobs"] = "none"
    """for a sampler that differs from the policy. tis: weight each token by its old probability divided by the
    sampler's, truncated to 2 (Yao et al. 2025); icepop: the same, but 0 outside 0.5 to 5 (Ling Team 2025); sequence_tis
    and sequence_mis: a weight per response, truncated to 2, or 0 above it (Liu et al. 2025); sampler_logprobs: take the
    ratio to the sampler's log-probabilities (as in the paper), not to those recomputed by the training forward pass
    (first ratio 1 up to rounding)"""


@dataclass(frozen=True, kw_only=True)
class RewardArgs(RolloutArgs):
    """Settings of PPO's and GRPO's sampler, reference and rewards."""

    sampler: SamplerSettings = SamplerSettings()
    reference: ReferenceSettings = ReferenceSettings()
    elastic_reset: ElasticResetSettings = ElasticResetSettings()
    reward_model: str | tuple[str, ...] | None = "runs/tldr/rm"
    """scores the responses; PPO's value model starts as a copy of it (of the first, if there are several); None: pass
    --reward"""
    reward: str | tuple[str, ...] | None = None
    """replaces --reward-model (docs/rewards.md); one or more of: FILE.py:FUNCTION, a reward model's directory,
    teacher:CHECKPOINT, exact_teacher:CHECKPOINT, judge:FILE.toml, tests (of programs) or tests:FILE.toml"""
    reward_weights: Literal["mean", "min", "uncertainty"] | tuple[FiniteFloat, ...] | None = None
    """how to combine several scores: a weight for each (None: 1); for several reward models: mean (None), min, or
    uncertainty, which is mean - 0.1 * variance (Coste et al. 2023)"""
    reward_workers: NumWorkers = 0
    """processes per rank that call the functions of --reward; 0: call them in the training process"""
    trace: NonNegativeInt = 0
    """responses whose tensors are saved in OUT/trace at about ten updates, for nanorlhf.report.microscope; 0: off"""
    gold: str | None = None
    """gold score to log, never trained on: FILE.py:FUNCTION(query, response), or a larger reward model"""
