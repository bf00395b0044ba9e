"""A small hub on 127.0.0.1: repositories held in memory, faults on request, and every request written down.

It speaks what `huggingface_hub` asks of a real one: the commit of a revision, the paged list of files, HEAD and GET of
a file with ETag, size and commit, ranges, large files handed over to another host ("cdn", a second port), moved, gated
and private repositories.

    with Hub() as hub:
        commit = hub.add("owner/name", {"config.json": b"{}", "model.safetensors": b"..."})
        hub.point_client_at_it(folder, monkeypatch)   # or start a process with os.environ | hub.environment(folder)
        ...
        hub.fetched()                                 # the names of the files whose bytes were asked for
"""

import hashlib
import json
import random
import re
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

CHUNK = 1024  # bytes that a client of ours reads at a time, and resumes by; in earnest 10 MB
LARGE = (".safetensors", ".gguf", ".bin", ".pth", ".onnx", ".h5", ".msgpack")  # what a repository keeps in LFS


def content(seed: str, size: int = 20 * CHUNK) -> bytes:
    """Bytes that no two seeds share."""
    return random.Random(seed).randbytes(size)


NEEDED = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja"),
    *("chat_template.json", "additional_chat_templates/tool use.jinja"),
)
SMALL = {name: content(name, 50) for name in NEEDED}
WEIGHTS = {"model.safetensors": content("weights")}
SHARDS = {f"model-0000{i}-of-00002.safetensors": content(f"shard {i}") for i in (1, 2)}
INDEX = "model.safetensors.index.json"
SHARDED = SHARDS | {INDEX: json.dumps({"weight_map": dict(zip("abc", [*SHARDS, *SHARDS][:3], strict=True))}).encode()}
GGUF = {f"tiny.{kind}.gguf": content(kind) for kind in ("Q4_0", "Q4_K_M", "Q8_0")}
# What repositories hold besides, and nobody asked for.
UNNEEDED = (
    *("README.md", ".gitattributes", "consolidated.safetensors", "adapter_model.safetensors", "tf_model.h5"),
    *("original/consolidated.00.pth", "original/tokenizer.model", "onnx/model.onnx", "flax_model.msgpack"),
    *("model-00003-of-00003.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    *("additional_chat_templates/deep/er.jinja.txt", "sub/model.safetensors", "training_args.bin"),
)
OTHER = dict.fromkeys(UNNEEDED, b"not needed")


@dataclass(frozen=True)
class Request:
    """What was asked, and how many bytes of which file were sent for it."""

    method: str
    path: str
    start: int | None  # of the Range header
    token: str | None
    file: str | None
    sent: int


@dataclass
class Answer(Exception):
    """What is sent back; raised where a request is refused."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: str | None = None  # set if the body is bytes of a file

    @classmethod
    def error(cls, status: int, body: bytes = b"", **headers: str) -> Self:
        """With headers as the hub sends them: X-Error-Code, X-Error-Message."""
        return cls(status, {f"X-Error-{name}": value for name, value in headers.items()}, body)


@dataclass
class Hub:
    """The repositories, the faults (attributes that a test sets) and the log."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)  # name, commit, file
    refs: dict[str, dict[str, str]] = field(default_factory=dict)  # name, branch or tag, commit
    moved: dict[str, str] = field(default_factory=dict)  # old name, new name
    token: str = "hf_good"  # opens what is private or gated
    private: set[str] = field(default_factory=set)
    gated: set[str] = field(default_factory=set)
    answers: dict[str, Answer] = field(default_factory=dict)  # part of a path: what is answered there instead
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file: after how many bytes each next answer breaks off
    damaged: set[str] = field(default_factory=set)  # files of which every byte arrives changed
    longer: dict[str, int] = field(default_factory=dict)  # file: by how much its announced size is wrong
    stalled: dict[str, threading.Event] = field(default_factory=dict)  # file: nothing after half of it; set when there
    page: int = 1000  # files in one page of the list
    log: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.closing = threading.Event()
        self.servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self})) for _ in "ab"
        ]
        for server in self.servers:
            server.daemon_threads, server.block_on_close = True, False  # a client keeps its connection open
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        hosts = zip(("127.0.0.1", "localhost"), self.servers, strict=True)  # two names: another host to the client
        self.url, self.cdn = (f"http://{host}:{server.server_port}" for host, server in hosts)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """From here on nobody can connect."""
        self.closing.set()
        while self.servers:
            server = self.servers.pop()
            server.shutdown()
            server.server_close()
        close_session()

    def add(self, name: str, files: dict[str, bytes], *refs: str) -> str:
        """A commit with these files, under `refs` (main if none is given); returns its hash."""
        parts = [name.encode(), *(part for file in sorted(files) for part in (file.encode(), files[file]))]
        commit = hashlib.sha1(b"\0".join(parts)).hexdigest()
        self.repos.setdefault(name, {})[commit] = files
        self.refs.setdefault(name, {}).update(dict.fromkeys(refs or ("main",), commit))
        return commit

    def fetched(self) -> list[str]:
        """The files whose bytes were asked for, sorted, each as often as it was asked for."""
        return sorted(request.file for request in self.log if request.method == "GET" and request.file is not None)

    def sent(self) -> int:
        """How many bytes of files went out."""
        return sum(request.sent for request in self.log if request.file is not None)

    def environment(self, folder: Path) -> dict[str, str]:
        """What another process must find in its environment to ask this hub, with its cache in `folder`."""
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(folder), "HF_HUB_CACHE": str(folder / "hub")}
        settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}
        return settings | {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "", "NO_PROXY": "127.0.0.1,localhost"}

    def point_client_at_it(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the client in this process ask this hub (it read its environment at import), without pauses."""
        settings = {
            "ENDPOINT": self.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": self.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_TOKEN_PATH": str(folder / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
            "DOWNLOAD_CHUNK_SIZE": CHUNK,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        close_session()  # connections of an earlier hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for the client to acknowledge its headers

    def log_message(self, format: str, *args: Any) -> None:
        """Stays quiet: the tests read what the client prints."""

    def do_HEAD(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.start = int(asked[1]) if asked else None
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        try:
            answer = self.route(unquote(urlsplit(self.path).path))
        except Answer as refusal:
            answer = refusal
        body = self.body(answer)
        # Written down first: the client is done before this thread is.
        self.hub.log.append(Request(self.command, self.path, self.start, self.token, answer.file, len(body)))
        with suppress(OSError):  # the client has gone
            self.reply(answer, body)

    do_GET = do_HEAD

    def reply(self, answer: Answer, body: bytes) -> None:
        self.send_response(answer.status)
        for name, value in ({"Content-Length": str(len(answer.body))} | answer.headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if answer.file in self.hub.stalled:
            self.hub.stalled[answer.file].set()
            self.hub.closing.wait(60)
        if self.command == "GET" and len(body) < len(answer.body):
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def body(self, answer: Answer) -> bytes:
        """What is sent of it: all, or the part that a fault lets through."""
        if self.command == "HEAD":
            return b""
        if answer.file in self.hub.stalled:
            return answer.body[: len(answer.body) // 2]
        cuts = self.hub.cuts.get(answer.file or "")
        return answer.body[: cuts.pop(0)] if cuts else answer.body

    def route(self, path: str) -> Answer:
        """/api/models/NAME[/revision/REV], /api/models/NAME/tree/REV, /NAME/resolve/REV/FILE or /cdn/NAME/REV/FILE."""
        for part, answer in self.hub.answers.items():
            if part in path:
                return answer
        if match := re.fullmatch(r"/cdn/(.+)/([0-9a-f]{40})/(.+)", path):
            return self.file(*match.groups())
        if match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            name, revision, file = match.groups()
            return self.resolve(name, self.commit(name, revision), file)
        if match := re.fullmatch(r"/api/models/(.+?)(?:/(revision|tree)/(.+))?", path):
            name, kind, revision = match.groups()
            commit = self.commit(name, revision or "main")
            return self.tree(name, commit) if kind == "tree" else self.info(name, commit)
        return Answer(404)

    def commit(self, name: str, revision: str) -> str:
        """The commit of a revision, if this client may see it."""
        hub = self.hub
        if name in hub.moved:
            raise Answer(307, {"Location": self.path.replace(name, hub.moved[name])})
        if self.token not in (None, hub.token):
            raise Answer.error(401, Message="Invalid credentials in Authorization header")
        if name not in hub.repos or (name in hub.private and self.token is None):
            # A guest is not told whether a private repository exists.
            raise Answer.error(404 if self.token else 401, b"Not here,\nor not for you.", Code="RepoNotFound")
        commit = hub.refs[name].get(revision, revision)
        if commit not in hub.repos[name]:
            raise Answer.error(404, Code="RevisionNotFound", Message=f"Invalid rev id: {revision}")
        return commit

    def info(self, name: str, commit: str) -> Answer:
        siblings = [{"rfilename": file} for file in self.hub.repos[name][commit]]
        info = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": [], "siblings": siblings}
        return Answer(200, body=json.dumps(info).encode())

    def tree(self, name: str, commit: str) -> Answer:
        """One page of the list of files, with a link to the next one."""
        url = urlsplit(self.path)
        start = int(parse_qs(url.query).get("cursor", ["0"])[0])
        entries = [_entry(file, data) for file, data in sorted(self.hub.repos[name][commit].items())]
        end = start + self.hub.page
        link = {"Link": f'<{self.hub.url}{url.path}?recursive=true&cursor={end}>; rel="next"'}
        return Answer(200, link if end < len(entries) else {}, json.dumps(entries[start:end]).encode())

    def resolve(self, name: str, commit: str, file: str) -> Answer:
        """A small file itself, or the size and sha256 of a large one and where the other host has it."""
        if name in self.hub.gated and self.token is None:
            return Answer.error(401, Code="GatedRepo", Message="Access is restricted")
        files = self.hub.repos[name][commit]
        if file not in files:
            return Answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        if not file.endswith(LARGE):
            return self.file(name, commit, file)
        size, digest = len(files[file]) + self.hub.longer.get(file, 0), hashlib.sha256(files[file]).hexdigest()
        linked = {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{digest}"', "X-Repo-Commit": commit}
        return Answer(302, {"Location": f"{self.hub.cdn}/cdn/{name}/{commit}/{file}"} | linked)

    def file(self, name: str, commit: str, file: str) -> Answer:
        """The bytes of a file from where the client wants them."""
        whole = self.hub.repos[name][commit][file]
        data = bytes(byte ^ 1 for byte in whole) if file in self.hub.damaged else whole
        headers = {"ETag": f'"{_git_id(whole)}"', "X-Repo-Commit": commit}
        if self.start is None:
            return Answer(200, headers, data, file)
        headers["Content-Range"] = f"bytes {self.start}-{len(whole) - 1}/{len(whole)}"
        return Answer(206, headers, data[self.start :], file)


def _git_id(data: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(file: str, data: bytes) -> dict[str, Any]:
    """A file's line in the list of files."""
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(data), "oid": _git_id(data)}
    if file.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
