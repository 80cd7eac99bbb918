"""Train several variants over several seeds and print one table and one plot.

    python launch/compare_runs.py --out runs/algorithms --seeds 0,1,2 \\
        --variant espo: algo=espo --variant grpo: algo=grpo --variant gspo: algo=gspo
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

LAUNCH = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Curve:
    """One run: its evaluations as (rollout tokens so far, accuracy), and its seconds from first to last step."""

    seed: int
    points: list[tuple[float, float]]
    half_width: float
    parseable: float
    seconds: float

    @property
    def gain(self) -> float:
        return self.points[-1][1] - self.points[0][1]


def main() -> None:
    arguments = _parse()
    results: dict[str, list[Curve]] = {}
    for head, *overrides in arguments.variant:
        name, _, own_seeds = head.rstrip(":").partition("@")
        seeds = [int(seed) for seed in (own_seeds or arguments.seeds).split(",")]
        results[name] = [_curve(arguments, name, seed, [*arguments.common, *overrides]) for seed in seeds]
        _report(results, arguments.out)
    print((arguments.out / "table.md").read_text())
    print(f"plot: {arguments.out / 'curves.png'}")


def _curve(arguments: argparse.Namespace, name: str, seed: int, overrides: list[str]) -> Curve:
    run = f"{name}-seed{seed}"
    directory = arguments.out / run
    if not _complete(directory):
        if directory.exists():
            raise SystemExit(f"{directory} holds a run that did not complete; look at its logs, then move it away")
        command = [
            str(Path(sys.executable).with_name("torchrun")),
            "--standalone",
            f"--nproc-per-node={arguments.nproc}",
            str(LAUNCH / "train_rl.py"),
            f"experiment={arguments.experiment}",
            f"run.root={arguments.out}",
            f"run.name={run}",
            f"seed={seed}",
            *overrides,
        ]
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True)
    return _read(directory, seed)


def _complete(directory: Path) -> bool:
    file = directory / "exit.json"
    return file.is_file() and json.loads(file.read_text())["code"] == 0


def _read(directory: Path, seed: int) -> Curve:
    records: list[dict[str, Any]] = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    tokens, points = 0.0, []
    for record in records:
        tokens += record.get("rollout/tokens", 0.0)
        if "eval/accuracy" in record:
            points.append((tokens, record["eval/accuracy"]))
    return Curve(
        seed=seed,
        points=points,
        half_width=records[-1]["eval/accuracy_ci95"],
        parseable=records[0]["eval/parseable"],
        seconds=sum(r.get("time/step", 0.0) + r.get("time/eval", 0.0) for r in records),
    )


def _report(results: dict[str, list[Curve]], out: Path) -> None:
    lines = [
        "| variant | seed | start | end (95 % CI) | gain, points | rollout tokens | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, curves in results.items():
        for curve in curves:
            start, (tokens, end) = curve.points[0][1], curve.points[-1]
            lines.append(
                f"| {name} | {curve.seed} | {start:.3f} | {end:.3f} ± {curve.half_width:.3f} | {100 * curve.gain:+.1f} "
                f"| {tokens:,.0f} | {curve.seconds:.0f} |"
            )
        gains = [100 * curve.gain for curve in curves]
        lines.append(f"| **{name}** | mean | | | **{mean(gains):+.1f}** ({min(gains):+.1f} to {max(gains):+.1f}) | | |")
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text("\n".join(lines) + "\n")
    (out / "curves.json").write_text(
        json.dumps({name: [c.__dict__ for c in curves] for name, curves in results.items()}, indent=1) + "\n"
    )
    _plot(results, out / "curves.png")


def _plot(results: dict[str, list[Curve]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=150)
    for index, (name, curves) in enumerate(results.items()):
        colour = f"C{index}"
        count = min(len(c.points) for c in curves)
        tokens = [mean(c.points[i][0] for c in curves) for i in range(count)]
        centre = [mean(c.points[i][1] for c in curves) for i in range(count)]
        axes.plot(tokens, centre, color=colour, marker="o", markersize=3, label=f"{name} (mean of {len(curves)})")
        low = [min(c.points[i][1] for c in curves) for i in range(count)]
        high = [max(c.points[i][1] for c in curves) for i in range(count)]
        axes.fill_between(tokens, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("rollout tokens")
    axes.set_ylabel("held-out accuracy (sampled pass@1)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=lambda text: Path(text).resolve(), help="directory of the runs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--nproc", type=int, default=1, help="training ranks of each run")
    parser.add_argument(
        "--variant",
        action="append",
        nargs="+",
        required=True,
        metavar="WORD",
        help="NAME: key=value ... or NAME@SEEDS: ...",
    )
    parser.add_argument("--common", nargs="*", default=[], help="overrides of every run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
