"""Files of tokenizers. An accepted tokenizer has consistent ids, and byte-level tokenizers decode to the text."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz.check import limits, may_refuse
from tests.fuzz.strategies import (
    SAMPLES,
    TEXTS,
    ByteChange,
    Changed,
    Missing,
    Replaced,
    byte_changes,
    file_change,
    sometimes,
)
from trainer.base.config import TokenizerConfig
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer

tokenizers = pytest.importorskip("tokenizers")

_CORPUS = [text for text in SAMPLES for _ in range(20)]
_FILES = {
    "tiktoken": ["tokenizer.tiktoken"],
    "sentencepiece": ["tokenizer.model"],
    "huggingface": ["tokenizer.json", "tokenizer_config.json"],
}


@pytest.fixture(scope="module")
def intact_files(tmp_path_factory) -> Path:
    """A folder with the files of a small tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    ranks = DEFAULT_FILE.read_bytes().splitlines(keepends=True)
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(ranks[:300]))
    return folder


@dataclass(frozen=True)
class Case:
    backend: str
    changes: dict[str, Changed | Missing | Replaced]
    extra: tuple[str, ...]
    reuse: dict[str, str]


_few_bytes = st.lists(byte_changes, min_size=1, max_size=3).map(lambda changes: Changed(tuple(changes)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    backend = draw(st.sampled_from(list(_FILES)))
    changed = draw(st.lists(st.sampled_from(_FILES[backend]), max_size=1))
    reserved = st.dictionaries(
        st.sampled_from(TEXTS), st.sampled_from(["<|reserved_special_token_0|>", *TEXTS]), min_size=1, max_size=1
    )
    extra = st.lists(st.sampled_from(["<a>", "<s>", "<|eot_id|>", *TEXTS]), min_size=1, max_size=2, unique=True)
    return Case(
        backend=backend,
        changes={
            name: draw(file_change(name) if name.endswith(".json") or draw(sometimes(10)) else _few_bytes)
            for name in changed
        },
        extra=tuple(draw(extra)) if draw(sometimes(40)) else (),
        reuse=draw(reserved) if backend == "tiktoken" and draw(sometimes(20)) else {},
    )


def _check(tokenizer: Tokenizer, is_byte_level: bool) -> None:
    size = tokenizer.vocab_size
    ends = {*tokenizer.prefix, tokenizer.eos, tokenizer.eos if tokenizer.bos is None else tokenizer.bos}
    assert all(0 <= token < size for token in (*ends, *tokenizer.special_tokens.values()))
    assert len(tokenizer.text_bytes()) == size
    tokenizer.huggingface_files()
    for text in SAMPLES:
        tokens = tokenizer.encode(text)
        assert tokens == tokenizer.encode(text) == tokenizer.encode_array(text).tolist()
        assert all(0 <= token < size for token in tokens), f"{text!r} is encoded as {tokens}"
        decoded = tokenizer.decode(tokens)
        assert isinstance(decoded, str)
        assert not is_byte_level or decoded == text
    tokenizer.decode(list(range(size)))


_BROKEN_BYTE_PIECE = Changed((ByteChange("overwrite", start=66, length=1),))
"""Change of a sentencepiece model that spoils the name <0x01>. The library quotes it in a message, which is not UTF-8 then."""


@given(cases())
@example(Case("sentencepiece", {"tokenizer.model": _BROKEN_BYTE_PIECE}, (), {}))
def test_a_tokenizer_is_refused_with_one_line_or_is_consistent(intact_files, case):
    with limits() as folder:
        for name in _FILES[case.backend]:
            shutil.copy(intact_files / name, folder)
        for name, change in case.changes.items():
            change.write(folder / name)
        config = TokenizerConfig(
            backend=case.backend,
            path=str(folder / _FILES[case.backend][0]),
            extra_special_tokens=case.extra,
            reuse_reserved_tokens=case.reuse,
        )
        with may_refuse(expected=bool(case.changes or case.extra or case.reuse)) as refusals:
            tokenizer = load_tokenizer(config)
        if not refusals:
            is_byte_level = case.backend == "tiktoken" or (case.backend == "huggingface" and not case.changes)
            _check(tokenizer, is_byte_level)
