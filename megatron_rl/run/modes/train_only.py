"""mode=train_only: rank 0 trains on recorded batches, without engines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import Configuration
from megatron_rl.credit.assign import Credit
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.rollouts.steps.on_update import WaitForResponses
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.run.loop.build import build_leader
from megatron_rl.run.loop.leader import Leader
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.run.modes.mode import LoopParts
from megatron_rl.run.setup import RunSetup


@dataclass(frozen=True)
class TrainOnlyMode:
    """Trains on the recording that `rollout.recording` names."""

    setup: RunSetup

    def open_leader(self, parts: LoopParts) -> Leader:
        """Make the training loop, where the resume point says."""
        assert parts.checkpoints is not None
        c = self.setup.configuration
        recording = self.setup.run_data.recording
        assert recording is not None
        state = self.setup.resume_point.state
        steps_ahead = StepsAhead()
        return build_leader(
            Leader,
            c,
            self._step_parts(c, parts),
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

    def _step_parts(self, c: Configuration, parts: LoopParts) -> StepParts:
        """Make the parts of a step."""
        recording = self.setup.run_data.recording
        assert recording is not None
        assert parts.worker is not None
        dp_size = parts.worker.layout.dp_size
        return StepParts(
            rollouts=recording,
            credit=Credit(c.algo, c.credit, seed=c.seed, max_new_tokens=c.rollout.max_new_tokens),
            planner=StepPlanner(c.train, c.parallel, dp_size=dp_size, seed=c.seed),
            evaluation=None,
            open_parts=lambda c: self._step_parts(c, parts),
        )
