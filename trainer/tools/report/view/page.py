"""Samples and figures as one HTML page that needs no other file."""

from collections.abc import Sequence
from html import escape

from trainer.base.system.spelling import counted
from trainer.tools.report.view.samples import DocumentView, Piece, SampleView, visible

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1b1b1b; --line: #767676; --target: #c9efd2; --special: #7a1fa2; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181b; --text: #e8e8e8; --line: #8e8e8e; --target: #1d4a2c; --special: #dda6f5; }
}
body { background: var(--page); color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
body { margin: 0 auto; padding: 1rem; max-width: 75rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { border: 1px solid var(--line); padding: 0.2rem 0.4rem; text-align: right; }
th[scope=row] { text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: 0.6rem; }
mark { background: var(--target); color: inherit; border-bottom: 2px solid currentColor; }
.special { color: var(--special); font-weight: bold; }
.spoken { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.spoken { white-space: nowrap; user-select: none; }
"""
"""Text, marks and special tokens have a contrast of at least 4.5 in both colour schemes. Targets are underlined too."""


def page(title: str, rows: Sequence[Sequence[str]], notes: Sequence[str], samples: Sequence[SampleView]) -> str:
    """Return the page. A part of the data is shown as text only, whatever it contains.

    Args:
        title: Heading of the page.
        rows: Table of the datasets. The first row has the titles.
        notes: Lines below the table.
        samples: Samples to show.
    """
    listed = "".join(f"<li>{_text(note)}</li>\n" for note in notes)
    legend = f"<p>In the samples, {_piece(Piece('target tokens', True, False))} are those whose loss counts, and "
    legend += f"{_piece(Piece('special tokens', False, True))} are single tokens, not text.</p>\n"
    body = [
        f"<h1>{_text(title)}</h1>\n",
        f"<h2>Datasets</h2>\n{_table(rows)}",
        f"<ul>\n{listed}</ul>\n" if listed else "",
        f"<h2>Samples</h2>\n{legend}" if samples else "",
        *(_sample(number, sample) for number, sample in enumerate(samples, start=1)),
    ]
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    head += f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>"
    main = f"<body>\n<main>\n{''.join(body)}</main>\n</body>"
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n{main}\n</html>\n'


def _text(text: str) -> str:
    return escape(visible(text))


def _table(rows: Sequence[Sequence[str]]) -> str:
    (_, *titles), *values = rows
    head = "".join(f'<th scope="col">{_text(title)}</th>' for title in ("dataset", *titles))
    lines = [f"<thead><tr>{head}</tr></thead>\n<tbody>\n"]
    for name, *cells in values:
        columns = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{_text(name)}</th>{columns}</tr>\n')
    caption = "<caption>Figures of each dataset</caption>\n"
    # A focusable region, so that a wide table can be scrolled with the keyboard.
    region = '<div class="wide" role="region" aria-label="Figures" tabindex="0">'
    return f"{region}<table>\n{caption}{''.join(lines)}</tbody>\n</table></div>\n"


def _sample(number: int, sample: SampleView) -> str:
    documents = "".join(map(_document, sample.documents))
    heading = f"sample-{number}"
    return f'<section aria-labelledby="{heading}">\n<h3 id="{heading}">{_text(sample.title())}</h3>\n{documents}</section>\n'


def _document(document: DocumentView) -> str:
    title = f"{document.title}: {counted(document.num_tokens, 'token')}, {counted(document.num_targets, 'target')}"
    text, was_target = [], False
    for piece in document.pieces:
        if piece.is_target != was_target:  # colours are silent
            text.append(f'<span class="spoken">{"[target] " if piece.is_target else " [end of target] "}</span>')
        text.append(_piece(piece))
        was_target = piece.is_target
    return f'<h4>{_text(title)}</h4>\n<pre dir="auto">\n{"".join(text)}</pre>\n'


def _piece(piece: Piece) -> str:
    text = _text(piece.text)
    if piece.is_special:
        text = f'<span class="special">{text}</span>'
    return f"<mark>{text}</mark>" if piece.is_target else text
