"""Tokenizers in Hugging Face's format: BOS, EOS, and tokens that only other files than tokenizer.json add."""

import json

import pytest
from tokenizers import AddedToken, processors

from tests.data.tokenizer import folders
from tests.data.tokenizer.folders import save, special
from trainer.base.config import ConfigError, DataConfig, TokenizerConfig
from trainer.data.chat.format import load_chat_format
from trainer.data.prepare.encode import encoder
from trainer.data.tokenizer.backends import load_tokenizer

TEXTS = ("the quick fox", "", "  Hello\n\n 12", "<s> dog </s>")


def load(folder, **settings):
    return load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder), **settings))


def tokenizer_of(names=("<s>", "</s>"), prefix=(), suffix=()):
    """Return a byte-level tokenizer with special tokens. prefix, suffix: names that its post-processor adds to a text."""
    tokenizer = folders.byte_level()
    tokenizer.add_special_tokens([special(name) for name in names])
    if prefix or suffix:
        single = " ".join([*(f"{name}:0" for name in prefix), "$A:0", *(f"{name}:0" for name in suffix)])
        used = [(name, tokenizer.token_to_id(name)) for name in {*prefix, *suffix}]
        template = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=used)
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def edit(path, **values):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **values}))


def of_transformers(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def write(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


BOS = {
    "Qwen": ((), {"bos_token": None, "eos_token": "</s>", "add_bos_token": False}, None),
    "no key": ((), {"eos_token": "</s>"}, None),
    "named but not added": ((), {"bos_token": "<s>", "eos_token": "</s>"}, "<s>"),
    "added": (("<s>",), {"bos_token": "<s>", "eos_token": "</s>"}, "<s>"),
    "added but not named": (("<s>",), {"eos_token": "</s>"}, "<s>"),
    "two tokens": (("<|mask|>", "<s>"), {"eos_token": "</s>"}, None),
    "BOS that is EOS": (("</s>",), {"bos_token": "</s>", "eos_token": "</s>"}, "</s>"),
    "the flag contradicts": (("<s>",), {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}, "<s>"),
}


@pytest.mark.parametrize("case", BOS)
def test_text_begins_with_the_tokens_that_the_folders_own_tokenizer_adds(tmp_path, case):
    prefix, config, bos = BOS[case]
    folder = save(tokenizer_of(("<s>", "</s>", "<|mask|>"), prefix), tmp_path / "own", **config)
    # What a model's configuration says of BOS does not concern its tokenizer: Qwen2.5 names EOS there.
    edit(folder / "config.json", bos_token_id=300, eos_token_id=300, model_type="llama")
    edit(folder / "generation_config.json", bos_token_id=300, eos_token_id=[300])
    tokenizer, expected = load(folder), of_transformers(folder)
    assert tokenizer.prefix == tuple(map(expected.convert_tokens_to_ids, prefix))
    assert tokenizer.bos == (None if bos is None else expected.convert_tokens_to_ids(bos))
    assert tokenizer.eos == expected.eos_token_id
    encode = encoder(DataConfig(dataset="text", path="x"), tokenizer)
    for text in TEXTS:
        own = expected(text, split_special_tokens=True).input_ids
        assert [*tokenizer.prefix, *tokenizer.encode(text)] == own
        assert encode(text).tokens.tolist() == [*own, tokenizer.eos], "each document ends with EOS"
    exported = write(tokenizer.huggingface_files(), tmp_path / "exported")
    assert all(of_transformers(exported)(t).input_ids == expected(t).input_ids for t in TEXTS)
    again = load(write(tokenizer.files, tmp_path / "copy"))
    assert (again.prefix, again.bos, again.eos) == (tokenizer.prefix, tokenizer.bos, tokenizer.eos)
    assert again.fingerprint == tokenizer.fingerprint


def test_an_eos_that_the_post_processor_adds_is_not_doubled(tmp_path):
    """add_eos_token: documents end with one EOS, and a prompt has none, because the model is to continue it."""
    folder = save(tokenizer_of(suffix=("</s>",)), tmp_path / "own", bos_token=None, eos_token="</s>")
    tokenizer = load(folder)
    tokens = encoder(DataConfig(dataset="text", path="x"), tokenizer)("the fox").tokens.tolist()
    assert tokens == of_transformers(folder)("the fox").input_ids and tokens.count(tokenizer.eos) == 1
    assert tokenizer.prefix == ()


@pytest.mark.parametrize(("flag", "prefix"), [(True, ()), (False, ("<s>",))])
def test_a_flag_that_contradicts_the_post_processor_is_a_warning_and_is_corrected_in_exports(tmp_path, flag, prefix):
    """Versions of transformers before 5 follow the flag for some classes, later ones never if there is a tokenizer.json."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": flag, "tokenizer_class": "LlamaTokenizerFast"}
    tokenizer = load(save(tokenizer_of(prefix=prefix), tmp_path / "own", **config))
    stated, does = ("true", "does not add") if flag else ("false", "adds")
    says = f"tokenizer_config.json says add_bos_token = {stated}, but tokenizer.json {does} BOS, which counts"
    assert tokenizer.warnings == (says,)
    exported = json.loads(tokenizer.huggingface_files()["tokenizer_config.json"])
    assert exported["add_bos_token"] == (not flag)
    del config["add_bos_token"]
    default = load(save(tokenizer_of(prefix=prefix), tmp_path / "default", **config))
    assert default.warnings == ()
    stated = json.loads(default.huggingface_files()["tokenizer_config.json"]).get("add_bos_token")
    assert stated == (None if prefix else False), "the default of this class is true"


def test_fingerprints_change_only_where_tokens_do(tmp_path):
    def fingerprint(name, **config):
        return load(save(tokenizer_of(prefix=prefix), tmp_path / name, eos_token="</s>", **config)).fingerprint

    prefix = ("<s>",)
    with_bos = fingerprint("a", bos_token="<s>")
    assert fingerprint("b") == with_bos, "named by the post-processor alone"
    flags = {"lstrip": True, "normalized": False, "rstrip": True, "single_word": False, "special": True}
    decoder = {"328": {"content": "<s>", **flags}}
    assert fingerprint("c", bos_token="<s>", added_tokens_decoder=decoder) == with_bos
    decoder = {"330": {"content": "<think>", "special": False, "normalized": False}}
    assert fingerprint("d", bos_token="<s>", added_tokens_decoder=decoder) != with_bos, "<think> is recognized in text"
    decoder = {"330": {"content": "<think>", "special": True}}
    assert fingerprint("e", bos_token="<s>", added_tokens_decoder=decoder) == with_bos, "<think> is text"
    prefix = ()
    assert fingerprint("f", bos_token="<s>") != with_bos


# ---------------------------------------------------------------- tokens of other files


FIELDS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def added(tokens):
    return {str(i): {"content": t.content, **{f: getattr(t, f) for f in FIELDS}} for i, t in tokens.items()}


NEW = {
    330: special("<|user|>", rstrip=True),
    331: AddedToken("<think>", special=False, normalized=False),
    332: special("<|end|>"),
}


def test_tokens_that_only_tokenizer_config_adds_have_the_ids_of_transformers(tmp_path):
    folder = save(tokenizer_of(), tmp_path / "own", bos_token=None, eos_token="</s>", added_tokens_decoder=added(NEW))
    tokenizer, expected = load(folder, extra_special_tokens=("<|extra|>",)), of_transformers(folder)
    assert tokenizer.vocab_size == len(expected) + 1
    for i, token in NEW.items():
        assert expected.convert_tokens_to_ids(token.content) == i
        assert tokenizer.decode([i]) == token.content
        assert (tokenizer.special_tokens.get(token.content) == i) == token.special
    assert tokenizer.encode("a<think>b") == expected("a<think>b").input_ids
    template = (
        "{% for m in messages %}<|user|>\n{{ m.content }}<|end|>{% endfor %}{{ '<|user|>' if add_generation_prompt }}"
    )
    (folder / "chat_template.jinja").write_text(template)
    talk = [{"role": "user", "content": "Hello <think>"}, {"role": "assistant", "content": "the fox"}]
    tokens = load_chat_format(str(folder), tokenizer).encode(talk)[0]
    assert tokens == of_transformers(folder).apply_chat_template(talk, return_dict=False)
    exported = of_transformers(write(tokenizer.huggingface_files(), tmp_path / "exported"))
    assert exported.convert_tokens_to_ids("<|extra|>") == tokenizer.special_tokens["<|extra|>"] == 333
    assert exported("a<think> <|user|>\n x").input_ids == expected("a<think> <|user|>\n x").input_ids
    bare = json.loads(tokenizer.huggingface_files()["tokenizer.json"])["added_tokens"]
    assert [token["id"] for token in bare] == [328, 329, 330, 331, 332, 333], (
        "readers of tokenizer.json alone get all tokens"
    )


def test_tokens_that_only_added_tokens_json_adds_have_the_ids_of_transformers(tmp_path):
    config = {"bos_token": None, "eos_token": "</s>", "additional_special_tokens": ["<|user|>"]}
    folder = save(tokenizer_of(), tmp_path / "own", **config)
    (folder / "added_tokens.json").write_text(json.dumps({"<think>": 331, "<|user|>": 330, "</s>": 329}))
    tokenizer, expected = load(folder), of_transformers(folder)
    for name in ("<|user|>", "<think>"):
        assert expected.convert_tokens_to_ids(name) == {"<|user|>": 330, "<think>": 331}[name]
        assert tokenizer.encode(f"a{name} b") != tokenizer.encode(f"a{name} b".replace("<", ""))
    assert tokenizer.special_tokens == {"<s>": 328, "</s>": 329, "<|user|>": 330}
    assert tokenizer.encode("a<think>b") == expected("a<think>b").input_ids
    assert 330 not in tokenizer.encode("a<|user|>b")


def test_a_named_token_of_the_vocabulary_is_special_as_in_transformers(tmp_path):
    """Some tokenizer.json do not list </s> among their added tokens."""
    tokenizer = folders.prepending()
    content = json.loads(tokenizer.to_str()) | {"added_tokens": []}
    folder = save(folders.Tokenizer.from_str(json.dumps(content)), tmp_path / "own", bos_token="<s>", eos_token="</s>")
    assert load(folder).special_tokens == {"<s>": 1, "</s>": 2}
    assert of_transformers(folder)("</s>", add_special_tokens=False).input_ids == [2]


def error_of(folder) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder)
    assert error.value.key == "tokenizer.path"
    return error.value.message


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            added({332: special("<|user|>")}),
            "tokenizer_config.json gives <|user|> the id 332, but the next free id is 330; correct one of the two files",
        ),
        (
            added({5: special("<|user|>")}),
            "tokenizer_config.json gives <|user|> the id 5, but the next free id is 330; correct one of the two files",
        ),
        (
            added({330: special("</s>")}),
            "tokenizer_config.json gives </s> the id 330, but tokenizer.json gives it 329; correct one of the two files",
        ),
    ],
)
def test_ids_that_conflict_or_leave_a_gap_are_one_line_errors(tmp_path, decoder, message):
    folder = save(tokenizer_of(), tmp_path / "own", eos_token="</s>", added_tokens_decoder=decoder)
    assert error_of(folder) == message


def test_other_contents_are_one_line_errors(tmp_path):
    for i, decoder in enumerate(({"x": {"content": "<a>"}}, {"330": "<a>"}, {"330": {}}, [])):
        folder = save(tokenizer_of(), tmp_path / str(i), eos_token="</s>", added_tokens_decoder=decoder)
        assert error_of(folder) == f"{folder}/tokenizer_config.json does not list added tokens with their ids"
    folder = save(tokenizer_of(), tmp_path / "extra", eos_token="</s>", additional_special_tokens=["<|user|>"])
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        folder = save(tokenizer_of(), tmp_path / file, eos_token="</s>")
        edit(folder / file, additional_special_tokens=["<|user|>"])
        assert error_of(folder) == f"{file} names the special token <|user|>, {MISSING}"
    folder = save(tokenizer_of(), tmp_path / "eos", bos_token="<s>", eos_token=None)
    assert error_of(folder) == (
        "the tokenizer's folder names no EOS token in any of tokenizer_config.json, special_tokens_map.json, "
        "generation_config.json, config.json; name the token that ends a document as eos_token in tokenizer_config.json"
    )


MISSING = (
    "which the vocabulary does not have; correct the name, remove it, or list the token with its id in "
    "added_tokens_decoder of tokenizer_config.json"
)


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("value", ["<|none|>", {"content": "<|none|>", "special": True}])
def test_a_bos_or_eos_that_the_vocabulary_lacks_is_named_with_its_file(tmp_path, role, file, value):
    """transformers would give the token a new id. A later file with an id, and a tokenizer without BOS, are no excuse."""
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    del config[role]
    folder = save(tokenizer_of(), tmp_path / "own", **config)
    edit(folder / file, **{role: value})
    edit(folder / "config.json", bos_token_id=328, eos_token_id=329)
    assert error_of(folder) == f"{file} names <|none|> as {role}, {MISSING}"
    edit(folder / "tokenizer_config.json", added_tokens_decoder=added({330: special("<|none|>")}))
    assert getattr(load(folder), role[:3]) == 330, "the way out works"


@pytest.mark.parametrize("role", ["pad_token", "unk_token", "mask_token"])
def test_a_role_that_training_does_not_use_may_name_a_missing_token(tmp_path, role):
    folder = save(tokenizer_of(), tmp_path / "own", bos_token="<s>", eos_token="</s>", **{role: "<|none|>"})
    assert (load(folder).bos, load(folder).eos) == (328, 329)


def test_an_id_of_eos_that_is_no_token_is_shown(tmp_path):
    folder = save(tokenizer_of(), tmp_path / "own", eos_token=None)
    edit(folder / "generation_config.json", eos_token_id=[99999])
    assert "; eos_token_id 99999 of generation_config.json is not the id of one of the 330 tokens; name " in error_of(
        folder
    )
    edit(folder / "config.json", eos_token_id=329)
    assert load(folder).eos == 329


def test_a_damaged_template_file_is_reported_before_training_not_by_its_export(tmp_path):
    folder = save(tokenizer_of(), tmp_path / "own", eos_token="</s>")
    (folder / "chat_template.json").write_text("{")
    assert error_of(folder) == f"{folder}/chat_template.json is not a JSON object"
