"""A tenant's leaf of the version tree: its adapter, its head and its labels, as one artifact of a few hundred KB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.numpy import save as packed_arrays

from hplm.adapters import students as student_files
from hplm.adapters.packed import Adapter, Float32, PackedAdapter, Place, all_finite, pack, unpack
from hplm.adapters.students import Form, Students
from hplm.errors import ConfigError, CorruptArtifactError, WrongBaseError, unusable
from hplm.store import artifact
from hplm.tasks.task_loader import task_named

KIND = "tenant"
Pooling = Literal["cls", "mean"]


@dataclass(frozen=True)
class Head:
    """A linear layer over a token or the pooled text: `weight` `[n * labels, H]`, `bias` `[n * labels]`.

    n is the card's `word_window`: a tagging's outputs for so many words, see `hplm.tasks.words.word_logits`.

    `transitions` `[1 + labels, labels]` of a tagging are scores of a linear-chain CRF: of each tag for the first word, then of
    each tag after each tag. None for other tasks, and for taggings without a CRF.
    """

    weight: Float32
    bias: Float32
    transitions: Float32 | None = None

    @property
    def arrays(self) -> dict[str, Float32]:
        """The arrays that the head has, by name."""
        return {name: array for name, array in vars(self).items() if array is not None}

    def word_window(self, labels: Sequence[str]) -> int:
        """Return the number of words whose outputs decide one tag, as the card has it."""
        return len(self.bias) // len(labels)


@dataclass(frozen=True)
class TenantCard:
    """A tenant without its weights.

    `texts`: 1, or 2 if a request is a pair. `labels` of a regression are REGRESSION_LABEL alone. `example`, and `example_pair`
    for a pair, are a text to try. `adapter_at`: where in each layer the adapter stands; cards without it are older than the
    choice. `transitions`: whether the head has transitions, without which its taggings would be wrong. `word_window`: the
    number of words whose outputs decide a tag, by the mean of each word's tokens; 1 means the word's first token alone.
    `students`: the number of students that may answer together, see `hplm.adapters.students`, and `student_form` their form.
    """

    name: str
    task: str  # its name in `hplm.tasks.task_loader`
    labels: tuple[str, ...]
    base: str
    pooling: str = "mean"  # a Pooling: what the head of a classification or regression reads, all tokens or `[CLS]`
    example: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    texts: int = 1
    example_pair: str = ""
    adapter_at: Place = "attention"
    transitions: bool = False
    word_window: int = 1
    students: int = 1
    student_form: Form = "shared"

    @property
    def outputs(self) -> int:
        """Number of the head's outputs."""
        return self.word_window * len(self.labels)

    @property
    def is_ordinary(self) -> bool:
        """Whether the tenant is one adapter and one head, without students."""
        return self.students == 1 and self.student_form == "shared"


@dataclass(frozen=True)
class Tenant:
    """One tenant at one version: `version` is the fingerprint of its files, so equal versions are equal weights.

    `packed` is the adapter, or the first student's; of the form `own` it has no layers. An ordinary tenant has no `students`.
    """

    card: TenantCard
    packed: PackedAdapter
    head: Head
    version: str = ""
    students: Students | None = None

    @property
    def adapter(self) -> Adapter:
        """The adapter's weights, unpacked; slow."""
        return unpack(self.packed)

    @property
    def is_finite(self) -> bool:
        """Whether no weight is NaN or infinite."""
        is_finite = all(map(all_finite, (self.packed.weights, *self.head.arrays.values())))
        return is_finite and (self.students is None or self.students.is_finite)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in host memory."""
        students = 0 if self.students is None else self.students.num_bytes
        return self.packed.weights.nbytes + sum(array.nbytes for array in self.head.arrays.values()) + students

    @cached_property
    def key(self) -> str:
        """The key of the tenant's adapter slot. An update has another key, so its weights never mix with those it replaces."""
        return f"{self.card.name}@{self.version}"

    @property
    def adapters(self) -> tuple[PackedAdapter, ...]:
        """The adapters of all students, of an ordinary tenant its adapter; none of the form `own`."""
        return (self.packed,) if self.students is None else self.students.packed

    def with_adapters(self, adapters: Sequence[PackedAdapter]) -> Tenant:
        """Return the tenant with the same adapters in another form, in the order of `adapters`."""
        if not adapters:
            return self
        students = None if self.students is None else replace(self.students, packed=tuple(adapters))
        return replace(self, packed=adapters[0], students=students)

    @cached_property
    def members(self) -> tuple[Tenant, ...]:
        """Each student as a tenant with an adapter slot of its own. The first has the key of the tenant itself."""
        if self.students is None or self.students.own is not None:
            return (self,)
        return tuple(
            Tenant(self.card, packed, self.head, f"{self.version}#{number}" if number else self.version)
            for number, packed in enumerate(self.students.packed)
        )


def save(folder: Path, tenant: Tenant) -> None:
    """Publish a tenant. Raises ConfigError if its students have own layers that are too large."""
    assert tenant.card.is_ordinary == (tenant.students is None)
    with artifact.publish(folder, KIND, card_meta(tenant.card)) as partial:
        arrays: dict[str, Any] = {f"head.{name}": array for name, array in tenant.head.arrays.items()}
        if tenant.adapters:
            arrays |= {f"adapter.{name}": array for name, array in vars(tenant.adapter).items()}
        if tenant.students is not None:
            arrays |= student_files.arrays_of(tenant.students)
        # Of a full disk safetensors' own writing raises another error than OSError.
        (partial / "weights.safetensors").write_bytes(
            packed_arrays({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        )


def card_meta(card: TenantCard) -> dict[str, Any]:
    """Return the card in JSON values. Newer fields are left out if older servers can serve the tenant without them."""
    meta = asdict(card)
    if card.adapter_at == "attention":
        del meta["adapter_at"]
    if not card.transitions:
        del meta["transitions"]
    if card.word_window == 1:
        del meta["word_window"]
    if card.students == 1:
        del meta["students"]
    if card.student_form == "shared":
        del meta["student_form"]
    return meta


def load_card(folder: Path) -> TenantCard:
    """Load a tenant's card without its weights."""
    return parse_card(artifact.read(folder, KIND).meta, str(folder))


def parse_card(meta: dict[str, Any], where: str) -> TenantCard:
    """Parse a card from JSON values. Raises CorruptArtifactError, which names `where`."""
    if unknown := sorted(meta.keys() - {field.name for field in fields(TenantCard)}):
        raise CorruptArtifactError(
            f"{where}: made by another version of hplm, which knows {unknown[0]!r}; update this one"
        )
    try:
        card = TenantCard(**{**meta, "labels": tuple(meta["labels"])})
        if not card.labels or not all(isinstance(label, str) for label in card.labels):
            raise ValueError(f"labels {card.labels!r}")
        task = task_named(card.task)
        if card.pooling not in get_args(Pooling):
            raise ValueError(f"pooling {card.pooling!r}")
        if card.adapter_at not in get_args(Place):
            raise ValueError(f"an adapter at {card.adapter_at!r}")
        if card.texts not in (1, 2) or (card.texts == 2 and not task.takes_pairs):
            raise ValueError(f"a {card.task} over {card.texts!r} texts")
        if card.transitions not in (False, task.has_transitions):
            raise ValueError(f"transitions {card.transitions!r} of a {card.task}")
        if type(card.word_window) is not int or card.word_window not in task.word_windows:
            raise ValueError(f"a word window of {card.word_window!r} of a {card.task}")
        if type(card.students) is not int or card.students < 1 or card.student_form not in get_args(Form):
            raise ValueError(f"{card.students!r} students of the form {card.student_form!r}")
        if task.reads_tokens and not card.is_ordinary:
            raise ValueError(f"students of a {card.task}")
        if task.fixed_labels not in (None, card.labels):
            raise ValueError(f"labels {card.labels!r} of a {card.task}")
        return card
    except ConfigError as error:
        raise CorruptArtifactError(f"{where}: {error}; install the package that has the task") from error
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptArtifactError(f"{where}: not a tenant's card ({error!r}); fine-tune it again") from error


def load(folder: Path, *, fingerprint: str, name: str | None = None, verify: bool = True) -> Tenant:
    """Load the tenant called `name`, by default the name of its folder, of the base with `fingerprint`.

    Raises MissingArtifactError, WrongBaseError, CorruptArtifactError or StoreUnavailableError, and OSError if the manifest
    cannot be read.
    """
    stored = artifact.read(folder, KIND)
    card = parse_card(stored.meta, str(folder))
    if card.name != (name or folder.name):
        # Adapter slots are found by name, so a copied folder must never be served as the original tenant.
        raise CorruptArtifactError(f"{folder} holds the card of another tenant; fine-tune it again")
    if card.base != fingerprint:
        raise WrongBaseError(
            f"{folder} was fine-tuned over base {card.base}, this base is {fingerprint}: fine-tune it again"
        )
    try:
        # Read once and checked in memory, because the file may be replaced between two reads.
        arrays = load_arrays(stored.read_bytes("weights.safetensors", verify=verify))
        head = Head(arrays["head.weight"], arrays["head.bias"], arrays.get("head.transitions"))
        packed, students = _parse_adapters(card, arrays)
    except OSError as error:
        raise unusable(f"{folder}: the weights cannot be read", error) from error
    except (KeyError, ValueError, SafetensorError) as error:
        raise CorruptArtifactError(f"{folder}: the weights cannot be read ({error!r}); fine-tune it again") from error
    labels = len(card.labels)
    moves = None if head.transitions is None else head.transitions.shape
    fits = moves == ((1 + labels, labels) if card.transitions else None)
    outputs = card.outputs
    if not fits or head.weight.shape != (outputs, packed.hidden_size) or head.bias.shape != (outputs,):
        raise CorruptArtifactError(
            f"{folder}: the weights do not fit each other or the {labels} labels; fine-tune it again"
        )
    return Tenant(card, packed, head, stored.fingerprint, students)


def _parse_adapters(card: TenantCard, arrays: Mapping[str, Any]) -> tuple[PackedAdapter, Students | None]:
    """Parse the adapter and the students of a file's arrays. Raises KeyError or ValueError."""
    if card.student_form == "own":
        students = student_files.parse(arrays, card.students, None)
        assert students.own is not None
        return student_files.no_adapter(students.own.hidden_size), students
    adapter = Adapter(*(arrays[f"adapter.{name}"] for name in ("down", "down_bias", "up", "up_bias")))
    layers, reduced, hidden = adapter.down.shape
    wanted = [(layers, reduced), (layers, hidden, reduced), (layers, hidden)]
    if [array.shape for array in (adapter.down_bias, adapter.up, adapter.up_bias)] != wanted:
        raise ValueError("the adapter's parts do not fit each other")
    packed = pack(adapter)
    return packed, None if card.is_ordinary else student_files.parse(arrays, card.students, packed)
