"""Position of each answer in a rendered conversation, for templates without {% generation %} blocks.

An answer begins where the prompt for it ends at inference, and ends where the conversation up to it ends. Both are found by
rendering the leading messages alone. The text of the conversation must begin with both renderings: otherwise the model would be
trained on other prompts than it sees at inference.

Two renderings per answer would take a time that is quadratic in the number of answers. Therefore only the first and the last
answer of each kind are rendered. Two answers are of one kind if the template writes the same text directly before and directly
after them, and if they and their neighbours have the same roles and fields. The other answers of a kind are divided at the same
distance from their own text.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.data.chat.conversations import Message
from trainer.data.chat.template import Rendering, TemplateFailure
from trainer.data.chat.traced import TEMPLATE, UNKNOWN, data_index, strings

Turn = tuple[int, int]
"""Half-open range (start, stop) of an answer in the text, with the token that ends the turn."""


def origin_runs(origins: str) -> list[tuple[str, int, int]]:
    """Return (origin, start, stop) of each run of characters with one origin."""
    runs, end = [], 0
    for origin, group in itertools.groupby(origins):
        start, end = end, end + len(list(group))
        runs.append((origin, start, end))
    return runs


def message_ranges(rendering: Rendering, data: Mapping[str, Any]) -> dict[int, Turn]:
    """Return, for each message with text in the rendering, the range from its first to its last character. A range includes
    adjacent characters of unknown origin, such as the brackets of JSON."""
    paths = [path for path, _ in strings(data)]
    ranges: dict[int, Turn] = {}
    for origin, start, stop in origin_runs(rendering.origins):
        if origin in (TEMPLATE, UNKNOWN):
            continue
        path = paths[data_index(origin)]
        if path[0] == "messages":
            first, last = ranges.get(path[1], (start, stop))
            ranges[path[1]] = min(first, start), max(last, stop)
    not_unknown = re.compile(f"[^{UNKNOWN}]|$")
    return {
        i: (len(rendering.origins[:start].rstrip(UNKNOWN)), not_unknown.search(rendering.origins, stop).start())
        for i, (start, stop) in ranges.items()
    }


def locate_answers(
    rendering: Rendering, data: Mapping[str, Any], render_text: Callable[[Sequence[Message], bool], str]
) -> dict[int, Turn | None]:
    """Return the range of each answer by the index of its message, or None if the text does not begin with the prompt for the
    answer, or with the conversation up to the answer.

    Args:
        rendering: the rendered conversation.
        data: the data from which it was rendered.
        render_text: function that renders leading messages, with or without the prompt for the next answer.

    Raises:
        TemplateFailure: The template cannot render the prompt for an answer.
    """
    messages = data["messages"]
    ranges = message_ranges(rendering, data)
    shapes = [_shape(message) for message in messages]
    kinds: dict[Any, list[int]] = defaultdict(list)
    for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        surroundings = _surroundings(rendering, ranges[i]) if i in ranges else i
        kinds[(surroundings, i == 0, *shapes[max(i - 1, 0) : i + 2])].append(i)

    def rendered_turn(i: int) -> Turn | None:
        try:
            before, after = render_text(messages[:i], True), render_text(messages[: i + 1], False)
        except TemplateFailure as failure:
            raise TemplateFailure(
                f"the template cannot render the prompt for message {i + 1}: {failure.reason}"
            ) from None
        if not after.startswith(before) or not rendering.text.startswith(after):
            return None
        if i == 0 and i in ranges and rendering.text[len(before) : ranges[i][0]].strip():
            return None  # a prompt without messages may lack the header of an answer
        return len(before), len(after)

    turns: dict[int, Turn | None] = {}
    for (surroundings, *_), indices in kinds.items():
        checked = {i: rendered_turn(i) for i in {indices[0], indices[-1]}}
        turns |= checked
        if len(indices) > 2:
            header, tail = surroundings
            offsets = {turn and (turn[0] - ranges[i][0], turn[1] - ranges[i][1]) for i, turn in checked.items()}
            before, after = offset if len(offsets) == 1 and (offset := offsets.pop()) else (1, 0)
            is_inside = -len(header) <= before <= 0 <= after <= len(tail)
            for i in indices[1:-1]:
                turns[i] = (ranges[i][0] + before, ranges[i][1] + after) if is_inside else rendered_turn(i)
    return dict(sorted(turns.items()))


def _shape(message: Message) -> tuple:
    return message["role"], tuple(sorted(message)), len(message.get("tool_calls", ())), not message.get("content")


def _surroundings(rendering: Rendering, text_range: Turn) -> tuple[str, str]:
    """Return the text that the template writes directly before and directly after the text of an answer."""
    start, stop = text_range
    before = len(rendering.origins[:start].rstrip(TEMPLATE))
    after = re.compile(f"{TEMPLATE}*").match(rendering.origins, stop).end()
    return rendering.text[before:start], rendering.text[stop:after]
