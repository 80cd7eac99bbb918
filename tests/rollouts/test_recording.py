"""Recorded rollouts: writing, reading, and training on them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.contracts.commands import Record
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.records.durable_files import write_synced
from megatron_rl.rollouts.recording import writer
from megatron_rl.rollouts.recording.format import BatchRecord, batch_directory
from megatron_rl.rollouts.recording.reader import (
    RecordingUnreadable,
    check_batch,
    read_batch_record,
    read_groups,
)
from megatron_rl.rollouts.recording.recorded_rollouts import (
    BadRecording,
    RecordedRollouts,
    UnfitRollout,
    fit_rollout,
)
from megatron_rl.rollouts.recording.writer import write_batch, write_parts
from megatron_rl.rollouts.wire.store import RolloutStore, read_rollout
from megatron_rl.run.modes.record import record_rollouts
from tests.support.batches import make_batch
from tests.support.disk_log import DiskLog
from tests.support.judged_batches import judged_groups
from tests.support.policies import TWO_DIGIT_ADDITION
from tests.support.recordings import read_rollouts, write_recording, write_rollouts
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import VERSION, assert_equal, make_rollout

SHAPE = read_shape(TWO_DIGIT_ADDITION)


def empty_copy(group: Group) -> Group:
    return msgspec.structs.replace(
        group,
        group_id="empty",
        rollouts=(),
        rejections={"engine": 4},
        rejected_tokens={"engine": 7},
        environment_error="ValueError: no such tool",
    )


def write_record(directory: Path, num_groups: int, parts: list[str]) -> None:
    record = BatchRecord(
        step=7,
        groups=num_groups,
        generated_tokens=9,
        engines_left_out=0,
        parts=tuple(parts),
    )
    write_batch(directory, record)


def test_groups_of_several_parts_and_nodes_are_read_unchanged(tmp_path: Path) -> None:
    _, batch, _ = make_batch(SHAPE, 16)
    rollouts = [dataclasses.replace(r, prompt_id=f"g{i // 4}") for i, r in enumerate(batch)]
    groups = judged_groups(rollouts)
    refs = tuple(
        msgspec.structs.replace(r, num_generated=9, repetition=0.25, is_repetitive=True)
        for r in groups[1].rollouts
    )
    groups[1] = msgspec.structs.replace(
        groups[1], rollouts=refs, weight=1.27, generated_at=12.5, scored_at=13.25
    )
    groups.append(empty_copy(groups[0]))
    triples = [(i, group, rollouts[4 * i : 4 * i + 4]) for i, group in enumerate(groups)]
    parts = write_parts(tmp_path, 0, [triples[0], triples[2], triples[4]], part_bytes=1000)
    parts += write_parts(tmp_path, 1, [triples[1], triples[3]])
    assert parts == ["node-0-00000", "node-0-00001", "node-0-00002", "node-1-00000"]
    write_record(tmp_path, 5, parts)
    assert [group for group, _ in read_groups(tmp_path)] == groups
    for rollout_read, rollout in zip(read_rollouts(tmp_path), rollouts, strict=True):
        assert_equal(rollout_read, rollout)


def store_on_two_nodes(group: Group, rollouts: list[Rollout]) -> Group:
    """The group with its first rollouts on node 0 and the others on node 1, as after a probe."""
    half = len(rollouts) // 2
    locations = RolloutStore(0).put("probe", rollouts[:half])
    locations += RolloutStore(1).put("extension", rollouts[half:])
    refs = tuple(
        msgspec.structs.replace(ref, location=location)
        for ref, location in zip(group.rollouts, locations, strict=True)
    )
    return msgspec.structs.replace(group, rollouts=refs)


def test_a_group_on_two_nodes_is_recorded_by_both(tmp_path: Path) -> None:
    _, rollouts, _ = make_batch(SHAPE, 4)
    rollouts = [
        dataclasses.replace(rollout, prompt_id="g0", sample_index=index)
        for index, rollout in enumerate(rollouts)
    ]
    (group,) = judged_groups(rollouts)
    groups = (empty_copy(group), store_on_two_nodes(group, rollouts))
    parts: list[str] = []
    for node in (1, 0):
        job: Any = SimpleNamespace(node=node, local_rank=0, control_group=None)
        parts += record_rollouts(Record(str(tmp_path), groups), job)
    assert parts == ["node-1-00000", "node-0-00000"]
    write_record(tmp_path, 2, parts)
    assert [group for group, _ in read_groups(tmp_path)] == [groups[0], group]
    for rollout_read, rollout in zip(read_rollouts(tmp_path), rollouts, strict=True):
        assert_equal(rollout_read, rollout)
    write_record(tmp_path, 2, ["node-0-00000", "node-0-00000"])
    with pytest.raises(RecordingUnreadable, match="group 1 has rollout 0 twice"):
        read_groups(tmp_path)


def test_a_reader_of_json_and_safetensors_finds_every_token(tmp_path: Path) -> None:
    """The example in docs/rollouts.md."""
    write_recording(tmp_path, SHAPE, steps=1)
    directory = batch_directory(tmp_path, 1)
    part = json.loads((directory / "batch.json").read_text())["parts"][0]
    arrays = load_file(directory / f"{part}.safetensors")
    lines = [json.loads(line) for line in (directory / f"{part}.jsonl").read_text().splitlines()]
    rollout = lines[0]["rollouts"][1]
    start, stop = rollout["tokens"]
    assert sum(segment["tokens"] for segment in rollout["segments"]) == stop - start
    first = rollout["segments"][0]
    assert first["role"] == "prompt" and not first["has_logprobs"]
    assert np.isnan(arrays["logprobs"][start : start + first["tokens"]]).all()
    assert np.isfinite(arrays["logprobs"][stop - 1])
    rows = slice(*rollout["routes"])
    assert arrays["routes"][rows].shape == (stop - start - 1, len(SHAPE.moe_layers), SHAPE.topk)


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path, SHAPE, steps=2)
    lines = batch_directory(tmp_path, 1) / "node-0-00000.jsonl"
    lines.write_bytes(b"".join(lines.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(RecordingUnreadable, match="holds 3 of 4 groups"):
        read_groups(batch_directory(tmp_path, 1))
    (batch_directory(tmp_path, 2) / "node-0-00000.safetensors").write_bytes(b"{}")
    with pytest.raises(RecordingUnreadable, match="is damaged"):
        read_groups(batch_directory(tmp_path, 2))


def test_a_recording_of_another_format_version_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path, SHAPE, steps=1)
    file = batch_directory(tmp_path, 1) / "batch.json"
    for version in (4, 5):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"version": version}))
        assert len(open_recording(tmp_path, 1).sample(1).groups) == 4
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    with pytest.raises(
        BadRecording, match=r"batch\.json.*version 2.*reads.*version 4 and version 5 and version 6"
    ):
        open_recording(tmp_path, 1).sample(1)


def open_recording(
    directory: Path, batches: int, shape: ModelShape = SHAPE, *, has_replay: bool = True
) -> RecordedRollouts:
    routes = RouteShape(
        moe_layers=shape.moe_layers,
        num_hidden_layers=shape.num_layers,
        num_experts=shape.num_experts,
        topk=shape.topk,
    )
    return RecordedRollouts(
        directory,
        node=0,
        batches=batches,
        routes=routes if has_replay else None,
        vocab_size=shape.vocab_size,
        ngram=None,
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"num_experts": SHAPE.num_experts // 2}, "an expert id"),
        ({"topk": SHAPE.topk + 1}, "routes of shape"),
        ({"moe_layers": SHAPE.moe_layers[1:]}, "routes of shape"),
        ({"vocab_size": SHAPE.vocab_size // 2}, "a token id"),
    ],
)
def test_a_recording_of_another_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], rule: str
) -> None:
    """A rank would fail on an index out of range, or train the wrong experts silently."""
    write_recording(tmp_path, SHAPE, steps=1)
    with pytest.raises(
        BadRecording, match=rf"rollout\.recording.*step-0000001.*t0.*{rule}.*model\.path"
    ):
        open_recording(tmp_path, 1, dataclasses.replace(SHAPE, **changes)).sample(1)


def test_a_recording_without_routes_trains_only_without_replay(tmp_path: Path) -> None:
    write_recording(tmp_path, dataclasses.replace(SHAPE, moe_layers=()), steps=1)
    with pytest.raises(BadRecording, match=r"t0.*no routes.*train\.replay=trainer or off"):
        open_recording(tmp_path, 1).sample(1)
    assert len(open_recording(tmp_path, 1, has_replay=False).sample(1).groups) == 4


def test_routes_that_are_not_replayed_are_dropped(tmp_path: Path) -> None:
    write_recording(tmp_path, SHAPE, steps=1)
    (ref, *_) = open_recording(tmp_path, 1, has_replay=False).sample(1).groups[0].rollouts
    assert read_rollout(ref).routes is None


def test_recorded_batches_come_in_order_and_after_a_resume(tmp_path: Path) -> None:
    write_recording(tmp_path / "recorded", SHAPE, steps=3)
    rollouts = open_recording(tmp_path, 3)
    batch = rollouts.sample(1)
    assert batch.generated_tokens == 500 and batch.groups[0].group_id == "step-1-0"
    ref = batch.groups[1].rollouts[2]
    assert read_rollout(ref).rollout_id == ref.rollout_id
    continuation = open_recording(tmp_path, 3)
    continuation.restore(rollouts.state())
    assert continuation.sample(2).groups[0].group_id == "step-2-0"
    rollouts.release(batch.delivered_ids)


def test_too_few_batches_are_refused(tmp_path: Path) -> None:
    write_recording(tmp_path / "recorded", SHAPE, steps=3)
    with pytest.raises(BadRecording, match=r"train\.total_steps=4.* 3 complete batches"):
        open_recording(tmp_path, 4)


def test_a_resume_with_another_recording_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path / "recorded", SHAPE, steps=3)
    write_recording(tmp_path / "other", SHAPE, steps=2)
    state = open_recording(tmp_path, 3).state()
    with pytest.raises(BadRecording, match="other batches"):
        open_recording(tmp_path / "other", 2).restore(state)


def test_a_resumed_position_follows_from_the_batches_taken(tmp_path: Path) -> None:
    write_recording(tmp_path / "recorded", SHAPE, steps=3)
    rollouts = open_recording(tmp_path, 3)
    ids = [rollouts.sample(step).groups[0].group_id for step in (1, 2)]
    assert ids == ["step-1-0", "step-2-0"]
    continuation = open_recording(tmp_path, 3)
    continuation.restore(rollouts.state())
    assert continuation.state() == rollouts.state()
    assert continuation.sample(3).groups[0].group_id == "step-3-0"


def test_stopped_and_surplus_groups_are_the_last_and_are_freed_with_the_others(
    tmp_path: Path,
) -> None:
    write_recording(tmp_path, SHAPE, steps=1)
    directory = batch_directory(tmp_path, 1)
    record = msgspec.structs.replace(
        read_batch_record(directory),
        num_stopped=2,
        num_surplus=1,
        engines_left_out=3,
        unused_tokens={"surplus_aborted": 7},
    )
    write_batch(directory, record)
    batch = open_recording(tmp_path, 1).sample(1)
    names = [
        [group.group_id for group in groups]
        for groups in (batch.groups, batch.stopped_groups, batch.surplus_groups)
    ]
    assert names == [["step-1-0"], ["step-1-1", "step-1-2"], ["step-1-3"]]
    assert batch.delivered_ids == ("step-1-0", "step-1-1", "step-1-2", "step-1-3")
    assert batch.engines_left_out == 3
    assert batch.unused_tokens == {"surplus_aborted": 7}


@pytest.mark.parametrize("token", [-1, SHAPE.vocab_size])
def test_a_token_just_outside_of_the_vocabulary_is_refused(token: int) -> None:
    _, (rollout, *_), _ = make_batch(SHAPE, 1)
    assert fit_rollout(rollout, None, SHAPE.vocab_size).num_tokens == rollout.num_tokens
    prompt, *others = rollout.segments
    tokens = prompt.tokens.copy()
    for valid_token in (0, SHAPE.vocab_size - 1):
        tokens[0] = valid_token
        segments = (dataclasses.replace(prompt, tokens=tokens.copy()), *others)
        fit_rollout(dataclasses.replace(rollout, segments=segments), None, SHAPE.vocab_size)
    tokens[0] = token
    segments = (dataclasses.replace(prompt, tokens=tokens), *others)
    with pytest.raises(UnfitRollout, match="a token id is outside"):
        fit_rollout(dataclasses.replace(rollout, segments=segments), None, SHAPE.vocab_size)


def test_a_rollout_beyond_the_recorded_tokens_is_damage(tmp_path: Path) -> None:
    write_recording(tmp_path, SHAPE, steps=1)
    directory = batch_directory(tmp_path, 1)
    file = directory / "node-0-00000.safetensors"
    arrays = load_file(file)
    save_file(arrays | {"tokens": arrays["tokens"][:-1]}, file)
    with pytest.raises(RecordingUnreadable, match="its segments do not cover its tokens"):
        read_groups(directory)


def test_segments_keep_the_versions_of_their_weights(tmp_path: Path) -> None:
    rollouts = [make_rollout(2, 3)]
    write_rollouts(tmp_path, rollouts)
    (rollout,) = read_rollouts(tmp_path)
    assert [segment.version for segment in rollout.segments] == [4, VERSION]


def test_a_batch_is_on_the_disk_before_batch_json_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = DiskLog(monkeypatch)
    write_recording(tmp_path, SHAPE, steps=1)
    directory = batch_directory(tmp_path, 1)
    for suffix in ("safetensors", "jsonl"):
        file = directory / f"node-0-00000.{suffix}"
        assert log.is_in_order(("sync", file), ("sync", directory / "batch.json"))


def remove(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut_one_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("suffix", ["jsonl", "safetensors"])
@pytest.mark.parametrize("damage", [remove, empty, cut_one_byte])
def test_incomplete_files_are_refused_before_the_first_step(
    tmp_path: Path, suffix: str, damage: Callable[[Path], None]
) -> None:
    write_recording(tmp_path, SHAPE, steps=3)
    damage(batch_directory(tmp_path, 2) / f"node-0-00000.{suffix}")
    with pytest.raises(
        BadRecording, match=r"^rollout\.recording: .*step-0000002 is damaged: node-0-00000: "
    ):
        open_recording(tmp_path, 2)
    assert open_recording(tmp_path, 1).num_batches == 3, "the run needs the first batch alone"


@pytest.mark.parametrize("file_of_death", ["node-0-00000.safetensors", "node-0-00000.jsonl"])
def test_a_batch_is_incomplete_from_the_first_file_of_a_second_attempt_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_of_death: str
) -> None:
    directory = batch_directory(tmp_path, 1)
    write_rollouts(directory, [make_rollout(2, 3), make_rollout(2, 3)])

    def die_at_file(file: Path, data: bytes) -> None:
        if file.name == file_of_death:
            raise KeyboardInterrupt
        write_synced(file, data)

    monkeypatch.setattr(writer, "write_synced", die_at_file)
    with pytest.raises(KeyboardInterrupt):
        write_rollouts(directory, [make_rollout(3, 4), make_rollout(1, 2)])
    with pytest.raises(RecordingUnreadable, match=r"batch\.json cannot be read"):
        check_batch(directory)
    monkeypatch.undo()
    rollouts = [make_rollout(3, 4), make_rollout(1, 2)]
    write_rollouts(directory, rollouts)
    for rollout_read, rollout in zip(read_rollouts(directory), rollouts, strict=True):
        assert_equal(rollout_read, rollout)


def test_a_batch_is_incomplete_once_any_node_begins_to_write_it_again(tmp_path: Path) -> None:
    directory = batch_directory(tmp_path, 1)
    write_rollouts(directory, [make_rollout(2, 3)])
    write_parts(directory, 1, [])
    with pytest.raises(RecordingUnreadable, match=r"batch\.json cannot be read"):
        check_batch(directory)


def test_a_part_ends_with_the_group_that_fills_it(tmp_path: Path) -> None:
    """Each group has 8 tokens of 8 bytes, and 7 rows of routes of 3 layers and 2 experts."""
    rollout = make_rollout(4, 4)
    prompt = Prompt(id="p", token_ids=(1,), answer="1", task="t")
    group = Group(group_id="g", prompt=prompt, rollouts=(make_ref(rollout),))
    triples = [(index, group, [rollout]) for index in range(3)]
    nbytes = 8 * 8 + 7 * 3 * 2
    assert len(write_parts(tmp_path / "a", 0, triples, part_bytes=nbytes)) == 3
    assert len(write_parts(tmp_path / "b", 0, triples, part_bytes=nbytes + 1)) == 2


def test_a_batch_without_groups_is_complete(tmp_path: Path) -> None:
    directory = batch_directory(tmp_path / "recorded", 1)
    write_record(directory, 0, [])
    assert read_groups(directory) == []
    assert write_parts(directory, 0, []) == []


def test_arrays_of_a_part_have_the_types_of_the_format(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [make_rollout(2, 3, dtype=np.uint16)])
    arrays = load_file(tmp_path / "node-0-00000.safetensors")
    types = {name: array.dtype.name for name, array in arrays.items()}
    assert types == {"tokens": "int32", "logprobs": "float32", "routes": "uint16"}


def test_a_part_without_rollouts_has_empty_arrays(tmp_path: Path) -> None:
    _, rollouts, _ = make_batch(SHAPE, 4)
    group = empty_copy(judged_groups(rollouts)[0])
    assert write_parts(tmp_path, 0, [(0, group, [])]) == ["node-0-00000"]
    arrays = load_file(tmp_path / "node-0-00000.safetensors")
    types = {name: (array.dtype.name, len(array)) for name, array in arrays.items()}
    assert types == {"tokens": ("int32", 0), "logprobs": ("float32", 0)}
