// The router of a mixture of experts. A simdgroup takes one token, and a lane every 32nd expert.
constexpr int PER = (EXPERTS + 31) / 32, EACH = EXPERTS / GROUPS;  // experts in a lane, and in a group
int lane = thread_index_in_simdgroup;
long token = thread_position_in_grid.y;

float score[PER], choice[PER];
float top = -INFINITY, total = 0;
for (int i = 0; i < PER; ++i) {
    int expert = lane + 32 * i;
    score[i] = expert < EXPERTS ? logits[token * logits_strides[0] + expert * logits_strides[1]] : -INFINITY;
    top = metal::max(top, score[i]);
}
if (SCORE == 1) {
    top = simd_max(top);
    for (int i = 0; i < PER; ++i) {
        score[i] = metal::exp(score[i] - top);
        total += score[i];
    }
    total = simd_sum(total);
    for (int i = 0; i < PER; ++i) score[i] /= total;
}
if (SCORE == 2)
    for (int i = 0; i < PER; ++i) score[i] = 1 / (1 + metal::exp(-score[i]));
for (int i = 0; i < PER; ++i) {
    int expert = lane + 32 * i;
    choice[i] = expert >= EXPERTS ? -INFINITY : CORRECTED ? score[i] + correction[expert] : score[i];
}

if (GROUPS > 1) {
    // Lane g learns what group g is worth: the sum of its BEST highest choices, taken one after another.
    float worth = 0;
    for (int g = 0; g < GROUPS; ++g) {
        float sum = 0, last = INFINITY;
        int last_expert = -1;
        for (int n = 0; n < BEST; ++n) {
            float found = -INFINITY;
            int found_expert = EXPERTS;
            for (int i = 0; i < PER; ++i) {
                int expert = lane + 32 * i;
                bool left = choice[i] < last || (choice[i] == last && expert > last_expert);
                if (expert / EACH == g && left && choice[i] > found) {
                    found = choice[i];
                    found_expert = expert;
                }
            }
            last = simd_max(found);
            last_expert = simd_min(found == last ? found_expert : EXPERTS);
            sum += last;
        }
        if (lane == g) worth = sum;
    }
    int better = 0;
    for (int g = 0; g < GROUPS; ++g) {
        float other = simd_shuffle(worth, g);
        if (other > worth || (other == worth && g < lane)) ++better;
    }
    for (int i = 0; i < PER; ++i) {
        int group = metal::min(lane + 32 * i, EXPERTS - 1) / EACH;
        if (simd_shuffle(better, group) >= KEEP) choice[i] = -INFINITY;
    }
}

// The TOP best, the first of equals first; lane t keeps the t-th.
float mine = 0;
int mine_expert = 0;
for (int t = 0; t < TOP; ++t) {
    float found = -INFINITY;
    int found_expert = EXPERTS;
    for (int i = 0; i < PER; ++i) {
        if (choice[i] > found) {
            found = choice[i];
            found_expert = lane + 32 * i;
        }
    }
    float best = simd_max(found);
    int expert = simd_min(found == best ? found_expert : EXPERTS);
    float weight = 0;
    for (int i = 0; i < PER; ++i) {
        if (lane + 32 * i != expert) continue;
        weight = score[i];
        choice[i] = -INFINITY;
    }
    weight = simd_shuffle(weight, expert % 32);
    if (lane == t) {
        mine = weight;
        mine_expert = expert;
    }
}

if (AFTER == 1) {
    float highest = simd_max(lane < TOP ? mine : -INFINITY);
    mine = lane < TOP ? metal::exp(mine - highest) : 0.0f;
    mine /= simd_sum(mine);
}
if (AFTER == 2) mine = 1 / (1 + metal::exp(-mine));
if (NORMALISE) mine /= simd_sum(lane < TOP ? mine : 0.0f) + 1e-20f;
if (lane < TOP) {
    weights[token * TOP + lane] = mine * scale;
    chosen[token * TOP + lane] = mine_expert;
}
