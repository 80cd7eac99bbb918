"""Recorded batches in the place of engines: the same prompts, rollouts and verdicts, in the same
order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteError, RouteShape, validate_stored_routes
from megatron_rl.contracts.run_state import PromptCursor, SelectorState
from megatron_rl.rollouts.recording.writer import (
    BATCH,
    RecordingUnreadable,
    read_batch_record,
    read_groups,
)
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.store import RolloutStore


class BadRecording(Failure):
    """rollout.recording names something that cannot be trained on."""

    exit_code = ExitCode.BAD_DATA


class UnfitRollout(ValueError):
    """A recorded rollout cannot be trained on by this model."""


def fitting(rollout: Rollout, routes: RouteShape | None, vocab_size: int) -> Rollout:
    """A recorded rollout as a model can train on it; see `RecordedRollouts`. Raises `UnfitRollout`.

    Behind this nobody looks at tokens and routes again: a rank would meet an index out of range, or
    train the wrong experts.
    """
    other = (
        "model.path is another model than the one that recorded it: give that one, or record again"
    )
    tokens = [segment.tokens for segment in rollout.segments if len(segment.tokens)]
    if tokens and not (
        min(t.min() for t in tokens) >= 0 and max(t.max() for t in tokens) < vocab_size
    ):
        raise UnfitRollout(
            f"rollout {rollout.rollout_id}: a token id outside 0..{vocab_size - 1}; {other}"
        )
    if routes is None:
        return replace(rollout, routes=None)
    if rollout.routes is None:
        raise UnfitRollout(
            f"rollout {rollout.rollout_id}: no routes were recorded. Use train.replay=trainer or off"
        )
    try:
        return replace(
            rollout, routes=validate_stored_routes(rollout.routes, routes, rollout.num_tokens - 1)
        )
    except RouteError as error:
        raise UnfitRollout(f"rollout {rollout.rollout_id}: {error}; {other}") from error


class RecordedRollouts:
    """Prompts, rollouts and queue of a run with mode=train_only, on rank 0. node: where this
    process runs.

    directory: of a run with mode=rollout_only, or its `recorded/`. routes, vocab_size: of the model
    that is trained; routes None: they are not replayed. Raises `BadRecording` when it has not
    `batches` whole batches.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        node: int,
        batches: int,
        routes: RouteShape | None,
        vocab_size: int,
    ) -> None:
        given = Path(directory).expanduser().resolve()
        self._root = given / "recorded" if (given / "recorded").is_dir() else given
        self._batches = sorted(path.parent for path in self._root.glob(f"step-*/{BATCH}"))
        if len(self._batches) < batches:
            raise BadRecording(
                f"rollout.recording={str(directory)!r}: train.total_steps={batches}, and {len(self._batches)} whole "
                f"batches (step-*/{BATCH}) lie in {self._root}. Train fewer steps, or record more: mode=rollout_only"
            )
        self._store = RolloutStore(node)
        self._routes, self._vocab_size = routes, vocab_size
        self._position = 0
        self._digest = hashlib.sha256(
            b"".join((path / BATCH).read_bytes() for path in self._batches)
        ).hexdigest()

    def state(self) -> SelectorState:
        return SelectorState(
            prompts=PromptCursor(epoch=0, position=self._position, digest=self._digest)
        )

    def restore(self, state: SelectorState) -> None:
        """Go on behind the batches that a run before trained on.

        Raises `BadRecording` where those were others.
        """
        if state.prompts.digest != self._digest:
            raise BadRecording(
                f"run.resume: the checkpoint's run trained on other batches than those in {self._root}"
            )
        self._position = state.prompts.position

    def widen(self) -> None:
        """Nothing is believed of them."""

    def draw(self, step: int) -> RolloutBatch:
        """The next batch, readable by the ranks of all nodes. Raises `BadRecording`."""
        directory = self._batches[self._position]
        try:
            record, pairs = read_batch_record(directory), read_groups(directory)
        except RecordingUnreadable as error:
            raise BadRecording(f"rollout.recording: {error}") from error
        checked = [
            (group, [self._fitting(rollout, directory) for rollout in rollouts])
            for group, rollouts in pairs
        ]
        self._position += 1
        drawn = tuple(
            self._place(group, self._store.put(group.group_id, rollouts))
            for group, rollouts in checked
        )
        credited, kept = len(drawn) - record.stopped - record.surplus, len(drawn) - record.surplus
        return RolloutBatch(
            groups=drawn[:credited],
            stopped=drawn[credited:kept],
            surplus=drawn[kept:],
            generated_tokens=record.generated_tokens,
            engines_left_out=record.engines_left_out,
            delivered=tuple(group.group_id for group in drawn),
        )

    def release(self, group_ids: Sequence[str]) -> None:
        self._store.release(group_ids)

    def set_version(self, version: int) -> None:
        """Nobody samples from the weights."""

    def stop(self) -> None:
        """Nothing runs."""

    def _fitting(self, rollout: Rollout, directory: Path) -> Rollout:
        try:
            return fitting(rollout, self._routes, self._vocab_size)
        except UnfitRollout as error:
            raise BadRecording(f"rollout.recording: {directory}, {error}") from error

    def _place(self, group: Group, locations: Sequence[object]) -> Group:
        rollouts = zip(group.rollouts, locations, strict=True)
        return msgspec.structs.replace(
            group,
            rollouts=tuple(msgspec.structs.replace(ref, location=where) for ref, where in rollouts),
        )
