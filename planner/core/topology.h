// What the planner knows of the machine, and the integer costs that all decisions are made with.
#pragma once

#include <cstdint>

#include "planner/stage_table.h"

namespace fastkern {

using i64 = std::int64_t;

// Costs are quantised once, here, from the user's decimals; every later decision is integer
// arithmetic, so that all ranks reach the same plan on any machine.
struct Topology {
    u32 servers = 1;
    u32 gpus_per_server = 1;
    u64 scale_up_cost = 0;   // picoseconds per KiB and rank, inside a server
    u64 scale_out_cost = 0;  // picoseconds per KiB and rank, between servers
    u64 alpha_ps = 0;        // fixed cost of one put
    bool mesh = false;       // scale-up is a full mesh of links (B1 / (M - 1) each), not a switch
    bool cross_rail = true;  // a rank can put to any rank of another server, not only its peer

    u32 num_ranks() const { return servers * gpus_per_server; }
    bool same_server(u32 a, u32 b) const { return a / gpus_per_server == b / gpus_per_server; }
};

struct Options {
    u64 chunk_bytes = 128 * 1024;  // a put is cut into chunks of about this size
    u32 chunk_slots = 64;          // chunk flags per pair of ranks: chunks grow to fit
    u32 credit_lead = 1;  // chunks before the last one at which the next sender gets its credit
    bool explain = true;  // say how the policy was chosen, in Plan::why
};

// Picoseconds for `bytes` at a quantised cost, saturating at 2^63 - 1.
u64 transfer_ps(u64 bytes, u64 ps_per_kib);

// a * b / c without overflow of the product; c > 0 and the result fits.
inline u64 mul_div(u64 a, u64 b, u64 c) {
    return static_cast<u64>(static_cast<unsigned __int128>(a) * b / c);
}

inline u64 ceil_div(u64 a, u64 b) { return a / b + (a % b != 0); }

}  // namespace fastkern
