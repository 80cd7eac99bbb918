"""Contradictions between an engine and what the configuration assumes of it."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.server.command import RECORDING_RUNNER
from sglang_bridge.server.nccl import nccl_environment
from sglang_bridge.server.readiness import require_settings
from sglang_bridge.settings import ServerPlace, ServerSettings, kv_cache_slots, named_options
from tests.lab.engine_rehearsal.requests import EngineReply, RankLoad, TensorSpec, Transfer

_SCALE = "_scale_inv"
# Both ends of a group must agree on these, or its first collective hangs.
_SHARED_VARIABLES = frozenset(
    {
        "NCCL_ALGO",
        "NCCL_CUMEM_ENABLE",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_NVLS_ENABLE",
        "NCCL_PROTO",
    }
)


@dataclass(frozen=True)
class Finding:
    """A contradiction. subject: the setting, the option or the tensor. text: the rest of a line."""

    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


def argument_findings(
    reply: EngineReply, settings: ServerSettings, place: ServerPlace
) -> Iterator[Finding]:
    """Compare what SGLang makes of the arguments with what the run assumes."""
    for name in named_options():
        # The parser expands abbreviations, such as --tp.
        if not any(option.startswith(name) for option in reply.option_names):
            text = "SGLang has no such option, and a rule of sglang_bridge/settings.py names it"
            yield Finding(name, text)
    if reply.parser_error:
        yield Finding("arguments", f"SGLang refuses them: {reply.parser_error}. Correct them")
        return
    if reply.resolution_error:
        yield Finding("arguments", f"SGLang refuses them: {reply.resolution_error}")
        return
    yield from _assumption_findings(reply.settings, settings, place)
    for name, value in sorted(reply.environment.items()):
        if name in _SHARED_VARIABLES:
            text = (
                f"SGLang sets {value} in the engine alone, and the group of trainer and engines "
                f"needs one value. Set {name}={value} for the whole run, or remove the option"
            )
            yield Finding(name, text)


def _assumption_findings(
    info: Mapping[str, Any], settings: ServerSettings, place: ServerPlace
) -> Iterator[Finding]:
    engine = Engine(url="the engine", node=0, tp=settings.tp, ep=settings.ep, quantization=None)
    try:
        require_settings(
            engine,
            dict(info),
            settings.dtype,
            return_routes=place.return_routes,
            environment=nccl_environment(os.environ, settings),
            quantization=place.quantization,
        )
    except EngineError as error:
        yield Finding("engine", str(error))
    assumptions: dict[str, Any] = {
        "device": place.device,
        "ep_size": settings.ep,
        "load_format": "dummy" if place.quantization else place.load_format or "auto",
        "max_running_requests": settings.max_running_requests,
        "max_total_tokens": kv_cache_slots(settings, place.device),
        "skip_tokenizer_init": True,
        "random_seed": place.seed,
        "enable_metrics": True,
    }
    if place.return_routes:
        assumptions["moe_runner_backend"] = RECORDING_RUNNER
    for name, value in assumptions.items():
        if value is not None and info.get(name) != value:
            text = f"the run assumes {value}, and SGLang makes it {info.get(name)}"
            yield Finding(name, text)


def weight_findings(
    tensors: Sequence[TensorSpec], ranks: Sequence[RankLoad], *, num_experts: int
) -> Iterator[Finding]:
    """Compare what the ranks of the engine keep with what the trainer sends."""
    for load in ranks:
        if load.error:
            yield Finding(f"rank {load.rank}", f"SGLang cannot load it: {load.error}")
        for warning in load.warnings:
            yield Finding(f"rank {load.rank}", f"SGLang warns: {warning}")
        for parameter in load.parameters:
            if parameter.num_missing:
                total = math.prod(parameter.shape)
                text = (
                    f"on rank {load.rank}, {parameter.num_missing:,} of the {total:,} elements "
                    f"of {list(parameter.shape)} are not written by any tensor"
                )
                yield Finding(parameter.name, text)
    if not any(load.error for load in ranks):
        yield from _tensor_findings(tensors, ranks, num_experts)


def _tensor_findings(
    tensors: Sequence[TensorSpec], ranks: Sequence[RankLoad], num_experts: int
) -> Iterator[Finding]:
    transfers: dict[str, list[Transfer]] = defaultdict(list)
    for load in ranks:
        for transfer in load.transfers:
            transfers[transfer.tensor].append(transfer)
    dtypes = {parameter.name: parameter.dtype for parameter in ranks[0].parameters}
    for tensor in tensors:
        targets = {name for one in transfers[tensor.name] for name in one.parameters}
        numel = math.prod(tensor.shape)
        num_read = _count_read(transfers[tensor.name])
        if not targets:
            yield Finding(tensor.name, f"{list(tensor.shape)}: no rank keeps this tensor")
        elif num_read < numel:
            text = f"{list(tensor.shape)}: {num_read:,} of {numel:,} elements are read"
            yield Finding(tensor.name, text)
        else:
            yield from _audit_findings(tensor, targets, dtypes, num_experts)


def _count_read(transfers: Iterable[Transfer]) -> int:
    """The elements that any rank reads. Ranks may read the same ones."""
    regions = {tuple(map(_freeze, region)) for one in transfers for region in one.regions}
    return sum(math.prod(sizes) for _, sizes, _ in regions)


def _freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _audit_findings(
    tensor: TensorSpec, targets: set[str], dtypes: Mapping[str, str], num_experts: int
) -> Iterator[Finding]:
    """Compare the place of a tensor with the one that the audit of checksums expects."""
    import torch

    from sglang_bridge.weights.fused_layout import engine_dtype, locate_slot

    scale = _SCALE if tensor.name.endswith(_SCALE) else ""
    slot = locate_slot(tensor.name.removesuffix(_SCALE), num_experts=num_experts)
    if targets != {slot.parameter + scale}:
        text = f"SGLang keeps it in {', '.join(sorted(targets))}, the audit in {slot.parameter}"
        yield Finding(tensor.name, text)
        return
    dtype = dtypes[slot.parameter + scale]
    if tensor.dtype == "bfloat16":
        right = str(engine_dtype(tensor.name, torch.bfloat16)).removeprefix("torch.")
    else:
        right = tensor.dtype
    if dtype != right:
        yield Finding(tensor.name, f"it arrives as {right}, and SGLang keeps it as {dtype}")


def summarize(findings: Iterable[Finding]) -> list[str]:
    """One line for findings that differ in numbers alone: the first, and how many there are."""
    groups: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[re.sub(r"[\d,]+", "N", str(finding))].append(finding)
    return [
        str(group[0]) + (f" (and {len(group) - 1:,} like it)" if len(group) > 1 else "")
        for group in groups.values()
    ]
