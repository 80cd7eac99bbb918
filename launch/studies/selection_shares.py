"""Measure how much prompts count in the loss by their pass rate, without engines.

The selectors are those of a run, and correctness is simulated with constant pass rates. Start it in
the root of the repository:

    python -m launch.studies.selection_shares            # the table of docs/selection.md
    python -m launch.studies.selection_shares --small    # seconds

The prompts are those of `launch.studies.simulate_selection`, without drift: 6,000 of them, 128
mixed groups of 8 a step. There are 200 steps and two seeds. The first 30 steps are left out.

Output: a Markdown table. A column is a range of pass rates. Its values are the weights of the mixed
groups of its prompts, as a share of the weights in their step, relative to what one whole group of
each prompt gives. They are relative to pass rates from 0.1 to 0.3 too. So uniform selection has
about 1 everywhere. The last two columns are the same for the rollouts of all-correct and
all-incorrect groups, which `credit.all_correct=zvp` and `credit.all_incorrect=zvp` train.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from launch.studies.simulate_selection import VARIANTS, Size, World, open_world_selector, play
from megatron_rl.config.schema import SelectionSettings
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.group import Group
from megatron_rl.credit.group_kinds import GroupKind, kind_of
from megatron_rl.prompts.selection.selector import SelectionResult

Floats = npt.NDArray[np.float64]

FULL = Size(steps=200, first_steps=30, seeds=2)
SMALL = Size(prompts=900, prompts_per_step=32, steps=120, first_steps=20, seeds=1)
BOUNDS = (0.0, 0.03, 0.1, 0.3, 0.7, 0.89, 0.96, 1.0)
REFERENCE = (0.1, 0.3)
_BY_NAME = {name: VARIANTS[name] for name in ("uniform", "belief", "belief_sharp")}
SHARE_VARIANTS: Mapping[str, SelectionSettings] = {
    "uniform": _BY_NAME["uniform"],
    "belief": _BY_NAME["belief"],
    "belief, reweight=3": replace(_BY_NAME["belief"], reweight=3.0),
    "belief, reweight=10": replace(_BY_NAME["belief"], reweight=10.0),
    "belief_sharp": _BY_NAME["belief_sharp"],
    "belief_sharp, reweight=25": replace(_BY_NAME["belief_sharp"], reweight=25.0),
}


@dataclass
class Shares:
    """Sums over steps of the shares that each prompt has in the loss.

    mixed_shares: float64 [prompts], shares of mixed groups.
    all_correct, all_incorrect: shares of the rollouts of such groups, over all prompts. Stopped
    probes are among them.
    """

    num_prompts: int
    mixed_shares: Floats = field(init=False)
    all_correct: float = 0.0
    all_incorrect: float = 0.0

    def __post_init__(self) -> None:
        self.mixed_shares = np.zeros(self.num_prompts)

    def add(self, result: SelectionResult, samples: int) -> None:
        """Add a step. samples: number of rollouts of a whole group."""
        groups = [(group, kind_of(group)) for group in result.groups + result.stopped_groups]
        total = sum(group.weight for group, kind in groups if kind is GroupKind.MIXED)
        for group, kind in groups:
            share = group.weight / total
            if kind is GroupKind.MIXED:
                self.mixed_shares[int(group.prompt.id)] += share
            elif kind is GroupKind.ALL_CORRECT:
                self.all_correct += share * _size(group, samples)
            elif kind is GroupKind.ALL_INCORRECT:
                self.all_incorrect += share * _size(group, samples)

    def columns(self, rates: Floats, samples: int) -> dict[str, float]:
        """Return the columns of the table, relative to the expectation of whole groups."""
        all_correct = rates**samples
        all_incorrect = (1 - rates) ** samples
        mixed_probabilities = 1 - all_correct - all_incorrect

        def relative_share(low: float, high: float) -> float:
            is_inside = (rates >= low) & (rates < high)
            return float(self.mixed_shares[is_inside].sum() / mixed_probabilities[is_inside].sum())

        reference = relative_share(*REFERENCE)
        pairs = itertools.pairwise(BOUNDS)
        return {
            **{
                f"{low:g} to {high:g}": relative_share(low, high) / reference for low, high in pairs
            },
            "all correct": self.all_correct / float(all_correct.sum()) / reference,
            "all incorrect": self.all_incorrect / float(all_incorrect.sum()) / reference,
        }


def _size(group: Group, samples: int) -> float:
    return len(group.rollouts) / samples


def measure(settings: SelectionSettings, size: Size) -> dict[str, float]:
    """Simulate one variant and return the means of its columns over the seeds."""
    rows = [_measure_seed(settings, size, seed) for seed in range(size.seeds)]
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _measure_seed(settings: SelectionSettings, size: Size, seed: int) -> dict[str, float]:
    world = World(size, seed, drift=0.0)
    selector = open_world_selector(settings, world, seed)
    shares = Shares(size.prompts)
    for step in range(1, size.steps + 1):
        world.begin_step(step)
        selection = selector.select(step)
        play(selection, world, step)
        result = selection.result()
        if step > size.first_steps:
            shares.add(result, size.samples)
    return shares.columns(world.rates, size.samples)


def table(results: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    columns = list(next(iter(results.values())))
    yield "| | " + " | ".join(columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, result in results.items():
        yield f"| {name} | " + " | ".join(f"{result[column]:.2f}" for column in columns) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.selection_shares",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--small", action="store_true", help="900 prompts, 32 groups a step, 120 steps, one seed"
    )
    size = SMALL if parser.parse_args(arguments).small else FULL
    print("\n".join(table({name: measure(s, size) for name, s in SHARE_VARIANTS.items()})))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
