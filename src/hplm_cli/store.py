"""`hplm store`: checks, cleans and registers the artifacts of a store."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hplm.housekeeping import garbage_collection
from hplm.registry.registry import Registry
from hplm.store.cascade_outputs import outputs_of
from hplm.store.layout import Store
from hplm_cli.options import DEFAULT_STORE, RegistryOption, StoreOption

app = typer.Typer(
    no_args_is_help=True,
    help="Check a store, remove files that are no longer used, register the artifacts in it.",
    epilog="Example: hplm store verify --store build/demo/store",
)

CONSOLE = Console(soft_wrap=True, highlight=False)
GraceOption = Annotated[float, typer.Option(min=0, help="Leave alone files that changed in the last so many seconds.")]


@app.command()
def verify(
    store: StoreOption = DEFAULT_STORE, registry: RegistryOption = "", grace_s: GraceOption = garbage_collection.GRACE_S
) -> None:
    """Check the files that the registry names, checksums included; status 1 if there is a problem. Changes nothing.

    Example: hplm store verify
    """
    place = Store(store, registry)
    with closing(Registry.open_read_only(place)) as opened:
        verdict = garbage_collection.verify(place, opened, time.time(), grace_s=grace_s)
    for problem in verdict.problems:
        CONSOLE.print(f"{problem.where}: {problem.what}", style="red", markup=False)
    for problem in verdict.loose:
        CONSOLE.print(f"{problem.where}: {problem.what}", markup=False)
    CONSOLE.print(f"{len(verdict.problems)} problems, {len(verdict.loose)} unused files")
    if any(problem.where != "registry" for problem in verdict.problems):
        CONSOLE.print(
            "What to do: a published folder never changes, so put it back from a backup. Without one, `hplm tenant rollback` "
            "for a tenant that has an older version, or delete the tenant and create it again. Build other artifacts again."
        )
    if verdict.problems:
        raise typer.Exit(1)


@app.command()
def gc(
    store: StoreOption = DEFAULT_STORE,
    registry: RegistryOption = "",
    grace_s: GraceOption = garbage_collection.GRACE_S,
    upload_s: Annotated[
        float, typer.Option(min=0, help="Remove uploads this many seconds old that no job waits for.")
    ] = garbage_collection.UPLOAD_S,
) -> None:
    """Remove retired versions, leftovers of killed processes, and expired uploads. Safe while serving.

    Status 1 if a file could not be removed.

    Example: hplm store gc --grace-s 600
    """
    place = Store(store, registry)
    with closing(Registry.open(place)) as opened:
        removed = garbage_collection.collect(place, opened, time.time(), grace_s=grace_s, upload_s=upload_s)
    for finding in removed.removed:
        CONSOLE.print(f"{finding.where}: {finding.what}", markup=False)
    for problem in removed.stuck:
        CONSOLE.print(f"{problem.where}: {problem.what}", style="red", markup=False)
    CONSOLE.print(f"{len(removed.removed)} removed")
    if removed.stuck:
        raise typer.Exit(1)


@app.command()
def adopt(
    store: StoreOption = DEFAULT_STORE,
    registry: RegistryOption = "",
    domain: Annotated[
        str, typer.Option(help="Root domain (PLOT) of artifacts that name none; default: the only root, or `general`.")
    ] = "",
) -> None:
    """Register artifacts under names that the registry does not know, for instance after the registry was lost.

    Each of these tenants and domains is then at its newest version. A tenant with a cascade is named: its plan was in the
    registry only. Example: hplm store adopt
    """
    place = Store(store, registry)
    place.bases()  # raises if the folder is no store, before a registry is made in it
    with closing(Registry.open(place, create=True)) as opened:
        plan = garbage_collection.adopt(place, opened, time.time(), root=domain)
    for skipped in plan.skipped:
        CONSOLE.print(f"{skipped.where}: not adopted, {skipped.what}", style="yellow", markup=False)
    for name in sorted({tenant.name for tenant in plan.tenants if outputs_of(place.path(tenant.path)).exists()}):
        CONSOLE.print(
            f"tenant {name}: its cascade and promise are lost, because only the lost registry had them; its default base "
            "answers. Delete the tenant and create it again with --levels",
            style="yellow",
            markup=False,
        )
    CONSOLE.print(
        f"{len(plan.bases)} bases, {len(plan.domains)} domain versions, {len(plan.tenants)} tenant versions adopted"
    )


@app.command()
def show(store: StoreOption = DEFAULT_STORE, registry: RegistryOption = "") -> None:
    """Show what the registry holds: bases, their domains with the number of tenants, and jobs.

    Example: hplm store show
    """
    place = Store(store, registry)
    with closing(Registry.open_read_only(place)) as opened:
        users = opened.tenants_by_domain()
        table = Table("base", "domain", "parent", "version", "tenants", title=f"{opened.tenant_count():,} tenants")
        for domain in opened.domains():
            count = users.get((domain.base, domain.name), 0)
            table.add_row(domain.base, domain.name, domain.parent or "", str(domain.current.number), f"{count:,}")
        jobs = Counter(job.state for job in opened.jobs(limit=1000))
        CONSOLE.print(table)
        CONSOLE.print("last jobs: " + (", ".join(f"{count} {state}" for state, count in jobs.items()) or "none"))
