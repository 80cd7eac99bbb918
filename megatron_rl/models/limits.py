"""What a kind of model cannot be combined with: without experts, with latent attention, on engines
without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.models.shape import ModelShape

# The settings that a model limits
LIMITED_KEYS = ("train.replay", "parallel.ep", "parallel.tp", "parallel.cp", "engine.ep", "engine.tp")
_CPU_COLUMNS = 32  # SGLang widens an MLP to a multiple of this for each rank of an engine on CPUs
_UNPROVEN = "no step of latent attention in such a grid has been compared with an exact one"


def model_limits(
    shape: ModelShape, settings: Mapping[str, Any], *, engine_on_cpu: bool
) -> Iterator[tuple[str, str, str]]:
    """The key that is wrong, the rule and the remedy.

    settings: the values of the keys below, by their full names.
    """
    if not shape.moe_layers:
        none = f"{shape.architecture} has no experts"
        if settings["train.replay"] != "off":
            yield "train.replay", f"{none}: there are no routes to replay", "Use train.replay=off"
        for key in ("parallel.ep", "engine.ep"):
            if settings[key] > 1:
                yield key, f"{none} to spread over ranks", "Use 1"
    if shape.latent is not None:
        for key in (
            "parallel.tp",
            "parallel.cp",
        ):  # Megatron's local spec keeps a part of the rotary key's gradient
            if settings[key] > 1:
                yield key, f"{shape.architecture}: {_UNPROVEN}", "Use parallel.ep or parallel.pp"
    if engine_on_cpu:
        yield from _limits_without_gpu(shape, settings["engine.tp"])


def _limits_without_gpu(shape: ModelShape, engine_tp: int) -> Iterator[tuple[str, str, str]]:
    if shape.latent is not None:
        rule = f"SGLang cannot serve the attention of {shape.architecture} on CPUs"
        yield "engine.device", rule, "Use engines on GPUs"
    dense = len(shape.moe_layers) < shape.num_layers
    widths = [shape.moe_ffn_hidden_size] * bool(shape.moe_layers) + [shape.ffn_hidden_size] * dense
    multiple = _CPU_COLUMNS * engine_tp
    if odd := [width for width in widths if width % multiple]:
        rule = f"Engines on CPUs widen MLPs of {odd[0]} columns to multiples of {multiple}, and would hold other weights"
        yield "model.path", rule, "Choose another checkpoint, or engines on GPUs"
