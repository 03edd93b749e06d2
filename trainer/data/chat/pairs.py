"""Parsing of preference pairs. Each pair becomes two documents in a format of conversations.py."""

import itertools
from collections.abc import Mapping
from typing import Any

from trainer.data.chat.conversations import BESIDE_MESSAGES, checked_document, message_list, unused_fields
from trainer.data.chat.fields import is_absent
from trainer.data.chat.layouts import MalformedConversation, missing_field, question_of, unknown_layout


def parse_preference(document: Any) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Parse a preference pair. Return a document {"prompt", "completion", ...} with the chosen answer, one with the rejected
    answer, and the names of the fields that have no meaning here. Raises MalformedConversation.

    Formats: {"prompt", "chosen", "rejected"} with texts, or with lists of messages. Without a list of messages as the prompt, the
    leading messages that both answers share are the prompt. If they share none, the prompt is the text of the user's message; it
    may also be {"question"} or {"instruction", "input"}. ShareGPT's {"conversations"} may be the prompt.
    """
    document = checked_document(document)
    chosen, rejected = (document.get(name) for name in ("chosen", "rejected"))
    if chosen is None and rejected is None:
        raise unknown_layout(document, is_pair=True)
    for name in ("chosen", "rejected"):
        if document.get(name) is None:
            raise missing_field(document, f"the document has no {name} answer", name)
    if chosen == rejected:
        raise MalformedConversation("the chosen and the rejected answer are equal")
    prompt, used = _prompt(document)
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        raise missing_field(document, "the document has no prompt", "prompt")
    # Some datasets repeat the chosen conversation as messages.
    repeated = ("messages",) if document.get("messages") in (chosen, prompt) else ()
    names = unused_fields(document, (*used, "chosen", "rejected", *BESIDE_MESSAGES, *repeated))
    for name in ("chosen", "rejected"):
        if isinstance(document[name], str) and not document[name].strip():
            raise MalformedConversation(f"the {name} answer is empty")
    # An answer may be one message. Texts are answers to a message, if the prompt is one.
    is_message = isinstance(prompt, list) or used != {"prompt"}
    chosen, rejected = (
        _messages(answer, name, is_message) for name, answer in (("chosen", chosen), ("rejected", rejected))
    )
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _split_pair(prompt, chosen, rejected)
    if prompt is None:
        raise MalformedConversation("the document has no prompt")
    common = {name: document[name] for name in BESIDE_MESSAGES if name in document}
    pair = ({"prompt": prompt, "completion": answer} | common for answer in (chosen, rejected))
    return (*pair, names)


def _prompt(document: Mapping[str, Any]) -> tuple[Any, set[str]]:
    """Return the prompt of a pair, or None if the answers contain it, and the names of its fields."""
    prompt = document.get("prompt")
    if prompt is None and (question := question_of(document)) is not None:
        _, text, used = question
        return text, used
    if prompt is None and not is_absent(document.get("conversations")):
        return message_list(document["conversations"], "conversations"), {"conversations"}
    return (message_list(prompt, "prompt") if isinstance(prompt, list) else prompt), {"prompt"}


def _messages(answer: Any, name: str, is_message: bool) -> Any:
    """Return an answer as a list of messages, or unchanged if it is a text that continues a text. is_message: whether a text is
    the content of a message."""
    if isinstance(answer, str) and is_message:
        return [{"role": "assistant", "content": answer}]
    if isinstance(answer, Mapping):
        answer = [answer]
    return message_list(answer, name) if isinstance(answer, list) else answer


def _split_pair(prompt: Any, chosen: list, rejected: list) -> tuple[Any, list, list]:
    """Return the messages before both answers, and the messages of each answer."""
    if isinstance(prompt, list):
        if prompt and all(answer[: len(prompt)] == prompt for answer in (chosen, rejected)):
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        equal = (a == b for a, b in zip(chosen[:-1], rejected[:-1], strict=False))
        shared = sum(itertools.takewhile(bool, equal))
        if shared:
            if prompt is not None and not any(
                isinstance(m, Mapping) and m.get("content") == prompt for m in chosen[:shared]
            ):
                raise MalformedConversation("the prompt is not the text of a message that both conversations share")
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        elif chosen[:1] == rejected[:1] and chosen:
            name = "chosen" if len(chosen) == 1 else "rejected"
            raise MalformedConversation(f"the {name} conversation has only the message that both share, so no answer")
        elif prompt is not None:
            prompt = [{"role": "user", "content": prompt}]
        elif {"system", "user"} & {_first_role(chosen), _first_role(rejected)}:
            raise MalformedConversation("the first messages of chosen and rejected differ, so the two prompts differ")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if prompt is not None and (role := _first_role(answer)) in ("system", "user"):
            raise MalformedConversation(f"the {name} answer begins with a {role} message, so the two prompts differ")
    return prompt, chosen, rejected


def _first_role(messages: list) -> str | None:
    role = messages[0].get("role") if messages and isinstance(messages[0], Mapping) else None
    return role if isinstance(role, str) else None
