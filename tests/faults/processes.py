"""Faults of processes: killed, stopped, asked to stop, standing still, never there."""

import json
import os
import re
import signal
import time
from collections.abc import Callable

from tests.faults.harness import STEPS, FaultHarness, ProcessResult, SeededRandom, TrialRun, expect, few_lines, gone
from trainer.checkpoint.commit import latest_per_step, step_of

MODES = ("off", "thread", "process")


def mode_flags(mode: str) -> list[str]:
    return ["--checkpoint.async_mode", mode]


def killed_at_random(
    harness: FaultHarness, rng: SeededRandom, victims: Callable[[TrialRun], list[int]], name: str
) -> tuple[list[str], ProcessResult]:
    """A run on two ranks, hurt after a random time of training; the flags of its mode, and how it ended."""
    more = mode_flags(rng.choice(MODES))
    harness.reference(2, more)
    run = harness.run(harness.fresh(name), 2, more)
    run.await_step(1)
    time.sleep(rng.uniform(0, 2.5))
    before = time.monotonic()
    for pid in victims(run):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    ended = run.wait(60)
    ended.seconds = time.monotonic() - before
    return more, ended


def case_1(harness: FaultHarness, rng: SeededRandom) -> None:
    more, _ = killed_at_random(harness, rng, lambda run: [pid for pid, _ in run.below()], "case-1")
    harness.finish("case-1", 2, more)


def case_2(harness: FaultHarness, rng: SeededRandom) -> None:
    more, ended = killed_at_random(harness, rng, lambda run: [rng.choice(run.ranks() or [run.process.pid])], "case-2")
    if ended.code != 0:  # else it was at its end
        expect(ended.seconds <= 5, f"the others ended after {ended.seconds:.1f} s")
        few_lines(ended)
        expect("was killed by SIGKILL" in ended.err or "lost the connection" in ended.err, f"does not say so: {ended.err}")
    harness.finish("case-2", 2, more)


def case_3(harness: FaultHarness, rng: SeededRandom) -> None:
    family: list[int] = []

    def launcher(run: TrialRun) -> list[int]:
        family.extend(pid for pid, _ in run.below())
        return [run.process.pid]

    more, _ = killed_at_random(harness, rng, launcher, "case-3")
    expect(gone(family, 10), "ranks still run 10 s after their launcher was killed")
    harness.finish("case-3", 2, more)


def case_4(harness: FaultHarness, rng: SeededRandom) -> None:
    more = mode_flags("process")
    run = harness.run(harness.fresh("case-4"), 2, more, {"kind": "slow", "rank": "all", "seconds": 0.05})
    run.await_step(rng.randrange(2, 60))
    writers = run.writers()
    expect(len(writers) == 2, f"{len(writers)} writers")
    os.kill(rng.choice(writers), signal.SIGKILL)
    ended = run.wait()
    expect(ended.code == 1, f"ended with {ended.code}")
    # By the rank whose writer it was, or by one that was in the middle of a save with it.
    expect("the checkpoint writer process" in ended.err, f"does not say so: {ended.err}")
    few_lines(ended)
    harness.finish("case-4", 2, more)


def stopped(harness: FaultHarness, rng: SeededRandom, name: str, victims: Callable[[TrialRun], list[int]]) -> None:
    more = mode_flags(rng.choice(MODES))
    run = harness.run(harness.fresh(name), 2, more)
    run.await_step(rng.randrange(1, 100))
    for pid in victims(run):
        os.kill(pid, rng.choice((signal.SIGTERM, signal.SIGINT)))
    ended = run.wait(60)
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    said = re.search(r"stopped at step (\d+) \(checkpoint saved\)", ended.out)
    expect(said or "done: step" in ended.out, f"said neither stopped nor done: {ended.out[-300:]}")
    if said:
        newest = latest_per_step(run.folder / "checkpoints")[0]
        expect(step_of(newest) == int(said[1]) == run.step(), f"{newest} is not the last step, {run.step()}")
    harness.finish(name, 2, more)


def case_5(harness: FaultHarness, rng: SeededRandom) -> None:
    stopped(harness, rng, "case-5", lambda run: [run.process.pid])


def case_6(harness: FaultHarness, rng: SeededRandom) -> None:
    stopped(harness, rng, "case-6", lambda run: [rng.choice(run.ranks())])


def case_7(harness: FaultHarness, rng: SeededRandom) -> None:
    """The second signal comes while the save that the first one asked for goes on (it is made slow)."""
    more = mode_flags(rng.choice(MODES))
    run = harness.run(harness.fresh("case-7"), 2, more, {"kind": "slow_save", "seconds": 1.5})
    run.await_step(rng.randrange(1, 9))  # before the first save
    run.process.send_signal(signal.SIGTERM)
    time.sleep(rng.choice((0.0, 1.1)))
    run.process.send_signal(signal.SIGINT)
    ended = run.wait(60)
    expect(ended.code in (0, 130), f"ended with {ended.code}")
    harness.finish("case-7", 2, more)


def case_8(harness: FaultHarness, rng: SeededRandom) -> None:
    rank = rng.randrange(2)
    run = harness.run(
        harness.fresh("case-8"), 2, fault={"kind": "raise", "rank": rank, "step": rng.randrange(1, STEPS)}
    )
    ended = run.wait()
    expect(ended.code == 1, f"ended with {ended.code}")
    expect(ended.err.count("Traceback") == 1 and f"[rank {rank}] Traceback" in ended.err, f"tracebacks: {ended.err}")
    harness.finish("case-8", 2)


def case_9(harness: FaultHarness, rng: SeededRandom) -> None:
    """In a step, or at every third time when the ranks wait for each other to leave."""
    rank, at_end = rng.randrange(2), rng.trial % 3 == 2
    fault = {"kind": "stop_at_end" if at_end else "stop", "rank": rank, "step": rng.randrange(5, 60)}
    ended = harness.run(
        harness.fresh("case-9"), 2, ["--resilience.hang_timeout_s", "4"], fault
    ).wait()  # torchrun gives it 30 s
    expect(ended.code == 1, f"ended with {ended.code}")
    if at_end:
        expect(f"no heartbeat from rank {rank} for" in ended.err, f"not named: {ended.err}")
        harness.finish("case-9", 2)
        return
    expect(f"rank {rank} sends no heartbeat" in ended.err, f"not named: {ended.err}")
    expect(re.search(r"waiting in gloo:\w+, collective \d+ of process group", ended.err), f"no collective: {ended.err}")
    expect("train_step" in ended.err, "no stack")
    harness.finish("case-9", 2)


def case_10(harness: FaultHarness, rng: SeededRandom) -> None:
    fault = {"kind": "desync", "rank": rng.randrange(2), "step": rng.randrange(5, 60)}
    run = harness.run(harness.fresh("case-10"), 2, ["--resilience.hang_timeout_s", "4"], fault)
    ended = run.wait()
    expect(ended.code == 1, f"ended with {ended.code}: {ended.out[-200:]}")
    expect(ended.err.strip(), "nothing was said")
    harness.finish("case-10", 2)


def case_11(harness: FaultHarness, rng: SeededRandom) -> None:
    """Once its blocks take twice as long, once its data."""
    name = harness.fresh("case-11")
    rank, where = rng.randrange(3), rng.choice(("blocks", "data"))
    fault = {"kind": "straggler", "rank": rank, "where": where}
    more = ["--training.steps", "40", "--training.global_batch_size", "12", "--metrics.interval_steps", "10"]
    ended = harness.run(name, 3, more, fault).wait()
    expect(ended.code == 0, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(f"warning: rank {rank} is a straggler" in ended.err, f"{where}: rank {rank} not named: {ended.err}")
    records = map(json.loads, (harness.folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    told = [(record["step"], record["rank"]) for record in records if record["kind"] == "straggler"]
    expect(told and told[0][0] <= 20, f"{where}: told {told[:3]}, not within 20 steps")
    expect({r for _, r in told} == {rank}, f"{where}: another rank than {rank} was named: {told}")


def case_12(harness: FaultHarness, rng: SeededRandom) -> None:
    run = harness.run(harness.fresh("case-12"), 2, fault={"kind": "memory", "rank": 1, "step": rng.randrange(1, STEPS)})
    ended = run.wait()
    expect(ended.code == 1 and ended.err.count("Traceback") == 1, f"ended with {ended.code}: {ended.err[-300:]}")
    expect("[rank 1]" in ended.err and "memory" in ended.err, f"does not say so: {ended.err[-300:]}")
    harness.finish("case-12", 2)


def case_13(harness: FaultHarness, rng: SeededRandom) -> None:
    more = ["--training.steps", "5", *mode_flags(rng.choice(MODES))]
    ended = harness.run(harness.fresh("case-13"), rng.choice((1, 2)), more).wait()
    expect((ended.code, ended.err) == (0, ""), f"ended with {ended.code}: {ended.err[-300:]}")


def case_14(harness: FaultHarness, rng: SeededRandom) -> None:
    more = ["--distributed.init_timeout_s", "6"]
    place = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(rng.randrange(20000, 30000)),
        "WORLD_SIZE": "2",
        "RANK": "0",
    }
    ended = harness.run(harness.fresh("case-14"), 1, more, **place, LOCAL_RANK="0").wait(60)
    expect(ended.code == 1, f"ended with {ended.code}")
    expect("of 2 ranks, 1 did not join within 6 s" in ended.err, f"not named: {ended.err}")
    few_lines(ended)


def case_38(harness: FaultHarness, rng: SeededRandom) -> None:
    """Killed it is told at once, standing still by the watchdog."""
    number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
    more = ["--data.num_workers", "1"]
    run = harness.run(harness.fresh("case-38"), 1, [*more, "--resilience.hang_timeout_s", "4"])
    run.await_step(rng.randrange(2, 60))
    workers = [pid for pid, _ in run.below() if pid != run.process.pid]
    expect(len(workers) == 1, f"{len(workers)} workers")
    os.kill(workers[0], number)
    before = time.monotonic()
    ended = run.wait(60)
    expect(ended.code == 1, f"ended with {ended.code}: {ended.err[-300:]}")
    expect(time.monotonic() - before < 15, f"ended after {time.monotonic() - before:.0f} s")
    told = "DataLoader worker" if number == signal.SIGKILL else "no step has completed for"
    expect(told in ended.err, f"does not say so: {ended.err[-500:]}")
    expect(gone(workers, within_s=5), "the worker is left behind")
    harness.finish("case-38", 1, more)


def case_39(harness: FaultHarness, rng: SeededRandom) -> None:
    run = harness.run(
        harness.fresh("case-39"), 1, ["--data.num_workers", "2", "--data.prefetch", str(rng.randrange(1, 5))]
    )
    run.await_step(rng.randrange(1, 100))
    run.process.send_signal(signal.SIGTERM)
    expect(run.wait(60).code == 0, "it did not stop")
    harness.finish("case-39", 1, [])
