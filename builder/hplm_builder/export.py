"""Writing the Triton model folders: the roles of `model_repository/` with their settings beside them."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path

from hplm.config import PlotSettings, UpperSettings
from hplm.store.layout import Store
from hplm.triton.server import ROLES, share_folder


def export(store: Store, target: Path, plot: PlotSettings, upper: UpperSettings) -> None:
    """Write `target` in one rename; what stood there is replaced. `store` in the settings is filled in here.

    Settings point to the store relative to their own folder, so that store and models can move together.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    for role in ROLES:
        version = partial / role / "1"
        version.mkdir(parents=True)
        shutil.copy2(share_folder("model_repository") / role / "config.pbtxt", partial / role / "config.pbtxt")
        final = target.resolve() / role / "1"
        if role == "hbert":
            # Triton wants the folder of a version even of an ensemble; copying tools drop empty ones.
            (version / "README").write_text("An ensemble has no files; Triton wants its version's folder.\n")
            continue
        settings = {
            **asdict(plot if role == "hbert_plot" else upper),
            "store": os.path.relpath(store.root.resolve(), final),
        }
        (version / "settings.json").write_text(json.dumps(settings, indent=2) + "\n")
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
