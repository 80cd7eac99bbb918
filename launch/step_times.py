"""Where a run's time went: mean seconds by stage.

python launch/step_times.py runs/NAME
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

STAGES = ("rollout", "exchange", "old_policy", "train", "sync")


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    records = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").open()]
    steps = [record for record in records if "time/step" in record]
    if not steps:
        raise SystemExit(f"{sys.argv[1]}: no step is complete")
    later = steps[1:] or steps
    print("| stage | first step, s | later steps, s | share |")
    print("|---|---|---|---|")
    whole = mean(record["time/step"] for record in later)
    for stage in STAGES:
        seconds = mean(record.get(f"time/{stage}", 0.0) for record in later)
        print(f"| {stage} | {steps[0].get(f'time/{stage}', 0.0):.2f} | {seconds:.2f} | {seconds / whole:.0%} |")
    print(f"| whole step | {steps[0]['time/step']:.2f} | {whole:.2f} | |")
    evaluations = [record["time/eval"] for record in records if "time/eval" in record]
    if evaluations:
        print(f"\n{len(evaluations)} evaluations of {mean(evaluations):.1f} s each; reward time exposed "
              f"{mean(record['time/reward_exposed'] for record in later):.3f} s a step")  # fmt: skip


if __name__ == "__main__":
    main()
