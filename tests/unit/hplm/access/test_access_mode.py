"""How a process knows whether requests need a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.access.access_mode import AccessMode, access_mode, keys_environment
from hplm.errors import ConfigError


def test_without_variables_no_request_needs_a_key() -> None:
    assert access_mode({}) == AccessMode()
    assert not access_mode({"HPLM_ACCESS": "open", "HPLM_PROOF_SECRET": "x"}).needs_keys


def test_one_start_has_one_secret_and_the_next_start_another() -> None:
    environment = keys_environment()
    mode = access_mode(environment)
    assert mode.needs_keys
    assert mode.proof_secret == bytes.fromhex(environment["HPLM_PROOF_SECRET"])
    assert keys_environment() != environment


@pytest.mark.parametrize("secret", [None, "", "abc", "zz" * 32, "ab" * 31, "ab" * 33])
def test_keys_without_a_secret_are_refused_with_what_to_set(secret: str | None) -> None:
    environment = {"HPLM_ACCESS": "keys"} | ({} if secret is None else {"HPLM_PROOF_SECRET": secret})
    with pytest.raises(ConfigError, match="HPLM_PROOF_SECRET must be 64 hex digits") as caught:
        access_mode(environment)
    assert not secret or secret not in str(caught.value)


def test_a_folder_in_memory_is_known_if_it_is_set() -> None:
    assert access_mode(keys_environment(Path("/dev/shm/x"))).folder == Path("/dev/shm/x")
    assert access_mode(keys_environment()).folder is None


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="'open' or 'keys', got 'off'"):
        access_mode({"HPLM_ACCESS": "off"})


def test_the_secret_is_not_shown() -> None:
    mode = AccessMode(b"s" * 32)
    assert "ssss" not in f"{mode!r} {mode}"
