"""Builds and prepares the worker of a rank: model, optimizer and batches."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config.schema import Configuration
from megatron_rl.environments.environment import open_environment
from megatron_rl.losses import Correction, PolicyLoss, Regularization, open_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.job import Job
from megatron_rl.mcore.model import build_models, pack_multiple
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights import initialize_hf_weights, load_hf_weights
from megatron_rl.mcore.weights.reference import ReferenceWeights
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.run.checkpoints.reference import reference_path
from megatron_rl.run.setup import RunSetup
from megatron_rl.run.supervision.supervision import OpenParts
from megatron_rl.training.batch_recording import BatchRecorder
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.micro_batches import Batcher
from megatron_rl.training.policy import Policy
from megatron_rl.training.warm_up import warm_up
from megatron_rl.training.worker import Worker, gather_receivers


def open_worker(setup: RunSetup, parts: OpenParts) -> Worker:
    """Load the model and the checkpoint to resume from, and compile the kernels (a collective)."""
    c = setup.configuration
    progress = setup.progress
    loss = open_loss(c.algo, setup.shape)
    open_environment(c.environment)  # a user-defined class may fail: now, before the model loads
    layout = parallel.initialize(c.parallel, seed=c.seed, job=setup.job)
    progress.log("loading the model")
    with progress.task("loading the model"):
        worker = build_worker(c, setup.shape, loss, layout, setup.directory.rollouts)
    with progress.task("loading the checkpoint"):
        difference = setup.resume_point.load(worker)
    if difference:
        progress.log(difference)
    progress.log("compiling kernels")
    with progress.task("compiling kernels"):
        _compile(worker, setup.job)
    # Modules and model live to the end: the collector would spend 5 % of a CPU rank's time on them.
    gc.freeze()
    parts.callback(gc.unfreeze)  # otherwise libraries report leaks at exit
    return worker


def build_worker(
    c: Configuration, shape: ModelShape, loss: PolicyLoss, layout: RankLayout, rollouts: Path
) -> Worker:
    """Build this rank's model, optimizer and batcher (a collective).

    rollouts: the folder for batches that are kept.
    """
    models = wrap_data_parallel(
        _load_chunks(c, shape),
        overlap=c.parallel.overlap,
    )
    view = RankView.for_rank(shape.num_layers, c.parallel, **layout.ranks)
    moe_rows = view.moe_rows(shape.moe_layers)
    policy = _open_policy(c, shape, models, loss, layout)
    if policy.replay is not None:
        policy.replay.require_layers([shape.moe_layers[row] for row in moe_rows])
    updates = c.train.total_steps * c.train.optimizer_steps_per_batch
    routes = shape.route_shape if c.train.replay == "rollout" else None
    receivers = gather_receivers(layout, moe_rows)
    recorder = BatchRecorder(
        rollouts, c.logger.save_rollouts_every, receivers, layout.rank, layout.control_group
    )
    return Worker(
        layout=layout,
        receivers=receivers,
        shape=shape,
        policy=policy,
        optimizer=DistributedAdam(models, c.optimizer, total_steps=updates),
        batcher=Batcher(view, routes, layout.device, multiple=pack_multiple(c.model)),
        model=c.model,
        engine=c.engine,
        sync=c.sync,
        settings=c.train,
        recorder=recorder,
    )


def _open_policy(
    c: Configuration,
    shape: ModelShape,
    models: Sequence[torch.nn.Module],
    loss: PolicyLoss,
    layout: RankLayout,
) -> Policy:
    """Combine the model with its loss, replay and regularization.

    models: with the weights of the start checkpoint.
    """
    regularization = Regularization(c.algo)
    logprobs = ResponseLogprobs(
        c.rollout,
        vocab_size=shape.vocab_size,
        entropy_grad=regularization.entropy_grad,
        **layout.groups,
    )
    return Policy(
        models=models,
        logprobs=logprobs,
        loss=loss,
        replay=None if c.train.replay == "off" else RouteReplay(models, c.train.replay),
        correction=Correction(c.algo.correction),
        regularization=regularization,
        reference=_open_reference(c, shape, models),
    )


def _load_chunks(c: Configuration, shape: ModelShape) -> list[torch.nn.Module]:
    """Build this rank's chunks of the model with their first weights."""
    chunks = build_models(shape, c.model, c.parallel)
    if c.model.init == "checkpoint":
        load_hf_weights(chunks, shape, c.model.path)
    else:
        initialize_hf_weights(chunks, shape, seed=c.seed)
    return chunks


def _open_reference(
    c: Configuration, shape: ModelShape, models: Sequence[torch.nn.Module]
) -> ReferenceWeights | None:
    """Copy the reference's weights to host memory; None without a KL penalty.

    models: with the weights of the start checkpoint.
    """
    path = reference_path(c)
    if path is None:
        return None
    if c.algo.kl.reference is None:
        return ReferenceWeights(models, shape)
    return ReferenceWeights.read(models, shape, path, key="algo.kl.reference")


def _compile(worker: Worker, job: Job) -> None:
    """Compile the kernels, on one rank of each node first.

    On CPUs the other ranks then read them from its cache. Ranks that share the vocabulary or
    sequences compile together, because their kernels run collectives.
    """
    layout = worker.layout
    together = layout.tp_group is not None or layout.cp_group is not None
    if job.local_rank and not together:
        dist.barrier(job.control_group)
    warm_up(worker)
    if not job.local_rank and not together:
        dist.barrier(job.control_group)
