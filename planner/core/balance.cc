#include "planner/core/balance.h"

#include <algorithm>

namespace fastkern {

void balance_tile(const Traffic& traffic, u32 a, u32 b, BalanceScratch* scratch, TilePieces* out) {
    const u32 m = traffic.gpus_per_server;
    Vector<u64>&left = scratch->left, &next_row = scratch->next_row, &own = scratch->own,
    &room = scratch->room;
    Vector<Piece>& moved = scratch->moved;
    Vector<u32>& order = scratch->order;
    left.resize(static_cast<std::size_t>(m) * m);
    next_row.assign(static_cast<std::size_t>(m) * m, 0);
    own.assign(m, 0);
    room.resize(m);
    // Of a dispatch's tile, which holds one destination for each source, no more than M pieces stay
    // and M - 1 move: each that moves leaves its source at its share or its rail full, and the last
    // one both.
    moved.clear();
    moved.reserve(m);
    out->pieces.clear();
    out->pieces.reserve(std::size_t{2} * m);
    for (u32 i = 0; i < m; ++i) {
        const u64* row =
            &traffic.rows[static_cast<std::size_t>(a * m + i) * traffic.num_ranks + b * m];
        for (u32 d = 0; d < m; ++d) own[i] += left[i * m + d] = row[d];
    }
    for (u32 l = 0; l < m; ++l) {
        const u64 cap = traffic.rail_rows(a, b, l);
        room[l] = cap > own[l] ? cap - own[l] : 0;
    }
    const auto move = [&](u32 i, u32 rail, u32 d, u64 num_rows) {
        moved.push_back({rail, i, d, 0, next_row[i * m + d], num_rows});
        next_row[i * m + d] += num_rows;
        left[i * m + d] -= num_rows;
        room[rail] -= num_rows;
        own[i] -= num_rows;
    };
    for (u32 i = 0; i < m; ++i) {
        const u64 cap = traffic.rail_rows(a, b, i);
        if (own[i] <= cap) continue;
        for (u32 k = 1; k < m && own[i] > cap; ++k) {  // on the destination's rail
            const u32 d = (i + k) % m;
            const u64 n = std::min({own[i] - cap, room[d], left[i * m + d]});
            if (n) move(i, d, d, n);
        }
        for (u32 k = 1; k < m && own[i] > cap; ++k) {  // on any rail, rows for our own index last
            const u32 rail = (i + k) % m;
            for (u32 j = 1; j <= m && room[rail] && own[i] > cap; ++j) {
                const u32 d = (i + j) % m;
                const u64 n = std::min({own[i] - cap, room[rail], left[i * m + d]});
                if (n) move(i, rail, d, n);
            }
        }
    }
    order.reserve(m);
    order.resize(moved.size());  // by rail, those of a rail as they came
    for (u32 k = 0; k < order.size(); ++k) order[k] = k;
    std::sort(order.begin(), order.end(), [&](u32 x, u32 y) {
        return moved[x].rail != moved[y].rail ? moved[x].rail < moved[y].rail : x < y;
    });
    out->rail_begin.resize(m + 1);
    std::size_t next_moved = 0;
    for (u32 l = 0; l < m; ++l) {
        out->rail_begin[l] = static_cast<u32>(out->pieces.size());
        u64 stream_row = 0;
        for (u32 k = 0; k < m; ++k) {
            const u32 d = (l + k) % m;
            const u64 n = left[l * m + d];
            if (!n) continue;
            out->pieces.push_back({l, l, d, stream_row, next_row[l * m + d], n});
            stream_row += n;
        }
        for (; next_moved < order.size() && moved[order[next_moved]].rail == l; ++next_moved) {
            Piece p = moved[order[next_moved]];
            p.stream_row = stream_row;
            stream_row += p.num_rows;
            out->pieces.push_back(p);
        }
    }
    out->rail_begin[m] = static_cast<u32>(out->pieces.size());
}

}  // namespace fastkern
