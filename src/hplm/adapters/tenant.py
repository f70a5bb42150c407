"""A tenant's leaf of the version tree: its adapter, its head and its labels, as one artifact of a few hundred KB."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hplm.errors import CorruptArtifactError, TenantNameError, WrongBaseError
from hplm.store import artifact

KIND = "tenant"
Task = Literal["classification", "tagging"]
Float32 = npt.NDArray[np.float32]
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]{0,62}[a-z0-9])?")


def check_name(name: str) -> str:
    """The name itself, where it may name a tenant. Raises TenantNameError, which does not repeat a long or odd name."""
    if not _NAME.fullmatch(name):
        raise TenantNameError(
            "a tenant name is 1 to 64 lower-case letters, digits, '-', '_' or '.', and starts and ends with a letter or digit"
        )
    return name


@dataclass(frozen=True)
class Adapter:
    """Bottleneck blocks of the upper layers (HMI eq. 1), L layers, r bottleneck: `x + W_up relu(W_down x)`.

    `down` `[L, r, H]`, `down_bias` `[L, r]`, `up` `[L, H, r]`, `up_bias` `[L, H]`.
    """

    down: Float32
    down_bias: Float32
    up: Float32
    up_bias: Float32


@dataclass(frozen=True)
class Head:
    """A linear layer over a token or the pooled text: `weight` `[labels, H]`, `bias` `[labels]`."""

    weight: Float32
    bias: Float32


@dataclass(frozen=True)
class TenantCard:
    """What a tenant is, apart from its weights."""

    name: str
    task: Task
    labels: tuple[str, ...]
    base: str
    pooling: str = "mean"  # or cls: what a classification's head sees
    example: str = ""
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Tenant:
    """One tenant at one version."""

    card: TenantCard
    adapter: Adapter
    head: Head


def save(folder: Path, tenant: Tenant) -> None:
    """Publish a tenant."""
    with artifact.publish(folder, KIND, asdict(tenant.card)) as partial:
        arrays = {f"adapter.{name}": array for name, array in vars(tenant.adapter).items()}
        arrays |= {f"head.{name}": array for name, array in vars(tenant.head).items()}
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}, partial / "weights.safetensors"
        )


def load_card(folder: Path) -> TenantCard:
    """A tenant's card without its weights."""
    meta = artifact.read(folder, KIND).meta
    try:
        card = TenantCard(**{**meta, "labels": tuple(meta["labels"])})
        if card.task not in get_args(Task) or card.pooling not in ("cls", "mean"):
            raise ValueError(f"task {card.task!r}, pooling {card.pooling!r}")
        return card
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptArtifactError(f"{folder}: not a tenant's card ({error!r}); fine-tune it again") from error


def load(folder: Path, *, fingerprint: str, verify: bool = True) -> Tenant:
    """A tenant of the base with `fingerprint`. Raises WrongBaseError or CorruptArtifactError."""
    card = load_card(folder)
    if card.name != folder.name:
        # Slots go by name: a copied folder must never be served as the tenant it was copied from.
        raise CorruptArtifactError(f"{folder} holds the card of another tenant; fine-tune it again")
    if card.base != fingerprint:
        raise WrongBaseError(
            f"{folder} was fine-tuned over base {card.base}, this base is {fingerprint}: fine-tune it again"
        )
    stored = artifact.read(folder, KIND)
    if verify:
        stored.verify()
    try:
        arrays = load_file(stored.path("weights.safetensors"))
        adapter = Adapter(*(arrays[f"adapter.{name}"] for name in ("down", "down_bias", "up", "up_bias")))
        head = Head(arrays["head.weight"], arrays["head.bias"])
        layers, reduced, hidden = adapter.down.shape
        shapes = [array.shape for array in (adapter.down_bias, adapter.up, adapter.up_bias, head.weight, head.bias)]
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise CorruptArtifactError(f"{folder}: the weights cannot be read ({error!r}); fine-tune it again") from error
    labels = len(card.labels)
    if shapes != [(layers, reduced), (layers, hidden, reduced), (layers, hidden), (labels, hidden), (labels,)]:
        raise CorruptArtifactError(
            f"{folder}: the weights do not fit each other or the {labels} labels; fine-tune it again"
        )
    return Tenant(card, adapter, head)
