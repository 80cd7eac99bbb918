"""The main job with a place where it can be held: after a batch was sampled, before it is trained.

While `run.root` holds the file HOLD, rank 0 writes HELD there and waits until HOLD is gone.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Its own folder is no place to import from
sys.path[0] = str(Path(__file__).resolve().parents[3])

if TYPE_CHECKING:
    from megatron_rl.training.dispatcher import Dispatcher

_POLL_SECONDS = 0.05


def main() -> int:
    """Run the command line, as the main job does. The imports bring torch and Megatron."""
    from launch.train_rl import start
    from megatron_rl.contracts.commands import Train
    from megatron_rl.training import dispatcher
    from tests.lab.faults.follower import HELD, HOLD

    root = Path(next(a for a in sys.argv if a.startswith("run.root=")).partition("=")[2])
    run = dispatcher.Dispatcher.run

    def hold_and_run(self: "Dispatcher", command: Any) -> Any:
        while isinstance(command, Train) and (root / HOLD).exists():
            (root / HELD).touch()
            time.sleep(_POLL_SECONDS)
        return run(self, command)

    dispatcher.Dispatcher.run = hold_and_run  # type: ignore[method-assign]
    return start()


if __name__ == "__main__":
    sys.exit(main())
