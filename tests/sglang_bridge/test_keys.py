"""Keys: random, private on disk, absent from printed text."""

import stat
from pathlib import Path

import pytest
import yaml

from sglang_bridge.keys import (
    RunKeys,
    create_keys,
    key_file_refusal,
    read_keys,
    write_server_config,
)


def key_file(
    path: Path, content: str = '{"api_key": "a", "admin_api_key": "b"}', mode: int = 0o600
) -> Path:
    path.write_text(content)
    path.chmod(mode)
    return path


def test_keys_are_read_from_a_private_file(tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys.json")
    assert key_file_refusal(path) is None
    assert read_keys(path) == RunKeys("a", "b")


def test_keys_differ_between_runs() -> None:
    first = create_keys()
    second = create_keys()
    assert len({first.api_key, first.admin_api_key, second.api_key, second.admin_api_key}) == 4
    assert all(len(key) >= 43 for key in (first.api_key, first.admin_api_key))  # 256 bits in base64


def test_printed_keys_are_masked() -> None:
    keys = RunKeys("secret-a", "secret-b")
    assert "secret" not in f"{keys} {keys!r}"


def test_server_config_is_yaml_with_the_option_names(tmp_path: Path) -> None:
    keys = create_keys()
    path = tmp_path / "engine.yaml"
    path.write_text("older, and readable by all")
    path.chmod(0o644)
    write_server_config(keys, path)
    assert yaml.safe_load(path.read_text()) == {
        "api-key": keys.api_key,
        "admin-api-key": keys.admin_api_key,
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match=r"\.yaml"):
        write_server_config(keys, tmp_path / "engine.json")


def test_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path / "keys.json", mode=0o640)
    with pytest.raises(
        ValueError, match=r"engine\.key_file=.*Others can read the keys\. chmod 600"
    ):
        read_keys(path)


def test_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        read_keys(tmp_path / "keys.json")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"api_key": "secret"}', '{"api_key": 1, "admin_api_key": "secret"}']
)
def test_malformed_key_file_is_refused_without_printing_it(tmp_path: Path, content: str) -> None:
    with pytest.raises(ValueError, match="two keys as JSON") as error_info:
        read_keys(key_file(tmp_path / "keys.json", content))
    assert "secret" not in str(error_info.value)


def test_no_key_parses_as_an_option() -> None:
    """SGLang turns its configuration file into arguments. A dash would begin an option."""
    keys = [create_keys() for _ in range(500)]
    assert all(key[0] not in "-_" for pair in keys for key in (pair.api_key, pair.admin_api_key))
