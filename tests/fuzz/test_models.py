"""Models in Hugging Face's format. A model is accepted only with exactly the tensors that config.json describes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from models import MODELS
from models.huggingface_tensors import reorder_rows, stored_name
from tests.fuzz.check import limits, may_refuse
from tests.fuzz.strategies import Changed, Missing, Replaced, file_change, positions
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights
from trainer.checkpoint.formats.native import CheckpointWeights
from trainer.checkpoint.formats.native_writer import write_checkpoint

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_FILES = ["config.json", "model.safetensors", "a.safetensors", "b.safetensors", "model.safetensors.index.json"]
_FILES += ["tokenizer.json", "tokenizer_config.json"]


def _hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes that transformers gives the tensors of a Llama."""
    dim, hidden, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv = dim // heads * (config.get("num_key_value_heads") or heads)
    block = {
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, dim),
        "mlp.gate_proj": (hidden, dim),
        "mlp.up_proj": (hidden, dim),
        "mlp.down_proj": (dim, hidden),
    }
    shapes = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    shapes |= {} if config.get("tie_word_embeddings") else {"lm_head.weight": (vocab, dim)}
    layers = range(config["num_hidden_layers"])
    return shapes | {f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in block.items()}


@dataclass(frozen=True)
class TensorChange:
    """One change of the model's tensors, before they are written."""

    action: str
    tensor: int
    """Number of the tensor by name, modulo their number."""
    number: int

    def apply(self, tensors: dict[str, torch.Tensor]) -> None:
        name = sorted(tensors)[self.tensor % len(tensors)]
        tensor = tensors[name]
        match self.action:
            case "remove":
                del tensors[name]
            case "add":
                names = (f"{name[:-6]}bias", "model.layers.9.x.weight", "x", name.upper())
                tensors[names[self.number % len(names)]] = tensor.clone()
            case "convert":
                dtypes = (torch.int64, torch.uint8, torch.bool, torch.int8, torch.complex64)
                tensors[name] = tensor.to(dtypes[self.number % len(dtypes)])
            case "flatten":
                tensors[name] = tensor.flatten()
            case "shorten":
                tensors[name] = tensor[: self.number % len(tensor)].clone()
            case "lengthen":
                tensors[name] = torch.cat((tensor, tensor))
            case "add a buffer":
                tensors[f"model.layers.{self.number % 9}.self_attn.rotary_emb.inv_freq"] = torch.ones(2)


_ACTIONS = ["remove", "add", "convert", "flatten", "shorten", "lengthen", "add a buffer"]
_tensor_changes = st.builds(TensorChange, st.sampled_from(_ACTIONS), positions, positions)


@dataclass(frozen=True)
class Case:
    rope: dict[str, Any] | None
    tied: bool
    dtype: torch.dtype
    tensor_change: TensorChange | None
    is_split: bool
    """Whether two files hold the tensors."""
    tokenizer_files: tuple[str, ...]
    file_changes: dict[str, Changed | Missing | Replaced]
    """By name; a file that this model does not have is left out."""
    max_bytes: int

    def write(self, folder: Path) -> None:
        config = _MODEL | {"rope_scaling": self.rope, "tie_word_embeddings": self.tied}
        torch.manual_seed(0)
        tensors = {name: torch.randn(shape).to(self.dtype) for name, shape in _hf_shapes(config).items()}
        if self.tensor_change:
            self.tensor_change.apply(tensors)
        names = sorted(tensors)
        half = len(names) // 2
        files = {"model.safetensors": names}
        if self.is_split:
            files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
            weight_map = {name: file for file, members in files.items() for name in members}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        for file, members in files.items():
            save_file({name: tensors[name] for name in members}, folder / file)
        (folder / "config.json").write_text(json.dumps(config))
        for name in self.tokenizer_files:
            (folder / name).write_text(json.dumps({"bos_token": "<s>", "model": {"type": "BPE"}}))
        for name, change in self.file_changes.items():
            if (folder / name).exists():
                change.write(folder / name)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    changed = draw(st.lists(st.sampled_from(_FILES), max_size=2, unique=True))
    return Case(
        rope=draw(st.sampled_from([None, _LLAMA3_ROPE])),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        tensor_change=draw(st.none() | _tensor_changes),
        is_split=draw(st.booleans()),
        tokenizer_files=tuple(draw(st.sets(st.sampled_from(["tokenizer.json", "tokenizer_config.json"])))),
        file_changes={name: draw(file_change(name)) for name in changed},
        max_bytes=draw(st.sampled_from([1, 1000, 2**30])),
    )


@given(cases())
def test_a_model_is_refused_with_one_line_or_imported_tensor_by_tensor(case):
    with limits() as folder:
        case.write(folder)
        spec, out = MODELS["llama3"], folder / "imported"
        intact = not case.tensor_change and not case.file_changes
        with may_refuse(expected=not intact) as refusals:
            source = HuggingFaceWeights.open(folder, spec)
            write_checkpoint(source, out, case.max_bytes)
        if refusals:
            return
        imported = CheckpointWeights.open(out, alone=True)
        sizes, index = imported.sizes, imported.index
        stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        shapes = _hf_shapes(json.loads((folder / "config.json").read_text()))
        buffers = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
        copies = {"lm_head.weight"} if sizes.tied_embeddings else set()
        assert stored.keys() - buffers - copies == shapes.keys()
        assert {name: tuple(stored[name].shape) for name in shapes} == shapes
        assert all(stored[name].is_floating_point() for name in shapes)
        assert len(index) == len(shapes) and source.sizes == sizes
        for name in index:
            tensor = reorder_rows(spec.huggingface, name, imported.rows(name), sizes.head_dim)
            original = stored[stored_name(spec.huggingface, name)]
            actual, expected = (t.contiguous().view(torch.uint8) for t in (tensor, original))  # NaN differs from itself
            assert torch.equal(actual, expected), f"{name} has other values"
