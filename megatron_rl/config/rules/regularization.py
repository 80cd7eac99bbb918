"""Rules of the terms that are added to a policy loss: the KL penalty and the entropy bonus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config.algorithms import SftSettings
from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import Configuration
from megatron_rl.models.hf_checkpoint.inspection import inspect_checkpoint


def check_regularization(c: Configuration) -> Iterator[BrokenRule]:
    """Yield broken rules about the KL penalty, its reference, and the entropy bonus."""
    kl = c.algo.kl
    coefficients = {"algo.kl.coef": kl.coef, "algo.entropy_coef": c.algo.entropy_coef}
    for key in (key for key, value in coefficients.items() if value):
        yield from _check_regularized_tokens(c, key)
    if kl.coef:
        yield from _check_reference(c)
    elif kl.reference is not None:
        rule = "This setting has no effect with algo.kl.coef=0"
        yield BrokenRule("algo.kl.reference", rule, "Remove it, or give algo.kl.coef=0.001")


def _check_regularized_tokens(c: Configuration, key: str) -> Iterator[BrokenRule]:
    """Yield broken rules about the tokens that a term is estimated from. key: its coefficient."""
    if isinstance(c.algo, SftSettings) or c.environment.name == "demonstration":
        rule = "It regularizes a policy by its own samples, and demonstrations are not sampled"
        yield BrokenRule(key, rule, "Use 0, or an environment that samples responses")
    for kind in ("all_correct", "all_incorrect"):
        if getattr(c.credit, kind) == "keep":
            rule = (
                f"credit.{kind}=keep counts responses in the denominators without computing them, "
                "so that their terms would be missing"
            )
            yield BrokenRule(key, rule, f"Use 0, or credit.{kind}=drop or zvp")


def _check_reference(c: Configuration) -> Iterator[BrokenRule]:
    path = c.algo.kl.reference
    if c.model.fp8 is not None:
        rule = f"Layers with model.fp8={c.model.fp8} keep scales of the weights that they trained"
        yield BrokenRule("algo.kl.coef", rule, "Use 0, or model.fp8=null")
    if path is None and c.model.init == "random":
        rule = "With model.init=random the start checkpoint has no weights for a reference"
        yield BrokenRule("algo.kl.reference", rule, "Give a checkpoint, or use algo.kl.coef=0")
    if path is None:
        return
    shape, problems = inspect_checkpoint(path, weights=True)
    for problem in problems:
        yield BrokenRule("algo.kl.reference", problem.rule, problem.remedy)
    start_shape, _ = inspect_checkpoint(c.model.path, weights=False)
    if shape is not None and start_shape is not None:
        same_ending = replace(shape, eos_token_ids=start_shape.eos_token_ids)
        if same_ending != start_shape:
            rule = f"It is another model than model.path={c.model.path}"
            yield BrokenRule("algo.kl.reference", rule, "Give a checkpoint of the same model")
