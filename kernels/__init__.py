from kernels.gae import gae, penalised_gae
from kernels.kl import k1, k2, k3, kl_divergence, linear_kl_divergence
from kernels.logprobs import linear_logprobs, logprobs_from_logits

__all__ = [
    "gae",
    "k1",
    "k2",
    "k3",
    "kl_divergence",
    "linear_kl_divergence",
    "linear_logprobs",
    "logprobs_from_logits",
    "penalised_gae",
]
