"""The repository of `hplm bench students`: students of seeded weights beside the models that they are compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress
from torch import nn

from hplm.core.settings import REDUCTION_FACTOR, WHOLE, EncodeSettings, LookupSettings
from hplm.engine.ngram_encoder.encoder import NgramEncoder
from hplm.errors import ArtifactError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.store.layout import Store
from hplm_builder.convert.whole import save_whole_base
from hplm_builder.export.model_folders import export
from hplm_builder.export.register import ROOT_OF_WHOLE, fresh_bank, name_root, publish_bank, served
from hplm_builder.fleet.benchmark_repository import (
    PLOT,
    TEXTS,
    Shape,
    bench_base,
    check_same_fleet,
    draw_texts,
    make_fleet,
    make_pool_plot,
)

TRUNK_LAYERS = 2
# Names of the models. `hbert` is the default base, as everywhere.
STUDENTS, TEACHER, HALF, HBERT = "students", "teacher", "half", "hbert"


def make_students_repository(
    folder: Path, shape: Shape, tenants: int, most_students: int, seed: int, progress: Progress
) -> Path:
    """Build `store/`, `texts.txt` and `models/` in `folder`, if they are missing, and return `models`.

    The models are a whole base as teacher, its half with every second layer, an n-gram base, and a trunk of two layers. All
    have the same synthetic tenants. Over the trunk, tenants have 1 to `most_students` students in turn. Weights are good for
    measurements of speed, not for answers. Raises ConfigError if the folder was built otherwise.
    """
    about: dict[str, Any] = {"shape": shape, "students": most_students, "tenants": tenants, "seed": seed}
    check_same_fleet(folder, about)
    models, store = folder / "models", Store(folder / "store")
    if models.is_dir():
        return models
    steps = progress.add_task(f"{shape}: bases, tables, tenants, models", total=2)
    teacher = bench_base(store, shape, WHOLE, seed)
    depth = teacher.config.upper_layers
    hbert = bench_base(store, shape, NgramEncoder.form, seed)
    trunk = shallow_base(store, teacher, f"{shape}-trunk", TRUNK_LAYERS, is_trunk=True)
    half = shallow_base(store, teacher, f"{shape}-half", math.ceil(depth / 2), is_trunk=False)
    texts = draw_texts(teacher.load_text_encoder(), seed)
    make_pool_plot(store, hbert, texts, progress)
    (folder / TEXTS).write_text("\n".join(texts) + "\n")
    progress.update(steps, advance=1)
    serve_side_by_side(
        store,
        models,
        {HBERT: hbert, TEACHER: teacher, HALF: half, STUDENTS: trunk},
        tenants,
        most_students,
        seed,
        progress,
    )
    progress.update(steps, advance=1)
    return models


def serve_side_by_side(
    store: Store,
    models: Path,
    compared: Mapping[str, Base],
    tenants: int,
    most_students: int,
    seed: int,
    progress: Progress,
) -> None:
    """Publish synthetic tenants over each base, and write a model of each base, by name, to `models`.

    Over a trunk, tenants have 1 to `most_students` students in turn.
    """
    partial = models.with_name(f".{models.name}")
    for name, base in compared.items():
        root = ROOT_OF_WHOLE if base.config.is_whole else PLOT
        name_root(store, base, root)
        if not any(version.base == base.config.name for version in served(store)):
            bank, most = fresh_bank(store, name), most_students if base.is_trunk else 1
            numbers = range(1, most + 1)
            make_fleet(store, base, bank, tenants, seed, progress, students=numbers)
            publish_bank(store, base, root, bank)
        look_up = LookupSettings(store="", base=base.config.name, table=root)
        encode = EncodeSettings(store="", base=base.config.name, reduction_factor=REDUCTION_FACTOR)
        export(store, partial, look_up, encode, name=name)
    partial.rename(models)


def evenly_spaced(depth: int, layers: int) -> list[int]:
    """Return `layers` of `depth` layers, counted from 0, at equal distances, the last one among them."""
    return [-(-depth * (index + 1) // layers) - 1 for index in range(layers)]


def shallow_base(store: Store, parent: Base, name: str, layers: int, *, is_trunk: bool) -> Base:
    """Publish a whole base with evenly spaced layers of `parent`, without any training."""
    try:
        return bases.load(store.base(name))
    except ArtifactError:
        pass
    adapted = 0 if is_trunk else math.ceil(layers / 2)
    config = replace(parent.config, name=name, upper_layers=layers, adapter_layers=adapted)
    upper = parent.load_upper()
    upper.layers = nn.ModuleList(upper.layers[i] for i in evenly_spaced(parent.config.upper_layers, layers))
    about: dict[str, Any] = {"original": "none: layers of another base, for measurements of speed"}
    if is_trunk:
        about["trunk"] = {"of": parent.config.name, "fingerprint": parent.fingerprint, "layers": layers, "error": 1.0}
    tokenizer = parent.tokenizer_path.read_bytes()
    return save_whole_base(store, config, upper.get_buffer("words"), upper.state_dict(), tokenizer, about)
