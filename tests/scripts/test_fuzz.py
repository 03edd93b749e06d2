"""The short form of scripts/dev/fuzz.py, and its own findings."""

import re
import subprocess
import sys
import time

import pytest

from scripts.dev.fuzz import TARGETS, Fuzzer, Target, bad_refusal
from tests.conftest import ROOT
from trainer.config import ConfigError


def test_random_input_is_refused_with_one_line_or_gives_the_right_result():
    command = [sys.executable, ROOT / "scripts/dev/fuzz.py", "--cases", "25", "--seed", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    summary = re.compile(r"(\w+): 25 cases with seed 2: (\d+) accepted, (\d+) refused, 0 findings; .*")
    targets = [summary.fullmatch(line) for line in done.stdout.splitlines()]
    assert [match[1] for match in targets] == list(TARGETS)
    assert all(int(match[2]) > 0 and int(match[3]) > 0 for match in targets), done.stdout


def outcome_of(run):
    with Fuzzer("fake", 0, {"fake": Target(1, run)}) as fuzzer:
        return fuzzer.run(0)


def refuse(line):
    raise ConfigError("", line)


def test_accepted_and_refused_cases_are_no_findings():
    assert (outcome_of(lambda *_: "").accepted, outcome_of(lambda *_: "").finding) == (True, "")
    outcome = outcome_of(lambda *_: refuse("--x: must be y"))
    assert (outcome.accepted, outcome.refusal, outcome.finding) == (False, "--x: must be y", "")


@pytest.mark.parametrize(
    ("run", "finding"),
    [
        (lambda *_: 1 / 0, "ZeroDivisionError"),
        (lambda *_: refuse(""), "the refusal is empty"),
        (lambda *_: refuse("'NoneType' object has no attribute 'x'"), "Python's words"),
        (lambda *_: "\n", "the refusal is empty"),
        (lambda *_: "a\nb", "not one printable line"),
        (lambda *_: "a" * 5000, "5000 characters"),
        (lambda *_: len(bytearray(2**40)), "MemoryError"),
    ],
)
def test_a_failed_case_is_a_finding(run, finding):
    assert finding in outcome_of(run).finding


def test_a_case_without_end_is_a_finding_with_its_stack(monkeypatch):
    monkeypatch.setattr("scripts.dev.fuzz.CPU_LIMIT_S", 0)

    def run_forever(*_):
        while True:
            time.monotonic()

    assert "in run_forever" in outcome_of(run_forever).finding


def test_the_input_of_a_case_depends_on_the_seed_and_its_number():
    drawn = []
    for seed, number in ((0, 0), (0, 0), (0, 1), (1, 0)):
        with Fuzzer("fake", seed, {"fake": Target(1, lambda random, *_: f"{random.random()}")}) as fuzzer:
            drawn.append(fuzzer.run(number).refusal)
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_refusals_are_plain_lines():
    assert bad_refusal("--training.steps 0: must be at least 1") == ""
