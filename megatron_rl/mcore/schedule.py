"""Runs micro-batches through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_rl.mcore.packed_batch import PackedBatch
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.router_target import Routing
from megatron_rl.mcore.weights.parameters import unwrap


class LogitsFunction(Protocol):
    """Computes the loss of a micro-batch on the last pipeline stage.

    logits: [T, V / tp].
    index: the index of the micro-batch in the pass.

    Returns the loss to back-propagate, a scalar or None in a forward-only pass, and any result
    for the caller of `run_schedule`.
    """

    def __call__(self, logits: torch.Tensor, index: int) -> tuple[torch.Tensor | None, Any]: ...


@dataclass(frozen=True)
class _ForwardStep:
    """The forward step function that Megatron's schedule calls for each micro-batch and chunk.

    loss_scale: factor that cancels Megatron's division of the loss by the number of micro-batches
        and of the gradients by the data-parallel size.
    """

    chunks: Sequence[torch.nn.Module]
    batches: Sequence[PackedBatch]
    replay: RouteReplay | None
    on_logits: LogitsFunction
    loss_scale: float

    def __call__(
        self, data: Iterator[int], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, Any]]]:
        index = next(data)
        batch = self.batches[index]
        inputs = _model_inputs(model, batch)
        if self.replay is None:
            output = model(**inputs)
        else:
            chunk = self._chunk_index(model)
            with self.replay.forward(chunk, index, batch.routes, batch.real_rows):
                output = model(**inputs)
        return output, lambda logits: self._loss(logits, index)

    def _chunk_index(self, model: torch.nn.Module) -> int:
        chunks = [unwrap(chunk) for chunk in self.chunks]
        return next(i for i, chunk in enumerate(chunks) if chunk is unwrap(model))

    def _loss(self, logits: torch.Tensor, index: int) -> tuple[torch.Tensor, Any]:
        loss, result = self.on_logits(logits[0], index)
        if loss is None:
            return logits.new_zeros(()), result
        return loss * self.loss_scale, result


def run_schedule(
    models: Sequence[torch.nn.Module],
    batches: Sequence[PackedBatch],
    on_logits: LogitsFunction,
    *,
    forward_only: bool,
    replay: RouteReplay | None = None,
    routing: Routing = "replay",
    measure_routes: bool = False,
) -> list[Any]:
    """Run every micro-batch forward, and backward unless `forward_only`. Collective.

    All ranks must pass the same number of micro-batches.

    models: the chunks of this rank.
    on_logits: called on the last pipeline stage.
    replay: controls the routers; None leaves the choice of experts to them.
    routing: what `replay` makes the routers do.
    measure_routes: let `replay` measure the routers' own choices.

    Returns the results of `on_logits` in order on the last pipeline stage, and an empty list on
    the others.
    """
    forward_step = _ForwardStep(
        models,
        batches,
        replay,
        on_logits,
        loss_scale=len(batches) * parallel_state.get_data_parallel_world_size(),
    )
    iterators = [iter(range(len(batches))) for _ in models]
    has_chunks = len(models) > 1
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": iterators if has_chunks else iterators[0],
        "model": list(models) if has_chunks else models[0],
        "num_microbatches": len(batches),
        "seq_length": max(batch.num_tokens for batch in batches),
        "micro_batch_size": 1,
        "forward_only": forward_only,
    }
    schedule = get_forward_backward_func()
    with torch.set_grad_enabled(not forward_only):
        if replay is None:
            return list(schedule(**arguments))
        with replay.active(routing, measure=measure_routes, forward_only=forward_only):
            return list(schedule(**arguments))


def _model_inputs(model: torch.nn.Module, batch: PackedBatch) -> dict[str, Any]:
    """Return the keyword arguments of a model chunk's forward pass."""
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "attention_mask": None,
        "packed_seq_params": batch.packed_seq_params(),
    }
    if _is_half_precision(model):
        # The loss kernel reads bfloat16 logits. A float32 copy would double the memory.
        inputs["fp32_output"] = False
    return inputs


def _is_half_precision(model: torch.nn.Module) -> bool:
    """True for a chunk in Megatron's Float16Module, with or without DDP around it."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return inner is not unwrap(model)
