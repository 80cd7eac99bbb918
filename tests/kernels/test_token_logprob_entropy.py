"""Log-probability and entropy: the reference by gradcheck, the CPU path against the reference in
float64.

Stated tolerances of the float32 paths: values 4e-6 · (1 + |value|), gradients 4e-6 of the row's
upstream gradient plus the rounding of the logits' own dtype.
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from espo_kernels import token_logprob_entropy
from tests.kernels.processes import importable

ROUNDING = {torch.float32: 1e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def both(
    logits: torch.Tensor, targets: torch.Tensor, backend: str = "auto", **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, gradient of a fixed mixture of both) in the logits' dtype."""
    logits = logits.clone().requires_grad_()
    rng = torch.Generator().manual_seed(0)
    logprob, entropy = token_logprob_entropy(
        logits, targets, entropy_grad=True, backend=backend, **options
    )
    weights = torch.randn(2, len(targets), generator=rng, dtype=torch.float64).to(logprob.dtype)
    (weights[0] @ logprob + weights[1] @ entropy).backward()
    return logprob.detach(), entropy.detach(), logits.grad


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(2, 7),
    st.integers(0, 2),
    st.floats(0.3, 3.0),
    st.integers(0, 1000),
)
def test_reference_passes_gradcheck(
    tokens: int, vocabulary: int, padding: int, temperature: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(
        tokens, vocabulary + padding, generator=rng, dtype=torch.float64, requires_grad=True
    )
    targets = torch.randint(vocabulary, (tokens,), generator=rng)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob_entropy(
            x, targets, temperature=temperature, vocab_size=vocabulary, entropy_grad=True
        )

    assert torch.autograd.gradcheck(function, (logits,))


def test_reference_equals_the_definition() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 99.0]], dtype=torch.float64)
    p = torch.tensor([1.0, torch.e**0.5, torch.e], dtype=torch.float64)
    p /= p.sum()
    logprob, entropy = token_logprob_entropy(
        logits, torch.tensor([1]), temperature=2.0, vocab_size=3
    )
    torch.testing.assert_close(logprob, p[1:2].log())
    torch.testing.assert_close(entropy, -(p * p.log()).sum().unsqueeze(0))


def assert_results_close(
    results: Sequence[torch.Tensor], reference: Sequence[torch.Tensor], rounding: float
) -> None:
    """Compare (logprob, entropy, gradient). rounding: relative error of the gradient's dtype."""
    tolerances = (4e-6, 4e-6, rounding + 2e-5)
    for values, exact, rtol in zip(results, reference, tolerances, strict=True):
        torch.testing.assert_close(values.double(), exact, rtol=rtol, atol=4e-6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 5),
    st.sampled_from([1, 2, 17, 4096, 5000]),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 100.0, 1000.0]),
    st.sampled_from([0.0, 1.0, 30.0]),
    st.sampled_from([1.0, 0.6]),
    st.integers(0, 2**31 - 1),
)
def test_cpu_path_equals_the_reference(
    tokens: int,
    vocabulary: int,
    padding: int,
    dtype: torch.dtype,
    offset: float,
    spread: float,
    temperature: float,
    seed: int,
) -> None:
    """Spread 0 is the uniform distribution (ties), spread 30 has entropies near 0."""
    rng = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, vocabulary + padding, generator=rng) * spread + offset).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=rng)
    options = {"temperature": temperature, "vocab_size": vocabulary}
    results = both(logits, targets, "cpu", **options)
    reference = both(logits.double(), targets, "reference", **options)
    gradient = results[2]
    assert gradient.dtype == dtype
    assert_results_close(results, reference, ROUNDING[dtype])
    assert not gradient[:, vocabulary:].any()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_minus_infinity_is_probability_zero(backend: str) -> None:
    logits = torch.randn(3, 5000)
    logits[:, :4500] = -torch.inf
    targets = torch.tensor([4600, 4700, 4999])
    logprob, entropy, gradient = both(logits, targets, backend)
    reference = both(logits[:, 4500:].double(), targets - 4500, "reference")
    torch.testing.assert_close(logprob.double(), reference[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), reference[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient[:, 4500:].double(), reference[2], rtol=1e-5, atol=1e-6)
    assert gradient[:, :4500].abs().max() < 1e-30


def test_entropy_has_no_gradient_by_default() -> None:
    logits = torch.randn(2, 9, requires_grad=True)
    for backend in ("reference", "cpu"):
        _, entropy = token_logprob_entropy(logits, torch.tensor([1, 2]), backend=backend)
        assert not entropy.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_can_overwrite_the_logits_once(dtype: torch.dtype) -> None:
    leaf = torch.randn(4, 300, dtype=dtype)
    targets = torch.arange(4)
    _, _, reference = both(leaf, targets)
    leaf_logits = leaf.clone().requires_grad_()
    logits = leaf_logits * 1.0
    storage = logits.data_ptr()
    rng = torch.Generator().manual_seed(0)
    logprob, entropy = token_logprob_entropy(
        logits, targets, entropy_grad=True, inplace_backward=True
    )
    weights = torch.randn(2, 4, generator=rng, dtype=torch.float64).float()
    pointers: list[int] = []
    logits.register_hook(lambda gradient: pointers.append(gradient.data_ptr()))
    loss = weights[0] @ logprob + weights[1] @ entropy
    loss.backward(retain_graph=True)
    assert pointers == [storage]
    assert torch.equal(leaf_logits.grad, reference)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_strided_logits_are_copied_not_misread() -> None:
    wide = torch.randn(6, 40)
    targets = torch.arange(6)
    for view in (wide[:, :20], wide[:, ::2], wide.t()[:6, :6]):
        reference = both(view.contiguous(), targets)
        for mine, theirs in zip(both(view, targets, inplace_backward=True), reference, strict=True):
            assert torch.equal(mine, theirs)


def test_threads_do_not_change_the_result() -> None:
    logits = torch.randn(40, 40_000)
    targets = torch.arange(40)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(both(logits, targets))
    finally:
        torch.set_num_threads(threads)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)


PEAK = """
import torch
from bench.measure import extra_peak_bytes
from espo_kernels import token_logprob_entropy

logits = torch.randn(512, 32768, requires_grad=True)
targets = torch.zeros(512, dtype=torch.long)

def run():
    logprob, _ = token_logprob_entropy(logits, targets)
    return torch.autograd.grad(logprob.sum(), logits)

run()
peak = extra_peak_bytes(run, torch.device("cpu"))
print("unknown" if peak is None else peak / logits.nbytes)
"""


@pytest.mark.slow
def test_forward_and_backward_need_little_more_than_the_gradient() -> None:
    """Peak memory beyond the logits, as a multiple of them: the gradient is 1.0."""
    process = subprocess.run(
        [sys.executable, "-c", PEAK],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=importable(),
    )
    if process.stdout.strip() == "unknown":
        pytest.skip("the system does not report a process's peak memory")
    assert 0.9 <= float(process.stdout) <= 1.2
