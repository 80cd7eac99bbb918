"""The collector as a process of its own, as a run starts it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import (
    EnvironmentSettings,
    EvalSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.rollouts.evaluation.evaluation import Accuracy, Evaluation
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorConnected, CollectorGone, CollectorHub
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.wire.messages import RUN_KEY_VARIABLE, Stop
from megatron_rl.rollouts.wire.rejections import UserClassFailed
from sglang_bridge.engine import Engine
from tests.support.fake_engine import configuration, fake_engine, reply
from tests.support.scripted_model import EOS, PROMPT
from tests.support.selectors import FixedPrompts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENVIRONMENT = """
import asyncio
import os
import time

class SecondChance:
    async def play(self, episode):
        assert "MEGATRON_RL_RUN_KEY" not in os.environ
        response = await episode.respond()
        if episode.prompt.answer not in response.text:
            episode.observe("no,")
            await episode.respond()

class LoadsForLong(SecondChance):
    def __init__(self):
        time.sleep(4)

class Blocks:
    async def play(self, episode):
        response = await episode.respond()
        if not os.path.exists("FOLDER/blocked"):
            open("FOLDER/blocked", "w").close()
            time.sleep(60)

class NeverLoads(SecondChance):
    def __init__(self):
        time.sleep(3600)

class Retries:
    def check_answer(self, question):
        pass

    async def score(self, prompt, text, finish_reason):
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                await asyncio.sleep(0.01)
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(hub: CollectorHub, tmp_path: Path) -> Iterator[Start]:
    """Starts the collector of node 0 with a folder of user-defined classes on its path."""
    processes = []
    (tmp_path / "second_chance.py").write_text(ENVIRONMENT.replace("FOLDER", str(tmp_path)))

    def run(run_key: str = hub.run_key) -> subprocess.Popen[str]:
        host, port = hub.address
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rl.rollouts.collector", host, str(port), "0", "0"],
            env=os.environ | {RUN_KEY_VARIABLE: run_key, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def sample_batch(
    hub: CollectorHub, environment: EnvironmentSettings, **changes: object
) -> tuple[RolloutBatch, Accuracy]:
    """Sample a batch and run an evaluation through a queue, as rank 0 does.

    changes: of the collector's configuration.
    """
    rollout = RolloutSettings(max_new_tokens=16, samples_per_prompt=2)
    evaluation_settings = EvalSettings(samples_per_prompt=2)
    queue = RolloutQueue(hub, rollout)

    def work(url: str) -> tuple[RolloutBatch, Accuracy]:
        hub.wait_for(1, 20)
        settings = configuration(environment)
        queue.configure({0: msgspec.structs.replace(settings, **changes)})
        queue.set_engines([Engine(url=url)])
        queue.set_version(3)
        batch = RolloutSampler(
            queue, rollout, FixedPrompts([PROMPT, PROMPT], 2), (EOS,), lambda: None
        ).sample(1)
        queue.drop(batch.delivered_ids)
        accuracy = Evaluation(
            queue, [PROMPT], evaluation_settings, rollout, (EOS,), lambda: None
        ).measure("1")
        queue.stop()
        return batch, accuracy

    async def run() -> tuple[RolloutBatch, Accuracy]:
        async with fake_engine(
            lambda n, evaluation_settings: reply(
                evaluation_settings, "046" if len(evaluation_settings["input_ids"]) > 8 else "047"
            )
        ) as url:
            return await asyncio.to_thread(work, url)

    return asyncio.run(run())


def test_a_batch_and_an_evaluation_in_a_user_defined_environment(
    hub: CollectorHub, start: Start
) -> None:
    process = start()
    batch, accuracy = sample_batch(hub, EnvironmentSettings(name="second_chance:SecondChance"))
    assert sorted(batch.delivered_ids) == ["step-1-0", "step-1-1"]
    metrics = batch.metrics()
    assert (metrics["rollout/samples"], metrics["rollout/tokens"], metrics["reward/mean"]) == (
        4.0,
        32.0,
        1.0,
    )
    assert (accuracy.accuracy, accuracy.samples) == (1.0, 2)
    assert process.wait(30) == 0  # it received `Stop`


def test_an_environment_that_cannot_be_loaded_ends_the_run(hub: CollectorHub, start: Start) -> None:
    start()
    with pytest.raises(CollectorFailed, match=r"environment\.name=second_chance:Nothing"):
        sample_batch(hub, EnvironmentSettings(name="second_chance:Nothing"))


@pytest.mark.parametrize("silence_seconds", [6.0])
def test_a_stalled_collector_is_lost(hub: CollectorHub, start: Start) -> None:
    process = start()
    hub.wait_for(1, 20)
    assert hub.poll(0) == (0, CollectorConnected(0))
    for _ in range(65):
        assert hub.poll(0.1) is None  # longer than the limit, but it sends heartbeats
    process.send_signal(signal.SIGSTOP)
    event = None
    while event is None:
        event = hub.poll(0.5)
    _, loss = event
    assert isinstance(loss, CollectorGone) and "node 0 was not heard" in loss.reason


@pytest.mark.parametrize("silence_seconds", [4.0])
def test_an_environment_that_blocks_once_costs_no_rollout_and_the_collector_stays_heard(
    hub: CollectorHub, start: Start
) -> None:
    start()
    environment = EnvironmentSettings(name="second_chance:Blocks", timeout_s=3.0)
    batch, accuracy = sample_batch(hub, environment)
    metrics = batch.metrics()
    assert metrics["rollout/samples"] == 4.0
    assert metrics["rollout/rejected"] == 0.0
    assert accuracy.samples == 2


@pytest.mark.parametrize("silence_seconds", [3.5])  # it takes four
def test_an_environment_may_take_long_to_load(hub: CollectorHub, start: Start) -> None:
    start()
    batch, _ = sample_batch(hub, EnvironmentSettings(name="second_chance:LoadsForLong"))
    assert batch.metrics()["rollout/samples"] == 4.0


def test_an_environment_that_never_loads_ends_the_run_and_the_collector(
    hub: CollectorHub, start: Start
) -> None:
    process = start()
    message = r"environment\.name=second_chance:NeverLoads: .* parallel\.timeout_s=0\.5"
    with pytest.raises(CollectorFailed, match=message) as error:
        sample_batch(hub, EnvironmentSettings(name="second_chance:NeverLoads"), open_timeout_s=0.5)
    assert error.value.exit_code is ExitCode.REFUSED
    assert process.wait(15) == 1


@pytest.mark.nightly
def test_calls_that_go_on_do_not_keep_a_collector_from_ending(
    hub: CollectorHub, start: Start
) -> None:
    process = start()
    reward = RewardSettings(name="second_chance:Retries", timeout_s=0.1)
    with pytest.raises(UserClassFailed, match=r"4 of 4 .*\(4 no_verdict"):
        sample_batch(hub, EnvironmentSettings(), reward=reward)
    hub.send(0, Stop())
    assert process.wait(15) == 0


def test_a_collector_has_no_key_on_its_command_line_and_ends_with_the_hub(
    hub: CollectorHub, start: Start
) -> None:
    process = start()
    hub.wait_for(1, 20)
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"megatron_rl.rollouts.collector" in command
    assert hub.run_key.encode() not in command
    hub.close()
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 1 and "the connection to rank 0 ended" in output


def test_a_collector_with_another_key_ends_with_the_reason(hub: CollectorHub, start: Start) -> None:
    other = CollectorHub("127.0.0.1")
    process = start(hub.run_key[:40] + other.run_key[40:])
    other.close()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "does not know this collector's key" in output
