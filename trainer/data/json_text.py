"""JSON text that users wrote: one parser, so that equal text has one meaning in a file, an array, a cell of a table and a value.

- Two fields of one object with the same name are an error, because one of them would be lost.
- NaN, Infinity and -Infinity are read, because Python's json writes them. What uses a number checks it.
- A lone surrogate is kept, because it may stand in a field that is not used. What uses a text checks it (`has_lone_surrogate`).
- Bytes are UTF-8. Python's json would take bytes that contain zeros for UTF-16.
"""

import json
from typing import Any


class InvalidJson(ValueError):
    """The reason why a text is not usable JSON."""

    def __init__(self, reason: str, is_one_value: bool = True):
        super().__init__(reason)
        self.is_one_value = is_one_value
        """Whether the fault is inside one value. False: the text ends before the value does, or goes on after it."""


class RepeatedName(InvalidJson):
    """An object has two fields with the same name."""


def parse_json(text: str | bytes | bytearray, unit: str = "text") -> Any:
    """Return the value of a JSON text.

    Args:
        text: The text, or its bytes in UTF-8.
        unit: What the text is, for messages: they count columns in a "line", and characters in anything else.

    Raises:
        InvalidJson: The text is not JSON, or breaks a rule of this module.
    """
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise InvalidJson(f"the {unit} is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if unit == "line" else f"character {error.pos + 1}"
        hint = "; Python's notation is not JSON" if error.doc.startswith(("{'", "[{'")) else ""
        reason = f"the {unit} is not valid JSON: {error.msg} ({place}){hint}"
        raise InvalidJson(reason, error.pos < len(error.doc.rstrip()) and error.msg != "Extra data") from None
    except InvalidJson:
        raise
    except (ValueError, RecursionError):  # an integer with thousands of digits, thousands of nested brackets
        raise InvalidJson(f"the {unit} is not valid JSON") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise RepeatedName(f"an object has two fields named {name!r}")
    return fields


def has_lone_surrogate(text: str) -> bool:
    """Return whether a text contains a lone surrogate. JSON can hold one, but no tokenizer accepts it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False
