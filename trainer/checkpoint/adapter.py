"""Adapters (trainer/adapters/select.py) in checkpoints, merged with their base model, and in the format of the package peft."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.sizes import text_of
from models.spec import ModelSpec, meta_model
from trainer.adapters.select import LORA_A, LORA_B, SCALE_SETTINGS, TrainedParameters, adapter_shapes
from trainer.checkpoint import manifest, resume
from trainer.checkpoint.commit import Tensors, load_into, require_match
from trainer.checkpoint.huggingface import (
    MODEL_FILE,
    ModelMetadata,
    export_metadata,
    file_inside,
    layer_order,
    open_tensors,
    read_object,
)
from trainer.checkpoint.manifest import CorruptError
from trainer.checkpoint.storage import DTYPE_OF, TensorMetadata, TensorWrite, read_index, read_rows, write_safetensors
from trainer.checkpoint.tokenizer_files import exported_files
from trainer.checkpoint.weights import WeightSource
from trainer.config import ConfigError, LoraConfig
from trainer.config.model_source import resolve_checkpoint
from trainer.config.schema import toml_value
from trainer.runtime.distributed import run_on_rank_0
from trainer.runtime.dtensor import local_region
from trainer.system import console
from trainer.system.files import atomic_folder, digest_of
from trainer.system.model_folder import adapter_problem
from trainer.system.paths import split_best

PEFT_CONFIG, _PEFT_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Beginning of the names of tensors in peft's files."""
_LEAVES = {LORA_A: "lora_A.weight", LORA_B: "lora_B.weight"}
_UNSUPPORTED = (
    *("use_dora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("trainable_token_indices", "target_parameters", "use_qalora", "alora_invocation_tokens"),
)
"""Keys of adapter_config.json that change the meaning of an adapter. They must be absent or false."""


# ---------------------------------------------------------------- checkpoints


@dataclass(frozen=True, kw_only=True)
class AdapterCheckpoint:
    """A checkpoint that contains an adapter, and the name of its base model."""

    folder: Path
    metadata: ModelMetadata
    spec: ModelSpec
    sizes: Any
    index: Mapping[str, TensorMetadata]
    """Name in the checkpoint -> dtype, shape and files of each trained parameter."""
    base: Path
    """Folder of the base model at training."""
    base_digest: str
    config: LoraConfig
    scale: float
    trained: TrainedParameters

    @classmethod
    def open(cls, folder: Path, alone: bool = False) -> "AdapterCheckpoint":
        """Verify the checkpoint, collectively unless only this rank opens it (`alone`). Raises CorruptError."""
        if problem := resume.verify(folder, alone=alone):
            raise CorruptError(problem)
        metadata = ModelMetadata.read(folder)
        spec, sizes = metadata.spec_and_sizes()
        index = {key: stored for key, stored in read_index(folder).items() if key.startswith("model/")}
        try:
            lora = dict(metadata.lora)
            base, base_digest = Path(lora.pop("base")), str(lora.pop("base_digest"))
            config = LoraConfig(**lora)
            scale = float(config.scale)
        except (KeyError, TypeError, ValueError, ArithmeticError):
            raise CorruptError(f"{MODEL_FILE} does not describe an adapter") from None
        model = meta_model(spec.model, sizes)
        names = {key.removeprefix("model/") for key in index}
        linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
        shapes = adapter_shapes(model, [name for name in linear if f"{name}.{LORA_A}" in names], config.rank)
        trained = TrainedParameters(frozenset(name for name, _ in model.named_parameters() if name in names), shapes)
        expected = {f"model/{name}": tuple(p.shape) for name, p in trained.tensors(model).items()}
        if {key: stored.shape for key, stored in index.items()} != expected:
            raise CorruptError(f"the tensors are not those of an adapter of rank {config.rank} for this model")
        return cls(
            folder=folder,
            metadata=metadata,
            spec=spec,
            sizes=sizes,
            index=index,
            base=base,
            base_digest=base_digest,
            config=config,
            scale=scale,
            trained=trained,
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows [start, stop) of a trained parameter, by default all rows."""
        key = f"model/{name}"
        stored = self.index[key]
        return read_rows(self.folder, key, stored, start, stored.shape[0] if stop is None else stop)

    def product(self, target: str, rows: slice, columns: slice) -> Tensor:
        """Return a part of the matrix that the adapter adds to the target's weight, in fp32."""
        a, b = self.read(f"{target}.{LORA_A}"), self.read(f"{target}.{LORA_B}", rows.start, rows.stop)
        return b.float() @ a[:, columns].float() * self.scale


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """The parameters of a base model, with an adapter merged into them. It can replace a WeightSource."""

    adapter: AdapterCheckpoint
    base: WeightSource
    hf_folder: ClassVar[None] = None

    @classmethod
    def open(cls, checkpoint: Path, base: Path | None, alone: bool = False) -> "AdapterSource":
        """Verify both folders, collectively unless only this rank opens them (`alone`). base: folder of the base model, or of
        the run that trained it, or None for the one that the checkpoint names. Raises ConfigError if one of them is damaged, or
        if the base is not that of the adapter."""
        with manifest.damage_as_config_error(checkpoint):
            adapter = AdapterCheckpoint.open(checkpoint, alone)
        folder = base or adapter.base
        if not split_best(folder)[0].is_dir():
            raise ConfigError("", f"{checkpoint} needs its base model, but {folder} does not exist; use --base PATH")
        folder = resolve_checkpoint(folder) if alone else run_on_rank_0(partial(resolve_checkpoint, folder))
        source = WeightSource.open(folder, adapter.spec, alone)
        if source.digest() != adapter.base_digest:
            raise ConfigError("", f"{folder} is not the base model with which {checkpoint} was trained")
        return cls(adapter=adapter, base=source)

    @property
    def folder(self) -> Path:
        return self.adapter.folder

    @property
    def spec(self) -> ModelSpec:
        return self.adapter.spec

    @property
    def sizes(self) -> Any:
        return self.adapter.sizes

    @property
    def index(self) -> dict[str, TensorMetadata]:
        """Return the parameters like WeightSource.index. Fully trained ones replace those of the base, and may have more rows."""
        fully = {key: stored for key, stored in self.adapter.index.items() if key in self.base.index}
        return {**self.base.index, **fully}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a parameter. Merged rows are fp32. Raises CorruptError."""
        if name in self.adapter.trained.fully:
            return self.adapter.read(name, start, stop)
        rows, target = self.base.rows(name, start, stop), name.removesuffix(".weight")
        if f"{target}.{LORA_A}" in self.adapter.trained.shapes:
            rows = rows + self.adapter.product(target, slice(start, stop), slice(None))
        return rows

    @torch.no_grad()
    def load_into(self, parameters: Tensors) -> None:
        """Load the parameters in place, collectively unless `alone`. Each rank reads only its shards of the base model."""
        fully = self.adapter.trained.fully
        self.base.load_into({name: p for name, p in parameters.items() if name not in fully})
        own = {f"model/{name}": p for name, p in parameters.items() if name in fully}
        load_into(self.folder, self.adapter.index, own, cast=True, alone=self.base.alone)
        for target in self.adapter.trained.targets:
            local, (rows, columns) = local_region(parameters[f"{target}.weight"])
            local.copy_(local + self.adapter.product(target, rows, columns).to(local.device))


def open_weights(folder: Path, base: Path | None = None, alone: bool = False) -> WeightSource | AdapterSource:
    """Open a model that can be loaded or exported, collectively unless `alone` is true.

    Args:
        folder: Checkpoint, or model in Hugging Face's format.
        base: Folder of the base model, if the checkpoint contains an adapter and the base has moved.
        alone: Whether only this rank opens the model.

    Raises:
        ConfigError: The folder contains no model that can be read.
    """
    if is_adapter(folder):
        return AdapterSource.open(folder, base, alone)
    if base is not None:
        raise ConfigError("", f"--base {base} has no effect, because {folder} contains no adapter")
    return WeightSource.open(folder, alone=alone)


def is_adapter(checkpoint: Path) -> bool:
    """Return whether a checkpoint contains an adapter. A damaged one counts as none."""
    try:
        return bool(ModelMetadata.read(checkpoint).lora)
    except CorruptError:
        return False


def load_adapter(
    config: LoraConfig, spec: ModelSpec, sizes: Any, parameters: Tensors, trained: Tensors, base_digest: str
) -> str:
    """Load this rank's trained parameters from lora.init_from, collectively, and return a hash of the source.

    Args:
        parameters: Those of this rank.
        trained: The complete model's trained parameters.
        base_digest: Hash of the base model's weights.

    Raises:
        ConfigError: The source is damaged, or contains another adapter.
    """
    own = {name: p for name, p in parameters.items() if name in trained}
    folder = Path(config.init_from)
    try:
        run_folder, is_best = split_best(folder)
        is_own = is_best or (folder / manifest.NAME).exists() or (run_folder / "checkpoints").exists()
        if not is_own and (problem := adapter_problem(folder)):
            raise ConfigError("", f"{folder} {problem}")
        if (folder / PEFT_CONFIG).exists():
            _require_settings(config, _peft_settings(folder), folder)
            _load_peft(folder, PeftNames(spec, sizes), own, trained)
            source = folder / _PEFT_TENSORS
        else:
            folder = run_on_rank_0(partial(resolve_checkpoint, folder))
            if not is_adapter(folder):
                raise ConfigError("", f"{folder} contains neither {PEFT_CONFIG} nor a checkpoint of an adapter")
            adapter = AdapterCheckpoint.open(folder)
            if adapter.base_digest != base_digest:
                raise ConfigError("", f"{folder} was trained with another base model, {adapter.base}")
            _require_settings(config, {name: getattr(adapter.config, name) for name in SCALE_SETTINGS}, folder)
            wanted = {f"model/{name}": p for name, p in own.items()}
            unknown = [
                f"{key} is not trained by this run" for key in adapter.index if key[len("model/") :] not in trained
            ]
            load_into(folder, adapter.index, wanted, cast=True, problems=unknown)
            source = folder / manifest.NAME
    except CorruptError as damage:
        raise ConfigError("lora.init_from", f"{folder}: {damage}") from None
    except ConfigError as error:
        raise error if error.key else ConfigError("lora.init_from", error.message) from None
    console.info(f"loaded the adapter {folder}")
    return run_on_rank_0(partial(digest_of, source))


def _require_settings(config: LoraConfig, saved: Mapping[str, Any], folder: Path) -> None:
    for name, value in saved.items():
        if getattr(config, name) != value:
            raise ConfigError(f"lora.{name}", f"must be {toml_value(value)}, as in the adapter {folder}")


# ---------------------------------------------------------------- peft


class PeftNames:
    """Names of parameters in peft's files, whose tensors may contain the rows of several parameters."""

    def __init__(self, spec: ModelSpec, sizes: Any):
        self.hf, self.head_dim, self.model = spec.huggingface, sizes.head_dim, meta_model(spec.model, sizes)
        self.parameters = dict(self.model.named_parameters())
        parameters = {name: p for name, p in self.parameters.items() if not self.hf.is_stack(name)}
        self.first_row = self.hf.first_rows(parameters)
        """Name of a parameter -> its first row in the stored tensor."""
        self.groups = self.hf.tensors(parameters)
        """Name of a stored tensor of the base model -> names of the parameters whose rows it contains, in order."""
        self.num_rows = {name: sum(parameters[p].shape[0] for p in group) for name, group in self.groups.items()}
        """Name of a stored tensor of the base model -> number of rows."""

    def base(self, name: str) -> str:
        """Return the parameter of the base model to which a trained parameter belongs."""
        module, _, leaf = name.rpartition(".")
        return f"{module}.weight" if leaf in _LEAVES else name

    def stored(self, name: str) -> str:
        stored, leaf = self.hf.name(self.base(name)), name.rpartition(".")[2]
        return _PREFIX + (f"{stored.removesuffix('weight')}{_LEAVES[leaf]}" if leaf in _LEAVES else stored)

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored tensor of a trained parameter. shape: of the parameter."""
        rows = shape[0] if name.endswith(LORA_A) else self.num_rows[self.hf.name(self.base(name))]
        return rows, *shape[1:]

    def unsupported(self, fully: Iterable[str]) -> str:
        """Return why peft cannot train these parameters of the model without training others, or "" if it can."""
        if stacks := [name for name in sorted(fully, key=layer_order) if self.hf.is_stack(name)]:
            return f"{stacks[0]} contains the matrices of all experts, for which there is no form in peft's files"
        uses = [parameter for _, parameter in self.model.named_parameters(remove_duplicate=False)]
        for stored, group in self.hf.tensors(sorted(fully, key=layer_order)).items():
            name = group[0]
            if len(group) < len(self.groups[stored]):
                return f"{name} is a part of {stored}, and peft cannot train a part of a tensor"
            if sum(use is self.parameters[name] for use in uses) > 1:
                return f"{name} is also the output weight, and peft cannot train tied embeddings"
        return ""


def require_peft_support(names: PeftNames, fully: Iterable[str], key: str = "") -> None:
    """Raise ConfigError if peft cannot train these parameters of the model without training others. key: setting that requires
    peft's format, or "" for a command."""
    if problem := names.unsupported(fully):
        raise ConfigError(key, f"{problem}; scripts/convert_hf.py merge writes the complete model")


def _peft_settings(folder: Path) -> dict[str, Any]:
    """Return setting of [lora] -> value. Raises CorruptError or ConfigError if adapter_config.json does not describe a supported
    adapter."""
    config = read_object(folder / PEFT_CONFIG)
    fixed = {"peft_type": ("LORA",), "bias": ("none", None)}
    fixed |= {"init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None)}  # others change the base
    for key, values in (fixed | dict.fromkeys(_UNSUPPORTED, (None, False, [], {}))).items():
        if config.get(key) not in values:
            expected = " or ".join(json.dumps(value) for value in values if value is not None)
            raise CorruptError(f"{PEFT_CONFIG}: {key} {text_of(config.get(key))} must be {expected}")
    scale = {"rank": config.get("r", 8), "alpha": config.get("lora_alpha", 8)}
    return scale | {"rslora": bool(config.get("use_rslora"))}


@torch.no_grad()
def _load_peft(folder: Path, names: PeftNames, own: Tensors, trained: Tensors) -> None:
    """Load this rank's parameters in place.

    Args:
        own: This rank's parameters, as in load_adapter.
        trained: As in load_adapter.

    Raises:
        CorruptError: The files are damaged.
        ConfigError: The configuration is not supported, or the adapter is another one.
    """
    with open_tensors(file_inside(folder, _PEFT_TENSORS)) as tensors:
        index = {}
        for key in tensors.keys():  # noqa: SIM118
            stored = tensors.get_slice(key)
            dtype = DTYPE_OF.get(stored.get_dtype(), torch.uint8)
            index[key] = TensorMetadata(dtype, tuple(stored.get_shape()), ())
        expected = {names.stored(n): torch.empty(names.shape(n, p.shape), device="meta") for n, p in trained.items()}
        problems = [*filter(None, [names.unsupported(trained.keys() & names.parameters.keys())])]
        problems += [f"{key} is not trained by this run" for key in sorted(index.keys() - expected.keys())]
        require_match(folder, index, expected, cast=True, problems=problems)
        # The rows are compared only now, because all tensors have the expected shapes.
        require_match(folder, {}, {}, cast=True, problems=[*_dropped_rows(names, tensors, trained)])
        for name, parameter in own.items():
            value = tensors.get_tensor(names.stored(name))
            if not name.endswith(LORA_A):
                base = names.base(name)
                value = value[names.first_row[base] :][: parameter.shape[0]]
                value = names.hf.restore(base, value, names.head_dim)
            local, region = local_region(parameter)
            local.copy_(value[region])


def _dropped_rows(names: PeftNames, tensors: Any, trained: Tensors) -> Iterator[str]:
    """Yield the problem of each second matrix whose rows of parameters that the run does not train are not zero."""
    for stored, group in names.hf.tensors(names.base(name) for name in trained if name.endswith(LORA_B)).items():
        if len(group) < len(names.groups[stored]):
            key = names.stored(f"{group[0].removesuffix('weight')}{LORA_B}")
            untrained = torch.ones(names.num_rows[stored], dtype=torch.bool)
            for name in group:
                untrained[names.first_row[name] :][: len(names.parameters[name])] = False
            if tensors.get_tensor(key)[untrained].any():
                yield f"{key} has nonzero rows that are not trained by this run"


def write_peft(checkpoint: Path, out: Path) -> None:
    """Write the adapter of a checkpoint in the format of the package peft, with its tokenizer and chat template. If several
    matrices are stored as one tensor, their adapters become one adapter, whose second matrix is block-diagonal. Replaces `out`.
    Raises CorruptError or ConfigError."""
    adapter = AdapterCheckpoint.open(checkpoint, alone=True)
    config, names = adapter.config, PeftNames(adapter.spec, adapter.sizes)
    require_peft_support(names, adapter.trained.fully)
    files = exported_files(checkpoint, adapter.metadata)
    groups = names.hf.tensors(f"{target}.weight" for target in sorted(adapter.trained.targets, key=layer_order))
    own = names.hf.tensors(sorted(adapter.trained.fully, key=layer_order))

    def own_rows(name: str) -> Tensor:
        return names.hf.reorder(name, adapter.read(name), names.head_dim)

    entries = []
    for stored, group in groups.items():
        target = group[0].removesuffix(".weight")
        a, rank = adapter.index[f"model/{target}.{LORA_A}"], config.rank * len(group)
        first_matrices = [f"{name.removesuffix('weight')}{LORA_A}" for name in group]
        for leaf, shape, pieces in (
            (LORA_A, (rank, a.shape[1]), partial(map, adapter.read, first_matrices)),
            (LORA_B, (names.num_rows[stored], rank), partial(_block_diagonal, adapter, names, group)),
        ):
            entries.append(TensorWrite(names.stored(f"{target}.{leaf}"), a.dtype, shape, pieces))
    for stored, group in own.items():
        first = adapter.index[f"model/{group[0]}"]
        shape = names.num_rows[stored], *first.shape[1:]
        entries.append(TensorWrite(names.stored(group[0]), first.dtype, shape, partial(map, own_rows, group)))
    fused = {stored.removesuffix(".weight"): len(group) for stored, group in groups.items() if len(group) > 1}
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(adapter.base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "use_rslora": config.rslora,
        "bias": "none",
        "target_modules": _target_modules(names, groups),
        "modules_to_save": [stored.removesuffix(".weight") for stored in own] or None,
        "rank_pattern": {module: config.rank * n for module, n in fused.items()},
        "alpha_pattern": {module: config.alpha * (n**0.5 if config.rslora else n) for module, n in fused.items()},
        "inference_mode": True,
    }
    with atomic_folder(out) as folder:
        write_safetensors(folder / _PEFT_TENSORS, entries, export_metadata(checkpoint))
        (folder / PEFT_CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        for name, file in files.items():
            (folder / name).write_bytes(file)


def _block_diagonal(adapter: AdapterCheckpoint, names: PeftNames, group: Sequence[str]) -> Iterator[Tensor]:
    """Yield the matrix whose blocks are the second matrices of the group. The rows of other parameters are zero."""
    blocks = [adapter.read(f"{name.removesuffix('weight')}{LORA_B}") for name in group]
    rank = adapter.config.rank
    matrix = blocks[0].new_zeros(names.num_rows[names.hf.name(group[0])], rank * len(group))
    for i, (name, block) in enumerate(zip(group, blocks, strict=True)):
        rows = names.hf.reorder(name, block, names.head_dim)
        matrix[names.first_row[name] :][: len(rows), i * rank : (i + 1) * rank] = rows
    yield matrix


def _target_modules(names: PeftNames, stored: Iterable[str]) -> list[str]:
    """Return the shortest names that peft recognizes: those of the modules in a layer, if all layers have the same targets."""
    targets = {name.removesuffix(".weight") for name in stored}
    linear = (n for n, m in names.model.named_modules() if isinstance(m, nn.Linear))
    modules = {names.hf.name(f"{name}.weight").removesuffix(".weight") for name in linear}
    leaves = {name.rpartition(".")[2] for name in targets}
    is_uniform = {name for name in modules if name.rpartition(".")[2] in leaves} == targets
    return sorted(leaves if is_uniform else targets)
