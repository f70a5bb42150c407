"""A real server with products in int8: its answers are the engine's and its look-ups', over HTTP and gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_client import Client
from hplm_loadtest.benchmarks.engine.int8 import int8
from hplm_loadtest.benchmarks.serving.response import response
from hplm_loadtest.workloads.texts import POOL_FILE

from hplm.core.settings import Quantization
from hplm.engine.encode import EngineRequest
from hplm.engine.kernels.int8_ranges import measure_ranges
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import open_lineage
from hplm.tasks.task_loader import task_named
from hplm.triton.launcher.ports import free_ports
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.messages import served_hidden
from tests.unit.hplm.engine.kernels.test_int8 import needs_vnni

pytestmark = [pytest.mark.triton, needs_vnni]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("int8")
    settings = {"quantization": "int8"}
    tiny.make_repository(made, plot_settings=settings, upper_settings=settings)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TritonServer]:
    with TritonServer(folder / "models", free_ports(), log=folder / "triton.log") as started:
        started.wait_ready()
        yield started


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_served_logits_are_the_engines(folder: Path, server: TritonServer, protocol: str) -> None:
    store, base = tiny.opened(folder)
    engine, plain = (
        tiny.engine_of(base, int8=int8) for int8 in (measure_ranges(base, load_lower(base), base.load_upper()), ())
    )
    pairs = [(tenant, text) for text in tiny.sentences(12, seed=3) for tenant in tiny.TASKS]
    with Client(server.ports.http_url if protocol == "http" else server.ports.grpc_url) as client:
        answers = list(client.predict_many(pairs, logits=True))
    encoder = base.load_text_encoder()
    off: list[float] = []
    off_plain: list[float] = []
    for (tenant, text), answer in zip(pairs, answers, strict=True):
        hidden = served_hidden(server, tenant, text).to(torch.float16).numpy()
        request = EngineRequest(tiny.load_tenant(store, base, tenant), hidden)
        card, tokens = request.tenant.card, encoder.encode([text])[0].tokens
        wanted, floats = (
            task_named(card.task).decode(one.run([request])[0], card.labels, tokens, request.tenant.head.transitions)[1]
            for one in (engine, plain)
        )
        assert answer.logits is not None
        # In a batch attention rounds in another order, which may move a code by one: tenants differ by whole numbers.
        np.testing.assert_allclose(answer.logits, wanted, atol=0.05, rtol=0.02)
        off.append(float(np.abs(answer.logits - wanted).mean()))
        off_plain.append(float(np.abs(answer.logits - floats).mean()))
    assert np.median(off) < 0.1 * np.median(off_plain)
    engine.close()
    plain.close()


def test_the_log_says_what_is_in_integers(folder: Path, server: TritonServer) -> None:
    said = (folder / "triton.log").read_text()
    assert re.search(
        r"hbert_plot: what no table has is computed on cpu with layers' matrices in int8, the gate's in float32", said
    )
    assert re.search(r"hbert_upper: computing on cpu in \w+ with \d+ threads?, layers' matrices in int8", said)


def test_what_no_table_has_is_looked_up_as_in_process(folder: Path, server: TritonServer) -> None:
    store, base = tiny.opened(folder)
    names: tuple[Quantization, ...] = ("none", "int8")
    plain, quantised = (
        open_lineage(store, base, [store.table(tiny.PLOT, "root").parent], dtype=torch.float32, quantization=name)
        for name in names
    )
    encoder = base.load_text_encoder()
    differing = 0
    for text in tiny.sentences(30, seed=11):
        (encoded,) = encoder.encode([text])
        served = served_hidden(server, "alpha", text).numpy()
        exact, found = (one.hidden_states(encoded.ids, [len(encoded.ids)]) for one in (plain, quantised))
        # One thread or two may round the last bits otherwise, which may move a code by one.
        off, off_plain = (np.square(served - one).mean() for one in (found, exact))
        assert off <= off_plain
        differing += bool(off < 0.1 * off_plain)
    assert quantised.windows_by_level["computed"] > 100
    assert differing > 20


def test_benchmarks_measure_both_side_by_side_and_how_far_logits_move(folder: Path) -> None:
    store, base = tiny.opened(folder)
    tiny.make_bank(store, base, [tiny.load_tenant(store, base, name) for name in sorted(tiny.TASKS)])
    (folder / POOL_FILE).write_text("\n".join(tiny.sentences(60)) + "\n")
    report = int8(folder / "models", 1, 0.1, folder / "int8.svg")
    assert [row["where"] for row in report.rows] == [
        "upper layers, in-process",
        "lower layers for new text, in-process",
        "known text through Triton, gRPC",
        "new text through Triton, gRPC",
    ]
    assert all(row["requests_per_s"] > 0 and row["int8_requests_per_s"] > 0 for row in report.rows)
    assert 0 < report.settings["logits_moved_of_variance"] < 0.05
    assert 0 < report.settings["windows_moved_of_variance"] < 0.05
    assert (folder / "int8.svg").read_text().startswith("<?xml")
    plain, quantised = response(folder / "models", [100], 1, 1.0, "pool", None, ["none", "int8"]).rows
    assert (plain["quantization"], quantised["quantization"]) == ("none", "int8")
    for name in ("none", "int8"):
        log = (folder / f"triton-bench-{name}.log").read_text()
        (said,) = re.findall(r"hbert_plot: what no table has is computed (.*)", log)
        assert ("with layers' matrices in int8" in said) == (name == "int8")
    assert all(row["requests"] and not row["lost"] + row["failed"] + row["refused"] for row in (plain, quantised))
