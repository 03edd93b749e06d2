"""Services for experiments. Each class is a `Service` of a `Delivery`: it writes at once, and raises if it cannot."""

import html
import importlib.metadata
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainer.base.config import ConfigError, MetricsConfig
from trainer.base.system import console
from trainer.run.sinks.delivery import HistoryLost, first_line
from trainer.run.sinks.sink import LoggedRun, scalars, texts, timestamp_s

_UNUSABLE_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""Error codes of MLflow for a run that is unknown, deleted, or whose id has the form of another server."""


_NO_KEY = "no API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
_MLFLOW_SCHEMES = {
    *("http", "https", "file", "databricks", "databricks-uc", "uc"),
    *("sqlite", "postgresql", "mysql", "mssql"),  # of its databases
}


def require_access(metrics: MetricsConfig) -> None:
    """Raise ConfigError if a service would refuse the records, as far as this is known without a connection."""
    if "wandb" in metrics.sinks and not _may_log_in():
        raise ConfigError("metrics.sinks", f"wandb has {_NO_KEY}")
    uri = metrics.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    scheme = re.match(r"([\w-]+)(?:\+\w+)?:", uri)
    plugins = (plugin.name for plugin in importlib.metadata.entry_points(group="mlflow.tracking_store"))
    if "mlflow" in metrics.sinks and scheme and scheme[1] not in {*_MLFLOW_SCHEMES, *plugins}:
        message = (
            f"{scheme[1]}: is no scheme that MLflow knows; expected http://, https:// or a database such as sqlite:///"
        )
        if not metrics.mlflow_tracking_uri:
            raise ConfigError("", f"MLFLOW_TRACKING_URI={uri}: {message}")
        raise ConfigError("metrics.mlflow_tracking_uri", message)


def _may_log_in() -> bool:
    """Return whether W&B writes offline or has a key. Its own init would ask for the key at the terminal."""
    import wandb

    setup = wandb.setup(wandb.Settings(silent=True))
    return setup.settings.mode != "online" or bool(wandb.login(prompt=False, verify=False))


class Wandb:
    """A run of Weights & Biases. The package's environment variables apply, such as WANDB_MODE=offline and WANDB_API_KEY.

    Steps of W&B only grow, so the project's step is a metric beside them, and the x axis of every curve.
    """

    def __init__(self, run: LoggedRun):
        self.run, self.state, self.history = run, {}, None
        self.can_continue = False

    def write(self, record: dict[str, Any]) -> None:
        if self.history is None:
            self.history = self._open(self.run.metrics.tags)
        shown = {name: _wandb_text(text) for name, text in texts(record).items()}
        self.history.log({"step": record["step"], "time": timestamp_s(record), **scalars(record), **shown})

    def rewind(self, step: int) -> None:
        """Begin a run with a new id. An old one that was written offline is deleted; any other gets the tag "replaced"."""
        self.close()
        if "id" in self.state:
            offline = list(self.run.folder.glob(f"wandb/offline-run-*-{self.state['id']}"))
            for folder in offline:
                shutil.rmtree(folder)
            if not offline:
                self._tag_replaced()
        self.state.clear()

    def close(self) -> None:
        if self.history is not None:
            self.history.finish()
        self.history = None

    def _tag_replaced(self) -> None:
        """Tag the old run if it is still there. The new one does not depend on it."""
        try:
            self._open((*self.run.metrics.tags, "replaced")).finish()
        except Exception as error:  # the package raises many types
            console.warning(f"wandb: the run {self.state['id']} did not get the tag replaced ({first_line(error)})")

    def _open(self, tags: tuple[str, ...]) -> Any:
        import wandb

        metrics = self.run.metrics
        if not _may_log_in():
            raise RuntimeError(_NO_KEY)
        try:
            history = wandb.init(
                project=metrics.project,
                entity=metrics.entity or None,
                name=self.run.title,
                notes=metrics.notes or None,
                tags=tags,
                id=self.state.setdefault("id", uuid.uuid4().hex),
                resume="allow",
                dir=self.run.folder,
                settings=wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=30),  # seconds
            )
        except wandb.Error as error:
            if "previously created and deleted" in str(error):
                raise HistoryLost(f"the run {self.state['id']} was deleted") from error
            raise
        history.config.update(self.run.description(), allow_val_change=True)
        history.define_metric("*", step_metric="step")
        self.can_continue = not history.offline  # a second offline folder would not be appended to the first
        if not history.offline:
            console.info(f"wandb: {history.url}")
        return history


def _wandb_text(text: str) -> Any:
    import wandb

    return wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)


class MLflow:
    """A run of MLflow, on a tracking server or in a database."""

    can_continue = True

    def __init__(self, run: LoggedRun):
        self.run, self.state, self.client = run, {}, None

    def write(self, record: dict[str, Any]) -> None:
        from mlflow.entities import Metric, RunTag

        if self.client is None:
            self._open()
        # If a request is repeated, because its answer was lost, the server recognizes values of the same time.
        time_ms = int(1000 * timestamp_s(record))
        values = [Metric(key, value, time_ms, record["step"]) for key, value in scalars(record).items()]
        # Tags, because a run's files may belong to a folder that does not exist here. They show the newest texts.
        newest = {name: f"step {record['step']}, {text}"[:5000] for name, text in texts(record).items()}
        tags = [RunTag(name, text) for name, text in newest.items()]
        with self._history(self.client):
            self.client.log_batch(self.state["id"], metrics=values, tags=tags)

    def rewind(self, step: int) -> None:
        """Begin another run, and mark the old one as deleted: values of a run cannot be removed."""
        from mlflow.exceptions import MlflowException

        if "id" in self.state:
            try:
                self._connect().delete_run(self.state["id"])
            except MlflowException as error:
                if error.error_code not in _UNUSABLE_RUN:
                    raise
        self.state.clear()
        self.client = None

    def close(self) -> None:
        if self.client is not None:
            with self._history(self.client):
                self.client.set_terminated(self.state["id"])
        self.client = None

    def _connect(self) -> Any:
        # Otherwise a request to a server that is away lasts for minutes. The Delivery repeats it.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        return MlflowClient(self.run.metrics.mlflow_tracking_uri or None)

    def _open(self) -> None:
        client, metrics = self._connect(), self.run.metrics
        if "id" not in self.state:
            experiment = client.get_experiment_by_name(metrics.project)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(metrics.project)
            tags = {**dict.fromkeys(metrics.tags, "true"), "mlflow.note.content": metrics.notes}
            self.state["id"] = client.create_run(experiment_id, run_name=self.run.title, tags=tags).info.run_id
        else:
            with self._history(client):
                client.update_run(self.state["id"], status="RUNNING")
        self._describe(client)
        self.client = client

    @contextmanager
    def _history(self, client: Any) -> Iterator[None]:
        """Context manager of a request that changes the run. Raises HistoryLost if it failed because the run is deleted or, on
        another server, unknown."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code in _UNUSABLE_RUN and not self._is_active(client):
                raise HistoryLost(f"the run {self.state['id']} is deleted or unknown") from error
            raise

    def _is_active(self, client: Any) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            return client.get_run(self.state["id"]).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code in _UNUSABLE_RUN:
                return False
            raise

    def _describe(self, client: Any) -> None:
        """Write the configuration and the environment as parameters. A parameter cannot change: a new value becomes a tag."""
        from mlflow.entities import Param, RunTag

        old = client.get_run(self.state["id"]).data.params
        new = {key[:250]: str(value)[:6000] for key, value in _flat(self.run.description()).items()}  # MLflow's limits
        added = [Param(key, value) for key, value in new.items() if key not in old]
        changed = [RunTag(key, value) for key, value in new.items() if old.get(key, value) != value]
        for start in range(0, len(added), 100):  # the limit of a request
            client.log_batch(self.state["id"], params=added[start : start + 100])
        for start in range(0, len(changed), 100):
            client.log_batch(self.state["id"], tags=changed[start : start + 100])


class Trackio:
    """A run of Trackio, in its local database. Its environment variables apply: with TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, it
    writes elsewhere."""

    can_continue = False  # Trackio finds a run by its name, which another run folder may have given too

    def __init__(self, run: LoggedRun):
        self.run, self.state, self.history = run, {}, None

    def write(self, record: dict[str, Any]) -> None:
        if self.history is None:
            self._open()
        shown = {name: _trackio_text(text) for name, text in texts(record).items()}
        self.history.log(scalars(record) | shown, step=record["step"])

    def rewind(self, step: int) -> None:
        """Delete the run. The next one has the same name."""
        import trackio

        self.close()
        if "id" in self.state:
            for old in trackio.Api().runs(self.run.metrics.project):
                if old.id == self.state["id"]:
                    old.delete()
        self.state.clear()

    def close(self) -> None:
        if self.history is not None:
            self.history.finish()
        self.history = None

    def _open(self) -> None:
        import trackio

        metrics = self.run.metrics
        self.history = trackio.init(
            metrics.project,
            self.run.title,
            config=self.run.description() | {"tags": list(metrics.tags), "notes": metrics.notes},
            resume="never",
            auto_log_cpu=False,
            auto_log_gpu=False,
            embed=False,
        )
        self.state["id"] = self.history.id


def _trackio_text(text: str) -> Any:
    import trackio

    return trackio.Markdown(text)


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    """Return the values of nested tables by their keys, joined by dots."""
    flat = {}
    for key, value in table.items():
        inner = _flat(value) if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner.items()}
    return flat
