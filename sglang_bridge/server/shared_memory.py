"""Files that SGLang's processes leave in /dev/shm: it removes none when killed, and some never."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_FOLDER = "/dev/shm/"
# SGLang's own, and those of Python's multiprocessing; what NCCL and CUDA map they share with others
# and remove.
_PREFIXES = ("sglang_", "sgl_shm_", "multi_tokenizer_args_", "sem.mp-", "psm_")


def mapped_shared_memory(pids: Iterable[int]) -> set[Path]:
    """Such files that living processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition(_FOLDER)[2]
                if name.startswith(_PREFIXES) and not name.endswith("(deleted)"):
                    found.add(Path(_FOLDER) / name)
    return found


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove what is still there. Only for processes that have ended."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
