"""Bugs of recurrences, as context managers for bugs.py. Most were published: states that pass from document to document, and
parts of a sequence that do not continue each other (see docs/mixers.md)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from models import delta_net
from models.affine_scan import AffineMaps
from models.delta_net import RecurrentMixer
from trainer.parallel.recurrence import ContextCarry


def state_not_reset() -> AbstractContextManager:
    """Let the state pass from document to document. Convolutions end at documents."""
    original = delta_net.segments_of
    return patch.object(delta_net, "segments_of", lambda *args: original(*args) * 0)


def convolution_across_documents() -> AbstractContextManager:
    original = delta_net.short_convolution
    return patch.object(delta_net, "short_convolution", lambda x, weights, documents: original(x, weights, None))


def convolution_without_halo() -> AbstractContextManager:
    """Begin the convolutions of each part of a sequence with zeros."""
    return patch.object(ContextCarry, "tokens_before", delta_net.Carry.tokens_before)


def state_of_a_part_not_continued() -> AbstractContextManager:
    return patch.object(ContextCarry, "state_before", delta_net.Carry.state_before)


def _state_before(change: Callable[[Any], Any]) -> AbstractContextManager:
    original = ContextCarry.state_before
    return patch.object(ContextCarry, "state_before", lambda carry, maps: change(original(carry, maps)))


def gradient_of_the_state_dropped() -> AbstractContextManager:
    """Give the state before a part no gradient, and the maps of the parts a gradient of zero."""
    return _state_before(lambda state: state.detach() + 0 * state)


def maps_composed_in_the_wrong_order() -> AbstractContextManager:
    """Compose the maps of the parts of a sequence from the last part to the first."""
    state_before, states = ContextCarry.state_before, AffineMaps.states

    def reverse(maps: AffineMaps) -> Tensor:
        return states(AffineMaps(maps.a.flip(0), maps.b.flip(0)))

    def wrong(carry: ContextCarry, maps: AffineMaps) -> Tensor:
        with patch.object(AffineMaps, "states", reverse):
            return state_before(carry, maps)

    return patch.object(ContextCarry, "state_before", wrong)


def decay_missing_in_a_factor() -> AbstractContextManager:
    """Add tokens to the state after their chunk as if they had not decayed since."""
    original = delta_net.decays_of
    return patch.object(delta_net, "decays_of", lambda g, boundaries: (original(g, boundaries)[0], 1 + 0 * g))


class _NormOfAllHeads(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean((-1, -2), keepdim=True) + self.eps).rsqrt() * self.weight


def norm_of_all_heads() -> AbstractContextManager:
    """Divide a head's result by the norm of those of all heads that the rank has."""
    original = RecurrentMixer.__init__

    def init(mixer: RecurrentMixer, *args: Any, **kwargs: Any) -> None:
        original(mixer, *args, **kwargs)
        mixer.norm = _NormOfAllHeads(mixer.norm.normalized_shape, mixer.norm.eps)

    return patch.object(RecurrentMixer, "__init__", init)
