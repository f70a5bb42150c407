"""`hplm tenant`, `hplm domain` and `hplm job` against the real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import hplm_builder
import numpy as np
import pytest
from hplm_builder.domains import domain_job
from hplm_builder.domains.domain_build import DomainSettings
from hplm_builder.tenants import pseudo_labels
from hplm_client import Client, ManageClient
from typer.testing import CliRunner, Result

from hplm.errors import (
    DataError,
    DomainInUseError,
    JobCancelledError,
    UnknownDomainError,
    UnknownTenantError,
    UnknownUploadError,
)
from hplm.models import base as bases
from hplm.registry.registry import Registry
from hplm_cli import make_app
from tests import tiny
from tests.managed import Place, expected_logits, swapped

pytestmark = pytest.mark.triton
BIN = Path(sys.executable).parent
MODEL = str(Path(hplm_builder.__file__).parent / "convert" / "shipped" / "minilm-ngrams")
FAST = ["--epochs", "2", "--learning-rate", "0.003"]
LEARNING = ["--epochs", "3", "--learning-rate", "0.05"]
TEXTS = ("the red cat sings in Paris", "a slow dog runs over the green hill and under the river")


class Terminal:
    """Runs commands in this process: a new one takes a second to start."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._env = {"HPLM_URL": url}

    def run(self, *command: str, answer: str = "") -> Result:
        return CliRunner().invoke(make_app(command[0]), command, env=self._env, input=answer)

    def out(self, *command: str, answer: str = "") -> str:
        """Standard output of a command that must succeed."""
        done = self.run(*command, answer=answer)
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    def json(self, *command: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out(*command, "--json").splitlines()]


@pytest.fixture(params=["http", "grpc"])
def terminal(request: pytest.FixtureRequest, place: Place) -> Terminal:
    return Terminal(place.url(request.param))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("the red cat runs\n" * 10)
    return path


@pytest.fixture
def queued(place: Place) -> Iterator[str]:
    """A job that no worker takes."""
    with closing(Registry.open(place.store)) as registry:
        job = registry.submit_job("tenant.create", "tenant:queued", {}, time.time()).id
        yield job
        registry.cancel_job(job, time.time())


def test_a_tenant_goes_through_its_life(terminal: Terminal, place: Place) -> None:
    with place.working():
        printed = terminal.out("tenant", "create", "acme", "--train", str(place.rows), *FAST)
        assert "tenant acme is at version" in printed
        assert ": classification of 2 labels, dev_accuracy" in printed
        again = terminal.out("tenant", "update", "acme", "--train", str(place.rows), "--learning-rate", "1e-7")
        assert "no better on dev (accuracy" in again
        (event,) = terminal.json("tenant", "update", "acme", "--train", str(swapped(place.rows)), *LEARNING)
    assert event["state"] == "done"
    second = event["result"]["version"]
    (shown,) = terminal.json("tenant", "show", "acme")
    first = shown["versions"][0]["version"]
    assert shown["version"] == second
    assert "acme" in terminal.out("tenant", "list", "--prefix", "ac")
    assert terminal.json("tenant", "rollback", "acme") == [
        {"tenant": "acme", "version": first, "bases": {shown["base"]: first}}
    ]
    assert f"at version {second}" in terminal.out("tenant", "rollback", "acme", "--version", str(second))
    assert terminal.out("tenant", "students", "acme", "--least", "2").endswith(
        "at least 2 students answer each text of tenant acme\n"
    )
    summary = terminal.out("tenant", "show", "acme")
    assert "at least 2 students answer each text\n" in summary
    assert "general" in summary
    assert f"adapter: {shown['about']['adapter_width']}\n" in summary
    assert "baselines on dev: one answer to everything 0." in summary
    for answer, words in (("n\n", "Nothing was done.\n"), ("", "If no person can answer, give --yes")):
        kept = terminal.run("tenant", "delete", "acme", answer=answer)
        assert kept.exit_code == 1
        assert words in kept.stderr
    assert terminal.out("tenant", "delete", "acme", answer="y\n").endswith("tenant acme is deleted\n")
    for kind, error in (("tenant", UnknownTenantError), ("domain", UnknownDomainError)):
        unknown = terminal.run(kind, "delete", "acme", answer="y\n")
        assert isinstance(unknown.exception, error)
        assert "Delete" not in unknown.stderr
    assert terminal.json("tenant", "list", "--prefix", "acme") == []


def test_a_dry_run_prints_what_it_would_cost(terminal: Terminal, place: Place) -> None:
    command = ["tenant", "create", "planned", "--train", str(place.rows), *FAST, "--dry-run"]
    with place.working():
        assert "estimated: about" in terminal.out(*command)
        (plan,) = terminal.json(*command)
    assert plan["examples"]["train"] > 0


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        (
            "{},5",
            ["--task", "regression"],
            ["labels are read as numbers with a decimal comma: '0,5' (odd.csv, line 3) as 0.5"],
        ),
        ("{} %", [], ["task: regression", "and a percent sign, which is left out: '0 %' (odd.csv, line 3) as 0"]),
        ("1\u202f{:03}", [], ["task: regression", "'1\\u202f000' (odd.csv, line 3) as 1000"]),
        ("1.{:03},5", [], ["task: regression", "'1.000,5' (odd.csv, line 3) as 1000.5"]),
        ("\ufeffbilling", [], ["one class ('billing')"]),
        ("1,{:03}", [], ["'1,000' (odd.csv, line 3) may have a decimal mark or divide thousands"]),
        ("#N/A", [], ["40 labels or texts are error values", "odd.csv, line 3: '#N/A'"]),
        ("nan", [], ["40 labels or texts are error values", "odd.csv, line 3: 'nan'"]),
    ],
)
def test_a_dry_run_says_how_odd_labels_are_read(
    place: Place, tmp_path: Path, form: str, options: list[str], words: list[str]
) -> None:
    odd = tmp_path / "odd.csv"
    rows = "".join(f"{text};{form.format(number)}\r\n" for number, text in enumerate(tiny.sentences(40)))
    odd.write_text(f"sep=;\r\nText;LABEL\r\n{rows}", encoding="utf-8")
    with place.working():
        done = Terminal(place.url("http")).run("tenant", "create", "odd", "--train", str(odd), *options, "--dry-run")
    for word in words:
        assert word in f"{done.stdout} {done.exception}"


def test_classes_that_look_alike_and_another_language_are_told_to_the_end(
    terminal: Terminal, place: Place, tmp_path: Path
) -> None:
    odd = tmp_path / "odd.csv"
    labels = (
        "billing",
        "\u200bbilling",
        "bil\u00adling",
        "\uff42illing",
        "None",
        "caf\u00e9",
        "cafe\u0301",
        "Caf\u00e9",
    ) * 8
    texts = [*tiny.sentences(40), *("где моя посылка так долго", "счёт был списан дважды вчера") * 12]
    rows = "".join(f"{text} {number},{label}\n" for number, (text, label) in enumerate(zip(texts, labels, strict=True)))
    odd.write_text(f"text,label\n{rows}", encoding="utf-8")
    create = ["tenant", "create", "alike", "--train", str(odd), *FAST]
    with place.working():
        printed = terminal.out(*create, "--dry-run"), terminal.out(*create)
    shown = terminal.out("tenant", "show", "alike")
    for output in (*printed, shown):
        assert r"8 labels 'bil\xadling' (odd.csv, line 4) are read as 'billing', which looks the same" in output
        assert r"spaces or how a number is written: 'billing', '\uff42illing'" in output
        assert r"spaces or how a number is written: 'Caf\xe9', 'caf\xe9'" in output
        assert "8 examples have the label 'None' (odd.csv, line 6), which is trained as a class" in output
        assert "of the texts seem to be in a language that the base hardly knows" in output
    terminal.out("tenant", "delete", "alike", "--yes")


def test_a_tenant_learns_from_texts_without_labels_too(
    terminal: Terminal, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In two epochs a teacher learns nothing here, and would be refused.
    monkeypatch.setattr(pseudo_labels, "has_learned", lambda data, scores: True)
    more = tmp_path / "more.csv"
    more.write_text("text\nthe red cat sleeps\nthe blue cat sleeps\n")
    command = ["tenant", "create", "helped", "--train", str(place.rows), "--unlabelled", str(more), *FAST]
    with place.working():
        (plan,) = terminal.json(*command, "--dry-run")
        (event,) = terminal.json(*command)
    assert plan["examples"]["unlabelled"] == 2
    assert event["state"] == "done"
    (shown,) = terminal.json("tenant", "show", "helped")
    assert shown["about"]["examples"]["unlabelled"] == 2
    assert shown["about"]["teacher"]["scores"].keys() >= {"dev_accuracy"}
    terminal.out("tenant", "delete", "helped", "--yes")


def test_a_spreadsheet_of_tickets_is_learned_by_the_names_of_its_columns(
    terminal: Terminal, place: Place, tmp_path: Path
) -> None:
    tickets = tmp_path / "tickets.csv"
    rows = [line.rpartition(",") for line in place.rows.read_text().splitlines()[1:]]
    body = "".join(f'"printer";"{text}; please";"{label}"\r\n' for text, _, label in rows)
    tickets.write_bytes(f"Subject;Body;Category\r\n{body}".encode("utf-16"))
    create = ["tenant", "create", "desk", "--train", str(tickets), *FAST]
    refused = terminal.run(*create)
    assert isinstance(refused.exception, DataError)
    assert "there are 'Subject', 'Body', 'Category': name others with --text-column, " in str(refused.exception)
    with place.working():
        (event,) = terminal.json(*create, "--text-column", "body", "--label-column", "category")
    assert event["state"] == "done"
    (shown,) = terminal.json("tenant", "show", "desk")
    assert set(shown["about"]["labels"]) == {label for _, _, label in rows}
    terminal.out("tenant", "delete", "desk", "--yes")


def test_a_detached_job_is_listed_shown_and_cancelled(terminal: Terminal, place: Place) -> None:
    job = terminal.out("tenant", "create", "later", "--train", str(place.rows), "--detach").strip()
    assert job in [one["id"] for one in terminal.json("job", "list", "--state", "queued")]
    assert job in terminal.out("job", "list")
    assert "state: queued" in terminal.out("job", "show", job)
    assert "dry_run: no" in terminal.out("job", "show", job)
    assert terminal.out("job", "cancel", job) == f"job {job} is cancelled\n"
    done = terminal.run("job", "watch", job)
    assert isinstance(done.exception, JobCancelledError)


def test_uploads_are_listed_and_dropped_all_or_none(terminal: Terminal, place: Place) -> None:
    with ManageClient(terminal.url) as manage:
        sent = [str(manage.upload(place.rows)["upload"]) for _ in range(3)]
        assert set(sent) <= {one["id"] for one in terminal.json("upload", "list")}
        done = terminal.run("upload", "drop", *sent[:2], "nosuch")
        assert isinstance(done.exception, UnknownUploadError)
        by_id = {one.id: one for one in manage.list_uploads()}
        assert set(sent) <= by_id.keys()
        manage.drop_upload(by_id[sent[0]])
        assert terminal.out("upload", "drop", *sent[1:]) == "".join(f"upload {one} is dropped\n" for one in sent[1:])
        assert by_id.keys() - {one.id for one in manage.list_uploads()} == set(sent)


def test_a_watched_job_prints_an_event_a_line(terminal: Terminal, place: Place, queued: str) -> None:
    command = [str(BIN / "hplm"), "job", "watch", queued, "--json", "--url", terminal.url]
    with (
        closing(Registry.open(place.store)) as registry,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            # The job goes on when its state was heard of: two changes between two looks would be one event.
            states = [json.loads(process.stdout.readline())["state"]]
            claimed = registry.claim_job("me", time.time(), 30.0)
            assert claimed is not None
            assert claimed.id == queued
            states.append(json.loads(process.stdout.readline())["state"])
            registry.finish_job(queued, "me", time.time(), result={})
            states += [json.loads(line)["state"] for line in process.stdout]
            assert process.wait(90) == 0
        finally:
            process.kill()
    assert states == ["queued", "running", "done"]


def test_a_script_deletes_without_being_asked(terminal: Terminal, place: Place) -> None:
    with place.working():
        terminal.out("tenant", "create", "brief", "--train", str(place.rows), *FAST)
    assert terminal.json("tenant", "delete", "brief", "--yes") == [{"tenant": "brief"}]


def test_domains_are_listed_and_shown(terminal: Terminal) -> None:
    assert [domain["name"] for domain in terminal.json("domain", "list")] == ["general"]
    assert "general" in terminal.out("domain", "list")
    assert "the root" in terminal.out("domain", "show", "general")


def test_a_domain_goes_through_its_life_with_a_tenant_on_it(
    terminal: Terminal, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default the head is warmed up with a thousand times as many tokens as the layers are trained with here.
    monkeypatch.setattr(domain_job, "DomainSettings", partial(DomainSettings, warmup_tokens=10_000))
    corpora = []
    for seed in (3, 4):
        corpora.append(tmp_path / f"law-{seed}.txt")
        corpora[-1].write_text("\n".join(tiny.sentences(80, seed)) + "\n")
    # At a rate that moves the layers, so that one version is not like the next.
    settings = ["--tokens", "400", "--top", "20", "--learning-rate", "0.01"]
    base = bases.load(place.store.base("tiny"))

    def check() -> None:
        with Client(terminal.url) as client:
            for text in TEXTS:
                logits = client.predict("judge", text, logits=True).logits
                assert logits is not None
                np.testing.assert_allclose(
                    logits, expected_logits(place.store, base, "judge", text), atol=0.05, rtol=0.02
                )

    with place.working():
        (plan,) = terminal.json("domain", "create", "law", "--corpus", str(corpora[0]), *settings, "--dry-run")
        assert plan["estimated_s"] > 0
        create = ["domain", "create", "law", "--corpus", str(corpora[0]), "--dev", str(place.rows)]
        (event,) = terminal.json(*create, *settings)
        assert event["state"] == "done"
        assert f"law {event['result']['verdict']} on labelled examples" in event["result"]["why"]
        terminal.out("tenant", "create", "judge", "--train", str(place.rows), "--domain", "law", *FAST)
        place.await_seen()
        check()
        (first,) = terminal.json("domain", "show", "law")
        assert event["result"]["why"] in terminal.out("domain", "show", "law")
        updated = terminal.out("domain", "update", "law", "--corpus", str(corpora[1]), *settings)
        assert "on held-out text, and was measured on nothing else, compared with version" in updated
        place.await_seen()
        # Its tenant stays on the version that it was trained over, until it is updated.
        check()
        for text in TEXTS:
            own, new = (expected_logits(place.store, base, "judge", text, domain) for domain in (None, "law"))
            assert np.abs(own - new).max() > 0.1
        (tenant,) = terminal.json("tenant", "show", "judge")
        (second,) = terminal.json("domain", "show", "law")
        assert second["version"] > first["version"] == tenant["domain_version"]
        refused = terminal.run("domain", "delete", "law", "--yes")
        assert isinstance(refused.exception, DomainInUseError)
        assert "judge" in str(refused.exception)
        terminal.out("tenant", "update", "judge", "--train", str(place.rows), *FAST)
        place.await_seen()
        check()
    terminal.out("tenant", "delete", "judge", "--yes")
    terminal.out("domain", "delete", "law", "--yes")
    assert [domain["name"] for domain in terminal.json("domain", "list")] == ["general"]


def test_a_domain_of_a_small_corpus_is_refused(terminal: Terminal, corpus: Path) -> None:
    done = terminal.run("domain", "create", "cats", "--corpus", str(corpus))
    assert "CORPUS_TOO_SMALL" in getattr(done.exception, "code", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["tenant", "show", "nobody"], "UNKNOWN_TENANT: there is no tenant 'nobody'"),
        (["tenant", "create", "x", "--train", "no.csv"], "BAD_DATA: no.csv cannot be read"),
        (
            ["tenant", "create", "x", "--train", MODEL],
            "hplm cannot import adapters and fine-tuned models. Send the examples",
        ),
        (["tenant", "show", "acme\u200b"], "character 5 is '\\u200b'"),
        (["tenant", "create", "x", "--train", "no.csv", "--path-on-server"], "FORBIDDEN: 'no.csv' is no file"),
        (
            ["tenant", "create", "x", "--train", "setup.cfg", "--url", "ftp://x"],
            "BAD_CONFIG: 'ftp://x' is not an address",
        ),
        (["domain", "delete", "general", "--yes"], "BAD_MANAGE_REQUEST: 'general' is the root"),
        (["job", "watch", "none"], "UNKNOWN_JOB: there is no job 'none'"),
        (["job", "list", "--url", "http://127.0.0.1:9"], "UNREACHABLE: http://127.0.0.1:9 does not answer"),
    ],
    ids=["tenant", "file", "model", "unseen-name", "path", "address", "root", "job", "nobody-there"],
)
def test_an_error_is_one_line_and_status_1(
    place: Place,
    hplm: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    words: str,
) -> None:
    monkeypatch.setenv("HPLM_URL", place.url("grpc"))
    done = hplm(*command)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_interrupt_ends_the_showing_and_not_the_job(place: Place, queued: str) -> None:
    env = {**os.environ, "HPLM_URL": place.url("grpc")}
    process = subprocess.Popen([str(BIN / "hplm"), "job", "watch", queued], stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    first = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=90)
    assert process.returncode == 130, first + rest
    assert f"hplm job watch {queued}" in rest
    with ManageClient(place.url("http")) as client:
        assert client.show_job(queued).state == "queued"


def test_the_commands_never_import_torch_or_sqlalchemy() -> None:
    code = (
        "import sys, hplm_client.cli.tenant, hplm_client.cli.domain, hplm_client.cli.job;"
        "sys.exit(bool({'torch', 'sqlalchemy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
