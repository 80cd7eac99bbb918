"""Sends metrics to services outside of the run: Weights & Biases and Prometheus.

A service that fails costs its metrics, not the run.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from omegaconf import OmegaConf

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records.heat_maps import is_expert_share
from megatron_rl.records.reminder import FIRST_SECONDS, growing_intervals
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts

# The default: metrics are readable on this machine alone.
_LOCAL_HOST = "127.0.0.1"
_LOGIN_SECONDS = 60
_FINISH_SECONDS = 60.0
_INVALID_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]")


class Tracker(Protocol):
    """Receives the metrics of each step. Its methods may raise anything."""

    name: str

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """A run of Weights & Biases, which a resumed run continues.

    project: its project. directory: of the run; its name is the name of the run there.
    log: writes a line for people.
    """

    name = "logger.wandb"

    def __init__(self, project: str, directory: Path, log: Callable[[str], None]) -> None:
        wandb: Any = importlib.import_module("wandb")  # an extra
        # config.yaml names the environment variables of secret values, and not these values
        settings = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
        self._log = log
        self._run: Any = wandb.init(
            project=project,
            name=directory.name,
            id=_identity(directory),
            resume="allow",
            dir=str(directory),
            config=settings,
            # Without a key, wandb asks for one and would wait for ever
            settings={"login_timeout": _LOGIN_SECONDS},
        )
        # W&B's own steps must grow, but a resumed run repeats some
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log({"step": step} | dict(values))

    def close(self) -> None:
        """Send what is left. Raises TimeoutError if that takes longer than a minute."""
        errors: list[Exception] = []

        def finish() -> None:
            try:
                self._run.finish()
            except Exception as error:
                errors.append(error)

        # The library itself has no time limit, and would wait for a network that is gone
        thread = threading.Thread(target=finish, daemon=True, name="wandb-finish")
        thread.start()
        self._wait_for(thread)
        if errors:
            raise errors[0]

    def _wait_for(self, thread: threading.Thread) -> None:
        start = time.monotonic()
        for interval in growing_intervals(FIRST_SECONDS):
            thread.join(max(0.0, min(interval, start + _FINISH_SECONDS - time.monotonic())))
            seconds = time.monotonic() - start
            if not thread.is_alive():
                return
            if seconds >= _FINISH_SECONDS:
                raise TimeoutError(
                    f"the last metrics were not sent within {_FINISH_SECONDS:.0f} s. "
                    "Send them later with `wandb sync`"
                )
            self._log(f"sending the last metrics to Weights & Biases: {seconds:.0f} s so far")


class PrometheusTracker:
    """A server that Prometheus reads the latest metrics from.

    The metric `train/grad_norm` is `megatron_rl_train_grad_norm` there. The label `metric` is the
    whole name, because metrics of `eval.sets` may differ in other characters alone. host, port: the
    address it listens on; port 0 stands for any free one. Raises OSError if that is impossible.
    """

    name = "logger.prometheus"

    def __init__(self, host: str, port: int, run: str) -> None:
        import prometheus_client
        from prometheus_client.core import CollectorRegistry, GaugeMetricFamily

        self._latest: dict[str, float] = {}
        tracker = self

        class LatestMetrics(prometheus_client.registry.Collector):
            def collect(self) -> Iterator[GaugeMetricFamily]:
                families: dict[str, GaugeMetricFamily] = {}
                for name, value in sorted(tracker._latest.items()):
                    key = prometheus_name(name)
                    if key not in families:
                        families[key] = GaugeMetricFamily(key, name, labels=["metric", "run"])
                    families[key].add_metric([name, run], value)
                yield from families.values()

        registry = CollectorRegistry()
        registry.register(LatestMetrics())
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, addr=host, registry=registry
            )
        except OSError as error:
            raise OSError(f"{error.strerror} on {host}. Choose a free port") from error

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._server.server_port)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the metrics. Metrics that this step has not measured keep their values."""
        latest = self._latest | {"step": float(step)} | dict(values)
        self._latest = {name: value for name, value in latest.items() if math.isfinite(value)}

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Trackers(Observer):
    """Every tracker of a run. A tracker that fails is named once and not used after that.

    log: writes a line for people.
    """

    def __init__(
        self, trackers: Mapping[str, Callable[[], Tracker]], log: Callable[[str], None]
    ) -> None:
        self._log = log
        self._trackers: list[Tracker] = []
        for name, open_tracker in trackers.items():
            try:
                self._trackers.append(open_tracker())
            except Exception as error:
                self._report(name, error)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the metrics of one step, except the many metrics of single experts."""
        sent_values = {name: value for name, value in values.items() if not is_expert_share(name)}
        for tracker in list(self._trackers):
            try:
                tracker.write(step, sent_values)
            except Exception as error:
                self._report(tracker.name, error)
                self._trackers.remove(tracker)

    def close(self) -> None:
        """Close every tracker."""
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:
                self._report(tracker.name, error)

    def _report(self, name: str, error: Exception) -> None:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self._log(f"warning: {name}: {text[:300]}. The run continues without it")


def open_trackers(parts: FeatureParts) -> Trackers | None:
    """Open the trackers on rank 0, which receive every record. None if the settings name none."""
    settings = parts.configuration.logger
    if parts.metrics is None or (settings.wandb is None and settings.prometheus is None):
        return None
    trackers = trackers_of(settings, parts.setup.directory.path, parts.setup.progress.log)
    parts.enter(contextlib.closing(trackers))
    parts.metrics.add_reader(trackers.write)
    return trackers


def trackers_of(settings: LoggerSettings, directory: Path, log: Callable[[str], None]) -> Trackers:
    """Open the trackers that the settings name. directory: of the run."""
    trackers: dict[str, Callable[[], Tracker]] = {}
    project = settings.wandb
    if project is not None:
        trackers[WandbTracker.name] = lambda: WandbTracker(project, directory, log)
    address = settings.prometheus
    if address is not None:
        host, _, port = address.rpartition(":")
        trackers[f"{PrometheusTracker.name}={address}"] = lambda: PrometheusTracker(
            host.strip("[]") or _LOCAL_HOST, int(port), directory.name
        )
    return Trackers(trackers, log)


def _identity(directory: Path) -> str:
    """Return the name of a run for Weights & Biases, which a file of the run keeps."""
    file = directory / "wandb_id.txt"
    if not file.exists():
        file.write_text(secrets.token_hex(8))
    return file.read_text().strip()


def prometheus_name(name: str) -> str:
    """Return the name of a metric in Prometheus, which allows letters, digits and `_`."""
    return f"megatron_rl_{_INVALID_CHARACTERS.sub('_', name)}"
