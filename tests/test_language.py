"""The vocabulary of the project: words that docs, docstrings, comments, messages and names avoid, with what to write instead."""

import ast
import re
import subprocess

import pytest

from tests.conftest import ROOT

PHRASES = {
    r"\btold\b|\btells?\b(?!\()": "log, report, raise, return",
    r"\bleft out\b|\bleaves? out\b|\bleaving out\b": "skip, omit",
    r"\b(is|are|were|was|be) no numbers?\b|\bgave no number\b": "non-finite",
    r"\bgo(es|ing)? on\b|\bwent on\b": "continue, resume",
    r"\bsigns? of life\b": "heartbeat",
    r"\bstands? still\b|\bstood still\b": "hang",
    r"\banew\b": "again, or the verb with re-",
    r"\blest\b": "so that ... not",
    r"\bimaginary\b": "simulated, fake",
    r"\bpass(es|ed|ing)? over\b": "skip, ignore",
    r"\bcomput(e|es|ed|ing) again\b": "recompute",
    r"\bgather(s|ed|ing)? again\b|\bregather": "re-gather",
    r"\bbit by bit\b|\bto the bit\b": "bitwise identical",
    r"\bbeside training\b": "in the background",
    r"\bwhole numbers?\b": "integer",
    r"\bgo(es|ing)? back to\b|\bwent back\b|\bgone back\b": "roll back to, return to",
    r"\bsent(s)? away\b|\bput aside\b|\bmoved aside\b": "move",
    r"\bas ever\b": "as before",
    r"\bwhatever becomes\b": "regardless of",
    r"\bso many times\b|\bfor so long\b": "name the factor or the duration",
    r"\bby itself alone\b|\bfor itself alone\b": "alone",
    r"\bthere are: ": "available:",
    r"\bnot made\b": "skipped",
    r"\bborders? of documents\b|\bdocument borders?\b": "document boundary",
    r"\bmarks? of byte order\b": "byte-order mark (BOM)",
    r"\bslow ranks?\b": "straggler",
    r"\bfewest\b": "minimum",
    r"\bof its makers?\b|\btheir makers\b": "datasheet",
    r"\bsince it was asked\b|\bas it was asked\b": "as requested",
    r"\bcome(s)? to its end\b": "complete",
    r"\bwithout a word\b": "silently",
    r"\bdoes not go together\b|\bgo together\b": "incompatible",
    r"\bknows? of no\b|\bknows nothing of\b": "is independent of",
    r"\bin the place of\b": "instead of",
    r"\bspeaks?\b|\bspeaker\b": "generate",
    r"\bwhat is (kept|learned|saved|there|gathered|left)\b": "name the thing",
    r"\bthat is left\b|\bthat are left\b|\bis left over\b": "remaining",
    r"\bof (theirs|ours)\b": "Hugging Face's, native",
}
AVERAGES = r"\baverages?\b"
"""AdamW's moments; other averages are fine, so only optimizer code and the docs on memory and planning are searched."""
WORDS_OF_NAMES = ("told", "anew", "imaginary", "averages", "speaker", "theirs", "regather")
PARTS_OF_NAMES = ("left_out", "passed_over", "no_number")
OPENINGS = r"(Of|What|The same|As of|Likewise|Which|Where|Those|Whose)\b"

EXEMPT = {"tests/test_language.py", "docs/glossary.md"}
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
TEXTS = [f for f in TRACKED if f.endswith((".py", ".md", ".toml", ".sh", ".sbatch")) and f not in EXEMPT]
SOURCES = [f for f in TEXTS if f.endswith(".py")]


def found(pattern: str, files: list[str]) -> list[str]:
    """Return "file:line: text" for each match, case-insensitive."""
    regex = re.compile(pattern, re.IGNORECASE)
    return [
        f"{file}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate((ROOT / file).read_text().splitlines(), start=1)
        if regex.search(line)
    ]


@pytest.mark.parametrize("pattern", PHRASES)
def test_no_file_has_the_phrase(pattern):
    lines = found(pattern, TEXTS)
    assert not lines, f"write: {PHRASES[pattern]}\n" + "\n".join(lines)


def test_moments_of_the_optimizer_are_not_called_averages():
    files = [f for f in TEXTS if f.startswith(("trainer/optim", "trainer/config", "docs/memory", "docs/planning"))]
    lines = found(AVERAGES, files)
    assert not lines, "write: moments\n" + "\n".join(lines)


def _nodes(file: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / file).read_text())))


def test_names_of_definitions_use_the_vocabulary():
    lines = []
    for file in SOURCES:
        for node in _nodes(file):
            names = [getattr(node, key, None) for key in ("name", "id", "arg")]
            for name in filter(lambda n: isinstance(n, str), names):
                words = set(re.split(r"_|(?<=[a-z])(?=[A-Z])", name.lower()))
                if words & set(WORDS_OF_NAMES) or any(part in name for part in PARTS_OF_NAMES):
                    lines.append(f"{file}:{getattr(node, 'lineno', 0)}: {name}")
    assert not lines, "\n".join(sorted(set(lines)))


def test_docstrings_begin_with_a_verb_or_a_noun():
    lines = []
    for file in SOURCES:
        for node in _nodes(file):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
            if isinstance(text, str) and re.match(OPENINGS, text.lstrip()):
                lines.append(f"{file}:{node.lineno}: {text.strip().splitlines()[0][:100]}")
    assert not lines, "\n".join(lines)
