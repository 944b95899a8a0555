from kernels.gae import gae
from kernels.logprobs import linear_logprobs, logprobs_from_logits

__all__ = ["gae", "linear_logprobs", "logprobs_from_logits"]
