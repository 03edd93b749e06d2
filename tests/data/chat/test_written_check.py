"""No field of a message and no part of a conversation disappears: the template uses it, or it is named or counted."""

import json

import pytest

from tests.data.chat.examples import CHATML, DEFAULT, shown
from trainer.data.chat.fields import WAY_OUT
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import TemplateFailure

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TALK = {"messages": [USER, ANSWER]}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}


def reason_of(document, chat) -> str:
    with pytest.raises(TemplateFailure) as failure:
        chat.encode_document(document)
    return str(failure.value)


@pytest.fixture(scope="module")
def chat():
    return load_chat_format("chatml", CHATML)


@pytest.mark.parametrize("name", ["mask", "loss_weight", "image", "reasoning_details", "refusal", "tools", "trainable"])
def test_a_field_of_a_message_that_the_template_does_not_read_is_named(chat, name):
    reason = f"message 2 has the field {name}, which may change what is trained on and is not used by the template; {WAY_OUT}"
    assert reason_of({"messages": [USER, ANSWER | {name: "x"}]}, chat) == reason
    turns = [SHAREGPT["conversations"][0], SHAREGPT["conversations"][1] | {name: "x"}]
    assert reason_of({"conversations": turns}, chat) == reason
    chat.encode_document({"messages": [USER, ANSWER | {name: None}]})


def test_a_field_of_a_message_that_the_template_reads_is_used():
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.image }}<|eot_id|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant{% endif %}"
    encoded, unused = ChatFormat.compile(template, DEFAULT).encode_document(
        {"messages": [USER | {"image": "i"}, ANSWER], "id": 1}
    )
    assert DEFAULT.decode(encoded[0]) == "userqi<|eot_id|>assistanta<|eot_id|>"
    assert unused == ("id",)
    compared = template.replace("{{ m.image }}", "{{ 'I' if m.image }}")
    encoded, _ = ChatFormat.compile(compared, DEFAULT).encode_document({"messages": [USER | {"image": "i"}, ANSWER]})
    assert DEFAULT.decode(encoded[0]).startswith("userqI")


def test_unused_fields_of_messages_are_listed_with_those_of_the_document(chat):
    document = {"messages": [USER | {"name": "n"}, ANSWER | {"timestamp": 5, "id": None}], "source": "web"}
    assert chat.encode_document(document)[1] == ("name", "source", "timestamp")


@pytest.mark.parametrize(
    ("field", "owner"),
    [
        ({"ignored": True}, "message 2"),
        ({"approved": False}, "message 2"),
        ({"ok": "yes"}, "message 2"),
        ({"critique": "too long"}, "message 2"),
        ({"spans": [[0, 1]]}, "message 2"),
        ({"gold": {"a": 1}}, "message 2"),
    ],
)
def test_a_flag_a_text_or_a_list_in_a_message_needs_the_user(chat, field, owner):
    (name,) = field
    assert reason_of({"messages": [USER, ANSWER | field]}, chat) == (
        f"{owner} has the field {name}, which may change what is trained on and is not used by the template; {WAY_OUT}"
    )
    ignoring = load_chat_format("chatml", CHATML, ignored_fields=[name])
    assert ignoring.encode_document({"messages": [USER, ANSWER | field]}) == (chat.encode_document(TALK)[0], (name,))


@pytest.mark.parametrize("values", [(1, 2), (0.5, None), ("good", "bad")])
def test_an_unused_field_that_distinguishes_the_answers_needs_the_user(chat, values):
    def talk(name):
        return {"messages": [message for value in values for message in (USER, ANSWER | {name: value})]}

    for name in ("quality", "score", "n"):
        assert reason_of(talk(name), chat) == (
            f"the answers have different values of the field {name}, which may change what is trained on and is not used by the "
            f"template; {WAY_OUT}"
        )
    for name in ("id", "message_id", "createdAt", "timestamp"):
        assert chat.encode_document(talk(name))[1] == (name,)


CALLING = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"x": "y"}}}]}


def test_the_fields_of_parts_calls_and_functions_are_used_counted_or_named():
    chat = load_chat_format("chatml", CHATML)

    def talk(call, function, part=None):
        question = USER if part is None else USER | {"content": [{"type": "text", "text": "q"} | part]}
        calls = [
            {"id": "c1", "type": "function"} | call | {"function": CALLING["tool_calls"][0]["function"] | function}
        ]
        return {"messages": [question, {"role": "assistant", "tool_calls": calls}]}

    encoded, unused = chat.encode_document(talk({"index": 0}, {"version": 2}, {"cache_control": {"type": "ephemeral"}}))
    assert encoded == chat.encode_document(talk({}, {}))[0]
    assert unused == ("content.cache_control", "tool_calls.function.version", "tool_calls.id", "tool_calls.index")
    for name, value in {
        "reasoning": "because",
        "weight": 0,
        "hidden": True,
        "result": [1],
        "thought_signature": "a b",
    }.items():
        reason = f"which may change what is trained on and is not used by the template; {WAY_OUT}"
        for document in (talk({name: value}, {}), talk({}, {name: value})):
            assert reason_of(document, chat) == f"a tool call of message 2 has the field {name}, {reason}"
        ignoring = load_chat_format("chatml", CHATML, ignored_fields=[name])
        part = talk({}, {}, {name: value})
        calls = json.dumps(talk({name: value}, {name: value})["messages"][1]["tool_calls"])
        as_text = {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}
        for document in (talk({name: value}, {}), talk({}, {name: value}), part, as_text):
            assert ignoring.encode_document(document) == (encoded, tuple(sorted((name, "tool_calls.id"))))
    writes_id = loop(
        "{{ m.content or m.tool_calls[0].id ~ m.tool_calls[0].function.name ~ m.tool_calls[0].function.arguments }}"
    )
    assert ChatFormat.compile(writes_id, DEFAULT).encode_document(talk({}, {}))[1] == ()


PROPERTIES = "{% set properties = tools[0].function.parameters.properties if tools %}"


def test_what_a_template_omits_of_a_tool_is_named_or_counted():
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "a place", "format": "name"}},
    }
    tools = [{"type": "function", "function": {"name": "weather", "description": "the sky", "parameters": parameters}}]
    complete = "{{ tools | tojson if tools }}" + loop("{{ m.content }}")
    assert ChatFormat.compile(complete, DEFAULT).encode_document(TALK | {"tools": tools})[1] == ()
    for part, omitted in (
        ("tools[0].function.name", "the sky"),
        ("tools[0].function.name ~ tools[0].function.description", "city"),
        ("tools[0].function.name ~ tools[0].function.description ~ (properties | first)", "a place"),
    ):
        chat = ChatFormat.compile(PROPERTIES + f"{{{{ {part} if tools }}}}" + loop("{{ m.content }}"), DEFAULT)
        reason = f"the template does not write {omitted!r} of the description of tool 1"
        assert reason_of(TALK | {"tools": tools}, chat) == reason
    parts = f"{part} ~ properties.city.description"
    chat = ChatFormat.compile(PROPERTIES + f"{{{{ {parts} if tools }}}}" + loop("{{ m.content }}"), DEFAULT)
    assert chat.encode_document(TALK | {"tools": tools})[1] == ("tools.format",)


# ---------------------------------------------------------------- reasoning and template arguments


THINKING = (
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content and (all is defined or loop.last) %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_used_or_named(chat, name):
    reasoned = {"messages": [USER, ANSWER | {name: "because"}]}
    assert reason_of(reasoned, chat) == (f"message 2 has {name}, which the template does not read; {WAY_OUT}")
    encoded, unused = ChatFormat.compile(THINKING, DEFAULT).encode_document(reasoned)
    assert "".join(shown(encoded)).replace("+", "") == "userq<|eot_id|>assistant(because)a<|eot_id|>"
    assert unused == ()
    chat.encode_document({"messages": [USER, ANSWER | {name: None}]})


def test_an_answer_without_its_reasoning_is_context():
    marked = THINKING.replace("{{ m.role }}", "{{ m.role }}{% if m.role == 'assistant' %}{% generation %}").replace(
        "<|eot_id|>", "<|eot_id|>{% endgeneration %}{% else %}{{ m.content }}<|eot_id|>{% endif %}"
    )
    chat = ChatFormat.compile(marked, DEFAULT)
    talk = [USER, ANSWER | {"reasoning_content": "because"}, USER, ANSWER]
    encoded, unused = chat.encode_document({"messages": talk})
    assert DEFAULT.decode(encoded[0]) == "userq<|eot_id|>assistanta<|eot_id|>" * 2
    assert "".join(shown(encoded)).endswith("assistanta<|eot_id|>userq<|eot_id|>assistant+a+<|eot_id|>")
    assert unused == ("reasoning of earlier answers (context only)",)
    talk[-1] = ANSWER | {"weight": 0}
    assert reason_of({"messages": talk}, chat) == (
        "the template omits reasoning_content of message 2, an answer to train on; give the answer the weight 0, or end the "
        "conversation with it"
    )


def test_arguments_of_the_template_are_used_or_named():
    chat = ChatFormat.compile(THINKING, DEFAULT)
    reasoned = [USER, ANSWER | {"reasoning": "r"}]
    document = {"messages": [*reasoned, *reasoned], "chat_template_kwargs": {"all": True, "date": None}}
    (tokens, _), _ = chat.encode_document(document)
    assert DEFAULT.decode(tokens) == "userq<|eot_id|>assistant(r)a<|eot_id|>" * 2
    for name in ("enable_thinking", "messages", "bos_token"):
        assert reason_of(document | {"chat_template_kwargs": {name: "x"}}, chat) == (
            f"chat_template_kwargs sets {name}, which is no variable that the template reads"
        )


# ---------------------------------------------------------------- parts that a template does not write


def loop(body: str) -> str:
    return (
        "{% for m in messages %}{{ m.role }}"
        + body
        + "<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
    )


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "y"}}}]}


@pytest.mark.parametrize(
    ("body", "messages", "reason"),
    [
        ("{{ m.content }}", [USER, CALL, ANSWER], "the template does not write the tool calls of message 2"),
        (
            "{{ m.content or m.tool_calls[0].function.name }}",
            [USER, CALL, ANSWER],
            "the template does not write the tool calls of message 2",
        ),
        (
            "{{ m.content if m.role != 'tool' }}",
            [USER, {"role": "tool", "content": "t"}, ANSWER],
            "the template does not write the content of message 2 (tool)",
        ),
        (
            "{{ m.content if m.role != 'system' }}",
            [SYSTEM, USER, ANSWER],
            "the template does not write the content of message 1 (system)",
        ),
        (
            "{{ m.content.split('#')[-1] }}",
            [USER, {"role": "assistant", "content": "thoughts # a"}],
            "the template omits a part of message 2, an answer to train on",
        ),
        (
            "{{ m.content[:10] }}",
            [USER, {"role": "assistant", "content": "abcd efgh ijkl"}],
            "the template omits a part of message 2, an answer to train on",
        ),
    ],
)
def test_a_part_that_the_template_does_not_write_is_named(body, messages, reason):
    assert reason_of({"messages": messages}, ChatFormat.compile(loop(body), DEFAULT)) == reason


def test_text_that_is_written_in_another_way_is_complete():
    answer = {"role": "assistant", "content": "<think>\nr\n</think>\n a "}
    for body, written in [
        ("{{ m.content | tojson }}", '"<think>\\nr\\n</think>\\n a "'),
        ("{{ m.content | indent }}", "<think>\n    r\n    </think>\n     a "),
        ("{{ m.content | trim }}", "<think>\nr\n</think>\n a"),
        ("{{ m.content.split('</think>') | join('[/T]') | replace('<think>', '[T]') }}", "[T]\nr\n[/T]\n a "),
    ]:
        tokens, targets = ChatFormat.compile(loop(body), DEFAULT).encode([USER, answer])
        target = DEFAULT.decode([t for t, is_target in zip(tokens, targets, strict=True) if is_target])
        assert target == f"{written}<|eot_id|>"


def test_tools_that_the_template_does_not_write_are_named():
    template = loop("{{ m.content }}")
    for source in (
        template,
        "{{ 'tools:' if tools }}" + template,
        "{% if tools and false %}{{ tools }}{% endif %}" + template,
    ):
        assert (
            reason_of(TALK | {"tools": [{"name": "f"}]}, ChatFormat.compile(source, DEFAULT))
            == "the template does not support tools"
        )
