"""`hplm audit`: shows who asked the manager for what."""

from __future__ import annotations

from typing import Annotated

import typer
from hplm_client.cli.display import print_records
from hplm_client.cli.options import DEFAULT_URL, JsonOption, UrlOption

from hplm_cli.options import RegistryOption
from hplm_cli.store_requests import DirectStoreOption, open_manager


def audit(
    key: Annotated[str | None, typer.Option(help="Only requests with this key: its id.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only requests about this subject, such as tenant:films.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most entries to show.")] = 100,
    store: DirectStoreOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Show the audit log of manage requests, newest first: when, whose key, its role, what, and the outcome.

    The details of a change name a key that was created or revoked, the values of limits, or the job of a training.

    Entries are kept for 90 days, of changes and of other requests only the newest. Equal requests that change nothing are
    counted in `times`.

    Examples:

      hplm audit --limit 20

      hplm audit --subject tenant:films --store build/demo/store --json
    """
    with open_manager(url, store, registry, as_json=as_json) as client:
        entries = client.audit(key=key, subject=subject, limit=limit)
    print_records(entries, ("at_s", "key", "role", "action", "subject", "outcome", "times", "details"), as_json)
