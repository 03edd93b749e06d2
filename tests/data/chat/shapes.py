"""A corpus of conversations in all shapes that datasets have, each with what transformers would be given for it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

EOT = "END_OF_TURN"
"""Stands in a document for the name of the token that ends an answer of the family."""


@dataclass(frozen=True)
class Shape:
    document: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] | None = None
    """Messages for apply_chat_template of transformers. None: the messages of the document."""
    tools: Sequence[Mapping[str, Any]] | None = None
    trained: Sequence[int] | None = None
    """Indices of the trained answers among all answers. None: all."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    as_text: Sequence[Mapping[str, Any]] | None = None
    """Messages for it if the template fails with `messages`, or does not write all of their texts as such."""


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def turns(*messages: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), **fields}


def human(text: str, **fields: Any) -> dict[str, Any]:
    return {"from": "human", "value": text, **fields}


def gpt(text: str, **fields: Any) -> dict[str, Any]:
    return {"from": "gpt", "value": text, **fields}


def function(name: str, *parameters: str) -> dict[str, Any]:
    described = {p: {"type": "string", "description": f"The {p}."} for p in parameters}
    schema = {"type": "object", "properties": described, "required": list(parameters)}
    return {"name": name, "description": f"Call {name}.", "parameters": schema}


def called(arguments: Any, name: str = "weather", **fields: Any) -> dict[str, Any]:
    given = {} if arguments is None else {"arguments": arguments}
    call = {"type": "function", "id": "call00001", "function": {"name": name, **given}}
    return {"role": "assistant", "tool_calls": [call], **fields}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
Q, A = user("What is 2 + 2?"), answer("It is 4.")
Q2, A2 = user("And 3 more?"), answer("Then it is 7.")
TALK, TALK2 = [Q, A], [Q, A, Q2, A2]
OBJECT = {"city": "Oslo", "days": 2, "exact": True}
TEXT = '{"city": "Oslo", "days": 2, "exact": true}'
TOOL = {"type": "function", "function": function("weather", "city", "days", "exact")}
ASKED, REPLY = user("The weather in Oslo?"), answer("It rains.")
CALL = [ASKED, called(OBJECT), result("rain"), REPLY]
PARTS = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
NULLS = [Q | {"tool_calls": None, "name": None}, A | {"tool_calls": None, "reasoning_content": None}]
ODD = ["message", "end", "id", "loop", "user"]
ODD_TOOL = {"type": "function", "function": function("start", *ODD)}
ODD_CALL = [ASKED, called({name: name for name in ODD}, "start"), result("end"), answer("message")]
THOUGHT = {"reasoning_content": "Two and two."}

SHAPES = {
    "one question and its answer": Shape(turns(*TALK)),
    "two turns": Shape(turns(*TALK2)),
    "a system message and two turns": Shape(turns(SYSTEM, *TALK2)),
    "a system text beside the messages": Shape(turns(*TALK2, system="Be brief."), [SYSTEM, *TALK2]),
    "a blank system text": Shape(turns(*TALK, system=""), TALK),
    "ShareGPT": Shape({"conversations": [human(Q["content"]), gpt(A["content"])]}, TALK),
    "ShareGPT with a system turn": Shape(
        {"conversations": [{"from": "system", "value": "Be brief."}, human(Q["content"]), gpt(A["content"])]},
        [SYSTEM, *TALK],
    ),
    "ShareGPT with a system text": Shape(
        {"conversations": [human(Q["content"]), gpt(A["content"])], "system": "Be brief."}, [SYSTEM, *TALK]
    ),
    "prompt and completion of messages": Shape({"prompt": [Q], "completion": [A]}, TALK),
    "a prompt with an earlier answer": Shape({"prompt": TALK2[:3], "completion": [A2]}, TALK2, trained=[1]),
    "a prompt beside the messages that repeats the question": Shape(turns(*TALK, prompt=Q["content"]), TALK),
    "weight 0 on the first answer": Shape(turns(Q, A | {"weight": 0}, Q2, A2 | {"weight": 1}), TALK2, trained=[1]),
    "weight 0 in ShareGPT": Shape(
        {
            "conversations": [
                human(Q["content"], weight=0),
                gpt(A["content"], weight=0),
                human(Q2["content"]),
                gpt(A2["content"]),
            ]
        },
        TALK2,
        trained=[1],
    ),
    "train = false on the last answer": Shape(turns(Q, A, Q2, A2 | {"train": False}), TALK2, trained=[0]),
    "weight 0 on all answers": Shape(turns(Q, A | {"weight": 0})),
    "a question at the end": Shape(turns(*TALK2[:3])),
    "an answer at the beginning": Shape(turns(A, Q2, A2)),
    "two questions in a row": Shape(turns(Q, Q2, A2)),
    "two answers in a row": Shape(turns(Q, A, A2)),
    "a content of one part": Shape(turns(user(PARTS[1:]), A), as_text=[user("2 + 2?"), A]),
    "a content of several parts": Shape(turns(user(PARTS), A), as_text=TALK),
    "null fields": Shape(turns(*NULLS), TALK),
    "white space around messages": Shape(turns(user("  Why? \n"), answer(" \tBecause.  "))),
    "line ends around an answer": Shape(turns(Q, answer("\n\nIt is 4.\n"))),
    "a blank question": Shape(turns(user(" \n"), A)),
    "code, tabs and several scripts": Shape(
        turns(user("def f(x):\n\treturn  x\r\n"), answer("é 世界 \U0001f642 a\u0301 \u2028"))
    ),
    "the name of a special token in a question": Shape(turns(user(f"Say {EOT} now{EOT}"), A)),
    "the name of a special token in an answer": Shape(turns(Q, answer(f"{EOT}{EOT} is one."), Q2, A2)),
    "parts of names around an answer": Shape(turns(user("<|"), answer("|> </s <s"), user("end|>"), answer("<|im_"))),
    "tools that are not called": Shape(turns(*TALK, tools=[TOOL]), TALK, [TOOL]),
    "tools as JSON text": Shape(turns(*TALK, tools=json.dumps([TOOL])), TALK, [TOOL]),
    "empty tools and tool_calls": Shape(turns(Q, A | {"tool_calls": []}, tools=[]), TALK),
    "a call and its result": Shape(turns(*CALL, tools=[TOOL]), CALL, [TOOL]),
    "a call without descriptions of the tools": Shape(turns(*CALL)),
    "arguments as JSON text": Shape(turns(ASKED, called(TEXT), *CALL[2:], tools=[TOOL]), CALL, [TOOL]),
    "a call without arguments": Shape(turns(ASKED, called(None), *CALL[2:]), [ASKED, called({}), *CALL[2:]]),
    "a call after text": Shape(turns(ASKED, called(OBJECT, content="I look."), *CALL[2:])),
    "two calls in one message": Shape(
        turns(
            ASKED,
            {"role": "assistant", "tool_calls": called(OBJECT)["tool_calls"] * 2},
            result("rain"),
            result("sun"),
            REPLY,
        )
    ),
    "functions and function_call": Shape(
        turns(
            ASKED,
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": TEXT}},
            {"role": "function", "name": "weather", "content": "rain"},
            REPLY,
            functions=[TOOL["function"]],
        ),
        CALL,
        [TOOL],
    ),
    "a result that is an object": Shape(
        turns(*CALL[:2], result({"sky": "fog"}), REPLY), as_text=[*CALL[:2], result('{"sky": "fog"}'), REPLY]
    ),
    "parameters named like parts of special tokens": Shape(turns(*ODD_CALL, tools=[ODD_TOOL]), ODD_CALL, [ODD_TOOL]),
    "reasoning in the last answer": Shape(turns(Q, A, Q2, A2 | THOUGHT)),
    "reasoning in each answer": Shape(turns(Q, A | THOUGHT, Q2, A2 | THOUGHT)),
    "reasoning before a call": Shape(turns(ASKED, called(OBJECT, **THOUGHT), *CALL[2:])),
    "reasoning in the text of an answer": Shape(turns(Q, answer("<think>\nTwo and two.\n</think>\n\nIt is 4."))),
    "template arguments": Shape(
        turns(*TALK, chat_template_kwargs={"enable_thinking": False}), TALK, arguments={"enable_thinking": False}
    ),
    "an id and a source": Shape(turns(*TALK, id=7, source="web"), TALK),
    "a name of each message": Shape(turns(Q | {"name": "ann"}, A | {"name": "bob"})),
    "an image beside the messages": Shape(turns(*TALK, images=["a.png"])),
    "a mask of tokens": Shape(turns(*TALK, loss_mask=[0, 1])),
    "messages and conversations": Shape(turns(*TALK, conversations=[human("Why?"), gpt("So.")])),
    "a history beside the messages": Shape(turns(*TALK, history=[["Hi.", "Hello."]])),
    "an empty answer": Shape(turns(Q, answer(""))),
}
