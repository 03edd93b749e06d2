"""Keyed permutations of any length. The image of an index is computed without storing the permutation."""

from collections.abc import Sequence

import numpy as np

_ROUNDS = 4
_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele, Lea & Flood 2014) to uint64 values."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _keys(key: Sequence[int | np.ndarray]) -> np.ndarray:
    """Return the key of each round: uint64, (rounds,), or (indices, rounds) if a member of the key has shape (indices,)."""
    keys = np.zeros(_ROUNDS, dtype=np.uint64)
    for value in key:
        values = np.asarray(value).astype(np.uint64)[..., None]
        keys = _mix(keys + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _STEP + values)
    return keys


def hash_index(index: np.ndarray, *key: int) -> np.ndarray:
    """Return a keyed hash of each index, uniformly distributed over uint64."""
    return _mix(index.astype(np.uint64) * _STEP + _keys(key)[0])


def permute(index: np.ndarray, size: int, *key: int | np.ndarray) -> np.ndarray:
    """Return the image of each index under the permutation of range(size) that the key selects. index: int64, shape (indices,).
    key: integers, or arrays of shape (indices,) if the indices have different keys.

    The permutation is a balanced Feistel network over the next even power of two, applied repeatedly until the image is in
    range(size) (Black & Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.broadcast_to(_keys(key), (len(index), _ROUNDS))
    result = index.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for round_key in keys[outside].T:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)
