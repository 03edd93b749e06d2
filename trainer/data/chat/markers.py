"""Shipped training templates that mark the answers in conversations which a model's own template renders but cannot mark.

The text, and so every token, is that of the model's own template. A shipped template of the same family renders the conversation
too, with {% generation %} blocks around the answers. An answer is marked only if both templates write it, and the header before
it, equally. The rest of the texts may differ: default system messages and dates change between the models of a family.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.data.chat.answers import Turn, locate_answers, message_ranges
from trainer.data.chat.conversations import Message
from trainer.data.chat.forms import template_data
from trainer.data.chat.template import ChatTemplate, Rendering, TemplateFailure
from trainer.data.chat.template_files import marking_templates
from trainer.data.chat.traced import TEMPLATE
from trainer.data.chat.written import check_written

Render = Callable[[Mapping[str, Any], bool], Rendering]
"""Function that renders data by the model's own template, with or without the prompt for the next answer."""

_HEADER_CHARACTERS = 8
"""Number of characters by which the end of a prompt is recognized: more than [/INST] has, and fewer than other headers."""

_TALK = [
    {"role": "user", "content": "A question?"},
    {"role": "assistant", "content": "An answer."},
    {"role": "user", "content": "Another question?"},
    {"role": "assistant", "content": "Another answer."},
]
_CALL = {"type": "function", "id": "call00001", "function": {"name": "search", "arguments": {"word": "answer"}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
_REASONED = [{"reasoning_content": "A reason."} | message if i % 2 else message for i, message in enumerate(_TALK)]
_TAGGED = [
    message | {"content": f"<think>\nA reason.\n</think>\n\n{message['content']}"} if i % 2 else message
    for i, message in enumerate(_TALK)
]
_CALLED = [
    _TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "search", "tool_call_id": "call00001", "content": "A result."},
    *_TALK[1:],
]
_PROBES = [
    template_data(_TALK, None, {}),
    template_data([{"role": "system", "content": "A rule. /no_think"}, *_TALK], None, {}),
    template_data(_REASONED, None, {}),
    template_data(_TAGGED, None, {}),
    template_data(_CALLED, [_TOOL], {}),
]
"""Conversations that show whether a template's answers can be located. Every template renders the first. In SmolLM3's templates,
the text of the system message switches reasoning off."""


class Marker:
    """A shipped template with {% generation %} blocks that locates answers in the text of another template."""

    def __init__(self, name: str, source: str, prompt_end: str, template: ChatTemplate, names: Mapping[str, str]):
        """Describe a marker.

        Args:
            name: Name of the shipped template.
            source: Its Jinja text.
            prompt_end: The text that it writes before an answer.
            template: The compiled template.
            names: See ChatTemplate.render.
        """
        self.name, self.source = name, source
        self._prompt_end = prompt_end
        self._template, self._names = template, names

    def locate(
        self,
        rendering: Rendering,
        data: Mapping[str, Any],
        render: Render,
        add_generation_prompt: bool,
    ) -> dict[int, Turn | None]:
        """Return the range of each answer by the index of its message, or None if the two templates write the answer differently.

        Args:
            rendering: the conversation, rendered by the other template.
            data: the data from which it was rendered.
            render: the other template.
            add_generation_prompt: whether the prompt for the next answer follows the conversation.
        """
        answers = [i for i, message in enumerate(data["messages"]) if message["role"] == "assistant"]
        try:
            marked = self._template.render(self._names, data, add_generation_prompt)
        except TemplateFailure:
            return dict.fromkeys(answers)
        if len(marked.blocks) != len(answers):
            return dict.fromkeys(answers)
        ranges, own_ranges = message_ranges(marked, data), message_ranges(rendering, data)
        turns: dict[int, Turn | None] = {}
        for i, block in zip(answers, marked.blocks, strict=True):
            turns[i] = None
            if i in ranges and i in own_ranges:
                start = own_ranges[i][0] + block[0] - ranges[i][0]
                stop = own_ranges[i][1] + block[1] - ranges[i][1]
                turns[i] = (start, stop) if self._equal(rendering, (start, stop), marked, block) else None
        if not any(turns.values()):
            return turns
        prompt = _prompt_end({**data, "messages": data["messages"][: answers[0]]}, render)
        return {i: turn and (_after_prompt(rendering.text, turn, prompt), turn[1]) for i, turn in turns.items()}

    def writes(self, messages: Sequence[Message], data: Mapping[str, Any], loss_mask: Sequence[bool]) -> bool:
        """Return whether the shipped template writes all of a conversation. See check_written."""
        try:
            check_written(self._template, self._template.render(self._names, data, False), messages, data, loss_mask)
        except TemplateFailure:
            return False
        return True

    def _equal(self, rendering: Rendering, turn: Turn, marked: Rendering, block: Turn) -> bool:
        """Return whether both templates write an answer equally, and the same before it: either all text since the last text of a
        message, or the end of a prompt. (BOS and a default system message may precede a first answer.)"""
        if turn[0] < 0 or rendering.text[slice(*turn)] != marked.text[slice(*block)]:
            return False
        header, marked_header = _text_before(rendering, turn[0]), _text_before(marked, block[0])
        return bool(header) and (
            header == marked_header or all(h.endswith(self._prompt_end) for h in (header, marked_header))
        )


def _text_before(rendering: Rendering, start: int) -> str:
    """Return the text that the template itself writes directly before a position."""
    return rendering.text[len(rendering.origins[:start].rstrip(TEMPLATE)) : start]


def _prompt_end(data: Mapping[str, Any], render: Render) -> str:
    """Return the text that a template writes at the end of the prompt for an answer, or "" if it cannot render the prompt."""
    try:
        prompt = render(data, True)
    except TemplateFailure:
        return ""
    return _text_before(prompt, len(prompt.text))


def _after_prompt(text: str, turn: Turn, prompt: str) -> int:
    """Return the start of an answer without the text that belongs to the prompt, such as <think> in models that always reason."""
    start, stop = turn
    for length in range(min(len(prompt), stop - start), 0, -1):
        header = prompt[: len(prompt) - length][-_HEADER_CHARACTERS:]
        if header and text.startswith(prompt[-length:], start) and text.endswith(header, 0, start):
            return start + length
    return start


# ---------------------------------------------------------------- choice of a marker


def find_marker(names: Mapping[str, str], render: Render, has_blocks: bool) -> Marker | None:
    """Return the shipped template that marks the most conversations of those that a template renders, but whose answers it cannot
    mark itself. Return None if there are no such conversations, or no shipped template marks an ordinary one.

    Args:
        names: see ChatTemplate.render.
        render: the template.
        has_blocks: whether {% generation %} blocks of the template mark answers.
    """
    rendered = []
    for data in _PROBES:
        try:
            rendered.append((data, render(data, False)))
        except TemplateFailure:
            if not rendered:
                return None
    needs_help = _blocks_hold_headers if has_blocks else _cannot_locate
    if not any(needs_help(rendering, data, render) for data, rendering in rendered):
        return None
    best, most = None, 0
    for name, text, prompt_end in marking_templates(rendered[0][1].text):
        marker = Marker(name, text, prompt_end, ChatTemplate.compile(text), names)
        marked = [all(marker.locate(rendering, data, render, False).values()) for data, rendering in rendered]
        if marked[0] and sum(marked) > most:
            best, most = marker, sum(marked)
        if all(marked):
            break
    return best


def _cannot_locate(rendering: Rendering, data: Mapping[str, Any], render: Render) -> bool:
    """Return whether the beginnings of a conversation do not show where its answers begin and end."""

    def render_text(leading: Sequence[Message], with_prompt: bool) -> str:
        return render({**data, "messages": leading}, with_prompt).text

    try:
        return not all(locate_answers(rendering, data, render_text).values())
    except TemplateFailure:
        return True


def _blocks_hold_headers(rendering: Rendering, data: Mapping[str, Any], render: Render) -> bool:
    """Return whether a {% generation %} block also holds text that belongs to the prompt for the answer, as SmolLM3's does."""
    prompt = _prompt_end({**data, "messages": data["messages"][:1]}, render)
    headers = [prompt[-length:] for length in range(_HEADER_CHARACTERS, len(prompt) + 1)]
    message_starts = {start for start, _ in message_ranges(rendering, data).values()}
    return any(
        start not in message_starts and rendering.text.startswith(tuple(headers), start, stop)
        for start, stop in rendering.blocks
    )
