"""`hplm loadtest`: one line an error."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hplm_loadtest.benchmarks.experiments import rates_of
from hplm_loadtest.cli.loadtest import parse_tenants

from hplm.errors import ConfigError
from hplm.triton.launcher.ports import free_ports


def hplm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "hplm"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return options that name tenants and texts, so that the load needs no repository."""
    (tmp_path / "names.txt").write_text("alpha\n\nbeta\n")
    (tmp_path / "texts.txt").write_text("the red cat\n")
    return ["--tenants", str(tmp_path / "names.txt"), "--text", str(tmp_path / "texts.txt")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["steady", "--rate", "0"], "BAD_CONFIG: --rate is 0.0"),
        (["replay", "--trace", "x.csv", "--rate", "nan"], "BAD_CONFIG: --rate is nan"),
        (["steady", "--duration", "inf"], "BAD_CONFIG: --duration is inf"),
        (["burst", "--every", "0"], "BAD_CONFIG: --every is 0.0"),
        (["burst", "--stagger", "inf"], "BAD_CONFIG: a stagger of inf s"),
        (["steady", "--protocol", "ftp"], "BAD_CONFIG: --protocol is http or grpc"),
        (["steady", "--protocol", "grpc"], "BAD_CONFIG: --protocol grpc does not fit http://"),
        (["steady", "--deadlines", "a=1"], "BAD_CONFIG: 'a=1' is no deadline class"),
        (["steady", "--zipf", "-1"], "BAD_CONFIG: a Zipf exponent is 0 or more"),
        (["steady", "--text", "no.txt"], "BAD_DATA: no.txt cannot be read"),
        (["replay", "--trace", "x.csv", "--burstiness", "-1"], "BAD_CONFIG: burstiness is -1.0"),
        (["steady", "--web-port", "99999"], "BAD_CONFIG: --web-port is from 1 to 65535, not 99999"),
        (["steady", "--web", "--web-port", "-1"], "BAD_CONFIG: --web-port is from 1 to 65535, not -1"),
        (["steady", "--json", "."], "BAD_CONFIG: --json: . cannot be written: Is a directory"),
    ],
    ids=[
        "no-rate",
        "rate-nan",
        "endless",
        "no-period",
        "stagger",
        "protocol",
        "two-protocols",
        "deadlines",
        "zipf",
        "no-file",
        "burstiness",
        "no-port",
        "below-0",
        "json",
    ],
)
def test_a_wrong_call_is_one_line_and_status_1(files: list[str], options: list[str], words: str) -> None:
    done = hplm("loadtest", *options[:1], *files, *options[1:])
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--duration=0", "--cv=0", "--cv=1e9", "--no-such"])
def test_an_unknown_option_or_a_value_outside_its_range_is_status_2(files: list[str], option: str) -> None:
    done = hplm("loadtest", "steady", *files, option)
    assert done.returncode == 2
    assert option.partition("=")[0] in done.stderr


def test_a_missing_models_folder_is_refused_with_the_other_ways_to_name_tenants() -> None:
    done = hplm("loadtest", "steady", "--models", "no/models")
    assert done.returncode == 1
    assert done.stderr == (
        "hplm: BAD_CONFIG: there is no no/models: without --models the server names its tenants, --tenants names some of them\n"
    )


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_an_unreachable_manager_is_refused_with_the_option_that_names_tenants(scheme: str) -> None:
    done = hplm("loadtest", "steady", "--url", f"{scheme}://127.0.0.1:{free_ports().http}")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "hplm: UNREACHABLE: the server's manager does not list its tenants: name them with --tenants NAME,NAME"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no/names", "BAD_DATA: no/names cannot be read"),
        ("names.txt", "BAD_DATA: names.txt cannot be read"),
        ("alpha,BETA!", "BAD_DATA: --tenants 'alpha,BETA!' is neither a file nor names with commas between"),
    ],
)
def test_tenants_that_are_neither_a_file_nor_names_are_refused(given: str, words: str) -> None:
    done = hplm("loadtest", "steady", "--tenants", given)
    assert done.returncode == 1
    assert words in done.stderr


def test_tenants_by_two_options_are_refused() -> None:
    done = hplm("loadtest", "steady", "--tenants", "alpha", "--models", "models")
    assert "BAD_CONFIG: --tenants and --models both say which tenants to ask" in done.stderr


def test_tenants_are_the_lines_of_a_file_or_the_names_between_commas(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("alpha\n\nbeta\n")
    assert parse_tenants(str(tmp_path / "names")) == parse_tenants("alpha, beta,") == ["alpha", "beta"]
    assert parse_tenants("alpha") == ["alpha"]


def test_a_benchmark_refuses_a_result_file_that_cannot_be_written_before_it_measures() -> None:
    done = hplm("bench", "plot-lookup", "--models", "nowhere", "--json", "/dev/full")
    assert done.returncode == 1
    assert "BAD_CONFIG: --json: /dev/full cannot be written: No space left on device" in done.stderr


def test_a_page_port_that_is_taken_is_one_line_and_status_1(files: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = hplm("loadtest", "steady", "--web", "--web-port", str(port), *files)
    assert done.returncode == 1
    assert f"START_FAILED: port {port} of 127.0.0.1 is not free" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_server_that_does_not_listen_is_one_line_and_status_1(files: list[str], scheme: str) -> None:
    done = hplm("loadtest", "steady", "--url", f"{scheme}://127.0.0.1:{free_ports().http}", *files)
    assert done.returncode == 1
    assert "UNREACHABLE" in done.stderr
    assert "Traceback" not in done.stderr
    # The modules that Locust patches must not be imported before Locust.
    assert "MonkeyPatchWarning" not in done.stderr


def test_rates_of_a_mixed_load_are_read_by_base() -> None:
    assert rates_of(["hbert=120", "minilm=0.5"]) == {"hbert": 120.0, "minilm": 0.5}


@pytest.mark.parametrize(
    ("values", "words"), [(["hbert"], "'hbert' is not"), (["a=x"], "'a=x' is not"), (["a=1", "a=2"], "'a' twice")]
)
def test_other_rates_of_a_mixed_load_are_refused(values: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rates_of(values)
