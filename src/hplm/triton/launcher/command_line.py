"""The command line of `tritonserver` over a repository of hplm."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hplm.runtime.process import file_limits
from hplm.triton.launcher.install import TritonInstall, search_paths
from hplm.triton.launcher.ports import Ports
from hplm.triton.workarounds import deep_json
from hplm.triton.workarounds.shell_paths import check_ascii, check_path


def model_flags(repository: Path, backends: Path, models: Sequence[str]) -> list[str]:
    """Return the flags that any `tritonserver` needs to serve `models`; `assemble_backends` made the folder `backends`."""
    return [
        f"--model-repository={repository.absolute()}",
        f"--backend-directory={backends.absolute()}",
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in models),
        "--disable-auto-complete-config",
    ]


def port_flags(ports: Ports) -> list[str]:
    """Return the flags that make `tritonserver` listen on `ports`."""
    # Triton's HTTP library wants this prefix before an IPv6 address, and gRPC wants brackets around it. With any other form
    # Triton listens nowhere, or says that the port is in use.
    http = f"ipv6:{ports.host}" if ":" in ports.host else ports.host
    return [
        f"--http-address={http}",
        f"--http-port={ports.http}",
        f"--grpc-address={ports.url_host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={http}",
        f"--metrics-port={ports.metrics}",
    ]


def flag_values(flags: Sequence[str], name: str) -> Iterator[str]:
    """Yield each value of a flag, given as `NAME=VALUE` or as two arguments; empty for a flag without a value."""
    for index, flag in enumerate(flags):
        key, sign, value = flag.partition("=")
        if key == name:
            following = "".join(flags[index + 1 : index + 2])
            yield value if sign else "" if following.startswith("-") else following


def shell_command(install: TritonInstall, repository: Path, backends: Path, models: Sequence[str]) -> str:
    """Return a shell command that serves models by Triton alone, to this machine. Raises StartError.

    Flags that follow the command override its own.
    """
    check_path(repository.absolute(), "--models")
    check_ascii(repository)
    variables = [
        f'{name}={os.pathsep.join(map(shlex.quote, folders))}${{{name}:+:"${name}"}}'
        for name, folders in search_paths(install).items()
    ]
    flags = model_flags(repository, backends, models)
    flags += [f"--{port}-address=127.0.0.1" for port in ("http", "grpc", "metrics")]
    # The shell that runs the command may be allowed fewer files than this process.
    limits = [f'ulimit -Sn {file_limits()[0]} 2>/dev/null || ulimit -Sn "$(ulimit -Hn)";']
    if deep_json.is_needed(install.version) and deep_json.stack_limits() is not None:
        limits.append(f"ulimit -s {deep_json.STACK_BYTES >> 10} &&")
    # A stub has the working directory on sys.path, where a folder `hplm` would hide the installed library.
    return " ".join(["cd / &&", *limits, *variables, "exec", shlex.join([str(install.binary), *flags])])
