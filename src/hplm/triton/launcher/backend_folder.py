"""The backend directory: Triton's Python backend and hplm's backends in one folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from hplm.triton.launcher.install import TritonInstall


def share_folder(name: str) -> Path:
    """Return the folder `backends` or `model_repository`, of the checkout or of the installed wheel."""
    package = Path(__file__).resolve().parents[2]
    shipped = package / "_share" / name
    return shipped if shipped.is_dir() else package.parents[1] / name


def assemble_backends(install: TritonInstall, folder: Path, extra: Sequence[Path] = ()) -> None:
    """Make `folder` a backend directory: Triton's Python backend, hplm's backends, and the backends below `extra`."""
    python = folder / "python"
    python.mkdir(parents=True)
    for source in install.python_backend_files:
        if source.is_file():
            shutil.copy2(source, python / source.name)
    # Triton follows links to folders, not links to files.
    for backends in (share_folder("backends"), *extra):
        for source in backends.resolve().iterdir():
            if (source / "model.py").is_file():
                (folder / source.name).symlink_to(source, target_is_directory=True)
