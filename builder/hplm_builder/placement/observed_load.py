"""The load that running nodes report: requests of each base, their burstiness, and the share that was answered."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hplm.errors import DataError

# A line of a metrics page: name, labels, value.
_LINE = re.compile(r"^hplm_tenant_texts_total\{(.*)\} (\S+)$", re.MULTILINE)
# The line that Triton has for each model that it serves, also before the first request.
_MODEL = re.compile(r'^nv_inference_request_success\{model="([^"]+)"', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_COUNT = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?(e\+?[0-9]{1,2})?")
# A process of a stage of a base: NAME_plot or NAME_upper (or one of several), and the numbers that Triton appends.
_PROCESS = re.compile(r"(.+?)(?:_plot|_upper(?:_[0-9]+)?)_[0-9]+_[0-9]+")
# The stages that count each text of a base once: where it was refused, or the last.
_STAGES = ("plot", "layers", "upper")
# Looks, and texts of a base in each of them, from which a cv is estimated.
_LEAST_LOOKS, _LEAST_TEXTS = 8, 4
# The least estimated cv. Equal counts have a cv of 0, which no Gamma distribution has.
_LEAST_CV = 0.1


def served_bases_on(page: str, bases: Sequence[str]) -> set[str]:
    """Return which of `bases` the node of a metrics page serves. Raises DataError if the page is not that of a node of hplm."""
    if not re.search(r"^hplm_\w+", page, re.MULTILINE):
        kind = "HTML" if "<html" in page[:1000].lower() else "a page without a line `hplm_...`"
        raise DataError(f"the metrics of `hplm serve` were expected, got {kind}: check the port, 8002 by default")
    if not page.endswith("\n"):
        raise DataError("a metrics page that ends with a whole line was expected, and this page was cut off")
    counted = {base for base, _, _ in texts_of_bases(page, bases)}
    return counted | (set(_MODEL.findall(page)) & set(bases))


def texts_of_bases(page: str, bases: Sequence[str]) -> Counter[tuple[str, str, str]]:
    """Return the texts on a metrics page, by base, process and outcome. Raises DataError if a count is none."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for labels_text, value in _LINE.findall(page):
        labels = dict(_LABEL.findall(labels_text))
        process = _PROCESS.fullmatch(labels.get("model_instance", ""))
        if labels.get("stage") in _STAGES and process and process[1] in bases:
            if not _COUNT.fullmatch(value):
                raise DataError(f"a count of texts was expected on the metrics page, got {value!r:.50}")
            counts[process[1], labels["model_instance"], labels.get("outcome", "")] += round(float(value))
    return counts


@dataclass(frozen=True)
class Observed:
    """The load of all nodes over `seconds`: requests a second of each base, cv of the gaps, and the share that was answered.

    `cv` is None if there were too few requests to tell, `answered` if there was none.
    """

    seconds: float
    rates: Mapping[str, float]
    cv: float | None
    answered: float | None


@dataclass
class LoadWindow:
    """The texts that nodes counted in the last `window_s` seconds, look by look."""

    bases: Sequence[str]
    window_s: float
    # Time and counts of each node's newest page.
    _before: dict[str, tuple[float, Counter[tuple[str, str, str]]]] = field(default_factory=dict)
    # Time of a look, seconds since the look before, the texts between both by base and outcome, and the nodes whose pages
    # were there both times; none if these were not the same. Then the texts are too few, or those of several looks.
    _looks: deque[tuple[float, float, Counter[tuple[str, str]], frozenset[str]]] = field(default_factory=deque)
    _nodes: frozenset[str] = frozenset()
    _looked_s: float | None = None
    # The nodes of the newest look that had an earlier page too. Texts are counted between two pages.
    _counted: frozenset[str] = frozenset()

    def add(self, pages: Mapping[str, str], now_s: float) -> None:
        """Add the metrics pages of a look, by node. A node whose page is missing counts nothing until it comes back.

        Raises DataError if a count is none.
        """
        new: Counter[tuple[str, str]] = Counter()
        counted = set()
        # Texts since an older page are not those of the window, unless the page is that of the last look.
        oldest_s = now_s - self.window_s if self._looked_s is None else min(self._looked_s, now_s - self.window_s)
        for node, page in pages.items():
            counts = texts_of_bases(page, self.bases)
            before_s, before = self._before.get(node, (-math.inf, None))
            if before is not None and before_s >= oldest_s:
                counted.add(node)
                for key, count in counts.items():
                    # A counter that fell belongs to a process that started again at 0.
                    new[key[0], key[2]] += count - (before[key] if before[key] <= count else 0)
            self._before[node] = now_s, counts
        if self._looked_s is not None:
            same = self._nodes if self._nodes == set(pages) else frozenset[str]()
            self._looks.append((now_s, now_s - self._looked_s, new, same))
        self._looked_s, self._nodes, self._counted = now_s, frozenset(pages), frozenset(counted)
        while self._looks and self._looks[0][0] <= now_s - self.window_s:
            self._looks.popleft()

    @property
    def seconds(self) -> float:
        """The seconds that the looks in the window cover."""
        return sum(seconds for _, seconds, _, _ in self._looks)

    def observed(self, nodes: Collection[str]) -> Observed:
        """Return what was observed in the window. Raises DataError if one of `nodes` was not counted in the newest look."""
        if missing := sorted(set(nodes) - self._counted):
            raise DataError(
                f"no data: two metrics pages of each node were expected, one after the other, and {', '.join(missing)} gave "
                "none or the first only, so its requests are missing. Leave out a node that is stopped"
            )
        total: Counter[tuple[str, str]] = Counter()
        for _, _, new, _ in self._looks:
            total.update(new)
        seconds = self.seconds
        rates = {base: sum(n for (name, _), n in total.items() if name == base) / seconds for base in self.bases}
        texts = sum(total.values())
        answered = sum(count for (_, outcome), count in total.items() if outcome == "ok") / texts if texts else None
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
