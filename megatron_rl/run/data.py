"""The data of a run, which rank 0 reads before torch is imported and before engines start."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.prompt import Prompt, identity_of_text
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.models.families import read_shape
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.prompts.pass_rates import (
    Header,
    PassRateFile,
    identity_of,
    judge_differences,
    judge_of,
    read_part,
)
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rollouts.recording.recorded_rollouts import RecordedRollouts
from megatron_rl.run.prompts import build_prompts, build_sets, read_sets


@dataclass(frozen=True)
class RunData:
    """The data of a run.

    prompts: of mode=train and mode=rollout_only.
    sets: the prompts that mode=eval and mode=profile measure, by name of the set. Those of
    eval.sets in mode=train.
    recording: of mode=train_only.
    warnings: lines for the user.
    """

    prompts: PromptSource | None = None
    sets: Mapping[str, tuple[Prompt, ...]] = field(default_factory=dict)
    recording: RecordedRollouts | None = None
    warnings: tuple[str, ...] = ()

    def seek(self, position: SelectorState) -> None:
        """Move to the position of a checkpoint.

        Raises `PromptDataError` or `BadRecording` if the checkpoint belongs to other data.
        """
        if self.prompts is not None:
            self.prompts.seek(position.prompts)
        if self.recording is not None:
            self.recording.restore(position)

    @property
    def training_prompts(self) -> PromptSource:
        """The prompts of a mode that samples training prompts."""
        assert self.prompts is not None
        return self.prompts


def read_data(c: Configuration) -> RunData:
    """Read the data that the mode needs. Nothing is written.

    Raises `PromptDataError`, `BadRecording`, `TokenizerError`, or `PluginError` for a user-defined
    source or scorer.
    """
    match c.mode:
        case "train_only":
            return RunData(recording=open_recording(c))
        case "eval":
            return RunData(sets=build_sets(c))
        case "profile":
            read_part(_rates_file(c), profile_header(c))
            return RunData(sets=build_sets(c))
        case _:
            sets = read_sets(c) if c.mode == "train" else {}
            prompts = build_prompts(c)
            warnings = (*_rate_warnings(c), *_set_warnings(c, prompts, sets))
            return RunData(prompts=prompts, sets=sets, warnings=warnings)


def _rate_warnings(c: Configuration) -> Iterator[str]:
    """Yield a warning for pass rates of another reward or environment: they mean something else."""
    if c.data.pass_rates is None:
        return
    differences = judge_differences(c.data.pass_rates, c.reward, c.environment)
    if differences:
        yield (
            f"data.pass_rates={c.data.pass_rates}: its rates were measured under other settings "
            f"({'; '.join(differences)}). Measure them again with python launch/profile_prompts.py "
            "unless these settings judge the same responses to be correct"
        )


def _set_warnings(
    c: Configuration, prompts: PromptSource, sets: Mapping[str, tuple[Prompt, ...]]
) -> Iterator[str]:
    """Yield a warning for each set of eval.sets that shares questions with the training data."""
    if not sets:
        return
    tokenizer = Tokenizer.from_directory(c.model.path)

    def identities(prompts: Iterable[Prompt]) -> list[str]:
        return [identity_of_text(tokenizer.decode(prompt.token_ids)) for prompt in prompts]

    training = set(identities(prompts.train))
    for name, questions in sets.items():
        shared = sum(identity in training for identity in identities(questions))
        if shared:
            yield (
                f"eval.sets.{name}={c.eval.sets[name].path}: {shared} of its {len(questions)} "
                "questions train, too, so its accuracy does not hold for unseen questions. Name "
                "the file in data.eval_path, so that they do not train, or remove them from one "
                "of the files"
            )


def open_recording(c: Configuration) -> RecordedRollouts:
    """Open the recording that `rollout.recording` names, on the first node."""
    shape = read_shape(c.model.path)
    return RecordedRollouts(
        c.rollout.recording or "",
        node=0,
        batches=c.train.total_steps,
        routes=shape.route_shape if c.train.replay == "rollout" else None,
        vocab_size=shape.vocab_size,
        ngram=c.credit.repetition_ngram,
    )


def open_rates(c: Configuration) -> PassRateFile:
    """Open the file that mode=profile writes. Raises `PromptDataError`."""
    return PassRateFile(_rates_file(c), profile_header(c))


def profile_header(c: Configuration) -> Header:
    """Return the header of the file that mode=profile writes."""
    temperature = c.rollout.temperature if c.eval.temperature is None else c.eval.temperature
    return Header(
        data=identity_of(c.data),
        model=c.model.path if c.run.resume == "never" else c.run.resume,
        samples=c.eval.samples_per_prompt,
        temperature=temperature,
        max_new_tokens=c.eval.max_new_tokens or c.rollout.max_new_tokens,
        top_p=c.eval.top_p,
        reward=judge_of(c.reward),
        environment=judge_of(c.environment),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _rates_file(c: Configuration) -> Path:
    assert c.data.pass_rates is not None, "the configuration's rules require it"
    return Path(c.data.pass_rates)
