"""One rank of a step that two ranks share: started by the part `ranks` of the command.

Usage: torchrun -m tests.lab.te_rehearsal.ranks CHECKPOINT SETTINGS GRID, the last two as JSON.
Rank 0 prints the distances of `te` from `local` as one line of JSON behind `RESULT`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

from tests.lab.te_rehearsal.transformer_engine import start

REHEARSAL = start()

import torch.distributed as dist
from safetensors.torch import load_file

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore import parallel
from tests.lab.te_rehearsal.models import Machine
from tests.lab.te_rehearsal.steps import gap, run_step


def main() -> None:
    """Run the step with both specs."""
    checkpoint = Path(sys.argv[1])
    options: dict[str, Any] = json.loads(sys.argv[2])
    grid = ParallelSettings(timeout_s=300, **json.loads(sys.argv[3]))
    with REHEARSAL.cuda.off():
        layout = parallel.initialize(grid, seed=1)
    machine = Machine(REHEARSAL.cuda, grid)
    settings = ModelSettings(path=str(checkpoint), **options)
    te = run_step(machine, layout, checkpoint, settings, "te")
    local = run_step(machine, layout, checkpoint, settings, "local")
    result = vars(gap(te, local, load_file(checkpoint / "model.safetensors")))
    if dist.get_rank() == 0:
        result |= {"ratio_deviation": te.ratio_deviation}
        print("RESULT", json.dumps(result), flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    main()
