"""mode=train and mode=rollout_only on rank 0."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_rl.config.schema import Configuration
from megatron_rl.credit.assign import Credit
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.engines.on_update import open_steps_ahead
from megatron_rl.environments.environment import is_replayable
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.prompts.selection.factory import credit_warning, open_selector
from megatron_rl.rollouts.evaluation.evaluation import Evaluation
from megatron_rl.rollouts.queue.saved_groups import SavedGroups
from megatron_rl.rollouts.recording.recorded_rollouts import load_rollout
from megatron_rl.rollouts.steps.sampler import RolloutSampler, sampling_of
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.run.checkpoints.resume import explained_load_errors
from megatron_rl.run.checkpoints.rollouts import load_batches, load_open_steps
from megatron_rl.run.loop.build import build_leader
from megatron_rl.run.loop.leader import Leader
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.run.modes.mode import Lead, LoopParts
from megatron_rl.run.modes.record import RecordingLeader
from megatron_rl.run.setup import RunSetup

_EXCLUDED_FILE = "left_out.txt"


def train(parts: LoopParts) -> Lead:
    """Make the loop that trains or records, where the resume point says."""
    setup = parts.setup
    connections = parts.connections
    assert connections is not None
    assert parts.checkpoints is not None
    _log_prompts(setup)
    c = setup.configuration
    state = setup.resume_point.state
    steps_ahead, on_update = open_steps_ahead(
        c.rollout,
        connections,
        parts.idle,
        stores_partials=is_replayable(c.environment),
    )
    leader = build_leader(
        RecordingLeader if c.mode == "rollout_only" else Leader,
        c,
        _step_parts(parts, c),
        holder=connections,
        sync=connections.weights,
        steps_ahead=steps_ahead,
        on_update=on_update,
        checkpoints=parts.checkpoints,
        observers=parts.observers,
        dispatcher=parts.dispatcher,
        records=parts.records,
        state=None if state is None else state.position,
    )
    _restore_rollouts(setup, steps_ahead, connections, parts.observers.configuration(c))
    return leader.lead


def _restore_rollouts(
    setup: RunSetup, steps_ahead: StepsAhead, connections: EngineConnections, c: Configuration
) -> None:
    """Load the rollouts that were sampled ahead before the checkpoint.

    c: of the step after the checkpoint. Lost rollouts are sampled again with its settings,
    because the trainer computes log-probabilities at the temperature of its phase.
    """
    point = setup.resume_point
    if point.state is not None and point.checkpoint is not None:
        position = point.state.position
        routes = setup.shape.route_shape if c.train.replay == "rollout" else None
        vocab_size = setup.shape.vocab_size
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
        queue.restore(SavedGroups(groups, load, setup.progress.log))
        sampling = sampling_of(c.rollout, setup.stop_token_ids)
        for _, saved_groups in batches.values():
            queue.hold_saved(saved_groups, sampling, c.rollout.samples_per_prompt)


def _log_prompts(setup: RunSetup) -> None:
    prompts = setup.run_data.training_prompts
    counts = f"{len(prompts.train)} training prompts, {len(prompts.held_out)} held out"
    notes = [note for note in (counts, *prompts.notes()) if note]
    setup.progress.log("; ".join(notes))
    c = setup.configuration
    if warning := credit_warning(c.selection, c.credit):
        setup.progress.log(warning)
    report = prompts.excluded_rows.report()
    if report:
        file = setup.directory.path / _EXCLUDED_FILE
        file.write_text(report + "\n", encoding="utf-8", errors="replace")


def _step_parts(parts: LoopParts, c: Configuration) -> StepParts:
    """Make the parts of a step with the settings of the run, or of one phase."""
    setup = parts.setup
    assert parts.connections is not None
    assert parts.worker is not None
    dp_size = parts.worker.layout.dp_size
    queue = parts.connections.queue
    stop_token_ids = setup.stop_token_ids
    prompts = setup.run_data.training_prompts
    prompts.set_pass_rate_range(c.data.pass_rate_range)
    evaluation = Evaluation(
        queue,
        prompts.held_out,
        c.eval,
        c.rollout,
        stop_token_ids,
        parts.idle,
        observe=lambda groups: parts.observers.after_sampling(groups, {}),
    )
    selector = open_selector(prompts, c.rollout, c.selection, seed=c.seed)
    return StepParts(
        rollouts=RolloutSampler(queue, c.rollout, selector, stop_token_ids, parts.idle),
        credit=Credit(
            c.algo,
            c.credit,
            max_new_tokens=c.rollout.max_new_tokens,
            compares_groups=c.algo.compares_groups(c.environment.name),
        ),
        planner=StepPlanner(c.train, c.parallel, dp_size=dp_size, seed=c.seed),
        evaluation=None if c.mode == "rollout_only" else evaluation,
        open_parts=partial(_step_parts, parts),
        sets={
            name: replace(evaluation, prompts=questions, settings=c.eval.of_set(name))
            for name, questions in setup.run_data.sets.items()
        },
    )
