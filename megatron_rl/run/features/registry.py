"""The one list of features."""

from __future__ import annotations

from megatron_rl.run.features.alarms.observer import open_alarms
from megatron_rl.run.features.curriculum.curriculum import open_curriculum
from megatron_rl.run.features.guards.guards import open_guards
from megatron_rl.run.features.lengths.observer import open_lengths
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.features.profiler.step_profiler import open_profiler
from megatron_rl.run.features.samples.keeper import open_samples
from megatron_rl.run.features.tensorboard.tensorboard import open_tensorboard
from megatron_rl.run.features.timeline.run_timeline import open_timeline
from megatron_rl.run.features.token_audit.token_audit import open_token_audit
from megatron_rl.run.features.trackers.trackers import open_trackers

# Each returns None where its feature is off. A guard may end the run, so samples and lengths come
# before it.
_FEATURES = (
    open_curriculum,
    open_samples,
    open_lengths,
    open_guards,
    open_alarms,
    open_token_audit,
    open_timeline,
    open_profiler,
    open_tensorboard,
    open_trackers,
)


def open_features(parts: FeatureParts) -> list[Observer]:
    """Open the features of this rank."""
    observers = (open_feature(parts) for open_feature in _FEATURES)
    return [observer for observer in observers if observer is not None]
