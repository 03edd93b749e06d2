"""Documents of chat data -> conversations: every kind of input as one, and the reason where a document is none."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.data.tokenizer.protocol import has_lone_surrogate

ROLES = ("system", "user", "assistant", "tool")
_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Names of ShareGPT data -> roles."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    """Each with a role of ROLES; content is text, and only missing beside tool_calls."""
    trained: tuple[bool, ...]
    """(messages,): whether a message is to be learned. Never one that is not the assistant's."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Descriptions of the tools, for templates that write them."""


@dataclass(frozen=True)
class PromptCompletion:
    """Plain text and how it goes on, without a template."""

    prompt: str
    completion: str


class _Malformed(Exception):
    """The reason, in a few words."""


def parse_conversation(document: Any) -> Conversation | PromptCompletion | str:
    """The conversation in one JSON value, or why there is none.

    Read are, the first that is there: {"messages": [{"role", "content"}]}; {"conversations": [{"from", "value"}]} of ShareGPT
    data; {"prompt", "completion"}, both text or both lists of messages. An assistant's message with "weight": 0 is not to be
    learned (OpenAI's format), nor are those of a prompt.
    """
    try:
        return _conversation_of(document)
    except _Malformed as malformed:
        return str(malformed)
    except RecursionError:
        return "nested too deep"


def _conversation_of(document: Any) -> Conversation | PromptCompletion:
    if not isinstance(document, Mapping):
        raise _Malformed("not a JSON object")
    if has_lone_surrogate(json.dumps(document, ensure_ascii=False, default=str)):
        raise _Malformed("holds half of a surrogate pair")
    if document.get("messages") is not None:
        return _conversation(_list(document["messages"], "messages"), 0, document.get("tools"))
    if document.get("conversations") is not None:
        turns = _list(document["conversations"], "conversations")
        messages = [_from_sharegpt(turn, f"message {i}") for i, turn in enumerate(turns, start=1)]
        return _conversation(messages, 0, document.get("tools"))
    prompt, completion = document.get("prompt"), document.get("completion")
    if prompt is None and completion is None:
        raise _Malformed("no messages, no conversations, no prompt and completion")
    if prompt is None or completion is None:
        raise _Malformed("a completion without a prompt" if prompt is None else "a prompt without a completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise _Malformed("an empty completion")
        return PromptCompletion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return _conversation([*prompt, *completion], len(prompt), document.get("tools"))
    raise _Malformed("prompt and completion are neither both text nor both lists of messages")


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise _Malformed(f"{name} is not a list")
    return value


def _from_sharegpt(turn: Any, where: str) -> Any:
    if not isinstance(turn, Mapping):
        raise _Malformed(f"{where} is not an object")
    speaker = turn.get("from")
    if speaker is None:
        raise _Malformed(f"{where} has no from")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise _Malformed(f"{where} is from {_shown(speaker)}; known are {', '.join(_SPEAKERS)}")
    if turn.get("value") is None:
        raise _Malformed(f"{where} has no value")
    return {"role": _SPEAKERS[speaker], "content": turn["value"]}


def _conversation(messages: Sequence[Any], given: int, tools: Any) -> Conversation:
    """given: how many of the messages are a prompt's."""
    if not messages:
        raise _Malformed("no messages")
    read = [_message(message, f"message {i}") for i, message in enumerate(messages, start=1)]
    systems = [i for i, message in enumerate(read) if message["role"] == "system"]
    if len(systems) > 1:
        raise _Malformed(f"{len(systems)} system messages")
    if systems and systems[0] != 0:
        raise _Malformed(f"message {systems[0] + 1} is a system message, which only the first can be")
    speaking = [i for i, message in enumerate(read) if message["role"] == "assistant"]
    if not speaking:
        raise _Malformed("no message of the assistant")
    weights = [_weight(message, f"message {i}") for i, message in enumerate(read, start=1)]
    trained = tuple(i in speaking and i >= given and bool(weight) for i, weight in enumerate(weights))
    if not any(trained):
        raise _Malformed("no message of the assistant that is to be learned")
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools)):
        raise _Malformed("tools is not a list of objects")
    return Conversation(tuple(read), trained, tuple(tools) if tools else None)


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise _Malformed(f"{where} is not an object")
    role = message.get("role")
    if role is None:
        raise _Malformed(f"{where} has no role")
    if role not in ROLES:
        raise _Malformed(f"{where} has the role {_shown(role)}; known are {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if calls:
        _check_calls(calls, role, where)
    # What is null is left out, as transformers does it: templates ask whether a name is there.
    read = {name: value for name, value in message.items() if value is not None}
    if "content" in read:
        read["content"] = _text(read["content"], where)
    elif not calls:
        raise _Malformed(f"{where} has no content")
    if role == "assistant" and not calls and not read["content"].strip():
        raise _Malformed(f"{where} is an empty answer")
    return read


def _text(content: Any, where: str) -> str:
    """Content may be a list of parts, of which text is the only one that can be learned from."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _Malformed(f"{where} has content that is neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise _Malformed(f"{where} has a part of type {_shown(kind)}; only text can be read")
        if not isinstance(part.get("text"), str):
            raise _Malformed(f"{where} has a part without text")
        texts.append(part["text"])
    return "".join(texts)


def _check_calls(calls: Any, role: str, where: str) -> None:
    if role != "assistant":
        raise _Malformed(f"{where} has tool_calls, which only the assistant makes")
    for call in _list(calls, f"{where}: tool_calls"):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _Malformed(f"{where} has a tool call without the name of a function")


def _weight(message: Message, where: str) -> int:
    """Taken out of the message, since it is not the template's."""
    weight = message.pop("weight", 1)
    if weight not in (0, 1):
        raise _Malformed(f"{where} has the weight {_shown(weight)}, which is neither 0 nor 1")
    return int(weight)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
