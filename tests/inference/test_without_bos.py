"""A tokenizer without BOS, as Qwen's: a run trains, generates, chats and is exported with the tokens of transformers."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.data.tokenizer import folders
from tests.data.tokenizer.folders import save, special
from tests.training_runs import train
from trainer.base.config import CheckpointConfig
from trainer.checkpoint.formats.export import export_run
from trainer.data.store.store import SPLITS, open_store
from trainer.inference.engine import Sampling, TextRequest
from trainer.inference.generate import TextGenerator
from trainer.tools.testing.ranks import RankError

CPU = torch.device("cpu")
NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|other|>")


@pytest.fixture(scope="module")
def qwen_tokenizer(tmp_path_factory) -> Path:
    """The folder of a tokenizer whose files say what Qwen's say: no BOS, but a bos_token_id in the model's configuration."""
    tokenizer = folders.byte_level()
    tokenizer.add_special_tokens([special(name) for name in NAMES])
    config = {"bos_token": None, "eos_token": "<|endoftext|>", "add_bos_token": False}
    folder = save(tokenizer, tmp_path_factory.mktemp("tokenizer") / "qwen", **config)
    eos = tokenizer.token_to_id("<|endoftext|>")
    (folder / "config.json").write_text(json.dumps({"bos_token_id": eos, "eos_token_id": eos}))
    return folder


@pytest.fixture(scope="module")
def run(ranks, tiny, qwen_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("without_bos")
    argv = [
        *tiny,
        "--run.output_folder",
        str(folder),
        "--run.name",
        "run",
        "--data.store_folder",
        str(folder / "stores"),
    ]
    argv += ["--tokenizer.backend", "huggingface", "--tokenizer.path", str(qwen_tokenizer)]
    size = folders.Tokenizer.from_file(str(qwen_tokenizer / "tokenizer.json")).get_vocab_size()
    ranks(1).run(train, [*argv, "--model.overrides.vocab_size", str(size)])
    ranks(1).run(export_run, folder / "run", CheckpointConfig(export_huggingface=True))
    return folder / "run"


def test_documents_have_eos_at_their_end_and_no_bos(run, qwen_tokenizer):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen_tokenizer)
    (folder,) = (path.parent for path in run.parent.glob("stores/*/store.json"))
    stores = [open_store(folder, split) for split in SPLITS]
    tokens = [token for store in stores for token in store.tokens[:].tolist()]
    assert tokens[-1] == tokenizer.eos_token_id and set(tokens) & set(tokenizer.all_special_ids) == {tokens[-1]}
    text = tokenizer.decode(tokens[: tokens.index(tokenizer.eos_token_id)])
    assert tokens[: tokens.index(tokenizer.eos_token_id)] == tokenizer(text).input_ids


def test_an_export_says_that_there_is_no_bos(run):
    transformers = pytest.importorskip("transformers")
    export = run / "huggingface"
    for file in ("config.json", "generation_config.json"):
        assert json.loads((export / file).read_text())["bos_token_id"] is None
    hf_tokenizer, model = (
        c.from_pretrained(export) for c in (transformers.AutoTokenizer, transformers.LlamaForCausalLM)
    )
    assert hf_tokenizer.bos_token is None and hf_tokenizer("def f").input_ids[0] != hf_tokenizer.eos_token_id
    assert model.config.bos_token_id is None


def answers(folder, text) -> tuple[list[int], list[int], set[int]]:
    """Return the prompt of a text, its continuation and the tokens at which generation stops."""
    generator = TextGenerator.load(folder, torch.float32, CPU, 0, "")
    request = generator.text_request(text, sampling=Sampling(temperature=0), max_new_tokens=5)
    (answer,) = generator.generate([replace(request, stop_tokens=())])
    return request.prompt, answer.tokens, generator.stop


def test_a_prompt_is_what_transformers_makes_of_it(ranks, run):
    transformers = pytest.importorskip("transformers")
    export = run / "huggingface"
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    hf_model = transformers.LlamaForCausalLM.from_pretrained(export, dtype=torch.float32)
    ids = hf_tokenizer("def f", return_tensors="pt").input_ids
    expected = hf_model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)[0].tolist()
    ((prompt, answer, _),) = ranks(1).run(answers, export, "def f")
    assert prompt + answer == expected
    assert ranks(1).run(answers, run, "def f")[0][0] == prompt
    message = "--prompt: must not be empty, because the tokenizer adds no BOS token, so that the model has no input"
    with pytest.raises(RankError, match=re.escape(message)):
        ranks(1).run(answers, export, "")


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_generation_stops_at_every_end_that_the_model_names(ranks, run, tmp_path, qwen_tokenizer, file):
    folder = Path(shutil.copytree(run / "huggingface", tmp_path / "model"))
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    path = folder / file
    ends = [folders.Tokenizer.from_file(str(qwen_tokenizer / "tokenizer.json")).token_to_id(name) for name in NAMES[2:]]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    ((_, _, stop),) = ranks(1).run(answers, folder, "x")
    assert stop == {*ends, ends[0] - 2}, "those of the model, and the tokenizer's EOS"


def test_a_fine_tuned_model_chats_and_stops_at_the_ends_of_its_base_model_too(ranks, tiny, run, tmp_path):
    base = Path(shutil.copytree(run / "huggingface", tmp_path / "base"))
    path = base / "generation_config.json"
    eos = json.loads(path.read_text())["eos_token_id"]
    path.write_text(json.dumps({"bos_token_id": eos, "eos_token_id": [eos, eos + 3]}))
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": eos + 1}))
    argv = [*tiny, "--run.output_folder", tmp_path, "--run.name", "chat", "--model.huggingface", base]
    argv += ["--checkpoint.init_from", base, "--tokenizer.backend", "huggingface", "--tokenizer.path", base]
    argv += ["--data.dataset", "chat", "--data.path", "", "--data.chat_template", "chatml"]
    argv += ["--checkpoint.export_huggingface", "true", "--data.store_folder", tmp_path / "stores"]
    ranks(1).run(train, list(map(str, argv)))
    for file in ("generation_config.json", "config.json"):
        ids = json.loads((tmp_path / "chat" / "huggingface" / file).read_text())
        assert (ids["bos_token_id"], ids["eos_token_id"]) == (None, [eos, eos + 2, eos + 3])
        assert ids["pad_token_id"] == eos + 1
    ((prompt, answer, stop),) = ranks(1).run(chat_answers, tmp_path / "chat")
    assert prompt[0] == eos + 1 and answer and stop == {eos, eos + 2, eos + 3}


def chat_answers(folder) -> tuple[list[int], list[int], set[int]]:
    generator = TextGenerator.load(folder, torch.float32, CPU, 0, "")
    prompt = generator.chat_format().prompt([{"role": "user", "content": "Hello!"}])
    request = TextRequest(prompt=prompt, sampling=Sampling(temperature=0), stop_tokens=generator.stop, max_new_tokens=3)
    return prompt, generator.generate([request])[0].tokens, generator.stop
