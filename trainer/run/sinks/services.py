"""Services for experiments, for a `Delivery`."""

import errno
import html
import importlib.metadata
import os
import posixpath
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from trainer.base.config import ConfigError, MetricsConfig
from trainer.base.config.packages import require_package
from trainer.base.system import console
from trainer.base.system.spelling import first_line
from trainer.run.sinks.delivery import HistoryLost, HistoryUnknown, Refused, Service
from trainer.run.sinks.sink import Ending, scalars, texts, timestamp_s

_UNUSABLE_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""Error codes of MLflow for a run that is unknown, deleted, or whose id has the form of another server."""
_NO_KEY = "no API key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
_WILL_NOT = re.compile(r"returned error (400|401|403|404|409|422)\b|permission denied", re.IGNORECASE)
"""Pattern of W&B's errors after which another attempt would have the same result."""
_MAY_CHANGE = ("ENDPOINT_NOT_FOUND", "RESOURCE_ALREADY_EXISTS")
"""Error codes of MLflow that are no refusals: of a gateway whose server starts, and of an experiment that another run has just
created."""
_MLFLOW_METRICS = 1000
"""Maximum number of values in one request to MLflow."""
_MLFLOW_SCHEMES = {
    *("http", "https", "file", "databricks", "databricks-uc", "uc"),
    *("sqlite", "postgresql", "mysql", "mssql"),  # of its databases
}


def require_access(metrics: MetricsConfig) -> None:
    """Raise ConfigError if a service would refuse the records, as far as this is known without a connection."""
    if "wandb" in metrics.sinks:
        _check_wandb(metrics)
    for name in ("mlflow", "trackio"):
        if name in metrics.sinks:
            require_package(name, "metrics.sinks")
    if "mlflow" in metrics.sinks:
        _check_names_of_mlflow(metrics)
    uri = metrics.mlflow_tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    scheme = re.match(r"([\w-]+)(?:\+\w+)?:", uri)
    plugins = (plugin.name for plugin in importlib.metadata.entry_points(group="mlflow.tracking_store"))
    if "mlflow" in metrics.sinks and scheme and scheme[1] not in {*_MLFLOW_SCHEMES, *plugins}:
        key, origin = (
            ("metrics.mlflow_tracking_uri", "") if metrics.mlflow_tracking_uri else ("", f"MLFLOW_TRACKING_URI={uri}: ")
        )
        message = "is no scheme that MLflow knows; expected http://, https:// or a database such as sqlite:///"
        raise ConfigError(key, f"{origin}{scheme[1]}: {message}")


def _check_wandb(metrics: MetricsConfig) -> None:
    """Raise ConfigError if W&B's own checks refuse a name, or if there is no key."""
    wandb = require_package("wandb", "metrics.sinks")
    for name, key in (("project", "project"), ("tags", "run_tags"), ("notes", "run_notes"), ("entity", "entity")):
        try:
            wandb.Settings(silent=True, **{key: getattr(metrics, name) or None})
        except (wandb.errors.UsageError, ValueError) as error:
            raise ConfigError(f"metrics.{name}", f"W&B refuses it: {_reason(error)[1]}") from None
    try:
        may_log_in = _may_log_in()
    except (wandb.errors.Error, ValueError) as error:  # of the variables WANDB_*
        name, reason = _reason(error)
        raise ConfigError("metrics.sinks", f"W&B refuses {name or 'its environment variables'}: {reason}") from None
    if not may_log_in:
        raise ConfigError("metrics.sinks", f"wandb has {_NO_KEY}")


def _reason(error: Exception) -> tuple[str, str]:
    """Return the environment variable that W&B refuses, if its error names a setting, and the reason."""
    if not hasattr(error, "errors"):
        return "", first_line(error)
    problem = error.errors()[0]  # of pydantic
    variable = f"WANDB_{'_'.join(map(str, problem['loc'])).upper()}"
    return f"{variable}={os.environ[variable]}" if variable in os.environ else "", problem["msg"]


def _check_names_of_mlflow(metrics: MetricsConfig) -> None:
    for tag in metrics.tags:
        if tag != _name_for_mlflow(tag):
            message = (
                f"{tag[:80]!r}: a tag of MLflow has at most 250 letters, digits and characters of _-./: and spaces"
            )
            raise ConfigError("metrics.tags", message)
    if len(metrics.project) > 500:
        raise ConfigError("metrics.project", "the name of an experiment of MLflow has at most 500 characters")


def _name_for_mlflow(name: str) -> str:
    """Return a name that MLflow accepts for a parameter or a tag."""
    # It treats names as paths, which must not lead elsewhere.
    name = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/.")[:250]
    return name or "_"


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
        with self._own_process():
            self.history.log({"step": record["step"], "time": timestamp_s(record), **scalars(record), **shown})

    def close(self) -> None:
        history, self.history = self.history, None
        if history is not None:
            with self._own_process():
                history.finish(exit_code=int(self.ending != Ending.FINISHED))

    @contextmanager
    def _own_process(self) -> Iterator[None]:
        """Context manager that notices the end of W&B's own process. What it had stored is then unknown. The package
        raises errors of several internal types then, and none of its public ones."""
        import wandb

        try:
            yield
        except (wandb.Error, ValueError, TypeError, FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.history = None
            with suppress(Exception):  # otherwise the package goes on to send to the process that has ended
                wandb.teardown()
            raise HistoryUnknown(f"the process of its package has ended ({first_line(error)})") from error

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

        if not _may_log_in():
            raise Refused(_NO_KEY)
        before, is_new = set(self.run.folder.glob("wandb/*run-*")), not self.state
        try:
            history = self._init(*tags)
        except Exception as error:
            for folder in set(self.run.folder.glob("wandb/*run-*")) - before:  # it would be empty
                shutil.rmtree(folder, ignore_errors=True)
            if is_new:
                self.state.clear()
            if isinstance(error, wandb.errors.UsageError | wandb.errors.AuthenticationError | ValueError):
                raise Refused(first_line(error)) from error
            if isinstance(error, wandb.Error) and "previously created and deleted" in str(error):
                raise HistoryLost(f"the run {self.state['id']} was deleted") from error
            if isinstance(error, wandb.errors.CommError) and _WILL_NOT.search(str(error)):
                raise Refused(first_line(error)) from error
            raise
        history.config.update(self.description(), allow_val_change=True)
        history.define_metric("*", step_metric="step")
        self.can_continue = not history.offline  # a second offline folder would not be appended to the first
        if not history.offline:
            console.info(f"wandb: {history.url}")
        return history

    def _init(self, *tags: str) -> Any:
        import wandb

        metrics = self.run.metrics
        with self._own_process():
            return wandb.init(
                project=metrics.project,
                entity=metrics.entity or None,
                name=self.run.title,
                notes=metrics.notes or None,
                tags=(*metrics.tags, *tags),
                id=self.state.setdefault("id", uuid.uuid4().hex),
                resume="allow",
                dir=self.run.folder,
                # Its own metadata would contain the command line, with credentials. Timeouts are in seconds.
                settings=wandb.Settings(
                    silent=True, console="off", x_disable_meta=True, init_timeout=30, finish_timeout=30
                ),
            )


class MLflow(Service):
    """A run of MLflow, on a tracking server or in a database. `history` is the client."""

    can_continue = True
    most_records = 200
    described = ""
    """Id of the run that has got its description from this process."""

    def write_all(self, records: Sequence[dict[str, Any]]) -> None:
        from mlflow.entities import Metric, RunTag

        # If a request is repeated, because its answer was lost, the server recognizes values of the same time.
        values = [
            Metric(key, value, int(1000 * timestamp_s(record)), record["step"])
            for record in records
            for key, value in scalars(record).items()
        ]
        # Tags, because a run's files may belong to a folder that does not exist here. They show the newest texts.
        newest = {
            _name_for_mlflow(name): f"step {record['step']}, {text}"[:5000]
            for record in records
            for name, text in texts(record).items()
        }
        tags = [RunTag(name, text) for name, text in newest.items()]
        for start in range(0, max(len(values), 10 * len(tags), 1), _MLFLOW_METRICS):
            part = tags[start // 10 : (start + _MLFLOW_METRICS) // 10]  # MLflow's limits: 1,000 values and 100 tags
            self._change_run("log_batch", metrics=values[start : start + _MLFLOW_METRICS], tags=part)

    def restart(self) -> None:
        """Mark the run as deleted: its values cannot be removed."""
        self.history = None
        if self._is_active(client := self._connect()):
            client.delete_run(self.state["id"])

    def close(self) -> None:
        if self.state:
            status = {Ending.FINISHED: "FINISHED", Ending.STOPPED: "KILLED", Ending.FAILED: "FAILED"}
            self._change_run("set_terminated", status=status[self.ending])

    def _change_run(self, request: str, **content: Any) -> None:
        """Send a request about the run. After an error, the next one opens the run again, and finds out if it is deleted."""
        client, self.history = self.history or self._open(), None
        with self._refusals(client):
            getattr(client, request)(self.state["id"], **content)
        self.history = client

    @contextmanager
    def _refusals(self, client: Any) -> Iterator[None]:
        """Context manager that tells a refusal of the server from its absence, and from a run that is deleted."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            status = error.get_http_status_code()
            if not 400 <= status < 500 or status in (408, 429) or error.error_code in _MAY_CHANGE:
                raise
            if self.state and not self._is_active(client):
                raise HistoryLost(f"the run {self.state['id']} is deleted or unknown") from error
            raise Refused(first_line(error)) from error

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
        from mlflow.exceptions import MlflowException

        client, metrics = self._connect(), self.run.metrics
        if not self.state:
            tags = {**dict.fromkeys(metrics.tags, "true"), "mlflow.note.content": metrics.notes}
            with self._refusals(client):
                experiment = client.get_experiment_by_name(metrics.project)
                if experiment and experiment.lifecycle_stage == "deleted":
                    raise Refused(f"its experiment {metrics.project} is deleted; restore it, or set metrics.project")
                experiment_id = experiment.experiment_id if experiment else client.create_experiment(metrics.project)
                self.state["id"] = client.create_run(experiment_id, run_name=self.run.title, tags=tags).info.run_id
        elif self._is_active(client):
            client.update_run(self.state["id"], status="RUNNING")
        else:
            raise HistoryLost(f"the run {self.state['id']} is deleted or unknown")
        if self.described != self.state["id"]:
            self.described = self.state["id"]
            try:
                self._describe(client)
            except MlflowException as error:  # metrics do not need it
                console.warning(f"MLflow has not taken the description of the run ({first_line(error)})")
        return client

    def _describe(self, client: Any) -> None:
        """Write the configuration and the environment as parameters. A parameter cannot change: a new value becomes a tag."""
        from mlflow.entities import Param, RunTag

        old = client.get_run(self.state["id"]).data.params
        new = {_name_for_mlflow(key): str(value)[:6000] for key, value in _flat(self.description()).items()}
        for start in range(0, len(new), 100):  # MLflow's limit of a request, and above of a text
            part = [*new.items()][start : start + 100]
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
            config=self.description() | {"tags": list(metrics.tags), "notes": metrics.notes},
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
