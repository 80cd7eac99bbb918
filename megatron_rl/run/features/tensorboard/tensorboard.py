"""Writes metrics to TensorBoard, and per-layer metrics as heat maps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

from megatron_rl.records.heat_maps import HeatMaps, is_expert_share, is_heat_map_metric
from megatron_rl.records.past_run import RunUnreadable, iterate_metrics
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.setup import RunSetup

# Steps in a heat map, because TensorBoard stores each picture
_MAX_COLUMNS = 256


class TensorBoard(Observer):
    """Writes each record of a run to files of TensorBoard. Raises OSError if it cannot.

    first_step: the first step of a resumed run. The older records of this and later steps are then
    hidden.
    """

    def __init__(self, directory: RunDirectory, first_step: int | None = None) -> None:
        # This import is slow, and TensorBoard is optional
        from torch.utils.tensorboard import SummaryWriter

        self._path = directory.path
        self._maps: HeatMaps | None = None
        self._writer = SummaryWriter(str(directory.tensorboard), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write a record that metrics.jsonl has, and flush it."""
        for name, value in values.items():
            if not is_expert_share(name):
                self._writer.add_scalar(name, value, step)
        if any(map(is_heat_map_metric, values)):
            for heat_map in self._maps_with(step, values).maps():
                self._writer.add_image(heat_map.name, heat_map.image(), step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files. Errors are ignored."""
        with contextlib.suppress(OSError):
            self._writer.close()

    def _maps_with(self, step: int, values: Mapping[str, float]) -> HeatMaps:
        """The heat maps of all records up to this one, which was just written."""
        if self._maps is None:
            self._maps = HeatMaps(max_columns=_MAX_COLUMNS)
            # A damaged line of an earlier step costs the columns after it, not the run
            with contextlib.suppress(RunUnreadable):
                for earlier_record in iterate_metrics(self._path):
                    self._maps.add(earlier_record)
                return self._maps
        record: dict[str, float | None] = {"step": step}
        for name, value in values.items():
            record[name] = value if math.isfinite(value) else None
        self._maps.add(record)
        return self._maps


def open_tensorboard(parts: FeatureParts) -> TensorBoard | None:
    """Open TensorBoard on rank 0, None with `logger.tensorboard=false`."""
    if parts.metrics is None or not parts.configuration.logger.tensorboard:
        return None
    tensorboard = TensorBoard(parts.setup.directory, first_step(parts.setup))
    parts.enter(contextlib.closing(tensorboard))
    parts.metrics.add_reader(tensorboard.write)
    return tensorboard


def first_step(setup: RunSetup) -> int | None:
    """Return the first step whose record a resumed run writes, None for a new run."""
    state = setup.resume_point.state
    if state is None or setup.configuration.is_measurement:
        return None
    return state.step if state.position.unevaluated_metrics is not None else state.step + 1
