"""The processor time of a piece of work, comparable between machines."""

import gc
import time
from collections.abc import Callable

_LOOP_SECONDS = 0.01  # the time of `_loop` on a usual machine


def processor_seconds(work: Callable[[], object], *, attempts: int = 1) -> float:
    """Return the processor time of `work`, as a usual machine would need it.

    A loop tells how fast this machine is at the moment. The shortest of so many attempts counts.
    The garbage of other tests is not collected meanwhile.
    """
    gc.disable()
    try:
        loop_seconds = min(_seconds(_loop) for _ in range(3))
        work_seconds = min(_seconds(work) for _ in range(attempts))
        # The machine may have become slower meanwhile
        loop_seconds = max(loop_seconds, min(_seconds(_loop) for _ in range(3)))
    finally:
        gc.enable()
    return work_seconds * _LOOP_SECONDS / loop_seconds


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _loop() -> None:
    sums: dict[int, int] = {}
    for number in range(40_000):
        key = number % 1000
        sums[key] = sums.get(key, 0) + number
