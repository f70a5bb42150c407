"""The registry's database: connections, transactions and errors, the same for SQLite and PostgreSQL.

SQLite: WAL, foreign keys, synchronous=FULL, lock waits of 5 s, and each write in one BEGIN IMMEDIATE. PostgreSQL: each
write first locks the one row of `state`. So on both, writes run one after another and a reader sees one moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, select, text, update
from sqlalchemy import exc as sql
from sqlalchemy.pool import QueuePool

from hplm.core.numbers import finite
from hplm.errors import (
    ConfigError,
    CorruptRegistryError,
    InternalError,
    MissingRegistryError,
    RegistryError,
    RegistryUnavailableError,
)
from hplm.registry import schema
from hplm.store.layout import Store

BUSY_S = 5.0  # longest wait for a lock or a connection
IN_ONE_QUERY = 500  # values in one query; SQLite takes at most 32,766 in its usual build
ADOPT = "`hplm store adopt` makes one from the artifacts in the store"
BEGIN = "hplm_begin"  # the execution option that says how a transaction of SQLite begins
KINDS = "a registry is sqlite:////path/of/a.file or postgresql+psycopg://user@host:port/database"
# PostgreSQL only. A network that drops packets reports nothing: without these options a query waits for 15 minutes.
GONE_AFTER = {
    "connect_timeout": int(BUSY_S),
    "tcp_user_timeout": int(2000 * BUSY_S),
    "keepalives_idle": int(BUSY_S),
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
# PostgreSQL ends a write transaction that is idle this long. A process that is stopped, or whose machine is gone, would
# otherwise block all writers for hours.
STOPPED_S = 30.0
POSTGRES = "postgresql+psycopg"
POSTGRES_OPTIONS = (
    f"-c lock_timeout={BUSY_S:.0f}s -c idle_in_transaction_session_timeout={STOPPED_S:.0f}s -c timezone=UTC"
)
POSTGRES_WRITES = {"isolation_level": "READ COMMITTED"}
POSTGRES_READS = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class _Snapshot(sqlite3.Connection):
    """A connection made while the disk cannot be written. It is used for one transaction only.

    Such a connection never changes: a reader's sees no later change, and a writer's cannot write even when the disk can.
    """


class Database:
    """Transactions on the registry's database, from any thread.

    Without `writer` nothing is ever written: SQLite opens the file read-only, PostgreSQL's transactions are read-only.
    """

    def __init__(self, store: Store, *, writer: bool, create: bool = False) -> None:
        self._writer, self._create = writer, create
        self._file: tuple[int, int] | None = None
        self._path: Path | None = store.root.absolute() / "registry.sqlite"
        if store.registry:
            url = _address(store.registry)
            self._path = self._path.parent / (url.database or "") if url.get_backend_name() == "sqlite" else None
        if self._path is None:
            self.where = url.render_as_string(hide_password=True)
            self._engine = self._postgres(url)
            return
        self.where = str(self._path)
        if create:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._engine = self._sqlite(self._path)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction that sees one moment and changes nothing. Raises RegistryError."""
        with self._transaction(False) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a write transaction: no other runs at the same time, and it happens whole or not. Raises RegistryError."""
        with self._transaction(True) as connection:
            if not self._path:
                connection.execute(select(schema.state.c.id).with_for_update())
            yield connection

    def version(self) -> str | None:
        """Return the version of the tables; None if there are no tables."""
        with self._transaction(False) as connection:
            return _version(connection)

    def migrate(self) -> None:
        """Make the tables, or bring them to the newest version, in one transaction."""
        # Imported here, because Alembic is slow to import and serving never needs it.
        from hplm.registry.migrations.upgrade import create, upgrade

        with self._locked(), self._transaction(True) as connection:
            if not self._path:
                connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('hplm registry'))"))
            if (version := _version(connection)) is None:
                create(connection)
            elif version != schema.HEAD:
                upgrade(connection)

    def faults(self) -> list[str]:
        """List the faults that SQLite finds in its file. PostgreSQL checks its own files."""
        if not self._path:
            return []
        with self._transaction(False) as connection:
            lines = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check")]
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        return [line for line in lines if line != "ok"] + [f"{row[0]} row {row[1]} names no {row[2]}" for row in broken]

    @contextmanager
    def _transaction(self, write: bool) -> Iterator[Connection]:
        with self._translated():
            self._look_at_file()
            if self._path:
                options: dict[str, Any] = {BEGIN: "BEGIN IMMEDIATE" if write else "BEGIN"}
            else:
                options = POSTGRES_WRITES if write and self._writer else POSTGRES_READS
            with self._engine.connect().execution_options(**options) as connection:
                is_spent = isinstance(connection.connection.dbapi_connection, _Snapshot)
                is_committing = False
                try:
                    with connection.begin():
                        yield connection
                        is_committing = write
                except sql.OperationalError as error:
                    # The disk may have become read-only between the check and the opening.
                    is_spent |= "readonly" in str(error.orig)
                    if is_committing and error.connection_invalidated:
                        raise RegistryUnavailableError(
                            f"{self.where} went away before it said that the change was made; "
                            "the change may have been made: check before you ask again"
                        ) from error
                    raise
                finally:
                    if is_spent:
                        connection.invalidate()

    def _look_at_file(self) -> None:
        """Close connections to a file that another has replaced, because they would use the old file for ever."""
        if not self._path:
            return
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            if self._file is None and self._create:
                return
            raise MissingRegistryError(f"there is no registry at {self._path}; {ADOPT}") from None
        except OSError as error:
            raise RegistryUnavailableError(f"{self._path} cannot be reached ({error}); look at the disk") from error
        now = (found.st_dev, found.st_ino)
        if self._file not in (None, now):
            self._engine.dispose()
        self._file = now

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time create or migrate a SQLite file: two that switch it to WAL at once can fail."""
        if not self._path:
            yield
            return
        handle = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            with self._translated(), self._engine.connect().execution_options(**{BEGIN: ""}) as connection:
                connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            yield
        finally:
            os.close(handle)

    def _sqlite(self, path: Path) -> Engine:
        # As bytes, because a path need not be text.
        address = f"file:{quote(os.fsencode(path))}?mode="

        def connect(query: str, factory: type[sqlite3.Connection] = sqlite3.Connection) -> sqlite3.Connection:
            return sqlite3.connect(
                address + query,
                uri=True,
                timeout=BUSY_S,
                isolation_level=None,  # `begin` below starts transactions, not the driver
                check_same_thread=False,
                factory=factory,
            )

        def opened() -> sqlite3.Connection:
            if self._writer:
                written = not path.exists() or os.access(path, os.W_OK)
                connection = connect("rwc" if self._create else "rw", sqlite3.Connection if written else _Snapshot)
                connection.execute("PRAGMA foreign_keys = ON")
                connection.execute("PRAGMA synchronous = FULL")
                return connection
            connection = connect("ro")
            try:
                connection.execute("PRAGMA schema_version")
                connection.execute("PRAGMA query_only = ON")
                return connection
            except sqlite3.DatabaseError as error:
                connection.close()
                # WAL needs files beside the database even to read. If they are missing and cannot be made, no process writes.
                unwritten = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
                if not isinstance(error, sqlite3.OperationalError) or not unwritten:
                    raise
                return connect("ro&immutable=1", _Snapshot)

        engine = create_engine("sqlite://", creator=opened, poolclass=QueuePool, json_serializer=_json)

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            if statement := connection.get_execution_options().get(BEGIN, "BEGIN"):
                connection.exec_driver_sql(statement)

        return engine

    def _postgres(self, url: URL) -> Engine:
        try:
            return create_engine(
                url,
                json_serializer=_json,
                pool_pre_ping=True,  # a restart of the server costs one ping, not an error
                connect_args={
                    **{key: value for key, value in GONE_AFTER.items() if key not in url.query},
                    "options": " ".join((*url.normalized_query.get("options", ()), POSTGRES_OPTIONS)),
                },
            )
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{self.where}: {error}; install hplm with its extra postgres: `pip install 'PATH/TO/hplm[postgres]'`"
            ) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the database's errors into ours, in this one place."""
        try:
            yield
        except sql.IntegrityError as error:
            # All values are checked before they are written, so this is our mistake.
            raise InternalError(f"{self.where}: the registry refused what breaks its rules ({error.orig})") from error
        except sql.DBAPIError as error:
            raise self._typed(error) from error
        except sql.TimeoutError as error:
            raise RegistryUnavailableError(f"{self.where}: all connections are busy; try again") from error

    def _typed(self, error: sql.DBAPIError) -> RegistryError:
        said = " ".join(str(error.orig).split())
        # 42P01 is PostgreSQL's undefined table. A SQLite file without our tables is reported by `version`.
        if getattr(error.orig, "sqlstate", None) == "42P01":
            return MissingRegistryError(f"{self.where} has no registry's tables; {ADOPT}")
        if "no such column" in said:
            return CorruptRegistryError(
                f"{self.where} is of another version of hplm ({said}), put there meanwhile: restart this process"
            )
        if any(words in said for words in ("not a database", "malformed", "no such table")):
            return CorruptRegistryError(
                f"{self.where} is broken ({said}): move it aside with its -wal and -shm, then {ADOPT}"
            )
        if "locked" in said:
            return RegistryUnavailableError(f"{self.where} was locked by another process for {BUSY_S:.0f} s; try again")
        if "full" in said:
            return RegistryUnavailableError(f"{self.where}: {said}; make room, nothing was changed")
        if "readonly" in said or "read-only" in said:
            return RegistryUnavailableError(f"{self.where} can only be read here ({said}); nothing was changed")
        return RegistryUnavailableError(f"{self.where} cannot be used now ({said}); nothing was changed")


class RegistryPart:
    """A part of the registry's methods. All parts share one database."""

    def __init__(self, database: Database) -> None:
        self._database = database


def bump(connection: Connection) -> int:
    """Increase the generation and return it, because this transaction makes a change that serving must see."""
    state = schema.state
    connection.execute(update(state).values(generation=state.c.generation + 1))
    return connection.execute(select(state.c.generation)).scalar_one()


def _address(registry: str) -> URL:
    """Raises ConfigError where it is neither a file of SQLite nor a database of PostgreSQL."""
    try:
        url = make_url(registry)
    except (sql.ArgumentError, ValueError):
        # What cannot be taken apart is not shown: a password may be in it.
        shown = f", not {registry!r}" if "@" not in registry else ""
        raise ConfigError(f"{KINDS}{shown}") from None
    if url.drivername == "postgresql":
        url = url.set(drivername=POSTGRES)
    if url.drivername == POSTGRES or (url.drivername == "sqlite" and url.database and not url.query):
        return url
    raise ConfigError(f"{KINDS}, not {url.render_as_string()!r}")


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.scalar(text("SELECT version_num FROM alembic_version"))


def _json(value: Any) -> str:
    """Return JSON that both databases can read."""
    return json.dumps(finite(value), allow_nan=False)
