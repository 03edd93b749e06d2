"""Special tokens beside other text: white space, prepended spaces and words give the tokens of transformers."""

import json
import random
from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers

from tests.data.tokenizer import folders
from tests.data.tokenizer.folders import save, special
from trainer.base.config import TokenizerConfig
from trainer.data.chat.format import ChatFormat, load_chat_format
from trainer.data.chat.template import TemplateFailure
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.data.tokenizer.placeholders import _BLOCKS

transformers = pytest.importorskip("transformers")

# Phi-3's template: line ends follow the special tokens.
PHI3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
NAMES = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PIECES = ["the", "fox", " ", "  ", "\n", "\n\n", "1", "\u00e9", "<x>", "<think>", "Word", " Hello", "\t"]


def conversations(count: int, answer: str = "", names: Sequence[str] = NAMES) -> list[list[dict[str, str]]]:
    """Return random conversations whose texts contain names of special tokens. answer: start of each answer."""
    rng = random.Random(0)

    def text(role: str) -> str:
        return answer * (role == "assistant") + "".join(rng.choices([*PIECES, *names], k=rng.randrange(1, 9)))

    roles = ("system", "user", "assistant", "user", "assistant")
    return [[{"role": role, "content": text(role)} for role in roles] for _ in range(count)]


def make(folder, tokenizer, flags, template=PHI3, names=NAMES, thinks=True):
    plain = {name: value for name, value in flags.items() if name != "normalized"}
    tokenizer.add_special_tokens([special(name) for name in ("<s>", "</s>")])
    tokenizer.add_special_tokens([special(name, **flags) for name in names])
    if thinks:
        tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False, **plain)])
    return save(tokenizer, folder, bos_token="<s>", eos_token="</s>", chat_template=template)


def chat_format(folder) -> ChatFormat:
    tokenizer = load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder)))
    return load_chat_format(str(folder), tokenizer)


TOKENIZERS = {
    "prepending normalizer": folders.prepending,
    "metaspace always": lambda: folders.metaspace("always"),
    "metaspace first": lambda: folders.metaspace("first"),
    "metaspace never": lambda: folders.metaspace("never"),
    "byte level": folders.byte_level,
}
FLAGS = {
    "none": {},
    "rstrip": {"rstrip": True},
    "lstrip": {"lstrip": True},
    "lstrip, rstrip": {"lstrip": True, "rstrip": True},
    "normalized": {"normalized": True},
    "single word": {"single_word": True},
    "single word, normalized, rstrip": {"single_word": True, "normalized": True, "rstrip": True},
}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_chats_have_the_tokens_of_transformers_although_messages_contain_names_of_special_tokens(tmp_path, name, flags):
    """transformers gets the same tokenizer with other names for the special tokens, so that the names in messages are text. But
    if special tokens are themselves text beside certain neighbours, both have the same names, which no message contains."""
    folder = make(tmp_path / "own", TOKENIZERS[name](), FLAGS[flags])
    chat, names = chat_format(folder), NAMES
    if FLAGS[flags].get("single_word") or FLAGS[flags].get("normalized"):
        names = ()
    else:
        others = [name.replace("<|", "<|the-") for name in NAMES]
        template = (
            PHI3.replace("'<|'", "'<|the-'").replace("<|assistant", "<|the-assistant").replace("<|end", "<|the-end")
        )
        folder = make(tmp_path / "renamed", TOKENIZERS[name](), FLAGS[flags], template, others)
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    # No token may extend over the start of an answer, because prompts end there.
    for talk in conversations(30, "" if FLAGS[flags].get("rstrip") else "A", names):
        tokens, _ = chat.encode(talk)
        assert tokens == expected.apply_chat_template(talk, return_dict=False)
        prompt = chat.prompt(talk[:2])
        assert prompt == expected.apply_chat_template(talk[:2], return_dict=False, add_generation_prompt=True)
        assert tokens[: len(prompt)] == prompt, "training sees what generation sees"


def test_white_space_at_the_end_of_a_prompt_stays_even_if_the_answer_begins_with_a_token_that_takes_it(tmp_path):
    """The prompt is complete before the answer exists. transformers, given both at once, removes the line end."""
    folder = make(tmp_path / "own", folders.prepending(), {"lstrip": True})
    chat = chat_format(folder)
    talk = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "<think> Hello"}]
    tokens, targets = chat.encode(talk)
    prompt = chat.prompt(talk[:1])
    assert prompt[-1] == chat.tokenizer.encode("\n")[-1]
    assert tokens[: len(prompt)] == prompt and targets.index(True) == len(prompt)
    whole = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, return_dict=False)
    assert [token for token in tokens if token not in prompt[-2:]] == [t for t in whole if t not in prompt[-2:]]


def test_flags_in_tokenizer_config_replace_those_of_tokenizer_json(tmp_path):
    """Phi-3's rstrip is often found only there."""
    folder = make(tmp_path / "own", folders.prepending(), {}, thinks=False)
    without_flags = chat_format(folder)
    path = folder / "tokenizer_config.json"
    ids = {
        token.content: i
        for i, token in folders.Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder().items()
    }
    flags = {"lstrip": False, "normalized": False, "rstrip": True, "single_word": False, "special": True}
    decoder = {str(ids[name]): {"content": name, **flags} for name in NAMES}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": decoder}))
    chat, expected = chat_format(folder), transformers.AutoTokenizer.from_pretrained(folder)
    talks = [
        [{"role": m["role"], "content": m["content"].replace("|", "")} for m in talk] for talk in conversations(20)
    ]
    for talk in talks:
        assert chat.encode(talk)[0] == expected.apply_chat_template(talk, return_dict=False)
    assert any(chat.encode(talk) != without_flags.encode(talk) for talk in talks)
    assert chat.fingerprint != without_flags.fingerprint
    assert chat.tokenizer.fingerprint == without_flags.tokenizer.fingerprint, "plain text has the same tokens"


def test_a_completion_continues_its_prompt_as_one_text(tmp_path):
    folder = make(tmp_path / "own", folders.prepending(), {})
    chat, whole = chat_format(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, completion in (("the quick", " brown Fox"), ("Hello", "\nWord"), ("", "the fox"), ("a: ", "1 2")):
        tokens, targets = chat.encode_completion(prompt, completion)
        start = targets.index(True)
        assert tokens[:start] == whole(prompt).input_ids
        assert whole.decode(tokens[:-1]).strip() == (prompt + completion).strip()
    tokens = chat.encode_completion("the quick", "\nlazy dog")[0]
    assert tokens[:-1] == whole("the quick\nlazy dog").input_ids


def test_a_normalizer_that_removes_unusual_characters_keeps_the_special_tokens(tmp_path):
    tokenizer = folders.byte_level()
    tokenizer.normalizer = normalizers.BertNormalizer(clean_text=True, lowercase=False)
    chat = chat_format(make(tmp_path / "own", tokenizer, {"normalized": True}))
    talk = [{"role": "user", "content": "the\u0007 fox \U000f0000"}, {"role": "assistant", "content": "Hello"}]
    tokens = chat.encode(talk)[0]
    special_ids = [
        chat.tokenizer.special_tokens[name] for name in ("<s>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>")
    ]
    assert [token for token in tokens if token in special_ids] == special_ids


def test_characters_of_a_message_never_stand_for_special_tokens(tmp_path):
    chat = chat_format(make(tmp_path / "own", folders.prepending(), {"rstrip": True}))
    question = {"role": "user", "content": "x" + "".join(map(chr, _BLOCKS[:40]))}
    talk = [question, {"role": "assistant", "content": "".join(map(chr, range(0xFDD0, 0xFDF0)))}]
    tokens, ids = chat.encode(talk)[0], set(chat.tokenizer.special_tokens.values())
    assert sum(token in ids for token in tokens) == 5
    text = chat.tokenizer.decode(tokens)
    assert question["content"] in text and talk[1]["content"] in text
    with pytest.raises(TemplateFailure, match=r"^the text uses all characters that could stand for special tokens$"):
        chat.encode([{"role": "user", "content": "".join(map(chr, _BLOCKS))}, talk[1]])


def test_the_flags_of_a_folder_decide_what_is_special(tmp_path):
    """DeepSeek's <\uff5cUser\uff5c> has "special": false. In a message it is a token too, as in exports."""
    tokenizer = folders.byte_level()
    names = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>")
    tokenizer.add_special_tokens([special("<s>"), special("</s>")])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in names])
    template = (
        "{% for m in messages %}{{ ('<\uff5cUser\uff5c>' if m.role == 'user' else '<\uff5cAssistant\uff5c>') + m.content }}"
        "{{ '</s>' if m.role == 'assistant' }}{% endfor %}{{ '<\uff5cAssistant\uff5c>' if add_generation_prompt }}"
    )
    folder = save(tokenizer, tmp_path / "own", bos_token="<s>", eos_token="</s>", chat_template=template)
    (tmp_path / "copy.jinja").write_text(template)
    chat, expected = chat_format(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert set(chat.tokenizer.special_tokens) == {"<s>", "</s>"} and set(chat.tokenizer.added_tokens) == set(names)
    for template in (chat, load_chat_format(str(tmp_path / "copy.jinja"), chat.tokenizer)):
        for question in ("the fox", f"a{names[0]}b", f" {names[1]} ", names[0] + names[1]):
            talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "Hello"}]
            assert template.encode(talk)[0] == expected.apply_chat_template(talk, return_dict=False)
            assert template.prompt(talk[:1]) == expected.apply_chat_template(
                talk[:1], return_dict=False, add_generation_prompt=True
            )


def test_an_ordinary_token_can_end_answers(tmp_path):
    tokenizer = folders.byte_level()
    tokenizer.add_special_tokens([special("<s>")])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ("<|im_start|>", "<|im_end|>")])
    folder = save(tokenizer, tmp_path / "own", bos_token=None, eos_token="<s>")
    chat = load_chat_format("chatml", load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder))))
    talk = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "Hello"}]
    assert chat.end_of_turn == (chat.tokenizer.added_tokens["<|im_end|>"],)
    tokens, targets = chat.encode(talk)
    trained = chat.tokenizer.decode([token for token, is_target in zip(tokens, targets, strict=True) if is_target])
    assert trained == "Hello<|im_end|>"
    expected = transformers.AutoTokenizer.from_pretrained(folder)
    assert (
        tokens == expected(expected.apply_chat_template(talk, tokenize=False, chat_template=chat.template))["input_ids"]
    )


GEMMA_NAMES = (
    "<s>",
    "</s>",
    "<table>",
    "<h1>",
    "\n\n",
    "\n\n\n",
    "\u2581\u2581",
    "[multimodal]",
    "<unused0>",
    "<end_of_image>",
)


def test_ordinary_tokens_with_odd_names_are_encoded_as_in_exports(tmp_path):
    """Gemma 3 has 6,400 added tokens, of which <s> and </s> are ordinary: they are tags of HTML. Its files have 1.2 MB."""
    tokenizer = folders.sentencepiece_like(normalizers.Replace(" ", "\u2581"))
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(content))
    names = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    tokenizer.add_special_tokens([special(name) for name in names])
    unused = [f"<unused{i}>" for i in range(6242)]
    ordinary = [*GEMMA_NAMES, *unused[1:]]
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in ordinary])
    folder = save(tokenizer, tmp_path / "own", bos_token="<bos>", eos_token="<eos>", model_max_length=10**30)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = tokenizer.get_added_tokens_decoder()
    flags = ("lstrip", "normalized", "rstrip", "single_word", "special")
    decoder = {i: {"content": t.content} | {f: getattr(t, f) for f in flags} for i, t in sorted(added.items())}
    config |= {"added_tokens_decoder": decoder, "chat_template": BUILT_IN["gemma3"].read_text()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    assert (folder / "tokenizer_config.json").stat().st_size > 10**6
    chat, expected = chat_format(folder), transformers.AutoTokenizer.from_pretrained(folder)
    (tmp_path / "exported").mkdir()
    for name, file in chat.tokenizer.huggingface_files().items():
        (tmp_path / "exported" / name).write_bytes(file)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    pieces = [*GEMMA_NAMES, "the fox", " ", "  ", "\n", "a", "<", "s>", "\u2581"]
    for text in (f"{a}{b}{c}" for a in pieces for b in pieces for c in ("", " x", "<s>")):
        tokens = chat.tokenizer.encode(text)
        assert tokens == expected(text, add_special_tokens=False)["input_ids"], text
        assert tokens == exported(text, add_special_tokens=False)["input_ids"], text
        talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "Hello"}]
        if text.strip():
            assert chat.encode(talk)[0] == expected.apply_chat_template(talk, return_dict=False), text


def test_a_token_with_a_role_is_special_even_if_a_folder_says_otherwise(tmp_path):
    tokenizer = folders.byte_level()
    tokenizer.add_tokens([AddedToken("EOT", normalized=False, special=False)])
    turn = "{{ m.role + ':' + m.content + eos_token }}"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}{{{{ 'assistant:' if add_generation_prompt }}}}"
    folder = save(tokenizer, tmp_path / "own", bos_token=None, eos_token="EOT", chat_template=template)
    chat, expected = chat_format(folder), transformers.AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "Hello"}]
    assert chat.encode(talk)[0] == expected.apply_chat_template(talk, return_dict=False)
    talk[0]["content"] = "the EOT fox"
    assert chat.encode(talk)[0].count(chat.tokenizer.eos) == 2


def test_tokens_without_flags_in_a_byte_level_tokenizer_do_not_depend_on_their_neighbours(tmp_path):
    """Chats prepared by earlier versions have the same tokens, so their stores stay valid."""
    chat = chat_format(make(tmp_path / "own", folders.byte_level(), {}))
    assert chat.tokenizer.parts_fingerprint == ""
    assert chat_format(make(tmp_path / "flags", folders.byte_level(), {"rstrip": True})).tokenizer.parts_fingerprint
    for name in ("prepending normalizer", "metaspace always", "metaspace first"):
        assert chat_format(make(tmp_path / name, TOKENIZERS[name](), {})).tokenizer.parts_fingerprint
