"""Builds a model with both specs and compares their parameters, checkpoints and exports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from safetensors.torch import load_file

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore.adam import FusedLayoutAdam
from megatron_rl.mcore.layer_spec import Spec
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.shape import ModelShape
from tests.lab.te_rehearsal.pretended_cuda import PretendedCuda

GRID = ParallelSettings(timeout_s=60)
Models = list[torch.nn.Module]
# The place of a tensor in a checkpoint: name, whole shape, offset and local shape
Place = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Machine:
    """Builds models as a GPU with Transformer Engine does, or as a CPU does.

    grid: the parallel layout of the models.
    """

    cuda: PretendedCuda
    grid: ParallelSettings = GRID

    @contextlib.contextmanager
    def acting_as(self, spec: Spec) -> Iterator[None]:
        """Answer as the machine of a spec: `te` has the pretended GPU, `local` the CPU.

        `local` also has this project's Adam in place of Transformer Engine's.
        """
        if spec == "te":
            yield
            return
        import megatron.core.optimizer as optimizer
        import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

        fused_adam = optimizer.Adam
        optimizer.Adam = distrib_optimizer.Adam = FusedLayoutAdam
        try:
            with self.cuda.off():
                yield
        finally:
            optimizer.Adam = distrib_optimizer.Adam = fused_adam

    def build(self, shape: ModelShape, settings: ModelSettings, spec: Spec) -> Models:
        """Build the model with a spec."""
        with self.acting_as(spec):
            return build_models(shape, replace(settings, spec=spec), self.grid, on_gpu=spec == "te")

    def build_on_meta(self, shape: ModelShape, settings: ModelSettings, spec: Spec) -> Models:
        """Build the model without data, at any size."""
        cuda: Any = torch.cuda
        current_device = cuda.current_device
        cuda.current_device = lambda: "meta"  # Transformer Engine compares with the text
        try:
            with self.acting_as(spec), torch.device("meta"):
                return build_models(shape, replace(settings, spec=spec), self.grid, on_gpu=True)
        finally:
            cuda.current_device = current_device


def hf_shapes(models: Models, shape: ModelShape) -> dict[tuple[str, ...], tuple[Any, ...]]:
    """Return the shape, dtype and fusion of every parameter by its Hugging Face names."""
    shapes = {}
    for parameter in placed_parameters(models, shape):
        layout = parameter.layout(ep_rank=0)
        facts = (tuple(parameter.weight.shape), parameter.weight.dtype, layout.fusion)
        shapes[layout.hf_names] = facts
    return shapes


def places(models: Models) -> set[Place]:
    """Return the places of all tensors of a checkpoint."""
    result: set[Place] = set()
    model: Any = models[0]
    for value in nested_values(model.sharded_state_dict()):
        if isinstance(value, ShardedTensorFactory):
            result |= {_place(piece) for piece in nested_values(value.build())}
        elif isinstance(value, ShardedTensor):
            result.add(_place(value))
    return result


def _place(tensor: ShardedTensor) -> Place:
    return (
        tensor.key,
        tuple(tensor.global_shape),
        tuple(tensor.global_offset),
        tuple(tensor.local_shape),
    )


def differences(models: Callable[[Spec], Models], shape: ModelShape) -> list[str]:
    """Describe what differs between the specs in parameters and in places of checkpoints."""
    local = models("local")
    te = models("te")
    faults = _compare("parameter", hf_shapes(local, shape), hf_shapes(te, shape))
    local_places = {place[0::2]: place for place in places(local)}
    te_places = {place[0::2]: place for place in places(te)}
    return faults + _compare("place in a checkpoint", local_places, te_places)


def _compare(noun: str, local: dict[Any, Any], te: dict[Any, Any]) -> list[str]:
    faults = [f"{noun} {key} is only in local" for key in local.keys() - te.keys()]
    faults += [f"{noun} {key} is only in te" for key in te.keys() - local.keys()]
    return faults + [
        f"{noun} {key}: local has {local[key]}, te has {te[key]}"
        for key in local.keys() & te.keys()
        if local[key] != te[key]
    ]


def export_differences(models: Models, shape: ModelShape, checkpoint: Path) -> list[str]:
    """Load a checkpoint and export it. Returns the names of tensors that are not bit-identical."""
    load_hf_weights(models, shape, checkpoint)
    files: Sequence[Path] = sorted(checkpoint.glob("*.safetensors"))
    original = {name: tensor for file in files for name, tensor in load_file(file).items()}
    export = dict(iterate_hf_weights(models, shape))
    names = sorted(original.keys() ^ export.keys())
    return names + [
        name
        for name, tensor in export.items()
        if name in original and not torch.equal(tensor, original[name].to(tensor.dtype))
    ]
