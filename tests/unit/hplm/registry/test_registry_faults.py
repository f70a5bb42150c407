"""A registry that is missing, broken, locked, full, read-only, replaced or of another version."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import insert, select, text

from hplm.errors import (
    ConfigError,
    CorruptRegistryError,
    HplmError,
    MissingRegistryError,
    RegistryUnavailableError,
)
from hplm.registry import migrations, schema
from hplm.registry.database import POSTGRES_OPTIONS, STOPPED_S, Database
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.postgres import PostgresServer
from tests.unit.hplm.registry.making import NOW_S, publish, publish_root

UNPRIVILEGED = 65_534


def path_of(store: Store) -> Path:
    return store.root / "registry.sqlite"


def filled(store: Store) -> None:
    with closing(Registry.open(store, create=True)) as registry:
        publish(registry, "films", publish_root(registry))


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Code in another process, with the names of this module."""
    return subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import *\nimport sys\n{code}", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def be_nobody() -> None:
    """Give up the rights of root, to whom nothing is read-only."""
    if os.geteuid() == 0:
        # Imports what a registry imports when it is used: Python itself may be out of reach later.
        with tempfile.TemporaryDirectory() as folder:
            filled(Store(Path(folder)))
        os.setuid(UNPRIVILEGED)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_the_newest_migration_is_the_one_the_code_expects() -> None:
    assert ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head() == schema.HEAD


def test_the_migrations_make_the_tables_that_the_code_expects(registry: Registry) -> None:
    with registry._database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), schema.metadata) == []


@pytest.mark.parametrize("version", ["0001", "0002", "1.0003"])
def test_a_registry_of_an_older_format_of_stores_is_refused_with_the_command_that_builds_it_anew(
    store: Store, version: str
) -> None:
    filled(store)
    with closing(Registry.open(store)) as registry, registry._database.writing() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
    for opened in (Registry.open, Registry.open_read_only):
        with pytest.raises(CorruptRegistryError, match=f"version {version} of the tables, .*`hplm build demo`"):
            opened(store)


def test_a_registry_is_made_once_and_opened_again_as_it_was(store: Store) -> None:
    filled(store)
    with closing(Registry.open(store, create=True)) as registry:
        assert registry.tenant("films").current.number == 1


def test_an_empty_file_becomes_a_registry_only_when_asked_for(sqlite_store: Store) -> None:
    sqlite_store.root.mkdir()
    path_of(sqlite_store).touch()
    for opened in (Registry.open, Registry.open_read_only):
        with pytest.raises(MissingRegistryError, match="`hplm store adopt`"):
            opened(sqlite_store)
    with closing(Registry.open(sqlite_store, create=True)) as registry:
        assert registry.tenants() == []


def test_sqlite_is_set_up_to_lose_nothing(sqlite_store: Store) -> None:
    with closing(Registry.open(sqlite_store, create=True)) as registry, registry._database.reading() as connection:
        for pragma, wanted in (
            ("journal_mode", "wal"),
            ("foreign_keys", 1),
            ("synchronous", 2),
            ("busy_timeout", 5000),
        ):
            assert connection.exec_driver_sql(f"PRAGMA {pragma}").scalar() == wanted


def test_a_missing_registry_is_said_to_be_missing_and_none_is_made(store: Store) -> None:
    for opened in (Registry.open, Registry.open_read_only):
        with pytest.raises(MissingRegistryError, match="`hplm store adopt`"):
            opened(store)
    assert not path_of(store).exists()


@pytest.mark.parametrize("opened", [Registry.open, Registry.open_read_only])
def test_a_file_that_is_no_database_is_corrupt(sqlite_store: Store, opened: Callable[[Store], Registry]) -> None:
    sqlite_store.root.mkdir()
    path_of(sqlite_store).write_bytes(b"not a database at all" * 1000)
    with pytest.raises(CorruptRegistryError, match="move it aside"):
        opened(sqlite_store)


def test_a_damaged_registry_is_corrupt_when_it_is_read(sqlite_store: Store) -> None:
    filled(sqlite_store)
    size = path_of(sqlite_store).stat().st_size
    with path_of(sqlite_store).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    with pytest.raises(CorruptRegistryError), closing(Registry.open(sqlite_store)) as registry:
        registry.tenant("films")


def test_a_registry_without_a_table_is_corrupt(sqlite_store: Store) -> None:
    filled(sqlite_store)
    with closing(sqlite3.connect(path_of(sqlite_store))) as connection:
        connection.execute("DROP TABLE jobs")
    with closing(Registry.open(sqlite_store)) as registry, pytest.raises(CorruptRegistryError, match="no such table"):
        registry.jobs()


def test_faults_inside_the_file_are_listed(sqlite_store: Store) -> None:
    filled(sqlite_store)
    with closing(Registry.open(sqlite_store)) as registry:
        assert registry.faults() == []
    with closing(sqlite3.connect(path_of(sqlite_store), isolation_level=None)) as connection:
        connection.execute("DELETE FROM domain_versions")
    with closing(Registry.open_read_only(sqlite_store)) as registry:
        assert registry.faults() == ["tenant_versions row 1 names no domain_versions"]


def test_a_registry_of_a_newer_version_is_left_alone(store: Store) -> None:
    filled(store)
    with closing(Registry.open(store)) as registry, registry._database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9.0001'")
    for opened in (Registry.open, Registry.open_read_only):
        with pytest.raises(RegistryUnavailableError, match="upgrade hplm"):
            opened(store)


def test_a_reader_does_not_migrate_an_older_registry(store: Store) -> None:
    filled(store)
    with closing(Registry.open(store)) as registry, registry._database.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '2.0000'")
    with pytest.raises(RegistryUnavailableError, match=r"version 2\.0000 of the tables"):
        Registry.open_read_only(store)


def test_a_locked_registry_can_be_read_and_says_that_it_cannot_be_written(store: Store) -> None:
    with closing(Registry.open(store, create=True)) as holder, closing(Registry.open(store)) as other:
        root = publish_root(holder)
        with holder._database.writing():
            assert other.lineage(root.id) == [root]
            with pytest.raises(RegistryUnavailableError, match="lock"):
                publish(other, "films", root)
        publish(other, "films", root)


def test_a_registry_replaced_under_an_open_one_is_read_anew(sqlite_store: Store, tmp_path: Path) -> None:
    filled(sqlite_store)
    with (
        closing(Registry.open_read_only(sqlite_store)) as reader,
        closing(Registry.open(sqlite_store)) as writer,
    ):
        seen = reader.changes_since(0)
        assert writer.tenant_count() == 1
        aside = tmp_path / "aside"
        aside.mkdir()
        for file in sqlite_store.root.iterdir():
            file.rename(aside / file.name)
        for registry in (reader, writer):
            with pytest.raises(MissingRegistryError):
                registry.generation()
        with closing(Registry.open(sqlite_store, create=True)) as new:
            publish(new, "books", publish_root(new))
        changes = reader.changes_since(seen.generation)
        assert changes.full
        assert [one.name for one in changes.published] == ["books"]
        writer.delete_tenant("books", NOW_S)
        assert reader.tenant_count() == 0


def test_a_full_disk_is_said_and_loses_nothing(sqlite_store: Store) -> None:
    filled(sqlite_store)
    code = (
        "import resource\n"
        "registry = Registry.open(Store(Path(sys.argv[1])))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (70_000, 70_000))\n"
        "try:\n"
        "    registry.publish_tenants(1, 'banks/x', [f't{n}' for n in range(5000)], 1.0)\n"
        "except RegistryUnavailableError as error:\n"
        "    print(error)\n"
    )
    with started(code, sqlite_store.root) as process:
        said, _ = process.communicate(timeout=60)
    assert "nothing was changed" in said
    with closing(Registry.open(sqlite_store)) as registry:
        assert [one.name for one in registry.tenants()] == ["films"]
        assert registry.faults() == []
        registry.publish_tenants(1, "banks/x", ["a"], NOW_S)


@pytest.mark.parametrize("written", [False, True], ids=["by-nobody", "by-another-user"])
def test_a_store_that_cannot_be_written_can_be_read_and_says_so(open_folder: Path, written: bool) -> None:
    store = Store(open_folder / "store")
    filled(store)
    code = (
        "store = Store(Path(sys.argv[1]))\n"
        "be_nobody()\n"
        "with closing(Registry.open_read_only(store)) as registry:\n"
        "    seen = registry.changes_since(0)\n"
        "    print(len(seen.published), flush=True)\n"
        "    sys.stdin.readline()\n"
        "    print(len(registry.changes_since(seen.generation).published))\n"
        "try:\n"
        "    Registry.open(store).delete_tenant('films', 1.0)\n"
        "except HplmError as error:\n"
        "    print(error.wire())\n"
    )
    with closing(Registry.open(store)) as registry:
        root = registry.current_domain("b", "general")
        if not written:
            registry.close()
        before = set(store.root.iterdir())
        for path in (*before, store.root):
            path.chmod(0o555)
        with started(code, store.root) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
            if written:
                publish(registry, "books", root)
            found, refused = process.communicate("go\n", timeout=60)[0].splitlines()
        assert int(found) == written
        assert refused.startswith(RegistryUnavailableError.code)
        assert set(store.root.iterdir()) == before
    for path in (store.root, *store.root.iterdir()):
        path.chmod(0o755)


def test_what_another_user_keeps_to_itself_hides_nothing_else(open_folder: Path) -> None:
    store = Store(open_folder)
    folders = [store.root / "tenants" / name for name in ("closed", "listed", "other")]
    for folder, mode in zip(folders, (0, 0o444, 0o755), strict=True):
        (folder / "1").mkdir(parents=True)
        folder.chmod(mode)
    code = (
        "from hplm.housekeeping.inventory import list_entries\n"
        "be_nobody()\n"
        "print(*(one.path for one in list_entries(Store(Path(sys.argv[1])))))\n"
    )
    with started(code, store.root) as process:
        assert process.communicate(timeout=60)[0] == "tenants/other/1\n"
    for folder in folders:
        folder.chmod(0o755)


def test_a_reader_makes_no_registry_and_changes_no_byte(sqlite_store: Store) -> None:
    filled(sqlite_store)
    before = path_of(sqlite_store).read_bytes()
    with closing(Registry.open_read_only(sqlite_store)) as reader:
        reader.changes_since(0)
        reader.tenants()
    assert path_of(sqlite_store).read_bytes() == before


def test_a_postgresql_that_is_restarted_or_away_is_said_and_comes_back(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    postgres.clear()
    store = Store(tmp_path, postgres.url)
    filled(store)
    with closing(Registry.open(store)) as registry:
        postgres.restart()
        assert registry.tenant_count() == 1
    away = Store(tmp_path, f"postgresql+psycopg://hplm:secret@/hplm?host={tmp_path}")
    with pytest.raises(RegistryUnavailableError) as said:
        Registry.open(away)
    assert "secret" not in str(said.value)


@pytest.mark.parametrize(
    ("when", "said"),
    [("before", "nothing was changed"), ("commit", "the change may have been made: check before")],
)
def test_a_connection_that_breaks_says_whether_the_change_can_have_been_made(
    postgres: PostgresServer, tmp_path: Path, when: str, said: str
) -> None:
    postgres.clear()
    store = Store(tmp_path, postgres.url)
    filled(store)
    with closing(Database(store, writer=True)) as database, closing(Database(store, writer=True)) as other:

        def change() -> None:
            with database.writing() as connection:
                new = {"name": "c", "fingerprint": "f", "path": "bases/c", "created_s": NOW_S}
                connection.execute(insert(schema.bases).values(**new))
                process = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
                with other.reading() as killing:
                    killing.execute(text(f"SELECT pg_terminate_backend({process}, 5000)"))
                if when == "before":
                    connection.execute(select(schema.bases))

        with pytest.raises(RegistryUnavailableError, match=said):
            change()
        with database.reading() as connection:
            assert connection.execute(select(schema.bases.c.name)).scalars().all() == ["b"]


def test_who_is_stopped_within_a_write_keeps_the_others_from_a_postgresql_for_a_while_only(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres.clear()
    store = Store(tmp_path, postgres.url)
    filled(store)
    sooner = POSTGRES_OPTIONS.replace(f"session_timeout={STOPPED_S:.0f}s", "session_timeout=200ms")
    with closing(Registry.open(store)) as other, monkeypatch.context() as of_one:
        # On a busy machine the other may take as long between two of its steps.
        of_one.setattr("hplm.registry.database.POSTGRES_OPTIONS", sooner)
        stopped = Database(store, writer=True)

        def write_slowly() -> None:
            with closing(stopped), stopped.writing() as connection:
                other.publish_base("c", "f", "bases/c", NOW_S)
                connection.execute(select(schema.bases))

        with pytest.raises(RegistryUnavailableError):
            write_slowly()
        assert other.base("c").path == "bases/c"


@pytest.mark.parametrize(
    "address",
    [
        *("mysql://x/y", "sqlite://", "nonsense", "sqlite:////a.sqlite?mode=memory", "postgresql+asyncpg://x/y"),
        *("postgresql+psycopg2://u:secret@h/db", "postgresql+psycopg://u:secret@h:port/db", "u:secret@h/db"),
        *(
            "postgresql+psycopg//u:secret@h/db",
            "postgresql+psycopg://u:secret@[::1/db",
            "postgresql+nosuch://u:secret@h/db",
        ),
    ],
)
def test_another_kind_of_registry_is_refused_without_its_password(tmp_path: Path, address: str) -> None:
    with pytest.raises(HplmError, match="a registry is sqlite") as said:
        Registry.open(Store(tmp_path, address), create=True)
    assert said.type is ConfigError
    assert "secret" not in str(said.value)


def test_a_registry_may_have_a_schema_of_its_own(postgres: PostgresServer, tmp_path: Path) -> None:
    postgres.clear()
    with (
        closing(Registry.open(Store(tmp_path, postgres.url), create=True)) as registry,
        registry._database.writing() as connection,
    ):
        for name in ("one", "two"):
            connection.exec_driver_sql(f"CREATE SCHEMA {name}")
    # Without a driver, as other programs take it.
    address = postgres.url.replace("+psycopg", "")
    for name in ("one", "two"):
        store = Store(tmp_path, f"{address}&options=-csearch_path%3D{name}")
        with closing(Registry.open(store, create=True)) as registry:
            assert registry.domains() == []
            publish_root(registry)
            with registry._database.reading() as connection:
                assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "5s"


def test_a_path_with_odd_characters_is_no_address(tmp_path: Path) -> None:
    store = Store(tmp_path / "a b?c#d%20é")
    filled(store)
    assert path_of(store).is_file()
    assert [path.name for path in tmp_path.iterdir()] == [store.root.name]
