"""state.json of a checkpoint: damaged ones are named, and older versions are read."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.run.checkpoints.state_file import STATE_NAME, encode_state, read_state
from tests.support.checkpoints import make_state


def older_document(**position: Any) -> dict[str, Any]:
    """Return a document of format 1. position: the keys of features."""
    document: dict[str, Any] = msgspec.json.decode(encode_state(make_state(4)))
    del document["position"]["features"]
    document["position"] |= position
    document["format"] = 1
    return document


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = make_state(4, features={"guards": {"nonfinite": 2, "norms": [0.5]}})
    (tmp_path / STATE_NAME).write_bytes(encode_state(state))
    assert read_state(tmp_path) == state


def test_the_features_of_an_older_checkpoint_go_on(tmp_path: Path) -> None:
    document = older_document(
        nonfinite=2,
        guard={"norms": [0.5, 2.0], "nonfinite_since": 3},
        bf16_mismatch={"steps": 2, "k3_sum": 0.004},
        phase={"index": 1, "tokens": 24, "accuracy": None},
        uncompared_tokens=3,
    )
    (tmp_path / STATE_NAME).write_bytes(msgspec.json.encode(document))
    assert read_state(tmp_path).position.features == {
        "guards": {"norms": [0.5, 2.0], "nonfinite_since": 3, "nonfinite": 2},
        "alarms": {"steps": 2, "k3_sum": 0.004},
        "curriculum": {"index": 1, "tokens": 24, "accuracy": None},
        "token_audit": {"uncompared_tokens": 3},
    }


def test_a_still_older_checkpoint_has_no_history(tmp_path: Path) -> None:
    (tmp_path / STATE_NAME).write_bytes(msgspec.json.encode(older_document()))
    state = read_state(tmp_path)
    assert "alarms" not in state.position.features
    assert state.position.features["guards"] == {"nonfinite": 0}


@pytest.mark.parametrize("guard", [7, [], "none"])
def test_a_damaged_state_of_a_feature_is_named(tmp_path: Path, guard: Any) -> None:
    (tmp_path / STATE_NAME).write_bytes(msgspec.json.encode(older_document(guard=guard)))
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        read_state(tmp_path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    document = older_document() | {"format": 3}
    (tmp_path / STATE_NAME).write_bytes(msgspec.json.encode(document))
    with pytest.raises(ValueError, match="has format 3, but this version reads 2"):
        read_state(tmp_path)
