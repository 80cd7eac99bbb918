"""Rehearses the ranks that a check needs, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.order.trace import Trace
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts

_REPORT_SECONDS = 10.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Job:
    """The ranks of a run. layers_per_stage: 0 for those of the model."""

    ranks: int
    gpus_per_node: int
    layers_per_stage: int
    overrides: tuple[str, ...]


def rehearse_ranks(job: Job, folder: Path, *, processes: int, every_rank: bool) -> list[Trace]:
    """Rehearse one rank of each class, or every rank. Prints what it waits for.

    Rank 0 comes last, because it receives what the other stages export. folder: for the traces.
    Raises `RehearsalUnavailable` if a rank cannot be rehearsed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = LaunchFacts(
        world_size=job.ranks,
        local_world_size=min(job.ranks, job.gpus_per_node),
        num_gpus=job.gpus_per_node,
    )
    c = compose(job.overrides, facts=facts)
    overrides = [*job.overrides, *_layer_overrides(c, job, folder)]
    stage_ranks = job.ranks // c.parallel.pp
    exporters = [stage * stage_ranks for stage in range(c.parallel.pp)]
    if every_rank:
        others = sorted(set(range(job.ranks)) - set(exporters))
    else:
        others = [rank + stage_ranks - 1 for rank in exporters if stage_ranks > 1]
    _run([*exporters[1:], *others], job, overrides, folder, processes)
    _write_mail(exporters[1:], folder)
    _run([0], job, overrides, folder, 1)
    return [_read(folder, rank) for rank in (*exporters, *others)]


def _layer_overrides(c: Configuration, job: Job, folder: Path) -> list[str]:
    """The settings of a model with fewer layers, if the job asks for it."""
    if not job.layers_per_stage:
        return []
    chunks = c.parallel.pp * (c.parallel.vpp or 1)
    path = _with_layers(Path(c.model.path), folder, job.layers_per_stage * chunks)
    no_splits = ("parallel.first_stage_layers=null", "parallel.last_stage_layers=null")
    return [f"model.path={path}", *no_splits]


def _run(
    ranks: Sequence[int], job: Job, overrides: Sequence[str], folder: Path, processes: int
) -> None:
    waiting = list(ranks)
    running: dict[int, subprocess.Popen[str]] = {}
    count = len(waiting)
    report_time = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                rank = waiting.pop(0)
                running[rank] = _start(rank, job, overrides, folder)
            for rank, process in list(running.items()):
                if process.poll() is not None:
                    del running[rank]
                    _require_success(rank, process.returncode, folder)
            if time.monotonic() - report_time > _REPORT_SECONDS:
                report_time = time.monotonic()
                num_ends = count - len(waiting) - len(running)
                names = ", ".join(map(str, running))
                print(f"rehearsing rank(s) {names}; {num_ends} of {count} done", flush=True)
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.kill()


def _start(rank: int, job: Job, overrides: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    mail = folder / "mail.bin" if rank == 0 else "-"
    arguments = [rank, job.ranks, job.gpus_per_node, mail, _trace_file(folder, rank), *overrides]
    return subprocess.Popen(
        [sys.executable, "-m", "launch.rehearsal.order.scenario", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=_log_file(folder, rank).open("w"),
        text=True,
    )


def _require_success(rank: int, exit_code: int, folder: Path) -> None:
    if exit_code == 0:
        return
    lines = _log_file(folder, rank).read_text().strip().splitlines()
    raise RehearsalUnavailable(
        f"rank {rank} cannot be rehearsed (exit {exit_code}): {' '.join(lines[-3:])}"
    )


def _write_mail(senders: Sequence[int], folder: Path) -> None:
    """Join what the other stages send to rank 0, in the order in which it receives."""
    mail: dict[str, list[bytes]] = {}
    for sender in senders:
        for phase, messages in _read(folder, sender).mail.items():
            mail.setdefault(phase, []).extend(messages)
    (folder / "mail.bin").write_bytes(msgspec.msgpack.encode(mail))


def _trace_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.trace"


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _read(folder: Path, rank: int) -> Trace:
    return msgspec.msgpack.decode(_trace_file(folder, rank).read_bytes(), type=Trace)


def _with_layers(model: Path, folder: Path, num_layers: int) -> Path:
    """Copy a model's configuration and tokenizer, with another number of layers."""
    target = folder / "model"
    target.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    (target / "config.json").write_text(json.dumps(config))
    return target
