"""Options that several commands of the builder have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hplm_builder.fleet.demo import DEMO_FOLDER

StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the store.")]
BaseOption = Annotated[str, typer.Option("--base", help="Name of the base.")]
PlotOption = Annotated[str, typer.Option("--plot", help="Name of the PLOT.")]
DEFAULT_STORE = DEMO_FOLDER / "store"
