"""Tritons after 24.10 ask models for more, and refuse names and requests that 24.10 takes."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hplm.access.keys import HEADER
from hplm.core import roles, wire
from hplm.serving.manage_stage import LANES

ROOT = Path(__file__).parents[4]
BACKENDS = sorted(path.name for path in (ROOT / "backends").iterdir() if (path / "model.py").is_file())
# From 26.05 on, no header of such a name is forwarded, and no request may have a parameter of it.
RESERVED = re.compile("sequence_id|sequence_start|sequence_end|priority|timeout|headers|binary_data_output|triton_.*")
# From 25.10 on, the most bytes of a request over HTTP.
MOST_HTTP_BYTES = 64 << 20


@pytest.fixture
def load_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Load a backend's model class over a stand-in for the Python module that only Triton's stubs have."""
    before = set(sys.modules)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", MagicMock(spec=ModuleType))

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"backend_{name}", ROOT / "backends" / name / "model.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.TritonPythonModel

    yield load
    for name in set(sys.modules) - before:
        if name.startswith("hplm.triton."):
            del sys.modules[name]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_running", [True, False])
def test_a_model_is_ready_while_its_stage_runs(
    load_backend: Callable[[str], Any], backend: str, is_running: bool
) -> None:
    model_class = load_backend(backend)
    model = model_class.__new__(model_class)
    model.stage = model._stage = SimpleNamespace(is_running=is_running)
    assert model.is_ready() is is_running


def test_no_parameter_and_no_forwarded_header_has_a_reserved_name() -> None:
    assert [name for name in (HEADER, wire.INNER, wire.PROBE) if RESERVED.fullmatch(name)] == []


def test_every_model_has_a_portable_name() -> None:
    names = [path.name for path in (ROOT / "model_repository").iterdir() if path.is_dir()]
    roles.check_model_name("my-base.v2")
    names += roles.names(roles.base_roles("my-base.v2"))
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*", name)] == []


def test_the_largest_manage_request_is_below_the_limit_of_a_request_over_http() -> None:
    assert max(lane.most_bytes for lane in LANES) < MOST_HTTP_BYTES


def test_no_client_needs_shared_memory_with_the_server() -> None:
    code = [path.read_text() for folder in ("clients", "loadtest", "src") for path in (ROOT / folder).rglob("*.py")]
    assert code
    assert [text for text in code if "register_system_shared_memory" in text or "set_shared_memory" in text] == []
