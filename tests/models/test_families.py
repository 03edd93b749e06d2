"""Every family against transformers' implementation of it."""

import copy
import json
from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest
import torch

from models import MODELS
from models.decoder import Decoder
from models.huggingface_config import read_seq_len, read_sizes, write_config
from models.spec import meta_model
from tests.models import random_configs
from tests.models.families import (
    CASES,
    CONFIGS,
    SEQ,
    assert_equal,
    config_of,
    distance,
    hf_model_of,
    inputs,
    model_of,
)
from trainer.inference.kv_cache import KvCache

PUBLISHED = {
    # numbers of parameters in the safetensors metadata of the published checkpoints; of Gemma 3 from 4B on, of the text model
    "qwen2.5": {
        **{"0.5b": 494_032_768, "1.5b": 1_543_714_304, "3b": 3_085_938_688, "7b": 7_615_616_512},
        **{"14b": 14_770_033_664, "32b": 32_763_876_352, "72b": 72_706_203_648},
    },
    "qwen3": {
        **{"0.6b": 596_049_920, "1.7b": 1_720_574_976, "4b": 4_022_468_096, "8b": 8_190_735_360},
        **{"14b": 14_768_307_200, "32b": 32_762_123_264},
    },
    "mistral": {
        **{"7b-v0.1": 7_241_732_096, "7b-v0.2": 7_241_732_096, "7b-v0.3": 7_248_023_552},
        **{"nemo-12b": 12_247_782_400, "small-22b": 22_247_282_688, "small-24b": 23_572_403_200},
    },
    "ministral3": {"3b": 3_429_006_336, "8b": 8_489_553_920, "14b": 13_506_073_600},
    "smollm3": {"3b": 3_075_098_624},
    "olmo2": {"1b": 1_484_916_736, "7b": 7_298_617_344, "13b": 13_716_198_400, "32b": 32_234_279_936},
    "olmo3": {"7b": 7_298_011_136, "32b": 32_233_522_176},
    "granite3": {"3.0-2b": 2_533_531_648, "3.0-8b": 8_170_848_256, "3.1-2b": 2_533_531_648, "3.1-8b": 8_170_848_256},
    "gemma2": {"2b": 2_614_341_888, "9b": 9_241_705_984, "27b": 27_227_128_320},
    "gemma3": {
        **{"270m": 268_098_176, "1b": 999_885_952, "4b": 3_880_263_168, "12b": 11_766_034_176},
        "27b": 27_009_346_304,
    },
    "mixtral": {"8x7b": 46_702_792_704, "8x22b": 140_630_071_296},
    "olmoe": {"7b-a1b": 6_919_161_856},
    # without the correction of the routers, which is a buffer: 1,664 and 14,848 values
    "deepseek-v3": {"16b-a3b": 15_960_108_544, "671b": 671_026_404_352, "kimi-k2-1t": 1_026_408_209_408},
    "qwen3-moe": {"30b-a3b": 30_532_122_624, "235b-a22b": 235_093_634_560},
    "gpt-oss": {"20b": 20_914_757_184, "120b": 116_829_156_672},
    "qwen3-next": {"80b-a3b": 79_674_391_296},
    "qwen3.5": {
        **{"0.8b": 752_393_024, "2b": 1_881_825_088, "4b": 4_205_751_296, "9b": 8_953_803_264},
        "27b": 26_895_998_464,
    },
    "gemma4": {"31b": 30_697_345_280},
    "glm-4.5": {"106b-a12b": 106_852_245_504, "355b-a32b": 352_797_814_784},
    "olmo-hybrid": {"7b": 7_430_870_688},
    "kimi-linear": {"48b-a3b": 49_122_675_072},
    "phi": {"3-mini-4k": 3_821_079_552, "3-medium-4k": 13_960_238_080, "4-14b": 14_659_507_200},
}


@pytest.mark.parametrize(("family", "size"), [(family, size) for family, sizes in PUBLISHED.items() for size in sizes])
def test_sizes_have_the_published_number_of_parameters(family, size):
    spec = MODELS[family]
    model = meta_model(spec.model, spec.by_size[size].without_prediction())
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[family][size]


def test_every_size_of_every_family_has_a_published_number():
    others = {family: spec.by_size for family, spec in MODELS.items() if not family.startswith("llama")}
    assert {family: sizes.keys() - {"debug"} for family, sizes in others.items()} == {
        family: sizes.keys() for family, sizes in PUBLISHED.items()
    }
    assert others.keys() | {"llama3"} == CONFIGS.keys()


_GEMMA = {
    **{"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4},
    **{"num_key_value_heads": 1, "sliding_window": 512, "vocab_size": 262144},
}
_PHI = {
    **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 32, "vocab_size": 32064, "sliding_window": 2047},
    **{"original_max_position_embeddings": 4096, "max_position_embeddings": 131072},
}
_FACTORS = {"short_factor": [1.0 + i / 48 for i in range(48)], "long_factor": [1.0 + i for i in range(48)]}
OLD = {
    "gemma3 with a pattern": (
        "gemma3",
        _GEMMA | {"sliding_window_pattern": 3, "rope_local_base_freq": 5000, "rope_theta": 2e6},
        {"layer_types": ("sliding", "sliding", "full"), "rope_local_base_freq": 5000.0, "rope_theta": 2e6},
        "270m",
    ),
    "gemma3 with defaults": (
        "gemma3",
        {
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        {},
        "4b",
    ),
    "gemma3 with both types of layers": (
        "gemma3",
        _GEMMA | {"rope_scaling": {"full_attention": {}, "sliding_attention": {"rope_theta": 5000.0}}},
        {"rope_local_base_freq": 5000.0},
        "270m",
    ),
    "gemma2 with defaults": ("gemma2", {"sliding_window_pattern": 3}, {}, "2b"),  # the pattern has no effect
    "smollm3 with an interval": (
        "smollm3",
        {
            **{"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
            **{"vocab_size": 128256, "rope_theta": 5e6, "no_rope_layer_interval": 3},
        },
        {"no_rope_layers": (True, True, False)},
        "3b",
    ),
    **{
        f"phi with {name}": (
            "phi",
            _PHI | {"rope_scaling": {"type": name, **_FACTORS}},
            {
                **{"rope_type": "longrope", "rope_factor": 32.0, "rope_short_factors": tuple(_FACTORS["short_factor"])},
                "rope_long_factors": tuple(_FACTORS["long_factor"]),
            },
            "3-mini-4k",
        )
        for name in ("su", "yarn")
    },
    "gpt-oss with defaults": ("gpt-oss", {"num_hidden_layers": 24, "num_local_experts": 32}, {}, "20b"),
    "gpt-oss as published": (
        "gpt-oss",
        {
            **{"num_hidden_layers": 36, "initial_context_length": 4096, "experts_per_token": 4, "swiglu_limit": 7.0},
            "rope_scaling": {
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
                **{"rope_type": "yarn", "truncate": False},
            },
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
        {},
        "120b",
    ),
    "mixtral with the other name of the number of experts and ignored fields": (
        "mixtral",
        {
            **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
            **{"vocab_size": 32000, "num_experts": 6, "num_local_experts": None, "norm_topk_prob": False},
        },
        {"n_experts": 6},
        "8x7b",
    ),
    "qwen3-moe without a head_dim": (
        "qwen3-moe",
        {
            **{"num_hidden_layers": 48, "num_attention_heads": 32, "vocab_size": 151936, "num_local_experts": 64},
            "norm_topk_prob": True,
        },
        {"head_dim": 64, "n_experts": 64},
        "30b-a3b",
    ),
    "olmoe with both names of the positional encoding": (
        "olmoe",
        {
            **{"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16},
            **{"vocab_size": 50304, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            "rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1e4},
        },
        {"rope_type": "linear", "rope_factor": 2.0, "rope_theta": 5e5},
        "7b-a1b",
    ),
    "gpt-oss with an empty rope_scaling": (
        "gpt-oss",
        {"num_hidden_layers": 24, "num_local_experts": 32, "rope_scaling": {}},
        {},
        "20b",
    ),
    "phi without the length of the original training": (
        "phi",
        {key: value for key, value in _PHI.items() if key != "original_max_position_embeddings"}
        | {"rope_scaling": {"type": "longrope", **_FACTORS}},
        {
            **{"rope_type": "longrope", "rope_factor": 32.0, "rope_short_factors": tuple(_FACTORS["short_factor"])},
            "rope_long_factors": tuple(_FACTORS["long_factor"]),
        },
        "3-mini-4k",
    ),
    "qwen2.5 without grouped heads": (
        "qwen2.5",
        {
            **{"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
            **{"vocab_size": 151936, "rope_theta": 1e6, "tie_word_embeddings": True, "num_key_value_heads": None},
        },
        {"n_kv_heads": 12},
        "1.5b",
    ),
}
"""Family, content of an old config.json, and the differences between its sizes and a published size."""


@pytest.mark.parametrize("name", OLD)
def test_old_files_are_read(name):
    family, config, differences, size = OLD[name]
    assert read_sizes(MODELS[family].huggingface, config) == replace(MODELS[family].by_size[size], **differences)


def _limit(model: Decoder) -> float:
    """Rounding errors of a recurrence grow over the sequence: transformers' implementation is as far from fp64."""
    return 1e-4 if any(kind.IS_RECURRENT for kind in model.kinds.values()) else 1e-5


@pytest.mark.parametrize(("family", "index"), CASES)
def test_logits_and_every_gradient_equal_those_of_transformers(family, index):
    model = model_of(family, index)
    assert_equal(MODELS[family], model, hf_model_of(family, index), _limit(model))


@pytest.mark.parametrize("family", random_configs.FAMILIES)
def test_random_configurations_are_equal_to_transformers_or_refused_by_name(family):
    """scripts/dev/check_configs.py draws more of them."""
    outcomes = [random_configs.outcome(family, *model) for model in islice(random_configs.configurations(family), 8)]
    assert outcomes.count("") >= 4


def test_random_configurations_end_if_transformers_computes_none(monkeypatch):
    monkeypatch.setattr(random_configs, "reference_of", lambda family, config: 1 / 0)
    with pytest.raises(RuntimeError, match="transformers computes none of 50 configurations of olmoe in a row"):
        next(random_configs.configurations("olmoe"))


def test_random_configurations_with_a_tie_of_a_routers_scores_are_left_out(monkeypatch):
    left_out = Counter()
    monkeypatch.setattr(random_configs, "_MARGIN", 0.01)
    next(random_configs.configurations("olmoe", left_out))
    assert left_out["with a tie of a router's scores"] > 0


@pytest.mark.parametrize(("family", "index"), CASES)
def test_in_bf16_logits_are_as_exact_as_those_of_transformers(family, index):
    reference, model, (tokens, *rest) = hf_model_of(family, index), model_of(family, index).bfloat16(), inputs()
    with torch.no_grad():
        exact = reference(tokens).logits
        rounded = copy.deepcopy(reference).bfloat16()(tokens).logits
        assert distance(model(tokens, *rest).float(), exact) < 2 * distance(rounded.float(), exact)


@pytest.mark.parametrize(("family", "index"), CASES)
def test_greedy_tokens_equal_those_of_transformers(family, index):
    model, prompt = model_of(family, index), inputs()[0][:1, :9]
    if getattr(model.sizes, "rope_is_long", False):
        pytest.skip("transformers changes the factors of LongRoPE during the generation")
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    expected = hf_model_of(family, index).generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    cache = KvCache(model, model.structure(), model.sizes, torch.float32)
    for stop in range(9, 21):
        (logits,) = cache.next_logits({0: expected[0, :stop].tolist()})
        best, second = logits.topk(2).values.tolist()
        assert best - second > 1e-4  # otherwise rounding errors decide
        assert logits.argmax() == expected[0, stop]


@pytest.mark.parametrize(("family", "index"), CASES)
def test_a_kv_cache_changes_no_logits(family, index):
    """Prompts of one and of several tokens, with steps back: a chat continues from an earlier token."""
    model, tokens = model_of(family, index), inputs()[0]
    other = torch.cat((tokens[:, :23], 70 - tokens[:, 23:]), 1)
    with torch.no_grad():
        expected = {text: model(text)[0] for text in (tokens, other)}
    cache = KvCache(model, model.structure(), model.sizes, torch.float32)
    for text, stop in ((tokens, 1), (tokens, 2), (tokens, 9), (tokens, 10), (tokens, 25), (other, 27), (tokens, SEQ)):
        (logits,) = cache.next_logits({0: text[0, :stop].tolist()})
        assert distance(logits, expected[text][stop - 1]) < _limit(model)


@pytest.mark.parametrize(("family", "index"), CASES)
def test_a_configuration_round_trips(family, index):
    hf, config = MODELS[family].huggingface, config_of(family, index)
    sizes = read_sizes(hf, config)
    written = write_config(hf, sizes, read_seq_len(hf, config))
    assert read_sizes(hf, json.loads(json.dumps(written))) == sizes
    rope = config.get("rope_parameters") or {}
    rope |= {"type": "longrope"} if rope.get("rope_type") == "longrope" else {}  # its name in transformers 4
    again = json.loads(type(hf_model_of(family, index).config)(**written).to_json_string(use_diff=False))
    # Fields that the files omit, or that the classes derive from other fields, need not be equal.
    derived = {
        "llama_4_scaling_beta",
        "head_dim",
        "partial_rotary_factor",
        "dtype",
        "architectures",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "decoder_sparse_step",  # written as mlp_only_layers
        "mlp_only_layers",
        "num_nextn_predict_layers",  # transformers does not know the field in all families
        "mtp_num_hidden_layers",
    }
    differences = {k for k in config.keys() | again.keys() if config.get(k) != again.get(k)} - derived
    if not config.get("use_sliding_window"):
        differences -= {"max_window_layers"}  # it has no effect
    differences -= {"full_attention_interval"}  # transformers reads layer_types
    if family == "kimi-linear":  # fields of the published code
        differences -= {"linear_attn_config", "first_k_dense_replace", "mla_use_nope", "use_grouped_topk"}
        differences -= {"moe_layer_freq", "moe_router_activation_func", "rope_theta", "rope_scaling"}
    assert not differences


DERIVED_HEAD_DIM = ("llama3", "qwen2.5", "smollm3", "olmo2", "olmo3", "granite3", "phi")
"""Families whose published sizes have heads of dim / n_heads, so that some readers of their files do not read the field."""
PERIODS = {"gemma2": 2, "gemma3": 6, "olmo3": 4}
"""Distance between layers without a window, which transformers 4.51 and llama.cpp assume or read from another field."""


@pytest.mark.parametrize("family", DERIVED_HEAD_DIM)
def test_a_debug_size_has_the_head_dim_that_readers_derive(family):
    sizes = MODELS[family].by_size["debug"]
    assert sizes.head_dim == sizes.dim // sizes.n_heads


@pytest.mark.parametrize("family", PERIODS)
def test_a_debug_size_has_the_windows_that_readers_assume(family):
    config = write_config(MODELS[family].huggingface, MODELS[family].by_size["debug"], 2048)
    kinds, period = config["layer_types"], PERIODS[family]
    assert len(kinds) >= period
    assert [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"] == [
        *range(period, len(kinds) + 1, period)
    ]


def test_a_debug_size_of_ministral3_has_the_factor_of_yarn_that_llama_cpp_reads():
    config = write_config(MODELS["ministral3"].huggingface, MODELS["ministral3"].by_size["debug"], 2048)
    assert config["rope_parameters"]["mscale_all_dim"] == 1.0
