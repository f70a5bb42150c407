"""A registry with two tenants on each database."""

from tests.unit.hplm.registry.conftest import registry, root, store

__all__ = ["registry", "root", "store"]
