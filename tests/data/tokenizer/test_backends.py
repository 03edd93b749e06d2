import base64
import itertools
import json
import random
import sys
from dataclasses import replace

import pytest
import sentencepiece
import tokenizers

from tests.data.random_text import random_documents
from trainer.base.config import ConfigError, TokenizerConfig, packages
from trainer.base.config.load import load_config
from trainer.data.chat.format import load_chat_format
from trainer.data.sources import open_source
from trainer.data.tokenizer import byte_pair
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer

TEXT = "def f(x):\n    return 'Grüße, 世界 🙂'  # <|end_of_text|>\t\n\n\n  12345 don't\x00"


def test_the_default_tokenizer_is_lossless():
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.vocab_size == 2048
    tokens = tokenizer.encode(TEXT)
    assert tokenizer.decode(tokens) == TEXT
    assert max(tokens) < 1792, "names of special tokens in a text are text"
    assert (tokenizer.bos, tokenizer.eos) == (1792, 1793)


@pytest.mark.parametrize(
    "text", [" " * 1_000_000, "x" * 900_001, "long enough " * 80_000, "\n" * 30_000 + "y" * 60_000]
)
def test_long_texts_are_encoded_without_loss(text):
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_runs_are_split_where_metas_tokenizer_splits_them():
    tokenizer = load_tokenizer(TokenizerConfig())
    assert tokenizer.encode("a" * 60_000) == 2 * tokenizer.encode("a" * 25_000) + tokenizer.encode("a" * 10_000)
    assert tokenizer.encode("b" * 25_000 + " c") == tokenizer.encode("b" * 25_000) + tokenizer.encode(" c")
    assert tokenizer.encode("x y" * 200_000) == tokenizer.encode(("x y" * 200_000)[:400_000]) + tokenizer.encode(
        ("x y" * 200_000)[400_000:]
    )


@pytest.mark.parametrize("seed", range(20))
def test_long_runs_are_split_as_by_counting_characters(seed, monkeypatch):
    """Meta's rule: a piece ends where its run of spaces, or of other characters, has reached the limit."""
    monkeypatch.setattr(byte_pair, "LONGEST_RUN", 3)
    text = "".join(random.Random(seed).choices("a b\n\x1c\u200b", k=60))
    expected, start, length = [], 0, 0
    for i, letter in enumerate(text):
        length = length + 1 if i > 0 and letter.isspace() == text[i - 1].isspace() else 1
        if length > 3:
            expected.append(text[start:i])
            start, length = i, 1
    assert list(byte_pair.short_pieces(text)) == [*expected, text[start:]]


def test_the_default_tokenizer_compresses_source_code():
    tokenizer = load_tokenizer(TokenizerConfig())
    text = "".join(itertools.islice(open_source(load_config([]).data, tokenizer).documents(), 20))
    assert len(text.encode()) / len(tokenizer.encode(text)) > 2.5


def test_llama_3_tiktoken_files_get_its_special_tokens(tmp_path):
    """A tiktoken file of 128,000 tokens, as Meta's: the 256 bytes and longer ones."""
    tokens = [bytes([i]) for i in range(256)] + [b"%07d" % i for i in range(127_744)]
    lines = [b"%s %d" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    tokenizer = load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(tmp_path / "tokenizer.model")))
    assert tokenizer.vocab_size == 128_256
    assert (tokenizer.bos, tokenizer.eos) == (128_000, 128_001)
    for name, token in {"<|start_header_id|>": 128_006, "<|end_header_id|>": 128_007, "<|eot_id|>": 128_009}.items():
        assert tokenizer.decode([token]) == name
        assert tokenizer.special_tokens[name] == token
    assert len(tokenizer.special_tokens) == 256


def train_sentencepiece(folder, **options):
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
        | options
    )
    return TokenizerConfig(backend="sentencepiece", path=str(folder / "m.model"))


def test_sentencepiece_models_are_loaded(tmp_path):
    tokenizer = load_tokenizer(train_sentencepiece(tmp_path))
    tokens = tokenizer.encode("the quick 世界")
    assert tokenizer.decode(tokens) == "the quick 世界"
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    assert max(tokens) < tokenizer.vocab_size
    assert tokenizer.special_tokens == {"<s>": 1, "</s>": 2}
    assert 1 not in tokenizer.encode("<s>"), "text is never encoded as a control piece"
    assert tokenizer.decode([1, *tokens, 2]) == "<s>the quick 世界</s>", "control pieces are decoded too"


def test_user_defined_pieces_are_special_and_recognized_in_text(tmp_path):
    defined = ["<|im_start|>", "ünï"]
    tokenizer = load_tokenizer(
        train_sentencepiece(tmp_path, user_defined_symbols=defined, control_symbols=["<call>"], vocab_size=420)
    )
    assert list(tokenizer.special_tokens) == ["<s>", "</s>", "<call>", "<|im_start|>", "ünï"]
    for name, token in tokenizer.special_tokens.items():
        assert (token in tokenizer.encode(f"fox {name} fox")) == (name in defined)
    assert tokenizer.special_tokens["ünï"] == 5


def error_of(config) -> str:
    with pytest.raises(ConfigError) as error:
        load_tokenizer(config)
    assert error.value.key == "tokenizer.path"
    return error.value.message


def test_files_of_another_format_are_rejected(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("hello there you\n")
    assert error_of(TokenizerConfig(backend="tiktoken", path=str(broken))) == (
        f"{broken} is not a tiktoken file (line 1)"
    )
    assert (
        error_of(TokenizerConfig(backend="sentencepiece", path=str(broken))) == f"{broken} is not a sentencepiece model"
    )
    half = tmp_path / "half"
    half.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[5:]))
    assert error_of(TokenizerConfig(backend="tiktoken", path=str(half))) == (
        f"{half} is not a tiktoken file: its token ids are not 0, 1, 2, ..."
    )
    endless = train_sentencepiece(tmp_path, eos_id=-1)
    assert error_of(endless) == f"{endless.path} defines no EOS token, which must end each document"


def test_the_fingerprint_depends_on_the_content(tmp_path):
    copy = tmp_path / "copy"
    copy.write_bytes(DEFAULT_FILE.read_bytes())
    same = load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(copy)))
    assert same.fingerprint == load_tokenizer(TokenizerConfig()).fingerprint
    copy.write_bytes(b"".join(DEFAULT_FILE.read_bytes().splitlines(keepends=True)[:-1]))
    assert load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(copy))).fingerprint != same.fingerprint


# ---------------------------------------------------------------- tokenizer.json


@pytest.fixture
def exported(tmp_path):
    """A folder with the default tokenizer in Hugging Face's format."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in load_tokenizer(TokenizerConfig()).huggingface_files().items():
        (folder / name).write_bytes(content)
    return folder


def load_hf(path):
    return load_tokenizer(TokenizerConfig(backend="huggingface", path=str(path)))


def test_a_tokenizer_json_is_loaded_by_file_or_folder(exported):
    original, loaded = load_tokenizer(TokenizerConfig()), load_hf(exported)
    assert (loaded.vocab_size, loaded.bos, loaded.eos) == (original.vocab_size, original.bos, original.eos)
    assert loaded.special_tokens == original.special_tokens
    assert loaded.encode(TEXT) == original.encode(TEXT), "no special token is added or recognized"
    assert loaded.encode_array(TEXT).tolist() == original.encode(TEXT)
    assert (
        loaded.decode([original.bos, *original.encode(TEXT), original.eos]) == f"<|begin_of_text|>{TEXT}<|end_of_text|>"
    )
    assert load_hf(exported / "tokenizer.json").fingerprint == loaded.fingerprint
    assert loaded.huggingface_files() == {path.name: path.read_bytes() for path in exported.iterdir()}


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
def test_eos_is_read_from_a_file_in_the_same_folder(exported, tmp_path, file, value):
    edit(exported / "tokenizer_config.json", eos_token=None)
    edit(exported / file, **value)
    tokenizer = load_hf(exported)
    assert (tokenizer.bos, tokenizer.eos) == (1792, 1801)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, content in tokenizer.files.items():
        (copy / name).write_bytes(content)
    same = load_hf(copy / next(iter(tokenizer.files)))
    assert (same.eos, same.fingerprint, same.huggingface_files()) == (
        1801,
        tokenizer.fingerprint,
        tokenizer.huggingface_files(),
    ), "its own files recreate it without those of the model"


def test_a_tokenizer_json_without_eos_is_rejected(exported):
    path = exported / "tokenizer.json"
    config = TokenizerConfig(backend="huggingface", path=str(exported))
    files = "tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json"
    way = "name the token that ends a document as eos_token in tokenizer_config.json"
    edit(exported / "tokenizer_config.json", eos_token=None)
    assert error_of(config) == f"the tokenizer's folder names no EOS token in any of {files}; {way}"
    for content in (b"[", b"[]", b'{"eos_token": "\xff"}'):
        (exported / "tokenizer_config.json").write_bytes(content)
        assert error_of(config) == f"{exported}/tokenizer_config.json is not a JSON object"
    (exported / "tokenizer_config.json").write_text("{}")
    (exported / "config.json").write_text('{"bos_token_id": 99999, "eos_token_id": true}')
    what = "eos_token_id true of config.json is not the id of one of the 2048 tokens"
    assert error_of(config) == f"the tokenizer's folder names no EOS token in any of {files}; {what}; {way}"
    model = {"type": "BPE", "vocab": {"a": 0, "bb": 1}, "merges": [["a", "bb"]]}
    merged_too_long = json.dumps({"version": "1.0", "model": model}).encode()
    for content in (b"", b"{}", b"\xff", b"{", merged_too_long):  # the last one makes the package panic
        path.write_bytes(content)
        assert error_of(config) == f"{path} is not a valid tokenizer.json"
    path.unlink()
    assert error_of(config) == "tokenizer.json in this folder cannot be read (No such file or directory)"


def test_the_fingerprint_depends_on_eos(exported):
    before = load_hf(exported).fingerprint
    edit(exported / "tokenizer_config.json", eos_token="<|eot_id|>")
    assert load_hf(exported).fingerprint != before


def test_a_tokenizer_json_without_its_package_is_a_one_line_error(exported, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(packages.importlib, "import_module", missing)
    with pytest.raises(ConfigError) as error:
        load_hf(exported)
    assert (
        str(error.value)
        == f"tokenizer.backend: needs the package tokenizers: {sys.executable} -m pip install tokenizers"
    )


def test_a_missing_dependency_of_a_package_is_not_reported_as_the_package(monkeypatch):
    def incomplete(name):
        raise ModuleNotFoundError("No module named 'something'", name="something.else")

    monkeypatch.setattr(packages.importlib, "import_module", incomplete)
    with pytest.raises(ConfigError) as error:
        packages.require_package("tokenizers", "tokenizer.backend")
    assert str(error.value) == (
        "tokenizer.backend: the package tokenizers cannot be imported (No module named 'something')"
    )


# ---------------------------------------------------------------- equality with other libraries


@pytest.fixture(scope="module")
def mixed() -> list[str]:
    """1.2 MB of random text."""
    return random_documents(1_200_000)


def test_byte_pair_ranks_yield_the_tokens_of_the_package_tokenizers(mixed):
    tokenizer = load_tokenizer(TokenizerConfig())
    content = tokenizer.huggingface_files()["tokenizer.json"].decode()
    hf_tokenizer = tokenizers.Tokenizer.from_str(content)
    hf_tokenizer.encode_special_tokens = True
    for text in mixed:
        tokens = tokenizer.encode(text)
        assert tokens == hf_tokenizer.encode(text, add_special_tokens=False).ids
        assert tokens == tokenizer.encode_array(text).tolist()
        assert max(tokens) < 1792 and tokenizer.decode(tokens) == text


def test_a_sentencepiece_model_yields_the_tokens_of_transformers(mixed, tmp_path):
    transformers = pytest.importorskip("transformers")
    # The settings of Llama 2's model: no normalization, and byte fallback.
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
    hf_tokenizer = transformers.LlamaTokenizer.from_pretrained(folder, legacy=False)
    for text in mixed:
        # sentencepiece decodes U+2581 as a space. transformers 5 prepends a space only if the text does not start with one,
        # sentencepiece always.
        text = text.replace("\u2581", "_").lstrip(" ")
        tokens = tokenizer.encode(text)
        assert tokens == hf_tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        assert not {tokenizer.bos, tokenizer.eos} & set(tokens)
        assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokenizer.encode("  two spaces")) == "  two spaces"


# ---------------------------------------------------------------- sentencepiece: BOS, spaces and tokens of other files


def test_a_sentencepiece_model_without_bos_is_valid(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(train_sentencepiece(tmp_path, bos_id=-1))
    assert (tokenizer.bos, tokenizer.prefix) == (None, ())
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in tokenizer.huggingface_files().items():
        (folder / name).write_bytes(content)
    assert transformers.AutoTokenizer.from_pretrained(folder)("the fox").input_ids == tokenizer.encode("the fox")


def test_add_bos_token_beside_a_sentencepiece_model_is_followed(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = train_sentencepiece(tmp_path)
    with_bos = load_tokenizer(config)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true}')
    assert load_tokenizer(config).fingerprint == with_bos.fingerprint and with_bos.prefix == (1,)
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    tokenizer = load_tokenizer(config)
    assert (tokenizer.bos, tokenizer.prefix) == (1, ()) and tokenizer.fingerprint != with_bos.fingerprint
    copy, export = tmp_path / "copy", tmp_path / "export"
    for folder, files in ((copy, tokenizer.files), (export, tokenizer.huggingface_files())):
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    again = load_tokenizer(TokenizerConfig(backend="sentencepiece", path=str(copy / "tokenizer.model")))
    assert (again.prefix, again.fingerprint) == ((), tokenizer.fingerprint)
    assert transformers.AutoTokenizer.from_pretrained(export)("the fox").input_ids == tokenizer.encode("the fox")


@pytest.mark.parametrize("template", ["llama2", "chatml", "chatml with user-defined names"])
def test_exports_of_sentencepiece_models_have_the_spaces_of_training_beside_special_tokens(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    names = ["<|im_start|>", "<|im_end|>"]
    is_defined = template.endswith("names")
    options = {"user_defined_symbols": names[:1], "control_symbols": names[1:], "vocab_size": 420} if is_defined else {}
    rules = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    config = train_sentencepiece(tmp_path, **options, **rules)
    tokenizer = load_tokenizer(config if is_defined else replace(config, extra_special_tokens=names))
    chat = load_chat_format(template.split()[0], tokenizer)
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, content in tokenizer.huggingface_files().items():
        (folder / name).write_bytes(content)
    (folder / "chat_template.jinja").write_text(chat.self_contained())
    talk = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "jumps number 7"}] * 2
    expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, return_dict=False)
    assert chat.encode(talk)[0] == expected


def test_tokens_that_a_sentencepiece_model_lacks_are_a_one_line_error(tmp_path):
    config = train_sentencepiece(tmp_path)
    size = load_tokenizer(config).vocab_size
    way = "use its tokenizer.json with backend = huggingface, or add the tokens with tokenizer.extra_special_tokens"
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": size}))
    message = (
        f"added_tokens.json adds <|im_start|> with the id {size}, which the sentencepiece model does not have; {way}"
    )
    assert error_of(config) == message
    assert (
        load_tokenizer(replace(config, extra_special_tokens=("<|im_start|>",))).special_tokens["<|im_start|>"] == size
    )
    decoder = {"1": {"content": "<s>"}, str(size): {"content": "<|user|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    assert error_of(config) == message.replace("added_tokens.json", "tokenizer_config.json").replace("im_start", "user")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "pad_token": "<|user|>"})
    )
    assert load_tokenizer(config).vocab_size == size, "padding is not needed"
