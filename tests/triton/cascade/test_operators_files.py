"""Every metric that the example dashboard and alerts name is on the page of a running server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hplm_client import Client, ManageClient
from hplm_loadtest.scenarios.server_metrics import metric_value, metrics_page

from hplm.cascade.plan import DEV_CONFIDENCE
from hplm.core import wire
from hplm.core.settings import ManagerSettings
from hplm.errors import HplmError
from hplm.store.layout import Store
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.triton.cascade.making import Making, levels_over, make_bases
from tests.waiting import until

pytestmark = pytest.mark.triton
EXAMPLES = Path(__file__).parents[3] / "examples/production"
# What Prometheus makes itself, and what only a machine with a GPU or a base of several stages (test_several_stages.py) has.
NOT_OURS = {"up", "nv_gpu_utilization", "hplm_layers_events_total"}


def named_metrics(file: str) -> set[str]:
    """Return the metrics in the expressions of a file of operators."""
    text = (EXAMPLES / file).read_text()
    if file.endswith(".json"):
        dashboard = json.loads(text)
        targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        text = "\n".join([*targets, *(each["query"]["query"] for each in dashboard["templating"]["list"][1:])])
    return set(re.findall(r"\b(?:hplm|nv)_[a-z0-9_]+\b", text))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    models = make_bases(tmp_path_factory.mktemp("operators"), ManagerSettings("", "tiny", "general-tiny"))
    making = Making.over(models.parent)
    known = {DEV_CONFIDENCE: 0.9}
    making.cascade("sure", "alpha", 7, levels_over("small", "tiny", cut_off=0.999), about=known)
    # The second level of this tenant takes a minute by its plan.
    making.cascade("slow", "alpha", 9, levels_over("middle", "small", cut_off=0.999), latency_ms=60_000.0)
    tiny.make_tenant(Store(models.parent / "store"), making.bases["tiny"], "plain", 10, "alpha", domain="general-tiny")
    flags = ["--metrics-config=summary_latencies=true"]
    with TritonServer(models, free_ports(), log=models.parent / "triton.log", flags=flags) as running:
        running.wait_ready()
        use_everything(running)
        yield running


def use_everything(server: TritonServer) -> None:
    """Call each model, with and without success: a counter is on the page from its first event on."""
    url = server.ports.grpc_url
    for model in (wire.CASCADE, wire.ROUTER, "small", "middle", "hbert"):
        with Client(url, model=model) as client:
            for tenant in ("sure", "slow", "plain", "nobody"):
                with suppress(HplmError):
                    client.predict(tenant, "the quick brown fox", deadline_s=20.0)
    with ManageClient(url) as manage:
        assert manage.list_tenants()
        with suppress(HplmError):
            next(manage.watch("0" * 32))


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_every_metric_is_on_the_page(server: TritonServer, file: str) -> None:
    named = named_metrics(file) - NOT_OURS
    assert len(named) > 5
    until(lambda: named <= set(re.findall(r"^\w+", metrics_page(server), flags=re.MULTILINE)), 20)


def test_texts_of_inner_models_count_once_for_their_tenant(server: TritonServer) -> None:
    asked = 5  # of each of five models, of which two have no tenant of the base
    with ManageClient(server.ports.grpc_url) as manage:
        until(lambda: manage.show_tenant("plain").recent["day"]["ok"] >= asked - 2)
        recent = manage.show_tenant("plain").recent
    assert recent["hour"] == recent["day"]
    assert recent["day"]["ok"] == asked - 2


def test_each_stage_counts_the_texts_of_a_tenant(server: TritonServer) -> None:
    for stage in ("route", "cascade", "upper"):
        ok = f'hplm_tenant_texts_total{{stage="{stage}",tenant="plain",outcome="ok"}}'
        until(lambda ok=ok: metric_value(server, ok) == (3 if "upper" in ok else 1), 20)
    looked_up = 'hplm_tenant_look_up_seconds_count{stage="plot",tenant="sure"}'
    until(lambda: metric_value(server, looked_up) >= 2, 20)
    unknown = 'hplm_tenant_texts_total{tenant="other",outcome="unknown_tenant"}'
    until(lambda: metric_value(server, unknown) >= 5, 20)
    assert metric_value(server, 'hplm_tenant_texts_total{tenant="nobody"}') == 0
