"""Recognition of the names of special tokens in a rendered conversation."""

import re
from collections.abc import Collection, Iterator

from trainer.data.chat.template import TemplateFailure
from trainer.data.chat.traced_text import TEMPLATE, UNKNOWN
from trainer.data.tokenizer.special_tokens import SPECIAL_LOOKING


class SpecialNames:
    """The names that stand for special tokens. A name counts if the template wrote each of its characters.

    A text of a message therefore never becomes a special token, neither alone nor together with adjacent text of the template.
    """

    def __init__(self, names: Collection[str], allowed: Collection[str], *, only_known: bool = False):
        """Describe the names.

        Args:
            names: Names of the special tokens.
            allowed: Names that also count in messages.
            only_known: Whether other texts that look like such a name are plain text.
        """
        # Sorted by length, so that a name is found before its own prefix.
        longest_first = [re.escape(name) for name in sorted(filter(None, names), key=len, reverse=True)]
        pattern = "|".join([*longest_first, "(?!)" if only_known else SPECIAL_LOOKING])
        self._pattern = re.compile(pattern)
        self._overlapping = re.compile(f"(?=({pattern}))")
        self._allowed = (
            re.compile("|".join(map(re.escape, sorted(allowed, key=len, reverse=True)))) if allowed else None
        )

    def pieces(self, text: str, origins: str) -> Iterator[tuple[str, bool]]:
        """Split a text at the names that count. Yield each non-empty piece, and whether it is, or looks like, such a name.

        origins: the origin of each character (traced_text.py), with the length of the text. Raises TemplateFailure if a name
        contains characters of unknown origin, and no characters of a message.
        """
        self.check_origins(text, origins)
        end = 0
        for run in re.finditer(f"{TEMPLATE}+", origins):
            for match in self._pattern.finditer(text, *run.span()):
                yield from self._data_pieces(text[end : match.start()])
                yield match[0], True
                end = match.end()
        yield from self._data_pieces(text[end:])

    def _data_pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        end = 0
        for match in self._allowed.finditer(text) if self._allowed else ():
            if match.start() > end:
                yield text[end : match.start()], False
            yield match[0], True
            end = match.end()
        if end < len(text):
            yield text[end:], False

    def check_origins(self, text: str, origins: str) -> None:
        """Raise TemplateFailure if a name in a text contains characters of unknown origin, and no characters of a message."""
        for match in self._overlapping.finditer(text) if UNKNOWN in origins else ():
            origin = set(origins[slice(*match.span(1))])
            is_allowed = self._allowed is not None and self._allowed.fullmatch(match[1])
            if UNKNOWN in origin and origin <= {TEMPLATE, UNKNOWN} and not is_allowed:
                raise TemplateFailure(
                    f"the template processes a text with {match[1]} by a function that hides whether the template or a message "
                    "wrote it"
                )
