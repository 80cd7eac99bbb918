"""A search of the same size for every variant: grids of settings, and the settings that did best."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from launch.comparison.variants import ComparisonRefused, Variant, check_overrides
from megatron_rl.config.algorithms import AlgoSettings, EspoSettings, GrpoSettings, GspoSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure

CLIP_SCALE = "clip_scale"  # not a key: every clip width of the variant's algorithm, times this


class NoUsableTrial(Failure):
    """Every trial of a variant diverged."""

    exit_code = ExitCode.NON_FINITE


@dataclass(frozen=True)
class Point:
    """Settings to try, as (key, value) in the order in which they were given."""

    values: tuple[tuple[str, str], ...]

    @property
    def label(self) -> str:
        """For a directory's name: lr1e-3-clip_scale10."""
        return "-".join(
            re.sub(r"[^\w.-]", "_", f"{key.rpartition('.')[2]}{value}")
            for key, value in self.values
        )

    @property
    def scale(self) -> float:
        """What the clip widths are multiplied by."""
        return float(dict(self.values).get(CLIP_SCALE, "1"))

    def overrides(self, algo: AlgoSettings) -> tuple[str, ...]:
        """For the command line.

        algo: the variant's own. Raises `ComparisonRefused` for a loss without known widths.
        """
        plain = tuple(f"{key}={value}" for key, value in self.values if key != CLIP_SCALE)
        if self.scale == 1:
            return plain
        return plain + tuple(
            f"algo.{name}={width * self.scale:.6g}" for name, width in clip_widths(algo).items()
        )


@dataclass(frozen=True)
class Trial:
    """A point's runs on the search's seeds. accuracies: of each, at its end; None where it
    diverged. clipped: the share of clipped tokens, the mean of all."""

    point: Point
    accuracies: tuple[float | None, ...]
    clipped: float

    @property
    def accuracy(self) -> float | None:
        """The mean; None where any run diverged."""
        reached = [accuracy for accuracy in self.accuracies if accuracy is not None]
        return sum(reached) / len(reached) if len(reached) == len(self.accuracies) else None


def clip_widths(algo: AlgoSettings) -> dict[str, float]:
    """The widths of an algorithm's trust region, by key below `algo`.

    ESPO: alpha times a group's normalised entropy, and the least width, so that the scale
    multiplies every group's. Raises `ComparisonRefused` for a loss of which they are not known.
    """
    if isinstance(algo, GrpoSettings | GspoSettings):
        return {"clip_low": algo.clip_low, "clip_high": algo.clip_high}
    if isinstance(algo, EspoSettings):
        if algo.fixed_clip is not None:
            return {"fixed_clip": algo.fixed_clip}
        return {"alpha": algo.alpha, "min_clip": algo.min_clip}
    raise ComparisonRefused(
        f"--search {CLIP_SCALE}: it multiplies the widths of grpo, gspo and espo, and algo.name={algo.name} is none of "
        "them. Search its own keys"
    )


def read_grids(
    given: Sequence[Sequence[str]], variants: Sequence[Variant]
) -> dict[str, list[Point]]:
    """Points of every variant from `--search [NAME:] key=v1,v2 ...`, as many for each.

    Raises `ComparisonRefused`.
    """
    common: list[str] = []
    own: dict[str, list[str]] = {}
    names = [variant.name for variant in variants]
    for words in given:
        name = (
            words[0].removesuffix(":") if words[0].endswith(":") and "=" not in words[0] else None
        )
        if name is None:
            common.extend(words)
        elif name not in names:
            raise ComparisonRefused(
                f"--search {name}: there is no such variant. Name one of {', '.join(names)}"
            )
        elif name in own:
            raise ComparisonRefused(f"--search {name}: given twice. Put its keys together")
        else:
            own[name] = list(words[1:])
    if left := [name for name in names if not (own.get(name) or common)]:
        raise ComparisonRefused(
            f"--search: {', '.join(left)} would not be searched. Give --search key=v1,v2 without a name, for all"
        )
    grids = {name: list(_points(own.get(name) or common, name)) for name in names}
    if len({len(points) for points in grids.values()}) > 1:
        told = ", ".join(f"{len(points)} of {name}" for name, points in grids.items())
        raise ComparisonRefused(
            f"--search: every variant has the same number of trials, not {told}. Even them out"
        )
    return grids


def _points(words: Sequence[str], name: str) -> Iterator[Point]:
    said_by = f"--search, for {name}"
    check_overrides(words, said_by)
    axes: dict[str, list[str]] = {}
    for word in words:
        key, _, text = word.partition("=")
        values = text.split(",")
        if not re.fullmatch(r"[\w.]+", key) or not all(
            re.fullmatch(r"[\w.+-]+", value) for value in values
        ):
            raise ComparisonRefused(
                f"{said_by}: {word}: give key=v1,v2 with plain words or numbers"
            )
        if key in axes or len(set(values)) < len(values):
            raise ComparisonRefused(
                f"{said_by}: {word}: a key or a value comes twice. Give each once"
            )
        axes[key] = values
    if CLIP_SCALE in axes:
        _check_scales(axes[CLIP_SCALE], said_by)
    for combination in product(*axes.values()):
        yield Point(tuple(zip(axes, combination, strict=True)))


def _check_scales(values: Sequence[str], said_by: str) -> None:
    given = f"{said_by}: {CLIP_SCALE}={','.join(values)}"
    try:
        scales = [float(value) for value in values]
    except ValueError:
        scales = []
    if (
        not scales
        or not all(0 < scale < math.inf for scale in scales)
        or len(set(scales)) < len(scales)
    ):
        raise ComparisonRefused(
            f"{given}: widths are multiplied by it. Give different numbers above 0"
        )
    if 1 not in scales:
        raise ComparisonRefused(
            f"{given}: the widths as given are reported too, and need trials. Add 1"
        )


def best(
    variant: str, trials: Sequence[Trial], allowed: Callable[[Point], bool] = lambda point: True
) -> Trial:
    """The highest mean accuracy; of equal ones the one that clips fewer tokens. Raises
    `NoUsableTrial`.
    """
    finished = [
        (trial.accuracy, trial)
        for trial in trials
        if allowed(trial.point) and trial.accuracy is not None
    ]
    if not finished:
        raise NoUsableTrial(
            f"{variant}: every trial diverged. Search smaller learning rates, with another --out"
        )
    return max(finished, key=lambda pair: (pair[0], -pair[1].clipped))[1]


def at_given_widths(point: Point) -> bool:
    """Whether a point leaves the clip widths as they are."""
    return point.scale == 1
