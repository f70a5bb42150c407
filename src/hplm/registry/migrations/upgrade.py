"""Makes the registry's tables, and runs the migrations of this folder on older tables."""

from __future__ import annotations

import secrets
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, insert

from hplm.registry import schema


def create(connection: Connection) -> None:
    """Make the tables of a new registry, in the transaction that `connection` is in."""
    schema.metadata.create_all(connection, checkfirst=False)
    # Each registry starts at another number, so that a server notices a registry that was lost and made anew.
    # The number has room above it, and JSON holds it exactly.
    floor = (1 + secrets.randbelow(1 << 28)) << 22
    connection.execute(insert(schema.state).values(id=1, generation=floor, floor=floor))
    command.stamp(_config(connection), "head")


def upgrade(connection: Connection) -> None:
    """Bring older tables to the newest version, in the transaction that `connection` is in."""
    command.upgrade(_config(connection), "head")


def _config(connection: Connection) -> Config:
    config = Config()
    # Alembic would interpolate a '%' in the path.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
