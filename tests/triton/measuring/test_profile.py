"""`hplm profile` measures a served base through a real server and keeps what it measured."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hplm.core.roles import served_base
from hplm.engine.served_engine import conditions_of
from hplm.models.device import CPU, choose_threads
from hplm.profiles.profile_store import find_profile, read_profiles, write_profile
from hplm.quotas.limits import Limits
from hplm.registry.access.limits import DEFAULT
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
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
    with closing(Registry.open(store)) as registry:
        # The server that the command starts for itself has no limits.
        registry.set_limits(DEFAULT, Limits(requests_per_s=1.0, tokens_per_s=1.0))

    done = hplm("profile", "--models", str(models))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "measuring base tiny: its stages in this process for up to two minutes, then requests of"
    )
    steps = [line.removesuffix(" ...") for line in done.stderr.splitlines() if line.endswith(" ...")]
    assert steps == ["load", "encode stage", "look-up stage", "layers", "server", "requests"]
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


def test_a_running_server_whose_limits_or_address_would_refuse_the_measuring_is_told_before_it(
    hplm: Run, tmp_path: Path
) -> None:
    models = tiny.make_repository(tmp_path)
    store = Store(tmp_path / "store")
    command = ("profile", "--models", str(models), "--url", f"grpc://127.0.0.1:{free_ports().grpc}")
    with closing(Registry.open(store)) as registry:
        for limits, said in (
            (Limits(requests_per_s=5.0), "requests_per_s of tenant alpha is limited to 5,"),
            (Limits(tokens_per_s=100.0), "tokens_per_s of tenant alpha is limited to 100,"),
        ):
            registry.set_limits(DEFAULT, limits)
            refused = hplm(*command)
            assert refused.returncode == 1
            assert "BAD_CONFIG" in refused.stderr
            assert said in refused.stderr
            assert "`hplm tenant limit alpha --requests-per-second 1000 --tokens-per-second" in refused.stderr
            assert "encode stage" not in refused.stderr
        registry.set_limits("alpha", Limits(1000.0, 1_000_000.0))
    # Nothing listens there.
    away = hplm(*command)
    assert (away.returncode, "encode stage" in away.stderr) == (1, False)


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
