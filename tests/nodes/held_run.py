"""The main job with places where a test can hold it, so that a node dies at a known moment.

While `run.root` holds the file `hold-PLACE`, rank 0 creates `at-PLACE` there when it comes to that
place, and waits until `hold-PLACE` is gone.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Its own folder is no place to import from
sys.path[0] = str(Path(__file__).resolve().parents[2])

POLL_SECONDS = 0.05


def main() -> int:
    """Run the command line, as the main job does."""
    from launch.train_rl import start

    if os.environ["RANK"] == "0":
        root = Path(next(a for a in sys.argv if a.startswith("run.root=")).partition("=")[2])
        _add_places(root)
    return start()


def _add_places(root: Path) -> None:
    from megatron_rl.mcore import compat

    compat.install()
    from megatron_rl.rollouts.queue import RolloutQueue
    from megatron_rl.run.checkpoints.store import CheckpointStore
    from megatron_rl.training import worker
    from sglang_bridge.weights.weight_group import WeightGroup

    _hold(root, "sampling", RolloutQueue, "submit", is_before=False)
    _hold(root, "training", worker, "update_policy", is_before=False)
    _hold(root, "syncing", WeightGroup, "deliver", is_before=False)
    _hold(root, "saving", CheckpointStore, "commit", is_before=True)


def _hold(root: Path, place: str, owner: Any, name: str, *, is_before: bool) -> None:
    """Make a function a place, before or after its work."""
    function: Callable[..., Any] = getattr(owner, name)

    def wait() -> None:
        while (root / f"hold-{place}").exists():
            (root / f"at-{place}").touch()
            time.sleep(POLL_SECONDS)

    def hold(*arguments: Any, **options: Any) -> Any:
        if is_before:
            wait()
        result = function(*arguments, **options)
        if not is_before:
            wait()
        return result

    setattr(owner, name, hold)


if __name__ == "__main__":
    sys.exit(main())
