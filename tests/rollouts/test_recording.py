"""Recorded rollouts come back as they were, and can be read without this project."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from launch.testbed.batches import make_batch
from launch.testbed.policies import TWO_DIGIT_ADDITION
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.rollouts.recording.recorded_rollouts import BadRecording, RecordedRollouts
from megatron_rl.rollouts.recording.writer import (
    BatchRecord,
    RecordingUnreadable,
    batch_directory,
    read_groups,
    write_batch,
    write_parts,
)
from megatron_rl.rollouts.store import read_rollout
from tests.support.judged_batches import judged_groups
from tests.support.recordings import write_recording
from tests.support.rollouts import assert_equal

SHAPE = read_shape(TWO_DIGIT_ADDITION)


def test_groups_come_back_as_they_were_over_several_parts_and_nodes(tmp_path: Path) -> None:
    _, made, _ = make_batch(SHAPE, 16)
    rollouts = [
        dataclasses.replace(rollout, prompt_id=f"g{place // 4}")
        for place, rollout in enumerate(made)
    ]
    groups = judged_groups(rollouts)
    measured = tuple(
        msgspec.structs.replace(r, num_generated=9, repetition=0.25) for r in groups[1].rollouts
    )
    groups[1] = msgspec.structs.replace(groups[1], rollouts=measured, weight=1.27)
    held = [(i, group, rollouts[4 * i : 4 * i + 4]) for i, group in enumerate(groups)]
    empty = msgspec.structs.replace(
        groups[0],
        group_id="empty",
        rollouts=(),
        rejections={"engine": 4},
        rejected_tokens={"engine": 7},
    )
    parts = write_parts(tmp_path, 0, [held[0], held[2], (4, empty, [])], part_bytes=1000)
    parts += write_parts(tmp_path, 1, [held[1], held[3]])
    assert parts == ["node-0-00000", "node-0-00001", "node-0-00002", "node-1-00000"]
    write_batch(
        tmp_path,
        BatchRecord(step=7, groups=5, generated_tokens=9, engines_left_out=0, parts=tuple(parts)),
    )
    found = read_groups(tmp_path)
    assert [group for group, _ in found] == [*groups, empty]
    for (_, got), (_, _, wanted) in zip(found, held, strict=False):
        for a, b in zip(got, wanted, strict=True):
            assert_equal(a, b)


def test_a_reader_of_json_and_safetensors_finds_every_token(tmp_path: Path) -> None:
    """What docs/rollouts.md shows."""
    write_recording(tmp_path, SHAPE, steps=1)
    directory = batch_directory(tmp_path, 1)
    part = json.loads((directory / "batch.json").read_text())["parts"][0]
    arrays = load_file(directory / f"{part}.safetensors")
    lines = [json.loads(line) for line in (directory / f"{part}.jsonl").read_text().splitlines()]
    rollout = lines[0]["rollouts"][1]
    start, stop = rollout["tokens"]
    assert sum(segment["tokens"] for segment in rollout["segments"]) == stop - start
    first = rollout["segments"][0]
    assert (
        first["role"] == "prompt"
        and np.isnan(arrays["logprobs"][start : start + first["tokens"]]).all()
    )
    assert np.isfinite(arrays["logprobs"][stop - 1])
    rows = slice(*rollout["routes"])
    assert arrays["routes"][rows].shape == (stop - start - 1, len(SHAPE.moe_layers), SHAPE.topk)


def test_a_damaged_recording_is_named(tmp_path: Path) -> None:
    write_recording(tmp_path, SHAPE, steps=2)
    lines = batch_directory(tmp_path, 1) / "node-0-00000.jsonl"
    lines.write_bytes(b"".join(lines.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(RecordingUnreadable, match="holds 3 of 4 groups"):
        read_groups(batch_directory(tmp_path, 1))
    (batch_directory(tmp_path, 2) / "node-0-00000.safetensors").write_bytes(b"{}")
    with pytest.raises(RecordingUnreadable, match="is damaged"):
        read_groups(batch_directory(tmp_path, 2))


def opened(
    directory: Path, batches: int, shape: ModelShape = SHAPE, *, replayed: bool = True
) -> RecordedRollouts:
    routes = RouteShape(
        moe_layers=shape.moe_layers,
        num_hidden_layers=shape.num_layers,
        num_experts=shape.num_experts,
        topk=shape.topk,
    )
    wanted = routes if replayed else None
    return RecordedRollouts(
        directory, node=0, batches=batches, routes=wanted, vocab_size=shape.vocab_size
    )


@pytest.mark.parametrize(
    ("of_the_model", "said"),
    [
        ({"num_experts": SHAPE.num_experts // 2}, "an expert id outside"),
        ({"topk": SHAPE.topk + 1}, "routes of shape"),
        ({"moe_layers": SHAPE.moe_layers[1:]}, "routes of shape"),
        ({"vocab_size": SHAPE.vocab_size // 2}, "a token id outside"),
    ],
)
def test_what_another_model_recorded_is_refused_before_a_rank_computes_with_it(
    tmp_path: Path, of_the_model: dict[str, Any], said: str
) -> None:
    """In a rank it would be an index out of range, or wrong experts without a word."""
    write_recording(tmp_path, SHAPE, steps=1)
    with pytest.raises(
        BadRecording, match=rf"rollout\.recorded.*step-0000001.*t0.*{said}.*another model"
    ):
        opened(tmp_path, 1, dataclasses.replace(SHAPE, **of_the_model)).draw(1)


def test_a_recording_without_routes_trains_only_where_none_are_replayed(tmp_path: Path) -> None:
    write_recording(
        tmp_path, dataclasses.replace(SHAPE, moe_layers=()), steps=1
    )  # made without routes
    with pytest.raises(BadRecording, match=r"t0.*no routes.*train\.replay=trainer or off"):
        opened(tmp_path, 1).draw(1)
    assert len(opened(tmp_path, 1, replayed=False).draw(1).groups) == 4


def test_routes_that_are_not_replayed_do_not_travel(tmp_path: Path) -> None:
    write_recording(tmp_path, SHAPE, steps=1)
    (ref, *_) = opened(tmp_path, 1, replayed=False).draw(1).groups[0].rollouts
    assert read_rollout(ref).routes is None


def test_recorded_batches_are_drawn_in_order_and_gone_on_with(tmp_path: Path) -> None:
    write_recording(tmp_path / "recorded", SHAPE, steps=3)
    source = opened(tmp_path, 3)
    first = source.draw(1)
    assert first.generated_tokens == 500 and first.groups[0].group_id == "step-1-0"
    ref = first.groups[1].rollouts[2]
    assert read_rollout(ref).rollout_id == ref.rollout_id
    again = opened(tmp_path, 3)
    again.restore(source.state())
    assert again.draw(2).groups[0].group_id == "step-2-0"
    source.release(first.delivered)
    with pytest.raises(BadRecording, match=r"train\.total_steps=4, and 3 whole batches"):
        opened(tmp_path, 4)
    write_recording(tmp_path / "other", SHAPE, steps=2)
    with pytest.raises(BadRecording, match="other batches"):
        opened(tmp_path / "other", 2).restore(source.state())
