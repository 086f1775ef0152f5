#include "planner/core/server_puts.h"

namespace fastkern {

void collect_puts(const TableBuilder& t, bool out, ServerPuts* result) {
    const Plan& plan = t.plan;
    const u32 n = t.traffic.servers, m = t.num_local;
    Vector<u32> parts(n, 0), chunks(n, 0), occurrences(n, 0);
    Vector<u64> staged(m, 0), remote(n, 0);
    for (const Put& p : plan.order)
        if ((out ? p.sender : p.receiver) == t.server) ++parts[out ? p.receiver : p.sender];
    result->puts.reserve(n);
    for (Vector<u64>* rows : {&result->part_begin, &result->part_rows, &result->staging_row})
        rows->reserve(std::size_t{n} * m);
    for (const Put& p : plan.order) {
        const bool ours = (out ? p.sender : p.receiver) == t.server;
        const u64 here = ours || out || plan.moe() ? plan.rail_part(p, t.local).second : 0;
        if (ours) {
            ServerPut s{};
            s.put = &p;
            s.other = out ? p.receiver : p.sender;
            s.rail = result->part_rows.size();
            u64 longest = 0;
            for (u32 l = 0; l < m; ++l) {
                const auto [begin, rows] = plan.rail_part(p, l);
                result->part_begin.push_back(begin);
                result->part_rows.push_back(rows);
                result->staging_row.push_back(staged[l]);
                staged[l] += rows;
                longest = std::max(longest, rows);
            }
            if (!longest) {  // a part so thin that it rounds to nothing on every rail
                result->part_begin.resize(s.rail);
                result->part_rows.resize(s.rail);
                result->staging_row.resize(s.rail);
                continue;
            }
            const u64 rail_rows = t.traffic.longest_rail(p.sender, p.receiver);
            s.chunk_rows = t.chunk_rows(rail_rows, parts[s.other]);
            s.num_chunks = static_cast<u32>(ceil_div(longest, s.chunk_rows));
            s.first_chunk = chunks[s.other];
            chunks[s.other] += s.num_chunks;
            s.occurrence = here ? ++occurrences[s.other] : 0;
            s.remote_row = remote[s.other];
            result->puts.push_back(s);
        }
        remote[out ? p.receiver : p.sender] += here;
    }
}

void gate_put(TableBuilder* t, const ServerPut& s, u32 peer, Stream* stream) {
    const bool credits = t->plan.policy != kDirect;
    stream->gate_slot = credits ? t->flags.credit(peer) : t->flags.ready(peer);
    stream->gate_value = credits ? s.occurrence : 1;
}

void let_send(TableBuilder* t, const ServerPut& s, u32 peer, u32 previous) {
    if (t->plan.policy == kDirect)
        t->add_post(peer, t->flags.ready(t->rank), 1);
    else if (previous == kNoSlot)
        t->add_post(peer, t->flags.credit(t->rank), s.occurrence);
    else
        t->add_credit(previous, peer, s.occurrence);
}

}  // namespace fastkern
