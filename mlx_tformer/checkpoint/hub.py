"""Models from the Hugging Face hub: which files a model needs, fetched into the hub's own cache.

`huggingface_hub` does the work (cache, login, mirrors by HF_ENDPOINT, HF_HUB_OFFLINE, retries that resume where the
connection broke); this module decides what to ask for and says in one line why something could not be had.

A name is `NAME` or `OWNER/NAME`. One file out of a repository of .gguf files is chosen with `OWNER/NAME:FILE`, where
FILE is a file's name or any part that only one of them has (`OWNER/NAME:Q4_K_M`), or with `OWNER/NAME/FILE.gguf`.

The number of requests is small: two find the commit and the list of files (kept in the cache), each file costs two more
(its size and checksum, then its bytes). What is cached already costs one request, or none if `revision` is a commit or
the hub cannot be reached.
"""

import hashlib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import sentences
from ..errors import BadInput, InputOutputError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLE_INDEX = "pytorch_model.bin.index.json"
PICKLE = "pytorch_model.bin"
# What a tokenizer, a chat template and a folder of our own consist of, beside the weights.
SMALL = (
    *(CONFIG, "generation_config.json", "conversion.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *(
        "vocab.json",
        "merges.txt",
        "vocab.txt",
        "tokenizer.model",
        "source.spm",
        "target.spm",
        "chat_template.jinja",
        "chat_template.json",
    ),
    *("preprocessor_config.json", *sentences.FILES),
)
TEMPLATES = "additional_chat_templates"
# Tensors under other names than config.json's: the original release of a model, and adapters that need a base model.
NOT_MODELS = ("consolidated", "adapter_")
UNREAD = (".bin", ".safetensors", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".ckpt")
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"
BAR_FROM = 2**20  # bytes; a bar for each of ten files that come in a blink is noise


@dataclass(frozen=True)
class Snapshot:
    """What `fetch` found: one commit of a repository on this disk.

    path: the folder with the files, or the one .gguf file.
    repo: the repository's name, without the file that was chosen in it.
    revision: the commit, 40 hexadecimal digits, whatever name it was asked for by.
    weights: the size in bytes of each weight file, also of those that were left on the hub by `config_only`.
    """

    path: Path
    repo: str
    revision: str
    weights: dict[str, int]


@dataclass(frozen=True)
class _Repo:
    name: str
    folder: Path  # the commit's folder in the cache, named by the commit
    files: dict[str, int]  # all files of that commit and their sizes in bytes
    bars: bool


def is_hub_id(text: str) -> bool:
    """Whether `text` can name something on the hub, by the hub's own rules; no file or network is looked at.

    >>> [is_hub_id(text) for text in ("gpt2", "owner/name", "owner/name:Q8_0", "owner/name/model.gguf")]
    [True, True, True, True]
    >>> [is_hub_id(text) for text in ("./gpt2", "/models/gpt2", "a/b/c", "owner/name:", "owner/..", "C:/models")]
    [False, False, False, False, False, False]
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    repo, file = _split(text)
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    # Not all versions of the client refuse letters beyond ASCII and a line end.
    return repo.isascii() and _inside(repo) and (file is None or _inside(file))


def fetch(repo: str, *, revision: str | None = None, config_only: bool = False, progress: bool = True) -> Snapshot:
    """Brings the files that a model needs into the hub's cache and says where they are.

    These are config, tokenizer and chat template, and the weights: the shards that `model.safetensors.index.json`
    names, else `model.safetensors`, else the only other .safetensors file, else `pytorch_model.bin` or the shards of
    its index, else the only .gguf file or the one that was chosen. Large files are held against the hub's sha256
    when they arrive.

    repo: `NAME`, `OWNER/NAME`, `OWNER/NAME:FILE` or `OWNER/NAME/FILE.gguf`, see the top of this module.
    revision: a branch, tag or commit; the default branch if None.
    config_only: leave the weights on the hub and only say how large they are.
    progress: a bar on stderr for each file that takes time; never where stderr is no terminal.

    Raises BadInput for a repository without readable weights or with a choice to make, and InputOutputError for what
    hub, network or disk refuse: no such repository or revision, no access, offline and not cached, disk full.
    """
    if not is_hub_id(repo):
        raise BadInput(f"{repo!r} cannot be a hub repository, expected NAME, OWNER/NAME or OWNER/NAME:FILE.gguf")
    name, asked = _split(repo)
    source = _look_up(name, revision, bars=progress)
    weights = [] if asked is not None else _safetensors(source) or _pickles(source)
    if weights or (config_only and asked is None and CONFIG in source.files):
        path, small = source.folder, _small(source)
    else:
        weights = [_gguf(source, asked)]
        path, small = source.folder / weights[0], []
        if config_only and not path.exists():
            size, command = _size(source.files[weights[0]]), f"`hf download {name} {weights[0]}`"
            raise BadInput(f"the config is inside this file of {size}: fetch it first, {command}", file=repo)
    for file in small if config_only else [*small, *weights]:
        _download(source, file)
    return Snapshot(path, name, source.folder.name, {file: source.files[file] for file in weights})


def _split(text: str) -> tuple[str, str | None]:
    """The repository, and which of its .gguf files is wanted, None if that is not said."""
    repo, colon, file = text.partition(":")
    if colon:
        return repo, file
    owner, *rest = text.split("/", 2)
    if len(rest) == 2 and text.lower().endswith(".gguf"):
        return f"{owner}/{rest[0]}", rest[1]
    return text, None


def _inside(name: str) -> bool:
    """Whether a file of that name lies inside its folder and can be shown in a message."""
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(name.split("/"))


def _look_up(name: str, revision: str | None, bars: bool) -> _Repo:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    with _plainly(name, f"revision {revision or 'main'}"):
        # No pattern, no file: this finds the commit and its list of files, in the cache if the hub is out of reach.
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[], tqdm_class=_silent()))
        try:
            files = {file.path: file.size for file in get_cached_repo_tree(name, revision=folder.name)}
        except CachedRepoTreeNotFoundError:
            if not folder.exists():
                raise
            # A cache that an older huggingface_hub filled, and no network: what is there is what there is.
            found = [path for path in folder.rglob("*") if path.is_file()]
            files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
    return _Repo(name, folder, {file: size for file, size in files.items() if _inside(file)}, bars)


def _small(repo: _Repo) -> list[str]:
    """Config, tokenizer and chat template files; without a config no weights are fetched either."""
    if CONFIG not in repo.files:
        raise BadInput(f"{CONFIG} is missing, expected beside the weights", file=repo.name)
    templates = [name for name in repo.files if name.startswith(f"{TEMPLATES}/") and name.endswith(".jinja")]
    return [name for name in SMALL if name in repo.files] + sorted(templates)


def _safetensors(repo: _Repo) -> list[str]:
    """The names of the model's safetensors files, none if it has no such weights."""
    if INDEX in repo.files:
        return _shards(repo, INDEX)
    if SINGLE in repo.files:
        return [SINGLE]
    loose = [name for name in repo.files if name.endswith(".safetensors") and "/" not in name]
    loose = sorted(name for name in loose if not name.startswith(NOT_MODELS))
    if len(loose) > 1:
        raise BadInput(f"found {_some(loose)} without {INDEX}, expected one file or an index", file=repo.name)
    return loose


def _pickles(repo: _Repo) -> list[str]:
    """The names of PyTorch's files, for a model that has no others."""
    if PICKLE_INDEX in repo.files:
        return _shards(repo, PICKLE_INDEX)
    return [PICKLE] if PICKLE in repo.files else []


def _shards(repo: _Repo, index: str) -> list[str]:
    """The files that an index names: bare names of files that the repository holds, or it is refused."""
    where, suffix = f"{repo.name}/{index}", Path(index.removesuffix(".index.json")).suffix
    try:
        shards = list(dict.fromkeys(json.loads(_download(repo, index).read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInput("cannot be read, expected the file of each tensor", file=where, field="weight_map") from None
    for shard in shards:
        if not (isinstance(shard, str) and _inside(shard) and "/" not in shard and shard.endswith(suffix)):
            raise BadInput(f"found {shard!r}, expected a bare {suffix} file name", file=where, field="weight_map")
    missing = sorted(set(shards) - set(repo.files))
    if missing or not shards:
        found = f"{_some(missing)} are not in the repository" if missing else "names no file"
        raise BadInput(f"{found}, expected all shards of the model", file=where, field="weight_map")
    return sorted(shards)


def _gguf(repo: _Repo, asked: str | None) -> str:
    """The one .gguf file that is meant, or an error that lists what there is to choose from."""
    held = sorted(name for name in repo.files if name.lower().endswith(".gguf"))
    if not held:
        other = _some(sorted(name for name in repo.files if name.endswith(UNREAD))) or "none"
        raise BadInput(f"expected weights in {SINGLE}, in its shards or in .gguf, found {other}", file=repo.name)
    part = (asked or "").lower()
    fits = [name for name in held if name == asked] or [name for name in held if part in name.lower()]
    if len(fits) != 1:
        found = "several .gguf files" if asked is None else f"{len(fits)} .gguf files for {asked!r}"
        listed = ", ".join(f"{name} ({_size(repo.files[name])})" for name in fits or held)
        raise BadInput(f"found {found}, choose one as {repo.name}:FILE out of {listed}", file=repo.name)
    return fits[0]


def _download(repo: _Repo, file: str) -> Path:
    """One file of the commit, from the cache or the hub; in this thread, so that Ctrl-C ends it at once."""
    from huggingface_hub import hf_hub_download

    path = repo.folder / file
    if path.exists():
        return path
    # The client's own bars are shown on a terminal only.
    quiet = None if repo.bars and repo.files[file] >= BAR_FROM else _silent()
    with _plainly(repo.name, f"{file} ({_size(repo.files[file])})"):
        path = Path(hf_hub_download(repo.name, file, revision=repo.folder.name, tqdm_class=quiet))
        _verify(path, f"{repo.name}/{file}")
    return path


def _verify(path: Path, shown: str) -> None:
    """The cache calls each large file by the sha256 that the hub gave; the client itself compares only the length."""
    expected = path.readlink().name if path.is_symlink() else ""
    if len(expected) != 64:
        return
    with path.open("rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != expected:
        path.resolve().unlink()
        raise InputOutputError(f"{shown}: arrived damaged and was deleted: found sha256 {found}, expected {expected}")


@contextmanager
def _plainly(repo: str, what: str) -> Iterator[None]:
    """Whatever the client raises about `what` becomes one line, and what it prints on the way is not shown."""
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Said before a file is fetched; without this the disk is full when the download has run for an hour.
            warnings.filterwarnings("error", message="Not enough free disk space")
            yield
    except InputOutputError:
        raise
    except Exception as error:  # the client leaks those of its own parts: HTTP, JSON, assertions
        raise InputOutputError(f"{repo}: {_reason(error, repo, what)}") from error
    finally:
        logging.set_verbosity(level)


def _reason(error: Exception, repo: str, what: str) -> str:
    from huggingface_hub import constants, errors

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # not in the cache: why it could not be had from the hub either
    words = str(error)
    if isinstance(error, errors.HfHubHTTPError):
        words = f"{error.response.status_code} {error.response.reason_phrase} {error.server_message or ''}"
    words = _one_line(words) or type(error).__name__
    reasons: list[tuple[type[Exception], str]] = [
        (errors.GatedRepoError, f"its owner grants access on request: ask at {hub}/{repo}, then {LOG_IN}"),
        (errors.RepositoryNotFoundError, f"no such repository at {hub}, or a private one: for that, {LOG_IN}"),
        (errors.RevisionNotFoundError, f"{what} not found, expected a branch, a tag or a commit"),
        (errors.OfflineModeIsEnabled, f"{what} is not in the cache {cache} and HF_HUB_OFFLINE forbids asking for it"),
        (errors.HfHubHTTPError, f"{what} is not in the cache {cache} and {hub} answered {words}"),
        (errors.HTTPError, f"{what} is not in the cache {cache} and the connection to {hub} failed: {words}"),
        (json.JSONDecodeError, f"{hub} does not answer as a hub does, look at HF_ENDPOINT and proxies"),
    ]
    other = f"{what} could not be put into the cache {cache}: {words}"
    return next((reason for kind, reason in reasons if isinstance(error, kind)), other)


def _one_line(text: str) -> str:
    """The first line of the client's or the server's words, without what would upset a terminal."""
    lines = "".join(letter if letter.isprintable() else "\n" for letter in text).split("\n")
    return next((line.strip() for line in lines if line.strip()), "")[:300]


def _silent() -> Any:
    """A progress bar that shows nothing: passed on, since switching them off in the client is for the whole process."""
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


def _size(count: int) -> str:
    """
    >>> [_size(count) for count in (999, 269_060_552, 4_976_698_672)]
    ['999 B', '269.1 MB', '5.0 GB']
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def _some(names: list[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
