"""`hplm place plan`, from profiles in a store to a plan file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hplm.core.roles import served_base
from hplm.models import base as bases
from hplm.placement.plan import Plan
from hplm.profiles.profile import LayerTiming, Timing
from hplm.profiles.profile_store import write_profile
from hplm.store.layout import Store
from tests import tiny
from tests.unit.hplm.profiles.made_profiles import CONDITIONS, made_profile

Hplm = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base with a kept profile: 20 ms of a text in two equal layers, and 5 ms outside of the encode stage."""
    models = tiny.make_repository(tmp_path_factory.mktemp("planned"))
    store = Store(served_base(models).store_root)
    fingerprint = bases.load(store.base("tiny")).fingerprint
    profile = made_profile(
        conditions=replace(CONDITIONS, fingerprint=fingerprint),
        encode=(Timing(1, 8, 20.0), Timing(8, 8, 160.0)),
        layers=(LayerTiming(1, 8, (10.0, 10.0)),),
        look_up=(Timing(1, 8, 0.5),),
        request=(Timing(1, 8, 25.0),),
    )
    write_profile(store, profile)
    return models


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    nodes = [
        {"name": name, "device_mib": 64, "cores": [[0], [1]], "address": f"127.0.0.1:{port}", "host_cache_mib": 1}
        for name, port in (("east", 9000), ("west", 9100))
    ]
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"nodes": nodes}))
    return path


def plan(hplm: Hplm, models: Path, cluster: Path, *options: str) -> subprocess.CompletedProcess[str]:
    out = cluster.with_name("plan.json")
    common = ["--cluster", str(cluster), "--models", str(models), "--tokens", "8", "--seconds", "60", "--out", str(out)]
    return hplm("place", "plan", *common, *options)


def test_a_plan_places_a_base_by_its_profile(hplm: Hplm, models: Path, cluster: Path) -> None:
    done = plan(hplm, models, cluster, "--rate", "hbert=60", "--cv", "2", "--deadline-ms", "200")
    assert done.returncode == 0, done.stderr
    assert "1 base on" in done.stdout
    assert "unchecked" in done.stdout
    made = Plan.load(cluster.with_name("plan.json"))
    assert made.prediction.attainment > 0.95
    assert sum(len(group.devices) for group in made.groups) >= 2
    assert made.assumptions.outside_ms == {"hbert": 5.0}
    assert made.models[0].layer_s == pytest.approx((0.01, 0.01))
    assert all(sum(base.cut) == 2 for group in made.groups for base in group.bases)


def test_the_usual_deadline_is_five_times_the_latency(hplm: Hplm, models: Path, cluster: Path) -> None:
    plan(hplm, models, cluster, "--rate", "hbert=1")
    assert Plan.load(cluster.with_name("plan.json")).assumptions.deadline_ms == {"hbert": 125.0}


def test_the_fewest_devices_are_used_that_reach_the_target(hplm: Hplm, models: Path, cluster: Path) -> None:
    done = plan(hplm, models, cluster, "--rate", "hbert=20", "--deadline-ms", "500", "--fewest-devices")
    assert done.returncode == 0, done.stderr
    made = Plan.load(cluster.with_name("plan.json"))
    assert [(node.name, node.devices) for node in made.nodes] == [("east", 1)]
    refused = plan(hplm, models, cluster, "--rate", "hbert=900", "--fewest-devices")
    assert refused.returncode == 1
    assert "99.00% of the requests in time was expected" in refused.stderr


def test_a_plan_that_survives_a_node_has_each_base_on_two_nodes(hplm: Hplm, models: Path, cluster: Path) -> None:
    done = plan(hplm, models, cluster, "--rate", "hbert=1", "--survive-any-node")
    assert "every base is served if any one node fails" in done.stdout
    made = Plan.load(cluster.with_name("plan.json"))
    assert {group.node for group in made.groups} == {"east", "west"}
    assert made.survives_any_node


def test_a_trace_is_planned_for_all_bases(hplm: Hplm, models: Path, cluster: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"{number / 5};1\r\n".replace(".", ",") for number in range(500))
    trace.write_text("sep=;\r\nTimestamp;Tokens\r\n" + "".join(rows))
    done = plan(hplm, models, cluster, "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    assert Plan.load(cluster.with_name("plan.json")).assumptions.rates == pytest.approx({"hbert": 5.0})


@pytest.mark.parametrize(
    ("stamps", "status", "said"),
    [
        ([6.7 * number for number in range(500)], 0, "500 arrivals in 3,343 s, 0.1493 requests/s"),
        (
            [7 * number for number in range(500)],
            0,
            "warning: the trace has 142.9 requests/s if its time stamps are milli",
        ),
        ([1_700_000_000_000 + 7 * number for number in range(500)], 0, "142.9 requests/s"),
        ([0, *(1_700_000_000 + number for number in range(500))], 1, "remove the stray time stamp, or give --rate"),
    ],
    ids=["seconds", "milliseconds", "unix-milliseconds", "stray-0"],
)
def test_a_trace_is_planned_with_words_for_its_rate_and_unit(
    hplm: Hplm, models: Path, cluster: Path, tmp_path: Path, stamps: list[float], status: int, said: str
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP\n" + "\n".join(map(str, stamps)))
    done = plan(hplm, models, cluster, "--trace", str(trace))
    assert done.returncode == status, done.stderr
    assert said in done.stderr


def test_a_busy_tenant_is_hot(hplm: Hplm, models: Path, cluster: Path, tmp_path: Path) -> None:
    rates = tmp_path / "rates.csv"
    rates.write_text("TENANT,RATE\nalpha,60\n")
    options = ["--rate", "hbert=70", "--deadline-ms", "200", "--tenant-rates", str(rates), "--survive-any-node"]
    done = plan(hplm, models, cluster, *options)
    assert done.returncode == 0, done.stderr
    assert set(Plan.load(cluster.with_name("plan.json")).tenants.hot["alpha"]) == {"east", "west"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "mpnet=4"], "a base of hbert was expected"),
        ([], "give --rate BASE=N for each base"),
        (["--rate", "hbert=4", "--deadline-ms", "0"], "--deadline-ms: a number above 0"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    hplm: Hplm, models: Path, cluster: Path, options: list[str], said: str
) -> None:
    done = plan(hplm, models, cluster, *options)
    assert done.returncode == 1
    assert said in done.stderr
    assert not cluster.with_name("plan.json").exists()


def test_a_base_that_fits_no_device_is_refused(hplm: Hplm, models: Path, cluster: Path) -> None:
    profile_of = Store(served_base(models).store_root).profiles("tiny")
    (kept,) = profile_of.iterdir()
    text = kept.read_text()
    try:
        kept.write_text(text.replace('"weights": 1000', f'"weights": {1 << 40}'))
        done = plan(hplm, models, cluster, "--rate", "hbert=1")
    finally:
        kept.write_text(text)
    assert done.returncode == 1
    assert "no placement was found that holds every model" in done.stderr


def test_a_base_without_a_profile_is_refused(hplm: Hplm, tiny_models: Path, cluster: Path) -> None:
    done = plan(hplm, tiny_models, cluster, "--rate", "hbert=1")
    assert done.returncode == 1
    assert "has no full profile" in done.stderr
    assert "hplm profile --models" in done.stderr


def test_a_profile_with_other_threads_than_the_devices_is_warned_of(hplm: Hplm, models: Path, cluster: Path) -> None:
    text = cluster.read_text()
    cluster.write_text(text.replace("[[0], [1]]", "[[0, 1]]"))
    done = plan(hplm, models, cluster, "--rate", "hbert=1")
    assert done.returncode == 0
    assert "was measured with 1 threads, and a device of node east has 2 cores" in done.stderr
