"""New special tokens behind the vocabulary of any tokenizer."""

import hashlib
import itertools
import json
from collections.abc import Sequence

import numpy as np

from trainer.config import ConfigError
from trainer.data.tokenizer.protocol import Tokenizer


class WithAddedTokens:
    """A tokenizer, and tokens with ids from its vocab_size on, which no text has."""

    def __init__(self, base: Tokenizer, names: Sequence[str]):
        """Raises ConfigError for names that are taken or too short."""
        for name in names:
            if name in base.special_tokens or names.count(name) > 1:
                raise ConfigError("tokenizer.extra_special_tokens", f"{name} is a special token already")
            if len(name) < 2:
                raise ConfigError(
                    "tokenizer.extra_special_tokens", f"{name!r} is too short for the name of a special token"
                )
        self._base = base
        self._names = tuple(names)
        self.vocab_size = base.vocab_size + len(names)
        self.bos, self.eos, self.files = base.bos, base.eos, base.files
        self.special_tokens = {**base.special_tokens, **{n: base.vocab_size + i for i, n in enumerate(names)}}
        shape = json.dumps([base.fingerprint, list(names)])
        self.fingerprint = f"{base.fingerprint}-{hashlib.sha256(shape.encode()).hexdigest()[:8]}"
        self.encode = base.encode
        self.encode_array = base.encode_array

    def decode(self, tokens: Sequence[int]) -> str:
        first = self._base.vocab_size
        parts = []
        for added, group in itertools.groupby(tokens, lambda token: token >= first):
            run = list(group)
            parts.append("".join(self._names[t - first] for t in run) if added else self._base.decode(run))
        return "".join(parts)

    def text_bytes(self) -> np.ndarray:
        return np.concatenate([self._base.text_bytes(), np.zeros(len(self._names), np.int64)])

    def huggingface_files(self) -> dict[str, bytes]:
        files = dict(self._base.huggingface_files())
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        first = self._base.vocab_size
        added = [{"id": first + i, "content": name, **flags} for i, name in enumerate(self._names)]
        if "tokenizer.json" in files:
            whole = json.loads(files["tokenizer.json"])
            whole["added_tokens"] = [*whole.get("added_tokens", []), *added]
            files["tokenizer.json"] = json.dumps(whole, ensure_ascii=False, indent=1).encode()
        about = json.loads(files.get("tokenizer_config.json", b"{}"))
        known = dict(about.get("added_tokens_decoder", {}))
        if known or "tokenizer.json" not in files:
            behind = {str(entry.pop("id")): entry for entry in map(dict, added)}
            about["added_tokens_decoder"] = known | behind
        files["tokenizer_config.json"] = json.dumps(about, ensure_ascii=False, indent=1).encode()
        return files
