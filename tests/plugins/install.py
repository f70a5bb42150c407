"""Installing a package for one test, so that Triton's stubs find its entry points too."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest


def install(folder: Path, module: str, source: str, entry_points: str, patch: pytest.MonkeyPatch) -> Path:
    """Make a virtual environment in `folder` that has all packages of this one, and a package with one module.

    The stubs of servers run in it as long as `patch` lasts. Returns the folder of its packages.
    """
    venv.create(folder, symlinks=True)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    ours = next(path for path in sys.path if path.endswith("site-packages"))
    (site_packages / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    (site_packages / f"{module}.py").write_text(source)
    about = site_packages / f"{module}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(entry_points)
    patch.setattr(sys, "executable", str(folder / "bin" / "python3"))
    return site_packages


def install_centre_token(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Install the lower form `centre`, for the stubs and for this process."""
    source = (Path(__file__).parent / "centre_token.py").read_text()
    packages = install(folder, "centre_token", source, "[hplm.lower_forms]\ncentre = centre_token:CentreToken\n", patch)
    patch.syspath_prepend(packages)
