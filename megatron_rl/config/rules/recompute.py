"""Which of Megatron's modules the backward pass can run again: those that the model and its modules
here have.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.schema import ModelSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.shape import ModelShape

_KEY = "model.recompute_modules"


def check_recompute(model: ModelSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """Modules are named where some are recomputed, and Megatron has a way to recompute each."""
    if (modules := model.recompute_modules) is None:
        return
    if model.recompute != "selective":
        rule = f"model.recompute={model.recompute} recomputes {'all' if model.recompute == 'full' else 'nothing'}"
        yield _KEY, rule, "Use model.recompute=selective, or leave it null"
    elif not modules:
        yield _KEY, "It recomputes nothing", "Name modules, or use model.recompute=none"
    for module in ("layernorm", "mla_up_proj"):
        if module in modules and not facts.transformer_engine:
            rule = f"Megatron recomputes {module} with a part of Transformer Engine, which is not installed here"
            yield _KEY, rule, f"Leave {module} out, or use model.recompute=full"
    te = (
        facts.num_gpus > 0
        and facts.transformer_engine
        and model.spec != "local"
        and model.dtype != "float32"
    )
    if "moe_act" in modules and not te:
        rule = "moe_act is recomputed in Transformer Engine's grouped experts alone, and here model.spec is local"
        yield _KEY, rule, "Use moe, which recomputes it too"


def check_recomputed(model: ModelSettings, shape: ModelShape) -> Iterator[tuple[str, str, str]]:
    """The model has what is to be recomputed."""
    lacking = {
        "no experts": () if shape.moe_layers else ("moe", "moe_act"),
        "experts in every layer": ("mlp",) if len(shape.moe_layers) == shape.num_layers else (),
        "no shared experts": () if shape.shared_ffn_hidden_size else ("shared_experts",),
        "no latent attention": () if shape.latent is not None else ("mla_up_proj",),
    }
    for found, module in (
        (found, module) for found, modules in lacking.items() for module in modules
    ):
        if module in (model.recompute_modules or ()):
            yield _KEY, f"The model has {found}: {module} recomputes nothing", f"Leave {module} out"
