"""Small random models and tokenizers whose exports scripts/dev/check_exports.py compares."""

import base64
import json
import random
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import sentencepiece
import tokenizers
import torch

from models.decoder import Decoder
from models.spec import saved_weights
from scripts.train_tokenizer import train
from trainer.base.config import TokenizerConfig
from trainer.base.config.load import load_config
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.native_writer import write_tensors
from trainer.checkpoint.tensor_files import TensorWrite
from trainer.data.prepare.encode import chat_format
from trainer.data.tokenizer.backends import NUM_SPECIAL, load_tokenizer
from trainer.data.tokenizer.byte_pair import PATTERNS
from trainer.run.resolve import resolve
from trainer.run.run_folder import model_files
from trainer.run.text_format import load_text_format
from trainer.tools.testing.random_parameters import randomize

SEQ_LEN = 48  # more than the windows of the debug sizes, and than the context from which their encodings are extended
_GIB = 2**30
_SMALL = {"n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 352, "vocab_size": 2048}
_PUBLISHED = {"llama2": "7b", "llama3.1": "8b", "llama3.2": "1b"}
"""Families without a debug size -> size that is made smaller."""
_WIDE = {"dim": 256, "head_dim": 32}
"""Heads of the width that vLLM computes on CPUs."""
_OVERRIDES = {
    **{"olmoe": {"n_kv_heads": 8}, "gpt-oss": {"rope_truncate": "true"}, "phi": {"partial_rotary_factor": 0.25}},
    **{"gemma2": {"query_pre_attn_scalar": 32}, "gemma3": {"query_pre_attn_scalar": 32}},
    **{"llama3": {"head_dim": None}, "deepseek-v3": {"head_dim": None}},
}
"""Family -> sizes of its models that are not those of its debug size and _WIDE. None: no other value. They are what llama.cpp
computes."""


# ---------------------------------------------------------------- strings

_TEXTS = (
    "the quick brown fox isn't We'RE I'll 1234567 89 3.14159 1,000,000 0x00FF 2nd",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n\n\tif x == 10:\n\t\tpass\r\n",
    '{"key": [1, 2.0, null], "a b": {"c": "d\\n"}}',
    "Größe façade Łódź Привет мир 世界和平 カタカナ 한국어 مرحبا שלום नमस्ते ไทย e\u0301 a\u0308",
    "🙂👍🏽👨\u200d👩\u200d👧 \U0001d518\U0001d52b ﬁ ½ Ⅳ ① ٣ १२३ \u00a0\u3000\u200b\ufeff\u2028",
    "<|begin_of_text|> <|end_of_text|><|im_start|>user\n<s></s> <unk> <0x0A> [INST] <|endoftext|>",
    "  two  spaces   at both ends  ",
    "!!!...???---___***///\\\\\\ $x_1^2 + y$ @name #tag https://a.b/c?d=e&f=g%20h",
)


def strings(count: int) -> list[str]:
    """Return texts of many scripts, code, white space, numbers, and names of special tokens."""
    draw, result = random.Random(0), ["plain text"]
    while len(result) < count:
        kind = draw.randrange(5)
        words = draw.choice(_TEXTS).split(" ")
        if kind < 3:
            start = draw.randrange(len(words))
            text = draw.choice((" ", "  ", "\n", "")).join(words[start:] + draw.choice(_TEXTS).split(" ")[:start])
        elif kind == 3:
            text = draw.choice(" \n\t-=.0a世") * draw.choice((1, 2, 3, 5, 40)) + draw.choice(words)
        else:
            text = "".join(chr(draw.choice((draw.randrange(32, 127), draw.randrange(0xA0, 0x3000)))) for _ in range(9))
            text = "".join(c for c in text if unicodedata.category(c) != "Cn")
        result.append(draw.choice(("", " ")) + text + draw.choice(("", " ", "\n")))
    return result


# ---------------------------------------------------------------- tokenizers


def write_tokenizers(folder: Path) -> dict[str, TokenizerConfig]:
    """Return name -> tokenizer. Their files are written to the folder."""
    texts = strings(400)
    ranks = folder / "trained.tiktoken"
    tokens = train(iter(texts), 1500 - NUM_SPECIAL)
    ranks.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in texts for line in text.split("\n") if line]),
        model_prefix=str(folder / "llama"),
        model_type="bpe",
        vocab_size=1200,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        # as in Llama 2's model
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
    )
    model = TokenizerConfig(backend="sentencepiece", path=str(folder / "llama.model"))
    llama = folder / "llama"
    files = load_tokenizer(model).huggingface_files()
    config = json.loads(files["tokenizer_config.json"]) | {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    _write(llama, files | {"tokenizer_config.json": json.dumps(config).encode()})
    return {
        "shipped": TokenizerConfig(),
        "trained": TokenizerConfig(backend="tiktoken", path=str(ranks)),
        "sentencepiece": model,
        "llama folder": TokenizerConfig(backend="huggingface", path=str(llama)),
        "qwen folder": TokenizerConfig(backend="huggingface", path=str(_write_qwen(folder / "qwen", texts))),
    }


def _write_qwen(folder: Path, texts: list[str]) -> Path:
    """Write a tokenizer with the class and the pattern of Qwen's, and with special tokens and others in its vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERNS["qwen2"]), behavior="isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, **names}
    _write(
        folder, {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    )
    return folder


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


# ---------------------------------------------------------------- exports


def export(family: str, tokenizer: TokenizerConfig, folder: Path, with_template: bool = False) -> Decoder:
    """Export a small model of a family with random parameters to folder/export, and return it. A process group must exist.

    Args:
        family: Of the model.
        tokenizer: Of the model.
        folder: A new folder, which also gets the checkpoint.
        with_template: Whether the export has the default chat template.
    """
    words = ["--model.name", family, "--model.size", _PUBLISHED.get(family, "debug")]
    own = _SMALL | {"head_dim": None} if family in _PUBLISHED else _OVERRIDES.get(family, {})
    overrides = {name: value for name, value in (_WIDE | own).items() if value is not None}
    words += [word for name, value in overrides.items() for word in (f"--model.overrides.{name}", str(value))]
    words += ["--training.seq_len", str(SEQ_LEN), "--tokenizer.backend", tokenizer.backend]
    config = load_config([*words, "--tokenizer.path", tokenizer.path])
    resolved = resolve(config, 1)
    model = resolved.spec.model(resolved.sizes)
    randomize(model)

    def pieces(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        yield parameter.detach()

    entries = [
        TensorWrite(f"model/{name}", parameter.dtype, tuple(parameter.shape), partial(pieces, parameter))
        for name, parameter in saved_weights(model).items()
    ]
    text = load_text_format(config, resolved)
    if with_template:
        text = replace(text, chat_template=chat_format(config.data, text.tokenizer).self_contained())
    files = model_files(config, resolved, text, {}, None, None)
    write_tensors(folder / "checkpoint", entries, files, _GIB, "random parameters")
    write_huggingface(open_weights(folder / "checkpoint", alone=True), folder / "export", torch.float32, _GIB)
    return model
