"""Tokenizers: tiktoken, sentencepiece and Hugging Face's tokenizers behind one interface."""

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from trainer.base.config import ConfigError, TokenizerConfig
from trainer.base.config.recognition import pointer_problem, recognise
from trainer.data.tokenizer import sentencepiece_json
from trainer.data.tokenizer.byte_pair import LONGEST_RUN, LONGEST_TEXT, PATTERNS, byte_pair_encoding, short_pieces
from trainer.data.tokenizer.hf_json import SPECIAL_TOKEN_FLAGS, json_files, json_object, tokenizer_json
from trainer.data.tokenizer.huggingface import HuggingFaceTokenizer
from trainer.data.tokenizer.protocol import Tokenizer, content_fingerprint, piece_bytes
from trainer.data.tokenizer.special_tokens import WithAddedTokens, configured_tokens, name_of, remap_reserved
from trainer.data.tokenizer.tekken import TekkenTokenizer

DEFAULT_FILE = Path(__file__).with_name("default.tiktoken")
"""Path of the default tiktoken file. scripts/train_tokenizer.py trained it on the Python standard library."""

# Llama 3.1's special tokens by position after the ranks. All other positions up to 256 are reserved.
_LLAMA3_SPECIAL_TOKENS = {
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


def _special_tokens(first: int) -> dict[str, int]:
    reserved = (f"<|reserved_special_token_{i}|>" for i in itertools.count())
    return {_LLAMA3_SPECIAL_TOKENS.get(i) or next(reserved): first + i for i in range(NUM_SPECIAL)}


def _ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Parse a tiktoken file. Each line contains a token's bytes in base64, a space and the token's id."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ConfigError("tokenizer.path", f"{path} is not a tiktoken file (line {number})") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ConfigError("tokenizer.path", f"{path} is not a tiktoken file: its token ids are not 0, 1, 2, ...")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ConfigError("tokenizer.path", f"{path} is not a tiktoken file: some single bytes have no token")
    return ranks


_KNOWN_FILES = {
    50_256: ("GPT-2", "gpt2"),
    100_256: ("cl100k_base", "cl100k"),
    151_643: ("Qwen", "qwen2"),
    199_998: ("o200k_base", "o200k"),
    200_000: ("Llama 4", "llama4"),
}
"""Number of tokens -> owner and pattern of a tiktoken file whose special tokens are not Llama 3's."""
_LLAMA3_RANKS = 128_000


def _pattern_of(path: Path, content: bytes, num_ranks: int) -> tuple[str, tuple[str, ...]]:
    """Return the pattern for a file if the user does not name one, and warnings. Raises ConfigError for the file of another
    model."""
    if num_ranks in _KNOWN_FILES:
        owner, pattern = _KNOWN_FILES[num_ranks]
        message = f"{path} has as many tokens as the file of {owner}, whose split pattern and special tokens are not Llama 3's"
        way = f'set tokenizer.pattern = "{pattern}" to train a new model with these ranks and Llama 3\'s special tokens'
        way += ', or to "llama3" to continue a run that began before this setting existed'
        raise ConfigError("tokenizer.path", f"{message}; use a tokenizer.json with backend = huggingface, or {way}")
    if num_ranks == _LLAMA3_RANKS or content == DEFAULT_FILE.read_bytes():
        return "llama3", ()
    message = f"{path} is not Llama 3's tiktoken file, but is used with Llama 3's split pattern"
    way = 'set tokenizer.pattern to the pattern with which it was trained (scripts/train_tokenizer.py: "llama3")'
    return "llama3", (f"{message}; {way}",)


class TiktokenTokenizer(Tokenizer):
    """Byte-pair encoding with Llama 3's special tokens."""

    def __init__(
        self, content: bytes, path: Path, reuse_reserved_tokens: Mapping[str, str] | None = None, pattern: str = ""
    ):
        """Build the tokenizer.

        Args:
            content: Of a tiktoken file.
            path: Its path, for messages.
            reuse_reserved_tokens: New name -> reserved token to rename.
            pattern: Name in PATTERNS, regular expression, or "" for Llama 3's pattern.

        Raises:
            ConfigError: The file or the pattern cannot be used.
        """
        ranks = _ranks(content, path)
        if not pattern:
            pattern, self.warnings = _pattern_of(path, content, len(ranks))
        self._pattern = PATTERNS.get(pattern, pattern)
        special = remap_reserved(_special_tokens(first=len(ranks)), reuse_reserved_tokens or {})
        self.files = {"tokenizer.tiktoken": content}
        self._ranks, self.special_tokens = ranks, special
        self._encoding = byte_pair_encoding(path.name, self._pattern, ranks, special)
        self.vocab_size = len(ranks) + NUM_SPECIAL
        self.bos = special["<|begin_of_text|>"]
        self.eos = special["<|end_of_text|>"]
        self.prefix = (self.bos,)
        shape = f"{self._pattern}{LONGEST_TEXT}{LONGEST_RUN}"
        self.fingerprint = content_fingerprint("tiktoken", content + shape.encode())

    @classmethod
    def load(
        cls, path: Path, reuse_reserved_tokens: Mapping[str, str] | None = None, pattern: str = ""
    ) -> "TiktokenTokenizer":
        return cls(path.read_bytes(), path, reuse_reserved_tokens, pattern)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in short_pieces(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint32), *pieces])

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode(list(tokens))

    def text_bytes(self) -> np.ndarray:
        num_bytes = [len(self._encoding.decode_single_token_bytes(token)) for token in range(len(self._ranks))]
        return np.array(num_bytes + [0] * NUM_SPECIAL)

    def huggingface_files(self) -> dict[str, bytes]:
        content = tokenizer_json(self._ranks, self.special_tokens, self._pattern, bos="<|begin_of_text|>")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "clean_up_tokenization_spaces": False,
        }
        return json_files({"tokenizer.json": content, "tokenizer_config.json": config})


_ANCHOR = "\ue000"  # a character of no vocabulary, which therefore never merges with adjacent text


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with a sentencepiece model, such as Llama 2's.

    As sentencepiece specifies, encoding yields a user-defined piece wherever its name occurs. It never yields control pieces.
    """

    def __init__(self, content: bytes, path: Path, prepends_bos: bool = True):
        """Build the tokenizer.

        Args:
            content: Of a sentencepiece model.
            path: Its path, for messages.
            prepends_bos: Whether every text begins with BOS, if the model has one.

        Raises:
            ConfigError: The content is no model, or the model has no EOS.
        """
        self.files = {"tokenizer.model": content}
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(content)
        except (RuntimeError, OSError, UnicodeDecodeError):  # the last: its message quotes a piece that is not UTF-8
            raise ConfigError("tokenizer.path", f"{path} is not a sentencepiece model") from None
        self.vocab_size = processor.vocab_size()
        self.bos = processor.bos_id() if processor.bos_id() >= 0 else None
        self.eos = processor.eos_id()
        if self.eos < 0:
            raise ConfigError("tokenizer.path", f"{path} defines no EOS token, which must end each document")
        self.prefix = () if self.bos is None else (self.bos,)
        self.fingerprint = content_fingerprint("sentencepiece", content)
        if self.prefix and not prepends_bos:
            self.prefix = ()
            self.files |= json_files({"tokenizer_config.json": {"add_bos_token": False}})
            self.fingerprint += "-without-bos"
        self._model = sentencepiece_json.parse(content)
        self._control = sentencepiece_json.names_of_type(self._model, "CONTROL")
        special = self._control | sentencepiece_json.names_of_type(self._model, "USER_DEFINED")
        self.special_tokens = {special[token]: token for token in sorted(special)}
        # Sentencepiece prepends a space to every text, so that a word has the same token at every position.
        anchor = self.encode(_ANCHOR)
        self._adds_space = all(self.encode(_ANCHOR + c) != anchor + self.encode(c) for c in "aT1(")
        self.parts_fingerprint = "space-after-special-tokens" if self._adds_space else ""

    @classmethod
    def load(cls, path: Path) -> "SentencePieceTokenizer":
        """Read a model, and the setting add_bos_token of the tokenizer_config.json beside it. Raises ConfigError or OSError."""
        content, config = path.read_bytes(), json_object(path.with_name("tokenizer_config.json"))
        return cls(content, path, prepends_bos=config.get("add_bos_token") is not False)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_parts(self, parts: Sequence[str | int], before: Sequence[str | int] = ()) -> list[int]:
        tokens, previous = [], before[-1] if before else None
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
            else:  # a text after a special token begins with a space, as in transformers and in Meta's code
                tokens += self._encode_without_space(part) if isinstance(previous, str) else self.encode(part)
            previous = part
        return tokens

    def _encode_without_space(self, text: str) -> list[int]:
        """Encode a text that continues another one, so that no space is prepended to it."""
        if self._adds_space:
            anchor, tokens = self.encode(_ANCHOR), self.encode(_ANCHOR + text)
            if tokens[: len(anchor)] == anchor:
                return tokens[len(anchor) :]
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        result, text = [], []
        for token in tokens:
            if token in self._control:  # the sentencepiece library would omit the name
                result += [self._processor.decode(text), self._control[token]]
                text = []
            else:
                text.append(token)
        return "".join([*result, self._processor.decode(text)])

    def text_bytes(self) -> np.ndarray:
        processor = self._processor
        without_text = {*self._control, processor.unk_id()}
        pieces = [processor.id_to_piece(token) for token in range(self.vocab_size)]
        return np.array([0 if token in without_text else piece_bytes(piece) for token, piece in enumerate(pieces)])

    def huggingface_files(self) -> dict[str, bytes]:
        unknown = self._processor.unk_id()
        ids = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": unknown if unknown >= 0 else None}
        config = {key: None if token is None else self._processor.id_to_piece(token) for key, token in ids.items()}
        config |= {"add_bos_token": bool(self.prefix), "add_eos_token": False, "clean_up_tokenization_spaces": False}
        if not self._model.normalizer_spec.add_dummy_prefix:
            config["add_prefix_space"] = False  # llama.cpp would add one
        files = {"tokenizer.model": self.files["tokenizer.model"]}
        content = sentencepiece_json.tokenizer_json(self._model, self.bos if self.prefix else None)
        if content is not None:
            config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
            return files | json_files({"tokenizer.json": content, "tokenizer_config.json": config})
        special = {**{config["unk_token"]: ids["unk_token"]}, **self.special_tokens}
        decoder = {str(token): {"content": name, **SPECIAL_TOKEN_FLAGS} for name, token in special.items() if name}
        # legacy: prepend a space to the text after each special token.
        config |= {"tokenizer_class": "LlamaTokenizer", "legacy": True, "added_tokens_decoder": decoder}
        return files | json_files({"tokenizer_config.json": config})


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "default": TiktokenTokenizer.load,
    "tiktoken": TiktokenTokenizer.load,
    "sentencepiece": SentencePieceTokenizer.load,
    "huggingface": HuggingFaceTokenizer.load,
    "tekken": TekkenTokenizer.load,
}


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the configured tokenizer. Raises ConfigError if its file cannot be read or is invalid for the backend."""
    path = Path(config.path) if config.path else DEFAULT_FILE
    file = path / "tokenizer.json" if path.is_dir() else path
    if problem := pointer_problem(file):
        raise ConfigError("tokenizer.path", problem)
    if path.is_dir() and not file.exists() and (problem := recognise(path, "text").problem):
        raise ConfigError("tokenizer.path", f"{path} has no tokenizer.json, and {problem}")
    try:
        options = {"reuse_reserved_tokens": config.reuse_reserved_tokens, "pattern": config.pattern}
        tokenizer = TOKENIZERS[config.backend](path, **{name: value for name, value in options.items() if value})
    except OSError as error:
        file = f"{Path(error.filename).name} in this folder " if error.filename and Path(error.filename) != path else ""
        raise ConfigError("tokenizer.path", f"{file or 'this path '}cannot be read ({error.strerror})") from None
    num_tokens = tokenizer.vocab_size
    if config.extra_special_tokens:
        tokenizer = WithAddedTokens(tokenizer, config.extra_special_tokens)
    if config.backend == "sentencepiece":
        _require_configured_tokens(tokenizer, num_tokens, path.parent)
    return tokenizer


def _require_configured_tokens(tokenizer: Tokenizer, num_pieces: int, folder: Path) -> None:
    """Raise ConfigError if the files beside a sentencepiece model add tokens that the tokenizer does not have. A token that only
    pads is not needed. num_pieces: number of tokens in the model's file."""
    config = json_object(folder / "tokenizer_config.json")
    older = {} if config.get("added_tokens_decoder") is not None else json_object(folder / "added_tokens.json")
    file, tokens = configured_tokens({"tokenizer_config.json": config, "added_tokens.json": older}, folder)
    padding = name_of(config.get("pad_token"))
    for token, flags in tokens.items():
        name = flags["content"]
        is_new = token >= num_pieces and name != padding
        if is_new and tokenizer.special_tokens.get(name) != token:
            message = f"{file} adds {name} with the id {token}, which the sentencepiece model does not have"
            way = "use its tokenizer.json with backend = huggingface, or add the tokens with tokenizer.extra_special_tokens"
            raise ConfigError("tokenizer.path", f"{message}; {way}")
