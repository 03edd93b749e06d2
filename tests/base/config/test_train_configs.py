"""The shipped configurations."""

import subprocess
import typing
from unittest import mock

import pytest
import tomli
import torch
from torch.torch_version import TorchVersion

from models import MODELS
from tests.conftest import ROOT
from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.base.config.schema.model import ModelFamily
from trainer.data.tokenizer.backends import load_tokenizer
from trainer.parallel.stages import SCHEDULES
from trainer.run.resolve import resolve, resolve_model

FILES = sorted((ROOT / "train_configs").rglob("*.toml"))

# As published; each is the sum over the architecture's tensors in the model cards' checkpoints.
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
}


def load(file, tmp_path):
    """Load a configuration with temporary files in place of the user's."""
    argv = ["--config", str(file)]
    document = tomli.loads(file.read_text())
    (tmp_path / "data").mkdir()
    (tmp_path / "tokenizer.model").touch()
    if document["data"].get("path"):
        argv += ["--data.path", str(tmp_path / "data")]
    if document["model"].get("pretrained"):
        return load_config(argv, check_files=())  # the name and the size of the model are given: no download
    if document.get("checkpoint", {}).get("init_from"):
        argv += ["--checkpoint.init_from", str(tmp_path / "data")]
    if document.get("tokenizer", {}).get("path"):
        argv += ["--tokenizer.path", str(tmp_path / "tokenizer.model")]
    return load_config(argv)


def test_every_documented_model_has_a_configuration():
    assert {f.stem for f in FILES} >= {"debug", *PARAMETERS}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_a_shipped_file_loads_and_names_an_existing_model(file, tmp_path):
    resolve_model(load(file, tmp_path).model)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_published_number_of_parameters(name, tmp_path):
    family, sizes = resolve_model(load(ROOT / "train_configs" / f"{name}.toml", tmp_path).model)
    with torch.device("meta"):
        model = MODELS[family].model(sizes)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_debug_run_fits_one_to_eight_ranks(world_size):
    config = load_config([])
    assert load_tokenizer(config.tokenizer).vocab_size == resolve(config, world_size).sizes.vocab_size


def test_resolution_reads_neither_the_tokenizer_nor_the_chat_template_and_starts_no_process(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    (tmp_path / "broken.jinja").write_text("{% for")
    argv = ["--data.dataset", "chat", "--data.packing", "best-fit", "--data.chat_template", tmp_path / "broken.jinja"]
    argv += ["--tokenizer.backend", "sentencepiece", "--tokenizer.path", tmp_path / "tokenizer.model"]
    config = load_config([*map(str, argv), "--data.document_mask", "true"])
    with mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process was started")):
        assert resolve(config, 2).dims.world_size == 2


COMBINATIONS = {
    "--model.size 8B": "--model.size 8B: expected one of debug, 8b, 70b for llama3; did you mean '8b'?",
    "--model.overrides.n_layer 4": (
        "--model.overrides.n_layer 4: llama3 has no dimension of this name; did you mean 'n_layers'?"
    ),
    "--model.overrides.n_layers four": "--model.overrides.n_layers four: expected an integer",
    "--model.overrides.n_layers 4.5": "--model.overrides.n_layers 4.5: expected an integer",
    "--model.overrides.tied_embeddings 1": "--model.overrides.tied_embeddings 1: expected true or false",
    "--model.overrides.norm_eps true": "--model.overrides.norm_eps true: expected a number",
    "--model.overrides.n_layers 0": "--model.overrides.n_layers 0: n_layers 0 must be an integer from 1 to 2**24",
    "--model.overrides.n_heads 7 --model.overrides.rope_theta 1e4": (
        "--model.overrides.n_heads 7: n_kv_heads 4 must divide n_heads 7"
    ),
    "--model.overrides.n_heads 128": (
        "--model.overrides.n_heads 128: dim 128 / n_heads 128 must be even: rotary embeddings rotate pairs"
    ),
    "--model.overrides.n_kv_heads 3": "--model.overrides.n_kv_heads 3: n_kv_heads 3 must divide n_heads 8",
    "--model.overrides.rope_factor -1": "--model.overrides.rope_factor -1: rope_factor -1.0 must be a number from 1e-30 to 1e30",
    "--training.global_batch_size 6": (
        "--training.global_batch_size 6: must be a multiple of local_batch_size 4 x 4 data-parallel ranks = 16"
    ),
    "--model.name olmoe --parallel.ep 3": (
        "--parallel.ep 3: must divide dp_shard 4 x cp 1 x tp 1 = 4: these ranks share the experts"
    ),
    "--model.name olmoe --parallel.ep 4 --model.overrides.n_experts 6": (
        "--parallel.ep 4: must divide n_experts 6 of olmoe/debug"
    ),
    "--model.name olmoe --parallel.tp 4 --training.seq_len 130": (
        "--parallel.tp 4: must divide seq_len 130: the tp ranks route different tokens"
    ),
    "--model.name olmoe --model.overrides.experts_per_token 9": (
        "--model.overrides.experts_per_token 9: experts_per_token 9 must be at most n_experts 8"
    ),
    "--model.name olmoe --model.overrides.head_dim 32": (
        "--model.overrides.head_dim 32: head_dim 32 x n_heads 8 must be dim 128"
    ),
    "--model.name qwen3-moe --model.overrides.sparse_layers [false]": (
        "--model.overrides.sparse_layers [false]: sparse_layers must contain true: without experts it is a dense model"
    ),
    "--parallel.dp_shard 3": ("--parallel.dp_shard 3: must equal the number of ranks, 4; -1 uses all remaining ranks"),
    "--parallel.dp_replicate 3": "--parallel.dp_replicate 3: must divide the number of ranks, 4",
    "--parallel.dp_replicate 2 --parallel.dp_shard 4": (
        "--parallel.dp_shard 4: x dp_replicate 2 = 8 must equal the number of ranks, 4; -1 uses all remaining ranks"
        "; for 8 ranks: NGPU=8 ./run_llama_train.sh, or plan.py --world-size 8"
    ),
    "--parallel.reshard_after_forward 4": (
        "--parallel.reshard_after_forward 4: must divide dp_shard 4 and be below 4; 'always' reshards over all 4 ranks"
    ),
    "--training.global_batch_size 24": (
        "--training.global_batch_size 24: must be a multiple of local_batch_size 4 x 4 data-parallel ranks = 16"
    ),
    "--training.batch_schedule.9 24": (
        "--training.batch_schedule.9 24: must be a multiple of local_batch_size 4 x 4 data-parallel ranks = 16"
    ),
    "--parallel.tp 3": "--parallel.tp 3: must divide the number of ranks, 4",
    "--parallel.tp 2 --parallel.cp 4": (
        "--parallel.tp 2: x 4 (product of the other degrees) = 8 must divide the number of ranks, 4"
        "; for 8 ranks: NGPU=8 ./run_llama_train.sh, or plan.py --world-size 8"
    ),
    "--parallel.dp_shard 4 --parallel.tp 2": (
        "--parallel.dp_shard 4: x tp 2 = 8 must equal the number of ranks, 4; -1 uses all remaining ranks"
        "; for 8 ranks: NGPU=8 ./run_llama_train.sh, or plan.py --world-size 8"
    ),
    "--parallel.cp 2 --parallel.reshard_after_forward 3": (
        "--parallel.reshard_after_forward 3: must divide dp_shard 2 x cp 2 = 4 and be below 4; "
        "'always' reshards over all 4 ranks"
    ),
    "--parallel.tp 4 --model.overrides.n_kv_heads 2": ("--parallel.tp 4: must divide n_kv_heads 2 of llama3/debug"),
    "--model.name qwen3 --model.size debug --model.overrides.rope_is_long true": (
        "--model.overrides.rope_is_long true: must be false for [training] seq_len = 128"
    ),
    "--model.name qwen3 --model.overrides.rope_factor 4": (
        "--model.overrides.rope_factor 4: rope_factor 4.0 must be 1.0, because rope_type default does not use it"
    ),
    "--model.name olmo3 --model.overrides.rope_type default": (
        "--model.overrides.rope_type default: rope_factor 8.0 must be 1.0, because rope_type default does not use it"
    ),
    "--parallel.tp 4 --model.overrides.n_heads 2 --model.overrides.n_kv_heads 2": (
        "--parallel.tp 4: must divide n_heads 2 of llama3/debug"
    ),
    "--parallel.tp 4 --model.overrides.hidden_dim 350": "--parallel.tp 4: must divide hidden_dim 350 of llama3/debug",
    "--parallel.tp 4 --model.overrides.vocab_size 6": (
        "--parallel.tp 4: the last rank would have no vocabulary row, because vocab_size of llama3/debug is 6"
    ),
    "--parallel.tp 4 --training.seq_len 130": (
        "--parallel.tp 4: must divide seq_len 130; or set sequence_parallel = false"
    ),
    "--parallel.cp 4 --training.seq_len 132": "--parallel.cp 4: 2 x cp = 8 must divide seq_len 132",
    "--parallel.pp 4 --model.overrides.n_layers 3": (
        "--parallel.pp 4: makes 4 stages (4 ranks x 1 per rank), but the model has only 3 blocks"
    ),
    "--parallel.pp 4 --parallel.pipeline_schedule Interleaved1F1B --model.overrides.n_layers 7": (
        "--parallel.pp 4: makes 8 stages (4 ranks x 2 per rank), but the model has only 7 blocks"
    ),
    "--parallel.pp 2 --parallel.pipeline_split_points layers.9": (
        "--parallel.pipeline_split_points layers.9: layers.9 is not a block; expected layers.1 to layers.7"
    ),
    "--parallel.pp 2 --training.local_batch_size 16": (
        "--parallel.pp 2: the step has 1 microbatch of local_batch_size samples, but 1F1B needs at least 2"
    ),
    "--parallel.pp 4 --parallel.pipeline_schedule DualPipeV --training.local_batch_size 8": (
        "--parallel.pp 4: the step has 4 microbatches of local_batch_size samples, but DualPipeV needs at least 8"
    ),
    "--parallel.pp 2 --parallel.pipeline_schedule Interleaved1F1B --training.global_batch_size 40": (
        "--parallel.pipeline_schedule Interleaved1F1B: the step has 5 microbatches of local_batch_size samples, which cannot be "
        "divided into 2 rounds of equal size; use a multiple of 2"
    ),
    "--parallel.pp 2 --training.batch_schedule.9 8": (
        "--training.batch_schedule.9 8: the step has 1 microbatch of local_batch_size samples, but 1F1B needs at least 2"
    ),
    "--parallel.pp 2 --parallel.pipeline_stages_per_rank 2": "--parallel.pipeline_stages_per_rank 2: 1F1B needs 1 stage per rank",
    "--parallel.pp 2 --parallel.pipeline_schedule ZBVZeroBubble --parallel.pipeline_stages_per_rank 3": (
        "--parallel.pipeline_stages_per_rank 3: ZBVZeroBubble needs 2 stages per rank"
    ),
    "--parallel.pp 2 --parallel.pipeline_schedule LoopedBFS --parallel.pipeline_stages_per_rank 1": (
        "--parallel.pipeline_stages_per_rank 1: LoopedBFS needs 2 or more stages per rank"
    ),
}


@pytest.mark.parametrize("command", COMBINATIONS)
def test_an_impossible_combination_is_an_error_of_one_line(command):
    if torch.__version__ < (2, 13) and any(name in command for name, s in SCHEDULES.items() if s.splits_backward):
        pytest.skip("torch cannot run this schedule, which is another error")
    config = load_config(command.split())
    with pytest.raises(ConfigError) as error:
        resolve(config, world_size=4)
    assert config.explain(error.value) == COMBINATIONS[command]


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_a_schedule_that_splits_backward_needs_a_recent_torch(monkeypatch, name):
    config = load_config(["--parallel.pp", "2", "--parallel.pipeline_schedule", name])
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    with pytest.raises(ConfigError) as error:
        resolve(config, world_size=2)
    line = f"--parallel.pipeline_schedule {name}: needs torch >= 2.13 (2.11.0 is installed): "
    assert config.explain(error.value).startswith(line)


def test_the_families_of_the_settings_are_those_of_the_models():
    assert typing.get_args(ModelFamily) == tuple(MODELS)
