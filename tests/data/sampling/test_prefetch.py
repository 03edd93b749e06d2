"""Microbatches that a thread loads ahead, under faults of the system: none is lost, and what ends the run is one line."""

import errno
import gc
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from trainer.base.config import DataConfig
from trainer.data.sampling.loader import BatchPartition, SampleOrder, evaluation_batches, training_batches
from trainer.data.sampling.mixture import CombinedSamples
from trainer.data.sampling.phases import parse_mixture
from trainer.data.sampling.samples import WrappedSamples
from trainer.data.store import arrays
from trainer.data.store.arrays import FileArray, LoadingFailed
from trainer.data.store.store import TokenStore

SEQ, SAMPLES = 1024, 64
PARTITION = BatchPartition(local_batch_size=4, rank=0, ranks=1)


def samples(tokens=None):
    tokens = np.arange(SEQ * SAMPLES + 1) if tokens is None else tokens
    return WrappedSamples(TokenStore(tokens, np.array([0, len(tokens)])), SEQ, reset_positions=False)


def samples_of_file(path):
    np.arange(SEQ * SAMPLES + 1).tofile(path)
    return samples(FileArray.open(path, "<i8", SEQ * SAMPLES + 1))


def open_batches(prefetch=2, source=None):
    source = source or samples()
    order = SampleOrder((len(source),), parse_mixture((), ("data",)), seed=3, shuffle=True)
    return training_batches(source, order, PARTITION, 0, DataConfig(prefetch=prefetch), pin_memory=False)


def first_tokens(batches, count):
    return [batch.tokens[:, 0].tolist() for batch in islice(batches, count)]


def expected(count):
    return first_tokens(open_batches(0), count)


def error_of(batches, count=100):
    with pytest.raises(LoadingFailed) as failure:
        first_tokens(batches, count)
    return str(failure.value)


@pytest.mark.parametrize("prefetch", [1, 2, 5, 100])
def test_the_order_does_not_depend_on_prefetching(prefetch):
    assert first_tokens(open_batches(prefetch), 40) == expected(40)


class CountedSamples:
    """Samples that count the microbatches that were loaded."""

    def __init__(self):
        self.count = 0

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.count += 1
        return samples()[index]


@pytest.mark.parametrize(("prefetch", "loaded"), [(0, 1), (1, 2), (3, 4)])
def test_so_many_microbatches_are_loaded_ahead(prefetch, loaded):
    source = CountedSamples()
    batches = open_batches(prefetch, source)
    next(batches)
    end = time.monotonic() + 60
    while source.count < loaded and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.05)
    assert source.count == loaded


# ------------------------------------------------------------ what the thread must not need


def read_with_long_tmpdir(folder):
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    return first_tokens(open_batches(), 20)


def test_prefetching_needs_no_socket_in_tmpdir(ranks, tmp_path):
    """The path of a socket has at most 107 characters."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    assert ranks(1).run(read_with_long_tmpdir, folder) == [expected(20)]
    assert ranks(1).run(read_with_long_tmpdir, folder / "missing") == [expected(20)]


def read_without_descriptors(path):
    source = samples_of_file(path)
    first_tokens(open_batches(0, source), 1)  # NumPy imports modules when it needs them
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    holes = []
    try:
        while True:
            holes.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    return first_tokens(open_batches(2, source), 20)


def test_prefetching_needs_no_file_descriptors(ranks, tmp_path):
    assert ranks(1).run(read_without_descriptors, tmp_path / "tokens") == [expected(20)]


SHARED_MEMORY = """
from tests.data.sampling.test_prefetch import expected, first_tokens, open_batches
with open("/dev/shm/file", "wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
print(first_tokens(open_batches(), 21) == expected(21))
"""


def in_namespace(script):
    """Run a Python script with its own /dev/shm of 64 KiB."""
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_prefetching_needs_no_shared_memory():
    try:
        if in_namespace("").returncode:
            pytest.skip("this user may not mount a file system in a namespace of its own")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    done = in_namespace(SHARED_MEMORY)
    assert (done.stdout, done.stderr) == ("True\n", "")


def read_with_threads():
    """Return how many threads there are before and while microbatches are loaded ahead, and torch's number of threads."""
    torch.set_num_threads(4)
    torch.ones(10**7).add(1)  # torch starts its threads
    source = CombinedSamples([samples(), samples()])
    before = len(os.listdir("/proc/self/task"))
    batches = open_batches(2, source)
    partition = BatchPartition(local_batch_size=64, rank=0, ranks=1)
    order = SampleOrder((SAMPLES, SAMPLES), parse_mixture((), ("a", "b")), seed=3, shuffle=True)
    batches = training_batches(source, order, partition, 0, DataConfig(prefetch=2), pin_memory=False)
    next(batches)
    return len(os.listdir("/proc/self/task")) - before, torch.get_num_threads()


def test_prefetching_adds_one_thread_and_does_not_change_the_threads_of_torch(ranks):
    assert ranks(1).run(read_with_threads) == [(1, 4)]


# ------------------------------------------------------------ reads that fail, and the end


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_store_that_is_truncated_while_it_is_read_is_one_line(prefetch, tmp_path):
    path = tmp_path / "tokens"
    batches = open_batches(prefetch, samples_of_file(path))
    first_tokens(batches, 1)
    os.truncate(path, 0)
    cause = f"{path}: the file has become shorter since it was opened"
    assert error_of(batches) == f"the training data cannot be read: {cause}"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failed_read_is_one_line(prefetch, tmp_path, monkeypatch):
    batches = open_batches(prefetch, samples_of_file(tmp_path / "tokens"))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(arrays.os, "preadv", fail)
    assert error_of(batches) == f"the training data cannot be read: {tmp_path / 'tokens'}: Input/output error"


def test_a_failed_read_of_an_evaluation_is_one_line(tmp_path):
    source = samples_of_file(tmp_path / "tokens")
    os.truncate(tmp_path / "tokens", 0)
    assert error_of(evaluation_batches(source, 8, PARTITION)).startswith("the training data cannot be read: ")


class FailingSamples:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_lack_of_memory_is_one_line(prefetch):
    line = "the memory is exhausted: no more training data can be loaded"
    assert error_of(open_batches(prefetch, FailingSamples(MemoryError()))) == line


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), SystemExit("bug"), KeyError("bug")])
def test_any_other_error_of_the_thread_arrives_with_its_traceback(error):
    with pytest.raises(type(error)) as failure:
        first_tokens(open_batches(2, FailingSamples(error)), 1)
    assert failure.value is error and failure.traceback[-1].name == "__getitem__"


def test_a_thread_that_cannot_be_started_is_one_line(monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    limit = "the limit of processes (ulimit -u, or the container's pids.max) is too low"
    line = (
        f"the thread of data.prefetch cannot be started (can't start new thread): {limit}; data.prefetch = 0 needs none"
    )
    assert error_of(open_batches()) == line


def test_the_thread_ends_with_its_iterator():
    before = threading.active_count()
    batches = open_batches()
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before


def test_other_threads_run_while_a_read_hangs(tmp_path, monkeypatch):
    """Also those of a run that loads its microbatches itself: the watchdog reports the hang. A process can be interrupted."""
    hangs, ends = threading.Event(), threading.Event()

    def hang(*_):
        hangs.set()
        ends.wait()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(arrays.os, "preadv", hang)
    batches = open_batches(2, samples_of_file(tmp_path / "tokens"))
    waiting = threading.Thread(target=lambda: error_of(batches), daemon=True)
    waiting.start()
    assert hangs.wait(60) and waiting.is_alive()
    ends.set()
    waiting.join(60)
    assert not waiting.is_alive()


def test_files_are_closed_with_their_arrays(tmp_path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    source = samples_of_file(tmp_path / "tokens")
    part = source.store.tokens.part(5, 10)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del source
    assert part[:].tolist() == [5, 6, 7, 8, 9]
    del part
    assert len(os.listdir("/proc/self/fd")) == before
