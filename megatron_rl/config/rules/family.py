"""What follows from the kind of model: without experts, with latent attention, on an engine without GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.schema import Configuration
from megatron_rl.models.shape import ModelShape
from sglang_bridge.settings import device_of

_CPU_COLUMNS = 32  # SGLang widens an MLP to a multiple of this on CPUs, for its kernels' sake


def check_family(c: Configuration, shape: ModelShape, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """Replay needs experts, layouts need a proof, engines on CPUs need MLPs of a width that they leave alone."""
    yield from _check_dense(c, shape) if not shape.moe_layers else ()
    yield from _check_latent(c, shape) if shape.latent is not None else ()
    width = _CPU_COLUMNS * c.engine.tp
    widths = [shape.moe_ffn_hidden_size] if shape.moe_layers else []
    widths += [shape.ffn_hidden_size] if len(shape.moe_layers) < shape.num_layers else []
    on_cpu = device_of(c.engine, facts.num_gpus) == "cpu"
    if on_cpu and shape.latent is not None:
        rule = f"SGLang cannot serve the attention of {shape.architecture} on CPUs"
        yield "engine.device", rule, "Use engines on GPUs"
    if on_cpu and (odd := [size for size in widths if size % width]):
        rule = f"Engines on CPUs widen MLPs of {odd[0]} columns to multiples of {width}, and would hold other weights"
        yield "model.path", rule, "Choose another checkpoint, or engines on GPUs"


def _check_dense(c: Configuration, shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    no_experts = f"{shape.architecture} has no experts"
    if c.train.replay_routes:
        yield "train.replay_routes", f"{no_experts}: there are no routes to replay", "Use train.replay_routes=false"
    for key, size in (("parallel.ep", c.parallel.ep), ("engine.ep", c.engine.ep)):
        if size > 1:
            yield key, f"{no_experts} to spread over ranks", "Use 1"


def _check_latent(c: Configuration, shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    unproven = "no step of latent attention in such a grid has been compared with an exact one"
    if c.parallel.tp > 1:  # the local spec's gather of the rotary key keeps one rank's part of its gradient
        yield "parallel.tp", f"{shape.architecture}: {unproven}", "Use parallel.ep or parallel.pp"
    if c.parallel.cp > 1:
        yield "parallel.cp", f"{shape.architecture}: {unproven}", "Use parallel.ep or parallel.pp"
