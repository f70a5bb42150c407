"""`hplm build tenant` and `hplm build domain`: jobs that the command runs itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hplm_builder.cli.build import app as builder
from hplm_builder.domains import domain_build
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.domains.masked_lm import PRETRAIN
from hplm_builder.export import register
from hplm_builder.jobs.local_builds import build_domain, build_tenant
from hplm_builder.tables.plot_tables import build_plot
from hplm_builder.tenants.finetune import TrainSettings
from rich.progress import Progress
from typer.testing import CliRunner

from hplm.adapters import tenant as tenants
from hplm.engine.lower_layers import load_lower
from hplm.errors import (
    ConflictError,
    DataError,
    JobCancelledError,
    MissingRegistryError,
    UnknownDomainError,
    WrongBaseError,
)
from hplm.jobs.lease import JobTimings
from hplm.models import base as bases
from hplm.models.base import Base
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests import tiny
from tests.tasks import colour_data
from tests.unit.hplm.manage import making
from tests.waiting import until

SHORT = TrainSettings(epochs=1)
LONG = TrainSettings(epochs=1000, patience=1000)
DOMAIN = DomainSettings(total_tokens=400, warmup_tokens=400, top_percent=20.0, min_corpus_tokens=300)
HPLM = Path(sys.executable).parent / "hplm"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tiny.make_repository(tmp_path).parent / "store")


@pytest.fixture
def registry(store: Store) -> Iterator[Registry]:
    with closing(Registry.open(store)) as opened:
        yield opened


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(making.corpus())
    return path


def newest(registry: Registry) -> Job:
    return registry.job(registry.jobs(limit=1)[0].id)


@pytest.mark.parametrize(
    ("rows", "file", "options", "reduced", "says_so"),
    [
        # In one epoch neither width finds any name, and a tagging is wide if dev shows no difference.
        (making.names(), "names.jsonl", (), 12, True),
        (making.names(), "names.jsonl", ("--adapter-width", "narrow"), 3, False),
        (making.colours(), "colours.csv", ("--adapter-width", "wide"), 12, True),
        (making.colours(), "colours.csv", ("--reduction-factor", "4"), 12, False),
    ],
    ids=["tagging", "narrow-tagging", "wide-classification", "reduction-factor"],
)
def test_a_tenant_that_is_built_has_the_width_that_dev_or_the_command_chose_and_keeps_it(
    tmp_path: Path, rows: str, file: str, options: tuple[str, ...], reduced: int, says_so: bool
) -> None:
    store = Store(tiny.make_repository(tmp_path).parent / "store")
    (tmp_path / file).write_text(rows)
    command = ["tenant", "acme", "--store", str(store.root), "--base", "tiny", "--plot", "general", "--epochs", "1"]
    done = CliRunner().invoke(builder, [*command, "--train", str(tmp_path / file), *options], catch_exceptions=False)
    assert done.exit_code == 0
    assert ("exported with --reduction-factor 4" in done.output) == says_so
    about = tenants.load_card(tiny.folder_of(store, "acme")).about
    assert about["bottleneck"] == reduced
    assert ("width_scores" in about) == (not options)
    assert f"adapter: {about['adapter_width']}" in done.output
    assert f"baselines on dev: one answer to everything {about['baseline_scores']['constant']:.3f}" in done.output
    # Again, it stays as wide: whoever serves it may have no slots for more.
    done = CliRunner().invoke(builder, [*command, "--train", str(tmp_path / file)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "exported with" not in done.output
    assert tiny.folder_of(store, "acme") == store.tenant_version("acme", 2)
    assert tenants.load_card(tiny.folder_of(store, "acme")).about["bottleneck"] == reduced


def test_a_width_and_a_reduction_factor_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / "colours.csv").write_text(making.colours())
    command = ["tenant", "acme", "--train", str(tmp_path / "colours.csv"), "--adapter-width", "wide"]
    done = CliRunner().invoke(builder, [*command, "--reduction-factor", "8"])
    assert done.exit_code == 2
    assert "give --adapter-width or --reduction-factor, not both" in done.output


def test_a_tenant_that_is_built_again_gets_its_next_version(tmp_path: Path) -> None:
    store = Store(tiny.make_repository(tmp_path).parent / "store")
    for version in (1, 2):
        card = build_tenant(store, "tiny", "general", "acme", colour_data(), SHORT, Progress(disable=True))
        assert tiny.folder_of(store, "acme") == store.tenant_version("acme", version)
        assert tenants.load_card(tiny.folder_of(store, "acme")) == card


def test_a_tenant_is_not_built_again_with_other_labels_also_one_of_a_bank(tmp_path: Path) -> None:
    store = Store(tiny.make_repository(tmp_path).parent / "store")
    (member,) = tiny.make_fleet(store, bases.load(store.base("tiny")), 1)
    for name in ("alpha", member.card.name):
        with pytest.raises(DataError, match="exists with other labels"):
            build_tenant(store, "tiny", "general", name, colour_data(), SHORT, Progress(disable=True))


def test_a_tenant_whose_files_are_gone_is_built_again(tmp_path: Path) -> None:
    store = Store(tiny.make_repository(tmp_path).parent / "store")
    shutil.rmtree(tiny.folder_of(store, "alpha"))
    build_tenant(store, "tiny", "general", "alpha", colour_data(), SHORT, Progress(disable=True))
    assert tenants.load_card(tiny.folder_of(store, "alpha")).labels == colour_data().labels


def test_a_version_whose_folder_is_there_already_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    store = Store(tiny.make_repository(tmp_path).parent / "store")
    store.tenant_version("acme", 1).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hplm_builder.tenants.tenant_job.train_tenant", lambda *_, **__: pytest.fail("it was trained"))
        with pytest.raises(ConflictError):
            build_tenant(store, "tiny", "general", "acme", colour_data(), SHORT, Progress(disable=True))


def test_a_tenant_is_built_over_a_second_base_beside_its_first(tmp_path: Path) -> None:
    store = Store(tiny.make_repository(tmp_path).parent / "store")
    tiny.make_base(store, tiny.config(name="second"), seed=1)
    build_plot(store, "second", "seconds", tiny.sentences(20), 30.0, Progress(disable=True), dtype="float32")
    build_tenant(store, "tiny", "general", "acme", colour_data(), SHORT, Progress(disable=True))
    build_tenant(store, "second", "seconds", "acme", colour_data(), SHORT, Progress(disable=True))
    with closing(Registry.open_read_only(store)) as registry:
        record = registry.tenant("acme")
    assert (record.default_base, record.bases) == ("tiny", {"second": 2, "tiny": 1})


def test_tenants_of_a_bank_tell_how_they_were_made(tmp_path: Path) -> None:
    store, base = tiny.opened(tiny.make_repository(tmp_path).parent)
    trained, made_up = tiny.fleet_of(base, 2)
    card = replace(trained.card, about={"scores": {"dev_accuracy": 0.9}})
    tiny.make_bank(store, base, [replace(trained, card=card), made_up])
    with closing(Registry.open(store)) as registry:
        about, nothing = (registry.tenant(one.card.name).current.about for one in (trained, made_up))
    assert about == {"scores": {"dev_accuracy": 0.9}, "task": card.task, "labels": list(card.labels), "texts": 1}
    assert nothing == {}


def test_a_builder_never_makes_an_empty_registry_over_tenants_that_are_there(tmp_path: Path) -> None:
    store = Store(tiny.make_repository(tmp_path).parent / "store")
    for path in store.root.glob("registry.sqlite*"):
        path.unlink()
    untrained = Progress(disable=True)
    with pytest.raises(MissingRegistryError, match="hplm store adopt"):
        build_tenant(store, "tiny", "general", "acme", colour_data(), SHORT, untrained)
    assert not untrained.tasks
    assert not list(store.root.glob("registry.sqlite*"))


def make_domain(store: Store, base: Base, name: str, above: str = tiny.PLOT) -> None:
    """Publish a small domain below another without training."""
    grams = np.unique(np.random.default_rng(0).integers(5, 10, (20, base.config.window)), axis=0)
    with closing(Registry.open(store)) as registry:
        parent = register.register_root(registry, store, base, above)
        folder = store.domain(base.config.name, name, 1)
        domain_build.publish(folder, base, load_lower(base), grams, {})
        registry.publish_domain(
            base.config.name, name, store.relative(folder), 1.0, parent_id=parent.id, about={}, expected=None
        )


def test_a_tenant_is_built_over_the_domain_that_is_named_and_stays_there(store: Store, registry: Registry) -> None:
    base = bases.load(store.base("tiny"))
    make_domain(store, base, "law")
    for domain in ("law", None):
        build_tenant(store, "tiny", domain, "acme", colour_data(), SHORT, Progress(disable=True))
        assert registry.tenant("acme").domain == "law"
    build_tenant(store, "tiny", "general", "acme", colour_data(), SHORT, Progress(disable=True))
    assert (registry.tenant("acme").domain, registry.tenant("acme").current.number) == ("general", 3)


def test_no_bank_stands_on_a_root_that_is_called_as_a_domain_below_another(store: Store) -> None:
    base = bases.load(store.base("tiny"))
    make_domain(store, base, "law")
    build_plot(store, "tiny", "law", tiny.sentences(20), 30.0, Progress(disable=True), dtype="float32")
    with pytest.raises(DataError, match="'law' is also a domain below another"):
        register.name_root(store, base, "law")


def test_a_domain_is_not_built_below_another_parent_than_it_has_nor_as_a_root_nor_below_itself(
    store: Store, corpus: Path
) -> None:
    base = bases.load(store.base("tiny"))
    make_domain(store, base, "law")
    make_domain(store, base, "tax", above="law")
    build_plot(store, "tiny", "other", tiny.sentences(20), 30.0, Progress(disable=True), dtype="float32")
    register.name_root(store, base, "other")
    for name, parent, why in (
        ("tax", tiny.PLOT, "'tax' is below 'law'"),
        ("other", tiny.PLOT, "'other' is the root of a tree"),
        ("new", "new", "cannot stand on itself"),
    ):
        with pytest.raises(DataError, match=why):
            build_domain(store, "tiny", parent, name, corpus, DOMAIN, Progress(disable=True))


def test_the_tables_of_another_base_are_no_root_of_this_one(store: Store, corpus: Path) -> None:
    second = tiny.make_base(store, tiny.config(name="second"), seed=1)
    with pytest.raises(WrongBaseError, match="PLOT 'general' was built for another base than 'second'"):
        build_domain(store, "second", tiny.PLOT, "law", corpus, DOMAIN, Progress(disable=True))
    with pytest.raises(WrongBaseError, match="build plot --base second"):
        register.lineage_of(store, second, tiny.PLOT)
    with pytest.raises(UnknownDomainError):
        register.lineage_of(store, second, "none")
    with closing(Registry.open(store)) as registry, pytest.raises(UnknownDomainError):
        registry.current_domain("second", tiny.PLOT)


def test_builds_are_jobs_that_are_done_and_what_they_read_stays(
    store: Store, registry: Registry, corpus: Path, tmp_path: Path
) -> None:
    train = tmp_path / "train.csv"
    train.write_text(making.colours())
    common = ["--store", str(store.root), "--base", "tiny"]
    domain = ["--corpus", str(corpus), "--tokens", "400", "--warmup-tokens", "400", "--least", "300"]
    for command in (["tenant", "acme", "--train", str(train), "--epochs", "1"], ["domain", "law", *domain]):
        assert CliRunner().invoke(builder, [*command, *common], catch_exceptions=False).exit_code == 0
        job = newest(registry)
        assert (job.state, job.local, job.attempts) == ("done", True, 1)
        assert job.result is not None
        assert job.result["version"] == 1
    assert registry.tenant("acme").current.about["job"] == registry.jobs(limit=2)[1].id
    assert registry.current_domain("tiny", "law").parent_id is not None
    assert train.exists()
    assert corpus.exists()


def test_a_dry_run_of_a_domain_says_what_it_would_cost_and_publishes_nothing(
    store: Store, registry: Registry, corpus: Path
) -> None:
    plan = build_domain(store, "tiny", None, "law", corpus, DOMAIN, Progress(disable=True), dry_run=True)
    assert plan["estimated_s"] > 0
    assert registry.find_domain("tiny", "law") is None


def test_a_build_waits_for_no_job_of_the_tenant_and_says_which_one_to_cancel(store: Store, registry: Registry) -> None:
    job = registry.submit_job("tenant.create", "tenant:acme", {"dry_run": False}, time.time())
    untrained = Progress(disable=True)
    with pytest.raises(ConflictError, match=f"job {job.id} of tenant:acme is queued: .*`hplm job cancel {job.id}`"):
        build_tenant(store, "tiny", None, "acme", colour_data(), SHORT, untrained)
    assert not untrained.tasks
    registry.cancel_job(job.id, time.time())
    build_tenant(store, "tiny", None, "acme", colour_data(), SHORT, Progress(disable=True))


def run_long(store: Store, tmp_path: Path) -> subprocess.Popen[bytes]:
    """Start a build of tenant `acme` that takes minutes."""
    train = tmp_path / "train.csv"
    train.write_text(making.colours(200))
    command = [
        str(HPLM),
        "build",
        "tenant",
        "acme",
        "--train",
        str(train),
        "--store",
        str(store.root),
        "--base",
        "tiny",
    ]
    environment = {**os.environ, "HPLM_REGISTRY": ""}
    return subprocess.Popen([*command, "--epochs", "1000", "--patience", "1000"], env=environment)


def await_progress(registry: Registry) -> Job:
    def is_training() -> bool:
        jobs = registry.jobs(limit=1)
        return bool(jobs) and jobs[0].progress > 0.25

    until(is_training, 120)
    return newest(registry)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_build_that_is_interrupted_cancels_its_job_at_once(
    store: Store, registry: Registry, tmp_path: Path, number: int
) -> None:
    with run_long(store, tmp_path) as process:
        job = await_progress(registry)
        process.send_signal(number)
        assert process.wait(60) != 0
    assert registry.job(job.id).state == "cancelled"
    assert registry.find_tenant("acme") is None


def test_a_build_whose_job_a_client_cancels_ends(store: Store, registry: Registry) -> None:
    errors: list[BaseException] = []

    def build() -> None:
        try:
            build_tenant(store, "tiny", None, "acme", colour_data(), LONG, Progress(disable=True))
        except JobCancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    job = await_progress(registry)
    registry.cancel_job(job.id, time.time())
    thread.join(60)
    assert errors
    assert registry.job(job.id).state == "cancelled"


def test_a_second_build_of_a_tenant_is_refused_while_the_first_runs_and_waits_for_the_lease_of_a_killed_one(
    store: Store, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_long(store, tmp_path) as process:
        job = await_progress(registry)
        with pytest.raises(ConflictError, match=f"job {job.id} of tenant:acme is running"):
            build_tenant(store, "tiny", None, "acme", colour_data(), SHORT, Progress(disable=True))
        process.kill()
        process.wait()
    # A lease of 30 s, and 10 s more, would be long here.
    monkeypatch.setattr("hplm.jobs.local.JobTimings", lambda: JobTimings(lease_s=0.1, watch_s=0.5))
    build_tenant(store, "tiny", None, "acme", colour_data(), SHORT, Progress(disable=True))
    lost = registry.job(job.id)
    assert lost.error is not None
    assert (lost.state, lost.error["code"]) == ("failed", "WORKER_LOST")
    assert "run the command again" in lost.error["message"]
    assert registry.tenant("acme").current.number == 1


def test_a_domain_build_that_failed_late_continues_where_it_was(
    store: Store, registry: Registry, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    really = domain_build.publish

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(domain_build, "publish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_domain(store, "tiny", None, "law", corpus, DOMAIN, Progress(disable=True))
    assert newest(registry).state == "cancelled"
    monkeypatch.setattr(domain_build, "publish", really)
    bars = Progress(disable=True)
    monkeypatch.setattr(bars, "update", lambda *_, description, **__: steps.append(description))
    build_domain(store, "tiny", None, "law", corpus, DOMAIN, bars)
    assert registry.current_domain("tiny", "law").number == 2
    # The pretraining was not done again.
    assert steps.count(f"law: {PRETRAIN}") <= 1
