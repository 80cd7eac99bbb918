r"""Run a module on the pretended device: python -m tests.lab.pretended_device MODULE ARGUMENTS...

The module is started as `python -m MODULE ARGUMENTS...` would start it. With torchrun:

    torchrun --nproc-per-node 2 -m tests.lab.pretended_device \
        tests.distributed.worker_steps OUT finite

With `--branches=DIR` before MODULE, each process lists in DIR/PID.json which places were executed
that only a GPU executes.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_BRANCHES = "--branches="


def main() -> None:
    """Pretend, and run the module in this process."""
    del sys.argv[0]
    if sys.argv and sys.argv[0].startswith(_BRANCHES):
        # First of all, because the recorder sees only modules that are imported after it.
        from tests.lab.pretended_device.branches.recorder import record_branches

        directory = sys.argv.pop(0).removeprefix(_BRANCHES)
        record_branches(Path(__file__).resolve().parents[3], Path(directory))
    if not sys.argv:
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    from tests.lab.pretended_device.pretend import pretend

    pretend()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
