"""Estimate how often a model answers each training prompt correctly, and write the pass rates.

Examples:

    python launch/profile_prompts.py --out rates.jsonl --samples 16 \\
        data=jsonl data.train_path=train.jsonl reward=exact_match \\
        model=hf model.path=SMALL_MODEL rollout.max_new_tokens=2048
    torchrun ... launch/train_rl.py data=jsonl data.train_path=train.jsonl \\
        data.pass_rates=rates.jsonl data.pass_rate_range=[0.1,0.9]

The settings key=value are the same as for launch/train_rl.py: data, reward, engines and sampling.
run.resume=DIR uses the weights of a checkpoint of model.path. To continue an interrupted profile,
run the same command again.

Outputs: FILE with one JSON line for each prompt (docs/data.md describes it), and a run directory
with the settings and the metrics. The summary is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.cli import main
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.interrupts import exit_on_interrupt

ROOT = Path(__file__).resolve().parents[1]
# Settings that follow from the options of this command
_FIXED_KEYS = (
    "mode",
    "data.pass_rates",
    "data.pass_rate_range",
    "eval.samples_per_prompt",
    "run.save_weights",
)


def settings_of(arguments: Sequence[str]) -> list[str]:
    """Return the settings of the main job. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="file to create for the pass rates"
    )
    parser.add_argument(
        "--samples", type=int, default=16, metavar="N", help="responses to each prompt (default 16)"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings as for launch/train_rl.py"
    )
    options = parser.parse_intermixed_args(arguments)
    for setting in options.settings:
        key = setting.lstrip("+~").partition("=")[0]
        if key in _FIXED_KEYS:
            parser.error(f"{setting}: {key} follows from --out and --samples. Leave it out")
    path = options.out.replace("\\", "\\\\").replace("'", "\\'")
    return [
        *options.settings,
        "mode=profile",
        f"data.pass_rates='{path}'",
        f"eval.samples_per_prompt={options.samples}",
        "run.save_weights=false",
    ]


def profile(configuration: Configuration) -> int:
    """Run the checked configuration. The import is late because it brings torch and Megatron."""
    from megatron_rl.run.main import run

    return run(configuration)


if __name__ == "__main__":
    exit_on_interrupt()
    try:
        sys.argv[1:] = settings_of(sys.argv[1:])
    except SystemExit as exit_request:
        sys.exit(ExitCode.REFUSED if exit_request.code else ExitCode.OK)
    sys.exit(main(profile, ROOT / "hydra_conf"))
