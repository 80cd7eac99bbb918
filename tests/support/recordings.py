"""Recordings of artificial rollouts, in the format that mode=rollout_only writes."""

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from megatron_rl.contracts.group import Group, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.models.shape import ModelShape
from megatron_rl.rollouts.recording.format import BatchRecord, batch_directory
from megatron_rl.rollouts.recording.reader import read_groups
from megatron_rl.rollouts.recording.writer import write_batch, write_parts
from tests.support.batches import make_batch
from tests.support.judged_batches import GROUP, judged_groups
from tests.support.rollout_refs import make_ref

GROUPS = 4
# A log-probability that no other token has
MARKER = -7.25


def write_recording(
    root: Path,
    shape: ModelShape,
    *,
    steps: int,
    marked_steps: Collection[int] = (),
    untrained_steps: Collection[int] = (),
) -> None:
    """Write `steps` complete batches of four groups, all different.

    marked_steps: one of their tokens has the log-probability `MARKER`. untrained_steps: all their
    answers are correct.
    """
    for step in range(1, steps + 1):
        _, rollouts, _ = make_batch(shape, GROUPS * GROUP, seed=step)
        if step in marked_steps:
            logprobs = rollouts[0].segments[1].logprobs
            assert logprobs is not None
            logprobs[0] = MARKER
        groups = [
            msgspec.structs.replace(group, group_id=f"step-{step}-{index}")
            for index, group in enumerate(judged_groups(rollouts))
        ]
        if step in untrained_steps:
            groups = [_all_correct(group) for group in groups]
        rollouts_by_group = [
            rollouts[index * GROUP : (index + 1) * GROUP] for index in range(GROUPS)
        ]
        _write(batch_directory(root, step), step, groups, rollouts_by_group)


def _all_correct(group: Group) -> Group:
    verdict = Verdict(reward=1.0, correctness=1.0)
    rollouts = (msgspec.structs.replace(ref, verdict=verdict) for ref in group.rollouts)
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def write_rollouts(directory: Path, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts as a batch in which each is a group of its own."""
    groups = []
    for rollout in rollouts:
        prompt = Prompt(id=rollout.prompt_id, token_ids=(1,), answer="1", task="t")
        groups.append(
            Group(group_id=rollout.rollout_id, prompt=prompt, rollouts=(make_ref(rollout),))
        )
    _write(directory, 1, groups, [[rollout] for rollout in rollouts])


def read_rollouts(directory: Path) -> list[Rollout]:
    """Read all rollouts of a batch in order."""
    return [rollout for _, rollouts in read_groups(directory) for rollout in rollouts]


def _write(
    directory: Path,
    step: int,
    groups: Sequence[Group],
    rollouts_by_group: Sequence[Sequence[Rollout]],
) -> None:
    triples = zip(range(len(groups)), groups, rollouts_by_group, strict=True)
    parts = write_parts(directory, 0, triples)
    record = BatchRecord(
        step=step,
        groups=len(groups),
        generated_tokens=500,
        engines_left_out=0,
        parts=tuple(parts),
    )
    write_batch(directory, record)
