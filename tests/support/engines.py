"""Real engines for tests: the whole of them as a run opens them, or one server alone."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.engines.engines import open_engines
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.models.families import read_shape
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.rollouts.rollout_batch import RolloutStage
from megatron_rl.rollouts.store import read_rollout
from sglang_bridge.keys import RunKeys, create_keys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace, ServerSettings
from tests.support.selection import Given

ONLY_RANK = RankLayout(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node=0,
    num_nodes=1,
    dp_rank=0,
    dp_size=1,
    tp_rank=0,
    pp_rank=0,
    cp_rank=0,
    ep_rank=0,
    device=torch.device("cpu"),
    control_group=None,
    tp_group=None,
    cp_group=None,
)


@contextlib.contextmanager
def running_engine(
    model_path: Path,
    directory: Path,
    *,
    max_running_requests: int = 128,
    keys: RunKeys | None = None,
) -> Iterator[ManagedEngine]:
    """One float32 server on CPU, healthy, ended afterwards."""
    lifeline = Lifeline()
    settings = ServerSettings(
        max_running_requests=max_running_requests, extra_args=["--weight-version=0"]
    )
    place = ServerPlace(model_path=str(model_path), device="cpu")
    engine = ManagedEngine.start(
        settings,
        place,
        keys=keys or create_keys(),
        log_path=directory / "engine.log",
        lifeline=lifeline,
    )
    try:
        engine.wait_healthy(240)
        yield engine
    finally:
        engine.stop()
        lifeline.close()


def draw_rollouts(
    configuration: Configuration, prompts: Sequence[Prompt], directory: Path
) -> list[Rollout]:
    """One batch, drawn and judged as a run would: engines, collector and queue; its weights are the
    checkpoint's.

    Needs `engine.extra_args=[--weight-version=0]`, as nothing is synced.
    """
    shape = read_shape(configuration.model.path)
    (directory / "logs").mkdir(parents=True)
    with open_engines(configuration, shape, ONLY_RANK, RunDirectory(directory)) as engines:
        connected = engines.connect()
        assert connected is not None
        stage = RolloutStage(
            connected.queue,
            configuration.rollout,
            Given(prompts, configuration.rollout.samples_per_prompt),
            shape.eos_token_ids,
            engines.check,
        )
        return [read_rollout(ref) for group in stage.draw(1).groups for ref in group.rollouts]
