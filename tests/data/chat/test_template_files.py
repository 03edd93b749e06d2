import json

import pytest

from tests.data.chat.examples import CHATML, DEFAULT, TALK, train_sentencepiece
from tests.data.tokenizer.folders import byte_level, save
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template_files import BUILT_IN, usable_templates
from trainer.data.tokenizer.backends import load_tokenizer


def test_a_template_is_loaded_from_each_file_format(tmp_path, llama3):
    text = BUILT_IN["llama3"].read_text()
    expected = llama3.encode(TALK)
    (tmp_path / "x.jinja").write_text(text)
    assert load_chat_format(str(tmp_path / "x.jinja"), DEFAULT).encode(TALK) == expected
    named = [{"name": "tool_use", "template": "{{ raise_exception('no') }}"}, {"name": "default", "template": text}]
    for template in (text, named):
        config = {
            "chat_template": template,
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "legacy": False,
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_chat_format(str(tmp_path / "tokenizer_config.json"), DEFAULT).encode(TALK) == expected
        assert load_chat_format(str(tmp_path), DEFAULT).encode(TALK) == expected
    config["chat_template"] = "{{ raise_exception('not this one') }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(text)
    assert load_chat_format(str(tmp_path), DEFAULT).encode(TALK) == expected


def test_files_without_a_template_are_rejected(tmp_path):
    def message_of(choice) -> str:
        with pytest.raises(ConfigError) as error:
            load_chat_format(str(choice), DEFAULT)
        assert error.value.key == "data.chat_template"
        return error.value.message

    config = tmp_path / "tokenizer_config.json"
    expected = f"expected one of {', '.join(BUILT_IN)}, or an existing file or folder"
    for wrong, hint in (("mine", ""), ("Llama3", "; did you mean 'llama3'?"), ("ChatML", "; did you mean 'chatml'?")):
        assert message_of(wrong) == expected + hint
    assert message_of(tmp_path) == f"{tmp_path} is empty"
    (tmp_path / "README.md").touch()
    assert message_of(tmp_path) == f"{tmp_path} holds neither chat_template.jinja nor tokenizer_config.json"
    config.write_text("{")
    assert message_of(tmp_path) == f"{config} is not a JSON object"
    config.write_text("{}")
    assert message_of(tmp_path) == f"{config} has no chat_template"
    config.write_text('{"chat_template": [{"name": "rag", "template": "x"}]}')
    assert message_of(config) == f'{config} has several templates, but none is named "default"'
    (tmp_path / "bad.jinja").write_bytes(b"ok\xff")
    assert message_of(tmp_path / "bad.jinja") == f"{tmp_path}/bad.jinja is not UTF-8 text (byte 2)"
    (tmp_path / "big.jinja").write_bytes(b" " * 1_000_001)
    assert message_of(tmp_path / "big.jinja") == f"{tmp_path}/big.jinja is larger than the limit of 1000000 bytes"


def test_the_shipped_templates_that_a_tokenizer_can_write_are_found():
    llama3 = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    assert usable_templates(["<|im_start|>", "<|im_end|>"]) == ["chatml", "qwen3", "smollm3", "olmo3", "qwen2.5"]
    assert usable_templates([*llama3, "<|im_start|>", "<|im_end|>"])[:3] == ["llama3", "llama3.1", "chatml"]
    assert usable_templates(["<s>", "</s>"]) == []


def test_a_template_whose_tokens_the_tokenizer_lacks_names_one_that_fits(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    for own, way in (
        (None, "to one whose special tokens it has (chatml, qwen3, "),
        ("x", "to the tokenizer's folder, "),
    ):
        folder = save(tokenizer, tmp_path / str(own), eos_token="<|im_end|>", **({"chat_template": own} if own else {}))
        config = TokenizerConfig(backend="huggingface", path=str(folder))
        with pytest.raises(ConfigError, match=r"which the tokenizer does not have; set data\.chat_template") as error:
            load_chat_format("llama3", load_tokenizer(config))
        assert way in error.value.message


def test_a_tokenizer_without_tokens_of_chats_is_told_the_template_that_needs_none(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_chat_format("llama3", train_sentencepiece(tmp_path, "bpe"))
    reason, way = error.value.message.split("; ")
    assert reason.endswith("which the tokenizer does not have")
    assert way == 'set data.chat_template = "llama2", whose only special tokens are BOS and EOS'


def test_the_fingerprint_depends_on_template_tokenizer_and_special_tokens(char_tokenizer, llama3):
    assert load_chat_format("llama3", DEFAULT).fingerprint == llama3.fingerprint
    others = [
        ChatFormat.compile(BUILT_IN["llama3"].read_text() + " ", DEFAULT),
        load_chat_format("llama3", CHATML),
        load_chat_format("llama3", DEFAULT, allowed_special=["<|python_tag|>"]),
        load_chat_format("llama2", DEFAULT),
        load_chat_format("llama2", char_tokenizer),
    ]
    assert len({chat.fingerprint for chat in [llama3, *others]}) == 6
