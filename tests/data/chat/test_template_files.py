import json

import pytest

from models import MODELS
from tests.data.chat.examples import CHATML, DEFAULT, TALK, train_sentencepiece
from tests.data.tokenizer.folders import byte_level, save
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.checkpoint.formats.model_metadata import CHAT_TEMPLATE
from trainer.checkpoint.formats.tokenizer_files import exported_tokenizer
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template_files import BUILT_IN, own_template, usable_templates
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


TURNS = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
WITH_TOOLS = f"\n  {{% for t in tools %}}{{{{ t | tojson }}}}\n{{% endfor %}}{{# a remark #}}  \n{TURNS}\n  \n"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def in_list(folder, default, tool_use):
    templates = [{"name": name, "template": text} for name, text in (("default", default), ("tool_use", tool_use))]
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": templates}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def in_files(folder, default, tool_use):
    (folder / "chat_template.jinja").write_text(default)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ raise_exception('no') }}")


@pytest.mark.parametrize("place", [in_list, in_files])
def test_documents_with_tools_have_the_template_for_tools(tmp_path, place):
    """In training, in prompts, and in exports, as in transformers."""
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    folder = save(tokenizer, tmp_path / "own", bos_token=None, eos_token="<|eot_id|>")
    place(folder, f"\n{TURNS}\n", WITH_TOOLS)
    own = load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder)))
    chat, peer = load_chat_format(str(folder), own), transformers.AutoTokenizer.from_pretrained(folder)
    chat.validate_template()
    assert own_template(own.files) == chat.template == chat.self_contained()
    exported = exported_tokenizer(
        {**own.huggingface_files(), CHAT_TEMPLATE: chat.template.encode()}, MODELS["llama3"].huggingface
    )
    (tmp_path / "exported").mkdir()
    for name, content in exported.items():
        (tmp_path / "exported" / name).write_bytes(content)
    of_export = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    for tools in (None, TOOLS):
        expected = peer.apply_chat_template(TALK, tools=tools, return_dict=False)
        assert of_export.apply_chat_template(TALK, tools=tools, return_dict=False) == expected
        assert chat.encode(TALK, tools)[0] == expected
    other_end = chat.template.replace(
        "<|eot_id|>", "<|end_header_id|>", 1
    )  # in the template for tools, which is the first
    ends = [own.special_tokens[name] for name in ("<|eot_id|>", "<|end_header_id|>")]
    assert ChatFormat.compile(other_end, own).end_of_turn == tuple(ends) and chat.end_of_turn == (ends[0],)


@pytest.mark.parametrize("has_decoder", [False, True])
def test_variables_of_a_template_are_those_of_transformers(tmp_path, has_decoder):
    """They may be in tokenizer_config.json, or in special_tokens_map.json of older folders, and have any name."""
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|b|>", "<|e|>", "<|i|>", "<|p|>", "<|x|>"])
    ids = {name: tokenizer.token_to_id(name) for name in ("<|b|>", "<|e|>", "<|i|>", "<|p|>", "<|x|>")}
    decoder = {str(i): {"content": name, "special": True} for name, i in ids.items()}
    text = "{{ bos_token }}{{ pad_token }}{{ image_token }}{{ boi_token }}" + TURNS.replace(
        "<|eot_id|>", "{{ eos_token }}"
    )
    text = text.replace("<|start_header_id|>", "").replace("<|end_header_id|>", ": ")
    config = {"eos_token": "<|e|>", "image_token": "<|i|>", "extra_special_tokens": {"boi_token": "<|x|>"}}
    config |= {"added_tokens_decoder": decoder} if has_decoder else {}
    folder = save(tokenizer, tmp_path / "own", chat_template=text, **config)
    names = {"bos_token": "<|b|>", "pad_token": {"content": "<|p|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    peer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = load_chat_format(str(folder), load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder))))
    expected = peer.apply_chat_template(TALK, return_dict=False)
    assert chat.encode(TALK)[0] == expected
    assert peer.decode(expected).startswith("<|i|><|x|>" if has_decoder else "<|b|><|p|><|i|><|x|>")


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
    (tmp_path / "big.jinja").write_bytes(b" " * (2**24 + 1))
    assert message_of(tmp_path / "big.jinja") == f"{tmp_path}/big.jinja is larger than the limit of 16777216 bytes"


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
