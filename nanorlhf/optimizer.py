"""Which weights are trained, and which of them decay."""

from collections.abc import Iterable

from torch import nn

from nanorlhf.model import ScalarModel


def parameter_groups(parameters: Iterable[nn.Parameter], weight_decay: float, decay_vectors: bool) -> list[dict]:
    """For AdamW: what is trained, in one group, or biases and layer norms (1-D) in a second one that doesn't decay."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if decay_vectors:
        return [{"params": trained, "weight_decay": weight_decay}]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def train_linear_layers(model: ScalarModel) -> None:
    """Freeze all but the first and the last block, the linear layers between them, and the head. [SO rm]

    Embeddings, the layer norms between and the final one stay as they are.
    """
    blocks = model.transformer.blocks
    model.requires_grad_(False)
    for part in (blocks[0], blocks[-1], model.score):
        part.requires_grad_(True)
    for module in blocks.modules():
        if isinstance(module, nn.Linear):
            module.requires_grad_(True)
