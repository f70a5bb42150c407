"""`hplm eval cuts`: length of the n-grams, and layers that the windows go through (HMI Tables 8 and 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hplm.errors import ConfigError, MissingArtifactError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.base_folder import KIND
from hplm.reporting.benchmark_result import Report
from hplm.store import artifact
from hplm.store.layout import Store
from hplm_builder.convert.base import DEFAULT_BASE
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.eval_task import EvalTask
from hplm_builder.evaluation.search.summary import Row, result_rows
from hplm_builder.evaluation.search.variants import (
    RATES,
    FeatureSource,
    Variant,
    computed_features,
    hbert_body,
    with_adapters,
)


@dataclass(frozen=True)
class Cut:
    """A way to cut the default base in two: n-grams of `window` tokens, through `window_layers`; 3 upper layers always."""

    window: int
    window_layers: int

    @property
    def name(self) -> str:
        """The base's; the shipped one is cut in the default way."""
        if self == DEFAULT_CUT:
            return DEFAULT_BASE
        return f"{DEFAULT_BASE}-n{self.window}-w{self.window_layers}"

    def command(self, store: Path) -> str:
        """What makes it."""
        place = f"--store {store}"
        if self == DEFAULT_CUT:
            return f"hplm build base --shipped {place}"
        return f"hplm build base --name {self.name} --window {self.window} --window-layers {self.window_layers} {place}"


DEFAULT_CUT = Cut(3, 3)
# Table 8: n at as many layers. Table 10: layers at the same n; the paper's 2, 4, 6, 8 of twelve are these of six.
CUTS = (Cut(2, 3), DEFAULT_CUT, Cut(5, 3), Cut(3, 1), Cut(3, 2), Cut(3, 4))


def find_bases(store: Path, folders: Sequence[Path]) -> list[Base]:
    """The bases in `folders`, or without any those of all CUTS. Raises MissingArtifactError that names what makes the rest."""
    if folders:
        # Rows go by the names: `.` has none.
        return [bases.load(folder.resolve()) for folder in folders]
    places = {cut: Store(store).base(cut.name) for cut in CUTS}
    missing = [cut for cut, place in places.items() if not (place / artifact.MANIFEST).is_file()]
    if missing:
        commands = "\n".join(f"  {cut.command(store)}" for cut in missing)
        raise MissingArtifactError(
            f"{len(missing)} of {len(CUTS)} bases are not there. Convert them first, each in about an hour on two cores, or "
            f"compare others with --base FOLDER:\n{commands}"
        )
    return [bases.load(place) for place in places.values()]


def cut_variants(found: Sequence[Base], device: torch.device) -> list[Variant]:
    """Adapters over each base, by the same search; every window is computed, so that no table is needed."""
    names = [base.folder.name for base in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two --base folders are called {twice[0]!r}: rows go by the name")

    def variant(base: Base) -> Variant:
        def about(task: EvalTask) -> dict[str, Any]:
            return {"base": base.fingerprint}

        source = FeatureSource(f"computed-{base.folder.name}", lambda task, told: computed_features(base.load_lower()))
        return Variant(base.folder.name, base, source, hbert_body(base, device), RATES["hbert"], with_adapters(about))

    return [variant(base) for base in found]


def with_shapes(rows: Sequence[Row], found: Sequence[Base]) -> list[Row]:
    """The same rows with how each base is cut, and how far conversion has left it from the original."""
    shapes = {base.folder.name: _shape(base) for base in found}
    return [{**row, **shapes[row["base"]]} for row in rows]


def _shape(base: Base) -> dict[str, Any]:
    config = base.config
    shape: dict[str, Any] = {
        "window": config.window,
        "window_layers": config.window_layers,
        "upper_layers": config.upper_layers,
    }
    conversion = artifact.read(base.folder, KIND).meta.get("conversion")
    return {**shape, "relative_error": conversion["after"]["relative"]} if conversion else shape


@eval_command
def cuts(
    shared: EvalOptions,
    base: Annotated[
        list[Path] | None,
        typer.Option("--base", help="Folder of a converted base; repeat for more. Default: six in --store."),
    ] = None,
) -> None:
    """HMI Tables 8 and 10: n-grams of 2, 3 and 5 tokens, and 1 to 4 layers for the windows, adapters by the same search.

    Says which bases are to be converted first, and by which commands. Examples:

      hplm eval cuts --data data/chemprot --data data/sst-2 --resume runs-cuts --json cuts.json

      hplm eval cuts --root data --base build/demo/store/bases/minilm-l6 --base other/bases/bert-6-4
    """
    found = find_bases(shared.store, base or ())
    tasks, limits, where = shared.read()
    study, answer = shared.run(tasks, cut_variants(found, where), limits, where)
    rows = with_shapes(result_rows(study, answer, "base"), found)
    Report("cuts", study_settings(study, answer, {}), rows).publish(shared.json_file)
