"""Locust over plans: its one user is the clock, every request a greenlet of its own, so a slow server slows no arrival down.

Importing it patches the standard library for gevent: only `hplm loadtest` does, in a process of its own.
"""

from __future__ import annotations

import atexit
import gc
import math
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar

import gevent
import locust
from gevent.pool import Group
from gevent.queue import SimpleQueue
from hplm_client import Client
from hplm_client.manage.answers import Tenant
from hplm_client.manage.client import PAGE_SIZE, ManageClient
from hplm_client.transport.address import split_url
from hplm_client.transport.headers import headers_from_environment
from locust.env import Environment
from locust.exception import StopUser
from rich.progress import Progress

from hplm.errors import ConfigError, HplmError, StartError, UnreachableError
from hplm.reporting.terminal_text import visible
from hplm_loadtest.scenarios.run import ANSWERED, NOT_SENT, Recorder, Run
from hplm_loadtest.scenarios.stop import STOPS, stopped
from hplm_loadtest.workloads.plan import Plan

# Each may hold a connection over HTTP, and 1024 open files are a common limit.
MOST_UNDER_WAY = 768
PAGE_HOST = "127.0.0.1"
# A call's own end comes a little after its time, and is to be counted as that.
LAST_CALLS_S = 2.0
SETTLE_S = 0.3  # Locust starts its own greenlets meanwhile


@dataclass(frozen=True)
class Errand:
    """What Locust's user is to do: Locust makes the user itself."""

    make_plan: Callable[[], Plan]
    name_of: Callable[[float], str]  # of a deadline: what Locust's tables call such requests
    timeout_s: float
    progress: Progress
    ended: SimpleQueue = field(default_factory=SimpleQueue)  # of Outcome, or of the error that ended one


@dataclass(frozen=True)
class Outcome:
    """What became of a plan of `planned` requests at `url`. `is_whole`: it was not stopped before its last answer."""

    run: Run
    url: str
    planned: int
    is_whole: bool
    signal: int = 0  # that ended the program


class PlannedUser(locust.User):
    """Sends a plan's requests at their times. Locust's response time counts from the planned time."""

    abstract = True
    fixed_count = 1
    errand: ClassVar[Errand]

    @locust.task
    def follow(self) -> None:
        """One plan, then Locust's user ends; an error in here would otherwise be logged and tried again for ever."""
        try:
            self.send_plan()
        except Exception as error:
            self.errand.ended.put(error)
        raise StopUser

    def send_plan(self) -> None:
        """From the first request to the last answer; stopped by Locust, what was sent until then counts."""
        plan = self.errand.make_plan()
        url = str(self.environment.host)  # which may be another on Locust's page by now
        under_way, sent, is_whole, is_failed = Group(), 0, False, False
        headers = headers_from_environment()
        with Client(url, timeout_s=self.errand.timeout_s, concurrency=MOST_UNDER_WAY, headers=headers) as client:
            client.is_ready()
            gevent.sleep(SETTLE_S)
            bar = self.errand.progress.add_task("requests", total=len(plan.requests))
            recorder = Recorder(plan.times_s, plan.requests.deadlines_s, plan.duration_s)
            try:
                for index, planned_s in enumerate(plan.times_s.tolist()):
                    # Behind plan this is a sleep of 0: what is under way gets its turn between two sends.
                    gevent.sleep(max(0.0, planned_s - recorder.elapsed_s()))
                    sent = index + 1
                    self.errand.progress.update(bar, completed=sent)
                    if len(under_way) < MOST_UNDER_WAY:
                        under_way.spawn(self.send, client, plan, recorder, index)
                    else:
                        recorder.done(index, NOT_SENT)
                        self.report(plan, recorder, index, NOT_SENT)
            except Exception:  # a mistake of our own: what was sent until then says nothing
                is_failed = True
                raise
            finally:
                # Waiting for what is still under way is no part of the load.
                ended_s = recorder.elapsed_s()
                try:
                    if not is_failed:
                        under_way.join(timeout=self.errand.timeout_s + LAST_CALLS_S)
                    is_whole = sent == len(plan.requests)
                finally:  # also where the waiting is stopped
                    if not is_failed:
                        run = recorder.run(sent, ended_s)
                        self.errand.ended.put(Outcome(run, url, len(plan.requests), is_whole))
                    self.errand.progress.remove_task(bar)
                    under_way.kill()

    def send(self, client: Client, plan: Plan, recorder: Recorder, index: int) -> None:
        """One request, recorded and shown in Locust's statistics."""
        deadline_s = float(plan.requests.deadlines_s[index])
        recorder.sent(index)
        code = ANSWERED
        try:
            client.predict(
                plan.requests.tenants[index],
                plan.requests.texts[index],
                plan.requests.pairs[index] if plan.requests.pairs else None,
                deadline_s=None if math.isnan(deadline_s) else deadline_s,
            )
        except HplmError as error:
            code = error.code
        recorder.done(index, code)
        self.report(plan, recorder, index, code)

    def report(self, plan: Plan, recorder: Recorder, index: int, code: str) -> None:
        """To Locust's statistics and web page. Errors go by code: a message may name a tenant, of which there are thousands."""
        self.environment.events.request.fire(
            request_type=str(self.environment.host).partition(":")[0],
            name=self.errand.name_of(float(plan.requests.deadlines_s[index])),
            response_time=1000 * recorder.latency_s(index),
            response_length=0,
            exception=None if code == ANSWERED else code,
            context={"tenant": plan.requests.tenants[index]},
        )


@cache
def init_grpc() -> None:
    """Make gRPC wait by gevent, once, before the first channel is opened."""
    from grpc.experimental import gevent as grpc_gevent  # type: ignore[import-untyped]

    grpc_gevent.init_gevent()
    # A channel that only the interpreter's last collection closes may wait for ever, for a gevent that is gone.
    atexit.register(gc.collect)


def names_of_server(url: str, timeout_s: float) -> list[str]:
    """Return the names of all tenants that the manager at `url` lists.

    Raises UnreachableError if the manager does not answer, ConfigError if it lists none, or tenants of several bases.
    """
    if split_url(url).protocol == "grpc":
        init_grpc()
    found: list[Tenant] = []
    try:
        with ManageClient(url, timeout_s=timeout_s, headers=headers_from_environment()) as client:
            while not found or len(found) % PAGE_SIZE == 0:
                after = found[-1].name if found else ""
                if not (page := client.list_tenants(after=after, limit=PAGE_SIZE)):
                    break
                found += page
    except HplmError as error:
        raise UnreachableError(
            f"the server's manager does not list its tenants: name them with --tenants NAME,NAME or --tenants FILE, or by "
            f"--models FOLDER ({error.code}: {error})"
        ) from None
    if not found:
        raise ConfigError(f"{url} serves no tenants yet: `hplm tenant create` makes one")
    if len(bases := sorted({one.base for one in found})) > 1:
        raise ConfigError(
            f"the manager at {url} lists tenants of several bases ({', '.join(bases)}), and a server answers those of one: "
            "name them with --tenants NAME,NAME or --tenants FILE, or by --models FOLDER"
        )
    return [one.name for one in found]


def check_page(port: int) -> None:
    """Raises StartError where the port is not to be had: Locust would say so in a traceback, and wait for ever."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((PAGE_HOST, port))
        except OSError as error:
            raise StartError(
                f"port {port} of {PAGE_HOST} is not free ({error.strerror}); choose with --web-port"
            ) from None


def follow(url: str, name: str, errand: Errand, web_port: int | None) -> Outcome:
    """Run Locust over one plan; with `web_port`, over a new plan at each start on its page until Ctrl-C, and return the last.

    A run that cannot be made there, as where nobody listens at its host, or that ends with a mistake of our own, is said on the
    page and does not count.

    SIGINT and SIGTERM stop the sending, a second one also the waiting for late answers. Both are ignored from then on: what
    was measured is still to be reported. Raises UnreachableError where hBERT does not answer at `url`.
    """
    if web_port is not None or split_url(url).protocol == "grpc":
        init_grpc()
    with Client(url, timeout_s=errand.timeout_s, headers=headers_from_environment()) as client:
        if not client.is_ready():
            raise UnreachableError(f"{url}: the model hbert is not ready")
    user = type(f"{name.capitalize()}User", (PlannedUser,), {"errand": errand, "host": url})
    environment = Environment(user_classes=[user], host=url)
    runner = environment.create_local_runner()
    outcome, arguments = None, sys.argv
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        # Locust would not end again what it has told to end, and what waits for late answers since.
        gevent.killall(list(runner.user_greenlets))
        runner.stop()
        errand.ended.put(KeyboardInterrupt())

    for number in STOPS:
        # In a greenlet of its own: a KeyboardInterrupt raised by itself would hit whichever runs just then.
        gevent.signal_handler(number, stop, number)
    try:
        if web_port is None:
            runner.start(1, spawn_rate=1)
        else:
            # Locust's page reads sys.argv as Locust's own command line, again at every view.
            sys.argv = arguments[:1]
            page = environment.create_web_ui(PAGE_HOST, web_port)
            assert page.greenlet is not None
            # Somebody may have taken the port since it was looked at.
            page.greenlet.link(lambda _: errand.ended.put(StartError(f"Locust's page has ended, on port {web_port}")))
            errand.progress.console.print(
                f"Locust's page: http://{PAGE_HOST}:{web_port} (Ctrl-C ends)", highlight=False
            )
        while outcome is None or web_port is not None:
            ended = errand.ended.get()
            if isinstance(ended, Outcome):
                # One that was stopped before its first request must not cost the last one's report.
                outcome = ended if len(ended.run) else outcome
            elif web_port is None or isinstance(ended, StartError | KeyboardInterrupt):
                raise ended
            else:  # the next run may have another host
                is_ours = not isinstance(ended, HplmError)
                trace = "".join(traceback.format_exception(ended)) if is_ours else ""
                said = f"{type(ended).__name__ if is_ours else ended.code}: {ended}"
                runner.log_exception("local", said, trace)
                errand.progress.console.print(visible(trace or said), style="red", markup=False, highlight=False)
            runner.stop()
    except KeyboardInterrupt:
        pass
    finally:
        for number in STOPS:
            signal.signal(number, signal.SIG_IGN)
        sys.argv = arguments
        runner.quit()
    if outcome is None:
        raise stopped("loadtest", signals[-1])
    return replace(outcome, signal=signals[-1] if signals else 0)
