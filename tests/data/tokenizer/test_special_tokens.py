"""Special tokens: names, reserved tokens that get new names, and tokens added after a vocabulary, which are never encoded from
text, decoded by name, and exported to Hugging Face's libraries."""

import json

import pytest

from tests.data.chat.examples import CHATML_NAMES, DEFAULT
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.data.chat.format import load_chat_format
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.special_tokens import missing_special_tokens, remap_reserved

NAMES = ("<|im_start|>", "<|im_end|>")


def test_missing_special_tokens_are_named():
    text = BUILT_IN["chatml"].read_text()
    assert missing_special_tokens(text, DEFAULT.special_tokens) == ["<|im_start|>", "<|im_end|>"]
    assert missing_special_tokens(text, remap_reserved(DEFAULT.special_tokens, CHATML_NAMES)) == []
    assert missing_special_tokens(BUILT_IN["llama3"].read_text(), DEFAULT.special_tokens) == []


def test_a_new_special_token_reuses_the_id_of_a_reserved_one():
    before = DEFAULT.special_tokens
    after = remap_reserved(before, CHATML_NAMES)
    assert after["<|im_start|>"] == before["<|reserved_special_token_0|>"]
    assert "<|reserved_special_token_0|>" not in after and len(after) == len(before)
    assert "<|im_start|>" not in DEFAULT.special_tokens


@pytest.mark.parametrize(
    ("reuse_reserved_tokens", "message"),
    [
        ({"<|eot_id|>": "<|reserved_special_token_0|>"}, "<|eot_id|> is already a special token"),
        ({"<|im_end|>": "<|reserved|>"}, "the tokenizer has no reserved token <|reserved|>"),
        ({"x": "<|reserved_special_token_0|>"}, "'x' is too short for the name of a special token"),
        (
            {"<|a|>": "<|reserved_special_token_0|>", "<|b|>": "<|reserved_special_token_0|>"},
            "<|reserved_special_token_0|> is given two new names",
        ),
    ],
)
def test_invalid_reuse_of_reserved_tokens_is_rejected(reuse_reserved_tokens, message):
    with pytest.raises(ConfigError) as error:
        remap_reserved(DEFAULT.special_tokens, reuse_reserved_tokens)
    assert str(error.value) == f"tokenizer.reuse_reserved_tokens: {message}"


def test_exported_special_tokens_are_sorted_by_id():
    """`tokenizers` numbers them from the last rank on and ignores the stated ids."""
    exported = json.loads(DEFAULT.huggingface_files()["tokenizer.json"])["added_tokens"]
    assert [token["id"] for token in exported] == list(range(1792, 2048))
    assert {token["content"]: token["id"] for token in exported} == DEFAULT.special_tokens


def test_added_tokens_follow_the_vocabulary_and_are_never_encoded_from_text():
    tokenizer = load_tokenizer(TokenizerConfig(extra_special_tokens=NAMES))
    assert tokenizer.vocab_size == DEFAULT.vocab_size + 2
    assert [tokenizer.special_tokens[name] for name in NAMES] == [DEFAULT.vocab_size, DEFAULT.vocab_size + 1]
    text = "a <|im_start|> b"
    assert tokenizer.encode(text) == DEFAULT.encode(text)
    first = DEFAULT.vocab_size
    assert tokenizer.decode([first, *DEFAULT.encode("é!"), first + 1, first]) == "<|im_start|>é!<|im_end|><|im_start|>"
    assert tokenizer.text_bytes()[-3:].tolist() == [0, 0, 0] and len(tokenizer.text_bytes()) == tokenizer.vocab_size
    assert tokenizer.fingerprint != DEFAULT.fingerprint
    chat = load_chat_format("chatml", tokenizer)
    assert chat.end_of_turn == (first + 1,)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("<|eot_id|>",), "<|eot_id|> is already a special token"),
        (("<a>", "<a>"), "<a> is already a special token"),
        (("x",), "'x' is too short for the name of a special token"),
    ],
)
def test_invalid_names_are_rejected(names, message):
    with pytest.raises(ConfigError) as error:
        load_tokenizer(TokenizerConfig(extra_special_tokens=names))
    assert (error.value.key, error.value.message) == ("tokenizer.extra_special_tokens", message)


@pytest.mark.parametrize("backend", ["default", "sentencepiece"])
def test_transformers_loads_the_added_tokens(tmp_path, bpe_tokenizer, backend):
    transformers = pytest.importorskip("transformers")
    config = TokenizerConfig(extra_special_tokens=NAMES)
    if backend == "sentencepiece":
        (tmp_path / "m.model").write_bytes(bpe_tokenizer.files["tokenizer.model"])
        config = TokenizerConfig(backend=backend, path=str(tmp_path / "m.model"), extra_special_tokens=NAMES)
    tokenizer = load_tokenizer(config)
    folder = tmp_path / "out"
    folder.mkdir()
    for name, content in tokenizer.huggingface_files().items():
        (folder / name).write_bytes(content)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert [hf_tokenizer.convert_tokens_to_ids(name) for name in NAMES] == [
        tokenizer.special_tokens[name] for name in NAMES
    ]
    assert (
        hf_tokenizer("<|im_start|>", add_special_tokens=False).input_ids[-1] == tokenizer.special_tokens["<|im_start|>"]
    )
