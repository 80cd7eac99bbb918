"""Saves a model and its optimizer with one spec and loads them with the other."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.schema import ModelSettings
from megatron_rl.mcore.checkpoint.tensors import gather_tensors, load_tensors, write_tensors
from megatron_rl.mcore.layer_spec import Spec
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights
from megatron_rl.mcore.weights.export import hf_tensors
from megatron_rl.mcore.weights.parameters import placed_parameters
from megatron_rl.models.families import read_shape
from tests.lab.te_rehearsal.models import Machine
from tests.support.policies import ADAM

_MOMENTS = ("exp_avg", "exp_avg_sq")


def checkpoint_differences(
    machine: Machine, path: Path, settings: ModelSettings, source: Spec, target: Spec, scratch: Path
) -> list[str]:
    """Save after one optimizer step with `source`, load with `target`, and compare all tensors.

    Returns the Hugging Face names of weights that are not bit-identical, and moments whose sums
    over all parameters differ.
    """
    directory = scratch / "checkpoint"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    group: Any = dist.new_group(backend="gloo")
    shape = read_shape(path)
    with machine.acting_as(source):
        models, optimizer = _open(machine, path, settings, source)
        _take_step(models, optimizer)
        write_tensors(gather_tensors(models, optimizer), directory, group)
        expected_weights = {n: t.clone() for n, t in iterate_hf_weights(models, shape)}
        expected_moments = _moments(models, optimizer, shape)
    with machine.acting_as(target):
        models, optimizer = _open(machine, path, settings, target)
        load_tensors(models, optimizer, directory, optimizer_steps=1)
        weights = dict(iterate_hf_weights(models, shape))
        moments = _moments(models, optimizer, shape)
    faults = _unequal(expected_weights, weights) + _unequal(expected_moments, moments)
    return faults if any(bool(t.any()) for t in moments.values()) else [*faults, "moments are zero"]


def _open(
    machine: Machine, path: Path, settings: ModelSettings, spec: Spec
) -> tuple[list[Any], DistributedAdam]:
    shape = read_shape(path)
    chunks = machine.build(shape, settings, spec)
    load_hf_weights(chunks, shape, path)
    models = wrap_data_parallel(chunks)
    return models, DistributedAdam(models, ADAM, total_steps=10)


def _take_step(models: list[Any], optimizer: DistributedAdam) -> None:
    """Apply random gradients."""
    generator = torch.Generator().manual_seed(5)
    for model in models:
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=generator))
    if not optimizer.step(loss_is_finite=True).is_applied:
        raise RuntimeError("the step was not applied")


def _moments(models: list[Any], optimizer: DistributedAdam, shape: Any) -> dict[str, torch.Tensor]:
    """Return the moments of every parameter by Hugging Face name, float32."""
    inner: Any = optimizer.scheduler.optimizer
    moments: dict[str, torch.Tensor] = {}
    by_parameter: dict[torch.Tensor, Any] = {}
    for part in inner.chained_optimizers:
        for model_parameter in part.model_param_gbuf_map:
            group, order = part.model_param_group_index_map[model_parameter]
            main = part.optimizer.param_groups[group]["params"][order]
            by_parameter[model_parameter] = part.optimizer.state[main]
    for parameter in placed_parameters(models, shape):
        if parameter.is_frozen:
            continue
        state = by_parameter[parameter.weight]
        for name in _MOMENTS:
            moment = state[name].float().reshape(parameter.weight.shape)
            tensors = hf_tensors(parameter, 0, moment, shape, None)
            moments |= {f"{hf_name} {name}": tensor.clone() for hf_name, tensor in tensors}
    return moments


def _unequal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    names = sorted(tensors.keys() ^ others.keys())
    return names + [n for n in tensors.keys() & others.keys() if not tensors[n].equal(others[n])]
