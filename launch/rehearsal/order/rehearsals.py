"""Rehearses the ranks that a check needs, each in a process of its own."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import msgspec

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.order.scenario import Mail, Scenario
from launch.rehearsal.order.trace import Trace
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts

_REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """The ranks of a run. layers_per_stage: 0 for all layers of the model."""

    ranks: int
    gpus_per_node: int
    layers_per_stage: int
    overrides: tuple[str, ...]


def rehearse_ranks(job: Job, folder: Path, *, processes: int, every_rank: bool) -> list[Trace]:
    """Rehearse one rank of each class, or every rank. Prints what it waits for.

    Rank 0 receives what the other stages export, so it comes after these. folder: for the traces.
    Raises `RehearsalUnavailable` if a rank cannot be rehearsed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = LaunchFacts(
        world_size=job.ranks,
        local_world_size=min(job.ranks, job.gpus_per_node),
        num_gpus=job.gpus_per_node,
    )
    c = compose(job.overrides, facts=facts)
    scenario = Scenario(facts, [*job.overrides, *_layer_overrides(c, job, folder)])
    stage_ranks = job.ranks // c.parallel.pp
    exporters = [stage * stage_ranks for stage in range(c.parallel.pp)]
    if every_rank:
        others = sorted(set(range(job.ranks)) - set(exporters))
    else:
        others = [rank + stage_ranks - 1 for rank in exporters if stage_ranks > 1]
    rehearsals = RankProcesses(scenario, folder, processes)
    rehearsals.run(exporters[1:])
    rehearsals.run([0, *others], _mail_of_rank_zero(exporters[1:], folder))
    return [_read(folder, rank) for rank in (*exporters, *others)]


def _layer_overrides(c: Configuration, job: Job, folder: Path) -> list[str]:
    """The settings of a model with fewer layers, if the job asks for it."""
    if not job.layers_per_stage:
        return []
    chunks = c.parallel.pp * (c.parallel.vpp or 1)
    path = _with_layers(Path(c.model.path), folder, job.layers_per_stage * chunks)
    return [f"model.path={path}"]


class RankProcesses:
    """Processes that rehearse ranks, some of them at the same time. folder: for their files."""

    def __init__(self, scenario: Scenario, folder: Path, limit: int) -> None:
        self._scenario = scenario
        self._folder = folder
        self._limit = limit
        self._num_ends = 0
        self._report_time = time.monotonic()

    def run(self, ranks: Sequence[int], mail_of_rank_zero: Mail | None = None) -> None:
        """Rehearse ranks. Raises `RehearsalUnavailable` if one cannot be rehearsed."""
        waiting = list(ranks)
        running: dict[int, ForkProcess] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self._limit:
                    rank = waiting.pop(0)
                    mail = (mail_of_rank_zero or {}) if rank == 0 else {}
                    files = _trace_file(self._folder, rank), _log_file(self._folder, rank)
                    running[rank] = self._scenario.start(rank, mail, *files)
                wait([process.sentinel for process in running.values()], _REPORT_SECONDS)
                self._take_ends(running)
                self._report(running, len(waiting))
        finally:
            for process in running.values():
                process.kill()

    def _take_ends(self, running: dict[int, ForkProcess]) -> None:
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                _require_success(rank, process.exitcode, self._folder)
                del running[rank]
                self._num_ends += 1

    def _report(self, running: Mapping[int, ForkProcess], num_waiting: int) -> None:
        if time.monotonic() - self._report_time < _REPORT_SECONDS:
            return
        self._report_time = time.monotonic()
        names = ", ".join(map(str, running))
        print(
            f"rehearsing rank(s) {names}; {self._num_ends} done, {num_waiting} waiting", flush=True
        )


def _require_success(rank: int, exit_code: int, folder: Path) -> None:
    if exit_code == 0:
        return
    lines = _log_file(folder, rank).read_text().strip().splitlines()
    raise RehearsalUnavailable(
        f"rank {rank} cannot be rehearsed (exit {exit_code}): {' '.join(lines[-3:])}"
    )


def _mail_of_rank_zero(senders: Sequence[int], folder: Path) -> Mail:
    """Join what the other stages send to rank 0, in the order in which it receives."""
    mail: dict[str, list[bytes]] = {}
    for sender in senders:
        for phase, messages in _read(folder, sender).mail.items():
            mail.setdefault(phase, []).extend(messages)
    return mail


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
