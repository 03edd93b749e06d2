"""Folders whose matrices are stored in FP8 with scales of blocks."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.huggingface_tensors import stored_name
from tests.training_runs import in_folder, lines_logged_by_train, records
from trainer.base.config import ConfigError
from trainer.checkpoint.formats.fp8_blocks import decode
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights

BLOCK = (24, 40)
SETTINGS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}


@pytest.fixture
def folder(tmp_path):
    """Return a folder with a small Qwen3, whose blocks do not divide all matrices, and its decoded tensors by stored name."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    config = transformers.Qwen3Config(**sizes, num_key_value_heads=2, vocab_size=2048)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "in")
    decoded = load_file(tmp_path / "in" / "model.safetensors")
    stored, scales = {}, {}
    for name, tensor in decoded.items():
        stored[name] = tensor
        if "_proj." not in name:
            continue
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])) + 0.5
        whole = scale.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
        stored[name] = (tensor.float() / whole * 100).to(torch.float8_e4m3fn)
        scales[f"{name}_scale_inv"] = scale / 100
        decoded[name] = (stored[name].float() * (whole / 100)).bfloat16()
    (tmp_path / "in" / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": stored, "model-00002-of-00002.safetensors": scales}
    for file, tensors in files.items():
        save_file(tensors, tmp_path / "in" / file)
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    configure(tmp_path / "in", quantization_config=SETTINGS)
    return tmp_path / "in", decoded


def configure(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def test_every_region_is_read_in_bf16(folder):
    source, decoded = folder
    hf = HuggingFaceWeights.open(source)
    assert {stored.dtype for stored in hf.index.values()} == {torch.bfloat16} and hf.files().startswith("2 files")
    assert all(torch.equal(hf.rows(name, 0, stored.shape[0]), decoded[hf.keys[stored_name(hf.spec.huggingface, name)]])
               for name, stored in hf.index.items())  # fmt: skip
    name, region = "layers.1.feed_forward.w2.weight", (slice(9, 35), slice(20, 71))
    assert torch.equal(hf.region(name, region), decoded["model.layers.1.mlp.down_proj.weight"][region])


def start(ranks, tiny, folder, run):
    """Train adapters on a base in 4 bits for one step. Return the loss, and the line about the weights."""
    config = run.with_suffix(".toml")
    config.write_text(re.sub(r"overrides = .*", f'pretrained = "{folder}"', Path(tiny[1]).read_text()))
    argv = ["--config", str(config), *in_folder(run), "--tokenizer.backend", "default", "--training.steps", "1"]
    argv += ["--lora.rank", "4", "--lora.base_dtype", "nf4_double", "--training.local_batch_size", "4"]
    lines, _ = ranks(2).run(lines_logged_by_train, argv)
    (record,) = records(run)
    return record["loss"], next(line for line in lines if line.startswith("weights: "))


def test_a_base_in_4_bits_is_that_of_the_decoded_folder(folder, ranks, tiny, tmp_path):
    source, decoded = folder
    (tmp_path / "decoded").mkdir()
    save_file(decoded, tmp_path / "decoded" / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path / "decoded")
    configure(tmp_path / "decoded", quantization_config=None)
    expected, _ = start(ranks, tiny, tmp_path / "decoded", tmp_path / "a")
    loss, line = start(ranks, tiny, source, tmp_path / "b")
    assert loss == expected
    assert line.startswith(f"weights: loaded from {source} (") and "2 files, model-00001-of-00002.safetensors" in line


def test_decoded_values_are_products_rounded_once():
    values = torch.tensor([[1.5, -448.0, 0.0, 2.0]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.3, 7.0]])
    expected = torch.tensor([[1.5 * 0.3, -448 * 0.3, 0.0, 14.0]]).bfloat16()
    assert torch.equal(decode(values, scales, (1, 3), slice(0, 1), slice(0, 4)), expected)


def test_damaged_folders_are_refused(folder):
    source, _ = folder
    configure(source, quantization_config=None)
    with pytest.raises(ConfigError, match="has the unsupported dtype F8_E4M3"):
        HuggingFaceWeights.open(source)
    configure(source, quantization_config=SETTINGS | {"weight_block_size": [8, 8]})
    with pytest.raises(ConfigError, match=r"which do not fit blocks of \[8, 8\]"):
        HuggingFaceWeights.open(source)
    configure(source, quantization_config=SETTINGS)
    file = source / "model-00002-of-00002.safetensors"
    scales = load_file(file)
    del scales["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(scales, file)
    with pytest.raises(ConfigError, match=r"up_proj\.weight has the format FP8, but .*weight_scale_inv is missing"):
        HuggingFaceWeights.open(source)
