"""What the routers of one rank did, call by call, against the routes that they were to replay."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.mcore.packed_batch import PackedBatch


@contextlib.contextmanager
def routers_checked(
    models: Sequence[Any], batches: Sequence[PackedBatch], *, recomputed: bool
) -> Iterator[None]:
    """Within, one forward and backward pass over `batches`: each router's calls use each batch's
    routes, in order.

    recomputed: layers run without a graph first and again in the backward pass, both times with the
    same routes.
    """
    routers = [m for model in models for m in model.modules() if isinstance(m, TopKRouter)]
    routers.sort(key=lambda router: router.layer_number)
    seen: dict[tuple[int, bool], list[torch.Tensor]] = {}
    hooks = []
    for layer, router in enumerate(routers):
        for with_graph in (False, True):
            seen[layer, with_graph] = []

        def note(module: Any, inputs: Any, output: Any, layer: int = layer) -> None:
            seen[layer, torch.is_grad_enabled()].append(output[1].detach().clone())

        hooks.append(router.register_forward_hook(note))
    yield
    for hook in hooks:
        hook.remove()
    for (layer, with_graph), maps in seen.items():
        wanted = batches if with_graph or recomputed else []
        assert len(maps) == len(wanted), (
            f"layer {layer}: {len(maps)} calls for {len(wanted)} micro-batches"
        )
        for chosen, batch in zip(maps, wanted, strict=True):
            assert batch.routes is not None
            forced = torch.zeros_like(chosen).scatter(1, batch.routes[:, layer].long(), True)
            assert torch.equal(chosen, forced), (
                f"layer {layer}: other experts than the recorded ones"
            )
