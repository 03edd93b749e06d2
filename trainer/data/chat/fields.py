"""The fields of documents and messages: which mean nothing, and which would change what is trained on."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from trainer.base.config.schema.data import MESSAGE_LISTS

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with the reasoning of an answer. transformers passes it to templates as reasoning_content and thinking."""

_LOSS_WORDS = frozenset(
    """weight weights mask masks masked loss train trained trainable training learn supervised ignore skip
    exclude""".split()  # noqa: SIM905  a list of quoted words is unreadable
)
"""Words in the names of fields that select what is trained on, such as loss_mask and trainOnTurn."""
_CONSEQUENTIAL = frozenset(
    # conversations, and parts of them
    """messages conversations conversation dialog dialogue dialogs chat turns history text texts prompt prompts completion
    completions chosen rejected instruction instructions input inputs output outputs query question questions answer answers
    response responses context content value label labels input_ids
    chosen_messages rejected_messages end_turn recipient
    system system_prompt system_message developer system_text preamble
    tools functions tool_calls tool_results available_tools function_call function_calls calls
    reasoning_content reasoning thinking thought thoughts reasoning_details thinking_blocks rationale chain_of_thought cot
    enable_thinking documents chat_template chat_template_kwargs template_kwargs
    image images audio audios video videos input_audio refusal""".split()  # noqa: SIM905  a list of quoted words is unreadable
)


LISTS = ("messages", "conversations")
"""Fields of a document that hold messages only. The others of MESSAGE_LISTS may hold plain text."""


class MalformedConversation(Exception):
    """Error whose message states in one line why a document is not a conversation."""


def is_absent(value: Any) -> bool:
    """Return whether a field has no value. Tables have all columns in all rows, so that null and empty values mean nothing."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def is_consequential(name: str) -> bool:
    """Return whether a field of this name may change what is trained on, so that it must not be ignored silently."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    words = [word.lower() for word in words]
    return "_".join(words) in _CONSEQUENTIAL or not _LOSS_WORDS.isdisjoint(words)


def unused_fields(document: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the names of a document's fields that have no meaning. Raises MalformedConversation if one of them may change what
    is trained on."""
    unused = tuple(name for name, value in document.items() if name not in known and not is_absent(value))
    for name in filter(is_consequential, unused):
        raise MalformedConversation(
            f"the document has the field {name}, which may change what is trained on and is not supported here; "
            "remove the field, or list it in data.ignored_fields"
        )
    return unused


def from_json(value: Any, label: str, kind: str) -> Any:
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


def without(document: Any, names: Collection[str]) -> tuple[Any, set[str]]:
    """Return a document without the fields `names`, at the top and in each message, and the names of those that it had."""

    def kept(fields: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        removed = {name for name, value in fields.items() if name in names and not is_absent(value)}
        return {name: value for name, value in fields.items() if name not in names}, removed

    return with_changed_fields(document, kept, kept) if names else (document, set())


Change = Callable[[Mapping[str, Any]], tuple[dict[str, Any], set[str]]]
"""Function that returns changed fields, and the names of those that it took away."""


def with_changed_fields(document: Any, of_document: Change, of_message: Change | None) -> tuple[Any, set[str]]:
    """Return a document with changed fields, at the top and in each message, and all names that the changes returned. A value
    that is no object has no fields; whoever reads it explains it."""
    if not isinstance(document, Mapping):
        return document, set()
    document, names = of_document(document)
    for field in MESSAGE_LISTS if of_message else ():
        messages = document.get(field)
        if isinstance(messages, str) and field in LISTS:
            with suppress(ValueError, RecursionError):
                messages = json.loads(messages)
        if isinstance(messages, list):
            changed = [of_message(m) if isinstance(m, Mapping) else (m, set()) for m in messages]
            document[field] = [message for message, _ in changed]
            names = names.union(*(found for _, found in changed))
    return document, names
