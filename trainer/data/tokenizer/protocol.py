"""What a tokenizer is to the trainer."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


def has_lone_surrogate(text: str) -> bool:
    """Whether the text contains an unpaired surrogate: JSON can name one, and no tokenizer encodes it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class Tokenizer(Protocol):
    vocab_size: int
    bos: int
    """Token that opens a document."""
    eos: int
    """Token that closes a document."""
    fingerprint: str
    """Changes when any text could be encoded differently."""
    files: Mapping[str, bytes]
    """Name -> content of what makes the same tokenizer again, the file that its path is to name first."""

    special_tokens: Mapping[str, int]
    """Name -> id of the tokens that no text has."""

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text: what looks like a special token in it is text, and none is added."""

    def encode_array(self, text: str) -> np.ndarray:
        """The same, (tokens,) uint32: without a Python object for each."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Special tokens as their names: nothing is left out."""

    def text_bytes(self) -> np.ndarray:
        """(vocab_size,): bytes of the text that each token stands for; 0 for special ones."""

    def huggingface_files(self) -> dict[str, bytes]:
        """Name -> content of the files that make the same tokenizer for Hugging Face's libraries."""
