"""The cases of the fault matrix, by the numbers of docs/reliability.md. A case raises Failed, and may return a summary."""

from collections.abc import Callable

from tests.faults import processes, saves, soak, values
from tests.faults.harness import FaultHarness, SeededRandom

# "Same result": the resumed run ends bitwise identical to the reference run.
CASES: dict[int, tuple[str, Callable[[FaultHarness, SeededRandom], str | None]]] = {
    1: ("SIGKILL to all processes at a random moment, in every save mode: same result", processes.case_1),
    2: ("SIGKILL to one rank: the others end within 5 s and report it; same result", processes.case_2),
    3: ("SIGKILL to the launcher: no process remains after 10 s; same result", processes.case_3),
    5: ("SIGTERM or SIGINT to the launcher: no step lost, exit code 0; same result", processes.case_5),
    6: ("SIGTERM or SIGINT to one rank: all ranks save the same step; same result", processes.case_6),
    7: ("second signal during the save after the first: same result", processes.case_7),
    8: ("exception on one rank: one traceback, with the rank; same result", processes.case_8),
    9: ("one rank hangs: reported with the collective and stacks; same result", processes.case_9),
    10: ("one rank omits a reduction: the run ends; same result", processes.case_10),
    11: ("one rank is slow in its blocks or its data: reported within 20 steps", processes.case_11),
    12: ("out of memory: reported with the rank; same result", processes.case_12),
    13: ("runs without a fault exit 0", processes.case_13),
    14: ("a rank that never joins is reported", processes.case_14),
    15: (
        "SIGKILL at 12 points of a save, 2 modes, 1, 2 and 4 ranks: old or new checkpoint; same result",
        saves.case_15,
    ),
    16: ("SIGKILL while a step is saved again: old or new checkpoint", saves.case_16),
    17: ("disk full: warning and same result, or stop, as configured", saves.case_17),
    19: ("transient disk errors: retried; same result", saves.case_19),
    20: ("failed background save: reported to the run", saves.case_20),
    21: ("flipped bits (25 per trial): reported, resumed from the previous checkpoint", saves.case_21),
    22: ("six kinds of damage to every file: reported, resumed from the previous checkpoint", saves.case_22),
    23: ("all checkpoints damaged: refused, nothing changed", saves.case_23),
    25: ("SIGKILL between commit and deletion of old checkpoints: one is intact", saves.case_25),
    26: ("second trainer in a run folder: refused", saves.case_26),
    27: ("unwritable folder: refused before the first step", saves.case_27),
    29: ("non-finite gradients on one rank: skipped on all ranks; several in a row: rolled back", values.case_29),
    30: ("loss spike: skipped or rolled back, as configured", values.case_30),
    32: ("the same run twice: bitwise identical", values.case_32),
    37: ("4, 2, 1, 2 ranks one after the other: same losses", values.case_37),
    38: ("read of training data fails: error reported, run exits; same result", processes.case_38),
    39: ("loading ahead, none after resuming: same result", processes.case_39),
    40: ("every setting with a typo: refused, with the correct name", values.case_40),
    41: (
        "random values of settings (250 configurations per trial): accepted, or a one-line error, within 2 s",
        values.case_41,
    ),
    42: ("every mesh on up to 64 ranks: valid or refused", values.case_42),
    46: ("secrets of the environment: in no output", values.case_46),
    49: ("batches that do not arrive: rank reported, also after a stop request; same result", processes.case_49),
    48: ("random faults, one a minute, unattended: same result with little delay", soak.case_48),
    50: ("all processes suspended for longer than the time limits: same result", processes.case_50),
    51: ("SIGHUP to all processes of a run under nohup: no effect; same result", processes.case_51),
    52: ("streams closed, full, or without a reader: exit code 0; same result", processes.case_52),
    53: ("signal to a launcher or rank that waits for another: one line, ends within 2 s", processes.case_53),
}
