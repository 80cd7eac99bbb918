"""Makes the loop of rank 0 from the parts of a run."""

from __future__ import annotations

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.engines.on_update import OnUpdate
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.records.run_records import RunRecords
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.loop.engine_weights import EngineWeights
from megatron_rl.run.loop.evaluations import Evaluations
from megatron_rl.run.loop.leader import Leader
from megatron_rl.run.loop.sampling import Sampling
from megatron_rl.run.loop.saves import Saves
from megatron_rl.run.loop.step_parts import RolloutHolder, StepParts
from megatron_rl.training.dispatcher import Dispatcher


def build_leader[AnyLeader: Leader](
    loop: type[AnyLeader],
    c: Configuration,
    parts: StepParts,
    *,
    holder: RolloutHolder,
    sync: WeightSync | None,
    steps_ahead: StepsAhead,
    on_update: OnUpdate,
    checkpoints: CheckpointManager,
    observers: Observers,
    dispatcher: Dispatcher,
    records: RunRecords,
    state: LoopState | None,
) -> AnyLeader:
    """Make a loop, where a checkpoint says. state: None for a new run."""
    progress = records.progress
    weights = EngineWeights(
        sync,
        follows_steps=c.environment.name != "demonstration",
        holder=holder,
        dispatcher=dispatcher,
        progress=progress,
        colocated=c.engine.colocated,
    )
    sampling = Sampling(
        parts,
        holder,
        weights,
        steps_ahead=steps_ahead,
        on_update=on_update,
        checkpoints=checkpoints,
        observers=observers,
        total_steps=c.train.total_steps,
    )
    evaluations = Evaluations(
        c.eval,
        c.train,
        parts,
        sampling=sampling,
        weights=weights,
        checkpoints=checkpoints,
        observers=observers,
        progress=progress,
    )
    saves = Saves(
        checkpoints,
        sampling=sampling,
        weights=weights,
        evaluations=evaluations,
        observers=observers,
        records=records,
        dispatcher=dispatcher,
        saves_weights=c.run.save_weights and c.mode != "rollout_only",
    )
    if state is not None:
        observers.restore(state.features)
        evaluations.restore(state)
        sampling.restore(state.selection)
        weights.restore(state)
    return loop(
        parts=parts,
        sampling=sampling,
        weights=weights,
        evaluations=evaluations,
        saves=saves,
        observers=observers,
        records=records,
        dispatcher=dispatcher,
        resumed_step=None if state is None else state.step,
    )
