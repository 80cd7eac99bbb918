"""The Triton kernels as machine code for GPUs, at the benchmark's sizes, without a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.processes import ROOT

pytest.importorskip("triton")
# Modules of other tests replace functions of torch, and a cold cache of Triton costs a minute
pytestmark = pytest.mark.nightly

# With more registers, an SM would hold fewer programs. Kernels with fewer programs than a GPU has
# SMs have looser bounds.
MOST_REGISTERS = {
    "logprob_entropy_kernel": {90: 64, 100: 80},
    "logits_gradient_kernel": {90: 32, 100: 32},
    "espo_digits_kernel": {90: 64, 100: 64},
    "espo_groups_kernel": {90: 128, 100: 128},
    "espo_widths_kernel": {90: 64, 100: 64},
    "espo_sequence_kernel": {90: 128, 100: 128},
    "espo_reduction_kernel": {90: 40, 100: 40},
    "scale_gradient_kernel": {90: 32, 100: 32},
    "quantize_fp8_blockwise_kernel": {90: 168, 100: 240},
}
KERNELS = ROOT / "kernels" / "espo_kernels"


@pytest.fixture(autouse=True)
def bench_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "kernels"))


def compiled_cases(capability: int) -> list[Any]:
    from bench.compiled import compile_cases

    return list(compile_cases(capability))


def assert_kernels_fit(cases: list[Any], capability: int) -> None:
    kernels = [kernel for case in cases for kernel in case.kernels]
    assert {kernel.kernel for kernel in kernels} == set(MOST_REGISTERS)
    assert {k.kernel: k.stack_bytes for k in kernels if k.stack_bytes} == {}
    crowds = {
        k.kernel: k.registers for k in kernels if k.registers > MOST_REGISTERS[k.kernel][capability]
    }
    assert crowds == {}


def test_kernels_for_hopper_spill_nothing_and_move_the_bytes_of_the_formula() -> None:
    """`compile_cases` raises for a kernel that moves other bytes than `traffic_of` says."""
    cases = compiled_cases(90)
    assert_kernels_fit(cases, 90)
    by_part = {case.part: case for case in cases}
    # Beside the logits, only a row's few numbers move.
    for part in ("forward", "forward + backward", "gate and up", "down"):
        case = by_part[part]
        assert case.formula_bytes <= case.num_bytes <= 1.0001 * case.formula_bytes
    assert [by_part[part].launches for part in ("forward", "forward + backward")] == [1, 2]
    assert by_part["loss + gradient"].num_bytes == pytest.approx(30 * 1_371_552, rel=1e-3)
    # Counts and sums of all parts are four passes over 2 MB, at most.
    assert by_part["grouping"].num_bytes == pytest.approx(21 * 1_371_552, abs=1.2e7)
    assert by_part["grouping"].launches == 6


def test_kernels_for_blackwell_spill_nothing_and_the_documented_table_is_the_printed_one() -> None:
    import triton
    from bench.compiled_report import case_table, kernel_table

    cases = {capability: compiled_cases(capability) for capability in (90, 100)}
    assert_kernels_fit(cases[100], 100)
    if triton.__version__ == "3.9.0":
        page = (ROOT / "docs" / "measurements.md").read_text().splitlines()
        missing = [row for row in [*kernel_table(cases), *case_table(cases[90])] if row not in page]
        assert missing == []


def changed_module(tmp_path: Path, source: Path, old: str, new: str) -> Any:
    """A module of kernels with one change of its text."""
    text = source.read_text()
    assert text.count(old) == 1
    path = tmp_path / f"changed_{source.stem}.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launches() -> Iterator[list[Any]]:
    from bench.gpu_stand_in import gpu_stand_in

    with gpu_stand_in(90) as launches:
        yield launches


def test_a_kernel_that_reads_its_output_once_more_is_named(
    tmp_path: Path, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.compiled import WrongTraffic, compiled_kernel

    from espo_kernels import token_logprob_entropy
    from espo_kernels.token_logprob_entropy import triton_launch

    module = changed_module(
        tmp_path,
        KERNELS / "token_logprob_entropy" / "triton_kernels.py",
        "    upstream = tl.load(grad_logprob + row)\n",
        "    upstream = tl.load(grad_logprob + row)\n"
        "    x += tl.load(out + row * columns + column, mask=inside, other=0.0).to(tl.float32)\n",
    )
    monkeypatch.setattr(triton_launch, "logits_gradient_kernel", module.logits_gradient_kernel)
    device = torch.device("cuda", 0)
    logits = torch.empty(64, 8192, dtype=torch.bfloat16, device=device).requires_grad_()
    targets = torch.empty(64, dtype=torch.long, device=device)
    token_logprob_entropy(logits, targets)[0].sum().backward()
    backward = next(
        one for one in launches if getattr(one, "kernel", "") == "logits_gradient_kernel"
    )
    with pytest.raises(WrongTraffic, match="logits_gradient_kernel reads 2 bytes of out for each"):
        compiled_kernel(backward)


@pytest.mark.parametrize("has_mask", [False, True])
def test_grouping_passes_over_the_tokens_five_times(launches: list[Any], has_mask: bool) -> None:
    """Four levels of a radix search read every entropy, and a mask beside it; the last pass writes
    the groups.
    """
    from bench.compiled import compiled_kernel

    from espo_kernels import espo_groups

    device = torch.device("cuda", 0)
    espo_groups(
        torch.empty(9000, device=device),
        torch.empty(4, dtype=torch.long, device=device),
        vocab_size=1000,
        loss_mask=torch.empty(9000, dtype=torch.bool, device=device) if has_mask else None,
    )
    kernels = [compiled_kernel(one) for one in launches]
    assert [kernel.element_bytes for kernel in kernels] == [4 + has_mask] * 4 + [5 + has_mask, 0]
    assert [kernel.programs for kernel in kernels] == [15] * 5 + [3]


def test_a_pass_too_many_over_the_entropies_is_named(
    tmp_path: Path, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench.compiled import WrongTraffic, compiled_kernel

    from espo_kernels import espo_groups
    from espo_kernels.espo_groups import triton_kernel

    loop = "    for at in range(begin, end, BLOCK):\n        _token"
    module = changed_module(
        tmp_path,
        KERNELS / "espo_groups" / "triton_kernel.py",
        loop,
        "    for at in range(begin, end, BLOCK):\n"
        "        token = at + tl.arange(0, BLOCK)\n"
        "        histogram += tl.sum(tl.load(entropies + token).to(tl.int32), axis=0)\n"
        f"{loop}",
    )
    monkeypatch.setattr(triton_kernel, "espo_digits_kernel", module.espo_digits_kernel)
    device = torch.device("cuda", 0)
    espo_groups(
        torch.empty(9000, device=device),
        torch.empty(4, dtype=torch.long, device=device),
        vocab_size=1000,
    )
    with pytest.raises(WrongTraffic, match="reads 8 bytes of entropies"):
        compiled_kernel(launches[0])


def test_tensors_of_another_gpu_than_the_current_one_are_served_there() -> None:
    from bench.compiled import objective_cases, quantize_cases
    from bench.gpu_stand_in import TritonLaunch, gpu_stand_in

    from espo_kernels import token_logprob_entropy

    device = torch.device("cuda", 0)
    with gpu_stand_in(90, tensor_device=1) as launches:
        for case in (
            *objective_cases(device, 4, 512),
            *quantize_cases(device, 2, with_peers=False),
        ):
            case.implementations[0].run()
        targets = torch.empty(64, dtype=torch.long, device=device)
        token_logprob_entropy(torch.empty(64, 8192, device=device), targets)
    places = {one.kernel: one.device for one in launches if isinstance(one, TritonLaunch)}
    # Autograd saves logits as plain tensors, which are on no GPU here.
    names = MOST_REGISTERS.keys() - {"logits_gradient_kernel"}
    assert places == dict.fromkeys(names, 1)


@pytest.mark.parametrize(
    ("denominator", "has_mask", "bytes_of_a_token"),
    [
        ("current", False, {"espo_group_sums_kernel": 13, "espo_sequence_kernel": 22}),
        ("old", True, {"espo_group_sums_kernel": 14, "espo_sequence_kernel": 18}),
    ],
)
def test_context_parallel_loss_moves_the_bytes_of_the_formula(
    launches: list[Any], denominator: str, has_mask: bool, bytes_of_a_token: dict[str, float]
) -> None:
    from bench.compiled import compiled_kernel

    from espo_kernels.espo_policy_loss.inputs import LossInputs
    from espo_kernels.espo_policy_loss.triton_launch import loss_triton

    class SecondRank(LossInputs):
        """A rank of a context-parallel group whose sums go nowhere."""

        counts_groups = False

        def all_reduced(self, sums: torch.Tensor) -> torch.Tensor:
            return sums

    device = torch.device("cuda", 0)
    logprobs, old_logprobs, advantages = (torch.empty(9000, device=device) for _ in range(3))
    inputs = SecondRank(
        old_logprobs=old_logprobs,
        advantages=advantages,
        cu_seqlens=torch.empty(4, dtype=torch.long, device=device),
        group_id=torch.empty(9000, dtype=torch.uint8, device=device),
        clip=torch.empty(3, 2, device=device),
        loss_mask=torch.empty(9000, dtype=torch.bool, device=device) if has_mask else None,
        ratio_denominator=denominator,
        num_sequences=None,
        cp_group=object(),
    )
    loss_triton(logprobs, inputs)
    kernels = [compiled_kernel(one) for one in launches if hasattr(one, "kernel")]
    by_name = {kernel.kernel: kernel for kernel in kernels}
    assert {name: by_name[name].element_bytes for name in bytes_of_a_token} == bytes_of_a_token
    assert [kernel.stack_bytes for kernel in kernels] == [0, 0, 0]


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [(64, 256, 32, 4), (65, 256, 32, 3), (32, 128, 0, 16), (16, 32, 0, 32), (16, 64, 100_000, 2)],
)
def test_resident_blocks_follow_the_tightest_limit(
    registers: int, threads: int, shared_bytes: int, blocks: int
) -> None:
    from bench.gpu_limits import resident_blocks

    assert resident_blocks(registers, threads, shared_bytes) == blocks


def test_code_whose_traffic_cannot_be_counted_is_refused() -> None:
    from bench.ptx import UnknownCode, read_accesses

    ptx = ".entry k(\n) {\n  cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 16;\n  ret;\n}"
    with pytest.raises(UnknownCode, match="only plain loads"):
        read_accesses(ptx)
