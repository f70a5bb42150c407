"""The domain of a whole base: it has no tables, and the features of a text are the ids and types of its tokens.

An open domain, of either kind of base, gives texts' features. They are what the upper layers read, and what tenants train on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from hplm.core.settings import BaseConfig, Miss
from hplm.core.text import EncodedText
from hplm.models.device import CPU

# Of a text: float16 hidden states `[T, H]`, or of a whole base int32 `[T, 2]`, the id and the type of each token.
Features = npt.NDArray[np.float16] | npt.NDArray[np.int32]


class TokenDomain:
    """The only domain of a whole base. Safe to use from several threads. `token_bytes`: bytes of a token's features."""

    # Nothing is looked up, so every token counts as computed.
    miss: Miss = "compute"
    token_bytes = 8

    def __init__(self, config: BaseConfig) -> None:
        self._has_types = config.token_types > 1

    def features(self, texts: Sequence[EncodedText]) -> list[npt.NDArray[np.int32]]:
        """Return the id and the type `[T, 2]` of each text's tokens. Types are 0 if the base has a single type."""
        return [token_features(text.ids, text.types if self._has_types else None) for text in texts]

    def warm_up(self) -> None:
        """Do nothing, because nothing is computed here."""


class TokenDomains:
    """The open domains of a whole base, in place of `OpenDomains`. All lineages share one domain."""

    device = CPU
    how_misses_are_computed = "computed by all layers, because the base is whole"

    def __init__(self, config: BaseConfig) -> None:
        self._domain = TokenDomain(config)

    @property
    def windows_by_level(self) -> Counter[str]:
        """Empty, because nothing is looked up."""
        return Counter()

    def get(self, lineage: tuple[str, ...]) -> TokenDomain:
        """Return the domain."""
        return self._domain

    def fetch(self, lineage: tuple[str, ...]) -> Future[TokenDomain]:
        """Return the domain, as `OpenDomains.fetch` does."""
        future: Future[TokenDomain] = Future()
        future.set_result(self._domain)
        return future

    def forget(self, lineages: Iterable[tuple[str, ...]], still_served: Collection[tuple[str, ...]]) -> None:
        """Do nothing, because the domain keeps nothing of a version."""

    def close(self) -> None:
        """Do nothing, because there are no threads."""


def token_features(ids: npt.NDArray[np.int64], types: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int32]:
    """Return the features `[T, 2]` of ids `[T]` and token types `[T]`, which are all 0 if they are None."""
    features = np.zeros((len(ids), 2), np.int32)
    features[:, 0] = ids
    if types is not None:
        features[:, 1] = types
    return features


def random_features(config: BaseConfig, length: int, rng: np.random.Generator) -> Features:
    """Return random features of a text of `length` tokens, for measuring."""
    if config.is_whole:
        types = rng.integers(0, max(1, config.token_types), length)
        return token_features(rng.integers(0, config.vocab_size, length), types)
    return rng.normal(size=(length, config.hidden_size)).astype(np.float16)


def no_features(config: BaseConfig, length: int) -> Features:
    """Return features of a text of `length` tokens for measuring: zeros."""
    if config.is_whole:
        return np.zeros((length, 2), np.int32)
    return np.zeros((length, config.hidden_size), np.float16)
