"""The same work for both trainers: their commands, and what TRL's job reads."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.cli import compose
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.launch_facts import LaunchFacts
from megatron_rl.prompts.factory import generate_questions
from tests.support.scripts import LAUNCH, ROOT

_SETTINGS = (
    "experiment=quickstart",
    "algo=grpo",
    # TRL trains all rollouts, also those of zero-variance groups
    "credit.all_correct=zvp",
    "credit.all_incorrect=zvp",
    "eval.every=0",
    "data.num_eval=16",  # of the evaluation after the last step
    "run.save_weights=false",
    "logger=quiet",
)
_TRL_JOB = Path(__file__).with_name("trl_job.py")


class TrlJob(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers and rows that `trl_job.py` reads.

    model: a checkpoint. steps: batches of rollouts, each of `prompts` x `samples`. rows: questions
    with their answers.
    """

    directory: str
    model: str
    seed: int
    steps: int
    optimizer_steps: int
    prompts: int
    samples: int
    max_new_tokens: int
    temperature: float
    clip_low: float
    clip_high: float
    learning_rate: float
    rows: Sequence[dict[str, str]]


class Job(NamedTuple):
    """A job to start. directory: where its metrics.jsonl will be."""

    command: Sequence[str]
    directory: Path


def configure(settings: Sequence[str], *, ranks: int) -> Configuration:
    """Return the configuration of this trainer with further settings."""
    facts = LaunchFacts(world_size=ranks, local_world_size=ranks)
    return compose([*_SETTINGS, *settings], facts=facts)


def our_job(directory: Path, settings: Sequence[str], *, ranks: int, steps: int) -> Job:
    """Return the job of this trainer, as a user starts it."""
    launcher = []
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    place = (f"run.root={directory}", "run.name=run", f"train.total_steps={steps}")
    script = str(LAUNCH / "train_rl.py")
    command = [sys.executable, *launcher, script, *_SETTINGS, *settings, *place]
    return Job(command, directory / "run")


def trl_job(directory: Path, python: Path, configuration: Configuration, *, steps: int) -> Job:
    """Write the file of TRL's job with the numbers of a configuration, and return the job.

    python: of TRL's environment.
    """
    algo = configuration.algo
    if not isinstance(algo, GrpoSettings):
        raise SystemExit(
            f"algo.name={algo.name}: TRL's trainer is measured with GRPO. Leave it out"
        )
    rollout = configuration.rollout
    num_rows = steps * rollout.prompts_per_step
    questions = itertools.islice(generate_questions(configuration.data), num_rows)
    job = TrlJob(
        directory=str(directory),
        model=configuration.model.path,
        seed=configuration.seed,
        steps=steps,
        optimizer_steps=configuration.train.optimizer_steps_per_batch,
        prompts=rollout.prompts_per_step,
        samples=rollout.samples_per_prompt,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        clip_low=algo.clip_low,
        clip_high=algo.clip_high,
        learning_rate=configuration.optimizer.lr,
        rows=[{"prompt": question.text, "answer": question.answer} for question in questions],
    )
    file = directory / "job.json"
    file.write_bytes(msgspec.json.encode(job))
    return Job([str(python), str(_TRL_JOB), str(file)], directory)


def write_larger_model(directory: Path) -> Path:
    """Write a checkpoint with random weights and the tokenizer of the quickstart."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    blank = ROOT / "megatron_rl/models/assets/qwen3_moe_tiny_blank"
    changes = {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_experts": 16,
        "moe_intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "dtype": "float32",
    }
    config = json.loads((blank / "config.json").read_text()) | changes
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(blank).save_pretrained(directory)
    return directory
