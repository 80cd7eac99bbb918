"""Trackers: Prometheus over a real socket, W&B through a stand-in module, and failures."""

import contextlib
import math
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.features.trackers import trackers as module
from megatron_rl.run.features.trackers.trackers import (
    PrometheusTracker,
    Trackers,
    open_trackers,
    prometheus_name,
    trackers_of,
)


class WandbRun:
    """Records the calls of a run of Weights & Biases."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        if math.isnan(values.get("fails", 0.0)):
            raise ConnectionError("no route\nto host")
        self.calls.append(values)

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Install a module wandb that records. Returns the arguments of `init` and the run."""
    module = ModuleType("wandb")
    record: dict[str, Any] = {"run": WandbRun()}

    def init(**arguments: Any) -> WandbRun:
        record["init"] = arguments
        run: WandbRun = record["run"]
        return run

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return record


def read(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        return str(response.read().decode())


def test_prometheus_reads_the_latest_finite_values() -> None:
    tracker = PrometheusTracker("127.0.0.1", 0, "my_run")
    try:
        assert "megatron_rl" not in read(tracker.port)
        tracker.write(1, {"train/grad_norm": 0.5, "eval/accuracy": 0.25})
        tracker.write(2, {"train/grad_norm": 1.5, "policy/kl": math.nan})
        text = read(tracker.port)
    finally:
        tracker.close()
    assert 'megatron_rl_train_grad_norm{metric="train/grad_norm",run="my_run"} 1.5' in text
    accuracy = 'megatron_rl_eval_accuracy{metric="eval/accuracy",run="my_run"} 0.25'
    assert accuracy in text, "of the step before"
    assert 'megatron_rl_step{metric="step",run="my_run"} 2.0' in text
    assert "policy_kl" not in text


def test_metrics_whose_names_differ_only_in_other_characters_are_told_apart() -> None:
    """Metrics that share a name of Prometheus have their values under labels of their own."""
    tracker = PrometheusTracker("127.0.0.1", 0, "r")
    try:
        tracker.write(1, {"eval/a-b/accuracy": 0.25, "eval/a_b/accuracy": 0.75})
        text = read(tracker.port)
    finally:
        tracker.close()
    name = "megatron_rl_eval_a_b_accuracy"
    assert f'{name}{{metric="eval/a-b/accuracy",run="r"}} 0.25' in text
    assert f'{name}{{metric="eval/a_b/accuracy",run="r"}} 0.75' in text
    assert text.count(f"# TYPE {name} gauge") == 1


def test_names_of_metrics_become_names_of_prometheus() -> None:
    assert prometheus_name("eval/sums/pass@4") == "megatron_rl_eval_sums_pass_4"


@pytest.mark.parametrize("host", ["", "127.0.0.1:", "[127.0.0.1]:"])
def test_a_port_that_is_taken_is_a_warning(host: str) -> None:
    tracker = PrometheusTracker("127.0.0.1", 0, "first")
    lines: list[str] = []
    try:
        settings = LoggerSettings(prometheus=f"{host}{tracker.port}")
        trackers = trackers_of(settings, Path("second"), lines.append)
        trackers.write(1, {"a": 1.0})
        trackers.close()
    finally:
        tracker.close()
    (line,) = lines
    assert line.startswith(f"warning: logger.prometheus={host}{tracker.port}: OSError")
    assert "Address already in use on 127.0.0.1. Choose a free port" in line
    assert line.endswith("The run continues without it")


def test_wandb_gets_settings_steps_and_values(tmp_path: Path, wandb: dict[str, Any]) -> None:
    directory = RunDirectory(tmp_path / "my_run")
    directory.path.mkdir()
    (directory.path / "config.yaml").write_text("optimizer: {lr: 0.5}\nkey: ${oc.env:SECRET}\n")
    settings = LoggerSettings(tensorboard=False, wandb="project")
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(MetricsLog(directory))
        setup = SimpleNamespace(
            configuration=SimpleNamespace(logger=settings),
            directory=directory,
            progress=SimpleNamespace(log=print),
        )
        parts: Any = SimpleNamespace(
            setup=setup,
            configuration=setup.configuration,
            metrics=metrics,
            enter=stack.enter_context,
        )
        assert open_trackers(parts) is not None
        metrics.write(3, {"reward/mean": 0.5, "moe/layer_00/expert_share/0": 0.1})
    arguments = wandb["init"]
    assert (arguments["project"], arguments["name"]) == ("project", "my_run")
    assert arguments["resume"] == "allow" and len(arguments["id"]) == 16
    assert arguments["settings"] == {"login_timeout": 60}
    assert arguments["config"] == {"optimizer": {"lr": 0.5}, "key": "${oc.env:SECRET}"}
    calls = wandb["run"].calls
    assert calls[:2] == [("step", None), ("*", "step")]
    assert calls[2]["step"] == 3 and calls[2]["reward/mean"] == 0.5
    assert calls[-1] == "finish"


def test_a_resumed_run_continues_the_same_run_of_wandb(
    tmp_path: Path, wandb: dict[str, Any]
) -> None:
    identities = []
    for name in ("first", "first", "second"):
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        (directory / "config.yaml").write_text("{}")
        trackers_of(LoggerSettings(wandb="project"), directory, print).close()
        identities.append(wandb["init"]["id"])
    assert identities[0] == identities[1] != identities[2]


def lines_of_an_end(
    directory: Path,
    wandb: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    finish: Callable[[], object],
    *,
    max_seconds: float,
    on_line: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[str]]:
    """End a run whose tracker ends with `finish`. Returns the lines of the wait, and warnings.

    max_seconds: of the wait. on_line: called after each line.
    """

    class Run(WandbRun):
        def finish(self) -> None:
            finish()

    wandb["run"] = Run()
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(module, "_FINISH_SECONDS", max_seconds)
    (directory / "config.yaml").write_text("{}")
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        on_line()

    trackers = trackers_of(LoggerSettings(wandb="project"), directory, log)
    start = time.monotonic()
    trackers.close()
    assert time.monotonic() - start < 20
    waiting = [line for line in lines if "sending the last metrics to Weights & Biases" in line]
    warnings = [line for line in lines if line.startswith("warning: logger.wandb: ")]
    assert len(waiting) + len(warnings) == len(lines)
    return waiting, warnings


def test_the_end_of_a_run_waits_for_wandb(
    tmp_path: Path, wandb: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    waiting, warnings = lines_of_an_end(
        tmp_path,
        wandb,
        monkeypatch,
        lambda: release.wait(60),
        max_seconds=30.0,
        on_line=release.set,
    )
    assert re.search(r" \d+ s so far$", waiting[0]) and warnings == []


def test_the_end_of_a_run_waits_for_wandb_only_for_a_while(
    tmp_path: Path, wandb: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    waiting, (warning,) = lines_of_an_end(
        tmp_path, wandb, monkeypatch, lambda: release.wait(60), max_seconds=1.0
    )
    release.set()
    assert waiting and "not sent within 1 s" in warning and "wandb sync" in warning


def test_the_end_of_a_run_says_why_wandb_has_failed(
    tmp_path: Path, wandb: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConnectionError("no route")

    waiting, warnings = lines_of_an_end(tmp_path, wandb, monkeypatch, fail, max_seconds=1.0)
    assert waiting == [] and "ConnectionError: no route" in warnings[0]


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Failing:
        name = "logger.wandb"

        def write(self, step: int, values: dict[str, float]) -> None:
            raise ConnectionError("no route\nto host")

        def close(self) -> None:
            raise AssertionError("it is not used any more")

    steps: list[int] = []

    class Working:
        name = "working"

        def write(self, step: int, values: dict[str, float]) -> None:
            steps.append(step)

        def close(self) -> None: ...

    lines: list[str] = []
    trackers = Trackers({"logger.wandb": Failing, "working": Working}, lines.append)
    for step in (1, 2):
        trackers.write(step, {"a": 1.0})
    trackers.close()
    assert steps == [1, 2]
    assert lines == [
        "warning: logger.wandb: ConnectionError: no route to host. The run continues without it"
    ]
