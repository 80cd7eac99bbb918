"""Servers that many runs use one after another, so that none of them waits for one to load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from launch.comparison.runner import Place
from launch.comparison.variants import ComparisonRefused, Run
from megatron_rl.config.schema import Configuration, EngineSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.families import read_shape
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.settings import ServerPlace

_REMEDY = "or leave --shared-engines out"
# What a run beside external engines may not set; a server started here has the default
_OF_THE_SERVER = (
    "mode",
    "urls",
    "key_file",
    "count",
    "device",
    "max_total_tokens",
    "threads",
    "extra_args",
)


def check_shareable(runs: Sequence[Run], facts: LaunchFacts) -> None:
    """Raise `ComparisonRefused` where one server cannot serve all of the runs."""
    if facts.num_gpus:
        raise ComparisonRefused(
            f"--shared-engines: {facts.num_gpus} GPU(s) are visible, and it is built for CPUs. Leave it out"
        )
    default = EngineSettings()
    for run in runs:
        for name in _OF_THE_SERVER:
            value = _key(run.configuration.engine, name)
            if value != _key(default, name):
                raise ComparisonRefused(
                    f"--shared-engines: {run.directory.name} has engine.{name}={value}, and a shared server is started "
                    f"with the default. Leave that key out, {_REMEDY}"
                )
        for key, value in _served(run.configuration).items():
            if value != (first := _served(runs[0].configuration)[key]):
                raise ComparisonRefused(
                    f"--shared-engines: {run.directory.name} has {key}={value} and {runs[0].directory.name} {first}, "
                    f"which one server cannot be both. Compare them apart, {_REMEDY}"
                )


def _key(settings: EngineSettings, name: str) -> Any:
    return msgspec.to_builtins(settings)[name]


def _served(c: Configuration) -> dict[str, Any]:
    """What a server is started with.

    It records routes for whoever asks, and takes weights rounded in any way.
    """
    engine = {
        f"engine.{name}": value
        for name, value in msgspec.to_builtins(c.engine).items()
        if name != "fake_quant"
    }
    return engine | {"model.path": c.model.path, "model.init": c.model.init}


@contextlib.contextmanager
def shared_engines(c: Configuration, count: int, directory: Path) -> Iterator[list[Place]]:
    """`count` servers for runs of this configuration, each with overrides that lead a run to it;
    ended with the block.

    Every run sends its own weights before its first rollout, as to an engine that it started. A run
    that fails may leave a server in the middle of that: no other run may use it then.
    """
    from megatron_rl.engines.node_processes import (
        NodeProcesses,  # brings torch, which refusals need not wait for
    )

    keys = create_keys()
    directory.mkdir(parents=True, exist_ok=True)
    services = NodeProcesses(node=0, log_directory=directory)
    key_file = directory / "keys.json"
    try:
        _write_keys(keys, key_file)
        place = ServerPlace(
            model_path=c.model.path,
            device="cpu",
            return_routes=bool(read_shape(c.model.path).moe_layers),
            load_format="dummy" if c.model.init == "random" else None,
        )
        services.start_engines(
            c.engine, [replace(place, seed=index) for index in range(count)], keys
        )
        print(f"starting {count} engine(s) for all runs; their logs are in {directory}", flush=True)
        engines = services.wait_healthy(c.engine.start_timeout_s)
        yield [
            ("engine.mode=external", f"engine.urls=['{engine.url}']", f"engine.key_file={key_file}")
            for engine in engines
        ]
    finally:
        services.stop()
        key_file.unlink(missing_ok=True)


def _write_keys(keys: RunKeys, file: Path) -> None:
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(msgspec.json.encode(keys))
