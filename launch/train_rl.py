"""Train a model: the main job.

Examples:

    python launch/train_rl.py experiment=smoke
    torchrun --nproc-per-node 2 launch/train_rl.py experiment=quickstart parallel=ep2 key=value ...

Output: the directory runs/NAME with metrics, logs, checkpoints and exit.json. A configuration
that breaks a rule is refused with code 2 before torch is imported. All exit codes are in
megatron_rl/contracts/exit_codes.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.contracts.interrupts import exit_on_interrupt

if TYPE_CHECKING:
    from megatron_rl.config.schema import Configuration


def train(configuration: Configuration) -> int:
    """Run the checked configuration. The import is late because it brings torch and Megatron."""
    from megatron_rl.run.main import run

    return run(configuration)


def start() -> int:
    """Run the command line and return the exit code.

    The import takes most of a second, and Ctrl-C is handled before it.
    """
    exit_on_interrupt()
    from megatron_rl.config.cli import main

    return main(train, Path(__file__).resolve().parents[1] / "hydra_conf")


if __name__ == "__main__":
    sys.exit(start())
