"""The jobs that create and update domains."""

from __future__ import annotations

from typing import Any

from hplm.errors import AlreadyThereError, UnknownDomainError
from hplm.manage.job_inputs import locate
from hplm.registry.records import DomainVersion, Job
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm_builder.data.corpus_file import MOST_BYTES
from hplm_builder.domains.domain_build import DomainSettings, build_domain, estimate_domain
from hplm_builder.jobs.job_context import Bench, made_by, publish


def make_domain(job: Job, bench: Bench) -> dict[str, Any]:
    """Create or update a domain. An update goes on from the lower encoder of the version before, and keeps its n-grams."""
    request, registry = job.request, bench.registry
    base, name = request["base"], request["domain"]
    if (made := made_by(job, _versions(registry, base, name))) is not None:
        return _result(made)
    current = registry.current_domain(base, name) if job.kind == "domain.update" else None
    if current is None and registry.find_domain(base, name) is not None:
        raise AlreadyThereError(
            f"domain {name!r} exists already: domain.update (`hplm domain update`) makes its next version"
        )
    parent = registry.current_domain(base, request["parent"])
    corpus = locate(request["corpus"], bench.uploads)
    number = registry.next_domain_number(base, name, lambda n: bench.store.domain(base, name, n))
    folder = bench.store.domain(base, name, number)
    about = build_domain(
        bench.store,
        base,
        _paths(registry, current or parent),
        folder,
        corpus,
        _settings(request),
        bench.report,
        below=parent.path,
        before=current.path if current else None,
        work=bench.store.scratch(job.id),
        most_corpus_bytes=request.get("most_corpus_bytes", MOST_BYTES),
        device=bench.device,
    )
    crash_point("job.trained")
    made = publish(
        bench,
        folder,
        lambda path: registry.publish_domain(
            base,
            name,
            path,
            bench.clock(),
            parent_id=parent.id,
            about={**about, "job": job.id},
            expected=current.number if current else None,
            number=number,
        ),
        lambda: made_by(job, _versions(registry, base, name)),
        job=job,
    )
    return _result(made)


def plan_domain(job: Job, bench: Bench) -> dict[str, Any]:
    """Estimate what `make_domain` would cost; the corpus is checked as `make_domain` does it."""
    request, registry = job.request, bench.registry
    is_update = job.kind == "domain.update"
    start = registry.current_domain(request["base"], request["domain"] if is_update else request["parent"])
    corpus = locate(request["corpus"], bench.uploads)
    return estimate_domain(
        bench.store,
        request["base"],
        _paths(registry, start),
        corpus,
        _settings(request),
        bench.report,
        before=start.path if is_update else None,
        most_corpus_bytes=request.get("most_corpus_bytes", MOST_BYTES),
        device=bench.device,
    )


def _versions(registry: Registry, base: str, name: str) -> list[DomainVersion]:
    try:
        return registry.domain_versions(base, name)
    except UnknownDomainError:
        return []


def _paths(registry: Registry, version: DomainVersion) -> list[str]:
    return [above.path for above in registry.lineage(version.id)]


def _settings(request: dict[str, Any]) -> DomainSettings:
    settings = dict(request["settings"])
    if "tokens" in settings:
        settings["total_tokens"] = settings.pop("tokens")
    return DomainSettings(**settings, min_corpus_tokens=request["min_corpus_tokens"])


def _result(version: DomainVersion) -> dict[str, Any]:
    return {"domain": version.domain, "base": version.base, "version": version.number}
