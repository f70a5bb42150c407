"""Changes JSON values step by step as a malformed request has them: wrong types, missing and repeated keys, extreme values."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Nesting that fits in the proxy's largest body.
DEEPEST = 100_000
LONGEST_TEXT = 50_000
# Larger than any body that the proxy takes.
MOST_BYTES = 1_000_000
ODD_INTEGERS = (0, -1, 1, 255, 2**15, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1)
ODD_NUMBERS = (*ODD_INTEGERS, 2**64, 10**30, -0.0, 0.5, 1e-320, 1e308, -1e308)
ODD_TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\n",
        "a\0b",
        "../../../etc/passwd",
        "/etc/passwd",
        "%s%n%x",
        "' OR 1=1 --",
        "${7*7}",
        "-1",
        "null",
    ),
    *(
        "\u202e\ufeff",
        "\ud800",
        "é" * 300,
        "🙂" * 100,
        "TEXT",
        "hbert",
        "__class__",
        "a" * 64,
        "A" * 4096,
        "*",
        "{}",
        "true",
    ),
)


@dataclass(frozen=True)
class Raw:
    """Bytes that stand in JSON as they are, whether they are JSON or not."""

    content: bytes


@dataclass(frozen=True)
class Pairs:
    """A JSON object as a list of keys and values, so that a key may occur twice."""

    items: tuple[tuple[str, Any], ...]


ODD_TOKENS = tuple(
    map(
        Raw,
        (
            *(
                b"NaN",
                b"Infinity",
                b"-Infinity",
                b"1e999",
                b"-1e999",
                b"0x10",
                b"01",
                b"+1",
                b".5",
                b"1.",
                b"'text'",
                b"nul",
            ),
            *(
                b'"\xff\xfe"',
                b'"\xc0\xaf"',
                b'"\xed\xa0\x80"',
                b'"\xf8\x88\x80\x80\x80"',
                b'"\\ud800"',
                b'"\\u0000"',
                b'"\\x"',
            ),
            *(
                b"",
                b",",
                b"]",
                b"}",
                b'"',
                b"9" * 400,
                b"1" + b"0" * 5000,
                b'"' + b"\\" * 9 + b'"',
                b"/* */ 1",
                b"\xef\xbb\xbf1",
            ),
        ),
    )
)


def odd_value(rng: random.Random) -> Any:
    """Return a value of any JSON type, or bytes that are no JSON."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind in (1, 2):
        return rng.choice(ODD_NUMBERS)
    if kind in (3, 4):
        return rng.choice(ODD_TEXTS)
    if kind == 5:
        return rng.choice(([], {}, [[]], [None], {"": 0}, [1, "a", None, {}], {"a": {"b": {"c": []}}}, [[1], [2, 3]]))
    if kind == 6:
        return rng.choice(ODD_TOKENS)
    return nested(rng)


def nested(rng: random.Random) -> Raw:
    """Return arrays or objects in each other, most often a few, at times DEEPEST."""
    depth = rng.choice((3, 50, 600, 5000)) if rng.random() < 0.9 else DEEPEST
    if rng.random() < 0.5:
        return Raw(b"[" * depth + (b"]" * depth if rng.random() < 0.7 else b""))
    few = min(depth, 20_000)
    return Raw(b'{"a":' * few + b"1" + (b"}" * few if rng.random() < 0.7 else b""))


def mutated(value: Any, rng: random.Random) -> Any:
    """Return the value with a change somewhere in it. Each place is equally likely."""
    return _changed_at(value, rng.choice(_places(value)), rng)


def repeated(value: Any, times: int) -> Any:
    """Return a list or a text repeated, at most so often that its JSON has MOST_BYTES."""
    return value * max(1, min(times, MOST_BYTES // (size_of(value) + 1)))


def size_of(value: Any) -> int:
    """Return about how many bytes the JSON of a value has."""
    if isinstance(value, Raw):
        return len(value.content)
    if isinstance(value, str | bytes):
        return len(value) + 2
    return 8 + sum(map(size_of, _children(value)))


def _places(value: Any, place: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the positions of all values in a value, itself included. Longer lists are entered at their first items only."""
    found = [place]
    for index, child in enumerate(_children(value)[:12]):
        found += _places(child, (*place, index))
    return found


def _children(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, Pairs):
        return [child for _, child in value.items]
    return value if isinstance(value, list) else []


def _changed_at(value: Any, place: tuple[int, ...], rng: random.Random) -> Any:
    if not place:
        return _changed(value, rng)
    index, rest = place[0], place[1:]
    if isinstance(value, list):
        return [_changed_at(child, rest, rng) if number == index else child for number, child in enumerate(value)]
    items = _items(value)
    key, child = items[index]
    items[index] = (key, _changed_at(child, rest, rng))
    return Pairs(tuple(items)) if isinstance(value, Pairs) else dict(items)


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items if isinstance(value, Pairs) else value.items())


def _changed(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.35:
        return odd_value(rng)
    if isinstance(value, dict | Pairs):
        return _changed_object(_items(value), rng)
    if isinstance(value, list):
        return _changed_list(value, rng)
    if isinstance(value, str):
        return _changed_text(value, rng)
    if isinstance(value, bool) or value is None:
        return rng.choice((str(value).lower(), 0, 1, [value]))
    if isinstance(value, int | float):
        return rng.choice((*ODD_NUMBERS, value + 1, value - 1, -value, str(value), float(value), [value], bool(value)))
    return odd_value(rng)


def _changed_object(items: list[tuple[str, Any]], rng: random.Random) -> Any:
    change = rng.randrange(5)
    if not items or change == 0:
        name = rng.choice(("unknown", "", "action", "__proto__", "x" * 300, "\0", "classification", "tenants"))
        return Pairs((*items, (name, odd_value(rng))))
    index = rng.randrange(len(items))
    key, child = items[index]
    if change == 1:
        return dict(items[:index] + items[index + 1 :])
    if change == 2:
        return Pairs((*items, (key, child if rng.random() < 0.5 else odd_value(rng))))
    if change == 3:
        items[index] = (rng.choice((key.upper(), key + " ", key[:-1], f"{key}\0", "")), child)
        return Pairs(tuple(items))
    return [child for _, child in items]


def _changed_list(values: list[Any], rng: random.Random) -> Any:
    change = rng.randrange(6)
    if not values or change == 0:
        return [*values, odd_value(rng)]
    if change == 1:
        return values[:-1]
    if change == 2:
        return repeated(values, rng.choice((2, 2, 3, 70)))
    if change == 3:
        return [values]
    if change == 4:
        return values[0]
    return []


def _changed_text(text: str, rng: random.Random) -> Any:
    change = rng.randrange(8)
    if change == 0:
        return text[: rng.randrange(len(text) + 1)]
    if change == 1:
        return text + rng.choice(ODD_TEXTS)
    if change == 2:
        return text.swapcase()
    if change == 3:
        return repeated(text or "x", rng.choice((2, 40, max(1, LONGEST_TEXT // max(1, len(text))))))
    if change == 4:
        return Raw(b'"' + text.encode("utf-8", "replace").replace(b'"', b"")[:100] + b'\xff\x80"')
    if change == 5:
        return [text]
    return rng.choice(ODD_TEXTS)


def to_json(value: Any) -> bytes:
    """Return a value in JSON, with its `Raw` and `Pairs`."""
    if isinstance(value, Raw):
        return value.content
    if isinstance(value, bytes):
        return b'"' + value + b'"'
    if isinstance(value, dict | Pairs):
        return b"{" + b",".join(json.dumps(key).encode() + b":" + to_json(child) for key, child in _items(value)) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(to_json, value)) + b"]"
    return json.dumps(value).encode()


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a few of them changed, left out, put in or repeated."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        until = min(len(changed), at + rng.choice((1, 1, 4, 30)))
        change = rng.randrange(5)
        if change == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif change == 1:
            del changed[at:until]
        elif change == 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 4, 9)))
        elif change == 3:
            changed[at:at] = changed[at:until]
        else:
            del changed[at:]
    return bytes(changed)
