"""Measure how much engine and trainer differ, with each way to replay routes.

It compares several models and several kinds of rollouts. Start it in the root of the repository:

    python -m tests.lab.replay_gaps --out runs/gaps --model moe=PATH --model dense=PATH \\
        --rollouts bfloat16: engine.dtype=bfloat16 \\
        --rollouts fp8: engine.quantization=fp8 \\
        --common experiment=quickstart rollout.prompts_per_step=400

For each model and kind of rollouts, real engines generate one batch (a run with
mode=rollout_only, kept in OUT/MODEL-ROLLOUTS and not repeated). One rank then measures it in
float32: engine and old policy before an update, old and current policy after one update of
train.optimizer_steps_per_batch steps. To continue an interrupted study, run the same command again.

Outputs: OUT/table.md, and OUT/MODEL-ROLLOUTS.json for each.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megatron_rl.config.cli import compose
from megatron_rl.config.overrides import split_override
from megatron_rl.config.schema import Configuration
from megatron_rl.config.values import NAME_PATTERN
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.refusal import ConfigurationRefused
from megatron_rl.models.families import read_shape
from megatron_rl.models.hf_checkpoint.inspection import inspect_checkpoint
from megatron_rl.records.exit_record import read_exit_record
from tests.lab.comparison.errors import exit_code_of

if TYPE_CHECKING:
    from megatron_rl.contracts.rollout import Rollout
    from megatron_rl.models.shape import ModelShape
    from tests.lab.policy_gaps import Gap, Gaps

MAIN_JOB = Path(__file__).resolve().parents[2] / "launch" / "train_rl.py"
_REPLAY_NAMES = {"off": "off", "trainer": "R2 (trainer)", "rollout": "R3 (rollout)"}
_FLOAT32 = ("model.dtype=float32", "train.total_steps=1")
_COLUMNS = (
    "model",
    "rollouts",
    "tokens",
    "routes disagree",
    "replay",
    "engine to old: mean",
    "p99.9",
    "KL (k3)",
    "beyond 2x",
    "old to current: mean",
    "p99.9",
    "KL (k3)",
    "beyond 2x",
)


class GapsRefused(Failure):
    """The gaps cannot be measured."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class GapCase:
    """One model with one kind of rollouts.

    name: "MODEL | ROLLOUTS", two cells of the table.
    overrides: overrides of the run that generates. Those of engines do not concern the measurement.
    """

    name: str
    directory: Path
    overrides: tuple[str, ...]

    @property
    def result(self) -> Path:
        """The JSON file of the gaps."""
        return self.directory.with_suffix(".json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code of the first failure, or 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if words[:1] == ["--measure"]:
        return exit_code_of(lambda: measure(Path(words[1]), words[2:]))
    options = make_parser().parse_args(words)
    return exit_code_of(lambda: compare(options))


def compare(options: argparse.Namespace) -> int:
    """Generate and measure the cases without a result, and write the table."""
    cases = list(plan_cases(options))
    options.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        code = generate(case) or _measure_in_process(case)
        if code:
            return code
    text = "\n".join(table(cases))
    (options.out / "table.md").write_text(text + "\n")
    print(text)
    return ExitCode.OK


def plan_cases(options: argparse.Namespace) -> Iterator[GapCase]:
    """Plan every case and check its configuration. Raises `GapsRefused`."""
    for model in options.model:
        name, path, replay = _read_model(model)
        for head, *overrides in options.rollouts:
            kind = _read_kind(head)
            case = GapCase(
                name=f"{name} | {kind}",
                directory=options.out / f"{name}-{kind}",
                overrides=(
                    *options.common,
                    *overrides,
                    f"model.path={path}",
                    f"train.replay={replay}",
                    *_FLOAT32,
                ),
            )
            try:
                compose(generation_overrides(case))
            except ConfigurationRefused as refusal:
                raise GapsRefused(f"{case.directory.name}: {refusal}") from refusal
            yield case


def _read_model(text: str) -> tuple[str, str, str]:
    """Read NAME=PATH. Returns name, path and the way of replay that the model needs."""
    name, _, path = text.partition("=")
    shape, defects = inspect_checkpoint(path)
    reasons = [defect.rule for defect in defects]
    if not re.fullmatch(NAME_PATTERN, name):
        reasons.append("a name has letters, digits, '-' and '_'")
    if shape is None or reasons:
        raise GapsRefused(
            f"--model {text}: {'; '.join(reasons)}. Give NAME=PATH of a checkpoint in Hugging Face "
            "format"
        )
    return name, path, "rollout" if shape.moe_layers else "off"


def _read_kind(head: str) -> str:
    """Read the name of a kind of rollouts from `NAME:`."""
    if not head.endswith(":") or not re.fullmatch(NAME_PATTERN, head[:-1]):
        raise GapsRefused(
            f"--rollouts {head}: begin with a name and a colon: --rollouts fp8: key=value ..."
        )
    return head[:-1]


def generation_overrides(case: GapCase) -> tuple[str, ...]:
    """The overrides of the run that generates the rollouts of a case."""
    return (
        *case.overrides,
        "mode=rollout_only",
        f"run.root={case.directory.parent}",
        f"run.name={case.directory.name}",
        "run.on_existing=overwrite_failed",
    )


def measurement_overrides(case: GapCase) -> tuple[str, ...]:
    """The overrides of the measurement of a case, which has no engines."""
    overrides = [
        override
        for override in case.overrides
        if split_override(override)[0].partition(".")[0] != "engine"
    ]
    return (*overrides, "mode=train_only", f"rollout.recording={case.directory}")


def generate(case: GapCase) -> int:
    """Generate the rollouts unless they are complete. Returns the exit code."""
    record = read_exit_record(case.directory)
    if record is not None and record.code == ExitCode.OK:
        return ExitCode.OK
    return _call(str(MAIN_JOB), *generation_overrides(case))


def _measure_in_process(case: GapCase) -> int:
    """Measure a case in a process of its own. Returns the exit code."""
    options = ("--measure", str(case.directory), *measurement_overrides(case))
    return _call("-m", "tests.lab.replay_gaps", *options)


def _call(*arguments: str) -> int:
    command = [sys.executable, *arguments]
    print(shlex.join(command), flush=True)
    return subprocess.run(command, check=False).returncode


def measure(directory: Path, overrides: Sequence[str]) -> int:
    """Measure generated rollouts on one rank, write DIRECTORY.json and return the exit code."""
    configuration = compose(overrides)
    from megatron_rl.mcore import compat

    compat.install()
    from megatron_rl.mcore import parallel

    layout = parallel.initialize(configuration.parallel, seed=configuration.seed)
    try:
        gaps = _measure(configuration, layout, directory)
    finally:
        parallel.shutdown()
    directory.with_suffix(".json").write_bytes(msgspec.json.encode(gaps))
    return ExitCode.OK


def _measure(c: Configuration, layout: Any, directory: Path) -> Gaps:
    from megatron_rl.credit.assign import Credit
    from megatron_rl.losses import open_loss
    from megatron_rl.planning.step_planner import StepPlanner
    from megatron_rl.rollouts.recording.format import batch_directory
    from megatron_rl.rollouts.recording.reader import read_groups
    from megatron_rl.run.build_worker import build_worker
    from tests.lab.policy_gaps import measure_gaps

    shape = read_shape(c.model.path)
    worker = build_worker(c, shape, open_loss(c.algo, shape), layout, directory / "rollouts")
    pairs = read_groups(batch_directory(directory / "recorded", 1))
    credit = Credit(c.algo).assign([group for group, _ in pairs])
    planner = StepPlanner(c.train, c.parallel, dp_size=1, seed=c.seed)
    plan = planner.plan(1, credit.rollouts, credit.advantages, weights=credit.weights)
    if not plan.rollouts:
        raise GapsRefused(
            f"{directory}: no group has both correct and incorrect responses. Generate more "
            "prompts: --common rollout.prompts_per_step=..."
        )
    rollouts = [rollout for _, group_rollouts in pairs for rollout in group_rollouts]
    by_id = _fit_rollouts(rollouts, shape, c.train.replay == "rollout", directory)
    by_index = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    return measure_gaps(worker, plan, by_index)


def _fit_rollouts(
    rollouts: Sequence[Rollout], shape: ModelShape, has_routes: bool, directory: Path
) -> dict[str, Rollout]:
    """Fit recorded rollouts to the model, by their id. Raises `GapsRefused`."""
    from megatron_rl.rollouts.recording.recorded_rollouts import UnfitRollout, fit_rollout

    routes = shape.route_shape if has_routes else None
    try:
        fits = [fit_rollout(rollout, routes, shape.vocab_size) for rollout in rollouts]
    except UnfitRollout as unfit:
        raise GapsRefused(f"{directory}: {unfit}") from unfit
    return {rollout.rollout_id: rollout for rollout in fits}


def table(cases: Sequence[GapCase]) -> Iterator[str]:
    """Yield the lines of a Markdown table. All gaps are in nats."""
    from tests.lab.policy_gaps import Gaps

    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    for case in cases:
        gaps = msgspec.json.decode(case.result.read_bytes(), type=Gaps)
        disagreement = "" if gaps.disagreement is None else f"{gaps.disagreement:.2%}"
        for replay, before in gaps.engine_old.items():
            name = _REPLAY_NAMES[replay] if gaps.disagreement is not None else "no experts"
            cells = [*_gap_cells(before), *_gap_cells(gaps.old_current[replay])]
            yield (
                f"| {case.name} | {gaps.tokens:,} | {disagreement} | {name} | {' | '.join(cells)} |"
            )


def _gap_cells(gap: Gap) -> list[str]:
    return [f"{value:.2e}" for value in (gap.mean, gap.tail, gap.k3, gap.extreme)]


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.replay_gaps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        required=True,
        type=lambda text: Path(text).expanduser().resolve(),
        help="directory of the runs and of the results",
    )
    parser.add_argument(
        "--model", action="append", required=True, metavar="NAME=PATH", help="repeat for each model"
    )
    parser.add_argument(
        "--rollouts",
        action="append",
        nargs="+",
        required=True,
        metavar=("NAME:", "key=value"),
        help="overrides of the engines, such as engine.dtype=bfloat16; repeat for each kind",
    )
    parser.add_argument(
        "--common", nargs="*", default=[], metavar="key=value", help="overrides of every case"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
