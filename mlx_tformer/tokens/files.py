"""A tokenizer from the files of a checkpoint, checked before and after the `tokenizers` package reads them.

The rules are those of transformers 5: the post-processor of tokenizer.json alone decides which tokens go around a text
(`add_bos_token` counts only where there is no tokenizer.json), tokens that the config names are special, and those that
tokenizer.json lacks are added.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import BadInput, MlxTformerError
from .sentencepiece import Cut, read_pieces

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"
OTHERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model", "tekken.json", "vocab.txt")
"""Vocabularies that only other programs read."""
SOURCE = "source.spm"
KNOWN = (JSON, CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", SOURCE, *OTHERS)
LFS = b"version https://git-lfs.github.com/spec"
GROWTH = 64
"""How many times longer a tokenizer's normalizer may make a text. Those in use make it at most three times as long."""
SPARE = 100_000
"""Ids that a vocabulary may leave out."""
GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
GPT2_MODELS = ("gpt2", "gpt_neo", "gptj", "opt")

_STDERR = threading.RLock()  # a copy of a tokenizer is made while another one is at work


@dataclass
class Loaded:
    """What the files say: the `tokenizers` object, the tokens that have names, and the chat templates."""

    backend: "Backend"
    size: int
    """The highest id, plus one."""
    where: str
    """What errors name."""
    names: dict[str, str]
    """`bos_token` and its like -> the token."""
    copy: "Callable[[], Backend]"
    """Makes another such object."""
    templates: dict[str, str] = field(default_factory=dict)
    template_file: str = CONFIG
    clean_up: bool = False


def read_folder(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files of a folder, by name. Raises BadInput for one that is no plain file."""
    paths = [folder / name for name in (*KNOWN, "config.json", "chat_template.jinja", "chat_template.json")]
    paths += sorted((folder / "chat_templates").glob("*.jinja"))
    found = {}
    for path in paths:
        if path.is_symlink() or path.exists():
            if not path.is_file():
                raise BadInput("is not a regular file", file=path)
            # Of a vocabulary that is not read only the presence counts.
            found[path.relative_to(folder).as_posix()] = b"" if path.name in OTHERS else path.read_bytes()
    return found


def load(files: Mapping[str, bytes], origin: str) -> Loaded | None:
    """The tokenizer that `files` (name -> content) hold; None if there is none. `origin` is named in errors.

    Raises BadInput for files that are broken, or of a kind that is not read.
    """
    present = [name for name in KNOWN if name in files]
    if not present:
        return None
    reader = _Reader(files, origin)
    backend, names = reader.made(present)
    clean_up = reader.config.get("clean_up_tokenization_spaces") is True and type(backend.model).__name__ != "BPE"
    templates, template_file = reader.templates()
    return Loaded(
        backend,
        reader.size(backend),
        reader.where(JSON),
        names,
        lambda: reader.made(present)[0],
        templates,
        reader.where(template_file),
        clean_up,
    )


class _Reader:
    """The files of one tokenizer."""

    def __init__(self, files: Mapping[str, bytes], origin: str):
        self.files = files
        self.origin = origin
        for name in KNOWN:
            if files.get(name, b"").startswith(LFS):
                raise BadInput("Git LFS pointer; fetch the file itself with `git lfs pull`", file=self.where(name))
        self.config = self.object(CONFIG)
        # Since version 4.34 transformers writes everything into the one config; older folders spread it.
        if "added_tokens_decoder" not in self.config:
            self.config |= self.object("special_tokens_map.json")

    def made(self, present: Sequence[str]) -> "tuple[Backend, dict[str, str]]":
        """The `tokenizers` object, and the tokens that have names."""
        if JSON in self.files:
            backend = self.tokenizer_json()
        elif "vocab.json" in self.files and "merges.txt" in self.files:
            backend = self.gpt2()
        elif "vocab.json" in self.files and SOURCE in self.files:
            backend = self.marian()
        else:
            problem = f"not found, beside {', '.join(present)}; transformers' save_pretrained writes one"
            raise BadInput(problem, file=self.where(JSON))
        self.check(backend)
        names = self.name_tokens(backend)
        if JSON not in self.files:
            self.surround(backend, names)
        return backend, names

    def where(self, name: str) -> str:
        """A file's name for an error."""
        return str(Path(self.origin) / name)

    def object(self, name: str) -> dict[str, Any]:
        """A file that holds a JSON object; empty if there is no such file."""
        if name not in self.files:
            return {}
        try:
            value = json.loads(self.files[name])
        except (ValueError, RecursionError) as error:
            raise BadInput(f"not JSON: {error}", file=self.where(name)) from None
        if not isinstance(value, dict):
            raise BadInput(f"found a {type(value).__name__}, expected an object", file=self.where(name))
        return value

    def ids(self, name: str) -> dict[str, int]:
        """A file that holds a JSON object of tokens and ids; empty if there is no such file."""
        found = self.object(name)
        wrong = next((index for index in found.values() if not isinstance(index, int) or not 0 <= index < 2**31), None)
        if wrong is not None:
            raise BadInput(f"found {wrong!r}, expected an id", file=self.where(name))
        return found

    def text(self, name: str) -> str:
        """A file that holds text."""
        try:
            return self.files[name].decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadInput(f"not UTF-8 at byte {error.start}", file=self.where(name)) from None

    def tokenizer_json(self) -> "Backend":
        """The tokenizer of tokenizer.json."""
        from tokenizers import Tokenizer as Backend

        raw = self.files[JSON]
        self._check_merges(raw)
        with understood(self.where(JSON), quiet=True):
            return Backend.from_buffer(raw)

    def _check_merges(self, raw: bytes) -> None:
        """Refuse merges that lack the prefix of inner tokens: the package cuts it off unseen, and ends the process.

        Hardly any file has such a prefix, so most are not parsed here; one that hides the key by escapes is.
        """
        if not re.search(rb'"continuing_subword_prefix"\s*:\s*"[^"]|\\u00[2-7]', raw):
            return
        try:
            model = json.loads(raw, object_pairs_hook=_once).get("model", {})
            prefix, merges = model.get("continuing_subword_prefix") or "", model.get("merges") or []
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
            wrong = [pair for pair in pairs if not (prefix.isascii() and pair[-1].startswith(prefix))]
        except (ValueError, RecursionError, AttributeError, TypeError, LookupError) as error:
            raise BadInput(f"not a tokenizer: {error}", file=self.where(JSON)) from None
        if wrong:
            problem = f"found {wrong[0]!r}, expected a second part that starts with {prefix!r}"
            raise BadInput(problem, file=self.where(JSON), field="model.merges")

    def gpt2(self) -> "Backend":
        """The tokenizer of vocab.json and merges.txt, as GPT-2's folders have them: byte-level BPE."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        kind, model = self.config.get("tokenizer_class"), self.object("config.json").get("model_type")
        if (kind not in GPT2) if kind is not None else (model is not None and model not in GPT2_MODELS):
            problem = f"not found, and vocab.json with merges.txt is read only as GPT-2's, not for {kind or model}"
            raise BadInput(problem, file=self.where(JSON))
        merges = list(self._merges())
        vocab = self.ids("vocab.json")
        with understood(self.where("merges.txt"), quiet=True):
            backend = Backend(models.BPE(vocab=vocab, merges=merges))
        space = self.config.get("add_prefix_space") is True
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
        backend.decoder = decoders.ByteLevel()
        for name in ("bos_token", "eos_token", "unk_token"):
            if "<|endoftext|>" in vocab:
                self.config.setdefault(name, "<|endoftext|>")
        return backend

    def marian(self) -> "Backend":
        """The tokenizer of Marian's folders: source.spm cuts a text, and vocab.json has the ids of its pieces."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        if self.config.get("separate_vocabs") is True:
            problem = "found true, and a source and a text with ids of their own are not read"
            raise BadInput(problem, file=self.where(CONFIG), field="separate_vocabs")
        pieces, vocab = read_pieces(self.files[SOURCE], self.where(SOURCE)), self.ids("vocab.json")
        for name, token in {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}.items():
            self.config.setdefault(name, token)
        self.config.setdefault("add_eos_token", True)
        unknown = _content(self.config["unk_token"])
        if unknown not in vocab:
            raise BadInput(f"found no {unknown!r}, which stands for unknown pieces", file=self.where("vocab.json"))
        with understood(self.where(SOURCE), quiet=True):
            backend = Backend(models.WordLevel(vocab, unk_token=unknown))
            backend.normalizer = pieces.normalizer()
            backend.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Cut(pieces.cutter()))
        backend.decoder = decoders.Metaspace()
        # What a text begins with where a model writes several languages: ">>fra<<".
        codes = [token for token in vocab if token.startswith(">>") and token.endswith("<<")]
        backend.add_tokens([AddedToken(code, normalized=False) for code in codes])
        return backend

    def _merges(self) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(self.text("merges.txt").split("\n"), 1):
            if (pair := line.rstrip("\r")) and not pair.startswith("#version"):
                first, space, second = pair.partition(" ")
                if not space or " " in second:
                    raise BadInput(f"line {number}: expected two tokens", file=self.where("merges.txt"))
                yield first, second

    def size(self, backend: "Backend") -> int:
        """The highest id, plus one; refused if far beyond what the tokens need: the package makes lists of ids."""
        ids = backend.get_vocab(with_added_tokens=True).values()
        highest = max(ids, default=-1)
        if highest > 4 * len(ids) + SPARE:
            raise BadInput(f"found id {highest} in a vocabulary of {len(ids)} tokens", file=self.where(JSON))
        return highest + 1

    def surround(self, backend: "Backend", names: Mapping[str, str]) -> None:
        """Put the tokens around a text that the config asks for, where no tokenizer.json says so."""
        from tokenizers import processors

        around = {
            side: names[f"{side}_token"]
            for side in ("bos", "eos")
            if self.config.get(f"add_{side}_token") is True and f"{side}_token" in names
        }
        if around:
            single = [
                *([around["bos"]] if "bos" in around else []),
                "$A",
                *([around["eos"]] if "eos" in around else []),
            ]
            ids = [(token, backend.token_to_id(token)) for token in around.values()]
            backend.post_processor = processors.TemplateProcessing(single=single, pair=None, special_tokens=ids)

    def name_tokens(self, backend: "Backend") -> dict[str, str]:
        """Make the tokens that the config names special, adding those that are missing; the names and the tokens."""
        names = {
            key: _content(value) for key, value in self.config.items() if key.endswith("_token") and _content(value)
        }
        extra = self.config.get("extra_special_tokens") or self.config.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            names |= {key: _content(value) for key, value in extra.items() if _content(value)}
            extra = []
        if not isinstance(extra, list):
            problem = f"found a {type(extra).__name__}, expected a list of tokens"
            raise BadInput(problem, file=self.where(CONFIG), field="extra_special_tokens")
        backend.add_tokens(self._described())
        special = dict.fromkeys([*names.values(), *filter(None, map(_content, extra))])
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        backend.add_tokens([_special(known.get(text), text) for text in special])
        return names

    def _described(self) -> "list[AddedToken]":
        """The tokens that tokenizer_config.json, or added_tokens.json, describes, in the order of their ids."""
        from tokenizers import AddedToken

        if "added_tokens_decoder" not in self.config:
            added = self.ids("added_tokens.json") if JSON not in self.files else {}
            return [AddedToken(text) for text in sorted(added, key=added.__getitem__)]
        table = self.config["added_tokens_decoder"]
        try:
            flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
            rows = sorted(table.items(), key=lambda item: int(item[0]))
            return [AddedToken(row["content"], **{k: row[k] for k in flags if k in row}) for _, row in rows]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            problem = f"expected ids and tokens ({type(error).__name__}: {error})"
            raise BadInput(problem, file=self.where(CONFIG), field="added_tokens_decoder") from None

    def templates(self) -> tuple[dict[str, str], str]:
        """The chat templates by name, and the file that they came from; files of their own count before the config."""
        own = {Path(name).stem: name for name in self.files if re.fullmatch(r"chat_templates/[^/]+\.jinja", name)}
        if "chat_template.jinja" in self.files:
            own["default"] = "chat_template.jinja"
        if own:
            return {name: self.text(file) for name, file in own.items()}, own.get("default", "chat_templates")
        for file in (CONFIG, "chat_template.json"):
            value = (self.config if file == CONFIG else self.object(file)).get("chat_template")
            if value is not None:
                return self._named_templates(value, file), file
        return {}, CONFIG

    def _named_templates(self, value: Any, file: str) -> dict[str, str]:
        if isinstance(value, str):
            return {"default": value}
        if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            return value
        try:
            found = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError):
            found = {"": None}
        if not all(isinstance(text, str) for text in (*found, *found.values())):
            problem = "expected a template, or a list of {name, template}"
            raise BadInput(problem, file=self.where(file), field="chat_template")
        return found

    def check(self, backend: "Backend") -> None:
        """Refuse a tokenizer that cannot encode, or that would make endless texts; and never pad or cut."""
        backend.no_padding()
        backend.no_truncation()
        if backend.normalizer is not None and _growth(json.loads(backend.normalizer.__getstate__())) > GROWTH:
            problem = f"makes texts more than {GROWTH} times longer"
            raise BadInput(problem, file=self.where(JSON), field="normalizer")
        with understood(self.where(JSON), quiet=True):
            around = backend.encode("").ids
        largest = max(around, default=0)
        if around and backend.id_to_token(largest) is None:
            problem = f"found id {largest}, which has no token"
            raise BadInput(problem, file=self.where(JSON), field="post_processor")


def _content(value: Any) -> str:
    """The text of a token that a config writes as a string or as {"content": ...}; empty for anything else."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _special(token: "AddedToken | None", text: str) -> "AddedToken":
    """The token as a special one, with its other flags as they were."""
    from tokenizers import AddedToken

    if token is None:
        return AddedToken(text, special=True, normalized=False)
    return AddedToken(
        text,
        special=True,
        normalized=token.normalized,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused if it has a key twice: readers differ in which of the two they take."""
    if len(dict(pairs)) != len(pairs):
        raise ValueError("an object has a key twice")
    return dict(pairs)


def _growth(state: Any) -> int:
    """How many times longer a normalizer may make a text: the replacements' lengths, multiplied."""
    if isinstance(state, dict):
        factor = 1
        for value in state.values():
            factor *= _growth(value)
        texts = (state.get("content"), state.get("prepend"))
        return factor * max(1, *(len(text) for text in texts if isinstance(text, str)), 1)
    if isinstance(state, list):
        factor = 1
        for value in state:
            factor *= _growth(value)
        return factor
    return 1


@contextmanager
def understood(where: str, *, quiet: bool = False) -> Iterator[None]:
    """Turn what the `tokenizers` package throws at a broken file into BadInput.

    A Rust panic arrives as an exception that is no `Exception`, after a report on the process's standard error, past
    `sys.stderr`. With `quiet` that report is held back; whatever else was written meanwhile is passed on.
    """
    try:
        with _report_held_back() if quiet else nullcontext():
            yield
    except BaseException as error:
        if isinstance(error, MlxTformerError) or not (isinstance(error, Exception) or _is_panic(error)):
            raise
        text = " ".join(str(error).split())[:300]
        raise BadInput(f"not a sound tokenizer: {text}", file=where) from None


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


@contextmanager
def _report_held_back() -> Iterator[None]:
    import tempfile

    with _STDERR, tempfile.TemporaryFile() as kept:
        try:
            saved = os.dup(2)
        except OSError:  # there is no standard error
            yield
            return
        panicked = False
        try:
            os.dup2(kept.fileno(), 2)
            yield
        except BaseException as error:
            panicked = _is_panic(error)
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            kept.seek(0)
            if not panicked and (others := kept.read()):
                os.write(2, others)
