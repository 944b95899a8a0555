"""Per-token values of one response: reward logits (N+ Figure 6), and PPO's rewards, values and KL (Figure 9)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanorlhf import distributed
from nanorlhf.checkpoint import load_scalar
from nanorlhf.dataset import field
from nanorlhf.errors import InputError
from nanorlhf.logprobs import response_logprobs, response_values
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.ppo import eos_masks
from nanorlhf.reward_model import before_skipped
from nanorlhf.tokenizer import Tokenizer, token_bytes
from nanorlhf.training.run_directory import read_metrics, read_settings


@torch.no_grad()
def token_rewards(
    checkpoint: str,
    policy: GPT,
    ref_policy: GPT,
    reward_model: ScalarModel | None,
    query: Tensor,
    response: Tensor,
    tokenizer: Tokenizer,
    temperature: float,
) -> dict[str, list]:
    """Return columns over the response's tokens, EOS included: text, rm_logit and kl; for a PPO run also reward, value.

    query (1, Q), response (1, T). `checkpoint` is the policy's directory; it is a PPO run if it has metrics and a value
    model. kl is log policy - log reference of the sampled token, in nats, at the run's temperature, else at
    `temperature`. If the run adds the score after EOS, there is one more row, without text: the state after EOS, whose
    value is read at EOS. None marks a token without the quantity.
    """
    eos_index, actions, states = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
    T, end = response.size(1), int(eos_index)
    spellings, ids = token_bytes(tokenizer), response[0, : end + 1].tolist()
    texts = [spellings.get(i, b"").decode(errors="replace") or "[EOS]" for i in ids]
    both, real = torch.cat((query, response), dim=1), torch.cat((query != tokenizer.pad_id, actions), dim=1)
    with distributed.on_device(reward_model):
        logits = (
            None if reward_model is None else reward_model(both, real, last=T, query_length=query.size(1))
        )  # (1, T)

    rows, value_model_dir = read_metrics(checkpoint), Path(checkpoint) / "value_model"
    is_ppo = bool(rows) and value_model_dir.is_dir() and logits is not None
    settings: dict[str, Any] = read_settings(checkpoint) if is_ppo else {"temperature": temperature}
    where = str(Path(checkpoint) / "args.json")
    temperature = field(settings, "temperature", float, where)
    both_logprobs = []
    for model in (policy, ref_policy):
        with distributed.on_device(model):
            both_logprobs.append(response_logprobs(model, both, real, actions, temperature)[0])
    kl = both_logprobs[0] - both_logprobs[1]  # (1, T)
    by_token = {"rm_logit": logits, "kl": kl}
    by_state, length = {}, end + 1
    if is_ppo and reward_model is not None and logits is not None:
        score_at = settings.get("score_at")
        if score_at not in ("after_eos", "last_token"):
            raise InputError(f"{where}: score_at must be after_eos or last_token, as in runs of train_ppo.py.")
        skipped_id = reward_model.skipped_id
        scored = end if skipped_id is None else int(before_skipped(response, eos_index, skipped_id))
        scores = logits[:, scored]
        if settings.get("missing_eos_score") is not None and tokenizer.eos_id not in response:
            scores = torch.full_like(scores, field(settings, "missing_eos_score", float, where))
        rewards = -kl * field(rows[-1], "objective/kl_coef", float, f"{Path(checkpoint) / 'metrics.jsonl'}: last row")
        rewards[:, end if score_at == "last_token" else min(end + 1, T - 1)] += scores
        by_state["reward"] = rewards
        dtype = next(iter(policy.transformer.blocks)).mlp.up.weight.dtype
        value_model = load_scalar(value_model_dir, response.device, dtype)
        counted = states if score_at == "after_eos" else actions
        by_state["value"] = response_values(value_model, both, real, counted)  # (1, T)
        length = min(length + (score_at == "after_eos"), T)
    num_after_eos = length - len(texts)  # 1 or 0
    return (
        {"text": texts + [""] * num_after_eos}
        | {name: x[0, : end + 1].tolist() + [None] * num_after_eos for name, x in by_token.items() if x is not None}
        | {name: x[0, :length].tolist() for name, x in by_state.items()}
    )
