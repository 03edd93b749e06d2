"""Limits of a plan. This module does not import torch."""

MAX_RANKS = 10**5
"""Maximum world size of a plan. Fake process groups take a minute to create for this number of ranks."""
