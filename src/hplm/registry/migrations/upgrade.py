"""Running the migrations of this folder."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def upgrade(connection: Connection, to: str = "head") -> None:
    """Bring the registry's tables to the newest version, or one before it, in the transaction that `connection` is in."""
    config = Config()
    # A '%' in the path would be an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, to)
