"""The memory plan: counts against formulas and transformers, peaks against real runs."""

import contextlib
import gc
import io
import json
import re
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import train_ppo
import train_rm
import train_sft
from data import tiny
from nanorlhf.checkpoint import load_scalar, save
from nanorlhf.errors import InputError
from nanorlhf.families import config_object
from nanorlhf.model import GPT, GPTConfig, ScalarModel
from nanorlhf.t5 import T5Config
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import memory_plan
from nanorlhf.training.memory_plan import (
    CODET5,
    PYTHIA,
    Flags,
    Live,
    asked_flags,
    flags_that_fit,
    peaks,
    phase_bytes,
    ppo_plan,
    resident,
    sizes,
)
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

TLDR = replace(train_ppo.RECIPES["tldr"][1], sft="EleutherAI/pythia-1b-deduped", dtype="bfloat16", plan=True)
SCRATCH = 600_000  # bytes of a CPU's attention in bfloat16, whatever the model: nothing at the size of a real one
COLUMNS = ["parameters", *memory_plan.COLUMNS, "all"]


def work_of(monkeypatch, plan, args):
    """The models and phases of a plan."""
    with monkeypatch.context() as patch:
        patch.setattr(memory_plan, "memory_plan", lambda work: work)
        return plan(args)


def allocated(run) -> int:
    """Peak bytes of PyTorch's CPU allocator during the call, from its own record."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events):
        held += size
        most = max(most, held)
    return most


# --------------------------------------------------------------------------------------------------------------- counts
@pytest.mark.parametrize(
    ("size", "published"), [("1b", 1_011_781_632), ("2.8b", 2_775_208_960), ("6.9b", 6_857_302_016)]
)
def test_pythia_has_the_published_number_of_parameters(monkeypatch, size, published):
    config = PYTHIA[size]
    C, V = config.d_model, config.vocab_size
    by_hand = 2 * V * C + config.n_layer * (12 * C**2 + 13 * C) + 2 * C
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_object(config)))
    found = sizes(work_of(monkeypatch, ppo_plan, replace(TLDR, sft=f"EleutherAI/pythia-{size}")))
    assert found["policy"].all == found["reference"].all == by_hand == theirs.num_parameters() == published
    assert found["value"].all == found["reward"].all == by_hand - V * C + C + 1
    assert (found["policy"].trained, found["reference"].trained) == (by_hand, 0)
    assert found["policy"].block == 12 * C**2 + 13 * C


@pytest.mark.parametrize(
    ("name", "published"), [("small", 60e6), ("base", 223e6), ("large", 738e6), ("large-ntp-py", 738e6)]
)
def test_codet5_has_the_published_number_of_parameters(monkeypatch, name, published):
    config = CODET5[f"Salesforce/codet5-{name}"]
    C, H = config.d_model, config.n_head
    encoder, decoder = 12 * C**2 + 2 * C, 16 * C**2 + 3 * C  # MLPs are 4 C wide, heads as wide together as the stream
    by_hand = 32100 * C + config.n_layer * (encoder + decoder) + 2 * C + 2 * 32 * H
    with torch.device("meta"):
        theirs = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config_object(config)))
    recipe = replace(train_ppo.RECIPES["rlcf-codet5"][1], sft=f"Salesforce/codet5-{name}")
    found = sizes(work_of(monkeypatch, ppo_plan, recipe))
    assert found["policy"].all == by_hand == theirs.num_parameters() == pytest.approx(published, rel=0.01)
    assert found["value"].all == by_hand + C + 1  # the head is tied, so it goes with nothing
    assert (found["policy"].block, found["policy"].rest) == (decoder, 32100 * C + 2 * C + 2 * 32 * H)


def test_the_peaks_of_an_encoder_decoder_are_those_of_running_every_block(monkeypatch):
    deep = T5Config(vocab_size=300, d_model=16, n_layer=5, n_head=2, d_mlp=32)
    found = []
    for config in (deep, replace(deep, attention_windows=(None,) * 5)):  # windows that hide nothing
        monkeypatch.setitem(CODET5, "Salesforce/codet5-base", config)
        args = replace(train_ppo.RECIPES["rlcf-codet5"][1], max_query_length=24, response_length=12)
        args = replace(args, sft="Salesforce/codet5-base", value_model="Salesforce/codet5-base")
        work = work_of(monkeypatch, ppo_plan, args)
        found.append(peaks(work, replace(work.flags, micro_batch_size=2, rollout_batch_size=3), 1))
    assert found[0] == found[1]


def test_a_trained_parameter_takes_16_bytes_and_a_frozen_one_4_or_2(monkeypatch):
    work = work_of(monkeypatch, ppo_plan, TLDR)
    policy, value = 1_011_781_632, 1_011_781_632 - 50_304 * 2048 + 2048 + 1
    products = 16 * (12 * 2048**2 + 9 * 2048)  # of the blocks, with biases; those of frozen models are bfloat16
    flags = Flags(micro_batch_size=1, rollout_batch_size=1)
    assert resident(work, flags, 8).total() == 20 * policy + 20 * value - 2 * 2 * products
    assert resident(replace(work, dtype="float32"), flags, 8).total() == 20 * policy + 20 * value
    assert resident(work, replace(flags, offload=True), 8).total() == 16 * (policy + value)
    sharded = resident(work, replace(flags, shard="fsdp"), 8).total()
    assert sharded == pytest.approx(20 * (policy + value) / 8, rel=1e-6)


def test_the_reference_of_low_rank_updates_takes_nothing_and_a_shared_trunk_counts_once(monkeypatch):
    tuned = replace(TLDR, tune="lora", lora_rank=4, lora_targets=("q", "down"))
    policy, updates = 1_011_781_632, 16 * 4 * (2 * 2048 + 8192 + 2048)  # down and up of q, and of the MLP's last layer
    value, head = policy - 50_304 * 2048 + 2049, 2049
    flags = Flags(micro_batch_size=1, rollout_batch_size=1)
    reward = resident(work_of(monkeypatch, ppo_plan, TLDR), flags, 8)["weights", "reward"]
    for share_trunk in (False, True):
        work = work_of(monkeypatch, ppo_plan, replace(tuned, share_trunk=share_trunk))
        found = sizes(work)
        assert (found["policy"].trained, found["value"].trained) == (updates, updates + head)
        held = resident(work, flags, 8)
        assert held["weights", "reference"] == 0
        assert held["weights", "value"] == 4 * (updates + head + (0 if share_trunk else value - head))
        of_trained = 12 * (2 * updates + head)  # gradients and the two moments
        assert held.total() == 4 * (policy + updates) + held["weights", "value"] + reward + of_trained


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_kv_cache_is_two_tensors_a_layer_and_the_bookkeeping_counted_by_hand(monkeypatch, dtype, width):
    work = work_of(monkeypatch, ppo_plan, replace(TLDR, dtype=dtype, max_query_length=100, response_length=20))
    flags = Flags(micro_batch_size=1, rollout_batch_size=3)
    B, L, H = 3, 120, 8
    keys_and_values = 2 * 16 * B * L * 2048 * width
    positions, rotary, bias, at, index = 8 * B * L, 2 * 4 * B * L * 32, B * H * L * width, 8, 8 * L
    (sampling,) = (phase for phase in work.phases if phase.name == "sampling")
    found = phase_bytes(work, sampling, flags, 1)["KV-cache", "policy"]
    assert found == keys_and_values + positions + rotary + bias + at + index


def test_storages_count_once_while_alive():
    kept = torch.zeros(1000)
    with Live() as live:
        a = torch.ones(250)  # 1,000 bytes
        view = a[10:].view(-1, 2)
        kept.add_(1)  # written, not made here
        with live.labelled("activations", "policy"):
            b = a * 2
        assert dict(live.bytes) == {("other", ""): 1000, ("activations", "policy"): 1000}
        del a
        assert live.bytes.total() == 2000  # the view keeps it alive
        del view, b
        assert live.bytes.total() == 0 and live.peak.total() == 2000


# ---------------------------------------------------------------------------------------------------- against real runs
@pytest.fixture(scope="module")
def long_rows(tmp_path_factory):
    """Data with rows of equal length, and a policy and a reward model with random weights."""
    root = tmp_path_factory.mktemp("plan")
    tiny.main(tiny.Args(out=root, num_demonstrations=64, num_comparisons=64, num_validation=16, vocab_size=320))
    tokenizer = load_tokenizer(root)
    rows = [json.loads(line) for line in (root / "sft.train.jsonl").read_text().splitlines()]
    row = max(rows, key=lambda row: len(tokenizer.encode(row["query"])))
    pair = {"query": row["query"], "chosen": row["response"], "rejected": row["response"] + "!", "meta": {}}
    for split in ("train", "validation"):
        (root / f"sft.{split}.jsonl").write_text((json.dumps(row) + "\n") * 32)
        (root / f"comparisons.{split}.jsonl").write_text((json.dumps(pair) + "\n") * 32)
    config = GPTConfig(vocab_size=320, n_ctx=512, d_model=64, n_layer=3, n_head=4, d_mlp=256, rotary_dim=8)
    torch.manual_seed(0)
    save(GPT(config), root / "policy", tokenizer)
    save(ScalarModel(config), root / "reward", tokenizer)
    save(ScalarModel(replace(config, d_model=256, d_mlp=1024, rotary_dim=16)), root / "large", tokenizer)
    query, response = (len(tokenizer.encode(row[name])) for name in ("query", "response"))
    return root, query, response + 2  # the mark and EOS


@pytest.mark.parametrize(
    ("flags", "phase"),
    [
        ({}, "updating"),
        ({"checkpoint_activations": True, "rollout_batch_size": 1}, "updating"),
        ({"dtype": "bfloat16", "micro_batch_size": 1}, "sampling"),
        ({"dtype": "bfloat16", "batch_size": 4, "micro_batch_size": 1, "rollout_batch_size": 1}, "updating"),
        ({"tune": "lora", "share_trunk": True}, "updating"),
        ({"advantages": "grpo", "samples_per_query": 4}, "updating"),
        ({"reward_model": 3}, "updating"),
    ],
    ids=str,
)
def test_ppo_uses_the_planned_memory(monkeypatch, long_rows, flags, phase):
    root, query_length, _ = long_rows
    args = replace(
        train_ppo.RECIPES["tiny"][1], data=root, out=root / "ppo", sft=str(root / "policy"),
        reward_model=str(root / "reward"), device="cpu", total_episodes=16, batch_size=8, micro_batch_size=4,
        rollout_batch_size=8, num_ppo_epochs=1, max_query_length=query_length, response_length=16, lr=0.0, gold=None,
        overwrite=True,
    )  # fmt: skip
    flags = flags | {"reward_model": (args.reward_model,) * 3} if "reward_model" in flags else flags  # an ensemble
    args = replace(args, **flags)
    work = work_of(monkeypatch, ppo_plan, args)
    planned = {name: held.total() for name, held in peaks(work, work.flags, 1).items()}
    assert max(planned, key=planned.get) == phase
    assert planned[phase] == pytest.approx(allocated(lambda: train_ppo.main(args)), rel=0.05, abs=SCRATCH)


def test_without_a_value_model_a_run_holds_sixteen_bytes_per_parameter_less(monkeypatch, long_rows):
    """Weights, gradients and two moments, and its activations; as planned and as measured."""
    root, query_length, _ = long_rows
    args = replace(
        train_ppo.RECIPES["tiny"][1], data=root, out=root / "values", sft=str(root / "policy"),
        reward_model=str(root / "reward"), device="cpu", total_episodes=16, batch_size=8, micro_batch_size=4,
        rollout_batch_size=8, num_ppo_epochs=1, max_query_length=query_length, response_length=16, lr=0.0, gold=None,
        overwrite=True,
    )  # fmt: skip
    held, used = {}, {}
    for name, flags in (("gae", {}), ("rloo", {"advantages": "rloo", "samples_per_query": 2})):
        changed = replace(args, **flags)
        work = work_of(monkeypatch, ppo_plan, changed)
        held[name] = resident(work, work.flags, 1).total()
        used[name] = allocated(lambda changed=changed: train_ppo.main(changed))
        assert ("value" in work.models) == (name == "gae")
    num_parameters = sum(parameter.numel() for parameter in load_scalar(args.reward_model).parameters())
    assert held["gae"] - held["rloo"] == 16 * num_parameters
    assert used["gae"] - used["rloo"] > 16 * num_parameters and used["rloo"] < 0.75 * used["gae"]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rollout_dtype"), [("float32", "same"), ("bfloat16", "same"), ("float32", "bfloat16")]
)
def test_a_rollout_uses_the_planned_memory_and_offloaded_models_come_one_at_a_time(
    monkeypatch, long_rows, offload, dtype, rollout_dtype
):
    """Reference, reward model and gold reward model are frozen; the last two are larger than what two rows take."""
    root, query_length, _ = long_rows
    args = replace(
        train_ppo.RECIPES["tiny"][1], data=root, out=root / "rollout", sft=str(root / "policy"), dtype=dtype,
        rollout_dtype=rollout_dtype, reward_model=str(root / "large"), gold=str(root / "large"),
        value_model=str(root / "policy"), device="cpu",
        total_episodes=2, batch_size=2, micro_batch_size=1, rollout_batch_size=2, num_ppo_epochs=1, offload=offload,
        max_query_length=query_length, response_length=16, lr=0.0, overwrite=True,
    )  # fmt: skip
    used, plain = [], train_ppo.rollout

    def measured(*arguments):
        found = []
        used.append(allocated(lambda: found.append(plain(*arguments))))
        return found[0]

    monkeypatch.setattr(train_ppo, "rollout", measured)
    train_ppo.main(args)
    work = work_of(monkeypatch, ppo_plan, args)
    held, visitor = resident(work, work.flags, 1).total(), sizes(work)["gold"].whole
    planned = max(peaks(work, work.flags, 1)[name].total() for name in ("sampling", "scoring")) - held
    assert planned == pytest.approx(used[0], rel=0.05, abs=SCRATCH) and (planned > visitor) == offload
    assert held == resident(work, replace(work.flags, offload=False), 1).total() - offload * (
        2 * visitor + sizes(work)["reference"].whole
    )


@pytest.mark.parametrize(
    "flags", [{}, {"tune": "lora"}, {"dtype": "bfloat16", "checkpoint_activations": True}], ids=str
)
def test_sft_uses_the_planned_memory(monkeypatch, long_rows, flags):
    root, query_length, response_length = long_rows
    args = replace(
        train_sft.RECIPES["tiny"][1], data=root, out=root / "sft", model=str(root / "policy"), device="cpu",
        batch_size=16, micro_batch_size=8, num_epochs=1, warmup_steps=0, max_query_length=query_length, num_samples=2,
        max_response_length=response_length, overwrite=True, loss_on="all",
    )  # fmt: skip
    args = replace(args, **flags)
    work = work_of(monkeypatch, memory_plan.sft_plan, args)
    planned = max(held.total() for held in peaks(work, work.flags, 1).values())
    assert planned == pytest.approx(allocated(lambda: train_sft.main(args)), rel=0.08)


@pytest.mark.parametrize("flags", [{}, {"checkpoint_activations": True}], ids=str)
def test_reward_model_training_uses_the_planned_memory(monkeypatch, long_rows, flags):
    root, query_length, response_length = long_rows
    args = replace(
        train_rm.RECIPES["tiny"][1], data=root, out=root / "rm", sft=str(root / "policy"), device="cpu",
        batch_size=16, micro_batch_size=4, max_query_length=query_length, max_response_length=response_length,
        num_normalisation=4, overwrite=True, warmup_steps=0,
    )  # fmt: skip
    args = replace(args, **flags)
    work = work_of(monkeypatch, memory_plan.rm_plan, args)
    planned = max(held.total() for held in peaks(work, work.flags, 1).values())
    assert planned == pytest.approx(allocated(lambda: train_rm.main(args)), rel=0.08)


# -------------------------------------------------------------------------------------------------- flags and the table
SMALL = GPTConfig(vocab_size=512, n_ctx=128, d_model=64, n_layer=3, n_head=4, d_mlp=256, rotary_dim=8)


@pytest.fixture(scope="module")
def small_work():
    """Made once: a plan remembers what it has run."""
    args = replace(TLDR, sft="EleutherAI/pythia-small", max_query_length=64, response_length=16, batch_size=128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PYTHIA, "small", SMALL)
        return work_of(patch, ppo_plan, args)


@pytest.mark.parametrize(("dtype", "checkpoint_activations"), [("float32", True), ("bfloat16", False)])
def test_the_peaks_of_deep_models_are_those_of_running_every_block(small_work, dtype, checkpoint_activations):
    deep = {role: replace(shape, config=replace(SMALL, n_layer=5)) for role, shape in small_work.models.items()}
    # windows that hide nothing: the same model, but of blocks that may differ, so all of them run
    every = {
        role: replace(shape, config=replace(shape.config, attention_windows=(None,) * 5))
        for role, shape in deep.items()
    }
    flags = replace(small_work.flags, checkpoint_activations=checkpoint_activations)
    found, expected = (peaks(replace(small_work, models=models, dtype=dtype), flags, 1) for models in (deep, every))
    assert found == expected


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_the_flags_fit_and_are_no_costlier_than_needed(small_work, num_gpus):
    """From ample memory to none: costlier flags come later, and the chosen ones stay within the limit."""
    asked = asked_flags(small_work, num_gpus)
    most = max(held.total() for held in peaks(small_work, asked, num_gpus).values())
    assert flags_that_fit(small_work, num_gpus, most) == (asked, True)
    least = resident(small_work, replace(asked, offload=True), num_gpus).total()
    limits = [0.99 * most, 1.35 * least, 1.05 * least, 0]
    chosen = [flags_that_fit(small_work, num_gpus, limit) for limit in limits]
    for (flags, fits), limit in zip(chosen, limits, strict=True):
        assert fits == (max(held.total() for held in peaks(small_work, flags, num_gpus).values()) <= limit)
        cheaper = {"offload": False} if flags.offload else {"shard": "none"} if flags.shard == "fsdp" else {}
        if cheaper:  # without it, not even the smallest batches that keep a GPU busy fit
            without = replace(flags, **cheaper, micro_batch_size=4, rollout_batch_size=16)
            assert max(held.total() for held in peaks(small_work, without, num_gpus).values()) > limit
    assert chosen[0][0] == replace(asked, micro_batch_size=asked.micro_batch_size // 2)
    assert [fits for _, fits in chosen] == [True, True, num_gpus > 1, False]
    assert chosen[1][0].offload == (num_gpus == 1) and chosen[1][0].shard == ("none" if num_gpus == 1 else "fsdp")


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 4 + 2)])
def test_a_sharded_policy_samples_from_a_full_float32_copy_plus_the_copy_of_autocast(small_work, dtype, width):
    flags, work = replace(small_work.flags, shard="fsdp"), replace(small_work, dtype=dtype)
    held = peaks(work, flags, 8)
    with torch.device("meta"):
        number = sum(parameter.numel() for parameter in GPT(SMALL).parameters())
    for phase in ("sampling", "scoring"):
        assert held[phase]["copies", "policy"] == width * number
        assert held[phase]["weights", "policy"] == 4 * number // 8
    assert held["updating"]["copies", "policy"] < 2 * number
    rounded = peaks(replace(work, rollout_dtype="bfloat16"), flags, 8)
    assert rounded["sampling"]["copies", "policy"] == (4 + 2) * number


def test_requested_flags_stay(small_work):
    work = replace(small_work, flags=replace(small_work.flags, checkpoint_activations=True))
    flags, fits = flags_that_fit(work, 1, 1e12)
    assert fits and str(flags) == "--micro-batch-size 16 --rollout-batch-size 64 --checkpoint-activations"
    assert asked_flags(work, 8).rollout_batch_size == 16  # a GPU's share of 128


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """The lines that `train_ppo.py tldr --plan` prints; nothing is written."""
    directory, out = tmp_path_factory.mktemp("plan"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert train_ppo.main(replace(TLDR, out=directory / "ppo")) == {}
    assert not list(directory.iterdir())
    return out.getvalue().splitlines()


def test_each_row_of_the_table_adds_up_and_the_columns_are_aligned(printed):
    lines = printed
    ends = [match.end() for match in re.finditer(r"\S+", lines[1])]
    assert lines[1].split() == COLUMNS and lines[-1].startswith("(--reward-model runs/tldr/rm isn't there")
    machines = [line for line in lines if re.match(r"\d+ x \d+ GB with --micro-batch-size \d+", line)]
    assert [line.split(" with ")[0] for line in machines] == ["8 x 80 GB", "1 x 141 GB"]
    rows = [line for line in lines[2:-1] if line not in machines]
    names = ["policy", "reference", "reward", "value", "sampling", "scoring", "updating"]
    assert [row.split()[0] for row in rows] == [*names, "exchanging", *names]
    totals = []
    for row in rows:
        assert all(match.end() in ends for match in list(re.finditer(r"\S+", row))[1:])
        if row.split()[0] in (*names[4:], "exchanging"):
            *cells, total = (0.0 if word == "-" else float(word) for word in row.split()[1:])
            assert sum(cells) == pytest.approx(total, abs=0.05) and len(cells) == len(memory_plan.COLUMNS)
            totals.append(total)
    for line, phases in zip(machines, (totals[:4], totals[4:]), strict=True):
        assert f"at most {max(phases):.1f} GB" in line


def test_the_docs_show_what_is_printed(printed):
    shown = (ROOT / "docs" / "memory.md").read_text()
    assert "\n".join(f"    {line}".rstrip() for line in printed) in shown


def test_a_gold_reward_model_counts_as_frozen_and_a_gold_function_does_not_count(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_object(SMALL)))
    args = replace(TLDR, max_query_length=64, response_length=16)
    work = work_of(monkeypatch, ppo_plan, replace(args, gold=str(tmp_path)))
    with torch.device("meta"):
        number = sum(parameter.numel() for parameter in ScalarModel(SMALL).parameters())
    assert (sizes(work)["gold"].all, sizes(work)["gold"].trained) == (number, 0)
    assert [phase.name for phase in work.phases if "gold" in phase.roles] == ["scoring"]
    assert "--gold no/model isn't there" in "".join(
        work_of(monkeypatch, ppo_plan, replace(args, gold="no/model")).notes
    )
    assert "gold" not in work_of(monkeypatch, ppo_plan, replace(args, gold="data/tiny.py:gold_score")).models


# ------------------------------------------------------------------------------------------------------------ bad input
def test_a_shape_needs_only_config_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_object(SMALL)))
    args = replace(TLDR, sft=str(tmp_path), reward_model=str(tmp_path), max_query_length=64, response_length=16)
    assert "isn't there" not in ppo_plan(args)


@pytest.mark.parametrize(
    ("plan", "args", "sentence"),
    [
        (ppo_plan, replace(TLDR, sft="no/such/model"), "--sft no/such/model: .*EleutherAI/pythia-1b, "),
        (ppo_plan, replace(TLDR, max_query_length=2000), "2053 tokens are longer than the 2048 positions of --sft"),
        (ppo_plan, replace(TLDR, value_model="none"), "--value-model none: "),
        (ppo_plan, replace(TLDR, rollout_dtype="int8"), "--plan is about GPUs, and --rollout-dtype int8 about CPUs"),
        (ppo_plan, replace(TLDR, micro_batch_size=0), "--micro-batch-size 0: it must be at least 1"),
        (memory_plan.sft_plan, train_sft.RECIPES["tiny"][1], "--model None"),
        (memory_plan.rm_plan, replace(train_rm.RECIPES["tldr"][1], sft="none"), "--sft none: "),
        (memory_plan.rm_plan, replace(train_rm.RECIPES["tldr"][1], loss="dpo"), "--loss dpo"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(plan, args, sentence):
    with pytest.raises(InputError, match=sentence) as error:
        plan(args)
    assert "\n" not in str(error.value)
