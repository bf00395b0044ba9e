// Rotary positions of Q and K. A thread turns one pair of features of one token in HEADS heads, of which the first
// are Q's and the rest K's; threads beyond the pairs copy one feature that does not turn.
int column = thread_position_in_grid.x, t = thread_position_in_grid.y;
int q_heads = q_shape[1], heads = q_heads + k_shape[1], length = q_shape[2];
int blocks = (heads + HEADS - 1) / HEADS;
int batch = thread_position_in_grid.z / blocks, first = thread_position_in_grid.z % blocks * HEADS;
bool turning = column < PAIRS;

float c = 1, s = 0;
if (turning) {
    int axis = AXES ? axes[column] : 0;
    long at = axis * positions_strides[0] + batch * positions_strides[1];
    float position = EXPLICIT ? positions[at + t * positions_strides[2]] : positions[at] + t;
    // The angle to twice the precision of a float, so that late positions turn as exactly as early ones.
    float angle = position * frequencies[column];
    float rest = metal::fma(position, frequencies[column], -angle);
    float near_c = metal::precise::cos(angle), near_s = metal::precise::sin(angle);
    float rest_c = 1 - rest * rest / 2, rest_s = rest - rest * rest * rest / 6;
    c = amplitude * (near_c * rest_c - near_s * rest_s);
    s = amplitude * (near_s * rest_c + near_c * rest_s);
}
int a = !turning ? PAIRS + column : INTERLEAVED ? 2 * column : column;
int b = INTERLEAVED ? a + 1 : a + PAIRS;

for (int head = first; head < metal::min(first + HEADS, heads); ++head) {
    bool query = head < q_heads;
    int h = query ? head : head - q_heads;
    long from = query ? batch * q_strides[0] + h * q_strides[1] + t * q_strides[2]
                      : batch * k_strides[0] + h * k_strides[1] + t * k_strides[2];
    long step = query ? q_strides[3] : k_strides[3];
    long at = (long(batch * (query ? q_heads : heads - q_heads) + h) * length + t) * WIDTH;
    device T* to = query ? q_out + at : k_out + at;
    if (turning) {
        long i = from + a * step, j = from + b * step;
        float x = query ? float(q[i]) : float(k[i]), y = query ? float(q[j]) : float(k[j]);
        to[a] = T(x * c - y * s);
        to[b] = T(x * s + y * c);
    } else {
        to[a] = query ? q[from + a * step] : k[from + a * step];
    }
}
