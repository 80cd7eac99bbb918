"""Engines that many runs use one after another, so that no run waits for one to load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.schema import Configuration, EngineSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.engines.quantization import engine_quantization
from megatron_rl.models.families import read_shape
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.settings import ServerPlace
from tests.lab.comparison.runner import EngineOverrides
from tests.lab.comparison.variants import ComparisonRefused, Run

_REMEDY = "or leave --shared-engines out"
# Settings that a run with external engines may not change; a shared engine has the defaults
_SERVER_SETTINGS = (
    "urls",
    "key_file",
    "count",
    "max_total_tokens",
    "extra_args",
)


def check_shareable(runs: Sequence[Run], facts: LaunchFacts) -> None:
    """Raise `ComparisonRefused` if one engine cannot serve all of the runs."""
    if facts.num_gpus:
        raise ComparisonRefused(
            f"--shared-engines: {facts.num_gpus} GPU(s) are visible, and shared engines run on "
            "CPUs only. Leave it out"
        )
    for run in runs:
        _require_default_server(run)
        _require_same_server(run, runs[0])


def _require_default_server(run: Run) -> None:
    default = EngineSettings()
    for name in _SERVER_SETTINGS:
        value = _setting(run.configuration.engine, name)
        if value != _setting(default, name):
            raise ComparisonRefused(
                f"--shared-engines: {run.directory.name} has engine.{name}={value}, and a shared "
                f"engine is started with the default. Leave that key out, {_REMEDY}"
            )


def _require_same_server(run: Run, first: Run) -> None:
    first_settings = _server_settings(first.configuration)
    for key, value in _server_settings(run.configuration).items():
        if value != first_settings[key]:
            raise ComparisonRefused(
                f"--shared-engines: {run.directory.name} has {key}={value}, and "
                f"{first.directory.name} has {first_settings[key]}. One engine cannot have both. "
                f"Compare them separately, {_REMEDY}"
            )


def _setting(settings: EngineSettings, name: str) -> Any:
    return msgspec.to_builtins(settings)[name]


def _server_settings(c: Configuration) -> dict[str, Any]:
    """The settings that a server is started with.

    Routes are recorded for each request, so that is no setting of the server.
    """
    engine = {f"engine.{name}": value for name, value in msgspec.to_builtins(c.engine).items()}
    return engine | {"model.path": c.model.path, "model.init": c.model.init}


@contextlib.contextmanager
def shared_engines(
    c: Configuration, count: int, directory: Path
) -> Iterator[list[EngineOverrides]]:
    """Start `count` engines for runs of this configuration, and stop them at the end.

    Yields the overrides that connect a run to each engine. Every run sends its weights before its
    first rollout, as it does to an engine of its own. A run that fails may leave an engine in the
    middle of that, and no other run may use it then.
    """
    # This import brings torch, which refusals need not wait for.
    from megatron_rl.engines.node.node_processes import NodeProcesses

    keys = create_keys()
    directory.mkdir(parents=True, exist_ok=True)
    processes = NodeProcesses(node=0, log_directory=directory)
    key_file = directory / "keys.json"
    try:
        _write_keys(keys, key_file)
        shape = read_shape(c.model.path)
        place = ServerPlace(
            model_path=c.model.path,
            device="cpu",
            return_routes=bool(shape.moe_layers),
            load_format="dummy" if c.model.init == "random" else None,
            quantization=engine_quantization(c.engine, shape),
        )
        places = [replace(place, seed=index) for index in range(count)]
        processes.start_engines(c.engine, places, keys)
        print(f"starting {count} engine(s) for all runs; their logs are in {directory}", flush=True)
        engines = processes.wait_healthy(c.engine.start_timeout_s)
        yield [
            (f"engine.urls=['{engine.url}']", f"engine.key_file={key_file}") for engine in engines
        ]
    finally:
        processes.stop()
        key_file.unlink(missing_ok=True)


def _write_keys(keys: RunKeys, file: Path) -> None:
    """Write a key file that only its owner can read."""
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.encode(keys))
