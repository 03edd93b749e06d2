"""What the file of a mixer gets, the layout of the samples, and what it returns (mixers.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class SampleLayout:
    cp: DeviceMesh
    """Ranks over which each sequence is split."""
    seq_len: int
    """Length of a sample, in tokens."""
    by_document: bool
    """Whether no token sees another document."""
    dtype: torch.dtype
    """Of the computation."""


class Replacement(NamedTuple):
    """What takes the place of the mask and the kernels of a kind of layer."""

    mask: nn.Module
    kernel: Callable[[bool], nn.Module]
    """Function (whether backward repeats gathers) -> kernel of a layer."""
