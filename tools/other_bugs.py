"""Twelve bugs that the doctor was not made for, as edits of the syntax tree: see tools/doctor.py."""

from course.bugs import NOBODY, Bug

OTHER_BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------------------------------------- training scripts
    Bug(
        name="returns-and-values-swapped", level=2, where="train_ppo:main",
        old="value_loss(new_values, mb.values, mb.returns, mb.loss_states, args.value_clip_range)",
        new="value_loss(new_values, mb.returns, mb.values, mb.loss_states, args.value_clip_range)",
        symptom="value/loss hardly falls over the updates and value/clip_fraction is near 1 from the first update on: "
        "the value model stays where it began.",
        cause="Two arguments of the value loss are swapped: its target is the value model's own old answer, and the "
        "return is what it is clipped around.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="groups-are-interleaved", level=3, where="train_grpo:main",
        old="[rows[i] for i in indices for _ in range(k)]", new="[rows[i] for _ in range(k) for i in indices]",
        symptom="No number stands out: objective/score rises more slowly, as an advantage also says how easy a query "
        "is, and no longer only how good the response.",
        cause="The rollout repeats the list of queries k times, while the advantages take k rows in a row for one "
        "query: each response is compared with answers to other queries.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="deviation-over-the-queries", level=3, where="nanorlhf.grpo:grpo",
        old="groups.square().mean(1, keepdim=True)", new="groups.square().mean(0, keepdim=True)",
        symptom="None that stands out: advantages still are about 0 on average and about 1 in size. But queries whose "
        "scores differ much count for more than the others, where all should count alike.",
        cause="The standard deviation is taken over the wrong axis: over the i-th responses to all queries, not over "
        "the responses to one query.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="scores-against-all-targets", level=2, where="train_rm:regression_loss",
        old="error = scores - targets", new="error = scores[:, None] - targets",
        symptom="With --loss regression the loss is a multiple of what it should be, it depends on --micro-batch-size, "
        "and the accuracy stays at that of a constant.",
        cause="A column minus a row is a table: each score is drawn to the targets of all rows of its micro-batch, so "
        "the model learns their mean.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="query-tokens-are-counted", level=2, where="train_sft:num_labels",
        old='sum(len(row.query) - 1 for row in rows) if loss_on == "all" else 0',
        new="sum(len(row.query) - 1 for row in rows)",
        symptom="With --loss-on response loss and validation_loss are too low by a factor: a new model's first loss is "
        "far below the logarithm of the vocabulary's size. Adam hides that the gradient is too small as well.",
        cause="The sum over the response's labels is divided by the number of all tokens.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="reference-of-the-other-response", level=1, where="train_dpo:main",
        old="ref_chosen, ref_rejected = pair_logprobs(ref_policy, rows, pad_id)",
        new="ref_rejected, ref_chosen = pair_logprobs(ref_policy, rows, pad_id)",
        symptom="In the first step, where policy and reference are equal, the loss is not log 2 and the margin not 0; "
        "validation_loss, which is right, does not follow loss.",
        cause="Chosen and rejected are swapped for the reference: each response is compared with the reference's "
        "log-probability of the other one.",
        who=NOBODY,
        guard=(),
    ),
    # --------------------------------------------------------------------------------------------------- the arithmetic
    Bug(
        name="clipped-above-alone", level=3, where="nanorlhf.ppo:policy_loss",
        old="ratio.clamp(least, most)", new="ratio.clamp(max=most)",
        symptom="policy/clip_fraction is about half of what it was and policy/approx_kl larger, the more so the more "
        "epochs: what has a negative advantage is pushed down without end.",
        cause="The ratio is clipped above and not below.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="last-state-is-cut-off", level=3, where="nanorlhf.batch:Batch.__getitem__",
        old="self.states[rows].any(0).sum()", new="self.actions[rows].any(0).sum()",
        symptom="None that stands out. The value of the finished response is 0 and never learned in the longest row of "
        "each micro-batch; results depend on --micro-batch-size.",
        cause="A part of a batch is cut after its last action, though the state after EOS comes one column later.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="decay-of-the-doubling", level=3, where="kernels.gae:gae_doubling",
        old="decay**2", new="decay * gamma * lam",
        symptom="None while --lam and --gamma are 1. With the usual 0.95 tokens far from the end get more of the "
        "score than GAE gives them, so advantages and returns are too large.",
        cause="A step over 2^k positions is discounted by the (k + 1)-th power of gamma * lambda, not by the 2^k-th.",
        who=NOBODY,
        guard=(),
    ),
    # ----------------------------------------------------------------------------------- sampling, schedule, checkpoint
    Bug(
        name="one-random-number-per-response", level=2, where="nanorlhf.generate:sample",
        old="live.uniforms.index_select(1, live.t)", new="live.uniforms[:, :1]",
        symptom="policy/sampler_gap is 0 and every ratio is right, yet the samples are odd: likely and unlikely tokens "
        "do not mix within a response. eos_rate and response_length move away from SFT's.",
        cause="Each token of a response is drawn with the number of its first one, so all of them lie at the same "
        "quantile: responses are not samples of the policy.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="warm-up-starts-at-zero", level=3, where="nanorlhf.training.optimizer:lr_factor",
        old="(step + 1) / warmup_steps", new="step / warmup_steps",
        symptom="With --warmup-steps alone: lr is 0 in the first row of metrics.jsonl, whose batch is wasted, and "
        "every step of the warm-up is one step late.",
        cause="The schedule counts steps from 0 where the warm-up counts them from 1.",
        who=NOBODY,
        guard=(),
    ),
    Bug(
        name="merging-changes-the-policy", level=3, where="nanorlhf.peft:LoRALinear.merged",
        old="nn.Parameter(self.weight.clone())", new="nn.Parameter(self.weight)",
        symptom="With --tune lora, after each checkpoint the loss or the KL jumps, the more often the smaller "
        "--save-every is; the frozen weights, which the reference shares, are not those of --sft.",
        cause="The copy to be saved shares its weights with the policy in training: merging adds the update to both, "
        "and training goes on with the update counted twice.",
        who=NOBODY,
        guard=(),
    ),
)  # fmt: skip
