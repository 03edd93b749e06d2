import json

import pytest

from trainer.data.chat.conversations import (
    Conversation,
    MalformedConversation,
    PromptCompletion,
    content_text,
    parse_conversation,
)

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


def reason_of(document) -> str:
    with pytest.raises(MalformedConversation) as malformed:
        parse_conversation(document)
    return str(malformed.value)


def test_messages_keep_all_fields_that_a_template_may_use():
    system = {"role": "system", "content": "s", "name": None}
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = parse_conversation({"messages": [system, USER, ANSWER | {"reasoning_content": "r"}], "tools": tools})
    assert found == Conversation(
        ({"role": "system", "content": "s"}, USER, ANSWER | {"reasoning_content": "r"}),
        (False, False, True),
        ({"type": "function", "function": {"name": "f"}},),
    )


def test_sharegpt_data_is_read():
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert parse_conversation({"conversations": turns}) == Conversation(
        ({"role": "system", "content": "s"}, USER, ANSWER), (False, False, True)
    )


def test_a_prompt_and_its_completion_are_text_or_messages():
    assert parse_conversation({"prompt": "p", "completion": "c"}) == PromptCompletion("p", "c")
    assert parse_conversation({"prompt": "", "completion": "c"}) == PromptCompletion("", "c")
    found = parse_conversation({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]})
    assert found == Conversation((USER, ANSWER, USER, ANSWER), (False, False, False, True))


@pytest.mark.parametrize(
    "document",
    [
        {"question": "q", "answer": "a"},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a", "question": None},
        {"instruction": "", "input": "q", "output": "a"},
        {"question": "q", "answer": "a", "instruction": "", "output": ""},
        {"messages": SHAREGPT},
        {"conversations": [USER, ANSWER]},
        {"messages": json.dumps([USER, ANSWER]), "prompt": "", "answer": ""},
        {"messages": [json.dumps(USER), json.dumps(ANSWER)]},
        {"prompt": SHAREGPT[:1], "completion": SHAREGPT[1:]},
    ],
)
def test_all_layouts_of_a_question_and_its_answer_give_the_same_conversation(document):
    assert parse_conversation(document) == Conversation((USER, ANSWER), (False, True))


def test_the_input_continues_an_instruction():
    messages = parse_conversation({"instruction": "q", "input": "i", "output": "a", "system": "s"}).messages
    assert [message["content"] for message in messages] == ["s", "q\n\ni", "a"]


def test_a_prompt_that_repeats_a_message_is_no_second_conversation():
    for name, messages in (("messages", [USER, ANSWER]), ("conversations", SHAREGPT)):
        found = parse_conversation({"prompt": "q", name: messages})
        assert found == Conversation((USER, ANSWER), (False, True))
        assert reason_of({"prompt": "p", name: messages}).startswith(
            "the document has the field prompt, which may change"
        )


def test_the_text_of_a_content_is_that_of_its_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message, _) = parse_conversation({"messages": [{"role": "user", "content": parts}, ANSWER]}).messages
    assert message["content"] == parts and content_text(message) == "ab"


def test_a_tool_call_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    found = parse_conversation({"messages": [USER, call, {"role": "tool", "content": "1"}, ANSWER]})
    assert found.loss_mask == (False, True, False, True)
    assert "content" not in found.messages[1]


def test_answers_with_weight_zero_are_not_trained_on():
    found = parse_conversation({"messages": [USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}]})
    assert found == Conversation((USER, ANSWER, USER, ANSWER), (False, False, False, True))


def test_a_conversation_may_end_with_a_question():
    assert parse_conversation({"messages": [USER, ANSWER, USER]}).loss_mask == (False, True, False)


def turns(*messages):
    return {"messages": list(messages)}


NO_LAYOUT = (
    "are not those of a conversation: messages; conversations; prompt and completion; instruction, input and output; question "
    "and answer"
)
SUGGESTION = "data.columns names other fields, such as data.columns ="

MALFORMED = [
    ([1], 'the document is a list; a list of messages is written as {"messages": [...]}'),
    ("text", "the document is not a JSON object"),
    ({"text": "t"}, f'the document\'s fields (text) {NO_LAYOUT}; dataset = "jsonl", "parquet" or "csv" reads texts'),
    ({"messages": None}, f"the document's fields (none) {NO_LAYOUT}"),
    ({"id": 1, "mesages": []}, f'the document\'s fields (id) {NO_LAYOUT}; {SUGGESTION} {{ answer = "id" }}'),
    ({"mesages": [USER]}, f'the document\'s fields (mesages) {NO_LAYOUT}; {SUGGESTION} {{ messages = "mesages" }}'),
    (
        {"query": "q", "reply": "a", "id": 1},
        f'the document\'s fields (query, reply, id) {NO_LAYOUT}; {SUGGESTION} {{ question = "query", answer = "reply" }}',
    ),
    (
        {"instruction": "q", "context": "c", "response": "a"},
        f"the document's fields (instruction, context, response) {NO_LAYOUT}; {SUGGESTION} "
        '{ input = "context", output = "response" }',
    ),
    (
        {"prompt": None, "chosen": "c", "rejected": "r"},
        f'the document\'s fields (chosen, rejected) {NO_LAYOUT}; dataset = "preference" reads pairs',
    ),
    ({"question": "q", "answer": " "}, "message 2 is an empty answer"),
    ({"question": "q", "answer": ["a"]}, "the document's answer is not text"),
    ({"question": " ", "answer": "a"}, "the question is empty"),
    ({"instruction": "q", "input": 1, "output": "a"}, "the document's input is not text"),
    (
        {"question": "q", "answer": "a", "instruction": "i"},
        "the document has the field instruction, which may change what is trained on and is not supported here; remove the "
        "field, or list it in data.ignored_fields",
    ),
    ({"messages": "hi"}, "messages is not a list, nor the JSON text of one"),
    (
        {"messages": "[{'role': 'user'}]"},
        "messages is not a list, nor the JSON text of one (Python's notation is not JSON)",
    ),
    ({"messages": {"role": "user"}}, "messages is not a list"),
    ({"conversations": "hi"}, "conversations is not a list, nor the JSON text of one"),
    (turns(), "the conversation has no messages"),
    (turns("hi"), "message 1 is not an object, nor the JSON text of one"),
    (turns({"content": "hi"}), "message 1 has no role"),
    (
        turns(USER, {"role": "bot", "content": "a"}),
        "message 2 has the role 'bot'; expected one of system, user, assistant, tool",
    ),
    (
        turns({"role": ["user"], "content": "a"}),
        "message 1 has the role ['user']; expected one of system, user, assistant, tool",
    ),
    (turns({"role": "user"}, ANSWER), "message 1 has no content"),
    (turns({"role": "user", "content": None}, ANSWER), "message 1 has no content"),
    (
        turns({"role": "user", "content": 5}, ANSWER),
        "message 1 has content that is neither text nor a list of content parts",
    ),
    (
        turns({"role": "user", "content": [{"type": "image", "url": "u"}]}, ANSWER),
        "message 1 has a content part of type 'image'; only text is supported",
    ),
    (
        turns({"role": "user", "content": ["a"]}, ANSWER),
        "message 1 has a content part of type None; only text is supported",
    ),
    (turns({"role": "user", "content": [{"type": "text"}]}, ANSWER), "message 1 has a content part without text"),
    (turns(USER, {"role": "assistant", "content": " \n"}), "message 2 is an empty answer"),
    (turns(USER, {"role": "assistant", "content": []}), "message 2 is an empty answer"),
    (turns(USER, USER), "the conversation has no assistant message"),
    (
        turns({"role": "system", "content": "a"}, {"role": "system", "content": "b"}, ANSWER),
        "the conversation has 2 system messages; at most one is allowed",
    ),
    (
        turns(USER, {"role": "system", "content": "b"}, ANSWER),
        "message 2 is a system message; only the first message may be one",
    ),
    (turns(USER, ANSWER | {"weight": 0}), "the conversation has no assistant message to train on"),
    (turns(USER, ANSWER | {"weight": 0.5}), "message 2 has the weight 0.5; expected 0 or 1"),
    (
        turns(USER, {"role": "assistant", "tool_calls": "f"}),
        "message 2: tool_calls is not a list, nor the JSON text of one",
    ),
    (turns(USER, {"role": "assistant", "tool_calls": '"f"'}), "message 2: tool_calls is not a list"),
    (
        turns(USER | {"tool_calls": [{"name": "f"}]}, ANSWER),
        "message 1 has tool_calls, but only the assistant can call tools",
    ),
    (
        turns(USER, {"role": "assistant", "tool_calls": [{"function": {}}]}),
        "message 2 has a tool call without a function name",
    ),
    (turns(USER, {"role": "assistant", "tool_calls": []}), "message 2 has no content"),
    (turns(USER, ANSWER) | {"tools": {"name": "f"}}, "tools is not a list of objects"),
    (turns(USER, ANSWER) | {"tools": [1]}, "tools is not a list of objects"),
    (turns(USER, ANSWER) | {"tools": ["f"]}, "a tool is not an object, nor the JSON text of one"),
    (turns(USER, ANSWER) | {"tools": "f"}, "tools is not a list of objects, nor the JSON text of one"),
    (turns({"role": "user", "content": "\ud800"}, ANSWER), "the document contains a lone surrogate"),
    ({"conversations": ["hi"]}, "message 1 is not an object, nor the JSON text of one"),
    ({"conversations": [{"value": "hi"}]}, "message 1 has no from"),
    ({"conversations": [{"from": "human"}]}, "message 1 has no value"),
    (
        {"conversations": [{"from": ["human"], "value": "hi"}]},
        "message 1 is from ['human']; expected one of system, human, user, gpt, assistant, tool, observation",
    ),
    (
        {"conversations": [{"from": "narrator of a very long story, read at night", "value": "hi"}]},
        "message 1 is from 'narrator of a very long story, read ...; "
        "expected one of system, human, user, gpt, assistant, tool, observation",
    ),
    ({"completion": "c"}, "the document has a completion but no prompt"),
    ({"prompt": "p"}, "the document has a prompt but no completion"),
    (
        {"prompt": "p", "response": "r", "id": 1},
        "the document has a prompt but no completion; its fields: prompt, response, id; data.columns names other fields, such as "
        'data.columns = { completion = "response" }',
    ),
    (
        turns({"speaker": "user", "text": "q"}),
        "message 1 has no role; its fields: speaker, text; data.columns names other fields, such as "
        'data.columns = { role = "speaker", content = "text" }',
    ),
    (
        turns({"role": "User", "content": "q"}),
        "message 1 has the role 'User'; expected one of system, user, assistant, tool; did you mean 'user'?",
    ),
    *(({"prompt": "p", "completion": blank}, "the completion is empty") for blank in ("", " ", "\n\t", "\u2003")),
    ({"prompt": "p", "completion": [ANSWER]}, "prompt and completion are neither both text nor both lists of messages"),
    ({"prompt": 1, "completion": 2}, "prompt and completion are neither both text nor both lists of messages"),
    ({"prompt": [USER, ANSWER], "completion": [USER]}, "the conversation has no assistant message to train on"),
]


@pytest.mark.parametrize(("document", "reason"), MALFORMED, ids=[reason for _, reason in MALFORMED])
def test_a_malformed_conversation_yields_its_reason(document, reason):
    assert reason_of(document) == reason
