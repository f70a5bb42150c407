"""Finding, assembling, starting and stopping a real Triton server."""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import json
import logging
import math
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from hplm.errors import StartError, TritonEndedError, TritonNotFoundError
from hplm.runtime.process import end_with_parent, file_limits, stack_limits, tell_to_stop
from hplm.triton.launcher import leftovers, log_files
from hplm.triton.launcher.reaper import start_reaper

PORTS = range(10_000, 32_768)
STAGES = ("hbert_plot", "hbert_upper")
ROLES = (*STAGES, "hbert")
# Only in repositories that are managed while they serve.
MANAGER_ROLES = ("manager", "manager_watch")
# Of Triton's threads: it reads JSON by recursion and has a request's pieces on the stack, so with the usual 8 MiB a nested or
# chopped body of some hundred KB ends it.
STACK_BYTES = 256 << 20
# What a Triton without models may take to end: it waits longer for clients that keep their connection open and ask nothing.
EMPTY_ENDS_S = 4.0
# The stages look ten times a second whether they are told to end.
TOLD_S = 0.3
# For stubs that are killed to end.
LAST_WORD_S = 0.5
RENEW_EVERY_S = 60.0
# Of a model, as Triton's index has it.
LOADED = ("LOADING", "READY", "UNLOADING")
# To a server of this machine, whatever proxy the environment names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class TritonInstall:
    """A Triton installation: where it came from, its binary, the parts of its Python backend, its libraries."""

    origin: str
    binary: Path
    python_backend_files: tuple[Path, ...]
    library_folders: tuple[Path, ...]


def find_triton() -> TritonInstall:
    """`$TRITON_ROOT`, else `/opt/tritonserver`, else the wheel `nvidia-pytriton`. Raises TritonNotFoundError."""
    tried = []
    for origin, root in (("$TRITON_ROOT", os.environ.get("TRITON_ROOT")), ("/opt/tritonserver", "/opt/tritonserver")):
        if not root:
            continue
        if (Path(root) / "bin" / "tritonserver").is_file():
            return _from_root(origin, Path(root).resolve())
        if origin == "$TRITON_ROOT":
            raise TritonNotFoundError(f"TRITON_ROOT is {root}, but there is no {root}/bin/tritonserver")
        tried.append(root)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise TritonNotFoundError(
            f"no Triton in {', '.join(tried)} and no wheel: set TRITON_ROOT or `pip install nvidia-pytriton==0.7.0`"
        )
    return _from_wheel(Path(spec.submodule_search_locations[0]))


def _from_root(origin: str, root: Path) -> TritonInstall:
    folder = root / "backends" / "python"
    if not folder.is_dir():
        raise TritonNotFoundError(f"{root} has no Python backend in {folder}")
    return TritonInstall(origin, root / "bin" / "tritonserver", tuple(sorted(folder.iterdir())), (root / "lib",))


def _from_wheel(package: Path) -> TritonInstall:
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise TritonNotFoundError(f"the wheel nvidia-pytriton has no stub for Python {version}")
    files = [path for path in (root / "backends" / "python").iterdir() if path.name != stub.name]
    libraries = [package.parent / "nvidia_pytriton.libs"]
    if found := sysconfig.get_config_var("LIBDIR"):
        libraries.append(Path(found))
    return TritonInstall("wheel nvidia-pytriton", root / "bin" / "tritonserver", (*files, stub), tuple(libraries))


def share_folder(name: str) -> Path:
    """`backends` or `model_repository`: of the checkout, or of the installed wheel."""
    package = Path(__file__).resolve().parents[2]
    shipped = package / "_share" / name
    return shipped if shipped.is_dir() else package.parents[1] / name


def assemble_backends(install: TritonInstall, folder: Path, extra: Sequence[Path] = ()) -> None:
    """Make `folder` a backend directory: Triton's Python backend with our Python's stub, ours, and those below `extra`."""
    python = folder / "python"
    python.mkdir(parents=True)
    for source in install.python_backend_files:
        if source.is_file():
            shutil.copy2(source, python / source.name)
    # Triton follows links to folders, not to files.
    for backends in (share_folder("backends"), *extra):
        for source in backends.resolve().iterdir():
            if (source / "model.py").is_file():
                (folder / source.name).symlink_to(source, target_is_directory=True)


def roles_of(repository: Path) -> tuple[str, ...]:
    """The models that a repository of ours has, in the order to load them."""
    return (*ROLES, *(role for role in MANAGER_ROLES if (repository / role).is_dir()))


def is_plain(path: Path) -> bool:
    """Whether it has no space or the like: Triton gives paths of models and backends to a shell as they are."""
    return shlex.quote(str(path)) == str(path)


def check_path(path: Path, option: str) -> None:
    """Raises StartError, naming `option`, where the path is not plain."""
    if not is_plain(path):
        raise StartError(
            f"Triton starts nothing from {str(path)!r}, which has characters that a shell takes apart; "
            f"move it, or give {option} a symbolic link to it without them"
        )


def model_flags(repository: Path, backends: Path, models: Sequence[str]) -> list[str]:
    """What any `tritonserver` needs to serve `models`, with `backends` from `assemble_backends`."""
    return [
        f"--model-repository={repository.absolute()}",
        f"--backend-directory={backends.absolute()}",
        "--model-control-mode=explicit",
        *(f"--load-model={role}" for role in models),
        "--disable-auto-complete-config",
    ]


def search_paths(install: TritonInstall) -> dict[str, list[str]]:
    """By variable the folders that must come first in it: the stub runs the first `python3` of the PATH."""
    return {
        "LD_LIBRARY_PATH": [str(folder) for folder in install.library_folders],
        "PATH": [str(Path(sys.executable).parent)],
    }


def shell_command(install: TritonInstall, repository: Path, backends: Path) -> str:
    """A line for a shell that serves a repository of ours by Triton alone, to this machine; further flags may follow it, and
    go before those it has. Raises StartError.
    """
    check_path(repository.absolute(), "--models")
    variables = [
        f'{name}={os.pathsep.join(map(shlex.quote, folders))}${{{name}:+:"${name}"}}'
        for name, folders in search_paths(install).items()
    ]
    flags = model_flags(repository, backends, roles_of(repository))
    flags += [f"--{port}-address=127.0.0.1" for port in ("http", "grpc", "metrics")]
    # Where it runs it may be allowed fewer files.
    limits = [f'ulimit -Sn {file_limits()[0]} 2>/dev/null || ulimit -Sn "$(ulimit -Hn)";']
    limits += [f"ulimit -s {STACK_BYTES >> 10} &&"] if stack_limits(STACK_BYTES) is not None else []
    # Stubs have the working directory on sys.path, where a folder `hplm` would be taken for ours.
    return " ".join(["cd / &&", *limits, *variables, "exec", shlex.join([str(install.binary), *flags])])


@dataclass(frozen=True)
class Ports:
    """Where the server listens on `host`."""

    http: int
    grpc: int
    metrics: int
    host: str = "127.0.0.1"

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://{self.host}:{self.grpc}"


def free_ports() -> Ports:
    """Three ports nobody listens on now. Raises StartError where there are none.

    Drawn below those that the system hands out by itself: such a one it might give to somebody else before Triton has it.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((Ports.host, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == 3:
            http, grpc, metrics = found
            return Ports(http, grpc, metrics)
    raise StartError(f"there are no free ports on {Ports.host} below {PORTS.stop}")


def check_free(ports: Ports) -> None:
    """Raises StartError naming a port that somebody listens on or that is given twice, or an address that is not this
    machine's, or of IPv6, which nothing here is made for.
    """
    if ":" in ports.host:
        raise StartError(f"--host takes an IPv4 address or a name, not {ports.host}")
    by_flag = {"--http-port": ports.http, "--grpc-port": ports.grpc, "--metrics-port": ports.metrics}
    if len({*by_flag.values()}) < len(by_flag):
        raise StartError(f"{', '.join(by_flag)} must be three ports, got {', '.join(map(str, by_flag.values()))}")
    for flag, port in by_flag.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ports.host, port))
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise StartError(
                        f"{ports.host} is no address of this machine ({error.strerror}): see --host"
                    ) from None
                raise StartError(
                    f"port {port} of {ports.host} is not free ({error.strerror}); choose with {flag}"
                ) from None


def _prepare(stack: tuple[int, int] | None, files: tuple[int, int], parent: int | None) -> None:
    """In the process that becomes Triton."""
    # Training data lie in files of its manager: nobody else's to read.
    os.umask(0o077)
    if stack is not None:
        resource.setrlimit(resource.RLIMIT_STACK, stack)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    if parent is not None:
        end_with_parent(parent)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Handlers of signals that end a process run afterwards: what they raise would part a process from who has begun it.

    Not by a mask: another thread would take the signal, and its handler would run in the main thread all the same.
    """
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():
        known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        handlers = {number: handler for number, handler in known.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for sent in came:
            signal.raise_signal(sent)


def _status(child: subprocess.Popen[bytes]) -> int | None:
    if child.returncode is not None:
        return child.returncode
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class TritonServer:
    """A running Triton in a session of its own, so that its stubs end with it. A context manager.

    It loads `models` of the repository, by default ROLES and the MANAGER_ROLES that it has; `backends` are folders of
    backends beside ours. With `tied` it also ends when the thread that made it does, however that is killed, and a process
    beside it ends what is left of it when both are killed.
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
    ) -> None:
        self.ports = ports
        self.install = install or find_triton()
        self.log_path = log
        check_path(Path(tempfile.gettempdir()), "TMPDIR")
        # Also of a killed server that had this log.
        leftovers.sweep()
        output = log_files.fresh(log) if log is not None else None
        self._models = roles_of(repository) if models is None else tuple(models)
        self._folder, mark = leftovers.make_folder()
        # Stubs start with their working directory on sys.path: an empty folder shadows nothing.
        self._work = self._folder / "work"
        self._let_go = weakref.finalize(self, os.close, leftovers.hold(self._folder))
        process = self._reaper = None
        self._is_stopped = False
        # On the monotonic clock; None until it was ready.
        self._ready_s: float | None = None
        self._renewed_s = -math.inf
        try:
            with _signals_wait():
                self.process = process = self._launch(repository, backends, flags, output, mark, tied)
                if tied:
                    self._reaper = start_reaper(process.pid, self._folder, self._work)
            leftovers.tell(mark, process.pid)
        except BaseException as error:
            if process is not None:
                self._end()
            shutil.rmtree(self._folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise StartError(f"{self.install.binary} cannot be started: {error}") from error
            raise
        finally:
            # It writes what is left once more.
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
        ports = self.ports
        assembled = self._folder / "backends"
        assemble_backends(self.install, assembled, backends)
        command = [
            str(self.install.binary),
            *model_flags(self._plain(repository), assembled, self._models),
            f"--http-address={ports.host}",
            f"--http-port={ports.http}",
            f"--grpc-address={ports.host}",
            f"--grpc-port={ports.grpc}",
            f"--metrics-address={ports.host}",
            f"--metrics-port={ports.metrics}",
            "--exit-timeout-secs=5",
            # Named after this server, so that what a kill leaves there can be told from others' and removed.
            *(
                f"--backend-config={one.name},shm-region-prefix-name={self._folder.name}."
                for one in assembled.iterdir()
            ),
            *flags,
        ]
        if (stack := stack_limits(STACK_BYTES)) is None:
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
            preexec_fn=partial(_prepare, stack, file_limits(), os.getpid() if tied else None),
        )

    def _plain(self, repository: Path) -> Path:
        if is_plain(repository.absolute()):
            return repository
        link = self._folder / "models"
        link.symlink_to(repository.absolute(), target_is_directory=True)
        return link

    def _environment(self) -> dict[str, str]:
        env = dict(os.environ)
        for name, folders in search_paths(self.install).items():
            env[name] = os.pathsep.join(filter(None, [*folders, env.get(name, "")]))
        return env

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Until its models answer. Raises StartError with the log's errors when the server dies or takes too long."""
        deadline = time.monotonic() + timeout_s
        urls = [f"{self.ports.http_url}/v2/models/{name}/ready" for name in self._models]
        while time.monotonic() < deadline:
            if self.has_ended:
                raise self._failed(f"Triton ended while starting, {self._how_it_ended()}")
            try:
                while urls:
                    with DIRECT.open(urls[-1], timeout=2) as answer:
                        if answer.status != 200:
                            break
                    urls.pop()
                if not urls:
                    self.hide_texts()
                    self._ready_s = time.monotonic()
                    return
            except (urllib.error.URLError, http.client.HTTPException, OSError):
                # Where somebody else has the port, Triton ends by itself.
                pass
            time.sleep(0.05)
        raise self._failed(f"Triton was not ready after {timeout_s:.0f} s, see `hplm serve --start-timeout`")

    def hide_texts(self) -> None:
        """From other users of the machine: requests lie in shared memory between the stages, anew where a stage was loaded."""
        leftovers.hide(self._folder)

    def _failed(self, said: str) -> StartError:
        if self.log_path is None:
            return StartError(said)
        self.log_path = log_files.set_apart(self.log_path)
        return StartError(f"{said}; {self.log_path} says:\n{log_files.errors_in(self.log_path)}")

    def ended(self, *, was_hung: bool = False) -> TritonEndedError:
        """Return the error of a server that was ready and has ended: by itself, or because it `was_hung`."""
        assert self._ready_s is not None
        after = f"{time.monotonic() - self._ready_s:.0f} s after it was ready"
        how = "crashed and hung, and was ended" if was_hung else f"ended by itself, {self._how_it_ended()},"
        log = f"its log is {self.log_path}" if self.log_path else "it has no log"
        return TritonEndedError(f"Triton {how} {after}; {log}")

    def _how_it_ended(self) -> str:
        status = self.status or 0
        if status >= 0:
            return f"with status {status}"
        with contextlib.suppress(ValueError):
            return f"by signal {-status} ({signal.Signals(-status).name})"
        return f"by signal {-status}"

    @property
    def status(self) -> int | None:
        """Its process's exit status, negative a signal's number; None while it runs.

        Not by `poll`: a signal's exception may leave that with its lock taken (seen), and `stop` would wait for it for ever.
        And until `stop` nobody else may be given its number, which is its group's.
        """
        return _status(self.process)

    @property
    def has_ended(self) -> bool:
        """Whether its process has."""
        return self.status is not None

    def ends(self, within_s: float = 0.5) -> bool:
        """Whether its process has ended or does so in a moment."""
        until_s = time.monotonic() + within_s
        while not (has_ended := self.has_ended) and time.monotonic() < until_s:
            time.sleep(0.02)
        return has_ended

    def stop(self, timeout_s: float = 10.0) -> int:
        """Have what runs answered and what waits refused, ask Triton to end, then kill the whole group.

        Returns the exit status. Safe to call twice.
        """
        if self._is_stopped:
            return self.process.wait()
        until_s = time.monotonic() + timeout_s
        try:
            if not self.has_ended:
                self._tell_stages()
                is_empty = self._unload(until_s - timeout_s / 2)
                self.process.send_signal(signal.SIGTERM)
                self.ends(EMPTY_ENDS_S if is_empty else max(1.0, until_s - time.monotonic()))
        finally:
            self._end()
        return self.process.wait()

    def _end(self) -> None:
        """Triton, its stubs, its reaper and what they have. Once: its number may be another's later."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            until_s = time.monotonic() + LAST_WORD_S
            while time.monotonic() < until_s:
                # A stub that has not met its end yet may write a file once more.
                os.killpg(self.process.pid, 0)
                time.sleep(0.02)
        self._is_stopped = True
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()
        leftovers.remove(self._folder, self.process.pid)
        self._let_go()

    def renew_reaper(self) -> bool:
        """Start the process beside it again where that has ended, as where memory ran out, but not ever again at once.

        Whether it had.
        """
        now_s = time.monotonic()
        if self._reaper is None or now_s < self._renewed_s + RENEW_EVERY_S:
            return False
        if _status(self._reaper) is None or self.has_ended:
            return False
        self._renewed_s = now_s
        with contextlib.suppress(OSError), _signals_wait():
            self._reaper = start_reaper(self.process.pid, self._folder, self._work)
        return True

    def _tell_stages(self) -> None:
        """Have them refuse what waits and who comes: with STOPPING, for a moment, before their models are unloaded."""
        try:
            tell_to_stop(self.process.pid)
        except OSError as error:
            logging.getLogger(__name__).warning("the stages cannot be told that the server ends: %s", error)
        else:
            time.sleep(TOLD_S)

    def _unload(self, until_s: float) -> bool:
        """Unload the models, those that use the stages first, when nothing is under way; False where that cannot be had.

        Triton's own end gives the time that it has to clients' open connections first, then breaks off what is under way.
        """
        url = f"{self.ports.http_url}/v2/repository"

        def ask(path: str) -> bytes:
            left_s = max(0.1, until_s - time.monotonic())
            with DIRECT.open(urllib.request.Request(f"{url}/{path}", data=b"{}"), timeout=left_s) as answer:
                return bytes(answer.read())

        def index() -> dict[str, str]:
            return {one["name"]: one.get("state", "") for one in json.loads(ask("index"))}

        stages = {*STAGES}.intersection(self._models)
        states: dict[str, str] = {}
        try:
            for models in ({*self._models} - stages, stages):
                for model in models:
                    ask(f"models/{model}/unload")
                states = index()
                while any(states.get(model) in LOADED for model in models):
                    if time.monotonic() > until_s:
                        return False
                    time.sleep(0.02)
                    states = index()
        except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError):
            # It does not let us, or it is about to end by itself, or that is no Triton.
            return False
        # One whose folder has gone is not listed, and others' models may be there too.
        return states.keys() >= {*self._models} and not any(state in LOADED for state in states.values())

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
