// The second pass of attention whose keys were split: a thread weighs one feature of one row over all splits.
int f = thread_position_in_grid.x;
long row = thread_position_in_grid.y, rows = lse_shape[1];
int splits = lse_shape[0];
float top = -INFINITY;
for (int s = 0; s < splits; ++s) top = metal::max(top, lse[s * rows + row]);
float x = 0, total = 0;
for (int s = 0; s < splits; ++s) {
    if (lse[s * rows + row] == -INFINITY) continue;
    float w = metal::exp(lse[s * rows + row] - top);
    x += w * part[(s * rows + row) * VALUE + f];
    total += w;
}
out[row * VALUE + f] = T(total > 0 ? x / total : 0.0f);
