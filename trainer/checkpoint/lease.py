"""A lease on a place in an object store: which process may write there. No clock must agree with another one: a lease is dead if
its object has not changed during its own time-out, on the clock of the process that waits."""

import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field

from trainer.base.config import ConfigError
from trainer.base.system import console
from trainer.base.system.files import parse_json_object
from trainer.base.system.object_store import ObjectStore
from trainer.base.system.store_errors import StoreError
from trainer.base.system.units import duration

LEASE = "lease.json"
PROBE = "probe"
"""Small object that stays: not everybody who may write may also remove."""
_POLL_S = 1.0


class LeaseLost(Exception):
    """Another process has taken the lease. The message is one line."""


@dataclass
class Lease:
    """A lease that this process holds."""

    store: ObjectStore
    is_conditional: bool
    """Whether the store honours conditions. Otherwise the owner is read back."""
    timeout_s: float
    owner: str
    version: str = ""
    """ETag of the object."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Uploads ask for the lease while another thread renews it."""

    @classmethod
    def acquire(cls, store: ObjectStore, timeout_s: float, is_conditional: bool, own_before: str) -> "Lease":
        """Take the lease, after waiting for a live one to end or to be renewed.

        Args:
            store: The store.
            timeout_s: Time after which others may take over a lease that is not renewed.
            is_conditional: Whether the store honours conditions.
            own_before: Owner that an earlier process on this disk was, whose lock this process holds: it is dead. "": unknown.

        Raises:
            ConfigError: Another process holds the lease.
            StoreError: The store cannot be used.
        """
        lease = cls(store, is_conditional, timeout_s, uuid.uuid4().hex[:12])
        found, version = _read(store)
        if found and not found.get("released") and found.get("owner") != own_before:
            others = float(found.get("timeout_s", timeout_s))
            console.info(
                f"{store.url} was in use by {found.get('process')}; waiting up to {duration(others)} for a sign of life"
            )
            end = time.monotonic() + others
            while time.monotonic() < end:
                time.sleep(min(_POLL_S, others / 4))
                now, version_now = _read(store)
                if not now or now.get("released"):
                    found, version = now, version_now
                    break
                if version_now != version:
                    raise ConfigError(
                        "checkpoint.mirror",
                        f"{store.url} is in use by {now.get('process')}; choose another prefix, or stop that run",
                    )
        lease.version = version
        try:
            lease._write()
        except StoreError as error:
            found, lease.version = _read(store) if error.kind == "changed" else ({}, "")
            if error.kind != "changed":
                raise
            if found.get("owner") != lease.owner:  # otherwise only the answer to the write was lost
                message = f"{store.url}: another run has just started there"
                raise ConfigError("checkpoint.mirror", message) from None
        return lease

    def renew(self) -> None:
        """Show that this process is alive. Raises LeaseLost or StoreError."""
        with self._lock:
            try:
                if not self.is_conditional:
                    self.require()
                self._write()
            except StoreError as error:
                if error.kind != "changed":
                    raise
                self.require()  # a write whose answer was lost is our own
                self._write()

    def require(self) -> None:
        """Raise LeaseLost if another process has taken the lease, or StoreError."""
        with self._lock:
            found, version = _read(self.store)
            if found.get("owner") != self.owner:
                who = found.get("process", "a process that has removed the lease")
                raise LeaseLost(f"{self.store.url} was taken over by {who}; this run no longer writes there")
            self.version = version

    def release(self) -> None:
        """End the lease, so that the next process need not wait. Raises StoreError or LeaseLost."""
        with self._lock:
            self.require()
            self._write(released=True)

    def _write(self, released: bool = False) -> None:
        content = {
            "owner": self.owner,
            "process": f"process {os.getpid()} on {socket.gethostname()}",
            "timeout_s": self.timeout_s,
            "renewal": uuid.uuid4().hex[:8],  # otherwise the ETag would not change
            "released": released,
        }
        text = json.dumps(content, indent=1).encode()
        self.version = self.store.write(LEASE, text, self.version if self.is_conditional else None)


def _read(store: ObjectStore) -> tuple[dict, str]:
    """Return the content of the lease and its version, ({}, "") if there is none."""
    try:
        content, version = store.read(LEASE)
        return parse_json_object(content), version
    except StoreError as error:
        if error.kind == "missing":
            return {}, ""
        raise
    except ValueError:
        raise StoreError(f"{store.name(LEASE)} is not the lease of a run; choose another prefix", "damaged") from None


def honours_conditions(store: ObjectStore) -> bool:
    """Return whether the store refuses to create an object that exists, and to replace another version than the given one. Raises
    StoreError."""
    # Unique contents: another run may probe at the same time.
    previous = store.write(PROBE, uuid.uuid4().bytes, None)
    store.write(PROBE, uuid.uuid4().bytes, None)
    for version in ("", previous):
        try:
            store.write(PROBE, uuid.uuid4().bytes, version)
            return False
        except StoreError as error:
            if error.kind != "changed":
                raise
    return True
