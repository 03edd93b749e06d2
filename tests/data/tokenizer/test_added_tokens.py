"""Special tokens added after a vocabulary: never encoded from text, decoded by name, exported to Hugging Face's libraries."""

import pytest

from tests.data.chat.examples import DEFAULT
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.data.chat.format import load_chat_format
from trainer.data.tokenizer.backends import load_tokenizer

NAMES = ("<|im_start|>", "<|im_end|>")


def test_added_tokens_follow_the_vocabulary_and_are_never_encoded_from_text():
    tokenizer = load_tokenizer(TokenizerConfig(extra_special_tokens=NAMES))
    assert tokenizer.vocab_size == DEFAULT.vocab_size + 2
    assert [tokenizer.special_tokens[name] for name in NAMES] == [DEFAULT.vocab_size, DEFAULT.vocab_size + 1]
    text = "a <|im_start|> b"
    assert tokenizer.encode(text) == DEFAULT.encode(text)
    first = DEFAULT.vocab_size
    assert tokenizer.decode([first, *DEFAULT.encode("é!"), first + 1, first]) == "<|im_start|>é!<|im_end|><|im_start|>"
    assert tokenizer.text_bytes()[-3:].tolist() == [0, 0, 0] and len(tokenizer.text_bytes()) == tokenizer.vocab_size
    assert tokenizer.fingerprint != DEFAULT.fingerprint
    chat = load_chat_format("chatml", tokenizer)
    assert chat.end_of_turn == (first + 1,)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("<|eot_id|>",), "<|eot_id|> is already a special token"),
        (("<a>", "<a>"), "<a> is already a special token"),
        (("x",), "'x' is too short for the name of a special token"),
    ],
)
def test_invalid_names_are_rejected(names, message):
    with pytest.raises(ConfigError) as error:
        load_tokenizer(TokenizerConfig(extra_special_tokens=names))
    assert (error.value.key, error.value.message) == ("tokenizer.extra_special_tokens", message)


@pytest.mark.parametrize("backend", ["default", "sentencepiece"])
def test_transformers_loads_the_added_tokens(tmp_path, bpe_tokenizer, backend):
    transformers = pytest.importorskip("transformers")
    config = TokenizerConfig(extra_special_tokens=NAMES)
    if backend == "sentencepiece":
        (tmp_path / "m.model").write_bytes(bpe_tokenizer.files["tokenizer.model"])
        config = TokenizerConfig(backend=backend, path=str(tmp_path / "m.model"), extra_special_tokens=NAMES)
    tokenizer = load_tokenizer(config)
    folder = tmp_path / "out"
    folder.mkdir()
    for name, content in tokenizer.huggingface_files().items():
        (folder / name).write_bytes(content)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert [hf_tokenizer.convert_tokens_to_ids(name) for name in NAMES] == [
        tokenizer.special_tokens[name] for name in NAMES
    ]
    assert (
        hf_tokenizer("<|im_start|>", add_special_tokens=False).input_ids[-1] == tokenizer.special_tokens["<|im_start|>"]
    )
