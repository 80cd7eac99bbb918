"""Rules of recomputation: Megatron can recompute the named modules, and the model has them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import ModelSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.shape import ModelShape

_KEY = "model.recompute_modules"


def check_recompute(model: ModelSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about modules that cannot be recomputed with these settings."""
    modules = model.recompute_modules
    if modules is None:
        return
    if model.recompute != "selective":
        amount = "everything" if model.recompute == "full" else "nothing"
        rule = f"model.recompute={model.recompute} recomputes {amount}"
        yield BrokenRule(_KEY, rule, "Use model.recompute=selective, or leave it null")
    elif not modules:
        remedy = "Name modules, or use model.recompute=none"
        yield BrokenRule(_KEY, "An empty list recomputes nothing", remedy)
    for module in ("layernorm", "mla_up_proj"):
        if module in modules and not facts.transformer_engine:
            rule = (
                f"Megatron recomputes {module} with a part of Transformer Engine, which is not "
                "installed here"
            )
            yield BrokenRule(_KEY, rule, f"Leave {module} out, or use model.recompute=full")
    if "moe_act" in modules and not _uses_transformer_engine(model, facts):
        rule = (
            "Only Transformer Engine's grouped experts recompute moe_act, and here model.spec is "
            "local"
        )
        yield BrokenRule(_KEY, rule, "Use moe, which recomputes it too")


def _uses_transformer_engine(model: ModelSettings, facts: LaunchFacts) -> bool:
    is_available = facts.num_gpus > 0 and facts.transformer_engine
    return is_available and model.spec != "local" and model.dtype != "float32"


def check_recomputed_modules(model: ModelSettings, shape: ModelShape) -> Iterator[BrokenRule]:
    """Yield broken rules about modules that the model does not have."""
    useless_modules = list[tuple[str, str]]()
    if not shape.moe_layers:
        useless_modules += [("moe", "no experts"), ("moe_act", "no experts")]
    if len(shape.moe_layers) == shape.num_layers:
        useless_modules.append(("mlp", "experts in every layer"))
    if not shape.shared_ffn_hidden_size:
        useless_modules.append(("shared_experts", "no shared experts"))
    if shape.latent is None:
        useless_modules.append(("mla_up_proj", "no latent attention"))
    for module, reason in useless_modules:
        if module in (model.recompute_modules or ()):
            rule = f"The model has {reason}, so {module} recomputes nothing"
            yield BrokenRule(_KEY, rule, f"Leave {module} out")
