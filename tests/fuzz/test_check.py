"""The rules and limits that the tests of random input apply."""

import time

import pytest

from tests.fuzz import check
from tests.fuzz.check import bad_refusal, limits, may_refuse
from trainer.base.config import ConfigError


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("--training.steps 0: must be at least 1", ""),
        ("\n", "the refusal is empty"),
        ("a\nb", "not one printable line"),
        ("a" * 5000, "5000 characters"),
        ("'NoneType' object has no attribute 'x'", "Python's words"),
    ],
)
def test_refusals_are_plain_lines(line, rule):
    assert rule in bad_refusal(line) and bool(rule) == bool(bad_refusal(line))


def test_a_refusal_of_intact_input_fails(monkeypatch):
    monkeypatch.setattr(check, "record", lambda outcome: None)  # needs a test with `given`
    with may_refuse() as refusals:
        raise ConfigError("x", "must be y")
    assert refusals == ["x: must be y"]
    with pytest.raises(AssertionError, match="intact input was refused"), may_refuse(expected=False):
        raise ConfigError("x", "must be y")


def test_a_case_without_end_fails(monkeypatch):
    monkeypatch.setattr(check, "CPU_LIMIT_S", 0.1)
    with pytest.raises(pytest.fail.Exception, match=r"more than 0.1 s"), limits():
        while True:
            time.monotonic()


def test_a_case_cannot_allocate_all_memory():
    with pytest.raises(MemoryError), limits():
        bytearray(2**40)
    bytearray(2**20)
