"""Messages of conversations, with their content parts, and their calls of functions.

One function reads each of these levels, and uses, converts or refuses its fields.
"""

import json
from collections.abc import Mapping
from typing import Any

from trainer.base.config.schema.data import MESSAGE_COLUMNS
from trainer.base.system.spelling import did_you_mean
from trainer.data.chat.columns import missing_field
from trainer.data.chat.fields import (
    REASONING,
    WAY_OUT,
    MalformedConversation,
    from_json,
    is_absent,
    require_json,
    unused_fields,
)

ROLES = ("system", "user", "assistant", "tool")
_ROLE_OF = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}
"""Name of a role or of a sender in the data -> role."""

Message = dict[str, Any]
"""A message for a template. Its role is one of ROLES. Its content is a text or a list of text parts; that of a tool may also be
another list or an object. A message with tool_calls may have no content. The arguments of a call are an object, or its JSON
text."""


def message_list(value: Any, name: str) -> list[Any]:
    """Return the messages of a field, in OpenAI's format, for read_message. The list, and each message, may be its JSON text."""
    messages = []
    for i, message in enumerate(_list(from_json(value, name, "a list"), name), start=1):
        message = from_json(message, f"message {i}", "an object")
        is_sharegpt = isinstance(message, Mapping) and (
            "from" in message or (name == "conversations" and "role" not in message)
        )
        messages.append(_from_sharegpt(message, f"message {i}") if is_sharegpt else message)
    return messages


def _from_sharegpt(turn: Mapping[str, Any], label: str) -> dict[str, Any]:
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    for ours, name in (("from", "role"), ("value", "content")):
        if not is_absent(turn.get(ours)) and not is_absent(others.get(name)):
            message = f"{label} has both {ours} and {name}"
            raise MalformedConversation(f'{message}; data.ignored_fields = ["{ours}"] would leave {name}')
    sender = _word(turn, "from", tuple(_ROLE_OF), label, "is from")
    if turn.get("value") is None:
        raise missing_field(turn, f"{label} has no value", "content")
    return others | {"role": _ROLE_OF[sender], "content": turn["value"]}


def read_message(message: Any, label: str) -> tuple[Message, bool, set[str]]:
    """Return a message for a template, whether the message is trained on, and the names of fields in its content parts that have
    no meaning. Raises MalformedConversation.

    Other fields that have no meaning here stay: `check_written` refuses or counts them, if the template does not use them.
    """
    role = _ROLE_OF[_word(message, "role", tuple(_ROLE_OF), label, "has the role")]
    # Absent fields are dropped, as transformers drops null ones, because templates test whether a field exists.
    parsed = {n: v for n, v in message.items() if not is_absent(v) or (n == "content" and v is not None)}
    parsed["role"] = role
    unused: set[str] = set()
    calls = _read_calls(parsed.get("tool_calls"), parsed.pop("function_call", None), role, label)
    if calls:
        parsed["tool_calls"] = calls
    else:
        parsed.pop("tool_calls", None)
    if "content" in parsed:
        unused = _check_content(parsed["content"], role, label)
    elif not calls:
        raise missing_field(message, f"{label} has no content", "content")
    _check_reasoning(parsed, label)
    if role == "assistant" and not calls and not content_text(parsed).strip():
        raise MalformedConversation(f"{label} is an empty answer")
    if role != "assistant" and parsed.get("train") is True:
        raise MalformedConversation(f"{label} has train = true, but only answers can be trained on")
    is_target = is_trained(parsed.pop("weight", None), parsed.pop("train", None), label) and role == "assistant"
    require_json([message, parsed.get("tool_calls")], label)  # the calls of a message may be JSON text
    return parsed, is_target, unused


def _check_reasoning(message: Message, label: str) -> None:
    reasonings = {name: message[name] for name in REASONING if name in message}
    for name, reasoning in reasonings.items():
        if not isinstance(reasoning, str):
            raise MalformedConversation(f"{label}: {name} is not text")
        if message["role"] != "assistant":
            raise MalformedConversation(f"{label} has {name}, but only answers have reasoning; {WAY_OUT}")
    if len(set(reasonings.values())) > 1:
        raise MalformedConversation(f"{label} has different reasonings in {' and '.join(reasonings)}; {WAY_OUT}")


def is_trained(weight: Any, train: Any, label: str) -> bool:
    """Return what the fields weight (OpenAI's format) and train of a message or document say, or True if it has neither."""
    if weight is not None and weight not in (0, 1):
        raise MalformedConversation(f"{label} has the weight {_abbreviated(weight)}; expected 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise MalformedConversation(f"{label} has train = {_abbreviated(train)}; expected true or false")
    if weight is not None and train is not None and bool(weight) != train:
        raise MalformedConversation(f"{label} has the weight {_abbreviated(weight)} and train = {_abbreviated(train)}")
    return all(mark is None or bool(mark) for mark in (weight, train))


def content_text(message: Message) -> str:
    """Return the content of a message as one text: the text, the text parts without a separator, or an object as JSON."""
    content = message.get("content", "")
    if isinstance(content, str):
        return content
    if is_parts(content):
        return "".join(part["text"] for part in content)
    return json.dumps(content, ensure_ascii=False)


def is_parts(content: Any) -> bool:
    """Return whether a content is a list of text parts."""
    return isinstance(content, list) and all(isinstance(part, Mapping) and "text" in part for part in content)


def _check_content(content: Any, role: str, label: str) -> set[str]:
    """Return the names of fields in content parts that have no meaning."""
    if isinstance(content, str):
        return set()
    is_typed = isinstance(content, list) and all(isinstance(part, Mapping) and "type" in part for part in content)
    if role == "tool" and isinstance(content, list | Mapping) and not is_typed:
        return set()
    if not isinstance(content, list):
        raise MalformedConversation(f"{label} has content that is neither text nor a list of content parts")
    return {f"content.{name}" for part in content for name in _check_part(part, label)}


def _check_part(part: Any, label: str) -> tuple[str, ...]:
    """Return the names of the fields of a content part that have no meaning."""
    part_type = part.get("type") if isinstance(part, Mapping) else None
    if part_type != "text":
        raise MalformedConversation(
            f"{label} has a content part of type {_abbreviated(part_type)}; only text is supported"
        )
    if not isinstance(part.get("text"), str):
        raise MalformedConversation(f"{label} has a content part without text")
    return unused_fields(part, ("type", "text"), f"a content part of {label}")


def _read_calls(calls: Any, function_call: Any, role: str, label: str) -> list[Mapping[str, Any]]:
    """Return the calls of a message. function_call: the field of OpenAI's earlier format."""
    calls = from_json(calls, f"{label}: tool_calls", "a list")
    if not is_absent(function_call):
        if calls:
            raise MalformedConversation(f"{label} has both tool_calls and function_call")
        calls = [{"type": "function", "function": from_json(function_call, f"{label}: function_call", "an object")}]
    if is_absent(calls):
        return []
    if role != "assistant":
        raise MalformedConversation(f"{label} has tool_calls, but only the assistant can call tools")
    return [_read_call(call, label) for call in _list(calls, f"{label}: tool_calls")]


def _read_call(call: Any, label: str) -> Mapping[str, Any]:
    """Return a call, which has a function or is one."""
    call = from_json(call, f"{label}: a tool call", "an object")
    if isinstance(call, Mapping) and "function" in call:
        return {**call, "function": _read_function(call["function"], label)}
    return _read_function(call, label)


def _read_function(function: Any, label: str) -> Mapping[str, Any]:
    """Return the name and the arguments of a call."""
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise MalformedConversation(f"{label} has a tool call without a function name")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if not isinstance(from_json(arguments, f"{label}: the text of a call's arguments", "an object"), Mapping):
        raise MalformedConversation(f"{label} has a tool call whose arguments are not an object")
    return {**function, "arguments": arguments}


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise MalformedConversation(f"{name} is not a list")
    return value


def _word(message: Any, field: str, words: tuple[str, ...], label: str, verb: str) -> str:
    """Return the value of a message's field. Raises MalformedConversation unless the value is one of `words`."""
    if not isinstance(message, Mapping):
        raise MalformedConversation(f"{label} is not an object")
    word = message.get(field)
    if word is None:
        lacking = [name for name in MESSAGE_COLUMNS if message.get(name) is None]
        raise missing_field(message, f"{label} has no {field}", *lacking)
    if word not in words:
        hint = did_you_mean(word, words) if isinstance(word, str) else ""
        raise MalformedConversation(f"{label} {verb} {_abbreviated(word)}; expected one of {', '.join(words)}{hint}")
    return word


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
