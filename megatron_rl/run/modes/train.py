"""mode=train and mode=rollout_only on rank 0."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.evaluations import best_metric
from megatron_rl.config.schema import Configuration, RolloutSettings
from megatron_rl.contracts.run_state import PhaseState
from megatron_rl.credit.assign import Credit
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.environments.environment import is_replayable
from megatron_rl.models.route_shape import route_shape
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.prompts.selection.factory import credit_warning, open_selector
from megatron_rl.records.run_directory import STOP_FILE
from megatron_rl.rollouts.evaluation import Evaluation
from megatron_rl.rollouts.partials.saved_groups import SavedGroups
from megatron_rl.rollouts.recording.recorded_rollouts import load_rollout
from megatron_rl.rollouts.steps.on_update import open_steps_ahead
from megatron_rl.rollouts.steps.sampler import RolloutSampler, sampling_of
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.run.checkpoints.best import BestCheckpoint
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.checkpoints.resume import explained_load_errors, flat_configuration
from megatron_rl.run.checkpoints.rollouts import load_batches, load_open_steps
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.curriculum import Curriculum
from megatron_rl.run.leader import Leader
from megatron_rl.run.modes.mode import LoopParts
from megatron_rl.run.modes.record import RecordingLeader
from megatron_rl.run.samples.keeper import open_samples
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.step_parts import StepParts

_EXCLUDED_FILE = "left_out.txt"


@dataclass(frozen=True)
class TrainingMode:
    """Trains on rollouts that engines sample for training prompts, or records them."""

    setup: RunSetup

    def open_leader(self, parts: LoopParts) -> Leader:
        """Make the training loop, where the resume point says."""
        assert parts.connections is not None
        assert parts.worker is not None
        self._log_prompts()
        c = self.setup.configuration
        dp_size = parts.worker.layout.dp_size

        def open_parts(c: Configuration) -> StepParts:
            return self._step_parts(c, parts, dp_size)

        curriculum = None
        if c.curriculum:
            log = self.setup.progress.log
            curriculum = Curriculum(phases_of(c), open_parts, parts.dispatcher, log)
        state = self.setup.resume_point.state
        steps_ahead, on_update = open_steps_ahead(
            c.rollout,
            parts.connections,
            parts.idle,
            stores_partials=is_replayable(c.environment),
        )
        self._restore_rollouts(steps_ahead, parts.connections)
        loop = RecordingLeader if c.mode == "rollout_only" else Leader
        return loop(
            train=c.train,
            eval=c.eval,
            sync=c.sync,
            run=c.run,
            guard=c.guard,
            engine=c.engine,
            parts=open_parts(c),
            holder=parts.connections,
            weights=parts.connections.weights,
            token_counter=parts.connections.token_counter,
            dispatcher=parts.dispatcher,
            records=parts.records,
            checkpoints=checkpoint_manager(self.setup, parts),
            curriculum=curriculum,
            samples=None if c.mode == "rollout_only" else open_samples(self.setup, parts),
            steps_ahead=steps_ahead,
            on_update=on_update,
            resume_state=None if state is None else state.position,
        )

    def _restore_rollouts(self, steps_ahead: StepsAhead, connections: EngineConnections) -> None:
        """Load the rollouts that were sampled ahead before the checkpoint."""
        c = self.setup.configuration
        point = self.setup.resume_point
        if point.state is not None and point.checkpoint is not None:
            position = point.state.position
            routes = route_shape(self.setup.shape) if c.train.replay == "rollout" else None
            vocab_size = self.setup.shape.vocab_size
            with explained_load_errors(point.checkpoint):
                ngram = c.credit.repetition_ngram
                batches = load_batches(
                    point.checkpoint, position.steps_ahead, routes, vocab_size, ngram=ngram
                )
                groups = load_open_steps(
                    point.checkpoint, position.open_steps, routes, vocab_size, ngram=ngram
                )
            steps_ahead.restore(
                {step: batch for step, (batch, _) in batches.items()},
                position.open_steps,
                c.train.total_steps,
            )
            load = partial(load_rollout, routes=routes, vocab_size=vocab_size)
            queue = connections.queue
            queue.restore(SavedGroups(groups, load, self.setup.progress.log))
            rollout = rollout_settings(c, position.phase)
            sampling = sampling_of(rollout, self.setup.stop_token_ids)
            for _, saved_groups in batches.values():
                queue.hold_saved(saved_groups, sampling, rollout.samples_per_prompt)

    def _log_prompts(self) -> None:
        prompts = self.setup.run_data.training_prompts
        counts = f"{len(prompts.train)} training prompts, {len(prompts.held_out)} held out"
        notes = [note for note in (counts, *prompts.notes()) if note]
        self.setup.progress.log("; ".join(notes))
        c = self.setup.configuration
        if warning := credit_warning(c.selection, c.credit):
            self.setup.progress.log(warning)
        report = prompts.excluded_rows.report()
        if report:
            file = self.setup.directory.path / _EXCLUDED_FILE
            file.write_text(report + "\n", encoding="utf-8", errors="replace")

    def _step_parts(self, c: Configuration, parts: LoopParts, dp_size: int) -> StepParts:
        """Make the parts of a step with the settings of the run, or of one phase."""
        assert parts.connections is not None
        queue = parts.connections.queue
        stop_token_ids = self.setup.stop_token_ids
        prompts = self.setup.run_data.training_prompts
        prompts.set_pass_rate_range(c.data.pass_rate_range)
        evaluation = Evaluation(
            queue, prompts.held_out, c.eval, c.rollout, stop_token_ids, parts.idle
        )
        selector = open_selector(prompts, c.rollout, c.selection, seed=c.seed)
        return StepParts(
            rollouts=RolloutSampler(queue, c.rollout, selector, stop_token_ids, parts.idle),
            credit=Credit(c.algo, c.credit, seed=c.seed, max_new_tokens=c.rollout.max_new_tokens),
            planner=StepPlanner(c.train, c.parallel, dp_size=dp_size, seed=c.seed),
            evaluation=None if c.mode == "rollout_only" else evaluation,
            sets={
                name: replace(evaluation, prompts=questions, settings=c.eval.of_set(name))
                for name, questions in self.setup.run_data.sets.items()
            },
        )


def rollout_settings(c: Configuration, state: PhaseState | None) -> RolloutSettings:
    """Return how a resumed run samples. state: of its curriculum, None before the first phase."""
    phases = phases_of(c)
    return phases[(state or PhaseState()).index].configuration.rollout if phases else c.rollout


def checkpoint_manager(setup: RunSetup, parts: LoopParts) -> CheckpointManager:
    """Make the checkpoint manager of a run that trains."""
    assert parts.worker is not None
    c = setup.configuration
    optimizer = parts.worker.optimizer
    state = setup.resume_point.state
    saved_step = None
    if state is not None and c.run.resume == "auto":
        saved_step = state.step
    if c.run.checkpoint_every:
        parts.stop.watch_file(setup.directory.path / STOP_FILE)
    return CheckpointManager(
        settings=c.run,
        configuration=flat_configuration(c),
        world_size=parts.worker.layout.world_size,
        optimizer_steps=lambda: optimizer.steps,
        dispatcher=parts.dispatcher,
        progress=setup.progress,
        stop=parts.stop,
        last_saved_step=saved_step,
        reference=setup.reference_digest,
        best=_best_checkpoint(setup),
    )


def _best_checkpoint(setup: RunSetup) -> BestCheckpoint | None:
    """Follow the best evaluation, from that of the checkpoint if the run continues."""
    run = setup.configuration.run
    if run.keep_best is None:
        return None
    state = setup.resume_point.state
    best = None if state is None or run.resume != "auto" else state.best
    store = CheckpointStore(setup.directory.checkpoints)
    return BestCheckpoint(best_metric(run.keep_best), store, best)
