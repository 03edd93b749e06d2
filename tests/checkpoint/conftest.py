import re
from functools import cache

import pytest

from tests.mirrored_runs import train
from tests.training_runs import in_folder
from trainer.base.system.object_store import ObjectStore


@pytest.fixture(scope="module")
def plain(tiny):
    """Command line of a run of 8 steps, which saves after every second one."""
    given = {"training.steps": 8, "checkpoint.interval_steps": 2, "optimizer.lr": "3e-3"}
    given["metrics.sinks"] = '["jsonl", "tensorboard"]'
    return [*tiny, *(word for key, value in given.items() for word in (f"--{key}", str(value)))]


@pytest.fixture
def argv(bucket, plain, request):
    """The same with a mirror."""
    prefix = re.sub("[^a-z0-9]+", "-", request.node.name)
    return [*plain, "--checkpoint.mirror", f"{bucket}/{prefix}", "--checkpoint.mirror_lease_s", "1"]


@pytest.fixture
def store(argv):
    return ObjectStore(argv[argv.index("--checkpoint.mirror") + 1])


@pytest.fixture(scope="module")
def undisturbed(ranks, plain, tmp_path_factory):
    """A function (number of ranks) -> folder and result of a run without a mirror, which trains once."""
    folder = tmp_path_factory.mktemp("undisturbed")

    @cache
    def run(size):
        own = folder / str(size)
        return own, ranks(size).run(train, [*plain, *in_folder(own)], {})

    return run
