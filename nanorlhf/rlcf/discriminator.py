"""RLCF's discriminator, which judges which of two programs for the same prompt looks more human-written.

    D(x, y0, y1) = tanh(m(x.y0) - m(x.y1)),   m = MLP(encoding of prompt and program)        [RLCF section 4]

It is antisymmetric by construction: only the difference of the two outputs of m counts. The encoder is our own trunk
without the causal mask, randomly initialised, or a pretrained one such as CodeBERT.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nanorlhf.config import GPTConfig
from nanorlhf.errors import InputError
from nanorlhf.files import atomic_files, read_object
from nanorlhf.model import Transformer
from nanorlhf.padding import right_pad
from nanorlhf.pretrained.encoder import check_encoder_files, load_encoder
from nanorlhf.pretrained.layout import check_fits
from nanorlhf.pretrained.weight_files import read_tensors
from nanorlhf.tokenizer import load_tokenizer


class Discriminator(nn.Module):
    """`forward` is m(x.y), one number per text; `compare` is D.

    encoder     our Transformer, or a pretrained encoder from the transformers library
    tokenizer   the encoder's tokenizer
    max_length  tokens per row, both special tokens included; longer rows lose the start of their prompt
    """

    def __init__(self, encoder: Any, tokenizer: Any, max_length: int) -> None:
        super().__init__()
        self.encoder, self.tokenizer, self.max_length = encoder, tokenizer, max_length
        self.is_pretrained = not isinstance(encoder, Transformer)
        if self.is_pretrained:
            if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers' fallback if a directory has none
                raise InputError(
                    f"{tokenizer.name_or_path} has no tokenizer (tokenizer.json, or vocab.json + merges.txt): "
                    "download it again."
                )
            self.ends, self.pad_id = (tokenizer.cls_token_id, tokenizer.sep_token_id), tokenizer.pad_token_id or 0
            d_model = encoder.config.hidden_size
        else:
            self.ends, self.pad_id = (tokenizer.eos_id, tokenizer.eos_id), tokenizer.pad_id
            d_model = encoder.config.d_model
        self.mlp = nn.Sequential(nn.Linear(d_model, d_model), nn.Tanh(), nn.Linear(d_model, 1))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        if self.is_pretrained:
            return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return self.tokenizer.encode(text)

    def ids(self, query: str, response: str) -> list[int]:
        """Return at most max_length ids: the whole response, preceded by as much of the prompt's end as fits."""
        text, room = self.encode(response), self.max_length - 2
        prompt = self.encode(query)
        return [self.ends[0], *prompt[max(0, len(prompt) + len(text) - room) :], *text[:room], self.ends[1]]

    def embed(self, queries: list[str], responses: list[str]) -> Tensor:
        """Return the encoder's embedding of each text, (B, C)."""
        rows = [self.ids(*row) for row in zip(queries, responses, strict=True)]
        device = next(self.mlp.parameters()).device
        ids = right_pad(rows, self.pad_id).to(device)  # (B, L)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(ids.size(1), device=device) < lengths[:, None]  # (B, L) True = token
        if self.is_pretrained:
            return self.encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state[:, 0]  # [CLS]
        # mean over all tokens: with random weights, no [CLS] token has learnt to summarise them
        hidden = self.encoder(ids, mask)  # (B, L, C)
        return hidden.masked_fill(~mask[:, :, None], 0.0).sum(1) / lengths[:, None]

    def forward(self, queries: list[str], responses: list[str]) -> Tensor:
        """Return m(x.y), (B,) in float32."""
        embeddings = self.embed(queries, responses).float()  # (B, C)
        with torch.autocast(embeddings.device.type, enabled=False):  # bf16 doesn't resolve differences of 0.4%
            return self.mlp(embeddings).squeeze(-1)

    def compare(self, queries: list[str], first: list[str], second: list[str]) -> Tensor:
        """Return D(x, y0, y1), (B,): near 1 if the first looks more human-written, near -1 if the second does."""
        scores = self(queries * 2, [*first, *second])  # both in one pass
        return torch.tanh(torch.sub(*scores.chunk(2)))  # [RLCF discriminator]

    def compare_pairs(self, pairs: list[tuple[dict, str]]) -> Tensor:
        """Return D(x, y', y), (B,), for pairs of a record, with its written program y, and the policy's program y'."""
        queries, written = ([record[name] for record, _ in pairs] for name in ("query", "response"))
        return self.compare(queries, [text for _, text in pairs], written)


def grounding(passes_first: Tensor, passes_second: Tensor, comparison: Tensor) -> Tensor:
    """Return G(x, y0, y1), (B,): the static checks decide; if both programs pass, the discriminator. [RLCF grounding]

    Only y0 passes: 1; only y1 passes: -1; both pass: D(x, y0, y1); neither passes: 0 (the paper leaves it open).
    passes_first, passes_second (B,) bool; comparison (B,) = D(x, y0, y1).
    """
    decided = passes_first.float() - passes_second.float()
    return torch.where(passes_first & passes_second, comparison, decided)


def triplet_loss(anchors: Tensor, positives: Tensor, problems: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """Return the sum over rows of max(0, |a - p|^2 - |a - n|^2 + margin), and the number of correctly ordered rows.
    [RLCF pretraining]

    anchors and positives (B, C), problems (B,): row i of both solves problems[i]. The negative n of row i is the
    hardest: of all 2B programs, the one nearest to its anchor that solves another problem. A row is ordered correctly
    if |a - p| < |a - n|. A row without a negative adds 0 to the loss and counts as wrong. The paper prints the loss
    without the hinge, unbounded below.
    """
    programs = torch.cat((anchors, positives))  # (2B, C)
    distances = torch.cdist(anchors, programs, compute_mode="donot_use_mm_for_euclid_dist") ** 2  # (B, 2B)
    same = problems[:, None] == problems.repeat(2)  # (B, 2B)
    nearest = distances.masked_fill(same, torch.inf).amin(1)  # (B,)
    has_negative = nearest.isfinite()
    far, near = nearest.masked_fill(~has_negative, 0.0), (anchors - positives).square().sum(1)
    loss = torch.where(has_negative, F.relu(near - far + margin), 0.0)
    return loss.sum(), (has_negative & (near < far)).sum()


# ------------------------------------------------------------------------------------------------- make, save and load
def discriminator_from_encoder(where: str | Path) -> Discriminator:
    """Create a discriminator with a new MLP on a pretrained encoder (CodeBERT, RoBERTa), a directory or Hub id."""
    encoder = load_encoder(where)
    return Discriminator(encoder.model, encoder.tokenizer, encoder.max_length)


def save_discriminator(model: Discriminator, directory: Path) -> None:
    """Write discriminator.json, model.safetensors, the tokenizer and a pretrained encoder's configuration.

    Files are replaced atomically, discriminator.json last; other files in the directory are kept.
    """
    with atomic_files(directory, last="discriminator.json") as partial:
        settings: dict[str, Any] = {"max_length": model.max_length}
        if model.is_pretrained:
            model.encoder.config.save_pretrained(partial)
            model.tokenizer.save_pretrained(partial)
        else:
            settings["config"] = asdict(model.encoder.config)
            model.tokenizer.save(partial)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "discriminator.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def load_discriminator(where: str | Path, device: str | torch.device = "cpu") -> Discriminator:
    """Load a discriminator that `save_discriminator` wrote; raises InputError for anything else."""
    directory = Path(where)
    if not (directory / "discriminator.json").is_file():
        raise InputError(f"{where} has no discriminator.json, so it isn't a trained discriminator.")
    settings = read_object(directory / "discriminator.json")
    if type(settings.get("max_length")) is not int or not 2 < settings["max_length"] < 2**31:
        raise InputError(f"{directory / 'discriminator.json'}: max_length must be an integer above 2; train it again.")
    if not (directory / "model.safetensors").is_file():
        raise InputError(f"{where} has no model.safetensors, so it isn't a trained discriminator.")
    tokenizer: Any
    try:
        if "config" in settings:
            encoder, tokenizer = new_trunk(settings["config"], directory), load_tokenizer(directory)
        else:
            import transformers

            check_encoder_files(directory)
            local = {"local_files_only": True, "trust_remote_code": False}
            encoder = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(directory, **local))
            encoder, tokenizer = encoder.eval(), transformers.AutoTokenizer.from_pretrained(directory, **local)
        model = Discriminator(encoder, tokenizer, settings["max_length"])
        model.load_state_dict(read_tensors(directory / "model.safetensors"))
    except InputError:
        raise
    except Exception as error:  # transformers checks few of its files: a wrong type there may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise InputError(f"{where}: can't load the discriminator ({reason:.300}); train it again.") from error
    return model.to(device)


def new_trunk(settings: dict, directory: Path) -> Transformer:
    """Create a trunk with the settings in discriminator.json. Raises InputError if they don't fit the weights."""
    where, config = directory / "discriminator.json", GPTConfig(**settings)
    sizes = (config.vocab_size, config.n_ctx, config.d_model, config.n_layer, config.n_head, config.d_mlp)
    if not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(f"{where}: the sizes {sizes!r:.300} must be integers above 0; train it again.")
    check_fits(config, where, max(2**24, (directory / "model.safetensors").stat().st_size // 4))
    return Transformer(config)
