import pytest

from tests.training_runs import measured


@pytest.fixture(scope="module")
def on_one_rank(ranks, tmp_path_factory):
    """Return a function (settings) -> results on one rank. It runs each configuration once."""
    folder, results = tmp_path_factory.mktemp("one_rank"), {}

    def run_once(*argv):
        if argv not in results:
            results[argv] = measured(ranks, 1, argv, folder / str(len(results)))
        return results[argv]

    return run_once
