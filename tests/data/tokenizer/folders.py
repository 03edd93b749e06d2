"""Small tokenizers in Hugging Face's format, with the properties of published ones."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

_WORDS = (
    *("the", "quick", "brown", "Fox", "jumps", "over", "a", "lazy", "dog.", "What", "is", "it?\n\n", "Hello"),
    *("user", "assistant", "system", "number", "12", ":", "<"),
)
_RANDOM = random.Random(0)
_CORPUS = [" ".join(_RANDOM.choices(_WORDS, k=12)) for _ in range(300)]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_like(normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """Return a tokenizer as converted from a sentencepiece model: spaces become U+2581, unknown characters bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    special = ["<unk>", "<s>", "</s>", *_BYTES]
    trainer = trainers.BpeTrainer(vocab_size=460, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([line for text in _CORPUS for line in text.split("\n")], trainer)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in _BYTES]
    return Tokenizer.from_str(json.dumps(content))


def prepending() -> Tokenizer:
    """Return a tokenizer like Llama 2's: the normalizer prepends U+2581 to the text after each special token."""
    return sentencepiece_like(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))


def metaspace(prepend_scheme: str) -> Tokenizer:
    """Return a tokenizer like that of newer conversions. prepend_scheme: "always", "first" or "never"."""
    return sentencepiece_like(pre_tokenizer=pre_tokenizers.Metaspace("▁", prepend_scheme, split=False))


def byte_level() -> Tokenizer:
    """Return a tokenizer like Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write a tokenizer and its tokenizer_config.json to a new folder."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return folder


def special(name: str, **flags: bool) -> AddedToken:
    return AddedToken(name, **{"special": True, "normalized": False, **flags})
