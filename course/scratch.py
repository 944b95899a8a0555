"""nano.py from scratch: the file with empty functions, and the tests of each section.

A section's tests import the student's file, so they use the student's own earlier sections. They run the student's code
without protection: grade a stranger's file in a container.
"""

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course.copies import ROOT, new_directory, read_mark, write_mark
from course.edit import rewritten
from course.grader.grade import temporary_tree
from course.grader.worker import Outcome, Worker

SOURCE = ROOT / "nano.py"


@dataclass(frozen=True, kw_only=True)
class Section:
    title: str
    """as in nano.py"""
    read: str
    functions: tuple[str, ...]
    """functions to write"""
    tests: tuple[str, ...]
    """names of tests in tests/test_nano.py that need no later section"""


SECTIONS: tuple[Section, ...] = (
    Section(
        title="1. The world",
        read="the comments above each function",
        functions=(*("make_note", "gold_score", "write", "compare", "encode_queries", "encode_responses", "decode"),),
        tests=(
            "test_a_note_has_three_goods_among_fillers_and_ends_with_a_colon",
            "test_the_gold_score_counts_goods_and_mistakes",
            "test_writers_list_goods_with_probability_care_and_add_wrong_ones_otherwise",
            "test_labels_follow_bradley_and_terry",
            "test_the_writers_of_a_pair_have_any_care_from_0_3_to_1",
            "test_texts_become_ids_and_back",
        ),
    ),
    Section(
        title="2. The model",
        read="Radford et al. 2019 (GPT-2), section 2.3",
        functions=(
            *("Block.forward", "GPT.forward", "response_logits", "response_logprobs", "response_values", "sample"),
            "find_end",
        ),
        tests=(
            "test_logits_equal_the_library",
            "test_the_same_uniforms_give_the_same_tokens",
            "test_ends_and_masks_equal_the_library",
            "test_logprobs_and_values_equal_the_library",
        ),
    ),
    Section(
        title="3. SFT: imitate examples",
        read="docs/lecture.md, 1",
        functions=("sft_loss", "train"),
        tests=("test_the_sft_loss_and_its_gradient_equal_the_library", "test_training_steps_equal_the_library"),
    ),
    Section(
        title="4. The reward model: what people prefer",
        read="docs/lecture.md, 2",
        functions=("scalar_model", "score", "rm_loss", "normalise"),
        tests=(
            "test_a_reward_model_starts_from_the_policy_with_a_new_head",
            "test_scores_equal_the_library",
            "test_the_reward_model_loss_and_its_gradient_equal_the_library",
            "test_normalised_scores_equal_the_library",
        ),
    ),
    Section(
        title="5. PPO: do more of what is good",
        read="docs/lecture.md, 3",
        functions=("whiten", "gae", "rollout", "ppo_loss", "train_ppo"),
        tests=(
            "test_whitening_and_gae_equal_the_library",
            "test_what_a_rollout_reads_equals_the_library",
            "test_rewards_advantages_and_returns_equal_the_library",
            "test_losses_and_gradients_equal_the_library",
            "test_the_first_ratio_is_1",
            "test_three_updates_give_the_weights_of_train_ppo",
            "test_every_tenth_update_prints_its_score_and_kl",
        ),
    ),
    Section(
        title="6. Evaluation with gold scores",
        read="the functions of section 6, which are there; run `python nano.py` and read its table",
        functions=(),
        tests=("test_the_table_equals_a_recount", "test_ppo_raises_the_gold_score_of_sft"),
    ),
)
HINTS = {  # details that neither signature nor comments give
    "make_note": "Three different goods and 2 to 4 fillers, which may repeat, shuffled, then the colon.",
    "write": "With probability care, keep each good of the note, in its order. Then add goods, any of the twelve, "
    "each at a random position, as long as a random number exceeds care and there are fewer than T - 1 words.",
    "compare": "Both writers' care is uniform from 0.3 to 1. The second writes again, with a new care, until the gold "
    "scores differ.",
    "decode": "All words but [PAD] and [EOS].",
    "Block.forward": "Norm, attention with 1 / sqrt(C / HEADS), add; norm, MLP with GELU's tanh approximation, add. "
    "`qkv` outputs q, k and v in this order, and within each the heads in order.",
    "GPT.forward": "A [PAD] sees itself: a softmax over nothing is NaN.",
    "response_logits": "The logit of [PAD] is -inf: it is never sampled.",
    "response_logprobs": "After [EOS] gather any token but [PAD], whose logit is -inf: the loss would be NaN.",
    "sample": "A softmax in float32; then sum the probabilities along the vocabulary in float64. The token is the "
    "first one whose sum exceeds uniform * total; after [EOS] only [PAD] follows.",
    "sft_loss": "The mean over all tokens of the batch, [EOS] included, at temperature 1.",
    "train": "AdamW with eps 1e-5 and PyTorch's other defaults; step i of n has the rate lr * (1 + cos(pi * i / n)) / "
    "2. Before the training, draw the two epochs' permutations from the generator, join them, and cut them into 64s: a "
    "batch may span both epochs, and the last may be shorter. Every 100 steps, print the loss as "
    "`    step   0: loss 1.234`.",
    "scalar_model": "Make GPT(1), copy all but the head, then draw the head's weights with standard deviation "
    "1 / sqrt(C + 1). The tests draw in this order. The bias stays as GPT initialises it.",
    "whiten": "The population variance, plus 1e-8, under the root.",
    "rollout": "Return a dict with query, response, actions, states, scores, logprobs, ref_logprobs, kl, rewards, "
    "values (0 outside the states), returns, advantages and whitened (advantages whitened over the actions). kl is "
    "0 outside the actions, and scores are missing_eos_score without [EOS]. Add the score in column end + 1, the state "
    "after [EOS], or in the last column if there is none.",
    "ppo_loss": "The policy loss uses whitened advantages. The value loss is half the squared error; clip the values "
    "around the rollout's by clip_range.",
    "train_ppo": "One AdamW (eps 1e-5, else PyTorch's defaults) for policy and value model, without gradient clipping; "
    "the rate is lr * (1 - update / num_updates). Draw uniforms (B, T) in float64 from the generator, then in each "
    "epoch a permutation, cut into num_minibatches. Every 10 updates, print "
    "`    update  0: score  0.12, KL  0.34 nats per response`.",
}


def stub(name: str, section: Section) -> list[str]:
    number = section.title.partition(".")[0]
    hint = textwrap.wrap(HINTS.get(name, ""), 94)
    return [*(f"# {line}" for line in hint), f'raise NotImplementedError("section {number}: write {name}")']


def start(directory: Path) -> None:
    """Write nano.py without the bodies of its functions to a new directory."""
    new_directory(directory)
    bodies = {name: stub(name, section) for section in SECTIONS for name in section.functions}
    (directory / SOURCE.name).write_text(rewritten(SOURCE.read_text(encoding="utf-8"), bodies), encoding="utf-8")
    write_mark(directory, {"scratch": True})


def is_scratch(directory: Path) -> bool:
    """Return whether the directory was made by `start` of this module."""
    return bool(read_mark(directory).get("scratch"))


def progress(directory: Path, limit: float, worker: Worker) -> Iterator[str]:
    """Run the sections' tests in order and yield a report, line by line, up to the first section that fails.

    limit: seconds for the tests of a section; the last section trains the whole page.
    """
    with temporary_tree(ROOT) as tree:
        shutil.copyfile(directory / SOURCE.name, tree / SOURCE.name)
        for section in SECTIONS:
            if section is SECTIONS[-1]:
                yield "The last section trains your file, in minutes."
            outcome = worker.run(tree, [f"tests/test_nano.py::{test}" for test in section.tests], limit)
            if not outcome.passed:
                yield f"{section.title}: open"
                yield from to_do(section, outcome)
                return
            yield f"{section.title}: solved in {outcome.seconds:.0f} s"
    yield "All of nano.py is yours: run it. With ours, SFT has gold scores of 1.60 to 1.65, and PPO of 2.15 to 2.36."


def to_do(section: Section, outcome: Outcome) -> list[str]:
    lines = [f"  write  {name}" for name in section.functions] + [f"  read   {section.read}"]
    lines += [f"  test   tests/test_nano.py::{test}" for test in section.tests]
    return [*lines, f"  now    {outcome.claim}: {outcome.reason}"]
