#include "planner/core/matching.h"

#include <limits>

namespace fastkern {

void max_assignment(u32 n, const Vector<i64>& value, MatchingScratch* scratch,
                    Vector<u32>* column_of) {
    // Potentials u (rows) and v (columns) over costs -value; rows enter one at a time along the
    // cheapest alternating path. Index 0 is a sentinel, as usual for this method.
    constexpr i64 kInf = std::numeric_limits<i64>::max() / 2;
    Vector<i64>&u = scratch->u, &v = scratch->v, &least = scratch->least;
    Vector<u32>&row_of = scratch->row_of, &from = scratch->from;
    Vector<u8>& used = scratch->used;
    u.assign(n + 1, 0);
    v.assign(n + 1, 0);
    row_of.assign(n + 1, 0);
    from.resize(n + 1);
    for (u32 row = 1; row <= n; ++row) {
        row_of[0] = row;
        u32 column = 0;
        least.assign(n + 1, kInf);
        used.assign(n + 1, 0);
        do {
            used[column] = 1;
            const u32 r = row_of[column];
            const i64* cost = &value[static_cast<std::size_t>(r - 1) * n];
            i64 delta = kInf;
            u32 next = 0;
            for (u32 j = 1; j <= n; ++j) {
                if (used[j]) continue;
                const i64 reduced = -cost[j - 1] - u[r] - v[j];
                if (reduced < least[j]) {
                    least[j] = reduced;
                    from[j] = column;
                }
                if (least[j] < delta) {
                    delta = least[j];
                    next = j;
                }
            }
            for (u32 j = 0; j <= n; ++j) {
                if (used[j]) {
                    u[row_of[j]] += delta;
                    v[j] -= delta;
                } else {
                    least[j] -= delta;
                }
            }
            column = next;
        } while (row_of[column] != 0);
        do {
            const u32 previous = from[column];
            row_of[column] = row_of[previous];
            column = previous;
        } while (column != 0);
    }
    column_of->resize(n);
    for (u32 j = 1; j <= n; ++j) (*column_of)[row_of[j] - 1] = j - 1;
}

namespace {

bool augment(u32 n, const Vector<u64>& value, u64 threshold, u32 row, Vector<u32>& row_of,
             Vector<u8>& seen) {
    for (u32 j = 0; j < n; ++j) {
        if (seen[j] || value[static_cast<std::size_t>(row) * n + j] < threshold) continue;
        seen[j] = 1;
        if (row_of[j] == n || augment(n, value, threshold, row_of[j], row_of, seen)) {
            row_of[j] = row;
            return true;
        }
    }
    return false;
}

}  // namespace

bool has_perfect_matching(u32 n, const Vector<u64>& value, u64 threshold,
                          MatchingScratch* scratch) {
    Vector<u32>& row_of = scratch->row_of;
    Vector<u8>& seen = scratch->used;
    row_of.assign(n, n);
    for (u32 row = 0; row < n; ++row) {
        seen.assign(n, 0);
        if (!augment(n, value, threshold, row, row_of, seen)) return false;
    }
    return true;
}

}  // namespace fastkern
