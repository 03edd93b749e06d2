"""Samples as the model sees them, on a console and on a page; the table of the datasets."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from tests.data.chat.examples import train_sentencepiece
from trainer.base.config import DataConfig, TokenizerConfig
from trainer.base.system import console
from trainer.batch import IGNORE_INDEX
from trainer.data.prepare.encode import encoder
from trainer.data.sampling.packing import pack, read_packing
from trainer.data.sampling.samples import PackedSamples, WrappedSamples
from trainer.data.store.store import TokenStore
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.tools.report.view.page import data_page
from trainer.tools.report.view.samples import Piece, pieces_of, view_samples
from trainer.tools.report.view.text import sample_lines, table_lines

HOSTILE = "<script>alert(1)</script> \x1b[31m&amp; ⟦x⟧ <|eot_id|> \u202e日本\u3000語\n\ttab"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TokenizerConfig())


def store_of(config, documents, tokenizer) -> TokenStore:
    encoded = list(map(encoder(config, tokenizer), documents))
    targets = None if encoded[0].targets is None else np.concatenate([e.targets for e in encoded])
    ends = np.cumsum([0, *(len(e.tokens) for e in encoded)])
    return TokenStore(np.concatenate([e.tokens for e in encoded]), ends, targets)


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def chats(tokenizer, tmp_path_factory):
    """Packed chats, of which one has text that looks like HTML, escape sequences and special tokens."""
    config = DataConfig(dataset="chat", chat_template="llama3", packing="best-fit", long_documents="drop")
    documents = [chat("Say it.", HOSTILE), *(chat(f"{i}?", "word " * i) for i in range(1, 9))]
    store, folder = store_of(config, documents, tokenizer), tmp_path_factory.mktemp("packings") / "packed"
    pack(store, folder, 128, config, pairs=False)
    return PackedSamples(store, 128, read_packing(folder), reset_positions=True)


def views(samples, tokenizer, pairs=False):
    return list(view_samples(samples, range(len(samples)), [len(samples)], ["mine"], tokenizer, pairs))


def test_the_shown_targets_are_the_labels_of_each_sample(chats, tokenizer):
    for i, view in enumerate(views(chats, tokenizer)):
        batch = chats[np.array([i])]
        labels = batch.labels[batch.labels != IGNORE_INDEX].tolist()
        shown = "".join(p.text for document in view.documents for p in document.pieces if p.is_target)
        assert (view.index, shown) == (i, tokenizer.decode(labels))
        assert view.num_targets == len(labels)
        assert view.padding == int((batch.documents == -1).sum())
        assert len(view.documents) == int(batch.documents.max()) + 1


def test_a_document_is_shown_with_its_prompt_its_answer_and_its_special_tokens(chats, tokenizer):
    (document,) = (d for view in views(chats, tokenizer) for d in view.documents if "Say it." in str(d.pieces))
    assert document.pieces == (
        Piece("<|begin_of_text|>", False, True),
        Piece("<|start_header_id|>", False, True),
        Piece("user", False, False),
        Piece("<|end_header_id|>", False, True),
        Piece("\n\nSay it.", False, False),
        Piece("<|eot_id|>", False, True),
        Piece("<|start_header_id|>", False, True),
        Piece("assistant", False, False),
        Piece("<|end_header_id|>", False, True),
        Piece("\n\n", False, False),
        Piece(HOSTILE, True, False),
        Piece("<|eot_id|>", True, True),
    )


@pytest.mark.parametrize("mask", [True, False])
def test_samples_of_concatenated_documents_show_their_text(tokenizer, mask):
    store = store_of(DataConfig(), ["some words, and more", "other words"] * 9, tokenizer)
    samples = WrappedSamples(store, 16, reset_positions=mask)
    for i, view in enumerate(views(samples, tokenizer)):
        batch = samples[np.array([i])]
        ends_in_target = int(batch.labels[0, -1] != IGNORE_INDEX)
        shown = "".join(p.text for document in view.documents for p in document.pieces)
        assert shown == tokenizer.decode(store.tokens[16 * i : 16 * i + 16 + ends_in_target].tolist())
        assert len(view.documents) == (len(batch.documents.unique()) if mask else 1)


def test_spaces_of_sentencepiece_are_shown_where_a_target_begins(tmp_path):
    tokenizer = train_sentencepiece(tmp_path, "bpe")
    tokens = tokenizer.encode("the value of the value")
    for i in range(1, len(tokens)):
        targets = [False] * i + [True] * (len(tokens) - i)
        assert "".join(p.text for p in pieces_of(tokens, targets, tokenizer)) == "the value of the value"


def test_a_character_of_several_tokens_is_complete_where_the_targets_change_inside_it(tokenizer):
    tokens = tokenizer.encode("語")
    assert len(tokens) == 3
    assert [p.text for p in pieces_of(tokens, [False, False, True], tokenizer)] == ["\ufffd", "語"]


def test_the_two_answers_of_a_pair_have_titles(tokenizer, tmp_path):
    config = DataConfig(dataset="preference", chat_template="llama3", packing="best-fit", long_documents="drop")
    pair = {"prompt": "Which?", "chosen": "This.", "rejected": "That one."}
    store = store_of(config, [pair, pair | {"chosen": "It."}], tokenizer)
    pack(store, tmp_path / "packed", 256, config, pairs=True)
    (view,) = views(PackedSamples(store, 256, read_packing(tmp_path / "packed"), True), tokenizer, pairs=True)
    titles = ["pair 1 of 2, chosen", "pair 1 of 2, rejected", "pair 2 of 2, chosen", "pair 2 of 2, rejected"]
    assert [document.title for document in view.documents] == titles
    assert ["".join(p.text for p in d.pieces if p.is_target) for d in view.documents][1] == "That one.<|end_of_text|>"


def test_a_console_without_colour_gets_brackets_that_data_cannot_imitate(chats, tokenizer):
    text = "\n".join(line for view in views(chats, tokenizer) for line in sample_lines(view, colour=False))
    shown = (
        "⟦<script>alert(1)</script> \\x1b[31m&amp; \\u27e6x\\u27e7 <|eot_id|> \\u202e日本\u3000語\n\ttab⟨<|eot_id|>⟩⟧"
    )
    assert shown in text
    assert text.count("⟦") == text.count("⟧") == 9


def test_the_first_documents_of_a_sample_are_shown_with_the_number_of_the_others(chats, tokenizer):
    view = next(view for view in views(chats, tokenizer) if len(view.documents) > 1)
    number = len(view.documents)
    for most in range(1, number):
        lines = list(sample_lines(view, colour=False, most=most))
        assert lines[0] == view.title() and f"{number} documents" in lines[0]
        assert sum(line.startswith("-- document ") for line in lines) == most
        assert lines[-1] == f"-- {number - most} more document{'s' * (number - most > 1)}"
    assert list(sample_lines(view, colour=False, most=number)) == list(sample_lines(view, colour=False))


def test_a_terminal_gets_colours_and_no_escape_sequence_of_the_data(chats, tokenizer):
    text = "\n".join(line for view in views(chats, tokenizer) for line in sample_lines(view, colour=True))
    assert "\x1b[32m<script>alert(1)</script> \\x1b[31m" in text
    assert set(re.findall("\x1b\\[[0-9;]*m", text)) == {"\x1b[32m", "\x1b[1;32m", "\x1b[1;35m", "\x1b[0m"}


@pytest.mark.parametrize(("environment", "shown"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colour_needs_a_terminal_and_respects_no_color(monkeypatch, environment, shown):
    for name, value in ({"NO_COLOR": "", "TERM": "xterm"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert console.shows_colour() is shown
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert not console.shows_colour()


class Page(HTMLParser):
    """The tags of a page, which must be nested correctly, its attributes and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_page_shows_hostile_data_as_text_and_needs_no_other_file(chats, tokenizer):
    rows = [["", "documents"], ["<b>mine</b>", "9"]]
    content = data_page("Data of </title>", rows, ["refused: <i>"], views(chats, tokenizer))
    parsed = Page(content)
    assert not {"script", "link", "img", "b", "i"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name in ("src", "href") or name.startswith("on")]
    assert "url(" not in content and "@import" not in content
    assert "<script>alert(1)</script> \\x1b[31m&amp; ⟦x⟧ <|eot_id|> \\u202e日本\u3000語\n\ttab" in parsed.text
    for part in ("Data of </title>", "<b>mine</b>", "refused: <i>"):
        assert part in parsed.text


def test_a_page_speaks_targets_and_names_its_parts(chats, tokenizer):
    content = data_page("Data", [["", "documents"], ["mine", "9"]], [], views(chats, tokenizer))
    parsed = Page(content)
    assert parsed.tags.count("mark") and '<span class="spoken">[target] </span><mark>' in content
    assert content.count("[target] ") == 9 == content.count("<pre")
    assert {("lang", "en"), ("scope", "col"), ("scope", "row"), ("dir", "auto")} <= set(parsed.attributes)
    assert [tag for tag in parsed.tags if re.fullmatch("h[1-6]", tag)][:4] == ["h1", "h2", "h2", "h3"]
    assert "color-scheme: light dark" in content and "prefers-color-scheme: dark" in content


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """The contrast of WCAG 2."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_both_colour_schemes_of_a_page_have_enough_contrast():
    content = data_page("Data", [["", "documents"]], [], [])
    assert (
        ".data td { border: 1px solid var(--muted)" in content and ".data pre { border-color: var(--muted)" in content
    )
    schemes = [
        dict(re.findall("--([a-z]+): (#[0-9a-f]{6})", line)) for line in content.splitlines() if "--page" in line
    ][:2]
    assert len(schemes) == 2
    for colours in schemes:
        for text in ("text", "special"):
            assert min(contrast(colours[text], colours[ground]) for ground in ("page", "target")) >= 4.5
        assert contrast(colours["muted"], colours["page"]) >= 3


def test_a_table_omits_columns_without_values():
    rows = [["", "documents", "dropped"], ["training", "1,000", ""], ["held out", "9", ""]]
    assert list(table_lines(rows)) == ["          documents", "training      1,000", "held out          9"]
