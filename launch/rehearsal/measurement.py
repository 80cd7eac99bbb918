"""Measures what a changed command needs, from rehearsals in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from megatron_rl.config.schema import Configuration
from megatron_rl.models.shape import ModelShape

# Layers of each chunk of a stage in the two rehearsals that stand for a deeper model.
SHALLOW_LAYERS = (2, 4)
_REPORT_SECONDS = 10.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Measurement:
    """Memory and work of a rank.

    memory: bytes by phase. work: operations of matrix products for each row of an update.
    """

    memory: dict[str, float]
    work: float

    @property
    def peak(self) -> float:
        """Bytes in the phase that needs most."""
        return max(self.memory.values())

    @classmethod
    def of(cls, report: dict[str, Any]) -> Measurement:
        """The numbers of a report that the command wrote."""
        rows = report["micro_batches"] * report["tokens"]
        return cls(
            memory={phase: sum(kinds.values()) for phase, kinds in report["memory"].items()},
            work=report["flops"].get("update", 0) / rows,
        )

    def extend(self, deeper: Measurement, factor: float) -> Measurement:
        """Continue the line through this measurement and a deeper model's.

        factor: the distance, as a multiple of that between both.
        """
        memory = {
            phase: size + factor * (deeper.memory[phase] - size)
            for phase, size in self.memory.items()
        }
        return Measurement(memory, self.work + factor * (deeper.work - self.work))


def measure(arguments: Sequence[str], c: Configuration, shape: ModelShape) -> Measurement:
    """Rehearse a command. A deep model of equal layers is continued from two shallow ones.

    arguments: of the command. c: its configuration.
    Raises `RehearsalUnavailable` with the reason if it cannot be rehearsed.
    """
    with tempfile.TemporaryDirectory() as folder:
        if not has_equal_stages(c, shape):
            return Measurement.of(_rehearse([arguments], Path(folder))[0])
        chunks = c.parallel.pp * (c.parallel.vpp or 1)
        commands = []
        for layers in SHALLOW_LAYERS:
            model = copy_model(Path(c.model.path), Path(folder), layers * chunks)
            commands.append([*arguments, f"model.path={model}", "model.init=random"])
        first, second = map(Measurement.of, _rehearse(commands, Path(folder)))
        shallow, deep = SHALLOW_LAYERS
        return first.extend(second, (shape.num_layers / chunks - shallow) / (deep - shallow))


def has_equal_stages(c: Configuration, shape: ModelShape) -> bool:
    """True if memory and work grow by the same amount with each layer of a stage."""
    p = c.parallel
    per_chunk, rest = divmod(shape.num_layers, p.pp * (p.vpp or 1))
    has_one_kind = len(shape.moe_layers) in (0, shape.num_layers)
    return has_one_kind and not rest and per_chunk > max(SHALLOW_LAYERS)


def copy_model(model: Path, folder: Path, num_layers: int) -> Path:
    """Copy a model's configuration and tokenizer, with another number of layers."""
    target = folder / f"layers-{num_layers}"
    target.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (target / "config.json").write_text(json.dumps(config))
    return target


def _rehearse(commands: Sequence[Sequence[str]], folder: Path) -> list[dict[str, Any]]:
    """Run commands at the same time, and return their reports. Prints how long it waits."""
    jobs = []
    for index, arguments in enumerate(commands):
        with (folder / f"{index}.log").open("w") as log:
            options = (f"out={folder / f'{index}.json'}", "remedies=false")
            command = [sys.executable, "-m", "launch.rehearsal", *arguments, *options]
            job = subprocess.Popen(command, env=os.environ, stdout=subprocess.DEVNULL, stderr=log)
        jobs.append(job)
    try:
        _wait(jobs)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    return [_read(folder / f"{index}.json") for index in range(len(jobs))]


def _wait(jobs: Sequence[subprocess.Popen[bytes]]) -> None:
    start = report_time = time.monotonic()
    while any(job.poll() is None for job in jobs):
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - report_time > _REPORT_SECONDS:
            report_time = time.monotonic()
            print(f"rehearsing a change for {report_time - start:.0f} s", flush=True)


def _read(file: Path) -> dict[str, Any]:
    """Read a report. Raises `RehearsalUnavailable` with the last line of the log if there is none.

    A rank that does not fit has a report, too.
    """
    if file.exists():
        report: dict[str, Any] = json.loads(file.read_text())
        return report
    lines = file.with_suffix(".log").read_text().splitlines()
    raise RehearsalUnavailable(lines[-1] if lines else "the rehearsal ended without a reason")
