"""mode=train_only: rank 0 trains on recorded batches, without engines."""

from __future__ import annotations

from functools import partial

from megatron_rl.config.schema import Configuration
from megatron_rl.credit.assign import Credit
from megatron_rl.engines.on_update import WaitForResponses
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.run.loop.build import build_leader
from megatron_rl.run.loop.leader import Leader
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.run.modes.mode import Lead, LoopParts


def train_on_recording(parts: LoopParts) -> Lead:
    """Make the training loop, where the resume point says."""
    assert parts.checkpoints is not None
    c = parts.setup.configuration
    recording = parts.setup.run_data.recording
    assert recording is not None
    state = parts.setup.resume_point.state
    steps_ahead = StepsAhead()
    leader = build_leader(
        Leader,
        c,
        _step_parts(parts, c),
        holder=recording,
        sync=None,
        steps_ahead=steps_ahead,
        on_update=WaitForResponses(steps_ahead, recording.can_sample),
        checkpoints=parts.checkpoints,
        observers=parts.observers,
        dispatcher=parts.dispatcher,
        records=parts.records,
        state=None if state is None else state.position,
    )
    return leader.lead


def _step_parts(parts: LoopParts, c: Configuration) -> StepParts:
    """Make the parts of a step."""
    recording = parts.setup.run_data.recording
    assert recording is not None
    assert parts.worker is not None
    dp_size = parts.worker.layout.dp_size
    return StepParts(
        rollouts=recording,
        credit=Credit(
            c.algo,
            c.credit,
            max_new_tokens=c.rollout.max_new_tokens,
            compares_groups=c.algo.compares_groups(c.environment.name),
        ),
        planner=StepPlanner(c.train, c.parallel, dp_size=dp_size, seed=c.seed),
        evaluation=None,
        open_parts=partial(_step_parts, parts),
    )
