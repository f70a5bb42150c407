"""Which tenants of a repository a load goes to."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_loadtest.benchmarks.models import names_by_texts, read, served_names

from hplm.errors import ConfigError
from tests import tiny


def test_benchmarks_of_single_texts_go_to_no_tenant_of_pairs(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    tiny.make_tenant(store, base, "aa-pairs", 9, "follows")
    served = read(models)
    assert served_names(models) == sorted(tiny.TASKS)
    assert names_by_texts(models) == (sorted(tiny.TASKS), ["aa-pairs"])
    assert [tenant.card.name for tenant in served.some(2)] == sorted(tiny.TASKS)[:2]
    for name in tiny.TASKS:
        tiny.delete_tenant(store, name)
    with pytest.raises(ConfigError, match="of pairs"):
        served_names(models)
    with pytest.raises(ConfigError, match="of pairs"):
        served.some(2)
