"""The rules of JSON text."""

import math

import pytest

from trainer.data.json_text import InvalidJson, RepeatedName, has_lone_surrogate, parse_json


def test_an_object_with_two_fields_of_one_name_is_refused():
    with pytest.raises(RepeatedName, match="an object has two fields named 'weight'"):
        parse_json(b'{"a": [{"weight": 0, "b": 1, "weight": 1}]}')


def test_numbers_that_only_python_writes_are_read():
    values = parse_json("[NaN, Infinity, -Infinity]")
    assert math.isnan(values[0]) and values[1:] == [math.inf, -math.inf]


def test_a_lone_surrogate_is_kept_and_can_be_found():
    assert [has_lone_surrogate(text) for text in parse_json('["\\ud800", "\\ud83d\\ude00", "a"]')] == [
        True,
        False,
        False,
    ]


def test_bytes_are_utf8_even_if_they_contain_zeros():
    with pytest.raises(InvalidJson, match="the text is not valid JSON"):
        parse_json('{"a": 1}'.encode("utf-16-le"))
    with pytest.raises(InvalidJson, match=r"the cell is not UTF-8 text \(byte 1\)"):
        parse_json(b'"\xff"', "cell")


@pytest.mark.parametrize(
    ("text", "is_one_value"),
    [('{"a": ', False), ("", False), ("{} {}", False), ("{'a': 1}", True), ('{"a": 1,}', True), ("[" * 100_000, True)],
)
def test_a_text_that_ends_too_early_or_goes_on_is_distinguished_from_a_wrong_value(text, is_one_value):
    with pytest.raises(InvalidJson) as error:
        parse_json(text)
    assert error.value.is_one_value == is_one_value
