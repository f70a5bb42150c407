"""`hplm eval cuts`: bases with other n-gram lengths and window layers (HMI Tables 8 and 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hplm.engine.lower_layers import load_lower
from hplm.engine.windows.encoder import WindowEncoder
from hplm.errors import ConfigError, MissingArtifactError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.base_folder import KIND
from hplm.reporting.benchmark_result import Report
from hplm.store import artifact
from hplm.store.layout import Store
from hplm_builder.convert.base import WINDOWS_BASE
from hplm_builder.evaluation.search.eval_options import EvalOptions, eval_command, study_settings
from hplm_builder.evaluation.search.served_domain import computed_features
from hplm_builder.evaluation.search.study import RATES, FeatureSource, Variant, hbert_body, with_adapters
from hplm_builder.evaluation.search.summary import Row, result_rows


@dataclass(frozen=True)
class Cut:
    """A way to cut MiniLM: windows of `window` tokens go through `window_layers` layers; there are 3 upper layers."""

    window: int
    window_layers: int

    @property
    def name(self) -> str:
        """The name of the base with this cut. The shipped base has the default cut."""
        if self == DEFAULT_CUT:
            return WINDOWS_BASE
        return f"{WINDOWS_BASE}-n{self.window}-w{self.window_layers}"

    def command(self, store: Path) -> str:
        """Return the command that makes the base."""
        store_option = f"--store {store}"
        if self == DEFAULT_CUT:
            return f"hplm build base --shipped --name {WINDOWS_BASE} {store_option}"
        return (
            f"hplm build base --name {self.name} --lower-form {WindowEncoder.form} --window {self.window} "
            f"--window-layers {self.window_layers} {store_option}"
        )


DEFAULT_CUT = Cut(3, 3)
# Table 8 varies n with 3 layers. Table 10 varies the layers with n = 3; its 2, 4, 6 and 8 of 12 layers are 1 to 4 of our 6.
CUTS = (Cut(2, 3), DEFAULT_CUT, Cut(5, 3), Cut(3, 1), Cut(3, 2), Cut(3, 4))


def find_bases(store: Path, folders: Sequence[Path]) -> list[Base]:
    """Load the bases in `folders`, or those of all CUTS. Raises MissingArtifactError that names the commands to make them."""
    if folders:
        # Resolved, because rows are named after the folder, and `.` has no name.
        return [bases.load(folder.resolve()) for folder in folders]
    places = {cut: Store(store).base(cut.name) for cut in CUTS}
    missing = [cut for cut, place in places.items() if not (place / artifact.MANIFEST).is_file()]
    if missing:
        commands = "\n".join(f"  {cut.command(store)}" for cut in missing)
        raise MissingArtifactError(
            f"{len(missing)} of {len(CUTS)} bases are missing. Convert them first, each takes about an hour on two cores, or "
            f"compare other bases with --base FOLDER:\n{commands}"
        )
    return [bases.load(place) for place in places.values()]


def cut_variants(compared: Sequence[Base], device: torch.device) -> list[Variant]:
    """Return a variant for each base: adapters, with every window computed so that no table is needed."""
    names = [base.folder.name for base in compared]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two --base folders are called {twice[0]!r}: rename one, because rows are named after the folders"
        )

    def variant(base: Base) -> Variant:
        source = FeatureSource(f"computed-{base.folder.name}", lambda task, report: computed_features(load_lower(base)))
        about = with_adapters(lambda task: {"base": base.fingerprint})
        return Variant(base.folder.name, base, source, hbert_body(base, device), RATES["hbert"], about)

    return [variant(base) for base in compared]


def with_shapes(rows: Sequence[Row], compared: Sequence[Base]) -> list[Row]:
    """Return the rows with the cut of each base and with the distance to the original after its conversion."""
    shapes: dict[str, dict[str, Any]] = {}
    for base in compared:
        shape = {key: getattr(base.config, key) for key in ("window", "window_layers", "upper_layers")}
        if conversion := artifact.read(base.folder, KIND).meta.get("conversion"):
            shape["relative_error"] = conversion["after"]["relative"]
        shapes[base.folder.name] = shape
    return [{**row, **shapes[row["base"]]} for row in rows]


@eval_command
def cuts(
    shared: EvalOptions,
    base: Annotated[
        list[Path] | None,
        typer.Option("--base", help="Folder of a converted base; repeat for more. Default: the six cuts in --store."),
    ] = None,
) -> None:
    """Compare n-grams of 2, 3 and 5 tokens, and windows through 1 to 4 layers, as HMI Tables 8 and 10. Adapters train above.

    If bases are missing, prints the commands that convert them. Examples:

      hplm eval cuts --data data/chemprot --data data/sst-2 --resume runs-cuts --json cuts.json

      hplm eval cuts --root data --base build/demo/store/bases/minilm-l6 --base other/bases/bert-6-4
    """
    compared = find_bases(shared.store, base or ())
    tasks, limits, device = shared.read()
    study, best = shared.run(tasks, cut_variants(compared, device), limits, device)
    rows = with_shapes(result_rows(study, best, "base"), compared)
    Report("cuts", study_settings(study, best, {}), rows).publish(shared.json_file)
