"""tokenizer.json of sentencepiece models, in the package tokenizers and in transformers."""

import json
import random
import sys
from pathlib import Path

import pytest
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from tests.data.random_text import SCRIPTS, random_documents
from tests.data.tokenizer.test_backends import train_sentencepiece
from trainer.base.config import ConfigError
from trainer.data.tokenizer.backends import load_tokenizer

LLAMA = dict(
    vocab_size=2000,
    character_coverage=0.98,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True,
    split_digits=True,
    max_sentence_length=100_000,
)
"""Options of Llama 2's model: no normalization, and byte fallback."""
UNIGRAM = dict(model_type="unigram", vocab_size=1500, character_coverage=1.0, required_chars="ABCDEF")


@pytest.fixture(scope="module")
def mixed() -> list[str]:
    """400 kB of random text."""
    return random_documents(400_000, 2000)


def lines(mixed):
    return iter([line for text in mixed[:100] for line in text.split("\n") if line][:20_000])


def words():
    """Return lines of a few words, without combining marks, of which the package loses some when it normalizes text."""
    draw, found = random.Random(0), " ".join(s for s in SCRIPTS if "\x00" not in s and "\u0323" not in s).split()
    return iter([" ".join(draw.choices(found, k=12)) for _ in range(3000)])


def convert(config):
    """Return the tokenizer, and the one that the package loads from the exported file."""
    tokenizer = load_tokenizer(config)
    other = tokenizers.Tokenizer.from_str(tokenizer.huggingface_files()["tokenizer.json"].decode())
    other.encode_special_tokens = True
    return tokenizer, other


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {"remove_extra_whitespaces": True}])
def test_byte_pair_models_yield_the_same_tokens(mixed, tmp_path, options):
    """Also for texts that begin with a space, and for names of control pieces and of bytes in the text."""
    config = train_sentencepiece(tmp_path, input="", sentence_iterator=lines(mixed), **LLAMA | options)
    tokenizer, other = convert(config)
    for text in ["", " ", "  a  b ", "<s> </s> <unk> <0x0A>", *mixed]:
        tokens = tokenizer.encode(text)
        assert tokens == other.encode(text, add_special_tokens=False).ids
        # sentencepiece decodes U+2581 as a space, and the package drops one space at the beginning of every text.
        if "add_dummy_prefix" not in options and "\u2581" not in text:
            assert other.decode(tokens, skip_special_tokens=False) == tokenizer.decode(tokens)
    assert other.encode("a").ids == [tokenizer.bos, *tokenizer.encode("a")]


def test_unigram_models_yield_equally_probable_tokens(mixed, tmp_path):
    """The two libraries may return different ones of several segmentations with the same score."""
    config = train_sentencepiece(tmp_path, input="", sentence_iterator=words(), **UNIGRAM)
    tokenizer, other = convert(config)
    score, different = tokenizer._processor.get_score, 0
    for text in words():
        expected, tokens = tokenizer.encode(text), other.encode(text, add_special_tokens=False).ids
        if tokens != expected:
            different += 1
            assert sum(map(score, tokens)) == pytest.approx(sum(map(score, expected)), abs=1e-3)
    assert different < 300
    assert other.encode("<s> </s>", add_special_tokens=False).ids == tokenizer.encode("<s> </s>")


def test_user_defined_pieces_are_found_and_control_pieces_are_not(tmp_path):
    options = dict(user_defined_symbols=["<|im_start|>", "ünï"], control_symbols=["<call>"])
    options |= dict(
        add_dummy_prefix=False, remove_extra_whitespaces=False, required_chars="<calsu>"
    )  # as in Gemma's model
    for model_type in ("bpe", "unigram"):
        config = train_sentencepiece(tmp_path, model_type=model_type, vocab_size=420, **options)
        tokenizer, other = convert(config)
        for text in ("fox<|im_start|>the fox ünï number<|im_start|>", "the <call> <s> fox", "<|im_start|>"):
            assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
        other.encode_special_tokens = False
        assert other.token_to_id("<call>") in other.encode("the <call>").ids


def test_after_a_special_token_text_begins_as_in_chats(tmp_path):
    """In a chat, sentencepiece encodes each text between special tokens, and adds a space before it."""
    tokenizer, other = convert(train_sentencepiece(tmp_path))
    other.encode_special_tokens = False
    found = other.encode("the fox</s>quick", add_special_tokens=False).ids
    assert found == [*tokenizer.encode("the fox"), tokenizer.eos, *tokenizer.encode("quick")]


@pytest.mark.parametrize(
    "options", [{"model_type": "char"}, {"model_type": "word"}, {"treat_whitespace_as_suffix": True}]
)
def test_other_models_are_exported_only_as_they_are(tmp_path, options):
    files = load_tokenizer(train_sentencepiece(tmp_path, **options)).huggingface_files()
    assert files.keys() == {"tokenizer.model", "tokenizer_config.json"}
    assert json.loads(files["tokenizer_config.json"])["tokenizer_class"] == "LlamaTokenizer"


def test_transformers_loads_the_same_tokens(mixed, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = train_sentencepiece(tmp_path, input="", sentence_iterator=lines(mixed), **LLAMA)
    tokenizer, folder = load_tokenizer(config), tmp_path / "hf"
    folder.mkdir()
    for name, content in tokenizer.huggingface_files().items():
        (folder / name).write_bytes(content)
    assert (folder / "tokenizer.model").exists()  # for llama.cpp
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    for text in mixed[:50]:
        tokens = tokenizer.encode(text)
        assert loaded(text, add_special_tokens=False, split_special_tokens=True).input_ids == tokens
        assert not {tokenizer.bos, tokenizer.eos} & set(tokens)
    assert tokenizer.decode(tokenizer.encode("  two spaces")) == "  two spaces"


def test_a_sentencepiece_model_needs_a_protobuf_version_that_fits(tmp_path, monkeypatch):
    config = train_sentencepiece(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", None)  # its import fails
    with pytest.raises(ConfigError) as error:
        load_tokenizer(config)
    assert str(error.value).startswith(
        "tokenizer.backend: sentencepiece needs another version of the package protobuf: "
    )


def test_a_model_with_a_piece_that_is_not_utf8_is_rejected(tmp_path):
    config = train_sentencepiece(tmp_path)
    path = Path(config.path)
    model = ModelProto.FromString(path.read_bytes())
    model.pieces[-1].piece = "broken"
    path.write_bytes(model.SerializeToString().replace(b"broken", b"brok\xff\xfe"))
    with pytest.raises(ConfigError, match="piece 399 of this sentencepiece model is not UTF-8 text"):
        load_tokenizer(config)
