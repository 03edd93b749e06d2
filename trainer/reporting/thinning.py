"""Fewer points of a curve that still show its extremes."""

from typing import Any

import numpy as np

PAGE_POINTS = 280_000
"""Maximum number of points of all curves of a page, which keeps its size below 6 MB."""
_FEWEST_POINTS = 300


def points_per_curve(num_curves: int) -> int:
    """Return the maximum number of points of one curve."""
    return max(_FEWEST_POINTS, PAGE_POINTS // max(1, num_curves))


def thinned(values: Any, limit: int) -> np.ndarray:
    """Return the indices of at most about `limit` values, in order. If there are more values, they are divided into groups of equal
    size. Of each group the smallest and the largest value are kept, and one value that is not finite, which is a gap of the
    curve. The first and the last value are always kept."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max(1, limit // 3) + 1).astype(np.int64)
    kept = [np.array([0, len(values) - 1])]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        group = values[start:stop]
        finite = np.isfinite(group)
        if finite.any():
            kept.append(start + np.array([np.nanargmin(group), np.nanargmax(group)]))
        if not finite.all():
            kept.append(start + np.array([np.argmin(finite)]))
    return np.unique(np.concatenate(kept))


def group_means(columns: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the last row of each group, and the means of the groups, which have equal sizes. A mean counts only
    finite values, and is NaN if there are none.

    Args:
        columns: (rows, columns)
        limit: Maximum number of groups.
    """
    edges = np.unique(np.linspace(0, len(columns), min(limit, len(columns)) + 1).astype(np.int64))
    finite = np.isfinite(columns)
    sums = np.add.reduceat(np.where(finite, columns, 0.0), edges[:-1], axis=0)
    counts = np.add.reduceat(finite.astype(np.int64), edges[:-1], axis=0)
    return edges[1:] - 1, np.where(counts, sums / np.maximum(counts, 1), np.nan)
