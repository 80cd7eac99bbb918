"""Refusals of engines: addresses, keys, and start settings of a running server."""

from pathlib import Path

import pytest

from tests.support.configurations import accept, refusals


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("http://8.8.8.8:30000", "not a loopback or private address"),
        ("http://0.0.0.0:30000", "not a loopback or private address"),
        ("http://no-such-host.invalid:1", "cannot be resolved"),
        ("ftp://127.0.0.1:30000", "a scheme, a host and a port"),
        ("https://127.0.0.1:30000", "plain HTTP"),
        ("https://10.0.0.7:30000", "Terminate TLS in front"),
        ("127.0.0.1:30000", "a scheme, a host and a port"),
        ("http://127.0.0.1", "a scheme, a host and a port"),
        ("http://127.0.0.1:99999", "not a URL"),
        ("http://127.0.0.1:3/generate", "no user, path, query or fragment"),
        ("http://127.0.0.1:3#f", "no user, path, query or fragment"),
        ("http://127.0.0.1:0", "with a port from 1"),
        ("http://[::1]:3000", "a name or IPv4"),
        ("http://169.254.169.254:80", "not a loopback or private address"),
        ("http://user:secret@127.0.0.1:3", "no user, path, query or fragment"),
    ],
)
def test_engine_address_is_refused(checkpoint: Path, url: str, rule: str) -> None:
    (refusal,) = refusals(checkpoint, "engine=external", f"engine.urls=['{url}']")
    assert refusal.key == "engine.urls"
    assert rule in str(refusal)


# override | value shown
SERVER_SETTINGS = [
    ("engine.count=2", "2"),
    ("engine.max_total_tokens=4096", "4096"),
    ("engine.extra_args=['--log-level=info']", "['--log-level=info']"),
]
EXTERNAL = ("engine=external", "engine.urls=['http://127.0.0.1:3']")


@pytest.mark.parametrize(
    ("override", "value"), SERVER_SETTINGS, ids=[case[0] for case in SERVER_SETTINGS]
)
def test_a_running_server_takes_no_start_settings(
    checkpoint: Path, override: str, value: str
) -> None:
    (refusal,) = refusals(checkpoint, *EXTERNAL, override)
    assert str(refusal).startswith(f"{override.partition('=')[0]}={value}: ")
    assert "starting a server" in refusal.rule and "engine.urls" in refusal.remedy


@pytest.mark.parametrize(
    "override",
    [
        "engine.max_running_requests=32",
        "engine.request_timeout_s=30",
        "engine.dtype=bfloat16",
        "engine.tp=2",
        "engine.start_timeout_s=60",  # how long the trainer waits for it
    ],
)
def test_a_running_server_takes_settings_that_the_trainer_uses(
    checkpoint: Path, override: str
) -> None:
    assert accept(checkpoint, *EXTERNAL, override).engine.mode == "external"


def test_an_engine_named_twice_is_refused(checkpoint: Path) -> None:
    for other in ("http://127.0.0.1:3", "http://127.0.0.1:3/", "http://localhost:3"):
        urls = f"engine.urls=['http://127.0.0.1:3','{other}']"
        assert "named twice" in str(refusals(checkpoint, "engine=external", urls)[0])
    urls = "engine.urls=['http://127.0.0.1:3','http://127.0.0.1:4']"
    assert len(accept(checkpoint, "engine=external", urls).engine.urls) == 2


def test_addresses_of_engines_may_be_in_a_file(checkpoint: Path) -> None:
    engine = accept(checkpoint, "engine.urls=/lists/engines").engine
    assert (engine.mode, engine.urls_file, engine.url_list) == (
        "external",
        Path("/lists/engines"),
        [],
    )
    engine = accept(checkpoint, *EXTERNAL).engine
    assert (engine.mode, engine.urls_file) == ("external", None)
    assert accept(checkpoint).engine.mode == "managed"
    (refusal,) = refusals(checkpoint, "engine=external")
    assert (refusal.key, refusal.value) == ("engine.urls", None)
    (refusal,) = refusals(checkpoint, "engine.urls=http://127.0.0.1:3")
    assert refusal.remedy == "Use engine.urls=[http://127.0.0.1:3]"


def test_a_key_file_must_exist_and_be_private(checkpoint: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    assert "no such file" in str(refusals(checkpoint, *EXTERNAL, f"engine.key_file={keys}")[0])
    keys.touch(mode=0o644)
    assert "Others can read" in str(refusals(checkpoint, *EXTERNAL, f"engine.key_file={keys}")[0])
    keys.chmod(0o600)
    assert "two keys as JSON" in str(refusals(checkpoint, *EXTERNAL, f"engine.key_file={keys}")[0])
    keys.write_text('{"api_key": "a", "admin_api_key": "b"}')
    assert accept(checkpoint, *EXTERNAL, f"engine.key_file={keys}").engine.key_file == str(keys)
