"""The error tree."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest

from hplm import errors


@pytest.mark.parametrize("leaf", list(errors.leaves()))
def test_every_leaf_has_a_wire_code_a_status_and_a_line_in_the_tree(leaf: type[errors.HplmError]) -> None:
    assert leaf.code
    assert leaf.status in typing.get_args(errors.Status)
    line = next(line for line in str(errors.__doc__).splitlines() if leaf.__name__ in line)
    assert leaf.code in line.split()
    assert leaf.status in line.split()


def test_no_two_leaves_share_a_code() -> None:
    codes = [leaf.code for leaf in errors.leaves()]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("leaf", list(errors.leaves()))
def test_an_error_survives_the_wire_also_with_tritons_words_in_front(leaf: type[errors.HplmError]) -> None:
    back = errors.from_wire("in ensemble 'hbert', " + leaf("the reason").wire())
    assert type(back) is leaf
    assert str(back) == "the reason"


def test_a_message_shows_what_cannot_be_seen_as_escapes() -> None:
    message = str(
        errors.DataError("labels in\u200bvoice, 1\u202f234\u00a0%, \u2764\ufe0f, \x1b[2J, Stra\u00dfe\n\u65e5\u672c")
    )
    assert message == "labels in\\u200bvoice, 1\\u202f234\\u00a0%, \u2764\\ufe0f, \\u001b[2J, Stra\u00dfe\n\u65e5\u672c"


def test_a_message_without_a_code_is_no_error_of_ours() -> None:
    assert errors.from_wire("unexpected shape for input 'TEXT'") is None


# Codes of manage requests, of the command line, or between worker processes.
NOT_OF_INFERENCE = {
    *(
        "UNKNOWN_DOMAIN",
        "UNKNOWN_JOB",
        "BAD_UPLOAD",
        "UNKNOWN_UPLOAD",
        "UNKNOWN_KEY",
        "DOMAIN_IN_USE",
        "CONFLICT",
        "ALREADY_EXISTS",
    ),
    *("LEASE_LOST", "BAD_MANAGE_REQUEST", "CORPUS_TOO_SMALL", "CONTRACT_REFUSED", "JOB_CANCELLED"),
    *("WORKER_LOST", "BAD_DATA"),
    *("DOWNLOAD_FAILED", "TRITON_NOT_FOUND", "START_FAILED", "TRITON_ENDED"),
}
OF_CLIENTS_ALONE = {"STAGE_DOWN", "UNREACHABLE"}
HTTP_STATUS = {"INVALID_ARG": "400", "NOT_FOUND": "404", "INTERNAL": "500", "UNAVAILABLE": "503"}


def test_the_page_on_calling_has_every_code_of_inference_with_its_status_and_class() -> None:
    page = (Path(__file__).parents[3] / "docs" / "calling.md").read_text()
    table = page[page.index("| code | HTTP |") :].split("\n\n")[0]
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| ([^|]+) \| `(\w+)` \|", table, flags=re.MULTILINE)
    wanted = [leaf for leaf in errors.leaves() if leaf.code not in NOT_OF_INFERENCE]
    assert sorted(rows) == sorted(
        (leaf.code, "client only" if leaf.code in OF_CLIENTS_ALONE else HTTP_STATUS[leaf.status], leaf.__name__)
        for leaf in wanted
    )


def test_a_quota_error_says_when_to_try_again_also_after_the_wire() -> None:
    error = errors.from_wire(errors.QuotaError.after("tokens/s", 0.25).wire())
    assert isinstance(error, errors.QuotaError)
    assert error.wait_s == 0.25
    assert errors.QuotaError("used up").wait_s is None
