"""Words in messages: lists of names, the name that a user probably meant, numbers with a noun."""

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

_SHOWN_NAMES, _SHOWN_CHARACTERS = 8, 40


def listed(names: Sequence[str]) -> str:
    """Return the first names, separated by commas, without the end of long ones, or "none"."""
    shown = [n if len(n) <= _SHOWN_CHARACTERS else f"{n[: _SHOWN_CHARACTERS - 3]}..." for n in names[:_SHOWN_NAMES]]
    more = ["..."] if len(names) > _SHOWN_NAMES else []
    return ", ".join(shown + more) or "none"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def counted(number: float, noun: str, form: str = "", plural: str = "") -> str:
    """Return a number and its noun, which is singular only for 1: "1 file", "2 files".

    Args:
        number: A count.
        noun: In the singular.
        form: Format of the number, such as ",".
        plural: Of the noun, if it does not end in "s" only.
    """
    text = f"{number:{form}}"
    return f"{text} {noun if text == '1' else plural or f'{noun}s'}"


def every(number: int, noun: str) -> str:
    """Return "every step", "every 2 steps" and so on."""
    return f"every {noun}" if number == 1 else f"every {number} {noun}s"


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the closest candidate, or "" if no candidate is close. Case is ignored. cutoff: least similarity, from 0 to 1."""
    names = {name.lower(): name for name in candidates}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else ""


def did_you_mean(word: str, candidates: Iterable[str], show: str = "{!r}") -> str:
    """Return "; did you mean 'x'?" with the closest candidate, or "" if no candidate is close. Case is ignored."""
    close = nearest(word, candidates)
    return f"; did you mean {show.format(close)}?" if close else ""


def nearest_path(path: str | Path) -> str:
    """Return the closest existing path to one that does not exist, or "" if none is close. Each part that does not exist is
    replaced by the closest name in its folder, as far as there is one."""
    path = Path(path)
    missing = next((p for p in (*reversed(path.parents), path) if not os.path.lexists(p)), None)
    if missing is None:
        return ""
    try:
        name = nearest(missing.name, os.listdir(missing.parent))
    except OSError:
        return ""
    if not name:
        return ""
    found = missing.parent / name
    complete = found / path.relative_to(missing)
    return str(complete) if complete.exists() else nearest_path(complete) or str(found)


def similar_path(path: str | Path) -> str:
    """Return "; did you mean 'x'?" with the closest existing path, or "" if none is close."""
    found = nearest_path(path)
    return f"; did you mean {found!r}?" if found else ""
