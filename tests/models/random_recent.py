"""Random configurations of the families of 2026, hybrid and dense, for random_configs.py."""

from collections.abc import Callable
from random import Random
from typing import Any

Draw = dict[str, Any]


class _Fields:
    """Draws fields of a config.json with a given probability."""

    def __init__(self, random: Random):
        self.random = random

    def rarely(self, key: str, *values: Any) -> Draw:
        return self._maybe(0.02, key, values)

    def sometimes(self, key: str, *values: Any) -> Draw:
        return self._maybe(0.6, key, values)

    def _maybe(self, probability: float, key: str, values: tuple[Any, ...]) -> Draw:
        return {key: self.random.choice(values)} if self.random.random() < probability else {}


def _rope(fields: _Fields, key: str = "partial_rotary_factor") -> Draw:
    """Return the fields of a positional encoding that rotates a part of each head, in one of their spellings."""
    random = fields.random
    theta, fraction = random.choice([100.0, 10_000, 1e6]), fields.sometimes(key, 0.25, 0.5, 1.0)
    rope = {"rope_type": "default", "rope_theta": theta}
    spelling = random.choice(["none", "flat", "parameters", "scaling"])
    if spelling == "none":
        return fraction
    if spelling == "flat":
        return fraction | {"rope_theta": theta}
    if spelling == "scaling":
        return fraction | {"rope_theta": theta, "rope_scaling": fields.rarely("rope_type", "yarn", "linear") or None}
    return {"rope_parameters": rope | fraction} | fields.rarely("rope_scaling", {"rope_type": "linear", "factor": 3.0})


def _recurrence(fields: _Fields) -> Draw:
    """Return the fields of a recurrence in Qwen's and OLMo's files."""
    random = fields.random
    keys = random.choice([1, 2, 3])
    return {
        **{"linear_num_key_heads": keys, "linear_num_value_heads": keys * random.choice([1, 2, 3])},
        **{"linear_key_head_dim": random.randint(4, 16), "linear_value_head_dim": random.randint(4, 16)},
        **fields.sometimes("linear_conv_kernel_dim", 2, 3, 4, 7),
        **fields.rarely("linear_conv_kernel_dim", 1) | fields.rarely("linear_num_value_heads", 5),
    }


def _layer_types(fields: _Fields, layers: int, other: str = "linear_attention") -> Draw:
    types = [fields.random.choice(["full_attention", other]) for _ in range(layers)]
    unknown = fields.rarely("layer_types", [*types[1:], "chunked_attention"], types[1:])
    return fields.sometimes("layer_types", types) | unknown


def _qwen35(fields: _Fields, layers: int, heads: int) -> Draw:
    return {
        **_recurrence(fields) | _layer_types(fields, layers) | _rope(fields),
        **fields.sometimes("full_attention_interval", 1, 2, 3, 4) | fields.rarely("mtp_num_hidden_layers", 1),
    }


def _qwen_next(fields: _Fields, layers: int, heads: int) -> Draw:
    random = fields.random
    experts = random.randint(2, 9)
    return {
        **_qwen35(fields, layers, heads) | {"num_experts": experts, "num_experts_per_tok": random.randint(1, experts)},
        **{"moe_intermediate_size": random.randint(3, 50), "shared_expert_intermediate_size": random.randint(3, 50)},
        **fields.sometimes("norm_topk_prob", True, False) | fields.sometimes("decoder_sparse_step", 1, 1, 2, 3),
        **fields.sometimes("mlp_only_layers", None, [], [0], [1, 3], [7]) | fields.rarely("num_experts", 0, 3),
    }


def _olmo_hybrid(fields: _Fields, layers: int, heads: int) -> Draw:
    random = fields.random
    derived = _recurrence(fields) if random.random() < 0.7 else {}
    theta = random.choice([100.0, 10_000, None])
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}} if random.random() < 0.6 else {}
    return {
        **derived | rope | fields.sometimes("linear_allow_neg_eigval", True, False),
        **_layer_types(fields, layers) | fields.rarely("rope_theta", None, 1e5) | fields.rarely("head_dim", 8),
        **fields.rarely("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}),
    }


def _kimi(fields: _Fields, layers: int, heads: int) -> Draw:
    random = fields.random
    groups = random.choice([1, 1, 2, 3])
    per_group, chosen = random.randint(2, 4), random.randint(1, groups)
    full = sorted(random.sample(range(1, layers + 1), random.randint(1, layers)))
    lists = {"full_attn_layers": full, "kda_layers": [i for i in range(1, layers + 1) if i not in full]}
    linear = {"head_dim": random.randint(4, 16), "num_heads": random.choice([1, 2, 3])}
    spelled = {"linear_head_dim": linear["head_dim"], "linear_num_heads": linear["num_heads"]}
    types = {"layer_types": ["full_attention" if i in full else "linear_attention" for i in range(1, layers + 1)]}
    return {
        **({"linear_attn_config": linear | lists} if random.random() < 0.5 else spelled | types),
        **{"num_key_value_heads": heads, "num_experts": groups * per_group, "num_expert_group": groups},
        **{"topk_group": chosen, "num_experts_per_token": random.randint(1, chosen * per_group)},
        **{"moe_intermediate_size": random.randint(3, 50), "kv_lora_rank": random.randint(3, 40)},
        **{"qk_nope_head_dim": random.randint(1, 20), "v_head_dim": random.randint(1, 20)},
        **{"qk_rope_head_dim": random.choice([4, 8])} | fields.sometimes("first_k_dense_replace", *range(layers)),
        **fields.sometimes("q_lora_rank", None, 3, 15) | fields.sometimes("routed_scaling_factor", 1.0, 2.5),
        **fields.sometimes("num_shared_experts", 1, 2) | fields.sometimes("moe_renormalize", True, False),
        **fields.sometimes("linear_conv_kernel_dim", 2, 3, 4) | fields.rarely("linear_conv_kernel_dim", 1),
        **fields.rarely("mlp_layer_types", ["sparse"] * layers, ["sparse", "dense"] * layers),
        **fields.rarely("first_k_dense_replace", layers) | fields.rarely("moe_router_activation_func", "softmax"),
    }


def _gemma4(fields: _Fields, layers: int, heads: int) -> Draw:
    random = fields.random
    full = {"rope_type": "proportional", "rope_theta": 1e4} | fields.sometimes("partial_rotary_factor", 0.25, 0.5, 1.0)
    full |= fields.rarely("rope_type", "default", "yarn") | fields.rarely("factor", 2.0)
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    return {
        **{"hidden_size_per_layer_input": 0, "global_head_dim": random.choice([8, 12, 16])},
        **{"sliding_window": random.choice([1, 5, 7, 32, 33, 4096])} | fields.sometimes("rope_parameters", rope),
        **fields.sometimes("attention_k_eq_v", True, False) | _layer_types(fields, layers, "sliding_attention"),
        **fields.sometimes("num_global_key_value_heads", *[n for n in range(1, heads + 1) if heads % n == 0]),
        **fields.sometimes("final_logit_softcapping", None, 3.0) | fields.rarely("hidden_size_per_layer_input", 8),
        **fields.rarely("num_kv_shared_layers", 1) | fields.rarely("enable_moe_block", True),
        **fields.rarely("use_bidirectional_attention", "all", "vision") | fields.rarely("hidden_activation", "silu"),
    }


def _glm(fields: _Fields, layers: int, heads: int) -> Draw:
    random = fields.random
    groups = random.choice([1, 1, 2, 3])
    per_group, chosen = random.randint(2, 4), random.randint(1, groups)
    return {
        **{"n_routed_experts": groups * per_group, "n_group": groups, "topk_group": chosen},
        **{
            "num_experts_per_tok": random.randint(1, chosen * per_group),
            "moe_intermediate_size": random.randint(3, 50),
        },
        **{"first_k_dense_replace": random.randint(0, layers - 1)} | fields.sometimes("use_qk_norm", True, False),
        **fields.sometimes("routed_scaling_factor", 1.0, 2.5) | fields.sometimes("n_shared_experts", 1, 2),
        **fields.sometimes("norm_topk_prob", True, False) | _rope(fields),
        **fields.sometimes("num_nextn_predict_layers", 0, 1) | fields.rarely("first_k_dense_replace", layers),
    }


DRAWS: dict[str, Callable[[_Fields, int, int], Draw]] = {
    "qwen3-next": _qwen_next,
    "qwen3.5": _qwen35,
    "olmo-hybrid": _olmo_hybrid,
    "kimi-linear": _kimi,
    "gemma4": _gemma4,
    "glm-4.5": _glm,
}
"""Family -> function that draws its own fields."""


def draw(family: str, random: Random) -> Draw:
    """Return the content of a config.json of a family, without its type."""
    fields = _Fields(random)
    heads, head_dim, layers = random.choice([1, 2, 3, 4]), random.choice([8, 8, 16, 16, 12]), random.randint(1, 5)
    vocab_size = random.randint(72, 90)
    common = {
        **{"vocab_size": vocab_size, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"hidden_size": heads * head_dim, "intermediate_size": random.randint(3, 70)},
        **{"num_key_value_heads": random.choice([n for n in range(1, heads + 1) if heads % n == 0])},
        # Another than the tokens of the comparison: transformers gives its embedding no gradient.
        **{"pad_token_id": vocab_size - 1, "bos_token_id": 1, "eos_token_id": 2},
        "max_position_embeddings": random.choice([33, 64, 200]),
        **fields.sometimes("rms_norm_eps", 1e-6, 1e-5, 1e-2) | fields.sometimes("tie_word_embeddings", True, False),
        **fields.sometimes("attention_bias", True, False) | fields.rarely("hidden_act", "gelu", "relu"),
        **fields.rarely("per_layer_config", {"0": {"intermediate_size": 12}}) | fields.rarely("mlp_bias", True),
    }
    if family != "olmo-hybrid" and random.random() < 0.8:
        common |= {"head_dim": head_dim, "hidden_size": random.randint(20, 60)}
    if family == "kimi-linear":
        common.pop("head_dim", None)
        common |= {"tie_word_embeddings": random.random() < 0.05}
    return common | DRAWS[family](fields, layers, heads)
