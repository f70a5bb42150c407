"""`hplm key`: creates, lists and revokes the keys of tenants and operators."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from hplm_client.cli.display import console, format_value, print_json, print_outcome, print_records
from hplm_client.cli.options import DEFAULT_URL, JsonOption, UrlOption

from hplm.access.keys import parse
from hplm.access.roles import OperatorRole, Scope
from hplm.reporting.terminal_text import say
from hplm_cli.options import RegistryOption
from hplm_cli.store_requests import DirectStoreOption, open_manager

app = typer.Typer(
    no_args_is_help=True,
    help="Create, list and revoke the keys of tenants and operators. With --store a command works on the store itself and "
    "needs no key; otherwise it asks a running server, with the admin key in HPLM_KEY.\n\n"
    "Example: hplm key create films --store build/demo/store",
)
_DURATION = re.compile(r"(\d{1,6})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90d, 12h, 30m or 45s. Raises typer.BadParameter."""
    match = _DURATION.fullmatch(text)
    if match is None or not int(match[1]):
        raise typer.BadParameter(f"{text!r} is no duration: write 90d, 12h, 30m or 45s")
    return float(int(match[1]) * _SECONDS[match[2]])


@app.command()
def create(
    tenant: Annotated[str | None, typer.Argument(help="Tenant of the key; none for an operator's key.")] = None,
    scope: Annotated[
        Scope | None,
        typer.Option(
            help="infer: requests to the tenant's model; manage: also manage requests about the tenant. Default: infer."
        ),
    ] = None,
    operator: Annotated[
        OperatorRole | None,
        typer.Option(
            help="Make an operator's key. read: list and show; manage: also change; admin: also keys, limits and the audit log."
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(help="Life of the key: 90d, 12h, 30m or 45s. Default: until it is revoked.")
    ] = None,
    store: DirectStoreOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Create a key and print it on standard output. It cannot be shown again. Servers accept it within a second.

    Examples:

      hplm key create films --expires 90d

      hplm key create films --scope manage --json

      hplm key create --operator admin --store build/demo/store > admin.key
    """
    if (tenant is None) == (operator is None):
        raise typer.BadParameter("give a TENANT for a tenant's key, or --operator ROLE for an operator's key")
    if operator is not None and scope is not None:
        raise typer.BadParameter("--scope is for a tenant's key; an operator's key has the role of --operator")
    expires_in_s = None if expires is None else parse_duration(expires)
    with open_manager(url, store, registry, as_json=as_json) as client:
        if operator is not None:
            key = client.create_operator_key(operator, expires_in_s=expires_in_s)
        else:
            assert tenant is not None
            key = client.create_key(tenant, scope or "infer", expires_in_s=expires_in_s)
    if as_json:
        print_json(key)
        return
    owner = f"tenant {tenant}" if operator is None else "an operator"
    until = "it is revoked" if key.expires_s is None else format_value("expires_s", key.expires_s)
    console().print(
        f"Key {key.id} of {owner}, {key.role}, valid until {until}. Keep it now, it cannot be shown again:",
        markup=False,
    )
    say(key.text)


@app.command(name="list")
def list_keys(
    tenant: Annotated[str | None, typer.Argument(help="List only the keys of this tenant.")] = None,
    store: DirectStoreOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """List keys: id, tenant, role, and when each was created, expires, was revoked and was last used. Never the key itself.

    Examples:

      hplm key list

      hplm key list films --json
    """
    with open_manager(url, store, registry, as_json=as_json) as client:
        keys = client.list_keys(tenant)
    print_records(keys, ("id", "tenant", "role", "created_s", "expires_s", "revoked_s", "last_used_s"), as_json)


@app.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as `hplm key list` prints it.")],
    store: DirectStoreOption = None,
    registry: RegistryOption = "",
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Revoke a key for good. All servers refuse it within a second; the output says by when.

    Example: hplm key revoke abcdefgh234567ab
    """
    # A leaked key may be given whole. Its id is the part before the secret.
    parsed = parse(key.encode())
    with open_manager(url, store, registry, as_json=as_json) as client:
        revoked = client.revoke_key(key if parsed is None else parsed.id)
    by = format_value("refused_by_s", revoked.refused_by_s)
    print_outcome(revoked, f"key {revoked.id} is revoked: all servers refuse it by {by}", as_json)
