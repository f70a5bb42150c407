"""`hplm profile` measures a served base through a real server and keeps what it measured."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hplm.core.roles import served_base
from hplm.engine.served_engine import conditions_of
from hplm.models.device import CPU, choose_threads
from hplm.profiles.profile_store import find_profile, read_profiles, write_profile
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.profiles.made_profiles import made_profile

pytestmark = pytest.mark.triton
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.usefixtures("restored_threads")
def test_a_base_is_measured_through_a_server_whose_stages_start_from_the_last_profile(
    hplm: Run, tmp_path: Path
) -> None:
    models = tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    conditions = conditions_of(base, served_base(models).settings.encode, CPU, choose_threads(0))
    write_profile(store, made_profile(conditions=conditions))

    done = hplm("profile", "--models", str(models))
    assert done.returncode == 0, done.stderr
    assert "one text, ms" in done.stdout
    said = (tmp_path / "triton-profile.log").read_text()
    assert re.search(r"hbert_upper: computing on cpu in float32 with .*; costs from the profile of 2026-01-31", said)

    kept = find_profile(store, "tiny", conditions)
    assert kept is not None
    assert kept.kind == "full"
    assert kept.measured_at > "2026-01-31"
    assert kept.load_s is not None
    assert kept.memory.look_up_process > 0
    assert kept.memory.encode_process > 0
    # A request through Triton takes longer than its encode stage.
    alone = [timing.ms for timing in kept.encode if timing.texts == 1]
    assert all(request.ms > ms for request, ms in zip(kept.request, alone, strict=True))

    listed = hplm("profile", "--models", str(models), "--list", "--json")
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    assert [line["measured_at"] for line in lines] == [kept.measured_at, "2026-01-31T12:00:00Z"]
    assert {line["is_current"] for line in lines} == {True}


@pytest.mark.usefixtures("restored_threads")
def test_a_base_without_tenants_gets_a_quick_profile_that_is_not_kept(hplm: Run, tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    store = Store(tmp_path / "store")
    for name in tiny.TASKS:
        tiny.delete_tenant(store, name)
    measured = hplm("profile", "--models", str(models), "--json")
    assert json.loads(measured.stdout)["kind"] == "quick"
    assert "has no tenant to ask" in measured.stderr
    assert read_profiles(store, "tiny") == []
