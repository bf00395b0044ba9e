"""Two fused Metal kernels to try the harness on; `make` is what makes a kernel."""

import mlx.core as mx

ROPE = """
    // One thread rotates one pair of one head of Q or K.
    uint pair = thread_position_in_grid.x, t = thread_position_in_grid.y, row = thread_position_in_grid.z;
    uint hq = q_shape[1], hk = k_shape[1], length = q_shape[2], width = q_shape[3];
    uint batch = row / (hq + hk), head = row % (hq + hk);
    bool query = head < hq;
    ulong at = ((query ? batch * hq + head : batch * hk + head - hq) * ulong(length) + t) * width;
    const device T* from = query ? q + at : k + at;
    device T* to = query ? q_out + at : k_out + at;
    if (pair < DIMS / 2) {
        float angle = pos[batch * length + t] * inv_freq[pair];
        float c = metal::cos(angle) * scale, s = metal::sin(angle) * scale;
        uint a = TRADITIONAL ? 2 * pair : pair, b = TRADITIONAL ? a + 1 : a + DIMS / 2;
        float x = float(from[a]), y = float(from[b]);
        to[a] = T(x * c - y * s);
        to[b] = T(x * s + y * c);
    } else {
        to[2 * pair] = from[2 * pair];
        to[2 * pair + 1] = from[2 * pair + 1];
    }
"""


def rope(make, q, k, pos, inv_freq, scale=1.0, traditional=False):
    """Rotate q (B, H, L, D) and k (B, K, L, D) by pos (B, L) in one launch; inv_freq (dims / 2,) in radians."""
    b, hq, n, d = q.shape
    kernel = make(
        name="rope", input_names=["q", "k", "pos", "inv_freq", "scale"], output_names=["q_out", "k_out"], source=ROPE
    )
    return kernel(
        inputs=[q, k, pos, inv_freq, mx.array(scale)],
        template=[("T", q.dtype), ("DIMS", 2 * inv_freq.size), ("TRADITIONAL", traditional)],
        grid=(d // 2, n, b * (hq + k.shape[1])),
        threadgroup=(min(32, d // 2), min(8, n), 1),
        output_shapes=[q.shape, k.shape],
        output_dtypes=[q.dtype, k.dtype],
    )


ATTENTION = """
    // A threadgroup handles one query; each of its simdgroups takes every GROUPS-th key, each lane WIDTH / 32 channels.
    constexpr int PER = WIDTH / 32;
    threadgroup float part[GROUPS][WIDTH];
    threadgroup float stat[GROUPS][3];
    threadgroup int best[GROUPS];
    int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
    int i = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
    int hq = q_shape[1], hk = k_shape[1], queries = q_shape[2], keys = k_shape[2];
    int batch = row / hq, head = row % hq, here = keys - queries + i;
    ulong kv = ulong(batch * hk + head / (hq / hk)) * keys * WIDTH + lane * PER;
    int stop = CAUSAL ? metal::min(keys, here + 1) : keys;

    float mine[PER], sum[PER];
    for (int e = 0; e < PER; ++e) {
        mine[e] = float(q[(ulong(row) * queries + i) * WIDTH + lane * PER + e]) * scale;
        sum[e] = 0;
    }
    // With p = exp(s - top): weight = sum of p, spread = sum of p * (s - top), over the keys so far.
    float top = -INFINITY, weight = 0, spread = 0;
    int peak = -1;
    for (int j = group; j < stop; j += GROUPS) {
        float s = 0;
        for (int e = 0; e < PER; ++e) s += mine[e] * float(k[kv + ulong(j) * WIDTH + e]);
        s = simd_sum(s);
        if (CAP) s = cap * metal::tanh(s / cap);
        if (ALIBI) s -= slope[head] * (here - j);
        if (s > top) {
            float shrink = metal::exp(top - s);
            spread = weight > 0 ? shrink * (spread + (top - s) * weight) : 0;
            weight *= shrink;
            for (int e = 0; e < PER; ++e) sum[e] *= shrink;
            top = s;
            peak = j;
        }
        float p = metal::exp(s - top);
        weight += p;
        spread += p * (s - top);
        for (int e = 0; e < PER; ++e) sum[e] += p * float(v[kv + ulong(j) * WIDTH + e]);
    }
    for (int e = 0; e < PER; ++e) part[group][lane * PER + e] = sum[e];
    if (lane == 0) {
        stat[group][0] = top;
        stat[group][1] = weight;
        stat[group][2] = spread;
        best[group] = peak;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    top = -INFINITY, weight = 0, spread = 0, peak = -1;
    for (int g = 0; g < GROUPS; ++g) top = metal::max(top, stat[g][0]);
    for (int g = 0; g < GROUPS; ++g) {
        if (stat[g][1] == 0) continue;
        float below = stat[g][0] - top, f = metal::exp(below);
        weight += f * stat[g][1];
        spread += f * (stat[g][2] + below * stat[g][1]);
        if (below == 0) peak = peak < 0 ? best[g] : metal::min(peak, best[g]);
    }
    ulong at = ulong(row) * queries + i;
    for (int e = thread_index_in_threadgroup; e < WIDTH; e += 32 * GROUPS) {
        float x = 0;
        for (int g = 0; g < GROUPS; ++g)
            if (stat[g][1] > 0) x += metal::exp(stat[g][0] - top) * part[g][e];
        out[at * WIDTH + e] = T(weight > 0 ? x / weight : 0);
    }
    if (thread_index_in_threadgroup == 0) {
        lse[at] = weight > 0 ? top + metal::log(weight) : -INFINITY;
        entropy[at] = weight > 0 ? metal::log(weight) - spread / weight : 0;
        where[at] = peak;
    }
"""


def attention(make, q, k, v, scale, causal=False, cap=None, slope=None, groups=4, source=ATTENTION):
    """Attention of q (B, H, L, D) over k, v (B, K, S, D); also logsumexp, entropy and peak of each query."""
    b, hq, n, d = q.shape
    kernel = make(
        name="attention",
        input_names=["q", "k", "v", "scale", "cap", "slope"],
        output_names=["out", "lse", "entropy", "where"],
        source=source,
    )
    return kernel(
        inputs=[q, k, v, mx.array(scale), mx.array(cap or 0.0), mx.zeros((hq,)) if slope is None else slope],
        template=[
            ("T", q.dtype),
            ("WIDTH", d),
            ("GROUPS", groups),
            ("CAUSAL", causal),
            ("CAP", cap is not None),
            ("ALIBI", slope is not None),
        ],
        grid=(32 * groups, n, b * hq),
        threadgroup=(32 * groups, 1, 1),
        output_shapes=[q.shape, q.shape[:3], q.shape[:3], q.shape[:3]],
        output_dtypes=[q.dtype, mx.float32, mx.float32, mx.int32],
    )
