"""Commands that follow a job print its id if the following ends before the job does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from hplm_client import JobEvent, ManageClient
from hplm_client.cli.display import format_value, print_records, remaining_time, result_lines
from hplm_client.cli.options import JobOptions
from hplm_client.cli.submit_job import submit_job, upload_files
from hplm_client.manage.answers import Upload

from hplm.errors import DataError, ForbiddenError, HplmError, StoreUnavailableError, UnreachableError

JOB = "0123456789abcdef"
HINT = f"The job goes on: `hplm job watch {JOB}`"


class Server:
    """A server with one job, which runs until the second look: then `end` is the job's error, or is raised.

    `refused` is raised for every request.
    """

    streams = False

    def __init__(self, end: BaseException | dict[str, str], refused: HplmError | None = None) -> None:
        self.end, self.looks, self.refused = end, 0, refused

    def ask(self, request: bytes) -> bytes:
        if self.refused is not None:
            raise self.refused
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


class ImpatientClient(ManageClient):
    """A client that does not wait for a server that is away."""

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
        submit_job(
            ImpatientClient(transport=Server(end)), "tenant.create", {"tenant": "acme"}, JobOptions(as_json=as_json)
        )
    printed = capsys.readouterr()
    assert HINT in printed.err
    assert printed.out == (json.dumps({"job": JOB}) + "\n" if as_json else "")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failed_job_prints_only_its_error(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    failure = {"code": StoreUnavailableError.code, "message": "the disk is full"}
    with pytest.raises(StoreUnavailableError):
        submit_job(
            ImpatientClient(transport=Server(failure)), "tenant.create", {"tenant": "acme"}, JobOptions(as_json=as_json)
        )
    printed = capsys.readouterr()
    assert "goes on" not in printed.err
    assert printed.out == (json.dumps({"job": JOB, "error": failure}) + "\n" if as_json else "")


def test_a_dry_run_cannot_be_detached() -> None:
    with pytest.raises(typer.BadParameter, match="leave --detach out"):
        JobOptions(dry_run=True, detach=True)


@pytest.mark.parametrize(
    "options", [JobOptions(as_json=True), JobOptions(as_json=True, dry_run=True), JobOptions(as_json=True, detach=True)]
)
def test_a_refused_request_prints_its_error_as_json(options: JobOptions, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server({}, refused=ForbiddenError("no paths"))
    with pytest.raises(ForbiddenError):
        submit_job(ImpatientClient(transport=server), "tenant.create", {"tenant": "acme"}, options)
    assert json.loads(capsys.readouterr().out) == {"error": {"code": "FORBIDDEN", "message": "no paths"}}


def test_an_unreadable_file_prints_its_error_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError):
        upload_files(ImpatientClient(transport=Server({})), {"train": tmp_path / "none.csv"}, JobOptions(as_json=True))
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "BAD_DATA"


@pytest.mark.parametrize("files", [{"train": Path("x.txt")}, {"corpus": Path("x.csv")}, {"train": Path("x.xlsx")}])
def test_a_file_with_an_unknown_ending_is_not_sent(files: dict[str, Path | None]) -> None:
    server = Server({}, refused=ForbiddenError("asked"))
    with pytest.raises(DataError, match="the ending must be one of"):
        upload_files(ImpatientClient(transport=server), files, JobOptions())
    with pytest.raises(DataError, match="the ending must be one of"):
        ImpatientClient(transport=server).upload("x.xlsx")


@pytest.mark.parametrize("bad_time_s", [1e20, -1e20, float("nan"), float("inf")])
def test_a_time_that_does_not_exist_is_shown_as_a_number(bad_time_s: float) -> None:
    assert format_value("created_s", bad_time_s) == str(bad_time_s)


def test_lists_and_mappings_are_shown_without_python_syntax() -> None:
    assert format_value("scores", {"dev_accuracy": 0.91666, "labels": 3}) == "dev_accuracy 0.917, labels 3"
    assert format_value("labels", ["ham", "spam"]) == "ham, spam"
    assert format_value("labels", ()) == "-"
    plan = {
        "examples": {"train": 900, "dev": 100},
        "labels": ["ham", "spam"],
        "estimated_s": 95.3,
        "warnings": ["odd", "bad"],
    }
    assert list(result_lines(plan)) == [
        "examples: train 900, dev 100",
        "labels: ham, spam",
        f"estimated: {remaining_time(95.3).removesuffix(' left')}",
        "warning: odd",
        "warning: bad",
    ]


def test_control_characters_of_a_name_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    print_records([Upload("id", 1, 1, True, 0.0, "\x1b[2J\nb.csv")], ("name", "id"), as_json=False)
    assert capsys.readouterr().out.splitlines() == ["name" + 18 * " " + "id", r"\u001b[2J\u000ab.csv  id"]
