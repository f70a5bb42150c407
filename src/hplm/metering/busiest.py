"""Choose the tenants that have a label of their own in metrics: the busiest ones, with hysteresis."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# The sketch keeps this many counters for each label, so that it misses no tenant with more than 1/10 of a label's fair share.
COUNTERS_A_LABEL = 10
# A turn halves all counts, so that the last few turns decide.
KEEP = 0.5
# A tenant takes the label of the least busy labelled tenant if it is this many times as busy. A smaller factor would let two
# tenants with equal traffic replace each other again and again, and each change begins new time series.
HYSTERESIS = 1.5
# The most labels that change owner in one turn. With a turn a minute, a day begins at most 2,880 sets of time series.
MOST_CHANGES = 2


class Sketch:
    """Counts of the busiest keys in bounded memory: mergeable Misra-Gries counters.

    Of the keys added with a total weight of W, each estimate is too low by at most W / (capacity + 1), and never too high.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[str, float] = {}

    def add(self, weights: Mapping[str, float]) -> None:
        """Add the weights of several keys."""
        counts = self._counts
        for key, weight in weights.items():
            counts[key] = counts.get(key, 0.0) + weight
        if len(counts) > self._capacity:
            # The largest count that has no counter is taken from all others, see "Mergeable Summaries" (Agarwal et al.).
            cut = sorted(counts.values(), reverse=True)[self._capacity]
            self._counts = {key: count - cut for key, count in counts.items() if count > cut}

    def scale(self, factor: float) -> None:
        """Multiply all counts."""
        self._counts = {key: count * factor for key, count in self._counts.items()}

    def estimates(self) -> Mapping[str, float]:
        """Return the estimated weight of each key that has a counter."""
        return self._counts


class BusiestTenants:
    """The set of at most `most` tenants that have labels.

    While labels are free, each tenant gets a label with its first text. Later a tenant has to be HYSTERESIS times as busy
    as the least busy labelled tenant, at the end of a turn. The set changes in `add` and `end_turn` only.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sketch = Sketch(COUNTERS_A_LABEL * most)
        self._labelled: set[str] = set()

    @property
    def labelled(self) -> Collection[str]:
        """The tenants that have labels now."""
        return self._labelled

    def add(self, texts: Mapping[str, float]) -> None:
        """Count texts by tenant, and give free labels to the busiest tenants without labels."""
        if not self._most:
            return
        self._sketch.add(texts)
        if (free := self._most - len(self._labelled)) > 0:
            candidates = [tenant for tenant in texts if tenant not in self._labelled]
            self._labelled |= set(sorted(candidates, key=lambda tenant: (-texts[tenant], tenant))[:free])

    def end_turn(self) -> None:
        """Give the labels of the least busy tenants to much busier ones, then let older texts count less."""
        estimates = self._sketch.estimates()
        self._labelled = set(choose_labelled(self._labelled, estimates, self._most))
        self._sketch.scale(KEEP)


def choose_labelled(labelled: Collection[str], counts: Mapping[str, float], most: int) -> Collection[str]:
    """Return the labelled tenants of the next turn: see BusiestTenants. Equal counts are ordered by name."""
    chosen = set(labelled)
    challengers = sorted((tenant for tenant in counts if tenant not in chosen), key=lambda t: (-counts[t], t))
    for challenger in challengers[:MOST_CHANGES]:
        if len(chosen) < most:
            chosen.add(challenger)
            continue
        weakest = min(chosen, key=lambda tenant: (counts.get(tenant, 0.0), tenant), default=None)
        if weakest is None or counts[challenger] <= HYSTERESIS * counts.get(weakest, 0.0):
            break
        chosen.remove(weakest)
        chosen.add(challenger)
    return chosen
