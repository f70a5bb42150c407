"""Triton's restricted APIs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hplm.triton.launcher.restricted_apis import APIS, HEADER, hide_secret, restrict
from tests.waiting import until


def test_both_protocols_are_restricted_with_a_secret_that_is_drawn_anew() -> None:
    first, second = restrict([]), restrict([])
    assert first.secret != second.secret
    assert first.headers == {HEADER: first.secret}
    apis = ",".join(APIS)
    assert first.flags == (
        f"--http-restricted-api={apis}:{HEADER}={first.secret}",
        f"--grpc-restricted-protocol={apis}:{HEADER}={first.secret}",
    )
    assert first.secret not in repr(first).replace(str(first.flags), "")


def test_an_api_that_the_operator_restricts_keeps_the_operators_header() -> None:
    made = restrict(
        ["--http-restricted-api=trace,model-repository:admin=a=b", "--grpc-restricted-protocol", "shared-memory:x=y"]
    )
    http, grpc = made.flags
    assert http.startswith("--http-restricted-api=shared-memory,logging,statistics:")
    assert grpc.startswith("--grpc-restricted-protocol=model-repository,trace,logging,statistics:")
    assert made.headers == {HEADER: made.secret, "admin": "a=b"}


def test_a_protocol_whose_apis_the_operator_restricts_gets_no_flag() -> None:
    (only,) = restrict([f"--http-restricted-api={','.join(APIS)}:k=v"]).flags
    assert only.startswith("--grpc-restricted-protocol=")


def test_a_secret_among_the_arguments_of_a_child_is_hidden() -> None:
    secret = "0123456789abcdef" * 4
    child = subprocess.Popen(
        ["sh", "-c", "read line", "sh", f"--one={secret}", f"--two={secret}"], stdin=subprocess.PIPE
    )
    try:
        shown = Path(f"/proc/{child.pid}/cmdline")
        until(lambda: secret.encode() in shown.read_bytes())
        assert hide_secret(child.pid, secret)
        assert secret.encode() not in shown.read_bytes()
        assert b"--one=" + b"*" * len(secret) in shown.read_bytes()
    finally:
        child.communicate(b"\n")


def test_where_there_is_no_such_process_nothing_is_hidden() -> None:
    assert not hide_secret(2**22 + 1, "secret")
