"""On-policy distillation: `--reward teacher:CHECKPOINT`, a per-token reward from a teacher's log-probabilities."""

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.batch import Batch
from nanorlhf.checkpoint import load_gpt
from nanorlhf.logprobs import read_logprobs, response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.reward_model import Scores
from nanorlhf.tokenizer import Tokenizer


class Teacher:
    """Reward each token with log teacher - log policy, at the sampling temperature.

    Its expectation under the policy is -KL(policy || teacher): reverse KL on the policy's samples, as in Agarwal et al.
    2024 (*On-Policy Distillation of Language Models*), but as a reward. With --kl-coef 0 this is the only objective.
    `batch.logprobs` must be set.

    policy  if given, add its exact KL from the teacher at each token, a sum over the vocabulary. The expected reward is
            then 0 in every state, and in expectation the gradient minimises the KL in the sampled states. The paper
            doesn't differentiate through the sampling either
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        device: torch.device,
        size: int,
        temperature: float,
        policy: GPT | None = None,
    ):
        self.name = f"--reward {'teacher' if policy is None else 'exact_teacher'}:{path}"
        self.label = "teacher"
        # a policy can't emit [PAD] or ids without a token; normalise the teacher over the same ids
        self.model = load_gpt(path, device).forbid(tokenizer.pad_id, tokenizer.vocab_size).requires_grad_(False)
        self.models: list[GPT | ScalarModel] = [self.model]
        self.policy = policy
        self.size = size
        self.temperature = temperature
        self.exact: dict[str, float] = {}

    def score(self, batch: Batch) -> Scores:
        exact_kl: Tensor | float = 0.0
        if self.policy is None:
            with distributed.on_device(self.model):
                logprobs = batch.read(self._logprobs, self.size)  # (B, T)
        else:
            _, logprobs, exact_kl = read_logprobs(self.policy, self.model, batch, self.temperature, self.size)
            self.exact = {"reward/teacher_kl": exact_kl.sum(1).mean().item()}
        token_rewards = torch.where(batch.actions, logprobs - batch.logprobs + exact_kl, 0.0)  # -k1 of the KL to it
        return Scores(torch.zeros_like(token_rewards[:, 0]), token_rewards, torch.ones_like(batch.has_eos))

    def _logprobs(self, batch: Batch) -> Tensor:
        logprobs, _ = response_logprobs(
            self.model, batch.query_response, batch.real, batch.actions, self.temperature, batch.groups
        )
        return logprobs

    def metrics(self) -> dict[str, float]:
        return self.exact
