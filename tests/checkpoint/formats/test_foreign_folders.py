"""Folders that are not, or not completely, a model in Hugging Face's format: each reader names what the folder is."""

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from models import MODELS
from tests.commands import run_script
from tests.conftest import ROOT
from tests.training_runs import error_line
from trainer.base.config import ConfigError, LoraConfig, ModelConfig, TokenizerConfig
from trainer.checkpoint.formats.folders import open_complete
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights
from trainer.checkpoint.formats.initial_weights import load_adapter
from trainer.data.chat.template_files import read_template
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.run.resolve import resolve_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PICKLES = (
    "contains weights only as pickles, which can run code when they are loaded ({}); save the model as safetensors "
    "(transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))"
)


@pytest.fixture
def model(hf_model, tmp_path):
    """A folder with a model in one file, and its tensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(hf_model / "config.json", folder)
    save_file({n: t for path in hf_model.glob("*.safetensors") for n, t in load_file(path).items()}, folder / SINGLE)
    return folder


def split(folder):
    """Divide the model into two files with an index."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    files = dict.fromkeys(names[:5], A) | dict.fromkeys(names[5:], B)
    for file in (A, B):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def only_index(folder):
    split(folder)
    (folder / SINGLE).unlink()


def without_weights(*names, content="x"):
    def change(folder):
        (folder / SINGLE).unlink()
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)

    return change


ORIGINAL = "(quantization_config in config.json); use the original model, in bf16 or another float dtype"


def with_quantization(settings):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))

    return change


def quantized(**settings):
    return with_quantization(settings)


def after_split(change):
    return lambda folder: (only_index(folder), change(folder))


WEIGHTS = {
    "an index beside a single file": (
        split,
        f"contains both {SINGLE} and {INDEX}, which names {A}, {B}; remove the stale one",
    ),
    "an index of missing files beside a single file": (
        lambda folder: (split(folder), (folder / A).unlink(), (folder / B).unlink()),
        f"contains both {SINGLE} and {INDEX}, which names {A}, {B}; remove the stale one",
    ),
    "a missing file of an index": (
        after_split(lambda folder: (folder / B).unlink()),
        f"lacks {B}, 1 of the 2 files that {INDEX} names; download them",
    ),
    "a file that the index does not name": (
        after_split(lambda folder: shutil.copy(folder / B, folder / "model-00003-of-00003.safetensors")),
        f"contains model-00003-of-00003.safetensors, which {INDEX} does not name; remove the files of another model",
    ),
    "files without an index": (
        after_split(lambda folder: (folder / INDEX).unlink()),
        f"contains 2 of 2 files with weights, but no {INDEX}; download the model again, with this file",
    ),
    "two sets of files without an index": (
        after_split(lambda f: (shutil.copy(f / B, f / "model-00003-of-00003.safetensors"), (f / INDEX).unlink())),
        f"contains 3 of 2 or 3 files with weights, but no {INDEX}; download the model again, with this file",
    ),
    "files beside a single file": (
        lambda folder: (split(folder), (folder / INDEX).unlink()),
        f"contains {SINGLE} beside {A}, {B}; remove those that belong to another model",
    ),
    "pickles": (without_weights("pytorch_model.bin"), PICKLES.format("pytorch_model.bin")),
    "pickles in parts": (
        without_weights(*(f"pytorch_model-0000{i}-of-00003.bin" for i in (1, 2, 3))),
        PICKLES.format("pytorch_model-00001-of-00003.bin, pytorch_model-00002-of-00003.bin ..."),
    ),
    "tensorflow": (
        without_weights("tf_model.h5"),
        "contains weights only in the format of another library (tf_model.h5); save the model as safetensors "
        "(transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...))",
    ),
    "consolidated weights only": (
        without_weights("consolidated.safetensors"),
        "contains weights in the format of their publisher (consolidated); use the model in Hugging Face's format",
    ),
    "GGUF beside config.json": (
        without_weights("model-Q4_K_M.gguf"),
        "contains a model in llama.cpp's format GGUF; use the original model in Hugging Face's format",
    ),
    "no weights": (without_weights(), f"contains no weights: it has neither {SINGLE} nor {INDEX}"),
    "no weights, but a started download": (
        without_weights(".cache/huggingface/download/x.incomplete"),
        f"contains no weights: it has neither {SINGLE} nor {INDEX}; its download is not complete",
    ),
    "bitsandbytes": (
        quantized(quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False),
        f"contains weights that are quantized with bitsandbytes in 4 bits {ORIGINAL}, which [lora] base_dtype quantizes while it "
        "is loaded",
    ),
    "FP8": (
        quantized(quant_method="fp8", activation_scheme="static"),
        f"contains weights that are quantized with FP8 without weight_block_size {ORIGINAL}",
    ),
    "MXFP4 in a family that has no such folders": (
        quantized(quant_method="mxfp4"),
        f"contains weights that are quantized with MXFP4 {ORIGINAL}",
    ),
    "a name instead of the settings of a quantization": (
        with_quantization("nf4"),
        "has a quantization_config in config.json that is no object: 'nf4'",
    ),
    "compressed-tensors": (
        quantized(quant_method="compressed-tensors"),
        f"contains weights that are quantized with compressed-tensors {ORIGINAL}",
    ),
    "a pointer": (
        lambda folder: (folder / SINGLE).write_text(POINTER),
        f"contains Git LFS pointers instead of files ({SINGLE}); run `git lfs pull` in this folder",
    ),
    "an unfinished file": (
        lambda folder: (folder / SINGLE).rename(folder / f"{SINGLE}.incomplete"),
        f"contains unfinished downloads ({SINGLE}.incomplete); download the model again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_that_cannot_be_read_are_described(model, tmp_path, kind):
    change, what = WEIGHTS[kind]
    change(model)
    with pytest.raises(ConfigError) as error:
        open_complete(model, alone=True)  # for checkpoint.init_from and generate.py
    assert error.value.message == f"{model} {what}"
    done = run_script("scripts/convert_hf.py", "from-hf", model, tmp_path / "out")
    assert (done.returncode, done.stderr.strip()) == (2, f"{model} {what}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "x.gguf"]
)
def test_other_files_beside_the_weights_are_not_read(model, name):
    before = HuggingFaceWeights.open(model).index
    (model / name).write_text("not a tensor")
    assert HuggingFaceWeights.open(model).index == before
    only_index(model)
    assert HuggingFaceWeights.open(model).index.keys() == before.keys()


def test_an_index_that_names_the_single_file_is_not_stale(model):
    before = HuggingFaceWeights.open(model).index
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(model / SINGLE), SINGLE)}))
    assert HuggingFaceWeights.open(model).index == before


def folder_with(folder, *names, content="{}"):
    folder.mkdir(parents=True)
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


FOLDERS = {
    "an empty folder": (("",), "is empty"),
    "a peft adapter": (
        ("adapter_config.json", "adapter_model.safetensors"),
        "contains an adapter of the package peft, not a model; use its base model here, and the adapter as lora.init_from, or a "
        "folder with both, which peft's merge_and_unload() gives",
    ),
    "GGUF": (
        ("model.gguf", "README.md"),
        "contains a model in llama.cpp's format GGUF; use the original model in Hugging Face's format",
    ),
    "Meta's files": (
        ("consolidated.00.pth", "params.json"),
        "contains weights in the format of their publisher (consolidated); use the model in Hugging Face's format",
    ),
    "diffusers": (("model_index.json",), "contains a model of the package diffusers, which is not a language model"),
    "DCP": (
        ("__0_0.distcp", ".metadata"),
        "contains a checkpoint of torch.distributed.checkpoint; convert it to Hugging Face's format",
    ),
    "DeepSpeed": (("zero_to_fp32.py", "latest"), "contains a checkpoint of DeepSpeed; run its zero_to_fp32.py"),
    "a failed download": (
        (".cache/huggingface/download/a.incomplete",),
        "is empty; its download is not complete",
    ),
    "a started download": (
        ("README.md", ".cache/huggingface/download/a.incomplete"),
        "contains a download that is not complete; download the model again",
    ),
    "the cache": (
        ("snapshots/1a2b/config.json", "refs/main"),
        "is a folder of Hugging Face's cache; use its snapshot {folder}/snapshots/1a2b",
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_setting_that_names_a_folder_describes_it(tiny, tmp_path, kind):
    names, what = FOLDERS[kind]
    folder = folder_with(tmp_path / "given", *names)
    what = f"{folder} {what.format(folder=folder)}"
    with pytest.raises(ConfigError) as error:
        resolve_model(ModelConfig(huggingface=str(folder)))
    assert str(error.value) == f"model.huggingface: {what}"
    with pytest.raises(ConfigError) as error:
        open_complete(folder, alone=True)
    assert error.value.message == what
    with pytest.raises(ConfigError) as error:
        load_tokenizer(TokenizerConfig(backend="huggingface", path=str(folder)))
    assert str(error.value) == f"tokenizer.path: {folder} has no tokenizer.json, and {what.removeprefix(f'{folder} ')}"
    with pytest.raises(ConfigError) as error:
        read_template(str(folder))
    assert str(error.value) == f"data.chat_template: {what}"
    for script, *words in (
        ("scripts/convert_hf.py", "from-hf", folder, tmp_path / "out"),
        ("scripts/plan.py", "--model.huggingface", folder),
    ):
        done = run_script(script, *words)
        assert done.returncode == 2 and what in done.stderr and done.stderr.count("\n") == 1


def test_generation_describes_the_folder(tmp_path):
    folder, what = folder_with(tmp_path / "given", "adapter_config.json"), FOLDERS["a peft adapter"][1]
    command = [sys.executable, "scripts/generate.py", str(folder), "--prompt", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (2, f"{folder} {what}")


def test_a_run_describes_its_initial_folder(ranks, tiny, tmp_path):
    folder = folder_with(tmp_path / "given", "adapter_config.json")
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--checkpoint.init_from", str(folder)]
    (line,) = ranks(1).run(error_line, argv)
    assert line == f"--checkpoint.init_from {folder}: {folder} {FOLDERS['a peft adapter'][1]}"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "x.tiktoken"])
def test_a_tokenizer_that_is_a_pointer_is_described(tmp_path, name):
    file = folder_with(tmp_path / "t", name, content=POINTER) / name
    backend = {"json": "huggingface", "odel": "sentencepiece", "oken": "tiktoken"}.get(name[-4:], "tiktoken")
    for path in (file, file.parent) if backend == "huggingface" else (file,):
        with pytest.raises(ConfigError) as error:
            load_tokenizer(TokenizerConfig(backend=backend, path=str(path)))
        assert error.value.message == (
            f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"
        )


def test_a_template_or_a_configuration_that_is_a_pointer_is_described(tmp_path):
    for name in ("chat_template.jinja", "tokenizer_config.json", "config.json"):
        file = folder_with(tmp_path / name, name, content=POINTER) / name
        with pytest.raises(ConfigError) as error:
            resolve_model(ModelConfig(huggingface=str(file))) if name == "config.json" else read_template(str(file))
        assert error.value.message == (
            f"{file} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"
        )


def test_the_template_of_a_model_of_several_modalities_is_read(tmp_path):
    """Its folder has chat_template.json, and tokenizer_config.json with the names of the special tokens."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}x"}))
    for path in (tmp_path, tmp_path / "chat_template.json"):
        assert read_template(str(path)) == ("{{ bos_token }}x", {"bos_token": "<bos>"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "chat_template": "own"}))
    assert read_template(str(tmp_path)) == ("own", {"bos_token": "<bos>"})
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_template(str(tmp_path)) == ("file", {"bos_token": "<bos>"})


# ---------------------------------------------------------------- lora.init_from, and what was read

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
PICKLE = (
    "contains an adapter only as a pickle, which can run code when it is loaded (adapter_model.bin); save the adapter as "
    "safetensors (peft: PeftModel.from_pretrained(...).save_pretrained(...))"
)


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({}, "is empty"),
        ({ADAPTER_CONFIG: "{}", ADAPTER: POINTER}, f"contains Git LFS pointers instead of files ({ADAPTER}); run `git lfs pull`"),
        ({ADAPTER_CONFIG: "{}", f"{ADAPTER}.part": "x"}, f"contains unfinished downloads ({ADAPTER}.part); download"),
        ({ADAPTER_CONFIG: "{}", "adapter_model.bin": "x"}, PICKLE),
        ({ADAPTER_CONFIG: "{}"}, f"contains no {ADAPTER}; download the adapter again"),
        ({ADAPTER: "x"}, f"contains {ADAPTER} without {ADAPTER_CONFIG}; download the adapter again"),
        ({"config.json": "{}", SINGLE: "x"}, "contains a complete model, not an adapter; use it as checkpoint.init_from"),
        ({"a.gguf": "x"}, "contains a model in llama.cpp's format GGUF"),
        ({"README.md": "x"}, f"contains neither {ADAPTER_CONFIG} nor a checkpoint of an adapter"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_adapter_is_described(tmp_path, files, what, monkeypatch):
    folder = tmp_path / "given"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    monkeypatch.setattr("trainer.checkpoint.formats.initial_weights.run_on_rank_0", lambda work: work())
    spec = MODELS["llama3"]
    with pytest.raises(ConfigError) as error:
        load_adapter(LoraConfig(init_from=str(folder)), spec, spec.by_size["debug"], {}, {}, "")
    assert error.value.key == "lora.init_from" and error.value.message.startswith(f"{folder} {what}")


def test_the_log_names_the_files_with_weights_that_were_read(model):
    (model / "pytorch_model.bin").touch()
    (model / "consolidated.safetensors").touch()
    described = open_complete(model, alone=True).files()
    assert described == f"{SINGLE}; not consolidated.safetensors, pytorch_model.bin"
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        (model / name).unlink()
    only_index(model)
    assert open_complete(model, alone=True).files() == f"2 files, {A} to {B}"
