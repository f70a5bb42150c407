"""Sends load plans with Locust.

Locust's one user is the clock. Every request is a greenlet of its own, so a slow server delays no arrival. Importing this
module patches the standard library for gevent: only `hplm loadtest` imports it.
"""

from __future__ import annotations

import atexit
import gc
import math
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
from hplm_client.transport.access_keys import keys_from_environment, one_key
from hplm_client.transport.address import split_url
from hplm_client.transport.headers import headers_from_environment
from locust.env import Environment
from locust.exception import StopUser
from rich.progress import Progress

from hplm.errors import ConfigError, HplmError, StartError, UnreachableError
from hplm.reporting.terminal_text import visible
from hplm_loadtest.scenarios.outcomes import ANSWERED, NOT_SENT, Recorder, Run
from hplm_loadtest.scenarios.stop_signals import STOP_SIGNALS, ignore_stop_signals, stopped
from hplm_loadtest.workloads.load_plan import LoadPlan

# Largest number of requests under way. Each may hold a connection over HTTP, and 1024 open files are a common limit.
MAX_UNDER_WAY = 768
PAGE_HOST = "127.0.0.1"
# Seconds to wait after the last request's timeout, so that the timeout itself is recorded.
LAST_CALLS_S = 2.0
SETTLE_S = 0.3  # seconds in which Locust starts its own greenlets, before the first request


@dataclass(frozen=True)
class LoadTask:
    """The input of Locust's user, as a class attribute because Locust constructs the user.

    name_of: returns the name of a request in Locust's tables, from the request's deadline.
    ended: receives an Outcome, or the error that ended a run.
    """

    make_plan: Callable[[], LoadPlan]
    name_of: Callable[[float], str]
    timeout_s: float
    progress: Progress
    ended: SimpleQueue = field(default_factory=SimpleQueue)


@dataclass(frozen=True)
class Outcome:
    """The run of a load plan with `planned` requests at `url`.

    is_whole: False if the run was stopped before its last answer. signal: the signal that stopped the program, 0 if none.
    """

    run: Run
    url: str
    planned: int
    is_whole: bool
    signal: int = 0


class PlannedUser(locust.User):
    """A Locust user that sends a plan's requests at their times. Locust's response time counts from the planned time."""

    abstract = True
    fixed_count = 1
    load_task: ClassVar[LoadTask]

    @locust.task
    def run_once(self) -> None:
        """Send one plan and end the user. An error goes to `ended`, because Locust would log it and try again for ever."""
        try:
            self.send_plan()
        except Exception as error:
            self.load_task.ended.put(error)
        raise StopUser

    def send_plan(self) -> None:
        """Send all requests and wait for the answers. If Locust stops the user, the requests sent so far count."""
        plan = self.load_task.make_plan()
        url = str(self.environment.host)  # Locust's page can change the host
        under_way, sent, is_whole, is_failed = Group(), 0, False, False
        headers = headers_from_environment()
        keys = keys_from_environment()
        timeout_s = self.load_task.timeout_s
        with Client(url, timeout_s=timeout_s, concurrency=MAX_UNDER_WAY, headers=headers, key=keys) as client:
            client.is_ready()
            gevent.sleep(SETTLE_S)
            bar = self.load_task.progress.add_task("requests", total=len(plan.requests))
            recorder = Recorder(plan.times_s, plan.requests.deadlines_s, plan.duration_s)
            try:
                for index, planned_s in enumerate(plan.times_s.tolist()):
                    # If the load is late, it sleeps for 0 s, so that requests under way can proceed between two sends.
                    gevent.sleep(max(0.0, planned_s - recorder.elapsed_s()))
                    sent = index + 1
                    self.load_task.progress.update(bar, completed=sent)
                    if len(under_way) < MAX_UNDER_WAY:
                        under_way.spawn(self.send, client, plan, recorder, index)
                    else:
                        recorder.done(index, NOT_SENT)
                        self.report(plan, recorder, index, NOT_SENT)
            except Exception:  # a bug of this program: the requests sent so far mean nothing
                is_failed = True
                raise
            finally:
                # The time spent waiting for requests still under way does not belong to the load.
                ended_s = recorder.elapsed_s()
                try:
                    if not is_failed:
                        under_way.join(timeout=self.load_task.timeout_s + LAST_CALLS_S)
                    is_whole = sent == len(plan.requests)
                finally:  # also if the waiting is stopped
                    if not is_failed:
                        run = recorder.run(sent, ended_s)
                        self.load_task.ended.put(Outcome(run, url, len(plan.requests), is_whole))
                    self.load_task.progress.remove_task(bar)
                    under_way.kill()

    def send(self, client: Client, plan: LoadPlan, recorder: Recorder, index: int) -> None:
        """Send one request; record its outcome and show it in Locust's statistics."""
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

    def report(self, plan: LoadPlan, recorder: Recorder, index: int, code: str) -> None:
        """Report an outcome to Locust's statistics and page. Errors are counted by code: messages name one of many tenants."""
        self.environment.events.request.fire(
            request_type=str(self.environment.host).partition(":")[0],
            name=self.load_task.name_of(float(plan.requests.deadlines_s[index])),
            response_time=1000 * recorder.latency_s(index),
            response_length=0,
            exception=None if code == ANSWERED else code,
            context={"tenant": plan.requests.tenants[index]},
        )


@cache
def init_grpc() -> None:
    """Make gRPC cooperate with gevent. This must happen before the first channel is opened; later calls do nothing."""
    from grpc.experimental import gevent as grpc_gevent  # type: ignore[import-untyped]

    grpc_gevent.init_gevent()
    # If only the interpreter's last garbage collection closes a channel, the channel may wait for ever, because gevent is gone.
    atexit.register(gc.collect)


def list_tenants(url: str, timeout_s: float) -> list[Tenant]:
    """Return all tenants that the manager at `url` lists.

    Raises UnreachableError if the manager does not answer, ConfigError if it lists no tenants, or tenants of several bases.
    """
    if split_url(url).protocol == "grpc":
        init_grpc()
    tenants: list[Tenant] = []
    try:
        with ManageClient(
            url, timeout_s=timeout_s, headers=headers_from_environment(), key=one_key(keys_from_environment())
        ) as client:
            while not tenants or len(tenants) % PAGE_SIZE == 0:
                after = tenants[-1].name if tenants else ""
                if not (page := client.list_tenants(after=after, limit=PAGE_SIZE)):
                    break
                tenants += page
    except HplmError as error:
        raise UnreachableError(
            f"the server's manager does not list its tenants: name them with --tenants NAME,NAME or --tenants FILE, or by "
            f"--models FOLDER ({error.code}: {error})"
        ) from None
    if not tenants:
        raise ConfigError(f"{url} serves no tenants yet: create a tenant with `hplm tenant create`")
    if len(bases := sorted({tenant.base for tenant in tenants})) > 1:
        raise ConfigError(
            f"the manager at {url} lists tenants of several bases ({', '.join(bases)}), and a server answers those of one: "
            "name them with --tenants NAME,NAME or --tenants FILE, or by --models FOLDER"
        )
    return tenants


def check_page(port: int) -> None:
    """Raise StartError if the port is not free. Locust would print a traceback and wait for ever."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((PAGE_HOST, port))
        except OSError as error:
            raise StartError(
                f"port {port} of {PAGE_HOST} is not free ({error.strerror}); choose with --web-port"
            ) from None


def run_load(url: str, name: str, load_task: LoadTask, web_port: int | None) -> Outcome:
    """Run Locust over one load plan and return the outcome.

    With `web_port`, Locust's page starts runs, each over a new plan, until SIGINT or SIGTERM; the last outcome is returned. A
    run that fails, for example because no server listens at its host, shows its error on the page and does not count.

    SIGINT and SIGTERM stop the sending. A second signal also stops the waiting for late answers. When this function returns,
    both signals are ignored, so that the outcome can be reported. Raises UnreachableError if hBERT does not answer at `url`.
    """
    if web_port is not None or split_url(url).protocol == "grpc":
        init_grpc()
    with Client(
        url, timeout_s=load_task.timeout_s, headers=headers_from_environment(), key=keys_from_environment()
    ) as client:
        if not client.is_ready():
            raise UnreachableError(f"{url}: the model hbert is not ready")
    user = type(f"{name.capitalize()}User", (PlannedUser,), {"load_task": load_task, "host": url})
    environment = Environment(user_classes=[user], host=url)
    runner = environment.create_local_runner()
    outcome, arguments = None, sys.argv
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        # At a second signal Locust would not stop users again that still wait for late answers.
        gevent.killall(list(runner.user_greenlets))
        runner.stop()
        load_task.ended.put(KeyboardInterrupt())

    for number in STOP_SIGNALS:
        # Handled in a greenlet of its own. Python's handler would raise KeyboardInterrupt in any greenlet that runs.
        gevent.signal_handler(number, stop, number)
    try:
        if web_port is None:
            runner.start(1, spawn_rate=1)
        else:
            # Locust's page reads sys.argv as Locust's own command line, at every view.
            sys.argv = arguments[:1]
            page = environment.create_web_ui(PAGE_HOST, web_port)
            assert page.greenlet is not None
            # Another process may have taken the port since `check_page`.
            page.greenlet.link(
                lambda _: load_task.ended.put(StartError(f"Locust's page has ended, on port {web_port}"))
            )
            load_task.progress.console.print(
                f"Locust's page: http://{PAGE_HOST}:{web_port} (Ctrl-C ends)", highlight=False
            )
        while outcome is None or web_port is not None:
            ended = load_task.ended.get()
            if isinstance(ended, Outcome):
                # A run that was stopped before its first request does not replace the run before.
                outcome = ended if len(ended.run) else outcome
            elif web_port is None or isinstance(ended, StartError | KeyboardInterrupt):
                raise ended
            else:  # the next run on the page may have another host
                is_bug = not isinstance(ended, HplmError)
                trace = "".join(traceback.format_exception(ended)) if is_bug else ""
                message = f"{type(ended).__name__ if is_bug else ended.code}: {ended}"
                runner.log_exception("local", message, trace)
                load_task.progress.console.print(visible(trace or message), style="red", markup=False, highlight=False)
            runner.stop()
    except KeyboardInterrupt:
        pass
    finally:
        ignore_stop_signals()
        sys.argv = arguments
        runner.quit()
    if outcome is None:
        raise stopped("loadtest", signals[-1])
    return replace(outcome, signal=signals[-1] if signals else 0)
