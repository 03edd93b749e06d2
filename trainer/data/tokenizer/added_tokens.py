"""Tokenizer wrapper that appends special tokens to the vocabulary of any tokenizer."""

import hashlib
import itertools
import json
from collections.abc import Sequence

import numpy as np

from trainer.data.tokenizer.hf_json import SPECIAL_TOKEN_FLAGS, json_bytes
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.data.tokenizer.special_tokens import require_new_name


class WithAddedTokens(Tokenizer):
    """A tokenizer with special tokens appended to its vocabulary. Encoding text never produces an appended token."""

    def __init__(self, base: Tokenizer, names: Sequence[str]):
        """Raises ConfigError for names that are already in use or too short."""
        for i, name in enumerate(names):
            require_new_name(name, {*base.special_tokens, *names[:i]}, "tokenizer.extra_special_tokens")
        self._base = base
        self._names = tuple(names)
        self.vocab_size = base.vocab_size + len(names)
        self.bos, self.eos, self.prefix, self.files = base.bos, base.eos, base.prefix, base.files
        self.warnings, self.parts_fingerprint = base.warnings, base.parts_fingerprint
        self.special_tokens = {**base.special_tokens, **{n: base.vocab_size + i for i, n in enumerate(names)}}
        shape = json.dumps([base.fingerprint, list(names)])
        self.fingerprint = f"{base.fingerprint}-{hashlib.sha256(shape.encode()).hexdigest()[:8]}"
        self.encode = base.encode
        self.encode_array = base.encode_array
        self.encode_parts = base.encode_parts

    def decode(self, tokens: Sequence[int]) -> str:
        first = self._base.vocab_size
        pieces = []
        for is_added, group in itertools.groupby(tokens, lambda token: token >= first):
            run = list(group)
            pieces += [self._names[token - first] for token in run] if is_added else [self._base.decode(run)]
        return "".join(pieces)

    def text_bytes(self) -> np.ndarray:
        return np.concatenate([self._base.text_bytes(), np.zeros(len(self._names), np.int64)])

    def huggingface_files(self) -> dict[str, bytes]:
        files = dict(self._base.huggingface_files())
        first = self._base.vocab_size
        added = [{"id": first + i, "content": name, **SPECIAL_TOKEN_FLAGS} for i, name in enumerate(self._names)]
        if "tokenizer.json" in files:
            content = json.loads(files["tokenizer.json"])
            content["added_tokens"] = [*content.get("added_tokens", []), *added]
            files["tokenizer.json"] = json_bytes(content)
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        decoder = config.get("added_tokens_decoder", {})
        if decoder or "tokenizer.json" not in files or "tokenizer.model" in files:
            config["added_tokens_decoder"] = decoder | {str(entry.pop("id")): entry for entry in map(dict, added)}
        files["tokenizer_config.json"] = json_bytes(config)
        return files
