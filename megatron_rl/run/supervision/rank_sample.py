"""Samples what a rank does: its command and the stack of its main thread."""

from __future__ import annotations

import linecache
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_rl.training.activity import RunningCommand

_MAX_FRAMES = 40
_COLLECTIVES = str(Path("torch", "distributed"))
# The main thread is here while threads of C++ run the hooks of a backward pass
_BACKWARD = str(Path("torch", "autograd", "graph.py"))


class RankSample(msgspec.Struct, frozen=True, kw_only=True):
    """The command and the place of a rank at one moment.

    count: how many samples the rank has taken, this one included.
    number, command: the rank's current command. 0 and "" while it waits for the next one, which is
    waiting, too.
    stack: `file:line function` of the calls, the innermost last.
    is_waiting: the innermost call waits for other ranks.
    """

    count: int
    number: int = 0
    command: str = ""
    stack: tuple[str, ...] = ()
    is_waiting: bool = False


def sample_rank(count: int, command: RunningCommand | None) -> RankSample:
    """Sample this rank. Another thread than the main thread calls it."""
    if command is None:
        return RankSample(count=count, is_waiting=True)
    frames = _frames_of_work()
    return RankSample(
        count=count,
        number=command.number,
        command=command.name,
        stack=tuple(
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames[-_MAX_FRAMES:]
        ),
        is_waiting=_is_waiting(frames),
    )


def _frames_of_work() -> list[traceback.FrameSummary]:
    """The calls of the main thread, or of a backward pass that it has started."""
    frame_by_thread = sys._current_frames()
    main_thread = threading.main_thread().ident or 0
    main_frames = _extract(frame_by_thread.pop(main_thread))
    if not main_frames or not main_frames[-1].filename.endswith(_BACKWARD):
        return main_frames
    python_threads = {thread.ident for thread in threading.enumerate()}
    for identifier, frame in frame_by_thread.items():
        if identifier not in python_threads:
            return main_frames + _extract(frame)
    return main_frames


def _extract(frame: object) -> list[traceback.FrameSummary]:
    # Without the source lines: they would be read from disk at each sample
    calls: Iterable[tuple[object, int]] = traceback.walk_stack(frame)  # type: ignore[arg-type]
    summary = traceback.StackSummary.extract(calls, lookup_lines=False)  # type: ignore[arg-type]
    return list(reversed(summary))


def _is_waiting(frames: list[traceback.FrameSummary]) -> bool:
    """True if the innermost call is a collective, or waits for one that was begun."""
    if not frames:
        return False
    last = frames[-1]
    if f"{_COLLECTIVES}/" in last.filename:
        return True
    line = linecache.getline(last.filename, last.lineno or 0)
    return ".wait(" in line
