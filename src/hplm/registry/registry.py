"""The registry: the one truth about bases, domains, tenants, versions, jobs and uploads of a store.

    with closing(Registry.open(store, create=True)) as registry:
        version = registry.publish_tenant("films", root.id, "tenants/films/1", now_s, about={}, number=1, expected=None)

Every method is one transaction: a process killed inside it leaves what was before. Time is handed in, unix seconds. Any
method raises RegistryUnavailableError, CorruptRegistryError or MissingRegistryError where the database cannot be used.
"""

from __future__ import annotations

from hplm.errors import CorruptRegistryError, MissingRegistryError, RegistryUnavailableError
from hplm.registry import schema
from hplm.registry.access.audit import Audit
from hplm.registry.access.keys import Keys
from hplm.registry.access.limits import TenantLimits
from hplm.registry.adoption import Adoption
from hplm.registry.cascades import Cascades
from hplm.registry.database import ADOPT, Database
from hplm.registry.domains import Domains
from hplm.registry.jobs import Jobs
from hplm.registry.retention import Retention
from hplm.registry.serving import Serving
from hplm.registry.tenants import Tenants
from hplm.registry.uploads import Uploads
from hplm.store.layout import Store


class Registry(Domains, Tenants, Cascades, Serving, Retention, Adoption, Jobs, Uploads, Keys, Audit, TenantLimits):
    """One process's access to a store's registry, safe to use from several threads. Open it by `open` or `open_read_only`."""

    @classmethod
    def open(cls, store: Store, *, create: bool = False) -> Registry:
        """Open the registry to read and write, and migrate older tables.

        Without `create` a missing registry raises MissingRegistryError: a new, empty one would look as if all tenants
        were deleted.
        """
        return cls._opened(Database(store, writer=True, create=create), may_be_missing=create, migrates=True)

    @classmethod
    def open_read_only(cls, store: Store) -> Registry:
        """Open the registry to read only, as serving does. Never writes and never migrates."""
        return cls._opened(Database(store, writer=False), may_be_missing=False, migrates=False)

    @classmethod
    def _opened(cls, database: Database, *, may_be_missing: bool, migrates: bool) -> Registry:
        registry = cls(database)
        try:
            found = database.version()
            if found is None and not may_be_missing:
                raise MissingRegistryError(f"there is no registry at {database.where}; {ADOPT}")
            if found is not None:
                _check_version(database.where, found, migrates=migrates)
            if found != schema.HEAD:
                database.migrate()
        except BaseException:
            registry.close()
            raise
        return registry

    def close(self) -> None:
        """Close the connections to the database."""
        self._database.close()

    def faults(self) -> list[str]:
        """List the faults inside the database file; empty if it is sound."""
        return self._database.faults()


def _check_version(where: str, found: str, *, migrates: bool) -> None:
    """Check the version of a registry's tables.

    Raises CorruptRegistryError for tables of an older format of stores, which no migration leads on from, and
    RegistryUnavailableError for tables of a newer hplm, or for older tables if this process does not migrate.
    """
    store_format = schema.HEAD.partition(".")[0]
    if found.rpartition(".")[0] < store_format:
        raise CorruptRegistryError(
            f"{where} has version {found} of the tables, from before format {store_format} of stores, which this hplm "
            "cannot read: build the store anew in an empty folder (`hplm build demo`, or the steps of `hplm build --help`)"
        )
    if found > schema.HEAD:
        raise RegistryUnavailableError(
            f"{where} has version {found} of the tables, this hplm knows {schema.HEAD}: upgrade hplm"
        )
    if found != schema.HEAD and not migrates:
        raise RegistryUnavailableError(
            f"{where} has version {found} of the tables, {schema.HEAD} is expected: `hplm store adopt` migrates them"
        )
