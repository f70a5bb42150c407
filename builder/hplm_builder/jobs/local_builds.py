"""`hplm build tenant` and `hplm build domain`: jobs that the command runs itself, without a server or a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from hplm.adapters import tenant as tenants
from hplm.adapters.tenant import TenantCard
from hplm.core.names import check_name, check_name_of
from hplm.core.settings import AdapterWidth, EncodeSettings, Miss
from hplm.engine.lower_layers import check_hierarchical
from hplm.errors import ArtifactError, ConfigError, DataError
from hplm.housekeeping.removal_plan import DEFAULT_ROOT
from hplm.jobs.handlers import JobHandler
from hplm.jobs.local import run_local_job
from hplm.manage.students import has_students
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.records import PLAN, TenantRecord
from hplm.reporting.progress import bar_report
from hplm.store.domain_version import has_branch
from hplm.store.layout import Store
from hplm_builder.convert.checkpoint import work_place
from hplm_builder.data.labelled import LabelledData, LabelledFile
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.domains.domain_job import make_domain, plan_domain
from hplm_builder.export.register import open_registry, register_root
from hplm_builder.tenants.finetune import TrainSettings
from hplm_builder.tenants.tenant_build import load_card, load_version
from hplm_builder.tenants.tenant_job import make_tenant

# Local jobs drop no uploads, and retire no versions: only the settings of a server say how many versions stay.
COMMON: dict[str, Any] = {"keep_versions": None, "drop_uploads": False}


def build_tenant(
    store: Store,
    base_name: str,
    domain: str | None,
    name: str,
    data: LabelledData,
    settings: TrainSettings,
    progress: Progress,
    *,
    example: str = "",
    miss: Miss = "compute",
    width: AdapterWidth | None = None,
    keep_width: bool = False,
) -> TenantCard:
    """Train a tenant from scratch over a domain, publish its next version, and return its card with the scores.

    `domain` None is the domain that the tenant stands on, and DEFAULT_ROOT for a new tenant. `miss` must be as the tenant will
    be served. `width` is for the slots of an export with default settings; None takes `settings.reduction_factor`. With
    `keep_width` the adapter is as wide as that of the current version instead, if its files can be read.

    The versions of the tenant over other bases stay. Raises DataError if the current version has other labels, ConfigError if
    it has students, ConflictError if the tenant has an unfinished job, MissingRegistryError if the store has tenants and no
    registry, and what `run_local_job` raises.
    """
    check_name(name)
    base = bases.load(store.base(base_name))
    with closing(open_registry(store)) as registry:
        current = registry.find_tenant(name, base_name)
        if current is not None:
            factor = _current_factor(store, base, current, data)
            if keep_width and factor is not None:
                settings, width = replace(settings, reduction_factor=factor), None
        domain = domain or (current.domain if current is not None else DEFAULT_ROOT)
        register_root(registry, store, base, domain)
        given = asdict(settings)
        if width is not None:
            del given["reduction_factor"]
            given["adapter_width"] = width
        request = {
            **COMMON,
            "tenant": name,
            "base": base_name,
            "domain": domain,
            "settings": given,
            "reduction_factor": EncodeSettings.reduction_factor,
            "miss": miss,
            "example": example,
            "from_scratch": True,
            "dry_run": False,
        }
        result = run_local_job(
            store,
            registry,
            "tenant.create" if current is None else "tenant.update",
            f"tenant:{name}",
            request,
            partial(make_tenant, data=data),
            scratch=work_place(store, f"tenant-{name}"),
            on_progress=bar_report(progress, name, of_all=True),
        )
    return tenants.load_card(store.tenant_version(name, result["version"]))


def _current_factor(store: Store, base: Base, current: TenantRecord, data: LabelledData) -> int | None:
    """Return the reduction factor of the current version's adapter.

    Raises DataError if the version has other labels, ConfigError if it has students.
    """
    # A version whose files are damaged or gone is simply replaced.
    with suppress(ArtifactError):
        card = load_card(store, current.current, base)
        if (card.task, card.labels, card.texts) != (data.task, data.labels, data.texts):
            raise DataError(f"tenant {card.name!r} exists with other labels, or another kind of task: delete it first")
        if has_students(current.current):
            raise ConfigError(
                f"tenant {card.name!r} has students over base {current.base!r}, and this command makes one adapter: train its "
                "students again with `hplm tenant update` or `hplm tenant students`, or delete it over this base first"
            )
        return base.config.hidden_size // load_version(store, current.current, base).packed.reduced_size
    return None


def build_domain(
    store: Store,
    base_name: str,
    parent: str | None,
    name: str,
    corpus: Path,
    settings: DomainSettings,
    progress: Progress,
    *,
    device: str = "auto",
    dry_run: bool = False,
    dev: Sequence[Path] = (),
    keep_top: bool = False,
) -> dict[str, Any]:
    """Publish a domain's next version, made from `corpus`; return what the registry says about it.

    `parent` None is the domain's parent, and DEFAULT_ROOT for a new domain. An interrupted build continues where it was. A
    `dry_run` returns only what the build would cost. `dev` are files of labelled examples to compare on. With `keep_top` an
    update of a version without a table makes none.

    Raises DataError for a root and for another parent than the domain has, ConflictError if the domain has an
    unfinished job, and what `register_root` and `run_local_job` raise.
    """
    check_name_of("domain", name)
    base = bases.load(store.base(base_name))
    check_hierarchical(base.config)
    with closing(open_registry(store)) as registry:
        current = registry.find_domain(base_name, name)
        if current is not None and current.parent is None:
            raise DataError(
                f"{name!r} is the root of a tree, which `hplm build plot --base {base_name} --plot {name}` makes: give the "
                "domain another name"
            )
        parent = parent or (current.parent if current is not None else None) or DEFAULT_ROOT
        if name == parent:
            raise DataError(f"domain {name!r} cannot stand on itself: give the new one another name")
        if current is not None and current.parent != parent:
            raise DataError(f"domain {name!r} is below {current.parent!r}, which its next version cannot change")
        register_root(registry, store, base, parent)
        given = asdict(settings)
        if keep_top and current is not None:
            version = registry.current_domain(base_name, name)
            given["top_percent"] = settings.top_percent if has_branch(store.path(version.path)) else 0.0
        files = [LabelledFile(path, path.name) for path in dev]
        request = {
            **COMMON,
            "base": base_name,
            "domain": name,
            "parent": parent,
            "min_corpus_tokens": given.pop("min_corpus_tokens"),
            "settings": given,
            "dry_run": dry_run,
        }
        subject, scratch = f"domain:{base_name}/{name}", f"domain-{base_name}-{name}"
        if dry_run:
            # Its own scratch folder: the end of a job removes that, and an interrupted build must stay.
            subject, scratch = f"{PLAN}{subject}", f"plan-{base_name}-{name}"
        result = run_local_job(
            store,
            registry,
            "domain.create" if current is None else "domain.update",
            subject,
            request,
            JobHandler(
                partial(make_domain, corpus=corpus, dev=files), partial(plan_domain, corpus=corpus, dev=files)
            ).run,
            scratch=work_place(store, scratch),
            on_progress=bar_report(progress, name, of_all=True),
            device=device,
        )
        if dry_run:
            return dict(result["plan"])
        versions = registry.domain_versions(base_name, name)
        return next(version.about for version in versions if version.number == result["version"])
