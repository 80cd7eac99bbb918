"""Says whether this machine can run a configuration: python launch/preflight.py experiment=quickstart key=value ..."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from megatron_rl.config.cli import main
from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.schema import Configuration, EngineSettings
from megatron_rl.contracts.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[1]
GIB = 1024**3
PINNED = ("torch", "megatron-core", "sglang", "triton", "transformers", "hydra-core", "numpy")
# Resident memory of a tiny model's processes; larger models need their weights on top.
ENGINE_BYTES, RANK_BYTES = 2 * GIB, GIB // 2


@dataclass(frozen=True)
class Check:
    """One line of the report. remedy: what to do when it failed. required: whether a run cannot do without it."""

    name: str
    passed: bool
    found: str
    remedy: str
    required: bool = True

    @property
    def refuses(self) -> bool:
        """Whether a run must not start."""
        return self.required and not self.passed

    def __str__(self) -> str:
        verdict = "ok  " if self.passed else "FAIL" if self.required else "warn"
        return f"{verdict}  {self.name}: {self.found}" + ("" if self.passed else f". {self.remedy}.")


def check_versions(constraints: str) -> Iterator[Check]:
    """Installed versions against the pinned ones. constraints: the text of requirements/constraints.txt."""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, flags=re.MULTILINE))
    for name in PINNED:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, False, "not installed", "Run make install")
            continue
        same = found.partition("+")[0] == pinned[name]
        yield Check(name, same, f"{found}, pinned {pinned[name]}", "Run make install, or expect what was not tested")


def check_devices(facts: LaunchFacts) -> Check:
    """Device files, which the configuration's rules count, against what torch can use."""
    import torch

    usable = torch.cuda.device_count()
    found = f"{facts.num_gpus} device file(s), {usable} usable by torch"
    return Check("GPUs", usable == facts.num_gpus, found, "Install a torch build and a driver that match")


def check_memory(engine: EngineSettings, facts: LaunchFacts) -> Check:
    """Host memory for this node's ranks and managed engines, without their weights."""
    engines = engine.count if engine.mode == "managed" else 0
    needed = facts.local_world_size * RANK_BYTES + engines * ENGINE_BYTES
    available = psutil.virtual_memory().available
    found = f"{available / GIB:.1f} GiB available, at least {needed / GIB:.1f} needed"
    return Check("host memory", available >= needed, found, "Free memory, or start fewer ranks or engines")


def check_shared_memory(directory: str = "/dev/shm") -> Check:
    """NCCL and engines with several ranks pass data between processes through it; rollouts do not need it."""
    free = shutil.disk_usage(directory).free if os.path.isdir(directory) else 0
    found = f"{free / GIB:.1f} GiB free in {directory}"
    remedy = "NCCL, and SGLang with engine.tp > 1, need some; in a container give it more: --shm-size 8g"
    return Check("shared memory", free >= GIB, found, remedy, required=False)


def check_run_root(root: str) -> Check:
    """The run directory can be made, and there is room in it."""
    path = Path(root).expanduser().resolve()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            writable = True
    except OSError:
        writable = False
    found = f"{existing}, {free / GIB:.1f} GiB free, {'writable' if writable else 'not writable'}"
    return Check("run.root", writable and free >= GIB, found, "Choose another place: run.root=...")


def check_external_engines(engine: EngineSettings) -> Iterator[Check]:
    """A server accepts connections at every address."""
    for url in engine.urls:
        parts = urlsplit(url)
        try:
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5.0).close()
            yield Check(url, True, "accepts connections", "")
        except OSError as error:
            yield Check(url, False, str(error), "Start that server, or take it out of engine.urls")


def preflight(config: Configuration) -> int:
    """Print every check of an accepted configuration and return the exit code."""
    facts = LaunchFacts.from_environment(os.environ)
    checks = [
        *check_versions((ROOT / "requirements" / "constraints.txt").read_text()),
        check_devices(facts),
        check_memory(config.engine, facts),
        check_shared_memory(),
        check_run_root(config.run.root),
        *check_external_engines(config.engine),
    ]
    print("ok    configuration: every rule is kept")
    for check in checks:
        print(check)
    return ExitCode.OK if not any(check.refuses for check in checks) else ExitCode.REFUSED


if __name__ == "__main__":
    sys.exit(main(preflight, ROOT / "hydra_conf"))
