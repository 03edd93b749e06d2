"""Tokenizers: tiktoken, sentencepiece and Hugging Face's tokenizers behind one interface."""

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
import tiktoken

from trainer.config import ConfigError, TokenizerConfig
from trainer.config.packages import require_package
from trainer.data.tokenizer import sentencepiece_json
from trainer.data.tokenizer.added_tokens import WithAddedTokens
from trainer.data.tokenizer.hf_json import json_bytes, tokenizer_json
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.sentencepiece_proto import CONTROL, USER_DEFINED, parse
from trainer.data.tokenizer.special_tokens import remap_reserved
from trainer.system.files import read_json_object
from trainer.system.model_folder import folder_problem, pointer_problem

DEFAULT_FILE = Path(__file__).with_name("default.tiktoken")
"""Path of the default rank file. scripts/train_tokenizer.py trained it on the Python standard library."""

# Llama 3 splits text with this pattern before it merges bytes: contractions, words, up to three digits, punctuation, spaces.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

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


def _fingerprint(backend: str, content: bytes) -> str:
    return f"{backend}-{hashlib.sha256(content).hexdigest()[:16]}"


def _ranks(content: bytes, path: Path) -> dict[bytes, int]:
    """Parse a rank file. Each line contains a token's bytes in base64, a space and the token's rank."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ConfigError("tokenizer.path", f"{path} is not a tiktoken rank file (line {number})") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ConfigError("tokenizer.path", f"{path} is not a tiktoken rank file: its ranks are not 0, 1, 2, ...")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ConfigError("tokenizer.path", f"{path} is not a tiktoken rank file: some single bytes have no rank")
    return ranks


# tiktoken's regular expressions overflow on longer texts, and take quadratic time on longer sequences without a boundary. Meta's
# reference tokenizer splits at the same positions, so these limits are part of the encoding.
_LONGEST_TEXT = 400_000
_LONGEST_RUN = 25_000
_SPACES, _OTHERS = re.compile(r"\s+"), re.compile(r"\S+")


def _long_runs(text: str) -> Iterator[range]:
    """Yield the range of each sequence that is longer than _LONGEST_RUN and is all whitespace or has no whitespace.

    Each such sequence contains a position that is a multiple of _LONGEST_RUN. The search therefore examines only these positions.
    If it examined every character, it would take a third of the encoding time.
    """
    end = 0
    for position in range(0, len(text), _LONGEST_RUN):
        if position < end:
            continue  # this position is in the previous sequence
        is_space = text[position].isspace()
        start = position
        while start > end and text[start - 1].isspace() == is_space:
            start -= 1
        match = (_SPACES if is_space else _OTHERS).match(text, position)
        assert match is not None
        end = match.end()
        if end - start > _LONGEST_RUN:
            yield range(start, end)


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _LONGEST_TEXT):
        piece = text[start : start + _LONGEST_TEXT]
        splits = [position for run in _long_runs(piece) for position in run[::_LONGEST_RUN][1:]]
        yield from (piece[a:b] for a, b in itertools.pairwise([0, *splits, len(piece)]))


class TiktokenTokenizer:
    """Byte-pair encoding with Llama 3's split pattern and special tokens."""

    def __init__(self, path: Path, reuse_reserved_tokens: Mapping[str, str] | None = None):
        """reuse_reserved_tokens: new name -> reserved token to rename."""
        content = path.read_bytes()
        ranks = _ranks(content, path)
        special = remap_reserved(_special_tokens(first=len(ranks)), reuse_reserved_tokens or {})
        self.files = {"tokenizer.tiktoken": content}
        self._ranks, self.special_tokens = ranks, special
        self._encoding = tiktoken.Encoding(
            path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size = len(ranks) + NUM_SPECIAL
        self.bos = special["<|begin_of_text|>"]
        self.eos = special["<|end_of_text|>"]
        shape = f"{LLAMA3_PATTERN}{_LONGEST_TEXT}{_LONGEST_RUN}"
        self.fingerprint = _fingerprint("tiktoken", content + shape.encode())

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in _pieces(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint32), *pieces])

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode(list(tokens))

    def text_bytes(self) -> np.ndarray:
        num_bytes = [len(self._encoding.decode_single_token_bytes(token)) for token in range(len(self._ranks))]
        return np.array(num_bytes + [0] * NUM_SPECIAL)

    def huggingface_files(self) -> dict[str, bytes]:
        content = tokenizer_json(self._ranks, self.special_tokens, LLAMA3_PATTERN, bos="<|begin_of_text|>")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "clean_up_tokenization_spaces": False,
        }
        return _json_files({"tokenizer.json": content, "tokenizer_config.json": config})


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer with a sentencepiece model, such as Llama 2's.

    As sentencepiece specifies, encoding yields a user-defined piece wherever its name occurs. It never yields control pieces.
    """

    def __init__(self, path: Path):
        content = path.read_bytes()
        self.files = {"tokenizer.model": content}
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(content)
        except (RuntimeError, OSError):
            raise ConfigError("tokenizer.path", f"{path} is not a sentencepiece model") from None
        self.vocab_size = processor.vocab_size()
        self.bos = processor.bos_id()
        self.eos = processor.eos_id()
        if self.bos < 0 or self.eos < 0:
            raise ConfigError("tokenizer.path", f"{path} must define a BOS token and an EOS token")
        self._model = parse(content)
        self._control = self._model.of_type(CONTROL)
        special = self._control | self._model.of_type(USER_DEFINED)
        self.special_tokens = {special[token]: token for token in sorted(special)}
        self.fingerprint = _fingerprint("sentencepiece", content)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

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
        return np.array([0 if token in without_text else _piece_bytes(piece) for token, piece in enumerate(pieces)])

    def huggingface_files(self) -> dict[str, bytes]:
        names = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self._processor.unk_id()}
        config = {key: self._processor.id_to_piece(token) for key, token in names.items() if token >= 0}
        config |= {"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False}
        if not self._model.adds_prefix:
            config["add_prefix_space"] = False  # llama.cpp would add one
        content = sentencepiece_json.tokenizer_json(self._model, self.bos)
        if content is None:
            config |= {"tokenizer_class": "LlamaTokenizer", "legacy": False}
            return dict(self.files) | _json_files({"tokenizer_config.json": config})
        config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        return dict(self.files) | _json_files({"tokenizer.json": content, "tokenizer_config.json": config})


# Files in which Hugging Face's formats name BOS and EOS, in order of precedence.
_BOS_EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
COMPANION_FILES = (
    *(
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
    ),
    *("tokenizer.model", "vocab.json", "merges.txt"),  # read by llama.cpp, and by the slow tokenizers of transformers 4
)
"""Names of the files that are saved and exported together with a tokenizer.json."""


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that is defined by a tokenizer.json and run by the package `tokenizers`."""

    def __init__(self, path: Path):
        """path: a tokenizer.json or its folder."""
        tokenizers = require_package("tokenizers", "tokenizer.backend")
        path = path / "tokenizer.json" if path.is_dir() else path
        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of the package's Rust code is not an Exception
            raise ConfigError("tokenizer.path", f"{path} is not a valid tokenizer.json") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # names in text are encoded as plain text
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # the ids may have gaps
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        self.special_tokens = {token.content: i for i, token in added if token.special}
        self.bos = self._find_token(path, "bos", ids)
        self.eos = self._find_token(path, "eos", ids)
        companions = (path.with_name(name) for name in COMPANION_FILES)
        self._companions = {file.name: file.read_bytes() for file in companions if file.is_file()}
        # The ids may come from a file of the model, which is not saved with the tokenizer.
        ids_file = _json_files({"generation_config.json": {"bos_token_id": self.bos, "eos_token_id": self.eos}})
        self.files = {"tokenizer.json": content} | self._companions | ids_file
        self.fingerprint = _fingerprint("huggingface", content + f"{self.bos} {self.eos}".encode())

    def _find_token(self, path: Path, role: str, ids: Mapping[str, int]) -> int:
        """Return the id of the BOS or EOS token, as specified by a file in the tokenizer's folder. role: "bos" or "eos"."""
        for file in _BOS_EOS_FILES:
            config = _json_object(path.with_name(file))
            name = config.get(f"{role}_token")
            name = name.get("content") if isinstance(name, dict) else name
            token = config.get(f"{role}_token_id")
            token = token[0] if isinstance(token, list) and token else token
            token = ids.get(name) if isinstance(name, str) else token
            if isinstance(token, int) and 0 <= token < self.vocab_size:
                return token
        message = f"the tokenizer's folder names no {role.upper()} token in any of {', '.join(_BOS_EOS_FILES)}"
        raise ConfigError("tokenizer.path", message)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def text_bytes(self) -> np.ndarray:
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self.files["tokenizer.json"]).get("decoder"))
        special = set(self.special_tokens.values())
        pieces = [self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        num_bytes = [len(piece) if byte_level else _piece_bytes(piece) for piece in pieces]
        return np.array([0 if token in special else count for token, count in enumerate(num_bytes)])

    def huggingface_files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self.files["tokenizer.json"]} | self._companions


def _piece_bytes(piece: str) -> int:
    """Return the number of bytes of text in a sentencepiece token. "<0x0A>" is one byte, and U+2581 represents a space."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())


def _json_object(path: Path) -> dict:
    """Return the JSON object in a file, or {} if the file is missing. Raises ConfigError."""
    try:
        return read_json_object(path)
    except FileNotFoundError:
        return {}
    except ValueError:
        raise ConfigError("tokenizer.path", f"{path} is not a JSON object") from None


def _json_files(contents: dict[str, dict]) -> dict[str, bytes]:
    return {name: json_bytes(content) for name, content in contents.items()}


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "default": TiktokenTokenizer,
    "tiktoken": TiktokenTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "huggingface": HuggingFaceTokenizer,
}


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the configured tokenizer. Raises ConfigError if its file cannot be read or is invalid for the backend."""
    path = Path(config.path) if config.path else DEFAULT_FILE
    file = path / "tokenizer.json" if path.is_dir() else path
    if problem := pointer_problem(file):
        raise ConfigError("tokenizer.path", problem)
    if path.is_dir() and not file.exists() and (problem := folder_problem(path)):
        raise ConfigError("tokenizer.path", f"{path} has no tokenizer.json, and {problem}")
    try:
        backend = TOKENIZERS[config.backend]
        tokenizer = backend(path, config.reuse_reserved_tokens) if config.reuse_reserved_tokens else backend(path)
    except OSError as error:
        file = f"{Path(error.filename).name} in this folder " if error.filename and Path(error.filename) != path else ""
        raise ConfigError("tokenizer.path", f"{file or 'this path '}cannot be read ({error.strerror})") from None
    return WithAddedTokens(tokenizer, config.extra_special_tokens) if config.extra_special_tokens else tokenizer
