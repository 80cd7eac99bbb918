"""Check whether this machine can run a configuration. Nothing is started.

Examples, with the settings and the ranks of launch/train_rl.py:

    python launch/preflight.py experiment=quickstart key=value ...
    torchrun --nproc-per-node 2 launch/preflight.py experiment=quickstart parallel=ep2
    python launch/preflight.py --rehearse rank=17 ranks=128 model=qwen3_235b_a22b ...

With --rehearse it builds one rank of a cluster without GPUs; see launch/rehearsal.

It applies every rule of the configuration, and opens the data and the user-defined classes that a
run opens before its first step. Output: one line for each check (ok, warn or FAIL), from one rank
of each node. Exit code: 0, or 2 if a run must not start.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from megatron_rl.config.cli import main
from megatron_rl.config.curriculum import sized_for_all_phases, sized_for_engines
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.interrupts import exit_on_interrupt
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.engines.quantization import engine_quantization
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.colocated import colocated_memory
from megatron_rl.planning.memory import engine_memory, rank_memory
from megatron_rl.records.run_directory import PACKAGES
from megatron_rl.rollouts.steps.steps_ahead import largest_age
from megatron_rl.rollouts.wire.messages import slots_of_engine
from megatron_rl.run.data import RunData, read_data
from megatron_rl.run.prompts import build_prompts
from sglang_bridge.addresses import node_address, require_private_address
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import create_keys, read_keys
from sglang_bridge.server.readiness import require_external_engines

ROOT = Path(__file__).resolve().parents[1]
GIB = 1024**3
# Resident memory of a tiny model's processes; larger models need their weights on top.
ENGINE_BYTES = 2 * GIB
RANK_BYTES = GIB // 2
ANSWER_SECONDS = 5.0
# NCCL keeps buffers of its own for each group. More than so many on a GPU are worth a warning.
MAX_WEIGHT_GROUPS = 32
# A process has files of its libraries open, and of its connections to other processes
BASE_OPEN_FILES = 512
_REHEARSE = "--rehearse"


@dataclass(frozen=True)
class Check:
    """One line of the report.

    passes: False for a failure or a warning.
    finding: what was measured.
    remedy: what to do after a failure, or an empty string if `finding` names it.
    is_required: True if a run cannot start without it.
    """

    name: str
    passes: bool
    finding: str
    remedy: str
    is_required: bool = True

    @property
    def refuses(self) -> bool:
        """True if a run must not start."""
        return self.is_required and not self.passes

    def __str__(self) -> str:
        result = "ok  " if self.passes else "FAIL" if self.is_required else "warn"
        line = f"{result}  {self.name}: {self.finding}"
        if not self.passes and self.remedy:
            line += f". {self.remedy}."
        return line


def read_constraints(*, with_gpus: bool) -> str:
    """Read the pinned versions. with_gpus: with the versions of the CUDA image."""
    names = ["constraints.txt"]
    if with_gpus:
        names.append("gpu-constraints.txt")
    return "\n".join((ROOT / "requirements" / name).read_text() for name in names)


def check_versions(constraints: str) -> Iterator[Check]:
    """Compare the installed versions with the pinned ones. Another version is a warning.

    constraints: the text of constraint files. Later pins replace earlier ones.
    """
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, flags=re.MULTILINE))
    pins["triton"] = _triton_of_torch() or pins["triton"]
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, False, "not installed", "Run make install")
            continue
        finding = f"{version}, pinned {pins[name]}"
        remedy = "Run make install. Other versions are not tested"
        is_pinned = version.partition("+")[0] == pins[name]
        yield Check(name, is_pinned, finding, remedy, is_required=False)


def _triton_of_torch() -> str | None:
    """Return the version of triton that a CUDA build of torch declares, None for other builds."""
    for text in importlib.metadata.requires("torch") or ():
        requirement = Requirement(text)
        version = re.fullmatch(r"==([\d.]+)", str(requirement.specifier))
        if requirement.name == "triton" and version is not None:
            return version[1]
    return None


def check_devices(facts: LaunchFacts) -> Iterator[Check]:
    """Compare the GPUs that the rules count with those that torch can use."""
    import torch

    usable = torch.cuda.device_count()
    finding = f"{facts.num_gpus} for torch, which can use {usable}"
    remedy = "Install a torch build and a driver that match"
    yield Check("GPUs", usable == facts.num_gpus, finding, remedy)
    if facts.idle_gpus:
        finding = f"{facts.idle_gpus} stay idle: the installed torch is built for CPUs"
        remedy = "Install a CUDA build of torch (Dockerfile)"
        yield Check("idle GPUs", False, finding, remedy, is_required=False)


def device_bytes(facts: LaunchFacts) -> int:
    """The memory of a GPU, or the share of each rank in the free memory of the host, in bytes."""
    import torch

    if facts.num_gpus:
        return torch.cuda.get_device_properties(0).total_memory
    return psutil.virtual_memory().available // facts.local_world_size


def check_memory(c: Configuration, facts: LaunchFacts) -> Check:
    """Check the host memory for this node's ranks and managed engines, without their weights."""
    engines = c.engine.count if c.engine.mode == "managed" and c.has_engines else 0
    minimum = facts.local_world_size * RANK_BYTES + engines * ENGINE_BYTES
    available = psutil.virtual_memory().available
    finding = f"{available / GIB:.1f} GiB available, at least {minimum / GIB:.1f} needed"
    remedy = "Free memory, or start fewer ranks or engines"
    return Check("host memory", available >= minimum, finding, remedy)


def check_rank_memory(
    c: Configuration, shape: ModelShape, facts: LaunchFacts, device_bytes: int
) -> Iterator[Check]:
    """Check the memory that a rank and an engine need of their devices, if the mode opens them.

    device_bytes: memory of a GPU, or of a rank's share of the host.
    """
    if not c.is_measurement:  # which builds no trainer
        yield _check_trainer_memory(c, shape, facts, device_bytes)
    if c.has_engines:
        yield from _check_engine_memory(c, shape, device_bytes)


def _check_trainer_memory(
    c: Configuration, shape: ModelShape, facts: LaunchFacts, device_bytes: int
) -> Check:
    memories = [
        rank_memory(c, shape, world_size=facts.world_size, stage=stage)
        for stage in range(c.parallel.pp)
    ]
    largest = max(memories, key=lambda memory: memory.total)
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in largest.parts.items())
    place = "of a GPU" if facts.num_gpus else "for each rank"
    finding = (
        f"at most {_gib(largest.total)} of {_gib(device_bytes)} GiB {place}, on pipeline stage "
        f"{largest.stage}: {parts}"
    )
    remedy = (
        "More ranks or parallel.ep, .pp, .tp, model.recompute=full or a smaller "
        "train.tokens_per_micro_batch"
    )
    return Check("rank memory", largest.total <= device_bytes, finding, remedy)


def _check_engine_memory(c: Configuration, shape: ModelShape, device_bytes: int) -> Iterator[Check]:
    engine = engine_memory(c, shape)
    # The devices of external engines are not known here.
    is_managed = c.engine.mode == "managed"
    fits = not is_managed or engine.parameters <= device_bytes
    finding = (
        f"parameters {_gib(engine.parameters)}, KV cache {_gib(engine.kv_cache)} GiB on each device"
    )
    yield Check("engine memory", fits, finding, "Raise engine.tp")
    if is_managed and engine.parameters <= device_bytes < engine.total:
        finding = "requests will wait for one another"
        remedy = "Raise engine.tp, or lower engine.max_running_requests"
        yield Check("KV cache", False, finding, remedy, is_required=False)


def check_colocated_memory(
    c: Configuration, shape: ModelShape, facts: LaunchFacts, device_bytes: int
) -> Iterator[Check]:
    """Check the memory of a GPU that a rank and an engine use in turns."""
    if not c.engine.colocated or not facts.num_gpus:
        return
    memory = colocated_memory(c, shape, world_size=facts.world_size, device_bytes=device_bytes)
    problems = list(memory.problems())
    finding = "; ".join(problems) or memory.describe()
    yield Check("engine.colocated", not problems, finding, "")


def check_save_memory(
    c: Configuration, shape: ModelShape, facts: LaunchFacts, available: int
) -> Iterator[Check]:
    """Check the memory of a node while a checkpoint is saved or loaded, with a reference's weights.

    Without GPUs the ranks train in the same memory. available: bytes of the node.
    """
    is_saved = bool(c.run.checkpoint_every) or c.run.resume != "never"
    if c.is_measurement or (not is_saved and not c.algo.kl.coef):
        return
    memories = [
        rank_memory(c, shape, world_size=facts.world_size, stage=stage)
        for stage in range(c.parallel.pp)
    ]
    saving = max(memory.host_save + memory.host_reference for memory in memories)
    training = 0 if facts.num_gpus else max(memory.total for memory in memories)
    total = facts.local_world_size * (saving + training)
    beside = f" beside the {_gib(training)} it trains in" if training else ""
    finding = (
        f"{_gib(saving)} GiB for each rank{beside}, {facts.local_world_size} of them; "
        f"{_gib(available)} available"
    )
    remedy = "More nodes with more parallel.ep, .pp or .tp; run.background_saves=false saves a copy"
    name = "memory of a save" if is_saved else "memory of the reference"
    yield Check(name, total <= available, finding, remedy)


def _gib(size: int) -> str:
    return f"{size / GIB:.{1 if size >= GIB else 3}f}"


def check_shared_memory(directory: str = "/dev/shm") -> Check:
    """Check the shared memory through which NCCL and engines of several ranks pass data.

    Rollouts do not need it.
    """
    free = shutil.disk_usage(directory).free if os.path.isdir(directory) else 0
    finding = f"{free / GIB:.1f} GiB free in {directory}"
    remedy = "NCCL, and SGLang with engine.tp > 1, need some; give a container more: --shm-size 8g"
    return Check("shared memory", free >= GIB, finding, remedy, is_required=False)


def check_weight_groups(c: Configuration, facts: LaunchFacts) -> Iterator[Check]:
    """Check how many process groups for weights a GPU of an engine, and a rank, take part in.

    Their memory is in no other check: it depends on NCCL and on the network.
    """
    if not facts.num_gpus or c.sync.transport != "distributed":
        return
    from megatron_rl.mcore.weights.owners import Grid, count_owners
    from megatron_rl.run.checkpoints.disk_space import sends_weights

    if not sends_weights(c):
        return

    p = c.parallel
    grid = Grid(facts.world_size, tp=p.tp, cp=p.cp, pp=p.pp, ep=p.ep, etp=p.etp or p.default_etp)
    owners = count_owners(grid)
    if c.sync.engines_per_tree > 1:
        owners = 1  # rank 0 sends alone
    num_nodes = facts.world_size // facts.local_world_size
    engines = len(c.engine.url_list)
    if c.engine.mode == "managed":
        engines = c.engine.count * num_nodes // c.engine.nodes_per_engine
    trees = math.ceil(engines / c.sync.engines_per_tree)
    finding = (
        f"{owners} on each GPU of an engine, {trees} on each of the {owners} ranks that send. The "
        "first sync forms them, one rank after another"
    )
    remedy = (
        "NCCL's buffers for each are in none of these numbers: leave memory to them, raise "
        "sync.timeout_s for the first sync, or share groups with sync.engines_per_tree"
    )
    passes = max(owners, trees) <= MAX_WEIGHT_GROUPS
    yield Check("groups for weights", passes, finding, remedy, is_required=False)


def check_open_files(c: Configuration, facts: LaunchFacts, limit: int) -> Check:
    """Check the hard limit of open files, to which a run raises its own.

    A collector has one for each request that its engines have, and one for each group that it
    holds. limit: -1 means none.
    """
    num_nodes = facts.world_size // facts.local_world_size
    rollout = c.rollout
    age = largest_age(rollout.max_staleness, continues_responses=rollout.on_update != "wait")
    budget = 1.0 if c.selection.name == "uniform" else c.selection.budget
    groups = math.ceil(rollout.prompts_per_step * budget * (1 + age) / num_nodes)
    engines = c.engine.count
    if c.engine.mode == "external":
        engines = math.ceil(len(c.engine.url_list) / num_nodes)
    need = BASE_OPEN_FILES + groups + engines * slots_of_engine(c.engine.max_running_requests)
    allowed = "no limit" if limit < 0 else f"at most {limit:,}"
    finding = f"{allowed}; a collector needs about {need:,}"
    remedy = "Raise the hard limit: ulimit -Hn, LimitNOFILE or --ulimit nofile"
    return Check("open files", not 0 <= limit < need, finding, remedy, is_required=False)


def check_run_root(root: str) -> Check:
    """Check that the run directory can be created."""
    path = Path(root).expanduser().resolve()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing):
            return Check("run.root", True, f"{existing} is writable", "")
    except OSError as error:
        remedy = "Choose another place: run.root=..."
        return Check("run.root", False, f"{existing}: {error.strerror}", remedy)


def check_addresses(facts: LaunchFacts) -> Iterator[Check]:
    """Check that nodes reach one another in a private network."""
    nodes = facts.world_size // facts.local_world_size
    if nodes == 1:
        return
    try:
        host = node_address(nodes)
        require_private_address(host)
        yield Check("address", True, host, "")
    except (ValueError, OSError, KeyError) as error:
        yield Check("address", False, str(error), "Start with torchrun on every node")


def check_external_engines(c: Configuration) -> Iterator[Check]:
    """Check that every server answers and fits the configuration."""
    engine = replace(c.engine, start_timeout_s=ANSWER_SECONDS)
    keys = read_keys(Path(engine.key_file)) if engine.key_file is not None else create_keys()
    quantization = engine_quantization(engine, read_shape(c.model.path))
    for url in engine.url_list:
        server = Engine(
            url=url, node=0, tp=engine.tp, ep=engine.ep, quantization=engine.quantization
        )
        try:
            require_external_engines(
                [server],
                keys,
                engine,
                return_routes=c.train.replay == "rollout",
                model_path=c.model.path,
                quantization=quantization,
            )
        except EngineError as error:
            yield Check(url, False, str(error), "")
        else:
            yield Check(url, True, "answers, and fits the configuration", "")


def check_data(c: Configuration) -> Check:
    """Read the data as rank 0 does, before torch is imported."""

    def read() -> str:
        return describe(read_data(c))

    return _check_opening("data", read)


def describe(data: RunData) -> str:
    """Return the numbers of prompts, or of recorded batches, with notes about them."""
    if data.recording is not None:
        return f"{data.recording.num_batches} recorded batches"
    if data.prompts is None:
        return ", ".join(f"{len(prompts)} in {name}" for name, prompts in data.sets.items())
    counts = f"{len(data.prompts.train)} to train, {len(data.prompts.held_out)} held out"
    warnings = (f"warning: {warning}" for warning in data.warnings)
    return "; ".join([counts, *filter(None, data.prompts.notes()), *warnings])


def check_opening(c: Configuration) -> Iterator[Check]:
    """Open what ranks open before the first step.

    These are imports, user-defined classes, another run's beliefs and the space on the disk.
    """
    from megatron_rl.mcore import compat

    compat.install()
    try:
        from megatron_rl.environments.environment import open_environment
        from megatron_rl.losses import open_loss
        from megatron_rl.run.checkpoints.belief_transfer import read_transferred_beliefs
        from megatron_rl.run.checkpoints.disk_space import require_disk_space
    except ImportError as error:
        yield Check("trainer", False, f"cannot be imported ({error})", "Run make install")
        return
    shape = read_shape(c.model.path)

    def open_beliefs() -> str:
        beliefs = read_transferred_beliefs(c)
        if beliefs is None:
            return "none are used"
        prompts = build_prompts(c)
        beliefs.apply_to(prompts)
        return "; ".join(filter(None, prompts.notes()))

    def open_algo() -> str:
        open_loss(c.algo, shape)
        return c.algo.name

    def check_space() -> str:
        require_disk_space(c, shape)
        return "enough for what the run writes"

    yield _check_opening("algo", open_algo)
    yield _check_opening("environment", lambda: type(open_environment(c.environment)).__name__)
    if c.selection.beliefs_from is not None and c.run.resume == "never":
        yield _check_opening("beliefs", open_beliefs)
    yield _check_opening("disk space", check_space)


def _check_opening(name: str, open_part: Callable[[], str]) -> Check:
    try:
        return Check(name, True, open_part(), "")
    except Failure as failure:
        return Check(name, False, str(failure), "")
    except Exception as error:  # user-defined classes may raise anything
        return Check(name, False, f"{type(error).__name__}: {error}", "Correct it there")


def check_all(c: Configuration, facts: LaunchFacts) -> Iterator[Check]:
    """Yield every check. The data comes first, because it needs neither torch nor Megatron."""
    shape = read_shape(c.model.path)
    yield check_data(c)
    yield from check_versions(read_constraints(with_gpus=facts.num_gpus > 0))
    yield from check_devices(facts)
    yield check_memory(c, facts)
    yield from check_rank_memory(sized_for_all_phases(c), shape, facts, device_bytes(facts))
    yield from check_save_memory(c, shape, facts, psutil.virtual_memory().available)
    yield check_shared_memory()
    yield from check_weight_groups(c, facts)
    yield check_run_root(c.run.root)
    yield from check_addresses(facts)
    if c.has_engines:
        yield from _check_engines(c, shape, facts)
    yield from check_opening(c)


def _check_engines(c: Configuration, shape: ModelShape, facts: LaunchFacts) -> Iterator[Check]:
    yield from check_colocated_memory(sized_for_engines(c), shape, facts, device_bytes(facts))
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield check_open_files(sized_for_all_phases(c), facts, open_files)
    yield from check_external_engines(c)


def preflight(config: Configuration) -> int:
    """Print every check of an accepted configuration and return the exit code.

    One rank of each node prints.
    """
    facts = LaunchFacts.from_environment(os.environ)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return ExitCode.OK
    host = f"{socket.gethostname()}: " if facts.world_size > facts.local_world_size else ""
    print(f"{host}ok    configuration: follows every rule", flush=True)
    exit_code = ExitCode.OK
    for check in check_all(config, facts):
        print(f"{host}{check}", flush=True)
        if check.refuses:
            exit_code = ExitCode.REFUSED
    return exit_code


if __name__ == "__main__":
    exit_on_interrupt()
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit(ExitCode.OK)
    if _REHEARSE in sys.argv:
        options = [argument for argument in sys.argv[1:] if argument != _REHEARSE]
        # A new process, because the rehearsal changes torch before it is imported
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "launch.rehearsal", *options]
        os.execve(sys.executable, command, environment)
    sys.exit(main(preflight, ROOT / "hydra_conf"))
