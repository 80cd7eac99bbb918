"""Pieces of a response under three versions, each against Megatron with the weights that drew it.

`pytest -s tests/engine/test_pieces.py` prints the differences.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.wire.messages import FromCollector
from megatron_rl.rollouts.wire.repetition import RepetitionStop
from sglang_bridge.client import GenerateClient
from sglang_bridge.generation import Generation
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.support.configurations import configuration_of
from tests.support.engines import interrupt, running_engine
from tests.support.exactness import EXACT
from tests.support.policies import COLUMN_ADDITION
from tests.support.recordings import write_rollouts
from tests.support.torchrun import torchrun

SCRIPT = Path(__file__).with_name("megatron_logprobs.py")
VERSIONS = (0, 1, 2)
NUM_PROMPTS = 40
PIECE = 6  # tokens of the largest piece. Each version samples about as many
# Both add in the same order in float32 (docs/on_policy.md)
LIMIT = 2e-6 if EXACT else 5e-5


def write_versions(directory: Path) -> list[Path]:
    """Write three checkpoints, the second and third with noise on every weight."""
    checkpoints = []
    for version in VERSIONS:
        checkpoint = directory / f"version-{version}"
        shutil.copytree(COLUMN_ADDITION, checkpoint)
        for file in checkpoint.glob("*.safetensors"):
            generator = torch.Generator().manual_seed(version)
            tensors = {
                name: tensor * (1 + 0.02 * version * torch.randn(tensor.shape, generator=generator))
                for name, tensor in load_file(file).items()
            }
            save_file(tensors, file, {"format": "pt"})
        checkpoints.append(checkpoint)
    return checkpoints


class Readings:
    """Keeps every reply with the routes of all its inputs, which the pool requests in part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.replies: list[tuple[list[int], Generation]] = []
        generate = GenerateClient.generate

        async def read_whole(
            client: GenerateClient,
            input_ids: Sequence[int],
            sampling: Sampling,
            *,
            first_route_row: int = 0,
            **arguments: Any,
        ) -> Generation:
            generation = await generate(client, input_ids, sampling, first_route_row=0, **arguments)
            if not len(generation.output_ids):
                return generation  # it was aborted at once
            self.replies.append((list(input_ids), generation))
            assert generation.routes is not None
            return replace(generation, routes=generation.routes[first_route_row:])

        monkeypatch.setattr(GenerateClient, "generate", read_whole)

    def rollouts_by_version(self) -> dict[str, list[Rollout]]:
        """Return each piece as the response to all tokens before it, with its own routes."""
        rollouts: dict[str, list[Rollout]] = {}
        for index, (input_ids, piece) in enumerate(self.replies):
            (span,) = piece.version_spans
            rollouts.setdefault(span.version, []).append(_rollout(f"r{index}", input_ids, piece))
        return rollouts


def _rollout(name: str, input_ids: list[int], piece: Generation) -> Rollout:
    num_inputs = len(input_ids) + len(piece.output_ids) - 1
    assert piece.routes is not None and len(piece.routes) == num_inputs
    prompt = Segment(
        tokens=np.asarray(input_ids, np.int32),
        role=Role.PROMPT,
        trainable=False,
        logprobs=None,
        route_rows=(0, len(input_ids)),
        version=0,
    )
    response = Segment(
        tokens=np.asarray(piece.output_ids, np.int32),
        role=Role.RESPONSE,
        trainable=True,
        logprobs=np.asarray(piece.logprobs, np.float32),
        route_rows=(len(input_ids), num_inputs),
        version=int(piece.version_spans[0].version),
    )
    return Rollout(
        rollout_id=name,
        prompt_id=name,
        sample_index=0,
        finish_reason=FinishReason.STOP,
        segments=(prompt, response),
        routes=piece.routes,
    )


def load_version(engine: ManagedEngine, checkpoint: Path, version: int) -> None:
    admin = engine.admin()
    admin.pause()
    admin.update_weights_from_disk(str(checkpoint), timeout=60)
    admin.flush_cache()
    admin.set_weight_version(str(version))
    admin.resume()


async def change_version(
    pool: EnginePool, engine: ManagedEngine, checkpoint: Path, version: int
) -> None:
    """Interrupt the responses, and continue them with other weights."""
    await interrupt(pool, engine)
    await asyncio.to_thread(load_version, engine, checkpoint, version)
    pool.set_version(version)
    pool.proceed()


async def sample(
    engine: ManagedEngine, checkpoints: Sequence[Path], prompts: Sequence[Prompt]
) -> list[Generation]:
    """Sample responses that are interrupted for the next weights of their engine."""
    shape = read_shape(str(checkpoints[0]))
    routes = shape.route_shape

    async def ignore(message: FromCollector) -> None:
        """Drop a report."""

    form = RequestForm(
        api_key=engine.keys.api_key,
        longest_response=64,
        route_shape=(routes.num_hidden_layers, routes.topk),
        vocab_size=shape.vocab_size,
    )
    pool = EnginePool(EngineSettings(), form, ignore)
    await pool.set_engines([engine.engine])
    pool.set_version(0)
    sampling = Sampling(
        max_new_tokens=40, temperature=1.0, stop_token_ids=tuple(shape.eos_token_ids)
    )
    pieces: list[list[Generation]] = [[] for _ in prompts]
    tasks = [
        asyncio.create_task(
            pool.generate(
                prompt.token_ids,
                sampling,
                rid=f"{prompt.id}#",
                return_routes=True,
                rejected_tokens=Counter(),
                seed=index,
                pieces=pieces[index],
                stop=RepetitionStop(threshold=1.0, ngram=2, every=PIECE),
            )
        )
        for index, prompt in enumerate(prompts)
    ]
    for version in VERSIONS[1:]:
        while is_any_behind(tasks, pieces, version * PIECE):
            await asyncio.sleep(0.01)
        await change_version(pool, engine, checkpoints[version], version)
    generations = await asyncio.gather(*tasks)
    await pool.close()
    return generations


def is_any_behind(
    tasks: Sequence[asyncio.Task[Generation]], pieces: Sequence[list[Generation]], num_tokens: int
) -> bool:
    """Return True if an open response has fewer tokens."""
    return any(
        not task.done() and sum(len(piece.output_ids) for piece in parts) < num_tokens
        for task, parts in zip(tasks, pieces, strict=True)
    )


def assert_rows_of_each_reading(
    prompts: Sequence[Prompt], generations: Sequence[Generation], readings: Readings
) -> None:
    """A joined response has, for each input, the row of the reading that it was first part of."""
    for prompt, generation in zip(prompts, generations, strict=True):
        rows: list[np.ndarray] = []
        num_tokens = 0
        tokens = [*prompt.token_ids, *generation.output_ids.tolist()]
        while num_tokens < len(generation.output_ids):
            prefix = tokens[: len(prompt.token_ids) + num_tokens]
            (piece,) = [reply for inputs, reply in readings.replies if inputs == prefix]
            assert piece.routes is not None
            rows.append(piece.routes[sum(map(len, rows)) :])
            num_tokens += len(piece.output_ids)
        assert generation.routes is not None
        assert np.array_equal(np.concatenate(rows), generation.routes)


def differences_from_megatron(
    checkpoint: Path, rollouts: Sequence[Rollout], directory: Path
) -> torch.Tensor:
    """Return |log p - log p of Megatron| of every sampled token, with replayed routes."""
    file = directory / f"rollouts-{checkpoint.name}"
    write_rollouts(file, rollouts)
    out = directory / f"{checkpoint.name}.pt"
    torchrun(SCRIPT, f"one-none:{checkpoint}:{file}:4096:{out}", ranks=1)
    logprobs_of_megatron = torch.load(out, weights_only=True)
    differences = []
    for rollout in rollouts:
        logprobs = rollout.segments[1].logprobs
        assert logprobs is not None
        other_logprobs = logprobs_of_megatron[rollout.rollout_id]
        differences.append((other_logprobs - torch.from_numpy(logprobs)).abs())
    return torch.cat(differences)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", LIMIT), pytest.param("bfloat16", 0.25)])
def test_each_piece_has_the_probabilities_of_its_own_weights(
    dtype: Literal["float32", "bfloat16"],
    limit: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoints = write_versions(tmp_path)
    settings = configuration_of(["experiment=quickstart"]).data
    prompts = open_prompts(settings, Tokenizer.from_directory(str(checkpoints[0]))).train[
        :NUM_PROMPTS
    ]
    readings = Readings(monkeypatch)
    with running_engine(checkpoints[0], tmp_path, dtype=dtype) as engine:
        generations = asyncio.run(sample(engine, checkpoints, prompts))
    whole = [g for g in generations if len(g.version_spans) == len(VERSIONS)]
    assert len(whole) > NUM_PROMPTS / 2
    assert_rows_of_each_reading(prompts, generations, readings)
    for version, rollouts in sorted(readings.rollouts_by_version().items()):
        deltas = differences_from_megatron(checkpoints[int(version)], rollouts, tmp_path)
        print(
            f"{dtype}, version {version}: {len(deltas)} tokens, "
            f"mean {deltas.mean():.2e}, max {deltas.max():.2e}"
        )
        assert float(deltas.max()) <= limit
