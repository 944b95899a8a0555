"""Bugs that public PPO code has had, as edits of this repository's syntax trees, each with a description.

An edit names one node by its text and replaces it (`edit.replaced`), so no file is stored. `guard` lists the
repository's tests that fail with the bug and pass without it.
"""

from dataclasses import dataclass

from nanorlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Bug:
    name: str
    level: int
    """1: obvious in a metric of a default run; 2: visible in a metric if you know what to expect; 3: visible only in a
    test, or with other settings or data"""
    where: str
    """module:function"""
    old: str
    """the expression or statement to replace, compared as a syntax tree"""
    new: str
    """empty: the statement is deleted"""
    number: int = 0
    """which match, if several nodes read like `old`"""
    symptom: str
    """what one sees in a run, with numbers of course/symptoms.csv at seed 1"""
    cause: str
    who: str
    """project#issue"""
    guard: tuple[str, ...]


PPO, TRAIN, BATCH = "tests/test_ppo.py::test_", "tests/test_train_ppo.py::test_", "tests/test_batch.py::test_"
MODEL, GENERATE, REWARD = (
    "tests/test_model.py::test_",
    "tests/test_generate.py::test_",
    "tests/test_reward_model.py::test_",
)
GAE, KL, DPO = "tests/kernels/test_gae.py::test_", "tests/kernels/test_kl.py::test_", "tests/test_dpo.py::test_"
REWARDS = TRAIN + "rewards_are_the_kl_penalty_at_each_token_and_the_score_once[False-after_eos]"
RECOUNT = TRAIN + "the_logged_statistics_equal_a_recount_of_the_unpadded_rows"
NOBODY = "no public issue that we know of; a common mistake"
CS336 = "students of Stanford's CS336, assignment 5; no public issue that we know of"

BUGS: tuple[Bug, ...] = (
    # ------------------------------------------------------------------------------------------ positions and attention
    Bug(
        name="positions-count-padding", level=3, where="nanorlhf.masks:position_ids",
        old="(mask.long().cumsum(1) - 1).masked_fill(~mask, 0)",
        new="torch.arange(mask.size(1), device=mask.device).expand_as(mask)",
        symptom="With rotary positions, which don't depend on a shift, metrics change only by rounding errors. With "
        "learned positions (GPT-2), the log-probability of the same text changes from batch to batch (not measured).",
        cause="Position ids are column numbers, so the first real token of a left-padded row doesn't get position 0.",
        who="trlx#508, OpenRLHF#217, trl#469, trl#6800, transformers#18388",
        guard=(MODEL + "positions_equal_the_drawing", MODEL + "left_padding_does_not_change_a_row[gpt2]"),
    ),
    Bug(
        name="stale-position-in-decoding", level=3, where="nanorlhf.cache:KVCache.next_token",
        old="self.positions.index_select(1, self.at)", new="self.positions.index_select(1, self.at - 1)",
        symptom="No metric of the first five updates changes because the demo's positions are rotary. With learned "
        "positions (GPT-2), policy/sampler_gap is far above rounding: sampler and training disagree about the same "
        "tokens (not measured).",
        cause="The decode step gives the new token the position of the previous token.",
        who="trlx#508, OpenRLHF#217 (cached decoding and training must use the same positions)",
        guard=(MODEL + "decoding_with_a_cache_equals_the_full_forward_pass[gpt2-False]",),
    ),
    Bug(
        name="stale-rotation-in-decoding", level=1, where="nanorlhf.cache:KVCache.next_token",
        old="cos.index_select(1, self.at), sin.index_select(1, self.at)",
        new="cos.index_select(1, self.at - 1), sin.index_select(1, self.at - 1)",
        symptom="policy/sampler_gap is 0.0015 instead of 0 in the first update, far above rounding; objective/score "
        "stays in the healthy range.",
        cause="The decode step rotates the new query and key by the angles of the previous token.",
        who="trlx#508, OpenRLHF#217 (cached decoding and training must use the same positions)",
        guard=(GENERATE + "logprobs_of_the_cache_equal_those_of_a_full_forward_pass",),
    ),
    Bug(
        name="padding-is-attended-to", level=1, where="nanorlhf.masks:attention_mask",
        old="(visible & mask[:, None, None, :]) | (key == query)", new="visible.expand(len(mask), 1, -1, -1)",
        symptom="policy/first_ratio_error is 0.012 instead of 0 in the first update, before any step, and "
        "policy/sampler_gap is 0.0013 instead of 0 in the first update: a log-probability depends on the other rows of "
        "the batch. objective/score rises as usual.",
        cause="The attention mask is causal but ignores the padding.",
        who="reward-bench#137, trlx#474 (scores that depend on padding)",
        guard=(MODEL + "the_attention_mask_equals_a_triple_loop", MODEL + "left_padding_does_not_change_a_row[gpt2]"),
    ),
    Bug(
        name="dropout-on", level=1, where="nanorlhf.model:MLP.forward",
        old="self.down(self.up(x) if self.gate is None else gated_linear(self.gate, self.up, x))",
        new="F.dropout(self.down(self.up(x) if self.gate is None else gated_linear(self.gate, self.up, x)), 0.1)",
        symptom="policy/first_ratio_error is 0.89 instead of 0 in the first update, before any step. "
        "objective/kl_exact is 0.037 instead of 0 in the first update, when policy and reference are equal, and "
        "policy/sampler_gap is 0.033 instead of 0 in the first update.",
        cause="Dropout is on, so the policy that samples and the policy that is trained are different networks.",
        who="trl (value head with p = 0.1), reef#536",
        guard=(MODEL + "training_mode_changes_no_number[gpt_neox]",),
    ),
    # --------------------------------------------------------------------------------------------------------- sampling
    Bug(
        name="sampler-forgets-the-temperature", level=1, where="nanorlhf.generate:sample",
        old="logits.div_(how.temperature or 1.0)", new="",
        symptom="policy/sampler_gap is 0.12 instead of 0 in the first update, and objective/entropy is 2.8 instead of "
        "1.4 to 1.6 in the first update. objective/score is 0.37 instead of 0.49 to 0.54 in updates 2 to 5.",
        cause="The rollout samples at temperature 1, but log-probabilities are computed at --temperature.",
        who="trlx#107, blog#2110 (ratio not 1 in the first epoch)",
        guard=(GENERATE + "logprobs_of_the_cache_equal_those_of_a_full_forward_pass",),
    ),
    Bug(
        name="filtered-rollouts", level=1, where="nanorlhf.training.sampler:Sampler.writer",
        old="self.settings.top_p", new="0.9",
        symptom="policy/sampler_gap is 0.014 instead of 0 in the first update, and policy/tis_weight is 0.986 instead "
        "of 1.000 in the first update. objective/entropy, of the sampled tokens, is lower: objective/entropy is 1.2 "
        "instead of 1.4 to 1.6 in the first update. policy/entropy, of the distribution, is unchanged.",
        cause="Rollouts are filtered by top-p, but the ratio is computed with the full distribution.",
        who="trl#1017, trl#1005",
        guard=(TRAIN + "the_ratio_of_the_first_minibatch_is_one",),
    ),
    Bug(
        name="ratio-to-the-filtered-sampler", level=3, where="nanorlhf.training.sampler:Sampler.correct",
        old='correction == "sampler_logprobs"', new='correction in ("none", "sampler_logprobs")',
        symptom="Without a filter, metrics change only by rounding errors. With --sampler.top-p, policy/ratio is below "
        "one from the first step on, and policy/first_ratio_error is far above rounding (not measured).",
        cause="The ratio divides by the sampler's log-probabilities, which are renormalised after top-p; the policy's "
        "are not. Every ratio starts at the probability mass that was kept.",
        who=CS336,
        guard=("tests/test_mismatch.py::test_advantages_without_a_value_model_ignore_the_samplers_kl[grpo-none]",),
    ),
    Bug(
        name="copies-share-a-seed", level=2, where="train_grpo:main",
        old="torch.rand((B, T), generator=generator, dtype=torch.float64)",
        new="torch.rand((1, T), generator=generator, dtype=torch.float64).expand(B, T)",
        symptom="Scores differ between queries, but groups/alike is 1 instead of 0 in the first update, and nothing is "
        "learned: objective/score ends at 0.39 instead of 1.19 to 1.43.",
        cause="Each response of a rollout is sampled with the same random numbers, so the k responses to a query are "
        "copies.",
        who=CS336,
        guard=("tests/test_train_grpo.py::test_the_responses_to_a_query_are_consecutive_rows",),
    ),
    Bug(
        name="pad-can-be-sampled", level=3, where="nanorlhf.model:GPT.forbid",
        old="(ids >= num_ids) | (ids == pad_id)", new="ids >= num_ids",
        symptom="No metric of the first five updates changes because the demo's LM head has no row for [PAD]. With "
        "Pythia's padded head, a response may contain [PAD], which ends it there (not measured).",
        cause="The LM head can emit [PAD].",
        who="N+ code with Pythia (50277 < 50304)",
        guard=(MODEL + "pad_and_unused_rows_of_the_head_have_probability_zero",),
    ),
    Bug(
        name="eos-goes-unnoticed", level=1, where="nanorlhf.generate:sample",
        old="live.ended |= (live.token == how.ends).any(1, keepdim=True)", new="live.ended |= live.token == how.pad_id",
        symptom="objective/score is 1.07 instead of 0.20 to 0.56 in the first update, although the policy is SFT's: "
        "text continues after EOS, and the reward model reads it. value/loss is 4.8 instead of 2.2 to 2.3 in updates 2 "
        "to 5. eos_rate is right because the masks end at EOS.",
        cause="The sampler stops at [PAD], which is never sampled, instead of at EOS.",
        who="trl#1623, trl#3091 (the model never stops)",
        guard=(GENERATE + "after_eos_there_is_only_pad_and_logprob_zero",),
    ),
    # ------------------------------------------------------------------------------------------------------------ masks
    Bug(
        name="eos-is-masked", level=2, where="nanorlhf.ppo:eos_masks",
        old="index <= eos_index[:, None]", new="index < eos_index[:, None]",
        symptom="objective/entropy is 0.91 instead of 1.41 to 1.58 in the first update, and policy/entropy is 0.14 "
        "instead of 0.22 in the first update: EOS, which isn't counted, is among the uncertain tokens. eos_rate stays "
        "high because SFT has learned to stop.",
        cause="The action mask ends before EOS instead of at it, as happens in code with pad = eos.",
        who="trl#5303, transformers#25790, trlx (masks by comparing with pad = eos)",
        guard=(PPO + "masks_of_the_example_in_the_docstring",),
    ),
    Bug(
        name="state-mask-off-by-one", level=2, where="nanorlhf.ppo:eos_masks",
        old="index <= eos_index[:, None] + 1", new="index <= eos_index[:, None] + 2",
        symptom="value/clip_fraction is 0.28 instead of 0.30 to 0.31 in updates 2 to 5. At the same seed, value/loss "
        "is 8.6 instead of 9.5 in the first update, because it includes a state that doesn't exist, with a return of "
        "zero.",
        cause="The state mask ends two positions after EOS, so the value model learns from padding.",
        who="DeepSpeedExamples#672; torchtune#1005 on why the index is hard to see",
        guard=(PPO + "masks_of_the_example_in_the_docstring", PPO + "masks_equal_a_loop_over_each_row"),
    ),
    Bug(
        name="mask-from-eos-only", level=3, where="nanorlhf.ppo:eos_masks",
        old="torch.minimum(first_eos, first_pad - 1)", new="first_eos",
        symptom="No metric of the first five updates changes because every response ends with EOS. In rows without "
        "EOS, such as programs cut at an error by train_rlcf.py, padding counts as tokens (not measured).",
        cause="The end of a response is found only by EOS.",
        who="verl#3805",
        guard=(PPO + "a_row_without_eos_ends_at_its_last_token_and_early_padding_is_masked",),
    ),
    # ---------------------------------------------------------------------------------------------------------- rewards
    Bug(
        name="pad-searched-in-the-query", level=1, where="nanorlhf.reward_model:end_scores",
        old="end_index(query_response, query_length, pad_id) - first",
        new="(first_true_index(query_response == pad_id) - 1 - first).clamp(min=0)",
        symptom="The reward model gives the two responses of nearly every pair the same score: validation_accuracy "
        "ends at 0.03 instead of 0.85 to 0.86, and padding_difference ends at 1.7 instead of 0. In PPO, "
        "objective/score is 0.18 instead of 0.54 to 0.74 in updates 2 to 5.",
        cause="The first [PAD] of a left-padded row is in the query, so the score is read before the response begins.",
        who="trl#2778, minimind#541, LlamaFactory#2382, transformers#35352, gpt-neox#1285",
        guard=(REWARD + "a_score_depends_neither_on_padding_nor_on_the_batch",),
    ),
    Bug(
        name="score-before-eos", level=2, where="nanorlhf.reward_model:end_index",
        old="first_true_index((query_response == pad_id) & (index >= query_length)) - 1",
        new="first_true_index((query_response == pad_id) & (index >= query_length)) - 2",
        symptom="The reward model's accuracy stays in the healthy range, but validation_loss ends at 0.380 instead of "
        "0.353 to 0.364, and reward_std ends at 1.1 instead of 1.5 to 1.6. In PPO, objective/score_std is 0.69 instead "
        "of 1.27 to 1.29 in the first update.",
        cause="The score is read one token before the end, so the model never sees the EOS that it should learn from.",
        who="trl#2778; review of trl#5813",
        guard=(REWARD + "end_index_of_the_docstrings_example",),
    ),
    Bug(
        name="reward-of-all-tokens", level=1, where="nanorlhf.reward_model:end_scores",
        old="scores.gather(1, end[:, None]).squeeze(1)", new="scores.mean(1)",
        symptom="padding_difference ends at 0.99 instead of 0: a response's score depends on the other rows of the "
        "batch. The reward model's loss and accuracy stay in the healthy range. In PPO, objective/score_std is 0.98 "
        "instead of 1.27 to 1.29 in the first update.",
        cause="The score is the mean over all tokens, padding included, but only the score at the end is meaningful.",
        who="DeepSpeed-Chat's reward_model.py",
        guard=(REWARD + "the_gradient_of_a_score_is_zero_at_padding_and_the_loss_comes_from_one_number",),
    ),
    Bug(
        name="normalisation-is-lost", level=1, where="nanorlhf.model:ScalarModel.forward",
        old="self.score(hidden.float()).squeeze(-1) - self.reward_bias", new="self.score(hidden.float()).squeeze(-1)",
        symptom="objective/score is -1.9 instead of 0.2 to 0.4 in the first update: all scores are shifted by a "
        "constant, so the EOS trick's penalty means something else. The reward model's metrics don't change.",
        cause="The bias that makes demonstrations score 0 is saved and loaded but never subtracted.",
        who="trl#1783",
        guard=(MODEL + "the_normalisation_is_subtracted_from_every_score",),
    ),
    Bug(
        name="tie-is-right", level=3, where="train_rm:contrastive_loss",
        old="margin > 0", new="margin >= 0",
        symptom="No metric of a default run changes because the two responses of a pair never score the same. A reward "
        "model that gives every response the same score has perfect accuracy (not measured).",
        cause="A tie counts as agreement with the labeller.",
        who=NOBODY,
        guard=("tests/test_train_rm.py::test_the_loss_of_five_pairs_typed_by_hand",),
    ),
    Bug(
        name="rule-reads-the-query", level=3, where="nanorlhf.rewards.function_reward:FunctionReward._score",
        old="[self.tokenizer.decode(ids) for ids in batch.response.tolist()]",
        new="[self.tokenizer.decode(ids) for ids in batch.query_response.tolist()]",
        symptom="No metric of the first five updates changes because the demo's scores come from a reward model. With "
        "--reward, the scores of a rule that counts words don't match the samples at all (not measured).",
        cause="The rule gets the query and the response as one text instead of only the response.",
        who="Myashka/CQA_RLHF, train_ppo.py",
        guard=("tests/rewards/test_function.py::test_a_users_rule_gets_texts",),
    ),
    Bug(
        name="penalty-is-added", level=3, where="train_ppo:main",
        old="scores = torch.where(batch.has_eos, scores, args.missing_eos_score)",
        new="scores = torch.where(batch.has_eos, scores, scores + args.missing_eos_score)",
        symptom="No metric of the first five updates changes because every response ends with EOS. Elsewhere, an "
        "unfinished text that the reward model likes keeps most of its score (not measured).",
        cause="The EOS trick subtracts from a meaningless score instead of replacing it.",
        who="trl#2012, trl#2033, trl#6805, trl#5338",
        guard=(TRAIN + "a_missing_eos_replaces_the_score_and_does_not_subtract_from_it",),
    ),
    Bug(
        name="trick-is-logged-only", level=3, where="train_ppo:main",
        old="rewards[torch.arange(B), batch.score_index] += scores",
        new="rewards[torch.arange(B), batch.score_index] += scores.masked_fill(~batch.has_eos, 0.0)",
        symptom="No metric of the first five updates changes because every response ends with EOS. Elsewhere, "
        "objective/score shows the penalty, but the policy doesn't learn from it (not measured).",
        cause="The penalty of the EOS trick doesn't reach the advantages.",
        who="AReaL#1351 (rows without EOS in the statistics of rewards)",
        guard=(REWARDS,),
    ),
    Bug(
        name="cut-is-ignored", level=3, where="train_rlcf:main",
        old="response = truncate_at_error(response, checked.error_index, pad_id)",
        new="truncate_at_error(response, checked.error_index, pad_id)",
        symptom="Not measured: the demo trains on no programs. With train_rlcf.py and --discriminator None, tokens "
        "after the first error keep their reward and are trained on.",
        cause="The truncated response is thrown away and the full one is used.",
        who="miles#1827, verl#2337 (GAE over tokens that aren't steps of the policy)",
        guard=("tests/test_train_rlcf.py::test_a_response_ends_with_the_token_to_blame_and_its_score_lies_there",),
    ),
    # --------------------------------------------------------------------------------------------------------------- KL
    Bug(
        name="kl-of-the-wrong-sign", level=2, where="train_ppo:main",
        old="batch.logprobs - batch.ref_logprobs", new="batch.ref_logprobs - batch.logprobs",
        symptom="objective/kl ends at 4.0 instead of 2.4 to 2.8, and gold_score ends at 3.5 instead of 3.8 to 3.9, "
        "although objective/score ends in the healthy range.",
        cause="The penalty is log reference - log policy, so moving away from the reference is rewarded.",
        who="negative KL: trl#925, trl#1005, trl#235, LlamaFactory#664",
        guard=(REWARDS,),
    ),
    Bug(
        name="k3-of-the-wrong-direction", level=2, where="kernels.kl:k3",
        old="torch.expm1(-x) + x", new="torch.expm1(x) - x",
        symptom="objective/kl_k3 ends at 7.9 instead of 1.7 to 3.6, far above objective/kl and objective/kl_exact, "
        "which are unchanged. In the first five updates it stays in the healthy range.",
        cause="The sign of x is flipped: over samples of the policy, the mean of k3 isn't KL(policy || reference).",
        who=NOBODY,
        guard=(KL + "estimators_have_the_stated_expectation",),
    ),
    Bug(
        name="kl-is-averaged-over-padding", level=1, where="nanorlhf.training.update_metrics:response_kl",
        old="torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0).sum(1)",
        new="torch.where(batch.actions, batch.logprobs - batch.ref_logprobs, 0.0).mean(1)",
        symptom="objective/kl is 0.009 instead of 0.183 to 0.216 in updates 2 to 5, while objective/kl_k3 and "
        "objective/kl_exact are right. Training is the same.",
        cause="The KL of a response is the mean over all columns, padding included, instead of the sum over its "
        "tokens.",
        who="rlhf-book#216",
        guard=(TRAIN + "the_logged_kl_is_the_sum_over_a_responses_tokens",),
    ),
    Bug(
        name="adaptive-kl-runs-away", level=3, where="nanorlhf.ppo:KLCoefficient.update",
        old="min(max(kl / self.target - 1, -0.2), 0.2)", new="min(max(1 - kl / self.target, -0.2), 0.2)",
        symptom="No metric of the first five updates changes because the coefficient is constant. With --kl-target, "
        "objective/kl_coef falls while objective/kl is above the target (not measured).",
        cause="The error has the wrong sign, so the controller drives the KL away from its target.",
        who=NOBODY,
        guard=(PPO + "adaptive_kl_follows_the_formula_and_clips_the_error",),
    ),
    Bug(
        name="adaptive-kl-sees-another-kl", level=3, where="train_ppo:main",
        old="beta.update(metrics[\"objective/kl\"], B)",
        new="beta.update(metrics[\"objective/kl\"] / metrics[\"response_length\"], B)",
        symptom="No metric of the first five updates changes because the coefficient is constant. With --kl-target, "
        "objective/kl settles at a multiple of the target (not measured).",
        cause="The controller gets the KL per token instead of the KL per response.",
        who="trlx, accelerate_ppo_trainer.py (its controller gets the KL over prompt tokens)",
        guard=(TRAIN + "the_logged_kl_is_the_sum_over_a_responses_tokens",),
    ),
    Bug(
        name="reference-is-trained", level=1, where="nanorlhf.peft:reference",
        old="copy.deepcopy(policy).requires_grad_(False)", new="policy",
        symptom="objective/kl is 0 instead of 0.18 to 0.22 in updates 2 to 5, and so are objective/kl_k3 and "
        "objective/kl_exact, although objective/score rises.",
        cause="The reference isn't a copy: it is the policy itself and changes with it.",
        who="trl#925, trl#1857 (causes of a KL that makes no sense)",
        guard=("tests/test_peft.py::test_the_reference_of_a_fully_trained_policy_is_a_frozen_copy",),
    ),
    Bug(
        name="reference-keeps-the-updates", level=3, where="nanorlhf.peft:reference",
        old="replace_updated(policy, LoRALinear.without_updates)", new="replace_updated(policy, lambda layer: "
        "layer)",
        symptom="No metric of the first five updates changes because the demo trains all weights. With --tune lora, "
        "objective/kl stays at zero (not measured).",
        cause="The reference runs with the low-rank updates instead of without them.",
        who="trl#1005, trl#1017 (negative or wrong KL with LoRA)",
        guard=("tests/test_peft.py::test_the_reference_is_the_policy_without_its_updates_on_the_same_weights",),
    ),
    Bug(
        name="reference-at-temperature-1", level=1, where="nanorlhf.logprobs:compared_logprobs",
        old="linear_logprobs(ref_hidden, ref_head, labels, ref_bias, temperature, ref_cap)",
        new="linear_logprobs(ref_hidden, ref_head, labels, ref_bias, 1.0, ref_cap)",
        symptom="objective/kl is 0.26 instead of 0 in the first update, when policy and reference are equal. "
        "objective/kl_exact is zero there, as it should be.",
        cause="The reference's log-probabilities are computed at a different temperature from the policy's.",
        who="trl#1017, trl#1005 (log-probabilities of a distribution that wasn't the sampled one)",
        guard=(BATCH + "policy_and_reference_are_read_at_the_same_temperature",),
    ),
    # ---------------------------------------------------------------------------------------------- advantages, returns
    Bug(
        name="score-one-too-late", level=2, where="nanorlhf.batch:Batch.of",
        old="(eos_index + 1).clamp(max=response.size(1) - 1)",
        new="(eos_index + 2).clamp(max=response.size(1) - 1)",
        symptom="objective/score is 0.35 instead of 0.49 to 0.54 in updates 2 to 5: the policy learns only from the KL "
        "penalty. policy/approx_kl is 0.0008 instead of 0.0018 to 0.0027 in updates 2 to 5.",
        cause="The score is added at a position without a state, where it is masked out.",
        who="DeepSpeedExamples#672, llm_related#37",
        guard=(BATCH + "masks_and_score_index_of_a_worked_example", REWARDS,),
    ),
    Bug(
        name="score-at-every-slot-from-the-end", level=3, where="train_ppo:main",
        old="rewards[torch.arange(B), batch.score_index] += scores",
        new="rewards += torch.where(torch.arange(rewards.size(1)) >= batch.score_index[:, None], scores[:, None], 0.0)",
        symptom="No metric of the first five updates changes because GAE masks everything after the end. Without this "
        "mask, a short response gets its score several times (not measured).",
        cause="The score is added at every position from the end of the response on, instead of once.",
        who="llm_related#37, DeepSpeedExamples#672 (rewards after EOS enter the return)",
        guard=(REWARDS,),
    ),
    Bug(
        name="values-are-not-masked", level=3, where="kernels.gae:gae",
        old="if states is not None:\n    rewards = torch.where(states, rewards, 0.0)\n"
        "    values = torch.where(states, values, 0.0)",
        new="if states is not None:\n    rewards = torch.where(states, rewards, 0.0)",
        symptom="No metric of the first five updates changes because values after the end are zero. If the value "
        "model's outputs are kept there, they bootstrap into real tokens (not measured).",
        cause="GAE masks the rewards after the end but not the values.",
        who="verl#50, ROLL#447, verl#1850",
        guard=(GAE + "positions_without_a_state_do_not_change_advantages",),
    ),
    Bug(
        name="bootstrap-after-the-end", level=3, where="kernels.gae:gae_doubling",
        old="torch.zeros_like(values[:, :1])", new="values[:, -1:]",
        symptom="No metric of the first five updates changes because no response fills all columns. If responses are "
        "cut at --response-length, their advantages are too high (not measured).",
        cause="After the last column, GAE bootstraps from the last value as if the episode continued; V_T should be 0.",
        who="verl#50 (the value after the end bootstraps into real tokens)",
        guard=(GAE + "every_way_equals_a_double_loop_in_float64[doubling]",),
    ),
    Bug(
        name="discount-is-lambda-alone", level=3, where="kernels.gae:gae_doubling",
        old="step, decay = 1, gamma * lam", new="step, decay = 1, lam",
        symptom="No metric of the first five updates changes because --gamma is one. With a smaller one, scores are "
        "discounted too little (not measured).",
        cause="The sum over deltas is discounted by lambda instead of gamma * lambda.",
        who="rlhf-book#216 is similar; the same double loop catches it",
        guard=(GAE + "every_way_equals_a_double_loop_in_float64[doubling]",),
    ),
    Bug(
        name="rewards-for-returns", level=2, where="train_ppo:main",
        old="advantages, batch.returns = gae(rewards, batch.values, args.gamma, args.lam, batch.states)",
        new="advantages = gae(rewards, batch.values, args.gamma, args.lam, batch.states)[0]\n"
        "batch.returns = rewards",
        symptom="value/loss is 10.4 instead of 9.1 to 10.0 in the first update, and value/loss is 2.5 instead of 2.2 "
        "to 2.3 in updates 2 to 5: all but one of its targets are near zero. objective/score stays in the healthy "
        "range.",
        cause="The value model learns a token's reward instead of the return from that token on.",
        who="rlhf-book#216",
        guard=(TRAIN + "the_value_model_learns_the_returns",),
    ),
    Bug(
        name="value-of-the-next-state", level=1, where="nanorlhf.logprobs:response_values",
        old="values[:, :-1]", new="values[:, 1:]",
        symptom="objective/score ends at -0.74 instead of 1.33 to 1.48, and falls from the second update on: "
        "objective/score is -0.48 instead of 0.55 to 0.77 in updates 2 to 5. value/loss hardly shows the bug: "
        "value/loss is 3.6 instead of 3.7 in the first update.",
        cause="Off by one: the value of a token is read after the token instead of before it.",
        who="lm-human-preference-details#6, DeepSpeedExamples#703, torchtune#1005 (the index that confuses everyone)",
        guard=(BATCH + "a_value_is_computed_at_the_state_before_its_token",),
    ),
    Bug(
        name="whitening-over-padding", level=1, where="train_ppo:main",
        old="whiten(advantages, batch.actions)", new="whiten(advantages, torch.ones_like(batch.actions))",
        symptom="policy/loss is 0.36 instead of -0.006 to -0.005 in the first update because the advantages of the "
        "real tokens don't average zero.",
        cause="The mean and variance of the advantages include the zeros after the end.",
        who="SkyRL#1305, slime#2235, miles#3229, trlx modeling_ppo.py",
        guard=(REWARDS,),
    ),
    Bug(
        name="unmasked-mean-in-whitening", level=1, where="nanorlhf.ppo:whiten",
        old="counted.mean()", new="x.mean()",
        symptom="policy/loss is 0.20 instead of -0.006 to -0.005 in the first update because the advantages of the "
        "real tokens don't average zero.",
        cause="The variance is masked but the mean isn't.",
        who="SkyRL#1305, slime#2235, trlx modeling_ppo.py",
        guard=(PPO + "whitening_equals_float64_statistics_of_counted_positions",),
    ),
    # ------------------------------------------------------------------------------------------------------- the update
    Bug(
        name="update-at-temperature-1", level=1, where="train_ppo:main",
        old="response_logprobs(policy, mb.query_response, mb.real, mb.actions, args.temperature)",
        new="response_logprobs(policy, mb.query_response, mb.real, mb.actions, 1.0)",
        symptom="policy/first_ratio_error is 4.5 instead of 0 in the first update, before any step. policy/entropy is "
        "0.41 instead of 0.22 to 0.23 in the first update. policy/clip_fraction stays near the healthy range.",
        cause="The update computes log-probabilities at temperature 1, the rollout at --temperature.",
        who="trlx#107, trl#454, blog#2110",
        guard=(TRAIN + "the_ratio_of_the_first_minibatch_is_one",),
    ),
    Bug(
        name="logprob-of-the-next-token", level=1, where="nanorlhf.logprobs:response_hidden",
        old="model(query_response, real, last=T + 1, groups=groups)[:, :-1]",
        new="model(query_response, real, last=T + 1, groups=groups)[:, 1:]",
        symptom="policy/sampler_gap is 12.5 instead of 0 in the first update, although policy/first_ratio_error is "
        "near zero. objective/entropy is 90 instead of 1.4 to 1.6 in the first update.",
        cause="Hidden states are off by one against the labels: each token is predicted from a state that has read it.",
        who="trlx#107, trl#4 (a mask shift), trlx accelerate_ppo_trainer.py (mask not shifted by one)",
        guard=(TRAIN + "left_padding_does_not_change_the_logprobs_of_a_response[rotary_half]",),
    ),
    Bug(
        name="clipped-the-wrong-way", level=2, where="nanorlhf.ppo:policy_loss",
        old="torch.maximum(unclipped, clipped)", new="torch.minimum(unclipped, clipped)",
        symptom="policy/loss is -0.029 instead of -0.009 to -0.007 in the first update: it is the smaller one of two "
        "terms. policy/approx_kl is 0.020 instead of 0.004 to 0.007 in the first update, and objective/kl is 1.6 "
        "instead of 0.3 to 0.6 in updates 2 to 5. objective/score rises faster at first: objective/score is 1.1 "
        "instead of 0.6 to 0.8 in updates 2 to 5.",
        cause="The loss is the smaller of the two terms, so clipping never stops a step.",
        who=NOBODY,
        guard=(PPO + "policy_loss_of_three_tokens_by_hand",),
    ),
    Bug(
        name="nan-times-zero", level=3, where="nanorlhf.ppo:policy_loss",
        old="torch.where(actions, advantages, 0.0)", new="advantages * actions",
        symptom="No metric of the first five updates changes because masked positions are finite. One NaN after the "
        "end of a response makes the whole step NaN (not measured).",
        cause="Masked positions are multiplied by 0, and NaN * 0 is NaN.",
        who="OpenRLHF#1240",
        guard=(PPO + "nan_after_the_end_reaches_neither_loss_nor_gradient",),
    ),
    Bug(
        name="mean-of-means", level=2, where="train_ppo:main",
        old="pg_losses.sum() / num_actions", new="pg_losses[pg_losses != 0].mean()",
        symptom="policy/loss is -0.0019 instead of -0.0054 to -0.0048 in updates 2 to 5: the loss and the step size "
        "depend on --micro-batch-size, and short rows weigh more. objective/score stays near the healthy range.",
        cause="Each micro-batch is divided by its own number of tokens instead of the minibatch's.",
        who="OpenRLHF#1249, open-instruct#1161, SkyRL#925, NeMo-RL#212, twinkle#292, N+ ppo.py",
        guard=(TRAIN + "the_micro_batch_size_does_not_change_the_gradient[1-clips0]",),
    ),
    Bug(
        name="mean-of-means-in-sft", level=2, where="nanorlhf.training.supervised:backward",
        old="loss, *rest = sums(model, rows)", new="loss, *rest = sums(model, rows)\nloss = loss / len(rows)",
        symptom="loss is 0.43 instead of 6.59 to 6.81 in the first update, far below the logarithm of the vocabulary "
        "size, and validation_loss, which is right, doesn't follow it: validation_loss ends at 0.410 instead of 0.400 "
        "to 0.406. The logged loss and the gradient depend on --micro-batch-size.",
        cause="Each micro-batch's loss is a mean over its rows, and the means are added up: a mean of "
        "means.",
        who="OpenRLHF#1249, open-instruct#1161, trl#2596",
        guard=("tests/training/test_supervised.py::test_micro_batches_change_neither_the_gradient_nor_the_means",),
    ),
    Bug(
        name="large-ratios-are-dropped", level=3, where="nanorlhf.ppo:policy_loss",
        old="torch.maximum(unclipped, clipped)",
        new="torch.maximum(unclipped, clipped) * (unclipped.abs().mean() < 10)",
        symptom="No metric of the first five updates changes because the ratios stay small. With larger steps, "
        "policy/loss is exactly zero in some micro-batches, without any warning (not measured).",
        cause="A micro-batch is silently dropped if its mean |ratio * advantage| is 10 or more.",
        who="trl 0.11, ppo_trainer.py (ratio_threshold), trl#1857",
        guard=(PPO + "a_ratio_far_from_one_is_clipped_and_never_dropped",),
    ),
    Bug(
        name="old-logprobs-move", level=1, where="train_ppo:main",
        old="policy_loss(new_logprobs, mb.ratio_to, mb.advantages, mb.loss_actions, args.clip_range)",
        new="policy_loss(new_logprobs, new_logprobs.detach(), mb.advantages, mb.loss_actions, args.clip_range)",
        symptom="policy/clip_fraction is 0 instead of 0.034 to 0.062 in the first update, and policy/loss is 0 "
        "instead of -0.009 to -0.007 in the first update. policy/approx_kl is 0.018 instead of 0.004 to 0.007 in the "
        "first update: nothing limits the step.",
        cause="The ratio compares the policy with itself instead of with the policy that wrote the rollout.",
        who="DeepSpeedExamples#528, ppo_trainer.py",
        guard=(TRAIN + "the_rollout_stays_frozen_over_the_epochs",),
    ),
    Bug(
        name="ratio-over-padding", level=1, where="nanorlhf.training.update_metrics:UpdateStatistics.add_tokens",
        old='self.add("policy/ratio", ratio[counted].sum() / count)',
        new='self.add("policy/ratio", ratio.sum() / count)',
        symptom="policy/ratio is 1.55 instead of 1.00 to 1.01 in the first update, and stays there. Nothing else "
        "changes.",
        cause="The logged ratio also sums over padding, where it is 1, but divides by the number of tokens.",
        who="N+ ppo.py, and still TRL 1.x",
        guard=(RECOUNT,),
    ),
    Bug(
        name="clipped-share-of-all-tokens", level=2, where="train_grpo:main",
        old="losses, is_clipped = algorithm.policy_loss(\n"
        "    new_logprobs, mb.ratio_to, mb.advantages, mb.loss_actions, clip_range\n)",
        new="losses, is_clipped = algorithm.policy_loss(\n"
        "    new_logprobs, mb.ratio_to, mb.advantages, mb.loss_actions, clip_range\n)\n"
        "is_clipped = is_clipped * (mb.loss_actions.sum() / mb.real.sum())",
        symptom="policy/clip_fraction is 0.0125 instead of 0.1024 to 0.1065 in the first update. It is too small "
        "in all updates, the more the longer the queries are. The loss is right.",
        cause="The denominator counts all tokens, including the query's, instead of the tokens in the loss.",
        who=CS336,
        guard=("tests/test_train_grpo.py::test_the_statistics_of_gspo_describe_responses",),
    ),
    Bug(
        name="widths-padded-on-the-left", level=1, where="nanorlhf.batch:Batch.read",
        old="F.pad(x, (0, T - x.size(1)))", new="F.pad(x, (T - x.size(1), 0))",
        symptom="policy/first_ratio_error is 0.997 instead of 0 in the first update, unless each micro-batch has a "
        "response of the full length. objective/score ends at 0.08 instead of 1.33 to 1.48.",
        cause="A micro-batch is as wide as its longest response. Its log-probabilities are padded to the width of the "
        "rollout on the wrong side, so they belong to other tokens.",
        who=CS336,
        guard=(BATCH + "read_returns_batch_order_with_zeros_in_dropped_columns",),
    ),
    # ------------------------------------------------------------------------------------- data, optimizer, evaluation
    Bug(
        name="eos-has-no-loss", level=1, where="train_sft:demonstration_loss",
        old="index < length[:, None]", new="index < length[:, None] - 1",
        symptom="eos_rate ends at 0 instead of 1: after SFT, no sample ends with EOS. The loss doesn't warn: "
        "validation_loss ends at 0.24 instead of 0.40 to 0.41.",
        cause="The label of the last token, EOS, is masked, so the policy never learns to stop.",
        who="trl#1623, trl#3091, llm-course#33, alignment-handbook#127, unsloth#416",
        guard=("tests/test_train_sft.py::test_eos_has_a_gradient_and_padding_has_none",),
    ),
    Bug(
        name="no-leading-blank", level=3, where="nanorlhf.dataset:with_leading_space",
        old='" " + response', new="response",
        symptom="No metric of a default run changes because the demo's responses begin with a space. Without this "
        "space, losses are slightly higher, because a response's token ids differ from the ids it has in running text "
        "(not measured).",
        cause="Query and response are tokenised separately, without the space between them, so the first token of the "
        "response differs.",
        who="trl#1702",
        guard=("tests/test_dataset.py::test_a_response_gets_a_leading_space_only_if_it_has_none",),
    ),
    Bug(
        name="seed-is-ignored", level=3, where="nanorlhf.dataset:batch_indices",
        old="np.random.default_rng((seed, epoch))", new="np.random.default_rng(epoch)",
        symptom="One run doesn't show the bug. Its metrics only differ from the healthy run's, as with any order of "
        "the data: policy/entropy is 0.204 instead of 0.217 to 0.224 in the first update. Runs with different seeds "
        "see the same data in the same order, so the spread over seeds is too narrow (not measured).",
        cause="The permutation of an epoch doesn't depend on the seed.",
        who="OpenRLHF#1355",
        guard=("tests/test_dataset.py::test_batches_depend_only_on_the_seed",),
    ),
    Bug(
        name="ranks-overlap", level=3, where="nanorlhf.distributed:rank_slice",
        old="rank() * share", new="rank()",
        symptom="No metric of the first five updates changes because the demo runs in one process. With several, some "
        "rows of a batch are used twice and others never (not measured).",
        cause="A rank's slice starts at its rank instead of at rank * share.",
        who="N+ reward.py and dpo.py; OpenRLHF#1355, ColossalAI#3894, llm.c#792",
        guard=("tests/test_distributed.py::test_the_slices_of_the_ranks_are_disjoint_and_cover_the_batch",),
    ),
    Bug(
        name="fresh-optimizer-on-resume", level=3, where="nanorlhf.training.optimizer:FiniteSteps.load_state_dict",
        old='distributed.load_optimizer(self.optimizer, state["optimizer"])', new="",
        symptom="No metric of a default run changes because it isn't interrupted. After --resume, the loss jumps a "
        "little, because Adam's moments start from zero (not measured).",
        cause="The optimizer's state is saved but never loaded.",
        who="NeMo-RL#3171, pytorch/rl#4188, nanoGPT#236",
        guard=("tests/training/test_optimizer.py::test_its_state_is_restored",),
    ),
    Bug(
        name="logits-in-bfloat16", level=2, where="nanorlhf.model:GPT.logits",
        old="wide_linear(hidden, head, self.head_bias, self.config.logit_cap)",
        new="wide_linear(hidden, head, self.head_bias, self.config.logit_cap).bfloat16().float()",
        symptom="policy/sampler_gap is 0.0030 instead of 0 in the first update, although the models are in single "
        "precision. objective/score rises as usual.",
        cause="The sampler's logits are rounded to bfloat16.",
        who="xtuner#1108, prime-rl#568, transformers#31267",
        guard=(GENERATE + "logprobs_of_the_cache_equal_those_of_a_full_forward_pass",
               GENERATE + "autocast_does_not_round_the_logits"),
    ),
    Bug(
        name="dpo-by-mean", level=2, where="nanorlhf.dpo:summed_logprobs",
        old="logprobs.sum(1)", new="logprobs.sum(1) / (logprobs != 0).sum(1)",
        symptom="validation_margin ends at 0.58 instead of 1.39 to 1.42, validation_loss ends at 0.50 instead of 0.34 "
        "to 0.35, and validation_accuracy ends at 0.85 instead of 0.89 to 0.90. Long responses are favoured (not "
        "measured).",
        cause="The log-probabilities of a response are averaged over its tokens; DPO sums them.",
        who=NOBODY,
        guard=(DPO + "logprobs_are_summed_over_the_response_with_its_eos_and_without_the_query",),
    ),
    Bug(
        name="judge-is-always-answered", level=3, where="nanorlhf.evals.judge:parse",
        old="if found is None:\n    return None", new='if found is None:\n    return "A"',
        symptom="Not measured: the demo has no LLM judge. With eval.py and a judge, every answer is parsed as a "
        "verdict, and the win rate moves towards one half.",
        cause="An answer that can't be parsed counts as a verdict for A.",
        who="N+ eval/oai.py (draws A or B at random)",
        guard=("tests/evals/test_judge.py::test_anything_else_is_unparsed",),
    ),
    Bug(
        name="timeout-does-not-compile", level=3, where="nanorlhf.sandbox.execution:run_tests",
        old='Verdict(True, passed or reason == "wrong_answer", passed, reason, share, output, seconds)',
        new='Verdict(\n    reason != "timeout", passed or reason == "wrong_answer", passed, reason, share, output, '
        "seconds\n)",
        symptom="Not measured: the demo runs no programs. With eval.py programs, compile@k is too low, because "
        "programs that run too long count as failures.",
        cause="A program that is stopped at its time limit is counted as one that doesn't compile.",
        who="amazon-science/mxeval, execution.py",
        guard=("tests/sandbox/test_execution.py::test_a_python_program_gets_its_verdict",),
    ),
)  # fmt: skip


def bug_named(name: str) -> Bug:
    for bug in BUGS:
        if bug.name == name:
            return bug
    raise InputError(f"unknown bug {name!r}: make the copy again.")
