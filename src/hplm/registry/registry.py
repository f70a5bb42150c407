"""The registry: the one truth about bases, domains, tenants, versions, jobs and uploads of a store.

    with closing(Registry.open(store, create=True)) as registry:
        version = registry.publish_tenant("films", root.id, "tenants/films/1", now_s, about={}, number=1, expected=None)

Every method is one transaction: a process killed inside it leaves what was before. Time is handed in, unix seconds. Any
method raises RegistryUnavailableError, CorruptRegistryError or MissingRegistryError where the database cannot be used.
"""

from __future__ import annotations

from hplm.errors import MissingRegistryError, RegistryUnavailableError
from hplm.registry import schema
from hplm.registry.adoption import Adoption
from hplm.registry.database import ADOPT, Database
from hplm.registry.domains import Domains
from hplm.registry.jobs import Jobs
from hplm.registry.retention import Retention
from hplm.registry.serving import Serving
from hplm.registry.tenants import Tenants
from hplm.registry.uploads import Uploads
from hplm.store.layout import Store


class Registry(Domains, Tenants, Serving, Retention, Adoption, Jobs, Uploads):
    """One process's access to a store's registry, safe to use from several threads. Opened by one of its two methods."""

    @classmethod
    def open(cls, store: Store, *, create: bool = False) -> Registry:
        """To read and write; tables of an older version are brought up to this one.

        Without `create` a missing registry is a MissingRegistryError: an empty one would look as if all were deleted.
        """
        return cls._opened(Database(store, writer=True, create=create), may_be_missing=create, migrates=True)

    @classmethod
    def open_read_only(cls, store: Store) -> Registry:
        """To read only, as serving does: never writes and never migrates."""
        return cls._opened(Database(store, writer=False), may_be_missing=False, migrates=False)

    @classmethod
    def _opened(cls, database: Database, *, may_be_missing: bool, migrates: bool) -> Registry:
        registry = cls(database)
        try:
            found = database.version()
            if found is None and not may_be_missing:
                raise MissingRegistryError(f"there is no registry at {database.where}; {ADOPT}")
            said = f"{database.where} has version {found} of the tables"
            if found is not None and found > schema.HEAD:
                raise RegistryUnavailableError(f"{said}, this hplm knows {schema.HEAD}: upgrade hplm")
            if found != schema.HEAD and not migrates:
                raise RegistryUnavailableError(
                    f"{said}, {schema.HEAD} is expected: `hplm store adopt` brings it up to date"
                )
            if found != schema.HEAD:
                database.migrate()
        except BaseException:
            registry.close()
            raise
        return registry

    def close(self) -> None:
        """Let go of the database; what was written is written."""
        self._database.close()

    def faults(self) -> list[str]:
        """What is wrong inside the database file, empty where it is sound."""
        return self._database.faults()
