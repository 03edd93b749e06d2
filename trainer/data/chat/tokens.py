"""Tokens of rendered texts, and which of them are targets."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.data.chat.answers import Turn
from trainer.data.chat.special_names import SpecialNames
from trainer.data.chat.template import Rendering, TemplateFailure
from trainer.data.chat.traced import UNKNOWN
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

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, int], names: SpecialNames):
        """Describe the encoding.

        Args:
            tokenizer: Encodes plain text.
            special: Name -> id of the special tokens.
            names: Recognizes the names of special tokens in a text.
        """
        self.tokenizer = tokenizer
        self.special = special
        self.special_ids = frozenset(special.values())
        self.names = names

    def encode(
        self, rendering: Rendering, turns: Sequence[Turn], turn_mask: Sequence[bool], marked: bool
    ) -> TokensAndMask:
        """Encode a rendered text.

        Args:
            rendering: The text.
            turns: Range of each answer in the text.
            turn_mask: Whether each answer is a target, shape (turns,).
            marked: Whether the template itself marks the answers, with generation blocks.

        Raises:
            TemplateFailure: The text cannot be encoded.
            MissingTokens: The tokenizer lacks special tokens of the text.
        """
        encoded = _Encoded()
        end = 0
        for (start, stop), is_target in zip(turns, turn_mask, strict=True):
            self._extend(encoded, self.pieces(rendering, end, start), is_target=False)
            end = self._end_of_turn(rendering, start, stop, marked)
            self._extend(encoded, self.pieces(rendering, start, end), is_target)
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

    def end_of_turn(self, rendering: Rendering, start: int, stop: int, ends: Sequence[int]) -> int | None:
        """Return the offset after the first of the tokens `ends` in text[start:stop], or None. A call may end by another token. If
        there is none of `ends`, return the offset after the first special token behind all characters of unknown origin."""
        first = None
        for piece, is_special in self.pieces(rendering, start, stop):
            has_unknown = UNKNOWN in rendering.origins[start : start + len(piece)]
            start += len(piece)
            if is_special and self.special.get(piece) in ends:
                return start
            if is_special or has_unknown:
                first = None if has_unknown else first or start
        return first

    def _end_of_turn(self, rendering: Rendering, start: int, stop: int, marked: bool) -> int:
        """Return the offset after the special token that ends the turn in text[start:stop]. If the template has generation
        blocks, this token may begin at `stop`."""
        pieces = list(self.pieces(rendering, start, stop))
        tail = pieces.pop()[0] if pieces and not pieces[-1][1] else ""
        if pieces and not tail.strip():
            return stop - len(tail)  # exclude white space after it, such as ChatML's line end: generation stops before
        if not marked:
            raise TemplateFailure(NO_END_OF_TURN)
        following, is_special = next(self.pieces(rendering, stop), ("", False))
        return stop + len(following) if is_special else stop

    def _extend(self, encoded: _Encoded, pieces: Iterator[tuple[str, bool]], is_target: bool) -> None:
        """Append the tokens of a text to `encoded`.

        Args:
            encoded: What precedes the text.
            pieces: The text, from `pieces`.
            is_target: Whether its tokens are targets.
        """
        parts: list[str | int] = []
        for piece, is_special in pieces:
            if not is_special:
                parts.append(piece)
            elif piece in self.special:
                parts.append(self.special[piece])
            else:
                raise MissingTokens([piece])
        tokens = self.encode_parts(parts, encoded.parts)
        encoded.parts += parts
        encoded.tokens += tokens
        encoded.targets += [is_target] * len(tokens)
