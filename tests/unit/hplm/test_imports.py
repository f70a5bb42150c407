"""Imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLAIN = ("hplm.errors", "hplm.core", "hplm.runtime")
STORED = (*PLAIN, "hplm.cascade", "hplm.store", "hplm.quotas", "hplm.registry", "hplm.access")
DATA = (*STORED, "hplm.profiles", "hplm.plot", "hplm.adapters", "hplm.scheduling", "hplm.tasks")
COMPUTING = (*DATA, "hplm.models", "hplm.engine")
NO_TORCH = ("torch", "tritonclient", "triton_python_backend_utils")
NO_TRITON = ("tritonclient", "triton_python_backend_utils")
# Folder -> the prefixes of hplm that it may import besides itself, and the third-party packages that it may not import.
RULES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "src/hplm/core": (("hplm.errors",), NO_TORCH),
    "src/hplm/runtime": (("hplm.errors",), NO_TORCH),
    "src/hplm/cascade": (PLAIN, NO_TORCH),
    "src/hplm/reporting": (PLAIN, NO_TORCH),
    "src/hplm/store": (PLAIN, NO_TORCH),
    "src/hplm/quotas": (PLAIN, NO_TORCH),
    "src/hplm/registry": ((*PLAIN, "hplm.cascade", "hplm.store", "hplm.quotas"), NO_TORCH),
    "src/hplm/metering": (PLAIN, NO_TORCH),
    "src/hplm/access": ((*PLAIN, "hplm.store", "hplm.quotas", "hplm.registry"), NO_TORCH),
    "src/hplm/profiles": ((*PLAIN, "hplm.store"), NO_TORCH),
    "src/hplm/housekeeping": (STORED, NO_TORCH),
    "src/hplm/plot": ((*PLAIN, "hplm.store"), NO_TORCH),
    "src/hplm/adapters": ((*STORED, "hplm.tasks"), NO_TORCH),
    "src/hplm/tasks": (PLAIN, NO_TRITON),
    "src/hplm/scheduling": (("hplm.errors",), NO_TORCH),
    "src/hplm/workloads": ((*PLAIN, "hplm.reporting"), NO_TORCH),
    "src/hplm/placement": (
        (*PLAIN, "hplm.reporting", "hplm.workloads", "hplm.store", "hplm.profiles", "hplm.scheduling"),
        NO_TORCH,
    ),
    "src/hplm/models": ((*PLAIN, "hplm.store", "hplm.plot", "hplm.adapters"), NO_TRITON),
    "src/hplm/engine": ((*DATA, "hplm.models"), NO_TRITON),
    "src/hplm/jobs": ((*STORED, "hplm.housekeeping"), NO_TORCH),
    "src/hplm/manage": (
        (*STORED, "hplm.housekeeping", "hplm.adapters", "hplm.metering", "hplm.tasks", "hplm.models.base_folder"),
        NO_TORCH,
    ),
    "src/hplm/serving": ((*COMPUTING, "hplm.manage", "hplm.metering"), NO_TRITON),
    "src/hplm/triton/workarounds": ((*PLAIN, "hplm.triton.releases"), ("torch", "tritonclient")),
    "src/hplm/triton/bridge": (
        (*PLAIN, "hplm.access", "hplm.metering", "hplm.triton.workarounds", "hplm.serving.request"),
        ("torch", "tritonclient"),
    ),
    "src/hplm/triton/stages": (
        (
            *PLAIN,
            "hplm.access",
            "hplm.cascade",
            "hplm.metering",
            "hplm.scheduling.batch_pacing",
            "hplm.serving",
            "hplm.triton",
        ),
        ("torch", "tritonclient"),
    ),
    "src/hplm/triton/launcher": (
        (*PLAIN, "hplm.access.access_mode", "hplm.triton.releases", "hplm.triton.workarounds"),
        NO_TORCH,
    ),
    "backends": (
        (*STORED, "hplm.manage", "hplm.jobs", "hplm.serving", "hplm.triton"),
        NO_TORCH,
    ),
    "clients": (
        ("hplm.errors", "hplm.core", "hplm.access.keys", "hplm.reporting", "hplm.tasks"),
        ("torch", "tokenizers", "sqlalchemy", "triton_python_backend_utils"),
    ),
    "builder": (("hplm.",), NO_TRITON),
    "loadtest": (("hplm.", "hplm_client"), ("triton_python_backend_utils",)),
}
# Modules in one folder: more are hard to find a way in.
MOST_MODULES = 15


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names if node.module == "hplm"}
    return found - {"hplm"}


def package_of(folder: str) -> str:
    """Return the package whose modules lie in a folder."""
    return {"builder": "hplm_builder", "clients": "hplm_client", "loadtest": "hplm_loadtest"}.get(
        folder, folder.removeprefix("src/").replace("/", ".")
    )


@pytest.mark.parametrize("folder", RULES)
def test_a_folder_imports_only_what_lies_below_it(folder: str) -> None:
    allowed, forbidden = RULES[folder]
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for name in imports_of(path):
            assert name.split(".")[0] not in forbidden, f"{path} imports {name}"
            if name.startswith("hplm"):
                assert name.startswith((package_of(folder), *allowed)), f"{path} imports {name}"


def test_every_room_of_the_library_has_a_rule() -> None:
    rooms = {path.parent for path in (ROOT / "src" / "hplm").rglob("*.py") if path.parent != ROOT / "src" / "hplm"}
    for room in rooms:
        name = str(room.relative_to(ROOT))
        assert name == "src/hplm/triton" or any(name == rule or name.startswith(f"{rule}/") for rule in RULES), name


@pytest.mark.parametrize("top", ["src", "builder", "clients", "loadtest", "tests"])
def test_a_room_holds_at_most_fifteen_modules(top: str) -> None:
    rooms = Counter(path.parent for path in (ROOT / top).rglob("*.py") if path.name != "__init__.py")
    assert {str(room): count for room, count in rooms.items() if count > MOST_MODULES} == {}


def test_what_reads_a_file_for_clients_too_needs_the_standard_library_alone() -> None:
    for name in ("columns", "text_lines", "characters"):
        for found in imports_of(ROOT / "src" / "hplm" / "core" / f"{name}.py"):
            if found.startswith("hplm"):
                assert found in ("hplm.errors", "hplm.core.text_lines", "hplm.core.characters")
            else:
                assert found.split(".")[0] in sys.stdlib_module_names


def test_only_the_translation_modules_import_tritons_python_module() -> None:
    module = "triton_python_backend_utils"
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name != ".venv"]
    # A file without the name is not parsed: there are hundreds of files.
    named = [path for folder in folders for path in folder.rglob("*.py") if module in path.read_text()]
    users = {path.name for path in named if module in imports_of(path)}
    assert users == {"translate.py", "metrics.py", "kept_requests.py", "finished_requests.py", "model_calls.py"}


@pytest.mark.parametrize(
    "command",
    ["serve", "health", "store", "base", "place", "predict", "key", "audit", "tenant", "domain", "job", "upload"],
)
def test_a_command_that_computes_nothing_does_not_wait_for_torch(command: str) -> None:
    program = f"import sys, hplm_cli; hplm_cli.make_app({command!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_tasks_import_torch_in_functions_alone() -> None:
    names = ", ".join(f"hplm.tasks.{path.stem}" for path in (ROOT / "src/hplm/tasks").glob("[!_]*.py"))
    program = f"import sys, {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_one_module_reads_tokenizers_so_that_all_see_the_same_tokens() -> None:
    paths = [
        path
        for folder in ("src", "backends", "builder", "clients", "loadtest")
        for path in (ROOT / folder).rglob("*.py")
    ]
    readers = (
        "Tokenizer.from_file",
        "Tokenizer.from_str",
        "Tokenizer.from_buffer",
        "Tokenizer.from_pretrained",
        "TokenizerFast(",
    )
    found = {path for path in paths if any(reader in path.read_text() for reader in readers)}
    assert found == {ROOT / "src" / "hplm" / "core" / "text.py"}
