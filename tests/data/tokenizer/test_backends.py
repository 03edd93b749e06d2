import base64
import itertools
import json
import random

import pytest
import sentencepiece
import tokenizers

from tests.data.random_text import random_documents
from trainer.config import ConfigError, TokenizerConfig, packages
from trainer.config.load import load_config
from trainer.data.sources import open_source
from trainer.data.tokenizer import backends as module
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer

TEXT = "def f(x):\n    return 'Grüße, 世界 🙂'  # <|end_of_text|>\t\n\n\n  12345 don't\x00"


def test_the_default_tokenizer_gives_every_text_back():
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.vocab_size == 2048
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert max(tokens) < 1792, "special tokens in a text are text"
    assert (tokenizer.bos, tokenizer.eos) == (1792, 1793)


@pytest.mark.parametrize(
    "text", [" " * 1_000_000, "x" * 900_001, "long enough " * 80_000, "\n" * 30_000 + "y" * 60_000]
)
def test_texts_of_any_length_come_back(text):
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_runs_are_cut_where_metas_tokenizer_cuts_them():
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.encode("a" * 60_000) == 2 * tokenizer.encode("a" * 25_000) + tokenizer.encode("a" * 10_000)
    assert tokenizer.encode("b" * 25_000 + " c") == tokenizer.encode("b" * 25_000) + tokenizer.encode(" c")
    assert tokenizer.encode("x y" * 200_000) == tokenizer.encode(("x y" * 200_000)[:400_000]) + tokenizer.encode(
        ("x y" * 200_000)[400_000:]
    )


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_those_of_counting_characters(seed, monkeypatch):
    """Meta's rule, as it reads: a piece ends where its run of spaces, or of other characters, has reached the limit."""
    monkeypatch.setattr(module, "_LONGEST_RUN", 3)
    text = "".join(random.Random(seed).choices("a b\n\x1c\u200b", k=60))
    expected, start, length = [], 0, 0
    for i, letter in enumerate(text):
        length = length + 1 if i > 0 and letter.isspace() == text[i - 1].isspace() else 1
        if length > 3:
            expected.append(text[start:i])
            start, length = i, 1
    assert list(module._pieces(text)) == [*expected, text[start:]]


def test_the_default_tokenizer_has_learned_from_source_code():
    tokenizer = load_tokenizer(TokenizerConfig())
    text = "".join(itertools.islice(open_source(load_config([]).data, tokenizer).documents(), 20))
    assert len(text.encode()) / len(tokenizer.encode(text)) > 2.5


def test_llama_3_rank_files_get_its_special_tokens(tmp_path):
    """A rank file of 128,000 tokens, as Meta's: the 256 bytes and longer ones."""
    tokens = [bytes([i]) for i in range(256)] + [b"%07d" % i for i in range(127_744)]
    lines = [b"%s %d" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    tokenizer = load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(tmp_path / "tokenizer.model")))
    assert tokenizer.vocab_size == 128_256
    assert (tokenizer.bos, tokenizer.eos) == (128_000, 128_001)
    for name, number in {"<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007, "<|eot_id|>": 128_009}.items():
        assert tokenizer.decode([number]) == name
        assert tokenizer.special_tokens[name] == number
    assert len(tokenizer.special_tokens) == 256


def train_sentencepiece(folder, **more):
    (folder / "text").write_text("\n".join(f"the quick brown fox number {i} jumps" for i in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        **dict(
            input=str(folder / "text"),
            model_prefix=str(folder / "m"),
            vocab_size=400,
            model_type="bpe",
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        | more
    )
    return TokenizerConfig(backend="sentencepiece", path=str(folder / "m.model"))


def test_sentencepiece_models_are_read(tmp_path):
    tokenizer = load_tokenizer(train_sentencepiece(tmp_path))
    tokens = tokenizer.encode("the quick 世界")
    assert tokenizer.decode(tokens) == "the quick 世界"
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert max(tokens) < tokenizer.vocab_size
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2}
    assert 1 not in tokenizer.encode("<s>"), "a control piece is in no text"
    assert tokenizer.decode([1, *tokens, 2]) == "<s>the quick 世界</s>", "nothing is left out"


def test_pieces_that_a_user_defined_are_special_and_found_in_text(tmp_path):
    defined = ["<|im_start|>", "ünï"]
    tokenizer = load_tokenizer(
        train_sentencepiece(tmp_path, user_defined_symbols=defined, control_symbols=["<call>"], vocab_size=420)
    )
    assert list(tokenizer.special_tokens) == ["<s>", "</s>", "<call>", "<|im_start|>", "ünï"]
    for name, token in tokenizer.special_tokens.items():
        assert (token in tokenizer.encode(f"fox {name} fox")) == (name in defined)
    assert tokenizer.special_tokens["ünï"] == 5


def refused(config) -> str:
    with pytest.raises(ConfigError) as error:
        load_tokenizer(config)
    assert error.value.key == "tokenizer.path"
    return error.value.message


def test_files_of_another_kind_are_refused(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("hello there you\n")
    assert refused(TokenizerConfig(backend="tiktoken", path=str(broken))) == (
        f"not a tiktoken rank file: line 1 of {broken}"
    )
    assert refused(TokenizerConfig(backend="sentencepiece", path=str(broken))) == f"not a sentencepiece model: {broken}"
    half = tmp_path / "half"
    half.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[5:]))
    assert refused(TokenizerConfig(backend="tiktoken", path=str(half))) == (
        f"not a tiktoken rank file: the ranks in {half} are not 0, 1, 2, ..."
    )
    endless = train_sentencepiece(tmp_path, eos_id=-1)
    assert refused(endless) == f"the model has no begin- or end-of-text token: {endless.path}"


def test_the_fingerprint_follows_the_content(tmp_path):
    copy = tmp_path / "copy"
    copy.write_bytes(DEFAULT_FILE.read_bytes())
    same = load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(copy)))
    assert same.fingerprint == load_tokenizer(TokenizerConfig()).fingerprint
    copy.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    assert load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(copy))).fingerprint != same.fingerprint


# ---------------------------------------------------------------- tokenizer.json


@pytest.fixture
def exported(tmp_path):
    """The default tokenizer as files of Hugging Face's."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in load_tokenizer(TokenizerConfig()).huggingface_files().items():
        (folder / name).write_bytes(content)
    return folder


def from_json(path):
    return load_tokenizer(TokenizerConfig(backend="huggingface", path=str(path)))


def test_a_tokenizer_json_or_its_folder_is_read(exported):
    ours, theirs = load_tokenizer(TokenizerConfig()), from_json(exported)
    assert (theirs.vocab_size, theirs.bos, theirs.eos) == (ours.vocab_size, ours.bos, ours.eos)
    assert theirs.special_tokens == ours.special_tokens
    assert theirs.encode(TEXT) == ours.encode(TEXT), "no token is added, and none is special"
    assert theirs.encode_array(TEXT).tolist() == ours.encode(TEXT)
    assert theirs.decode([ours.bos, *ours.encode(TEXT), ours.eos]) == f"<|begin_of_text|>{TEXT}<|end_of_text|>"
    assert from_json(exported / "tokenizer.json").fingerprint == theirs.fingerprint
    assert theirs.huggingface_files() == {path.name: path.read_bytes() for path in exported.iterdir()}


def edit(path, **values):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (content | values).items() if v is not None}))


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("tokenizer_config.json", {"eos_token": "<|eot_id|>"}),
        ("tokenizer_config.json", {"eos_token": {"content": "<|eot_id|>", "special": True}}),
        ("special_tokens_map.json", {"eos_token": {"content": "<|eot_id|>"}}),
        ("generation_config.json", {"eos_token_id": [1801, 1793]}),
        ("config.json", {"eos_token_id": 1801}),
    ],
)
def test_the_end_of_text_is_named_by_a_file_beside_it(exported, tmp_path, file, value):
    edit(exported / "tokenizer_config.json", eos_token=None)
    edit(exported / file, **value)
    tokenizer = from_json(exported)
    assert (tokenizer.bos, tokenizer.eos) == (1792, 1801)
    again = tmp_path / "again"
    again.mkdir()
    for name, content in tokenizer.files.items():
        (again / name).write_bytes(content)
    same = from_json(again / next(iter(tokenizer.files)))
    assert (same.eos, same.fingerprint, same.huggingface_files()) == (
        1801,
        tokenizer.fingerprint,
        tokenizer.huggingface_files(),
    ), "its files make it again without those of the model"


def test_a_tokenizer_json_without_what_a_run_needs_is_refused(exported):
    path = exported / "tokenizer.json"
    config = TokenizerConfig(backend="huggingface", path=str(exported))
    naming = "tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json"
    edit(exported / "tokenizer_config.json", eos_token="<|none|>")
    assert refused(config) == f"no end-of-text token: eos_token is in none of {naming} beside it"
    (exported / "tokenizer_config.json").write_text("[")
    (exported / "config.json").write_text('{"bos_token_id": 99999, "eos_token_id": true}')
    assert refused(config) == f"no begin-of-text token: bos_token is in none of {naming} beside it"
    for content in (b"", b"{}", b"\xff", b"{"):
        path.write_bytes(content)
        assert refused(config) == f"not a tokenizer.json: {path}"
    path.unlink()
    assert refused(config) == "tokenizer.json in it cannot be read (No such file or directory)"


def test_another_end_of_text_is_another_fingerprint(exported):
    before = from_json(exported).fingerprint
    edit(exported / "tokenizer_config.json", eos_token="<|eot_id|>")
    assert from_json(exported).fingerprint != before


def test_without_the_package_a_tokenizer_json_is_refused_in_one_line(exported, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(ConfigError) as error:
        from_json(exported)
    assert str(error.value) == "tokenizer.backend: needs the package tokenizers: pip install tokenizers"


def test_a_package_that_lacks_something_itself_is_no_missing_package(monkeypatch):
    def incomplete(name):
        raise ModuleNotFoundError(name="something.else")

    monkeypatch.setattr(packages.importlib, "import_module", incomplete)
    with pytest.raises(ModuleNotFoundError):
        packages.require_package("tokenizers", "tokenizer.backend")


# ---------------------------------------------------------------- the same tokens as others


@pytest.fixture(scope="module")
def mixed() -> list[str]:
    """1.2 MB."""
    return random_documents(1_200_000)


def test_byte_pair_ranks_give_the_tokens_of_the_library_tokenizers(mixed):
    tokenizer = load_tokenizer(TokenizerConfig())
    content = tokenizer.huggingface_files()["tokenizer.json"].decode()
    theirs = tokenizers.Tokenizer.from_str(content)
    theirs.encode_special_tokens = True
    for text in mixed:
        ours = tokenizer.encode(text)
        assert ours == theirs.encode(text, add_special_tokens=False).ids
        assert ours == tokenizer.encode_array(text).tolist()
        assert max(ours) < 1792 and tokenizer.decode(ours) == text


def test_a_sentencepiece_model_gives_the_tokens_of_transformers(mixed, tmp_path):
    transformers = pytest.importorskip("transformers")
    # As Llama 2's model was made: text is taken as it is, and what has no piece as bytes.
    config = train_sentencepiece(
        tmp_path,
        input="",
        sentence_iterator=iter([line for text in mixed[:10] for line in text.split("\n") if line][:20_000]),
        vocab_size=2000,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        max_sentence_length=100_000,
    )
    tokenizer = load_tokenizer(config)
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in tokenizer.huggingface_files().items():
        (folder / name).write_bytes(content)
    theirs = transformers.LlamaTokenizer.from_pretrained(folder, legacy=False)
    for text in mixed:
        # sentencepiece's own letter for a space is one; and transformers 5 opens a text with a space only where it has none,
        # sentencepiece always.
        text = text.replace("\u2581", "_").lstrip(" ")
        ours = tokenizer.encode(text)
        assert ours == theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert not {tokenizer.bos, tokenizer.eos} & set(ours)
        assert tokenizer.decode(ours) == text
    assert tokenizer.decode(tokenizer.encode("  two spaces")) == "  two spaces"
