"""Writing the Triton model folders: the roles of `model_repository/` with their settings beside them."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

from hplm.config import PlotSettings, UpperSettings
from hplm.errors import DataError
from hplm.store import artifact
from hplm.store.layout import Store
from hplm.triton.server import ROLES, share_folder


def export(store: Store, target: Path, plot: PlotSettings, upper: UpperSettings) -> None:
    """Write `target` beside its place, then rename; model folders that stood there are replaced, anything else is refused.

    `store` in the settings is filled in here, relative to their own folder, so that store and models can move together.
    Raises DataError where `target` holds something that is not ours.
    """
    target = target.resolve()
    if target == share_folder("model_repository").resolve():
        raise DataError(f"{target} holds the templates; choose another folder")
    if target.exists() and (foreign := {path.name for path in target.iterdir()} - set(ROLES)):
        raise DataError(f"{target} holds {sorted(foreign)[0]!r}, which is no model of hplm; choose an empty folder")
    with artifact.replacing(target) as partial:
        for role in ROLES:
            version = partial / role / "1"
            version.mkdir(parents=True)
            shutil.copy2(share_folder("model_repository") / role / "config.pbtxt", partial / role / "config.pbtxt")
            if role == "hbert":
                # Triton wants the folder of a version even of an ensemble; copying tools drop empty ones.
                (version / "README").write_text("An ensemble has no files; Triton wants its version's folder.\n")
                continue
            values = asdict(plot if role == "hbert_plot" else upper)
            values["store"] = os.path.relpath(store.root.resolve(), target / role / "1")
            (version / "settings.json").write_text(json.dumps(values, indent=2) + "\n")
