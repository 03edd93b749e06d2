"""Published-style templates of all families, and the shipped templates of the same turns: where their answers are."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the tokens are compared with those of transformers")
pytest.importorskip("trl", reason="the templates are those of the package trl")

from tests.data.chat.examples import DEFAULT
from tests.data.chat.families import FAMILIES, OTHERS, load, write_folder
from tests.data.chat.shapes import SHAPES, answer, turns, user
from tests.data.chat.test_corpus import AS_TEXT, EQUAL, Day, outcome
from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import TemplateFailure
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.prepare.encode import chat_format
from trainer.data.tokenizer.backends import load_tokenizer

REWRITING = {"Qwen 3", "Mistral v0.3", "Mistral Nemo", "OLMo 3", "OLMo 3 Think", "gpt-oss", "DeepSeek V3", "R1 Distill"}
"""Families whose template writes an earlier answer, or its prompt, otherwise than the last one."""
REWRITING_SHIPPED = {"qwen3", "olmo3"}
FEW = ("two turns", "white space around messages", "the name of a special token in an answer")


def tokenizer_of(folder: Path):
    return load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder)))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function that returns the folder of a family."""

    def folder(name: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"published {name}"
        if not path.exists():
            write_folder((FAMILIES | OTHERS)[name], path)
        return path

    return folder


@pytest.mark.parametrize("name", OTHERS)
def test_other_templates_of_the_families_give_the_tokens_of_transformers(name, tmp_path):
    loaded = load(name, tmp_path / "family")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.utils.chat_template_utils.datetime", Day)
        assert [outcome(loaded, SHAPES[shape]) for shape in FEW] == [EQUAL, EQUAL, AS_TEXT]


@pytest.mark.parametrize("name", FAMILIES | OTHERS)
def test_it_is_known_which_published_templates_write_an_earlier_answer_otherwise_than_the_last(name, folder_of):
    folder = folder_of(name)
    chat = load_chat_format(str(folder), tokenizer_of(folder))
    assert (chat.rewrites_turns, chat.has_generation_tags) == (name in REWRITING, name == "SmolLM 3")


SHIPPED = {
    "llama3.1": "Llama 3.1",
    "qwen2.5": "Qwen 2.5",
    "qwen3": "Qwen 3",
    "mistral-v0.3": "Mistral v0.3",
    "mistral-nemo": "Mistral Nemo",
    "ministral3": "Ministral 3",
    "smollm3": "SmolLM 3",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "granite3": "Granite 3",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "phi3": "Phi 3",
    "phi4": "Phi 4",
    "phi4-mini": "Phi 4 mini",
}
"""Shipped template -> family of the same turns."""


def test_all_shipped_templates_are_compared():
    assert {*SHIPPED, "llama2", "llama3", "chatml"} == {*BUILT_IN}


@pytest.mark.parametrize(("name", "own"), SHIPPED.items())
def test_a_shipped_template_has_the_tokens_and_targets_of_the_published_one(name, own, folder_of):
    folder = folder_of(own)
    tokenizer = tokenizer_of(folder)
    shipped, published = (
        chat_format(DataConfig(chat_template=name), tokenizer),
        load_chat_format(str(folder), tokenizer),
    )
    system = [] if own in ("Gemma 2", "Mistral v0.3", "Mistral Nemo") else [{"role": "system", "content": "Be brief."}]
    talk = [*system, user(" Why? "), answer("So."), user("Really?"), answer("Yes.\n")]
    assert shipped.encode(talk) == published.encode(talk)
    assert shipped.prompt(talk[:-1]) == published.prompt(talk[:-1])
    assert shipped.rewrites_turns == (name in REWRITING_SHIPPED)
    assert not shipped.has_generation_tags
    assert published.self_contained() == (folder / "chat_template.jinja").read_text(), (
        "exports have the folder's template"
    )


def test_a_prompt_that_opens_the_reasoning_is_no_target(folder_of, tmp_path):
    folder = folder_of("Qwen 3")
    tokenizer = tokenizer_of(folder)
    text = (folder / "chat_template.jinja").read_text()
    always = text.replace(
        "    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
        "    {{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
    )
    assert always != text
    chat = ChatFormat.compile(always, tokenizer)
    tokens, targets = chat.encode([user("Why?"), answer("So.", reasoning_content="Hm.")])
    prompt = chat.prompt([user("Why?")])
    assert tokens[: len(prompt)] == prompt
    assert targets == [False] * len(prompt) + [True] * (len(tokens) - len(prompt) - 1) + [False]
    assert (
        ChatFormat.compile(text, tokenizer).encode([user("Why?"), answer("So.", reasoning_content="Hm.")])[0] == tokens
    )


LLAMA3_ALWAYS = (  # as Llama 3 was first published
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)


def test_a_template_that_always_ends_with_the_header_of_an_answer_has_the_targets_of_its_family(folder_of):
    chat = ChatFormat.compile(LLAMA3_ALWAYS, tokenizer_of(folder_of("Llama 3")))
    (tokens, targets), _ = chat.encode_document(turns(user("?"), answer("One."), user("?"), answer("Two.")))
    marked = chat.tokenizer.decode([t for t, target in zip(tokens, targets, strict=True) if target])
    assert marked == "One.<|eot_id|>Two.<|eot_id|>"


def test_what_a_template_adds_to_an_answer_before_its_end_is_a_target(folder_of):
    folder = folder_of("Qwen 3")
    text = (folder / "chat_template.jinja").read_text()
    changed = text.replace(
        "{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"",
        "{{- '!' if 'x' in content }}{{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"",
    )
    assert changed != text
    chat = ChatFormat.compile(changed, tokenizer_of(folder))
    tokens, targets = chat.encode([user("Why?"), answer("x"), user("Why?"), answer("So.")])
    trained = chat.tokenizer.decode([t for t, target in zip(tokens, targets, strict=True) if target])
    assert trained == "x!<|im_end|><think>\n\n</think>\n\nSo.<|im_end|>"


def test_a_system_message_that_the_template_omits_is_refused_with_a_way_out(folder_of):
    folder = folder_of("Mistral v0.3")
    chat = load_chat_format(str(folder), tokenizer_of(folder))
    document = turns({"role": "system", "content": "Be brief."}, user("Why?"), answer("So."))
    with pytest.raises(TemplateFailure) as failure:
        chat.encode_document(document)
    assert str(failure.value) == (
        'the template does not write the content of message 1 (system); set data.chat_template = "mistral-v0.3", which writes '
        "system messages"
    )
    named = chat_format(DataConfig(chat_template="mistral-v0.3"), tokenizer_of(folder))
    text = named.tokenizer.decode(named.encode_document(document)[0][0])
    assert text == "<s>[INST] Be brief.\n\nWhy?[/INST] So.</s>"


def test_names_that_only_look_special_are_text_in_the_tokenizer_s_own_template(folder_of, tmp_path):
    folder = folder_of("OLMo 2")
    chat = load_chat_format(str(folder), tokenizer_of(folder))
    tokens, _ = chat.encode([user("Why?"), answer("So.")])
    assert (
        chat.tokenizer.encode("<|user|>\nWhy?\n<|assistant|>\n") == tokens[1 : -len(chat.tokenizer.encode("So.")) - 1]
    )
    copy = tmp_path / "copy.jinja"
    copy.write_text((folder / "chat_template.jinja").read_text() + "{# changed #}")
    with pytest.raises(ConfigError) as error:
        load_chat_format(str(copy), chat.tokenizer)
    assert error.value.message.startswith(
        "the template writes <|user|>, <|assistant|>, <|system|>, which the tokenizer does not have"
    )


def test_the_template_is_found_among_the_files_of_a_tokenizer(folder_of, tmp_path):
    folder = folder_of("Llama 2")
    text = (folder / "chat_template.jinja").read_text()
    for named in (text, [{"name": "default", "template": text}]):
        other = tmp_path / str(type(named))
        write_folder(OTHERS["Llama 2"], other)
        (other / "chat_template.jinja").unlink()
        config = json.loads((other / "tokenizer_config.json").read_text()) | {"chat_template": named}
        (other / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_chat_format(str(other), tokenizer_of(other)).self_contained() == text
    assert load_chat_format("llama3", DEFAULT).self_contained().startswith("{% set bos_token")
