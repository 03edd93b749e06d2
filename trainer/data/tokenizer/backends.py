"""Text to tokens and back: tiktoken, sentencepiece and Hugging Face's tokenizers behind one interface."""

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
from trainer.data.tokenizer.added_tokens import WithAddedTokens
from trainer.data.tokenizer.hf_json import tokenizer_json
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.sentencepiece_proto import user_defined
from trainer.data.tokenizer.special_tokens import remap_reserved
from trainer.system.files import read_json_object

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


def _special_tokens(first: int) -> dict[str, int]:
    names = dict(_NAMED)
    reserved = 0
    for i in range(NUM_SPECIAL):
        if i not in names:
            names[i] = f"<|reserved_special_token_{reserved}|>"
            reserved += 1
    return {names[i]: first + i for i in range(NUM_SPECIAL)}


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
_SPACES, _OTHERS = re.compile(r"\s+"), re.compile(r"\S+")


def _long_runs(text: str) -> Iterator[range]:
    """The runs of spaces, or of other characters, that are longer than the limit. Such a run holds a multiple of the limit,
    so that only what stands there is measured: to look at every character takes a third of the time of encoding."""
    end = 0
    for at in range(0, len(text), _LONGEST_RUN):
        if at < end:
            continue  # in the run that was measured last
        space = text[at].isspace()
        begin = at
        while begin > end and text[begin - 1].isspace() == space:
            begin -= 1
        match = (_SPACES if space else _OTHERS).match(text, at)
        assert match is not None
        end = match.end()
        if end - begin > _LONGEST_RUN:
            yield range(begin, end)


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _LONGEST_TEXT):
        piece = text[start : start + _LONGEST_TEXT]
        cuts = [cut for run in _long_runs(piece) for cut in run[::_LONGEST_RUN][1:]]
        yield from (piece[a:b] for a, b in itertools.pairwise([0, *cuts, len(piece)]))


class TiktokenTokenizer:
    """Byte-pair encoding with Llama 3's split pattern and special tokens."""

    def __init__(self, path: Path, reuse_reserved_tokens: Mapping[str, str] | None = None):
        """reuse_reserved_tokens: new names -> those of reserved tokens, whose ids they get."""
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
        rules = (LLAMA3_PATTERN, str(_LONGEST_TEXT), str(_LONGEST_RUN))
        self.fingerprint = _fingerprint("tiktoken", content + "".join(rules).encode())

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        pieces = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in _pieces(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.uint32), *pieces])

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode(list(tokens))

    def text_bytes(self) -> np.ndarray:
        sizes = [len(self._encoding.decode_single_token_bytes(token)) for token in range(len(self._ranks))]
        return np.array(sizes + [0] * NUM_SPECIAL)

    def huggingface_files(self) -> dict[str, bytes]:
        whole = tokenizer_json(self._ranks, self.special_tokens, LLAMA3_PATTERN, bos="<|begin_of_text|>")
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|end_of_text|>",
            "clean_up_tokenization_spaces": False,
        }
        return _json_files({"tokenizer.json": whole, "tokenizer_config.json": about})


class SentencePieceTokenizer:
    """A sentencepiece model, as Llama 2 uses it. Its user-defined pieces are one token wherever a text has them: that is what
    the library means by them, and part of the encoding; its control pieces are in no text."""

    def __init__(self, path: Path):
        content = path.read_bytes()
        self.files = {"tokenizer.model": content}
        self._processor = processor = sentencepiece.SentencePieceProcessor()
        try:
            processor.LoadFromSerializedProto(content)
        except (RuntimeError, OSError):
            raise ConfigError("tokenizer.path", f"not a sentencepiece model: {path}") from None
        self.vocab_size = processor.vocab_size()
        self.bos = processor.bos_id()
        self.eos = processor.eos_id()
        if self.bos < 0 or self.eos < 0:
            raise ConfigError("tokenizer.path", f"the model has no begin- or end-of-text token: {path}")
        self._control = {t: processor.id_to_piece(t) for t in range(self.vocab_size) if processor.is_control(t)}
        special = self._control | user_defined(content)
        self.special_tokens = {special[token]: token for token in sorted(special)}
        self.fingerprint = _fingerprint("sentencepiece", content)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        result, text = [], []
        for token in tokens:
            if token in self._control:  # which the library leaves out
                result += [self._processor.decode(text), self._control[token]]
                text = []
            else:
                text.append(token)
        return "".join([*result, self._processor.decode(text)])

    def text_bytes(self) -> np.ndarray:
        processor = self._processor
        silent = {*self._control, processor.unk_id()}
        pieces = [processor.id_to_piece(token) for token in range(self.vocab_size)]
        return np.array([0 if token in silent else _piece_bytes(piece) for token, piece in enumerate(pieces)])

    def huggingface_files(self) -> dict[str, bytes]:
        names = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": self._processor.unk_id()}
        about = {key: self._processor.id_to_piece(token) for key, token in names.items() if token >= 0}
        about |= {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False}
        return dict(self.files) | _json_files({"tokenizer_config.json": about})


# Where Hugging Face's formats name the tokens that open and close a text, in the order in which they are looked at.
_NAMING = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""What belongs to a tokenizer.json, and goes where it goes."""


class HuggingFaceTokenizer:
    """A tokenizer.json, run by the package tokenizers."""

    def __init__(self, path: Path):
        """path: of the file or its folder."""
        tokenizers = require_package("tokenizers", "tokenizer.backend")
        path = path / "tokenizer.json" if path.is_dir() else path
        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception:  # the package raises no other kind
            raise ConfigError("tokenizer.path", f"not a tokenizer.json: {path}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # as the text that they look like
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # there may be gaps
        added = sorted(self._tokenizer.get_added_tokens_decoder().items())
        self.special_tokens = {token.content: number for number, token in added if token.special}
        self.bos = self._named(path, "bos", ids)
        self.eos = self._named(path, "eos", ids)
        self._beside = {name: file.read_bytes() for name in _BESIDE if (file := path.with_name(name)).is_file()}
        # Where these ids came from may be a file of the model, which does not go with the tokenizer.
        named = _json_files({"generation_config.json": {"bos_token_id": self.bos, "eos_token_id": self.eos}})
        self.files = {"tokenizer.json": content} | self._beside | named
        self.fingerprint = _fingerprint("huggingface", content + f"{self.bos} {self.eos}".encode())

    def _named(self, path: Path, which: str, ids: Mapping[str, int]) -> int:
        """The token that a file beside the tokenizer names bos or eos."""
        for name in _NAMING:
            about = _json_object(path.with_name(name))
            token = about.get(f"{which}_token")
            token = token.get("content") if isinstance(token, dict) else token
            number = about.get(f"{which}_token_id")
            number = number[0] if isinstance(number, list) and number else number
            found = ids.get(token) if isinstance(token, str) else number
            if isinstance(found, int) and 0 <= found < self.vocab_size:
                return found
        what = {"bos": "begin", "eos": "end"}[which]
        raise ConfigError(
            "tokenizer.path", f"no {what}-of-text token: {which}_token is in none of {', '.join(_NAMING)} beside it"
        )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), np.uint32)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def text_bytes(self) -> np.ndarray:
        by_letter = '"ByteLevel"' in json.dumps(json.loads(self.files["tokenizer.json"]).get("decoder"))
        special = set(self.special_tokens.values())
        pieces = [self._tokenizer.id_to_token(token) or "" for token in range(self.vocab_size)]
        sizes = [len(piece) if by_letter else _piece_bytes(piece) for piece in pieces]
        return np.array([0 if token in special else size for token, size in enumerate(sizes)])

    def huggingface_files(self) -> dict[str, bytes]:
        return {"tokenizer.json": self.files["tokenizer.json"]} | self._beside


def _piece_bytes(piece: str) -> int:
    """Of the text of a sentencepiece token: <0x0A> is a byte, and the lower block is a space."""
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())


def _json_object(path: Path) -> dict:
    """Empty where there is no such file, or it holds something else."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def _json_files(contents: dict[str, dict]) -> dict[str, bytes]:
    return {name: json.dumps(content, ensure_ascii=False, indent=1).encode() for name, content in contents.items()}


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {
    "default": TiktokenTokenizer,
    "tiktoken": TiktokenTokenizer,
    "sentencepiece": SentencePieceTokenizer,
    "huggingface": HuggingFaceTokenizer,
}


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Raises ConfigError where the file is not what its kind says."""
    path = Path(config.path) if config.path else DEFAULT_FILE
    try:
        kind = TOKENIZERS[config.backend]
        tokenizer = kind(path, config.reuse_reserved_tokens) if config.reuse_reserved_tokens else kind(path)
    except OSError as error:
        file = f"{Path(error.filename).name} in it " if error.filename and Path(error.filename) != path else ""
        raise ConfigError("tokenizer.path", f"{file}cannot be read ({error.strerror})") from None
    return WithAddedTokens(tokenizer, config.extra_special_tokens) if config.extra_special_tokens else tokenizer
