"""Reading a model folder in Hugging Face format, of one of `hplm.models.architectures`."""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from hplm.core.settings import WHOLE, BaseConfig
from hplm.core.text import TextEncoder, read_tokenizer
from hplm.engine.lower_layers import lower_form as find_lower_form
from hplm.errors import DataError
from hplm.models.architectures import ARCHITECTURES, Architecture, find_architecture
from hplm.models.layers import TOKEN_TYPES, OriginalEncoder

*_FIRST, _LAST = (architecture.title for architecture in ARCHITECTURES.values())
TITLES = f"{', '.join(_FIRST)} or {_LAST}"
TAKEN = (
    f"--model takes minilm, mpnet, or the folder of a whole {TITLES} in Hugging Face's layout: config.json, "
    "tokenizer.json and model.safetensors (or pytorch_model.bin)"
)
# Files that transformers loads weights from.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
# Files besides weights that decide what a model computes.
READ = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Types of numbers that a weight may have in a safetensors file. Others are quantised, and mean nothing without their scales.
FLOATS = ("F64", "F32", "F16", "BF16")
# Both readings of a tokenizer must give the same ids for these.
COMPARED = (
    "The QUICK Brown fox jumps over 13 lazy dogs.",
    "Caf\u00e9s in \u00c5lesund, na\u00efve fa\u00e7ades: \u00c9COLE, Stra\u00dfe, \u0130stanbul",
    "cafe\u0301 o\u0308 (combining), \ufb01ne \uff21\uff22\uff23 \u2460",
    "Order #4,711 of 2024-05-03: 3.5% off, 1/2 price, $10 or \u00a310!",
    "don't -- \"stop\" 'quote' [x] {y} a_b e@mail.org https://a.b/c?d=e",
    "\u4e2d\u6587\u5b57\u7b26 mixed \u65e5\u672c \ud55c\uad6d\uc5b4 \u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940",
    "emoji \U0001f600 \U0001f44d\U0001f3fd \u2764\ufe0f",
    "  spaces\tand\n\nlines  ",
)

log = logging.getLogger(__name__)

# transformers makes each layer before it reads weights, which a wrong config.json would let take hours.
MOST_LAYERS = 1000
ENCODERS = {architecture.encoder for architecture in ARCHITECTURES.values()}
# Code of a folder is never run, and nothing is downloaded.
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_folder(folder: Path) -> None:
    """Refuse a path that holds no whole model of a known architecture. Raises DataError: what was found and what is taken."""
    if found := _fault(folder):
        raise DataError(f"{folder} {found}. {TAKEN}")


def head_of(folder: Path) -> str | None:
    """Return the architecture in a checked folder's config.json if that architecture has a head, which is not converted."""
    named = _config(folder).get("architectures")
    return next((str(one) for one in (named if isinstance(named, list) else []) if str(one) not in ENCODERS), None)


def _fault(folder: Path) -> str | None:
    """Return what a path is, if it cannot be converted."""
    if not folder.is_dir():
        return _other_than_a_folder(folder)
    if (folder / "adapter_config.json").is_file():
        return (
            f"holds {_adapter(folder)}, not a whole model. Adapters that were trained elsewhere cannot be imported yet"
        )
    if not (folder / "config.json").is_file():
        return f"is no folder of a model in Hugging Face's layout: it has no config.json{_gguf(folder)}"
    if fault := _no_content(folder):
        return fault
    for name in READ:
        try:
            # transformers takes a tokenizer_config.json that is cut as if it were not there.
            if (folder / name).is_file():
                _object(folder / name)
        except (ValueError, RecursionError) as error:
            return f"has a {name} that cannot be read: {error}"
    kind = _config(folder).get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        return f"holds a model of type {kind!r}" if kind else "has a config.json without model_type"
    if not any((folder / name).is_file() for name in WEIGHTS):
        return f"has no weights that can be read: no {WEIGHTS[0]}{_gguf(folder)}"
    if not (folder / "tokenizer.json").is_file():
        return "has no tokenizer.json: save it with a fast tokenizer of transformers"
    return None


def _no_content(folder: Path) -> str | None:
    """Return which file has no content of its own, because a download or a clone is not whole; None if each file has."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".bin", ".txt") or not path.is_file():
            continue
        with path.open("rb") as file:
            beginning = file.read(len(LFS_POINTER))
        if beginning == LFS_POINTER:
            return (
                f"has a Git-LFS pointer in place of {path.name}: run `git lfs pull` there, or download the file itself"
            )
        if not beginning and path.name in (*READ, *WEIGHTS):
            return f"has an empty {path.name}: download it again"
    return None


def _other_than_a_folder(path: Path) -> str:
    if path.is_file():
        return "is a GGUF file, not a folder" if path.suffix == ".gguf" else "is a file, not a folder"
    if HUB_NAME.fullmatch(str(path)):
        return (
            "is no folder, and models of Hugging Face's hub are not downloaded by name: run "
            f"`hf download {path} --local-dir DIR`, then give --model DIR"
        )
    return "is no folder"


def _adapter(folder: Path) -> str:
    """Return which library's adapter a folder holds: only PEFT's say their type."""
    try:
        kind = json.loads((folder / "adapter_config.json").read_bytes()).get("peft_type")
    except (ValueError, AttributeError):
        return "an adapter whose adapter_config.json cannot be read"
    return f"a PEFT adapter ({kind})" if kind else "an AdapterHub adapter"


def _gguf(folder: Path) -> str:
    """Return words that name a folder's GGUF file, if it has one."""
    return next((f", but the GGUF file {path.name}" for path in sorted(folder.glob("*.gguf"))), "")


def _config(folder: Path) -> dict[str, Any]:
    """Return a folder's config.json. Raises ValueError."""
    return _object(folder / "config.json")


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError, or RecursionError."""
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def num_layers_of(folder: Path) -> int:
    """Return the number of layers of the model in `folder`. Raises DataError if the model cannot be used."""
    check_folder(folder)
    with _reading(folder / "config.json"):
        return int(AutoConfig.from_pretrained(folder, **LOCAL).num_hidden_layers)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise DataError, which names the path, in place of the errors of many types that transformers raises for its content."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            f"{path} cannot be read ({type(error).__name__}: {first}): download it again, or save it again with transformers"
        ) from error


@contextmanager
def tokenizer_file(folder: Path, config: BaseConfig) -> Iterator[Path]:
    """Yield a tokenizer file that reads text as transformers reads it with all files of `folder`.

    This is `tokenizer.json` itself if it says all. If another file of the folder changes the reading, it is a temporary file of
    the tokenizer that transformers makes, and a warning says so. Raises DataError if there is no such file, or if it gives ids
    without an embedding.
    """
    path = folder / "tokenizer.json"
    # Read first, because transformers makes a tokenizer from other files if this one is missing.
    with _reading(path):
        alone = read_tokenizer(path)
        theirs = AutoTokenizer.from_pretrained(folder, **LOCAL)
        if (fast := getattr(theirs, "backend_tokenizer", None)) is None:
            raise DataError(
                f"transformers reads {folder} with {type(theirs).__name__}, which has no tokenizer.json of its own"
            )
        wanted = [theirs(text)["input_ids"] for text in COMPARED]
    with tempfile.TemporaryDirectory(prefix="hplm-tokenizer-") as apart:
        if (different := _difference(alone, wanted)) is not None:
            made = Path(apart) / path.name
            made.write_text(fast.to_str(), encoding="utf-8")
            if (still := _difference(read_tokenizer(made), wanted)) is not None:
                raise DataError(f"{folder}: {still}: save its tokenizer again as one tokenizer.json ({_said(folder)})")
            log.warning("%s: %s. The base reads text as transformers does (%s)", path, different, _said(folder))
            path = made
        if (highest := TextEncoder(path, config.max_tokens).highest_id) >= config.vocab_size:
            raise DataError(
                f"{folder / 'tokenizer.json'} gives token ids up to {highest}, the model has embeddings below "
                f"{config.vocab_size} only: take the tokenizer that belongs to it"
            )
        yield path


def _difference(tokenizer: Tokenizer, wanted: Sequence[Sequence[int]]) -> str | None:
    """Return for which text of COMPARED a tokenizer gives other ids than `wanted`; None if for no text."""
    for text, ids in zip(COMPARED, wanted, strict=True):
        if (ours := tokenizer.encode(text).ids) != list(ids):
            return f"it gives {len(ours)} ids for {text!r}, transformers gives {len(ids)} others from all files of the folder"
    return None


def _said(folder: Path) -> str:
    """Return what tokenizer_config.json and the normalizer of tokenizer.json say about reading."""
    named = ("tokenizer_class", "do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space")
    config = folder / "tokenizer_config.json"
    given = _object(config) if config.is_file() else {}
    words = ", ".join(f"{name}={json.dumps(given[name])}" for name in named if name in given)
    normalizer = _object(folder / "tokenizer.json").get("normalizer")
    return f"tokenizer_config.json {words or 'says nothing'}; tokenizer.json normalizer={json.dumps(normalizer)}"


def base_config(
    folder: Path,
    *,
    name: str,
    lower_layers: int,
    lower_form: str,
    window: int,
    window_layers: int,
    max_tokens: int | None,
    adapter_layers: int = 0,
) -> BaseConfig:
    """Return the shape of the base that converting `folder` gives, or of the whole base of its model.

    Without `max_tokens` it reads all positions of the model.

    Raises DataError if the model cannot be converted, ConfigError if there is no such form of lower layers.
    """
    check_folder(folder)
    with _reading(folder / "config.json"):
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    architecture = find_architecture(config.model_type)
    if reason := _other_layers(config, architecture):
        raise DataError(f"{folder} holds a model of type {config.model_type!r} {reason}")
    layers = config.num_hidden_layers
    is_whole = lower_form == WHOLE
    if not is_whole and not (1 <= lower_layers < layers and 1 <= window_layers < layers):
        raise DataError(f"{folder} has {layers} layers: --lower and --window-layers must be 1 to {layers - 1}")
    positions = config.max_position_embeddings - architecture.first_row(config.pad_token_id)
    max_tokens = positions if max_tokens is None else max_tokens
    if max_tokens > positions:
        raise DataError(f"{folder} has {positions} positions, --max-tokens asks for {max_tokens}")
    return BaseConfig(
        name=name,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        intermediate_size=getattr(config, architecture.intermediate_size),
        window_layers=window_layers,
        upper_layers=layers - lower_layers,
        max_tokens=max_tokens,
        vectors_per_ngram=1 if is_whole else find_lower_form(lower_form).vectors_per_ngram(window),
        window=window,
        layer_norm_eps=config.layer_norm_eps if architecture.layer_norm_eps is None else architecture.layer_norm_eps,
        pad_id=config.pad_token_id,
        relative_buckets=architecture.relative_buckets,
        architecture=architecture.model_type,
        lower_layers=lower_layers,
        lower_form=lower_form,
        adapter_layers=adapter_layers,
        token_types=TOKEN_TYPES if is_whole and architecture.token_types is not None else 0,
    )


def _other_layers(config: Any, architecture: Architecture) -> str | None:
    """Return why our layers would not compute what a model with that config.json computes, None if they would."""
    activation = getattr(config, architecture.activation)
    if activation != "gelu":
        return f"with the activation {activation!r}: only 'gelu' is taken, the exact one"
    buckets = getattr(config, "relative_attention_num_buckets", 0)
    if buckets != architecture.relative_buckets:
        wanted = architecture.relative_buckets
        return f"with {buckets} buckets of relative positions: transformers computes {architecture.title} with {wanted}"
    if (positions := getattr(config, "position_embedding_type", "absolute")) != "absolute":
        return f"with position_embedding_type {positions!r}: only 'absolute' is taken"
    if getattr(config, "is_decoder", False):
        return "that is a decoder (is_decoder in config.json): only encoders are taken"
    if (width := getattr(config, "embedding_size", config.hidden_size)) != config.hidden_size:
        return (
            f"whose embeddings have {width} numbers and whose layers have {config.hidden_size}: the two must be equal, "
            "because a projection behind the LayerNorm of the embeddings cannot be folded into them"
        )
    if getattr(config, "quantization_config", None) is not None:
        return "with quantization_config in config.json: only weights in floating point are taken"
    if config.pad_token_id is None:
        return "without pad_token_id in config.json"
    if not 0 <= config.pad_token_id < config.vocab_size:
        return f"with pad_token_id {config.pad_token_id}, which is no token of its vocabulary of {config.vocab_size}"
    if not 1 <= config.num_hidden_layers <= MOST_LAYERS:
        return f"with {config.num_hidden_layers} layers: 1 to {MOST_LAYERS} are taken"
    return None


def _check_dtypes(folder: Path) -> None:
    """Refuse safetensors files with weights in integers, which transformers would take as they are. Raises DataError."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                dtype = opened.get_slice(name).get_dtype()
                if dtype not in FLOATS and not name.endswith("_ids"):
                    raise DataError(f"{path} has weights of type {dtype} in {name}: only {', '.join(FLOATS)} are taken")


def load_original(folder: Path, config: BaseConfig) -> OriginalEncoder:
    """Load the model of `folder` in our layer form, which runs packed batches. Raises DataError if weights are missing."""
    # transformers would report a pooler that we do not load, and draw a bar of its own among ours.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    architecture = find_architecture(config.architecture)
    options = {"add_pooling_layer": False} if architecture.has_pooler else {}
    weights = next(folder / name for name in WEIGHTS if (folder / name).is_file())
    with _reading(weights):
        _check_dtypes(folder)
        source, loaded = AutoModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **LOCAL, **options
        )
    if missing := sorted(loaded["missing_keys"]):
        # transformers would give them random numbers.
        raise DataError(f"the weights in {folder} lack {len(missing)} parts of the model, such as {missing[0]}")
    if other := sorted(str(name) for name, *_ in loaded["mismatched_keys"]):
        # transformers gave them random numbers.
        raise DataError(f"the weights in {folder} have another shape than config.json says, such as {other[0]}")
    state = source.state_dict()
    for name, tensor in state.items():
        if not tensor.isfinite().all():
            raise DataError(
                f"the weights in {folder} have NaN or infinite numbers in {name}: take a checkpoint without them"
            )
    layer_key = re.compile(rf"{re.escape(architecture.layers)}\.(\d+)\.")
    num_layers = 1 + max(int(match.group(1)) for key in state if (match := layer_key.match(key)))
    encoder = OriginalEncoder(config, num_layers)
    ours = {name: state[key] for name, key in architecture.embeddings.items()}
    first = architecture.first_row(config.pad_id)
    ours["position_embeddings.weight"] = ours["position_embeddings.weight"][first : first + config.max_tokens]
    ours["token_types"] = torch.zeros(TOKEN_TYPES, config.hidden_size)
    if architecture.token_types is not None:
        # A model with one token type gives the row to both texts.
        rows = state[architecture.token_types][:TOKEN_TYPES]
        ours["token_types"] = rows.expand(TOKEN_TYPES, -1)
    if architecture.relative_bias is not None:
        ours["relative.scores.weight"] = state[architecture.relative_bias]
    for index in range(num_layers):
        layer = f"{architecture.layers}.{index}."
        for which in ("weight", "bias"):
            ours[f"layers.{index}.qkv.{which}"] = torch.cat(
                [state[f"{layer}{key}.{which}"] for key in architecture.qkv]
            )
            for name, key in architecture.layer_parts.items():
                ours[f"layers.{index}.{name}.{which}"] = state[f"{layer}{key}.{which}"]
    encoder.load_state_dict(ours)
    return encoder.eval()
