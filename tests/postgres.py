"""A PostgreSQL server of the tests' own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

LIBRARY = Path("/usr/lib/postgresql")


def find_postgres() -> Path | None:
    """The newest installation's folder of programs, None where there is none."""
    found = sorted(LIBRARY.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])) if LIBRARY.is_dir() else []
    return found[-1].parent if found else None


class PostgresServer:
    """A cluster in a folder of its own, on a socket in it, as another user where we are root (which it refuses to be)."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        # Not pytest's folder: only its owner may enter that.
        self._folder = Path(tempfile.mkdtemp(prefix="hplm-postgres-"))
        self._user = pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() == 0:
            self._user = "nobody"
            shutil.chown(self._folder, self._user)
        self._run("initdb", "--pgdata=data", "--auth=trust", "--username=hplm", "--encoding=UTF8", "--no-sync")
        options = f"-k {self._folder} -c listen_addresses='' -c fsync=off"
        self._run("pg_ctl", "--pgdata=data", "--log=log", "--wait", f"--options={options}", "start")
        self._run("createdb", f"--host={self._folder}", "--username=hplm", "hplm")
        self.url = f"postgresql+psycopg://hplm@/hplm?host={self._folder}"

    def clear(self) -> None:
        """Empty the database, which is quicker than making another, and drop all connections to it."""
        self._run(
            "psql",
            *(f"--host={self._folder}", "--username=hplm", "--dbname=hplm", "--set=ON_ERROR_STOP=1"),
            "--command=SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'",
            "--command=DROP SCHEMA public CASCADE",
            "--command=CREATE SCHEMA public",
        )

    def restart(self, mode: str = "fast") -> None:
        """Drop every connection, as a server that fails over does; `immediate`: as if all its processes were killed."""
        self._run("pg_ctl", "--pgdata=data", "--log=log", "--wait", f"--mode={mode}", "restart")

    def stop(self) -> None:
        self._run("pg_ctl", "--pgdata=data", "--wait", "--mode=immediate", "stop")
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            cwd=self._folder,
            user=self._user if os.geteuid() == 0 else None,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
