"""The tokenizer interface."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


def has_lone_surrogate(text: str) -> bool:
    """Return whether the text contains a lone surrogate. JSON can hold one, but no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class Tokenizer(Protocol):
    vocab_size: int
    bos: int
    """Id of the token that is prepended to each document."""
    eos: int
    """Id of the token that is appended to each document."""
    fingerprint: str
    """Identifier of the encoding. Tokenizers with equal fingerprints encode every document to the same tokens."""
    files: Mapping[str, bytes]
    """File name -> content of the files that define this tokenizer. To load it, set tokenizer.path to the first file."""
    special_tokens: Mapping[str, int]
    """Name -> id of each special token."""

    def encode(self, text: str) -> list[int]:
        """Encode plain text. Names of special tokens in the text are encoded as plain text, and BOS and EOS are not added."""

    def encode_array(self, text: str) -> np.ndarray:
        """Encode plain text to uint32 token ids, shape (tokens,)."""
        return np.array(self.encode(text), np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text. A special token becomes its name."""

    def text_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes in each token's text (0 if a token has no text), shape (vocab_size,)."""

    def huggingface_files(self) -> dict[str, bytes]:
        """Return name -> content of the files from which Hugging Face's libraries load this tokenizer."""
