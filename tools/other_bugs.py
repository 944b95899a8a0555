"""Twelve bugs that the doctor was not designed for, as edits of the syntax tree: see tools/doctor.py."""

from course.bugs import NOBODY, Bug

OTHER_BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------------------------------------- training scripts
    Bug(
        name="returns-and-values-swapped", level=2, where="train_ppo:main",
        old="value_loss(new_values, mb.values, mb.returns, mb.loss_states, args.value_clip_range)",
        new="value_loss(new_values, mb.returns, mb.values, mb.loss_states, args.value_clip_range)",
        symptom="value/loss hardly falls: value/loss is 9.2 instead of 2.2 to 2.3 in updates 2 to 5. "
        "value/clip_fraction is 0.85 instead of 0.54 to 0.57 in the first update, and stays there. objective/score "
        "stays near the healthy range.",
        cause="Two arguments of the value loss are swapped: the target is the value model's own old output, clipped "
        "around the return.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="groups-are-interleaved", level=2, where="train_grpo:main",
        old="[rows[i] for i in indices for _ in range(k)]", new="[rows[i] for _ in range(k) for i in indices]",
        symptom="The policy learns more slowly because an advantage also depends on how easy the query is, not only on "
        "how good the response is: objective/kl ends at 1.8 instead of 2.6, and gold_score ends at 3.67 instead of "
        "3.92 to 3.95. policy/loss is -0.006 instead of -0.019 to -0.016 in the first update.",
        cause="The rollout repeats the list of queries k times, but the advantages treat k consecutive rows as one "
        "group: each response is compared with responses to other queries.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="deviation-over-the-queries", level=2, where="nanorlhf.grpo:grpo",
        old="groups.square().mean(1, keepdim=True)", new="groups.square().mean(0, keepdim=True)",
        symptom="policy/loss is 0.014 instead of -0.019 to -0.016 in the first update, and policy/loss ends at -0.22 "
        "instead of 0.01 to 0.02: advantages still average zero, but queries with a large spread of scores count more "
        "than the others. The policy learns as usual: objective/score ends at 1.80 instead of 1.78 to 1.82.",
        cause="The standard deviation is computed over the wrong axis: over the i-th responses to all queries instead "
        "of the responses to one query.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="scores-against-all-targets", level=3, where="train_rm:regression_loss",
        old="error = scores - targets", new="error = scores[:, None] - targets",
        symptom="No metric of a default run changes because the demo trains on pairs. With --loss regression, the loss "
        "is several times too large and depends on --micro-batch-size, and the accuracy is no better than a constant's "
        "(not measured).",
        cause="A column minus a row broadcasts to a matrix: each score is pulled towards the targets of all rows in "
        "its micro-batch, so the model learns their mean.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="query-tokens-are-counted", level=2, where="train_sft:num_labels",
        old='sum(len(row.query) - 1 for row in rows) if loss_on == "all" else 0',
        new="sum(len(row.query) - 1 for row in rows)",
        symptom="loss is 0.78 instead of 6.59 to 6.81 in the first update, far below the logarithm of the vocabulary "
        "size, and validation_loss ends at 0.05 instead of 0.40 to 0.41. The gradient is too small as well, but Adam "
        "hides it. With --loss-on all, nothing changes (not measured).",
        cause="The sum over the response's labels is divided by the number of all tokens.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="reference-of-the-other-response", level=1, where="train_dpo:main",
        old="ref_chosen, ref_rejected = dpo.pair_logprobs(ref_policy, rows, pad_id)",
        new="ref_rejected, ref_chosen = dpo.pair_logprobs(ref_policy, rows, pad_id)",
        symptom="margin is 0.91 instead of 0 in the first update, when policy and reference are equal, and loss is "
        "0.44 instead of 0.69 in the first update, which is not the logarithm of two. validation_loss has the same "
        "error: validation_loss ends at 0.29 instead of 0.34 to 0.35.",
        cause="Chosen and rejected are swapped for the reference: each response is compared with the reference's "
        "log-probability of the other response.",
        who=NOBODY,
        guard=(),
    ),
    # --------------------------------------------------------------------------------------------------- the arithmetic
    Bug(
        name="clipped-above-alone", level=3, where="nanorlhf.ppo:policy_loss",
        old="ratio.clamp(least, most)", new="ratio.clamp(max=most)",
        symptom="No metric of the first five updates leaves the healthy range by its width. At the same seed, "
        "policy/clip_fraction is 0.014 instead of 0.021 in updates 2 to 5. With more epochs, policy/approx_kl should "
        "grow, because tokens with a negative advantage are pushed down without a limit (not measured).",
        cause="The ratio is clipped above but not below.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="last-state-is-cut-off", level=3, where="nanorlhf.batch:Batch.__getitem__",
        old="self.states[rows].any(0).sum()", new="self.actions[rows].any(0).sum()",
        symptom="No metric of the first five updates leaves the healthy range by its width. At the same seed, "
        "value/loss is 9.58 instead of 9.51 in the first update: in the longest row of each micro-batch, the value of "
        "the finished response is zero and never learned, so results depend on --micro-batch-size.",
        cause="A slice of a batch is cut after its last action, but the state after EOS is one column later.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="decay-of-the-doubling", level=3, where="kernels.gae:gae_doubling",
        old="decay**2", new="decay * gamma * lam",
        symptom="No metric of the first five updates leaves the healthy range by its width. At the same seed, "
        "value/loss is 9.40 instead of 9.51 in the first update: tokens far from the end get more of the score than in "
        "GAE, so advantages and returns are too large, more so with a smaller --lam. With --lam 1 and --gamma 1, "
        "nothing changes (not measured).",
        cause="A step over 2^k positions is discounted by (gamma * lambda)^(k + 1) instead of (gamma * lambda)^(2^k).",
        who=NOBODY,
        guard=(),
    ),
    # ----------------------------------------------------------------------------------- sampling, schedule, checkpoint
    Bug(
        name="one-random-number-per-response", level=2, where="nanorlhf.generate:sample",
        old="live.uniforms.index_select(1, live.t)", new="live.uniforms[:, :1]",
        symptom="policy/sampler_gap stays at zero and every ratio is right, but a response has either only likely or "
        "only unlikely tokens: objective/score_std is 1.50 instead of 1.27 to 1.36 in the first update. eos_rate is "
        "0.996 instead of 1.000 in updates 2 to 5, and objective/kl_exact is 0.14 instead of 0.20 to 0.24 in updates 2 "
        "to 5.",
        cause="All tokens of a response are drawn with the random number of the first token, so they all come from "
        "the same quantile: responses aren't samples of the policy.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="warm-up-starts-at-zero", level=2, where="nanorlhf.training.optimizer:lr_factor",
        old="(step + 1) / warmup_steps", new="step / warmup_steps",
        symptom="With a warm-up, as in the demo's SFT, lr is 0 instead of 0.0001 in the first update, so the first "
        "batch is wasted and the whole warm-up is one step late: loss is 6.3 instead of 5.9 in updates 2 to 5. The run "
        "ends in the healthy range, apart from eos_rate: eos_rate ends at 0.98 instead of 1.00.",
        cause="The schedule counts steps from 0, but the warm-up counts them from 1.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="merging-changes-the-policy", level=3, where="nanorlhf.peft:LoRALinear.merged",
        old="nn.Parameter(self.weight.clone())", new="nn.Parameter(self.weight)",
        symptom="No metric of the first five updates changes because the demo trains all weights. With --tune lora, "
        "the loss or the KL jumps after each checkpoint, so more often with a small --save-every (not measured). The "
        "frozen weights, shared with the reference, differ from those in --sft.",
        cause="The copy to save shares its weights with the policy in training: merging adds the update to both, "
        "and training continues with the update counted twice.",
        who=NOBODY,
        guard=(),
    ),
)  # fmt: skip
