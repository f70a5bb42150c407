"""Finding a Triton installation: NVIDIA's container, a folder, or the wheel `nvidia-pytriton`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import TritonNotFoundError
from hplm.triton.releases import RELEASE_24_10, ServerVersion, parse_version

# The wheel does not say which server it carries.
WHEEL_SERVERS = {"0.7.0": RELEASE_24_10}


@dataclass(frozen=True)
class TritonInstall:
    """A Triton installation: where it comes from, its binary, its Python backend's files and its libraries.

    `version` is the server's version, None if the installation does not say it.
    """

    origin: str
    binary: Path
    python_backend_files: tuple[Path, ...]
    library_folders: tuple[Path, ...]
    version: ServerVersion | None = None


def find_triton() -> TritonInstall:
    """Find `$TRITON_ROOT`, else `/opt/tritonserver`, else the wheel `nvidia-pytriton`. Raises TritonNotFoundError."""
    tried = []
    for origin, root in (("$TRITON_ROOT", os.environ.get("TRITON_ROOT")), ("/opt/tritonserver", "/opt/tritonserver")):
        if not root:
            continue
        if (Path(root) / "bin" / "tritonserver").is_file():
            return _from_root(origin, Path(root).resolve())
        if origin == "$TRITON_ROOT":
            raise TritonNotFoundError(f"TRITON_ROOT is {root}, but there is no {root}/bin/tritonserver")
        tried.append(root)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise TritonNotFoundError(
            f"no Triton in {', '.join(tried)} and no wheel: set TRITON_ROOT or `pip install nvidia-pytriton==0.7.0`"
        )
    return _from_wheel(Path(spec.submodule_search_locations[0]))


def search_paths(install: TritonInstall) -> dict[str, list[str]]:
    """Return the folders that must come first in environment variables, by variable.

    A stub runs the first `python3` of the PATH.
    """
    return {
        "LD_LIBRARY_PATH": [str(folder) for folder in install.library_folders],
        "PATH": [str(Path(sys.executable).parent)],
    }


def _from_root(origin: str, root: Path) -> TritonInstall:
    folder = root / "backends" / "python"
    if not folder.is_dir():
        raise TritonNotFoundError(f"{root} has no Python backend in {folder}")
    named = root / "TRITON_VERSION"
    version = parse_version(named.read_text()) if named.is_file() else None
    return TritonInstall(
        origin, root / "bin" / "tritonserver", tuple(sorted(folder.iterdir())), (root / "lib",), version
    )


def _from_wheel(package: Path) -> TritonInstall:
    root = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.is_file():
        raise TritonNotFoundError(f"the wheel nvidia-pytriton has no stub for Python {python}")
    files = [path for path in (root / "backends" / "python").iterdir() if path.name != stub.name]
    libraries = [package.parent / "nvidia_pytriton.libs"]
    if libpython := sysconfig.get_config_var("LIBDIR"):
        libraries.append(Path(libpython))
    version = WHEEL_SERVERS.get(importlib.metadata.version("nvidia-pytriton"))
    return TritonInstall(
        "wheel nvidia-pytriton", root / "bin" / "tritonserver", (*files, stub), tuple(libraries), version
    )
