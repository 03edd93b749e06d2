"""The check that a template wrote all of a conversation: no message, call or reasoning may disappear."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainer.data.chat.answers import origin_runs
from trainer.data.chat.fields import REASONING, WAY_OUT, consequential, is_identity, may_matter
from trainer.data.chat.messages import Message, is_parts
from trainer.data.chat.template import ChatTemplate, Rendering, TemplateFailure
from trainer.data.chat.traced_text import TEMPLATE, UNKNOWN, data_index, strings

REASONING_OMITTED = "reasoning of earlier answers (context only)"
"""What the list of unused fields says about answers that are context, because the template omits their reasoning or otherwise."""
_START_OF_REASONING, _END_OF_REASONING = "<think>", "</think>"
_HANDLED = ("role", "content", "tool_calls", *REASONING)
_SCHEMA = ("type", "function", "name", "description", "parameters", "properties", "required", "items", "enum")
"""Names of fields in the description of a tool that the template may write itself."""
_WRITTEN_OTHERWISE = ("type", "required")
"""Those whose values it may express in other words."""
_CALL, _FUNCTION = ("type", "function", "name", "arguments"), ("name", "arguments")
"""Fields of a call, and of its function, that a call consists of."""


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
        runs = origin_runs(rendering.origins)
        untraced = (rendering.text[start:stop] for origin, start, stop in runs if origin == UNKNOWN)
        self._untraced_text = "".join("".join(untraced).split())
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
        if path[0] == "tools":
            return "".join(string.split()) in self._untraced_text
        if not self._untraced_text or path[-1] not in ("content", "arguments", "name", *REASONING):
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
    unused: set[str] = set()
    for i, tool in enumerate(data["tools"] or ()):
        unused |= _check_tool(written, i, tool)
    without_reasoning: dict[int, str] = {}
    for i, (message, is_target) in enumerate(zip(messages, loss_mask, strict=True)):
        _check_content(template, written, i, message, is_target and not _has_only_conclusion(written, i, message))
        unused |= _check_calls(written, i, message)
        omitted = _omitted_reasoning(rendering, written, i, message)
        if omitted:
            unused.add(REASONING_OMITTED)
        if is_target and omitted:
            without_reasoning[i] = omitted
        unused |= _unused(message, (*_HANDLED, *rendering.read), written, ("messages", i), f"message {i + 1}")
    _check_differences(messages, unused)
    if without_reasoning and len(without_reasoning) == sum(loss_mask):
        i, omitted = next(iter(without_reasoning.items()))
        raise TemplateFailure(
            f"the template omits {omitted} of message {i + 1}, an answer to train on; give the answer the weight 0, or end the "
            "conversation with it"
        )
    return unused, set(without_reasoning)


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


def _unused(
    fields: Mapping[str, Any], known: Sequence[str], written: Written, path: tuple, owner: str, prefix: str = ""
) -> set[str]:
    """Return the names of fields that the template does not use. Raises TemplateFailure if they may matter.

    Args:
        fields: Those of a message, or of a part of one.
        known: Names of those that need no check.
        written: What the template has written.
        path: Where the fields are in the data of the template.
        owner: What has the fields, for messages.
        prefix: What to put before their names.
    """
    unused = {n: value for n, value in fields.items() if n not in known and not written.any_of((*path, n))}
    if names := [name for name, value in unused.items() if may_matter(name, value)]:
        raise TemplateFailure(consequential(f"{owner} has", names, "not used by the template"))
    return {f"{prefix}{name}" for name in unused}


def _check_differences(messages: Sequence[Message], unused: Collection[str]) -> None:
    """Raise TemplateFailure if an unused field distinguishes the answers of a conversation, as a rating does."""
    answers = [message for message in messages if message["role"] == "assistant"]
    for name in unused:
        values = [answer.get(name) for answer in answers]
        if not is_identity(name) and any(value != values[0] for value in values):
            owner = "the answers have different values of"
            raise TemplateFailure(consequential(owner, [name], "not used by the template"))


def _check_tool(written: Written, i: int, tool: Mapping[str, Any]) -> set[str]:
    """Return the names of the fields of a tool's description of which the template omits texts. Raises TemplateFailure if it
    omits what a model needs to call the tool."""
    if not written.any_of(("tools", i)):
        raise TemplateFailure("the template does not support tools")
    unused: set[str] = set()
    for path, string in strings(tool):
        name = next(part for part in reversed(path) if isinstance(part, str))
        is_key = path[-1] is None
        if (is_key and name in _SCHEMA) or name in _WRITTEN_OTHERWISE or written.some_of(("tools", i, *path), string):
            continue
        if name in ("name", "description") or (is_key and path[-3:-2] == ("properties",)):
            raise TemplateFailure(f"the template does not write {string[:40]!r} of the description of tool {i + 1}")
        unused.add(f"tools.{name}")
    return unused


def _check_calls(written: Written, i: int, message: Message) -> set[str]:
    """Return the names of the fields of a message's calls that the template does not use."""
    unused: set[str] = set()
    for j, call in enumerate(message.get("tool_calls", ())):
        path, owner = ("messages", i, "tool_calls", j), f"a tool call of message {i + 1}"
        unused |= _unused(call, _CALL, written, path, owner, "tool_calls.")
        if "function" in call:
            call, path = call["function"], (*path, "function")
            unused |= _unused(call, _FUNCTION, written, path, owner, "tool_calls.function.")
        required = [*strings(call["name"], (*path, "name")), *strings(call["arguments"], (*path, "arguments"))]
        if not all(written.some_of(*found) for found in required):
            raise TemplateFailure(f"the template does not write the tool calls of message {i + 1}")
    return unused


def _omitted_reasoning(rendering: Rendering, written: Written, i: int, message: Message) -> str:
    """Return what holds the reasoning that the template omits from a message, or "". Raises TemplateFailure if the template never
    writes reasoning."""
    if _has_only_conclusion(written, i, message):
        return "the reasoning in the text"
    name = next((name for name in REASONING if message.get(name, "").strip()), "")
    if not name or any(written.all_of(("messages", i, copy), message[name]) for copy in REASONING):
        return ""
    if rendering.read.isdisjoint(REASONING):
        raise TemplateFailure(f"message {i + 1} has {name}, which the template does not read; {WAY_OUT}")
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
