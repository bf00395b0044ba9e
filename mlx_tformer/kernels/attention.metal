// Attention in one pass over the keys, without scores in memory.
//
// A row is a query of one head. A threadgroup takes ROWS of them that share a key head, so that a key is read once for
// all; its GROUPS simdgroups take every GROUPS-th key that any of the rows sees, and a lane every 32nd feature. The
// softmax is kept as top, weight = sum of exp(s - top), and spread = sum of exp(s - top) (s - top).
constexpr int PER = (WIDTH + 31) / 32, OWN = (VALUE + 31) / 32;  // features of a key and of a value in a lane
threadgroup float part[GROUPS][VALUE];
threadgroup float stat[GROUPS][2];
#if STATS
threadgroup float spreads[GROUPS][2];
threadgroup int peaks[GROUPS];
threadgroup float masses[GROUPS][32];
threadgroup float tops[GROUPS][TOP];
threadgroup int top_keys[GROUPS][TOP];
#endif

int lane = thread_index_in_simdgroup, group = simdgroup_index_in_threadgroup;
int heads = q_shape[1], queries = q_shape[2], kv_heads = k_shape[1], keys = k_shape[2], share = heads / kv_heads;
bool causal = rules[0], masked = rules[5], padded = rules[8];
int window = rules[1], chunk = rules[2], reach = rules[3], biased = rules[6], splits = rules[9];
int batch = threadgroup_position_in_grid.z / kv_heads, kv = threadgroup_position_in_grid.z % kv_heads;
int tile = threadgroup_position_in_grid.y / splits, split = threadgroup_position_in_grid.y % splits;
int count = metal::min(ROWS, share * queries - tile * ROWS);
int offset = rules[4] - (padded ? left[batch] : 0);  // position of the first key

// Each row sees an interval of keys, of which a mask may hide some.
int low[ROWS], high[ROWS], head[ROWS], here[ROWS];
long mask_at[ROWS];
int begin = keys, end = 0;
float mine[ROWS][PER], sum[ROWS][OWN], top[ROWS], weight[ROWS];
for (int r = 0; r < ROWS; ++r) {
    int row = metal::min(tile * ROWS + r, share * queries - 1), query = row / share;
    head[r] = kv * share + row % share;
    here[r] = keys - queries + query;
    low[r] = 0;
    high[r] = r < count ? keys : 0;
    if (causal) high[r] = metal::min(high[r], here[r] + 1);
    if (window > 0) low[r] = metal::max(low[r], here[r] - window + 1);
    if (reach >= 0) {
        low[r] = metal::max(low[r], here[r] - reach);
        high[r] = metal::min(high[r], here[r] + reach + 1);
    }
    if (chunk > 0) {
        int start = here[r] - (here[r] + offset) % chunk;
        low[r] = metal::max(low[r], start);
        high[r] = metal::min(high[r], start + chunk);
    }
    if (padded) {
        low[r] = metal::max(low[r], -offset);
        if (here[r] + offset < 0) high[r] = 0;
    }
    if (low[r] < high[r]) {
        begin = metal::min(begin, low[r]);
        end = metal::max(end, high[r]);
    }
    mask_at[r] = batch * mask_strides[0] + head[r] * mask_strides[1] + query * mask_strides[2];
    long at = batch * q_strides[0] + head[r] * q_strides[1] + query * q_strides[2];
    for (int e = 0; e < PER; ++e) {
        int f = lane + 32 * e;
        mine[r][e] = f < WIDTH ? float(q[at + f * q_strides[3]]) * numbers[0] : 0.0f;
    }
    for (int e = 0; e < OWN; ++e) sum[r][e] = 0;
    top[r] = -INFINITY;
    weight[r] = 0;
}
#if STATS
float spread[ROWS], far[ROWS], mass[ROWS], best[ROWS], bar[ROWS];  // lane i has the mass of span i, and the i-th best score
int peak[ROWS], best_key[ROWS];
int span_from = lane < SPANS ? spans[2 * lane] : 0, span_to = lane < SPANS ? spans[2 * lane + 1] : 0;
for (int r = 0; r < ROWS; ++r) {
    spread[r] = far[r] = mass[r] = 0;
    best[r] = bar[r] = -INFINITY;
    peak[r] = best_key[r] = -1;
}
#endif

int stretch = (metal::max(end - begin, 0) + splits - 1) / splits;
int stop = metal::min(end, begin + (split + 1) * stretch);
for (int j = begin + split * stretch + group; j < stop; j += GROUPS) {
    float key[PER];
#if PACKED
    long k_at = batch * k_strides[0] + kv * k_strides[1] + j * k_strides[2];
    long ks_at = batch * k_scales_strides[0] + kv * k_scales_strides[1] + j * k_scales_strides[2];
    long kb_at = batch * k_biases_strides[0] + kv * k_biases_strides[1] + j * k_biases_strides[2];
    for (int e = 0; e < PER; ++e) {
        int f = lane + 32 * e;  // below WIDTH, since that is a number of whole groups of 32 or more
        uint word = k[k_at + f * BITS / 32 * k_strides[3]] >> (f * BITS % 32) & ((1 << BITS) - 1);
        key[e] = float(word) * float(k_scales[ks_at + f / PACK * k_scales_strides[3]]) +
                 float(k_biases[kb_at + f / PACK * k_biases_strides[3]]);
    }
#elif LATENT
    long k_at = batch * k_strides[0] + kv * k_strides[1] + j * k_strides[2];
    long turning_at = batch * turning_strides[0] + kv * turning_strides[1] + j * turning_strides[2];
    for (int e = 0; e < PER; ++e) {
        int f = lane + 32 * e;
        key[e] = f < VALUE   ? float(k[k_at + f * k_strides[3]])
                 : f < WIDTH ? float(turning[turning_at + (f - VALUE) * turning_strides[3]])
                             : 0.0f;
    }
#else
    long k_at = batch * k_strides[0] + kv * k_strides[1] + j * k_strides[2];
    for (int e = 0; e < PER; ++e) {
        int f = lane + 32 * e;
        key[e] = f < WIDTH ? float(k[k_at + f * k_strides[3]]) : 0.0f;
    }
#endif

    float value[OWN];
#if PACKED
    long v_at = batch * v_strides[0] + kv * v_strides[1] + j * v_strides[2];
    long vs_at = batch * v_scales_strides[0] + kv * v_scales_strides[1] + j * v_scales_strides[2];
    long vb_at = batch * v_biases_strides[0] + kv * v_biases_strides[1] + j * v_biases_strides[2];
    for (int e = 0; e < OWN; ++e) {
        int f = lane + 32 * e;
        uint word = v[v_at + f * BITS / 32 * v_strides[3]] >> (f * BITS % 32) & ((1 << BITS) - 1);
        value[e] = float(word) * float(v_scales[vs_at + f / PACK * v_scales_strides[3]]) +
                   float(v_biases[vb_at + f / PACK * v_biases_strides[3]]);
    }
#elif LATENT
    for (int e = 0; e < OWN; ++e) value[e] = key[e];  // read once for both
#else
    long v_at = batch * v_strides[0] + kv * v_strides[1] + j * v_strides[2];
    for (int e = 0; e < OWN; ++e) {
        int f = lane + 32 * e;
        value[e] = f < VALUE ? float(v[v_at + f * v_strides[3]]) : 0.0f;
    }
#endif

    for (int r = 0; r < ROWS; ++r) {
        if (j < low[r] || j >= high[r]) continue;
        if (masked && !mask[mask_at[r] + j * mask_strides[3]]) continue;
        float s = 0;
        for (int e = 0; e < PER; ++e) s += mine[r][e] * key[e];
        s = simd_sum(s);
        if (numbers[1] > 0) s = numbers[1] * metal::precise::tanh(s / numbers[1]);
        if (biased == 1) s += bias[head[r]] * (j - here[r]);
        if (biased == 2) {
            int apart = metal::clamp(j - here[r] + rules[10], 0, 2 * rules[10]);
            s += bias[buckets[apart] * heads + head[r]];
        }
        if (s > top[r]) {
            float shrink = metal::exp(top[r] - s);
#if STATS
            spread[r] = weight[r] > 0 ? shrink * (spread[r] + (top[r] - s) * weight[r]) : 0;
            far[r] *= shrink;
            mass[r] *= shrink;
            peak[r] = j;
#endif
            weight[r] *= shrink;
            for (int e = 0; e < OWN; ++e) sum[r][e] *= shrink;
            top[r] = s;
        }
        float p = metal::exp(s - top[r]);
        weight[r] += p;
        for (int e = 0; e < OWN; ++e) sum[r][e] += p * value[e];
#if STATS
        spread[r] += p * (s - top[r]);
        far[r] += p * metal::abs(j - here[r]);
        if (span_from <= j && j < span_to) mass[r] += p;
        if (s > bar[r]) {  // lanes below keep their score; the first one that is less takes s, the rest move up
            float above = simd_shuffle_up(best[r], 1);
            int above_key = simd_shuffle_up(best_key[r], 1);
            if (s > best[r]) {
                bool moved = lane > 0 && s > above;
                best[r] = moved ? above : s;
                best_key[r] = moved ? above_key : j;
            }
            bar[r] = simd_shuffle(best[r], TOP - 1);
        }
#endif
    }
}

// What the simdgroups found, row by row, becomes one result. The bound is a constant, so that the compiler unrolls the
// loop and rows stay in registers.
for (int r = 0; r < ROWS; ++r) {
    if (r >= count) continue;
    for (int e = 0; e < OWN; ++e)
        if (lane + 32 * e < VALUE) part[group][lane + 32 * e] = sum[r][e];
    if (lane == 0) {
        stat[group][0] = top[r];
        stat[group][1] = weight[r];
#if STATS
        spreads[group][0] = spread[r];
        spreads[group][1] = far[r];
        peaks[group] = peak[r];
#endif
    }
#if STATS
    masses[group][lane] = mass[r];
    if (lane < TOP) {
        tops[group][lane] = best[r];
        top_keys[group][lane] = best_key[r];
    }
#endif
    threadgroup_barrier(mem_flags::mem_threadgroup);

    bool sinking = rules[7] && split == 0;  // a sink is one more score, whose weight goes nowhere
    float peak_score = -INFINITY;
    for (int g = 0; g < GROUPS; ++g) peak_score = metal::max(peak_score, stat[g][0]);
    float highest = sinking ? metal::max(peak_score, sinks[head[r]]) : peak_score;
    float shown = 0;
    for (int g = 0; g < GROUPS; ++g)
        if (stat[g][1] > 0) shown += metal::exp(stat[g][0] - highest) * stat[g][1];
    float total = shown + (sinking ? metal::exp(sinks[head[r]] - highest) : 0.0f);
    int row = tile * ROWS + r;
    long at = (long(split * q_shape[0] + batch) * heads + head[r]) * queries + row / share;
    for (int f = thread_index_in_threadgroup; f < VALUE; f += 32 * GROUPS) {
        float x = 0;
        for (int g = 0; g < GROUPS; ++g)
            if (stat[g][1] > 0) x += metal::exp(stat[g][0] - highest) * part[g][f];
        out[at * VALUE + f] = OUT(total > 0 ? x / total : 0.0f);
    }
#if STATS || SPLIT
    float logsum = total > 0 ? highest + metal::log(total) : -INFINITY;
    if (thread_index_in_threadgroup == 0) lse[at] = logsum;
#endif
#if STATS
    int span = thread_index_in_threadgroup;
    if (span < SPANS) {
        float m = 0;
        for (int g = 0; g < GROUPS; ++g)
            if (stat[g][1] > 0) m += metal::exp(stat[g][0] - highest) * masses[g][span];
        mass_out[at * SPANS + span] = total > 0 ? m / total : 0.0f;
    }
    if (thread_index_in_threadgroup == 0) {
        float spread_sum = sinking ? metal::exp(sinks[head[r]] - highest) * (sinks[head[r]] - highest) : 0.0f;
        float far_sum = 0;
        int key_at = -1;
        int next[GROUPS];
        for (int g = 0; g < GROUPS; ++g) {
            next[g] = 0;
            if (stat[g][1] == 0) continue;
            float below = stat[g][0] - highest;
            spread_sum += metal::exp(below) * (spreads[g][0] + below * stat[g][1]);
            far_sum += metal::exp(below) * spreads[g][1];
            if (stat[g][0] == peak_score) key_at = key_at < 0 ? peaks[g] : metal::min(key_at, peaks[g]);
        }
        entropy[at] = total > 0 ? metal::log(total) - spread_sum / total : 0.0f;
        distance[at] = shown > 0 ? far_sum / shown : 0.0f;
        peak_out[at] = key_at;
        for (int t = 0; t < TOP; ++t) {
            int from = -1;
            for (int g = 0; g < GROUPS; ++g) {
                if (next[g] == TOP || top_keys[g][next[g]] < 0) continue;
                float a = tops[g][next[g]], b = from < 0 ? -INFINITY : tops[from][next[from]];
                if (from < 0 || a > b || (a == b && top_keys[g][next[g]] < top_keys[from][next[from]])) from = g;
            }
            top_key_out[at * TOP + t] = from < 0 ? -1 : top_keys[from][next[from]];
            top_weight_out[at * TOP + t] = from < 0 ? 0.0f : metal::exp(tops[from][next[from]] - logsum);
            if (from >= 0) ++next[from];
        }
    }
#endif
    threadgroup_barrier(mem_flags::mem_threadgroup);
}
