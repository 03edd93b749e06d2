"""Parsing of chat documents. Each input format becomes a Conversation or a PromptCompletion."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.tokenizer.protocol import has_lone_surrogate

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Sender name in ShareGPT data -> role."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    """Messages. Each role is one of ROLES. The content of a message is text. A message with tool_calls may have no content."""
    loss_mask: tuple[bool, ...]
    """One flag per message: whether to train on it. Only messages of the assistant can be trained on."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Descriptions of the tools that the assistant may call. The template renders the descriptions."""


@dataclass(frozen=True)
class PromptCompletion:
    """Plain text and its continuation, encoded without a template."""

    prompt: str
    completion: str


class MalformedConversation(Exception):
    """Error whose message states in one line why a document is not a conversation."""


def parse_conversation(document: Any) -> Conversation | PromptCompletion:
    """Parse a JSON value. Raises MalformedConversation.

    Formats, in order of precedence: {"messages": [{"role", "content"}]}; ShareGPT's {"conversations": [{"from", "value"}]};
    {"prompt", "completion"} with two texts or two lists of messages. An assistant message is not trained on if it has
    "weight": 0 (OpenAI's format) or is part of a prompt.
    """
    if not isinstance(document, Mapping):
        raise MalformedConversation("the document is not a JSON object")
    if has_lone_surrogate(json.dumps(document, ensure_ascii=False, default=str)):
        raise MalformedConversation("the document contains a lone surrogate")
    if document.get("messages") is not None:
        return _conversation(_list(document["messages"], "messages"), 0, document.get("tools"))
    if document.get("conversations") is not None:
        turns = _list(document["conversations"], "conversations")
        messages = [_from_sharegpt(turn, f"message {i}") for i, turn in enumerate(turns, start=1)]
        return _conversation(messages, 0, document.get("tools"))
    prompt, completion = document.get("prompt"), document.get("completion")
    if prompt is None and completion is None:
        raise MalformedConversation("the document has neither messages nor conversations nor prompt and completion")
    if prompt is None:
        raise MalformedConversation("the document has a completion but no prompt")
    if completion is None:
        raise MalformedConversation("the document has a prompt but no completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise MalformedConversation("the completion is empty")
        return PromptCompletion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation([*prompt, *completion], len(prompt), document.get("tools"))
    raise MalformedConversation("prompt and completion are neither both text nor both lists of messages")


def parse_preference(document: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a preference pair. Return two documents {"prompt", "completion", "tools"}: with the chosen and with the rejected
    answer. Raises MalformedConversation.

    Formats: {"prompt", "chosen", "rejected"} with texts, or with lists of messages. Without a list of messages as the prompt, the
    leading messages that both answers share are the prompt. If they share none, the prompt is the text of the user's message.
    """
    if not isinstance(document, Mapping):
        raise MalformedConversation("the document is not a JSON object")
    prompt, chosen, rejected = (document.get(name) for name in ("prompt", "chosen", "rejected"))
    for name in ("chosen", "rejected"):
        if document.get(name) is None:
            raise MalformedConversation(f"the document has no {name} answer")
    if chosen == rejected:
        raise MalformedConversation("the chosen and the rejected answer are equal")
    if isinstance(chosen, list) and isinstance(rejected, list) and not isinstance(prompt, list):
        equal = (a == b for a, b in zip(chosen[:-1], rejected[:-1], strict=False))
        shared = sum(itertools.takewhile(bool, equal))
        if shared:
            if prompt is not None and not any(
                isinstance(m, Mapping) and m.get("content") == prompt for m in chosen[:shared]
            ):
                raise MalformedConversation("the prompt is not the text of a message that both conversations share")
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        elif prompt is not None:
            prompt = [{"role": "user", "content": prompt}]
    if prompt is None:
        raise MalformedConversation("the document has no prompt")
    tools = document.get("tools")
    return tuple({"prompt": prompt, "completion": answer, "tools": tools} for answer in (chosen, rejected))


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise MalformedConversation(f"{name} is not a list")
    return value


def _from_sharegpt(turn: Any, label: str) -> Any:
    sender = _word(turn, "from", tuple(_SHAREGPT_ROLES), label, "is from")
    if turn.get("value") is None:
        raise MalformedConversation(f"{label} has no value")
    return {"role": _SHAREGPT_ROLES[sender], "content": turn["value"]}


def _word(message: Any, field: str, words: tuple[str, ...], label: str, verb: str) -> str:
    """Return the value of a message's field. Raises MalformedConversation unless the value is one of `words`."""
    if not isinstance(message, Mapping):
        raise MalformedConversation(f"{label} is not an object")
    word = message.get(field)
    if word is None:
        raise MalformedConversation(f"{label} has no {field}")
    if word not in words:
        raise MalformedConversation(f"{label} {verb} {_abbreviated(word)}; expected one of {', '.join(words)}")
    return word


def _conversation(messages: Sequence[Any], prompt_length: int, tools: Any) -> Conversation:
    """Parse messages. prompt_length: number of leading messages that form the prompt."""
    if not messages:
        raise MalformedConversation("the conversation has no messages")
    parsed = [_message(message, f"message {i}") for i, message in enumerate(messages, start=1)]
    systems = [i for i, message in enumerate(parsed) if message["role"] == "system"]
    if len(systems) > 1:
        raise MalformedConversation(f"the conversation has {len(systems)} system messages; at most one is allowed")
    if systems and systems[0] != 0:
        raise MalformedConversation(f"message {systems[0] + 1} is a system message; only the first message may be one")
    answers = [i for i, message in enumerate(parsed) if message["role"] == "assistant"]
    if not answers:
        raise MalformedConversation("the conversation has no assistant message")
    weights = [_pop_weight(message, f"message {i}") for i, message in enumerate(parsed, start=1)]
    loss_mask = tuple(i in answers and i >= prompt_length and bool(weight) for i, weight in enumerate(weights))
    if not any(loss_mask):
        raise MalformedConversation("the conversation has no assistant message to train on")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise MalformedConversation("tools is not a list of objects")
    return Conversation(tuple(parsed), loss_mask, tuple(tools) if tools else None)


def _message(message: Any, label: str) -> Message:
    role = _word(message, "role", ROLES, label, "has the role")
    calls = message.get("tool_calls")
    if calls:
        _check_calls(calls, role, label)
    # Null fields are dropped, as in transformers, because templates test whether a field exists.
    parsed = {name: value for name, value in message.items() if value is not None}
    if "content" in parsed:
        parsed["content"] = _text(parsed["content"], label)
    elif not calls:
        raise MalformedConversation(f"{label} has no content")
    if role == "assistant" and not calls and not parsed["content"].strip():
        raise MalformedConversation(f"{label} is an empty answer")
    return parsed


def _text(content: Any, label: str) -> str:
    """Return a message's content as one text. content: a text, or a list of content parts of type "text"."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MalformedConversation(f"{label} has content that is neither text nor a list of content parts")
    texts = []
    for part in content:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type != "text":
            raise MalformedConversation(
                f"{label} has a content part of type {_abbreviated(part_type)}; only text is supported"
            )
        if not isinstance(part.get("text"), str):
            raise MalformedConversation(f"{label} has a content part without text")
        texts.append(part["text"])
    return "".join(texts)


def _check_calls(calls: Any, role: str, label: str) -> None:
    if role != "assistant":
        raise MalformedConversation(f"{label} has tool_calls, but only the assistant can call tools")
    for call in _list(calls, f"{label}: tool_calls"):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MalformedConversation(f"{label} has a tool call without a function name")


def _pop_weight(message: Message, label: str) -> int:
    """Remove the weight from a message and return it. Templates do not expect this field."""
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise MalformedConversation(f"{label} has the weight {_abbreviated(weight)}; expected 0 or 1")
    return int(weight)


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
