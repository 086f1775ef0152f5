// A handle's memory: what a dispatch keeps for the combine that follows it, for backward, and for
// later calls with the same routing. One block per rank, owned by the caller; all numbers are those
// of this rank. The only definition of its layout; Python reads it through the extension module.
//
// Header, then
//   u64 to_server[R][N], to_rank[R][R]  tokens of each rank for each server and rank
//   u64 tokens_per_expert[own experts]
//   u32 pack_list[pack_rows]            token of each row sent, by destination, then token
//   RowEntry entries[pack_rows][K]      the row headers
//   u32 token_map[T][N + M]             where a token's sums come back: window row of each server,
//                                       partial row of each local rank; own rank: dispatch's window
//                                       row
//   u32 window_slots[window_rows][K]    output row of each choice of a window row, or kNone
//   u32 touched[receive_rows][M]        of a staging row that this rank proxied: where each local
//                                       rank's sum comes (own rank: window row), or kNone
//   Arrival arrivals[num_arrivals][M]   as proxies told them
#pragma once

#include "planner/stage_table.h"

namespace fastkern {

constexpr u64 kHandleMagic = 0x6c646e68534b4600ull;
constexpr u32 kNone = 0xffffffffu;
constexpr u32 kMostChoices = 32;  // top-k

enum LayoutKind : u32 { kExpertLayout, kRankLayout };

// One choice of a token, in the header of its row: expert layout: the output row; rank layout: the
// expert's index on its rank. Choices on other servers than the row's hold kNone everywhere.
#define FASTKERN_ROW_ENTRY_FIELDS(X) \
    X(u32, slot)                     \
    X(u32, window_row)               \
    X(u32, local_rank)
FASTKERN_RECORD(RowEntry, FASTKERN_ROW_ENTRY_FIELDS);
static_assert(sizeof(RowEntry) == 12, "layout");

#define FASTKERN_HANDLE_FIELDS(X)                                               \
    X(u64, magic)                                                               \
    X(u64, handle_bytes)                                                        \
    X(u64, communicator) /* tag of the one that made it */                      \
    X(u64, serial)       /* call that made it: equal on all ranks */            \
    X(u64, plan_row_bytes)                                                      \
    X(u64, num_tokens) /* T */                                                  \
    X(u64, pack_rows)                                                           \
    X(u64, window_rows)   /* distinct tokens that this rank gets */             \
    X(u64, receive_rows)  /* rows that this rank proxies */                     \
    X(u64, num_recv_rows) /* rows of the caller's output, padding included */   \
    X(u64, sent_rows)     /* over scale-out */                                  \
    X(u64, packed_rows)   /* to other ranks' send staging */                    \
    X(u64, num_partials)  /* partial rows given out to other ranks, as proxy */ \
    X(u64, alignment)                                                           \
    X(u64, num_max_tokens) /* 0: none was set */                                \
    X(u32, released)                                                            \
    X(u32, rank)                                                                \
    X(u32, num_ranks)                                                           \
    X(u32, servers)                                                             \
    X(u32, gpus_per_server)                                                     \
    X(u32, topk)                                                                \
    X(u32, num_experts)                                                         \
    X(u32, num_own_experts)                                                     \
    X(u32, layout) /* LayoutKind */                                             \
    X(u32, num_arrivals)                                                        \
    X(u32, zero_padding)                                                        \
    X(u32, reserved)

FASTKERN_RECORD(HandleHeader, FASTKERN_HANDLE_FIELDS);
static_assert(sizeof(HandleHeader) == 168, "layout");

struct HandleView {
    HandleHeader* header;
    u64* to_server;
    u64* to_rank;
    u64* tokens_per_expert;
    u32* pack_list;
    RowEntry* entries;
    u32* token_map;
    u32* window_slots;
    u32* touched;
    Arrival* arrivals;
};

// Byte offsets of the arrays, and their sum; a multiple of 8.
struct HandleLayout {
    u64 to_server, to_rank, tokens_per_expert, pack_list, entries, token_map, window_slots, touched,
        arrivals, bytes;
};

FASTKERN_HD inline HandleLayout handle_layout(const HandleHeader& h) {
    const u64 r = h.num_ranks, n = h.servers, m = h.gpus_per_server, k = h.topk;
    HandleLayout a;
    a.to_server = sizeof(HandleHeader);
    a.to_rank = a.to_server + r * n * 8;
    a.tokens_per_expert = a.to_rank + r * r * 8;
    a.pack_list = a.tokens_per_expert + u64{h.num_own_experts} * 8;
    a.entries = a.pack_list + h.pack_rows * 4;
    a.token_map = a.entries + h.pack_rows * k * sizeof(RowEntry);
    a.window_slots = a.token_map + h.num_tokens * (n + m) * 4;
    a.touched = a.window_slots + h.window_rows * k * 4;
    a.arrivals = a.touched + h.receive_rows * m * 4;
    a.bytes = (a.arrivals + u64{h.num_arrivals} * m * sizeof(Arrival) + 7) / 8 * 8;
    return a;
}

// header: that of the block, wherever it is read from.
FASTKERN_HD inline HandleView view_handle(u8* block, const HandleHeader& header) {
    HandleView v;
    v.header = reinterpret_cast<HandleHeader*>(block);
    const HandleLayout a = handle_layout(header);
    v.to_server = reinterpret_cast<u64*>(block + a.to_server);
    v.to_rank = reinterpret_cast<u64*>(block + a.to_rank);
    v.tokens_per_expert = reinterpret_cast<u64*>(block + a.tokens_per_expert);
    v.pack_list = reinterpret_cast<u32*>(block + a.pack_list);
    v.entries = reinterpret_cast<RowEntry*>(block + a.entries);
    v.token_map = reinterpret_cast<u32*>(block + a.token_map);
    v.window_slots = reinterpret_cast<u32*>(block + a.window_slots);
    v.touched = reinterpret_cast<u32*>(block + a.touched);
    v.arrivals = reinterpret_cast<Arrival*>(block + a.arrivals);
    return v;
}

FASTKERN_HD inline HandleView view_handle(u8* block) {
    return view_handle(block, *reinterpret_cast<const HandleHeader*>(block));
}

}  // namespace fastkern
