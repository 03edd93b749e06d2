"""Layouts of chats: which fields of a document hold a conversation or a preference pair."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.config.schema.data import MESSAGE_LISTS
from trainer.data.chat.columns import missing_field
from trainer.data.chat.fields import LISTS, MalformedConversation, is_absent, messages_in, unused_fields
from trainer.data.chat.messages import is_trained, message_list
from trainer.data.json_text import has_lone_surrogate

Document = Mapping[str, Any]


@dataclass(frozen=True)
class ChatLayout:
    prompt: tuple[str, ...]
    """Fields before the answer. A second one continues the text of the first, and may be absent. Empty: the answers hold the
    whole conversation."""
    answers: tuple[str, ...]
    """One field, or those of the chosen and the rejected answer."""
    is_plain: bool = False
    """Whether a prompt that is a text is plain text, which the answer continues, instead of a message of the user."""
    may_repeat: str = ""
    """Field that some datasets have in addition. It must repeat what the others hold."""

    def lacking(self, document: Document) -> list[str]:
        """Return the fields that a document lacks: null or empty ones. Only a plain prompt may be empty."""
        values = [document.get(name) for name in self.prompt]
        is_empty = all(map(is_absent, values)) and not self.is_plain
        lacking = [name for name in self.prompt[:1] if values[0] is None or is_empty]
        return lacking + [name for name in self.answers if is_absent(document.get(name))]


CHATS = {
    "messages": ChatLayout((), ("messages",), may_repeat="prompt"),
    "conversations": ChatLayout((), ("conversations",), may_repeat="prompt"),
    "prompt and completion": ChatLayout(("prompt",), ("completion",), is_plain=True),
    "instruction, input and output": ChatLayout(("instruction", "input"), ("output",)),
    "question and answer": ChatLayout(("question",), ("answer",)),
}
_PAIR = ("chosen", "rejected")
PAIRS = {
    "prompt, chosen and rejected": ChatLayout(("prompt",), _PAIR, is_plain=True, may_repeat="messages"),
    "instruction, input, chosen and rejected": ChatLayout(("instruction", "input"), _PAIR, may_repeat="messages"),
    "question, chosen and rejected": ChatLayout(("question",), _PAIR, may_repeat="messages"),
    "conversations, chosen and rejected": ChatLayout(("conversations",), _PAIR, may_repeat="messages"),
    "chosen and rejected": ChatLayout((), _PAIR, may_repeat="messages"),
}
_TEXTS = ("instruction", "input", "output", "question", "answer")
"""Fields that hold texts only. Those of LISTS hold messages only; all others hold either."""
_BESIDE_TEXT = ("weight", "train")
"""Fields beside plain texts, which read_document reads. Those below may stand beside messages (conversations.py)."""
_BESIDE_MESSAGES = (*_BESIDE_TEXT, "tools", "functions", "system", "chat_template_kwargs")


@dataclass(frozen=True)
class PromptAndAnswer:
    """A prompt and its answer: two texts, or two lists of messages in OpenAI's format, which are not checked yet."""

    prompt: Any
    answer: Any
    document: Document
    """The document that holds them, for the fields beside them."""
    unused: tuple[str, ...]
    """Names of the document's fields that have no meaning, such as an id."""


def read_document(document: Any, layouts: Mapping[str, ChatLayout]) -> list[PromptAndAnswer]:
    """Return the prompt of a document with each of its answers: one of a conversation, the chosen and the rejected one of a pair.

    Args:
        document: A JSON value.
        layouts: CHATS or PAIRS.

    Raises:
        MalformedConversation: The document has none of the layouts, or is not to be trained on, or has another field that may
            change what is trained on.
    """
    document = _checked_document(document)
    layout = layout_of(document, layouts)
    prompt, answers = _read(document, layout)
    beside = _BESIDE_TEXT if isinstance(prompt, str) else _BESIDE_MESSAGES
    known = {*layout.prompt, *layout.answers, *beside}
    repeated = document.get(layout.may_repeat)
    if _has_text((*prompt, *answers[0]), repeated) or repeated in [document.get(name) for name in known]:
        known.add(layout.may_repeat)
    unused = unused_fields(document, known)
    if not is_trained(document.get("weight"), document.get("train"), "the document"):
        raise MalformedConversation("the document is marked as not to be trained on")
    return [PromptAndAnswer(prompt, answer, document, unused) for answer in answers]


def layout_of(document: Document, layouts: Mapping[str, ChatLayout]) -> ChatLayout:
    """Return the first layout of which a document lacks no field. Raises MalformedConversation if there is none."""
    for layout in layouts.values():
        if not layout.lacking(document):
            return layout
    raise _incomplete(document, layouts)


def _incomplete(document: Document, layouts: Mapping[str, ChatLayout]) -> MalformedConversation:
    """Return the error of a document without any of the layouts. It names what the document lacks to have the nearest one."""
    filled = {name for name, value in document.items() if value not in (None, "")}
    begun = [layout for layout in layouts.values() if filled.intersection(layout.prompt + layout.answers)]
    has_answer = any(filled.intersection(layout.answers) for layout in begun)
    is_other = any(not layout.lacking(document) for layout in (CHATS if layouts is PAIRS else PAIRS).values())
    if begun and (has_answer or not is_other):
        nearest = min(begun, key=lambda layout: len(layout.lacking(document)))
        name, *others = nearest.lacking(document)
        if document.get(name) is not None:
            return MalformedConversation(f"the document's field {name} is empty")
        others += [name for name in nearest.prompt[1:] if document.get(name) is None]
        return missing_field(document, f"the document has no field {name}", name, *others)
    if layouts is PAIRS:
        kind, wanted, hint = "preference pair", ("prompt", "chosen", "rejected"), 'dataset = "chat" reads conversations'
    else:
        kind, wanted, hint = "conversation", ("messages", "question", "answer"), 'dataset = "preference" reads pairs'
    if not is_other:
        hint = 'dataset = "jsonl", "parquet" or "csv" reads texts' if filled == {"text"} else ""
    message = f"the document has none of the layouts of a {kind} ({'; '.join(layouts)})"
    return missing_field(document, message, *wanted, hint=hint)


def _checked_document(document: Any) -> Document:
    """Return a document. Raises MalformedConversation if it is not an object, or no text that a tokenizer accepts."""
    if isinstance(document, list):
        raise MalformedConversation('the document is a list; a list of messages is written as {"messages": [...]}')
    if not isinstance(document, Mapping):
        raise MalformedConversation("the document is not a JSON object")
    if has_lone_surrogate(json.dumps(document, ensure_ascii=False, default=str)):
        raise MalformedConversation("the document contains a lone surrogate")
    return document


def _read(document: Document, layout: ChatLayout) -> tuple[Any, list[Any]]:
    """Return the prompt and the answers: texts, or lists of messages."""
    prompt = _prompt(document, layout)
    answers = [_value(document, name) for name in layout.answers]
    for name, answer in zip(layout.answers, answers, strict=True):
        if isinstance(answer, str) and not answer.strip():
            raise MalformedConversation(f"the document's field {name} is empty")
    if len(answers) == 2:
        prompt, *answers = _pair(document, prompt, *answers, is_plain=layout.is_plain)
    elif prompt is None:
        prompt = []
    elif not layout.is_plain:
        prompt, answers = [_message("user", prompt)], [[_message("assistant", answers[0])]]
    for name, answer in zip(layout.answers, answers, strict=True):
        if not any(isinstance(prompt, kind) and isinstance(answer, kind) for kind in (str, list)):
            raise MalformedConversation(f"prompt and {name} are neither both text nor both lists of messages")
    return prompt, answers


def _prompt(document: Document, layout: ChatLayout) -> Any:
    """Return the text or the messages of the prompt, or None if the answers contain it."""
    if not layout.prompt:
        return None
    first, *others = layout.prompt
    values = [_value(document, name) for name in (first, *others) if name == first or not is_absent(document.get(name))]
    if layout.is_plain or isinstance(values[0], list):
        return values[0]
    text = "\n\n".join(filter(str.strip, values))
    if not text:
        raise MalformedConversation(f"the document's field {first} is empty")
    return text


def _value(document: Document, name: str) -> Any:
    """Return the text or the messages of a field, or any other value. A chosen or rejected answer may be one message."""
    value = document[name]
    value = messages_in(value, name) if name in MESSAGE_LISTS and name not in LISTS else value
    if name in _TEXTS and not isinstance(value, str):
        raise MalformedConversation(f"the document's field {name} is not text")
    if name in _PAIR and isinstance(value, Mapping):
        value = [value]
    return message_list(value, name) if name in LISTS or isinstance(value, list) else value


def _pair(document: Document, prompt: Any, chosen: Any, rejected: Any, is_plain: bool) -> tuple[Any, Any, Any]:
    """Return the prompt of a pair, and what follows it in each answer. Only plain texts stay texts."""
    if document["chosen"] == document["rejected"]:
        raise MalformedConversation("the chosen and the rejected answer are equal")
    if isinstance(prompt, list) or (prompt is not None and not is_plain):
        chosen, rejected = ([_message("assistant", a)] if isinstance(a, str) else a for a in (chosen, rejected))
    elif prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = _turns(chosen) or chosen, _turns(rejected) or rejected
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _split_pair(prompt, chosen, rejected)
    if prompt is None:
        message = "chosen and rejected are texts, but the document has no prompt, which is what both answer"
        raise missing_field(document, message, "prompt")
    return prompt, chosen, rejected


def _turns(text: str) -> list[dict[str, str]]:
    """Return the messages of a text with the marks of Anthropic's dataset hh-rlhf before its turns, or [] if it has none."""
    before, *parts = re.split(r"(?:^|\n\n)(Human|Assistant):", text)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [_message(roles[name], turn.strip()) for name, turn in zip(parts[::2], parts[1::2], strict=True)]
    return turns if len(turns) > 1 and turns[0]["role"] == "user" and not before.strip() else []


def _split_pair(prompt: Any, chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages before both answers, which both lists may contain, and the messages of each answer."""
    equal = (a == b for a, b in zip(chosen[:-1], rejected[:-1], strict=False))
    shared = sum(itertools.takewhile(bool, equal))
    if isinstance(prompt, list):
        if prompt and all(answer[: len(prompt)] == prompt for answer in (chosen, rejected)):
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    elif shared:
        if prompt is not None and not _has_text(chosen[:shared], prompt):
            raise MalformedConversation("the prompt is not the text of a message that both conversations share")
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    elif chosen and chosen[:1] == rejected[:1]:
        name = "chosen" if len(chosen) == 1 else "rejected"
        raise MalformedConversation(f"the {name} conversation has only the message that both share, so no answer")
    elif prompt is not None:
        prompt = [_message("user", prompt)]
    elif {"system", "user"} & {_first_role(chosen), _first_role(rejected)}:
        raise MalformedConversation("the first messages of chosen and rejected differ, so the two prompts differ")
    else:
        raise MalformedConversation("the document has no prompt")
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if (role := _first_role(answer)) in ("system", "user"):
            raise MalformedConversation(f"the {name} answer begins with a {role} message, so the two prompts differ")
    return prompt, chosen, rejected


def _first_role(messages: list[Any]) -> str | None:
    role = messages[0].get("role") if messages and isinstance(messages[0], Mapping) else None
    return role if isinstance(role, str) else None


def _has_text(messages: Iterable[Any], text: Any) -> bool:
    """Return whether a text is the content of one of the messages."""
    return any(isinstance(message, Mapping) and message.get("content") == text for message in messages)


def _message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}
