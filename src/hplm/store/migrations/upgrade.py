"""Running the migrations of this folder."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


def upgrade(connection: Connection, to: str = "head") -> None:
    """Bring the registry's tables to the newest version, or one before it, in the transaction that `connection` is in."""
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, to)


def newest() -> str | None:
    """The version that `upgrade` leads to."""
    return ScriptDirectory.from_config(_config()).get_current_head()


def _config() -> Config:
    config = Config()
    # A '%' in the path would be an interpolation.
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return config
