"""Models that are loaded in Python, in a process without a process group."""

import inspect
import shutil

import pytest
import torch
import torch.distributed as dist

from models.context import Context
from tests.training_runs import checkpoint_of, combine, in_folder, train
from trainer.base.config import ConfigError
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.formats.huggingface_writer import write_huggingface
from trainer.inference import load_model
from trainer.inference.generate import TextGenerator

TOKENS = torch.tensor([[1792, 20, 31, 44, 5, 17], [3, 1, 4, 1, 5, 9]])


@pytest.fixture(scope="module")
def run(ranks, tiny, tmp_path_factory):
    """A run folder with two checkpoints, and an export of the newest."""
    folder = tmp_path_factory.mktemp("load") / "run"
    ranks(1).run(
        train, combine([*tiny, *in_folder(folder), "--checkpoint.interval_steps", "2", "--optimizer.lr", "1e-2"])
    )
    write_huggingface(open_weights(checkpoint_of(folder), alone=True), folder / "huggingface", torch.float32)
    return folder


@pytest.fixture(scope="module")
def adapter(ranks, tiny, run, tmp_path_factory):
    """The folder of a run that trains an adapter and a full module."""
    folder = tmp_path_factory.mktemp("adapter") / "run"
    argv = [*tiny, *in_folder(folder), "--checkpoint.init_from", str(run), "--lora.rank", "4"]
    ranks(1).run(train, combine([*argv, "--lora.train_fully", "norm", "--optimizer.lr", "1e-2"]))
    return folder


def logits_of(path, **options):
    model, _ = load_model(path, **options)
    with torch.no_grad():
        return model(TOKENS)


def test_a_run_folder_a_checkpoint_and_an_export_give_the_logits_of_transformers(run):
    assert not dist.is_initialized()
    transformers = pytest.importorskip("transformers")
    exported = transformers.AutoModelForCausalLM.from_pretrained(run / "huggingface", dtype=torch.float32)
    expected = exported(TOKENS).logits
    for path in (run, str(run), checkpoint_of(run), run / "huggingface"):
        torch.testing.assert_close(logits_of(path), expected, rtol=1e-4, atol=1e-4)
    oldest = min((run / "checkpoints").iterdir())
    assert (logits_of(oldest) - expected).abs().max() > 0.01


def test_a_model_that_is_called_twice_returns_the_same_logits(run):
    model, tokenizer = load_model(run)
    assert torch.equal(model(TOKENS), model(TOKENS))
    assert tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"
    # The model of a generator has a cache, to which each call appends, so it is not offered.
    assert "model" not in inspect.signature(TextGenerator.load).parameters and not hasattr(TextGenerator, "model")


def test_without_a_context_each_sequence_is_one_document(run):
    model, _ = load_model(run)
    positions = torch.arange(TOKENS.shape[1]).repeat(2, 1)
    context = Context(positions, documents=torch.zeros_like(TOKENS), samples=torch.arange(2))
    assert torch.equal(model(TOKENS), model(TOKENS, context))


def test_an_adapter_is_merged_with_its_base(run, adapter):
    base, trained = logits_of(run), logits_of(adapter)
    assert (trained - base).abs().max() > 0.01
    assert torch.equal(trained, logits_of(adapter, base=run))


def test_an_adapter_whose_base_has_moved_needs_its_new_path(run, adapter, tmp_path):
    shutil.copytree(run, tmp_path / "moved")
    assert torch.equal(logits_of(adapter, base=tmp_path / "moved"), logits_of(adapter))
    with pytest.raises(ConfigError, match="is not the base model with which"):
        load_model(adapter, base=min((run / "checkpoints").iterdir()))
    with pytest.raises(ConfigError, match=r"has no effect, because .* contains no adapter"):
        load_model(run, base=run)


def test_dtype_of_a_loaded_model(run):
    model, _ = load_model(run, dtype=torch.bfloat16)
    assert model(TOKENS).dtype == torch.bfloat16


def test_a_damaged_checkpoint_and_a_folder_without_a_model_are_refused(run, tmp_path):
    damaged = tmp_path / checkpoint_of(run).name
    shutil.copytree(checkpoint_of(run), damaged)
    file = next(damaged.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=file.name):
        load_model(damaged)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"contains neither manifest\.json of a checkpoint nor config\.json"):
        load_model(tmp_path / "empty")
    with pytest.raises(ConfigError, match="no such"):
        load_model(tmp_path / "missing")


@pytest.mark.parametrize("dtype", ["float16", torch.int32, None])
def test_a_dtype_that_is_none_of_floating_point_numbers_is_refused(run, dtype):
    with pytest.raises(ConfigError, match=r"^dtype .*: must be a floating-point dtype, such as torch\.bfloat16$"):
        load_model(run, dtype=dtype)


@pytest.mark.parametrize(
    ("path", "options", "line"),
    [
        ("", {}, "path '': must be the path of a checkpoint, a run folder or a model folder"),
        (None, {}, "path None: must be the path of a checkpoint, a run folder or a model folder"),
        ("hf://x", {}, "path hf://x: must be a local path, not a URL: copy the files to a folder, or mount hf:// as one"),
        ("x", {"max_seq_len": -1}, "max_seq_len -1: must be at least 1, or 0 for the sequence length of training"),
        ("x", {"device": "gpu"}, "device 'gpu': expected \"cpu\", \"cuda\", or one of several GPUs such as \"cuda:1\""),
        ("x", {"device": None}, "device 'None': expected \"cpu\", \"cuda\", or one of several GPUs such as \"cuda:1\""),
        ("x", {"device": "cuda:99"}, f"device 'cuda:99': torch {torch.__version__} finds no such device"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_load_model_are_one_line(path, options, line):
    with pytest.raises(ConfigError) as error:
        load_model(path, **options)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ([[1, 2]], "tokens must be a tensor of the shape (batch, seq), not list"),
        (
            torch.tensor([1, 2]),
            "tokens must have the shape (batch, seq) and an integer dtype, not the shape (2,) and the dtype torch.int64",
        ),
        (
            torch.zeros(1, 2),
            "tokens must have the shape (batch, seq) and an integer dtype, not the shape (1, 2) and the dtype torch.float32",
        ),
        (torch.tensor([[3, 2048]]), "tokens must be from 0 to 2047, not 3 to 2048"),
    ],
)
def test_tokens_that_a_loaded_model_cannot_read_are_one_line(run, tokens, line):
    model, _ = load_model(run)
    with pytest.raises(ValueError) as error:
        model(tokens)
    assert str(error.value) == line


def test_an_adapter_of_peft_names_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta-llama/Llama-3.2-1B"}')
    with pytest.raises(ConfigError, match=r"use its base model \(meta-llama/Llama-3.2-1B\) here"):
        load_model(tmp_path)
