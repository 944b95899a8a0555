"""Tests of the memory plan: counts against formulas and transformers, peaks against PyTorch's allocator in runs."""

import contextlib
import gc
import io
import json
import re
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

import train_dpo
import train_grpo
import train_ppo
import train_rlcf
import train_rm
import train_sft
from data import tiny
from nanorlhf.checkpoint import load_scalar, save
from nanorlhf.cli import read_settings
from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.plan import memory, training
from nanorlhf.plan.__main__ import PLANS
from nanorlhf.plan.__main__ import main as plan_main
from nanorlhf.plan.memory import PUBLISHED, Flags, Memory, Work, flags_that_fit, largest_phase, phase_memory
from nanorlhf.plan.training import dpo_plan, rm_plan, rollout_plan, sft_plan
from nanorlhf.pretrained.layout import config_object
from nanorlhf.t5 import T5Config
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training.moving import ElasticResetSettings, ReferenceSettings
from tests.conftest import ROOT
from tests.test_checkpoint import FAMILIES
from tests.test_train_grpo import grpo_args

TLDR = replace(train_ppo.RECIPES["tldr"][1], sft="EleutherAI/pythia-1b-deduped", dtype="bfloat16")
RLCF = train_rlcf.RECIPES["rlcf-codet5"][1]


@pytest.fixture
def works(monkeypatch):
    """Make plans return their models and phases instead of a table."""
    monkeypatch.setattr(training, "memory_plan", lambda work: work)


@pytest.fixture
def counts(works, monkeypatch):
    """Make plans skip saved activations, for tests that only count weights or cache: faster, without fake tensors."""
    monkeypatch.setattr(memory, "saved_per_row", lambda kind, config, rows, tuning: 0)
    monkeypatch.setattr(memory, "FakeTensorMode", lambda: torch.device("meta"))


def ppo_work(args) -> Work:
    return rollout_plan(args, args.value_model)


def peaks(work: Work, flags: Flags | None = None, num_gpus: int = 1) -> dict[str, Memory]:
    """Return the memory of each phase, the largest of those with the same name."""
    peaks = {}
    for phase in work.phases:
        memory = phase_memory(work, phase, flags or work.flags, num_gpus)
        peaks[phase.name] = max(memory, peaks.get(phase.name, memory), key=sum)
    return peaks


def allocated(run) -> int:
    """Return the peak bytes of PyTorch's CPU allocator during the call, starting when the models are prepared."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    events = record.profiler.kineto_results.events()
    prepared = [event.start_ns() for event in events if event.name() == "prepared"]
    held = most = 0
    for start, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        if not prepared or start > prepared[0]:
            most = max(most, held)
    return most


# --------------------------------------------------------------------------------------------------------------- counts
@pytest.mark.parametrize(
    ("size", "published"), [("1b", 1_011_781_632), ("2.8b", 2_775_208_960), ("6.9b", 6_857_302_016)]
)
@pytest.mark.slow
def test_pythia_has_the_published_number_of_parameters(counts, size, published):
    config = PUBLISHED[f"EleutherAI/pythia-{size}"]
    C, V = config.d_model, config.vocab_size
    by_hand = 2 * V * C + config.n_layer * (12 * C**2 + 13 * C) + 2 * C
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_object(config)))
    models = ppo_work(replace(TLDR, sft=f"EleutherAI/pythia-{size}", max_query_length=8, response_length=4)).models
    assert models["policy"].parameters == by_hand == theirs.num_parameters() == published
    assert models["reference"].parameters == by_hand
    assert models["value"].parameters == models["reward 1"].parameters == by_hand - V * C + C + 1
    assert (models["policy"].trained, models["reference"].trained) == (by_hand, 0)


@pytest.mark.parametrize(
    ("name", "published"), [("small", 60e6), ("base", 223e6), ("large", 738e6), ("large-ntp-py", 738e6)]
)
@pytest.mark.slow
def test_codet5_has_the_published_number_of_parameters(counts, name, published):
    config = PUBLISHED[f"Salesforce/codet5-{name}"]
    C, H = config.d_model, config.n_head
    encoder, decoder = 12 * C**2 + 2 * C, 16 * C**2 + 3 * C  # MLPs have width 4 C, all heads together C
    by_hand = 32100 * C + config.n_layer * (encoder + decoder) + 2 * C + 2 * 32 * H
    with torch.device("meta"):
        theirs = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config_object(config)))
    models = ppo_work(replace(RLCF, sft=f"Salesforce/codet5-{name}")).models
    assert models["policy"].parameters == by_hand == theirs.num_parameters() == pytest.approx(published, rel=0.01)
    assert models["value"].parameters == by_hand + C + 1  # the head is tied, so removing it saves nothing


@pytest.mark.parametrize(("name", "published"), [("", 124e6), ("-medium", 355e6), ("-large", 774e6), ("-xl", 1558e6)])
@pytest.mark.slow
def test_gpt2_has_the_published_number_of_parameters(counts, name, published):
    config = PUBLISHED[f"openai-community/gpt2{name}"]
    C = config.d_model
    by_hand = (50257 + 1024) * C + config.n_layer * (12 * C**2 + 13 * C) + 2 * C
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_object(config)))
    models = ppo_work(replace(RLCF, sft=f"openai-community/gpt2{name}", value_model=None)).models
    assert models["policy"].parameters == by_hand == theirs.num_parameters() == pytest.approx(published, rel=0.01)


def test_olmo2_1b_has_the_published_number_of_parameters(counts):
    config = PUBLISHED["allenai/OLMo-2-0425-1B"]
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_object(config)))
    [policy, reference] = rollout_plan(train_grpo.RECIPES["cs336"][1], has_value_model=False).models.values()
    assert policy.parameters == reference.parameters == theirs.num_parameters() == pytest.approx(1.48e9, rel=0.005)


def test_the_recipe_of_cs336_fits_on_one_gpu_of_80_gb(capsys):
    plan_main(["train_grpo", "cs336"])
    out = capsys.readouterr().out
    assert re.search(r"^1 x 80 GB with --micro-batch-size 8: at most \d+\.\d GB, updating, \d+% of a GPU$", out, re.M)
    shown = (ROOT / "docs" / "cs336.md").read_text()
    assert "\n".join(f"    {line}" for line in out.splitlines()[:6]) in shown


@pytest.mark.parametrize("family", ["gptj", "olmo2", "phi3", "gemma2", "gemma3_text"])
def test_the_config_determines_the_number_of_parameters(counts, family, tmp_path):
    config = FAMILIES[family]()
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    models = ppo_work(replace(TLDR, sft=str(tmp_path), max_query_length=8, response_length=4)).models
    assert models["policy"].parameters == theirs.num_parameters()
    assert models["value"].parameters < models["policy"].parameters or config.tie_word_embeddings


def test_a_trained_parameter_takes_16_bytes_and_a_frozen_one_4_or_2(counts):
    policy, value = 1_011_781_632, 1_011_781_632 - 50_304 * 2048 + 2048 + 1
    matmul_weights = 16 * (12 * 2048**2 + 9 * 2048)  # blocks, with biases; bfloat16 in frozen models
    for dtype, saving in (("float32", 0), ("bfloat16", 2 * 2 * matmul_weights)):
        work = ppo_work(replace(TLDR, dtype=dtype))
        held = peaks(work)["updating"]
        assert held.weights == 8 * (policy + value) - saving
        assert (held.gradients, held.optimizer) == (4 * (policy + value), 8 * (policy + value))
        offloaded = peaks(work, replace(work.flags, offload=True))["updating"]
        assert offloaded.weights == 4 * (policy + value)
        sharded = peaks(work, replace(work.flags, shard="fsdp"), 8)["updating"]
        assert sum(sharded[:3]) == pytest.approx(20 * (policy + value) / 8, rel=1e-6)


def test_a_reference_that_moves_is_in_float32_and_stays_on_the_device(counts):
    policy = 1_011_781_632
    fixed = ppo_work(replace(TLDR, dtype="bfloat16"))
    saving = 4 * policy - fixed.models["reference"].weights
    for moving, num_models in (
        ({"reference": ReferenceSettings(rate=0.1)}, 1),
        ({"elastic_reset": ElasticResetSettings(every=10)}, 2),  # and the average
    ):
        work = ppo_work(replace(TLDR, dtype="bfloat16", **moving))
        more = peaks(work)["updating"].weights - peaks(fixed)["updating"].weights
        assert more == saving + 4 * policy * (num_models - 1)
        offloaded = peaks(work, replace(work.flags, offload=True))["updating"].weights
        trained = work.models["policy"].weights + work.models["value"].weights
        assert offloaded == trained + 4 * policy * num_models
        assert flags_that_fit(work, 8, 1).shard == "none", "a moving reference can't be sharded"
    assert flags_that_fit(fixed, 8, 1).shard == "fsdp"


def test_with_lora_the_reference_is_free_and_a_shared_trunk_counts_once(counts):
    tuned = replace(TLDR, tune="lora", lora_rank=4, lora_targets=("q", "down"))
    policy, updates = 1_011_781_632, 16 * 4 * (2 * 2048 + 8192 + 2048)  # down and up of q, and of the MLP's output
    value, head = policy - 50_304 * 2048 + 2049, 2049
    for value_model in (None, "shared"):
        work = ppo_work(replace(tuned, value_model=value_model))
        models = work.models
        assert (models["policy"].trained, models["value"].trained) == (updates, updates + head)
        assert models["reference"].weights == 0
        assert models["value"].weights == 4 * (updates + head + (0 if value_model else value - head))
        held = peaks(work)["updating"]
        unshared = models["value"].weights + models["reward 1"].weights
        assert held.weights == 4 * (policy + updates) + unshared
        assert held.gradients + held.optimizer == 12 * (2 * updates + head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_planned_cache_has_the_size_of_the_real_one(counts, tmp_path, dtype):
    """For an encoder-decoder, it also has the query's keys and values, computed in the first call."""
    query = torch.ones((5, 20), dtype=torch.long)
    shape = {"vocab_size": 64, "d_model": 32, "n_layer": 3, "n_head": 4, "d_mlp": 64}
    for config in (GPTConfig(**shape, n_ctx=64, rotary_dim=4), T5Config(**shape, tied_head=True, head_scale=32**-0.5)):
        (tmp_path / "config.json").write_text(json.dumps(config_object(config)))
        args = replace(TLDR, sft=str(tmp_path), max_query_length=20, response_length=7, batch_size=5)
        policy = GPT(config)
        cache = policy.transformer.cache(query > 0, 7, getattr(torch, dtype))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            policy(query, query > 0, cache=cache, query_length=20)
        made = [cache.keys, cache.values, *(tensor for pair in getattr(cache, "memory", []) for tensor in pair)]
        planned = peaks(ppo_work(replace(args, dtype=dtype)))["sampling"].cache
        assert planned == pytest.approx(sum(tensor.nbytes for tensor in made), rel=0.04)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 6)])
def test_a_sharded_policy_samples_with_a_gathered_and_an_autocast_copy(counts, dtype, width):
    work = ppo_work(replace(TLDR, dtype=dtype))
    held = peaks(work, replace(work.flags, shard="fsdp"), 8)
    number = work.models["policy"].parameters
    assert held["sampling"].copies == width * number
    assert held["updating"].copies < 2 * number


# ---------------------------------------------------------------------------------------------------- against real runs
SHAPE = GPTConfig(vocab_size=320, n_ctx=512, d_model=96, n_layer=6, n_head=4, d_mlp=384, rotary_dim=8)
GEMMA2 = replace(
    SHAPE, n_layer=8, n_kv_head=2, rotary_dim=24, norm="rms_offset", post_norm=True, gated_mlp=True,
    parallel_residual=False, activation="gelu_new", embedding_scale=96**0.5, attention_divisor=24,
    attention_cap=50.0, logit_cap=30.0, attention_windows=(64, None) * 4, qkv_bias=False, attention_out_bias=False,
    mlp_bias=False, tied_head=True, architecture="gemma2",
)  # fmt: skip
PRECISION = 0.12


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory):
    """Write rows of equal length with different queries, two policies and two reward models with random weights."""
    root = tmp_path_factory.mktemp("plan")
    tiny.main(tiny.Args(out=root, num_demonstrations=64, num_comparisons=64, num_validation=16, vocab_size=320))
    tokenizer = load_tokenizer(root)
    rows = [json.loads(line) for line in (root / "sft.train.jsonl").read_text().splitlines()]
    row = max(rows, key=lambda row: len(tokenizer.encode(row["query"])))
    pair = {"chosen": row["response"], "rejected": row["response"] + "!", "meta": {}}
    queries = [f"{i:02}{row['query']}" for i in range(32)]
    for split in ("train", "validation"):
        texts = [json.dumps(row | {"query": query}) + "\n" for query in queries[:16]]
        (root / f"sft.{split}.jsonl").write_text("".join(texts))
        texts = [json.dumps(pair | {"query": query}) + "\n" for query in queries]
        (root / f"comparisons.{split}.jsonl").write_text("".join(texts))
    torch.manual_seed(0)
    save(GPT(SHAPE), root / "policy", tokenizer)
    save(GPT(GEMMA2), root / "gemma2", tokenizer)
    save(ScalarModel(SHAPE), root / "reward", tokenizer)
    save(ScalarModel(replace(SHAPE, d_model=384, d_mlp=1536, rotary_dim=24)), root / "large", tokenizer)
    query = max(len(tokenizer.encode(query)) for query in queries)
    return root, query, len(tokenizer.encode(row["response"])) + 2  # "!" and EOS


@pytest.fixture
def ppo_args(long_rows, monkeypatch):
    """Return PPO settings with two updates of rows of full length. Models are in float32 until they are prepared."""
    root, query_length, _ = long_rows
    plain = train_ppo.Run

    def prepared(*arguments):
        with record_function("prepared"):
            return plain(*arguments)

    monkeypatch.setattr(train_ppo, "Run", prepared)
    return replace(
        train_ppo.RECIPES["tiny"][1], data=root, out=root / "ppo", sft=str(root / "policy"),
        reward_model=str(root / "reward"), device="cpu", total_episodes=8, batch_size=4, micro_batch_size=2,
        num_ppo_epochs=1, max_query_length=query_length, response_length=16, lr=0.0, gold=None,
        overwrite=True,
    )  # fmt: skip


def check_peak(work: Work, run, extra: int = 0) -> None:
    """Check the largest phase against PyTorch's allocator; on a CPU, that includes offloaded models (`extra`)."""
    planned, used = largest_phase(work, work.flags, 1)[1] + extra, allocated(run)
    print(f"planned {planned / used:.3f} of {used / 1e6:.1f} MB")
    assert planned == pytest.approx(used, rel=PRECISION)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"checkpoint_activations": True, "micro_batch_size": 1},
        {"dtype": "bfloat16"},
        {"tune": "lora", "value_model": "shared"},
        {"reward_model": 3},
        {"dtype": "bfloat16", "reference": ReferenceSettings(rate=0.1)},
        {"elastic_reset": ElasticResetSettings(every=1)},
    ],
    ids=str,
)
def test_ppo_uses_the_planned_memory(works, ppo_args, settings):
    settings = settings | {"reward_model": (ppo_args.reward_model,) * 3} if "reward_model" in settings else settings
    args = replace(ppo_args, **settings)
    check_peak(ppo_work(args), lambda: train_ppo.main(args))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_models_are_on_the_device_one_at_a_time(works, long_rows, ppo_args, dtype):
    """The reward models are the largest models, so the peak includes a copy of one."""
    large = str(long_rows[0] / "large")
    args = replace(ppo_args, reward_model=large, gold=large, value_model=ppo_args.sft, dtype=dtype, offload=True)
    args = replace(args, micro_batch_size=1)
    work = ppo_work(args)
    assert largest_phase(work, work.flags, 1)[0].name == "scoring"
    frozen = sum(model.weights for model in work.models.values() if not model.trained)
    check_peak(work, lambda: train_ppo.main(args), extra=frozen)


@pytest.mark.slow
def test_without_a_value_model_a_run_takes_16_bytes_per_parameter_less(works, ppo_args):
    """Weights, gradients and two moments, plus its activations; as planned and as measured.

    With one row per micro-batch, because the plan doesn't count on rows that share a query.
    """
    ppo_args = replace(ppo_args, micro_batch_size=1)
    other = grpo_args(ppo_args, algorithm="rloo", samples_per_query=2, num_epochs=1)
    work = rollout_plan(other, has_value_model=False)
    assert "value" not in work.models
    less = sum(peaks(ppo_work(ppo_args))["updating"]) - sum(peaks(work)["updating"])
    used = allocated(lambda: train_ppo.main(ppo_args)) - allocated(lambda: train_grpo.main(other))
    num_parameters = sum(parameter.numel() for parameter in load_scalar(ppo_args.reward_model).parameters())
    assert used > 16 * num_parameters and less == pytest.approx(used, rel=PRECISION)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tune": "lora"},
        {"dtype": "bfloat16", "checkpoint_activations": True},
        {"num_samples": 16},
        {"model": "gemma2", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_sft_uses_the_planned_memory(works, long_rows, settings):
    root, query_length, response_length = long_rows
    args = replace(
        train_sft.RECIPES["tiny"][1], data=root, out=root / "sft", model=str(root / "policy"), device="cpu",
        batch_size=8, micro_batch_size=4, num_epochs=1, warmup_steps=0, max_query_length=query_length, num_samples=2,
        max_response_length=response_length, overwrite=True, loss_on="response",
    )  # fmt: skip
    args = replace(args, **settings | {"model": str(root / settings.get("model", "policy"))})
    check_peak(sft_plan(args, args.model, args.num_samples), lambda: train_sft.main(args))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"checkpoint_activations": True}, {"tune": "lora"}], ids=str)
@pytest.mark.parametrize("script", [train_rm, train_dpo])
def test_training_on_comparisons_uses_the_planned_memory(works, long_rows, script, settings):
    root, query_length, response_length = long_rows
    args = replace(
        script.RECIPES["tiny"][1], data=root, out=root / "pairs", sft=str(root / "policy"), device="cpu",
        batch_size=16, micro_batch_size=4, max_query_length=query_length, max_response_length=response_length,
        overwrite=True, warmup_steps=0,
    )  # fmt: skip
    args = replace(args, **settings)
    work = dpo_plan(args, args.sft) if script is train_dpo else rm_plan(args, args.sft, args.loss)
    check_peak(work, lambda: script.main(args))


# ---------------------------------------------------------------------------------------------- the flags and the table
SMALL = GPTConfig(vocab_size=512, n_ctx=128, d_model=64, n_layer=3, n_head=4, d_mlp=256, rotary_dim=8)
SHORT = replace(TLDR, max_query_length=64, response_length=16)


@pytest.fixture
def small_work(works, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "EleutherAI/pythia-small", SMALL)
    return ppo_work(replace(SHORT, sft="EleutherAI/pythia-small", batch_size=128))


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_the_flags_fit_and_are_no_costlier_than_needed(small_work, num_gpus):
    """As memory shrinks to none, costlier flags come later, and the chosen flags stay within the limit."""

    def most(flags: Flags) -> int:
        return largest_phase(small_work, flags, num_gpus)[1]

    requested = small_work.flags
    assert flags_that_fit(small_work, num_gpus, most(requested)) == requested
    fewer = flags_that_fit(small_work, num_gpus, 0.99 * most(requested))
    assert fewer == replace(
        requested, limits={**requested.limits, "micro_batch_size": requested.limits["micro_batch_size"] // 2}
    )
    busy = replace(requested, limits={"micro_batch_size": 4})
    tight = flags_that_fit(small_work, num_gpus, 0.99 * most(busy))
    assert most(tight) <= 0.99 * most(busy) and tight.offload and tight.shard == "none"
    if num_gpus > 1:
        offloaded = replace(busy, offload=True)
        sharded = flags_that_fit(small_work, num_gpus, 0.9 * most(offloaded))
        assert sharded.shard == "fsdp" and most(sharded) <= 0.9 * most(offloaded)
    nothing = flags_that_fit(small_work, num_gpus, 0)
    assert nothing.checkpoint_activations and set(nothing.limits.values()) == {1} and most(nothing) > 0


def test_requested_flags_are_kept(small_work):
    work = replace(small_work, flags=replace(small_work.flags, checkpoint_activations=True))
    flags = flags_that_fit(work, 1, 1e12)
    assert str(flags) == "--micro-batch-size 16 --checkpoint-activations"


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> list[str]:
    """Return the lines that `nanorlhf plan train_ppo tldr` prints; it must write no files."""
    directory, out = tmp_path_factory.mktemp("plan"), io.StringIO()
    flags = ["--sft", TLDR.sft, "--dtype", TLDR.dtype, "--out", str(directory / "ppo")]
    with contextlib.redirect_stdout(out):
        plan_main(["train_ppo", "tldr", *flags])
    assert not list(directory.iterdir())
    return out.getvalue().splitlines()


def test_each_row_of_the_table_adds_up_and_the_columns_are_aligned(printed):
    ends = [match.end() for match in re.finditer(r"\S+", printed[1])]
    assert printed[1].split() == [*Memory._fields, "all"]
    assert printed[-1].startswith("(--reward-model runs/tldr/rm not found")
    machines = [line for line in printed if re.match(r"\d+ x \d+ GB with --micro-batch-size \d+", line)]
    assert [line.split(" with ")[0] for line in machines] == ["1 x 80 GB", "8 x 80 GB", "1 x 141 GB"]
    rows = [line for line in printed[2:-1] if line not in machines]
    assert [row.split()[0] for row in rows] == ["sampling", "comparing", "scoring", "valuing", "updating"] * 3
    totals = []
    for row in rows:
        assert [match.end() for match in list(re.finditer(r"\S+", row))[1:]] == ends
        *cells, total = (float(word) for word in row.split()[1:])
        assert sum(cells) == pytest.approx(total, abs=0.05)
        totals.append(total)
    for line, phases in zip(machines, (totals[:5], totals[5:10], totals[10:]), strict=True):
        assert f"at most {max(phases):.1f} GB" in line


def test_the_docs_show_what_is_printed(printed):
    shown = (ROOT / "docs" / "memory.md").read_text()
    assert "\n".join(f"    {line}".rstrip() for line in printed) in shown


def test_a_gold_reward_model_counts_as_frozen_and_a_gold_function_does_not_count(counts, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_object(SMALL)))
    work = ppo_work(replace(SHORT, gold=str(tmp_path)))
    with torch.device("meta"):
        number = sum(parameter.numel() for parameter in ScalarModel(SMALL).parameters())
    assert (work.models["gold"].parameters, work.models["gold"].trained) == (number, 0)
    assert [phase.name for phase in work.phases if "gold" in phase.models] == ["scoring"]
    assert "--gold no/model not found" in "".join(ppo_work(replace(SHORT, gold="no/model")).notes)
    assert "gold" not in ppo_work(replace(SHORT, gold="data/tiny.py:gold_score")).models


def test_a_function_that_scores_needs_no_reward_model(counts):
    assert "reward 1" not in ppo_work(replace(SHORT, reward="data/tiny.py:score")).models


def test_each_model_among_several_rewards_counts_as_frozen(counts, tmp_path):
    """A teacher is a language model, so the value model can't be its copy."""
    (tmp_path / "config.json").write_text(json.dumps(config_object(SMALL)))
    with torch.device("meta"):
        sizes = {kind: sum(p.numel() for p in kind(SMALL).parameters()) for kind in (GPT, ScalarModel)}
    work = ppo_work(replace(SHORT, reward=(f"teacher:{tmp_path}", "my_rule.py:score", "judge:my.toml", str(tmp_path))))
    assert [name for name in work.models if name.startswith("reward")] == ["reward 1", "reward 2"]
    assert work.models["reward 1"].parameters == sizes[ScalarModel] == work.models["value"].parameters
    assert work.models["reward 2"].parameters == sizes[GPT] and work.models["reward 2"].trained == 0
    alone = ppo_work(replace(SHORT, reward=f"teacher:{tmp_path}"))
    assert alone.models["value"].parameters > sizes[ScalarModel]  # a copy of the larger policy


def test_rlcf_counts_a_value_model_and_grpo_none(counts):
    assert set(ppo_work(replace(RLCF, sft="Salesforce/codet5-base")).models) == {"policy", "reference", "value"}
    grpo = rollout_plan(grpo_args(SHORT), has_value_model=False)
    assert set(grpo.models) == {"policy", "reference", "reward 1"}


# ------------------------------------------------------------------------------------------------------------ bad input
def test_a_shape_needs_only_config_json(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_object(SMALL)))
    args = replace(SHORT, sft=str(tmp_path), reward_model=str(tmp_path))
    assert "not found" not in rollout_plan(args, args.value_model)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train_ppo tldr --sft no/such/model", "--sft no/such/model: .*EleutherAI/pythia-1b, "),
        ("train_ppo tldr --sft EleutherAI/pythia-1b --max-query-length 2000", "2053 tokens are longer than the 2048 "),
        ("train_ppo tldr --sft EleutherAI/pythia-1b --value-model none", "--value-model none: "),
        ("train_ppo tldr --micro-batch-size 0", "--micro-batch-size 0: must be at least 1"),
        ("train_sft tiny", "--model None"),
        ("train_rm tldr --sft none", "--sft none: "),
        ("train_dpo tldr --sft none", "--sft none: "),
        ("train_ppo tldr --learning 2", "nanorlhf plan train_ppo tldr: unknown flag '--learning'"),
        ("train_pop", "nanorlhf plan train_pop: unknown script; expected one of train_sft, "),
    ],
)
def test_bad_input_is_one_line(words, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        plan_main(words.split())
    [line] = capsys.readouterr().err.splitlines()
    assert re.search(sentence, line)


def test_every_script_has_a_plan_and_says_where_it_is():
    assert {f"{name}.py" for name in PLANS} == {path.name for path in (*ROOT.glob("train_*.py"), ROOT / "eval.py")}
    with pytest.raises(InputError, match="train_sft.py tldr: --plan is a command now: `nanorlhf plan train_sft ...`"):
        read_settings("train_sft.py", ["tldr", "--plan"], train_sft.RECIPES)
