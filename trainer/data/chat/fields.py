"""The fields of documents and messages: which may be ignored, and which would change what is trained on."""

import re
from collections.abc import Collection, Iterable, Mapping
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


def is_absent(value: Any) -> bool:
    """Return whether a field has no value. Tables have all columns in all rows, so that null and empty values mean nothing."""
    return value is None or (isinstance(value, str | list | Mapping) and not value)


def is_consequential(name: str) -> bool:
    """Return whether a field of this name may change what is trained on, so that it must not be ignored silently."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    words = [word.lower() for word in words]
    return "_".join(words) in _CONSEQUENTIAL or not _LOSS_WORDS.isdisjoint(words)


def without(document: Any, names: Collection[str]) -> tuple[Any, set[str]]:
    """Return a document without the fields `names`, at the top and in each message, and the names of those that it had."""
    if not isinstance(document, Mapping) or not names:
        return document, set()
    removed: set[str] = set()

    def kept(fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        removed.update(name for name, value in fields.items() if name in names and not is_absent(value))
        return {name: value for name, value in fields.items() if name not in names}

    document = kept(document)
    for name in MESSAGE_LISTS:
        if isinstance(document.get(name), list):
            document[name] = [kept(message) for message in document[name]]
    return document, removed


def unused(document: Mapping[str, Any], used: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of the other fields of a document that have a value: the consequential ones, and the rest."""
    names = [name for name, value in document.items() if name not in used and not is_absent(value)]
    return [n for n in names if is_consequential(n)], [n for n in names if not is_consequential(n)]
