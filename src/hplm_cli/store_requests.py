"""Manage requests to a store itself, for commands that run on the store's machine and need no key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from hplm_client.cli.display import printing_errors
from hplm_client.cli.options import open_client
from hplm_client.manage.client import ManageClient

from hplm.core.settings import ManagerSettings
from hplm.errors import ConfigError

DirectStoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Work on the store in this folder instead of asking a server: for whoever can write the store."
    ),
]


class StoreTransport:
    """A transport of `ManageClient` that answers requests about keys and the audit log from the store's registry."""

    streams = False

    def __init__(self, store: Path, registry: str) -> None:
        # Imported here, because a command that asks a server needs no database.
        from hplm.manage.service import ManageService
        from hplm.registry.registry import Registry
        from hplm.store.layout import Store

        place = Store(store, registry)
        Registry.open(place).close()  # an error of the registry is said before a request is noted in it
        self._service = ManageService(place, _without_settings)

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request."""
        from hplm.manage.access import LOCAL

        return json.dumps(self._service.handle(request, LOCAL)).encode()

    def events(self, request: bytes) -> Iterator[bytes]:
        """Raise ConfigError: a store has no events."""
        raise ConfigError("a store sends no events: ask a running server")

    def close(self) -> None:
        """Write the audit log, and close the registry."""
        self._service.close()


def open_manager(url: str, store: Path | None, registry: str, *, as_json: bool) -> ManageClient:
    """Return a client of the server at `url`, or of `store` itself. With `as_json` an error is printed as JSON too."""
    if store is None:
        return open_client(url, as_json=as_json)
    with printing_errors(as_json):
        return ManageClient(transport=StoreTransport(store, registry))


def _without_settings() -> ManagerSettings:
    raise ConfigError("this request needs a running server: leave --store out")
