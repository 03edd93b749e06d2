"""Traced strings behave as plain strings, and never take a character of a message for the template's."""

import json
import random

import pytest

from tests.data.chat.test_template import rendering
from trainer.data.chat.template import ChatTemplate
from trainer.data.chat.traced_text import (
    TEMPLATE,
    UNKNOWN,
    Traced,
    data_index,
    data_origin,
    join,
    literal,
    origins_of,
    strings,
    to_json,
)

ALPHABET = "ab <|>\n\u00df\u0130\u2028\U0001f642"


def text(generator: random.Random) -> Traced:
    """Return a random string. Its characters in the template's part are X, Y and Z, which messages do not contain."""
    parts = [literal("".join(generator.choices("XYZ", k=generator.randrange(3)))) for _ in range(3)]
    data = ["".join(generator.choices(ALPHABET, k=generator.randrange(4))) for _ in range(3)]
    traced = [Traced(piece, data_origin(i) * len(piece)) for i, piece in enumerate(data)]
    return join(piece for pair in zip(parts, traced, strict=True) for piece in pair)


OPERATIONS = [
    lambda s, other, n: s + other,
    lambda s, other, n: str(s) + s,
    lambda s, other, n: s * (n % 3),
    lambda s, other, n: s[n:],
    lambda s, other, n: s[::-1],
    lambda s, other, n: s[:-n],
    lambda s, other, n: s.strip(),
    lambda s, other, n: s.lstrip("a<"),
    lambda s, other, n: s.rstrip(other),
    lambda s, other, n: s.removeprefix(other),
    lambda s, other, n: s.removesuffix(s[n:]),
    lambda s, other, n: s.split(),
    lambda s, other, n: s.split(None, n),
    lambda s, other, n: s.rsplit(None, n),
    lambda s, other, n: s.split("a"),
    lambda s, other, n: s.split("<|", n),
    lambda s, other, n: s.rsplit("a", n),
    lambda s, other, n: s.splitlines(),
    lambda s, other, n: s.splitlines(True),
    lambda s, other, n: s.partition("|"),
    lambda s, other, n: s.rpartition("a"),
    lambda s, other, n: s.replace("a", other),
    lambda s, other, n: s.replace("<", "", n),
    lambda s, other, n: s.replace("", "-"),
    lambda s, other, n: s.join([other, s, "a"]),
    lambda s, other, n: s.lower(),
    lambda s, other, n: s.title().lower(),
    lambda s, other, n: s.center(20),
    lambda s, other, n: s.zfill(9),
    lambda s, other, n: s.expandtabs().swapcase().swapcase(),
    lambda s, other, n: list(s),
    lambda s, other, n: "%s-%s" % (s, other),  # noqa: UP031  templates use it
    lambda s, other, n: (s == other, s < other, hash(s) == hash(str.__str__(s)), len(s), other in s, s.find(other)),
]


def plain(value):
    """Return a value with plain strings."""
    if isinstance(value, str):
        return "".join(str.__iter__(value))
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def pieces(value):
    return [value] if isinstance(value, str) else [v for v in value if isinstance(v, str)]


@pytest.mark.parametrize("operation", OPERATIONS, ids=range(len(OPERATIONS)))
def test_operations_give_the_text_and_the_origin_of_each_character(operation):
    generator = random.Random(0)
    for _ in range(200):
        s, other, n = text(generator), text(generator), generator.randrange(1, 4)
        result = operation(s, other, n)
        assert plain(result) == operation(plain(s), plain(other), n)
        for piece in pieces(result):
            origins = origins_of(piece)
            assert len(origins) == len(piece)
            for character, origin in zip(plain(piece), origins, strict=True):
                assert origin == UNKNOWN or (origin == TEMPLATE) == (character.upper() in "XYZ")


def test_json_is_that_of_the_json_module_and_keeps_the_origins():
    value = {"b": [literal('A"\n'), Traced("é<", data_origin(3) * 2), 1, None, True, 1e9], "a": {}, "#0": "#1"}
    for options in ({}, {"ensure_ascii": True}, {"indent": 2}, {"sort_keys": True}, {"separators": (",", ":")}):
        given = {"ensure_ascii": False} | options
        assert to_json(value, **options) == json.dumps(value, **given)
    written = to_json(value)
    assert {origin for c, origin in zip(written, origins_of(written), strict=True) if c in "é<"} == {data_origin(3)}
    assert [origin for c, origin in zip(written, origins_of(written), strict=True) if c in '{}[],"'][:3] == [
        UNKNOWN
    ] * 3


def test_each_string_of_the_data_has_its_own_origin():
    assert [data_index(data_origin(i)) for i in (0, 1, 0xD6FF, 0xD700, 999_999)] == [0, 1, 0xD6FF, 0xD700, 999_999]
    assert not any(0xD800 <= ord(data_origin(i)) < 0xE000 for i in range(0xD600, 0xD800))
    assert list(strings({"a": ["x", 1], "b": "y"})) == [
        *[(("a", None), "a"), (("a", 0), "x"), (("b", None), "b"), (("b",), "y")],
    ]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'<' ~ x ~ '>'", "<x x>"),
        ("['<', x] | join('>')", "<>x x"),
        ("[x, x] | join", "x xx x"),
        ("x | trim | upper", "X X"),
        ("x | replace(' ', '<>')", "x<>x"),
        ("(x.split(' ') | last) ~ '>'", "x>"),
        ("x | list | first ~ '<'", "x<"),
        ("{'<': x} | tojson", '{"<": "x x"}'),
    ],
)
def test_templates_compute_with_origins(expression, expected):
    written = rendering(ChatTemplate.compile("{{ " + expression + " }}"), x="x x")
    assert written.text == expected
    for character, origin in zip(written.text, written.origins, strict=True):
        assert (origin == TEMPLATE) <= (character in "<>")
        assert character not in "<>" or origin == TEMPLATE


def test_macros_blocks_and_loops_keep_origins():
    source = (
        "{% macro f(a) %}<{{ a }}>{% endmacro %}{% set y %}<{{ x }}>{% endset %}{{ f(x) }}{{ y }}"
        "{% for c in [x] %}<{{ c }}>{% endfor %}{% set n = namespace(t='<') %}{% set n.t = n.t + x %}{{ n.t }}"
        "{% filter trim %} <{{ x }} {% endfilter %}"
    )
    written = rendering(ChatTemplate.compile(source), x="x")
    assert written.text == "<x><x><x><x<x"
    assert [origin == TEMPLATE for origin in written.origins] == [character in "<>" for character in written.text]


def test_an_untraced_operation_has_an_unknown_origin():
    for expression in ("'%s>' % x", "'{}>'.format(x)", "x | indent(2)", "('<' ~ x) | title", "('<' ~ x) | safe"):
        written = rendering(ChatTemplate.compile("{{ " + expression + " }}"), x="x\ny")
        assert UNKNOWN in written.origins and TEMPLATE not in written.origins, expression
