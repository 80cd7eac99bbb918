"""Keys: random, private on disk, absent from what gets printed."""

import stat
from pathlib import Path

import pytest
import yaml

from sglang_bridge.keys import RunKeys, create_keys, read_keys, write_keys, write_server_config


def test_keys_come_back_and_belong_to_the_owner_alone(tmp_path: Path) -> None:
    keys, path = create_keys(), tmp_path / "keys.json"
    path.write_text("older, and readable by all")
    path.chmod(0o644)
    write_keys(keys, path)
    assert read_keys(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_every_run_has_other_keys() -> None:
    first, second = create_keys(), create_keys()
    assert len({first.api_key, first.admin_api_key, second.api_key, second.admin_api_key}) == 4
    assert all(len(key) >= 43 for key in (first.api_key, first.admin_api_key))  # 256 bits in base64


def test_printing_keys_does_not_show_them() -> None:
    keys = RunKeys("secret-a", "secret-b")
    assert "secret" not in f"{keys} {keys!r}"


def test_server_config_is_yaml_with_the_option_names(tmp_path: Path) -> None:
    keys, path = create_keys(), tmp_path / "engine.yaml"
    write_server_config(keys, path)
    assert yaml.safe_load(path.read_text()) == {"api-key": keys.api_key, "admin-api-key": keys.admin_api_key}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ValueError, match=r"\.yaml"):
        write_server_config(keys, tmp_path / "engine.json")


def test_a_key_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(create_keys(), path)
    path.chmod(0o640)
    with pytest.raises(PermissionError, match="chmod 600"):
        read_keys(path)


@pytest.mark.parametrize("content", ["", "[]", '{"api_key": "a"}', '{"api_key": 1, "admin_api_key": "b"}'])
def test_a_malformed_key_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(ValueError, match=r"engine\.key_file"):
        read_keys(path)


def test_no_key_reads_as_an_option() -> None:
    """SGLang turns its configuration file into arguments, and one that starts with a dash would be an option."""
    keys = [create_keys() for _ in range(500)]
    assert all(key[0] not in "-_" for pair in keys for key in (pair.api_key, pair.admin_api_key))
