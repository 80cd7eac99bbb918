"""Run a module on the pretended device: python -m launch.pretended_device MODULE ARGUMENTS...

The module is started as `python -m MODULE ARGUMENTS...` would start it. With torchrun:

    torchrun --nproc-per-node 2 -m launch.pretended_device tests.distributed.worker_steps OUT finite
"""

from __future__ import annotations

import runpy
import sys

from launch.pretended_device.pretend import pretend


def main() -> None:
    """Pretend, and run the module in this process."""
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        raise SystemExit(2)
    pretend()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
