"""Imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CORE = (
    "hplm.adapters",
    "hplm.plot",
    "hplm.scheduling",
    "hplm.store",
    "hplm.models.base_folder",
    "hplm.runtime.rate_limited_log",
    "hplm.core.settings",
    "hplm.runtime.crash_points",
    "hplm.runtime.daemon_threads",
    "hplm.tasks.decode",
    "hplm.errors",
    "hplm.core.numbers",
    "hplm.core.names",
    "hplm.runtime.process",
    "hplm.core.text",
    "hplm.runtime.tracing",
    "hplm.core.wire",
)
# Folder -> the prefixes of hplm that it may import, and the third-party roots that it may not.
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "src/hplm/plot": (CORE, ("torch", "tritonclient", "triton_python_backend_utils")),
    "src/hplm/adapters": (CORE, ("torch", "tritonclient", "triton_python_backend_utils")),
    "src/hplm/scheduling": (
        ("hplm.scheduling", "hplm.errors"),
        ("torch", "tritonclient", "triton_python_backend_utils"),
    ),
    "src/hplm/store": (
        ("hplm.store", "hplm.errors", "hplm.core.numbers", "hplm.runtime.crash_points"),
        ("torch", "tritonclient", "triton_python_backend_utils"),
    ),
    "src/hplm/nn": ((*CORE, "hplm.nn"), ("tritonclient", "triton_python_backend_utils")),
    "src/hplm/manage": ((*CORE, "hplm.manage"), ("torch", "tritonclient", "triton_python_backend_utils")),
    "src/hplm/serving": (
        (*CORE, "hplm.nn", "hplm.manage", "hplm.serving"),
        ("tritonclient", "triton_python_backend_utils"),
    ),
    "src/hplm/triton": ((*CORE, "hplm.triton"), ("torch", "tritonclient")),
    "backends": (
        (*CORE, "hplm.manage", "hplm.serving", "hplm.triton"),
        ("torch", "tritonclient", "triton_python_backend_utils"),
    ),
    "clients": (
        (
            "hplm.core.wire",
            "hplm.errors",
            "hplm.reporting.command_options",
            "hplm.reporting.terminal_text",
            "hplm_client",
        ),
        ("torch", "tokenizers", "sqlalchemy", "triton_python_backend_utils"),
    ),
    "builder": (("hplm.", "hplm_builder"), ("tritonclient", "triton_python_backend_utils")),
    "loadtest": (("hplm.", "hplm_client", "hplm_loadtest"), ("triton_python_backend_utils",)),
}


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "hplm"}
    return found - {"hplm"}


@pytest.mark.parametrize("folder", RULES)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    allowed, forbidden = RULES[folder]
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imports_of(path):
            assert name.split(".")[0] not in forbidden, f"{path} imports {name}"
            if name.startswith("hplm"):
                assert name.startswith(allowed), f"{path} imports {name}"


def test_plain_values_import_neither_torch_nor_each_others_users() -> None:
    for name in ("errors", "config", "names", "wire", "decode"):
        for found in imports_of(ROOT / "src" / "hplm" / f"{name}.py"):
            assert found.split(".")[0] != "torch"
            assert not found.startswith("hplm") or found in ("hplm.errors", "hplm.core.names", "hplm.core.wire")


def test_only_the_translation_modules_import_tritons_python_module() -> None:
    users = {
        p.name for p in ROOT.rglob("*.py") if ".venv" not in p.parts and "triton_python_backend_utils" in imports_of(p)
    }
    assert users == {"translate.py", "metrics.py", "waking.py"}


@pytest.mark.parametrize("command", ["serve", "store", "predict", "tenant", "domain", "job", "upload"])
def test_a_command_that_computes_nothing_does_not_wait_for_torch(command: str) -> None:
    program = f"import sys, hplm_cli; hplm_cli.make_app({command!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
