"""BERTScore: overlap of two texts in token embeddings (Zhang et al. 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanorlhf.padding import micro_batches
from nanorlhf.pretrained.encoder import Encoder, token_embeddings
from nanorlhf.progress import Progress


def bert_score(references: list[str], responses: list[str], encoder: Encoder, batch_size: int = 32) -> list[float]:
    """[SO bertscore] Return the raw F1 per row by greedy matching, without baseline rescaling or idf weights.

    Each token is matched with the token of the other text that has the highest cosine similarity.

        precision  mean of that cosine over the response's tokens     F1 = 2 precision recall / (precision + recall)
        recall     the same over the reference's

    As in the bert-score library, the two special tokens can be matched but are excluded from these means; texts are
    stripped; a text without tokens scores 0; a text too long for the encoder is truncated. Unlike there, padding can't
    be matched, so a row doesn't depend on the rest of its batch.
    """
    tokenizer = encoder.tokenizer
    special = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])
    # RoBERTa tokenizes a word at the start of a text differently from one after a space, so we prepend a space
    prefix = " " if encoder.model.config.model_type == "roberta" else ""
    scores: list[float] = []
    pairs = list(zip(references, responses, strict=True))
    for batch in Progress(micro_batches(pairs, batch_size), desc="BERTScore", unit=" batches", leave=False):
        texts = list(dict.fromkeys(text for pair in batch for text in pair))  # ten answers share one reference
        stripped = [text.strip() and prefix + text.strip() for text in texts]
        embeddings, ids, mask = token_embeddings(stripped, encoder, encoder.max_length)
        embeddings = F.normalize(embeddings, dim=-1)  # (texts, T, C)
        counted = mask & ~torch.isin(ids, special.to(ids.device))  # (texts, T) True = counts in the means
        reference, response = torch.tensor([[texts.index(text) for text in pair] for pair in batch]).unbind(1)  # (B,)

        cosines = embeddings[response] @ embeddings[reference].mT  # (B, T, T) response token, reference token
        cosines = cosines.masked_fill(~mask[response][:, :, None] | ~mask[reference][:, None, :], -torch.inf)
        precision = mean_where(cosines.amax(2), counted[response])  # (B,)
        recall = mean_where(cosines.amax(1), counted[reference])  # (B,)
        f1 = 2 * precision * recall / (precision + recall)
        scores += torch.where(f1.isnan(), 0, f1).tolist()  # NaN: a text without tokens
    return scores


def mean_where(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each row over its True positions, (B, T) -> (B,); NaN if a row has none."""
    return torch.where(mask, values, 0).sum(1) / mask.sum(1)
