"""Every --help of the command line has examples, and every error is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hplm_cli import make_app
from tests import tiny

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMANDS = (
    [],
    ["serve"],
    ["health"],
    ["worker"],
    ["store"],
    *(["store", name] for name in ("verify", "gc", "adopt", "show")),
    ["predict"],
    ["build"],
    *(["build", name] for name in ("demo", "base", "plot", "domain", "tenant", "export", "fleet")),
    ["tenant"],
    *(["tenant", name] for name in ("create", "update", "show", "list", "delete", "rollback")),
    ["domain"],
    *(["domain", name] for name in ("create", "update", "show", "list", "delete")),
    ["job"],
    *(["job", name] for name in ("list", "show", "watch", "cancel")),
    ["upload"],
    *(["upload", name] for name in ("list", "drop")),
    ["profile"],
    ["bench"],
    *(
        ["bench", name]
        for name in (
            *("plot-lookup", "upper", "request", "tenants", "response", "burst", "memory", "pipeline", "batching"),
            *("schedulers", "limit", "int8", "adapters", "trace", "overload", "waves", "recovery", "all"),
        )
    ),
    ["loadtest"],
    *(["loadtest", name] for name in ("steady", "ramp", "burst", "replay")),
    ["eval"],
    *(["eval", name] for name in ("methods", "cascade", "students")),
)


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_an_example(command: list[str]) -> None:
    # This runs in the test's process, because a new one would import torch for every sub-command.
    done = CliRunner().invoke(make_app(command[0] if command else None), [*command, "--help"])
    assert done.exit_code == 0, done.output
    assert "Example" in done.output
    assert "hplm " in done.output.partition("Example")[2]


def test_the_program_is_installed_and_knows_its_version() -> None:
    command = [str(Path(sys.executable).parent / "hplm"), "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stdout.startswith("hplm ")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["build", "tenant", "t", "--train", "no.csv", "--dev", "no.csv"], "BAD_DATA: no.csv cannot be read"),
        (["build", "plot", "--text", "no.txt"], "BAD_DATA: 'no.txt' is neither a text file nor one of"),
        (
            ["build", "base", "--model", "mpnet"],
            "BAD_CONFIG: the name minilm-ngrams is reserved for a shipped base of MiniLM",
        ),
        (["build", "base", "--shipped", "--start", "other"], "BAD_CONFIG: --shipped trains nothing"),
        (
            ["build", "base", "--shipped", "--name", "mine"],
            "BAD_CONFIG: no base 'mine' is shipped; there are minilm-l6, minilm-ngrams",
        ),
        (
            ["bench", "memory", "--tenants", "10"],
            "BAD_CONFIG: an added tenant's memory is measured between two numbers of tenants",
        ),
        (["build", "export", "--miss", "guess"], "BAD_CONFIG: hbert_plot: miss must be one of"),
        (["build", "export", "--quantization", "int4"], "BAD_CONFIG: hbert_plot: quantization must be one of"),
        (["build", "export", "--store", "nowhere"], "MISSING_ARTIFACT: nowhere has no base"),
        (["bench", "response", "--quantization", "int4"], "BAD_CONFIG: no quantization 'int4'"),
        (["predict", "-t", "x", "--url", "ftp://x", "hello"], "BAD_CONFIG: 'ftp://x' is not an address"),
        (
            ["serve", "--check", "--models", "nowhere"],
            "BAD_CONFIG: nowhere has no models of a base: `hplm build export --models nowhere` writes them",
        ),
    ],
    ids=[
        *(
            "missing-file",
            "unknown-source",
            "anothers-name",
            "shipped-and-start",
            "shipped-and-a-name",
            "one-count",
            "bad-mode",
            "bad-quantization",
            "no-store",
            "bad-quantization-of-a-bench",
            "bad-url",
        ),
        "no-models",
    ],
)
def test_a_wrong_call_is_one_line_and_status_1(hplm: Run, command: list[str], words: str) -> None:
    done = hplm(*command)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_cannot_be_used_is_one_line_and_status_1_too(hplm: Run, tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    done = hplm("build", "backends", "--models", str(models), "--out", "/dev/null/backends")
    assert done.returncode == 1
    assert done.stderr.startswith("hplm: BAD_DATA: /dev/null/")
    assert done.stderr.endswith("partial: Not a directory\n")


@pytest.mark.parametrize(
    ("url", "code"), [("http://127.0.0.1:1", "BAD_DATA"), ("localhost:1", "BAD_CONFIG")], ids=["file", "address"]
)
def test_an_error_that_is_asked_for_as_json_goes_to_standard_output_also_where_bars_are_drawn(
    hplm: Run, monkeypatch: pytest.MonkeyPatch, url: str, code: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    done = hplm("tenant", "create", "acme", "--train", "nowhere.csv", "--json", "--url", url)
    assert json.loads(done.stdout)["error"]["code"] == code
    assert done.returncode == 1


CREATE, UPDATE, BUILD = ["tenant", "create"], ["tenant", "update"], ["build", "tenant"]


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        (CREATE, ["--train", "tickets.csv"], "tickets.csv, line 1: no column `text` or `sentence`"),
        (
            CREATE,
            ["--train", "good.csv", "--dev", "tickets.csv"],
            "tickets.csv, line 1: no column `text` or `sentence`",
        ),
        (CREATE, ["--train", "words.conll", "--text-column", "Body"], "columns of a .conll have no names"),
        (CREATE, ["--train", "good.csv", "--text-column", ""], "the name of a column is 1 to 200 printable characters"),
        (UPDATE, ["--train", "tickets.csv", "--text-column", "body"], "tickets.csv, line 1: no `label` or `score`; "),
        (BUILD, ["--train", "tickets.csv", "--label-column", "Kind"], "tickets.csv, line 1: no column `text` or `sent"),
        (BUILD, ["--train", "tickets.csv", "--text-column", "body"], "tickets.csv, line 1: no `label` or `score`; "),
    ],
    ids=["no-text", "in-dev", "no-names", "no-name", "update", "build-no-text", "build-no-label"],
)
def test_a_header_without_the_columns_is_refused_with_those_it_has_before_a_server_is_asked(
    hplm: Run, tmp_path: Path, command: list[str], options: list[str], words: str
) -> None:
    (tmp_path / "tickets.csv").write_text("Subject;Body;Category\nprinter;burns;hardware\n", "utf-16")
    (tmp_path / "good.csv").write_text("text,label\nburns,hardware\n")
    (tmp_path / "words.conll").write_text("burns B-x\n")
    files = [str(tmp_path / one) if one.endswith((".csv", ".conll")) else one for one in options]
    url = [] if command == BUILD else ["--url", "http://127.0.0.1:1"]
    done = hplm(*command, "desk", *files, *url)
    assert done.returncode == 1
    assert words in done.stderr
    if words.startswith("tickets"):
        assert "there are 'Subject', 'Body', 'Category': name others with --text-column, " in done.stderr


@pytest.mark.parametrize("name", ["plot-lookup", "upper", "request"])
def test_no_rounds_are_refused_by_name(hplm: Run, name: str) -> None:
    done = hplm("bench", name, "--rounds", "0")
    assert done.returncode == 2
    assert "--rounds" in done.stderr


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o640), (0o077, 0o600)])
def test_other_users_read_no_registry_and_the_umask_says_whether_the_group_does(
    tmp_path: Path, umask: int, mode: int
) -> None:
    program = Path(sys.executable).parent / "hplm"
    (tmp_path / "bases" / "b").mkdir(parents=True)
    subprocess.run([program, "store", "adopt", "--store", tmp_path], umask=umask, capture_output=True, check=True)
    assert (tmp_path / "registry.sqlite").stat().st_mode & 0o777 == mode


def test_a_worker_of_no_known_device_is_refused_at_its_start(hplm: Run, tmp_path: Path) -> None:
    done = hplm("worker", "--store", str(tmp_path), "--device", "gpu", "--once")
    assert done.returncode == 2
    assert "--device" in done.stderr


def test_an_unknown_command_is_refused(hplm: Run) -> None:
    assert hplm("sevre").returncode == 2


@pytest.mark.parametrize("when", ["at once", "under way"])
def test_what_is_not_installed_is_named_with_the_extra_that_has_it(when: str) -> None:
    # An installation for clients alone lacks the libraries of benchmarks.
    lacking = "locust" if when == "under way" else "hplm_loadtest.cli.loadtest"
    code = f"import sys; sys.modules[{lacking!r}] = None; from hplm_cli import main; main()"
    command = [sys.executable, "-c", code, "loadtest", "steady", "--tenants", os.devnull, "--text", os.devnull]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("`pip install 'PATH/TO/hplm[loadtest]'`")
    assert "Traceback" not in done.stderr


def test_predict_never_imports_torch() -> None:
    code = "import sys; import hplm_client.cli.predict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
