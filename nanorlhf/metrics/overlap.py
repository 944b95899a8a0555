"""Overlap of responses with their references: ROUGE and SacreBLEU, from 0 to 1.

Lists of different lengths raise ValueError.
"""

from statistics import fmean

from sacrebleu.metrics import BLEU

ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge_scores(references: list[str], responses: list[str]) -> dict[str, list[float]]:
    """Return the F1 of ROUGE-1, ROUGE-2 and ROUGE-L per row, without stemming, as in N+ section 5."""
    from rouge_score.rouge_scorer import RougeScorer  # imports NLTK and SciPy, which takes over a second

    scorer = RougeScorer(ROUGE, use_stemmer=False)
    scores = [scorer.score(*pair) for pair in zip(references, responses, strict=True)]
    return {name: [score[name].fmeasure for score in scores] for name in ROUGE}


def rouge(references: list[str], responses: list[str]) -> dict[str, float]:
    """Return the means of `rouge_scores` over rows."""
    return {name: fmean(column) for name, column in rouge_scores(references, responses).items()}


def sentence_bleu(references: list[str], responses: list[str]) -> list[float]:
    """Return SacreBLEU per row, with that library's defaults for a single sentence.

    1- to 4-grams of the 13a tokenizer, case-sensitive; an order without matches is smoothed (exp), an order longer than
    the response is skipped (effective order). An empty response scores 0. [SO bleu] reports .048, but for another
    metric: see test_the_papers_sacrebleu_is_that_of_unrelated_texts.
    """
    bleu = BLEU(tokenize="13a", smooth_method="exp", effective_order=True)
    pairs = zip(references, responses, strict=True)
    return [min(1.0, bleu.sentence_score(response, [reference]).score / 100) for reference, response in pairs]
