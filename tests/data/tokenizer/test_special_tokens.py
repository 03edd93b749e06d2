import json

import pytest

from tests.data.chat.examples import CHATML_NAMES, DEFAULT
from trainer.base.config import ConfigError
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tokenizer.special_tokens import missing_special_tokens, remap_reserved


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
