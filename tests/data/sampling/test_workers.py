"""Data workers under faults of the system: no microbatch is lost, and what ends the run is one line."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from itertools import islice
from multiprocessing import connection
from unittest import mock

import numpy as np
import pytest

from tests.conftest import ROOT
from trainer.base.config import DataConfig
from trainer.data.sampling import workers
from trainer.data.sampling.loader import BatchPartition, SampleOrder, evaluation_batches, training_batches
from trainer.data.sampling.phases import parse_mixture
from trainer.data.sampling.samples import ConcatSamples
from trainer.data.sampling.workers import LoadingFailed, WorkerPool
from trainer.data.store.store import TokenStore

SEQ, SAMPLES = 1024, 64
PARTITION = BatchPartition(local_batch_size=4, rank=0, ranks=1)


def samples(tokens=None):
    tokens = np.arange(SEQ * SAMPLES + 1) if tokens is None else tokens
    return ConcatSamples(TokenStore(tokens, np.array([0, len(tokens)])), SEQ, reset_positions=False)


def open_batches(num_workers=1, source=None, asked_to_stop=lambda: False, prefetch=2):
    source = source or samples()
    order = SampleOrder((len(source),), parse_mixture((), ("data",)), seed=3, shuffle=True)
    config = DataConfig(num_workers=num_workers, prefetch=prefetch)
    return training_batches(source, order, PARTITION, 0, config, pin_memory=False, asked_to_stop=asked_to_stop)


def first_tokens(batches, count):
    return [batch.tokens[:, 0].tolist() for batch in islice(batches, count)]


def expected(count):
    return first_tokens(open_batches(0), count)


def error_of(batches, count=100):
    with pytest.raises(LoadingFailed) as failure:
        first_tokens(batches, count)
    return str(failure.value)


# ------------------------------------------------------------ what workers must not need


def read_with_long_tmpdir(folder):
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    return first_tokens(open_batches(), 20)


def test_workers_need_no_socket_in_tmpdir(ranks, tmp_path):
    """The path of a socket has at most 107 characters."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    assert ranks(1).run(read_with_long_tmpdir, folder) == [expected(20)]
    assert ranks(1).run(read_with_long_tmpdir, folder / "missing") == [expected(20)]


def forbid_new_files():
    """Lower the limit of open files to the number of open files of this process. Return the previous limits."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, before[1]))
    return before


def read_without_descriptors():
    """Return batches that are read after the limit has fallen, and the error of workers that are started then."""
    batches = open_batches()
    tokens = first_tokens(batches, 1)
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    os.close(spare[0])
    before = forbid_new_files()
    holes = []
    try:
        while True:
            holes.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    tokens += first_tokens(batches, 20)
    error = error_of(open_batches(2))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    return tokens, error


def test_workers_need_file_descriptors_only_to_start(ranks):
    ((tokens, error),) = ranks(1).run(read_without_descriptors)
    assert tokens == expected(21)
    cause = "(Too many open files): the limit of open files (ulimit -Hn) is too low"
    assert error == f"the 2 processes of data.num_workers cannot be started {cause}; data.num_workers = 0 needs none"


SHARED_MEMORY = """
import os, sys
from pathlib import Path
from tests.data.sampling.test_workers import error_of, expected, first_tokens, open_batches

def fill():
    with open("/dev/shm/file", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

batches = open_batches()
tokens = first_tokens(batches, 1)
fill()
assert tokens + first_tokens(batches, 20) == expected(21)
print(error_of(open_batches(2)), flush=True)  # os._exit does not
os._exit(0)
"""


def in_namespace(script):
    """Run a Python script with its own /dev/shm of 64 KiB."""
    mount = 'mount -t tmpfs -o size=64k none /dev/shm && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_workers_need_shared_memory_only_to_start():
    try:
        if in_namespace("").returncode:
            pytest.skip("this user may not mount a file system in a namespace of its own")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    done = in_namespace(SHARED_MEMORY)
    cause = "(No space left on device): /dev/shm is full; data.num_workers = 0 needs none\n"
    assert (done.stdout, done.stderr) == (f"the 2 processes of data.num_workers cannot be started {cause}", "")


# ------------------------------------------------------------ workers that end, fail or hang


def kill_worker(number):
    batches = open_batches()
    first_tokens(batches, 1)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    return worker.pid, error_of(batches)


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, ": the kernel does this if no memory is left; fewer data.num_workers need less"),
        (signal.SIGSEGV, ""),
    ],
)
def test_a_killed_worker_is_one_line(ranks, number, cause):
    ((pid, error),) = ranks(1).run(kill_worker, number)
    assert error == f"{number.name} killed process {pid}, which loads training data{cause}"


class FewAtFirst:
    """Sample indices of which only the first is requested in advance."""

    def __init__(self):
        self.count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.count += 1
        if self.count == 2:
            raise StopIteration
        return np.arange(4)


def kill_first(killed, other):
    """Kill a worker. The other one is stopped, so that its results do not delay the report."""
    os.kill(other.pid, signal.SIGSTOP)
    os.kill(killed.pid, signal.SIGKILL)


def kill_late_worker():
    pool = WorkerPool(samples(), FewAtFirst(), asked_to_stop=lambda: False)
    with mock.patch.object(workers, "_START_METHOD", "spawn"):  # with which the pool starts a process when it needs one
        pool.start(2, prefetch=1)
    batches = pool.batches()
    (early,) = multiprocessing.active_children()
    first_tokens(batches, 1)
    (late,) = {*multiprocessing.active_children()} - {early}
    kill_first(late, early)
    return late.pid, error_of(batches)


def test_a_worker_that_was_started_later_is_named_when_it_is_killed(ranks):
    ((pid, error),) = ranks(1).run(kill_late_worker)
    assert error.startswith(f"SIGKILL killed process {pid}, which loads training data")


def kill_one_of_two():
    batches = open_batches(2)
    first_tokens(batches, 1)
    killed, other = multiprocessing.active_children()
    kill_first(killed, other)
    error = error_of(batches)
    # It ignores SIGTERM, and Python 3.12 would wait for it with a lock that submit needs.
    has_ended = bool(connection.wait([other.sentinel], timeout=60))
    return killed.pid, error, has_ended and other.is_killed


def test_the_other_workers_of_one_that_was_killed_are_killed(ranks):
    ((pid, error, is_killed),) = ranks(1).run(kill_one_of_two)
    assert error.startswith(f"SIGKILL killed process {pid}, ") and is_killed


def truncate(path):
    np.arange(SEQ * SAMPLES + 1).tofile(path)
    batches = open_batches(1, samples(np.asarray(np.memmap(path, np.int64, mode="r"))))
    first_tokens(batches, 1)
    os.truncate(path, 0)
    return error_of(batches)


def test_a_store_that_is_truncated_while_it_is_read_is_one_line(ranks, tmp_path):
    (error,) = ranks(1).run(truncate, tmp_path / "tokens")
    assert error.startswith("SIGBUS killed process ")
    assert error.endswith(": a file of the token store has become shorter, or its disk or file system cannot read it")


class FailingSamples:
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        raise self.error


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(5, "Input/output error", "/data/tokens"),
            "the training data cannot be read: /data/tokens: Input/output error",
        ),
        (TimeoutError(110, "Connection timed out"), "the training data cannot be read: Connection timed out"),
        (MemoryError(), "the memory is exhausted: the process that loads training data can allocate no more"),
    ],
)
def test_a_failed_read_is_one_line(num_workers, error, message):
    assert error_of(open_batches(num_workers, FailingSamples(error))) == message


def test_a_failed_read_of_an_evaluation_is_one_line():
    batches = evaluation_batches(FailingSamples(OSError(5, "Input/output error")), 8, PARTITION)
    assert error_of(batches) == "the training data cannot be read: Input/output error"


def test_a_bug_in_a_worker_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError) as failure:
        first_tokens(open_batches(1, FailingSamples(ZeroDivisionError("bug"))), 1)
    assert "FailingSamples" in str(failure.value.__cause__) or "__getitem__" in str(failure.value.__cause__)


def read_with_stopped_worker():
    asked = []
    batches = open_batches(1, asked_to_stop=lambda: bool(asked))
    tokens = first_tokens(batches, 1)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    asked.append(True)
    return tokens + first_tokens(batches, 9)


def test_a_run_that_is_asked_to_stop_loads_the_microbatches_of_a_worker_that_hangs(ranks):
    assert ranks(1).run(read_with_stopped_worker) == [expected(10)]


def workers_after_close():
    batches = open_batches(2)
    first_tokens(batches, 1)
    workers = multiprocessing.active_children()
    batches.close()
    while any(worker.exitcode is None for worker in workers):
        # A join does not suffice: the pool's thread may have been told of the end first, and store the code later.
        connection.wait([worker.sentinel for worker in workers])
    return len(workers), [worker.exitcode for worker in workers]


def test_workers_end_with_their_iterator(ranks):
    assert ranks(1).run(workers_after_close) == [(2, [0, 0])]


@pytest.mark.parametrize(("num_workers", "prefetch"), [(1, 1), (1, 5), (3, 1), (4, 3)])
def test_the_order_does_not_depend_on_workers_and_prefetch(num_workers, prefetch):
    assert first_tokens(open_batches(num_workers, prefetch=prefetch), 40) == expected(40)
