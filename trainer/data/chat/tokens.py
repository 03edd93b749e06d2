"""Tokens of rendered texts, and which of them are targets."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.data.chat.answers import Turn
from trainer.data.chat.special_names import SpecialNames
from trainer.data.chat.template import Rendering, TemplateFailure
from trainer.data.chat.traced_text import UNKNOWN
from trainer.data.tokenizer.protocol import Tokenizer

TokensAndMask = tuple[list[int], list[bool]]
"""Token ids, and for each token whether it is a target."""
NO_END_OF_TURN = "the template ends an answer without a special token, so generation would never stop"


class MissingTokens(Exception):
    """Error of a text with names of special tokens that the tokenizer does not have."""

    def __init__(self, names: Sequence[str]):
        super().__init__(names)
        self.names = names


@dataclass
class _Encoded:
    tokens: list[int] = field(default_factory=list)
    targets: list[bool] = field(default_factory=list)
    parts: list[str | int] = field(default_factory=list)
    """The encoded text: plain texts, and ids of special tokens."""


class RenderingEncoder:
    """Encoder of rendered texts. The prompt and each answer are tokenized separately, exactly as at inference."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, int], plain: Collection[str], names: SpecialNames):
        """Describe the encoding.

        Args:
            tokenizer: Encodes plain text.
            special: Name -> id of the special tokens.
            plain: Those of them that the tokenizer recognizes in any text.
            names: Recognizes the names of special tokens in a text.
        """
        self.tokenizer = tokenizer
        self.special = special
        self.plain = frozenset(plain)
        self.special_ids = frozenset(token for name, token in special.items() if name not in self.plain)
        self.names = names

    def encode(self, rendering: Rendering, turns: Mapping[int, Turn], targets: Collection[int]) -> TokensAndMask:
        """Encode a rendered text.

        Args:
            rendering: The text.
            turns: Range of each answer in the text, by the index of its message.
            targets: Indices of the answers that are targets.

        Raises:
            TemplateFailure: The text cannot be encoded.
            MissingTokens: The tokenizer lacks special tokens of the text.
        """
        encoded = _Encoded()
        end = 0
        for i, (start, stop) in turns.items():
            self._extend(encoded, self.pieces(rendering, end, start), is_target=False)
            self._extend(encoded, self.pieces(rendering, start, stop), i in targets)
            end = stop
        self._extend(encoded, self.pieces(rendering, end), is_target=False)
        return encoded.tokens, encoded.targets

    def pieces(self, rendering: Rendering, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, bool]]:
        """Split a part of a text at the names of special tokens. Yield each piece, and whether it is such a name."""
        return self.names.pieces(rendering.text[start:stop], rendering.origins[start:stop])

    def encode_parts(self, parts: Sequence[str | int], before: Sequence[str | int]) -> list[int]:
        """Encode plain texts and ids of special tokens. before: the parts that precede. Raises TemplateFailure."""
        try:
            tokens = self.tokenizer.encode_parts(parts, before)
        except ValueError as error:
            raise TemplateFailure(str(error)) from None
        special = Counter(token for token in tokens if token in self.special_ids)
        if special - Counter(part for part in parts if isinstance(part, int)):
            raise TemplateFailure("the tokenizer encodes plain text as a special token")
        return tokens

    def end_of_turn(self, rendering: Rendering, start: int, stop: int, ends: Collection[int]) -> int:
        """Return the offset after the first of the tokens `ends` in a part of a text. A call may end by another token: if there
        is none of `ends`, return the offset after the first special token behind all text of unknown origin. Raises
        TemplateFailure if there is no such token."""
        first = None
        for piece, is_special in self.pieces(rendering, start, stop):
            has_unknown = UNKNOWN in rendering.origins[start : start + len(piece)]
            start += len(piece)
            if is_special and self.special.get(piece) in ends:
                return start
            if is_special or has_unknown:
                first = None if has_unknown else first or start
        if first is None:
            raise TemplateFailure(NO_END_OF_TURN)
        return first

    def _extend(self, encoded: _Encoded, pieces: Iterator[tuple[str, bool]], is_target: bool) -> None:
        """Append the tokens of a text to `encoded`.

        Args:
            encoded: What precedes the text.
            pieces: The text, from `pieces`.
            is_target: Whether its tokens are targets.
        """
        parts: list[str | int] = []
        for piece, is_special in pieces:
            if not is_special or piece in self.plain:
                joined = parts.pop() if parts and isinstance(parts[-1], str) else ""
                parts.append(joined + piece)
            elif piece in self.special:
                parts.append(self.special[piece])
            else:
                raise MissingTokens([piece])
        tokens = self.encode_parts(parts, encoded.parts)
        encoded.parts += parts
        encoded.tokens += tokens
        encoded.targets += [is_target] * len(tokens)
