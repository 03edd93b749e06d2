"""Position of each answer in a rendered conversation, found by the origins of its characters (traced_text.py).

An answer begins where the prompt for it ends at inference: after the text that the template writes for add_generation_prompt. It
ends after the token that ends its turn. One prompt is rendered for each role that precedes an answer, such as user and tool.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.data.chat.messages import Message
from trainer.data.chat.template import Rendering, TemplateFailure
from trainer.data.chat.traced_text import TEMPLATE, UNKNOWN, data_index, strings

Turn = tuple[int, int]
"""Half-open range (start, stop) of an answer in the text, with the token that ends the turn."""
RenderPrompt = Callable[[Sequence[Message]], Rendering]
"""Function that renders leading messages with the prompt for the next answer."""
QUESTION = {"role": "user", "content": "A question?"}
_ANCHOR = 8
"""Number of characters by which a prompt is recognized whose end the conversation does not have: more than [/INST] has."""
_OPEN_TAG = re.compile(r"([<\[][^<>\[\]]*)?$")


def origin_runs(origins: str) -> list[tuple[str, int, int]]:
    """Return (origin, start, stop) of each run of characters with one origin."""
    runs, end = [], 0
    for origin, group in itertools.groupby(origins):
        start, end = end, end + len(list(group))
        runs.append((origin, start, end))
    return runs


def common_start(text: str, other: str) -> int:
    """Return the number of characters with which both texts begin."""
    return next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))


def find_answers(
    rendering: Rendering,
    data: Mapping[str, Any],
    render_prompt: RenderPrompt,
    end_of_turn: Callable[[int, int], int],
) -> dict[int, Turn | None]:
    """Return the range of each answer by the index of its message, in the order of the text, or None if the template begins the
    answer otherwise than the prompt for it. Answers without text are absent.

    Args:
        rendering: the rendered conversation.
        data: the data from which it was rendered.
        render_prompt: the template.
        end_of_turn: function of the range of the text behind an answer. It returns the offset after the token that ends the turn.

    Raises:
        TemplateFailure: The text of an answer contains the text of another message, or its turn has no end.
    """
    messages = data["messages"]
    ranges = _message_ranges(rendering, data)
    prompt_ends: dict[str, str] = {}
    turns: dict[int, Turn | None] = {}
    end = 0
    for i, (first, last) in ranges.items():
        if messages[i]["role"] != "assistant":
            continue
        before = messages[i - 1]["role"] if i else ""
        if before not in prompt_ends:
            prompt_ends[before] = _prompt_end(messages[:i], render_prompt)
        start = _start(rendering, first, prompt_ends[before])
        if start is None and not i:
            start = _start_of_text(rendering, first, render_prompt)
        stop = end_of_turn(last, _end_of_text_behind(rendering, last))
        turns[i] = None if start is None else (max(start, end), stop)
        end = stop
    return turns


# ---------------------------------------------------------------- start


def _prompt_end(messages: Sequence[Message], render_prompt: RenderPrompt) -> str:
    """Return the text that the template writes at the end of the prompt for an answer. If it cannot render the messages before
    the answer alone, return the text after a question."""
    try:
        prompt = render_prompt(messages or [QUESTION])
    except TemplateFailure:
        prompt = render_prompt([QUESTION])
    return _text_before(prompt, len(prompt.text))


def _start(rendering: Rendering, first: int, prompt_end: str) -> int | None:
    """Return the start of the answer whose own text begins at `first`, or None. It lies behind the longest tail of the prompt's
    end in the template's text before the answer. A prompt may also open what the answer does not have, such as <think>."""
    header = _text_before(rendering, first)
    if not prompt_end:
        return first - len(header)
    for end in range(len(prompt_end), _ANCHOR - 1, -1):
        found = header.rfind(prompt_end[end - _ANCHOR : end])
        if found >= 0:
            start, rest = first - len(header) + found + _ANCHOR, prompt_end[end:]
            if rendering.text.startswith(rest, start):
                return start + len(rest)
            return start - len(_OPEN_TAG.search(prompt_end[:end])[0])  # the < of another tag is not the prompt's
    for length in range(min(len(prompt_end), len(header)), 0, -1):
        found = header.rfind(prompt_end[-length:])
        if found >= 0:
            return first - len(header) + found + length
    return None


def _start_of_text(rendering: Rendering, first: int, render_prompt: RenderPrompt) -> int | None:
    """Return the start of an answer without a header at the beginning of a conversation: behind what begins every text, such as
    BOS. Return None if the answer has a header."""
    start = common_start(rendering.text[:first], render_prompt([QUESTION]).text)
    return None if rendering.text[start:first].strip() else start


def _text_before(rendering: Rendering, position: int) -> str:
    """Return the text that the template itself writes directly before a position."""
    return rendering.text[len(rendering.origins[:position].rstrip(TEMPLATE)) : position]


def _end_of_text_behind(rendering: Rendering, position: int) -> int:
    """Return the end of the text that the template writes behind a position, without the brackets of the next message's text."""
    behind = re.compile(f"[{TEMPLATE}{UNKNOWN}]*").match(rendering.origins, position)[0]
    return position + len(behind.rstrip(UNKNOWN))


# ---------------------------------------------------------------- own text of messages


def _message_ranges(rendering: Rendering, data: Mapping[str, Any]) -> dict[int, Turn]:
    """Return, for each message with text in the rendering, the range from its first to its last character, in the order of
    the text. A range includes adjacent characters of unknown origin, such as the brackets of JSON. Raises TemplateFailure if the
    range of an answer overlaps another one."""
    paths, messages = [path for path, _ in strings(data)], data["messages"]
    ranges: dict[int, Turn] = {}
    called: set[str] = set()
    for origin, start, stop in origin_runs(rendering.origins):
        # A template may write the name of a function again, above the result of the call.
        path = () if origin in (TEMPLATE, UNKNOWN) or origin in called else paths[data_index(origin)]
        if path[:1] != ("messages",) or path[2:] == ("name",):  # the name of an author belongs to the header
            continue
        ranges[path[1]] = ranges.get(path[1], (start, stop))[0], stop
        if path[2] == "tool_calls" and "arguments" not in path:
            called.add(origin)
    not_unknown = re.compile(f"[^{UNKNOWN}]|$")
    for i, (first, last) in ranges.items():
        first = len(rendering.origins[:first].rstrip(UNKNOWN))
        ranges[i] = first, not_unknown.search(rendering.origins, last).start()
    if len(ranges) < len(messages) and UNKNOWN in rendering.origins:
        _add_untraced(ranges, rendering, messages)
    ranges = dict(sorted(ranges.items(), key=lambda item: item[1]))
    for (i, first), (j, second) in itertools.pairwise(ranges.items()):
        if second[0] < first[1] and "assistant" in (messages[i]["role"], messages[j]["role"]):
            raise TemplateFailure(f"the template writes the texts of messages {i + 1} and {j + 1} into each other")
    return ranges


def _add_untraced(ranges: dict[int, Turn], rendering: Rendering, messages: Sequence[Message]) -> None:
    """Add the ranges of the messages whose content an untraced operation wrote: text of unknown origin that holds the content,
    except for white space, behind the message before."""
    unknown = [(start, stop) for origin, start, stop in origin_runs(rendering.origins) if origin == UNKNOWN]
    end = 0
    for i, message in enumerate(messages):
        content = message.get("content")
        content = "".join(content.split()) if isinstance(content, str) else ""
        if i not in ranges and content:
            behind = [turn for turn in unknown if turn[0] >= end]
            found = [turn for turn in behind if content in "".join(rendering.text[slice(*turn)].split())]
            ranges |= {i: found[0]} if found else {}
        end = ranges[i][1] if i in ranges else end
