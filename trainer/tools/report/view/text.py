"""Samples and figures as text for a console."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from trainer.base.system.spelling import counted
from trainer.base.system.streams import visible
from trainer.tools.report.view.samples import Piece, SampleView

_RESET = "\x1b[0m"
_COLOURS = {(True, False): "\x1b[32m", (True, True): "\x1b[1;32m", (False, False): "", (False, True): "\x1b[1;35m"}
"""(target, special token) -> escape sequence: green, bold green, none, bold magenta."""
_TARGET, _SPECIAL = "⟦⟧", "⟨⟩"
"""Brackets around targets and special tokens where there is no colour. Those of the data itself become escape sequences."""


def legend(colour: bool) -> str:
    if colour:
        return f"{_COLOURS[True, False]}target tokens{_RESET}, {_COLOURS[False, True]}special tokens{_RESET}"
    return "{}target tokens{}, {}special token{}".format(*_TARGET, *_SPECIAL)


def sample_lines(sample: SampleView, colour: bool, most: int | None = None) -> Iterator[str]:
    """Yield the lines of a sample.

    Args:
        sample: What is shown.
        colour: Whether the console shows colours; otherwise brackets mark tokens.
        most: Maximum number of documents. None: all of them.
    """
    yield sample.title()
    shown = sample.documents[:most]
    for document in shown:
        yield f"-- {document.heading()}"
        yield (_coloured if colour else _bracketed)(document.pieces)
    if hidden := len(sample.documents) - len(shown):
        yield f"-- {counted(hidden, 'more document')}"


def _coloured(pieces: Sequence[Piece]) -> str:
    texts = []
    for piece in pieces:
        start = _COLOURS[piece.is_target, piece.is_special]
        texts.append(start + visible(piece.text) + (_RESET if start else ""))
    return "".join(texts)


def _bracketed(pieces: Sequence[Piece]) -> str:
    texts = []
    for is_target, group in groupby(pieces, lambda piece: piece.is_target):
        inner = "".join(_in_brackets(piece) for piece in group)
        texts.append(f"{_TARGET[0]}{inner}{_TARGET[1]}" if is_target else inner)
    return "".join(texts)


def _in_brackets(piece: Piece) -> str:
    text = "".join(f"\\u{ord(c):04x}" if c in _TARGET + _SPECIAL else c for c in visible(piece.text))
    return f"{_SPECIAL[0]}{text}{_SPECIAL[1]}" if piece.is_special else text


def table_lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose first column is aligned left and whose other columns are aligned right. A column without
    values is omitted."""
    titles, *values = rows
    columns = [i for i in range(len(titles)) if i == 0 or any(row[i] for row in values)]
    widths = {i: max(len(row[i]) for row in rows) for i in columns}
    for row in rows:
        first, *rest = columns
        yield f"{row[first]:<{widths[first]}}" + "".join(f"  {row[i]:>{widths[i]}}" for i in rest)
