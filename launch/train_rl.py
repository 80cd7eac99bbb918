"""The main job: torchrun launch/train_rl.py experiment=quickstart key=value ...

A bad configuration is refused (exit code 2) before torch is imported. Exit codes: megatron_rl/contracts/exit_codes.py.
"""

import sys
from pathlib import Path

from megatron_rl.config.cli import main
from megatron_rl.config.schema import Configuration


def train(configuration: Configuration) -> int:
    """Run the checked configuration. The import is late: it brings torch and Megatron."""
    from megatron_rl.run.main import run

    return run(configuration)


if __name__ == "__main__":
    sys.exit(main(train, Path(__file__).resolve().parents[1] / "hydra_conf"))
