"""The files that jobs work on: where a path may lead, and a first look at what is in them."""

from __future__ import annotations

import errno
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from hplm_builder.data.corpus_file import read_corpus
from hplm_builder.data.row_readers import read_rows

from hplm.core.settings import ManagerSettings
from hplm.core.text_lines import MOST_LINE_BYTES
from hplm.core.wire import CORPUS_ENDINGS, DATA_ENDINGS
from hplm.errors import DataError, ForbiddenError, HplmError, StoreUnavailableError
from hplm.manage.file_survey import survey
from hplm.manage.job_inputs import inside, pinned
from hplm.manage.request_parts import Source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder for files with a file in it and one beside it."""
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "a.csv").write_text("text,label\n")
    (tmp_path / "secret.csv").write_text("secret\n")
    return tmp_path / "data"


def test_a_path_is_taken_where_the_operator_allows_it_and_only_there(root: Path) -> None:
    closed = ManagerSettings(store="", base="b", domain="d")
    with pytest.raises(ForbiddenError, match="takes no paths"):
        pinned(Source(path="deep/a.csv"), closed)
    opened = ManagerSettings(store="", base="b", domain="d", allow_paths=True, data_root=str(root))
    assert pinned(Source(path="deep/a.csv"), opened) == {"path": "deep/a.csv", "root": str(root)}


def test_a_file_below_the_folder_is_found_by_any_of_its_names(root: Path) -> None:
    (root / "link.csv").symlink_to("deep/a.csv")
    for name in ("deep/a.csv", "deep/../deep/a.csv", str(root / "deep" / "a.csv"), "link.csv"):
        assert inside(root, name) == (root / "deep" / "a.csv").resolve()


def test_whatever_leads_out_is_forbidden_in_the_same_words_as_what_is_not_there(root: Path, tmp_path: Path) -> None:
    (root / "out.csv").symlink_to(tmp_path / "secret.csv")
    (root / "up").symlink_to(tmp_path)
    (root / "loop").symlink_to("loop")
    for name in (
        "../secret.csv",
        str(tmp_path / "secret.csv"),
        "out.csv",
        "up/secret.csv",
        "loop",
        "deep",
        "/dev/zero",
    ):
        with pytest.raises(ForbiddenError) as caught:
            inside(root, name)
        assert str(caught.value) == f"{name!r} is no file below the server's folder for files"
    with pytest.raises(ForbiddenError):
        inside(root, "missing.csv")


def test_text_that_begins_like_a_packed_file_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("PKC isoforms are kinases.\n")
    assert survey(tmp_path / "a.txt", CORPUS_ENDINGS, 1 << 20) == 26


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"x", "the ending must be one of .jsonl"),
        ("a.csv.gz", b"x", "the ending must be one of .jsonl"),
        ("a.csv", b"", "is empty"),
        ("a.csv", b"text,label\nb\xe4d,x\n", "a.csv, line 2 is not UTF-8"),
        ("a.csv", b"text,label\n" + b"good,x\n" * 200_000 + b"b\xe4d,x\n", "a.csv, line 200002 is not UTF-8"),
        (
            "a.csv",
            "text,label\nä,x".encode("utf-16-le"),
            "line 1 holds a NUL byte: .* UTF-16 begins with a byte order mark",
        ),
        ("a.csv", "text,label\nä,x".encode("utf-32"), "a.csv is UTF-32"),
        ("a.csv", "text,label\nä,x".encode("utf-16") + b"x", "a.csv is not UTF-16 at its end"),
        ("a.csv", b"text,label\rgood,x\rb\xe4d,x\r", "a.csv, line 3 is not UTF-8"),
        ("a.csv", b"text,label\nbad \xc3", "a.csv, line 2 is not UTF-8"),
        ("a.csv", b"text,label\r" + b"x" * (MOST_LINE_BYTES + 1), "line 2 has more than 1,000,000 bytes"),
        ("a.csv", b"[text],label\n" + b"x" * (MOST_LINE_BYTES + 1), "line 2 has more than 1,000,000 bytes"),
        ("a.csv", b"text,label\na\0b,x\n", "line 2 holds a NUL byte"),
        ("a.csv", b"PK\x03\x04rest", r"is packed \(zip\)"),
        ("a.jsonl", gzip.compress(b"x" * 1000), r"is packed \(gzip\)"),
        ("a.csv", b"text,label\n" + b"x" * (MOST_LINE_BYTES + 1), "line 2 has more than 1,000,000 bytes"),
        ("a.csv", b"x" * (3 << 20), "at most 2,000,000 are accepted"),
    ],
    ids=[
        *(
            "ending",
            "gzip-ending",
            "empty",
            "latin-1",
            "latin-1-late",
            "utf-16-without-mark",
            "utf-32",
            "utf-16-cut",
            "carriage-returns",
            "cut",
            "long-line-of-carriage-returns",
            "long-line-after-a-bracket",
            "zero",
            "zip",
            "gzip",
            "long-line",
            "large",
        ),
    ],
)
def test_a_file_that_cannot_be_labelled_data_is_refused_at_first_sight(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        survey(tmp_path / name, DATA_ENDINGS, 2_000_000)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "text,label\r\nä,x\r\n".encode("utf-16")),
        ("a.csv", "text,label\rä,x\r".encode()),
        ("a.csv", b"text,label\r" + b"good,x\r" * 200_000),
        ("a.jsonl", ("[" + '{"text": "ä", "label": "x"}, ' * 60_000 + '{"text": "ä", "label": "y"}]').encode()),
    ],
    ids=["utf-16", "carriage-returns", "many-carriage-returns", "list-on-one-line"],
)
def test_what_the_first_look_takes_the_job_reads(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert survey(tmp_path / name, DATA_ENDINGS, 2_000_000) > 0
    assert list(read_rows(tmp_path / name))


def test_a_line_of_a_gigabyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("wb") as file:
        file.write(b"text,label\n" + b"x" * MOST_LINE_BYTES * 2)
        file.truncate(1 << 30)  # sparse: zeros that take no disk
    with pytest.raises(DataError, match="line 2 has more than"):
        survey(path, DATA_ENDINGS, 2 << 30)


@pytest.mark.parametrize("break_at", [10, MOST_LINE_BYTES - 1, MOST_LINE_BYTES, MOST_LINE_BYTES + 1])
def test_lines_are_bounded_wherever_blocks_begin(tmp_path: Path, break_at: int) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * break_at + b"\n" + b"y" * (MOST_LINE_BYTES - 3) + b"\nz")
    if break_at > MOST_LINE_BYTES:
        with pytest.raises(DataError, match="line 1 has more"):
            survey(path, CORPUS_ENDINGS, 1 << 30)
    else:
        assert survey(path, CORPUS_ENDINGS, 1 << 30) == path.stat().st_size


def test_a_corpus_may_be_packed_and_is_not_unpacked_here(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(bytes(50 << 20)))
    # Not unpacked, but never taken for less than it may hold.
    assert survey(tmp_path / "a.txt.gz", CORPUS_ENDINGS, 1 << 20) >= 50 << 20
    (tmp_path / "b.txt.gz").write_bytes(b"plain")
    with pytest.raises(DataError, match="is no gzip file"):
        survey(tmp_path / "b.txt.gz", CORPUS_ENDINGS, 1 << 20)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ESTALE, StoreUnavailableError), (errno.EMFILE, StoreUnavailableError), (errno.EACCES, DataError)],
)
@pytest.mark.parametrize(
    "read",
    [
        lambda path: survey(path, (".txt",), 1000),
        lambda path: list(read_rows(path, "rows.jsonl")),
        lambda path: read_corpus(path, most_bytes=1000, most_documents=10),
    ],
    ids=["survey", "rows", "corpus"],
)
def test_a_disk_that_is_away_is_no_fault_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object], number: int, kind: type[HplmError]
) -> None:
    path = tmp_path / "words.txt"
    path.write_text("good\n")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(kind, match="cannot be read: no"):
        read(path)
