"""A comparison whose runs are replaced by directories that they would leave."""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from tests.lab.comparison.__main__ import main
from tests.support.comparisons import Launcher

# Values that no rule compares with others. The seed of the data follows that of the run.
_OWN_VALUES = ("seed", "run.root", "run.name", "run.on_existing")

_MAX_CHARACTERS = 100  # a rule refuses longer names of runs


@cache
def composed(overrides: tuple[str, ...], facts: LaunchFacts | None) -> Configuration:
    return compose(overrides, facts=facts)


def compose_once(overrides: Sequence[str], *, facts: LaunchFacts | None = None) -> Configuration:
    """Compose as `compose`, but once for all runs that differ in `_OWN_VALUES` alone."""
    if any(len(o) > _MAX_CHARACTERS for o in overrides if o.startswith("run.name=")):
        return compose(overrides, facts=facts)
    pairs = [override.partition("=") for override in overrides]
    values = {key: value for key, _, value in pairs if key in _OWN_VALUES}
    others = tuple("".join(pair) for pair in pairs if pair[0] not in _OWN_VALUES)
    base = composed(others, facts)
    seed = int(values.pop("seed", base.seed))
    run_values = {key.removeprefix("run."): value for key, value in values.items()}
    data = replace(base.data, seed=seed) if base.data.seed == base.seed else base.data
    return replace(base, seed=seed, data=data, run=replace(base.run, **run_values))


@pytest.fixture(autouse=True)
def composition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the composition of planned and of written runs by `compose_once`."""
    monkeypatch.setattr("tests.lab.comparison.variants.compose", compose_once)
    monkeypatch.setattr("tests.support.past_runs.compose", compose_once)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Replaces the start of processes in the runner."""
    fake = Launcher()
    module = SimpleNamespace(Popen=fake, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("tests.lab.comparison.runner.subprocess", module)
    return fake


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with the output directory `out`."""
    monkeypatch.delenv("NPROC", raising=False)

    def run(*arguments: str) -> int:
        return main(["--out", str(tmp_path / "out"), *arguments])

    return run
