"""Tokenizer files and chat templates of exports, read by transformers."""

import json
import os
import shutil
from pathlib import Path

import jinja2
import pytest
import torch
import transformers
from jinja2 import nodes
from jinja2.ext import Extension

from models import MODELS
from scripts.dev.export_cases import strings, write_tokenizers
from tests.commands import run_script
from tests.training_runs import checkpoint_of, combine, in_folder, train
from trainer.base.config import CheckpointConfig, ConfigError, TokenizerConfig
from trainer.checkpoint.formats.adapter import Adapter
from trainer.checkpoint.formats.export import export_run
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.peft_writer import write_peft
from trainer.checkpoint.formats.tokenizer_files import exported_tokenizer, without_generation_tags
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.tools.testing.layouts import DEBUG_FAMILIES


def test_transformers_reads_tokens_and_logits_of_every_family():
    done = run_script("scripts/dev/check_exports.py", "--strings", "150")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("transformers, ")]
    assert [line.split(":")[0] for line in lines] == [f"transformers, {name}" for name in MODELS]
    assert all(": tokens are equal; logits deviate by " in line for line in lines)
    assert all(line.endswith(", equal greedy tokens, equal chat tokens") for line in lines)
    assert "llama.cpp: not compared; --llama-cpp names the interpreter of its environment\n" in done.stdout


OLD_PYTHON = "TRANSFORMERS_4_PYTHON"
"""Variable with the path of a Python interpreter whose environment has transformers 4.51, torch and tokenizers."""


@pytest.mark.skipif(OLD_PYTHON not in os.environ, reason=f"set {OLD_PYTHON} to a Python that has transformers 4.51")
def test_transformers_4_reads_tokens_of_every_family_and_logits_of_those_that_it_knows():
    command = ["scripts/dev/check_exports.py", "--python", os.environ[OLD_PYTHON], "--strings", "150"]
    done = run_script(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *lines = [line for line in done.stdout.splitlines() if line.startswith("transformers")]
    assert first.startswith("transformers 4.")
    assert [line.split(":")[0] for line in lines] == [f"transformers, {name}" for name in MODELS]
    assert all(": tokens are equal; " in line for line in lines)
    assert sum("logits deviate by" in line for line in lines) >= 8, "this version knows most families"


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    return write_tokenizers(tmp_path_factory.mktemp("tokenizers"))


def write_export(folder, family, config):
    """Write the tokenizer of an export, and config.json, from which transformers reads the type of model."""
    folder.mkdir(exist_ok=True)
    hf = MODELS[family].huggingface
    for name, content in exported_tokenizer(load_tokenizer(config).huggingface_files(), hf).items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": hf.model_type}))
    return folder


def assert_same_tokens(config, folder, **options):
    own, loaded = load_tokenizer(config), transformers.AutoTokenizer.from_pretrained(folder, **options)
    for text in strings(60):
        assert loaded(text, add_special_tokens=False, split_special_tokens=True).input_ids == own.encode(text)
    assert len(loaded) == own.vocab_size, "transformers added a token to the vocabulary"
    return loaded


@pytest.mark.parametrize("family", ["qwen2.5", "phi", "gemma3", "llama3"])
@pytest.mark.parametrize("name", ["shipped", "sentencepiece", "qwen folder"])
def test_an_export_that_transformers_saves_again_keeps_its_tokens(configs, tmp_path, family, name):
    folder = write_export(tmp_path / "a", family, configs[name])
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "b")
    shutil.copy(folder / "config.json", tmp_path / "b")
    assert_same_tokens(configs[name], tmp_path / "b")


@pytest.mark.parametrize("name", ["shipped", "qwen folder"])
def test_trust_in_the_code_of_a_folder_changes_no_tokens(configs, tmp_path, name, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = write_export(tmp_path / "a", "qwen2.5", configs[name])
    assert (folder / "tokenizer_from_file.py").exists() == (name == "shipped"), "Qwen's own tokenizer needs no code"
    assert_same_tokens(configs[name], folder, trust_remote_code=True)


@pytest.mark.parametrize("family", DEBUG_FAMILIES)
def test_a_model_accepts_what_the_tokenizer_returns(configs, tmp_path, family):
    loaded = transformers.AutoTokenizer.from_pretrained(write_export(tmp_path / "a", family, configs["shipped"]))
    assert sorted(loaded("a text")) == ["attention_mask", "input_ids"]  # token_type_ids would be an error in generate()


def test_llama_cpp_finds_the_files_of_phi(configs, tmp_path):
    """Its converter reads tokenizer.model, unless tokenizer_class is GPT2Tokenizer."""
    for name, expected in (("shipped", "GPT2Tokenizer"), ("sentencepiece", "PreTrainedTokenizerFast")):
        folder = write_export(tmp_path / name, "phi", configs[name])
        assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == expected
        assert (folder / "tokenizer.model").exists() == (name == "sentencepiece")


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_llama_cpp_finds_the_sentencepiece_model_of_families_whose_converters_read_it(configs, tmp_path, family):
    """Gemma 2's converter reads no other file."""
    folder = write_export(tmp_path / "a", family, configs["sentencepiece"])
    assert (folder / "tokenizer.model").read_bytes() == Path(configs["sentencepiece"].path).read_bytes()
    assert_same_tokens(configs["sentencepiece"], folder)


# ---------------------------------------------------------------- chat templates


class Generation(Extension):
    """{% generation %} as in transformers: the body has its own scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


TEMPLATES = [
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    # white space control, line ends that trim_blocks removes, and indentation that lstrip_blocks removes
    "{%- for m in messages %}\n  <{{ m.role }}>\n    {%- generation -%}\n  {{ m.content }}  \n\n"
    "  {%- endgeneration %}\n\n{% endfor %}",
    "{% for m in messages %}\n    {% generation %}\n\n    {{ m.content }}\n  {% endgeneration %}  \n x {% endfor %}",
    "a \n {%+ generation +%}\n b {%generation%}c{%endgeneration%}{%+ endgeneration +%} \n d",
    # names that are no tags
    "{# {% generation %} #}{% raw %}{% generation %}{% endraw %}{{ '{% generation %}' }}"
    "{% if '%}' == \"{% endgeneration %}\" %}{% endif %}{% generation %}{{ messages[0].content }}{% endgeneration %}",
    # variables that end with the block
    "{% set x = 1 %}{% generation -%} {% set x = 2 %}{{ x }}{% endgeneration %}\n{{ x }}",
]  # fmt: skip
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "  Hello\n"}],
    [{"role": "system", "content": "s"}, {"role": "assistant", "content": ""}, {"role": "user", "content": " \n "}],
    [{"role": "assistant", "content": "{% generation %}"}] * 3,
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_without_generation_tags_renders_the_same_text(template):
    with_tags = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation])
    without_tags = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    stripped = without_generation_tags(template)
    for messages in CONVERSATIONS:
        expected = with_tags.from_string(template).render(messages=messages)
        assert without_tags.from_string(stripped).render(messages=messages) == expected
    assert without_generation_tags(stripped) == stripped


def test_a_template_without_such_tags_does_not_change():
    template = "{% for m in messages %}{{ m.content }}{% set generation = 1 %}{% endfor %} {%  generations %}"
    assert without_generation_tags(template) == template


def test_exports_have_one_template_without_tags(configs):
    tagged = "{% generation %}x{% endgeneration %}"
    files = load_tokenizer(configs["qwen folder"]).huggingface_files()
    config = json.loads(files["tokenizer_config.json"])
    hf = MODELS["qwen3"].huggingface
    for template in (tagged, [{"name": "default", "template": tagged}, {"name": "tool_use", "template": "y"}]):
        files["tokenizer_config.json"] = json.dumps(config | {"chat_template": template}).encode()
        found = json.loads(exported_tokenizer(files, hf)["tokenizer_config.json"])["chat_template"]
        assert "{%" not in json.dumps(found) and type(found) is type(template)
        both = exported_tokenizer(files | {"chat_template.jinja": tagged.encode()}, hf)
        assert both["chat_template.jinja"] == b"{# generation #}x{# endgeneration #}"
        assert "chat_template" not in json.loads(both["tokenizer_config.json"]), (
            "readers would not agree on the template"
        )


# ---------------------------------------------------------------- files of a base folder


def base_folder(configs, tmp_path):
    """Return a folder with tokenizer.json and the files that other readers need, and the names of these files."""
    folder = tmp_path / "base"
    shutil.copytree(configs["llama folder"].path, folder)
    (folder / "added_tokens.json").write_text("{}")
    return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_files_of_a_base_folder_are_exported_again(configs, tmp_path):
    folder, before = base_folder(configs, tmp_path)
    assert before.keys() >= {"tokenizer.model", "tokenizer.json", "added_tokens.json"}
    config = TokenizerConfig(backend="huggingface", path=str(folder))
    exported = exported_tokenizer(load_tokenizer(config).huggingface_files(), MODELS["llama2"].huggingface)
    kept = before.keys() - {"tokenizer_config.json", "tokenizer.json"}
    assert {name: exported[name] for name in kept} == {name: before[name] for name in kept}
    given, content = json.loads(before["tokenizer.json"]), json.loads(exported["tokenizer.json"])
    # tokenizer_config.json names <unk> as unk_token, which transformers therefore adds to the special tokens.
    assert [token["content"] for token in content.pop("added_tokens")] == ["<unk>", "<s>", "</s>"]
    assert content == {name: value for name, value in given.items() if name != "added_tokens"}


def test_readers_of_tokenizer_model_find_new_tokens(configs, tmp_path):
    """llama.cpp reads the tokens that tokenizer.model does not have in tokenizer_config.json."""
    folder, _ = base_folder(configs, tmp_path)
    config = TokenizerConfig(backend="huggingface", path=str(folder), extra_special_tokens=("<|new|>",))
    tokenizer = load_tokenizer(config)
    exported = exported_tokenizer(tokenizer.huggingface_files(), MODELS["llama2"].huggingface)
    decoder = json.loads(exported["tokenizer_config.json"])["added_tokens_decoder"]
    assert decoder[str(tokenizer.vocab_size - 1)]["content"] == "<|new|>"
    assert_same_tokens(config, write_export(tmp_path / "export", "llama2", config))


@pytest.mark.parametrize(("stated", "expected"), [({}, "left"), ({"padding_side": "right"}, "right")])
def test_an_export_pads_on_the_side_of_its_folder(configs, tmp_path, stated, expected):
    """The default of the class that the folder names, Llama's, differs from that of the class that the export names."""
    folder, before = base_folder(configs, tmp_path)
    config = json.loads(before["tokenizer_config.json"]) | stated
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    export = write_export(tmp_path / "export", "llama2", TokenizerConfig(backend="huggingface", path=str(folder)))
    sides = [transformers.AutoTokenizer.from_pretrained(path).padding_side for path in (folder, export)]
    assert sides == [expected, expected]


CHAT_FAMILIES = {
    "Llama 3.1": "llama3.1",
    "Qwen 2.5": "qwen2.5",
    "Qwen 3": "qwen3",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3",
    "Phi 3": "phi",
    "Mistral v0.3": "mistral",
    "Ministral 3": "ministral3",
    "SmolLM 3": "smollm3",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "Granite 3": "granite3",
}
"""Family of chat formats -> family of models."""


@pytest.mark.parametrize("name", CHAT_FAMILIES)
def test_an_export_has_the_chat_template_and_the_special_tokens_of_its_folder(tmp_path, name):
    families = pytest.importorskip("tests.data.chat.families", reason="the templates are those of the package trl")
    folder, family = tmp_path / "folder", families.FAMILIES[name]
    families.write_folder(family, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    listed = config | {"pad_token": family.eos, "extra_special_tokens": list(family.special)}
    (folder / "tokenizer_config.json").write_text(json.dumps(listed))
    config = TokenizerConfig(backend="huggingface", path=str(folder))
    export = write_export(tmp_path / "export", CHAT_FAMILIES[name], config)
    own, exported = (transformers.AutoTokenizer.from_pretrained(path) for path in (folder, export))
    assert exported.chat_template == without_generation_tags(family.text)
    assert repr(exported.added_tokens_decoder) == repr(own.added_tokens_decoder)
    assert exported.special_tokens_map == own.special_tokens_map
    texts = [t.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True) for t in (own, exported)]
    assert own(texts[0]).input_ids == exported(texts[1]).input_ids


def test_chat_template_json_becomes_the_file_that_all_readers_know(configs, tmp_path):
    folder, _ = base_folder(configs, tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    exported = write_export(tmp_path / "export", "gemma3", TokenizerConfig(backend="huggingface", path=str(folder)))
    assert not (exported / "chat_template.json").exists()
    loaded = transformers.AutoTokenizer.from_pretrained(exported)
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


TAGGED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ '[' + m.content + ']' + eos_token }}{% endif %}{% endfor %}"
)
TURN = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def test_trained_merged_and_adapter_folders_have_tokenizer_model_and_a_template_without_tags(
    ranks, tiny, configs, tmp_path
):
    base, before = base_folder(configs, tmp_path)
    (base / "chat_template.jinja").write_text(TAGGED)
    talks = [{"messages": [{"role": "user", "content": f"Why {i}?"}, TURN[1]]} for i in range(200)]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    size = load_tokenizer(TokenizerConfig(backend="huggingface", path=str(base))).vocab_size
    argv = [*tiny, "--tokenizer.backend", "huggingface", "--tokenizer.path", str(base)]
    argv += ["--model.overrides.vocab_size", str(size), "--data.dataset", "chat", "--data.chat_template", str(base)]
    argv += ["--data.path", str(tmp_path / "talks.jsonl"), "--data.store_folder", str(tmp_path / "stores")]
    argv += ["--training.steps", "1", "--evaluation.interval_steps", "0"]
    full, adapter = tmp_path / "full", tmp_path / "adapter"
    ranks(1).run(train, combine([*argv, *in_folder(full)]))
    ranks(1).run(export_run, full, CheckpointConfig(export_huggingface=True))
    ranks(1).run(train, combine([*argv, *in_folder(adapter), "--checkpoint.init_from", str(full), "--lora.rank", "4"]))
    write_peft(Adapter.open(checkpoint_of(adapter), alone=True), tmp_path / "peft")
    write_huggingface(open_weights(checkpoint_of(adapter), alone=True), tmp_path / "merged", torch.float32)
    for folder in (full / "huggingface", tmp_path / "merged", tmp_path / "peft"):
        assert (folder / "tokenizer.model").read_bytes() == before["tokenizer.model"], folder
        assert "generation %}" not in (folder / "chat_template.jinja").read_text(), folder
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        assert loaded.apply_chat_template(TURN, tokenize=False) == "<s>[Why?]</s>So.</s>"


LIST = "tokenizer_config.json lists a chat_template that is not an object with name and template, so that it cannot be exported"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(
            (name, content, f"{name} of the tokenizer is not a JSON object, so that it cannot be exported")
            for name in ("chat_template.json", "tokenizer_config.json", "tokenizer.json")
            for content in (b"", b"{", b"[]", b"\xff")
        ),
        ("tokenizer_config.json", b'{"chat_template": ["x"]}', LIST),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', LIST),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": null}]}', LIST),
        ("chat_template.jinja", b"ok\xff", "chat_template.jinja is not UTF-8 text (byte 2)"),
    ],
)
def test_a_damaged_file_of_a_tokenizer_is_a_one_line_error_of_the_export(name, content, message):
    with pytest.raises(ConfigError) as error:
        exported_tokenizer({name: content}, MODELS["llama3"].huggingface)
    assert str(error.value) == message


@pytest.mark.parametrize("content", ["{}", '{"chat_template": null}', '{"chat_template": 1}'])
def test_a_file_without_a_template_is_not_exported(content):
    assert exported_tokenizer({"chat_template.json": content.encode()}, MODELS["llama3"].huggingface) == {}
