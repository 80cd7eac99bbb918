"""Training on recorded batches instead of engines: the same rollouts and verdicts in order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, RolloutLocation
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import (
    RouteError,
    Routes,
    RouteShape,
    require_stored_shape,
    validate_stored_routes,
)
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.rollouts.queue.saved_groups import SavedGroup
from megatron_rl.rollouts.recording.format import BATCH_FILE, BatchRecord, SavedRollout
from megatron_rl.rollouts.recording.reader import (
    RecordingUnreadable,
    check_batch,
    read_batch_record,
    read_groups,
    read_groups_without_routes,
    read_saved_rollout,
)
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.wire.repetition import repetition_of
from megatron_rl.rollouts.wire.store import RolloutStore

CheckRoutes = Callable[[Routes, RouteShape, int], Routes | None]

_OTHER_MODEL = (
    "model.path is not the model that recorded it. Give the model of the recording, or record again"
)


class BadRecording(Failure):
    """rollout.recording names something that cannot be trained on."""

    exit_code = ExitCode.BAD_DATA


class UnfitRollout(ValueError):
    """A recorded rollout cannot be trained on by this model."""


def fit_rollout(
    rollout: Rollout,
    routes: RouteShape | None,
    vocab_size: int | None,
    check_routes: CheckRoutes = validate_stored_routes,
) -> Rollout:
    """Check a recorded rollout against a model and return it as that model trains on it.

    This is the only check of recorded tokens and routes: later a rank would fail on an index out of
    range, or train other experts.

    routes, vocab_size: of the model; routes None: drop the recorded routes; vocab_size None: any
    token. check_routes: raises
    `RouteError`, or returns the routes to keep.
    Raises `UnfitRollout`.
    """
    name = f"rollout {rollout.rollout_id}"
    if vocab_size is not None and not _is_in_vocabulary(rollout, vocab_size):
        raise UnfitRollout(f"{name}: a token id is outside 0..{vocab_size - 1}; {_OTHER_MODEL}")
    if routes is None:
        return replace(rollout, routes=None)
    if rollout.routes is None:
        raise UnfitRollout(f"{name}: no routes were recorded. Use train.replay=trainer or off")
    try:
        kept_routes = check_routes(rollout.routes, routes, rollout.num_tokens - 1)
    except RouteError as error:
        raise UnfitRollout(f"{name}: {error}; {_OTHER_MODEL}") from error
    return replace(rollout, routes=kept_routes)


def load_rollout(
    saved: SavedRollout, prompt_id: str, routes: RouteShape | None, vocab_size: int | None
) -> Rollout:
    """Read a rollout from its place as a model trains on it.

    routes, vocab_size: as in `fit_rollout`. Raises `RecordingUnreadable` and `UnfitRollout`.
    """
    return fit_rollout(read_saved_rollout(saved, prompt_id), routes, vocab_size)


def load_batch(
    directory: Path,
    store: RolloutStore,
    routes: RouteShape | None,
    vocab_size: int,
    *,
    ngram: int | None,
) -> RolloutBatch:
    """Read a recorded batch into a store, where the ranks of all nodes can read it.

    routes, vocab_size: as in `fit_rollout`. ngram: `credit.repetition_ngram` of this run, by which
    repetitions are measured anew. Raises `RecordingUnreadable` and `UnfitRollout`.
    """
    record = _read_complete(directory)
    recorded_groups = read_groups(directory)
    rollouts_by_group = [
        [_fit(rollout, directory, routes, vocab_size) for rollout in rollouts]
        for _, rollouts in recorded_groups
    ]
    groups = tuple(
        _with_locations(
            _with_repetitions(group, rollouts, ngram), store.put(group.group_id, rollouts)
        )
        for (group, _), rollouts in zip(recorded_groups, rollouts_by_group, strict=True)
    )
    return _make_batch(record, groups)


def load_batch_without_rollouts(
    directory: Path, routes: RouteShape | None, vocab_size: int, *, ngram: int | None
) -> tuple[RolloutBatch, list[SavedGroup]]:
    """Read a recorded batch whose rollouts stay where they are. Its groups have no locations.

    routes, vocab_size, ngram: as in `load_batch`. Raises `RecordingUnreadable` and `UnfitRollout`.
    """
    record = _read_complete(directory)
    saved_groups = load_open_groups(directory, routes, vocab_size, ngram=ngram)
    batch = _make_batch(record, tuple(saved.group for saved in saved_groups))
    return batch.restored(record.step), saved_groups


def _read_complete(directory: Path) -> BatchRecord:
    record = read_batch_record(directory)
    if record.is_open:
        raise RecordingUnreadable(
            f"{directory} holds rollouts of a step that was not sampled whole"
        )
    return record


def _make_batch(record: BatchRecord, groups: tuple[Group, ...]) -> RolloutBatch:
    surplus_start = len(groups) - record.num_surplus
    stopped_start = surplus_start - record.num_stopped
    return RolloutBatch(
        groups=groups[:stopped_start],
        stopped_groups=groups[stopped_start:surplus_start],
        surplus_groups=groups[surplus_start:],
        generated_tokens=record.generated_tokens,
        engines_left_out=record.engines_left_out,
        delivered_ids=tuple(group.group_id for group in groups),
        num_repeated=record.num_repeated,
        selection_metrics={
            name: math.nan if value is None else value
            for name, value in record.selection_metrics.items()
        },
        unused_tokens=record.unused_tokens,
    )


def load_open_groups(
    directory: Path, routes: RouteShape | None, vocab_size: int, *, ngram: int | None
) -> list[SavedGroup]:
    """Read what a checkpoint has of the groups of a step, and where their rollouts are.

    The experts in their routes are checked where they are read, with `load_rollout`.

    routes, vocab_size, ngram: as in `load_batch`. Raises `RecordingUnreadable` and `UnfitRollout`.
    """
    groups = []
    for group, rollouts in read_groups_without_routes(directory):
        for _, rollout in rollouts:
            _fit(rollout, directory, routes, vocab_size, require_stored_shape)
        # The clock of the collector that measured these has ended
        timeless_group = msgspec.structs.replace(group, generated_at=0.0, scored_at=0.0)
        measured_group = _with_repetitions(timeless_group, [r for _, r in rollouts], ngram)
        groups.append(SavedGroup(measured_group, tuple(saved for saved, _ in rollouts)))
    return groups


def _fit(
    rollout: Rollout,
    directory: Path,
    routes: RouteShape | None,
    vocab_size: int,
    check_routes: CheckRoutes = validate_stored_routes,
) -> Rollout:
    try:
        return fit_rollout(rollout, routes, vocab_size, check_routes)
    except UnfitRollout as error:
        raise UnfitRollout(f"{directory}, {error}") from error


class RecordedRollouts:
    """Prompts, rollouts and queue of a run with mode=train_only, on rank 0.

    directory: of a run with mode=rollout_only, or its `recorded/`.
    node: the node of this process.
    batches: number of complete batches that the run needs.
    routes, vocab_size: of the model that is trained; routes None: routes are not replayed.
    ngram: as in `load_batch`.
    Raises `BadRecording` when there are fewer than `batches` complete batches, or when one of
    their files is missing or truncated.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        node: int,
        batches: int,
        routes: RouteShape | None,
        vocab_size: int,
        ngram: int | None,
    ) -> None:
        path = Path(directory).expanduser().resolve()
        self._root = path / "recorded" if (path / "recorded").is_dir() else path
        self._batches = sorted(file.parent for file in self._root.glob(f"step-*/{BATCH_FILE}"))
        if len(self._batches) < batches:
            raise BadRecording(
                f"rollout.recording={str(directory)!r}: train.total_steps={batches}, but "
                f"{self._root} holds {len(self._batches)} complete batches (step-*/{BATCH_FILE}). "
                "Train fewer steps, or record more with mode=rollout_only"
            )
        try:
            for batch in self._batches[:batches]:
                check_batch(batch)
        except RecordingUnreadable as error:
            raise BadRecording(f"rollout.recording: {error}") from error
        self._store = RolloutStore(node)
        self._routes = routes
        self._vocab_size = vocab_size
        self._ngram = ngram
        self._position = 0
        self._num_tokens = 0  # of batches since the last `count_tokens`
        self._digest = hashlib.sha256(
            b"".join((path / BATCH_FILE).read_bytes() for path in self._batches)
        ).hexdigest()

    @property
    def num_batches(self) -> int:
        """Number of complete batches."""
        return len(self._batches)

    def state(self) -> SelectorState:
        """Return the position in the recording."""
        cursor = PromptCursor(epoch=0, position=self._position, digest=self._digest)
        return SelectorState(prompts=cursor)

    def restore(self, state: SelectorState) -> None:
        """Continue after the batches that an earlier run trained on.

        Raises `BadRecording` if that run trained on another recording.
        """
        if state.prompts.digest != self._digest:
            raise BadRecording(
                "run.resume: the checkpoint's run trained on other batches than those in "
                f"{self._root}"
            )
        self._position = state.prompts.position

    def inflate_variance(self) -> None:
        """Do nothing: recorded prompts are not selected by beliefs."""

    def sample(self, step: int) -> RolloutBatch:
        """Return the next batch, readable by the ranks of all nodes. Raises `BadRecording`."""
        return self.finish_step()

    @property
    def open_steps(self) -> tuple[int, ...]:
        """None: a batch is read as a whole."""
        return ()

    def begin_step(self, step: int) -> None:
        """Do nothing: the batches are sampled already."""

    def finish_step(self, can_continue: Callable[[], bool] | None = None) -> RolloutBatch:
        """Return the next batch. Raises `BadRecording`."""
        try:
            batch = load_batch(
                self._batches[self._position],
                self._store,
                self._routes,
                self._vocab_size,
                ngram=self._ngram,
            )
        except (RecordingUnreadable, UnfitRollout) as error:
            raise BadRecording(f"rollout.recording: {error}") from error
        self._position += 1
        self._num_tokens += batch.generated_tokens
        return batch

    def drop_open(self) -> int:
        """Do nothing: no step is open. Returns 0."""
        return 0

    def count_tokens(self) -> int:
        """Return the tokens of the batches that were read since the last call."""
        num_tokens = self._num_tokens
        self._num_tokens = 0
        return num_tokens

    def open_groups(self, partials: Sequence[Group]) -> dict[int, tuple[Group, ...]]:
        """Return nothing: no step is open."""
        return {}

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch: this process holds its rollouts, so they cannot be gone."""
        return batch

    def require(self, step: int, batch: RolloutBatch) -> None:
        """Do nothing: the run that recorded the batch could use it."""

    def sample_again(
        self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str]
    ) -> RolloutBatch:
        """Raise `BadRecording`: this process holds the rollouts, so they cannot be gone."""
        raise BadRecording(f"recorded rollouts are gone: {', '.join(rollout_ids)}")

    def release(self, group_ids: Sequence[str]) -> None:
        """Free the memory of groups."""
        self._store.release(group_ids)

    def set_version(self, version: int) -> None:
        """Do nothing: no engine samples from the weights."""

    def refresh(self) -> None:
        """Do nothing: no engine fails or joins."""

    def send_waiting(self) -> None:
        """Do nothing: no request waits."""

    def count_in_flight(self) -> int:
        """Return 0: the batches are there."""
        return 0

    def engines_idle_seconds(self) -> float:
        """Return 0: there is no engine."""
        return 0.0

    def can_sample(self) -> bool:
        """Return True: the batches are there."""
        return True

    def stop(self) -> None:
        """Do nothing: no process runs."""


def _is_in_vocabulary(rollout: Rollout, vocab_size: int) -> bool:
    return all(
        segment.tokens.min() >= 0 and segment.tokens.max() < vocab_size
        for segment in rollout.segments
        if len(segment.tokens)
    )


def _with_repetitions(group: Group, rollouts: Sequence[Rollout], ngram: int | None) -> Group:
    refs = [
        msgspec.structs.replace(ref, repetition=repetition_of(rollout, ngram))
        for ref, rollout in zip(group.rollouts, rollouts, strict=True)
    ]
    return msgspec.structs.replace(group, rollouts=tuple(refs))


def _with_locations(group: Group, locations: Sequence[RolloutLocation]) -> Group:
    refs = [
        msgspec.structs.replace(ref, location=location)
        for ref, location in zip(group.rollouts, locations, strict=True)
    ]
    return msgspec.structs.replace(group, rollouts=tuple(refs))
