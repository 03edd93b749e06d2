"""Export to and import from Hugging Face format."""

import json
import math
import re
import shutil
import struct
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import MODELS
from models.huggingface_config import read_seq_len, read_sizes, write_config
from models.huggingface_tensors import permute_from_hf, permute_to_hf
from models.llama import LLAMA2, LLAMA3, LLAMA3_1, LLAMA3_2, LlamaSizes
from tests.commands import run_script
from tests.end_to_end.test_security import update_manifest
from tests.training_runs import full, train, trainer_from
from trainer.base.config import CheckpointConfig, ConfigError, TokenizerConfig
from trainer.base.config.load import load_config
from trainer.checkpoint import manifest
from trainer.checkpoint.formats.export import export_run, is_export_of
from trainer.checkpoint.formats.folders import open_complete, open_weights
from trainer.checkpoint.formats.huggingface import HuggingFaceWeights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.checkpoint.formats.native_writer import write_checkpoint
from trainer.checkpoint.formats.weights import Weights
from trainer.checkpoint.tensor_files import read_index, read_rows
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.runtime.device import memory_now, memory_peak
from trainer.runtime.dtensor import to_local
from trainer.tools.testing.allocations import build_step
from trainer.tools.testing.ranks import RankError

GIB = 2**30
MODELS_TO_CONVERT = {
    "llama 2, multi-head attention": {"model.size": "7b", "model.name": "llama2", "n_kv_heads": 8, "rope_theta": 1e4},
    "llama 3, grouped-query attention": {"model.size": "8b", "model.name": "llama3"},
    "llama 3.1, scaled": {"model.size": "8b", "model.name": "llama3.1", "original_seq_len": 16},
    "llama 3.2, scaled and tied": {"model.size": "1b", "model.name": "llama3.2", "original_seq_len": 16},
}
SMALL = {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 2048}


def flags_of(model):
    settings = {
        (k if k.startswith("model.") else f"model.overrides.{k}"): v
        for k, v in (SMALL | MODELS_TO_CONVERT[model]).items()
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def trained(ranks, tiny, folder, model, size, *layout):
    """Train a model of two layers for two steps and return the checkpoint."""
    tiny_flags = [*tiny[:2], "--training.steps", "2", "--run.output_folder", str(folder), "--run.name", "run"]
    (folder / "base.toml").write_text(Path(tiny[1]).read_text().replace("overrides =", "# overrides ="))
    argv = ["--config", str(folder / "base.toml"), *tiny_flags[2:], *flags_of(model), *layout]
    ranks(size).run(train, argv)
    return folder / "run" / "checkpoints" / "step-00000002"


def transformers():
    """Return the module. It is imported late, so that ranks, which import this file, need not wait for it."""
    import transformers

    return transformers


def native_logits(checkpoint, tokens):
    weights = open_weights(checkpoint, alone=True)
    model = weights.spec.model(weights.sizes)
    index = read_index(checkpoint)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(read_rows(checkpoint, f"model/{name}", index[f"model/{name}"], 0, p.shape[0]))
        return model(tokens)


def hf_logits(folder, tokens):
    model = transformers().LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


def assert_same_logits(logits, expected):
    assert (logits - expected).abs().max() < 5e-5 * logits.std()


TOKENS = torch.randint(2048, (2, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model", MODELS_TO_CONVERT)
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (4, ["--parallel.dp_shard", "4"]),
        (8, ["--parallel.tp", "2", "--parallel.dp_shard", "2", "--parallel.pp", "2"]),
    ],
)
def test_an_exported_model_gives_the_same_logits_in_transformers(ranks, tiny, tmp_path, model, size, layout):
    if "tied" in model and size == 8:
        layout = ["--parallel.tp", "2", "--parallel.dp_shard", "4"]  # tied embeddings do not support pipeline stages
    checkpoint = trained(ranks, tiny, tmp_path, model, size, *layout)
    write_huggingface(open_weights(checkpoint, alone=True), tmp_path / "out", torch.float32)
    assert_same_logits(native_logits(checkpoint, TOKENS), hf_logits(tmp_path / "out", TOKENS))

    # The import is bitwise identical, also from several small files.
    folder = HuggingFaceWeights.open(tmp_path / "out", MODELS["llama3"])
    write_checkpoint(folder, tmp_path / "back", 2**18)
    assert torch.equal(native_logits(tmp_path / "back", TOKENS), native_logits(checkpoint, TOKENS))
    write_huggingface(open_weights(tmp_path / "back", alone=True), tmp_path / "again", torch.float32, 2**18)
    again = {n: t for path in (tmp_path / "again").glob("*.safetensors") for n, t in load_file(path).items()}
    first = load_file(tmp_path / "out" / "model.safetensors")
    assert set(again) == set(first) and all(torch.equal(again[name], first[name]) for name in first)
    assert_same_logits(hf_logits(tmp_path / "again", TOKENS), hf_logits(tmp_path / "out", TOKENS))
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()


def test_an_imported_model_gives_the_same_logits_as_transformers(hf_model, tmp_path):
    folder = HuggingFaceWeights.open(hf_model, MODELS["llama3"])
    write_checkpoint(folder, tmp_path / "c")
    assert_same_logits(native_logits(tmp_path / "c", TOKENS), hf_logits(hf_model, TOKENS))


def source_and_parameters(hf_model, tmp_path, imported):
    """Return the folder of the model, or a checkpoint imported from it, and its parameters."""
    folder = HuggingFaceWeights.open(hf_model, MODELS["llama3"])
    if imported:
        write_checkpoint(folder, tmp_path / "imported")
    source = tmp_path / "imported" if imported else hf_model
    return source, {name: folder.rows(name, 0, stored.shape[0]) for name, stored in folder.index.items()}


def initial_weights(argv):
    engine = trainer_from(argv).engine
    return {name: full(p).clone() for name, p in engine.parameters.items()}, engine.optimizer.state()


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, []), (2, ["--parallel.tp", "2"]), (4, ["--parallel.tp", "2", "--parallel.pp", "2"]), (4, [])],
)
@pytest.mark.parametrize("imported", [False, True])
def test_a_run_starts_from_a_model_on_any_layout(ranks, tiny, tmp_path, hf_model, size, layout, imported):
    source, expected = source_and_parameters(hf_model, tmp_path, imported)
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--checkpoint.init_from", str(source), *layout]
    loaded = {}
    for weights, _ in ranks(size).run(initial_weights, argv):
        loaded |= weights
    assert set(loaded) == set(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("size", "layout"),
    [(1, []), (4, []), (2, ["--parallel.tp", "2"]), (4, ["--parallel.tp", "2", "--parallel.pp", "2"])],
)
@pytest.mark.parametrize("imported", [False, True])
def test_new_embedding_rows_are_the_mean_of_the_stored_rows(ranks, tiny, tmp_path, hf_model, size, layout, imported):
    source, expected = source_and_parameters(hf_model, tmp_path, imported)
    larger = len(expected["output.weight"]) + 37
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--checkpoint.init_from", str(source), *layout]
    argv += ["--model.overrides.vocab_size", str(larger)]
    with pytest.raises(RankError, match=f"vocab_size is {larger - 37}, expected {larger}"):
        ranks(size).run(initial_weights, argv)
    loaded = {}
    for weights, _ in ranks(size).run(initial_weights, [*argv, "--checkpoint.resize_embeddings", "true"]):
        loaded |= weights
    for name, weight in loaded.items():
        if name in ("tok_embeddings.weight", "output.weight"):
            assert torch.equal(weight[:-37], expected[name])
            mean = expected[name].double().mean(0).float()
            torch.testing.assert_close(weight[-37:], mean.expand(37, -1), rtol=0, atol=1e-7)
        else:
            assert torch.equal(weight, expected[name])


def calls_that_read_all_rows(argv):
    with mock.patch.object(Weights, "rows", autospec=True, side_effect=Weights.rows) as read:
        trainer_from(argv)
    return read.call_count


def test_only_one_rank_reads_all_rows_of_a_vocabulary_that_grows(ranks, tiny, tmp_path, hf_model):
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--checkpoint.init_from", str(hf_model)]
    argv += ["--model.overrides.vocab_size", "2050", "--checkpoint.resize_embeddings", "true"]
    assert ranks(2).run(calls_that_read_all_rows, argv) == [2, 0]  # the embedding and the output


def memory_of_loading(argv, folder):
    """Return the bytes of this rank's parameters, and the growth of the process in bytes while it loads them."""
    cpu, (engine, _) = torch.device("cpu"), build_step(load_config(argv))
    before = memory_now(cpu)
    open_complete(folder).load_into(engine.parameters)
    return sum(to_local(p.detach()).nbytes for p in engine.parameters.values()), memory_peak(cpu) - before


@pytest.mark.parametrize("layout", [[], ["--parallel.tp", "2"]])
def test_a_rank_that_loads_its_shards_needs_little_more_memory(ranks, tmp_path, layout):
    """The shards exist before. A rank that read the complete model would need twice their size."""
    config = transformers().LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=2048, rms_norm_eps=1e-5, rope_theta=500_000.0, tie_word_embeddings=False,
    )  # fmt: skip
    transformers().LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    sizes = {"dim": 512, "hidden_dim": 2048, "n_layers": 8, "n_heads": 8, "n_kv_heads": 8}
    flags = [word for name, value in sizes.items() for word in (f"--model.overrides.{name}", str(value))]
    for shards, growth in ranks(2).run(memory_of_loading, [*flags, *layout], tmp_path / "model"):
        assert growth < shards  # with pages of the file, of which kernels map more or fewer at once


def test_excluded_parameters_keep_their_random_values(ranks, tiny, tmp_path, hf_model):
    more = [*tiny, "--run.output_folder", str(tmp_path)]
    drawn = ranks(1).run(initial_weights, [*more, "--run.name", "a"])[0][0]
    given = [
        "--run.name",
        "b",
        "--checkpoint.init_from",
        str(hf_model),
        "--checkpoint.init_exclude",
        "output.weight,layers.1.*",
    ]
    mixed = ranks(1).run(initial_weights, [*more, *given])[0][0]
    same = {name for name in drawn if torch.equal(drawn[name], mixed[name])}
    assert {n for n in same if "norm" not in n} == {
        n for n in drawn if n == "output.weight" or (n.startswith("layers.1.") and "norm" not in n)
    }


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--model.overrides.n_layers", "3"], "contains a different model: n_layers is 2, expected 3"),
        (
            ["--checkpoint.init_exclude", "outptu.weight"],
            "outptu.weight matches no parameter; did you mean 'output.weight'",
        ),
        (["--checkpoint.init_exclude", "*"], "excludes all parameters"),
    ],
)
def test_init_from_another_model_is_rejected(ranks, tiny, tmp_path, hf_model, more, problem):
    config = tmp_path / "base.toml"
    config.write_text(Path(tiny[1]).read_text().replace("n_layers = 2", ""))
    more = more if "n_layers" in more[0] else [*more, "--model.overrides.n_layers", "2"]
    argv = ["--config", str(config), "--run.output_folder", str(tmp_path), "--checkpoint.init_from", str(hf_model)]
    with pytest.raises(RankError, match=problem):
        ranks(1).run(initial_weights, [*argv, *more])


def test_a_run_exports_its_model_at_the_end(ranks, tiny, tmp_path):
    argv = [*tiny, "--run.output_folder", str(tmp_path), "--run.name", "run"]
    ranks(2).run(train, [*argv, "--checkpoint.export_huggingface", "true"])
    model = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "run" / "huggingface")
    tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path / "run" / "huggingface")
    native = load_tokenizer(TokenizerConfig())
    text = "def f(x):\n\treturn 'é' + \"\U0001f600\"  # <|end_of_text|>"
    assert tokenizer(text, split_special_tokens=True).input_ids == [native.bos, *native.encode(text)]
    assert model.generation_config.eos_token_id == native.eos
    assert model.dtype == torch.bfloat16
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert script("to-hf", tmp_path / "run", tmp_path / "out") == (0, "")
    for folder in (tmp_path / "run" / "huggingface", tmp_path / "out"):
        assert is_export_of(folder, checkpoint, averaged=False)

    # The run trains further without an export, so the existing one belongs to an earlier step.
    ranks(1).run(train, [*argv, "--training.steps", "6"])
    exported = tmp_path / "run" / "huggingface" / "model.safetensors"
    before = exported.read_bytes()
    ranks(1).run(export_run, tmp_path / "run", CheckpointConfig(export_huggingface=True), True)
    after = exported.read_bytes()
    assert before != after
    inode = exported.stat().st_ino
    ranks(1).run(export_run, tmp_path / "run", CheckpointConfig(export_huggingface=True), True)
    assert exported.stat().st_ino == inode


# ------------------------------------------------------------ names, sizes, rows


@pytest.mark.parametrize("sizes", [s for spec in (LLAMA2, LLAMA3, LLAMA3_1, LLAMA3_2) for s in spec.by_size.values()])
def test_sizes_round_trip_through_the_config(sizes):
    assert read_sizes(LLAMA3.huggingface, write_config(LLAMA3.huggingface, sizes, 2048)) == (
        sizes if sizes.rope_factor != 1 else LlamaSizes(**vars(sizes) | {"original_seq_len": 8192})
    )
    written = transformers().LlamaConfig(**write_config(LLAMA3.huggingface, sizes, 2048))
    assert read_sizes(LLAMA3.huggingface, json.loads(written.to_json_string())) == read_sizes(
        LLAMA3.huggingface, write_config(LLAMA3.huggingface, sizes, 2048)
    )


def test_rope_permutation_round_trips():
    rows = torch.arange(48.0).view(24, 2)
    assert torch.equal(permute_from_hf(permute_to_hf(rows, 8), 8), rows)
    assert permute_to_hf(rows, 8)[:8, 0].tolist() == [0, 4, 8, 12, 2, 6, 10, 14]


INTEGER, NUMBER, NAN = "an integer from 1 to 2**24", "a number from 1e-30 to 1e30", math.nan
SCALING = write_config(LLAMA3.huggingface, LLAMA3_1.by_size["8b"], 128)["rope_scaling"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "mistral"}, 'model_type "mistral": this model supports only "llama"'),
        ({"num_hidden_layers": "two"}, f'num_hidden_layers "two" must be {INTEGER}'),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000 must be at most 1024"),
        ({"num_key_value_heads": 2.0}, f"num_key_value_heads 2.0 must be {INTEGER}"),
        ({"rms_norm_eps": "1e-5"}, f'rms_norm_eps "1e-5" must be {NUMBER}'),
        ({"rms_norm_eps": NAN}, f"rms_norm_eps NaN must be {NUMBER}"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings 1 must be true or false"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"attention_bias": True}, "attention_bias true: this model supports only false"),
        ({"rope_theta": 10**400}, f"rope_theta 1{'0' * 36}... must be {NUMBER}"),
        ({"rope_theta": -math.inf}, f"rope_theta -Infinity must be {NUMBER}"),
        ({"rope_theta": [1]}, f"rope_theta [1] must be {NUMBER}"),
        ({"rope_scaling": "llama3"}, 'rope_scaling "llama3": must be null or an object'),
        ({"rope_parameters": [1]}, "rope_parameters [1]: must be null or an object"),
        ({"rope_scaling": SCALING | {"factor": NAN}}, f"factor NaN must be {NUMBER}"),
        ({"rope_scaling": SCALING | {"factor": None}}, "factor is missing"),
        ({"rope_scaling": SCALING | {"low_freq_factor": 4}}, "high_freq_factor 4.0 must be above low_freq_factor 4.0"),
        ({"rope_scaling": {"rope_type": "yarn"}}, 'rope_type "yarn": this model supports only default and llama3'),
        (
            {"rope_scaling": {"rope_type": ["llama3"]}},
            'rope_type ["llama3"]: this model supports only default and llama3',
        ),
        ({"head_dim": 7}, "head_dim 7: must be hidden_size / num_attention_heads = 16"),
        ({"hidden_size": 130}, "num_attention_heads 8 must divide hidden_size 130"),
        ({"max_position_embeddings": "long"}, f'max_position_embeddings "long" must be {INTEGER}'),
        ({"max_position_embeddings": [4]}, f"max_position_embeddings [4] must be {INTEGER}"),
        ({"max_position_embeddings": math.inf}, f"max_position_embeddings Infinity must be {INTEGER}"),
        ({"max_position_embeddings": -1}, f"max_position_embeddings -1 must be {INTEGER}"),
        ({"max_position_embeddings": 10**30}, f"max_position_embeddings {10**30} must be {INTEGER}"),
    ],
)
def test_unsupported_config_is_rejected(tmp_path, change, problem):
    config = write_config(LLAMA3.huggingface, LLAMA3.by_size["debug"], 128) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        HuggingFaceWeights.open(tmp_path, MODELS["llama3"])
    assert error.value.message == f"{tmp_path}/config.json: {problem}"


def test_null_in_the_config_stands_for_the_default():
    config = write_config(LLAMA3.huggingface, LLAMA2.by_size["7b"], 128) | {
        "max_position_embeddings": None,
        "rope_theta": None,
        "rope_scaling": None,
    }
    assert (
        read_sizes(LLAMA3.huggingface, config) == LLAMA2.by_size["7b"]
        and read_seq_len(LLAMA3.huggingface, config) == 2048
    )


# ------------------------------------------------------------ tensors that are not those of the model


def changed_model(hf_model, folder, tensors=None, **config):
    """Copy a model into one file. tensors: name -> new tensor, or None to remove the tensor. config: changed values."""
    stored = {name: tensor for path in hf_model.glob("*.safetensors") for name, tensor in load_file(path).items()}
    stored = {name: tensor for name, tensor in (stored | (tensors or {})).items() if tensor is not None}
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((hf_model / "config.json").read_text()) | config))
    return folder


HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
KEY, BIAS = "model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("tensors", "config", "problem"),
    [
        ({}, {"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight is not a parameter of this model; "),
        ({}, {"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight is missing; "),
        ({}, {"num_key_value_heads": 2}, f"{KEY} has shape [16, 32], expected [8, 32]; "),
        ({}, {"vocab_size": 2000}, f"{EMBEDDING} has shape [2048, 32], expected [2000, 32]; {HEAD} has "),
        ({}, {"tie_word_embeddings": True}, f"{HEAD} differs from {EMBEDDING}, but config.json ties the two tensors"),
        ({BIAS: torch.ones(32)}, {}, f"{BIAS} is not a parameter of this model"),
        ({NORM: torch.ones(32).long()}, {}, f"{NORM} has dtype torch.int64, expected torch.float32"),
        ({NORM: torch.ones(32, 1)}, {}, f"{NORM} has shape [32, 1], expected [32]"),
        ({NORM: torch.ones(32, dtype=torch.int16)}, {}, f"model.safetensors: {NORM} has the unsupported dtype I16"),
        ({HEAD: None}, {}, f"{HEAD} is missing"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(hf_model, tmp_path, tensors, config, problem):
    folder = changed_model(hf_model, tmp_path / "model", tensors, **config)
    code, line = script("from-hf", folder, tmp_path / "out")
    assert code == 2 and not (tmp_path / "out").exists()
    assert f"{folder}: {problem}" in line
    with pytest.raises(ConfigError, match=re.escape(line)):
        open_complete(folder)  # for checkpoint.init_from and generate.py


def test_tensors_that_the_model_computes_or_ties_are_ignored(hf_model, tmp_path):
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    original = HuggingFaceWeights.open(hf_model, MODELS["llama3"])
    embedding = original.rows("tok_embeddings.weight", 0, original.sizes.vocab_size)
    folder = changed_model(hf_model, tmp_path / "model", frequencies | {HEAD: embedding}, tie_word_embeddings=True)
    index = HuggingFaceWeights.open(folder, MODELS["llama3"]).index
    assert set(index) == set(original.index) - {"output.weight"}
    folder = changed_model(hf_model, tmp_path / "bf16", {HEAD: embedding.bfloat16()}, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=f"{HEAD} differs from {EMBEDDING}"):
        HuggingFaceWeights.open(folder, MODELS["llama3"])


def test_a_tensor_in_two_files_is_refused(hf_model, tmp_path):
    folder = changed_model(hf_model, tmp_path / "model")
    save_file({NORM: torch.ones(32)}, folder / "more.safetensors")
    weight_map = {HEAD: "model.safetensors", NORM: "more.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=f"model.safetensors and more.safetensors both contain {NORM}"):
        HuggingFaceWeights.open(folder, MODELS["llama3"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sizes": {"n_layers": 1}}, "layers.1.attention.wk.weight is not a parameter of this model"),
        ({"sizes": {"n_kv_heads": 2}}, "layers.0.attention.wk.weight has shape [16, 32], expected [8, 32]"),
        ({"sizes": {"n_layers": 2.0}}, f"model.json: n_layers 2.0 must be {INTEGER}"),
        ({"sizes": {"layers": 2}}, "model.json does not list the sizes of llama2"),
        ({"seq_len": "long"}, "model.json does not describe a model"),
        ({"seq_len": -1}, "model.json does not describe a model"),
        ({"special_token_ids": []}, "model.json does not describe a model"),
        ({"tokenizer": "default"}, "model.json does not describe a model"),
        ({"tokenizer": "x", "tokenizer_files": ["x"]}, "model.json does not describe a model"),
        ({"extra_special_tokens": [1]}, "model.json does not describe a model"),
        ({"reuse_reserved_tokens": {"<|a|>": None}}, "model.json does not describe a model"),
    ],
)
def test_a_checkpoint_whose_tensors_contradict_its_model_is_refused(ranks, hf_model, tmp_path, change, problem):
    folder, checkpoint = HuggingFaceWeights.open(hf_model, MODELS["llama3"]), tmp_path / "c"
    write_checkpoint(folder, checkpoint)
    model = json.loads((checkpoint / "model.json").read_text())
    model |= change | ({"sizes": model["sizes"] | change["sizes"]} if "sizes" in change else {})
    (checkpoint / "model.json").write_text(json.dumps(model))
    update_manifest(checkpoint)
    code, line = script("to-hf", checkpoint, tmp_path / "out")
    assert code == 2 and f"{checkpoint}: {problem}" in line
    with pytest.raises(RankError, match=re.escape(problem)):
        ranks(1).run(open_complete, checkpoint)


# ------------------------------------------------------------ untrusted folders


def folder_of(tmp_path, weight_map=None):
    (tmp_path / "config.json").write_text(json.dumps(write_config(LLAMA3.huggingface, LLAMA3.by_size["debug"], 128)))
    save_file({"model.norm.weight": torch.ones(128)}, tmp_path / "model.safetensors")
    if weight_map is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", 7, None, ["x"], "a\nb"])
def test_index_with_a_path_out_of_its_folder_is_rejected(tmp_path, file):
    with pytest.raises(ConfigError, match="which is not a plain file name"):
        HuggingFaceWeights.open(folder_of(tmp_path, {"model.norm.weight": file}), MODELS["llama3"])


def test_links_are_rejected_except_into_the_cache_of_hugging_face(hf_model, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    snapshot = tmp_path / "snapshots" / "1"
    folder = changed_model(hf_model, snapshot)
    shutil.move(folder / "model.safetensors", tmp_path / "blobs" / "0a")
    (folder / "model.safetensors").symlink_to("../../blobs/0a")
    assert "norm.weight" in HuggingFaceWeights.open(folder, MODELS["llama3"]).index
    (folder / "model.safetensors").unlink()
    shutil.move(tmp_path / "blobs" / "0a", tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to("../../elsewhere")
    with pytest.raises(ConfigError, match=r"model.safetensors is a symbolic link to a path outside the folder"):
        HuggingFaceWeights.open(folder, MODELS["llama3"])


def test_a_loop_of_links_is_a_one_line_error(tmp_path):
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(ConfigError, match=r"model.safetensors: .*"):
        HuggingFaceWeights.open(folder, MODELS["llama3"])


@pytest.mark.parametrize(
    "head", [struct.pack("<Q", 8 * 2**30), b"", b"\x05\0\0\0\0\0\0\0{}}}}", struct.pack("<Q", 2) + b"[]"]
)
def test_invalid_header_is_a_one_line_error(tmp_path, head):
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").write_bytes(head)
    with pytest.raises(ConfigError, match=r"model\.safetensors: "):
        HuggingFaceWeights.open(folder, MODELS["llama3"])


# ------------------------------------------------------------ the script


def script(*words):
    done = run_script("scripts/convert_hf.py", *words)
    return done.returncode, done.stderr.strip()


def test_script_converts_and_reports_errors_in_one_line(hf_model, tmp_path):
    assert script("from-hf", hf_model, tmp_path / "c") == (0, "")
    assert script("to-hf", tmp_path / "c", tmp_path / "out", "--dtype", "bf16") == (0, "")
    loaded = transformers().LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert script("to-hf", tmp_path / "c", tmp_path / "out") == (
        2,
        f"{tmp_path}/out exists and is not an empty folder; choose another path",
    )
    assert script("to-hf", hf_model, tmp_path / "x") == (2, f"{hf_model} is a model in Hugging Face's format already")
    assert script("to-hf", tmp_path, tmp_path / "x") == (
        2,
        f"{tmp_path} contains neither manifest.json of a checkpoint nor config.json of a Hugging Face model",
    )
    assert script("from-hf", tmp_path, tmp_path / "x") == (
        2,
        f"{tmp_path} is no model in Hugging Face's format, because it has no config.json",
    )
    assert script("from-hf", hf_model, tmp_path / "x", "--family", "lama3") == (
        2,
        f"--family lama3: expected one of {', '.join(MODELS)}; did you mean 'llama3'?",
    )
    assert script("from-hf", hf_model, tmp_path / "x", "--shard-gib", "1e300") == (
        2,
        "argument --shard-gib: 1e300: expected a number from 1e-18 to 1e+18",
    )
    (tmp_path / "link").symlink_to(tmp_path / "c")
    for command, source in (("to-hf", tmp_path / "c"), ("to-hf", tmp_path / "missing"), ("from-hf", hf_model)):
        for out in (tmp_path / "c" / "out", tmp_path / "link" / "a" / "out"):
            inside = f"{out} is inside the checkpoint {tmp_path}/c, which new files would damage; choose another path"
            assert script(command, source, out) == (2, inside)
    assert manifest.find_damage(tmp_path / "c") == ""
    shard = next((tmp_path / "c").glob("model-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    code, line = script("to-hf", tmp_path / "c", tmp_path / "y")
    assert (code, line) == (2, f"{tmp_path}/c: {shard.name} does not match its hash")
    assert not (tmp_path / "y").exists()
