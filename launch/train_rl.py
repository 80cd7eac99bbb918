"""The main job: torchrun launch/train_rl.py experiment=quickstart key=value ...

A bad configuration is refused (exit code 2) before torch is imported. Exit codes:
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
    """Run the checked configuration. The import is late: it brings torch and Megatron."""
    from megatron_rl.run.main import run

    return run(configuration)


def start() -> int:
    """From the command line to the exit code.

    The import takes most of a second, in which Ctrl-C is heard.
    """
    exit_on_interrupt()
    from megatron_rl.config.cli import main

    return main(train, Path(__file__).resolve().parents[1] / "hydra_conf")


if __name__ == "__main__":
    sys.exit(start())
