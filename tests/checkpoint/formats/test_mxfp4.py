"""Folders of GPT-OSS whose experts are stored in the format MXFP4."""

import json
import math

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.context import Context
from models.huggingface_tensors import by_expert
from tests.checkpoint.formats.gguf_models import read, values_of
from trainer.base.config import ConfigError
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.gguf_tokenizer import Vocabulary
from trainer.checkpoint.formats.gguf_writer import GgufExport
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.mxfp4 import decode
from trainer.checkpoint.formats.native_writer import write_checkpoint

EXPERTS, DIM, WIDTH = 3, 64, 32  # dim = 2 width: a matrix and its transpose have the same shape
CONFIG = {
    **{"hidden_size": DIM, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8},
    **{"num_key_value_heads": 1, "vocab_size": 31, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
}


def draw_bytes(*shape, low=0, high=256):
    return torch.randint(low, high, shape, dtype=torch.uint8)


def test_decoded_values_are_those_of_the_table_and_of_transformers():
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    scales = torch.tensor([0, 1, 2, 60, 119, 120, 126, 127, 128, 130, 140, 200, 250, 251, 252, 3], dtype=torch.uint8)
    expected = [
        table[nibble] * math.ldexp(1.0, int(scales[byte // 16]) - 127)
        for byte in range(256)
        for nibble in (byte % 16, byte // 16)
    ]
    values = decode(blocks, scales.view(1, 1, 16))
    assert values.dtype == torch.bfloat16 and values.double().flatten().tolist() == expected
    assert torch.equal(values.mT, convert_moe_packed_tensors(blocks, scales.view(1, 1, 16)))


@pytest.fixture
def packed(tmp_path):
    """Return a folder, and the tensors of its decoded model by the names of transformers. Blocks and scales are in different
    files."""
    torch.manual_seed(0)
    folder = tmp_path / "in"
    transformers.GptOssForCausalLM(transformers.GptOssConfig(**CONFIG)).bfloat16().save_pretrained(folder)
    decoded = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    first, second = files.values()
    for name, tensor in decoded.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            first[f"{name}_blocks"] = draw_bytes(experts, outputs, inputs // 32, 16)
            second[f"{name}_scales"] = draw_bytes(experts, outputs, inputs // 32, low=118, high=124)
            decoded[name] = convert_moe_packed_tensors(first[f"{name}_blocks"], second[f"{name}_scales"])
        else:
            first[name] = tensor
    for file, tensors in files.items():
        save_file(tensors, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder, decoded


def change_config(folder, **settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def test_a_folder_is_read_and_written_in_bf16(packed, tmp_path):
    source, decoded = packed
    folder = HuggingFaceWeights.open(source)
    assert folder.files() == "2 files, model-00001-of-00002.safetensors to model-00002-of-00002.safetensors"
    write_checkpoint(folder, tmp_path / "ours")
    write_huggingface(open_weights(tmp_path / "ours", alone=True), tmp_path / "out", torch.bfloat16)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == decoded.keys() and all(torch.equal(written[name], decoded[name]) for name in decoded)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("type", ["f32", "q4_0"])
def test_a_file_for_llama_cpp_keeps_the_format(type, packed, tmp_path):
    source, decoded = packed
    weights = HuggingFaceWeights.open(source, alone=True)
    GgufExport(weights=weights, type=type, vocabulary=Vocabulary(keys={}, remarks=())).write(tmp_path / "x.gguf")
    keys, tensors = read(tmp_path / "x.gguf")
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    gate_up, down = (decoded[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    for name, expected in {"gate": gate_up[..., ::2], "up": gate_up[..., 1::2], "down": down}.items():
        tensor = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.tensor_type.name == "MXFP4"
        assert torch.equal(torch.from_numpy(values_of(tensor)), expected.mT.float())
    assert tensors["blk.1.attn_q.weight"].tensor_type.name == type.upper()


@pytest.mark.parametrize("is_packed", [True, False])
def test_any_region_of_a_stack_is_read(packed, is_packed, tmp_path):
    source, decoded = packed
    if not is_packed:
        write_checkpoint(HuggingFaceWeights.open(source), tmp_path / "ours")
        write_huggingface(open_weights(tmp_path / "ours", alone=True), tmp_path / "out", torch.bfloat16)
        source = tmp_path / "out"
    folder = HuggingFaceWeights.open(source)
    gate_up, down = (decoded[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
    bias = decoded["model.layers.1.mlp.experts.gate_up_proj_bias"]
    full = {"w1": gate_up[..., ::2].mT, "w3": gate_up[..., 1::2].mT, "w2": down.mT, "b3": bias[:, 1::2]}
    for leaf, expected in full.items():
        name = f"layers.1.feed_forward.experts.{leaf}"
        region = (slice(1, 3), slice(5, 12), slice(7, 30))[: expected.dim()]
        assert torch.equal(folder.region(name, region), expected[region])


def test_logits_equal_those_of_transformers_which_decodes_the_same_folder(packed):
    source, _ = packed
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.bfloat16}
    decoding = transformers.Mxfp4Config(dequantize=True)
    other = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=decoding, **options).float()
    folder = HuggingFaceWeights.open(source)
    model, tokens = folder.spec.model(folder.sizes.for_seq_len(24)), torch.randint(31, (2, 24))
    for name, p in model.named_parameters():
        folder.read(name, tuple(map(slice, [0] * p.dim(), p.shape)), p.detach())
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, Context.of(tokens)), other(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_folder_that_is_not_packed_may_name_the_format_as_in_transformers(packed, tmp_path):
    source, decoded = packed
    folder = tmp_path / "decoded"
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(decoded, folder / "model.safetensors")
    options = {"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    other = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).state_dict()
    w2 = HuggingFaceWeights.open(folder).rows("layers.1.feed_forward.experts.w2", 0, EXPERTS)
    assert torch.equal(w2, other["model.layers.1.mlp.experts.down_proj"].mT)


def test_other_folders_are_refused_in_one_line(packed):
    source, _ = packed
    change_config(source, quantization_config=None)
    with pytest.raises(
        ConfigError, match=r"down_proj_blocks has the format MXFP4, but config\.json has no quantization_config"
    ):
        HuggingFaceWeights.open(source)
    change_config(source, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="contains weights that are quantized with FP8 without weight_block_size"):
        HuggingFaceWeights.open(source)
    change_config(source, quantization_config={"quant_method": "mxfp4"})
    first = source / "model-00001-of-00002.safetensors"
    tensors = load_file(first)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    save_file(tensors | {name: tensors[name][:, :1].clone()}, first)
    with pytest.raises(ConfigError, match=r"have the shapes \[3, 1, 1, 16\] and \[3, 64, 1\], which is not the format"):
        HuggingFaceWeights.open(source)


def test_matrices_are_grouped_by_expert():
    assert by_expert(["w1@0", "w1@10", "w1@2", "w3@0", "w3@10", "w3@2"]) == [
        ["w1@0", "w3@0"],
        ["w1@2", "w3@2"],
        ["w1@10", "w3@10"],
    ]
