"""Measure how much the numbers of a real SGLang server differ from Megatron's.

Start it in the root of the repository (minutes on two cores):

    python -m tests.lab.layer_differences --task column_addition --prompts 80

Both compute the same tokens in float32 on one rank, and Megatron replays the routes of the engine.
The engine generates while it is recorded, so its rows come from prefills and from decoding in
batches of every size. Megatron computes the same rows in packed micro-batches.

Output: a table with a row for each operation of each layer: the number of token rows, the share of
rows that are not equal, and the mean and the largest absolute difference.
"""

import argparse
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore import parallel
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.factory import open_prompts
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.policy import Policy
from tests.lab.layer_differences.engine_layers import server_options
from tests.lab.layer_differences.megatron_layers import record_layers
from tests.support.engine_rollouts import sample_rollouts
from tests.support.policies import make_batcher, make_planner, make_policy
from tests.support.rollout_refs import make_ref

ROOT = Path(__file__).resolve().parents[3]
TASKS = {"two_digit_addition": "smoke", "column_addition": "quickstart"}
SAMPLES = 2
Rows = dict[str, dict[int, torch.Tensor]]  # by operation and position
LOGPROB = "log-probability"
_ONLY_RANK = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "RANK": "0",
    "WORLD_SIZE": "1",
}


def input_tokens(rollout: Rollout) -> tuple[int, ...]:
    """The tokens that the model reads: all but the last."""
    return tuple(token for segment in rollout.segments for token in segment.tokens.tolist())[:-1]


def generate(task: str, prompts: int, directory: Path) -> list[Rollout]:
    """Generate rollouts of a shipped checkpoint.

    The engine writes its forward passes to `directory`/passes.
    """
    configuration = compose(
        [
            f"experiment={TASKS[task]}",
            f"data.num_train={prompts}",
            f"rollout.prompts_per_step={prompts}",
            f"rollout.samples_per_prompt={SAMPLES}",
        ]
    )
    passes = directory / "passes"
    passes.mkdir()
    # The server imports the hooks from this repository.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    hooks = server_options(passes, read_shape(configuration.model.path).num_layers)
    engine = replace(configuration.engine, extra_args=["--weight-version=0", *hooks])
    source = open_prompts(configuration.data, Tokenizer.from_directory(configuration.model.path))
    return sample_rollouts(replace(configuration, engine=engine), source.train, directory)


def read_engine_rows(passes: Path) -> dict[tuple[int, ...], Rows]:
    """Read the rows of the engine, by the tokens that a sequence has read."""
    sequences: list[tuple[list[int], Rows]] = []
    by_slot: dict[int, tuple[list[int], Rows]] = {}
    for file in sorted(passes.glob("*.pt")):
        results = torch.load(file, weights_only=True)
        counts = results.pop("counts")
        logits = _logits_by_row(results.pop("logits"), counts)
        slots = results.pop("slots").repeat_interleave(counts)
        columns = torch.stack([slots, results.pop("positions"), results.pop("ids")], dim=1)
        for row, (slot, position, token) in enumerate(columns.tolist()):
            if position == 0:
                by_slot[slot] = ([], defaultdict(dict))
                sequences.append(by_slot[slot])
            tokens, rows = by_slot[slot]
            assert position == len(tokens), "a sequence was retracted: give the engine more slots"
            tokens.append(token)
            _add_row(rows, position, results, row, logits.get(row))
    return {tuple(tokens): rows for tokens, rows in sequences}


def _logits_by_row(logits: torch.Tensor, counts: torch.Tensor) -> dict[int, torch.Tensor]:
    """The logits of the last row of each request.

    logits: [requests, vocabulary]. counts: number of rows of each request.
    """
    last_rows = (counts.cumsum(0) - 1).tolist()
    return dict(zip(last_rows, logits, strict=True))


def _add_row(
    rows: Rows,
    position: int,
    results: Mapping[str, torch.Tensor],
    row: int,
    logits: torch.Tensor | None,
) -> None:
    for name, values in results.items():
        rows[name][position] = values[row].flatten()
    if logits is not None:
        rows["logits"][position] = logits


def compute_trainer_rows(
    rollouts: list[Rollout], checkpoint: str, tokens: int
) -> Iterator[tuple[Rollout, Rows]]:
    """Yield each rollout with the rows of Megatron, computed in packed micro-batches.

    tokens: number of tokens of a micro-batch.
    """
    os.environ |= _ONLY_RANK
    settings = ParallelSettings()
    layout = parallel.initialize(settings, seed=0)
    shape, policy = make_policy(Path(checkpoint), settings, GrpoSettings())
    planner = make_planner(settings, layout, tokens_per_micro_batch=tokens)
    refs = [make_ref(rollout) for rollout in rollouts]
    plan = planner.plan(0, refs, [1.0] * len(refs))
    by_index = _by_index(plan, rollouts)
    (batches,) = make_batcher(shape, settings, layout).optimizer_steps(plan, 0, by_index)
    micro_batches = plan.optimizer_steps[0].micro_batches[0]
    for batch, indices in zip(batches, micro_batches, strict=True):
        with record_layers(policy.models[0], shape) as results:
            logprobs = _forward(policy, batch)
        starts = batch.inputs.cu_seqlens.tolist()
        for index, start in zip(indices, starts, strict=False):
            rollout = by_index[index]
            yield rollout, _rows_of(rollout, start, results, logprobs)
    parallel.shutdown()


def _by_index(plan: StepPlan, rollouts: list[Rollout]) -> dict[int, Rollout]:
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    return {index: by_id[ref.rollout_id] for index, ref in enumerate(plan.rollouts)}


def _forward(policy: Policy, batch: MicroBatch) -> dict[int, torch.Tensor]:
    """Log-probabilities of one micro-batch by row, with replayed routes."""
    ((logprobs, _),) = run_schedule(
        policy.models,
        [batch.inputs],
        lambda logits, index: (None, policy.logprobs(logits, batch)),
        forward_only=True,
        replay=policy.replay,
    )
    return dict(zip(batch.rows.tolist(), logprobs, strict=True))


def _rows_of(
    rollout: Rollout,
    start: int,
    results: Mapping[str, torch.Tensor],
    logprobs: Mapping[int, torch.Tensor],
) -> Rows:
    """The rows of one rollout, which begins at row `start` of its micro-batch."""
    positions = range(len(input_tokens(rollout)))
    rows = {name: {p: values[start + p] for p in positions} for name, values in results.items()}
    rows[LOGPROB] = {p: logprobs[start + p] for p in positions if start + p in logprobs}
    return rows


def add_logprobs(rows: Rows, rollout: Rollout) -> Rows:
    """Add the log-probabilities of the engine's responses to its rows."""
    first = len(rollout.segments[0].tokens) - 1
    logprobs = [
        value
        for segment in rollout.segments[1:]
        if segment.logprobs is not None
        for value in torch.from_numpy(segment.logprobs.copy())
    ]
    return {**rows, LOGPROB: dict(enumerate(logprobs, start=first))}


def sort_by_engine(name: str, value: torch.Tensor, engine: Rows, position: int) -> torch.Tensor:
    """Order the experts' weights as the engine does: by rank, not by expert."""
    if not name.endswith("experts' weights"):
        return value
    return value[engine[name.replace("weights", "ids")][position].long()]


def compare(
    task: str, rollouts: list[Rollout], engine_rows: Mapping[tuple[int, ...], Rows], tokens: int
) -> dict[str, torch.Tensor]:
    """The largest absolute difference of each row, by operation."""
    checkpoint = compose([f"experiment={TASKS[task]}"]).model.path
    differences: dict[str, list[torch.Tensor]] = defaultdict(list)
    for rollout, rows in compute_trainer_rows(rollouts, checkpoint, tokens):
        others = add_logprobs(engine_rows[input_tokens(rollout)], rollout)
        for operation, values in rows.items():
            for position in values.keys() & others[operation].keys():
                value = sort_by_engine(operation, values[position], others, position)
                difference = (value - others[operation][position]).abs().max()
                differences[operation].append(difference)
    return {name: torch.stack(values) for name, values in differences.items()}


def print_table(differences: Mapping[str, torch.Tensor]) -> None:
    """Print a row for each operation."""
    print(f"{'operation':<34} {'rows':>7} {'not equal':>9} {'mean':>9} {'max':>9}")
    for name, values in differences.items():
        share = f"{float((values > 0).float().mean()):.1%}"
        print(f"{name:<34} {len(values):>7} {share:>9} {values.mean():>9.2e} {values.max():>9.2e}")


def main() -> None:
    """Generate, compare and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.layer_differences",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--task",
        choices=TASKS,
        default="column_addition",
        help="task whose shipped checkpoint is used (default: column_addition)",
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=80,
        help=f"prompts with {SAMPLES} rollouts each (default 80)",
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of a micro-batch (default: 4096)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rollouts = generate(options.task, options.prompts, directory)
        engine_rows = read_engine_rows(directory / "passes")
    print_table(compare(options.task, rollouts, engine_rows, options.tokens))


if __name__ == "__main__":
    main()
