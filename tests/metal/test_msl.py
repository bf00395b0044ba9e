"""The harness: it runs sound kernels and gives right numbers, and it finds planted faults.

The kernels here are samples of its own, so that its proof does not change with the kernels of the package.
"""

import mlx.core as mx
import msl
import numpy as np
import pytest
import samples

TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
needs_clang = pytest.mark.skipif(msl.clang() is None, reason="no clang++, which alone sees address spaces")


@pytest.fixture(autouse=True)
def strict():
    with msl.using(strict=msl.clang() is not None):
        yield


def random(*shape, dtype=mx.float32):
    return mx.random.normal(shape).astype(dtype)


def exact(a):
    return np.array(a.astype(mx.float32)).astype(np.float64)


def same(got, want, tolerance):
    got = exact(got)
    finite = np.isfinite(want)
    assert np.array_equal(finite, np.isfinite(got))
    assert np.abs(got[finite] - want[finite]).max(initial=0) <= tolerance * max(1, np.abs(want[finite]).max(initial=0))


# ---- RoPE ----


def rope_reference(x, pos, inv_freq, scale, traditional):
    angle = pos[:, None, :, None].astype(np.float64) * inv_freq
    c, s = np.cos(angle) * scale, np.sin(angle) * scale
    dims, out = 2 * len(inv_freq), x.copy()
    a, b = (slice(0, dims, 2), slice(1, dims, 2)) if traditional else (slice(0, dims // 2), slice(dims // 2, dims))
    out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., a] * s + x[..., b] * c
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "b,hq,hk,n,d,dims,traditional,scale",
    [
        (1, 4, 2, 7, 64, 64, False, 1.0),
        (2, 3, 1, 13, 80, 32, True, 1.0),
        (2, 8, 8, 1, 128, 128, False, 1.2),
        (1, 1, 1, 33, 96, 24, False, 0.9),
    ],
)
def test_rope(b, hq, hk, n, d, dims, traditional, scale, dtype):
    q, k = random(b, hq, n, d, dtype=dtype), random(b, hk, n, d, dtype=dtype)
    pos = mx.random.randint(0, 500, (b, n))
    inv_freq = 1e4 ** (-mx.arange(dims // 2) * 2 / dims)
    for x, y in zip((q, k), samples.rope(msl.metal_kernel, q, k, pos, inv_freq, scale, traditional), strict=True):
        # float32 angles up to 500 carry an error of about 500 * 2^-24
        same(
            y, rope_reference(exact(x), np.array(pos), exact(inv_freq), scale, traditional), max(5e-5, TOLERANCE[dtype])
        )


def test_rope_agrees_with_mlx():
    x = random(2, 4, 9, 64)
    inv_freq = 1e4 ** (-mx.arange(32) * 2 / 64)
    got, _ = samples.rope(msl.metal_kernel, x, x, mx.array([3, 40])[:, None] + mx.arange(9), inv_freq)
    want = mx.fast.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=mx.array([3, 40]))
    same(got, exact(want), 5e-6)


# ---- attention ----


def attention_reference(q, k, v, scale, causal, cap, slope):
    """In float64: output, logsumexp, entropy, position of the largest weight."""
    (_, hq, n, _), (_, hk, m, _) = q.shape, k.shape
    k, v = np.repeat(k, hq // hk, 1), np.repeat(v, hq // hk, 1)
    s = scale * q @ k.swapaxes(-1, -2)
    distance = np.arange(m - n, m)[:, None] - np.arange(m)
    s = cap * np.tanh(s / cap) if cap else s
    s = s - slope[:, None, None] * distance if slope is not None else s
    s = np.where(distance < 0, -np.inf, s) if causal else s
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1)) + s.max(-1)
        p = np.nan_to_num(np.exp(s - lse[..., None]))
        h = -np.nan_to_num(p * np.log(p)).sum(-1)
    empty = ~np.isfinite(s).any(-1)
    return p @ v, np.where(empty, -np.inf, lse), h, np.where(empty, -1, s.argmax(-1))


SHAPES = [
    (1, 4, 4, 5, 5, 64),
    (2, 6, 2, 3, 37, 128),
    (1, 8, 1, 1, 131, 128),
    (1, 2, 1, 17, 17, 64),
    (1, 2, 2, 9, 4, 64),
    (1, 1, 1, 1, 1, 128),
]
FLAVOURS = [(False, None, False), (True, None, False), (True, 5.0, False), (True, None, True), (False, 3.0, True)]


@pytest.mark.parametrize("b,hq,hk,n,m,d", SHAPES)
@pytest.mark.parametrize("causal,cap,alibi", FLAVOURS)
def test_attention(b, hq, hk, n, m, d, causal, cap, alibi, dtype=mx.float32, **more):
    q, k, v = random(b, hq, n, d, dtype=dtype), random(b, hk, m, d, dtype=dtype), random(b, hk, m, d, dtype=dtype)
    slope = 2.0 ** -mx.arange(1, hq + 1) if alibi else None
    out, lse, entropy, where = samples.attention(msl.metal_kernel, q, k, v, d**-0.5, causal, cap, slope, **more)
    want = attention_reference(*map(exact, (q, k, v)), d**-0.5, causal, cap, exact(slope) if alibi else None)
    same(out, want[0], TOLERANCE[dtype])
    same(lse, want[1], 2e-6)
    same(entropy, want[2], 4e-6)
    assert np.array_equal(np.array(where), want[3])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_attention_types_and_groups(dtype, groups):
    test_attention(1, 4, 2, 6, 45, 64, True, None, True, dtype, groups=groups)


def test_any_order_of_threads_gives_the_same_bits():
    q, k, v = random(1, 4, 5, 64), random(1, 2, 50, 64), random(1, 2, 50, 64)
    results = []
    for order in (0, 1, 2, 3, 4):
        with msl.using(order=order):
            results.append([np.array(x) for x in samples.attention(msl.metal_kernel, q, k, v, 0.125, causal=True)])
    for r in results[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(r, results[0], strict=True))


# ---- planted bugs ----

BUGS = {
    "missing barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "race|before anything was written"),
    "barrier that orders no memory": ("mem_flags::mem_threadgroup", "mem_flags::mem_none", "race"),
    "barrier that orders the wrong memory": ("mem_flags::mem_threadgroup", "mem_flags::mem_device", "race"),
    "barrier some threads skip": (
        "threadgroup_barrier",
        "if (group != 0 || lane < 5) threadgroup_barrier",
        "divergence|race|before anything",
    ),
    "simd_sum some lanes skip": ("s = simd_sum(s)", "if (lane != 7) s = simd_sum(s)", "divergence"),
    "early return": (
        "float mine[PER]",
        "if (lane == 31) return;\n float mine[PER]",
        "divergence|before anything was written",
    ),
    "write past the end": ("lse[at] =", "lse[at + 1] =", r"write of 4 bytes at byte \d+ of 'lse'"),
    "read past the end": ("j < stop;", "j <= stop;", r"read of 4 bytes at byte \d+ of '[kv]'"),
    "past the end of threadgroup memory": (
        "part[group][lane * PER + e] =",
        "part[group + 1][lane * PER + e] =",
        "index 4 is out of the bounds of an array",
    ),
    "past the end of a thread's own memory": (
        "e < PER; ++e) s +=",
        "e <= PER; ++e) s +=",
        "index 2 is out of the bounds",
    ),
    "division by zero": ("int stop =", "int stop = lane % (keys - 11) +", "division of whole numbers by zero"),
    "read of what nobody wrote": ("        best[group] = peak;\n", "", "'best'.* before anything was written"),
    "every lane writes the result": ("if (thread_index_in_threadgroup == 0)", "", "race: write of 'lse'"),
    "two threadgroups write the same place": ("ulong at = ulong(row)", "ulong at = ulong(0)", "race: write of 'out'"),
    "too much threadgroup memory": (
        "threadgroup int best[GROUPS];",
        "threadgroup int best[9000];",
        "threadgroup memory passes",
    ),
}


@pytest.mark.parametrize("old,new,complaint", BUGS.values(), ids=BUGS)
def test_faults_are_found_in_any_order(old, new, complaint):
    assert old in samples.ATTENTION
    q, k, v = random(1, 2, 4, 64), random(1, 2, 11, 64), random(1, 2, 11, 64)
    for order in (0, 1, 5):
        with msl.using(order=order), pytest.raises(msl.KernelFault, match=complaint):
            samples.attention(msl.metal_kernel, q, k, v, 0.125, source=samples.ATTENTION.replace(old, new))


WRONG = {
    "wrong lane": ("lane * PER + e]) * scale", "(lane ^ 1) * PER + e]) * scale"),
    "a lane too few in the sum": ("s = simd_sum(s)", "s = simd_sum(lane == 31 ? 0.0f : s)"),
    "only half of the butterfly": ("s = simd_sum(s);", "for (int m = 8; m; m /= 2) s += simd_shuffle_xor(s, m);"),
    "mask off by one": ("here + 1", "here + 2"),
    "wrong key head": ("head / (hq / hk)", "head % hk"),
    "old maximum forgotten": ("weight *= shrink;", ""),
}


@pytest.mark.parametrize("old,new", WRONG.values(), ids=WRONG)
def test_wrong_numbers_are_found(old, new):
    assert old in samples.ATTENTION
    with pytest.raises((AssertionError, msl.KernelFault)):
        test_attention(1, 4, 2, 6, 45, 64, True, None, True, source=samples.ATTENTION.replace(old, new))


def test_more_buffers_than_metal_has_are_refused():
    names = [f"x{i}" for i in range(31)]
    kernel = msl.metal_kernel("many", names, ["out"], "out[0] = " + " + ".join(f"{x}[0]" for x in names) + ";")
    with pytest.raises(msl.KernelFault, match="32 buffers, more than 31"):
        kernel([mx.ones((1,))] * 31, [(1,)], [mx.float32], grid=(1, 1, 1), threadgroup=(1, 1, 1))


FORBIDDEN = {
    "double": "double x = 0;",
    "standard library": "std::abs(1);",
    "new": "int* p = new int;",
    "goto": "here2: goto here2;",
    "exceptions": "throw 1;",
    "implicit bfloat": "bfloat b = 1.0f;",
}


@pytest.mark.parametrize("line", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_metal_forbids_does_not_compile(line):
    kernel = msl.metal_kernel("bad", [], ["out"], line + " out[0] = 1;")
    with pytest.raises(msl.Refused, match="error"):
        kernel(inputs=[], output_shapes=[(1,)], output_dtypes=[mx.float32], grid=(1, 1, 1), threadgroup=(1, 1, 1))


# ---- what only the address-space check sees ----

HELPER = (
    "inline float total(const device float* p, int n) { float s = 0; for (int i = 0; i < n; ++i) s += p[i]; return s; }"
)


def launch(line, header=HELPER, size=8):
    kernel = msl.metal_kernel("space", ["x"], ["out"], line, header)
    return kernel(
        inputs=[mx.ones((size,))],
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )[0]


def test_sound_address_spaces_pass():
    assert launch("out[0] = total(x, 8);").item() == 8


SPACES = {
    "an array of less than 8 elements is constant": {"line": "out[0] = total(x, 7);", "size": 7},
    "threadgroup for device": {"line": "threadgroup float t[4]; t[0] = 1; out[0] = total(t, 1);"},
    "thread for device": {"line": "float t[4] = {1}; out[0] = total(t, 1);"},
    "pointer without a space": {"line": "float t = 1; float* p = &t; out[0] = *p;"},
    "parameter without a space": {
        "line": "float t = 1; out[0] = f(&t);",
        "header": "inline float f(float* p) { return *p; }",
    },
    "device pointer to plain one": {"line": "auto f = [](thread float* p) { return *p; }; out[0] = f(out);"},
    "write to an input": {"line": "x[0] = 1; out[0] = 1;"},
    "Metal's own word as a name": {"line": "float vertex = 1; out[0] = vertex;"},
    "mathematics of an integer": {"line": "out[0] = metal::exp(2);"},
    "two kinds of maximum": {"line": "out[0] = metal::max(1, 2.0f);"},
}


@needs_clang
@pytest.mark.parametrize("case", SPACES.values(), ids=SPACES)
def test_address_space_faults_are_found(case):
    with pytest.raises(msl.Refused, match="error"):
        launch(**case)
