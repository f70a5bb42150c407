"""Options that `hplm store` and `hplm worker` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the artifacts that are served.")]
RegistryOption = Annotated[
    str,
    typer.Option(
        "--registry",
        envvar="HPLM_REGISTRY",
        help="URL of a registry that several servers share; default: the file in the store.",
    ),
]
DEFAULT_STORE = Path("build/demo/store")
