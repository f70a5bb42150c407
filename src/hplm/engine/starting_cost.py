"""The cost model with which an encode stage starts: from the base's profile of this machine, or measured at the start."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from hplm.adapters.packed import PackedAdapter, packed_width
from hplm.adapters.tenant import Head, Tenant, TenantCard
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.errors import CorruptArtifactError
from hplm.profiles.profile import Conditions, Profile
from hplm.profiles.profile_store import find_profile
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.scheduling.cost import CostModel
from hplm.store.layout import Store

# Texts and tokens of each text, of the batches that are measured if there is no profile. The first batch warms up torch.
MEASURED = ((1, 4), (1, 4), (1, 32), (8, 16), (8, 32), (2, 128))
# The batches that warm up torch if the costs are those of a profile.
WARMING = MEASURED[:2]


def starting_cost(engine: EncodeEngine, store: Store, base: str, conditions: Conditions) -> tuple[CostModel, str]:
    """Return the cost model of an engine before it serves, and words for the log that say where the costs come from.

    Batches that are served later refine the model. A profile has the times of all layers, so an engine of some layers is
    always measured.
    """
    profile = _kept_profile(store, base, conditions) if engine.has_all_layers else None
    if profile is None:
        why = "no profile of this machine and these settings" if engine.has_all_layers else "profiles are of all layers"
        return measure_cost(engine), f"costs measured at the start ({why})"
    time_batches(engine, WARMING)
    return CostModel.fit(profile.cost_samples()), f"costs from the profile of {profile.measured_at}"


def measure_cost(engine: EncodeEngine) -> CostModel:
    """Measure the seconds of batches of a few sizes."""
    samples = [
        (texts * tokens, texts * tokens * tokens, seconds) for texts, tokens, seconds in time_batches(engine, MEASURED)
    ]
    return CostModel.fit(samples[1:])


def time_batches(engine: EncodeEngine, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int, float]]:
    """Run batches of `(texts, tokens of each text)`, and return texts, tokens and seconds of each.

    The tokens are at most those that the base reads. All texts of a batch are of the same blank tenant.
    """
    tenant, timed = blank_tenant(engine), []
    for texts, wanted in sizes:
        tokens = min(wanted, engine.config.max_tokens)
        requests = [EngineRequest(tenant, engine.no_features(tokens)) for _ in range(texts)]
        start = time.perf_counter()
        engine.run(requests)
        timed.append((texts, tokens, time.perf_counter() - start))
    # No client asked for these batches.
    engine.computed_tokens = engine.slots.loads = 0
    return timed


def blank_tenant(engine: EncodeEngine, version: str = "measuring") -> Tenant:
    """Return a tenant of zeros, for measuring. Tenants of different versions have adapter slots of their own."""
    hidden, reduced = engine.config.hidden_size, engine.slots.sizes[0]
    weights = np.zeros((len(engine.slots.rows), packed_width(hidden, reduced)), np.float32)
    head = Head(np.zeros((2, hidden), np.float32), np.zeros(2, np.float32))
    card = TenantCard("nobody", "classification", ("a", "b"), base="")
    return Tenant(card, PackedAdapter(weights, hidden, reduced), head, version=version)


def _kept_profile(store: Store, base: str, conditions: Conditions) -> Profile | None:
    try:
        return find_profile(store, base, conditions)
    except CorruptArtifactError as error:
        # Serving needs no profile.
        log_rate_limited(f"base {base}: {error}")
        return None
