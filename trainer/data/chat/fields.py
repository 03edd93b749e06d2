"""The fields of documents and messages: which mean nothing, and which would change what is trained on."""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainer.base.config.schema.data import MESSAGE_LISTS
from trainer.data.json_text import InvalidJson, RepeatedName, has_lone_surrogate, parse_json

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with the reasoning of an answer. transformers passes it to templates as reasoning_content and thinking."""

_WORDS = frozenset(
    """weight weights mask masks masked loss train trained trainable training learn supervised ignore skip
    exclude image images audio audios video videos""".split()  # noqa: SIM905  a list of quoted words is unreadable
)
"""Words in the names of fields that select what is trained on, such as loss_mask and trainOnTurn, or hold no text, such as
image_url."""
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
    refusal""".split()  # noqa: SIM905  a list of quoted words is unreadable
)


_IDENTITIES = frozenset(
    """id ids uuid guid hash digest key index idx number position url urls uri link time timestamp date created updated at
    parent path file filename""".split()  # noqa: SIM905  a list of quoted words is unreadable
)
"""Last words of names of fields that identify."""
_DESCRIPTIONS = frozenset(
    """source sources origin license author annotator username name title topic topics category categories type kind domain
    domains task tasks genre subject tag tags keyword keywords difficulty level split subset dataset lang language languages
    locale country version model models provider score scores rating ratings rank votes length len size count tokens
    duration metadata meta info stats statistics control""".split()  # noqa: SIM905  as above
)
"""Last words of names of fields that describe."""
_NUMBERS = ("num", "n", "number", "count")
"""First words of names of counts, such as num_turns."""
_LONGEST_DESCRIPTION = 1000
"""Maximum number of characters of what a field with such a name holds. More is a text, such as a document named "source"."""
_CALLS = ("tool_calls", "function_call")
"""Fields of a message that hold objects with fields of their own, or their JSON text."""
WAY_OUT = "remove it, read it under another name by data.columns, or list it in data.ignored_fields"
"""What a user can do about a field that may matter."""


PLAIN_TEXT = "plain text, without the chat template"
"""What the list of unused fields says about documents whose prompt and answer are plain text."""
LISTS = ("messages", "conversations")
"""Fields of a document that hold messages only. The others of MESSAGE_LISTS may hold plain text."""


class MalformedConversation(Exception):
    """Error whose message states in one line why a document is not a conversation."""


def is_absent(value: Any) -> bool:
    """Return whether a field has no value. Tables have all columns in all rows, so that null and empty values mean nothing."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def may_matter(name: str, value: Any) -> bool:
    """Return whether a field that nothing uses may change what is trained on, so that the user must decide about it.

    Its name tells, or its value: a flag, a text, a list or an object may matter. A number and a single word do not, nor does what
    only identifies or describes its document, such as a URL.
    """
    words = _words_of(name)
    if "_".join(words) in _CONSEQUENTIAL or not _WORDS.isdisjoint(words) or _is_flag(value):
        return True
    if isinstance(value, int | float):
        return False
    if words and (words[-1] in _IDENTITIES | _DESCRIPTIONS or words[0] in _NUMBERS):
        return len(value if isinstance(value, str) else json.dumps(value)) > _LONGEST_DESCRIPTION
    is_word = isinstance(value, str) and re.fullmatch(r"[!-~]{1,64}", value) is not None
    return not is_word or not _CONSEQUENTIAL.isdisjoint(words)


def _is_flag(value: Any) -> bool:
    """In tables of text, flags are words."""
    return isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"))


def is_identity(name: str) -> bool:
    """Return whether a field only identifies the message that has it, so that each message has another value."""
    words = _words_of(name)
    return bool(words) and words[-1] in _IDENTITIES


def _words_of(name: str) -> list[str]:
    """Return the words of a field's name, such as those of lossMask and loss_mask, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)]


def unused_fields(fields: Mapping[str, Any], known: Collection[str], owner: str = "the document") -> tuple[str, ...]:
    """Return the names of fields that have no meaning.

    Args:
        fields: Those of a document, or of a part of one.
        known: Names of those that have a meaning.
        owner: What has the fields, for messages.

    Raises:
        MalformedConversation: Some of the others may change what is trained on.
    """
    unused = {name: value for name, value in fields.items() if name not in known and not is_absent(value)}
    if names := [name for name, value in unused.items() if may_matter(name, value)]:
        raise MalformedConversation(consequential(f"{owner} has", names, "not supported here"))
    return tuple(unused)


def consequential(owner: str, names: Sequence[str], why: str) -> str:
    """Return the message about fields that may matter.

    Args:
        owner: What has them, with its verb.
        names: Their names.
        why: Why they are not used.
    """
    fields, are, them = ("fields", "are", "them") if len(names) > 1 else ("field", "is", "it")
    return (
        f"{owner} the {fields} {', '.join(names)}, which may change what is trained on and {are} {why}; "
        f"{WAY_OUT.replace(' it', f' {them}')}"
    )


def from_json(value: Any, label: str, kind: str) -> Any:
    """Return a value, or the value of its JSON text if it is text. Blank text counts as null. kind: what the text should hold."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        parsed = parse_json(value)
    except RepeatedName as error:
        raise MalformedConversation(f"{label}: {error}") from None
    except InvalidJson:
        hint = " (Python's notation is not JSON)" if value.lstrip().startswith(("{'", "[{'")) else ""
        raise MalformedConversation(f"{label} is not {kind}, nor the JSON text of one{hint}") from None
    require_json(parsed, label)
    return parsed


def require_json(value: Any, label: str) -> None:
    """Raise MalformedConversation if a value contains a number that JSON does not have, such as NaN, or a lone surrogate: a
    template would write text that is no JSON, or no text."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except TypeError as error:  # a value of a Python program
        raise MalformedConversation(f"{label} contains a value that JSON does not have: {error}") from None
    except ValueError:
        raise MalformedConversation(f"{label} contains NaN or an infinite number, which JSON does not have") from None
    if has_lone_surrogate(text):
        raise MalformedConversation(f"{label} contains a lone surrogate")


def without(document: Any, names: Collection[str]) -> tuple[Any, set[str]]:
    """Return a document without the fields `names`, at the top, in each message, and in its content parts, calls and functions.
    Also return the names of those that it had."""

    def kept(fields: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        removed = {name for name, value in fields.items() if name in names and not is_absent(value)}
        return {name: value for name, value in fields.items() if name not in names}, removed

    def kept_of_message(fields: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
        message, removed = kept(fields)
        for name in _CALLS:
            if name in message:
                message[name], found = _changed_parts(_parsed(message[name]), kept)
                removed |= found
        if isinstance(content := message.get("content"), list):  # else a text, or the data that a tool has returned
            parts = [kept(part) if _is_part(part) else (part, set()) for part in content]
            message["content"], removed = [part for part, _ in parts], removed.union(*(found for _, found in parts))
        return message, removed

    return with_changed_fields(document, kept, kept_of_message) if names else (document, set())


def _changed_parts(value: Any, change: "Change") -> tuple[Any, set[str]]:
    """Return the calls or the function of a message with changed fields, and what the changes returned."""
    if isinstance(value, list):
        changed = [_changed_parts(entry, change) for entry in value]
        return [entry for entry, _ in changed], set().union(*(found for _, found in changed))
    if not isinstance(value, Mapping):
        return value, set()
    fields, names = change(value)
    if isinstance(fields.get("function"), Mapping):
        fields["function"], found = change(fields["function"])
        names = names | found
    return fields, names


def _is_part(value: Any) -> bool:
    """Return whether an entry of a message's content is a part such as a text or an image."""
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _parsed(value: Any) -> Any:
    """Return the list or the object of a JSON text, or any other value."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            return parse_json(value)
    return value


_PYTHON_MESSAGES = re.compile(r"\s*\[?\s*\{'(role|from)'")
"""Beginning of messages in Python's notation."""


def messages_in(value: Any, name: str, roles: Collection[str] = ("role", "from")) -> Any:
    """Return the messages whose JSON text a field holds, or the value if it is another text, or no text.

    Args:
        value: Value of the field.
        name: Its name: one of MESSAGE_LISTS.
        roles: Names of fields of which each message has one.

    Raises:
        MalformedConversation: The messages are in Python's notation, or have two fields with one name.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    if _PYTHON_MESSAGES.match(value):
        raise MalformedConversation(f"{name} is not the JSON text of messages (Python's notation is not JSON)")
    try:
        found = parse_json(value)
    except RepeatedName as error:
        raise MalformedConversation(f"{name}: {error}") from None
    except InvalidJson:
        return value
    listed = found if isinstance(found, list) else [found]
    is_messages = listed and all(isinstance(m, Mapping) and any(role in m for role in roles) for m in listed)
    return found if is_messages else value


Change = Callable[[Mapping[str, Any]], tuple[dict[str, Any], set[str]]]
"""Function that returns changed fields, and the names of those that it took away."""


def with_changed_fields(
    document: Any, of_document: Change, of_message: Change | None, roles: Collection[str] = ("role", "from")
) -> tuple[Any, set[str]]:
    """Return a document with changed fields, at the top and in each message, and all names that the changes returned. A value
    that is no object has no fields; whoever reads it explains it. roles: see messages_in."""
    if not isinstance(document, Mapping):
        return document, set()
    document, names = of_document(document)
    for field in MESSAGE_LISTS if of_message else ():
        messages = document.get(field)
        messages = _parsed(messages) if field in LISTS else messages_in(messages, field, roles)
        if isinstance(messages, list):
            changed = [of_message(m) if isinstance(m, Mapping) else (m, set()) for m in map(_parsed, messages)]
            document[field] = [message for message, _ in changed]
            names = names.union(*(found for _, found in changed))
    return document, names
