"""The handlers of jobs that create and update domains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hplm.errors import AlreadyThereError, UnknownDomainError
from hplm.jobs.context import JobContext, publish, version_of_job
from hplm.manage.job_inputs import locate
from hplm.manage.uploads import Uploads
from hplm.registry.records import DomainVersion, Job
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store.domain_version import has_branch
from hplm_builder.data.corpus_file import MOST_BYTES
from hplm_builder.data.labelled import LabelledFile
from hplm_builder.domains.domain_build import DomainSettings, build_domain, estimate_domain


def make_domain(
    job: Job, context: JobContext, corpus: Path | None = None, dev: Sequence[LabelledFile] | None = None
) -> dict[str, Any]:
    """Create or update a domain, from `corpus` and `dev` or else from the files of the request.

    An update continues from the lower encoder of the previous version, and keeps its n-grams.
    """
    request, registry = job.request, context.registry
    base, name = request["base"], request["domain"]
    if (made := version_of_job(job, _versions(registry, base, name))) is not None:
        return _result(made)
    current = registry.current_domain(base, name) if job.kind == "domain.update" else None
    if current is None and registry.find_domain(base, name) is not None:
        raise AlreadyThereError(
            f"domain {name!r} exists already: domain.update (`hplm domain update`) makes its next version"
        )
    parent = registry.current_domain(base, request["parent"])
    corpus = corpus or _corpus(request, context)
    number = registry.next_domain_number(base, name, lambda n: context.store.domain(base, name, n))
    folder = context.store.domain(base, name, number)
    about = build_domain(
        context.store,
        base,
        _paths(registry, current or parent),
        folder,
        corpus,
        _settings(request, context, current),
        context.lease.report,
        above=_paths(registry, parent),
        before=current.path if current else None,
        work=context.scratch,
        most_corpus_bytes=request.get("most_corpus_bytes", MOST_BYTES),
        device=context.device,
        dev=_dev_files(request, context) if dev is None else dev,
    )
    crash_point("job.trained")
    made = publish(
        context,
        folder,
        lambda path: registry.publish_domain(
            base,
            name,
            path,
            context.clock(),
            parent_id=parent.id,
            about={**about, "job": job.id},
            expected=current.number if current else None,
            number=number,
        ),
        lambda: version_of_job(job, _versions(registry, base, name)),
        job=job,
    )
    return _result(made)


def plan_domain(
    job: Job, context: JobContext, corpus: Path | None = None, dev: Sequence[LabelledFile] | None = None
) -> dict[str, Any]:
    """Return what `make_domain` would cost. The files are checked in the same way."""
    request, registry = job.request, context.registry
    is_update = job.kind == "domain.update"
    start = registry.current_domain(request["base"], request["domain"] if is_update else request["parent"])
    corpus = corpus or _corpus(request, context)
    return estimate_domain(
        context.store,
        request["base"],
        _paths(registry, start),
        corpus,
        _settings(request, context, start if is_update else None),
        context.lease.report,
        before=start.path if is_update else None,
        most_corpus_bytes=request.get("most_corpus_bytes", MOST_BYTES),
        device=context.device,
        dev=_dev_files(request, context) if dev is None else dev,
    )


def _corpus(request: dict[str, Any], context: JobContext) -> Path:
    return locate(request["corpus"], Uploads(context.store, context.registry))


def _dev_files(request: dict[str, Any], context: JobContext) -> list[LabelledFile]:
    """Return the files of labelled examples that the request names. Jobs of before there were some name none."""
    uploads = Uploads(context.store, context.registry)
    paths = [locate(source, uploads) for source in request.get("dev", [])]
    # Errors are for the sender of the file: they name the file, not its place on this machine.
    return [LabelledFile(path, path.name, request["most_data_bytes"]) for path in paths]


def _versions(registry: Registry, base: str, name: str) -> list[DomainVersion]:
    try:
        return registry.domain_versions(base, name)
    except UnknownDomainError:
        return []


def _paths(registry: Registry, version: DomainVersion) -> list[str]:
    return [above.path for above in registry.lineage(version.id)]


def _settings(request: dict[str, Any], context: JobContext, before: DomainVersion | None) -> DomainSettings:
    """Return the settings of a request. If it says nothing of a table, a version without one gets none by an update."""
    settings = dict(request["settings"])
    if "tokens" in settings:
        settings["total_tokens"] = settings.pop("tokens")
    if before is not None and "top_percent" not in settings and not has_branch(context.store.path(before.path)):
        settings["top_percent"] = 0.0
    return DomainSettings(**settings, min_corpus_tokens=request["min_corpus_tokens"])


def _result(version: DomainVersion) -> dict[str, Any]:
    """Return the result of a job: the version, and whether it helps. A version of an older hplm does not say that."""
    made = {"domain": version.domain, "base": version.base, "version": version.number}
    benefit = version.about.get("benefit", {})
    warnings = {key: version.about[key] for key in ("warnings",) if key in version.about}
    return {**made, **{key: benefit[key] for key in ("verdict", "why", "advice") if key in benefit}, **warnings}
