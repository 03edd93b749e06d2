"""scripts/dev/feature_price.py: its table is complete, and stands in CHANGELOG.md. The figures there are those of one commit and
are not compared."""

import re
from collections import Counter

import pytest

from scripts.dev.feature_price import BEGIN, CAPABILITIES, END, FOLDERS, PAGE, generate, patterns, prices, written_files


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_pattern_of_a_capability_matches_a_file(capability):
    assert [pattern for pattern in patterns(CAPABILITIES[capability]) if not written_files(pattern)] == []


def test_no_file_is_counted_twice():
    counts = Counter(file for text in CAPABILITIES.values() for p in patterns(text) for file in written_files(p))
    assert {file: count for file, count in counts.items() if count > 1} == {}


def test_the_capabilities_and_the_core_make_up_all_lines():
    *parts, total = prices().values()
    assert {folder: sum(part[folder] for part in parts) for folder in FOLDERS} == total


def test_the_changelog_has_the_price_of_every_capability_and_of_nothing_else():
    written = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    names = re.findall(r"^\| (.+?) \| ", written, re.MULTILINE)
    assert names == ["capability", *CAPABILITIES, "core", "total"], "run scripts/dev/feature_price.py --write"


def test_a_new_table_replaces_the_old_one_and_nothing_else():
    page = f"before\n{BEGIN}an old table\n{END}after\n"
    once = generate(page)
    assert once.startswith(f"before\n{BEGIN}") and once.endswith(f"{END}after\n") and "an old table" not in once
    assert "\n| Muon |" in once and generate(once) == once
