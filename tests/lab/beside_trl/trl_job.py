"""Train with TRL's GRPOTrainer, and write a record after each batch of rollouts.

TRL's own environment runs this file, so it imports nothing of this project:

    python tests/lab/beside_trl/trl_job.py JOB.json

JOB.json has the fields of `TrlJob` in `jobs.py`. Output: `metrics.jsonl` in the directory of the
job. Each line has the number of the batch, and the seconds of its call of `generate`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_NUMBER = re.compile(r"\d+")


class TimedCall:
    """A function that knows how long its latest call took."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call the function."""
        start = time.monotonic()
        result = self._function(*arguments, **options)
        self.seconds = time.monotonic() - start
        return result


class BatchRecords(TrainerCallback):
    """Writes a record after the last optimizer step of each batch."""

    def __init__(self, file: Path, optimizer_steps: int, generate: TimedCall) -> None:
        self._file = file
        self._optimizer_steps = optimizer_steps
        self._generate = generate

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the record if the batch is over."""
        batch, rest = divmod(state.global_step, self._optimizer_steps)
        if rest == 0:
            record = {"step": batch, "time/rollout": self._generate.seconds}
            with self._file.open("a") as lines:
                lines.write(f"{json.dumps(record)}\n")


def main() -> None:
    """Train as the job says."""
    job = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(job["model"])

    def exact_match(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        """Reward a response that ended by itself, and whose last number is the answer."""
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        rewards = []
        for text, token_ids, expected in zip(texts, completion_ids, answer, strict=True):
            has_ended = token_ids[-1] == tokenizer.eos_token_id
            is_correct = has_ended and _NUMBER.findall(text)[-1:] == [expected]
            rewards.append(float(is_correct))
        return rewards

    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=exact_match,
        args=_configure(job),
        train_dataset=Dataset.from_list(job["rows"]),
        processing_class=tokenizer,
    )
    generate = TimedCall(trainer.model.generate)
    trainer.model.generate = generate
    file = Path(job["directory"]) / "metrics.jsonl"
    trainer.add_callback(BatchRecords(file, job["optimizer_steps"], generate))
    trainer.train()


def _configure(job: dict[str, Any]) -> GRPOConfig:
    """Return the settings that do the work of the other trainer, in float32."""
    optimizer_steps = job["optimizer_steps"]
    rollouts = job["prompts"] * job["samples"]
    return GRPOConfig(
        output_dir=job["directory"],
        model_init_kwargs={"dtype": "float32"},
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=rollouts // optimizer_steps,
        steps_per_generation=optimizer_steps,
        max_steps=optimizer_steps * job["steps"],
        num_generations=job["samples"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        beta=0.0,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        # The other trainer computes no load-balancing loss
        router_aux_loss_coef=0.0,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        logging_steps=optimizer_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=job["seed"],
    )


if __name__ == "__main__":
    main()
