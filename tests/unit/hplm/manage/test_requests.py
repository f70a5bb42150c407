"""Manage requests are parsed strictly: every odd byte is a BadManageRequestError that says what was expected."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.core.columns import Columns
from hplm.errors import BadManageRequestError, TenantNameError, leaves
from hplm.manage import request_parts, requests
from hplm.manage.requests import FineTune, parse_request
from hplm.manage.service import ManageService

REQUESTS = ManageService.REQUESTS
CREATE = {"action": "tenant.create", "tenant": "acme", "data": {"train": {"upload": "u1"}}}
DOMAIN = {"action": "domain.create", "domain": "law", "corpus": {"path": "law.txt"}}
SHA = "0" * 64
WHOLE: list[dict[str, Any]] = [
    CREATE,
    {
        **CREATE,
        "action": "tenant.update",
        "columns": {"text": "Body"},
        "settings": {"epochs": 3, "learning_rates": [0.001, 0.01]},
        "dry_run": True,
    },
    {
        **CREATE,
        "data": {"train": {"upload": "u1"}, "proof": {"upload": "u2"}},
        "levels": ["small", "large"],
        "target": {"accuracy": 0.9, "latency_ms": 40, "deterministic": True, "on_late": "refuse"},
    },
    {**CREATE, "action": "tenant.students", "base": "trunk", "students": {"form": "own", "teacher": "full", "most": 4}},
    {"action": "tenant.target", "tenant": "acme", "target": {"latency_ms": 20}},
    {"action": "tenant.delete", "tenant": "acme"},
    {"action": "tenant.rollback", "tenant": "acme", "version": 2},
    {"action": "tenant.least_students", "tenant": "acme", "least": 2},
    {"action": "tenant.limit", "tenant": "acme", "requests_per_s": 5.5, "tokens_per_s": 100, "concurrent": 3},
    {"action": "tenant.limit", "clear": True},
    {"action": "tenant.show", "tenant": "acme"},
    {"action": "tenant.list", "prefix": "a", "after": "ab", "limit": 5},
    {"action": "domain.create", "domain": "law", "corpus": {"path": "law.txt"}, "settings": {"tokens": 1000}},
    {
        "action": "domain.update",
        "domain": "law",
        "corpus": {"upload": "u1"},
        "dev": [{"upload": "u2"}, {"path": "dev.csv"}],
        "parent": "general",
        "settings": {"top_percent": 0},
    },
    {"action": "domain.delete", "domain": "law"},
    {"action": "domain.show", "domain": "law", "base": "minilm-l6"},
    {"action": "domain.list"},
    {"action": "base.list"},
    {"action": "job.show", "job": "j1"},
    {"action": "job.list", "states": ["queued", "running"]},
    {"action": "job.cancel", "job": "j1"},
    {"action": "upload.start", "bytes": 5, "sha256": SHA, "name": "train.csv"},
    {"action": "upload.chunk", "upload": "u1", "offset": 0, "data": "aGVsbG8="},
    {"action": "upload.finish", "upload": "u1"},
    {"action": "upload.list", "after": "u1", "limit": 5},
    {"action": "upload.drop", "upload": "u1"},
    {"action": "key.create", "tenant": "acme", "scope": "manage", "expires_in_s": 3600},
    {"action": "key.list", "tenant": "acme", "after": "abcdefgh234567ab", "limit": 5},
    {"action": "key.revoke", "key": "abcdefgh234567ab"},
    {"action": "audit.list", "subject": "tenant:acme", "before": 7, "limit": 5},
]
MANUAL = (Path(__file__).parents[4] / "docs" / "tenants-and-domains.md").read_text()


def parse(values: Any) -> requests.ManageRequest:
    return parse_request(json.dumps(values).encode(), REQUESTS)[1]


def test_every_action_has_a_whole_example_here() -> None:
    assert {example["action"] for example in WHOLE} == set(REQUESTS)


@pytest.mark.parametrize("values", WHOLE, ids=lambda values: values["action"])
def test_a_whole_request_is_parsed_and_an_unknown_key_refused_by_name(values: dict[str, Any]) -> None:
    assert type(parse(values)) is REQUESTS[values["action"]]
    with pytest.raises(BadManageRequestError, match="unknown key 'colour'"):
        parse({**values, "colour": "red"})


@pytest.mark.parametrize("action", REQUESTS)
def test_the_manual_has_every_action_with_its_keys(action: str) -> None:
    (row,) = (line for line in MANUAL.splitlines() if line.startswith(f"| `{action}` |"))
    wanted = row.split("|")[2]
    keys = {one.name: one for one in dataclasses.fields(REQUESTS[action])}
    assert set(re.findall(r"`(\w+)`", wanted)) == set(keys)
    must = {name for name, one in keys.items() if one.default is one.default_factory is dataclasses.MISSING}
    assert set(re.findall(r"\*\*`(\w+)`\*\*", wanted)) == must


# Of inference, of the command line, of clients alone, or between workers.
ELSEWHERE = {
    *(
        "EMPTY_TEXT",
        "TEXT_NOT_UTF8",
        "TEXT_TOO_LARGE",
        "TEXT_COUNT",
        "BAD_HIDDEN_STATES",
        "DEADLINE_UNMEETABLE",
        "QUOTA",
    ),
    *("CANCELLED", "UNREACHABLE", "STAGE_DOWN", "LEASE_LOST", "DOWNLOAD_FAILED", "TRITON_NOT_FOUND"),
    *("START_FAILED", "TRITON_ENDED"),
}


def test_the_manual_has_every_code_that_managing_can_end_with() -> None:
    said = MANUAL[MANUAL.index("| HTTP | codes |") :].split("\n\n")[0]
    assert set(re.findall(r"`([A-Z][A-Z0-9_]+)`", said)) == {leaf.code for leaf in leaves()} - ELSEWHERE


def test_the_manual_has_every_option_of_students() -> None:
    said = MANUAL[MANUAL.index("- `students` holds") :].split("\n- ")[0]
    assert {one.name for one in dataclasses.fields(request_parts.StudentOptions)} <= set(re.findall(r"`(\w+)`", said))


@pytest.mark.parametrize("settings", [request_parts.TuneSettings, request_parts.PretrainSettings])
def test_the_manual_has_every_setting_of_a_training(settings: type) -> None:
    said = MANUAL[MANUAL.index("`settings` of a tenant:") :].split("\n\n")[0]
    assert {one.name for one in dataclasses.fields(settings)} <= set(re.findall(r"`(\w+)`", said))


def test_the_manual_has_every_column_that_a_request_names() -> None:
    said = MANUAL[MANUAL.index("- `columns` ") :].split("\n- ")[0]
    assert {one.name for one in dataclasses.fields(Columns)} <= set(re.findall(r"`(\w+)`", said))


def test_nested_parts_become_classes_and_what_is_not_given_stays_open() -> None:
    found = parse({**CREATE, "settings": {"learning_rates": [0.1]}})
    assert isinstance(found, FineTune)
    assert request_parts.given(found.data) == {"train": request_parts.Source(upload="u1")}
    assert request_parts.given(found.settings) == {"learning_rates": (0.1,)}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"action": "tenant.creat"}, "`action` must be one of tenant.create"),
        ({"action": ["tenant.create"]}, "`action` must be one of"),
        ({"tenant": None}, "tenant must be str"),
        ({"data": {}}, "data: missing train"),
        ({"data": {"train": {}}}, "either an upload or a path"),
        ({"data": {"train": {"upload": "u", "path": "p"}}}, "either an upload or a path"),
        ({"data": {"train": {"upload": "../u"}}}, "upload must be the id"),
        ({"data": {"train": {"path": "a\0b"}}}, "printable"),
        ({"data": {"train": {"path": "\ud800"}}}, "printable"),
        ({"data": {"train": "u1"}}, "train: expected an object"),
        ({"settings": {"epochs": True}}, "epochs must be int"),
        ({"settings": {"epochs": 10**400}}, "epochs must be 1 to 1,000, got 1000"),
        ({"settings": {"seed": -1}}, "seed must be 0 to 2,147,483,647, got -1"),
        ({"settings": {"learning_rates": []}}, "1 to 8 numbers"),
        ({"settings": {"learning_rates": [2]}}, r"learning_rates must be 0\.0000001 to 1, got 2"),
        ({"settings": {"learning_rates": 0.1}}, "learning_rates must be a list"),
        ({"settings": {"pooling": "max"}}, "pooling must be one of 'cls', 'mean'"),
        ({"columns": {"texts": "Body"}}, "columns: unknown key 'texts'; known are text, pair, label"),
        ({"columns": {"text": 1}}, "columns: text must be str"),
        ({"columns": {"label": "a\nb"}}, "columns: the name of a column is 1 to 200 printable characters"),
        ({"columns": ["Body"]}, "columns: expected an object"),
        ({"task": "poetry"}, "there is no task 'poetry'; there are classification, regression, tagging"),
        ({"domain": "../law"}, "domain: a name is 1 to 64"),
        ({"dry_run": "yes"}, "dry_run must be bool"),
        ({"levels": []}, "levels must be 1 to 4 different bases"),
        ({"levels": ["a", "../b"]}, "levels: a name is 1 to 64"),
        ({"levels": [*"abcde"]}, "levels must be 1 to 4 different bases, got a, b, c, d, e"),
        ({"target": {"accuracy": 1}}, r"accuracy must be 0\.01 to 0\.9999, got 1"),
        ({"target": {"on_late": "wait"}}, "on_late must be one of 'answer', 'refuse'"),
        ({**DOMAIN, "dev": {"upload": "u1"}}, "dev must be a list"),
        ({**DOMAIN, "dev": [{"upload": "u1"}] * 17}, "dev must be at most 16 files, got 17"),
        ({**DOMAIN, "settings": {"top_percent": 0.0001}}, r"\(or 0 for no table\) must be 0.001 to 100, got 0.0001"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(BadManageRequestError, match=words):
        parse(changed if "corpus" in changed else {**CREATE, **changed})


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"tenant.list"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"action": "job.show", "job": "a", "job": "b"}',
        b'{"action": "upload.start", "bytes": NaN}',
        b'{"action": "upload.start", "bytes": ' + b"9" * 5000 + b"}",
    ],
    ids=["empty", "cut", "list", "string", "not-utf8", "deep", "twice", "nan", "huge-number"],
)
def test_what_is_no_sound_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadManageRequestError):
        parse_request(raw, REQUESTS)


def test_a_tenants_name_is_checked_as_infer_requests_check_it() -> None:
    with pytest.raises(TenantNameError):
        parse({"action": "tenant.delete", "tenant": "../acme"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300)
@given(example=st.sampled_from(WHOLE), data=st.data())
def test_any_value_in_any_place_is_taken_or_refused_but_never_breaks_anything(
    example: dict[str, Any], data: st.DataObject
) -> None:
    key = data.draw(st.sampled_from([*example, "settings", "corpus"]))
    values = {**example, key: data.draw(JSON)}
    refusal = ""
    try:
        parse_request(json.dumps(values).encode(), REQUESTS)
    except (BadManageRequestError, TenantNameError) as error:
        refusal = str(error)
    assert len(refusal) < 1000
