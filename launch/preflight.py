"""Says whether this machine can run a configuration; nothing is started.

    python launch/preflight.py experiment=quickstart key=value ...
    torchrun --nproc-per-node 2 launch/preflight.py parallel=ep2 key=value ...

It takes what launch/train_rl.py takes, with the same ranks. What that refuses is refused, and what
a run opens before its first step is opened. One line a check, from one rank of each node; exit code
0, or 2 when a run must not start.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import psutil

from megatron_rl.config.cli import main
from megatron_rl.config.curriculum import sized_for_all_phases
from megatron_rl.config.schema import Configuration, EngineSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.interrupts import exit_on_interrupt
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.memory import engine_memory, rank_memory
from megatron_rl.records.run_directory import PACKAGES
from sglang_bridge.addresses import node_address, require_private_address
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import create_keys, read_keys
from sglang_bridge.server.readiness import require_external_engines

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")
GIB = 1024**3
# Resident memory of a tiny model's processes; larger models need their weights on top.
ENGINE_BYTES, RANK_BYTES = 2 * GIB, GIB // 2
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class Check:
    """One line of the report. remedy: what to do when it failed, empty where `found` says it.
    required: whether a run cannot do without it."""

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
        return f"{verdict}  {self.name}: {self.found}" + (
            "" if self.passed or not self.remedy else f". {self.remedy}."
        )


def check_versions(constraints: str) -> Iterator[Check]:
    """Installed versions against the pinned ones.

    constraints: the text of requirements/constraints.txt.
    """
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, flags=re.MULTILINE))
    for name in PACKAGES:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, False, "not installed", "Run make install")
            continue
        same = found.partition("+")[0] == pinned[name]
        yield Check(
            name,
            same,
            f"{found}, pinned {pinned[name]}",
            "Run make install, or expect what was not tested",
        )


def check_devices(facts: LaunchFacts) -> Iterator[Check]:
    """GPUs that the configuration's rules count, against what torch can use."""
    import torch

    usable = torch.cuda.device_count()
    found = f"{facts.num_gpus} for torch, which can use {usable}"
    yield Check(
        "GPUs", usable == facts.num_gpus, found, "Install a torch build and a driver that match"
    )
    if facts.idle_gpus:
        found = f"{facts.idle_gpus} stay idle: the installed torch is built for CPUs"
        yield Check(
            "idle GPUs", False, found, "Install a CUDA build of torch (Dockerfile)", required=False
        )


def device_bytes(facts: LaunchFacts) -> int:
    """Memory of a GPU, or each rank's share of the host's that is free."""
    import torch

    if facts.num_gpus:
        return torch.cuda.get_device_properties(0).total_memory
    return psutil.virtual_memory().available // facts.local_world_size


def check_memory(engine: EngineSettings, facts: LaunchFacts) -> Check:
    """Host memory for this node's ranks and managed engines, without their weights."""
    engines = engine.count if engine.mode == "managed" else 0
    needed = facts.local_world_size * RANK_BYTES + engines * ENGINE_BYTES
    available = psutil.virtual_memory().available
    found = f"{available / GIB:.1f} GiB available, at least {needed / GIB:.1f} needed"
    return Check(
        "host memory", available >= needed, found, "Free memory, or start fewer ranks or engines"
    )


def check_rank_memory(
    c: Configuration, shape: ModelShape, facts: LaunchFacts, device_bytes: int
) -> Iterator[Check]:
    """What the settings need of a rank's device and of an engine's.

    device_bytes: of a GPU, or a process's share.
    """
    where = "of a GPU" if facts.num_gpus else "for each rank"
    worst = max(
        (
            rank_memory(c, shape, world_size=facts.world_size, stage=stage)
            for stage in range(c.parallel.pp)
        ),
        key=lambda memory: memory.total,
    )
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in worst.parts.items())
    found = f"{parts}: {_gib(worst.total)} of {_gib(device_bytes)} GiB {where}, at most, on stage {worst.stage}"
    remedy = "More ranks or parallel.ep, .pp, .tp, model.recompute=full or a smaller train.tokens_per_micro_batch"
    yield Check("rank memory", worst.total <= device_bytes, found, remedy)
    engine = engine_memory(c, shape)
    found = (
        f"parameters {_gib(engine.parameters)}, KV cache {_gib(engine.kv_cache)} GiB on each device"
    )
    managed = c.engine.mode == "managed"  # of the others' devices nothing is known here
    yield Check(
        "engine memory", not managed or engine.parameters <= device_bytes, found, "Raise engine.tp"
    )
    if managed and engine.parameters <= device_bytes < engine.total:
        found, remedy = (
            "requests will wait for one another",
            "Raise engine.tp, or lower engine.max_running_requests",
        )
        yield Check("KV cache", False, found, remedy, required=False)


def check_save_memory(
    c: Configuration, shape: ModelShape, facts: LaunchFacts, available: int
) -> Iterator[Check]:
    """What saving a checkpoint needs of a node's memory; without GPUs the ranks train in it.
    available: in bytes.
    """
    if not c.run.checkpoint_every:
        return
    stages = [
        rank_memory(c, shape, world_size=facts.world_size, stage=stage)
        for stage in range(c.parallel.pp)
    ]
    saving = max(memory.host_save for memory in stages)
    training = 0 if facts.num_gpus else max(memory.total for memory in stages)
    needed = facts.local_world_size * (saving + training)
    beside = f" beside the {_gib(training)} it trains in" if training else ""
    found = f"{_gib(saving)} GiB for each rank{beside}, {facts.local_world_size} of them; {_gib(available)} available"
    remedy = "More nodes with more parallel.ep, .pp or .tp; run.background_saves=false saves a copy"
    yield Check("memory of a save", needed <= available, found, remedy)


def _gib(size: int) -> str:
    return f"{size / GIB:.{1 if size >= GIB else 3}f}"


def check_shared_memory(directory: str = "/dev/shm") -> Check:
    """NCCL and engines with several ranks pass data between processes through it; rollouts do not
    need it.
    """
    free = shutil.disk_usage(directory).free if os.path.isdir(directory) else 0
    found = f"{free / GIB:.1f} GiB free in {directory}"
    remedy = (
        "NCCL, and SGLang with engine.tp > 1, need some; in a container give it more: --shm-size 8g"
    )
    return Check("shared memory", free >= GIB, found, remedy, required=False)


def check_run_root(root: str) -> Check:
    """The run directory can be made."""
    path = Path(root).expanduser().resolve()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            return Check("run.root", True, f"{existing} is writable", "")
    except OSError as error:
        return Check(
            "run.root", False, f"{existing}: {error.strerror}", "Choose another place: run.root=..."
        )


def check_addresses(facts: LaunchFacts) -> Iterator[Check]:
    """Nodes reach one another in a private network."""
    if (nodes := facts.world_size // facts.local_world_size) > 1:
        try:
            host = node_address(nodes)
            require_private_address(host)
            yield Check("address", True, host, "")
        except (ValueError, OSError, KeyError) as error:
            yield Check("address", False, str(error), "Start with torchrun on every node")


def check_external_engines(c: Configuration) -> Iterator[Check]:
    """Every server answers, and is what the configuration says."""
    engine = replace(c.engine, start_timeout_s=ANSWER_SECONDS)
    keys = read_keys(Path(engine.key_file)) if engine.key_file is not None else create_keys()
    for url in engine.urls:
        server = Engine(
            url=url, node=0, tp=engine.tp, ep=engine.ep, quantization=engine.quantization
        )
        try:
            require_external_engines(
                [server], keys, engine, return_routes=c.train.replay == "rollout"
            )
        except EngineError as error:
            yield Check(url, False, str(error), "")
        else:
            yield Check(url, True, "answers as it should", "")


def check_opening(c: Configuration) -> Iterator[Check]:
    """What ranks open before the first step: their imports, classes of the user's own, prompts,
    room on the disk.
    """
    from megatron_rl.mcore import compat

    compat.install()
    try:
        from megatron_rl.environments.environment import open_environment
        from megatron_rl.losses import open_loss
        from megatron_rl.run.checkpoints.belief_transfer import read_transferred_beliefs
        from megatron_rl.run.checkpoints.disk_space import require_disk_space
        from megatron_rl.run.prompts import build_prompts
    except ImportError as error:
        yield Check("trainer", False, f"cannot be imported ({error})", "Run make install")
        return
    shape = read_shape(c.model.path)
    yield _opened("algo", lambda: open_loss(c.algo, shape), lambda _: c.algo.name)
    yield _opened(
        "environment", lambda: open_environment(c.environment), lambda opened: type(opened).__name__
    )
    yield _opened(
        "prompts",
        lambda: build_prompts(c, read_transferred_beliefs(c) if c.run.resume == "never" else None),
        lambda p: (
            f"{len(p.train)} to train, {len(p.held_out)} held out; "
            + "; ".join(filter(None, p.told()))
        ),
    )
    yield _opened(
        "disk space", lambda: require_disk_space(c, shape), lambda _: "enough for what the run writes"
    )


def _opened(name: str, open_it: Callable[[], T], told: Callable[[T], str]) -> Check:
    try:
        return Check(name, True, told(open_it()), "")
    except Failure as failure:
        return Check(name, False, str(failure), "")
    except Exception as error:  # classes of the user's own may raise anything
        return Check(name, False, f"{type(error).__name__}: {error}", "Correct it there")


def preflight(config: Configuration) -> int:
    """Print every check of an accepted configuration, on one rank of each node, and return the exit
    code.
    """
    facts = LaunchFacts.from_environment(os.environ)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return ExitCode.OK
    checks = [
        *check_versions((ROOT / "requirements" / "constraints.txt").read_text()),
        *check_devices(facts),
        check_memory(config.engine, facts),
        *check_rank_memory(
            sized_for_all_phases(config), read_shape(config.model.path), facts, device_bytes(facts)
        ),
        *check_save_memory(
            config, read_shape(config.model.path), facts, psutil.virtual_memory().available
        ),
        check_shared_memory(),
        check_run_root(config.run.root),
        *check_addresses(facts),
        *check_external_engines(config),
        *check_opening(config),
    ]
    where = f"{socket.gethostname()}: " if facts.world_size > facts.local_world_size else ""
    for line in ("ok    configuration: every rule is kept", *checks):
        print(f"{where}{line}")
    return ExitCode.OK if not any(check.refuses for check in checks) else ExitCode.REFUSED


if __name__ == "__main__":
    exit_on_interrupt()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit(ExitCode.OK)
    sys.exit(main(preflight, ROOT / "hydra_conf"))
