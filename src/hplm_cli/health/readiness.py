"""Whether each model of a server answers now: the questions are asked when somebody wants to know."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hplm.adapters.bank import TenantBank
from hplm.core.roles import CALLING, MANAGER, Role, ServedBase, dispatch_name, models_of, served_bases
from hplm.errors import ArtifactError, ConfigError, RegistryError, UnknownTenantError
from hplm.manage.base_survey import unserved_bases
from hplm.models import base_folder
from hplm.registry.catalog import Catalog
from hplm.runtime.daemon_threads import DaemonThreads
from hplm.store.layout import Store
from hplm.triton.launcher.kept_server import State
from hplm_cli.health.questions import (
    TENANT_CODES,
    Outcome,
    Question,
    Subject,
    ask,
    no_answer,
    question_of_manager,
    question_of_text,
)
from hplm_cli.serve_access import WITHOUT_KEYS, ServeAccess

# Seconds in which all models must answer. A probe of an orchestrator should wait longer than this.
READY_TIMEOUT_S = 3.0
# Seconds for which answers are kept, so that many probes cost the server no more than one.
KEEP_S = 1.0
# Questions that are asked at once.
MOST_AT_ONCE = 16
# Tenants of a base that questions are about, one after another until a tenant answers; the others are asked if its files are
# damaged or the tenant is deleted.
MOST_SUBJECTS = 8
# Seconds between two reads of the registry for such tenants.
REREAD_S = 10.0
WHY_NOT: Mapping[State, str] = {
    "stopped": "the server is not started yet",
    "starting": "Triton is starting",
    "restarting": "Triton has ended and is started again",
    "draining": "the server is shutting down: it answers what it has accepted",
}
# Asks a model and returns what came of it, at the latest at a time of the monotonic clock.
AskUntil = Callable[[float], Outcome]
DEAD = Outcome(None, "a process of it has died; `hplm serve` loads the model again")


class AskedServer(Protocol):
    """The parts of `hplm.triton.launcher.kept_server.KeptServer` that say what to expect of the models."""

    @property
    def state(self) -> State: ...

    @property
    def restarts(self) -> int: ...

    @property
    def models(self) -> set[str]: ...

    @property
    def dead_models(self) -> set[str]: ...


@dataclass(frozen=True)
class ModelHealth:
    """The result of the question to a model, and how long the answer took."""

    outcome: Outcome
    took_s: float

    def as_dict(self) -> dict[str, Any]:
        if self.outcome.answer is None:
            return {"ready": False, "why": self.outcome.why}
        return {"ready": True, "answer": self.outcome.answer, "ms": round(1000 * self.took_s, 1)}


@dataclass(frozen=True)
class Verdict:
    """Whether a server is ready. `why` is empty if the models themselves say why it is not.

    `notes` say which tenants are not served though the server is ready, and how to repair it.
    """

    state: State
    why: str = ""
    restarts: int = 0
    models: Mapping[str, ModelHealth] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def ready(self) -> bool:
        healths = self.models.values()
        return not self.why and bool(healths) and all(health.outcome.answer is not None for health in healths)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form. It names models, never tenants."""
        why = {"why": self.why} if self.why else {}
        models = {name: health.as_dict() for name, health in self.models.items()}
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"ready": self.ready, "state": self.state, **why, "restarts": self.restarts, "models": models, **notes}


class AskedBase:
    """A base as questions need it: its tenants, its hidden size, and whether it is whole."""

    def __init__(self, served: ServedBase) -> None:
        """Raises ArtifactError, ConfigError or RegistryError."""
        self._served = served
        self._store = Store(served.store_root, served.settings.encode.registry)
        self._folder = base_folder.read(self._store.base(served.base), verify=False)
        self.hidden_size, self.is_whole = self._folder.config.hidden_size, self._folder.config.is_whole
        self._changing = threading.Lock()
        self._subjects: list[Subject] = []
        self._next_read_s = 0.0

    def subjects(self) -> list[Subject]:
        """Return the tenants to ask about, in order; a tenant that does not exist if the base has none."""
        with self._changing:
            if not self._subjects and time.monotonic() >= self._next_read_s:
                self._next_read_s = time.monotonic() + REREAD_S
                # If the registry cannot be read, the stages say what they know without it.
                with suppress(RegistryError):
                    self._subjects = self._read()
            return list(self._subjects) or [Subject()]

    def forget(self, subject: Subject) -> None:
        """Ask no more about a tenant that does not exist any more."""
        with self._changing, suppress(ValueError):
            self._subjects.remove(subject)

    def put_first(self, subject: Subject) -> None:
        """Ask about this tenant first from now on, because others have damaged files."""
        with self._changing:
            self._subjects.sort(key=lambda other: other != subject)

    def _read(self) -> list[Subject]:
        subjects: list[Subject] = []
        with closing(Catalog(self._store, self._served.base)) as catalog:
            bank = TenantBank(self._store, catalog, self._folder.fingerprint)
            for tenant in sorted(catalog.served(), key=lambda served: served.name):
                with suppress(ArtifactError):
                    card = bank.card(tenant)
                    subjects.append(Subject(card.name, card.texts))
                if len(subjects) == MOST_SUBJECTS:
                    break
        return subjects


class Readiness:
    """Asks every model of a server a question, at most once in KEEP_S seconds. Any thread may use it.

    Before `follow` the server counts as not started.
    """

    def __init__(
        self, repository: Path, access: ServeAccess = WITHOUT_KEYS, headers: Mapping[str, str] | None = None
    ) -> None:
        """`access` says how the server is asked. `headers` go with each question: the server's options may want them."""
        self._repository, self._access, self._headers = repository, access, dict(headers or {})
        self._server: AskedServer | None = None
        self._http_url = ""
        self._asking = threading.Lock()
        self._bases: dict[str, AskedBase] = {}
        self._restarts = 0
        self._known: dict[str, ModelHealth] = {}
        self._known_until_s = 0.0
        self._notes: Sequence[str] = ()
        self._next_notes_s = 0.0
        self._threads = DaemonThreads(MOST_AT_ONCE, "hplm-ready")

    def follow(self, server: AskedServer, http_url: str) -> None:
        """Ask the models of this server from now on, at its address."""
        self._http_url = http_url
        # Read now: an export may change the files of a base while the server still has the earlier models.
        for served in served_bases(self._repository):
            with suppress(ArtifactError, ConfigError, RegistryError):
                self._bases[served.name] = AskedBase(served)
        self._server = server

    def close(self) -> None:
        """Ask no more questions."""
        self._threads.close()

    def verdict(self) -> Verdict:
        """Return whether the server is ready, after at most READY_TIMEOUT_S plus the time of a question under way."""
        if (server := self._server) is None:
            return Verdict("stopped", WHY_NOT["stopped"])
        if server.state == "serving":
            with self._asking:
                if time.monotonic() >= self._known_until_s:
                    self._known = self._ask_all(server)
                    self._note_unserved()
                    self._known_until_s = time.monotonic() + KEEP_S
                models = self._known
            # A process may have died since. Of several processes of a model, a question reaches only one.
            models = {**models, **{name: ModelHealth(DEAD, 0.0) for name in server.dead_models & models.keys()}}
            # The server may shut down since, and a balancer must know this before the first request is refused.
            if server.state == "serving":
                why = "" if models else "no model is loaded"
                return Verdict("serving", why, server.restarts, models, self._notes)
        return Verdict(server.state, WHY_NOT.get(server.state, "Triton has just been started"), server.restarts)

    def _note_unserved(self) -> None:
        if (now_s := time.monotonic()) >= self._next_notes_s:
            self._next_notes_s = now_s + REREAD_S
            # If files or registry cannot be read, the models say so.
            with suppress(ConfigError, RegistryError):
                self._notes = unserved_bases(self._repository)

    def _ask_all(self, server: AskedServer) -> dict[str, ModelHealth]:
        until_s = time.monotonic() + READY_TIMEOUT_S
        asked: dict[str, Future[ModelHealth]] = {}
        if self._restarts != server.restarts:
            # A Triton that was started again has the models that the repository has now.
            self._restarts = server.restarts
            self._bases.clear()
        for name, question in self._questions(server.models).items():
            asked[name] = Future()
            # Without memory for a thread there is no answer in time.
            with suppress(RuntimeError):
                self._threads.run(partial(_answer, asked[name], question, until_s))
        wait(asked.values(), READY_TIMEOUT_S)
        late = ModelHealth(no_answer(READY_TIMEOUT_S), READY_TIMEOUT_S)
        return {name: future.result() if future.done() else late for name, future in asked.items()}

    def _questions(self, loaded: Collection[str]) -> dict[str, AskUntil]:
        """Return what asks each loaded model that the repository has. A base that is deleted is about to be unloaded."""
        served = served_bases(self._repository)
        self._bases = {base.name: self._bases[base.name] for base in served if base.name in self._bases}
        questions: dict[str, AskUntil] = {
            role.name: partial(self._ask_about_tenants, role, base) for base in served for role in base.roles
        }
        questions[MANAGER.name] = self._ask_manager
        if served:
            questions |= {name: partial(self._ask_about_tenants, Role(name), served[0]) for name in CALLING}
        there = models_of(self._repository)
        return {name: question for name, question in questions.items() if name in there and name in loaded}

    def _ask_manager(self, until_s: float) -> Outcome:
        return self._send(question_of_manager(self._access.manage_proof()), {}, until_s)

    def _ask_about_tenants(self, role: Role, served: ServedBase, until_s: float) -> Outcome:
        """Ask a model about tenants of a base until a tenant has an answer."""
        try:
            base = self._bases.get(served.name) or self._bases.setdefault(served.name, AskedBase(served))
        except (ArtifactError, ConfigError, RegistryError) as error:
            return Outcome(None, f"the files of its base cannot be read: {error.code}", error.code)
        is_dispatch = role.name == dispatch_name(served.name)
        for number, subject in enumerate(base.subjects()):
            question = question_of_text(
                role,
                subject,
                hidden_size=base.hidden_size,
                is_whole=base.is_whole,
                is_dispatch=is_dispatch,
                proof=self._access.inner_proof(subject.tenant),
            )
            outcome = self._send(question, self._access.headers(subject.tenant), until_s)
            if outcome.code == UnknownTenantError.code:
                if subject == Subject():
                    # The model has looked for the tenant, and the base has none.
                    return replace(outcome, answer=outcome.code)
                base.forget(subject)
            elif outcome.code not in TENANT_CODES:
                if number:
                    base.put_first(subject)
                return outcome
        return outcome

    def _send(self, question: Question, headers: Mapping[str, str], until_s: float) -> Outcome:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return no_answer(READY_TIMEOUT_S)
        return ask(self._http_url, question, {**self._headers, **headers}, left_s)


def _answer(future: Future[ModelHealth], question: AskUntil, until_s: float) -> None:
    began_s = time.monotonic()
    try:
        outcome = question(until_s)
    except Exception as error:
        # A mistake of ours must not look like a model that does not answer.
        future.set_exception(error)
    else:
        future.set_result(ModelHealth(outcome, time.monotonic() - began_s))
