"""The rollouts in a checkpoint: what was written is loaded, and damage is named."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megatron_rl.contracts.commands import BatchAhead
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason, Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.rollouts.recording.recorded_rollouts import (
    BadRecording,
    RecordedRollouts,
    UnfitRollout,
    load_rollout,
)
from megatron_rl.rollouts.wire.store import RolloutStore
from megatron_rl.run.checkpoints.rollouts import (
    load_batches,
    load_open_steps,
    read_local_batches,
)
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import assert_equal, make_rollout

SHAPE = RouteShape(moe_layers=(0, 1, 2), num_hidden_layers=3, num_experts=8, topk=2)
PROMPT = Prompt(id="p", token_ids=(1, 2), answer="3", task="t")


def make_rollouts() -> list[Rollout]:
    """A finished rollout, and one in the middle. Their experts are all different in a row."""
    rollouts = []
    for number, reason in enumerate((FinishReason.STOP, FinishReason.ABORT)):
        rollout = make_rollout(2, 3 + number)
        assert rollout.routes is not None
        routes = rollout.routes.copy()
        routes[..., 1] = (routes[..., 0] + 1) % SHAPE.num_experts
        rollouts.append(
            replace(
                rollout, prompt_id="p", sample_index=number, finish_reason=reason, routes=routes
            )
        )
    return rollouts


def write_checkpoint(
    root: Path, rollouts: list[Rollout] | None = None, *, is_open: bool = True
) -> list[Rollout]:
    """Write a checkpoint with one group of step 5: rollouts 0 and 1, and 3 that has no token."""
    rollouts = rollouts or make_rollouts()
    store = RolloutStore(node=0)
    locations = store.put("partials-1/g", rollouts)
    refs = [
        msgspec.structs.replace(
            make_ref(rollout), location=location, num_generated=3, repetition=0.125
        )
        for rollout, location in zip(rollouts, locations, strict=True)
    ]
    group = Group(
        group_id="g",
        prompt=PROMPT,
        rollouts=tuple(refs),
        rejections={"engine": 1},
        rejected_tokens={"engine": 2},
        generated_at=3.0,
        scored_at=4.0,
        open_samples=(1, 3),
    )
    batch = BatchAhead(
        step=5,
        groups=(group,),
        num_stopped=0,
        num_surplus=0,
        generated_tokens=8,
        engines_left_out=0,
        num_repeated=0,
        selection_metrics={},
        is_open=is_open,
    )
    (local,) = read_local_batches([batch], 0)
    local.complete(root, local.write(root, 0))
    store.release(["partials-1/g"])
    return rollouts


def test_open_groups_are_loaded_as_they_were(tmp_path: Path) -> None:
    rollouts = write_checkpoint(tmp_path)
    (partial,) = load_open_steps(tmp_path, [5], SHAPE, 48, ngram=None)
    for saved, original in zip(partial.rollouts, rollouts, strict=True):
        assert_equal(load_rollout(saved, "p", SHAPE, 48), original)
    group = partial.group
    assert (group.open_samples, group.rejections) == ((1, 3), {"engine": 1})
    assert partial.num_tokens == 3 + 3 + 2
    assert (group.generated_at, group.scored_at) == (0.0, 0.0)  # their clock has ended
    assert not partial.is_finished
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".pkl", ".pt")]


def test_open_rollouts_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    other = msgspec.structs.replace(SHAPE, topk=3)
    with pytest.raises(ValueError, match=r"its open rollouts cannot be used: .*step-0000005, roll"):
        load_open_steps(tmp_path, [5], other, 48, ngram=None)
    with pytest.raises(ValueError, match="a token id is outside"):
        load_open_steps(tmp_path, [5], SHAPE, 2, ngram=None)


@pytest.mark.parametrize("name", ["batch.json", "*.jsonl", "*.safetensors"])
@pytest.mark.parametrize("is_removed", [False, True])
def test_damaged_open_rollouts_are_refused_by_name(
    tmp_path: Path, name: str, is_removed: bool
) -> None:
    write_checkpoint(tmp_path)
    (file,) = tmp_path.rglob(name)
    if is_removed:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"its open rollouts cannot be used: .*step-0000005"):
        load_open_steps(tmp_path, [5], SHAPE, 48, ngram=None)


def test_open_groups_are_no_batch_to_train_on(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="a step that was not sampled whole"):
        load_batches(tmp_path, [5], SHAPE, 48, ngram=None)
    rollouts = RecordedRollouts(
        tmp_path / "rollouts", node=0, batches=1, routes=SHAPE, vocab_size=48, ngram=None
    )
    with pytest.raises(BadRecording, match="a step that was not sampled whole"):
        rollouts.sample(1)


def test_recordings_of_an_older_version_have_no_open_groups(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, is_open=False)
    (file,) = tmp_path.rglob("batch.json")
    record = json.loads(file.read_text())
    del record["is_open"]
    file.write_text(json.dumps(record))
    batches = load_batches(tmp_path, [5], SHAPE, 48, ngram=None)
    assert list(batches) == [5]


def write_routes(root: Path, routes: np.ndarray) -> None:
    """Write other routes into a checkpoint."""
    (file,) = root.rglob("*.safetensors")
    save_file({**load_file(file), "routes": routes}, file)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_routes_of_every_width_are_loaded_as_the_model_needs_them(
    tmp_path: Path, dtype: type
) -> None:
    rollouts = write_checkpoint(tmp_path)
    routes = np.concatenate([rollout.routes for rollout in rollouts if rollout.routes is not None])
    write_routes(tmp_path, routes.astype(dtype))
    for num_experts, kept_dtype in ((128, np.uint8), (300, np.uint16)):
        shape = msgspec.structs.replace(SHAPE, num_experts=num_experts)
        (partial,) = load_open_steps(tmp_path, [5], shape, 48, ngram=None)
        for saved, original in zip(partial.rollouts, rollouts, strict=True):
            rollout = load_rollout(saved, "p", shape, 48)
            assert rollout.routes is not None and rollout.routes.dtype == kept_dtype
            assert np.array_equal(rollout.routes, original.routes)


@pytest.mark.parametrize("expert", [-1, 8, 300, 2**20])
def test_experts_that_are_not_there_are_found_where_a_rollout_is_read(
    tmp_path: Path, expert: int
) -> None:
    rollouts = write_checkpoint(tmp_path)
    routes = np.concatenate([rollout.routes for rollout in rollouts if rollout.routes is not None])
    routes = routes.astype(np.int32)
    routes[-1, -1, -1] = expert
    write_routes(tmp_path, routes)
    (partial,) = load_open_steps(tmp_path, [5], SHAPE, 48, ngram=None)
    load_rollout(partial.rollouts[0], "p", SHAPE, 48)
    with pytest.raises(UnfitRollout, match="expert id outside"):
        load_rollout(partial.rollouts[1], "p", SHAPE, 48)


def test_rank_0_reads_no_routes(tmp_path: Path) -> None:
    """Routes may be a hundred times larger than the rest."""
    write_checkpoint(tmp_path)
    write_routes(tmp_path, np.zeros((2**22, 3, 2), np.uint8))  # 24 MiB
    tracemalloc.start()
    load_open_steps(tmp_path, [5], SHAPE, 48, ngram=None)
    load_batches_of_closed_step(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**21


def load_batches_of_closed_step(root: Path) -> None:
    """Load the open step as if it were sampled whole."""
    (file,) = root.rglob("batch.json")
    file.write_text(file.read_text().replace('"is_open": true', '"is_open": false'))
    assert list(load_batches(root, [5], SHAPE, 48, ngram=None)) == [5]


@pytest.mark.parametrize("ngram", [None, 2, 3, 100])
@pytest.mark.parametrize("is_open", [False, True])
def test_repetitions_are_measured_by_the_present_setting(
    tmp_path: Path, ngram: int | None, is_open: bool
) -> None:
    """The checkpoint has the shares of the setting with which the rollouts were sampled."""
    text = (7, 8, 9, 7, 8, 9, 7, 8, 9)
    rollouts = [with_response(rollout, text) for rollout in make_rollouts()]
    write_checkpoint(tmp_path, rollouts, is_open=is_open)
    if is_open:
        (partial,) = load_open_steps(tmp_path, [5], None, 48, ngram=ngram)
        refs = partial.group.rollouts
    else:
        batches = load_batches(tmp_path, [5], None, 48, ngram=ngram)
        refs = batches[5][0].groups[0].rollouts
        recording = RecordedRollouts(
            tmp_path / "rollouts", node=0, batches=1, routes=None, vocab_size=48, ngram=ngram
        )
        assert [r.repetition for r in recording.sample(1).groups[0].rollouts] == [
            ref.repetition for ref in refs
        ]
    share = {None: 0.0, 2: 6 / 9 - 0.02, 3: 6 / 9 - 0.02, 100: 0.0}[ngram]
    assert [ref.repetition for ref in refs] == [pytest.approx(share)] * 2


def with_response(rollout: Rollout, tokens: tuple[int, ...]) -> Rollout:
    """The rollout without routes, and with another response."""
    prompt, response, *_ = rollout.segments
    start = prompt.route_rows[1]
    response = replace(
        response,
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        route_rows=(start, start + len(tokens) - 1),
    )
    return replace(rollout, segments=(prompt, response), routes=None)


def test_other_values_of_a_group_stay_as_they_were_sampled(tmp_path: Path) -> None:
    """Weights and verdicts say how its rollouts were sampled and scored."""
    write_checkpoint(tmp_path, is_open=False)
    (file,) = tmp_path.rglob("*.jsonl")
    line = json.loads(file.read_text())
    line["weight"] = 2.5
    line["prompt_weight"] = 2.0
    line["rollouts"][0]["is_repetitive"] = True
    line["rollouts"][0]["verdict"] = {"reward": 0.25, "correctness": 0.5}
    file.write_text(json.dumps(line) + "\n")
    batch, _ = load_batches(tmp_path, [5], SHAPE, 48, ngram=4)[5]
    (group,) = batch.groups
    ref = group.rollouts[0]
    assert batch.sampling is not None and batch.sampling.parts == {"g": group}
    assert (group.weight, group.prompt_weight, group.rejections, group.rejected_tokens) == (
        2.5,
        2.0,
        {"engine": 1},
        {"engine": 2},
    )
    assert (ref.is_repetitive, ref.verdict.reward, ref.verdict.correctness) == (True, 0.25, 0.5)
    assert (ref.num_generated, ref.num_trainable) == (3, 3)
