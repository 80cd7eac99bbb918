"""The kernels as compiled for a GPU: registers, occupancy, bytes, and launches of each operation.

Nothing here is measured. Every launch is one that the benchmark's own functions make, recorded at
full size without a GPU.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_limits import occupancy
from bench.gpu_stand_in import Launch, TorchLaunch, TritonLaunch, gpu_stand_in
from bench.implementation import BenchmarkCase
from bench.logprob_cases import logprob_cases
from bench.objective_cases import objective_cases
from bench.ptx import Access, read_accesses
from bench.quantize_cases import quantize_cases

Passes = Mapping[str, float]
_REST = ", rest"
_SMALL = frozenset({"cu_seqlens", "histograms", "edges", "sums", "members", "clip", "count"})


@dataclass(frozen=True)
class Traffic:
    """The passes of a kernel over its arguments, as its author counts them.

    element: what one entry of the argument `over` is called. reads, writes: passes by argument.
    block_dims: a program without a loop handles BLOCK ** block_dims elements. small: arguments with
    a few entries for each sequence or program, which are not counted by element.
    """

    element: str
    over: str
    reads: Passes
    writes: Passes
    block_dims: int = 1
    small: frozenset[str] = frozenset()


class WrongTraffic(Exception):
    """The machine code moves other bytes than `Traffic` says."""


@dataclass(frozen=True)
class CompiledKernel:
    """One Triton launch as machine code.

    stack_bytes: of a thread; spilled registers would be here. shared_bytes: of a program.
    occupancy: share of an SM's threads in use. element_bytes: read and written for an element, in
    the machine code. num_bytes: of all elements, and of the small tensors once.
    """

    kernel: str
    programs: int
    threads: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    occupancy: float
    element: str
    element_bytes: float
    num_bytes: int


@dataclass(frozen=True)
class CompiledCase:
    """One benchmark case.

    formula_bytes: what a perfect implementation moves, as in measured rows. torch_launches: kernels
    of torch's in between, with the bytes of their results.
    """

    operation: str
    part: str
    shape: str
    dtype: str
    formula_bytes: int
    kernels: tuple[CompiledKernel, ...]
    torch_launches: tuple[TorchLaunch, ...]

    @property
    def launches(self) -> int:
        return len(self.kernels) + len(self.torch_launches)

    @property
    def num_bytes(self) -> int:
        """Bytes that all launches move if no cache keeps any."""
        kernels = sum(kernel.num_bytes for kernel in self.kernels)
        return kernels + sum(launch.num_bytes for launch in self.torch_launches)


def traffic_of(launch: TritonLaunch) -> Traffic:
    """The traffic that a kernel should have. Raises KeyError for an unknown kernel."""
    constants = launch.constants
    masks = 1 if constants.get("MASK") else 0
    tokens = {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "group_id": 1}
    match launch.kernel:
        case "logprob_entropy_kernel":
            return Traffic("logit", "logits", {"logits": 1}, {})
        case "logits_gradient_kernel":
            return Traffic("logit", "logits", {"logits": 1}, {"out": 1})
        case "espo_digits_kernel" | "espo_groups_kernel" | "espo_widths_kernel":
            return _grouping_traffic(launch.kernel, masks)
        case "espo_group_sums_kernel":
            reads = {**tokens, "loss_mask": masks}
            return Traffic("token", "logprobs", reads, {}, small=_SMALL)
        case "espo_sequence_kernel":
            return _sequence_traffic(constants, masks)
        case "espo_reduction_kernel":
            counts = 1 if constants["DENOMINATOR"] == "counted" else 0
            reads = {"statistics": 10 * constants["K"], "has_advantage": counts}
            return Traffic("sequence", "has_advantage", reads, {})
        case "scale_gradient_kernel":
            return Traffic("token", "gradient", {"gradient": 1}, {"out": 1})
        case "quantize_fp8_blockwise_kernel":
            return Traffic("weight", "weight", {"weight": 1}, {"fp8": 1}, block_dims=2)
    raise KeyError(f"{launch.kernel}: add its passes to traffic_of")


def _grouping_traffic(kernel: str, masks: int) -> Traffic:
    reads = {"entropies": 1, "mask": masks}
    if kernel == "espo_widths_kernel":
        return Traffic("sequence", "cu_seqlens", {}, {}, small=_SMALL)
    writes = {"group_id": 1} if kernel == "espo_groups_kernel" else {}
    return Traffic("token", "entropies", reads, writes, small=_SMALL)


def _sequence_traffic(constants: Mapping[str, Any], masks: int) -> Traffic:
    # The second pass stands alone if it needs no sums of the first one.
    is_old = constants["OLD_DENOMINATOR"]
    passes = 1 if is_old and constants["SHARED"] else 2
    ratio_passes = passes if is_old else 1
    reads = {
        "logprobs": ratio_passes,
        "old_logprobs": ratio_passes,
        "advantages": passes,
        "group_id": passes,
        "loss_mask": passes * masks,
    }
    return Traffic("token", "logprobs", reads, {"gradient": 1}, small=_SMALL)


def count_bytes(
    launch: TritonLaunch, traffic: Traffic
) -> tuple[dict[str, float], dict[str, float]]:
    """({argument: bytes of an element} that the machine code reads, the same for writes).

    The key "NAME, rest" counts the code for the elements behind the last whole block of a row. If
    it is a loop, its steps are smaller.
    """
    accesses = read_accesses(launch.binary.asm["ptx"])
    steps = _largest_steps(accesses)
    elements = launch.tensors[traffic.over].numel
    loads: dict[str, float] = defaultdict(float)
    stores: dict[str, float] = defaultdict(float)
    for access in accesses:
        name = launch.parameters[access.parameter]
        if name in traffic.small:
            continue
        amount = access.num_bytes * access.trips * 32 * launch.binary.metadata.num_warps
        sums = stores if access.is_store else loads
        largest = steps.get(access.parameter)
        if access.step is not None:
            sums[name if access.step == largest else name + _REST] += amount / access.step
        elif _is_for_elements(access, launch.tensors[name].numel, elements):
            block = launch.constants["BLOCK"] ** traffic.block_dims
            sums[name + _REST if largest else name] += amount / block
    return dict(loads), dict(stores)


def _largest_steps(accesses: Sequence[Access]) -> dict[int, int]:
    """The largest step of the loops over each parameter that has one."""
    steps: dict[int, int] = {}
    for access in accesses:
        if access.step is not None:
            steps[access.parameter] = max(access.step, steps.get(access.parameter, 0))
    return steps


def _is_for_elements(access: Access, numel: int, elements: int) -> bool:
    """False for loads of a row's few numbers."""
    return access.by_thread and numel >= elements


def require_traffic(launch: TritonLaunch, traffic: Traffic) -> float:
    """The bytes of an element. Raises `WrongTraffic` naming kernel, argument and both numbers."""
    loads, stores = count_bytes(launch, traffic)
    _require_passes(launch, "reads", loads, traffic.reads, traffic.element)
    _require_passes(launch, "writes", stores, traffic.writes, traffic.element)
    amounts = [*loads.items(), *stores.items()]
    return sum(amount for name, amount in amounts if not name.endswith(_REST))


def _require_passes(
    launch: TritonLaunch, verb: str, amounts: Mapping[str, float], passes: Passes, element: str
) -> None:
    formula = {
        name: times * launch.tensors[name].itemsize for name, times in passes.items() if times
    }
    for name in sorted(formula.keys() | amounts.keys()):
        amount = amounts.get(name, 0.0)
        right = formula.get(name.removesuffix(_REST), 0.0)
        if amount != right:
            raise WrongTraffic(
                f"{launch.kernel} {verb} {amount:g} bytes of {name} for each {element}, and "
                f"traffic_of says {right:g}. Remove the access, or correct traffic_of"
            )


def compile_cases(capability: int) -> Iterator[CompiledCase]:
    """Compile what the first implementation of each case launches.

    capability: of the GPU to compile for, 90 or 100.
    """
    with gpu_stand_in(capability) as launches:
        for case in benchmark_cases():
            launches.clear()
            case.implementations[0].run()
            yield _compiled_case(case, launches)


def _compiled_case(case: BenchmarkCase, launches: list[Launch]) -> CompiledCase:
    triton_launches = [one for one in launches if isinstance(one, TritonLaunch)]
    return CompiledCase(
        operation=case.operation,
        part=case.part,
        shape=case.shape,
        dtype=case.dtype,
        formula_bytes=case.bytes_moved,
        kernels=tuple(compiled_kernel(launch) for launch in triton_launches),
        torch_launches=tuple(one for one in launches if isinstance(one, TorchLaunch)),
    )


def compiled_kernel(launch: TritonLaunch) -> CompiledKernel:
    """The numbers of a launch. Raises `WrongTraffic` if its bytes are not the expected ones."""
    traffic = traffic_of(launch)
    element_bytes = require_traffic(launch, traffic)
    small = _small_tensors(launch, {*traffic.reads, *traffic.writes})
    registers, stack_bytes = _resources(launch.binary.asm["cubin"])
    threads = 32 * launch.binary.metadata.num_warps
    shared_bytes = launch.binary.metadata.shared
    return CompiledKernel(
        kernel=launch.kernel,
        programs=launch.programs,
        threads=threads,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=shared_bytes,
        occupancy=occupancy(registers, threads, shared_bytes),
        element=traffic.element,
        element_bytes=element_bytes,
        num_bytes=round(element_bytes * launch.tensors[traffic.over].numel) + small,
    )


def _small_tensors(launch: TritonLaunch, others: set[str]) -> int:
    """The bytes of the tensors that the machine code touches, except those named."""
    parameters = {access.parameter for access in read_accesses(launch.binary.asm["ptx"])}
    names = {launch.parameters[parameter] for parameter in parameters} - others
    return sum(launch.tensors[name].nbytes for name in names)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of the stack) of a thread."""
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers = re.search(r"REG:(\d+)", usage)
    stack = re.search(r"STACK:(\d+)", usage)
    local = re.search(r"LOCAL:(\d+)", usage)
    if registers is None or stack is None or local is None:
        raise RuntimeError(f"cuobjdump says nothing about registers: {usage!r}")
    return int(registers[1]), int(stack[1]) + int(local[1])


def benchmark_cases() -> Iterator[BenchmarkCase]:
    """The benchmark's cases at the sizes of a GPU, without the peers."""
    device = torch.device("cuda", 0)
    yield from logprob_cases(device, 16_384, 151_936, [torch.bfloat16], with_peers=False)
    yield from objective_cases(device, 64, 32_768)
    yield from quantize_cases(device, 128, with_peers=False)
