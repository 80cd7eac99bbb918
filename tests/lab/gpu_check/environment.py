"""The environment of the stages."""

from __future__ import annotations

import os
import site
from collections.abc import Iterable, Mapping
from pathlib import Path


def stage_environment(
    parent: Mapping[str, str],
    root: Path,
    scratch: Path,
    *,
    small: bool,
    packages: Iterable[Path] = (),
) -> dict[str, str]:
    """Environment of a stage: the tree first on the path, at most one GPU, and no network.

    parent: the environment of the command. root: the tree. scratch: for caches. packages: folders
    of packages, which come before the interpreter's.
    """
    paths = [root, root / "kernels", *packages, parent.get("PYTHONPATH", "")]
    first = (parent.get("CUDA_VISIBLE_DEVICES") or "0").partition(",")[0]
    environment = {
        **parent,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "" if small else first,
        "HF_HUB_OFFLINE": "1",
        # Stages with deterministic algorithms need it.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        # SGLang's compiled tree needs the torch that it was compiled with.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    }
    if small:
        environment["OMP_NUM_THREADS"] = "1"
    home = parent.get("HOME", "")
    if not (home and os.access(home, os.W_OK)):
        # Libraries keep caches there. Packages of the user stay where they are.
        environment["HOME"] = str(scratch)
        environment["PYTHONUSERBASE"] = parent.get("PYTHONUSERBASE") or site.getuserbase()
    return environment
