"""Stage 3, PPO: the policy writes, the reward model scores, the policy changes a little, and again.

Papers: The N+ Implementation Details of RLHF with PPO, details 20 to 25 and Table 7; Reinforcement learning for
question answering in programming domain (SO), whose KL coefficient adapts; Coarse-Tuning Models of Code with
Reinforcement Learning Feedback (RLCF), where a compiler cuts a program at its first error and a discriminator scores
the others.
In: the queries of sft.train.jsonl, the policy of stage 1, the reward model of stage 2 (or a rule of one's own); for
RLCF code.train.jsonl and a discriminator.
Out: the policy, in the same format; its value model in value_model/, the discriminator in discriminator/.

    python train_ppo.py                                                        # the embedded default, recipe tiny
    python train_ppo.py tldr --sft runs/tldr/sft --reward-model runs/tldr/rm --data runs/tldr/data --dtype bfloat16
    torchrun --nproc-per-node 8 train_ppo.py tldr --sft runs/tldr/sft --reward-model runs/tldr/rm
    python train_ppo.py stackoverflow --reward-model runs/stackoverflow/rm_regression
    python train_ppo.py rlcf --discriminator runs/rlcf/discriminator
    python train_ppo.py --reward my_rule.py:score                              # any function of two lists of texts
"""

import copy
import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data import site, tiny, town
from kernels import gae, k2, k3, penalised_gae
from nanorlhf import distributed
from nanorlhf.checkpoint import load_gpt, load_scalar, read_config, save, scalar_from_gpt
from nanorlhf.cli import check_ranges, command_line
from nanorlhf.code.baselines import bipolar_ramp_advantages, coderl_advantages, coderl_critic, coderl_critic_loss
from nanorlhf.code.discriminator import Discriminator, grounding, load_discriminator, save_discriminator
from nanorlhf.code.error_profile import CATEGORIES, error_profile
from nanorlhf.code.feedback import Checked, check_responses, compiler_for
from nanorlhf.code.localisation import truncate_at_error
from nanorlhf.dataset import Demonstration, batch_indices, load_demonstrations, load_programs
from nanorlhf.errors import InputError
from nanorlhf.generate import generate
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.padding import left_pad, micro_batches, needed_columns, right_pad
from nanorlhf.ppo import (
    AdaptiveKL,
    FixedKL,
    eos_masks,
    masked_mean,
    policy_loss,
    value_loss,
    whiten,
)
from nanorlhf.reward import end_scores, load_rule
from nanorlhf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer, token_bytes
from nanorlhf.training.memory_plan import ppo_plan
from nanorlhf.training.optimizer import FiniteSteps, parameter_groups
from nanorlhf.training.resume import StopSignals, load_state
from nanorlhf.training.run import Run, check_output, check_weights
from nanorlhf.training.schedule import lr_factor


@dataclass(frozen=True, kw_only=True)
class Args:
    data: Path = Path("runs/tldr/data")
    """directory of sft.train.jsonl, whose queries are answered"""
    rows: Literal["sft", "code"] = "sft"
    """code: code.train.jsonl instead, whose responses complete programs"""
    out: Path = Path("runs/tldr/ppo")
    """run directory: policy, metrics, samples"""
    sft: str = "runs/tldr/sft"
    """the policy to start from and the reference of the KL: checkpoint directory or Hub id"""
    reward_model: str | None = "runs/tldr/rm"
    """scores the responses, and the value model starts as its copy; None where something else scores"""
    reward: str | None = None
    """FILE.py:FUNCTION, a rule that scores instead: function(queries, responses), two lists of texts -> numbers"""
    compiler: bool = False
    """[RLCF alg 1] static checks of the programs: -1 where one fails"""
    error_prone_jar: str | None = None
    """with --compiler, ErrorProne's jars as a class path: its errors count as javac's do"""
    localise: bool = True
    """a program that fails ends with the token to blame, which gets the -1; --no-localise: the last one does"""
    discriminator: str | None = None
    """scores the programs that pass, checkpoint directory; None with --compiler: they get 1"""
    freeze_discriminator: bool = False
    """don't train the discriminator against the policy"""
    discriminator_lr: float = 5e-7
    """peak learning rate of the discriminator's AdamW, one step a rollout"""
    value_model: str | None = None
    """the value model starts from this policy, which may be smaller, with a fresh head; None: from the reward model's
    copy, or where there is none from the policy"""
    objective: Literal["ppo", "bipolar_ramp", "coderl"] = "ppo"
    """the other two are what RLCF is compared with: one step a rollout, without KL"""
    tokenizer: str | None = None
    """directory, file or Hub id; None: the policy's"""
    seed: int = 44413
    """fixes the order of the queries, the samples and the minibatches"""
    device: str = "auto"
    """auto, cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: autocast of the forward passes; weights and optimizer stay float32"""

    total_episodes: int = 1_000_000
    """responses sampled over the whole run"""
    batch_size: int = 512
    """responses a rollout, over all processes"""
    num_minibatches: int = 1
    """optimizer steps an epoch"""
    num_ppo_epochs: int = 4
    """passes over each rollout"""
    micro_batch_size: int = 16
    """responses a forward and backward pass and process; changes memory, not the gradient"""
    checkpoint_activations: bool = False
    """keep each block's input only and run the block again in the backward pass: less memory, a third more time"""
    shard: Literal["none", "fsdp"] = "none"
    """fsdp: the processes share weights, gradients and optimizer state out among them; none: each has all (DDP)"""
    offload: bool = False
    """reference and reward model wait in the CPU's memory while policy and value model are trained"""
    rollout_batch_size: int = 64
    """responses sampled and scored at once by a process; changes memory, not the result"""
    lr: float = 3e-6
    """peak learning rate of AdamW, of policy and value model"""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """how the learning rate falls"""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """of AdamW"""
    adam_eps: float = 1e-5
    """[N+ 20] of AdamW; PyTorch's default is 1e-8"""
    weight_decay: float = 0.01
    """of AdamW; 0 makes it Adam"""
    max_skipped_steps: int = 3
    """steps in a row that are skipped because loss or gradient are not finite; one more ends the run"""

    max_query_length: int = 512
    """longest query in tokens"""
    response_length: int = 53
    """[N+ 4] tokens sampled at most, EOS included"""
    temperature: float = 0.7
    """divides the logits of the rollout, of the reference and of the update alike"""
    missing_eos_score: float | None = -1.0
    """[N+ 23] replaces the score of a response without EOS; None keeps the reward model's"""
    kl_coef: float = 0.05
    """beta, weight of the per-token KL in the reward (score units a nat)"""
    kl_target: float | None = None
    """nats a response that an adaptive beta steers to; None keeps beta fixed"""
    score_at: Literal["after_eos", "last_token"] = "after_eos"
    """which slot earns the score: that of the state behind EOS, or the last token's"""
    gamma: float = 1.0
    """discount a token"""
    lam: float = 0.95
    """lambda of GAE"""
    clip_range: float = 0.2
    """how far the ratio may leave 1"""
    value_clip_range: float | None = 0.2
    """how far a value may leave the rollout's (score units); None does not clip"""
    value_coef: float = 0.1
    """weight of the value loss"""
    whiten_rewards: bool = False
    """[N+ 24] divide rewards by their standard deviation: lowered win rates in the paper"""
    whiten_advantages: bool = True
    """[N+ 25] advantages to mean 0 and standard deviation 1"""
    rollout_logprobs: Literal["recomputed", "sampler"] = "recomputed"
    """old logprobs from the training forward pass (ratio exactly 1 at first) or from the sampling pass (the paper's)"""

    gold: Literal["tiny", "site", "town"] | None = None
    """log the true score that this embedded world gives each response; training never sees it"""
    gold_model: str | None = None
    """the same by a larger reward model, checkpoint directory or Hub id: it shows over-optimisation on real data"""
    sample_every: int = 10
    """updates between entries of samples.jsonl"""
    save_every: int = 100
    """updates between checkpoints"""
    keep_last: int = 2
    """checkpoints that --resume may go on from: if the newest is damaged, the one before it"""
    resume: bool = False
    """go on from the last checkpoint in --out"""
    overwrite: bool = False
    """replace a run that --out already holds"""
    plan: bool = False
    """print what each part takes of a GPU's memory and the flags that make it fit, from shapes alone; train nothing"""


RECIPES = {
    "tiny": (
        "the embedded world, on a CPU in minutes",
        Args(
            data=Path("runs/tiny/data"),
            out=Path("runs/tiny/ppo"),
            sft="runs/tiny/sft",
            reward_model="runs/tiny/rm",
            seed=1,
            total_episodes=2560,
            batch_size=64,
            micro_batch_size=32,
            lr=3e-4,
            max_query_length=80,
            response_length=24,
            gold="tiny",
        ),
    ),
    "tldr": ("N+ Table 7", Args()),
    "stackoverflow": (
        "SO: adaptive KL, buffer 64, batch 16; either reward model",
        Args(
            data=Path("runs/stackoverflow/data"),
            out=Path("runs/stackoverflow/ppo"),
            sft="runs/stackoverflow/sft",
            reward_model="runs/stackoverflow/rm_regression",
            total_episodes=27_776,  # not in the paper: its 6,946 questions four times
            batch_size=64,
            num_minibatches=4,
            rollout_batch_size=64,
            lr=1.41e-5,
            schedule="constant",
            adam_betas=(0.9, 0.95),
            adam_eps=1e-8,
            weight_decay=0.0,
            response_length=256,
            temperature=1.0,
            missing_eos_score=None,
            kl_coef=0.2,  # [SO ppo] it adapts
            kl_target=6.0,
            score_at="last_token",
        ),
    ),
    "stackoverflow-tiny": (
        "the embedded Q&A site, on a CPU in minutes",
        Args(
            data=Path("runs/site/data"),
            out=Path("runs/site/ppo"),
            sft="runs/site/sft",
            reward_model="runs/site/rm_regression",
            seed=1,
            total_episodes=2560,
            batch_size=64,
            num_minibatches=4,
            micro_batch_size=16,
            lr=1e-4,
            schedule="constant",
            adam_betas=(0.9, 0.95),
            adam_eps=1e-8,
            weight_decay=0.0,
            max_query_length=64,
            response_length=48,
            temperature=1.0,
            missing_eos_score=None,
            kl_coef=0.05,
            kl_target=6.0,
            score_at="last_token",
            gold="site",
        ),
    ),
    "str": (
        "STR: beta 0.5, lr 3e-5, batch 16; all else as N+",
        Args(
            data=Path("runs/str/data"),
            out=Path("runs/str/ppo"),
            sft="runs/str/sft",
            reward_model="runs/str/rm",
            total_episodes=16_000,  # not in the paper
            batch_size=16,
            rollout_batch_size=16,
            lr=3e-5,
            response_length=100,
            temperature=0.8,
            kl_coef=0.5,  # [STR ppo]
        ),
    ),
    "str-tiny": (
        "the embedded town, on a CPU in minutes",
        Args(
            data=Path("runs/town/data"),
            out=Path("runs/town/ppo"),
            sft="runs/town/full",
            reward_model="runs/town/rm",
            seed=1,
            total_episodes=2560,
            batch_size=64,
            num_minibatches=4,
            micro_batch_size=16,
            lr=1e-4,
            max_query_length=96,
            response_length=32,
            temperature=0.8,
            kl_coef=0.5,  # [STR ppo]
            gold="town",
        ),
    ),
    "rlcf": (
        "RLCF: compiler and discriminator, a critic of its own",
        Args(
            data=Path("runs/rlcf/data"),
            rows="code",
            out=Path("runs/rlcf/ppo"),
            sft="runs/rlcf/sft",
            reward_model=None,
            compiler=True,
            discriminator="runs/rlcf/discriminator",
            total_episodes=150_000,
            batch_size=8,
            micro_batch_size=8,
            rollout_batch_size=8,
            lr=1e-6,
            adam_betas=(0.9, 0.99),
            adam_eps=1e-8,
            max_query_length=500,
            response_length=384,
            temperature=1.0,
            missing_eos_score=None,
            kl_coef=0.1,  # [RLCF alg 1] it adapts, to the usual target
            kl_target=6.0,
            score_at="last_token",
            gamma=0.99,
            value_clip_range=None,
            value_coef=1.0,
        ),
    ),
    "rlcf-tiny": (
        "the embedded programs, on a CPU in minutes",
        Args(
            data=Path("runs/programs/data"),
            rows="code",
            out=Path("runs/programs/ppo"),
            sft="runs/programs/sft",
            reward_model=None,
            compiler=True,
            discriminator="runs/programs/discriminator",
            discriminator_lr=1e-4,
            seed=1,
            total_episodes=5120,
            batch_size=128,
            num_minibatches=4,
            num_ppo_epochs=2,
            micro_batch_size=32,
            rollout_batch_size=128,
            lr=3e-4,
            adam_betas=(0.9, 0.99),
            adam_eps=1e-8,
            max_query_length=160,
            response_length=128,
            temperature=0.6,  # that of the test: at 1 most slips are of words that the policy would never choose there
            missing_eos_score=None,
            kl_coef=0.05,
            kl_target=6.0,
            score_at="last_token",
            gamma=0.99,
            lam=0.7,  # few episodes: the blame stays near the token that earned it
            value_clip_range=None,
            value_coef=1.0,
        ),
    ),
}
GOLD_SCORES = {"tiny": tiny.gold_score, "site": site.gold_score, "town": town.gold_score}


def response_values(model: ScalarModel, query_response: Tensor, mask: Tensor, state_mask: Tensor) -> Tensor:
    """values (B, T): what the state before each response token is worth; 0 where there is no state."""
    T = state_mask.size(1)
    return torch.where(state_mask, 0.0, model(query_response, mask, last=T + 1)[:, :-1])


def written_logprob(policy: GPT, rows: list[Demonstration], pad_id: int, temperature: float) -> Tensor:
    """Nats: the sum over rows and tokens of the policy's logprobs of the responses in the data."""
    query, response = left_pad([row.query for row in rows], pad_id), right_pad([row.response for row in rows], pad_id)
    ids = torch.cat((query, response), dim=1).to(policy.lm_head.weight.device)  # (B, Q + T)
    return response_logprobs(policy, ids, ids != pad_id, ids[:, query.size(1) :] == pad_id, temperature)[0].sum()


def check_beside(flag: str, where: str, tokenizer: Tokenizer, longest: int, sft: str) -> None:
    """A model beside the policy has to read the policy's tokens, and as many; its weights are left alone."""
    if load_tokenizer(where).backend.get_vocab() != tokenizer.backend.get_vocab():
        raise InputError(f"{flag} {where}: its tokenizer differs from that of {sft}.")
    n_ctx = read_config(where).n_ctx
    if longest > n_ctx:
        raise InputError(
            f"the longest query and --response-length make {longest} tokens, more than the {n_ctx} positions of "
            f"{flag} {where}: name another."
        )


def adversarial_step(
    discriminator: Discriminator,
    steps: FiniteSteps,
    found: list[tuple[dict, str]],
    lr: float,
    autocast: torch.autocast,
    args: Args,
) -> tuple[float, float]:
    """Lower D of what the policy wrote against what people wrote, unless --freeze-discriminator.

    found: this rank's rows and the policy's programs for them. Returns the mean of D(x, y', y) before the step, and the
    share of programs that it found out, over all ranks.
    """
    totals = torch.tensor([0.0, 0.0, len(found)], device=discriminator.mlp[0].weight.device)  # D, found out, how many
    num_found = distributed.all_sum(totals.clone())[2].clamp(min=1)
    steps.optimizer.zero_grad()
    for some in micro_batches(found, args.micro_batch_size):
        queries, written = ([record[name] for record, _ in some] for name in ("query", "response"))
        with autocast, torch.set_grad_enabled(not args.freeze_discriminator):
            comparison = discriminator.compare(queries, [text for _, text in some], written)
        if not args.freeze_discriminator:
            (comparison.sum() / num_found).backward()
        totals[:2] += torch.stack((comparison.detach().sum(), (comparison < 0).sum()))
    score, accuracy = (distributed.all_sum(totals)[:2] / num_found).tolist()
    if not args.freeze_discriminator:
        for parameter in discriminator.parameters():  # a rank on which nothing passed has none
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        distributed.sum_gradients(discriminator)
        for group in steps.optimizer.param_groups:
            group["lr"] = lr
        steps.step(discriminator.parameters(), score)
    return score, accuracy


def main(args: Args) -> dict[str, float]:
    if args.plan:
        print(ppo_plan(args))
        return {}
    with ExitStack() as stack:  # a compiler's process ends with the run
        return train(args, stack)


def train(args: Args, stack: ExitStack) -> dict[str, float]:
    # ----------------------------------------------------------------------------------------------- 1. data and models
    check_ranges(args)
    check_output(args.out, args.overwrite, args.resume)
    device = distributed.setup(args.device)
    torch.manual_seed(args.seed)
    B, T, world = args.batch_size, args.response_length, distributed.world_size()
    if B % (args.num_minibatches * world):
        raise InputError(
            f"--batch-size {B} can't be cut into --num-minibatches {args.num_minibatches} for {world} process(es): "
            f"make it a multiple of {args.num_minibatches * world}."
        )
    num_updates = args.total_episodes // B
    if num_updates == 0:
        raise InputError(f"--total-episodes {args.total_episodes} is less than one --batch-size {B}: raise it.")
    if args.temperature <= 0:
        raise InputError(f"--temperature {args.temperature}: a rollout samples, so it must be above 0.")
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
    if args.objective != "ppo":
        if not args.compiler or args.discriminator is not None or args.num_ppo_epochs * args.num_minibatches > 1:
            raise InputError(
                f"--objective {args.objective} learns from the compiler alone, one step a rollout: pass --compiler "
                "--discriminator None --num-ppo-epochs 1 --num-minibatches 1."
            )
        if args.objective == "coderl" and args.localise:
            raise InputError("--objective coderl rewards whole programs: pass --no-localise.")
    tokenizer = load_tokenizer(args.tokenizer or args.sft)
    pad_id, eos_id = tokenizer.pad_id, tokenizer.eos_id
    load = load_programs if args.rows == "code" else load_demonstrations
    demonstrations = load(args.data / f"{args.rows}.train.jsonl", tokenizer, args.max_query_length, None)

    home = device if args.shard == "none" else torch.device("cpu")  # what is sharded goes to the GPU block by block
    policy = load_gpt(args.sft, home).forbid(pad_id, tokenizer.vocab_size)
    check_vocabulary(tokenizer, policy.config.vocab_size, args.sft)
    longest = max(len(row.query) for row in demonstrations) + T
    if args.objective == "bipolar_ramp":  # reads the written programs as well
        longest = max(longest, max(len(row.query) + len(row.response) for row in demonstrations))
    if longest > policy.config.n_ctx:
        raise InputError(
            f"the longest query and --response-length make {longest} tokens, more than the {policy.config.n_ctx} "
            f"positions of {args.sft}: lower --response-length, or --max-query-length where the data is made."
        )
    ref_policy = copy.deepcopy(policy).requires_grad_(False)
    reward_model = None
    if args.reward_model is not None:
        if load_tokenizer(args.reward_model).backend.get_vocab() != tokenizer.backend.get_vocab():
            raise InputError(
                f"the tokenizer of {args.reward_model} differs from that of {args.sft}: "
                "train the reward model from this policy."
            )
        reward_model = load_scalar(args.reward_model, home).requires_grad_(False)
    gold_model = None
    if args.gold_model is not None:
        if args.gold is not None:
            raise InputError("--gold and --gold-model both are the gold score: leave one out.")
        check_beside("--gold-model", args.gold_model, tokenizer, longest, args.sft)
        gold_model = load_scalar(args.gold_model, home).requires_grad_(False)
    if args.value_model is not None:  # [RLCF alg 1] a critic of its own
        check_beside("--value-model", args.value_model, tokenizer, longest, args.sft)
        value_model = scalar_from_gpt(load_gpt(args.value_model, home)).to(home)
    elif reward_model is not None:
        value_model = copy.deepcopy(reward_model).requires_grad_(True)  # [N+ 22]
    else:
        value_model = scalar_from_gpt(policy).to(home)
    if reward_model is None or args.value_model is not None:
        # a fresh head begins at 0: values of order 1 that mean nothing would be the first advantages
        nn.init.zeros_(value_model.score.weight)
    discriminator = discriminator_steps = None
    if args.discriminator is not None:
        discriminator = load_discriminator(args.discriminator, device)
        discriminator_steps = FiniteSteps(
            torch.optim.AdamW(discriminator.parameters(), lr=args.discriminator_lr, fused=True),
            args.max_skipped_steps,
            f"lower --discriminator-lr ({args.discriminator_lr}); {args.out} keeps the checkpoint before.",
        )
    for model in (policy, value_model):
        model.transformer.checkpoint_activations = args.checkpoint_activations
    frozen = [model for model in (ref_policy, reward_model, gold_model) if model is not None]
    if args.shard == "fsdp":
        for model in (policy, value_model):
            distributed.shard(model, device, args.dtype == "bfloat16")
        for model in frozen:
            distributed.shard(model, device, args.dtype == "bfloat16", args.offload)
    # those that FSDP doesn't bring and take away by itself
    visitors = [model for model in frozen if args.offload and not distributed.is_sharded(model)]

    def reward_model_score(queries: Tensor, responses: Tensor) -> Tensor:
        return end_scores(reward_model, torch.cat((queries, responses), dim=1), queries.size(1), pad_id)

    # a reward is any score(queries (B, Q), responses (B, T)) -> (B,): here the reward model or a rule on texts
    score = load_rule(args.reward, tokenizer) if args.reward else reward_model_score
    if checks_code:
        pieces = token_bytes(tokenizer)
        compiler = stack.enter_context(compiler_for(demonstrations[0].record["language"], args.error_prone_jar))

    def judge_texts(
        rows: list[Demonstration], query: Tensor, response: Tensor
    ) -> tuple[Tensor, Tensor, Checked | None]:
        return response, score(query, response), None

    def judge_programs(
        rows: list[Demonstration], query: Tensor, response: Tensor
    ) -> tuple[Tensor, Tensor, Checked | None]:
        """[RLCF alg 1] The response, cut behind the token that the compiler blames, and G(x, y', y)."""
        checked = check_responses([row.record for row in rows], response, compiler, pieces, eos_id)
        passes = checked.passes if args.compiler else torch.ones_like(checked.passes)
        comparison = passes.float()  # without a discriminator the compiler's word is all
        if discriminator is not None and passes.any():
            kept = passes.nonzero().flatten().tolist()
            queries, written = ([rows[i].record[name] for i in kept] for name in ("query", "response"))
            # the sampled one first: + means that it looks more real
            comparison[kept] = discriminator.compare(queries, [checked.texts[i] for i in kept], written)
        # the program that people wrote passes, or it would not be in the data
        scores = grounding(passes, torch.ones_like(passes), comparison)
        if args.compiler and args.localise:
            response = truncate_at_error(response, checked.error_index, pad_id)
        return response, scores, checked

    judge = judge_programs if checks_code else judge_texts

    groups = parameter_groups([*policy.parameters(), *value_model.parameters()], args.weight_decay, decay_vectors=True)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)  # [N+ 20]
    steps = FiniteSteps(
        optimizer,
        args.max_skipped_steps,
        f"lower --lr ({args.lr}) or raise --kl-coef ({args.kl_coef}); {args.out} keeps the last checkpoint that was "
        "saved before.",
    )
    kl_control = FixedKL(args.kl_coef) if args.kl_target is None else AdaptiveKL(args.kl_coef, args.kl_target)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")
    generator = torch.Generator().manual_seed(args.seed)  # of samples and minibatches, the same on every rank
    first_update, metrics = 0, {}
    if args.resume:
        state = load_state(args.out, args)
        distributed.load_model(policy, state["policy"])
        distributed.load_model(value_model, state["value_model"])
        steps.load_state_dict(state["steps"])
        generator.set_state(state["generator"])
        kl_control.coefficient = state["kl_coef"]
        if discriminator is not None:
            discriminator.load_state_dict(state["discriminator"])
            discriminator_steps.load_state_dict(state["discriminator_steps"])
        first_update, metrics = state["step"], state["metrics"]
    run = Run(args.out, args, first_update)
    if run.main:
        print(
            f"PPO: {num_updates} updates of {B} responses = {args.num_minibatches} minibatch(es) of "
            f"{B // args.num_minibatches} in micro-batches of {args.micro_batch_size} on {world} process(es), "
            f"{args.num_ppo_epochs} epochs: {num_updates * args.num_ppo_epochs * args.num_minibatches} steps; "
            f"{len(demonstrations):,} queries are seen {args.total_episodes / len(demonstrations):.2f} times"
        )

    def write(model: GPT | ScalarModel, directory: Path) -> None:
        whole = distributed.plain(model)
        if run.main:
            save(whole, directory, tokenizer)

    # ----------------------------------------------------------------------------------------------------- 2. the loop
    mine = distributed.rank_slice(B)  # this process samples and scores these rows; the results are gathered
    progress = tqdm(
        range(first_update, num_updates), initial=first_update, total=num_updates, desc="PPO", disable=not run.main
    )
    signals = StopSignals()
    for update in progress:
        start = time.perf_counter()
        # 2.1 rollout: temperature only; any other filter would change the distribution that the ratio is taken against
        indices = batch_indices(len(demonstrations), B, update, args.seed)  # [N+ 21]
        query = left_pad([demonstrations[i].query for i in indices], pad_id).to(device)  # (B, Q) [N+ 5]
        query_mask, Q = query != pad_id, query.size(1)  # (B, Q)
        uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)  # a row's own, whoever samples it
        rollout, checks, golds = [], [], []
        sampler = distributed.plain(policy)  # gathered once a rollout, not once a token
        for model in visitors:
            model.to(device)
        my_rows = [demonstrations[i] for i in indices[mine]]
        for q, u, rows in zip(
            micro_batches(query[mine], args.rollout_batch_size),
            micro_batches(uniforms[mine], args.rollout_batch_size),
            micro_batches(my_rows, args.rollout_batch_size),
            strict=True,
        ):
            with autocast, torch.no_grad():
                response, sampled = generate(
                    sampler, q, q != pad_id, T, args.temperature, eos_id=eos_id, pad_id=pad_id, uniforms=u
                )  # (b, T) each; [N+ 23] [PAD] behind the first EOS
                assert response.shape == (len(q), T)  # the response alone: no query ids in it
                # 2.2 score the response up to its EOS; a compiler also says where it ends
                if gold_model is not None:
                    golds.append(end_scores(gold_model, torch.cat((q, response), dim=1), Q, pad_id))
                response, scores, checked = judge(rows, q, response)
                eos_index, padding_mask, padding_mask_p1 = eos_masks(response, eos_id, pad_id)
                state_mask = padding_mask_p1 if args.score_at == "after_eos" else padding_mask
                qr = torch.cat((q, response), dim=1)  # (b, Q + T)
                mask = torch.cat((q != pad_id, ~padding_mask), dim=1)
                # recomputed as the update will: the sampler's cache and its rounding would move the ratio off 1
                logprobs, _ = response_logprobs(policy, qr, mask, padding_mask, args.temperature)
                ref_logprobs, _ = response_logprobs(ref_policy, qr, mask, padding_mask, args.temperature)
                values = response_values(value_model, qr, mask, state_mask)
                rollout.append((response, sampled, logprobs, ref_logprobs, values, scores))
                checks.append(checked)
        response, sampled_logprobs, logprobs, ref_logprobs, values, scores = (
            distributed.all_gather_rows(torch.cat(part)) for part in zip(*rollout, strict=True)
        )
        for model in visitors:
            model.to("cpu")
        eos_index, padding_mask, padding_mask_p1 = eos_masks(response, eos_id, pad_id)  # (B,), (B, T), (B, T)
        state_mask = padding_mask_p1 if args.score_at == "after_eos" else padding_mask  # (B, T) True = no state
        query_response = torch.cat((query, response), dim=1)  # (B, Q + T)
        mask = torch.cat((query_mask, ~padding_mask), dim=1)
        sampler_gap = masked_mean((sampled_logprobs - logprobs).abs(), padding_mask)
        if args.rollout_logprobs == "sampler":
            logprobs = torch.where(padding_mask, 0.0, sampled_logprobs)  # the sampler knows nothing of what was cut

        if not scores.isfinite().all():
            judge_name = f"--reward {args.reward}" if args.reward else f"--reward-model {args.reward_model}"
            if checks_code:
                judge_name = f"--discriminator {args.discriminator}"
            raise InputError(
                f"{judge_name} gave a score that is not finite at update {update}: mend it; "
                f"{args.out} keeps the last checkpoint that was saved before."
            )

        # 2.3 [N+ 23] EOS trick: the reward model never saw a text that does not end, so its score there means nothing
        has_eos = (response == eos_id).any(1)  # (B,)
        if args.missing_eos_score is not None:
            scores = torch.where(has_eos, scores, args.missing_eos_score)

        # 2.4 KL penalty at each token, the score once, and 2.5 advantages from them
        rewards, kl, advantages, returns, statistics = penalised_gae(
            logprobs, ref_logprobs, values, scores, eos_index,
            kl_control.coefficient, args.gamma, args.lam, args.score_at,
        )  # fmt: skip
        # whitening is over the whole rollout, once, and global: the world size changes nothing
        if args.whiten_rewards:  # between 2.4 and 2.5
            rewards = whiten(rewards, state_mask, shift_mean=False)  # [N+ 24]
            advantages, returns = gae(rewards, values, args.gamma, args.lam, state_mask)
            statistics = None
        if args.whiten_advantages and args.objective == "ppo":
            advantages = whiten(advantages, padding_mask, statistics=statistics)  # [N+ 25]
        if args.objective != "ppo":  # [RLCF section 6.3] no reward, no value: the compiler's word on each token
            error_index = distributed.all_gather_rows(torch.cat([checked.error_index for checked in checks]))  # (B,)
            passes = error_index == T
        if args.objective == "bipolar_ramp":
            advantages = bipolar_ramp_advantages(logprobs, error_index)
        elif args.objective == "coderl":
            with autocast, torch.no_grad():
                greedy, _ = generate(sampler, query[mine], query_mask[mine], T, 0.0, eos_id=eos_id, pad_id=pad_id)
                arguments = query_response[mine], mask[mine], padding_mask[mine]
                token_logits = coderl_critic(value_model, *arguments)[1]
            baseline = check_responses([row.record for row in my_rows], greedy, compiler, pieces, eos_id)
            token_logits, baseline_passes = map(distributed.all_gather_rows, (token_logits, baseline.passes))
            advantages = coderl_advantages(token_logits, passes, baseline_passes, padding_mask)

        sampler = None  # of a sharded policy a copy, which the update has no room for

        # 2.6 K epochs of minibatches over the frozen rollout
        lr = args.lr * lr_factor(args.schedule, update, num_updates)
        for group in optimizer.param_groups:
            group["lr"] = lr
        totals, first_ratio_error, is_first = torch.zeros(7, device=device), torch.zeros((), device=device), True
        num_steps = 0  # that were taken
        for _ in range(args.num_ppo_epochs):
            order = torch.randperm(B, generator=generator)
            for minibatch in order.split(B // args.num_minibatches):
                # of the minibatch on all processes: how it is cut up does not change the gradient
                num_actions, num_states = (~padding_mask[minibatch]).sum(), (~state_mask[minibatch]).sum()
                if args.objective != "ppo":  # sums over tokens
                    num_actions = torch.tensor(len(minibatch), device=device)
                stats = torch.zeros(7, device=device)
                optimizer.zero_grad()
                share = minibatch[distributed.rank_slice(len(minibatch))]
                share = share[mask[share].sum(1).argsort().cpu()]  # rows of like length together: less padding
                for rows in micro_batches(share, args.micro_batch_size):
                    first, t = needed_columns(query_mask[rows], state_mask[rows])
                    ids, real = query_response[rows, first : Q + t], mask[rows, first : Q + t]  # (b, Q + T) trimmed
                    padding, stateless = padding_mask[rows, :t], state_mask[rows, :t]  # (b, T) trimmed
                    with autocast:
                        new_logprobs, entropy = response_logprobs(policy, ids, real, padding, args.temperature)
                    pg_loss, pg_clipped = policy_loss(
                        new_logprobs, logprobs[rows, :t], advantages[rows, :t], padding, args.clip_range, num_actions
                    )
                    vf_clipped = torch.zeros((), device=device)
                    if args.objective == "ppo":
                        with autocast:
                            new_values = response_values(value_model, ids, real, stateless)
                        old_values, targets = values[rows, :t], returns[rows, :t]
                        vf_loss, vf_clipped = value_loss(
                            new_values, old_values, targets, stateless, args.value_clip_range, num_states
                        )
                    elif args.objective == "coderl":  # its critic learns what compiles
                        with autocast:
                            logits, _ = coderl_critic(value_model, ids, real, padding)
                        vf_loss = coderl_critic_loss(logits, passes[rows]) / num_actions
                    else:  # [RLCF eq 3] what people wrote becomes likelier
                        written = [demonstrations[indices[i]] for i in rows.tolist()]
                        with autocast:
                            vf_loss = -written_logprob(policy, written, pad_id, args.temperature) / num_actions
                    (pg_loss + args.value_coef * vf_loss).backward()
                    with torch.no_grad():
                        log_ratio = torch.where(padding, 0.0, new_logprobs - logprobs[rows, :t])
                        approx_kl = k2(new_logprobs, logprobs[rows, :t]).masked_fill(padding, 0.0).sum() / num_actions
                        ratio = log_ratio.exp()[~padding].sum() / num_actions
                        means = pg_loss, vf_loss, pg_clipped, vf_clipped, approx_kl, entropy.sum() / num_actions, ratio
                        stats += torch.stack([mean.detach() for mean in means])
                        if is_first:
                            first_ratio_error = torch.maximum(first_ratio_error, (log_ratio.exp() - 1).abs().max())
                distributed.sum_gradients(policy, value_model)
                stats = distributed.all_sum(stats)
                loss = (stats[0] + args.value_coef * stats[1]).item()
                if steps.step([*policy.parameters(), *value_model.parameters()], loss):
                    totals, num_steps = totals + stats, num_steps + 1
                is_first = False

        # 2.7 [RLCF section 4] the discriminator's turn: the programs that passed, whole, against what people wrote
        if discriminator is not None:
            found = [
                (row.record, text)
                for row, text, ok in zip(
                    my_rows,
                    (text for checked in checks for text in checked.texts),
                    torch.cat([checked.passes for checked in checks]).tolist(),
                    strict=True,
                )
                if (ok or not args.compiler) and text != row.record["response"]  # D(x, y, y) is 0, nothing to tell
            ]
            disc_lr = args.discriminator_lr * lr_factor(args.schedule, update, num_updates)
            disc_score, disc_accuracy = adversarial_step(
                discriminator, discriminator_steps, found, disc_lr, autocast, args
            )

        # 2.8 log; every mean is over what is not masked
        pg_loss, vf_loss, pg_clipped, vf_clipped, approx_kl, entropy, ratio = (totals / max(1, num_steps)).tolist()
        kl_per_response = kl.sum(1)  # (B,) k1, the sum over tokens: its mean may be slightly negative
        kl_k3 = torch.where(padding_mask, 0.0, k3(logprobs, ref_logprobs)).sum(1)
        mean_kl, mean_score = kl_per_response.mean().item(), scores.mean().item()
        metrics = {
            "objective/kl": mean_kl,
            "objective/kl_k3": kl_k3.mean().item(),
            "objective/entropy": -logprobs.sum(1).mean().item(),
            "objective/non_score_reward": -kl_control.coefficient * mean_kl,
            "objective/score": mean_score,
            "objective/score_std": scores.std().item(),
            "objective/rlhf_reward": mean_score - kl_control.coefficient * mean_kl,
            "objective/kl_coef": kl_control.coefficient,
            "policy/approx_kl": approx_kl,
            "policy/clip_fraction": pg_clipped,
            "policy/loss": pg_loss,
            "policy/entropy": entropy,
            "policy/ratio": ratio,
            "policy/first_ratio_error": first_ratio_error.item(),
            "policy/sampler_gap": sampler_gap.item(),
            "value/loss": vf_loss,
            "value/clip_fraction": vf_clipped,
            "eos_rate": has_eos.float().mean().item(),
            "response_length": (eos_index + 1).float().mean().item(),
            "skipped_steps": steps.skipped,
            "lr": lr,
            "episode": (update + 1) * B,
            "episodes_per_second": B / (time.perf_counter() - start),
        }
        if gold_model is not None:
            metrics["gold_score"] = distributed.all_gather_rows(torch.cat(golds)).mean().item()
        if checks_code:
            mine_profile = error_profile(
                [found for checked in checks for found in checked.diagnostics],
                [span for checked in checks for span in checked.spans],
            )
            sums = torch.tensor([mine_profile[category] for category in CATEGORIES], device=device) / world
            num_passed = sum(checked.passes.sum() for checked in checks)
            metrics |= {"compile_rate": distributed.all_sum(num_passed).item() / B}
            for category, mean in zip(CATEGORIES, distributed.all_sum(sums).tolist(), strict=True):
                metrics[f"errors/{category}"] = mean
        if discriminator is not None:
            metrics |= {"discriminator/score": disc_score, "discriminator/accuracy": disc_accuracy}
            metrics["discriminator/skipped_steps"] = discriminator_steps.skipped
        kl_control.update(mean_kl, B)
        last = update + 1 == num_updates
        if args.gold or last or update % args.sample_every == 0:
            queries = [demonstrations[i].record["query"] for i in indices]
            texts = [tokenizer.decode(ids) for ids in response.tolist()]
            samples = [
                {"query": q, "response": r, "score": s, "kl": k}
                for q, r, s, k in zip(queries, texts, scores.tolist(), kl_per_response.tolist(), strict=True)
            ]
            if args.gold:
                metrics["gold_score"] = sum(map(GOLD_SCORES[args.gold], queries, texts)) / B
            if last or update % args.sample_every == 0:
                run.log_samples(update, samples[:4])
        run.log(update, metrics)
        progress.set_postfix(score=f"{mean_score:.2f}", kl=f"{mean_kl:.1f}", eos=f"{metrics['eos_rate']:.2f}")
        if mean_kl < -3 * kl_per_response.std().item() / math.sqrt(B) and run.main:
            progress.write(
                f"update {update}: the KL is {mean_kl:.2f}, below 0 by more than chance: policy or mask is off"
            )

        stopping = signals.received()
        if last or stopping or (update + 1) % args.save_every == 0:
            check_weights(update, policy, value_model, *filter(None, [discriminator]))
            write(policy, args.out)
            write(value_model, args.out / "value_model")
            if discriminator is not None and run.main:
                save_discriminator(discriminator, args.out / "discriminator")
            run.save_state(
                update + 1,
                policy=policy.state_dict(),
                value_model=value_model.state_dict(),
                steps=steps.state_dict(),
                discriminator=discriminator and discriminator.state_dict(),
                discriminator_steps=discriminator and discriminator_steps.state_dict(),
                generator=generator.get_state(),
                kl_coef=kl_control.coefficient,
                metrics=metrics,
            )
            distributed.barrier()
        if stopping:
            signals.stop(args.out, update + 1)
    signals.restore()

    summary = {name: value for name, value in metrics.items() if name != "episodes_per_second"}
    run.finish(summary)
    return summary


if __name__ == "__main__":
    command_line(main, RECIPES)
