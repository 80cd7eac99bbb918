"""The Triton kernels of `token_logprob_entropy` against the reference in float64."""

from collections.abc import Sequence

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from espo_kernels import token_logprob_entropy

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # the interpreter is too slow for it
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter truncates when it stores bfloat16; a GPU rounds.
ROUNDING = {torch.float32: 1e-7, torch.bfloat16: 2**-7, torch.float16: 2**-11}


def both(
    logits: torch.Tensor,
    targets: torch.Tensor,
    backend: str,
    entropy_grad: bool = True,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    logprob, entropy = token_logprob_entropy(
        logits, targets, entropy_grad=entropy_grad, backend=backend, **options
    )
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(2, len(targets), generator=rng).to(logprob)
    (weights[0] @ logprob + (weights[1] @ entropy if entropy_grad else 0)).backward()
    return logprob.detach(), entropy.detach(), logits.grad


def assert_results_close(
    results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], rounding: float
) -> None:
    """Compare (logprob, entropy, gradient). rounding: relative error of the gradient's dtype."""
    tolerances = (4e-6, 4e-6, rounding + 2e-5)
    for values, exact, rtol in zip(results, reference, tolerances, strict=True):
        torch.testing.assert_close(values.double(), exact, rtol=rtol, atol=4e-6)


@settings(max_examples=12, deadline=None, phases=NO_SHRINKING)
@given(
    st.integers(1, 3),
    st.sampled_from([1, 2, 100, 4096, 4100, 9000]),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 100.0, 1000.0]),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_equals_the_reference(
    tokens: int,
    vocabulary: int,
    padding: int,
    dtype: torch.dtype,
    offset: float,
    spread: float,
    entropy_grad: bool,
    seed: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, vocabulary + padding, generator=rng) * spread + offset).to(
        DEVICE, dtype
    )
    targets = torch.randint(vocabulary, (tokens,), generator=rng).to(DEVICE)
    options = {"temperature": 0.7, "vocab_size": vocabulary, "entropy_grad": entropy_grad}
    results = both(logits, targets, "triton", **options)
    reference = both(logits.double(), targets, "reference", **options)
    gradient = results[2]
    assert gradient.dtype == dtype
    assert_results_close(results, reference, ROUNDING[dtype])
    assert not gradient[:, vocabulary:].any()


def test_narrow_targets_are_read_correctly() -> None:
    logits = torch.randn(2, 300, device=DEVICE)
    targets = torch.tensor([5, 127], device=DEVICE)
    reference = token_logprob_entropy(logits, targets, backend="triton")[0]
    assert torch.equal(
        token_logprob_entropy(logits, targets.to(torch.int8), backend="triton")[0], reference
    )


def test_minus_infinity_is_probability_zero() -> None:
    logits = torch.randn(2, 5000, device=DEVICE)
    logits[:, :4500] = -torch.inf
    targets = torch.tensor([4600, 4999], device=DEVICE)
    result = both(logits, targets, "triton")
    reference = both(logits[:, 4500:].double(), targets - 4500, "reference")
    torch.testing.assert_close(result[0].double(), reference[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result[1].double(), reference[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result[2][:, 4500:].double(), reference[2], rtol=1e-5, atol=1e-6)


def test_gradient_can_overwrite_the_logits() -> None:
    leaf = torch.randn(2, 5000, device=DEVICE)
    targets = torch.tensor([3, 4999], device=DEVICE)
    leaf_logits = leaf.clone().requires_grad_()
    logits = leaf_logits * 1.0
    logprob, _ = token_logprob_entropy(logits, targets, inplace_backward=True, backend="triton")
    pointers: list[int] = []
    logits.register_hook(lambda gradient: pointers.append(gradient.data_ptr()))
    storage = logits.data_ptr()
    logprob.sum().backward()
    assert pointers == [storage]
    reference = leaf.double().requires_grad_()
    token_logprob_entropy(reference, targets)[0].sum().backward()
    torch.testing.assert_close(leaf_logits.grad.double(), reference.grad, rtol=1e-5, atol=1e-6)


def test_shards_merge_into_the_whole() -> None:
    """Two shards pass through the kernel and the merge, without processes."""
    from espo_kernels.token_logprob_entropy import triton_kernels
    from espo_kernels.token_logprob_entropy.vocabulary import merge_shards

    logits = torch.randn(3, 12, device=DEVICE) * 4
    targets = torch.tensor([0, 6, 9], device=DEVICE)
    partials = []
    for rank in range(2):
        columns = logits[:, 6 * rank : 6 * rank + 6].contiguous()
        out = torch.empty(4, 3, device=DEVICE)
        triton_kernels.logprob_entropy_kernel[(3,)](
            columns, targets, out, 3, 6, 6 * rank, 6 - 2 * rank, 1.25, PARTIAL=True, BLOCK=8
        )
        partials.append(out)
    merged_softmax = merge_shards(partials, targets, 6, 1.25)
    reference = token_logprob_entropy(logits.double(), targets, temperature=0.8, vocab_size=10)
    torch.testing.assert_close(merged_softmax.logprob.double(), reference[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged_softmax.entropy.double(), reference[1], rtol=1e-5, atol=1e-6)
