import base64
import random
import re

import pytest
import sentencepiece

from trainer.config import ConfigError, TokenizerConfig
from trainer.data import tokenizers as module
from trainer.data.sources import Span, open_source
from trainer.data.tokenizers import DEFAULT_FILE, load_tokenizer
from trainer.load_config import load_config

TEXT = "def f(x):\n    return 'Grüße, 世界 🙂'  # <|end_of_text|>\t\n\n\n  12345 don't\x00"


def test_the_default_tokenizer_gives_every_text_back():
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.vocab_size == 2048
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert max(tokens) < 1792, "special tokens in a text are text"
    assert (tokenizer.bos, tokenizer.eos) == (1792, 1793)


@pytest.mark.parametrize(
    "text", [" " * 1_000_000, "x" * 900_001, "long enough " * 80_000, "\n" * 30_000 + "y" * 60_000]
)
def test_texts_of_any_length_come_back(text):
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_runs_are_cut_where_metas_tokenizer_cuts_them():
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.encode("a" * 60_000) == 2 * tokenizer.encode("a" * 25_000) + tokenizer.encode("a" * 10_000)
    assert tokenizer.encode("b" * 25_000 + " c") == tokenizer.encode("b" * 25_000) + tokenizer.encode(" c")
    assert tokenizer.encode("x y" * 200_000) == tokenizer.encode(("x y" * 200_000)[:400_000]) + tokenizer.encode(
        ("x y" * 200_000)[400_000:]
    )


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_those_of_counting_characters(seed, monkeypatch):
    """Meta's rule, as it reads: a piece ends where its run of spaces, or of other characters, has reached the limit."""
    monkeypatch.setattr(module, "_LONGEST_RUN", 3)
    monkeypatch.setattr(module, "_LONG_RUN", re.compile(module._LONG_RUN.pattern.replace("25001", "4")))
    text = "".join(random.Random(seed).choices("a b\n", k=60))
    expected, start, length = [], 0, 0
    for i, letter in enumerate(text):
        length = length + 1 if i > 0 and letter.isspace() == text[i - 1].isspace() else 1
        if length > 3:
            expected.append(text[start:i])
            start, length = i, 1
    assert list(module._pieces(text)) == [*expected, text[start:]]


def test_the_default_tokenizer_has_learned_from_source_code():
    source = open_source(load_config([]).data)
    text = "".join(str(d) for path in source.files[:20] for d in source.read(Span(path, 0, 10**9)))
    assert len(text.encode()) / len(load_tokenizer(TokenizerConfig()).encode(text)) > 2.5


def test_llama_3_rank_files_get_its_special_tokens(tmp_path):
    """A rank file of 128,000 tokens, as Meta's: the 256 bytes and longer ones."""
    tokens = [bytes([i]) for i in range(256)] + [b"%07d" % i for i in range(127_744)]
    lines = [b"%s %d" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    tokenizer = load_tokenizer(TokenizerConfig(kind="tiktoken", path=str(tmp_path / "tokenizer.model")))
    assert tokenizer.vocab_size == 128_256
    assert (tokenizer.bos, tokenizer.eos) == (128_000, 128_001)
    for name, number in {"<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007, "<|eot_id|>": 128_009}.items():
        assert tokenizer.decode([number]) == name


def train_sentencepiece(folder, **more):
    (folder / "text").write_text("\n".join(f"the quick brown fox number {i} jumps" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **more,
    )
    return TokenizerConfig(kind="sentencepiece", path=str(folder / "m.model"))


def test_sentencepiece_models_are_read(tmp_path):
    tokenizer = load_tokenizer(train_sentencepiece(tmp_path))
    tokens = tokenizer.encode("the quick 世界")
    assert tokenizer.decode(tokens) == "the quick 世界"
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert max(tokens) < tokenizer.vocab_size


def refused(config) -> str:
    with pytest.raises(ConfigError) as error:
        load_tokenizer(config)
    assert error.value.key == "tokenizer.path"
    return error.value.rule


def test_files_of_another_kind_are_refused(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("hello there you\n")
    assert refused(TokenizerConfig(kind="tiktoken", path=str(broken))) == (
        f"not a tiktoken rank file: line 1 of {broken}"
    )
    assert refused(TokenizerConfig(kind="sentencepiece", path=str(broken))) == f"not a sentencepiece model: {broken}"
    half = tmp_path / "half"
    half.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[5:]))
    assert refused(TokenizerConfig(kind="tiktoken", path=str(half))) == (
        f"not a tiktoken rank file: the ranks in {half} are not 0, 1, 2, ..."
    )
    endless = train_sentencepiece(tmp_path, eos_id=-1)
    assert refused(endless) == f"the model has no begin- or end-of-text token: {endless.path}"


def test_the_fingerprint_follows_the_content(tmp_path):
    copy = tmp_path / "copy"
    copy.write_bytes(DEFAULT_FILE.read_bytes())
    same = load_tokenizer(TokenizerConfig(kind="tiktoken", path=str(copy)))
    assert same.fingerprint == load_tokenizer(TokenizerConfig()).fingerprint
    copy.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    assert load_tokenizer(TokenizerConfig(kind="tiktoken", path=str(copy))).fingerprint != same.fingerprint
