"""Nodes on this machine: each has a collector in a process of its own, and a real engine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from megatron_rl.config.schema import (
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import RUN_KEY_VARIABLE, Configure
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.support.engines import running_engine

ROOT = Path(__file__).parents[2]
COLLECTOR = "megatron_rl.rollouts.collector"


@contextlib.contextmanager
def collector_processes(
    hub: CollectorHub, count: int, *, module: str = COLLECTOR
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the collectors of nodes 0 to `count` - 1, connected to a hub, and kill them at the end.

    module: the main module, for one that changes something first.
    """
    host, port = hub.address
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        for node in range(count):
            process = subprocess.Popen(
                [sys.executable, "-m", module, host, str(port), str(node), "0"],
                env=os.environ | {RUN_KEY_VARIABLE: hub.run_key},
                cwd=ROOT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        hub.wait_for(count, 60)
        yield processes


@contextlib.contextmanager
def engine_of_each_node(
    count: int,
    model_path: Path,
    logs: Path,
    keys: RunKeys,
    *,
    max_running_requests: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
    has_core: bool = False,
) -> Iterator[list[ManagedEngine]]:
    """Start one engine for each node. has_core: each runs on one core, another one for each."""
    with contextlib.ExitStack() as stack:
        engines = []
        for node in range(count):
            folder = logs / f"engine-{node}"
            folder.mkdir()
            engine = running_engine(
                model_path,
                folder,
                max_running_requests=max_running_requests,
                dtype=dtype,
                keys=keys,
            )
            with _on_core(node) if has_core else contextlib.nullcontext():
                engines.append(stack.enter_context(engine))
        yield engines


@contextlib.contextmanager
def _on_core(number: int) -> Iterator[None]:
    """Run this process on one core alone, which processes that it starts meanwhile inherit."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def on_nodes(engines: Sequence[ManagedEngine]) -> list[Engine]:
    """Return the engines as those of node 0, 1 and so on."""
    return [
        msgspec.structs.replace(engine.engine, node=node) for node, engine in enumerate(engines)
    ]


def configuration_for(
    model_path: Path, keys: RunKeys, rollout: RolloutSettings, *, max_running_requests: int
) -> Configure:
    """Return the configuration of a collector whose engines serve a model."""
    shape = read_shape(model_path)
    return Configure(
        api_key=keys.api_key,
        model_path=str(model_path),
        routes=shape.route_shape,
        engine=EngineSettings(max_running_requests=max_running_requests),
        rollout=rollout,
        reward=RewardSettings(),
        environment=EnvironmentSettings(),
        vocab_size=shape.vocab_size,
    )


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started, as a node that dies does."""
    process = psutil.Process(pid)
    processes = [process, *process.children(recursive=True)]
    for member in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
