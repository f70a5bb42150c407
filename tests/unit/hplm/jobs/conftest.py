"""The store of the tests of `manage`: jobs are asked for by its requests."""

from tests.unit.hplm.manage.conftest import made_store, patience, registry, service, store

__all__ = ["made_store", "patience", "registry", "service", "store"]
