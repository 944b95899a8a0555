"""DPO and its variants, compared with TRL, OpenRLHF and torchtune. Table: docs/how-we-compare.md."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.dpo import Labels, kto_loss, log_odds
from tests.others.common import alone, difference, load, loss_difference, need
from train_dpo import margin_loss

B, L, V, BETA = 4, 9, 11, 0.3
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(V, (2 * B, L), generator=GENERATOR)  # chosen, then rejected; the query is the first three
LENGTHS = torch.tensor([3, 5, 1, 6, 6, 2, 4, 5])  # of the responses
RESPONSE = (torch.arange(L) >= 3) & (torch.arange(L) < 3 + LENGTHS[:, None])  # (2B, L)
REF_LOGPS = -8 * torch.rand(2 * B, dtype=torch.float64, generator=GENERATOR)  # (2B,) sums over a response


def new_logits() -> Tensor:
    """Return logits (2B, L, V), the same each time."""
    logits = torch.randn(2 * B, L, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return logits.requires_grad_(True)


def summed(logits: Tensor) -> Tensor:
    """Return log p(response | query), (2B,), like `pair_logprobs`, which tests/test_dpo.py tests."""
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None]).squeeze(2)
    return torch.where(RESPONSE[:, 1:], logprobs, 0.0).sum(1)


worst = partial(loss_difference, made=new_logits)


def our_dpo(kind: str, smoothing: float = 0.0, ref: Tensor = REF_LOGPS):
    def loss(logits: Tensor) -> Tensor:
        chosen, rejected = (summed(logits) - ref).chunk(2)
        return margin_loss(BETA * (chosen - rejected), BETA, kind, smoothing).mean()

    return loss


class Output(dict):
    """Return logits like a transformers model."""

    def __init__(self, logits: Tensor):
        super().__init__(logits=logits)
        self.logits = logits


def dpo_of_trl(kind: str, smoothing: float = 0.0):
    need("trl")
    from trl import DPOTrainer

    def loss(logits: Tensor) -> Tensor:
        trainer = alone(
            beta=BETA,
            loss_types=[kind],
            loss_weights=[1.0],
            label_smoothing=smoothing,
            f_divergence_type="reverse_kl",
            ld_alpha=None,
            precompute_ref_logps=True,
            use_weighting=False,
        )
        ref_chosen, ref_rejected = REF_LOGPS.chunk(2)
        inputs = {
            "input_ids": IDS,
            "attention_mask": torch.ones_like(IDS),
            "completion_mask": RESPONSE.long(),
            "ref_chosen_logps": ref_chosen,
            "ref_rejected_logps": ref_rejected,
        }
        return DPOTrainer._compute_loss(trainer, lambda **_: Output(logits), inputs, False)

    return loss


# -------------------------------------------------------------------------------------------------------------- 1. DPO
@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("hinge", 0.0), ("robust", 0.1), ("robust", 0.3)])
def test_the_losses_of_pairs_are_trls(kind, smoothing):
    assert worst(our_dpo(kind, smoothing), dpo_of_trl(kind, smoothing)) < 1e-12


def test_trls_dpo_ignores_label_smoothing():
    """Conservative DPO is the sigmoid loss with label smoothing, but this version reads the setting only for others."""
    assert worst(our_dpo("sigmoid", 0.2), dpo_of_trl("sigmoid", 0.2)) > 0.1
    assert worst(our_dpo("sigmoid", 0.0), dpo_of_trl("sigmoid", 0.2)) < 1e-12


def test_ipo_is_the_papers_on_sums_and_trls_on_means_over_tokens():
    """Equation 17 uses log p of the whole response. TRL divides it by the length, on the advice of IPO's authors."""

    def on_means(logits: Tensor) -> Tensor:
        chosen, rejected = ((summed(logits) - REF_LOGPS) / LENGTHS).chunk(2)
        return margin_loss(BETA * (chosen - rejected), BETA, "ipo", 0.0).mean()

    assert worst(on_means, dpo_of_trl("ipo")) < 1e-12
    assert worst(our_dpo("ipo"), dpo_of_trl("ipo")) > 0.1


@pytest.mark.parametrize(("ipo", "smoothing"), [(False, 0.0), (False, 0.2), (True, 0.0)])
def test_the_losses_of_dpo_and_ipo_are_openrlhfs(ipo, smoothing):
    theirs = load("openrlhf.models.loss", "deepspeed").DPOLoss(BETA, smoothing, ipo)

    def loss(logits: Tensor) -> Tensor:
        return theirs(*summed(logits).chunk(2), *REF_LOGPS.chunk(2))[0]

    assert worst(our_dpo("ipo" if ipo else "sigmoid", smoothing), loss) < 1e-12


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_losses_of_dpo_and_hinge_are_torchtunes(smoothing):
    module = load("torchtune.rlhf.loss.dpo", "torchtune.rlhf._types")
    losses = {"sigmoid": module.DPOLoss(BETA, smoothing), "hinge": module.RSOLoss(BETA)}
    for kind, theirs in losses.items():

        def loss(logits: Tensor, theirs=theirs) -> Tensor:
            return theirs(*summed(logits).chunk(2), *REF_LOGPS.chunk(2))[0].mean()

        assert worst(our_dpo(kind, smoothing if kind == "sigmoid" else 0.0), loss) < 1e-12


# -------------------------------------------------------------------------------------------------------------- 2. KTO
def kto_of_trl(labels: list[bool], mismatched_logits: Tensor, weights: Labels):
    """Return TRL's loss on the rows of IDS; the reference point comes from `mismatched_logits` and REF_LOGPS + 1."""
    need("trl")
    from trl import KTOTrainer

    def loss(logits: Tensor) -> Tensor:
        trainer = alone(
            beta=BETA,
            loss_type="kto",
            calculate_KL=True,
            precompute_ref_logps=True,
            use_liger_kernel=False,
            desirable_weight=weights.desirable_weight,
            undesirable_weight=weights.undesirable_weight,
        )
        trainer._compute_kl_logps = lambda model, batch: summed(mismatched_logits)
        inputs = {
            "input_ids": IDS,
            "attention_mask": torch.ones_like(IDS),
            "completion_mask": RESPONSE.long(),
            "label": torch.tensor(labels),
            "ref_logps": REF_LOGPS,
            "ref_KL_logps": REF_LOGPS + 1,
        }
        return KTOTrainer._compute_loss(trainer, lambda **_: Output(logits), inputs, False)

    return loss


@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_the_loss_of_kto_is_trls(shift):
    """For a reference point of 0 and a positive one, and for rows of one label, or three desirable and five not."""
    labels = [True, False, False, True, False, True, False, False]
    weights = Labels(desirable_weight=1.6, undesirable_weight=0.9)
    mismatched_logits = new_logits().detach()
    mismatched_logits.scatter_add_(2, IDS.roll(-1, 1)[:, :, None], torch.full((2 * B, L, 1), shift).double())
    z0 = (summed(mismatched_logits) - REF_LOGPS - 1).mean().clamp(min=0)
    assert (z0 > 0) == (shift > 0)

    def ours(logits: Tensor) -> Tensor:
        present = torch.stack((torch.tensor(labels), ~torch.tensor(labels)))
        rewards = BETA * (summed(logits) - REF_LOGPS)
        losses, _ = kto_loss(rewards.expand(2, -1), present, BETA * z0, weights)
        return losses.mean()

    assert worst(ours, kto_of_trl(labels, mismatched_logits, weights)) < 1e-12


# --------------------------------------------------------------------------------------------------- 3. SimPO and ORPO
def test_the_loss_of_simpo_is_trls():
    """TRL's CPO trainer has the loss, with means over tokens; gamma is in units of the rewards."""
    need("trl")
    from trl.experimental.cpo import CPOTrainer

    trainer = alone(alpha=0.0, loss_type="simpo", beta=BETA, simpo_gamma=0.4, label_smoothing=0.0)

    def theirs(logits: Tensor) -> Tensor:
        means = CPOTrainer.get_batch_logps(logits, IDS.masked_fill(~RESPONSE, -100), average_log_prob=True)
        return CPOTrainer.cpo_loss(trainer, *means.chunk(2))[0].mean()

    def ours(logits: Tensor) -> Tensor:
        chosen, rejected = (BETA * summed(logits) / LENGTHS).chunk(2)
        return margin_loss(chosen - rejected - 0.4, BETA, "simpo", 0.0).mean()

    assert worst(ours, theirs) < 1e-12


def orpo_of_trl(chosen: Tensor, rejected: Tensor, beta: float = BETA) -> Tensor:
    from trl.experimental.orpo import ORPOTrainer

    return -ORPOTrainer.odds_ratio_loss(alone(beta=beta), chosen, rejected)[0].mean()


def test_the_odds_ratio_of_orpo_is_trls():
    """TRL computes it in float32."""
    need("trl")

    def theirs(logits: Tensor) -> Tensor:
        return orpo_of_trl(*(summed(logits) / LENGTHS).chunk(2))

    def ours(logits: Tensor) -> Tensor:
        chosen, rejected = log_odds(summed(logits) / LENGTHS).chunk(2)
        return BETA * margin_loss(chosen - rejected, BETA, "orpo", 0.0).mean()

    assert worst(ours, theirs) < 1e-5


def test_a_certain_response_makes_trls_orpo_nan_and_ours_not():
    """float32 rounds a p above 1 - 3e-8 to 1, so log p = 0 and the odds are infinite. We bound p."""
    need("trl")
    for chosen, rejected in ((0.0, -1.0), (0.0, 0.0)):
        logps = torch.tensor([[chosen], [rejected]], requires_grad=True)
        [theirs] = torch.autograd.grad(orpo_of_trl(*logps), logps)
        ours = -F.logsigmoid(log_odds(logps[0]) - log_odds(logps[1])).mean()
        assert theirs.isnan().any() and torch.autograd.grad(ours, logps)[0].isfinite().all()


def test_the_fine_tuning_term_of_orpo_is_of_the_response_and_trls_of_the_query_too():
    """TRL takes the mean over all tokens of the batch; we take a mean over responses of means, as for the odds."""
    need("trl")
    from trl.experimental.orpo import ORPOTrainer

    logits = new_logits().detach()
    real = torch.arange(L) < 3 + LENGTHS[:, None]
    batch = {
        "concatenated_input_ids": IDS,
        "concatenated_attention_mask": real.long(),
        "concatenated_labels": IDS.masked_fill(~RESPONSE, -100),
    }
    trainer = alone(is_encoder_decoder=False, padding_value=0, concatenated_inputs=lambda *_, **__: batch)
    trainer.get_batch_logps = ORPOTrainer.get_batch_logps
    outputs = ORPOTrainer.concatenated_forward(
        trainer, lambda *_, **__: SimpleNamespace(logits=logits), {"chosen_labels": IDS[:B]}
    )
    assert difference(torch.cat(outputs[:2]), summed(logits) / LENGTHS) < 1e-12  # the log p of the odds
    logprobs = logits[:B, :-1].log_softmax(-1).gather(2, IDS[:B, 1:, None]).squeeze(2)
    assert difference(outputs[4], -logprobs[real[:B, 1:]].mean()) < 1e-12
    assert difference(outputs[4], -(summed(logits) / LENGTHS)[:B].mean()) > 0.01
