"""Starting a server that needs keys, what its restricted APIs answer, and a server without keys."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from hplm.access.gate import PROOF_BYTES
from hplm.core import wire
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.store.layout import Store
from hplm.triton.launcher.server import TritonServer
from tests import tiny
from tests.triton.access.making import PROTOCOLS, Place, answered, ask, texts, with_key

pytestmark = pytest.mark.triton
Hplm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_repository(tmp_path_factory.mktemp("start"))


def test_hplm_serve_with_keys_asks_its_tenants_itself(models: Path, hplm: Hplm) -> None:
    done = hplm("serve", "--check", "--keys", "--models", str(models))
    assert done.returncode == 0, done.stderr
    assert {one["tenant"] for one in json.loads(done.stdout)} == set(tiny.TASKS)


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_hplm_serve_starts_nothing_that_other_machines_reach_without_keys(
    models: Path, hplm: Hplm, check: tuple[str, ...]
) -> None:
    done = hplm("serve", *check, "--models", str(models), "--host", "0.0.0.0")
    assert done.returncode != 0
    assert "START_FAILED: --host 0.0.0.0: other machines could call every tenant" in done.stderr


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        (r',\n *#[^\n]*\n[^\n]*\n *\{ name: "KEY"[^}]*\},\n *\{ name: "PROOF"[^}]*\}', "", "--keep-settings"),
        (r"\Z", "response_cache { enable: true }\n", "has response_cache"),
    ],
    ids=["an earlier export", "a cache"],
)
def test_a_model_that_cannot_check_keys_is_not_loaded_with_keys(
    tmp_path: Path, hplm: Hplm, pattern: str, replacement: str, said: str
) -> None:
    models = tiny.make_repository(tmp_path)
    config = models / "hbert_plot" / "config.pbtxt"
    changed, count = re.subn(pattern, replacement, config.read_text())
    assert count == 1
    config.write_text(changed)
    done = hplm("serve", "--check", "--keys", "--models", str(models))
    assert done.returncode != 0
    assert said in done.stderr


def test_an_earlier_export_is_served_without_keys(tmp_path: Path, hplm: Hplm) -> None:
    models = tiny.make_repository(tmp_path)
    for config in models.glob("*/config.pbtxt"):
        lines = [line for line in config.read_text().splitlines() if not re.search('(name|key): "(KEY|PROOF)"', line)]
        # The last of a list has no comma after it.
        text = re.sub(r",(\s*(#[^\n]*\n\s*)*\])", r"\1", "\n".join(lines))
        config.write_text(text)
    done = hplm("serve", "--check", "--models", str(models))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_without_keys_a_key_and_a_proof_are_ignored(server: TritonServer, tiny_models: Path, protocol: str) -> None:
    place = Place(server, Store(tiny_models.parent / "store"), tiny_models)
    plain, keyed = texts(["alpha"]), with_key(texts(["alpha"]), "anything")
    keyed[wire.PROOF] = np.zeros((1, PROOF_BYTES), np.uint8)
    labels = [answered(ask(place, protocol, "hbert", given))[wire.LABEL].tolist() for given in (plain, keyed)]
    assert labels[0] == labels[1]


HTTP_PATHS = {
    "v2/repository/index": b"{}",
    "v2/repository/models/hbert/unload": b"{}",
    "v2/models/hbert_plot/stats": None,
    "v2/logging": None,
    "v2/trace/setting": None,
    "v2/models/hbert_plot/trace/setting": None,
    "v2/systemsharedmemory/status": None,
    "v2/cudasharedmemory/status": None,
}


@pytest.mark.parametrize("path", HTTP_PATHS)
@pytest.mark.parametrize("headers", [{}, {"hplm-launcher": "guessed"}], ids=["none", "guessed"])
def test_a_client_uses_no_restricted_api_over_http(server: TritonServer, path: str, headers: dict[str, str]) -> None:
    request = urllib.request.Request(f"{server.ports.http_url}/{path}", HTTP_PATHS[path], headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        LOCAL_HTTP.open(request, timeout=20)
    with refused.value as answer:
        assert answer.code == 403


@pytest.mark.parametrize(
    "method",
    [
        "get_model_repository_index",
        "get_inference_statistics",
        "get_log_settings",
        "get_trace_settings",
        "get_system_shared_memory_status",
        "get_cuda_shared_memory_status",
    ],
)
def test_a_client_uses_no_restricted_api_over_grpc(server: TritonServer, method: str) -> None:
    (secret,) = server.launcher_headers.values()
    with closing(tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.ports.grpc}")) as triton:
        for headers in ({}, {"triton-grpc-protocol-hplm-launcher": "guessed"}):
            with pytest.raises(InferenceServerException, match="This protocol is restricted"):
                getattr(triton, method)(headers=headers)
        getattr(triton, method)(headers={"triton-grpc-protocol-hplm-launcher": secret})


def test_the_launcher_uses_restricted_apis(server: TritonServer) -> None:
    with closing(tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.ports.http}")) as triton:
        index = triton.get_model_repository_index(headers=dict(server.launcher_headers))
    assert {model["name"] for model in index if model.get("state") == "READY"} == server.models
