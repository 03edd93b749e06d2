"""Faults of processes: killed, signalled, hung, failing, slow or missing ones."""

import json
import os
import re
import signal
import time
from collections.abc import Callable

from tests.faults.harness import (
    STEPS,
    FaultHarness,
    ProcessResult,
    SeededRandom,
    TrialRun,
    expect,
    expect_few_lines,
    have_ended,
    is_pending,
    kill,
)
from trainer.base.system.run_files import latest_per_step, step_of

MODES = ("off", "thread")


def mode_flags(mode: str) -> list[str]:
    return ["--checkpoint.async_mode", mode]


def kill_at_random_time(
    harness: FaultHarness, rng: SeededRandom, victims: Callable[[TrialRun], list[int]], name: str
) -> tuple[list[str], ProcessResult]:
    """Start a run on two ranks and SIGKILL the victims after a random time of training. Return the flags of its save mode and its
    result, with the duration since the signal."""
    flags = mode_flags(rng.choice(MODES))
    harness.reference(2, flags)
    run = harness.run(harness.fresh(name), 2, flags)
    run.wait_for_step(1)
    time.sleep(rng.uniform(0, harness.steps / 48))
    start = time.monotonic()
    for pid in victims(run):
        kill(pid, signal.SIGKILL)
    result = run.wait(60)
    result.duration_s = time.monotonic() - start
    return flags, result


def case_1(harness: FaultHarness, rng: SeededRandom) -> None:
    flags, _ = kill_at_random_time(harness, rng, TrialRun.pids, "case-1")
    harness.finish("case-1", 2, flags)


def case_2(harness: FaultHarness, rng: SeededRandom) -> None:
    def random_rank(run: TrialRun) -> list[int]:
        return [rng.choice(run.rank_pids() or [run.process.pid])]

    flags, result = kill_at_random_time(harness, rng, random_rank, "case-2")
    if result.code != 0:  # 0: the run was already complete
        expect(result.duration_s <= 5, f"the other ranks ended after {result.duration_s:.1f} s")
        expect_few_lines(result)
        reported = "was killed by SIGKILL" in result.err or "lost the connection" in result.err
        expect(reported, f"not reported: {result.err}")
    harness.finish("case-2", 2, flags)


def case_3(harness: FaultHarness, rng: SeededRandom) -> None:
    pids: list[int] = []

    def launcher(run: TrialRun) -> list[int]:
        pids.extend(run.pids())
        return [run.process.pid]

    flags, _ = kill_at_random_time(harness, rng, launcher, "case-3")
    expect(have_ended(pids, 10), "ranks still run 10 s after their launcher was killed")
    harness.finish("case-3", 2, flags)


def stop(harness: FaultHarness, rng: SeededRandom, name: str, victims: Callable[[TrialRun], list[int]]) -> None:
    """Send SIGTERM or SIGINT at a random step: the run saves its last step and exits 0."""
    flags = mode_flags(rng.choice(MODES))
    run = harness.run(harness.fresh(name), 2, flags)
    run.wait_for_step(rng.randrange(1, 100))
    for pid in victims(run):
        os.kill(pid, rng.choice((signal.SIGTERM, signal.SIGINT)))
    result = run.wait(60)
    expect(result.code == 0, f"exited with {result.code}: {result.err[-300:]}")
    stopped = re.search(r"stopped at step (\d+) \(checkpoint saved\)", result.out)
    expect(stopped or "done: step" in result.out, f"neither stopped nor done: {result.out[-300:]}")
    if stopped:
        newest = latest_per_step(run.folder / "checkpoints")[0]
        expect(step_of(newest) == int(stopped[1]) == run.step(), f"{newest} is not the last step, {run.step()}")
    harness.finish(name, 2, flags)


def case_5(harness: FaultHarness, rng: SeededRandom) -> None:
    stop(harness, rng, "case-5", lambda run: [run.process.pid])


def case_6(harness: FaultHarness, rng: SeededRandom) -> None:
    stop(harness, rng, "case-6", lambda run: [rng.choice(run.rank_pids())])


def case_7(harness: FaultHarness, rng: SeededRandom) -> None:
    """Send the second signal during the save that the first one requested, which is slowed down."""
    flags = mode_flags(rng.choice(MODES))
    run = harness.run(harness.fresh("case-7"), 2, flags, {"kind": "slow_save", "seconds": 1.5})
    run.wait_for_step(rng.randrange(1, 9))  # before the first save
    run.process.send_signal(signal.SIGTERM)
    time.sleep(rng.choice((0.0, 1.1)))
    run.process.send_signal(signal.SIGINT)
    result = run.wait(60)
    expect(result.code in (0, 130), f"exited with {result.code}")
    harness.finish("case-7", 2, flags)


def case_8(harness: FaultHarness, rng: SeededRandom) -> None:
    rank = rng.randrange(2)
    fault = {"kind": "raise", "rank": rank, "step": rng.randrange(1, STEPS)}
    result = harness.run(harness.fresh("case-8"), 2, fault=fault).wait()
    expect(result.code == 1, f"exited with {result.code}")
    one_traceback = result.err.count("Traceback") == 1 and f"[rank {rank}] Traceback" in result.err
    expect(one_traceback, f"tracebacks: {result.err}")
    harness.finish("case-8", 2)


def case_9(harness: FaultHarness, rng: SeededRandom) -> None:
    """Hang one rank in a step, or in every third trial when the ranks wait for each other at the end of the run."""
    rank, at_end = rng.randrange(2), rng.trial % 3 == 2
    fault = {"kind": "hang_at_end" if at_end else "hang", "rank": rank, "step": rng.randrange(5, harness.steps // 2)}
    flags = ["--resilience.hang_timeout_s", "4"]
    run = harness.run(harness.fresh("case-9"), 2, flags, fault)
    while not (hung := [pid for pid in run.rank_pids() if is_pending(pid, signal.SIGTERM)]):
        expect(time.monotonic() - run.start < 240, "torchrun sent no SIGTERM to the hung rank within 240 s")
        time.sleep(0.2)
    kill(hung[0], signal.SIGKILL)  # as torchrun does 30 s after SIGTERM
    result = run.wait()
    expect(result.code == 1, f"exited with {result.code}")
    if at_end:
        expect(f"rank {rank} has sent no heartbeat for" in result.err, f"rank not reported: {result.err}")
        harness.finish("case-9", 2)
        return
    expect(f"rank {rank} sends no heartbeat" in result.err, f"rank not reported: {result.err}")
    collective = re.search(r"waiting in gloo:\w+, collective \d+ of process group", result.err)
    collective = collective or "waiting for another stage of the pipeline" in result.err
    expect(collective, f"collective not reported: {result.err}")
    expect("train_step" in result.err, "stack not reported")
    harness.finish("case-9", 2)


def case_10(harness: FaultHarness, rng: SeededRandom) -> None:
    fault = {"kind": "desync", "rank": rng.randrange(2), "step": rng.randrange(5, 60)}
    result = harness.run(harness.fresh("case-10"), 2, ["--resilience.hang_timeout_s", "4"], fault).wait()
    expect(result.code == 1, f"exited with {result.code}: {result.out[-200:]}")
    expect(result.err.strip(), "nothing was reported")
    harness.finish("case-10", 2)


def case_11(harness: FaultHarness, rng: SeededRandom) -> None:
    """Make the blocks of one rank take twice as long, or its data."""
    name = harness.fresh("case-11")
    rank, location = rng.randrange(3), rng.choice(("blocks", "data"))
    fault = {"kind": "straggler", "rank": rank, "location": location}
    flags = ["--training.steps", "40", "--training.global_batch_size", "12", "--metrics.interval_steps", "10"]
    result = harness.run(name, 3, flags, fault).wait()
    expect(result.code == 0, f"exited with {result.code}: {result.err[-300:]}")
    expect(f"warning: rank {rank} is a straggler" in result.err, f"{location}: rank {rank} not reported: {result.err}")
    records = map(json.loads, (harness.folder / "runs" / name / "metrics.jsonl").read_text().splitlines())
    stragglers = [(record["step"], record["rank"]) for record in records if record["kind"] == "straggler"]
    expect(stragglers and stragglers[0][0] <= 20, f"{location}: not within 20 steps: {stragglers[:3]}")
    expect({r for _, r in stragglers} == {rank}, f"{location}: another rank than {rank} was reported: {stragglers}")


def case_12(harness: FaultHarness, rng: SeededRandom) -> None:
    fault = {"kind": "memory", "rank": 1, "step": rng.randrange(1, STEPS)}
    result = harness.run(harness.fresh("case-12"), 2, fault=fault).wait()
    one_traceback = result.code == 1 and result.err.count("Traceback") == 1
    expect(one_traceback, f"exited with {result.code}: {result.err[-300:]}")
    expect("[rank 1]" in result.err and "memory" in result.err, f"not reported: {result.err[-300:]}")
    harness.finish("case-12", 2)


def case_13(harness: FaultHarness, rng: SeededRandom) -> None:
    flags = ["--training.steps", "5", *mode_flags(rng.choice(MODES))]
    result = harness.run(harness.fresh("case-13"), rng.choice((1, 2)), flags).wait()
    expect((result.code, result.err) == (0, ""), f"exited with {result.code}: {result.err[-300:]}")


def case_14(harness: FaultHarness, rng: SeededRandom) -> None:
    """Start rank 0 of two alone."""
    variables = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(rng.randrange(20000, 30000)),
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    flags = ["--distributed.init_timeout_s", "6"]
    result = harness.run(harness.fresh("case-14"), 1, flags, **variables).wait(60)
    expect(result.code == 1, f"exited with {result.code}")
    expect("these of the 2 ranks did not join within 6 s: 1" in result.err, f"rank not reported: {result.err}")
    expect_few_lines(result)


def case_38(harness: FaultHarness, rng: SeededRandom) -> None:
    """Fail a read of the training data, in the thread that loads ahead or in a step."""
    flags = ["--data.prefetch", str(rng.choice((0, 4)))]
    fault = {"kind": "read_error", "rank": rng.randrange(2), "microbatch": rng.randrange(1, 40)}
    result = harness.run(harness.fresh("case-38"), 2, flags, fault).wait()
    expect(result.code == 1, f"exited with {result.code}: {result.err[-300:]}")
    line = rf"\[rank {fault['rank']}\] the training data cannot be read: .*/train.tokens: Input/output error"
    expect(re.search(line, result.err), f"not reported: {result.err[-500:]}")
    harness.finish("case-38", 2, flags)


def case_39(harness: FaultHarness, rng: SeededRandom) -> None:
    """Stop a run that loads microbatches ahead, and resume it without."""
    run = harness.run(harness.fresh("case-39"), 1, ["--data.prefetch", str(rng.randrange(1, 9))])
    run.wait_for_step(rng.randrange(1, 100))
    run.process.send_signal(signal.SIGTERM)
    expect(run.wait(60).code == 0, "the run did not stop")
    harness.finish("case-39", 1, ["--data.prefetch", "0"])


def case_49(harness: FaultHarness, rng: SeededRandom) -> None:
    """Hang a read of one rank's training data. In every second trial, stop the run then."""
    rank, microbatch = rng.randrange(2), rng.choice((1, rng.randrange(2, 40)))
    hangs = harness.folder / "case-49-hangs"
    hangs.unlink(missing_ok=True)
    fault = {"kind": "hang_of_data", "rank": rank, "microbatch": microbatch, "file": str(hangs)}
    flags = ["--data.prefetch", str(rng.randrange(1, 3))]
    stops = rng.trial % 2 == 1
    timeout = ["--resilience.hang_timeout_s", "0" if stops else "4"]
    run = harness.run(harness.fresh("case-49"), 2, [*flags, *timeout], fault)
    if stops:
        while not hangs.exists():
            expect(time.monotonic() - run.start < 120, "no read hung within 120 s")
            time.sleep(0.1)
        run.process.send_signal(signal.SIGTERM)
        expected = rf"\[rank {rank}\] no data have arrived for .* the run ends without saving"
    else:
        waits = rf"\[rank {rank}\] no step has completed for .*\nthis rank waits for training data"
        expected = f"{waits}|rank {rank} waits for training data"
    result = run.wait()
    # 143: before the first step.
    expect(result.code == 1 or (stops and result.code == 143), f"exited with {result.code}: {result.err[-300:]}")
    expect(re.search(expected, result.err), f"rank not reported: {result.err}")
    harness.finish("case-49", 2, flags)


def case_50(harness: FaultHarness, rng: SeededRandom) -> None:
    """Suspend all processes for longer than a step and a collective may take."""
    flags = mode_flags(rng.choice(MODES))
    limits = ["--resilience.hang_timeout_s", "4", "--distributed.timeout_s", "5"]
    run = harness.run(harness.fresh("case-50"), 2, [*flags, *limits])
    run.wait_for_step(rng.randrange(1, harness.steps // 2))
    time.sleep(rng.uniform(0, 0.2))
    pids = run.pids()
    for pid in pids:
        kill(pid, signal.SIGSTOP)
    time.sleep(12)
    for pid in pids:
        kill(pid, signal.SIGCONT)
    expect_complete(run.wait())
    harness.finish("case-50", 2, flags)


def expect_complete(result: ProcessResult) -> None:
    expect(result.code == 0 and "Traceback" not in result.err, f"exited with {result.code}: {result.err[-300:]}")


def case_51(harness: FaultHarness, rng: SeededRandom) -> None:
    """Send SIGHUP to all processes of a run that was started with nohup."""
    run = harness.run(harness.fresh("case-51"), 2, wrapper=["nohup"])
    run.wait_for_step(rng.randrange(1, harness.steps // 2))
    for pid in run.pids():
        kill(pid, signal.SIGHUP)
    result = run.wait()
    expect(result.code == 0 and "SIGHUP" not in result.out, f"exited with {result.code}: {result.out[-300:]}")
    harness.finish("case-51", 2)


REDIRECTIONS = (">&-", "2>&-", "<&- >&- 2>&-", "> >(head -1)", ">/dev/full 2>/dev/full")


def case_52(harness: FaultHarness, rng: SeededRandom) -> None:
    """Run with streams that are closed, full, or whose reader exits."""
    ranks = rng.choice((1, 2))
    shell = ["bash", "-c", f'exec "$@" {rng.choice(REDIRECTIONS)}', "bash"]
    expect_complete(harness.run(harness.fresh("case-52"), ranks, wrapper=shell).wait())
    harness.finish("case-52", ranks)


def case_53(harness: FaultHarness, rng: SeededRandom) -> None:
    """Send a signal to one of two launchers, or ranks, while it waits for the other."""
    number = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    member = rng.choice(("0", "1"))
    places = ({"NNODES": "2", "NODE_RANK": member}, {"NNODES": "2:4"}, {"WORLD_SIZE": "2", "RANK": member})
    port = str(rng.randrange(20000, 30000))
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, **rng.choice(places)}
    run = harness.run(harness.fresh("case-53"), 1, **variables)
    while "waiting until" not in run.logs[0].read_text():
        expect(run.process.poll() is None and time.monotonic() - run.start < 60, "no line that it waits")
        time.sleep(0.05)
    start = time.monotonic()
    run.process.send_signal(number)
    result = run.wait(60)
    expect(time.monotonic() - start <= 2, f"ended after {time.monotonic() - start:.1f} s")
    line = f"{number.name}: the run ends before its first step, so there is nothing to save\n"
    expect((result.code, result.err) == (128 + number, line), f"exited with {result.code}: {result.err[-300:]}")
