"""A long, unattended run with one fault after another: case 48."""

import json
import math
import signal
import statistics
import time
from pathlib import Path

from tests.faults.harness import Failed, FaultHarness, SeededRandom, TrialRun, digests, expect, kill

MEAN_INTERVAL_S = 60.0
"""Mean time between faults."""
STEP_S = 0.1
"""Time added to each step."""
FAULTS = (
    *("kill all", "kill a rank", "kill the launcher", "stop", "stop a rank", "stop twice"),
    *("raise", "hang", "disk full"),
)
FLAGS = (
    *("--checkpoint.interval_steps", "20", "--checkpoint.keep", "3", "--checkpoint.async_mode", "thread"),
    *("--metrics.interval_steps", "5", "--resilience.hang_timeout_s", "4"),
)
NAN_EVERY = 997
"""Every how many steps the gradients are non-finite, in the reference run too."""


class Supervisor:
    """A run that is restarted whenever it ends before its last step, as by a cluster's scheduler."""

    def __init__(self, harness: FaultHarness, name: str, steps: int):
        self.harness = harness
        self.name = harness.fresh(name)
        self.flags = [*FLAGS, "--training.steps", str(steps)]
        self.requests = harness.folder / f"{name}-requests"
        self.requests.mkdir(exist_ok=True)
        self.restarts = 0
        self.resumes_of_ended_runs = 0
        self.run = self._start()

    def _start(self) -> TrialRun:
        fault = {
            "kind": "on_request",
            "rank": "all",
            "folder": str(self.requests),
            "nan_every": NAN_EVERY,
            "seconds": STEP_S,
        }
        return self.harness.run(self.name, 2, self.flags, fault, MAX_RESTARTS="1000")

    def is_done(self) -> bool:
        """Return whether the run has completed its last step. Restart it if it has ended before."""
        code = self.run.process.poll()
        if code is None:
            return False
        out, err = (log.read_text() for log in self.run.logs)
        if "done: step" in out:
            expect(code == 0, f"done, but exited with {code}: {err[-300:]}")
            return True
        expect(code != 2, f"refused: {err[-300:]}")
        self.resumes_of_ended_runs = self.num_resumes()
        self.restarts += 1
        self.run = self._start()
        return False

    def num_resumes(self) -> int:
        """Return how often the run has resumed from a checkpoint."""
        return self.resumes_of_ended_runs + self.run.logs[0].read_text().count("resuming from")

    def inject(self, fault: str, rng: SeededRandom) -> bool:
        """Return whether the run has to restart because of the fault."""
        ranks = self.run.rank_pids()
        if len(ranks) < 2:
            return False  # the run is starting
        signals = {
            "kill all": (self.run.pids(), [signal.SIGKILL]),
            "kill a rank": ([rng.choice(ranks)], [signal.SIGKILL]),
            "kill the launcher": ([self.run.process.pid], [signal.SIGKILL]),
            "stop": ([self.run.process.pid], [signal.SIGTERM]),
            "stop a rank": ([rng.choice(ranks)], [signal.SIGTERM]),
            "stop twice": ([self.run.process.pid], [signal.SIGTERM, signal.SIGINT]),
            "hang": ([rng.choice(ranks)], [signal.SIGSTOP]),
        }
        if fault in ("raise", "disk full"):
            (self.requests / f"{fault} {rng.randrange(2)}").touch()
            return fault == "raise"
        pids, numbers = signals[fault]
        for number in numbers:
            for pid in pids:
                kill(pid, number)
        return True


def best_useful_share(save_s: float, restart_s: float, mean_interval_s: float) -> float:
    """Return the largest useful share of the time over all checkpoint intervals: Daly, A higher order estimate of the optimum
    checkpoint interval for restart dumps, 2006, equation 20. save_s: cost of a save. mean_interval_s: time between failures."""

    def useful_share(interval_s: float) -> float:
        overhead = math.exp(restart_s / mean_interval_s) * math.expm1((interval_s + save_s) / mean_interval_s)
        return interval_s / (mean_interval_s * overhead)

    return max(useful_share(0.01 * 1.05**n) for n in range(250))


def mean_blocked_s(folder: Path) -> float:
    """Return the mean time that training waited for a checkpoint."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return statistics.mean(record["blocked_s"] for record in records if record["kind"] == "checkpoint")


def case_48(harness: FaultHarness, rng: SeededRandom) -> str:
    """Return a summary. Raise Failed unless the run ends like the concurrent reference run, with a useful share of the time that
    is at most 5 percentage points below that of the best checkpoint interval for the measured costs of saves and restarts."""
    timeout_s = 6 * 60 * harness.soak_minutes
    steps = max(300, round(0.6 * 60 * harness.soak_minutes / STEP_S))
    reference, faulty = Supervisor(harness, "soak-reference", steps), Supervisor(harness, "soak-faulty", steps)
    start, reference_s = time.monotonic(), math.inf
    num_faults, down_since, resumes, restarts_s = 0, 0.0, 0, []
    next_fault = start + rng.expovariate(1 / MEAN_INTERVAL_S)
    while not faulty.is_done():
        time.sleep(0.05)
        now = time.monotonic()
        expect(now < start + timeout_s, f"not done after {timeout_s / 60:.0f} min")
        if reference.run.process.poll() is not None:
            reference_s = min(reference_s, now - start)
        if down_since and faulty.num_resumes() > resumes:
            restarts_s.append(now - down_since)
            down_since = 0.0
        if now > next_fault:
            num_faults += 1
            before = faulty.num_resumes()
            if faulty.inject(rng.choice(FAULTS), rng) and not down_since:
                down_since, resumes = now, before
            next_fault = time.monotonic() + rng.expovariate(1 / MEAN_INTERVAL_S)
    faulty_s = time.monotonic() - start
    expect(reference.run.wait(timeout_s).code == 0, "the reference run failed")

    final = [digests(supervisor.run.folder)[steps] for supervisor in (reference, faulty)]
    expect(final[0] == final[1], "the final state differs from the reference run")
    useful = min(reference_s, faulty_s) / faulty_s
    summary = (
        f"{num_faults} faults in {faulty_s / 60:.1f} min, {faulty.restarts} restarts by the scheduler, "
        f"{100 * useful:.1f} % useful"
    )
    if restarts_s:
        restart_s = statistics.mean(restarts_s)
        best = best_useful_share(mean_blocked_s(faulty.run.folder), restart_s, faulty_s / len(restarts_s))
        summary += f", best {100 * best:.1f} % ({len(restarts_s)} restarts of {restart_s:.1f} s)"
        if useful < best - 0.05:
            raise Failed(summary)
    return summary
