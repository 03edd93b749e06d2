"""The table of faults, by the numbers that users see; a row raises Failed, and may return what it has seen."""

import subprocess
import sys
from collections.abc import Callable

from tests.faults import processes, saves, soak, values
from tests.faults.harness import ROOT, FaultHarness, SeededRandom, expect


def held_by(words: str, *files: str) -> Callable[[FaultHarness, SeededRandom], str]:
    """A row that whole runs would show no better than tests do. words: as of pytest's -k."""

    def row(harness: FaultHarness, rng: SeededRandom) -> str:
        command = [sys.executable, "-m", "pytest", "-k", words, *(f"tests/{file}" for file in files)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        expect(done.returncode == 0, f"{' '.join(command)}: {done.stdout[-300:]}")
        return done.stdout.splitlines()[-1].strip("= ")

    return row


CASES: dict[int, tuple[str, Callable[[FaultHarness, SeededRandom], str | None]]] = {
    1: ("SIGKILL to all, at a random moment, in every mode of saving: the same end, bit by bit", processes.case_1),
    2: ("SIGKILL to one rank: the others end within 5 s and say so; the same end", processes.case_2),
    3: ("SIGKILL to the launcher: nobody left after 10 s; the same end", processes.case_3),
    4: ("SIGKILL to the process that writes: told, stopped; the same end", processes.case_4),
    5: ("SIGTERM or SIGINT to the launcher: no step lost, exit 0; the same end", processes.case_5),
    6: ("SIGTERM or SIGINT to one rank: all save the same step; the same end", processes.case_6),
    7: ("a second signal while the first one's save goes on: the same end", processes.case_7),
    8: ("an exception on one rank: one traceback, with the rank; the same end", processes.case_8),
    9: ("a rank stands still: named, with the collective and stacks; the same end", processes.case_9),
    10: ("a rank leaves out a reduction: the run ends; the same end", processes.case_10),
    11: ("one rank is slow, in its blocks or its data: named within 20 steps", processes.case_11),
    12: ("more memory than there is: told with the rank; the same end", processes.case_12),
    13: ("clean runs exit 0", processes.case_13),
    14: ("a rank that never joins is named", processes.case_14),
    15: (
        "SIGKILL at 12 points of a save, 3 modes, 1, 2, 4 ranks: old or new, never mixed; the same end",
        saves.case_15,
    ),
    16: ("a step is saved again and the save is killed: old or new", saves.case_16),
    17: ("disk full: warned, goes on, and so ends the same; or stops, as set", saves.case_17),
    19: ("errors of the disk that pass: tried again; the same end", saves.case_19),
    20: ("a failure in the background reaches the run", saves.case_20),
    21: ("flipped bits (25 a trial): told, and gone on from the one before", saves.case_21),
    22: ("six kinds of damage to every file: told, and gone on from the one before", saves.case_22),
    23: ("all checkpoints damaged: refused, nothing touched", saves.case_23),
    25: ("killed between commit and the removal of old ones: one is whole", saves.case_25),
    26: ("a second trainer in a run folder is refused", saves.case_26),
    27: ("a folder that cannot be written is refused before the first step", saves.case_27),
    28: (
        "tensors of other shapes or types, missing, too many: refused, with their names",
        held_by("fit or expects", "test_checkpoint.py"),
    ),
    29: ("no numbers on one rank: update left out on all; several times: rolled back", values.case_29),
    30: ("a spike: left out or rolled back, as set", values.case_30),
    32: ("the same run twice: bit by bit", values.case_32),
    33: (
        "bad lines, bytes, fields: counted and listed with file and line, or the end, as set",
        held_by("bad or problem or line or truncated or compressed", "data/sources", "data/prepare/test_prepare.py"),
    ),
    34: (
        "tokens that the tokenizer has not, other types, files cut short: refused with file and place",
        held_by("rejected or width or vocabulary", "data/sources/test_tokens.py"),
    ),
    35: ("another tokenizer since the checkpoint: refused", held_by("another_tokenizer", "test_trainer.py")),
    36: ("other data since the checkpoint: refused", held_by("another_tokenizer", "test_trainer.py")),
    37: ("4, 2, 1, 2 ranks after each other: the same losses", values.case_37),
    38: ("a data worker is killed or stands still: told, ended; the same end", processes.case_38),
    39: ("another number of data workers when the run goes on: the same end", processes.case_39),
    40: ("every setting with a typo is refused, with the right name", values.case_40),
    41: ("settings of any value (250 configurations a trial): a plan or one line, within 2 s", values.case_41),
    42: ("every mesh on up to 64 ranks: it fits or is refused", values.case_42),
    43: (
        "settings changed when a run goes on: told, refused where it would not mean the same",
        held_by("changed or changes or refused", "test_trainer.py", "test_run_folder.py"),
    ),
    44: (
        "payloads in every file of a checkpoint: never run",
        held_by("payload or unpickles", "test_security.py"),
    ),
    45: (
        "names and links that lead out of a folder: refused",
        held_by(
            "outside or out_of or link or does_not_hold", "test_security.py", "test_manifest.py", "test_huggingface.py"
        ),
    ),
    46: ("secrets of the environment are in no output", values.case_46),
    47: (
        "huge files and shapes: refused, without the memory",
        held_by("huge or memory or header", "test_security.py", "test_manifest.py", "test_huggingface.py"),
    ),
    48: ("faults of all kinds, one a minute, nobody looks after it: the same end, hardly later", soak.case_48),
}
