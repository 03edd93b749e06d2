"""Conversations: the messages of a document, which of them are trained on, and the fields beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.data.chat.chat_layouts import Document, PromptAndAnswer
from trainer.data.chat.fields import MalformedConversation, from_json, is_absent, require_json
from trainer.data.chat.messages import Message, content_text, read_message


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    loss_mask: tuple[bool, ...]
    """One flag per message: whether to train on it. Only messages of the assistant can be trained on."""
    tools: tuple[Mapping[str, Any], ...] | None = None
    """Descriptions of the tools that the assistant may call. The template renders the descriptions."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, by name."""
    unused: frozenset[str] = frozenset()
    """Names of fields in messages that have no meaning."""


def read_conversation(found: PromptAndAnswer) -> Conversation:
    """Return the conversation of a prompt and an answer that are lists of messages. Raises MalformedConversation."""
    document, messages, loss_mask, unused = found.document, *_messages(found.prompt, found.answer)
    system = _system(document, messages)
    if system is not None:
        messages, loss_mask = [{"role": "system", "content": system}, *messages], [False, *loss_mask]
    return Conversation(tuple(messages), tuple(loss_mask), _tools(document), _arguments(document), unused)


def _messages(prompt: Sequence[Any], answer: Sequence[Any]) -> tuple[list[Message], list[bool], frozenset[str]]:
    """Return all messages, whether each of them is trained on, and the names of fields in them that have no meaning."""
    read = [read_message(message, f"message {i}") for i, message in enumerate([*prompt, *answer], start=1)]
    if not read:
        raise MalformedConversation("the conversation has no messages")
    messages = [message for message, *_ in read]
    systems = [i for i, message in enumerate(messages, start=1) if message["role"] == "system"]
    if len(systems) > 1:
        raise MalformedConversation(f"the conversation has {len(systems)} system messages; at most one is allowed")
    if systems not in ([], [1]):
        raise MalformedConversation(f"message {systems[0]} is a system message; only the first message may be one")
    if not any(message["role"] == "assistant" for message in messages):
        raise MalformedConversation("the conversation has no assistant message")
    loss_mask = [is_target and i >= len(prompt) for i, (_, is_target, _) in enumerate(read)]
    if not any(loss_mask):
        raise MalformedConversation("the conversation has no assistant message to train on")
    return messages, loss_mask, frozenset().union(*(unused for *_, unused in read))


def _system(document: Document, messages: Sequence[Message]) -> str | None:
    """Return the text of a system message that the document has beside its messages, unless they begin with it."""
    system = document.get("system")
    if is_absent(system):
        return None
    if not isinstance(system, str):
        raise MalformedConversation("the document's system is not text")
    if messages[0]["role"] != "system":
        return system
    if content_text(messages[0]) != system:
        raise MalformedConversation("the document's system differs from its system message")
    return None


def _tools(document: Document) -> tuple[Mapping[str, Any], ...] | None:
    """Return the descriptions of the tools. `functions` is the field of OpenAI's earlier format."""
    tools, functions = (from_json(document.get(name), name, "a list of objects") for name in ("tools", "functions"))
    if not is_absent(functions):
        if not is_absent(tools):
            raise MalformedConversation("the document has both tools and functions")
        if not isinstance(functions, list):
            raise MalformedConversation("functions is not a list")
        described = [from_json(function, "a function", "an object") for function in functions]
        if not all(isinstance(function, Mapping) for function in described):
            raise MalformedConversation("functions is not a list of objects")
        tools = [{"type": "function", "function": function} for function in described]
    if is_absent(tools):
        return None
    if isinstance(tools, list):
        tools = [from_json(tool, "a tool", "an object") for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise MalformedConversation("tools is not a list of objects")
    require_json(tools, "tools")
    return tuple(tools)


def _arguments(document: Document) -> dict[str, Any]:
    arguments = document.get("chat_template_kwargs")
    if not is_absent(arguments) and not isinstance(arguments, Mapping):
        raise MalformedConversation("chat_template_kwargs is not an object")
    require_json(arguments, "chat_template_kwargs")
    return {name: value for name, value in (arguments or {}).items() if value is not None}
