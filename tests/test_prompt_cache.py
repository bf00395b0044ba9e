"""What was read need not be read again: between generations, and from files."""

import json
from itertools import accumulate
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import files_in, refusal
from cli_models import error_line, invoke, speaking
from helpers import GOLDEN
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_tformer as mt
from mlx_tformer.errors import BadInput, InputOutputError, UsageError
from mlx_tformer.generation import PromptCache
from mlx_tformer.generation.prompt_cache import fingerprint
from mlx_tformer.nn import Keeping

SIX = ["qwen3", "mistral-window", "mixtral", "deepseek_v3", "mamba2", "jamba"]
KINDS = {"whole": {}, "packed": {"kv_bits": 8}, "bounded": {"kv_size": 6, "kv_keep": 1}}
IDS = [5, 11, 2, 7, 40, 3, 9]


def loaded(case: str) -> mt.LanguageModel:
    return mt.load(GOLDEN / case, dtype="float32")


def written(lm: mt.LanguageModel, ids: list[int], memory: PromptCache | None = None, **settings: int) -> list[int]:
    return [step.token for step in lm.generate(ids, max_tokens=5, stop_at_end=False, memory=memory, **settings)]


@pytest.mark.parametrize("case", SIX)
@pytest.mark.parametrize("kind", ["whole", "packed"])
def test_a_text_that_goes_on_is_read_from_where_it_ended(case: str, kind: str, read: list[int]) -> None:
    lm, memory = loaded(case), PromptCache()
    first = written(lm, IDS, memory, **KINDS[kind])
    longer = [*IDS, *first, 8, 1, 2]
    wanted = written(lm, longer, **KINDS[kind])
    read.clear()
    assert written(lm, longer, memory, **KINDS[kind]) == wanted
    assert read[0] == 4  # the last token, which was not read when it was made, and three new ones


@pytest.mark.parametrize(("case", "reads"), [("qwen3", 2), ("deepseek_v3", 2), ("mamba2", 6), ("jamba", 6)])
def test_only_what_differs_is_read_where_the_end_can_be_forgotten(case: str, reads: int, read: list[int]) -> None:
    lm, memory, other = loaded(case), PromptCache(), [*IDS[:4], 1, 2]
    wanted = written(lm, other)
    written(lm, IDS, memory)
    read.clear()
    assert written(lm, other, memory) == wanted
    assert read[0] == reads


@pytest.mark.parametrize("case", SIX)
@settings(max_examples=6)
@given(parts=st.lists(st.integers(1, 12), min_size=1, max_size=4), kind=st.sampled_from(["whole", "bounded"]))
def test_however_a_text_grew_it_goes_on_the_same(case: str, parts: list[int], kind: str) -> None:
    lm, memory = mt.load(GOLDEN / case, dtype="float32"), PromptCache()
    text = [7 * i % 60 for i in range(sum(parts))]
    for at in accumulate(parts):
        assert written(lm, text[:at], memory, **KINDS[kind]) == written(lm, text[:at], **KINDS[kind])


def test_a_setting_that_is_refused_costs_nothing(read: list[int]) -> None:
    lm, memory = loaded("qwen3"), PromptCache()
    written(lm, IDS, memory)
    with pytest.raises(UsageError, match="top_p"):
        lm.generate(IDS, top_p=7, memory=memory)
    read.clear()
    written(lm, IDS, memory)
    assert read[0] == 1


def test_the_same_text_again_reads_one_token(read: list[int]) -> None:
    lm, memory = loaded("qwen3"), PromptCache()
    wanted = written(lm, IDS, memory)
    read.clear()
    assert written(lm, IDS, memory) == wanted
    assert read[0] == 1


def test_other_settings_of_the_cache_read_everything(read: list[int]) -> None:
    lm, memory = loaded("qwen3"), PromptCache()
    written(lm, IDS, memory)
    read.clear()
    written(lm, IDS, memory, kv_bits=8)
    assert read[0] == len(IDS)


@pytest.mark.parametrize("case", ["llama-longrope", "llama-dynamic"])
def test_keys_of_another_scale_are_not_used(case: str) -> None:
    lm, memory = loaded(case), PromptCache()
    trained = lm.model.scaled_positions()[0].scaling.trained
    long = [7 * i % 60 for i in range(trained + 2)]
    short = long[: trained - 8]
    written(lm, short, memory)
    found, wanted = (next(lm.generate(long, max_tokens=5, memory=one)).logprob for one in (memory, None))
    assert found == pytest.approx(wanted, abs=1e-5)


def test_a_generation_that_is_left_keeps_what_it_read(read: list[int]) -> None:
    lm, memory = loaded("qwen3"), PromptCache()
    generation = lm.generate(IDS, max_tokens=50, stop_at_end=False, memory=memory)
    tokens = [next(generation).token for _ in range(3)]
    generation.close()
    assert memory.ids[: len(IDS)] == IDS and memory.ids[len(IDS) :] == tokens[: len(memory.ids) - len(IDS)]
    read.clear()
    assert written(lm, [*IDS, *tokens, 1], memory) == written(lm, [*IDS, *tokens, 1])
    assert read[0] <= 2


def test_a_pass_that_breaks_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, memory = loaded("qwen3"), PromptCache()
    layer = lm.model.decoder.layers[1]
    calls = 0

    def breaking(self: object, *_: object) -> mx.array:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(self, *_)

    real = type(layer).__call__
    monkeypatch.setattr(type(layer), "__call__", breaking)
    with pytest.raises(KeyboardInterrupt):
        written(lm, IDS, memory)
    assert (memory.cache, memory.ids) == (None, [])


# --- files ---


@pytest.mark.parametrize("case", SIX)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_goes_on_where_it_was_saved(case: str, kind: str, tmp_path: Path, read: list[int]) -> None:
    lm, memory, file = loaded(case), PromptCache(), tmp_path / "prompt.cache"
    first = written(lm, IDS, memory, **KINDS[kind])
    memory.save(file, lm)
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.cache"]
    how = Keeping(**{name.removeprefix("kv_"): value for name, value in KINDS[kind].items()})
    again = PromptCache.load(file, loaded(case), how)
    assert again.ids == memory.ids
    longer = [*IDS, *first, 8]
    wanted = written(lm, longer, **KINDS[kind])
    read.clear()
    assert written(lm, longer, again, **KINDS[kind]) == wanted
    assert read[0] == 2


def test_a_file_of_other_weights_layouts_or_settings_is_refused_in_one_line(tmp_path: Path) -> None:
    lm, memory, file = loaded("qwen3"), PromptCache(), tmp_path / "prompt.cache"
    written(lm, IDS, memory)
    memory.save(file, lm)
    refusal(BadInput, str(file), "fingerprint", of=lambda: PromptCache.load(file, loaded("qwen3-bias")))
    refusal(BadInput, "fingerprint", of=lambda: PromptCache.load(file, mt.load(GOLDEN / "qwen3", dtype="bfloat16")))
    refusal(BadInput, "settings", of=lambda: PromptCache.load(file, lm, Keeping(bits=4)))
    changed = loaded("qwen3")
    layer = changed.model.decoder.layers[0].mlp.op.down
    layer.weight = layer.weight * 1.01
    refusal(BadInput, "fingerprint", of=lambda: PromptCache.load(file, changed))
    assert fingerprint(lm) == fingerprint(loaded("qwen3"))


@pytest.mark.parametrize(
    "fault",
    ["layout", "numbers", "context", "ids", "no ids", "shape", "dtype", "missing", "more", "length", "first", "bytes"],
)
def test_a_broken_file_is_one_line(tmp_path: Path, fault: str) -> None:
    lm, memory, file = loaded("qwen3"), PromptCache(), tmp_path / "prompt.safetensors"
    written(lm, IDS, memory)
    memory.save(file, lm)
    if fault == "bytes":
        file.write_bytes(file.read_bytes()[:-7])
        refusal(BadInput, str(file), of=lambda: PromptCache.load(file, lm))
        return
    found = mx.load(str(file), return_metadata=True)
    assert isinstance(found, tuple)
    arrays, about = found
    arrays = {name: mx.array(array) for name, array in arrays.items()}
    key = next(name for name in arrays if name.endswith("|keys"))
    numbers = json.loads(about["numbers"])
    layer = next(iter(numbers))
    match fault:
        case "layout":
            about["layout"] = "0"
        case "numbers":
            about["numbers"] = "[]"
        case "context":
            about["context"] = "-3"
        case "ids":
            arrays["ids"] = arrays["ids"] + 1000
        case "no ids":
            del arrays["ids"]
        case "shape":
            arrays[key] = arrays[key][:, :1]
        case "dtype":
            arrays[key] = arrays[key].astype(mx.float16)
        case "missing":
            del arrays[key]
        case "more":
            arrays["elsewhere|keys"] = arrays[key]
        case "length" | "first":
            numbers[layer][fault] = 3
            about["numbers"] = json.dumps(numbers)
    mx.save_safetensors(str(file), arrays, about)
    refusal(BadInput, str(file), of=lambda: PromptCache.load(file, lm))


def test_nothing_is_saved_of_nothing_and_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    lm, memory, file = loaded("qwen3"), PromptCache(), tmp_path / "prompt.cache"
    with pytest.raises(UsageError, match="nothing to save"):
        memory.save(file, lm)
    written(lm, IDS, memory)
    refusal(InputOutputError, "nowhere", of=lambda: memory.save(tmp_path / "nowhere" / "file", lm))
    file.mkdir()
    (file / "inside").write_text("x")
    refusal(InputOutputError, str(file), of=lambda: memory.save(file, lm))
    assert files_in(tmp_path) == {"prompt.cache/inside": b"x"}


# --- the command line ---


def test_the_command_reads_only_what_is_new(tmp_path: Path) -> None:
    model, file = speaking(tmp_path / "model"), tmp_path / "cache"
    command = ["generate", "-m", str(model), "-n", "4", "--prompt-cache", str(file), "--json"]
    first = json.loads(invoke(*command, "a b c d e").stdout)
    second = json.loads(invoke(*command, "a b c d e f g").stdout)
    fresh = json.loads(invoke("generate", "-m", str(model), "-n", "4", "--json", "a b c d e f g").stdout)
    assert first["stats"]["known_tokens"] == 0 and file.exists()
    assert second["stats"]["known_tokens"] == 5
    assert second["text"] == fresh["text"]
    assert "settings" in error_line(invoke(*command[:-1], "--kv-bits", "8", "a"), 3)
    packed = json.loads(invoke("generate", "-m", str(model), "-n", "4", "--kv-bits", "8", "--json", "a b c").stdout)
    assert packed["stats"]["cache_bytes"] != first["stats"]["cache_bytes"]
    shown = invoke(*command[:-1], "--stats", "a b c d e f g").stderr
    assert "of them known" in shown


@pytest.mark.parametrize(
    ("options", "part"),
    [(["--kv-bits", "3"], "--kv-bits: found 3"), (["--kv-keep", "2"], "--kv-keep"), (["--kv-size", "0"], "--kv-size")],
)
def test_settings_of_the_cache_that_cannot_be_are_usage_errors(tmp_path: Path, options: list[str], part: str) -> None:
    model = speaking(tmp_path / "model")
    assert part in error_line(invoke("generate", "-m", str(model), *options, "a"), 2)
