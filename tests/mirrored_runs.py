"""Runs with a mirror in a bucket, on the ranks of the tests."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from tests.training_runs import combine, hash_of, records
from trainer.base.config import ConfigError
from trainer.base.config.load import load_config
from trainer.base.system import object_store
from trainer.build import build_trainer
from trainer.checkpoint import uploads
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.mirror import open_mirror
from trainer.run.resolve import resolve
from trainer.run.run_folder import acquire_lock, resume_point
from trainer.runtime.device import rng_state

IMPATIENT = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=3),
    "backoff": {"init_backoff": timedelta(milliseconds=5), "max_backoff": timedelta(milliseconds=20), "base": 2},
}
"""Retries of the package obstore that do not make a test wait."""


def variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def impatient() -> ExitStack:
    """Context manager in which requests are repeated at once."""
    stack = ExitStack()
    for module, name, value in (
        (object_store, "_RETRIES", IMPATIENT),
        (object_store, "_PAUSE_S", 0.001),
        (uploads, "_RETRY_S", (0.02, 0.1)),
    ):
        stack.enter_context(mock.patch.object(module, name, value))
    return stack


def train(argv: list[str], variables: Mapping[str, str], last_step: int = 0) -> tuple[str, str]:
    """Train on this rank, as train.py does. Return hashes of the state and of the random generators.

    Args:
        argv: Command line.
        variables: Environment.
        last_step: Step after which the run is asked to stop. 0: none.
    """
    os.environ.update(variables)
    config = load_config(combine(argv))
    resolved = resolve(config, dist.get_world_size())
    lock = acquire_lock(config.run.folder)
    try:
        with impatient():
            mirror = open_mirror(config.checkpoint, config.run.folder)
            point = resume_point(config.run.folder, config.checkpoint.load_step, resolved.fingerprint)
            trainer = build_trainer(config, resolved, torch.device("cpu"), point, mirror=mirror)
            if last_step:
                step = trainer.engine.step

                def stop_after(*args):
                    trainer.stop.requested |= trainer.state.step + 2 == last_step
                    return step(*args)

                trainer.engine.step = stop_after
            trainer.train()
    finally:
        if lock is not None:
            lock.close()
    return hash_of(trainer.engine.tensors()), hash_of(rng_state(torch.device("cpu")))


def train_or_error(argv: list[str], variables: Mapping[str, str]) -> tuple[str, str] | str:
    """Train like `train`. Return the line that a user sees if this fails."""
    config = load_config(combine(argv))
    try:
        return train(argv, variables)
    except ConfigError as error:
        return config.explain(error)


@contextmanager
def renewed(lease: Lease) -> Iterator[None]:
    """Context manager in which a thread renews a lease."""
    end = threading.Event()

    def renew() -> None:
        while not end.wait(0.2):
            lease.renew()

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def losses(folder) -> list:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in records(folder)]
