"""A repository's tenants of single texts and of pairs are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_loadtest.benchmarks.served_repository import read_repository, single_text_tenants, tenants_by_texts

from hplm.errors import ConfigError
from tests import tiny


def test_benchmarks_of_single_texts_go_to_no_tenant_of_pairs(tmp_path: Path) -> None:
    models = tiny.make_repository(tmp_path)
    store, base = tiny.opened(tmp_path)
    tiny.make_tenant(store, base, "aa-pairs", 9, "follows")
    served = read_repository(models)
    assert single_text_tenants(models) == sorted(tiny.TASKS)
    assert tenants_by_texts(models) == (sorted(tiny.TASKS), ["aa-pairs"])
    assert [tenant.card.name for tenant in served.load_tenants(2)] == sorted(tiny.TASKS)[:2]
    for name in tiny.TASKS:
        tiny.delete_tenant(store, name)
    with pytest.raises(ConfigError, match="of pairs"):
        single_text_tenants(models)
    with pytest.raises(ConfigError, match="of pairs"):
        served.load_tenants(2)
