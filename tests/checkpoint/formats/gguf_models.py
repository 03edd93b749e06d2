"""Small random models of every family, and the tensors of the same models by the rules of llama.cpp's converter."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from models import MODELS
from models.huggingface_config import read_sizes
from models.huggingface_tensors import join_tensors
from models.spec import ModelSpec, saved_weights
from tests.models.families import _COMMON, CONFIGS
from trainer.base.config import TokenizerConfig
from trainer.checkpoint.formats.model_metadata import ModelMetadata
from trainer.checkpoint.formats.weights import Region, Weights
from trainer.checkpoint.tensor_files import TensorMetadata
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.tools.testing.random_parameters import randomize

VOCAB = 2060  # the shipped tokenizer has 2048 tokens


@dataclass(frozen=True, kw_only=True)
class InMemory(Weights):
    values: Mapping[str, torch.Tensor]

    def read(self, name: str, region: Region, out: torch.Tensor) -> None:
        out.copy_(self.values[name][region])


def write_tokenizer(folder: Path) -> Path:
    for name, content in load_tokenizer(TokenizerConfig()).huggingface_files().items():
        (folder / name).write_bytes(content)
    return folder


def sizes_of(family: str, index: int) -> Any:
    hf = MODELS[family].huggingface
    return read_sizes(hf, {"model_type": hf.model_type} | _COMMON | CONFIGS[family][index] | {"vocab_size": VOCAB})


def weights_of(folder: Path, spec: ModelSpec, sizes: Any, context_window: int = 64) -> InMemory:
    """Return a random model. folder: with its tokenizer."""
    torch.manual_seed(0)
    model = spec.model(sizes)
    randomize(model)
    values = {name: value.detach() for name, value in saved_weights(model).items()}
    metadata = ModelMetadata(
        family=next(name for name, other in MODELS.items() if other is spec),
        sizes=asdict(sizes),
        seq_len=context_window,
        context_window=context_window,
        tokenizer="",
        tokenizer_files=(),
        special_token_ids={},
        reuse_reserved_tokens={},
        extra_special_tokens=(),
    )
    index = {name: TensorMetadata(value.dtype, tuple(value.shape), ()) for name, value in values.items()}
    return InMemory(folder=folder, model=metadata, spec=spec, sizes=sizes, index=index, alone=True, values=values)


def expected_tensors(weights: InMemory) -> dict[str, np.ndarray]:
    """Return name -> tensor, from the tensors in Hugging Face's format and the names that the package gguf gives them."""
    sizes, hf = weights.sizes, weights.spec.huggingface
    architecture = weights.spec.gguf.architecture
    (number,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(number, sizes.n_layers)
    tensors = _with_stacks(join_tensors(hf, weights.values, sizes.head_dim), getattr(sizes, "n_experts", 0))
    expected = {}
    for name, tensor in tensors.items():
        key = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("_bias", ".bias")
        key = f"{key}.weight" if key.endswith(("sinks", "experts.down_proj", "gate_proj", "up_proj")) else key
        if key.endswith("kv_b_proj.weight"):
            heads = tensor.unflatten(0, (sizes.n_heads, -1))
            parts = {"k_b": heads[:, : sizes.qk_nope_head_dim].mT, "v_b": heads[:, sizes.qk_nope_head_dim :]}
            found = {key.replace("kv_b", part): value for part, value in parts.items()}
        else:
            found = {key: _changed(key, tensor, architecture, sizes)}
        for inner, value in found.items():
            mapped = names.get_name(inner, try_suffixes=(".weight", ".bias"))
            assert mapped is not None, inner
            expected[mapped] = value.float().contiguous().numpy()
    return expected


def _changed(name: str, tensor: torch.Tensor, architecture: str, sizes: Any) -> torch.Tensor:
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    is_rotated = "q_proj." in name or "k_proj." in name
    if architecture in ("llama", "mistral3", "smollm3", "granite") and is_rotated:
        heads = tensor.reshape(-1, 2, sizes.head_dim // 2, *tensor.shape[1:])
        return heads.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _with_stacks(tensors: Mapping[str, torch.Tensor], n_experts: int) -> dict[str, torch.Tensor]:
    """Return the tensors with one stack in place of those of single experts, and with gate and up apart."""
    result = {}
    for name, tensor in tensors.items():
        if ".experts.0." in name:
            stack = torch.stack([tensors[name.replace(".experts.0.", f".experts.{i}.")] for i in range(n_experts)])
            merged = name.replace("block_sparse_moe.experts.0", "feed_forward.experts").replace(
                "experts.0.", "experts."
            )
            result[merged.replace("model.layers", "layers") if "feed_forward" in merged else merged] = stack
        elif "gate_up_proj" in name and "experts" in name:
            both = tensor if name.endswith("bias") else tensor.mT
            result[name.replace("gate_up_proj", "gate_proj")] = both[:, ::2]
            result[name.replace("gate_up_proj", "up_proj")] = both[:, 1::2]
        elif name.endswith("experts.down_proj"):
            result[name] = tensor.mT
        elif ".experts." not in name or not name.split(".experts.")[1][0].isdigit():
            result[name] = tensor
    return result


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys and the tensors of a file."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


def values_of(tensor: Any) -> np.ndarray:
    """Return a tensor of a file in fp32, in torch's order of dims."""
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    return values.reshape([int(size) for size in reversed(tensor.shape)])
