"""The check that a template wrote all of a conversation: no message, call or reasoning may disappear."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.data.chat.answers import origin_runs
from trainer.data.chat.fields import REASONING, is_consequential
from trainer.data.chat.messages import Message, is_parts
from trainer.data.chat.template import ChatTemplate, Rendering, TemplateFailure
from trainer.data.chat.traced_text import TEMPLATE, UNKNOWN, data_index, strings

REASONING_OMITTED = "reasoning of earlier answers (context only)"
"""What the list of unused fields says about answers that are no targets, because the template omits their reasoning."""
_START_OF_REASONING, _END_OF_REASONING = "<think>", "</think>"
_HANDLED = ("role", "content", "tool_calls", *REASONING)


class Written:
    """The strings of a conversation that a rendering contains."""

    def __init__(self, rendering: Rendering, data: Mapping[str, Any]):
        paths = [path for path, _ in strings(data)]
        self._runs: list[tuple[tuple | None, str]] = []
        """(path, or None if no string of the data, text) of each run of characters with one origin."""
        self._counts: Counter[tuple] = Counter()
        for origin, start, stop in origin_runs(rendering.origins):
            path = None if origin in (TEMPLATE, UNKNOWN) else paths[data_index(origin)]
            self._runs.append((path, "".join(rendering.text[start:stop].split())))
            if path is not None:
                self._counts[path] += len(self._runs[-1][1])
        self._has_untraced = UNKNOWN in rendering.origins
        written = (path for path, count in self._counts.items() if count)
        self._prefixes = {path[:length] for path in written for length in range(len(path) + 1)}

    def any_of(self, path: tuple) -> bool:
        """Return whether the text contains a character, other than white space, of the strings below a path."""
        return path in self._prefixes

    def count(self, path: tuple) -> int:
        """Return the number of characters, other than white space, that the text contains of the string at a path."""
        return self._counts[path]

    def all_of(self, path: tuple, string: str) -> bool:
        """Return whether the text contains the string at a path, except for white space."""
        return self._counts[path] >= _characters(string) or self._untraced(path, string)

    def some_of(self, path: tuple, string: str) -> bool:
        """Return whether the text contains a part of the string at a path. A blank string has no parts that could be missing."""
        return bool(self._counts[path]) or not string.strip() or self._untraced(path, string)

    def _untraced(self, path: tuple, string: str) -> bool:
        """Return whether an untraced operation may have written the string. A string in a list or object does not count, because
        Python's notation of the object would contain it too."""
        if not self._has_untraced or path[-1] not in ("content", "arguments", "name", *REASONING):
            return False
        text = "".join(run if origin in (None, path) else "\0" for origin, run in self._runs)
        return "".join(string.split()) in text


def _characters(text: str) -> int:
    return len("".join(text.split()))


def check_written(
    template: ChatTemplate,
    rendering: Rendering,
    messages: Sequence[Message],
    data: Mapping[str, Any],
    loss_mask: Sequence[bool],
) -> tuple[set[str], set[int]]:
    """Compare a rendering with its conversation. Return the names of the messages' fields that the template does not use, and the
    indices of the answers that are context instead of targets, because the template omits their reasoning.

    Args:
        template: the template.
        rendering: the rendered conversation.
        messages: the messages, without the copies of their reasoning that a template receives.
        data: the data from which the conversation was rendered.
        loss_mask: whether each message is trained on.

    Raises:
        TemplateFailure: The template omits something else that would change what is trained on, or the reasoning of all answers.
    """
    written = Written(rendering, data)
    for i in range(len(data["tools"] or ())):
        if not written.any_of(("tools", i)):
            raise TemplateFailure("the template does not support tools")
    unused: set[str] = set()
    without_reasoning: dict[int, str] = {}
    for i, (message, is_target) in enumerate(zip(messages, loss_mask, strict=True)):
        _check_content(template, written, i, message, is_target and not _has_only_conclusion(written, i, message))
        _check_calls(written, i, message)
        omitted = _omitted_reasoning(rendering, written, i, message)
        if is_target and omitted:
            without_reasoning[i] = omitted
        for name in message:
            if name in _HANDLED or name in rendering.read or written.any_of(("messages", i, name)):
                continue
            if is_consequential(name):
                raise TemplateFailure(
                    f"message {i + 1} has the field {name}, which may change what is trained on, but which the template does not "
                    "read; remove the field, or list it in data.ignored_fields"
                )
            unused.add(name)
    if without_reasoning and len(without_reasoning) == sum(loss_mask):
        i, omitted = next(iter(without_reasoning.items()))
        raise TemplateFailure(
            f"the template omits {omitted} of message {i + 1}, an answer to train on; give the answer the weight 0, or end the "
            "conversation with it"
        )
    return unused | ({REASONING_OMITTED} if without_reasoning else set()), set(without_reasoning)


def _check_content(template: ChatTemplate, written: Written, i: int, message: Message, is_target: bool) -> None:
    content = message.get("content") or ""
    types = {(j, "type") for j in range(len(content))} if is_parts(content) else set()
    for path, string in strings(content):
        if types and (path in types or path[-1] is None):  # the fields of a text part, except its text
            continue
        path = ("messages", i, "content", *path)
        if not written.some_of(path, string):
            raise TemplateFailure(f"the template does not write the content of message {i + 1} ({message['role']})")
        if is_target and not written.all_of(path, _without_tags(template, string)):
            raise TemplateFailure(f"the template omits a part of message {i + 1}, an answer to train on")


def _without_tags(template: ChatTemplate, content: str) -> str:
    """Return a content without the tags that the template looks for, such as </think>. It writes them itself."""
    for tag in template.tags:
        content = content.replace(tag, "")
    return content


def _check_calls(written: Written, i: int, message: Message) -> None:
    for j, call in enumerate(message.get("tool_calls", ())):
        path = ("messages", i, "tool_calls", j)
        if "function" in call:
            call, path = call["function"], (*path, "function")
        required = [*strings(call["name"], (*path, "name")), *strings(call["arguments"], (*path, "arguments"))]
        if not all(written.some_of(*found) for found in required):
            raise TemplateFailure(f"the template does not write the tool calls of message {i + 1}")


def _omitted_reasoning(rendering: Rendering, written: Written, i: int, message: Message) -> str:
    """Return what holds the reasoning that the template omits from a message, or "". Raises TemplateFailure if the template never
    writes reasoning."""
    if _has_only_conclusion(written, i, message):
        return "the reasoning in the text"
    name = next((name for name in REASONING if message.get(name, "").strip()), "")
    if not name or any(written.all_of(("messages", i, copy), message[name]) for copy in REASONING):
        return ""
    if rendering.read.isdisjoint(REASONING):
        raise TemplateFailure(
            f"message {i + 1} has {name}, which the template does not read; remove the field, or list it in data.ignored_fields"
        )
    return name


def _has_only_conclusion(written: Written, i: int, message: Message) -> bool:
    """Return whether the text contains only the part of an answer after its reasoning, which stands between <think> tags."""
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return False
    before, tag, conclusion = content.rpartition(_END_OF_REASONING)
    path = ("messages", i, "content")
    if not tag or not before.replace(_START_OF_REASONING, "").strip():
        return False
    return written.count(path) == _characters(conclusion) > 0
