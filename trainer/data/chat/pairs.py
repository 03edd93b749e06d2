"""Parsing of preference pairs. Each pair becomes two documents in a format of conversations.py."""

import itertools
from collections.abc import Mapping
from typing import Any

from trainer.data.chat.conversations import BESIDE_MESSAGES, MalformedConversation, checked_document, unused_fields


def parse_preference(document: Any) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Parse a preference pair. Return a document {"prompt", "completion", ...} with the chosen answer, one with the rejected
    answer, and the names of the fields that have no meaning here. Raises MalformedConversation.

    Formats: {"prompt", "chosen", "rejected"} with texts, or with lists of messages. Without a list of messages as the prompt, the
    leading messages that both answers share are the prompt. If they share none, the prompt is the text of the user's message.
    """
    document = checked_document(document)
    prompt, chosen, rejected = (document.get(name) for name in ("prompt", "chosen", "rejected"))
    for name in ("chosen", "rejected"):
        if document.get(name) is None:
            raise MalformedConversation(f"the document has no {name} answer")
    if chosen == rejected:
        raise MalformedConversation("the chosen and the rejected answer are equal")
    # Some datasets repeat the chosen conversation as messages.
    repeated = ("messages",) if document.get("messages") in (chosen, prompt) else ()
    names = unused_fields(document, ("prompt", "chosen", "rejected", *BESIDE_MESSAGES, *repeated))
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _split_pair(prompt, chosen, rejected)
    if prompt is None:
        raise MalformedConversation("the document has no prompt")
    common = {name: document[name] for name in BESIDE_MESSAGES if name in document}
    pair = ({"prompt": prompt, "completion": answer} | common for answer in (chosen, rejected))
    return (*pair, names)


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
        elif prompt is not None:
            prompt = [{"role": "user", "content": prompt}]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        role = answer[0].get("role") if answer and isinstance(answer[0], Mapping) else None
        if prompt is not None and role in ("system", "user"):
            raise MalformedConversation(f"the {name} answer begins with a {role} message, so the two prompts differ")
    return prompt, chosen, rejected
