"""The command `hplm health`."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from hplm.errors import ConfigError, InternalError, UnreachableError
from hplm.reporting.terminal_text import say
from hplm.runtime.local_http import LOCAL_HTTP

DEFAULT_PORT = 8003
MOST_ANSWER_BYTES = 1 << 20


def health(
    url: Annotated[
        str | None,
        typer.Option(
            envvar="HPLM_HEALTH_URL",
            help="Address of the health endpoint: http://HOST:PORT.",
            show_default=f"port {DEFAULT_PORT} of the host in HPLM_URL, else of this machine",
        ),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask only whether `hplm serve` runs.")] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", min=0.1, help="Seconds to wait for the answer.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the endpoint's answer as one line of JSON.")] = False,
) -> None:
    """Ask `hplm serve` whether each of its models answers. The exit status is 0 if all do, else 1.

    Examples:

      hplm health

      hplm health --json --url http://127.0.0.1:8003

      hplm health --live || systemctl restart hplm
    """
    is_well, answer = read_health(url or default_url(), "live" if live else "ready", timeout_s)
    say(json.dumps(answer) if as_json else "\n".join(lines_of(answer)))
    if not is_well:
        raise typer.Exit(1)


def default_url() -> str:
    """Return the usual address of the health endpoint, on the host that HPLM_URL names. Raises ConfigError."""
    if not (server := os.environ.get("HPLM_URL")):
        return f"http://127.0.0.1:{DEFAULT_PORT}"
    # Imported here, because the client's libraries take longer to import than a probe may take.
    from hplm_client.transport.address import split_url

    return f"http://{split_url(server).host.rpartition(':')[0]}:{DEFAULT_PORT}"


def read_health(url: str, path: str, timeout_s: float) -> tuple[bool, dict[str, Any]]:
    """Return whether the server is ready or live, and the endpoint's answer.

    Raises ConfigError if `url` is no address over HTTP, UnreachableError if nothing answers there, and InternalError if
    something else than a health endpoint answers.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not an address of a health endpoint; write http://HOST:8003")
    try:
        with LOCAL_HTTP.open(f"{url.rstrip('/')}/{path}", timeout=timeout_s) as reply:
            status, content = reply.status, reply.read(MOST_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read(MOST_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnreachableError(
            f"{url} does not answer: {getattr(error, 'reason', None) or error}; if `hplm serve` runs, give its --health-port "
            "with --url or HPLM_HEALTH_URL"
        ) from None
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if not (isinstance(answer, dict) and path in answer):
        raise InternalError(
            f"{url} is not a health endpoint of `hplm serve`, it answers with status {status}: check the port"
        )
    return status == 200, answer


def lines_of(answer: dict[str, Any]) -> list[str]:
    """Return an answer of the endpoint in words, a line for each model."""
    if "live" in answer:
        return ["live"]
    models: dict[str, dict[str, Any]] = answer["models"]
    restarts = f", Triton was started again {answer['restarts']} times" if answer["restarts"] else ""
    why = f": {answer['why']}" if "why" in answer else ""
    rows = [f"{'ready' if answer['ready'] else 'not ready'}{why}{restarts}"]
    for name, model in models.items():
        rows.append(f"  {name}: {model['answer']}, {model['ms']} ms" if model["ready"] else f"  {name}: {model['why']}")
    return rows + [f"note: {note}" for note in answer.get("notes", ())]
