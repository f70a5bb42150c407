"""A virtual environment with a third party's package, in which a server's stubs run."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, entry_points: str) -> Path:
    """Make an environment with the packages of the test's environment and a package of one module; return its site-packages."""
    venv.create(folder, symlinks=True)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    (site_packages / f"{module}.py").write_text(source)
    about = site_packages / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python3"))
    return site_packages
