"""Settings that a kind of model does not support."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_rl.models.shape import ModelShape

# Keys that some model limits
LIMITED_KEYS = (
    "train.replay",
    "parallel.ep",
    "parallel.tp",
    "parallel.cp",
    "engine.ep",
    "engine.tp",
)
# For each rank, an SGLang engine on CPUs pads MLPs to a multiple of this width.
_CPU_MULTIPLE = 32


def model_limits(
    shape: ModelShape, settings: Mapping[str, Any], *, has_engines: bool, engine_on_cpu: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield key, rule and remedy of each setting that the model does not support.

    settings: values of `LIMITED_KEYS`. has_engines: True if engines serve the model.
    engine_on_cpu: True if they run on CPUs.
    """
    if not shape.moe_layers:
        yield from _limits_without_experts(shape, settings)
    if shape.latent is not None:
        # Megatron's local layer spec drops part of the rotary key's gradient with these settings.
        for key in ("parallel.tp", "parallel.cp"):
            if settings[key] > 1:
                rule = (
                    f"{shape.architecture}: latent attention is not verified with this "
                    "parallelism: no step has been compared with an exact one"
                )
                yield key, rule, "Use parallel.ep or parallel.pp"
    if has_engines:
        yield from _limits_of_engines(shape)
    if engine_on_cpu:
        yield from _limits_without_gpu(shape, settings["engine.tp"])


def _limits_without_experts(
    shape: ModelShape, settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    rule = f"{shape.architecture} has no experts"
    if settings["train.replay"] != "off":
        yield "train.replay", f"{rule}: there are no routes to replay", "Use train.replay=off"
    for key in ("parallel.ep", "engine.ep"):
        if settings[key] > 1:
            yield key, f"{rule} to spread over ranks", "Use 1"


def _limits_of_engines(shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    if shape.latent is not None:
        # SGLang fuses q_a_proj and kv_a_proj_with_mqa while it loads one bucket of weights. It
        # drops both without an error if they come in different buckets.
        rule = (
            f"{shape.architecture}: weights of latent attention cannot be sent to engines, because "
            "SGLang fuses its projections and keeps old ones if only one of them arrives"
        )
        yield "model.path", rule, "Use mode=train_only, or another family"
    elif shape.tie_word_embeddings and shape.moe_layers:
        rule = (
            f"tie_word_embeddings=true: SGLang's {shape.architecture} keeps an output layer of its "
            "own, which tied weights would never reach"
        )
        yield "model.path", rule, "Choose a checkpoint without tied embeddings"


def _limits_without_gpu(shape: ModelShape, engine_tp: int) -> Iterator[tuple[str, str, str]]:
    widths = []
    if shape.moe_layers:
        widths.append(shape.moe_ffn_hidden_size)
    if len(shape.moe_layers) < shape.num_layers:
        widths.append(shape.ffn_hidden_size)
    multiple = _CPU_MULTIPLE * engine_tp
    padded_widths = [width for width in widths if width % multiple]
    if padded_widths:
        rule = (
            f"Engines on CPUs pad MLPs of {padded_widths[0]} columns to multiples of {multiple}, "
            "and would hold other weights than the trainer"
        )
        if any(width % _CPU_MULTIPLE for width in widths):
            yield "model.path", rule, "Choose another checkpoint, or engines on GPUs"
        else:
            yield "engine.tp", rule, "Lower it, or use engines on GPUs"
