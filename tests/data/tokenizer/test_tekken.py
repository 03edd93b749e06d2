"""Mistral's tekken.json. The layout of its ids is that of mistral_common, compared with the files that this package ships."""

import base64
import json
from pathlib import Path

import pytest

from tests.data.random_text import random_documents
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.checkpoint.formats.tokenizer_files import load_hf_tokenizer
from trainer.data.chat.format import ChatFormat
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer
from trainer.data.tokenizer.byte_pair import PATTERNS

NUM_SPECIAL = 30
TEXT = "Hello  world's 2025\n\n<s>[INST]\u4e16\U0001f642"


def content(version="v3", num_tokens=1000, **changes):
    """Return a tekken.json with some of the default tokenizer's ranks. More tokens are listed than used."""
    tokens = [base64.b64decode(line.split()[0]) for line in DEFAULT_FILE.read_bytes().splitlines()]
    config = {
        "pattern": PATTERNS["o200k"].replace(r"\p{N}{1,3}", r"\p{N}"),
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": num_tokens + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": version,
    }
    vocab = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for i, token in enumerate(tokens)
    ]
    return {"config": config, "vocab": vocab} | changes


def special_tokens(names):
    return [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]


def load(folder, value, **settings):
    (folder / "tekken.json").write_text(json.dumps(value))
    return load_tokenizer(TokenizerConfig(backend="tekken", path=str(folder / "tekken.json"), **settings))


def test_special_tokens_precede_text(tmp_path):
    tokenizer = load(tmp_path, content())
    assert tokenizer.vocab_size == 1030 and (tokenizer.bos, tokenizer.eos, tokenizer.prefix) == (1, 2, (1,))
    names = list(tokenizer.special_tokens)
    assert names[:5] == ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"] and names[19:21] == [
        "[TOOL_CONTENT]",
        "<SPECIAL_20>",
    ]
    assert list(tokenizer.special_tokens.values()) == list(range(NUM_SPECIAL)) and names[-1] == "<SPECIAL_29>"
    tokens = tokenizer.encode(TEXT)
    assert min(tokens) >= NUM_SPECIAL and max(tokens) < 1030, "names of special tokens in a text are text"
    assert tokenizer.decode(tokens) == TEXT and tokenizer.encode_array(TEXT).tolist() == tokens
    assert tokenizer.decode([1, 3, *tokens, 4, 29]) == f"<s>[INST]{TEXT}[/INST]<SPECIAL_29>"
    assert tokenizer.text_bytes()[:31].tolist() == [0] * NUM_SPECIAL + [1] and len(tokenizer.text_bytes()) == 1030
    assert tokenizer.encode("") == []
    assert load_tokenizer(TokenizerConfig(backend="tekken", path=str(tmp_path / "tekken.json"))).fingerprint == (
        tokenizer.fingerprint
    )


def test_a_file_of_a_later_version_lists_its_special_tokens(tmp_path):
    names = ["<unk>", "<s>", "</s>", "[INST]", "[THINK]"]
    tokenizer = load(tmp_path, content("v13", special_tokens=special_tokens(names)))
    assert list(tokenizer.special_tokens)[:6] == [*names, "<SPECIAL_5>"]
    assert tokenizer.encode("def")[0] >= NUM_SPECIAL


def test_reserved_tokens_can_be_renamed_and_new_ones_appended(tmp_path):
    settings = {"reuse_reserved_tokens": {"<|im_start|>": "<SPECIAL_20>"}, "extra_special_tokens": ("<|im_end|>",)}
    tokenizer = load(tmp_path, content(), **settings)
    assert (tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]) == (20, 1030)
    assert tokenizer.decode([20, 1030]) == "<|im_start|><|im_end|>"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + eos_token }}"
    "{% endfor %}"
)


def test_exports_have_the_tokens_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = load(tmp_path, content(), extra_special_tokens=("<|x|>",))
    folder = tmp_path / "hf"
    folder.mkdir()
    for name, data in tokenizer.huggingface_files().items():
        (folder / name).write_bytes(data)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for name, token in tokenizer.special_tokens.items():
        assert hf_tokenizer.convert_tokens_to_ids(name) == token
    for text in [*random_documents(100_000), TEXT, ""]:
        assert hf_tokenizer(text, split_special_tokens=True).input_ids == [1, *tokenizer.encode(text)]
    converted = transformers.integrations.mistral.tokenizer.MistralConverter  # needs special tokens in the file
    names = list(tokenizer.special_tokens)[:NUM_SPECIAL]
    (tmp_path / "tekken.json").write_text(json.dumps(content("v11", special_tokens=special_tokens(names))))
    reference = converted(str(tmp_path / "tekken.json")).converted()
    assert reference.encode("Hello  world's 2025\n\n").ids == tokenizer.encode("Hello  world's 2025\n\n")
    talk = [{"role": "user", "content": "Hello  world"}, {"role": "assistant", "content": " def"}]
    chat = ChatFormat.compile(TEMPLATE, tokenizer)
    assert chat.encode(talk)[0] == hf_tokenizer.apply_chat_template(talk, chat_template=TEMPLATE, return_dict=False)
    talk[0]["content"] += "</s>[INST]"
    tokens = chat.encode(talk)[0]
    assert (tokens.count(2), tokens.count(3)) == (1, 1)


def test_a_folder_with_only_a_tekken_json_is_a_tokenizer(tmp_path):
    tokenizer = load(tmp_path, content())
    assert load_hf_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(ConfigError) as error:
        load_hf_tokenizer(tmp_path)
    assert str(error.value) == f"{tmp_path} contains none of tokenizer.json, tokenizer.model, tekken.json"


BROKEN = [
    [],
    {},
    content(config={}),
    content(vocab=content()["vocab"][1:]),
    content(num_tokens=5000),
    content("v13"),
    content(special_tokens=special_tokens(["<unk>", "<s>"])),
    content(special_tokens=special_tokens(["<s>", "</s>", "<s>"])),
    content(special_tokens=special_tokens(["<s>", "</s>", *map(str, range(40))])),
    content(vocab=[{"rank": 0, "token_bytes": "%%"}]),
]


@pytest.mark.parametrize("value", BROKEN, ids=range(len(BROKEN)))
def test_other_files_are_one_line_errors(tmp_path, value):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, value)
    assert str(error.value) == f"tokenizer.path: {tmp_path}/tekken.json is not a tekken.json"


def test_the_files_of_mistral_common_have_its_tokens():
    mistral_common = pytest.importorskip("mistral_common", reason="needs the package mistral_common")
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    files = list(Path(mistral_common.__file__).parent.glob("data/tekken_*.json"))
    assert files
    for path in files:
        tokenizer, reference = (
            load_tokenizer(TokenizerConfig(backend="tekken", path=str(path))),
            Tekkenizer.from_file(path),
        )
        assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eos) == (reference.n_words, 1, 2)
        for text in [*random_documents(200_000), TEXT]:
            assert tokenizer.encode(text) == reference.encode(text, bos=False, eos=False)
