"""A long run under one fault after another, which nobody looks after: row 48."""

import json
import math
import os
import signal
import statistics
import time
from pathlib import Path

from tests.faults.harness import Failed, FaultHarness, SeededRandom, TrialRun, digests, expect

MEAN_S = 60.0
"""Between faults."""
STEP_S = 0.1
"""That a step lasts longer than its calculation."""
KINDS = (
    *("kill all", "kill a rank", "kill the launcher", "kill a writer", "stop", "stop a rank", "stop twice"),
    *("raise", "stand still", "disk full"),
)
FLAGS = (
    *("--checkpoint.interval_steps", "20", "--checkpoint.keep", "3", "--checkpoint.async_mode", "process"),
    *("--metrics.interval_steps", "5", "--resilience.hang_timeout_s", "4"),
)
NAN_EVERY = 997
"""Steps whose gradients are no numbers, in the undisturbed run too."""


class Supervisor:
    """A run whose command is given again whenever it has ended before its last step, as a cluster's scheduler does."""

    def __init__(self, harness: FaultHarness, name: str, steps: int):
        self.harness = harness
        self.name = harness.fresh(name)
        self.flags = [*FLAGS, "--training.steps", str(steps)]
        self.orders = harness.folder / f"{name}-orders"
        self.orders.mkdir(exist_ok=True)
        self.ended: list[TrialRun] = []
        self.resumed_before = 0
        self.run = self._start()

    def _start(self) -> TrialRun:
        fault = {
            "kind": "on_order",
            "rank": "all",
            "folder": str(self.orders),
            "nan_every": NAN_EVERY,
            "seconds": STEP_S,
        }
        return self.harness.run(self.name, 2, self.flags, fault, MAX_RESTARTS="1000")

    def done(self) -> bool:
        """Whether it has come to its last step; if it has only ended, it is started again."""
        code = self.run.process.poll()
        if code is None:
            return False
        out, err = (log.read_text() for log in self.run.logs)
        if "done: step" in out:
            expect(code == 0, f"done, but ended with {code}: {err[-300:]}")
            return True
        expect(code != 2, f"refused: {err[-300:]}")
        self.resumed_before = self.resumed()
        self.ended.append(self.run)
        self.run = self._start()
        return False

    def resumed(self) -> int:
        """How often it has gone on from a checkpoint."""
        return self.resumed_before + self.run.logs[0].read_text().count("resuming from")

    def hurt(self, kind: str, rng: SeededRandom) -> bool:
        """Returns whether the run has to start again for it."""
        ranks = self.run.ranks()
        if len(ranks) < 2 or len(writers := self.run.writers()) < 2:
            return False  # it is starting
        signals = {
            "kill all": ([pid for pid, _ in self.run.below()], [signal.SIGKILL]),
            "kill a rank": ([rng.choice(ranks)], [signal.SIGKILL]),
            "kill the launcher": ([self.run.process.pid], [signal.SIGKILL]),
            "kill a writer": ([rng.choice(writers)], [signal.SIGKILL]),
            "stop": ([self.run.process.pid], [signal.SIGTERM]),
            "stop a rank": ([rng.choice(ranks)], [signal.SIGTERM]),
            "stop twice": ([self.run.process.pid], [signal.SIGTERM, signal.SIGINT]),
            "stand still": ([rng.choice(ranks)], [signal.SIGSTOP]),
        }
        if kind in ("raise", "disk full"):
            (self.orders / f"{kind} {rng.randrange(2)}").touch()
            return kind == "raise"
        pids, numbers = signals[kind]
        for number in numbers:
            for pid in pids:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        return True


def best_share(cost_s: float, restart_s: float, between_s: float) -> float:
    """The largest share of time that is useful, over all intervals between checkpoints: Daly, A higher order estimate of the
    optimum checkpoint interval for restart dumps, 2006, equation 20."""

    def share(interval_s: float) -> float:
        lost = math.exp(restart_s / between_s) * math.expm1((interval_s + cost_s) / between_s)
        return interval_s / (between_s * lost)

    return max(share(0.01 * 1.05**n) for n in range(250))


def blocked_s(folder: Path) -> float:
    """That training waited for a checkpoint, on average."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return statistics.mean(record["blocked_s"] for record in records if record["kind"] == "checkpoint")


def case_48(harness: FaultHarness, rng: SeededRandom) -> str:
    """What was seen. Raises Failed unless the run ends like the undisturbed one beside it, and with at most 5 % less of its time
    useful than the best interval between checkpoints would allow for what saving and starting again cost in it."""
    longest_s = 6 * 60 * harness.soak_minutes
    steps = max(300, round(0.6 * 60 * harness.soak_minutes / STEP_S))
    reference, hurt = Supervisor(harness, "soak-undisturbed", steps), Supervisor(harness, "soak-hurt", steps)
    start, undisturbed_s = time.monotonic(), math.inf
    told, down_since, resumed, restarts_s = 0, 0.0, 0, []
    next_fault = start + rng.expovariate(1 / MEAN_S)
    while not hurt.done():
        time.sleep(0.05)
        now = time.monotonic()
        expect(now < start + longest_s, "it does not come to its end")
        if reference.run.process.poll() is not None:
            undisturbed_s = min(undisturbed_s, now - start)
        if down_since and hurt.resumed() > resumed:
            restarts_s.append(now - down_since)
            down_since = 0.0
        if now > next_fault:
            told += 1
            before = hurt.resumed()
            if hurt.hurt(rng.choice(KINDS), rng) and not down_since:
                down_since, resumed = now, before
            next_fault = time.monotonic() + rng.expovariate(1 / MEAN_S)
    hurt_s = time.monotonic() - start
    expect(reference.run.wait(longest_s).code == 0, "the undisturbed run failed")

    ends = [digests(run.run.folder) for run in (reference, hurt)]
    expect(ends[0][steps] == ends[1][steps], "another end than undisturbed")
    share = min(undisturbed_s, hurt_s) / hurt_s
    text = (
        f"{told} faults in {hurt_s / 60:.1f} min, {len(hurt.ended)} starts by the scheduler, {100 * share:.1f} % useful"
    )
    if restarts_s:
        restart_s = statistics.mean(restarts_s)
        best = best_share(blocked_s(hurt.run.folder), restart_s, hurt_s / len(restarts_s))
        text += f", best {100 * best:.1f} % ({len(restarts_s)} restarts of {restart_s:.1f} s)"
        if share < best - 0.05:
            raise Failed(text)
    return text
