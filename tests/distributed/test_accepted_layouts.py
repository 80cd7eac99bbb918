"""A layout is accepted if and only if test_whole_steps.py compares steps of its kind."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_rl.config.rules import broken_rules
from megatron_rl.config.schema import Configuration, ModelSettings, ParallelSettings
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.contracts.refusal import Refusal
from tests.support.configurations import configuration_of
from tests.support.layouts import LAYOUTS, RANKS, RECOMPUTE, Recompute, cases_of, kind_of
from tests.support.policies import COLUMN_ADDITION


@pytest.fixture(scope="module")
def smallest() -> Configuration:
    return configuration_of(
        [
            "experiment=smoke",
            f"model.path={COLUMN_ADDITION}",
            "engine=external",
            "engine.urls=[http://127.0.0.1:3]",
        ]
    )


def refusals(
    c: Configuration, parallel: ParallelSettings, recompute: Recompute = "none", ranks: int = 16
) -> list[Refusal]:
    configuration = dataclasses.replace(
        c, parallel=parallel, model=ModelSettings(path=c.model.path, recompute=recompute)
    )
    return list(
        broken_rules(configuration, LaunchFacts(world_size=ranks, local_world_size=ranks), ())
    )


def grids() -> Iterator[ParallelSettings]:
    sizes = {
        "tp": (1, 2),
        "pp": (1, 2),
        "vpp": (None, 2),
        "cp": (1, 2),
        "ep": (1, 2, 4),
        "etp": (None, 1, 2, 4),
    }
    for values in itertools.product(*sizes.values()):
        options: Any = dict(zip(sizes, values, strict=True))
        yield ParallelSettings(**options)


@pytest.mark.slow
def test_accepted_layouts_are_those_that_are_compared(smallest: Configuration) -> None:
    compared_kinds = {layout.kind for layout in LAYOUTS.values()}
    accepted_kinds = set()
    for parallel in grids():
        kind = kind_of(parallel)
        is_compared = kind in compared_kinds
        is_accepted = not refusals(smallest, parallel)
        assert is_accepted == is_compared, parallel
        if is_accepted:
            accepted_kinds.add(kind)
    assert accepted_kinds == compared_kinds
    assert {case.layout for ranks in RANKS for case in cases_of(ranks)} == set(LAYOUTS)


def test_every_recomputation_and_precision_is_compared_along_every_axis() -> None:
    axes = ("one", "tp", "pp", "vpp", "cp", "ep")
    layouts_by_axis = {
        (axis, layout) for layout in LAYOUTS.values() for axis in layout.kind.axes | {"one"}
    }
    assert {(axis, layout.recompute) for axis, layout in layouts_by_axis} == {
        *itertools.product(axes, RECOMPUTE)
    }
    assert {(axis, layout.dtype) for axis, layout in layouts_by_axis} == {
        *itertools.product(axes, ("float32", "bfloat16"))
    }


# The model has two key-value heads, so that it cannot be split over four ranks
@pytest.mark.parametrize("name", [name for name in LAYOUTS if not name.startswith("tp4")])
def test_compared_layouts_are_accepted_on_their_ranks(smallest: Configuration, name: str) -> None:
    layout = LAYOUTS[name]
    assert refusals(smallest, layout.parallel, layout.recompute, layout.ranks) == []


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"tp": 2, "etp": 1}, "parallel.ep"),
        ({"etp": 2}, "parallel.ep"),
        ({"ep": 2, "etp": 2}, "parallel.tp=1"),
        ({"tp": 2, "ep": 2, "etp": 4}, "parallel.tp=2"),
    ],
)
def test_expert_grids_that_are_incorrect_or_untested_are_refused(
    smallest: Configuration, sizes: dict[str, int], rule: str
) -> None:
    parallel: Any = sizes
    (refusal,) = refusals(smallest, ParallelSettings(**parallel))
    assert (refusal.key, refusal.value) == ("parallel.etp", sizes["etp"])
    assert rule in refusal.rule and "null" in refusal.remedy
    assert refusals(smallest, dataclasses.replace(ParallelSettings(**parallel), etp=None)) == []


def test_the_default_expert_tensor_parallelism() -> None:
    assert ParallelSettings(tp=2).default_etp == 2
    assert ParallelSettings(tp=2, ep=2).default_etp == ParallelSettings(ep=2).default_etp == 1


def test_a_job_too_small_for_tensor_parallelism_is_one_refusal(smallest: Configuration) -> None:
    (refusal,) = refusals(smallest, ParallelSettings(tp=2), ranks=1)
    assert (refusal.key, refusal.value) == ("parallel.tp", 2)
