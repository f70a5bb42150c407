"""Times of the look-up stage and of the encode stage in this process, by texts and tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch

from hplm.core.text import EncodedText, TextEncoder
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.open_domain import Domain
from hplm.engine.starting_cost import blank_tenant
from hplm.engine.token_domain import random_features
from hplm.profiles.profile import LayerTiming, Timing
from hplm.runtime.tracing import Tracer

# Words of one token in every vocabulary of a pretrained model. Random sequences of these words are n-grams that no table has.
WORDS = "abcdefghijklmnopqrstuvwxyz0123456789"
# Texts and tokens of a batch. Lengths are cut to the most that the base reads.
ALONE = tuple((1, tokens) for tokens in (8, 16, 32, 64, 128, 256, 512))
TOGETHER = ((8, 16), (8, 32), (32, 16), (32, 32), (8, 128))
LAYERS = ((1, 16), (1, 64), (8, 32), (32, 32))
QUICK = ((1, 8), (1, 32), (1, 128), (1, 512), (8, 32))
# Times that an adapter is copied into a slot.
SWAPS = 9

# A batch's texts and tokens.
Size = tuple[int, int]
Progress = Callable[[float], None]


class LayerTracer(Tracer):
    """A tracer that keeps the milliseconds of spans named `layer` while it is on. Without CUDA nothing runs after a span."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, "profile")
        self._device = device
        self.measures = False
        self.layer_ms: list[float] = []

    @property
    def is_on(self) -> bool:
        return self.measures

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        return self._measured() if self.measures and name == "layer" else nullcontext()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.layer_ms.append(1000 * (time.perf_counter() - start))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def cut(sizes: Sequence[Size], max_tokens: int) -> list[Size]:
    """Return different sizes in order, with at most `max_tokens` tokens a text."""
    return list(dict.fromkeys((texts, min(tokens, max_tokens)) for texts, tokens in sizes))


def random_text(tokens: int, rng: np.random.Generator) -> str:
    """Return a text of `tokens` tokens, special tokens included, at least one word."""
    return " ".join(rng.choice(list(WORDS), max(1, tokens - 2)))


def time_encode(
    engine: EncodeEngine, sizes: Sequence[Size], rounds: int, within_s: float, progress: Progress
) -> list[Timing]:
    """Return the median time of a batch of each size. Each text is of a tenant of its own, as far as there are slots.

    Sizes take turns, so that a busy machine slows all of them. A first round does not count. No round begins after `within_s`
    seconds, except the first two.
    """
    config, rng = engine.config, np.random.default_rng(0)
    most = engine.slots.num_slots - 1
    tenants = [blank_tenant(engine, f"measuring-{i}") for i in range(min(most, max(texts for texts, _ in sizes)))]
    batches = {
        (texts, tokens): [
            EngineRequest(tenants[i % len(tenants)], random_features(config, tokens, rng)) for i in range(texts)
        ]
        for texts, tokens in sizes
    }
    taken_ms: dict[Size, list[float]] = {size: [] for size in sizes}
    begin = time.perf_counter()
    for turn in range(rounds + 1):
        if turn > 1 and time.perf_counter() - begin > within_s:
            break
        for size, requests in batches.items():
            start = time.perf_counter()
            engine.run(requests)
            if turn:
                taken_ms[size].append(1000 * (time.perf_counter() - start))
        progress((turn + 1) / (rounds + 1))
    return [Timing(*size, median(times)) for size, times in taken_ms.items()]


def time_layers(
    engine: EncodeEngine, tracer: LayerTracer, sizes: Sequence[Size], rounds: int, progress: Progress
) -> list[LayerTiming]:
    """Return the median time of each layer, of a batch of each size. `tracer` is that of the engine."""
    config, rng, tenant = engine.config, np.random.default_rng(0), blank_tenant(engine)
    found = []
    for number, (texts, tokens) in enumerate(sizes, 1):
        requests = [EngineRequest(tenant, random_features(config, tokens, rng)) for _ in range(texts)]
        engine.run(requests)
        by_round = []
        for _ in range(rounds):
            tracer.layer_ms, tracer.measures = [], True
            try:
                engine.run(requests)
            finally:
                tracer.measures = False
            by_round.append(tracer.layer_ms)
        found.append(LayerTiming(texts, tokens, tuple(map(median, zip(*by_round, strict=True)))))
        progress(number / len(sizes))
    return found


def time_look_up(
    encoder: TextEncoder, domain: Domain, lengths: Sequence[int], rounds: int, progress: Progress
) -> tuple[list[Timing], list[Timing]]:
    """Return the median time to tokenise and look up one text of each length: of new texts, and of the same texts again."""
    rng = np.random.default_rng(0)
    new_ms: dict[int, list[float]] = {tokens: [] for tokens in lengths}
    known_ms: dict[int, list[float]] = {tokens: [] for tokens in lengths}
    for turn in range(rounds + 1):
        for tokens in lengths:
            text = random_text(tokens, rng)
            for taken in (new_ms, known_ms):
                start = time.perf_counter()
                look_up(encoder, domain, text)
                if turn:
                    taken[tokens].append(1000 * (time.perf_counter() - start))
        progress((turn + 1) / (rounds + 1))
    new, known = ([Timing(1, tokens, median(times)) for tokens, times in taken.items()] for taken in (new_ms, known_ms))
    return new, known


def look_up(encoder: TextEncoder, domain: Domain, text: str) -> EncodedText:
    """Tokenise a text and look it up; return its tokens."""
    (encoded,) = encoder.encode([text])
    domain.features([encoded])
    return encoded


def time_swap(engine: EncodeEngine) -> float:
    """Return the median milliseconds to copy a tenant's adapter from host memory into its slot."""
    taken_ms = []
    for number in range(SWAPS + 1):
        tenant = blank_tenant(engine, f"swapped-{number}")
        start = time.perf_counter()
        with engine.slots.assigned([tenant]) as assigned:
            assigned.wait(engine.config.adapted_layers - 1)
            if engine.device.type == "cuda":
                torch.cuda.synchronize(engine.device)
            taken_ms.append(1000 * (time.perf_counter() - start))
    return median(taken_ms[1:])
