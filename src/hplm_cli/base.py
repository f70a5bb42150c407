"""`hplm base`: the bases of a model repository."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from hplm_builder.export.model_folders import check_deletable, delete_base
from hplm_client.cli.deletion import YesOption, confirm
from hplm_client.cli.display import print_outcome, print_records
from hplm_client.cli.options import JsonOption, open_client
from hplm_client.manage.answers import Base, parse_answer

from hplm.core.roles import names, served_base
from hplm.housekeeping.garbage_collection import drop_uploads
from hplm.manage.base_survey import count_and_names, survey_bases, tenants_of
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from hplm.triton.workarounds.dead_stubs import stubs_over

app = typer.Typer(
    no_args_is_help=True,
    help="List the bases that a server serves, or take one out. `hplm build export --name` adds one.\n\n"
    "Example: hplm base list",
)
ModelsOption = Annotated[Path, typer.Option(help="Triton model repository of the bases.")]
DEFAULT_MODELS = Path("build/demo/models")


@app.command(name="list")
def list_bases(
    models: ModelsOption = DEFAULT_MODELS,
    url: Annotated[
        str | None,
        typer.Option(help="Ask the manager of a running server instead: grpc://HOST:PORT or http://HOST:PORT."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List bases: the model that clients call, the base, its kind, its tenants, and the memory of its processes.

    `trunk_of` names the base that a trunk was distilled from.

    Examples:

      hplm base list --models /srv/hplm/models

      hplm base list --url grpc://127.0.0.1:8001 --json
    """
    if url is not None:
        with open_client(url, as_json=as_json) as client:
            bases = client.list_bases()
    else:
        served = served_base(models)
        store = Store(served.store_root, served.settings.encode.registry)
        with closing(Registry.open_read_only(store)) as registry:
            survey = survey_bases(models, store, registry, stubs_over(models))
        bases = [parse_answer(Base, base) for base in survey]
    print_records(bases, ("model", "base", "kind", "trunk_of", "tenants", "memory"), as_json)


@app.command()
def delete(
    name: Annotated[str, typer.Argument(help="Model by which clients call the base.")],
    models: ModelsOption = DEFAULT_MODELS,
    from_store: Annotated[
        bool,
        typer.Option(
            "--from-store",
            help="Delete the base, its domains and tables too: `hplm store gc` removes the files. Refused if it has tenants.",
        ),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take a base out of a model repository. A running `hplm serve` unloads its models when no request of it runs.

    If the base has tenants, the command asks first, because the server stops to answer them by the base. Its tenants, domains
    and tables stay in the store, and an export of the same base serves them again. The first base of a repository is refused.

    Examples:

      hplm base delete mpnet --models /srv/hplm/models

      hplm base delete mpnet --models /srv/hplm/models --from-store
    """
    served = served_base(models, name)
    base, roles = served.base, names(served.roles)
    check_deletable(models, name)
    # With --from-store a base with tenants is refused.
    if not (yes or from_store) and (tenants := tenants_of(served)):
        confirm(f"Take out model {name}? The server stops to answer {count_and_names(tenants)} by base {base}.")
    if from_store:
        store = Store(served.store_root, served.settings.encode.registry)
        with closing(Registry.open(store)) as registry:
            drop_uploads(store, registry, registry.delete_base(base, time.time()))
    delete_base(models, name)
    print_outcome(
        {"model": name, "base": base},
        f"model {name} of base {base} is taken out; a running `hplm serve` unloads it within seconds, your own tritonserver "
        f"must unload {', '.join(reversed(roles))}, in this order",
        as_json,
    )
