"""Records every call of a model's routers and compares their choices with the routes."""

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.training.micro_batches import MicroBatch


class RouterCalls:
    """Records all calls from now on by router.

    A call is its routing map [rows, experts], and whether gradients were on.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._routers: list[TopKRouter] = []
        for model in models:
            routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
            self._routers += sorted(routers, key=lambda router: router.layer_number or 0)
        self._calls: list[list[tuple[bool, torch.Tensor]]] = [[] for _ in self._routers]
        for router, calls in zip(self._routers, self._calls, strict=True):
            router.register_forward_hook(
                lambda _m, _i, out, calls=calls: calls.append(
                    (torch.is_grad_enabled(), out[1].detach().clone())
                )
            )

    def check(
        self,
        steps: Sequence[Sequence[MicroBatch]],
        *,
        with_recomputation: bool,
        forward_passes: int = 1,
    ) -> int:
        """Check the calls since the last check, and return their number.

        They must be passes without gradients over all micro-batches, and then each step.
        Recomputation runs each forward pass of a step without gradients, and once more with
        gradients.

        forward_passes: 1 for the old policy's, 2 with a reference's.

        Raises `AssertionError`.
        """
        batches = [batch.inputs for step in steps for batch in step]
        num_calls = 0
        for column, calls in enumerate(self._calls):
            routes = [
                batch.routes[:, column].long() for batch in batches if batch.routes is not None
            ]
            assert len(routes) == len(batches)
            recomputed_routes = routes if with_recomputation else []
            expected_routes = {False: routes * forward_passes + recomputed_routes, True: routes}
            for with_gradients, pass_routes in expected_routes.items():
                maps = [routing_map for grad, routing_map in calls if grad is with_gradients]
                _check_maps(f"router {column}, gradients {with_gradients}", maps, pass_routes)
                num_calls += len(maps)
            calls.clear()
        return num_calls

    def gradients(self) -> list[float]:
        """Return the norm of each router's gradient on this rank."""
        return [float(router.weight.main_grad.norm()) for router in self._routers]


def _check_maps(place: str, maps: Sequence[torch.Tensor], routes: Sequence[torch.Tensor]) -> None:
    assert len(maps) == len(routes), f"{place}: {len(maps)} calls for {len(routes)} micro-batches"
    for call, (routing_map, call_routes) in enumerate(zip(maps, routes, strict=True)):
        expected_map = torch.zeros_like(routing_map).scatter(1, call_routes, True)
        assert torch.equal(routing_map, expected_map), f"{place}, call {call}: other experts"
