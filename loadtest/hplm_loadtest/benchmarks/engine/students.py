"""The engine's part of `hplm bench students`: the time of one text, in-process, of each base and of each number of students."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.progress import Progress

from hplm.adapters.tenant import Tenant
from hplm.core.text import EncodedText
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.open_domain import Domain, open_lookup
from hplm.engine.token_domain import TokenDomain
from hplm.models.device import choose_device
from hplm_loadtest.benchmarks.engine.upper import product_flop_of
from hplm_loadtest.benchmarks.served_repository import ServedRepository
from hplm_loadtest.benchmarks.timing import Timing, time_interleaved

LENGTHS = (16, 64)  # tokens of the texts that are timed
CALLS = 20


@dataclass(frozen=True)
class TimedEngine:
    """The engine of a base, its domain, and a tenant. The first k of the tenant's students answer a text, for each k."""

    engine: EncodeEngine
    domain: Domain
    tenant: Tenant

    @classmethod
    def of(cls, served: ServedRepository, tenant: Tenant) -> TimedEngine:
        """Make the engine. Its slots hold all students."""
        base = served.base
        if base.config.is_whole:
            domain: Domain = TokenDomain(base.config)
        else:
            domain = open_lookup(served.store, base, served.plot.table, overlay_windows=65_536)
        engine = served.engine([tenant], choose_device("auto"), num_slots=1 + tenant.card.students)
        return cls(engine, domain, tenant)

    def run(self, text: EncodedText, students: int) -> None:
        """Look up and compute one text, with this number of students."""
        (features,) = self.domain.features([text])
        self.engine.run([EngineRequest(self.tenant, features, students=students)])

    def flop(self, text: EncodedText) -> int:
        """Return the multiplications and additions of one text's matrix products with one student."""
        (features,) = self.domain.features([text])
        return product_flop_of(self.engine.config, [EngineRequest(self.tenant, features)])


def time_one_text(
    engines: Mapping[str, TimedEngine], texts: Sequence[EncodedText], rounds: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return a row for each text length, base and number of students. Texts of a base with tables are known."""
    rows = []
    for length, text in zip(LENGTHS, texts, strict=True):
        calls: dict[str, Callable[[], object]] = {}
        of: dict[str, tuple[str, int]] = {}
        for name, engine in engines.items():
            for students in range(1, engine.tenant.card.students + 1):
                variant = f"{name} {students}"
                calls[variant], of[variant] = partial(engine.run, text, students), (name, students)
        timed: dict[str, Timing] = time_interleaved(calls, rounds, CALLS, progress, f"one text of {length} tokens")
        rows += [
            {
                "engine": name,
                "tokens": length,
                "students": students,
                "ms": 1000 * timed[variant].median_s,
                "spread": timed[variant].spread,
            }
            for variant, (name, students) in of.items()
        ]
    return rows
