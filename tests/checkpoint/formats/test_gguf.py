"""Files for llama.cpp: tensors, keys and types of every family, and models that llama.cpp would compute in another way."""

import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from models import MODELS
from models.gguf import problems
from tests.checkpoint.formats.gguf_models import (
    VOCAB,
    InMemory,
    expected_tensors,
    read,
    sizes_of,
    values_of,
    weights_of,
    write_tokenizer,
)
from tests.models.families import CASES
from trainer.base.config import ConfigError
from trainer.checkpoint.formats.gguf_writer import GgufExport

_COMPUTED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_YARN = {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_seq_len": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def debug(family, **sizes):
    return replace(MODELS[family].by_size["debug"], vocab_size=VOCAB, **sizes)


def exported(folder, path, family, sizes, type="f32", context_window=64):
    """Return weights, keys and tensors of an export."""
    weights = weights_of(folder, MODELS[family], sizes, context_window)
    GgufExport.of(weights, type).write(path)
    return weights, *read(path)


VALID = [
    *[
        (family, sizes_of(family, index))
        for family, index in CASES
        if not [*problems(MODELS[family].gguf, sizes_of(family, index))]
    ],
    ("gemma2", debug("gemma2")),
    ("gemma3", debug("gemma3", tied_embeddings=False)),
    ("olmoe", debug("olmoe", n_kv_heads=8, tied_embeddings=True)),
    ("qwen3-moe", debug("qwen3-moe")),
    ("gpt-oss", debug("gpt-oss")),
]


@pytest.mark.parametrize(("family", "sizes"), VALID)
def test_tensors_are_those_of_hugging_faces_format_in_llama_cpps_order(family, sizes, folder, tmp_path):
    weights, keys, tensors = exported(folder, tmp_path / "model.gguf", family, sizes)
    expected = expected_tensors(weights)
    more = _COMPUTED | ({"output.weight"} if weights.spec.gguf.writes_tied and sizes.tied_embeddings else set())
    assert expected.keys() <= tensors.keys() <= expected.keys() | more
    for name, value in expected.items():
        assert np.array_equal(values_of(tensors[name]), value), name
    if "output.weight" in tensors and sizes.tied_embeddings:
        assert np.array_equal(values_of(tensors["output.weight"]), expected["token_embd.weight"])
    assert keys["general.architecture"] == weights.spec.gguf.architecture
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {"F32"}


def test_all_families_are_covered():
    written = {family for family, spec in MODELS.items() if spec.gguf is not None}
    assert {family for family, _ in VALID} | {"llama2", "llama3.1", "llama3.2"} == written


@pytest.mark.parametrize(
    ("family", "sizes", "found", "supported", "architecture"),
    [
        ("qwen2.5", {"head_dim": 24}, "head_dim 24", "16", "qwen2"),
        ("olmo2", {"head_dim": 24}, "head_dim 24", "16", "olmo2"),
        ("olmo3", {"attention_bias": True}, "attention_bias true", "false", "olmo2"),
        ("phi", {"head_dim": 32, "partial_rotary_factor": 0.25}, "head_dim 32", "16", "phi3"),
        ("smollm3", {"no_rope_layers": (True, False)}, "no_rope_layers [true, false]", "[true, true, true, false]", "smollm3"),
        ("smollm3", {"rope_type": "llama3", "rope_factor": 8.0}, "rope_type llama3", "default, linear, yarn", "smollm3"),
        ("qwen3", {**_YARN, "rope_beta_fast": 16.0}, "rope_beta_fast 16.0", "32.0", "qwen3"),
        ("gemma2", {"layer_types": ("full", "sliding")}, 'layer_types ["full", "sliding"]', '["sliding", "full"]', "gemma2"),
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping null", "a number", "gemma2"),
        ("gemma2", {"tied_embeddings": False}, "tied_embeddings false", "true", "gemma2"),
        ("gemma3", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar 20", "24", "gemma3"),
        ("mixtral", {"normalize_weights": False}, "normalize_weights false", "true", "llama"),
        ("olmoe", {}, "n_kv_heads 4", "8", "olmoe"),
        ("qwen3-moe", {"sparse_layers": (False, True)}, "sparse_layers [false, true]", "[true]", "qwen3moe"),
        ("gpt-oss", {"swiglu_limit": 6.0}, "swiglu_limit 6.0", "7.0", "gpt-oss"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave false", "true", "deepseek2"),
        ("deepseek-v3", {"q_lora_rank": None}, "q_lora_rank null", "a number", "deepseek2"),
        ("deepseek-v3", {"n_layers": 27, "sparse_layers": (True,)}, "q_lora_rank 48", "null", "deepseek2"),
    ],
)  # fmt: skip
def test_a_model_that_llama_cpp_computes_differently_is_refused_by_name(
    family, sizes, found, supported, architecture, folder
):
    weights = weights_of(folder, MODELS[family], debug(family, **sizes))
    with pytest.raises(ConfigError) as error:
        GgufExport.of(weights, "f32")
    reason = f"llama.cpp computes only {supported} for the architecture {architecture}"
    assert error.value.message == f"the model cannot be written for llama.cpp: {found}: {reason}"


@pytest.mark.parametrize(
    ("family", "sizes", "remark"),
    [
        ("mistral", {}, "window 40: llama.cpp computes no windows for the architecture llama, so it is the longest "
            "context of the file"),
        ("gpt-oss", {}, "rope_truncate false: llama.cpp rounds the ends of YaRN's interpolation, so its logits differ"),
        ("phi", {}, "LongRoPE: llama.cpp takes the long factors if its context (-c) is longer than 32, also for short texts"),
        ("deepseek-v3", {"norm_eps": 1e-5}, "norm_eps 1e-05: llama.cpp takes it for the compressed "
            "queries and keys too, instead of 1e-06"),
    ],
)  # fmt: skip
def test_small_differences_are_said(family, sizes, remark, folder):
    weights = weights_of(folder, MODELS[family], debug(family, **sizes))
    assert GgufExport.of(weights, "f32").vocabulary.remarks == (remark,)


def test_the_context_of_a_model_with_windows_ends_with_the_window(folder, tmp_path):
    _, keys, _ = exported(folder, tmp_path / "a.gguf", "mistral", debug("mistral"))
    assert keys["llama.context_length"] == 40 and "llama.attention.sliding_window" not in keys
    _, keys, _ = exported(folder, tmp_path / "b.gguf", "olmo3", debug("olmo3"), context_window=300)
    assert keys["olmo2.context_length"] == 300 and keys["olmo2.attention.sliding_window"] == 40
    assert keys["olmo2.attention.sliding_window_pattern"] == [True, True, True, False]


def architecture_keys(folder, path, family, **sizes):
    weights, keys, _ = exported(folder, path, family, debug(family, **sizes))
    prefix = f"{weights.spec.gguf.architecture}."
    return {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}


def test_keys_of_a_llama(folder, tmp_path):
    assert architecture_keys(folder, tmp_path / "model.gguf", "llama3") == {
        **{"block_count": 8, "context_length": 64, "embedding_length": 128, "feed_forward_length": 352},
        **{"attention.head_count": 8, "attention.head_count_kv": 4, "attention.key_length": 16},
        **{"attention.value_length": 16, "attention.layer_norm_rms_epsilon": pytest.approx(1e-5)},
        **{"vocab_size": VOCAB, "rope.dimension_count": 16, "rope.freq_base": 500_000.0},
    }


def test_keys_that_only_some_families_have(folder, tmp_path):
    granite = architecture_keys(folder, tmp_path / "granite.gguf", "granite3")
    scales = {"attention.scale": 1 / 16, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 4.0}
    assert {key: granite[key] for key in scales} == pytest.approx(scales)
    gemma = architecture_keys(folder, tmp_path / "gemma.gguf", "gemma3")
    assert (gemma["rope.freq_base_swa"], gemma["rope.freq_base"]) == (10_000.0, 1e6)
    gemma = architecture_keys(folder, tmp_path / "gemma.gguf", "gemma2")
    assert (gemma["attn_logit_softcapping"], gemma["final_logit_softcapping"]) == (2.0, 5.0)
    deepseek = architecture_keys(folder, tmp_path / "deepseek.gguf", "deepseek-v3", **_YARN, rope_mscale_all_dim=1.0)
    expected = {
        **{"attention.head_count_kv": 1, "attention.key_length": 48, "attention.value_length": 32},
        **{"attention.key_length_mla": 40, "attention.value_length_mla": 24, "attention.q_lora_rank": 48},
        **{"attention.kv_lora_rank": 32, "leading_dense_block_count": 1, "expert_feed_forward_length": 96},
        **{"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1, "expert_group_count": 4},
        **{"expert_group_used_count": 2, "expert_gating_func": 2, "expert_weights_scale": 2.5},
        **{"expert_weights_norm": True, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
        **{"rope.scaling.original_context_length": 16},
    }
    assert {key: deepseek[key] for key in expected} == expected


def test_an_attention_factor_that_llama_cpp_does_not_compute_itself_is_a_key(folder, tmp_path):
    mistral = {"window": None, **_YARN}
    plain = architecture_keys(folder, tmp_path / "a.gguf", "mistral", **mistral)
    assert "rope.scaling.attn_factor" not in plain
    own = architecture_keys(folder, tmp_path / "b.gguf", "mistral", **mistral, rope_attention_factor=1.3)
    assert own["rope.scaling.attn_factor"] == pytest.approx(1.3 / (0.1 * np.log(4) + 1))


def test_divisors_of_frequencies_are_tensors(folder, tmp_path):
    sizes = debug("llama3", rope_factor=8.0, original_seq_len=16)
    _, _, tensors = exported(folder, tmp_path / "llama.gguf", "llama3", sizes)
    divisors = values_of(tensors["rope_freqs.weight"])
    assert divisors[-1] == pytest.approx(8.0) and divisors[0] < 8.0 and len(divisors) == 8
    _, keys, tensors = exported(folder, tmp_path / "phi.gguf", "phi", debug("phi"))
    assert values_of(tensors["rope_factors_long.weight"]).tolist() == pytest.approx([1.0, 1.2, 1.7, 3.0])
    assert values_of(tensors["rope_factors_short.weight"]).tolist() == [1.0] * 4
    assert keys["phi3.rope.scaling.attn_factor"] == pytest.approx(np.sqrt(1 + np.log(4) / np.log(32)))
    assert keys["phi3.rope.dimension_count"] == 8


@pytest.mark.parametrize(("type", "error"), [("f16", 1e-3), ("bf16", 5e-3), ("q8_0", 1e-2), ("q4_0", 0.15)])
def test_matrices_have_the_type_and_norms_and_routers_stay_in_fp32(type, error, folder, tmp_path):
    weights, keys, tensors = exported(folder, tmp_path / "model.gguf", "qwen3-moe", debug("qwen3-moe"), type)
    types = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert types["blk.0.ffn_gate_exps.weight"] == types["token_embd.weight"] == type.upper()
    assert types["output.weight"] == ("Q8_0" if type == "q4_0" else type.upper())
    assert (
        types["blk.0.attn_norm.weight"]
        == types["blk.0.attn_q_norm.weight"]
        == types["blk.0.ffn_gate_inp.weight"]
        == "F32"
    )
    assert keys["general.file_type"] == gguf.LlamaFileType[f"MOSTLY_{type.upper()}"]
    for name, value in expected_tensors(weights).items():
        assert np.abs(values_of(tensors[name]) - value).max() <= error * np.abs(value).max(), name


def test_tied_embeddings_keep_the_precision_of_an_output_matrix(folder, tmp_path):
    sizes = debug("qwen3", tied_embeddings=True)
    _, _, tensors = exported(folder, tmp_path / "model.gguf", "qwen3", sizes, "q4_0")
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0" and "output.weight" not in tensors


def test_a_matrix_whose_rows_are_no_blocks_stays_in_f16(folder, tmp_path):
    _, _, tensors = exported(folder, tmp_path / "model.gguf", "llama3", sizes_of("llama3", 0), "q8_0")
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == "F16"  # 40 columns


def test_blocks_of_an_export_in_parts_are_those_of_a_complete_tensor(folder, tmp_path, monkeypatch):
    exported(folder, tmp_path / "whole.gguf", "deepseek-v3", debug("deepseek-v3"), "q8_0")
    monkeypatch.setattr("trainer.checkpoint.formats.gguf_writer._CHUNK", 64)
    monkeypatch.setattr("trainer.checkpoint.formats.streaming._CHUNK_BYTES", 4096)
    exported(folder, tmp_path / "parts.gguf", "deepseek-v3", debug("deepseek-v3"), "q8_0")
    whole, parts = (read(tmp_path / f"{name}.gguf")[1] for name in ("whole", "parts"))
    assert all(np.array_equal(tensor.data, parts[name].data) for name, tensor in whole.items())


def test_a_failed_export_leaves_no_file(folder, tmp_path):
    class Damaged(InMemory):
        def read(self, name, region, out):
            if name == "layers.3.feed_forward.w2.weight":
                raise OSError("no space")
            super().read(name, region, out)

    weights = weights_of(folder, MODELS["qwen3"], debug("qwen3"))
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="no space"):
        GgufExport.of(Damaged(**vars(weights)), "f16").write(tmp_path / "out" / "model.gguf")
    assert not [*(tmp_path / "out").iterdir()]


def test_a_missing_package_is_one_line(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs the package gguf: .* -m pip install gguf"):
        GgufExport.of(weights_of(folder, MODELS["qwen3"], debug("qwen3")), "f16")


@pytest.mark.parametrize("family", ["deepseek-v3", "gpt-oss", "olmo2"])
def test_progress_is_the_number_of_bytes_in_fp32(family, folder, tmp_path):
    received, sizes = [], debug(family, **({} if family == "deepseek-v3" else {"tied_embeddings": True}))
    export = GgufExport.of(weights_of(folder, MODELS[family], sizes), "q8_0")
    export.write(tmp_path / "model.gguf", progress=received.append)
    assert sum(received) == export.num_bytes()


@pytest.mark.parametrize("family", ["llama3", "mistral", "gemma3", "gpt-oss"])
def test_llama_cpp_computes_the_same_logits(family, folder, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    sizes = debug(family, **{"gpt-oss": {"rope_truncate": True}, "mistral": {"window": None}}.get(family, {}))
    weights, _, _ = exported(folder, tmp_path / "model.gguf", family, sizes)
    model = weights.spec.model(sizes)
    model.load_state_dict(weights.values, strict=False)
    tokens = torch.randint(2000, (1, 24), generator=torch.Generator().manual_seed(0))
    options = {"n_ctx": 64, "logits_all": True, "verbose": False, "flash_attn": False, "type_k": 0, "type_v": 0}
    reader = llama_cpp.Llama(str(tmp_path / "model.gguf"), **options)
    reader.eval(tokens[0].tolist())
    with torch.no_grad():
        expected = model(tokens)[0].numpy()
    limit = 3e-2 if family == "gemma3" else 1e-4  # llama.cpp's GELU has the precision of fp16
    assert np.abs(np.array(reader.scores[:24]) - expected).max() < limit
