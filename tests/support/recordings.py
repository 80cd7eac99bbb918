"""A recording of made-up rollouts, as mode=rollout_only leaves one."""

from pathlib import Path

import msgspec

from megatron_rl.models.shape import ModelShape
from megatron_rl.rollouts.recording import BatchRecord, batch_directory, write_batch, write_parts
from tests.support.batches import make_batch
from tests.support.judged_batches import GROUP, judged_groups

GROUPS = 4


def write_recording(recorded: Path, shape: ModelShape, *, steps: int) -> None:
    """`steps` whole batches of four groups, all different."""
    for step in range(1, steps + 1):
        _, rollouts, _ = make_batch(shape, GROUPS * GROUP, seed=step)
        held = [rollouts[place * GROUP : (place + 1) * GROUP] for place in range(GROUPS)]
        groups = [
            msgspec.structs.replace(group, group_id=f"step-{step}-{place}")
            for place, group in enumerate(judged_groups(rollouts))
        ]
        directory = batch_directory(recorded, step)
        parts = write_parts(directory, 0, zip(range(GROUPS), groups, held, strict=True))
        record = BatchRecord(
            step=step, groups=GROUPS, generated_tokens=500, engines_left_out=0, parts=tuple(parts)
        )
        write_batch(directory, record)
