"""One response token by token, in numbers: reward logits (N+ Figure 6), and rewards, values and KL (Figure 9)."""

from pathlib import Path

import torch
from torch import Tensor

from nanorlhf.checkpoint import load_scalar
from nanorlhf.hub import read_object
from nanorlhf.logprobs import response_logprobs
from nanorlhf.model import GPT, ScalarModel
from nanorlhf.ppo import eos_masks, kl_penalised_rewards
from nanorlhf.report.page import read_metrics
from nanorlhf.tokenizer import Tokenizer, token_bytes


@torch.no_grad()
def token_rewards(
    place: str,
    policy: GPT,
    ref_policy: GPT,
    reward_model: ScalarModel | None,
    query: Tensor,
    response: Tensor,
    tokenizer: Tokenizer,
    temperature: float,
) -> dict[str, list]:
    """Columns of the response's tokens up to its end: text, rm_logit and kl; and, where `place`, the policy's
    directory, holds the value model of its PPO run, reward and value as that run would have them.

    query (1, Q), response (1, T). The KL is log policy - log reference of the sampled token, in nats, at that run's
    temperature, else at the one given. Where the run pays the score behind EOS there is one row more, without text:
    the state behind EOS, whose value is read at EOS. None stands where a token has no such number.
    """
    eos_index, padding_mask, padding_mask_p1 = eos_masks(response, tokenizer.eos_id, tokenizer.pad_id)
    T, end = response.size(1), int(eos_index)
    spellings, ids = token_bytes(tokenizer), response[0, : end + 1].tolist()
    texts = [spellings.get(i, b"").decode(errors="replace") or "∎" for i in ids]
    inputs = torch.cat((query, response), dim=1), torch.cat((query != tokenizer.pad_id, ~padding_mask), dim=1)
    logits = None if reward_model is None else reward_model(*inputs, last=T)  # (1, T)

    rows, value_model_at = read_metrics(place), Path(place) / "value_model"
    is_ppo = bool(rows) and value_model_at.is_dir() and logits is not None
    settings = read_object(Path(place) / "args.json") if is_ppo else {"temperature": temperature}
    logprobs, ref_logprobs = (
        response_logprobs(model, *inputs, padding_mask, settings["temperature"])[0] for model in (policy, ref_policy)
    )
    of_tokens = {"rm_logit": logits, "kl": logprobs - ref_logprobs}
    of_states, length = {}, end + 1
    if is_ppo:
        scores, missing = logits[:, end], settings["missing_eos_score"]
        if missing is not None and tokenizer.eos_id not in response:
            scores = torch.full_like(scores, missing)
        kl_coef, score_at = rows[-1]["objective/kl_coef"], settings["score_at"]
        of_states["reward"], _ = kl_penalised_rewards(logprobs, ref_logprobs, scores, eos_index, kl_coef, score_at)
        values = load_scalar(value_model_at, response.device)(*inputs, last=T + 1)[:, :-1]
        of_states["value"] = torch.where(padding_mask_p1 if score_at == "after_eos" else padding_mask, 0.0, values)
        length = min(length + (score_at == "after_eos"), T)
    behind = length - len(texts)  # 1 or 0
    return (
        {"text": texts + [""] * behind}
        | {name: x[0, : end + 1].tolist() + [None] * behind for name, x in of_tokens.items() if x is not None}
        | {name: x[0, :length].tolist() for name, x in of_states.items()}
    )
