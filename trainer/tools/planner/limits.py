"""Limits of a plan. This module does not import torch."""

from trainer.base.system.units import GIB

MAX_RANKS = 10**5
"""Maximum world size of a plan. Fake process groups take a minute to create for this number of ranks."""
GPU_RESERVE_BYTES = 2 * GIB
"""Memory of a GPU that the allocator cannot use: driver context, NCCL buffers. scripts/plan.py --reserve-gib replaces it."""
