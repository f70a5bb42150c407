"""The load that running nodes report: requests of each base, their burstiness, and the share that was answered."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

# A line of a metrics page: name, labels, value.
_LINE = re.compile(r"^hplm_tenant_texts_total\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# A process of a stage of a base: NAME_plot or NAME_upper (or one of several), and the numbers that Triton appends.
_PROCESS = re.compile(r"(.+?)(?:_plot|_upper(?:_[0-9]+)?)_[0-9]+_[0-9]+")
# The stages that count each text of a base once: where it was refused, or the last.
_STAGES = ("plot", "layers", "upper")
# Looks, and texts of a base in each of them, from which a cv is estimated.
_LEAST_LOOKS, _LEAST_TEXTS = 8, 4
# The least estimated cv. Equal counts have a cv of 0, which no Gamma distribution has.
_LEAST_CV = 0.1


def texts_of_bases(page: str, bases: Sequence[str]) -> Counter[tuple[str, str, str]]:
    """Return the texts on a metrics page, by base, process and outcome."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for labels_text, value in _LINE.findall(page):
        labels = dict(_LABEL.findall(labels_text))
        process = _PROCESS.fullmatch(labels.get("model_instance", ""))
        if labels.get("stage") in _STAGES and process and process[1] in bases:
            counts[process[1], labels["model_instance"], labels.get("outcome", "")] += round(float(value))
    return counts


@dataclass(frozen=True)
class Observed:
    """The load of all nodes over `seconds`: requests a second of each base, cv of the gaps, and the share that was answered.

    `cv` is None if there were too few requests to tell.
    """

    seconds: float
    rates: Mapping[str, float]
    cv: float | None
    answered: float


@dataclass
class LoadWindow:
    """The texts that nodes counted in the last `window_s` seconds, look by look."""

    bases: Sequence[str]
    window_s: float
    _before: dict[str, Counter[tuple[str, str, str]]] = field(default_factory=dict)
    # Time of a look, seconds since the look before, the texts between both by base and outcome, and the nodes whose pages
    # were there both times; none if these were not the same. Then the texts are too few, or those of several looks.
    _looks: deque[tuple[float, float, Counter[tuple[str, str]], frozenset[str]]] = field(default_factory=deque)
    _nodes: frozenset[str] = frozenset()
    _looked_s: float | None = None

    def add(self, pages: Mapping[str, str], now_s: float) -> None:
        """Add the metrics pages of a look, by node. A node whose page is missing counts nothing until it comes back."""
        new: Counter[tuple[str, str]] = Counter()
        for node, page in pages.items():
            counts, before = texts_of_bases(page, self.bases), self._before.get(node)
            for key, count in counts.items() if before is not None else ():
                # A counter that fell belongs to a process that started again at 0.
                known = before[key] if before is not None and before[key] <= count else 0
                new[key[0], key[2]] += count - known
            self._before[node] = counts
        if self._looked_s is not None:
            same = self._nodes if self._nodes == set(pages) else frozenset[str]()
            self._looks.append((now_s, now_s - self._looked_s, new, same))
        self._looked_s, self._nodes = now_s, frozenset(pages)
        while self._looks and self._looks[0][0] <= now_s - self.window_s:
            self._looks.popleft()

    @property
    def seconds(self) -> float:
        """The seconds that the looks in the window cover."""
        return sum(seconds for _, seconds, _, _ in self._looks)

    def observed(self) -> Observed:
        """Return what was observed in the window. Call it after two looks or more."""
        total: Counter[tuple[str, str]] = Counter()
        for _, _, new, _ in self._looks:
            total.update(new)
        seconds = self.seconds
        rates = {base: sum(n for (name, _), n in total.items() if name == base) / seconds for base in self.bases}
        texts = sum(total.values())
        answered = sum(count for (_, outcome), count in total.items() if outcome == "ok") / texts if texts else 1.0
        return Observed(seconds, rates, self._cv(), answered)

    def _cv(self) -> float | None:
        """Estimate the cv of the gaps. In intervals of many gaps, the variance of the counts is their mean times cv squared.

        Only looks at the same nodes count, at those nodes that were seen together most often.
        """
        times_seen = Counter(nodes for _, _, _, nodes in self._looks if nodes)
        usual = max(times_seen, key=lambda nodes: times_seen[nodes], default=None)
        looks = [new for _, _, new, nodes in self._looks if nodes == usual]
        variances, means = 0.0, 0.0
        for base in self.bases:
            counts = np.array([sum(n for (name, _), n in new.items() if name == base) for new in looks])
            if len(counts) >= _LEAST_LOOKS and (mean := float(counts.mean())) >= _LEAST_TEXTS:
                variances += float(counts.var(ddof=1))
                means += mean
        return max(_LEAST_CV, float(np.sqrt(variances / means))) if means else None
