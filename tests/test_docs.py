"""All Markdown pages: every link, path, setting, flag and test name that they cite exists. Generated pictures and lists are
current."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.dev import plot_layers
from scripts.dev.generate_model_docs import PAGE, generate
from tests.conftest import ROOT
from tests.test_layering import LAYERS
from trainer.base.config.fields import settings

FOLDERS = "trainer|models|scripts|tests|docs|train_configs"
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS.split("|") for page in (ROOT / folder).rglob("*.md"))]
FILE_SUFFIXES = {"py", "toml", "json", "jsonl", "md", "model"}
PLACEHOLDERS = {("section", "key"), ("section", "name")}
TRAINER_FLAGS = {"--from", "--config", "--dry-run", "--help", "--print-config"}
AFTERNOON_FILES, AFTERNOON_LINES = 16, 3500

each_page = pytest.mark.parametrize("page", sorted(PAGES), ids=lambda path: path.name)


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_relative_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        assert not anchor or anchor in headings(path.read_text()), target


def test_every_page_of_docs_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\(docs/(\w+\.md)", (ROOT / "README.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_every_picture_is_shown():
    shown = {Path(link).name for page in PAGES for link in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", page.read_text())}
    assert shown == {picture.name for picture in (ROOT / "docs" / "images").iterdir()}


@each_page
def test_cited_paths_exist(page):
    text = re.sub(r"https?://\S+", "", page.read_text())
    for cited in re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*", text):
        path = cited.rstrip("./")
        assert any(True for _ in ROOT.glob(path)), cited


@each_page
def test_cited_settings_exist(page):
    text = page.read_text()
    quoted = " ".join(re.findall(r"`([^`\n]+)`", text))
    cited = re.findall(r"--([a-z_]+)\.([a-z_0-9]+)", text)
    sections = {setting.section for setting in settings().values()}
    cited += [pair for pair in re.findall(r"\[([a-z_]+)\] (?!only\b)([a-z_0-9]+)", text) if pair[0] in sections]
    cited += [
        pair
        for pair in re.findall(r"(?<![\w./-])([a-z_]+)\.([a-z_]+)\b(?![(/])", quoted)
        if pair[0] in sections and pair[1] not in FILE_SUFFIXES
    ]
    for section, name in set(cited) - PLACEHOLDERS:
        assert f"{section}.{name}" in settings()


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield (script, arguments) of each command of a page."""
    text = re.sub(r"\\\n\s*", " ", text)
    scripts = r"((?:scripts|tests|trainer)/[\w/]+\.py|run_llama_train\.sh|train\.py)"
    yield from re.findall(rf"(?<![\w/]){scripts} +([^\n`#|]+)", text.replace("./run", "run"))


@functools.cache
def strings(script: str) -> tuple[set[str], list[str]]:
    """Return the string constants of a script, and its f-strings as patterns."""
    nodes = list(ast.walk(ast.parse((ROOT / script).read_text())))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    patterns = [
        "".join(re.escape(v.value) if isinstance(v, ast.Constant) else r"[\w-]+" for v in node.values)
        for node in nodes
        if isinstance(node, ast.JoinedStr)
    ]
    return constants, patterns


@each_page
def test_cited_commands_have_their_flags_and_subcommands(page):
    for script, arguments in commands(page.read_text()):
        flags = set(re.findall(r"(?<!\S)(--[a-z][a-z_-]*)(?![\w.-])", arguments)) - TRAINER_FLAGS
        if not script.endswith(".py") or script == "train.py":
            assert not flags, f"{script} {arguments}"
            continue
        constants, patterns = strings(script)
        for flag in flags:
            assert flag in constants or any(re.fullmatch(p, flag) for p in patterns), f"{script} {flag}"
        subcommand = re.match(r"[a-z][a-z-]+(?=\s|$)", arguments)
        if subcommand and "add_parser" in (ROOT / script).read_text():
            assert subcommand[0] in constants, f"{script} {subcommand[0]}"


@functools.cache
def functions_of_tests() -> dict[str, set[str]]:
    """File name -> names of its test functions."""
    functions: dict[str, set[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
        functions.setdefault(path.name, set()).update(names)
    return functions


@each_page
def test_cited_tests_exist(page):
    for file, name in re.findall(r"\b(?:(test_\w+\.py)(?:::)?)?(test_\w+)?\b(?!:\s)", page.read_text()):
        assert not file or file in functions_of_tests(), file
        files = [file] if file else functions_of_tests()
        known = not name or f"{name}.py" in functions_of_tests() or any(name in functions_of_tests()[f] for f in files)
        assert known, f"{file}::{name}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_cited_names_occur_in_the_code(name):
    code = "\n".join(p.read_text() for f in ("trainer", "models", "tests") for p in (ROOT / f).rglob("*.py"))
    words = set(re.findall(r"\w+", code))
    for cited in re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", (ROOT / name).read_text()):
        assert set(cited.removesuffix(".py").split(".")) - {"toml", "json"} <= words, cited


def test_the_line_counts_of_the_afternoon_are_true():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| *\d+ *\| \[`([\w/.]+)`\]\([^)]+\) \| *(\d+) *\|", text, re.MULTILINE)
    counts = {file: int(count) for file, count in rows}
    assert 0 < len(counts) <= AFTERNOON_FILES and sum(counts.values()) <= AFTERNOON_LINES
    actual = {file: len((ROOT / file).read_text().splitlines()) for file in counts}
    assert counts == actual
    assert f"{sum(actual.values()):,} lines" in text


def test_the_picture_of_the_layers_is_current():
    assert plot_layers.render(LAYERS) == plot_layers.PICTURE.read_text(), "run scripts/dev/plot_layers.py"


def test_the_list_of_layers_is_current():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^ *(\d+)  (\S.*)$", text[text.index("## Layers") :], re.MULTILINE)
    assert rows == [(str(i), rows[-1 - i][1]) for i in reversed(range(len(LAYERS)))]
    assert [set(row.split()) for _, row in reversed(rows)] == [{plot_layers.path(m) for m in layer} for layer in LAYERS]


def test_the_citation_has_the_version_of_the_package():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert f"\nversion: {version[1]}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_table_of_model_families_is_current():
    assert generate(PAGE.read_text()) == PAGE.read_text(), "run scripts/dev/generate_model_docs.py"
