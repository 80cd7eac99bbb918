"""Names the line of the trainer or of Megatron that is running."""

from __future__ import annotations

import sys

_OWN_FOLDERS = ("/megatron_rl/", "/espo_kernels/", "/megatron/core/")
_MAX_FRAMES = 40


def calling_functions() -> list[str]:
    """The names of the running functions, the innermost first."""
    names: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(names) < _MAX_FRAMES:
        names.append(frame.f_code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return names


def calling_place() -> str:
    """The innermost line of the trainer, of its kernels or of Megatron that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for folder in _OWN_FOLDERS:
            if folder in file:
                path = file[file.rindex(folder) + 1 :]
                return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
