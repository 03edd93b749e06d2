"""Split patterns of tiktoken files."""

import base64

import pytest
import tiktoken
import tokenizers
from tiktoken_ext import openai_public

from tests.data.random_text import random_documents
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.base.config.load import load_config
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer
from trainer.data.tokenizer.byte_pair import PATTERNS


def tiktoken_file(folder, count):
    """Write a tiktoken file with the default file's ranks, shortened or extended to `count`."""
    lines = DEFAULT_FILE.read_bytes().splitlines()[:count]
    lines += [b"%s %d" % (base64.b64encode(b"\xff%07d" % i), i) for i in range(len(lines), count)]
    path = folder / f"{count}.tiktoken"
    path.write_bytes(b"\n".join(lines))
    return path


def load(path, **settings):
    return load_tokenizer(TokenizerConfig(backend="tiktoken", path=str(path), **settings))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    extra = [
        "it's 12345 Don't\n  ",
        "a \n\n b",
        "\t\n\t",
        "HELLOworld's//\n/x",
        "\u01c5\u0345 \u2028x",
        " \n ",
        "x\r\n\r\ny  ",
    ]
    return [*random_documents(300_000), *extra, *(text[:k] for text in extra for k in range(len(text)))]


@pytest.fixture(scope="module")
def published(monkeypatch_module) -> dict[str, str]:
    """Patterns as the package tiktoken ships them, and Qwen's as transformers does."""
    transformers = pytest.importorskip("transformers")
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch_module.setattr(openai_public, name, lambda *_, **__: {})
    patterns = {
        name: getattr(openai_public, function)()["pat_str"]
        for name, function in (("gpt2", "gpt2"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base"))
    }
    qwen2 = transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX
    return patterns | {"llama4": patterns["o200k"], "qwen2": qwen2}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("name", PATTERNS)
def test_a_named_pattern_gives_the_tokens_of_its_publisher_and_of_the_package_tokenizers(
    tmp_path, texts, published, name
):
    tokenizer = load(tiktoken_file(tmp_path, 1792), pattern=name)
    assert tokenizer.warnings == ()
    hf_tokenizer = tokenizers.Tokenizer.from_str(tokenizer.huggingface_files()["tokenizer.json"].decode())
    hf_tokenizer.encode_special_tokens = True
    pattern = published.get(name, PATTERNS[name])
    reference = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=tokenizer._ranks, special_tokens={})
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokens == reference.encode(text, disallowed_special=())
        assert tokens == hf_tokenizer.encode(text, add_special_tokens=False).ids
    default = load(tmp_path / "1792.tiktoken")
    assert (tokenizer.fingerprint == default.fingerprint) == (name == "llama3")


def test_a_regular_expression_is_a_pattern(tmp_path):
    tokenizer = load(tiktoken_file(tmp_path, 1792), pattern=r"\w|\s|[^\w\s]")
    assert tokenizer.encode("def") == [token for letter in "def" for token in tokenizer.encode(letter)]
    assert load_config(
        ["--tokenizer.backend", "tiktoken", "--tokenizer.path", str(DEFAULT_FILE), "--tokenizer.pattern", r"\X"]
    )


NAMES = "llama3, llama4, qwen2, gpt2, cl100k, o200k"
LOSES = f"must be one of {NAMES}, or a regular expression that matches any text: this one would lose characters"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", f"is not a valid regular expression, and none of the names {NAMES}"),
        ("lama3", f"{LOSES}; did you mean 'llama3'?"),
        ("Llama3", f"{LOSES}; did you mean 'llama3'?"),
        ("CL100K(", f"is not a valid regular expression, and none of the names {NAMES}; did you mean 'cl100k'?"),
        (r"\p{L}+|\p{N}+|\s+", LOSES),
    ],
)
def test_a_pattern_that_would_lose_text_is_rejected(tmp_path, pattern, message):
    with pytest.raises(ConfigError) as error:
        load(tiktoken_file(tmp_path, 1792), pattern=pattern)
    assert (error.value.key, error.value.message) == ("tokenizer.pattern", message)


def test_an_unknown_tiktoken_file_is_a_warning_until_the_pattern_is_set(tmp_path):
    path = tiktoken_file(tmp_path, 1700)
    tokenizer = load(path)
    assert tokenizer.warnings == (
        f"{path} is not Llama 3's tiktoken file, but is used with Llama 3's split pattern; set tokenizer.pattern to the pattern "
        'with which it was trained (scripts/train_tokenizer.py: "llama3")',
    )
    explicit = load(path, pattern="llama3")
    assert (explicit.warnings, explicit.fingerprint) == ((), tokenizer.fingerprint)
    assert load(path, extra_special_tokens=("<|x|>",)).warnings == tokenizer.warnings
    copy = tmp_path / "copy"
    copy.write_bytes(DEFAULT_FILE.read_bytes())
    for known in (load(copy), load(tiktoken_file(tmp_path, 128_000)), load_tokenizer(TokenizerConfig())):
        assert known.warnings == ()


@pytest.mark.parametrize(
    ("count", "owner", "pattern"),
    [(151_643, "Qwen", "qwen2"), (200_000, "Llama 4", "llama4"), (50_256, "GPT-2", "gpt2")],
)
def test_the_tiktoken_file_of_another_model_is_rejected_unless_a_pattern_is_set(tmp_path, count, owner, pattern):
    path = tiktoken_file(tmp_path, count)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert (error.value.key, error.value.message) == (
        "tokenizer.path",
        f"{path} has as many tokens as the file of {owner}, whose split pattern and special tokens are not Llama 3's; use a "
        f'tokenizer.json with backend = huggingface, or set tokenizer.pattern = "{pattern}" to train a new model with these '
        'ranks and Llama 3\'s special tokens, or to "llama3" to continue a run that began before this setting existed',
    )
    tokenizer = load(path, pattern=pattern)
    assert (tokenizer.bos, tokenizer.vocab_size) == (count, count + 256)
