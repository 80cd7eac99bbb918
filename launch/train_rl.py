"""The main job: torchrun launch/train_rl.py experiment=quickstart key=value ..."""

import sys
from pathlib import Path

from megatron_rl.config.cli import main
from megatron_rl.config.schema import TrainRlConfig


def train(config: TrainRlConfig) -> int:
    """Run the checked configuration. The import is late: it brings torch and Megatron."""
    from megatron_rl.run.main import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main(train, Path(__file__).resolve().parents[1] / "hydra_conf"))
