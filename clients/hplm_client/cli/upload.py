"""The commands `hplm upload`."""

from __future__ import annotations

from typing import Annotated

import typer

from hplm.errors import UnknownUploadError
from hplm_client.cli.display import print_outcome, print_records
from hplm_client.cli.options import DEFAULT_URL, JsonOption, UrlOption, open_client

app = typer.Typer(
    no_args_is_help=True,
    help="List and drop files that were uploaded to a running server and are not used up.\n\nExample: hplm upload list",
)


@app.command(name="list")
def list_uploads(as_json: JsonOption = False, url: UrlOption = DEFAULT_URL) -> None:
    """List the uploads that take room on the server, oldest first, and the jobs that wait for them.

    Example: hplm upload list
    """
    with open_client(url) as client:
        uploads = client.list_uploads()
    print_records(uploads, ("id", "name", "bytes", "received", "created_s", "jobs"), as_json)


@app.command()
def drop(
    uploads: Annotated[
        list[str], typer.Argument(metavar="UPLOAD...", help="Ids of uploads, as `hplm upload list` prints them.")
    ],
    as_json: JsonOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Remove uploads from the server. An upload that a job waits for stays, and the exit status is 1.

    Example: hplm upload drop ID
    """
    with open_client(url) as client:
        known = {upload.id: upload for upload in client.list_uploads()}
        if unknown := [upload for upload in uploads if upload not in known]:
            raise UnknownUploadError(f"there is no upload {unknown[0]!r}: no upload was dropped")
        for upload in uploads:
            client.drop_upload(known[upload])
        kept = {upload.id: upload for upload in client.list_uploads() if upload.id in uploads}
    for upload in uploads:
        outcome = "is dropped"
        if upload in kept:
            outcome = f"stays: {', '.join(kept[upload].jobs) or 'another job'} waits for it"
        print_outcome({"upload": upload, "dropped": upload not in kept}, f"upload {upload} {outcome}", as_json)
    if kept:
        raise typer.Exit(1)
