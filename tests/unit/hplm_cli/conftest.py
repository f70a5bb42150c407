"""The store of the tests of `manage`, for the commands that work on a store."""

from tests.unit.hplm.manage.conftest import made_store, patience, registry, service, store

__all__ = ["made_store", "patience", "registry", "service", "store"]
