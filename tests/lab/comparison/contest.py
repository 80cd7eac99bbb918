"""Search and final runs: trials of every variant, then the final runs at the best settings.

Each variant has a final run at its best settings, and one at its best settings with the
configured clip range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from megatron_rl.config.algorithms import AlgoSettings
from tests.lab.comparison.accuracy_curves import read_curve
from tests.lab.comparison.search import (
    Point,
    Trial,
    best_trial,
    has_configured_clip_range,
    read_grids,
)
from tests.lab.comparison.variants import ComparisonRefused, Run, RunPlanner, Variant, has_diverged

BEST = "best"
BEST_AT_CONFIGURED_CLIP = "best at the configured clip range"
BOTH = "best, and at the configured clip range"


@dataclass(frozen=True)
class Contest:
    """Trials and final runs of all variants.

    grids: the points to try for each variant, equally many for each.
    trial_seeds: seeds of the trials.
    planner: planner of the final runs.
    trial_planner: planner of the trials.
    algos: algorithm settings of each variant.
    trial_overrides: overrides of the trials alone, after all others.
    """

    variants: tuple[Variant, ...]
    grids: Mapping[str, list[Point]]
    trial_seeds: tuple[int, ...]
    planner: RunPlanner
    trial_planner: RunPlanner
    algos: Mapping[str, AlgoSettings]
    trial_overrides: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        variants: Sequence[Variant],
        searches: Sequence[Sequence[str]],
        seeds: Sequence[int],
        planner: RunPlanner,
        trial_overrides: Sequence[str],
    ) -> Contest:
        """Read the words of every `--search`. Raises `ComparisonRefused`.

        seeds: seeds of the trials.
        planner: planner of the final runs.
        """
        for variant in variants:
            common_seeds = sorted({*seeds} & {*variant.seeds})
            if common_seeds:
                raise ComparisonRefused(
                    f"--search-seeds {','.join(map(str, common_seeds))}: --variant {variant.name} "
                    "is reported on the same seeds. Settings that were chosen on a seed look "
                    "better on that seed. Give other seeds"
                )
        algos = {
            v.name: planner.run(v.name, v.overrides, v.seeds[0], label=v.name).configuration.algo
            for v in variants
        }
        return cls(
            variants=tuple(variants),
            grids=read_grids(searches, variants),
            trial_seeds=tuple(seeds),
            planner=planner,
            trial_planner=replace(planner, root=planner.root / "search", is_trial=True),
            algos=algos,
            trial_overrides=tuple(trial_overrides),
        )

    def trial_runs(self) -> dict[tuple[str, Point], list[Run]]:
        """The runs of every trial. Raises `ComparisonRefused`."""
        return {
            (variant.name, point): [self._trial_run(variant, point, s) for s in self.trial_seeds]
            for variant in self.variants
            for point in self.grids[variant.name]
        }

    def choose(self, trials: Mapping[str, Sequence[Trial]]) -> dict[str, dict[str, Trial]]:
        """Choose trials of each variant, by the reason of the choice.

        The best trial and the best one at the configured clip range may be the same trial. Raises
        `NoUsableTrial`.
        """
        choices = {}
        for name, candidates in trials.items():
            best = best_trial(name, candidates)
            if has_configured_clip_range(best.point):
                choices[name] = {BOTH: best}
            else:
                second = best_trial(name, candidates, has_configured_clip_range)
                choices[name] = {BEST: best, BEST_AT_CONFIGURED_CLIP: second}
        return choices

    def final_runs(
        self, choices: Mapping[str, Mapping[str, Trial]]
    ) -> dict[tuple[str, str], list[Run]]:
        """The final runs, by variant and reason of the choice. Raises `ComparisonRefused`."""
        return {
            (variant.name, reason): [
                self._run(self.planner, variant, trial.point, seed) for seed in variant.seeds
            ]
            for variant in self.variants
            for reason, trial in choices[variant.name].items()
        }

    def budget(self, trial_runs: Mapping[tuple[str, Point], Sequence[Run]]) -> str:
        """Describe in one sentence what the search spends on each variant."""
        count = len(self.grids[self.variants[0].name])
        seeds = ", ".join(map(str, self.trial_seeds))
        runs = [run for group in trial_runs.values() for run in group]
        lengths = sorted({run.configuration.train.total_steps for run in runs})
        steps = " or ".join(map(str, lengths))
        return (
            f"Search: {count} trials of each variant, on each seed of {seeds} for {steps} steps. "
            "The trial with the highest mean held-out accuracy at the end is chosen, or with "
            "fewer clipped tokens where two are equal."
        )

    def _trial_run(self, variant: Variant, point: Point, seed: int) -> Run:
        return self._run(self.trial_planner, variant, point, seed, self.trial_overrides)

    def _run(
        self,
        planner: RunPlanner,
        variant: Variant,
        point: Point,
        seed: int,
        last_overrides: tuple[str, ...] = (),
    ) -> Run:
        point_overrides = point.overrides(self.algos[variant.name])
        overrides = (*variant.overrides, *point_overrides, *last_overrides)
        return planner.run(variant.name, overrides, seed, label=f"{variant.name}-{point.label}")


def read_trials(trial_runs: Mapping[tuple[str, Point], Sequence[Run]]) -> dict[str, list[Trial]]:
    """Read the trials of each variant from their complete runs. Raises `RunUnreadable`."""
    trials: dict[str, list[Trial]] = {}
    for (name, point), runs in trial_runs.items():
        curves = [
            None if has_diverged(run) else read_curve(run.directory, run.seed) for run in runs
        ]
        shares = [curve.clipped_share for curve in curves if curve is not None]
        accuracies = tuple(None if curve is None else curve.points[-1][1] for curve in curves)
        trial = Trial(point, accuracies, mean(shares) if shares else 0.0)
        trials.setdefault(name, []).append(trial)
    return trials
