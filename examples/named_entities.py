"""Create a tenant that marks people and places in a text, use it, delete it: .venv/bin/python examples/named_entities.py"""

import itertools
import json
import os
import tempfile
import time
from pathlib import Path

from hplm_client import Client, ManageClient

FORMS = ("{} lives in {}", "{} has never been to {}", "Yesterday {} wrote from {}", "We met {} on the way to {}")
PEOPLE = ("Ada Lovelace", "Mr Brown", "Maria Garcia", "Tom", "Li Wei", "Anna Karlsson")
PLACES = ("New York", "Paris", "the Netherlands", "Kyoto", "Buenos Aires", "Rome")


def example(form: str, person: str, place: str) -> dict[str, object]:
    """Return a sentence and the positions of its entities."""
    text = form.format(person, place)
    entities = (("PERSON", person), ("PLACE", place))
    return {
        "text": text,
        "entities": [
            {"label": label, "start": text.index(words), "end": text.index(words) + len(words)}
            for label, words in entities
        ],
    }


address = os.environ.get("HPLM_GRPC", "grpc://127.0.0.1:8001")
with tempfile.TemporaryDirectory() as folder, ManageClient(address) as manage, Client(address) as client:
    train = Path(folder) / "train.jsonl"
    train.write_text("\n".join(json.dumps(example(*parts)) for parts in itertools.product(FORMS, PEOPLE, PLACES)))
    manage.wait(manage.create_tenant("who-where", train=manage.upload(train), settings={"epochs": 16}))
    time.sleep(1)  # a published version is served within a second
    answer = client.predict("who-where", "Jane Miller wrote to Tom from Buenos Aires")
    for span in answer.spans:
        print(f"{span.label:6} {answer.text[span.start : span.end]!r} ({span.score:.2f})")
    manage.delete_tenant("who-where")
