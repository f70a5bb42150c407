"""A real Triton server over a repository of hplm: start it, wait until it is ready, stop it."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from hplm.core.roles import models_of, unload_order
from hplm.errors import StartError, TritonEndedError
from hplm.runtime.local_http import LOCAL_HTTP
from hplm.runtime.process import file_limits, numbered
from hplm.runtime.unreaped import UnreapedChildren
from hplm.triton.launcher import log_files
from hplm.triton.launcher.backend_folder import assemble_backends
from hplm.triton.launcher.child_process import deferred_signals, exit_status, exit_words, prepare_child
from hplm.triton.launcher.command_line import model_flags, port_flags
from hplm.triton.launcher.install import TritonInstall, find_triton, search_paths
from hplm.triton.launcher.ports import Ports
from hplm.triton.launcher.restricted_apis import hide_secret, restrict
from hplm.triton.workarounds import deep_json, idle_connections, killed_server_files
from hplm.triton.workarounds.dead_stubs import LOST_S, stubs_of
from hplm.triton.workarounds.empty_outputs import check_numpy
from hplm.triton.workarounds.late_finalize import tell_stages
from hplm.triton.workarounds.shell_paths import check_ascii, check_path, is_safe
from hplm.triton.workarounds.surviving_stubs import start_reaper

# Seconds for killed stubs to end.
KILLED_S = 0.5
# Seconds between two starts of the reaper.
RENEW_EVERY_S = 60.0


class TritonServer:
    """A running Triton in a session of its own, so that its stubs end with it. A context manager.

    The server loads `models` of the repository, by default `models_of` it. `backends` are folders of further backends. With
    `tied` the server also ends when the thread that made it ends, whatever ends that thread, and a reaper beside it cleans
    up if both are killed. `environment` is added to this process's environment for Triton. `note` is a line at the head of
    the log.

    Triton's APIs that change all tenants' models are restricted to this object, see `restricted_apis`.
    """

    def __init__(
        self,
        repository: Path,
        ports: Ports,
        *,
        models: Sequence[str] | None = None,
        backends: Sequence[Path] = (),
        install: TritonInstall | None = None,
        flags: Sequence[str] = (),
        log: Path | None = None,
        tied: bool = False,
        environment: Mapping[str, str] | None = None,
        note: str = "",
    ) -> None:
        self.ports = ports
        self.install = install or find_triton()
        self.log_path = log
        self._added_environment = dict(environment or {})
        self._restricted = restrict(flags)
        self._is_secret_shown = True
        check_numpy(self.install.version)
        check_path(Path(tempfile.gettempdir()), "TMPDIR")
        check_ascii(repository)
        # A killed server may still hold the lock of this log.
        killed_server_files.sweep()
        output = log_files.fresh(log) if log is not None else None
        if output and note:
            # A full disk must not keep Triton from starting.
            with contextlib.suppress(OSError):
                os.write(output.fileno(), f"hplm serve: {note}\n".encode(errors="backslashreplace"))
        # The models to serve, in loading order; which of them are loaded later changes with the repository (`BaseChanges`).
        self._first_models = models_of(repository) if models is None else tuple(models)
        self.models = set(self._first_models)
        self._folder, mark = killed_server_files.make_folder()
        # A stub starts with its working directory on sys.path: an empty folder hides no module.
        self._work = self._folder / "work"
        self._unlock_folder = weakref.finalize(self, os.close, killed_server_files.lock_folder(self._folder))
        process = self._reaper = None
        self._is_stopped = self._is_drained = False
        # On the monotonic clock; None until it was ready.
        self._ready_s: float | None = None
        self._renewed_s = -math.inf
        try:
            with deferred_signals():
                self.process = process = self._launch(repository, backends, flags, output, mark, tied)
                if tied:
                    self._reaper = start_reaper(process.pid, self._folder, self._work)
            killed_server_files.write_name(mark, process.pid)
        except BaseException as error:
            if process is not None:
                self._end()
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise StartError(f"{self.install.binary} cannot be started: {error}") from error
            raise
        finally:
            # Closing writes once more what could not be written.
            with contextlib.suppress(OSError):
                mark.close()
            if output:
                output.close()

    def _launch(
        self,
        repository: Path,
        backends: Sequence[Path],
        flags: Sequence[str],
        output: IO[bytes] | None,
        mark: IO[str],
        tied: bool,
    ) -> subprocess.Popen[bytes]:
        assembled = self._folder / "backends"
        assemble_backends(self.install, assembled, backends)
        command = [
            str(self.install.binary),
            *model_flags(self._safe_path(repository), assembled, self._first_models),
            *port_flags(self.ports),
            "--exit-timeout-secs=5",
            *killed_server_files.flags(self._folder, [backend.name for backend in assembled.iterdir()]),
            *self._restricted.flags,
            *flags,
        ]
        stack = None
        if deep_json.is_needed(self.install.version) and (stack := deep_json.stack_limits()) is None:
            logging.getLogger(__name__).warning(
                "this system gives Triton's threads no larger stacks (`ulimit -Hs`, vm.overcommit_memory): a malformed HTTP "
                "request of some hundred KB may end it; let clients reach it only through a proxy that takes less than 100 KB"
            )
        self._work.mkdir()
        return subprocess.Popen(
            command,
            cwd=self._work,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            start_new_session=True,
            pass_fds=[mark.fileno()],
            preexec_fn=partial(prepare_child, stack, file_limits(), os.getpid() if tied else None),
        )

    def _safe_path(self, repository: Path) -> Path:
        """Return a path of the repository that is safe for a shell: its own, or that of a link to it."""
        if is_safe(repository.absolute()):
            return repository
        link = self._folder / "models"
        link.symlink_to(repository.absolute(), target_is_directory=True)
        return link

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **self._added_environment}
        for name, folders in search_paths(self.install).items():
            env[name] = os.pathsep.join(filter(None, [*folders, env.get(name, "")]))
        return env

    def wait_ready(self, timeout_s: float = 120.0, *, is_over: Callable[[], bool] | None = None) -> None:
        """Wait until the models are ready. Errors have the log's errors.

        `is_over` says whether the server has ended, by default `has_ended`. Raises TritonEndedError if Triton or a process that
        it started was killed or crashed, else StartError if Triton ends or takes too long. A Triton that waits for a dead stub
        is killed.
        """
        deadline = time.monotonic() + timeout_s
        unreaped = UnreapedChildren(self.process.pid, LOST_S)
        urls = [f"{self.ports.http_url}/v2/models/{name}/ready" for name in self._first_models]
        while time.monotonic() < deadline:
            if self._is_secret_shown and stubs_of(self.process.pid):
                self._hide_secret()
            if is_over() if is_over is not None else self.has_ended:
                raise self._ended_while_starting()
            if unreaped.are_left():
                self.process.kill()
                self.ends(KILLED_S)
                raise TritonEndedError(
                    self._with_log("Triton waited for a stub that had died while starting, and was ended")
                )
            try:
                while urls:
                    request = urllib.request.Request(urls[-1], headers=dict(self.launcher_headers))
                    with LOCAL_HTTP.open(request, timeout=2) as answer:
                        if answer.status != 200:
                            break
                    urls.pop()
                if not urls:
                    self._hide_secret()
                    self.hide_texts()
                    self._ready_s = time.monotonic()
                    return
            except (urllib.error.URLError, http.client.HTTPException, OSError):
                # If another server has the port, Triton ends by itself.
                pass
            time.sleep(0.05)
        raise StartError(
            self._with_log(f"Triton was not ready after {timeout_s:.0f} s, see `hplm serve --start-timeout`")
        )

    @property
    def launcher_headers(self) -> Mapping[str, str]:
        """The headers with which the launcher may use Triton's restricted APIs over HTTP."""
        return self._restricted.headers

    def _hide_secret(self) -> None:
        """Hide the secret of the restricted APIs from `ps`. Only once Triton has read it: it has a stub, or is ready."""
        if not self._is_secret_shown:
            return
        self._is_secret_shown = False
        if not hide_secret(self.process.pid, self._restricted.secret):
            logging.getLogger(__name__).warning(
                "this system does not let the launcher hide an argument of Triton: other users of this machine can read from "
                "`ps` the secret with which models are loaded and unloaded"
            )

    def hide_texts(self) -> None:
        """Make the stages' shared memory, which holds requests, unreadable for other users. A loaded stage makes it anew."""
        killed_server_files.hide_shared_memory(self._folder)

    def _ended_while_starting(self) -> StartError | TritonEndedError:
        # A killed server takes a moment to end.
        self.ends(KILLED_S)
        status = self.status or 0
        reason = self._with_log(f"Triton ended while starting, {exit_words(status)}")
        # Triton itself ends with a status above 0 if it cannot load a model or open a port.
        was_lost = status < 0 or log_files.LOST_STUB.search(reason) is not None
        return TritonEndedError(reason) if was_lost else StartError(reason)

    def _with_log(self, reason: str) -> str:
        """Return the reason of a failed start with the log's errors. The log is set apart."""
        if self.log_path is None:
            return reason
        self.log_path = log_files.set_apart(self.log_path)
        return f"{reason}; {self.log_path} says:\n{log_files.errors_in(self.log_path)}"

    @property
    def ready_for_s(self) -> float:
        """Seconds since the server was ready; 0 if it never was."""
        return 0.0 if self._ready_s is None else time.monotonic() - self._ready_s

    def how_it_ended(self, *, was_hung: bool) -> str:
        """Return in words how a server that was ready has ended: by itself, or because it `was_hung`."""
        how = "crashed and hung, and was ended" if was_hung else f"ended by itself, {exit_words(self.status or 0)},"
        return f"Triton {how} {self.ready_for_s:.0f} s after it was ready"

    @property
    def status(self) -> int | None:
        """The exit status of the server's process (negative: the number of a signal), None while it runs."""
        return exit_status(self.process)

    @property
    def has_ended(self) -> bool:
        """Whether the server's process has ended."""
        return self.status is not None

    def ends(self, within_s: float = 0.5) -> bool:
        """Return whether the server's process has ended or ends within `within_s` seconds."""
        until_s = time.monotonic() + within_s
        while not (has_ended := self.has_ended) and time.monotonic() < until_s:
            time.sleep(0.02)
        return has_ended

    def drain(self, timeout_s: float, is_cut_short: Callable[[], bool] = lambda: False) -> bool:
        """Refuse new requests, and wait until all requests that Triton has accepted are answered. `stop` comes after.

        New requests get Triton's "unknown model", because the models are unloaded. Return False if requests may still be
        unanswered after `timeout_s`, or when `is_cut_short` says so.
        """
        self._is_drained = idle_connections.unload(
            self.ports.http_url,
            unload_order(self.models),
            time.monotonic() + timeout_s,
            self.launcher_headers,
            is_cut_short=lambda: is_cut_short() or self.has_ended,
        )
        return self._is_drained

    def stop(self, timeout_s: float = 10.0) -> int:
        """Let running requests finish, refuse waiting ones, ask Triton to end, then kill its process group.

        Returns the exit status. Safe to call twice.
        """
        if self._is_stopped:
            return self.process.wait()
        until_s = time.monotonic() + timeout_s
        try:
            if not self.has_ended:
                if not self._is_drained:
                    tell_stages(self.process.pid)
                    self.drain(timeout_s / 2)
                self.process.send_signal(signal.SIGTERM)
                self.ends(idle_connections.EMPTY_ENDS_S if self._is_drained else max(1.0, until_s - time.monotonic()))
        finally:
            self._end()
        return self.process.wait()

    def _end(self) -> None:
        """Kill Triton, its stubs and its reaper, and remove their files. Only once: later the number may be another's."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            until_s = time.monotonic() + KILLED_S
            while time.monotonic() < until_s:
                # A stub that is about to end may write a file once more.
                os.killpg(self.process.pid, 0)
                time.sleep(0.02)
        self._is_stopped = True
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
        killed_server_files.remove(self._folder, numbered(self.process.pid))
        self._unlock_folder()

    def renew_reaper(self) -> bool:
        """Start another reaper if the reaper has ended, for example because memory ran out; at most one a minute.

        Returns whether it had ended.
        """
        now_s = time.monotonic()
        if self._reaper is None or now_s < self._renewed_s + RENEW_EVERY_S:
            return False
        if exit_status(self._reaper) is None or self.has_ended:
            return False
        self._renewed_s = now_s
        with contextlib.suppress(OSError), deferred_signals():
            self._reaper = start_reaper(self.process.pid, self._folder, self._work)
        return True

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
