"""Runs whose frozen base model is kept in 4 bits: independent of the layout, resumed, merged, refused."""

import math
import sys
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scripts import convert_hf
from tests.end_to_end.test_lora import STEADY, train
from tests.training_runs import checkpoint_of, combine, error_line, in_folder, measured, records, trainer_from
from trainer.adapters import nf4
from trainer.base.config import ConfigError
from trainer.base.config.exits import run_to_end
from trainer.base.config.load import load_config
from trainer.checkpoint.formats.folders import open_weights
from trainer.checkpoint.tensor_files import read_index
from trainer.run.resolve import resolve
from trainer.runtime.dtensor import to_local
from trainer.tools.planner.simulate import simulate
from trainer.tools.testing.layouts import Layout, flags, num_ranks
from trainer.tools.testing.parity import LIMITS, deviations, within

WIDE = ["--model.overrides.dim", "128", "--model.overrides.hidden_dim", "256"]
HEADS = ["--model.overrides.head_dim", "32"]  # of 4 heads
FAMILIES = {
    "llama": [],
    "qwen3": ["--model.name", "qwen3", *HEADS],
    "qwen2.5": ["--model.name", "qwen2.5"],
    **{name: ["--model.name", name, *HEADS] for name in ("mixtral", "gpt-oss")},
    "deepseek-v3": [
        *("--model.name", "deepseek-v3", "--model.overrides.expert_hidden_dim", "128"),
        *("--model.overrides.q_lora_rank", "64", "--model.overrides.kv_lora_rank", "64"),
        *("--model.overrides.v_head_dim", "32"),
    ],
}
"""Models of a tiny run whose rows are multiples of 64, also on two tensor-parallel ranks."""
NF4 = ["--lora.rank", "4", "--optimizer.lr", "1e-2", "--lora.base_dtype", "nf4", *STEADY]


@pytest.fixture(scope="module")
def bases(ranks, tiny, tmp_path_factory):
    """Name of a family, number of layers -> flags of a model with a trained base."""
    folder, made = tmp_path_factory.mktemp("bases"), {}

    def base(family, n_layers=2):
        key, run = (family, n_layers), folder / f"{family}-{n_layers}"
        if key not in made:
            argv = [*tiny, *WIDE, *FAMILIES[family], "--model.overrides.n_layers", str(n_layers)]
            ranks(1).run(train, [*argv, *in_folder(run), "--training.steps", "1"])
            made[key] = combine([*argv, "--checkpoint.init_from", str(run)])
        return made[key]

    return base


ROWS = [
    "dp_shard=2",
    "dp_shard=3 training.local_batch_size=1 training.global_batch_size=6",  # uneven rows
    "dp_replicate=2 dp_shard=2 lora.base_dtype=nf4_double",
    "tp=2 lora.base_dtype=nf4_double",
    "tp=2 sequence_parallel=false",
    "dp_shard=2 tp=2 activation_checkpoint.mode=full",
    "cp=2 data.document_mask=true activation_checkpoint.mode=selective lora.base_dtype=nf4_double",
    "dp_shard=2 pp=2 lora.base_dtype=nf4_double",
    "pp=2 pipeline_schedule=ZBVZeroBubble",
    "dp_shard=2 cpu_offload=true",
    "dp_shard=2 training.parameter_dtype=bf16 training.compute_dtype=bf16",
    "tp=2 lora.base_dtype=nf4_double qwen2.5",
    "dp_shard=2 tp=2 ep=2 lora.base_dtype=nf4_double mixtral",
    "tp=2 ep=2 activation_checkpoint.mode=selective gpt-oss",
    "dp_shard=2 tp=2 deepseek-v3",
]


@pytest.mark.parametrize("text", ROWS)
def test_a_base_in_4_bits_has_the_losses_and_gradients_of_one_rank(ranks, bases, on_one_rank, tmp_path, text):
    last = text.split()[-1]
    family = last if last in FAMILIES else "llama"
    layout = Layout.parse(text.removesuffix(family).strip())
    base = bases(family, 4 if "pp=" in text else 2)
    argv = combine([*base, *NF4, "--training.steps", "3", "--training.local_batch_size", "2"])
    size = num_ranks(load_config(combine([*argv, *flags(layout.settings)])).parallel)
    expected = on_one_rank(*combine([*argv, *flags(layout.single_rank_settings)]))
    run = measured(ranks, size, [*argv, *flags(layout.settings)], tmp_path / "run")
    deviation = deviations(expected, run)
    assert within(deviation, LIMITS["bf16" if "bf16" in text else "fp32"]), deviation


# ---------------------------------------------------------------- memory and checkpoints


class LargestValues(TorchDispatchMode):
    """Records the shapes of floating-point tensors with more values than `limit` for which operators allocate memory."""

    def __init__(self, limit):
        super().__init__()
        self.limit, self.shapes = limit, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        given, made = (
            [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in ((args, kwargs), result)
        )
        storages = {t.untyped_storage().data_ptr() for t in given if t.device.type != "meta"}
        for t in made:
            is_large = t.is_floating_point() and t.numel() > self.limit and t.device.type != "meta"
            if is_large and t.untyped_storage().data_ptr() not in storages:
                self.shapes.add(tuple(t.shape))
        return result


def quantized_parts(argv):
    """Build a trainer on this rank, with small pieces. Return the bytes of its frozen parts, the number of values that they stand
    for, and the shapes of the larger tensors that were used meanwhile."""
    limit = 2**13
    with patch.object(nf4, "_CHUNK", limit), LargestValues(limit) as recorded:
        trainer = trainer_from(combine(argv))
    weights = [weight.parts for weight in trainer.engine.quantized.values()]
    num_bytes = sum(to_local(part).nbytes for parts in weights for part in parts.values())
    return num_bytes, sum(2 * to_local(parts[nf4.CODES]).numel() for parts in weights), recorded.shapes


@pytest.mark.parametrize(("base_dtype", "most"), [("nf4", 0.532), ("nf4_double", 0.52)])
def test_a_rank_holds_its_share_of_the_bytes(ranks, bases, tmp_path, base_dtype, most):
    argv = [*bases("llama"), *NF4, "--lora.base_dtype", base_dtype, "--training.local_batch_size", "4"]
    counts = ranks(2).run(quantized_parts, [*argv, *in_folder(tmp_path / "run")])
    resolved = resolve(load_config(combine(argv)), 2)
    num_values = sum(
        p.numel()
        for n, p in resolved.spec.model(resolved.sizes).named_parameters()
        if n in resolved.parameter_storage.quantized
    )
    assert sum(values for _, values, _ in counts) == num_values and counts[0][:2] == counts[1][:2]
    # Only the embedding and the output, which are not quantized, are in memory as values: as a whole and as shards.
    assert all(shapes == {(2048, 128), (1024, 128)} for _, _, shapes in counts)
    row_maxima = 4 / 128 if base_dtype == "nf4_double" else 0  # at 128 columns; 4 / 4096 in Llama 3 8B
    assert counts[0][0] / counts[0][1] <= most + row_maxima
    (plan,) = simulate([(load_config(combine(argv)), 0)], 2, on_gpu=False)
    assert max(plan.timeline["parameters"]) == pytest.approx(
        resolved.base_bytes / 2 + 2 * resolved.num_trained, rel=0.02
    )


def test_a_checkpoint_holds_the_adapter_alone_and_resumes_bitwise(ranks, bases, tmp_path):
    argv = [*bases("llama"), *NF4, "--lora.base_dtype", "nf4_double", "--training.local_batch_size", "4"]
    complete = ranks(2).run(train, [*argv, *in_folder(tmp_path / "a"), "--training.steps", "4"])
    ranks(2).run(train, [*argv, *in_folder(tmp_path / "b"), "--training.steps", "2"])
    resumed = ranks(2).run(train, [*argv, *in_folder(tmp_path / "b"), "--training.steps", "4"])
    assert resumed[0].weights == complete[0].weights
    names = {name for name in read_index(checkpoint_of(tmp_path / "a")) if name.startswith("model/")}
    assert names and all(name.endswith(("lora_a", "lora_b")) for name in names)
    other = [*argv, *in_folder(tmp_path / "b"), "--training.steps", "6", "--lora.base_dtype", "nf4"]
    (line, _) = ranks(2).run(error_line, other)
    assert 'lora.base_dtype was "nf4_double", is "nf4"' in line


def test_the_reference_of_dpo_is_the_quantized_base(ranks, bases, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "a{i}", "chosen": "b{i * i}", "rejected": "c"}}\n' for i in range(40)))
    argv = [*bases("llama"), *NF4, "--training.local_batch_size", "4", "--preference.loss", "dpo"]
    argv += ["--data.dataset", "preference", "--data.path", str(pairs), "--data.packing", "best-fit"]
    argv += ["--data.long_documents", "drop", "--data.document_mask", "true", "--training.steps", "1"]
    argv += ["--data.store_folder", str(tmp_path / "stores"), "--training.global_batch_size", "8"]
    ranks(2).run(train, [*argv, *in_folder(tmp_path / "run")])
    (record,) = records(tmp_path / "run")
    assert record["loss"] == pytest.approx(math.log(2), abs=1e-5)


# ---------------------------------------------------------------- merging


def printed(argv):
    """Train, and return what the run prints."""
    with redirect_stdout(StringIO()) as text:
        train(argv)
    return text.getvalue()


def test_an_adapter_is_merged_into_the_base_that_it_was_trained_on_or_into_the_original(
    ranks, bases, tmp_path, monkeypatch, capsys
):
    """The first loss of a run that starts from a merged model is that of a run that continues with the adapter."""
    argv = combine([*bases("llama"), *NF4, "--lora.base_dtype", "nf4_double", "--training.steps", "1"])
    ranks(1).run(train, [*argv, *in_folder(tmp_path / "run"), "--training.steps", "2"])
    continued = [*argv, "--lora.init_from", str(tmp_path / "run"), *in_folder(tmp_path / "continued")]
    ranks(1).run(train, continued)
    (expected,) = records(tmp_path / "continued")
    losses = {}
    for into in ("quantized", "original"):
        out = tmp_path / into
        words = ["merge", str(tmp_path / "run"), str(out), "--dtype", "fp32", "--into", into]
        monkeypatch.setattr(sys, "argv", ["convert_hf.py", *words])
        convert_hf.main()
        warning = "was trained on a base model in 4 bits, nf4_double (fourth roots of scales), and is merged into the original"
        assert (warning in capsys.readouterr().err) == (into == "original")
        with safe_open(out / "model.safetensors", framework="pt") as tensors:
            assert tensors.metadata().get("meshwright_base") == {"quantized": "nf4_double"}.get(into)
        merged = [*argv, "--lora.base_dtype", "keep", "--checkpoint.init_from", str(out)]
        ranks(1).run(train, [*merged, *in_folder(tmp_path / f"from_{into}")])
        (record,) = records(tmp_path / f"from_{into}")
        losses[into] = record["loss"]
    (text,) = ranks(1).run(printed, [*continued, "--lora.base_dtype", "keep", *in_folder(tmp_path / "keep")])
    assert "which was trained with [lora] base_dtype = nf4_double (fourth roots of scales), not keep" in text
    assert losses["quantized"] == pytest.approx(expected["loss"], rel=1e-6)
    assert abs(losses["original"] / expected["loss"] - 1) > 1e-5
    source = open_weights(checkpoint_of(tmp_path / "run"), alone=True)
    assert torch.equal(
        source.rows("layers.0.attention.wo.weight", 0, 3),
        source.base.rows("layers.0.attention.wo.weight", 0, 3)
        + source.adapter.product("layers.0.attention.wo.weight", slice(0, 3), slice(None)),
    )


# ---------------------------------------------------------------- errors


def test_a_base_that_is_not_quantized_cannot_be_merged_into_as_such(ranks, bases, tmp_path, monkeypatch, capsys):
    argv = [*bases("llama"), *NF4, "--lora.base_dtype", "keep", *in_folder(tmp_path / "run"), "--training.steps", "1"]
    ranks(1).run(train, argv)
    words = ["merge", str(tmp_path / "run"), str(tmp_path / "out"), "--into", "quantized"]
    monkeypatch.setattr(sys, "argv", ["convert_hf.py", *words])
    with pytest.raises(SystemExit) as exit:
        run_to_end(convert_hf.main)
    reason = f"because {checkpoint_of(tmp_path / 'run')} was trained on a base model that is not quantized"
    assert (exit.value.code, capsys.readouterr().err.strip()) == (2, f"--into quantized has no effect, {reason}")


MISTAKES = {
    ("--lora.base_dtype", "4bit"): "--lora.base_dtype 4bit: expected one of keep, nf4, nf4_double; write nf4",
    ("--lora.targets", "*.wz"): "--lora.targets *.wz: *.wz matches no linear module of the blocks",
    ("--model.overrides.dim", "96"): (
        "--lora.base_dtype nf4: needs rows of a multiple of 64 values, but those of layers.0.attention.wq.weight have 96"
    ),
    ("--parallel.tp", "4"): (
        "--parallel.tp 4: splits blocks of [lora] base_dtype: 64 x tp = 256 must divide the 128 columns of "
        "layers.0.attention.wo.weight"
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(tiny, mistake):
    argv = combine([*tiny, *WIDE, "--checkpoint.init_from", ".", *NF4, *mistake])
    size = 4 if "--parallel.tp" in mistake else 1
    try:
        config = load_config(argv)
    except ConfigError as error:
        line = str(error)
    else:
        with pytest.raises(ConfigError) as error:
            resolve(config, size)
        line = config.explain(error.value)
    assert line == MISTAKES[mistake]


def test_old_versions_of_torch_are_refused_with_fsdp(tiny):
    config = load_config(combine([*tiny, *WIDE, "--checkpoint.init_from", ".", *NF4]))
    with patch.object(torch, "__version__", TorchVersion("2.11.0")):
        resolve(config, 1)
        with pytest.raises(ConfigError) as error:
            resolve(config, 2)
    line = (
        "--lora.base_dtype nf4: needs torch >= 2.12 with FSDP (2.11.0 is installed): one rank and tp alone need no FSDP"
    )
    assert config.explain(error.value) == line
