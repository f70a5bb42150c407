"""Open domains by themselves, without a stage: opened once, and opened anew after they were forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from hplm.core.settings import LookupSettings
from hplm.engine.open_domains import Lineage, OpenDomains
from hplm.models.base import Base
from hplm.store.layout import Store
from tests import tiny


@pytest.fixture
def domains(tiny_store: Store, tiny_base: Base) -> Iterator[OpenDomains]:
    settings = LookupSettings(str(tiny_store.root), "tiny", tiny.PLOT)
    with closing(OpenDomains(tiny_store, tiny_base, settings)) as opened:
        yield opened


@pytest.fixture
def lineage(tiny_store: Store) -> Lineage:
    """The lineage of the root."""
    return (str(tiny_store.table(tiny.PLOT, "root").parent.relative_to(tiny_store.root)),)


def test_a_domain_is_opened_once_and_counts_the_windows_that_it_answers(domains: OpenDomains, lineage: Lineage) -> None:
    assert domains.get(lineage) is None
    domain = domains.fetch(lineage).result(60)
    assert domains.get(lineage) is domains.fetch(lineage).result(60) is domain
    hidden = domain.hidden_states(np.array([2, 7, 9, 3]), [4])
    assert hidden.shape == (4, domain.config.hidden_size)
    assert domains.windows_by_level.total() > 0


def test_a_forgotten_domain_is_opened_anew_unless_its_lineage_is_still_served(
    domains: OpenDomains, lineage: Lineage
) -> None:
    domain = domains.fetch(lineage).result(60)
    domains.forget([lineage], [lineage])
    assert domains.get(lineage) is domain
    domains.forget([lineage], [])
    assert domains.get(lineage) is None
    assert domains.fetch(lineage).result(60) is not domain
