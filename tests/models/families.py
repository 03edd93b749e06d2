"""Tiny random models of every family, and the same models in transformers."""

import copy
import json
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from models import MODELS
from models.context import Context
from models.decoder import Decoder
from models.huggingface_config import read_sizes
from models.huggingface_tensors import by_matrix, join_tensors, own_names, split_tensors
from models.spec import ModelSpec, saved_weights
from trainer.tools.testing.random_parameters import randomize
from trainer.tools.testing.transformers_model import stored_tensors

SEQ = 33

_COMMON = {
    **{"hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 56, "vocab_size": 71, "max_position_embeddings": 64},
    **{"pad_token_id": None, "bos_token_id": 1, "eos_token_id": [2, 3]},
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_GPT_OSS = _YARN | {"beta_fast": 32.0, "beta_slow": 1.0}  # as published
_LONG = _ROPE | {
    **{"rope_type": "longrope", "partial_rotary_factor": 0.6},
    **{"short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0]},
}
_LLAMA3 = _ROPE | {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 16},  # 8 * 16 exceeds the context window, as in Llama 3.2
}
_MINISTRAL = _YARN | {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 0.7}
_DEEPSEEK = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 0},
}
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 10},
}
_KIMI = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10},
    **{"moe_intermediate_size": 24, "linear_num_heads": 3, "linear_head_dim": 12},
}
_PROPORTIONAL = _ROPE | {"rope_type": "proportional", "partial_rotary_factor": 0.5}
_GEMMA4 = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_TIED, _MHA = {"tie_word_embeddings": True}, {"num_key_value_heads": 4}
_TYPES = ["full_attention", "sliding_attention"]

CONFIGS: dict[str, list[dict]] = {
    "llama3": [{}, _TIED | _MHA, {"rope_parameters": _LLAMA3}],
    "qwen2.5": [
        {},
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3} | _TIED,
        {"rope_parameters": _YARN},
    ],
    "qwen3": [
        {"head_dim": 16},
        {"head_dim": 12, "attention_bias": True} | _TIED,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2, "num_key_value_heads": 1},
        {"head_dim": 16, "rope_parameters": _ROPE | {"rope_type": "linear", "factor": 3.0}},
    ],
    "mistral": [{"head_dim": 14, "sliding_window": 7}, {"sliding_window": None} | _MHA, {"sliding_window": 64} | _TIED],
    "ministral3": [
        {"head_dim": 16, "rope_parameters": _MINISTRAL},
        {"head_dim": 10, "rope_parameters": _MINISTRAL | {"truncate": False, "attention_factor": 1.3, "beta_fast": 8.0}} | _TIED,
        {"rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 16}},
    ],
    "smollm3": [
        _TIED,
        {
            **{"tie_word_embeddings": False, "attention_bias": True, "no_rope_layers": [0, 1, 1, 0]},
            **{"use_sliding_window": True, "sliding_window": 6, "layer_types": _TYPES * 2},
        },
    ],
    "olmo2": [{}, {"attention_bias": True} | _MHA | _TIED, {"rope_parameters": _YARN}],
    "olmo3": [
        {"sliding_window": 5},
        {"sliding_window": 7, "rope_parameters": {"full_attention": _YARN, "sliding_attention": _ROPE}} | _TIED,
    ],
    "granite3": [
        _TIED | {"embedding_multiplier": 3.0, "logits_scaling": 2.5, "residual_multiplier": 0.3, "attention_multiplier": 0.11},
        {"attention_bias": True},
    ],
    "gemma2": [
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 3.0},
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "attn_logit_softcapping": None}
        | {"final_logit_softcapping": None, "tie_word_embeddings": False},
    ],
    "gemma3": [
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "layer_types": [*_TYPES, _TYPES[1], _TYPES[1]]},
        {
            **{"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "layer_types": _TYPES * 2},
            "rope_parameters": {
                "full_attention": _ROPE | {"rope_type": "linear", "factor": 8.0},
                "sliding_attention": _ROPE | {"rope_theta": 5000.0},
            },
        },
    ],
    "mixtral": [
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 7, "head_dim": 12} | _MHA | _TIED,
    ],
    "olmoe": [
        {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
        {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True} | _TIED,
    ],
    "qwen3-moe": [
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 80, "norm_topk_prob": True},
            **{"decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 12, "attention_bias": True} | _TIED,
        },
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "head_dim": 12},
            **{"mlp_only_layers": [0], "use_sliding_window": True, "sliding_window": 5},
        },
    ],
    "deepseek-v3": [
        _DEEPSEEK
        | {"q_lora_rank": 12, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1},
        _DEEPSEEK
        | {"q_lora_rank": None, "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 40, "first_k_dense_replace": 0, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"routed_scaling_factor": 1.0, "rope_interleave": False, "attention_bias": True} | _TIED,
        _DEEPSEEK
        | {"q_lora_rank": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 1, "v_head_dim": 18}
        | {"moe_intermediate_size": 20, "first_k_dense_replace": 2, "attention_bias": True}
        | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 8.0}},
        _DEEPSEEK
        | {"q_lora_rank": None, "n_routed_experts": 4, "n_group": 2, "topk_group": 2, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 3, "rope_parameters": _YARN},
    ],
    "gpt-oss": [
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "sliding_window": 7},
            **{"rope_parameters": _GPT_OSS | {"truncate": False}},
        },
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 10, "intermediate_size": 40},
            **{"layer_types": _TYPES[:1] * 4, "sliding_window": 4096, "rope_parameters": _ROPE, "attention_bias": False},
            **{"swiglu_limit": 0.6, "swiglu_alpha": 1.1} | _TIED | _MHA,
        },
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 8, "intermediate_size": 80, "sliding_window": 5},
            **{"layer_types": [*_TYPES, *_TYPES[::-1]], "rope_parameters": _GPT_OSS},
        },
    ],
    "phi": [
        {"sliding_window": 9},
        {"num_attention_heads": 2, "rope_parameters": _LONG, "original_max_position_embeddings": 16} | _TIED,
        {"num_attention_heads": 2, "rope_parameters": _LONG | {"factor": 4.01}, "original_max_position_embeddings": 16},
        {"num_attention_heads": 2, "rope_parameters": _LONG | {"attention_factor": 1.5}, "original_max_position_embeddings": 48},
    ],
    "qwen3-next": [
        _DELTA | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 20},
        _DELTA | {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"shared_expert_intermediate_size": 56, "norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True}
        | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "full_attention_interval": 2} | _TIED,
    ],
    "gemma4": [
        _GEMMA4 | {"head_dim": 12, "global_head_dim": 20, "sliding_window": 6, "final_logit_softcapping": 3.0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 4, "num_key_value_heads": 2},
        _GEMMA4 | {"head_dim": 16, "global_head_dim": 16, "sliding_window": 5, "attention_bias": True}
        | {"tie_word_embeddings": False}
        | {"layer_types": [_TYPES[1], _TYPES[0], _TYPES[1], _TYPES[0]]}
        | {"rope_parameters": {"full_attention": _PROPORTIONAL, "sliding_attention": _ROPE | {"rope_theta": 5000.0}}},
    ],
    "glm-4.5": [
        {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "use_qk_norm": True}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0},
        {"head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "attention_bias": True}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False, "n_shared_experts": 2, "partial_rotary_factor": 1.0}
        | {"num_nextn_predict_layers": 0} | _TIED,
    ],
    "olmo-hybrid": [
        # transformers writes the convolutions of queries, keys and values in equal parts.
        {"linear_key_head_dim": 6, "linear_value_head_dim": 6},
        _DELTA | {"linear_key_head_dim": 20, "attention_bias": True, "rope_parameters": _ROPE | {"rope_theta": None}}
        | {"linear_allow_neg_eigval": False}
        | {"layer_types": ["full_attention", "linear_attention"] * 2, "linear_conv_kernel_dim": 3} | _TIED,
    ],
    "kimi-linear": [
        _KIMI | {"num_experts": 8, "num_expert_group": 4, "topk_group": 2, "num_experts_per_token": 3}
        | {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "head_dim": 10, "num_heads": 2}},
        _KIMI | {"num_experts": 6, "num_experts_per_token": 2, "moe_renormalize": False, "num_shared_experts": 2}
        | {"layer_types": ["full_attention", "linear_attention"] * 2, "mlp_layer_types": ["sparse"] * 4}
        | {"linear_conv_kernel_dim": 2, "q_lora_rank": 12},
    ],
    "qwen3.5": [
        _DELTA | {"head_dim": 16} | _TIED,
        _DELTA | {"head_dim": 24, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "attention_bias": True}
        | {"layer_types": ["full_attention", "linear_attention"] * 2, "partial_rotary_factor": 0.5},
    ],
}  # fmt: skip
"""Model family -> configurations. Each of the family's traits is on in one configuration and off in another."""

CASES = [(family, i) for family, configs in CONFIGS.items() for i in range(len(configs))]


def reference_of(family: str, config: dict) -> transformers.PreTrainedModel:
    """Return the model of transformers with random parameters, norms and biases included. config: content of config.json."""
    cls = getattr(transformers, MODELS[family].huggingface.architecture)
    config = cls.config_class(**copy.deepcopy(config))  # transformers changes its arguments
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = cls(config).eval()
    randomize(model)
    return model


@cache
def hf_model_of(family: str, index: int) -> transformers.PreTrainedModel:
    """Return the model of transformers of one of CONFIGS. See reference_of."""
    return reference_of(family, _COMMON | CONFIGS[family][index])


def config_of(family: str, index: int) -> dict:
    """Return the content of config.json."""
    return json.loads(hf_model_of(family, index).config.to_json_string(use_diff=False))


def split_rows(
    spec: ModelSpec, model: Decoder, tensors: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the rows of each of our parameters or buffers. tensors: by the names in transformers' files."""
    return split_tensors(spec.huggingface, tensors, ours, model.sizes.head_dim)


def with_parameters_of(reference: transformers.PreTrainedModel, spec: ModelSpec, sizes: Any) -> Decoder:
    """Return our model of these sizes with the parameters of transformers' model."""
    model = spec.model(sizes.for_seq_len(SEQ))
    tensors = stored_tensors(reference, reference.state_dict())
    model.load_state_dict(split_rows(spec, model, tensors, saved_weights(model)), strict=False)
    return model


def model_of(family: str, index: int) -> Decoder:
    """Return our model with the same parameters as hf_model_of."""
    spec = MODELS[family]
    sizes = read_sizes(spec.huggingface, config_of(family, index)).without_prediction()
    return with_parameters_of(hf_model_of(family, index), spec, sizes)


def inputs(seq: int = SEQ) -> tuple[torch.Tensor, Context]:
    """Return tokens and their context."""
    tokens = torch.randint(71, (2, seq), generator=torch.Generator().manual_seed(1))
    return tokens, Context.of(tokens)


def distance(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference relative to the norm of `b`, or to `floor` if that is larger."""
    return ((a - b).norm() / max(b.norm().item(), floor)).item()


def assert_equal(
    spec: ModelSpec, model: Decoder, reference: transformers.PreTrainedModel, gradient_limit: float = 1e-5
) -> None:
    """Assert that logits and every gradient equal those of transformers."""
    tokens, context = inputs()
    reference.zero_grad()
    expected, actual = reference(tokens).logits, model(tokens, context)
    for logits in (expected, actual):
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert distance(actual, expected) < max(1e-5, gradient_limit / 10)
    gradients = stored_tensors(reference, {name: p.grad for name, p in reference.named_parameters()})
    # A bias of keys without positional encoding has no gradient, so errors are compared with all gradients too.
    floor = 1e-2 * torch.stack([g.norm() for g in gradients.values()]).norm().item()
    expected = split_rows(spec, model, gradients, dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, expected[name], floor) < gradient_limit, name
    hf = spec.huggingface
    names = own_names(hf, dict.fromkeys(gradients, ""), by_matrix(hf, expected))
    assert join_tensors(hf, expected, model.sizes.head_dim).keys() == names.keys()
