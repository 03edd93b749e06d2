"""Services for experiments, for a `Delivery`."""

import html
import importlib.metadata
import os
import re
import shutil
import uuid
from typing import Any

from trainer.base.config import ConfigError, MetricsConfig
from trainer.base.config.packages import require_package
from trainer.base.system import console
from trainer.base.system.spelling import first_line
from trainer.run.sinks.delivery import HistoryLost, Service
from trainer.run.sinks.sink import scalars, texts, timestamp_s

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
        key, origin = (
            ("metrics.mlflow_tracking_uri", "") if metrics.mlflow_tracking_uri else ("", f"MLFLOW_TRACKING_URI={uri}: ")
        )
        message = "is no scheme that MLflow knows; expected http://, https:// or a database such as sqlite:///"
        raise ConfigError(key, f"{origin}{scheme[1]}: {message}")


def _may_log_in() -> bool:
    """Return whether W&B writes offline or has a key. Its own init would ask for the key at the terminal."""
    wandb = require_package("wandb", "metrics.sinks")
    setup = wandb.setup(wandb.Settings(silent=True))
    return setup.settings.mode != "online" or bool(wandb.login(prompt=False, verify=False))


class Wandb(Service):
    """A run of Weights & Biases. The package's environment variables apply, such as WANDB_MODE=offline and WANDB_API_KEY.

    Steps of W&B only grow, so the project's step is a metric beside them, and the x axis of every curve.
    """

    def write(self, record: dict[str, Any]) -> None:
        import wandb

        self.history = self.history or self._open()
        shown = {
            name: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False) for name, text in texts(record).items()
        }
        self.history.log({"step": record["step"], "time": timestamp_s(record), **scalars(record), **shown})

    def restart(self) -> None:
        """Delete a run that was written offline; give any other the tag "replaced". The next one has another id."""
        self.close()
        offline = list(self.run.folder.glob(f"wandb/offline-run-*-{self.state['id']}")) if self.state else []
        for folder in offline:
            shutil.rmtree(folder)
        if self.state and not offline:
            try:
                self._open("replaced").finish()
            except Exception as error:  # the package raises many types, and the new run does not depend on the old one
                message = f"the run {self.state['id']} did not get the tag replaced ({first_line(error)})"
                console.warning(f"wandb: {message}")

    def _open(self, *tags: str) -> Any:
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
                tags=(*metrics.tags, *tags),
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


class MLflow(Service):
    """A run of MLflow, on a tracking server or in a database. `history` is the client."""

    can_continue = True

    def write(self, record: dict[str, Any]) -> None:
        from mlflow.entities import Metric, RunTag

        # If a request is repeated, because its answer was lost, the server recognizes values of the same time.
        time_ms = int(1000 * timestamp_s(record))
        values = [Metric(key, value, time_ms, record["step"]) for key, value in scalars(record).items()]
        # Tags, because a run's files may belong to a folder that does not exist here. They show the newest texts.
        tags = [RunTag(name, f"step {record['step']}, {text}"[:5000]) for name, text in texts(record).items()]
        self._change_run("log_batch", metrics=values, tags=tags)

    def restart(self) -> None:
        """Mark the run as deleted: its values cannot be removed."""
        self.history = None
        if self._is_active(client := self._connect()):
            client.delete_run(self.state["id"])

    def close(self) -> None:
        if self.state:
            self._change_run("set_terminated")

    def _change_run(self, request: str, **content: Any) -> None:
        """Send a request about the run. After an error, the next one opens the run again, and finds out if it is deleted."""
        client, self.history = self.history or self._open(), None
        getattr(client, request)(self.state["id"], **content)
        self.history = client

    def _connect(self) -> Any:
        # Otherwise a request to a server that is away lasts for minutes. The Delivery repeats it.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow import MlflowClient

        return MlflowClient(self.run.metrics.mlflow_tracking_uri or None)

    def _is_active(self, client: Any) -> bool:
        """Return whether the run is neither deleted nor, on another server, unknown."""
        from mlflow.exceptions import MlflowException

        try:
            return bool(self.state) and client.get_run(self.state["id"]).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code not in _UNUSABLE_RUN:
                raise
            return False

    def _open(self) -> Any:
        client, metrics = self._connect(), self.run.metrics
        if not self.state:
            experiment = client.get_experiment_by_name(metrics.project)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(metrics.project)
            tags = {**dict.fromkeys(metrics.tags, "true"), "mlflow.note.content": metrics.notes}
            self.state["id"] = client.create_run(experiment_id, run_name=self.run.title, tags=tags).info.run_id
        elif self._is_active(client):
            client.update_run(self.state["id"], status="RUNNING")
        else:
            raise HistoryLost(f"the run {self.state['id']} is deleted or unknown")
        self._describe(client)
        return client

    def _describe(self, client: Any) -> None:
        """Write the configuration and the environment as parameters. A parameter cannot change: a new value becomes a tag."""
        from mlflow.entities import Param, RunTag

        old = client.get_run(self.state["id"]).data.params
        new = list(_flat(self.run.description()).items())
        for start in range(0, len(new), 100):  # MLflow's limits: of a request, and below of a name and a text
            part = [(key[:250], str(value)[:6000]) for key, value in new[start : start + 100]]
            added = [Param(key, value) for key, value in part if key not in old]
            changed = [RunTag(key, value) for key, value in part if old.get(key, value) != value]
            client.log_batch(self.state["id"], params=added, tags=changed)


class Trackio(Service):
    """A run of Trackio, in its local database. Its environment variables apply: with TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, it
    writes elsewhere. It cannot be continued: Trackio finds a run by its name, which another run folder may have given too."""

    def write(self, record: dict[str, Any]) -> None:
        import trackio

        self.history = self.history or self._open()
        shown = {name: trackio.Markdown(text) for name, text in texts(record).items()}
        self.history.log(scalars(record) | shown, step=record["step"])

    def restart(self) -> None:
        """Delete the run. The next one has the same name."""
        import trackio

        self.close()
        for old in trackio.Api().runs(self.run.metrics.project) if self.state else ():
            if old.id == self.state["id"]:
                old.delete()

    def _open(self) -> Any:
        import trackio

        metrics = self.run.metrics
        history = trackio.init(
            metrics.project,
            self.run.title,
            config=self.run.description() | {"tags": list(metrics.tags), "notes": metrics.notes},
            resume="never",
            auto_log_cpu=False,
            auto_log_gpu=False,
            embed=False,
        )
        self.state["id"] = history.id
        return history


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    """Return the values of nested tables by their keys, joined by dots."""
    flat = {}
    for key, value in table.items():
        inner = _flat(value) if isinstance(value, dict) else None
        flat |= {key: value} if inner is None else {f"{key}.{k}": v for k, v in inner.items()}
    return flat
