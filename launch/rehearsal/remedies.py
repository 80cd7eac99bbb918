"""Finds changes of a configuration with which a rank fits, and rehearses each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.measurement import Measurement, measure
from launch.rehearsal.options import read_options
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.memory import rank_memory

MAX_REMEDIES = 3
_GIB = 2**30
_MAX_RANK_FACTOR = 8
# A change is rehearsed if the estimate, which may be this much too large, says that it fits.
_ESTIMATE_TOLERANCE = 0.05

Rehearse = Callable[[Sequence[str], Configuration, ModelShape], Measurement]


@dataclass(frozen=True)
class Remedy:
    """A change that may let a rank fit.

    arguments: of the command. They replace arguments with the same key. cost: in words.
    """

    arguments: tuple[str, ...]
    cost: str

    def __str__(self) -> str:
        return " ".join(self.arguments)


def remedies(c: Configuration, shape: ModelShape, ranks: int) -> Iterator[Remedy]:
    """Yield changes, those that need no more ranks first, and cheap ones before others.

    Settings come one by one and all together, then other grids, each also with all settings.
    """
    settings = list(_settings(c))
    yield from settings
    together = Remedy(
        tuple(argument for change in settings for argument in change.arguments),
        ", ".join(change.cost for change in settings),
    )
    if len(settings) > 1:
        yield together
    for grid in (*_other_grids(c, shape, ranks), *_more_ranks(c, shape, ranks)):
        yield grid
        if settings:
            yield Remedy(grid.arguments + together.arguments, f"{grid.cost}, {together.cost}")


def _more_ranks(c: Configuration, shape: ModelShape, ranks: int) -> Iterator[Remedy]:
    """Yield grids of more ranks."""
    factor = 2
    while factor <= _MAX_RANK_FACTOR:
        more = f"ranks={ranks * factor}"
        cost = f"{factor} times the ranks"
        yield Remedy((more,), f"{cost} which share the optimizer")
        if shape.num_experts and not shape.num_experts % (factor * c.parallel.ep):
            yield Remedy((more, f"parallel.ep={factor * c.parallel.ep}"), cost)
        if factor * c.parallel.pp <= shape.num_layers:
            yield Remedy((more, f"parallel.pp={factor * c.parallel.pp}"), cost)
        factor *= 2


def _settings(c: Configuration) -> Iterator[Remedy]:
    """Yield changes of settings on the same grid."""
    longest = c.data.max_prompt_tokens + c.rollout.max_new_tokens
    tokens = c.train.tokens_per_micro_batch
    if tokens > longest:
        fewer = max(longest, tokens // 2)
        cost = f"{tokens / fewer:.1f} times as many micro-batches"
        yield Remedy((f"train.tokens_per_micro_batch={fewer}",), cost)
    if c.model.recompute != "full":
        yield Remedy(("model.recompute=full",), "a second forward pass in the backward pass")
    if c.model.dtype == "float32":
        yield Remedy(("model.dtype=bfloat16",), "less precise weights")


def _other_grids(c: Configuration, shape: ModelShape, ranks: int) -> Iterator[Remedy]:
    """Yield other grids of the same ranks."""
    p = c.parallel
    splits_experts = shape.num_experts and not shape.num_experts % (2 * p.ep)
    if splits_experts and not (ranks // p.pp) % (2 * p.ep):
        yield Remedy((f"parallel.ep={2 * p.ep}",), "more traffic between experts")
    sharing = (2 * p.pp * p.tp * p.cp, 2 * p.pp * p.ep * (p.etp or p.default_etp))
    if not any(ranks % count for count in sharing) and 2 * p.pp <= shape.num_layers:
        yield Remedy((f"parallel.pp={2 * p.pp}",), "more idle time at both ends of the pipeline")


@dataclass(frozen=True)
class Candidate:
    """A remedy as a command.

    arguments: of the command with the change. estimate: bytes, by `planning/memory.py`.
    refusal: why the settings are refused; empty if they are not.
    """

    remedy: Remedy
    arguments: tuple[str, ...]
    configuration: Configuration | None = None
    estimate: int = 0
    refusal: str = ""


def list_candidates(
    c: Configuration, shape: ModelShape, arguments: Sequence[str]
) -> Iterator[Candidate]:
    """Yield all remedies of a command with the estimate for its rank, in their order.

    Among more ranks, it is the rank at the same place in the pipeline.
    """
    options = read_options(arguments)
    for remedy in remedies(c, shape, options.ranks):
        changes = dict(argument.split("=", 1) for argument in remedy.arguments)
        ranks = int(changes.get("ranks", options.ranks))
        rank = options.rank * ranks // options.ranks
        keys = {"rank", "out", "remedies", *changes}
        others = [argument for argument in arguments if argument.partition("=")[0] not in keys]
        new_arguments = (*others, *remedy.arguments, f"rank={rank}")
        try:
            configuration = read_options(new_arguments).configuration()
            stage = rank * configuration.parallel.pp // ranks
            plan = rank_memory(configuration, shape, world_size=ranks, stage=stage)
        except (Failure, ValueError) as error:
            yield Candidate(remedy, new_arguments, refusal=str(error).splitlines()[0])
            continue
        yield Candidate(remedy, new_arguments, configuration, plan.total)


def rehearse_remedies(
    c: Configuration,
    shape: ModelShape,
    *,
    arguments: Sequence[str],
    peak: float,
    work: float,
    rehearse: Rehearse = measure,
) -> Iterator[str]:
    """Rehearse changes until three of them fit. Yields a line for each change.

    Changes that do not fit by the estimate are named, and not rehearsed.

    arguments: of the command that found that the rank does not fit. peak, work: bytes, and
    operations for each row of an update, that it measured. rehearse: measures a changed command.
    """
    limit = read_options(arguments).gpu.memory
    num_fits = 0
    for candidate in list_candidates(c, shape, arguments):
        if num_fits == MAX_REMEDIES:
            return
        if candidate.configuration is None:
            yield f"refused: {candidate.remedy}: {candidate.refusal}"
            continue
        if candidate.estimate > limit * (1 + _ESTIMATE_TOLERANCE):
            size = candidate.estimate / _GIB
            yield f"too large by the estimate: {candidate.remedy}: {size:.2f} GiB"
            continue
        try:
            measurement = rehearse(candidate.arguments, candidate.configuration, shape)
        except RehearsalUnavailable as error:
            yield f"cannot be rehearsed: {candidate.remedy}: {error}"
            continue
        fits = measurement.peak <= limit
        num_fits += fits
        rank = read_options(candidate.arguments).rank
        yield (
            f"{'fits' if fits else 'does not fit'}: {candidate.remedy}: "
            f"{measurement.peak / _GIB:.2f} GiB, {(peak - measurement.peak) / _GIB:.2f} GiB less "
            f"on rank {rank}, {measurement.work / max(1.0, work):.2f} times the matrix products of "
            f"a row on a rank. Cost: {candidate.remedy.cost}"
        )
    if not num_fits:
        yield "none of these changes fits. Take a GPU with more memory, or shorter rollouts"
