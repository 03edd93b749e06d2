"""Text to tokens and back: tiktoken and sentencepiece behind one interface."""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece
import tiktoken

from trainer.config import ConfigError, TokenizerConfig
from trainer.data.tokenizer_json import tokenizer_json

DEFAULT_FILE = Path(__file__).with_name("default.tiktoken")
"""Byte-pair ranks learned from the Python standard library by scripts/train_tokenizer.py."""

# How Llama 3 splits text before it merges bytes: contractions, words, numbers of up to three digits, punctuation, spaces.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Llama 3.1's special tokens in the order of their ids, which follow the ranks; the rest up to 256 is reserved.
_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
NUM_SPECIAL = 256


class Tokenizer(Protocol):
    vocab_size: int
    bos: int
    """Token that opens a document."""
    eos: int
    """Token that closes a document."""
    fingerprint: str
    """Changes when any text could be encoded differently."""
    content: bytes
    """Of the file it was made from."""
    special_tokens: Mapping[str, int]
    """Name -> id of the tokens that encode never gives."""

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text: what looks like a special token in it is text."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def huggingface_files(self) -> dict[str, bytes]:
        """Name -> content of the files that make the same tokenizer for Hugging Face's libraries."""


def _special_tokens(first: int) -> dict[str, int]:
    names = dict(_NAMED)
    reserved = 0
    for i in range(NUM_SPECIAL):
        if i not in names:
            names[i] = f"<|reserved_special_token_{reserved}|>"
            reserved += 1
    return {name: first + i for i, name in names.items()}


def _fingerprint(kind: str, content: bytes) -> str:
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"


def _ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """A rank file has one line for each token: its bytes in base64, a space, its rank."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ConfigError("tokenizer.path", f"not a tiktoken rank file: line {number} of {path}") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ConfigError("tokenizer.path", f"not a tiktoken rank file: the ranks in {path} are not 0, 1, 2, ...")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ConfigError("tokenizer.path", f"not a tiktoken rank file: {path} has not all of the 256 single bytes")
    return ranks


# tiktoken's regular expressions overflow on longer texts, and take quadratic time on longer runs without a border. Meta's
# reference tokenizer cuts at the same places, so these are part of the encoding.
_LONGEST_TEXT = 400_000
_LONGEST_RUN = 25_000
_LONG_RUN = re.compile(r"(?<!\s)\s{25001,}|(?<!\S)\S{25001,}")


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _LONGEST_TEXT):
        piece = text[start : start + _LONGEST_TEXT]
        cuts = [cut for run in _LONG_RUN.finditer(piece) for cut in range(run.start(), run.end(), _LONGEST_RUN)[1:]]
        yield from (piece[a:b] for a, b in itertools.pairwise([0, *cuts, len(piece)]))


class TiktokenTokenizer:
    """Byte-pair encoding with Llama 3's split pattern and special tokens."""

    def __init__(self, path: Path):
        content = path.read_bytes()
        ranks = _ranks(content, path)
        special = _special_tokens(first=len(ranks))
        self.content = content
        self._ranks, self._special = ranks, special
        self.special_tokens = special
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + NUM_SPECIAL
        self.bos = special["<|begin_of_text|>"]
        self.eos = special["<|end_of_text|>"]
        rules = (LLAMA3_PATTERN, str(_LONGEST_TEXT), str(_LONGEST_RUN))
        self.fingerprint = _fingerprint("tiktoken", content + "".join(rules).encode())

    def encode(self, text: str) -> list[int]:
        return [token for piece in _pieces(text) for token in self._encoding.encode_ordinary(piece)]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode(list(tokens))

    def huggingface_files(self) -> dict[str, bytes]:
        whole = tokenizer_json(self._ranks, self._special, LLAMA3_PATTERN, bos="<|begin_of_text|>")
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "clean_up_tokenization_spaces": False,
        }
        return _json_files({"tokenizer.json": whole, "tokenizer_config.json": about})


class SentencePieceTokenizer:
    """A sentencepiece model, as Llama 2 uses it."""

    def __init__(self, path: Path):
        self.content = content = path.read_bytes()
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except (RuntimeError, OSError):
            raise ConfigError("tokenizer.path", f"not a sentencepiece model: {path}") from None
        self.vocab_size = self._processor.vocab_size()
        self.bos = self._processor.bos_id()
        self.eos = self._processor.eos_id()
        if self.bos < 0 or self.eos < 0:
            raise ConfigError("tokenizer.path", f"the model has no begin- or end-of-text token: {path}")
        controls = [i for i in range(self.vocab_size) if self._processor.is_control(i)]
        self.special_tokens = {self._processor.id_to_piece(i): i for i in controls}
        self.fingerprint = _fingerprint("sentencepiece", content)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._processor.decode(list(tokens))

    def huggingface_files(self) -> dict[str, bytes]:
        names = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self._processor.unk_id()}
        about = {key: self._processor.id_to_piece(token) for key, token in names.items() if token >= 0}
        about |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False}
        return {"tokenizer.model": self.content} | _json_files({"tokenizer_config.json": about})


def _json_files(contents: dict[str, dict]) -> dict[str, bytes]:
    return {name: json.dumps(content, ensure_ascii=False, indent=1).encode() for name, content in contents.items()}


TOKENIZERS: dict[str, Callable[[Path], Tokenizer]] = {
    "default": TiktokenTokenizer,
    "tiktoken": TiktokenTokenizer,
    "sentencepiece": SentencePieceTokenizer,
}


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Raises ConfigError where the file is not what its kind says."""
    try:
        return TOKENIZERS[config.kind](Path(config.path) if config.path else DEFAULT_FILE)
    except OSError as error:
        raise ConfigError("tokenizer.path", f"cannot be read ({error.strerror})") from None
