"""The operator's own options for Triton: TLS over gRPC, and options with which `hplm serve` cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.errors import StartError
from hplm.triton.launcher.given_flags import check_flags, has_grpc_tls
from tests.triton.access.certificates import make_certificate, needs_openssl


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "made")


def tls(certificate: Path, key: Path, switch: str = "--grpc-use-ssl=true") -> list[str]:
    return [switch, "--grpc-server-cert", str(certificate), f"--grpc-server-key={key}"]


@needs_openssl
@pytest.mark.parametrize("switch", ["--grpc-use-ssl=1", "--grpc-use-ssl=TRUE", "--grpc-use-ssl-mutual=true"])
def test_a_certificate_with_its_key_is_accepted(certificate: Path, switch: str) -> None:
    flags = tls(certificate, certificate.with_name("key.pem"), switch)
    check_flags(flags)
    assert has_grpc_tls(flags)


@pytest.mark.parametrize("flags", [[], ["--grpc-use-ssl=false"], ["--grpc-server-cert=nothing"], ["--log-verbose=1"]])
def test_without_the_switch_there_is_no_tls(flags: list[str]) -> None:
    check_flags(flags)
    assert not has_grpc_tls(flags)


@needs_openssl
def test_files_that_are_no_certificate_and_its_key_are_refused(certificate: Path, tmp_path: Path) -> None:
    key, other = certificate.with_name("key.pem"), make_certificate(tmp_path / "other").with_name("key.pem")
    for flags, said in (
        (tls(key, key), "are no certificate and its key, in PEM"),
        (tls(certificate, other), "are no certificate and its key, in PEM"),
        (tls(tmp_path / "none", key), "none.*No such file"),
        (tls(certificate, tmp_path), "Is a directory"),
    ):
        with pytest.raises(StartError, match=said):
            check_flags(flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--grpc-use-ssl=1"], "--grpc-server-cert is missing"),
        (["--grpc-use-ssl=1", "--grpc-server-cert=a"], "--grpc-server-key is missing"),
        (["--grpc-use-ssl", "--grpc-server-cert=a"], "--grpc-use-ssl takes true or false, not ''"),
        (["--allow-http=false"], "hplm serve asks Triton over HTTP"),
        (["--allow-http", "0"], "hplm serve asks Triton over HTTP"),
    ],
)
def test_options_with_which_a_start_would_fail_later_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(StartError, match=said):
        check_flags(flags)


def test_a_short_form_of_an_option_that_decides_who_may_call_is_refused() -> None:
    for flag in ("--http-addr=0.0.0.0", "--cache-conf=local,size=1", "--allow-sage=1"):
        with pytest.raises(StartError, match="must be written in full"):
            check_flags([flag])
    check_flags(["--http-address=127.0.0.1", "--grpc-use-ssl=0", "--log-verbose=1", "-x"])
