"""Measure pieces of the trainer: python scripts/dev/benchmark.py loss | checkpoint | initial | data [...]

loss         peak memory of the output projection and the loss, forward and backward, on one rank: with the whole logits,
             chunk by chunk, and with the vocabulary cut over tp ranks. Fake tensors: nothing is computed, so any size fits
             any machine.
    --seq N            tokens (default: 8192)
    --vocab N          rows of the vocabulary (128256)
    --dim N            width of the hidden states (4096)
    --chunk-tokens N   tokens whose logits exist at the same time (1024)
    --tp N ...         ranks that the vocabulary is cut over (1 2 8)
    --dtype NAME       of hidden states and weight: bf16 or fp32 (bf16)

checkpoint   how long training stands still for a save, in every mode, taken in turns; of the ranks the slowest, of the
             repeats the median.
    --gib N            size of the state (default: 1.2)
    --ranks N          ranks that hold it, on this CPU (2)
    --repeats N        saves of each mode (7)
    --folder PATH      where to save (a temporary folder)

initial      memory of each rank that takes its shards of a model's weights, as a run does with checkpoint.init_from.
    FOLDER             a model in Hugging Face's format, or a checkpoint
    --ranks N          ranks that share it, on this CPU (default: 2)
    --tp N             of them, those that cut the matrices between them (1)

data         tokens per second, each beside what it is built on, in turns; of the repeats the median. Preparing the Python
             standard library's source, from JSON lines to a finished store, beside tiktoken's own batches of the same texts
             on as many threads; and loading microbatches from that store, beside reading the same rows of the mapped file.
    --mib N            text to prepare (default: 64)
    --local-batch N    samples of a microbatch (8)
    --seq N            tokens of a sample (4096)
    --repeats N        of each (3)
    --folder PATH      where the store is made (a temporary folder)
"""

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
from trainer.runtime.device import DTYPES, memory_now, memory_peak
from trainer.system.process import cores
from trainer.system.units import GIB
from trainer.testing.operators import Memory
from trainer.testing.ranks import LocalRanks

LOADED_TOKENS = 2**25
"""In one turn."""


def whole_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As it is done without a loss of one's own."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def chunked(chunk_tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda hidden, weight, labels: CrossEntropyHead(labels, chunk_tokens)(hidden, weight)


def peak(loss: Callable, seq: int, vocab: int, dim: int, tp: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes at the peak of forward and backward: of all but inputs and what has the weight's shape, and with that too."""
    mesh = init_device_mesh("cpu", (tp,)) if tp > 1 else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden = torch.empty(1, seq, dim, dtype=dtype, requires_grad=True)
        rows = -(-vocab // tp)
        weight = torch.empty(rows, dim, dtype=dtype, requires_grad=True)
        labels = torch.zeros(1, seq, dtype=torch.int64)
        arguments = hidden, weight
        if mesh is not None:
            whole = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False, shape=(vocab, dim), stride=(dim, 1))
            arguments = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False), whole
        peaks = []
        for ignored in (weight.shape, None):
            with Memory(ignored) as memory:
                loss(*arguments, labels).backward()
            peaks.append(memory.peak)
            hidden.grad = weight.grad = None
    return peaks[0], peaks[1]


def loss_table(
    seq: int, vocab: int, dim: int, degrees: list[int], chunk_tokens: int, dtype: str
) -> list[tuple[str, int, int]]:
    """Name, bytes of activations at their peak, bytes at the peak with the gradient of the weight."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(degrees))
    kind = DTYPES[dtype]
    table = [("whole logits", *peak(whole_logits, seq, vocab, dim, 1, kind))]
    for tp in degrees:
        name = "chunked" if tp == 1 else f"chunked, vocabulary over tp {tp}"
        table.append((name, *peak(chunked(chunk_tokens), seq, vocab, dim, tp, kind)))
    dist.destroy_process_group()
    return table


def saves(folder: Path, gib: float, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """On a rank: seconds blocked and in the background of each save, by mode. Parameters and two moments of
    matrices of 4 MiB, sharded over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 1024 // dist.get_world_size()
    state = {
        f"state/{number}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)], run_check=False)
        for number in range(round(gib * GIB / 2**22))
    }
    cpu = torch.device("cpu")
    savers = {mode: AsyncCheckpointer(CheckpointConfig(async_mode=mode), folder / mode, cpu, state) for mode in WRITERS}
    taken: dict[str, list[tuple[float, float]]] = {mode: [] for mode in WRITERS}
    for step in range(repeats + 1):
        for mode, saver in savers.items():
            dist.barrier()
            start = time.perf_counter()
            saver.save(step, state, {}, {})
            saver.before_update()
            blocked = time.perf_counter() - start
            (ended,) = saver.wait()
            if ended.failure is not None:
                raise ended.failure
            if step:  # the first one warms up
                taken[mode].append((blocked, ended.background_s))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / mode)
    for saver in savers.values():
        saver.close()
    return taken


def checkpoint_table(gib: float, ranks: int, repeats: int, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        of_ranks = LocalRanks(ranks).run(saves, Path(own), gib, repeats)
    print(f"{'':<10} {'blocked':>10} {'of off':>9} {'least - most':>18} {'beside training':>17}")
    whole = None
    for mode in WRITERS:
        blocked = [max(b for b, _ in repeat) for repeat in zip(*(taken[mode] for taken in of_ranks), strict=True)]
        beside = [max(b for _, b in repeat) for repeat in zip(*(taken[mode] for taken in of_ranks), strict=True)]
        middle = statistics.median(blocked)
        whole = whole or middle
        spread = f"{min(blocked):.3f} - {max(blocked):.3f} s"
        print(
            f"{mode:<10} {middle:>8.3f} s {100 * middle / whole:>7.1f} % {spread:>18} {statistics.median(beside):>15.3f} s"
        )


def taken_over(folder: Path, tp: int) -> tuple[int, int, int] | str:
    """Bytes of this rank: of the process before, of the shards, and the peak of all; or why there are none."""
    try:
        return _taken_over(folder, tp)
    except ConfigError as error:
        return str(error)


def _taken_over(folder: Path, tp: int) -> tuple[int, int, int]:
    cpu = torch.device("cpu")
    before = memory_now(cpu)
    parallel = ParallelConfig(tp=tp)
    weights = WeightSource(folder)
    spec, sizes = weights.spec, weights.sizes
    with torch.device("meta"):
        whole_pipeline = partition_blocks(spec.model(sizes), spec.plan(sizes), parallel)
    meshes = Meshes(ParallelDims.from_config(parallel, dist.get_world_size()), cpu)
    layout = (spec.plan(sizes), whole_pipeline, meshes, parallel, ActivationCheckpointConfig(), CompileConfig(), "fp32")
    (network,) = parallelize(
        lambda: spec.model(sizes), *layout, document_mask=False, attention_backend=CPU_BACKEND
    ).values()
    parameters = dict(network.named_parameters())
    initialize(network, cpu, 0, loaded=parameters)
    weights.load_into(parameters)
    shards = sum(p.to_local().numel() * p.element_size() for p in parameters.values() if isinstance(p, DTensor))
    return before, shards, memory_peak(cpu)


def initial_table(folder: Path, ranks: int, tp: int) -> None:
    of_ranks = LocalRanks(ranks).run(taken_over, folder, tp)
    if isinstance(of_ranks[0], str):
        raise ConfigError("", of_ranks[0])
    print(f"{'':<8} {'process':>12} {'its shards':>12} {'peak':>12} {'beyond both':>12}")
    for rank, (before, shards, most) in enumerate(of_ranks):
        columns = (f"{value / 2**20:>8,.0f} MiB" for value in (before, shards, most, most - before - shards))
        print(f"rank {rank:<3} {' '.join(columns)}")


def in_turns(works: Mapping[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each work, which returns its tokens; the first turn, which warms up, does not count."""
    rates: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            start = time.perf_counter()
            tokens = work()
            if turn:
                rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def preparing(folder: Path, mib: int, tokenizer: Tokenizer) -> dict[str, Callable[[], int]]:
    """Leaves the texts in texts.jsonl, and the last store in stores/."""
    source = open_source(DataConfig(), tokenizer)
    texts, size = [], 0
    for text in itertools.cycle(document for document in source.documents() if isinstance(document, str)):
        if size >= mib * 2**20:
            break
        texts.append(text)
        size += len(text.encode())
    with (folder / "texts.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    ranks = tiktoken.load.load_tiktoken_bpe(str(DEFAULT_FILE))
    bare = tiktoken.Encoding("bare", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})

    # As a command: worker processes import what was started, and of this script that is all of torch.
    settings = {"dataset": "jsonl", "path": folder / "texts.jsonl", "store_folder": folder / "stores"}
    words = [word for name, value in settings.items() for word in (f"--data.{name}", str(value))]
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *words]

    def ours() -> int:
        shutil.rmtree(folder / "stores", ignore_errors=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        splits = read_description(_store_in(folder))["splits"]
        return splits["train"]["tokens"] + splits["held_out"]["tokens"]

    def theirs() -> int:
        return sum(map(len, bare.encode_ordinary_batch(texts, num_threads=cores())))

    return {"tiktoken alone": theirs, "prepared to a store": ours}


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
    draw = np.random.default_rng(0)

    def ours() -> int:
        for _ in range(microbatches):
            next(batches)
        return tokens

    def theirs() -> int:
        mapped = samples.store.tokens
        for _ in range(microbatches):
            rows = draw.integers(0, len(samples), local_batch)[:, None] * seq + np.arange(seq + 1)
            torch.from_numpy(mapped[rows].astype(np.int64))
        return tokens

    return {"mapped rows alone": theirs, "loaded from the store": ours}


def data_table(mib: int, local_batch: int, seq: int, repeats: int, folder: str | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        rates = in_turns(preparing(Path(own), mib, load_tokenizer(TokenizerConfig())), repeats)
        rates |= in_turns(loading(_store_in(Path(own)), local_batch, seq), repeats)
    print(f"{'':<24} {'tokens/s':>13} {'least - most':>29} {'of the first':>13}")
    alone = 0.0
    for number, (name, of_repeats) in enumerate(rates.items()):
        middle = statistics.median(of_repeats)
        alone = alone if number % 2 else middle  # each second one stands on the first
        spread = f"{min(of_repeats):,.0f} - {max(of_repeats):,.0f}"
        print(f"{name:<24} {middle:>13,.0f} {spread:>29} {100 * middle / alone:>11.0f} %")


def loss_and_its_parts(seq: int, vocab: int, dim: int, chunk_tokens: int, tp: list[int], dtype: str) -> None:
    if (max(tp) - 1) * -(-vocab // max(tp)) >= vocab:
        raise ConfigError("", f"--tp {max(tp)}: leaves a rank without a row of --vocab {vocab}")
    table = loss_table(seq, vocab, dim, tp, chunk_tokens, dtype)
    print(f"{'':<34} {'activations':>12} {'of whole':>9} {'with the gradient of the weight':>32}")
    for name, activations, everything in table:
        share = table[0][1] / activations
        print(
            f"{name:<34} {activations / GIB:>8.2f} GiB {'1/' + format(share, '.1f'):>9} {everything / GIB:>28.2f} GiB"
        )


def main() -> None:
    parser = Arguments(__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    loss = kinds.add_parser("loss")
    loss.set_defaults(show=loss_and_its_parts)
    for name, default in (("seq", 8192), ("vocab", 128_256), ("dim", 4096), ("chunk-tokens", 1024)):
        loss.add_argument(f"--{name}", type=positive_int, default=default)
    loss.add_argument("--tp", type=positive_int, nargs="+", default=[1, 2, 8])
    loss.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    checkpoint = kinds.add_parser("checkpoint")
    checkpoint.set_defaults(show=checkpoint_table)
    checkpoint.add_argument("--gib", type=positive_float, default=1.2)
    checkpoint.add_argument("--ranks", type=positive_int, default=2)
    checkpoint.add_argument("--repeats", type=positive_int, default=7)
    checkpoint.add_argument("--folder")
    initial = kinds.add_parser("initial")
    initial.set_defaults(show=initial_table)
    initial.add_argument("folder", type=Path)
    initial.add_argument("--ranks", type=positive_int, default=2)
    initial.add_argument("--tp", type=positive_int, default=1)
    data = kinds.add_parser("data")
    data.set_defaults(show=data_table)
    for name, default in (("mib", 64), ("local-batch", 8), ("seq", 4096), ("repeats", 3)):
        data.add_argument(f"--{name}", type=positive_int, default=default)
    data.add_argument("--folder")
    chosen = vars(parser.parse_args())
    try:
        chosen.pop("show")(**{name: value for name, value in chosen.items() if name != "what"})
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
