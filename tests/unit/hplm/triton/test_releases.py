"""Workarounds whose fix cannot be detected are switched off by the server's version."""

from __future__ import annotations

from pathlib import Path

import pytest

from hplm.errors import StartError
from hplm.triton.launcher.command_line import shell_command
from hplm.triton.launcher.install import TritonInstall, find_triton
from hplm.triton.releases import RELEASE_24_10, RELEASE_24_11, RELEASE_26_05, ServerVersion
from hplm.triton.workarounds import deep_json
from hplm.triton.workarounds.empty_outputs import check_numpy


@pytest.mark.parametrize(
    ("written", "version"), [("2.51.0\n", RELEASE_24_10), ("2.69.0dev\n", RELEASE_26_05), ("main", None), (None, None)]
)
def test_an_installation_says_its_server_s_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, version: ServerVersion | None
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    (tmp_path / "backends" / "python").mkdir(parents=True)
    if written is not None:
        (tmp_path / "TRITON_VERSION").write_text(written)
    monkeypatch.setenv("TRITON_ROOT", str(tmp_path))
    assert find_triton().version == version


@pytest.mark.parametrize(("version", "is_large"), [(None, True), (RELEASE_24_10, True), (RELEASE_26_05, False)])
def test_threads_have_large_stacks_on_a_server_that_parses_json_by_unlimited_recursion(
    monkeypatch: pytest.MonkeyPatch, version: ServerVersion | None, is_large: bool
) -> None:
    monkeypatch.setattr(deep_json, "stack_limits", lambda: (deep_json.STACK_BYTES, -1))
    install = TritonInstall("here", Path("/triton/bin/tritonserver"), (), (), version)
    command = shell_command(install, Path("/models"), Path("/backends"), ["hbert"])
    assert (f"ulimit -s {deep_json.STACK_BYTES >> 10} " in command) == is_large


def test_numpy_2_is_refused_before_a_server_that_would_send_empty_answers() -> None:
    with pytest.raises(
        StartError, match=r"Triton 2\.51 sends empty answers with numpy 2\.1\.0: `pip install 'numpy<2'`"
    ):
        check_numpy(RELEASE_24_10, "2.1.0")


@pytest.mark.parametrize(
    ("server", "numpy"), [(RELEASE_24_10, "1.26.4"), (RELEASE_24_11, "2.1.0"), (None, "2.1.0"), (RELEASE_24_10, None)]
)
def test_a_numpy_that_the_server_takes_is_not_refused(server: ServerVersion | None, numpy: str | None) -> None:
    check_numpy(server, numpy)
