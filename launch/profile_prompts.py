"""Estimates how often a model answers the training prompts rightly, and writes the rates to a file.

    python launch/profile_prompts.py --out rates.jsonl --samples 16 data=jsonl data.train_path=train.jsonl \\
        reward=exact_match model=hf model.path=SMALL_MODEL rollout.max_new_tokens=2048
    torchrun ... launch/train_rl.py data=jsonl data.train_path=train.jsonl data.pass_rates=rates.jsonl \\
        data.pass_rate_range=[0.1,0.9]

key=value are those of launch/train_rl.py: data, reward, engines and sampling as for a run;
run.resume=DIR takes the weights of a checkpoint of model.path. An interrupted profile goes on where
it was, when it is started again as before. What was asked and found is printed, and stands in a run
directory. docs/data.md says what the file holds.
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
_DECIDED = ("mode", "data.pass_rates", "data.pass_rate_range", "eval.samples_per_prompt", "run.save_weights")


def settings_of(arguments: Sequence[str]) -> list[str]:
    """What the main job would be told.

    Ends the program with what is wrong with the arguments of this one.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE", help="where the rates go; it must be new"
    )
    parser.add_argument(
        "--samples", type=int, default=16, metavar="N", help="responses to each prompt (default 16)"
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="as for launch/train_rl.py"
    )
    options = parser.parse_intermixed_args(arguments)
    for setting in options.settings:
        if (key := setting.lstrip("+~").partition("=")[0]) in _DECIDED:
            parser.error(f"{setting}: {key} follows from --out and --samples; leave it out")
    quoted = options.out.replace("\\", "\\\\").replace("'", "\\'")
    decided = [
        "mode=profile",
        f"data.pass_rates='{quoted}'",
        f"eval.samples_per_prompt={options.samples}",
    ]
    return [*options.settings, *decided, "run.save_weights=false"]


def profile(configuration: Configuration) -> int:
    """Run the checked configuration. The import is late: it brings torch and Megatron."""
    from megatron_rl.run.main import run

    return run(configuration)


if __name__ == "__main__":
    exit_on_interrupt()
    try:
        sys.argv[1:] = settings_of(sys.argv[1:])
    except SystemExit as error:
        sys.exit(ExitCode.REFUSED if error.code else ExitCode.OK)
    sys.exit(main(profile, ROOT / "hydra_conf"))
