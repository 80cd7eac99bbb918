"""One call of the check: its command line, its stages in turn, and its table."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.lab.gpu_check.archives import (
    Archives,
    CarryError,
    Manifest,
    open_archives,
    read_manifest,
)
from tests.lab.gpu_check.environment import stage_environment
from tests.lab.gpu_check.facts import Facts, read_facts, transformer_engine_problem
from tests.lab.gpu_check.outcome import Outcome
from tests.lab.gpu_check.process import CommandStopped, run_stage, stage_command
from tests.lab.gpu_check.record import RECORD_NAME, Log, Record
from tests.lab.gpu_check.stages import BUDGET_S, PARTS, STAGES, stage_limit

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "gpu-check"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Of the limits in small stages. Nothing is measured there, and the CPU does a GPU's work.
_SMALL_FACTOR = 4
_COMPILERS = ("cc", "gcc", "clang")


def main(arguments: Sequence[str], *, description: str | None = None) -> int:
    """Run the stages and print the table. Returns the exit code."""
    options = parse_arguments(arguments, description)
    try:
        with (
            stop_signals(),
            tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder,
        ):
            return Check(options, Path(folder)).run()
    except CommandStopped as stop:
        return stop.code
    except CarryError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        place = error.filename or options.out or RESULTS
        print(
            f"gpu_check: {place}: {error.strerror}. Results go to --out, scratch files to TMPDIR "
            f"({tempfile.gettempdir()})",
            file=sys.stderr,
        )
    return 2


def parse_arguments(arguments: Sequence[str], description: str | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--small", action="store_true", help="run small stages on the CPU")
    parser.add_argument(
        "--pretended", action="store_true", help="run small stages on tests/lab/pretended_device"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--part", type=int, choices=list(PARTS), help="run the stages of one call")
    which.add_argument("--only", nargs="+", choices=list(STAGES), help="run these stages only")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help="seconds for all stages (default: 540)"
    )
    parser.add_argument(
        "--carry", type=Path, help="folder that `make gpu-carry` wrote: use its packages"
    )
    parser.add_argument("--out", type=Path, help="folder (default: a new one in gpu-check)")
    options = parser.parse_args(arguments)
    options.small |= options.pretended
    if options.out is not None and (options.out / RECORD_NAME).exists():
        parser.error(f"--out {options.out}: it holds the results of another check. Name a new one")
    return options


class Check:
    """One run of the program.

    scratch: a new folder for the files of the stages.
    """

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self._options = options
        self._scratch = scratch
        self._start = time.monotonic()
        self._archives = Archives()
        manifest = None if options.carry is None else read_manifest(options.carry)
        self._names = options.only or PARTS.get(options.part) or tuple(STAGES)
        facts = self._read_facts()
        folder = self._open_folder(facts)
        details = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "small": options.small,
            "part": options.part,
            "facts": vars(facts),
        }
        self._record = Record(folder, details, self._names)
        self._record.save()
        self._log = Log(folder, len(self._names))
        if manifest is not None:
            self._open_archives(manifest, facts)

    def run(self) -> int:
        """Run the stages in turn. Returns the exit code."""
        code = 0
        with closing(self._log):
            try:
                for index, outcome in enumerate(self._record.outcomes):
                    self._run(outcome, self._names[index + 1 :])
            except CommandStopped as stop:
                code = stop.code
            finally:
                self._record.save()
        outcomes = self._record.outcomes
        print("\n".join(table(outcomes)))
        print(f"written: {self._record.file}", flush=True)
        return code or int(any(outcome.status == "failed" for outcome in outcomes))

    def _read_facts(self) -> Facts:
        """Ask torch for its versions and the GPU, if anything depends on them."""
        if self._options.carry is None and self._options.out is not None:
            return Facts()
        return read_facts(self._environment(()))

    def _open_folder(self, facts: Facts) -> Path:
        """Create the folder of the results."""
        options = self._options
        kind = "pretended-" if options.pretended else "small-" if options.small else ""
        device = facts.device or (platform.machine() if options.small else "unknown")
        name = re.sub(r"\W+", "-", device).strip("-").lower()
        part = f"-part-{options.part}" if options.part else ""
        date = datetime.now(UTC).strftime("%Y-%m-%d-%H%M%S")
        folder: Path = options.out or RESULTS / f"{kind}{name}-{date}{part}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _open_archives(self, manifest: Manifest, facts: Facts) -> None:
        """Unpack the archives of the chosen stages, and try Transformer Engine."""
        options = self._options
        wanted_names = {name for stage in self._names for name in STAGES[stage].archives}
        names = [name for name in manifest.archives if name in wanted_names]
        archives = open_archives(manifest, names, facts, small=options.small, log=_say)
        if "te" in archives.paths and not options.small:
            _say("trying Transformer Engine")
            problem = transformer_engine_problem(self._environment(archives.paths.values()))
            if problem:
                archives.refuse("te", f"it does not run on this GPU ({problem})")
        self._archives = archives
        self._record.details["archives"] = archives.describe()
        for name, reason in archives.refusals.items():
            _say(f"archive {name} is not used: {reason}")

    def _run(self, outcome: Outcome, later: Sequence[str]) -> None:
        """Run one stage, or say why not."""
        print(f"{outcome.stage} ...", end=" ", flush=True)
        factor = _SMALL_FACTOR if self._options.small else 1
        own_limit = factor * STAGES[outcome.stage].limit
        later_limits = factor * sum(STAGES[name].limit for name in later)
        remaining = self._options.budget - (time.monotonic() - self._start)
        limit = stage_limit(own_limit, later_limits, remaining)
        obstacle = self._obstacle(outcome.stage)
        if obstacle:
            outcome.status = "skipped"
            outcome.reason = obstacle
        elif limit <= 0:
            outcome.reason = "the budget is spent"
        else:
            outcome.status = "running"
            self._start_stage(outcome, limit, is_own=limit >= own_limit)
        if outcome.stage == "machine" and self._options.carry is not None:
            outcome.values["archives"] = self._archives.describe()
        self._record.save()
        print(f"{outcome.status} after {outcome.seconds:.0f} s {outcome.reason}", flush=True)

    def _start_stage(self, outcome: Outcome, limit: float, *, is_own: bool) -> None:
        """Run a stage's process. is_own: it has its own limit, not just the rest of the budget."""
        options = self._options
        stage = STAGES[outcome.stage]
        scratch = self._scratch / outcome.stage
        scratch.mkdir(parents=True)
        self._log.begin(outcome.stage)
        self._record.save()
        late = ("failed", f"it exceeded its limit of {limit:.0f} s")
        no_budget = ("cut off", f"the budget ended after {limit:.0f} s")
        paths = self._archives.paths
        run_stage(
            stage_command(
                stage.module,
                stage.choices,
                scratch,
                limit,
                small=options.small,
                on_pretended=options.pretended,
            ),
            self._environment(paths[name] for name in stage.archives if name in paths),
            ROOT,
            outcome,
            self._log,
            limit=limit,
            at_limit=late if is_own else no_budget,
            on_poll=self._record.save_sometimes,
        )

    def _obstacle(self, name: str) -> str:
        """Return why a stage cannot run here, empty if it can."""
        stage = STAGES[name]
        if self._options.pretended and stage.not_pretended:
            return stage.not_pretended
        if stage.compiles and not self._options.small and not has_compiler():
            return f"Triton needs a C compiler: {', '.join(_COMPILERS)} or CC"
        return self._archives.obstacle(stage.needs)

    def _environment(self, packages: Iterable[Path]) -> dict[str, str]:
        small = self._options.small
        return stage_environment(os.environ, ROOT, self._scratch, small=small, packages=packages)


def has_compiler() -> bool:
    """True if Triton will find a C compiler."""
    names = [os.environ["CC"]] if os.environ.get("CC") else _COMPILERS
    return any(shutil.which(name.split()[0]) for name in names)


@contextmanager
def stop_signals() -> Iterator[None]:
    """Let the first signal that ends the command raise `CommandStopped`, and ignore others."""

    def stop(number: int, _: Any) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise CommandStopped(signal.Signals(number))

    handlers = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines of the table: one for each stage, and its measurements below it."""
    lines = [f"{'stage':<15}{'result':<13}{'seconds':>8}  "]
    for outcome in outcomes:
        columns = f"{outcome.stage:<15}{outcome.status:<13}{outcome.seconds:>8.1f}"
        lines.append(f"{columns}  {outcome.reason}".rstrip())
        for name, value in outcome.values.items():
            if not isinstance(value, list):
                lines.append(f"{'':<15}{name} = {value}")
    return lines


def _say(text: str) -> None:
    print(text, flush=True)
