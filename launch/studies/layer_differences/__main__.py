"""Where an engine and the trainer differ: how far a real SGLang server's numbers are from
Megatron's.

On the same tokens with the engine's routes replayed, float32, one rank, for each operation of each
layer. The engine draws while it is watched, so its rows come from prefills and from decoding in
batches of every size; Megatron computes the same rows in packed micro-batches.

    PYTHONPATH=.:kernels:tests python launch/studies/layer_differences/__main__.py --task column_addition --prompts 80
"""

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch

from launch.studies.layer_differences.engine_layers import arguments
from launch.studies.layer_differences.megatron_layers import watch
from launch.testbed.engine_rollouts import sample_rollouts
from launch.testbed.policies import make_batcher, make_planner, make_policy
from launch.testbed.rollout_refs import make_ref
from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.mcore import parallel
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts

TASKS = {"two_digit_addition": "smoke", "column_addition": "quickstart"}
Rows = dict[str, dict[int, torch.Tensor]]  # by operation and position


def tokens_of(rollout: Rollout) -> tuple[int, ...]:
    """What the model reads of it: all but the last token."""
    return tuple(token for segment in rollout.segments for token in segment.tokens.tolist())[:-1]


def draw(task: str, prompts: int, samples: int, directory: Path) -> list[Rollout]:
    """Rollouts of a shipped checkpoint, with every forward pass of the engine in
    `directory`/passes.
    """
    given = [
        f"experiment={TASKS[task]}",
        f"data.num_train={prompts}",
        f"rollout.prompts_per_step={prompts}",
    ]
    configuration = compose([*given, f"rollout.samples_per_prompt={samples}"])
    (directory / "passes").mkdir()
    watched = arguments(directory / "passes", read_shape(configuration.model.path).num_layers)
    engine = replace(configuration.engine, extra_args=["--weight-version=0", *watched])
    source = open_prompts(configuration.data, Tokenizer.from_directory(configuration.model.path))
    return sample_rollouts(replace(configuration, engine=engine), source.train, directory)


def engine_rows(passes: Path) -> dict[tuple[int, ...], Rows]:
    """What the engine computed, by the tokens that a sequence of it read."""
    open_ones: dict[int, tuple[list[int], Rows]] = {}
    finished = []
    for file in sorted(passes.glob("*.pt")):
        found = torch.load(file, weights_only=True)
        batch = {name: found.pop(name) for name in ("ids", "positions", "slots", "counts")}
        slots = batch["slots"].repeat_interleave(batch["counts"]).tolist()
        last = (batch["counts"].cumsum(0) - 1).tolist()
        logits = dict(zip(last, found.pop("logits"), strict=True))
        for row, slot in enumerate(slots):
            position = int(batch["positions"][row])
            if position == 0:
                open_ones[slot] = ([], defaultdict(dict))
                finished.append(open_ones[slot])
            tokens, rows = open_ones[slot]
            assert position == len(tokens), "a sequence was cut: give the engine more slots"
            tokens.append(int(batch["ids"][row]))
            for name, values in found.items():
                rows[name][position] = values[row].flatten()
            if row in logits:
                rows["logits"][position] = logits[row]
    return {tuple(tokens): rows for tokens, rows in finished}


def trainer_rows(
    rollouts: list[Rollout], checkpoint: str, tokens: int
) -> Iterator[tuple[Rollout, Rows]]:
    """What Megatron computes of each rollout, packed; its log-probabilities stand under
    "log-probability".
    """
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    layout = parallel.initialize(settings := ParallelSettings(), seed=0)
    shape, policy = make_policy(Path(checkpoint), settings, GrpoSettings(), **layout.groups)
    plan = make_planner(settings, layout, tokens_per_micro_batch=tokens).plan(
        0, [make_ref(rollout) for rollout in rollouts], [1.0] * len(rollouts)
    )
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    own = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    (batches,) = make_batcher(shape, settings, layout).optimizer_steps(plan, 0, own)
    for batch, planned in zip(batches, plan.optimizer_steps[0].micro_batches[0], strict=True):
        with watch(policy.models[0], shape) as seen:
            ((logprobs, _),) = run_schedule(
                policy.models,
                [batch.inputs],
                lambda logits, index, batch=batch: (None, policy.logprobs(logits, batch)),
                forward_only=True,
                replay=policy.replay,
            )
        starts = batch.inputs.cu_seqlens.tolist()
        at = dict(zip(batch.rows.tolist(), logprobs, strict=True))
        for index, start in zip(planned, starts, strict=False):
            count = len(tokens_of(own[index]))
            rows = {
                name: {p: values[start + p] for p in range(count)} for name, values in seen.items()
            }
            rows["log-probability"] = {p: at[start + p] for p in range(count) if start + p in at}
            yield own[index], rows
    parallel.shutdown()


def with_known(rows: Rows, rollout: Rollout) -> Rows:
    """An engine's rows and the log-probabilities that it answered."""
    first = len(rollout.segments[0].tokens) - 1
    given = [value for s in rollout.segments[1:] for value in torch.from_numpy(s.logprobs.copy())]
    return {**rows, "log-probability": dict(enumerate(given, start=first))}


def in_order_of_routes(
    name: str, trainer: torch.Tensor, engine: Rows, position: int
) -> torch.Tensor:
    """Megatron holds weights by expert, an engine by rank."""
    if not name.endswith("experts' weights"):
        return trainer
    return trainer[engine[name.replace("weights", "ids")][position].long()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task", choices=TASKS, default="column_addition", help="whose shipped checkpoint"
    )
    parser.add_argument("--prompts", type=int, default=80, help="two rollouts of each")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="in one of Megatron's micro-batches"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rollouts = draw(given.task, given.prompts, 2, directory)
        engine = engine_rows(directory / "passes")
    checkpoint = compose([f"experiment={TASKS[given.task]}"]).model.path
    deltas: dict[str, list[torch.Tensor]] = defaultdict(list)
    for rollout, rows in trainer_rows(rollouts, checkpoint, given.tokens):
        other = with_known(engine[tokens_of(rollout)], rollout)
        for operation, values in rows.items():
            for position in values.keys() & other[operation].keys():
                mine = in_order_of_routes(operation, values[position], other, position)
                deltas[operation].append((mine - other[operation][position]).abs().max())
    print_table({name: torch.stack(values) for name, values in deltas.items()})


def print_table(deltas: dict[str, Any]) -> None:
    print(f"{'operation':<34} {'rows':>7} {'not equal':>9} {'mean':>9} {'max':>9}")
    for name, values in deltas.items():
        differing = f"{float((values > 0).float().mean()):.1%}"
        print(
            f"{name:<34} {len(values):>7} {differing:>9} {values.mean():>9.2e} {values.max():>9.2e}"
        )


if __name__ == "__main__":
    main()
