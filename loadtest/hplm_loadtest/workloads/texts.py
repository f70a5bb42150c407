"""What is sent: short real texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from hplm.errors import ConfigError, DataError
from hplm.reporting.samples import unseen_paragraphs

Kind = Literal["pool", "unseen", "shuffled", "examples"]
POOL_FILE = "texts.txt"
ORDERS = 30


def texts(kind: str, models: Path) -> list[str]:
    """`pool`: the texts that a fleet's tables know (`hplm build fleet`). `unseen`: sentences of Wikipedia that no table
    counted. `shuffled`: their words in thirty random orders each, so that texts and their n-grams hardly ever come again.
    `examples`: the example of each tenant of the repository.
    """
    if kind == "pool":
        return pool(models)
    if kind == "unseen":
        return unseen_sentences(200)
    if kind == "shuffled":
        rng = np.random.default_rng(0)
        return [" ".join(rng.permutation(one.split())) for one in texts("unseen", models) for _ in range(ORDERS)]
    if kind == "examples":
        # Here and below: reading a store imports torch, which sending a file of texts does not need.
        from hplm_loadtest.benchmarks.models import examples

        return examples(models)
    raise ConfigError(f"no texts {kind!r}; there are {', '.join(get_args(Kind))}")


def unseen_sentences(longest: int) -> list[str]:
    """Sentences of Wikipedia of more than 20 and less than `longest` characters, that no table counted."""
    return [s.strip() for p in unseen_paragraphs() for s in p.split(" . ") if 20 < len(s) < longest]


def pool(models: Path) -> list[str]:
    """The texts beside a fleet's models. Raises DataError where there are none: build it with `hplm build fleet`."""
    return lines(models.parent / POOL_FILE)


def lines(path: Path) -> list[str]:
    """Lines of a file that are not empty. Raises DataError."""
    try:
        # Not by `splitlines`: that cuts a text at Unicode's own separators too, as text from the web has within.
        found = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not found:
        raise DataError(f"{path} has no lines")
    return found


def about_sent(kind: str, sent: Sequence[str], models: Path) -> dict[str, Any]:
    """What a report says of texts of a kind that one process sends."""
    return {
        "texts": kind,
        "mean_tokens": round(mean_tokens(sent, models), 1),
        "protocol": "grpc",
        "client": "same machine, a process of its own",
    }


def mean_tokens(sent: Sequence[str], models: Path) -> float:
    """Tokens a text as the base of the repository counts them, special tokens included, cut to its maximum.

    Of many texts, of a thousand to two thousand evenly among them.
    """
    from hplm_loadtest.benchmarks.models import read

    base = read(models).base
    encoded = base.load_text_encoder().encode(sent[:: max(1, len(sent) // 1000)])
    return float(np.mean([len(one.ids) for one in encoded]))
