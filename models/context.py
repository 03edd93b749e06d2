"""What the layers of a model need besides the hidden state."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Context(NamedTuple):
    """One microbatch as the blocks see it. One object goes down the model, so a layer that needs another input adds a field here.

    It is a named tuple, because torch's pipeline schedules split the tensors of a tuple into microbatches, and FSDP and the
    compiler look into it."""

    positions: Tensor
    """Position of each token in its document or sample, (batch, seq), int64."""
    documents: Tensor
    """Index of each token's document in its sample, (batch, seq), int64. -1 outside all documents."""
    samples: Tensor
    """Index of each row's sample, (batch,), int64."""
    last_readers: Tensor | None = None
    """Index in the sample of the last token that attends to each token, (batch, seq), int64, where documents share the tokens
    before them. None: tokens attend to all earlier tokens of their own document, or sample."""
    rope: Any = None
    """Positional encoding of the block's kind: result of LayerKind.rope. None outside the blocks, and in layers without one."""
    mask: Any = None
    """Mask of the block's kind, as its attention kernel takes it. None outside the blocks, and for causal attention."""
    future: Tensor | None = None
    """The next tokens, (batch, seq, prediction layers), int64: of a token, the one after it, the one after that, and so on. -1:
    its document has ended before. None outside training."""
    dropout_keys: Tensor | None = None
    """Hash of each token, and of the block in a block, (batch, seq), int32. None without dropout of adapters."""

    @staticmethod
    def of(tokens: Tensor, first_position: int = 0) -> "Context":
        """Return the context of samples that are one document each.

        Args:
            tokens: (batch, seq).
            first_position: Position of the first token.
        """
        positions = torch.arange(first_position, first_position + tokens.shape[1], device=tokens.device)
        samples = torch.arange(len(tokens), device=tokens.device)
        return Context(positions.expand(tokens.shape), torch.zeros_like(tokens), samples)
