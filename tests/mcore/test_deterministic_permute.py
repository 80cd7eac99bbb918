"""Tokens to their experts and back: Megatron's own results and gradients, whatever order a GPU
would add in.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

TOKENS, EXPERTS, TOPK, HIDDEN = 7, 6, 3, 5


def routing() -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(
        TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    chosen = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(
        1, scores.topk(TOPK).indices, True
    )
    return chosen, scores.masked_fill(~chosen, 0.0)


def there_and_back(permute: Any, unpermute: Any) -> tuple[torch.Tensor, ...]:
    """The result, and the gradients of tokens and probabilities."""
    chosen, scores = routing()
    tokens = torch.randn(
        TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    tokens, scores = tokens.requires_grad_(), scores.requires_grad_()
    rows, probs, sources = permute(
        tokens, chosen, probs=scores, num_out_tokens=TOKENS * TOPK, fused=False
    )
    expert = torch.arange(len(rows), dtype=torch.float64)[
        :, None
    ]  # every row is changed by something of its own
    out = unpermute(
        (rows * expert).sin() * probs[:, None],
        sources,
        tokens.shape,
        routing_map=chosen,
        fused=False,
    )
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (out.detach(), *torch.autograd.grad(out, (tokens, scores), seed))


def test_results_and_gradients_are_megatron_s(megatron: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from megatron_rl.mcore.layers.deterministic_permute import (
        deterministic_permute,
        deterministic_unpermute,
    )

    expected = there_and_back(permute, unpermute)
    actual = there_and_back(deterministic_permute(permute), deterministic_unpermute(unpermute))
    assert all(float(t.abs().max()) > 0 for t in expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_no_atomic_addition_is_left(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that adds rows into a shared place is made to fail."""
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from megatron_rl.mcore.layers.deterministic_permute import (
        deterministic_permute,
        deterministic_unpermute,
    )

    class NoScatter(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            assert not any(
                part in func._schema.name for part in ("scatter_add", "index_add", "index_put")
            ), func
            return func(*args, **(kwargs or {}))

    with NoScatter():
        there_and_back(deterministic_permute(permute), deterministic_unpermute(unpermute))
    with pytest.raises(AssertionError, match="add"), NoScatter():
        there_and_back(permute, unpermute)


def test_no_token_and_dropped_tokens_are_left_to_megatron(megatron: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    from megatron_rl.mcore.layers.deterministic_permute import (
        deterministic_permute,
        deterministic_unpermute,
    )

    chosen, scores = routing()
    none, _, sources = deterministic_permute(permute)(
        torch.zeros(0, HIDDEN), chosen[:0], probs=scores[:0]
    )
    assert none.shape == (0, HIDDEN)
    assert deterministic_unpermute(unpermute)(none, sources, torch.Size((0, HIDDEN))).shape == (
        0,
        HIDDEN,
    )
