"""Train a language model: python train.py --config train_configs/debug.toml [--section.key value ...]"""

import sys
import traceback

from trainer.config import ConfigError
from trainer.load_config import config_from_command_line, one_line_errors


def main() -> None:
    config = config_from_command_line(sys.argv[1:])
    # After the configuration: a wrong setting is told, and --help answered, without waiting for torch.
    from trainer import device, distributed, logging
    from trainer.setup import set_up
    from trainer.trainer import Trainer, resume_point

    with one_line_errors(config):
        setup = set_up(config, distributed.world_size())
        here = device.pick(config.run.device)
    try:
        distributed.start(config.distributed, here)
        saved = resume_point(config, setup)
        if saved is not None and saved.state["step"] >= config.training.steps:
            logging.info(
                f"{config.run.name} is finished: step {saved.state['step']}; a higher --training.steps trains on"
            )
        else:
            Trainer(config, setup, here, saved).train()
    except ConfigError as error:
        distributed.tell_once(config.explain(error))
        distributed.abandon(2)
    except KeyboardInterrupt:
        logging.info("interrupted; the same command goes on from the last checkpoint")
        distributed.abandon(130)
    except BaseException:
        traceback.print_exc()
        distributed.abandon(1)
    distributed.finish(0)


if __name__ == "__main__":
    main()
