"""Measure training steps and the time to the first loss beside other training loops, checkpoint saves, data loading, the parts of
a layer with experts, generation, mirrors, and scores of continuations.

python scripts/dev/benchmark.py peers --model 58m
python scripts/dev/benchmark.py start --model 58m
python scripts/dev/benchmark.py checkpoint --gib 0.2
python scripts/dev/benchmark.py data --mib 16
python scripts/dev/benchmark.py experts --tokens 512
python scripts/dev/benchmark.py generation --batch 16
python scripts/dev/benchmark.py mirror s3://bucket/prefix --model 125m
python scripts/dev/benchmark.py continuations outputs/58m hellaswag/rc_5shot/requests.jsonl.gz
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
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from trainer.base.system.signals import exit_on_interrupt

if __name__ == "__main__":
    exit_on_interrupt()

import numpy as np
import tiktoken.load
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from scripts.dev.contenders import CONTENDERS
from scripts.dev.continuations import print_continuations
from scripts.dev.expert_layer import print_experts
from scripts.dev.generation import print_generation
from scripts.dev.mirror_cost import print_upload_cost
from scripts.dev.peers import MODELS, TOLERANCES, print_peers, print_start
from trainer.base.config import DataConfig, TokenizerConfig
from trainer.base.config.argument_types import existing_folder, file_to_write, positive_float, positive_int
from trainer.base.config.arguments import Arguments
from trainer.base.config.exits import run_to_end
from trainer.base.system.process import cores, memory_available
from trainer.base.system.units import GIB
from trainer.checkpoint.async_save import WRITERS
from trainer.checkpoint.commit import SaveRequest
from trainer.data.sampling.loader import BatchPartition, SampleOrder, training_batches
from trainer.data.sampling.phases import parse_mixture
from trainer.data.sampling.samples import WrappedSamples
from trainer.data.sources import open_source
from trainer.data.store.store import open_store, read_description
from trainer.data.tokenizer.backends import DEFAULT_FILE, load_tokenizer
from trainer.data.tokenizer.byte_pair import LLAMA3_PATTERN
from trainer.data.tokenizer.protocol import Tokenizer
from trainer.tools.testing.layouts import Table
from trainer.tools.testing.ranks import LocalRanks

LOADED_TOKENS = 2**25
"""Number of tokens to load in each repeat."""


# ---------------------------------------------------------------- checkpoint


def saves(folder: Path, gib: float, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Measure saves, collectively. Return async mode -> one pair per save: the seconds that training was blocked, and the seconds
    of writing in the background. The state consists of matrices of 4 MiB, sharded over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = 1024 // dist.get_world_size()
    state = {
        f"state/{i}": DTensor.from_local(torch.randn(rows, 1024), mesh, [Shard(0)], run_check=False)
        for i in range(round(gib * GIB / 2**22))
    }
    writers = {mode: writer(torch.device("cpu"), state) for mode, writer in WRITERS.items()}
    times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in WRITERS}
    for step in range(repeats + 1):
        for mode, writer in writers.items():
            request = SaveRequest(folder / mode, step, {}, {}, keep=0, keep_interval_steps=0, keep_best=0)
            dist.barrier()
            start = time.perf_counter()
            writer.save(request, state)
            writer.before_update()
            blocked = time.perf_counter() - start
            (result,) = writer.wait()
            if result.failure is not None:
                raise result.failure
            if step:  # the first save is a warm-up
                times[mode].append((blocked, result.background_s))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(folder / mode)
    for writer in writers.values():
        writer.close()
    return times


def print_saves(gib: float, ranks: int, repeats: int, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        of_ranks = LocalRanks(ranks).run(saves, Path(own), gib, repeats)
    table = Table(mode="<10", blocked=">10", of_off=">9", min_to_max=">18", background=">12")
    for mode in WRITERS:
        blocked, background = np.max([times[mode] for times in of_ranks], axis=0).T
        median = np.median(blocked)
        if mode == "off":
            off = median
        spread = f"{blocked.min():.3f} - {blocked.max():.3f} s"
        table.row(mode, f"{median:.3f} s", f"{100 * median / off:.1f} %", spread, f"{np.median(background):.3f} s")


# ---------------------------------------------------------------- data


def interleaved(tasks: Mapping[str, Callable[[], int]], repeats: int) -> dict[str, list[float]]:
    """Run the tasks in turn, after a warm-up. Each task returns its number of tokens. Return task name -> tokens per second."""
    rates: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            tokens = task()
            if repeat:
                rates[name].append(tokens / (time.perf_counter() - start))
    return rates


def preparing(folder: Path, mib: int, tokenizer: Tokenizer) -> dict[str, Callable[[], int]]:
    """Return two tasks that tokenize the same texts. One uses tiktoken alone. The other uses the trainer's data preparation and
    writes a store to stores/."""
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
    samples = WrappedSamples(open_store(store, "train"), seq, reset_positions=False)
    order = SampleOrder((len(samples),), parse_mixture((), ("data",)), seed=0, shuffle=True)
    cut = BatchPartition(local_batch_size=local_batch, rank=0, ranks=1)
    ways = {"loaded from the store": 0, "loaded ahead by a thread": DataConfig().prefetch}
    batches = {
        name: training_batches(samples, order, cut, 0, DataConfig(prefetch=count), pin_memory=False)
        for name, count in ways.items()
    }
    mapped = np.memmap(store / "train.tokens", samples.store.tokens.dtype, mode="r")
    microbatches = LOADED_TOKENS // (local_batch * seq)
    tokens = microbatches * local_batch * seq
    generator = np.random.default_rng(0)

    def load(name: str) -> int:
        for _ in range(microbatches):
            next(batches[name])
        return tokens

    def baseline() -> int:
        for _ in range(microbatches):
            rows = generator.integers(0, len(samples), local_batch)[:, None] * seq + np.arange(seq + 1)
            torch.from_numpy(mapped[rows].astype(np.int64))
        return tokens

    return {"memory-mapped rows alone": baseline} | {name: partial(load, name) for name in ways}


def print_data(mib: int, local_batch: int, seq: int, repeats: int, folder: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        rates = interleaved(preparing(Path(own), mib, load_tokenizer(TokenizerConfig())), repeats)
        rates |= interleaved(loading(_store_in(Path(own)), local_batch, seq), repeats)
    table = Table(task="<26", tokens_per_second=">17", min_to_max=">29", of_baseline=">13")
    for name, of_repeats in rates.items():
        median = statistics.median(of_repeats)
        if name.endswith("alone"):
            baseline = median
        spread = f"{min(of_repeats):,.0f} - {max(of_repeats):,.0f}"
        table.row(name, f"{median:,.0f}", spread, f"{100 * median / baseline:.0f} %")


def _parser() -> Arguments:
    parser = Arguments(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    of_saves = (
        "time that a save blocks training in each async mode: median of all saves, each measured on its slowest rank"
    )
    of_data = "tokens per second of preparing and loading data, compared with baselines that do not use the trainer"
    of_peers = "duration of a training step of this trainer and of other training loops with the same losses"
    of_start = "seconds from the command to the first loss, of this trainer and of a plain training loop"
    of_experts = "time of one layer with experts (forward and backward), of its parts, and of a loop over its experts"
    of_generation = "new tokens per second of a batch of texts beside one text at a time"
    of_continuations = "seconds to score continuations of contexts, beside lm-evaluation-harness with transformers"
    peers = commands.add_parser("peers", help=of_peers, doc=of_peers)
    start = commands.add_parser("start", help=of_start, doc=of_start)
    checkpoint = commands.add_parser("checkpoint", help=of_saves, doc=of_saves)
    data = commands.add_parser("data", help=of_data, doc=of_data)
    experts = commands.add_parser("experts", help=of_experts, doc=of_experts)
    generation = commands.add_parser("generation", help=of_generation, doc=of_generation)
    continuations = commands.add_parser("continuations", help=of_continuations, doc=of_continuations)
    of_mirror = "speed and memory of a run that uploads its checkpoints, beside one that does not"
    mirror = commands.add_parser("mirror", help=of_mirror, doc=of_mirror)
    mirror.add_argument("url", help="prefix of the mirrors")
    for command, option, default, text in (
        (mirror, "threads", 1, "number of CPU threads"),
        (mirror, "steps", 20, "number of steps of a run, which saves after half of them"),
        (mirror, "repeats", 3, "number of turns of each way; the table shows the medians"),
        (peers, "threads", 2, "number of CPU threads"),
        (peers, "steps", 5, "number of steps in a repeat"),
        (peers, "repeats", 5, "number of repeats of each contender; the table shows the median of all steps"),
        (start, "threads", 2, "number of CPU threads"),
        (start, "repeats", 5, "number of runs of each command; the table shows their median"),
        (checkpoint, "ranks", 2, "number of ranks over which the state is sharded"),
        (checkpoint, "repeats", 7, "number of saves in each mode"),
        (data, "mib", 64, "size of the text to prepare in MiB"),
        (data, "local-batch", 8, "number of samples in a microbatch"),
        (data, "seq", 4096, "number of tokens in a sample"),
        (data, "repeats", 3, "number of repeats of each task; the table shows their median"),
        (experts, "tokens", 1024, "number of tokens in the batch"),
        (generation, "batch", 16, "number of texts"),
        (generation, "threads", 2, "number of CPU threads"),
        (generation, "repeats", 3, "number of turns of each way; the table shows their medians"),
        (continuations, "count", 250, "number of questions"),
        (continuations, "threads", 2, "number of CPU threads"),
        (continuations, "repeats", 3, "number of turns of each way; the table shows their medians"),
        (experts, "repeats", 5, "number of turns of each part; the table shows the medians"),
    ):
        command.add_argument(f"--{option}", type=positive_int, default=default, metavar="N", help=text)
    continuations.add_argument("run", type=existing_folder, help="run folder, whose newest checkpoint is measured")
    continuations.add_argument("questions", type=Path, help='file of a task of kind "choices"')
    continuations.add_argument(
        "--batch-sizes", nargs="+", type=positive_int, default=[1, 8, 32], metavar="N", help="of transformers"
    )
    checkpoint.add_argument("--gib", type=positive_float, default=1.2, metavar="X", help="size of the state in GiB")
    for command in (checkpoint, data):
        command.add_argument(
            "--folder", type=existing_folder, metavar="PATH", help="parent of the temporary folder that is written"
        )
    for command in (peers, start, generation, mirror):
        names = [name for name, (family, *_) in MODELS.items() if family == "llama3" or command is peers]
        command.add_argument("--model", choices=names, default="58m", help="model, of a step also its batch")
    _add_peers_options(peers)
    for command in (experts, generation):
        command.add_argument(
            "--dtype", choices=["fp32", "bf16"], default="fp32", help="precision of parameters and products"
        )
    return parser


def _add_peers_options(peers: Arguments) -> None:
    add = peers.add_argument
    add(
        "--contenders",
        nargs="+",
        choices=list(CONTENDERS),
        metavar="NAME",
        help=f"training loops to compare, the baseline first: {', '.join(CONTENDERS)} (default: all, on a GPU without kernels)",
    )
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="precision of forward and backward")
    add("--device", choices=["cpu", "gpu"], default="cpu", help="device of the contenders, which share a GPU's memory")
    add("--compiled", action="store_true", help="compile every contender's model")
    tolerances = ", ".join(f"{x:g} in {dtype}" for dtype, x in TOLERANCES.items())
    tolerance_help = f"largest relative deviation of losses (default: {tolerances})"
    add("--tolerance", type=positive_float, default=None, metavar="X", help=tolerance_help)
    add(
        "--json",
        type=file_to_write,
        dest="results",
        metavar="FILE",
        help="also write all times and the environment to this file",
    )


def main() -> None:
    parser = _parser()
    args = vars(parser.parse_args())
    free = memory_available()
    if free is not None and args.get("gib", 0) * GIB > free:
        parser.error(f"--gib {args['gib']:g}: must be less than the free memory of {free / GIB:.1f} GiB")
    runs = {
        "peers": print_peers,
        "start": print_start,
        "checkpoint": print_saves,
        "data": print_data,
        "experts": print_experts,
        "generation": print_generation,
        "continuations": print_continuations,
        "mirror": print_upload_cost,
    }
    runs[args.pop("command")](**args)


if __name__ == "__main__":
    run_to_end(main)
