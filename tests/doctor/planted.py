"""Silent bugs in training runs, with the check of `doctor code` that finds each.

Each is an edit of a function's syntax tree, like the bugs in course/bugs.py.
"""

from typing import NamedTuple


class Planted(NamedTuple):
    name: str
    check: str
    where: str
    """module:function"""
    old: str
    new: str
    number: int = 0


UNIFORMS = "uniforms = torch.rand((B, T), generator=generator, dtype=torch.float64)"
RESEEDED = "generator.manual_seed(args.seed)\n"
OPTIMIZER = "steps.set_lr(lr)"
SCHEDULE = "lr_factor(args.schedule, step, num_steps, args.warmup_steps)"

PLANTED = (
    # ------------------------------------------------------------------------------------------------------ checkpoints
    Planted("scale-twice-in-merge", "checkpoints", "nanorlhf.peft:LoRALinear.merged",
            "up @ down", "LORA_SCALE * up @ down"),
    Planted("half-of-the-updates-merged", "checkpoints", "nanorlhf.peft:LoRALinear.merged",
            "layer.weight[span] += up @ down", "layer.weight[span] = self.weight[span] + up @ down / 2"),
    Planted("merged-into-the-live-weights", "checkpoints", "nanorlhf.peft:LoRALinear.merged",
            "nn.Parameter(self.weight.clone())", "nn.Parameter(self.weight)"),
    Planted("merged-before-training", "checkpoints", "train_sft:main",
            "tune(model, args.tune, args.lora_rank, args.lora_targets)",
            "tune(model, args.tune, args.lora_rank, args.lora_targets)\nfrom nanorlhf.peft import merge\n"
            "model = merge(model)"),
    Planted("no-scale-in-the-adapter", "checkpoints", "nanorlhf.pretrained.adapters:save_updates",
            "LORA_SCALE * number", "number"),
    Planted("another-value-model-is-saved", "checkpoints", "train_ppo:main.write",
            'write_checkpoint(value_model, directory / "value_model", tokenizer)',
            'write_checkpoint(reward.models[0], directory / "value_model", tokenizer)'),
    # -------------------------------------------------------------------------------------------------- random numbers
    *(Planted(f"one-set-of-numbers-in-{name}", "random_numbers", f"{name}:main", UNIFORMS, RESEEDED + UNIFORMS)
      for name in ("train_ppo", "train_grpo")),
    Planted("rows-share-their-numbers", "random_numbers", "train_ppo:main", "torch.rand((B, T), generator=generator, "
            "dtype=torch.float64)", "torch.rand((1, T), generator=generator, dtype=torch.float64).expand(B, T)"),
    Planted("numbers-without-a-seed", "random_numbers", "train_ppo:main",
            "torch.Generator().manual_seed(args.seed)", "torch.Generator().manual_seed(0)"),
    # ---------------------------------------------------------------------------------------------- the order of rows
    Planted("one-order-for-all-epochs", "orders", "nanorlhf.dataset:batch_indices", "(seed, epoch)", "(seed, 0)"),
    Planted("rows-twice-in-an-epoch", "orders", "nanorlhf.dataset:batch_indices",
            "position = step * batch_size", "position = step * (batch_size - 1)"),
    Planted("rows-with-replacement", "orders", "nanorlhf.dataset:batch_indices",
            "np.random.default_rng((seed, epoch)).permutation(num_rows)",
            "np.random.default_rng((seed, epoch)).integers(num_rows, size=num_rows)"),
    Planted("the-first-batch-again", "orders", "train_rm:main",
            "batch_indices(len(train), args.batch_size, step, args.seed)",
            "batch_indices(len(train), args.batch_size, 0, args.seed)"),
    # ---------------------------------------------------------------------------------------------------- the optimizer
    *(Planted(f"a-new-optimizer-in-{name}", "optimizer", f"{name}:main", OPTIMIZER,
              f"steps = adamw_steps(args, parameters)\n{OPTIMIZER}")
      for name in ("train_ppo", "train_dpo")),
    Planted("moments-are-forgotten", "optimizer", "nanorlhf.training.optimizer:FiniteSteps.step",
            "self.optimizer.step()", "self.optimizer.step()\nself.optimizer.state.clear()"),
    Planted("first-moment-is-forgotten", "optimizer", "nanorlhf.training.optimizer:FiniteSteps.step",
            "self.optimizer.step()", "self.optimizer.step()\n[state['exp_avg'].zero_() for state in "
            "self.optimizer.state.values()]"),
    Planted("without-bias-correction", "optimizer", "nanorlhf.training.optimizer:FiniteSteps.step",
            "self.optimizer.step()", "self.optimizer.step()\n[state['step'].add_(1000) for state in "
            "self.optimizer.state.values() if state['step'] < 1000]"),
    Planted("eps-of-pytorch", "optimizer", "nanorlhf.training.optimizer:adamw_steps", "args.adam.eps", "1e-8"),
    Planted("schedule-steps-twice", "optimizer", "train_dpo:main", SCHEDULE,
            SCHEDULE.replace("step,", "min(2 * step, num_steps),")),
    Planted("warm-up-starts-at-zero", "optimizer", "nanorlhf.training.optimizer:lr_factor",
            "(step + 1) / warmup_steps", "step / warmup_steps"),
    Planted("schedule-forgets-the-warm-up", "optimizer", "nanorlhf.training.optimizer:lr_factor",
            "(step - warmup_steps) / (num_steps - warmup_steps)", "step / num_steps"),
    # --------------------------------------------------------------------------------------------------------- resuming
    Planted("optimizer-is-not-kept", "resuming", "train_dpo:main", "run.track(policy=policy, steps=steps, best=best)",
            "run.track(policy=policy, best=best)"),
    Planted("generator-is-not-kept", "resuming", "train_grpo:main",
            "run.track(policy=policy, steps=steps, generator=generator, **sampler.state())",
            "run.track(policy=policy, steps=steps, **sampler.state())"),
    # ---------------------------------------------------------------------------------------------------- the baselines
    Planted("maxrl-without-a-baseline", "baselines", "nanorlhf.grpo:maxrl",
            "centred(x.scores, x.k)", "x.scores.view(-1, x.k)"),
    Planted("maxrl-divides-by-the-mean-plus-1", "baselines", "nanorlhf.grpo:maxrl", "means + 1e-08", "means + 1.0"),
    # ----------------------------------------------------------------------------------------------------- the gradient
    Planted("detached-rejected-score", "supervised_gradients", "train_rm:contrastive_loss",
            "chosen - rejected", "chosen - rejected.detach()"),
    Planted("detached-chosen-score", "supervised_gradients", "train_rm:contrastive_loss",
            "chosen - rejected", "chosen.detach() - rejected"),
    Planted("scores-against-all-targets", "supervised_gradients", "train_rm:regression_loss",
            "scores - targets", "scores[:, None] - targets"),
    Planted("detached-trunk-of-the-reward-model", "model_slopes", "nanorlhf.model:ScalarModel.forward",
            "self.score(hidden.float())", "self.score(hidden.float().detach())"),
    Planted("detached-policy-trunk", "gradients", "nanorlhf.logprobs:response_hidden",
            "hidden[actions]", "hidden[actions].detach()"),
    Planted("detached-policy-term", "supervised_gradients", "train_dpo:main.row_sums",
            "rejected - ref_rejected", "rejected.detach() - ref_rejected"),
    Planted("the-reference-is-the-policy", "supervised_gradients", "train_dpo:main.row_sums",
            "dpo.pair_logprobs(ref_policy, rows, pad_id)", "dpo.pair_logprobs(model, rows, pad_id)"),
    Planted("gradients-add-up-in-sft", "supervised_gradients", "nanorlhf.training.supervised:backward",
            "model.zero_grad()", ""),
    Planted("gradients-add-up-in-ppo", "gradients", "train_ppo:main", "steps.zero_grad()", ""),
    Planted("gradient-clipped-per-micro-batch", "micro_batches", "nanorlhf.training.supervised:backward",
            "(loss / count).backward()",
            "(loss / count).backward()\nnn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
)  # fmt: skip
