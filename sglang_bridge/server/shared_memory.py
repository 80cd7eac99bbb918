"""Files that SGLang's processes leave in /dev/shm: it removes none when killed, and some never."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_FOLDER = "/dev/shm/"
# Files of SGLang and of Python's multiprocessing. Files that NCCL and CUDA map are shared with
# other processes, and they remove them.
_PREFIXES = ("sglang_", "sgl_shm_", "multi_tokenizer_args_", "sem.mp-", "psm_")


def mapped_shared_memory(pids: Iterable[int]) -> set[Path]:
    """Files of shared memory that these living processes have mapped."""
    files = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition(_FOLDER)[2]
                if name.startswith(_PREFIXES) and not name.endswith("(deleted)"):
                    files.add(Path(_FOLDER) / name)
    return files


def remove_shared_memory(files: Iterable[Path]) -> None:
    """Remove the files that still exist. Call it only for processes that have ended."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
