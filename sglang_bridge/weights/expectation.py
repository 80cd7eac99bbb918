"""Checksums that an engine must report, computed while the weights stream by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch

from sglang_bridge.block_fp8 import Fp8Pairs, Part
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.digests import CpuDigest, Digest, GpuDigest
from sglang_bridge.weights.fused_layout import (
    WHOLE,
    RankPlace,
    Slot,
    engine_dtype,
    first_expert,
    is_split_known,
    locate_slot,
    take_shard,
)


@dataclass
class _Parameter:
    """An engine parameter: its tensors are hashed in slot order, early ones are buffered.

    digest: None if only names are kept.
    """

    count: int
    digest: Digest | None
    names: dict[int, str] = field(default_factory=dict)
    early_tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    next_slot: int = 0

    def add_name(self, index: int, name: str) -> None:
        if index in self.names:
            raise ValueError(f"weight {name}: its place already holds {self.names[index]}")
        self.names[index] = name

    def add_data(self, index: int, data: torch.Tensor) -> None:
        assert self.digest is not None
        if index != self.next_slot:
            self.early_tensors[index] = data.clone()
            return
        self.digest.update(data)
        self.next_slot += 1
        while self.next_slot in self.early_tensors:
            self.digest.update(self.early_tensors.pop(self.next_slot))
            self.next_slot += 1


class WeightExpectation:
    """Predicts SGLang's checksum of every engine parameter from the tensors that are sent.

    A checksum covers the raw bytes in the engine's dtype, and for FP8 weights their values in
    bfloat16.

    dtype: the engine's. num_experts: in each MoE layer. device: the engines' device, which selects
    the kind of checksum. compares_values: False to keep names alone, without checksums. With
    checksums a tensor that arrives before an earlier part of its parameter is copied.
    places: the ranks whose checksums are wanted. num_key_value_heads: of the model, for engines of
    several ranks.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        num_experts: int,
        device: Literal["cpu", "cuda"] = "cpu",
        compares_values: bool = True,
        places: Iterable[RankPlace] = (WHOLE,),
        num_key_value_heads: int = 1,
    ) -> None:
        self.device = device
        self.compares_values = compares_values
        self._dtype = dtype
        self._num_experts = num_experts
        # Our CPU engines list the checksums of codes and scales (`cpu_shim/block_fp8.py`)
        self._pairs = Fp8Pairs(lists_exactly=device == "cpu", compares_values=compares_values)
        self.unknown_splits: list[str] = []
        """Tensors whose share on one rank among several is unknown."""
        self._num_key_value_heads = num_key_value_heads
        # Names are the same on all ranks
        ranks = dict.fromkeys(places) if compares_values else (WHOLE,)
        self._parameters: dict[RankPlace, dict[str, _Parameter]] = {rank: {} for rank in ranks}

    def observe(self, named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the stream on unchanged, adding each tensor to the expectation."""
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Account for one tensor under its Hugging Face name.

        FP8 codes and their scales count once both have come.
        """
        for part in self._pairs.parts(name, tensor.detach()):
            self._add_part(part)

    def _add_part(self, part: Part) -> None:
        slot = locate_slot(part.weight, num_experts=self._num_experts)
        if not is_split_known(part.weight):
            self.unknown_splits.append(part.weight)
        dtype = part.dtype or engine_dtype(part.name, self._dtype)
        tensor = part.tensor.to(dtype) if self.compares_values else part.tensor
        for place in self._parameters:
            local_slot = self._local_slot(slot, place)
            if local_slot is None:
                continue
            parameter = self._parameter(local_slot, part.suffix, place)
            parameter.add_name(local_slot.index, part.name)
            if self.compares_values:
                data = take_shard(
                    part.weight, tensor, place, num_key_value_heads=self._num_key_value_heads
                )
                parameter.add_data(local_slot.index, data.contiguous().view(-1).view(torch.uint8))

    def _local_slot(self, slot: Slot, place: RankPlace) -> Slot | None:
        """The slot among a rank's slots; None if the rank has no part of the tensor."""
        if not slot.is_expert:
            return slot
        each = slot.count // self._num_experts
        count = slot.count // place.ep
        index = slot.index - each * first_expert(place, self._num_experts)
        return Slot(slot.parameter, index, count, is_expert=True) if 0 <= index < count else None

    @property
    def first_place(self) -> RankPlace:
        """The first rank with an expected parameter. All have the same parameters, by name."""
        return next(iter(self._parameters))

    def checksums(self, place: RankPlace = WHOLE) -> dict[str, str]:
        """The 16 hexadecimal digits that SGLang reports, by engine parameter of one rank.

        Empty texts if only names are kept.

        Raises `ValueError` if a tensor is missing.
        """
        parameters = self._parameters[place]
        gaps = [
            f"{name} has {len(parameter.names)} of {parameter.count} tensors"
            for name, parameter in parameters.items()
            if len(parameter.names) < parameter.count
        ]
        gaps += self._pairs.gaps
        if gaps:
            raise ValueError(f"the weights sent are incomplete: {', '.join(gaps)}")
        return {
            name: "" if parameter.digest is None else parameter.digest.hexdigest()
            for name, parameter in parameters.items()
        }

    @property
    def held_bytes(self) -> int:
        """The bytes of tensors that wait for an earlier part of their parameter."""
        return sum(
            tensor.nbytes
            for parameters in self._parameters.values()
            for parameter in parameters.values()
            for tensor in parameter.early_tensors.values()
        )

    def tensors_of(self, parameter: str, place: RankPlace = WHOLE) -> tuple[str, ...]:
        """The Hugging Face names that make up an engine parameter of a rank, in its order.

        Empty if no part of the parameter was sent.
        """
        if parameter not in self._parameters[place]:
            return ()
        names = self._parameters[place][parameter].names
        return tuple(names[index] for index in sorted(names))

    def _parameter(self, slot: Slot, suffix: str, place: RankPlace) -> _Parameter:
        parameters = self._parameters[place]
        name = slot.parameter + suffix
        if name not in parameters:
            parameters[name] = _Parameter(slot.count, self._make_digest())
        return parameters[name]

    def _make_digest(self) -> Digest | None:
        if not self.compares_values:
            return None
        return GpuDigest() if self.device == "cuda" else CpuDigest()
