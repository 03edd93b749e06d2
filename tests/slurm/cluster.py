"""A Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd, with ports and folders of their own."""

import getpass
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

from tests.ports import free_ports
from trainer.base.system.process import die_with_parent

NODES = ("127.0.0.1", "127.0.0.2")
"""Names of the nodes, which are their addresses: names of hosts would have to be in /etc/hosts."""

CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmctldParameters=preempt_send_user_signal
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=30
KillWait=10
MpiDefault=none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=96 RealMemory=4000 Gres=gpu:8
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=96 RealMemory=4000 Gres=gpu:8
PartitionName=normal Nodes=127.0.0.1,127.0.0.2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=127.0.0.1,127.0.0.2 PriorityTier=2
"""
"""Each node claims the GPUs and CPUs that train.sbatch requests, so that the file runs as shipped."""


def wait_until(condition: Callable[[], object], what: Callable[[], str], timeout_s: float = 180) -> None:
    """Wait until a condition holds. After timeout_s, fail with the text of `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


class Cluster:
    def __init__(self, folder: Path):
        self.folder = folder
        self.variables = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.variables |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        self.daemons: dict[str, subprocess.Popen] = {}

    def start(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for i in range(8):
            (self.folder / f"gpu{i}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        values = {"host": socket.gethostname().partition(".")[0], "user": getpass.getuser(), "ports": free_ports(3)}
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, **values))
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *options)
        wait_until((self.folder / "munge.sock").exists, self.logs, 30)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self._states() == ["idle", "idle"], self.logs, 60)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self.folder, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill slurmd and all processes of a node, as a loss of its power would."""
        self.daemons[node].kill()
        self.daemons[node].wait()
        for pid, variables in self._processes():
            if f"SLURMD_NODENAME={node}" in variables:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the id and the environment of each process of this cluster, except its daemons."""
        daemons = {process.pid for process in self.daemons.values()}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
                if f"SLURM_CONF={self.variables['SLURM_CONF']}" in variables and int(path.name) not in daemons:
                    yield int(path.name), variables

    def _states(self) -> list[str]:
        done = self.call("sinfo", "--noheader", "--Node", "--partition", "normal", "--format", "%t", check=False)
        return done.split()

    def call(self, *command: object, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """Return what a command of Slurm prints."""
        done = subprocess.run(
            [str(word) for word in command], env=self.variables | variables, cwd=cwd or self.folder,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return fields of a job's record."""
        return dict(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))

    def await_state(self, job: str, *states: str) -> dict[str, str]:
        wait_until(lambda: self.job(job)["JobState"] in states, lambda: f"{self.job(job)}\n{self.logs()}")
        return self.job(job)

    def start_again(self, job: str) -> None:
        """Start a job that was queued again. Slurm would wait two minutes, and it sets the start again, and refuses to change it,
        while the previous run of the job ends; so it is changed until it is near. A start in the second in which the previous
        run was ended would be refused with it ("Job credential revoked")."""

        def runs() -> bool:
            facts = self.job(job)
            soon = (datetime.now() + timedelta(seconds=5)).isoformat()
            # Not StartTime, "Unknown" until the scheduler looks at the job: it would never be eligible when it does.
            if facts["JobState"] == "PENDING" and facts["EligibleTime"] > soon:  # "Unknown" is later, too
                self.call("scontrol", "update", f"JobId={job}", "StartTime=now+2", check=False)
            return facts["JobState"] == "RUNNING"

        wait_until(runs, lambda: f"{self.job(job)}\n{self.logs()}")

    def logs(self) -> str:
        files = (*self.folder.glob("*.out"), *self.folder.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in files)

    def cancel_all(self) -> None:
        """Cancel all jobs and wait until none is running."""
        self.call("scancel", "--user", getpass.getuser(), check=False)
        wait_until(lambda: not self.call("squeue", "--noheader", check=False), self.logs, 60)

    def stop(self) -> None:
        for process in reversed(self.daemons.values()):
            process.terminate()
        for process in self.daemons.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for pid, _ in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
        cluster.cancel_all()
    finally:
        cluster.stop()
