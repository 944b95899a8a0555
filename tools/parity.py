"""Compare every family with transformers on random weights: `python -m tools.parity` prints a row per family.

We and transformers each write a checkpoint, and each loads both. We compare the logits at the real tokens of
left-padded rows, and the gradients of all weights for a loss on log-probabilities and entropies: ours from
`linear_logprobs`, theirs by autograd from their logits. We compare in float32, as in training, and in float64 with all
casts to float32 undone, so that a difference in the formulas stands out from rounding. tests/test_t5.py compares T5.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels import linear_logprobs
from nanorlhf.checkpoint import load_gpt, read_config, save
from nanorlhf.model import GPT
from nanorlhf.pretrained.layout import fuse_gates, tensor_names, to_family
from tests.test_checkpoint import FAMILIES, ids_and_mask, transformers_model

TEMPERATURE = 0.7


class NoFloat32(TorchFunctionMode):
    """Replace casts to float32, as in norms, softmax and rotary angles, by casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})

    def __enter__(self) -> "NoFloat32":
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(torch.float32)
        super().__exit__(*error)


class Difference(NamedTuple):
    """Largest absolute differences, and the largest absolute values in transformers."""

    logits: float
    gradient: float
    largest_logit: float
    largest_gradient: float


def token_loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Return a loss on both, (N,) each, with a different gradient for each token."""
    return (logprobs * torch.linspace(-1, 1, len(logprobs)) + entropy).mean()


def difference(ours: GPT, theirs: transformers.PreTrainedModel) -> Difference:
    # otherwise pad_token_id, a real token here, would get no gradient
    theirs.get_input_embeddings().padding_idx = None
    ids, mask = ids_and_mask()
    real, labels = mask[:, :-1], ids[:, 1:][mask[:, :-1]]
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    their_logits = theirs(ids, attention_mask=mask.long(), position_ids=positions).logits
    log_p = (their_logits[:, :-1][real] / TEMPERATURE).log_softmax(1)  # (N, V)
    token_loss(log_p[torch.arange(len(labels)), labels], -(log_p.exp() * log_p).sum(1)).backward()

    hidden = ours(ids, mask)
    logprobs, entropy = linear_logprobs(
        hidden[:, :-1][real], ours.lm_head.weight, labels, ours.head_bias, TEMPERATURE, ours.config.logit_cap
    )
    token_loss(logprobs, entropy).backward()
    logits = ours.logits(hidden)

    gradients: dict[str, Tensor] = {}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        names = tensor_names(name, ours.config)
        gradients |= zip(names, to_family(name, parameter.grad, ours.config), strict=True)
    gradients = fuse_gates(gradients, ours.config)
    if "embed_out.weight" in gradients:  # the head's name in GPT-NeoX checkpoints
        gradients["lm_head.weight"] = gradients.pop("embed_out.weight")
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert gradients.keys() == their_gradients.keys()
    return Difference(
        (logits - their_logits)[mask].abs().max().item(),
        max((gradients[name] - grad).abs().max().item() for name, grad in their_gradients.items()),
        their_logits[mask].abs().max().item(),
        max(grad.abs().max().item() for grad in their_gradients.values()),
    )


def write_models(family: str, changes: dict, directory: Path) -> list[Path]:
    """Write a random model saved by transformers and one saved by us, in float32."""
    paths = [directory / "theirs", directory / "ours"]
    transformers_model(family, changes).save_pretrained(paths[0])
    ours = GPT(read_config(paths[0]))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    save(ours, paths[1])
    return paths


def compare(paths: list[Path], dtype: torch.dtype) -> Difference:
    """Load each checkpoint with both libraries and return the larger differences."""
    differences = []
    for path in paths:
        ours = load_gpt(path).to(dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        if dtype == torch.float32:
            differences.append(difference(ours, theirs))
        else:
            with NoFloat32():
                wide = type(theirs)(theirs.config).eval()  # its rotary tables in float64 too
                wide.load_state_dict(theirs.state_dict())
                differences.append(difference(ours, wide))
    return Difference(*map(max, *differences))


def table() -> str:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = ["| family | logits, float32 | gradients, float32 | logits, float64 | gradients, float64 |"]
    lines.append("|---|---|---|---|---|")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            paths = write_models(family, {}, Path(directory))
            narrow, wide = (compare(paths, dtype) for dtype in (torch.float32, torch.float64))
        numbers = [f"{number:.0e}" for number in (*narrow[:2], *wide[:2])]
        lines.append(f"| `{family}` | {' | '.join(numbers)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
