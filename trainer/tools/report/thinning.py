"""Fewer points of a curve that still show its extremes."""

from typing import Any

import numpy as np

PAGE_POINTS = 280_000
"""Maximum number of points of all curves of a page, which keeps its size below 6 MB."""
_FEWEST_POINTS = 100


def points_per_curve(num_curves: int) -> int:
    """Return the maximum number of points of one curve."""
    return max(_FEWEST_POINTS, PAGE_POINTS // max(1, num_curves))


def spread(count: int, limit: int) -> np.ndarray:
    """Return the indices of at most `limit` of `count` values, spread evenly from the first to the last."""
    return np.unique(np.linspace(0, max(0, count - 1), min(limit, count)).astype(np.int64))


def thinned(values: Any, limit: int) -> np.ndarray:
    """Return the indices of at most `limit` + 2 values, in order. If there are more values, they are divided into groups of equal
    size. Of each group the smallest and the largest value are kept, and one value that is not finite, which is a gap of the
    curve. The first and the last value are always kept."""
    values = np.asarray(values, dtype=np.float64)
    if len(values) <= limit:
        return np.arange(len(values))
    per_group = 2 if np.isfinite(values).all() else 3
    size = -(-len(values) // max(1, limit // per_group))
    starts = np.arange(0, len(values), size)
    table = np.full((len(starts), size), np.nan)
    table.flat[: len(values)] = values
    finite = np.isfinite(table)
    kept = [np.array([0, len(values) - 1])]
    for rows, columns in (
        (finite.any(axis=1), np.where(finite, table, np.inf).argmin(axis=1)),
        (finite.any(axis=1), np.where(finite, table, -np.inf).argmax(axis=1)),
        (~finite.all(axis=1), finite.argmin(axis=1)),
    ):
        kept.append((starts + columns)[rows])
    indices = np.unique(np.concatenate(kept))
    return indices[indices < len(values)]  # without the end of the last row


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
