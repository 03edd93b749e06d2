"""A cache of what the mixers keep of earlier tokens, for a batch of texts of different lengths: keys and values of attention, and
the states of recurrences.

The texts, one in each row, end in the same column. Columns before the first token of a row are padding: they contain this token
again, and only padding attends to them. So a window of columns is a window of tokens, and nothing in a row depends on another.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.affine_scan import AffineMaps
from models.attention import AttentionKind, attention_kernel
from models.context import Context
from models.delta_net import Carry, RecurrentKind
from models.spec import LayerKind, Structure
from trainer.base.config import ConfigError
from trainer.batch import IGNORE_INDEX
from trainer.inference.next_logits import READ_HERE, NextLogits
from trainer.parallel.mixers import replace_modules

_TOKENS_AT_ONCE = 4096
"""Limit of the tokens of all rows in one forward with a mask. It bounds the memory of long prompts."""
_MASKED_AT_ONCE = 2**26
"""Limit of the elements of a mask, for the same reason."""


@dataclass
class _Columns:
    """Place of the rows in all layers."""

    starts: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    """Column of each row's first token, (rows,), int64."""
    padding: int = 0
    """Number of columns that are padding in some row."""
    end: int = 0
    """Number of cached columns."""


class _CachedMask(nn.Module):
    """The mask of one kind of attention over the cached columns that a window reaches and the new ones."""

    def __init__(self, kind: AttentionKind, columns: _Columns, dtype: torch.dtype):
        super().__init__()
        self.window, self.columns, self.dtype = kind.window, columns, dtype

    def forward(self, context: Context) -> Tensor | None:
        """Return what is added to the scores, (rows, 1, new columns, columns). None: the kernel is causal without a mask."""
        start, new, device = self.columns.end, context.positions.shape[1], context.positions.device
        window = self.window or start + new
        first = max(0, start - window + 1)
        if self.columns.padding <= first and (new == 1 or (start == first and new <= window)):
            return None
        columns = torch.arange(first, start + new, device=device, dtype=torch.int32)
        queries, keys = columns[start - first :], columns
        distance = queries[:, None] - keys
        # A padding token attends to itself, because a softmax over nothing is NaN.
        is_own = (keys >= self.columns.starts[:, None, None]) | (distance == 0)
        visible = is_own & (distance >= 0) & (distance < window)
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=device)
        return mask.masked_fill_(~visible, float("-inf"))[:, None]


class CachedAttention(nn.Module):
    """Causal attention with a cache: new tokens attend to themselves and to cached tokens. The cache of a layer with a window
    contains at most twice as many columns as the window."""

    def __init__(self, kind: AttentionKind, tp: int, dtype: torch.dtype, device: torch.device):
        """tp: number of ranks over which the heads are split."""
        super().__init__()
        self.kernel, self.window = attention_kernel(kind), kind.window
        # The width is that of a key and of its value together.
        self.kv_cache = torch.empty(0, kind.n_kv_heads // tp, 0, sum(kind.widths), dtype=dtype, device=device)
        self.first = self.end = 0
        """First cached column, and the column after the last."""

    def kernel_of_layer(self) -> nn.Module:
        """Return the module that takes the place of the layer's kernel."""
        return self

    def reserve(self, rows: int, columns: int) -> None:
        """Provide memory. The first rows keep their content, if there is any."""
        size = columns if self.window is None else min(columns, 2 * self.window)  # it moves only when it is full
        old, used = self.kv_cache, self.end - self.first
        self.kv_cache = old.new_empty(rows, old.shape[1], size, old.shape[3])
        if used:
            self.kv_cache[:, :, :used] = old[:rows, :, :used]

    def truncate(self, length: int) -> bool:
        """Remove the columns from `length` on. Return False, and remove all, if the cache lacks columns that the token in this
        column attends to."""
        is_complete = self.window is None or self.first <= max(0, length - self.window + 1)
        self.end = length if is_complete else 0
        self.first = self.first if is_complete else 0
        return is_complete

    def select(self, rows: Tensor) -> None:
        """Keep some rows. rows: their indices, (rows,), int64."""
        used = self.end - self.first
        self.kv_cache[: len(rows), :, :used] = self.kv_cache[rows, :, :used]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Append the new keys and values to the cache. Return the result of attention, (rows, heads, new columns, head_dim).

        Args:
            q: (rows, heads, new columns, head_dim).
            k: (rows, kv heads, new columns, head_dim).
            v: (rows, kv heads, new columns, head_dim).
            mask: Result of _CachedMask.
            sinks: (heads,), in kinds of layers with sinks.
        """
        kv = self._append(torch.cat((k, v), -1))
        if self.window is not None:
            kv = kv[:, :, -(self.window - 1 + q.shape[2]) :]
        return self.kernel(q, *kv.split((k.shape[-1], v.shape[-1]), -1), mask, sinks)

    def _append(self, new: Tensor) -> Tensor:
        """Cache new tokens. Return all that were cached, followed by the new ones, (rows, kv heads, columns, width)."""
        cache, used = self.kv_cache[: len(new)], self.end - self.first
        total = used + new.shape[2]
        self.end += new.shape[2]
        if total <= cache.shape[2]:
            cache[:, :, used:total] = new
            return cache[:, :, :total]
        kv = torch.cat((cache[:, :, :used], new), dim=2)
        cache[:, :, : self.window] = kv[:, :, -self.window :]
        self.first = self.end - self.window
        return kv


class _CachedDocuments(nn.Module):
    """The mask of recurrences: padding is another document than the text that follows it, so the state begins with the text."""

    def __init__(self, kind: RecurrentKind, columns: _Columns, dtype: torch.dtype):
        super().__init__()
        self.before, self.columns = kind.reads_before, columns

    def forward(self, context: Context) -> Tensor | None:
        """Return the documents of DeltaRule. None: neither the new columns nor those that a convolution reads are padding."""
        start, new = self.columns.end, context.positions.shape[1]
        if self.columns.padding <= max(0, start - self.before):
            return None
        columns = torch.arange(start - self.before, start + new, device=context.positions.device)
        return (columns >= self.columns.starts[:, None]).long()


class CachedState(Carry):
    """What a recurrence keeps of the cached tokens: a state for each head, and the tokens that a convolution reads."""

    def __init__(self, kind: RecurrentKind, tp: int, dtype: torch.dtype, device: torch.device):
        """tp: number of ranks over which the heads are split."""
        super().__init__()
        self.kind = kind
        self.state = torch.zeros(0, kind.value_heads // tp, *kind.widths, device=device)
        self.tokens = torch.zeros(0, kind.reads_before, kind.channels // tp, dtype=dtype, device=device)
        self.end = 0
        """Number of columns after which this is the state."""

    def kernel_of_layer(self) -> nn.Module:
        return self.kind.kernel(self)

    def reserve(self, rows: int, columns: int) -> None:
        """See CachedAttention. A state takes the same memory for any number of columns."""
        for name in ("state", "tokens"):
            old = getattr(self, name)
            new = old.new_zeros(rows, *old.shape[1:])
            new[: min(rows, len(old))] = old[:rows]
            setattr(self, name, new)

    def truncate(self, length: int) -> bool:
        """See CachedAttention. An earlier state is not known any more."""
        if length == self.end:
            return True
        self.end = 0
        self.state.zero_()
        self.tokens.zero_()
        return False

    def select(self, rows: Tensor) -> None:
        """See CachedAttention."""
        self.state[: len(rows)], self.tokens[: len(rows)] = self.state[rows], self.tokens[rows]

    def tokens_before(self, parts: Sequence[Tensor], count: int) -> Tensor:
        rows, new = parts[0].shape[:2]
        before = self.tokens[:rows].clone()
        last = torch.cat([x[:, -count:] for x in parts], -1)
        self.tokens[:rows] = torch.cat((before, last), 1)[:, -count:]
        self.end += new
        return before

    def state_before(self, maps: AffineMaps) -> Tensor:
        return self.state[: maps.b.shape[1]]

    def keep(self, state: Tensor) -> None:
        self.state[: len(state)] = state


_CACHES = {AttentionKind: (CachedAttention, _CachedMask), RecurrentKind: (CachedState, _CachedDocuments)}
"""Class of a kind of layer -> classes of the caches of its mixers, and of the mask over the cached columns."""


def _classes_of(kind: LayerKind) -> tuple[type, type]:
    return next(classes for cls, classes in _CACHES.items() if isinstance(kind, cls))


class KvCache:
    """A model whose layers cache what they need of earlier tokens, and the texts that they have seen. A Backend of the engine."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        sizes: Any,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        max_seq_len: int = 2**31,
        max_rows: int = 16,
    ):
        """Replace the masks and the kernels of the model.

        Args:
            model: May be sharded.
            structure: Of the model.
            sizes: Dimensions of the model.
            dtype: Of what is cached.
            group: Ranks over which the heads are split. None: this rank has all.
            max_seq_len: Maximum number of tokens of a text and its prompt.
            max_rows: Maximum number of texts that are generated at once.
        """
        self.tokens: dict[int, list[int]] = {}
        """Key of a row -> its cached tokens."""
        self._starts: dict[int, int] = {}
        self._columns = _Columns()
        self._reserved = (0, 0)
        self._model, self._vocab_size, self.dtype = model, sizes.vocab_size, dtype
        self.group, self.max_seq_len, self.max_rows = group, max_seq_len, max_rows
        self.device = next(model.parameters()).device
        self._layers: list[CachedAttention | CachedState] = []
        modules: dict[str, nn.Module] = {
            f"{structure.masks}.{name}": _classes_of(kind)[1](kind, self._columns, dtype)
            for name, kind in structure.kinds.items()
        }
        tp = 1 if group is None else group.size()
        for i in range(len(structure.layer_kinds)):
            kind = structure.kind(i)
            layer = _classes_of(kind)[0](kind, tp, dtype, self.device)
            modules[structure.kernel(i)] = layer.kernel_of_layer()
            self._layers.append(layer)
        self._replaced = replace_modules(model, modules)

    @contextmanager
    def removed(self) -> Iterator[nn.Module]:
        """Context manager in which the model is as it was without the cache."""
        cached = replace_modules(self._model, self._replaced)
        try:
            yield self._model
        finally:
            replace_modules(self._model, cached)

    def reserve(self, rows: int, columns: int) -> None:
        """Provide memory for a batch. Raises ConfigError if memory is lacking."""
        try:
            for layer in self._layers:
                layer.reserve(rows, columns)
        except (RuntimeError, MemoryError):
            of_rows, advice = (
                ("", "lower --max-seq-len") if rows == 1 else (f"{rows} texts of ", "lower the batch size")
            )
            message = f"not enough memory for a KV cache of {of_rows}{columns} tokens; {advice}"
            raise ConfigError("", message) from None
        self._reserved = rows, columns

    @torch.no_grad()
    def next_logits(self, rows: Mapping[int, Sequence[int]]) -> Tensor:
        """Return the logits of each row's next token, (rows, vocabulary), fp32. What is cached is not recomputed.

        Args:
            rows: Key of a row -> all its tokens. Rows of the previous call that are missing have ended.
        """
        self._drop_ended(rows)
        first = self._reusable(rows)
        if not first or not all([layer.truncate(first) for layer in self._layers]):
            first = self._restart(rows)
        self._columns.end = first
        # Rows that have ended, but were not dropped, continue with padding.
        texts = {key: list(rows.get(key, cached)) for key, cached in self.tokens.items()}
        end = max(self._starts[key] + len(text) for key, text in texts.items())
        if len(texts) > self._reserved[0] or end > self._reserved[1]:
            self.reserve(len(texts), min(2 * end, max(end, self.max_seq_len)))
        step = max(1, min(_TOKENS_AT_ONCE, _MASKED_AT_ONCE // end) // len(texts))
        if not first and not self._columns.padding:
            step = end  # the kernel is causal without a mask, so it takes no memory for one
        for start in range(first, end, step):
            logits = self._forward(texts, start, min(start + step, end), is_last=start + step >= end)
        self.tokens = texts
        return logits[[i for i, key in enumerate(texts) if key in rows]]

    def _drop_ended(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Remove rows that have ended, if they are half of the batch, because this copies the others."""
        if 2 * len(rows) > len(self.tokens) or not rows.keys() <= self.tokens.keys():
            return
        kept = torch.tensor([i for i, key in enumerate(self.tokens) if key in rows], device=self.device)
        for layer in self._layers:
            layer.select(kept)
        self.tokens = {key: text for key, text in self.tokens.items() if key in rows}
        self._place({key: self._starts[key] for key in self.tokens})

    def _reusable(self, rows: Mapping[int, Sequence[int]]) -> int:
        """Return the number of cached columns with which these rows begin. It is 0 if the rows do not end in one column."""
        if not self.tokens or not rows.keys() <= self.tokens.keys():
            return 0
        if len({self._starts[key] + len(tokens) for key, tokens in rows.items()}) > 1:
            return 0
        return min(self._starts[key] + _common(self.tokens[key], tokens) for key, tokens in rows.items())

    def _restart(self, rows: Mapping[int, Sequence[int]]) -> int:
        """Make the cache an empty one of these rows. Return the first column to compute, 0."""
        longest = max(map(len, rows.values()))
        self._place({key: longest - len(tokens) for key, tokens in rows.items()})
        self.tokens = {key: [] for key in rows}
        for layer in self._layers:
            layer.truncate(0)
        return 0

    def _place(self, starts: dict[int, int]) -> None:
        self._starts = starts
        self._columns.starts = torch.tensor(list(starts.values()), device=self.device)
        self._columns.padding = max(starts.values())

    def _forward(self, texts: Mapping[int, list[int]], first: int, end: int, is_last: bool) -> Tensor:
        """Compute columns [first, end). Return the logits of each row's last token if these are the last columns."""
        columns = range(first, end)
        rows = [
            [text[i - start] if 0 <= i - start < len(text) else text[0] for i in columns]
            for text, start in zip(texts.values(), self._starts.values(), strict=True)
        ]
        tokens = torch.tensor(rows, device=self.device)
        positions = torch.arange(first, end, device=self.device) - self._columns.starts[:, None]
        samples = torch.arange(len(rows), device=self.device)
        context = Context(positions.clamp(min=0), torch.zeros_like(tokens), samples)
        labels = torch.full_like(tokens, IGNORE_INDEX)
        labels[:, -1] = READ_HERE if is_last else IGNORE_INDEX
        readout = NextLogits(shape=(len(rows), self._vocab_size), first_row=0)
        logits = self._model(tokens, context, head=readout.head(labels, context.documents, None))
        self._columns.end = end
        return logits


def _common(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens are cached, without the last one, from which the next token follows."""
    limit = min(len(cached), len(tokens) - 1)
    if list(tokens[:limit]) == list(cached[:limit]):
        return limit
    return next(i for i in range(limit) if cached[i] != tokens[i])
