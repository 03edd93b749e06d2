"""The real services show the values of metrics.jsonl: W&B offline, MLflow in a database and on a server, Trackio locally."""

import html
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.ports import free_port
from tests.run.sinks.runs import FLAGS, STEPS, Process, logged_run, opened, record, recorded, train, wait_for
from tests.training_runs import combine, in_folder
from trainer.base.config import ConfigError, MetricsConfig
from trainer.base.config.load import load_config
from trainer.base.config.packages import require_installed
from trainer.run.sinks import services
from trainer.run.sinks.delivery import HistoryLost, Refused
from trainer.run.sinks.services import MLflow, Trackio, Wandb, require_access
from trainer.tools.testing.ranks import RankError


def curves_of(rows):
    """Return the (step, value) pairs of each curve, in order. rows: pairs of a step and values by name."""
    curves = {}
    for step, values in rows:
        for name, value in values.items():
            curves.setdefault(name, []).append((step, value))
    return curves


# ------------------------------------------------------------ readers of what the services have stored


def wandb_records(path):
    """Yield the records of a .wandb file: after 7 bytes of a header, frames of LevelDB's log in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, start, content = path.read_bytes(), 7, b""
    while start + 7 <= len(data):
        if (left := 2**15 - start % 2**15) < 7:  # the rest of a block is padding
            start += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, start)
        if start + 7 + size > len(data):
            return  # W&B is writing
        content += data[start + 7 : start + 7 + size]
        start += 7 + size
        if kind in (1, 4):  # a complete record, or the last part of one
            yield Record.FromString(content)
            content = b""


def ended_wandb_run(folder):
    """Return the records of the only run, when W&B's own process has written the last one. This may be after `finish`."""
    (path,) = folder.rglob("*.wandb")
    wait_for(lambda: any(stored.HasField("exit") for stored in wandb_records(path)))
    return wandb_records(path)


def wandb_tags(folder):
    """Return the id of each run that has offline folders -> its last tags."""
    paths = folder.glob("wandb/offline-run-*/*.wandb")
    return {r.run.run_id: list(r.run.tags) for path in sorted(paths) for r in wandb_records(path) if r.run.run_id}


def read_wandb(folder):
    """Return the curves of all offline folders of a run, and its last configuration."""
    rows, config = [], {}
    for path in sorted(folder.rglob("*.wandb")):
        for stored in wandb_records(path):
            config |= {item.key: json.loads(item.value_json) for item in stored.config.update}
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in stored.history.item}
            if row:
                rows.append((row["step"], {k: v for k, v in row.items() if "/" in k}))
    return curves_of(rows), config


def read_mlflow(uri, project):
    """Return the curves of the only run that is not deleted, and its parameters."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    curves = {}
    for key in found.data.metrics:
        points = client.get_metric_history(found.info.run_id, key)
        curves[key] = sorted((point.step, point.value) for point in points)
    return curves, found.data.params | found.data.tags


def read_trackio(project):
    """Return the curves of the only run, and its configuration."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (found,) = trackio.Api().runs(project)
    logs = SQLiteStorage.get_logs(project, found.name, run_id=found.id)
    return curves_of((log["step"], {k: v for k, v in log.items() if "/" in k}) for log in logs), found.config


# ------------------------------------------------------------ complete runs


SERVICES = ["wandb", "mlflow", "trackio"]
INSTALLED = [name for name in SERVICES if find_spec(name)]


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory):
    """Set variables that keep the services local, and return them. Trackio reads its folder once, when it is imported."""
    variables = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path_factory.mktemp("trackio"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables


@pytest.fixture(scope="module")
def runs(ranks, tiny, tmp_path_factory, environment):
    """A folder with a run that was killed twice and rolled back, and one that was stopped and resumed."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name, *flags, kill_before=0, failed_steps=()):
        sinks = ["--metrics.sinks", ",".join(["jsonl", *INSTALLED]), "--metrics.project", f"{folder.name}-{name}"]
        if "mlflow" in INSTALLED:
            sinks += ["--metrics.mlflow_tracking_uri", f"sqlite:///{folder / name}.db"]
        argv = combine([*tiny, *FLAGS, *sinks, *in_folder(folder / name), *flags])
        ranks(1).run(train, argv, kill_before, failed_steps, 0.0, environment)

    # Resumed runs evaluate at other steps, so the evaluation at step 12 is never repeated.
    for flags in ((), ("--evaluation.interval_steps", "4")):
        with pytest.raises(RankError, match="ended without a result"):
            run("killed", *flags, kill_before=14)
    run("killed", "--evaluation.interval_steps", "7", failed_steps=(18, 19))
    run("stopped", "--training.steps", "7")
    run("stopped")
    return folder


@pytest.fixture(params=SERVICES)
def read(request):
    """A function that returns the curves in metrics.jsonl of a run, those in a service, and the configuration there."""
    pytest.importorskip(request.param)
    folder = request.getfixturevalue("runs")
    read = {
        "wandb": lambda name: read_wandb(folder / name),
        "mlflow": lambda name: read_mlflow(f"sqlite:///{folder / name}.db", f"{folder.name}-{name}"),
        "trackio": lambda name: read_trackio(f"{folder.name}-{name}"),
    }[request.param]
    return lambda name: (recorded(folder / name), *read(name))


def in_order(curves):
    return {name: sorted(points) for name, points in curves.items()}


@pytest.mark.parametrize("name", ["killed", "stopped"])
def test_every_curve_has_each_value_of_the_surviving_run_once(read, name):
    expected, curves, _ = read(name)
    assert {"train/loss", "checkpoint/blocked_s", "eval/held_out/loss"} < set(expected)
    assert [step for step, _ in expected["train/loss"]] == list(range(1, STEPS + 1))
    assert in_order(curves) == in_order(expected)


def test_the_service_has_the_configuration_and_the_versions(read):
    _, _, config = read("stopped")
    flat = config if "training.steps" in config else services._flat(config)
    assert str(flat["training.steps"]) == str(STEPS), "the value of the resumed run"
    assert flat["run.name"] == "stopped"
    assert flat["environment.packages.torch"] == metadata.version("torch")


# ------------------------------------------------------------ what else a service is told


def write(folder, service, steps=(1,), **settings):
    run = logged_run(folder, **settings)
    with opened(run, service) as process:
        process.write(steps, 1.0)


OPTIONS = {"project": "options", "run_name": "title", "tags": ("a", "b"), "notes": "why"}


def test_wandb_gets_name_tags_notes_and_entity(tmp_path):
    pytest.importorskip("wandb")
    write(tmp_path, Wandb, entity="team", **OPTIONS)
    run = next(stored.run for stored in ended_wandb_run(tmp_path) if stored.run.run_id)
    assert (run.entity, run.project, run.display_name, run.notes, list(run.tags)) == (
        *("team", "options", "title", "why"),
        ["a", "b"],
    )


def test_the_step_is_the_x_axis_of_wandb(tmp_path):
    pytest.importorskip("wandb")
    write(tmp_path, Wandb)
    metrics = [stored.metric for stored in ended_wandb_run(tmp_path) if stored.metric.glob_name]
    assert [(metric.glob_name, metric.step_metric) for metric in metrics] == [("*", "step")]


SAMPLES = {
    "kind": "samples",
    "step": 4,
    "timestamp_s": 1e9,
    "samples": [{"prompt": "a <b>", "text": "def f():\n  <i>"}],
}
SAMPLE = "after 'a <b>':\n\n    def f():\n      <i>"


def test_mlflow_gets_name_tags_notes_and_the_newest_samples(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    with opened(logged_run(tmp_path, mlflow_tracking_uri=uri, **OPTIONS), MLflow) as process:
        process.write((1,), 1.0)
        for sink in (process.jsonl, process.delivery):
            sink.write(SAMPLES)
            sink.write(SAMPLES | {"step": 6})
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("options").experiment_id])
    assert (run.info.run_name, run.info.status) == ("title", "FINISHED")
    assert run.data.tags.items() >= {"a": "true", "b": "true", "mlflow.note.content": "why"}.items()
    assert run.data.tags["samples/1"] == f"step 6, {SAMPLE}"


def test_trackio_gets_name_tags_and_notes(tmp_path):
    trackio = pytest.importorskip("trackio")
    write(tmp_path, Trackio, **OPTIONS)
    (run,) = trackio.Api().runs("options")
    assert run.name == "title"
    assert (run.config["tags"], run.config["notes"]) == (["a", "b"], "why")


def test_wandb_shows_samples(tmp_path):
    pytest.importorskip("wandb")
    service = Wandb(logged_run(tmp_path))
    service.write(SAMPLES)
    service.close()
    (path,) = tmp_path.rglob("*.html")
    assert html.escape(SAMPLE) in path.read_text()


def test_trackio_shows_samples(tmp_path):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    service = Trackio(logged_run(tmp_path, project="samples"))
    service.write(SAMPLES)
    service.close()
    (log,) = SQLiteStorage.get_logs("samples", "run")
    assert log["step"] == 4 and log["samples/1"]["_value"] == SAMPLE


def test_runs_of_one_name_in_two_folders_do_not_mix(tmp_path):
    trackio = pytest.importorskip("trackio")
    for name in ("a", "b", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        write(tmp_path / name, Trackio, project="names")
    assert len(trackio.Api().runs("names")) == 2


def test_an_old_history_of_wandb_that_is_not_offline_gets_a_tag(tmp_path):
    """Offline too, if its folder was moved away, as it is on another machine."""
    pytest.importorskip("wandb")
    with opened(logged_run(tmp_path), Wandb) as process:
        process.write([1, 2], 1.0)
        process.delivered()
        process.delivery.service.close()
        (old,) = tmp_path.glob("wandb/offline-run-*")
        old.rename(tmp_path / "moved")
        process.rewind(1)
        process.write([2], 2.0)
    wait_for(lambda: len(wandb_tags(tmp_path)) == 2)  # W&B's service may write after finish() has returned
    tags = wandb_tags(tmp_path)
    assert tags.pop(old.name[-32:]) == ["replaced"]
    assert list(tags.values()) == [[]]


def test_an_old_history_of_wandb_that_cannot_be_tagged_is_one_warning(tmp_path, capsys):
    pytest.importorskip("wandb")
    service = Wandb(logged_run(tmp_path, project="a/b"))  # a name that W&B refuses
    service.state["id"] = "0123"
    service.restart()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning: wandb" in line]
    assert "wandb: the run 0123 did not get the tag replaced (" in line


def test_a_history_of_wandb_that_was_deleted_is_lost(tmp_path, monkeypatch):
    """Only the server's answer is simulated."""
    wandb = pytest.importorskip("wandb")

    def refuse(**settings):
        raise wandb.errors.CommError(f"run a/b/{settings['id']} was previously created and deleted; try a new run id")

    monkeypatch.setattr(wandb, "init", refuse)
    service = Wandb(logged_run(tmp_path))
    service.state["id"] = "0123"
    with pytest.raises(HistoryLost, match="the run 0123 was deleted"):
        service.write(record(1, 1.0))


@pytest.mark.parametrize("when", ["between", "during", "at the end"])
def test_a_history_of_mlflow_that_was_deleted_is_written_again(tmp_path, capsys, when):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run, client = logged_run(tmp_path, project="deleted", mlflow_tracking_uri=uri), mlflow.MlflowClient(uri)

    def delete():
        (found,) = client.search_runs([client.get_experiment_by_name("deleted").experiment_id])
        client.delete_run(found.info.run_id)

    with opened(run, MLflow) as process:
        process.write([1, 2], 1.0)
        process.delivered()
        if when == "during":
            delete()
            process.write([3], 1.0)
        elif when == "at the end":
            delete()
    if when == "between":
        delete()
    with opened(run, MLflow, 3) as process:
        process.write([4], 2.0)
    curves, _ = read_mlflow(uri, "deleted")
    assert curves == recorded(tmp_path)
    assert capsys.readouterr().err.count("; a new history gets all records") == 1


def test_another_server_of_mlflow_gets_all_records(tmp_path):
    pytest.importorskip("mlflow")
    for first_step, name in ((0, "a.db"), (2, "b.db")):
        uri = f"sqlite:///{tmp_path / name}"
        with opened(logged_run(tmp_path, project="server", mlflow_tracking_uri=uri), MLflow, first_step) as process:
            process.write([first_step + 1, first_step + 2], 1.0)
    curves, _ = read_mlflow(uri, "server")
    assert curves == recorded(tmp_path)
    assert [step for step, _ in curves["train/loss"]] == [1, 2, 3, 4]


def test_wandb_without_an_api_key_does_not_ask_at_the_terminal(tmp_path):
    pytest.importorskip("wandb")
    code = (
        "import sys; from pathlib import Path; from tests.run.sinks.runs import logged_run, record;"
        "from trainer.run.sinks.services import Wandb; Wandb(logged_run(Path(sys.argv[1]))).write(record(1, 1.0))"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment = kept | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    parent, child = pty.openpty()
    command = [sys.executable, "-c", code, str(tmp_path)]
    with os.fdopen(parent, "rb", 0) as terminal:
        done = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, cwd=ROOT, env=environment)
        os.close(child)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while part := terminal.read(2**16):
                shown += part
                assert b"Enter your choice" not in shown
        assert done.wait() == 1
    assert b"Refused: no API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline" in shown


# ------------------------------------------------------------ a server that is away


@contextmanager
def mlflow_server(folder, port):
    """Start MLflow's server and wait until it answers."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port, "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder / 'server.db'}"]
    with (folder / "server.log").open("a") as log:
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # ten processes fewer
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True)

    def answers():
        assert process.poll() is None, (folder / "server.log").read_text()
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200

    try:
        wait_for(answers)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not find_spec("flask"), reason="the complete package mlflow, which contains the server, is absent")
def test_a_server_of_mlflow_that_is_killed_and_restarted_gets_all_values(tmp_path, capsys):
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    run = logged_run(tmp_path, project="server", mlflow_tracking_uri=uri)
    with opened(run, MLflow) as process:
        with mlflow_server(tmp_path, port):
            process.write(range(1, 6), 1.0)
            process.delivered()
        process.write(range(6, 11), 2.0)
        wait_for(lambda: process.delivery.warned)
        process.rewind(8)
        process.write(range(9, 13), 3.0)
        with mlflow_server(tmp_path, port):
            process.delivered()
            process.close()
            curves, _ = read_mlflow(uri, "server")
    values = [(step, 1.0 if step < 6 else 2.0 if step < 9 else 3.0) for step in range(1, 13)]
    assert curves == {"train/loss": values} == recorded(tmp_path)
    assert capsys.readouterr().err.count("warning: MLflow cannot be written") == 1


# ------------------------------------------------------------ what a service does not accept


def of_service(name, folder, **settings):
    """Return the class of a service, and a run whose records it gets."""
    if name == "mlflow":
        settings["mlflow_tracking_uri"] = f"sqlite:///{folder / 'mlflow.db'}"
    service = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio}[name]
    return service, logged_run(folder, project=folder.name, **settings)


def read_service(name, folder):
    if name == "wandb":
        return read_wandb(folder)
    return (
        read_mlflow(f"sqlite:///{folder / 'mlflow.db'}", folder.name) if name == "mlflow" else read_trackio(folder.name)
    )


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("damage", ["names", "environment", "settings", "nothing"])
def test_the_description_of_a_run_never_stops_its_metrics(tmp_path, capsys, name, damage):
    pytest.importorskip(name)
    service, run = of_service(name, tmp_path)
    names = '[tokenizer.reuse_reserved_tokens]\n"<|im_start|>" = "a"\n"../x" = "b"\n"a//b" = "c"\n"\\u00e9\\n%" = "d"\n"" = "e"\n'
    if damage == "names":
        (tmp_path / "config.toml").write_text(f"[training]\nsteps = 20\n{names}")
    elif damage == "environment":
        (tmp_path / "environment.json").write_text("[")
    elif damage == "settings":
        (tmp_path / "config.toml").unlink()
    with opened(run, service) as process:
        process.write(range(1, 4), 1.0)
    if name == "wandb":
        list(ended_wandb_run(tmp_path))
    curves, config = read_service(name, tmp_path)
    assert curves == recorded(tmp_path) and len(curves["train/loss"]) == 3
    warned = capsys.readouterr().err
    assert warned.count("gets no description of the run (") == (damage in ("environment", "settings")), warned
    if damage == "names" and name == "mlflow":
        assert config["tokenizer.reuse_reserved_tokens.__im_start__"] == "a"
        assert config["training.steps"] == "20"


@pytest.mark.parametrize(
    ("sink", "settings", "line"),
    [
        (
            "wandb",
            {"project": "a/b"},
            "metrics.project: W&B refuses it: Invalid project name 'a/b': cannot contain characters",
        ),
        ("wandb", {"project": "x" * 129}, "metrics.project: W&B refuses it: Invalid project name 'xxx"),
        (
            "wandb",
            {"tags": ("a", "t" * 80)},
            "metrics.tags: W&B refuses it: Value error, Tag 'tttttttttttttttttttt...tttttttttttttttttttt' is 80",
        ),
        ("wandb", {"tags": ("",)}, "metrics.tags: W&B refuses it: Value error, Tag at index 0 is empty"),
        (
            "mlflow",
            {"tags": ("a%b",)},
            "metrics.tags: 'a%b': a tag of MLflow has at most 250 letters, digits and characters of",
        ),
        ("mlflow", {"tags": ("../a",)}, "metrics.tags: '../a': a tag of MLflow has"),
        (
            "mlflow",
            {"project": "x" * 501},
            "metrics.project: the name of an experiment of MLflow has at most 500 characters",
        ),
        ("mlflow", {"tags": ("a/b: c",), "project": "a/b"}, ""),
        ("wandb", {"tags": ("t" * 64,)}, ""),
    ],
)
def test_a_name_that_a_service_would_refuse_is_refused_before_the_run(sink, settings, line):
    pytest.importorskip(sink)
    metrics = MetricsConfig(sinks=("jsonl", sink), **settings)
    if not line:
        require_access(metrics)
        return
    with pytest.raises(ConfigError) as error:
        require_access(metrics)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("WANDB_MODE", "bogus", "metrics.sinks: W&B refuses WANDB_MODE=bogus: Input should be 'online', 'offline'"),
        ("WANDB_API_KEY", "short", "metrics.sinks: W&B refuses its environment variables: "),
        ("WANDB_BASE_URL", "foo", "metrics.sinks: W&B refuses WANDB_BASE_URL=foo: "),
        ("WANDB_RUN_ID", "a/b", "metrics.sinks: W&B refuses "),
        ("WANDB_CONSOLE", "foo", "metrics.sinks: W&B refuses WANDB_CONSOLE=foo: "),
        ("WANDB_RESUME", "xyz", "metrics.sinks: W&B refuses WANDB_RESUME=xyz: "),
    ],
)
def test_a_variable_that_wandb_refuses_is_one_line_before_the_run(variable, value, line):
    pytest.importorskip("wandb")
    code = "import sys; from trainer.base.config import MetricsConfig; from trainer.run.sinks.services import require_access\n"
    code += "from trainer.base.config import ConfigError\n"
    code += "try: require_access(MetricsConfig(sinks=('jsonl', 'wandb')))\n"
    code += "except ConfigError as error: print(error)"
    done = subprocess.run(  # wandb reads its variables once
        [sys.executable, "-c", code],
        env=os.environ | {"WANDB_MODE": "online", variable: value},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(line) and done.stdout.count("\n") == 1, done.stdout + done.stderr


@pytest.mark.parametrize("how", ["deleted", "by the server"])
def test_a_service_that_will_not_accept_a_run_is_told_once_and_not_waited_for(tmp_path, capsys, how, monkeypatch):
    """An experiment that was deleted, and a request that the server refuses although the run is active."""
    mlflow = pytest.importorskip("mlflow")
    service, run = of_service("mlflow", tmp_path)
    client = mlflow.MlflowClient(run.metrics.mlflow_tracking_uri)
    reason = f"its experiment {tmp_path.name} is deleted; restore it, or set metrics.project"
    if how == "deleted":
        client.delete_experiment(client.create_experiment(tmp_path.name))
    else:
        from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

        reason = "no"

        def refuse(*_, **__):
            raise mlflow.exceptions.MlflowException(reason, INVALID_PARAMETER_VALUE)

        monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refuse)
    with opened(run, service) as process:
        process.write((1, 2), 1.0)
        wait_for(lambda: Refused in process.delivery.warned)
        process.write((3,), 1.0)
    lines = [line[9:] for line in capsys.readouterr().err.splitlines() if " warning: " in line]
    refusals = [f"warning: MLflow will not accept the records of this run ({reason}); metrics.jsonl has them"]
    undescribed = "warning: MLflow has not taken the description of the run (no)"
    assert lines == (refusals if how == "deleted" else [undescribed, *refusals])
    if how != "deleted":
        (found,) = client.search_runs([client.get_experiment_by_name(tmp_path.name).experiment_id])
        assert found.info.status == "FINISHED", "how the run has ended is still shown"


@pytest.mark.parametrize("code", ["RESOURCE_ALREADY_EXISTS", "ENDPOINT_NOT_FOUND"])
def test_what_changes_soon_is_no_refusal(tmp_path, monkeypatch, code):
    """The experiment that another run has created between two requests, and a gateway whose server starts."""
    mlflow = pytest.importorskip("mlflow")
    service, run = of_service("mlflow", tmp_path)
    create, errors = mlflow.MlflowClient.create_experiment, []

    def late(client, name):
        create(client, name) if code == "RESOURCE_ALREADY_EXISTS" and not errors else None
        if not errors:
            errors.append(mlflow.exceptions.MlflowException("no", getattr(mlflow.protos.databricks_pb2, code)))
            raise errors[0]
        return create(client, name)

    monkeypatch.setattr(mlflow.MlflowClient, "create_experiment", late)
    with opened(run, service) as process:
        process.write((1, 2), 1.0)
        wait_for(lambda: process.delivery.saved and process.delivery.saved.get("service"))
    client = mlflow.MlflowClient(run.metrics.mlflow_tracking_uri)
    (found,) = client.search_runs([client.get_experiment_by_name(tmp_path.name).experiment_id])
    assert found.info.status == "FINISHED" and errors


def test_mlflow_gets_all_texts_of_few_values(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    service, run = of_service("mlflow", tmp_path)
    texts = {
        "kind": "samples",
        "step": 1,
        "timestamp_s": 1e9,
        "samples": [{"prompt": f"p{i}", "text": "c"} for i in range(250)],
    }
    with opened(run, service) as process:
        process.write((1,), 1.0)
        for sink in (process.jsonl, process.delivery):
            sink.write(texts)
    client = mlflow.MlflowClient(run.metrics.mlflow_tracking_uri)
    (found,) = client.search_runs([client.get_experiment_by_name(tmp_path.name).experiment_id])
    assert sum(name.startswith("samples/") for name in found.data.tags) == 250, sorted(found.data.tags)[:9]


@pytest.mark.parametrize(
    ("ending", "status", "code"), [("finished", "FINISHED", 0), ("stopped", "KILLED", 1), ("failed", "FAILED", 1)]
)
def test_services_know_how_a_run_has_ended(tmp_path, ending, status, code):
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("wandb")
    for name in ("mlflow", "wandb"):
        (folder := tmp_path / name).mkdir()
        service, run = of_service(name, folder)
        end = {"kind": "end", "step": 3, "timestamp_s": 1e9, "ending": ending, "problem": "the gradient was 0"}
        with opened(run, service) as process:
            process.write((1,), 1.0)
            for sink in (process.jsonl, process.delivery):
                sink.write(end | {"ending": "failed"})  # of a process that was resumed
            process.write((2, 3), 1.0)
            for sink in (process.jsonl, process.delivery):
                sink.write(end)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("mlflow").experiment_id])
    assert (found.info.status, found.data.tags["problem"]) == (status, "step 3, the gradient was 0")
    (exit_code,) = [r.exit.exit_code for r in ended_wandb_run(tmp_path / "wandb") if r.HasField("exit")]
    assert exit_code == code


def test_mlflow_gets_many_records_in_one_request(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    service, run = of_service("mlflow", tmp_path)
    requests, log_batch = [], mlflow.MlflowClient.log_batch

    def count(self, run_id, metrics=(), params=(), tags=(), **others):
        requests.append(len(metrics))
        return log_batch(self, run_id, metrics, params, tags, **others)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", count)
    process = Process(run, service)
    for step in range(1, 501):  # before the delivery starts, as while a server is away
        process.jsonl.write(record(step, 1.0) | {f"value_{i}": float(i) for i in range(9)})
    process.delivery.write({})
    process.close()
    assert sum(requests) == 5000 and max(requests) == 1000 and len([number for number in requests if number]) == 5
    curves, _ = read_mlflow(run.metrics.mlflow_tracking_uri, tmp_path.name)
    assert curves == recorded(tmp_path)


# ------------------------------------------------------------ the process of a package that is killed


def kill_process_of_wandb():
    """Kill W&B's own process, which is a child of this one."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if "wandb-core" in name and int(parent) == os.getpid() and state != "Z":
                os.kill(int(path.parent.name), signal.SIGKILL)
                return
    raise AssertionError("W&B has no process")


def kill_when(condition):
    while not condition():
        time.sleep(0.001)
    kill_process_of_wandb()


@pytest.mark.parametrize("when", ["during the run", "during init", "at the end"])
def test_the_process_of_wandb_may_be_killed(tmp_path, when, capsys):
    pytest.importorskip("wandb")
    service, run = of_service("wandb", tmp_path)
    with opened(run, service) as process:
        if when == "during init":
            killer = threading.Thread(target=kill_when, args=(lambda: any(tmp_path.glob("wandb/offline-run-*")),))
            killer.start()
        process.write((1, 2), 1.0)
        process.delivered()
        if when != "during init":
            kill_process_of_wandb()
        if when == "during the run":
            process.write((3, 4), 1.0)
            process.delivered()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1, "neither empty folders nor old ones"
    list(ended_wandb_run(tmp_path))
    assert read_wandb(tmp_path)[0] == recorded(tmp_path)
    assert capsys.readouterr().err.count("the process of its package has ended (") == 1


# ------------------------------------------------------------ a package that is absent


@pytest.mark.parametrize("name", SERVICES)
def test_an_absent_package_is_one_line_before_the_run_starts(tiny, monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError) as error:
        load_config([*tiny, "--metrics.sinks", f"jsonl,{name}"])
    assert str(error.value) == (
        f"--metrics.sinks jsonl,{name}: needs the package {name}: {sys.executable} -m pip install {name}"
    )


def test_a_folder_with_the_name_of_a_package_is_not_the_package(tmp_path, monkeypatch):
    """W&B writes to a folder named wandb."""
    (tmp_path / "not_a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics\.sinks: needs the package not_a_package: "):
        require_installed("not_a_package", "metrics.sinks")
    require_installed("torch", "metrics.sinks")


@pytest.mark.parametrize(
    ("uri", "variable", "line"),
    [
        ("htp://server", "", "metrics.mlflow_tracking_uri: htp: is no scheme that MLflow knows"),
        ("", "s3://bucket/mlruns", "MLFLOW_TRACKING_URI=s3://bucket/mlruns: s3: is no scheme that MLflow knows"),
        ("http://server:5000", "s3://ignored", None),
        ("postgresql+psycopg2://user@host/db", "", None),
        ("sqlite:///mlflow.db", "", None),
        ("", "", None),
    ],
)
def test_an_unknown_scheme_of_mlflow_is_refused_before_the_run(uri, variable, line, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", variable)
    metrics = MetricsConfig(sinks=("jsonl", "mlflow"), mlflow_tracking_uri=uri)
    if line is None:
        require_access(metrics)
        return
    with pytest.raises(ConfigError) as error:
        require_access(metrics)
    assert str(error.value) == f"{line}; expected http://, https:// or a database such as sqlite:///"


def test_wandb_without_a_key_is_refused_before_the_run(monkeypatch):
    monkeypatch.setattr(services, "_may_log_in", lambda: False)
    with pytest.raises(
        ConfigError, match=r"metrics\.sinks: wandb has no API key: run `wandb login`, or set WANDB_API_KEY"
    ):
        require_access(MetricsConfig(sinks=("jsonl", "wandb")))
    require_access(MetricsConfig(sinks=("jsonl",)))
