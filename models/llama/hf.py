"""Llama in Hugging Face's format: parameter names, the order of rows under rotary embeddings, and config.json."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from models.llama.sizes import LlamaSizes, require, text_of
from models.spec import SizeError

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
_NO_DEFAULT = ("dim", "n_layers", "n_heads", "hidden_dim", "vocab_size")
_REQUIRED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def hf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module.startswith("layers."):
        _, index, inner = module.split(".", 2)
        return f"model.layers.{index}.{_NAMES[inner]}.{leaf}"
    return f"{_NAMES[module]}.{leaf}"


def is_buffer(hf_name: str) -> bool:
    """Return whether the tensor contains the rotary frequencies, which old versions of transformers saved."""
    return hf_name.endswith("rotary_emb.inv_freq")


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
    """Return the sizes that a config.json describes. Raises ValueError for an unsupported model."""
    for key, value in _REQUIRED.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} {text_of(config[key])}: this model supports only {text_of(value)}")
    values = _values(config, _FIELDS, _NO_DEFAULT)
    values.setdefault("n_kv_heads", values["n_heads"])
    values.setdefault("norm_eps", 1e-6)  # transformers has this default
    rope_key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    rope = _first(config.get(rope_key), {})
    if not isinstance(rope, Mapping):
        raise ValueError(f"{rope_key} {text_of(rope)}: must be null or an object")
    values["rope_theta"] = _first(rope.get("rope_theta"), config.get("rope_theta"), 10_000.0)
    rope_type = _first(rope.get("rope_type"), rope.get("type"), "default")
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type {text_of(rope_type)}: this model supports only default and llama3")
    if rope_type == "llama3":
        values |= _values(rope, _SCALING, _SCALING)
    try:
        sizes = LlamaSizes(**values)
    except SizeError as error:
        keys = _FIELDS | _SCALING
        raise ValueError(re.sub(r"\w+", lambda word: keys.get(word[0], word[0]), str(error))) from None
    head_dim = config.get("head_dim")
    if head_dim not in (None, sizes.head_dim):
        message = f"must be hidden_size / num_attention_heads = {sizes.head_dim}"
        raise ValueError(f"head_dim {text_of(head_dim)}: {message}")
    return sizes


def seq_len_from_hf(config: Mapping[str, Any]) -> int:
    """Return the context window of the model that a config.json describes. Raises SizeError."""
    seq_len = _first(config.get("max_position_embeddings"), 2048)  # transformers has this default
    require("max_position_embeddings", seq_len, int)
    return seq_len


def _values(config: Mapping[str, Any], keys: Mapping[str, str], required: Collection[str]) -> dict[str, Any]:
    """Return the values in a configuration, by name of the size. keys: name of the size -> key. Null stands for no value. Raises
    ValueError if a value of the required sizes is missing."""
    values = {name: config[key] for name, key in keys.items() if config.get(key) is not None}
    if missing := [keys[name] for name in required if name not in values]:
        raise ValueError(f"{missing[0]} is missing")
    return values


def _first(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
