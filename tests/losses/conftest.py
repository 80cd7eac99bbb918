"""Random inputs of losses."""

from collections.abc import Callable, Sequence

import pytest
import torch

from megatron_rl.losses import ResponseTokens


@pytest.fixture
def make_response() -> Callable[..., tuple[torch.Tensor, ResponseTokens]]:
    """Return a function that makes (logprobs, response) of sequences from a seed."""

    def build(
        lengths: Sequence[int],
        seed: int = 0,
        *,
        spread: float = 0.3,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[torch.Tensor, ResponseTokens]:
        generator = torch.Generator().manual_seed(seed)
        total = sum(lengths)

        def normal(scale: float) -> torch.Tensor:
            return (torch.randn(total, generator=generator, dtype=torch.float64) * scale).to(dtype)

        advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
        old = -normal(1.0).abs()
        response = ResponseTokens(
            old_logprobs=old,
            old_entropies=normal(1.0).abs(),
            rollout_logprobs=old + normal(0.05),
            advantages=advantages.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(
                dtype
            ),
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        )
        return (old + normal(spread)).requires_grad_(), response

    return build
