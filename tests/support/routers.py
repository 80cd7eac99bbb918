"""Checks the routers of one rank, call by call, against the routes that they must replay."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.mcore.packed_batch import PackedBatch

# Routing maps [rows, experts] of every call, by router and by whether gradients were on.
CallsByRouter = dict[tuple[int, bool], list[torch.Tensor]]


@contextlib.contextmanager
def check_routers(
    models: Sequence[Any], batches: Sequence[PackedBatch], *, with_recomputation: bool
) -> Iterator[None]:
    """Check that each router uses each batch's routes, in order.

    The block must hold one forward and backward pass over `batches`.

    with_recomputation: layers run without a graph first and again in the backward pass, both times
        with the same routes.
    """
    routers = [m for model in models for m in model.modules() if isinstance(m, TopKRouter)]
    routers.sort(key=lambda router: router.layer_number)
    calls: CallsByRouter = {}
    hooks = [_record_calls(router, index, calls) for index, router in enumerate(routers)]
    yield
    for hook in hooks:
        hook.remove()
    for (index, with_graph), maps in calls.items():
        expected_batches = batches if with_graph or with_recomputation else []
        _check_maps(index, maps, expected_batches)


def _record_calls(router: Any, index: int, calls: CallsByRouter) -> Any:
    calls[index, False] = []
    calls[index, True] = []

    def record(module: Any, inputs: Any, output: Any) -> None:
        calls[index, torch.is_grad_enabled()].append(output[1].detach().clone())

    return router.register_forward_hook(record)


def _check_maps(index: int, maps: list[torch.Tensor], batches: Sequence[PackedBatch]) -> None:
    assert len(maps) == len(batches), (
        f"router {index}: {len(maps)} calls for {len(batches)} micro-batches"
    )
    for routing_map, batch in zip(maps, batches, strict=True):
        assert batch.routes is not None
        routes = batch.routes[:, index].long()
        expected_map = torch.zeros_like(routing_map).scatter(1, routes, True)
        assert torch.equal(routing_map, expected_map), (
            f"router {index}: other experts than the recorded ones"
        )
