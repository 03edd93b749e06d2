"""Models in Hugging Face's format. A model is accepted only with exactly the tensors that config.json describes."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models import MODELS
from scripts.dev.fuzz_cases.damage import damage_file, damage_json_file, require
from trainer.checkpoint.huggingface import HfModelFolder, ModelMetadata, import_folder, model_index
from trainer.checkpoint.storage import read_rows
from trainer.config import ConfigError

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


def _damage_tensors(random: Random, tensors: dict[str, torch.Tensor]) -> None:
    name = random.choice(sorted(tensors))
    tensor = tensors[name]
    match random.randrange(7):
        case 0:
            del tensors[name]
        case 1:
            tensors[random.choice((f"{name[:-6]}bias", "model.layers.9.x.weight", "x", name.upper()))] = tensor.clone()
        case 2:
            dtype = random.choice((torch.int64, torch.uint8, torch.bool, torch.int8, torch.complex64))
            tensors[name] = tensor.to(dtype)
        case 3:
            tensors[name] = tensor.flatten()
        case 4:
            tensors[name] = tensor[: random.randrange(len(tensor))].clone()
        case 5:
            tensors[name] = torch.cat((tensor, tensor))
        case 6:
            tensors[f"model.layers.{random.randrange(9)}.self_attn.rotary_emb.inv_freq"] = torch.ones(2)


def run(random: Random, fixtures: Path, folder: Path) -> str:
    config = _MODEL | {
        "rope_scaling": random.choice((None, _LLAMA3_ROPE)),
        "tie_word_embeddings": random.random() < 0.3,
    }
    torch.manual_seed(random.randrange(2**32))
    dtype = random.choice((torch.float32, torch.bfloat16, torch.float16))
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in _hf_shapes(config).items()}
    intact = random.random() < 0.1
    if not intact and random.random() < 0.5:
        _damage_tensors(random, tensors)
    names = sorted(tensors)
    half = random.choice((None, len(names) // 2))
    files = (
        {"model.safetensors": names} if half is None else {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    )
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    if half is not None:
        weight_map = {name: file for file, members in files.items() for name in members}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if random.random() < 0.5:
            (folder / name).write_text(json.dumps({"bos_token": "<s>", "model": {"type": "BPE"}}))
    for path in random.sample(sorted(folder.iterdir()), 0 if intact else random.choice((0, 1, 1, 2))):
        (damage_json_file if path.suffix == ".json" else damage_file)(random, path)
    spec = MODELS["llama3"]
    try:
        source = HfModelFolder.open(folder, spec)
    except ConfigError as error:
        require(not intact, f"an intact model was refused: {error}")
        raise
    out = folder / "imported"
    import_folder(source, "llama3", out, random.choice((1, 1000, 2**30)), lambda count: None)
    imported, sizes = ModelMetadata.read(out).spec_and_sizes()
    index = model_index(out, imported, sizes)
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    shapes = _hf_shapes(json.loads((folder / "config.json").read_text()))
    buffers = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    copies = {"lm_head.weight"} if sizes.tied_embeddings else set()
    require(stored.keys() - buffers - copies == shapes.keys(), "names are missing or left over")
    require(
        all(tuple(stored[n].shape) == s and stored[n].is_floating_point() for n, s in shapes.items()), "wrong shapes"
    )
    require(len(index) == len(shapes) and source.sizes == sizes, "the imported model is another one")
    for name, entry in index.items():
        tensor = read_rows(out, name, entry, 0, entry.shape[0])
        tensor = spec.huggingface.reorder(name, tensor, sizes.head_dim)
        original = stored[spec.huggingface.name(name.removeprefix("model/"))]
        actual, expected = (t.contiguous().view(torch.uint8) for t in (tensor, original))  # NaN differs from itself
        require(torch.equal(actual, expected), f"{name} has other values")
    return ""
