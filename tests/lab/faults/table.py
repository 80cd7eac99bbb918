"""All faults that end a run, with the way to inject each."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_rl.contracts.exit_codes import ExitCode
from tests.lab.faults.injection import Fault, Prepare, Scene
from tests.support.jobs import ROOT, command_line, process_tree, processes_named


def signal_launcher(number: signal.Signals) -> Callable[[Scene], None]:
    """Send a signal to torchrun."""
    return lambda scene: scene.job.send_signal(number)


def signal_processes(
    number: signal.Signals, choose: Callable[[Scene], list[psutil.Process]]
) -> Callable[[Scene], None]:
    """Send a signal to chosen processes. There must be one at least."""

    def strike(scene: Scene) -> None:
        processes = choose(scene)
        assert processes, "there is no such process"
        for process in processes:
            process.send_signal(number)

    return strike


def find_engine(scene: Scene) -> list[psutil.Process]:
    """The scheduler of the engine."""
    return scene.find("sglang::scheduler")


def find_engine_processes(scene: Scene) -> list[psutil.Process]:
    """All processes of the engine: its server, scheduler and detokenizer."""
    return scene.find("sglang")


def find_engine_supervisor(scene: Scene) -> list[psutil.Process]:
    """The supervisor of the engine, not the collector's."""
    supervisors = processes_named(scene.processes, "sglang_bridge.server.supervise")
    collectors = processes_named(supervisors, "megatron_rl.rollouts.collector")
    return [p for p in supervisors if p not in collectors]


def find_collector(scene: Scene) -> list[psutil.Process]:
    """The collector."""
    return scene.find("megatron_rl.rollouts.collector")


def small_disk(size: str) -> Prepare:
    """Mount a small disk at run.root."""

    def prepare(directory: Path, stack: contextlib.ExitStack) -> list[str]:
        options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
        subprocess.run(["mount", *options, str(directory)], check=True)
        stack.callback(subprocess.run, ["umount", "--lazy", str(directory)], check=False)
        return []

    return prepare


def fill_disk(scene: Scene) -> None:
    """Write until the disk of run.root is full."""
    file = scene.directory / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


def read_only_root(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    """Mount a read-only disk at run.root."""
    small_disk("64m")(directory, stack)
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
    return []


def disk_without_space(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    """Mount a disk at run.root that is too small for the weights."""
    small_disk("8m")(directory, stack)
    return ["run.save_weights=true"]


def steal_port(scene: Scene) -> None:
    """Listen at the engine's port before the engine does, which takes it seconds."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in processes_named(process_tree(scene.job), "sglang.launch_server"):
            port = re.search(r"--port[= ](\d+)", command_line(process))
            if port:
                listener = socket.socket()
                listener.bind(("127.0.0.1", int(port.group(1))))
                listener.listen()
                return
        time.sleep(0.05)
    raise AssertionError("no engine was started")


def model_with_nan(directory: Path, stack: contextlib.ExitStack) -> list[str]:
    """Write a start checkpoint with NaN in one tensor."""
    from safetensors.torch import load_file, save_file

    source = ROOT / "megatron_rl/models/assets/qwen3_moe_tiny_two_digit_addition"
    model = directory.parent / "model"
    shutil.copytree(source, model)
    weights = load_file(model / "model.safetensors")
    names = [name for name in sorted(weights) if "input_layernorm" in name]
    weights[names[0]][:] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return [f"model.path={model}"]


_KILL = signal.SIGKILL
_STOP = signal.SIGSTOP
FAULTS = [
    Fault("Ctrl-C", r"the run was stopped \(SIGINT", 130, signal_launcher(signal.SIGINT)),
    Fault("SIGTERM", r"the run was stopped \(SIGTERM", 143, signal_launcher(signal.SIGTERM)),
    Fault("SIGHUP", r"the run was stopped \(SIGHUP", 129, signal_launcher(signal.SIGHUP)),
    Fault(
        "SIGKILL rank 0",
        "rank 0 .* without a report",
        ExitCode.PEER_FAILED,
        signal_processes(_KILL, lambda scene: [scene.rank(0)]),
    ),
    Fault(
        "SIGKILL rank 1",
        "rank 1 .* without a report",
        ExitCode.PEER_FAILED,
        signal_processes(_KILL, lambda scene: [scene.rank(1)]),
    ),
    Fault(
        "SIGKILL torchrun", "torchrun .* was killed", ExitCode.TERMINATED, signal_launcher(_KILL)
    ),
    Fault(
        "SIGSTOP rank 0",
        r"rank 0 of the training was stopped \(SIGSTOP\) .* process \d+",
        ExitCode.PEER_FAILED,
        signal_processes(_STOP, lambda scene: [scene.rank(0)]),
    ),
    Fault(
        "SIGSTOP rank 1",
        r"rank 1 of the training was stopped \(SIGSTOP\) .* process \d+",
        ExitCode.PEER_FAILED,
        signal_processes(_STOP, lambda scene: [scene.rank(1)]),
    ),
    Fault(
        "full disk during the run",
        r".*metrics\.jsonl cannot be written: the disk is full",
        ExitCode.CANNOT_WRITE,
        fill_disk,
        small_disk("48m"),
    ),
    Fault(
        "full disk before the run",
        "run.root=.*MiB are free",
        None,
        prepare=disk_without_space,
    ),
    Fault(
        "read-only run.root",
        "run.root=.* is not writable",
        None,
        prepare=read_only_root,
    ),
    Fault("stolen port", "", ExitCode.OK, steal_port, recovers=True, steps=2),
    Fault(
        "NaN weights",
        "model.path=.*tensor .*input_layernorm.* holds NaN",
        ExitCode.BAD_DATA,
        prepare=model_with_nan,
    ),
]


def fault_named(name: str) -> Fault:
    """The fault with a name."""
    return next(fault for fault in FAULTS if fault.name == name)
