"""What comes of a job, in one process: tenants, domains, what is refused, what is left."""

from __future__ import annotations

import gzip
import json
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hplm_builder.jobs.handlers import load_handlers
from hplm_builder.tenants import tenant_job

from hplm.adapters import tenant as tenants
from hplm.engine.open_domain import Domain, open_lineage
from hplm.errors import BadManageRequestError, ConfigError, ConflictError, DataError, UnknownDomainError
from hplm.housekeeping import garbage_collection
from hplm.jobs.lease import JobTimings
from hplm.jobs.worker_loop import Worker
from hplm.manage.service import ManageService
from hplm.models import base as bases
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.managed import at_work
from tests.unit.hplm.manage.making import (
    LEARNING,
    QUICK,
    QUICK_DOMAIN,
    ask,
    colours,
    corpus,
    create_domain,
    create_tenant,
    failure,
    files_below,
    make_service,
    names,
    update,
    upload,
    work,
)
from tests.waiting import until

PLANNED_WITHIN_S = 120.0
# The settings of tenants by the widths that their jobs train.
WIDTHS = {"both": {}, "narrow": {"adapter_width": "narrow"}, "wide": {"adapter_width": "wide"}}


def test_a_tenant_is_made_published_and_can_be_served(service: ManageService, store: Store, registry: Registry) -> None:
    job = create_tenant(service, "acme", colours(60), task="classification")
    work(store)
    done = registry.job(job)
    assert (done.state, done.error, done.progress) == ("done", None, 1.0)
    assert done.result is not None
    assert done.result["version"] == 1
    assert (done.result["task"], done.result["num_labels"]) == ("classification", 2)
    shown = ask(service, "tenant.show", tenant="acme")["tenant"]
    assert shown["about"]["labels"] == ["blue", "red"]
    assert shown["about"]["scores"].keys() >= {"dev_accuracy"}
    assert shown["about"]["curve"]
    assert shown["about"]["confusion"]
    base = bases.load(store.base("tiny"))
    made = tenants.load(store.tenant_version("acme", 1), fingerprint=base.fingerprint, name="acme")
    assert made.card.labels == ("blue", "red")
    # A customer's text is kept nowhere, nor shown when a server starts.
    manifest = (store.tenant_version("acme", 1) / "manifest.json").read_text()
    texts = [row.rpartition(",")[0] for row in colours(60).splitlines()[1:]]
    assert [text for text in texts if text in manifest] == []
    assert not registry.uploads()
    assert not [path for path in files_below(store) if path.startswith(("uploads/", "jobs/"))]


@pytest.mark.parametrize("miss", ["backoff", "compute"])
def test_a_tenant_is_trained_over_what_it_will_be_served(
    store: Store, registry: Registry, miss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    really = tenant_job.open_features

    def open_features(*given: Any, **options: Any) -> Domain:
        opened.append(options["miss"])
        return really(*given, **options)

    monkeypatch.setattr(tenant_job, "open_features", open_features)
    with closing(make_service(store, miss=miss)) as service:
        job = create_tenant(service, "acme")
    work(store)
    assert registry.job(job).state == "done"
    assert opened == [miss]
    assert registry.tenant("acme").current.about["miss"] == miss


def test_wide_adapters_are_as_wide_as_the_server_has_them_and_stay_so_through_updates(
    store: Store, registry: Registry
) -> None:
    base = bases.load(store.base("tiny"))
    hidden = base.config.hidden_size

    def widths(*names: str) -> list[int]:
        folders = {name: store.path(registry.tenant(name).current.path) for name in names}
        made = (tenants.load(folder, fingerprint=base.fingerprint, name=name) for name, folder in folders.items())
        return [one.packed.reduced_size for one in made]

    narrow, wide = ({**QUICK, "adapter_width": width} for width in ("narrow", "wide"))
    with closing(make_service(store, reduction_factor=4)) as service:
        create_tenant(service, "colours", settings=narrow)
        create_tenant(service, "names", names(), file="train.jsonl", settings=wide)
    with closing(make_service(store, reduction_factor=24)) as service:
        create_tenant(service, "small", settings=narrow)
    work(store)
    assert widths("colours", "names", "small") == [hidden // 16, hidden // 4, hidden // 24]
    with closing(make_service(store, reduction_factor=16)) as service:
        update(service, "names", names(), file="train.jsonl")
    work(store)
    assert registry.tenant("names").current.number == 2
    assert widths("names") == [hidden // 4]
    with closing(make_service(store, reduction_factor=4)) as service:
        job = update(service, "names", names(), file="train.jsonl", settings=narrow)
    work(store)
    said = failure(registry, job, "BAD_MANAGE_REQUEST")
    assert "the tenant's adapter width is wide, an update cannot make it narrow" in said


def test_both_widths_are_trained_by_default_and_the_job_and_the_card_tell_the_choice(
    store: Store, registry: Registry
) -> None:
    with closing(make_service(store, reduction_factor=4)) as service:
        jobs = {width: create_tenant(service, width, settings={**QUICK, **given}) for width, given in WIDTHS.items()}
        work(store)
        shown = ask(service, "tenant.show", tenant="both")["tenant"]["about"]
    results = {width: registry.job(job).result or {} for width, job in jobs.items()}
    chosen = results["both"]["adapter_width"]
    assert results["both"]["width_scores"] == {
        width: results[width]["scores"]["dev_accuracy"] for width in ("narrow", "wide")
    }
    assert results["both"]["scores"] == results[chosen]["scores"]
    assert results["both"]["width_why"].startswith("on dev wide has ")
    assert [results[width]["adapter_width"] for width in ("narrow", "wide")] == ["narrow", "wide"]
    assert all("width_scores" not in results[width] for width in ("narrow", "wide"))
    for key in ("adapter_width", "width_scores", "width_why", "baseline_scores"):
        assert shown[key] == results["both"][key]


def test_slots_that_hold_no_wide_adapter_leave_no_choice_and_a_wide_one_is_refused(
    store: Store, registry: Registry
) -> None:
    with closing(make_service(store, reduction_factor=16)) as service:
        job = create_tenant(service, "acme")
        with pytest.raises(
            BadManageRequestError, match=r"slots of base .* hold no wide adapter .* --reduction-factor 4"
        ):
            create_tenant(service, "wide", settings={"adapter_width": "wide"})
        with pytest.raises(BadManageRequestError, match="adapter_width must be one of 'auto', 'narrow', 'wide'"):
            create_tenant(service, "wide", settings={"adapter_width": "broad"})
    work(store)
    result = registry.job(job).result
    assert result is not None
    assert result["adapter_width"] == "narrow"
    assert result["width_why"] == "the server's adapter slots hold no wider adapter"
    assert "width_scores" not in result


def test_an_uploads_ending_may_be_in_capitals(service: ManageService, store: Store, registry: Registry) -> None:
    create_tenant(service, "acme", file="TRAIN.CSV")
    work(store)
    assert registry.tenant("acme").current.number == 1


def test_a_job_reads_the_columns_that_its_request_named(
    service: ManageService, store: Store, registry: Registry
) -> None:
    tickets = "\ufeff" + colours().replace("text,label", "Body;Category").replace(",", ";").replace("\n", "\r")
    columns = {"text": "body", "label": "CATEGORY"}
    job = create_tenant(service, "tickets", tickets, columns=columns)
    assert registry.job(job).request["columns"] == columns
    work(store)
    assert sorted(registry.tenant("tickets").current.about["labels"]) == ["blue", "red"]
    job = update(service, "tickets", tickets.replace("Body", "Text"))
    work(store)
    assert "there are 'Text', 'Category'" in failure(registry, job, "BAD_DATA")


def test_an_update_is_a_new_version_that_goes_on_from_the_one_before(
    service: ManageService, store: Store, registry: Registry
) -> None:
    create_tenant(service, "acme", colours(60))
    work(store)
    update(service, "acme", colours(60, is_swapped=True))
    work(store)
    assert registry.tenant("acme").current.number == 2
    assert ask(service, "tenant.rollback", tenant="acme")["version"] == 1
    update(service, "acme", colours(60, is_swapped=True))
    work(store)
    assert [version.number for version in registry.tenant_versions("acme")] == [1, 2, 3]
    assert registry.tenant("acme").current.number == 3


def test_an_update_that_is_no_better_on_dev_publishes_nothing_and_says_so(store: Store, registry: Registry) -> None:
    with closing(make_service(store, keep_versions=2)) as service:
        create_tenant(service, "acme", settings=LEARNING)
        work(store)
        update(service, "acme", colours(is_swapped=True))
        work(store)
        before = files_below(store)
        jobs = [update(service, "acme", colours(is_swapped=True), settings=QUICK) for _ in range(3)]
        work(store)
        found = [registry.job(job) for job in jobs]
        assert [(one.state, one.error) for one in found] == [("done", None)] * 3
        for one in found:
            assert one.result is not None
            assert (one.result["version"], one.result["published"]) == (2, False)
            assert re.fullmatch(r"no better on dev \(accuracy .*, now .*\): version 2 stays", one.result["why"])
        assert files_below(store) == before
        assert not registry.uploads()
        # What differs is there to go back to.
        assert ask(service, "tenant.rollback", tenant="acme")["version"] == 1


def test_a_job_ends_when_servers_have_had_time_to_see_its_version(
    service: ManageService, store: Store, registry: Registry
) -> None:
    job = create_tenant(service, "acme")
    Worker(store, "w", load_handlers, timings=JobTimings(serve_wait_s=0.5)).run(until_idle=True)
    done = registry.job(job)
    assert done.ended_s is not None
    assert done.ended_s - registry.tenant("acme").current.created_s >= 0.5


def test_an_update_that_learns_nothing_still_moves_a_tenant_to_the_domain_as_it_is_now(
    service: ManageService, store: Store, registry: Registry
) -> None:
    create_tenant(service, "acme", settings=LEARNING)
    create_domain(service, "law")
    work(store)
    job = update(service, "acme", colours(), settings={"epochs": 1, "learning_rates": [1e-7]}, domain="law")
    work(store)
    result = registry.job(job).result
    assert result is not None
    assert (result["version"], result["published"]) == (2, True)
    assert registry.tenant("acme").domain == "law"


def test_an_update_that_names_no_domain_leaves_a_tenant_on_that_which_it_finds(
    service: ManageService, store: Store, registry: Registry
) -> None:
    create_tenant(service, "acme")
    create_domain(service, "law")
    work(store)
    # Asked for while the tenant is still on the root.
    jobs = [update(service, "acme", colours(is_swapped=True), domain="law"), update(service, "acme", colours())]
    work(store)
    assert [registry.job(job).state for job in jobs] == ["done", "done"]
    found = registry.tenant("acme")
    assert (found.current.number, found.domain) == (3, "law")


def test_an_update_that_is_no_better_and_was_overtaken_says_so(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tenant(service, "acme")
    work(store)
    update(service, "acme", colours(is_swapped=True))
    work(store)
    job = update(service, "acme", colours(is_swapped=True), settings={"epochs": 1, "learning_rates": [1e-7]})
    really = tenant_job.train_tenant

    def train_tenant(*given: Any, **options: Any) -> tenants.Tenant:
        # As `hplm build tenant` does, which makes no job.
        first = registry.tenant_versions("acme")[0]
        number = registry.next_number("acme")
        registry.publish_tenant(
            "acme", first.domain_version_id, first.path, time.time(), about={}, number=number, expected=2
        )
        return really(*given, **options)

    monkeypatch.setattr(tenant_job, "train_tenant", train_tenant)
    work(store)
    failure(registry, job, "CONFLICT")


def test_an_update_is_judged_by_dev_data_of_the_seed_of_the_version_before(
    service: ManageService, store: Store, registry: Registry
) -> None:
    data = {"train": {"upload": upload(service, colours(60))}}
    ask(service, "tenant.create", tenant="acme", data=data, settings={**QUICK, "seed": 7})
    work(store)
    update(service, "acme", colours(60, is_swapped=True))
    work(store)
    update(service, "acme", colours(60), settings={**LEARNING, "seed": 8})
    work(store)
    assert [version.about["seed"] for version in registry.tenant_versions("acme")] == [7, 7, 8]


def test_a_domain_is_made_and_a_tenant_stands_on_it(service: ManageService, store: Store, registry: Registry) -> None:
    job = create_domain(service, "law")
    work(store)
    assert registry.job(job).error is None
    job = create_domain(service, "contracts", parent="law")
    work(store)
    assert registry.job(job).error is None
    job = create_tenant(service, "acme", domain="contracts")
    work(store)
    assert registry.job(job).error is None
    lineage = registry.lineage(registry.tenant("acme").current.domain_version_id)
    assert [above.domain for above in lineage] == ["contracts", "law", "general"]
    base = bases.load(store.base("tiny"))
    lookup = open_lineage(store, base, [above.path for above in lineage])
    assert lookup.hidden_states(np.array([2, 9, 3]), [3]).shape == (3, base.config.hidden_size)


def test_a_domains_job_says_whether_the_domain_helps_and_what_to_do(
    service: ManageService, store: Store, registry: Registry
) -> None:
    dev = [{"upload": upload(service, colours(60), "dev.csv")}]
    job = create_domain(service, "law", dev=dev)
    work(store)
    result = registry.job(job).result
    assert result is not None
    assert result.keys() == {"domain", "base", "version", "verdict", "why", "advice"}
    assert f"law {result['verdict']} on labelled examples, compared with general." in result["why"]
    assert "dev.csv, 47 examples: accuracy" in result["why"]
    assert "law" in result["advice"]
    benefit = ask(service, "domain.show", domain="law")["domain"]["about"]["benefit"]
    assert {key: benefit[key] for key in ("verdict", "why", "advice")} == {
        key: result[key] for key in ("verdict", "why", "advice")
    }
    assert not registry.uploads()
    # Texts of labelled examples are kept nowhere.
    manifest = (store.domain("tiny", "law", 1) / "lower" / "manifest.json").read_text()
    assert not [text for row in colours(60).splitlines()[1:] if (text := row.rpartition(",")[0]) in manifest]
    source = {"upload": upload(service, corpus(seed=5), "more.txt")}
    job = str(ask(service, "domain.update", domain="law", corpus=source, settings=QUICK_DOMAIN)["job"])
    work(store)
    updated = registry.job(job).result
    assert updated is not None
    assert "compared with version 1. " in updated["why"]
    assert "no file of them was given (--dev)" in updated["why"]


@pytest.mark.parametrize(
    ("content", "words"), [("text,label\na,x\nb,y\n", "dev.csv"), (colours(labels=["red"]), "one class")]
)
def test_a_domains_examples_that_teach_nothing_fail_with_the_reason_and_leave_nothing(
    service: ManageService, store: Store, registry: Registry, content: str, words: str
) -> None:
    before = files_below(store)
    job = create_domain(service, "law", dev=[{"upload": upload(service, content, "dev.csv")}])
    work(store)
    assert words in failure(registry, job, "BAD_DATA")
    assert not registry.uploads()
    assert files_below(store) == before


def test_a_domain_without_a_table_serves_stays_without_one_and_is_refused_by_a_server_that_backs_off(
    service: ManageService, store: Store, registry: Registry
) -> None:
    settings = {**QUICK_DOMAIN, "top_percent": 0}
    source = {"upload": upload(service, corpus(), "c.txt")}
    ask(service, "domain.create", domain="law", corpus=source, settings=settings)
    work(store)
    del settings["top_percent"]
    source = {"upload": upload(service, corpus(seed=5), "c.txt")}
    ask(service, "domain.update", domain="law", corpus=source, settings=settings)
    create_tenant(service, "acme", domain="law")
    work(store)
    version = registry.current_domain("tiny", "law")
    assert (version.number, version.about["rows"]) == (2, 0)
    assert [path.name for path in store.path(version.path).iterdir()] == ["lower"]
    assert registry.tenant("acme").current.domain_version_id == version.id
    with closing(make_service(store, miss="backoff")) as backing_off:
        job = create_tenant(backing_off, "other", domain="law")
        work(store)
        assert "version 2 of domain 'law' has no table" in failure(registry, job, "BAD_CONFIG")
        source = {"upload": upload(service, corpus(), "c.txt")}
        with pytest.raises(BadManageRequestError, match="top_percent 0 has no table to back off from"):
            ask(backing_off, "domain.create", domain="tax", corpus=source, settings={"top_percent": 0})


def test_no_roll_back_spoils_an_update_that_runs(service: ManageService, store: Store, registry: Registry) -> None:
    create_tenant(service, "acme")
    work(store)
    update(service, "acme", colours(is_swapped=True))
    work(store)
    job = update(service, "acme", colours())
    held = registry.claim_job("one", time.time(), 30.0)
    assert held is not None
    with pytest.raises(ConflictError, match=f"job {job} is updating"):
        ask(service, "tenant.rollback", tenant="acme")
    ask(service, "job.cancel", job=job)
    assert ask(service, "tenant.rollback", tenant="acme")["version"] == 1


def test_a_roll_back_goes_before_an_update_that_waits_and_after_one_that_has_published(
    service: ManageService, store: Store, registry: Registry
) -> None:
    create_tenant(service, "acme")
    work(store)
    update(service, "acme", colours(is_swapped=True))
    work(store)
    job = update(service, "acme", colours(is_swapped=True))
    assert ask(service, "tenant.rollback", tenant="acme")["version"] == 1
    with at_work(store, timings=JobTimings(serve_wait_s=60.0)):
        until(lambda: registry.tenant("acme").current.number == 3)
        assert registry.job(job).state == "running"
        assert ask(service, "tenant.rollback", tenant="acme")["version"] == 1
    assert registry.job(job).state == "done"


def test_a_tenant_may_be_asked_for_while_its_domain_is_being_made(
    service: ManageService, store: Store, registry: Registry
) -> None:
    domain = create_domain(service, "law")
    tenant = create_tenant(service, "acme", domain="law")
    with pytest.raises(UnknownDomainError, match=f"job {domain} makes it"):
        create_tenant(service, "other", domain="law", dry_run=True)
    with pytest.raises(UnknownDomainError, match=f"job {domain} makes it"):
        create_domain(service, "contracts", parent="law")
    # While the one runs, the other is not taken.
    held = registry.claim_job("one", time.time(), 30.0)
    assert held is not None
    assert held.id == domain
    assert registry.claim_job("two", time.time(), 30.0) is None
    registry.release_job(domain, "one", time.time())
    work(store)
    assert [registry.job(job).state for job in (domain, tenant)] == ["done", "done"]
    assert registry.tenant("acme").domain == "law"


def test_a_tenant_whose_domain_came_to_nothing_fails_with_that(
    service: ManageService, store: Store, registry: Registry
) -> None:
    domain = create_domain(service, "law")
    tenant = create_tenant(service, "acme", domain="law")
    ask(service, "job.cancel", job=domain)
    with pytest.raises(UnknownDomainError, match=r"has no domain .law.$"):
        create_tenant(service, "other", domain="law")
    work(store)
    failure(registry, tenant, "UNKNOWN_DOMAIN")


def test_a_domains_update_leaves_its_tenants_where_they_are_until_they_are_updated(
    service: ManageService, store: Store, registry: Registry
) -> None:
    create_domain(service, "law")
    work(store)
    create_tenant(service, "acme", domain="law")
    work(store)
    source = {"upload": upload(service, corpus(seed=5), "more.txt")}
    ask(service, "domain.update", domain="law", corpus=source, settings=QUICK_DOMAIN)
    work(store)
    assert registry.domain("tiny", "law").current.number == 2
    assert registry.domain("tiny", "law").parent == "general"
    assert registry.tenant("acme").domain_number == 1
    update(service, "acme", colours(seed=3))
    work(store)
    assert registry.tenant("acme").domain_number == 2


@pytest.mark.parametrize(
    ("content", "name", "words"),
    [
        ("text,label\na cat,x\n", "train.csv", "1 example"),
        ("text,label\na cat,x\nthe dog,x\n", "train.csv", "one class"),
        ("text,label\n", "train.csv", "no example"),
        ('{"text": "a", "label": "x"}\n{"text"', "train.jsonl", "line 2 is not JSON"),
        ("words,label\na,x\n", "train.csv", "no column `text`"),
    ],
    ids=["one-example", "one-class", "none", "broken-line", "no-text"],
)
def test_data_that_teaches_nothing_fails_with_the_reason_and_leaves_nothing(
    service: ManageService, store: Store, registry: Registry, content: str, name: str, words: str
) -> None:
    before = files_below(store)
    data = {"train": {"upload": upload(service, content, name)}}
    job = ask(service, "tenant.create", tenant="acme", data=data)["job"]
    work(store)
    why = failure(registry, job, "BAD_DATA")
    assert words in why
    assert str(store.root) not in why
    assert not registry.uploads()
    assert files_below(store) == before


def test_other_labels_than_the_first_versions_are_refused(
    service: ManageService, store: Store, registry: Registry
) -> None:
    create_tenant(service, "acme")
    work(store)
    job = update(service, "acme", colours(labels=("red", "green")))
    work(store)
    assert "green" in failure(registry, job, "BAD_DATA")
    assert registry.tenant("acme").current.number == 1
    assert not registry.uploads()


def test_a_corpus_that_is_too_small_is_refused_with_what_it_lacks(store: Store, registry: Registry) -> None:
    with closing(make_service(store, min_corpus_tokens=2000)) as service:
        job = create_domain(service, "law")
        work(store)
    assert "a domain needs 2,000" in failure(registry, job, "CORPUS_TOO_SMALL")
    assert not registry.uploads()
    assert not [path for path in files_below(store) if path.startswith(("domains/", "jobs/"))]


def test_a_bomb_of_a_packed_corpus_fails_with_the_reason_and_leaves_nothing(
    service: ManageService, store: Store, registry: Registry
) -> None:
    before = files_below(store)
    bomb = gzip.compress(b"x" * 900_000 + b"\n") * 300
    source = {"upload": upload(service, bomb, "c.txt.gz")}
    job = ask(service, "domain.create", domain="law", corpus=source, settings=QUICK_DOMAIN)["job"]
    work(store)
    assert "more than the 268,435,456 bytes" in failure(registry, job, "BAD_DATA")
    assert files_below(store) == before


def test_a_dry_run_says_what_it_would_cost_and_changes_nothing(
    service: ManageService, store: Store, registry: Registry
) -> None:
    service._dry_run_wait_s = PLANNED_WITHIN_S
    before = files_below(store)
    with at_work(store):
        data = {"train": {"upload": upload(service, colours(50))}}
        tenant = ask(service, "tenant.create", tenant="acme", data=data, dry_run=True)["plan"]
        source = {"upload": upload(service, corpus(), "c.txt")}
        domain = ask(service, "domain.create", domain="law", corpus=source, dry_run=True)["plan"]
        poor = {"train": {"upload": upload(service, colours(labels=["red"]))}}
        with pytest.raises(DataError, match="one class"):
            ask(service, "tenant.create", tenant="acme", data=poor, dry_run=True)
    assert tenant["examples"] == {"train": 46, "dev": 4, "test": 0}
    assert tenant["labels"] == ["blue", "red"]
    assert tenant["estimated_s"] > 0
    assert domain["corpus"]["documents"] == 60
    assert domain["estimated_s"] > 0
    assert ask(service, "tenant.list")["tenants"] == []
    # The files are there for the real run, which may follow.
    ask(service, "tenant.create", tenant="acme", data=data, settings=QUICK)
    work(store)
    weights = store.tenant_version("acme", 1) / "weights.safetensors"
    assert tenant["bytes"] == pytest.approx(weights.stat().st_size, abs=1000)
    rest = {path for path in files_below(store) if not path.startswith(("tenants/", "uploads/"))}
    assert rest == before
    assert registry.tenant("acme").current.number == 1


@pytest.mark.parametrize(("reduction_factor", "trained"), [(16, ["narrow"]), (4, ["wide", "narrow"])])
def test_what_a_tagging_takes_is_told_with_its_transitions_and_an_update_takes_what_the_version_before_does(
    store: Store, reduction_factor: int, trained: list[str]
) -> None:
    def planned(service: ManageService, action: str) -> dict[str, Any]:
        service._dry_run_wait_s = PLANNED_WITHIN_S
        data = {"train": {"upload": upload(service, names(), "train.jsonl")}}
        with at_work(store):
            return dict(ask(service, action, tenant="names", data=data, dry_run=True)["plan"])

    with closing(make_service(store, reduction_factor=reduction_factor)) as service:
        first = planned(service, "tenant.create")
        create_tenant(service, "names", names(), file="train.jsonl")
        work(store)
    # On a server of another width by now.
    with closing(make_service(store, reduction_factor=20 - reduction_factor)) as service:
        again = planned(service, "tenant.update")
    weights = store.tenant_version("names", 1) / "weights.safetensors"
    assert (first["bytes"], again["bytes"]) == pytest.approx((weights.stat().st_size,) * 2, abs=1000)
    # The usual width of a tagging is the first. An update keeps the width.
    assert (first["adapter_widths"], again["adapter_widths"]) == (trained, trained[:1])


def test_what_is_odd_about_the_data_is_said_by_the_plan_the_job_and_the_card(
    service: ManageService, store: Store, registry: Registry
) -> None:
    service._dry_run_wait_s = PLANNED_WITHIN_S
    rows = names() + json.dumps({"text": "Anna", "entities": [{"label": "KIND0", "start": 1, "end": 4}]}) + "\n"
    data = {"train": {"upload": upload(service, rows, "train.jsonl")}}
    with at_work(store):
        plan = ask(service, "tenant.create", tenant="names", data=data, settings=QUICK, dry_run=True)["plan"]
    job = ask(service, "tenant.create", tenant="names", data=data, settings=QUICK)["job"]
    work(store)
    result = registry.job(job).result
    assert result is not None
    # What was learned of so few may be nothing, which is said too.
    said, *_ = result["warnings"]
    assert re.match("1 of 1.. entities of the (train|dev) data can never be found", said)
    assert plan["warnings"] == [said]
    assert registry.tenant("names").current.about["warnings"] == result["warnings"]


def test_old_versions_go_after_a_while_and_what_is_served_stays(store: Store, registry: Registry) -> None:
    with closing(make_service(store, keep_versions=2)) as service:
        create_tenant(service, "acme")
        for seed in range(1, 4):
            work(store)
            update(service, "acme", colours(seed=seed, is_swapped=seed % 2 == 1))
        work(store)
    assert [version.number for version in registry.tenant_versions("acme")] == [3, 4]
    assert store.tenant_version("acme", 1).is_dir()
    work(store, later_s=garbage_collection.GRACE_S + 60)
    assert sorted(path.name for path in store.path("tenants/acme").iterdir()) == ["3", "4"]


def test_a_second_create_of_a_name_fails_and_the_first_stays(
    service: ManageService, store: Store, registry: Registry
) -> None:
    # Both asked for at the same time: the manager saw neither of them.
    first = create_tenant(service, "acme")
    asked = registry.job(first)
    second = registry.submit_job(asked.kind, asked.subject, asked.request, asked.created_s).id
    work(store)
    assert registry.job(first).state == "done"
    failure(registry, second, "ALREADY_EXISTS")
    assert registry.tenant("acme").current.number == 1


def test_a_link_that_leads_elsewhere_when_the_job_runs_is_not_followed(
    store: Store, registry: Registry, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "real.csv").write_text(colours())
    (tmp_path / "secret.csv").write_text(colours())
    link = tmp_path / "data" / "train.csv"
    link.symlink_to("real.csv")
    with closing(make_service(store, allow_paths=True, data_root=str(tmp_path / "data"))) as service:
        data = {"train": {"path": "train.csv"}}
        jobs = [ask(service, "tenant.create", tenant="a", data=data, settings=QUICK)["job"]]
        work(store)
        jobs.append(ask(service, "tenant.create", tenant="b", data=data, settings=QUICK)["job"])
        link.unlink()
        link.symlink_to(tmp_path / "secret.csv")
        work(store)
    assert registry.job(jobs[0]).state == "done"
    failure(registry, jobs[1], "FORBIDDEN")
    assert (tmp_path / "data" / "real.csv").is_file()


@pytest.mark.parametrize("replaced", [False, True], ids=["grown", "replaced"])
def test_a_file_that_is_larger_than_allowed_by_the_time_the_job_reads_it_is_refused(
    store: Store, registry: Registry, tmp_path: Path, replaced: bool
) -> None:
    path = tmp_path / "train.csv"
    path.write_text(colours())
    settings: dict[str, Any] = {"allow_paths": True, "data_root": str(tmp_path), "max_data_bytes": len(colours())}
    with closing(make_service(store, **settings)) as service:
        data = {"train": {"path": "train.csv"}}
        first = ask(service, "tenant.create", tenant="a", data=data, settings=QUICK)["job"]
        work(store)
        second = ask(service, "tenant.create", tenant="b", data=data, settings=QUICK)["job"]
        if replaced:
            path.unlink()
        path.write_text(colours() + "one more,red\n")
        work(store)
    assert registry.job(first).state == "done"
    why = failure(registry, second, "BAD_DATA")
    assert why == f"train.csv has more than the {len(colours()):,} bytes that are accepted"


def test_a_dry_run_of_a_domain_is_of_the_workers_device(service: ManageService, store: Store) -> None:
    service._dry_run_wait_s = PLANNED_WITHIN_S
    source = {"upload": upload(service, corpus(), "c.txt")}
    with at_work(store, device="tpu"), pytest.raises(ConfigError, match="device must be auto, cpu or cuda, got 'tpu'"):
        ask(service, "domain.create", domain="law", corpus=source, settings=QUICK_DOMAIN, dry_run=True)


def test_an_upload_serves_as_many_jobs_as_name_it(service: ManageService, store: Store, registry: Registry) -> None:
    data = {"train": {"upload": upload(service, colours())}}
    jobs = [ask(service, "tenant.create", tenant=name, data=data, settings=QUICK)["job"] for name in ("a", "b")]
    work(store)
    assert [registry.job(job).state for job in jobs] == ["done", "done"]
    assert not registry.uploads()


@pytest.mark.parametrize("damaged", ["tenant", "domain"])
def test_what_is_said_of_a_damaged_file_helps_and_names_no_path(
    service: ManageService, store: Store, registry: Registry, damaged: str, caplog: pytest.LogCaptureFixture
) -> None:
    create_tenant(service, "acme")
    work(store)
    folder = store.tenant_version("acme", 1) if damaged == "tenant" else store.table("general", "root")
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    job = update(service, "acme", colours())
    work(store)
    why = failure(registry, job, "CORRUPT_ARTIFACT")
    assert ("version 1 of the tenant" if damaged == "tenant" else "of the base or of a domain") in why
    assert ("delete the tenant and create it again" in why) == (damaged == "tenant")
    assert str(store.root) not in why
    assert str(file) in caplog.text


@pytest.mark.parametrize("drop_uploads", [True, False])
@pytest.mark.parametrize("ending", ["fails", "cancelled", "deleted", "dropped"])
def test_uploads_go_with_their_job_where_it_says_so_and_may_be_named_again_where_not(
    service: ManageService, store: Store, registry: Registry, ending: str, drop_uploads: bool
) -> None:
    create_tenant(service, "acme")
    work(store)
    source = {"upload": upload(service, colours())}
    asked = {"settings": {"pooling": "cls"}} if ending == "fails" else {}
    job = ask(service, "tenant.update", tenant="acme", data={"train": source}, drop_uploads=drop_uploads, **asked)[
        "job"
    ]
    (shown,) = ask(service, "upload.list")["uploads"]
    assert (shown["name"], shown["bytes"], shown["jobs"]) == ("train.csv", len(colours()), [job])
    ask(service, "upload.drop", **source)
    assert registry.uploads()
    if ending == "deleted":
        ask(service, "tenant.delete", tenant="acme")
    elif ending != "fails":
        ask(service, "job.cancel", job=job)
    work(store)
    assert registry.job(job).state == ("failed" if ending == "fails" else "cancelled")
    if ending == "dropped":
        ask(service, "upload.drop", **source)
    assert [one["jobs"] for one in ask(service, "upload.list")["uploads"]] == (
        [] if drop_uploads or ending == "dropped" else [[]]
    )
    assert store.upload(source["upload"]).exists() == (not drop_uploads and ending != "dropped")


@pytest.mark.parametrize("asked", [{"task": "regression"}, {"settings": {"pooling": "cls"}}], ids=["task", "pooling"])
def test_an_update_changes_nothing_that_its_head_was_made_for(
    service: ManageService, store: Store, registry: Registry, asked: dict[str, Any]
) -> None:
    create_tenant(service, "acme")
    work(store)
    job = update(service, "acme", colours(seed=1), **asked)
    work(store)
    assert "an update cannot make it" in failure(registry, job, "BAD_MANAGE_REQUEST")
