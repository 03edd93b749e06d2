"""The data that a template receives, with the variants of a conversation that templates expect."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.data.chat.fields import REASONING
from trainer.data.chat.messages import Message, content_text
from trainer.data.json_text import parse_json


def template_data(
    messages: Sequence[Message], tools: Sequence[Mapping] | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the data of a template. As in transformers, reasoning is passed as reasoning_content and as thinking."""
    copies = []
    for message in messages:
        reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        copies.append(message)
    return {"messages": copies, "tools": list(tools) if tools else None, "arguments": dict(arguments)}


def variants(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield the messages in all variants that a template may expect, in the order of preference. A template that expects another
    one fails, or does not write all of the conversation.

    The arguments of calls are objects, or JSON text. A content that is not text is unchanged, or text. The content of a message
    with calls only is absent, null, or empty.
    """
    has_calls = any(m.get("tool_calls") for m in messages)
    has_contents = any(not isinstance(m.get("content", ""), str) for m in messages)
    has_none = any("content" not in m for m in messages)
    for content_as_text, missing, arguments_as_text in itertools.product(
        (False, True) if has_contents else (False,),
        ({}, {"content": None}, {"content": ""}) if has_none else ({},),
        (False, True) if has_calls else (False,),
    ):
        yield [_variant(message, content_as_text, missing, arguments_as_text) for message in messages]


def _variant(message: Message, content_as_text: bool, missing: Message, arguments_as_text: bool) -> Message:
    message = missing | message
    if content_as_text and message.get("content") is not None:
        message["content"] = content_text(message)
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call, arguments_as_text) for call in message["tool_calls"]]
    return message


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _call(call["function"], as_text)}
    arguments = call.get("arguments", {})
    if as_text:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    else:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    return {**call, "arguments": arguments}
