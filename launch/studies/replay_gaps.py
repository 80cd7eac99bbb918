"""How far engine and trainer are apart, with each way to replay routes, for several models and
kinds of rollouts.

    python launch/studies/replay_gaps.py --out runs/gaps --model moe=PATH --model dense=PATH \\
        --rollouts bfloat16: engine.dtype=bfloat16 --rollouts fp8: engine.fake_quant=fp8_blockwise \\
        --common experiment=quickstart rollout.prompts_per_step=400

For each model and kind of rollouts one batch is drawn from real engines (a run with
mode=rollout_only, kept in OUT/MODEL-ROLLOUTS and not repeated), and measured by one rank in
float32: engine to old policy before an update, old to current policy after one, by
train.optimizer_steps_per_batch steps. Written to OUT: table.md and a JSON file for each.
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

from launch.comparison.errors import ended
from megatron_rl.config.cli import compose
from megatron_rl.config.overrides import split_override
from megatron_rl.config.schema import Configuration
from megatron_rl.config.values import NAME_PATTERN
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.refusal import ConfigurationRefused
from megatron_rl.models.families import read_shape
from megatron_rl.models.hf_checkpoint.inspection import inspect_checkpoint
from megatron_rl.records.exit_record import read_exit_record

if TYPE_CHECKING:
    from launch.studies.policy_gaps import Gaps

SCRIPT = Path(__file__).resolve()
_NAMES = {"off": "off", "trainer": "R2 (trainer)", "rollout": "R3 (rollout)"}
_FLOAT32 = ("model.dtype=float32", "train.total_steps=1")


class GapsRefused(Failure):
    """What was asked for cannot be measured."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class GapCase:
    """One model with one kind of rollouts.

    overrides: of the run that draws; those of engines are its alone.
    """

    name: str
    directory: Path
    overrides: tuple[str, ...]

    @property
    def result(self) -> Path:
        return self.directory.with_suffix(".json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: that of what failed, or 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if words[:1] == ["--measure"]:
        return ended(lambda: measure(Path(words[1]), words[2:]))
    given = _parser().parse_args(words)
    return ended(lambda: compare(given))


def compare(given: argparse.Namespace) -> int:
    """Draw and measure what was not, and write the table. Returns the exit code."""
    cases = list(plan(given))
    given.out.mkdir(parents=True, exist_ok=True)
    for case in cases:
        if code := draw(case) or call(SCRIPT, "--measure", str(case.directory), *measured(case)):
            return code
    text = "\n".join(table(cases))
    (given.out / "table.md").write_text(text + "\n")
    print(text)
    return ExitCode.OK


def plan(given: argparse.Namespace) -> Iterator[GapCase]:
    """Every case, its configuration checked. Raises `GapsRefused`."""
    for model in given.model:
        name, _, path = model.partition("=")
        shape, problems = inspect_checkpoint(path)
        if shape is None or problems or not re.fullmatch(NAME_PATTERN, name):
            told = (
                "; ".join(problem.rule for problem in problems)
                or "a name has letters, digits, '-' and '_'"
            )
            raise GapsRefused(
                f"--model {model}: {told}. Give NAME=PATH of a checkpoint in Hugging Face format"
            )
        replay = "train.replay=rollout" if shape.moe_layers else "train.replay=off"
        for head, *overrides in given.rollouts:
            if not head.endswith(":") or not re.fullmatch(NAME_PATTERN, head[:-1]):
                raise GapsRefused(
                    f"--rollouts {head}: begin with a name and a colon: --rollouts fp8: key=value ..."
                )
            directory = given.out / f"{name}-{head[:-1]}"
            case = GapCase(
                name=f"{name} | {head[:-1]}",
                directory=directory,
                overrides=(*given.common, *overrides, f"model.path={path}", replay, *_FLOAT32),
            )
            try:
                compose(drawn(case))
            except ConfigurationRefused as refused:
                raise GapsRefused(f"{directory.name}: {refused}") from refused
            yield case


def drawn(case: GapCase) -> tuple[str, ...]:
    """The overrides of the run that draws a case's rollouts."""
    where = (
        f"run.root={case.directory.parent}",
        f"run.name={case.directory.name}",
        "run.on_existing=overwrite_failed",
    )
    return (*case.overrides, "mode=rollout_only", *where)


def measured(case: GapCase) -> tuple[str, ...]:
    """The overrides of a case's measurement, which has no engines."""
    keys = (split_override(text)[0] for text in case.overrides)
    kept = [
        text
        for key, text in zip(keys, case.overrides, strict=True)
        if key.split(".")[0] != "engine"
    ]
    return (*kept, "mode=train_only", f"rollout.recording={case.directory}")


def draw(case: GapCase) -> int:
    """Draw the rollouts unless that was done. Returns the exit code."""
    record = read_exit_record(case.directory)
    if record is not None and record.code == ExitCode.OK:
        return ExitCode.OK
    return call(SCRIPT.with_name("train_rl.py"), *drawn(case))


def call(script: Path, *arguments: str) -> int:
    command = [sys.executable, str(script), *arguments]
    print(shlex.join(command), flush=True)
    return subprocess.run(command, check=False).returncode


def measure(directory: Path, overrides: Sequence[str]) -> int:
    """In this process: one rank, a batch that was drawn before. Writes DIRECTORY.json and returns
    the exit code.
    """
    configuration = compose(overrides)
    from megatron_rl.mcore import compat

    compat.install()
    from megatron_rl.mcore import parallel

    layout = parallel.initialize(configuration.parallel, seed=configuration.seed)
    try:
        gaps = _gaps(configuration, layout, directory)
    finally:
        parallel.shutdown()
    directory.with_suffix(".json").write_bytes(msgspec.json.encode(gaps))
    return ExitCode.OK


def _gaps(c: Configuration, layout: Any, directory: Path) -> Gaps:
    from launch.studies.policy_gaps import measure_gaps
    from megatron_rl.credit.assign import Credit
    from megatron_rl.losses import open_loss
    from megatron_rl.models.route_shape import route_shape
    from megatron_rl.planning.step_planner import StepPlanner
    from megatron_rl.rollouts.recording.format import batch_directory
    from megatron_rl.rollouts.recording.reader import read_groups
    from megatron_rl.rollouts.recording.recorded_rollouts import UnfitRollout, fit_rollout
    from megatron_rl.run.build import build_worker

    shape = read_shape(c.model.path)
    worker = build_worker(c, shape, open_loss(c.algo, shape), layout, directory / "rollouts")
    pairs = read_groups(batch_directory(directory / "recorded", 1))
    credited = Credit(c.algo, seed=c.seed).assign(1, [group for group, _ in pairs])
    plan = StepPlanner(c.train, c.parallel, dp_size=1, seed=c.seed).plan(
        1, credited.rollouts, credited.advantages
    )
    if not plan.rollouts:
        raise GapsRefused(
            f"{directory}: no group has both right and wrong responses. Draw more prompts"
        )
    routes = route_shape(shape) if c.train.replay == "rollout" else None
    try:
        kept = [
            fit_rollout(rollout, routes, shape.vocab_size)
            for _, rollouts in pairs
            for rollout in rollouts
        ]
    except UnfitRollout as unfit:
        raise GapsRefused(f"{directory}: {unfit}") from unfit
    by_id = {rollout.rollout_id: rollout for rollout in kept}
    return measure_gaps(
        worker, plan, {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    )


def table(cases: Sequence[GapCase]) -> Iterator[str]:
    """The lines of a Markdown table; all gaps in nats."""
    from launch.studies.policy_gaps import Gaps

    yield (
        "| model | rollouts | tokens | routes disagree | replay | engine to old: mean | p99.9 | KL (k3) | beyond 2x "
        "| old to current: mean | p99.9 | KL (k3) | beyond 2x |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for case in cases:
        gaps = msgspec.json.decode(case.result.read_bytes(), type=Gaps)
        differ = "" if gaps.disagreement is None else f"{gaps.disagreement:.2%}"
        for replay, before in gaps.engine_old.items():
            after = gaps.old_current[replay]
            numbers = [
                f"{g:.2e}"
                for gap in (before, after)
                for g in (gap.mean, gap.tail, gap.k3, gap.extreme)
            ]
            said = _NAMES[replay] if gaps.disagreement is not None else "no experts"
            yield f"| {case.name} | {gaps.tokens:,} | {differ} | {said} | {' | '.join(numbers)} |"


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        required=True,
        type=lambda text: Path(text).expanduser().resolve(),
        help="a directory",
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        metavar="NAME=PATH",
        help="repeat it for each model",
    )
    parser.add_argument(
        "--rollouts",
        action="append",
        nargs="+",
        required=True,
        metavar=("NAME:", "key=value"),
        help="what engines are, such as engine.dtype=bfloat16; repeat it for each kind",
    )
    parser.add_argument(
        "--common", nargs="*", default=[], metavar="key=value", help="overrides of every case"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
