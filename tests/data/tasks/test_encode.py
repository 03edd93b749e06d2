"""Tokens of requests by the rules of lm-evaluation-harness."""

from dataclasses import dataclass

import pytest

from trainer.data.tasks.encode import Request, RequestEncoder, UnusableRequest


@dataclass
class Letters:
    """A tokenizer whose tokens are characters, except that "ab" and " c" are one."""

    prefix: tuple = ()
    bos: int | None = 1
    eos: int = 2
    special_tokens = {"<s>": 1, "</s>": 2}  # noqa: RUF012

    def encode_parts(self, parts):
        return [
            t
            for part in parts
            for t in ([part] if isinstance(part, int) else words(part.replace("ab", "#").replace(" c", "~")))
        ]


def merged(text):
    return text.replace("ab", "#").replace(" c", "~")


def words(text):
    return tuple(ord(c) for c in text)


def encoder(max_tokens=100, render=None, **tokenizer):
    return RequestEncoder(tokenizer=Letters(**tokenizer), max_tokens=max_tokens, render=render)


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [
        ("x", " c", ("x", "~")),
        ("x ", "c", ("x", "~")),  # white space at the end of the context belongs to the continuation
        ("x \n", "c", ("x", " \nc")),
        ("xa", "by", ("xa", "y")),  # one token over the boundary is not scored: the context alone has as many
        ("x", "", ("x", "")),
    ],
)
def test_the_text_is_encoded_as_a_whole_and_split(context, continuation, expected):
    assert encoder()(context, continuation) == Request(*map(words, expected))


def test_a_text_that_has_no_token_of_its_own_is_refused():
    with pytest.raises(UnusableRequest, match="its text and the end of the context are one token"):
        encoder()("xa", "b")


@pytest.mark.parametrize(("bos", "first"), [(1, 1), (None, 2)])
@pytest.mark.parametrize("context", ["", " "])
def test_an_empty_context_is_bos_or_else_eos(bos, first, context):
    assert encoder(bos=bos)(context, "y") == Request((first,), words(context + "y"))


def test_bos_of_an_empty_context_is_not_doubled():
    assert encoder()("", "<s>y") == Request((1,), words("y"))
    assert encoder(bos=None)("", "</s>y") == Request((2,), words("y"))


def test_the_tokens_of_a_context_are_those_of_its_last_use():
    encode = encoder()
    assert [encode("x", "a").context, encode("x", "b").context, encode("y", "b").context] == [*map(words, "xxy")]


def test_bos_precedes_if_the_tokenizer_adds_it():
    assert encoder(prefix=(1,))("x", "y") == Request((1, ord("x")), words("y"))
    assert encoder(prefix=(1,))("", "y") == Request((1,), words("y"))


def test_names_of_special_tokens_are_these_tokens():
    assert encoder(prefix=(1,))("<s>x</s>", "y") == Request((1, ord("x"), 2), words("y"))
    assert encoder()("x", "y</s>") == Request(words("x"), (ord("y"), 2))


def test_a_long_request_loses_its_first_tokens_but_never_a_target():
    assert encoder(max_tokens=3)("vwx", "yz") == Request(words("wx"), words("yz"))
    assert encoder(max_tokens=2)("vwx", "yz") == Request(words("x"), words("yz"))
    with pytest.raises(UnusableRequest, match="a continuation has 3 tokens, but a request has at most 2"):
        encoder(max_tokens=2)("x", "xyz")


def test_the_template_of_a_chat_sets_the_boundary():
    chat = encoder(render=lambda text: [*words(f"<{text}>")])
    assert chat("x", " yz") == Request(words("<x>"), words("yz"))
    assert chat("", " yz") == Request((1,), words("yz"))
    assert chat.prompt("x", 5) == [*words("<x>")]


def test_a_prompt_loses_its_first_tokens():
    assert encoder().prompt("vwxyz", 3) == [*words("xyz")]
    assert encoder().prompt("", 2) == [1]
