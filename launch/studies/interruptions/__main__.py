"""Abort the responses of a run every few seconds, kill its engines, and count what is lost.

Start it in the root of the repository:

    python -m launch.studies.interruptions [--on-update wait|budget|resume] [--steps 40]
        [--abort-every 2] [--kill-every 10] [--dtype float32] [--keep DIRECTORY] [key=value ...]

The run samples ahead of the trainer with three external engines. An engine is killed only while
another one serves, and is started again at once.

Output: the numbers of aborts and kills, the rollouts that are missing, rejected or trained twice,
the largest age of a token, the tokens in no class of the account, and whether the weights equal
those of an undisturbed run. With `resume` they do not have to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path

from launch.studies.faults.evidence import EVIDENCE_SETTINGS, Evidence, read_evidence
from launch.studies.faults.follower import RunFollower
from launch.studies.faults.servers import MODELS, ServerKind, ServerPark
from launch.studies.interruptions.interrupter import Interrupter

_NUM_SERVERS = 3
_PROMPTS = 16
_SAMPLES = 8
_RUN_SECONDS = 1800.0
_START_SECONDS = 300.0
_MODEL = MODELS / "qwen3_moe_tiny_column_addition"
_SETTINGS = (
    *EVIDENCE_SETTINGS,
    "model=column_addition",
    "data=column_addition",
    "data.max_prompt_tokens=32",
    "rollout.max_new_tokens=32",
    f"rollout.prompts_per_step={_PROMPTS}",
    f"rollout.samples_per_prompt={_SAMPLES}",
    "logger.progress=true",
)


def main() -> None:
    """Run, and print what was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.interruptions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--on-update", choices=("wait", "budget", "resume"), default="resume")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--abort-every", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--kill-every", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--keep", type=Path, help="directory to create for the runs")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = (options.keep or Path(scratch)).resolve()
        with contextlib.closing(ServerPark(directory / "servers")) as park:
            study(options, directory, park)


def study(options: argparse.Namespace, directory: Path, park: ServerPark) -> None:
    """Train an undisturbed and a disturbed run, and print how they differ."""
    kinds = [ServerKind(number, options.dtype, model=_MODEL) for number in range(_NUM_SERVERS)]
    settings = [*_SETTINGS, *settings_of(options), *options.settings]
    urls = directory / "urls.txt"
    settings += ["engine=external", f"engine.urls_file={urls}"]
    settings.append(f"engine.key_file={park.key_file}")
    urls.write_text("".join(f"{park.server(kind).url}\n" for kind in kinds))
    undisturbed_follower = RunFollower(directory / "undisturbed", settings, ranks=1)
    require_end(undisturbed_follower)
    follower = RunFollower(directory / "disturbed", settings, ranks=1)
    follower.wait_for_step(1, _START_SECONDS)
    interrupter = Interrupter(
        park, kinds, abort_every=options.abort_every, kill_every=options.kill_every
    )
    with contextlib.closing(interrupter):
        while follower.watch():
            interrupter.step()
    require_end(follower)
    print(f"{interrupter.num_aborts} aborts, {interrupter.num_kills} kills")
    print_losses(follower.run, read_evidence(undisturbed_follower.run), options.steps)


def settings_of(options: argparse.Namespace) -> list[str]:
    """The settings of both runs that the options choose."""
    settings = [
        f"train.total_steps={options.steps}",
        f"rollout.on_update={options.on_update}",
        f"rollout.max_staleness={1 if options.on_update == 'wait' else 2}",
        f"model.dtype={options.dtype}",
        f"engine.dtype={options.dtype}",
    ]
    if options.on_update == "budget":
        settings.append("rollout.tokens_per_version=12")
    return settings


def require_end(follower: RunFollower) -> None:
    """Wait for the end of a run. Raises AssertionError if it failed."""
    code = follower.wait(_RUN_SECONDS)
    assert code == 0, f"the run ended with {code}:\n{follower.output[-6000:]}"


def print_losses(run: Path, undisturbed_evidence: Evidence, num_steps: int) -> None:
    """Print what a run has lost or doubled."""
    evidence = read_evidence(run)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    num_expected = num_steps * _PROMPTS * _SAMPLES
    num_sampled = round(sum(record.get("rollout/samples", 0.0) for record in records))
    rows = {
        "rollouts of all steps": f"{num_sampled:,} of {num_expected:,}",
        "rollouts rejected": evidence.num_rejected,
        "rollouts trained twice": evidence.num_doubled,
        "requests sent again": evidence.num_repeated,
        "largest age": max(record.get("rollout/age/max", 0.0) for record in records),
        "tokens in no class": sum(record.get("account/unaccounted", 0.0) for record in records),
        "weights": "same" if evidence.digest == undisturbed_evidence.digest else "other",
    }
    for name, value in rows.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
