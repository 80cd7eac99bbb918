"""Turns the configuration into the parts of a rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_rl.config.curriculum import phases_of
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import EnterPhase, Poll, Save, Sync, Train
from megatron_rl.credit.assign import Credit
from megatron_rl.engines.engines import EngineConnections, Engines
from megatron_rl.engines.weight_sync import Sender
from megatron_rl.losses import Correction, PolicyLoss
from megatron_rl.mcore.model import build_models, pack_multiple
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights import draw_hf_weights, load_hf_weights
from megatron_rl.models.route_shape import route_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.source import PromptSource
from megatron_rl.records.run_records import RunRecords
from megatron_rl.rollouts.evaluation import Evaluation
from megatron_rl.rollouts.rollout_batch import RolloutStage
from megatron_rl.run.curriculum import change, open_course
from megatron_rl.run.leader import Leader, Stages
from megatron_rl.run.modes.record import RecordingLeader
from megatron_rl.training.dispatcher import Dispatcher, Table
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.micro_batches import Batcher
from megatron_rl.training.policy import Policy
from megatron_rl.training.worker import Worker, gather_receivers


def build_worker(
    c: Configuration, shape: ModelShape, loss: PolicyLoss, layout: RankLayout, rollouts: Path
) -> Worker:
    """This rank's model, optimizer and stages (a collective)."""
    chunks = build_models(shape, c.model, c.parallel)
    if c.model.init == "checkpoint":
        load_hf_weights(chunks, shape, c.model.path)
    else:
        draw_hf_weights(chunks, shape, seed=c.seed)
    models = wrap_data_parallel(chunks)
    view = RankView.of(shape.num_layers, c.parallel, **layout.ranks)
    logprobs = ResponseLogprobs(c.train, c.rollout, vocab_size=shape.vocab_size, **layout.groups)
    updates = c.train.total_steps * c.train.optimizer_steps_per_batch
    held, replay = view.moe_rows(shape.moe_layers), None
    if c.train.replay != "off":
        (replay := RouteReplay(models, c.train.replay)).require_layers(
            [shape.moe_layers[row] for row in held]
        )
    routes = route_shape(shape) if c.train.replay == "rollout" else None
    return Worker(
        layout=layout,
        receivers=gather_receivers(layout, held),
        shape=shape,
        policy=Policy(models, logprobs, loss, replay, Correction(c.algo.correction)),
        optimizer=DistributedAdam(models, c.optimizer, total_steps=updates),
        batcher=Batcher(view, routes, layout.device, multiple=pack_multiple(c.model)),
        model=c.model,
        engine=c.engine,
        run=c.run,
        logger=c.logger,
        sync=c.sync,
        settings=c.train,
        rollouts_directory=rollouts,
    )


def build_table(c: Configuration, worker: Worker, engines: Engines, sender: Sender) -> Table:
    """What this rank does for each command."""
    return {
        EnterPhase: lambda command: change(worker, phases_of(c)[command.phase].configuration),
        Poll: lambda command: engines.check(),
        Train: lambda command: worker.train(command.plan),
        Sync: lambda command: sender.send(command, worker.export()),
        Save: lambda command: worker.save(Path(command.path)),
    }


def build_leader(
    c: Configuration,
    stops: tuple[int, ...],
    dispatcher: Dispatcher,
    connected: EngineConnections,
    records: RunRecords,
    prompts: PromptSource,
    dp_size: int,
) -> Leader:
    """Rank 0's loop over its stages. stops: tokens that end a response."""
    queue, idle = connected.queue, partial(dispatcher.run, Poll())

    def stages(c: Configuration) -> Stages:
        prompts.choose(c.data.pass_rate_range)
        selector = open_selector(prompts, c.rollout, c.selection, seed=c.seed)
        return Stages(
            rollouts=RolloutStage(queue, c.rollout, selector, stops, idle),
            credit=Credit(c.algo, c.credit, seed=c.seed, max_new_tokens=c.rollout.max_new_tokens),
            planner=StepPlanner(c.train, c.parallel, dp_size=dp_size, seed=c.seed),
            evaluation=Evaluation(queue, prompts.held_out, c.eval, c.rollout, stops, idle),
        )

    course = open_course(c, stages, dispatcher, records.progress.log)
    loop, settings = (
        RecordingLeader if c.mode == "rollout_only" else Leader,
        (c.train, c.rollout, c.eval, c.sync, c.run),
    )
    return loop(*settings, stages(c), queue, connected.weights, dispatcher, records, course=course)
