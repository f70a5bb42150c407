"""Alembic runs this module for every command: it uses the caller's connection and transaction."""

from alembic import context

from hplm.registry import schema

context.configure(
    connection=context.config.attributes["connection"], target_metadata=schema.metadata, transactional_ddl=True
)
with context.begin_transaction():
    context.run_migrations()
