"""The tokenizer interface, and functions that several backends share."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np


def content_fingerprint(backend: str, content: bytes) -> str:
    return f"{backend}-{hashlib.sha256(content).hexdigest()[:16]}"


def piece_bytes(piece: str) -> int:
    """Return the number of bytes of text in a sentencepiece token. "<0x0A>" is one byte, and U+2581 represents a space."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())


class Tokenizer(Protocol):
    vocab_size: int
    bos: int | None
    """Id of the token that chat templates call bos_token, or None if the tokenizer has none."""
    eos: int
    """Id of the token that is appended to each document."""
    prefix: tuple[int, ...]
    """Ids of the tokens that are prepended to each document and to each prompt: BOS, or nothing."""
    fingerprint: str
    """Identifier of the encoding. Tokenizers with equal fingerprints encode every document to the same tokens."""
    parts_fingerprint: str = ""
    """Identifier of how encode_parts depends on the neighbours of a text, or "" if it encodes each part independently."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user of this tokenizer, one line each."""
    files: Mapping[str, bytes]
    """File name -> content of the files that define this tokenizer. To load it, set tokenizer.path to the first file."""
    special_tokens: Mapping[str, int]
    """Name -> id of each special token."""
    added_tokens: Mapping[str, int] = MappingProxyType({})
    """Name -> id of each token that is recognized in plain text, such as <think>."""

    def encode(self, text: str) -> list[int]:
        """Encode plain text. Names of special tokens in the text are encoded as plain text, and BOS and EOS are not added."""

    def encode_array(self, text: str) -> np.ndarray:
        """Encode plain text to uint32 token ids, shape (tokens,)."""
        return np.array(self.encode(text), np.uint32)

    def encode_parts(self, parts: Sequence[str | int], before: Sequence[str | int] = ()) -> list[int]:
        """Encode a text in which special tokens occur. Return only the tokens of `parts`.

        Args:
            parts: non-empty plain texts and ids of special tokens, in their order.
            before: the parts that precede. They decide about spaces at the start of `parts`, but a token never extends over both.
        """
        return [token for part in parts for token in ([part] if isinstance(part, int) else self.encode(part))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text. A special token becomes its name."""

    def text_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes in each token's text (0 if a token has no text), shape (vocab_size,)."""

    def huggingface_files(self) -> dict[str, bytes]:
        """Return name -> content of the files from which Hugging Face's libraries load this tokenizer."""
