// Route: from topk_idx alone, which rows a rank sends and where each choice of a token goes.
//
// Two passes over the tokens with a scan between them and the exchange of counts before the second:
//   count  per unit (a run of tokens, done by one lane) and key: copies for each expert, distinct
//          tokens for each server and each rank
//   scan   per key: each unit's first place among all units; the totals are what ranks exchange
//   fill   again over the tokens: slots, window rows, row headers, pack list, token map
// A unit counts in token order and units are runs in order, so every place follows from the tokens
// alone: any number of units gives the same result.
//
// Example: 2 servers x 2 ranks, 4 experts (one each), rank 0 has tokens [0, 2], [3, 2], [-1, 1].
//   copies [1, 1, 2, 1]; distinct for ranks [1, 1, 2, 1], for servers [2, 2]
//   rows sent: token 0 for rank 0; token 2 for rank 1; tokens 0 and 1 for server 1, once each
//   header of token 1's row: choice 0 -> local rank 1, choice 1 -> local rank 0
#pragma once

#include "kernels/body/args.h"

namespace fastkern {

using ConstIndices = const u32*;
using ConstWords = const u64*;

// Slots, places and first rows of a fill follow from the counts of all ranks: see Python's
// fastkern.moe.counts.
#define FASTKERN_ROUTE_ARGS_FIELDS(X)                                                             \
    X(InputBytes, topk_idx) /* [T][K] int32 or int64 */                                           \
    X(u64, num_tokens)                                                                            \
    X(ConstIndices, owner)       /* [E] rank of each expert */                                    \
    X(ConstIndices, local_index) /* [E] its index there */                                        \
    X(Words, counts)             /* [units][E + N + R]; after the scan: places */                 \
    X(Words, totals)             /* [E + N + R] */                                                \
    X(Words, bad) /* [units + 1] first position of topk_idx in each unit that is neither -1 nor \
                     an expert, or ~0; last, after the scan: in all units */ \
    X(OutputBytes, handle)      /* fill, as all below: what it fills */                           \
    X(ConstWords, slot_base)    /* [E] first output row of own copies on the expert's rank */     \
    X(ConstWords, window_base)  /* [R] first window row of this rank's tokens on each rank */     \
    X(ConstWords, list_base)    /* [R] first row of the pack list for each destination */         \
    X(ConstWords, return_base)  /* [N] combine: first window row of each server's sums */         \
    X(ConstWords, partial_base) /* [M] combine: first partial row of each local rank's sums */    \
    X(u32, idx_bytes)                                                                             \
    X(u32, topk)                                                                                  \
    X(u32, num_experts)                                                                           \
    X(u32, num_ranks)                                                                             \
    X(u32, servers)                                                                               \
    X(u32, gpus_per_server)                                                                       \
    X(u32, rank)                                                                                  \
    X(u32, num_units)                                                                             \
    X(u32, layout)                                                                                \
    X(u32, reserved)
FASTKERN_RECORD(RouteArgs, FASTKERN_ROUTE_ARGS_FIELDS);
static_assert(sizeof(RouteArgs) == 144, "layout");

FASTKERN_DEVICE inline u64 route_keys(const RouteArgs& a) {
    return u64{a.num_experts} + a.servers + a.num_ranks;
}

FASTKERN_DEVICE inline long long route_expert(const RouteArgs& a, u64 position) {
    if (a.idx_bytes == 4) return reinterpret_cast<const int*>(a.topk_idx)[position];
    return reinterpret_cast<const long long*>(a.topk_idx)[position];
}

// The choices of one token, with what is the first of its kind.
struct Choices {
    u32 expert[kMostChoices];  // kNone: none
    u32 rank[kMostChoices];
    u32 first_of_rank[kMostChoices];    // 1: no earlier choice goes to this rank
    u32 first_of_server[kMostChoices];  // 1: nor to this server
};

FASTKERN_DEVICE inline void read_choices(const RouteArgs& a, u64 token, Choices* c) {
    for (u32 k = 0; k < a.topk; ++k) {
        const long long e = route_expert(a, token * a.topk + k);
        c->expert[k] = e < 0 || e >= a.num_experts ? kNone : static_cast<u32>(e);
        if (c->expert[k] == kNone) {
            c->rank[k] = kNone;
            continue;
        }
        const u32 rank = c->rank[k] = a.owner[c->expert[k]];
        c->first_of_rank[k] = c->first_of_server[k] = 1;
        for (u32 j = 0; j < k; ++j) {
            if (c->rank[j] == kNone) continue;
            if (c->rank[j] == rank) c->first_of_rank[k] = 0;
            if (c->rank[j] / a.gpus_per_server == rank / a.gpus_per_server)
                c->first_of_server[k] = 0;
        }
    }
}

// Each lane of a launch one unit, or in the scan one key.
template <class Target>
FASTKERN_DEVICE u64 route_index(const Target& target) {
    return u64{target.block()} * target.num_lanes() + target.lane();
}

FASTKERN_DEVICE inline u64 unit_begin(const RouteArgs& a, u32 unit) {
    const u64 share = a.num_tokens / a.num_units, more = a.num_tokens % a.num_units;
    return share * unit + (unit < more ? unit : more);
}

FASTKERN_DEVICE inline void route_count(const RouteArgs& a, u32 unit) {
    u64* const experts = a.counts + unit * route_keys(a);
    u64* const servers = experts + a.num_experts;
    u64* const ranks = servers + a.servers;
    for (u64 key = 0; key < route_keys(a); ++key) experts[key] = 0;
    u64 bad = ~u64{0};
    Choices c;
    for (u64 t = unit_begin(a, unit); t < unit_begin(a, unit + 1); ++t) {
        read_choices(a, t, &c);
        for (u32 k = 0; k < a.topk; ++k) {
            if (c.expert[k] == kNone) {
                const u64 position = t * a.topk + k;
                if (route_expert(a, position) != -1 && position < bad) bad = position;
                continue;
            }
            ++experts[c.expert[k]];
            servers[c.rank[k] / a.gpus_per_server] += c.first_of_server[k];
            ranks[c.rank[k]] += c.first_of_rank[k];
        }
    }
    a.bad[unit] = bad;
}

FASTKERN_DEVICE inline void route_scan(const RouteArgs& a, u64 key) {
    u64 sum = 0;
    for (u32 unit = 0; unit < a.num_units; ++unit) {
        u64* const count = a.counts + unit * route_keys(a) + key;
        const u64 here = *count;
        *count = sum;
        sum += here;
    }
    a.totals[key] = sum;
    if (key != 0) return;
    u64 bad = ~u64{0};
    for (u32 unit = 0; unit < a.num_units; ++unit)
        if (a.bad[unit] < bad) bad = a.bad[unit];
    a.bad[a.num_units] = bad;
}

// The header of one row sent to `server` (or, `rank` given, to that rank alone).
FASTKERN_DEVICE inline void fill_entries(const RouteArgs& a, const Choices& c, const u32* slot,
                                         const u32* window_row, u32 server, u32 rank,
                                         RowEntry* entries) {
    const u32 m = a.gpus_per_server;
    for (u32 k = 0; k < a.topk; ++k) {
        const bool here =
            c.rank[k] != kNone && c.rank[k] / m == server && (rank == kNone || c.rank[k] == rank);
        entries[k] =
            here ? RowEntry{slot[k], window_row[k], c.rank[k] % m} : RowEntry{kNone, kNone, kNone};
    }
}

FASTKERN_DEVICE inline void route_fill(const RouteArgs& a, u32 unit) {
    const HandleView h = view_handle(a.handle);
    u64* const experts = a.counts + unit * route_keys(a);
    u64* const servers = experts + a.num_experts;
    u64* const ranks = servers + a.servers;
    const u32 m = a.gpus_per_server, n = a.servers, own_server = a.rank / m;
    Choices c;
    u32 slot[kMostChoices], window_row[kMostChoices];
    for (u64 t = unit_begin(a, unit); t < unit_begin(a, unit + 1); ++t) {
        read_choices(a, t, &c);
        u32* const map = h.token_map + t * (n + m);
        for (u32 j = 0; j < n + m; ++j) map[j] = kNone;
        for (u32 k = 0; k < a.topk; ++k) {
            if (c.rank[k] == kNone) continue;
            const u32 e = c.expert[k];
            const u64 place = experts[e]++;
            slot[k] = a.layout == kExpertLayout ? static_cast<u32>(a.slot_base[e] + place)
                                                : a.local_index[e];
            if (c.first_of_rank[k]) {
                window_row[k] = static_cast<u32>(a.window_base[c.rank[k]] + ranks[c.rank[k]]);
                continue;
            }
            for (u32 j = 0; j < k; ++j)
                if (c.rank[j] == c.rank[k]) window_row[k] = window_row[j];
        }
        for (u32 k = 0; k < a.topk; ++k) {
            if (c.rank[k] == kNone) continue;
            const u32 rank = c.rank[k], server = rank / m;
            u64 row;
            if (server == own_server) {
                if (!c.first_of_rank[k]) continue;
                const u64 place = ranks[rank];
                row = a.list_base[rank] + place;
                map[n + rank % m] = rank == a.rank
                                        ? window_row[k]
                                        : static_cast<u32>(a.partial_base[rank % m] + place);
                fill_entries(a, c, slot, window_row, server, rank, h.entries + row * a.topk);
            } else {
                if (!c.first_of_server[k]) continue;
                const u64 place = servers[server]++;
                row = a.list_base[server * m + a.rank % m] + place;
                map[server] = static_cast<u32>(a.return_base[server] + place);
                fill_entries(a, c, slot, window_row, server, kNone, h.entries + row * a.topk);
            }
            h.pack_list[row] = static_cast<u32>(t);
        }
        for (u32 k = 0; k < a.topk; ++k)
            if (c.rank[k] != kNone) ranks[c.rank[k]] += c.first_of_rank[k];
    }
}

}  // namespace fastkern
