"""Megatron's grid: what the ranks and the model divide into, and what was compared with exact
training steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_rl.config.schema import EngineSettings, ParallelSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.models.pipeline_split import PipelineSplit
from megatron_rl.models.shape import ModelShape


def check_grid(p: ParallelSettings, facts: LaunchFacts) -> Iterator[tuple[str, str, str]]:
    """The ranks of the job divide into the grid, and whole steps of such grids have been compared
    with exact ones.
    """
    etp = p.etp or p.default_etp
    shared = {name: size for name, size in (("tp", p.tp), ("pp", p.pp), ("cp", p.cp)) if size > 1}
    experts = {"etp": etp, "ep": p.ep} | ({"pp": p.pp} if p.pp > 1 else {})
    grids = [(list(shared)[-1:], shared), (["ep"], experts if p.ep > 1 else {})]
    for key, sizes in grids:
        if facts.world_size % (size := math.prod(sizes.values())):
            rule = f"parallel.{' x '.join(sizes)} = {size} does not divide the {facts.world_size} rank(s) of this job"
            remedy = (
                f"Start a multiple of {size} ranks (torchrun --nproc-per-node {size}), or lower it"
            )
            yield f"parallel.{key[0]}", rule, remedy
    if p.ep == 1 and etp != p.tp:
        rule = f"Without parallel.ep Megatron reduces experts' gradients as those of layers over parallel.tp={p.tp}"
        yield "parallel.etp", f"{rule} ranks", "Leave it null, which is parallel.tp"
    elif etp not in (1, p.tp):
        rule = f"With parallel.tp={p.tp} no whole step of such a grid has been compared with an exact one"
        yield "parallel.etp", rule, "Leave it null for whole experts, or use parallel.tp"
    if p.sequence_parallel != (p.tp > 1):
        rule = f"In MoE layers sequence parallelism and tensor parallelism come together, and parallel.tp={p.tp}"
        yield (
            "parallel.sequence_parallel",
            rule,
            f"Use {str(p.tp > 1).lower()}, or change parallel.tp",
        )
    if (p.vpp or 1) > 1 and p.pp == 1:
        yield (
            "parallel.vpp",
            "Virtual stages interleave pipeline stages, of which there is only one",
            "Leave it null",
        )


def check_split(
    p: ParallelSettings, engine: EngineSettings, shape: ModelShape
) -> Iterator[tuple[str, str, str]]:
    """Every part of the model divides evenly among the ranks that share it, and its layers over
    pipeline stages.
    """
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
            yield (
                key,
                f"The model's {count} {part}s cannot be split evenly over {size}",
                f"Use a divisor of {count}",
            )
    split = PipelineSplit(
        shape.num_layers, p.pp, p.vpp or 1, p.first_stage_layers, p.last_stage_layers
    )
    if problem := split.problem():
        key = (
            "first_stage_layers"
            if p.first_stage_layers
            else "last_stage_layers"
            if p.last_stage_layers
            else "pp"
        )
        remedy = "Choose others, or give the first and the last stage fewer: parallel.first_stage_layers, ..."
        yield f"parallel.{key}", f"Of the model's {shape.num_layers} layers {problem}", remedy
