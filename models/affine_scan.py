"""States of a linear recurrence: chunks of a sequence are affine maps of a state, and these maps compose.

A chunk maps the state before it, S, to A S + B after it. A map of two chunks is one of the same form, whatever their length, so
that a rank of context parallelism sends the map of its part of a sequence instead of its tokens.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


class AffineMaps(NamedTuple):
    """Maps S -> A S + B of the states of all heads, one for each chunk, in order."""

    a: Tensor
    """(chunks, rows, heads, key_dim, key_dim)."""
    b: Tensor
    """(chunks, rows, heads, key_dim, value_dim)."""

    def composed(self) -> "AffineMaps":
        """Return the map of all chunks together, as that of one chunk."""
        a, b = self
        while (count := len(a)) > 1:
            a1, a2, b1, b2 = (x[i : count - count % 2 : 2] for x in (a, b) for i in (0, 1))
            a, b = torch.cat((a2 @ a1, a[count - count % 2 :])), torch.cat((a2 @ b1 + b2, b[count - count % 2 :]))
        return AffineMaps(a, b)

    def states(self, initial: Tensor | None = None) -> Tensor:
        """Return the states before each chunk, and that after the last one, (chunks + 1, rows, heads, key_dim, value_dim).

        Args:
            initial: State before the first chunk, (rows, heads, key_dim, value_dim). None: zero.
        """
        return _scan(self.a, self.b, torch.zeros_like(self.b[0]) if initial is None else initial, False)


@torch.library.custom_op("meshwright::affine_scan", mutates_args=())
def _scan(a: Tensor, b: Tensor, initial: Tensor, is_backward: bool) -> Tensor:
    """Return the states of AffineMaps.states. is_backward: from the last chunk to the first, with transposed matrices: element c
    of the result is A_c^T times element c + 1, plus b_c, and the last element is `initial`."""
    count = len(a)
    states = b.new_empty(count + 1, *b.shape[1:])
    flat, a, b = states.flatten(1, 2), a.flatten(1, 2), b.flatten(1, 2)
    states[count if is_backward else 0] = initial
    if is_backward:
        for c in reversed(range(count)):
            torch.baddbmm(b[c], a[c].mT, flat[c + 1], out=flat[c])
    else:
        for c in range(count):
            torch.baddbmm(b[c], a[c], flat[c], out=flat[c + 1])
    return states


@_scan.register_fake
def _(a: Tensor, b: Tensor, initial: Tensor, is_backward: bool) -> Tensor:
    return b.new_empty(a.shape[0] + 1, *b.shape[1:])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    a, states = ctx.saved_tensors
    of_states = _scan(a, gradient[:-1], gradient[-1], True)
    return of_states[1:] @ states[:-1].mT, of_states[1:], of_states[0], None


_scan.register_autograd(_backward, setup_context=_save)


@register_flop_formula(torch.ops.meshwright.affine_scan)
def _scan_flops(a: torch.Size, b: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * b.numel() * a[-1]
