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
    from megatron_rl.run.leader import Leader

_POLL_SECONDS = 0.05


def main() -> int:
    """Run the command line, as the main job does. The imports bring torch and Megatron."""
    from launch.train_rl import start
    from megatron_rl.run import leader
    from tests.lab.faults.follower import HELD, HOLD

    root = Path(next(a for a in sys.argv if a.startswith("run.root=")).partition("=")[2])
    train = leader.Leader._train

    def hold_and_train(self: "Leader", *arguments: Any) -> Any:
        while (root / HOLD).exists():
            (root / HELD).touch()
            time.sleep(_POLL_SECONDS)
        return train(self, *arguments)

    leader.Leader._train = hold_and_train  # type: ignore[method-assign,assignment]
    return start()


if __name__ == "__main__":
    sys.exit(main())
