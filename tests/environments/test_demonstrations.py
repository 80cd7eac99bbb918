"""Demonstrations: weight version and token budget."""

import shutil
from pathlib import Path

import pytest

from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.tokenizer import Tokenizer
from tests.support.scripted_model import (
    CHECKPOINT,
    EOS,
    TOKENIZER,
    ScriptedModel,
    open_episode,
)


def test_demonstration_has_the_version_of_the_start_checkpoint() -> None:
    episode = open_episode(ScriptedModel([]), routes=None)
    episode.demonstrate("046")
    assert [segment.version for segment in episode.rollout().segments] == [0, 0]


def test_demonstration_may_fill_the_budget() -> None:
    exact = open_episode(ScriptedModel([]), budget=4, routes=None)
    exact.demonstrate("046")  # three digits and the end of sequence
    assert len(exact.rollout().segments[1].tokens) == 4
    with pytest.raises(RolloutRejected, match=r"4 tokens, .*max_new_tokens=3"):
        open_episode(ScriptedModel([]), budget=3, routes=None).demonstrate("046")


def test_demonstrations_end_with_the_tokenizers_own_end(tmp_path: Path) -> None:
    """Qwen3's `eos_token` is <|im_end|>, which has a larger id than its other end."""
    directory = shutil.copytree(CHECKPOINT, tmp_path / "model")
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 0]}')
    episode = open_episode(
        ScriptedModel([]), routes=None, tokenizer=Tokenizer.from_directory(directory)
    )
    episode.demonstrate("046")
    assert episode.rollout().segments[1].tokens.tolist() == [*TOKENIZER.encode("046"), EOS]
