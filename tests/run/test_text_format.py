"""The tokenizer and the chat template of a run: loaded once, and refused with one line on all ranks."""

import contextlib
import io
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from tests.training_runs import combine, error_line, in_folder
from trainer.base.config import ConfigError, TokenizerConfig
from trainer.base.config.load import load_config
from trainer.checkpoint.resume import ResumePoint
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer
from trainer.run.resolve import resolve
from trainer.run.text_format import load_text_format, require_same_tokenizer, unused_template
from trainer.state import TrainState

CHATS = ["--data.dataset", "chat", "--data.path", "", "--data.packing", "best-fit", "--data.document_mask", "true"]


def processes_of_text_format(argv):
    """Load the text format on this rank. Return the number of processes that it starts, the template and the ids."""
    config, started = load_config(combine(argv)), subprocess.Popen
    with mock.patch.object(subprocess, "Popen", side_effect=started) as popen:
        text = load_text_format(config, resolve(config, dist.get_world_size()))
    return popen.call_count, text.chat_template, text.end_of_turn


def test_only_rank_0_starts_a_process_for_the_chat_template(ranks, tiny):
    first, second = ranks(2).run(processes_of_text_format, [*tiny, *CHATS])
    assert (first[0], second[0]) == (1, 0)
    assert first[1:] == second[1:] and "<|start_header_id|>" in first[1] and first[2]


def test_a_run_on_texts_starts_no_process(ranks, tiny):
    assert ranks(1).run(processes_of_text_format, tiny) == [(0, "", ())]


def warnings_of_text_format(argv):
    """Load the text format on this rank. Return what it prints on stderr."""
    config, err = load_config(combine(argv)), io.StringIO()
    with contextlib.redirect_stderr(err):
        load_text_format(config, resolve(config, dist.get_world_size()))
    return err.getvalue()


def test_an_unknown_tiktoken_file_is_one_warning_of_a_run_until_its_pattern_is_set(ranks, tiny, tmp_path):
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(b"\n".join(DEFAULT_FILE.read_bytes().splitlines()[:1700]))
    argv = [*tiny, "--tokenizer.backend", "tiktoken", "--tokenizer.path", str(path)]
    first, second = ranks(2).run(warnings_of_text_format, argv)
    expected = f"warning: {path} is not Llama 3's tiktoken file, but is used with Llama 3's split pattern; set tokenizer.pattern"
    assert (first.count("\n"), first.partition(" ")[2][: len(expected)], second) == (1, expected, "")
    assert ranks(1).run(warnings_of_text_format, [*argv, "--tokenizer.pattern", "llama3"]) == [""]


def test_the_default_template_is_not_used_silently_for_another_model():
    config, default = load_config(combine(CHATS)), load_tokenizer(TokenizerConfig())
    names = {
        name: 0 for name in ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>")
    }
    both = SimpleNamespace(special_tokens=names, files={}, added_tokens={})
    own = SimpleNamespace(special_tokens=names, files={"chat_template.jinja": b"x"}, added_tokens={})
    assert 'the model is smollm3; set data.chat_template = "smollm3"' in unused_template(config, "smollm3", both)
    assert "the tokenizer has a chat template of its own" in unused_template(config, "llama3.1", own)
    assert unused_template(config, "llama3.1", default) == unused_template(config, "llama3", both) == ""
    chosen = load_config(combine([*CHATS, "--data.chat_template", "llama3"]))
    assert unused_template(chosen, "smollm3", both) == unused_template(chosen, "smollm3", own) == ""


@pytest.mark.parametrize("size", [1, 2])
def test_a_broken_chat_template_is_one_line_on_all_ranks(ranks, tiny, tmp_path, size):
    (tmp_path / "broken.jinja").write_text("{% for")
    argv = [*tiny, *CHATS, "--data.chat_template", str(tmp_path / "broken.jinja"), *in_folder(tmp_path / "run")]
    lines = ranks(size).run(error_line, argv)
    assert len(set(lines)) == 1 and lines[0].startswith(f"--data.chat_template {tmp_path / 'broken.jinja'}: ")
    assert "\n" not in lines[0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_tokenizer_larger_than_the_vocabulary_is_one_line_on_all_ranks(ranks, tiny, tmp_path, size):
    argv = [*tiny, "--model.overrides.vocab_size", "1000", *in_folder(tmp_path / "run")]
    expected = (
        "--model.overrides.vocab_size 1000: the tokenizer has 2048 tokens, but vocab_size of llama3/debug is 1000"
    )
    assert ranks(size).run(error_line, argv) == [expected] * size


@pytest.mark.parametrize(("began_with", "hint"), [("llama3", True), ("gpt2", False)])
def test_a_run_that_began_before_patterns_existed_is_told_how_to_continue(tmp_path, began_with, hint):
    """The trainer split the text of every tiktoken file by Llama 3's pattern."""
    config = TokenizerConfig(backend="tiktoken", path=str(DEFAULT_FILE), pattern="qwen2")
    before = replace(config, pattern=began_with)
    state = TrainState(fingerprint={"tokenizer": load_tokenizer(before).fingerprint})
    saved = ResumePoint(tmp_path / "step-00000001", state)
    with pytest.raises(
        ConfigError, match=r"cannot resume from .*: tokenizer was \"tiktoken-.*, is \"tiktoken-"
    ) as error:
        require_same_tokenizer(saved, config, load_tokenizer(config))
    way = '; or set tokenizer.pattern = "llama3", with which this run began, to continue it'
    assert error.value.message.endswith(way) == hint
    require_same_tokenizer(saved, before, load_tokenizer(before))
