"""STR Figure 2: the answers to one question as points in the plane, with ranks and clusters."""

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import ArrayLike
from torch import Tensor

from nanorlhf.report.page import GREY, panel
from nanorlhf.selfrank.text_rank import rank_order

INK = "#1c2024"


def pca(vectors: ArrayLike, num_components: int = 2) -> tuple[Tensor, Tensor]:
    """[STR figure 2] Compute principal components of m vectors (m, d) by SVD in float64.

    Returns the points (m, num_components) and the share of variance that each component explains (num_components,).
    The sign of a direction is arbitrary: we make its largest entry in magnitude (the first in a tie) positive. Missing
    components, as for a single vector or equal vectors, are 0 and explain 0. Raises ValueError for vectors that are
    not (m, d) or not finite.
    """
    points = torch.as_tensor(vectors, dtype=torch.float64)
    if points.ndim != 2 or points.numel() == 0 or not points.isfinite().all():
        raise ValueError(f"vectors must be finite and (m, d) with m, d >= 1, got shape {tuple(points.shape)}")
    centred = points - points.mean(0)
    _, lengths, directions = torch.linalg.svd(centred, full_matrices=False)  # (r,), (r, d), r = min(m, d)
    # centred equal vectors are rounding noise, not a direction
    noise = torch.finfo(points.dtype).eps * max(points.shape) * points.norm()
    lengths = torch.where(lengths > noise, lengths, 0)

    magnitudes = directions.abs()
    largest = (magnitudes > magnitudes.amax(1, keepdim=True) - 1e-9).int().argmax(1, keepdim=True)  # (r, 1)
    directions = directions * directions.gather(1, largest).sign() * (lengths > 0)[:, None]
    projected, explained = points.new_zeros(len(points), num_components), points.new_zeros(num_components)
    r = min(num_components, len(lengths))
    projected[:, :r] = centred @ directions[:r].T
    if lengths.any():
        explained[:r] = lengths[:r] ** 2 / (lengths**2).sum()
    return projected, explained


def cluster_figure(
    title: str, vectors: ArrayLike, weights: ArrayLike, clusters: ArrayLike, representatives: list[int]
) -> Figure:
    """[STR figure 2] Draw the sampled answers to a question: positions, ranks, clusters and representatives.

    vectors (m, d) are embeddings, in the paper from an encoder not used for ranking; weights (m,) are TextRank's and
    set the colour; clusters (m,) are ISODATA's, each drawn as a star around its representative, which is ringed and
    labelled with its rank. Equal answers coincide, best on top, with their count next to them.
    """
    points, explained = (tensor.numpy() for tensor in pca(vectors))  # (m, 2), (2,)
    order, clusters = rank_order(weights), np.asarray(clusters)  # (m,)
    m = len(order)
    middles = {int(clusters[index]): index for index in representatives}
    ranks = np.argsort(order) + 1  # (m,)

    first, second = explained
    figure, axes = panel(title, f"first component, {first:.0%} of the variance", f"second component, {second:.0%}")
    figure.set_size_inches(6.4, 4.6)
    low, high = points.min(0), points.max(0)
    half = 0.58 * (high - low).max() or 1  # with a margin around the points
    x, y = (low + high) / 2
    axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half))
    axes.set_aspect("equal")  # otherwise distances would depend on direction
    for point, cluster in zip(points, clusters.tolist(), strict=True):
        middle = points[middles[cluster]]
        axes.plot(*zip(middle, point, strict=True), color=GREY, linewidth=1, zorder=1)
    worst_first = order[::-1]
    representative = np.isin(worst_first, representatives)  # (m,) True = ringed
    xs, ys = points[worst_first].T
    dots = axes.scatter(
        xs, ys, c=ranks[worst_first], cmap="viridis", vmin=1, vmax=m, zorder=2,
        s=np.where(representative, 210, 45), linewidths=np.where(representative, 2, 0.6).tolist(),
        edgecolors=[INK if ringed else "white" for ringed in representative],
    )  # fmt: skip
    for index in representatives:
        rank = ranks[index]
        color = "white" if rank <= 0.6 * m else INK  # readable on dark and light colours
        x, y = points[index]
        axes.text(x, y, str(rank), ha="center", va="center_baseline", fontsize=8, color=color)
    positions, counts = np.unique(points.round(6), axis=0, return_counts=True)
    for position, count in zip(positions[counts > 1], counts[counts > 1], strict=True):
        axes.annotate(f"×{count}", position, xytext=(9, 6), textcoords="offset points", fontsize=9, color=INK)
    ticks = np.linspace(1, m, min(m, 6)).round()
    figure.colorbar(dots, ax=axes, label="rank by TextRank, 1 = best", ticks=ticks).ax.invert_yaxis()
    return figure
