"""Train a language model: python train.py --config train_configs/debug.toml [--section.key value ...]"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # absent with python -P

from trainer.base.system.dependencies import require_dependencies
from trainer.base.system.signals import SignalListener, end_before_training, end_silently
from trainer.base.system.streams import flush_standard_streams, open_standard_streams

if __name__ == "__main__":  # before the other imports, during which signals arrive too
    open_standard_streams()
    require_dependencies()
    listener = SignalListener(end_before_training)

import faulthandler
import gc
from functools import partial
from typing import NoReturn

from trainer.base.config import Config, ConfigError
from trainer.base.config.command_line import config_from_command_line
from trainer.base.config.environment_variables import check_environment, check_log_rank, environment_int
from trainer.base.config.exits import one_line_errors
from trainer.base.config.separate_tasks import refuse_separate_tasks
from trainer.base.system.children import end_children
from trainer.base.system.process import die_with_parent, limit_spinning


def run(config: Config, listener: SignalListener) -> int:
    """Train on this rank as the configuration specifies. Return the exit code."""
    limit_spinning()
    # Imported here so that --help and errors in settings do not wait for torch.
    from torch.distributed import barrier

    from trainer.build import build_trainer
    from trainer.checkpoint.commit import SaveFailed
    from trainer.checkpoint.mirror import finish_mirror, open_mirror
    from trainer.data.store.arrays import LoadingFailed
    from trainer.resilience.guard import TrainingDiverged
    from trainer.run.resolve import resolve
    from trainer.run.run_folder import acquire_lock, already_finished, release_if_empty, resume_point
    from trainer.runtime import device, distributed

    with one_line_errors(), config.explained_errors():
        resolved = resolve(config, distributed.world_size())
        rank_device = device.select_device(config.run.device)
    lock = None  # held until this function returns
    try:
        distributed.init_process_group(config.distributed, rank_device)
        distributed.require_agreement(resolved.shared)
        lock = acquire_lock(config.run.folder)
        mirror = open_mirror(config.checkpoint, config.run.folder)
        point = resume_point(config.run.folder, config.checkpoint.load_step, resolved.fingerprint)
        if point is None or not already_finished(config, point.state):
            trainer = build_trainer(config, resolved, rank_device, point, mirror=mirror)
            gc.collect()
            # Later collections skip the imported objects. To visit them takes 0.2 s, at another step on each rank.
            gc.freeze()
            # Without the barrier, a signal could end the ranks that still build while the others save.
            barrier()
            listener.react = trainer.stop.receive
            trainer.train()
        else:
            finish_mirror(config.checkpoint, mirror)
    except ConfigError as error:
        distributed.print_once_per_node(config.explain(error))
        release_if_empty(config.run.folder, lock)  # the only line of its log is this error
        return 2
    except (TrainingDiverged, SaveFailed) as error:
        distributed.print_once_per_node(str(error))
        return 1
    except LoadingFailed as error:
        distributed.print_once_per_node(f"[rank {os.environ.get('RANK', '0')}] {error}")
        return 1
    distributed.shutdown()
    return 0


def run_dry() -> NoReturn:
    """Become the launcher, which prints what a run of one rank would do."""
    if "WORLD_SIZE" in os.environ:
        way_out = "start run_llama_train.sh, which knows their number from NGPU and NNODES"
        raise ConfigError("", f"--dry-run: needs no ranks; {way_out}")
    os.environ |= {"NGPU": "1", "NNODES": "1", "NODE_RANK": "0"}
    launcher = os.path.join(os.path.dirname(os.path.abspath(__file__)), "trainer", "launch.py")
    os.execv(sys.executable, [sys.executable, launcher, *sys.argv[1:]])


def main(listener: SignalListener) -> None:
    # Reactions to a signal, in order:
    #   during imports: end
    #   from here on: end with the children
    #   from the first step on: save and stop
    #   after a failure: end silently
    listener.react = partial(end_before_training, clean_up=end_children)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # no rank survives a launcher that is killed
    else:
        faulthandler.enable(all_threads=False)  # prints the stack at a fatal signal, which a launcher would report
    with one_line_errors():
        check_environment()
        if "--dry-run" in sys.argv:
            run_dry()
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # a launcher has checked it: there may be fewer ranks now
            check_log_rank(environment_int("WORLD_SIZE", 1, 1))
        config = config_from_command_line(sys.argv[1:])
        refuse_separate_tasks()
    try:
        code = run(config, listener)
    except SystemExit as exit:
        code = exit.code
    except BaseException as error:
        code = 1
        from trainer.runtime.distributed import report_failure

        listener.react = end_silently
        report_failure(error)
    # Skips the interpreter's clean-up, in which gloo's threads abort about every second clean exit (torch 2.13).
    flush_standard_streams()
    os._exit(code)


if __name__ == "__main__":
    main(listener)
