"""Measure components of the trainer: the loss, saves, loading of weights, data preparation and loading.

python scripts/dev/benchmark.py loss --dim 64 --dtype fp32
python scripts/dev/benchmark.py load-weights hf_model/ --ranks 4 --tp 2
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import tiktoken.load
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.checkpoint.async_save import WRITERS, AsyncCheckpointer
from trainer.checkpoint.weights import WeightSource
from trainer.config import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    ConfigError,
    DataConfig,
    ParallelConfig,
    TokenizerConfig,
)
from trainer.config.command_line import Arguments, positive_float, positive_int
from trainer.data.sampling.loader import BatchPartition, SampleOrder, training_batches
from trainer.data.sampling.mixture import parse_mixture
from trainer.data.sampling.samples import ConcatSamples
from trainer.data.sources import open_source
from trainer.data.store.store import open_store, read_description
from trainer.data.tokenizer.backends import DEFAULT_FILE, LLAMA3_PATTERN, load_tokenizer
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.loss import CrossEntropyHead
from trainer.parallel.attention import CPU_BACKEND
from trainer.parallel.init_weights import initialize
from trainer.parallel.mesh import Meshes, ParallelDims
from trainer.parallel.parallelize import parallelize
from trainer.parallel.pipeline import partition_blocks
from trainer.planning.recorder import Allocation, Recorder
from trainer.runtime.device import DTYPES, memory_now, memory_peak
from trainer.system.process import cores
from trainer.system.units import GIB
from trainer.testing.layouts import Table
from trainer.testing.ranks import LocalRanks

LOADED_TOKENS = 2**25
"""Number of tokens that one repeat loads."""


# ---------------------------------------------------------------- loss


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the loss as torch computes it from full logits."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def chunked(chunk_tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda hidden, weight, labels: CrossEntropyHead(labels, chunk_tokens)(hidden, weight)


def peaks(loss: Callable, seq: int, vocab: int, dim: int, tp: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return two peaks of memory in forward and backward, in bytes and without the inputs. The first peak excludes and the
    second one includes tensors of the weight's shape, such as its gradient."""
    mesh = init_device_mesh("cpu", (tp,)) if tp > 1 else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(1, seq, dim, dtype=dtype, requires_grad=True)
        weight = torch.empty(-(-vocab // tp), dim, dtype=dtype, requires_grad=True)
        labels = torch.zeros(1, seq, dtype=torch.int64)
        inputs = hidden, weight
        if mesh is not None:
            full = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False, shape=(vocab, dim), stride=(dim, 1))
            inputs = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False), full
        with Recorder(on_gpu=True) as recorder:
            loss(*inputs, labels).backward()

    def peak(include: Callable[[Allocation], bool]) -> int:
        return int(recorder.timeline(lambda a: a.born >= 0 and include(a)).sum(axis=0).max())

    return peak(lambda a: a.shape != weight.shape), peak(lambda a: True)


def loss_peaks(
    seq: int, vocab: int, dim: int, degrees: list[int], chunk_tokens: int, dtype: str
) -> list[tuple[str, int, int]]:
    """Return (name, peak bytes of activations, peak bytes including the gradient of the weight)."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(degrees))
    rows = [("full logits", *peaks(full_logits, seq, vocab, dim, 1, DTYPES[dtype]))]
    for tp in degrees:
        name = "chunked" if tp == 1 else f"chunked, vocabulary over tp {tp}"
        rows.append((name, *peaks(chunked(chunk_tokens), seq, vocab, dim, tp, DTYPES[dtype])))
    dist.destroy_process_group()
    return rows


def print_loss(seq: int, vocab: int, dim: int, chunk_tokens: int, tp: list[int], dtype: str) -> None:
    if (max(tp) - 1) * -(-vocab // max(tp)) >= vocab:
        raise ConfigError("", f"--tp {max(tp)}: a rank would have no rows of --vocab {vocab}")
    rows = loss_peaks(seq, vocab, dim, tp, chunk_tokens, dtype)
    table = Table(loss="<34", activations=">12", of_full=">9", with_weight_gradient=">22")
    for name, activations, total in rows:
        fraction = f"1/{rows[0][1] / activations:.1f}"
        table.row(name, f"{activations / GIB:.2f} GiB", fraction, f"{total / GIB:.2f} GiB")


# ---------------------------------------------------------------- checkpoint


def saves(folder: Path, gib: float, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return mode -> (seconds blocked, seconds in the background) of each save. Run on each rank. The state consists of
    matrices of 4 MiB, sharded over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 1024 // dist.get_world_size()
    state = {
        f"state/{i}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)], run_check=False)
        for i in range(round(gib * GIB / 2**22))
    }
    cpu = torch.device("cpu")
    savers = {mode: AsyncCheckpointer(CheckpointConfig(async_mode=mode), folder / mode, cpu, state) for mode in WRITERS}
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in WRITERS}
    for step in range(repeats + 1):
        for mode, saver in savers.items():
            dist.barrier()
            start = time.perf_counter()
            saver.save(step, state, {}, {})
            saver.before_update()
            blocked = time.perf_counter() - start
            (result,) = saver.wait()
            if result.failure is not None:
                raise result.failure
            if step:  # the first save is a warm-up
                times[mode].append((blocked, result.background_s))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / mode)
    for saver in savers.values():
        saver.close()
    return times


def print_saves(gib: float, ranks: int, repeats: int, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        of_ranks = LocalRanks(ranks).run(saves, Path(own), gib, repeats)
    table = Table(mode="<10", blocked=">10", of_off=">9", min_to_max=">18", background=">12")
    for mode in WRITERS:
        slowest = [
            tuple(map(max, zip(*of_one_save, strict=True)))
            for of_one_save in zip(*(r[mode] for r in of_ranks), strict=True)
        ]
        blocked, background = zip(*slowest, strict=True)
        if mode == "off":
            off = statistics.median(blocked)
        table.row(
            mode,
            f"{statistics.median(blocked):.3f} s",
            f"{100 * statistics.median(blocked) / off:.1f} %",
            f"{min(blocked):.3f} - {max(blocked):.3f} s",
            f"{statistics.median(background):.3f} s",
        )


# ---------------------------------------------------------------- load-weights


def load_weights(folder: Path, tp: int) -> tuple[int, int, int] | str:
    """Return the bytes of the process before loading, of the rank's shards, and at the peak; or an error. Run on each rank."""
    try:
        return _load_weights(folder, tp)
    except ConfigError as error:
        return str(error)


def _load_weights(folder: Path, tp: int) -> tuple[int, int, int]:
    cpu = torch.device("cpu")
    before = memory_now(cpu)
    parallel = ParallelConfig(tp=tp)
    weights = WeightSource(folder)
    spec, sizes = weights.spec, weights.sizes
    with torch.device("meta"):
        all_stages = partition_blocks(spec.model(sizes), spec.plan(sizes), parallel)
    meshes = Meshes(ParallelDims.from_config(parallel, dist.get_world_size()), cpu)
    layout = (spec.plan(sizes), all_stages, meshes, parallel, ActivationCheckpointConfig(), CompileConfig(), "fp32")
    (network,) = parallelize(
        lambda: spec.model(sizes), *layout, document_mask=False, attention_backend=CPU_BACKEND
    ).values()
    parameters = dict(network.named_parameters())
    initialize(network, cpu, 0, loaded=parameters)
    weights.load_into(parameters)
    shards = sum(p.to_local().numel() * p.element_size() for p in parameters.values() if isinstance(p, DTensor))
    return before, shards, memory_peak(cpu)


def print_load_weights(folder: Path, ranks: int, tp: int) -> None:
    of_ranks = LocalRanks(ranks).run(load_weights, folder, tp)
    if isinstance(of_ranks[0], str):
        raise ConfigError("", of_ranks[0])
    table = Table(rank="<8", process=">12", shards=">12", peak=">12", beyond_both=">12")
    for rank, (before, shards, peak) in enumerate(of_ranks):
        columns = (f"{value / 2**20:,.0f} MiB" for value in (before, shards, peak, peak - before - shards))
        table.row(f"rank {rank}", *columns)


# ---------------------------------------------------------------- data


def interleaved(tasks: Mapping[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Run the tasks alternately; each returns its number of tokens. Return their tokens per second, without a warm-up repeat."""
    rates: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            tokens = task()
            if repeat:
                rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def preparing(folder: Path, mib: int, tokenizer: Tokenizer) -> dict[str, Callable[[], int]]:
    """Return two tasks: the baseline, and the trainer's preparation, which writes its store to stores/."""
    source = open_source(DataConfig(), tokenizer)
    texts, num_bytes = [], 0
    for text in itertools.cycle(document for document in source.documents() if isinstance(document, str)):
        if num_bytes >= mib * 2**20:
            break
        texts.append(text)
        num_bytes += len(text.encode())
    with (folder / "texts.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    ranks = tiktoken.load.load_tiktoken_bpe(str(DEFAULT_FILE))
    bare = tiktoken.Encoding("bare", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})

    # A subprocess, because worker processes import the main module, and this script imports torch.
    settings = {"dataset": "jsonl", "path": folder / "texts.jsonl", "store_folder": folder / "stores"}
    flags = [word for name, value in settings.items() for word in (f"--data.{name}", str(value))]
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *flags]

    def prepare() -> int:
        shutil.rmtree(folder / "stores", ignore_errors=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        splits = read_description(_store_in(folder))["splits"]
        return splits["train"]["tokens"] + splits["held_out"]["tokens"]

    def baseline() -> int:
        return sum(map(len, bare.encode_ordinary_batch(texts, num_threads=cores())))

    return {"tiktoken alone": baseline, "prepared to a store": prepare}


def _store_in(folder: Path) -> Path:
    (store,) = (path.parent for path in folder.glob("stores/*/store.json"))
    return store


def loading(store: Path, local_batch: int, seq: int) -> dict[str, Callable[[], int]]:
    samples = ConcatSamples(open_store(store, "train"), seq, reset_positions=False)
    order = SampleOrder((len(samples),), parse_mixture((), ("data",)), seed=0, shuffle=True)
    cut = BatchPartition(global_batch_size=local_batch, local_batch_size=local_batch, rank=0, ranks=1)
    batches = training_batches(samples, order, cut, 0, DataConfig(), pin_memory=False)
    microbatches = LOADED_TOKENS // (local_batch * seq)
    tokens = microbatches * local_batch * seq
    generator = np.random.default_rng(0)

    def load() -> int:
        for _ in range(microbatches):
            next(batches)
        return tokens

    def baseline() -> int:
        mapped = samples.store.tokens
        for _ in range(microbatches):
            rows = generator.integers(0, len(samples), local_batch)[:, None] * seq + np.arange(seq + 1)
            torch.from_numpy(mapped[rows].astype(np.int64))
        return tokens

    return {"memory-mapped rows alone": baseline, "loaded from the store": load}


def print_data(mib: int, local_batch: int, seq: int, repeats: int, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        rates = interleaved(preparing(Path(own), mib, load_tokenizer(TokenizerConfig())), repeats)
        rates |= interleaved(loading(_store_in(Path(own)), local_batch, seq), repeats)
    table = Table(task="<26", tokens_per_second=">17", min_to_max=">29", of_baseline=">13")
    for i, (name, of_repeats) in enumerate(rates.items()):
        median = statistics.median(of_repeats)
        if i % 2 == 0:
            baseline = median
        spread = f"{min(of_repeats):,.0f} - {max(of_repeats):,.0f}"
        table.row(name, f"{median:,.0f}", spread, f"{100 * median / baseline:.0f} %")


def main() -> None:
    parser = Arguments(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[..., None], text: str, **integers: tuple[int, str]) -> argparse.ArgumentParser:
        """integers: name of an integer option -> (default, help)."""
        subparser = commands.add_parser(name, help=text, doc=text)
        subparser.set_defaults(run=run)
        for option, (default, help) in integers.items():
            flag = f"--{option.replace('_', '-')}"
            subparser.add_argument(flag, type=positive_int, default=default, metavar="N", help=help)
        return subparser

    loss = command(
        "loss", print_loss, "peak memory of output projection and loss, simulated with fake tensors",
        seq=(8192, "tokens"), vocab=(128_256, "vocabulary size"), dim=(4096, "width of the hidden states"),
        chunk_tokens=(1024, "tokens of a chunk of logits"),
    )  # fmt: skip
    loss.add_argument(
        "--tp", type=positive_int, nargs="+", default=[1, 2, 8], metavar="N", help="ranks that share the vocabulary"
    )
    loss.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of hidden states and weight")
    checkpoint = command(
        "checkpoint", print_saves,
        "time that a save blocks training, in each async mode: the slowest rank of each save, the median of all saves",
        ranks=(2, "ranks on this CPU that share the state"), repeats=(7, "saves of each mode"),
    )  # fmt: skip
    checkpoint.add_argument("--gib", type=positive_float, default=1.2, metavar="X", help="size of the state")
    checkpoint.add_argument("--folder", metavar="PATH", help="where to save (default: a temporary folder)")
    weights = command(
        "load-weights", print_load_weights, "memory of each rank that loads its shards, as a run with checkpoint.init_from does",
        ranks=(2, "ranks on this CPU that share the model"), tp=(1, "tensor-parallel ranks among them"),
    )  # fmt: skip
    weights.add_argument("folder", type=Path, help="a model in Hugging Face's format, or a checkpoint")
    data = command(
        "data", print_data, "tokens per second of preparing and loading data, each next to a baseline without the trainer",
        mib=(64, "text to prepare"), local_batch=(8, "samples of a microbatch"), seq=(4096, "tokens of a sample"),
        repeats=(3, "repeats of each task; the table has their median"),
    )  # fmt: skip
    data.add_argument("--folder", metavar="PATH", help="where to make the store (default: a temporary folder)")
    args = vars(parser.parse_args())
    run = args.pop("run")
    del args["command"]
    try:
        run(**args)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
