"""Fetching from the hub: only what is needed, whole or not at all, and one line about what went wrong.

The hub is `hub_server.Hub` on this machine. Most tests point the client's constants at it; what depends on the
environment (HF_ENDPOINT, HF_HUB_OFFLINE, Ctrl-C) runs in a process of its own.
"""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hub_server import CHUNK, GGUF, INDEX, OTHER, SHARDED, SHARDS, SMALL, WEIGHTS, Answer, Hub
from huggingface_hub import _tree_cache, constants, snapshot_download

from mlx_tformer.checkpoint.hub import Snapshot, fetch, is_hub_id
from mlx_tformer.errors import BadInput, InputOutputError

NAME = "owner/model"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that the client of this process asks, with an empty cache."""
    with Hub() as hub:
        hub.point_client_at_it(tmp_path, monkeypatch)
        yield hub


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(kind: type[Exception], *parts: str, source: str = NAME, **options: Any) -> str:
    """The message of the error that `fetch` must end with: one line with all the parts."""
    with pytest.raises(kind) as caught:
        fetch(source, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert all(part in message for part in parts), message
    return message


@pytest.mark.parametrize("weights", [WEIGHTS, SHARDED, WEIGHTS | SHARDED], ids=["single", "sharded", "both"])
def test_only_what_the_model_needs_is_fetched(hub: Hub, tmp_path: Path, weights: dict[str, bytes]) -> None:
    commit = hub.add(NAME, SMALL | weights | OTHER)
    snapshot = fetch(NAME)
    wanted = SMALL | (SHARDED if INDEX in weights else WEIGHTS)
    sizes = {name: len(data) for name, data in wanted.items() if name.endswith(".safetensors")}
    assert snapshot == Snapshot(snapshot.path, NAME, commit, sizes)
    assert files_in(snapshot.path) == wanted
    assert hub.fetched() == sorted(wanted)
    assert len(hub.log) == 2 + 2 * len(wanted)
    # The reference: the client's own copy of the whole repository.
    whole = files_in(Path(snapshot_download(NAME, cache_dir=tmp_path / "whole")))
    assert whole == SMALL | weights | OTHER
    assert {name: whole[name] for name in wanted} == files_in(snapshot.path)


def test_the_only_safetensors_file_is_taken_whatever_its_name_and_of_several_none(hub: Hub) -> None:
    lone = SMALL | OTHER | {"pruned.safetensors": b"1"}
    del lone["model-00003-of-00003.safetensors"]
    hub.add(NAME, lone)
    assert fetch(NAME).weights == {"pruned.safetensors": 1}
    assert "pruned.safetensors" in hub.fetched()
    hub.add(NAME, lone | {"ema.safetensors": b"2"}, "two")
    hub.log.clear()
    refusal(BadInput, "ema.safetensors, pruned.safetensors", INDEX, revision="two")
    assert hub.fetched() == []


def test_a_list_of_files_in_many_pages_is_read_to_its_end(hub: Hub) -> None:
    hub.page = 7
    hub.add(NAME, SMALL | WEIGHTS | {f"a{i}.txt": b"" for i in range(30)})
    assert files_in(fetch(NAME).path) == SMALL | WEIGHTS


def test_branch_tag_and_commit_give_their_own_files_and_the_commit(hub: Hub) -> None:
    old = hub.add(NAME, SMALL | {"model.safetensors": b"old"}, "v1", "refs/pr/1")
    new = hub.add(NAME, SMALL | {"model.safetensors": b"new!"})
    for revision, commit, data in [
        (None, new, b"new!"),
        ("main", new, b"new!"),
        ("v1", old, b"old"),
        (old, old, b"old"),
    ]:
        snapshot = fetch(NAME, revision=revision)
        assert (snapshot.revision, (snapshot.path / "model.safetensors").read_bytes()) == (commit, data)
    assert fetch(NAME, revision="refs/pr/1").revision == old


def test_a_warm_cache_costs_one_request_and_none_for_a_commit(hub: Hub) -> None:
    commit = hub.add(NAME, SMALL | SHARDED)
    first = fetch(NAME)
    hub.log.clear()
    assert fetch(NAME) == first
    assert [request.path for request in hub.log] == [f"/api/models/{NAME}/revision/main"]
    hub.log.clear()
    assert fetch(NAME, revision=commit) == first
    assert hub.log == []


def test_config_only_leaves_the_weights_and_knows_their_sizes(hub: Hub) -> None:
    hub.add(NAME, SMALL | SHARDED)
    snapshot = fetch(NAME, config_only=True)
    assert snapshot.weights == {name: len(data) for name, data in SHARDS.items()}
    assert hub.fetched() == sorted([*SMALL, INDEX])
    assert fetch(NAME).weights == snapshot.weights
    assert hub.fetched() == sorted(SMALL | SHARDED)


PICKLES = {f"pytorch_model-0000{part}-of-00002.bin": b"x" * part for part in (1, 2)}
PICKLE_INDEX = {"pytorch_model.bin.index.json": json.dumps({"weight_map": dict(enumerate(PICKLES))}).encode()}


@pytest.mark.parametrize("files", [{"pytorch_model.bin": b"xyz"}, PICKLES | PICKLE_INDEX], ids=["one", "shards"])
def test_pickles_are_fetched_where_there_is_nothing_else(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(NAME, SMALL | files | {"training_args.bin": b"", "README.md": b""})
    assert fetch(NAME).weights == {name: len(data) for name, data in files.items() if name.endswith(".bin")}
    assert hub.fetched() == sorted(SMALL | files)
    hub.add("owner/both", SMALL | WEIGHTS | files)
    assert set(fetch("owner/both").weights) == set(WEIGHTS)


UNREADABLE = {"flax_model.msgpack": b"", "original/x.pth": b""}


@pytest.mark.parametrize("files", [SMALL | UNREADABLE, {"tf_model.h5": b""}, {}], ids=["flax", "tensorflow", "none"])
def test_without_weights_that_can_be_read_nothing_is_fetched(hub: Hub, files: dict[str, bytes]) -> None:
    hub.add(NAME, files | {"README.md": b""})
    refusal(BadInput, NAME, "model.safetensors", ".gguf", *(files.keys() - SMALL or ["none"]))
    hub.add(NAME, WEIGHTS)
    refusal(BadInput, NAME, "config.json is missing")
    assert hub.fetched() == []


OUTSIDE = [f"{name}.safetensors" for name in ("../x", "/x", "a/x", "a\\x", "\n")]


@pytest.mark.parametrize("name", [*OUTSIDE, "..", "", "x.bin", 5, None], ids=repr)
def test_an_index_may_only_name_bare_safetensors_files(hub: Hub, name: Any) -> None:
    index = json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": name}}).encode()
    held = {str(name): b"" for name in (*OUTSIDE, "x.bin")}  # that the repository has such a file is no excuse
    hub.add(NAME, SMALL | SHARDS | held | {INDEX: index})
    refusal(BadInput, f"{NAME}/{INDEX}: weight_map: ", f"found {name!r}, expected a bare")
    assert hub.fetched() == [INDEX]


BROKEN = [b" ", b"\xff", b"[" * 100_000, b"[]", b"null", b"{}"]
BROKEN += [b'{"weight_map": %s}' % value for value in (b"[]", b"{}", b'{"a": ["x"]}', b'{"a": {"x": 1}}')]


@pytest.mark.parametrize("index", BROKEN, ids=range(len(BROKEN)))
def test_an_index_that_is_none_is_refused(hub: Hub, index: bytes) -> None:
    hub.add(NAME, SMALL | WEIGHTS | SHARDS | {INDEX: index})
    refusal(BadInput, f"{NAME}/{INDEX}: weight_map: ")
    assert hub.fetched() == [INDEX]


def test_shards_that_the_repository_lacks_are_listed(hub: Hub) -> None:
    held, lost = SHARDS
    hub.add(NAME, SMALL | {INDEX: SHARDED[INDEX], held: SHARDS[held]})
    message = refusal(BadInput, f"{NAME}/{INDEX}", lost)
    assert held not in message
    assert hub.fetched() == [INDEX]


@pytest.mark.parametrize("choice", [":tiny.Q8_0.gguf", "/tiny.Q8_0.gguf", ":Q8_0", ":q8"])
def test_one_gguf_file_out_of_many_is_chosen_by_its_name(hub: Hub, choice: str) -> None:
    commit = hub.add(NAME, GGUF | {"config.json": b"{}"})
    snapshot = fetch(NAME + choice)
    assert snapshot == Snapshot(snapshot.path, NAME, commit, {"tiny.Q8_0.gguf": len(GGUF["tiny.Q8_0.gguf"])})
    assert snapshot.path.name == "tiny.Q8_0.gguf"
    assert snapshot.path.read_bytes() == GGUF["tiny.Q8_0.gguf"]
    assert hub.fetched() == ["tiny.Q8_0.gguf"]


@pytest.mark.parametrize("choice", ["", ":Q4", ":Q5_0", ":config.json"])
def test_a_choice_among_gguf_files_that_is_not_made_lists_them(hub: Hub, choice: str) -> None:
    hub.add(NAME, GGUF)
    message = refusal(BadInput, f"{NAME}:FILE", "tiny.Q4_0.gguf (20.5 kB), tiny.Q4_K_M.gguf", source=NAME + choice)
    assert ("Q8_0" in message) == (choice != ":Q4")
    assert hub.fetched() == []


def test_the_only_gguf_file_needs_no_choice_and_a_name_inside_another_one_is_its_own(hub: Hub) -> None:
    hub.add(NAME, {"sub/a.gguf": b"a"})
    assert fetch(NAME).path.read_bytes() == b"a"
    hub.add("owner/two", {"a.gguf": b"a", "aa.gguf": b"aa", "x.safetensors": b""})
    assert fetch("owner/two:a.gguf").path.read_bytes() == b"a"


def test_the_config_in_a_gguf_file_is_read_from_the_cache_only(hub: Hub) -> None:
    hub.add(NAME, GGUF)
    source = f"{NAME}:Q8_0"
    refusal(BadInput, source, "20.5 kB", f"hf download {NAME} tiny.Q8_0.gguf", source=source, config_only=True)
    assert hub.fetched() == []
    assert fetch(source) == fetch(source, config_only=True)


def test_names_from_the_hub_cannot_leave_the_folder_or_break_a_line(hub: Hub) -> None:
    evil = ["../../x.gguf", "/etc/x.gguf", "a\nb.gguf", "\x1b[2J.gguf", "a//b.gguf", "a\\b.gguf"]
    hub.add(NAME, dict.fromkeys(evil, b"") | {"x.h5\n": b""})
    assert "found none" in refusal(BadInput, NAME)


LOG_IN = ("hf auth login", "HF_TOKEN")
REFUSALS: dict[str, tuple[dict[str, Answer], tuple[str, ...]]] = {
    "unknown to the logged in": (
        {"/api/": Answer.error(404, Code="RepoNotFound")},
        ("no such repository", "private", *LOG_IN),
    ),
    "no access": ({"/resolve/": Answer.error(403, Code="GatedRepo")}, ("access", "ask at http", f"/{NAME}", *LOG_IN)),
    "forbidden": ({"/config.json": Answer.error(403, Message="Not you.")}, ("config.json", "403", "Not you.")),
    "disabled": ({"/api/": Answer.error(403, Message="Access to this resource is disabled.")}, ("403", "disabled")),
    "down": ({"/api/": Answer.error(503)}, ("503", "revision main")),
    "files down": ({"/resolve/": Answer.error(500)}, ("500", "config.json")),
    "too often": ({"/api/": Answer.error(429, b"slow\ndown")}, ("429", "slow")),
    "no hub": ({"/api/": Answer.error(200, b"<html>\n")}, ("HF_ENDPOINT",)),
    "half a hub": ({"/resolve/": Answer.error(200, b"<html>\n")}, ("X-Repo-Commit",)),
    "no commit": ({"/api/": Answer.error(200, b'{"id": "x"}')}, ("revision main",)),
    "lost file": ({"/cdn/": Answer.error(404)}, ("model.safetensors", "404")),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_hub_refuses_is_said_in_one_line(hub: Hub, capfd: pytest.CaptureFixture[str], case: str) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    hub.answers, parts = REFUSALS[case]
    refusal(InputOutputError, NAME, *parts)
    assert capfd.readouterr() == ("", "")


def test_a_guest_is_told_how_to_get_access(hub: Hub) -> None:
    for name in (NAME, "owner/private", "owner/gated"):
        hub.add(name, SMALL | WEIGHTS)
    hub.private, hub.gated = {"owner/private"}, {"owner/gated"}
    for name in ("owner/none", "owner/private"):
        refusal(InputOutputError, name, "no such repository", "private", *LOG_IN, source=name)
    refusal(InputOutputError, "ask at", f"{hub.url}/owner/gated", *LOG_IN, source="owner/gated")
    assert hub.fetched() == []
    assert fetch(NAME).revision


def test_an_unknown_revision_is_named(hub: Hub) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    for revision in ("v7", "0" * 40):
        refusal(InputOutputError, NAME, f"revision {revision} not found", revision=revision)


def test_a_token_gives_access_and_stays_with_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    hub.private.add(NAME)
    hub.gated.add(NAME)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert files_in(fetch(NAME).path) == SMALL | WEIGHTS
    assert {request.token for request in hub.log if not request.path.startswith("/cdn/")} == {hub.token}
    assert {request.token for request in hub.log if request.path.startswith("/cdn/")} == {None}
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    hub.add("owner/other", SMALL | WEIGHTS)
    refusal(InputOutputError, "owner/other", "401", "Invalid credentials", source="owner/other")


def test_a_moved_repository_is_followed(hub: Hub) -> None:
    commit = hub.add(NAME, SMALL | WEIGHTS)
    hub.moved["someone/old-name"] = NAME
    snapshot = fetch("someone/old-name")
    assert snapshot.revision == commit
    assert files_in(snapshot.path) == SMALL | WEIGHTS


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    hub.cuts["model.safetensors"] = [5 * CHUNK + 7, 3 * CHUNK]
    assert files_in(fetch(NAME).path) == SMALL | WEIGHTS
    starts = [request.start for request in hub.log if request.file == "model.safetensors"]
    assert starts == [None, 5 * CHUNK, 8 * CHUNK]
    assert hub.sent() == sum(map(len, (SMALL | WEIGHTS).values())) + 7
    assert capfd.readouterr() == ("", "")


def test_what_arrived_before_the_connection_was_lost_for_good_is_kept(hub: Hub, tmp_path: Path) -> None:
    hub.add(NAME, SMALL | SHARDED)
    second = max(SHARDS)
    hub.cuts[second] = [CHUNK] + [0] * 5
    refusal(InputOutputError, NAME, second, "20.5 kB", "connection to http")
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.cuts.clear()
    hub.log.clear()
    assert files_in(fetch(NAME).path) == SMALL | SHARDED
    assert hub.fetched() == [second]


@pytest.mark.parametrize("fault", ["damaged", "longer"])
def test_a_file_that_is_not_what_was_announced_is_not_kept(hub: Hub, fault: str) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    if fault == "damaged":
        hub.damaged.add("model.safetensors")
        refusal(InputOutputError, f"{NAME}/model.safetensors", "sha256", hashlib.sha256(*WEIGHTS.values()).hexdigest())
    else:
        hub.longer["model.safetensors"] = 1
        refusal(InputOutputError, NAME, "model.safetensors", f"size {20 * CHUNK + 1} but has size {20 * CHUNK}")
    hub.damaged.clear()
    hub.longer.clear()
    assert files_in(fetch(NAME).path) == SMALL | WEIGHTS


def test_too_little_room_is_said_before_the_file_is_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    room = shutil.disk_usage("/")._replace(free=10 * CHUNK)
    monkeypatch.setattr("huggingface_hub.file_download.shutil.disk_usage", lambda path: room)
    refusal(InputOutputError, NAME, "model.safetensors (20.5 kB)", "disk space", constants.HF_HUB_CACHE)
    assert hub.fetched() == sorted(SMALL)


def test_a_full_disk_is_one_line_and_no_part_stays(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    monkeypatch.setattr("huggingface_hub.file_download.http_get", Mock(side_effect=OSError(ENOSPC, "No space left")))
    refusal(InputOutputError, NAME, "No space left", constants.HF_HUB_CACHE)
    assert not list(tmp_path.rglob("*.incomplete"))


def test_a_cache_that_cannot_be_written_is_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    refusal(InputOutputError, NAME, "file/cache")


def test_without_a_network_the_cache_serves_and_what_it_lacks_is_named(hub: Hub) -> None:
    hub.add(NAME, SMALL | SHARDED)
    hub.add("owner/half", SMALL | SHARDED)
    whole, half = fetch(NAME), fetch("owner/half", config_only=True)
    hub.stop()
    assert fetch(NAME) == whole
    assert fetch("owner/half", config_only=True) == half
    refusal(
        InputOutputError,
        "owner/half",
        next(iter(SHARDS)),
        "not in the cache",
        "connection to http",
        source="owner/half",
    )
    refusal(
        InputOutputError, "owner/none", "revision main", "not in the cache", "connection to http", source="owner/none"
    )


def test_a_cache_without_a_list_of_files_serves_too(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(NAME, SMALL | SHARDED)
    snapshot = fetch(NAME)
    shutil.rmtree(snapshot.path.parents[1] / "trees")
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(NAME) == snapshot


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_bars_are_for_terminals_and_large_files(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, terminal: bool, progress: bool
) -> None:
    stderr = type("Stderr", (io.StringIO,), {"isatty": lambda self: terminal})()
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr("mlx_tformer.checkpoint.hub.BAR_FROM", 20 * CHUNK)
    monkeypatch.setattr("sys.stderr", stderr)
    hub.add(NAME, SMALL | WEIGHTS)
    fetch(NAME, progress=progress)
    shown = stderr.getvalue()
    assert ("20.5k/20.5k" in shown, shown.count("100%")) == ((True, 1) if terminal and progress else (False, 0))


NEVER = ("", ".", "..", "~", "./x", "/x", "a/b/c", "a b", "x/", "a--b", "a/b.git", "é", "a\n", "b" * 97)
PATHS = ("org/x:../a.gguf", "org/x/../a.gguf", "org/x:/a", "org/x:", "C:\\x.gguf", "C:/x.gguf", "http://x/y")
NAMES = ("x", "org/x", "Org-1/x_2.3", "org/x:a.gguf", "x:Q8_0", "org/x:sub/a.gguf", "org/x/a.gguf", "org/x/sub/a.gguf")


@pytest.mark.parametrize("text", [*NEVER, *PATHS])
def test_what_cannot_be_on_the_hub_is_refused_without_a_request(hub: Hub, text: str) -> None:
    assert not is_hub_id(text)
    refusal(BadInput, repr(text), source=text)
    assert hub.log == []


@pytest.mark.parametrize("text", NAMES)
def test_what_can_be_on_the_hub_is_recognised(text: str) -> None:
    assert is_hub_id(text)


CLIENT = """
import json, sys
from mlx_tformer.checkpoint.hub import fetch
from mlx_tformer.errors import MlxTformerError
assert "huggingface_hub" not in sys.modules
try:
    snapshot = fetch(sys.argv[1])
    print(json.dumps([str(snapshot.path), snapshot.revision]))
except MlxTformerError as error:
    sys.exit(f"{error.exit_code} {error}")
except KeyboardInterrupt:
    sys.exit(130)
"""


Client = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    """Starts a process that fetches, with the environment that a user would set."""

    def start(**extra: str) -> subprocess.Popen[str]:
        kept = os.environ | hub.environment(tmp_path / "home") | {"PYTHONPATH": str(Path(__file__).parents[1])}
        command = [sys.executable, "-c", CLIENT, NAME]
        return subprocess.Popen(command, env=kept | extra, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_the_environment_decides_where_to_ask_and_whether(hub: Hub, client: Client, tmp_path: Path) -> None:
    commit = hub.add(NAME, SMALL | WEIGHTS)
    process = client(HF_HUB_OFFLINE="1")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"4 {NAME}: revision main is not in the cache {tmp_path}")
    assert "HF_HUB_OFFLINE" in err
    assert hub.log == []
    out, err = client().communicate(timeout=60)
    path, revision = json.loads(out)
    assert (files_in(Path(path)), revision, err) == (SMALL | WEIGHTS, commit, "")
    hub.log.clear()
    assert client(HF_HUB_OFFLINE="1").communicate(timeout=60) == (out, "")
    assert hub.log == []


def test_ctrl_c_ends_a_download_at_once_and_a_new_try_works(hub: Hub, client: Client, tmp_path: Path) -> None:
    hub.add(NAME, SMALL | WEIGHTS)
    hub.stalled["model.safetensors"] = threading.Event()
    process = client()
    assert hub.stalled["model.safetensors"].wait(60)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130
    assert not list(tmp_path.rglob("*.incomplete"))
    hub.stalled.clear()
    out, _ = client().communicate(timeout=60)
    assert files_in(Path(json.loads(out)[0])) == SMALL | WEIGHTS
