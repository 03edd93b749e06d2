"""Train a language model: python train.py --config train_configs/debug.toml [--section.key value ...]"""

import sys
import traceback

from trainer.load_config import config_from_command_line, one_line_errors


def main() -> None:
    config = config_from_command_line(sys.argv[1:])
    # After the configuration: a wrong setting is told, and --help answered, without waiting for torch.
    from trainer import device, distributed, logging
    from trainer.setup import set_up
    from trainer.trainer import Trainer, finished_step

    code = 1
    try:
        with one_line_errors(config):
            set_up(config, distributed.world_size())
            step = finished_step(config)
            if step is not None:
                logging.info(f"{config.run.name} is finished: step {step}; a higher --training.steps trains on")
                return
            here = device.pick(config.run.device)
            distributed.start(config.distributed, here)
            Trainer(config, here).train()
        distributed.finish(0)
    except SystemExit as exit:
        code = exit.code
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    distributed.abandon(code)


if __name__ == "__main__":
    main()
