"""`hplm upload`."""

from __future__ import annotations

from typing import Annotated

import typer

from hplm.errors import UnknownUploadError
from hplm.reporting.terminal_text import say
from hplm_client.cli.manage_commands import DEFAULT_URL, JsonOption, UrlOption, opened, show, show_all

app = typer.Typer(
    no_args_is_help=True,
    help="Look after files that were sent to a running server and are not used up.\n\nExample: hplm upload list",
)


@app.command(name="list")
def list_all(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """Files that take up room for uploads, the oldest first, and the jobs that wait for them.

    Example: hplm upload list
    """
    with opened(url) as client:
        found = client.list_uploads()
    show_all(found, ("id", "name", "bytes", "received", "created_s", "jobs"), as_json)


@app.command()
def drop(
    uploads: Annotated[list[str], typer.Argument(metavar="UPLOAD...", help="Ids, as `hplm upload list` prints them.")],
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Have the server forget files; what a job waits for stays, with status 1.

    Example: hplm upload drop ID
    """
    with opened(url) as client:
        known = {one.id: one for one in client.list_uploads()}
        if unknown := [upload for upload in uploads if upload not in known]:
            raise UnknownUploadError(f"there is no upload {unknown[0]!r}: none was dropped")
        for upload in uploads:
            client.drop_upload(known[upload])
        left = {one.id: one for one in client.list_uploads() if one.id in uploads}
    for upload in uploads:
        if as_json:
            show({"upload": upload, "dropped": upload not in left})
        elif upload in left:
            say(f"upload {upload} stays: {', '.join(left[upload].jobs) or 'another job'} waits for it")
        else:
            say(f"upload {upload} is dropped")
    if left:
        raise typer.Exit(1)
