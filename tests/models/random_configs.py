"""Random configurations of the families with experts and of those of 2026, compared with transformers."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

from models import MODELS
from models.huggingface_config import other_fields, read_seq_len, read_sizes, write_config
from tests.models import random_recent
from tests.models.families import assert_equal, inputs, reference_of, with_parameters_of

_MOST_FAILURES = 50
"""Number of configurations in a row that transformers may fail to compute."""
_MARGIN = 1e-5
"""Scores of routers that are closer are a tie: rounding decides which expert a token goes to."""
_GENERIC = {"type", "factor"}
"""Keys of config.json that may be words of any message."""

KEPT = {"router_aux_loss_coef": 0.125, "initializer_range": 0.0625, "output_router_logits": False, "a_later_field": [1]}
"""Fields that say nothing about the sizes, which an export keeps."""

FAMILIES = ("mixtral", "olmoe", "qwen3-moe", "deepseek-v3", "gpt-oss", *random_recent.DRAWS)


def configurations(
    family: str, left_out: Counter[str] | None = None
) -> Iterator[tuple[dict[str, Any], transformers.PreTrainedModel]]:
    """Yield contents of config.json, in a fixed order, and transformers' models. Those that transformers cannot compute, and
    those with a tie of a router's scores, are left out. Raises RuntimeError if transformers computes none of many in a row.

    Args:
        family: One of FAMILIES.
        left_out: Receives why configurations are not yielded, and how many.
    """
    left_out, failures = Counter() if left_out is None else left_out, 0
    for seed in count():
        random = Random(f"{family} {seed}")
        if family in random_recent.DRAWS:
            type_ = {"model_type": MODELS[family].huggingface.model_type}
            config = KEPT | type_ | random_recent.draw(family, random)
        else:
            config = _draw(family, random)
        try:
            reference = reference_of(family, config)
            with torch.no_grad(), _Margins() as margins:
                reference(inputs()[0])
        except Exception as error:  # transformers checks few settings, so any kind of error may come out of its models
            left_out["not computed by transformers"] += 1
            failures += 1
            if failures == _MOST_FAILURES:
                message = f"transformers computes none of {failures} configurations of {family} in a row"
                raise RuntimeError(message) from error
            continue
        failures = 0
        if margins.smallest < _MARGIN:
            left_out["with a tie of a router's scores"] += 1
            continue
        yield config, reference


class _Margins(TorchFunctionMode):
    """Context manager that records the smallest distance between the last of the k largest scores and the next one, whenever a
    router chooses experts or groups of them."""

    smallest = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            scores, k = args[0], kwargs["k"] if "k" in kwargs else args[1]
            if k < scores.shape[-1]:
                best = scores.sort(-1, descending=True).values
                self.smallest = min(self.smallest, (best[..., k - 1] - best[..., k]).min().item())
        return func(*args, **kwargs)


def outcome(family: str, config: dict[str, Any], reference: transformers.PreTrainedModel) -> str:
    """Return why the configuration is refused, or "" if it is equal to transformers. Raises AssertionError."""
    spec = MODELS[family]
    hf = spec.huggingface
    try:
        sizes = read_sizes(hf, config)
    except ValueError as error:
        names = {*_keys(config), "rope_type"} - _GENERIC  # an error says rope_type of type, its old name
        assert names & set(re.findall(r"\w+", str(error))) and "\n" not in str(error), error
        return str(error)
    model = with_parameters_of(reference, spec, sizes.without_prediction())
    # Rounding errors of a recurrence grow over the sequence: both implementations are as far from fp64.
    assert_equal(spec, model, reference, gradient_limit=1e-3 if model.structure().is_recurrent else 1e-4)
    others = other_fields(hf, config, sizes)
    assert others.keys() >= KEPT.keys()
    written = others | json.loads(json.dumps(write_config(hf, sizes, read_seq_len(hf, config))))
    assert read_sizes(hf, written) == sizes and other_fields(hf, written, sizes) == others
    again = reference_of(family, written | {"pad_token_id": None})
    again.load_state_dict(reference.state_dict())
    with torch.no_grad():
        assert torch.equal(again(inputs()[0]).logits, reference(inputs()[0]).logits)
    for key in others:
        assert getattr(again.config, key, None) == getattr(reference.config, key, None), key
    return ""


def _keys(config: dict[str, Any]) -> Iterator[str]:
    """Yield the keys of config.json and of the objects in it."""
    for key, value in config.items():
        yield key
        yield from _keys(value) if isinstance(value, dict) else ()


def _draw(family: str, random: Random) -> dict[str, Any]:
    """Return the content of a config.json: usual values, values that few models have, and now and then one that none has."""

    def rarely(key: str, *values: Any) -> dict[str, Any]:
        return {key: random.choice(values)} if random.random() < 0.03 else {}

    def sometimes(key: str, *values: Any) -> dict[str, Any]:
        return {key: random.choice(values)} if random.random() < 0.6 else {}

    heads, head_dim, layers = random.choice([1, 2, 3, 4, 6]), random.choice([8, 8, 10, 12, 16]), random.randint(1, 4)
    vocab_size, experts = random.randint(72, 90), random.randint(2, 9)
    types = [random.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    config = {
        **KEPT,
        "model_type": MODELS[family].huggingface.model_type,
        **{"vocab_size": vocab_size, "num_hidden_layers": layers, "num_attention_heads": heads},
        **{"hidden_size": heads * head_dim, "intermediate_size": random.randint(3, 70)},
        **{"num_key_value_heads": random.choice([n for n in range(1, heads + 1) if heads % n == 0])},
        # Another than the tokens of the comparison: transformers gives its embedding no gradient.
        **{
            "pad_token_id": random.choice([None, vocab_size - 1]),
            "max_position_embeddings": random.choice([33, 64, 200]),
        },
        **{"num_experts_per_tok": random.randint(1, experts)} | sometimes("attention_bias", True, False),
        **sometimes("rms_norm_eps", 1e-6, 1e-5, 1e-2) | sometimes("tie_word_embeddings", True, False),
        **sometimes("norm_topk_prob", True, False) | sometimes("attention_dropout", 0.0, 0.1),
        **sometimes("sliding_window", 1, 5, 7, 32, 33, 4096, None) | sometimes("use_sliding_window", True, False),
        **_rope(
            random,
            head_dim,
            ["default", "yarn"] if family == "deepseek-v3" else ["default", "linear", "yarn", "longrope", "llama3"],
        ),
        **rarely("hidden_act", "gelu", "relu", "swish") | rarely("pretraining_tp", 1, 2) | rarely("mlp_bias", True),
        **rarely("per_layer_config", {"0": {"intermediate_size": 12}}, {"0": {"num_key_value_heads": 1}}),
        **rarely("layer_types", types) | rarely("router_jitter_noise", 0.0, 0.1) | rarely("clip_qkv", 0.3, 8.0),
        **rarely("max_window_layers", 1)
        | rarely("output_router_logits", True)
        | rarely("num_key_value_heads", 1, 2, 3, None),
    }
    if family != "olmoe" and random.random() < 0.7:  # its norms need heads of hidden_size / num_attention_heads
        config |= {"head_dim": head_dim, "hidden_size": random.randint(20, 60)}
    if family == "deepseek-v3":
        groups = random.choice([1, 1, 2, 3, 4])
        per_group, chosen = random.randint(2, 4), random.randint(1, groups)
        config |= {
            **{"num_key_value_heads": heads, "qk_rope_head_dim": head_dim, "n_routed_experts": groups * per_group},
            **{"n_group": groups, "topk_group": chosen, "num_experts_per_tok": random.randint(1, chosen * per_group)},
            **{"moe_intermediate_size": random.randint(3, 50), "kv_lora_rank": random.randint(3, 40)},
            **{"qk_nope_head_dim": random.randint(1, 20), "v_head_dim": random.randint(1, 20)},
            **{"first_k_dense_replace": random.randint(0, layers - 1)} | sometimes("q_lora_rank", None, 3, 15, 40),
            **sometimes("routed_scaling_factor", 1.0, 2.5, 0.3) | sometimes("n_shared_experts", 1, 2, 3),
            **sometimes("rope_interleave", True, False) | sometimes("num_nextn_predict_layers", 0, 1, 2),
            **rarely("scoring_func", "softmax", "sigmoid") | rarely("topk_method", "greedy", "group_limited_greedy"),
            **rarely("moe_layer_freq", 1, 2) | rarely("num_mtp_layers", 0, 2) | rarely("n_shared_experts", 0),
            **rarely("head_dim", 2, 8)
            | rarely("num_local_experts", 4)
            | rarely("first_k_dense_replace", layers)
            | rarely("num_experts_per_tok", *range(1, 9)),
        }
    else:
        names = ["num_experts", "num_local_experts"]
        config |= {random.choice(names): experts} | rarely(random.choice(names), 2, 5)
    if family == "qwen3-moe":
        config |= {"moe_intermediate_size": random.randint(3, 50)} | sometimes("decoder_sparse_step", 1, 1, 2, 3)
        config |= sometimes("mlp_only_layers", None, [], [0], [1, 3], [7])
    if family == "gpt-oss":
        config |= sometimes("swiglu_limit", 0.3, 1.0, 7.0) | sometimes("swiglu_alpha", 0.5, 1.702)
        config |= sometimes("layer_types", types)
    return config


def _rope(random: Random, head_dim: int, supported: list[str]) -> dict[str, Any]:
    """Return the fields of config.json that describe the positional encoding, in one of their spellings."""
    kind = random.choice(
        supported if random.random() < 0.9 else ["linear", "longrope", "llama3", "dynamic", "proportional"]
    )
    theta = random.choice([100.0, 10_000, 1e6])
    if random.random() < 0.15:
        return random.choice(
            [{}, {"rope_theta": theta}, {"rope_scaling": None}, {"rope_parameters": None}, {"rope_scaling": {}}]
        )

    def maybe(probability: float, key: str, *values: Any) -> dict[str, Any]:
        return {key: random.choice(values)} if random.random() < probability else {}

    original = {"original_max_position_embeddings": random.choice([8, 16, 32, 40])}
    factors = [[random.choice([1.0, 1.5, 2, 4.0]) for _ in range(head_dim // 2)] for _ in range(2)]
    used = {
        "default": {},
        "linear": {"factor": random.choice([1.0, 2, 3.5])},
        "dynamic": {"factor": 2.0},
        "proportional": {"partial_rotary_factor": 0.5},
        "yarn": {"factor": random.choice([1.0, 4, 2.5, None]), **maybe(0.4, "beta_fast", 8, 32.0, 2), **original}
        | {**maybe(0.4, "beta_slow", 1.0, 0.5), **maybe(0.4, "truncate", True, False), **maybe(0.2, "attention_factor", 1.3)}
        | {**maybe(0.4, "mscale", 1.0, 0.7), **maybe(0.6, "mscale_all_dim", 1.0, 0.5, 0)},
        "longrope": {"short_factor": factors[0], "long_factor": factors[1], **original}
        | {**maybe(0.4, "factor", 2.0, 1.0, 40), **maybe(0.4, "attention_factor", 1.2)},
        "llama3": {"factor": random.choice([2.0, 8]), "low_freq_factor": random.choice([1.0, 0.5]), **original}
        | {"high_freq_factor": random.choice([4.0, 2, 4.0, 2, 1.0])},
    }[kind]  # fmt: skip
    rope = {random.choice(["rope_type", "rope_type", "type"]): kind, **used} | maybe(
        0.03, "partial_rotary_factor", 0.5, 1.0
    )
    outside = maybe(0.03, "partial_rotary_factor", 0.5, 1.0) | (original if random.random() < 0.05 else {})
    if random.random() < 0.03:
        rope = {name: {"rope_theta": theta, **rope} for name in ("full_attention", "sliding_attention")}
    if random.random() < 0.5:
        return {**outside, "rope_scaling": rope, **maybe(0.8, "rope_theta", theta)}
    other = maybe(0.05, "rope_scaling", {"rope_type": "linear", "factor": 3.0})
    return {**outside, "rope_parameters": rope | {"rope_theta": theta}, **other}
