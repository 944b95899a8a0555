"""A reference that follows the policy (TR-DPO) and Elastic Reset, in PPO, GRPO and DPO."""

from dataclasses import replace

import pytest
import torch

import train_dpo
import train_grpo
import train_ppo
from nanorlhf import logprobs as readings
from nanorlhf.checkpoint import load_gpt
from nanorlhf.dataset import batch_indices, load_comparisons
from nanorlhf.errors import InputError
from nanorlhf.tokenizer import load_tokenizer
from nanorlhf.training import update_metrics
from nanorlhf.training.moving import ElasticResetSettings, ReferenceSettings, move
from nanorlhf.training.run import TIME_METRICS
from tests.conftest import interrupt_at, read_metrics, weights
from tests.test_dpo import float64_sum
from tests.test_train_dpo import minus_log_sigmoid
from tests.test_train_grpo import grpo_args
from tests.test_train_ppo import miniature  # noqa: F401  its policy sometimes samples EOS

SOFT, HARD = ReferenceSettings(rate=0.3), ReferenceSettings(rate=1.0, every=2)
RESET = ElasticResetSettings(every=2, decay=0.7)


def rollout_args(script, miniature, out, **changes):  # noqa: F811
    """Settings of four updates of eight responses, with steps that are large enough to see."""
    args = replace(miniature.ppo, out=out, total_episodes=32, micro_batch_size=8, num_ppo_epochs=1, lr=1e-2)
    if script is train_grpo:
        return grpo_args(args, num_epochs=1, samples_per_query=2, **changes)
    return replace(args, **changes)


@pytest.fixture
def seen(monkeypatch):
    """The policy's and the reference's weights at each rollout, and the policy's weights after each update."""
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    after: list[torch.Tensor] = []
    compared, log, last = readings.read_logprobs, update_metrics.log_update, []

    def read(policy, ref_policy, *arguments):
        before.append((weights(policy), weights(ref_policy)))
        last[:] = [policy]
        return compared(policy, ref_policy, *arguments)

    def logged(*arguments):
        after.append(weights(last[0]))
        return log(*arguments)

    for script in (train_ppo, train_grpo):
        monkeypatch.setattr(script, "read_logprobs", read)
    monkeypatch.setattr(update_metrics, "log_update", logged)
    return before, after


def without_times(rows):
    return [{name: value for name, value in row.items() if name not in TIME_METRICS} for row in rows]


def test_weights_move_by_the_rate_and_a_rate_of_1_copies_bits():
    model, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first, aim = weights(model), weights(target)
    move(model, target, 0.0)
    assert torch.equal(weights(model), first)
    expected = first.double()
    for _ in range(3):
        move(model, target, 0.3)
        expected = 0.3 * aim.double() + 0.7 * expected
        assert torch.allclose(weights(model).double(), expected, atol=1e-7)
    move(model, target, 1.0)
    assert torch.equal(weights(model), aim) and torch.equal(weights(target), aim)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("script", [train_ppo, train_grpo])
@pytest.mark.parametrize("settings", [SOFT, HARD], ids=["soft", "hard"])
def test_the_reference_of_a_rollout_follows_the_hand_loop(miniature, tmp_path, seen, script, settings):  # noqa: F811
    script.main(rollout_args(script, miniature, tmp_path / "run", reference=settings))
    before, after = seen
    reference = before[0][0].double()  # the initial policy
    for update, (policy, used) in enumerate(before):
        if update > 0 and update % settings.every == 0:
            reference = settings.rate * policy.double() + (1 - settings.rate) * reference
        assert torch.allclose(used.double(), reference, atol=1e-6), update
        assert update == 0 or torch.equal(policy, after[update - 1])
    assert len(before) == 4 and (after[-1] - before[0][0]).abs().max() > 1e-2
    rows = read_metrics(tmp_path / "run")
    assert all(row["policy/first_ratio_error"] < 1e-5 for row in rows)
    kls = [row["objective/kl_exact"] for row in rows]
    assert kls[1] > 1e-4 and kls[3] > 1e-4 and abs(kls[0]) < 1e-5
    assert (abs(kls[2]) < 1e-5) == (settings is HARD)  # against a copy of the policy


@pytest.mark.parametrize("script", [train_ppo, train_grpo])
def test_elastic_reset_returns_to_the_average_since_the_last_reset(miniature, tmp_path, seen, script):  # noqa: F811
    script.main(rollout_args(script, miniature, tmp_path / "run", elastic_reset=RESET, total_episodes=40))
    before, after = seen
    initial = before[0][0]
    average, resets = initial.double(), 0
    for update, trained in enumerate(after[:-1]):
        average = 0.7 * average + (1 - 0.7) * trained.double()
        used, reference = before[update + 1]
        if (update + 1) % 2 == 0:
            assert torch.allclose(used.double(), average, atol=1e-6) and not torch.allclose(used, trained, atol=1e-3)
            average, resets = initial.double(), resets + 1
        else:
            assert torch.equal(used, trained)
        assert torch.equal(reference, initial)
    assert resets == 2 and torch.equal(weights(load_gpt(tmp_path / "run")), after[-1])
    assert all(row["policy/first_ratio_error"] < 1e-5 for row in read_metrics(tmp_path / "run"))


def test_the_value_model_and_the_optimizer_are_not_reset(miniature, tmp_path, monkeypatch):  # noqa: F811
    moved = []

    def spy(model, target, rate):
        moved.append(type(model).__name__)
        move(model, target, rate)

    monkeypatch.setattr(train_ppo, "move", spy)
    train_ppo.main(rollout_args(train_ppo, miniature, tmp_path / "run", elastic_reset=RESET))
    state = torch.load(tmp_path / "run/state/step-00000004/state.pt", weights_only=True)
    steps = {value["step"].item() for value in state["steps"]["optimizer"]["state"].values()}
    assert steps == {4.0} and set(moved) == {"GPT"} and len(moved) == 3 + 2  # of the averages, and one reset


@pytest.mark.parametrize("script", [train_ppo, train_dpo])
def test_a_reference_that_has_not_moved_yet_changes_no_digit(miniature, tmp_path, script):  # noqa: F811
    later = ReferenceSettings(rate=1.0, every=1000)
    for name, settings in (("fixed", ReferenceSettings()), ("later", later)):
        out = tmp_path / name
        if script is train_dpo:
            script.main(replace(miniature.dpo, out=out, num_epochs=0.5, reference=settings))
        else:
            script.main(rollout_args(script, miniature, out, reference=settings, total_episodes=16))
    fixed, moving = (without_times(read_metrics(tmp_path / name)) for name in ("fixed", "later"))
    assert fixed == moving


@pytest.mark.parametrize("settings", [SOFT, HARD], ids=["soft", "hard"])
def test_dpos_loss_of_each_step_uses_the_moved_reference(miniature, tmp_path, monkeypatch, settings):  # noqa: F811
    """Expected in float64, from single texts and a reference that moves by hand."""
    monkeypatch.setattr(train_dpo, "load_gpt", lambda path, *_: load_gpt(path).double())
    policies, backward = [], train_dpo.backward

    def spy(policy, *arguments):
        policies.append(weights(policy))
        return backward(policy, *arguments)

    monkeypatch.setattr(train_dpo, "backward", spy)
    args = replace(miniature.dpo, out=tmp_path / "dpo", num_epochs=0.625, lr=1e-2, beta=0.5, reference=settings)
    train_dpo.main(args)
    tokenizer = load_tokenizer(args.sft)
    policy, reference = (load_gpt(args.sft).double().forbid(tokenizer.pad_id, tokenizer.vocab_size) for _ in range(2))
    rows = load_comparisons(args.data / "comparisons.train.jsonl", tokenizer, None, None)
    fixed = weights(reference)
    logged = [row for row in read_metrics(args.out) if "lr" in row]
    assert len(policies) == len(logged) == 5
    for step, (now, row) in enumerate(zip(policies, logged, strict=True)):
        torch.nn.utils.vector_to_parameters(now, policy.parameters())
        if step > 0 and step % settings.every == 0:
            moved = settings.rate * now + (1 - settings.rate) * weights(reference)
            torch.nn.utils.vector_to_parameters(moved, reference.parameters())
        losses = []
        for i in batch_indices(len(rows), args.batch_size, step, args.seed):
            ratios = [
                (float64_sum(policy, rows[i].query, y) - float64_sum(reference, rows[i].query, y)).item()
                for y in (rows[i].chosen, rows[i].rejected)
            ]
            losses.append(minus_log_sigmoid(args.beta * (ratios[0] - ratios[1])))
        assert row["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-6), step
    assert (policies[-1] - fixed).abs().max() > 1e-2
    assert (logged[2]["margin"] == pytest.approx(0, abs=1e-9)) == (settings is HARD)


@pytest.mark.parametrize(
    ("change", "save_every"),
    [({"reference": SOFT}, 3), ({"reference": HARD}, 3), ({"elastic_reset": RESET}, 2)],
    ids=["soft", "hard", "reset"],
)
def test_a_run_resumes_with_the_moved_weights(miniature, tmp_path, monkeypatch, change, save_every):  # noqa: F811
    """Equal to the last bit: the reference's or the average's weights are part of the state."""
    out = tmp_path / "whole"
    args = rollout_args(train_ppo, miniature, out, save_every=save_every, total_episodes=48, **change)
    train_ppo.main(args)
    broken = replace(args, out=tmp_path / "broken")
    interrupt_at(5, monkeypatch, train_ppo, "gae")
    with pytest.raises(KeyboardInterrupt):
        train_ppo.main(broken)
    train_ppo.main(replace(broken, resume=True))
    assert torch.equal(weights(load_gpt(args.out)), weights(load_gpt(broken.out)))
    assert without_times(read_metrics(args.out)) == without_times(read_metrics(broken.out))


def test_dpo_resumes_with_the_moved_reference(miniature, tmp_path, monkeypatch):  # noqa: F811
    args = replace(miniature.dpo, out=tmp_path / "whole", save_every=3, num_epochs=1, lr=1e-2, reference=SOFT)
    summary = train_dpo.main(args)
    broken = replace(args, out=tmp_path / "broken")
    interrupt_at(5, monkeypatch, train_dpo, "lr_factor")
    with pytest.raises(KeyboardInterrupt):
        train_dpo.main(broken)
    assert train_dpo.main(replace(broken, resume=True)) == summary
    assert read_metrics(args.out) == read_metrics(broken.out)


@pytest.mark.parametrize("script", [train_ppo, train_dpo])
def test_in_bfloat16_a_moving_reference_is_kept_in_float32(miniature, tmp_path, monkeypatch, script):  # noqa: F811
    """Rounded to bfloat16, a slow reference would never move."""
    types = []

    def spy(model, target, rate):
        types.append({parameter.dtype for parameter in model.parameters()})
        move(model, target, rate)

    monkeypatch.setattr(script, "move", spy)
    slow = ReferenceSettings(rate=1e-4)
    if script is train_dpo:
        train_dpo.main(replace(miniature.dpo, out=tmp_path / "run", dtype="bfloat16", num_epochs=0.25, reference=slow))
    else:
        args = rollout_args(script, miniature, tmp_path / "run", dtype="bfloat16", reference=slow, total_episodes=16)
        train_ppo.main(args)
    assert types == [{torch.float32}]


REFUSALS = [
    ({"reference": ReferenceSettings(every=3)}, "--reference.every 3 needs a --reference.rate above 0"),
    ({"reference": ReferenceSettings(rate=1.5)}, "--reference.rate 1.5: must be from 0 to 1"),
    ({"reference": SOFT, "tune": "lora"}, "--reference.rate 0.3 can't be combined with --tune lora: the reference"),
    ({"reference": SOFT, "shard": "fsdp"}, "--reference.rate 0.3 can't be combined with --shard fsdp: it needs full"),
]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *REFUSALS,
        ({"elastic_reset": RESET, "tune": "lora"}, "--elastic-reset.every 2 can't be combined with --tune lora"),
        ({"elastic_reset": RESET, "shard": "fsdp"}, "--elastic-reset.every 2 can't be combined with --shard fsdp"),
        ({"elastic_reset": RESET, "reference": SOFT}, "2 can't be combined with --reference.rate 0.3: the average"),
        ({"elastic_reset": ElasticResetSettings(decay=0.9)}, "--elastic-reset.decay 0.9 needs --elastic-reset.every"),
    ],
    ids=str,
)
def test_a_rollout_script_refuses_what_it_cannot_move(miniature, tmp_path, change, sentence):  # noqa: F811
    for script in (train_ppo, train_grpo):
        with pytest.raises(InputError, match=sentence):
            script.main(rollout_args(script, miniature, tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [*REFUSALS, ({"reference": SOFT, "loss": "simpo"}, "--loss simpo has no reference: --reference.rate must be 0")],
    ids=str,
)
def test_dpo_refuses_what_it_cannot_move(miniature, tmp_path, change, sentence):  # noqa: F811
    with pytest.raises(InputError, match=sentence):
        train_dpo.main(replace(miniature.dpo, out=tmp_path / "dpo", **change))
    assert not (tmp_path / "dpo").exists()
