"""What is measured of responses and rewards. Re-exports the metrics that need texts and numbers only.

overlap      ROUGE and SacreBLEU            at_k             pass@k, metric@k, MRR@k
intervals    win rate, 95% intervals, tests correlation      Spearman's matrix
replies      BLEU-4, METEOR, SQuAD's F1     agreement        reward model and people, people and each other
labels       labels of `data.label`         reward_accuracy  accuracy and calibration of reward models
best_of      KL of the best of n
bert_score   needs an encoder               token_shift, token_rewards    need models
"""

from nanorlhf.metrics.at_k import metric_at_k, mrr_at_k, pass_at_k
from nanorlhf.metrics.correlation import spearman_matrix
from nanorlhf.metrics.intervals import bootstrap_interval, compare, t_interval, wilson_interval, win_rate
from nanorlhf.metrics.overlap import rouge, rouge_scores, sentence_bleu

__all__ = [
    "bootstrap_interval",
    "compare",
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
