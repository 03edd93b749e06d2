"""No field of a message and no part of a conversation disappears: the template uses it, or it is named or counted."""

import pytest

from tests.data.chat.examples import CHATML, DEFAULT, shown
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
    reason = (
        f"message 2 has the field {name}, which may change what is trained on, but which the template does not read; "
        "remove the field, or list it in data.ignored_fields"
    )
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


# ---------------------------------------------------------------- reasoning and template arguments


THINKING = (
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content and (all is defined or loop.last) %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_used_or_named(chat, name):
    reasoned = {"messages": [USER, ANSWER | {name: "because"}]}
    assert reason_of(reasoned, chat) == (
        f"message 2 has {name}, which the template does not read; remove the field, or list it in data.ignored_fields"
    )
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
