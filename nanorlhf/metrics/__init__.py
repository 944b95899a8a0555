"""Metrics of responses and rewards. Re-exports the ones that need only texts and numbers."""

from nanorlhf.metrics.at_k import chance_mrr_at_k, metric_at_k, mrr_at_k, pass_at_k
from nanorlhf.metrics.correlation import spearman_matrix
from nanorlhf.metrics.intervals import bootstrap_interval, compare, t_interval, wilson_interval, win_rate
from nanorlhf.metrics.overlap import rouge, rouge_scores, sentence_bleu

__all__ = [
    "bootstrap_interval",
    "compare",
    "chance_mrr_at_k",
    "metric_at_k",
    "mrr_at_k",
    "pass_at_k",
    "rouge",
    "rouge_scores",
    "sentence_bleu",
    "spearman_matrix",
    "t_interval",
    "wilson_interval",
    "win_rate",
]
