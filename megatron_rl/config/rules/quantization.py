"""Rules of engines that hold weights in FP8 (`engine.quantization=fp8`)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration, EngineSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.fp8_weights import BLOCK, undivided_parts
from megatron_rl.models.shape import ModelShape
from sglang_bridge.settings import server_device

_LAYERS = ("unquantized_first_layers", "unquantized_last_layers")


def check_quantization(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about quantized engines that do not depend on the model."""
    engine = c.engine
    if engine.quantization is None:
        yield from _check_unquantized(engine)
        return
    if c.is_measurement and c.run.resume == "never":
        rule = (
            f"Without a checkpoint mode={c.mode} sends no weights, and quantized engines get "
            "theirs from the trainer alone"
        )
        remedy = "Use null, or give a checkpoint: run.resume=runs/NAME"
        yield BrokenRule("engine.quantization", rule, remedy)


def _check_unquantized(engine: EngineSettings) -> Iterator[BrokenRule]:
    for name in _LAYERS:
        if getattr(engine, name) != getattr(EngineSettings(), name):
            rule = "This setting has no effect: it is for quantized engines"
            yield BrokenRule(f"engine.{name}", rule, "Remove it, or use engine.quantization=fp8")


def check_blocks(
    engine: EngineSettings, shape: ModelShape, facts: LaunchFacts
) -> Iterator[BrokenRule]:
    """Yield broken rules about the blocks of a quantized model, and about layers without them."""
    if engine.quantization is None:
        return
    num_unquantized = engine.unquantized_first_layers + engine.unquantized_last_layers
    if num_unquantized >= shape.num_layers:
        key = "engine." + max(_LAYERS, key=lambda name: getattr(engine, name))
        rule = f"All of the model's {shape.num_layers} layers would stay unquantized"
        yield BrokenRule(key, rule, "Lower it, or use engine.quantization=null")
    if engine.tp % engine.ep:
        return
    for part, size in undivided_parts(shape, tp=engine.tp, ep=engine.ep):
        place = "" if engine.tp == 1 else f" on each of engine.tp={engine.tp} ranks"
        rule = (
            f"A scale belongs to {BLOCK} x {BLOCK} weights, and {part}={size}{place} is no "
            f"multiple of {BLOCK}"
        )
        yield BrokenRule("engine.quantization", rule, _remedy(engine, shape, facts))


def _remedy(engine: EngineSettings, shape: ModelShape, facts: LaunchFacts) -> str:
    """Return a way out: other parallel sizes if blocks divide the whole model."""
    if any(undivided_parts(shape, tp=1, ep=1)):
        return "Use null, or choose another model"
    is_on_gpus = server_device(facts.num_gpus) == "cuda"  # CPU engines have ep=1
    fits_whole_experts = not any(undivided_parts(shape, tp=engine.tp, ep=engine.tp))
    if engine.ep < engine.tp and is_on_gpus and fits_whole_experts:
        return f"Use engine.ep={engine.tp}, or lower engine.tp"
    return "Lower engine.tp"
