"""Runs the migrations of this folder."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def upgrade(connection: Connection) -> None:
    """Bring the registry's tables to the newest version, in the transaction that `connection` is in."""
    config = Config()
    # Alembic would interpolate a '%' in the path.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
