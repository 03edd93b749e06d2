import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.gloo_pool import GlooPool

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], GlooPool]]:
    """ranks(n): a pool of n gloo ranks, the same for all tests."""
    pools: dict[int, GlooPool] = {}

    def pool(size: int) -> GlooPool:
        if size not in pools:
            pools[size] = GlooPool(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[[int], GlooPool]]:
    """Ranks for one test alone: a compiler makes a process slow for what comes after it."""
    pools = []

    def pool(size: int) -> GlooPool:
        pools.append(GlooPool(size))
        return pools[-1]

    yield pool
    for started in pools:
        started.close()


WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "with", "his")


def write_corpus(folder: Path, documents: int, seed: int = 0) -> Path:
    """Text files of random words."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for number in range(documents):
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randrange(20, 200)))
        (folder / f"{number:04d}.txt").write_text(text + ".\n")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of small texts."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), 200)


TINY = """
[model]
overrides = {{ dim = 32, hidden_dim = 64, n_layers = 2 }}
[data]
dataset = "text"
path = "{corpus}"
store_folder = "{stores}"
held_out_fraction = 0.1
prepare_processes = 1
[training]
steps = 4
seq_len = 32
global_batch_size = 16
local_batch_size = 2
compute_dtype = "fp32"
cpu_threads = 1
[lr_schedule]
warmup_steps = 2
[checkpoint]
interval_steps = 0
[metrics]
log_every = 1
tensorboard = false
"""


@pytest.fixture(scope="session")
def tiny(corpus, tmp_path_factory) -> list[str]:
    """Arguments of a run that takes a second: two layers, 32 tokens, a global batch of 16."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "tiny.toml").write_text(TINY.format(corpus=corpus, stores=folder / "stores"))
    return ["--config", str(folder / "tiny.toml")]


@pytest.fixture
def no_rank_environment(monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "RANK" not in os.environ
