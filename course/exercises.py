"""The exercises, in order: functions of this repository that `python -m course start` empties.

This table is all that is stored. The text of an exercise is the function's docstring, its solution is the function's
body, and its grader is the function's own tests.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from nanorlhf.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Exercise:
    name: str
    functions: tuple[str, ...]
    """module:name of each function to empty"""
    read: str
    """what to read first"""
    hint: str
    tests: tuple[str, ...]
    """pytest node ids that must all pass"""
    points: int
    level: int
    """1: a formula in code; 2: care with shapes and masks; 3: an algorithm"""
    needs: tuple[str, ...] = ()
    """earlier exercises that the tests depend on"""


EXERCISES: tuple[Exercise, ...] = (
    # ------------------------------------------------------------------------------------------- 1. a language model
    Exercise(
        name="padding",
        functions=("nanorlhf.padding:first_true_index",),
        read="docs/details.md, N+ 5",
        hint="argmax returns 0 both for a True at index 0 and for no True at all, so take the minimum over the indices "
        "of the True entries instead. A row without columns has no minimum.",
        tests=(
            "tests/test_padding.py::test_first_true_index_equals_list_index",
            "tests/test_padding.py::test_a_row_without_columns_has_its_first_true_at_0",
        ),
        points=1,
        level=1,
    ),
    Exercise(
        name="positions",
        functions=("nanorlhf.masks:position_ids",),
        read="docs/details.md, N+ 5 and 14, and the drawing in the docstring",
        hint="The cumulative sum of the mask, minus 1; padding gets 0.",
        tests=(
            "tests/test_model.py::test_positions_equal_the_drawing",
            "tests/test_padding.py::test_positions_count_the_real_tokens_before",
        ),
        points=1,
        level=1,
    ),
    Exercise(
        name="attention-mask",
        functions=("nanorlhf.masks:attention_mask",),
        read="the docstring of positions_and_biases in nanorlhf/masks.py",
        hint="Compare a column of query indices with a row of key indices, then combine the result with the mask.",
        tests=(
            "tests/test_model.py::test_the_attention_mask_equals_a_triple_loop",
            "tests/test_model.py::test_a_row_of_only_padding_is_finite_and_does_not_affect_other_rows[gpt2]",
        ),
        points=2,
        level=2,
        needs=("positions",),
    ),
    Exercise(
        name="rotary-positions",
        functions=("kernels.attention:apply_rotary_",),
        read="Su et al. 2021 (RoFormer), section 3.4; rotary_tables and rotated_heads in kernels/attention.py",
        hint="A pair (a, b) becomes (a cos - b sin, b cos + a sin). The update is in place: compute one half before "
        "you overwrite the other.",
        tests=(
            "tests/kernels/test_attention.py::test_a_rotation_is_a_product_of_complex_numbers",
            "tests/test_checkpoint.py::test_hidden_states_and_logits_equal_transformers[gpt_neox-changes6]",
            "tests/test_checkpoint.py::test_hidden_states_and_logits_equal_transformers[codegen-changes9]",
        ),
        points=3,
        level=2,
        needs=("positions", "attention-mask"),
    ),
    Exercise(
        name="sampling",
        functions=("nanorlhf.generate:draw",),
        read="the call to draw in sample, in nanorlhf/generate.py",
        hint="Use torch.searchsorted on the cumulative sum. Never return an id with probability 0, even if uniform "
        "number times total rounds up to the total.",
        tests=(
            "tests/test_generate.py::test_an_id_of_probability_zero_is_never_drawn",
            "tests/test_generate.py::test_an_id_of_probability_zero_is_never_drawn_where_a_product_rounds_up",
            "tests/test_generate.py::test_draws_equal_a_walk_along_the_running_sum",
            "tests/test_generate.py::test_draws_are_made_in_float64",
            "tests/test_generate.py::test_a_draw_from_nan_is_an_id_of_the_vocabulary",
        ),
        points=1,
        level=2,
    ),
    Exercise(
        name="top-k-and-top-p",
        functions=("nanorlhf.generate:keep_top_k", "nanorlhf.generate:keep_top_p"),
        read="Holtzman et al. 2020, section 3.1",
        hint="Sort, sum the probabilities of all ids ranked above each id, then scatter the keep mask back to the "
        "original order.",
        tests=(
            "tests/test_generate.py::test_top_k_keeps_k_and_top_p_keeps_the_id_that_crosses_p",
            "tests/test_generate.py::test_top_k_and_top_p_equal_a_search_through_a_sorted_list",
            "tests/test_generate.py::test_top_k_keeps_ties_with_the_last_and_top_p_stops_where_p_is_reached",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="kv-cache",
        functions=("nanorlhf.cache:KVCache.append", "kernels.attention:attend_one"),
        read="the docstring of KVCache in nanorlhf/cache.py; attention is softmax(q k^T scale + bias) v",
        hint="The first call stores Q columns starting at column 0. Each later call stores one column and attends to "
        "all columns before `end`. In attend_one, the H / K queries that share keys and values are the rows of one "
        "matmul.",
        tests=("tests/test_model.py::test_decoding_with_a_cache_equals_the_full_forward_pass",),
        points=4,
        level=3,
        needs=("positions", "attention-mask", "rotary-positions"),
    ),
    Exercise(
        name="repeated-ngrams",
        functions=("nanorlhf.generate:ban_repeated_ngrams",),
        read="no_repeat_ngram_size in the docstring of generate, in nanorlhf/generate.py",
        hint="Tensor.unfold returns all n-grams at once: compare their first n - 1 ids with the last n - 1 ids.",
        tests=(
            "tests/test_generate.py::test_ngram_ban_equals_a_search_through_lists",
            "tests/test_generate.py::test_ngram_ban_that_would_ban_every_id_is_lifted",
            "tests/test_generate.py::test_ngram_ban_bans_the_same_ids_as_a_search_through_lists",
            "tests/test_generate.py::test_ngram_ban_needs_a_whole_ngram",
        ),
        points=3,
        level=3,
        needs=("kv-cache", "sampling", "top-k-and-top-p"),
    ),
    # ---------------------------------------------------------------------------------------------- 2. demonstrations
    Exercise(
        name="leading-blank",
        functions=("nanorlhf.dataset:with_leading_space",),
        read="docs/details.md, N+ 3; docs/data.md",
        hint="There are three cases in which the response stays unchanged. Otherwise, prepend one space.",
        tests=(
            "tests/test_dataset.py::test_a_response_gets_a_leading_space_only_if_it_has_none",
            "tests/test_dataset.py::test_a_chats_response_is_unchanged",
        ),
        points=1,
        level=1,
    ),
    Exercise(
        name="truncation",
        functions=("data.tldr:truncate",),
        read="docs/details.md, N+ 2",
        hint="Make three lists of cut positions and try them in turn with data.prepare.longest_fit. SENTENCE_END is in "
        "data.prepare too.",
        tests=(
            "tests/data/test_tldr.py::test_truncation_by_hand",
            "tests/data/test_tldr.py::test_characters_are_dropped_from_the_first_paragraph_alone",
            "tests/data/test_tldr.py::test_a_post_without_newline_and_sentence_is_cut_character_by_character",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="batches",
        functions=("nanorlhf.dataset:batch_indices",),
        read="docs/details.md, N+ 21",
        hint="Row `position` of the stream is in epoch position // num_rows. Seed the permutation of an epoch with the "
        "pair (seed, epoch): with the sum seed + epoch, runs with different seeds would share epochs.",
        tests=(
            "tests/test_dataset.py::test_every_row_comes_once_per_epoch_and_no_batch_is_short",
            "tests/test_dataset.py::test_a_batch_may_span_two_epochs",
            "tests/test_dataset.py::test_batches_depend_only_on_the_seed",
            "tests/test_dataset.py::test_a_negative_seed_gets_one_sentence",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="learning-rate",
        functions=("nanorlhf.training.optimizer:lr_factor",),
        read="docs/details.md, N+ 9, 10 and 20",
        hint="First the warm-up, then the decay: it depends on the fraction of the remaining steps that is done.",
        tests=(
            "tests/training/test_schedule.py::test_linear_is_the_papers_fraction",
            "tests/training/test_schedule.py::test_cosine_starts_at_one_is_half_way_in_the_middle_and_falls_to_zero",
            "tests/training/test_schedule.py::test_warm_up_rises_in_a_straight_line_to_the_peak",
            "tests/training/test_schedule.py::test_the_decay_begins_after_the_warm_up",
        ),
        points=1,
        level=1,
    ),
    Exercise(
        name="sft-loss",
        functions=("train_sft:demonstration_loss",),
        read="docs/lecture.md, 1; num_labels, below the function in train_sft.py; GPT.forward in nanorlhf/model.py",
        hint="right_pad the texts. A text may contain [PAD], so use the lengths to tell which tokens are real. "
        "Position i predicts token i + 1, and the first token of a text isn't a label. Select the hidden states that "
        "have a label before you apply the LM head: linear_logprobs in kernels takes (N, C), and the head's bias and "
        "cap. With `last`, the last block skips the positions before the labels. An encoder-decoder needs "
        "query_length.",
        tests=(
            "tests/test_train_sft.py::test_loss_is_the_sum_over_the_tokens_that_count_row_by_row",
            "tests/test_train_sft.py::test_the_first_token_of_a_text_is_no_label",
            "tests/test_train_sft.py::test_the_last_block_computes_no_column_before_the_labels",
            "tests/test_train_sft.py::test_eos_has_a_gradient_and_padding_has_none",
            "tests/test_train_t5.py::test_the_loss_is_that_of_transformers",
        ),
        points=3,
        level=2,
        needs=("positions", "attention-mask", "rotary-positions"),
    ),
    Exercise(
        name="ranks",
        functions=("nanorlhf.distributed:rank_slice", "nanorlhf.distributed:sum_gradients"),
        read="the docstring of nanorlhf/distributed.py; docs/long_runs.md",
        hint="One all_reduce of all gradients, flattened into one vector, is cheaper than one per gradient. Skip "
        "sharded parameters and parameters without a gradient.",
        tests=(
            "tests/test_distributed.py::test_the_slices_of_the_ranks_are_disjoint_and_cover_the_batch",
            "tests/test_distributed.py::test_gradients_are_summed_over_the_ranks_parameter_by_parameter",
            "tests/test_distributed.py::test_only_gradients_that_differ_between_ranks_are_sent",
        ),
        points=2,
        level=2,
        needs=("batches",),
    ),
    Exercise(
        name="micro-batches",
        functions=("nanorlhf.training.supervised:backward",),
        read="the docstring of nanorlhf/distributed.py; evaluate, below the function, which has the same loop",
        hint="Divide each sum by the count of the whole batch, not by the count of the micro-batch, and do it before "
        "distributed.all_sum adds up the means of the ranks.",
        tests=(
            "tests/training/test_supervised.py::test_micro_batches_change_neither_the_gradient_nor_the_means",
            "tests/training/test_supervised.py::test_ranks_add_up_to_the_gradient_and_the_means_of_the_whole_batch",
        ),
        points=2,
        level=2,
        needs=("sft-loss", "ranks"),
    ),
    # ------------------------------------------------------------------------------------------------ 3. reward models
    Exercise(
        name="scalar-head",
        functions=("nanorlhf.model:ScalarModel.__init__",),
        read="docs/details.md, N+ 11 and 15; the forward pass below the function",
        hint="The checkpoint uses the names `transformer`, `score` and `reward_bias`. reward_bias is a buffer with one "
        "number. N+ 11 gives the standard deviation of the weights, not their variance; the bias starts at 0. Store "
        "`config` too.",
        tests=(
            "tests/test_model.py::test_the_scalar_head_starts_at_one_over_the_square_root_of_width_plus_one",
            "tests/test_model.py::test_the_normalisation_is_subtracted_from_every_score",
            "tests/test_model.py::test_the_scalar_head_of_width_two_has_weights_of_variance_a_third",
        ),
        points=1,
        level=1,
        needs=("positions", "attention-mask"),
    ),
    Exercise(
        name="reward-at-eos",
        functions=("nanorlhf.reward_model:end_index", "nanorlhf.reward_model:end_scores"),
        read="docs/details.md, N+ 12 and 13",
        hint="A left-padded query begins with [PAD], so start looking for [PAD] at the response. Pass the model the "
        "mask of real tokens and, for an encoder-decoder, query_length. With `last` it skips the columns before the "
        "first end.",
        tests=(
            "tests/test_reward_model.py::test_end_index_of_the_docstrings_example",
            "tests/test_reward_model.py::test_reward_is_read_at_the_last_token_with_any_padding",
            "tests/test_reward_model.py::test_a_score_depends_neither_on_padding_nor_on_the_batch",
            "tests/test_reward_model.py::test_an_empty_response_has_the_score_of_its_query",
            "tests/test_reward_model.py::test_a_score_has_the_gradient_of_its_text",
            "tests/test_train_t5.py::test_scores_are_read_at_the_last_token_whichever_side_is_padded",
        ),
        points=2,
        level=2,
        needs=("padding", "scalar-head", "rotary-positions"),
    ),
    Exercise(
        name="pairwise-loss",
        functions=("train_rm:contrastive_loss",),
        read="docs/lecture.md, 2; pair_scores in nanorlhf/reward_model.py",
        hint="torch.nn.functional.logsigmoid stays finite when log(sigmoid(x)) doesn't. The statistics need no "
        "gradient.",
        tests=("tests/test_train_rm.py::test_the_loss_of_five_pairs_typed_by_hand",),
        points=1,
        level=1,
    ),
    Exercise(
        name="regression-loss",
        functions=("train_rm:regression_loss",),
        read="Scored in nanorlhf/dataset.py; response_scores in nanorlhf/reward_model.py",
        hint="The target is row.score; the texts may be padded on either side. Two signs agree if both scores are at "
        "least 0 or both are below 0. The statistics need no gradient.",
        tests=("tests/test_regression.py::test_the_loss_of_three_scores_typed_by_hand",),
        points=1,
        level=1,
    ),
    Exercise(
        name="normalisation",
        functions=("train_rm:normalise",),
        read="docs/details.md, N+ 15",
        hint="Each rank scores every world_size-th demonstration, because their number need not be a multiple of "
        "world_size. Then sum the scores and their squares over the ranks.",
        tests=(
            "tests/test_train_rm.py::test_demonstrations_score_zero_on_average_after_reloading",
            "tests/test_train_rm.py::test_the_summary_holds_mean_and_deviation_of_the_demonstrations_before",
            "tests/test_train_rm.py::test_each_rank_scores_its_own_demonstrations_and_the_sums_add_up",
        ),
        points=2,
        level=2,
        needs=(
            *("sft-loss", "micro-batches", "kv-cache", "pairwise-loss", "reward-at-eos"),
            *("sampling", "top-k-and-top-p", "leading-blank", "learning-rate"),
        ),
    ),
    Exercise(
        name="eos-masks",
        functions=("nanorlhf.ppo:eos_masks",),
        read="docs/details.md, N+ 23, and the drawing in the docstring",
        hint="The response ends at the first EOS or at the token before the first [PAD], whichever comes first.",
        tests=(
            "tests/test_ppo.py::test_masks_of_the_example_in_the_docstring",
            "tests/test_ppo.py::test_a_row_without_eos_ends_at_its_last_token_and_early_padding_is_masked",
            "tests/test_ppo.py::test_masks_equal_a_loop_over_each_row",
            "tests/test_ppo.py::test_a_row_of_only_padding_ends_at_its_first_position",
        ),
        points=2,
        level=2,
        needs=("padding",),
    ),
    Exercise(
        name="response-logprobs",
        functions=("nanorlhf.logprobs:response_hidden", "nanorlhf.logprobs:response_logprobs"),
        read="the module docstring of kernels/logprobs.py; unpack in nanorlhf/logprobs.py",
        hint="The hidden state at position Q - 1 + t predicts response token t, so call the model with last=T + 1.",
        tests=(
            "tests/test_train_ppo.py::test_left_padding_does_not_change_the_logprobs_of_a_response[rotary_half]",
            "tests/test_train_ppo.py::test_left_padding_does_not_change_the_logprobs_of_a_response[learned]",
            "tests/test_train_ppo.py::test_logprobs_and_entropies_have_the_gradients_of_rows_without_padding",
        ),
        points=3,
        level=2,
        needs=("positions", "attention-mask", "rotary-positions", "eos-masks"),
    ),
    Exercise(
        name="dpo-loss",
        functions=("train_dpo:margin_loss",),
        read="docs/lecture.md, 2; Rafailov et al. 2023, section 4",
        hint="Implement the formulas in the docstring, with torch.nn.functional.logsigmoid. main also calls the "
        "function for ORPO and SimPO: they use the formula of `sigmoid`.",
        tests=(
            "tests/test_train_dpo.py::test_loss_and_gradient_are_those_of_the_formula",
            "tests/test_train_dpo.py::test_a_flipped_label_costs_the_margin",
            "tests/test_train_dpo.py::test_the_other_losses_are_those_of_their_papers",
        ),
        points=2,
        level=1,
    ),
    Exercise(
        name="dpo-logprobs",
        functions=("nanorlhf.dpo:summed_logprobs",),
        read="docs/details.md, N+ 19",
        hint="Queries are padded on the left, responses on the right; EOS is part of the sum, the query is not.",
        tests=(
            "tests/test_dpo.py::test_logprobs_are_summed_over_the_response_with_its_eos_and_without_the_query",
            "tests/test_dpo.py::test_implicit_rewards_do_not_depend_on_the_other_rows",
            "tests/test_dpo.py::test_summed_logprobs_have_the_gradient_of_float64",
        ),
        points=2,
        level=2,
        needs=("response-logprobs",),
    ),
    # ---------------------------------------------------------------------------------------------------------- 4. PPO
    Exercise(
        name="policy-gradient",
        functions=("nanorlhf.doctor.seven:probabilities", "nanorlhf.doctor.seven:reinforce"),
        read="docs/lecture.md, 3.4",
        hint="The log-probability of a response is a sum over its tokens. Compute reinforce without autograd: a row of "
        "the identity matrix per token, minus the probabilities, summed over the tokens.",
        tests=(
            "tests/doctor/test_seven.py::test_the_seven_probabilities_by_hand",
            "tests/doctor/test_seven.py::test_the_probabilities_sum_to_1_and_have_gradients",
            "tests/doctor/test_seven.py::test_reinforce_is_unbiased_with_any_baseline",
            "tests/doctor/test_seven.py::test_an_estimate_is_score_minus_baseline_times_the_gradient_of_the_log_probability",
            "tests/doctor/test_seven.py::test_the_mean_of_ten_thousand_estimates_is_close_and_a_baseline_brings_it_closer",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="kl-estimators",
        functions=("kernels.kl:k1", "kernels.kl:k2", "kernels.kl:k3"),
        read="Schulman 2020, Approximating KL divergence; the module docstring of kernels/kl.py",
        hint="With x = log p - log q: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x; expm1 keeps k3 exact near 0.",
        tests=(
            "tests/kernels/test_kl.py::test_estimators_have_the_stated_expectation",
            "tests/kernels/test_kl.py::test_estimators_have_the_slopes_of_their_formulas",
        ),
        points=1,
        level=1,
    ),
    Exercise(
        name="exact-kl",
        functions=("kernels.kl:stored_kl_divergence", "nanorlhf.logprobs:compared_logprobs"),
        read="the module docstring of kernels/kl.py; kl_divergence and linear_kl_divergence there",
        hint="An id that the policy can't emit has p = 0 and log p = -inf. Their product must be 0 and its gradient "
        "finite, not NaN, so replace the factor before you multiply. A p that is only too small for float32 isn't 0. "
        "compared_logprobs follows response_logprobs; both policies may have a head bias and a logit cap.",
        tests=(
            "tests/test_train_ppo.py::test_two_policies_are_compared_by_the_whole_distribution_of_each_token",
            "tests/kernels/test_kl.py::test_the_kl_of_any_shape_equals_a_sum_in_float64[cpu]",
            "tests/kernels/test_kl.py::test_the_gradient_of_the_kl_equals_float64[cpu]",
            "tests/kernels/test_kl.py::test_impossible_ids_count_as_zero_and_ids_impossible_only_for_the_reference_as_infinite[cpu]",
            "tests/kernels/test_kl.py::test_a_probability_too_small_for_the_type_is_not_one_of_zero[cpu]",
        ),
        points=2,
        level=2,
        needs=("response-logprobs",),
    ),
    Exercise(
        name="whitening",
        functions=("nanorlhf.ppo:masked_mean", "nanorlhf.ppo:whiten"),
        read="docs/lecture.md, 3.3",
        hint="Positions that don't count may be NaN: select with torch.where, never multiply by 0.",
        tests=(
            "tests/test_ppo.py::test_masked_mean_ignores_nan",
            "tests/test_ppo.py::test_whitening_equals_float64_statistics_of_counted_positions",
            "tests/test_ppo.py::test_equal_numbers_are_whitened_to_zero",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="token-rewards",
        functions=("nanorlhf.training.trace:unwhitened_rewards",),
        read="docs/lecture.md, 3.2; the `reward` line of the microscope's page, docs/microscope.md",
        hint="The tensors are fields of Batch in nanorlhf/batch.py, plus `scores` (B,). Add the score to the reward "
        "that is already there: at the last token, that is minus beta times the KL. Log-probabilities may be NaN at "
        "positions without an action: select with torch.where.",
        tests=("tests/training/test_trace.py::test_rewards_are_a_tokens_own_minus_beta_times_kl_and_the_score_once",),
        points=1,
        level=2,
    ),
    Exercise(
        name="gae-loop",
        functions=("kernels.gae:gae_loop",),
        read="Schulman et al. 2016, section 3; the module docstring of kernels/gae.py",
        hint="Loop from the last step to the first and carry the advantage and the next value. T may be 0. On the "
        "microscope's page (docs/microscope.md), the lines `delta` and `from the right` show both.",
        tests=(
            "tests/kernels/test_gae.py::test_every_way_equals_a_double_loop_in_float64[loop]",
            "tests/kernels/test_gae.py::test_extreme_settings_are_monte_carlo_and_one_step[loop-gamma_lam0]",
            "tests/kernels/test_gae.py::test_extreme_settings_are_monte_carlo_and_one_step[loop-gamma_lam1]",
        ),
        points=2,
        level=1,
    ),
    Exercise(
        name="gae-terms",
        functions=("nanorlhf.report.microscope:gae_terms",),
        read="docs/lecture.md, 3.3; `delta` and `from the right` on the microscope's page, docs/microscope.md",
        hint="You need no loop, because the advantages are an input. At a response's last state nothing comes from the "
        "right, and the tensors may be NaN after it. Positions without a state may get any number.",
        tests=("tests/report/test_microscope.py::test_the_terms_of_gae_add_up_to_the_sum_of_all_later_deltas",),
        points=1,
        level=2,
    ),
    Exercise(
        name="gae-scan",
        functions=("kernels.gae:gae_doubling",),
        read="the module docstring of kernels/gae.py",
        hint="Each round doubles the number of deltas summed at each position. How far ahead are the deltas that are "
        "still missing, and by how much are they discounted?",
        tests=(
            "tests/kernels/test_gae.py::test_every_way_equals_a_double_loop_in_float64[doubling]",
            "tests/kernels/test_gae.py::test_extreme_settings_are_monte_carlo_and_one_step[doubling-gamma_lam0]",
            "tests/kernels/test_gae.py::test_positions_without_a_state_do_not_change_advantages",
        ),
        points=3,
        level=3,
    ),
    Exercise(
        name="policy-loss",
        functions=("nanorlhf.ppo:policy_loss",),
        read="Schulman et al. 2017, section 3; docs/lecture.md, 3.5; ratio_bounds, above the function",
        hint="Take the larger of the two losses. Without an action the loss is 0, whatever the inputs are. If the "
        "ratio overflows, a negative advantage has an infinite loss and gradient, a positive one the clipped loss and "
        "no gradient.",
        tests=(
            "tests/test_ppo.py::test_policy_loss_of_three_tokens_by_hand",
            "tests/test_ppo.py::test_a_ratio_far_from_one_is_clipped_and_never_dropped",
            "tests/test_ppo.py::test_an_overflowing_ratio_is_clipped_like_any_large_one",
            "tests/test_ppo.py::test_policy_loss_is_0_where_there_is_no_action",
        ),
        points=3,
        level=2,
    ),
    Exercise(
        name="gradient-sign",
        functions=("nanorlhf.report.microscope:policy_push",),
        read="docs/lecture.md, 3.4 and 3.5; `clip` and `gradient` on the microscope's page, docs/microscope.md",
        hint="d ratio / d log-probability is the ratio itself. The sign of the advantage decides which end of the clip "
        "range matters; a ratio exactly at that end isn't clipped yet.",
        tests=("tests/report/test_microscope.py::test_the_push_is_minus_autograds_slope_of_the_policy_loss",),
        points=1,
        level=2,
        needs=("policy-loss",),
    ),
    Exercise(
        name="value-loss",
        functions=("nanorlhf.ppo:value_loss",),
        read="docs/lecture.md, 3.5; docs/algorithms.md, PPO",
        hint="It has the same form as the policy loss: the larger of two squared errors.",
        tests=(
            "tests/test_ppo.py::test_value_loss_by_hand_with_and_without_clipping",
            "tests/test_ppo.py::test_nan_after_the_end_reaches_neither_loss_nor_gradient",
            "tests/test_ppo.py::test_splitting_a_batch_into_micro_batches_does_not_change_the_gradient",
            "tests/test_ppo.py::test_values_are_clipped_on_both_sides_of_the_old_ones",
        ),
        points=2,
        level=2,
        needs=("policy-loss",),
    ),
    Exercise(
        name="values",
        functions=("nanorlhf.logprobs:response_values",),
        read="docs/lecture.md, 3.3; response_hidden in the same file; end_scores in nanorlhf/reward_model.py",
        hint="Read the value of token t at the position before it, where the token's logits are read too: the same "
        "shift as in response_hidden. A model that averages over the response must know where the response begins.",
        tests=(
            "tests/test_batch.py::test_a_value_is_computed_at_the_state_before_its_token",
            "tests/test_batch.py::test_a_pooled_value_is_the_mean_over_the_response_so_far",
            "tests/test_batch.py::test_values_have_the_gradient_of_a_row_without_padding",
        ),
        points=1,
        level=2,
        needs=("scalar-head", "rotary-positions"),
    ),
    Exercise(
        name="adaptive-kl",
        functions=("nanorlhf.ppo:KLCoefficient.update",),
        read="Ziegler et al. 2019, section 2.2",
        hint="The error is relative to the target, and clipped.",
        tests=("tests/test_ppo.py::test_adaptive_kl_follows_the_formula_and_clips_the_error",),
        points=1,
        level=1,
    ),
    Exercise(
        name="one-page",
        functions=("nano:rollout", "nano:ppo_loss"),
        read="all of nano.py: the calls show the functions' names, and the code that reads the batch shows its tensors",
        hint="Sample. Compute both policies' log-probabilities and the values. Score; a response without [EOS] gets "
        "missing_eos_score instead. Add the KL penalty at each token, and the score once, in the state after [EOS]. "
        "Set the values to 0 at positions without a state. Then GAE, and whitening over the actions. Each loss is a "
        "mean over its own mask.",
        tests=(
            "tests/test_nano.py::test_what_a_rollout_reads_equals_the_library",
            "tests/test_nano.py::test_rewards_advantages_and_returns_equal_the_library",
            "tests/test_nano.py::test_losses_and_gradients_equal_the_library",
            "tests/test_nano.py::test_three_updates_give_the_weights_of_train_ppo",
        ),
        points=4,
        level=3,
        needs=(
            *("padding", "positions", "attention-mask", "sampling", "top-k-and-top-p", "kv-cache", "leading-blank"),
            *("batches", "learning-rate", "ranks", "scalar-head", "reward-at-eos", "eos-masks", "response-logprobs"),
            *("kl-estimators", "exact-kl", "whitening", "gae-scan", "policy-loss", "value-loss", "values"),
            "adaptive-kl",
        ),
    ),
    Exercise(
        name="group-advantages",
        functions=tuple(f"nanorlhf.grpo:{name}" for name in ("centred", "grpo", "dr_grpo", "rloo")),
        read="docs/algorithms.md, RLOO and GRPO; docs/microscope.md shows a group of one of your runs with its numbers",
        hint="Subtract a group's first value before you subtract its mean: equal numbers then give exactly 0. With "
        "leave-one-out, the distance from the mean of the other k - 1 is k / (k - 1) times the distance from the mean "
        "of all k. Every token of a response gets the response's advantage: (B, T), the shape of kl.",
        tests=(
            "tests/test_train_grpo.py::test_rloo_subtracts_the_mean_reward_of_the_querys_other_responses",
            "tests/test_train_grpo.py::test_leave_one_out_of_three_is_the_distance_from_the_mean_of_the_two_others",
            "tests/test_train_grpo.py::test_the_loss_of_grpo_is_equation_3_of_its_paper",
            "tests/test_train_grpo.py::test_a_group_with_equal_scores_teaches_exactly_nothing",
        ),
        points=2,
        level=2,
        needs=("kl-estimators", "policy-loss"),
    ),
    # ------------------------------------------------------------------------------------------- 5. the other papers
    Exercise(
        name="vote-regression",
        functions=("data.stackoverflow:regression_scores",),
        read="docs/stackoverflow.md; docs/details.md, SO alg 1",
        hint="regression_bounds computes the bounds, _per_answer the shares.",
        tests=(
            "tests/data/test_stackoverflow.py::test_inliers_are_divided_by_the_largest_of_their_sign",
            "tests/data/test_stackoverflow.py::test_outliers_are_clipped_and_do_not_change_the_scale",
            "tests/data/test_stackoverflow.py::test_an_outlier_may_score_less_than_an_inlier_unless_saturated",
            "tests/data/test_stackoverflow.py::test_bounds_of_the_train_split_apply_to_other_votes",
            "tests/data/test_stackoverflow.py::test_votes_without_a_scale_are_refused",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="vote-contrast",
        functions=("data.stackoverflow:contrastive_scores",),
        read="docs/stackoverflow.md; docs/details.md, SO alg 2",
        hint="Only the else branch adds 1 for an accepted answer. The inputs may be nested lists or tuples.",
        tests=(
            "tests/data/test_stackoverflow.py::test_contrastive_scores_are_those_worked_out_by_hand",
            "tests/data/test_stackoverflow.py::test_the_ceiling_of_the_logarithm_is_the_number_of_bits",
        ),
        points=1,
        level=1,
    ),
    Exercise(
        name="metric-at-k",
        functions=("nanorlhf.metrics.at_k:metric_at_k", "nanorlhf.metrics.at_k:mrr_at_k"),
        read="docs/stackoverflow.md",
        hint="Sort the scores: in how many choices of k is the i-th smallest the best? For the rank, use a stable "
        "sort, which keeps the order of ties. score_table and _check_k reject a malformed table or k.",
        tests=(
            "tests/metrics/test_metrics.py::test_metric_at_k_is_the_mean_over_all_choices_of_k",
            "tests/metrics/test_metrics.py::test_metric_at_1_is_the_mean_and_at_n_the_best",
            "tests/metrics/test_metrics.py::test_mrr_at_k_is_one_over_the_rank_of_the_first_useful_answer",
            "tests/metrics/test_metrics.py::test_scores_that_are_not_a_table_of_finite_numbers_are_rejected",
            "tests/metrics/test_metrics.py::test_mrr_at_k_keeps_the_order_of_many_ties_and_needs_a_label_for_each_score",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="pass-at-k",
        functions=("nanorlhf.metrics.at_k:pass_at_k",),
        read="Chen et al. 2021, section 2.1; docs/rlcf.md",
        hint="Multiply fractions, so that no factorial overflows.",
        tests=(
            "tests/metrics/test_metrics.py::test_pass_at_k_is_the_share_of_draws_that_include_a_pass",
            "tests/metrics/test_metrics.py::test_pass_at_k_rejects_impossible_counts",
        ),
        points=1,
        level=1,
    ),
    Exercise(
        name="text-rank",
        functions=("nanorlhf.selfrank.text_rank:text_rank",),
        read="docs/str.md; docs/details.md, STR eq 4",
        hint="Work in float64, on a copy. Divide each node's edges by their sum (a node without edges passes nothing "
        "on), then iterate until the weights stop changing.",
        tests=(
            "tests/selfrank/test_text_rank.py::test_weights_of_a_path_of_three_nodes",
            "tests/selfrank/test_text_rank.py::test_weights_solve_the_equation_and_sum_to_m",
            "tests/selfrank/test_text_rank.py::test_neither_the_diagonal_nor_negative_similarities_count",
            "tests/selfrank/test_text_rank.py::test_an_answer_without_edges_keeps_one_minus_the_damping",
            "tests/selfrank/test_text_rank.py::test_an_answer_distributes_its_vote_by_its_row",
            "tests/selfrank/test_text_rank.py::test_torch_tensors_are_accepted",
            "tests/selfrank/test_text_rank.py::test_an_oscillating_graph_converges",
            "tests/selfrank/test_text_rank.py::test_matrices_that_are_not_similarities_are_rejected",
        ),
        points=3,
        level=2,
    ),
    Exercise(
        name="isodata",
        functions=("nanorlhf.selfrank.isodata:merge", "nanorlhf.selfrank.isodata:split"),
        read="docs/str.md; the docstring of isodata in nanorlhf/selfrank/isodata.py",
        hint="plain_isodata in the tests is a slow version with sets and double loops. Both functions make "
        "one pass over the clusters in order, and both read the labels from before the pass. The file already "
        "has the building blocks: means, squared_distances, in_order, MIN_SPLIT_SIZE.",
        tests=(
            "tests/selfrank/test_isodata.py::test_the_partition_is_that_of_plain_loops",
            "tests/selfrank/test_isodata.py::test_a_cluster_is_split_above_the_size_and_above_the_variance",
            "tests/selfrank/test_isodata.py::test_a_cluster_of_one_is_merged_into_its_nearest_once_per_pass",
            "tests/selfrank/test_isodata.py::test_a_share_is_counted_exactly",
            "tests/selfrank/test_isodata.py::test_a_variance_at_the_limit_is_not_above_it",
            "tests/selfrank/test_isodata.py::test_a_pass_does_not_modify_its_input_labels",
        ),
        points=3,
        level=3,
    ),
    Exercise(
        name="localisation",
        functions=("nanorlhf.rlcf.localisation:character_ends", "nanorlhf.rlcf.localisation:error_token"),
        read="docs/rlcf.md; docs/details.md, RLCF alg 1",
        hint="Count bytes: a token may contain half a character. Invalid bytes count as the replacement characters "
        "that decode(errors='replace') makes of them; UnicodeDecodeError.start and .end give the bytes behind each "
        "replacement character.",
        tests=(
            "tests/rlcf/test_localisation.py::test_a_character_belongs_to_the_token_that_completes_it",
            "tests/rlcf/test_localisation.py::test_an_offset_outside_the_text_blames_the_last_token",
            "tests/rlcf/test_localisation.py::test_broken_bytes_count_as_their_replacement_characters",
            "tests/rlcf/test_localisation.py::test_the_text_up_to_the_blamed_token_is_the_shortest_with_the_character",
        ),
        points=3,
        level=3,
    ),
    Exercise(
        name="discriminator",
        functions=("nanorlhf.rlcf.discriminator:Discriminator.compare", "nanorlhf.rlcf.discriminator:grounding"),
        read="docs/rlcf.md; the module docstring of nanorlhf/rlcf/discriminator.py",
        hint="Run both programs of a pair in one forward pass; only the difference of their two numbers matters.",
        tests=(
            "tests/rlcf/test_discriminator.py::test_the_compiler_decides_where_the_programs_differ_and_the_discriminator"
            "_where_both_pass",
            "tests/rlcf/test_discriminator.py::test_the_discriminator_is_ignored_for_a_program_that_fails",
            "tests/rlcf/test_discriminator.py::test_the_difference_of_two_numbers_is_not_rounded_to_bf16",
            "tests/rlcf/test_discriminator.py::test_the_order_of_the_two_programs_only_changes_the_sign[ours]",
            "tests/rlcf/test_discriminator.py::test_d_is_tanh_of_the_difference_of_one_number_per_text[ours]",
            "tests/rlcf/test_discriminator.py::test_d_has_the_gradient_of_the_tanh_of_the_difference",
        ),
        points=2,
        level=2,
        needs=("positions", "attention-mask", "rotary-positions"),
    ),
    Exercise(
        name="triplet-loss",
        functions=("nanorlhf.rlcf.discriminator:triplet_loss",),
        read="docs/rlcf.md; docs/details.md, RLCF pretraining",
        hint="Fill the distances to programs of the same problem with infinity. A row without a negative has only "
        "infinities and doesn't count as ordered right. Compute distances from differences, not with a matmul: a "
        "matmul loses the digits of two similar programs far from 0.",
        tests=(
            "tests/rlcf/test_discriminator.py::test_the_triplet_loss_is_that_of_a_double_loop_in_value_and_gradient",
            "tests/rlcf/test_discriminator.py::test_a_row_without_a_negative_adds_nothing",
            "tests/rlcf/test_discriminator.py::test_equal_programs_have_a_finite_gradient",
            "tests/rlcf/test_discriminator.py::test_distances_of_many_near_programs_far_from_zero_are_exact",
            "tests/rlcf/test_discriminator.py::test_a_tie_of_positive_and_negative_counts_as_wrong",
        ),
        points=2,
        level=2,
    ),
    # ------------------------------------------------------------------------------------------------------ 6. kernels
    Exercise(
        name="log-softmax",
        functions=("kernels.logprobs:stored_logprobs",),
        read="the module docstring of kernels/logprobs.py",
        hint="You may use PyTorch's logsumexp and softmax. A label outside the vocabulary has log-probability 0. A "
        "logit of -inf has probability 0, and 0 * -inf must not become NaN.",
        tests=(
            "tests/kernels/test_logprobs.py::test_logprobs_and_entropy_of_a_distribution_typed_by_hand",
            "tests/kernels/test_logprobs.py::test_the_specification_of_any_shape_equals_float64_forward_and_backward",
            "tests/kernels/test_logprobs.py::test_extreme_logits_leave_no_nan",
        ),
        points=2,
        level=2,
    ),
    Exercise(
        name="gae-kernel",
        functions=("kernels.gae:gae_kernel",),
        read="the module docstring of kernels/gae.py; the Triton tutorials",
        hint="Use one program per row. Compute the deltas, then a reversed tl.associative_scan with `join`, whose "
        "first pair comes from the right, then add the carry from the blocks to the right. Without a GPU the kernel "
        "runs in Triton's interpreter.",
        tests=(
            "tests/kernels/test_gae.py::test_every_way_equals_a_double_loop_in_float64[triton]",
            "tests/kernels/test_gae.py::test_rows_around_and_beyond_a_block_equal_the_loop[triton-2125]",
            "tests/kernels/test_gae.py::test_the_kernel_writes_its_rows_and_nothing_beyond",
        ),
        points=4,
        level=3,
        needs=("gae-loop",),
    ),
)


def chosen(names: Iterable[str]) -> list[Exercise]:
    """Return the named exercises (all if there are no names), in course order. Raises InputError for unknown names."""
    names = list(names)
    known = [exercise.name for exercise in EXERCISES]
    for name in names:
        if name not in known:
            raise InputError(f"unknown exercise {name!r}: choose from {', '.join(known)}.")
    return [exercise for exercise in EXERCISES if not names or exercise.name in names]


def closure(exercise: Exercise) -> set[str]:
    """Return the names of all exercises that this one needs, directly or indirectly."""
    by_name = {other.name: other for other in EXERCISES}
    needed: set[str] = set()
    pending = list(exercise.needs)
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            pending += by_name[name].needs
    return needed
