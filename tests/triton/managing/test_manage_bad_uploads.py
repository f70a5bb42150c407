"""What no file and no name may do to a real server that is managed: each is refused with its code, and leaves nothing."""

from __future__ import annotations

import gzip
import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hplm_client import Client, ManageClient

from hplm import errors
from hplm.errors import HplmError
from hplm.registry.registry import Registry
from hplm.triton.workarounds import dead_stubs
from tests.managed import FAST, Place
from tests.waiting import until

pytestmark = pytest.mark.triton
GIGABYTE = 1 << 30
ENOUGH_MEMORY = 32 << 20
QUICK = {"tokens": 400, "warmup_tokens": 400}
TEXT = "the red cat runs to Paris"


def traces(place: Place) -> set[str]:
    """Every file and folder in the server's store and around it, and every upload and version that the registry names."""
    folder = place.store.root.parent
    # What goes while one looks is no error here, as it would be with `rglob`.
    found = {
        os.path.relpath(Path(top, name), folder)
        for top, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if "registry.sqlite" not in name
    }
    with closing(Registry.open(place.store)) as registry:
        known = registry.snapshot()
    found |= {f"upload {one}" for one in known.uploads}
    found |= {f"tenant {name} at {path}" for path, names in known.tenants.items() for name in names}
    found |= {f"domain {one.domain} at {one.number}" for one in known.domains}
    # The folders of what comes and goes stay.
    return found - {"store/uploads", "store/jobs"}


@contextmanager
def leaves_nothing(place: Place) -> Iterator[None]:
    before = traces(place)
    yield
    until(lambda: not traces(place) - before)


def peak_of(pid: int | str, mark: str = "VmHWM") -> int:
    """Bytes of memory that a process had at most since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(mark))


def forget_peak(pid: int | str) -> int:
    """Begin to measure anew; returns what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_of(pid, "VmRSS")


def gigabyte_line(path: Path) -> Path:
    """Sparse: after its first two megabytes a line of zeros that take no disk."""
    with path.open("wb") as file:
        file.write(b"text,label\n" + b"x" * (2 << 20))
        file.truncate(GIGABYTE)
    return path


def zip_bomb() -> bytes:
    """Forty megabytes in forty kilobytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train.csv", bytes(40 << 20))
    return packed.getvalue()


ZIP_BOMB = zip_bomb()


def test_a_line_of_a_gigabyte_is_refused_at_once_and_never_in_memory(manage: ManageClient, place: Place) -> None:
    endless = gigabyte_line(place.rows.with_name("endless.csv"))
    corpus = gigabyte_line(place.rows.with_name("endless.txt"))
    pid = next(pid for pid, model in dead_stubs.stubs_of(place.server.process.pid).items() if model == "manager")
    try:
        with leaves_nothing(place):
            memory = forget_peak(pid)
            with pytest.raises(errors.DataError, match=r"endless\.csv: line 2 has more than 1,000,000 bytes"):
                manage.create_tenant("endless", train=manage.on_server(endless.name), settings=FAST)
            with pytest.raises(errors.DataError, match=r"endless\.txt has 1,073,741,824 bytes"):
                manage.create_domain("endless", corpus=manage.on_server(corpus.name), settings=QUICK)
            assert peak_of(pid) - memory < ENOUGH_MEMORY
    finally:
        endless.unlink()
        corpus.unlink()


@pytest.mark.parametrize(
    ("name", "words"),
    [("bomb.zip", "the ending must be"), ("bomb.csv", r"packed \(zip\)")],
    ids=["bomb.zip", "bomb.csv"],
)
def test_a_zip_bomb_is_not_unpacked(manage: ManageClient, place: Place, tmp_path: Path, name: str, words: str) -> None:
    bomb = tmp_path / name
    bomb.write_bytes(ZIP_BOMB)
    with leaves_nothing(place), pytest.raises(errors.DataError, match=words):
        manage.create_tenant("bomb", train=manage.upload(bomb), settings=FAST)


LINE = ("the red cat sings in Paris " * 20).encode() + b"\n"
CORPORA: dict[str, tuple[str, bytes, str]] = {
    "latin-1": ("c.txt", "ein grüner Hügel und ein Fluß\n".encode("latin-1") * 100, "not UTF-8"),
    "utf-16 without its mark": ("c.txt", LINE.decode().encode("utf-16-le"), "NUL byte"),
    "binary": ("c.txt", LINE + bytes(range(128)) * 10, "NUL byte"),
    "a zip": ("c.txt", ZIP_BOMB, r"packed \(zip\)"),
    "no gzip": ("c.txt.gz", LINE * 10, "is no gzip file"),
}
# What shows only when the worker unpacks or reads it.
LATE_CORPORA: dict[str, tuple[str, bytes, str]] = {
    "packed latin-1": ("c.txt.gz", gzip.compress("ein grüner Hügel\n".encode("latin-1") * 100), "line 1 is not UTF-8"),
    "cut gzip": ("c.txt.gz", gzip.compress(np.random.default_rng(0).bytes(2000).hex().encode())[:-500], "not a whole"),
    "no JSON": ("c.jsonl", LINE * 2, "line 1 is not JSON"),
    "JSON without text": ("c.jsonl", b'{"words": "cat"}\n' * 100, 'expected an object with a string "text"'),
    "gzip bomb": ("c.txt.gz", gzip.compress(b"x" * 900_000 + b"\n") * 20, "more than the 16,777,216 bytes"),
    "gzip bomb of a line": (
        "c.jsonl.gz",
        gzip.compress(b"x" * (1 << 20)) * 64,
        "line 1: more than 1,000,000 bytes without an end",
    ),
}


@pytest.mark.parametrize("kind", CORPORA)
def test_a_corpus_that_is_no_text_is_refused_at_first_sight(
    manage: ManageClient, place: Place, tmp_path: Path, kind: str
) -> None:
    name, content, words = CORPORA[kind]
    bad = tmp_path / name
    bad.write_bytes(content)
    with leaves_nothing(place), pytest.raises(errors.DataError, match=words):
        manage.create_domain("useless", corpus=manage.upload(bad), settings=QUICK)


@pytest.mark.parametrize(
    ("kind", "protocol"), [*((kind, "grpc") for kind in LATE_CORPORA), ("gzip bomb", "http"), ("cut gzip", "http")]
)
def test_a_corpus_that_the_worker_cannot_use_fails_with_the_reason_and_never_fills_the_memory(
    place: Place, tmp_path: Path, kind: str, protocol: str
) -> None:
    name, content, words = LATE_CORPORA[kind]
    bad = tmp_path / name
    bad.write_bytes(content)
    with ManageClient(place.url(protocol)) as manage, leaves_nothing(place):
        memory = forget_peak("self")
        with place.working(), pytest.raises(errors.DataError, match=words) as caught:
            manage.wait(manage.create_domain("useless", corpus=manage.upload(bad), settings=QUICK))
        # The worker is a thread of ours.
        assert peak_of("self") - memory < ENOUGH_MEMORY
        assert str(place.store.root) not in str(caught.value)


def test_a_corpus_outside_the_operators_folder_is_forbidden_also_through_a_link(
    manage: ManageClient, place: Place, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_bytes(LINE * 10)
    link = place.rows.with_name("link.txt")
    link.symlink_to(secret)
    outside = ("../store/registry.sqlite", str(secret), "link.txt", "/etc/passwd", "../files/../triton.log", ".")
    try:
        with leaves_nothing(place):
            for path in outside:
                with pytest.raises(errors.ForbiddenError) as caught:
                    manage.create_domain("outside", corpus=manage.on_server(path), settings=QUICK)
                # Whether there is such a file is nobody's business.
                assert str(caught.value) == f"{path!r} is no file below the server's folder for files"
    finally:
        link.unlink()


ROWS = {"train": {"path": "rows.csv"}}
UP = "../../evil"
TRAVERSALS: list[tuple[str, dict[str, Any], type[HplmError]]] = [
    *(
        ("tenant.create", {"tenant": name, "data": ROWS}, errors.TenantNameError)
        for name in (UP, "/etc/x", "..", "a/b")
    ),
    ("tenant.create", {"tenant": "evil", "data": ROWS, "domain": UP}, errors.BadManageRequestError),
    ("tenant.create", {"tenant": "evil", "data": ROWS, "base": UP}, errors.BadManageRequestError),
    ("tenant.create", {"tenant": "evil", "data": {"train": {"upload": UP}}}, errors.BadManageRequestError),
    ("tenant.delete", {"tenant": "../alpha"}, errors.TenantNameError),
    *(
        ("domain.create", {"domain": name, "corpus": {"path": "rows.csv"}}, errors.BadManageRequestError)
        for name in (UP, "..", "/etc/x")
    ),
    ("domain.create", {"domain": "evil", "corpus": {"path": "rows.csv"}, "parent": UP}, errors.BadManageRequestError),
    *(
        ("upload.start", {"name": name, "bytes": 1, "sha256": "0" * 64}, errors.BadManageRequestError)
        for name in (UP, "/etc/x.csv", "..", ".x.csv", "a/../../b.csv", "a\\..\\b.csv", "a\0.csv")
    ),
    ("upload.chunk", {"upload": UP, "offset": 0, "data": "AAAA"}, errors.BadManageRequestError),
    ("upload.drop", {"upload": "../tenants/alpha"}, errors.BadManageRequestError),
]


@pytest.mark.parametrize(
    ("action", "fields", "error"), TRAVERSALS, ids=[f"{action}-{i}" for i, (action, _, _) in enumerate(TRAVERSALS)]
)
def test_a_name_that_leads_elsewhere_is_no_name(
    manage: ManageClient, place: Place, action: str, fields: dict[str, Any], error: type[HplmError]
) -> None:
    before = traces(place)
    with pytest.raises(error):
        manage.ask(action, **fields)
    # Nor is anything gone.
    assert traces(place) == before


# The tenant has one text, and the classes yes and no.
OTHERS = [
    "text,label\n" + "red cat,yes\nblue dog,no\ngreen bird,maybe\n" * 5,
    "text,label\n" + "red cat,0.5\nblue dog,1.5\n" * 5,
    "text,text_pair,label\n" + "red cat,Anna,yes\nblue dog,Bob,no\n" * 5,
]


def test_updates_with_data_of_another_kind_are_refused_and_leave_what_is_served(place: Place, tmp_path: Path) -> None:
    url = place.url("grpc")
    with Client(url) as client, ManageClient(url) as manage, leaves_nothing(place), place.working():
        before = client.predict("alpha", TEXT, logits=True).logits
        for content in OTHERS:
            other = tmp_path / "other.csv"
            other.write_text(content)
            with pytest.raises(errors.DataError):
                manage.wait(manage.update_tenant("alpha", train=manage.upload(other), settings=FAST))
        after = client.predict("alpha", TEXT, logits=True).logits
        assert before is not None
        assert after is not None
        np.testing.assert_allclose(after, before, atol=1e-3)
