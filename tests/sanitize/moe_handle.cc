#include "tests/sanitize/moe_handle.h"

#include <cstring>

namespace fastkern {

Counts known_counts(const Routing& r) {
    Counts all(r.num_ranks());
    for (u32 rank = 0; rank < r.num_ranks(); ++rank) {
        const auto append = [&, rank](const std::vector<i64>& table, u32 width) {
            for (u32 k = 0; k < width; ++k)
                all[rank].push_back(static_cast<u64>(table[rank * width + k]));
        };
        append(r.copies, r.num_experts);
        append(r.to_server, r.topology.servers);
        append(r.to_rank, r.num_ranks());
    }
    return all;
}

RouteBases first_rows(const Routing& r, const Counts& counts, u32 rank) {
    const u32 e = r.num_experts, n = r.topology.servers, m = r.topology.gpus_per_server;
    const u32 num_ranks = r.num_ranks(), local = rank % m, server = rank / m;
    const auto to_server = [&](u32 source, u32 s) { return counts[source][e + s]; };
    const auto to_rank = [&](u32 source, u32 d) { return counts[source][e + n + d]; };
    RouteBases b;
    std::vector<u64> used(num_ranks, 0);
    for (u32 x = 0; x < e; ++x) {
        u64 before = used[r.owner[x]], all = 0;
        for (u32 source = 0; source < num_ranks; ++source) {
            if (source < rank) before += counts[source][x];
            all += counts[source][x];
        }
        b.slot.push_back(before);
        used[r.owner[x]] += (all + r.alignment - 1) / r.alignment * r.alignment;
    }
    u64 listed = 0, returned = 0, partials = 0;
    for (u32 d = 0; d < num_ranks; ++d) {
        u64 before = 0;
        for (u32 source = 0; source < rank; ++source) before += to_rank(source, d);
        b.window.push_back(before);
        b.list.push_back(listed);
        if (d / m == server)
            listed += to_rank(rank, d);
        else if (d % m == local)
            listed += to_server(rank, d / m);
    }
    for (u32 s = 0; s < n; ++s) {
        b.returned.push_back(returned);
        if (s != server) returned += to_server(rank, s);
    }
    for (u32 d = 0; d < m; ++d) {
        b.partial.push_back(partials);
        if (d != local) partials += to_rank(rank, server * m + d);
    }
    return b;
}

std::vector<u64> empty_handle(const Routing& r, const Plan& plan, const Counts& counts, u32 rank) {
    const u32 n = r.topology.servers, m = r.topology.gpus_per_server, server = rank / m;
    HandleHeader h{};
    h.magic = kHandleMagic;
    h.plan_row_bytes = plan.row_bytes;
    h.num_tokens = r.num_tokens(rank);
    for (u32 s = 0; s < n; ++s) {
        if (s != server) h.pack_rows += counts[rank][r.num_experts + s];
        if (s != server) h.receive_rows += plan.traffic.rail_rows(s, server, rank % m);
    }
    for (u32 d = 0; d < r.num_ranks(); ++d) {
        if (d / m == server) h.pack_rows += counts[rank][r.num_experts + n + d];
        h.window_rows += counts[d][r.num_experts + n + rank];
    }
    h.num_recv_rows = r.rows[rank].size();
    h.rank = rank;
    h.num_ranks = r.num_ranks();
    h.servers = n;
    h.gpus_per_server = m;
    h.topk = r.topk;
    h.num_experts = r.num_experts;
    h.layout = r.layout;
    h.num_arrivals = n > 1 && m > 1 ? h.num_ranks * plan.options.chunk_slots : 0;
    h.handle_bytes = handle_layout(h).bytes;
    std::vector<u64> handle(h.handle_bytes / 8, 0xDDDDDDDDDDDDDDDDull);
    std::memcpy(handle.data(), &h, sizeof h);
    return handle;
}

}  // namespace fastkern
