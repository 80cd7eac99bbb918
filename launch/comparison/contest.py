"""A fair contest: each variant's trials, then the reported runs at its best settings and at its
given clip widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from launch.comparison.accuracy_curves import read_curve
from launch.comparison.search import Point, Trial, at_given_widths, best, read_grids
from launch.comparison.variants import ComparisonRefused, Run, RunPlanner, Variant, has_diverged
from megatron_rl.config.algorithms import AlgoSettings

BEST, GIVEN, BOTH = "best", "best at given widths", "best, and at given widths"


@dataclass(frozen=True)
class Contest:
    """planner: of the reported runs. trials: of the search's. grids: every variant's points, as
    many for each.
    """

    variants: tuple[Variant, ...]
    grids: Mapping[str, list[Point]]
    seeds: tuple[int, ...]
    planner: RunPlanner
    trials: RunPlanner
    algos: Mapping[str, AlgoSettings]
    last: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        variants: Sequence[Variant],
        searched: Sequence[Sequence[str]],
        seeds: Sequence[int],
        planner: RunPlanner,
        last: Sequence[str],
    ) -> Contest:
        """seeds: of the trials. last: overrides of trials alone, after all others. Raises
        `ComparisonRefused`.
        """
        for variant in variants:
            if both := sorted({*seeds} & {*variant.seeds}):
                raise ComparisonRefused(
                    f"--search-seeds {','.join(map(str, both))}: --variant {variant.name} is reported on the same, and "
                    "what was chosen on a seed looks better there. Give others"
                )
        grids = read_grids(searched, variants)
        algos = {
            v.name: planner.run(v.name, v.overrides, v.seeds[0], label=v.name).configuration.algo
            for v in variants
        }
        trials = replace(planner, root=planner.root / "search", trial=True)
        return cls(tuple(variants), grids, tuple(seeds), planner, trials, algos, tuple(last))

    def searched(self) -> dict[tuple[str, Point], list[Run]]:
        """The runs of every trial. Raises `ComparisonRefused`."""
        return {
            (variant.name, point): [
                self._run(self.trials, variant, point, seed, self.last) for seed in self.seeds
            ]
            for variant in self.variants
            for point in self.grids[variant.name]
        }

    def chosen(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, dict[str, Trial]]:
        """Of each variant, by what it was chosen as: its best trial, and its best one at the given
        clip widths, which may be the same. Raises `NoUsableTrial`."""
        found = {}
        for name, own in trials.items():
            top = best(name, own)
            same = at_given_widths(top.point)
            found[name] = (
                {BOTH: top} if same else {BEST: top, GIVEN: best(name, own, at_given_widths)}
            )
        return found

    def reported(
        self, chosen: Mapping[str, Mapping[str, Trial]]
    ) -> dict[tuple[str, str], list[Run]]:
        """The reported runs by variant and what their settings were chosen as.

        Raises `ComparisonRefused`.
        """
        return {
            (variant.name, how): [
                self._run(self.planner, variant, trial.point, seed) for seed in variant.seeds
            ]
            for variant in self.variants
            for how, trial in chosen[variant.name].items()
        }

    def budget(self, trials: Mapping[tuple[str, Point], Sequence[Run]]) -> str:
        """What the search may use for each variant, for people."""
        count, seeds = len(self.grids[self.variants[0].name]), ", ".join(map(str, self.seeds))
        lengths = sorted(
            {run.configuration.train.total_steps for runs in trials.values() for run in runs}
        )
        steps = " or ".join(map(str, lengths))
        return (
            f"Search: {count} trials of each variant, on each seed of {seeds} for {steps} steps; "
            "the highest mean held-out accuracy at the end is taken, of equal ones that with fewer clipped tokens."
        )

    def _run(
        self,
        planner: RunPlanner,
        variant: Variant,
        point: Point,
        seed: int,
        last: tuple[str, ...] = (),
    ) -> Run:
        overrides = (*variant.overrides, *point.overrides(self.algos[variant.name]), *last)
        return planner.run(variant.name, overrides, seed, label=f"{variant.name}-{point.label}")


def judge(searched: Mapping[tuple[str, Point], Sequence[Run]]) -> dict[str, list[Trial]]:
    """The trials of each variant from their complete runs. Raises `RunUnreadable`."""
    trials: dict[str, list[Trial]] = {}
    for (name, point), runs in searched.items():
        curves = [
            None if has_diverged(run) else read_curve(run.directory, run.seed) for run in runs
        ]
        clipped = [curve.clipped for curve in curves if curve is not None]
        accuracies = tuple(None if curve is None else curve.points[-1][1] for curve in curves)
        trials.setdefault(name, []).append(
            Trial(point, accuracies, mean(clipped) if clipped else 0.0)
        )
    return trials
