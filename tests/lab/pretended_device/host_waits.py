"""Counts how often the host waits for the device, by the line that makes it wait."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

Kind = Literal["read", "upload", "synchronize"]
# A line outside of these folders is attributed to the innermost of theirs that called it.
_FOLDERS = ("/megatron_rl/", "/espo_kernels/", "/sglang_bridge/", "/megatron/core/")


@dataclass(frozen=True, order=True)
class Wait:
    """A reason to wait.

    place: file and function, without the line, which changes with every edit.
    kind: "read" for values that the host learns; "upload" for copies from memory that is not
    pinned, or without `non_blocking`; "synchronize" for `torch.cuda.synchronize` and its like.
    operation: torch's name.
    """

    place: str
    kind: Kind
    operation: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind} by {self.operation}"


class HostWaits:
    """The waits of this process. `lines` gives the line numbers of each place."""

    def __init__(self) -> None:
        self.counts: Counter[Wait] = Counter()
        self.lines: dict[Wait, set[int]] = {}
        self._is_paused = False

    def record(self, kind: bytes, operation: bytes) -> None:
        """Count a wait of the line that runs now. The device calls it."""
        if self._is_paused:
            return
        place, line = _calling_place()
        name = operation.decode().removeprefix("aten::")
        wait = Wait(place, cast(Kind, kind.decode()), name)
        self.counts[wait] += 1
        self.lines.setdefault(wait, set()).add(line)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing within the block, which stands for a kernel."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[Wait]]:
        """Count the waits within the block. The result fills when the block ends."""
        before = self.counts.copy()
        result: Counter[Wait] = Counter()
        yield result
        result.update(self.counts - before)


def _calling_place() -> tuple[str, int]:
    """The innermost line of the trainer, of its kernels or of Megatron: file and function, line."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for folder in _FOLDERS:
            if folder in file:
                path = file[file.rindex(folder) + 1 :]
                return f"{path} {frame.f_code.co_name}", frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere", 0
