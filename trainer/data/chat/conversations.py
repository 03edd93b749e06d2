"""Parsing of chat documents. Each input format becomes a Conversation or a PromptCompletion."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.base.config.schema.data import MESSAGE_COLUMNS
from trainer.base.system.spelling import did_you_mean
from trainer.data.chat.fields import REASONING, is_absent, unused
from trainer.data.chat.layouts import (
    QUESTIONS,
    MalformedConversation,
    missing_field,
    question_of,
    text_of,
    unknown_layout,
)
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
    """Messages. Each role is one of ROLES. The content of a message is a text or a list of text parts; that of a tool may also be
    another list or an object. A message with tool_calls may have no content. The arguments of a call are an object, or its JSON
    text."""
    loss_mask: tuple[bool, ...]
    """One flag per message: whether to train on it. Only messages of the assistant can be trained on."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Descriptions of the tools that the assistant may call. The template renders the descriptions."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, by name."""
    unused: tuple[str, ...] = ()
    """Names of the document's fields that have no meaning here, such as an id."""


@dataclass(frozen=True)
class PromptCompletion:
    """Plain text and its continuation, encoded without a template."""

    prompt: str
    completion: str
    unused: tuple[str, ...] = ()


BESIDE_MESSAGES = ("tools", "functions", "system", "chat_template_kwargs", "weight", "train")
"""Fields of a document that have a meaning beside its messages."""


def parse_conversation(document: Any) -> Conversation | PromptCompletion:
    """Parse a JSON value. Raises MalformedConversation.

    Formats: {"messages": [{"role", "content"}]}; ShareGPT's {"conversations": [{"from", "value"}]}; {"prompt", "completion"} with
    two texts or two lists of messages; {"instruction", "input", "output"}; {"question", "answer"}. docs/chat.md describes the
    other fields.
    """
    document = checked_document(document)
    prompt, completion = document.get("prompt"), document.get("completion")
    for name in ("messages", "conversations"):
        if document.get(name) not in (None, ""):  # a cell of a table may be empty
            messages = message_list(document[name], name)
            return _conversation(messages, 0, document, {name, *_repeated_prompt(prompt, messages)})
    if prompt is None and completion is None:
        if (question := question_of(document)) is None or document.get(QUESTIONS[question[0]]) is None:
            raise unknown_layout(document)
        name, text, used = question
        answer = QUESTIONS[name]
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text_of(document, answer)}]
        return _conversation(messages, 0, document, {*used, answer})
    if prompt is None:
        raise missing_field(document, "the document has a completion but no prompt", "prompt")
    if completion is None:
        raise missing_field(document, "the document has a prompt but no completion", "completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise MalformedConversation("the completion is empty")
        _check_document_weight(document)
        return PromptCompletion(
            prompt, completion, unused_fields(document, ("prompt", "completion", "weight", "train"))
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = [*message_list(prompt, "prompt"), *message_list(completion, "completion")]
        return _conversation(messages, len(prompt), document, {"prompt", "completion"})
    raise MalformedConversation("prompt and completion are neither both text nor both lists of messages")


def _repeated_prompt(prompt: Any, messages: Sequence[Any]) -> tuple[str, ...]:
    """Return ("prompt",) if the prompt is the text of a message, as in datasets that repeat the first question."""
    return ("prompt",) if any(isinstance(m, Mapping) and m.get("content") == prompt for m in messages) else ()


def checked_document(document: Any) -> Mapping[str, Any]:
    """Return a document. Raises MalformedConversation if it is not an object, or no text that a tokenizer accepts."""
    if isinstance(document, list):
        raise MalformedConversation('the document is a list; a list of messages is written as {"messages": [...]}')
    if not isinstance(document, Mapping):
        raise MalformedConversation("the document is not a JSON object")
    if has_lone_surrogate(json.dumps(document, ensure_ascii=False, default=str)):
        raise MalformedConversation("the document contains a lone surrogate")
    return document


def unused_fields(document: Mapping[str, Any], used: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the fields that have no meaning. Raises MalformedConversation if one may change what is trained on."""
    consequential, others = unused(document, used)
    if consequential:
        raise MalformedConversation(
            f"the document has the field {consequential[0]}, which may change what is trained on and is not supported here; "
            "remove the field, or list it in data.ignored_fields"
        )
    return tuple(others)


def message_list(value: Any, name: str) -> list[Any]:
    """Return a list of messages in OpenAI's format. The list, and each message, may be its JSON text."""
    value = _from_json(value, name, "a list")
    messages = []
    for i, message in enumerate(_list(value, name), start=1):
        message = _from_json(message, f"message {i}", "an object")
        is_sharegpt = isinstance(message, Mapping) and (
            "from" in message or (name == "conversations" and "role" not in message)
        )
        messages.append(_from_sharegpt(message, f"message {i}") if is_sharegpt else message)
    return messages


def _list(value: Any, name: str) -> list:
    if not isinstance(value, list):
        raise MalformedConversation(f"{name} is not a list")
    return value


def _from_sharegpt(turn: Any, label: str) -> Any:
    sender = _word(turn, "from", tuple(_SHAREGPT_ROLES), label, "is from")
    if turn.get("value") is None:
        raise missing_field(turn, f"{label} has no value", "content")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    for name in ("role", "content"):
        if not is_absent(others.get(name)):
            raise MalformedConversation(f"{label} has both {'from' if name == 'role' else 'value'} and {name}")
    return others | {"role": _SHAREGPT_ROLES[sender], "content": turn["value"]}


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


def _conversation(
    messages: Sequence[Any], prompt_length: int, document: Mapping[str, Any], used: set[str]
) -> Conversation:
    """Parse messages and the fields beside them.

    Args:
        messages: messages in OpenAI's format.
        prompt_length: number of leading messages that form the prompt.
        document: the document that contains them.
        used: names of the document's fields that contain them.
    """
    if not messages:
        raise MalformedConversation("the conversation has no messages")
    names = unused_fields(document, (*used, *BESIDE_MESSAGES))
    _check_document_weight(document)
    parsed = [_message(message, f"message {i}") for i, message in enumerate(messages, start=1)]
    weights = [_pop_weight(message, f"message {i}") for i, message in enumerate(parsed, start=1)]
    systems = [i for i, message in enumerate(parsed) if message["role"] == "system"]
    if len(systems) > 1:
        raise MalformedConversation(f"the conversation has {len(systems)} system messages; at most one is allowed")
    if systems and systems[0] != 0:
        raise MalformedConversation(f"message {systems[0] + 1} is a system message; only the first message may be one")
    answers = [i for i, message in enumerate(parsed) if message["role"] == "assistant"]
    if not answers:
        raise MalformedConversation("the conversation has no assistant message")
    loss_mask = [i in answers and i >= prompt_length and weight for i, weight in enumerate(weights)]
    if not any(loss_mask):
        raise MalformedConversation("the conversation has no assistant message to train on")
    system = document.get("system")
    if not is_absent(system):
        if not isinstance(system, str):
            raise MalformedConversation("the document's system is not text")
        if systems and content_text(parsed[0]) != system:
            raise MalformedConversation("the document's system differs from its system message")
        if not systems:
            parsed, loss_mask = [{"role": "system", "content": system}, *parsed], [False, *loss_mask]
    arguments = document.get("chat_template_kwargs")
    if not is_absent(arguments) and not isinstance(arguments, Mapping):
        raise MalformedConversation("chat_template_kwargs is not an object")
    arguments = {name: value for name, value in (arguments or {}).items() if value is not None}
    return Conversation(tuple(parsed), tuple(loss_mask), _tools(document), arguments, names)


def _tools(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...] | None:
    """Return the descriptions of the tools. `functions` is the field of OpenAI's earlier format."""
    tools, functions = (_from_json(document.get(name), name, "a list of objects") for name in ("tools", "functions"))
    if not is_absent(functions):
        if not is_absent(tools):
            raise MalformedConversation("the document has both tools and functions")
        tools = [{"type": "function", "function": function} for function in _list(functions, "functions")]
    if is_absent(tools):
        return None
    if isinstance(tools, list):
        tools = [_from_json(tool, "a tool", "an object") for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise MalformedConversation("tools is not a list of objects")
    return tuple(tools)


def _from_json(value: Any, label: str, kind: str) -> Any:
    """Return a value, or the value of its JSON text if it is text. Blank text counts as null. kind: what the text should hold."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError:
        hint = " (Python's notation is not JSON)" if value.lstrip().startswith(("[{'", "{'")) else ""
        raise MalformedConversation(f"{label} is not {kind}, nor the JSON text of one{hint}") from None


def _message(message: Any, label: str) -> Message:
    if isinstance(message, Mapping) and message.get("role") == "function":  # OpenAI's earlier name
        message = {**message, "role": "tool"}
    role = _word(message, "role", ROLES, label, "has the role")
    # Null fields are dropped, as in transformers, because templates test whether a field exists. So are empty lists of calls.
    parsed = {name: value for name, value in message.items() if name == "content" or not is_absent(value)}
    if parsed.get("content") is None:
        parsed.pop("content", None)
    calls = _calls(parsed, role, label)
    if calls:
        parsed["tool_calls"] = calls
    if "content" in parsed:
        _check_content(parsed["content"], role, label)
    elif not calls:
        raise missing_field(message, f"{label} has no content", "content")
    for name in REASONING:
        if not isinstance(parsed.get(name, ""), str):
            raise MalformedConversation(f"{label}: {name} is not text")
    if role == "assistant" and not calls and not content_text(parsed).strip():
        raise MalformedConversation(f"{label} is an empty answer")
    return parsed


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


def _check_content(content: Any, role: str, label: str) -> None:
    if isinstance(content, str):
        return
    is_typed = isinstance(content, list) and all(isinstance(part, Mapping) and "type" in part for part in content)
    if role == "tool" and isinstance(content, list | Mapping) and not is_typed:
        return
    if not isinstance(content, list):
        raise MalformedConversation(f"{label} has content that is neither text nor a list of content parts")
    for part in content:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type != "text":
            raise MalformedConversation(
                f"{label} has a content part of type {_abbreviated(part_type)}; only text is supported"
            )
        if not isinstance(part.get("text"), str):
            raise MalformedConversation(f"{label} has a content part without text")


def _calls(message: Message, role: str, label: str) -> list[Mapping[str, Any]]:
    """Return the tool calls of a message, each with a function name and arguments. Remove the field function_call of OpenAI's
    earlier format."""
    calls = _from_json(message.get("tool_calls"), f"{label}: tool_calls", "a list")
    if "function_call" in message:
        if calls:
            raise MalformedConversation(f"{label} has both tool_calls and function_call")
        function = _from_json(message.pop("function_call"), f"{label}: function_call", "an object")
        calls = [{"type": "function", "function": function}]
    if is_absent(calls):
        message.pop("tool_calls", None)
        return []
    if role != "assistant":
        raise MalformedConversation(f"{label} has tool_calls, but only the assistant can call tools")
    parsed = []
    for call in _list(calls, f"{label}: tool_calls"):
        call = _from_json(call, f"{label}: a tool call", "an object")
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise MalformedConversation(f"{label} has a tool call without a function name")
        function = {**function, "arguments": _arguments(function.get("arguments"), label)}
        parsed.append({**call, "function": function} if "function" in call else function)
    return parsed


def _arguments(arguments: Any, label: str) -> Mapping[str, Any] | str:
    """Return the arguments of a call: an object, or the JSON text of one, as OpenAI's format has it."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    value = _from_json(arguments, f"{label}: the text of a call's arguments", "an object")
    if not isinstance(value, Mapping):
        raise MalformedConversation(f"{label} has a tool call whose arguments are not an object")
    return arguments


def _check_document_weight(document: Mapping[str, Any]) -> None:
    """Raise MalformedConversation if the document says that it is not trained on."""
    if not _is_trained(document, "the document", True):
        raise MalformedConversation("the document is marked as not to be trained on")


def _pop_weight(message: Message, label: str) -> bool:
    """Remove the weight from a message. Return whether the message is trained on. Templates do not expect this field."""
    if message["role"] != "assistant" and message.get("train") is True:
        raise MalformedConversation(f"{label} has train = true, but only answers can be trained on")
    is_trained = _is_trained(message, label, message["role"] == "assistant")
    message.pop("weight", None)
    message.pop("train", None)
    return is_trained


def _is_trained(fields: Mapping[str, Any], label: str, default: bool) -> bool:
    """Return what the fields weight (OpenAI's format) and train say."""
    weight, train = fields.get("weight"), fields.get("train")
    if weight is not None and weight not in (0, 1):
        raise MalformedConversation(f"{label} has the weight {_abbreviated(weight)}; expected 0 or 1")
    if train is not None and not isinstance(train, bool):
        raise MalformedConversation(f"{label} has train = {_abbreviated(train)}; expected true or false")
    if weight is not None and train is not None and bool(weight) != train:
        raise MalformedConversation(f"{label} has the weight {_abbreviated(weight)} and train = {_abbreviated(train)}")
    if weight is not None:
        return bool(weight)
    return default if train is None else train


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
