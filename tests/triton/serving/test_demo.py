"""The main job as a new user meets it: the default build, the lines that `hplm serve` prints, README and examples."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hplm.core.text import TextEncoder
from hplm.triton.launcher.ports import Ports, free_ports
from tests.unit.hplm.core.characters import characters_that_hide_words

pytestmark = [pytest.mark.triton, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
TOKENIZER = Path("build/demo/store/bases/minilm-ngrams/tokenizer.json")
TENANTS = {"icd10", "films", "spam", "phenotypes"}


@dataclass
class Served:
    """A running `hplm serve`, the folder that it runs in, and what it has printed."""

    process: subprocess.Popen[str]
    folder: Path
    ports: Ports
    printed: str

    def run(self, command: list[str] | str) -> str:
        """Standard output of a command that must succeed, with the server's addresses in the environment."""
        env = {**os.environ, "HPLM_HTTP": self.ports.http_url, "HPLM_GRPC": self.ports.grpc_url}
        env["HPLM_URL"] = self.ports.http_url
        env["PATH"] = f"{BIN}{os.pathsep}{env['PATH']}"
        shell = isinstance(command, str)
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=env, shell=shell, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo is installed: not in the checkout, whose own may have tenants of who works there."""
    made = tmp_path_factory.mktemp("demo")
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.fixture(scope="module")
def checked(folder: Path) -> list[dict[str, object]]:
    """`hplm serve --check`, which installs the demo."""
    done = subprocess.run(
        [str(BIN / "hplm"), "serve", "--check"], stdout=subprocess.PIPE, text=True, cwd=folder, check=True
    )
    return list(json.loads(done.stdout))


@pytest.fixture(scope="module")
def served(folder: Path, checked: object) -> Iterator[Served]:
    """`hplm serve` in the foreground, until it has said how to call it."""
    ports = free_ports()
    flags = [f"--{name}-port={getattr(ports, name)}" for name in ("http", "grpc", "metrics", "health")]
    command = [str(BIN / "hplm"), "serve", *flags, "--log-verbose=0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder)
    assert process.stderr is not None
    watchdog = threading.Timer(400, process.kill)
    watchdog.start()
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if "Ctrl-C stops it" in line:
            break
    watchdog.cancel()
    yield Served(process, folder, ports, "".join(lines))
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=90)
    assert process.returncode == 0, rest


def test_check_prints_one_prediction_of_each_tenant_as_json(checked: list[dict[str, object]]) -> None:
    assert {str(one["tenant"]) for one in checked} == TENANTS
    for one in checked:
        assert set(one) == {"tenant", "text", "label", "score"}
        assert one["text"]
        assert one["label"]
        assert isinstance(one["score"], float)


def test_the_demo_answers_what_a_person_would(checked: list[dict[str, object]]) -> None:
    labels = {str(one["tenant"]): str(one["label"]) for one in checked}
    assert labels["films"] == "positive"
    assert labels["spam"] == "spam"
    assert labels["icd10"].startswith("Injury")
    assert "genitourinary" in labels["phenotypes"]


def test_serve_says_which_triton_it_took_and_shows_every_tenant(served: Served) -> None:
    assert re.search(r"Triton: (wheel nvidia-pytriton|/opt/tritonserver|\$TRITON_ROOT)", served.printed)
    for tenant in TENANTS:
        assert tenant in served.printed


def test_the_printed_curl_python_and_hplm_lines_work(served: Served) -> None:
    # In quotes where the path needs them.
    lines = [line for line in served.printed.splitlines() if line.lstrip("'").startswith(("curl ", str(BIN)))]
    assert len(lines) == 3
    outputs = [served.run(line) for line in lines]
    label = next(one["data"][0] for one in json.loads(outputs[0])["outputs"] if one["name"] == "LABEL")
    assert all(label in output for output in outputs)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_an_example_runs(served: Served, name: str) -> None:
    assert served.run([sys.executable, str(ROOT / "examples" / name)]).strip()


def shown_code(page: str, heading: str) -> list[tuple[str, str]]:
    """Return the language and the code of each shell and Python block of a page, from a heading on."""
    text = (ROOT / page).read_text()
    return re.findall(r"```(sh|python)\n(.*?)```", text[text.index(heading) :], flags=re.DOTALL)


def run_shown(served: Served, kind: str, code: str) -> str:
    """Run a page's block against the server of this test and return what it prints."""
    code = code.replace("127.0.0.1:8000", f"127.0.0.1:{served.ports.http}")
    code = code.replace("127.0.0.1:8001", f"127.0.0.1:{served.ports.grpc}")
    return served.run([sys.executable, "-c", code] if kind == "python" else code)


def test_the_first_lines_of_the_readme_run(served: Served) -> None:
    blocks = shown_code("README.md", "## Call it")[:4]
    assert [kind for kind, _ in blocks] == ["sh", "python", "sh", "sh"]
    for kind, code in blocks:
        assert re.search("positive|negative", run_shown(served, kind, code))


def test_the_lines_that_the_page_on_calling_has_for_the_demo_run(served: Served) -> None:
    blocks = [(kind, code) for kind, code in shown_code("docs/calling.md", "## With curl") if '"films"' in code]
    assert [kind for kind, _ in blocks] == ["sh", "sh", "python", "python", "python"]
    for kind, code in blocks:
        assert re.search("positive|negative", run_shown(served, kind, code))


def test_the_quickstart_makes_a_tenant_that_answers(served: Served) -> None:
    ask, create, change = (run_shown(served, *block) for block in shown_code("docs/quickstart.md", "## 3. "))
    assert re.search("positive|negative", ask)
    assert "tenant support is at version 1" in create
    assert create.rstrip().splitlines()[-1].split()[0] == "billing"
    assert "support" in change


def test_hplm_predict_reads_lines_and_prints_json(served: Served) -> None:
    url = served.ports.grpc_url
    lines = "WINNER!! Claim your free prize now, call 09061701461\\n\\nSee you at home, I will cook dinner.\\n"
    command = f"printf '{lines}' | hplm predict -t spam --json --url {url}"
    answers = [json.loads(line) for line in served.run(command).splitlines()]
    assert [answer["label"] for answer in answers] == ["spam", "ham"]


def test_no_known_word_is_hidden_by_a_character_beside_it(folder: Path) -> None:
    # These symbols are in longer pieces of this vocabulary, such as the pound sign of \u00a310.
    joined = "\u00a3\u00b0\u00b4\u2044\u2212"
    assert characters_that_hide_words(folder / TOKENIZER, joined) == []


def test_a_word_beside_an_emoji_is_the_same_token_with_a_blank_between_or_none(folder: Path) -> None:
    encoder = TextEncoder(folder / TOKENIZER, 40)
    word, glued, apart = (
        one.ids.tolist() for one in encoder.encode(["terrible", "terrible\U0001f44e", "terrible \U0001f44e"])
    )
    assert glued == apart
    assert glued[1] == word[1]


def test_a_word_beside_an_emoji_is_answered_the_same_with_a_blank_between_or_none(served: Served) -> None:
    lines = "terrible\U0001f44e\\nterrible \U0001f44e\\n"
    command = f"printf '{lines}' | hplm predict -t films --json --url {served.ports.grpc_url}"
    glued, apart = (json.loads(line) for line in served.run(command).splitlines())
    assert glued["label"] == apart["label"]
    assert glued["score"] == pytest.approx(apart["score"], abs=1e-6)


def test_hplm_predict_shows_an_error_in_one_line_and_fails(served: Served) -> None:
    command = [str(BIN / "hplm"), "predict", "-t", "nobody", "--url", served.ports.http_url, "hello"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "hplm: UNKNOWN_TENANT: there is no tenant 'nobody'"
