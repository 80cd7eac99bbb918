"""Draws what a run measured of its routes, layer by layer: runs/NAME/heat_maps/*.png.

python launch/heat_maps.py runs/NAME

The run needs train.replay_measure_every; it may be going on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.heat_maps import draw, heat_maps
from megatron_rl.records.past_run import RunUnreadable, read_metrics
from megatron_rl.records.write_errors import write_problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the maps, print their files and return the exit code."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("run", type=Path, help="a run's directory, such as runs/NAME")
    run = parser.parse_args(arguments).run
    try:
        if find_spec("matplotlib") is None:
            raise RunUnreadable(
                "matplotlib, which draws the maps, is not installed. Run make install"
            )
        maps = list(heat_maps(read_metrics(run)))
        if not maps:
            raise RunUnreadable(
                f"{run}: no step measured its routes. Train with train.replay_measure_every=10"
            )
        directory = run / "heat_maps"
        directory.mkdir(exist_ok=True)
        for heat_map in maps:
            file = directory / f"{heat_map.name.replace('/', '_')}.png"
            draw(heat_map, file)
            print(file)
    except Failure as refused:
        print(refused, file=sys.stderr)
        return refused.exit_code
    except OSError as error:
        if (problem := write_problem(error, run / "heat_maps")) is None:
            raise
        print(problem, file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
