"""Well-formed manage requests, made from the classes that the manager parses them into."""

from __future__ import annotations

import dataclasses
import random
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hplm.manage.request_parts import Source
from hplm.manage.service import ManageService

# Values by the name of a text field; other texts are ids that exist nowhere.
_TEXTS: dict[str, tuple[str, ...]] = {
    "prefix": ("", "ten", "a"),
    "after": ("", "m"),
    "sha256": ("0" * 64, "ab" * 32),
    "name": ("texts.jsonl", "corpus.txt", "a.csv"),
    "data": ("", "aGVsbG8=", "QUJD" * 100),
    "path": ("texts.jsonl", "/etc/passwd", "../../registry.sqlite"),
    "subject": ("tenant:films", "key:abcdefgh234567ab"),
    "key": ("abcdefgh234567ab",),
    "task": ("classification", "tagging", "regression"),
    "teacher": ("auto", "full"),
}
# The same for numbers.
_NUMBERS: dict[str, tuple[float, ...]] = {
    "accuracy": (0.5, 0.9),
    "latency_ms": (1, 2.5),
    "learning_rate": (1e-3,),
    "learning_rates": (1e-4, 1e-3),
    "most": (1, 3),
    "least": (1, 2),
}
ACTIONS = tuple(ManageService.REQUESTS)


def manage_request(rng: random.Random, victims: list[str], bases: list[str]) -> dict[str, Any]:
    """Return a request of a random action, with all of its required fields and some of the others.

    The tenant is one of `victims` or unknown, so that the request harms no other tenant.
    """
    action = rng.choice(ACTIONS)
    kind = ManageService.REQUESTS.get(action, ManageService.REQUESTS["job.show"])
    names = {
        "tenant": [*victims, "nobody"],
        "base": bases,
        "levels": bases,
        "domain": ["nowhere", "general"],
        "parent": ["root"],
    }
    made = _fields(kind, rng, names)
    return {"action": action, **made}


def _fields(kind: type[Any], rng: random.Random, names: dict[str, list[str]]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    if kind is Source:
        # A source has one of its two fields.
        name = rng.choice(list(hints))
        return {name: _value(name, hints[name], rng, names)}
    return {
        field.name: _value(field.name, hints[field.name], rng, names)
        for field in dataclasses.fields(kind)
        if _is_required(field) or rng.random() < 0.4
    }


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(name: str, hint: Any, rng: random.Random, names: dict[str, list[str]]) -> Any:
    """Return a JSON value of a field's type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _fields(hint, rng, names)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _value(name, rng.choice([one for one in get_args(hint) if one is not types.NoneType]), rng, names)
    if origin is Literal:
        return rng.choice(get_args(hint))
    if origin is tuple:
        return [_value(name, get_args(hint)[0], rng, names) for _ in range(rng.choice((1, 2)))]
    if hint is bool:
        return rng.random() < 0.5
    if hint in (int, float):
        return rng.choice(_NUMBERS.get(name, (1, 2, 100)))
    return rng.choice(names.get(name) or _TEXTS.get(name, ("c0ffee", "none")))
