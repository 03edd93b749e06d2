"""Templates receive calls and contents in the variant that they write."""

import json

import pytest

from tests.data.chat.examples import CHATML, DEFAULT
from trainer.data.chat.fields import MalformedConversation
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.messages import content_text

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
OBJECT = {"x": "y", "n": [1, None], "\u00e9": {}}
TEXT = '{"x":  "y", "n": [1, null], "\u00e9": {}}'


def call(arguments, **fields) -> dict:
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    } | fields


def template(arguments: str, content: str = "{{ m.content }}") -> ChatFormat:
    """Return a format whose template writes the arguments of a call, or else the content, by the given expressions."""
    body = (
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}" + arguments + "{% else %}" + content + "{% endif %}"
    )
    source = (
        "{% for m in messages %}{{ m.role }}:"
        + body
        + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return ChatFormat.compile(source, DEFAULT)


def written(chat, *messages, **fields) -> str:
    (tokens, _), _ = chat.encode_document({"messages": list(messages)} | fields)
    return DEFAULT.decode(tokens)


# ---------------------------------------------------------------- arguments

AS_OBJECT = "{{ m.tool_calls[0].function.arguments | tojson }}"
ITEMS = "{% for k, v in m.tool_calls[0].function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}"
AS_TEXT = "{{ ':' + m.tool_calls[0].function.arguments }}"
PRINTED = "{{ m.tool_calls[0].function.arguments }}"


@pytest.mark.parametrize("arguments", [OBJECT, TEXT], ids=["object", "text"])
def test_a_template_receives_arguments_in_the_variant_that_it_writes(arguments):
    as_json = json.dumps(OBJECT, ensure_ascii=False)
    assert f"f{as_json}<|eot_id|>" in written(template(AS_OBJECT), USER, call(arguments))
    assert 'fx="y";n=[1, null];\u00e9={};<|eot_id|>' in written(template(ITEMS), USER, call(arguments))
    text = arguments if arguments is TEXT else as_json
    for source in (AS_TEXT, PRINTED):
        assert f"{text}<|eot_id|>" in written(template(source), USER, call(arguments))


@pytest.mark.parametrize("source", [AS_OBJECT, AS_TEXT, PRINTED])
@pytest.mark.parametrize("arguments", [None, {}, "", " ", "{}"])
def test_a_call_without_arguments_has_an_empty_object(source, arguments):
    assert "{}<|eot_id|>" in written(template(source), USER, call(arguments))
    message = call(arguments)
    del message["tool_calls"][0]["function"]["arguments"]
    assert "{}<|eot_id|>" in written(template(source), USER, message)


@pytest.mark.parametrize("absent", [None, [], "", {}])
def test_empty_calls_and_tools_are_absent(absent):
    source = "{% for m in messages %}{{ raise_exception('calls') if 'tool_calls' in m }}{{ m.content }}<|eot_id|>{% endfor %}"
    source += "{{ 'tools' if tools is not none }}{% if add_generation_prompt %}{% endif %}"
    document = {
        "messages": [USER, ANSWER | {"tool_calls": absent, "function_call": absent}],
        "tools": absent,
        "functions": absent,
    }
    (tokens, _), unused = ChatFormat.compile(source, DEFAULT).encode_document(document)
    assert (DEFAULT.decode(tokens), unused) == ("q<|eot_id|>a<|eot_id|>", ())


def test_the_content_of_a_call_is_absent_null_or_empty():
    for content, expected in (
        ("{{ m.content }}", "assistant:f{}<|eot_id|>"),
        ("{{ m['content'] if m['content'] is none else '<' + m['content'] }}", "assistant:Nonef{}<|eot_id|>"),
        ("{{ m['content'] + '!' }}", "assistant:!f{}<|eot_id|>"),
    ):
        body = content + "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}" + AS_OBJECT + "{% endif %}"
        source = "{% for m in messages %}{{ m.role }}:" + body + "<|eot_id|>{% endfor %}"
        chat = ChatFormat.compile(source + "{% if add_generation_prompt %}assistant:{% endif %}", DEFAULT)
        assert written(chat, USER, call({})).endswith(expected)


# ---------------------------------------------------------------- contents

PARTS = [{"type": "text", "text": " a "}, {"type": "text", "text": "b "}]
EACH_PART = "{% for p in m.content %}{{ p.text | trim }}{% endfor %}"
BY_PART = "{% if m.content is string %}{{ m.content | trim }}{% else %}" + EACH_PART + "{% endif %}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{ m.content }}", " a b "),
        ("{{ m.content | trim }}", "a b"),
        ("{{ '' + m.content }}", " a b "),
        ("{{ m.content if m.content is string }}", " a b "),
        (BY_PART, "ab"),
    ],
)
def test_a_template_receives_parts_if_it_writes_them(content, expected):
    assert f"user:{expected}<|eot_id|>" in written(template("", content), {"role": "user", "content": PARTS}, ANSWER)


@pytest.mark.parametrize("result", [{"sky": "rain", "t": 3}, [{"sky": "rain"}], ["rain"]])
def test_a_result_of_a_tool_may_be_any_json(result):
    talk = [USER, call({}), {"role": "tool", "content": result}, ANSWER]
    for content in (
        "{{ m.content }}",
        "{{ m.content if m.content is string else m.content | tojson }}",
        "{{ m.content + '' }}",
    ):
        assert f"tool:{json.dumps(result)}<|eot_id|>" in written(template(AS_OBJECT, content), *talk)
    with pytest.raises(MalformedConversation, match=r"^message 1 has"):
        written(load_chat_format("chatml", CHATML), USER | {"content": result}, ANSWER)


def test_the_text_of_a_content_is_that_of_its_parts():
    assert content_text({"content": PARTS}) == " a b "
    assert content_text({"content": {"x": "\u00e9"}}) == '{"x": "\u00e9"}'
