"""Whoever follows a job on the command line learns its id, whatever ends the following."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import typer
from hplm_client import JobEvent, ManageClient
from hplm_client.manage_cli import Way, submit

from hplm.errors import ForbiddenError, HplmError, StoreUnavailableError, UnreachableError

JOB = "0123456789abcdef"
HINT = f"The job goes on: `hplm job watch {JOB}`"


class Server:
    """Takes a job, which is running whenever it is looked up before `end`, as an event or an error, stands."""

    streams = False

    def __init__(self, end: BaseException | dict[str, str]) -> None:
        self.end, self.looks = end, 0

    def ask(self, request: bytes) -> bytes:
        if json.loads(request)["action"] == "tenant.create":
            return json.dumps({"ok": True, "job": JOB}).encode()
        self.looks += 1
        if self.looks > 1 and isinstance(self.end, BaseException):
            raise self.end
        ended = {"state": "failed", "error": self.end} if self.looks > 1 else {}
        shown = {"id": JOB, "state": "running", "step": "features", "progress": 0.1, **ended}
        return json.dumps({"ok": True, "job": shown}).encode()

    def events(self, request: bytes) -> Iterator[bytes]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Hasty(ManageClient):
    """Waits for no server that is away."""

    def watch(self, job: str, *, patience_s: float = 0.0) -> Iterator[JobEvent]:
        return super().watch(job, patience_s=patience_s)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    ("end", "raised"),
    [
        (UnreachableError("connection refused"), UnreachableError),
        (ForbiddenError("the token has expired"), ForbiddenError),
        (KeyboardInterrupt(), typer.Exit),
    ],
    ids=["away", "forbidden", "interrupt"],
)
def test_a_job_that_goes_on_is_named(
    end: BaseException, raised: type[Exception], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(raised):
        submit(Hasty(transport=Server(end)), "tenant.create", {"tenant": "acme"}, Way(as_json=as_json))
    told = capsys.readouterr()
    assert HINT in told.err
    assert told.out == (json.dumps({"job": JOB}) + "\n" if as_json else "")


def test_of_a_job_that_has_failed_only_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    failure: HplmError = StoreUnavailableError("the disk is full")
    server = Server({"code": failure.code, "message": str(failure)})
    with pytest.raises(StoreUnavailableError):
        submit(Hasty(transport=server), "tenant.create", {"tenant": "acme"}, Way(as_json=True))
    told = capsys.readouterr()
    assert "goes on" not in told.err
    assert told.out == ""
