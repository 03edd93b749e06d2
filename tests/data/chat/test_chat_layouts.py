"""What is read from a document: messages and which of them are trained on, texts, or the reason why it is refused."""

import json
from typing import Any

import pytest

from trainer.data.chat.chat_layouts import CHATS, PAIRS, read_document
from trainer.data.chat.conversations import Conversation, read_conversation
from trainer.data.chat.fields import MalformedConversation

S, Q, A, B = (
    {"role": role, "content": text}
    for role, text in (("system", "s"), ("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
OTHER_Q = Q | {"content": "another"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
CALL_OF_TEXT = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
}
TOOL = {"name": "f"}


def read(layouts: Any, document: Any) -> list[Conversation | tuple[str, str]]:
    """Return the conversation, or the prompt and the completion, of each answer."""
    found = read_document(document, layouts)
    return [(f.prompt, f.answer) if isinstance(f.prompt, str) else read_conversation(f) for f in found]


def reason_of(layouts: Any, document: Any) -> str:
    with pytest.raises(MalformedConversation) as malformed:
        read(layouts, document)
    return str(malformed.value)


def turns(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def talk(mask: str, *messages: Any, **others: Any) -> Conversation:
    """Return a conversation. mask: one character per message, + for a target."""
    return Conversation(messages, tuple(mark == "+" for mark in mask), **others)


def pair(chosen: Any, rejected: Any, **fields: Any) -> dict[str, Any]:
    return {"chosen": chosen, "rejected": rejected, **fields}


# ---------------------------------------------------------------- documents, and what is read from them

NO_PROMPT = "chosen and rejected are texts, but the document has no prompt, which is what both answer"


def hh(*messages) -> str:
    """Return the text of messages in the format of Anthropic's dataset hh-rlhf."""
    names = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{names[message['role']]}: {message['content']}" for message in messages)


QA = [talk("-+", Q, A)]
SQA = [talk("--+", S, Q, A)]
QAQA = [talk("---+", Q, A, Q, A)]
TEXTS = [("p", "c")]
QA_QB = [talk("-+", Q, A), talk("-+", Q, B)]
TWO_TEXTS = [("p", "c"), ("p", "r")]
NOT_A_CHAT = (
    "the document has none of the layouts of a conversation (messages; conversations; prompt and completion; instruction, input "
    "and output; question and answer)"
)
NOT_A_PAIR = (
    "the document has none of the layouts of a preference pair (prompt, chosen and rejected; instruction, input, chosen and "
    "rejected; question, chosen and rejected; conversations, chosen and rejected; chosen and rejected)"
)
FIELD = "remove it, read it under another name by data.columns, or list it in data.ignored_fields"
ROLES = "system, user, human, assistant, gpt, bot, model, tool, observation, function"
SUGGESTION = "data.columns names other fields, such as data.columns ="
WAY_OUT = (
    "which may change what is trained on and is not supported here; remove it, read it under another name by data.columns, or "
    "list it in data.ignored_fields"
)
FIRST_DIFFER = "the first messages of chosen and rejected differ, so the two prompts differ"
DIFFER = "the chosen answer begins with a user message, so the two prompts differ"
NO_KIND = "prompt and {} are neither both text nor both lists of messages"


def reply(**fields: Any) -> dict[str, Any]:
    """Return a conversation whose answer has the given fields only."""
    return turns(Q, {"role": "assistant", **fields})


def asked(content: Any) -> dict[str, Any]:
    return turns({"role": "user", "content": content}, A)


def calling(arguments: Any) -> dict[str, Any]:
    return reply(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


JSON_TEXTS = {
    "message 2: the text of a call's arguments": calling,
    "message 2: a tool call": lambda text: reply(tool_calls=[text]),
    "message 2: function_call": lambda text: reply(function_call=text),
    "tools": lambda text: turns(Q, A, tools=f"[{text}]"),
    "a tool": lambda text: turns(Q, A, tools=[text]),
    "messages": lambda text: {"messages": f"[{text}]"},
    "message 2": lambda text: turns(Q, text),
}
"""Label in a message -> document with a JSON text there."""
CHAT_ROWS = [
    # messages, also as JSON text, also in ShareGPT's format
    (turns(Q, A), QA),
    (turns(S, Q, A), SQA),
    ({"messages": json.dumps([Q, A]), "prompt": "", "answer": ""}, QA),
    (turns(json.dumps(Q), json.dumps(A)), QA),
    (turns(*SHAREGPT), QA),
    *((turns(Q | {"role": "human"}, A | {"role": role}), QA) for role in ("gpt", "bot", "model")),
    ({"messages": [], "conversations": SHAREGPT}, QA),
    ({"conversations": {}, "prompt": [Q], "completion": [A], "messages": "", "chosen": []}, QA),
    ({"conversations": SHAREGPT}, QA),
    ({"conversations": [Q, A]}, QA),
    ({"conversations": [{"from": "system", "value": "s"}, *SHAREGPT]}, SQA),
    (turns(Q, A, Q), [talk("-+-", Q, A, Q)]),
    (turns(S | {"name": None}, Q, A | {"reasoning_content": "r"}), [talk("--+", S, Q, A | {"reasoning_content": "r"})]),
    # a prompt and its completion
    ({"prompt": "p", "completion": "c"}, TEXTS),
    ({"prompt": "", "completion": "c"}, [("", "c")]),
    ({"messages": "", "prompt": "p", "completion": "c", "question": ""}, TEXTS),
    ({"prompt": SHAREGPT[:1], "completion": SHAREGPT[1:]}, QA),
    ({"prompt": [Q, A, Q], "completion": [A]}, QAQA),
    # a question and its answer
    ({"question": "q", "answer": "a"}, QA),
    ({"question": "q", "answer": "a", "instruction": "", "output": ""}, QA),
    ({"question": "q", "answer": "a", "prompt": "", "completion": ""}, QA),
    ({"instruction": "q", "output": "a"}, QA),
    ({"instruction": "q", "input": "", "output": "a", "question": None}, QA),
    ({"instruction": "", "input": "q", "output": "a"}, QA),
    ({"instruction": "i", "input": "q", "output": "a", "system": "s"}, [talk("--+", S, Q | {"content": "i\n\nq"}, A)]),
    # a prompt that repeats the text of a message
    (turns(Q, A, prompt="q"), QA),
    ({"conversations": SHAREGPT, "prompt": "q"}, QA),
    # a system text beside the messages
    *((document | {"system": "s"}, SQA) for document in (turns(Q, A), {"conversations": SHAREGPT})),
    ({"prompt": [Q], "completion": [A], "system": "s"}, SQA),
    (turns(S, Q, A, system="s"), SQA),
    *((document | {"system": ""}, QA) for document in (turns(Q, A), {"conversations": SHAREGPT})),
    ({"prompt": [Q], "completion": [A], "system": ""}, QA),
    # second texts and lists beside the messages, under any name
    *(
        (
            document | {name: value},
            f"the document has the field {name}, {WAY_OUT}",
        )
        for document in (turns(Q, A), {"question": "q", "answer": "a"}, {"prompt": "p", "completion": "c"})
        for name, value in {
            "system_instruction": "brief",
            "available_functions": [TOOL],
            "choices": ["A", "B"],
            "persona": "You are terse.",
            "\u7cfb\u7edf": "\u7b80\u6d01",
            "facts": {"sky": "blue"},
            "include": False,
            "is_correct": "False",
            "source": "a document " * 100,
            "target": False,
            "ignored": True,
        }.items()
    ),
    # tools, variables of the template
    (turns(Q, A, tools=[TOOL]), [talk("-+", Q, A, tools=(TOOL,))]),
    (turns(Q, A, tools='[{"name": "f"}]'), [talk("-+", Q, A, tools=(TOOL,))]),
    (turns(Q, A, tools=['{"name": "f"}']), [talk("-+", Q, A, tools=(TOOL,))]),
    (turns(Q, A, functions=[TOOL]), [talk("-+", Q, A, tools=({"type": "function", "function": TOOL},))]),
    (turns(Q, A, chat_template_kwargs={"x": 1, "y": None}), [talk("-+", Q, A, arguments={"x": 1})]),
    # answers that are not trained on
    *(
        (document, QAQA)
        for given in ({"weight": 0}, {"train": False}, {"weight": 0, "train": False}, {"weight": False})
        for document in (
            turns(Q, A | given, Q, A | {"weight": 1}),
            {"conversations": [SHAREGPT[0], SHAREGPT[1] | given, *SHAREGPT]},
            {"prompt": [Q], "completion": [A | given, Q, A]},
        )
    ),
    # calls: without content; as JSON text; OpenAI's earlier format
    (
        turns(Q, CALL | {"content": None}, {"role": "tool", "content": "1"}, A),
        [talk("-+-+", Q, CALL, {"role": "tool", "content": "1"}, A)],
    ),
    (turns(Q, CALL | {"tool_calls": json.dumps(CALL["tool_calls"])}), [talk("-+", Q, CALL)]),
    (turns(Q, CALL | {"tool_calls": [json.dumps(CALL["tool_calls"][0])]}), [talk("-+", Q, CALL)]),
    (
        turns(Q, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}),
        [talk("-+", Q, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]})],
    ),
    (
        turns(
            Q,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
            {"role": "function", "name": "f", "content": "r"},
            A,
        ),
        [talk("-+-+", Q, CALL_OF_TEXT, {"role": "tool", "name": "f", "content": "r"}, A)],
    ),
    *(
        (turns(Q, A | {"tool_calls": none, "function_call": none}, tools=none, functions=none), QA)
        for none in (None, [], "", {})
    ),
    # no document, no layout
    ([1], 'the document is a list; a list of messages is written as {"messages": [...]}'),
    ("text", "the document is not a JSON object"),
    (asked("\ud800"), "the document contains a lone surrogate"),
    ({"text": "t"}, f'{NOT_A_CHAT}; its fields: text; dataset = "jsonl", "parquet" or "csv" reads texts'),
    ({"messages": None}, NOT_A_CHAT),
    ({"id": 1, "mesages": []}, f'{NOT_A_CHAT}; its fields: id; {SUGGESTION} {{ messages = "id" }}'),
    ({"mesages": [Q]}, f'{NOT_A_CHAT}; its fields: mesages; {SUGGESTION} {{ messages = "mesages" }}'),
    (
        {"query": "q", "reply": "a", "id": 1},
        f'{NOT_A_CHAT}; its fields: query, reply, id; {SUGGESTION} {{ question = "query", answer = "reply" }}',
    ),
    (
        {"prompt": None, "chosen": "c", "rejected": "r"},
        f'{NOT_A_CHAT}; its fields: chosen, rejected; dataset = "preference" reads pairs',
    ),
    (
        {"question": "q", "chosen": "c", "rejected": "r"},
        f'{NOT_A_CHAT}; its fields: question, chosen, rejected; dataset = "preference" reads pairs',
    ),
    # a part of a layout
    (
        {"instruction": "q", "context": "c", "response": "a"},
        "the document has no field output; its fields: instruction, context, response; "
        f'{SUGGESTION} {{ output = "response", input = "context" }}',
    ),
    (
        {"input": "q", "output": "a"},
        f'the document has no field instruction; its fields: input, output; {SUGGESTION} {{ instruction = "input" }}',
    ),
    ({"completion": "c"}, "the document has no field prompt; its fields: completion"),
    ({"prompt": "p"}, "the document has no field completion; its fields: prompt"),
    (
        {"prompt": "p", "response": "r", "id": 1},
        f'the document has no field completion; its fields: prompt, response, id; {SUGGESTION} {{ completion = "response" }}',
    ),
    # texts
    *(({"question": "q", "answer": blank}, "the document's field answer is empty") for blank in ("", " ")),
    ({"question": "q", "answer": ["a"]}, "the document's field answer is not text"),
    *(({"question": blank, "answer": "a"}, "the document's field question is empty") for blank in ("", " ")),
    ({"instruction": "q", "input": 1, "output": "a"}, "the document's field input is not text"),
    *(
        ({"prompt": "p", "completion": blank}, "the document's field completion is empty")
        for blank in ("", " ", "\n\t", "\u2003")
    ),
    *(
        ({"prompt": prompt, "completion": completion}, NO_KIND.format("completion"))
        for prompt, completion in (("p", [A]), ([Q], "a"), ("p", A), (1, 2))
    ),
    # messages as JSON text
    *(
        (document | {name: text}, f"{name} is not the JSON text of messages (Python's notation is not JSON)")
        for document, name in (({"prompt": "p"}, "completion"), ({"completion": "c"}, "prompt"))
        for text in ("[{'role': 'user', 'content': 'q'}]", " {'from': 'human'}")
    ),
    (
        {"prompt": "p", "completion": '[{"role": "user", "role": "user"}]'},
        "completion: an object has two fields named 'role'",
    ),
    ({"prompt": "p", "completion": json.dumps([A])}, NO_KIND.format("completion")),
    (
        turns({"role": "user", "content": "q", "from": "human"}, A),
        'message 1 has both from and role; data.ignored_fields = ["from"] would leave role',
    ),
    # lists of messages
    ({"messages": "hi"}, "messages is not a list, nor the JSON text of one"),
    (
        {"messages": "[{'role': 'user'}]"},
        "messages is not a list, nor the JSON text of one (Python's notation is not JSON)",
    ),
    ({"messages": {"role": "user"}}, "messages is not a list"),
    ({"conversations": "hi"}, "conversations is not a list, nor the JSON text of one"),
    (turns(), "the document's field messages is empty"),
    (turns(Q, Q), "the conversation has no assistant message"),
    (turns(S, S | {"content": "t"}, A), "the conversation has 2 system messages; at most one is allowed"),
    (turns(Q, S, A), "message 2 is a system message; only the first message may be one"),
    (turns(Q, A | {"weight": 0}), "the conversation has no assistant message to train on"),
    ({"prompt": [Q, A], "completion": [Q]}, "the conversation has no assistant message to train on"),
    # messages
    (turns("hi"), "message 1 is not an object, nor the JSON text of one"),
    (turns(5), "message 1 is not an object"),
    (turns({"content": "hi"}), "message 1 has no role; its fields: content"),
    (
        turns({"speaker": "user", "text": "q"}),
        f'message 1 has no role; its fields: speaker, text; {SUGGESTION} {{ role = "speaker", content = "text" }}',
    ),
    (
        turns(Q | {"role": ["user"]}),
        f"message 1 has the role ['user']; expected one of {ROLES}",
    ),
    (
        turns(Q | {"role": "User"}),
        f"message 1 has the role 'User'; expected one of {ROLES}; did you mean 'user'?",
    ),
    (turns({"role": "user"}, A), "message 1 has no content; its fields: role"),
    (asked(None), "message 1 has no content; its fields: role"),
    (reply(content=" \n"), "message 2 is an empty answer"),
    (reply(content=[]), "message 2 is an empty answer"),
    (reply(content="a", reasoning_content=["r"]), "message 2: reasoning_content is not text"),
    *(
        (
            reply(content="a", **{one: "r", other: "s"}),
            f"message 2 has different reasonings in {one} and {other}; {FIELD}",
        )
        for one, other in (
            ("reasoning_content", "thinking"),
            ("thinking", "reasoning"),
            ("reasoning_content", "reasoning"),
        )
    ),
    *(
        (turns(*messages), f"message {i} has {name}, but only answers have reasoning; {FIELD}")
        for name in ("reasoning_content", "thinking", "reasoning")
        for i, messages in (
            (1, (S | {name: "r"}, Q, A)),
            (1, (Q | {name: "r"}, A)),
            (3, (Q, CALL, {"role": "tool", "content": "1", name: "r"}, A)),
        )
    ),
    (reply(content="a", weight=0.5), "message 2 has the weight 0.5; expected 0 or 1"),
    (reply(content="a", weight="0"), "message 2 has the weight '0'; expected 0 or 1"),
    (reply(content="a", train=1), "message 2 has train = 1; expected true or false"),
    (reply(content="a", train="no"), "message 2 has train = 'no'; expected true or false"),
    (reply(content="a", weight=1, train=False), "message 2 has the weight 1 and train = False"),
    (turns(Q, Q | {"train": True}, A), "message 2 has train = true, but only answers can be trained on"),
    # JSON text inside JSON has the rules of JSON lines
    *(
        (document(text), f"{label}: an object has two fields named 'x'")
        for text in ('{"x": 1, "x": 2}', '{"a": [{"x": 1, "x": 1}]}')
        for label, document in JSON_TEXTS.items()
    ),
    *(
        (document(text), f"{label} contains NaN or an infinite number, which JSON does not have")
        for text in ('{"x": NaN}', '{"x": [-Infinity]}', '{"x": 1e999}')
        for label, document in JSON_TEXTS.items()
    ),
    *(
        (document(text), f"{label} contains a lone surrogate")
        for text in (r'{"x": "\ud800"}', r'{"\udfff": 1}')
        for label, document in JSON_TEXTS.items()
    ),
    *(
        (document, f"{label} contains NaN or an infinite number, which JSON does not have")
        for label, document in (
            ("message 2", calling({"x": float("nan")})),
            ("message 2", turns(Q, {"role": "tool", "content": {"x": float("inf")}}, A)),
            ("tools", turns(Q, A, tools=[TOOL | {"x": float("nan")}])),
            ("chat_template_kwargs", turns(Q, A, chat_template_kwargs={"x": float("nan")})),
        )
    ),
    # messages in ShareGPT's format
    ({"conversations": ["hi"]}, "message 1 is not an object, nor the JSON text of one"),
    ({"conversations": [{"value": "hi"}]}, "message 1 has no from; its fields: value"),
    ({"conversations": [{"from": "human"}]}, "message 1 has no value; its fields: from"),
    (
        {"conversations": [SHAREGPT[0] | {"role": "user"}]},
        'message 1 has both from and role; data.ignored_fields = ["from"] would leave role',
    ),
    (
        {"conversations": [SHAREGPT[0] | {"content": "q"}]},
        'message 1 has both value and content; data.ignored_fields = ["value"] would leave content',
    ),
    (
        {"conversations": [{"from": ["human"], "value": "hi"}]},
        f"message 1 is from ['human']; expected one of {ROLES}",
    ),
    (
        {"conversations": [{"from": "narrator of a very long story, read at night", "value": "hi"}]},
        f"message 1 is from 'narrator of a very long story, read ...; expected one of {ROLES}",
    ),
    # contents and their parts
    *(
        (asked(content), "message 1 has content that is neither text nor a list of content parts")
        for content in (5, {"sky": "rain"})
    ),
    (asked([{"type": "image", "url": "u"}]), "message 1 has a content part of type 'image'; only text is supported"),
    (asked(["a"]), "message 1 has a content part of type None; only text is supported"),
    (asked([{"type": "text"}]), "message 1 has a content part without text"),
    *(
        (asked([{"type": "text", "text": "q"} | field]), f"a content part of message 1 has the field {name}, {WAY_OUT}")
        for field in (
            {"weight": 0},
            {"train": False},
            {"image_url": {"url": "u"}},
            {"hidden": True},
            {"annotations": [{"start": 0}]},
            {"thinking": "r"},
            {"note": "two words"},
        )
        for name in field
    ),
    # calls, their functions and arguments
    (reply(tool_calls="f"), "message 2: tool_calls is not a list, nor the JSON text of one"),
    (reply(tool_calls='"f"'), "message 2: tool_calls is not a list"),
    (reply(tool_calls=[]), "message 2 has no content; its fields: role"),
    (reply(content="a", tool_calls=["f"]), "message 2: a tool call is not an object, nor the JSON text of one"),
    (reply(content="a", function_call="f"), "message 2: function_call is not an object, nor the JSON text of one"),
    (turns(Q, CALL | {"function_call": TOOL}), "message 2 has both tool_calls and function_call"),
    *(
        (turns(Q | call, A), "message 1 has tool_calls, but only the assistant can call tools")
        for call in ({"tool_calls": [TOOL]}, {"function_call": TOOL})
    ),
    *(
        (reply(tool_calls=[call]), "message 2 has a tool call without a function name")
        for call in ({"function": {}}, {"name": ""}, 5)
    ),
    (calling("{x: 1}"), "message 2: the text of a call's arguments is not an object, nor the JSON text of one"),
    *(
        (calling(arguments), "message 2 has a tool call whose arguments are not an object")
        for arguments in ("[1]", [1], 5, '"{}"')
    ),
    # fields beside the messages
    (turns(Q, A, tools=TOOL), "tools is not a list of objects"),
    (turns(Q, A, tools=[1]), "tools is not a list of objects"),
    (turns(Q, A, tools=["f"]), "a tool is not an object, nor the JSON text of one"),
    (turns(Q, A, tools="f"), "tools is not a list of objects, nor the JSON text of one"),
    (turns(Q, A, functions=TOOL), "functions is not a list"),
    (turns(Q, A, functions=[1]), "functions is not a list of objects"),
    (turns(Q, A, functions=["f"]), "a function is not an object, nor the JSON text of one"),
    (turns(Q, A, tools=[{}], functions=[{}]), "the document has both tools and functions"),
    (turns(S, Q, A, system="t"), "the document's system differs from its system message"),
    *(
        (document | {"system": ["s"]}, "the document's system is not text")
        for document in (turns(Q, A), {"conversations": SHAREGPT}, {"prompt": [Q], "completion": [A]})
    ),
    (turns(Q, A, chat_template_kwargs=[1]), "chat_template_kwargs is not an object"),
    # a second conversation, or a part of one
    (turns(Q, A, conversations=SHAREGPT), f"the document has the field conversations, {WAY_OUT}"),
    (turns(Q, A, prompt="p"), f"the document has the field prompt, {WAY_OUT}"),
    (
        turns(Q, A, prompt=[Q], completion=[A]),
        "the document has the fields prompt, completion, which may change what is trained on and are not supported here; remove "
        "them, read them under another name by data.columns, or list them in data.ignored_fields",
    ),
    ({"conversations": SHAREGPT, "prompt": "p"}, f"the document has the field prompt, {WAY_OUT}"),
    ({"prompt": "p", "completion": "c", "rejected": "r"}, f"the document has the field rejected, {WAY_OUT}"),
    ({"question": "q", "answer": "a", "instruction": "i"}, f"the document has the field instruction, {WAY_OUT}"),
    *(
        ({"prompt": "p", "completion": "c", name: "x"}, f"the document has the field {name}, {WAY_OUT}")
        for name in ("system", "tools", "functions", "chat_template_kwargs")
    ),
]
PAIR_ROWS = [  # pairs: the prompt apart, shared by both answers, as text; single messages; texts
    (pair([A], [B], prompt=[Q]), QA_QB),
    (pair([Q, A], [Q, B]), QA_QB),
    (pair([Q, A], [Q, B], prompt="q"), QA_QB),
    (pair([Q, A], [Q, B], prompt="q", messages=[Q, A]), QA_QB),  # as in UltraFeedback
    (pair([Q, A], [Q, B], prompt=[Q]), QA_QB),
    (pair([A], [B], prompt="q"), QA_QB),
    (pair("a", "b", question="q"), QA_QB),
    (pair("a", [B], instruction="q", input=""), QA_QB),
    (pair(A, "b", prompt=[Q]), QA_QB),
    (pair(SHAREGPT[1], B, conversations=SHAREGPT[:1]), QA_QB),
    (pair([Q, A, Q, A], [Q, A, Q, B]), [*QAQA, talk("---+", Q, A, Q, B)]),
    (pair(hh(Q, A), hh(Q, B)), QA_QB),
    (pair(hh(Q, A, Q, A), hh(Q, A, Q, B)), [*QAQA, talk("---+", Q, A, Q, B)]),
    (pair(hh(Q, A)[2:], hh(Q, B) + "\n"), QA_QB),
    (pair("c", "r", prompt="p"), TWO_TEXTS),
    (pair("c", "r", prompt="p", question="", messages=[]), TWO_TEXTS),
    (pair("c", "r", prompt=""), [("", "c"), ("", "r")]),
    *(
        (
            pair(
                [A], [B], prompt=prompt, system="s", tools=[TOOL], chat_template_kwargs={"x": 1}, score_chosen=5, id=1
            ),
            [talk("--+", S, Q, answer, tools=(TOOL,), arguments={"x": 1}) for answer in (A, B)],
        )
        for prompt in ([Q], "q")
    ),
    # pairs
    ([], 'the document is a list; a list of messages is written as {"messages": [...]}'),
    (
        {"query": "q", "good": "c", "worse": "r"},
        f'{NOT_A_PAIR}; its fields: query, good, worse; {SUGGESTION} {{ prompt = "query", rejected = "worse" }}',
    ),
    *(
        (document, f'{NOT_A_PAIR}; its fields: {", ".join(document)}; dataset = "chat" reads conversations')
        for document in (turns(Q, A), {"question": "q", "answer": "a"}, {"prompt": "p", "completion": "c"})
    ),
    ({"prompt": "p", "chosen": "c"}, "the document has no field rejected; its fields: prompt, chosen"),
    ({"question": "p", "chosen": "c"}, "the document has no field rejected; its fields: question, chosen"),
    ({"conversations": [Q], "chosen": "c"}, "the document has no field rejected; its fields: conversations, chosen"),
    ({"prompt": "p", "rejected": "c"}, "the document has no field chosen; its fields: prompt, rejected"),
    (
        {"prompt": "p", "chosen": "c", "bad": "b"},
        f'the document has no field rejected; its fields: prompt, chosen, bad; {SUGGESTION} {{ rejected = "bad" }}',
    ),
    (
        pair("c", "r", query="p"),
        f'{NO_PROMPT}; its fields: chosen, rejected, query; {SUGGESTION} {{ prompt = "query" }}',
    ),
    *(
        (document, f"{NO_PROMPT}; its fields: chosen, rejected")
        for document in (
            pair("c", "r"),
            pair("c", "r", question=""),
            pair("User: q\nBot: a", "User: q\nBot: b"),
            pair("\n\nAssistant: a\n\nHuman: q", "\n\nAssistant: b\n\nHuman: q"),
            pair("Human: a", "Human: b"),
            pair("x" + hh(Q, A), "x" + hh(Q, B)),
        )
    ),
    (pair(hh(Q, A), hh(OTHER_Q, B)), FIRST_DIFFER),
    (pair(hh(Q, A), "b"), f"{NO_PROMPT}; its fields: chosen, rejected"),
    (pair("c", "r", question=" "), "the document's field question is empty"),
    (pair("c", "c", prompt="p"), "the chosen and the rejected answer are equal"),
    (pair("c", "", prompt="p"), "the document's field rejected is empty"),
    (pair(" \n", "r", prompt="p"), "the document's field chosen is empty"),
    (pair([A | {"content": " "}], [B], prompt=[Q]), "message 2 is an empty answer"),
    (pair([], [A], prompt=[Q]), "the document's field chosen is empty"),
    (pair(1, 2, prompt="p"), NO_KIND.format("chosen")),
    (pair("c", [A], prompt="p"), NO_KIND.format("rejected")),
    (pair([Q, A], [Q, B], prompt="x"), "the prompt is not the text of a message that both conversations share"),
    (pair([Q], [A], prompt=[Q]), DIFFER),
    *((pair([Q, A], [{"role": role, "content": "other"}, B], prompt="q"), DIFFER) for role in ("user", "system")),
    *(
        (pair(chosen, rejected), FIRST_DIFFER)
        for chosen, rejected in (([Q, A], [OTHER_Q, B]), ([S, Q, A], [Q, B]), ([Q, A], [B]))
    ),
    (pair([Q, A, Q, A], [Q, A, OTHER_Q, B]), DIFFER),
    (pair([Q], [Q, B]), "the chosen conversation has only the message that both share, so no answer"),
    (pair([Q, A], [Q]), "the rejected conversation has only the message that both share, so no answer"),
    (pair([A], [B]), "the document has no prompt"),
    (pair([], [B]), "the document's field chosen is empty"),
    *(
        (pair("c", "r", prompt="p", **{name: [A]}), f"the document has the field {name}, {WAY_OUT}")
        for name in ("history", "conversations", "messages", "images", "label", "weights", "question")
    ),
    *(
        (pair("c", "r", prompt="p", **given), "the document is marked as not to be trained on")
        for given in ({"weight": 0}, {"train": False})
    ),
]
ROWS = [*((CHATS, *row) for row in CHAT_ROWS), *((PAIRS, *row) for row in PAIR_ROWS)]


@pytest.mark.parametrize(("layouts", "document", "expected"), ROWS, ids=[str(document)[:70] for _, document, _ in ROWS])
def test_a_document_is_read_or_refused(layouts, document, expected):
    assert (reason_of if isinstance(expected, str) else read)(layouts, document) == expected


# ---------------------------------------------------------------- fields that every layout may have

CHAT_DOCUMENTS = [
    turns(Q, A),
    {"conversations": SHAREGPT},
    {"prompt": [Q], "completion": [A]},
    {"prompt": "p", "completion": "c"},
]
every_chat = pytest.mark.parametrize("document", CHAT_DOCUMENTS, ids=["messages", "ShareGPT", "lists", "texts"])


@every_chat
def test_a_field_that_may_change_what_is_trained_on_is_named(document):
    for name in (
        *(
            "loss_mask",
            "lossWeight",
            "train_on_turn",
            "masked",
            "labels",
            "label",
            "history",
            "images",
            "instruction",
            "chosen",
        ),
        *("rejected", "text", "system_prompt", "enable_thinking", "documents", "reasoning", "dialogue", "output"),
    ):
        assert reason_of(CHATS, document | {name: "x"}) == f"the document has the field {name}, {WAY_OUT}"
        for absent in (None, "", [], {}):
            assert read(CHATS, document | {name: absent}) == read(CHATS, document)


@every_chat
def test_other_fields_are_listed(document):
    others = {"id": 0, "prompt_id": "p", "source": "web", "score": 0.5, "lang": "en", "empty": None, "num_turns": 2}
    for given, names in ((document, ()), (document | others, tuple(name for name in others if name != "empty"))):
        assert [found.unused for found in read_document(given, CHATS)] == [names]
    answers = read_document(pair([A], [B], prompt=[Q], system="s", score_chosen=5, id=1), PAIRS)
    assert [answer.unused for answer in answers] == [("score_chosen", "id")] * 2


@every_chat
def test_the_weight_of_a_document_is_respected(document):
    assert read(CHATS, document | {"weight": 1, "train": True}) == read(CHATS, document)
    for given in ({"weight": 0}, {"train": False}, {"weight": 0.0, "train": False}):
        assert reason_of(CHATS, document | given) == "the document is marked as not to be trained on"
    assert reason_of(CHATS, document | {"weight": 2}) == "the document has the weight 2; expected 0 or 1"
