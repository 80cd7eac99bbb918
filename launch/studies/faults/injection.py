"""Faults that befall a run, and what is left of it: shared by the tests in tests/chaos and the
table they print.
"""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.testbed.jobs import ROOT, family, named, start_job, survivors, wait_for_step
from megatron_rl.contracts.exit_codes import ExitCode

MOST_SECONDS = 15.0
_SHARED_MEMORY = Path("/dev/shm")
_OF_TORCHRUN = re.compile(
    r"^\[?[WEI]\d{4} |^=+$|^\s*$"
)  # its own log lines, which it may print before ours


@dataclass
class Scene:
    """A run that a fault strikes: `directory` is its run.root, `job` its launcher."""

    directory: Path
    job: subprocess.Popen[str]
    processes: list[psutil.Process] = field(default_factory=list)
    shared_memory: set[Path] = field(default_factory=set)

    def of(self, part: str) -> list[psutil.Process]:
        """Its processes whose command line holds `part`, without supervisors."""
        found = named(self.processes, part)
        return [p for p in found if p not in named(found, "sglang_bridge.server.supervise")]

    def rank(self, number: int) -> psutil.Process:
        return next(
            p for p in self.of("launch/train_rl.py") if p.environ().get("RANK") == str(number)
        )


Prepare = Callable[[Path, contextlib.ExitStack], list[str]]


def _nothing(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    return []


@dataclass(frozen=True)
class Fault:
    """What happens to a run with two ranks.

    strike: None for what is wrong from the start. prepare: makes the place of the run, and gives
    overrides. says: a pattern of the first line. code: in exit.json; None where nothing was begun,
    and no run could leave one. recovers: it strikes while the engine starts, and the run completes.
    """

    name: str
    says: str
    code: int | None
    strike: Callable[[Scene], None] | None = None
    prepare: Prepare = _nothing
    recovers: bool = False
    steps: int = 500


@dataclass(frozen=True)
class Outcome:
    """seconds: from the fault to the end of the launcher and of all ranks. code: of exit.json.
    root_cause: the code that torchrun names. left, shared_memory: what outlives them, of processes
    and of files in /dev/shm.
    """

    seconds: float
    code: int | None
    launcher: int
    root_cause: int | None
    first_line: str
    errors: str
    left: list[str]
    shared_memory: list[str]


def suffer(fault: Fault, directory: Path) -> Outcome:
    """Start a run with two ranks, let the fault strike after its first step, and wait for the end."""
    directory.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        root = directory / "runs"
        root.mkdir()
        overrides = fault.prepare(root, stack)
        errors = directory / "errors.txt"
        overrides = [f"train.total_steps={fault.steps}", "parallel=ep2", *overrides]
        scene = Scene(root, start_job(root, *overrides, ranks=2, errors=errors))
        start = time.monotonic()
        if fault.strike is not None:
            if not fault.recovers:
                wait_for_step(root / "job", 1, scene.job)
            scene.processes = family(scene.job)
            scene.shared_memory = _shared_memory_of(scene.processes)
            start = time.monotonic()
            fault.strike(scene)
        known = {process.pid: process for process in scene.processes}
        mapped = scene.shared_memory
        while (
            scene.job.poll() is None
        ):  # of runs that are never struck, or that recover, processes come later
            with contextlib.suppress(psutil.Error):
                known |= {process.pid: process for process in family(scene.job)}
            mapped |= _shared_memory_of(known.values())
            time.sleep(0.1)
        ranks = [process for process in known.values() if process.pid != scene.job.pid]
        survivors([p for p in ranks if "supervise" not in " ".join(_command(p))], MOST_SECONDS)
        seconds = time.monotonic() - start
        scene.job.communicate()
        left = survivors(list(known.values()), 5.0)
        _end(known.values())
        return Outcome(
            seconds=seconds,
            code=_code(root / "job" / "exit.json"),
            launcher=scene.job.returncode,
            root_cause=_root_cause(errors.read_text()),
            first_line=next(
                (line for line in errors.read_text().splitlines() if not _OF_TORCHRUN.match(line)),
                "",
            ),
            errors=errors.read_text(),
            left=left,
            shared_memory=sorted(path.name for path in mapped if path.exists()),
        )


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in /dev/shm that processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if f" {_SHARED_MEMORY}/" in line and not line.endswith("(deleted)"):
                    found.add(_SHARED_MEMORY / line.rpartition(f"{_SHARED_MEMORY}/")[2])
    return found


def _code(file: Path) -> int | None:
    return int(json.loads(file.read_text())["code"]) if file.exists() else None


def _root_cause(errors: str) -> int | None:
    found = re.search(r"Root Cause.*?exitcode\s*:\s*(-?\d+)", errors, re.DOTALL)
    return int(found.group(1)) if found else None


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _signal_launcher(number: signal.Signals) -> Callable[[Scene], None]:
    return lambda scene: scene.job.send_signal(number)


def _signal(
    number: signal.Signals, choose: Callable[[Scene], list[psutil.Process]]
) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        chosen = choose(scene)
        assert chosen, "there is no such process"
        for process in chosen:
            process.send_signal(number)

    return strike


def _engine(scene: Scene) -> list[psutil.Process]:
    return scene.of("sglang::scheduler")


def _engine_supervisor(scene: Scene) -> list[psutil.Process]:
    supervisors = named(scene.processes, "sglang_bridge.server.supervise")
    return [p for p in supervisors if p not in named(supervisors, "megatron_rl.rollouts")]


def _collector(scene: Scene) -> list[psutil.Process]:
    return scene.of("megatron_rl.rollouts")


def _small_disk(size: str) -> Prepare:
    def prepare(directory: Path, stack: contextlib.ExitStack) -> list[str]:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=True
        )
        stack.callback(subprocess.run, ["umount", "--lazy", str(directory)], check=False)
        return []

    return prepare


def _fill_disk(scene: Scene) -> None:
    _fill(scene.directory)


def _fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _read_only(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    _small_disk("64m")(directory, stack)
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    return []


def _no_space(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    _small_disk("8m")(directory, stack)
    return ["run.save_weights=true"]


def _steal_port(scene: Scene) -> None:
    """Listen where the engine will, before it does: it takes seconds to come so far."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in named(family(scene.job), "sglang.launch_server"):
            if port := re.search(r"--port[= ](\d+)", " ".join(_command(process))):
                thief = socket.socket()
                thief.bind(("127.0.0.1", int(port.group(1))))
                thief.listen()
                return
        time.sleep(0.05)
    raise AssertionError("no engine was started")


def _nan_weights(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    from safetensors.torch import load_file, save_file

    source = ROOT / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition"
    model = directory.parent / "model"
    shutil.copytree(source, model)
    weights = load_file(model / "model.safetensors")
    next(t for name, t in sorted(weights.items()) if "input_layernorm" in name)[:] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return [f"model.path={model}"]


_KILL, _STOP = signal.SIGKILL, signal.SIGSTOP
FAULTS = [
    Fault("Ctrl-C", "the run was stopped .SIGINT", 130, _signal_launcher(signal.SIGINT)),
    Fault("SIGTERM", "the run was stopped .SIGTERM", 143, _signal_launcher(signal.SIGTERM)),
    Fault("SIGHUP", "the run was stopped .SIGHUP", 129, _signal_launcher(signal.SIGHUP)),
    Fault(
        "SIGKILL engine",
        "engine .* ended by itself",
        ExitCode.ENGINE_FAILED,
        _signal(_KILL, _engine),
    ),
    Fault(
        "SIGKILL engine's supervisor",
        "engine .* ended",
        ExitCode.ENGINE_FAILED,
        _signal(_KILL, _engine_supervisor),
    ),
    Fault(
        "SIGKILL collector",
        "the collector of node 0 ended",
        ExitCode.ENGINE_FAILED,
        _signal(_KILL, _collector),
    ),
    Fault(
        "SIGKILL rank 0",
        "rank 0 .* without a report",
        ExitCode.PEER_FAILED,
        _signal(_KILL, lambda s: [s.rank(0)]),
    ),
    Fault(
        "SIGKILL rank 1",
        "rank 1 .* without a report",
        ExitCode.PEER_FAILED,
        _signal(_KILL, lambda s: [s.rank(1)]),
    ),
    Fault(
        "SIGKILL torchrun", "torchrun .* was killed", ExitCode.TERMINATED, _signal_launcher(_KILL)
    ),
    Fault(
        "SIGSTOP engine",
        r"engine .* was stopped \(SIGSTOP",
        ExitCode.ENGINE_FAILED,
        _signal(_STOP, _engine),
    ),
    Fault(
        "SIGSTOP collector",
        "the collector of .* was stopped",
        ExitCode.ENGINE_FAILED,
        _signal(_STOP, _collector),
    ),
    Fault(
        "full disk during the run",
        r".*metrics\.jsonl cannot be written: the disk is full",
        ExitCode.CANNOT_WRITE,
        _fill_disk,
        _small_disk("48m"),
    ),
    Fault("full disk before the run", "run.root=.*MiB of free space", None, None, _no_space),
    Fault("read-only run.root", "run.root=.* is not writable", None, None, _read_only),
    Fault("stolen port", "", ExitCode.OK, _steal_port, recovers=True, steps=2),
    Fault(
        "NaN weights",
        "model.path=.*tensor .*input_layernorm.* holds NaN",
        ExitCode.BAD_DATA,
        None,
        _nan_weights,
    ),
]


def by_name(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)
