"""A layout is accepted if and only if whole steps of its kind are compared with exact ones in
test_whole_steps.py.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from launch.testbed.policies import COLUMN_ADDITION
from megatron_rl.config.cli import compose
from megatron_rl.config.rules import broken_rules
from megatron_rl.config.schema import Configuration, ModelSettings, ParallelSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import Refusal
from tests.support.layouts import LAYOUTS, RANKS, RECOMPUTE, Recompute, cases_of, kind_of


@pytest.fixture(scope="module")
def smallest() -> Configuration:
    return compose(
        [
            "experiment=smoke",
            f"model.path={COLUMN_ADDITION}",
            "engine=external",
            "engine.urls=[http://127.0.0.1:3]",
        ]
    )


def refused(
    c: Configuration, parallel: ParallelSettings, recompute: Recompute = "none", ranks: int = 16
) -> list[Refusal]:
    changed = dataclasses.replace(
        c, parallel=parallel, model=ModelSettings(path=c.model.path, recompute=recompute)
    )
    return list(broken_rules(changed, LaunchFacts(world_size=ranks, local_world_size=ranks), ()))


def grids() -> Iterator[ParallelSettings]:
    sizes = {
        "tp": (1, 2),
        "pp": (1, 2),
        "vpp": (None, 2),
        "cp": (1, 2),
        "ep": (1, 2, 4),
        "etp": (None, 1, 2, 4),
    }
    for chosen in itertools.product(*sizes.values(), (False, True)):
        named: Any = dict(zip([*sizes, "sequence_parallel"], chosen, strict=True))
        yield ParallelSettings(**named)


def test_what_is_accepted_is_what_is_compared(smallest: Configuration) -> None:
    compared = {layout.kind for layout in LAYOUTS.values()}
    accepted = set()
    for parallel in grids():
        kind = kind_of(parallel)
        fine = not refused(smallest, parallel)
        assert fine == (kind in compared and parallel.sequence_parallel == (parallel.tp > 1)), (
            parallel
        )
        accepted |= {kind} if fine else set()
    assert accepted == compared
    assert {case.layout for ranks in RANKS for case in cases_of(ranks)} == set(LAYOUTS)


def test_every_recomputation_and_precision_is_compared_along_every_axis() -> None:
    axes = ("one", "tp", "pp", "vpp", "cp", "ep")
    compared = {
        (axis, layout) for layout in LAYOUTS.values() for axis in layout.kind.axes | {"one"}
    }
    assert {(axis, layout.recompute) for axis, layout in compared} == {
        *itertools.product(axes, RECOMPUTE)
    }
    assert {(axis, layout.dtype) for axis, layout in compared} == {
        *itertools.product(axes, ("float32", "bfloat16"))
    }


@pytest.mark.parametrize(
    "name", [name for name in LAYOUTS if not name.startswith("tp4")]
)  # the model has two kv heads
def test_compared_layouts_are_accepted_on_their_ranks(smallest: Configuration, name: str) -> None:
    layout = LAYOUTS[name]
    assert refused(smallest, layout.parallel, layout.recompute, layout.ranks) == []


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"tp": 2, "etp": 1},
            "parallel.etp=1: Without parallel.ep Megatron reduces experts' gradients",
        ),
        ({"etp": 2}, "parallel.etp=2: Without parallel.ep Megatron reduces experts' gradients"),
        ({"ep": 2, "etp": 2}, "parallel.etp=2: With parallel.tp=1 no whole step of such a grid"),
        (
            {"tp": 2, "ep": 2, "etp": 4},
            "parallel.etp=4: With parallel.tp=2 no whole step of such a grid",
        ),
    ],
)
def test_a_grid_of_experts_that_trains_wrong_or_unproven_is_refused(
    smallest: Configuration, sizes: dict[str, int], said: str
) -> None:
    parallel: Any = {"sequence_parallel": sizes.get("tp", 1) > 1} | sizes
    (refusal,) = refused(smallest, ParallelSettings(**parallel))
    assert str(refusal).startswith(said)
    assert refusal.remedy.startswith("Leave it null")
    assert refused(smallest, dataclasses.replace(ParallelSettings(**parallel), etp=None)) == []


def test_experts_are_split_as_everything_else_is_unless_they_are_spread() -> None:
    assert ParallelSettings(tp=2).default_etp == 2
    assert ParallelSettings(tp=2, ep=2).default_etp == ParallelSettings(ep=2).default_etp == 1


def test_a_job_too_small_for_tensor_parallelism_is_told_so_once(smallest: Configuration) -> None:
    (refusal,) = refused(smallest, ParallelSettings(tp=2, sequence_parallel=True), ranks=1)
    assert (refusal.key, refusal.value) == ("parallel.tp", 2)
