"""Runs on conversations: the warning about their template, and resumed runs whose template has another text."""

import json
import shutil
from dataclasses import replace

import pytest

from tests.conftest import ROOT, tiny_run
from tests.training_runs import in_folder, lines_logged_by_train, records, train
from trainer.base.config import DataConfig, TokenizerConfig
from trainer.data.chat.template_files import BUILT_IN
from trainer.data.datasets import describe_template
from trainer.data.prepare.prepare import prepare, renders_chats
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.tools.testing.ranks import RankError

CHATS = [
    "--data.dataset",
    "chat",
    "--data.packing",
    "best-fit",
    "--data.document_mask",
    "true",
    "--data.long_documents",
]
CHATS += ["truncate", "--data.held_out_fraction", "0.1", "--checkpoint.interval_steps", "2", "--checkpoint.keep", "0"]


@pytest.fixture(scope="module")
def tiny(corpus, tmp_path_factory):
    argv = tiny_run(tmp_path_factory, corpus, 4)
    chats = (ROOT / "trainer/data/chat/chats.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(chats[:60]))
    same = ["--evaluation.datasets.same", f"chat:{path}", "--evaluation.interval_steps", "2"]
    return [*argv, *CHATS, "--data.path", str(path), *same, "--evaluation.keep_best_on", "same"]


def test_a_run_resumes_after_a_change_of_its_template_that_changes_no_token_and_no_target(ranks, tiny, tmp_path):
    template, stores = tmp_path / "template.jinja", tmp_path / "stores"
    argv = [*tiny, "--data.chat_template", str(template), "--data.store_folder", str(stores)]
    text = BUILT_IN["llama3"].read_text()
    marked = text.replace("{%- for message", "{%- generation -%}{%- for message", 1) + "{%- endgeneration -%}"
    template.write_text(marked)
    ranks(1).run(train, [*argv, *in_folder(tmp_path / "complete"), "--training.steps", "4"])
    ranks(1).run(train, [*argv, *in_folder(tmp_path / "run"), "--training.steps", "2"])
    template.write_text(text)
    first = {path.name for path in stores.glob("chat-*")}
    lines = ranks(1).run(lines_logged_by_train, [*argv, *in_folder(tmp_path / "run"), "--training.steps", "4"])[0]
    assert len({path.name for path in stores.glob("chat-*")} - first) == len(first) > 0, "the stores have other names"
    assert not any("the evaluation changed" in line for line in lines)
    losses = [[record["loss"] for record in records(tmp_path / name)] for name in ("complete", "run")]
    assert losses[0] == losses[1]

    template.write_text(f"Today.{text}")
    with pytest.raises(RankError, match=r'cannot resume from .*: data was "chat-\S+", is "chat-\S+"; set another'):
        ranks(1).run(train, [*argv, *in_folder(tmp_path / "run"), "--training.steps", "6"])
    template.write_text(text)
    for name in first:
        shutil.rmtree(stores / name)
    with pytest.raises(RankError, match=r'cannot resume from .*: data was "chat-\S+", is "chat-\S+"; set another'):
        ranks(1).run(train, [*argv, *in_folder(tmp_path / "run"), "--training.steps", "6"])


REWRITES = (
    "{% for m in messages %}{{ m.role }}:{{ '(thinks)' if loop.last and m.role == 'assistant' }}{{ m.content }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TAGGED = REWRITES.replace(
    "{{ '(thinks)' if loop.last and m.role == 'assistant' }}", "{% generation %}{% endgeneration %}"
)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (
            REWRITES,
            "warning: chat template {}: in longer conversations, it writes an earlier answer, or the text before it, otherwise "
            "than at inference, when this answer is the last one",
        ),
        (TAGGED, "chat template {}: its {{% generation %}} tags have no effect; each answer is a target as a whole"),
        (BUILT_IN["llama3"].read_text(), ""),
    ],
)
def test_what_a_user_should_know_about_a_template_is_said_once_for_all_datasets(template, line, tmp_path, capfd):
    path = tmp_path / "template.jinja"
    path.write_text(template)
    data = DataConfig(chat_template=str(path), datasets={"one": "chat:", "two": "chat:", "three": "text:b"})
    data = replace(data, store_folder=str(tmp_path / "stores"))
    tokenizer = load_tokenizer(TokenizerConfig())
    one = prepare(replace(data, dataset="chat", datasets={}), TokenizerConfig(), tokenizer)
    capfd.readouterr()
    stores = {"train/one": one, "train/two": one, "train/three": tmp_path, "evaluation/held": one}
    describe_template(data, {"held": "chat:"}, tokenizer, stores)
    out, err = capfd.readouterr()
    assert (out + err).count("chat template") == bool(line)
    assert line.format(path) in out + err


def test_a_run_on_texts_says_nothing_about_a_template(capfd):
    describe_template(
        DataConfig(chat_template="/missing", datasets={"one": "text:a"}), {}, load_tokenizer(TokenizerConfig()), {}
    )
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_documents_of_plain_text_are_counted_and_nothing_is_said_about_a_template(kind, tmp_path, capfd):
    answers = {"completion": "c"} if kind == "chat" else {"chosen": "c", "rejected": "r"}
    records = [{"prompt": f"p{i}", **answers} for i in range(20)]
    (tmp_path / "template.jinja").write_text(REWRITES)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = DataConfig(dataset=kind, path=str(tmp_path / "data.jsonl"), chat_template=str(tmp_path / "template.jinja"))
    data = replace(data, store_folder=str(tmp_path / "stores"))
    tokenizer = load_tokenizer(TokenizerConfig())
    store = prepare(data, TokenizerConfig(), tokenizer)
    assert not renders_chats(store)
    describe_template(data, {}, tokenizer, {"train/data": store})
    out, err = capfd.readouterr()
    assert "20 documents of plain text, without the chat template" in out and "inference" not in out + err
    messages = {"prompt": [{"role": "user", "content": "q"}]}
    messages |= {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, [*records, messages])))
    assert renders_chats(prepare(data, TokenizerConfig(), tokenizer))
