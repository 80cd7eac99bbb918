"""Neither order, engines, nodes nor narrow routes change a response: real engines, whole runs.

`pytest tests/engine/test_order.py` runs all of it, both types.
"""

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_rl.contracts.rollout import Rollout
from megatron_rl.records.past_run import read_metrics
from megatron_rl.rollouts.recording.reader import read_groups
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.plugin.narrow_routes import VARIABLE
from tests.support.collector_processes import engine_of_each_node, on_nodes
from tests.support.comparable import assert_same_weights, metrics_of_any_engines
from tests.support.exactness import EXACT
from tests.support.jobs import kill, process_tree, start_job, wait_for_step
from tests.support.node_steps import (
    MAX_RUNNING,
    PROMPTS,
    SAMPLES,
    digest_arrays,
    open_queue,
    read_arrays,
    rollout_settings,
)
from tests.support.scripted_model import CHECKPOINT, EOS
from tests.support.selectors import FixedPrompts

STEPS = 4
MAX_AGE = 2

Dtype = Literal["float32", "bfloat16"]
Order = Literal["longest", "submission"]
# Gives the directory of a run with these settings, which runs once
RunOf = Callable[..., Path]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]


def run_whole(root: Path, *settings: str) -> Path:
    output_of_run(root, *settings)
    return root / "job"


def output_of_run(root: Path, *settings: str) -> str:
    job = start_job(root, *settings)
    output, _ = job.communicate(timeout=1200)
    assert job.returncode == 0, output[-4000:]
    return output


def run_killed(root: Path, *settings: str) -> Path:
    """Run to the end, but kill the run after its checkpoint and resume it."""
    job = start_job(root, *settings)
    wait_for_step(root / "job", 3, job, deadline_seconds=600)
    kill(job, process_tree(job))
    return run_whole(root, *settings, "run.resume=auto")


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    @functools.cache
    def run(*settings: str) -> Path:
        return run_whole(tmp_path_factory.mktemp("run"), *settings)

    return run


def settings_of(dtype: str, *, staleness: int = 0, on_update: str = "wait") -> tuple[str, ...]:
    """Return the settings of a run whose prompts have histories from the second step on."""
    return (
        f"model.dtype={dtype}",
        f"rollout.max_staleness={staleness}",
        f"rollout.on_update={on_update}",
        "rollout.max_new_tokens=24",
        "data.num_train=16",
        # Few requests at a time, so that their order matters
        "engine.max_running_requests=3",
        f"train.total_steps={STEPS}",
        "run.checkpoint_every=2",
        "run.save_weights=true",
        "logger.save_rollouts_every=1",
    )


def digest(folder: Path, *, arrays_only: bool = False) -> str:
    """Return the SHA-256 of what a run has recorded, without times.

    It is of the arrays, because the header of a file has its keys in any order. arrays_only: leave
    out what describes the rollouts, such as the weight versions of their tokens.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".safetensors":
            for name, array in sorted(load_file(file).items()):
                digest.update(f"{name} {array.dtype} {array.shape}".encode())
                digest.update(array.tobytes())
        elif file.suffix == ".jsonl" and not arrays_only:
            for line in file.read_text().splitlines():
                digest.update(json.dumps(without_times(json.loads(line))).encode())
    return digest.hexdigest()


def assert_same_digests(folder: Path, other: Path, *, arrays_only: bool = False) -> None:
    digests = [digest(one, arrays_only=arrays_only) for one in (folder, other)]
    print(*digests)
    assert list(folder.rglob("*.safetensors"))
    assert digests[0] == digests[1]


def without_times(group: dict[str, Any]) -> dict[str, Any]:
    for rollout in group["rollouts"]:
        rollout["verdict"]["seconds"] = 0.0
    return group | {"generated_at": 0.0, "scored_at": 0.0}


@pytest.mark.parametrize(
    ("dtype", "engines", "staleness"),
    [
        ("bfloat16", 2, 0),
        pytest.param("bfloat16", 1, 1, marks=pytest.mark.nightly),
        pytest.param("float32", 1, 0, marks=pytest.mark.nightly),
        pytest.param("float32", 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_run_records_and_trains_the_same_in_both_orders(
    run_of: RunOf, dtype: str, engines: int, staleness: int
) -> None:
    settings = settings_of(dtype, staleness=staleness)
    first_run = run_of(*settings, "rollout.order=submission")
    other_run = run_of(*settings, "rollout.order=longest", f"engine.count={engines}")
    assert_same_digests(first_run / "rollouts", other_run / "rollouts")
    assert_same_weights(first_run, other_run, STEPS)
    assert metrics_of_any_engines(first_run) == metrics_of_any_engines(other_run)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_records_and_trains_the_same_without_narrow_routes(
    run_of: RunOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    settings = (*settings_of(dtype), "rollout.order=submission")
    narrow_run = run_of(*settings)
    monkeypatch.setenv(VARIABLE, "0")
    output = output_of_run(tmp_path, *settings, "logger.progress=true")
    assert "the plugin narrow_routes does not run there" in output
    wide_run = tmp_path / "job"
    assert_same_digests(narrow_run / "rollouts", wide_run / "rollouts")
    assert_same_weights(narrow_run, wide_run, STEPS)
    assert metrics_of_any_engines(narrow_run) == metrics_of_any_engines(wide_run)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_recording_is_the_same_in_both_orders(run_of: RunOf, dtype: str) -> None:
    settings = (
        *settings_of(dtype),
        "mode=rollout_only",
        "run.checkpoint_every=0",
        "run.save_weights=false",
        "logger.save_rollouts_every=0",
    )
    first_run = run_of(*settings, "rollout.order=submission")
    other_run = run_of(*settings, "rollout.order=longest", "engine.count=2")
    assert_same_digests(first_run / "recorded", other_run / "recorded")


def sample_step(engines: Sequence[Engine], keys: RunKeys, order: Order) -> tuple[str, list[int]]:
    """Sample a step on the nodes of these engines.

    Returns the SHA-256 of its rollouts, and the indices of its prompts as their groups arrived.
    """
    prompts = list[int]()
    settings = rollout_settings(order)
    nodes = {engine.node for engine in engines}
    with open_queue(engines, keys, settings, num_nodes=len(nodes)) as (queue, _):
        queue.on_arrival = lambda message, _: prompts.append(PROMPTS.index(message.group.prompt))
        selector = FixedPrompts(PROMPTS, SAMPLES)
        sampler = RolloutSampler(queue, settings, selector, (EOS,), lambda: None)
        batch = sampler.sample(1)
        assert {ref.location.node for group in batch.groups for ref in group.rollouts} == nodes
        return digest_arrays(read_arrays(batch)), prompts


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.nightly)])
def test_a_step_is_the_same_in_both_orders_on_one_and_two_engines_and_nodes(
    tmp_path: Path, dtype: Dtype
) -> None:
    """Prompts go in opposite orders, because later ones are expected to be longer."""
    keys = create_keys()
    orders: tuple[Order, ...] = ("longest", "submission")
    digests = []
    with engine_of_each_node(
        2, CHECKPOINT, tmp_path, keys, max_running_requests=MAX_RUNNING, dtype=dtype
    ) as servers:
        engines = [server.engine for server in servers]
        for order, places in itertools.product(orders, (engines[:1], engines, on_nodes(servers))):
            step_digest, prompts = sample_step(places, keys, order)
            digests.append(step_digest)
            assert {prompt >= len(PROMPTS) // 2 for prompt in prompts[:5]} == {order == "longest"}
    print(dtype, digests)
    assert len(digests) == 6 and len(set(digests)) == 1


@pytest.mark.nightly
@pytest.mark.chaos
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_interrupted_responses_are_the_same_in_both_orders(tmp_path: Path, dtype: str) -> None:
    """Compare runs whose weights never change: a clock decides where responses are interrupted.

    One of them is killed and resumed.
    """
    settings = (
        *settings_of(dtype, staleness=MAX_AGE, on_update="resume"),
        "optimizer.lr=0",
        "rollout.max_new_tokens=64",
        "rollout.temperature=2",  # for long responses
    )
    whole_run = run_whole(tmp_path / "whole", *settings, "rollout.order=submission")
    killed_run = run_killed(
        tmp_path / "killed", *settings, "rollout.order=longest", "engine.count=2"
    )
    assert_same_digests(whole_run / "rollouts", killed_run / "rollouts", arrays_only=True)
    require_account(whole_run)
    require_account(killed_run)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_interrupted_responses_are_the_same_until_a_clock_cuts_them(
    tmp_path: Path, dtype: str
) -> None:
    """Compare runs whose weights change.

    Both have the same weights of the versions 0 and 1, because version 0 samples the whole first
    step. A response is the same as long as both runs sampled it with the same of these. Where the
    clocks cut it at different tokens, what follows may differ, and so do later weights.
    """
    settings = (
        *settings_of(dtype, staleness=MAX_AGE, on_update="resume"),
        "rollout.max_new_tokens=64",
        "rollout.temperature=2",  # for long responses
    )
    one, other = (
        run_whole(tmp_path / order, *settings, f"rollout.order={order}", f"engine.count={count}")
        for order, count in (("longest", 2), ("submission", 1))
    )
    require_account(one)
    require_account(other)
    assert_same_digests(one / "rollouts/step-0000001", other / "rollouts/step-0000001")
    assert trained_values(one, 1) == trained_values(other, 1)
    num_compared = 0
    for step in range(2, STEPS + 1):
        rollouts, other_rollouts = (rollouts_of(run, step) for run in (one, other))
        ids = rollouts.keys() & other_rollouts.keys()
        lengths = [common_length(rollouts[id_], other_rollouts[id_]) for id_ in ids]
        for id_, length in zip(ids, lengths, strict=True):
            assert_same_beginning(rollouts[id_], other_rollouts[id_], length)
        num_tokens = sum(rollouts[id_].num_tokens for id_ in ids)
        print(f"{dtype}, step {step}: {sum(lengths)} of {num_tokens} tokens compared")
        num_compared += sum(lengths)
    assert num_compared > 0


@pytest.mark.nightly
@pytest.mark.chaos
@pytest.mark.parametrize(("dtype", "staleness"), [("bfloat16", 1), ("float32", 0)])
def test_a_killed_run_resumes_bit_for_bit_in_the_other_order(
    run_of: RunOf, tmp_path: Path, dtype: str, staleness: int
) -> None:
    """The killed run has two engines, and the other one has one."""
    settings = settings_of(dtype, staleness=staleness)
    whole_run = run_of(*settings, "rollout.order=submission")
    killed_run = run_killed(tmp_path, *settings, "rollout.order=longest", "engine.count=2")
    assert_same_digests(whole_run / "rollouts", killed_run / "rollouts")
    assert_same_weights(whole_run, killed_run, STEPS)


def require_account(run: Path) -> None:
    """Require that a run knows all tokens, and that some were sampled ahead."""
    records = read_metrics(run)[1:]
    assert all(record["account/unaccounted"] == 0.0 for record in records)
    assert 1.0 <= max(record["rollout/age/max"] for record in records) <= MAX_AGE


def trained_values(run: Path, step: int) -> dict[str, float]:
    """Return what the optimizer's steps on a batch show."""
    values = read_metrics(run)[step]
    return {name: value for name, value in values.items() if name.startswith("train/")}


def rollouts_of(run: Path, step: int) -> dict[str, Rollout]:
    groups = read_groups(run / f"rollouts/step-{step:07d}")
    return {rollout.rollout_id: rollout for _, rollouts in groups for rollout in rollouts}


def common_length(one: Rollout, other: Rollout) -> int:
    """Count the tokens up to the first one that the runs have sampled with unequal weights."""
    versions, other_versions = (
        itertools.chain.from_iterable(
            itertools.repeat(segment.version, len(segment.tokens)) for segment in rollout.segments
        )
        for rollout in (one, other)
    )
    pairs = zip(versions, other_versions, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair in ((0, 0), (1, 1)), pairs))


def assert_same_beginning(one: Rollout, other: Rollout, length: int) -> None:
    """Compare tokens, log-probabilities and routes of the first tokens."""
    for values, other_values in zip(arrays_of(one), arrays_of(other), strict=True):
        assert values[:length].tobytes() == other_values[:length].tobytes()
    num_inputs = max(length - 1, 0)  # the last token is no input with the same weights yet
    assert one.routes is not None and other.routes is not None
    assert np.array_equal(one.routes[:num_inputs], other.routes[:num_inputs])


def arrays_of(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens and log-probabilities of a rollout. NaN: a token was not sampled."""
    logprobs = [
        np.full(len(segment.tokens), np.nan, np.float32)
        if segment.logprobs is None
        else segment.logprobs
        for segment in rollout.segments
    ]
    return (
        np.concatenate([segment.tokens for segment in rollout.segments]),
        np.concatenate(logprobs),
    )
