"""Length control: win rates and accuracies corrected for a preference for longer responses.

Arrays are (rows, pairs), with one or more pairs per row. The pairs of a row share a query; rows are independent, and
the bootstrap resamples them. Length differences are ours minus theirs, or chosen minus rejected, in characters or
tokens.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import expit

from nanorlhf.metrics.intervals import bootstrap_interval, wilson_interval

NUM_RESAMPLES = 500  # each fits a regression
NEAR = 0.1  # lengths that differ by at most this share of the longer one count as equal
MAX_STEPS = 200  # of Newton's method, which takes about five, or sixty if length separates wins from losses
LONGEST_STEP = 5.0  # in any coefficient; longer ones overshoot


def logistic_regression(features: np.ndarray, wins: np.ndarray) -> np.ndarray:
    """Fit the coefficients (k,) of P(win) = sigmoid(features @ coefficients); features (n, k), wins (n,) from 0 to 1.

    They maximise Firth's penalised likelihood (1993): log-likelihood + log det(information) / 2. It has a maximum even
    if features separate wins from losses, as length does for a judge that always prefers the longer response (Heinze
    and Schemper 2002). With only a constant, the share is (wins + 1/2) / (n + 1). For collinear features, the solution
    has the smallest coefficients.
    """
    coefficients = np.zeros(features.shape[1])
    for _ in range(MAX_STEPS):
        p = expit(features @ coefficients)  # (n,)
        weighted = features * (p * (1 - p))[:, None]  # (n, k)
        covariance = np.linalg.pinv(features.T @ weighted, hermitian=True)  # (k, k)
        leverage = ((weighted @ covariance) * features).sum(1)  # (n,)
        step = covariance @ (features.T @ (wins - p + leverage * (0.5 - p)))
        size = np.abs(step).max()
        coefficients += step / max(1.0, size / LONGEST_STEP)
        if size < 1e-9:
            break
    return coefficients


def length_controlled_win_rate(
    wins: np.ndarray, differences: np.ndarray, seed: int
) -> tuple[float, tuple[float, float]] | None:
    """Return the win rate that AlpacaEval's regression predicts for equal lengths, and its 95% bootstrap interval.

    wins (rows, pairs, seeds): 1, 0, or 0.5 for a tie; the rate is a mean over seeds. differences (rows, pairs).
    Dubois et al. 2024, Length-Controlled AlpacaEval, equations 1 and 2:

        P(win) = sigmoid(quality + weight * tanh(difference / standard deviation))
        rate   = sigmoid(quality)

    We omit their third term, the difficulty of an instruction: it is fitted on the whole leaderboard and only known for
    its 805 instructions. Their penalty is chosen by cross-validation, ours is Firth's. None if all differences are the
    same, since quality and length can't be separated then.
    """
    if np.ptp(differences) == 0:
        return None

    def rate(rows: np.ndarray) -> np.ndarray:
        columns = rows.reshape(-1, rows.shape[2])  # (n, 1 + seeds)
        features = np.column_stack((np.ones(len(columns)), columns[:, 0]))
        return np.mean([expit(logistic_regression(features, column)[:1]) for column in columns[:, 1:].T], axis=0)

    table = np.concatenate((scaled(differences)[:, :, None], wins), axis=2)  # (rows, pairs, 1 + seeds)
    [result] = with_intervals(table, rate, seed)
    return result


def label_weights(margins: np.ndarray, differences: np.ndarray, seed: int) -> dict[str, dict]:
    """Fit how margin and length predict the label: P(chosen) = sigmoid(a * margin + b * tanh(difference)).

    margins (rows, pairs, seeds): the chosen response's score minus the rejected one's. differences (rows, pairs). Both
    are divided by their standard deviation. Returns margin and length: the mean of the coefficient over seeds and its
    95% bootstrap interval. If the margin's interval is above 0, the model knows more than which response is longer. A
    term that is 0 for all pairs gets the coefficient 0.
    """
    spreads = margins.std((0, 1))  # (seeds,)
    table = np.concatenate((scaled(differences)[:, :, None], margins / np.where(spreads > 0, spreads, 1)), axis=2)

    def weights(rows: np.ndarray) -> np.ndarray:
        columns = rows.reshape(-1, rows.shape[2])  # (n, 1 + seeds)
        fits = [
            logistic_regression(np.column_stack((margin, columns[:, 0])), np.ones(len(columns)))
            for margin in columns[:, 1:].T
        ]
        return np.mean(fits, axis=0)

    estimates = zip(("margin", "length"), with_intervals(table, weights, seed), strict=True)
    return {name: {"mean": mean, "interval": interval} for name, (mean, interval) in estimates}


def with_intervals(
    table: np.ndarray, statistics: Callable[[np.ndarray], np.ndarray], seed: int
) -> list[tuple[float, tuple[float, float]]]:
    """Return statistics (k,) of a table (rows, ...), each with its 95% bootstrap interval, by percentiles."""
    generator = np.random.default_rng(seed)
    num_rows = len(table)
    resampled = [statistics(table[generator.integers(num_rows, size=num_rows)]) for _ in range(NUM_RESAMPLES)]
    lows, highs = np.quantile(resampled, (0.025, 0.975), axis=0)  # (k,) each
    columns = (values.tolist() for values in (statistics(table), lows, highs))
    return [(value, (low, high)) for value, low, high in zip(*columns, strict=True)]


def scaled(differences: np.ndarray) -> np.ndarray:
    """Return tanh(difference / standard deviation), so that a few very long responses don't dominate; same shape."""
    spread = differences.std(ddof=1) if differences.size > 1 else 0.0
    return np.tanh(differences / (spread or 1.0))


def near_length_accuracy(right: np.ndarray, lengths: np.ndarray, seed: int) -> dict | None:
    """Return a model's accuracy on pairs of about equal length: mean over rows, and its 95% interval.

    right (rows, pairs, seeds): 1, 0, or 0.5 for a tie; lengths (rows, pairs, 2) of chosen and rejected. Returns mean,
    interval and num_pairs; None without such pairs.
    """
    near = np.abs(lengths[..., 0] - lengths[..., 1]) <= NEAR * lengths.max(2)  # (rows, pairs)
    has_near = near.any(1)
    if not has_near.any():
        return None
    shares = np.array(
        [r[n].mean() for r, n in zip(right[has_near], near[has_near], strict=True)]
    )  # (rows with such pairs,)
    return {"mean": float(shares.mean()), "interval": share_interval(shares, seed), "num_pairs": int(near.sum())}


def share_interval(shares: np.ndarray, seed: int) -> tuple[float, float]:
    """Return the 95% interval of a mean of shares (rows,): Wilson's if all are 0 or 1, else by the bootstrap."""
    if np.isin(shares, (0, 1)).all():
        return wilson_interval(float(shares.mean()), len(shares))
    return bootstrap_interval(shares[:, None], seed)
