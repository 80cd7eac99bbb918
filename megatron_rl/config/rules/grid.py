"""Rules of Megatron's grid of ranks: the sizes divide the job and the model, and whole training
steps on such a grid have been compared with exact ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.config.rules.broken_rule import BrokenRule
from megatron_rl.config.schema import EngineSettings, ParallelSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.pipeline_split import PipelineSplit
from megatron_rl.models.shape import ModelShape


def check_grid(p: ParallelSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about the ranks of the job, experts, overlap and virtual stages."""
    yield from _check_world_size(p, facts)
    yield from _check_expert_tensor_parallel(p)
    yield from _check_overlap(p, facts)
    if (p.vpp or 1) > 1 and p.pp == 1:
        rule = "Virtual stages interleave pipeline stages, and there is only one"
        yield BrokenRule("parallel.vpp", rule, "Leave it null, or raise parallel.pp")


def _check_world_size(p: ParallelSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    dense_sizes = {
        name: size for name, size in (("tp", p.tp), ("pp", p.pp), ("cp", p.cp)) if size > 1
    }
    expert_sizes = dict[str, int]()
    if p.ep > 1:
        expert_sizes = {"etp": p.etp or p.default_etp, "ep": p.ep}
        if p.pp > 1:
            expert_sizes["pp"] = p.pp
    keys_and_sizes = [("ep", expert_sizes)]
    if dense_sizes:
        keys_and_sizes.insert(0, (list(dense_sizes)[-1], dense_sizes))
    for key, sizes in keys_and_sizes:
        size = math.prod(sizes.values())
        if facts.world_size % size:
            rule = (
                f"parallel.{' x '.join(sizes)} = {size} does not divide the {facts.world_size} "
                "rank(s) of this job"
            )
            remedy = (
                f"Start a multiple of {size} ranks (torchrun --nproc-per-node {size}), or lower it"
            )
            yield BrokenRule(f"parallel.{key}", rule, remedy)


def _check_expert_tensor_parallel(p: ParallelSettings) -> Iterator[BrokenRule]:
    etp = p.etp or p.default_etp
    if p.ep == 1 and etp != p.tp:
        rule = (
            "With parallel.ep=1 Megatron reduces the gradients of experts as in other layers, "
            f"over parallel.tp={p.tp} ranks"
        )
        yield BrokenRule("parallel.etp", rule, "Leave it null, which is parallel.tp")
    elif etp not in (1, p.tp):
        rule = (
            f"With parallel.tp={p.tp} no whole step on such a grid has been compared with an exact "
            "one"
        )
        remedy = "Leave it null for whole experts, or use parallel.tp"
        yield BrokenRule("parallel.etp", rule, remedy)


def _check_overlap(p: ParallelSettings, facts: LaunchFacts) -> Iterator[BrokenRule]:
    """Yield broken rules about collectives that overlap with passes."""
    if p.overlap and facts.world_size == p.tp * p.pp:
        rule = (
            "This setting has no effect: no two ranks hold the same weights, so that nothing is "
            "reduced over ranks"
        )
        yield BrokenRule("parallel.overlap", rule, "Leave it false, or add ranks")


def check_split(
    p: ParallelSettings, engine: EngineSettings, shape: ModelShape
) -> Iterator[BrokenRule]:
    """Yield broken rules about parts of the model that must divide evenly among ranks."""
    for key, size, part, count in (
        ("parallel.ep", p.ep, "expert", shape.num_experts),
        ("parallel.etp", p.etp or p.default_etp, "column of an expert", shape.moe_ffn_hidden_size),
        ("parallel.tp", p.tp, "attention head", shape.num_attention_heads),
        ("parallel.tp", p.tp, "key-value head", shape.num_key_value_heads),
        ("parallel.tp", p.tp, "column of an MLP", shape.ffn_hidden_size),
        ("parallel.tp", p.tp, "column of a shared expert", shape.shared_ffn_hidden_size),
        ("engine.ep", engine.ep, "expert", shape.num_experts),
        ("engine.tp", engine.tp, "attention head", shape.num_attention_heads),
    ):
        if count % size:
            noun, _, rest = part.partition(" of ")
            parts = f"{noun}s of {rest}" if rest else f"{noun}s"
            rule = f"The model's {count} {parts} cannot be split evenly over {size}"
            yield BrokenRule(key, rule, f"Use a divisor of {count}")
    split = PipelineSplit.balanced(shape.num_layers, p.pp, p.vpp or 1)
    if problem := split.problem():
        rule = f"Of the model's {shape.num_layers} layers, {problem}"
        yield BrokenRule("parallel.pp", rule, "Use fewer stages, or fewer chunks (parallel.vpp)")
