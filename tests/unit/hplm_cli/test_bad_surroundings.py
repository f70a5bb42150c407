"""Files, servers and environments that are not as a command expects end in one line with a code, never in a traceback."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hplm.errors import leaves
from tests import tiny

Hplm = Callable[..., subprocess.CompletedProcess[str]]
CODES = {leaf.code for leaf in leaves()}
# Commands that read PATH. `worker` and `loadtest` are below, because they change their whole process. STORE is a sound store
# of base `tiny`, OUT a folder that does not exist.
READING = """
serve --no-worker --models PATH
build backends --out OUT --models PATH
build base --model PATH --name other --store OUT
build domain d --corpus PATH --store STORE --base tiny
build domain d --corpus CORPUS --store PATH --base tiny
build export --store PATH --models OUT
build plot --text PATH --store STORE --base tiny
build plot --text CORPUS --store PATH --base tiny
build tenant t --train PATH --store STORE --base tiny
build tenant t --train CSV --store PATH --base tiny
build tenant t --train CSV --unlabelled PATH --store STORE --base tiny
store adopt --store PATH
store gc --store PATH
store show --store PATH
store verify --store PATH
base list --models PATH
base delete x --models PATH
domain create d --corpus PATH --url http://127.0.0.1:1
domain update d --corpus PATH --url http://127.0.0.1:1
tenant create t --train PATH --url http://127.0.0.1:1
tenant update t --train PATH --url http://127.0.0.1:1
tenant students t --train PATH --url http://127.0.0.1:1
key list --store PATH
key create t --store PATH
key revoke k --store PATH
audit --store PATH
tenant limit t --store PATH
profile --models PATH
place apply PATH --models MODELS --out OUT
place check PATH --models MODELS
place explain PATH
place simulate PATH
place watch PATH --metrics http://127.0.0.1:1/metrics --once
place plan --cluster PATH --models MODELS --rate tiny=1
bench cascade --requests PATH --models MODELS
bench length-buffer --trace PATH
bench students --trace PATH
bench tenants --models PATH
bench response --models PATH
bench route --models PATH
eval demo --store PATH
eval students --trunk x --store PATH
eval tables --store PATH
""".strip().splitlines()
# Commands that ask URL.
ASKING = """
health --url URL
predict -t alpha --url URL hello
base list --url URL
domain create d --corpus CORPUS --url URL
domain delete d --yes --url URL
domain list --url URL
domain show d --url URL
tenant create t --train CSV --url URL
tenant delete t --yes --url URL
tenant limit t --url URL
tenant list --url URL
tenant rollback t --url URL
tenant show t --url URL
tenant students t --url URL
tenant target t --target accuracy=0.9 --url URL
job cancel j --url URL
job list --url URL
job show j --url URL
job watch j --url URL
upload drop u --url URL
upload list --url URL
key create t --url URL
key list --url URL
key revoke k --url URL
audit --url URL
profile --url URL
""".strip().splitlines()
BAD_PATHS = {
    "missing": b"nowhere",
    "folder": b"folder",
    "binary": b"binary",
    "not ASCII": "fehlt-\u00fc.csv".encode(),
    "not UTF-8": b"odd-\xff.csv",
    "empty": b"empty.json",
}
HTML = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 33\r\nConnection: close\r\n\r\n"
    b"<html><body>It works</body></html>"
)
ANSWERS = {"html": HTML, "cut": HTML[:-30], "nonsense": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", "nothing": b""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_models: Path) -> Path:
    """The working folder of the commands, with bad files and with sound files for what a test does not spoil."""
    made = tmp_path_factory.mktemp("bad")
    (made / "folder").mkdir()
    (made / "empty.json").touch()
    for name in (b"binary", BAD_PATHS["not UTF-8"]):
        (made / os.fsdecode(name)).write_bytes(bytes(range(256)) * 40)
    (made / "corpus.txt").write_text("\n".join(tiny.sentences(60)))
    rows = [f"{text},{'ab'[number % 2]}\n" for number, text in enumerate(tiny.sentences(40))]
    (made / "rows.csv").write_text("".join(["text,label\n", *rows]))
    (made / "trace.csv").write_text("timestamp\n0.1\n0.2\n")
    shutil.copytree(tiny_models.parent, made / "sound")
    return made


def filled(command: str, folder: Path, **values: str) -> list[str]:
    places = {
        "STORE": str(folder / "sound" / "store"),
        "MODELS": str(folder / "sound" / "models"),
        "OUT": str(folder / "out"),
        "CORPUS": str(folder / "corpus.txt"),
        "CSV": str(folder / "rows.csv"),
        "TRACE": str(folder / "trace.csv"),
        **values,
    }
    return [re.sub(r"^[A-Z]+$", lambda word: places.get(word[0], word[0]), word) for word in command.split()]


def check_is_one_line(done: subprocess.CompletedProcess[str]) -> None:
    """Check that a command ended with an error in one line with a code, or refused its command line."""
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    if done.returncode == 1:
        last = done.stderr.strip().splitlines()[-1]
        code = re.match(r"hplm: ([A-Z_]+): .", last)
        assert code is not None, done.stderr
        assert code[1] in CODES
        assert "mistake of hplm" not in last


@pytest.mark.parametrize("kind", BAD_PATHS)
@pytest.mark.parametrize("command", READING)
def test_a_path_that_a_command_cannot_use_is_one_line(
    hplm: Hplm, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, kind: str
) -> None:
    monkeypatch.chdir(folder)
    shutil.rmtree(folder / "out", ignore_errors=True)
    check_is_one_line(hplm(*filled(command, folder, PATH=str(folder / os.fsdecode(BAD_PATHS[kind])))))


@pytest.fixture(scope="module", params=[*ANSWERS, "closed"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that sends something else than Triton, or of a closed port."""
    if request.param == "closed":
        yield "http://127.0.0.1:1"
        return
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(5)
                    try:
                        connection.recv(1 << 16)
                        connection.sendall(ANSWERS[request.param])
                    except OSError:
                        continue

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize("command", ASKING)
def test_a_server_that_is_not_hplm_is_one_line(hplm: Hplm, folder: Path, url: str, command: str) -> None:
    check_is_one_line(hplm(*filled(command, folder, URL=url)))


def run_alone(command: list[str], folder: Path, *, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `hplm` in a process of its own, as a user without HOME."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("HOME", "USER", "LOGNAME", "HPLM_CACHE")
    }
    return subprocess.run(
        [*before, sys.executable, "-m", "hplm_cli", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("url", ["html", "cut"], indirect=True)
def test_a_load_test_of_a_server_that_is_not_hplm_is_one_line(folder: Path, url: str) -> None:
    check_is_one_line(run_alone(filled("loadtest steady --text CORPUS --url URL", folder, URL=url), folder))


@pytest.mark.parametrize(
    "command", ["worker --once --store PATH", "loadtest replay --tenants alpha --trace PATH --url http://127.0.0.1:1"]
)
def test_a_command_that_changes_its_process_ends_in_one_line_too(folder: Path, command: str) -> None:
    check_is_one_line(run_alone(filled(command, folder, PATH=str(folder / "binary")), folder))


def test_a_user_without_name_and_home_is_told_what_to_set_and_can_use_all_that_needs_no_home(folder: Path) -> None:
    # In a user namespace this process has a number that /etc/passwd does not know, and may still read its files.
    unknown = ("unshare", "--user", "--map-user=54321")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unknown, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this system lets no process make a user namespace")
    done = run_alone(filled("build base --shipped --store OUT", folder), folder, before=unknown)
    check_is_one_line(done)
    assert "BAD_CONFIG: user 54321 has no home folder for downloads: set HPLM_CACHE" in done.stderr
    done = run_alone(filled("key create alpha --store STORE", folder), folder, before=unknown)
    assert done.returncode == 0, done.stderr


def test_a_repository_below_a_folder_that_is_not_ascii_is_refused_by_name_and_its_store_is_read(
    hplm: Hplm, tmp_path: Path, tiny_models: Path
) -> None:
    for name in ("ü".encode(), b"\xff"):
        below = tmp_path / os.fsdecode(name)
        shutil.copytree(tiny_models.parent, below)
        assert hplm("store", "verify", "--store", str(below / "store")).returncode == 0
        done = hplm("serve", "--check", "--models", str(below / "models"))
        check_is_one_line(done)
        assert "Triton's stages read paths as ASCII" in done.stderr


def test_an_error_that_no_command_expects_names_its_place(hplm: Hplm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(wanted: str | None) -> None:
        raise KeyError("getpwuid(): uid not found: 54321")

    monkeypatch.setattr("hplm_cli.make_app", fail)
    done = hplm("health")
    assert done.returncode == 1
    assert re.fullmatch(
        r"hplm: INTERNAL: KeyError: .*uid not found.* \(.*\.py, line \d+\)\..* report this.*\n", done.stderr
    )
