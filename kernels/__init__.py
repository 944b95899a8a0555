from kernels.gae import gae
from kernels.kl import k1, k2, k3, kl_divergence, linear_kl_divergence
from kernels.logprobs import linear_logprobs

__all__ = ["gae", "k1", "k2", "k3", "kl_divergence", "linear_kl_divergence", "linear_logprobs"]
