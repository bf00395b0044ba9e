"""What a model needs, what a machine has, and MLX's limits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_tformer import memory
from mlx_tformer.config import Config
from mlx_tformer.errors import MlxTformerError, UsageError
from mlx_tformer.families import family
from mlx_tformer.memory import Memory, MemoryRefusal
from mlx_tformer.nn import KV, LM, Attention, Causal, Window, WindowKV

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 131,
    "max_position_embeddings": 128,
}
TINY: dict[str, dict[str, Any]] = {
    "llama, every head its own": {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 12},
    "llama, shared heads": {"model_type": "llama", "tie_word_embeddings": True},
    "llama, one head": {"model_type": "llama", "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "mistral, a window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2"},
    "qwen2, windows above": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 24},
}
KNOWN = {
    "SmolLM2-135M": ("llama", 576, 1536, 9, 3, 30, 49152, True, 134_515_008, 23_040),
    "Llama 3 8B": ("llama", 4096, 14336, 32, 8, 32, 128256, False, 8_030_261_248, 131_072),
    "Mistral 7B": ("mistral", 4096, 14336, 32, 8, 32, 32000, False, 7_241_732_096, 131_072),
    "Qwen2.5 0.5B": ("qwen2", 896, 4864, 14, 2, 24, 151936, True, 494_032_768, 12_288),
}


def build(values: dict) -> LM:
    return family(values["model_type"]).model(Config(SIZES | values))


def known(name: str) -> LM:
    kind, dim, hidden, heads, kv_heads, layers, vocab, tied, _, _ = KNOWN[name]
    return build(
        {
            "model_type": kind,
            "hidden_size": dim,
            "intermediate_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": layers,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
        }
    )


@pytest.mark.parametrize("name", KNOWN)
def test_published_models_have_their_published_sizes(name: str) -> None:
    model, (*_, parameters, per_token) = known(name), KNOWN[name]
    assert memory.parameter_count(model) == parameters
    assert memory.weights_bytes(model, mx.bfloat16) == 2 * parameters
    assert memory.weights_bytes(model) == 4 * parameters  # MLX makes float32
    assert memory.kv_bytes(model, 1, mx.bfloat16) == per_token
    assert memory.kv_bytes(model, 1000, mx.float32) == 2000 * per_token  # no window is shorter


@pytest.mark.parametrize("name", TINY)
def test_the_parameters_are_those_of_all_modules(name: str) -> None:
    model = build(TINY[name])
    own = [v for m in model.modules() for v in m.values() if isinstance(v, mx.array)]
    assert memory.parameter_count(model) == sum(a.size for a in own) > 0
    assert memory.weights_bytes(model) == sum(a.nbytes for a in own)


@pytest.mark.parametrize("settings", [(32, 4, "affine"), (64, 8, "affine"), (32, 3, "affine"), (32, 4, "mxfp4")])
def test_quantizing_keeps_the_parameters_and_changes_the_bytes(settings: tuple[int, int, str]) -> None:
    group_size, bits, mode = settings
    model = build(TINY["llama, shared heads"])
    before = memory.parameter_count(model)

    def fits(path: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | nn.Embedding) and module.weight.shape[1] % group_size == 0

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=fits)
    assert memory.parameter_count(model) == before
    flat: Any = tree_flatten(model.parameters())
    stored = sum(a.nbytes for _, a in flat)
    assert memory.weights_bytes(model) == stored < 4 * before
    assert memory.compute_dtype(model) == mx.float32


def test_scales_are_counted_in_the_type_that_they_will_have_and_packed_weights_as_they_are() -> None:
    linear = nn.QuantizedLinear(64, 32, bias=True, group_size=32, bits=4)
    assert memory.weights_bytes(linear) == 64 * 32 // 2 + 4 * (2 * 64 + 32)
    assert memory.weights_bytes(linear, mx.bfloat16) == 64 * 32 // 2 + 2 * (2 * 64 + 32)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("name", TINY)
def test_a_real_cache_holds_what_was_counted(name: str, dtype: mx.Dtype) -> None:
    model = build(TINY[name])
    model.set_dtype(dtype)
    cache = model.new_cache()
    mx.eval(model(mx.array([[5] * 20]), cache))
    full = [s for s in cache.states.values() if not isinstance(s, WindowKV)]
    windows = [m for m in model.modules() if isinstance(m, Attention) and len(m.mask.parts) == 2]
    used = sum(a[..., :20, :].nbytes for s in full for a in s.arrays)
    assert used == memory.kv_bytes(model, 20, dtype) - sum(m.state_bytes(20, dtype) for m in windows)
    # Buffers grow in whole steps, in each layer, and a window of a few tokens is below one.
    assert cache.nbytes == KV.STEP * memory.kv_bytes(model, 1, dtype)
    assert memory.compute_dtype(model) == dtype


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(7), Window(300)])
@pytest.mark.parametrize("tokens", [1, 6, 7, 8, 299, 300, 301, 700])
def test_the_bytes_of_a_layer_are_those_of_the_keys_and_values_that_a_new_token_sees(mask: Causal, tokens: int) -> None:
    layer = Attention(16, heads=4, kv_heads=2, head_dim=3, mask=mask)
    state, one = layer.new_state(), mx.zeros((1, 2, 1, 3), mx.float16)
    assert isinstance(state, KV)
    for _ in range(tokens):
        keys, values = state.append(one, one)
    assert layer.state_bytes(tokens, mx.float16) == keys.nbytes + values.nbytes


def test_a_cache_for_no_tokens_takes_nothing_and_a_negative_length_is_refused() -> None:
    model = build(TINY["qwen2"])
    assert memory.kv_bytes(model, 0, mx.float32) == 0
    with pytest.raises(UsageError, match="tokens: found -1, expected 0 or more"):
        memory.kv_bytes(model, -1, mx.float32)


def test_a_model_that_fits_is_let_through_to_the_byte() -> None:
    model = build(TINY["llama, shared heads"])
    needed = memory.weights_bytes(model) + memory.kv_bytes(model, 50, mx.float32)
    memory.check_fits(model, tokens=50, dtype=mx.float32, device=Memory(needed, needed, "in a test"))
    with pytest.raises(MemoryRefusal):
        memory.check_fits(model, tokens=50, dtype=mx.float32, device=Memory(needed, needed - 1, "in a test"))


def test_a_refusal_names_both_figures_and_what_helps() -> None:
    model, device = known("Llama 3 8B"), Memory(24_000_000_000, 17_000_000_000, "recommended by Metal")
    memory.check_fits(model, tokens=7167, dtype=mx.bfloat16, device=device)
    with pytest.raises(MemoryRefusal) as refusal:
        memory.check_fits(model, tokens=8192, dtype=mx.bfloat16, device=device)
    assert str(refusal.value) == (
        "needs 17.1 GB (weights 16.1 GB + cache 1.1 GB for 8192 tokens), 17.0 GB recommended by Metal on this machine; "
        "ask for fewer tokens (7167 fit) or quantize"
    )
    assert isinstance(refusal.value, MlxTformerError)
    assert refusal.value.exit_code == 4


def test_a_refusal_does_not_advise_fewer_tokens_where_the_weights_alone_are_too_large() -> None:
    device = Memory(8_000_000_000, 5_300_000_000, "recommended by Metal")
    with pytest.raises(
        MemoryRefusal, match=r"5\.3 GB recommended by Metal on this machine; quantize or take a smaller"
    ):
        memory.check_fits(known("Mistral 7B"), tokens=100, dtype=mx.bfloat16, device=device)


def test_figures_that_would_read_alike_are_given_to_the_byte() -> None:
    model = build(TINY["qwen3"])
    needed = memory.weights_bytes(model) + memory.kv_bytes(model, 9, mx.float32)
    with pytest.raises(MemoryRefusal, match=f"needs {needed:,} bytes .* {needed - 1:,} bytes in a test"):
        memory.check_fits(model, tokens=9, dtype=mx.float32, device=Memory(needed, needed - 1, "in a test"))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("spare", [0, 1, 3000, 10**9])
def test_the_tokens_that_fit_fit_and_one_more_does_not(name: str, spare: int) -> None:
    model = build(TINY[name])
    fit = memory.tokens_that_fit(model, spare, 100, mx.float32)
    assert memory.kv_bytes(model, fit, mx.float32) <= spare
    assert fit == 100 or memory.kv_bytes(model, fit + 1, mx.float32) > spare
    assert memory.tokens_that_fit(model, -1, 100, mx.float32) == 0
    assert memory.tokens_that_fit(model, 0, 10**30, mx.float32) == 0


def test_this_machine_has_memory_and_recommends_no_more_than_that() -> None:
    found = memory.of_device()
    assert 0 < found.recommended <= found.total
    assert found.source


def test_with_metal_the_device_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_mac(monkeypatch)
    assert memory.of_device() == Memory(24_000_000_000, 17_000_000_000, "recommended by Metal")


def as_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that there is Metal; returns the wired limits that are set."""
    limits = [123]

    def set_wired_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    info = {"memory_size": 24_000_000_000, "max_recommended_working_set_size": 17_000_000_000}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: info if device == mx.gpu else {})
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    return limits


def test_the_wired_limit_is_raised_only_when_asked_and_comes_back_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = as_on_a_mac(monkeypatch)
    with memory.wired(False):
        assert limits == [123]
    with pytest.raises(KeyError), memory.wired(True):
        assert limits == [123, 17_000_000_000]
        raise KeyError
    assert limits == [123, 17_000_000_000, 123]


def test_the_wired_limit_is_left_alone_without_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = as_on_a_mac(monkeypatch)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with memory.wired(True):
        assert limits == [123]


def test_the_bound_on_mlx_s_cache_comes_back_after_an_error() -> None:
    before = mx.set_cache_limit(5_000_000)
    try:
        with pytest.raises(KeyError), memory.bounded_cache(1_000_000):
            assert mx.set_cache_limit(1_000_000) == 1_000_000
            raise KeyError
        assert mx.set_cache_limit(before) == 5_000_000
    finally:
        mx.set_cache_limit(before)


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Memory]:
    """The memory of a made-up Linux machine with 8 GiB free, from the files that its kernel would show."""

    def machine(membership: str, **files: str) -> Memory:
        for name, path in (("MEMINFO", "meminfo"), ("MEMBERSHIP", "cgroup"), ("CGROUPS", "groups")):
            monkeypatch.setattr(memory, name, tmp_path / path)
        (tmp_path / "cgroup").write_text(membership)
        (tmp_path / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
        for name, text in files.items():
            file = tmp_path / "groups" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return memory.of_device()

    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 70)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 7)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**22}.get)
    return machine


def test_without_metal_it_is_what_is_free_and_what_is_held_already(linux: Callable[..., Memory]) -> None:
    assert linux("0::/\n") == Memory(2**34, 2**33 + 77, "available now")


def test_the_limit_of_a_container_counts_without_the_files_that_it_caches(linux: Callable[..., Memory]) -> None:
    files = {
        "a/memory.max": "max\n",
        "a/memory.current": "5\n",
        "a/memory.stat": "inactive_file 1\n",
        "memory.max": f"{2**32}\n",
        "memory.current": f"{2**31}\n",
        "memory.stat": f"anon 5\ninactive_file {2**20}\n",
    }
    assert linux("0::/a\n", **files) == Memory(2**32, 2**31 + 2**20 + 77, "available now in this container")


def test_the_older_control_groups_count_too(linux: Callable[..., Memory]) -> None:
    files = {
        "memory/box/memory.limit_in_bytes": f"{2**32}\n",
        "memory/box/memory.usage_in_bytes": "0\n",
        "memory/box/memory.stat": "inactive_file 9\ntotal_inactive_file 0\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
        "memory/memory.stat": "",
    }
    found = linux("3:cpu,cpuacct:/x\n2:memory:/box/deep\n0::/\n", **files)
    assert found == Memory(2**32, 2**32, "available now in this container")


def test_a_container_that_is_over_its_limit_leaves_what_is_held(linux: Callable[..., Memory]) -> None:
    files = {"memory.max": "100\n", "memory.current": "150\n", "memory.stat": ""}
    assert linux("0::/\n", **files).recommended == 77


def test_three_quarters_are_recommended_where_nobody_says_what_is_free(
    linux: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    linux("0::/\n")
    monkeypatch.setattr(memory, "MEMINFO", Path("/nowhere/meminfo"))
    assert memory.of_device() == Memory(2**34, 3 * 2**32, "three quarters of the physical memory")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (134_515_008, "135 MB"),
        (16_060_522_496, "16.1 GB"),
        (10**15, "1.0 PB"),
        (10**22, "10000 EB"),
    ],
)
def test_sizes_read_as_on_a_mac(size: int, text: str) -> None:
    assert memory.human(size) == text
