"""Search of settings, equally large for every variant: grids of points, and the best trials."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_rl.config.algorithms import AlgoSettings, EspoSettings, GrpoSettings, GspoSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from tests.lab.comparison.variants import ComparisonRefused, Variant, check_overrides

# Not a key: it multiplies the clip range of the variant's algorithm.
CLIP_SCALE = "clip_scale"


class NoUsableTrial(Failure):
    """Every trial of a variant diverged."""

    exit_code = ExitCode.NON_FINITE


@dataclass(frozen=True)
class Point:
    """Settings to try, as (key, value) in the order of the command line."""

    values: tuple[tuple[str, str], ...]

    @property
    def label(self) -> str:
        """Part of a directory's name, such as lr1e-3-clip_scale10."""
        parts = [f"{key.rpartition('.')[2]}{value}" for key, value in self.values]
        return "-".join(re.sub(r"[^\w.-]", "_", part) for part in parts)

    @property
    def scale(self) -> float:
        """Factor of the clip range."""
        return float(dict(self.values).get(CLIP_SCALE, "1"))

    def overrides(self, algo: AlgoSettings) -> tuple[str, ...]:
        """Overrides for the command line.

        algo: settings of the variant's algorithm. Raises `ComparisonRefused` for an algorithm
        whose clip range is not known.
        """
        settings = tuple(f"{key}={value}" for key, value in self.values if key != CLIP_SCALE)
        if self.scale == 1:
            return settings
        return settings + tuple(
            f"algo.{name}={value * self.scale:.6g}" for name, value in clip_range(algo).items()
        )


@dataclass(frozen=True)
class Trial:
    """The runs of a point on the seeds of the search.

    accuracies: accuracy of each run at its end, None where it diverged.
    clipped_share: share of clipped tokens, the mean of all runs.
    """

    point: Point
    accuracies: tuple[float | None, ...]
    clipped_share: float

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy, None if any run diverged."""
        finite = [accuracy for accuracy in self.accuracies if accuracy is not None]
        return sum(finite) / len(finite) if len(finite) == len(self.accuracies) else None


def clip_range(algo: AlgoSettings) -> dict[str, float]:
    """The keys below `algo` that set the clip range of an algorithm, with their values.

    For ESPO these are alpha, which multiplies a group's normalised entropy, and the smallest
    range, so that a scale multiplies the range of every group. Raises `ComparisonRefused` for an
    algorithm whose clip range is not known.
    """
    if isinstance(algo, GrpoSettings | GspoSettings):
        return {"clip_low": algo.clip_low, "clip_high": algo.clip_high}
    if isinstance(algo, EspoSettings):
        if algo.fixed_clip is not None:
            return {"fixed_clip": algo.fixed_clip}
        return {"alpha": algo.alpha, "min_clip": algo.min_clip}
    raise ComparisonRefused(
        f"--search {CLIP_SCALE}: it multiplies the clip ranges of grpo, gspo and espo, and "
        f"algo.name={algo.name} is another algorithm. Search its keys instead"
    )


def read_grids(
    searches: Sequence[Sequence[str]], variants: Sequence[Variant]
) -> dict[str, list[Point]]:
    """Read the points of every variant from `--search [NAME:] key=v1,v2 ...`.

    Raises `ComparisonRefused`, also where variants would have different numbers of points.
    """
    names = [variant.name for variant in variants]
    common_words, words_by_name = _sort_words(searches, names)
    missing = [name for name in names if not (words_by_name.get(name) or common_words)]
    if missing:
        raise ComparisonRefused(
            f"--search: {', '.join(missing)} would have no trials. Give --search key=v1,v2 "
            "without a name, which is for all variants"
        )
    grids = {name: list(_points(words_by_name.get(name) or common_words, name)) for name in names}
    if len({len(points) for points in grids.values()}) > 1:
        counts = ", ".join(f"{len(points)} for {name}" for name, points in grids.items())
        raise ComparisonRefused(
            f"--search: all variants need the same number of trials, not {counts}. Give each "
            "variant as many combinations"
        )
    return grids


def _sort_words(
    searches: Sequence[Sequence[str]], names: Sequence[str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Separate the words for all variants from those for single ones."""
    common_words: list[str] = []
    words_by_name: dict[str, list[str]] = {}
    for words in searches:
        head = words[0]
        if not head.endswith(":") or "=" in head:
            common_words.extend(words)
            continue
        name = head.removesuffix(":")
        if name not in names:
            raise ComparisonRefused(
                f"--search {name}: there is no such variant. Name one of {', '.join(names)}"
            )
        if name in words_by_name:
            raise ComparisonRefused(
                f"--search {name}: this option is there twice. Put its keys together"
            )
        words_by_name[name] = list(words[1:])
    return common_words, words_by_name


def _points(words: Sequence[str], name: str) -> Iterator[Point]:
    option = f"--search, for {name}"
    check_overrides(words, option)
    axes: dict[str, list[str]] = {}
    for word in words:
        key, values = _read_axis(word, option)
        if key in axes:
            raise ComparisonRefused(f"{option}: {word}: the key {key} is there twice. Give it once")
        axes[key] = values
    if CLIP_SCALE in axes:
        _check_scales(axes[CLIP_SCALE], option)
    for combination in product(*axes.values()):
        yield Point(tuple(zip(axes, combination, strict=True)))


def _read_axis(word: str, option: str) -> tuple[str, list[str]]:
    """Read the key and the values of `key=v1,v2`."""
    key, _, text = word.partition("=")
    values = text.split(",")
    is_key = re.fullmatch(r"[\w.]+", key)
    if not is_key or not all(re.fullmatch(r"[\w.+-]+", value) for value in values):
        raise ComparisonRefused(f"{option}: {word}: give key=v1,v2 with plain words or numbers")
    if len(set(values)) < len(values):
        raise ComparisonRefused(f"{option}: {word}: a value is there twice. Give each value once")
    return key, values


def _check_scales(values: Sequence[str], option: str) -> None:
    subject = f"{option}: {CLIP_SCALE}={','.join(values)}"
    try:
        scales = [float(value) for value in values]
    except ValueError:
        scales = []
    are_positive = all(0 < scale < math.inf for scale in scales)
    if not scales or not are_positive or len(set(scales)) < len(scales):
        raise ComparisonRefused(
            f"{subject}: it multiplies the clip range. Give different numbers above 0"
        )
    if 1 not in scales:
        raise ComparisonRefused(
            f"{subject}: the configured clip range is reported too and needs trials. Add 1"
        )


def best_trial(
    variant: str,
    trials: Sequence[Trial],
    is_allowed: Callable[[Point], bool] = lambda point: True,
) -> Trial:
    """Return the trial with the highest mean accuracy, or of equal ones with fewer clipped tokens.

    Raises `NoUsableTrial`.
    """
    candidates = [
        (trial.accuracy, trial)
        for trial in trials
        if is_allowed(trial.point) and trial.accuracy is not None
    ]
    if not candidates:
        raise NoUsableTrial(
            f"{variant}: every trial diverged. Search smaller learning rates, with another --out"
        )
    return max(candidates, key=lambda pair: (pair[0], -pair[1].clipped_share))[1]


def has_configured_clip_range(point: Point) -> bool:
    """True for a point that leaves the clip range as it is."""
    return point.scale == 1
