"""One pass of micro-batches through Megatron's own pipeline schedules."""

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
    """Called on the last pipeline stage with logits [T, V / tp] of micro-batch `index`.

    Returns the loss to back-propagate (None in a forward-only pass) and whatever the caller wants
    to keep.
    """

    def __call__(self, logits: torch.Tensor, index: int) -> tuple[torch.Tensor | None, Any]: ...


@dataclass(frozen=True)
class _Stage:
    """The forward step that Megatron's schedule calls for every micro-batch and chunk."""

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
        chunk = next(
            i for i, candidate in enumerate(self.chunks) if unwrap(candidate) is unwrap(model)
        )
        inputs: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "position_ids": batch.position_ids,
            "attention_mask": None,
            "packed_seq_params": batch.packed_seq_params(),
        }
        if unwrap(model) is not model and _is_half(model):
            inputs["fp32_output"] = (
                False  # the loss kernel reads bf16 logits; a float32 copy would double the memory
            )
        if self.replay is None:
            output = model(**inputs)
        else:
            with self.replay.forward(chunk, index, batch.routes, batch.real_rows):
                output = model(**inputs)
        return output, lambda logits: self._loss(logits, index)

    def _loss(self, logits: torch.Tensor, index: int) -> tuple[torch.Tensor, Any]:
        loss, kept = self.on_logits(logits[0], index)
        if loss is None:
            return logits.new_zeros(()), kept
        return loss * self.loss_scale, kept


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
    """Run every micro-batch forward (and backward); returns what `on_logits` kept, in order, on the
    last stage.

    replay None: routers choose by themselves. routing: what they do instead, else.
    """
    stage = _Stage(
        models,
        batches,
        replay,
        on_logits,
        loss_scale=len(batches) * parallel_state.get_data_parallel_world_size(),
    )
    iterators = [iter(range(len(batches))) for _ in models]
    arguments = {
        "forward_step_func": stage,
        "data_iterator": iterators if len(models) > 1 else iterators[0],
        "model": list(models) if len(models) > 1 else models[0],
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


def _is_half(model: torch.nn.Module) -> bool:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return inner is not unwrap(model)
