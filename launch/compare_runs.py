"""Train several variants over several seeds, and put what they learnt into one table and one plot.

    python launch/compare_runs.py --out runs/algorithms --seeds 0,1,2 \\
        --variant espo: algo=espo --variant grpo: algo=grpo --variant frozen@0,1: optimizer.lr=0

Each run is OUT/NAME-seedN. A complete one whose configuration is the one asked for is not repeated, so the same command
goes on with a comparison that was interrupted; one of another configuration is refused. Written to OUT: table.md,
curves.json, curves.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl.config.cli import compose
from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.hydra_errors import split_override
from megatron_rl.config.schema import NAME
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.refusal import ConfigurationRefused, shown
from megatron_rl.records.curves import Curve, plot, read_curve, table
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import flat_settings, read_ranks, read_settings
from megatron_rl.records.run_directory import to_yaml
from megatron_rl.records.run_lock import run_is_alive

SCRIPT = Path(__file__).resolve().with_name("train_rl.py")
# Keys that overrides may not set, and what sets them
_OURS = {
    "experiment": "--experiment",
    "seed": "--seeds",
    "run.root": "--out",
    "run.name": "the variant's name",
    "run.on_existing": "this script, which runs again what did not complete",
}
_LARGEST_SEED = 2**32 - 1
_CLOSING_SECONDS = 60.0  # twice what torchrun gives its ranks


class ComparisonRefused(Failure):
    """What was asked for cannot be compared; nothing was started."""

    exit_code = ExitCode.REFUSED


@dataclass(frozen=True)
class Run:
    """One variant with one seed. asked: its configuration as {"section.key": value}, without the run's own section, and
    its number of ranks."""

    variant: str
    seed: int
    directory: Path
    overrides: tuple[str, ...]
    asked: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: that of the run that failed, or 0."""
    given = _parser().parse_args(arguments)
    try:
        if find_spec("matplotlib") is None:
            raise ComparisonRefused("matplotlib, which draws the plot, is not installed. Run make install")
        runs = list(plan(given))
        complete = [is_complete(run) for run in runs]  # whatever is refused is refused before the first run
        for index, run in enumerate(runs):
            if not complete[index]:
                if code := train(run, given.nproc):
                    return code
                report(runs[: index + 1], given.out)
        report(runs, given.out)
        print((given.out / "table.md").read_text() + f"\nplot: {given.out / 'curves.png'}")
    except Failure as refused:
        print(refused, file=sys.stderr)
        return refused.exit_code
    except OSError as error:
        print(f"{error.filename} cannot be written: {error.strerror}. The same command goes on here", file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    except KeyboardInterrupt:
        print("\ninterrupted. The same command goes on here", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def plan(given: argparse.Namespace) -> Iterator[Run]:
    """Every run with its checked configuration. Raises `ComparisonRefused`."""
    taken: set[str] = set()
    for head, *overrides in given.variant:
        name, seeds = _head(head, given.seeds)
        if name in taken:
            raise ComparisonRefused(
                f"--variant {name}: another one has this name, which its runs would share. Rename one"
            )
        taken.add(name)
        for override in (*given.common, *overrides):
            if (key := split_override(override)[0].lstrip("+~")) in _OURS:
                raise ComparisonRefused(f"--variant {name}: {override}: {key} is set by {_OURS[key]}. Leave it out")
        for seed in seeds:
            yield _run(given, name, seed, (*given.common, *overrides))


def _run(given: argparse.Namespace, name: str, seed: int, overrides: Sequence[str]) -> Run:
    run = f"{name}-seed{seed}"
    ours = (f"seed={seed}", f"run.root={given.out}", f"run.name={run}", "run.on_existing=overwrite_failed")
    overrides = (f"experiment={given.experiment}", *overrides, *ours)
    ranks = {"WORLD_SIZE": str(given.nproc), "LOCAL_WORLD_SIZE": str(given.nproc)}
    try:
        configuration = compose(overrides, facts=LaunchFacts.from_environment(os.environ | ranks))
    except ConfigurationRefused as refused:
        raise ComparisonRefused(f"--variant {name}, seed {seed}: {refused}") from refused
    asked = _compared(flat_settings(to_yaml(configuration)), given.nproc)
    return Run(name, seed, given.out / run, overrides, asked)


def _head(head: str, common_seeds: list[int]) -> tuple[str, list[int]]:
    """The name and the seeds of `NAME:` or `NAME@SEEDS:`."""
    name, at, own = head.removesuffix(":").partition("@")
    if not head.endswith(":"):
        raise ComparisonRefused(
            f"--variant {head}: a variant begins with its name and a colon, and a space follows: "
            f"--variant {re.split('[:=]', head)[0]}: key=value ..."
        )
    if not re.fullmatch(NAME, name):
        raise ComparisonRefused(f"--variant {head}: the name becomes a directory's. Use letters, digits, '-' and '_'")
    try:
        return name, _seeds(own) if at else common_seeds
    except argparse.ArgumentTypeError as error:
        raise ComparisonRefused(f"--variant {head}: {error}") from error


def _compared(settings: dict[str, Any], ranks: int | None) -> dict[str, Any]:
    compared = {key: value for key, value in settings.items() if not key.startswith("run.")}
    return compared if ranks is None else {"number of ranks": ranks} | compared


def is_complete(run: Run) -> bool:
    """Whether the run was made already. Raises `ComparisonRefused` where another is in its place, or it is going on."""
    ended = read_exit_record(run.directory)
    if ended is None or ended.code != ExitCode.OK:
        if run_is_alive(run.directory):
            raise ComparisonRefused(f"{run.directory} is a run under way. Wait for its end, or give another --out")
        return False
    made = _compared(read_settings(run.directory), read_ranks(run.directory))
    keys = [key for key in run.asked | made if key not in made or key not in run.asked or made[key] != run.asked[key]]
    if keys:
        told = "\n".join(f"  {key}: {_value(made, key)} there, {_value(run.asked, key)} asked for" for key in keys)
        raise ComparisonRefused(
            f"{run.directory} holds a complete run of another configuration, which is not relabelled:\n{told}\n"
            "Give another --out, or move that run away"
        )
    return True


def _value(settings: dict[str, Any], key: str) -> str:
    return shown(settings[key]) if key in settings else "nothing"


def train(run: Run, ranks: int) -> int:
    """Train to the end, in place of what did not complete. Returns the exit code, 0 for a complete run."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, str(SCRIPT), *run.overrides]
    print(shlex.join(command), flush=True)
    with _ending_with_us(subprocess.Popen(command)) as process:
        process.wait()
    ended = read_exit_record(run.directory)
    if process.returncode == 0 and is_complete(run):
        return ExitCode.OK
    signalled = 128 - process.returncode if process.returncode < 0 else process.returncode
    code, reason = (ended.code, ended.reason) if ended is not None else (signalled, "it left no exit.json")
    print(f"\n{run.directory.name} failed (exit code {code}): {reason}\nThe same command goes on here", file=sys.stderr)
    return code or 1


@contextlib.contextmanager
def _ending_with_us(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """However the block is left, the process has ended. Ctrl-C reaches it without us, SIGTERM does not."""

    def terminated(number: int, frame: object) -> NoReturn:
        raise SystemExit(ExitCode.TERMINATED)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield process
    except OSError as error:
        print(f"{error.filename} cannot be written: {error.strerror}. The same command goes on here", file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    except KeyboardInterrupt:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLOSING_SECONDS)
        raise
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, before)


def report(runs: Sequence[Run], out: Path) -> None:
    """Write table, curves and plot of complete runs. Raises `RunUnreadable`."""
    results: dict[str, list[Curve]] = {}
    for run in runs:
        results.setdefault(run.variant, []).append(read_curve(run.directory, run.seed))
    (out / "table.md").write_text("\n".join(table(results)) + "\n")
    curves = {name: [asdict(curve) for curve in curves] for name, curves in results.items()}
    (out / "curves.json").write_text(json.dumps(curves, indent=1) + "\n")
    plot(results, out / "curves.png")


def _parser() -> argparse.ArgumentParser:
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", required=True, type=_directory, help="directory of the runs; made where it is not")
    parser.add_argument("--seeds", default="0,1,2", type=_seeds, help="of variants without their own (default: 0,1,2)")
    parser.add_argument("--experiment", default="quickstart", help="what every run starts from (default: %(default)s)")
    parser.add_argument(
        "--nproc", default=os.environ.get("NPROC", "1"), type=_ranks, help="ranks of each run (default: $NPROC, or 1)"
    )
    parser.add_argument("--common", nargs="*", default=[], metavar="key=value", help="overrides of every run")
    parser.add_argument(
        "--variant", action="append", nargs="+", required=True, metavar=("NAME:", "key=value"),
        help="a variant and its overrides; NAME@SEEDS: gives it its own seeds. Repeat it for each variant",
    )  # fmt: skip
    return parser


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it names no directory")
    return Path(text).expanduser().resolve()


def _ranks(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks: give a whole number from 1")
    return int(text)


def _seeds(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isascii() or not word.isdigit() or int(word) > _LARGEST_SEED:
            raise argparse.ArgumentTypeError(f"{word!r} is not a seed: give whole numbers with commas, such as 0,1,2")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text} names a seed twice, and so would two runs be named. Give each once")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
