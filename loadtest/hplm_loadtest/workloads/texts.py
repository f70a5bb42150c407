"""Provides the texts that a load sends: short real texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from hplm.errors import ConfigError, DataError
from hplm.reporting.samples import unseen_paragraphs

TextKind = Literal["pool", "unseen", "shuffled", "examples"]
POOL_FILE = "texts.txt"
ORDERS_PER_SENTENCE = 30


def texts_of_kind(kind: str, models: Path) -> list[str]:
    """Return the texts of a kind, or the lines of a file, for a model repository.

    Raises ConfigError if `kind` is neither a kind nor a file.

    pool: the texts whose n-grams a fleet's tables hold (`hplm build fleet`).
    unseen: sentences of Wikipedia that no table counted.
    shuffled: the words of those sentences, in thirty random orders per sentence. Texts and n-grams hardly ever repeat.
    examples: the example text of each tenant of the repository.
    """
    if kind == "pool":
        return pool_texts(models)
    sentences = wikipedia_sentences(200) if kind in ("unseen", "shuffled") else []
    if kind == "unseen":
        return sentences
    if kind == "shuffled":
        rng = np.random.default_rng(0)
        return [" ".join(rng.permutation(text.split())) for text in sentences for _ in range(ORDERS_PER_SENTENCE)]
    if kind == "examples":
        # Imported here, as in `mean_tokens`, because reading a store imports torch.
        from hplm_loadtest.benchmarks.served_repository import example_texts

        return example_texts(models)
    if (path := Path(kind)).is_file():
        return read_lines(path)
    raise ConfigError(
        f"no texts {kind!r}; there are {', '.join(get_args(TextKind))}, or give a file of texts, one a line"
    )


def wikipedia_sentences(max_characters: int) -> list[str]:
    """Return sentences of Wikipedia that no table counted, of more than 20 and less than `max_characters` characters."""
    return [s.strip() for p in unseen_paragraphs() for s in p.split(" . ") if 20 < len(s) < max_characters]


def pool_texts(models: Path) -> list[str]:
    """Return the texts of a fleet's pool, a file beside its models. Raises DataError if the file is missing."""
    return read_lines(models.parent / POOL_FILE)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file that are not empty. Raises DataError if there are none."""
    try:
        # `splitlines` would also cut a text at Unicode's separators, which texts from the web contain.
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not lines:
        raise DataError(f"{path} has no lines")
    return lines


def text_settings(kind: str, texts: Sequence[str], models: Path) -> dict[str, Any]:
    """Return the settings that a benchmark result lists for texts sent over gRPC by one process."""
    return {
        "texts": kind,
        "mean_tokens": round(mean_tokens(texts, models), 1),
        "protocol": "grpc",
        "client": "same machine, a process of its own",
    }


def mean_tokens(texts: Sequence[str], models: Path) -> float:
    """Return the mean number of tokens per text, special tokens included, cut to the base's maximum.

    Of many texts, one to two thousand evenly chosen texts are counted.
    """
    from hplm_loadtest.benchmarks.served_repository import read_repository

    encoder = read_repository(models).base.load_text_encoder()
    encoded = encoder.encode(texts[:: max(1, len(texts) // 1000)])
    return float(np.mean([len(text.ids) for text in encoded]))
