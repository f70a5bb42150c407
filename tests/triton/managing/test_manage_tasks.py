"""Every kind of task through a real server: labelled files uploaded, trained by a worker, asked over both protocols."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hplm_builder.data.labelled import LabelledData
from hplm_client import Client, ManageClient

from hplm import errors
from hplm.adapters import tenant as tenants
from hplm.core.settings import REDUCTION_FACTOR, EncodeSettings
from hplm.core.text import TextOrPair
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.tasks.examples import LabelledText
from hplm.tasks.tagging import WORD_WINDOW
from hplm.tasks.task_loader import task_named
from tests import tasks, tiny
from tests.managed import FAST, Place, expected_logits

pytestmark = pytest.mark.triton
EXAMPLES = 40


@dataclass(frozen=True)
class Kind:
    """A kind of task: examples, the file that they are uploaded in, what a tenant that was trained on it is judged by."""

    data: Callable[[], LabelledData]
    ending: str
    score: str
    # A kind that no update may bring.
    other: str


KINDS = {
    "tagging": Kind(tasks.place_data, ".conll", "f1", "pairs"),
    "pairs": Kind(tasks.seen_data, ".jsonl", "accuracy", "regression"),
    "regression": Kind(tasks.count_data, ".tsv", "pearson", "regression-of-pairs"),
    "regression-of-pairs": Kind(lambda: tasks.count_data(pairs=True), ".jsonl", "pearson", "regression"),
}


def written(examples: Sequence[LabelledText], ending: str) -> str:
    """Labelled examples as a file of that ending."""
    if ending == ".conll":
        return "\n".join("".join(f"{word} {tag}\n" for word, tag in tagged(one)) for one in examples)
    if ending == ".tsv":
        return "sentence\tscore\n" + "".join(f"{one.text}\t{one.label}\n" for one in examples)
    return "".join(json.dumps({"text": one.text, "text_pair": one.pair, "label": one.label}) + "\n" for one in examples)


def tagged(example: LabelledText) -> Iterator[tuple[str, str]]:
    """Words, of which an entity is one here, and their tags."""
    starts = {entity.start: entity.label for entity in example.entities}
    position = 0
    for word in example.text.split():
        yield word, f"B-{starts[position]}" if position in starts else "O"
        position += len(word) + 1


@pytest.fixture(scope="module")
def base(place: Place) -> Base:
    return bases.load(place.store.base("tiny"))


def file_of(kind: str, folder: Path, part: str = "train") -> Path:
    data = KINDS[kind].data()
    path = folder / f"{kind}-{part}{KINDS[kind].ending}"
    path.write_text(written(data.labelled[part][:EXAMPLES], KINDS[kind].ending))
    return path


def check_served(place: Place, base: Base, tenant: str, texts: Sequence[TextOrPair]) -> None:
    """Over both protocols: logits as the slow reference has them, and what they mean by the tenant's own labels."""
    card = tiny.load_tenant(place.store, base, tenant)
    chosen = tenants.load_card(tiny.folder_of(place.store, tenant)).about["adapter_width"]
    factor = EncodeSettings.reduction_factor if chosen == "wide" else REDUCTION_FACTOR
    assert card.packed.reduced_size == base.config.hidden_size // factor
    encoder = base.load_text_encoder()
    for asked in texts:
        wanted = expected_logits(place.store, base, tenant, asked)
        tokens = encoder.encode([asked])[0].tokens
        if card.card.task == "tagging":
            assert card.card.word_window == WORD_WINDOW
        spans, _ = task_named(card.card.task).decode(wanted, card.card.labels, tokens, card.head.transitions)
        texts_asked = [asked] if isinstance(asked, str) else asked
        for protocol in ("http", "grpc"):
            with Client(place.url(protocol)) as client:
                answer = client.predict(tenant, *texts_asked, logits=True)
            assert answer.logits is not None
            np.testing.assert_allclose(answer.logits, wanted, atol=0.05, rtol=0.02)
            answered = [(one.label, one.start, one.end) for one in answer.spans]
            assert answered == [(one.label, one.start, one.end) for one in spans]
            for one, meant in zip(answer.spans, spans, strict=True):
                assert one.score == pytest.approx(meant.score, abs=0.05)


@pytest.mark.parametrize(
    ("kind", "protocol"),
    [("tagging", "http"), ("pairs", "grpc"), ("regression", "http"), ("regression-of-pairs", "grpc")],
)
def test_a_tenant_of_any_task_is_made_asked_and_updated(
    place: Place, base: Base, tmp_path: Path, kind: str, protocol: str
) -> None:
    data, score = KINDS[kind].data(), KINDS[kind].score
    texts = [example.text_or_pair for example in data.test[:2]]
    train, test, other = file_of(kind, tmp_path), file_of(kind, tmp_path, "test"), file_of(KINDS[kind].other, tmp_path)
    with place.working(), ManageClient(place.url(protocol)) as manage:
        manage.wait(manage.create_tenant(kind, train=manage.upload(train), test=manage.upload(test), settings=FAST))
        first = manage.show_tenant(kind).about
        assert (first["task"], set(first["labels"])) == (data.task, set(data.labels))
        assert {f"dev_{score}", f"test_{score}"} <= first["scores"].keys()
        assert [row["epoch"] for row in first["curve"]] == [1, 2]
        best = max(row["dev"] for row in first["curve"])
        assert best == pytest.approx(first["scores"][f"dev_{score}"], abs=1e-4)
        place.await_seen()
        check_served(place, base, kind, texts)
        with pytest.raises(errors.DataError):
            manage.wait(manage.update_tenant(kind, train=manage.upload(other), settings=FAST))
        result = manage.wait(manage.update_tenant(kind, train=manage.upload(train), settings=FAST)).result
        assert result is not None
        second = manage.show_tenant(kind)
        assert second.about["curve"]
        assert [kept.version for kept in second.versions] == ([1, second.version] if result["published"] else [1])
        assert second.versions[0].scores == first["scores"]
        assert f"dev_{score}" in second.versions[-1].scores
        place.await_seen()
        check_served(place, base, kind, texts)
        manage.delete_tenant(kind)
