"""Tokenizers in files for llama.cpp."""

import io
import json
from functools import cache

import pytest
import sentencepiece

from models import MODELS
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.checkpoint.formats.gguf_tokenizer import _DEEPSEEK_V3, _TEKKEN, TokenType, vocabulary
from trainer.checkpoint.formats.tokenizer_files import exported_tokenizer
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.byte_pair import PATTERNS
from trainer.data.tokenizer.hf_json import byte_to_char

CHARS = list(byte_to_char().values())
SPLIT = {"behavior": "Isolated", "invert": False}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACE = "\u2581"


def split(*patterns):
    parts = [{"type": "Split", "pattern": {"Regex": pattern}, **SPLIT} for pattern in patterns]
    return {"type": "Sequence", "pretokenizers": [*parts, BYTE_LEVEL]}


def byte_level(**changes):
    """Return a tokenizer.json. changes: of its parts, and of its model."""
    pieces = [*CHARS, "he", "ll", "hell", "hello"]
    model = {
        **{"type": "BPE", "ignore_merges": False, "vocab": {piece: i for i, piece in enumerate(pieces)}},
        "merges": [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"]],
    }
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": 260, "content": "<|end|>", "special": True, **special},
        {"id": 261, "content": "<tool>", "special": False, **special},
    ]
    content = {
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": split(PATTERNS["qwen2"]),
        "decoder": BYTE_LEVEL,
    }
    content |= {"model": model | changes.pop("model", {})}
    return content | changes


def sentencepiece_like(**changes):
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", "ab", f"{SPACE}ab"]
    model = {
        **{"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True},
        "vocab": {piece: i for i, piece in enumerate(pieces)},
        "merges": [["a", "b"], [SPACE, "ab"]],
    }
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    normalizers = [
        {"type": "Prepend", "prepend": SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    ]
    content = {
        "added_tokens": [{"id": 1, "content": "</s>", **special}],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "ByteFallback"},
        "model": model | changes.pop("model", {}),
    }
    return content | changes


@pytest.fixture
def converted(tmp_path):
    """Return a function (tokenizer.json, keyword arguments) -> Vocabulary."""

    def convert(content, vocab_size=300, config=None, others=None, ids=None):
        config = {"eos_token": "<|end|>" if is_byte_level(content) else "</s>"} | (config or {})
        files = {"tokenizer.json": json.dumps(content), "tokenizer_config.json": json.dumps(config), **(others or {})}
        for name, text in files.items():
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        tokenizer = load_tokenizer(TokenizerConfig(backend="huggingface", path=str(tmp_path)))
        exported = exported_tokenizer(tokenizer.huggingface_files(), MODELS["llama3"].huggingface)
        return vocabulary(exported, tokenizer, vocab_size, ids or {})

    return convert


def is_byte_level(content):
    return content["decoder"] == BYTE_LEVEL


@pytest.mark.parametrize(
    ("pre_tokenizer", "ignores", "name"),
    [
        (split(PATTERNS["llama3"]), True, "llama-bpe"),
        (split(PATTERNS["llama3"]), False, "dbrx"),
        (split(PATTERNS["qwen2"]), False, "qwen2"),
        (split(PATTERNS["qwen2"]), True, "qwen2"),
        (split(PATTERNS["o200k"]), False, "gpt-4o"),
        (split(_TEKKEN), True, "tekken"),
        (split(*_DEEPSEEK_V3), False, "deepseek-v3"),
        (BYTE_LEVEL | {"use_regex": True}, False, "gpt-2"),
        (
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Digits", "individual_digits": True},
                    BYTE_LEVEL | {"use_regex": True},
                ],
            },
            False,
            "smollm",
        ),
    ],
)
def test_the_pre_tokenizer_is_named_by_its_regular_expression(pre_tokenizer, ignores, name, converted):
    keys = converted(byte_level(pre_tokenizer=pre_tokenizer, model={"ignore_merges": ignores})).keys
    assert (keys["ggml.model"], keys["ggml.pre"]) == ("gpt2", name)


def test_the_shipped_tokenizer_is_that_of_llama_3():
    tokenizer = load_tokenizer(TokenizerConfig())
    keys = vocabulary(tokenizer.huggingface_files(), tokenizer, tokenizer.vocab_size, {}).keys
    assert keys["ggml.pre"] == "llama-bpe" and keys["ggml.add_bos_token"] is True
    assert keys["ggml.bos_token_id"] == tokenizer.bos and keys["ggml.eos_token_id"] == tokenizer.eos
    assert len(keys["ggml.merges"]) == tokenizer.vocab_size - 256 - 256  # no merge for bytes and special tokens


def test_tokens_have_types_and_padded_rows_have_names(converted):
    keys = converted(byte_level(), vocab_size=264).keys
    assert keys["ggml.tokens"][256:] == ["he", "ll", "hell", "hello", "<|end|>", "<tool>", "[PAD262]", "[PAD263]"]
    types = {
        0: TokenType.NORMAL,
        259: TokenType.NORMAL,
        260: TokenType.CONTROL,
        261: TokenType.USER_DEFINED,
        262: TokenType.UNUSED,
    }
    assert {token: keys["ggml.token_type"][token] for token in types} == types
    assert keys["ggml.merges"] == ["h e", "l l", "he ll", "hell o"] and "ggml.scores" not in keys


def test_sentencepieces_algorithm_gets_scores_in_the_order_of_the_merges(converted):
    keys = converted(sentencepiece_like()).keys
    assert (keys["ggml.model"], keys["ggml.pre"], keys["ggml.add_space_prefix"]) == ("llama", "default", True)
    tokens, types, scores = (keys[f"ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    assert [types[i] for i in (0, 1, 2, 258)] == [
        TokenType.UNKNOWN,
        TokenType.CONTROL,
        TokenType.BYTE,
        TokenType.NORMAL,
    ]
    assert scores[tokens.index("ab")] > scores[tokens.index(f"{SPACE}ab")] > scores[tokens.index("a")] > scores[-1]


@cache
def trained_model():
    writer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "a b c d e f g"] * 20),
        model_writer=writer,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    return writer.getvalue()


def test_a_sentencepiece_model_keeps_its_scores_and_types(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(trained_model())
    tokenizer = load_tokenizer(TokenizerConfig(backend="sentencepiece", path=str(tmp_path / "tokenizer.model")))
    keys = vocabulary(tokenizer.huggingface_files(), tokenizer, tokenizer.vocab_size + 2, {}).keys
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained_model())
    size = processor.vocab_size()
    assert keys["ggml.tokens"][:size] == [processor.id_to_piece(i) for i in range(size)]
    assert keys["ggml.scores"][:size] == [processor.get_score(i) for i in range(size)]
    types = keys["ggml.token_type"]
    assert all((types[i] == TokenType.BYTE) == processor.is_byte(i) for i in range(size))
    assert all((types[i] == TokenType.CONTROL) == processor.is_control(i) for i in range(size))
    assert types[keys["ggml.tokens"].index("<tool>")] == TokenType.USER_DEFINED and types[-1] == TokenType.UNUSED
    assert keys["ggml.add_bos_token"] is True and keys["ggml.bos_token_id"] == processor.bos_id()


def test_tokens_that_end_an_answer_have_a_role(converted):
    added = byte_level()["added_tokens"]
    more = [{**added[0], "id": 262 + i, "content": f"<|x{i}|>"} for i in range(2)]
    content = byte_level(added_tokens=[*added, *more])
    config = {"pad_token": "<|x1|>"}
    keys = converted(content, config=config, ids={"eos_token_id": [260, 262]}).keys
    assert {key: value for key, value in keys.items() if key.endswith("_id")} == {
        **{"ggml.eos_token_id": 260, "ggml.eot_token_id": 262, "ggml.padding_token_id": 263},
    }
    assert keys["ggml.add_bos_token"] is False and keys["ggml.add_eos_token"] is False


def test_the_template_has_no_tags_of_its_own(converted):
    template = b"{% generation %}{{ messages[0].content }}{% endgeneration %}"
    keys = converted(byte_level(), others={"chat_template.jinja": template}).keys
    assert "{%" not in keys["chat_template"]


def test_named_templates_are_listed(converted):
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    keys = converted(byte_level(), config={"chat_template": named}).keys
    found = {key: value for key, value in keys.items() if key.startswith("chat_")}
    assert found == {"chat_template": "A", "chat_template.tool_use": "B", "chat_templates": ["tool_use"]}


METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}
_ADDS = "llama.cpp adds a space also before a text that begins with one"
_TAKES = "llama.cpp does not take the white space around a special token, or require that it is a word"
_FORM = "llama.cpp does not normalize text (NFC): it encodes text in another form differently"
_SPLITS = "llama.cpp approximates this tokenizer's regular expression: it splits some words differently"


def with_metaspace(scheme):
    return sentencepiece_like(normalizer=None, pre_tokenizer=METASPACE | {"prepend_scheme": scheme})


@pytest.mark.parametrize(
    ("content", "remarks"),
    [
        (byte_level(), []),
        (byte_level(normalizer={"type": "NFC"}), [_FORM]),
        (byte_level(pre_tokenizer=split(PATTERNS["o200k"])), [_SPLITS]),
        (with_metaspace("never"), []),
        (with_metaspace("always"), [f"{_ADDS}, unlike this tokenizer"]),
        (with_metaspace("first"), [f"{_ADDS} and after each special token, unlike this tokenizer"]),
        (
            byte_level(added_tokens=[byte_level()["added_tokens"][0] | {"rstrip": True}]),
            [f"{_TAKES}, unlike the tokenizer for <|end|>"],
        ),
    ],
)
def test_texts_that_llama_cpp_encodes_differently_are_said(content, remarks, converted):
    assert [*converted(content).remarks] == remarks


def without_byte(content):
    del content["model"]["vocab"]["<0x41>"]
    return content


def with_other_merges(merges):
    vocab = sentencepiece_like()["model"]["vocab"]
    return sentencepiece_like(model={"vocab": vocab | {"ba": 263, "aba": 264}, "merges": merges})


_OTHER = PATTERNS["llama3"].replace("3}", "2}")
_PUNCTUATION = {"type": "Sequence", "pretokenizers": [{"type": "Punctuation", "behavior": "Isolated"}, BYTE_LEVEL]}
_AS_IT_IS = "takes a word that is a token as it is, which llama.cpp does not with this regular expression"
_ORDER = "merges pairs in an order that no score of each token gives"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            byte_level(pre_tokenizer=split(_OTHER)),
            f"splits text with the regular expression {_OTHER}, which it does not know",
        ),
        (byte_level(pre_tokenizer=_PUNCTUATION), "splits text with Punctuation in a way that it does not know"),
        (byte_level(normalizer={"type": "Lowercase"}), "normalizes text with Lowercase"),
        (byte_level(model={"ignore_merges": True, "merges": []}), _AS_IT_IS),
        (sentencepiece_like(normalizer={"type": "NFKC"}), "changes text with NFKC in a way that it does not know"),
        (without_byte(sentencepiece_like()), "has no tokens for single bytes"),
        (with_other_merges([["a", "ba"], ["b", "a"], ["ab", "a"]]), _ORDER),
        (with_other_merges([["b", "a"], ["a", "ba"]]), _ORDER),  # ab and a are tokens, but never merged
    ],
)
def test_a_tokenizer_that_llama_cpp_cannot_express_is_refused_by_name(content, problem, converted):
    with pytest.raises(ConfigError) as error:
        converted(content)
    assert error.value.message == f"the tokenizer cannot be written for llama.cpp: it {problem}"


def test_a_vocabulary_larger_than_the_model_is_refused(converted):
    with pytest.raises(ConfigError, match="it has the token 261, but the model only 260 rows"):
        converted(byte_level(), vocab_size=260)


def test_unigrams_are_refused(tmp_path):
    class Unigrams:
        prefix, bos = (), None

    content = json.dumps({"model": {"type": "Unigram"}}).encode()
    with pytest.raises(ConfigError, match="it is not byte-pair encoding, but Unigram"):
        vocabulary({"tokenizer.json": content}, Unigrams(), 300, {})
