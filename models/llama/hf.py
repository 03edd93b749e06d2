"""Llama in Hugging Face's format: parameter names, the order of rows under rotary embeddings, and config.json."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from models.llama.sizes import LlamaSizes

_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}

_FIELDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_SCALING = {
    "rope_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "original_seq_len": "original_max_position_embeddings",
}
_EXPECTED = {int: ("an integer", (int,)), float: ("a number", (int, float)), bool: ("true or false", (bool,))}
_NO_DEFAULT = ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")
_REQUIRED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def hf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module.startswith("layers."):
        _, index, inner = module.split(".", 2)
        return f"model.layers.{index}.{_NAMES[inner]}.{leaf}"
    return f"{_NAMES[module]}.{leaf}"


def is_rope_permuted(name: str) -> bool:
    """Return whether the parameter computes queries or keys, to which rotary embeddings are applied."""
    return name.endswith(("attention.wq.weight", "attention.wk.weight"))


def permute_to_hf(rows: Tensor, head_dim: int) -> Tensor:
    """Return rows in Hugging Face's order. rows: weights of complete heads in Meta's order, shape (heads * head_dim, columns).
    In Meta's order, the two rows of a rotated pair are neighbours. In Hugging Face's order, the first rows of all pairs of a head
    precede the second rows of these pairs."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def permute_from_hf(rows: Tensor, head_dim: int) -> Tensor:
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def hf_config(sizes: LlamaSizes, seq_len: int) -> dict[str, Any]:
    """Return the fields of config.json that depend on the model. seq_len: sequence length in training."""
    scaled = sizes.rope_factor != 1.0
    scaling = {hf: getattr(sizes, name) for name, hf in _SCALING.items()} | {"rope_type": "llama3"}
    max_positions = max(seq_len, round(sizes.original_seq_len * sizes.rope_factor)) if scaled else seq_len
    return {
        "architectures": ["LlamaForCausalLM"],
        **_REQUIRED,
        **{hf: getattr(sizes, name) for name, hf in _FIELDS.items()},
        "head_dim": sizes.head_dim,
        "max_position_embeddings": max_positions,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": scaling if scaled else None,
    }


def sizes_from_hf(config: Mapping[str, Any]) -> LlamaSizes:
    """Return the sizes that a config.json describes. Raises ValueError or SizeError for an unsupported model."""
    for key, value in _REQUIRED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} {config[key]!r}: this model supports only {value!r}")
    missing = [_FIELDS[name] for name in _NO_DEFAULT if config.get(_FIELDS[name]) is None]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    values = {name: config[hf] for name, hf in _FIELDS.items() if config.get(hf) is not None}
    for name, value in values.items():
        expected, types = _EXPECTED[LlamaSizes.__annotations__[name]]
        if type(value) not in types:
            raise ValueError(f"{_FIELDS[name]} {value!r}: expected {expected}")
    values.setdefault("n_kv_heads", values["n_heads"])
    values.setdefault("norm_eps", 1e-6)  # transformers has this default
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    values["rope_theta"] = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type {rope_type!r}: this model supports only default and llama3")
    if rope_type == "llama3":
        values |= {name: type(getattr(LlamaSizes, name))(rope[hf]) for name, hf in _SCALING.items()}
    sizes = LlamaSizes(**values)
    if config.get("head_dim") not in (None, sizes.head_dim):
        raise ValueError(f"head_dim {config['head_dim']}: must be hidden_size / num_attention_heads = {sizes.head_dim}")
    return sizes
