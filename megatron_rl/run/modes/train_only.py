"""mode=train_only: rank 0 trains on recorded batches, without engines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.credit.assign import Credit
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.run.leader import Leader
from megatron_rl.run.modes.mode import LoopParts
from megatron_rl.run.modes.train import checkpoint_manager
from megatron_rl.run.samples.keeper import open_samples
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.step_parts import StepParts


@dataclass(frozen=True)
class TrainOnlyMode:
    """Trains on the recording that `rollout.recording` names."""

    setup: RunSetup

    def open_leader(self, parts: LoopParts) -> Leader:
        """Make the training loop, where the resume point says."""
        assert parts.worker is not None
        c = self.setup.configuration
        recording = self.setup.run_data.recording
        assert recording is not None
        dp_size = parts.worker.layout.dp_size
        step_parts = StepParts(
            rollouts=recording,
            credit=Credit(c.algo, c.credit, seed=c.seed, max_new_tokens=c.rollout.max_new_tokens),
            planner=StepPlanner(c.train, c.parallel, dp_size=dp_size, seed=c.seed),
            evaluation=None,
        )
        state = self.setup.resume_point.state
        return Leader(
            train=c.train,
            eval=c.eval,
            sync=c.sync,
            run=c.run,
            guard=c.guard,
            parts=step_parts,
            holder=recording,
            weights=None,
            dispatcher=parts.dispatcher,
            records=parts.records,
            checkpoints=checkpoint_manager(self.setup, parts),
            samples=open_samples(self.setup, parts),
            resume_state=None if state is None else state.position,
        )
