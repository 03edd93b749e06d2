"""Text from tokens: characters of several tokens, and strings at which a text ends."""

import pytest

from trainer.base.config import TokenizerConfig
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.inference.text import StoppedText, TextStream


@pytest.mark.parametrize(
    "text", ["né 😀 ok", "a" * 40 + "😀😀", "\u0e01\u0e33 \U0001f468\u200d\U0001f469\u200d\U0001f467 x", ""]
)
@pytest.mark.parametrize("prefix", ["", "for i in range(10):\n    print(i)", "é"])
def test_a_character_of_several_tokens_is_returned_with_its_last_token(text, prefix):
    tokenizer = load_tokenizer(TokenizerConfig())
    stream = TextStream(tokenizer, tokenizer.encode(prefix))
    pieces = [stream.put(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + stream.rest() == text
    assert "\ufffd" not in "".join(pieces)
    assert "😀" not in text or "" in pieces


def test_an_incomplete_character_is_shown_at_the_end_only():
    tokenizer = load_tokenizer(TokenizerConfig())
    stream = TextStream(tokenizer)
    *tokens, _ = tokenizer.encode("a😀")
    assert "".join(map(stream.put, tokens)) == "a" and set(stream.rest()) == {"\ufffd"}


@pytest.mark.parametrize(
    ("pieces", "shown", "rest"),
    [
        (["ab", "cd"], ["ab", "cd"], ""),
        (["abST", "OPcd"], ["ab", ""], None),
        (["a", "S", "T", "x"], ["a", "", "", "STx"], ""),
        (["a", "S", "S", "TOP"], ["a", "", "S", ""], None),
        (["STOP"], [""], None),
        (["aST"], ["a"], "ST"),
        (["x\n", "\nSTOP"], ["x", ""], None),
        (["x\n", "y"], ["x", "\ny"], ""),
        (["aSTO\n\nb"], ["aSTO"], None),
        (["one two"], ["one two"], ""),
    ],
)
def test_no_part_of_a_string_that_ends_a_text_is_shown(pieces, shown, rest):
    text = StoppedText(["STOP", "\n\n"])
    assert [text.put(piece) for piece in pieces] == shown
    assert text.has_stopped == (rest is None) and text.withheld == (rest or "")


def test_a_text_ends_at_the_first_of_several_strings_even_if_one_is_in_another():
    text = StoppedText(["abc", "b"])
    assert [text.put(character) for character in "xab"] == ["x", "", "a"] and text.has_stopped
