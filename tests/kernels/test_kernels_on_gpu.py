"""Tests on a GPU: no host synchronisation, few launches, CUDA graphs, devices, the debug switch.

The values themselves are checked by `triton/`, which runs compiled where there is a GPU.
"""

from collections.abc import Callable

import pytest
import torch

from espo_kernels import (
    espo_groups,
    espo_policy_loss,
    quantize_fp8_blockwise,
    token_logprob_entropy,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def objective_step() -> Callable[[], torch.Tensor]:
    """Launches: six for the groups, two for the loss, torch's own ones, one for the gradient."""
    lengths = torch.tensor([3000, 1, 500])
    cu_seqlens = torch.tensor([0, 3000, 3001, 3501], device="cuda")
    tokens = int(lengths.sum())
    entropies = torch.rand(tokens, device="cuda")
    old = -torch.rand(tokens, device="cuda")
    new = (old + 0.01 * torch.randn(tokens, device="cuda")).requires_grad_()
    advantages = torch.randn(3, device="cuda").repeat_interleave(lengths.cuda())

    def step() -> torch.Tensor:
        groups = espo_groups(entropies, cu_seqlens, vocab_size=1000)
        loss, _ = espo_policy_loss(new, old, advantages, cu_seqlens, groups)
        return torch.autograd.grad(loss, new)[0]

    return step


def logprob_step() -> Callable[[], torch.Tensor]:
    logits = torch.randn(64, 5000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(4900, (64,), device="cuda")
    ones = torch.ones(64, device="cuda")

    def step() -> torch.Tensor:
        logprob, _ = token_logprob_entropy(logits, targets, vocab_size=4900)
        return torch.autograd.grad(logprob, logits, ones)[0]

    return step


def quantize_step() -> Callable[[], torch.Tensor]:
    weight = torch.randn(4, 300, 400, device="cuda", dtype=torch.bfloat16)
    return lambda: quantize_fp8_blockwise(weight)[1]


@pytest.mark.parametrize(
    ("make", "launches"), [(objective_step, 10), (logprob_step, 2), (quantize_step, 1)]
)
def test_no_synchronisation_and_few_launches(
    make: Callable[[], Callable[[], torch.Tensor]], launches: int
) -> None:
    step = make()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    kernels = [
        e
        for e in profile.events()
        if "Memset" not in e.name and e.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(kernels) <= launches, [event.name for event in kernels]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no second GPU")
@pytest.mark.parametrize("make", [objective_step, logprob_step, quantize_step])
def test_tensors_may_be_on_another_gpu_than_the_current_one(
    make: Callable[[], Callable[[], torch.Tensor]],
) -> None:
    with torch.cuda.device(1):
        step = make()
        reference = step()
    assert torch.cuda.current_device() == 0
    assert torch.equal(step(), reference)


@pytest.mark.parametrize("make", [objective_step, logprob_step, quantize_step])
def test_a_cuda_graph_replays_the_step(make: Callable[[], Callable[[], torch.Tensor]]) -> None:
    step = make()
    reference = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replay_output = step()
    graph.replay()
    assert torch.equal(replay_output, reference)


def test_values_are_checked_only_behind_the_debug_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, 8), float("nan"), device="cuda")
    targets = torch.tensor([9], device="cuda")
    logprob, entropy = token_logprob_entropy(logits, targets)
    assert logprob.isnan().all()
    assert entropy.isnan().all()
    monkeypatch.setenv("ESPO_KERNELS_DEBUG", "1")
    with pytest.raises(ValueError, match=r"targets\[0\] is 9"):
        token_logprob_entropy(logits, targets)
    with pytest.raises(ValueError, match=r"logits\[0\] has NaN"):
        token_logprob_entropy(logits, torch.tensor([0], device="cuda"))


def test_float64_is_checked_without_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference serves it, and synchronises anyway."""
    monkeypatch.delenv("ESPO_KERNELS_DEBUG", raising=False)
    logits = torch.full((1, 8), float("nan"), device="cuda", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"logits\[0\] has NaN"):
        token_logprob_entropy(logits, torch.tensor([0], device="cuda"))
    entropies = torch.ones(5, device="cuda", dtype=torch.float64)
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 4"):
        espo_groups(entropies, torch.tensor([0, 2, 4], device="cuda"), vocab_size=9)
