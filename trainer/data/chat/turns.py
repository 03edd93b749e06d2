"""Position of each answer in a rendered conversation, found by the origins of its characters (traced.py).

An answer begins where the prompt for it ends at inference: after the text that the template writes for add_generation_prompt. It
ends after the token that ends its turn. One prompt is rendered for each role that precedes an answer, such as user and tool.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from trainer.data.chat.answers import Turn, origin_runs
from trainer.data.chat.conversations import Message
from trainer.data.chat.template import Rendering, TemplateFailure
from trainer.data.chat.traced import TEMPLATE, UNKNOWN, data_index, strings

ANSWER = "assistant"
_QUESTION = {"role": "user", "content": "A question?"}
_OPEN_TAG = re.compile(r"([<\[][^<>\[\]]*)?$")
_ANCHOR = 8
"""Number of characters that show where a prompt ends if the conversation lacks its last characters."""


def find_turns(
    rendering: Rendering,
    data: Mapping[str, Any],
    render_prompt: Callable[[Sequence[Message]], Rendering],
    end_of_turn: Callable[[int, int], int | None],
) -> dict[int, Turn | None]:
    """Return the range of each answer by the index of its message, or None if the template writes no text of the answer, or
    begins it otherwise than the prompt.

    Args:
        rendering: the rendered conversation.
        data: the data from which it was rendered.
        render_prompt: function that renders leading messages with the prompt for the next answer.
        end_of_turn: function of the start and stop of a text of the template. It returns the offset after the token that ends
            the turn, or None if there is none.
    """
    messages = data["messages"]
    ranges = _message_ranges(rendering, data)
    prompt_ends: dict[str, str] = {}
    turns: dict[int, Turn | None] = {}
    for i in (i for i, message in enumerate(messages) if message["role"] == ANSWER):
        turns[i] = None
        if i not in ranges:
            continue
        first, last = ranges[i]
        before = messages[i - 1]["role"] if i else ""
        if before not in prompt_ends:
            prompt_ends[before] = _prompt_end(messages[:i], render_prompt)
        start = _start(rendering, first, prompt_ends[before])
        if start is None and not i:
            start = _start_of_text(rendering, first, render_prompt)
        stop = end_of_turn(last, _end_of_text_after(rendering, last))
        turns[i] = None if start is None or stop is None else (start, stop)
    return turns


def _prompt_end(messages: Sequence[Message], render_prompt: Callable[[Sequence[Message]], Rendering]) -> str:
    """Return the text that the template writes at the end of the prompt for an answer. If it cannot render the messages before the
    answer alone, return the text after a question."""
    try:
        prompt = render_prompt(messages or [_QUESTION])
    except TemplateFailure:
        prompt = render_prompt([_QUESTION])
    return _text_before(prompt, len(prompt.text))


def _start(rendering: Rendering, first: int, prompt_end: str) -> int | None:
    """Return the start of the answer whose first own character has the offset `first`, or None."""
    header = _text_before(rendering, first)
    if not prompt_end:
        return first - len(header)
    for end in range(
        len(prompt_end), _ANCHOR - 1, -1
    ):  # a prompt may open what the answer does not have, such as <think>
        if (found := header.rfind(prompt_end[end - _ANCHOR : end])) >= 0:
            start = first - len(header) + found + _ANCHOR
            rest = prompt_end[end:]
            if rendering.text.startswith(rest, start):
                return start + len(rest)
            return start - len(_OPEN_TAG.search(prompt_end[:end])[0])
    for length in range(min(len(prompt_end), len(header)), 0, -1):
        if (found := header.rfind(prompt_end[-length:])) >= 0:
            return first - len(header) + found + length
    return None


def _start_of_text(
    rendering: Rendering, first: int, render_prompt: Callable[[Sequence[Message]], Rendering]
) -> int | None:
    """Return the start of an answer that begins the conversation, without a header: after what begins every text, such as BOS."""
    start = len(commonprefix([rendering.text[:first], render_prompt([_QUESTION]).text]))
    return None if rendering.text[start:first].strip() else start


def _text_before(rendering: Rendering, position: int) -> str:
    """Return the text that the template itself writes directly before a position."""
    return rendering.text[len(rendering.origins[:position].rstrip(TEMPLATE)) : position]


def _end_of_text_after(rendering: Rendering, position: int) -> int:
    """Return the end of the text that the template writes after a position, up to the text of another message and its brackets."""
    behind = re.compile(f"[{TEMPLATE}{UNKNOWN}]*").match(rendering.origins, position)[0]
    return position + len(behind.rstrip(UNKNOWN))


def _message_ranges(rendering: Rendering, data: Mapping[str, Any]) -> dict[int, Turn]:
    """Return, for each message with text in the rendering, the range from its first to its last character. A range includes
    adjacent characters of unknown origin, such as the brackets of JSON. The name of a message's author belongs to the header, and
    the name of a function above the result of its call belongs to the result."""
    paths = [path for path, _ in strings(data)]
    ranges: dict[int, Turn] = {}
    called, unknown = set(), []
    for origin, start, stop in origin_runs(rendering.origins):
        if origin == UNKNOWN:
            unknown.append((start, stop))
        elif origin != TEMPLATE and origin not in called:
            _, i, *field = path if (path := paths[data_index(origin)])[0] == "messages" else (None, None, "name")
            if field == ["name"]:
                continue
            ranges[i] = ranges.get(i, (start, stop))[0], stop
            called |= {origin} if field[0] == "tool_calls" else set()
    not_unknown = re.compile(f"[^{UNKNOWN}]|$")
    for i, (first, last) in ranges.items():
        first = len(rendering.origins[:first].rstrip(UNKNOWN))
        ranges[i] = first, not_unknown.search(rendering.origins, last).start()
    end = 0
    for i, message in enumerate(data["messages"]):
        if i not in ranges and (found := _untraced(rendering.text, message, [r for r in unknown if r[0] >= end])):
            ranges[i] = found
        end = ranges[i][1] if i in ranges else end
    return ranges


def _untraced(text: str, message: Message, unknown: Sequence[Turn]) -> Turn | None:
    """Return the first of the ranges of unknown origin that holds the content of a message, except for white space, or None."""
    content = message.get("content")
    content = "".join(content.split()) if isinstance(content, str) else ""
    return next((turn for turn in unknown if content and content in "".join(text[slice(*turn)].split())), None)
