"""Moves of tokens to their experts and back: Megatron's results without atomic additions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

TOKENS = 7
EXPERTS = 6
TOPK = 3
HIDDEN = 5
ATOMIC_OPERATIONS = ("scatter_add", "index_add", "index_put")


def make_routing() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a routing map and its probabilities, both [tokens, experts]."""
    scores = torch.rand(
        TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    routing_map.scatter_(1, scores.topk(TOPK).indices, True)
    return routing_map, scores.masked_fill(~routing_map, 0.0)


def permute_and_unpermute(permute: Any, unpermute: Any) -> tuple[torch.Tensor, ...]:
    """Return the sums, and the gradients of tokens and probabilities."""
    routing_map, scores = make_routing()
    tokens = torch.randn(
        TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    tokens.requires_grad_()
    scores.requires_grad_()
    rows, probs, sources, *_ = permute(
        tokens, routing_map, probs=scores, num_out_tokens=TOKENS * TOPK, fused=False
    )
    factors = torch.arange(len(rows), dtype=torch.float64)[:, None]  # another one for each row
    out = unpermute(
        (rows * factors).sin() * probs[:, None],
        sources,
        tokens.shape,
        routing_map=routing_map,
        fused=False,
    )
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (out.detach(), *torch.autograd.grad(out, (tokens, scores), seed))


def test_results_and_gradients_match_megatron(megatron: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from megatron_rl.mcore.layers.deterministic_permute import (
        deterministic_permute,
        deterministic_unpermute,
    )

    megatron_results = permute_and_unpermute(permute, unpermute)
    results = permute_and_unpermute(
        deterministic_permute(permute), deterministic_unpermute(unpermute)
    )
    assert all(float(t.abs().max()) > 0 for t in megatron_results)
    for ours, theirs in zip(results, megatron_results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def has_places_of_their_own(name: str, arguments: Any) -> bool:
    """True if the operation puts each number into another place, so that nothing is added."""
    if not name.startswith("aten.index_put"):
        return False
    (places,) = arguments[1]
    return len(places.unique()) == len(places)


def test_no_atomic_addition_is_called(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that add rows into a shared place fail in this test."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from megatron_rl.mcore.layers.deterministic_permute import (
        deterministic_permute,
        deterministic_unpermute,
    )

    class NoScatter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(func)
            is_atomic = any(part in name for part in ATOMIC_OPERATIONS)
            assert not (is_atomic and not has_places_of_their_own(name, args)), name
            return func(*args, **(kwargs or {}))

    with NoScatter():
        permute_and_unpermute(deterministic_permute(permute), deterministic_unpermute(unpermute))
    with pytest.raises(AssertionError, match="add"), NoScatter():
        permute_and_unpermute(permute, unpermute)


def test_empty_input_uses_the_functions_of_megatron(megatron: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from megatron_rl.mcore.layers.deterministic_permute import (
        deterministic_permute,
        deterministic_unpermute,
    )

    routing_map, scores = make_routing()
    rows, _, sources, *_ = deterministic_permute(permute)(
        torch.zeros(0, HIDDEN), routing_map[:0], probs=scores[:0], num_out_tokens=0
    )
    assert rows.shape == (0, HIDDEN)
    tokens = deterministic_unpermute(unpermute)(rows, sources, torch.Size((0, HIDDEN)))
    assert tokens.shape == (0, HIDDEN)


def test_a_second_installation_wraps_nothing_twice(
    megatron: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    from megatron_rl.mcore import compat

    for name in ("permute", "unpermute"):
        monkeypatch.setattr(token_dispatcher, name, getattr(token_dispatcher, name))
    originals = (token_dispatcher.permute, token_dispatcher.unpermute)
    monkeypatch.setattr(compat, "is_patched", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compat.install()
    first = (token_dispatcher.permute, token_dispatcher.unpermute)
    assert first[0] is not originals[0] and first[1] is not originals[1]
    compat.install()
    assert (token_dispatcher.permute, token_dispatcher.unpermute) == first
