"""Writing of adapters in the format of the package peft."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from models.huggingface_tensors import TEXT_MODEL, reorder_rows, stored_name, stored_tensors
from trainer.adapters.select import matrices_of
from trainer.base.config import ConfigError
from trainer.base.system.files import atomic_folder
from trainer.checkpoint.formats.adapter import Adapter
from trainer.checkpoint.formats.peft import (
    PEFT_CONFIG,
    PEFT_TENSORS,
    PeftNames,
    last_word,
    module_of,
    unsupported_by_peft,
)
from trainer.checkpoint.formats.streaming import layer_order
from trainer.checkpoint.formats.tokenizer_files import exported_files
from trainer.checkpoint.tensor_files import TensorWrite, write_safetensors


def write_peft(adapter: Adapter, out: Path) -> None:
    """Write an adapter with its tokenizer and chat template. Replaces `out`. Raises CorruptError or ConfigError."""
    weights = adapter.weights
    names = PeftNames(weights.spec, weights.sizes, adapter.text_model)
    if problem := unsupported_by_peft(names, adapter.trained):
        raise ConfigError("", f"{problem}; scripts/convert_hf.py merge writes the complete model")
    files, export = exported_files(weights), _Export.of(adapter, names)
    with atomic_folder(out) as folder:
        entries = [*export.adapters(), *export.fully_trained()]
        write_safetensors(folder / PEFT_TENSORS, entries, weights.origin())
        (folder / PEFT_CONFIG).write_text(json.dumps(export.config(), indent=2) + "\n")
        for name, file in files.items():
            (folder / name).write_bytes(file)


@dataclass(frozen=True)
class _Export:
    """An adapter as peft stores it. If several matrices of the base model are stored as one tensor, their adapters become one,
    whose second matrix is block-diagonal."""

    adapter: Adapter
    names: PeftNames
    groups: Mapping[str, Sequence[str]]
    """Name of a tensor of the base model -> the adapted matrices whose rows it contains."""
    fully: Mapping[str, Sequence[str]]
    """Likewise, for the parameters that are trained without an adapter."""

    @classmethod
    def of(cls, adapter: Adapter, names: PeftNames) -> "_Export":
        adapted = sorted(adapter.trained.adapted, key=layer_order)
        groups = stored_tensors(names.hf, names.matrices(adapted, names.parameters))
        return cls(adapter, names, groups, stored_tensors(names.hf, sorted(adapter.trained.fully, key=layer_order)))

    def adapters(self) -> Iterator[TensorWrite]:
        """Yield the two matrices of each adapter."""
        names, read = self.names, self.adapter.read
        for stored, group in self.groups.items():
            first_matrices = [matrices_of(name)[0] for name in group]
            a = self.adapter.weights.index[first_matrices[0].partition("@")[0]]
            first, second = map(names.stored, matrices_of(group[0]))
            rank = self.adapter.config.rank * len(group)
            yield TensorWrite(first, a.dtype, (rank, a.shape[-1]), partial(map, read, first_matrices))
            shape = (names.num_rows[stored], rank)
            yield TensorWrite(second, a.dtype, shape, partial(self._block_diagonal, group))

    def fully_trained(self) -> Iterator[TensorWrite]:
        for stored, group in self.fully.items():
            first = self.adapter.weights.index[group[0]]
            shape = (self.names.num_rows[stored], *first.shape[1:])
            yield TensorWrite(self.names.stored(group[0]), first.dtype, shape, partial(map, self._rows, group))

    def _rows(self, name: str) -> Tensor:
        return reorder_rows(self.names.hf, name, self.adapter.read(name), self.names.head_dim)

    def _block_diagonal(self, group: Sequence[str]) -> Iterator[Tensor]:
        """Yield the matrix whose blocks are the second matrices of the group. The rows of other parameters are zero."""
        names, rank = self.names, self.adapter.config.rank
        blocks = [self.adapter.read(matrices_of(name)[1]) for name in group]
        matrix = blocks[0].new_zeros(names.num_rows[stored_name(names.hf, group[0])], rank * len(group))
        for i, (name, block) in enumerate(zip(group, blocks, strict=True)):
            rows = reorder_rows(names.hf, name, block, names.head_dim)
            matrix[names.first_row[name] :][: len(rows), i * rank : (i + 1) * rank] = rows
        yield matrix

    def config(self) -> dict[str, Any]:
        """Return the content of adapter_config.json."""
        names, config = self.names, self.adapter.config
        fused = {names.in_base(module_of(n)): len(group) for n, group in self.groups.items() if len(group) > 1}
        # peft joins the adapters of w1 and w3 to one of twice the rank and alpha. With rslora, that would change the scale.
        rslora = config.rslora and not any("@" in group[0] for group in self.groups.values())
        alpha = config.alpha if rslora == config.rslora else config.scale * config.rank
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.adapter.base,
            "r": config.rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "use_rslora": rslora,
            "bias": "none",
            "target_modules": self._target_modules(),
            "modules_to_save": [module_of(names.in_base(stored)) for stored in self.fully] or None,
            "rank_pattern": {module: config.rank * n for module, n in fused.items()},
            "alpha_pattern": {module: alpha * (n**0.5 if rslora else n) for module, n in fused.items()},
            "inference_mode": True,
        }

    def _target_modules(self) -> list[str]:
        """Return the shortest names that peft recognizes: those of the modules in a layer, if all layers have the same targets.
        The modules of other modalities have these names too."""
        names, targets = self.names, set(map(module_of, self.groups))
        words = set(map(last_word, targets))
        is_uniform = {module for module in names.adaptable.values() if last_word(module) in words} == targets
        return sorted(words if is_uniform and names.text_model == TEXT_MODEL else map(names.in_base, targets))
