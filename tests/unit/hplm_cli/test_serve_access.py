"""From where a server may be reached, with and without keys."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from hplm.access.access_mode import MODE_VARIABLE, SECRET_VARIABLE
from hplm.errors import StartError
from hplm.store.layout import Store
from hplm_cli.serve_access import FOLDER_PREFIX, LastUses, ServeAccess, choose_access, remove_dead_folders


def choose(host: str = "127.0.0.1", *flags: str, keys: bool = False, insecure: bool = False) -> ServeAccess:
    return choose_access(keys=keys, insecure=insecure, host=host, flags=flags)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost"])
def test_a_server_that_only_this_machine_reaches_needs_no_keys(host: str) -> None:
    access = choose(host)
    assert not access.mode.needs_keys
    assert access.environment == {MODE_VARIABLE: "open"}
    assert access.flags == ()
    assert access.headers("films") == {}


@pytest.mark.parametrize(
    ("host", "flags", "named"),
    [
        ("0.0.0.0", [], "--host 0.0.0.0"),
        ("192.0.2.7", [], "--host 192.0.2.7"),
        ("no-such-name.invalid", [], "--host no-such-name.invalid"),
        ("127.0.0.1", ["--http-address=0.0.0.0"], "--http-address 0.0.0.0"),
        ("127.0.0.1", ["--grpc-address", "0.0.0.0"], "--grpc-address 0.0.0.0"),
        ("127.0.0.1", ["--metrics-address=::"], "--metrics-address ::"),
        ("127.0.0.1", ["--allow-sagemaker=true"], "--allow-sagemaker"),
        ("127.0.0.1", ["--allow-vertex-ai"], "--allow-vertex-ai"),
    ],
)
def test_a_server_that_other_machines_reach_needs_keys_or_insecure(host: str, flags: list[str], named: str) -> None:
    with pytest.raises(StartError, match=f"^{named}: other machines could call every tenant .* --keys .* --insecure"):
        choose(host, *flags)
    assert not choose(host, *flags, insecure=True).mode.needs_keys
    assert choose(host, *flags, keys=True).mode.needs_keys


def test_an_option_that_is_switched_off_opens_no_port() -> None:
    assert choose("127.0.0.1", "--allow-vertex-ai=false", "--allow-sagemaker", "0").flags == ()


def test_with_keys_triton_forwards_the_header_of_the_key_alone_and_gets_a_new_secret() -> None:
    access, other = choose(keys=True), choose(keys=True)
    assert access.flags == (
        "--http-header-forward-pattern=authorization",
        "--grpc-header-forward-pattern=authorization",
    )
    assert access.environment[MODE_VARIABLE] == "keys"
    secret = access.environment[SECRET_VARIABLE]
    assert secret != other.environment[SECRET_VARIABLE]
    assert access.mode.proof_secret == bytes.fromhex(secret)
    assert secret not in repr(access)
    assert access.headers("films") != other.headers("films")


def test_the_environment_switches_keys_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "keys")
    monkeypatch.setenv(SECRET_VARIABLE, "of another start")
    assert choose("0.0.0.0").mode.needs_keys


def test_keys_and_insecure_exclude_each_other() -> None:
    with pytest.raises(StartError, match="--insecure is for a server without keys"):
        choose(keys=True, insecure=True)


@pytest.mark.parametrize("flag", ["--cache-config=local,size=1048576", "--response-cache-byte-size=1048576"])
def test_a_cache_of_answers_is_refused_with_keys(flag: str) -> None:
    with pytest.raises(StartError, match="would answer clients without a key"):
        choose("127.0.0.1", flag, keys=True)
    choose("127.0.0.1", flag)


def test_the_folders_of_killed_servers_are_removed_and_all_others_stay(tmp_path: Path) -> None:
    dead, young, living = (tmp_path / f"{FOLDER_PREFIX}{name}" for name in ("dead", "young", "living"))
    for folder in (dead, young):
        folder.mkdir()
        (folder / "1.uses").write_text("{}")
    with closing(LastUses(living, Store(tmp_path / "store"))):
        for folder in (dead, living):
            os.utime(folder, (0, 0))
        remove_dead_folders(tmp_path)
        assert {folder for folder in (dead, young, living) if folder.exists()} == {young, living}
    assert not living.exists()
