"""Watches every call of a model's routers and compares what they chose with the routes they were
given.
"""

from collections.abc import Sequence

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.training.micro_batches import MicroBatch


class RouterCalls:
    """All calls from now on, by router: the routing map [rows, experts], and whether gradients were
    on.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._routers: list[TopKRouter] = []
        for model in models:
            found = [module for module in model.modules() if isinstance(module, TopKRouter)]
            self._routers += sorted(found, key=lambda router: router.layer_number or 0)
        self._calls: list[list[tuple[bool, torch.Tensor]]] = [[] for _ in self._routers]
        for router, calls in zip(self._routers, self._calls, strict=True):
            router.register_forward_hook(
                lambda _m, _i, out, calls=calls: calls.append(
                    (torch.is_grad_enabled(), out[1].detach().clone())
                )
            )

    def check(self, steps: Sequence[Sequence[MicroBatch]], *, recomputed: bool) -> int:
        """How many calls there were since the last check: an old-policy pass over all
        micro-batches, then each step.

        Recomputation runs each forward of a step without gradients, and once more with them. Raises
        `AssertionError`.
        """
        every = [batch.packed for step in steps for batch in step]
        compared = 0
        for column, calls in enumerate(self._calls):
            forced = [batch.routes[:, column].long() for batch in every if batch.routes is not None]
            assert len(forced) == len(every)
            expected = {False: [*forced, *(forced if recomputed else ())], True: forced}
            for grad, routes in expected.items():
                maps = [found for with_grad, found in calls if with_grad is grad]
                assert len(maps) == len(routes), (
                    f"router {column}: {len(maps)} calls for {len(routes)} micro-batches"
                )
                for index, (found, wanted) in enumerate(zip(maps, routes, strict=True)):
                    given = torch.zeros_like(found).scatter(1, wanted, True)
                    assert torch.equal(found, given), (
                        f"router {column}, call {index}, gradients {grad}: other experts"
                    )
                compared += len(maps)
            calls.clear()
        return compared

    def gradients(self) -> list[float]:
        """The norm of each router's gradient on this rank."""
        return [float(router.weight.main_grad.norm()) for router in self._routers]
